//! Profiles: which files of the user-space driver an image gets.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::version::Version;
use crate::closure::rules::{Opens, Rules, Used};

/// The profiles that belong to this version of the image builder.
pub const PROFILES: &str = include_str!("../../driver/profiles.toml");

/// Where Debian's packages have the driver's libraries.
const NV: &str = "usr/lib/x86_64-linux-gnu/nvidia/current";
/// Where they go.
const LIB: &str = "usr/lib/x86_64-linux-gnu";

/// Why a selection of files makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The table itself is wrong.
    #[error("the table of profiles is not as it should be")]
    Table(#[from] Box<toml::de::Error>),
    /// The table does not hold together.
    #[error("the table of profiles: {0}")]
    Odd(String),
    /// No such profile, group or generation.
    #[error("there is no {kind} {name}; there are: {known}")]
    NoSuch {
        /// Profile, group, or generation of GPUs.
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The driver is older than the GPU.
    #[error("driver {driver} does not know {generation} GPUs ({chips}): they need {since} or newer")]
    TooNew {
        /// The driver.
        driver: String,
        /// The generation.
        generation: String,
        /// Its chips.
        chips: String,
        /// The first driver.
        since: String,
    },
}

/// Everything that can be selected from.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    /// Named sets of groups.
    #[serde(rename = "profile")]
    pub profiles: Vec<Profile>,
    /// Generations of GPUs.
    #[serde(rename = "generation")]
    pub generations: Vec<Generation>,
    /// Files that belong together.
    #[serde(rename = "group")]
    pub groups: Vec<Group>,
}

/// A named set of groups.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub about: String,
    /// Its groups.
    pub groups: Vec<String>,
    /// The GPUs it has firmware for unless the manifest names others.
    pub gpus: Vec<String>,
}

/// A generation of GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// Its name.
    pub name: String,
    /// Its chips, for people.
    pub chips: String,
    /// Its file of firmware.
    pub firmware: String,
    /// The first driver that knows it.
    #[serde(default)]
    pub since: Option<Version>,
}

/// Files that belong together, and why an image would have them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: String,
    /// Groups it is of no use without.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Whether all of its packages have versions of their own.
    #[serde(default)]
    pub foreign: bool,
    /// The files.
    pub files: Vec<Template>,
}

/// A file of a group, with placeholders.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// The package, with its names in other suites.
    pub package: Vec<String>,
    /// The path in the package.
    pub from: String,
    /// The path in the image, if it is another.
    #[serde(default)]
    pub to: Option<String>,
    /// Permission bits.
    #[serde(default = "plain_mode")]
    pub mode: u32,
    /// Names beside it, or paths, that lead to it.
    #[serde(default)]
    pub links: Vec<String>,
    /// Libraries that it opens by name at run time.
    #[serde(default)]
    pub opens: Vec<String>,
    /// Whether the package has a version of its own.
    #[serde(default)]
    pub foreign: bool,
}

fn plain_mode() -> u32 {
    0o644
}

/// A file that was selected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Selected {
    /// The group that has it.
    pub group: String,
    /// The package, with its names in other suites.
    pub package: Vec<String>,
    /// The version that the package must begin with; none for foreign ones.
    pub version: Option<String>,
    /// The path in the package.
    pub from: String,
    /// The path in the image.
    pub to: String,
    /// Permission bits.
    pub mode: u32,
    /// Paths in the image that lead to it.
    pub links: Vec<String>,
    /// Libraries that it opens by name at run time.
    pub opens: Vec<String>,
}

/// What the check of an image with these files has to know and cannot see.
pub(super) fn rules(selected: &[Selected]) -> Rules {
    let mut rules = Rules::default();
    for file in selected {
        if !file.opens.is_empty() {
            let reason = format!("the table of the driver's profiles, group {}", file.group);
            rules.opens.push(Opens { file: file.to.clone(), needs: file.opens.clone(), reason });
        }
        if file.version.is_some() {
            rules.used.push(Used { file: file.to.clone(), reason: "containers load it".to_owned() });
        }
    }
    rules
}

impl Catalogue {
    /// What belongs to this version of the image builder.
    ///
    /// # Errors
    /// Only when it is wrong, which a test rules out.
    pub fn own() -> Result<Self, Error> {
        Self::parse(PROFILES)
    }

