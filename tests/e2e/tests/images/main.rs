//! Image formats, made by the real programs and judged by the real programs.
//! They come from Debian's packages through the builder's cache; no guest.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod archive;
mod bars;
mod formats;
mod pull;
mod results;
mod service_vm;
mod trees;
mod verity;
