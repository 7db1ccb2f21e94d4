//! The tables of known baseboards, as NVIDIA's fabric manager guide prints them.
//!
//! Partitions are always taken from the running fabric manager's list. These tables are for tests, stand-ins, and to
//! identify the baseboard of a list.

use crate::gpus::Gpus;
use crate::table::{Partition, PartitionId, Table};

/// The partition table of a baseboard.
#[derive(Debug, Clone, Copy)]
pub struct KnownBaseboard {
    /// The name, such as `h100`.
    pub name: &'static str,
    /// Partition id, module ids, and NVLinks of each GPU in the partition.
    pub rows: &'static [(PartitionId, &'static [u32], u32)],
    /// The rate of a link in MB/s: as FM reports it on an H100, nominal on the others.
    pub line_rate: u32,
    /// NVLinks of a GPU.
    pub max_links: u32,
}

impl KnownBaseboard {
    /// Returns the table; a test checks that the constant rows are valid.
    #[must_use]
    pub fn table(&self) -> Table {
        let gpus = |ids: &[u32]| Gpus::of(ids.iter().copied()).unwrap_or_default();
        let rows = self.rows.iter().map(|&(id, ids, _)| Partition { id, gpus: gpus(ids) });
        Table::new(rows).unwrap_or_default()
    }

    /// Returns the known baseboard with this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        ALL.iter().copied().find(|known| known.name == name)
    }

    /// Returns the known baseboard whose table contains all these partitions; FM omits partitions of missing GPUs.
    #[must_use]
    pub fn matching(table: &Table) -> Option<&'static Self> {
        let is_of = |known: &&KnownBaseboard| {
            let whole = known.table();
            let same = |partition: &Partition| whole.get(partition.id) == Some(partition);
            !table.partitions().is_empty() && table.partitions().iter().all(same)
        };
        ALL.iter().copied().find(is_of)
    }
}

const EIGHT: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8];

/// HGX and DGX H100, H200, H800 and H20.
pub static H100: KnownBaseboard = KnownBaseboard {
    name: "h100",
    rows: &[
        (0, EIGHT, 18),
        (1, &[1, 2, 3, 4], 18),
        (2, &[5, 6, 7, 8], 18),
        (3, &[1, 3], 18),
        (4, &[2, 4], 18),
        (5, &[5, 7], 18),
        (6, &[6, 8], 18),
        (7, &[1], 0),
        (8, &[2], 0),
        (9, &[3], 0),
        (10, &[4], 0),
        (11, &[5], 0),
        (12, &[6], 0),
        (13, &[7], 0),
        (14, &[8], 0),
    ],
    line_rate: 26_562,
    max_links: 18,
};

/// HGX and DGX B200 and B300: ids begin with 1, and pairs have adjacent module ids.
pub static B200: KnownBaseboard = KnownBaseboard {
    name: "b200",
    rows: &[
        (1, EIGHT, 18),
        (2, &[1, 2, 3, 4], 18),
        (3, &[5, 6, 7, 8], 18),
        (4, &[1, 2], 18),
        (5, &[3, 4], 18),
        (6, &[5, 6], 18),
        (7, &[7, 8], 18),
        (8, &[1], 0),
        (9, &[2], 0),
        (10, &[3], 0),
        (11, &[4], 0),
        (12, &[5], 0),
        (13, &[6], 0),
        (14, &[7], 0),
        (15, &[8], 0),
    ],
    line_rate: 53_125,
    max_links: 18,
};

/// HGX A100 with two trays: the halves can be combined, so the partitions do not form a tree.
pub static A100_16: KnownBaseboard = KnownBaseboard {
    name: "a100-16",
    rows: &[
        (0, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], 12),
        (1, EIGHT, 12),
        (2, &[9, 10, 11, 12, 13, 14, 15, 16], 12),
        (3, &[1, 2, 3, 4, 9, 10, 11, 12], 12),
        (4, &[5, 6, 7, 8, 13, 14, 15, 16], 12),
        (5, &[1, 2, 3, 4, 13, 14, 15, 16], 12),
        (6, &[5, 6, 7, 8, 9, 10, 11, 12], 12),
        (7, &[1, 2, 3, 4], 12),
        (8, &[5, 6, 7, 8], 12),
        (9, &[9, 10, 11, 12], 12),
        (10, &[13, 14, 15, 16], 12),
        (11, &[1, 2], 12),
        (12, &[3, 4], 12),
        (13, &[5, 6], 12),
        (14, &[7, 8], 12),
        (15, &[9, 10], 12),
        (16, &[11, 12], 12),
        (17, &[13, 14], 12),
        (18, &[15, 16], 12),
        (19, &[1], 0),
        (20, &[2], 0),
        (21, &[3], 0),
        (22, &[4], 0),
        (23, &[5], 0),
        (24, &[6], 0),
        (25, &[7], 0),
        (26, &[8], 0),
        (27, &[9], 0),
        (28, &[10], 0),
        (29, &[11], 0),
        (30, &[12], 0),
        (31, &[13], 0),
        (32, &[14], 0),
        (33, &[15], 0),
        (34, &[16], 0),
    ],
    line_rate: 25_000,
    max_links: 12,
};

