//! ReseedRandomDev: the copies of one guest must not share their random numbers.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use firstlight_sys::entropy;

use crate::error::{Error, Result};

/// More than this helps nobody; shims send 512 bytes.
const LONGEST: usize = 64 * 1024;

/// Mixes the data into the kernel's pool below `root`, credits it, and has the
/// generator start again from the pool.
///
/// # Errors
/// There is no data or far too much, or the kernel refuses a step, which is named.
pub fn reseed(root: &Path, data: &[u8]) -> Result<()> {
    if data.is_empty() {
        return Err(Error::internal("missing entropy data: ReseedRandomDev without any"));
    }
    if data.len() > LONGEST {
        return Err(Error::invalid(format!("ReseedRandomDev: {} bytes; at most {LONGEST}", data.len())));
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
    fn nothing_and_too_much_are_refused_before_the_device_is_touched() {
        let nowhere = Path::new("/nonexistent");
        assert!(reseed(nowhere, &[]).unwrap_err().message.contains("missing entropy data"));
        assert_eq!(reseed(nowhere, &vec![0; LONGEST + 1]).unwrap_err().code, ttrpc::Code::INVALID_ARGUMENT);
        assert!(reseed(nowhere, &[1]).unwrap_err().message.contains("/nonexistent/dev/random: open"));
    }

    #[test]
    fn a_step_that_fails_is_named_and_the_data_were_written_first() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/random"), "").unwrap();
        let error = reseed(root.path(), b"seed").unwrap_err().message;
        assert!(error.contains("RNDADDTOENTCNT"), "{error}");
        assert_eq!(std::fs::read(root.path().join("dev/random")).unwrap(), b"seed");
    }
}
