//! Validates container ids (untrusted input).

use crate::error::{Error, Result};

/// Names of directories beside the bundles, not valid as ids.
const RESERVED: &[&str] = &["shared", "sandbox"];

/// Checks that a container id is safe as a path component.
pub(super) fn check(id: &str) -> Result<()> {
    let first = id.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    let rest = id.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
    if first && rest && (2..=255).contains(&id.len()) && !RESERVED.contains(&id) {
        return Ok(());
    }
    let id: String = id.chars().take(80).collect();
    Err(Error::invalid(format!(
        "container id {id:?} is invalid: use 2 to 255 letters, digits, '_', '.', '-', the first a letter or digit; not {RESERVED:?}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_that_are_not_plain_names_are_rejected() {
        for good in ["a1", "0b", "k8s_pause.1-x", &"x".repeat(255)] {
            check(good).unwrap();
        }
        for bad in ["", "a", ".a", "-a", "a/b", "../a", "a b", "ä1", "shared", &"x".repeat(256)] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn accepted_id_is_one_path_component(id in "\\PC{0,20}") {
            if check(&id).is_ok() {
                let path = std::path::Path::new("/x").join(&id);
                prop_assert_eq!(path.parent(), Some(std::path::Path::new("/x")));
                prop_assert!(id != "." && id != "..");
            }
        }
    }
}
