use super::*;
use crate::engine::tests::{Fixture, Shared, fixture};
use firstlight_partitions::known::H100;
use firstlight_pci::Address;
use proptest::prelude::*;
use std::path::PathBuf;

/// Module ids in the order of PCI addresses, on a server with H100.
const MODULES: [(&str, u32); 8] = [
    ("0000:0f:00.0", 5),
    ("0000:10:00.0", 7),
    ("0000:41:00.0", 6),
    ("0000:44:00.0", 8),
    ("0000:86:00.0", 1),
    ("0000:87:00.0", 3),
    ("0000:b8:00.0", 2),
    ("0000:bb:00.0", 4),
];

fn pci(text: &str) -> Address {
    text.parse().unwrap()
}

fn claims(of: &[u32]) -> Vec<Claim> {
    let rows = MODULES.iter().filter(|(_, module)| of.contains(module));
    rows.map(|(place, module)| Claim { module: *module, pci: pci(place), uuid: None, serial: None }).collect()
}

const ALL: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn update(of: &[u32], evidence: Evidence) -> ModuleMapUpdate {
    ModuleMapUpdate { serial: "S1".to_owned(), claims: claims(of), evidence, replace: false }
}

fn nvml() -> Evidence {
    Evidence::Nvml { recorded_at: 0, origin: "guest\n".to_owned() }
}

fn path(fixture: &Fixture) -> PathBuf {
    fixture.dir.path().join("module-map.json")
}

fn with(fixture: Fixture, make: impl FnOnce(ModuleMapStore) -> ModuleMapStore) -> Fixture {
    let modules = make(ModuleMapStore::open(&path(&fixture)));
    let Fixture { dir, sim, engine } = fixture;
    let engine = engine.with(modules);
    Fixture { dir, sim, engine }
}

fn strict() -> Fixture {
    with(fixture(&H100), |modules| modules)
}

fn refusal(engine: &mut Engine<Shared>, request: &str, selector: PartitionSelector) -> String {
    let planned = engine.plan(selector.clone()).unwrap_err().to_string();
    let refused = engine.activate(request, selector, "t").unwrap_err().to_string();
    assert_eq!(planned, refused);
    refused
}

#[test]
fn several_gpus_are_given_by_a_verified_map_only() {
    let mut fixture = strict();
    let engine = &mut fixture.engine;
    let refused = refusal(engine, "r1", PartitionSelector::Count(2));
    assert_eq!(
        refused,
        "refused to give partition 3 of GPUs 1,3 while the module map is not verified: there is no module map; run fmctl \
         inventory nvml FILE --baseboard-serial SERIAL with what an inventory guest has measured, or fmctl inventory probe --pci PCI,.. \
         --baseboard-serial SERIAL --check COMMAND; --unverified-map overrides this for one request"
    );
    assert!(
        refusal(engine, "r1", PartitionSelector::Partition(0))
            .contains("refused to give partition 0 of GPUs 1,2,3,4,5,6,7,8 while")
    );
    // Single GPUs are needed for a probe.
    assert_eq!(engine.activate("r2", PartitionSelector::Count(1), "t").unwrap().partition, 7);
    assert!(engine.deactivate("r3", 7, "t").unwrap());
    let places = PartitionSelector::Pci(vec![pci("0000:86:00.0")]);
    assert!(refusal(engine, "r4", places.clone()).contains("the module map has no GPU at 0000:86:00.0; it has none"));
    let result = engine.set_map("m1", update(&ALL, Evidence::Operator)).unwrap();
    assert_eq!((result.changed.count(), result.verification.is_verified()), (8, false));
    let refused = refusal(engine, "r5", PartitionSelector::Count(2));
    assert!(refused.contains("has only operator statements for GPUs 1,2,3,4,5,6,7,8; run"), "{refused}");
    assert!(refused.contains("--baseboard-serial S1 with"), "{refused}");
    assert!(refusal(engine, "r6", places.clone()).contains("refused to give partition 7 of GPUs 1 while"));
    // The override is valid for one request.
    let partition_request = PartitionRequest {
        selector: PartitionSelector::Pci(vec![pci("0000:86:00.0"), pci("0000:87:00.0")]),
        unverified_map: true,
    };
    let given = engine.activate("r7", partition_request.clone(), "t").unwrap();
    assert_eq!((given.partition, given.gpus.to_string().as_str()), (3, "1,3"));
    assert!(
        engine.activate("r7", partition_request.selector.clone(), "t").unwrap().already_done,
        "the same request is answered the same"
    );
    assert!(engine.activate("r8", PartitionSelector::Count(2), "u").is_err());
    // Measurements may be partial.
    assert!(!engine.set_map("m2", update(&[1, 2, 3, 4, 5, 6, 7], nvml())).unwrap().verification.is_verified());
    assert!(refusal(engine, "r9", PartitionSelector::Count(4)).contains("only operator statements for GPUs 8; run"));
    let probe = Evidence::Probe { recorded_at: 0, partition: 14 };
    let result = engine.set_map("m3", update(&[8], probe)).unwrap();
    assert!(result.verification.is_verified(), "{result:?}");
    assert_eq!(engine.activate("r10", PartitionSelector::Count(4), "u").unwrap().partition, 2);
    let map = ModuleMapStore::open(&path(&fixture)).known().map.clone().unwrap();
    let engine = &mut fixture.engine;
    assert_eq!(engine.module_map().known().map, Some(map.clone()), "as on the disk");
    assert!(
        matches!(&map.entries[&1].evidence, Evidence::Nvml { origin, recorded_at } if origin == "guest" && *recorded_at > 0)
    );
    assert!(engine.forget_map("m4").unwrap() && engine.forget_map("m4").unwrap());
    assert!(!engine.forget_map("m5").unwrap());
    assert!(engine.activate("r11", PartitionSelector::Gpus(Gpus::of([2, 4]).unwrap()), "v").is_err());
    assert_eq!(fixture.active().len(), 2, "existing assignments stay");
}

