//! What a user of `image-builder` sees while it works.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use firstlight_lab::binaries::target;
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::results::written;

fn image_builder() -> Command {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight-image-builder"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    Command::new(target().join("debug/image-builder"))
}

/// A terminal: who sees it, and who writes to it.
fn terminal() -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    (File::from(ours), theirs)
}

#[test]
fn a_terminal_shows_a_bar_and_anything_else_plain_lines() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = written(dir.path(), "format = \"erofs\"", "");
    let build = |out: &str, errors: Stdio| {
        let mut command = image_builder();
        command.arg("build").arg(&manifest).arg("--out").arg(dir.path().join(out));
        command.env("TERM", "xterm").env_remove("NO_COLOR").stdout(Stdio::null()).stderr(errors).spawn().unwrap()
    };

    let (mut ours, theirs) = terminal();
    let mut child = build("one", Stdio::from(theirs));
    // The end of a terminal that nobody writes to any more is an error.
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = ours.read(&mut piece) {
        bytes.extend_from_slice(&piece[..read]);
    }
    assert!(child.wait().unwrap().success());
    let shown = String::from_utf8_lossy(&bytes);
    for part in ["image-builder: results: making erofs", "image-builder: packing results", "[", "=", " of "] {
        assert!(shown.contains(part), "{part} in {shown:?}");
    }

    let lines = dir.path().join("lines");
    assert!(build("two", Stdio::from(File::create(&lines).unwrap())).wait().unwrap().success());
    let lines = fs::read_to_string(&lines).unwrap();
    assert!(lines.contains("image-builder: results: making erofs") && !lines.contains("packing"), "{lines}");
    assert!(!lines.contains('\x1b') && !lines.contains('\r'), "{lines:?}");
}
