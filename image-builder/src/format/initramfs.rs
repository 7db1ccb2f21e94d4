//! An initial RAM file system: a cpio archive, packed or not.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use firstlight_progress::Bar;

use super::archive::{Files, fill};
use super::feed::feed;
use super::{Compression, Error, Plan};
use crate::cache::io_error;
use crate::cpio;
use crate::tools::Toolset;
use crate::tree::Tree;

/// Packed archives are filled up with zeroes to whole pages, as unpacked ones
/// are: QEMU's microvm puts the file right below the end of memory, where its
/// firmware has put ACPI's tables. The kernel skips zeroes behind an archive.
const PAGE: u64 = 4096;

/// A file whose errors say which it is.
struct Named<'a> {
    file: File,
    path: &'a Path,
}

impl Named<'_> {
    fn with_name<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display())))
    }
}

impl Write for Named<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes);
        self.with_name(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.file.flush();
        self.with_name(flushed)
    }
}

/// Writes the archive of `tree` to `path`, packed with a program of `set` if there is one.
pub(super) fn write(plan: &Plan, tree: &Tree, set: Option<&Toolset>, path: &Path, bar: &Bar) -> Result<Files, Error> {
    let file = File::create(path).map_err(io_error("create", path))?;
    let archive = |output: &mut dyn Write| {
        let mut archive = cpio::Writer::new(output);
        let files = fill(tree, &mut archive, bar)?;
        archive.finish()?;
        Ok(files)
    };
    let Some(set) = set else { return archive(&mut BufWriter::with_capacity(1 << 20, Named { file, path })) };
    let program = if plan.compression == Compression::Zstd { "zstd" } else { "lz4" };
    let mut command = packer(set, program, plan.level.unwrap_or_default())?;
    let output = file.try_clone().map_err(io_error("write", path))?;
    let files = feed(program, &mut command, path, Stdio::from(output), archive)?;
    let size = file.metadata().map_err(io_error("inspect", path))?.len();
    file.set_len(size.next_multiple_of(PAGE)).map_err(io_error("write", path))?;
    Ok(files)
}

/// The program, reading its input and writing its output.
fn packer(set: &Toolset, program: &'static str, level: u32) -> Result<Command, Error> {
    let mut command = set.command(program)?;
    command.args(["-q", "-c"]).arg(format!("-{level}"));
    if program == "lz4" {
        // The kernel reads the old framing only.
        command.arg("-l");
    } else {
        // How many processors there are does not show in the bytes; whether
        // there are several would.
        command.arg("-T0");
    }
    Ok(command)
}