#[test]
fn invalid_map_updates_are_refused_and_change_nothing() {
    let mut fixture = strict();
    let engine = &mut fixture.engine;
    engine.set_map("m1", update(&ALL, nvml())).unwrap();
    let before = engine.module_map().known().clone();
    let place = |module, place| Claim { module, pci: pci(place), uuid: None, serial: None };
    let of = |claims, evidence| ModuleMapUpdate { claims, ..update(&[], evidence) };
    let probe = |partition| Evidence::Probe { recorded_at: 0, partition };
    for (wrong, text) in [
        (of(vec![place(9, "0000:c0:00.0")], nvml()), "the fabric manager lists no module 9"),
        (of(claims(&[1, 2]), Evidence::Operator), "no entry for module 3,4,5,6,7,8"),
        (
            of(vec![place(1, "0000:87:00.0")], nvml()),
            "the map has module 1 at 0000:86:00.0 (nvml (guest)), not at 0000:87:00.0",
        ),
        (ModuleMapUpdate { serial: "S2".to_owned(), ..update(&ALL, nvml()) }, "the map is of baseboard S1, not of S2"),
        (of(claims(&[1]), probe(8)), "partition 8 has GPUs 2"),
        (of(claims(&[1, 3]), probe(3)), "has to name one GPU"),
        (of(claims(&[1]), probe(77)), "there is no partition 77"),
    ] {
        let error = engine.set_map("m2", wrong).unwrap_err().to_string();
        assert!(error.contains(text), "{text} in {error}");
        assert_eq!(*engine.module_map().known(), before);
    }
    let error = engine.set_map("m1", update(&[1], nvml())).unwrap_err().to_string();
    assert!(error.contains("request id m1 was used before, to set 8 GPUs of S1 by nvml"), "{error}");
    assert!(engine.set_map("m1", update(&ALL, nvml())).unwrap().already_done);
    // A quarantined GPU needs no entry.
    engine.forget_map("f").unwrap();
    engine.quarantine(8, "dead").unwrap();
    assert!(engine.set_map("m3", update(&ALL[..7], nvml())).unwrap().verification.is_verified());
    assert_eq!(engine.activate("r1", PartitionSelector::Count(4), "t").unwrap().partition, 1);
    assert!(engine.release(8).unwrap());
    assert!(
        engine
            .activate("r2", PartitionSelector::Count(2), "t")
            .unwrap_err()
            .to_string()
            .contains("has no entry for GPUs 8")
    );
}

