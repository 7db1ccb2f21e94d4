//! Determines the Debian mirror from the apt configuration of the host, so that a mirror
//! that administrators have configured is used without further settings.

use std::fs;
use std::path::Path;

use super::Error;

/// The variable that overrides the mirror of the apt configuration.
const OVERRIDE: &str = "FIRSTLIGHT_DEBIAN_MIRROR";

/// Returns the URI of the Debian archive: `$FIRSTLIGHT_DEBIAN_MIRROR`, or the first
/// source in `/etc/apt` whose path ends in `/debian`.
///
/// # Errors
/// [`Error::NoMirror`] if there is neither.
pub fn mirror() -> Result<String, Error> {
    match std::env::var(OVERRIDE) {
        Ok(uri) if !uri.is_empty() => Ok(uri),
        _ => mirror_from(Path::new("/etc/apt")),
    }
}

/// Returns the first Debian mirror of the apt configuration in `etc_apt`.
fn mirror_from(etc_apt: &Path) -> Result<String, Error> {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc_apt.join("sources.list.d")) {
        let mut parts: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    for file in files {
        // Unreadable files are skipped.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        let found = match file.extension().and_then(|ext| ext.to_str()) {
            Some("list") => first_of_lines(&text),
            Some("sources") => first_of_stanzas(&text),
            // apt ignores files with other extensions, such as disabled sources.
            _ => None,
        };
        if let Some(uri) = found {
            return Ok(uri);
        }
    }
    Err(Error::NoMirror { searched: etc_apt.to_owned() })
}

/// Returns the first mirror in one-line format: `deb [options] URI suite component...`.
fn first_of_lines(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?.trim();
        let rest = line.strip_prefix("deb")?.strip_prefix(char::is_whitespace)?.trim_start();
        let rest = match rest.strip_prefix('[') {
            Some(options) => options.split_once(']')?.1,
            None => rest,
        };
        archive_uri(rest.split_whitespace().next()?)
    })
}

/// Returns the first mirror in deb822 format: stanzas of `Key: value` lines.
fn first_of_stanzas(text: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let field = |name: &str| field_of(stanza, name);
        let is_binary = field("types")?.split_whitespace().any(|kind| kind == "deb");
        let is_disabled = field("enabled").is_some_and(|value| matches!(value.trim(), "no" | "false" | "0"));
        if !is_binary || is_disabled {
            return None;
        }
        field("uris")?.split_whitespace().find_map(archive_uri)
    })
}

/// Returns the value of a field (`name` in lower case) including continuation lines.
fn field_of(stanza: &[&str], name: &str) -> Option<String> {
    let mut lines = stanza.iter().skip_while(|line| {
        !line.split_once(':').is_some_and(|(key, _)| key.eq_ignore_ascii_case(name) && !key.starts_with([' ', '\t']))
    });
    let mut value = lines.next()?.split_once(':')?.1.to_owned();
    for more in lines.take_while(|line| line.starts_with([' ', '\t'])) {
        value.push(' ');
        value.push_str(more.trim());
    }
    Some(value)
}

/// Returns the URI if it is a Debian archive: not the security archive, not a vendor's.
fn archive_uri(uri: &str) -> Option<String> {
    let uri = uri.trim_end_matches('/');
    let known = ["http://", "https://", "file:"].iter().any(|scheme| uri.starts_with(scheme));
    (known && uri.ends_with("/debian")).then(|| uri.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sources.list.d")).unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn deb822_with_comments_continuation_and_a_disabled_stanza_is_parsed() {
        let etc = tree(&[(
            "sources.list.d/debian.sources",
            "# made by an installer\nTypes: deb\nURIs: http://off.example/debian\nEnabled: no\nSuites: x\n\n\
             Types: deb-src\nURIs: http://src.example/debian\n\n\
             Types: deb deb-src\n# where from\nuris:\n http://m.example/debian-security\n https://m.example/debian/\nSuites: bookworm\n",
        )]);
        assert_eq!(mirror_from(etc.path()).unwrap(), "https://m.example/debian");
    }

    #[test]
    fn one_line_format_with_options_comes_first() {
        let etc = tree(&[
            (
                "sources.list",
                "#deb http://c.example/debian x main\ndeb-src http://s.example/debian x main\n\
              deb [arch=amd64 signed-by=/k] file:///srv/debian bookworm main # local\n",
            ),
            ("sources.list.d/z.sources", "Types: deb\nURIs: http://z.example/debian\n"),
        ]);
        assert_eq!(mirror_from(etc.path()).unwrap(), "file:///srv/debian");
    }

    #[test]
    fn other_archives_and_disabled_files_are_ignored() {
        let etc = tree(&[
            ("sources.list", "deb http://archive.example/ubuntu noble main\ndeb cdrom:[x]/debian y main\n"),
            ("sources.list.d/a.list.disabled", "deb http://a.example/debian x main\n"),
            ("sources.list.d/b.sources", "Types: deb\nURIs: https://vendor.example/node_20.x\n"),
        ]);
        let error = mirror_from(etc.path()).unwrap_err();
        assert!(error.to_string().contains("FIRSTLIGHT_DEBIAN_MIRROR"), "{error}");
    }
}
