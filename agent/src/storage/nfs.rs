//! Driver `nfs`: an NFS export, mounted by the guest.

use std::net::IpAddr;
use std::path::Path;

use super::mount::Detached;
use super::safe_path::{Kind, MountPoint};
use super::{Job, Resources, fs_group};
use crate::error::{Error, Result};

/// Parses the server's address of a source such as `10.0.0.2:/export` or `[fd00::2]:/export`.
fn address(source: &str) -> Result<IpAddr> {
    let wrong = || {
        let source: String = source.chars().take(200).collect();
        Error::invalid(format!(
            "source {source:?} is not ADDRESS:/PATH; the guest does not resolve names, so use the server's address ([...] for IPv6)"
        ))
    };
    let (host, _) = source.split_once(":/").ok_or_else(wrong)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.parse().map_err(|_| wrong())
}

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let kind = match job.storage.fstype.as_str() {
        kind @ ("nfs" | "nfs4") => kind,
        other => return Err(Error::invalid(format!("file system {other:?} is not supported; use nfs or nfs4"))),
    };
    let address = address(&job.storage.source)?;
    let mut options = job.options.clone();
    if options.value("addr").is_none() {
        // As mount.nfs does: the kernel does not resolve names.
        options.data.push(("addr".to_owned(), Some(address.to_string())));
    }
    let share = Detached::filesystem(kind, Some(&job.storage.source), &options)?;
    fs_group::apply(&share, job)?;
    let place = MountPoint::create(&job.paths.run, Path::new(&job.storage.mount_point), Kind::Directory)?;
    Ok(share.attach(&job.paths.run, place, &job.options)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_that_is_not_an_address_is_rejected() {
        assert_eq!(address("10.0.0.2:/a/b").unwrap().to_string(), "10.0.0.2");
        assert_eq!(address("[fd00::2]:/").unwrap().to_string(), "fd00::2");
        assert_eq!(address("fd00::2:/x").unwrap().to_string(), "fd00::2");
        for wrong in ["server:/a", "10.0.0.2", "10.0.0.2:a", ":/a", ""] {
            assert!(address(wrong).unwrap_err().to_string().contains("does not resolve names"), "{wrong}");
        }
    }
}
