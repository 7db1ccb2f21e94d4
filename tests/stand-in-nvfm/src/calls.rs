//! The exported functions. Cargo features omit some of them.
#![allow(non_snake_case, reason = "the names are the interface's")]

use std::ptr;

use firstlight_fake_fm::call::{Call, Payload};
use firstlight_fake_fm::codes;

use crate::abi::{
    self, ActivatedList, ConnectParams1, ConnectParams2, FailedDevices, Handle, MAX_GPUS, MAX_PARTITIONS, MAX_SWITCHES,
    PciDevice, UnsupportedList,
};
use crate::address::Address;
use crate::fill::{self, TOO_MANY_GPUS, TOO_MANY_PARTITIONS};
use crate::library::{self, call};
use crate::variant::Variant;

/// Returns the version in the first field of a structure.
///
/// # Safety
/// `structure` is null or points to at least an aligned `u32`.
unsafe fn version_of<T>(structure: *const T) -> Result<u32, i32> {
    if structure.is_null() {
        return Err(codes::BAD_PARAM);
    }
    // SAFETY: not null, and the caller promises the rest.
    Ok(unsafe { structure.cast::<u32>().read() })
}

/// Returns the caller's structure if it has this version.
///
/// # Safety
/// As for [`version_of`].
unsafe fn is_version<T>(structure: *const T, version: u32) -> Result<(), i32> {
    library::ready()?;
    // SAFETY: the caller's promise.
    if unsafe { version_of(structure) }? == version { Ok(()) } else { Err(codes::VERSION_MISMATCH) }
}

/// Writes items to the beginning of an array.
///
/// # Safety
/// `array` points to at least `most` places that can be written to.
unsafe fn put<T>(array: *mut T, most: usize, items: impl Iterator<Item = T>) {
    for (at, item) in items.take(most).enumerate() {
        // SAFETY: `at` is less than `most`, and the caller promises that many places.
        unsafe { array.add(at).write(item) };
    }
}

fn simple(handle: Handle, call: Call) -> Result<(), i32> {
    library::send(handle.addr(), call).map(drop)
}

/// Initialises the library.
#[unsafe(no_mangle)]
pub extern "C" fn fmLibInit() -> i32 {
    call(|_| library::init())
}

/// Shuts the library down and closes all connections.
#[unsafe(no_mangle)]
pub extern "C" fn fmLibShutdown() -> i32 {
    call(|_| library::shutdown())
}

/// Connects to a manager.
///
/// # Safety
/// `params` is null or a structure of the version that it says; `out` is null or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmConnect(params: *mut ConnectParams2, out: *mut Handle) -> i32 {
    call(|variant| {
        library::ready()?;
        if out.is_null() {
            return Err(codes::BAD_PARAM);
        }
        // SAFETY: the caller's promise.
        let version = unsafe { version_of(params) }?;
        if version == abi::CONNECT_PARAMS_2 && variant == Variant::V575 {
            return Err(codes::VERSION_MISMATCH);
        }
        let (first, kind) = match version {
            abi::CONNECT_PARAMS_2 => {
                // SAFETY: not null, and of the version that has all these fields.
                let params = unsafe { params.read() };
                (params.first, params.address_type)
            }
            abi::CONNECT_PARAMS_1 => {
                // SAFETY: not null, and of the version that has the first fields only.
                let first = unsafe { params.cast::<ConnectParams1>().read() };
                (first, if first.address_is_unix_socket == 0 { abi::INET } else { abi::UNIX })
            }
            _ => return Err(codes::VERSION_MISMATCH),
        };
        let address = Address::parse(kind, &first.address)?;
        let handle = library::connect(&address, first.timeout_ms)?;
        // SAFETY: not null, and the caller promises that it can be written to.
        unsafe { out.write(ptr::without_provenance_mut(handle)) };
        Ok(())
    })
}

/// Closes one connection.
#[unsafe(no_mangle)]
pub extern "C" fn fmDisconnect(handle: Handle) -> i32 {
    call(|_| library::disconnect(handle.addr()))
}

/// Lists the supported partitions.
///
/// # Safety
/// `out` is null or a structure of the version that it says, which can be written to.
#[cfg_attr(not(feature = "no-list"), unsafe(no_mangle))]
pub unsafe extern "C" fn fmGetSupportedFabricPartitions(handle: Handle, out: *mut abi::PartitionList) -> i32 {
    call(|variant| {
        // SAFETY: the caller's promise.
        unsafe { is_version(out, abi::PARTITION_LIST) }?;
        let Payload::List { partitions, most } = library::send(handle.addr(), Call::List)? else {
            return Err(codes::GENERIC_ERROR);
        };
        let number = fill::count(partitions.len().min(MAX_PARTITIONS));
        let infos = partitions.iter().map(|it| fill::partition(variant, it));
        // SAFETY: a list of this version, by the caller's promise; `put` stays within its array.
        unsafe {
            (&raw mut (*out).num_partitions).write(variant.count(number, TOO_MANY_PARTITIONS));
            (&raw mut (*out).max_num_partitions).write(most);
            put((&raw mut (*out).partitions).cast(), MAX_PARTITIONS, infos);
        }
        Ok(())
    })
}

