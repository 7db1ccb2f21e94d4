//! The library as our own binding opens it: two texts of the same interface.
#![expect(clippy::unwrap_used, reason = "a test: what fails here is the finding")]

use std::time::Duration;

use firstlight_fake_fm::board::Failed;
use firstlight_fake_fm::home::build_library;
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_sys::nvfm::{Address, Code, Error, Library, OpenError};

mod manager;
use manager::{Manager, alone};

const TIMEOUT: Duration = Duration::from_secs(5);

fn opened(features: &str) -> Result<Library, OpenError> {
    Library::open(Some(&build_library(features).unwrap()))
}

fn address(manager: &Manager) -> Address {
    Address::Unix(manager.home.socket().display().to_string())
}

fn quick() -> Scenario {
    Scenario { activate_ms: 0, deactivate_ms: 0, ..Scenario::default() }
}

#[test]
fn both_declarations_of_the_abi_agree() {
    alone("both_declarations_of_the_abi_agree", "610", || {
        let failed = Failed { gpus: [3].into(), switches: [1].into(), ..Failed::default() };
        let keep = [("NVSWITCH_FAILURE_MODE", "1")];
        let manager = Manager::start(&keep, &Scenario { table: "a100-8".into(), failed, ..quick() });
        let library = opened("").unwrap();
        let fm = library.connect(&address(&manager), TIMEOUT).unwrap();
        let partitions = fm.partitions().unwrap();
        assert_eq!(partitions.iter().map(|it| it.id).collect::<Vec<_>>(), [8, 11, 13, 14, 19, 20, 22, 23, 24, 25, 26]);
        let gpu = &partitions[0].gpus[3];
        assert_eq!((gpu.physical_id, gpu.links, gpu.max_links, gpu.line_rate), (8, 10, 12, 25_000));
        assert_eq!(gpu.pci, "00000000:0E:00.0");
        assert_eq!(gpu.uuid, "GPU-f1257000-0000-4000-8000-000000000008");
        let unsupported = fm.unsupported().unwrap();
        assert_eq!((unsupported[0].id, unsupported[0].gpus.len(), unsupported.len()), (1, 8, 4));
        let failed = fm.failed().unwrap();
        assert_eq!((failed.gpus[0].pci.as_str(), failed.gpus[0].ports.len()), ("00000000:09:00.0", 12));
        assert_eq!((failed.switches[0].pci.as_str(), failed.switches.len()), ("00000000:C1:00.0", 1));
    });
}

#[test]
fn restart_with_the_list_of_active_partitions() {
    alone("restart_with_the_list_of_active_partitions", "610", || {
        let mut manager = Manager::start(&[], &Scenario { table: "b200".into(), ..quick() });
        let library = opened("").unwrap();
        let connect = |manager: &Manager| library.connect(&address(manager), TIMEOUT);
        let code = |result: Result<(), Error>| result.unwrap_err().code();
        let fm = connect(&manager).unwrap();
        fm.activate(4).unwrap();
        assert_eq!((code(fm.activate(4)), code(fm.activate(8))), (Some(Code(-17)), Some(Code(-24))));
        assert_eq!((code(fm.deactivate(5)), code(fm.set_activated(&[4]))), (Some(Code(-18)), Some(Code(-3))));
        manager.fm.kill().unwrap();
        assert_eq!(code(fm.activate(5)), Some(Code(-9)));
        assert_eq!(code(connect(&manager).map(drop)), Some(Code(-9)));
        manager.again(&["--restart"], Phase::RestartWait);
        let fm = connect(&manager).unwrap();
        assert_eq!(code(fm.activate(5)), Some(Code(-8)));
        fm.set_activated(&[4]).unwrap();
        let active = fm.partitions().unwrap();
        assert_eq!(active.iter().filter(|it| it.is_active).map(|it| it.id).collect::<Vec<_>>(), [4]);
    });
}

#[test]
fn old_library_gets_the_old_structure() {
    alone("old_library_gets_the_old_structure", "575", || {
        let manager = Manager::start(&[], &quick());
        let library = opened("").unwrap();
        for _ in 0..2 {
            let fm = library.connect(&address(&manager), TIMEOUT).unwrap();
            assert_eq!(fm.partitions().unwrap().len(), 15);
        }
    });
}

#[test]
fn excessive_counts_are_refused() {
    alone("excessive_counts_are_refused", "counts", || {
        let manager = Manager::start(&[], &quick());
        let library = opened("").unwrap();
        let fm = library.connect(&address(&manager), TIMEOUT).unwrap();
        assert!(matches!(fm.partitions(), Err(Error::Reply { .. })));
        assert!(matches!(fm.unsupported(), Err(Error::Reply { .. })));
        assert!(matches!(fm.failed(), Err(Error::Reply { .. })));
    });
}

#[test]
fn garbage_is_read_within_its_bounds() {
    alone("garbage_is_read_within_its_bounds", "garbage", || {
        let manager = Manager::start(&[], &quick());
        let library = opened("").unwrap();
        let fm = library.connect(&address(&manager), TIMEOUT).unwrap();
        // Refused, or cut where the fields end.
        if let Ok(partitions) = fm.partitions() {
            let gpu = &partitions[0].gpus[0];
            assert_eq!((gpu.uuid.len(), gpu.pci.len()), (80, 32));
        }
    });
}

#[test]
fn libraries_that_are_something_else() {
    alone("libraries_that_are_something_else", "version-6", || {
        assert!(matches!(opened(""), Err(OpenError::Init(Code(-6)))));
        let missing = opened("no-list").map(drop).unwrap_err();
        assert!(matches!(missing, OpenError::Function { function: "fmGetSupportedFabricPartitions", .. }));
    });
}

#[test]
fn old_library_lacks_newer_functions() {
    alone("old_library_lacks_newer_functions", "610", || {
        let manager = Manager::start(&[], &quick());
        let library = opened("no-unsupported").unwrap();
        let fm = library.connect(&address(&manager), TIMEOUT).unwrap();
        assert!(matches!(fm.unsupported(), Err(Error::Missing { .. })));
        assert!(fm.failed().is_ok() && fm.partitions().is_ok());
    });
}
