//! A container registry on the host: docker-registry from Debian, on the loopback
//! interface, without privileges. Its content is removed with it.

use std::fs;
use std::path::Path;
use std::process::Command;

use firstlight_progress::Progress;
use serde_json::Value;

use super::Error;
use super::server::{Server, free_port};
use super::tree::{Members, Recipe, Tree, io_error};

const REGISTRY: Recipe = Recipe {
    label: "docker-registry",
    suite: "bookworm",
    // Of its dependencies the program needs only the C library.
    packages: &["docker-registry", "libc6"],
    members: Members::Alone,
    keep: |path| path == Path::new(PROGRAM) || path.starts_with("lib") || path.starts_with("usr/lib/x86_64-linux-gnu"),
};

const PROGRAM: &str = "usr/bin/docker-registry";
const LIBRARIES: &[&str] = &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const LOADERS: &[&str] =
    &["lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"];

/// htpasswd line of the only user of a registry with authentication: `me`, password `secret`.
const USER: &str = "me:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
/// The same user for HTTP basic authentication and docker's configuration.
pub const BASIC: &str = "bWU6c2VjcmV0";

/// A running registry; dropping it kills the server.
#[derive(Debug)]
pub struct Registry {
    server: Server,
    requires_login: bool,
}

/// Starts an empty registry, which may require authentication.
///
/// # Errors
/// A package cannot be fetched, or the server does not listen; the error has the end of its log.
pub fn registry(cache: &Path, requires_login: bool, progress: Progress) -> Result<Registry, Error> {
    let tree = Tree::prepare(cache, &REGISTRY, progress)?;
    let dir = tempfile::tempdir().map_err(|error| io_error("make", &std::env::temp_dir(), error))?;
    let port = free_port()?;
    let at = |name: &str| dir.path().join(name);
    let mut text = format!(
        "version: 0.1\nlog: {{level: warn, accesslog: {{disabled: true}}}}\n\
         storage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n",
        at("data").display()
    );
    if requires_login {
        text.push_str(&format!("auth: {{htpasswd: {{realm: lab, path: {}}}}}\n", at("htpasswd").display()));
    }
    for (name, text) in [("config.yml", text.as_str()), ("htpasswd", USER)] {
        fs::write(at(name), text).map_err(|error| io_error("write", &at(name), error))?;
    }
    let libraries: Vec<String> = LIBRARIES.iter().map(|dir| tree.root.join(dir).display().to_string()).collect();
    let mut command = Command::new(tree.file(LOADERS)?);
    command.arg("--library-path").arg(libraries.join(":")).arg(tree.file(&[PROGRAM])?);
    command.arg("serve").arg(at("config.yml"));
    Ok(Registry { server: Server::start("docker-registry", command, port, dir)?, requires_login })
}

impl Registry {
    /// Returns its host and port, as in image names.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.server.port)
    }

    fn error(&self, what: impl ToString) -> Error {
        Error::Server { name: "docker-registry", port: self.server.port, what: what.to_string() }
    }

    fn headers<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        if self.requires_login { request.header("Authorization", format!("Basic {BASIC}")) } else { request }
    }

    /// Pushes one blob to the repository `name`.
    ///
    /// # Errors
    /// The registry rejects it.
    pub fn push_blob(&self, name: &str, digest: &str, bytes: &[u8]) -> Result<(), Error> {
        let begin = format!("http://{}/v2/{name}/blobs/uploads/", self.host());
        let response = self.headers(ureq::post(&begin)).send_empty().map_err(|error| self.error(error))?;
        let place = response.headers().get("location").and_then(|place| place.to_str().ok());
        let place = place.ok_or_else(|| self.error("the response to the upload request has no location"))?;
        let separator = if place.contains('?') { '&' } else { '?' };
        let put = self.headers(ureq::put(format!("{place}{separator}digest={digest}")));
        put.header("Content-Type", "application/octet-stream").send(bytes).map_err(|error| self.error(error))?;
        Ok(())
    }

    /// Pushes one manifest or index to the repository `name`; `which` is a tag or its digest.
    ///
    /// # Errors
    /// The registry rejects it.
    pub fn push_manifest(&self, name: &str, which: &str, media_type: &str, bytes: &[u8]) -> Result<(), Error> {
        let put = self.headers(ureq::put(format!("http://{}/v2/{name}/manifests/{which}", self.host())));
        put.header("Content-Type", media_type).send(bytes).map_err(|error| self.error(error))?;
        Ok(())
    }

    /// Pushes the first image of a layout to the repository `name` and tags it.
    ///
    /// # Errors
    /// The layout cannot be read, or the registry rejects it.
    pub fn push(&self, layout: &Path, name: &str, tag: &str) -> Result<(), Error> {
        let read = |path: &Path| fs::read(path).map_err(|error| Error::from(io_error("read", path, error)));
        let index = layout.join("index.json");
        let document = |path: &Path, bytes: &[u8]| {
            serde_json::from_slice::<Value>(bytes).map_err(|error| Error::from(io_error("parse", path, error.into())))
        };
        let manifest = document(&index, &read(&index)?)?["manifests"][0].clone();
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap_or_default().to_owned();
            (layout.join("blobs").join(digest.replace(':', "/")), digest)
        };
        let (path, _) = blob(&manifest);
        let bytes = read(&path)?;
        let parts = document(&path, &bytes)?;
        for part in parts["layers"].as_array().into_iter().flatten().chain([&parts["config"]]) {
            let (path, digest) = blob(part);
            self.push_blob(name, &digest, &read(&path)?)?;
        }
        self.push_manifest(name, tag, manifest["mediaType"].as_str().unwrap_or_default(), &bytes)
    }
}
