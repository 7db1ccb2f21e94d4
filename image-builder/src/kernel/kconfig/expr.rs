//! Kconfig expressions.

use std::fmt;

use crate::kernel::dot_config::DotConfig;

/// Maximum nesting of expressions: the kernel's have four levels.
const MAX_DEPTH: usize = 64;
/// Maximum number of parts of one expression: the kernel's have forty, including enclosing conditions.
const MAX_PARTS: usize = 1024;

/// A tristate value, ordered `n` < `m` < `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tri {
    /// Off.
    No,
    /// As a module.
    Module,
    /// Built in.
    Yes,
}

impl Tri {
    fn of(value: Option<&str>) -> Self {
        match value {
            Some("y") => Self::Yes,
            Some("m") => Self::Module,
            _ => Self::No,
        }
    }
}

/// A Kconfig expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr {
    /// A symbol, `y`, `m` or `n`.
    Symbol(String),
    /// A comparison of symbols or strings: left side, one of `=`, `!=`, `<`, `<=`, `>`, `>=`, right side.
    Compare(String, &'static str, String),
    /// Negation.
    Not(Box<Self>),
    /// Conjunction.
    And(Vec<Self>),
    /// Disjunction.
    Or(Vec<Self>),
    /// A macro call such as `$(cc-option,...)`, which is not evaluated.
    Unevaluated(String),
}

const COMPARISONS: [&str; 6] = ["!=", "<=", ">=", "=", "<", ">"];

impl Expr {
    /// Parses an expression; `None` if it is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let tokens = tokens(text).filter(|tokens| tokens.len() <= MAX_PARTS)?;
        let mut rest = tokens.as_slice();
        let expr = parse_or(&mut rest, 0)?;
        rest.is_empty().then_some(expr)
    }

    /// Evaluates the expression; `None` if the value depends on a macro call.
    #[must_use]
    pub fn value(&self, config: &DotConfig) -> Option<Tri> {
        match self {
            Self::Symbol(name) if matches!(name.as_str(), "y" | "m" | "n") => Some(Tri::of(Some(name))),
            Self::Symbol(name) => Some(Tri::of(config.value(name))),
            Self::Compare(left, how, right) => compare(left, how, right, config),
            Self::Not(inner) => inner.value(config).map(|value| match value {
                Tri::No => Tri::Yes,
                Tri::Module => Tri::Module,
                Tri::Yes => Tri::No,
            }),
            Self::And(parts) => fold_extreme(parts, config, Tri::No, Tri::min),
            Self::Or(parts) => fold_extreme(parts, config, Tri::Yes, Tri::max),
            Self::Unevaluated(_) => None,
        }
    }

    /// Returns the parts that prevent the value `expected`, with their values.
    #[must_use]
    pub fn missing(&self, expected: Tri, config: &DotConfig) -> Vec<String> {
        let mut missing = Vec::new();
        self.collect(expected, config, &mut missing);
        missing
    }

    fn collect(&self, expected: Tri, config: &DotConfig, missing: &mut Vec<String>) {
        if self.value(config).is_none_or(|value| value >= expected) {
            return;
        }
        let is = |name: &str| config.value(name).unwrap_or("off").to_owned();
        let part = match self {
            Self::And(parts) => return parts.iter().for_each(|part| part.collect(expected, config, missing)),
            Self::Symbol(name) => format!("{name} is {}", is(name)),
            Self::Compare(name, "=", right) if matches!(right.as_str(), "y" | "m" | "n") => {
                format!("{name} is {}, not {right}", is(name))
            }
            Self::Not(inner) => match &**inner {
                Self::Symbol(name) => format!("{name} is {}", is(name)),
                _ => format!("{self} is not met"),
            },
            _ => format!("{self} is not met"),
        };
        if !missing.contains(&part) {
            missing.push(part);
        }
    }

    /// Returns the conjunction of two expressions; `None` means always.
    #[must_use]
    pub fn and(left: Option<Self>, right: Option<Self>) -> Option<Self> {
        let (left, right) = match (left, right) {
            (Some(left), Some(right)) => (left, right),
            (one, other) => return one.or(other),
        };
        let parts = |expr| match expr {
            Self::And(parts) => parts,
            other => vec![other],
        };
        let mut all = parts(left);
        all.extend(parts(right));
        all.truncate(MAX_PARTS);
        Some(Self::And(all))
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Symbol(name) => f.write_str(name),
            Self::Compare(left, how, right) => write!(f, "{left} {how} {right}"),
            Self::Not(inner) => match &**inner {
                Self::And(_) => write!(f, "!({inner})"),
                _ => write!(f, "!{inner}"),
            },
            Self::And(parts) => f.write_str(&joined(parts, " && ")),
            Self::Or(parts) => write!(f, "({})", joined(parts, " || ")),
            Self::Unevaluated(text) => f.write_str(text),
        }
    }
}

