//! What PID 1 and the agent say to each other.
//!
//! One Unix stream socket, [`SOCKET`], in a directory that only root in the
//! guest's own mount namespace can reach; PID 1 also checks the peer's
//! credentials. Each message is one line of JSON, at most [`MAX_LINE`] bytes.
//! PID 1 sends [`FromInit::Gpus`] as soon as a client says
//! [`ToInit::Subscribe`] and again at every change, so a client never asks
//! twice and never polls.
#![forbid(unsafe_code)]

use firstlight_boot_record::{BootRecord, Gpu};
use serde::{Deserialize, Serialize};

/// Where PID 1 listens.
pub const SOCKET: &str = "/run/firstlight/control.sock";

/// Where PID 1 keeps the boot record.
pub const RECORD: &str = "/run/firstlight/boot-record.json";

/// The longest line either side accepts, bytes, line end included.
pub const MAX_LINE: usize = 1 << 20;

/// What a client says to PID 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToInit {
    /// Send me the GPUs now and whenever one changes.
    Subscribe,
    /// Send me what others in the guest say, as it comes: see [`FromInit::Log`].
    SubscribeLog,
    /// The agent's server accepts connections.
    Listening {
        /// When, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
    },
    /// Put this into the boot record's events.
    Event {
        /// When, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
        /// What, one word.
        kind: String,
        /// Whom it is about.
        object: String,
        /// One line more.
        detail: String,
    },
    /// Send me the boot record as it is now.
    Record,
    /// Load a kernel module, and what it needs.
    LoadModule {
        /// Its name.
        name: String,
        /// Its parameters, separated by spaces.
        parameters: String,
    },
    /// Stop everything in order and power off.
    PowerOff {
        /// Who wants it and why, for the record.
        reason: String,
    },
}

/// What PID 1 says to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromInit {
    /// All GPUs as they are now.
    Gpus {
        /// Whether the PCI bus has been scanned: before that the list says nothing.
        scanned: bool,
        /// In PCI order.
        gpus: Vec<Gpu>,
    },
    /// A daemon that PID 1 keeps running serves now, or does not any more. Sent
    /// to subscribers: at once for each that was started, then at every change.
    Daemon {
        /// Its name, which is its unit's in the boot record.
        name: String,
        /// Whether it serves.
        ready: bool,
        /// What happened.
        detail: String,
    },
    /// What the kernel, a daemon or a stranger at `/dev/log` says. Bounded, and
    /// clean of control characters, but foreign text all the same. A client that
    /// reads too slowly misses some.
    Log {
        /// When, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
        /// `emerg` to `debug`.
        level: String,
        /// Who.
        source: String,
        /// What.
        text: String,
    },
    /// The answer to [`ToInit::Record`].
    Record(Box<BootRecord>),
    /// The answer to [`ToInit::LoadModule`].
    Module {
        /// The module's name, as it was asked for.
        name: String,
        /// Why it is not loaded, if it is not.
        error: Option<String>,
    },
    /// The client's last message could not be used; the connection stays.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A line that is no message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than [`MAX_LINE`].
    #[error("control socket: a line of {0} bytes is longer than {MAX_LINE}")]
    TooLong(usize),
    /// Not JSON or not a known message.
    #[error("control socket: not a message: {0}")]
    Json(#[from] serde_json::Error),
}

/// A message as one line, line end included.
///
/// # Errors
/// Never for the types of this crate; serialisation is fallible by type.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// A line, with or without its line end, as a message.
///
/// # Errors
/// The line is too long, or not a message.
pub fn decode<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, DecodeError> {
    if line.len() > MAX_LINE {
        return Err(DecodeError::TooLong(line.len()));
    }
    Ok(serde_json::from_slice(line)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_one_line_each() {
        let message = ToInit::PowerOff { reason: "two\nlines".into() };
        let line = encode(&message).unwrap();
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(decode::<ToInit>(&line).unwrap(), message);
        let record = FromInit::Record(Box::new(BootRecord::new("1", 2)));
        assert_eq!(decode::<FromInit>(&encode(&record).unwrap()).unwrap(), record);
    }

    #[test]
    fn long_and_unknown_lines_are_refused() {
        let long = vec![b' '; MAX_LINE + 1];
        assert!(matches!(decode::<ToInit>(&long), Err(DecodeError::TooLong(_))));
        assert!(decode::<ToInit>(b"{\"reboot\":null}\n").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<ToInit>(&bytes);
            let _ = decode::<FromInit>(&bytes);
        }
    }
}
