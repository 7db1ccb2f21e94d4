//! Shell patterns, as in `modules.alias`.

use super::name::fold;

/// Returns whether `pattern` matches the whole of `text`.
///
/// `*` matches any string, `?` one byte, `[a-z]` one byte of a class, `[!a-z]` one byte outside of
/// it. Outside of classes `-` and `_` are equal. A class without an end matches nothing. Only the
/// last `*` is ever retried, so the run time is at most proportional to the product of both
/// lengths, without recursion.
#[must_use]
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut in_pattern, mut in_text) = (0, 0);
    // Positions after the last star: in the pattern, and in the text at its last attempt.
    let mut star: Option<(usize, usize)> = None;
    loop {
        let rest = pattern.get(in_pattern..).unwrap_or_default();
        if rest.first() == Some(&b'*') {
            in_pattern += 1;
            star = Some((in_pattern, in_text));
            continue;
        }
        match text.get(in_text) {
            None => return rest.is_empty(),
            Some(byte) => match one(rest, *byte) {
                Some(length) => (in_pattern, in_text) = (in_pattern + length, in_text + 1),
                None => match &mut star {
                    Some((behind, from)) => {
                        *from += 1;
                        (in_pattern, in_text) = (*behind, *from);
                    }
                    None => return false,
                },
            },
        }
    }
}

/// Returns the length of the pattern's first element if it matches this byte.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern {
        [] => None,
        [b'?', ..] => Some(1),
        [b'[', ..] => class(pattern, byte),
        [b'\\', escaped, ..] => (fold(escaped) == fold(byte)).then_some(2),
        [plain, ..] => (fold(plain) == fold(byte)).then_some(1),
    }
}

/// Returns the length of the class at the pattern's start if the class contains this byte.
fn class(pattern: &[u8], byte: u8) -> Option<usize> {
    let not = matches!(pattern.get(1), Some(b'!' | b'^'));
    let first = if not { 2 } else { 1 };
    let (mut at, mut has) = (first, false);
    loop {
        match *pattern.get(at..)? {
            // A `]` directly after the opening bracket is a member.
            [b']', ..] if at > first => return (has != not).then_some(at + 1),
            [low, b'-', high, ..] if high != b']' => {
                has |= (low..=high).contains(&byte);
                at += 3;
            }
            [member, ..] => {
                has |= member == byte;
                at += 1;
            }
            [] => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_match_as_in_the_shell() {
        for (pattern, text, expected) in [
            ("pci:v00001AF4d*sv*sd*bc*sc*i*", "pci:v00001AF4d00001041sv00001AF4sd00001100bc02sc00i00", true),
            ("pci:v00001AF4d*sv*sd*bc*sc*i*", "pci:v000010DEd00002335sv000010DEsd000018BEbc03sc02i00", false),
            ("pci:v*d*sv*sd*bc01sc08i02*", "pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02", true),
            ("virtio:d00000001v*", "virtio:d00000001v00001AF4", true),
            ("fs-xfs", "fs_xfs", true),
            ("a[0-9]c", "a5c", true),
            ("a[0-9]c", "axc", false),
            ("a[!0-9]c", "axc", true),
            ("a[]x]c", "a]c", true),
            ("a[b-]c", "a-c", true),
            ("a[b", "ab", false),
            ("a?", "a", false),
            ("a\\*", "a*", true),
            ("a\\*", "ab", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("**a**", "bab", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn many_wildcards_are_matched_in_bounded_time() {
        // With backtracking at each star this would take 2^40 steps.
        let (pattern, text) = ("a*".repeat(100) + "b", "a".repeat(256));
        assert!(!matches(&pattern, &text));
    }

    /// Reference implementation by recursion, of exponential run time.
    fn plainly(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|at| plainly(rest, &text[at..])),
            _ => text
                .first()
                .is_some_and(|byte| one(pattern, *byte).is_some_and(|length| plainly(&pattern[length..], &text[1..]))),
        }
    }

    proptest! {
        #[test]
        fn matcher_equals_the_reference(pattern in "[ab*?\\[\\]!\\\\_-]{0,9}", text in "[ab_-]{0,7}") {
            prop_assert_eq!(matches(&pattern, &text), plainly(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn matching_any_pattern_ends(pattern in any::<String>(), text in any::<String>()) {
            let _ = matches(&pattern, &text);
        }

        #[test]
        fn pattern_without_wildcards_matches_itself(text in "[a-z0-9:_]{0,30}") {
            prop_assert!(matches(&text, &text));
        }
    }
}
