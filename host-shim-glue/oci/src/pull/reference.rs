//! Sources of images on the command line.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use oci_spec::image::Digest;

use super::digest;
use super::error::PullError;

/// A source of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An OCI image layout: a directory, or a tar archive of one.
    Layout {
        /// The directory or archive.
        path: PathBuf,
        /// The name or digest of the image in it.
        reference: Option<String>,
    },
    /// An archive of `docker save`, compressed with gzip or not.
    DockerArchive {
        /// The archive.
        path: PathBuf,
        /// The name of the image in it.
        reference: Option<String>,
    },
    /// A repository of a registry.
    Registry(RemoteImage),
}

/// An image of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteImage {
    /// The registry's host, with its port if that is not the default.
    pub host: String,
    /// The name of the repository.
    pub repository: String,
    /// A tag or a digest.
    pub reference: Reference,
}

/// A reference to an image of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// The image that currently has this tag.
    Tag(String),
    /// The index or manifest with this digest.
    Digest(Digest),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

impl fmt::Display for RemoteImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if matches!(self.reference, Reference::Tag(_)) { ':' } else { '@' };
        write!(f, "docker://{}/{}{separator}{}", self.host, self.repository, self.reference)
    }
}

impl Source {
    /// Returns the requested tag or name.
    pub(crate) fn tag(&self) -> Option<String> {
        match self {
            Self::Registry(RemoteImage { reference: Reference::Tag(tag), .. }) => Some(tag.clone()),
            Self::Layout { reference, .. } => reference.clone().filter(|name| !name.starts_with("sha256:")),
            _ => None,
        }
    }
}

impl FromStr for Source {
    type Err = PullError;

    fn from_str(text: &str) -> Result<Self, PullError> {
        let error = |reason: &str| PullError::Source { text: text.to_owned(), reason: reason.to_owned() };
        if let Some(rest) = text.strip_prefix("docker://") {
            return parse_remote(rest).map(Self::Registry).map_err(|reason| error(&reason));
        }
        let (transport, rest) = text.split_once(':').ok_or_else(|| error("no transport, such as oci:"))?;
        let local = || match rest.is_empty() {
            true => Err(error("no path")),
            false => Ok(split_path(rest, Path::exists)),
        };
        match transport {
            "oci" => local().map(|(path, reference)| Self::Layout { path, reference }),
            "docker-archive" => local().map(|(path, reference)| Self::DockerArchive { path, reference }),
            _ => Err(error("unknown transport")),
        }
    }
}

/// Splits `PATH[:REF]`. Both may contain colons: the longest prefix that exists is the path,
/// else the text before the first colon.
fn split_path(text: &str, exists: impl Fn(&Path) -> bool) -> (PathBuf, Option<String>) {
    if exists(Path::new(text)) {
        return (text.into(), None);
    }
    let colons = || text.match_indices(':').map(|(at, _)| at).filter(|at| *at > 0 && at + 1 < text.len());
    let end = colons().filter(|at| exists(Path::new(&text[..*at]))).last().or_else(|| colons().next());
    end.map_or_else(|| (text.into(), None), |at| (text[..at].into(), Some(text[at + 1..].to_owned())))
}

fn parse_remote(text: &str) -> Result<RemoteImage, String> {
    let (host, rest) = text.split_once('/').ok_or("no repository after the host")?;
    if !is_host(host) {
        return Err(format!("invalid host {host:?}; expected a host such as docker.io or 127.0.0.1:5000"));
    }
    let (rest, digest) = match rest.split_once('@') {
        Some((rest, digest)) => (rest, Some(Reference::Digest(digest::parse(digest)?))),
        None => (rest, None),
    };
    let (repository, tag) = match rest.split_once(':') {
        Some((_, tag)) if !is_tag(tag) => return Err(format!("invalid tag {tag:?}")),
        Some((repository, tag)) => (repository, tag),
        None => (rest, "latest"),
    };
    if repository.len() > 255 || !repository.split('/').all(is_component) {
        return Err(format!(
            "invalid repository {repository:?}: expected lower-case letters and digits, separated by . _ - or /"
        ));
    }
    // With a tag and a digest, the digest identifies the image.
    let reference = digest.unwrap_or_else(|| Reference::Tag(tag.to_owned()));
    Ok(RemoteImage { host: host.to_owned(), repository: repository.to_owned(), reference })
}

