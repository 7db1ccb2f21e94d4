//! What an inventory guest has measured: a JSON object for each GPU, one after the
//! other or in an array.
//!
//! ```json
//! {"guest_pci": "0000:01:00.0", "module_id": 5, "uuid": "GPU-...", "serial": "165..."}
//! ```
//!
//! With `host_pci` in place of `guest_pci` where somebody has put in the host's
//! address already.

use std::collections::BTreeMap;

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::LONGEST;
use crate::claim::{Claim, ClaimError, checked};

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Where the guest has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pci: Option<Address>,
    /// Where the host has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_pci: Option<Address>,
    /// What the driver reads.
    pub module_id: u32,
    /// Its UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// Something else than measurements.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeasuredError {
    /// It is too long.
    #[error("it has more than {LONGEST} bytes")]
    TooLong,
    /// It is not JSON of that form; the parser says where.
    #[error("{0}; each GPU is an object such as {{\"guest_pci\": \"0000:01:00.0\", \"module_id\": 5}}")]
    Form(String),
}

/// Measurements from which no place on the host follows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// Neither address, or both.
    #[error("module {module} has to have host_pci or guest_pci, one of them")]
    Which {
        /// Which GPU.
        module: u32,
    },
    /// Nobody has said where the guest's slot is.
    #[error(
        "nothing says which host address the guest's {guest} (module {module}) is; say it with --at {guest}=HOST_PCI, as the \
         inventory guest was given it"
    )]
    Unknown {
        /// The guest's address.
        guest: Address,
        /// Which GPU.
        module: u32,
    },
    /// A slot that has no GPU: a slip of the pen would go unnoticed.
    #[error("--at {guest}={host}: nothing was measured at the guest's {guest}")]
    Unused {
        /// The guest's address.
        guest: Address,
        /// The host's.
        host: Address,
    },
    /// What was measured cannot be.
    #[error(transparent)]
    Claims(#[from] ClaimError),
}

/// Reads measurements.
///
/// # Errors
/// Where they are none.
pub fn measurements(bytes: &[u8]) -> Result<Vec<Measurement>, MeasuredError> {
    if bytes.len() > LONGEST {
        return Err(MeasuredError::TooLong);
    }
    let is_array = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let read: Result<Vec<Measurement>, _> = match is_array {
        true => serde_json::from_slice(bytes),
        false => serde_json::Deserializer::from_slice(bytes).into_iter().collect(),
    };
    read.map_err(|error| MeasuredError::Form(error.to_string()))
}

/// What they say of the host: `at` has the host's address of each of the guest's slots.
///
/// # Errors
/// An address does not follow, or what was measured cannot be.
pub fn placed(measured: &[Measurement], at: &BTreeMap<Address, Address>) -> Result<Vec<Claim>, PlaceError> {
    let claim = |one: &Measurement| {
        let module = one.module_id;
        let pci = match (one.host_pci, one.guest_pci) {
            (Some(host), None) => host,
            (None, Some(guest)) => *at.get(&guest).ok_or(PlaceError::Unknown { guest, module })?,
            _ => return Err(PlaceError::Which { module }),
        };
        let word = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        Ok(Claim { module, pci, uuid: word(&one.uuid), serial: word(&one.serial) })
    };
    let claims: Vec<Claim> = measured.iter().map(claim).collect::<Result<_, _>>()?;
    let is_used = |guest: &Address| measured.iter().any(|one| one.guest_pci == Some(*guest));
    if let Some((guest, host)) = at.iter().find(|(guest, _)| !is_used(guest)) {
        return Err(PlaceError::Unused { guest: *guest, host: *host });
    }
    checked(&claims)?;
    Ok(claims)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"{"guest_pci": "0000:01:00.0", "module_id": 5, "uuid": "GPU-a", "serial": "165"}
{"guest_pci": "0000:02:00.0", "module_id": 7}
"#;

    fn at(pairs: &[(&str, &str)]) -> BTreeMap<Address, Address> {
        pairs.iter().map(|(guest, host)| (guest.parse().unwrap(), host.parse().unwrap())).collect()
    }

    #[test]
    fn lines_and_arrays_say_the_same() {
        let lines = measurements(LINES.as_bytes()).unwrap();
        let array = format!(" [{}]", LINES.trim().replace("}\n", "},\n"));
        assert_eq!(measurements(array.as_bytes()).unwrap(), lines);
        assert_eq!(measurements(b"").unwrap(), []);
        let claims =
            placed(&lines, &at(&[("0000:01:00.0", "0000:0f:00.0"), ("0000:02:00.0", "0000:10:00.0")])).unwrap();
        assert_eq!((claims[0].module, claims[0].pci.to_string().as_str()), (5, "0000:0f:00.0"));
        assert_eq!((claims[0].uuid.as_deref(), claims[1].uuid.as_deref()), (Some("GPU-a"), None));
        let host = r#"{"host_pci": "0000:0F:00.0", "module_id": 5}"#;
        assert_eq!(placed(&measurements(host.as_bytes()).unwrap(), &at(&[])).unwrap()[0].pci, claims[0].pci);
    }

    #[test]
    fn what_does_not_say_where_a_gpu_is_is_refused() {
        let lines = measurements(LINES.as_bytes()).unwrap();
        let error = placed(&lines, &at(&[("0000:01:00.0", "0000:0f:00.0")])).unwrap_err().to_string();
        assert!(error.contains("--at 0000:02:00.0=HOST_PCI") && error.contains("module 7"), "{error}");
        let one = [("0000:01:00.0", "0000:0f:00.0"), ("0000:02:00.0", "0000:0f:00.0")];
        let error = placed(&lines, &at(&one)).unwrap_err().to_string();
        assert!(error.contains("0000:0f:00.0 is there twice: for module 5 and for module 7"), "{error}");
        let more = [one[0], ("0000:02:00.0", "0000:10:00.0"), ("0000:03:00.0", "0000:41:00.0")];
        let error = placed(&lines, &at(&more)).unwrap_err().to_string();
        assert!(error.contains("nothing was measured at the guest's 0000:03:00.0"), "{error}");
        for (text, part) in [
            (r#"{"module_id": 5}"#, "module 5 has to have host_pci or guest_pci"),
            (r#"{"module_id": 64, "host_pci": "0000:0f:00.0"}"#, "64 is no module id"),
        ] {
            let error = placed(&measurements(text.as_bytes()).unwrap(), &at(&[])).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(matches!(placed(&[], &at(&[])), Err(PlaceError::Claims(ClaimError::Empty))));
        for (text, part) in [
            ("{\"module_id\": 5}\n{\"module_id\": x}", "line 2"),
            (r#"{"module_id": -5}"#, "invalid value"),
            (r#"{"module": 5}"#, "unknown field"),
            (r#"{"module_id": 5, "guest_pci": "01:00.0"}"#, "not a PCI address"),
        ] {
            let error = measurements(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(measurements(&vec![b' '; LONGEST + 1]), Err(MeasuredError::TooLong));
    }
}
