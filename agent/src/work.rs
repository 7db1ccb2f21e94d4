//! Work that is finished even if nobody waits for it.
//!
//! ttrpc drops a handler when its deadline passes or its connection ends.
//! Whatever changes something therefore runs in a task of its own.

use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// Runs `job` to its end.
///
/// # Errors
/// The job's own.
pub async fn whole<T, J>(job: J) -> Result<T>
where
    T: Send + 'static,
    J: Future<Output = Result<T>> + Send + 'static,
{
    tokio::spawn(job).await.unwrap_or_else(|error| Err(Error::internal(format!("a task of the agent ended: {error}"))))
}

/// Runs `job` to its end, and `undo` after it if it went well and nobody waits
/// any more: what nobody knows of must not stay.
///
/// # Errors
/// The job's own.
pub async fn whole_or_undone<T, J, U, V>(job: J, undo: U) -> Result<T>
where
    T: Send + 'static,
    J: Future<Output = Result<T>> + Send + 'static,
    U: FnOnce(T) -> V + Send + 'static,
    V: Future<Output = ()> + Send,
{
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(async move {
        if let Err(Ok(made)) = sender.send(job.await) {
            undo(made).await;
        }
    });
    receiver.await.unwrap_or_else(|_| Err(Error::internal("a task of the agent ended")))
}

/// Runs something that may block, such as a mount of the host's share, beside the server.
///
/// # Errors
/// The function's own.
pub async fn blocking<T, F>(function: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let joined = tokio::task::spawn_blocking(function).await;
    joined.unwrap_or_else(|error| Err(Error::internal(format!("a task of the agent ended: {error}"))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(future)
    }

    #[test]
    fn a_dropped_waiter_has_the_work_undone_and_a_patient_one_has_not() {
        run(async {
            let undone = Arc::new(AtomicU32::new(0));
            let call = || {
                let undone = Arc::clone(&undone);
                whole_or_undone(
                    async {
                        tokio::time::sleep(Duration::from_secs(2)).await;
                        Ok(7)
                    },
                    move |value| async move {
                        undone.fetch_add(value, Ordering::Relaxed);
                    },
                )
            };
            assert_eq!(call().await, Ok(7));
            assert!(tokio::time::timeout(Duration::from_secs(1), call()).await.is_err());
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert_eq!(undone.load(Ordering::Relaxed), 7);
        });
    }
}
