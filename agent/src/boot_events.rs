//! Events for PID 1's boot record.

use firstlight_init_control::ToInit;
use tokio::sync::mpsc;

use crate::clock::now_us;

/// Adds events to the boot record. Without PID 1 there is no record, and events are discarded.
#[derive(Debug, Clone, Default)]
pub struct BootEvents(Option<mpsc::UnboundedSender<ToInit>>);

impl BootEvents {
    /// Creates a sink that sends events to this queue of messages to PID 1.
    #[must_use]
    pub fn new(messages: mpsc::UnboundedSender<ToInit>) -> Self {
        Self(Some(messages))
    }

    /// Adds an event; never blocks.
    pub fn add(&self, kind: &str, object: &str, detail: &str) {
        let Some(messages) = &self.0 else { return };
        let (kind, object, detail) = (kind.to_owned(), object.to_owned(), detail.to_owned());
        // Fails only after the connection was lost, which has been logged.
        let _ = messages.send(ToInit::Event { at_us: now_us(), kind, object, detail });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The events that were added, as `kind object detail`.
    pub(crate) struct Recorded(mpsc::UnboundedReceiver<ToInit>);

    impl Recorded {
        /// Creates a sink and its recorder.
        pub(crate) fn new() -> (BootEvents, Self) {
            let (sender, receiver) = mpsc::unbounded_channel();
            (BootEvents::new(sender), Self(receiver))
        }

        /// Removes and returns the events so far.
        pub(crate) fn take(&mut self) -> Vec<String> {
            let next = |messages: &mut mpsc::UnboundedReceiver<ToInit>| messages.try_recv().ok();
            let all = std::iter::from_fn(|| next(&mut self.0));
            all.map(|message| match message {
                ToInit::Event { kind, object, detail, .. } => format!("{kind} {object} {detail}").trim_end().to_owned(),
                other => panic!("not an event: {other:?}"),
            })
            .collect()
        }
    }

    #[test]
    fn events_are_sent_in_order_or_discarded_without_pid_1() {
        let (events, mut recorded) = Recorded::new();
        events.add("container-created", "c1", "");
        events.clone().add("container-exited", "c1", "code 3");
        assert_eq!(recorded.take(), ["container-created c1", "container-exited c1 code 3"]);
        drop(recorded);
        events.add("container-created", "c2", "");
        BootEvents::default().add("container-created", "c3", "");
    }
}
