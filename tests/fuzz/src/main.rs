//! Coverage-guided fuzz targets for every parser of untrusted input.
//!
//! Each target runs in its own process: first its seeds and `corpus/TARGET`,
//! then mutations of both. If the program was compiled with coverage
//! instrumentation, which `cargo xtask fuzz` does, inputs that reach new
//! coverage are mutated further. An input that makes a target panic, exit or
//! hang is written to a file; the command that replays it is printed.
#![deny(unsafe_code)]

mod corpus;
mod coverage;
mod fuzz_loop;
mod mutate;
mod parent;
mod selfcheck;
mod targets;

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fuzz_loop::{StopCondition, fuzz};
use targets::{TARGETS, Target};

/// Command-line arguments.
#[derive(Debug, Default)]
struct Arguments {
    /// Time per target.
    time: Option<Duration>,
    /// Smoke test: 30 s for targets of direct input, 2 s for the others.
    smoke: bool,
    /// Write inputs with new coverage to `tests/fuzz/corpus`.
    grow: bool,
    /// Replay this input once.
    replay: Option<PathBuf>,
    /// Check that coverage guidance works.
    self_check: bool,
    /// Run as the worker process of one target, which records its current input in this file.
    worker: Option<PathBuf>,
    /// The target's name, or a part of it.
    target: String,
}

const USAGE: &str = "usage: firstlight-fuzz [--seconds N | --smoke] [--grow] [--replay FILE] [--self-check] [TARGET]";

fn parse_arguments(mut args: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut arguments = Arguments::default();
    while let Some(argument) = args.next() {
        match argument.as_str() {
            "--seconds" => arguments.time = Some(Duration::from_secs(args.next()?.parse().ok()?)),
            "--milliseconds" => arguments.time = Some(Duration::from_millis(args.next()?.parse().ok()?)),
            "--smoke" => arguments.smoke = true,
            "--grow" => arguments.grow = true,
            "--replay" => arguments.replay = Some(args.next()?.into()),
            "--self-check" => arguments.self_check = true,
            "--worker" => arguments.worker = Some(args.next()?.into()),
            _ if argument.starts_with('-') => return None,
            _ => arguments.target = argument,
        }
    }
    Some(arguments)
}

fn main() -> ExitCode {
    let Some(arguments) = parse_arguments(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if arguments.self_check {
        return selfcheck::check();
    }
    let exact = TARGETS.iter().filter(|target| target.name == arguments.target);
    let mut chosen: Vec<_> = exact.collect();
    if chosen.is_empty() {
        chosen = TARGETS.iter().filter(|target| target.name.contains(&arguments.target)).collect();
    }
    let [first, ..] = chosen.as_slice() else {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("no target name contains {:?}; targets: {}", arguments.target, names.join(", "));
        return ExitCode::from(2);
    };
    match (&arguments.replay, &arguments.worker) {
        (Some(input), _) => replay(first, input),
        (None, Some(current)) => run_worker(first, current, &arguments),
        (None, None) => parent::run(&chosen, &arguments),
    }
}

/// Replays one input; a panic or hang is not caught.
fn replay(target: &Target, input: &PathBuf) -> ExitCode {
    match std::fs::read(input) {
        Ok(bytes) => {
            (target.read)(&bytes);
            println!("{}: {} bytes, no panic", target.name, bytes.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("failed to read {}: {error}", input.display());
            ExitCode::from(2)
        }
    }
}

/// Runs the worker process of one target. The input that caused a panic is left in `current`, as for any other crash.
fn run_worker(target: &Target, current: &PathBuf, arguments: &Arguments) -> ExitCode {
    // Panics that a target catches are expected; others are printed by the replay.
    std::panic::set_hook(Box::new(|_| {}));
    let file: Option<File> = OpenOptions::new().write(true).create(true).truncate(false).open(current).ok();
    let time = arguments.time.unwrap_or_default();
    let result =
        fuzz(target, corpus::load(target.name), StopCondition::After(time), fastrand::u64(..), true, file.as_ref());
    println!(
        "{:24} {:>10} inputs {:>7} edges {:>5} in pool",
        target.name,
        result.inputs,
        result.edges,
        result.pool.len()
    );
    if result.crash.is_some() {
        return ExitCode::FAILURE;
    }
    if !arguments.grow {
        return ExitCode::SUCCESS;
    }
    match corpus::replace(target.name, &fuzz_loop::minimize(target, result.pool)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed to write {}: {error}", corpus::dir(target.name).display());
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed_or_rejected() {
        let parse = |text: &str| parse_arguments(text.split_whitespace().map(str::to_owned));
        let all = parse("--seconds 3 --grow cdi").unwrap();
        assert_eq!((all.time, all.grow, all.target.as_str()), (Some(Duration::from_secs(3)), true, "cdi"));
        assert!(parse("--smoke").unwrap().smoke);
        for wrong in ["--seconds", "--seconds x", "--loud", "--replay"] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
    }
}
