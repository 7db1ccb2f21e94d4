//! Containers in a guest without GPUs: output, exit codes, errors and isolation.

use firstlight::container::Probe;
use firstlight_e2e::{Scenario, Shared, lab};
use firstlight_lab::cache_root;
use firstlight_lab::toolbox::registry;
use firstlight_oci::pull::{Credentials, PullRequest, RetryPolicy, pull};
use firstlight_progress::Progress;

static GUEST: Shared = Shared::new(|| Scenario::gpus(0));

#[test]
fn exit_code_stdout_and_stderr_are_returned() {
    let container = GUEST.guest().run(&["/bin/sh", "-c", "echo out; echo err >&2; exit 7"], &[]);
    assert_eq!(
        (container.exit_code, container.stdout.as_str(), container.stderr.as_str()),
        (Some(7), "out\n", "err\n")
    );
}

#[test]
fn missing_command_is_named_in_the_error() {
    let container = GUEST.guest().run(&["/bin/no-such-program"], &[]);
    let error = container.error.expect("the container cannot run");
    assert!(error.contains("/bin/no-such-program") && container.command_not_found, "{error}");
}

#[test]
fn long_output_is_complete() {
    let container = GUEST.guest().run(&["/bin/sh", "-c", "seq 1 40000"], &[]);
    let lines: Vec<_> = container.stdout.lines().collect();
    assert_eq!((lines.len(), lines.first().copied(), lines.last().copied()), (40_000, Some("1"), Some("40000")));
}

#[test]
fn container_cannot_see_the_guest() {
    let script = "ls /run/firstlight /run/kata-containers 2>&1; cat /proc/1/comm; cat /proc/self/cgroup; \
        mknod /dev/log0 c 1 11; head -c 1 /dev/log0 2>&1; mknod /dev/mem0 c 1 1; head -c 1 /dev/mem0 2>&1; true";
    let out = &GUEST.guest().run(&["/bin/sh", "-c", script], &[]).stdout;
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
    let container = GUEST.guest().run_image(&out, &["/bin/sh", "-c", "echo pulled; id -u"], &[]);
    assert_eq!((container.exit_code, container.stdout.as_str()), (Some(0), "pulled\n0\n"));
}

#[test]
fn guest_without_gpus_runs_containers() {
    let guest = GUEST.guest();
    let container = guest.probe(&[]);
    assert_eq!(container.exit_code, Some(0));
    assert_eq!(Probe::read(&container.stdout).denied_open(&[]), Some(true), "{}", container.stdout);
    let record = guest.record();
    assert_eq!(record.mode.as_ref().unwrap().name, "cpu");
    assert!(record.gpus.is_empty());
}
