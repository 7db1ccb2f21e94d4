//! libvirt's daemon of this machine's packages, with nothing of this machine's.
//!
//! It runs in namespaces of its own: with its own processes, whose first one
//! reaps orphans at once, as libvirt waits for each; with its own directories below
//! `/etc`, `/var` and `/run`; and without a network.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_vm::Tool;
use tempfile::TempDir;

/// How long the daemon may take until it answers.
const PATIENCE: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(20);

/// The first process: `$1` is the directory, `$2` QEMU's loadable parts or nothing.
/// A shell waits for every child, also for those that others have left.
const FIRST: &str = r#"
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

/// Nobody but us connects, and no other daemon keeps the consoles.
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

/// Why there is no libvirt.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// A file of it, or the program.
    #[error("libvirt of the lab: {step}: {source}")]
    File {
        /// What was done.
        step: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The daemon does not answer.
    #[error("libvirt of the lab does not answer; its log ends with:\n{0}")]
    Silent(String),
}

/// A libvirt; dropping it ends it and all of its domains.
#[derive(Debug)]
pub struct Libvirt {
    daemon: Child,
    dir: TempDir,
}

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> LibvirtError {
    move |source| LibvirtError::File { step, source }
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// QEMU as one program, which is what libvirt wants.
fn program(qemu: &Tool, path: &Path) -> io::Result<()> {
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
    /// Starts it, for domains that have `qemu`.
    ///
    /// # Errors
    /// The packages of [`crate::host_packages::LIBVIRT_PACKAGES`] are not installed, or it does not answer.
    pub fn start(qemu: &Tool) -> Result<Self, LibvirtError> {
        let dir = tempfile::Builder::new().prefix("firstlight-libvirt-").tempdir();
        let dir = dir.map_err(failed("make a directory"))?;
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("root/etc/libvirt")).map_err(failed("make a directory"))?;
        fs::write(at("root/etc/libvirt/qemu.conf"), QEMU_CONF).map_err(failed("write qemu.conf"))?;
        let settings = format!(
            "unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nlog_outputs = \"2:file:{}\"\n",
            dir.path().display(),
            at("libvirtd.log").display()
        );
        fs::write(at("libvirtd.conf"), settings).map_err(failed("write libvirtd.conf"))?;
        program(qemu, &at("qemu")).map_err(failed("write a program for QEMU"))?;
        let parts = qemu.env.iter().find(|(name, _)| name == "QEMU_MODULE_DIR");
        let mut command = Command::new("unshare");
        if fs::metadata("/proc/self").map_err(failed("ask who we are"))?.uid() != 0 {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]);
        command.args(["sh", "-c", FIRST, "sh"]).arg(dir.path());
        command.arg(parts.map(|(_, value)| value.clone()).unwrap_or_default());
        let out = fs::File::create(at("first.log")).map_err(failed("write its log"))?;
        let both = out.try_clone().map_err(failed("write its log"))?;
        command.stdin(Stdio::null()).stdout(out).stderr(both);
        firstlight_sys::child::die_with_parent(&mut command);
        let daemon = command.spawn().map_err(failed("start unshare"))?;
        let mut libvirt = Self { daemon, dir };
        libvirt.answers()?;
        Ok(libvirt)
    }

    fn answers(&mut self) -> Result<(), LibvirtError> {
        let begin = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            let over = !matches!(self.daemon.try_wait(), Ok(None));
            if over || begin.elapsed() > PATIENCE {
                return Err(LibvirtError::Silent(self.log()));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("libvirt-sock")
    }

    /// A directory for whatever belongs to its domains.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// How virsh finds it.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu:///system?socket={}", self.socket().display())
    }

    /// QEMU as a domain names it.
    #[must_use]
    pub fn qemu(&self) -> PathBuf {
        self.dir.path().join("qemu")
    }

    /// The end of what it and its domains have said.
    #[must_use]
    pub fn log(&self) -> String {
        let domains = fs::read_dir(self.dir.path().join("root/var/log/libvirt/qemu")).into_iter().flatten().flatten();
        let own = ["first.log", "libvirtd.log"].map(|name| self.dir.path().join(name));
        let mut text = String::new();
        for file in own.into_iter().chain(domains.map(|entry| entry.path())) {
            let said = String::from_utf8_lossy(&fs::read(&file).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = said.lines().rev().take(15).collect();
            text.push_str(&format!("{}:\n", file.display()));
            text.extend(lines.into_iter().rev().map(|line| format!("  {line}\n")));
        }
        text
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // Its first process is killed with it, and so all of the others.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu");
        let mut tool = Tool::plain("/bin/echo");
        tool.args = vec!["a 'b'".into()];
        program(&tool, &path).unwrap();
        let said = Command::new(&path).arg("$c  d").output().unwrap().stdout;
        assert_eq!(String::from_utf8_lossy(&said), "a 'b' $c  d\n");
    }
}
