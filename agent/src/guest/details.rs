//! GetGuestDetails: memory block size and the agent's features.

use std::fs;
use std::path::Path;

use firstlight_agent_api::agent::{AgentDetails, GuestDetailsRequest, GuestDetailsResponse};

use crate::{VERSION, devices, storage};

/// Returns the details. Fields that were not requested, or that the kernel does not provide, are
/// zero.
#[must_use]
pub fn details(request: &GuestDetailsRequest, sysfs: &Path) -> GuestDetailsResponse {
    let memory = sysfs.join("devices/system/memory");
    let mut reply = GuestDetailsResponse::new();
    if request.mem_block_size {
        let text = fs::read_to_string(memory.join("block_size_bytes")).unwrap_or_default();
        // Hexadecimal without a prefix.
        reply.mem_block_size_bytes = u64::from_str_radix(text.trim(), 16).unwrap_or(0);
    }
    if request.mem_hotplug_probe {
        reply.support_mem_hotplug_probe = memory.join("probe").exists();
    }
    reply.agent_details = Some(AgentDetails {
        version: VERSION.to_owned(),
        init_daemon: std::process::id() == 1,
        storage_handlers: storage::drivers().map(str::to_owned).collect(),
        supports_seccomp: true,
        device_handlers: devices::kinds().map(str::to_owned).collect(),
        extra_features: Vec::new(),
        ..Default::default()
    })
    .into();
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requested_details_are_set() {
        let root = tempfile::tempdir().unwrap();
        let memory = root.path().join("devices/system/memory");
        fs::create_dir_all(&memory).unwrap();
        fs::write(memory.join("block_size_bytes"), "8000000\n").unwrap();
        let request = GuestDetailsRequest { mem_block_size: true, mem_hotplug_probe: true, ..Default::default() };
        let reply = details(&request, root.path());
        assert_eq!((reply.mem_block_size_bytes, reply.support_mem_hotplug_probe), (0x800_0000, false));
        fs::write(memory.join("probe"), "").unwrap();
        assert!(details(&request, root.path()).support_mem_hotplug_probe);
        let agent = &reply.agent_details;
        assert!(agent.storage_handlers.contains(&"virtio-fs".to_owned()));
        assert_eq!((agent.version.as_str(), agent.init_daemon, agent.supports_seccomp), (VERSION, false, true));
        let nothing = details(&GuestDetailsRequest::new(), root.path());
        assert_eq!((nothing.mem_block_size_bytes, nothing.support_mem_hotplug_probe), (0, false));
    }
}
