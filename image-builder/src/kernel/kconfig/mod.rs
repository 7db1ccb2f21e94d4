//! A kernel's source, asked why a symbol is as it is.
//!
//! Only as much of the Kconfig language is read as tells that: what symbols
//! depend on, whether they can be asked for, and who selects them.

pub mod expr;
mod read;

use std::path::Path;

use super::config::Refused;
use super::dot_config::DotConfig;
use expr::{Expr, Tri};
pub use read::{Definition, Error, Prompt, Symbols};

/// Names in a list of those that select something, at most.
const NAMES: usize = 6;

/// Why a symbol is not what somebody wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// The kernel does not know it.
    Unknown,
    /// What it depends on is not as it has to be.
    Blocked(Vec<String>),
    /// Nobody can ask for it: these select it.
    Promptless(Vec<String>),
    /// These switch it on.
    Selected(Vec<String>),
    /// Another of its choice is chosen.
    Choice,
    /// Nothing is in the way: nobody has asked for it.
    Open,
}

/// What the source of a kernel says of its symbols.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    symbols: Symbols,
}

impl Tree {
    /// Reads the source tree of a kernel.
    ///
    /// # Errors
    /// It is none.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        Ok(Self { symbols: Symbols::read(dir)? })
    }

    /// From symbols that are read already.
    #[must_use]
    pub fn of(symbols: Symbols) -> Self {
        Self { symbols }
    }

    /// How many symbols there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.symbols.definitions.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.symbols.definitions.is_empty()
    }

    /// Why `symbol` is not `wanted` in `config`.
    #[must_use]
    pub fn explain(&self, symbol: &str, wanted: &str, config: &DotConfig) -> Why {
        let Some(definitions) = self.symbols.definitions.get(symbol) else { return Why::Unknown };
        if wanted == "n" {
            let by = self.selectors(
                symbol,
                |when| when.is_none_or(|when| when.value(config) != Some(Tri::No)),
                |name| matches!(config.value(name), Some("y" | "m")),
            );
            return if by.is_empty() { Why::Open } else { Why::Selected(by) };
        }
        let level = if wanted == "m" { Tri::Module } else { Tri::Yes };
        let met =
            |expr: &Option<Expr>| expr.as_ref().is_none_or(|expr| expr.value(config).is_none_or(|is| is >= level));
        let Some(open) = definitions.iter().find(|one| met(&one.depends)) else {
            // Where there are several places, the one that lacks least.
            let lacking = definitions.iter().filter_map(|one| Some(one.depends.as_ref()?.missing(level, config)));
            return Why::Blocked(lacking.min_by_key(Vec::len).unwrap_or_default());
        };
        let reachable = definitions.iter().filter(|one| met(&one.depends)).filter_map(|one| one.prompt.as_ref());
        if reachable.clone().any(|prompt| met(&prompt.when)) {
            return if open.of_choice { Why::Choice } else { Why::Open };
        }
        let hidden = reachable.filter_map(|prompt| Some(prompt.when.as_ref()?.missing(level, config)));
        let by = self.selectors(symbol, |_| true, |name| self.symbols.definitions.contains_key(name));
        match (by.is_empty(), hidden.min_by_key(Vec::len)) {
            (true, Some(missing)) => Why::Blocked(missing),
            _ => Why::Promptless(by),
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
        if names.len() > NAMES {
            let more = names.len() - NAMES;
            names.truncate(NAMES);
            names.push(format!("{more} more"));
        }
        names
    }

    /// Says of each symbol that a build refused why it did.
    pub fn explain_refused(&self, refused: &mut [Refused], config: &DotConfig) {
        for one in refused {
            one.why = Some(self.explain(&one.symbol, &one.wish.value, config).sentence());
        }
    }
}

impl Why {
    /// As the end of a sentence about a symbol.
    #[must_use]
    pub fn sentence(&self) -> String {
        match self {
            Self::Unknown => "this kernel does not know it".to_owned(),
            Self::Blocked(by) if by.is_empty() => "what it depends on is missing".to_owned(),
            Self::Blocked(by) => format!("it needs others: {}", by.join(", ")),
            Self::Promptless(by) if by.is_empty() => "nobody can ask for it, it follows from others".to_owned(),
            Self::Promptless(by) => format!("nobody can ask for it; selected by {}", by.join(", ")),
            Self::Selected(by) => format!("switched on by {}", by.join(", ")),
            Self::Choice => "another of its choice is taken".to_owned(),
            Self::Open => "nothing stands in its way, so its value is out of range or of another kind".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
