//! What comes back from a registry, bounded before it is read.

use std::io::Read;

use ureq::Body;
use ureq::http::Response;

use super::super::document::clipped;
use super::super::error::input;
use super::super::limits;
use super::tries::Trouble;

/// A manifest, and what is said about it.
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: Option<String>,
    pub(crate) digest: Option<String>,
}

/// Worth another attempt.
pub(crate) fn passing(why: impl Into<String>) -> Trouble {
    Trouble::Passing { why: why.into(), wait: None }
}

/// Trouble before there was an answer.
pub(crate) fn of_transport(error: &ureq::Error, url: &str) -> Trouble {
    let why = format!("{url}: {error}");
    let fixed = |next| Trouble::Final(input(url, "ask the registry", error.to_string(), next));
    match error {
        ureq::Error::RequireHttpsOnly(_) => fixed("it leads to plain HTTP; --plain-http would allow that"),
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => {
            fixed("look at the host's certificates; a registry without TLS needs --plain-http")
        }
        ureq::Error::TooManyRedirects | ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
            fixed("ask who runs the registry")
        }
        _ => passing(why),
    }
}

/// A header as text.
pub(crate) fn header(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// At most `limit` bytes of an answer.
pub(crate) fn bounded(response: &mut Response<Body>, limit: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = response.body_mut().as_reader().take(limit).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|error| error.to_string())
}

/// What a registry says about an error, for people.
pub(crate) fn complaint(response: &mut Response<Body>) -> String {
    let status = response.status();
    let bytes = bounded(response, limits::COMPLAINT).unwrap_or_default();
    let said: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
    let first = said.as_ref().and_then(|said| said.get("errors")).and_then(|errors| errors.get(0));
    let message = first.and_then(|error| error.get("message")).and_then(|message| message.as_str());
    message.map_or_else(|| status.to_string(), |message| clipped(message).escape_debug().to_string())
}
