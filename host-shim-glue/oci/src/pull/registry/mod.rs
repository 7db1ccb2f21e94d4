//! A client for registries (OCI distribution specification).
//!
//! Limited to what a pull needs: manifests, blobs, tokens and passwords. Every response is
//! bounded before it is read, which existing clients do not do: see docs/adr/0011.

mod challenge;
mod credentials;
mod response;
mod retry;

use std::net::IpAddr;
use std::time::Duration;

use firstlight_progress::Progress;
use oci_spec::image::Descriptor;
use ureq::http::{Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

pub use credentials::Credentials;
pub use retry::RetryPolicy;

use challenge::Challenge;
use credentials::Basic;
use response::{ManifestResponse, REPORT, error_message, header, read_bounded, transport_error};
use retry::{AttemptError, Attempts};

use super::PullRequest;
use super::blob_source::{BlobSource, CopyError, RootDocument, check_document_size, copy, verify_document};
use super::document::{DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST};
use super::error::{COPY_AGAIN, PullError, RECREATE, clipped, file_error, invalid, too_large};
use super::limits;
use super::reference::{Reference, RemoteImage};
use super::staging::{PartialBlob, Staging};

/// Accepted media types of manifests.
const MANIFEST_TYPES: &[&str] = &[OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];
/// Timeout of name resolution and of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of the response headers, and of every read of a body.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(1);

/// A repository of a registry.
pub(crate) struct Registry {
    agent: Agent,
    remote: RemoteImage,
    /// `https://HOST/v2/REPOSITORY`.
    base_url: String,
    /// The name of the repository at the registry.
    repository: String,
    credentials: Option<Basic>,
    /// The file of the credentials, for messages.
    credentials_file: String,
    /// The `Authorization` header that answers the last challenge.
    authorization: Option<String>,
    retry: RetryPolicy,
    progress: Progress,
}

/// Returns whether a host, with or without a port, is the loopback interface.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost" || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns the host to connect to and the repository there: those of Docker Hub differ from
/// the names that users write.
fn resolve_aliases(remote: &RemoteImage) -> (String, String) {
    match remote.host.as_str() {
        "docker.io" | "index.docker.io" => {
            let library = if remote.repository.contains('/') { "" } else { "library/" };
            ("registry-1.docker.io".to_owned(), format!("{library}{}", remote.repository))
        }
        host => (host.to_owned(), remote.repository.clone()),
    }
}

fn new_agent(plain_http: bool, is_loopback: bool) -> Agent {
    let mut config = Agent::config_builder()
        .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")))
        .http_status_as_error(false)
        // Holds for redirects and token services as well.
        .https_only(!plain_http)
        .max_redirects(limits::REDIRECTS)
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(RESPONSE_TIMEOUT))
        .timeout_per_read(Some(RESPONSE_TIMEOUT))
        .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build());
    if is_loopback {
        config = config.proxy(None);
    }
    config.build().new_agent()
}

impl Registry {
    pub(crate) fn new(remote: &RemoteImage, request: &PullRequest<'_>) -> Result<Self, PullError> {
        let is_loopback = is_loopback(&remote.host);
        let plain_http = request.plain_http || is_loopback;
        let (host, repository) = resolve_aliases(remote);
        let scheme = if plain_http { "http" } else { "https" };
        Ok(Self {
            agent: new_agent(plain_http, is_loopback),
            remote: remote.clone(),
            base_url: format!("{scheme}://{host}/v2/{repository}"),
            repository,
            credentials: request.credentials.for_host(&remote.host)?,
            credentials_file: request.credentials.location(),
            authorization: None,
            retry: request.retry,
            progress: request.progress,
        })
    }

    fn blob_object(&self, descriptor: &Descriptor) -> String {
        format!("{}: {}", self.remote, descriptor.digest())
    }

    /// Returns a permanent error of the repository.
    fn permanent(&self, step: &'static str, reason: String, advice: &'static str) -> AttemptError {
        AttemptError::Permanent(invalid(self.name(), step, reason, advice))
    }

