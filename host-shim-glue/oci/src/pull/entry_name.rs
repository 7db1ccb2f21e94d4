//! Names of entries in untrusted archives: relative names are normalized, others refused.

use super::error::clipped;

/// Maximum length of a name in bytes.
const MAX_LENGTH: usize = 4096;

/// Normalizes the name of an entry: removes `.`, refuses `..` and absolute paths.
pub(crate) fn normalize(name: &str) -> Result<String, String> {
    let escapes = || format!("entry {:?} escapes the archive", clipped(name));
    if name.starts_with('/') || name.len() > MAX_LENGTH {
        return Err(escapes());
    }
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err(escapes());
    }
    Ok(parts.join("/"))
}

/// Resolves the target of a symbolic link relative to its directory; refuses targets
/// outside of the archive.
pub(crate) fn resolve_link(link: &str, target: &str) -> Result<String, String> {
    let escapes = || format!("link {:?} escapes the archive", clipped(link));
    if target.starts_with('/') || target.len() > MAX_LENGTH {
        return Err(escapes());
    }
    let mut path: Vec<&str> = link.split('/').collect();
    path.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(path.pop().ok_or_else(escapes)?),
            part => path.push(part),
        }
    }
    Ok(path.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn escaping_names_and_targets_are_refused() {
        assert_eq!(normalize("./a//b/./c").unwrap(), "a/b/c");
        assert_eq!(resolve_link("a/b/l", "../c").unwrap(), "a/c");
        for name in ["/a", "../a", "a/../b", &"x".repeat(MAX_LENGTH + 1)] {
            assert!(normalize(name).unwrap_err().contains("escapes"), "{name}");
        }
        for (link, target) in [("l", "/etc"), ("l", ".."), ("a/l", "../../b")] {
            assert!(resolve_link(link, target).unwrap_err().contains("escapes"), "{link} {target}");
        }
    }

    proptest! {
        #[test]
        fn resolved_links_stay_inside(link in "[a-c][a-c/]{0,7}", target in "[a-c./]{0,12}") {
            let link = normalize(&link).unwrap();
            if let Ok(path) = resolve_link(&link, &target) {
                prop_assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".." && part != "."));
            }
        }
    }
}
