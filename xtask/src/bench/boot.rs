//! Boot times of guests with 0 to 8 GPUs, attached in parallel or in series, and
//! their effect on the agent's start.
//!
//! Cases alternate, a boot each, so that temporary load on the machine affects
//! all of them. Only ratios within one run have goals.

use std::time::Duration;

use anyhow::Context;
use firstlight::run::{ContainerCommand, Report};
use firstlight_lab::{Guest, Lab};

use super::{Figure, median, millis, report};
use crate::guest::{Attach, Boot};

/// Duration of the attach of one synthetic GPU.
const ATTACH: Duration = Duration::from_millis(1500);

/// The unit whose end is "driver loaded".
const DRIVER: &str = "modules-nvidia";

/// Numbers of GPUs.
const GPUS: [usize; 5] = [0, 1, 2, 4, 8];

/// A configuration of the guest, and its boots so far.
struct Case {
    gpus: usize,
    attach: Attach,
    boots: Vec<Times>,
}

/// Durations of one boot, ms.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// PID 1's start to the agent listening.
    listening: f64,
    /// Driver loaded to all ready.
    attach: f64,
    /// PID 1's start to all ready.
    ready: f64,
}

impl Times {
    fn of(report: &Report, gpus: usize) -> anyhow::Result<Self> {
        let start = report.timeline.pid1_start_us;
        let listening = report.timeline.agent_listening_us.context("the record has no agent listening")?;
        let listening = millis(start, listening);
        if gpus == 0 {
            return Ok(Self { listening, attach: 0.0, ready: 0.0 });
        }
        let driver = report.boot_record.unit(DRIVER).and_then(|unit| unit.end_us);
        let driver = driver.context("the record has no end of the driver's load")?;
        let ready = report.timeline.all_gpus_ready_us.context("not every GPU became ready")?;
        Ok(Self { listening, attach: millis(driver, ready), ready: millis(start, ready) })
    }
}

impl Case {
    fn boot(&mut self, lab: &Lab) -> anyhow::Result<()> {
        let guest = Guest::with_gpus(self.gpus, ATTACH).parameter(self.attach.parameter());
        let plan = Boot {
            guest,
            devices: Vec::new(),
            command: ContainerCommand::Arguments(vec!["/bin/true".into()]),
            image: None,
            keep: false,
        };
        let what = format!("{} GPUs, {:?}, boot {}", self.gpus, self.attach, self.boots.len() + 1);
        let times = Times::of(&report(lab, &plan).context(what.clone())?, self.gpus)?;
        let Times { listening, attach, ready } = times;
        eprintln!("bench: {what}: agent listening {listening:.1} ms, all ready {ready:.0} ms, attach {attach:.0} ms");
        self.boots.push(times);
        Ok(())
    }

    fn median(&self, of: fn(&Times) -> f64) -> f64 {
        median(self.boots.iter().map(of).collect())
    }
}

fn find(cases: &[Case], gpus: usize, attach: Attach) -> anyhow::Result<&Case> {
    cases.iter().find(|case| (case.gpus, case.attach) == (gpus, attach)).context("a case is missing")
}

pub(super) fn figures(lab: &Lab, boots: u8) -> anyhow::Result<Vec<Figure>> {
    // With fewer than two GPUs, serial and parallel attach are the same.
    let serial = GPUS.iter().filter(|gpus| **gpus > 1).map(|gpus| (*gpus, Attach::Serial));
    let mut cases: Vec<Case> = GPUS
        .iter()
        .map(|gpus| (*gpus, Attach::Parallel))
        .chain(serial)
        .map(|(gpus, attach)| Case { gpus, attach, boots: Vec::new() })
        .collect();
    // The first boot is discarded: the host's page cache is cold.
    cases.last_mut().context("no cases")?.boot(lab)?;
    cases.last_mut().context("no cases")?.boots.clear();
    for turn in 0..boots {
        // Each turn begins with another case, so that none always follows the longest.
        cases.rotate_left(usize::from(turn > 0));
        for case in &mut cases {
            case.boot(lab)?;
        }
    }
    cases.sort_by_key(|case| (case.attach == Attach::Serial, case.gpus));
    let (none, one) = (find(&cases, 0, Attach::Parallel)?, find(&cases, 1, Attach::Parallel)?);
    let eight = find(&cases, 8, Attach::Parallel)?;
    let (one_ready, none_listening) = (one.median(|times| times.ready), none.median(|times| times.listening));
    let one_attach = one.median(|times| times.attach);
    let mut figures = Vec::new();
    for case in &cases {
        let name = format!("{} GPUs, {:?}", case.gpus, case.attach);
        let ready = case.median(|times| times.ready);
        let listening = case.median(|times| times.listening);
        if case.gpus > 0 {
            figures.push(
                Figure::shown(format!("{name}: PID 1's start to all ready"), "ms", ready).beside("1 GPU", one_ready),
            );
        }
        figures.push(
            Figure::between(
                format!("{name}: agent listening, relative to 0 GPUs"),
                "x",
                listening / none_listening,
                0.9,
                1.1,
            )
            .beside("0 GPUs, ms", none_listening),
        );
    }
    let ready = eight.median(|times| times.ready) / one_ready;
    let attach = eight.median(|times| times.attach) / one_attach;
    let serial = find(&cases, 8, Attach::Serial)?.median(|times| times.attach);
    figures.extend([
        Figure::at_most("8 GPUs in parallel: PID 1's start to all ready, relative to 1", "x", ready, 1.25)
            .beside("1 GPU, ms", one_ready),
        Figure::at_most("8 GPUs in parallel: driver loaded to all ready, relative to 1", "x", attach, 1.25)
            .beside("1 GPU, ms", one_attach),
        Figure::between(
            "8 GPUs in series: driver loaded to all ready, relative to 1",
            "x",
            serial / one_attach,
            7.0,
            9.0,
        )
        .beside("1 GPU, ms", one_attach),
    ]);
    Ok(figures)
}
