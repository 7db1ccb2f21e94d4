//! Format settings of an image: format, compression, extension name and dm-verity.

use std::ops::RangeInclusive;

use firstlight_verity::extension;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::verity;

/// An image format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// An initial RAM file system, used as root.
    Initramfs,
    /// A disk image with EROFS, read-only.
    Erofs,
    /// A disk image with squashfs, read-only.
    Squashfs,
    /// A disk image with ext4.
    Ext4,
}

/// A compression algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// No compression.
    None,
    /// LZ4.
    Lz4,
    /// LZ4 with the slower high-compression encoder; the format is that of LZ4.
    Lz4hc,
    /// Zstandard.
    Zstd,
    /// xz.
    Xz,
}

/// A compression algorithm that a format supports.
struct Support {
    compression: Compression,
    /// The supported levels, and the default level.
    levels: Option<(RangeInclusive<u32>, u32)>,
    /// The largest compression cluster in bytes; 0 if the format has none.
    max_cluster: u32,
}

const fn support(compression: Compression, levels: Option<(RangeInclusive<u32>, u32)>, max_cluster: u32) -> Support {
    Support { compression, levels, max_cluster }
}

const MIB: u32 = 1 << 20;
/// The smallest compression cluster in bytes.
const MIN_CLUSTER: u32 = 4096;

/// The first is the default, here and below.
const INITRAMFS: &[Support] = &[
    support(Compression::None, None, 0),
    // Higher levels hardly compress better.
    support(Compression::Lz4, Some((1..=12, 9)), 0),
    // Higher levels need more memory for decompression than small guests have.
    support(Compression::Zstd, Some((1..=19, 9)), 0),
];
const EROFS: &[Support] = &[
    support(Compression::Lz4hc, Some((1..=12, 12)), MIB),
    support(Compression::Lz4, None, MIB),
    // mkfs.erofs crashes with larger clusters.
    support(Compression::Zstd, Some((1..=19, 3)), MIB / 16),
    support(Compression::None, None, 0),
];
const SQUASHFS: &[Support] = &[
    support(Compression::Zstd, Some((1..=22, 15)), MIB),
    support(Compression::Lz4hc, None, MIB),
    support(Compression::Lz4, None, MIB),
    support(Compression::Xz, None, MIB),
    support(Compression::None, None, MIB),
];
const EXT4: &[Support] = &[support(Compression::None, None, 0)];

impl Format {
    /// Returns the name used in manifests and by the kernel.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Initramfs => "initramfs",
            Self::Erofs => "erofs",
            Self::Squashfs => "squashfs",
            Self::Ext4 => "ext4",
        }
    }

    fn supported(self) -> &'static [Support] {
        match self {
            Self::Initramfs => INITRAMFS,
            Self::Erofs => EROFS,
            Self::Squashfs => SQUASHFS,
            Self::Ext4 => EXT4,
        }
    }

    fn default_cluster(self) -> u32 {
        match self {
            Self::Initramfs | Self::Ext4 => 0,
            Self::Erofs => 64 << 10,
            Self::Squashfs => 128 << 10,
        }
    }
}

impl Compression {
    /// Returns the name used in manifests.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Lz4hc => "lz4hc",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
        }
    }
}

/// Invalid value of a manifest key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value:?}: {what}")]
pub struct InvalidSetting {
    /// The key's path, such as `image.level`.
    pub key: &'static str,
    /// The rejected value.
    pub value: String,
    /// What is wrong with it.
    pub what: String,
}

fn invalid(key: &'static str, value: impl ToString, what: impl Into<String>) -> InvalidSetting {
    InvalidSetting { key, value: value.to_string(), what: what.into() }
}

/// Options of the dm-verity hash tree.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerityPlan {
    /// The salt; derived from name and content if absent.
    pub salt: Option<Vec<u8>>,
}

/// Validated format settings with every default resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The image's name; UUIDs are derived from it.
    pub name: String,
    /// The format.
    pub format: Format,
    /// The compression algorithm.
    pub compression: Compression,
    /// The compression level, for algorithms that have one.
    pub level: Option<u32>,
    /// The largest compression cluster, bytes; 0 if the format has none.
    pub cluster: u32,
    /// The name under which a guest mounts an extension image.
    pub extension: Option<String>,
    /// Whether there is a dm-verity hash tree.
    pub verity: Option<VerityPlan>,
}

