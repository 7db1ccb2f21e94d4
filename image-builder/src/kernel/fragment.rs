//! Fragments of kernel configuration: what is asked for, why, and how much it
//! matters.
//!
//! A fragment is what the kernel's own tools take: lines `CONFIG_NAME=value`
//! and comments. The comment above an assignment, or above several, is their
//! reason; an empty line ends it. It may begin with a tag in brackets:
//!
//! ```text
//! # [hint 6.10.., module erofs, or SQUASHFS] Smaller images. Without it: larger ones.
//! CONFIG_EROFS_FS_ZIP_ZSTD=y
//! #: CONFIG_CRYPTO_SHA256=y
//! ```
//!
//! The last line is only for judging kernels: the symbol follows from others
//! and cannot be asked for.

use std::path::Path;

use super::config::{Error, assignment};
use super::version::Kernels;

/// How much an assignment matters to a kernel that is already built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Not at all: it is only asked for in kernels of our own.
    Build,
    /// Better so.
    Hint,
    /// It must not be set.
    Forbid,
    /// It must be so.
    Require,
}

/// What a comment's tag says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag {
    /// How much it matters.
    pub class: Class,
    /// The kernels that have the symbol.
    pub kernels: Kernels,
    /// As a module it does, too, if this module is in the image.
    pub module: Option<String>,
    /// Symbols that do instead.
    pub or: Vec<String>,
    /// A build goes on without it.
    pub optional: bool,
}

impl Default for Tag {
    fn default() -> Self {
        Self { class: Class::Build, kernels: Kernels::default(), module: None, or: Vec::new(), optional: false }
    }
}

/// One assignment with what is said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The symbol, without `CONFIG_`.
    pub symbol: String,
    /// `y`, `m`, `n`, a number or a quoted text.
    pub value: String,
    /// The line, from 1.
    pub line: usize,
    /// Why it is asked for; empty if nobody says.
    pub reason: String,
    /// What to do without it, if anything can be done.
    pub without: Option<String>,
    /// The tag of the reason.
    pub tag: Tag,
    /// Only judged, never asked of a build.
    pub only_judged: bool,
}

/// Where a reason goes over to what can be done without it.
const WITHOUT: [&str; 2] = ["Without it: ", "Without this: "];

/// Begins a line that is only for judging.
const JUDGED: &str = "#:";

/// The comment that is being read.
#[derive(Debug, Default)]
struct Block {
    text: String,
    tag: Tag,
    /// An assignment has followed: the next comment is another one.
    closed: bool,
}

/// Reads a fragment; `file` is its name in messages.
///
/// # Errors
/// A line that is neither comment nor assignment, or a tag that nobody understands.
pub fn read(file: &Path, text: &str) -> Result<Vec<Asked>, Error> {
    let mut asked = Vec::new();
    let mut block = Block::default();
    for (at, content) in text.lines().enumerate() {
        let line = content.trim();
        let wrong = || Error::Line { file: file.to_owned(), line: at + 1, text: content.to_owned() };
        let (judged, assigned) = match line.strip_prefix(JUDGED) {
            Some(rest) => (true, Some(assignment(rest).flatten().ok_or_else(wrong)?)),
            None => (false, assignment(line).ok_or_else(wrong)?),
        };
        if let Some((symbol, value)) = assigned {
            block.closed = true;
            let (reason, without) = parted(&block.text);
            asked.push(Asked {
                symbol: symbol.to_owned(),
                value: value.to_owned(),
                line: at + 1,
                reason,
                without,
                tag: block.tag.clone(),
                only_judged: judged,
            });
        } else if line.is_empty() || line.starts_with("# ---") {
            block = Block::default();
        } else {
            if block.closed {
                block = Block::default();
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
    Ok(asked)
}

impl Block {
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

fn parted(text: &str) -> (String, Option<String>) {
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
                    tag.kernels = Kernels::parse(word).ok_or_else(|| format!("{word} is no range such as 6.10.."))?;
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

/// `hint 6.10..` is two words, `module erofs` is one.
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

    fn of(text: &str) -> Vec<Asked> {
        read(Path::new("a.config"), text).unwrap()
    }

    #[test]
    fn comment_is_the_reason_of_following_symbols() {
        let all =
            of("# The file.\n\n# [require] One,\n# and more. Without it: two.\nCONFIG_A=y\nCONFIG_B=y\n# Three.\n\
             CONFIG_C=y\n\nCONFIG_D=y\n# --- title\nCONFIG_E=y\n");
        let told: Vec<_> = all.iter().map(|one| (one.symbol.as_str(), one.reason.as_str(), one.tag.class)).collect();
        assert_eq!(
            told,
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
    fn a_tag_says_how_much_it_matters() {
        let all = of("# [hint 6.10.., module dm-mod, or B, or C, optional] x\nCONFIG_A=y\n#: CONFIG_D=y\n\
             # [forbid] y\n#: # CONFIG_E is not set\n");
        let tag = &all[0].tag;
        assert_eq!((tag.class, tag.kernels.to_string().as_str(), tag.optional), (Class::Hint, "since 6.10", true));
        assert_eq!((tag.module.as_deref(), tag.or.join(" ").as_str()), (Some("dm-mod"), "B C"));
        assert!(!all[0].only_judged && all[1].only_judged);
        assert_eq!((all[2].value.as_str(), all[2].tag.class), ("n", Class::Forbid));
    }

    #[test]
    fn unparsable_line_is_reported_by_number() {
        for (text, words) in [
            ("\n# [requires] x\n", "a.config:2: "),
            ("# [hint 6.x..] x\n", "6.x.. is no range"),
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
        fn any_text_is_read_or_refused(text in "([#: \\[\\],.\\n]|CONFIG_A|=y|hint|or|6\\.1\\.\\.| is not set|\\PC){0,60}") {
            if let Ok(all) = read(Path::new("a.config"), &text) {
                prop_assert!(all.len() <= text.lines().count());
                prop_assert!(all.iter().all(|one| !one.symbol.is_empty() && one.line <= text.lines().count()));
            }
        }
    }
}
