//! The lifecycle of the domain.

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_boot_record::{BootRecord, State};
use firstlight_e2e::lab;
use firstlight_image_builder::image::Image;

use serde_json::Value;
use tokio::time::timeout;

use crate::site::{Site, TIMEOUT, until};

fn dir(image: &Image) -> PathBuf {
    image.record.parent().unwrap().to_owned()
}

/// Waits until PID 1 has reported the result of the boot.
#[track_caller]
fn booted(site: &Site) -> BootRecord {
    until("PID 1 reports the result of the boot", TIMEOUT, || {
        site.record().is_some_and(|record| record.state != State::Booting)
    });
    site.record().unwrap()
}

fn status(site: &Site) -> (Option<i32>, Value) {
    let said = site.firstlight("status", &["--json"]);
    (said.code, serde_json::from_str(&said.out).unwrap_or_default())
}

#[test]
fn service_vm_lifecycle_with_four_switches() {
    let site = Site::new();
    let image = lab().variant("daemons").unwrap();

    // The domain is undefined.
    let (code, json) = status(&site);
    assert_eq!((code, &json["state"]), (Some(3), &"undefined".into()));
    for command in ["start", "destroy"] {
        let said = site.firstlight(command, &[]);
        assert!(said.code == Some(1) && said.err.contains("domain fabric is not defined at"), "{said:?}");
    }

    // Defining twice is idempotent.
    let state = site.file("state.img");
    let said = site.define(&dir(&image), &[]);
    assert!(said.code == Some(0) && said.err.contains("state.img: created, 64 MiB"), "{said:?}");
    let before = (site.virsh(&["dumpxml", "fabric"]).out, fs::metadata(&state).unwrap().modified().unwrap());
    let said = site.define(&dir(&image), &[]);
    assert!(said.code == Some(0) && !said.err.contains("created"), "{said:?}");
    let after = (site.virsh(&["dumpxml", "fabric"]).out, fs::metadata(&state).unwrap().modified().unwrap());
    assert_eq!(before, after);

    let said = site.firstlight("start", &[]);
    assert!(said.code == Some(0) && said.err.contains("domain fabric is running\n"), "{said:?}");
    let said = site.firstlight("start", &[]);
    assert!(said.code == Some(0) && said.err.contains("is already running"), "{said:?}");
    let record = booted(&site);
    let mode = record.mode.as_ref().unwrap();
    assert_eq!(
        (mode.name.as_str(), mode.reason.as_str()),
        ("service-vm-nvl4", "GPUs on the PCI bus: 0, NVSwitches: 4")
    );
    let (code, json) = status(&site);
    assert_eq!((code, &json["state"]), (Some(0), &"running".into()), "{json}");
    assert!(json["started_at"].as_u64().is_some() && json["problems"].as_array().unwrap().is_empty(), "{json}");
    let said = site.firstlight("status", &[]);
    assert!(said.out.starts_with("fabric: running (booted), for "), "{said:?}");
    // The agent answers over vsock.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let vsock = site.file("vsock");
    let agent = runtime.block_on(async { timeout(TIMEOUT, firstlight_vsock::connect(&vsock, 1024, |_| ())).await });
    assert!(agent.is_ok(), "the agent listens");
    // The disk in QEMU has the serial number that the guest looks for.
    let disk = site.virsh(&["qemu-monitor-command", "fabric", "--hmp", "info qtree"]).out;
    assert!(disk.contains("serial = \"firstlight-state\""), "{disk}");

    let said = site.firstlight("destroy", &[]);
    assert!(said.code == Some(0) && said.err.contains("is off"), "{said:?}");
    let said = site.firstlight("destroy", &[]);
    assert!(said.code == Some(0) && said.err.contains("was off already"), "{said:?}");
    let (code, json) = status(&site);
    assert_eq!((code, &json["state"], &json["pid"]), (Some(3), &"off".into(), &Value::Null));

    // Missing files are reported before libvirt is called.
    fs::remove_file(&state).unwrap();
    let said = site.firstlight("start", &[]);
    assert!(said.code == Some(1) && said.err.contains("state.img does not exist"), "{said:?}");
    assert_eq!(site.virsh(&["domstate", "fabric"]).out.trim(), "shut off");
    let said = site.define(Path::new("/nowhere"), &[]);
    assert!(said.code == Some(1) && said.err.contains("failed to read /nowhere"), "{said:?}");
}

#[test]
fn domain_boots_from_a_verity_disk() {
    let site = Site::new();
    let (image, opener) = (lab().disk().unwrap(), lab().opener().unwrap());
    let opener = dir(&opener).display().to_string();
    let said = site.define(&dir(&image), &["--opener", &opener]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(site.firstlight("start", &[]).code, Some(0));
    booted(&site);
    let root_hash = &image.contents.verity.as_ref().unwrap().root_hash;
    let console = site.console();
    assert!(console.contains(&format!("root /dev/dm-0 (erofs, verified by {root_hash}) after ")), "{console}");
    assert_eq!(site.firstlight("destroy", &[]).code, Some(0));
}

#[test]
fn domain_whose_guest_powers_off_is_off() {
    let site = Site::new();
    let image = lab().variant("daemons").unwrap();
    // It has no init program.
    let said = site.define(&dir(&image), &["--append", "init=/nowhere rdinit=/nowhere root=/dev/nowhere"]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(site.firstlight("start", &[]).code, Some(0));
    until("the domain is off", TIMEOUT, || site.virsh(&["domstate", "fabric"]).out.trim() == "shut off");
    let early = fs::read_to_string(site.file("console.log.serial")).unwrap_or_default() + &site.console();
    assert!(early.contains("Kernel panic"), "{early}");
    assert_eq!(site.firstlight("destroy", &[]).code, Some(0));
}
