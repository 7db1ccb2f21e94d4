//! A list of rules, brought into one form.

use crate::program::{self, Instruction};
use crate::rule::{Access, Asked, Kind, Rule};

/// Rules of one container. A container with every device of a large host has
/// some hundred; the kernel reads each of them when the program is loaded.
pub const MOST_RULES: usize = 1024;

/// Why rules are no filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Somebody wants to keep the kernel busy.
    #[error(
        "{count} device rules are more than {MOST_RULES}: name fewer devices, or a driver's number without the device's"
    )]
    TooMany {
        /// How many there are.
        count: usize,
    },
}

/// What decides about devices. Two filters are equal if the same rules are left of theirs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// What holds where no rule matches.
    pub(crate) otherwise: bool,
    /// In their order, without rules about everything and without rules about nothing.
    pub(crate) rules: Vec<Rule>,
}

impl Filter {
    /// The filter of a list of rules; everything is denied at first.
    ///
    /// # Errors
    /// There are more than [`MOST_RULES`].
    pub fn new(rules: &[Rule]) -> Result<Self, Error> {
        if rules.len() > MOST_RULES {
            return Err(Error::TooMany { count: rules.len() });
        }
        let last = rules.iter().rposition(|rule| rule.kind == Kind::All);
        let otherwise = last.is_some_and(|at| rules[at].allow);
        let rules = rules[last.map_or(0, |at| at + 1)..].iter().filter(|rule| !rule.access.is_none());
        Ok(Self { otherwise, rules: rules.copied().collect() })
    }

    /// Whether something may be done, by the rules and not by the program.
    #[must_use]
    pub fn allows(&self, asked: &Asked) -> bool {
        let mut left = asked.access;
        for rule in self.rules.iter().rev().filter(|rule| rule.is_about(asked)) {
            if rule.allow {
                left = left.without(rule.access);
            } else if rule.access.meets(left) {
                return false;
            }
        }
        left.is_none() || self.otherwise
    }

    /// The program that decides the same.
    #[must_use]
    pub fn program(&self) -> Vec<Instruction> {
        program::of(self)
    }
}

impl Default for Filter {
    /// Denies everything.
    fn default() -> Self {
        Self { otherwise: false, rules: Vec::new() }
    }
}

/// `rwm` needs no look at what is asked.
pub(crate) fn is_whole(rule: &Rule) -> bool {
    rule.access == Access::ALL
}
