//! GetDiagnosticData: the last words that a container left for Kubernetes.
//!
//! The file belongs to the container, which can put anything in its place. It is
//! therefore looked at before it is opened, and read from its end, as the
//! kubelet does, with a bound.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use crate::agent::Agent;
use crate::error::{Error, Result};
use crate::work;

/// The one kind of data that there is.
const TERMINATION_LOG: &str = "termination_log";

/// Where the kubelet says, inside the container, that its last words are.
const ANNOTATION: &str = "io.kubernetes.container.terminationMessagePath";

/// The most that is told, bytes, the last ones; the kubelet's own bound.
const LONGEST: usize = 4096;

/// What is needed of a container's configuration.
#[derive(Debug, Deserialize)]
struct Configuration {
    #[serde(default)]
    annotations: HashMap<String, String>,
    #[serde(default)]
    mounts: Vec<Mount>,
}

#[derive(Debug, Deserialize)]
struct Mount {
    destination: String,
    #[serde(default)]
    source: String,
}

/// The file in the guest that a container's configuration means.
///
/// # Errors
/// It names none; what is missing is said.
pub fn source(configuration: &[u8]) -> std::result::Result<String, String> {
    let configuration: Configuration =
        serde_json::from_slice(configuration).map_err(|error| format!("config.json: {error}"))?;
    let wanted = configuration.annotations.get(ANNOTATION);
    let wanted = wanted.ok_or_else(|| format!("there is no annotation {ANNOTATION}"))?;
    // The last mount on a place is what the container sees there.
    let mount = configuration.mounts.into_iter().rev().find(|mount| mount.destination == *wanted);
    mount.map(|mount| mount.source).ok_or_else(|| format!("nothing is mounted at {wanted}"))
}

/// The end of a file below `run`, through no link.
///
/// # Errors
/// One line with the step: it is not below it, a link is on the way, or it is no regular file.
fn tail(run: &Path, path: &str) -> std::result::Result<Vec<u8>, String> {
    let below = Path::new(path).strip_prefix(run).map_err(|_| format!("not below {}", run.display()))?;
    let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let run = rustix::fs::open(run, dir, Mode::empty()).map_err(|error| format!("{}: {error}", run.display()))?;
    let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // Only looked at: to open a device can do something, and to open a FIFO can take for ever.
    let seen: OwnedFd = rustix::fs::openat2(&run, below, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), strict)
        .map_err(|error| format!("open: {error}"))?;
    let kind = rustix::fs::fstat(&seen).map(|stat| FileType::from_raw_mode(stat.st_mode));
    match kind {
        Ok(FileType::RegularFile) => {}
        Ok(kind) => return Err(format!("it is no regular file but {kind:?}")),
        Err(error) => return Err(format!("stat: {error}")),
    }
    // The same file, whatever is at its path by now.
    let file = File::open(format!("/proc/self/fd/{}", seen.as_raw_fd())).map_err(|error| format!("reopen: {error}"))?;
    last(&file).map_err(|error| format!("read: {error}"))
}

fn last(file: &File) -> std::io::Result<Vec<u8>> {
    let longest = u64::try_from(LONGEST).unwrap_or(u64::MAX);
    let mut at = file.metadata()?.len().saturating_sub(longest);
    let mut data = vec![0; LONGEST];
    let mut len = 0;
    // The container may shorten it meanwhile.
    while len < LONGEST {
        match file.read_at(&mut data[len..], at)? {
            0 => break,
            got => {
                len += got;
                at += u64::try_from(got).unwrap_or(0);
            }
        }
    }
    data.truncate(len);
    Ok(data)
}

impl Agent {
    /// A container's last words.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for another kind of data and for a container that is
    /// not there; `INTERNAL` when there are no last words, and why.
    pub async fn diagnostic(&self, kind: &str, container: &str) -> Result<String> {
        if kind != TERMINATION_LOG {
            let kind: String = kind.chars().take(80).collect();
            return Err(Error::invalid(format!("unsupported diagnostic log_type: {kind}; there is {TERMINATION_LOG}")));
        }
        let container = self.container(container)?;
        let run = self.paths.run.clone();
        work::blocking(move || {
            let file = container.bundle.join("config.json");
            let failed = |why: String| Error::internal(format!("termination log of container {}: {why}", container.id));
            let configuration = std::fs::read(&file).map_err(|error| failed(format!("{}: {error}", file.display())))?;
            let source = source(&configuration).map_err(failed)?;
            let data = tail(&run, &source).map_err(|why| failed(format!("{source:?}: {why}")))?;
            Ok(String::from_utf8_lossy(&data).into_owned())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_last_mount_at_the_annotated_path_counts() {
        let with = |mounts: &str| {
            source(format!(r#"{{"annotations":{{"{ANNOTATION}":"/dev/log"}},"mounts":[{mounts}]}}"#).as_bytes())
        };
        let two =
            r#"{"destination":"/dev/log","source":"/a"},{"destination":"/dev/log","source":"/b"},{"destination":"/x"}"#;
        assert_eq!(with(two), Ok("/b".to_owned()));
        assert!(with("").unwrap_err().contains("nothing is mounted at /dev/log"));
        assert!(source(b"{}").unwrap_err().contains(ANNOTATION));
        assert!(source(b"x").unwrap_err().contains("config.json"));
    }

    #[test]
    fn the_end_of_the_file_is_told() {
        let run = tempfile::tempdir().unwrap();
        let file = run.path().join("log");
        let read = || tail(run.path(), file.to_str().unwrap()).unwrap();
        fs::write(&file, "short").unwrap();
        assert_eq!(read(), b"short");
        let long: Vec<u8> = (0..9000_u32).map(|number| u8::try_from(number % 251).unwrap()).collect();
        fs::write(&file, &long).unwrap();
        assert_eq!(read(), &long[9000 - LONGEST..]);
        fs::write(&file, "").unwrap();
        assert_eq!(read(), b"");
    }

    #[test]
    fn links_devices_and_fifos_are_refused_at_once() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        fs::create_dir_all(run.join("shared/real")).unwrap();
        fs::write(root.path().join("secret"), "secret").unwrap();
        fs::write(run.join("shared/real/log"), "x").unwrap();
        symlink(root.path().join("secret"), run.join("shared/log")).unwrap();
        symlink("real", run.join("shared/way")).unwrap();
        let fifo = run.join("shared/fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let refused = |path: &str| tail(&run, &run.join(path).display().to_string()).unwrap_err();
        assert!(refused("shared/log").contains("open"));
        assert!(refused("shared/way/log").contains("open"));
        assert!(refused("../secret").contains("open"));
        assert!(refused("shared/fifo").contains("Fifo"));
        assert!(refused("shared").contains("Directory"));
        assert!(tail(&run, "/etc/passwd").unwrap_err().contains("not below"));
        assert!(tail(Path::new("/dev"), "/dev/null").unwrap_err().contains("CharacterDevice"));
        assert_eq!(tail(&run, &run.join("shared/real/log").display().to_string()).unwrap(), b"x");
    }

    proptest! {
        #[test]
        fn any_configuration_is_taken(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = source(&bytes);
        }
    }
}
