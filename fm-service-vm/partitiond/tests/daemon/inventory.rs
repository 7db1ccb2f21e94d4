//! The module map: refusals, operator tables, measurements, persistence and deletion.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::Source;
use tonic::Code;

use crate::block_on;
use crate::support::{Fixture, activate, quick};

/// PCI addresses and module ids of a server with H100: the orders are unrelated.
pub(crate) const SERVER: [(&str, u32); 8] = [
    ("0000:0f:00.0", 5),
    ("0000:10:00.0", 7),
    ("0000:41:00.0", 6),
    ("0000:44:00.0", 8),
    ("0000:86:00.0", 1),
    ("0000:87:00.0", 3),
    ("0000:b8:00.0", 2),
    ("0000:bb:00.0", 4),
];

impl Fixture {
    /// A fixture without --allow-unverified-map that has polled FM.
    pub(crate) fn seen(table: &str) -> Self {
        let fixture = Self::strict(&quick(table));
        block_on(async { fixture.until("the fabric was polled", |health| health.fabric_manager).await });
        fixture
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// Writes an operator's table.
    pub(crate) fn table(&self, name: &str, rows: &[(&str, u32)]) -> String {
        let rows: String = rows.iter().map(|(pci, module)| format!("{module} = \"{pci}\"\n")).collect();
        self.file(name, &format!("[baseboard_modules]\n{rows}"))
    }

    fn map(&self) -> PathBuf {
        self.dir.path().join("module-map.json")
    }
}

/// A wrong table: module ids in the order of addresses.
pub(crate) fn sorted() -> Vec<(&'static str, u32)> {
    SERVER.iter().zip(1..).map(|((pci, _), module)| (*pci, module)).collect()
}

#[test]
fn several_gpus_are_refused_until_they_were_measured() {
    let mut fixture = Fixture::seen("h100");
    let advice = "run fmctl inventory nvml FILE --baseboard-serial SERIAL with what an inventory guest has measured, or fmctl inventory \
                  probe --pci PCI,.. --baseboard-serial SERIAL --check COMMAND; --unverified-map overrides this for one request\n";
    let refused = |what: &str| {
        format!("fmctl: refused to give {what} while the module map is not verified: there is no module map; {advice}")
    };
    let (_, error, code) = fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "a"]);
    assert_eq!((error, code), (refused("partition 3 of GPUs 1,3"), 5));
    let (_, error, code) = fixture.run_fmctl(&["plan", "2"]);
    assert_eq!((error, code), (refused("partition 2 of GPUs 5,6,7,8"), 5));
    let (_, error, code) = fixture.run_fmctl(&["plan", "--pci", "0000:0f:00.0"]);
    assert!(error.contains("the module map has no GPU at 0000:0f:00.0; it has none") && code == 4, "{error}");
    let (health, _, code) = fixture.run_fmctl(&["health"]);
    assert!(health.contains("the module map is not verified, so only single GPUs are given") && code == 9);
    // Single GPUs are needed for a probe.
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "1", "--owner", "a"]).2, 0);
    assert_eq!(fixture.run_fmctl(&["deactivate", "7", "--owner", "a"]).2, 0);
    let (shown, _, code) = fixture.run_fmctl(&["inventory"]);
    let heads = "MODULE ID  PCI ADDRESS  UUID  LINKS  EVIDENCE\n---------  -----------  ----  -----  --------\n";
    assert!(shown.starts_with(&format!("{heads}1          unknown      N/A   18/18  none\n")) && code == 0, "{shown}");
    assert!(
        shown.contains("\nBaseboard: h100; serial: unknown\nNot verified: there is no module map; run "),
        "{shown}"
    );

    let all = SERVER
        .map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module},\"uuid\":\"GPU-{module}\"}}\n"));
    let (said, _, code) = fixture.run_fmctl(&[
        "inventory",
        "nvml",
        &fixture.file("seven", &all[..7].concat()),
        "--baseboard-serial",
        "S1",
    ]);
    assert!(said.starts_with("Changed module map entries of GPUs 1,2,3,5,6,7,8\n") && code == 0, "{said}");
    assert!(said.contains("the module map has no entry for GPUs 4; run"), "{said}");
    assert_eq!(fixture.run_fmctl(&["plan", "--gpus", "2"]).2, 5, "all or nothing");
    let (said, ..) =
        fixture.run_fmctl(&["inventory", "nvml", &fixture.file("last", &all[7]), "--baseboard-serial", "S1"]);
    assert_eq!(said, "Changed module map entries of GPUs 4\nVerified: every GPU was measured\n");
    let (health, _, code) = fixture.run_fmctl(&["health"]);
    assert!(health.starts_with("No problems\n") && code == 0, "{health}");
    let (planned, ..) = fixture.run_fmctl(&["plan", "--pci", "0000:87:00.0,0000:86:00.0"]);
    assert!(planned.starts_with("Partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0; "), "{planned}");
    let (said, ..) =
        fixture.run_fmctl(&["activate", "--pci", "0000:87:00.0,0000:86:00.0", "--owner", "a", "--request-id", "r1"]);
    assert_eq!(said, "Successfully activated partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0\n");
    for (pci, code, text) in [
        ("0000:86:00.0,0000:86:00.0", 2, "0000:86:00.0 is named twice"),
        ("0000:86:00.0,0000:0f:00.0", 2, "no partition has exactly the GPUs 1,5"),
        ("0000:c0:00.0", 4, "no GPU at 0000:c0:00.0; it has 0000:86:00.0, 0000:b8:00.0"),
    ] {
        let (_, error, found) = fixture.run_fmctl(&["activate", "--pci", pci, "--owner", "a"]);
        assert!(error.contains(text) && found == code, "{error}");
    }
    assert_eq!(fixture.run_fmctl(&["activate", "--pci", "86:00.0", "--owner", "a"]).2, 2);
    // The map is persistent.
    fixture.kill_daemon();
    fixture.start_daemon();
    block_on(async { fixture.until("there are no problems", |health| health.ok).await });
    let (said, ..) =
        fixture.run_fmctl(&["activate", "--pci", "0000:86:00.0,0000:87:00.0", "--owner", "a", "--request-id", "r1"]);
    assert!(said.contains("(already done by the same request)"), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&fixture.run_fmctl(&["--json", "inventory"]).0).unwrap();
    assert_eq!((&shown["verified"], &shown["baseboard_serial"]), (&true.into(), &"S1".into()));
    assert_eq!(shown["baseboard_modules"][4]["entry"]["pci"], "0000:0f:00.0");
    assert_eq!(fixture.run_fmctl(&["inventory", "forget"]).0, "The module map was deleted\n");
    assert_eq!(fixture.run_fmctl(&["inventory", "forget"]).0, "There was no module map\n");
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "4", "--owner", "b"]).2, 5);
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "4", "--owner", "b", "--unverified-map"]).2, 0);
    fixture.assert_no_violations();
}

