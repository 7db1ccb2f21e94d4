//! Options for the module map and metrics.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use firstlight_cmdline::CommandLine;
use firstlight_module_map::is_word;

use crate::metrics::Address;
use crate::module_map_store::ModuleMapStore;

/// Options for the module map and metrics.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The baseboard's serial number: a module map of another baseboard is ignored. Default: the kernel parameter
    /// firstlight.baseboard-serial.
    #[arg(long, value_name = "SERIAL", value_parser = serial)]
    baseboard_serial: Option<String>,
    /// File with the kernel command line.
    #[arg(long, value_name = "FILE", default_value = "/proc/cmdline")]
    kernel_command_line: PathBuf,
    /// Give several GPUs while the module map is not verified: a wrong map connects tenants to each other's GPUs.
    #[arg(long)]
    allow_unverified_map: bool,
    /// Prometheus endpoint: PORT on the loopback address, ADDRESS:PORT, or unix:PATH for root only.
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
    /// Reads the serial number that the host passed on the kernel command line.
    fn serial_from_command_line(&self) -> Option<String> {
        let text = fs::read_to_string(&self.kernel_command_line).ok()?;
        let line = CommandLine::parse(&text);
        let serial = line.value("firstlight.baseboard-serial")?;
        (serial != "none" && is_word(serial)).then(|| serial.to_owned())
    }

    /// Opens the module map in the journal's directory.
    #[must_use]
    pub fn module_map(&self, journal: &Path) -> ModuleMapStore {
        let map = ModuleMapStore::open(&journal.with_file_name("module-map.json"));
        map.with_serial(self.baseboard_serial.clone().or_else(|| self.serial_from_command_line()))
            .allow_unverified(self.allow_unverified_map)
    }
}