/// Format settings of a manifest, before defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FormatSettings<'a> {
    /// `image.name`
    pub name: &'a str,
    /// `image.format`
    pub format: Format,
    /// `image.compression`
    pub compression: Option<Compression>,
    /// `image.level`
    pub level: Option<u32>,
    /// `image.cluster`
    pub cluster: Option<u32>,
    /// `image.extension`
    pub extension: Option<&'a str>,
    /// `verity`, and `verity.salt` in hexadecimal
    pub verity: Option<Option<&'a str>>,
}

impl Plan {
    /// Checks that the settings are compatible and fills in defaults.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn new(settings: &FormatSettings<'_>) -> Result<Self, InvalidSetting> {
        let format = settings.format;
        let supported = format.supported();
        let support = match settings.compression {
            None => supported.first(),
            Some(name) => supported.iter().find(|support| support.compression == name),
        };
        let support = support.ok_or_else(|| {
            let known: Vec<&str> = supported.iter().map(|support| support.compression.name()).collect();
            let value = settings.compression.map_or("", Compression::name);
            invalid("image.compression", value, format!("{} supports {}", format.name(), known.join(", ")))
        })?;
        let format_text = format!("{} with compression {}", format.name(), support.compression.name());
        let level = match (settings.level, &support.levels) {
            (Some(level), None) => return Err(invalid("image.level", level, format!("{format_text} has no levels"))),
            (Some(level), Some((levels, _))) if !levels.contains(&level) => {
                let (first, last) = (levels.start(), levels.end());
                return Err(invalid("image.level", level, format!("{format_text} has levels {first} to {last}")));
            }
            (level, levels) => level.or(levels.as_ref().map(|(_, default)| *default)),
        };
        let cluster = match settings.cluster {
            Some(size) if support.max_cluster == 0 => {
                return Err(invalid("image.cluster", size, format!("{format_text} has no clusters")));
            }
            Some(size) if !size.is_power_of_two() || !(MIN_CLUSTER..=support.max_cluster).contains(&size) => {
                let last = support.max_cluster;
                let what = format!("{format_text} has clusters of {MIN_CLUSTER} to {last} bytes, powers of two");
                return Err(invalid("image.cluster", size, what));
            }
            Some(size) => size,
            None if support.max_cluster == 0 => 0,
            None => format.default_cluster(),
        };
        if let Some(name) = settings.extension {
            if format == Format::Initramfs {
                return Err(invalid("image.extension", name, "an extension must be a disk image, not an initramfs"));
            }
            if let Err(error) = extension::check(name) {
                return Err(invalid("image.extension", name, format!("{error}; it is part of a disk's serial number")));
            }
        }
        let verity = match settings.verity {
            Some(_) if format == Format::Initramfs => {
                return Err(invalid(
                    "verity",
                    "",
                    "dm-verity applies to disk images only: an initramfs is measured as a whole by the boot loader",
                ));
            }
            Some(salt) => Some(VerityPlan { salt: salt.map(parse_salt).transpose()? }),
            None => None,
        };
        Ok(Self {
            name: settings.name.to_owned(),
            format,
            compression: support.compression,
            level,
            cluster,
            extension: settings.extension.map(str::to_owned),
            verity,
        })
    }

    /// Returns the name of the image file.
    #[must_use]
    pub fn file_name(&self) -> String {
        match (self.format, self.compression, &self.extension) {
            (Format::Initramfs, Compression::Lz4, _) => "initrd.cpio.lz4".to_owned(),
            (Format::Initramfs, Compression::Zstd, _) => "initrd.cpio.zst".to_owned(),
            (Format::Initramfs, ..) => "initrd.cpio".to_owned(),
            (.., Some(name)) => format!("extension-{name}.img"),
            _ => "rootfs.img".to_owned(),
        }
    }

    /// Returns a description for messages: `erofs, lz4hc 12, clusters of 64 KiB, dm-verity`.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = format!("{}, {}", self.format.name(), self.compression.name());
        if let Some(level) = self.level {
            text.push_str(&format!(" {level}"));
        }
        if self.cluster != 0 {
            text.push_str(&format!(", clusters of {} KiB", self.cluster >> 10));
        }
        if self.verity.is_some() {
            text.push_str(", dm-verity");
        }
        text
    }

    /// Returns 16 bytes derived from the purpose and the image's name.
    fn derive_id(&self, purpose: &str) -> [u8; 16] {
        let hash = Sha256::new().chain_update(purpose).chain_update(&self.name).finalize();
        std::array::from_fn(|index| hash[index])
    }

    /// Returns the file system's UUID, derived from the name (RFC 9562, version 8:
    /// custom UUIDs).
    #[must_use]
    pub fn uuid(&self) -> String {
        let mut bytes = self.derive_id("firstlight file system ");
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let digits = hex::encode(bytes);
        let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
        parts.join("-")
    }

    /// Returns the disk identifier of the partition table.
    pub(super) fn signature(&self) -> u32 {
        let [a, b, c, d, ..] = self.derive_id("firstlight disk ");
        // Zero means that the disk has no identifier.
        u32::from_le_bytes([a, b, c, d]).max(1)
    }
}

