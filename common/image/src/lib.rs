//! What a built image is: the contract between image-builder, which writes
//! images, and the host side, which boots them.
//!
//! A built image is a directory: `image.json` ([`ImageRecord`]), a kernel, and
//! an initramfs or a disk. [`BootFiles::open`] determines from the record what
//! a virtual machine needs to boot it: kernel, initramfs, disks, command line.
#![forbid(unsafe_code)]

mod boot_files;
pub mod digest;
mod record;

pub use boot_files::{BootFiles, CONSOLE, ExtensionDisk, KERNEL, NotBootable, OpenError};
pub use digest::FileDigest;
pub use record::{
    ArchiveRecord, DriverRecord, FileRecord, ImageRecord, Origin, PackageRecord, RECORD, RecordError, SuiteRecord,
    VerityRecord, is_plain_name, package_id,
};
