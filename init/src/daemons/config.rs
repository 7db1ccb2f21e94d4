//! Generates configuration files of `KEY=VALUE` lines from the image's.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::table::Config;
use crate::driver_paths::{EXTENSION, find_first};
use crate::root::Root;

/// Sets keys in a configuration. The whole text before `=` is the key: there are
/// `FABRIC_MODE` and `FABRIC_MODE_RESTART`. Every line of a key is set, because it
/// is not documented which of two is used; a key without a line is appended.
#[must_use]
pub fn rewritten(text: &str, settings: &[(&str, &str)]) -> String {
    let mut seen = vec![false; settings.len()];
    let mut out = String::with_capacity(text.len() + 256);
    for line in text.lines() {
        let key = line.split_once('=').map(|(key, _)| key.trim());
        let at = key.and_then(|key| settings.iter().position(|(name, _)| *name == key));
        match at.and_then(|at| settings.get(at).map(|setting| (at, setting))) {
            Some((at, (name, value))) => {
                seen[at] = true;
                put(&mut out, &[name, "=", value]);
            }
            None => put(&mut out, &[line]),
        }
    }
    for ((name, value), _) in settings.iter().zip(&seen).filter(|(_, seen)| !**seen) {
        put(&mut out, &[name, "=", value]);
    }
    out
}

fn put(out: &mut String, parts: &[&str]) {
    for part in parts {
        out.push_str(part);
    }
    out.push('\n');
}

/// Rewrites a line of the GPU extension's file whose path exists only in the
/// extension, such as the fabric topology directory.
fn placed(root: &Root, line: &str) -> Option<String> {
    let (key, value) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
    let value = value.trim();
    let there = format!("{EXTENSION}{value}");
    let only_there = value.starts_with('/') && !root.path(value).exists() && root.path(&there).exists();
    only_there.then(|| format!("{key}={there}"))
}

/// Writes a daemon's configuration, readable by root only.
///
/// # Errors
/// The image's file is missing, or the new one cannot be written.
pub fn write(root: &Root, config: &Config, settings: &[(&str, &str)]) -> Result<(), String> {
    let place = find_first(root, config.from)?;
    let from = root.path(&place);
    let mut text = fs::read_to_string(&from).map_err(|error| format!("failed to read {}: {error}", from.display()))?;
    if place.starts_with(EXTENSION) {
        text = text.lines().map(|line| placed(root, line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
    }
    let to = root.path(config.to);
    replace(&to, &rewritten(&text, settings)).map_err(|error| format!("failed to write {}: {error}", to.display()))
}

fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    // The old file is read-only, and open readers keep it.
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn keys_match_completely() {
        let text = "# FABRIC_MODE=2\nFABRIC_MODE_RESTART=1\nFABRIC_MODE=0\nXFABRIC_MODE=9\nDAEMONIZE = 1\n\nLAST=x";
        let new = rewritten(text, &[("FABRIC_MODE", "1"), ("DAEMONIZE", "0"), ("LOG_FILE_NAME", "")]);
        assert_eq!(
            new,
            "# FABRIC_MODE=2\nFABRIC_MODE_RESTART=1\nFABRIC_MODE=1\nXFABRIC_MODE=9\nDAEMONIZE=0\n\nLAST=x\nLOG_FILE_NAME=\n"
        );
    }

    #[test]
    fn configuration_is_generated_from_image_at_each_start() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let config = Config { from: &["/etc/none.cfg", "/etc/x.cfg"], to: "/run/x.cfg", settings: &[] };
        let error = write(&root, &config, &[]).unwrap_err();
        assert!(error.contains("/etc/none.cfg, or /etc/x.cfg is not in the image"), "{error}");
        for name in ["etc", "run"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("etc/x.cfg"), "A=1\n").unwrap();
        for value in ["2", "3"] {
            write(&root, &config, &[("A", value)]).unwrap();
            let made = dir.path().join("run/x.cfg");
            assert_eq!(fs::read_to_string(&made).unwrap(), format!("A={value}\n"));
            assert_eq!(made.metadata().unwrap().permissions().mode() & 0o777, 0o400);
        }
    }

    #[test]
    fn paths_only_in_extension_are_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let place = |path: &str| root.path(&format!("{EXTENSION}{path}"));
        for path in [place("/etc"), place("/usr/share/topologies"), place("/var"), root.path("/var"), root.path("/run")]
        {
            fs::create_dir_all(path).unwrap();
        }
        let text = "# A=/usr\nTOPOLOGY=/usr/share/topologies\nLOG=/var\nNONE=/none\nB = /usr/share/topologies\n";
        fs::write(place("/etc/x.cfg"), text).unwrap();
        write(&root, &Config { from: &["/etc/x.cfg"], to: "/run/x.cfg", settings: &[] }, &[("NONE", "1")]).unwrap();
        let there = "/run/kata-extensions/gpu/usr/share/topologies";
        let expected = format!("# A=/usr\nTOPOLOGY={there}\nLOG=/var\nNONE=1\nB ={there}\n");
        assert_eq!(fs::read_to_string(root.path("/run/x.cfg")).unwrap(), expected);
    }

    proptest! {
        #[test]
        fn every_key_is_set_and_other_lines_are_kept(text in "([A-C]{1,2}=?[0-9]?\n?){0,12}") {
            let new = rewritten(&text, &[("A", "x"), ("BB", "y")]);
            let of = |text: &str, ours: bool| -> Vec<String> {
                let key = |line: &str| line.split_once('=').is_some_and(|(key, _)| key == "A" || key == "BB");
                text.lines().filter(|line| key(line) == ours).map(str::to_owned).collect()
            };
            prop_assert_eq!(of(&new, false), of(&text, false));
            prop_assert!(of(&new, true).iter().all(|line| line == "A=x" || line == "BB=y"));
            prop_assert!(new.contains("A=x\n") && new.contains("BB=y\n"));
        }
    }
}
