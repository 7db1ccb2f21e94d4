//! Writes an initial RAM file system: a cpio archive, optionally compressed.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use firstlight_progress::Bar;

use super::archive::{Files, write_tree};
use super::pipe::run_with_input;
use super::{Compression, Error, Plan};
use crate::cache::io_error;
use crate::format::cpio;
use crate::packages::tools::Toolset;
use crate::tree::Tree;

/// Compressed archives are padded with zeros to whole pages, as uncompressed ones
/// are: QEMU's microvm machine loads the file right below the end of memory, next to
/// the ACPI tables of its firmware. The kernel skips zeros after an archive.
const PAGE: u64 = 4096;

/// A file whose I/O errors contain its path.
struct NamedFile<'a> {
    file: File,
    path: &'a Path,
}

impl NamedFile<'_> {
    fn with_name<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display())))
    }
}

impl Write for NamedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes);
        self.with_name(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.file.flush();
        self.with_name(flushed)
    }
}

/// Writes the archive of `tree` to `path`, compressed with a program of `set` if given.
pub(super) fn write(plan: &Plan, tree: &Tree, set: Option<&Toolset>, path: &Path, bar: &Bar) -> Result<Files, Error> {
    let file = File::create(path).map_err(io_error("create", path))?;
    let archive = |output: &mut dyn Write| {
        let mut archive = cpio::Writer::new(output);
        let files = write_tree(tree, &mut archive, bar)?;
        archive.finish()?;
        Ok(files)
    };
    let Some(set) = set else { return archive(&mut BufWriter::with_capacity(1 << 20, NamedFile { file, path })) };
    let program = if plan.compression == Compression::Zstd { "zstd" } else { "lz4" };
    let mut command = compressor(set, program, plan.level.unwrap_or_default())?;
    let output = file.try_clone().map_err(io_error("write", path))?;
    let files = run_with_input(program, &mut command, path, Stdio::from(output), archive)?;
    let size = file.metadata().map_err(io_error("inspect", path))?.len();
    file.set_len(size.next_multiple_of(PAGE)).map_err(io_error("write", path))?;
    Ok(files)
}

/// Returns the compression command, which reads stdin and writes stdout.
fn compressor(set: &Toolset, program: &'static str, level: u32) -> Result<Command, Error> {
    let mut command = set.command(program)?;
    command.args(["-q", "-c"]).arg(format!("-{level}"));
    if program == "lz4" {
        // The kernel supports LZ4's legacy frame format only.
        command.arg("-l");
    } else {
        // Multi-threaded mode: its output does not depend on the number of
        // threads, but differs from that of single-threaded mode.
        command.arg("-T0");
    }
    Ok(command)
}
