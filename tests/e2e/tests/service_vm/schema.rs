//! Validates the golden domains against libvirt's schema.

use std::fs;
use std::path::Path;
use std::process::Command;

use firstlight_lab::binaries::workspace;

use crate::site::packages;

/// Runs libvirt's validation; returns its errors.
fn valid(file: &Path) -> Result<(), String> {
    let output = Command::new("virt-xml-validate").arg(file).arg("domain").output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn domains_of_all_boards_match_libvirts_schema() {
    packages();
    let golden = workspace().join("host-shim-glue/service-vm/tests/hosts/golden");
    let files: Vec<_> = fs::read_dir(&golden).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 5, "{files:?}");
    for file in &files {
        assert_eq!(valid(file), Ok(()), "{}", file.display());
    }
    // The validator rejects an invalid domain.
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.xml");
    let text = fs::read_to_string(golden.join("hgx-h100.xml")).unwrap();
    for (from, to) in [("<vcpu>2</vcpu>", "<vcpu>two</vcpu>"), ("managed='yes'", "managed='perhaps'"), ("0x05", "5x05")]
    {
        fs::write(&wrong, text.replace(from, to)).unwrap();
        assert!(valid(&wrong).is_err(), "{to}");
    }
}
