//! Time from PID 1's start to the agent's first answer, and PID 1's own processor
//! time in a boot.
//!
//! PID 1's own work is the processor time of its process, from the guest's
//! scheduler, minus that of units that run kernel or driver code: those that load
//! drivers or wait in one.
//!
//! The peer's figures are those of NVRC and kata-agent 4.1.0 on the same kind
//! of machine (QEMU 11, q35, TCG, one processor, 2 GiB, cgroup v2, quiet console
//! on hvc0, a 6.12 kernel with everything built in). They were measured once;
//! this benchmark does not repeat them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use firstlight::run::{ContainerCommand, Report};
use firstlight_boot_record::BootRecord;
use firstlight_lab::{Guest, Lab};

use super::{Figure, median, millis, report};
use crate::guest::Boot;

/// PID 1's start to the first answered Check, ms, median of ten boots.
const PEER_CHECK_MS: f64 = 410.0;

/// PID 1's start to the agent listening, millions of instructions.
const PEER_INSTRUCTIONS: f64 = 13.0;

/// PID 1's start to the agent's exec, millions of instructions; a bare init has 0.9.
const PEER_EXEC: f64 = 2.4;

/// Duration of a GPU's attach; instruction counts exclude waiting.
const ATTACH: Duration = Duration::from_millis(200);

/// Units that run kernel or driver code, by the beginning of their name.
const DRIVER_UNITS: &[&str] = &["vsock", "modules", "modules-nvidia", "gpu-attach["];

/// The agent's event for its first answered Check.
const FIRST_CHECK: &str = "first-check";

/// PID 1's event for the agent's exec.
const EXECUTED: &str = "agent-executed";

/// The kernel to boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KernelChoice {
    /// The lab's own, with everything built in, like the peer's. The first run
    /// builds it: about 25 minutes of processor time.
    Own,
    /// Debian's, which loads vsock as modules. The goals do not apply to it.
    Debian,
}

/// Paths of a kernel and an initramfs; those of the lab's image if none.
type BootFiles = (Option<PathBuf>, Option<PathBuf>);

fn plan((kernel, initrd): BootFiles, counting: bool) -> Boot {
    let guest = Guest { cpus: 1, memory_mib: 2048, counting, kernel, initrd, ..Guest::default() };
    Boot {
        guest,
        devices: Vec::new(),
        command: ContainerCommand::Arguments(vec!["/bin/true".into()]),
        image: None,
        keep: false,
    }
}

fn first_check_ms(report: &Report) -> anyhow::Result<f64> {
    let check = report.boot_record.event(FIRST_CHECK).context("the record has no first Check")?;
    Ok(millis(report.timeline.pid1_start_us, check.at_us))
}

fn listening_ms(report: &Report) -> anyhow::Result<f64> {
    let listening = report.timeline.agent_listening_us.context("the record has no agent listening")?;
    Ok(millis(report.timeline.pid1_start_us, listening))
}

/// Returns the processor time in the first word of an event's detail, µs.
fn processor_us(record: &BootRecord, what: &str) -> anyhow::Result<u64> {
    let event = record.event(what).with_context(|| format!("the record has no {what}"))?;
    let number = event.detail.split(' ').next().and_then(|word| word.parse().ok());
    number.with_context(|| format!("the detail of event {what} begins with no number: {:?}", event.detail))
}

/// Returns PID 1's own work until the agent's exec and in the whole boot; ms, or millions of instructions when counting.
fn own_work(record: &BootRecord) -> anyhow::Result<(f64, f64)> {
    let drivers = |by_us: u64| -> u64 {
        let units = record.units.iter().filter(|unit| DRIVER_UNITS.iter().any(|name| unit.name.starts_with(name)));
        units.filter(|unit| unit.end_us.is_some_and(|end| end <= by_us)).filter_map(|unit| unit.processor_us).sum()
    };
    let exec_us = record.event(EXECUTED).context("the record has no agent's exec")?.at_us;
    let exec = processor_us(record, EXECUTED)?.saturating_sub(drivers(exec_us));
    let whole = processor_us(record, "processor-time")?.saturating_sub(drivers(u64::MAX));
    Ok((millis(0, exec), millis(0, whole)))
}

