//! Judges the agent's requests by a policy in Rego, as Kata's agent does.
//!
//! A request is written as JSON ([`requests`]) and `data.agent_policy.<name of
//! its message>` is evaluated with that as `input`. The result is a truth
//! value, or `{"allowed": .., "ops": [..]}` whose JSON patch changes
//! `data.pstate`, the policy's memory. A rule that is not defined denies.
//!
//! Policies can be hostile: they may recurse, loop, or eat memory, and an
//! engine that ends for that must not take the agent along. So the engine
//! lives in a process of its own, the judge ([`judge`]), which has no rights,
//! little memory and is killed at a deadline. The agent holds [`Judge`], the
//! policy's text and its memory, and starts another judge when one has died.
//! Where nobody sets a policy there is no judge, and nothing is paid.
#![forbid(unsafe_code)]

pub mod engine;
pub mod judge;
mod patch;
mod process;
pub mod requests;
mod wire;

pub use process::{Judge, Launch, Limits};
pub use wire::{Decision, Verdict};

/// The first argument that makes a program the judge.
pub const JUDGE_ARGUMENT: &str = "policy-judge";

/// The longest line of a policy, bytes.
pub const MAX_LINE: u32 = 64 * 1024;

/// The longest policy, bytes.
pub const MAX_POLICY: usize = 16 * 1024 * 1024;

/// The most lines of a policy.
pub const MAX_LINES: usize = 200_000;

/// Why there is no judge.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The policy is not one; the text says where.
    #[error("the policy cannot be used: {0}")]
    Policy(String),
    /// The judge could not be started or asked.
    #[error("the policy's judge: {0}")]
    Judge(String),
}
