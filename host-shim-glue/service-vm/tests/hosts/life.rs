//! Operations on the domain, with a script in place of virsh that behaves like it.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::time::Duration;

use firstlight_service_vm::service::{Change, Service, State};
use firstlight_service_vm::virsh::Virsh;
use firstlight_service_vm::xml::Domain;

use crate::fixture::{Fixture, GPU};

/// Its state is in files: the XML, and whether the domain runs.
const VIRSH: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
shift 3
unknown() { echo "error: failed to get domain '$1'" >&2; exit 1; }
case "$1" in
  define) cp "$3" xml ;;
  domuuid) [ -e xml ] || unknown "$2"; sed -n 's/.*<uuid>\(.*\)<.uuid>.*/\1/p' xml ;;
  dumpxml) [ -e xml ] || unknown x; cat xml ;;
  domstate) [ -e xml ] || unknown "$3"; if [ -e paused ]; then echo "paused (user)"; elif [ -e runs ]; then echo "running (booted)"; else echo "shut off (unknown)"; fi ;;
  start) : > runs ;;
  destroy) [ -e runs ] || { echo "error: Requested operation is not valid: domain is not running" >&2; exit 1; }; rm runs ;;
esac
"#;

struct Life {
    host: Fixture,
    service: Service,
    domain: Domain,
}

fn life(host: Fixture) -> Life {
    let dir = host.path().to_owned();
    let program = dir.join("virsh");
    fs::write(&program, VIRSH).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut domain = host.domain(false);
    let file = |name: &str| -> PathBuf { dir.join(name) };
    (domain.boot_files.kernel, domain.boot_files.initrd) = (file("vmlinux"), Some(file("initrd")));
    domain.state_disk = Some(file("state.img"));
    for name in ["vmlinux", "initrd", "state.img", "dev/kvm", "dev/vhost-vsock"] {
        fs::write(dir.join(name), "").unwrap();
    }
    let virsh = Virsh { program, uri: "qemu:///system".into(), timeout: Duration::from_secs(20) };
    let service = Service { name: domain.name.clone(), virsh, host: host.host() };
    Life { host, service, domain }
}

impl Life {
    fn define(&self) {
        self.service.define(&self.domain.xml().unwrap()).unwrap();
    }

    #[track_caller]
    fn assert_cannot_start(&self, message: &[&str]) {
        let error = self.service.start().unwrap_err().to_string();
        assert!(message.iter().all(|word| error.contains(word)), "{message:?}: {error}");
        assert!(!self.host.path().join("runs").exists());
        let status = self.service.status().unwrap();
        assert!(!status.problems.is_empty(), "status says it too");
    }

    /// Simulates a QEMU that has the group open.
    fn hold(&self, pid: u32, name: &str) {
        let process = self.host.path().join("proc").join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(
            process.join("cmdline"),
            format!("qemu\0-name\0guest={name},x\0-uuid\0{}\0", self.service.name.uuid()),
        )
        .unwrap();
        fs::write(process.join("stat"), format!("{pid} (q) S{} 200 0", " 0".repeat(18))).unwrap();
        fs::write(self.host.path().join("proc/stat"), "btime 10\n").unwrap();
        symlink("/dev/vfio/30", process.join("fd/9")).unwrap();
    }
}

#[test]
fn domain_lifecycle_from_undefined_to_running() {
    let life = life(Fixture::hgx_h100());
    let service = &life.service;
    assert_eq!(service.status().unwrap().state, State::Undefined);
    for error in [service.start().unwrap_err(), service.destroy().unwrap_err()] {
        assert!(error.to_string().contains("is not defined at qemu:///system"), "{error}");
    }
    life.define();
    life.define();
    let status = service.status().unwrap();
    assert_eq!((status.state, status.cid, status.devices.len()), (State::Off, Some(100), 5));
    assert!(status.problems.is_empty(), "{:?}", status.problems);
    assert_eq!(service.start().unwrap(), Change::Applied);
    assert_eq!(service.start().unwrap(), Change::AlreadyDone);
    fs::write(life.host.path().join("paused"), "").unwrap();
    let error = service.start().unwrap_err().to_string();
    assert!(error.contains("is paused (user): virsh resume"), "{error}");
    assert_eq!(service.status().unwrap().state, State::Other);
    fs::remove_file(life.host.path().join("paused")).unwrap();
    life.hold(77, "firstlight-service-vm");
    for address in ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0", "0000:03:00.1"] {
        life.host.bind(address, Some("vfio-pci"));
    }
    let status = service.status().unwrap();
    assert_eq!((status.state, status.started_at, status.pid), (State::Running, Some(12), Some(77)));
    assert!(status.problems.is_empty(), "its own QEMU is no problem: {:?}", status.problems);
    assert_eq!(status.devices[1].driver.as_deref(), Some("vfio-pci"));
    life.host.bind("0000:06:00.0", Some("nvidia"));
    let taken = service.status().unwrap().problems;
    assert!(taken.len() == 1 && taken[0].message.contains("NVSwitch 0000:06:00.0 has driver nvidia"), "{taken:?}");
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["state"], "running");
    assert_eq!(json["devices"][1]["address"], "0000:05:00.0");
}

