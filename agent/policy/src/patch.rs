//! The JSON patch (RFC 6902) by which a policy changes its state.
//!
//! Supports `add`, `remove`, `replace` and `test`, the operations that policies use, on paths below `/pstate`.

use serde::Deserialize;
use serde_json::Value;

/// The root of the state.
const ROOT: &str = "/pstate";

/// The largest state of a policy, bytes of JSON.
const MAX_STATE: usize = 4 * 1024 * 1024;

/// One patch operation.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub(crate) enum Step {
    /// Sets an object member, or inserts an array element.
    Add { path: String, value: Value },
    /// Removes an existing value.
    Remove { path: String },
    /// Replaces an existing value.
    Replace { path: String, value: Value },
    /// Fails unless the existing value equals this one.
    Test { path: String, value: Value },
}

/// Returns the state after all operations.
///
/// # Errors
/// An operation fails; then nothing has changed.
pub(crate) fn patched(state: &Value, steps: &[Step]) -> Result<Value, String> {
    // Wrapped, so that the whole state can be replaced too.
    let mut document = serde_json::json!({ "pstate": state });
    for step in steps {
        apply(&mut document, step).map_err(|why| format!("the policy's {step:?}: {why}"))?;
    }
    let state = document.get_mut("pstate").map(Value::take).ok_or("the policy's patch removes its state")?;
    let length = state.to_string().len();
    if length > MAX_STATE {
        return Err(format!("the policy's state would be {length} bytes; the limit is {MAX_STATE}"));
    }
    Ok(state)
}

fn apply(document: &mut Value, step: &Step) -> Result<(), String> {
    let (Step::Add { path, .. } | Step::Remove { path } | Step::Replace { path, .. } | Step::Test { path, .. }) = step;
    if path != ROOT && !path.starts_with("/pstate/") {
        return Err(format!("the path is not below {ROOT}"));
    }
    match step {
        Step::Test { path, value } => match document.pointer(path) {
            Some(found) if found == value => Ok(()),
            _ => Err("the value differs".into()),
        },
        Step::Replace { path, value } => {
            let place = document.pointer_mut(path).ok_or("no such value")?;
            *place = value.clone();
            Ok(())
        }
        Step::Add { path, value } => {
            let (parent, key) = parent(document, path)?;
            add(parent, key, value.clone())
        }
        Step::Remove { path } => {
            let (parent, key) = parent(document, path)?;
            remove(parent, key)
        }
    }
}

/// Returns the object or array that contains a path's value, and its key there.
fn parent<'a>(document: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, key) = path.rsplit_once('/').ok_or("invalid path")?;
    let container = document.pointer_mut(parent).ok_or("no such parent")?;
    Ok((container, key.replace("~1", "/").replace("~0", "~")))
}

fn add(container: &mut Value, key: String, value: Value) -> Result<(), String> {
    match container {
        Value::Object(members) => drop(members.insert(key, value)),
        Value::Array(elements) if key == "-" => elements.push(value),
        Value::Array(elements) => {
            let at = index(&key, elements.len().saturating_add(1))?;
            elements.insert(at, value);
        }
        _ => return Err("neither object nor array".into()),
    }
    Ok(())
}

fn remove(container: &mut Value, key: String) -> Result<(), String> {
    match container {
        Value::Object(members) => members.remove(&key).map(drop).ok_or_else(|| "no such value".into()),
        Value::Array(elements) => {
            let at = index(&key, elements.len())?;
            elements.remove(at);
            Ok(())
        }
        _ => Err("neither object nor array".into()),
    }
}

/// Parses an array index without leading zeros, below `end`.
fn index(key: &str, end: usize) -> Result<usize, String> {
    let plain = key == "0" || !key.starts_with(['0', '+']);
    key.parse().ok().filter(|index| plain && *index < end).ok_or_else(|| "no such element".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn after(state: Value, steps: Value) -> Result<Value, String> {
        let steps: Vec<Step> = serde_json::from_value(steps).unwrap();
        patched(&state, &steps)
    }

    #[test]
    fn members_and_elements_are_added_removed_and_replaced() {
        for (state, steps, expected) in [
            (json!({}), json!([{"op": "add", "path": "/pstate/a", "value": 1}]), json!({"a": 1})),
            (json!({"a": 1}), json!([{"op": "add", "path": "/pstate/a", "value": 2}]), json!({"a": 2})),
            (json!({"a": 1}), json!([{"op": "replace", "path": "/pstate/a", "value": [3]}]), json!({"a": [3]})),
            (json!({"a": 1}), json!([{"op": "remove", "path": "/pstate/a"}]), json!({})),
            (json!({"a": [1, 3]}), json!([{"op": "add", "path": "/pstate/a/1", "value": 2}]), json!({"a": [1, 2, 3]})),
            (json!({"a": [1]}), json!([{"op": "add", "path": "/pstate/a/-", "value": 2}]), json!({"a": [1, 2]})),
            (json!({"a": [1, 2]}), json!([{"op": "remove", "path": "/pstate/a/0"}]), json!({"a": [2]})),
            (json!({}), json!([{"op": "add", "path": "/pstate/x~1y~0", "value": 0}]), json!({"x/y~": 0})),
            (json!({"a": 1}), json!([{"op": "add", "path": "/pstate", "value": {"b": 2}}]), json!({"b": 2})),
            (json!({"a": 1}), json!([{"op": "test", "path": "/pstate/a", "value": 1}]), json!({"a": 1})),
        ] {
            assert_eq!(after(state, steps.clone()), Ok(expected), "{steps}");
        }
    }

    #[test]
    fn invalid_operations_fail_the_whole_patch() {
        for steps in [
            json!([{"op": "add", "path": "/pstate/ok", "value": 1}, {"op": "remove", "path": "/pstate/none"}]),
            json!([{"op": "add", "path": "/agent_policy/x", "value": 1}]),
            json!([{"op": "add", "path": "/pstatex", "value": 1}]),
            json!([{"op": "add", "path": "", "value": 1}]),
            json!([{"op": "remove", "path": "/pstate"}]),
            json!([{"op": "replace", "path": "/pstate/none", "value": 1}]),
            json!([{"op": "add", "path": "/pstate/none/x", "value": 1}]),
            json!([{"op": "add", "path": "/pstate/a/4", "value": 1}]),
            json!([{"op": "add", "path": "/pstate/a/01", "value": 1}]),
            json!([{"op": "add", "path": "/pstate/a/+1", "value": 1}]),
            json!([{"op": "remove", "path": "/pstate/a/-"}]),
            json!([{"op": "test", "path": "/pstate/a", "value": 1}]),
        ] {
            assert!(after(json!({"a": [1, 2]}), steps.clone()).is_err(), "{steps}");
        }
    }

    #[test]
    fn state_beyond_the_limit_is_refused() {
        let much = "x".repeat(MAX_STATE);
        assert!(after(json!({}), json!([{"op": "add", "path": "/pstate/a", "value": much}])).is_err());
    }
}
