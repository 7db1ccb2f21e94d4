//! Kernel configuration fragments: requested values, their reasons, and their class.
//!
//! A fragment is valid input of the kernel's own tools: lines `CONFIG_NAME=value`
//! and comments. The comment above one or more assignments is their
//! reason; an empty line ends it. It may begin with a tag in brackets:
//!
//! ```text
//! # [hint 6.10.., module erofs, or SQUASHFS] Smaller images. Without it: larger ones.
//! CONFIG_EROFS_FS_ZIP_ZSTD=y
//! #: CONFIG_CRYPTO_SHA256=y
//! ```
//!
//! The last line is check-only: the symbol has no prompt, so a build cannot
//! request it.

use std::path::Path;

use super::config::{Error, assignment};
use super::version::Kernels;

/// How a check of a built kernel treats an assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Not checked: requested only when we build a kernel.
    Build,
    /// Recommended.
    Hint,
    /// The symbol must be off.
    Forbid,
    /// The symbol must have this value.
    Require,
}

/// A comment's tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag {
    /// The class.
    pub class: Class,
    /// The kernel versions that have the symbol.
    pub kernels: Kernels,
    /// `m` is accepted, too, if this module is in the image.
    pub module: Option<String>,
    /// Alternative symbols.
    pub or: Vec<String>,
    /// A build without the value is not an error.
    pub optional: bool,
}

impl Default for Tag {
    fn default() -> Self {
        Self { class: Class::Build, kernels: Kernels::default(), module: None, or: Vec::new(), optional: false }
    }
}

/// One assignment with its reason and tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The symbol, without `CONFIG_`.
    pub symbol: String,
    /// `y`, `m`, `n`, a number or a quoted string.
    pub value: String,
    /// The line, from 1.
    pub line: usize,
    /// The reason; empty if there is none.
    pub reason: String,
    /// The consequence or workaround without it, if stated.
    pub without: Option<String>,
    /// The tag of the reason.
    pub tag: Tag,
    /// Checked only, not requested in a build.
    pub check_only: bool,
}

/// Separates the reason from the consequence or workaround.
const WITHOUT: [&str; 2] = ["Without it: ", "Without this: "];

/// Prefix of a check-only line.
const CHECK_ONLY_PREFIX: &str = "#:";

/// The comment being read.
#[derive(Debug, Default)]
struct CommentBlock {
    text: String,
    tag: Tag,
    /// An assignment has followed: the next comment line begins a new comment.
    closed: bool,
}

/// Reads a fragment; `file` is its name in messages.
///
/// # Errors
/// A line is neither a comment nor an assignment, or a tag is invalid.
pub fn read(file: &Path, text: &str) -> Result<Vec<Requirement>, Error> {
    let mut requirements = Vec::new();
    let mut block = CommentBlock::default();
    for (at, content) in text.lines().enumerate() {
        let line = content.trim();
        let wrong = || Error::Line { file: file.to_owned(), line: at + 1, text: content.to_owned() };
        let (check_only, assigned) = match line.strip_prefix(CHECK_ONLY_PREFIX) {
            Some(rest) => (true, Some(assignment(rest).flatten().ok_or_else(wrong)?)),
            None => (false, assignment(line).ok_or_else(wrong)?),
        };
        if let Some((symbol, value)) = assigned {
            block.closed = true;
            let (reason, without) = split_reason(&block.text);
            requirements.push(Requirement {
                symbol: symbol.to_owned(),
                value: value.to_owned(),
                line: at + 1,
                reason,
                without,
                tag: block.tag.clone(),
                check_only,
            });
        } else if line.is_empty() || line.starts_with("# ---") {
            block = CommentBlock::default();
        } else {
            if block.closed {
                block = CommentBlock::default();
            }
            let comment = line.trim_start_matches('#').trim();
            block.add(comment).map_err(|what| Error::Tag {
                file: file.to_owned(),
                line: at + 1,
                tag: comment.to_owned(),
                what,
            })?;
        }
    }
    Ok(requirements)
}

impl CommentBlock {
    fn add(&mut self, comment: &str) -> Result<(), String> {
        let tagged = comment.strip_prefix('[').and_then(|rest| rest.split_once(']')).filter(|_| self.text.is_empty());
        let rest = match tagged {
            Some((tag, rest)) => {
                self.tag = Tag::parse(tag)?;
                rest.trim()
            }
            None => comment,
        };
        if !self.text.is_empty() && !rest.is_empty() {
            self.text.push(' ');
        }
        self.text.push_str(rest);
        Ok(())
    }
}