/// Returns whether this is an address, or a name with a dot or a port, or `localhost`. Other
/// names are refused: `docker://alpine/x` would connect to a host `alpine`.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (text, None),
    };
    let is_label =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    let ipv6 = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_name = match ipv6 {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => name.split('.').all(is_label) && (name.contains('.') || name == "localhost" || port.is_some()),
    };
    is_name && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn is_tag(text: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|b| is_word(b) || b == b'.' || b == b'-')
}

fn is_component(text: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.bytes().next().is_some_and(is_word)
        && text.bytes().last().is_some_and(is_word)
        && text.bytes().all(|b| is_word(b) || b"._-".contains(&b))
        && !text.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn registry_references_are_parsed_or_refused() {
        let hash = "ab".repeat(32);
        for (text, printed) in [
            ("docker://ghcr.io/a/b", "docker://ghcr.io/a/b:latest".to_owned()),
            ("docker://127.0.0.1:5000/x:1.2-rc_1", "docker://127.0.0.1:5000/x:1.2-rc_1".to_owned()),
            ("docker://[::1]:5000/x", "docker://[::1]:5000/x:latest".to_owned()),
            ("docker://localhost/x", "docker://localhost/x:latest".to_owned()),
            (&format!("docker://r.io/x:tag@sha256:{hash}"), format!("docker://r.io/x@sha256:{hash}")),
        ] {
            let Source::Registry(remote) = text.parse().unwrap() else { panic!("{text}") };
            assert_eq!(remote.to_string(), printed);
        }
        for invalid in [
            "docker://alpine",
            "docker://alpine/x",
            "docker://r.io/",
            "docker://r.io/UP",
            "docker://r.io/a//b",
            "docker://r.io/a:",
            "docker://r.io/a@sha256:12",
            "docker://r.io/../a",
            "docker://r.io:0/a",
            "docker://u@r.io/a",
            "docker://r.io/a:b:c",
            "docker://r.io/a?b",
            "docker://r.io/-a",
            "ftp:x",
            "oci:",
            "x",
            "",
        ] {
            let error = invalid.parse::<Source>().unwrap_err().to_string();
            assert!(error.contains("a source is oci:PATH"), "{error}");
        }
        let sha512 = format!("docker://r.io/a@sha512:{}", "ab".repeat(64));
        assert!(sha512.parse::<Source>().unwrap_err().to_string().contains("only sha256"));
    }

    #[test]
    fn existing_path_with_colons_is_not_split() {
        let split = |text: &str, existing: &[&str]| {
            let (path, reference) = split_path(text, |path| existing.contains(&path.to_str().unwrap()));
            (path.to_str().unwrap().to_owned(), reference)
        };
        let expected = |path: &str, reference: Option<&str>| (path.to_owned(), reference.map(str::to_owned));
        assert_eq!(split("a:b", &[]), expected("a", Some("b")));
        assert_eq!(split("a:b", &["a:b"]), expected("a:b", None));
        assert_eq!(split("a:b:c:d", &["a:b"]), expected("a:b", Some("c:d")));
        assert_eq!(split("a.tar:busybox:1.36", &["a.tar"]), expected("a.tar", Some("busybox:1.36")));
        assert_eq!(split("a:", &[]), expected("a:", None));
    }

    proptest! {
        #[test]
        fn accepted_reference_has_no_special_characters(text in "docker://[a-z.:0-9\\[\\]@/A-Z?#%_-]{0,40}") {
            if let Ok(Source::Registry(remote)) = text.parse::<Source>() {
                let repository = &remote.repository;
                prop_assert!(!repository.contains("..") && !repository.contains(['?', '#', '%', '@', ':']));
                prop_assert!(!remote.host.contains(['/', '?', '#', '%', '@']));
                let again = remote.to_string().parse::<Source>().unwrap();
                prop_assert_eq!(again, Source::Registry(remote));
            }
        }
    }
}
