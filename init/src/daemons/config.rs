//! Configuration files of `KEY=VALUE` lines, made from the image's.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::table::Config;
use crate::places::{EXTENSION, first_of};
use crate::root::Root;

/// Sets keys in a configuration. A key is what stands before `=`, whole: there
/// are `FABRIC_MODE` and `FABRIC_MODE_RESTART`. Every line of a key is set, as
/// nobody knows which of two counts; one that has no line gets one.
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

/// A line of the GPU extension's file that names what only the extension has,
/// such as the directory with a fabric's topologies, as it is to be read here.
fn placed(root: &Root, line: &str) -> Option<String> {
    let (key, value) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
    let value = value.trim();
    let there = format!("{EXTENSION}{value}");
    let only_there = value.starts_with('/') && !root.path(value).exists() && root.path(&there).exists();
    only_there.then(|| format!("{key}={there}"))
}

/// Makes a daemon's configuration, for root alone to read.
///
/// # Errors
/// The image's is missing, or the new one cannot be written.
pub fn write(root: &Root, config: &Config, settings: &[(&str, &str)]) -> Result<(), String> {
    let place = first_of(root, config.from)?;
    let from = root.path(&place);
    let mut text = fs::read_to_string(&from).map_err(|error| format!("cannot read {}: {error}", from.display()))?;
    if place.starts_with(EXTENSION) {
        text = text.lines().map(|line| placed(root, line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
    }
    let to = root.path(config.to);
    replace(&to, &rewritten(&text, settings)).map_err(|error| format!("cannot write {}: {error}", to.display()))
}

fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    // The old one is read-only, and whoever reads it goes on reading it.
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
    fn keys_are_whole_words() {
        let text = "# FABRIC_MODE=2\nFABRIC_MODE_RESTART=1\nFABRIC_MODE=0\nXFABRIC_MODE=9\nDAEMONIZE = 1\n\nLAST=x";
        let new = rewritten(text, &[("FABRIC_MODE", "1"), ("DAEMONIZE", "0"), ("LOG_FILE_NAME", "")]);
        assert_eq!(
            new,
            "# FABRIC_MODE=2\nFABRIC_MODE_RESTART=1\nFABRIC_MODE=1\nXFABRIC_MODE=9\nDAEMONIZE=0\n\nLAST=x\nLOG_FILE_NAME=\n"
        );
    }

    #[test]
    fn the_images_file_is_copied_each_time() {
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
    fn directories_that_only_the_extension_has_are_named_there() {
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
        fn each_key_ends_up_with_its_value_and_the_rest_stays(text in "([A-C]{1,2}=?[0-9]?\n?){0,12}") {
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
