//! File systems in files, made and read without mounting: disks for guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firstlight_vm::Tool;

use super::tree::{Members, Recipe, Tree};
use super::{Error, Toolbox};

const DISKS: Recipe = Recipe {
    label: "disk-tools",
    suite: "trixie",
    packages: &["e2fsprogs", "xfsprogs", "squashfs-tools", "erofs-utils"],
    members: Members::WithDependencies,
    keep: |path| {
        const FILES: &[&str] = &["mke2fs", "debugfs", "mkfs.xfs", "mksquashfs", "mkfs.erofs"];
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let library = path.starts_with("usr/lib/x86_64-linux-gnu") && name.contains(".so");
        library || path.starts_with("usr/lib64") || FILES.contains(&name.as_ref())
    },
};

/// MiB of a disk; what xfs wants at least. Nothing is written where nothing is.
const SIZE: u64 = 320;

/// What a disk can have on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// Linux's usual one.
    Ext4,
    /// The other usual one.
    Xfs,
    /// Packed, read-only.
    Squashfs,
    /// Read-only.
    Erofs,
}

/// The programs that make file systems.
#[derive(Debug, Clone)]
pub struct DiskTools {
    mke2fs: Tool,
    debugfs: Tool,
    mkfs_xfs: Tool,
    mksquashfs: Tool,
    mkfs_erofs: Tool,
}

impl Toolbox {
    /// Programs that make disks for guests.
    ///
    /// # Errors
    /// A package that cannot be had, or a failed file operation.
    pub fn disk_tools(&self) -> Result<DiskTools, Error> {
        let tree = Tree::prepare(&self.cache, &DISKS, self.progress)?;
        let tool = |name: &str| {
            let places = ["usr/sbin", "usr/bin", "sbin", "bin"].map(|dir| format!("{dir}/{name}"));
            tree.tool(&places.each_ref().map(String::as_str))
        };
        Ok(DiskTools {
            mke2fs: tool("mke2fs")?,
            debugfs: tool("debugfs")?,
            mkfs_xfs: tool("mkfs.xfs")?,
            mksquashfs: tool("mksquashfs")?,
            mkfs_erofs: tool("mkfs.erofs")?,
        })
    }
}

/// Runs a tool to its end; what it printed.
fn done(program: &'static str, image: &Path, command: &mut Command) -> Result<String, Error> {
    let failed = |what: String| Error::Disk { program, image: image.to_owned(), what };
    let output = command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(failed(format!("{}: {said}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl DiskTools {
    /// Makes the disk `image` with one file `name` that says `text`.
    ///
    /// # Errors
    /// The program fails, or a file cannot be written.
    pub fn make(&self, kind: FileSystem, image: &Path, name: &str, text: &str) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::Disk {
            program: "making a disk",
            image: image.to_owned(),
            what: error.to_string(),
        };
        let dir = tempfile::tempdir().map_err(failed)?;
        let content = dir.path().join("content");
        fs::create_dir(&content).and_then(|()| fs::write(content.join(name), text)).map_err(failed)?;
        let sized = || fs::File::create(image).and_then(|file| file.set_len(SIZE << 20)).map_err(failed);
        match kind {
            FileSystem::Ext4 => {
                sized()?;
                let mut command = self.mke2fs.command();
                command.args(["-q", "-F", "-t", "ext4", "-d"]).arg(&content).arg(image);
                done("mke2fs", image, command.env("MKE2FS_CONFIG", ""))
            }
            FileSystem::Xfs => {
                sized()?;
                // Its name for a boot block that is not there, two numbers that nobody reads, the root.
                let prototype: PathBuf = dir.path().join("prototype");
                let file = content.join(name);
                let lines = format!("/\n0 0\nd--755 0 0\n{name} ---644 0 0 {}\n$\n", file.display());
                fs::write(&prototype, lines).map_err(failed)?;
                let mut command = self.mkfs_xfs.command();
                done("mkfs.xfs", image, command.args(["-q", "-f", "-p"]).arg(&prototype).arg(image))
            }
            FileSystem::Squashfs => {
                let mut command = self.mksquashfs.command();
                command.arg(&content).arg(image).args(["-noappend", "-quiet", "-no-progress", "-all-root"]);
                done("mksquashfs", image, &mut command)
            }
            FileSystem::Erofs => {
                let mut command = self.mkfs_erofs.command();
                done("mkfs.erofs", image, command.args(["--quiet", "--all-root"]).arg(image).arg(&content))
            }
        }
        .map(drop)
    }

    /// Makes the ext4 disk `image` of so many MiB with everything in `content`, all of it root's.
    ///
    /// # Errors
    /// The program fails, or the file cannot be made.
    pub fn pack(&self, content: &Path, image: &Path, mib: u64) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::Disk {
            program: "making a disk",
            image: image.to_owned(),
            what: error.to_string(),
        };
        fs::File::create(image).and_then(|file| file.set_len(mib << 20)).map_err(failed)?;
        let mut command = self.mke2fs.command();
        command.args(["-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d"]).arg(content).arg(image);
        done("mke2fs", image, command.env("MKE2FS_CONFIG", "")).map(drop)
    }

    /// What a file on an ext4 disk says, read without mounting it.
    ///
    /// # Errors
    /// There is no such file system.
    pub fn read_ext4(&self, image: &Path, file: &str) -> Result<String, Error> {
        let mut command = self.debugfs.command();
        done("debugfs", image, command.arg("-R").arg(format!("cat {file}")).arg(image))
    }
}
