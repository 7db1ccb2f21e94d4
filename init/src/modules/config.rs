//! `modprobe.d`: the image's configuration of modules, and `depmod`'s lists in the same syntax.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::glob::matches;
use super::name::{has, same};
use crate::root::Root;

/// Configuration directories in the order of modprobe.d(5): a file hides files of the same name in
/// later directories.
pub const DIRECTORIES: &[&str] =
    &["/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];

/// Maximum length of a line in bytes; longer ones are reported and ignored.
const LONGEST_LINE: usize = 8 << 10;

/// Maximum number of reported problems.
const MOST_COMPLAINTS: usize = 16;

/// Maximum number of bytes that are read of one file.
const LARGEST: u64 = 1 << 20;

/// Soft dependencies of a module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SoftDependency {
    /// The module: a name, or a pattern of names.
    pub module: String,
    /// Modules loaded before it.
    pub before: Vec<String>,
    /// Modules loaded after it.
    pub after: Vec<String>,
}

/// The parsed configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// Alias patterns with their modules.
    pub aliases: Vec<(String, String)>,
    /// Modules with their parameters (`options`).
    pub options: Vec<(String, String)>,
    /// Modules that are not loaded by alias (`blacklist`).
    pub blacklist: Vec<String>,
    /// `softdep` lines.
    pub soft_dependencies: Vec<SoftDependency>,
    /// Unsupported or invalid lines, each reported once.
    pub complaints: Vec<String>,
}

/// Parses the arguments of `softdep`: `NAME pre: A B post: C`. Names may be separated by commas, as
/// in NVIDIA's `pre: ecdh_generic,ecdsa_generic`.
#[must_use]
pub fn parse_softdep(text: &str) -> Option<SoftDependency> {
    let apart = |c: char| c.is_ascii_whitespace() || c == ',';
    let mut words = text.split(apart).filter(|word| !word.is_empty());
    let mut soft = SoftDependency { module: words.next()?.to_owned(), ..SoftDependency::default() };
    let mut before = None;
    for word in words {
        match (word, before) {
            ("pre:", _) => before = Some(true),
            ("post:", _) => before = Some(false),
            (name, Some(true)) => soft.before.push(name.to_owned()),
            (name, Some(false)) => soft.after.push(name.to_owned()),
            // A name before `pre:` or `post:` makes the line invalid.
            (_, None) => return None,
        }
    }
    Some(soft)
}

/// Returns logical lines: a line that ends with `\` continues in the next.
fn lines(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut rest = text.lines().enumerate();
    std::iter::from_fn(move || {
        let (number, first) = rest.next()?;
        let mut line = first.to_owned();
        while line.ends_with('\\') {
            line.pop();
            line.push_str(rest.next().map_or("", |(_, more)| more));
        }
        Some((number + 1, line))
    })
}

impl Config {
    /// Reads the image's directories, then those below the directory `place`, then `list`, which
    /// `depmod` wrote.
    #[must_use]
    pub fn read(root: &Root, place: &str, list: &Path) -> Self {
        let mut files: Vec<(String, PathBuf)> = Vec::new();
        let places = if place.is_empty() { vec![""] } else { vec!["", place] };
        for dir in places.iter().flat_map(|place| DIRECTORIES.iter().map(move |dir| format!("{place}{dir}"))) {
            let Ok(entries) = fs::read_dir(root.path(&dir)) else { continue };
            for entry in entries.flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let place = files.binary_search_by(|(earlier, _)| earlier.as_str().cmp(&name));
                if let (true, Err(at)) = (name.ends_with(".conf"), place) {
                    files.insert(at, (name, entry.path()));
                }
            }
        }
        let mut config = Self::default();
        for (_, path) in files {
            match text_of(&path, LARGEST) {
                Ok(text) => config.take(&text, &path.display().to_string()),
                Err(error) if config.complaints.len() < MOST_COMPLAINTS => {
                    config.complaints.push(format!("cannot read {}: {error}", path.display()));
                }
                Err(_) => {}
            }
        }
        // The list is optional.
        config.take(&text_of(list, LARGEST).unwrap_or_default(), &list.display().to_string());
        config
    }

    /// Parses the text of one file.
    pub fn take(&mut self, text: &str, file: &str) {
        for (number, line) in lines(text) {
            let line = line.trim();
            let (word, rest) = line.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((line, ""));
            let rest = rest.trim();
            if word.is_empty() || word.starts_with('#') {
                continue;
            }
            if let Some(what) = self.take_line(word, rest, line.len() > LONGEST_LINE || line.contains('\0')) {
                // Further errors of the same kind are not reported.
                let text = format!("{what}: {file} line {number}");
                let known = self.complaints.iter().any(|complaint| complaint.starts_with(&what));
                if !known && self.complaints.len() < MOST_COMPLAINTS {
                    self.complaints.push(text);
                }
            }
        }
    }

    /// Parses a line; returns the problem, if there is one.
    fn take_line(&mut self, word: &str, rest: &str, malformed: bool) -> Option<String> {
        let pair =
            || rest.split_once(|c: char| c.is_ascii_whitespace()).map(|(a, b)| (a.to_owned(), b.trim().to_owned()));
        let bad = || Some(format!("no sense is made of {}", word.chars().take(40).collect::<String>()));
        if malformed {
            return Some("a line is too long or has a zero byte".to_owned());
        }
        match word {
            "install" | "remove" => return Some(format!("PID 1 carries out no {word} line of modprobe.d")),
            "alias" => match pair() {
                Some((pattern, module)) if !module.contains(char::is_whitespace) => {
                    self.aliases.push((pattern, module))
                }
                _ => return bad(),
            },
            "options" => match pair() {
                Some(options) => self.options.push(options),
                None => return bad(),
            },
            "blacklist" if !rest.is_empty() => self.blacklist.extend(rest.split_ascii_whitespace().map(str::to_owned)),
            "softdep" => match parse_softdep(rest) {
                Some(soft) => self.soft_dependencies.push(soft),
                None => return bad(),
            },
            // Commands that only matter when an image is built.
            "weakdep" => {}
            _ => return bad(),
        }
        None
    }

    /// Returns the parameters of a module.
    #[must_use]
    pub fn options(&self, module: &str) -> String {
        let mine = self.options.iter().filter(|(name, _)| same(name, module));
        mine.map(|(_, options)| options.as_str()).collect::<Vec<_>>().join(" ")
    }

    /// Returns a module's soft dependencies: the first line that matches.
    #[must_use]
    pub fn soft_dependencies(&self, module: &str) -> Option<&SoftDependency> {
        self.soft_dependencies.iter().find(|soft| matches(&soft.module, module))
    }

    /// Returns whether a module is not loaded by alias.
    #[must_use]
    pub fn blacklisted(&self, module: &str) -> bool {
        has(&self.blacklist, module)
    }
}

