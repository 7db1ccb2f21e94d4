//! Measurements of an inventory guest: JSON objects, one per GPU, in sequence or in an array.
//!
//! ```json
//! {"guest_pci": "0000:01:00.0", "module_id": 5, "uuid": "GPU-...", "serial": "165..."}
//! ```
//!
//! `host_pci` replaces `guest_pci` where the host address is already known.

use std::collections::BTreeMap;

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::MAX_FILE;
use crate::claim::{Claim, ClaimError, checked};

/// The measurement of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Its address in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pci: Option<Address>,
    /// Its address on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_pci: Option<Address>,
    /// The module id that the driver has read.
    pub module_id: u32,
    /// Its UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// Invalid measurements.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeasuredError {
    /// The file is too long.
    #[error("it has more than {MAX_FILE} bytes")]
    TooLong,
    /// Invalid JSON; the parser's message has the position.
    #[error("{0}; each GPU is an object such as {{\"guest_pci\": \"0000:01:00.0\", \"module_id\": 5}}")]
    Form(String),
}

/// Measurements without a usable host address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// Neither address, or both.
    #[error("module {module} has to have host_pci or guest_pci, one of them")]
    Which {
        /// The module id.
        module: u32,
    },
    /// The guest's address has no mapping.
    #[error(
        "the host address of guest address {guest} (module {module}) is unknown; pass --pci-mapping {guest}=HOST_PCI, as the \
         inventory guest was given it"
    )]
    Unknown {
        /// The guest's address.
        guest: Address,
        /// The module id.
        module: u32,
    },
    /// A mapping without a measurement, probably a typing error.
    #[error("--pci-mapping {guest}={host}: nothing was measured at the guest's {guest}")]
    Unused {
        /// The guest's address.
        guest: Address,
        /// The host's address.
        host: Address,
    },
    /// The measurements are invalid.
    #[error(transparent)]
    Claims(#[from] ClaimError),
}

/// Parses measurements.
///
/// # Errors
/// They are invalid.
pub fn measurements(bytes: &[u8]) -> Result<Vec<Measurement>, MeasuredError> {
    if bytes.len() > MAX_FILE {
        return Err(MeasuredError::TooLong);
    }
    let is_array = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let read: Result<Vec<Measurement>, _> = match is_array {
        true => serde_json::from_slice(bytes),
        false => serde_json::Deserializer::from_slice(bytes).into_iter().collect(),
    };
    read.map_err(|error| MeasuredError::Form(error.to_string()))
}

/// Converts measurements to claims; `at` maps guest addresses to host addresses.
///
/// # Errors
/// A host address is unknown, or the measurements are invalid.
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
    fn json_lines_and_arrays_are_equivalent() {
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
    fn measurements_without_host_address_are_refused() {
        let lines = measurements(LINES.as_bytes()).unwrap();
        let error = placed(&lines, &at(&[("0000:01:00.0", "0000:0f:00.0")])).unwrap_err().to_string();
        assert!(error.contains("--pci-mapping 0000:02:00.0=HOST_PCI") && error.contains("module 7"), "{error}");
        let one = [("0000:01:00.0", "0000:0f:00.0"), ("0000:02:00.0", "0000:0f:00.0")];
        let error = placed(&lines, &at(&one)).unwrap_err().to_string();
        assert!(error.contains("0000:0f:00.0 appears twice: for module 5 and for module 7"), "{error}");
        let more = [one[0], ("0000:02:00.0", "0000:10:00.0"), ("0000:03:00.0", "0000:41:00.0")];
        let error = placed(&lines, &at(&more)).unwrap_err().to_string();
        assert!(error.contains("nothing was measured at the guest's 0000:03:00.0"), "{error}");
        for (text, part) in [
            (r#"{"module_id": 5}"#, "module 5 has to have host_pci or guest_pci"),
            (r#"{"module_id": 64, "host_pci": "0000:0f:00.0"}"#, "invalid module id 64"),
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
        assert_eq!(measurements(&vec![b' '; MAX_FILE + 1]), Err(MeasuredError::TooLong));
    }
}
