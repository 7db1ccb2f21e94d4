//! Attaches one GPU as PID 1 does and says what the driver answered:
//! `cargo run -p firstlight-init --example attach /dev/nvidia0`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use firstlight_init::open::{Answer, attach};

fn main() -> ExitCode {
    let mut failed = false;
    for node in std::env::args().skip(1) {
        let begin = Instant::now();
        let mut opened = None;
        let answer = attach(Path::new(&node), || opened = Some(begin.elapsed()));
        let (opened, took) = (opened.unwrap_or_default(), begin.elapsed());
        match answer {
            Answer::Attached(_, code) => println!("{node}: open {opened:?}, answer after {took:?}: attached, {code:?}"),
            Answer::Failed(refusal) => {
                println!("{node}: open {opened:?}, answer after {took:?}: {refusal:?}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
