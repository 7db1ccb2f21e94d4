//! What is asked for: a format, how it is compressed, and what comes with it.

use std::ops::RangeInclusive;

use firstlight_verity::extension;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::verity;

/// The kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// An initial RAM file system that is the root.
    Initramfs,
    /// A disk with EROFS on it, read-only.
    Erofs,
    /// A disk with squashfs on it, read-only.
    Squashfs,
    /// A disk with ext4 on it.
    Ext4,
}

/// How contents are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all.
    None,
    /// LZ4.
    Lz4,
    /// LZ4, with more time spent on packing; unpacks the same way.
    Lz4hc,
    /// Zstandard.
    Zstd,
    /// xz.
    Xz,
}

/// What a format can be packed with.
struct Choice {
    compression: Compression,
    /// The levels, and the one that is taken if none is given.
    levels: Option<(RangeInclusive<u32>, u32)>,
    /// The largest part that is packed in one.
    largest_cluster: u32,
}

const fn choice(compression: Compression, levels: Option<(RangeInclusive<u32>, u32)>, largest_cluster: u32) -> Choice {
    Choice { compression, levels, largest_cluster }
}

const MIB: u32 = 1 << 20;
/// Parts of an image that are packed in one have at least this size.
const SMALLEST_CLUSTER: u32 = 4096;

/// The default is the first.
const INITRAMFS: &[Choice] = &[
    choice(Compression::None, None, 0),
    // Levels beyond hardly pack more.
    choice(Compression::Lz4, Some((1..=12, 9)), 0),
    // Higher levels need more memory to unpack than small guests have.
    choice(Compression::Zstd, Some((1..=19, 9)), 0),
];
const EROFS: &[Choice] = &[
    choice(Compression::Lz4hc, Some((1..=12, 12)), MIB),
    choice(Compression::Lz4, None, MIB),
    // Larger ones crash the program that makes them.
    choice(Compression::Zstd, Some((1..=19, 3)), MIB / 16),
    choice(Compression::None, None, 0),
];
const SQUASHFS: &[Choice] = &[
    choice(Compression::Zstd, Some((1..=22, 15)), MIB),
    choice(Compression::Lz4hc, None, MIB),
    choice(Compression::Lz4, None, MIB),
    choice(Compression::Xz, None, MIB),
    choice(Compression::None, None, MIB),
];
const EXT4: &[Choice] = &[choice(Compression::None, None, 0)];

impl Format {
    /// As manifests and the kernel call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Initramfs => "initramfs",
            Self::Erofs => "erofs",
            Self::Squashfs => "squashfs",
            Self::Ext4 => "ext4",
        }
    }

    fn choices(self) -> &'static [Choice] {
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
    /// As manifests call it.
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

fn wrong(key: &'static str, value: impl ToString, what: impl Into<String>) -> InvalidSetting {
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
        let choices = format.choices();
        let choice = match settings.compression {
            None => choices.first(),
            Some(name) => choices.iter().find(|choice| choice.compression == name),
        };
        let choice = choice.ok_or_else(|| {
            let known: Vec<&str> = choices.iter().map(|choice| choice.compression.name()).collect();
            let value = settings.compression.map_or("", Compression::name);
            wrong("image.compression", value, format!("{} has {}", format.name(), known.join(", ")))
        })?;
        let packed = format!("{} with compression {}", format.name(), choice.compression.name());
        let level = match (settings.level, &choice.levels) {
            (Some(level), None) => return Err(wrong("image.level", level, format!("{packed} has no levels"))),
            (Some(level), Some((levels, _))) if !levels.contains(&level) => {
                let (first, last) = (levels.start(), levels.end());
                return Err(wrong("image.level", level, format!("{packed} has levels {first} to {last}")));
            }
            (level, levels) => level.or(levels.as_ref().map(|(_, usual)| *usual)),
        };
        let cluster = match settings.cluster {
            Some(size) if choice.largest_cluster == 0 => {
                return Err(wrong("image.cluster", size, format!("{packed} has no clusters")));
            }
            Some(size) if !size.is_power_of_two() || !(SMALLEST_CLUSTER..=choice.largest_cluster).contains(&size) => {
                let last = choice.largest_cluster;
                let what = format!("{packed} has clusters of {SMALLEST_CLUSTER} to {last} bytes, powers of two");
                return Err(wrong("image.cluster", size, what));
            }
            Some(size) => size,
            None if choice.largest_cluster == 0 => 0,
            None => format.default_cluster(),
        };
        if let Some(name) = settings.extension {
            if format == Format::Initramfs {
                return Err(wrong("image.extension", name, "an extension is a disk, an initramfs is none"));
            }
            if let Err(error) = extension::check(name) {
                return Err(wrong("image.extension", name, format!("{error}: a part of a serial number")));
            }
        }
        let verity = match settings.verity {
            Some(_) if format == Format::Initramfs => {
                return Err(wrong(
                    "verity",
                    "",
                    "dm-verity checks disks: an initramfs is measured whole by who loads it",
                ));
            }
            Some(salt) => Some(VerityPlan { salt: salt.map(salt_of).transpose()? }),
            None => None,
        };
        Ok(Self {
            name: settings.name.to_owned(),
            format,
            compression: choice.compression,
            level,
            cluster,
            extension: settings.extension.map(str::to_owned),
            verity,
        })
    }

    /// The name of the image's file.
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

    /// For people: `erofs, lz4hc 12, clusters of 64 KiB, dm-verity`.
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

    fn named(&self, what: &str) -> [u8; 16] {
        let hash = Sha256::new().chain_update(what).chain_update(&self.name).finalize();
        std::array::from_fn(|index| hash[index])
    }

    /// The file system's identifier: another name, another one. Its form is
    /// that for identifiers made as their maker likes (RFC 9562, version 8).
    #[must_use]
    pub fn uuid(&self) -> String {
        let mut bytes = self.named("firstlight file system ");
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let digits = hex::encode(bytes);
        let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
        parts.join("-")
    }

    /// The disk's number.
    pub(super) fn signature(&self) -> u32 {
        let [a, b, c, d, ..] = self.named("firstlight disk ");
        // Zero would say that there is none.
        u32::from_le_bytes([a, b, c, d]).max(1)
    }
}

fn salt_of(text: &str) -> Result<Vec<u8>, InvalidSetting> {
    let salt = hex::decode(text).ok().filter(|salt| !salt.is_empty() && salt.len() <= verity::MAX_SALT);
    salt.ok_or_else(|| wrong("verity.salt", text, "expected 1 to 256 bytes in hexadecimal"))
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
            (FormatSettings { compression: Some(Compression::Lz4), ..ext4 }, "image.compression", "ext4 has none"),
            (FormatSettings { level: Some(13), ..EROFS_SETTINGS }, "image.level", "1 to 12"),
            (FormatSettings { level: Some(1), ..ext4 }, "image.level", "no levels"),
            (FormatSettings { cluster: Some(65535), ..EROFS_SETTINGS }, "image.cluster", "powers of two"),
            (FormatSettings { cluster: Some(1 << 20), ..zstd }, "image.cluster", "65536"),
            (FormatSettings { cluster: Some(4096), ..initramfs }, "image.cluster", "no clusters"),
            (FormatSettings { extension: Some("gpu"), ..initramfs }, "image.extension", "a disk"),
            (FormatSettings { extension: Some("much-too-long"), ..EROFS_SETTINGS }, "image.extension", "1 to 10"),
            (FormatSettings { extension: Some("a b"), ..EROFS_SETTINGS }, "image.extension", "a-z"),
            (FormatSettings { verity: Some(None), ..initramfs }, "verity", "disks"),
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
