//! The kernel configuration that several fragments request, and the comparison with the resulting `.config`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::fragment;

/// A value that a fragment requests for a symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedValue {
    /// `y`, `m`, `n`, a number or a quoted string, in `.config` syntax.
    pub value: String,
    /// The fragment.
    pub file: PathBuf,
    /// The line in it, from 1.
    pub line: usize,
    /// A different resulting value is not an error.
    pub optional: bool,
}

/// The values that several fragments request, by symbol without `CONFIG_`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestedConfig(BTreeMap<String, RequestedValue>);

/// Why fragments are invalid or were not applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A line is neither a comment nor an assignment.
    #[error("{}:{line}: {text:?} is neither CONFIG_NAME=value, nor \"# CONFIG_NAME is not set\", nor a comment", file.display())]
    Line {
        /// The fragment.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Its text.
        text: String,
    },
    /// A comment has an invalid tag.
    #[error("{}:{line}: [{tag}]: {what}", file.display())]
    Tag {
        /// The fragment.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The tag.
        tag: String,
        /// What is wrong with it.
        what: String,
    },
    /// Two fragments request different values.
    #[error(
        "CONFIG_{symbol} is {} in {}:{} and {} in {}:{}",
        first.value, first.file.display(), first.line, second.value, second.file.display(), second.line
    )]
    Contradiction {
        /// The symbol.
        symbol: String,
        /// The first request.
        first: Box<RequestedValue>,
        /// The conflicting request.
        second: Box<RequestedValue>,
    },
    /// Requested values are missing from the resulting configuration.
    #[error("{} of the requested symbols have another value in the resulting .config: {}", .0.len(), joined(.0))]
    Unmet(Vec<UnmetValue>),
}

/// A symbol whose resulting value differs from the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnmetValue {
    /// The symbol, without `CONFIG_`.
    pub symbol: String,
    /// The requested value, and where.
    pub requested: RequestedValue,
    /// The resulting value.
    pub actual: String,
    /// Explanation from the kernel's source, if available.
    pub explanation: Option<String>,
}

impl fmt::Display for UnmetValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.requested.file.file_name().unwrap_or_default().to_string_lossy();
        write!(
            f,
            "CONFIG_{}={} ({name}:{}) is {}",
            self.symbol, self.requested.value, self.requested.line, self.actual
        )?;
        self.explanation.iter().try_for_each(|explanation| write!(f, ": {explanation}"))
    }
}

