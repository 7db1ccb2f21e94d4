//! That guidance guides: a secret that is found byte by byte, or not at all.

#![expect(clippy::collapsible_if, reason = "an edge for each byte, whatever the optimiser makes of a condition")]

use std::process::ExitCode;

use crate::coverage;
use crate::hunt::{End, hunt};
use crate::targets::Target;

/// The most inputs. Blind mutation has to guess five bytes at once: one in a million millions.
const INPUTS: u64 = 3_000_000;

/// Each byte is compared behind the one before it.
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

/// Looks for the secret with and without guidance.
pub(crate) fn check() -> ExitCode {
    if !coverage::is_there() {
        eprintln!("compiled without coverage: use cargo xtask fuzz");
        return ExitCode::from(2);
    }
    // Both panic to tell that they have found it.
    std::panic::set_hook(Box::new(|_| {}));
    let guided = hunt(&SECRET, Vec::new(), End::Inputs(INPUTS), 1, true, None);
    let blind = hunt(&SECRET, Vec::new(), End::Inputs(guided.inputs), 1, false, None);
    let found = guided.crash.is_some();
    println!(
        "guidance: {} after {} inputs; without it: {}",
        if found { "found" } else { "NOT FOUND" },
        guided.inputs,
        if blind.crash.is_some() { "FOUND TOO, so this shows nothing" } else { "not found" },
    );
    if found && blind.crash.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