#[test]
fn guest_addresses_are_mapped_to_host_addresses() {
    let fixture = Fixture::seen("b200");
    let guest = |slot: usize| format!("0000:{slot:02x}:00.0");
    let rows = SERVER.iter().enumerate().map(|(slot, (_, module))| {
        format!("{{\"guest_pci\":\"{}\",\"module_id\":{module},\"serial\":\"165{module}\"}}", guest(slot + 1))
    });
    let file = fixture.file("measured", &format!("[{}]", rows.collect::<Vec<_>>().join(",\n")));
    let at: Vec<String> =
        SERVER.iter().enumerate().map(|(slot, (pci, _))| format!("{}={pci}", guest(slot + 1))).collect();
    let mut arguments = vec!["inventory", "nvml", &file, "--baseboard-serial", "S1"];
    for at in &at[..7] {
        arguments.extend(["--pci-mapping", at]);
    }
    let (_, error, code) = fixture.run_fmctl(&arguments);
    assert!(
        error.contains("guest address 0000:08:00.0 (module 4) is unknown; pass --pci-mapping 0000:08:00.0=HOST_PCI")
            && code == 2,
        "{error}"
    );
    arguments.extend(["--pci-mapping", &at[7]]);
    let (said, _, code) = fixture.run_fmctl(&arguments);
    assert!(said.ends_with("Verified: every GPU was measured\n") && code == 0, "{said}");
    let (said, ..) = fixture.run_fmctl(&arguments);
    assert!(said.starts_with("The module map is unchanged\n"), "{said}");
    let (planned, ..) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    assert!(planned.starts_with("Partition 4 with GPUs 1,2 at 0000:86:00.0,0000:b8:00.0; "), "{planned}");
    // Two addresses are swapped.
    let swapped = [format!("{}=0000:10:00.0", guest(1)), format!("{}=0000:0f:00.0", guest(2))];
    let rows =
        [1, 2].map(|slot| format!("{{\"guest_pci\":\"{}\",\"module_id\":{}}}\n", guest(slot), SERVER[slot - 1].1));
    let first = fixture.file("two", &rows.concat());
    let wrong = [
        "inventory",
        "nvml",
        &first,
        "--baseboard-serial",
        "S1",
        "--pci-mapping",
        &swapped[0],
        "--pci-mapping",
        &swapped[1],
    ];
    let (_, error, code) = fixture.run_fmctl(&wrong);
    assert!(
        error.contains("the map has module 5 at 0000:0f:00.0 (nvml (1-files)), not at 0000:10:00.0") && code == 5,
        "{error}"
    );
    assert!(error.contains("nothing was changed: find out which is right"), "{error}");
}

