//! The file format of the daemon's module map.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::claim::{Claim, checked};
use crate::map::{Evidence, ModuleMap};
use crate::{MAX_FILE, is_word};

/// The schema identifier; incompatible formats get another number.
pub const SCHEMA: &str = "firstlight.module-map/1";
/// Number of completed requests that are remembered.
const REMEMBERED: usize = 64;

/// A completed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedRequest {
    /// The request id.
    pub request: String,
    /// The request in one line: a retry has to match it.
    pub summary: String,
}

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    schema: String,
    /// The map, if there is one.
    pub map: Option<ModuleMap>,
    /// Completed requests, oldest first.
    #[serde(default)]
    pub requests: VecDeque<CompletedRequest>,
}

impl Default for Saved {
    fn default() -> Self {
        Self { schema: SCHEMA.to_owned(), map: None, requests: VecDeque::new() }
    }
}

/// Damage of a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The file is too long.
    #[error("it has more than {MAX_FILE} bytes")]
    TooLong,
    /// Invalid JSON.
    #[error("at byte {byte}: {what}")]
    At {
        /// The offset.
        byte: usize,
        /// The parser's message.
        what: String,
    },
    /// An invalid value.
    #[error("{field}: {what}")]
    Field {
        /// The field.
        field: &'static str,
        /// What is wrong.
        what: String,
    },
}

impl Saved {
    /// Parses a file.
    ///
    /// # Errors
    /// The damage, and where.
    pub fn read(bytes: &[u8]) -> Result<Self, Damage> {
        if bytes.len() > MAX_FILE {
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
                return wrong("map.baseboard", format!("{:?} is not a serial number", crate::short(&map.baseboard)));
            }
            let claim = |(module, entry): (&u32, &crate::Entry)| {
                let (uuid, serial) = (entry.uuid.clone(), entry.serial.clone());
                Claim { module: *module, pci: entry.pci, uuid, serial }
            };
            let claims: Vec<Claim> = map.entries.iter().map(claim).collect();
            if let Err(error) = checked(&claims) {
                return wrong("map.entries", error.to_string());
            }
            let is_long = |evidence: &Evidence| matches!(evidence, Evidence::Nvml { origin, .. } if origin.len() > 4 * crate::MAX_WORD);
            if map.entries.values().any(|entry| is_long(&entry.evidence)) {
                return wrong("map.entries", "the origin of a measurement is too long".to_owned());
            }
        }
        if saved.requests.len() > REMEMBERED {
            return wrong("requests", format!("there are more than {REMEMBERED}"));
        }
        Ok(saved)
    }

    /// Serialises the file.
    ///
    /// # Errors
    /// Out of memory.
    pub fn written(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Returns the summary of a completed request.
    #[must_use]
    pub fn summary(&self, request: &str) -> Option<&str> {
        self.requests.iter().find(|one| one.request == request).map(|one| one.summary.as_str())
    }

    /// Records a completed request; the oldest is dropped.
    pub fn remember(&mut self, request: String, summary: String) {
        while self.requests.len() >= REMEMBERED {
            self.requests.pop_front();
        }
        self.requests.push_back(CompletedRequest { request, summary });
    }
}
