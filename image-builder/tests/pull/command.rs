//! `image-builder pull` as it is typed, and killed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::image::Blobs;
use crate::names;
use crate::server::{Answer, Server};

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_image-builder"));
    command.arg("pull").args(arguments).current_dir(dir).env("DOCKER_CONFIG", dir);
    command
}

#[test]
fn it_prints_what_it_pulled_or_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = Blobs::sample();
    blobs.write(&dir.path().join("layout"));
    let output =
        command(dir.path(), &["oci:layout", "--out", "out", "--platform", "linux/arm64", "--json"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("image-builder: layer 1 of 1: "), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["digest"], blobs.manifest(1));
    assert_eq!(report["platform"]["architecture"], "arm64");
    assert_eq!(report["layers"][0]["digest"], blobs.layers(1)[0]);
    blobs.assert_pulled(1, &dir.path().join("out"));
    let output = command(dir.path(), &["oci:layout", "--out", "out"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with(&format!("out: {} for linux/amd64, 2 layers, ", blobs.manifest(0))), "{said}");
    for (arguments, said) in [
        (["alpine", "--out", "x"], "source \"alpine\": it does not say what it is; a source is oci:PATH"),
        (["oci:none", "--out", "x"], "cannot pull oci:none: cannot open none: No such file"),
    ] {
        let output = command(dir.path(), &arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(said) && error.lines().count() == 1, "{error}");
    }
    assert_eq!(names(dir.path()), ["layout", "out"]);
}

#[test]
fn a_killed_pull_is_none_that_the_next_one_trips_over() {
    let blobs = Blobs::sample();
    let served = blobs.clone();
    let stuck = blobs.layers(0)[1].clone();
    let server = Server::start(move |request, before| {
        let name = request.path.rsplit('/').next().unwrap_or_default();
        if name == stuck && before == 0 {
            // Until the client is gone.
            std::thread::sleep(Duration::from_secs(2));
        }
        match name {
            "latest" => Answer::of(200, served.index.to_string().as_bytes()),
            name => Answer::of(200, &served.all[name]),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let source = server.source("app");
    let arguments = [source.as_str(), "--out", "out"];
    let mut child = command(dir.path(), &arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while server.count(&blobs.layers(0)[1]) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(30), "the large layer is asked for");
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(dir.path()), [".out.pulling"], "nothing has the image's name");
    let output = command(dir.path(), &[source.as_str(), "--out", "out", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["fetched"], 1, "what was whole is not fetched again");
    blobs.assert_pulled(0, &dir.path().join("out"));
    assert_eq!(names(dir.path()), ["out"]);
    assert_eq!(fs::read_to_string(dir.path().join("out/oci-layout")).unwrap(), r#"{"imageLayoutVersion":"1.0.0"}"#);
}
