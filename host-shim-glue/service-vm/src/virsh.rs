//! Runs virsh.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Name;

/// How to reach libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Virsh {
    /// The virsh program.
    pub program: PathBuf,
    /// The connection URI: `qemu:///system`.
    pub uri: String,
    /// Timeout of one command.
    pub timeout: Duration,
}

/// Why a virsh command failed.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// virsh cannot be started.
    #[error("failed to {step} domain {domain}: failed to run {}: {source}: install libvirt-clients, or name it with --virsh", program.display())]
    Spawn {
        /// The domain.
        domain: String,
        /// The operation.
        step: &'static str,
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// virsh reported an error.
    #[error("failed to {step} domain {domain}: libvirt reports: {message}{}", advice(message).map(|it| format!(": {it}")).unwrap_or_default())]
    Failed {
        /// The domain.
        domain: String,
        /// The operation.
        step: &'static str,
        /// The message, in one line.
        message: String,
    },
    /// virsh timed out.
    #[error(
        "failed to {step} domain {domain}: libvirt at {uri} did not answer within {} s: look at its log (journalctl -u libvirtd) and \
         whether it took effect: firstlight service-vm status",
        elapsed.as_secs()
    )]
    TimedOut {
        /// The domain.
        domain: String,
        /// The operation.
        step: &'static str,
        /// The URI.
        uri: String,
        /// The timeout.
        elapsed: Duration,
    },
}

/// Known messages of libvirt and QEMU, with remedies. The first match counts.
const ADVICE: &[(&str, &str)] = &[
    ("Failed to connect socket", "is libvirtd running (systemctl start libvirtd), and is --connect right?"),
    ("authentication", "run it as root, or as a member of the group libvirt"),
    ("is not viable", "another function of the group has a driver of the host: firstlight service-vm status names it"),
    ("Please ensure all devices within the iommu_group", "firstlight service-vm status names the function"),
    ("Verify all devices in group", "firstlight service-vm status names the function that is not on vfio-pci"),
    ("is in use by driver QEMU", "that domain has functions of the same IOMMU group: stop it first"),
    ("vhost-vsock", "modprobe vhost_vsock on the host"),
    ("guest cid", "another VM has this context id: choose another with --cid"),
    ("Address already in use", "another VM has this context id: choose another with --cid"),
    ("could not find capabilities", "libvirt's QEMU for x86_64 is missing: install qemu-system-x86"),
    ("Cannot find suitable emulator", "install qemu-system-x86, or name QEMU with --emulator"),
    ("KVM", "switch VT-x or SVM on in the firmware; --accelerator tcg does without and is slow"),
    ("huge", "reserve huge pages: sysctl vm.nr_hugepages=N of 2 MiB each"),
    ("annot allocate memory", "the host has too little memory, or too little of it may be locked"),
    (
        "already exists with uuid",
        "there is another domain of this name that was not created by firstlight: choose another with --name",
    ),
    ("Permission denied", "QEMU's user has to be able to read the file and to enter each directory above it"),
];

fn advice(message: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(known, _)| message.contains(known)).map(|(_, advice)| *advice)
}

/// Maximum output that is read, in bytes; a domain's XML has a few kilobytes.
const MAX_LENGTH: u64 = 4 << 20;

/// Polling interval.
const PAUSE: Duration = Duration::from_millis(5);

/// Reads a stream on a thread, so that the command never blocks on a full pipe.
fn reader(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stream) = stream {
            let _ = stream.take(MAX_LENGTH).read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for the command; kills it and returns `None` after the timeout.
fn ended(child: &mut Child, timeout: Duration) -> Option<bool> {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.success()),
            Ok(None) if begin.elapsed() < timeout => std::thread::sleep(PAUSE),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

/// Joins libvirt's message into one line, without the prefixes.
fn message(text: &str) -> String {
    let lines = text.lines().map(|line| line.trim().trim_start_matches("error:").trim());
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(": ").chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

impl Virsh {
    /// Runs a virsh command about `domain` and returns its output.
    ///
    /// # Errors
    /// virsh cannot be started, reports an error, or times out.
    pub fn run(&self, domain: &Name, step: &'static str, arguments: &[&str]) -> Result<String, VirshError> {
        let domain = domain.to_string();
        let mut command = Command::new(&self.program);
        command.args(["--quiet", "--connect", &self.uri]).args(arguments);
        // The messages are parsed, so they have to be untranslated.
        command.env("LC_ALL", "C").env_remove("LANGUAGE").env_remove("VIRSH_DEBUG");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| VirshError::Spawn {
            domain: domain.clone(),
            step,
            program: self.program.clone(),
            source,
        })?;
        let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
        let Some(good) = ended(&mut child, self.timeout) else {
            return Err(VirshError::TimedOut { domain, step, uri: self.uri.clone(), elapsed: self.timeout });
        };
        let (said, complained) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        if good { Ok(said) } else { Err(VirshError::Failed { domain, step, message: message(&complained) }) }
    }
}

impl VirshError {
    /// Whether libvirt's message contains a text.
    #[must_use]
    pub fn message_contains(&self, part: &str) -> bool {
        matches!(self, Self::Failed { message, .. } if message.contains(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn virsh(dir: &std::path::Path, script: &str) -> Virsh {
        let program = dir.join("virsh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Virsh { program, uri: "qemu:///system".into(), timeout: Duration::from_millis(2000) }
    }

    #[test]
    fn virsh_error_names_domain_operation_message_and_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let name = "fabric".parse().unwrap();
        let script = "echo \"error: Failed to start domain\nerror: PCI device 0000:03:00.0 is in use by driver QEMU, \
                      domain tenant\" >&2; exit 1";
        let error = virsh(dir.path(), script).run(&name, "start", &["start"]).unwrap_err().to_string();
        let whole = "failed to start domain fabric: libvirt reports: Failed to start domain: PCI device 0000:03:00.0 is in \
                     use by driver QEMU, domain tenant: that domain has functions of the same IOMMU group: stop it first";
        assert_eq!(error, whole);
    }

    #[test]
    fn virsh_timeout_and_long_output_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let name = "fabric".parse().unwrap();
        let much = virsh(dir.path(), "head -c 300000 /dev/zero >&2; echo \"$LC_ALL $*\"");
        assert_eq!(much.run(&name, "x", &["a"]).unwrap(), "C --quiet --connect qemu:///system a\n");
        let mut silent = virsh(dir.path(), "exec sleep 100");
        silent.timeout = Duration::from_millis(50);
        let error = silent.run(&name, "start", &[]).unwrap_err().to_string();
        assert!(error.contains("libvirt at qemu:///system did not answer"), "{error}");
        silent.program = "/nowhere/virsh".into();
        let error = silent.run(&name, "start", &[]).unwrap_err().to_string();
        assert!(error.contains("install libvirt-clients"), "{error}");
    }
}
