//! The run itself: what a shim does, in its order.

use std::time::{Duration, Instant};

use firstlight_boot_record::{BootRecord, GpuPhase, State};
use firstlight_oci::Image;
use firstlight_vm::{Share, Vm};
use tokio::time::{sleep, timeout};

use super::report::{Container, HostTimes, Report, micros};
use super::share::Directories;
use super::{Run, RunError};
use crate::agent::{Agent, AgentError, Output, SHARED_TAG};
use crate::container::{self, Probe};

/// The container's id; also its name in the boot record.
const CONTAINER: &str = "firstlight-run";

/// The sandbox's id.
const SANDBOX: &str = "firstlight-sandbox";

/// Between two connections to an agent that did not answer its Check.
const RETRY: Duration = Duration::from_millis(5);

/// One Check may take this long before the connection is tried anew.
const CHECK: Duration = Duration::from_secs(2);

/// Between two Checks while something else is waited for, as a shim does it.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Checks without an answer after which the agent is taken for dead.
const MISSED: u32 = 8;

/// Boots the guest, runs the container, powers off. `say` gets one line per
/// step, for whoever watches.
///
/// A container that could not be created is not an error of the run: the
/// report says why.
///
/// # Errors
/// The guest did not come up, hangs, or ended by itself; the error holds its
/// last words and what is known of its boot.
pub async fn run(run: &Run, say: &mut dyn FnMut(&str)) -> Result<Report, RunError> {
    let image = Image::open(&run.image)?;
    let dirs = Directories::make()?;
    dirs.unpack(&image, CONTAINER)?;
    let mut machine = run.machine.clone();
    machine.shares.push(Share { tag: SHARED_TAG.to_owned(), dir: dirs.shared() });
    let mut vm = Vm::start(&machine, &dirs.machine(), &run.console_log).await?;
    let result = drive(run, &image, &mut vm, say).await;
    vm.stop().await;
    result
}

async fn drive(run: &Run, image: &Image, vm: &mut Vm, say: &mut dyn FnMut(&str)) -> Result<Report, RunError> {
    let agent = step(vm, "wait for the agent", run.deadlines.boot, first_check).await?;
    let agent = agent.with_patience(run.deadlines.call);
    let mut host = HostTimes { first_check_us: micros(vm.lived()), qemu_exit_us: 0 };
    say(&format!("the agent answers {} ms after QEMU's start", host.first_check_us / 1000));
    if let Ok(record) = agent.boot_record().await {
        let attaching = record.gpus.iter().filter(|gpu| gpu.phase != GpuPhase::Ready).count();
        say(&format!("at that moment {attaching} of {} GPUs found are not ready yet", record.gpus.len()));
    }
    let words = |error, vm: &Vm| RunError::Agent(error, vm.last_words());
    agent.create_sandbox(SANDBOX).await.map_err(|error| words(error, vm))?;

    let begin = Instant::now();
    let mut container = Container::default();
    match with_container(run, image, &agent, vm).await? {
        Ok(ended) => {
            container = ended;
            say(&format!("the container ran for {} ms, its wait for GPUs included", begin.elapsed().as_millis()));
        }
        Err(error) => {
            say(&format!("the container did not run: {error}"));
            container.error = Some(error.to_string());
        }
    }
    if run.keep {
        say(&format!("kept running: agent at {} (CONNECT 1024), Ctrl-C ends it", vm.vsock().display()));
        vm.wait().await?;
    }
    // The record is complete when the last GPU has come up or been given up.
    let over = |record: &BootRecord| !matches!(record.state, State::Booting);
    let console = vm.console().clone();
    let _ = timeout(run.deadlines.create, console.wait_for(over)).await;
    let record = agent.boot_record().await.map_err(|error| words(error, vm))?;
    if run.command.is_empty() {
        let granted = granted_minors(&record, &run.devices);
        container.denied_open = Probe::read(&container.stdout).denied_open(&granted);
    }
    // The guest may be gone before its answer is here; its end is what counts.
    if let Err(error) = agent.destroy_sandbox().await {
        say(&format!("the agent did not confirm the power-off: {error}"));
    }
    match timeout(run.deadlines.power_off, vm.wait()).await {
        Ok(exit) => host.qemu_exit_us = micros(exit?.lived),
        Err(_) => return Err(hangs(vm, "power off", run.deadlines.power_off)),
    }
    let record = with_last_events(record, vm.console().record());
    Ok(Report::new(record, container, CONTAINER, host))
}

/// The outer error is the guest's, the inner one the agent's answer.
async fn with_container(
    run: &Run,
    image: &Image,
    agent: &Agent,
    vm: &mut Vm,
) -> Result<Result<Container, AgentError>, RunError> {
    let command = if run.command.is_empty() { container::default_command() } else { run.command.clone() };
    let spec = container::spec(CONTAINER, image, &command, &run.devices);
    // The agent's own deadline should speak first: it knows which GPU it waits for.
    let patience = run.deadlines.create + run.deadlines.call;
    let deadline = run.deadlines.create;
    let created = step(vm, "create the container", patience, async |_: &Vm| {
        while_alive(agent, agent.create_container(CONTAINER, spec, deadline)).await
    });
    if let Err(error) = created.await? {
        return Ok(Err(error));
    }
    let limit = run.deadlines.container;
    step(vm, "run the container", limit, async |_: &Vm| while_alive(agent, life(agent)).await).await
}

