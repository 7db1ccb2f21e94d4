//! `synthetic-gpu DIR DEVICE...`: serve PCI devices to QEMU until the parent
//! goes away.
//!
//! Prints `ready` when all sockets listen. Ends, and removes the sockets, at
//! the end of its standard input, at SIGTERM, SIGINT or SIGHUP, and when the
//! thread that started it ends.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result, bail};
use firstlight_synthetic_gpu::{Device, Sockets};
use rustix::process::{Signal, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const USAGE: &str = "usage: synthetic-gpu DIR DEVICE...
  DIR     directory for the sockets 0.sock, 1.sock, ... in the order of the devices
  DEVICE  KIND[:bar=SIZE][:attach-ms=N][:fail=0xCODE][:hang]
  KIND    h100 h200 b200 nvswitch cx7 cx7-nic pmc
Runs until its standard input ends, so give it a pipe and keep the other end.";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(dir) = arguments.next() else { bail!("no directory for the sockets\n{USAGE}") };
    if dir == "--help" || dir == "-h" {
        println!("{USAGE}");
        return Ok(());
    }
    let devices =
        arguments.map(|text| text.parse()).collect::<Result<Vec<Device>, _>>().with_context(|| USAGE.to_owned())?;
    if devices.is_empty() {
        bail!("no device to serve\n{USAGE}");
    }

    // SIGTERM and not SIGKILL: the sockets are to be removed.
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot ask to be told of the parent's death")?;
    let end = ends()?;
    let sockets = Sockets::serve(Path::new(&dir), &devices)?;
    let mut stdout = io::stdout();
    writeln!(stdout, "ready").and_then(|()| stdout.flush()).context("cannot say that the devices are ready")?;
    // Both senders live as long as the process, so this waits for an end.
    let _ = end.recv();
    drop(sockets);
    Ok(())
}

/// A channel that receives when the process shall end.
fn ends() -> Result<mpsc::Receiver<()>> {
    let (by_signal, end) = mpsc::channel();
    let by_input = by_signal.clone();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot catch signals")?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            let _ = by_signal.send(());
        }
    })?;
    thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let mut stdin = io::stdin();
        let mut sink = [0; 256];
        // An error is an end too: there is nobody at the other side.
        while matches!(stdin.read(&mut sink), Ok(1..)) {}
        let _ = by_input.send(());
    })?;
    Ok(end)
}
