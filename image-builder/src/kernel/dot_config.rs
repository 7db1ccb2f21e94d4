//! Configurations of kernels that are already built: `.config`,
//! `/boot/config-RELEASE`, `/proc/config.gz`, or inside the kernel itself.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;

use super::config::assignment;
use super::payload;
use super::version::Version;

/// A configuration longer than this is none: the largest have 300 kB.
pub const LONGEST: u64 = 16 << 20;

/// Stand before and after the packed configuration in a kernel with `CONFIG_IKCONFIG`.
const INSIDE: (&[u8], &[u8]) = (b"IKCFG_ST", b"IKCFG_ED");

/// Ends the last menu of every configuration since Linux 5.3.
const LAST_MENU: &str = "# end of Kernel hacking";
const MENUS_END_SINCE: &str = "5.3";

/// Notes on repeated symbols, at most.
const NOTES: usize = 8;

/// Why a configuration cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Neither text nor something that has the text in it.
    #[error("line {line}: {text:?} is neither CONFIG_NAME=value nor a comment: this is no kernel configuration")]
    Line {
        /// From 1.
        line: usize,
        /// What it says, shortened.
        text: String,
    },
    /// The end is missing.
    #[error("it is cut after line {lines}: {missing}; copy it again")]
    Cut {
        /// How many there are.
        lines: usize,
        /// How that shows.
        missing: String,
    },
    /// Nothing is set in it.
    #[error("no symbol is set in it")]
    Empty,
    /// Longer than a configuration is.
    #[error("it is longer than {} MB, which no kernel configuration is", LONGEST >> 20)]
    Long,
    /// The packed form is damaged.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// A kernel that does not know its own configuration.
    #[error("this kernel was built without CONFIG_IKCONFIG: judge /boot/config-RELEASE or the package")]
    NotInside,
    /// A configuration of another architecture.
    #[error("it is for {0}; the rules are for x86")]
    Architecture(String),
}

/// A kernel's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DotConfig {
    /// The kernel that it is of, if the head says so: `6.12.95`.
    pub kernel: Option<String>,
    /// What is odd about it.
    pub notes: Vec<String>,
    values: BTreeMap<String, String>,
}

impl DotConfig {
    /// Reads whatever a configuration comes in: text, gzip, a kernel (`vmlinux` or `bzImage`), `configs.ko`.
    ///
    /// # Errors
    /// It is none, it is damaged or cut, or the kernel does not have it.
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        let text: Cow<'_, [u8]> = if bytes.starts_with(&[0x1f, 0x8b]) {
            gunzip(bytes)?.into()
        } else if is_elf(bytes) {
            inside(bytes)?.into()
        } else if is_kernel(bytes) {
            inside(&payload::extract(bytes).map_err(Error::Damaged)?)?.into()
        } else {
            bytes.into()
        };
        if text.len() as u64 > LONGEST {
            return Err(Error::Long);
        }
        Self::parse(&String::from_utf8_lossy(&text))
    }

    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// As [`DotConfig::read`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut all = Self::default();
        let (mut lines, mut last_menu, mut generated) = (0, false, false);
        let mut first_at: BTreeMap<&str, usize> = BTreeMap::new();
        let mut repeated = 0;
        for (at, line) in text.lines().enumerate() {
            lines = at + 1;
            last_menu |= line.trim_end() == LAST_MENU;
            generated |= line.starts_with("# Automatically generated file");
            let whole = ends_line(text, line);
            let Some(read) = assignment(line) else {
                // A last line without its end is most likely half a line.
                return Err(match whole {
                    true => Error::Line { line: lines, text: line.chars().take(60).collect() },
                    false => Error::Cut { lines, missing: "its last line is not whole".to_owned() },
                });
            };
            let Some((symbol, value)) = read else {
                all.head(line)?;
                continue;
            };
            if let Some(first) = first_at.insert(symbol, lines) {
                repeated += 1;
                let before = all.values.get(symbol).map_or("", String::as_str);
                if repeated <= NOTES {
                    all.notes.push(format!(
                        "CONFIG_{symbol} is {before} in line {first} and {value} in line {lines}; the later one counts"
                    ));
                }
            }
            all.values.insert(symbol.to_owned(), value.to_owned());
        }
        if repeated > NOTES {
            all.notes.push(format!("{} more symbols are there twice", repeated - NOTES));
        }
        if text.contains("\r\n") {
            all.notes.push("its lines end with CR LF: the kernel's own tools take no such file".to_owned());
        }
        if all.values.is_empty() {
            return Err(Error::Empty);
        }
        let marked =
            generated && all.version().is_some_and(|version| Some(version) >= Version::leading(MENUS_END_SINCE));
        if marked && !last_menu {
            return Err(Error::Cut { lines, missing: format!("{LAST_MENU:?} is missing") });
        }
        Ok(all)
    }

    /// Takes what the head says: `# Linux/x86 6.12.95 Kernel Configuration`.
    fn head(&mut self, line: &str) -> Result<(), Error> {
        let said = line.trim().strip_prefix("# Linux/").and_then(|rest| rest.strip_suffix(" Kernel Configuration"));
        let Some((architecture, release)) = said.and_then(|said| said.split_once(' ')) else { return Ok(()) };
        if !architecture.starts_with("x86") && architecture != "i386" {
            return Err(Error::Architecture(architecture.to_owned()));
        }
        self.kernel = Some(release.to_owned());
        Ok(())
    }

    /// The version of the kernel, as far as rules depend on it.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.kernel.as_deref().and_then(Version::leading)
    }

    /// What a symbol is set to: `y`, `m`, `n`, a number, a quoted text. Nothing if the configuration does not
    /// mention it.
    #[must_use]
    pub fn value(&self, symbol: &str) -> Option<&str> {
        self.values.get(symbol).map(String::as_str)
    }

    /// How many symbols are mentioned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Whether a file that begins like this is a kernel, and so much longer than a configuration.
