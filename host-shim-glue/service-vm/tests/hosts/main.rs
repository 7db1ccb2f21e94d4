//! Hosts as sysfs shows them, and what a service VM of each is given.
#![expect(clippy::unwrap_used, reason = "a host that cannot be made has failed")]

mod fixture;
mod given;
mod life;
mod refused;