fn joined(parts: &[Expr], between: &str) -> String {
    parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

/// Returns the minimum or maximum of the parts; a part equal to `end` decides regardless of unevaluated ones.
fn fold_extreme(parts: &[Expr], config: &DotConfig, end: Tri, pick: fn(Tri, Tri) -> Tri) -> Option<Tri> {
    let mut all = parts.iter().map(|part| part.value(config));
    let start = if end == Tri::No { Tri::Yes } else { Tri::No };
    let known = all.try_fold((start, true), |(so_far, known), value| match value {
        Some(value) if value == end => Err(end),
        Some(value) => Ok((pick(so_far, value), known)),
        None => Ok((so_far, false)),
    });
    match known {
        Err(end) => Some(end),
        Ok((value, known)) => known.then_some(value),
    }
}

fn compare(left: &str, how: &str, right: &str, config: &DotConfig) -> Option<Tri> {
    let side = |text: &str| -> String {
        match text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
            Some(text) => text.to_owned(),
            None if matches!(text, "y" | "m" | "n") || text.starts_with(|c: char| c.is_ascii_digit()) => {
                text.to_owned()
            }
            None => config.value(text).unwrap_or("n").trim_matches('"').to_owned(),
        }
    };
    if left.contains('$') || right.contains('$') {
        return None;
    }
    let (left, right) = (side(left), side(right));
    let order = match (left.parse::<i64>(), right.parse::<i64>()) {
        (Ok(left), Ok(right)) => left.cmp(&right),
        _ => left.cmp(&right),
    };
    let holds = match how {
        "=" => order.is_eq(),
        "!=" => order.is_ne(),
        "<" => order.is_lt(),
        "<=" => order.is_le(),
        ">" => order.is_gt(),
        _ => order.is_ge(),
    };
    Some(if holds { Tri::Yes } else { Tri::No })
}

/// Splits an expression into tokens: names, quoted strings, operators, and whole macro calls.
fn tokens(text: &str) -> Option<Vec<String>> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '#' => break,
            '"' | '\'' => rest[1..].find(first)? + 2,
            '$' => macro_call_len(rest)?,
            '&' | '|' => rest.get(..2).filter(|two| matches!(*two, "&&" | "||"))?.len(),
            '(' | ')' => 1,
            _ => match COMPARISONS.iter().find(|one| rest.starts_with(**one)) {
                Some(one) => one.len(),
                None if first == '!' => 1,
                None => rest.find(|c: char| c.is_whitespace() || "()&|!=<>\"$#".contains(c)).unwrap_or(rest.len()),
            },
        };
        let (word, tail) = rest.split_at_checked(length.max(1))?;
        tokens.push(word.to_owned());
        rest = tail.trim_start();
    }
    Some(tokens)
}

/// Returns the length of a macro call `$(...)`.
fn macro_call_len(text: &str) -> Option<usize> {
    if !text.starts_with("$(") {
        return None;
    }
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' if depth == 1 => return Some(at + 1),
            b')' => depth -= 1,
            _ => {}
        }
    }
    None
}

fn parse_or(rest: &mut &[String], depth: usize) -> Option<Expr> {
    parse_list(rest, "||", Expr::Or, |rest| parse_list(rest, "&&", Expr::And, |rest| parse_primary(rest, depth)))
}

