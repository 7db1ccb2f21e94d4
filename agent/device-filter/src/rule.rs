//! Rules and what is asked of them.

use serde::{Deserialize, Serialize};

/// Which devices a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// All there are; the rule's numbers and bits are ignored.
    #[serde(rename = "a")]
    All,
    /// Character devices.
    #[serde(rename = "c")]
    Char,
    /// Block devices.
    #[serde(rename = "b")]
    Block,
}

/// Some of read, write and mknod, in the kernel's bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Access(u8);

impl Access {
    /// None of them.
    pub const NONE: Self = Self(0);
    /// `BPF_DEVCG_ACC_MKNOD`
    pub const MKNOD: Self = Self(1);
    /// `BPF_DEVCG_ACC_READ`
    pub const READ: Self = Self(2);
    /// `BPF_DEVCG_ACC_WRITE`
    pub const WRITE: Self = Self(4);
    /// All of them.
    pub const ALL: Self = Self(7);

    /// Letters of `rwm`; `None` if there are others.
    #[must_use]
    pub fn of(letters: &str) -> Option<Self> {
        letters.chars().try_fold(Self::NONE, |all, letter| match letter {
            'r' => Some(all.and(Self::READ)),
            'w' => Some(all.and(Self::WRITE)),
            'm' => Some(all.and(Self::MKNOD)),
            _ => None,
        })
    }

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What is left without `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether they have something in common.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether it is nothing at all.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// In the kernel's bits.
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

/// One rule. In messages it is a short list, `[true,"c",195,0,7]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct Rule {
    /// Whether it allows or denies.
    pub allow: bool,
    /// The kind of device.
    pub kind: Kind,
    /// The driver's number; any if absent.
    pub major: Option<u32>,
    /// The device's number; any if absent.
    pub minor: Option<u32>,
    /// What may be done with it, or may not.
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

/// What the kernel wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The kind of the device. None is [`Kind::All`].
    pub kind: Kind,
    /// Its driver's number.
    pub major: u32,
    /// Its number.
    pub minor: u32,
    /// What somebody wants to do with it.
    pub access: Access,
}

impl Rule {
    /// Whether it is about that device, whatever is wanted of it.
    #[must_use]
    pub fn is_about(&self, asked: &Asked) -> bool {
        let number = |wanted: Option<u32>, is: u32| wanted.is_none_or(|wanted| wanted == is);
        (self.kind == Kind::All)
            || self.kind == asked.kind && number(self.major, asked.major) && number(self.minor, asked.minor)
    }
}
