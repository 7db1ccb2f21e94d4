//! A runtime process for unit tests: a thread that replies to calls.

use std::sync::{Arc, Mutex, PoisonError};

use firstlight_runtime::{Call, Done, Failure, FailureKind, FromRuntime, MAX_REQUEST, Request, receive, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::runtime::Runtime;

/// The reply to a call.
pub(crate) type Answer = Result<Done, Failure>;

/// Runs a test on a runtime of tokio.
pub(crate) fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Returns an error of the runtime.
pub(crate) fn failure(kind: FailureKind, message: &str) -> Answer {
    Err(Failure { kind, message: message.to_owned() })
}

/// Returns the client of a runtime that replies with `answer`.
pub(crate) fn runtime(mut answer: impl FnMut(&Call) -> Answer + Send + 'static) -> Arc<Runtime> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    std::thread::spawn(move || {
        let mut buffer = vec![0; MAX_REQUEST];
        while let Ok((len @ 1.., _)) = receive(&theirs, &mut buffer) {
            let Request { id, call } = serde_json::from_slice(&buffer[..len]).unwrap();
            let reply = FromRuntime::Reply { id, result: answer(&call) };
            send(&theirs, &serde_json::to_vec(&reply).unwrap(), &[]).unwrap();
        }
    });
    let runtime = Runtime::new(ours).unwrap();
    let serving = Arc::clone(&runtime);
    tokio::spawn(async move { serving.serve(|_, _, _| {}).await });
    runtime
}

/// The calls that a runtime has received.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    /// Records a call.
    pub(crate) fn add(&self, call: &Call) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call.clone());
    }

    /// Removes and returns the calls so far.
    pub(crate) fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
