//! Which GPU of a baseboard has which PCI address.
//!
//! A fabric manager (FM) knows GPUs by module id, the place on the baseboard; whoever
//! passes GPUs through knows them by PCI address. Neither order says anything of the
//! other, and who takes one for the other connects a tenant to somebody else's
//! GPU. So the map is told by an operator or measured, each entry has its
//! evidence, and only what was measured counts as verified. Everything here is
//! a pure function of texts and maps.
#![forbid(unsafe_code)]

mod claim;
mod map;
mod measured;
mod operator;
mod saved;
mod standing;

pub use claim::{Claim, ClaimError};
pub use map::{Contradiction, Entry, Evidence, Merged, ModuleMap, Refused};
pub use measured::{MeasuredError, Measurement, PlaceError, measurements, placed};
pub use operator::{TableError, table};
pub use saved::{Damage, Remembered, SCHEMA, Saved};
pub use standing::{Sighting, Standing};

/// No file that is read here has more bytes.
pub const LONGEST: usize = 64 << 10;
/// No word of one, such as a serial number, has more letters.
pub const LONGEST_WORD: usize = 64;

/// Whether a text can be a serial number or an identifier: it goes into logs and commands.
#[must_use]
pub fn is_word(text: &str) -> bool {
    (1..=LONGEST_WORD).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The first letters of a text that somebody else wrote.
fn short(text: &str) -> String {
    text.chars().take(LONGEST_WORD).collect()
}
