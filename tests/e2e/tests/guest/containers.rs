//! Containers: output, exit codes, errors and isolation.

use firstlight_e2e::{Scenario, lab};
use firstlight_lab::cache_root;
use firstlight_lab::toolbox::registry;
use firstlight_oci::pull::{Credentials, PullRequest, RetryPolicy, pull};
use firstlight_progress::Progress;

#[test]
fn exit_code_stdout_and_stderr_are_returned() {
    let report = Scenario::gpus(0).command(&["/bin/sh", "-c", "echo out; echo err >&2; exit 7"]).go().unwrap();
    let container = &report.container;
    assert_eq!(
        (container.exit_code, container.stdout.as_str(), container.stderr.as_str()),
        (Some(7), "out\n", "err\n")
    );
    assert!(!report.succeeded());
}

#[test]
fn missing_command_is_named_in_the_error() {
    let report = Scenario::gpus(0).command(&["/bin/no-such-program"]).go().unwrap();
    let error = report.container.error.expect("the container cannot run");
    assert!(error.contains("/bin/no-such-program"), "{error}");
}

#[test]
fn long_output_is_complete() {
    let report = Scenario::gpus(0).command(&["/bin/sh", "-c", "seq 1 40000"]).go().unwrap();
    let lines: Vec<_> = report.container.stdout.lines().collect();
    assert_eq!((lines.len(), lines.first().copied(), lines.last().copied()), (40_000, Some("1"), Some("40000")));
}

#[test]
fn request_for_a_missing_gpu_is_rejected_with_a_list_of_gpus() {
    let report = Scenario::gpus(1).request(&["7"]).go().unwrap();
    let error = report.container.error.expect("there is no GPU 7");
    assert!(error.contains("no GPU 7") && error.contains("0000:01:00.0"), "{error}");
}

#[test]
fn container_cannot_see_the_guest() {
    let script = "ls /run/firstlight /run/kata-containers 2>&1; cat /proc/1/comm; cat /proc/self/cgroup; \
        mknod /dev/log0 c 1 11; head -c 1 /dev/log0 2>&1; mknod /dev/mem0 c 1 1; head -c 1 /dev/mem0 2>&1; true";
    let report = Scenario::gpus(0).command(&["/bin/sh", "-c", script]).go().unwrap();
    let out = &report.container.stdout;
    assert!(out.contains("/run/firstlight: No such file"), "{out}");
    assert!(out.contains("0::/\n"), "its own cgroup is the root of its cgroup namespace: {out}");
    assert_eq!(
        out.matches("Operation not permitted").count(),
        2,
        "neither the kernel log nor memory can be opened: {out}"
    );
}

#[test]
fn image_pulled_from_a_registry_runs() {
    let (lab, dir) = (lab(), tempfile::tempdir().unwrap());
    let registry = registry(&cache_root().unwrap(), false, Progress::stderr("guest")).unwrap();
    registry.push(&lab.busybox_image, "tools/busybox", "1").unwrap();
    let out = dir.path().join("image");
    let request = PullRequest {
        source: &format!("docker://{}/tools/busybox:1", registry.host()).parse().unwrap(),
        out: &out,
        platform: &"linux/amd64".parse().unwrap(),
        plain_http: false,
        credentials: &Credentials::default(),
        retry: RetryPolicy::default(),
        progress: Progress::stderr("guest"),
    };
    pull(&request).unwrap();
    let scenario = Scenario { image: Some(out), ..Scenario::gpus(0).command(&["/bin/sh", "-c", "echo pulled; id -u"]) };
    let report = scenario.go().unwrap();
    assert_eq!((report.container.exit_code, report.container.stdout.as_str()), (Some(0), "pulled\n0\n"));
}
