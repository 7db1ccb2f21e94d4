//! The subcommands with more than a few lines.

pub(crate) mod build;
pub(crate) mod diff;
pub(crate) mod kernel_check;
pub(crate) mod matrix;
pub(crate) mod sbom;
pub(crate) mod sizes;
