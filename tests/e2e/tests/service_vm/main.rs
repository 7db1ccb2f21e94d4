//! The service VM as a domain of a real libvirt with a real QEMU, without KVM and separate from this machine's
//! libvirt.
#![expect(clippy::unwrap_used, reason = "a scenario that cannot go on has failed")]

mod life;
mod schema;
mod site;
