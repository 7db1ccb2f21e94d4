//! Sets of GPUs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Module ids are below this: 1 to 16 on the largest baseboard there is.
pub const MOST: u32 = 64;

/// A number that is no module id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no module id: they are numbers below {MOST}")]
pub struct NoGpu(pub u32);

/// A set of GPUs, by module id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u32>", into = "Vec<u32>")]
pub struct Gpus(u64);

impl Gpus {
    /// No GPU.
    pub const NONE: Self = Self(0);

    /// These GPUs; one that is named twice counts once.
    ///
    /// # Errors
    /// A number that is no module id.
    pub fn of(ids: impl IntoIterator<Item = u32>) -> Result<Self, NoGpu> {
        ids.into_iter().try_fold(Self::NONE, |all, id| Ok(all.with(Self::one(id)?)))
    }

    /// One GPU.
    ///
    /// # Errors
    /// The number is no module id.
    pub fn one(id: u32) -> Result<Self, NoGpu> {
        if id < MOST { Ok(Self(1 << id)) } else { Err(NoGpu(id)) }
    }

    /// How many there are.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether a GPU is in both.
    #[must_use]
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether all of `other` are here.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Those of either.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The module ids, smallest first.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        (0..MOST).filter(move |id| self.0 & (1 << id) != 0)
    }
}

impl fmt::Display for Gpus {
    /// `1,2,3`, or `none`.
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
    type Error = NoGpu;

    fn try_from(ids: Vec<u32>) -> Result<Self, NoGpu> {
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
    fn numbers_that_are_no_module_ids_are_refused() {
        assert_eq!(Gpus::of([1, 64]), Err(NoGpu(64)));
        assert_eq!(Gpus::one(u32::MAX), Err(NoGpu(u32::MAX)));
        assert!(serde_json::from_str::<Gpus>("[1, 99]").unwrap_err().to_string().contains("99 is no module id"));
        assert_eq!(Gpus::NONE.to_string(), "none");
    }

    proptest! {
        /// As the standard library's sets do it.
        #[test]
        fn sets_are_sets(a in prop::collection::btree_set(0..MOST, 0..9), b in prop::collection::btree_set(0..MOST, 0..9)) {
            let of = |ids: &BTreeSet<u32>| Gpus::of(ids.iter().copied()).unwrap();
            let (x, y) = (of(&a), of(&b));
            let same = |gpus: Gpus, ids: BTreeSet<u32>| gpus.ids().eq(ids.iter().copied()) && gpus.count() == u32::try_from(ids.len()).unwrap();
            prop_assert!(same(x, a.clone()) && same(x.with(y), &a | &b) && same(x.and(y), &a & &b) && same(x.without(y), &a - &b));
            prop_assert_eq!((x.meets(y), x.has(y), x.is_empty()), (!a.is_disjoint(&b), a.is_superset(&b), a.is_empty()));
            let words: Vec<String> = a.iter().map(ToString::to_string).collect();
            prop_assert!(a.is_empty() || x.to_string() == words.join(","));
            prop_assert_eq!(serde_json::from_str::<Gpus>(&serde_json::to_string(&x).unwrap()).unwrap(), x);
        }
    }
}
