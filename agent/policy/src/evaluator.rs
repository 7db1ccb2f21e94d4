//! The evaluator: the process with the Rego engine; it serves requests on its standard input.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;

use rustix::process::{Gid, Resource, Rlimit, Signal, Uid};

use crate::engine::Engine;
use crate::requests;
use crate::wire::{self, Decision, Request, Response, Verdict};

/// The stack for evaluations: large enough for nested function calls; a recursive policy overflows it and kills
/// the process.
const STACK: usize = 64 << 20;

/// Resource limits: address space, file size, core size, open files.
const LIMITS: &[(Resource, u64)] =
    &[(Resource::As, 1 << 30), (Resource::Fsize, 0), (Resource::Core, 0), (Resource::Nofile, 16)];

/// The uid and gid of `nobody`.
const NOBODY: u32 = 65534;

/// Serves evaluations until the agent closes the socket.
#[must_use]
pub fn run() -> ExitCode {
    let served = confine().and_then(|()| {
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let worker = thread::Builder::new().stack_size(STACK).spawn(move || serve(&socket))?;
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the evaluator panicked")))
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Drops privileges and sets resource limits: a policy is untrusted code.
fn confine() -> io::Result<()> {
    // Only for readers of the process table.
    let _ = rustix::thread::set_name(c"fl-policy");
    // The OOM killer shall choose this process first: the request is denied, and the process is restarted.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    for (resource, most) in LIMITS {
        let bound = Rlimit { current: Some(*most), maximum: Some(*most) };
        rustix::process::setrlimit(*resource, bound)?;
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::thread::set_no_new_privs(true)?;
    if rustix::process::geteuid().is_root() {
        let (gid, uid) = (Gid::from_raw(NOBODY), Uid::from_raw(NOBODY));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        // The kernel clears it on a change of credentials.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    Ok(())
}

fn serve(mut socket: &UnixStream) -> io::Result<()> {
    let mut engine = None;
    loop {
        let (request, body) = match wire::read(&mut socket) {
            Ok(frame) => frame,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let response = response(&mut engine, request, body);
        wire::write(&mut socket, &response, &[])?;
    }
}

fn response(engine: &mut Option<Engine>, request: Request, body: Vec<u8>) -> Response {
    match request {
        Request::Load { state, limit } => {
            let Ok(policy) = String::from_utf8(body) else { return Response::InvalidPolicy("not UTF-8".into()) };
            match Engine::load(policy, state, limit) {
                Ok(loaded) => {
                    *engine = Some(loaded);
                    Response::Loaded
                }
                Err(error) => Response::InvalidPolicy(match error {
                    crate::PolicyError::InvalidPolicy(why) | crate::PolicyError::Evaluator(why) => why,
                }),
            }
        }
        Request::Evaluate { request } => {
            let verdict = |verdict| Response::Evaluated { verdict, state: None };
            let Some(engine) = engine else { return verdict(Verdict::denied("no policy is loaded")) };
            let input = match requests::json(&request, &body) {
                Ok(input) => input,
                Err(why) => return verdict(Verdict::new(Decision::Malformed, why)),
            };
            drop(body);
            let before = engine.state().clone();
            let verdict = engine.evaluate(&request, &input);
            let state = Some(engine.state()).filter(|state| **state != before).cloned();
            Response::Evaluated { verdict, state }
        }
    }
}
