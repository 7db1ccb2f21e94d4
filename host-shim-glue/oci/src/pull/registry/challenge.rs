//! Authentication challenges of registries: `WWW-Authenticate` (RFC 9110), and the token
//! services of docker's registry protocol. All of it is untrusted input.

use serde::Deserialize;

/// A challenge: an authentication scheme with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    /// The scheme in lower case.
    scheme: String,
    /// Parameters, their names in lower case.
    parameters: Vec<(String, String)>,
}

impl Challenge {
    /// Returns whether this challenge has the given scheme, which is in lower case.
    pub(crate) fn has_scheme(&self, scheme: &str) -> bool {
        self.scheme == scheme
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the URL that returns a token for pulling from `repository`.
    pub(crate) fn token_url(&self, repository: &str) -> Option<String> {
        let realm = self.parameter("realm").filter(|realm| is_url(realm))?;
        let separator = if realm.contains('?') { '&' } else { '?' };
        let mut url = format!("{realm}{separator}");
        if let Some(service) = self.parameter("service") {
            url.push_str(&format!("service={}&", percent_encode(service)));
        }
        // Not the requested scope, which may permit more than this pull.
        url.push_str(&format!("scope={}", percent_encode(&format!("repository:{repository}:pull"))));
        Some(url)
    }
}

fn is_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/'))
        && text.bytes().all(|b| b.is_ascii_graphic())
        && !text.contains('#')
}

fn percent_encode(text: &str) -> String {
    let encode_byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => char::from(b).to_string(),
        _ => format!("%{b:02X}"),
    };
    text.bytes().map(encode_byte).collect()
}

fn is_token_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)
}

/// Parses the challenges of one header, up to the first syntax error.
pub(crate) fn parse(text: &str) -> Vec<Challenge> {
    let mut all: Vec<Challenge> = Vec::new();
    let mut rest = text.trim_start();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let length = rest.bytes().take_while(|b| is_token_byte(*b)).count();
        if length == 0 {
            return all;
        }
        let (word, after) = rest.split_at(length);
        let word = word.to_ascii_lowercase();
        // A token before `=` is a parameter; another one starts a challenge.
        match (after.trim_start().strip_prefix('='), all.last_mut()) {
            (Some(after), Some(challenge)) => {
                let Some((value, after)) = parse_value(after.trim_start()) else { return all };
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

/// Parses a token or a quoted string; returns its value and the rest.
fn parse_value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let length = text.bytes().take_while(|b| is_token_byte(*b)).count();
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
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
}

/// Returns the token in the response of a token service. It becomes the value of a header,
/// so only visible ASCII characters are accepted.
pub(crate) fn parse_token(bytes: &[u8]) -> Option<String> {
    let response: TokenResponse = serde_json::from_slice(bytes).ok()?;
    let token = response.token.filter(|token| !token.is_empty()).or(response.access_token)?;
    (!token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic())).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn challenges_are_parsed() {
        let header = r#"Bearer realm="https://auth.example/token",service="a \"b\"",scope="repository:x:pull,push", Basic realm=r"#;
        let all = parse(header);
        assert!(all.len() == 2 && all[0].has_scheme("bearer") && all[1].has_scheme("basic"), "{all:?}");
        assert_eq!(
            all[0].token_url("a/b").unwrap(),
            "https://auth.example/token?service=a%20%22b%22&scope=repository:a/b:pull"
        );
        assert_eq!(parse("Basic realm=\"x\"")[0].parameter("realm"), Some("x"));
        for malformed in ["", "=", "a=b", "\"x\"", "realm=\"x\""] {
            assert_eq!(parse(malformed), [], "{malformed:?}");
        }
        for realm in ["", "file:///etc/passwd", "https://", "http:///x", "https://a b", "https://a#b"] {
            let url = parse(&format!("Bearer realm=\"{realm}\"")).first().and_then(|one| one.token_url("x"));
            assert_eq!(url, None, "{realm}");
        }
    }

    #[test]
    fn token_that_is_not_a_valid_header_is_refused() {
        assert_eq!(parse_token(br#"{"token":"a.b-c"}"#).as_deref(), Some("a.b-c"));
        assert_eq!(parse_token(br#"{"token":"","access_token":"x"}"#).as_deref(), Some("x"));
        for invalid in [&br#"{"token":"a\nHost: b"}"#[..], b"{}", b"", br#"{"token":""}"#, br#"{"token":7}"#] {
            assert_eq!(parse_token(invalid), None);
        }
    }

    proptest! {
        #[test]
        fn token_url_of_any_header_is_a_valid_url(text in "([a-zA-Z =,\"\\\\:/?é]|realm=\"https://|Bearer ){0,20}") {
            for challenge in parse(&text) {
                if let Some(url) = challenge.token_url("x") {
                    prop_assert!(url.is_ascii() && url.starts_with("http") && !url.contains([' ', '"', '\n']));
                }
            }
        }
    }
}
