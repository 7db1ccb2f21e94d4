//! Executes a run: the steps of a Kata shim, in their order.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use firstlight_boot_profile::{TableOptions, table};
use firstlight_boot_record::{BootRecord, GpuPhase, State};
use firstlight_oci::Image;
use firstlight_vm::{Exit, Share, Vm};
use tokio::time::{sleep, timeout};

use super::progress::{Lines, Progress};
use super::report::{Container, HostTimes, Report, micros};
use super::share::Directories;
use super::{ContainerCommand, Run, RunError};
use crate::agent::{Agent, AgentError, Output, SHARED_TAG};
use crate::container::{self, Probe};

/// The container's id; also its name in the boot record.
const CONTAINER: &str = "firstlight-run";

/// The sandbox's id.
const SANDBOX: &str = "firstlight-sandbox";

/// Interval between connections to an agent that did not answer `Check`.
const RETRY: Duration = Duration::from_millis(5);

/// Timeout of a `Check` before reconnecting.
const CHECK: Duration = Duration::from_secs(2);

/// Interval of `Check` calls while waiting, as in a shim.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Missed `Check` replies after which the agent is considered dead.
const MAX_MISSED: u32 = 8;

/// Boots the guest, runs the container, powers off. `progress` is called for each
/// step and for each line of the container's output.
///
/// A container that could not be created is not an error of the run: the report
/// has the reason.
///
/// # Errors
/// The guest did not boot, hangs, or exited early; the error has the end of its
/// console and its partial boot record.
pub async fn run(run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Report, RunError> {
    let image = Image::open(&run.image)?;
    let command = command(run, &image)?;
    let dirs = Directories::create()?;
    dirs.unpack(&image, CONTAINER)?;
    let mut machine = run.machine.clone();
    machine.shares.push(Share { tag: SHARED_TAG.to_owned(), dir: dirs.shared() });
    let mut vm = Vm::start(&machine, &dirs.machine(), &run.console_log).await?;
    let result = drive(run, &image, &command, &mut vm, progress).await;
    vm.stop().await;
    result
}

/// Returns the arguments of the container's process.
fn command(run: &Run, image: &Image) -> Result<Vec<String>, RunError> {
    let arguments = match &run.command {
        ContainerCommand::Probe => container::probe_command(),
        ContainerCommand::Image => image.default_command(),
        ContainerCommand::Arguments(arguments) => arguments.clone(),
    };
    if arguments.is_empty() { Err(RunError::NoCommand { image: run.image.clone() }) } else { Ok(arguments) }
}

async fn drive(
    run: &Run,
    image: &Image,
    command: &[String],
    vm: &mut Vm,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, RunError> {
    let agent = step(vm, "wait for the agent", Limit::of("boot", run.deadlines.boot), connect_agent).await?;
    let agent = agent.with_call_timeout(run.deadlines.call);
    let mut host = HostTimes { first_check_us: micros(vm.uptime()), qemu_exit_us: 0 };
    say(progress, &format!("the agent answers {} ms after QEMU's start", host.first_check_us / 1000));
    if let Ok(record) = agent.boot_record().await {
        let attaching = record.gpus.iter().filter(|gpu| gpu.phase != GpuPhase::Ready).count();
        say(progress, &format!("{attaching} of {} GPUs found are not ready yet", record.gpus.len()));
    }
    if let Err(error) = agent.create_sandbox(SANDBOX).await {
        return Err(agent_error(vm, "create the sandbox", error).await);
    }

    let begin = Instant::now();
    let mut container = Container::default();
    match run_container(run, image, command, &agent, vm, progress).await? {
        Ok(exited) => {
            container = exited;
            say(
                progress,
                &format!("the container ran for {} ms, its wait for GPUs included", begin.elapsed().as_millis()),
            );
        }
        Err(error @ AgentError::Lost { .. }) => return Err(agent_error(vm, "run the container", error).await),
        Err(error) => {
            say(progress, &format!("the container did not run: {error}"));
            container.command_not_found = error.is_command_not_found();
            container.error = Some(error.to_string());
        }
    }
    // The record is complete when the last GPU is ready or has failed.
    let ended = |record: &BootRecord| !matches!(record.state, State::Booting);
    let console = vm.console().clone();
    let _ = timeout(run.deadlines.create, console.wait_for(ended)).await;
    if run.keep {
        // Shown now: the guest may run for days, and may be killed.
        match agent.boot_record().await {
            Ok(record) => say(progress, &format!("the boot:\n{}", table(&record, TableOptions::stdout(false)))),
            Err(error) => say(progress, &format!("failed to read the boot record: {error}")),
        }
        say(
            progress,
            &format!("guest keeps running: agent at {} (CONNECT 1024), Ctrl-C stops it", vm.vsock().display()),
        );
        let exit = vm.wait().await?;
        return Err(exit_error(vm, "keep the guest running", &exit));
    }
    let record = match agent.boot_record().await {
        Ok(record) => record,
        Err(error) => return Err(agent_error(vm, "read the boot record", error).await),
    };
    if run.command == ContainerCommand::Probe {
        let granted = granted_minors(&record, &run.devices);
        container.denied_open = Probe::read(&container.stdout).denied_open(&granted);
    }
    // The guest may exit before its reply arrives; its exit confirms the power-off.
    if let Err(error) = agent.destroy_sandbox().await {
        say(progress, &format!("the agent did not confirm the power-off: {error}"));
    }
    match timeout(run.deadlines.power_off, vm.wait()).await {
        Ok(exit) => host.qemu_exit_us = micros(exit?.uptime),
        Err(_) => return Err(hang_error(vm, "power off", "power-off", run.deadlines.power_off)),
    }
    let record = with_console_events(record, vm.console().record());
    Ok(Report::new(record, container, CONTAINER, host))
}

/// Reports a step.
fn say(progress: &mut dyn FnMut(Progress<'_>), text: &str) {
    progress(Progress::Step(text));
}

/// Runs the container. The outer error is the guest's, the inner one the agent's.
async fn run_container(
    run: &Run,
    image: &Image,
    command: &[String],
    agent: &Agent,
    vm: &mut Vm,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Result<Container, AgentError>, RunError> {
    let spec = container::spec(CONTAINER, image, command, &run.devices);
    // The agent's deadline expires first: its error names the GPU it waits for.
    let limit = Limit::of("create", run.deadlines.create + run.deadlines.call);
    let deadline = run.deadlines.create;
    let created = step(vm, "create the container", limit, async |_: &Vm| {
        while_alive(agent, agent.create_container(CONTAINER, spec, deadline)).await
    });
    if let Err(error) = created.await? {
        return Ok(Err(error));
    }
    let limit = Limit { name: "container", time: run.deadlines.container };
    step(vm, "run the container", limit, async |_: &Vm| while_alive(agent, start_and_wait(agent, progress)).await).await
}

/// Awaits `work` while the agent answers `Check`.
async fn while_alive<T>(agent: &Agent, work: impl Future<Output = Result<T, AgentError>>) -> Result<T, AgentError> {
    let checker = agent.clone().with_call_timeout(HEARTBEAT);
    let dead = async {
        let mut missed = 0;
        loop {
            sleep(HEARTBEAT).await;
            match checker.check().await {
                Ok(()) => missed = 0,
                Err(error) if missed == MAX_MISSED => return error,
                Err(_) => missed += 1,
            }
        }
    };
    tokio::select! {
        result = work => result,
        error = dead => Err(error),
    }
}

async fn start_and_wait(agent: &Agent, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Container, AgentError> {
    agent.start_container(CONTAINER).await?;
    // Both streams are read at once and report to the same receiver.
    let progress = RefCell::new(progress);
    let read = |output| {
        let (mut lines, progress) = (Lines::new(output), &progress);
        agent.read_all(CONTAINER, output, move |bytes| lines.feed(bytes, &mut *progress.borrow_mut()))
    };
    let (stdout, stderr) = tokio::try_join!(read(Output::Stdout), read(Output::Stderr))?;
    let exit_code = Some(agent.wait(CONTAINER).await?);
    agent.remove_container(CONTAINER).await?;
    Ok(Container { exit_code, stdout, stderr, ..Container::default() })
}

/// Time to wait for `agent-listening` on the console before connecting anyway.
const LISTENING_TIMEOUT: Duration = Duration::from_secs(15);

async fn connect_agent(vm: &Vm) -> Agent {
    // A connection made while the guest initialises its vsock can block
    // vhost-device-vsock permanently; the console reports when the agent listens.
    let listens = |record: &BootRecord| record.event("agent-listening").is_some();
    let _ = timeout(LISTENING_TIMEOUT, vm.console().wait_for(listens)).await;
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

/// A deadline: its name in `--deadline NAME=SECONDS`, and its time.
#[derive(Debug, Clone, Copy)]
struct Limit {
    name: &'static str,
    time: Option<Duration>,
}

impl Limit {
    fn of(name: &'static str, time: Duration) -> Self {
        Self { name, time: Some(time) }
    }
}

/// Awaits `work`, without limit if `limit` is `None`.
async fn within<T>(limit: Option<Duration>, work: impl Future<Output = T>) -> Result<T, Duration> {
    match limit {
        Some(limit) => timeout(limit, work).await.map_err(|_| limit),
        None => Ok(work.await),
    }
}

/// Runs `work` while the guest runs, for at most `limit`.
async fn step<T>(
    vm: &mut Vm,
    name: &'static str,
    limit: Limit,
    work: impl AsyncFnOnce(&Vm) -> T,
) -> Result<T, RunError> {
    let console = vm.console().clone();
    let result = {
        let vm: &Vm = vm;
        // The console closes when QEMU exits.
        tokio::select! {
            result = within(limit.time, work(vm)) => Some(result),
            () = console.ended() => None,
        }
    };
    match result {
        Some(Ok(value)) => Ok(value),
        Some(Err(waited)) => Err(hang_error(vm, name, limit.name, waited)),
        None => {
            let exit = vm.wait().await?;
            Err(exit_error(vm, name, &exit))
        }
    }
}

/// Returns the error of a guest that exited.
fn exit_error(vm: &Vm, step: &'static str, exit: &Exit) -> RunError {
    let record = vm.console().record();
    let failure = record.as_ref().and_then(|record| record.failure.as_ref());
    let why = failure.map_or_else(
        || format!("QEMU exited with {}; end of the console:\n{}", exit.status, vm.console_tail()),
        |failure| format!("boot failed in {}: {}", failure.unit, failure.detail),
    );
    RunError::Ended { step, uptime: exit.uptime, why, record: record.map(Box::new) }
}

/// Time for a guest to exit after its agent's connection broke: PID 1 reports a failed boot and powers off.
const EXIT_AFTER_LOSS: Duration = Duration::from_secs(15);

/// Returns the error of a failed call: that of the guest, if it has exited or exits now.
async fn agent_error(vm: &mut Vm, step: &'static str, source: AgentError) -> RunError {
    let console = vm.console().clone();
    let lost = matches!(source, AgentError::Lost { .. });
    if lost
        && timeout(EXIT_AFTER_LOSS, console.ended()).await.is_ok()
        && let Ok(exit) = vm.wait().await
    {
        return exit_error(vm, step, &exit);
    }
    let record = vm.console().record().map(Box::new);
    RunError::Agent { step, source: Box::new(source), console_tail: vm.console_tail(), record }
}

fn hang_error(vm: &Vm, step: &'static str, deadline: &'static str, limit: Duration) -> RunError {
    let record = vm.console().record().map(Box::new);
    RunError::Hangs { step, deadline, limit, console_tail: vm.console_tail(), record }
}

/// Returns the minors of the GPUs that these CDI device names select.
fn granted_minors(record: &BootRecord, devices: &[String]) -> Vec<u32> {
    let selects = |name: &String, gpu: &firstlight_boot_record::Gpu| {
        *name == gpu.index.to_string() || *name == gpu.pci.to_string() || name == "all"
    };
    let granted = record.gpus.iter().filter(|gpu| devices.iter().any(|name| selects(name, gpu)));
    granted.filter_map(|gpu| gpu.minor).collect()
}

/// Adds state and events that only the console has, such as the power-off.
fn with_console_events(mut record: BootRecord, console: Option<BootRecord>) -> BootRecord {
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
    fn later_console_events_are_added_to_the_record() {
        let event =
            |at_us, kind: &str| Event { at_us, kind: kind.into(), object: String::new(), detail: String::new() };
        let mut record = BootRecord::new("1", 1);
        record.events = vec![event(5, "a")];
        let mut console = record.clone();
        console.events.push(event(9, "power-off"));
        console.state = State::PoweringOff;
        let merged = with_console_events(record.clone(), Some(console));
        assert_eq!(merged.events, [event(5, "a"), event(9, "power-off")]);
        assert_eq!(merged.state, State::PoweringOff);
        assert_eq!(with_console_events(record.clone(), None), record);
    }
}
