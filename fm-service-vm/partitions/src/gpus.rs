//! Sets of GPUs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Module ids are below this limit: 1 to 16 on the largest baseboard.
pub const MODULE_ID_LIMIT: u32 = 64;

/// An invalid module id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid module id {0}: they are numbers below {MODULE_ID_LIMIT}")]
pub struct InvalidModuleId(pub u32);

/// A set of GPUs, by module id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u32>", into = "Vec<u32>")]
pub struct Gpus(u64);

impl Gpus {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the set of these GPUs; duplicates are ignored.
    ///
    /// # Errors
    /// A module id is invalid.
    pub fn of(ids: impl IntoIterator<Item = u32>) -> Result<Self, InvalidModuleId> {
        ids.into_iter().try_fold(Self::NONE, |all, id| Ok(all.with(Self::one(id)?)))
    }

    /// Returns the set of one GPU.
    ///
    /// # Errors
    /// The module id is invalid.
    pub fn one(id: u32) -> Result<Self, InvalidModuleId> {
        if id < MODULE_ID_LIMIT { Ok(Self(1 << id)) } else { Err(InvalidModuleId(id)) }
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the sets have a GPU in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether `other` is a subset.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the intersection.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the difference.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the module ids, smallest first.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        (0..MODULE_ID_LIMIT).filter(move |id| self.0 & (1 << id) != 0)
    }
}

impl fmt::Display for Gpus {
    /// Writes `1,2,3`, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (at, id) in self.ids().enumerate() {
            write!(f, "{}{id}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl TryFrom<Vec<u32>> for Gpus {
    type Error = InvalidModuleId;

    fn try_from(ids: Vec<u32>) -> Result<Self, InvalidModuleId> {
        Self::of(ids)
    }
}

impl From<Gpus> for Vec<u32> {
    fn from(gpus: Gpus) -> Self {
        gpus.ids().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn invalid_module_ids_are_refused() {
        assert_eq!(Gpus::of([1, 64]), Err(InvalidModuleId(64)));
        assert_eq!(Gpus::one(u32::MAX), Err(InvalidModuleId(u32::MAX)));
        assert!(serde_json::from_str::<Gpus>("[1, 99]").unwrap_err().to_string().contains("invalid module id 99"));
        assert_eq!(Gpus::NONE.to_string(), "none");
    }

    proptest! {
        /// Compared with the standard library's sets.
        #[test]
        fn gpu_sets_match_btree_sets(a in prop::collection::btree_set(0..MODULE_ID_LIMIT, 0..9), b in prop::collection::btree_set(0..MODULE_ID_LIMIT, 0..9)) {
            let of = |ids: &BTreeSet<u32>| Gpus::of(ids.iter().copied()).unwrap();
            let (x, y) = (of(&a), of(&b));
            let same = |gpus: Gpus, ids: BTreeSet<u32>| gpus.ids().eq(ids.iter().copied()) && gpus.count() == u32::try_from(ids.len()).unwrap();
            prop_assert!(same(x, a.clone()) && same(x.with(y), &a | &b) && same(x.and(y), &a & &b) && same(x.without(y), &a - &b));
            prop_assert_eq!((x.overlaps(y), x.has(y), x.is_empty()), (!a.is_disjoint(&b), a.is_superset(&b), a.is_empty()));
            let size_list: Vec<String> = a.iter().map(ToString::to_string).collect();
            prop_assert!(a.is_empty() || x.to_string() == size_list.join(","));
            prop_assert_eq!(serde_json::from_str::<Gpus>(&serde_json::to_string(&x).unwrap()).unwrap(), x);
        }
    }
}
