//! The protocol between the libnvfm stand-in and this process: a frame is a version byte, the length (four bytes,
//! big-endian) and JSON. One reply per request.

use std::io::{Error, ErrorKind, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::call::{Call, Payload};

/// The version of the frames.
pub const VERSION: u8 = 1;
/// The maximum length of a frame, ten times the largest list.
pub const MAX_MESSAGE: usize = 1 << 20;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Checks that the manager answers.
    Hello,
    /// A call.
    Call(Call),
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// A code of [`crate::codes`].
    pub rc: i32,
    /// Empty unless the code is 0.
    pub payload: Payload,
}

impl Reply {
    /// Creates a reply without data.
    #[must_use]
    pub fn code(rc: i32) -> Self {
        Self { rc, payload: Payload::Nothing }
    }
}

/// Writes one frame.
///
/// # Errors
/// The peer has disconnected.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).map_err(|_| Error::from(ErrorKind::InvalidData))?;
    let mut frame = vec![VERSION];
    frame.extend(length.to_be_bytes());
    frame.extend(json);
    to.write_all(&frame)
}

/// Reads one frame.
///
/// # Errors
/// The peer has disconnected, or sent an invalid frame.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, Error> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [version, length @ ..] = head;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if version != VERSION || length > MAX_MESSAGE {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut json = vec![0; length];
    from.read_exact(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

/// Sends a request and waits for the reply.
///
/// # Errors
/// The manager has disconnected.
pub fn request<S: Read + Write>(stream: &mut S, request: &Request) -> Result<Reply, Error> {
    write(stream, request)?;
    read(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_round_trip() {
        let mut bytes = Vec::new();
        let requests = [Request::Hello, Request::Call(Call::SetActivated(vec![1, 2])), Request::Call(Call::List)];
        for request in &requests {
            write(&mut bytes, request).unwrap();
        }
        let mut from = bytes.as_slice();
        assert!(requests.iter().all(|request| read::<Request>(&mut from).unwrap() == *request));
        assert_eq!(read::<Request>(&mut from).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        bytes[0] = 2;
        assert_eq!(read::<Request>(&mut bytes.as_slice()).unwrap_err().kind(), ErrorKind::InvalidData);
        assert!(read::<Request>(&mut [VERSION, 0xff, 0, 0, 0].as_slice()).is_err(), "not that much");
    }

    proptest! {
        #[test]
        fn garbage_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert!(read::<Request>(&mut bytes.as_slice()).is_err());
        }
    }
}
