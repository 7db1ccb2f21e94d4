//! Parses the mount options of a storage.

use firstlight_agent_api::agent::Storage;
use rustix::mount::{MountAttrFlags as Attribute, MountPropagationFlags as Propagation};

use crate::error::{Error, Result};

/// Upper bound on options per storage (untrusted input).
const MAX_OPTIONS: usize = 256;

/// The kernel's limit on the length of an option's name or value, in bytes.
pub const MAX_LEN: usize = 255;

/// Effect of an option.
#[derive(Debug, Clone, Copy)]
enum OptionEffect {
    /// Sets or clears a mount attribute.
    Mount(Attribute, bool),
    /// Sets or clears a mount attribute recursively.
    MountRecursive(Attribute, bool),
    /// Selects the access time mode.
    AccessTime(Attribute),
    /// A file system flag.
    FileSystem,
    /// Both a mount attribute and a file system flag.
    Both(Attribute, bool),
    /// Mount propagation.
    Propagation(Propagation),
    /// A bind mount; `true` is recursive.
    Bind(bool),
    /// Ignored: meant for user space, or the default.
    Ignored,
}

/// Options that are not passed to the file system as data.
const EFFECTS: &[(&str, OptionEffect)] = &[
    ("ro", OptionEffect::Both(Attribute::MOUNT_ATTR_RDONLY, true)),
    ("rw", OptionEffect::Both(Attribute::MOUNT_ATTR_RDONLY, false)),
    ("nosuid", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOSUID, true)),
    ("suid", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOSUID, false)),
    ("nodev", OptionEffect::Mount(Attribute::MOUNT_ATTR_NODEV, true)),
    ("dev", OptionEffect::Mount(Attribute::MOUNT_ATTR_NODEV, false)),
    ("noexec", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOEXEC, true)),
    ("exec", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOEXEC, false)),
    ("nodiratime", OptionEffect::Mount(Attribute::MOUNT_ATTR_NODIRATIME, true)),
    ("diratime", OptionEffect::Mount(Attribute::MOUNT_ATTR_NODIRATIME, false)),
    ("nosymfollow", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOSYMFOLLOW, true)),
    ("symfollow", OptionEffect::Mount(Attribute::MOUNT_ATTR_NOSYMFOLLOW, false)),
    ("rro", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_RDONLY, true)),
    ("rrw", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_RDONLY, false)),
    ("rnosuid", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NOSUID, true)),
    ("rsuid", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NOSUID, false)),
    ("rnodev", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NODEV, true)),
    ("rdev", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NODEV, false)),
    ("rnoexec", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NOEXEC, true)),
    ("rexec", OptionEffect::MountRecursive(Attribute::MOUNT_ATTR_NOEXEC, false)),
    ("noatime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_NOATIME)),
    ("strictatime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_STRICTATIME)),
    ("relatime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_RELATIME)),
    ("atime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_RELATIME)),
    ("norelatime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_RELATIME)),
    ("nostrictatime", OptionEffect::AccessTime(Attribute::MOUNT_ATTR_RELATIME)),
    ("sync", OptionEffect::FileSystem),
    ("async", OptionEffect::FileSystem),
    ("dirsync", OptionEffect::FileSystem),
    ("lazytime", OptionEffect::FileSystem),
    ("nolazytime", OptionEffect::FileSystem),
    ("private", OptionEffect::Propagation(Propagation::PRIVATE)),
    ("rprivate", OptionEffect::Propagation(Propagation::PRIVATE.union(Propagation::REC))),
    ("shared", OptionEffect::Propagation(Propagation::SHARED)),
    ("rshared", OptionEffect::Propagation(Propagation::SHARED.union(Propagation::REC))),
    ("slave", OptionEffect::Propagation(Propagation::DOWNSTREAM)),
    ("rslave", OptionEffect::Propagation(Propagation::DOWNSTREAM.union(Propagation::REC))),
    ("unbindable", OptionEffect::Propagation(Propagation::UNBINDABLE)),
    ("runbindable", OptionEffect::Propagation(Propagation::UNBINDABLE.union(Propagation::REC))),
    ("bind", OptionEffect::Bind(false)),
    ("rbind", OptionEffect::Bind(true)),
    // All flags are set when the mount is created, so no remount is needed.
    ("remount", OptionEffect::Ignored),
    ("defaults", OptionEffect::Ignored),
    ("silent", OptionEffect::Ignored),
    ("loud", OptionEffect::Ignored),
    // The kernel has removed mandatory locks.
    ("mand", OptionEffect::Ignored),
    ("nomand", OptionEffect::Ignored),
    ("auto", OptionEffect::Ignored),
    ("noauto", OptionEffect::Ignored),
    ("nofail", OptionEffect::Ignored),
    ("_netdev", OptionEffect::Ignored),
    ("user", OptionEffect::Ignored),
    ("nouser", OptionEffect::Ignored),
];

/// Prefixes of options for shims and agents.
const AGENT_PREFIXES: &[&str] = &["io.katacontainers.", "X-kata.", "X-mount.", "X-containerd.", "x-systemd."];

/// The options of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Mount attributes to set.
    pub set: Attribute,
    /// Mount attributes to clear; a bind mount inherits those of its source.
    pub clear: Attribute,
    /// Whether attributes are applied recursively.
    pub recursive_attributes: bool,
    /// Mount propagation.
    pub propagation: Option<Propagation>,
    /// Whether a bind mount is recursive.
    pub recursive: bool,
    /// File system options, in order; those without a value are flags.
    pub data: Vec<(String, Option<String>)>,
    /// `fsgid=N`: owning group of the root.
    pub group: Option<u32>,
    /// `mode=N`, for directories; also passed to file systems as data.
    pub mode: Option<u32>,
    /// Options for the agent only.
    pub agent_options: Vec<String>,
}

impl Options {
    /// Parses a storage's options. An entry may hold several.
    ///
    /// # Errors
    /// A value is not a number, or there are too many options.
    pub fn parse(storage: &Storage) -> Result<Self> {
        Self::of(&storage.options).map_err(|error| error.during(&format!("storage {}", storage.mount_point)))
    }

    /// Parses options.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn of(entries: &[String]) -> Result<Self> {
        let mut options = Self {
            set: Attribute::empty(),
            clear: Attribute::empty(),
            recursive_attributes: false,
            propagation: None,
            recursive: false,
            data: Vec::new(),
            group: None,
            mode: None,
            agent_options: Vec::new(),
        };
        let all: Vec<&str> = entries.iter().flat_map(|entry| split(entry)).collect();
        if all.len() > MAX_OPTIONS {
            return Err(Error::invalid(format!("{} options; at most {MAX_OPTIONS}", all.len())));
        }
        all.into_iter().try_for_each(|option| options.add(option))?;
        Ok(options)
    }

    fn add(&mut self, option: &str) -> Result<()> {
        if let Some((name, effect)) = EFFECTS.iter().find(|(name, _)| *name == option) {
            self.apply(name, *effect);
            return Ok(());
        }
        if AGENT_PREFIXES.iter().any(|mark| option.starts_with(mark)) {
            self.agent_options.push(option.to_owned());
            return Ok(());
        }
        let wrong = |what: &str| Error::invalid(format!("option {option:?}: {what}"));
        if option.contains('\0') {
            return Err(wrong("contains a NUL byte"));
        }
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        match (name, value) {
            ("fsgid", Some(id)) => {
                self.group = Some(id.parse().map_err(|_| wrong("not a group id"))?);
                return Ok(());
            }
            ("mode", Some(mode)) => {
                let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777);
                self.mode = Some(mode.ok_or_else(|| wrong("not an octal mode"))?);
            }
            _ => {}
        }
        let value = value.map(|value| value.trim_matches('"').to_owned());
        self.data.push((name.to_owned(), value));
        Ok(())
    }

    fn apply(&mut self, name: &str, effect: OptionEffect) {
        match effect {
            OptionEffect::Mount(bit, on) => self.attribute(bit, on),
            OptionEffect::MountRecursive(bit, on) => {
                self.recursive_attributes = true;
                self.attribute(bit, on);
            }
            OptionEffect::AccessTime(times) => {
                self.set.remove(Attribute::MOUNT_ATTR__ATIME);
                self.clear |= Attribute::MOUNT_ATTR__ATIME;
                self.set |= times;
            }
            OptionEffect::FileSystem => self.data.push((name.to_owned(), None)),
            OptionEffect::Both(bit, on) => {
                self.attribute(bit, on);
                self.data.push((name.to_owned(), None));
            }
            OptionEffect::Propagation(propagation) => self.propagation = Some(propagation),
            OptionEffect::Bind(recursive) => self.recursive |= recursive,
            OptionEffect::Ignored => {}
        }
    }

    fn attribute(&mut self, bit: Attribute, on: bool) {
        self.set.set(bit, on);
        self.clear.set(bit, !on);
    }

    /// Removes a file system option and returns its value; the last one takes precedence.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let found = self.data.iter().rev().find(|(key, _)| key == name).and_then(|(_, value)| value.clone());
        self.data.retain(|(key, _)| key != name);
        found
    }

    /// Returns the value of a file system option; the last one takes precedence.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.data.iter().rev().find(|(key, _)| key == name).and_then(|(_, value)| value.as_deref())
    }

    /// Returns whether the mount is read-only.
    #[must_use]
    pub fn readonly(&self) -> bool {
        self.set.contains(Attribute::MOUNT_ATTR_RDONLY)
    }
}

