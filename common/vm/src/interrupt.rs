//! Cancellation by signals.

use tokio::signal::unix::{SignalKind, signal};

/// The signal that cancelled the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted(pub i32);

impl Interrupted {
    /// Returns the exit status by shell convention, 128 plus the signal number.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        u8::try_from(128 + self.0).unwrap_or(u8::MAX)
    }
}

/// Runs `work` until it ends or SIGINT, SIGTERM or SIGHUP arrives. A signal drops
/// `work` and everything it owns: machines, daemons, directories.
///
/// # Errors
/// The signal that arrived.
pub async fn or_interrupted<T>(work: impl Future<Output = T>) -> Result<T, Interrupted> {
    let wait = async |kind: SignalKind| match signal(kind) {
        Ok(mut stream) => {
            stream.recv().await;
            Interrupted(kind.as_raw_value())
        }
        // Without a handler the default action ends the process.
        Err(_) => std::future::pending().await,
    };
    tokio::select! {
        result = work => Ok(result),
        signal = wait(SignalKind::interrupt()) => Err(signal),
        signal = wait(SignalKind::terminate()) => Err(signal),
        signal = wait(SignalKind::hangup()) => Err(signal),
    }
}