fn split_reason(text: &str) -> (String, Option<String>) {
    let found = WITHOUT.iter().find_map(|words| text.split_once(words));
    let Some((reason, without)) = found else { return (text.to_owned(), None) };
    (reason.trim_end().to_owned(), Some(without.to_owned()))
}

impl Tag {
    fn parse(text: &str) -> Result<Self, String> {
        let mut tag = Self::default();
        for word in text.split(',').flat_map(|part| split_class(part.trim())) {
            match word.split_once(' ') {
                None if word.contains("..") => {
                    tag.kernels =
                        Kernels::parse(word).ok_or_else(|| format!("{word} is not a version range such as 6.10.."))?;
                }
                None => match word {
                    "build" => tag.class = Class::Build,
                    "hint" => tag.class = Class::Hint,
                    "forbid" => tag.class = Class::Forbid,
                    "require" => tag.class = Class::Require,
                    "optional" => tag.optional = true,
                    _ => return Err(format!("{word:?} is none of build, hint, forbid, require, optional")),
                },
                Some(("module", name)) => tag.module = Some(name.trim().to_owned()),
                Some(("or", symbol)) => tag.or.push(symbol.trim().to_owned()),
                Some(_) => return Err(format!("{word:?} is neither \"module NAME\" nor \"or SYMBOL\"")),
            }
        }
        Ok(tag)
    }
}

/// Splits a class from its version range: `hint 6.10..` becomes two items, `module erofs` stays one.
fn split_class(part: &str) -> impl Iterator<Item = &str> {
    let (first, rest) = match part.split_once(' ') {
        Some((class, range)) if range.contains("..") => (class, Some(range.trim())),
        _ => (part, None),
    };
    std::iter::once(first).chain(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Vec<Requirement> {
        read(Path::new("a.config"), text).unwrap()
    }

    #[test]
    fn comment_is_the_reason_of_following_symbols() {
        let all =
            of("# The file.\n\n# [require] One,\n# and more. Without it: two.\nCONFIG_A=y\nCONFIG_B=y\n# Three.\n\
             CONFIG_C=y\n\nCONFIG_D=y\n# --- title\nCONFIG_E=y\n");
        let reasons: Vec<_> = all.iter().map(|one| (one.symbol.as_str(), one.reason.as_str(), one.tag.class)).collect();
        assert_eq!(
            reasons,
            [
                ("A", "One, and more.", Class::Require),
                ("B", "One, and more.", Class::Require),
                ("C", "Three.", Class::Build),
                ("D", "", Class::Build),
                ("E", "", Class::Build),
            ]
        );
        assert_eq!((all[1].without.as_deref(), all[1].line), (Some("two."), 6));
    }

    #[test]
    fn tag_sets_class_range_module_and_alternatives() {
        let all = of("# [hint 6.10.., module dm-mod, or B, or C, optional] x\nCONFIG_A=y\n#: CONFIG_D=y\n\
             # [forbid] y\n#: # CONFIG_E is not set\n");
        let tag = &all[0].tag;
        assert_eq!((tag.class, tag.kernels.to_string().as_str(), tag.optional), (Class::Hint, "since 6.10", true));
        assert_eq!((tag.module.as_deref(), tag.or.join(" ").as_str()), (Some("dm-mod"), "B C"));
        assert!(!all[0].check_only && all[1].check_only);
        assert_eq!((all[2].value.as_str(), all[2].tag.class), ("n", Class::Forbid));
    }

    #[test]
    fn unparsable_line_is_reported_by_number() {
        for (text, words) in [
            ("\n# [requires] x\n", "a.config:2: "),
            ("# [hint 6.x..] x\n", "6.x.. is not a version range"),
            ("# [module] x\n", "\"module\" is none of"),
            ("#: what\n", "a.config:1: "),
            ("#:\n", "a.config:1: "),
        ] {
            let error = read(Path::new("a.config"), text).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_accepted_or_rejected(text in "([#: \\[\\],.\\n]|CONFIG_A|=y|hint|or|6\\.1\\.\\.| is not set|\\PC){0,60}") {
            if let Ok(all) = read(Path::new("a.config"), &text) {
                prop_assert!(all.len() <= text.lines().count());
                prop_assert!(all.iter().all(|one| !one.symbol.is_empty() && one.line <= text.lines().count()));
            }
        }
    }
}
