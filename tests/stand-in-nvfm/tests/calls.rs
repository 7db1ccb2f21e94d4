//! The library's functions, with a manager behind them.
#![allow(unsafe_code, reason = "calls of functions that take pointers")]
#![expect(clippy::unwrap_used, reason = "a test: what fails here is the finding")]

use std::ptr::{null_mut, without_provenance_mut};
use std::thread;
use std::time::{Duration, Instant};

use firstlight_fake_fm::board::Failed;
use firstlight_fake_fm::call::Op;
use firstlight_fake_fm::control::{Command, Fault};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use nvfm::abi::{self, Handle};
use nvfm::*;

mod caller;
mod manager;
use caller::{connect, connect_with, list, open, params, set_activated};
use manager::{Manager, alone};

#[test]
fn calls_before_init_and_after_shutdown_fail() {
    alone("calls_before_init_and_after_shutdown_fail", "610", || {
        let handle: Handle = without_provenance_mut(1);
        assert_eq!((fmLibShutdown(), fmDisconnect(handle), fmActivateFabricPartition(handle, 1)), (-4, -4, -4));
        assert_eq!(list(handle).err(), Some(-4));
        // SAFETY: null is among what these functions take.
        assert_eq!(unsafe { fmConnect(null_mut(), null_mut()) }, -4);
        assert_eq!((fmLibInit(), fmLibInit()), (0, -7));
        let mut out: Handle = null_mut();
        // SAFETY: the same, and a place for a handle.
        unsafe {
            assert_eq!(
                (fmConnect(null_mut(), &raw mut out), fmConnect(&mut params(abi::UNIX, "x"), null_mut())),
                (-1, -1)
            );
            assert_eq!(fmGetSupportedFabricPartitions(handle, null_mut()), -1);
            assert_eq!(fmGetUnsupportedFabricPartitions(handle, null_mut()), -1);
            assert_eq!(fmGetNvlinkFailedDevices(handle, null_mut()), -1);
            assert_eq!(fmSetActivatedFabricPartitions(handle, null_mut()), -1);
            assert_eq!(fmActivateFabricPartitionWithVFs(handle, 1, null_mut(), 1), -1);
        }
        assert_eq!(
            (fmDisconnect(handle), fmDisconnect(null_mut()), fmDeactivateFabricPartition(handle, 1)),
            (-1, -1, -1)
        );
        assert_eq!((fmLibShutdown(), fmLibShutdown()), (0, -4));
    });
}

#[test]
fn partition_lifecycle_through_the_library() {
    alone("partition_lifecycle_through_the_library", "610", || {
        let manager = Manager::start(&[], &Scenario::default());
        let handle = open(&manager);
        let all = list(handle).unwrap();
        assert_eq!((all.num_partitions, all.max_num_partitions), (15, 15));
        let pair = all.partitions[3];
        assert_eq!((pair.id, pair.is_active, pair.num_gpus), (3, 0, 2));
        let gpu = pair.gpus[1];
        assert_eq!((gpu.physical_id, gpu.links_available, gpu.links_max, gpu.line_rate), (3, 18, 18, 26_562));
        assert_eq!((gpu.uuid[0], &gpu.pci_bus_id[..17]), (0, b"00000000:00:00.0\0".as_slice()));
        assert_eq!(fmActivateFabricPartition(handle, 3), 0);
        assert_eq!((fmActivateFabricPartition(handle, 3), fmActivateFabricPartition(handle, 1)), (-7, -7));
        assert_eq!((fmActivateFabricPartition(handle, 64), set_activated(handle, &[3])), (-1, -3));
        let mut vf = abi::PciDevice { domain: 0, bus: 1, device: 0, function: 1 };
        // SAFETY: one structure, as is said.
        assert_eq!(unsafe { fmActivateFabricPartitionWithVFs(handle, 4, &raw mut vf, 1) }, -3);
        assert_eq!(list(handle).unwrap().partitions[3].is_active, 1);
        assert_eq!((fmDeactivateFabricPartition(handle, 3), fmDeactivateFabricPartition(handle, 3)), (0, -4));

        let mut wrong = caller::zeroed_list();
        wrong.version = abi::ACTIVATED_LIST;
        // SAFETY: a whole list.
        assert_eq!(unsafe { fmGetSupportedFabricPartitions(handle, &raw mut *wrong) }, -6);
        assert_eq!((fmDisconnect(handle), fmDisconnect(handle), list(handle).err()), (0, -1, Some(-1)));
        let handle = connect(&manager).unwrap();
        assert_eq!((fmLibShutdown(), fmLibInit(), list(handle).err()), (0, 0, Some(-1)), "shutdown closes");
    });
}

#[test]
fn manager_that_dies_and_is_restarted() {
    alone("manager_that_dies_and_is_restarted", "610", || {
        let mut manager = Manager::start(&[], &Scenario { activate_ms: 0, ..Scenario::default() });
        let handle = open(&manager);
        assert_eq!(fmActivateFabricPartition(handle, 3), 0);
        manager.fm.control.send(&Command::Hang(None)).unwrap();
        let address = handle.addr();
        let hung = thread::spawn(move || fmActivateFabricPartition(without_provenance_mut(address), 4));
        manager.fm.wait_until(|snapshot| snapshot.hanging).unwrap();
        manager.fm.kill().unwrap();
        assert_eq!(hung.join().unwrap(), -9, "in the middle of a call");
        assert_eq!((fmActivateFabricPartition(handle, 4), connect(&manager).err()), (-9, Some(-9)));

        manager.again(&["--restart"], Phase::RestartWait);
        assert_eq!(list(handle).err(), Some(-9), "an old handle stays dead");
        let handle = connect(&manager).unwrap();
        assert_eq!((list(handle).err(), set_activated(handle, &[3])), (Some(-8), 0));
        assert_eq!(list(handle).unwrap().partitions[3].is_active, 1);
    });
}

