//! Extensions: disks that are mounted beside a guest's root, under Kata's names.

/// What an extension's serial number on virtio-blk begins with.
const SERIAL: &str = "extension-";

/// A serial number on virtio-blk has room for this many bytes of a name.
pub const LONGEST: usize = 10;

/// The directory below which a guest mounts them, each in a directory of its name.
pub const DIRECTORY: &str = "/run/kata-extensions";

/// What stands before and behind the name in the kernel parameter.
const PARAMETER: (&str, &str) = ("kata.extension.", ".verity_params");

/// Why a text names no extension.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is 1 to {LONGEST} of a-z, 0-9, - and _")]
pub struct NoName;

/// Whether an extension can have that name, which is part of a serial number and of a path.
///
/// # Errors
/// It is empty, too long, or has other characters.
pub fn check(name: &str) -> Result<(), NoName> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    if (1..=LONGEST).contains(&name.len()) && name.bytes().all(plain) { Ok(()) } else { Err(NoName) }
}

/// The serial number of an extension's device.
#[must_use]
pub fn serial(name: &str) -> String {
    format!("{SERIAL}{name}")
}

/// The extension of which a device's serial number speaks, whatever its name is worth.
#[must_use]
pub fn of_serial(serial: &str) -> Option<&str> {
    serial.strip_prefix(SERIAL)
}

/// The kernel parameter that tells a guest of an extension.
#[must_use]
pub fn parameter(name: &str) -> String {
    format!("{}{name}{}", PARAMETER.0, PARAMETER.1)
}

/// The extension of which a kernel parameter speaks, whatever its name is worth.
/// As in all names of parameters `-` and `_` are the same behind it.
#[must_use]
pub fn of_parameter(parameter: &str) -> Option<&str> {
    let rest = parameter.strip_prefix(PARAMETER.0)?;
    let at = rest.len().checked_sub(PARAMETER.1.len())?;
    (rest.get(at..)?.replace('-', "_") == PARAMETER.1).then_some(&rest[..at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_plain_and_short() {
        for good in ["gpu", "a", "0-_z", "abcdefghij"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "abcdefghijk", "GPU", "a.b", "a/b", "..", "a b", "\u{e4}", "a\0"] {
            assert_eq!(check(bad), Err(NoName), "{bad:?}");
        }
        assert_eq!(serial(&"x".repeat(LONGEST)).len(), 20, "what virtio-blk has room for");
    }

    #[test]
    fn parameters_and_serial_numbers_say_whose_they_are() {
        assert_eq!(parameter("gpu"), "kata.extension.gpu.verity_params");
        assert_eq!(of_parameter("kata.extension.gpu.verity-params"), Some("gpu"));
        assert_eq!(of_parameter("kata.extension.a.b.verity_params"), Some("a.b"));
        assert_eq!(of_parameter("kata.extension..verity_params"), Some(""));
        for other in ["kata.extension.gpu", "kata.extension.verity_params", "kata.extension.gpu.verity_param", "x"] {
            assert_eq!(of_parameter(other), None, "{other}");
        }
        assert_eq!((of_serial("extension-gpu"), of_serial("disk0")), (Some("gpu"), None));
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in "\\PC{0,12}", any in "\\PC{0,40}") {
            let (parameter, serial) = (parameter(&name), serial(&name));
            prop_assert_eq!(of_parameter(&parameter), Some(name.as_str()));
            prop_assert_eq!(of_serial(&serial), Some(name.as_str()));
            let _ = of_parameter(&format!("kata.extension.{any}"));
            if check(&name).is_ok() {
                prop_assert!(!name.contains(['/', '.', ' ']) && serial.len() <= 20);
            }
        }
    }
}
