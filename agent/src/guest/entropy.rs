//! ReseedRandomDev: clones of one guest must not share random numbers.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use firstlight_sys::entropy;

use crate::error::{Error, Result};

/// Upper bound; shims send 512 bytes.
const MAX_BYTES: usize = 64 * 1024;

/// Adds the data to the kernel's entropy pool through `dev/random` below `root`, credits it, and
/// reseeds the generator from the pool.
///
/// # Errors
/// There is no data or too much, or a named step fails.
pub fn reseed(root: &Path, data: &[u8]) -> Result<()> {
    if data.is_empty() {
        return Err(Error::internal("missing entropy data in ReseedRandomDev"));
    }
    if data.len() > MAX_BYTES {
        return Err(Error::invalid(format!("ReseedRandomDev: {} bytes; at most {MAX_BYTES}", data.len())));
    }
    let path = root.join("dev/random");
    let failed = |step: &str| {
        let device = path.display().to_string();
        let step = step.to_owned();
        move |error: std::io::Error| Error::internal(format!("ReseedRandomDev: {device}: {step}: {error}"))
    };
    let mut device = OpenOptions::new().write(true).open(&path).map_err(failed("open"))?;
    device.write_all(data).map_err(failed("write"))?;
    entropy::credit(&device, data.len()).map_err(failed("credit (RNDADDTOENTCNT)"))?;
    entropy::reseed(&device).map_err(failed("restart (RNDRESEEDCRNG)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_oversized_data_are_rejected_before_the_device_is_opened() {
        let nowhere = Path::new("/nonexistent");
        assert!(reseed(nowhere, &[]).unwrap_err().message.contains("missing entropy data"));
        assert_eq!(reseed(nowhere, &vec![0; MAX_BYTES + 1]).unwrap_err().code, ttrpc::Code::INVALID_ARGUMENT);
        assert!(reseed(nowhere, &[1]).unwrap_err().message.contains("/nonexistent/dev/random: open"));
    }

    #[test]
    fn failed_step_is_reported_after_the_data_was_written() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/random"), "").unwrap();
        let error = reseed(root.path(), b"seed").unwrap_err().message;
        assert!(error.contains("RNDADDTOENTCNT"), "{error}");
        assert_eq!(std::fs::read(root.path().join("dev/random")).unwrap(), b"seed");
    }
}