/// Waits for `work` as long as the agent answers Checks.
async fn while_alive<T>(agent: &Agent, work: impl Future<Output = Result<T, AgentError>>) -> Result<T, AgentError> {
    let heart = agent.clone().with_patience(HEARTBEAT);
    let stopped = async {
        let mut missed = 0;
        loop {
            sleep(HEARTBEAT).await;
            match heart.check().await {
                Ok(()) => missed = 0,
                Err(error) if missed == MISSED => return error,
                Err(_) => missed += 1,
            }
        }
    };
    tokio::select! {
        result = work => result,
        error = stopped => Err(error),
    }
}

async fn life(agent: &Agent) -> Result<Container, AgentError> {
    agent.start_container(CONTAINER).await?;
    let (stdout, stderr) =
        tokio::try_join!(agent.read_all(CONTAINER, Output::Stdout), agent.read_all(CONTAINER, Output::Stderr))?;
    let exit_code = Some(agent.wait(CONTAINER).await?);
    agent.remove_container(CONTAINER).await?;
    Ok(Container { exit_code, stdout, stderr, denied_open: None, error: None })
}

/// How long a guest's console may be silent about its agent before it is
/// dialled all the same.
const SILENCE: Duration = Duration::from_secs(15);

async fn first_check(vm: &Vm) -> Agent {
    // A connection made while the guest's transport comes up can wedge
    // vhost-device-vsock for good; the console says when there is an agent.
    let listens = |record: &BootRecord| record.event("agent-listening").is_some();
    let _ = timeout(SILENCE, vm.console().wait_for(listens)).await;
    loop {
        // The caller's deadline ends this loop.
        if let Ok(stream) = vm.connect(firstlight_agent_api::AGENT_PORT, Duration::from_secs(3600)).await {
            let agent = Agent::new(stream, CHECK);
            if agent.check().await.is_ok() {
                return agent;
            }
        }
        sleep(RETRY).await;
    }
}

/// Does `work` while the guest lives, for at most `deadline`.
async fn step<T>(
    vm: &mut Vm,
    name: &'static str,
    deadline: Duration,
    work: impl AsyncFnOnce(&Vm) -> T,
) -> Result<T, RunError> {
    let console = vm.console().clone();
    let result = {
        let vm: &Vm = vm;
        // The console ends when QEMU does.
        tokio::select! {
            result = timeout(deadline, work(vm)) => Some(result),
            () = console.ended() => None,
        }
    };
    match result {
        Some(Ok(value)) => Ok(value),
        Some(Err(_)) => Err(hangs(vm, name, deadline)),
        None => {
            let exit = vm.wait().await?;
            let record = vm.console().record();
            let failure = record.as_ref().and_then(|record| record.failure.as_ref());
            let why = failure.map_or_else(
                || format!("QEMU ended with {}; the console's last words:\n{}", exit.status, vm.last_words()),
                |failure| format!("boot failed in {}: {}", failure.unit, failure.detail),
            );
            Err(RunError::Ended { step: name, lived: exit.lived, why, record: record.map(Box::new) })
        }
    }
}

fn hangs(vm: &Vm, step: &'static str, elapsed: Duration) -> RunError {
    let record = vm.console().record().map(Box::new);
    RunError::Hangs { step, elapsed, last_words: vm.last_words(), record }
}

/// Minors of the GPUs that these CDI names mean.
fn granted_minors(record: &BootRecord, devices: &[String]) -> Vec<u32> {
    let means = |name: &String, gpu: &firstlight_boot_record::Gpu| {
        *name == gpu.index.to_string() || *name == gpu.pci.to_string() || name == "all"
    };
    let granted = record.gpus.iter().filter(|gpu| devices.iter().any(|name| means(name, gpu)));
    granted.filter_map(|gpu| gpu.minor).collect()
}

/// The agent's record with what only the console can tell: the power-off.
fn with_last_events(mut record: BootRecord, console: Option<BootRecord>) -> BootRecord {
    if let Some(console) = console {
        record.state = console.state;
        for event in console.events {
            if !record.events.contains(&event) {
                record.events.push(event);
            }
        }
        record.events.sort_by_key(|event| event.at_us);
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::Event;

    #[test]
    fn console_adds_what_came_after_the_record() {
        let event =
            |at_us, kind: &str| Event { at_us, kind: kind.into(), object: String::new(), detail: String::new() };
        let mut record = BootRecord::new("1", 1);
        record.events = vec![event(5, "a")];
        let mut console = record.clone();
        console.events.push(event(9, "power-off"));
        console.state = State::PoweringOff;
        let merged = with_last_events(record.clone(), Some(console));
        assert_eq!(merged.events, [event(5, "a"), event(9, "power-off")]);
        assert_eq!(merged.state, State::PoweringOff);
        assert_eq!(with_last_events(record.clone(), None), record);
    }
}
