//! Parses entries of a suite's package list.

use super::Error;

/// One version of a package in a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Package name.
    pub name: String,
    /// Full version, including the epoch.
    pub version: String,
    /// `amd64` or `all`.
    pub architecture: String,
    /// Size of the `.deb` in bytes.
    pub size: u64,
    /// SHA-256 of the `.deb`, lower-case hexadecimal.
    pub sha256: String,
    /// The source package, `NAME=VERSION`, if its name or version differs from the package's.
    pub source: Option<String>,
    /// The `Depends` field; empty if absent.
    pub depends: String,
}

impl Candidate {
    /// Returns the file name under which apt stores the package.
    #[must_use]
    pub fn file_name(&self) -> String {
        format!("{}_{}_{}.deb", self.name, self.version.replace(':', "%3a"), self.architecture)
    }

    /// Returns the upstream version: without epoch and Debian's suffixes.
    #[must_use]
    pub fn upstream_version(&self) -> &str {
        let bare = self.version.split_once(':').map_or(self.version.as_str(), |(_, rest)| rest);
        bare.split(['-', '+', '~']).next().unwrap_or(bare)
    }

    /// Returns the names in `Depends` (the first of each alternative), in order.
    pub fn depends_on(&self) -> impl Iterator<Item = &str> {
        depends_on(&self.depends)
    }
}

/// Returns the valid names in a `Depends` field (the first of each alternative).
pub(super) fn depends_on(field: &str) -> impl Iterator<Item = &str> {
    let names = field.split(',').filter_map(|clause| clause.split('|').next()?.split_whitespace().next());
    names.filter(|name| is_plain(name))
}

/// A version constraint for a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackageRequest<'a> {
    /// The newest version of the suite.
    Newest,
    /// Exactly this version.
    Exact(&'a str),
    /// The newest version that begins with these numbers: `6.12` matches
    /// 6.12.95-1 but not 6.121. The epoch is ignored.
    Series(&'a str),
}

impl PackageRequest<'_> {
    /// Returns whether `version` satisfies the constraint.
    #[must_use]
    pub fn matches(&self, version: &str) -> bool {
        match self {
            Self::Newest => true,
            Self::Exact(exact) => version == *exact,
            Self::Series(series) => {
                let bare = version.split_once(':').map_or(version, |(_, rest)| rest);
                bare.strip_prefix(series).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
            }
        }
    }

    /// Returns the constraint as text for a message, with a leading space; empty for the newest.
    pub(crate) fn constraint_text(&self) -> String {
        match self {
            Self::Newest => String::new(),
            Self::Exact(version) => format!(" of version {version}"),
            Self::Series(series) => format!(" of version {series}*"),
        }
    }
}

/// Parses the output of `apt-cache show`: stanzas, newest version first.
pub(super) fn parse(suite: &str, text: &str) -> Result<Vec<Candidate>, Error> {
    let mut candidates = Vec::new();
    for stanza in text.split("\n\n").filter(|stanza| !stanza.trim().is_empty()) {
        let field = |name: &str| {
            stanza
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(|value| value.trim().to_owned()))
        };
        let name = field("Package");
        let invalid =
            |field| Error::BadEntry { suite: suite.to_owned(), name: name.clone().unwrap_or_default(), field };
        let word = |key: &'static str| field(key).filter(|value| is_plain(value)).ok_or_else(|| invalid(key));
        let sha256 = field("SHA256")
            .filter(|hash| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
        let (name, version) = (word("Package")?, word("Version")?);
        let source = match field("Source") {
            Some(text) => source(&text, &version).ok_or_else(|| invalid("Source"))?,
            None => format!("{name}={version}"),
        };
        candidates.push(Candidate {
            source: Some(source).filter(|source| *source != format!("{name}={version}")),
            name,
            version,
            architecture: word("Architecture")?,
            size: field("Size").and_then(|size| size.parse().ok()).ok_or_else(|| invalid("Size"))?,
            sha256: sha256.ok_or_else(|| invalid("SHA256"))?,
            depends: field("Depends").unwrap_or_default(),
        });
    }
    Ok(candidates)
}

/// Parses the field `Source`: a name, and a version in brackets if it differs from the package's.
fn source(field: &str, version: &str) -> Option<String> {
    let (name, version) = match field.split_once(char::is_whitespace) {
        Some((name, other)) => (name, other.trim().strip_prefix('(')?.strip_suffix(')')?),
        None => (field, version),
    };
    (is_plain(name) && is_plain(version)).then(|| format!("{name}={version}"))
}

/// Returns whether a name or version has only the characters that Debian's policy
/// allows. They are used as file names and arguments, so a slash or a leading dash is refused.
pub(crate) fn is_plain(value: &str) -> bool {
    value.starts_with(|c: char| c.is_ascii_alphanumeric())
        && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.:~_".contains(&b))
}

