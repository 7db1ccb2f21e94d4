//! How long eight GPUs take against one, and whether the agent waits for them.

use std::time::Duration;

use anyhow::Context;
use firstlight::run::Report;
use firstlight_lab::{Guest, Lab};

use super::{Figure, median, millis, report};
use crate::guest::{Attach, Boot};

/// What the attach of one synthetic GPU costs.
const ATTACH: Duration = Duration::from_millis(1500);

/// The unit whose end is "driver loaded".
const DRIVER: &str = "modules-nvidia";

struct Case {
    /// All ready minus driver loaded, ms, median.
    attach_ms: f64,
    /// PID 1's start to the agent listening, ms, median.
    listening_ms: f64,
}

fn attach_ms(report: &Report) -> anyhow::Result<f64> {
    let driver = report
        .boot_record
        .unit(DRIVER)
        .and_then(|unit| unit.end_us)
        .context("the record has no end of the driver's load")?;
    let ready = report.timeline.all_gpus_ready_us.context("not every GPU became ready")?;
    Ok(millis(driver, ready))
}

fn case(lab: &Lab, boots: u8, gpus: usize, attach: Attach) -> anyhow::Result<Case> {
    let guest = Guest::with_gpus(gpus, ATTACH).parameter(attach.parameter());
    let plan = Boot { guest, devices: Vec::new(), command: vec!["/bin/true".into()], image: None, keep: false };
    let (mut attaches, mut listenings) = (Vec::new(), Vec::new());
    for boot in 1..=boots {
        let report = report(lab, &plan).with_context(|| format!("{gpus} GPUs, {attach:?}, boot {boot}"))?;
        let listening = report.timeline.agent_listening_us.context("the record has no agent listening")?;
        let listening = millis(report.timeline.pid1_start_us, listening);
        let attached = if gpus == 0 { 0.0 } else { attach_ms(&report)? };
        eprintln!(
            "bench: {gpus} GPUs, {attach:?}, boot {boot} of {boots}: attached in {attached:.0} ms, agent listening after {listening:.1} ms"
        );
        attaches.push(attached);
        listenings.push(listening);
    }
    Ok(Case { attach_ms: median(attaches), listening_ms: median(listenings) })
}

pub(super) fn figures(lab: &Lab, boots: u8) -> anyhow::Result<Vec<Figure>> {
    let none = case(lab, boots, 0, Attach::Parallel)?;
    let one = case(lab, boots, 1, Attach::Parallel)?;
    let eight = case(lab, boots, 8, Attach::Parallel)?;
    let serial = case(lab, boots, 8, Attach::Serial)?;
    let each = ATTACH.as_millis();
    let ratio = |what: String, ours: &Case, low: f64, high: f64| {
        Figure::between(what, "x", ours.attach_ms / one.attach_ms, low, high).beside("1 GPU, ms", one.attach_ms)
    };
    Ok(vec![
        ratio(format!("8 GPUs of {each} ms in parallel, driver loaded to all ready, against 1"), &eight, 0.0, 1.25),
        ratio(format!("8 GPUs of {each} ms one after the other, against 1"), &serial, 7.0, 9.0),
        Figure::at_most("8 GPUs in parallel against one after the other", "x", eight.attach_ms / serial.attach_ms, 0.2)
            .beside("serial, ms", serial.attach_ms),
        Figure::between(
            "PID 1 to agent listening with 8 GPUs against 0",
            "x",
            eight.listening_ms / none.listening_ms,
            0.9,
            1.1,
        )
        .beside("0 GPUs, ms", none.listening_ms),
    ])
}
