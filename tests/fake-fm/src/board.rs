//! A baseboard: its partitions, and the effect of failures.

use std::collections::BTreeSet;

use firstlight_partitions::known::KnownBaseboard;
use firstlight_partitions::{PartitionId, Table};
use serde::{Deserialize, Serialize};

use crate::call::{FailedDevice, GpuInfo, PartitionInfo, UnsupportedPartition};

/// An A100 has two links to each of six switches.
const LINKS_TO_A_SWITCH: u32 = 2;
const SWITCHES_OF_A_TRAY: u32 = 6;
const GPUS_OF_A_TRAY: u32 = 8;

/// Failed devices. Only baseboards before the H100 report them in their lists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Failed {
    /// GPUs, by module id.
    pub gpus: BTreeSet<u32>,
    /// Switches, from 0, six to a tray.
    pub switches: BTreeSet<u32>,
    /// Links of GPUs: module id and port.
    pub links: BTreeSet<(u32, u32)>,
}

impl Failed {
    /// Whether nothing has failed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// FM's reaction to failures at start, from its configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// `ACCESS_LINK_FAILURE_MODE=1`: partitions stay, with fewer links.
    pub keep_with_failed_links: bool,
    /// `NVSWITCH_FAILURE_MODE=1`: the same for switches.
    pub keep_with_failed_switches: bool,
}

/// A baseboard with its failures.
#[derive(Debug, Clone)]
pub struct Board {
    /// The known baseboard.
    pub known: &'static KnownBaseboard,
    table: Table,
    failed: Failed,
    policy: Policy,
}

fn tray_of_gpu(gpu: u32) -> u32 {
    gpu.saturating_sub(1) / GPUS_OF_A_TRAY
}

impl Board {
    /// Creates a baseboard with failures.
    #[must_use]
    pub fn new(known: &'static KnownBaseboard, failed: Failed, policy: Policy) -> Self {
        Self { known, table: known.table(), failed, policy }
    }

    /// Whether lists report failures and GPU identities: not from the H100 on.
    #[must_use]
    pub fn reports_devices(&self) -> bool {
        !matches!(self.known.name, "h100" | "b200")
    }

    fn failed_switches_of(&self, gpu: u32) -> u32 {
        let of_tray = self.failed.switches.iter().filter(|switch| *switch / SWITCHES_OF_A_TRAY == tray_of_gpu(gpu));
        u32::try_from(of_tray.count()).unwrap_or(u32::MAX)
    }

    fn failed_links_of(&self, gpu: u32) -> u32 {
        u32::try_from(self.failed.links.iter().filter(|link| link.0 == gpu).count()).unwrap_or(u32::MAX)
    }

    /// Whether the partition is supported.
    #[must_use]
    pub fn supports(&self, id: PartitionId) -> bool {
        self.table.get(id).is_some() && !self.is_lost(id)
    }

    fn is_lost(&self, id: PartitionId) -> bool {
        let Some(partition) = self.table.get(id).filter(|_| self.reports_devices()) else { return false };
        let linked = partition.gpus.count() > 1;
        partition.gpus.ids().any(|gpu| {
            let by_switch = !self.policy.keep_with_failed_switches && self.failed_switches_of(gpu) > 0;
            let by_link = !self.policy.keep_with_failed_links && self.failed_links_of(gpu) > 0;
            self.failed.gpus.contains(&gpu) || linked && (by_switch || by_link)
        })
    }

    /// Whether the partitions share a GPU.
    #[must_use]
    pub fn overlap(&self, one: PartitionId, other: PartitionId) -> bool {
        match (self.table.get(one), self.table.get(other)) {
            (Some(one), Some(other)) => one.gpus.overlaps(other.gpus),
            _ => false,
        }
    }

    /// Whether the partition contains this GPU.
    #[must_use]
    pub fn has(&self, id: PartitionId, gpu: u32) -> bool {
        self.table.get(id).is_some_and(|it| it.gpus.ids().any(|id| id == gpu))
    }

