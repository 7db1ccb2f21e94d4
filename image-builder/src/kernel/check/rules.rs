//! What kernels are judged by: the fragments in `kernel-configs`, and beside
//! them which of them count for what, other names of symbols, and versions.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::kernel::config;
use crate::kernel::fragment::{self, Asked, Class};
use crate::kernel::version::Version;

/// The fragments by name, as they were when this program was built.
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

/// Why kernels cannot be judged by these rules.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such purpose.
    #[error("there is no purpose {wanted:?}; there are: {known}")]
    NoPurpose {
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: String,
    },
    /// A file of rules is not as it should be.
    #[error("kernel-configs/check/{file} is not as it should be")]
    Data {
        /// The file.
        file: &'static str,
        /// Line, column, and what is wrong there.
        source: Box<toml::de::Error>,
    },
    /// A purpose names a fragment that is not there.
    #[error("kernel-configs/check/purposes.toml: {purpose} names {fragment:?}, and there is no such fragment")]
    NoFragment {
        /// The purpose.
        purpose: String,
        /// The fragment.
        fragment: String,
    },
    /// A fragment makes no sense.
    #[error(transparent)]
    Fragment(#[from] config::Error),
}

/// What a kernel can be judged for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Purpose {
    /// As `--for` takes it.
    pub name: String,
    /// In a sentence.
    pub what: String,
    /// Fragments that count.
    pub fragments: Vec<String>,
    /// Fragments that only give hints.
    #[serde(default)]
    pub hints: Vec<String>,
}

/// A symbol with another name in other kernels.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Renamed {
    /// The old name.
    pub was: String,
    /// The new one; none if the kernel always has it.
    pub now: Option<String>,
    /// The first kernel with the new name.
    pub since: String,
    /// On means off.
    #[serde(default)]
    pub reversed: bool,
    /// What there is to say about it.
    #[serde(default)]
    pub why: String,
}

/// A version that matters beyond symbols.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Milestone {
    /// The purposes it matters for.
    #[serde(rename = "for")]
    pub purposes: Vec<String>,
    /// The first kernel that has it.
    pub since: String,
    /// What came.
    pub what: String,
    /// What it is like without.
    pub without: String,
}

/// One symbol and what is required of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The fragment's name.
    pub fragment: String,
    /// The assignment with its reason.
    pub asked: Asked,
    /// How much it matters for what is judged.
    pub class: Class,
}

/// All rules there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// By fragment, in the order of their names' list.
    pub fragments: Vec<(String, Vec<Asked>)>,
    /// What can be judged for.
    pub purposes: Vec<Purpose>,
    /// Other names.
    pub renamed: Vec<Renamed>,
    /// Versions.
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

fn data<T: for<'a> Deserialize<'a>>(file: &'static str, text: &str) -> Result<T, Error> {
    toml::from_str(text).map_err(|source| Error::Data { file, source: Box::new(source) })
}

impl Rules {
    /// The rules of this program.
    ///
    /// # Errors
    /// They are not as they should be, which a test of ours would have found.
    pub fn built_in() -> Result<Self, Error> {
        let mut fragments = Vec::new();
        for (name, text) in FRAGMENTS {
            let file = format!("kernel-configs/{name}.config");
            fragments.push(((*name).to_owned(), fragment::read(Path::new(&file), text)?));
        }
        let PurposeFile { purpose: purposes } = data("purposes.toml", PURPOSES)?;
        let RenamedFile { renamed } = data("renamed.toml", RENAMED)?;
        let VersionFile { version: milestones } = data("versions.toml", VERSIONS)?;
        let rules = Self { fragments, purposes, renamed, milestones };
        for purpose in &rules.purposes {
            rules.of(std::slice::from_ref(&purpose.name))?;
        }
        Ok(rules)
    }

    /// The purposes of these names.
    ///
    /// # Errors
    /// There is none of such a name.
    pub fn purposes_of(&self, names: &[String]) -> Result<Vec<&Purpose>, Error> {
        let find = |name: &String| {
            self.purposes.iter().find(|purpose| purpose.name == *name).ok_or_else(|| Error::NoPurpose {
                wanted: name.clone(),
                known: self.purposes.iter().map(|purpose| purpose.name.as_str()).collect::<Vec<_>>().join(", "),
            })
        };
        names.iter().map(find).collect()
    }

