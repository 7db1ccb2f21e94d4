//! The protocol between agent and evaluator: two lengths, a JSON header, a body.

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The longest header or body, bytes: far above a policy or a ttrpc request.
const MAX: usize = 32 * 1024 * 1024;

/// A request of the agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Loads a policy; the body is its text.
    Load {
        /// The initial `data.pstate`.
        state: Value,
        /// The time limit of an evaluation.
        limit: Duration,
    },
    /// Evaluates a request; the body is its encoded message.
    Evaluate {
        /// The name of the message.
        request: String,
    },
}

/// A response of the evaluator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    /// The policy is loaded.
    Loaded,
    /// The policy is invalid.
    InvalidPolicy(String),
    /// A request was evaluated.
    Evaluated {
        /// The verdict.
        verdict: Verdict,
        /// `data.pstate`, if it has changed.
        state: Option<Value>,
    },
}

/// The decision about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// The policy allows it.
    Allowed,
    /// The policy denies it, but sets `AllowRequestsFailingPolicy`.
    Tolerated,
    /// The policy denies it.
    Denied,
    /// It is not a valid request.
    Malformed,
}

/// A decision with its explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The decision.
    pub decision: Decision,
    /// The policy's prints, and the error if the evaluation failed.
    pub text: String,
}

impl Verdict {
    pub(crate) fn new(decision: Decision, text: impl Into<String>) -> Self {
        Self { decision, text: text.into() }
    }

    pub(crate) fn denied(text: impl Into<String>) -> Self {
        Self::new(Decision::Denied, text)
    }
}

/// Writes a header and a body.
pub(crate) fn write(stream: &mut impl Write, header: &impl Serialize, body: &[u8]) -> io::Result<()> {
    let header = serde_json::to_vec(header)?;
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(io::Error::other);
    stream.write_all(&length(&header)?.to_be_bytes())?;
    stream.write_all(&length(body)?.to_be_bytes())?;
    stream.write_all(&header)?;
    stream.write_all(body)
}

/// Reads a header and a body; end of file before the first byte is an error too.
pub(crate) fn read<H: DeserializeOwned>(stream: &mut impl Read) -> io::Result<(H, Vec<u8>)> {
    let (header, body) = (length(stream)?, length(stream)?);
    let header = bytes(stream, header)?;
    Ok((serde_json::from_slice(&header)?, bytes(stream, body)?))
}

fn length(stream: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    usize::try_from(u32::from_be_bytes(bytes)).map_err(io::Error::other)
}

fn bytes(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    if length > MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("length {length} exceeds the limit of {MAX} bytes"),
        ));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_truncated_ones_fail() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Request::Evaluate { request: "X".into() }, b"body").unwrap();
        let (request, body) = read::<Request>(&mut bytes.as_slice()).unwrap();
        assert!(matches!(request, Request::Evaluate { request } if request == "X"));
        assert_eq!(body, b"body");
        for cut in 0..bytes.len() {
            assert!(read::<Request>(&mut &bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn excessive_length_is_refused_before_allocation() {
        assert!(read::<Request>(&mut [0xff; 64].as_slice()).is_err());
    }
}
