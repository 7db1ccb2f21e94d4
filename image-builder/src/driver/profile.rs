//! Profiles: named sets of user-space driver files for an image.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::version::Version;
use crate::tree::closure::rules::{Opens, Rules, Used};

/// The built-in profiles.
pub const PROFILES: &str = include_str!("../../driver/profiles.toml");

/// Directory of the driver's libraries in Debian's packages.
const NV: &str = "usr/lib/x86_64-linux-gnu/nvidia/current";
/// Directory of the driver's libraries in an image.
const LIB: &str = "usr/lib/x86_64-linux-gnu";

/// Why a selection of files is invalid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The table is not valid TOML or has unknown keys.
    #[error("failed to parse the table of profiles")]
    Table(#[from] Box<toml::de::Error>),
    /// The table is inconsistent.
    #[error("invalid table of profiles: {0}")]
    Inconsistent(String),
    /// Unknown profile, group or generation.
    #[error("unknown {kind} {name}; known: {known}")]
    Unknown {
        /// Profile, group, or GPU generation.
        kind: &'static str,
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The driver is older than the GPU.
    #[error("driver {driver} does not support {generation} GPUs ({chips}): use driver {since} or newer")]
    UnsupportedGpu {
        /// The driver.
        driver: String,
        /// The generation.
        generation: String,
        /// Its chips.
        chips: String,
        /// The first driver that supports it.
        since: String,
    },
}

/// The table of profiles, groups and GPU generations.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    /// Named sets of groups.
    #[serde(rename = "profile")]
    pub profiles: Vec<Profile>,
    /// GPU generations.
    #[serde(rename = "generation")]
    pub generations: Vec<Generation>,
    /// Groups of files.
    #[serde(rename = "group")]
    pub groups: Vec<Group>,
}

/// A named set of groups.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// Its purpose.
    pub about: String,
    /// Its groups.
    pub groups: Vec<String>,
    /// The GPU generations for which it has firmware unless the manifest lists others.
    pub gpus: Vec<String>,
}

/// A GPU generation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// Its name.
    pub name: String,
    /// Its chips, for messages and documentation.
    pub chips: String,
    /// Its firmware file.
    pub firmware: String,
    /// The first driver that supports it.
    #[serde(default)]
    pub since: Option<Version>,
}

/// A group of files that are needed together.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// The reason to include it.
    pub reason: String,
    /// Other groups that it requires.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Whether its packages have versions independent of the driver's.
    #[serde(default)]
    pub foreign: bool,
    /// The files.
    pub files: Vec<Template>,
}

/// A file of a group; its paths may contain placeholders.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// The package, with its names in other suites.
    pub package: Vec<String>,
    /// The path in the package.
    pub from: String,
    /// The path in the image, if different.
    #[serde(default)]
    pub to: Option<String>,
    /// Permission bits.
    #[serde(default = "default_mode")]
    pub mode: u32,
    /// Symbolic links to it: names in the same directory, or paths.
    #[serde(default)]
    pub links: Vec<String>,
    /// Libraries that it opens with dlopen.
    #[serde(default)]
    pub opens: Vec<String>,
    /// Whether the package has a version independent of the driver's.
    #[serde(default)]
    pub foreign: bool,
}

fn default_mode() -> u32 {
    0o644
}

/// A selected file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Selected {
    /// Its group.
    pub group: String,
    /// The package, with its names in other suites.
    pub package: Vec<String>,
    /// The required prefix of the package's version; none for foreign packages.
    pub version: Option<String>,
    /// The path in the package.
    pub from: String,
    /// The path in the image.
    pub to: String,
    /// Permission bits.
    pub mode: u32,
    /// Paths of symbolic links to it in the image.
    pub links: Vec<String>,
    /// Libraries that it opens with dlopen.
    pub opens: Vec<String>,
}

/// Returns the rules for the closure check of an image with these files.
pub(super) fn rules(selected: &[Selected]) -> Rules {
    let mut rules = Rules::default();
    for file in selected {
        if !file.opens.is_empty() {
            let reason = format!("driver profile table, group {}", file.group);
            rules.opens.push(Opens { file: file.to.clone(), needs: file.opens.clone(), reason });
        }
        if file.version.is_some() {
            rules.used.push(Used { file: file.to.clone(), reason: "containers load it".to_owned() });
        }
    }
    rules
}

impl Catalogue {
    /// Returns the built-in catalogue.
    ///
    /// # Errors
    /// The built-in catalogue is invalid, which a test excludes.
    pub fn own() -> Result<Self, Error> {
        Self::parse(PROFILES)
    }

