//! A normalised list of device rules.

use crate::program::{self, Instruction};
use crate::rule::{Access, AccessRequest, Kind, Rule};

/// The most rules of one container. A container with every device of a large host has some hundred; the kernel
/// verifies each when the program is loaded.
pub const MAX_RULES: usize = 1024;

/// Why a list of rules is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Untrusted input: more rules would keep the kernel's verifier busy.
    #[error(
        "{count} device rules exceed the limit of {MAX_RULES}: name fewer devices, or a major number without minor numbers"
    )]
    TooMany {
        /// The number of rules.
        count: usize,
    },
}

/// A device filter. Two filters are equal if their normalised rules are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Whether access is allowed if no rule matches.
    pub(crate) default_allow: bool,
    /// In their order, without [`Kind::All`] rules and rules without access bits.
    pub(crate) rules: Vec<Rule>,
}

impl Filter {
    /// Creates the filter of a list of rules; the default is to deny.
    ///
    /// # Errors
    /// The list has more than [`MAX_RULES`].
    pub fn new(rules: &[Rule]) -> Result<Self, Error> {
        if rules.len() > MAX_RULES {
            return Err(Error::TooMany { count: rules.len() });
        }
        let last = rules.iter().rposition(|rule| rule.kind == Kind::All);
        let default_allow = last.is_some_and(|at| rules[at].allow);
        let rules = rules[last.map_or(0, |at| at + 1)..].iter().filter(|rule| !rule.access.is_none());
        Ok(Self { default_allow, rules: rules.copied().collect() })
    }

    /// Whether the rules allow an access, without running the program.
    #[must_use]
    pub fn allows(&self, request: &AccessRequest) -> bool {
        let mut left = request.access;
        for rule in self.rules.iter().rev().filter(|rule| rule.matches_device(request)) {
            if rule.allow {
                left = left.without(rule.access);
            } else if rule.access.intersects(left) {
                return false;
            }
        }
        left.is_none() || self.default_allow
    }

    /// Returns the equivalent BPF program.
    #[must_use]
    pub fn program(&self) -> Vec<Instruction> {
        program::compile(self)
    }
}

impl Default for Filter {
    /// Denies everything.
    fn default() -> Self {
        Self { default_allow: false, rules: Vec::new() }
    }
}

/// Whether a rule has all bits (`rwm`), so that the requested bits need not be checked.
pub(crate) fn is_unrestricted(rule: &Rule) -> bool {
    rule.access == Access::ALL
}
