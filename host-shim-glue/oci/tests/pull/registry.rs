//! A registry that is slow, strict, broken or lies.

use std::fs;
use std::path::Path;

use firstlight_oci::pull::Credentials;

use crate::image::{Blobs, INDEX, MANIFEST, digest};
use crate::server::{Answer, Request, Server};
use crate::{names, pulled, pulled_as};

/// What an honest registry answers.
fn honest(blobs: &Blobs, request: &Request) -> Answer {
    let path = request.path.strip_prefix("/v2/team/app/").unwrap_or_default();
    if path == "manifests/v1" {
        let index = blobs.index.to_string();
        return Answer::of(200, index.as_bytes())
            .with("Content-Type", format!("{INDEX}; charset=utf-8"))
            .with("Docker-Content-Digest", digest(index.as_bytes()));
    }
    let wanted = path.strip_prefix("manifests/").or(path.strip_prefix("blobs/")).unwrap_or_default();
    let Some(bytes) = blobs.all.get(wanted) else {
        return Answer::of(404, br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#);
    };
    if path.starts_with("manifests/") {
        return Answer::of(200, bytes).with("Content-Type", MANIFEST);
    }
    match request.from() {
        0 => Answer::of(200, bytes),
        from => Answer::of(206, &bytes[from..])
            .with("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())),
    }
}

/// A registry that is honest but where `change` says otherwise.
fn registry(change: impl Fn(&Blobs, &Request, usize, Answer) -> Answer + Send + Sync + 'static) -> (Server, Blobs) {
    let blobs = Blobs::sample();
    let served = blobs.clone();
    let server = Server::start(move |request, before| change(&served, request, before, honest(&served, request)));
    (server, blobs)
}

fn out() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    (dir, out)
}

#[test]
fn an_image_is_pulled_by_tag_and_by_digest() {
    let (server, blobs) = registry(|_, _, _, answer| answer);
    let (dir, out) = out();
    let image = pulled(&server.source("team/app:v1"), &out).unwrap();
    assert_eq!(image.fetched, 3);
    blobs.assert_pulled(0, &out);
    let asked = server.paths().len();
    // What is there is not asked for again.
    assert_eq!(pulled(&server.source(&format!("team/app@{}", blobs.manifest(0))), &out).unwrap().fetched, 0);
    assert_eq!(server.paths().len(), asked + 1);
    pulled_as(&server.source("team/app:v1"), &out, &Credentials::default(), "linux/arm64").unwrap();
    blobs.assert_pulled(1, &out);
    assert_eq!(names(dir.path()), ["out"]);
    let error = pulled(&server.source("team/app:v2"), &out).unwrap_err();
    assert!(error.contains("team/app:v2") && error.contains("manifest unknown"), "{error}");
    blobs.assert_pulled(1, &out);
}

#[test]
fn passing_trouble_is_borne() {
    let (server, blobs) = registry(|_, _, before, answer| match before {
        0 => Answer::of(429, b"").with("Retry-After", "0"),
        1 => Answer::of(503, b"{"),
        _ => answer,
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count("manifests/v1"), 3);
}

#[test]
fn lasting_trouble_ends_and_keeps_what_is_whole() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let broken = layer.clone();
    let (server, blobs) =
        registry(
            move |_, request, before, answer| {
                if request.path.ends_with(&broken) && before < 3 { Answer::of(500, b"") } else { answer }
            },
        );
    let (dir, out) = out();
    let source = server.source("team/app:v1");
    let error = pulled(&source, &out).unwrap_err();
    assert!(error.contains("gave up after 3 attempts") && error.contains(&layer), "{error}");
    assert!(!out.exists());
    assert_eq!(pulled(&source, &out).unwrap().fetched, 1, "only what was missing");
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count(&blobs.layers(0)[0]), 1);
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn a_cut_layer_goes_on_where_it_ended() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let cut = layer.clone();
    let (server, blobs) = registry(move |_, request, before, mut answer| {
        if request.path.ends_with(&cut) {
            answer.cut = (before < 2).then_some(500_000);
        }
        answer
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count(&layer), 3);
}

#[test]
fn a_registry_that_knows_no_ranges_sends_all_again() {
    let (server, blobs) =
        registry(|blobs, request, before, answer| match request.path.strip_prefix("/v2/team/app/blobs/") {
            Some(blob) => {
                let mut all = Answer::of(200, &blobs.all[blob]);
                all.endless = true;
                // An end that looks like one: no length was told.
                all.cut = (before == 0).then_some(all.body.len() / 2);
                all
            }
            None => answer,
        });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
}

#[test]
fn a_registry_that_sends_another_part_is_not_believed() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let (server, blobs) = registry(move |blobs, request, before, mut answer| {
        if request.path.ends_with(&layer) && before == 0 {
            answer.cut = Some(1000);
        }
        if request.from() > 0 {
            let bytes = &blobs.all[&layer];
            answer = Answer::of(206, &bytes[..10]).with("Content-Range", format!("bytes 0-9/{}", bytes.len()));
        }
        answer
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
}

#[test]
fn lies_are_told_apart_from_trouble() {
    type Change = fn(&Blobs, &Request, usize, Answer) -> Answer;
    let cases: [(&str, Change); 8] = [
        ("cannot verify the blob", |blobs, request, _, mut answer| {
            if request.path.ends_with(&blobs.layers(0)[1]) {
                answer.body[100_000] ^= 1;
            }
            answer
        }),
        ("it sends 1201665 bytes; the manifest says that there are 1201664", |blobs, request, _, mut answer| {
            if request.path.ends_with(&blobs.layers(0)[1]) {
                answer.body.push(0);
            }
            answer
        }),
        ("more than 1201664 bytes", |blobs, request, _, mut answer| {
            if request.path.ends_with(&blobs.layers(0)[1]) {
                answer.body.resize(3_000_000, 0);
                answer.endless = true;
            }
            answer
        }),
        ("cannot verify the manifest", |blobs, request, _, mut answer| {
            if request.path.ends_with(&blobs.manifest(0)) {
                answer.body.push(b' ');
            }
            answer
        }),
        ("expected was sha256:00", |_, request, _, answer| match request.path.ends_with("v1") {
            true => Answer::of(200, &answer.body).with("Docker-Content-Digest", format!("sha256:{}", "0".repeat(64))),
            false => answer,
        }),
        ("the limit is 4194304", |_, request, _, mut answer| {
            if request.path.ends_with("v1") {
                answer.body.resize(5 << 20, b' ');
                answer.endless = true;
            }
            answer
        }),
        ("schema 1", |_, request, _, answer| match request.path.ends_with("v1") {
            true => {
                Answer::of(200, b"{}").with("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws")
            }
            false => answer,
        }),
        ("gave up after 3 attempts", |_, _, _, _| Answer {
            headers: vec![("X", "y".repeat(1 << 20))],
            ..Answer::of(200, b"")
        }),
    ];
    for (said, change) in cases {
        let (server, _) = registry(change);
        let (_dir, out) = out();
        let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
        assert!(error.contains(said) && error.contains("/team/app"), "{said}: {error}");
        assert!(!out.exists(), "{said}");
    }
}

fn credentials(dir: &Path, port: u16, auth: &str) -> Credentials {
    let file = dir.join("config.json");
    fs::write(&file, format!(r#"{{"auths":{{"127.0.0.1:{port}":{{"auth":"{auth}"}}}}}}"#)).unwrap();
    Credentials::of_file(file)
}

/// `me:secret`.
const RIGHT: &str = "bWU6c2VjcmV0";
/// `me:guess`.
const WRONG: &str = "bWU6Z3Vlc3M=";

#[test]
fn tokens_are_fetched_and_renewed() {
    let (server, blobs) = registry(|_, request, before, answer| {
        if request.path.starts_with("/token") {
            assert_eq!(request.path, "/token?service=the%20registry&scope=repository:team/app:pull");
            return match request.header("authorization") {
                Some(basic) if basic == format!("Basic {RIGHT}") => {
                    Answer::of(200, format!(r#"{{"token":"t{before}","expires_in":1}}"#).as_bytes())
                }
                _ => Answer::of(401, br#"{"errors":[{"message":"who?"}]}"#),
            };
        }
        // Every blob wants a newer token than the manifests.
        let good =
            if request.path.contains("/blobs/") { ["Bearer t1"].as_slice() } else { &["Bearer t0", "Bearer t1"] };
        match request.header("authorization") {
            Some(bearer) if good.contains(&bearer) => answer,
            _ => {
                let realm = format!("http://{}/token", request.header("host").unwrap());
                Answer::of(401, b"")
                    .with("WWW-Authenticate", format!("Bearer realm=\"{realm}\",service=\"the registry\",scope=\"x\""))
            }
        }
    });
    let (dir, out) = out();
    let source = server.source("team/app:v1");
    let right = credentials(dir.path(), server.port, RIGHT);
    pulled_as(&source, &out, &right, "linux/amd64").unwrap();
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count("/token"), 2);
    let wrong = credentials(dir.path(), server.port, WRONG);
    let error = pulled_as(&source, &out, &wrong, "linux/amd64").unwrap_err();
    assert!(error.contains("who?") && error.contains("config.json") && !error.contains(WRONG), "{error}");
    let error = pulled(&source, &out).unwrap_err();
    assert!(error.contains("no credentials") && error.contains("docker login"), "{error}");
}

#[test]
fn passwords_stay_with_their_registry() {
    let (elsewhere, blobs) =
        registry(|blobs, request, _, answer| match blobs.all.get(request.path.trim_start_matches('/')) {
            Some(bytes) => Answer::of(if request.header("authorization").is_none() { 200 } else { 400 }, bytes),
            None => answer,
        });
    let port = elsewhere.port;
    let (server, _) = registry(move |_, request, _, answer| match request.header("authorization") {
        None => Answer::of(401, b"").with("WWW-Authenticate", "Basic realm=\"x\""),
        Some(basic) if basic == format!("Basic {RIGHT}") => match request.path.split_once("/blobs/") {
            Some((_, blob)) => Answer::of(307, b"").with("Location", format!("http://localhost:{port}/{blob}")),
            None => answer,
        },
        Some(_) => Answer::of(401, b"").with("WWW-Authenticate", "Basic realm=\"x\""),
    });
    let (dir, out) = out();
    let source = server.source("team/app:v1");
    let right = credentials(dir.path(), server.port, RIGHT);
    pulled_as(&source, &out, &right, "linux/amd64").unwrap();
    blobs.assert_pulled(0, &out);
    let wrong = credentials(dir.path(), server.port, WRONG);
    let error = pulled_as(&source, &out, &wrong, "linux/amd64").unwrap_err();
    assert!(error.contains("refuses the credentials") && error.contains("config.json"), "{error}");
}

#[test]
fn a_token_that_is_no_header_is_refused() {
    let (server, _) = registry(|_, request, _, _| match request.path.starts_with("/token") {
        true => Answer::of(200, br#"{"token":"a\r\nX: y"}"#),
        false => {
            let realm = format!("http://{}/token", request.header("host").unwrap());
            Answer::of(401, b"").with("WWW-Authenticate", format!("Bearer realm=\"{realm}\""))
        }
    });
    let (_dir, out) = out();
    let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
    assert!(error.contains("gives no token"), "{error}");
}

#[test]
fn redirects_end() {
    let (server, _) = registry(|_, request, _, _| Answer::of(302, b"").with("Location", request.path.clone()));
    let (_dir, out) = out();
    let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
    assert!(error.contains("redirects"), "{error}");
    assert!(server.paths().len() < 10);
}
