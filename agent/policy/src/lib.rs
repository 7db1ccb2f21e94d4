//! Evaluates the agent's requests against a policy in Rego, as kata-agent does.
//!
//! A request is serialized to JSON ([`requests`]), and `data.agent_policy.<message name>` is evaluated with it as
//! `input`. The result is a boolean, or `{"allowed": .., "ops": [..]}` whose JSON patch changes `data.pstate`,
//! the policy's state. An undefined rule denies.
//!
//! Policies are untrusted input: they may recurse, loop, or exhaust memory, and a crash of the engine must not
//! affect the agent. So the engine runs in a separate process ([`evaluator`]) without privileges and with little
//! memory, which is killed at a deadline. The agent holds an [`Evaluator`] with the policy's text and state, and
//! restarts the process when it has died. Without a policy there is no process and no cost.
#![forbid(unsafe_code)]

pub mod engine;
pub mod evaluator;
mod patch;
mod process;
pub mod requests;
mod wire;

pub use process::{Evaluator, LaunchOptions, Limits};
pub use wire::{Decision, Verdict};

/// The first argument that makes the agent's program the evaluator.
pub const EVALUATOR_ARGUMENT: &str = "policy-evaluator";

/// The longest line of a policy, bytes.
pub const MAX_LINE: u32 = 64 * 1024;

/// The longest policy, bytes.
pub const MAX_POLICY: usize = 16 * 1024 * 1024;

/// The most lines of a policy.
pub const MAX_LINES: usize = 200_000;

/// An error of a policy or of its evaluator.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The policy is invalid; the text has the line.
    #[error("invalid policy: {0}")]
    InvalidPolicy(String),
    /// The evaluator failed to start or to respond.
    #[error("policy evaluator: {0}")]
    Evaluator(String),
}
