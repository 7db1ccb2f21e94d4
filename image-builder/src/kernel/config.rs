//! What several fragments ask for together, and what came of it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::fragment;

/// What a fragment asks for one symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// `y`, `m`, `n`, a number or a quoted text, as `.config` has it.
    pub value: String,
    /// The fragment.
    pub file: PathBuf,
    /// The line there, from 1.
    pub line: usize,
    /// A kernel may do without it.
    pub optional: bool,
}

/// What several fragments ask together, by symbol without `CONFIG_`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wishes(BTreeMap<String, Wish>);

/// What is wrong with fragments, or with the answer to them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A line is neither a comment nor an assignment.
    #[error("{}:{line}: {text:?} is neither CONFIG_NAME=value, nor \"# CONFIG_NAME is not set\", nor a comment", file.display())]
    Line {
        /// The fragment.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What it says.
        text: String,
    },
    /// A comment's tag says something that nobody understands.
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
    /// Two fragments ask for different values.
    #[error(
        "CONFIG_{symbol} is {} in {}:{} and {} in {}:{}",
        first.value, first.file.display(), first.line, second.value, second.file.display(), second.line
    )]
    Contradiction {
        /// The symbol.
        symbol: String,
        /// Who asked first.
        first: Box<Wish>,
        /// Who asked for something else.
        second: Box<Wish>,
    },
    /// The kernel's configuration does not have what was asked for.
    #[error("{} of the wanted symbols did not come out as wanted: {}", .0.len(), joined(.0))]
    Refused(Vec<Refused>),
}

/// A symbol that did not come out as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The symbol, without `CONFIG_`.
    pub symbol: String,
    /// What was asked, and where.
    pub wish: Wish,
    /// What came out.
    pub got: String,
    /// Why, if the kernel's source told.
    pub why: Option<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.wish.file.file_name().unwrap_or_default().to_string_lossy();
        write!(f, "CONFIG_{}={} ({name}:{}) is {}", self.symbol, self.wish.value, self.wish.line, self.got)?;
        self.why.iter().try_for_each(|why| write!(f, ": {why}"))
    }
}

fn joined(refused: &[Refused]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// One line of a configuration: the symbol and its value, `n` for one that is
/// not set, nothing for a comment or an empty line.
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

impl Wishes {
    /// Adds a fragment; `file` is its name in messages.
    ///
    /// # Errors
    /// A line that makes no sense, or a symbol that was asked for with another value.
    pub fn add(&mut self, file: &Path, text: &str) -> Result<(), Error> {
        for asked in fragment::read(file, text)?.into_iter().filter(|asked| !asked.only_judged) {
            let (line, optional) = (asked.line, asked.tag.optional);
            let wish = Wish { value: asked.value, file: file.to_owned(), line, optional };
            match self.0.get_mut(&asked.symbol) {
                Some(first) if first.value != wish.value => {
                    let (first, second) = (Box::new(first.clone()), Box::new(wish));
                    return Err(Error::Contradiction { symbol: asked.symbol, first, second });
                }
                // Who cannot do without it decides.
                Some(first) => first.optional &= wish.optional,
                None => {
                    self.0.insert(asked.symbol, wish);
                }
            }
        }
        Ok(())
    }

    /// How many symbols are asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// As a file for `KCONFIG_ALLCONFIG`: each symbol once, sorted.
    #[must_use]
    pub fn text(&self) -> String {
        let line = |(symbol, wish): (&String, &Wish)| match wish.value.as_str() {
            "n" => format!("# CONFIG_{symbol} is not set\n"),
            value => format!("CONFIG_{symbol}={value}\n"),
        };
        self.0.iter().map(line).collect()
    }

    /// The symbols that `config`, the `.config` that came out, does not have as they were asked for.
    #[must_use]
    pub fn refused(&self, config: &str) -> Vec<Refused> {
        let got: BTreeMap<&str, &str> = config.lines().filter_map(assignment).flatten().collect();
        let compared = self.0.iter().map(|(symbol, wish)| (symbol, wish, got.get(symbol.as_str()).copied()));
        compared
            .map(|(symbol, wish, got)| (symbol, wish, got.unwrap_or("n")))
            .filter(|(_, wish, got)| *got != wish.value)
            .map(|(symbol, wish, got)| Refused {
                symbol: symbol.clone(),
                wish: wish.clone(),
                got: got.to_owned(),
                why: None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wishes(parts: &[(&str, &str)]) -> Result<Wishes, Error> {
        let mut all = Wishes::default();
        for (file, text) in parts {
            all.add(Path::new(file), text)?;
        }
        Ok(all)
    }

    #[test]
    fn fragments_are_merged_once_each() {
        let all = wishes(&[
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
    fn a_contradiction_names_both_places() {
        let error = wishes(&[("a.config", "CONFIG_NET=y"), ("b.config", "\nCONFIG_NET=m")]).unwrap_err();
        assert_eq!(error.to_string(), "CONFIG_NET is y in a.config:1 and m in b.config:2");
    }

    #[test]
    fn lines_that_make_no_sense_are_named() {
        for line in ["NET=y", "CONFIG_NET", "CONFIG_NET=", "CONFIG_N T=y", "CONFIG_NET=y # x", "CONFIG_A=$(x)"] {
            let error = wishes(&[("a.config", line)]).unwrap_err().to_string();
            assert!(error.starts_with("a.config:1: "), "{error}");
        }
    }

    #[test]
    fn what_the_kernel_refused_is_listed_with_its_place() {
        let all = wishes(&[("dir/a.config", "CONFIG_NET=y\nCONFIG_VFIO=y\n# CONFIG_KVM is not set\nCONFIG_HZ=250")]);
        let all = all.unwrap();
        assert_eq!(all.refused("CONFIG_NET=y\nCONFIG_VFIO=y\nCONFIG_HZ=250\n"), []);
        let mut refused = all.refused("CONFIG_NET=y\nCONFIG_VFIO=m\nCONFIG_KVM=y\n");
        refused[1].why = Some("IOMMU is off".to_owned());
        let error = Error::Refused(refused).to_string();
        for words in [
            "3 of the wanted symbols",
            "CONFIG_VFIO=y (a.config:2) is m",
            "CONFIG_KVM=n (a.config:3) is y",
            "HZ=250 (a",
        ] {
            assert!(error.contains(words), "{error}");
        }
        assert!(error.contains(": IOMMU is off; "), "{error}");
    }

    #[test]
    fn what_one_fragment_cannot_do_without_is_not_optional() {
        let text = "# [optional] x\nCONFIG_A=y\nCONFIG_B=y\n#: CONFIG_C=y\n";
        let all = wishes(&[("a.config", text), ("b.config", "CONFIG_B=y\n")]).unwrap();
        let optional: Vec<_> = all.refused("").into_iter().map(|one| (one.symbol, one.wish.optional)).collect();
        assert_eq!(optional, [("A".to_owned(), true), ("B".to_owned(), false)]);
    }

    proptest! {
        #[test]
        fn any_text_is_taken_or_refused(text in "\\PC{0,40}(\n\\PC{0,40}){0,3}") {
            if let Ok(all) = wishes(&[("a.config", &text)]) {
                // What was taken can be read again and asks for the same.
                let again = wishes(&[("a.config", &all.text())]).unwrap();
                prop_assert_eq!(again.text(), all.text());
            }
        }
    }
}
