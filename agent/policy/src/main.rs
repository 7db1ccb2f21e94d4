//! The judge as a program of its own, for the tests of this package; in a guest the agent's program plays it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    firstlight_policy::judge::run()
}
