//! `synthetic-gpu DIR DEVICE...`: serves PCI devices to QEMU until the parent exits.
//!
//! Prints `ready` when all sockets listen. Removes the sockets and exits at end of file of standard input, on
//! SIGTERM, SIGINT or SIGHUP, and when the thread that started it exits.
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
Runs until end of file of its standard input: use a pipe and keep the other end open.";

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

    // SIGTERM, not SIGKILL, so that the sockets are removed.
    set_parent_process_death_signal(Some(Signal::TERM)).context("failed to set the parent death signal")?;
    let end = shutdown_channel()?;
    let sockets = Sockets::serve(Path::new(&dir), &devices)?;
    let mut stdout = io::stdout();
    writeln!(stdout, "ready").and_then(|()| stdout.flush()).context("failed to report readiness on standard output")?;
    // Both senders live as long as the process, so this blocks until shutdown.
    let _ = end.recv();
    drop(sockets);
    Ok(())
}

/// Returns a channel that receives a message when the process shall shut down.
fn shutdown_channel() -> Result<mpsc::Receiver<()>> {
    let (by_signal, end) = mpsc::channel();
    let by_input = by_signal.clone();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("failed to install signal handlers")?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            let _ = by_signal.send(());
        }
    })?;
    thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let mut stdin = io::stdin();
        let mut sink = [0; 256];
        // An error is treated as end of file.
        while matches!(stdin.read(&mut sink), Ok(1..)) {}
        let _ = by_input.send(());
    })?;
    Ok(end)
}
