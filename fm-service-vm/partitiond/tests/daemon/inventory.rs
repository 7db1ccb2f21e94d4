//! Which GPU is which: what is refused, told, measured, kept and forgotten.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::How;
use tonic::Code;

use crate::support::{Stand, activate, quick};
use crate::tokio_main;

/// PCI addresses and module ids of a server with H100: no order of one is that of the other.
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

impl Stand {
    /// A strict one that has seen the fabric.
    pub(crate) fn seen(table: &str) -> Self {
        let stand = Self::strict(&quick(table));
        tokio_main(async { stand.until("the fabric is seen", |health| health.fabric_manager).await });
        stand
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// An operator's table.
    pub(crate) fn table(&self, name: &str, rows: &[(&str, u32)]) -> String {
        let rows: String = rows.iter().map(|(pci, module)| format!("{module} = \"{pci}\"\n")).collect();
        self.file(name, &format!("[modules]\n{rows}"))
    }

    fn map(&self) -> PathBuf {
        self.dir.path().join("module-map.json")
    }
}

/// What somebody would believe who has not measured: in order.
pub(crate) fn sorted() -> Vec<(&'static str, u32)> {
    SERVER.iter().zip(1..).map(|((pci, _), module)| (*pci, module)).collect()
}

#[test]
fn several_gpus_are_refused_until_they_were_measured() {
    let mut stand = Stand::seen("h100");
    let advice = "run fmctl inventory nvml FILE --serial SERIAL with what an inventory guest has measured, or fmctl inventory \
                  probe --gpus PCI,.. --serial SERIAL --check COMMAND; --unverified-map overrides that for one request\n";
    let refused = |what: &str| {
        format!("fmctl: {what} is not given while which GPU is which is not verified: there is no module map; {advice}")
    };
    let (_, error, code) = stand.typed(&["activate", "--gpus", "2", "--owner", "a"]);
    assert_eq!((error, code), (refused("partition 3 of GPUs 1,3"), 5));
    let (_, error, code) = stand.typed(&["plan", "2"]);
    assert_eq!((error, code), (refused("partition 2 of GPUs 5,6,7,8"), 5));
    let (_, error, code) = stand.typed(&["plan", "--pci", "0000:0f:00.0"]);
    assert!(error.contains("the module map has no GPU at 0000:0f:00.0; it has none") && code == 4, "{error}");
    let (health, _, code) = stand.typed(&["health"]);
    assert!(health.contains("which GPU is which is not verified, so nobody is given more than one GPU") && code == 9);
    // One is needed to find out.
    assert_eq!(stand.typed(&["activate", "--gpus", "1", "--owner", "a"]).2, 0);
    assert_eq!(stand.typed(&["deactivate", "7", "--owner", "a"]).2, 0);
    let (shown, _, code) = stand.typed(&["inventory"]);
    let heads = "MODULE ID  PCI ADDRESS  UUID  LINKS  EVIDENCE\n---------  -----------  ----  -----  --------\n";
    assert!(shown.starts_with(&format!("{heads}1          unknown      N/A   18/18  none\n")) && code == 0, "{shown}");
    assert!(
        shown.contains("\nBaseboard: h100; serial: not told\nIt is not verified: there is no module map; run "),
        "{shown}"
    );

    let all = SERVER
        .map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module},\"uuid\":\"GPU-{module}\"}}\n"));
    let (said, _, code) =
        stand.typed(&["inventory", "nvml", &stand.file("seven", &all[..7].concat()), "--serial", "S1"]);
    assert!(said.starts_with("The module map says something new of GPUs 1,2,3,5,6,7,8\n") && code == 0, "{said}");
    assert!(said.contains("the module map says nothing of GPUs 4; run"), "{said}");
    assert_eq!(stand.typed(&["plan", "--gpus", "2"]).2, 5, "all or nothing");
    let (said, ..) = stand.typed(&["inventory", "nvml", &stand.file("last", &all[7]), "--serial", "S1"]);
    assert_eq!(said, "The module map says something new of GPUs 4\nIt is verified: every GPU was measured\n");
    let (health, _, code) = stand.typed(&["health"]);
    assert!(health.starts_with("All is well\n") && code == 0, "{health}");
    let (planned, ..) = stand.typed(&["plan", "--pci", "0000:87:00.0,0000:86:00.0"]);
    assert!(planned.starts_with("Partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0; "), "{planned}");
    let (said, ..) =
        stand.typed(&["activate", "--pci", "0000:87:00.0,0000:86:00.0", "--owner", "a", "--request-id", "r1"]);
    assert_eq!(said, "Successfully activated partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0\n");
    for (pci, code, text) in [
        ("0000:86:00.0,0000:86:00.0", 2, "0000:86:00.0 is named twice"),
        ("0000:86:00.0,0000:0f:00.0", 2, "no partition has exactly the GPUs 1,5"),
        ("0000:c0:00.0", 4, "no GPU at 0000:c0:00.0; it has 0000:86:00.0, 0000:b8:00.0"),
    ] {
        let (_, error, found) = stand.typed(&["activate", "--pci", pci, "--owner", "a"]);
        assert!(error.contains(text) && found == code, "{error}");
    }
    assert_eq!(stand.typed(&["activate", "--pci", "86:00.0", "--owner", "a"]).2, 2);
    // It is kept.
    stand.kill_daemon();
    stand.start_daemon();
    tokio_main(async { stand.until("all is well", |health| health.ok).await });
    let (said, ..) =
        stand.typed(&["activate", "--pci", "0000:86:00.0,0000:87:00.0", "--owner", "a", "--request-id", "r1"]);
    assert!(said.contains("(it was, for the same request)"), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&stand.typed(&["--json", "inventory"]).0).unwrap();
    assert_eq!((&shown["verified"], &shown["baseboard_serial"]), (&true.into(), &"S1".into()));
    assert_eq!(shown["modules"][4]["entry"]["pci"], "0000:0f:00.0");
    assert_eq!(stand.typed(&["inventory", "forget"]).0, "The module map is forgotten\n");
    assert_eq!(stand.typed(&["inventory", "forget"]).0, "There was no module map\n");
    assert_eq!(stand.typed(&["activate", "--gpus", "4", "--owner", "b"]).2, 5);
    assert_eq!(stand.typed(&["activate", "--gpus", "4", "--owner", "b", "--unverified-map"]).2, 0);
    stand.assert_unharmed();
}

