//! The map, and what a new claim makes of it.

use std::collections::BTreeMap;
use std::fmt;

use firstlight_partitions::Gpus;
use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::claim::{Claim, ClaimError, checked};
use crate::{is_word, short};

/// How an entry is known. Times are seconds since the epoch, by the clock of whoever keeps the map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Evidence {
    /// Somebody says so.
    Operator,
    /// A driver in a trusted guest has read the module id.
    Nvml {
        /// When it was noted.
        when: u64,
        /// Where that was, in a word or two.
        what: String,
    },
    /// The GPU's guest had a fabric while this partition, of this GPU alone, was active.
    Probe {
        /// When it was noted.
        when: u64,
        /// The partition's number.
        partition: u32,
    },
}

impl Evidence {
    /// Whether it is more than somebody's word.
    #[must_use]
    pub fn is_measurement(&self) -> bool {
        !matches!(self, Self::Operator)
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator => f.write_str("operator"),
            Self::Nvml { what, .. } if what.is_empty() => f.write_str("nvml"),
            Self::Nvml { what, .. } => write!(f, "nvml ({what})"),
            Self::Probe { partition, .. } => write!(f, "probe (partition {partition})"),
        }
    }
}

/// Where a GPU is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its PCI address on the host.
    pub pci: Address,
    /// Its UUID, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its serial number, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// How that is known.
    pub evidence: Evidence,
}

impl Entry {
    /// Whether both say the same in the same way, be it at another time.
    fn says_as(&self, other: &Self) -> bool {
        let how = |entry: &Self| std::mem::discriminant(&entry.evidence);
        (self.pci, &self.uuid, &self.serial, how(self)) == (other.pci, &other.uuid, &other.serial, how(other))
    }
}

/// A baseboard's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleMap {
    /// The baseboard's serial number: on another one the map says nothing.
    pub baseboard: String,
    /// By module id.
    pub entries: BTreeMap<u32, Entry>,
}

/// Something that the map and a claim say differently.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    /// It is another baseboard.
    #[error("the map is of baseboard {was}, not of {is}")]
    Baseboard {
        /// The map's.
        was: String,
        /// What is said now.
        is: String,
    },
    /// The module has another address.
    #[error("the map has module {module} at {was} ({evidence}), not at {is}")]
    Address {
        /// Which.
        module: u32,
        /// In the map.
        was: Address,
        /// How the map knows.
        evidence: Evidence,
        /// What is said now.
        is: Address,
    },
    /// The address is another module's.
    #[error("the map has {pci} as module {was} ({evidence}), not as {is}")]
    Module {
        /// Which.
        pci: Address,
        /// In the map.
        was: u32,
        /// How the map knows.
        evidence: Evidence,
        /// What is said now.
        is: u32,
    },
    /// The GPU was in another place.
    #[error("the map has GPU {uuid} as module {was}, not as {is}")]
    Moved {
        /// Which.
        uuid: String,
        /// In the map.
        was: u32,
        /// What is said now.
        is: u32,
    },
    /// There is another GPU in that place.
    #[error("module {module} had the GPU with {what} {was}, and has {is} now")]
    Gpu {
        /// Which.
        module: u32,
        /// `uuid` or `serial`.
        what: &'static str,
        /// In the map.
        was: String,
        /// What is said now.
        is: String,
    },
}

/// Why claims do not become a map.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// They cannot be.
    #[error(transparent)]
    Claims(#[from] ClaimError),
    /// The baseboard's serial number is none.
    #[error("baseboard serial {0:?} is not 1 to 64 printable characters without spaces")]
    Serial(String),
    /// The map says otherwise.
    #[error(
        "{}; nothing was changed: find out which is right, and if the new one is, say it again with --replace",
        joined(.0)
    )]
    Contradicts(Vec<Contradiction>),
}

fn joined(all: &[Contradiction]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// What became of claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The map from now on.
    pub map: ModuleMap,
    /// Modules of which it says something else than before.
    pub changed: Gpus,
    /// Modules of which it says nothing any more.
    pub dropped: Gpus,
    /// What the map had said, and says no more.
    pub replaced: Vec<Contradiction>,
}

