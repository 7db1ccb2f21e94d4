//! Messages between PID 1 and the agent.
//!
//! One Unix stream socket, [`SOCKET`], in a directory that only root in the
//! guest's own mount namespace can reach; PID 1 also checks the peer's
//! credentials. Each message is one line of JSON, at most [`MAX_LINE`] bytes.
//! PID 1 sends [`FromInit::Gpus`] when a client sends [`ToInit::Subscribe`] and
//! again at every change, so a client never polls.
//!
//! A request that has a reply carries a [`RequestId`] chosen by the client, which the reply
//! repeats: replies may arrive in another order than the requests.
#![forbid(unsafe_code)]

use firstlight_boot_record::{BootRecord, DriverCode, Gpu, GpuPhase};
use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

/// Path of PID 1's control socket.
pub const SOCKET: &str = "/run/firstlight/control.sock";

/// Path of the boot record that PID 1 writes.
pub const RECORD: &str = "/run/firstlight/boot-record.json";

/// The longest line either side accepts, bytes, newline included.
pub const MAX_LINE: usize = 1 << 20;

/// The id of a request, unique among the requests of a connection that have no reply yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// The state of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// PCI address, its name in all interfaces.
    pub pci: Address,
    /// The index N of `nvidia.com/gpu=N`: position in PCI order among the GPUs now in the guest.
    pub index: u32,
    /// Phase of its attach.
    pub phase: GpuPhase,
    /// The current or failed step.
    pub step: String,
    /// Attempts started.
    pub attempts: u32,
    /// Start of the first attempt, µs of `CLOCK_BOOTTIME`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_us: Option<u64>,
    /// When it became ready or failed, µs of `CLOCK_BOOTTIME`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end_us: Option<u64>,
    /// Duration from the first open to the driver's result, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub attach_us: Option<u64>,
    /// The driver's result, if it returned one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub driver: Option<DriverCode>,
    /// One line: the error and the next step.
    #[serde(default)]
    pub detail: String,
}

impl From<&Gpu> for GpuState {
    fn from(gpu: &Gpu) -> Self {
        Self {
            pci: gpu.pci,
            index: gpu.index,
            phase: gpu.phase,
            step: gpu.step.clone(),
            attempts: gpu.attempts,
            start_us: gpu.start_us,
            end_us: gpu.end_us,
            attach_us: gpu.attach_us,
            driver: gpu.driver,
            detail: gpu.detail.clone(),
        }
    }
}

/// A message from a client to PID 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToInit {
    /// Requests the GPUs, now and at every change.
    Subscribe,
    /// Requests the guest's log messages as they arrive: see [`FromInit::Log`].
    SubscribeLog,
    /// Reports that the agent's server accepts connections.
    Listening {
        /// Time, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
    },
    /// Adds an event to the boot record.
    Event {
        /// Time, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
        /// Kind, one word.
        kind: String,
        /// The object: a container id, a process, a PCI address.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Requests the current boot record.
    Record {
        /// The request's id, which the reply repeats.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        id: Option<RequestId>,
    },
    /// Requests a kernel module and its dependencies.
    LoadModule {
        /// The request's id, which the reply repeats.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        id: Option<RequestId>,
        /// Its name.
        name: String,
        /// Module parameters, separated by spaces.
        parameters: String,
    },
    /// Requests an orderly shutdown and power-off.
    PowerOff {
        /// The requester and its reason, for the boot record.
        reason: String,
    },
}

/// A message from PID 1 to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromInit {
    /// The current state of all GPUs.
    Gpus {
        /// Whether the PCI bus has been scanned; until then the list is meaningless.
        scanned: bool,
        /// In PCI order.
        gpus: Vec<GpuState>,
    },
    /// A daemon that PID 1 supervises became ready or stopped being ready. Sent
    /// to subscribers: immediately for each started daemon, then at every change.
    Daemon {
        /// Its name, equal to its unit's in the boot record.
        name: String,
        /// Whether it is ready.
        ready: bool,
        /// The reason of the change.
        detail: String,
    },
    /// A log message of the kernel, a daemon or any sender to `/dev/log`: bounded
    /// and without control characters, but still untrusted input. Messages to a
    /// client that reads too slowly are dropped.
    Log {
        /// Time, µs of `CLOCK_BOOTTIME`.
        at_us: u64,
        /// Severity level, `emerg` to `debug`.
        level: String,
        /// The sender.
        source: String,
        /// The message.
        text: String,
    },
    /// The reply to [`ToInit::Record`].
    Record {
        /// The id of the request.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        id: Option<RequestId>,
        /// The boot record.
        record: Box<BootRecord>,
    },
    /// The reply to [`ToInit::LoadModule`].
    Module {
        /// The id of the request.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        id: Option<RequestId>,
        /// The module's name as requested.
        name: String,
        /// Why loading failed, if it did.
        error: Option<String>,
    },
    /// The client's last message was invalid; the connection stays open.
    Refused {
        /// Why it was refused.
        reason: String,
    },
}

/// Why a line is not a valid message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than [`MAX_LINE`].
    #[error("control socket: line of {0} bytes exceeds the limit of {MAX_LINE}")]
    TooLong(usize),
    /// Not JSON or not a known message.
    #[error("control socket: invalid message: {0}")]
    Json(#[from] serde_json::Error),
}

/// Encodes a message as one line, newline included.
///
/// # Errors
/// Never for the types of this crate; serialisation is fallible by type.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Decodes a message from a line with or without its newline.
///
/// # Errors
/// The line is too long, or not a valid message.
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
    fn encoded_message_is_one_line_and_round_trips() {
        let message = ToInit::PowerOff { reason: "two\nlines".into() };
        let line = encode(&message).unwrap();
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(decode::<ToInit>(&line).unwrap(), message);
        let record = FromInit::Record { id: Some(RequestId(7)), record: Box::new(BootRecord::new("1", 2)) };
        assert_eq!(decode::<FromInit>(&encode(&record).unwrap()).unwrap(), record);
    }

    #[test]
    fn overlong_and_unknown_lines_are_refused() {
        let long = vec![b' '; MAX_LINE + 1];
        assert!(matches!(decode::<ToInit>(&long), Err(DecodeError::TooLong(_))));
        assert!(decode::<ToInit>(b"{\"reboot\":null}\n").is_err());
    }

    #[test]
    fn request_without_id_decodes_and_is_encoded_without_it() {
        let request = ToInit::Record { id: None };
        assert_eq!(encode(&request).unwrap(), b"{\"record\":{}}\n");
        assert_eq!(decode::<ToInit>(b"{\"record\":{}}").unwrap(), request);
        let line = b"{\"load-module\":{\"name\":\"x\",\"parameters\":\"\"}}";
        assert!(matches!(decode::<ToInit>(line).unwrap(), ToInit::LoadModule { id: None, .. }));
        let line = b"{\"module\":{\"id\":3,\"name\":\"x\",\"error\":null}}";
        assert!(matches!(decode::<FromInit>(line).unwrap(), FromInit::Module { id: Some(RequestId(3)), .. }));
    }

    #[test]
    fn gpu_state_round_trips_and_leaves_out_what_is_unknown() {
        let text = r#"{"pci":"0000:01:00.0","index":0,"phase":"ready","step":"ready","attempts":1,"detail":""}"#;
        let state: GpuState = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&state).unwrap(), text);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<ToInit>(&bytes);
            let _ = decode::<FromInit>(&bytes);
        }
    }
}
