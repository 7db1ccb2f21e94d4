//! The judge: a process that holds the engine and answers on its standard input.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;

use rustix::process::{Gid, Resource, Rlimit, Signal, Uid};

use crate::engine::Engine;
use crate::requests;
use crate::wire::{self, Answer, Ask, Decision, Verdict};

/// The stack for evaluations. Policies call their functions in each other's
/// arguments; one that recurses ends the judge here.
const STACK: usize = 64 << 20;

/// What the judge may be: address space, data written, files open.
const BOUNDS: &[(Resource, u64)] =
    &[(Resource::As, 1 << 30), (Resource::Fsize, 0), (Resource::Core, 0), (Resource::Nofile, 16)];

/// Nobody.
const NOBODY: u32 = 65534;

/// Is the judge until the agent hangs up.
#[must_use]
pub fn run() -> ExitCode {
    let served = confine().and_then(|()| {
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let worker = thread::Builder::new().stack_size(STACK).spawn(move || serve(&socket))?;
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the judge panicked")))
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Gives away what a judge does not need: a policy is somebody else's program.
fn confine() -> io::Result<()> {
    // Only for people who look at the process table.
    let _ = rustix::thread::set_name(c"fl-policy");
    // When memory runs out the judge goes first: without one requests are denied, and another is started.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    for (resource, most) in BOUNDS {
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
        // The change of user has forgotten it.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    Ok(())
}

fn serve(mut socket: &UnixStream) -> io::Result<()> {
    let mut engine = None;
    loop {
        let (ask, body) = match wire::read(&mut socket) {
            Ok(frame) => frame,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let answer = answer(&mut engine, ask, body);
        wire::write(&mut socket, &answer, &[])?;
    }
}

fn answer(engine: &mut Option<Engine>, ask: Ask, body: Vec<u8>) -> Answer {
    match ask {
        Ask::Load { state, limit } => {
            let Ok(policy) = String::from_utf8(body) else { return Answer::Unloadable("not UTF-8".into()) };
            match Engine::load(policy, state, limit) {
                Ok(loaded) => {
                    *engine = Some(loaded);
                    Answer::Loaded
                }
                Err(fault) => Answer::Unloadable(match fault {
                    crate::Fault::Policy(why) | crate::Fault::Judge(why) => why,
                }),
            }
        }
        Ask::Judge { request } => {
            let verdict = |verdict| Answer::Judged { verdict, state: None };
            let Some(engine) = engine else { return verdict(Verdict::denied("no policy is loaded")) };
            let input = match requests::json(&request, &body) {
                Ok(input) => input,
                Err(why) => return verdict(Verdict::new(Decision::Malformed, why)),
            };
            drop(body);
            let before = engine.state().clone();
            let verdict = engine.judge(&request, &input);
            let state = Some(engine.state()).filter(|state| **state != before).cloned();
            Answer::Judged { verdict, state }
        }
    }
}
