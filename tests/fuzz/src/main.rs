//! Mutated input for everything that reads somebody else's bytes.
//!
//! `firstlight-fuzz SECONDS [TARGET]`. A seed from the target's table is cut,
//! flipped, repeated and spliced; whatever panics is written to
//! `fuzz-TARGET-SEED.bin` and named. Not guided by coverage: it needs nothing
//! but the stable compiler, so it runs everywhere and on every change.
#![forbid(unsafe_code)]

mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use mutate::Mutator;
use targets::{TARGETS, Target};

/// Runs one target; the input that made it panic, if one did.
fn hunt(target: &Target, time: Duration, seed: u64) -> (u64, Option<Vec<u8>>) {
    let mut mutator = Mutator::new(seed, target.seeds);
    let begin = Instant::now();
    let mut tries = 0;
    while begin.elapsed() < time {
        let input = mutator.next();
        tries += 1;
        if catch_unwind(AssertUnwindSafe(|| (target.read)(&input))).is_err() {
            return (tries, Some(input));
        }
    }
    (tries, None)
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(seconds) = arguments.next().and_then(|text| text.parse().ok()) else {
        eprintln!("usage: firstlight-fuzz SECONDS [TARGET]");
        return ExitCode::from(2);
    };
    let wanted = arguments.next().unwrap_or_default();
    let chosen: Vec<_> = TARGETS.iter().filter(|target| target.name.contains(&wanted)).collect();
    if chosen.is_empty() {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("no target has {wanted:?} in its name; there are {}", names.join(", "));
        return ExitCode::from(2);
    }
    let seed = fastrand::u64(..);
    let mut found = false;
    for target in chosen {
        let (tries, crash) = hunt(target, Duration::from_secs(seconds), seed);
        match crash {
            None => println!("{:24} {tries:>10} inputs, no panic", target.name),
            Some(input) => {
                let file = format!("fuzz-{}-{seed}.bin", target.name);
                let written = std::fs::write(&file, &input).is_ok();
                println!("{:24} {tries:>10} inputs, PANIC: {file} (written: {written})", target.name);
                found = true;
            }
        }
    }
    if found { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_panics_is_found() {
        let target = Target { name: "x", seeds: &[b"abcd"], read: |bytes| assert!(!bytes.contains(&0xff), "found") };
        let (_, crash) = hunt(&target, Duration::from_secs(20), 1);
        assert!(crash.is_some_and(|input| input.contains(&0xff)));
    }

    #[test]
    fn every_target_takes_its_own_seeds_and_some_mutations() {
        for target in TARGETS {
            let (tries, crash) = hunt(target, Duration::from_millis(150), 7);
            assert!(tries > 10 && crash.is_none(), "{}: {crash:?}", target.name);
        }
    }
}
