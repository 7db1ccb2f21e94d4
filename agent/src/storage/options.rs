//! Parses the mount options of a storage.

use firstlight_agent_api::agent::Storage;
use rustix::mount::{MountAttrFlags as Attribute, MountPropagationFlags as Spread};

use crate::error::{Error, Result};

/// Upper bound on options per storage (untrusted input).
const MAX_OPTIONS: usize = 256;

/// The kernel's limit on the length of an option's name or value, in bytes.
pub const MAX_LEN: usize = 255;

/// Effect of an option.
#[derive(Debug, Clone, Copy)]
enum Word {
    /// Sets or clears a mount attribute.
    Mount(Attribute, bool),
    /// Sets or clears a mount attribute recursively.
    All(Attribute, bool),
    /// Selects the access time mode.
    Times(Attribute),
    /// A file system flag.
    FileSystem,
    /// Both a mount attribute and a file system flag.
    Both(Attribute, bool),
    /// How mounts spread.
    Spread(Spread),
    /// A bind mount; `true` is recursive.
    Bind(bool),
    /// Ignored: meant for user space, or the default.
    Nothing,
}

/// Options that are not passed to the file system as data.
const WORDS: &[(&str, Word)] = &[
    ("ro", Word::Both(Attribute::MOUNT_ATTR_RDONLY, true)),
    ("rw", Word::Both(Attribute::MOUNT_ATTR_RDONLY, false)),
    ("nosuid", Word::Mount(Attribute::MOUNT_ATTR_NOSUID, true)),
    ("suid", Word::Mount(Attribute::MOUNT_ATTR_NOSUID, false)),
    ("nodev", Word::Mount(Attribute::MOUNT_ATTR_NODEV, true)),
    ("dev", Word::Mount(Attribute::MOUNT_ATTR_NODEV, false)),
    ("noexec", Word::Mount(Attribute::MOUNT_ATTR_NOEXEC, true)),
    ("exec", Word::Mount(Attribute::MOUNT_ATTR_NOEXEC, false)),
    ("nodiratime", Word::Mount(Attribute::MOUNT_ATTR_NODIRATIME, true)),
    ("diratime", Word::Mount(Attribute::MOUNT_ATTR_NODIRATIME, false)),
    ("nosymfollow", Word::Mount(Attribute::MOUNT_ATTR_NOSYMFOLLOW, true)),
    ("symfollow", Word::Mount(Attribute::MOUNT_ATTR_NOSYMFOLLOW, false)),
    ("rro", Word::All(Attribute::MOUNT_ATTR_RDONLY, true)),
    ("rrw", Word::All(Attribute::MOUNT_ATTR_RDONLY, false)),
    ("rnosuid", Word::All(Attribute::MOUNT_ATTR_NOSUID, true)),
    ("rsuid", Word::All(Attribute::MOUNT_ATTR_NOSUID, false)),
    ("rnodev", Word::All(Attribute::MOUNT_ATTR_NODEV, true)),
    ("rdev", Word::All(Attribute::MOUNT_ATTR_NODEV, false)),
    ("rnoexec", Word::All(Attribute::MOUNT_ATTR_NOEXEC, true)),
    ("rexec", Word::All(Attribute::MOUNT_ATTR_NOEXEC, false)),
    ("noatime", Word::Times(Attribute::MOUNT_ATTR_NOATIME)),
    ("strictatime", Word::Times(Attribute::MOUNT_ATTR_STRICTATIME)),
    ("relatime", Word::Times(Attribute::MOUNT_ATTR_RELATIME)),
    ("atime", Word::Times(Attribute::MOUNT_ATTR_RELATIME)),
    ("norelatime", Word::Times(Attribute::MOUNT_ATTR_RELATIME)),
    ("nostrictatime", Word::Times(Attribute::MOUNT_ATTR_RELATIME)),
    ("sync", Word::FileSystem),
    ("async", Word::FileSystem),
    ("dirsync", Word::FileSystem),
    ("lazytime", Word::FileSystem),
    ("nolazytime", Word::FileSystem),
    ("private", Word::Spread(Spread::PRIVATE)),
    ("rprivate", Word::Spread(Spread::PRIVATE.union(Spread::REC))),
    ("shared", Word::Spread(Spread::SHARED)),
    ("rshared", Word::Spread(Spread::SHARED.union(Spread::REC))),
    ("slave", Word::Spread(Spread::DOWNSTREAM)),
    ("rslave", Word::Spread(Spread::DOWNSTREAM.union(Spread::REC))),
    ("unbindable", Word::Spread(Spread::UNBINDABLE)),
    ("runbindable", Word::Spread(Spread::UNBINDABLE.union(Spread::REC))),
    ("bind", Word::Bind(false)),
    ("rbind", Word::Bind(true)),
    // All flags are set when the mount is created, so no remount is needed.
    ("remount", Word::Nothing),
    ("defaults", Word::Nothing),
    ("silent", Word::Nothing),
    ("loud", Word::Nothing),
    // The kernel has removed mandatory locks.
    ("mand", Word::Nothing),
    ("nomand", Word::Nothing),
    ("auto", Word::Nothing),
    ("noauto", Word::Nothing),
    ("nofail", Word::Nothing),
    ("_netdev", Word::Nothing),
    ("user", Word::Nothing),
    ("nouser", Word::Nothing),
];