/// Activates a partition.
#[unsafe(no_mangle)]
pub extern "C" fn fmActivateFabricPartition(handle: Handle, id: u32) -> i32 {
    call(|_| simple(handle, Call::Activate(id)))
}

/// Activates a partition with virtual functions, in a mode that the manager does not have.
///
/// # Safety
/// `vfs` is null or points to `num_vfs` structures; nothing is read.
#[cfg_attr(not(feature = "no-unsupported"), unsafe(no_mangle))]
pub unsafe extern "C" fn fmActivateFabricPartitionWithVFs(
    handle: Handle,
    id: u32,
    vfs: *mut PciDevice,
    num_vfs: u32,
) -> i32 {
    call(|_| {
        library::ready()?;
        if vfs.is_null() || num_vfs == 0 || num_vfs > fill::count(MAX_GPUS) {
            return Err(codes::BAD_PARAM);
        }
        simple(handle, Call::ActivateWithVfs(id))
    })
}

/// Deactivates a partition.
#[unsafe(no_mangle)]
pub extern "C" fn fmDeactivateFabricPartition(handle: Handle, id: u32) -> i32 {
    call(|_| simple(handle, Call::Deactivate(id)))
}

/// Sends the list of active partitions after a restart.
///
/// # Safety
/// `list` is null or a structure of the version that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmSetActivatedFabricPartitions(handle: Handle, list: *mut ActivatedList) -> i32 {
    call(|_| {
        // SAFETY: the caller's promise.
        unsafe { is_version(list, abi::ACTIVATED_LIST) }?;
        // SAFETY: not null, and a list of this version.
        let list = unsafe { list.read() };
        let number = usize::try_from(list.num_partitions).unwrap_or(usize::MAX);
        let ids = list.ids.get(..number).ok_or(codes::BAD_PARAM)?;
        simple(handle, Call::SetActivated(ids.to_vec()))
    })
}

/// Lists devices with failed links.
///
/// # Safety
/// `out` is null or a structure of the version that it says, which can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmGetNvlinkFailedDevices(handle: Handle, out: *mut FailedDevices) -> i32 {
    call(|variant| {
        // SAFETY: the caller's promise.
        unsafe { is_version(out, abi::FAILED_DEVICES) }?;
        let Payload::FailedDevices { gpus, switches } = library::send(handle.addr(), Call::FailedDevices)? else {
            return Err(codes::GENERIC_ERROR);
        };
        let num_gpus = fill::count(gpus.len().min(MAX_GPUS));
        let num_switches = fill::count(switches.len().min(MAX_SWITCHES));
        let of_variant = |it| fill::failed(variant, it);
        // SAFETY: a structure of this version, by the caller's promise; `put` stays within its arrays.
        unsafe {
            (&raw mut (*out).num_gpus).write(variant.count(num_gpus, TOO_MANY_GPUS));
            (&raw mut (*out).num_switches).write(num_switches);
            put((&raw mut (*out).gpus).cast(), MAX_GPUS, gpus.iter().map(of_variant));
            put((&raw mut (*out).switches).cast(), MAX_SWITCHES, switches.iter().map(of_variant));
        }
        Ok(())
    })
}

/// Lists partitions that failures made unavailable.
///
/// # Safety
/// `out` is null or a structure of the version that it says, which can be written to.
#[cfg_attr(not(feature = "no-unsupported"), unsafe(no_mangle))]
pub unsafe extern "C" fn fmGetUnsupportedFabricPartitions(handle: Handle, out: *mut UnsupportedList) -> i32 {
    call(|variant| {
        // SAFETY: the caller's promise.
        unsafe { is_version(out, abi::UNSUPPORTED_LIST) }?;
        let Payload::Unsupported(lost) = library::send(handle.addr(), Call::Unsupported)? else {
            return Err(codes::GENERIC_ERROR);
        };
        let number = fill::count(lost.len().min(MAX_PARTITIONS));
        let infos = lost.iter().map(|it| fill::unsupported(variant, it));
        // SAFETY: a list of this version, by the caller's promise; `put` stays within its array.
        unsafe {
            (&raw mut (*out).num_partitions).write(variant.count(number, TOO_MANY_PARTITIONS));
            put((&raw mut (*out).partitions).cast(), MAX_PARTITIONS, infos);
        }
        Ok(())
    })
}
