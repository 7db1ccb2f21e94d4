//! Runs the libvirt daemon of this machine's packages, isolated from the machine.
//!
//! It runs in its own namespaces: a PID namespace whose first process reaps
//! orphans at once, because libvirt waits for each; its own directories below
//! `/etc`, `/var` and `/run`; and no network.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_vm::Tool;
use tempfile::TempDir;

/// Timeout of the daemon's start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval of connection attempts.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Script of the first process: `$1` is the directory, `$2` QEMU's module directory or empty.
/// The shell reaps all children, including adopted orphans.
const FIRST_PROCESS: &str = r#"
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/libvirt
for at in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt; do
  mkdir -p "$1/root/$at"
  mount --bind "$1/root/$at" "/$at"
done
parts=/usr/lib/x86_64-linux-gnu/qemu
if [ -n "$2" ] && [ -d $parts ]; then mount --bind "$2" $parts; fi
/usr/sbin/libvirtd --config "$1/libvirtd.conf" --pid-file "$1/libvirtd.pid" < /dev/null &
wait
"#;

/// No authentication, because only we connect; consoles are written to files, because virtlogd does not run.
const QEMU_CONF: &str = r#"
stdio_handler = "file"
security_driver = "none"
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
cgroup_controllers = []
namespaces = []
"#;

/// Errors of running libvirt.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// A file operation or the start of the daemon failed.
    #[error("libvirt of the lab: failed to {step}: {source}")]
    File {
        /// The step that failed.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon exited or does not listen.
    #[error("libvirt of the lab does not accept connections; its log ends with:\n{0}")]
    NotListening(String),
}

/// A running libvirt; dropping it kills it and all of its domains.
#[derive(Debug)]
pub struct Libvirt {
    daemon: Child,
    dir: TempDir,
}

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> LibvirtError {
    move |source| LibvirtError::File { step, source }
}

/// Quotes `text` as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Writes a script that runs QEMU, because libvirt requires one program without arguments.
fn write_qemu_script(qemu: &Tool, path: &Path) -> io::Result<()> {
    let mut text = "#!/bin/sh\n".to_owned();
    for (name, value) in &qemu.env {
        text.push_str(&format!("export {}={}\n", name.display(), quoted(&value.to_string_lossy())));
    }
    text.push_str("exec");
    for word in std::iter::once(qemu.program.as_os_str()).chain(qemu.args.iter().map(AsRef::as_ref)) {
        text.push_str(&format!(" {}", quoted(&word.to_string_lossy())));
    }
    fs::write(path, text + " \"$@\"\n")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

impl Libvirt {
    /// Starts libvirt, for domains that run `qemu`.
    ///
    /// # Errors
    /// The packages of [`crate::host_packages::LIBVIRT_PACKAGES`] are not installed, or the daemon does not listen.
    pub fn start(qemu: &Tool) -> Result<Self, LibvirtError> {
        let dir = tempfile::Builder::new().prefix("firstlight-libvirt-").tempdir();
        let dir = dir.map_err(failed("create a directory"))?;
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("root/etc/libvirt")).map_err(failed("create a directory"))?;
        fs::write(at("root/etc/libvirt/qemu.conf"), QEMU_CONF).map_err(failed("write qemu.conf"))?;
        let settings = format!(
            "unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nlog_outputs = \"2:file:{}\"\n",
            dir.path().display(),
            at("libvirtd.log").display()
        );
        fs::write(at("libvirtd.conf"), settings).map_err(failed("write libvirtd.conf"))?;
        write_qemu_script(qemu, &at("qemu")).map_err(failed("write the script that runs QEMU"))?;
        let parts = qemu.env.iter().find(|(name, _)| name == "QEMU_MODULE_DIR");
        let mut command = Command::new("unshare");
        if fs::metadata("/proc/self").map_err(failed("read the user id"))?.uid() != 0 {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]);
        command.args(["sh", "-c", FIRST_PROCESS, "sh"]).arg(dir.path());
        command.arg(parts.map(|(_, value)| value.clone()).unwrap_or_default());
        let out = fs::File::create(at("first.log")).map_err(failed("write its log"))?;
        let both = out.try_clone().map_err(failed("write its log"))?;
        command.stdin(Stdio::null()).stdout(out).stderr(both);
        firstlight_sys::child::die_with_parent(&mut command);
        let daemon = command.spawn().map_err(failed("start unshare"))?;
        let mut libvirt = Self { daemon, dir };
        libvirt.wait_until_listening()?;
        Ok(libvirt)
    }

    fn wait_until_listening(&mut self) -> Result<(), LibvirtError> {
        let begin = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            let exited = !matches!(self.daemon.try_wait(), Ok(None));
            if exited || begin.elapsed() > START_TIMEOUT {
                return Err(LibvirtError::NotListening(self.log()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("libvirt-sock")
    }

    /// Returns a directory for the files of its domains.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the connection URI for virsh.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu:///system?socket={}", self.socket().display())
    }

    /// Returns the path of QEMU for domains' `<emulator>`.
    #[must_use]
    pub fn qemu(&self) -> PathBuf {
        self.dir.path().join("qemu")
    }

    /// Returns the last lines of its logs and of its domains'.
    #[must_use]
    pub fn log(&self) -> String {
        let domains = fs::read_dir(self.dir.path().join("root/var/log/libvirt/qemu")).into_iter().flatten().flatten();
        let own = ["first.log", "libvirtd.log"].map(|name| self.dir.path().join(name));
        let mut text = String::new();
        for file in own.into_iter().chain(domains.map(|entry| entry.path())) {
            let content = String::from_utf8_lossy(&fs::read(&file).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = content.lines().rev().take(15).collect();
            text.push_str(&format!("{}:\n", file.display()));
            text.extend(lines.into_iter().rev().map(|line| format!("  {line}\n")));
        }
        text
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // unshare kills the first process of the PID namespace, which kills all others.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_script_preserves_argument_boundaries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu");
        let mut tool = Tool::plain("/bin/echo");
        tool.args = vec!["a 'b'".into()];
        write_qemu_script(&tool, &path).unwrap();
        let said = Command::new(&path).arg("$c  d").output().unwrap().stdout;
        assert_eq!(String::from_utf8_lossy(&said), "a 'b' $c  d\n");
    }
}