fn other(old: Option<&String>, new: Option<&String>) -> Option<(String, String)> {
    old.zip(new).filter(|(old, new)| old != new).map(|(old, new)| (old.clone(), new.clone()))
}

impl ModuleMap {
    /// Everything that a claim says differently.
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

    /// The map with these claims. What is said again by an operator keeps what was
    /// measured; what is measured gets the newest evidence. What contradicts
    /// the map is refused as a whole, or with `replace` takes its place: a GPU in
    /// another place loses the old one, another baseboard everything.
    ///
    /// # Errors
    /// The claims cannot be, or contradict the map.
    pub fn merged(
        before: Option<&Self>,
        baseboard: &str,
        claims: &[Claim],
        evidence: &Evidence,
        replace: bool,
    ) -> Result<Merged, Refused> {
        if !is_word(baseboard) {
            return Err(Refused::Serial(short(baseboard)));
        }
        checked(claims)?;
        let own = before.filter(|map| map.baseboard == baseboard);
        let mut replaced: Vec<Contradiction> =
            claims.iter().flat_map(|claim| own.map(|map| map.contradictions(claim)).unwrap_or_default()).collect();
        if let (Some(map), None) = (before, own) {
            replaced.push(Contradiction::Baseboard { was: map.baseboard.clone(), is: baseboard.to_owned() });
        }
        if !replaced.is_empty() && !replace {
            return Err(Refused::Contradicts(replaced));
        }
        let none = || Self { baseboard: baseboard.to_owned(), entries: BTreeMap::new() };
        let mut map = own.cloned().unwrap_or_else(none);
        // First all that goes: claims may exchange two places.
        let is_kept = |module: u32, entry: &Entry| {
            claims.iter().all(|claim| match claim.module == module {
                true => claim.pci == entry.pci && own.is_some_and(|map| map.contradictions(claim).is_empty()),
                false => claim.pci != entry.pci && (claim.uuid.is_none() || claim.uuid != entry.uuid),
            })
        };
        map.entries.retain(|module, entry| is_kept(*module, entry));
        for claim in claims {
            map.put(claim, evidence);
        }
        let modules = |map: Option<&Self>| Gpus::of(map.iter().flat_map(|map| map.entries.keys().copied()));
        let (old, new) = (modules(before).unwrap_or_default(), modules(Some(&map)).unwrap_or_default());
        let is_new = |module: &u32| match (own.and_then(|own| own.entries.get(module)), map.entries.get(module)) {
            (Some(old), Some(new)) => !old.says_as(new),
            (old, new) => old.is_some() != new.is_some(),
        };
        let changed = Gpus::of(new.ids().filter(is_new)).unwrap_or_default();
        Ok(Merged { map, changed, dropped: old.without(new), replaced })
    }

    fn put(&mut self, claim: &Claim, evidence: &Evidence) {
        let old = self.entries.remove(&claim.module);
        let kept = old.as_ref().map(|old| old.evidence.clone()).filter(|_| !evidence.is_measurement());
        let (uuid, serial) = old.map(|old| (old.uuid, old.serial)).unwrap_or_default();
        let entry = Entry {
            pci: claim.pci,
            uuid: claim.uuid.clone().or(uuid),
            serial: claim.serial.clone().or(serial),
            evidence: kept.unwrap_or_else(|| evidence.clone()),
        };
        self.entries.insert(claim.module, entry);
    }

    /// The modules that it says something of.
    #[must_use]
    pub fn modules(&self) -> Gpus {
        Gpus::of(self.entries.keys().copied()).unwrap_or_default()
    }

    /// Those of which that was measured.
    #[must_use]
    pub fn measured(&self) -> Gpus {
        let measured = self.entries.iter().filter(|(_, entry)| entry.evidence.is_measurement());
        Gpus::of(measured.map(|(module, _)| *module)).unwrap_or_default()
    }

    /// The module at that address.
    #[must_use]
    pub fn at(&self, pci: Address) -> Option<u32> {
        self.entries.iter().find(|(_, entry)| entry.pci == pci).map(|(module, _)| *module)
    }
}

#[cfg(test)]
mod tests;
