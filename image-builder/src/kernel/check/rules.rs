//! Rules of a kernel check: the fragments in `kernel-configs`, the purposes that they belong to, renamed
//! symbols, and version milestones.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::kernel::config;
use crate::kernel::fragment::{self, Class, Requirement};
use crate::kernel::version::Version;

/// The fragments by name, embedded at build time.
const FRAGMENTS: &[(&str, &str)] = &[
    ("base", include_str!("../../../../kernel-configs/base.config")),
    ("virtio", include_str!("../../../../kernel-configs/virtio.config")),
    ("containers", include_str!("../../../../kernel-configs/containers.config")),
    ("gpu-guest", include_str!("../../../../kernel-configs/gpu-guest.config")),
    ("big-machine", include_str!("../../../../kernel-configs/big-machine.config")),
    ("rdma", include_str!("../../../../kernel-configs/rdma.config")),
    ("verity-root", include_str!("../../../../kernel-configs/verity-root.config")),
    ("lockdown", include_str!("../../../../kernel-configs/lockdown.config")),
    ("cc", include_str!("../../../../kernel-configs/cc.config")),
    ("service-vm-nvl5", include_str!("../../../../kernel-configs/service-vm-nvl5.config")),
    ("host", include_str!("../../../../kernel-configs/host.config")),
    ("fast-boot", include_str!("../../../../kernel-configs/fast-boot.config")),
    ("debug", include_str!("../../../../kernel-configs/debug.config")),
    ("lab", include_str!("../../../../kernel-configs/lab.config")),
];
const PURPOSES: &str = include_str!("../../../../kernel-configs/check/purposes.toml");
const RENAMED: &str = include_str!("../../../../kernel-configs/check/renamed.toml");
const VERSIONS: &str = include_str!("../../../../kernel-configs/check/versions.toml");

/// Why the rules cannot be loaded or applied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Unknown purpose.
    #[error("unknown purpose {requested:?}; known purposes: {known}")]
    UnknownPurpose {
        /// The requested purpose.
        requested: String,
        /// The known purposes.
        known: String,
    },
    /// A rule file is invalid.
    #[error("failed to parse kernel-configs/check/{file}")]
    Data {
        /// The file.
        file: &'static str,
        /// The parser's error, with line and column.
        source: Box<toml::de::Error>,
    },
    /// A purpose names a missing fragment.
    #[error("kernel-configs/check/purposes.toml: purpose {purpose} names the unknown fragment {fragment:?}")]
    UnknownFragment {
        /// The purpose.
        purpose: String,
        /// The fragment.
        fragment: String,
    },
    /// A fragment is invalid.
    #[error(transparent)]
    Fragment(#[from] config::Error),
}

/// A use of a kernel that it can be checked for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Purpose {
    /// Name, as passed to `--for`.
    pub name: String,
    /// Description, one sentence.
    pub description: String,
    /// Fragments whose rules apply with their own class.
    pub fragments: Vec<String>,
    /// Fragments whose rules apply as hints.
    #[serde(default)]
    pub hints: Vec<String>,
}

/// A symbol that kernel versions name differently.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Renamed {
    /// The old name.
    pub old: String,
    /// The new name; none if newer kernels always include the feature.
    pub new: Option<String>,
    /// The first kernel version with the new name.
    pub since: String,
    /// The new symbol has the inverse meaning.
    #[serde(default)]
    pub inverted: bool,
    /// Explanation.
    #[serde(default)]
    pub note: String,
}

/// A kernel version that matters independently of symbols.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Milestone {
    /// The purposes that it applies to.
    #[serde(rename = "for")]
    pub purposes: Vec<String>,
    /// The first kernel version with the feature.
    pub since: String,
    /// The feature.
    pub feature: String,
    /// The consequence or workaround without it.
    pub without: String,
}