#[test]
fn destroy_waits_until_functions_are_released() {
    let life = life(Fixture::hgx_h100());
    life.define();
    assert_eq!(life.service.destroy().unwrap(), Change::AlreadyDone, "off is as it should be");
    life.service.start().unwrap();
    life.host.bind("0000:05:00.0", Some("vfio-pci"));
    life.hold(77, "x");
    let process = life.host.path().join("proc/77");
    std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            fs::remove_dir_all(&process).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            life.host.bind("0000:05:00.0", None);
        });
        assert_eq!(life.service.destroy().unwrap(), Change::Applied);
        assert!(late.is_finished() || life.host.dir("0000:05:00.0").join("driver").symlink_metadata().is_err());
    });
}

#[test]
fn host_problems_are_reported_before_libvirt_is_called() {
    let life = life(Fixture::hgx_h100());
    life.define();
    life.hold(78, "tenant-7");
    life.assert_cannot_start(&["group 30 is in use by tenant-7 (process 78)", "stop that one first"]);
    fs::remove_dir_all(life.host.path().join("proc/78")).unwrap();

    fs::remove_file(life.host.path().join("initrd")).unwrap();
    fs::remove_file(life.host.path().join("dev/vhost-vsock")).unwrap();
    life.assert_cannot_start(&[
        "initrd does not exist",
        "--image",
        "vhost-vsock does not exist",
        "modprobe vhost_vsock",
    ]);
    fs::write(life.host.path().join("initrd"), "").unwrap();
    fs::write(life.host.path().join("dev/vhost-vsock"), "").unwrap();

    life.host.plug("0000:09:00.0", GPU, Some(30), None);
    life.assert_cannot_start(&["group 30 also has GPU 0000:09:00.0"]);
    fs::remove_dir_all(life.host.dir("0000:09:00.0")).unwrap();

    fs::remove_dir_all(life.host.dir("0000:07:00.0")).unwrap();
    life.assert_cannot_start(&["0000:07:00.0, which the domain has, is not on this host's PCI bus", "define"]);
}

#[test]
fn missing_huge_pages_prevent_a_start() {
    let mut life = life(Fixture::dgx_h100());
    life.domain.huge_pages = true;
    life.define();
    let meminfo = life.host.path().join("proc/meminfo");
    fs::write(&meminfo, "HugePages_Free:     2000\nHugepagesize:       2048 kB\n").unwrap();
    life.assert_cannot_start(&["2000 huge pages of 2048 KiB are free, and 2048 are needed", "vm.nr_hugepages=2048"]);
    fs::write(&meminfo, "HugePages_Free:     2048\nHugepagesize:       2048 kB\n").unwrap();
    assert_eq!(life.service.start().unwrap(), Change::Applied);
}

#[test]
fn foreign_domain_of_the_same_name_is_left_unchanged() {
    let life = life(Fixture::hgx_h100());
    let xml = life.domain.xml().unwrap().replace(&life.service.name.uuid(), "11111111-2222-3333-4444-555555555555");
    fs::write(life.host.path().join("xml"), &xml).unwrap();
    fs::write(life.host.path().join("runs"), "").unwrap();
    for error in [
        life.service.define(&life.domain.xml().unwrap()).unwrap_err(),
        life.service.start().unwrap_err(),
        life.service.destroy().unwrap_err(),
        life.service.status().unwrap_err(),
    ] {
        assert!(error.to_string().contains("was not created by firstlight"), "{error}");
    }
    assert!(life.host.path().join("runs").exists());
}