fn parse_salt(text: &str) -> Result<Vec<u8>, InvalidSetting> {
    let salt = hex::decode(text).ok().filter(|salt| !salt.is_empty() && salt.len() <= verity::MAX_SALT);
    salt.ok_or_else(|| invalid("verity.salt", text, "expected 1 to 256 bytes in hexadecimal"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EROFS_SETTINGS: FormatSettings<'_> = FormatSettings {
        name: "base",
        format: Format::Erofs,
        compression: None,
        level: None,
        cluster: None,
        extension: None,
        verity: None,
    };

    #[test]
    fn absent_settings_get_measured_defaults() {
        let plan = Plan::new(&FormatSettings { verity: Some(None), ..EROFS_SETTINGS }).unwrap();
        assert_eq!(plan.summary(), "erofs, lz4hc 12, clusters of 64 KiB, dm-verity");
        assert_eq!(plan.file_name(), "rootfs.img");
        let plan = |format| Plan::new(&FormatSettings { format, ..EROFS_SETTINGS }).unwrap();
        assert_eq!(plan(Format::Initramfs).summary(), "initramfs, none");
        assert_eq!(plan(Format::Squashfs).summary(), "squashfs, zstd 15, clusters of 128 KiB");
        assert_eq!(plan(Format::Ext4).summary(), "ext4, none");
    }

    #[test]
    fn incompatible_settings_are_reported_by_key() {
        let initramfs = FormatSettings { format: Format::Initramfs, ..EROFS_SETTINGS };
        let ext4 = FormatSettings { format: Format::Ext4, ..EROFS_SETTINGS };
        let zstd = FormatSettings { compression: Some(Compression::Zstd), ..EROFS_SETTINGS };
        for (settings, key, word) in [
            (
                FormatSettings { compression: Some(Compression::Xz), ..EROFS_SETTINGS },
                "image.compression",
                "lz4hc, lz4, zstd",
            ),
            (FormatSettings { compression: Some(Compression::Lz4), ..ext4 }, "image.compression", "ext4 supports none"),
            (FormatSettings { level: Some(13), ..EROFS_SETTINGS }, "image.level", "1 to 12"),
            (FormatSettings { level: Some(1), ..ext4 }, "image.level", "no levels"),
            (FormatSettings { cluster: Some(65535), ..EROFS_SETTINGS }, "image.cluster", "powers of two"),
            (FormatSettings { cluster: Some(1 << 20), ..zstd }, "image.cluster", "65536"),
            (FormatSettings { cluster: Some(4096), ..initramfs }, "image.cluster", "no clusters"),
            (FormatSettings { extension: Some("gpu"), ..initramfs }, "image.extension", "a disk"),
            (FormatSettings { extension: Some("much-too-long"), ..EROFS_SETTINGS }, "image.extension", "1 to 10"),
            (FormatSettings { extension: Some("a b"), ..EROFS_SETTINGS }, "image.extension", "a-z"),
            (FormatSettings { verity: Some(None), ..initramfs }, "verity", "disk images"),
            (FormatSettings { verity: Some(Some("abc")), ..EROFS_SETTINGS }, "verity.salt", "hexadecimal"),
        ] {
            let error = Plan::new(&settings).unwrap_err();
            assert_eq!(error.key, key);
            assert!(error.what.contains(word), "{error}");
        }
    }

    #[test]
    fn identifiers_derive_from_the_name() {
        let plan = |name| Plan::new(&FormatSettings { name, ..EROFS_SETTINGS }).unwrap();
        let uuid = plan("base").uuid();
        assert_eq!(uuid, plan("base").uuid());
        assert_ne!(uuid, plan("base2").uuid());
        assert_eq!(uuid.len(), 36);
        assert_eq!((&uuid[14..15], &uuid[8..9]), ("8", "-"));
        assert!("89ab".contains(&uuid[19..20]), "{uuid}");
        assert_ne!(plan("base").signature(), plan("base2").signature());
    }
}
