//! What the command line says of the module map and of metrics.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use firstlight_cmdline::CommandLine;
use firstlight_module_map::is_word;

use crate::metrics::Address;
use crate::modules::Modules;

/// Which GPU is which, and who may see figures.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The baseboard's serial number: a module map of another baseboard counts as none. Without, what the kernel's command
    /// line says as firstlight.baseboard-serial.
    #[arg(long, value_name = "SERIAL", value_parser = serial)]
    baseboard_serial: Option<String>,
    /// The kernel's command line.
    #[arg(long, value_name = "FILE", default_value = "/proc/cmdline")]
    kernel_command_line: PathBuf,
    /// Give several GPUs also while the module map is not verified: a wrong map connects tenants to each other's GPUs.
    #[arg(long)]
    allow_unverified_map: bool,
    /// Show metrics there, to whoever asks: a port of the loopback address, ADDRESS:PORT, or unix:PATH for root alone.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,
}

fn serial(text: &str) -> Result<String, String> {
    match is_word(text) {
        true => Ok(text.to_owned()),
        false => Err("it is 1 to 64 printable characters without spaces".to_owned()),
    }
}

impl Options {
    /// What the host has said when it started this machine.
    fn booted_with(&self) -> Option<String> {
        let text = fs::read_to_string(&self.kernel_command_line).ok()?;
        let line = CommandLine::parse(&text);
        let serial = line.value("firstlight.baseboard-serial")?;
        (serial != "none" && is_word(serial)).then(|| serial.to_owned())
    }

    /// The module map beside that journal.
    #[must_use]
    pub fn modules(&self, journal: &Path) -> Modules {
        let modules = Modules::open(&journal.with_file_name("module-map.json"));
        modules.on(self.baseboard_serial.clone().or_else(|| self.booted_with())).allowing(self.allow_unverified_map)
    }
}
