//! The library's global state.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_fake_fm::call::{Call, Payload};
use firstlight_fake_fm::codes;

use crate::address::Address;
use crate::connection::Connection;
use crate::variant::Variant;

struct Library {
    /// The last handle; handles are never reused.
    last: usize,
    connections: BTreeMap<usize, Arc<Connection>>,
}

static LIBRARY: Mutex<Option<Library>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Library>> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call and converts its result, or a panic, to a code.
pub(crate) fn call(work: impl FnOnce(Variant) -> Result<(), i32>) -> i32 {
    let guarded = AssertUnwindSafe(|| match Variant::now() {
        None => Err(codes::GENERIC_ERROR),
        Some(Variant::Version6) => Err(codes::VERSION_MISMATCH),
        Some(variant) => work(variant).map_err(|rc| variant.code(rc)),
    });
    match catch_unwind(guarded) {
        Ok(Ok(())) => codes::SUCCESS,
        Ok(Err(rc)) => rc,
        // Nothing may unwind into C.
        Err(_) => codes::GENERIC_ERROR,
    }
}

pub(crate) fn init() -> Result<(), i32> {
    match &mut *lock() {
        Some(_) => Err(codes::IN_USE),
        none => {
            *none = Some(Library { last: 0, connections: BTreeMap::new() });
            Ok(())
        }
    }
}

pub(crate) fn shutdown() -> Result<(), i32> {
    let library = lock().take().ok_or(codes::UNINITIALIZED)?;
    library.connections.values().for_each(|connection| connection.close());
    Ok(())
}

/// Whether the library is initialised.
pub(crate) fn ready() -> Result<(), i32> {
    if lock().is_some() { Ok(()) } else { Err(codes::UNINITIALIZED) }
}

/// Allocates a handle.
pub(crate) fn connect(address: &Address, timeout_ms: u32) -> Result<usize, i32> {
    let connection = Connection::open(address, timeout_ms).map_err(|_| codes::CONNECTION_NOT_VALID)?;
    let mut library = lock();
    let library = library.as_mut().ok_or(codes::UNINITIALIZED)?;
    library.last += 1;
    library.connections.insert(library.last, Arc::new(connection));
    Ok(library.last)
}

pub(crate) fn disconnect(handle: usize) -> Result<(), i32> {
    let mut library = lock();
    let library = library.as_mut().ok_or(codes::UNINITIALIZED)?;
    library.connections.remove(&handle).ok_or(codes::BAD_PARAM)?.close();
    Ok(())
}

/// Sends a call to the manager, without blocking other calls.
pub(crate) fn send(handle: usize, call: Call) -> Result<Payload, i32> {
    let connection = {
        let library = lock();
        let library = library.as_ref().ok_or(codes::UNINITIALIZED)?;
        Arc::clone(library.connections.get(&handle).ok_or(codes::BAD_PARAM)?)
    };
    let reply = connection.call(call).map_err(|_| codes::CONNECTION_NOT_VALID)?;
    if reply.rc == codes::SUCCESS { Ok(reply.payload) } else { Err(reply.rc) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_returns_an_error_code() {
        assert_eq!(call(|_| panic!("in a call")), -2);
        assert_eq!(call(|_| Err(-17)), -17);
        assert_eq!(call(|_| Ok(())), 0);
    }
}
