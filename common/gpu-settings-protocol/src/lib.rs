//! GPU settings: their grammar on the kernel command line, the request that
//! PID 1 passes to `firstlight-gpu-settings`, and that program's reports.
//!
//! The grammar, the same for every setting (no spaces):
//!
//! ```text
//! setting  = part (';' part)*            the last part that selects a GPU wins
//! part     = [gpus ':'] value            without gpus: all of them
//! gpus     = "all" | index | index '-' index | PCI address      indices in PCI order, from 0
//! value    = "keep" | what the setting takes                    keep: unchanged
//! clocks   = "default" | MHz | MHz ',' MHz                      fixed, or minimum and maximum
//! power    = "default" | watts
//! compute  = "default" | "exclusive-process" | "prohibited"
//! mig      = "off" | "on" | instances (',' instances)*          on: instances stay unchanged
//! instances= profile ['*' count]
//! profile  = name as in nvidia-smi, "3g.71gb" or "1g.18gb+me"  | profile id
//! ```
#![forbid(unsafe_code)]

mod messages;
mod mig;
mod requested;
mod value;

pub use messages::{Gpu, Outcome, SYSTEM, SettingsRequest, StepReport};
pub use mig::{InstanceCount, Mig, Profile};
pub use requested::{PerGpu, Ready, RequestedSettings};
pub use value::{Clocks, ComputeMode, Malformed, Power};

/// Parses a decimal number of at most eight digits; `None` if it exceeds `most`.
fn number(text: &str, most: u32) -> Option<u32> {
    let digits = !text.is_empty() && text.len() <= 8 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number <= most)
}