/// HGX A100 with one tray: the ids are those of the table for two.
pub static A100_8: KnownBaseboard = KnownBaseboard {
    name: "a100-8",
    rows: &[
        (1, EIGHT, 12),
        (7, &[1, 2, 3, 4], 12),
        (8, &[5, 6, 7, 8], 12),
        (11, &[1, 2], 12),
        (12, &[3, 4], 12),
        (13, &[5, 6], 12),
        (14, &[7, 8], 12),
        (19, &[1], 0),
        (20, &[2], 0),
        (21, &[3], 0),
        (22, &[4], 0),
        (23, &[5], 0),
        (24, &[6], 0),
        (25, &[7], 0),
        (26, &[8], 0),
    ],
    line_rate: 25_000,
    max_links: 12,
};

/// HGX-2 with 16 V100: pairs do not have adjacent module ids.
pub static HGX_2: KnownBaseboard = KnownBaseboard {
    name: "hgx-2",
    rows: &[
        (0, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], 6),
        (1, EIGHT, 6),
        (2, &[9, 10, 11, 12, 13, 14, 15, 16], 6),
        (3, &[1, 4, 6, 7, 9, 12, 14, 15], 5),
        (4, &[2, 3, 5, 8, 10, 11, 13, 16], 5),
        (5, &[1, 4, 6, 7], 5),
        (6, &[2, 3, 5, 8], 5),
        (7, &[9, 12, 14, 15], 5),
        (8, &[10, 11, 13, 16], 5),
        (9, &[1, 4], 5),
        (10, &[2, 3], 5),
        (11, &[5, 8], 5),
        (12, &[6, 7], 5),
        (13, &[9, 12], 5),
        (14, &[10, 11], 5),
        (15, &[13, 16], 5),
        (16, &[14, 15], 5),
        (17, &[1], 0),
        (18, &[2], 0),
        (19, &[3], 0),
        (20, &[4], 0),
        (21, &[5], 0),
        (22, &[6], 0),
        (23, &[7], 0),
        (24, &[8], 0),
        (25, &[9], 0),
        (26, &[10], 0),
        (27, &[11], 0),
        (28, &[12], 0),
        (29, &[13], 0),
        (30, &[14], 0),
        (31, &[15], 0),
        (32, &[16], 0),
    ],
    line_rate: 25_781,
    max_links: 6,
};

/// All known baseboards. A table that is a subset of another comes first.
pub static ALL: &[&KnownBaseboard] = &[&H100, &B200, &A100_8, &A100_16, &HGX_2];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_tables_are_valid_and_identified() {
        for known in ALL {
            let table = known.table();
            assert_eq!(table.partitions().len(), known.rows.len(), "{}", known.name);
            assert_eq!(KnownBaseboard::matching(&table).unwrap().name, known.name);
            assert_eq!(KnownBaseboard::by_name(known.name).unwrap().name, known.name);
            for &(id, gpus, links) in known.rows {
                assert_eq!(links == 0, gpus.len() == 1, "{} {id}", known.name);
                assert!(links <= known.max_links);
                assert_eq!(table.get(id).unwrap().gpus.ids().collect::<Vec<_>>(), gpus, "{} {id}", known.name);
            }
            let singles = known.rows.iter().filter(|(_, gpus, _)| gpus.len() == 1).count();
            assert_eq!(u32::try_from(singles).unwrap(), table.gpus().count(), "every GPU can be alone");
        }
        assert!(KnownBaseboard::matching(&Table::default()).is_none());
        let other = Table::new([Partition { id: 0, gpus: Gpus::of([1, 2]).unwrap() }]).unwrap();
        assert!(KnownBaseboard::matching(&other).is_none());
    }
}
