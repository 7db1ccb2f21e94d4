//! The home directory of a container's user.
//!
//! Without a `HOME` libcontainer asks the C library, which would load the container's own libraries into a
//! process that still has privileges. The server would have to read a file of the container's root, which may be
//! on a file system that blocks. So the server sets a marker variable, and the container's own process, which
//! already has the user and the container's root, replaces it.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

/// The marker variable that requests the lookup of `HOME`. It is removed before exec.
pub const HOME_FROM_PASSWD: &str = "FIRSTLIGHT_HOME_FROM_PASSWD";

/// Untrusted input: larger files are truncated, bytes.
const MAX_PASSWD: u64 = 1 << 20;

/// Sets `HOME` if the marker requests it.
pub(crate) fn resolve(environment: &mut HashMap<String, String>, passwd: &Path, uid: u32) {
    if environment.remove(HOME_FROM_PASSWD).is_some() {
        let text = read(passwd).unwrap_or_default();
        environment.insert("HOME".to_owned(), home(&text, uid).unwrap_or("/").to_owned());
    }
}

/// Returns the home directory of a user from the text of `/etc/passwd`.
fn home(passwd: &str, uid: u32) -> Option<&str> {
    let fields = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let mut homes = fields.filter_map(|fields| match fields.as_slice() {
        [_, _, id, _, _, home, ..] if id.parse() == Ok(uid) && home.starts_with('/') => Some(*home),
        _ => None,
    });
    homes.next()
}

fn read(path: &Path) -> Option<String> {
    // Non-blocking, so that opening a FIFO in its place does not hang.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // No magic links: this process still has close-on-exec descriptors, which `/proc/self/fd` would expose.
    let safe = ResolveFlags::NO_MAGICLINKS;
    let file = File::from(rustix::fs::openat2(CWD, path, flags, Mode::empty(), safe).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(MAX_PASSWD).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nweb:x:33:33::/var/www:/bin/sh\nrel:x:5:5::home:\n";

    #[test]
    fn home_is_read_from_passwd() {
        assert_eq!(home(PASSWD, 33), Some("/var/www"));
        assert_eq!((home(PASSWD, 5), home(PASSWD, 7)), (None, None));
    }

    #[test]
    fn only_a_marked_environment_is_changed_and_the_marker_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("passwd");
        let resolved = |environment: &[(&str, &str)]| {
            let mut all = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            resolve(&mut all, &file, 33);
            let mut all: Vec<_> = all.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
            all.sort();
            all.join(" ")
        };
        assert_eq!(resolved(&[("HOME", "/"), (HOME_FROM_PASSWD, "1")]), "HOME=/", "no such file");
        std::fs::write(&file, PASSWD).unwrap();
        assert_eq!(resolved(&[("HOME", "/"), (HOME_FROM_PASSWD, "1"), ("A", "b")]), "A=b HOME=/var/www");
        assert_eq!(resolved(&[("HOME", "/mine")]), "HOME=/mine");
        let inner = File::open(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(format!("/proc/self/fd/{}", inner.as_raw_fd()), &file).unwrap();
        assert_eq!(resolved(&[(HOME_FROM_PASSWD, "1")]), "HOME=/", "a link to a descriptor of this process");
        std::fs::remove_file(&file).unwrap();
        rustix::fs::mknodat(CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(resolved(&[(HOME_FROM_PASSWD, "1")]), "HOME=/", "a FIFO does not block");
    }

    proptest! {
        #[test]
        fn arbitrary_passwd_yields_an_absolute_home_or_none(text in "\\PC{0,80}", uid: u32) {
            if let Some(home) = home(&text, uid) {
                prop_assert!(home.starts_with('/'));
            }
        }
    }
}
