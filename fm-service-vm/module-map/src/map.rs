//! The module map, and how claims are merged into it.

use std::collections::BTreeMap;
use std::fmt;

use firstlight_partitions::Gpus;
use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::claim::{Claim, ClaimError, checked};
use crate::{is_word, short};

/// The evidence of an entry. Times are seconds since the epoch, by the daemon's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Evidence {
    /// An operator's statement.
    Operator,
    /// The driver in a trusted guest has read the module id.
    Nvml {
        /// When it was recorded.
        recorded_at: u64,
        /// Where it was measured, in a word or two.
        origin: String,
    },
    /// The GPU's guest had a fabric while this single-GPU partition was active.
    Probe {
        /// When it was recorded.
        recorded_at: u64,
        /// The partition id.
        partition: u32,
    },
}

impl Evidence {
    /// Whether it is more than an operator's statement.
    #[must_use]
    pub fn is_measurement(&self) -> bool {
        !matches!(self, Self::Operator)
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator => f.write_str("operator"),
            Self::Nvml { origin, .. } if origin.is_empty() => f.write_str("nvml"),
            Self::Nvml { origin, .. } => write!(f, "nvml ({origin})"),
            Self::Probe { partition, .. } => write!(f, "probe (partition {partition})"),
        }
    }
}

/// The location of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its PCI address on the host.
    pub pci: Address,
    /// Its UUID, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its serial number, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Its evidence.
    pub evidence: Evidence,
}

impl Entry {
    /// Whether both entries agree, including the kind of evidence but not its time.
    fn matches(&self, other: &Self) -> bool {
        let how = |entry: &Self| std::mem::discriminant(&entry.evidence);
        (self.pci, &self.uuid, &self.serial, how(self)) == (other.pci, &other.uuid, &other.serial, how(other))
    }
}

/// The GPUs of a baseboard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleMap {
    /// The baseboard's serial number: the map is valid on this baseboard only.
    pub baseboard: String,
    /// Entries by module id.
    pub entries: BTreeMap<u32, Entry>,
}

/// A difference between the map and a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    /// The claim is for another baseboard.
    #[error("the map is of baseboard {was}, not of {is}")]
    Baseboard {
        /// In the map.
        was: String,
        /// In the claim.
        is: String,
    },
    /// The module has another address.
    #[error("the map has module {module} at {was} ({evidence}), not at {is}")]
    Address {
        /// The module id.
        module: u32,
        /// In the map.
        was: Address,
        /// The entry's evidence.
        evidence: Evidence,
        /// In the claim.
        is: Address,
    },
    /// The address belongs to another module.
    #[error("the map has {pci} as module {was} ({evidence}), not as {is}")]
    Module {
        /// The address.
        pci: Address,
        /// In the map.
        was: u32,
        /// The entry's evidence.
        evidence: Evidence,
        /// In the claim.
        is: u32,
    },
    /// The GPU was in another module.
    #[error("the map has GPU {uuid} as module {was}, not as {is}")]
    Moved {
        /// Its UUID.
        uuid: String,
        /// In the map.
        was: u32,
        /// In the claim.
        is: u32,
    },
    /// Another GPU is in the module.
    #[error("module {module} had the GPU with {what} {was}, and has {is} now")]
    Gpu {
        /// The module id.
        module: u32,
        /// `uuid` or `serial`.
        what: &'static str,
        /// In the map.
        was: String,
        /// In the claim.
        is: String,
    },
}

/// Why claims were not merged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The claims are invalid.
    #[error(transparent)]
    Claims(#[from] ClaimError),
    /// The baseboard's serial number is invalid.
    #[error("invalid baseboard serial {0:?}: it has to be 1 to 64 printable characters without spaces")]
    Serial(String),
    /// The claims contradict the map.
    #[error(
        "{}; nothing was changed: find out which is right; if the new one is, repeat the request with --replace",
        joined(.0)
    )]
    Contradicts(Vec<Contradiction>),
}

fn joined(all: &[Contradiction]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// The result of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The new map.
    pub map: ModuleMap,
    /// Modules with a new or changed entry.
    pub changed: Gpus,
    /// Modules whose entry was removed.
    pub removed: Gpus,
    /// The contradictions that were replaced.
    pub replaced: Vec<Contradiction>,
}

fn other(old: Option<&String>, new: Option<&String>) -> Option<(String, String)> {
    old.zip(new).filter(|(old, new)| old != new).map(|(old, new)| (old.clone(), new.clone()))
}

