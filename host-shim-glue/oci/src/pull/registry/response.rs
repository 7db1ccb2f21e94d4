//! Responses of registries, with bounded sizes, and the classification of errors.

use std::io::{self, Read};

use ureq::Body;
use ureq::http::Response;

use super::super::error::{clipped, invalid};
use super::super::limits;
use super::retry::AttemptError;

/// A manifest and the headers that describe it.
pub(crate) struct ManifestResponse {
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: Option<String>,
    pub(crate) digest: Option<String>,
}

const TLS_ADVICE: &str = "check the registry's certificate and the root certificates of this host; a registry without TLS requires --plain-http";

/// Classifies an error that occurred before there was a response.
pub(crate) fn transport_error(error: &ureq::Error, url: &str) -> AttemptError {
    let permanent = |advice| AttemptError::Permanent(invalid(url, "send the request", error.to_string(), advice));
    match error {
        ureq::Error::RequireHttpsOnly(_) => permanent("the URL uses plain HTTP, which requires --plain-http"),
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => permanent(TLS_ADVICE),
        // Errors of the TLS handshake, which are permanent.
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => permanent(TLS_ADVICE),
        ureq::Error::TooManyRedirects | ureq::Error::BadUri(_) | ureq::Error::Http(_) => permanent(REPORT),
        _ => AttemptError::temporary(format!("{url}: {error}")),
    }
}

/// Advice where a registry does not follow the protocol.
pub(crate) const REPORT: &str = "report it to the operator of the registry";

/// Returns a header as text.
pub(crate) fn header(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Reads at most `limit` bytes of a response.
pub(crate) fn read_bounded(response: &mut Response<Body>, limit: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = response.body_mut().as_reader().take(limit).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|error| error.to_string())
}

/// Returns the message of an error response, or its status.
pub(crate) fn error_message(response: &mut Response<Body>) -> String {
    let status = response.status();
    let bytes = read_bounded(response, limits::ERROR_RESPONSE).unwrap_or_default();
    let document: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
    let message = document.as_ref().and_then(|document| document.pointer("/errors/0/message")?.as_str());
    message.map_or_else(|| status.to_string(), |message| clipped(message).escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_errors_are_retried() {
        let classify = |error: ureq::Error| match transport_error(&error, "https://r.io/v2/") {
            AttemptError::Permanent(error) => error.to_string(),
            AttemptError::Temporary { reason, .. } => format!("temporary: {reason}"),
        };
        let io = |kind| classify(ureq::Error::Io(io::Error::new(kind, "cause")));
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::UnexpectedEof, io::ErrorKind::TimedOut] {
            assert!(io(kind).starts_with("temporary: https://r.io/v2/"), "{kind:?}");
        }
        // rustls reports an untrusted certificate so, and a server that speaks plain HTTP.
        let error = io(io::ErrorKind::InvalidData);
        assert!(
            error.starts_with("https://r.io/v2/: failed to send the request") && error.contains("--plain-http"),
            "{error}"
        );
        let error = classify(ureq::Error::RequireHttpsOnly("http://evil/".into()));
        assert!(error.contains("uses plain HTTP"), "{error}");
        assert!(classify(ureq::Error::TooManyRedirects).contains("operator of the registry"));
    }
}
