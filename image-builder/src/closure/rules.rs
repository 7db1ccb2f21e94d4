//! `[closure]`: what an image's files need beyond what they say themselves.

use serde::Deserialize;

/// The section; every list may be absent.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rules {
    /// Libraries and files that a program opens by name at run time.
    #[serde(default)]
    pub opens: Vec<Opens>,
    /// Paths that a configuration file names.
    #[serde(default)]
    pub names: Vec<Names>,
    /// Modules that cannot work without firmware.
    #[serde(default)]
    pub firmware: Vec<Firmware>,
    /// What is not there on purpose.
    #[serde(default)]
    pub absent: Vec<Absent>,
    /// Libraries that are there for somebody outside of the image's programs.
    #[serde(default)]
    pub used: Vec<Used>,
}

impl Rules {
    /// These and `more`.
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
    /// The file that does it: a path in the image, in which `*` matches within a name.
    pub file: String,
    /// Names of libraries, or paths.
    pub needs: Vec<String>,
    /// Why it is known.
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
    /// Why it is known.
    pub reason: String,
}

/// `[[closure.firmware]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Firmware {
    /// The module, which names files below `/lib/firmware`: at least one has to be there.
    pub module: String,
    /// Why one is enough, and which.
    pub reason: String,
}

/// `[[closure.absent]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Absent {
    /// The file that needs it: a path in the image, in which `*` matches within a name.
    pub file: String,
    /// What it needs.
    pub need: String,
    /// Why it works without.
    pub reason: String,
}

/// `[[closure.used]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Used {
    /// The libraries: a path in the image, in which `*` matches within a name.
    pub file: String,
    /// By whom.
    pub reason: String,
}