#[test]
fn slots_of_an_inventory_guest_are_put_in_their_hosts_places() {
    let stand = Stand::seen("b200");
    let guest = |slot: usize| format!("0000:{slot:02x}:00.0");
    let rows = SERVER.iter().enumerate().map(|(slot, (_, module))| {
        format!("{{\"guest_pci\":\"{}\",\"module_id\":{module},\"serial\":\"165{module}\"}}", guest(slot + 1))
    });
    let file = stand.file("measured", &format!("[{}]", rows.collect::<Vec<_>>().join(",\n")));
    let at: Vec<String> =
        SERVER.iter().enumerate().map(|(slot, (pci, _))| format!("{}={pci}", guest(slot + 1))).collect();
    let mut arguments = vec!["inventory", "nvml", &file, "--serial", "S1"];
    for at in &at[..7] {
        arguments.extend(["--at", at]);
    }
    let (_, error, code) = stand.typed(&arguments);
    assert!(
        error.contains("the guest's 0000:08:00.0 (module 4) is; say it with --at 0000:08:00.0=HOST_PCI") && code == 2,
        "{error}"
    );
    arguments.extend(["--at", &at[7]]);
    let (said, _, code) = stand.typed(&arguments);
    assert!(said.ends_with("It is verified: every GPU was measured\n") && code == 0, "{said}");
    let (said, ..) = stand.typed(&arguments);
    assert!(said.starts_with("The module map said so already\n"), "{said}");
    let (planned, ..) = stand.typed(&["plan", "--gpus", "2"]);
    assert!(planned.starts_with("Partition 4 with GPUs 1,2 at 0000:86:00.0,0000:b8:00.0; "), "{planned}");
    // A slip: two slots are exchanged.
    let swapped = [format!("{}=0000:10:00.0", guest(1)), format!("{}=0000:0f:00.0", guest(2))];
    let rows =
        [1, 2].map(|slot| format!("{{\"guest_pci\":\"{}\",\"module_id\":{}}}\n", guest(slot), SERVER[slot - 1].1));
    let first = stand.file("two", &rows.concat());
    let wrong = ["inventory", "nvml", &first, "--serial", "S1", "--at", &swapped[0], "--at", &swapped[1]];
    let (_, error, code) = stand.typed(&wrong);
    assert!(
        error.contains("the map has module 5 at 0000:0f:00.0 (nvml (1-files)), not at 0000:10:00.0") && code == 5,
        "{error}"
    );
    assert!(error.contains("nothing was changed: find out which is right"), "{error}");
}

