//! What a virtual machine needs to boot a built image.

use std::path::{Path, PathBuf};

use firstlight_verity::extension::serial;

use crate::record::{ImageRecord, RecordError, is_plain_name};

/// Name of the kernel among an image's files.
pub const KERNEL: &str = "vmlinux";

/// Kernel parameters of every boot: console on virtio, and QEMU exits on a panic.
pub const CONSOLE: &str = "console=hvc0 quiet panic=-1";

/// Why an image cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Its record does not describe a bootable image.
    #[error("cannot boot {}: {reason}", dir.display())]
    NotBootable {
        /// The image's directory.
        dir: PathBuf,
        /// What is wrong with it.
        reason: NotBootable,
    },
}

/// What is wrong with an image that cannot be booted, and what to do instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotBootable {
    /// It is an extension.
    #[error("it is the extension {0} of an image: boot the image that it extends, with --extension")]
    IsExtension(String),
    /// An extension was expected.
    #[error("it is not an extension: its manifest has no image.extension")]
    NotExtension,
    /// It has no kernel.
    #[error("its record has no {KERNEL}: build it again")]
    NoKernel,
    /// It has neither an initramfs nor a disk.
    #[error("it has neither an initramfs nor a disk: build it again")]
    NoRoot,
    /// An extension has no disk.
    #[error("its record has no disk: build it again")]
    NoDisk,
    /// An opener was given for an initramfs.
    #[error("it is an initramfs, and --opener is for disks with dm-verity")]
    OpenerForInitramfs,
    /// The opener is not an initramfs.
    #[error("it is not an initramfs, so it cannot be an --opener")]
    OpenerIsNotInitramfs,
    /// Its modules are for another kernel than the image's.
    #[error("its modules are for kernel {own}, and the image has {image}: build both with the same kernel")]
    OtherKernel {
        /// Its kernel release.
        own: String,
        /// The image's kernel release.
        image: String,
    },
}

/// The disk of an extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtensionDisk {
    /// Raw content, read-only.
    pub file: PathBuf,
    /// Serial number of the virtio-blk device, by which the guest finds it.
    pub serial: String,
}

/// What a virtual machine needs to boot an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootFiles {
    /// An uncompressed kernel with a PVH entry.
    pub kernel: PathBuf,
    /// The initramfs: the image, or an opener for it.
    pub initrd: Option<PathBuf>,
    /// The image's disk: must be the first virtio-blk device, read-only.
    pub disk: Option<PathBuf>,
    /// Whether dm-verity verifies that disk.
    pub verity: bool,
    /// The disks of extensions, read-only.
    pub extensions: Vec<ExtensionDisk>,
    /// Kernel command line, with [`CONSOLE`].
    pub command_line: String,
}

impl BootFiles {
    /// Reads the record of the image in `dir`, and the records of its opener and extensions.
    ///
    /// `opener` is the directory of an opener: an initramfs that opens the
    /// image's dm-verity disk for a kernel without `CONFIG_DM_INIT`.
    ///
    /// # Errors
    /// A record cannot be read, does not describe something that boots, or an opener or an extension has modules of
    /// another kernel.
    pub fn open(dir: &Path, opener: Option<&Path>, extensions: &[PathBuf]) -> Result<Self, OpenError> {
        let record = ImageRecord::read(dir)?;
        let mut files = root(dir, opener.is_some(), &record).map_err(|reason| not_bootable(dir, reason))?;
        if let Some(dir) = opener {
            let record_of_opener = ImageRecord::read(dir)?;
            let initrd = opener_initrd(&record_of_opener, &record).map_err(|reason| not_bootable(dir, reason))?;
            files.initrd = Some(dir.join(initrd));
        }
        for dir in extensions {
            let record_of_extension = ImageRecord::read(dir)?;
            let (disk, serial) =
                extension_disk(&record_of_extension, &record).map_err(|reason| not_bootable(dir, reason))?;
            files.extensions.push(ExtensionDisk { file: dir.join(disk), serial });
            if let Some(parameter) = &record_of_extension.command_line {
                files.append(parameter);
            }
        }
        Ok(files)
    }

