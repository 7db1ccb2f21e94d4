//! Where an image is, as users write it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::document::Digest;
use super::error::Error;

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An OCI image layout: a directory, or a tar archive of one.
    Layout {
        /// The directory or archive.
        path: PathBuf,
        /// Which of its images.
        reference: Option<String>,
    },
    /// What `docker save` writes, packed with gzip or not.
    DockerArchive {
        /// The archive.
        path: PathBuf,
        /// Which of its images.
        reference: Option<String>,
    },
    /// A repository of a registry.
    Registry(Remote),
}

/// A repository and which of its images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// The registry's host, with its port if that is not the usual one.
    pub host: String,
    /// The repository.
    pub name: String,
    /// A tag or a digest.
    pub which: Which,
}

/// Which image of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// What this tag names today.
    Tag(String),
    /// Exactly this one.
    Digest(Digest),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if matches!(self.which, Which::Tag(_)) { ':' } else { '@' };
        write!(f, "docker://{}/{}{separator}{}", self.host, self.name, self.which)
    }
}

impl Source {
    /// The tag by which it was asked for.
    pub(crate) fn tag(&self) -> Option<String> {
        match self {
            Self::Registry(Remote { which: Which::Tag(tag), .. }) => Some(tag.clone()),
            Self::Layout { reference, .. } => reference.clone().filter(|name| !name.starts_with("sha256:")),
            _ => None,
        }
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |why: &str| Error::Source { text: text.to_owned(), why: why.to_owned() };
        if let Some(rest) = text.strip_prefix("docker://") {
            return remote(rest).map(Self::Registry).map_err(|why| wrong(&why));
        }
        let (kind, rest) = text.split_once(':').ok_or_else(|| wrong("it does not say what it is"))?;
        let local = || match rest.is_empty() {
            true => Err(wrong("it has no path")),
            false => Ok(path_and_reference(rest, Path::exists)),
        };
        match kind {
            "oci" => local().map(|(path, reference)| Self::Layout { path, reference }),
            "docker-archive" => local().map(|(path, reference)| Self::DockerArchive { path, reference }),
            _ => Err(wrong("it begins with none of these")),
        }
    }
}

/// Both parts may have colons; a path that exists is believed to be one.
fn path_and_reference(text: &str, exists: impl Fn(&Path) -> bool) -> (PathBuf, Option<String>) {
    let cuts = || text.match_indices(':').map(|(at, _)| at).filter(|at| *at > 0 && at + 1 < text.len());
    if exists(Path::new(text)) {
        return (text.into(), None);
    }
    let cut = cuts().filter(|at| exists(Path::new(&text[..*at]))).last().or_else(|| cuts().next());
    cut.map_or_else(|| (text.into(), None), |at| (text[..at].into(), Some(text[at + 1..].to_owned())))
}

fn remote(text: &str) -> Result<Remote, String> {
    let (host, path) = text.split_once('/').ok_or("it has no name after the host")?;
    if !is_host(host) {
        return Err(format!("{host:?} is no host, such as docker.io or 127.0.0.1:5000"));
    }
    let (path, which) = match path.split_once('@') {
        Some((path, digest)) => (path, Some(Which::Digest(digest.parse()?))),
        None => (path, None),
    };
    let (name, which) = match (path.split_once(':'), which) {
        // A tag beside a digest is for readers: the digest decides.
        (Some((name, tag)), which) if is_tag(tag) => (name, which.unwrap_or_else(|| Which::Tag(tag.to_owned()))),
        (Some((_, tag)), _) => return Err(format!("{tag:?} is no tag")),
        (None, which) => (path, which.unwrap_or_else(|| Which::Tag("latest".to_owned()))),
    };
    if name.len() > 255 || !name.split('/').all(is_component) {
        return Err(format!("{name:?} is no name of a repository: lower case, digits, and . _ - between them"));
    }
    Ok(Remote { host: host.to_owned(), name: name.to_owned(), which })
}

/// A word before the first slash is a host if it looks like one: else
/// `docker://alpine/x` would ask a host called alpine.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (text, None),
    };
    let label =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    let ipv6 = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let named = match ipv6 {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => name.split('.').all(label) && (name.contains('.') || name == "localhost" || port.is_some()),
    };
    named && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn is_tag(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

fn is_component(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.bytes().next().is_some_and(word)
        && text.bytes().last().is_some_and(word)
        && text.bytes().all(|b| word(b) || b"._-".contains(&b))
        && !text.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn registries_are_understood_or_refused() {
        let hash = "ab".repeat(32);
        for (text, again) in [
            ("docker://ghcr.io/a/b", "docker://ghcr.io/a/b:latest".to_owned()),
            ("docker://127.0.0.1:5000/x:1.2-rc_1", "docker://127.0.0.1:5000/x:1.2-rc_1".to_owned()),
            ("docker://[::1]:5000/x", "docker://[::1]:5000/x:latest".to_owned()),
            ("docker://localhost/x", "docker://localhost/x:latest".to_owned()),
            (&format!("docker://r.io/x:tag@sha256:{hash}"), format!("docker://r.io/x@sha256:{hash}")),
        ] {
            let Source::Registry(remote) = text.parse().unwrap() else { panic!("{text}") };
            assert_eq!(remote.to_string(), again);
        }
        for wrong in [
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
            let error = wrong.parse::<Source>().unwrap_err().to_string();
            assert!(error.contains("a source is oci:PATH"), "{error}");
        }
    }

    #[test]
    fn a_path_may_have_colons_if_it_is_there() {
        let cut = |text: &str, there: &[&str]| {
            let (path, reference) = path_and_reference(text, |path| there.contains(&path.to_str().unwrap()));
            (path.to_str().unwrap().to_owned(), reference)
        };
        let of = |path: &str, reference: Option<&str>| (path.to_owned(), reference.map(str::to_owned));
        assert_eq!(cut("a:b", &[]), of("a", Some("b")));
        assert_eq!(cut("a:b", &["a:b"]), of("a:b", None));
        assert_eq!(cut("a:b:c:d", &["a:b"]), of("a:b", Some("c:d")));
        assert_eq!(cut("a.tar:busybox:1.36", &["a.tar"]), of("a.tar", Some("busybox:1.36")));
        assert_eq!(cut("a:", &[]), of("a:", None));
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_a_plain_address(text in "docker://[a-z.:0-9\\[\\]@/A-Z?#%_-]{0,40}") {
            if let Ok(Source::Registry(remote)) = text.parse::<Source>() {
                prop_assert!(!remote.name.contains("..") && !remote.name.contains(['?', '#', '%', '@', ':']));
                prop_assert!(!remote.host.contains(['/', '?', '#', '%', '@']));
                let again = remote.to_string().parse::<Source>().unwrap();
                prop_assert_eq!(again, Source::Registry(remote));
            }
        }
    }
}
