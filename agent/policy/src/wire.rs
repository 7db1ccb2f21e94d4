//! What agent and judge say to each other: two lengths, a header in JSON, a body.

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The longest header or body, bytes: a policy, and a request of ttrpc, are far below.
const MAX: usize = 32 * 1024 * 1024;

/// From the agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The body is the policy's text.
    Load {
        /// What `data.pstate` begins as.
        state: Value,
        /// The longest evaluation.
        limit: Duration,
    },
    /// The body is a request's message as it came from the wire.
    Judge {
        /// The name of the message.
        request: String,
    },
}

/// From the judge.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The policy is in force.
    Loaded,
    /// It is not one.
    Unloadable(String),
    /// A request was judged.
    Judged {
        /// The verdict.
        verdict: Verdict,
        /// `data.pstate`, if it has changed.
        state: Option<Value>,
    },
}

/// Whether a request may be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// It may.
    Allowed,
    /// It would be denied, but the policy has `AllowRequestsFailingPolicy`.
    Tolerated,
    /// It may not.
    Denied,
    /// It is no request.
    Malformed,
}

/// A decision and what there is to say about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The decision.
    pub decision: Decision,
    /// What the policy printed, and why it could not decide if it could not.
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

/// Reads a header and a body; the end of the stream before the first byte is an error too.
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
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{length} bytes announced, {MAX} is the most")));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Ask::Judge { request: "X".into() }, b"body").unwrap();
        let (ask, body) = read::<Ask>(&mut bytes.as_slice()).unwrap();
        assert!(matches!(ask, Ask::Judge { request } if request == "X"));
        assert_eq!(body, b"body");
        for cut in 0..bytes.len() {
            assert!(read::<Ask>(&mut &bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn an_absurd_length_is_refused_before_anything_is_allocated() {
        assert!(read::<Ask>(&mut [0xff; 64].as_slice()).is_err());
    }
}
