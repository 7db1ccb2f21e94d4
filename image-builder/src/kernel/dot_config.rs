//! Reads the configuration of a built kernel: `.config`, `/boot/config-RELEASE`, `/proc/config.gz`, or the copy
//! embedded in the kernel (`CONFIG_IKCONFIG`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;

use super::config::assignment;
use super::payload;
use super::version::Version;

/// Maximum size of a configuration: the largest have 300 kB.
pub const MAX_SIZE: u64 = 16 << 20;

/// Markers before and after the compressed configuration in a kernel with `CONFIG_IKCONFIG`.
const IKCONFIG_MARKERS: (&[u8], &[u8]) = (b"IKCFG_ST", b"IKCFG_ED");

/// The end of the last menu of every configuration since Linux 5.3.
const LAST_MENU: &str = "# end of Kernel hacking";
const MENUS_END_SINCE: &str = "5.3";

/// Maximum number of notes on repeated symbols.
const MAX_NOTES: usize = 8;

/// Why a configuration cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Neither a configuration nor a file that contains one.
    #[error("line {line}: {text:?} is neither CONFIG_NAME=value nor a comment: this is not a kernel configuration")]
    Line {
        /// The line, from 1.
        line: usize,
        /// Its text, shortened.
        text: String,
    },
    /// The configuration is truncated.
    #[error("the configuration is truncated after line {lines}: {missing}; copy it again")]
    Truncated {
        /// The number of lines.
        lines: usize,
        /// What is missing.
        missing: String,
    },
    /// No symbol is set.
    #[error("the configuration sets no symbol")]
    Empty,
    /// Larger than [`MAX_SIZE`].
    #[error("the configuration exceeds {} MB", MAX_SIZE >> 20)]
    TooLarge,
    /// The compressed configuration or kernel is corrupt.
    #[error("the compressed data is corrupt: {0}")]
    Corrupt(String),
    /// The kernel does not embed its configuration.
    #[error("this kernel was built without CONFIG_IKCONFIG: check /boot/config-RELEASE or the package")]
    NotEmbedded,
    /// The configuration is of another architecture.
    #[error("the configuration is for {0}; the rules are for x86")]
    Architecture(String),
}

/// A kernel's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DotConfig {
    /// The kernel version, if the header states it: `6.12.95`.
    pub kernel: Option<String>,
    /// Anomalies found while reading.
    pub notes: Vec<String>,
    values: BTreeMap<String, String>,
}

impl DotConfig {
    /// Reads a configuration from text, gzip, a kernel (`vmlinux` or `bzImage`) or `configs.ko`.
    ///
    /// # Errors
    /// The input is not a configuration, is corrupt or truncated, or the kernel does not embed one.
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        let text: Cow<'_, [u8]> = if bytes.starts_with(&[0x1f, 0x8b]) {
            gunzip(bytes)?.into()
        } else if is_elf(bytes) {
            extract_ikconfig(bytes)?.into()
        } else if is_kernel(bytes) {
            extract_ikconfig(&payload::extract(bytes).map_err(Error::Corrupt)?)?.into()
        } else {
            bytes.into()
        };
        if text.len() as u64 > MAX_SIZE {
            return Err(Error::TooLarge);
        }
        Self::parse(&String::from_utf8_lossy(&text))
    }

    /// Parses the text of a configuration.
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
                // A last line without a line feed is most likely incomplete.
                return Err(match whole {
                    true => Error::Line { line: lines, text: line.chars().take(60).collect() },
                    false => Error::Truncated { lines, missing: "its last line is incomplete".to_owned() },
                });
            };
            let Some((symbol, value)) = read else {
                all.read_header(line)?;
                continue;
            };
            if let Some(first) = first_at.insert(symbol, lines) {
                repeated += 1;
                let before = all.values.get(symbol).map_or("", String::as_str);
                if repeated <= MAX_NOTES {
                    all.notes.push(format!(
                        "CONFIG_{symbol} is {before} in line {first} and {value} in line {lines}; the later one counts"
                    ));
                }
            }
            all.values.insert(symbol.to_owned(), value.to_owned());
        }
        if repeated > MAX_NOTES {
            all.notes.push(format!("{} more symbols are set more than once", repeated - MAX_NOTES));
        }
        if text.contains("\r\n") {
            all.notes.push("its lines end with CR LF, which the kernel's own tools reject".to_owned());
        }
        if all.values.is_empty() {
            return Err(Error::Empty);
        }
        let marked =
            generated && all.version().is_some_and(|version| Some(version) >= Version::leading(MENUS_END_SINCE));
        if marked && !last_menu {
            return Err(Error::Truncated { lines, missing: format!("{LAST_MENU:?} is missing") });
        }
        Ok(all)
    }

    /// Reads the version from the header: `# Linux/x86 6.12.95 Kernel Configuration`.
    fn read_header(&mut self, line: &str) -> Result<(), Error> {
        let header = line.trim().strip_prefix("# Linux/").and_then(|rest| rest.strip_suffix(" Kernel Configuration"));
        let Some((architecture, release)) = header.and_then(|header| header.split_once(' ')) else { return Ok(()) };
        if !architecture.starts_with("x86") && architecture != "i386" {
            return Err(Error::Architecture(architecture.to_owned()));
        }
        self.kernel = Some(release.to_owned());
        Ok(())
    }

    /// Returns the kernel's version, as rules compare it.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.kernel.as_deref().and_then(Version::leading)
    }

    /// Returns a symbol's value: `y`, `m`, `n`, a number or a quoted string; `None` if the configuration does not
    /// mention it.
    #[must_use]
    pub fn value(&self, symbol: &str) -> Option<&str> {
        self.values.get(symbol).map(String::as_str)
    }

    /// Returns the number of mentioned symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns whether no symbol is mentioned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns whether a file with this beginning is a kernel, which is much larger than a configuration.
