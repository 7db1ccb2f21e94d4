//! Kernel command line parser.
//!
//! Splits like the kernel: at white space outside double quotes; quotes around a
//! value or around the whole parameter are removed. `-` and `_` in names are
//! equivalent, and the last of several parameters wins.
#![forbid(unsafe_code)]

/// One parameter: `key` or `key=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// The name, as written.
    pub key: String,
    /// The text after the first `=`, without quotes; `None` for a bare flag.
    pub value: Option<String>,
}

impl Param {
    /// Returns whether this parameter has that name; `-` and `_` are equivalent.
    #[must_use]
    pub fn is(&self, key: &str) -> bool {
        self.key.len() == key.len() && self.key.bytes().zip(key.bytes()).all(|(a, b)| fold(a) == fold(b))
    }
}

fn fold(byte: u8) -> u8 {
    if byte == b'-' { b'_' } else { byte }
}

/// A kernel command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandLine {
    params: Vec<Param>,
}

impl CommandLine {
    /// Parses a command line as found in `/proc/cmdline`. Never fails: the kernel
    /// has already accepted it.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut params = Vec::new();
        let mut word = String::new();
        let mut quoted = false;
        let mut seen = false;
        for c in text.chars() {
            match c {
                '"' => {
                    quoted = !quoted;
                    seen = true;
                }
                c if c.is_ascii_whitespace() && !quoted => {
                    push(&mut params, &mut word, seen);
                    seen = false;
                }
                c => {
                    word.push(c);
                    seen = true;
                }
            }
        }
        push(&mut params, &mut word, seen);
        Self { params }
    }

    /// Iterates over the parameters in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Param> {
        self.params.iter()
    }

    /// Returns the last parameter of that name.
    #[must_use]
    pub fn last(&self, key: &str) -> Option<&Param> {
        self.params.iter().rev().find(|param| param.is(key))
    }

    /// Returns the value of the last parameter of that name; `None` also for a bare flag.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        self.last(key).and_then(|param| param.value.as_deref())
    }
}

fn push(params: &mut Vec<Param>, word: &mut String, seen: bool) {
    let word = std::mem::take(word);
    if !seen || word.is_empty() {
        return;
    }
    params.push(match word.split_once('=') {
        Some((key, value)) => Param { key: key.to_owned(), value: Some(value.to_owned()) },
        None => Param { key: word, value: None },
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn command_line_is_split_like_the_kernel_does() {
        let line = CommandLine::parse("quiet  a=1 dm=\"x y\" \"b=2 3\" a=4 e= \n");
        let all: Vec<_> = line.iter().map(|p| (p.key.as_str(), p.value.as_deref())).collect();
        assert_eq!(
            all,
            [
                ("quiet", None),
                ("a", Some("1")),
                ("dm", Some("x y")),
                ("b", Some("2 3")),
                ("a", Some("4")),
                ("e", Some("")),
            ]
        );
        assert_eq!(line.value("a"), Some("4"));
        assert_eq!(line.value("quiet"), None);
        assert!(line.last("quiet").is_some());
    }

    #[test]
    fn dash_and_underscore_are_equivalent() {
        let line = CommandLine::parse("firstlight.on_failure=hold");
        assert_eq!(line.value("firstlight.on-failure"), Some("hold"));
        assert_eq!(line.value("firstlight.on-failur"), None);
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_keys_have_no_equals_sign(text in "\\PC{0,200}") {
            for param in CommandLine::parse(&text).iter() {
                prop_assert!(!param.key.contains('='));
            }
        }
    }
}