#[test]
fn what_is_no_map_is_refused_with_its_place() {
    let stand = Stand::seen("h100");
    let mut more = SERVER.to_vec();
    more.push(("0000:c0:00.0", 9));
    for (file, code, text) in [
        (stand.file("a", "[modules]\n1 = 5\n"), 2, "a: line 2: invalid type: integer"),
        (
            stand.file("b", "{\"modules\": {\"1\": \"0000:86:00.0\",\n\"1\": \"0000:87:00.0\"}}"),
            2,
            "module 1 is there twice at line 2",
        ),
        (stand.file("c", "[modules]\n1 = \"86:00.0\"\n"), 2, "module 1: \"86:00.0\" is not a PCI address: no bus"),
        (stand.table("d", &SERVER[..7]), 2, "it says nothing of module 4, which the fabric manager lists"),
        (stand.table("e", &more), 2, "the fabric manager lists no module 9; it lists 1,2,3,4,5,6,7,8"),
        (stand.file("f", &"#".repeat(100_000)), 2, "more than 65536 bytes"),
        ("/nowhere/table".to_owned(), 2, "cannot read /nowhere/table"),
    ] {
        let (_, error, found) = stand.typed(&["inventory", "set", &file, "--serial", "S1"]);
        assert!(error.contains(text) && found == code, "{text} in {error}");
    }
    let file = stand.table("good", &SERVER);
    assert_eq!(stand.typed(&["inventory", "set", &file, "--serial", "a b"]).2, 2);
    assert!(!stand.map().exists());
    let (said, _, code) = stand.typed(&["inventory", "set", &file, "--serial", "S1", "--request-id", "m1"]);
    assert!(
        code == 0 && said.contains("It is not verified: the module map has only an operator's word for GPUs 1,2,3"),
        "{said}"
    );
    let (said, ..) = stand.typed(&["inventory", "set", &file, "--serial", "S1", "--request-id", "m1"]);
    assert!(said.starts_with("It was noted before, for the same request\n"), "{said}");
    let (_, error, code) = stand.typed(&["inventory", "set", &file, "--serial", "S2", "--request-id", "m1"]);
    assert!(error.contains("request m1 was used before, to set 8 GPUs of S1 by operator") && code == 5, "{error}");
    let (_, error, code) = stand.typed(&["inventory", "set", &file, "--serial", "S2"]);
    assert!(error.contains("the map is of baseboard S1, not of S2; nothing was changed") && code == 5, "{error}");
    let (said, ..) = stand.typed(&["inventory", "set", &file, "--serial", "S2", "--replace"]);
    assert!(said.starts_with("It said until now: the map is of baseboard S1, not of S2\n"), "{said}");
}

