//! Device access of containers, checked with real opens.

use std::fs;

use crate::support::{Agent, code, spec, with_agent};
use firstlight_agent_api::oci;
use ttrpc::Code;

/// Creates a node `$1:$2` and prints the open modes that the device filter allows.
const PROBE: &str = r#"probe() {
  mknod /dev/probe c $1 $2
  for way in r w rw; do
    case $way in
      r) error=$( { : < /dev/probe; } 2>&1 ) ;;
      w) error=$( { : > /dev/probe; } 2>&1 ) ;;
      rw) error=$( { : <> /dev/probe; } 2>&1 ) ;;
    esac
    case "$error" in *"Operation not permitted"*) ;; *) printf "%s " $way ;; esac
  done
  echo
}
"#;

fn rule(allow: bool, major: i64, minor: i64, access: &str) -> oci::LinuxDeviceCgroup {
    let (kind, access) = ("c".into(), access.into());
    oci::LinuxDeviceCgroup {
        Allow: allow,
        Type: kind,
        Major: major,
        Minor: minor,
        Access: access,
        ..Default::default()
    }
}

fn spec_with_rules(agent: &Agent, id: &str, script: &str, rules: Vec<oci::LinuxDeviceCgroup>) -> oci::Spec {
    let mut spec = spec(&agent.root(id), script);
    spec.Linux.mut_or_insert_default().Resources.mut_or_insert_default().Devices = rules;
    spec
}

/// Returns the open modes that a container with these rules has for a device.
async fn open_modes(agent: &Agent, id: &str, rules: Vec<oci::LinuxDeviceCgroup>, device: &str) -> String {
    let script = format!("{PROBE} probe {device}");
    agent.create(spec_with_rules(agent, id, &script, rules), id).await.unwrap();
    agent.begin(id).await;
    let output = agent.output(id, "").await;
    assert_eq!(agent.wait(id, "").await.unwrap(), 0, "{output}");
    agent.remove(id).await.unwrap();
    output.trim().to_owned()
}

/// Returns the number of BPF programs that a process has open.
fn programs(pid: u32) -> usize {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    open.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("bpf-prog"))).count()
}

#[test]
fn tun_opens_only_if_listed() {
    with_agent(async |agent| {
        agent.sandbox().await;
        assert_eq!(open_modes(&agent, "c1", vec![], "10 200").await, "");
        // The kernel need not have the driver: only EPERM counts.
        assert_eq!(open_modes(&agent, "c2", vec![rule(true, 10, 200, "rw")], "10 200").await, "r w rw");
        assert_eq!(open_modes(&agent, "c3", vec![], "1 3").await, "r w rw");
    });
}

#[test]
fn guest_console_is_denied_and_terminals_work() {
    with_agent(async |agent| {
        agent.sandbox().await;
        assert_eq!(open_modes(&agent, "c1", vec![], "5 1").await, "");
        let requested = vec![rule(true, 5, 1, "rwm"), rule(true, 5, -1, "rwm")];
        assert_eq!(open_modes(&agent, "c2", requested.clone(), "5 1").await, "");
        assert_eq!(open_modes(&agent, "c3", requested, "5 2").await, "r w rw");

        let script = "echo from the terminal > /dev/console; ls -l /dev/console | grep -c '136, '";
        let mut terminal = spec(&agent.root("c4"), script);
        terminal.Process.mut_or_insert_default().Terminal = true;
        agent.create(terminal, "c4").await.unwrap();
        agent.begin("c4").await;
        assert_eq!(agent.output("c4", "").await, "from the terminal\r\n1\r\n");
        assert_eq!(agent.wait("c4", "").await.unwrap(), 0);
    });
}

