//! The domains that the crate's own tests hold fast are what libvirt calls a domain.

use std::fs;
use std::path::Path;
use std::process::Command;

use firstlight_lab::binaries::workspace;

use crate::site::packages;

/// Whether libvirt's schema has it, and what is wrong if not.
fn valid(file: &Path) -> Result<(), String> {
    let output = Command::new("virt-xml-validate").arg(file).arg("domain").output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn every_boards_domain_fits_libvirts_schema() {
    packages();
    let golden = workspace().join("host-shim-glue/service-vm/tests/hosts/golden");
    let files: Vec<_> = fs::read_dir(&golden).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 5, "{files:?}");
    for file in &files {
        assert_eq!(valid(file), Ok(()), "{}", file.display());
    }
    // Who validates is no yes-man.
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.xml");
    let text = fs::read_to_string(golden.join("hgx-h100.xml")).unwrap();
    for (from, to) in [("<vcpu>2</vcpu>", "<vcpu>two</vcpu>"), ("managed='yes'", "managed='perhaps'"), ("0x05", "5x05")]
    {
        fs::write(&wrong, text.replace(from, to)).unwrap();
        assert!(valid(&wrong).is_err(), "{to}");
    }
}