#[must_use]
pub fn is_kernel(head: &[u8]) -> bool {
    is_elf(head) || head.get(0x202..0x206) == Some(b"HdrS")
}

/// Returns whether `line`, a slice of `text`, ends with a line feed.
fn ends_line(text: &str, line: &str) -> bool {
    let end = line.as_ptr() as usize - text.as_ptr() as usize + line.len();
    text.as_bytes().get(end).is_some()
}

fn gunzip(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    let reader = flate2::read::GzDecoder::new(bytes);
    reader.take(MAX_SIZE + 1).read_to_end(&mut text).map_err(|error| Error::Corrupt(error.to_string()))?;
    if text.len() as u64 > MAX_SIZE {
        return Err(Error::TooLarge);
    }
    Ok(text)
}

/// Extracts the configuration embedded in a kernel.
fn extract_ikconfig(kernel: &[u8]) -> Result<Vec<u8>, Error> {
    let find = |what: &[u8], from: usize| {
        kernel.get(from..)?.windows(what.len()).position(|window| window == what).map(|at| from + at)
    };
    // The kernel's code contains the marker, too; only the configuration's is followed by the gzip magic number.
    let begin = [IKCONFIG_MARKERS.0, &[0x1f, 0x8b]].concat();
    let start = find(&begin, 0).ok_or(Error::NotEmbedded)? + IKCONFIG_MARKERS.0.len();
    let end = find(IKCONFIG_MARKERS.1, start).ok_or_else(|| Error::Corrupt("the end marker is missing".to_owned()))?;
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

    /// Builds a fake kernel whose code contains the start marker, too.
    fn kernel(config: &[u8]) -> Vec<u8> {
        [b"\x7fELF code IKCFG_ST more \0", IKCONFIG_MARKERS.0, config, IKCONFIG_MARKERS.1, b" rest"].concat()
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
            // Text truncated within the header is not recognised as generated.
            let text = &WHOLE[..end];
            if text.contains("Kernel Configuration\n") && text.trim_end() != WHOLE.trim_end() {
                let error = DotConfig::parse(text).unwrap_err();
                assert!(matches!(error, Error::Truncated { .. } | Error::Empty), "{text:?}: {error}");
            }
        }
        let gzip = packed(WHOLE.as_bytes());
        assert!(matches!(DotConfig::read(&gzip[..gzip.len() / 2]), Err(Error::Corrupt(_))));
        assert!(matches!(DotConfig::read(&kernel(&gzip[..30])), Err(Error::Corrupt(_))));
        let cut = kernel(&gzip);
        assert!(matches!(DotConfig::read(&cut[..cut.len() - 20]), Err(Error::Corrupt(_))));
    }

    #[test]
    fn non_configuration_is_rejected_with_reason() {
        let zeros = packed(&vec![0; usize::try_from(MAX_SIZE).unwrap() + 10]);
        assert_eq!(DotConfig::read(&zeros), Err(Error::TooLarge));
        assert_eq!(DotConfig::read(&vec![b'\n'; usize::try_from(MAX_SIZE).unwrap() + 1]), Err(Error::TooLarge));
        assert_eq!(DotConfig::read(b""), Err(Error::Empty));
        assert_eq!(DotConfig::read(b"# nothing\n"), Err(Error::Empty));
        assert_eq!(DotConfig::read(b"\x7fELF no configuration"), Err(Error::NotEmbedded));
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
        assert_eq!(DotConfig::parse(&many).unwrap().notes.len(), MAX_NOTES + 1);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(head in 0usize..4, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let heads: [&[u8]; 4] = [b"", &[0x1f, 0x8b, 8], b"\x7fELF IKCFG_ST\x1f\x8b", b"# Linux/x86 "];
            let _ = DotConfig::read(&[heads[head], &bytes].concat());
        }

        #[test]
        fn written_configuration_is_read(symbols in proptest::collection::btree_map("[A-Z][A-Z0-9_]{0,8}", "y|m|[0-9]{1,4}|\"[a-z,]{0,6}\"", 1..20)) {
            let text: String = symbols.iter().map(|(symbol, value)| format!("CONFIG_{symbol}={value}\n")).collect();
            let config = DotConfig::parse(&text).unwrap();
            prop_assert_eq!(config.len(), symbols.len());
            for (symbol, value) in &symbols {
                prop_assert_eq!(config.value(symbol), Some(value.as_str()));
            }
        }
    }
}