/// Parses one part, or several separated by `between`.
fn parse_list(
    rest: &mut &[String],
    between: &str,
    all: impl Fn(Vec<Expr>) -> Expr,
    part: impl Fn(&mut &[String]) -> Option<Expr>,
) -> Option<Expr> {
    let first = part(rest)?;
    if rest.first().is_none_or(|word| word != between) {
        return Some(first);
    }
    let mut found = vec![first];
    while let Some((_, tail)) = rest.split_first().filter(|(word, _)| *word == between) {
        *rest = tail;
        found.push(part(rest)?);
    }
    Some(all(found))
}

fn parse_primary(rest: &mut &[String], depth: usize) -> Option<Expr> {
    if depth > MAX_DEPTH {
        return None;
    }
    let (word, tail) = rest.split_first()?;
    *rest = tail;
    match word.as_str() {
        "!" => return Some(Expr::Not(Box::new(parse_primary(rest, depth + 1)?))),
        "(" => {
            let inner = parse_or(rest, depth + 1)?;
            let (closing, tail) = rest.split_first()?;
            *rest = tail;
            return (closing == ")").then_some(inner);
        }
        ")" | "&&" | "||" => return None,
        _ => {}
    }
    let how = rest.first().and_then(|next| COMPARISONS.iter().find(|how| *how == next));
    if let Some(how) = how {
        let right = rest.get(1)?.clone();
        *rest = &rest[2..];
        return Some(Expr::Compare(word.clone(), how, right));
    }
    if COMPARISONS.contains(&word.as_str()) {
        return None;
    }
    Some(if word.starts_with('$') { Expr::Unevaluated(word.clone()) } else { Expr::Symbol(word.clone()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> DotConfig {
        DotConfig::parse("CONFIG_A=y\nCONFIG_M=m\n# CONFIG_N is not set\nCONFIG_V=120200\nCONFIG_T=\"gcc\"\n").unwrap()
    }

    #[test]
    fn expressions_evaluate_to_tristate_or_unknown() {
        for (text, value) in [
            ("A", Some(Tri::Yes)),
            ("A && M", Some(Tri::Module)),
            ("!M || N", Some(Tri::Module)),
            ("A && !(N || UNHEARD)", Some(Tri::Yes)),
            ("V >= 120000 && T = \"gcc\" && N=n", Some(Tri::Yes)),
            ("A != y", Some(Tri::No)),
            ("m", Some(Tri::Module)),
            ("$(cc-option,-m(64))", None),
            ("A && $(success,x) # why", None),
            ("N && $(success,x)", Some(Tri::No)),
            ("A || $(success,x)", Some(Tri::Yes)),
        ] {
            assert_eq!(Expr::parse(text).unwrap().value(&config()), value, "{text}");
        }
        for text in ["", "&& A", "A &&", "(A", "A B", "A = ", "$(a", "\"a", "= A", "A & B"] {
            assert_eq!(Expr::parse(text), None, "{text}");
        }
        assert_eq!(Expr::parse(&"(".repeat(100_000)), None);
        assert_eq!(Expr::parse(&"!".repeat(100_000)), None);
    }

    #[test]
    fn unmet_parts_are_reported() {
        let missing = |text, expected| Expr::parse(text).unwrap().missing(expected, &config());
        assert_eq!(missing("A && N && UNHEARD && !A", Tri::Yes), ["N is n", "UNHEARD is off", "A is y"]);
        assert_eq!(missing("A && M", Tri::Yes), ["M is m"]);
        assert_eq!(missing("(N || UNHEARD) && V < 3", Tri::Module), ["(N || UNHEARD) is not met", "V < 3 is not met"]);
        assert_eq!(missing("A && M=y && N = n", Tri::Yes), ["M is m, not y"]);
        assert!(missing("A && M && $(x)", Tri::Module).is_empty());
    }

    proptest! {
        #[test]
        fn displayed_expression_parses_to_the_same_value(text in "([AMNV !&|()=<>]|&&|\\|\\||\\$\\(x\\)|\"t\"|\\PC){0,30}") {
            if let Some(expr) = Expr::parse(&text) {
                let _ = (expr.value(&config()), expr.missing(Tri::Yes, &config()));
                if !text.contains(['"', '\'', '#']) {
                    let again = Expr::parse(&expr.to_string());
                    prop_assert!(again.is_some(), "{text:?} became {expr}");
                    prop_assert_eq!(again.unwrap().value(&config()), expr.value(&config()));
                }
            }
        }
    }
}
