//! A GPU host in a guest (tier T3): an IOMMU, switches in one group, libvirt with KVM, and guests in it that get
//! functions by vfio-pci.
#![expect(clippy::unwrap_used, reason = "a scenario that cannot go on has failed")]

mod host;
mod together;
