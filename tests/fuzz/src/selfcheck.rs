//! Self-check of coverage guidance: a secret that is found only byte by byte.

#![expect(clippy::collapsible_if, reason = "an edge for each byte, whatever the optimiser makes of a condition")]

use std::process::ExitCode;

use crate::coverage;
use crate::fuzz_loop::{StopCondition, fuzz};
use crate::targets::Target;

/// Most inputs to try. Unguided mutation has to guess five bytes at once: one in 10^12.
const INPUTS: u64 = 3_000_000;

/// A byte is compared only if the one before it matched.
const SECRET: Target = Target {
    name: "secret",
    seeds: &[b"seed"],
    read: |bytes| {
        let at = |index: usize| std::hint::black_box(bytes.get(index).copied());
        if at(0) == Some(b'G') {
            if at(1) == Some(0x9a) {
                if at(2) == Some(b'p') {
                    if at(3) == Some(0x01) {
                        assert!(at(4) != Some(b'Q'), "found");
                    }
                }
            }
        }
    },
};

/// Searches for the secret with and without guidance; passes if only guidance finds it.
pub(crate) fn check() -> ExitCode {
    if !coverage::is_available() {
        eprintln!("compiled without coverage instrumentation: run cargo xtask fuzz");
        return ExitCode::from(2);
    }
    // Finding the secret is a panic: do not print it.
    std::panic::set_hook(Box::new(|_| {}));
    let guided = fuzz(&SECRET, Vec::new(), StopCondition::Inputs(INPUTS), 1, true, None);
    let unguided = fuzz(&SECRET, Vec::new(), StopCondition::Inputs(guided.inputs), 1, false, None);
    let found = guided.crash.is_some();
    println!(
        "with guidance: {} after {} inputs; without: {}",
        if found { "found" } else { "NOT FOUND" },
        guided.inputs,
        if unguided.crash.is_some() { "ALSO FOUND, so the check proves nothing" } else { "not found" },
    );
    if found && unguided.crash.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