#[test]
fn invalid_table_is_refused_with_its_position() {
    let fixture = Fixture::seen("h100");
    let mut more = SERVER.to_vec();
    more.push(("0000:c0:00.0", 9));
    for (file, code, text) in [
        (fixture.file("a", "[baseboard_modules]\n1 = 5\n"), 2, "a: line 2: invalid type: integer"),
        (
            fixture.file("b", "{\"baseboard_modules\": {\"1\": \"0000:86:00.0\",\n\"1\": \"0000:87:00.0\"}}"),
            2,
            "module 1 appears twice at line 2",
        ),
        (
            fixture.file("c", "[baseboard_modules]\n1 = \"86:00.0\"\n"),
            2,
            "module 1: \"86:00.0\" is not a PCI address: no bus",
        ),
        (fixture.table("d", &SERVER[..7]), 2, "no entry for module 4, which the fabric manager lists"),
        (fixture.table("e", &more), 2, "the fabric manager lists no module 9; it lists 1,2,3,4,5,6,7,8"),
        (fixture.file("f", &"#".repeat(100_000)), 2, "more than 65536 bytes"),
        ("/nowhere/table".to_owned(), 2, "failed to read /nowhere/table"),
    ] {
        let (_, error, found) = fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S1"]);
        assert!(error.contains(text) && found == code, "{text} in {error}");
    }
    let file = fixture.table("good", &SERVER);
    assert_eq!(fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "a b"]).2, 2);
    assert!(!fixture.map().exists());
    let (said, _, code) =
        fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S1", "--request-id", "m1"]);
    assert!(
        code == 0 && said.contains("Not verified: the module map has only operator statements for GPUs 1,2,3"),
        "{said}"
    );
    let (said, ..) = fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S1", "--request-id", "m1"]);
    assert!(said.starts_with("Already done by the same request\n"), "{said}");
    let (_, error, code) =
        fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S2", "--request-id", "m1"]);
    assert!(error.contains("request id m1 was used before, to set 8 GPUs of S1 by operator") && code == 5, "{error}");
    let (_, error, code) = fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S2"]);
    assert!(error.contains("the map is of baseboard S1, not of S2; nothing was changed") && code == 5, "{error}");
    let (said, ..) = fixture.run_fmctl(&["inventory", "set", &file, "--baseboard-serial", "S2", "--replace"]);
    assert!(said.starts_with("Replaced: the map is of baseboard S1, not of S2\n"), "{said}");
}

