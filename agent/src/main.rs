//! The agent's executable: two processes, the server and the runtime that owns the containers.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::Context;
use firstlight_agent::config::Config;
use firstlight_agent::paths::Paths;
use firstlight_agent::{log as agent_log, server};
use firstlight_sys::fork::{Side, fork};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

fn main() -> ExitCode {
    #[cfg(feature = "agent-policy")]
    if std::env::args().nth(1).is_some_and(|argument| argument == firstlight_policy::EVALUATOR_ARGUMENT) {
        return firstlight_policy::evaluator::run();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == firstlight_runtime::HOOKS_ARGUMENT) {
        return firstlight_runtime::create_runtime_hook_main(std::env::args_os().skip(2));
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "--print-params") {
        print!("{}", firstlight_agent::config::print());
        return ExitCode::SUCCESS;
    }
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Forks before starting any thread: the runtime must be single-threaded for its whole life.
fn start() -> anyhow::Result<()> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .context("failed to create the socket pair between server and runtime")?;
    match fork().context("failed to fork the container runtime")? {
        Side::Child => {
            drop(ours);
            own_containers(theirs)
        }
        Side::Parent(_) => {
            drop(theirs);
            serve(ours)
        }
    }
}

fn own_containers(socket: OwnedFd) -> anyhow::Result<()> {
    // Shown by ps and top.
    let _ = rustix::thread::set_name(c"firstlight-rt");
    let state = Paths::below("/".as_ref()).state;
    firstlight_runtime::run(socket, firstlight_runtime::Options { state }).context("container runtime")
}

fn serve(socket: OwnedFd) -> anyhow::Result<()> {
    let config = Config::read();
    agent_log::start(config.log, config.control.is_some(), config.log_port.is_some());
    for warning in &config.warnings {
        log::error!("{warning}");
    }
    let executor =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")?;
    executor.block_on(server::serve(config, socket)).context("agent")
}
