//! Huge pages, reserved for the lifetime of a storage.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::options::Options;
use crate::error::{Error, Result};

/// Serialises changes of `nr_hugepages`.
static COUNT: Mutex<()> = Mutex::new(());

/// Reserved huge pages; returned to the kernel on drop.
#[derive(Debug)]
pub struct HugePages {
    file: PathBuf,
    pages: u64,
}

/// Parses a size such as `67108864`, `2M` or `1G` to bytes.
fn bytes(text: &str) -> Option<u64> {
    let (number, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn read(file: &Path) -> Result<u64> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.trim().parse().map_err(|_| Error::internal(format!("{}: not a number", file.display())))
}

fn write(file: &Path, pages: u64) -> Result<()> {
    fs::write(file, pages.to_string()).map_err(|error| Error::internal(format!("{}: {error}", file.display())))
}

impl HugePages {
    /// Reserves the pages that the options `pagesize` and `size` request, in addition to existing
    /// ones.
    ///
    /// # Errors
    /// An option is missing or invalid, the guest does not support the page size, or has too little
    /// memory.
    pub fn add(sysfs: &Path, options: &Options) -> Result<Self> {
        let size = |name: &str| {
            let text =
                options.value(name).ok_or_else(|| Error::invalid(format!("huge pages need the option {name}")))?;
            bytes(text)
                .filter(|bytes| *bytes > 0)
                .ok_or_else(|| Error::invalid(format!("{name}={text} is not a size in bytes")))
        };
        let (page, all) = (size("pagesize")?, size("size")?);
        let pages = all.div_ceil(page);
        let dir = sysfs.join("kernel/mm/hugepages");
        let file = dir.join(format!("hugepages-{}kB", page >> 10)).join("nr_hugepages");
        if !file.exists() {
            let sizes = fs::read_dir(&dir).into_iter().flatten().flatten();
            let mut sizes: Vec<String> = sizes.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            sizes.sort();
            let message =
                format!("the guest does not support huge pages of {page} bytes; supported: [{}]", sizes.join(", "));
            return Err(Error::invalid(message));
        }
        let _one = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
        let before = read(&file)?;
        let target = before.checked_add(pages).ok_or_else(|| Error::invalid("too many huge pages"))?;
        write(&file, target)?;
        let now = read(&file)?;
        if now < target {
            let _ = write(&file, before);
            return Err(Error::internal(format!(
                "only {} of {pages} huge pages of {page} bytes could be reserved; give the VM more memory",
                now.saturating_sub(before)
            )));
        }
        Ok(Self { file, pages })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _one = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
        let released = read(&self.file).and_then(|now| write(&self.file, now.saturating_sub(self.pages)));
        if let Err(error) = released {
            log::warn!("failed to release {} huge pages: {error}", self.pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Options {
        Options::of(&[text.to_owned()]).unwrap()
    }

    #[test]
    fn pages_are_added_to_existing_ones_and_released() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("kernel/mm/hugepages/hugepages-2048kB");
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("nr_hugepages");
        fs::write(&file, "3\n").unwrap();
        let first = HugePages::add(root.path(), &options("pagesize=2097152,size=8388608")).unwrap();
        let second = HugePages::add(root.path(), &options("pagesize=2M,size=3M")).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "9");
        drop(first);
        assert_eq!(fs::read_to_string(&file).unwrap(), "5");
        drop(second);
        assert_eq!(fs::read_to_string(&file).unwrap(), "3");
        let error = HugePages::add(root.path(), &options("pagesize=1G,size=1G")).unwrap_err().to_string();
        assert!(error.contains("hugepages-2048kB"), "{error}");
    }

    #[test]
    fn sizes_are_parsed() {
        for (text, size) in [
            ("1", Some(1)),
            ("2M", Some(2 << 20)),
            ("1g", Some(1 << 30)),
            ("", None),
            ("M", None),
            ("é", None),
            ("99999999999G", None),
        ] {
            assert_eq!(bytes(text), size, "{text}");
        }
        let root = Path::new("/nowhere");
        assert!(HugePages::add(root, &options("size=1M")).unwrap_err().to_string().contains("pagesize"));
        assert!(HugePages::add(root, &options("pagesize=0,size=1M")).unwrap_err().to_string().contains("pagesize=0"));
    }
}