/// Parses the output of `apt-get install --print-uris`, lines of
/// `'uri' name_version_arch.deb size hash`, to pairs of name and version.
pub(super) fn parse_closure(text: &str) -> Vec<(String, String)> {
    text.lines()
        .filter_map(|line| {
            let file = line.strip_prefix('\'')?.split_once("' ")?.1.split(' ').next()?;
            let mut parts = file.strip_suffix(".deb")?.split('_');
            let (name, version) = (parts.next()?, parts.next()?);
            Some((name.to_owned(), version.replace("%3a", ":")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HASH: &str = "8e4ad8e4a06b2ed286ab086d4c450ec00694a7724a0f80cb5d7a8f3bd1038446";

    fn stanza(version: &str) -> String {
        format!(
            "Package: linux-image-cloud-amd64\nVersion: {version}\nArchitecture: amd64\n\
             Depends: linux-image-6.12.95+deb12-cloud-amd64 (= {version}), a | b (>= 1)\n\
             Description: two lines\n Package: not a field\nSize: 1484\nSHA256: {HASH}\n"
        )
    }

    #[test]
    fn stanzas_are_parsed_in_order() {
        let text = format!("{}\n{}\n", stanza("2:7.2.13-1"), stanza("6.12.95-1~bpo12+1"));
        let found = parse("sid", &text).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].version, "2:7.2.13-1");
        assert_eq!(found[0].upstream_version(), "7.2.13");
        assert_eq!(found[0].file_name(), "linux-image-cloud-amd64_2%3a7.2.13-1_amd64.deb");
        assert_eq!(found[1].upstream_version(), "6.12.95");
        assert_eq!(found[1].depends_on().collect::<Vec<_>>(), ["linux-image-6.12.95+deb12-cloud-amd64", "a"]);
        assert_eq!((found[1].size, found[1].sha256.as_str()), (1484, HASH));
    }

    #[test]
    fn malicious_name_or_missing_hash_then_error() {
        let evil = stanza("1").replace("Package: linux-image-cloud-amd64", "Package: ../../etc/x");
        assert!(matches!(parse("sid", &evil), Err(Error::BadEntry { field: "Package", .. })));
        let option = stanza("1").replace("Version: 1\n", "Version: -o\n");
        assert!(matches!(parse("sid", &option), Err(Error::BadEntry { field: "Version", .. })));
        let bare = stanza("1").replace("SHA256", "MD5sum");
        assert!(matches!(parse("sid", &bare), Err(Error::BadEntry { field: "SHA256", .. })));
    }

    #[test]
    fn source_is_recorded_if_it_differs_from_the_package() {
        let source = |field: &str| {
            let text = stanza("2+b1").replace("Architecture", &format!("{field}Architecture"));
            parse("sid", &text).map(|found| found[0].source.clone())
        };
        assert_eq!(source("").unwrap(), None);
        assert_eq!(source("Source: linux-image-cloud-amd64\n").unwrap(), None);
        assert_eq!(source("Source: linux-latest\n").unwrap().as_deref(), Some("linux-latest=2+b1"));
        let rebuilt = source("Source: linux-image-cloud-amd64 (2)\n").unwrap();
        assert_eq!(rebuilt.as_deref(), Some("linux-image-cloud-amd64=2"));
        for odd in ["../x", "a b", "a (1", "a (../1)"] {
            let found = source(&format!("Source: {odd}\n"));
            assert!(matches!(found, Err(Error::BadEntry { field: "Source", .. })), "{odd}");
        }
    }

    #[test]
    fn versions_match_package_requests() {
        assert!(PackageRequest::Newest.matches("anything"));
        assert!(PackageRequest::Exact("1-1").matches("1-1") && !PackageRequest::Exact("1-1").matches("1-10"));
        for (version, expected) in [("6.12.95-1", true), ("1:6.12-1", true), ("6.121.1", false), ("6.1", false)] {
            assert_eq!(PackageRequest::Series("6.12").matches(version), expected, "{version}");
        }
    }

    #[test]
    fn print_uris_lines_are_parsed() {
        let text = "'http://m.example/debian/pool/q/qemu_1%3a11.deb' qemu-system-x86_1%3a11.1.3+ds-1_amd64.deb 99 SHA256:aa\n\
                    Reading package lists...\n'file:/x/y z.deb' libc6_2.43-7_amd64.deb 1 MD5Sum:bb\n";
        let expected = [("qemu-system-x86", "1:11.1.3+ds-1"), ("libc6", "2.43-7")];
        assert_eq!(parse_closure(text), expected.map(|(n, v)| (n.to_owned(), v.to_owned())));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).{0,400}") {
            let _ = parse("sid", &text);
            let _ = parse_closure(&text);
        }
    }
}