    fn denied(&self, reason: impl Into<String>) -> AttemptError {
        AttemptError::Permanent(PullError::Denied { object: self.name(), reason: reason.into() })
    }

    /// Sends a request, and repeats it once with credentials if it is answered by a
    /// challenge. `offset` is the first byte that is requested.
    fn get(&mut self, path: &str, accept: &[&str], offset: u64) -> Result<Response<Body>, AttemptError> {
        let url = format!("{}/{path}", self.base_url);
        let mut challenged = false;
        loop {
            let mut response = self.send(&url, accept, offset)?;
            match response.status() {
                StatusCode::OK => return Ok(response),
                StatusCode::PARTIAL_CONTENT if offset > 0 => return Ok(response),
                StatusCode::UNAUTHORIZED if !challenged => {
                    challenged = true;
                    self.authorize(&response)?;
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    return Err(self.denied_with_advice(&error_message(&mut response)));
                }
                StatusCode::NOT_FOUND => {
                    let reason = format!("not found at {url}: {}", error_message(&mut response));
                    let advice = "check the name and the tag; a private repository may require docker login";
                    return Err(self.permanent("get the image", reason, advice));
                }
                status => return Err(self.unexpected_status(status, &mut response, &url)),
            }
        }
    }

    fn send(&self, url: &str, accept: &[&str], offset: u64) -> Result<Response<Body>, AttemptError> {
        let mut request = self.agent.get(url);
        for media_type in accept {
            request = request.header("Accept", *media_type);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        if offset > 0 {
            request = request.header("Range", format!("bytes={offset}-"));
        }
        request.call().map_err(|error| transport_error(&error, url))
    }

    fn unexpected_status(&self, status: StatusCode, response: &mut Response<Body>, url: &str) -> AttemptError {
        let seconds = header(response, "retry-after").and_then(|text| text.trim().parse().ok());
        let reason = format!("{url} returned {status}: {}", error_message(response));
        match status.as_u16() {
            408 | 416 | 425 | 429 | 500..600 => {
                AttemptError::Temporary { reason, retry_after: seconds.map(Duration::from_secs) }
            }
            _ => self.permanent("get the image", reason, REPORT),
        }
    }

    /// Returns the error of a denied request, with the next thing to try.
    fn denied_with_advice(&self, reason: &str) -> AttemptError {
        let (host, file) = (&self.remote.host, &self.credentials_file);
        self.denied(match &self.credentials {
            Some(_) => format!("{reason}; it refuses the credentials of {file} for {host}: log in again"),
            None => {
                format!("{reason}; there are no credentials for {host} in {file}: use docker login, or check the name")
            }
        })
    }

    /// Answers the challenge of a 401 response.
    fn authorize(&mut self, response: &Response<Body>) -> Result<(), AttemptError> {
        let headers = response.headers().get_all("www-authenticate").iter();
        let challenges: Vec<Challenge> =
            headers.filter_map(|value| value.to_str().ok()).flat_map(challenge::parse).collect();
        if let Some(bearer) = challenges.iter().find(|challenge| challenge.has_scheme("bearer")) {
            let token = self.request_token(bearer)?;
            self.authorization = Some(format!("Bearer {token}"));
            return Ok(());
        }
        if !challenges.iter().any(|challenge| challenge.has_scheme("basic")) {
            return Err(self.denied("it returned 401 and supports neither passwords nor tokens"));
        }
        let Some(credentials) = &self.credentials else {
            return Err(self.denied_with_advice("it requires a user name and a password"));
        };
        let authorization = Some(format!("Basic {}", credentials.encoded()));
        if self.authorization == authorization {
            return Err(self.denied_with_advice("401"));
        }
        self.authorization = authorization;
        Ok(())
    }

    fn request_token(&self, challenge: &Challenge) -> Result<String, AttemptError> {
        let Some(url) = challenge.token_url(&self.repository) else {
            return Err(self.denied("its challenge names no token service"));
        };
        let mut request = self.agent.get(&url);
        if let Some(credentials) = &self.credentials {
            request = request.header("Authorization", format!("Basic {}", credentials.encoded()));
        }
        let mut response = request.call().map_err(|error| transport_error(&error, &url))?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let message = error_message(&mut response);
                return Err(self.denied_with_advice(&format!("its token service: {message}")));
            }
            status => return Err(self.unexpected_status(status, &mut response, &url)),
        }
        let bytes = read_bounded(&mut response, limits::TOKEN)
            .map_err(|error| AttemptError::temporary(format!("{url}: {error}")))?;
        challenge::parse_token(&bytes).ok_or_else(|| self.denied(format!("{url} returned no valid token")))
    }

    /// Requests an index or a manifest, with retries.
    fn get_manifest(&mut self, reference: &str) -> Result<ManifestResponse, PullError> {
        let object = self.name();
        let mut attempts = Attempts::new(self.retry, self.progress);
        loop {
            match self.try_get_manifest(reference) {
                Ok(response) => return Ok(response),
                Err(error) => attempts.wait_after(error, &object)?,
            }
        }
    }

    fn try_get_manifest(&mut self, reference: &str) -> Result<ManifestResponse, AttemptError> {
        let mut response = self.get(&format!("manifests/{reference}"), MANIFEST_TYPES, 0)?;
        let media_type = header(&response, "content-type")
            .map(|text| text.split(';').next().unwrap_or_default().trim().to_owned())
            // Some registries send every document as application/json.
            .filter(|text| text.starts_with("application/vnd."));
        let digest = header(&response, "docker-content-digest");
        let error = |size| self.permanent("read the manifest", too_large(size), RECREATE);
        if let Some(length) = response.body().content_length().filter(|length| *length > limits::DOCUMENT) {
            return Err(error(length));
        }
        let bytes = read_bounded(&mut response, limits::DOCUMENT + 1).map_err(AttemptError::temporary)?;
        if bytes.len() as u64 > limits::DOCUMENT {
            return Err(error(bytes.len() as u64));
        }
        Ok(ManifestResponse { bytes, media_type, digest })
    }

    /// Requests the part of a blob that previous attempts have not transferred.
    fn try_fetch_blob(
        &mut self,
        descriptor: &Descriptor,
        blob: &mut PartialBlob,
        staging: &Staging,
    ) -> Result<(), AttemptError> {
        let (size, offset) = (descriptor.size(), blob.written());
        let mut response = self.get(&format!("blobs/{}", descriptor.digest()), &[], offset)?;
        let range = format!("bytes {offset}-");
        let is_continued = header(&response, "content-range").is_some_and(|header| header.starts_with(&range));
        let is_partial = response.status() == StatusCode::PARTIAL_CONTENT;
        if offset > 0 && !(is_partial && is_continued) {
            *blob = staging.new_blob(size).map_err(AttemptError::Permanent)?;
        }
        if is_partial && !is_continued {
            return Err(AttemptError::temporary("it returned another part than requested"));
        }
        let left = size - blob.written();
        if let Some(length) = response.body().content_length().filter(|length| *length != left) {
            let reason = format!("the response has {length} bytes; according to the manifest, there are {left}");
            let object = self.blob_object(descriptor);
            return Err(AttemptError::Permanent(invalid(object, "verify the blob", reason, COPY_AGAIN)));
        }
        let result = copy(&mut response.body_mut().as_reader(), blob);
        self.check_copy(result, descriptor, blob, staging)
    }

    /// Classifies the result of a transfer.
    fn check_copy(
        &self,
        result: Result<(), CopyError>,
        descriptor: &Descriptor,
        blob: &PartialBlob,
        staging: &Staging,
    ) -> Result<(), AttemptError> {
        let (written, size) = (blob.written(), descriptor.size());
        match result {
            Ok(()) if written == size => Ok(()),
            Ok(()) => Err(AttemptError::temporary(format!("the response ended after {written} of {size} bytes"))),
            Err(CopyError::Read(error)) => {
                Err(AttemptError::temporary(format!("after {written} of {size} bytes: {error}")))
            }
            Err(CopyError::Write(error)) if error.kind() == std::io::ErrorKind::FileTooLarge => {
                let (object, reason) = (self.blob_object(descriptor), format!("it has {error}"));
                Err(AttemptError::Permanent(invalid(object, "verify the blob", reason, COPY_AGAIN)))
            }
            Err(CopyError::Write(error)) => Err(AttemptError::Permanent(file_error("write", &staging.parts())(error))),
        }
    }

    /// Transfers a blob, with retries; the result is not verified yet.
    fn transfer(&mut self, descriptor: &Descriptor, staging: &Staging) -> Result<PartialBlob, PullError> {
        let object = self.blob_object(descriptor);
        let mut attempts = Attempts::new(self.retry, self.progress);
        let mut blob = staging.new_blob(descriptor.size())?;
        loop {
            let before = blob.written();
            let Err(error) = self.try_fetch_blob(descriptor, &mut blob, staging) else { return Ok(blob) };
            let transferred = blob.written().saturating_sub(before);
            if before > 0 && transferred == 0 {
                // Start from the beginning: a registry or proxy may reject the range request.
                blob = staging.new_blob(descriptor.size())?;
            }
            attempts.record_transferred(transferred);
            attempts.wait_after(error, &object)?;
        }
    }
}