#[tokio::test]
async fn hostile_requests_are_refused() {
    let mut fixture = Fixture::strict(&quick("h100"));
    fixture.until("the fabric was polled", |health| health.fabric_manager).await;
    let mut client = fixture.client().await;
    let placement = |module_id, pci: &str| api::Placement { module_id, pci: pci.to_owned(), ..Default::default() };
    let nvml = |what: String| {
        Some(api::Evidence { source: Some(Source::Nvml(api::Nvml { recorded_at_ms: 7, origin: what })) })
    };
    let request = |entries, evidence| api::SetModuleMapRequest {
        request_id: "m".to_owned(),
        baseboard_serial: "S1".to_owned(),
        entries,
        evidence,
        replace: false,
    };
    let one = || vec![placement(1, "0000:86:00.0")];
    let long = |text: &str| text.repeat(10_000);
    for (wrong, text) in [
        (request(one(), None), "names no evidence"),
        (request(Vec::new(), nvml(String::new())), "it names no GPU"),
        (request(vec![placement(1, "0000:86:00.0"); 1000], nvml(String::new())), "1000 GPUs exceed the limit of 64"),
        (request(vec![placement(u32::MAX, "0000:86:00.0")], nvml(String::new())), "invalid module id"),
        (request(vec![placement(1, &long("0"))], nvml(String::new())), "is not a PCI address"),
        (
            api::SetModuleMapRequest { baseboard_serial: long("S"), ..request(one(), nvml(String::new())) },
            "baseboard serial",
        ),
        (api::SetModuleMapRequest { request_id: long("m"), ..request(one(), nvml(String::new())) }, "request id \"mmm"),
        (
            request(vec![api::Placement { uuid: long("u"), ..placement(1, "0000:86:00.0") }], nvml(String::new())),
            "uuid \"uuu",
        ),
    ] {
        let error = client.set_module_map(wrong).await.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(text), "{error:?}");
        assert!(error.message().len() < 600, "{error:?}");
    }
    let addresses = vec!["0000:86:00.0".to_owned(); 1000];
    let partition_request = Some(api::PartitionRequest {
        selector: Some(api::partition_request::Selector::Pci(api::PciAddresses { addresses })),
    });
    let error = client.activate(api::ActivateRequest { partition_request, ..activate("r", 1, "a") }).await.unwrap_err();
    assert!(error.message().contains("1000 PCI addresses exceed the limit of 64"), "{error:?}");
    // The origin is sanitised, and the file stays readable after many updates.
    for round in 0..80 {
        let request_id = format!("{round}{}", "m".repeat(120));
        let what = nvml(format!("a\u{1b}\n{}", long("x")));
        client.set_module_map(api::SetModuleMapRequest { request_id, ..request(one(), what) }).await.unwrap();
    }
    fixture.kill_daemon();
    fixture.start_daemon();
    let mut client = fixture.client().await;
    let inventory = client.inventory(api::InventoryRequest {}).await.unwrap().into_inner();
    let entry = inventory.baseboard_modules.into_iter().find_map(|one| one.entry).unwrap();
    let how = entry.evidence.unwrap().source;
    assert!(matches!(how, Some(Source::Nvml(nvml)) if nvml.origin.len() == 64 && nvml.recorded_at_ms > 7_000));
}

#[test]
fn damaged_map_and_map_of_another_baseboard_are_ignored() {
    let mut fixture = Fixture::seen("h100");
    let all = SERVER.map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module}}}"));
    let file = fixture.file("all", &all.concat());
    assert_eq!(fixture.run_fmctl(&["inventory", "nvml", &file, "--baseboard-serial", "S1"]).2, 0);
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(fixture.map()).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let good = fs::read(fixture.map()).unwrap();
    fixture.kill_daemon();
    fs::write(fixture.map(), &good[..100]).unwrap();
    fixture.start_daemon();
    let said = "module-map.json cannot be read as a module map: at byte 100";
    let health = block_on(async {
        fixture.until("the damage is reported", |health| !health.problems.is_empty() && health.fabric_manager).await
    });
    assert!(health.problems[0].contains(said) && health.problems[0].contains("keep a copy"), "{health:?}");
    let (_, error, code) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    assert!(error.contains(said) && code == 5, "{error}");
    fixture.kill_daemon();
    fs::write(fixture.map(), &good).unwrap();
    // The serial number on the kernel command line is equivalent to the option.
    let booted = fixture.dir.path().join("cmdline");
    fs::write(&booted, "quiet firstlight.baseboard_serial=S2 panic=-1\n").unwrap();
    fixture.more.extend(["--kernel-command-line".to_owned(), booted.display().to_string()]);
    fixture.start_daemon();
    block_on(async { fixture.until("the fabric was polled", |health| health.fabric_manager).await });
    let (_, error, _) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    assert!(
        error.contains(
            "the module map is of baseboard S1, and this is S2; run fmctl inventory nvml FILE --baseboard-serial S2 --replace"
        ),
        "{error}"
    );
    assert_eq!(fixture.run_fmctl(&["inventory", "nvml", &file, "--baseboard-serial", "S1"]).2, 5);
    assert_eq!(fixture.run_fmctl(&["inventory", "nvml", &file, "--baseboard-serial", "S2", "--replace"]).2, 0);
    assert_eq!(fixture.run_fmctl(&["plan", "--gpus", "2"]).2, 0);
}

