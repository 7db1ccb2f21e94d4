//! Policies, what they result in, and the requests that they see.

#![expect(clippy::panic, reason = "a target panics where it cannot do its work")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use firstlight_policy::engine::Engine;
use firstlight_policy::{PolicyError, requests};
use serde_json::json;

/// What is said of a policy goes into one line of an answer.
const LONGEST: usize = 64 * 1024;

/// Deeper brackets cost the engine its stack; its process is there for that.
const NESTING: usize = 64;

/// Which message, then its bytes.
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

/// A message becomes JSON that can be read, or an error.
pub(super) fn request(bytes: &[u8]) {
    let Some((which, message)) = bytes.split_first() else { return };
    let names: Vec<_> = requests::names().collect();
    let name = names.get(usize::from(*which) % names.len()).copied().unwrap_or_default();
    if let Ok(json) = requests::json(name, message) {
        assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{name}: {json}");
    }
}

/// A text is a policy, or a fault in one line. That the engine panics is borne
/// by its process, and is not what is looked for here.
pub(super) fn load(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    if deepest(&text) > NESTING {
        return;
    }
    let load = || Engine::load(text, json!({}), Duration::from_millis(100)).map(drop);
    if let Ok(Err(PolicyError::InvalidPolicy(why) | PolicyError::Evaluator(why))) = catch_unwind(AssertUnwindSafe(load))
    {
        assert!(!why.is_empty() && !why.contains('\n') && why.len() < LONGEST, "{why:?}");
    }
}

fn deepest(text: &str) -> usize {
    let opened = text.bytes().filter(|byte| matches!(byte, b'(' | b'[' | b'{')).count();
    let signs = text.bytes().filter(|byte| matches!(byte, b'-' | b'+' | b'*' | b'/' | b'.')).count();
    opened.max(signs)
}

/// Whatever a rule results in, the memory stays what can be given back to the engine.
pub(super) fn result(bytes: &[u8]) {
    let Ok(result) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
    let memory = json!({"o": {}, "a": [1, 2]});
    // The rule hands out its input, so that the text need not be parsed again for each result.
    let policy = "package agent_policy\nX := input\n".to_owned();
    let Ok(mut engine) = Engine::load(policy, memory, Duration::from_secs(1)) else { panic!("no engine") };
    for _ in 0..2 {
        let verdict = engine.evaluate("X", &result.to_string());
        assert!(verdict.text.len() < LONGEST && engine.state().to_string().len() <= 4 << 20);
    }
}
