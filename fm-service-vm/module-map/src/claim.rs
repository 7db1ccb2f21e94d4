//! What somebody says of a GPU.

use std::collections::{BTreeMap, BTreeSet};

use firstlight_partitions::{Gpus, MOST};
use firstlight_pci::Address;

use crate::{is_word, short};

/// A GPU's place, as an operator or a measurement says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its module id.
    pub module: u32,
    /// Its PCI address on the host.
    pub pci: Address,
    /// Its UUID, if it is known.
    pub uuid: Option<String>,
    /// Its serial number, if it is known.
    pub serial: Option<String>,
}

/// Claims that cannot be, whatever the map says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Nothing is said.
    #[error("it names no GPU")]
    Empty,
    /// A module id twice.
    #[error("module {module} is there twice: with {first} and with {second}")]
    Module {
        /// Which.
        module: u32,
        /// Its first address.
        first: Address,
        /// Its second.
        second: Address,
    },
    /// A PCI address twice.
    #[error("{pci} is there twice: for module {first} and for module {second}")]
    Pci {
        /// Which.
        pci: Address,
        /// Its first module.
        first: u32,
        /// Its second.
        second: u32,
    },
    /// A UUID twice.
    #[error("GPU {uuid} is there twice: at module {first} and at module {second}")]
    Uuid {
        /// Which.
        uuid: String,
        /// Its first module.
        first: u32,
        /// Its second.
        second: u32,
    },
    /// No baseboard has it.
    #[error("{0} is no module id: they are numbers below {MOST}")]
    NoModule(u32),
    /// FM does not list it.
    #[error("the fabric manager lists no module {unknown}; it lists {listed}")]
    Unknown {
        /// Which.
        unknown: Gpus,
        /// What there is.
        listed: Gpus,
    },
    /// A table that is to be whole is not.
    #[error(
        "it says nothing of module {missing}, which the fabric manager lists; a table names every GPU that is not in quarantine"
    )]
    Missing {
        /// Which.
        missing: Gpus,
    },
    /// A serial number or UUID that is none.
    #[error("{what} {text:?} of module {module} is not 1 to 64 printable characters without spaces")]
    Word {
        /// What it is.
        what: &'static str,
        /// Of which GPU.
        module: u32,
        /// What was given.
        text: String,
    },
}

/// The modules of claims that can be.
///
/// # Errors
/// The first thing that cannot be.
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
    /// Whether claims can be of a baseboard of which FM lists these GPUs, and
    /// speak of those that are needed.
    ///
    /// # Errors
    /// The first thing that cannot be.
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
