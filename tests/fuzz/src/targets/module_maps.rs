//! The module map: an operator's table, an inventory guest's measurements, and the daemon's file.

use std::collections::BTreeMap;

use firstlight_module_map::{Claim, Evidence, ModuleMap, Saved, Verification, measurements, placed, table};
use firstlight_partitions::Gpus;

pub(super) const SEEDS: &[&[u8]] = &[
    b"# DGX\n[baseboard_modules]\n1 = \"0000:86:00.0\"\n3 = { pci = \"0000:87:00.0\", uuid = \"GPU-a\", serial = \"165\" }\n",
    br#"{"baseboard_modules": {"1": "0000:86:00.0", "3": {"pci": "0000:87:00.0", "serial": "165"}}}"#,
    br#"{"host_pci": "0000:0f:00.0", "module_id": 5, "uuid": "GPU-a", "serial": "165"} {"host_pci": "00000000:10:00.0", "module_id": 7}"#,
    br#"[{"guest_pci": "0000:01:00.0", "module_id": 5}]"#,
    br#"{"schema":"firstlight.module-map/1","map":{"baseboard":"S1","entries":{"1":{"pci":"0000:86:00.0","evidence":"operator"},
"3":{"pci":"0000:87:00.0","uuid":"GPU-a","evidence":{"nvml":{"recorded_at":1,"origin":"x"}}},"5":{"pci":"0000:0f:00.0","serial":"165",
"evidence":{"probe":{"recorded_at":1,"partition":11}}}}},"requests":[{"request":"r","summary":"a"}]}"#,
];

/// Claims that parse merge into a map, and a map survives a write and a read.
pub(super) fn read(bytes: &[u8]) {
    let operator = table(bytes).unwrap_or_default();
    let measured = measurements(bytes).ok().and_then(|all| placed(&all, &BTreeMap::new()).ok()).unwrap_or_default();
    for (claims, evidence) in
        [(operator, Evidence::Operator), (measured, Evidence::Nvml { recorded_at: 1, origin: String::new() })]
    {
        if !claims.is_empty() {
            check_merge(None, &claims, &evidence);
        }
    }
    if let Ok(saved) = Saved::read(bytes) {
        check_round_trip(&saved);
        if let Some(map) = &saved.map {
            let claim = |(module, entry): (&u32, &firstlight_module_map::Entry)| {
                let (uuid, serial) = (entry.uuid.clone(), entry.serial.clone());
                Claim { module: *module, pci: entry.pci, uuid, serial }
            };
            let claims: Vec<Claim> = map.entries.iter().map(claim).collect();
            if !claims.is_empty() {
                check_merge(Some(map), &claims, &Evidence::Operator);
            }
        }
    }
}

fn check_merge(before: Option<&ModuleMap>, claims: &[Claim], evidence: &Evidence) {
    let serial = before.map_or("S1", |map| map.baseboard.as_str());
    let merged = ModuleMap::merged(before, serial, claims, evidence, false);
    let merged = merged.unwrap_or_else(|error| unreachable!("{error}"));
    let (map, modules) = (merged.map, Gpus::of(claims.iter().map(|claim| claim.module)).unwrap_or_default());
    assert_eq!(map.modules(), modules);
    let verification = Verification::of(Some(&map), None, modules, Gpus::NONE, &[]);
    assert_eq!(verification.is_verified(), map.measured() == modules);
    let mut saved = Saved::default();
    saved.map = Some(map);
    check_round_trip(&saved);
}

fn check_round_trip(saved: &Saved) {
    // The canonical form may be longer than the input, and longer than a reader accepts.
    let Ok(bytes) = saved.written() else { return };
    if bytes.len() <= firstlight_module_map::MAX_FILE {
        assert_eq!(Saved::read(&bytes).as_ref(), Ok(saved));
    }
}
