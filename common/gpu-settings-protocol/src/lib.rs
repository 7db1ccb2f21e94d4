//! Settings of GPUs: how they are asked for on the kernel command line, what
//! PID 1 hands to `firstlight-gpu-settings`, and what that program answers.
//!
//! The grammar, the same for every setting (no blanks):
//!
//! ```text
//! setting  = part (';' part)*            the last part that names a GPU counts
//! part     = [gpus ':'] value            without gpus: all of them
//! gpus     = "all" | index | index '-' index | PCI address      indices in PCI order, from 0
//! value    = "keep" | what the setting takes                    keep: as it was found
//! clocks   = "default" | MHz | MHz ',' MHz                      fixed, or lowest and highest
//! power    = "default" | watts
//! compute  = "default" | "exclusive-process" | "prohibited"
//! mig      = "off" | "on" | instances (',' instances)*          on: whatever instances there are
//! instances= profile ['*' count]
//! profile  = name as nvidia-smi's, "3g.71gb" or "1g.18gb+me"  | its number
//! ```
#![forbid(unsafe_code)]

mod asked;
mod mig;
mod value;
mod work;

pub use asked::{Asked, PerGpu, Ready};
pub use mig::{Mig, Part, Profile};
pub use value::{Clocks, ComputeMode, Malformed, Power};
pub use work::{Gpu, Line, Outcome, SYSTEM, Work};

/// A whole number as people write it: digits, and no more of them than anybody needs.
fn number(text: &str, most: u32) -> Option<u32> {
    let digits = !text.is_empty() && text.len() <= 8 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number <= most)
}
