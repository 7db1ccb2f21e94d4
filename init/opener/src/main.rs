//! `/init` of the initial RAM file system that opens a verified root.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use firstlight_init::console::write_final_message;
use firstlight_opener::open;
use rustix::process::{Pid, getpid};
use rustix::system::{RebootCommand, reboot};

fn main() -> ExitCode {
    if getpid() != Pid::INIT {
        let _ = writeln!(
            std::io::stderr(),
            "firstlight-opener {}: it is /init of an initial RAM file system, and does nothing as process {}",
            env!("CARGO_PKG_VERSION"),
            getpid()
        );
        return ExitCode::from(2);
    }
    // The kernel has opened its console as our standard output.
    let result = open::run(|text| {
        let _ = writeln!(std::io::stdout(), "firstlight-opener: {text}");
    });
    let Err(error) = result;
    write_final_message(&format!("firstlight-opener: {error}; powering off"));
    loop {
        let _ = reboot(RebootCommand::PowerOff);
        std::thread::sleep(Duration::from_secs(1));
    }
}
