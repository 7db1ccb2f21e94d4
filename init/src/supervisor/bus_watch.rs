//! Watches the PCI bus: receives uevents, and requests bus scans and the load of the driver for the
//! first hotplugged GPU.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use firstlight_uevent::{MAX_MESSAGE, Uevent};

use super::effect::Effect;

/// Maximum number of uevents received per loop iteration.
const TURN: usize = 64;

/// The uevent socket and the state of bus scans.
#[derive(Debug, Default)]
pub(super) struct BusWatch {
    socket: Option<OwnedFd>,
    /// The receive buffer.
    buffer: Vec<u8>,
    /// Whether a bus scan is in progress.
    scanning: bool,
    /// Whether another scan is needed after the scan in progress.
    rescan: bool,
    /// Whether the driver is being loaded.
    loading: bool,
    /// Whether the guest is shutting down.
    stopped: bool,
}

impl BusWatch {
    /// Returns the descriptor to poll.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Opens the uevent socket, once, and requests a scan, which finds GPUs that were added before.
    pub(super) fn open(&mut self) -> Vec<Effect> {
        if self.socket.is_some() || self.stopped {
            return Vec::new();
        }
        let mut effects = Vec::new();
        match firstlight_uevent::open() {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => {
                let text = format!("failed to open the uevent socket: {error}; hotplugged GPUs are not detected");
                effects.push(Effect::event("hotplug-unavailable", "", text));
            }
        }
        effects.extend(self.request_scan());
        effects
    }

    /// Receives uevents; a uevent about a GPU requests a scan.
    pub(super) fn receive(&mut self) -> Option<Effect> {
        let socket = self.socket.as_ref()?;
        self.buffer.resize(MAX_MESSAGE, 0);
        let mut heard = false;
        for _ in 0..TURN {
            match firstlight_uevent::receive(socket, &mut self.buffer, is_about_a_gpu) {
                Ok(wanted) => heard |= wanted,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Closed, because poll would report the failed socket as ready in every loop
                    // iteration.
                    self.socket = None;
                    break;
                }
            }
        }
        heard.then(|| self.request_scan()).flatten()
    }

    /// Requests a scan; while a scan is in progress, requests another one after it.
    pub(super) fn request_scan(&mut self) -> Option<Effect> {
        if self.scanning || self.stopped {
            self.rescan = true;
            return None;
        }
        (self.scanning, self.rescan) = (true, false);
        Some(Effect::ScanBus)
    }

    /// Handles the end of a scan.
    pub(super) fn scan_ended(&mut self) {
        self.scanning = false;
    }

    /// Returns the next scan if one was requested during the last one.
    pub(super) fn next_scan(&mut self) -> Option<Effect> {
        self.rescan.then(|| self.request_scan()).flatten()
    }

    /// Requests the load of the driver, unless it is being loaded.
    pub(super) fn request_driver(&mut self) -> Option<Effect> {
        (!std::mem::replace(&mut self.loading, true)).then_some(Effect::LoadDriver)
    }

    /// Handles the end of the driver's load. The init function of the module binds all GPUs on the
    /// bus; the next scan finds them bound.
    pub(super) fn driver_load_ended(&mut self) -> Option<Effect> {
        self.loading = false;
        self.request_scan()
    }

    /// Stops watching: no further scan starts.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
    }
}

/// Returns whether a uevent is about an NVIDIA function of the display class.
fn is_about_a_gpu(event: &Uevent<'_>) -> bool {
    let starts = |name: &str, start: &str| event.variable(name).is_some_and(|value| value.starts_with(start));
    event.subsystem == "pci" && starts("PCI_ID", "10DE:") && starts("PCI_CLASS", "3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_during_a_scan_are_one_scan_after_it() {
        let mut bus = BusWatch::default();
        assert_eq!(bus.request_scan(), Some(Effect::ScanBus));
        assert_eq!((bus.request_scan(), bus.request_scan()), (None, None));
        bus.scan_ended();
        assert_eq!(bus.next_scan(), Some(Effect::ScanBus));
        bus.scan_ended();
        assert_eq!(bus.next_scan(), None);
    }

    #[test]
    fn driver_is_loaded_once_at_a_time_and_followed_by_a_scan() {
        let mut bus = BusWatch::default();
        assert_eq!(bus.request_driver(), Some(Effect::LoadDriver));
        assert_eq!(bus.request_driver(), None);
        assert_eq!(bus.driver_load_ended(), Some(Effect::ScanBus));
        assert_eq!(bus.request_driver(), Some(Effect::LoadDriver));
    }

    #[test]
    fn shutdown_starts_no_scan() {
        let mut bus = BusWatch::default();
        bus.stop();
        assert_eq!((bus.open(), bus.request_scan()), (Vec::new(), None));
        bus.scan_ended();
        assert_eq!(bus.next_scan(), None);
    }
}