    /// Whether FM trains links, so that a GPU reset loses them: not from the H100 on.
    #[must_use]
    pub fn trains_links(&self, id: PartitionId) -> bool {
        self.reports_devices() && self.table.get(id).is_some_and(|it| it.gpus.count() > 1)
    }

    /// Returns the list, with these partitions active.
    #[must_use]
    pub fn list(&self, active: &BTreeSet<PartitionId>) -> Vec<PartitionInfo> {
        let rows = self.known.rows.iter().filter(|row| self.supports(row.0));
        rows.map(|&(id, gpus, links)| {
            let gpus = gpus.iter().map(|&gpu| self.gpu(gpu, links)).collect();
            PartitionInfo { id, is_active: active.contains(&id), gpus }
        })
        .collect()
    }

    fn gpu(&self, gpu: u32, links: u32) -> GpuInfo {
        let broken = self.failed_switches_of(gpu) * LINKS_TO_A_SWITCH + self.failed_links_of(gpu);
        let broken = if self.reports_devices() { broken } else { 0 };
        let (uuid, pci_bus_id) = self.names("GPU", gpu, 0x06);
        let links_available = links.saturating_sub(broken);
        let (links_max, line_rate) = (self.known.max_links, self.known.line_rate);
        GpuInfo { physical_id: gpu, uuid, pci_bus_id, links_available, links_max, line_rate }
    }

    fn names(&self, kind: &str, number: u32, bus: u32) -> (String, String) {
        if self.reports_devices() {
            let bus = bus + number;
            (format!("{kind}-f1257000-0000-4000-8000-{number:012x}"), format!("00000000:{bus:02X}:00.0"))
        } else {
            (String::new(), "00000000:00:00.0".to_owned())
        }
    }

    /// Returns the partitions that failures made unavailable.
    #[must_use]
    pub fn unsupported(&self) -> Vec<UnsupportedPartition> {
        let rows = self.known.rows.iter().filter(|row| self.is_lost(row.0));
        rows.map(|&(id, gpus, _)| UnsupportedPartition { id, gpus: gpus.to_vec() }).collect()
    }

    /// Returns the failed GPUs and switches.
    #[must_use]
    pub fn failed_devices(&self) -> (Vec<FailedDevice>, Vec<FailedDevice>) {
        if !self.reports_devices() {
            return (Vec::new(), Vec::new());
        }
        let all_links: Vec<u32> = (0..self.known.max_links).collect();
        let device = |kind, number, bus, ports| {
            let (uuid, pci_bus_id) = self.names(kind, number, bus);
            FailedDevice { uuid, pci_bus_id, ports }
        };
        let with_links = self.failed.links.iter().map(|link| link.0);
        let gpus: BTreeSet<u32> = self.failed.gpus.iter().copied().chain(with_links).collect();
        let ports = |gpu: u32| {
            let some = self.failed.links.iter().filter(|link| link.0 == gpu).map(|link| link.1);
            if self.failed.gpus.contains(&gpu) { all_links.clone() } else { some.collect() }
        };
        let gpus = gpus.into_iter().map(|gpu| device("GPU", gpu, 0x06, ports(gpu))).collect();
        let switches = self.failed.switches.iter().map(|&it| device("SWX", it, 0xc0, all_links.clone())).collect();
        (gpus, switches)
    }

