//! The judge as the agent sees it: started when needed, killed when late, replaced when dead.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::wire::{self, Answer, Ask, Verdict};
use crate::{Fault, JUDGE_ARGUMENT, MAX_POLICY};

/// How a judge is started.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The program, which calls [`crate::judge::run`].
    pub program: PathBuf,
    /// What it is bounded by.
    pub limits: Limits,
}

impl Default for Launch {
    /// The running program again.
    fn default() -> Self {
        Self { program: "/proc/self/exe".into(), limits: Limits::default() }
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// To read and check a policy.
    pub load: Duration,
    /// To evaluate a request; well below the shortest timeout of a shim, 30 s.
    pub evaluation: Duration,
    /// What the judge gets on top of an evaluation before it is killed.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { load: Duration::from_secs(20), evaluation: Duration::from_secs(8), grace: Duration::from_secs(4) }
    }
}

/// A policy in force.
#[derive(Debug)]
pub struct Judge {
    launch: Launch,
    policy: String,
    state: Value,
    process: Option<Process>,
}

impl Judge {
    /// Puts a policy in force; its memory is empty.
    ///
    /// # Errors
    /// The policy is not one, or no judge can be started.
    pub fn start(launch: Launch, policy: String) -> Result<Self, Fault> {
        if policy.len() > MAX_POLICY {
            return Err(Fault::Policy(format!("{} bytes, {MAX_POLICY} is the most", policy.len())));
        }
        let state = json!({});
        let process = Process::start(&launch, &policy, &state)?;
        Ok(Self { launch, policy, state, process: Some(process) })
    }

    /// Judges a request, given the name of its message and its bytes on the
    /// wire. Whatever goes wrong is a denial.
    pub fn judge(&mut self, request: &str, bytes: &[u8]) -> Verdict {
        let process = match self.process.take() {
            Some(process) => Ok(process),
            None => Process::start(&self.launch, &self.policy, &self.state),
        };
        let mut process = match process {
            Ok(process) => process,
            Err(fault) => return Verdict::denied(fault.to_string()),
        };
        match process.judge(request, bytes, &self.launch.limits) {
            Ok((verdict, state)) => {
                self.process = Some(process);
                if let Some(state) = state {
                    self.state = state;
                }
                verdict
            }
            Err(fault) => Verdict::denied(fault.to_string()),
        }
    }

    /// Changes how long requests may take from now on; the judge that runs keeps its own limit.
    pub fn limit(&mut self, limits: Limits) {
        self.launch.limits = limits;
    }

    /// The judge's process, if it lives.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.child.id())
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
    socket: UnixStream,
}

impl Process {
    fn start(launch: &Launch, policy: &str, state: &Value) -> Result<Self, Fault> {
        let cannot = |error: io::Error| Fault::Judge(format!("cannot be started: {error}"));
        let (socket, theirs) = UnixStream::pair().map_err(cannot)?;
        let child = Command::new(&launch.program)
            .arg(JUDGE_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| cannot(io::Error::other(format!("{}: {error}", launch.program.display()))))?;
        let mut process = Self { child, socket };
        let ask = Ask::Load { state: state.clone(), limit: launch.limits.evaluation };
        match process.ask(&ask, policy.as_bytes(), launch.limits.load, "reading the policy")? {
            Answer::Loaded => Ok(process),
            Answer::Unloadable(why) => Err(Fault::Policy(why)),
            Answer::Judged { .. } => Err(Fault::Judge("answered what nobody asked".into())),
        }
    }

    fn judge(&mut self, request: &str, bytes: &[u8], limits: &Limits) -> Result<(Verdict, Option<Value>), Fault> {
        let ask = Ask::Judge { request: request.to_owned() };
        match self.ask(&ask, bytes, limits.evaluation + limits.grace, "evaluating it")? {
            Answer::Judged { verdict, state } => Ok((verdict, state)),
            Answer::Loaded | Answer::Unloadable(_) => Err(Fault::Judge("answered what nobody asked".into())),
        }
    }

    fn ask(&mut self, ask: &impl Serialize, body: &[u8], limit: Duration, what: &str) -> Result<Answer, Fault> {
        let begin = Instant::now();
        let mut socket = Timed { socket: &self.socket, end: begin + limit };
        let answered = wire::write(&mut socket, ask, body).and_then(|()| wire::read(&mut socket));
        match answered {
            Ok((answer, _)) => Ok(answer),
            Err(error) => Err(Fault::Judge(self.ended(what, begin.elapsed(), &error))),
        }
    }

    /// Why there was no answer. Ends the process, whatever it does.
    fn ended(&mut self, what: &str, after: Duration, error: &io::Error) -> String {
        let late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let _ = self.child.kill();
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let after = after.as_secs_f32();
        if late {
            return format!("{what} took longer than {after:.1} s: simplify the policy");
        }
        format!("{what} ended the judge after {after:.1} s ({status}): the policy recurses or needs too much memory")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket with a deadline for all that is read and written.
struct Timed<'a> {
    socket: &'a UnixStream,
    end: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