    /// Adds kernel parameters.
    pub fn append(&mut self, parameters: &str) {
        let parameters = parameters.trim();
        if !parameters.is_empty() {
            self.command_line.push(' ');
            self.command_line.push_str(parameters);
        }
    }

    /// Returns all files that the virtual machine reads.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let one = [Some(&self.kernel), self.initrd.as_ref(), self.disk.as_ref()];
        one.into_iter().flatten().chain(self.extensions.iter().map(|extension| &extension.file)).map(PathBuf::as_path)
    }
}

fn not_bootable(dir: &Path, reason: NotBootable) -> OpenError {
    OpenError::NotBootable { dir: dir.to_owned(), reason }
}

/// Returns the image's kernel with its root, without opener and extensions.
fn root(dir: &Path, has_opener: bool, record: &ImageRecord) -> Result<BootFiles, NotBootable> {
    if let Some(name) = &record.extension {
        return Err(NotBootable::IsExtension(name.clone()));
    }
    let kernel = output(record, |name| name == KERNEL).ok_or(NotBootable::NoKernel)?;
    let mut files = BootFiles {
        kernel: dir.join(kernel),
        initrd: None,
        disk: None,
        verity: record.verity.is_some(),
        extensions: Vec::new(),
        command_line: CONSOLE.to_owned(),
    };
    match (initramfs(record), disk(record)) {
        (Some(_), _) if has_opener => Err(NotBootable::OpenerForInitramfs),
        (Some(initrd), _) => {
            files.initrd = Some(dir.join(initrd));
            Ok(files)
        }
        (None, Some(disk)) => {
            files.disk = Some(dir.join(disk));
            files.append(record.command_line.as_deref().unwrap_or_default());
            Ok(files)
        }
        (None, None) => Err(NotBootable::NoRoot),
    }
}

/// Returns the name of the output that `is` selects. A name that leads out of the directory is ignored.
fn output(record: &ImageRecord, is: impl Fn(&str) -> bool) -> Option<&str> {
    record.outputs.keys().map(String::as_str).find(|name| is_plain_name(name) && is(name))
}

fn initramfs(record: &ImageRecord) -> Option<&str> {
    output(record, |name| name.starts_with("initrd."))
}

fn disk(record: &ImageRecord) -> Option<&str> {
    output(record, |name| name.ends_with(".img"))
}

fn check_kernel(own: &ImageRecord, image: &ImageRecord) -> Result<(), NotBootable> {
    if own.kernel_release == image.kernel_release {
        return Ok(());
    }
    Err(NotBootable::OtherKernel { own: own.kernel_release.clone(), image: image.kernel_release.clone() })
}

fn opener_initrd<'a>(opener: &'a ImageRecord, image: &ImageRecord) -> Result<&'a str, NotBootable> {
    check_kernel(opener, image)?;
    initramfs(opener).ok_or(NotBootable::OpenerIsNotInitramfs)
}

