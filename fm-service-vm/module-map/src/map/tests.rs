use super::*;
use crate::{Damage, MAX_FILE, ObservedGpu, SCHEMA, Saved, Verification};
use proptest::prelude::*;

/// PCI addresses and module ids of a server with H100: the orders are unrelated.
const H100: &[(&str, u32)] = &[
    ("0000:0f:00.0", 5),
    ("0000:10:00.0", 7),
    ("0000:41:00.0", 6),
    ("0000:44:00.0", 8),
    ("0000:86:00.0", 1),
    ("0000:87:00.0", 3),
    ("0000:b8:00.0", 2),
    ("0000:bb:00.0", 4),
];

fn claim(module: u32, pci: &str) -> Claim {
    Claim { module, pci: pci.parse().unwrap(), uuid: None, serial: None }
}

fn with_uuid(module: u32, pci: &str, uuid: &str) -> Claim {
    Claim { uuid: Some(uuid.to_owned()), ..claim(module, pci) }
}

fn all() -> Vec<Claim> {
    H100.iter().map(|(pci, module)| claim(*module, pci)).collect()
}

fn nvml(recorded_at: u64) -> Evidence {
    Evidence::Nvml { recorded_at, origin: "x".to_owned() }
}

fn gpus(ids: &[u32]) -> Gpus {
    Gpus::of(ids.iter().copied()).unwrap()
}

fn eight() -> Gpus {
    gpus(&[1, 2, 3, 4, 5, 6, 7, 8])
}

fn merge(before: Option<&ModuleMap>, claims: &[Claim], evidence: &Evidence) -> Result<Merged, MapError> {
    ModuleMap::merged(before, "S1", claims, evidence, false)
}

#[test]
fn operator_statement_is_verified_entry_by_entry() {
    let stated = merge(None, &all(), &Evidence::Operator).unwrap();
    assert_eq!((stated.changed, stated.map.measured()), (eight(), Gpus::NONE));
    let verification = |map: &ModuleMap, quarantined| Verification::of(Some(map), None, eight(), quarantined, &[]);
    assert_eq!(
        verification(&stated.map, Gpus::NONE),
        Verification::Unverified { missing: Gpus::NONE, stated: eight() }
    );
    let both = Verification::Unverified { missing: gpus(&[3]), stated: gpus(&[1, 2]) };
    assert_eq!(both.reason(), "the module map has no entry for GPUs 3, and has only operator statements for GPUs 1,2");
    let mut map = stated.map;
    for (at, claim) in all().iter().enumerate() {
        assert!(!verification(&map, Gpus::NONE).is_verified());
        let probe = Evidence::Probe { recorded_at: 5, partition: 7 };
        let merged = merge(Some(&map), std::slice::from_ref(claim), &probe).unwrap();
        assert_eq!(merged.changed, gpus(&[claim.module]));
        map = merged.map;
        let left: Gpus = all()[at + 1..].iter().fold(Gpus::NONE, |left, one| left.with(gpus(&[one.module])));
        // A quarantined GPU needs no entry.
        assert!(verification(&map, left).is_verified());
    }
    assert!(verification(&map, Gpus::NONE).is_verified());
    // A repeated statement keeps the measurements.
    let again = merge(Some(&map), &all(), &Evidence::Operator).unwrap();
    assert_eq!((&again.map, again.changed), (&map, Gpus::NONE));
    let later = merge(Some(&map), &all(), &Evidence::Probe { recorded_at: 6, partition: 7 }).unwrap();
    assert_eq!((later.map == map, later.changed), (false, Gpus::NONE), "a newer measurement changes nothing");
}

#[test]
fn contradictions_are_refused_without_replace() {
    let map = merge(None, &all(), &nvml(1)).unwrap().map;
    let wrong = [claim(5, "0000:10:00.0"), claim(7, "0000:0f:00.0")];
    let error = merge(Some(&map), &wrong, &Evidence::Operator).unwrap_err();
    let MapError::Contradicts(found) = &error else { panic!("{error}") };
    assert_eq!(found.len(), 4);
    let text = error.to_string();
    assert!(text.contains("the map has module 5 at 0000:0f:00.0 (nvml (x)), not at 0000:10:00.0"), "{text}");
    assert!(text.contains("nothing was changed") && text.contains("--replace"), "{text}");
    let merged = ModuleMap::merged(Some(&map), "S1", &wrong, &Evidence::Operator, true).unwrap();
    assert_eq!((merged.changed, merged.removed), (gpus(&[5, 7]), Gpus::NONE));
    assert_eq!(merged.map.measured(), eight().without(gpus(&[5, 7])), "their measurements are gone");
    // A GPU takes another's address: the other one loses its entry.
    let moved = [claim(5, "0000:10:00.0")];
    let merged = ModuleMap::merged(Some(&map), "S1", &moved, &nvml(2), true).unwrap();
    assert_eq!((merged.changed, merged.removed), (gpus(&[5]), gpus(&[7])));
    let verification = Verification::of(Some(&merged.map), None, eight(), Gpus::NONE, &[]);
    assert_eq!(verification, Verification::Unverified { missing: gpus(&[7]), stated: Gpus::NONE });
}