#[test]
fn map_of_another_baseboard_and_unreadable_map_are_ignored() {
    let mut fixture = strict();
    fixture.engine.set_map("m1", update(&ALL, nvml())).unwrap();
    fixture.engine.plan(PartitionSelector::Count(8)).unwrap();
    let mut fixture = with(fixture, |modules| modules.with_serial(Some("S2".to_owned())));
    let refused = refusal(&mut fixture.engine, "r1", PartitionSelector::Count(8));
    assert!(
        refused.contains(
            "is of baseboard S1, and this is S2; run fmctl inventory nvml FILE --baseboard-serial S2 --replace"
        ),
        "{refused}"
    );
    let error = fixture.engine.set_map("m2", update(&ALL, nvml())).unwrap_err().to_string();
    assert!(error.contains("for baseboard S1, and the daemon runs on S2"), "{error}");
    let other = ModuleMapUpdate { serial: "S2".to_owned(), replace: true, ..update(&ALL, nvml()) };
    let result = fixture.engine.set_map("m3", other).unwrap();
    assert!(
        result.verification.is_verified() && result.replaced == ["the map is of baseboard S1, not of S2"],
        "{result:?}"
    );
    std::fs::write(path(&fixture), "{").unwrap();
    let mut fixture = with(fixture, |modules| modules);
    let refused = refusal(&mut fixture.engine, "r2", PartitionSelector::Count(8));
    assert!(refused.contains("module-map.json cannot be read as a module map: at byte 1"), "{refused}");
    let mut fixture = with(fixture, |modules| modules.allow_unverified(true));
    assert_eq!(fixture.engine.plan(PartitionSelector::Count(8)).unwrap().partition.id, 0, "the override applies");
}

#[derive(Debug, Clone)]
enum Act {
    Measure(Vec<u32>),
    State,
    Forget,
    PartitionSelector(u32),
    Bar(u32),
    Release(u32),
    Restart,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => prop::collection::vec(1_u32..9, 1..9).prop_map(Act::Measure),
        1 => Just(Act::State),
        1 => Just(Act::Forget),
        4 => prop::sample::select(vec![1_u32, 2, 4, 8]).prop_map(Act::PartitionSelector),
        1 => (1_u32..9).prop_map(Act::Bar),
        1 => (1_u32..9).prop_map(Act::Release),
        1 => Just(Act::Restart),
    ];
    prop::collection::vec(act, 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// In any sequence of events: several GPUs are given only when all GPUs outside quarantine were measured.
    #[test]
    fn no_sequence_of_events_gives_several_gpus_by_an_unverified_map(acts in acts()) {
        let mut fixture = strict();
        let (mut measured, mut quarantined) = (Gpus::NONE, Gpus::NONE);
        for (at, act) in acts.into_iter().enumerate() {
            let request = format!("r{at}");
            match act {
                Act::Measure(of) => {
                    fixture.engine.set_map(&request, update(&of, nvml())).unwrap();
                    measured = measured.with(Gpus::of(of).unwrap());
                }
                Act::State => drop(fixture.engine.set_map(&request, update(&ALL, Evidence::Operator)).unwrap()),
                Act::Forget => {
                    fixture.engine.forget_map(&request).unwrap();
                    measured = Gpus::NONE;
                }
                Act::Bar(gpu) => {
                    fixture.engine.quarantine(gpu, "x").unwrap();
                    quarantined = quarantined.with(Gpus::one(gpu).unwrap());
                }
                Act::Release(gpu) => {
                    fixture.engine.release(gpu).unwrap();
                    quarantined = quarantined.without(Gpus::one(gpu).unwrap());
                }
                Act::Restart => fixture = with(fixture, |modules| modules),
                Act::PartitionSelector(size) => {
                    let planned = fixture.engine.plan(PartitionSelector::Count(size));
                    let is_verified = measured.with(quarantined).has(Gpus::of(ALL).unwrap());
                    match planned {
                        Ok(choice) => prop_assert!(choice.partition.gpus.count() == 1 || is_verified),
                        Err(EngineError::UnverifiedMap { .. }) => prop_assert!(!is_verified && size > 1),
                        Err(_) => prop_assert!(!quarantined.is_empty()),
                    }
                }
            }
        }
    }
}