    /// Reads a catalogue.
    ///
    /// # Errors
    /// Not TOML, unknown keys, or names that nothing has.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let catalogue: Self = toml::from_str(text).map_err(Box::new)?;
        for profile in &catalogue.profiles {
            for group in &profile.groups {
                for need in &catalogue.group(group)?.needs {
                    if !profile.groups.contains(need) {
                        return Err(Error::Odd(format!("profile {}: group {group} needs {need}", profile.name)));
                    }
                }
            }
            for gpu in &profile.gpus {
                catalogue.generation(gpu)?;
            }
        }
        for group in &catalogue.groups {
            group.needs.iter().try_for_each(|need| catalogue.group(need).map(|_| ()))?;
            for file in &group.files {
                let links = file.links.iter().filter(|link| link.contains('/'));
                for path in [Some(&file.from), file.to.as_ref()].into_iter().flatten().chain(links) {
                    if path.starts_with('/') || path.split('/').any(|part| matches!(part, "" | "." | "..")) {
                        return Err(Error::Odd(format!("group {}: {path:?} is no plain relative path", group.name)));
                    }
                }
                if file.package.is_empty() {
                    return Err(Error::Odd(format!("group {}: {} is in no package", group.name, file.from)));
                }
            }
        }
        Ok(catalogue)
    }

    /// The files of `profile` and of the groups `more`, for the GPUs `gpus`
    /// (if none are named, those of the profile that the driver knows).
    ///
    /// # Errors
    /// Unknown names, and GPUs that the driver does not know.
    pub fn select(
        &self,
        profile: &str,
        more: &[String],
        gpus: &[String],
        driver: &Version,
    ) -> Result<Vec<Selected>, Error> {
        let profile = named("profile", profile, &self.profiles, |one| &one.name)?;
        let firmware = self.firmware(profile, gpus, driver)?;
        let mut open: Vec<&str> = profile.groups.iter().chain(more).map(String::as_str).collect();
        let mut taken = BTreeSet::new();
        while let Some(name) = open.pop() {
            if taken.insert(name) {
                open.extend(self.group(name)?.needs.iter().map(String::as_str));
            }
        }
        let groups = self.groups.iter().filter(|group| taken.contains(group.name.as_str()));
        let files = groups.flat_map(|group| group.files.iter().map(move |file| (group, file)));
        Ok(files.flat_map(|(group, file)| expanded(group, file, &firmware, driver)).collect())
    }

    fn firmware(&self, profile: &Profile, gpus: &[String], driver: &Version) -> Result<BTreeSet<&str>, Error> {
        let mut firmware = BTreeSet::new();
        for name in if gpus.is_empty() { &profile.gpus } else { gpus } {
            let generation = self.generation(name)?;
            match &generation.since {
                Some(since) if driver < since && gpus.is_empty() => continue,
                Some(since) if driver < since => {
                    return Err(Error::TooNew {
                        driver: driver.to_string(),
                        generation: generation.name.clone(),
                        chips: generation.chips.clone(),
                        since: since.to_string(),
                    });
                }
                _ => firmware.insert(generation.firmware.as_str()),
            };
        }
        Ok(firmware)
    }

    fn group(&self, name: &str) -> Result<&Group, Error> {
        named("group", name, &self.groups, |one| &one.name)
    }

    fn generation(&self, name: &str) -> Result<&Generation, Error> {
        named("generation of GPUs", name, &self.generations, |one| &one.name)
    }
}

