//! Extension names: disks mounted beside a guest's root, named as by Kata.

/// Prefix of an extension's virtio-blk serial number.
const SERIAL: &str = "extension-";

/// Longest extension name, bytes: the rest of a 20-byte virtio-blk serial number.
pub const MAX_NAME: usize = 10;

/// The directory below which a guest mounts extensions, each in a directory of its name.
pub const DIRECTORY: &str = "/run/kata-extensions";

/// Prefix and suffix of the name in the kernel parameter.
const PARAMETER: (&str, &str) = ("kata.extension.", ".verity_params");

/// The text is not a valid extension name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid extension name; expected 1 to {MAX_NAME} of a-z, 0-9, - and _")]
pub struct InvalidName;

/// Checks an extension name, which becomes part of a serial number and of a path.
///
/// # Errors
/// It is empty, too long, or has other characters.
pub fn check(name: &str) -> Result<(), InvalidName> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain) { Ok(()) } else { Err(InvalidName) }
}

/// Returns the serial number of an extension's device.
#[must_use]
pub fn serial(name: &str) -> String {
    format!("{SERIAL}{name}")
}

/// Returns the extension name in a device's serial number, unchecked.
#[must_use]
pub fn name_from_serial(serial: &str) -> Option<&str> {
    serial.strip_prefix(SERIAL)
}

/// Returns the kernel parameter of an extension.
#[must_use]
pub fn parameter(name: &str) -> String {
    format!("{}{name}{}", PARAMETER.0, PARAMETER.1)
}

/// Returns the extension name in a kernel parameter, unchecked. In the suffix, `-`
/// and `_` are equivalent, as in all parameter names.
#[must_use]
pub fn name_from_parameter(parameter: &str) -> Option<&str> {
    let rest = parameter.strip_prefix(PARAMETER.0)?;
    let at = rest.len().checked_sub(PARAMETER.1.len())?;
    (rest.get(at..)?.replace('-', "_") == PARAMETER.1).then_some(&rest[..at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_short_and_of_safe_characters() {
        for good in ["gpu", "a", "0-_z", "abcdefghij"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "abcdefghijk", "GPU", "a.b", "a/b", "..", "a b", "\u{e4}", "a\0"] {
            assert_eq!(check(bad), Err(InvalidName), "{bad:?}");
        }
        assert_eq!(serial(&"x".repeat(MAX_NAME)).len(), 20, "the limit of virtio-blk");
    }

    #[test]
    fn parameters_and_serial_numbers_name_their_extension() {
        assert_eq!(parameter("gpu"), "kata.extension.gpu.verity_params");
        assert_eq!(name_from_parameter("kata.extension.gpu.verity-params"), Some("gpu"));
        assert_eq!(name_from_parameter("kata.extension.a.b.verity_params"), Some("a.b"));
        assert_eq!(name_from_parameter("kata.extension..verity_params"), Some(""));
        for other in ["kata.extension.gpu", "kata.extension.verity_params", "kata.extension.gpu.verity_param", "x"] {
            assert_eq!(name_from_parameter(other), None, "{other}");
        }
        assert_eq!((name_from_serial("extension-gpu"), name_from_serial("disk0")), (Some("gpu"), None));
    }

    proptest! {
        #[test]
        fn names_round_trip(name in "\\PC{0,12}", any in "\\PC{0,40}") {
            let (parameter, serial) = (parameter(&name), serial(&name));
            prop_assert_eq!(name_from_parameter(&parameter), Some(name.as_str()));
            prop_assert_eq!(name_from_serial(&serial), Some(name.as_str()));
            let _ = name_from_parameter(&format!("kata.extension.{any}"));
            if check(&name).is_ok() {
                prop_assert!(!name.contains(['/', '.', ' ']) && serial.len() <= 20);
            }
        }
    }
}
