//! Digests: the type of oci-spec, restricted to SHA-256.
//!
//! oci-spec accepts digests of every algorithm, also of unknown ones. Blobs are
//! verified with SHA-256 alone, so [`check`] refuses all others where a document or a
//! reference is parsed. The grammar of oci-spec permits neither `/` nor `.` after the
//! colon, and 64 lower-case hexadecimal digits for SHA-256: this part is a plain file
//! name.

use std::str::FromStr;

use oci_spec::image::{Digest, DigestAlgorithm, Sha256Digest};

use super::error::{PullError, RECREATE, clipped, invalid};

/// Parses an untrusted digest.
pub(crate) fn parse(text: &str) -> Result<Digest, String> {
    let digest = Digest::from_str(text).map_err(|error| format!("invalid digest {:?}: {error}", clipped(text)))?;
    check(&digest)?;
    Ok(digest)
}

/// Refuses digests of other algorithms than SHA-256.
pub(crate) fn check(digest: &Digest) -> Result<(), String> {
    match digest.algorithm() {
        DigestAlgorithm::Sha256 => Ok(()),
        _ => Err(format!("unsupported digest {:?}: only sha256 is supported", clipped(digest.as_ref()))),
    }
}

/// Returns the digest of a computed SHA-256, 64 hexadecimal digits.
pub(crate) fn from_sha256(hex: &str) -> Result<Digest, PullError> {
    let digest =
        Sha256Digest::from_str(hex).map_err(|error| invalid(hex, "make a digest", error.to_string(), RECREATE));
    Ok(digest?.into())
}

/// Returns the first digits of a digest, enough to tell blobs apart in a log.
pub(crate) fn short(digest: &Digest) -> &str {
    digest.digest().get(..12).unwrap_or(digest.digest())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_algorithms_are_refused() {
        let sha256 = format!("sha256:{}", "a".repeat(64));
        assert_eq!(short(&parse(&sha256).unwrap()), "aaaaaaaaaaaa");
        assert!(parse(&format!("sha512:{}", "a".repeat(128))).unwrap_err().contains("only sha256"));
        assert!(parse("xxhash:42").unwrap_err().contains("only sha256"));
        for malformed in [&sha256[..70], &sha256.to_uppercase(), "sha256:", "../x", ""] {
            assert!(parse(malformed).unwrap_err().contains("invalid digest"), "{malformed}");
        }
        assert_eq!(from_sha256(&sha256[7..]).unwrap().to_string(), sha256);
        assert!(from_sha256("aa").is_err());
    }

    proptest! {
        #[test]
        fn accepted_digest_is_a_plain_file_name(text in "sha256:[0-9a-fA-F./]{60,68}") {
            if let Ok(digest) = parse(&text) {
                let hex = digest.digest();
                prop_assert!(hex.bytes().all(|b| b.is_ascii_hexdigit()) && hex.len() == 64);
                prop_assert_eq!(digest.to_string(), text);
            }
        }
    }
}