fn named<'a, T>(kind: &'static str, name: &str, all: &'a [T], of: fn(&T) -> &String) -> Result<&'a T, Error> {
    all.iter().find(|one| of(one) == name).ok_or_else(|| Error::NoSuch {
        kind,
        name: name.to_owned(),
        known: all.iter().map(|one| of(one).as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// One file, or one for each firmware.
fn expanded(group: &Group, file: &Template, firmware: &BTreeSet<&str>, driver: &Version) -> Vec<Selected> {
    let one = |gsp: &str| {
        let fill = |text: &str| {
            let text = text.replace("{nv}", NV).replace("{lib}", LIB);
            text.replace("{version}", driver.as_str()).replace("{gsp}", gsp)
        };
        let to = fill(file.to.as_ref().unwrap_or(&file.from));
        let dir = to.rsplit_once('/').map_or("", |(dir, _)| dir).to_owned();
        let link = |link: &String| {
            let link = fill(link);
            if link.contains('/') { link } else { format!("{dir}/{link}") }
        };
        Selected {
            group: group.name.clone(),
            package: file.package.clone(),
            version: (!file.foreign && !group.foreign).then(|| driver.to_string()),
            from: fill(&file.from),
            mode: file.mode,
            links: file.links.iter().map(link).collect(),
            opens: file.opens.clone(),
            to,
        }
    };
    if file.from.contains("{gsp}") { firmware.iter().map(|gsp| one(gsp)).collect() } else { vec![one("")] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(profile: &str, more: &[&str], gpus: &[&str], driver: &str) -> Result<Vec<Selected>, Error> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        Catalogue::own().unwrap().select(profile, &owned(more), &owned(gpus), &driver.parse().unwrap())
    }

    fn places(files: &[Selected]) -> Vec<&str> {
        files.iter().map(|file| file.to.as_str()).collect()
    }

    #[test]
    fn libraries_are_flattened_and_linked() {
        let files = select("compute-min", &[], &[], "550.163.01").unwrap();
        let cuda = files.iter().find(|file| file.group == "cuda").unwrap();
        assert_eq!(cuda.from, "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.550.163.01");
        assert_eq!(cuda.to, "usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01");
        assert_eq!(cuda.links, ["usr/lib/x86_64-linux-gnu/libcuda.so.1", "usr/lib/x86_64-linux-gnu/libcuda.so"]);
        assert_eq!(cuda.version.as_deref(), Some("550.163.01"));
        let libc = files.iter().find(|file| file.to.ends_with("/libc.so.6")).unwrap();
        assert_eq!((libc.version.as_deref(), libc.from == libc.to), (None, true));
        let loader = files.iter().find(|file| file.to.ends_with("/ld-linux-x86-64.so.2")).unwrap();
        assert_eq!(loader.links, ["lib64/ld-linux-x86-64.so.2"]);
        let all = places(&files);
        assert!(all.contains(&"usr/bin/nvidia-smi"), "{all:?}");
        assert!(!all.iter().any(|path| path.contains("nvvm") || path.contains("opencl")), "{all:?}");
        let mut unique: Vec<_> = files.iter().flat_map(|file| file.links.iter().chain([&file.to])).collect();
        let count = unique.len();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), count, "one place, one thing");
    }

    #[test]
    fn firmware_follows_the_gpus() {
        let firmware = |gpus: &[&str], driver: &str| {
            let files = select("compute-min", &[], gpus, driver).unwrap();
            files.into_iter().filter(|file| file.group == "gsp").map(|file| file.to).collect::<Vec<_>>()
        };
        assert_eq!(firmware(&[], "550.163.01"), ["lib/firmware/nvidia/550.163.01/gsp_ga10x.bin"]);
        assert_eq!(firmware(&["ampere-a100"], "535.261.03"), ["lib/firmware/nvidia/535.261.03/gsp_tu10x.bin"]);
        assert_eq!(firmware(&["turing", "hopper"], "535.1").len(), 2);
        assert_eq!(select("compute", &[], &[], "550.1").unwrap().iter().filter(|file| file.group == "gsp").count(), 2);
    }

    #[test]
    fn the_check_of_the_image_learns_what_it_cannot_see() {
        let rules = rules(&select("compute-min", &[], &[], "550.163.01").unwrap());
        let opens: Vec<_> = rules.opens.iter().map(|rule| (rule.file.as_str(), rule.needs.join(" "))).collect();
        assert!(opens.contains(&("usr/bin/nvidia-smi", "libnvidia-ml.so.1".to_owned())), "{opens:?}");
        let used: Vec<_> = rules.used.iter().map(|rule| rule.file.as_str()).collect();
        assert!(used.contains(&"usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"), "{used:?}");
        assert!(!used.iter().any(|file| file.contains("libc.so")), "the C library has users here: {used:?}");
    }

    #[test]
    fn what_is_not_there_is_named_with_what_is() {
        let profile = select("tiny", &[], &[], "550.1").unwrap_err().to_string();
        assert!(profile.contains("profile tiny") && profile.contains("compute-min, compute, video"), "{profile}");
        let group = select("compute", &["sound"], &[], "550.1").unwrap_err().to_string();
        assert!(group.contains("group sound") && group.contains("opencl"), "{group}");
        let gpu = select("compute", &[], &["pascal"], "550.1").unwrap_err().to_string();
        assert!(gpu.contains("pascal") && gpu.contains("hopper"), "{gpu}");
        let new = select("compute", &[], &["blackwell"], "550.163.01").unwrap_err().to_string();
        assert!(new.contains("550.163.01") && new.contains("570"), "{new}");
        select("compute", &[], &["blackwell"], "570.10").unwrap();
    }

    #[test]
    fn groups_bring_what_they_need() {
        let files = select("compute-min", &["opencl"], &[], "550.1").unwrap();
        for group in ["opencl", "nvvm"] {
            assert!(files.iter().any(|file| file.group == group), "{group}");
        }
        let video = select("video", &[], &[], "550.1").unwrap();
        assert!(places(&video).contains(&"usr/lib/x86_64-linux-gnu/libnvcuvid.so.550.1"));
    }

    #[test]
    fn a_table_that_contradicts_itself_is_refused() {
        let base = "[[generation]]\nname = \"g\"\nchips = \"c\"\nfirmware = \"f\"\n";
        let group = |extra: &str| {
            format!(
                "{base}[[group]]\nname = \"a\"\nreason = \"r\"\nfiles = [{{ package = [\"p\"], from = \"x\"{extra} }}]\n"
            )
        };
        let profile = |groups: &str, gpus: &str| {
            format!("[[profile]]\nname = \"p\"\nabout = \"\"\ngroups = [{groups}]\ngpus = [{gpus}]\n")
        };
        let good = profile("\"a\"", "\"g\"");
        assert!(Catalogue::parse(&format!("{good}{}", group(""))).is_ok());
        for (text, word) in [
            (format!("{}{}", profile("\"b\"", ""), group("")), "group b"),
            (format!("{}{}", profile("\"a\"", "\"h\""), group("")), "GPUs h"),
            (format!("{good}{}", group(", to = \"/x\"")), "relative"),
            (format!("{good}{}", group(", to = \"a/../x\"")), "relative"),
            (format!("{good}{}", group(", links = [\"../x\"]")), "relative"),
            (format!("{good}{}", group("").replace("[\"p\"]", "[]")), "no package"),
            (format!("{good}{}", group("").replace("reason", "needs = [\"z\"]\nreason")), "needs z"),
        ] {
            let error = Catalogue::parse(&text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
