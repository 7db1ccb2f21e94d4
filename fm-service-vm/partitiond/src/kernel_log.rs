//! Reads SXids and Xids from the kernel log.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::actor::Handle;
use crate::fault::{Fault, of_kernel};

/// Maximum length of a kernel log record.
const RECORD: usize = 8192;

/// Pause after a transient error, such as EPIPE for records that were overwritten before they were read.
const PAUSE: Duration = Duration::from_millis(100);

/// Follows the log from its start on a thread of its own; the engine ignores records that it has processed before.
///
/// # Errors
/// The log cannot be read, or the thread cannot be created.
pub fn follow(path: &Path, engine: Handle) -> io::Result<()> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    let log = File::open(path)?;
    thread::Builder::new().name("kernel-log".to_owned()).spawn(move || listen(log, &boot_id, &engine)).map(drop)
}

/// A read of `/dev/kmsg` returns one record; a read of a pipe returns several, or parts of one.
fn listen(mut log: File, boot_id: &str, engine: &Handle) {
    let mut buffer = vec![0; RECORD];
    loop {
        match log.read(&mut buffer) {
            // End of file: it is not `/dev/kmsg`.
            Ok(0) => return,
            Ok(length) => {
                let text = String::from_utf8_lossy(&buffer[..length]);
                // A line that begins with a space continues the previous record.
                for record in text.lines().filter(|line| !line.starts_with(' ')) {
                    let Some((sequence, line)) = of_kernel(record) else { continue };
                    if let Some(fault) = Fault::of_line(line)
                        && !engine.report_kernel_fault(boot_id.to_owned(), sequence, fault)
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
