//! How a registry asks who we are (RFC 9110, and docker's tokens).

use serde::Deserialize;

/// One way that is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    /// In lower case.
    scheme: String,
    /// Names in lower case.
    parameters: Vec<(String, String)>,
}

impl Challenge {
    pub(crate) fn is(&self, scheme: &str) -> bool {
        self.scheme == scheme
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Where a token that lets one pull from repository `name` is had.
    pub(crate) fn token_url(&self, name: &str) -> Option<String> {
        let realm = self.parameter("realm").filter(|realm| is_url(realm))?;
        let separator = if realm.contains('?') { '&' } else { '?' };
        let mut url = format!("{realm}{separator}");
        if let Some(service) = self.parameter("service") {
            url.push_str(&format!("service={}&", encoded(service)));
        }
        // Not what it asks for: a token that does more than this pull is not wanted.
        url.push_str(&format!("scope={}", encoded(&format!("repository:{name}:pull"))));
        Some(url)
    }
}

fn is_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/'))
        && text.bytes().all(|b| b.is_ascii_graphic())
        && !text.contains('#')
}

fn encoded(text: &str) -> String {
    let one = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => char::from(b).to_string(),
        _ => format!("%{b:02X}"),
    };
    text.bytes().map(one).collect()
}

fn is_token(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)
}

/// The challenges of one header. What cannot be read ends the list.
pub(crate) fn read(text: &str) -> Vec<Challenge> {
    let mut all: Vec<Challenge> = Vec::new();
    let mut rest = text.trim_start();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let length = rest.bytes().take_while(|b| is_token(*b)).count();
        if length == 0 {
            return all;
        }
        let (word, after) = rest.split_at(length);
        let word = word.to_ascii_lowercase();
        // A word before `=` is a parameter; another one begins a challenge.
        match (after.trim_start().strip_prefix('='), all.last_mut()) {
            (Some(after), Some(challenge)) => {
                let Some((value, after)) = value(after.trim_start()) else { return all };
                challenge.parameters.push((word, value));
                rest = after;
            }
            (Some(_), None) => return all,
            (None, _) => {
                all.push(Challenge { scheme: word, parameters: Vec::new() });
                rest = after;
            }
        }
    }
}

/// A word or a quoted text, and what follows.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let length = text.bytes().take_while(|b| is_token(*b)).count();
        return (length > 0).then(|| (text[..length].to_owned(), &text[length..]));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// The token in the answer of a token service. It becomes a header, so it must
/// be able to.
pub(crate) fn token(bytes: &[u8]) -> Option<String> {
    let answer: Token = serde_json::from_slice(bytes).ok()?;
    let given = answer.token.filter(|token| !token.is_empty()).or(answer.access_token)?;
    (!given.is_empty() && given.bytes().all(|b| b.is_ascii_graphic())).then_some(given)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn challenges_are_read() {
        let header = r#"Bearer realm="https://auth.example/token",service="a \"b\"",scope="repository:x:pull,push", Basic realm=r"#;
        let all = read(header);
        assert!(all.len() == 2 && all[0].is("bearer") && all[1].is("basic"), "{all:?}");
        assert_eq!(
            all[0].token_url("a/b").unwrap(),
            "https://auth.example/token?service=a%20%22b%22&scope=repository:a/b:pull"
        );
        assert_eq!(read("Basic realm=\"x\"")[0].parameter("realm"), Some("x"));
        for nothing in ["", "=", "a=b", "\"x\"", "realm=\"x\""] {
            assert_eq!(read(nothing), [], "{nothing:?}");
        }
        for realm in ["", "file:///etc/passwd", "https://", "http:///x", "https://a b", "https://a#b"] {
            let url = read(&format!("Bearer realm=\"{realm}\"")).first().and_then(|one| one.token_url("x"));
            assert_eq!(url, None, "{realm}");
        }
    }

    #[test]
    fn tokens_are_what_a_header_can_have() {
        assert_eq!(token(br#"{"token":"a.b-c"}"#).as_deref(), Some("a.b-c"));
        assert_eq!(token(br#"{"token":"","access_token":"x"}"#).as_deref(), Some("x"));
        for wrong in [&br#"{"token":"a\nHost: b"}"#[..], b"{}", b"", br#"{"token":""}"#, br#"{"token":7}"#] {
            assert_eq!(token(wrong), None);
        }
    }

    proptest! {
        #[test]
        fn any_header_is_read(text in "([a-zA-Z =,\"\\\\:/?é]|realm=\"https://|Bearer ){0,20}") {
            for challenge in read(&text) {
                if let Some(url) = challenge.token_url("x") {
                    prop_assert!(url.is_ascii() && url.starts_with("http") && !url.contains([' ', '"', '\n']));
                }
            }
        }
    }
}
