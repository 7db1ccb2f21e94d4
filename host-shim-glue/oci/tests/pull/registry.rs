//! Pulls from a registry that requires credentials, fails, or sends wrong data.

use std::fs;
use std::path::Path;

use firstlight_oci::pull::Credentials;

use crate::image::{Blobs, INDEX, MANIFEST, digest};
use crate::server::{Request, Response, Server};
use crate::{names, pulled, pulled_as};

/// Returns the response of a correct registry.
fn correct_response(blobs: &Blobs, request: &Request) -> Response {
    let path = request.path.strip_prefix("/v2/team/app/").unwrap_or_default();
    if path == "manifests/v1" {
        let index = blobs.index.to_string();
        return Response::new(200, index.as_bytes())
            .with("Content-Type", format!("{INDEX}; charset=utf-8"))
            .with("Docker-Content-Digest", digest(index.as_bytes()));
    }
    let wanted = path.strip_prefix("manifests/").or(path.strip_prefix("blobs/")).unwrap_or_default();
    let Some(bytes) = blobs.all.get(wanted) else {
        return Response::new(404, br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#);
    };
    if path.starts_with("manifests/") {
        return Response::new(200, bytes).with("Content-Type", MANIFEST);
    }
    match request.offset() {
        0 => Response::new(200, bytes),
        from => Response::new(206, &bytes[from..])
            .with("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())),
    }
}

/// Starts a registry whose correct responses `change` may replace.
fn registry(change: impl Fn(&Blobs, &Request, usize, Response) -> Response + Send + Sync + 'static) -> (Server, Blobs) {
    let blobs = Blobs::sample();
    let served = blobs.clone();
    let server =
        Server::start(move |request, before| change(&served, request, before, correct_response(&served, request)));
    (server, blobs)
}

/// Returns a temporary directory and a path in it.
fn out() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    (dir, out)
}

#[test]
fn image_is_pulled_by_tag_and_by_digest() {
    let (server, blobs) = registry(|_, _, _, response| response);
    let (dir, out) = out();
    let image = pulled(&server.source("team/app:v1"), &out).unwrap();
    assert_eq!(image.fetched, 3);
    blobs.assert_pulled(0, &out);
    let requests = server.paths().len();
    // Available blobs are not requested again.
    assert_eq!(pulled(&server.source(&format!("team/app@{}", blobs.manifest(0))), &out).unwrap().fetched, 0);
    assert_eq!(server.paths().len(), requests + 1);
    pulled_as(&server.source("team/app:v1"), &out, &Credentials::default(), "linux/arm64").unwrap();
    blobs.assert_pulled(1, &out);
    assert_eq!(names(dir.path()), ["out"]);
    let error = pulled(&server.source("team/app:v2"), &out).unwrap_err();
    assert!(error.contains("team/app:v2") && error.contains("manifest unknown"), "{error}");
    blobs.assert_pulled(1, &out);
}

#[test]
fn temporary_error_is_retried() {
    let (server, blobs) = registry(|_, _, before, response| match before {
        0 => Response::new(429, b"").with("Retry-After", "0"),
        1 => Response::new(503, b"{"),
        _ => response,
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count("manifests/v1"), 3);
}

#[test]
fn persistent_error_ends_the_pull_and_keeps_complete_blobs() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let broken = layer.clone();
    let (server, blobs) =
        registry(
            move |_, request, before, response| {
                if request.path.ends_with(&broken) && before < 3 { Response::new(500, b"") } else { response }
            },
        );
    let (dir, out) = out();
    let source = server.source("team/app:v1");
    let error = pulled(&source, &out).unwrap_err();
    assert!(error.contains("gave up after 3 attempts") && error.contains(&layer), "{error}");
    assert!(!out.exists());
    assert_eq!(pulled(&source, &out).unwrap().fetched, 1, "only the missing blob is fetched");
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count(&blobs.layers(0)[0]), 1);
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn interrupted_layer_is_resumed() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let interrupted = layer.clone();
    let (server, blobs) = registry(move |_, request, before, mut response| {
        if request.path.ends_with(&interrupted) {
            response.truncate_at = (before < 2).then_some(500_000);
        }
        response
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
    assert_eq!(server.count(&layer), 3);
}

#[test]
fn registry_without_range_requests_sends_the_whole_blob_again() {
    let (server, blobs) =
        registry(|blobs, request, before, response| match request.path.strip_prefix("/v2/team/app/blobs/") {
            Some(blob) => {
                let mut all = Response::new(200, &blobs.all[blob]);
                all.without_length = true;
                // Without a length, the truncated body looks complete.
                all.truncate_at = (before == 0).then_some(all.body.len() / 2);
                all
            }
            None => response,
        });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
}

#[test]
fn other_range_than_requested_is_discarded() {
    let layer = Blobs::sample().layers(0)[1].clone();
    let (server, blobs) = registry(move |blobs, request, before, mut response| {
        if request.path.ends_with(&layer) && before == 0 {
            response.truncate_at = Some(1000);
        }
        if request.offset() > 0 {
            let bytes = &blobs.all[&layer];
            response = Response::new(206, &bytes[..10]).with("Content-Range", format!("bytes 0-9/{}", bytes.len()));
        }
        response
    });
    let (_dir, out) = out();
    pulled(&server.source("team/app:v1"), &out).unwrap();
    blobs.assert_pulled(0, &out);
}

#[test]
fn wrong_or_oversized_response_is_refused() {
    type Change = fn(&Blobs, &Request, usize, Response) -> Response;
    let cases: [(&str, Change); 8] = [
        ("failed to verify the blob", |blobs, request, _, mut response| {
            if request.path.ends_with(&blobs.layers(0)[1]) {
                response.body[100_000] ^= 1;
            }
            response
        }),
        (
            "the response has 1201665 bytes; according to the manifest, there are 1201664",
            |blobs, request, _, mut response| {
                if request.path.ends_with(&blobs.layers(0)[1]) {
                    response.body.push(0);
                }
                response
            },
        ),
        ("more than 1201664 bytes", |blobs, request, _, mut response| {
            if request.path.ends_with(&blobs.layers(0)[1]) {
                response.body.resize(3_000_000, 0);
                response.without_length = true;
            }
            response
        }),
        ("failed to verify the manifest", |blobs, request, _, mut response| {
            if request.path.ends_with(&blobs.manifest(0)) {
                response.body.push(b' ');
            }
            response
        }),
        ("expected sha256:00", |_, request, _, response| match request.path.ends_with("v1") {
            true => {
                Response::new(200, &response.body).with("Docker-Content-Digest", format!("sha256:{}", "0".repeat(64)))
            }
            false => response,
        }),
        ("the limit is 4194304", |_, request, _, mut response| {
            if request.path.ends_with("v1") {
                response.body.resize(5 << 20, b' ');
                response.without_length = true;
            }
            response
        }),
        ("schema 1", |_, request, _, response| match request.path.ends_with("v1") {
            true => Response::new(200, b"{}")
                .with("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws"),
            false => response,
        }),
        ("gave up after 3 attempts", |_, _, _, _| Response {
            headers: vec![("X", "y".repeat(1 << 20))],
            ..Response::new(200, b"")
        }),
    ];
    for (expected, change) in cases {
        let (server, _) = registry(change);
        let (_dir, out) = out();
        let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
        assert!(error.contains(expected) && error.contains("/team/app"), "{expected}: {error}");
        assert!(!out.exists(), "{expected}");
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
fn token_is_requested_and_renewed() {
    let (server, blobs) = registry(|_, request, before, response| {
        if request.path.starts_with("/token") {
            assert_eq!(request.path, "/token?service=the%20registry&scope=repository:team/app:pull");
            return match request.header("authorization") {
                Some(basic) if basic == format!("Basic {RIGHT}") => {
                    Response::new(200, format!(r#"{{"token":"t{before}","expires_in":1}}"#).as_bytes())
                }
                _ => Response::new(401, br#"{"errors":[{"message":"no such user"}]}"#),
            };
        }
        // Blobs require a newer token than the manifests.
        let good =
            if request.path.contains("/blobs/") { ["Bearer t1"].as_slice() } else { &["Bearer t0", "Bearer t1"] };
        match request.header("authorization") {
            Some(bearer) if good.contains(&bearer) => response,
            _ => {
                let realm = format!("http://{}/token", request.header("host").unwrap());
                Response::new(401, b"")
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
    assert!(error.contains("no such user") && error.contains("config.json") && !error.contains(WRONG), "{error}");
    let error = pulled(&source, &out).unwrap_err();
    assert!(error.contains("no credentials") && error.contains("docker login"), "{error}");
}

#[test]
fn password_is_not_sent_to_a_redirect_target() {
    let (elsewhere, blobs) =
        registry(|blobs, request, _, response| match blobs.all.get(request.path.trim_start_matches('/')) {
            Some(bytes) => Response::new(if request.header("authorization").is_none() { 200 } else { 400 }, bytes),
            None => response,
        });
    let port = elsewhere.port;
    let (server, _) = registry(move |_, request, _, response| match request.header("authorization") {
        None => Response::new(401, b"").with("WWW-Authenticate", "Basic realm=\"x\""),
        Some(basic) if basic == format!("Basic {RIGHT}") => match request.path.split_once("/blobs/") {
            Some((_, blob)) => Response::new(307, b"").with("Location", format!("http://localhost:{port}/{blob}")),
            None => response,
        },
        Some(_) => Response::new(401, b"").with("WWW-Authenticate", "Basic realm=\"x\""),
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
fn token_with_control_characters_is_refused() {
    let (server, _) = registry(|_, request, _, _| match request.path.starts_with("/token") {
        true => Response::new(200, br#"{"token":"a\r\nX: y"}"#),
        false => {
            let realm = format!("http://{}/token", request.header("host").unwrap());
            Response::new(401, b"").with("WWW-Authenticate", format!("Bearer realm=\"{realm}\""))
        }
    });
    let (_dir, out) = out();
    let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
    assert!(error.contains("returned no valid token"), "{error}");
}

#[test]
fn redirect_loop_is_refused() {
    let (server, _) = registry(|_, request, _, _| Response::new(302, b"").with("Location", request.path.clone()));
    let (_dir, out) = out();
    let error = pulled(&server.source("team/app:v1"), &out).unwrap_err();
    assert!(error.contains("redirects"), "{error}");
    assert!(server.paths().len() < 10);
}
