//! `fake-fm`: see the library. Its command line is that of nv-fabricmanager.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use firstlight_fake_fm::config::Config;
use firstlight_fake_fm::control::Control;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_fake_fm::server;

/// Exit code: the GPU is in no active partition.
const NO_FABRIC: u8 = 10;

/// A stand-in for NVIDIA's Fabric Manager; its own options are in the file that FAKE_FM names.
#[derive(Parser)]
#[command(name = "fake-fm", disable_version_flag = true)]
struct Arguments {
    /// Configuration, KEY=VALUE lines.
    #[arg(short, long, value_name = "FILE", default_value = "/usr/share/nvidia/nvswitch/fabricmanager.cfg")]
    config: PathBuf,
    /// Leave links alone and wait for the list of active partitions.
    #[arg(short, long)]
    restart: bool,
    /// Port of the subnet manager; ignored.
    #[arg(short = 'g', long = "fm-sm-mgmt-port-guid", value_name = "GUID")]
    guid: Option<String>,
    /// Print the version.
    #[arg(short = 'v', long)]
    version: bool,
    /// Own option: queries the running process whether a GPU is in an active partition; exits with 0 if so, with 10
    /// if not.
    #[arg(long, value_name = "MODULE")]
    fabric_of: Option<u32>,
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
    if let Some(module) = arguments.fabric_of {
        let path = scenario.control.as_ref().ok_or("the scenario names no socket for tests")?;
        let active = Control::connect(path)?.snapshot()?.active;
        let mut rows = scenario.known()?.rows.iter();
        let has_fabric = rows.any(|(id, gpus, _)| active.contains(id) && gpus.contains(&module));
        return Ok(if has_fabric { 0 } else { NO_FABRIC });
    }
    let mut config = Config::read(&arguments.config).map_err(|error| format!("configuration: {error}"))?;
    config.restart |= arguments.restart;
    Ok(server::run(config, scenario)?)
}
