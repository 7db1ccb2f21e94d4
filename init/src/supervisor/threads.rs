//! Threads of the main loop and the channel through which they send messages.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use firstlight_pci::Address;
use rustix::event::{EventfdFlags, eventfd};

use super::effect::ModuleRequest;
use crate::actions::Report;
use crate::hotplug::BusSnapshot;
use crate::open::Answer;
use crate::shutdown;
use crate::unit_id::UnitId;

/// Stack size of a thread, bytes. It reserves address space; only pages that are touched use
/// memory.
pub(super) const STACK: usize = 128 << 10;

/// A message from a thread to the loop.
#[derive(Debug)]
pub(super) enum Message {
    /// A unit's action ended; the number is the processor time of its thread, µs.
    Unit(UnitId, Report, u64),
    /// The device node of a GPU is open, and the driver is initialising the GPU.
    Opened(Address),
    /// An attach attempt ended; the number is the processor time of its thread, µs.
    Attach(Address, Answer, u64),
    /// The result of loading a kernel module for a client.
    Module(ModuleRequest, Result<String, String>),
    /// The result of a PCI bus scan.
    BusScanned(Result<BusSnapshot, String>),
    /// The result of loading the driver for a hotplugged GPU.
    Driver(Result<String, String>),
    /// The minor number of a hotplugged GPU's device node, or the error of its creation.
    Node(Address, Result<u32, String>),
    /// A shutdown thread has ended.
    Shutdown(shutdown::Event),
}

/// The sending side of the loop's channel.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    sender: Sender<Message>,
    bell: Arc<OwnedFd>,
}

impl Outbox {
    /// Sends a message and wakes the loop.
    pub(super) fn send(&self, message: Message) {
        // Errors are ignored: the loop holds the other ends of the channel and of the eventfd until
        // the VM ends.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// The channel from all threads to the loop.
#[derive(Debug)]
pub(super) struct Threads {
    inbox: Receiver<Message>,
    outbox: Outbox,
}

impl Threads {
    /// Creates the channel and its eventfd.
    ///
    /// # Errors
    /// The kernel could not create the eventfd.
    pub(super) fn new() -> std::io::Result<Self> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, inbox) = channel();
        Ok(Self { inbox, outbox: Outbox { sender, bell } })
    }

    /// Returns the eventfd, which is readable when messages are queued.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.outbox.bell.as_fd()
    }

    /// Clears the eventfd. The caller receives messages only afterwards, so that no wakeup is lost.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.outbox.bell, &mut count);
    }

    /// Receives the next message, if one is queued.
    pub(super) fn receive(&self) -> Option<Message> {
        self.inbox.try_recv().ok()
    }

    /// Sends a message to the loop itself.
    pub(super) fn send(&self, message: Message) {
        self.outbox.send(message);
    }

    /// Runs `work` on a thread that can send messages.
    ///
    /// # Errors
    /// The thread could not be started.
    pub(super) fn spawn(&self, name: String, work: impl FnOnce(&Outbox) + Send + 'static) -> Result<(), String> {
        let outbox = self.outbox.clone();
        let thread = std::thread::Builder::new().name(name).stack_size(STACK);
        let spawned = thread.spawn(move || work(&outbox));
        spawned.map(drop).map_err(|error| format!("cannot start a thread: {error}; is memory short?"))
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn message_of_a_thread_wakes_the_loop() {
        let threads = Threads::new().unwrap();
        assert!(threads.receive().is_none());
        let work = |outbox: &Outbox| outbox.send(Message::Shutdown(shutdown::Event::Synced));
        threads.spawn("x".to_owned(), work).unwrap();
        let mut fds = [PollFd::from_borrowed_fd(threads.descriptor(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, None).unwrap(), 1);
        threads.clear();
        assert!(matches!(threads.receive(), Some(Message::Shutdown(shutdown::Event::Synced))));
    }
}
