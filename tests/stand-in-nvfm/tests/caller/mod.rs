//! What every caller of the library has to do.

use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;

use firstlight_fake_fm::home::{Home, Running, build};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use nvfm::abi::{self, ActivatedList, ConnectParams1, ConnectParams2, FailedDevices, Handle, PartitionList};
use nvfm::*;

/// The library is one for a process, and so is its variant: a test runs in a process of its own.
pub(crate) fn alone(name: &str, variant: &str, test: impl FnOnce()) {
    if std::env::var_os("ALONE").is_some() {
        return test();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env("ALONE", "1").env(variant::VARIABLE, variant);
    let output = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// A manager in a folder of its own.
pub(crate) struct Manager {
    pub(crate) home: Home,
    pub(crate) fm: Running,
    program: PathBuf,
    _folder: tempfile::TempDir,
}

impl Manager {
    pub(crate) fn start(keys: &[(&str, &str)], scenario: &Scenario) -> Self {
        let (program, folder) = (build().unwrap(), tempfile::tempdir().unwrap());
        let home = Home::new(folder.path());
        home.write(keys, &Scenario { start_ms: 0, ..scenario.clone() }).unwrap();
        let mut fm = home.start(&program, &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        Self { home, fm, program, _folder: folder }
    }

    pub(crate) fn again(&mut self, arguments: &[&str], phase: Phase) {
        self.fm = self.home.start(&self.program, arguments).unwrap();
        self.fm.wait_for(phase).unwrap();
    }
}

pub(crate) fn params(kind: u32, address: &str) -> ConnectParams2 {
    let mut bytes = [0; abi::ADDRESS_BYTES];
    bytes[..address.len()].copy_from_slice(address.as_bytes());
    let version = abi::CONNECT_PARAMS_2;
    let first = ConnectParams1 { version, address: bytes, timeout_ms: 5000, address_is_unix_socket: 0 };
    ConnectParams2 { first, address_type: kind }
}

fn result<T>(rc: i32, value: T) -> Result<T, i32> {
    if rc == 0 { Ok(value) } else { Err(rc) }
}

pub(crate) fn connect_with(params: &mut ConnectParams2) -> Result<Handle, i32> {
    let mut handle = null_mut();
    // SAFETY: a whole structure, and a place for a handle.
    let rc = unsafe { fmConnect(params, &raw mut handle) };
    result(rc, handle)
}

pub(crate) fn connect(manager: &Manager) -> Result<Handle, i32> {
    connect_with(&mut params(abi::UNIX, &manager.home.socket().display().to_string()))
}

/// With the initialisation.
pub(crate) fn open(manager: &Manager) -> Handle {
    assert_eq!(fmLibInit(), 0);
    connect(manager).unwrap()
}

pub(crate) fn zeroed_list() -> Box<PartitionList> {
    // SAFETY: numbers and bytes, of which zeros are valid.
    unsafe { Box::<PartitionList>::new_zeroed().assume_init() }
}

pub(crate) fn list(handle: Handle) -> Result<Box<PartitionList>, i32> {
    let mut list = zeroed_list();
    list.version = abi::PARTITION_LIST;
    // SAFETY: a whole list.
    let rc = unsafe { fmGetSupportedFabricPartitions(handle, &raw mut *list) };
    result(rc, list)
}

pub(crate) fn set_activated(handle: Handle, ids: &[u32]) -> i32 {
    let num_partitions = u32::try_from(ids.len()).unwrap();
    let mut list = ActivatedList { version: abi::ACTIVATED_LIST, num_partitions, ids: [0; abi::MOST_PARTITIONS] };
    list.ids[..ids.len()].copy_from_slice(ids);
    // SAFETY: a whole list.
    unsafe { fmSetActivatedFabricPartitions(handle, &raw mut list) }
}

/// How many GPUs and switches.
pub(crate) fn failed(handle: Handle) -> Result<(u32, u32), i32> {
    // SAFETY: numbers and bytes, of which zeros are valid.
    let mut devices = unsafe { Box::<FailedDevices>::new_zeroed().assume_init() };
    devices.version = abi::FAILED_DEVICES;
    // SAFETY: a whole structure.
    let rc = unsafe { fmGetNvlinkFailedDevices(handle, &raw mut *devices) };
    result(rc, (devices.num_gpus, devices.num_switches))
}

/// Their numbers.
pub(crate) fn unsupported(handle: Handle) -> Result<Vec<u32>, i32> {
    // SAFETY: numbers, of which zeros are valid.
    let mut list = unsafe { Box::<abi::UnsupportedList>::new_zeroed().assume_init() };
    list.version = abi::UNSUPPORTED_LIST;
    // SAFETY: a whole list.
    let rc = unsafe { fmGetUnsupportedFabricPartitions(handle, &raw mut *list) };
    let number = usize::try_from(list.num_partitions).unwrap();
    result(rc, list.partitions[..number].iter().map(|it| it.id).collect())
}