    /// The rules that count for purposes: one per symbol and wanted value, the strictest.
    ///
    /// # Errors
    /// No such purpose, or one that names a fragment that is not there.
    pub fn of(&self, purposes: &[String]) -> Result<Vec<Rule>, Error> {
        let mut strictest: BTreeMap<(String, bool), Rule> = BTreeMap::new();
        for purpose in self.purposes_of(purposes)? {
            let all = purpose.fragments.iter().map(|name| (name, false));
            for (name, only_hints) in all.chain(purpose.hints.iter().map(|name| (name, true))) {
                let missing = || Error::NoFragment { purpose: purpose.name.clone(), fragment: name.clone() };
                let (_, asked) = self.fragments.iter().find(|(known, _)| known == name).ok_or_else(missing)?;
                for asked in asked.iter().filter(|asked| asked.tag.class != Class::Build) {
                    let class = if only_hints { Class::Hint } else { asked.tag.class };
                    let rule = Rule { fragment: name.clone(), asked: asked.clone(), class };
                    let key = (asked.symbol.clone(), asked.value == "n");
                    match strictest.get(&key) {
                        Some(first) if strictness(first) >= strictness(&rule) => {}
                        _ => drop(strictest.insert(key, rule)),
                    }
                }
            }
        }
        Ok(strictest.into_values().collect())
    }

    /// Versions that matter for purposes.
    pub fn milestones_of<'a>(&'a self, purposes: &'a [String]) -> impl Iterator<Item = (&'a Milestone, Version)> {
        let wanted = |milestone: &&Milestone| milestone.purposes.iter().any(|name| purposes.contains(name));
        self.milestones
            .iter()
            .filter(wanted)
            .filter_map(|milestone| Some((milestone, Version::leading(&milestone.since)?)))
    }
}

/// A rule that wants it built in is stricter than one that takes a module.
fn strictness(rule: &Rule) -> (Class, bool) {
    (rule.class, rule.asked.tag.module.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    fn dir() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel-configs")
    }

    #[test]
    fn every_fragment_of_the_tree_is_known() {
        let names: BTreeSet<String> = fs::read_dir(dir())
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".config").map(str::to_owned))
            .collect();
        assert_eq!(names, FRAGMENTS.iter().map(|(name, _)| (*name).to_owned()).collect());
    }

    #[test]
    fn every_symbol_has_its_reason() {
        let rules = Rules::built_in().unwrap();
        for (name, all) in &rules.fragments {
            assert!(!all.is_empty(), "{name}");
            for asked in all {
                assert!(asked.reason.len() > 5, "{name}.config:{}: {} has no reason", asked.line, asked.symbol);
                let (off, class) = (asked.value == "n", asked.tag.class);
                assert!(!(class == Class::Require && off), "{}: say forbid", asked.symbol);
                assert!(class != Class::Forbid || off, "{}: say require", asked.symbol);
                assert!(class != Class::Build || !asked.only_judged, "{}: judged by nothing", asked.symbol);
            }
        }
    }

    #[test]
    fn no_purpose_wants_a_symbol_on_and_off() {
        let rules = Rules::built_in().unwrap();
        for purpose in &rules.purposes {
            let all = rules.of(std::slice::from_ref(&purpose.name)).unwrap();
            let symbols: BTreeSet<_> = all.iter().map(|rule| &rule.asked.symbol).collect();
            assert_eq!(symbols.len(), all.len(), "{}", purpose.name);
            assert!(purpose.what.len() > 5);
        }
    }

    #[test]
    fn the_strictest_rule_of_a_symbol_counts() {
        let rules = Rules::built_in().unwrap();
        let of = |names: &[&str], symbol: &str| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let rule = rules.of(&names).unwrap().into_iter().find(|rule| rule.asked.symbol == symbol).unwrap();
            (rule.class, rule.asked.tag.module.is_some(), rule.fragment)
        };
        assert_eq!(of(&["gpu-guest"], "EROFS_FS"), (Class::Require, true, "base".to_owned()));
        assert_eq!(of(&["gpu-guest", "verity-root"], "EROFS_FS"), (Class::Require, false, "verity-root".to_owned()));
        assert_eq!(of(&["gpu-guest"], "DM_INIT").0, Class::Hint);
        assert_eq!(of(&["verity-root"], "DM_INIT").0, Class::Require);
        assert_eq!(of(&["gpu-guest"], "MITIGATION_RETPOLINE").0, Class::Hint);
        let error = rules.of(&["gpus".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("gpu-guest, cc"), "{error}");
    }

    #[test]
    fn other_names_and_versions_make_sense() {
        let rules = Rules::built_in().unwrap();
        for renamed in &rules.renamed {
            assert!(Version::leading(&renamed.since).is_some(), "{}", renamed.was);
            assert!(renamed.now.is_some() || !renamed.why.is_empty(), "{}", renamed.was);
        }
        for milestone in &rules.milestones {
            rules.purposes_of(&milestone.purposes).unwrap();
            assert!(Version::leading(&milestone.since).is_some(), "{}", milestone.what);
        }
    }
}