#[must_use]
pub fn is_kernel(head: &[u8]) -> bool {
    is_elf(head) || head.get(0x202..0x206) == Some(b"HdrS")
}

/// Whether `line`, a part of `text`, has its end there.
fn ends_line(text: &str, line: &str) -> bool {
    let end = line.as_ptr() as usize - text.as_ptr() as usize + line.len();
    text.as_bytes().get(end).is_some()
}

fn gunzip(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    let reader = flate2::read::GzDecoder::new(bytes);
    reader.take(LONGEST + 1).read_to_end(&mut text).map_err(|error| Error::Damaged(error.to_string()))?;
    if text.len() as u64 > LONGEST {
        return Err(Error::Long);
    }
    Ok(text)
}

/// The configuration that a kernel carries.
fn inside(kernel: &[u8]) -> Result<Vec<u8>, Error> {
    let find = |what: &[u8], from: usize| {
        kernel.get(from..)?.windows(what.len()).position(|window| window == what).map(|at| from + at)
    };
    // The kernel's code has the mark alone; in front of the configuration it stands before gzip's.
    let begin = [INSIDE.0, &[0x1f, 0x8b]].concat();
    let start = find(&begin, 0).ok_or(Error::NotInside)? + INSIDE.0.len();
    let end = find(INSIDE.1, start).ok_or_else(|| Error::Damaged("its end is missing".to_owned()))?;
    gunzip(&kernel[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    const WHOLE: &str = "#\n# Automatically generated file; DO NOT EDIT.\n# Linux/x86 6.12.95 Kernel Configuration\n#\n\
        CONFIG_NET=y\n# CONFIG_DRM is not set\nCONFIG_LSM=\"landlock,lockdown\"\nCONFIG_PANIC_TIMEOUT=-1\n\
        CONFIG_PHYSICAL_START=0x1000000\nCONFIG_EROFS_FS=m\n# end of Kernel hacking\n";

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    /// Something that looks like a kernel, with the mark in its code as well.
    fn kernel(config: &[u8]) -> Vec<u8> {
        [b"\x7fELF code IKCFG_ST more \0", INSIDE.0, config, INSIDE.1, b" rest"].concat()
    }

    #[test]
    fn configuration_is_read_from_every_container() {
        let plain = DotConfig::parse(WHOLE).unwrap();
        assert_eq!(plain.kernel.as_deref(), Some("6.12.95"));
        assert_eq!(plain.value("NET"), Some("y"));
        assert_eq!((plain.value("DRM"), plain.value("XEN")), (Some("n"), None));
        assert_eq!(plain.value("LSM"), Some("\"landlock,lockdown\""));
        assert_eq!((plain.len(), plain.notes.len()), (6, 0));
        let gzip = packed(WHOLE.as_bytes());
        for bytes in [WHOLE.as_bytes(), &gzip, &kernel(&gzip)] {
            assert_eq!(DotConfig::read(bytes).unwrap(), plain);
        }
    }

    #[test]
    fn truncated_configuration_is_rejected() {
        for end in 0..WHOLE.len() - 1 {
            // A cut below the head may leave something that nobody calls generated.
            let text = &WHOLE[..end];
            if text.contains("Kernel Configuration\n") && text.trim_end() != WHOLE.trim_end() {
                let error = DotConfig::parse(text).unwrap_err();
                assert!(matches!(error, Error::Cut { .. } | Error::Empty), "{text:?}: {error}");
            }
        }
        let gzip = packed(WHOLE.as_bytes());
        assert!(matches!(DotConfig::read(&gzip[..gzip.len() / 2]), Err(Error::Damaged(_))));
        assert!(matches!(DotConfig::read(&kernel(&gzip[..30])), Err(Error::Damaged(_))));
        let cut = kernel(&gzip);
        assert!(matches!(DotConfig::read(&cut[..cut.len() - 20]), Err(Error::Damaged(_))));
    }

    #[test]
    fn non_configuration_is_rejected_with_reason() {
        let zeros = packed(&vec![0; usize::try_from(LONGEST).unwrap() + 10]);
        assert_eq!(DotConfig::read(&zeros), Err(Error::Long));
        assert_eq!(DotConfig::read(&vec![b'\n'; usize::try_from(LONGEST).unwrap() + 1]), Err(Error::Long));
        assert_eq!(DotConfig::read(b""), Err(Error::Empty));
        assert_eq!(DotConfig::read(b"# nothing\n"), Err(Error::Empty));
        assert_eq!(DotConfig::read(b"\x7fELF no configuration"), Err(Error::NotInside));
        assert!(matches!(DotConfig::read(b"CONFIG_A=y\nhello\nCONFIG_B=y\n"), Err(Error::Line { line: 2, .. })));
        let arm = WHOLE.replace("x86", "arm64");
        assert_eq!(DotConfig::parse(&arm), Err(Error::Architecture("arm64".to_owned())));
    }

    #[test]
    fn duplicate_symbol_is_reported_and_last_value_counts() {
        let text = format!("{WHOLE}CONFIG_NET=m\r\nCONFIG_NET=n\r\n");
        let config = DotConfig::parse(&text).unwrap();
        assert_eq!(config.value("NET"), Some("n"));
        assert_eq!(config.notes[0], "CONFIG_NET is y in line 5 and m in line 12; the later one counts");
        assert!(config.notes[1].contains("line 13") && config.notes[2].contains("CR LF"), "{:?}", config.notes);
        let many = "CONFIG_A=y\n".repeat(100);
        assert_eq!(DotConfig::parse(&many).unwrap().notes.len(), NOTES + 1);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(head in 0usize..4, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let heads: [&[u8]; 4] = [b"", &[0x1f, 0x8b, 8], b"\x7fELF IKCFG_ST\x1f\x8b", b"# Linux/x86 "];
            let _ = DotConfig::read(&[heads[head], &bytes].concat());
        }

        #[test]
        fn what_is_written_is_read(symbols in proptest::collection::btree_map("[A-Z][A-Z0-9_]{0,8}", "y|m|[0-9]{1,4}|\"[a-z,]{0,6}\"", 1..20)) {
            let text: String = symbols.iter().map(|(symbol, value)| format!("CONFIG_{symbol}={value}\n")).collect();
            let config = DotConfig::parse(&text).unwrap();
            prop_assert_eq!(config.len(), symbols.len());
            for (symbol, value) in &symbols {
                prop_assert_eq!(config.value(symbol), Some(value.as_str()));
            }
        }
    }
}
