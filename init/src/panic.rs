//! What happens when PID 1 itself is wrong.

use rustix::process::{Pid, getpid};
use rustix::system::{RebootCommand, reboot};

use crate::console::last_gasp;

/// From now on a panic says one line and powers the VM off. An end of PID 1
/// would be a kernel panic that hides the reason.
pub fn install() {
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        // A child between fork and exec inherits this hook and must not use it.
        if getpid() != Pid::INIT {
            return;
        }
        last_gasp(&format!(
            "firstlight: PID 1 failed at {place}: {text}; powering off; this is a bug, report this line"
        ));
        rustix::fs::sync();
        let _ = reboot(RebootCommand::PowerOff);
    }));
}
