//! The program that runs as PID 1 of a Firstlight guest.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

use firstlight_init::{clock, console, daemons::table, panic, params, plan, supervisor::Supervisor, units};
use firstlight_sys::signals::SignalFd;
use rustix::process::{Pid, getpid};
use rustix::system::{RebootCommand, reboot};

const HELP: &str = "\
PID 1 of a Firstlight guest. The kernel starts it; started by hand it only tells about itself:
  --print-plan    the boot plan, as a Markdown table
  --print-daemons the daemons that it keeps running, as a Markdown table
  --print-params  the kernel parameters, as a Markdown table
  --version       its version
";

/// The handled signals. The kernel does not deliver signals with the default action to process 1.
const SIGNALS: &[i32] = &[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGPWR, libc::SIGUSR1];

fn main() -> ExitCode {
    let begin = clock::Moment::now();
    if getpid() == Pid::INIT { boot(begin) } else { tell() }
}

fn boot(begin: clock::Moment) -> ! {
    panic::install();
    let started = SignalFd::block(SIGNALS).map_err(|error| error.to_string());
    match started.and_then(|signals| Supervisor::new(signals, begin).map_err(|error| error.to_string())) {
        Ok(supervisor) => {
            // With CAD off, Ctrl-Alt-Del sends SIGINT to PID 1 instead of rebooting at once.
            let _ = reboot(RebootCommand::CadOff);
            supervisor.run()
        }
        Err(text) => {
            console::write_final_message(&format!("firstlight: PID 1 cannot start: {text}; powering off"));
            loop {
                let _ = reboot(RebootCommand::PowerOff);
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
        }
    }
}

fn tell() -> ExitCode {
    let text = match std::env::args().nth(1).as_deref() {
        Some("--print-plan") => plan::print(units::PLAN),
        Some("--print-daemons") => table::print(),
        Some("--print-params") => params::print(),
        Some("--version") => format!("firstlight-init {}\n", env!("CARGO_PKG_VERSION")),
        Some("--help" | "-h") => HELP.to_owned(),
        other => {
            let what = other.map_or_else(String::new, |word| format!("unknown option {word}; "));
            let _ = writeln!(
                std::io::stderr(),
                "firstlight-init: {what}this program is process 1 of a guest and does nothing as process {}; see --help",
                getpid()
            );
            return ExitCode::from(2);
        }
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
