//! The kernel's log, for what it says of switches and GPUs.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::actor::Handle;
use crate::fault::{Fault, of_kernel};

/// Longer than any record of the kernel's.
const RECORD: usize = 8192;

/// After an error that may pass, such as records that were overwritten before they were read.
const PAUSE: Duration = Duration::from_millis(100);

/// Follows the log from its beginning on a thread of its own: who knows what was heard before
/// takes each line once.
///
/// # Errors
/// It cannot be read, or there can be no thread.
pub fn follow(path: &Path, engine: Handle) -> io::Result<()> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    let log = File::open(path)?;
    thread::Builder::new().name("kernel-log".to_owned()).spawn(move || listen(log, &boot, &engine)).map(drop)
}

/// Each read is one record; several, and parts of one, where it is no device but a pipe.
fn listen(mut log: File, boot: &str, engine: &Handle) {
    let mut buffer = vec![0; RECORD];
    loop {
        match log.read(&mut buffer) {
            // Only what is no kernel's log ends.
            Ok(0) => return,
            Ok(length) => {
                let text = String::from_utf8_lossy(&buffer[..length]);
                // A line that begins with a space belongs to the record before.
                for record in text.lines().filter(|line| !line.starts_with(' ')) {
                    let Some((number, line)) = of_kernel(record) else { continue };
                    if let Some(fault) = Fault::of_line(line)
                        && !engine.heard(boot.to_owned(), number, fault)
                    {
                        return;
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => thread::sleep(PAUSE),
        }
    }
}
