//! Registries, by the OCI distribution protocol.
//!
//! Only what a pull needs: manifests and blobs, tokens and passwords. The
//! client is ours because every answer has to be bounded before it is read.

mod answer;
mod challenge;
mod credentials;
mod tries;

use std::net::IpAddr;
use std::time::Duration;

use firstlight_progress::Progress;
use ureq::http::{Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

pub use credentials::Credentials;
pub use tries::Patience;

use answer::{Answer, bounded, complaint, header, of_transport, passing};
use challenge::Challenge;
use credentials::Basic;
use tries::{Tries, Trouble};

use super::Wanted;
use super::document::{DOCKER_LIST, DOCKER_MANIFEST, Descriptor, OCI_INDEX, OCI_MANIFEST, clipped, too_large};
use super::error::{COPY_AGAIN, Error, OTHER_TOOL, input, io_error};
use super::limits;
use super::origin::{Interrupted, Origin, Root, check_document, copy, verified};
use super::reference::{Remote, Which};
use super::staging::{Blob, Staging};

const MANIFESTS: &[&str] = &[OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];
/// For an address, a connection, an answer, and between two parts of one.
const CONNECT: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_mins(1);

/// A repository of a registry.
pub(crate) struct Registry {
    agent: Agent,
    remote: Remote,
    /// `https://HOST/v2/NAME`.
    base: String,
    name: String,
    credentials: Option<Basic>,
    /// Where they are from, for messages.
    credentials_from: String,
    /// What the last answer to a challenge was.
    authorization: Option<String>,
    patience: Patience,
    progress: Progress,
}

/// Whether a host is this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost" || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Docker Hub goes by other names than its own.
fn real(remote: &Remote) -> (String, String) {
    match remote.host.as_str() {
        "docker.io" | "index.docker.io" => {
            let library = if remote.name.contains('/') { "" } else { "library/" };
            ("registry-1.docker.io".to_owned(), format!("{library}{}", remote.name))
        }
        host => (host.to_owned(), remote.name.clone()),
    }
}

impl Registry {
    pub(crate) fn new(remote: &Remote, wanted: &Wanted<'_>) -> Result<Self, Error> {
        let loopback = is_loopback(&remote.host);
        let plain = wanted.plain_http || loopback;
        let mut config = Agent::config_builder()
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Also where a redirect or a token service leads.
            .https_only(!plain)
            .max_redirects(limits::REDIRECTS)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(ANSWER))
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build());
        if loopback {
            config = config.proxy(None);
        }
        let (host, name) = real(remote);
        let scheme = if plain { "http" } else { "https" };
        Ok(Self {
            agent: config.build().new_agent(),
            remote: remote.clone(),
            base: format!("{scheme}://{host}/v2/{name}"),
            name,
            credentials: wanted.credentials.of(&remote.host)?,
            credentials_from: wanted.credentials.place(),
            authorization: None,
            patience: wanted.patience,
            progress: wanted.progress,
        })
    }

    fn said(&self) -> String {
        self.remote.to_string()
    }

    fn denied(&self, why: impl Into<String>) -> Trouble {
        Trouble::Final(Error::Denied { object: self.said(), why: why.into() })
    }

    /// One request, with a second one if the first is answered by a challenge.
    fn get(&mut self, path: &str, accept: &[&str], from: u64) -> Result<Response<Body>, Trouble> {
        let url = format!("{}/{path}", self.base);
        let mut challenged = false;
        loop {
            let mut request = self.agent.get(&url);
            for one in accept {
                request = request.header("Accept", *one);
            }
            if let Some(authorization) = &self.authorization {
                request = request.header("Authorization", authorization);
            }
            if from > 0 {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let mut response = request.call().map_err(|error| of_transport(&error, &url))?;
            match response.status() {
                StatusCode::OK => return Ok(response),
                StatusCode::PARTIAL_CONTENT if from > 0 => return Ok(response),
                StatusCode::UNAUTHORIZED if !challenged => {
                    challenged = true;
                    self.authorize(&response)?;
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    return Err(self.denied(self.advice(&complaint(&mut response))));
                }
                StatusCode::NOT_FOUND => {
                    let why = format!("there is none at {url}: {}", complaint(&mut response));
                    let next = "look at the name and the tag; a private one may need docker login";
                    return Err(Trouble::Final(input(self.said(), "get the image", why, next)));
                }
                status => return Err(self.of_status(status, &mut response, &url)),
            }
        }
    }

    fn of_status(&self, status: StatusCode, response: &mut Response<Body>, url: &str) -> Trouble {
        let wait = header(response, "retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let why = format!("{url} answers {status}: {}", complaint(response));
        match status.as_u16() {
            408 | 416 | 425 | 429 | 500..600 => Trouble::Passing { why, wait },
            _ => Trouble::Final(input(self.said(), "get the image", why, "ask who runs the registry")),
        }
    }

    fn advice(&self, complaint: &str) -> String {
        let host = &self.remote.host;
        match &self.credentials {
            Some(_) => {
                format!("{complaint}; it refuses the credentials of {} for {host}: log in again", self.credentials_from)
            }
            None => format!(
                "{complaint}; there are no credentials for {host} in {}: use docker login, or look at the name",
                self.credentials_from
            ),
        }
    }

    /// Answers the challenge of a 401.
    fn authorize(&mut self, response: &Response<Body>) -> Result<(), Trouble> {
        let challenges: Vec<Challenge> = response
            .headers()
            .get_all("www-authenticate")
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(challenge::read)
            .collect();
        if let Some(bearer) = challenges.iter().find(|one| one.is("bearer")) {
            let token = self.token(bearer)?;
            self.authorization = Some(format!("Bearer {token}"));
            return Ok(());
        }
        if !challenges.iter().any(|one| one.is("basic")) {
            return Err(self.denied("it says 401 and asks neither for a password nor for a token"));
        }
        let Some(credentials) = &self.credentials else {
            return Err(self.denied(self.advice("it asks for a name and a password")));
        };
        let answer = Some(format!("Basic {}", credentials.encoded()));
        if self.authorization == answer {
            return Err(self.denied(self.advice("401")));
        }
        self.authorization = answer;
        Ok(())
    }

    fn token(&self, challenge: &Challenge) -> Result<String, Trouble> {
        let Some(url) = challenge.token_url(&self.name) else {
            return Err(self.denied("its challenge names no token service"));
        };
        let mut request = self.agent.get(&url);
        if let Some(credentials) = &self.credentials {
            request = request.header("Authorization", format!("Basic {}", credentials.encoded()));
        }
        let mut response = request.call().map_err(|error| of_transport(&error, &url))?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(self.denied(self.advice(&format!("its token service: {}", complaint(&mut response)))));
            }
            status => return Err(self.of_status(status, &mut response, &url)),
        }
        let bytes = bounded(&mut response, limits::TOKEN).map_err(|why| passing(format!("{url}: {why}")))?;
        challenge::token(&bytes).ok_or_else(|| self.denied(format!("{url} gives no token")))
    }

    fn manifest(&mut self, which: &str) -> Result<Answer, Error> {
        let object = self.said();
        let mut tries = Tries::new(self.patience, self.progress);
        loop {
            match self.manifest_once(which) {
                Ok(found) => return Ok(found),
                Err(trouble) => tries.after(trouble, &object)?,
            }
        }
    }

    fn manifest_once(&mut self, which: &str) -> Result<Answer, Trouble> {
        let mut response = self.get(&format!("manifests/{which}"), MANIFESTS, 0)?;
        let media_type = header(&response, "content-type")
            .map(|text| text.split(';').next().unwrap_or_default().trim().to_owned())
            // Some send every document as plain JSON, which says nothing.
            .filter(|text| text.starts_with("application/vnd."));
        let digest = header(&response, "docker-content-digest");
        if response.body().content_length().is_some_and(|length| length > limits::DOCUMENT) {
            let why = too_large(response.body().content_length().unwrap_or_default());
            return Err(Trouble::Final(input(self.said(), "read the manifest", why, OTHER_TOOL)));
        }
        let bytes = bounded(&mut response, limits::DOCUMENT + 1).map_err(passing)?;
        if bytes.len() as u64 > limits::DOCUMENT {
            let why = too_large(bytes.len() as u64);
            return Err(Trouble::Final(input(self.said(), "read the manifest", why, OTHER_TOOL)));
        }
        Ok(Answer { bytes, media_type, digest })
    }

    /// Goes on with a blob where the last attempt ended.
    fn blob_once(&mut self, wanted: &Descriptor, blob: &mut Blob, staging: &Staging) -> Result<(), Trouble> {
        let from = blob.written();
        let mut response = self.get(&format!("blobs/{}", wanted.digest), &[], from)?;
        let goes_on =
            header(&response, "content-range").is_some_and(|range| range.starts_with(&format!("bytes {from}-")));
        if response.status() == StatusCode::PARTIAL_CONTENT && !goes_on {
            *blob = staging.blob(wanted.size).map_err(Trouble::Final)?;
            return Err(passing("it sends another part than it was asked for"));
        }
        if from > 0 && response.status() == StatusCode::OK {
            *blob = staging.blob(wanted.size).map_err(Trouble::Final)?;
        }
        let left = wanted.size - blob.written();
        if let Some(length) = response.body().content_length().filter(|length| *length != left) {
            let why = format!("it sends {length} bytes; the manifest says that there are {left}");
            let object = format!("{}: {}", self.said(), wanted.digest);
            return Err(Trouble::Final(input(object, "verify the blob", why, COPY_AGAIN)));
        }
        match copy(&mut response.body_mut().as_reader(), blob) {
            Ok(()) if blob.written() == wanted.size => Ok(()),
            Ok(()) => Err(passing(format!("it ends after {} of {} bytes", blob.written(), wanted.size))),
            Err(Interrupted::Source(error)) => {
                Err(passing(format!("after {} of {} bytes: {error}", blob.written(), wanted.size)))
            }
            Err(Interrupted::Disk(error)) if error.kind() == std::io::ErrorKind::FileTooLarge => {
                let object = format!("{}: {}", self.said(), wanted.digest);
                Err(Trouble::Final(input(object, "verify the blob", format!("it has {error}"), COPY_AGAIN)))
            }
            Err(Interrupted::Disk(error)) => Err(Trouble::Final(io_error("write", &staging.parts())(error))),
        }
    }

    fn transfer(&mut self, wanted: &Descriptor, staging: &mut Staging) -> Result<Blob, Error> {
        let object = format!("{}: {}", self.said(), wanted.digest);
        let mut tries = Tries::new(self.patience, self.progress);
        let mut blob = staging.blob(wanted.size)?;
        loop {
            let before = blob.written();
            match self.blob_once(wanted, &mut blob, staging) {
                Ok(()) => return Ok(blob),
                Err(trouble) => {
                    let brought = blob.written().saturating_sub(before);
                    if before > 0 && brought == 0 {
                        // Whatever does not like the rest may like the whole.
                        blob = staging.blob(wanted.size)?;
                    }
                    tries.brought(brought);
                    tries.after(trouble, &object)?;
                }
            }
        }
    }
}

