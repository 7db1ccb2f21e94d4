//! Mutated input for everything that reads somebody else's bytes.
//!
//! Each target runs in a process of its own: first what is known (its seeds
//! and `corpus/TARGET`), then what is made of that. Where the program was
//! compiled with coverage, which `cargo xtask fuzz` does, inputs that reach
//! something new are mutated further. An input that makes a target panic, end
//! its process or hang is written to a file, with the command that replays it.
#![deny(unsafe_code)]

mod corpus;
mod coverage;
mod hunt;
mod mutate;
mod parent;
mod selfcheck;
mod targets;

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use hunt::{End, hunt};
use targets::{TARGETS, Target};

/// What is wanted.
#[derive(Debug, Default)]
struct Arguments {
    /// Per target.
    time: Option<Duration>,
    /// Half a minute for what comes first hand, moments for the others.
    smoke: bool,
    /// Keep what was found in the tree.
    grow: bool,
    /// One input.
    replay: Option<PathBuf>,
    /// That guidance guides.
    self_check: bool,
    /// This is the process of one target; its current input goes here.
    worker: Option<PathBuf>,
    /// In the target's name.
    target: String,
}

const USAGE: &str = "usage: firstlight-fuzz [--seconds N | --smoke] [--grow] [--replay FILE] [--self-check] [TARGET]";

fn arguments(mut given: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut arguments = Arguments::default();
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--seconds" => arguments.time = Some(Duration::from_secs(given.next()?.parse().ok()?)),
            "--milliseconds" => arguments.time = Some(Duration::from_millis(given.next()?.parse().ok()?)),
            "--smoke" => arguments.smoke = true,
            "--grow" => arguments.grow = true,
            "--replay" => arguments.replay = Some(given.next()?.into()),
            "--self-check" => arguments.self_check = true,
            "--worker" => arguments.worker = Some(given.next()?.into()),
            _ if argument.starts_with('-') => return None,
            _ => arguments.target = argument,
        }
    }
    Some(arguments)
}

fn main() -> ExitCode {
    let Some(arguments) = arguments(std::env::args().skip(1)) else {
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
        eprintln!("no target has {:?} in its name; there are {}", arguments.target, names.join(", "));
        return ExitCode::from(2);
    };
    match (&arguments.replay, &arguments.worker) {
        (Some(input), _) => replay(first, input),
        (None, Some(current)) => work(first, current, &arguments),
        (None, None) => parent::run(&chosen, &arguments),
    }
}

/// Runs one input and lets it do what it does.
fn replay(target: &Target, input: &PathBuf) -> ExitCode {
    match std::fs::read(input) {
        Ok(bytes) => {
            (target.read)(&bytes);
            println!("{}: {} bytes, no panic", target.name, bytes.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: {error}", input.display());
            ExitCode::from(2)
        }
    }
}

/// The process of one target. A panic is left in `current` like every other end.
fn work(target: &Target, current: &PathBuf, arguments: &Arguments) -> ExitCode {
    // A panic that a target bears is no news, and one that counts is replayed.
    std::panic::set_hook(Box::new(|_| {}));
    let file: Option<File> = OpenOptions::new().write(true).create(true).truncate(false).open(current).ok();
    let time = arguments.time.unwrap_or_default();
    let hunted = hunt(target, corpus::load(target.name), End::After(time), fastrand::u64(..), true, file.as_ref());
    println!("{:24} {:>10} inputs {:>7} edges {:>5} kept", target.name, hunted.inputs, hunted.edges, hunted.pool.len());
    if hunted.crash.is_some() {
        return ExitCode::FAILURE;
    }
    if !arguments.grow {
        return ExitCode::SUCCESS;
    }
    match corpus::replace(target.name, &hunt::least(target, hunted.pool)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{}: {error}", corpus::dir(target.name).display());
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_understood_or_refused() {
        let of = |text: &str| arguments(text.split_whitespace().map(str::to_owned));
        let all = of("--seconds 3 --grow cdi").unwrap();
        assert_eq!((all.time, all.grow, all.target.as_str()), (Some(Duration::from_secs(3)), true, "cdi"));
        assert!(of("--smoke").unwrap().smoke);
        for wrong in ["--seconds", "--seconds x", "--loud", "--replay"] {
            assert!(of(wrong).is_none(), "{wrong}");
        }
    }
}
