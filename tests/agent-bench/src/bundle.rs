//! The container that all three runtimes run.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firstlight_agent_api::oci;

/// A root file system, and requests that run a program on it.
#[derive(Debug)]
pub(crate) struct Bundle {
    /// The root directory.
    pub(crate) root: PathBuf,
}

const DIRECTORIES: &[&str] = &["bin", "dev", "etc", "proc", "sys", "tmp", "root"];

const CAPABILITIES: &[&str] = &["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_MKNOD", "CAP_SETGID", "CAP_SETUID"];

impl Bundle {
    /// Creates the root below `dir`.
    pub(crate) fn make(dir: &Path, busybox: &Path) -> Result<Self> {
        let root = dir.join("rootfs");
        for name in DIRECTORIES {
            let dir = root.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        let program = root.join("bin/busybox");
        fs::copy(busybox, &program).with_context(|| format!("copy {}", busybox.display()))?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        for name in ["true", "sleep"] {
            let link = root.join("bin").join(name);
            let _ = fs::remove_file(&link);
            symlink("busybox", &link).with_context(|| format!("create {}", link.display()))?;
        }
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/true\n")?;
        Ok(Self { root })
    }

    /// Returns the process with this command.
    pub(crate) fn process(command: &[&str]) -> oci::Process {
        let mut process = oci::Process::new();
        process.Args = command.iter().map(ToString::to_string).collect();
        process.Env = vec!["PATH=/bin".into()];
        process.Cwd = "/".into();
        let names: Vec<String> = CAPABILITIES.iter().map(ToString::to_string).collect();
        let capabilities = process.Capabilities.mut_or_insert_default();
        capabilities.Bounding.clone_from(&names);
        capabilities.Effective.clone_from(&names);
        capabilities.Permitted = names;
        process
    }

    /// Returns the configuration as a shim sends it.
    pub(crate) fn spec(&self, container: &str, command: &[&str]) -> oci::Spec {
        let mut spec = oci::Spec::new();
        spec.Version = "1.1.0".into();
        spec.Process = Some(Self::process(command)).into();
        spec.Root.mut_or_insert_default().Path = self.root.display().to_string();
        let mount = |destination: &str, kind: &str, options: &[&str]| oci::Mount {
            destination: destination.into(),
            source: kind.into(),
            type_: kind.into(),
            options: options.iter().map(ToString::to_string).collect(),
            ..Default::default()
        };
        spec.Mounts = vec![
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ];
        let linux = spec.Linux.mut_or_insert_default();
        linux.CgroupsPath = format!("/agent-bench/{container}");
        let namespace = |kind: &str| oci::LinuxNamespace { Type: kind.into(), ..Default::default() };
        linux.Namespaces = ["ipc", "uts", "mount"].map(namespace).into();
        linux.MaskedPaths = vec!["/proc/kcore".into()];
        linux.ReadonlyPaths = vec!["/proc/sys".into()];
        spec
    }
}
