//! Shutdown: its stages, the objects that miss their deadline, and power-off or reboot.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firstlight_pci::Address;
use rustix::system::{RebootCommand, reboot};

use super::threads::STACK;
use crate::clock::{micros, ms};
use crate::console::write_final_message;
use crate::shutdown::{Effect, Event, Goal, Shutdown};

/// Time after the shutdown deadline at which the watchdog thread powers off or reboots.
const LAST_RESORT: Duration = Duration::from_secs(2);

/// Maximum number of processes named in the report of the `Processes` stage.
pub(super) const MOST_NAMES: usize = 8;

/// An object that did not end in time, and the one-line report about it.
pub(super) type Late = (String, String);

/// The shutdown, if one has begun.
#[derive(Debug, Default)]
pub(super) struct Power {
    shutdown: Option<InProgress>,
}

#[derive(Debug)]
struct InProgress {
    machine: Shutdown,
    begin_us: u64,
    /// The GPUs that the release thread closes, in this order.
    gpus: Vec<Address>,
    /// Number of GPUs that are closed.
    closed: Arc<AtomicUsize>,
    /// Objects that did not end in time.
    left: Vec<String>,
}

impl Power {
    /// Returns whether a shutdown has begun.
    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// Returns when [`Power::clock`] is due next, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.shutdown.as_ref().and_then(|shutdown| shutdown.machine.next_deadline())
    }

    /// Begins a shutdown; returns `false` if one has already begun.
    pub(super) fn begin(&mut self, now: u64, goal: Goal, total: Duration) -> bool {
        if self.is_shutting_down() {
            return false;
        }
        self.shutdown = Some(InProgress {
            machine: Shutdown::new(goal, micros(total)),
            begin_us: now,
            gpus: Vec::new(),
            closed: Arc::default(),
            left: Vec::new(),
        });
        true
    }

    /// Passes an event to the shutdown state machine; does nothing before the shutdown has begun.
    pub(super) fn step(&mut self, now: u64, event: Event) -> Vec<Effect> {
        self.shutdown.as_mut().map(|shutdown| shutdown.machine.step(now, event)).unwrap_or_default()
    }

    /// Ends the stage in progress if its share of the deadline has passed.
    pub(super) fn clock(&mut self, now: u64) -> Vec<Effect> {
        if self.next_deadline().is_some_and(|at| at <= now) { self.step(now, Event::Clock) } else { Vec::new() }
    }

    /// Records the GPUs that are about to be closed; returns the counter of closed GPUs, which the
    /// release thread increments.
    pub(super) fn releasing(&mut self, gpus: Vec<Address>) -> Arc<AtomicUsize> {
        let Some(shutdown) = &mut self.shutdown else { return Arc::default() };
        shutdown.gpus = gpus;
        Arc::clone(&shutdown.closed)
    }

    /// Returns the GPU whose close has not returned within `after` µs, if there is one. The GPUs
    /// after it in the order are not closed yet.
    pub(super) fn late_gpus(&self, after: u64) -> Vec<Late> {
        let Some(shutdown) = &self.shutdown else { return Vec::new() };
        let held = shutdown.gpus.get(shutdown.closed.load(Ordering::Relaxed)..).unwrap_or_default();
        let (after, more) = (ms(after), held.len().saturating_sub(1));
        let text = |pci: &Address| {
            (
                pci.to_string(),
                format!("closing it did not return from the driver within {after} ms; {more} GPUs wait for it"),
            )
        };
        held.first().map(text).into_iter().collect()
    }

    /// Records the name of an object that did not end in time, for the summary.
    pub(super) fn left_behind(&mut self, object: String) {
        if let Some(shutdown) = &mut self.shutdown {
            shutdown.left.push(object);
        }
    }

    /// Returns the duration of the shutdown and the names of the objects that did not end in time.
    pub(super) fn summary(&self, now: u64) -> String {
        let Some(shutdown) = &self.shutdown else { return String::new() };
        let left =
            if shutdown.left.is_empty() { String::new() } else { format!("; left: {}", shutdown.left.join(", ")) };
        format!("after {} ms{left}", ms(now.saturating_sub(shutdown.begin_us)))
    }
}

/// Returns the report about an agent that did not exit within `after` µs of SIGTERM.
pub(super) fn late_agent(pid: i32, after: u64) -> Vec<Late> {
    vec![("agent".to_owned(), format!("pid {pid} did not end within {} ms of SIGTERM", ms(after)))]
}

