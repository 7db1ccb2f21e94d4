//! Device rules and access requests.

use serde::{Deserialize, Serialize};

/// The type of devices that a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// All devices; the rule's numbers and bits are ignored.
    #[serde(rename = "a")]
    All,
    /// Character devices.
    #[serde(rename = "c")]
    Char,
    /// Block devices.
    #[serde(rename = "b")]
    Block,
}

/// A set of read, write and mknod, as the kernel's bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Access(u8);

impl Access {
    /// No bits.
    pub const NONE: Self = Self(0);
    /// `BPF_DEVCG_ACC_MKNOD`
    pub const MKNOD: Self = Self(1);
    /// `BPF_DEVCG_ACC_READ`
    pub const READ: Self = Self(2);
    /// `BPF_DEVCG_ACC_WRITE`
    pub const WRITE: Self = Self(4);
    /// All bits.
    pub const ALL: Self = Self(7);

    /// Parses letters of `rwm`; `None` if there are others.
    #[must_use]
    pub fn parse(letters: &str) -> Option<Self> {
        letters.chars().try_fold(Self::NONE, |all, letter| match letter {
            'r' => Some(all.and(Self::READ)),
            'w' => Some(all.and(Self::WRITE)),
            'm' => Some(all.and(Self::MKNOD)),
            _ => None,
        })
    }

    /// Returns the union.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the bits that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the sets intersect.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Returns the kernel's bits.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Access {
    type Error = String;

    fn try_from(bits: u8) -> Result<Self, String> {
        if bits > Self::ALL.0 { Err(format!("access {bits} has unknown bits")) } else { Ok(Self(bits)) }
    }
}

impl From<Access> for u8 {
    fn from(access: Access) -> Self {
        access.0
    }
}

/// One device rule. Serialized as a short list, `[true,"c",195,0,7]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct Rule {
    /// Whether it allows or denies.
    pub allow: bool,
    /// The device type.
    pub kind: Kind,
    /// The major number; `None` matches any.
    pub major: Option<u32>,
    /// The minor number; `None` matches any.
    pub minor: Option<u32>,
    /// The access that is allowed or denied.
    pub access: Access,
}

type Wire = (bool, Kind, Option<u32>, Option<u32>, Access);

impl From<Wire> for Rule {
    fn from((allow, kind, major, minor, access): Wire) -> Self {
        Self { allow, kind, major, minor, access }
    }
}

impl From<Rule> for Wire {
    fn from(rule: Rule) -> Self {
        (rule.allow, rule.kind, rule.major, rule.minor, rule.access)
    }
}

/// An access that the kernel checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessRequest {
    /// The device type, never [`Kind::All`].
    pub kind: Kind,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// The requested access.
    pub access: Access,
}

impl Rule {
    /// Whether the rule matches the device, regardless of the access bits.
    #[must_use]
    pub fn matches_device(&self, request: &AccessRequest) -> bool {
        let number = |of_rule: Option<u32>, is: u32| of_rule.is_none_or(|of_rule| of_rule == is);
        (self.kind == Kind::All)
            || self.kind == request.kind && number(self.major, request.major) && number(self.minor, request.minor)
    }
}