impl Origin for Registry {
    fn root(&mut self) -> Result<Root, Error> {
        let which = self.remote.which.clone();
        let Answer { bytes, media_type, digest: claimed } = self.manifest(&which.to_string())?;
        let hash = format!("sha256:{}", firstlight_image::digest::of_bytes(&bytes));
        let asked = if let Which::Digest(digest) = &which { Some(digest.to_string()) } else { None };
        for expected in asked.into_iter().chain(claimed.filter(|claimed| claimed.starts_with("sha256:"))) {
            if expected != hash {
                let why = format!("it has {hash}; expected was {}", clipped(&expected));
                return Err(input(self.said(), "verify the manifest", why, COPY_AGAIN));
            }
        }
        Ok(Root { object: self.said(), bytes, media_type, reference: None })
    }

    fn object(&self, _: &Descriptor) -> String {
        self.said()
    }

    fn fetch(&mut self, wanted: &Descriptor, staging: &mut Staging) -> Result<(), Error> {
        let object = self.said();
        let blob = self.transfer(wanted, staging)?;
        let Err(error) = staging.finish_blob(blob, wanted, &object) else { return Ok(()) };
        if !matches!(error, Error::Input { .. }) {
            return Err(error);
        }
        // Parts of two answers may not fit together; a whole one decides.
        self.progress.say(format_args!("{error}: once more"));
        let blob = self.transfer(wanted, staging)?;
        staging.finish_blob(blob, wanted, &object)
    }

    fn document(&mut self, named: &Descriptor) -> Result<Vec<u8>, Error> {
        let object = format!("{}: {}", self.said(), named.digest);
        check_document(named, &object)?;
        let bytes = self.manifest(&named.digest.to_string())?.bytes;
        verified(bytes, named, &object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known_by_its_names() {
        for (host, is) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:5000", true),
            ("[::1]:5000", true),
            ("127.0.0.1.example.org", false),
            ("localhost.example.org:5000", false),
            ("10.0.0.1", false),
        ] {
            assert_eq!(is_loopback(host), is, "{host}");
        }
    }

    #[test]
    fn docker_hub_has_other_names() {
        let remote = |host: &str, name: &str| Remote {
            host: host.to_owned(),
            name: name.to_owned(),
            which: Which::Tag("latest".to_owned()),
        };
        let of = |host: &str, name: &str| (host.to_owned(), name.to_owned());
        assert_eq!(real(&remote("docker.io", "busybox")), of("registry-1.docker.io", "library/busybox"));
        assert_eq!(real(&remote("docker.io", "a/b")), of("registry-1.docker.io", "a/b"));
        assert_eq!(real(&remote("ghcr.io", "a")), of("ghcr.io", "a"));
    }
}
