//! What the command line says of the module map and of metrics.

use std::path::Path;

use clap::Args;

use crate::metrics::Address;
use crate::modules::Modules;

/// Which GPU is which, and who may see figures.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The baseboard's serial number: a module map of another baseboard counts as none.
    #[arg(long, value_name = "SERIAL", value_parser = serial)]
    baseboard_serial: Option<String>,
    /// Give several GPUs also while the module map is not verified: a wrong map connects tenants to each other's GPUs.
    #[arg(long)]
    allow_unverified_map: bool,
    /// Show metrics there, to whoever asks: a port of the loopback address, ADDRESS:PORT, or unix:PATH for root alone.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,
}

fn serial(text: &str) -> Result<String, String> {
    match firstlight_module_map::is_word(text) {
        true => Ok(text.to_owned()),
        false => Err("it is 1 to 64 printable characters without spaces".to_owned()),
    }
}

impl Options {
    /// The module map beside that journal.
    #[must_use]
    pub fn modules(&self, journal: &Path) -> Modules {
        let modules = Modules::open(&journal.with_file_name("module-map.json"));
        modules.on(self.baseboard_serial.clone()).allowing(self.allow_unverified_map)
    }
}
