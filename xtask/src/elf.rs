//! Detects whether an ELF file needs an interpreter.

use anyhow::{Context, bail};

const PT_INTERP: u32 = 3;

fn number<const N: usize>(bytes: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().context("the ELF file is truncated")
}

/// Returns whether a 64-bit little-endian ELF file has a `PT_INTERP` header.
pub(crate) fn needs_interpreter(bytes: &[u8]) -> anyhow::Result<bool> {
    if number::<6>(bytes, 0)? != [0x7f, b'E', b'L', b'F', 2, 1] {
        bail!("not a 64-bit little-endian ELF file");
    }
    let table = usize::try_from(u64::from_le_bytes(number(bytes, 0x20)?))?;
    let size = usize::from(u16::from_le_bytes(number(bytes, 0x36)?));
    let count = usize::from(u16::from_le_bytes(number(bytes, 0x38)?));
    for at in 0..count {
        let header = table.checked_add(at * size).context("the ELF file has an invalid program header offset")?;
        if u32::from_le_bytes(number(bytes, header)?) == PT_INTERP {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_executable_is_detected_and_malformed_file_is_rejected() {
        let me = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(needs_interpreter(&me).unwrap());
        assert!(needs_interpreter(&me[..100]).is_err());
        assert!(needs_interpreter(b"#!/bin/sh").is_err());
    }
}
