//! What a user of `image-builder` sees while it works.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use firstlight_lab::binaries::target;
use firstlight_oci::{File, NewImage};
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::results::written;

pub(super) fn image_builder() -> Command {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight-image-builder"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    Command::new(target().join("debug/image-builder"))
}

/// A terminal: who sees it, and who writes to it.
fn terminal() -> (std::fs::File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    (ours.into(), theirs)
}

/// What a command writes to a terminal that is its standard error.
fn shown(command: &mut Command) -> String {
    let (mut ours, theirs) = terminal();
    command.env("TERM", "xterm").env_remove("NO_COLOR").stdout(Stdio::null()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    // The end of a terminal that nobody writes to any more is an error; the command holds one end.
    command.stderr(Stdio::null());
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = ours.read(&mut piece) {
        bytes.extend_from_slice(&piece[..read]);
    }
    assert!(child.wait().unwrap().success());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The same where standard error is a file.
fn lines(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_terminal_shows_a_bar_and_anything_else_plain_lines() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = written(dir.path(), "format = \"erofs\"", "");
    let build = |out: &str| {
        let mut command = image_builder();
        command.arg("build").arg(&manifest).arg("--out").arg(dir.path().join(out));
        command
    };
    let on_terminal = shown(&mut build("one"));
    for part in ["image-builder: results: building erofs", "image-builder: writing results", "[", "=", " of "] {
        assert!(on_terminal.contains(part), "{part} in {on_terminal:?}");
    }
    let lines = lines(&mut build("two"));
    assert!(lines.contains("image-builder: results: building erofs") && !lines.contains("writing"), "{lines}");
    assert!(!lines.contains('\x1b') && !lines.contains('\r'), "{lines:?}");
}

#[test]
fn a_pull_shows_what_it_brings_and_how_much_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = NewImage {
        files: vec![File::Text { path: "etc/motd".into(), text: "hello ".repeat(100_000) }],
        env: Vec::new(),
        command: vec!["/bin/hello".into()],
    };
    image.write(&dir.path().join("layout")).unwrap();
    let source = format!("oci:{}", dir.path().join("layout").display());
    let pull = |out: &str| {
        let mut command = image_builder();
        command.args(["pull", &source, "--out"]).arg(dir.path().join(out));
        command
    };
    let on_terminal = shown(&mut pull("one"));
    for part in ["image-builder: layer 1 of 1: ", "image-builder: layer 1 of 1 ", "[", " of "] {
        assert!(on_terminal.contains(part), "{part} in {on_terminal:?}");
    }
    let lines = lines(&mut pull("two"));
    assert!(lines.contains("image-builder: layer 1 of 1: ") && !lines.contains("layer 1 of 1 "), "{lines}");
    assert!(!lines.contains('\x1b') && !lines.contains('\r'), "{lines:?}");
}