#[tokio::test]
async fn hostile_requests_are_refused() {
    let mut stand = Stand::strict(&quick("h100"));
    stand.until("the fabric is seen", |health| health.fabric_manager).await;
    let mut client = stand.client().await;
    let placement = |module_id, pci: &str| api::Placement { module_id, pci: pci.to_owned(), ..Default::default() };
    let nvml = |what: String| Some(api::Evidence { how: Some(How::Nvml(api::Nvml { when_ms: 7, what })) });
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
        (request(one(), None), "does not say how it is known"),
        (request(Vec::new(), nvml(String::new())), "it names no GPU"),
        (
            request(vec![placement(1, "0000:86:00.0"); 1000], nvml(String::new())),
            "1000 GPUs are more than there can be",
        ),
        (request(vec![placement(u32::MAX, "0000:86:00.0")], nvml(String::new())), "is no module id"),
        (request(vec![placement(1, &long("0"))], nvml(String::new())), "is not a PCI address"),
        (
            api::SetModuleMapRequest { baseboard_serial: long("S"), ..request(one(), nvml(String::new())) },
            "baseboard serial",
        ),
        (api::SetModuleMapRequest { request_id: long("m"), ..request(one(), nvml(String::new())) }, "request \"mmm"),
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
    let ask = Some(api::Ask { what: Some(api::ask::What::Pci(api::PciAddresses { addresses })) });
    let error = client.activate(api::ActivateRequest { ask, ..activate("r", 1, "a") }).await.unwrap_err();
    assert!(error.message().contains("1000 PCI addresses are more than there can be"), "{error:?}");
    // What it says of itself is a word; and however much is said, the file can be read again.
    for round in 0..80 {
        let request_id = format!("{round}{}", "m".repeat(120));
        let what = nvml(format!("a\u{1b}\n{}", long("x")));
        client.set_module_map(api::SetModuleMapRequest { request_id, ..request(one(), what) }).await.unwrap();
    }
    stand.kill_daemon();
    stand.start_daemon();
    let mut client = stand.client().await;
    let inventory = client.inventory(api::InventoryRequest {}).await.unwrap().into_inner();
    let entry = inventory.modules.into_iter().find_map(|one| one.entry).unwrap();
    let how = entry.evidence.unwrap().how;
    assert!(matches!(how, Some(How::Nvml(nvml)) if nvml.what.len() == 64 && nvml.when_ms > 7_000));
}

#[test]
fn a_damaged_map_is_none_and_a_baseboard_that_was_changed_has_none() {
    let mut stand = Stand::seen("h100");
    let all = SERVER.map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module}}}"));
    let file = stand.file("all", &all.concat());
    assert_eq!(stand.typed(&["inventory", "nvml", &file, "--serial", "S1"]).2, 0);
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(stand.map()).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let good = fs::read(stand.map()).unwrap();
    stand.kill_daemon();
    fs::write(stand.map(), &good[..100]).unwrap();
    stand.start_daemon();
    let said = "module-map.json is not readable as a module map: at byte 100";
    let health = tokio_main(async {
        stand.until("it is told", |health| !health.troubles.is_empty() && health.fabric_manager).await
    });
    assert!(health.troubles[0].contains(said) && health.troubles[0].contains("keep a copy"), "{health:?}");
    let (_, error, code) = stand.typed(&["plan", "--gpus", "2"]);
    assert!(error.contains(said) && code == 5, "{error}");
    stand.kill_daemon();
    fs::write(stand.map(), &good).unwrap();
    // As the host says it; a word of the command is the same.
    let booted = stand.dir.path().join("cmdline");
    fs::write(&booted, "quiet firstlight.baseboard_serial=S2 panic=-1\n").unwrap();
    stand.more.extend(["--kernel-command-line".to_owned(), booted.display().to_string()]);
    stand.start_daemon();
    tokio_main(async { stand.until("the fabric is seen", |health| health.fabric_manager).await });
    let (_, error, _) = stand.typed(&["plan", "--gpus", "2"]);
    assert!(
        error.contains(
            "the module map is of baseboard S1, and this is S2; run fmctl inventory nvml FILE --serial S2 --replace"
        ),
        "{error}"
    );
    assert_eq!(stand.typed(&["inventory", "nvml", &file, "--serial", "S1"]).2, 5);
    assert_eq!(stand.typed(&["inventory", "nvml", &file, "--serial", "S2", "--replace"]).2, 0);
    assert_eq!(stand.typed(&["plan", "--gpus", "2"]).2, 0);
}

