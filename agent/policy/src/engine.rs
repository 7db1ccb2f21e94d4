//! One policy, its state (`data.pstate`), and the evaluation of requests.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use regorus::utils::limits::ExecutionTimerConfig;
use regorus::{PolicyLengthConfig, QueryResults};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::patch::{self, Step};
use crate::wire::{Decision, Verdict};
use crate::{MAX_LINE, MAX_LINES, MAX_POLICY, PolicyError};

/// The file name in error positions.
const NAME: &str = "policy.rego";

/// Evaluation steps between two checks of the time limit.
const TICKS: u32 = 256;

/// The longest text of a verdict, bytes.
const MAX_TEXT: usize = 4096;

/// The Rego engine with a loaded policy.
#[derive(Debug)]
pub struct Engine {
    rego: regorus::Engine,
    /// `data.pstate`.
    state: Value,
    /// The policy sets `AllowRequestsFailingPolicy`: denials are only warnings.
    warn_only: bool,
}

/// A rule's result that also changes the policy's state.
#[derive(Debug, Deserialize)]
struct Metadata {
    allowed: bool,
    ops: Option<Vec<Step>>,
}

impl Engine {
    /// Loads a policy.
    ///
    /// # Errors
    /// It is not valid Rego, or exceeds a limit; the text has the line.
    pub fn load(policy: String, state: Value, limit: Duration) -> Result<Self, PolicyError> {
        let mut rego = regorus::Engine::new();
        rego.set_strict_builtin_errors(false);
        rego.set_gather_prints(true);
        if let Some(check_interval) = NonZeroU32::new(TICKS) {
            rego.set_execution_timer_config(ExecutionTimerConfig { limit, check_interval });
        }
        if let (Some(max_col), Some(max_file_bytes), Some(max_lines)) =
            (NonZeroU32::new(MAX_LINE), NonZeroUsize::new(MAX_POLICY), NonZeroUsize::new(MAX_LINES))
        {
            rego.set_policy_length_config(PolicyLengthConfig { max_col, max_file_bytes, max_lines });
        }
        rego.add_policy(NAME.to_owned(), policy)
            .map_err(|error| PolicyError::InvalidPolicy(one_line(&format!("{error:#}"))))?;
        let mut engine = Self { rego, state, warn_only: false };
        engine.sync_state().map_err(PolicyError::InvalidPolicy)?;
        engine.warn_only = engine.query("AllowRequestsFailingPolicy", "{}") == Ok(Some(Value::Bool(true)));
        let _ = engine.rego.take_prints();
        Ok(engine)
    }

    /// Returns the policy's state.
    #[must_use]
    pub fn state(&self) -> &Value {
        &self.state
    }

    /// Evaluates a request, given the name of its message and its JSON; applies the rule's patch to the state if
    /// it is allowed.
    pub fn evaluate(&mut self, request: &str, input: &str) -> Verdict {
        let decided = self.decide(request, input);
        let prints = self.rego.take_prints().unwrap_or_default().join(" ");
        // Free the input, which may be megabytes, until the next request.
        self.rego.set_input(regorus::Value::Undefined);
        match decided {
            Ok(true) => Verdict::new(Decision::Allowed, ""),
            Ok(false) => self.denied(bounded(&prints)),
            Err(why) if prints.is_empty() => self.denied(bounded(&why)),
            Err(why) => self.denied(bounded(&format!("{prints} ({why})"))),
        }
    }

    fn denied(&self, text: String) -> Verdict {
        Verdict::new(if self.warn_only { Decision::Tolerated } else { Decision::Denied }, text)
    }

    fn decide(&mut self, request: &str, input: &str) -> Result<bool, String> {
        match self.query(request, input)? {
            None => Err(format!("the policy has no rule {request}, or its conditions are not met")),
            Some(Value::Bool(allowed)) => Ok(allowed),
            Some(Value::Object(object)) => {
                let metadata: Metadata = serde_json::from_value(Value::Object(object))
                    .map_err(|error| format!("the policy's rule {request} is not {{allowed, ops}}: {error}"))?;
                if let Some(steps) = metadata.ops.filter(|_| metadata.allowed) {
                    self.state = patch::patched(&self.state, &steps)?;
                    self.sync_state()?;
                }
                Ok(metadata.allowed)
            }
            Some(_) => Err(format!("the policy's rule {request} is neither a boolean nor an object")),
        }
    }

    fn query(&mut self, rule: &str, input: &str) -> Result<Option<Value>, String> {
        let failed = |error| format!("failed to evaluate the policy: {}", one_line(&format!("{error:#}")));
        self.rego.set_input_json(input).map_err(failed)?;
        let results = self.rego.eval_query(format!("data.agent_policy.{rule}"), false).map_err(failed)?;
        single(results)
    }

    /// Passes the current state to the engine.
    fn sync_state(&mut self) -> Result<(), String> {
        let failed = |error| format!("the policy's state: {}", one_line(&format!("{error:#}")));
        self.rego.clear_data();
        let data = json!({ "pstate": self.state }).to_string();
        self.rego.add_data_json(&data).map_err(failed)
    }
}

/// Returns the single value of a query; `None` if it is undefined.
fn single(results: QueryResults) -> Result<Option<Value>, String> {
    let mut expressions = results.result.into_iter().flat_map(|result| result.expressions);
    let (first, second) = (expressions.next(), expressions.next());
    match first.map(|expression| expression.value) {
        _ if second.is_some() => Err("the policy's rule has more than one value".into()),
        None | Some(regorus::Value::Undefined) => Ok(None),
        Some(value) => serde_json::to_value(&value).map(Some).map_err(|error| error.to_string()),
    }
}

/// Formats an engine error as one line, `policy.rego:5:1: what`. The engine prints ` --> policy.rego:5:1`, the
/// source line, a marker, and `error: what`.
fn one_line(text: &str) -> String {
    let place = text.lines().find_map(|line| line.trim().strip_prefix("--> "));
    let what = text.lines().find_map(|line| line.trim().strip_prefix("error: "));
    match (place, what) {
        (Some(place), Some(what)) => format!("{place}: {what}"),
        _ => text.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// Truncates a text to what fits into a response.
fn bounded(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
