//! What comes back from a registry, bounded before it is read.

use std::io::{self, Read};

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

const TLS: &str =
    "look at the registry's certificate and at the roots of this machine; a registry without TLS needs --plain-http";

/// Trouble before there was an answer.
pub(crate) fn of_transport(error: &ureq::Error, url: &str) -> Trouble {
    let why = format!("{url}: {error}");
    let fixed = |next| Trouble::Final(input(url, "ask the registry", error.to_string(), next));
    match error {
        ureq::Error::RequireHttpsOnly(_) => fixed("it leads to plain HTTP; --plain-http would allow that"),
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => fixed(TLS),
        // So the handshake says what it does not like; waiting does not change that.
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => fixed(TLS),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let of = |error: ureq::Error| match of_transport(&error, "https://r.io/v2/") {
            Trouble::Final(error) => error.to_string(),
            Trouble::Passing { why, .. } => format!("passing: {why}"),
        };
        let io = |kind| of(ureq::Error::Io(io::Error::new(kind, "said")));
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::UnexpectedEof, io::ErrorKind::TimedOut] {
            assert!(io(kind).starts_with("passing: https://r.io/v2/"), "{kind:?}");
        }
        // As rustls reports a certificate that it does not trust, and a server that speaks plain HTTP.
        let said = io(io::ErrorKind::InvalidData);
        assert!(
            said.starts_with("https://r.io/v2/: cannot ask the registry") && said.contains("--plain-http"),
            "{said}"
        );
        let said = of(ureq::Error::RequireHttpsOnly("http://evil/".into()));
        assert!(said.contains("leads to plain HTTP"), "{said}");
        assert!(of(ureq::Error::TooManyRedirects).contains("who runs the registry"));
    }
}
