//! From PID 1's start to the agent's first answer.
//!
//! The peer's figures are those of NVRC and kata-agent 4.1.0 in the same kind
//! of machine (QEMU 11, q35, TCG, one processor, 2 GiB, cgroup v2, quiet console
//! on hvc0, a 6.12 kernel with everything built in): they were measured once
//! and are not measured again here.

use std::path::PathBuf;

use anyhow::Context;
use firstlight::run::Report;
use firstlight_lab::{Guest, Lab};

use super::{Figure, median, millis, report};
use crate::guest::Boot;

/// PID 1's start to the first answered Check, ms, median of ten boots.
const PEER_CHECK_MS: f64 = 410.0;

/// PID 1's start to the agent listening, millions of instructions.
const PEER_INSTRUCTIONS: f64 = 13.0;

/// The agent's event for its first answered Check.
const FIRST_CHECK: &str = "first-check";

/// Whose kernel is booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Whose {
    /// The lab's own, with everything built in, as the peer's was. The first
    /// bench builds it: about 10 minutes of processor time.
    Own,
    /// Debian's, which loads vsock as modules. The goals are not for it.
    Debian,
}

/// A kernel and an initial RAM file system; those of the lab's image if none.
type Files = (Option<PathBuf>, Option<PathBuf>);

fn plan((kernel, initrd): Files, counting: bool) -> Boot {
    let guest = Guest { cpus: 1, memory_mib: 2048, counting, kernel, initrd, ..Guest::default() };
    Boot { guest, devices: Vec::new(), command: vec!["/bin/true".into()], image: None, keep: false }
}

fn first_check_ms(report: &Report) -> anyhow::Result<f64> {
    let check = report.boot_record.event(FIRST_CHECK).context("the record has no first Check")?;
    Ok(millis(report.timeline.pid1_start_us, check.at_us))
}

fn listening_ms(report: &Report) -> anyhow::Result<f64> {
    let listening = report.timeline.agent_listening_us.context("the record has no agent listening")?;
    Ok(millis(report.timeline.pid1_start_us, listening))
}

pub(super) fn figures(lab: &Lab, whose: Whose, boots: u8) -> anyhow::Result<Vec<Figure>> {
    let files = match whose {
        Whose::Own => {
            let image = lab.own_kernel(false)?;
            (Some(image.kernel), Some(image.initrd))
        }
        Whose::Debian => (None, None),
    };
    let mut checks = Vec::new();
    for boot in 1..=boots {
        let ms = first_check_ms(&report(lab, &plan(files.clone(), false))?)?;
        eprintln!("bench: boot {boot} of {boots}: PID 1 to first Check {ms:.1} ms");
        checks.push(ms);
    }
    // One nanosecond of the guest's clock is one instruction, so a millisecond is a million.
    let mut instructions = Vec::new();
    for boot in 1..=boots.min(3) {
        let millions = listening_ms(&report(lab, &plan(files.clone(), true))?)?;
        eprintln!("bench: counting boot {boot}: PID 1 to agent listening {millions:.2} M instructions");
        instructions.push(millions);
    }
    Ok(vec![
        Figure::at_most("PID 1's start to the first answered Check, median", "ms", median(checks), 180.0)
            .beside("NVRC + kata-agent", PEER_CHECK_MS),
        Figure::at_most("PID 1's start to the agent listening", "M instr", median(instructions), 5.0)
            .beside("NVRC + kata-agent", PEER_INSTRUCTIONS),
    ])
}