#[test]
fn another_gpu_or_baseboard_invalidates_the_map() {
    let first = [with_uuid(1, "0000:86:00.0", "GPU-a"), with_uuid(2, "0000:b8:00.0", "GPU-b")];
    let map = merge(None, &first, &nvml(1)).unwrap().map;
    let listed = gpus(&[1, 2]);
    let seen = |uuid: &str| [ObservedGpu { module: 1, uuid: uuid.to_owned() }];
    let verification = |uuid, is| Verification::of(Some(&map), is, listed, Gpus::NONE, &seen(uuid));
    assert!(verification("", None).is_verified() && verification("GPU-a", Some("S1")).is_verified());
    assert!(
        verification("GPU-c", None).reason().contains("GPU GPU-a at module 1"),
        "{:?}",
        verification("GPU-c", None)
    );
    let other = verification("", Some("S2"));
    assert!(other.reason().contains("is of baseboard S1, and this is S2") && !other.is_verified());
    assert!(other.remedy(Some("S2")).contains("--baseboard-serial S2 --replace"));
    let swapped = [with_uuid(1, "0000:86:00.0", "GPU-c")];
    let error = merge(Some(&map), &swapped, &nvml(2)).unwrap_err().to_string();
    assert!(error.contains("module 1 had the GPU with uuid GPU-a, and has GPU-c now"), "{error}");
    let merged = ModuleMap::merged(Some(&map), "S1", &swapped, &nvml(2), true).unwrap().map;
    assert_eq!(merged.entries[&1].uuid.as_deref(), Some("GPU-c"));
    let moved = [with_uuid(3, "0000:87:00.0", "GPU-a")];
    let error = merge(Some(&map), &moved, &nvml(2)).unwrap_err().to_string();
    assert!(error.contains("GPU GPU-a as module 1, not as 3"), "{error}");
    let merged = ModuleMap::merged(Some(&map), "S1", &moved, &nvml(2), true).unwrap();
    assert_eq!((merged.removed, merged.changed), (gpus(&[1]), gpus(&[3])));
    let error = ModuleMap::merged(Some(&map), "S2", &first, &nvml(2), false).unwrap_err().to_string();
    assert!(error.contains("the map is of baseboard S1, not of S2"), "{error}");
    let merged = ModuleMap::merged(Some(&map), "S2", &first[..1], &Evidence::Operator, true).unwrap();
    assert_eq!((merged.map.modules(), merged.map.measured()), (gpus(&[1]), Gpus::NONE), "the old map is replaced");
    assert_eq!((merged.changed, merged.removed), (gpus(&[1]), gpus(&[2])));
}

#[test]
fn invalid_claims_are_refused() {
    let both =
        |first: Claim, second: Claim| Claim::check(&[first, second], eight(), Gpus::NONE).unwrap_err().to_string();
    assert!(both(claim(1, "0000:01:00.0"), claim(1, "0000:02:00.0")).contains("module 1 appears twice"));
    assert!(both(claim(1, "0000:01:00.0"), claim(2, "0000:01:00.0")).contains("0000:01:00.0 appears twice"));
    assert!(both(with_uuid(1, "0000:01:00.0", "u"), with_uuid(2, "0000:02:00.0", "u")).contains("GPU u appears twice"));
    assert!(both(claim(1, "0000:01:00.0"), claim(9, "0000:02:00.0")).contains("lists no module 9; it lists 1,2,3"));
    assert_eq!(Claim::check(&all()[1..], eight(), eight()), Err(ClaimError::Missing { missing: gpus(&[5]) }));
    assert_eq!(Claim::check(&all(), eight(), eight()), Ok(()));
    assert_eq!(Claim::check(&[], eight(), Gpus::NONE), Err(ClaimError::Empty));
    assert!(matches!(ModuleMap::merged(None, "a b", &all(), &nvml(1), false), Err(MapError::Serial(_))));
}