    /// Parses a catalogue.
    ///
    /// # Errors
    /// Invalid TOML, unknown keys, or unknown names.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let catalogue: Self = toml::from_str(text).map_err(Box::new)?;
        for profile in &catalogue.profiles {
            for group in &profile.groups {
                for need in &catalogue.group(group)?.needs {
                    if !profile.groups.contains(need) {
                        return Err(Error::Inconsistent(format!(
                            "profile {}: group {group} needs {need}",
                            profile.name
                        )));
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
                        return Err(Error::Inconsistent(format!(
                            "group {}: {path:?} is not a normalized relative path",
                            group.name
                        )));
                    }
                }
                if file.package.is_empty() {
                    return Err(Error::Inconsistent(format!("group {}: {} has no package", group.name, file.from)));
                }
            }
        }
        Ok(catalogue)
    }

    /// Returns the files of `profile` and of the groups `more`, with firmware for the GPU
    /// generations `gpus` (if empty, those of the profile that the driver supports).
    ///
    /// # Errors
    /// Unknown names, or GPUs that the driver does not support.
    pub fn select(
        &self,
        profile: &str,
        more: &[String],
        gpus: &[String],
        driver: &Version,
    ) -> Result<Vec<Selected>, Error> {
        let profile = find_by_name("profile", profile, &self.profiles, |one| &one.name)?;
        let firmware = self.firmware(profile, gpus, driver)?;
        let mut pending: Vec<&str> = profile.groups.iter().chain(more).map(String::as_str).collect();
        let mut selected = BTreeSet::new();
        while let Some(name) = pending.pop() {
            if selected.insert(name) {
                pending.extend(self.group(name)?.needs.iter().map(String::as_str));
            }
        }
        let groups = self.groups.iter().filter(|group| selected.contains(group.name.as_str()));
        let files = groups.flat_map(|group| group.files.iter().map(move |file| (group, file)));
        Ok(files.flat_map(|(group, file)| expand(group, file, &firmware, driver)).collect())
    }

    fn firmware(&self, profile: &Profile, gpus: &[String], driver: &Version) -> Result<BTreeSet<&str>, Error> {
        let mut firmware = BTreeSet::new();
        for name in if gpus.is_empty() { &profile.gpus } else { gpus } {
            let generation = self.generation(name)?;
            match &generation.since {
                Some(since) if driver < since && gpus.is_empty() => continue,
                Some(since) if driver < since => {
                    return Err(Error::UnsupportedGpu {
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
        find_by_name("group", name, &self.groups, |one| &one.name)
    }

    fn generation(&self, name: &str) -> Result<&Generation, Error> {
        find_by_name("GPU generation", name, &self.generations, |one| &one.name)
    }
}

fn find_by_name<'a, T>(kind: &'static str, name: &str, all: &'a [T], of: fn(&T) -> &String) -> Result<&'a T, Error> {
    all.iter().find(|one| of(one) == name).ok_or_else(|| Error::Unknown {
        kind,
        name: name.to_owned(),
        known: all.iter().map(|one| of(one).as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// Replaces the placeholders: returns one file, or one for each firmware.
fn expand(group: &Group, file: &Template, firmware: &BTreeSet<&str>, driver: &Version) -> Vec<Selected> {
    let with_firmware = |gsp: &str| {
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
    if file.from.contains("{gsp}") {
        firmware.iter().map(|gsp| with_firmware(gsp)).collect()
    } else {
        vec![with_firmware("")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(profile: &str, more: &[&str], gpus: &[&str], driver: &str) -> Result<Vec<Selected>, Error> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        Catalogue::own().unwrap().select(profile, &owned(more), &owned(gpus), &driver.parse().unwrap())
    }

    fn paths(files: &[Selected]) -> Vec<&str> {
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
        let all = paths(&files);
        assert!(all.contains(&"usr/bin/nvidia-smi"), "{all:?}");
        assert!(!all.iter().any(|path| path.contains("nvvm") || path.contains("opencl")), "{all:?}");
        let mut unique: Vec<_> = files.iter().flat_map(|file| file.links.iter().chain([&file.to])).collect();
        let count = unique.len();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), count, "no path occurs twice");
    }

    #[test]
    fn firmware_is_selected_by_gpu_generation() {
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
    fn rules_contain_dlopened_libraries_and_files_used_by_containers() {
        let rules = rules(&select("compute-min", &[], &[], "550.163.01").unwrap());
        let opens: Vec<_> = rules.opens.iter().map(|rule| (rule.file.as_str(), rule.needs.join(" "))).collect();
        assert!(opens.contains(&("usr/bin/nvidia-smi", "libnvidia-ml.so.1".to_owned())), "{opens:?}");
        let used: Vec<_> = rules.used.iter().map(|rule| rule.file.as_str()).collect();
        assert!(used.contains(&"usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"), "{used:?}");
        assert!(
            !used.iter().any(|file| file.contains("libc.so")),
            "the C library is used by programs of the image: {used:?}"
        );
    }

    #[test]
    fn unknown_name_then_error_lists_known_names() {
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
    fn required_groups_are_selected() {
        let files = select("compute-min", &["opencl"], &[], "550.1").unwrap();
        for group in ["opencl", "nvvm"] {
            assert!(files.iter().any(|file| file.group == group), "{group}");
        }
        let video = select("video", &[], &[], "550.1").unwrap();
        assert!(paths(&video).contains(&"usr/lib/x86_64-linux-gnu/libnvcuvid.so.550.1"));
    }

    #[test]
    fn inconsistent_table_then_error() {
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
            (format!("{}{}", profile("\"a\"", "\"h\""), group("")), "GPU generation h"),
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