/// Splits at commas outside quotes: SELinux contexts contain commas.
fn split(entry: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    entry
        .split(move |c: char| {
            quoted ^= c == '"';
            c == ',' && !quoted
        })
        .filter(|option| !option.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(options: &[&str]) -> Options {
        Options::of(&options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn data(options: &Options) -> String {
        let text = |(name, value): &(String, Option<String>)| match value {
            Some(value) => format!("{name}={value}"),
            None => name.clone(),
        };
        options.data.iter().map(text).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn all_options_of_dev_shm_are_retained() {
        let options = of(&["noexec", "nosuid", "nodev", "mode=1777", "size=67108864"]);
        let expected = Attribute::MOUNT_ATTR_NOEXEC | Attribute::MOUNT_ATTR_NOSUID | Attribute::MOUNT_ATTR_NODEV;
        assert_eq!((options.set, data(&options).as_str()), (expected, "mode=1777,size=67108864"));
        assert_eq!(options.mode, Some(0o1777));
        let options = of(&["pagesize=2M,size=8M", "fsgid=7", "ro,rw"]);
        assert_eq!((options.set, options.group), (Attribute::empty(), Some(7)));
        assert_eq!(data(&options), "pagesize=2M,size=8M,ro,rw");
    }

    #[test]
    fn attributes_flags_and_agent_options_are_separated() {
        let options = of(&["noatime,lazytime,nosymfollow,rshared,rbind,X-kata.overlay-upper,nofail"]);
        assert_eq!(options.set, Attribute::MOUNT_ATTR_NOATIME | Attribute::MOUNT_ATTR_NOSYMFOLLOW);
        assert_eq!(options.clear, Attribute::MOUNT_ATTR__ATIME);
        assert_eq!(options.propagation, Some(Propagation::SHARED | Propagation::REC));
        assert!(options.recursive && !options.recursive_attributes);
        assert_eq!(
            (data(&options).as_str(), options.agent_options.as_slice()),
            ("lazytime", &["X-kata.overlay-upper".into()][..])
        );
        let options = of(&["strictatime", "relatime", "rro"]);
        assert!(options.readonly() && options.recursive_attributes);
        assert!(!options.set.intersects(Attribute::MOUNT_ATTR__ATIME));
    }

    #[test]
    fn commas_within_quotes_do_not_split() {
        let options = of(&["context=\"system_u:object_r:x_t:s0:c1,c2\",ro"]);
        assert_eq!(data(&options), "context=system_u:object_r:x_t:s0:c1,c2,ro");
    }

    #[test]
    fn invalid_option_is_reported() {
        for (option, part) in [("fsgid=x", "fsgid=x"), ("mode=9", "mode=9"), ("mode=77777", "mode"), ("a\0b", "NUL")] {
            let error = Options::of(&[option.to_owned()]).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(Options::of(&["a,".repeat(300)]).unwrap_err().to_string().contains("300"));
    }

    proptest! {
        #[test]
        fn any_options_are_parsed_or_rejected(options in proptest::collection::vec("\\PC{0,20}", 0..4)) {
            let _ = Options::of(&options);
        }

        #[test]
        fn file_system_options_are_retained_in_order(words in proptest::collection::vec("[a-z_]{3,9}=[0-9a-z/:]{1,9}", 0..9)) {
            prop_assume!(!words.iter().any(|effect| effect.starts_with("fsgid=") || effect.starts_with("mode=")));
            let options = Options::of(&[words.join(",")]).unwrap();
            prop_assert_eq!(data(&options), words.join(","));
        }
    }
}
