//! Runs work to completion even if the caller disconnects.
//!
//! ttrpc drops a handler when its deadline passes or its connection closes. Every change of state
//! therefore runs in a task of its own.

use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// Runs `job` to completion.
///
/// # Errors
/// Errors of `job`.
pub async fn to_completion<T, J>(job: J) -> Result<T>
where
    T: Send + 'static,
    J: Future<Output = Result<T>> + Send + 'static,
{
    tokio::spawn(job)
        .await
        .unwrap_or_else(|error| Err(Error::internal(format!("a task of the agent panicked or was cancelled: {error}"))))
}

/// Runs `job` to completion, and then `undo` if it succeeded and the caller has disconnected: a
/// result that no caller learns of must not stay.
///
/// # Errors
/// Errors of `job`.
pub async fn to_completion_or_undo<T, J, U, V>(job: J, undo: U) -> Result<T>
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
    receiver.await.unwrap_or_else(|_| Err(Error::internal("a task of the agent panicked or was cancelled")))
}

/// Runs blocking work, such as a mount of the host's share, in the blocking thread pool.
///
/// # Errors
/// Errors of `function`.
pub async fn blocking<T, F>(function: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let joined = tokio::task::spawn_blocking(function).await;
    joined
        .unwrap_or_else(|error| Err(Error::internal(format!("a task of the agent panicked or was cancelled: {error}"))))
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
    fn work_is_undone_only_if_its_caller_was_dropped() {
        run(async {
            let undone = Arc::new(AtomicU32::new(0));
            let call = || {
                let undone = Arc::clone(&undone);
                to_completion_or_undo(
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
