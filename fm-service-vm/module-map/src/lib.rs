//! The module map: which GPU of a baseboard has which PCI address.
//!
//! A fabric manager (FM) identifies GPUs by module id, their place on the baseboard; PCI passthrough identifies them
//! by PCI address. The two orders are unrelated, and a wrong assumption connects a tenant to another tenant's GPU. So
//! the map is stated by an operator or measured, each entry has its evidence, and only measured entries count as
//! verified. All functions here are pure.
#![forbid(unsafe_code)]

mod claim;
mod map;
mod measured;
mod operator;
mod saved;
mod verification;

pub use claim::{Claim, ClaimError};
pub use map::{Contradiction, Entry, Evidence, MapError, Merged, ModuleMap};
pub use measured::{MeasuredError, Measurement, PlaceError, measurements, placed};
pub use operator::{TableError, table};
pub use saved::{CompletedRequest, Damage, SCHEMA, Saved};
pub use verification::{ObservedGpu, Verification};

/// Maximum length of a file, in bytes.
pub const MAX_FILE: usize = 64 << 10;
/// Maximum length of a serial number or identifier.
pub const MAX_WORD: usize = 64;

/// Returns whether a text is a valid serial number or identifier: it goes into logs and commands.
#[must_use]
pub fn is_word(text: &str) -> bool {
    (1..=MAX_WORD).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Returns the start of an untrusted text.
fn short(text: &str) -> String {
    text.chars().take(MAX_WORD).collect()
}
