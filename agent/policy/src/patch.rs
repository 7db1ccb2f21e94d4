//! The JSON patch (RFC 6902) by which a policy changes its memory.
//!
//! `add`, `remove`, `replace` and `test`, which is what policies use; nothing
//! outside `/pstate` can be named.

use serde::Deserialize;
use serde_json::Value;

/// The root of everything that may be changed.
const ROOT: &str = "/pstate";

/// The largest memory of a policy, bytes of JSON.
const MAX_STATE: usize = 4 * 1024 * 1024;

/// One step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub(crate) enum Step {
    /// Sets a member of an object, or puts an element into an array.
    Add { path: String, value: Value },
    /// Takes out what is there.
    Remove { path: String },
    /// Changes what is there.
    Replace { path: String, value: Value },
    /// Fails unless that is what is there.
    Test { path: String, value: Value },
}

/// The memory after all steps.
///
/// # Errors
/// A step cannot be done; nothing has changed then.
pub(crate) fn patched(state: &Value, steps: &[Step]) -> Result<Value, String> {
    // One document, so that the memory as a whole can be replaced too.
    let mut document = serde_json::json!({ "pstate": state });
    for step in steps {
        apply(&mut document, step).map_err(|why| format!("the policy's {step:?}: {why}"))?;
    }
    let state = document.get_mut("pstate").map(Value::take).ok_or("the policy's patch removes its memory")?;
    let length = state.to_string().len();
    if length > MAX_STATE {
        return Err(format!("the policy's memory would be {length} bytes, {MAX_STATE} is the most"));
    }
    Ok(state)
}

fn apply(document: &mut Value, step: &Step) -> Result<(), String> {
    let (Step::Add { path, .. } | Step::Remove { path } | Step::Replace { path, .. } | Step::Test { path, .. }) = step;
    if path != ROOT && !path.starts_with("/pstate/") {
        return Err(format!("not below {ROOT}"));
    }
    match step {
        Step::Test { path, value } => match document.pointer(path) {
            Some(found) if found == value => Ok(()),
            _ => Err("something else is there".into()),
        },
        Step::Replace { path, value } => {
            let place = document.pointer_mut(path).ok_or("nothing is there")?;
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

/// The container of what a path names, and its name there.
fn parent<'a>(document: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, key) = path.rsplit_once('/').ok_or("not a path")?;
    let container = document.pointer_mut(parent).ok_or("what it would be in is not there")?;
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
        Value::Object(members) => members.remove(&key).map(drop).ok_or_else(|| "nothing is there".into()),
        Value::Array(elements) => {
            let at = index(&key, elements.len())?;
            elements.remove(at);
            Ok(())
        }
        _ => Err("neither object nor array".into()),
    }
}

/// An array's index, without leading zeros, below `end`.
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
    fn members_and_elements_come_go_and_change() {
        for (state, steps, wanted) in [
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
            assert_eq!(after(state, steps.clone()), Ok(wanted), "{steps}");
        }
    }

    #[test]
    fn steps_that_make_no_sense_fail_as_a_whole() {
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
    fn a_policy_cannot_fill_the_guest_with_its_memory() {
        let much = "x".repeat(MAX_STATE);
        assert!(after(json!({}), json!([{"op": "add", "path": "/pstate/a", "value": much}])).is_err());
    }
}