impl ModuleMap {
    /// Returns all contradictions of a claim.
    fn contradictions(&self, claim: &Claim) -> Vec<Contradiction> {
        let mut found = Vec::new();
        let (module, is) = (claim.module, claim.pci);
        if let Some(entry) = self.entries.get(&module) {
            if entry.pci != is {
                let (was, evidence) = (entry.pci, entry.evidence.clone());
                found.push(Contradiction::Address { module, was, evidence, is });
            }
            let ids = [("uuid", &entry.uuid, &claim.uuid), ("serial", &entry.serial, &claim.serial)];
            for (what, old, new) in ids {
                if let Some((was, is)) = other(old.as_ref(), new.as_ref()) {
                    found.push(Contradiction::Gpu { module, what, was, is });
                }
            }
        }
        if let Some((was, entry)) = self.entries.iter().find(|(at, entry)| **at != module && entry.pci == is) {
            let (was, evidence) = (*was, entry.evidence.clone());
            found.push(Contradiction::Module { pci: is, was, evidence, is: module });
        }
        let same = |at: u32, entry: &Entry| at != module && claim.uuid.is_some() && entry.uuid == claim.uuid;
        if let (Some(uuid), Some((was, _))) = (&claim.uuid, self.entries.iter().find(|(at, entry)| same(**at, entry))) {
            found.push(Contradiction::Moved { uuid: uuid.clone(), was: *was, is: module });
        }
        found
    }

    /// Merges claims into the map. An operator's statement that agrees keeps the measured evidence; a measurement
    /// updates it. Contradicting claims are refused as a whole, or with `replace` win: a GPU at another location
    /// loses its old entry, another baseboard replaces the whole map.
    ///
    /// # Errors
    /// The claims are invalid, or contradict the map.
    pub fn merged(
        before: Option<&Self>,
        baseboard: &str,
        claims: &[Claim],
        evidence: &Evidence,
        replace: bool,
    ) -> Result<Merged, MapError> {
        if !is_word(baseboard) {
            return Err(MapError::Serial(short(baseboard)));
        }
        checked(claims)?;
        let own = before.filter(|map| map.baseboard == baseboard);
        let mut replaced: Vec<Contradiction> =
            claims.iter().flat_map(|claim| own.map(|map| map.contradictions(claim)).unwrap_or_default()).collect();
        if let (Some(map), None) = (before, own) {
            replaced.push(Contradiction::Baseboard { was: map.baseboard.clone(), is: baseboard.to_owned() });
        }
        if !replaced.is_empty() && !replace {
            return Err(MapError::Contradicts(replaced));
        }
        let none = || Self { baseboard: baseboard.to_owned(), entries: BTreeMap::new() };
        let mut map = own.cloned().unwrap_or_else(none);
        // Removals first: claims may swap two locations.
        let stays = |module: u32, entry: &Entry| {
            claims.iter().all(|claim| match claim.module == module {
                true => claim.pci == entry.pci && own.is_some_and(|map| map.contradictions(claim).is_empty()),
                false => claim.pci != entry.pci && (claim.uuid.is_none() || claim.uuid != entry.uuid),
            })
        };
        map.entries.retain(|module, entry| stays(*module, entry));
        for claim in claims {
            map.put(claim, evidence);
        }
        let modules = |map: Option<&Self>| Gpus::of(map.iter().flat_map(|map| map.entries.keys().copied()));
        let (old, new) = (modules(before).unwrap_or_default(), modules(Some(&map)).unwrap_or_default());
        let is_new = |module: &u32| match (own.and_then(|own| own.entries.get(module)), map.entries.get(module)) {
            (Some(old), Some(new)) => !old.matches(new),
            (old, new) => old.is_some() != new.is_some(),
        };
        let changed = Gpus::of(new.ids().filter(is_new)).unwrap_or_default();
        Ok(Merged { map, changed, removed: old.without(new), replaced })
    }

    fn put(&mut self, claim: &Claim, evidence: &Evidence) {
        let old = self.entries.remove(&claim.module);
        let measured = old.as_ref().map(|old| old.evidence.clone()).filter(|_| !evidence.is_measurement());
        let (uuid, serial) = old.map(|old| (old.uuid, old.serial)).unwrap_or_default();
        let entry = Entry {
            pci: claim.pci,
            uuid: claim.uuid.clone().or(uuid),
            serial: claim.serial.clone().or(serial),
            evidence: measured.unwrap_or_else(|| evidence.clone()),
        };
        self.entries.insert(claim.module, entry);
    }

    /// Returns the modules with an entry.
    #[must_use]
    pub fn modules(&self) -> Gpus {
        Gpus::of(self.entries.keys().copied()).unwrap_or_default()
    }

    /// Returns the modules with a measured entry.
    #[must_use]
    pub fn measured(&self) -> Gpus {
        let measured = self.entries.iter().filter(|(_, entry)| entry.evidence.is_measurement());
        Gpus::of(measured.map(|(module, _)| *module)).unwrap_or_default()
    }

    /// Returns the module at a PCI address.
    #[must_use]
    pub fn at(&self, pci: Address) -> Option<u32> {
        self.entries.iter().find(|(_, entry)| entry.pci == pci).map(|(module, _)| *module)
    }
}

#[cfg(test)]
mod tests;
