//! Disks and PCI functions, cold-plugged or hot-plugged, and the containers that
//! are granted them. The first line of every disk is its name, so a container
//! proves which one it has.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{AddSwapPathRequest, AddSwapRequest};
use firstlight_vm::{Device, Nvdimm};
use ttrpc::context::with_duration;

use crate::support::{CALL, Files, SIZE, output, ready, refused};

/// Creates a disk with a swap area, in the format of mkswap: version 1, the last page, the signature.
fn swap(files: &Files, name: &str) -> PathBuf {
    let path = files.disk(name);
    let mut page = vec![0; 4096];
    page[1024..1028].copy_from_slice(&1u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&((SIZE << 8) - 1).to_le_bytes());
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&page, 0).unwrap();
    path
}

#[test]
fn cold_plugged_disks_are_found_and_only_granted_ones_open() {
    let files = Files::make();
    let beyond = Box::new(Device::Disk { file: files.disk("beyond") });
    let hardware = vec![
        Device::Disk { file: files.disk("virtio") },
        Device::Nvme { file: files.disk("nvme") },
        Device::Scsi { file: files.disk("scsi"), target: 3, lun: 2 },
        Device::BehindRootComplex { bus: 0x20, device: beyond },
        Device::Disk { file: files.disk("foreign") },
        Device::EmptyPort,
    ];
    let paths: Vec<String> = hardware.iter().enumerate().map(|(at, device)| device.pci_path(at)).collect();
    let mut scenario = files.scenario("devices", hardware);
    scenario.guest.persistent = vec![Nvdimm { file: files.disk("persistent"), mib: SIZE }];
    scenario.parameter("agent.hotplug_timeout=2").watched(async |vm| {
        let agent = ready(vm).await;
        let script = "for d in a b c d e; do head -n 1 /dev/xd$d; done; \
            ls -l /dev/xda | tr -s ' ,' ' ' | cut -d ' ' -f 5,6; \
            n=0; \
            while [ $n -lt 64 ]; do mknod /dev/p$n b 254 $n; head -n 1 /dev/p$n 2>&1; n=$((n+16)); done";
        let request = files.request(
            "c1",
            script,
            &[
                ("blk", &paths[0], "/dev/xda"),
                ("blk", &paths[1], "/dev/xdb"),
                ("scsi", "3:2", "/dev/xdc"),
                ("blk", &paths[3], "/dev/xdd"),
                ("nvdimm", "/dev/pmem0", "/dev/xde"),
            ],
        );
        let said = output(&agent, &request).await;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.get(..5), Some(&["virtio", "nvme", "scsi", "beyond", "persistent"][..]), "{said}");
        assert!(!said.contains("foreign") && said.contains("Operation not permitted"), "{said}");

        // The error for a missing device names it and the resolved part of its path, within the guest's deadline.
        let begin = Instant::now();
        let missing = [
            (("blk", paths[5].as_str()), "behind bridge 0000:00:10.5"),
            (("blk", "05/00"), "no function 0000:00:05.0"),
            (("blk", "30/00/00"), "no root complex pci0000:30"),
            (("scsi", "3:9"), "scanned for it and found none"),
            (("nvdimm", "/dev/pmem7"), "no block device pmem7"),
            (("disc", "x"), "unknown device type"),
        ];
        for (at, ((kind, name), part)) in missing.into_iter().enumerate() {
            let request = files.request(&format!("m{at}"), "true", &[(kind, name, "/dev/xda")]);
            let error = refused(&agent, &request).await;
            assert!(error.contains(part) && error.contains("/dev/xda"), "{part} in {error}");
            assert!(kind == "disc" || error.contains("agent.hotplug_timeout (to 4 s)"), "{error}");
        }
        assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    });
}