/// Prefixes of options for shims and agents.
const MARKS: &[&str] = &["io.katacontainers.", "X-kata.", "X-mount.", "X-containerd.", "x-systemd."];

/// The options of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Mount attributes to set.
    pub set: Attribute,
    /// Mount attributes to clear; a bind mount inherits those of its source.
    pub clear: Attribute,
    /// Whether attributes are applied recursively.
    pub deep: bool,
    /// How mounts spread.
    pub spread: Option<Spread>,
    /// Whether a bind mount is recursive.
    pub recursive: bool,
    /// File system options, in order; those without a value are flags.
    pub data: Vec<(String, Option<String>)>,
    /// `fsgid=N`: owning group of the root.
    pub group: Option<u32>,
    /// `mode=N`, for directories; also passed to file systems as data.
    pub mode: Option<u32>,
    /// Options for the agent only.
    pub marks: Vec<String>,
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
            deep: false,
            spread: None,
            recursive: false,
            data: Vec::new(),
            group: None,
            mode: None,
            marks: Vec::new(),
        };
        let all: Vec<&str> = entries.iter().flat_map(|entry| split(entry)).collect();
        if all.len() > MAX_OPTIONS {
            return Err(Error::invalid(format!("{} options; at most {MAX_OPTIONS}", all.len())));
        }
        all.into_iter().try_for_each(|option| options.add(option))?;
        Ok(options)
    }

    fn add(&mut self, option: &str) -> Result<()> {
        if let Some((name, word)) = WORDS.iter().find(|(name, _)| *name == option) {
            self.word(name, *word);
            return Ok(());
        }
        if MARKS.iter().any(|mark| option.starts_with(mark)) {
            self.marks.push(option.to_owned());
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

    fn word(&mut self, name: &str, word: Word) {
        match word {
            Word::Mount(bit, on) => self.attribute(bit, on),
            Word::All(bit, on) => {
                self.deep = true;
                self.attribute(bit, on);
            }
            Word::Times(times) => {
                self.set.remove(Attribute::MOUNT_ATTR__ATIME);
                self.clear |= Attribute::MOUNT_ATTR__ATIME;
                self.set |= times;
            }
            Word::FileSystem => self.data.push((name.to_owned(), None)),
            Word::Both(bit, on) => {
                self.attribute(bit, on);
                self.data.push((name.to_owned(), None));
            }
            Word::Spread(spread) => self.spread = Some(spread),
            Word::Bind(recursive) => self.recursive |= recursive,
            Word::Nothing => {}
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
        assert_eq!(options.spread, Some(Spread::SHARED | Spread::REC));
        assert!(options.recursive && !options.deep);
        assert_eq!(
            (data(&options).as_str(), options.marks.as_slice()),
            ("lazytime", &["X-kata.overlay-upper".into()][..])
        );
        let options = of(&["strictatime", "relatime", "rro"]);
        assert!(options.readonly() && options.deep);
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
            prop_assume!(!words.iter().any(|word| word.starts_with("fsgid=") || word.starts_with("mode=")));
            let options = Options::of(&[words.join(",")]).unwrap();
            prop_assert_eq!(data(&options), words.join(","));
        }
    }
}