/// Returns the name of an extension's disk and its serial number.
fn extension_disk<'a>(extension: &'a ImageRecord, image: &ImageRecord) -> Result<(&'a str, String), NotBootable> {
    let name = extension.extension.as_deref().ok_or(NotBootable::NotExtension)?;
    check_kernel(extension, image)?;
    Ok((disk(extension).ok_or(NotBootable::NoDisk)?, serial(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileDigest;

    fn written(record: &ImageRecord) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(crate::RECORD), serde_json::to_vec(record).unwrap()).unwrap();
        dir
    }

    fn with_outputs(names: &[&str]) -> ImageRecord {
        let digest = FileDigest { size: 1, sha256: String::new() };
        let outputs = names.iter().map(|name| ((*name).to_owned(), digest.clone())).collect();
        ImageRecord { name: "x".into(), kernel_release: "6.12".into(), outputs, ..ImageRecord::default() }
    }

    fn reason(result: Result<BootFiles, OpenError>, dir: &Path) -> NotBootable {
        match result.unwrap_err() {
            OpenError::NotBootable { dir: named, reason } => {
                assert_eq!(named, dir);
                reason
            }
            error @ OpenError::Record(_) => panic!("{error}"),
        }
    }

    #[test]
    fn initramfs_is_passed_with_the_kernel() {
        let dir = written(&with_outputs(&["initrd.cpio.zst", "kata.toml", "vmlinux"]));
        let mut files = BootFiles::open(dir.path(), None, &[]).unwrap();
        assert_eq!(files.kernel, dir.path().join("vmlinux"));
        assert_eq!(files.initrd, Some(dir.path().join("initrd.cpio.zst")));
        assert_eq!(files.files().count(), 2);
        for parameters in ["", "  ", " firstlight.mode=cpu "] {
            files.append(parameters);
        }
        assert_eq!(files.command_line, "console=hvc0 quiet panic=-1 firstlight.mode=cpu");
    }

    #[test]
    fn disk_needs_the_records_command_line_and_an_opener_of_the_same_kernel() {
        let mut record = with_outputs(&["rootfs.img", "vmlinux"]);
        record.command_line = Some("root=/dev/vda1 ro".into());
        let dir = written(&record);
        let files = BootFiles::open(dir.path(), None, &[]).unwrap();
        assert_eq!((files.initrd, files.disk), (None, Some(dir.path().join("rootfs.img"))));
        assert_eq!(files.command_line, "console=hvc0 quiet panic=-1 root=/dev/vda1 ro");

        let opener = written(&with_outputs(&["initrd.cpio", "vmlinux"]));
        let files = BootFiles::open(dir.path(), Some(opener.path()), &[]).unwrap();
        assert_eq!(files.initrd, Some(opener.path().join("initrd.cpio")));
        let other = written(&ImageRecord { kernel_release: "6.13".into(), ..with_outputs(&["initrd.cpio"]) });
        let error = BootFiles::open(dir.path(), Some(other.path()), &[]);
        let expected = NotBootable::OtherKernel { own: "6.13".into(), image: "6.12".into() };
        assert_eq!(reason(error, other.path()), expected);
        let no_opener = BootFiles::open(dir.path(), Some(dir.path()), &[]);
        assert_eq!(reason(no_opener, dir.path()), NotBootable::OpenerIsNotInitramfs);
    }

    #[test]
    fn extension_is_a_disk_with_a_serial_number_and_a_kernel_parameter() {
        let parameter = "kata.extension.gpu.verity_params=root_hash=ab";
        let mut record = with_outputs(&["extension-gpu.img", "vmlinux"]);
        record.extension = Some("gpu".into());
        record.command_line = Some(parameter.into());
        let (base, extension) = (written(&with_outputs(&["initrd.cpio", "vmlinux"])), written(&record));
        let with = |dir: &Path| BootFiles::open(base.path(), None, &[dir.to_owned()]);
        let files = with(extension.path()).unwrap();
        let disk = ExtensionDisk { file: extension.path().join("extension-gpu.img"), serial: "extension-gpu".into() };
        assert_eq!(files.extensions, [disk]);
        assert_eq!(files.command_line, format!("console=hvc0 quiet panic=-1 {parameter}"));
        assert_eq!(files.files().count(), 3);

        assert_eq!(reason(with(base.path()), base.path()), NotBootable::NotExtension);
        let alone = BootFiles::open(extension.path(), None, &[]);
        assert_eq!(reason(alone, extension.path()), NotBootable::IsExtension("gpu".into()));
        record.kernel_release = "6.13".into();
        let other = written(&record);
        assert!(matches!(reason(with(other.path()), other.path()), NotBootable::OtherKernel { .. }));
    }

    #[test]
    fn incomplete_image_is_refused_with_the_reason() {
        let rows = [
            (with_outputs(&["initrd.cpio"]), NotBootable::NoKernel),
            (with_outputs(&["vmlinux"]), NotBootable::NoRoot),
            // Untrusted names that lead out of the directory.
            (with_outputs(&["vmlinux", "initrd./../../x"]), NotBootable::NoRoot),
        ];
        for (record, expected) in rows {
            let dir = written(&record);
            assert_eq!(reason(BootFiles::open(dir.path(), None, &[]), dir.path()), expected);
        }
        let dir = written(&with_outputs(&["vmlinux", "initrd.cpio"]));
        let with_opener = BootFiles::open(dir.path(), Some(dir.path()), &[]);
        assert_eq!(reason(with_opener, dir.path()), NotBootable::OpenerForInitramfs);
        let error = BootFiles::open(Path::new("/nonexistent"), None, &[]).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("output directory of image-builder"), "{error}");
    }
}