fn joined(unmet: &[UnmetValue]) -> String {
    unmet.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Parses one line of a configuration: the symbol and its value (`n` if not set), `Some(None)` for a comment
/// or an empty line, `None` if the line is invalid.
pub(super) fn assignment(line: &str) -> Option<Option<(&str, &str)>> {
    let line = line.trim();
    let unset = line.strip_prefix("# CONFIG_").and_then(|rest| rest.strip_suffix(" is not set"));
    if let Some(symbol) = unset.filter(|symbol| is_symbol(symbol)) {
        return Some(Some((symbol, "n")));
    }
    if line.is_empty() || line.starts_with('#') {
        return Some(None);
    }
    let (symbol, value) = line.strip_prefix("CONFIG_")?.split_once('=')?;
    (is_symbol(symbol) && is_value(value)).then_some(Some((symbol, value)))
}

fn is_symbol(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_value(text: &str) -> bool {
    let quoted = text.len() >= 2 && text.starts_with('"') && text.ends_with('"');
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    quoted || (!text.is_empty() && text.bytes().all(plain))
}

impl RequestedConfig {
    /// Adds a fragment; `file` is its name in messages.
    ///
    /// # Errors
    /// A line is invalid, or another fragment requests a different value.
    pub fn add(&mut self, file: &Path, text: &str) -> Result<(), Error> {
        for entry in fragment::read(file, text)?.into_iter().filter(|entry| !entry.check_only) {
            let (line, optional) = (entry.line, entry.tag.optional);
            let requested = RequestedValue { value: entry.value, file: file.to_owned(), line, optional };
            match self.0.get_mut(&entry.symbol) {
                Some(first) if first.value != requested.value => {
                    let (first, second) = (Box::new(first.clone()), Box::new(requested));
                    return Err(Error::Contradiction { symbol: entry.symbol, first, second });
                }
                // Optional only if every fragment says so.
                Some(first) => first.optional &= requested.optional,
                None => {
                    self.0.insert(entry.symbol, requested);
                }
            }
        }
        Ok(())
    }

    /// Returns the number of requested symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no symbol is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Formats the values as a file for `KCONFIG_ALLCONFIG`: each symbol once, sorted.
    #[must_use]
    pub fn text(&self) -> String {
        let line = |(symbol, requested): (&String, &RequestedValue)| match requested.value.as_str() {
            "n" => format!("# CONFIG_{symbol} is not set\n"),
            value => format!("CONFIG_{symbol}={value}\n"),
        };
        self.0.iter().map(line).collect()
    }

    /// Returns the symbols whose value in `config`, the resulting `.config`, differs from the requested one.
    #[must_use]
    pub fn unmet_values(&self, config: &str) -> Vec<UnmetValue> {
        let actual: BTreeMap<&str, &str> = config.lines().filter_map(assignment).flatten().collect();
        let compared =
            self.0.iter().map(|(symbol, requested)| (symbol, requested, actual.get(symbol.as_str()).copied()));
        compared
            .map(|(symbol, requested, actual)| (symbol, requested, actual.unwrap_or("n")))
            .filter(|(_, requested, actual)| *actual != requested.value)
            .map(|(symbol, requested, actual)| UnmetValue {
                symbol: symbol.clone(),
                requested: requested.clone(),
                actual: actual.to_owned(),
                explanation: None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requested(parts: &[(&str, &str)]) -> Result<RequestedConfig, Error> {
        let mut all = RequestedConfig::default();
        for (file, text) in parts {
            all.add(Path::new(file), text)?;
        }
        Ok(all)
    }

    #[test]
    fn fragments_are_merged_with_each_symbol_once() {
        let all = requested(&[
            ("a.config", "# why\nCONFIG_NET=y\nCONFIG_LSM=\"landlock\"\n\n"),
            ("b.config", "CONFIG_NET=y\n# CONFIG_MODULES is not set\nCONFIG_PANIC_TIMEOUT=-1\n"),
        ])
        .unwrap();
        assert_eq!(
            all.text(),
            "CONFIG_LSM=\"landlock\"\n# CONFIG_MODULES is not set\nCONFIG_NET=y\nCONFIG_PANIC_TIMEOUT=-1\n"
        );
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn conflicting_values_report_both_places() {
        let error = requested(&[("a.config", "CONFIG_NET=y"), ("b.config", "\nCONFIG_NET=m")]).unwrap_err();
        assert_eq!(error.to_string(), "CONFIG_NET is y in a.config:1 and m in b.config:2");
    }

    #[test]
    fn invalid_lines_are_reported_by_number() {
        for line in ["NET=y", "CONFIG_NET", "CONFIG_NET=", "CONFIG_N T=y", "CONFIG_NET=y # x", "CONFIG_A=$(x)"] {
            let error = requested(&[("a.config", line)]).unwrap_err().to_string();
            assert!(error.starts_with("a.config:1: "), "{error}");
        }
    }

    #[test]
    fn unmet_values_are_listed_with_file_and_line() {
        let all = requested(&[("dir/a.config", "CONFIG_NET=y\nCONFIG_VFIO=y\n# CONFIG_KVM is not set\nCONFIG_HZ=250")]);
        let all = all.unwrap();
        assert_eq!(all.unmet_values("CONFIG_NET=y\nCONFIG_VFIO=y\nCONFIG_HZ=250\n"), []);
        let mut unmet = all.unmet_values("CONFIG_NET=y\nCONFIG_VFIO=m\nCONFIG_KVM=y\n");
        unmet[1].explanation = Some("IOMMU is off".to_owned());
        let error = Error::Unmet(unmet).to_string();
        for words in [
            "3 of the requested symbols",
            "CONFIG_VFIO=y (a.config:2) is m",
            "CONFIG_KVM=n (a.config:3) is y",
            "HZ=250 (a",
        ] {
            assert!(error.contains(words), "{error}");
        }
        assert!(error.contains(": IOMMU is off; "), "{error}");
    }

    #[test]
    fn symbol_is_optional_only_if_all_fragments_say_so() {
        let text = "# [optional] x\nCONFIG_A=y\nCONFIG_B=y\n#: CONFIG_C=y\n";
        let all = requested(&[("a.config", text), ("b.config", "CONFIG_B=y\n")]).unwrap();
        let optional: Vec<_> =
            all.unmet_values("").into_iter().map(|one| (one.symbol, one.requested.optional)).collect();
        assert_eq!(optional, [("A".to_owned(), true), ("B".to_owned(), false)]);
    }

    proptest! {
        #[test]
        fn any_text_is_accepted_or_rejected(text in "\\PC{0,40}(\n\\PC{0,40}){0,3}") {
            if let Ok(all) = requested(&[("a.config", &text)]) {
                // Printed values parse to the same values.
                let again = requested(&[("a.config", &all.text())]).unwrap();
                prop_assert_eq!(again.text(), all.text());
            }
        }
    }
}
