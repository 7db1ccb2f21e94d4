//! Names in untrusted archives: normalized names are accepted, others refused.

/// Maximum length of a name in bytes.
pub(crate) const LONGEST: usize = 4096;

/// Truncates untrusted text for a message.
fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

/// Normalizes a name: removes `.`, refuses `..` and absolute paths.
pub(crate) fn plain(name: &str) -> Result<String, String> {
    let leads_out = || format!("entry {:?} leads out of the archive", shown(name));
    if name.starts_with('/') || name.len() > LONGEST {
        return Err(leads_out());
    }
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err(leads_out());
    }
    Ok(parts.join("/"))
}

/// Resolves a link relative to its directory, refusing targets outside.
pub(crate) fn followed(link: &str, target: &str) -> Result<String, String> {
    let out = || format!("link {:?} leads out of the archive", shown(link));
    if target.starts_with('/') || target.len() > LONGEST {
        return Err(out());
    }
    let mut path: Vec<&str> = link.split('/').collect();
    path.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(path.pop().ok_or_else(out)?),
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
    fn names_are_plain_or_refused() {
        assert_eq!(plain("./a//b/./c").unwrap(), "a/b/c");
        assert_eq!(followed("a/b/l", "../c").unwrap(), "a/c");
        for wrong in ["/a", "../a", "a/../b", &"x".repeat(LONGEST + 1)] {
            assert!(plain(wrong).unwrap_err().contains("leads out"), "{wrong}");
        }
        for (link, target) in [("l", "/etc"), ("l", ".."), ("a/l", "../../b")] {
            assert!(followed(link, target).unwrap_err().contains("leads out"), "{link} {target}");
        }
    }

    proptest! {
        #[test]
        fn links_stay_inside(link in "[a-c][a-c/]{0,7}", target in "[a-c./]{0,12}") {
            let link = plain(&link).unwrap();
            if let Ok(path) = followed(&link, &target) {
                prop_assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".." && part != "."));
            }
        }
    }
}
