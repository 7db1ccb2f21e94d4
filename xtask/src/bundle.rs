//! Checks bundles: directories that run on another machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::elf::needs_interpreter;

/// Returns the size of the bundle in bytes. Fails if it exceeds `budget` or a program is not static.
pub(crate) fn check_size(dir: &Path, programs: &[PathBuf], budget: u64) -> anyhow::Result<u64> {
    for program in programs {
        let bytes = fs::read(program).with_context(|| program.display().to_string())?;
        if needs_interpreter(&bytes).with_context(|| program.display().to_string())? {
            bail!("{} is not static: it may not run on another machine", program.display());
        }
    }
    let bytes = directory_size(dir)?;
    if bytes > budget {
        bail!("{} has {bytes} bytes; the limit is {budget}", dir.display());
    }
    Ok(bytes)
}

fn directory_size(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        let data = entry.metadata()?;
        bytes += if data.is_dir() { directory_size(&entry.path())? } else { data.len() };
    }
    Ok(bytes)
}
