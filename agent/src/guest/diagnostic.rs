//! GetDiagnosticData: a container's Kubernetes termination message.
//!
//! The file is controlled by the container, which can replace it by anything. So its type is
//! checked before the open, and only a bounded tail is read, as the kubelet does.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use crate::background;
use crate::error::{Error, Result};
use crate::sandbox::Sandbox;

/// The only supported kind of data.
const TERMINATION_LOG: &str = "termination_log";

/// Annotation with the path of the termination message in the container.
const ANNOTATION: &str = "io.kubernetes.container.terminationMessagePath";

/// Maximum number of bytes, from the end of the file; the kubelet's limit.
const MAX_BYTES: usize = 4096;

/// The fields of config.json that are used.
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

/// Returns the guest path of the termination message of a container.
///
/// # Errors
/// The configuration has no such path; the error names the missing part.
pub fn source(configuration: &[u8]) -> std::result::Result<String, String> {
    let configuration: Configuration =
        serde_json::from_slice(configuration).map_err(|error| format!("config.json: {error}"))?;
    let path = configuration.annotations.get(ANNOTATION);
    let path = path.ok_or_else(|| format!("missing annotation {ANNOTATION}"))?;
    // The last mount at a path hides earlier ones.
    let mount = configuration.mounts.into_iter().rev().find(|mount| mount.destination == *path);
    mount.map(|mount| mount.source).ok_or_else(|| format!("nothing is mounted at {path}"))
}

/// Reads the end of a file below `run`, without following links.
///
/// # Errors
/// The failed step, in one line: the path is not below `run`, contains a link, or is not a regular
/// file.
fn tail(run: &Path, path: &str) -> std::result::Result<Vec<u8>, String> {
    let below = Path::new(path).strip_prefix(run).map_err(|_| format!("not below {}", run.display()))?;
    let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let run = rustix::fs::open(run, dir, Mode::empty()).map_err(|error| format!("{}: {error}", run.display()))?;
    let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // O_PATH: opening a device can have side effects, and opening a FIFO can block forever.
    let seen: OwnedFd = rustix::fs::openat2(&run, below, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), strict)
        .map_err(|error| format!("open: {error}"))?;
    let kind = rustix::fs::fstat(&seen).map(|stat| FileType::from_raw_mode(stat.st_mode));
    match kind {
        Ok(FileType::RegularFile) => {}
        Ok(kind) => return Err(format!("not a regular file but {kind:?}")),
        Err(error) => return Err(format!("stat: {error}")),
    }
    // Reopens the same file, even if the path changed.
    let file = File::open(format!("/proc/self/fd/{}", seen.as_raw_fd())).map_err(|error| format!("reopen: {error}"))?;
    last(&file).map_err(|error| format!("read: {error}"))
}

fn last(file: &File) -> std::io::Result<Vec<u8>> {
    let max = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX);
    let mut at = file.metadata()?.len().saturating_sub(max);
    let mut data = vec![0; MAX_BYTES];
    let mut len = 0;
    // The container may truncate it concurrently.
    while len < MAX_BYTES {
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

/// Returns a container's termination message, which is a file below `run`.
///
/// # Errors
/// `INVALID_ARGUMENT` for another kind of data or an unknown container; `INTERNAL` with the reason
/// if there is no message.
pub async fn read(sandbox: &Sandbox, run: &Path, kind: &str, container: &str) -> Result<String> {
    if kind != TERMINATION_LOG {
        let kind: String = kind.chars().take(80).collect();
        return Err(Error::invalid(format!("unsupported diagnostic log_type: {kind}; supported: {TERMINATION_LOG}")));
    }
    let (container, run) = (sandbox.container(container)?, run.to_owned());
    background::blocking(move || {
        let file = container.bundle.join("config.json");
        let failed = |why: String| Error::internal(format!("termination log of container {}: {why}", container.id));
        let configuration = std::fs::read(&file).map_err(|error| failed(format!("{}: {error}", file.display())))?;
        let source = source(&configuration).map_err(failed)?;
        let data = tail(&run, &source).map_err(|why| failed(format!("{source:?}: {why}")))?;
        Ok(String::from_utf8_lossy(&data).into_owned())
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::Container;
    use crate::process::Process;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

    #[test]
    fn last_mount_at_the_annotated_path_is_used() {
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
    fn only_the_end_of_the_file_is_returned() {
        let run = tempfile::tempdir().unwrap();
        let file = run.path().join("log");
        let read = || tail(run.path(), file.to_str().unwrap()).unwrap();
        fs::write(&file, "short").unwrap();
        assert_eq!(read(), b"short");
        let long: Vec<u8> = (0..9000_u32).map(|number| u8::try_from(number % 251).unwrap()).collect();
        fs::write(&file, &long).unwrap();
        assert_eq!(read(), &long[9000 - MAX_BYTES..]);
        fs::write(&file, "").unwrap();
        assert_eq!(read(), b"");
    }

    #[test]
    fn links_devices_and_fifos_are_rejected_without_blocking() {
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

    #[test]
    fn message_of_a_container_is_returned() {
        crate::fake_runtime::run(async {
            let root = tempfile::tempdir().unwrap();
            let sandbox = Sandbox::default();
            let (run, bundle) = (root.path().join("run"), root.path().join("c1"));
            fs::create_dir_all(&run).unwrap();
            fs::create_dir_all(&bundle).unwrap();
            let first = Arc::new(Process::new(false));
            sandbox.add(&Arc::new(Container::new("c1", bundle.clone(), "/g".into(), None, first))).unwrap();
            let message = async |kind: &str, container: &str| read(&sandbox, &run, kind, container).await;
            assert!(message("dmesg", "c1").await.unwrap_err().message.contains("supported: termination_log"));
            assert_eq!(message("termination_log", "c2").await.unwrap_err().code, ttrpc::Code::INVALID_ARGUMENT);
            let error = message("termination_log", "c1").await.unwrap_err();
            assert!(error.message.contains("container c1") && error.message.contains("config.json"), "{error}");
            let log = run.join("log");
            fs::write(&log, "out of memory").unwrap();
            let mount = format!(r#"{{"destination":"/dev/log","source":"{}"}}"#, log.display());
            let configuration = format!(r#"{{"annotations":{{"{ANNOTATION}":"/dev/log"}},"mounts":[{mount}]}}"#);
            fs::write(bundle.join("config.json"), configuration).unwrap();
            assert_eq!(message("termination_log", "c1").await.as_deref(), Ok("out of memory"));
        });
    }

    proptest! {
        #[test]
        fn any_configuration_is_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = source(&bytes);
        }
    }
}
