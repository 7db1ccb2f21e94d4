//! `[closure]`: rules for dependencies that the closure check cannot detect itself.

use serde::Deserialize;

/// The section `[closure]` of a manifest; every list may be absent.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rules {
    /// Libraries and files that a program opens with dlopen or open.
    #[serde(default)]
    pub opens: Vec<Opens>,
    /// Paths in configuration files.
    #[serde(default)]
    pub names: Vec<Names>,
    /// Modules that require firmware.
    #[serde(default)]
    pub firmware: Vec<Firmware>,
    /// Dependencies that are not in the image intentionally.
    #[serde(default)]
    pub absent: Vec<Absent>,
    /// Libraries that are used by other programs than those of the image.
    #[serde(default)]
    pub used: Vec<Used>,
}

impl Rules {
    /// Returns these rules and `more`.
    #[must_use]
    pub fn and(mut self, more: &Self) -> Self {
        self.opens.extend_from_slice(&more.opens);
        self.names.extend_from_slice(&more.names);
        self.firmware.extend_from_slice(&more.firmware);
        self.absent.extend_from_slice(&more.absent);
        self.used.extend_from_slice(&more.used);
        self
    }
}

/// `[[closure.opens]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opens {
    /// The program: a path in the image; `*` matches within a name.
    pub file: String,
    /// Names of libraries, or paths.
    pub needs: Vec<String>,
    /// The reason for the rule.
    pub reason: String,
}

/// `[[closure.names]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Names {
    /// The configuration file: a path in the image.
    pub file: String,
    /// The key before `=`, whose value is the path.
    pub key: String,
    /// The reason for the rule.
    pub reason: String,
}

/// `[[closure.firmware]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Firmware {
    /// The module; at least one of the firmware files that it names must be in the image.
    pub module: String,
    /// Why one file suffices.
    pub reason: String,
}

/// `[[closure.absent]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Absent {
    /// The file with the dependency: a path in the image; `*` matches within a name.
    pub file: String,
    /// The dependency.
    pub need: String,
    /// Why the file works without it.
    pub reason: String,
}

/// `[[closure.used]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Used {
    /// The libraries: a path in the image; `*` matches within a name.
    pub file: String,
    /// What uses them.
    pub reason: String,
}