#[test]
fn read_write_open_needs_both_bits() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let zero = |allow, access| rule(allow, 1, 5, access);
        assert_eq!(open_modes(&agent, "c1", vec![zero(false, "w")], "1 5").await, "r");
        assert_eq!(open_modes(&agent, "c2", vec![zero(false, "rw"), zero(true, "r")], "1 5").await, "r");
        let both = vec![zero(false, "rw"), zero(true, "r"), zero(true, "w")];
        assert_eq!(open_modes(&agent, "c3", both, "1 5").await, "r w rw");
    });
}

#[test]
fn containers_with_equal_rules_share_one_program() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let runtime = agent.pids()[1];
        for id in ["c1", "c2", "c3"] {
            agent.run(id, "mknod /dev/g c 1 11; while :; do sleep 1; done").await;
        }
        assert_eq!(programs(runtime), 1);
        agent.remove("c1").await.unwrap();
        let open = "(: > /dev/g) 2>&1 | grep -o 'Operation not permitted'";
        assert_eq!(agent.shell("c2", "e1", open).await.0, "Operation not permitted\n");
        let first = fs::read_to_string(agent.group("c2", "cgroup.procs")).unwrap();
        let first: u32 = first.split_whitespace().next().unwrap().parse().unwrap();
        assert_eq!(programs(first), 0, "no container inherits the program's descriptor");
        assert_eq!(open_modes(&agent, "c4", vec![rule(true, 10, 229, "rw")], "10 229").await, "r w rw");
        assert_eq!(programs(runtime), 2);
    });
}

#[test]
fn containers_in_one_cgroup_are_restricted_by_both_rule_lists() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let wait = "while :; do sleep 1; done";
        agent.run("c1", wait).await;
        let mut same = spec(&agent.root("c2"), wait);
        same.Linux.mut_or_insert_default().CgroupsPath = "/firstlight-test/c1".into();
        agent.create(same, "c2").await.unwrap();
        agent.begin("c2").await;
        let mut wider =
            spec_with_rules(&agent, "c3", &format!("{PROBE} probe 10 200"), vec![rule(true, 10, 200, "rw")]);
        wider.Linux.mut_or_insert_default().CgroupsPath = "/firstlight-test/c1".into();
        agent.create(wider, "c3").await.unwrap();
        agent.begin("c3").await;
        assert_eq!(agent.output("c3", "").await.trim(), "");
        assert!(!agent.group("c3", "").exists());
    });
}

#[test]
fn long_rule_lists_are_enforced_and_too_long_ones_refused() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let many = |count: i64| (0..count).map(|minor| rule(minor % 2 == 0, 300 + minor % 7, minor, "rw")).collect();
        assert_eq!(open_modes(&agent, "c1", many(1000), "306 6").await, "r w rw");
        assert_eq!(open_modes(&agent, "c2", many(1000), "300 7").await, "");
        let (kind, text) = code(agent.create(spec_with_rules(&agent, "c3", "true", many(100_000)), "c3").await);
        assert!(kind == Code::INVALID_ARGUMENT && text.contains("the limit of 1024"), "{text}");
        assert!(!agent.group("c3", "").exists());

        let mut negative = spec(&agent.root("c4"), "true");
        let node = oci::LinuxDevice { Path: "/dev/x".into(), Type: "c".into(), Major: -1, ..Default::default() };
        negative.Linux.mut_or_insert_default().Devices.push(node);
        let (kind, text) = code(agent.create(negative, "c4").await);
        assert!(kind == Code::INVALID_ARGUMENT && text.contains("number out of range"), "{text}");
    });
}

#[test]
fn failed_create_leaves_no_cgroup() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let mut broken = spec(&agent.root("c1"), "true");
        let nowhere = oci::Mount {
            destination: "/tmp/x".into(),
            source: "/nowhere".into(),
            type_: "bind".into(),
            ..Default::default()
        };
        broken.Mounts.push(nowhere);
        code(agent.create(broken, "c1").await);
        assert!(!agent.group("c1", "").exists());
        agent.run("c1-again", "exit 7").await;
        assert_eq!(agent.wait("c1-again", "").await.unwrap(), 7);
    });
}