#[test]
fn saved_map_round_trips_and_damage_is_reported() {
    let map = merge(None, &[with_uuid(1, "0000:86:00.0", "GPU-a")], &nvml(1)).unwrap().map;
    let mut saved = Saved::default();
    saved.map = Some(map);
    for number in 0..70 {
        saved.remember(format!("r{number}"), format!("a{number}"));
    }
    let bytes = saved.written().unwrap();
    assert_eq!(Saved::read(&bytes), Ok(saved.clone()));
    assert_eq!((saved.summary("r69"), saved.summary("r5")), (Some("a69"), None));
    let text = String::from_utf8(bytes.clone()).unwrap();
    for (from, to, said) in [
        ("map/1", "map/2", "schema: \"firstlight.module-map/2\" is not firstlight.module-map/1"),
        ("0000:86:00.0", "86:00.0", "at byte "),
        ("\"1\":", "\"64\":", "map.entries: invalid module id 64"),
        ("\"S1\"", "\"\"", "map.baseboard"),
        ("GPU-a", "GPU a", "map.entries: invalid uuid \"GPU a\" of module 1"),
    ] {
        let error = Saved::read(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
    for cut in 0..bytes.len() - 1 {
        assert!(Saved::read(&bytes[..cut]).is_err(), "{cut}");
    }
    let Err(Damage::At { byte, .. }) = Saved::read(&bytes[..40]) else { panic!("it is cut") };
    assert_eq!(byte, 40);
    assert_eq!(Saved::read(&vec![b' '; MAX_FILE + 1]), Err(Damage::TooLong));
    assert!(text.contains(SCHEMA));
}

fn claims() -> impl Strategy<Value = Vec<Claim>> {
    let uuid = prop::option::of((0_u32..6).prop_map(|number| format!("GPU-{number}")));
    let one = (1_u32..7, 1_u8..7, uuid).prop_map(|(module, bus, uuid)| {
        let pci = Address { domain: 0, bus, device: 0, function: 0 };
        Claim { module, pci, uuid, serial: None }
    });
    prop::collection::vec(one, 0..5)
}

fn evidence() -> impl Strategy<Value = Evidence> {
    prop_oneof![
        Just(Evidence::Operator),
        (0_u64..9).prop_map(nvml),
        (0_u64..9).prop_map(|recorded_at| Evidence::Probe { recorded_at, partition: 7 })
    ]
}

proptest! {
    /// In any sequence of claims: the map can be saved and read, entries are lost only with `replace`, and only
    /// measured modules count as measured.
    #[test]
    fn no_sequence_of_claims_makes_an_invalid_map(
        steps in prop::collection::vec((claims(), evidence(), any::<bool>(), 0_u8..8), 1..12)
    ) {
        let mut map: Option<ModuleMap> = None;
        for (claims, evidence, replace, board) in steps {
            let serial = if board == 0 { "S2" } else { "S1" };
            let before = map.clone();
            let Ok(merged) = ModuleMap::merged(before.as_ref(), serial, &claims, &evidence, replace) else { continue };
            let now = &merged.map;
            for claim in &claims {
                prop_assert_eq!(now.at(claim.pci), Some(claim.module));
                prop_assert!(claim.uuid.is_none() || now.entries[&claim.module].uuid == claim.uuid);
            }
            if let Some(before) = before.as_ref().filter(|_| !replace) {
                prop_assert!(now.modules().has(before.modules()) && now.measured().has(before.measured()));
                prop_assert!(before.entries.iter().all(|(module, entry)| now.entries[module].pci == entry.pci));
                prop_assert!(merged.replaced.is_empty() && merged.removed.is_empty());
            }
            let said = Gpus::of(claims.iter().map(|claim| claim.module)).unwrap();
            let was = before.as_ref().map(ModuleMap::measured).unwrap_or_default();
            let newly = if evidence.is_measurement() { said } else { Gpus::NONE };
            prop_assert!(was.with(newly).has(now.measured()));
            let again = ModuleMap::merged(Some(now), serial, &claims, &evidence, false).unwrap();
            prop_assert_eq!((&again.map, again.changed), (now, Gpus::NONE));
            let mut saved = Saved::default();
            saved.map = Some(now.clone());
            prop_assert_eq!(Saved::read(&saved.written().unwrap()), Ok(saved));
            map = Some(merged.map);
        }
    }

    /// Any file is parsed or refused, with a one-line error.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for error in [
            crate::table(&bytes).err().map(|error| error.to_string()),
            crate::measurements(&bytes).err().map(|error| error.to_string()),
            Saved::read(&bytes).err().map(|error| error.to_string()),
        ].into_iter().flatten() {
            prop_assert!(!error.contains('\n'), "{}", error);
        }
    }
}
