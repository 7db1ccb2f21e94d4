//! `firstlight pull` as a command: its output, and a pull that is killed.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "../../oci/tests/pull/image.rs"]
#[allow(dead_code, reason = "shared with the tests of firstlight-oci, which use all of it")]
mod image;
#[path = "../../oci/tests/pull/server.rs"]
#[allow(dead_code, reason = "shared with the tests of firstlight-oci, which use all of it")]
mod server;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use image::Blobs;
use server::{Response, Server};

/// Returns the sorted names of the entries of a directory.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firstlight"));
    command.arg("pull").args(arguments).current_dir(dir).env("DOCKER_CONFIG", dir);
    command
}

#[test]
fn pull_prints_a_summary_json_or_one_line_of_error() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = Blobs::sample();
    blobs.write(&dir.path().join("layout"));
    let output =
        command(dir.path(), &["oci:layout", "--out", "out", "--platform", "linux/arm64", "--json"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("firstlight: layer 1 of 1: "), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["digest"], blobs.manifest(1));
    assert_eq!(report["platform"]["architecture"], "arm64");
    assert_eq!(report["layers"][0]["digest"], blobs.layers(1)[0]);
    blobs.assert_pulled(1, &dir.path().join("out"));
    let output = command(dir.path(), &["oci:layout", "--out", "out"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with(&format!("out: {} for linux/amd64, 2 layers, ", blobs.manifest(0))), "{text}");
    for (arguments, expected) in [
        (["alpine", "--out", "x"], "source \"alpine\": no transport, such as oci:; a source is oci:PATH"),
        (["oci:none", "--out", "x"], "failed to pull oci:none: failed to open none: No such file"),
    ] {
        let output = command(dir.path(), &arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected) && error.lines().count() == 1, "{error}");
    }
    assert_eq!(names(dir.path()), ["layout", "out"]);
}

#[test]
fn killed_pull_is_resumed_by_the_next_one() {
    let blobs = Blobs::sample();
    let served = blobs.clone();
    let stalled = blobs.layers(0)[1].clone();
    let server = Server::start(move |request, before| {
        let name = request.path.rsplit('/').next().unwrap_or_default();
        if name == stalled && before == 0 {
            // Until the client has been killed.
            std::thread::sleep(Duration::from_secs(2));
        }
        match name {
            "latest" => Response::new(200, served.index.to_string().as_bytes()),
            name => Response::new(200, &served.all[name]),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let source = server.source("app");
    let arguments = [source.as_str(), "--out", "out"];
    let mut child = command(dir.path(), &arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while server.count(&blobs.layers(0)[1]) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(30), "the large layer is not requested");
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(dir.path()), [".out.pulling"], "a killed pull creates no layout");
    let output = command(dir.path(), &[source.as_str(), "--out", "out", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["fetched"], 1, "complete blobs are not fetched again");
    blobs.assert_pulled(0, &dir.path().join("out"));
    assert_eq!(names(dir.path()), ["out"]);
    assert_eq!(fs::read_to_string(dir.path().join("out/oci-layout")).unwrap(), r#"{"imageLayoutVersion":"1.0.0"}"#);
}
