//! `cargo xtask picture`: draws the README's boot from a boot of the lab.

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use firstlight::run::{ContainerCommand, Outputs, Progress};
use firstlight_boot_profile::svg;
use firstlight_boot_record::BootRecord;
use firstlight_lab::binaries::workspace;
use firstlight_lab::{Guest, Lab, h100};

use crate::guest::{Boot, BootResult, boot};

/// Attach times of the GPUs, ms. The container requests the quickest.
const ATTACH_MS: [u64; 4] = [3000, 800, 3600, 3300];

/// Index of the GPU that the container requests.
const REQUESTED: &str = "1";

/// Options of `picture`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
}

/// Boots, and writes docs/boot-record.json and docs/boot.svg.
pub(crate) fn picture(args: &Args) -> anyhow::Result<ExitCode> {
    let lab = Lab::prepare(args.yes)?;
    let devices = ATTACH_MS.map(|ms| h100(Duration::from_millis(ms))).to_vec();
    let plan = Boot {
        guest: Guest { devices, ..Guest::default() },
        devices: vec![REQUESTED.to_owned()],
        command: ContainerCommand::Arguments(vec!["/bin/sleep".into(), "1".into()]),
        image: None,
        keep: false,
    };
    let dir = tempfile::tempdir()?;
    let outputs = Outputs { dir: dir.path().to_owned(), json: None };
    let mut report = |progress: Progress<'_>| eprintln!("picture: {progress}");
    let record = match boot(&lab, &plan, &outputs, &mut report)? {
        BootResult::Report(report) => report.boot_record,
        BootResult::Failed(error) => return Err(error.into()),
        BootResult::Interrupted(signal) => return Ok(ExitCode::from(signal.exit_code())),
    };
    check_caption(&record)?;
    let docs = workspace().join("docs");
    let write = |name: &str, text: String| {
        let path = docs.join(name);
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))
    };
    write("boot-record.json", serde_json::to_string_pretty(&record)? + "\n")?;
    write("boot.svg", svg(&record))?;
    println!("written: docs/boot-record.json docs/boot.svg");
    Ok(ExitCode::SUCCESS)
}

/// Checks what the README says about the picture: the container started while other GPUs were attaching.
fn check_caption(record: &BootRecord) -> anyhow::Result<()> {
    let Some(started) = record.event("container-started").map(|event| event.at_us) else {
        bail!("the boot has no container")
    };
    let attaching = record.gpus.iter().filter(|gpu| gpu.end_us.is_none_or(|end| end > started)).count();
    if attaching + 1 != ATTACH_MS.len() {
        bail!("the container started while {attaching} GPUs were attaching, not {}", ATTACH_MS.len() - 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> String {
        fs::read_to_string(workspace().join("docs").join(name)).unwrap()
    }

    #[test]
    fn picture_is_drawn_from_its_record_and_matches_the_caption() {
        let record = BootRecord::from_json(&read("boot-record.json")).unwrap();
        check_caption(&record).unwrap();
        assert_eq!(svg(&record), read("boot.svg"), "run `cargo xtask picture`");
    }

    #[test]
    fn boot_whose_container_waited_for_all_gpus_is_no_picture_for_the_readme() {
        let mut record = BootRecord::from_json(&read("boot-record.json")).unwrap();
        for event in record.events.iter_mut().filter(|event| event.kind == "container-started") {
            event.at_us = u64::MAX;
        }
        assert!(check_caption(&record).unwrap_err().to_string().contains("0 GPUs were attaching"));
        record.events.clear();
        assert!(check_caption(&record).is_err());
    }
}