#[test]
fn hot_plugged_disk_is_found_before_or_after_the_request() {
    let files = Files::make();
    let (early, late, scsi) = (files.disk("early"), files.disk("late"), files.disk("unit"));
    let hardware = vec![Device::EmptyPort, Device::EmptyPort, Device::EmptyPort];
    let paths: Vec<String> = hardware.iter().enumerate().map(|(at, device)| device.pci_path(at)).collect();
    files.scenario("devices", hardware).parameter("agent.hotplug_timeout=20").watched(async |vm| {
        let agent = ready(vm).await;
        let mut monitor = vm.monitor().await.unwrap();
        // Requested before it is plugged in.
        let request = files.request("c1", "head -n 1 /dev/xda", &[("blk", &paths[0], "/dev/xda")]);
        let asked = output(&agent, &request);
        let plugged = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            monitor.plug(0, &Device::Disk { file: late }).await.unwrap();
        };
        let begin = Instant::now();
        let (said, ()) = tokio::join!(asked, plugged);
        println!("  requested 1 s before: {:?} to the container's end", begin.elapsed());
        assert_eq!(said, "late\n");

        // Plugged in 3 s before it is requested.
        monitor.plug(1, &Device::Disk { file: early }).await.unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let begin = Instant::now();
        let request = files.request("c2", "head -n 1 /dev/xda", &[("blk", &paths[1], "/dev/xda")]);
        assert_eq!(output(&agent, &request).await, "early\n");
        println!("  requested after: {:?} to the container's end", begin.elapsed());

        // Plugged in together with its SCSI controller.
        let request = files.request("c3", "head -n 1 /dev/xda", &[("scsi", "0:1", "/dev/xda")]);
        let asked = output(&agent, &request);
        let unit = Device::Scsi { file: scsi, target: 0, lun: 1 };
        let plugged = monitor.plug(2, &unit);
        let (said, plugged) = tokio::join!(asked, plugged);
        plugged.unwrap();
        assert_eq!(said, "unit\n");
    });
}

#[test]
fn only_disks_with_a_swap_area_become_swap() {
    let files = Files::make();
    let hardware = vec![
        Device::Disk { file: swap(&files, "swap-a") },
        Device::Disk { file: swap(&files, "swap-b") },
        Device::Disk { file: files.disk("plain") },
    ];
    files.scenario("devices", hardware).parameter("agent.hotplug_timeout=20").watched(async |vm| {
        let agent = ready(vm).await;
        let by_place = |slots: &[u32]| AddSwapRequest { PCIPath: slots.to_vec(), ..Default::default() };
        let by_path = |path: &str| AddSwapPathRequest { path: path.into(), ..Default::default() };
        agent.calls().add_swap(with_duration(CALL), &by_place(&[0x10, 0])).await.unwrap();
        let error = agent.calls().add_swap(with_duration(CALL), &by_place(&[0x10, 0])).await.unwrap_err().to_string();
        assert!(error.contains("/dev/vda") && error.contains("in use"), "{error}");
        agent.calls().add_swap_path(with_duration(CALL), &by_path("/dev/vdb")).await.unwrap();
        for (path, part) in [
            ("/dev/vdc", "no swap area"),
            ("/etc/passwd", "neither a disk"),
            ("/run/kata-containers/sandbox/../../../etc/passwd", "failed to open"),
        ] {
            let error = agent.calls().add_swap_path(with_duration(CALL), &by_path(path)).await.unwrap_err().to_string();
            assert!(error.contains(part), "{part} in {error}");
        }
        let said = output(&agent, &files.request("c1", "cat /proc/swaps", &[])).await;
        assert!(said.contains("/dev/vda") && said.contains("/dev/vdb") && !said.contains("/dev/vdc"), "{said}");
    });
}

#[test]
fn vfio_function_gets_a_node_and_a_guest_kernel_function_keeps_its_driver() {
    let files = Files::make();
    let hardware: Vec<Device> =
        ["52:54:00:00:00:01", "52:54:00:00:00:02"].map(|mac| Device::Nic { mac: mac.into() }).into();
    let mut scenario =
        files.scenario("devices", hardware).parameter("intel_iommu=on").parameter("agent.hotplug_timeout=20");
    scenario.guest.iommu = true;
    scenario.watched(async |vm| {
        let agent = ready(vm).await;
        let script = "for n in /dev/vfio/*; do : < $n && echo opened $n; done; echo $PCIDEVICE_NET; \
            for f in $(echo $PCIDEVICE_NET | tr , ' '); do \
            basename $(readlink /sys/bus/pci/devices/$f/driver); done";
        let mut request = files.request(
            "c1",
            script,
            &[
                ("vfio-pci", "0000:c1:00.0=10/00", "/dev/vfio/77"),
                ("vfio-pci-gk", "0000:c2:00.0=10.1/00", "/dev/vfio/78"),
            ],
        );
        let spec = request.OCI.mut_or_insert_default();
        // A shim removes the device nodes of functions that stay with a guest kernel driver.
        spec.Linux.mut_or_insert_default().Devices.pop();
        let environment = &mut spec.Process.mut_or_insert_default().Env;
        environment.push("PCIDEVICE_NET=0000:c1:00.0,0000:c2:00.0".into());
        let said = output(&agent, &request).await;
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].starts_with("opened /dev/vfio/") && !said.contains("/dev/vfio/77"), "{said}");
        assert!(lines[1].starts_with("0000:") && !lines[1].contains("0000:c1"), "{said}");
        assert_eq!(lines[2..], ["vfio-pci", "virtio-pci"], "{said}");
    });
}