#[test]
fn addresses_and_versions() {
    alone("addresses_and_versions", "610", || {
        let internal = tempfile::tempdir().unwrap();
        let internal = internal.path().join("internal").display().to_string();
        let manager = Manager::start(&[("UNIX_SOCKET_PATH", &internal)], &Scenario::default());
        assert_eq!(fmLibInit(), 0);
        let socket = manager.home.socket().display().to_string();
        for (kind, address, rc) in [
            (0, socket.as_str(), -1),
            (4, &socket, -1),
            (abi::INET, &socket, -1),
            (abi::INET, "127.0.0.1:1", -9),
            (abi::UNIX, "/nowhere/socket", -9),
            (abi::UNIX, "", -1),
            (abi::VSOCK, "3:6666", -9),
            (abi::VSOCK, "3", -1),
        ] {
            assert_eq!(connect_with(&mut params(kind, address)).err(), Some(rc), "{kind} {address}");
        }
        let mut old = params(0, &socket);
        old.first.version = abi::CONNECT_PARAMS_1;
        assert_eq!(connect_with(&mut old).err(), Some(-1), "no IP address");
        old.first.address_is_unix_socket = 1;
        assert!(connect_with(&mut old).is_ok());
        old.first.version = 0x0300_0110;
        assert_eq!(connect_with(&mut old).err(), Some(-6));

        // The wrong socket is found out only by the first call.
        let trap = connect_with(&mut params(abi::UNIX, &internal)).unwrap();
        assert_eq!(list(trap).err(), Some(-4));
    });
}

#[test]
fn connect_waits_until_its_timeout() {
    alone("connect_waits_until_its_timeout", "610", || {
        assert_eq!(fmLibInit(), 0);
        // A socket that listens without ever responding: a stopped fabric manager.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut params = params(abi::INET, &listener.local_addr().unwrap().to_string());
        params.first.timeout_ms = 150;
        let start = Instant::now();
        assert_eq!(connect_with(&mut params).err(), Some(-9));
        let took = start.elapsed();
        assert!((Duration::from_millis(100)..Duration::from_secs(5)).contains(&took), "{took:?}");
    });
}

#[test]
fn a100_reports_failed_devices() {
    alone("a100_reports_failed_devices", "610", || {
        let failed = Failed { gpus: [3].into(), switches: [1].into(), ..Failed::default() };
        let keep = [("NVSWITCH_FAILURE_MODE", "1")];
        let manager = Manager::start(&keep, &Scenario { table: "a100-8".into(), failed, ..Scenario::default() });
        let handle = open(&manager);
        let all = list(handle).unwrap();
        assert_eq!((all.num_partitions, all.max_num_partitions), (11, 15));
        assert_eq!((all.partitions[0].gpus[0].links_available, all.partitions[0].gpus[0].links_max), (10, 12));
        assert_eq!(&all.partitions[0].gpus[0].uuid[..4], b"GPU-");
        let (gpus, switches) = caller::failed(handle).unwrap();
        assert_eq!((gpus, switches), (1, 1));
        assert_eq!(caller::unsupported(handle).unwrap(), [1, 7, 12, 21]);
    });
}

#[test]
fn a_library_of_575() {
    alone("a_library_of_575", "575", || {
        let mut manager =
            Manager::start(&[], &Scenario { table: "b200".into(), activate_ms: 0, ..Scenario::default() });
        assert_eq!(fmLibInit(), 0);
        let mut params = params(abi::UNIX, &manager.home.socket().display().to_string());
        assert_eq!(connect_with(&mut params).err(), Some(-6));
        params.first.version = abi::CONNECT_PARAMS_1;
        params.first.address_is_unix_socket = 1;
        let handle = connect_with(&mut params).unwrap();
        assert_eq!((fmActivateFabricPartition(handle, 4), fmActivateFabricPartition(handle, 4)), (0, -2));
        let fault = Fault { op: Some(Op::Deactivate), rc: -10, after_ms: 0, take_effect: false, times: 1 };
        manager.fm.control.send(&Command::Fault(fault)).unwrap();
        assert_eq!(fmDeactivateFabricPartition(handle, 4), -10);
    });
}

#[test]
fn a_library_that_counts_wrong() {
    alone("a_library_that_counts_wrong", "counts", || {
        let manager = Manager::start(&[], &Scenario::default());
        let handle = open(&manager);
        let all = list(handle).unwrap();
        assert_eq!((all.num_partitions, all.partitions[0].num_gpus), (200, 99));
    });
}

#[test]
fn a_library_with_garbage() {
    alone("a_library_with_garbage", "garbage", || {
        let manager = Manager::start(&[], &Scenario::default());
        let handle = open(&manager);
        let all = list(handle).unwrap();
        assert_eq!(all.partitions[0].is_active, 7);
        assert!(all.partitions[0].gpus[0].uuid.iter().all(|byte| *byte == b'A'));
        assert!(all.partitions[0].gpus[7].pci_bus_id.iter().all(|byte| *byte == b'A'));
    });
}

#[test]
fn libraries_that_fail_every_call() {
    alone("libraries_that_fail_every_call", "version-6", || {
        let handle: Handle = without_provenance_mut(1);
        assert_eq!((fmLibInit(), fmDisconnect(handle), list(handle).err(), fmLibShutdown()), (-6, -6, Some(-6), -6));
    });
}
