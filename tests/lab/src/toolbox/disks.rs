//! Creates and reads disks of guests: file systems in files, without mounting them.

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

/// Size of a disk, MiB: the minimum of XFS. The file is sparse.
const SIZE: u64 = 320;

/// File system of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, writable.
    Ext4,
    /// XFS, writable.
    Xfs,
    /// squashfs: compressed, read-only.
    Squashfs,
    /// EROFS: read-only.
    Erofs,
}

/// Programs that create and read file systems.
#[derive(Debug, Clone)]
pub struct DiskTools {
    mke2fs: Tool,
    debugfs: Tool,
    mkfs_xfs: Tool,
    mksquashfs: Tool,
    mkfs_erofs: Tool,
}

impl Toolbox {
    /// Fetches the programs that create disks for guests.
    ///
    /// # Errors
    /// A package cannot be fetched, or a file operation failed.
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

/// Runs a tool and returns its standard output.
fn run_tool(program: &'static str, image: &Path, command: &mut Command) -> Result<String, Error> {
    let failed = |what: String| Error::Disk { program, image: image.to_owned(), what };
    let output = command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(failed(format!("{}: {errors}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl DiskTools {
    /// Creates the disk `image` with one file `name` with the content `text`.
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
                run_tool("mke2fs", image, command.env("MKE2FS_CONFIG", ""))
            }
            FileSystem::Xfs => {
                sized()?;
                // mkfs.xfs(8), prototype file: boot block and two numbers (all unused), then the root directory.
                let prototype: PathBuf = dir.path().join("prototype");
                let file = content.join(name);
                let lines = format!("/\n0 0\nd--755 0 0\n{name} ---644 0 0 {}\n$\n", file.display());
                fs::write(&prototype, lines).map_err(failed)?;
                let mut command = self.mkfs_xfs.command();
                run_tool("mkfs.xfs", image, command.args(["-q", "-f", "-p"]).arg(&prototype).arg(image))
            }
            FileSystem::Squashfs => {
                let mut command = self.mksquashfs.command();
                command.arg(&content).arg(image).args(["-noappend", "-quiet", "-no-progress", "-all-root"]);
                run_tool("mksquashfs", image, &mut command)
            }
            FileSystem::Erofs => {
                let mut command = self.mkfs_erofs.command();
                run_tool("mkfs.erofs", image, command.args(["--quiet", "--all-root"]).arg(image).arg(&content))
            }
        }
        .map(drop)
    }

    /// Creates the ext4 disk `image` of `mib` MiB with the content of a directory, owned by root.
    ///
    /// # Errors
    /// The program fails, or the file cannot be created.
    pub fn pack(&self, content: &Path, image: &Path, mib: u64) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::Disk {
            program: "making a disk",
            image: image.to_owned(),
            what: error.to_string(),
        };
        fs::File::create(image).and_then(|file| file.set_len(mib << 20)).map_err(failed)?;
        let mut command = self.mke2fs.command();
        command.args(["-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d"]).arg(content).arg(image);
        run_tool("mke2fs", image, command.env("MKE2FS_CONFIG", "")).map(drop)
    }

    /// Returns the content of a file on an ext4 disk, read without mounting it.
    ///
    /// # Errors
    /// The disk has no ext4 file system.
    pub fn read_ext4(&self, image: &Path, file: &str) -> Result<String, Error> {
        let mut command = self.debugfs.command();
        run_tool("debugfs", image, command.arg("-R").arg(format!("cat {file}")).arg(image))
    }
}