/// Returns the processor time of console writes, µs.
fn console(record: &BootRecord) -> u64 {
    let detail = record.event("processor-time").map_or("", |event| event.detail.as_str());
    let number = detail.split_once("console ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    number.unwrap_or_default()
}

/// Returns the processor time of each unit, the console and the main loop, as text; ms, or millions of instructions
/// when counting.
fn shares(record: &BootRecord) -> String {
    let mut shares: Vec<String> = record
        .units
        .iter()
        .filter_map(|unit| Some(format!("{} {:.2}", unit.name, millis(0, unit.processor_us?))))
        .collect();
    let units: u64 = record.units.iter().filter_map(|unit| unit.processor_us).sum();
    let whole = processor_us(record, "processor-time").unwrap_or_default();
    shares.push(format!("console {:.2}", millis(0, console(record))));
    shares.push(format!("main loop {:.2}", millis(units + console(record), whole)));
    shares.join(", ")
}

/// Boots a guest with GPUs on Debian's kernel: the lab's own has no stand-in driver.
fn with_gpus(lab: &Lab, gpus: usize, counting: bool) -> anyhow::Result<Report> {
    let guest = Guest { cpus: 1, memory_mib: 2048, counting, ..Guest::with_gpus(gpus, ATTACH) };
    let boot = Boot {
        guest,
        devices: Vec::new(),
        command: ContainerCommand::Arguments(vec!["/bin/true".into()]),
        image: None,
        keep: false,
    };
    report(lab, &boot)
}

fn exec_ms(report: &Report) -> anyhow::Result<f64> {
    let exec = report.boot_record.event(EXECUTED).context("the record has no agent's exec")?;
    Ok(millis(report.timeline.pid1_start_us, exec.at_us))
}

pub(super) fn figures(lab: &Lab, choice: KernelChoice, boots: u8) -> anyhow::Result<Vec<Figure>> {
    let files = match choice {
        KernelChoice::Own => {
            let image = lab.own_kernel(false)?;
            (Some(image.kernel), Some(image.initrd))
        }
        KernelChoice::Debian => (None, None),
    };
    let mut checks = Vec::new();
    for boot in 1..=boots {
        let ms = first_check_ms(&report(lab, &plan(files.clone(), false))?)?;
        eprintln!("bench: boot {boot} of {boots}: PID 1 to first Check {ms:.1} ms");
        checks.push(ms);
    }
    // In counting mode one nanosecond of the guest's clock is one instruction, so a millisecond is a million.
    let (mut instructions, mut execs, mut own_execs) = (Vec::new(), Vec::new(), Vec::new());
    for boot in 1..=boots.min(3) {
        let report = report(lab, &plan(files.clone(), true))?;
        let (listening, exec) = (listening_ms(&report)?, exec_ms(&report)?);
        let (own_exec, own) = own_work(&report.boot_record)?;
        eprintln!(
            "bench: counting boot {boot}: PID 1 to agent's exec {exec:.2}, to agent listening {listening:.2} M \
             instructions; own work {own_exec:.2} to the exec, {own:.2} in all"
        );
        instructions.push(listening);
        execs.push(exec);
        own_execs.push(own_exec);
    }
    let (mut owns_to_exec, mut owns, mut owns_ms) = (Vec::new(), Vec::new(), Vec::new());
    for boot in 1..=boots.min(3) {
        let counted = with_gpus(lab, 8, true)?.boot_record;
        let (to_exec, own) = own_work(&counted)?;
        eprintln!("bench: units of boot {boot} with 8 GPUs: {}", shares(&counted));
        let (_, own_ms) = own_work(&with_gpus(lab, 8, false)?.boot_record)?;
        eprintln!(
            "bench: boot {boot} with 8 GPUs: own work {to_exec:.2} M instructions to the agent's exec, {own:.2} in all; \
             {own_ms:.2} ms without counting"
        );
        owns_to_exec.push(to_exec);
        owns.push(own);
        owns_ms.push(own_ms);
    }
    Ok(vec![
        Figure::shown(
            "PID 1's start to the agent's exec, start of the vsock driver included",
            "M instr",
            median(execs),
        )
        .beside("NVRC", PEER_EXEC),
        Figure::at_most("own work of PID 1 to the agent's exec", "M instr", median(own_execs), 1.5)
            .beside("NVRC", PEER_EXEC),
        Figure::at_most(
            "own work of PID 1 to the agent's exec with 8 GPUs, on Debian's kernel",
            "M instr",
            median(owns_to_exec),
            4.0,
        ),
        Figure::shown("own work of PID 1 in a whole boot with 8 GPUs, host requests included", "M instr", median(owns)),
        Figure::shown("own work of PID 1 in a whole boot with 8 GPUs, host requests included", "ms", median(owns_ms)),
        Figure::at_most("PID 1's start to the first answered Check, median", "ms", median(checks), 180.0)
            .beside("NVRC + kata-agent", PEER_CHECK_MS),
        Figure::at_most("PID 1's start to the agent listening", "M instr", median(instructions), 5.0)
            .beside("NVRC + kata-agent", PEER_INSTRUCTIONS),
    ])
}
