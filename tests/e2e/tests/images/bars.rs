//! Progress of `image-builder` and `firstlight pull`, on a terminal and in a file.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use firstlight_lab::binaries::target;
use firstlight_oci::{File, NewImage};
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::results::written;

/// Builds a program of the workspace; returns a command that runs it.
fn built(package: &str, program: &str) -> Command {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", package];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    Command::new(target().join("debug").join(program))
}

pub(super) fn image_builder() -> Command {
    built("firstlight-image-builder", "image-builder")
}

/// Opens a pseudo-terminal; returns its two ends.
fn terminal() -> (std::fs::File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    (ours.into(), theirs)
}

/// Runs a command; returns what it writes to a terminal as its standard error.
fn shown(command: &mut Command) -> String {
    let (mut ours, theirs) = terminal();
    command.env("TERM", "xterm").env_remove("NO_COLOR").stdout(Stdio::null()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    // Reading fails only when all writers have closed the terminal; the command holds one end.
    command.stderr(Stdio::null());
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = ours.read(&mut piece) {
        bytes.extend_from_slice(&piece[..read]);
    }
    assert!(child.wait().unwrap().success());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a command; returns what it writes to a pipe as its standard error.
fn lines(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn build_shows_a_bar_on_a_terminal_and_plain_lines_elsewhere() {
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
fn pull_shows_its_progress() {
    let dir = tempfile::tempdir().unwrap();
    let image = NewImage {
        files: vec![File::Text { path: "etc/motd".into(), text: "hello ".repeat(100_000) }],
        env: Vec::new(),
        command: vec!["/bin/hello".into()],
    };
    image.write(&dir.path().join("layout")).unwrap();
    let source = format!("oci:{}", dir.path().join("layout").display());
    let pull = |out: &str| {
        let mut command = built("firstlight", "firstlight");
        command.args(["pull", &source, "--out"]).arg(dir.path().join(out));
        command
    };
    let on_terminal = shown(&mut pull("one"));
    for part in ["firstlight: layer 1 of 1: ", "firstlight: layer 1 of 1 ", "[", " of "] {
        assert!(on_terminal.contains(part), "{part} in {on_terminal:?}");
    }
    let lines = lines(&mut pull("two"));
    assert!(lines.contains("firstlight: layer 1 of 1: ") && !lines.contains("layer 1 of 1 "), "{lines}");
    assert!(!lines.contains('\x1b') && !lines.contains('\r'), "{lines:?}");
}
