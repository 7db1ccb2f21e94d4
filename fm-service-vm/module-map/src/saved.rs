//! The file in which a daemon keeps its map.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::claim::{Claim, checked};
use crate::map::{Evidence, ModuleMap};
use crate::{LONGEST, is_word};

/// What the file says it is; another form has another number.
pub const SCHEMA: &str = "firstlight.module-map/1";
/// Requests that are known again.
const REMEMBERED: usize = 64;

/// A request that was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remembered {
    /// Its identifier.
    pub request: String,
    /// What it asked for: the same request has to ask for the same.
    pub asked: String,
}

/// Everything that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    schema: String,
    /// The map, if there is one.
    pub map: Option<ModuleMap>,
    /// Requests that were done, oldest first.
    #[serde(default)]
    pub requests: VecDeque<Remembered>,
}

impl Default for Saved {
    fn default() -> Self {
        Self { schema: SCHEMA.to_owned(), map: None, requests: VecDeque::new() }
    }
}

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// It is too long.
    #[error("it has more than {LONGEST} bytes")]
    TooLong,
    /// It is no such file.
    #[error("at byte {byte}: {what}")]
    At {
        /// Where.
        byte: usize,
        /// What.
        what: String,
    },
    /// It says what cannot be.
    #[error("{field}: {what}")]
    Field {
        /// Where.
        field: &'static str,
        /// What.
        what: String,
    },
}

impl Saved {
    /// What a file says.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn read(bytes: &[u8]) -> Result<Self, Damage> {
        if bytes.len() > LONGEST {
            return Err(Damage::TooLong);
        }
        let saved: Self = serde_json::from_slice(bytes).map_err(|error| {
            let lines = bytes.split_inclusive(|byte| *byte == b'\n').take(error.line().saturating_sub(1));
            let byte = lines.map(<[u8]>::len).sum::<usize>() + error.column();
            Damage::At { byte, what: error.to_string() }
        })?;
        let wrong = |field, what: String| Err(Damage::Field { field, what });
        if saved.schema != SCHEMA {
            return wrong(
                "schema",
                format!("{:?} is not {SCHEMA}: another version of the daemon wrote it", saved.schema),
            );
        }
        if let Some(map) = &saved.map {
            if !is_word(&map.baseboard) {
                return wrong("map.baseboard", format!("{:?} is no serial number", crate::short(&map.baseboard)));
            }
            let claim = |(module, entry): (&u32, &crate::Entry)| {
                let (uuid, serial) = (entry.uuid.clone(), entry.serial.clone());
                Claim { module: *module, pci: entry.pci, uuid, serial }
            };
            let claims: Vec<Claim> = map.entries.iter().map(claim).collect();
            if let Err(error) = checked(&claims) {
                return wrong("map.entries", error.to_string());
            }
            let is_long = |evidence: &Evidence| matches!(evidence, Evidence::Nvml { what, .. } if what.len() > 4 * crate::LONGEST_WORD);
            if map.entries.values().any(|entry| is_long(&entry.evidence)) {
                return wrong("map.entries", "what a measurement says of itself is too long".to_owned());
            }
        }
        if saved.requests.len() > REMEMBERED {
            return wrong("requests", format!("there are more than {REMEMBERED}"));
        }
        Ok(saved)
    }

    /// As a file.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn written(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// What that request asked for, if it was done.
    #[must_use]
    pub fn asked(&self, request: &str) -> Option<&str> {
        self.requests.iter().find(|one| one.request == request).map(|one| one.asked.as_str())
    }

    /// Notes that a request was done; the oldest is forgotten.
    pub fn remember(&mut self, request: String, asked: String) {
        while self.requests.len() >= REMEMBERED {
            self.requests.pop_front();
        }
        self.requests.push_back(Remembered { request, asked });
    }
}
