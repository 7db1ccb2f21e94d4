//! `image-builder boot`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use firstlight_image_builder::boot::{self, End, Report};
use firstlight_image_builder::progress::Progress;
use firstlight_vm::{Accelerator, Tool, or_interrupted};

/// Options of `boot`.
#[derive(Debug, Args)]
pub(crate) struct Boot {
    /// The directory that build wrote.
    dir: PathBuf,
    /// The directory of an opener that build wrote: for a disk with dm-verity on
    /// a kernel without CONFIG_DM_INIT.
    #[arg(long, value_name = "DIR")]
    opener: Option<PathBuf>,
    /// The directory of an extension that build wrote; may be given again.
    #[arg(long = "extension", value_name = "DIR")]
    extensions: Vec<PathBuf>,
    /// More kernel parameters.
    #[arg(long, value_name = "PARAMETERS", default_value = "", allow_hyphen_values = true)]
    append: String,
    /// QEMU.
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// vhost-device-vsock, which Debian has as a package of that name.
    #[arg(long, value_name = "FILE", default_value = "vhost-device-vsock")]
    vhost_device_vsock: PathBuf,
    /// Guest memory, MiB.
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Seconds until the guest is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    /// Keep the console's text here, and the serial port's as serial.log beside it.
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Print the boot record as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

impl Boot {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let wanted = boot::Boot {
            dir: self.dir.clone(),
            opener: self.opener.clone(),
            extensions: self.extensions.clone(),
            append: self.append.clone(),
            memory_mib: self.memory,
            cpus: self.cpus,
            accelerator: Accelerator::detect(),
            qemu: Tool::plain(&self.qemu),
            vhost_vsock: Tool::plain(&self.vhost_device_vsock),
            devices: Vec::new(),
        };
        let machine = wanted.machine()?;
        if machine.accelerator != Accelerator::Kvm {
            Progress::stderr("image-builder")
                .say("no KVM here: the guest's instructions are translated, which is slow");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let work = boot::boot(&machine, Duration::from_secs(self.timeout), self.console.as_deref());
        let report = match runtime.block_on(or_interrupted(work)) {
            Err(signal) => return Ok(ExitCode::from(signal.exit_code())),
            Ok(report) => report?,
        };
        let mut stdout = io::stdout().lock();
        match (&report.record, self.json) {
            (Some(record), true) => {
                serde_json::to_writer_pretty(&mut stdout, record)?;
                writeln!(stdout)?;
            }
            (Some(record), false) => write!(stdout, "{}", firstlight_boot_profile::table(record))?,
            (None, _) => {}
        }
        match verdict(&report) {
            None => Ok(ExitCode::SUCCESS),
            Some(why) => anyhow::bail!("{}: {why}", self.dir.display()),
        }
    }
}

/// Why the boot did not do; `None` if it did.
fn verdict(report: &Report) -> Option<String> {
    let lived = report.lived.as_millis();
    let words = || format!("the console's last words:\n{}", report.last_words);
    match (report.end, &report.record) {
        _ if report.is_ready() => None,
        (End::Told, Some(record)) => Some(match &record.failure {
            Some(failure) => format!("the boot failed in {}: {}", failure.unit, failure.detail),
            None => "the boot ended, but not every unit did well: those are in the table".to_owned(),
        }),
        (End::Silent(patience), record) => Some(format!(
            "{} within {} s; {}",
            if record.is_some() { "the boot did not end" } else { "PID 1 said nothing" },
            patience.as_secs(),
            words()
        )),
        (End::Told | End::Ended, _) => Some(format!("the guest ended {lived} ms after its start; {}", words())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{BootRecord, Failure, State};

    fn report(end: End, state: Option<State>) -> Report {
        let record = state.map(|state| BootRecord { state, ..BootRecord::new("1", 1) });
        Report { record, end, lived: Duration::from_millis(1234), last_words: "  panic!".into() }
    }

    #[test]
    fn only_a_boot_that_did_well_is_one() {
        assert_eq!(verdict(&report(End::Told, Some(State::Ready))), None);
        let rows = [
            (report(End::Told, Some(State::Degraded)), "not every unit"),
            (report(End::Ended, Some(State::Ready)), "ended 1234 ms"),
            (report(End::Ended, None), "panic!"),
            (report(End::Silent(Duration::from_secs(7)), None), "PID 1 said nothing within 7 s"),
            (report(End::Silent(Duration::from_secs(7)), Some(State::Booting)), "did not end within 7 s"),
        ];
        for (report, words) in rows {
            let text = verdict(&report).unwrap();
            assert!(text.contains(words), "{text}");
        }
        let mut failed = report(End::Told, Some(State::Failed));
        let failure =
            Failure { unit: "mounts".into(), at_us: 1, detail: "no /proc".into(), action: "power off".into() };
        failed.record.as_mut().unwrap().failure = Some(failure);
        assert_eq!(verdict(&failed).unwrap(), "the boot failed in mounts: no /proc");
    }
}