/// Returns the reports about daemons that did not stop within `after` µs.
pub(super) fn late_daemons(names: Vec<&str>, after: u64) -> Vec<Late> {
    let text = format!("not stopped within {} ms for all daemons; it is killed", ms(after));
    names.into_iter().map(|name| (name.to_owned(), text.clone())).collect()
}

/// Returns the reports about processes that still exist `after` µs after SIGKILL.
pub(super) fn late_processes(names: Vec<String>, after: u64) -> Vec<Late> {
    let text = format!("killed, and still there {} ms later: the kernel holds it", ms(after));
    names.into_iter().map(|name| (name, text.clone())).collect()
}

/// Returns the report about file systems that were not synced within `after` µs.
pub(super) fn late_files(after: u64) -> Vec<Late> {
    let text = format!("not written within {} ms; what was not written is lost", ms(after));
    vec![("file-systems".to_owned(), text)]
}

/// Returns the kind of the boot record's last event and the reboot(2) command.
fn command(goal: Goal) -> (&'static str, RebootCommand) {
    match goal {
        Goal::PowerOff => ("power-off", RebootCommand::PowerOff),
        Goal::Reboot => ("reboot", RebootCommand::Restart),
    }
}

/// Returns the kind of the boot record's last event.
pub(super) fn last_event(goal: Goal) -> &'static str {
    command(goal).0
}

/// Powers off or reboots.
pub(super) fn end_machine(goal: Goal) -> ! {
    loop {
        // reboot(2) returns only if it fails, for example in a container without CAP_SYS_BOOT.
        let _ = reboot(command(goal).1);
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Starts a watchdog thread that powers off or reboots if the main loop has not done so in time.
pub(super) fn start_watchdog(goal: Goal, total: Duration) {
    let thread = std::thread::Builder::new().name("last-resort".to_owned()).stack_size(STACK);
    // If the thread cannot be started, shutdown continues without the watchdog.
    let _ = thread.spawn(move || {
        std::thread::sleep(total.saturating_add(LAST_RESORT));
        let what = command(goal).0;
        write_final_message(&format!("firstlight: PID 1 did not shut down within {total:?}; {what} without the rest"));
        end_machine(goal)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shutdown::Step;

    const TOTAL: Duration = Duration::from_secs(30);

    fn pci(bus: u8) -> Address {
        format!("0000:{bus:02x}:00.0").parse().unwrap()
    }

    #[test]
    fn shutdown_begins_once() {
        let mut power = Power::default();
        assert_eq!(power.step(0, Event::AgentGone), []);
        assert!(power.begin(5, Goal::PowerOff, TOTAL) && !power.begin(6, Goal::Reboot, TOTAL));
        assert_eq!(power.step(5, Event::Begin { agent: true }), [Effect::TerminateAgent]);
        assert_eq!(power.clock(5_000_004), []);
        assert!(matches!(power.clock(5_000_005)[..], [Effect::Late(Step::Agent, _), Effect::StopDaemons]));
    }

    #[test]
    fn gpu_that_is_not_closed_is_reported_with_the_waiting_ones() {
        let mut power = Power::default();
        power.begin(0, Goal::PowerOff, TOTAL);
        let closed = power.releasing(vec![pci(1), pci(2), pci(3)]);
        closed.store(1, Ordering::Relaxed);
        let late = power.late_gpus(8_000_000);
        assert_eq!((late.len(), late[0].0.as_str()), (1, "0000:02:00.0"));
        assert!(late[0].1.contains("within 8000 ms; 1 GPUs wait"), "{late:?}");
        closed.store(3, Ordering::Relaxed);
        assert!(power.late_gpus(8_000_000).is_empty());
    }

    #[test]
    fn summary_lists_remaining_objects() {
        let mut power = Power::default();
        power.begin(1_000_000, Goal::PowerOff, TOTAL);
        assert_eq!(power.summary(3_000_000), "after 2000 ms");
        power.left_behind("imex".to_owned());
        power.left_behind("agent".to_owned());
        assert_eq!(power.summary(3_000_000), "after 2000 ms; left: imex, agent");
    }

    #[test]
    fn late_objects_have_the_text_of_their_stage() {
        let rows = late_daemons(vec!["imex"], 14_000_000);
        assert_eq!(rows, [("imex".to_owned(), "not stopped within 14000 ms for all daemons; it is killed".to_owned())]);
        assert_eq!(late_agent(7, 5_000_000)[0].1, "pid 7 did not end within 5000 ms of SIGTERM");
        assert!(late_processes(Vec::new(), 1).is_empty() && late_files(1_000)[0].0 == "file-systems");
    }
}
