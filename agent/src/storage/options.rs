//! Options of a storage: what they mean and to whom they go.

use firstlight_agent_api::agent::Storage;
use rustix::mount::{MountAttrFlags as Attribute, MountPropagationFlags as Spread};

use crate::error::{Error, Result};

/// More options than this are somebody's trick.
const MOST: usize = 256;

/// What the kernel takes as a name or a value, in bytes.
pub const LONGEST: usize = 255;

/// What an option says.
#[derive(Debug, Clone, Copy)]
enum Word {
    /// Sets or clears an attribute of the mount.
    Mount(Attribute, bool),
    /// As before, for all mounts below it as well.
    All(Attribute, bool),
    /// Chooses when access times are written.
    Times(Attribute),
    /// A flag of the file system.
    FileSystem,
    /// Both an attribute of the mount and a flag of the file system.
    Both(Attribute, bool),
    /// How mounts spread.
    Spread(Spread),
    /// The source is something that is mounted already; with all below it.
    Bind(bool),
    /// Tells programs, not the kernel, or is what we do anyway.
    Nothing,
}

/// Options that are no data of a file system.
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
    // A mount gets all its flags when it is made, so there is no second step.
    ("remount", Word::Nothing),
    ("defaults", Word::Nothing),
    ("silent", Word::Nothing),
    ("loud", Word::Nothing),
    // Mandatory locks are no longer in the kernel.
    ("mand", Word::Nothing),
    ("nomand", Word::Nothing),
    ("auto", Word::Nothing),
    ("noauto", Word::Nothing),
    ("nofail", Word::Nothing),
    ("_netdev", Word::Nothing),
    ("user", Word::Nothing),
    ("nouser", Word::Nothing),
];

/// How words for shims and agents begin.
const MARKS: &[&str] = &["io.katacontainers.", "X-kata.", "X-mount.", "X-containerd.", "x-systemd."];

/// The options of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Attributes that the mount gets.
    pub set: Attribute,
    /// Attributes that it loses; a bind inherits its source's.
    pub clear: Attribute,
    /// Whether attributes are for the mounts below it as well.
    pub deep: bool,
    /// How mounts spread.
    pub spread: Option<Spread>,
    /// Whether a bind takes the mounts below its source along.
    pub recursive: bool,
    /// For the file system itself, in order; words without a value are flags.
    pub data: Vec<(String, Option<String>)>,
    /// `fsgid=N`: the group that shall own the root.
    pub group: Option<u32>,
    /// `mode=N`, for directories; a file system gets it as data as well.
    pub mode: Option<u32>,
    /// What is said to the agent alone.
    pub marks: Vec<String>,
}

impl Options {
    /// Reads a storage's options. An entry may hold several.
    ///
    /// # Errors
    /// A value that is no number where one is needed, or too many options.
    pub fn parse(storage: &Storage) -> Result<Self> {
        Self::of(&storage.options).map_err(|error| error.during(&format!("storage {}", storage.mount_point)))
    }

    /// Reads options.
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
        if all.len() > MOST {
            return Err(Error::invalid(format!("{} options; at most {MOST}", all.len())));
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
            return Err(wrong("has a NUL in it"));
        }
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        match (name, value) {
            ("fsgid", Some(id)) => {
                self.group = Some(id.parse().map_err(|_| wrong("no group number"))?);
                return Ok(());
            }
            ("mode", Some(mode)) => {
                let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777);
                self.mode = Some(mode.ok_or_else(|| wrong("no octal mode"))?);
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

    /// Takes an option of the file system out; the last one counts.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let found = self.data.iter().rev().find(|(key, _)| key == name).and_then(|(_, value)| value.clone());
        self.data.retain(|(key, _)| key != name);
        found
    }

    /// The value of an option of the file system; the last one counts.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.data.iter().rev().find(|(key, _)| key == name).and_then(|(_, value)| value.as_deref())
    }

    /// Whether nothing can be written through the mount.
    #[must_use]
    pub fn readonly(&self) -> bool {
        self.set.contains(Attribute::MOUNT_ATTR_RDONLY)
    }
}

/// Splits at commas, but not within quotes: security contexts hold commas.
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
    fn all_options_of_the_sandboxs_shared_memory_are_kept() {
        let options = of(&["noexec", "nosuid", "nodev", "mode=1777", "size=67108864"]);
        let wanted = Attribute::MOUNT_ATTR_NOEXEC | Attribute::MOUNT_ATTR_NOSUID | Attribute::MOUNT_ATTR_NODEV;
        assert_eq!((options.set, data(&options).as_str()), (wanted, "mode=1777,size=67108864"));
        assert_eq!(options.mode, Some(0o1777));
        let options = of(&["pagesize=2M,size=8M", "fsgid=7", "ro,rw"]);
        assert_eq!((options.set, options.group), (Attribute::empty(), Some(7)));
        assert_eq!(data(&options), "pagesize=2M,size=8M,ro,rw");
    }

    #[test]
    fn flags_and_words() {
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
    fn what_makes_no_sense_is_named() {
        for (option, part) in [("fsgid=x", "fsgid=x"), ("mode=9", "mode=9"), ("mode=77777", "mode"), ("a\0b", "NUL")] {
            let error = Options::of(&[option.to_owned()]).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(Options::of(&["a,".repeat(300)]).unwrap_err().to_string().contains("300"));
    }

    proptest! {
        #[test]
        fn any_options_are_taken_or_refused(options in proptest::collection::vec("\\PC{0,20}", 0..4)) {
            let _ = Options::of(&options);
        }

        #[test]
        fn no_data_is_lost(words in proptest::collection::vec("[a-z_]{3,9}=[0-9a-z/:]{1,9}", 0..9)) {
            prop_assume!(!words.iter().any(|word| word.starts_with("fsgid=") || word.starts_with("mode=")));
            let options = Options::of(&[words.join(",")]).unwrap();
            prop_assert_eq!(data(&options), words.join(","));
        }
    }
}
