//! libvirt, by its command.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Name;

/// How libvirt is spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Virsh {
    /// The command.
    pub program: PathBuf,
    /// Which libvirt: `qemu:///system`.
    pub uri: String,
    /// How long one command may take.
    pub patience: Duration,
}

/// Why libvirt did not do it.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// There is no such command.
    #[error("domain {domain}: {step}: cannot run {}: {source}: install libvirt-clients, or name it with --virsh", program.display())]
    Spawn {
        /// The domain.
        domain: String,
        /// What was to be done.
        step: &'static str,
        /// The command.
        program: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It said no.
    #[error("domain {domain}: {step}: libvirt says: {words}{}", advice(words).map(|it| format!(": {it}")).unwrap_or_default())]
    Said {
        /// The domain.
        domain: String,
        /// What was to be done.
        step: &'static str,
        /// Its words, in one line.
        words: String,
    },
    /// It said nothing.
    #[error(
        "domain {domain}: {step}: no answer of libvirt at {uri} in {} s: look at its log (journalctl -u libvirtd) and \
         whether {step} came about: firstlight service-vm status",
        elapsed.as_secs()
    )]
    Silent {
        /// The domain.
        domain: String,
        /// What was to be done.
        step: &'static str,
        /// Which libvirt.
        uri: String,
        /// How long it was waited for.
        elapsed: Duration,
    },
}

/// What libvirt and QEMU are known to say, and what helps. The first that fits.
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
    ("already exists with uuid", "there is another domain of this name that is not ours: choose another with --name"),
    ("Permission denied", "QEMU's user has to be able to read the file and to enter each directory above it"),
];

fn advice(words: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(known, _)| words.contains(known)).map(|(_, advice)| *advice)
}

/// The most of an answer that is read; a domain's XML has a few kilobytes.
const LONGEST: u64 = 4 << 20;

/// Between two looks at a command that runs.
const PAUSE: Duration = Duration::from_millis(5);

/// What a command says, read beside it so that it never waits for us.
fn reader(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stream) = stream {
            let _ = stream.take(LONGEST).read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for a command's end; none if it takes too long and was killed.
fn ended(child: &mut Child, patience: Duration) -> Option<bool> {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.success()),
            Ok(None) if begin.elapsed() < patience => std::thread::sleep(PAUSE),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

/// libvirt's words in one line, without what stands before each.
fn words(text: &str) -> String {
    let lines = text.lines().map(|line| line.trim().trim_start_matches("error:").trim());
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(": ").chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

impl Virsh {
    /// Runs a command of virsh about `domain`; what it prints.
    ///
    /// # Errors
    /// There is no virsh, it says no, or takes too long.
    pub fn run(&self, domain: &Name, step: &'static str, arguments: &[&str]) -> Result<String, VirshError> {
        let domain = domain.to_string();
        let mut command = Command::new(&self.program);
        command.args(["--quiet", "--connect", &self.uri]).args(arguments);
        // Its words are read, by us and by whoever looks for them.
        command.env("LC_ALL", "C").env_remove("LANGUAGE").env_remove("VIRSH_DEBUG");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| VirshError::Spawn {
            domain: domain.clone(),
            step,
            program: self.program.clone(),
            source,
        })?;
        let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
        let Some(good) = ended(&mut child, self.patience) else {
            return Err(VirshError::Silent { domain, step, uri: self.uri.clone(), elapsed: self.patience });
        };
        let (said, complained) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        if good { Ok(said) } else { Err(VirshError::Said { domain, step, words: words(&complained) }) }
    }
}

impl VirshError {
    /// Whether libvirt's words have this in them.
    #[must_use]
    pub fn says(&self, part: &str) -> bool {
        matches!(self, Self::Said { words, .. } if words.contains(part))
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
        Virsh { program, uri: "qemu:///system".into(), patience: Duration::from_millis(2000) }
    }

    #[test]
    fn an_error_names_domain_step_words_and_what_helps() {
        let dir = tempfile::tempdir().unwrap();
        let name = "fabric".parse().unwrap();
        let script = "echo \"error: Failed to start domain\nerror: PCI device 0000:03:00.0 is in use by driver QEMU, \
                      domain tenant\" >&2; exit 1";
        let error = virsh(dir.path(), script).run(&name, "start it", &["start"]).unwrap_err().to_string();
        let whole = "domain fabric: start it: libvirt says: Failed to start domain: PCI device 0000:03:00.0 is in \
                     use by driver QEMU, domain tenant: that domain has functions of the same IOMMU group: stop it first";
        assert_eq!(error, whole);
    }

    #[test]
    fn who_says_nothing_or_much_is_no_trouble() {
        let dir = tempfile::tempdir().unwrap();
        let name = "fabric".parse().unwrap();
        let much = virsh(dir.path(), "head -c 300000 /dev/zero >&2; echo \"$LC_ALL $*\"");
        assert_eq!(much.run(&name, "x", &["a"]).unwrap(), "C --quiet --connect qemu:///system a\n");
        let mut silent = virsh(dir.path(), "exec sleep 100");
        silent.patience = Duration::from_millis(50);
        let error = silent.run(&name, "start it", &[]).unwrap_err().to_string();
        assert!(error.contains("no answer of libvirt at qemu:///system"), "{error}");
        silent.program = "/nowhere/virsh".into();
        let error = silent.run(&name, "start it", &[]).unwrap_err().to_string();
        assert!(error.contains("install libvirt-clients"), "{error}");
    }
}