#[tokio::test]
async fn a_daemon_that_is_killed_while_it_writes_leaves_the_old_map_or_the_new_one() {
    let mut stand = Stand::strict(&quick("h100"));
    stand.until("the fabric is seen", |health| health.fabric_manager).await;
    let request = |round: u64, place: &dyn Fn(u32) -> String| api::SetModuleMapRequest {
        request_id: format!("m{round}"),
        baseboard_serial: "S1".to_owned(),
        entries: (1..=8).map(|id| api::Placement { module_id: id, pci: place(id), ..Default::default() }).collect(),
        evidence: Some(api::Evidence { how: Some(How::Nvml(api::Nvml::default())) }),
        replace: true,
    };
    let (mut kept, mut came) = (0, 0);
    let mut known = String::new();
    for round in 1..=40_u64 {
        let place = move |id: u32| format!("{round:04x}:{id:02x}:00.0");
        let mut client = stand.client().await;
        // It has to have seen the fabric again before a map is taken.
        let wanted = request(round, &place);
        let asked = tokio::spawn(async move { client.set_module_map(wanted).await });
        tokio::time::sleep(Duration::from_micros(150 * (round % 20))).await;
        stand.kill_daemon();
        let told = asked.await.unwrap().is_ok();
        stand.start_daemon();
        let mut client = stand.client().await;
        let now = client.inventory(api::InventoryRequest {}).await.unwrap().into_inner();
        let places: Vec<String> = now.modules.iter().filter_map(|one| Some(one.entry.clone()?.pci)).collect();
        let domain = places.first().map(|pci| pci[..4].to_owned()).unwrap_or_default();
        assert!(places.iter().all(|pci| pci.starts_with(&domain)) && [0, 8].contains(&places.len()), "{places:?}");
        let new = format!("{round:04x}");
        assert!(domain == new || (domain == known && !told), "round {round}: {domain} after {known}");
        if domain == new {
            came += 1
        } else {
            kept += 1
        }
        known = domain;
        let troubles = client.health(api::HealthRequest {}).await.unwrap().into_inner().troubles;
        assert!(troubles.iter().all(|trouble| !trouble.contains("not readable")), "{troubles:?}");
    }
    println!("{came} maps came to be, {kept} did not");
    assert!(came > 0);
}

#[test]
fn where_the_manager_lists_uuids_another_gpu_ends_the_verification() {
    let stand = Stand::seen("a100-8");
    let shown: serde_json::Value = serde_json::from_str(&stand.typed(&["--json", "inventory"]).0).unwrap();
    let row = |module: &serde_json::Value| {
        let (id, uuid) = (module["module_id"].as_u64().unwrap(), module["listed"]["uuid"].as_str().unwrap());
        assert!(!uuid.is_empty(), "an A100's manager knows: {module}");
        format!("{{\"host_pci\":\"0000:{id:02x}:00.0\",\"module_id\":{id},\"uuid\":\"{uuid}\"}}\n")
    };
    let rows: String = shown["modules"].as_array().unwrap().iter().map(row).collect();
    let (said, _, code) = stand.typed(&["inventory", "nvml", &stand.file("all", &rows), "--serial", "S1"]);
    assert!(said.ends_with("It is verified: every GPU was measured\n") && code == 0, "{said}");
    assert_eq!(stand.typed(&["plan", "--gpus", "2"]).2, 0);
    // Another was put in since, and the manager sees it: as if the map had the old one.
    let old = "{\"host_pci\":\"0000:01:00.0\",\"module_id\":1,\"uuid\":\"GPU-old\"}";
    let (_, error, code) = stand.typed(&["inventory", "nvml", &stand.file("old", old), "--serial", "S1"]);
    assert!(error.contains("and has GPU-old now") && code == 5, "{error}");
    assert_eq!(stand.typed(&["inventory", "nvml", &stand.file("old", old), "--serial", "S1", "--replace"]).2, 0);
    let (_, error, code) = stand.typed(&["plan", "--gpus", "2"]);
    let said = "the module map has GPU GPU-old at module 1, and the fabric manager lists ";
    assert!(error.contains(said) && error.contains("--serial S1 --replace") && code == 5, "{error}");
}
