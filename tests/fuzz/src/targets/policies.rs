//! Policies, results of their rules, and the requests that they evaluate.

#![expect(clippy::panic, reason = "a target panics if the engine does not load")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use firstlight_policy::engine::Engine;
use firstlight_policy::{PolicyError, requests};
use serde_json::json;

/// Longest message about a policy: it is one line of a reply.
const MAX_MESSAGE_BYTES: usize = 64 * 1024;

/// Deeper nesting overflows the engine's stack, which is why the engine has its own process.
const MAX_NESTING: usize = 64;

/// The message's index, then its encoded bytes.
pub(super) const REQUESTS: &[&[u8]] = &[
    b"\x04\x0a\x02c1\x12\x01e\x1a\x03\x1a\x017\x32\x0b\x0a\x011\x3a\x06\x0a\x01k\x12\x01v\x38\x01",
    b"\x23\x0a\x0e\x12\x04eth0\x1a\x02\x08\x01\x20\xdc\x0b",
    b"\x28\x0a\x02/x\x18\xff\xc3\x02\x42\x01y",
];

pub(super) const TEXTS: &[&[u8]] = &[
    b"package agent_policy\nimport rego.v1\ndefault A := false\nA if { some i, x in input.y; x == i + 1 }\n",
    b"package agent_policy\nf(x) := y if y := x * 2\nB := {\"allowed\": true, \"ops\": []} if f(1) == 2\n",
    b"package agent_policy\nC contains x if { x := input.a[_]; not x.b }\nD := `raw` \n# comment\nE := [x | x := 1]\n",
];

/// Results of a rule, in a policy whose memory has an object and an array.
pub(super) const RESULTS: &[&[u8]] = &[
    br#"{"allowed": true, "ops": [{"op": "add", "path": "/pstate/o/k", "value": {"a": [1, null]}}]}"#,
    br#"{"allowed": true, "ops": [{"op": "remove", "path": "/pstate/a/0"}, {"op": "test", "path": "/pstate/a/0", "value": 2}]}"#,
    br#"{"allowed": true, "ops": [{"op": "replace", "path": "/pstate/a/-", "value": 1}, {"op": "add", "path": "/pstate/a/-", "value": "~1~0"}]}"#,
];

/// A message is converted to valid JSON or rejected.
pub(super) fn request(bytes: &[u8]) {
    let Some((which, message)) = bytes.split_first() else { return };
    let names: Vec<_> = requests::names().collect();
    let name = names.get(usize::from(*which) % names.len()).copied().unwrap_or_default();
    if let Ok(json) = requests::json(name, message) {
        assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{name}: {json}");
    }
}

/// A text loads as a policy or is rejected with a one-line message. Panics of the
/// engine are contained by its process and not searched for here.
pub(super) fn load(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    if nesting_bound(&text) > MAX_NESTING {
        return;
    }
    let load = || Engine::load(text, json!({}), Duration::from_millis(100)).map(drop);
    if let Ok(Err(PolicyError::InvalidPolicy(why) | PolicyError::Evaluator(why))) = catch_unwind(AssertUnwindSafe(load))
    {
        assert!(!why.is_empty() && !why.contains('\n') && why.len() < MAX_MESSAGE_BYTES, "{why:?}");
    }
}

/// Returns an upper bound of a text's nesting.
fn nesting_bound(text: &str) -> usize {
    let opened = text.bytes().filter(|byte| matches!(byte, b'(' | b'[' | b'{')).count();
    let signs = text.bytes().filter(|byte| matches!(byte, b'-' | b'+' | b'*' | b'/' | b'.')).count();
    opened.max(signs)
}

/// After any result of a rule, the policy's state stays within its size limit.
pub(super) fn result(bytes: &[u8]) {
    let Ok(result) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
    let memory = json!({"o": {}, "a": [1, 2]});
    // The rule returns its input, so that one policy text serves every result.
    let policy = "package agent_policy\nX := input\n".to_owned();
    let Ok(mut engine) = Engine::load(policy, memory, Duration::from_secs(1)) else { panic!("no engine") };
    for _ in 0..2 {
        let verdict = engine.evaluate("X", &result.to_string());
        assert!(verdict.text.len() < MAX_MESSAGE_BYTES && engine.state().to_string().len() <= 4 << 20);
    }
}