    /// Checks that the failed devices exist on this baseboard.
    ///
    /// # Errors
    /// The device that does not exist.
    pub fn check(&self) -> Result<(), String> {
        let gpus = self.table.gpus();
        let is_there = |gpu: u32| gpus.ids().any(|id| id == gpu);
        let switches = gpus.count().div_ceil(GPUS_OF_A_TRAY) * SWITCHES_OF_A_TRAY;
        let name = self.known.name;
        for &gpu in self.failed.gpus.iter().chain(self.failed.links.iter().map(|(gpu, _)| gpu)) {
            if !is_there(gpu) {
                return Err(format!("failed: {name} has no GPU {gpu}"));
            }
        }
        if let Some(link) = self.failed.links.iter().find(|link| link.1 >= self.known.max_links) {
            return Err(format!("failed: GPU {} of {name} has no link {}", link.0, link.1));
        }
        self.failed
            .switches
            .iter()
            .find(|it| **it >= switches)
            .map_or(Ok(()), |it| Err(format!("failed: {name} has no switch {it}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_partitions::known;

    fn ids(board: &Board) -> Vec<u32> {
        board.list(&BTreeSet::new()).iter().map(|it| it.id).collect()
    }

    #[test]
    fn a100_lists_omit_failed_partitions() {
        let one_gpu = Failed { gpus: [3].into(), ..Failed::default() };
        let board = Board::new(&known::A100_8, one_gpu, Policy::default());
        assert_eq!(ids(&board), [8, 11, 13, 14, 19, 20, 22, 23, 24, 25, 26]);
        assert_eq!(board.unsupported().iter().map(|it| it.id).collect::<Vec<_>>(), [1, 7, 12, 21]);
        assert_eq!(board.failed_devices().0[0].ports.len(), 12);
        assert_eq!(board.list(&BTreeSet::new())[0].gpus[0].pci_bus_id, "00000000:0B:00.0");

        let one_switch = Failed { switches: [7].into(), ..Failed::default() };
        let board = Board::new(&known::A100_16, one_switch.clone(), Policy::default());
        assert!(!board.supports(2) && !board.supports(0) && board.supports(1) && board.supports(34));
        assert_eq!(board.failed_devices().1.len(), 1);
        let keep = Policy { keep_with_failed_switches: true, ..Policy::default() };
        let board = Board::new(&known::A100_16, one_switch, keep);
        let list = board.list(&BTreeSet::new());
        assert_eq!(list.len(), known::A100_16.rows.len());
        assert_eq!((list[2].gpus[0].links_available, list[2].gpus[0].links_max), (10, 12));
        assert_eq!(list[1].gpus[0].links_available, 12);

        let one_link = Failed { links: [(1, 5)].into(), ..Failed::default() };
        let board = Board::new(&known::A100_8, one_link, Policy::default());
        assert!(!board.supports(11) && board.supports(19) && board.supports(12));
        assert_eq!(board.failed_devices().0[0].ports, [5]);
    }

    #[test]
    fn lists_of_later_baseboards_never_change() {
        let failed = Failed { gpus: [3].into(), switches: [0].into(), links: [(1, 1)].into() };
        for known in [&known::H100, &known::B200] {
            let board = Board::new(known, failed.clone(), Policy::default());
            assert_eq!(
                board.list(&BTreeSet::new()),
                Board::new(known, Failed::default(), Policy::default()).list(&BTreeSet::new())
            );
            assert!(board.unsupported().is_empty() && board.failed_devices() == (Vec::new(), Vec::new()));
            let list = board.list(&[4].into());
            assert!(list.iter().all(|it| it.is_active == (it.id == 4)));
            assert!(
                list.iter().flat_map(|it| &it.gpus).all(|it| it.uuid.is_empty() && it.pci_bus_id == "00000000:00:00.0")
            );
            assert!(list.iter().all(|it| (it.gpus.len() > 1) == (it.gpus[0].links_available == 18)));
        }
    }

    #[test]
    fn failed_devices_have_to_exist() {
        for (failed, error) in [
            (Failed { gpus: [9].into(), ..Failed::default() }, "no GPU 9"),
            (Failed { switches: [6].into(), ..Failed::default() }, "no switch 6"),
            (Failed { links: [(1, 12)].into(), ..Failed::default() }, "no link 12"),
        ] {
            let board = Board::new(&known::A100_8, failed, Policy::default());
            assert!(board.check().unwrap_err().contains(error));
        }
    }
}
