//! `fake-fm`: see the library. Its command line is that of nv-fabricmanager.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use firstlight_fake_fm::config::Config;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_fake_fm::server;

/// A process in the place of NVIDIA's Fabric Manager; what is special to it comes from the file
/// that FAKE_FM names.
#[derive(Parser)]
#[command(name = "fake-fm", disable_version_flag = true)]
struct Arguments {
    /// Configuration, KEY=VALUE lines.
    #[arg(short, long, value_name = "FILE", default_value = "/usr/share/nvidia/nvswitch/fabricmanager.cfg")]
    config: PathBuf,
    /// Leave links alone and wait for the list of active partitions.
    #[arg(short, long)]
    restart: bool,
    /// Port of the subnet manager; taken and not used.
    #[arg(short = 'g', long = "fm-sm-mgmt-port-guid", value_name = "GUID")]
    guid: Option<String>,
    /// Print the version.
    #[arg(short = 'v', long)]
    version: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("fake-fm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<u8, Box<dyn std::error::Error>> {
    let scenario = Scenario::from_environment()?;
    if arguments.version {
        println!("Fabric Manager version is : {}", scenario.version);
        return Ok(0);
    }
    let mut config = Config::read(&arguments.config).map_err(|error| format!("configuration: {error}"))?;
    config.restart |= arguments.restart;
    Ok(server::run(config, scenario)?)
}