#[tokio::test]
async fn daemon_killed_during_a_map_update_leaves_the_old_or_the_new_map() {
    let mut fixture = Fixture::strict(&quick("h100"));
    fixture.until("the fabric was polled", |health| health.fabric_manager).await;
    let request = |round: u64, place: &dyn Fn(u32) -> String| api::SetModuleMapRequest {
        request_id: format!("m{round}"),
        baseboard_serial: "S1".to_owned(),
        entries: (1..=8).map(|id| api::Placement { module_id: id, pci: place(id), ..Default::default() }).collect(),
        evidence: Some(api::Evidence { source: Some(Source::Nvml(api::Nvml::default())) }),
        replace: true,
    };
    let (mut old_count, mut new_count) = (0, 0);
    let mut known = String::new();
    for round in 1..=40_u64 {
        let place = move |id: u32| format!("{round:04x}:{id:02x}:00.0");
        let mut client = fixture.client().await;
        // The daemon has to have polled FM before it accepts a map.
        let update = request(round, &place);
        let asked = tokio::spawn(async move { client.set_module_map(update).await });
        tokio::time::sleep(Duration::from_micros(150 * (round % 20))).await;
        fixture.kill_daemon();
        let acknowledged = asked.await.unwrap().is_ok();
        fixture.start_daemon();
        let mut client = fixture.client().await;
        let now = client.inventory(api::InventoryRequest {}).await.unwrap().into_inner();
        let places: Vec<String> = now.baseboard_modules.iter().filter_map(|one| Some(one.entry.clone()?.pci)).collect();
        let domain = places.first().map(|pci| pci[..4].to_owned()).unwrap_or_default();
        assert!(places.iter().all(|pci| pci.starts_with(&domain)) && [0, 8].contains(&places.len()), "{places:?}");
        let new = format!("{round:04x}");
        assert!(domain == new || (domain == known && !acknowledged), "round {round}: {domain} after {known}");
        if domain == new {
            new_count += 1
        } else {
            old_count += 1
        }
        known = domain;
        let problems = client.health(api::HealthRequest {}).await.unwrap().into_inner().problems;
        assert!(problems.iter().all(|problem| !problem.contains("not readable")), "{problems:?}");
    }
    println!("{new_count} maps were written, {old_count} were not");
    assert!(new_count > 0);
}

#[test]
fn listed_uuid_of_another_gpu_ends_the_verification() {
    let fixture = Fixture::seen("a100-8");
    let shown: serde_json::Value = serde_json::from_str(&fixture.run_fmctl(&["--json", "inventory"]).0).unwrap();
    let row = |module: &serde_json::Value| {
        let (id, uuid) = (module["module_id"].as_u64().unwrap(), module["listed"]["uuid"].as_str().unwrap());
        assert!(!uuid.is_empty(), "an A100's manager knows: {module}");
        format!("{{\"host_pci\":\"0000:{id:02x}:00.0\",\"module_id\":{id},\"uuid\":\"{uuid}\"}}\n")
    };
    let rows: String = shown["baseboard_modules"].as_array().unwrap().iter().map(row).collect();
    let (said, _, code) =
        fixture.run_fmctl(&["inventory", "nvml", &fixture.file("all", &rows), "--baseboard-serial", "S1"]);
    assert!(said.ends_with("Verified: every GPU was measured\n") && code == 0, "{said}");
    assert_eq!(fixture.run_fmctl(&["plan", "--gpus", "2"]).2, 0);
    // The GPU was replaced: simulated by a map with another UUID.
    let old = "{\"host_pci\":\"0000:01:00.0\",\"module_id\":1,\"uuid\":\"GPU-old\"}";
    let (_, error, code) =
        fixture.run_fmctl(&["inventory", "nvml", &fixture.file("old", old), "--baseboard-serial", "S1"]);
    assert!(error.contains("and has GPU-old now") && code == 5, "{error}");
    assert_eq!(
        fixture.run_fmctl(&["inventory", "nvml", &fixture.file("old", old), "--baseboard-serial", "S1", "--replace"]).2,
        0
    );
    let (_, error, code) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    let said = "the module map has GPU GPU-old at module 1, and the fabric manager lists ";
    assert!(error.contains(said) && error.contains("--baseboard-serial S1 --replace") && code == 5, "{error}");
}
