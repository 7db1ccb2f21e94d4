//! A statement or measurement of a GPU's location.

use std::collections::{BTreeMap, BTreeSet};

use firstlight_partitions::{Gpus, MODULE_ID_LIMIT};
use firstlight_pci::Address;

use crate::{is_word, short};

/// A GPU's location, from an operator or a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its module id.
    pub module: u32,
    /// Its PCI address on the host.
    pub pci: Address,
    /// Its UUID, if known.
    pub uuid: Option<String>,
    /// Its serial number, if known.
    pub serial: Option<String>,
}

/// Invalid claims, independent of the map.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// There are no claims.
    #[error("it names no GPU")]
    Empty,
    /// A duplicate module id.
    #[error("module {module} appears twice: with {first} and with {second}")]
    Module {
        /// The module id.
        module: u32,
        /// Its first address.
        first: Address,
        /// Its second address.
        second: Address,
    },
    /// A duplicate PCI address.
    #[error("{pci} appears twice: for module {first} and for module {second}")]
    Pci {
        /// The address.
        pci: Address,
        /// Its first module.
        first: u32,
        /// Its second module.
        second: u32,
    },
    /// A duplicate UUID.
    #[error("GPU {uuid} appears twice: at module {first} and at module {second}")]
    Uuid {
        /// The UUID.
        uuid: String,
        /// Its first module.
        first: u32,
        /// Its second module.
        second: u32,
    },
    /// The module id is out of range.
    #[error("invalid module id {0}: they are numbers below {MODULE_ID_LIMIT}")]
    NoModule(u32),
    /// FM does not list the module.
    #[error("the fabric manager lists no module {unknown}; it lists {listed}")]
    Unknown {
        /// The unknown modules.
        unknown: Gpus,
        /// The listed ones.
        listed: Gpus,
    },
    /// An operator's table does not name every GPU.
    #[error(
        "no entry for module {missing}, which the fabric manager lists; a table names every GPU that is not quarantined"
    )]
    Missing {
        /// The missing modules.
        missing: Gpus,
    },
    /// An invalid serial number or UUID.
    #[error("invalid {what} {text:?} of module {module}: it has to be 1 to 64 printable characters without spaces")]
    Word {
        /// `uuid` or `serial`.
        what: &'static str,
        /// The module id.
        module: u32,
        /// Its value.
        text: String,
    },
}

/// Validates claims and returns their modules.
///
/// # Errors
/// The first invalid claim.
pub(crate) fn checked(claims: &[Claim]) -> Result<Gpus, ClaimError> {
    let (mut modules, mut addresses, mut uuids) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for Claim { module, pci, uuid, serial } in claims {
        Gpus::one(*module).map_err(|error| ClaimError::NoModule(error.0))?;
        for (what, text) in [("uuid", uuid), ("serial", serial)] {
            if let Some(text) = text.as_deref().filter(|text| !is_word(text)) {
                return Err(ClaimError::Word { what, module: *module, text: short(text) });
            }
        }
        if let Some(first) = modules.insert(*module, *pci) {
            return Err(ClaimError::Module { module: *module, first, second: *pci });
        }
        if let Some(first) = addresses.insert(*pci, *module) {
            return Err(ClaimError::Pci { pci: *pci, first, second: *module });
        }
        if let Some(uuid) = uuid
            && let Some(first) = uuids.insert(uuid, *module)
        {
            return Err(ClaimError::Uuid { uuid: uuid.clone(), first, second: *module });
        }
    }
    if modules.is_empty() {
        return Err(ClaimError::Empty);
    }
    let ids: BTreeSet<u32> = modules.into_keys().collect();
    Gpus::of(ids).map_err(|error| ClaimError::NoModule(error.0))
}

impl Claim {
    /// Validates claims against the GPUs that FM lists and those that have to be named.
    ///
    /// # Errors
    /// The first invalid claim.
    pub fn check(claims: &[Self], listed: Gpus, needed: Gpus) -> Result<(), ClaimError> {
        let modules = checked(claims)?;
        let (unknown, missing) = (modules.without(listed), needed.without(modules));
        if !unknown.is_empty() {
            return Err(ClaimError::Unknown { unknown, listed });
        }
        if !missing.is_empty() {
            return Err(ClaimError::Missing { missing });
        }
        Ok(())
    }
}
