//! Simulated hosts, and what a service VM of each gets.
#![expect(clippy::unwrap_used, reason = "a host that cannot be made has failed")]

mod fixture;
mod given;
mod life;
mod refused;