impl BlobSource for Registry {
    fn name(&self) -> String {
        self.remote.to_string()
    }

    fn root_document(&mut self) -> Result<RootDocument, PullError> {
        let reference = self.remote.reference.clone();
        let ManifestResponse { bytes, media_type, digest: stated } = self.get_manifest(&reference.to_string())?;
        let found = format!("sha256:{}", firstlight_image::digest::of_bytes(&bytes));
        let requested = if let Reference::Digest(digest) = &reference { Some(digest.to_string()) } else { None };
        for expected in requested.into_iter().chain(stated.filter(|stated| stated.starts_with("sha256:"))) {
            if expected != found {
                let reason = format!("it has {found}; expected {}", clipped(&expected));
                return Err(invalid(self.name(), "verify the manifest", reason, COPY_AGAIN));
            }
        }
        Ok(RootDocument { object: self.name(), bytes, media_type, reference: None })
    }

    fn read_document(&mut self, descriptor: &Descriptor) -> Result<Vec<u8>, PullError> {
        let object = self.blob_object(descriptor);
        check_document_size(descriptor, &object)?;
        let bytes = self.get_manifest(descriptor.digest().as_ref())?.bytes;
        verify_document(bytes, descriptor, &object)
    }

    fn fetch_blob(&mut self, descriptor: &Descriptor, staging: &mut Staging) -> Result<(), PullError> {
        let object = self.name();
        let blob = self.transfer(descriptor, staging)?;
        let Err(error) = staging.finish_blob(blob, descriptor, &object) else { return Ok(()) };
        if !matches!(error, PullError::Invalid { .. }) {
            return Err(error);
        }
        // Parts of several responses may not fit together, so the blob is transferred again.
        self.progress.say(format_args!("{error}; retrying once"));
        let blob = self.transfer(descriptor, staging)?;
        staging.finish_blob(blob, descriptor, &object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_hosts_are_recognized() {
        for (host, expected) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:5000", true),
            ("[::1]:5000", true),
            ("127.0.0.1.example.org", false),
            ("localhost.example.org:5000", false),
            ("10.0.0.1", false),
        ] {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }

    #[test]
    fn names_of_docker_hub_are_resolved() {
        let resolve = |host: &str, repository: &str| {
            resolve_aliases(&RemoteImage {
                host: host.to_owned(),
                repository: repository.to_owned(),
                reference: Reference::Tag("latest".to_owned()),
            })
        };
        let expected = |host: &str, repository: &str| (host.to_owned(), repository.to_owned());
        assert_eq!(resolve("docker.io", "busybox"), expected("registry-1.docker.io", "library/busybox"));
        assert_eq!(resolve("docker.io", "a/b"), expected("registry-1.docker.io", "a/b"));
        assert_eq!(resolve("ghcr.io", "a"), expected("ghcr.io", "a"));
    }
}
