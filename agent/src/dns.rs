//! Writes the guest's `/etc/resolv.conf`.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};
use crate::paths::Paths;

/// Writes the lines and bind-mounts the file over the guest's own. Without an `/etc/resolv.conf` in
/// the guest there are no readers.
///
/// # Errors
/// The write or the mount fails.
pub(crate) fn write(paths: &Paths, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let file = paths.run.join("sandbox/resolv.conf");
    let failed = |error: std::io::Error| Error::internal(format!("resolver file {}: {error}", file.display()));
    file.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
    let mut text = lines.join("\n");
    text.push('\n');
    fs::write(&file, text).map_err(failed)?;
    let own = paths.root.join("etc/resolv.conf");
    bind(&file, &own)
}

fn bind(file: &Path, own: &Path) -> Result<()> {
    if !own.exists() {
        return Ok(());
    }
    rustix::mount::mount_bind(file, own)
        .map_err(|error| Error::internal(format!("failed to bind {} to {}: {error}", file.display(), own.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_and_missing_resolv_conf_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::below(root.path());
        write(&paths, &[]).unwrap();
        assert!(!paths.run.exists());
        write(&paths, &["nameserver 10.0.0.1".into(), String::new(), "search x".into()]).unwrap();
        let text = fs::read_to_string(paths.run.join("sandbox/resolv.conf")).unwrap();
        assert_eq!(text, "nameserver 10.0.0.1\n\nsearch x\n");
    }
}
