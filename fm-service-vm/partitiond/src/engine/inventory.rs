//! Which GPU is which, and who may ask for several.

use std::time::{SystemTime, UNIX_EPOCH};

use firstlight_module_map::{Claim, Evidence, LONGEST_WORD, ModuleMap, Standing};
use firstlight_partitions::{Gpus, Partition};

use super::{Ask, Engine, word};
use crate::fabric::Fabric;
use crate::look::Look;
use crate::modules::Modules;
use crate::refused::Refused;

/// What somebody wants, and whether by a map that is not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// What.
    pub ask: Ask,
    /// The map need not be verified.
    pub unverified_map: bool,
}

impl From<Ask> for Wish {
    fn from(ask: Ask) -> Self {
        Self { ask, unverified_map: false }
    }
}

/// What somebody says of GPUs' places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The baseboard's serial number.
    pub serial: String,
    /// Where its GPUs are.
    pub claims: Vec<Claim>,
    /// How that is known; times are put in here.
    pub evidence: Evidence,
    /// It takes the place of what contradicts it.
    pub replace: bool,
}

/// What became of that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Noted {
    /// GPUs of which the map says something else.
    pub changed: Gpus,
    /// GPUs of which it says nothing any more.
    pub dropped: Gpus,
    /// What it had said.
    pub replaced: Vec<String>,
    /// How it stands now.
    pub standing: Standing,
    /// The same request had done it already.
    pub again: bool,
}

/// Now, in seconds since the epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Said {
    /// In one line that is another if anything is.
    fn asked(&self) -> String {
        let Self { serial, claims, evidence, replace } = self;
        let sum = crc32fast::hash(format!("{claims:?} {evidence:?}").as_bytes());
        let replace = if *replace { " and replace" } else { "" };
        format!("set {} GPUs of {serial} by {evidence} ({sum:08x}){replace}", claims.len())
    }
}

impl<F> Engine<F> {
    /// With a module map.
    #[must_use]
    pub fn with(mut self, modules: Modules) -> Self {
        self.modules = modules;
        self
    }

    /// The module map.
    #[must_use]
    pub fn modules(&self) -> &Modules {
        &self.modules
    }

    /// Who asks for several GPUs, or says where they are, relies on the map.
    pub(super) fn by_map(&self, look: &Look, wish: &Wish, partition: &Partition) -> Result<(), Refused> {
        let is_by_map = partition.gpus.count() > 1 || matches!(wish.ask, Ask::Pci(_));
        if !is_by_map || wish.unverified_map {
            return Ok(());
        }
        let Partition { id, gpus } = partition;
        self.modules.known().permits(&format!("partition {id} of GPUs {gpus}"), look, self.state.barred())
    }

    /// Whether the same request was done.
    fn noted(&self, request: &str, asked: &str) -> Result<bool, Refused> {
        word("request", request)?;
        match self.modules.asked(request) {
            Some(was) if was == asked => Ok(true),
            Some(was) => Err(Refused::Request { request: request.to_owned(), was: was.to_owned() }),
            None => Ok(false),
        }
    }
}

impl<F: Fabric> Engine<F> {
    /// Notes where GPUs are. The same request again changes nothing.
    ///
    /// # Errors
    /// It cannot be, contradicts the map, or cannot be written down: nothing is changed.
    pub fn set_map(&mut self, request: &str, mut said: Said) -> Result<Noted, Refused> {
        if let Evidence::Nvml { what, .. } = &mut said.evidence {
            // It goes into the map's file, as does what was asked for.
            *what = what.chars().filter(char::is_ascii_graphic).take(LONGEST_WORD).collect();
        }
        let asked = said.asked();
        let again = self.noted(request, &asked)?;
        let look = self.settle()?;
        let barred = self.state.barred();
        if again {
            let standing = self.modules.known().standing(&look, barred);
            let (changed, dropped, replaced) = (Gpus::NONE, Gpus::NONE, Vec::new());
            return Ok(Noted { changed, dropped, replaced, standing, again });
        }
        let Said { serial, claims, evidence, replace } = said;
        let listed = look.table.gpus();
        let needed = if evidence.is_measurement() { Gpus::NONE } else { listed.without(barred) };
        Claim::check(&claims, listed, needed).map_err(firstlight_module_map::Refused::from)?;
        let known = self.modules.known();
        if let Some(is) = known.serial.as_ref().filter(|is| **is != serial) {
            return Err(Refused::OtherBaseboard { said: serial, is: is.clone() });
        }
        let when = now();
        let evidence = match evidence {
            Evidence::Operator => Evidence::Operator,
            Evidence::Nvml { what, .. } => Evidence::Nvml { when, what },
            Evidence::Probe { partition, .. } => {
                let gpus = look.partition(partition)?.gpus;
                if let [claim] = claims.as_slice()
                    && gpus.count() == 1
                    && gpus.ids().eq([claim.module])
                {
                    Evidence::Probe { when, partition }
                } else {
                    return Err(Refused::Probe { partition, gpus });
                }
            }
        };
        let merged = ModuleMap::merged(known.map.as_ref(), &serial, &claims, &evidence, replace)?;
        self.modules.set(request, &asked, Some(merged.map))?;
        Ok(Noted {
            changed: merged.changed,
            dropped: merged.dropped,
            replaced: merged.replaced.iter().map(ToString::to_string).collect(),
            standing: self.modules.known().standing(&look, barred),
            again,
        })
    }

    /// Forgets the map; whether there was one.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn forget_map(&mut self, request: &str) -> Result<bool, Refused> {
        let asked = "forget the module map";
        if self.noted(request, asked)? {
            return Ok(true);
        }
        let was = self.modules.known().map.is_some() || self.modules.known().damage.is_some();
        self.modules.set(request, asked, None)?;
        Ok(was)
    }
}

#[cfg(test)]
mod tests;