/// Reads a file, at most `most` bytes of it.
pub(super) fn text_of(path: &Path, most: u64) -> std::io::Result<String> {
    let file = File::open(path)?;
    let mut bytes =
        Vec::with_capacity(file.metadata().map_or(0, |data| usize::try_from(data.len().min(most)).unwrap_or(0)));
    file.take(most).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Config {
        let mut config = Config::default();
        config.take(text, "x.conf");
        config
    }

    #[test]
    fn unsupported_lines_are_reported_once() {
        let config = of("# alias a b\n\nalias pci:v00001AF4* virtio-net\noptions nvidia-uvm  a=1  b=\"x y\"\n\
             options nvidia_uvm c=2\nblacklist a-b\nsoftdep x pre: a b \\\n post: c\ninstall x /bin/true\n\
             install y /bin/false\nremove x /bin/true\nwhat is this\nalias one\nsoftdep x a\nweakdep a b\n");
        assert_eq!(config.aliases, [("pci:v00001AF4*".to_owned(), "virtio-net".to_owned())]);
        assert_eq!(config.options("nvidia_uvm"), "a=1  b=\"x y\" c=2");
        assert_eq!(config.options("nvidia"), "");
        assert!(config.blacklisted("a_b") && !config.blacklisted("a"));
        let company = config.soft_dependencies("x").unwrap();
        assert_eq!((company.before.join(" "), company.after.join(" ")), ("a b".to_owned(), "c".to_owned()));
        let [install, remove, what, alias, softdep] = &config.complaints[..] else { panic!("{:?}", config.complaints) };
        assert!(install.contains("no install line") && install.contains("x.conf line 9"), "{install}");
        assert!(remove.contains("no remove line") && what.contains("what") && alias.contains("alias"));
        assert!(softdep.contains("line 14"), "{softdep}");
        let driver = parse_softdep("nvidia pre: ecdh_generic,ecdsa_generic").unwrap();
        assert_eq!(driver.before, ["ecdh_generic", "ecdsa_generic"]);
        assert!(of(&format!("options x a={}", "x".repeat(LONGEST_LINE))).options.is_empty());
        assert!(of("options x a=\0").options.is_empty());
        let many: String = (0..100).map(|at| format!("odd{at}\n")).collect();
        assert_eq!(of(&many).complaints.len(), MOST_COMPLAINTS);
    }

    #[test]
    fn files_are_sorted_by_name_and_earlier_directories_take_precedence() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (at, text) in [
            ("/usr/lib/modprobe.d/a.conf", "options x from=usr"),
            ("/lib/modprobe.d/c.conf", "options x from=c"),
            ("/etc/modprobe.d/a.conf", "options x from=etc"),
            ("/run/modprobe.d/b.conf", "options x from=b"),
            ("/etc/modprobe.d/not-this.txt", "options x from=text"),
            ("/list/modules.softdep", "# made by depmod\nsoftdep x pre: last"),
            ("/etc/modprobe.d/b.conf/directory", "a directory is no file"),
        ] {
            let path = root.path(at);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let config = Config::read(&root, "", &root.path("/list/modules.softdep"));
        assert_eq!(config.options("x"), "from=etc from=c");
        assert_eq!(config.soft_dependencies("x").unwrap().before, ["last"]);
        assert!(config.complaints[0].contains("b.conf"), "{:?}", config.complaints);
        // The image's configuration takes precedence over depmod's.
        fs::write(root.path("/etc/modprobe.d/a.conf"), "softdep x pre: first").unwrap();
        let config = Config::read(&root, "", &root.path("/list/modules.softdep"));
        assert_eq!(config.soft_dependencies("x").unwrap().before, ["first"]);
        // Configuration below another directory follows the image's, whose files hide it.
        for (at, text) in [("a.conf", "options x from=hidden"), ("d.conf", "options x from=d")] {
            let path = root.path("/ext/etc/modprobe.d").join(at);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let config = Config::read(&root, "/ext", &root.path("/none"));
        assert_eq!(config.options("x"), "from=c from=d");
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in any::<String>()) {
            let config = of(&text);
            let _ = (config.options("x"), config.soft_dependencies("x"), parse_softdep(&text));
        }

        #[test]
        fn written_configuration_is_parsed_back(module in "[a-z]{1,8}", before in prop::collection::vec("[a-z]{1,5}", 0..4), after in prop::collection::vec("[a-z]{1,5}", 0..4)) {
            let written = format!("{module} pre: {} post: {}", before.join(" "), after.join(" "));
            prop_assert_eq!(parse_softdep(&written), Some(SoftDependency { module, before, after }));
        }
    }
}
