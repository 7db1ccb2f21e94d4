//! The evaluator as a separate program, for this package's tests; in a guest the agent's program is used.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    firstlight_policy::evaluator::run()
}
