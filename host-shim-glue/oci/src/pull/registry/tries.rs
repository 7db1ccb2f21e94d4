//! Asking again, and when not.

use std::time::Duration;

use firstlight_progress::{Progress, seconds};

use super::super::error::Error;

/// What an attempt ended with.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Another attempt may do better, after this time if the registry says so.
    Passing { why: String, wait: Option<Duration> },
    /// No other attempt would.
    Final(Error),
}

/// How often a registry is asked again, and after what time.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Attempts that bring nothing, in all.
    pub attempts: u32,
    /// Before the second attempt; doubled before every further one.
    pub wait: Duration,
    /// At most, also if the registry asks for more.
    pub longest: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { attempts: 5, wait: Duration::from_secs(1), longest: Duration::from_secs(30) }
    }
}

/// An attempt that brought this much is none of those that are counted: a
/// large layer comes through a bad line in parts, and there are only so many.
const WORTHWHILE: u64 = 16 << 20;

/// The attempts at one thing.
#[derive(Debug)]
pub(crate) struct Tries {
    patience: Patience,
    progress: Progress,
    made: u32,
    worthwhile: bool,
}

impl Tries {
    pub(crate) fn new(patience: Patience, progress: Progress) -> Self {
        Self { patience, progress, made: 0, worthwhile: false }
    }

    /// The attempt brought so many bytes.
    pub(crate) fn brought(&mut self, bytes: u64) {
        self.worthwhile = bytes >= WORTHWHILE;
    }

    /// How long to wait before the next attempt; `None` if there is none.
    fn next(&mut self, wait: Option<Duration>) -> Option<Duration> {
        if !std::mem::take(&mut self.worthwhile) {
            self.made += 1;
        }
        if self.made >= self.patience.attempts {
            return None;
        }
        let doubled = self.patience.wait.saturating_mul(1 << self.made.saturating_sub(1).min(16));
        Some(wait.unwrap_or(doubled).max(doubled).min(self.patience.longest))
    }

    /// Waits for the next attempt, or says that there is none.
    pub(crate) fn after(&mut self, trouble: Trouble, object: &str) -> Result<(), Error> {
        let (why, wait) = match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Passing { why, wait } => (why, wait),
        };
        match self.next(wait) {
            Some(wait) => {
                self.progress.say(format_args!("{object}: {why}; once more in {}", seconds(wait)));
                std::thread::sleep(wait);
                Ok(())
            }
            None => Err(Error::Transfer { object: object.to_owned(), attempts: self.made, why }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(attempts: u32) -> Tries {
        let patience = Patience { attempts, wait: Duration::from_secs(1), longest: Duration::from_secs(5) };
        Tries::new(patience, Progress::quiet())
    }

    #[test]
    fn waits_grow_and_end() {
        let mut five = tries(5);
        let waits: Vec<_> = std::iter::from_fn(|| five.next(None)).map(|wait| wait.as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 5]);
        let mut asked = tries(3);
        assert_eq!(asked.next(Some(Duration::from_secs(3))), Some(Duration::from_secs(3)));
        assert_eq!(asked.next(Some(Duration::from_secs(9000))), Some(Duration::from_secs(5)));
        assert_eq!(asked.next(None), None);
        assert_eq!(tries(1).next(None), None);
    }

    #[test]
    fn what_brings_much_is_not_counted() {
        let mut two = tries(2);
        for _ in 0..10 {
            two.brought(WORTHWHILE);
            assert!(two.next(None).is_some());
        }
        two.brought(WORTHWHILE - 1);
        assert!(two.next(None).is_some());
        assert!(two.next(None).is_none());
    }

    #[test]
    fn what_is_final_is_not_tried_again() {
        let denied = Error::Denied { object: "x".into(), why: "no".into() };
        assert!(matches!(tries(9).after(Trouble::Final(denied), "x"), Err(Error::Denied { .. })));
        let passing = Trouble::Passing { why: "cut".into(), wait: None };
        let error = tries(1).after(passing, "x").unwrap_err().to_string();
        assert!(error.contains("gave up after 1 attempts: cut"), "{error}");
    }
}
