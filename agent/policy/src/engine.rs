//! One policy, its memory, and the evaluation of requests.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use regorus::utils::limits::ExecutionTimerConfig;
use regorus::{PolicyLengthConfig, QueryResults};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::patch::{self, Step};
use crate::wire::{Decision, Verdict};
use crate::{Fault, MAX_LINE, MAX_LINES, MAX_POLICY};

/// What faults of a policy's text are told against.
const NAME: &str = "policy.rego";

/// Steps of an evaluation between two looks at the clock.
const TICKS: u32 = 256;

/// The most that a verdict says, bytes.
const MAX_TEXT: usize = 4096;

/// The engine with a policy in it.
#[derive(Debug)]
pub struct Engine {
    rego: regorus::Engine,
    /// `data.pstate`.
    state: Value,
    /// Denials are only warnings.
    lenient: bool,
}

/// A result that also changes the policy's memory.
#[derive(Debug, Deserialize)]
struct Metadata {
    allowed: bool,
    ops: Option<Vec<Step>>,
}

impl Engine {
    /// Takes a policy into use.
    ///
    /// # Errors
    /// It is not Rego, or beyond a limit; the text says in which line.
    pub fn load(policy: String, state: Value, limit: Duration) -> Result<Self, Fault> {
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
        rego.add_policy(NAME.to_owned(), policy).map_err(|error| Fault::Policy(one_line(&format!("{error:#}"))))?;
        let mut engine = Self { rego, state, lenient: false };
        engine.remember().map_err(Fault::Policy)?;
        engine.lenient = engine.evaluate("AllowRequestsFailingPolicy", "{}") == Ok(Some(Value::Bool(true)));
        let _ = engine.rego.take_prints();
        Ok(engine)
    }

    /// The policy's memory.
    #[must_use]
    pub fn state(&self) -> &Value {
        &self.state
    }

    /// Judges a request by the name of its message and its JSON; the memory
    /// changes if it is allowed and the policy says so.
    pub fn judge(&mut self, request: &str, input: &str) -> Verdict {
        let decided = self.decide(request, input);
        let prints = self.rego.take_prints().unwrap_or_default().join(" ");
        // The input may be megabytes, and the next request may be long in coming.
        self.rego.set_input(regorus::Value::Undefined);
        match decided {
            Ok(true) => Verdict::new(Decision::Allowed, ""),
            Ok(false) => self.against(bounded(&prints)),
            Err(why) if prints.is_empty() => self.against(bounded(&why)),
            Err(why) => self.against(bounded(&format!("{prints} ({why})"))),
        }
    }

    fn against(&self, text: String) -> Verdict {
        Verdict::new(if self.lenient { Decision::Tolerated } else { Decision::Denied }, text)
    }

    fn decide(&mut self, request: &str, input: &str) -> Result<bool, String> {
        match self.evaluate(request, input)? {
            None => Err(format!("the policy has no rule {request} that holds")),
            Some(Value::Bool(allowed)) => Ok(allowed),
            Some(Value::Object(object)) => {
                let metadata: Metadata = serde_json::from_value(Value::Object(object))
                    .map_err(|error| format!("the policy's rule {request} is not {{allowed, ops}}: {error}"))?;
                if let Some(steps) = metadata.ops.filter(|_| metadata.allowed) {
                    self.state = patch::patched(&self.state, &steps)?;
                    self.remember()?;
                }
                Ok(metadata.allowed)
            }
            Some(_) => Err(format!("the policy's rule {request} is neither a truth value nor an object")),
        }
    }

    fn evaluate(&mut self, rule: &str, input: &str) -> Result<Option<Value>, String> {
        let failed = |error| format!("the policy cannot be evaluated: {}", one_line(&format!("{error:#}")));
        self.rego.set_input_json(input).map_err(failed)?;
        let results = self.rego.eval_query(format!("data.agent_policy.{rule}"), false).map_err(failed)?;
        single(results)
    }

    /// Gives the engine the memory as it is now.
    fn remember(&mut self) -> Result<(), String> {
        let failed = |error| format!("the policy's memory: {}", one_line(&format!("{error:#}")));
        self.rego.clear_data();
        let data = json!({ "pstate": self.state }).to_string();
        self.rego.add_data_json(&data).map_err(failed)
    }
}

/// The one value of a query, none if it is undefined.
fn single(results: QueryResults) -> Result<Option<Value>, String> {
    let mut expressions = results.result.into_iter().flat_map(|result| result.expressions);
    let (first, second) = (expressions.next(), expressions.next());
    match first.map(|expression| expression.value) {
        _ if second.is_some() => Err("the policy's rule has more than one value".into()),
        None | Some(regorus::Value::Undefined) => Ok(None),
        Some(value) => serde_json::to_value(&value).map(Some).map_err(|error| error.to_string()),
    }
}

/// The engine draws its faults over several lines: ` --> policy.rego:5:1`, the
/// line, a mark below it, `error: what`. Here as `policy.rego:5:1: what`.
fn one_line(text: &str) -> String {
    let place = text.lines().find_map(|line| line.trim().strip_prefix("--> "));
    let what = text.lines().find_map(|line| line.trim().strip_prefix("error: "));
    match (place, what) {
        (Some(place), Some(what)) => format!("{place}: {what}"),
        _ => text.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// Cut to what fits into an answer.
fn bounded(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
