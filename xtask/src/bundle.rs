//! What holds for every directory that is made to be carried to another machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::elf::needs_interpreter;

/// Its bytes, if its programs are static and they are not too many.
pub(crate) fn judge(dir: &Path, programs: &[PathBuf], budget: u64) -> anyhow::Result<u64> {
    for program in programs {
        let bytes = fs::read(program).with_context(|| program.display().to_string())?;
        if needs_interpreter(&bytes).with_context(|| program.display().to_string())? {
            bail!("{} is not static: it would not run on another machine", program.display());
        }
    }
    let bytes = weigh(dir)?;
    if bytes > budget {
        bail!("{} weighs {bytes} bytes; {budget} are the limit", dir.display());
    }
    Ok(bytes)
}

fn weigh(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        let data = entry.metadata()?;
        bytes += if data.is_dir() { weigh(&entry.path())? } else { data.len() };
    }
    Ok(bytes)
}