/// One requirement on one symbol, as it applies to the requested purposes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The fragment's name.
    pub fragment: String,
    /// The requirement, as its fragment states it.
    pub requirement: Requirement,
    /// Its class for the requested purposes.
    pub class: Class,
}

/// All built-in rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Requirements by fragment, in the order of `FRAGMENTS`.
    pub fragments: Vec<(String, Vec<Requirement>)>,
    /// Known purposes.
    pub purposes: Vec<Purpose>,
    /// Renamed symbols.
    pub renamed: Vec<Renamed>,
    /// Version milestones.
    pub milestones: Vec<Milestone>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PurposeFile {
    purpose: Vec<Purpose>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RenamedFile {
    renamed: Vec<Renamed>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VersionFile {
    version: Vec<Milestone>,
}

fn parse_rule_file<T: for<'a> Deserialize<'a>>(file: &'static str, text: &str) -> Result<T, Error> {
    toml::from_str(text).map_err(|source| Error::Data { file, source: Box::new(source) })
}

impl Rules {
    /// Returns the rules embedded in this program.
    ///
    /// # Errors
    /// The rules are invalid; a unit test excludes this.
    pub fn built_in() -> Result<Self, Error> {
        let mut fragments = Vec::new();
        for (name, text) in FRAGMENTS {
            let file = format!("kernel-configs/{name}.config");
            fragments.push(((*name).to_owned(), fragment::read(Path::new(&file), text)?));
        }
        let PurposeFile { purpose: purposes } = parse_rule_file("purposes.toml", PURPOSES)?;
        let RenamedFile { renamed } = parse_rule_file("renamed.toml", RENAMED)?;
        let VersionFile { version: milestones } = parse_rule_file("versions.toml", VERSIONS)?;
        let rules = Self { fragments, purposes, renamed, milestones };
        for purpose in &rules.purposes {
            rules.for_purposes(std::slice::from_ref(&purpose.name))?;
        }
        Ok(rules)
    }

    /// Returns the purposes with these names.
    ///
    /// # Errors
    /// A name is unknown.
    pub fn purposes_of(&self, names: &[String]) -> Result<Vec<&Purpose>, Error> {
        let find = |name: &String| {
            self.purposes.iter().find(|purpose| purpose.name == *name).ok_or_else(|| Error::UnknownPurpose {
                requested: name.clone(),
                known: self.purposes.iter().map(|purpose| purpose.name.as_str()).collect::<Vec<_>>().join(", "),
            })
        };
        names.iter().map(find).collect()
    }

    /// Returns the rules of `purposes`: the strictest one per symbol and polarity (on or off).
    ///
    /// # Errors
    /// A purpose is unknown or names an unknown fragment.
    pub fn for_purposes(&self, purposes: &[String]) -> Result<Vec<Rule>, Error> {
        let mut strictest: BTreeMap<(String, bool), Rule> = BTreeMap::new();
        for purpose in self.purposes_of(purposes)? {
            let all = purpose.fragments.iter().map(|name| (name, false));
            for (name, only_hints) in all.chain(purpose.hints.iter().map(|name| (name, true))) {
                let missing = || Error::UnknownFragment { purpose: purpose.name.clone(), fragment: name.clone() };
                let (_, requirement) = self.fragments.iter().find(|(known, _)| known == name).ok_or_else(missing)?;
                for requirement in requirement.iter().filter(|requirement| requirement.tag.class != Class::Build) {
                    let class = if only_hints { Class::Hint } else { requirement.tag.class };
                    let rule = Rule { fragment: name.clone(), requirement: requirement.clone(), class };
                    let key = (requirement.symbol.clone(), requirement.value == "n");
                    match strictest.get(&key) {
                        Some(first) if strictness(first) >= strictness(&rule) => {}
                        _ => drop(strictest.insert(key, rule)),
                    }
                }
            }
        }
        Ok(strictest.into_values().collect())
    }

    /// Returns the version milestones of `purposes`.
    pub fn milestones_of<'a>(&'a self, purposes: &'a [String]) -> impl Iterator<Item = (&'a Milestone, Version)> {
        let applies = |milestone: &&Milestone| milestone.purposes.iter().any(|name| purposes.contains(name));
        self.milestones
            .iter()
            .filter(applies)
            .filter_map(|milestone| Some((milestone, Version::leading(&milestone.since)?)))
    }
}

/// Orders rules: a rule that requires the symbol built in is stricter than one that accepts a module.
fn strictness(rule: &Rule) -> (Class, bool) {
    (rule.class, rule.requirement.tag.module.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    fn config_dir() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel-configs")
    }

    #[test]
    fn every_fragment_file_is_embedded() {
        let names: BTreeSet<String> = fs::read_dir(config_dir())
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".config").map(str::to_owned))
            .collect();
        assert_eq!(names, FRAGMENTS.iter().map(|(name, _)| (*name).to_owned()).collect());
    }

    #[test]
    fn every_requirement_has_a_reason_and_valid_class() {
        let rules = Rules::built_in().unwrap();
        for (name, all) in &rules.fragments {
            assert!(!all.is_empty(), "{name}");
            for requirement in all {
                assert!(
                    requirement.reason.len() > 5,
                    "{name}.config:{}: {} has no reason",
                    requirement.line,
                    requirement.symbol
                );
                let (off, class) = (requirement.value == "n", requirement.tag.class);
                assert!(!(class == Class::Require && off), "{}: say forbid", requirement.symbol);
                assert!(class != Class::Forbid || off, "{}: say require", requirement.symbol);
                assert!(
                    class != Class::Build || !requirement.check_only,
                    "{}: [build] on a check-only line",
                    requirement.symbol
                );
            }
        }
    }

    #[test]
    fn no_purpose_requires_a_symbol_on_and_off() {
        let rules = Rules::built_in().unwrap();
        for purpose in &rules.purposes {
            let all = rules.for_purposes(std::slice::from_ref(&purpose.name)).unwrap();
            let symbols: BTreeSet<_> = all.iter().map(|rule| &rule.requirement.symbol).collect();
            assert_eq!(symbols.len(), all.len(), "{}", purpose.name);
            assert!(purpose.description.len() > 5);
        }
    }

    #[test]
    fn strictest_rule_of_a_symbol_applies() {
        let rules = Rules::built_in().unwrap();
        let of = |names: &[&str], symbol: &str| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let rule =
                rules.for_purposes(&names).unwrap().into_iter().find(|rule| rule.requirement.symbol == symbol).unwrap();
            (rule.class, rule.requirement.tag.module.is_some(), rule.fragment)
        };
        assert_eq!(of(&["gpu-guest"], "EROFS_FS"), (Class::Require, true, "base".to_owned()));
        assert_eq!(of(&["gpu-guest", "verity-root"], "EROFS_FS"), (Class::Require, false, "verity-root".to_owned()));
        assert_eq!(of(&["gpu-guest"], "DM_INIT").0, Class::Hint);
        assert_eq!(of(&["verity-root"], "DM_INIT").0, Class::Require);
        assert_eq!(of(&["gpu-guest"], "MITIGATION_RETPOLINE").0, Class::Hint);
        let error = rules.for_purposes(&["gpus".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("gpu-guest, cc"), "{error}");
    }

    #[test]
    fn renamed_symbols_and_milestones_are_valid() {
        let rules = Rules::built_in().unwrap();
        for renamed in &rules.renamed {
            assert!(Version::leading(&renamed.since).is_some(), "{}", renamed.old);
            assert!(renamed.new.is_some() || !renamed.note.is_empty(), "{}", renamed.old);
        }
        for milestone in &rules.milestones {
            rules.purposes_of(&milestone.purposes).unwrap();
            assert!(Version::leading(&milestone.since).is_some(), "{}", milestone.feature);
        }
    }
}
