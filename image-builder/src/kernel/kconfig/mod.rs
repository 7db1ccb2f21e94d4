//! Explains symbol values from a kernel's Kconfig files.
//!
//! Only the necessary part of the Kconfig language is parsed: dependencies,
//! prompts, choices and `select`.

mod expr;
mod read;

use std::path::Path;

use super::config::UnmetValue;
use super::dot_config::DotConfig;
use expr::{Expr, Tri};
pub use read::{Definition, Error, Prompt, Symbols};

/// Maximum number of selecting symbols in a message.
const MAX_SELECTORS: usize = 6;

/// Why a symbol does not have the expected value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Explanation {
    /// The kernel does not have the symbol.
    Unknown,
    /// These dependencies are not met.
    Blocked(Vec<String>),
    /// The symbol has no prompt; these symbols select it.
    Promptless(Vec<String>),
    /// These symbols select it.
    Selected(Vec<String>),
    /// Another member of its `choice` is set.
    Choice,
    /// The symbol can be set; its dependencies are met.
    Settable,
}

/// The symbols of a kernel's source tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    symbols: Symbols,
}

impl Tree {
    /// Reads the source tree of a kernel.
    ///
    /// # Errors
    /// `dir` is not a kernel source tree, or a file cannot be read.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        Ok(Self { symbols: Symbols::read(dir)? })
    }

    /// Returns a tree of parsed symbols.
    #[must_use]
    pub fn from_symbols(symbols: Symbols) -> Self {
        Self { symbols }
    }

    /// Returns the number of symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.symbols.definitions.len()
    }

    /// Returns whether there are no symbols.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.symbols.definitions.is_empty()
    }

    /// Explains why `symbol` does not have the value `expected` in `config`.
    #[must_use]
    pub fn explain(&self, symbol: &str, expected: &str, config: &DotConfig) -> Explanation {
        let Some(definitions) = self.symbols.definitions.get(symbol) else { return Explanation::Unknown };
        if expected == "n" {
            let by = self.selectors(
                symbol,
                |when| when.is_none_or(|when| when.value(config) != Some(Tri::No)),
                |name| matches!(config.value(name), Some("y" | "m")),
            );
            return if by.is_empty() { Explanation::Settable } else { Explanation::Selected(by) };
        }
        let level = if expected == "m" { Tri::Module } else { Tri::Yes };
        let met =
            |expr: &Option<Expr>| expr.as_ref().is_none_or(|expr| expr.value(config).is_none_or(|is| is >= level));
        let Some(reachable_definition) = definitions.iter().find(|one| met(&one.depends)) else {
            // Of several definitions, the one with the fewest unmet dependencies.
            let lacking = definitions.iter().filter_map(|one| Some(one.depends.as_ref()?.missing(level, config)));
            return Explanation::Blocked(lacking.min_by_key(Vec::len).unwrap_or_default());
        };
        let reachable = definitions.iter().filter(|one| met(&one.depends)).filter_map(|one| one.prompt.as_ref());
        if reachable.clone().any(|prompt| met(&prompt.when)) {
            return if reachable_definition.of_choice { Explanation::Choice } else { Explanation::Settable };
        }
        let hidden = reachable.filter_map(|prompt| Some(prompt.when.as_ref()?.missing(level, config)));
        let by = self.selectors(symbol, |_| true, |name| self.symbols.definitions.contains_key(name));
        match (by.is_empty(), hidden.min_by_key(Vec::len)) {
            (true, Some(missing)) => Explanation::Blocked(missing),
            _ => Explanation::Promptless(by),
        }
    }

    fn selectors(
        &self,
        symbol: &str,
        when: impl Fn(Option<&Expr>) -> bool,
        counts: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let all = self.symbols.selected.get(symbol).into_iter().flatten();
        let mut names: Vec<String> = Vec::new();
        for (name, condition) in all {
            if when(condition.as_ref()) && counts(name) && !names.contains(name) {
                names.push(name.clone());
            }
        }
        names.sort_by_key(|name| (name.len(), name.clone()));
        if names.len() > MAX_SELECTORS {
            let more = names.len() - MAX_SELECTORS;
            names.truncate(MAX_SELECTORS);
            names.push(format!("{more} more"));
        }
        names
    }

    /// Adds an explanation to each unmet value.
    pub fn explain_unmet(&self, unmet: &mut [UnmetValue], config: &DotConfig) {
        for one in unmet {
            one.explanation = Some(self.explain(&one.symbol, &one.requested.value, config).sentence());
        }
    }
}

impl Explanation {
    /// Formats the explanation as a phrase that follows the symbol.
    #[must_use]
    pub fn sentence(&self) -> String {
        match self {
            Self::Unknown => "this kernel does not have the symbol".to_owned(),
            Self::Blocked(by) if by.is_empty() => "a dependency is not met".to_owned(),
            Self::Blocked(by) => format!("unmet dependencies: {}", by.join(", ")),
            Self::Promptless(by) if by.is_empty() => "it has no prompt; only other symbols enable it".to_owned(),
            Self::Promptless(by) => format!("it has no prompt; selected by {}", by.join(", ")),
            Self::Selected(by) => format!("selected by {}", by.join(", ")),
            Self::Choice => "another member of its choice is set".to_owned(),
            Self::Settable => "its dependencies are met, so the value is out of range or has the wrong type".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
