//! The module map, and the check that partitions of several GPUs are given by a verified map only.

use std::time::{SystemTime, UNIX_EPOCH};

use firstlight_module_map::{Claim, Evidence, MAX_WORD, ModuleMap, Verification};
use firstlight_partitions::{Gpus, Partition};

use super::{Engine, PartitionSelector, check_text};
use crate::error::EngineError;
use crate::fabric::Fabric;
use crate::module_map_store::ModuleMapStore;
use crate::snapshot::FabricSnapshot;

/// A request for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionRequest {
    /// Selects the partition.
    pub selector: PartitionSelector,
    /// The map need not be verified.
    pub unverified_map: bool,
}

impl From<PartitionSelector> for PartitionRequest {
    fn from(selector: PartitionSelector) -> Self {
        Self { selector, unverified_map: false }
    }
}

/// An update of the module map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleMapUpdate {
    /// The baseboard's serial number.
    pub serial: String,
    /// Its GPUs' locations.
    pub claims: Vec<Claim>,
    /// The evidence; the engine sets the times.
    pub evidence: Evidence,
    /// Replaces entries that contradict it.
    pub replace: bool,
}

/// The result of a module map update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleMapUpdateResult {
    /// GPUs with a new or changed entry.
    pub changed: Gpus,
    /// GPUs whose entry was removed.
    pub removed: Gpus,
    /// The statements that were replaced.
    pub replaced: Vec<String>,
    /// Whether the map is verified now.
    pub verification: Verification,
    /// The same request had done it before.
    pub already_done: bool,
}

/// Returns the time in seconds since the epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl ModuleMapUpdate {
    /// Summarises the update in one line, with a checksum of its content.
    fn summary(&self) -> String {
        let Self { serial, claims, evidence, replace } = self;
        let sum = crc32fast::hash(format!("{claims:?} {evidence:?}").as_bytes());
        let replace = if *replace { " and replace" } else { "" };
        format!("set {} GPUs of {serial} by {evidence} ({sum:08x}){replace}", claims.len())
    }
}

impl<F> Engine<F> {
    /// Sets the module map.
    #[must_use]
    pub fn with(mut self, modules: ModuleMapStore) -> Self {
        self.module_map = modules;
        self
    }

    /// Returns the module map.
    #[must_use]
    pub fn module_map(&self) -> &ModuleMapStore {
        &self.module_map
    }

    /// Refuses partitions of several GPUs, and GPUs by address, unless the map is verified.
    pub(super) fn check_map(
        &self,
        snapshot: &FabricSnapshot,
        partition_request: &PartitionRequest,
        partition: &Partition,
    ) -> Result<(), EngineError> {
        let is_by_map = partition.gpus.count() > 1 || matches!(partition_request.selector, PartitionSelector::Pci(_));
        if !is_by_map || partition_request.unverified_map {
            return Ok(());
        }
        let Partition { id, gpus } = partition;
        self.module_map.known().permits(&format!("partition {id} of GPUs {gpus}"), snapshot, self.state.quarantined())
    }

    /// Returns whether the same request was completed.
    fn is_completed(&self, request: &str, summary: &str) -> Result<bool, EngineError> {
        check_text("request id", request)?;
        match self.module_map.request_summary(request) {
            Some(was) if was == summary => Ok(true),
            Some(was) => Err(EngineError::RequestIdReused { request: request.to_owned(), was: was.to_owned() }),
            None => Ok(false),
        }
    }
}

impl<F: Fabric> Engine<F> {
    /// Updates the module map. Idempotent by request id.
    ///
    /// # Errors
    /// The update is invalid, contradicts the map, or cannot be written: nothing is changed.
    pub fn set_map(
        &mut self,
        request: &str,
        mut update: ModuleMapUpdate,
    ) -> Result<ModuleMapUpdateResult, EngineError> {
        if let Evidence::Nvml { origin, .. } = &mut update.evidence {
            // It is stored in the map's file, as is the request's summary.
            *origin = origin.chars().filter(char::is_ascii_graphic).take(MAX_WORD).collect();
        }
        let summary = update.summary();
        let already_done = self.is_completed(request, &summary)?;
        let snapshot = self.settle()?;
        let quarantined = self.state.quarantined();
        if already_done {
            let verification = self.module_map.known().verification(&snapshot, quarantined);
            let (changed, removed, replaced) = (Gpus::NONE, Gpus::NONE, Vec::new());
            return Ok(ModuleMapUpdateResult { changed, removed, replaced, verification, already_done });
        }
        let ModuleMapUpdate { serial, claims, evidence, replace } = update;
        let listed = snapshot.table.gpus();
        let needed = if evidence.is_measurement() { Gpus::NONE } else { listed.without(quarantined) };
        Claim::check(&claims, listed, needed).map_err(firstlight_module_map::MapError::from)?;
        let known = self.module_map.known();
        if let Some(is) = known.serial.as_ref().filter(|is| **is != serial) {
            return Err(EngineError::OtherBaseboard { stated: serial, actual: is.clone() });
        }
        let recorded_at = now();
        let evidence = match evidence {
            Evidence::Operator => Evidence::Operator,
            Evidence::Nvml { origin, .. } => Evidence::Nvml { recorded_at, origin },
            Evidence::Probe { partition, .. } => {
                let gpus = snapshot.partition(partition)?.gpus;
                if let [claim] = claims.as_slice()
                    && gpus.count() == 1
                    && gpus.ids().eq([claim.module])
                {
                    Evidence::Probe { recorded_at, partition }
                } else {
                    return Err(EngineError::InvalidProbe { partition, gpus });
                }
            }
        };
        let merged = ModuleMap::merged(known.map.as_ref(), &serial, &claims, &evidence, replace)?;
        self.module_map.set(request, &summary, Some(merged.map))?;
        Ok(ModuleMapUpdateResult {
            changed: merged.changed,
            removed: merged.removed,
            replaced: merged.replaced.iter().map(ToString::to_string).collect(),
            verification: self.module_map.known().verification(&snapshot, quarantined),
            already_done,
        })
    }

    /// Deletes the map; returns whether there was one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn forget_map(&mut self, request: &str) -> Result<bool, EngineError> {
        let summary = "forget the module map";
        if self.is_completed(request, summary)? {
            return Ok(true);
        }
        let was = self.module_map.known().map.is_some() || self.module_map.known().damage.is_some();
        self.module_map.set(request, summary, None)?;
        Ok(was)
    }
}

#[cfg(test)]
mod tests;
