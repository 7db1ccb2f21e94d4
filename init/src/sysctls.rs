//! Sysctl tables, with the reason of each setting.

use std::fs;
use std::io;

use crate::root::Root;

/// A setting: the sysctl name (path below `/proc/sys` with `.` for `/`) and the value.
pub type Setting = (&'static str, &'static str);

/// Settings for containers and GPU programs.
pub const SETTINGS: &[Setting] = &[
    // Reboot at once on a panic: the VMM sees the end of the VM instead of a guest that hangs.
    ("kernel.panic", "-1"),
    // Restrict access to other users' symlinks, FIFOs and regular files in sticky directories, and
    // hard links to other users' files.
    ("fs.protected_symlinks", "1"),
    ("fs.protected_hardlinks", "1"),
    ("fs.protected_fifos", "1"),
    ("fs.protected_regular", "2"),
    // Databases and CUDA programs create many small mappings; with the default of 65530, mmap
    // fails.
    ("vm.max_map_count", "1048576"),
    // One guest runs many containers, and each has inotify watches of its own.
    ("fs.inotify.max_user_instances", "8192"),
    ("fs.inotify.max_user_watches", "1048576"),
    // A daemon that logs a burst to a Unix socket is not blocked after ten lines (the default is
    // 10).
    ("net.unix.max_dgram_qlen", "512"),
];

/// The sysctl that disables module loading until reboot.
pub const MODULES_DISABLED: &str = "kernel.modules_disabled";

/// Permanent locks, applied when the boot no longer needs the interfaces.
pub const LOCKS: &[Setting] = &[
    // Both can be set but not cleared.
    (MODULES_DISABLED, "1"),
    ("kernel.kexec_load_disabled", "1"),
    // Kernel addresses are hidden from all users; the kernel log requires CAP_SYSLOG.
    ("kernel.kptr_restrict", "2"),
    ("kernel.dmesg_restrict", "1"),
    // The value 1 cannot be changed until reboot: unprivileged BPF stays disabled.
    ("kernel.unprivileged_bpf_disabled", "1"),
    ("net.core.bpf_jit_harden", "2"),
    // A process may trace only its descendants.
    ("kernel.yama.ptrace_scope", "1"),
];

/// The kernel's lockdown file.
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// Lockdown stages in order.
const STAGES: &[&str] = &["none", "integrity", "confidentiality"];

/// Raises kernel lockdown to `stage`; lockdown cannot be lowered. Returns a line with the resulting
/// stage.
///
/// # Errors
/// The kernel supports lockdown and rejects the write.
pub fn lock_kernel(root: &Root, stage: &str) -> Result<String, String> {
    let path = root.path(LOCKDOWN);
    let Ok(text) = fs::read_to_string(&path) else {
        return Ok("kernel lockdown: not in this kernel".to_owned());
    };
    let now = text.split_ascii_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    let rank = |stage: &str| STAGES.iter().position(|known| *known == stage);
    if now.and_then(rank) >= rank(stage) {
        return Ok(format!("kernel lockdown: {}", now.unwrap_or_default()));
    }
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| io::Write::write_all(&mut file, stage.as_bytes()))
        .map(|()| format!("kernel lockdown: {stage}"))
        .map_err(|error| format!("cannot write {stage} to {LOCKDOWN}: {error}"))
}

/// The result of writing a table.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Number of settings that were written.
    pub done: usize,
    /// Settings that this kernel does not have.
    pub absent: Vec<&'static str>,
    /// Settings that the kernel rejected, with the error.
    pub refused: Vec<String>,
}

/// Writes the settings of a table.
#[must_use]
pub fn apply(root: &Root, table: &[Setting]) -> Applied {
    let mut applied = Applied::default();
    for (name, value) in table {
        let path = root.path("/proc/sys").join(name.replace('.', "/"));
        // Opened without O_CREAT: a missing file means that the kernel lacks the setting.
        match fs::OpenOptions::new().write(true).open(&path).and_then(|mut file| {
            use io::Write as _;
            file.write_all(value.as_bytes())
        }) {
            Ok(()) => applied.done += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => applied.absent.push(name),
            Err(error) => applied.refused.push(format!("{name}={value}: {error}")),
        }
    }
    applied
}

impl Applied {
    /// Returns the result as one line.
    ///
    /// # Errors
    /// The kernel rejected a setting; the text names all rejected settings.
    pub fn sentence(&self) -> Result<String, String> {
        if !self.refused.is_empty() {
            return Err(format!("the kernel refused {}", self.refused.join(", ")));
        }
        let absent = if self.absent.is_empty() {
            String::new()
        } else {
            format!("; not in this kernel: {}", self.absent.join(", "))
        };
        Ok(format!("{} settings{absent}", self.done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_settings_are_reported_and_others_written() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("proc/sys/kernel");
        fs::create_dir_all(&kernel).unwrap();
        fs::write(kernel.join("modules_disabled"), "0").unwrap();
        let applied = apply(&Root::at(dir.path()), LOCKS);
        assert_eq!(fs::read_to_string(kernel.join("modules_disabled")).unwrap(), "1");
        assert_eq!(applied.done, 1);
        assert_eq!(applied.absent.len(), LOCKS.len() - 1);
        assert!(!kernel.join("kexec_load_disabled").exists());
        assert!(applied.sentence().unwrap().starts_with("1 settings; not in this kernel: kernel.kexec_load_disabled,"));
    }

    #[test]
    fn rejected_setting_is_reported_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("proc/sys/kernel/panic")).unwrap();
        let applied = apply(&Root::at(dir.path()), &[("kernel.panic", "-1")]);
        assert!(applied.sentence().unwrap_err().contains("kernel.panic=-1"));
    }

    #[test]
    fn kernel_lockdown_is_raised_and_never_lowered() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(lock_kernel(&root, "integrity").unwrap(), "kernel lockdown: not in this kernel");
        let file = root.path(LOCKDOWN);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        for (now, stage, said, left) in [
            ("[none] integrity confidentiality\n", "none", "none", "[none] integrity confidentiality\n"),
            ("none [integrity] confidentiality\n", "none", "integrity", "none [integrity] confidentiality\n"),
            (
                "none integrity [confidentiality]\n",
                "integrity",
                "confidentiality",
                "none integrity [confidentiality]\n",
            ),
        ] {
            fs::write(&file, now).unwrap();
            assert_eq!(lock_kernel(&root, stage).unwrap(), format!("kernel lockdown: {said}"));
            assert_eq!(fs::read_to_string(&file).unwrap(), left);
        }
        fs::write(&file, "[none] integrity").unwrap();
        assert_eq!(lock_kernel(&root, "integrity").unwrap(), "kernel lockdown: integrity");
        assert!(fs::read_to_string(&file).unwrap().starts_with("integrity"));
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(lock_kernel(&root, "integrity").unwrap().contains("not in this kernel"));
    }

    #[test]
    fn settings_are_unique() {
        let mut names: Vec<_> = SETTINGS.iter().chain(LOCKS).map(|(name, _)| name).collect();
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
