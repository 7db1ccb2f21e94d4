//! Retries of failed requests.

use std::time::Duration;

use firstlight_progress::{Progress, seconds};

use super::super::error::PullError;

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) enum AttemptError {
    /// A temporary error: a retry may succeed, after `retry_after` if the registry sent one.
    Temporary { reason: String, retry_after: Option<Duration> },
    /// A permanent error: a retry would fail as well.
    Permanent(PullError),
}

impl AttemptError {
    pub(crate) fn temporary(reason: impl Into<String>) -> Self {
        Self::Temporary { reason: reason.into(), retry_after: None }
    }
}

/// How often and when a failed request is repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// The maximum number of attempts, without those that transferred at least 16 MiB.
    pub attempts: u32,
    /// The delay before the second attempt; doubled for every further one.
    pub first_delay: Duration,
    /// The maximum delay, also if the registry requests a longer one.
    pub max_delay: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts: 5, first_delay: Duration::from_secs(1), max_delay: Duration::from_secs(30) }
    }
}

/// An attempt that transferred at least this much does not count: a large layer may need
/// many attempts on a connection that often breaks, and each of them makes progress.
const SIGNIFICANT_PROGRESS: u64 = 16 << 20;

/// The attempts of one transfer.
#[derive(Debug)]
pub(crate) struct Attempts {
    policy: RetryPolicy,
    progress: Progress,
    failed: u32,
    made_progress: bool,
}

impl Attempts {
    pub(crate) fn new(policy: RetryPolicy, progress: Progress) -> Self {
        Self { policy, progress, failed: 0, made_progress: false }
    }

    /// Records how many bytes the current attempt transferred.
    pub(crate) fn record_transferred(&mut self, bytes: u64) {
        self.made_progress = bytes >= SIGNIFICANT_PROGRESS;
    }

    /// Returns the delay before the next attempt; `None` if there is none.
    fn next_delay(&mut self, retry_after: Option<Duration>) -> Option<Duration> {
        if !std::mem::take(&mut self.made_progress) {
            self.failed += 1;
        }
        if self.failed >= self.policy.attempts {
            return None;
        }
        let backoff = self.policy.first_delay.saturating_mul(1 << self.failed.saturating_sub(1).min(16));
        Some(retry_after.unwrap_or(backoff).max(backoff).min(self.policy.max_delay))
    }

    /// Waits before the next attempt; returns the error if there is none.
    pub(crate) fn wait_after(&mut self, error: AttemptError, object: &str) -> Result<(), PullError> {
        let (reason, retry_after) = match error {
            AttemptError::Permanent(error) => return Err(error),
            AttemptError::Temporary { reason, retry_after } => (reason, retry_after),
        };
        match self.next_delay(retry_after) {
            Some(delay) => {
                self.progress.say(format_args!("{object}: {reason}; retry in {}", seconds(delay)));
                std::thread::sleep(delay);
                Ok(())
            }
            None => Err(PullError::Transfer { object: object.to_owned(), attempts: self.failed, reason }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts(attempts: u32) -> Attempts {
        let (first_delay, max_delay) = (Duration::from_secs(1), Duration::from_secs(5));
        Attempts::new(RetryPolicy { attempts, first_delay, max_delay }, Progress::quiet())
    }

    #[test]
    fn delays_are_doubled_and_bounded() {
        let mut five = attempts(5);
        let delays: Vec<_> = std::iter::from_fn(|| five.next_delay(None)).map(|delay| delay.as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 5]);
        let mut three = attempts(3);
        assert_eq!(three.next_delay(Some(Duration::from_secs(3))), Some(Duration::from_secs(3)));
        assert_eq!(three.next_delay(Some(Duration::from_secs(9000))), Some(Duration::from_secs(5)));
        assert_eq!(three.next_delay(None), None);
        assert_eq!(attempts(1).next_delay(None), None);
    }

    #[test]
    fn attempt_with_significant_progress_does_not_count() {
        let mut two = attempts(2);
        for _ in 0..10 {
            two.record_transferred(SIGNIFICANT_PROGRESS);
            assert!(two.next_delay(None).is_some());
        }
        two.record_transferred(SIGNIFICANT_PROGRESS - 1);
        assert!(two.next_delay(None).is_some());
        assert!(two.next_delay(None).is_none());
    }

    #[test]
    fn permanent_error_is_not_retried() {
        let denied = PullError::Denied { object: "x".into(), reason: "no".into() };
        let result = attempts(9).wait_after(AttemptError::Permanent(denied), "x");
        assert!(matches!(result, Err(PullError::Denied { .. })));
        let error = attempts(1).wait_after(AttemptError::temporary("cut"), "x").unwrap_err().to_string();
        assert!(error.contains("gave up after 1 attempts: cut"), "{error}");
    }
}
