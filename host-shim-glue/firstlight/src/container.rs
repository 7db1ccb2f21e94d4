//! OCI configuration of the container of `firstlight run`, as a shim sends it.

use firstlight_agent_api::oci::{Linux, LinuxCapabilities, LinuxNamespace, Mount, Process, Root, Spec, User};
use firstlight_oci::Image;

use crate::agent::SHARED;

/// Default capabilities of containers. `CAP_MKNOD` is included on purpose: the
/// device cgroup, not its absence, denies access to other GPUs.
const CAPABILITIES: &[&str] = &[
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Destination, type, source, options.
const MOUNTS: &[(&str, &str, &str, &[&str])] = &[
    ("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
    ("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ("/dev/pts", "devpts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
    ("/dev/shm", "bind", "/run/kata-containers/sandbox/shm", &["rbind"]),
    ("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ("/sys/fs/cgroup", "cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
];

const MASKED: &[&str] =
    &["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/sched_debug", "/proc/timer_list", "/sys/firmware"];

const READ_ONLY: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Number of minors of `/dev/nvidiaN` that the probe tries to open.
const PROBED_MINORS: u32 = 8;

/// Prefix of the probe's output lines that report an open.
const PROBE: &str = "open char 195:";

/// Returns the probe: a command that lists the container's GPU nodes and tries to
/// open every GPU, granted or not. The nodes are created in `/dev`: on the root,
/// which is mounted `nodev`, opens fail regardless of the device cgroup.
#[must_use]
pub fn probe_command() -> Vec<String> {
    let script = format!(
        r#"echo "container: kernel $(uname -r), $(id -u -n 2>/dev/null || id -u) in $(hostname)"
for node in /dev/nvidia[0-9]*; do
  [ -e "$node" ] && echo "sees $node: $(head -n 1 "$node")"
done
minor=0
while [ $minor -lt {PROBED_MINORS} ]; do
  mknod /dev/probe$minor c 195 $minor
  if why=$( {{ : < /dev/probe$minor; }} 2>&1 ); then
    echo "{PROBE}$minor: opened"
  else
    echo "{PROBE}$minor: refused: ${{why##*: }}"
  fi
  minor=$((minor + 1))
done"#
    );
    vec!["/bin/sh".into(), "-c".into(), script]
}

/// Result of the probe: minors that opened and minors that the device
/// cgroup denied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Probe {
    /// Minors that opened.
    pub opened: Vec<u32>,
    /// Minors that failed with `Operation not permitted`.
    pub refused: Vec<u32>,
    /// Minors that failed with another error.
    pub other: Vec<u32>,
}

impl Probe {
    /// Parses the probe's output.
    #[must_use]
    pub fn read(stdout: &str) -> Self {
        let mut probe = Self::default();
        for line in stdout.lines() {
            let Some((minor, result)) = line.strip_prefix(PROBE).and_then(|rest| rest.split_once(": ")) else {
                continue;
            };
            let Ok(minor) = minor.parse() else { continue };
            match result {
                "opened" => probe.opened.push(minor),
                "refused: Operation not permitted" => probe.refused.push(minor),
                _ => probe.other.push(minor),
            }
        }
        probe
    }

    /// Returns whether exactly the `granted` minors opened and the device cgroup
    /// denied all others; `None` if the output has no results.
    #[must_use]
    pub fn denied_open(&self, granted: &[u32]) -> Option<bool> {
        if self.opened.is_empty() && self.refused.is_empty() && self.other.is_empty() {
            return None;
        }
        let mut granted = granted.to_vec();
        granted.sort_unstable();
        Some(self.opened == granted && self.other.is_empty() && !self.refused.is_empty())
    }
}

/// Adds default values of `PATH` and `HOME`.
fn with_defaults(mut env: Vec<String>) -> Vec<String> {
    for (name, value) in [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root")] {
        if !env.iter().any(|entry| entry.split_once('=').is_some_and(|(n, _)| n == name)) {
            env.push(format!("{name}={value}"));
        }
    }
    env
}

/// Builds the OCI configuration: `command` in `image`, with the CDI devices `devices`.
#[must_use]
pub fn spec(id: &str, image: &Image, command: &[String], devices: &[String]) -> Spec {
    let strings = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let capabilities = strings(CAPABILITIES);
    let mut spec = Spec {
        Version: "1.2.0".into(),
        Hostname: id.into(),
        Process: Some(Process {
            User: Some(User::default()).into(),
            Args: command.to_vec(),
            Env: with_defaults(image.environment()),
            Cwd: image.working_directory().unwrap_or_else(|| "/".into()),
            Capabilities: Some(LinuxCapabilities {
                Bounding: capabilities.clone(),
                Effective: capabilities.clone(),
                Permitted: capabilities,
                ..LinuxCapabilities::default()
            })
            .into(),
            NoNewPrivileges: true,
            ..Process::default()
        })
        .into(),
        Root: Some(Root { Path: format!("{SHARED}{id}/rootfs"), Readonly: false, ..Root::default() }).into(),
        Mounts: MOUNTS
            .iter()
            .map(|(destination, kind, source, options)| Mount {
                destination: (*destination).into(),
                source: (*source).into(),
                type_: (*kind).into(),
                options: strings(options),
                ..Mount::default()
            })
            .collect(),
        Linux: Some(Linux {
            CgroupsPath: format!("/firstlight/{id}"),
            // As Kata's shims send them: no network namespace, because the VM is the sandbox.
            Namespaces: ["ipc", "uts", "mount", "pid"]
                .iter()
                .map(|kind| LinuxNamespace { Type: (*kind).into(), ..LinuxNamespace::default() })
                .collect(),
            MaskedPaths: strings(MASKED),
            ReadonlyPaths: strings(READ_ONLY),
            ..Linux::default()
        })
        .into(),
        ..Spec::default()
    };
    spec.Annotations.insert("io.katacontainers.pkg.oci.container_type".into(), "single_container".into());
    for (at, device) in devices.iter().enumerate() {
        spec.Annotations.insert(format!("cdi.k8s.io/vfio{at}"), format!("nvidia.com/gpu={device}"));
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "container: kernel 6.12\nsees /dev/nvidia0: 0000:01:00.0\nopen char 195:0: opened\n\
        open char 195:1: refused: Operation not permitted\nopen char 195:x: opened\nopen char 195:2: refused: No such device\n";

    #[test]
    fn probe_parses_the_scripts_output() {
        let probe = Probe::read(OUTPUT);
        assert_eq!(probe, Probe { opened: vec![0], refused: vec![1], other: vec![2] });
        assert_eq!(probe.denied_open(&[0]), Some(false), "minor 2 failed, but not by the device cgroup");
        let clean = Probe { other: vec![], ..probe };
        assert_eq!(clean.denied_open(&[0]), Some(true));
        assert_eq!(clean.denied_open(&[]), Some(false), "a GPU opened that was not granted");
        assert_eq!(clean.denied_open(&[0, 1]), Some(false), "a granted GPU did not open");
        assert_eq!(Probe::read("hello\n").denied_open(&[0]), None);
    }

    #[test]
    fn image_without_path_and_home_gets_defaults() {
        assert!(with_defaults(vec!["A=b".into()]).iter().any(|e| e.starts_with("PATH=")));
        assert_eq!(with_defaults(vec!["PATH=/x".into(), "HOME=/h".into()]), ["PATH=/x", "HOME=/h"]);
    }
}
