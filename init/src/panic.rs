//! The panic hook of PID 1.

use firstlight_sys::process_mark::ProcessMark;
use rustix::process::{Pid, getpid};
use rustix::system::{RebootCommand, reboot};

use crate::console::write_final_message;

/// Installs a panic hook that writes one line and powers the VM off. Without it the exit of PID 1
/// would cause a kernel panic that hides the reason.
pub fn install() {
    // Without the mark a forked copy in a PID namespace of its own, which is process 1 there, could
    // not be recognised; there is none today.
    let own = ProcessMark::mark().ok();
    std::panic::set_hook(Box::new(move |info| {
        // A copy between fork and exec inherits this hook and must not use it. Checked first: a
        // copy must not allocate memory, because another thread of the original may have held the
        // allocator's lock.
        if getpid() != Pid::INIT || own.as_ref().is_some_and(|own| !own.is_original()) {
            return;
        }
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        write_final_message(&format!(
            "firstlight: PID 1 failed at {place}: {text}; powering off; this is a bug, report this line"
        ));
        rustix::fs::sync();
        let _ = reboot(RebootCommand::PowerOff);
    }));
}
