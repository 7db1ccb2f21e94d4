//! What every caller of the library has to do.

use std::ptr::null_mut;

use nvfm::abi::{self, ActivatedList, ConnectParams1, ConnectParams2, FailedDevices, Handle, PartitionList};
use nvfm::*;

use crate::manager::Manager;

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
    let mut list = ActivatedList { version: abi::ACTIVATED_LIST, num_partitions, ids: [0; abi::MAX_PARTITIONS] };
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
