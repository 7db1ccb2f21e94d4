//! The agent's handle of the evaluator process: started when needed, killed at its deadline, restarted when dead.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::wire::{self, Request, Response, Verdict};
use crate::{EVALUATOR_ARGUMENT, MAX_POLICY, PolicyError};

/// How the evaluator is started.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// The program, which calls [`crate::evaluator::run`].
    pub program: PathBuf,
    /// Its time limits.
    pub limits: Limits,
}

impl Default for LaunchOptions {
    /// The current program with default limits.
    fn default() -> Self {
        Self { program: "/proc/self/exe".into(), limits: Limits::default() }
    }
}

/// Time limits of the evaluator.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// To parse and check a policy.
    pub load: Duration,
    /// To evaluate a request; well below the shortest timeout of a shim, 30 s.
    pub evaluation: Duration,
    /// Time on top of `evaluation` before the process is killed.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { load: Duration::from_secs(20), evaluation: Duration::from_secs(8), grace: Duration::from_secs(4) }
    }
}

/// A policy in force, with its evaluator process.
#[derive(Debug)]
pub struct Evaluator {
    launch: LaunchOptions,
    policy: String,
    state: Value,
    process: Option<Process>,
}

impl Evaluator {
    /// Loads a policy with an empty state into a new evaluator process.
    ///
    /// # Errors
    /// The policy is invalid, or the process cannot be started.
    pub fn start(launch: LaunchOptions, policy: String) -> Result<Self, PolicyError> {
        if policy.len() > MAX_POLICY {
            return Err(PolicyError::InvalidPolicy(format!("{} bytes; the limit is {MAX_POLICY}", policy.len())));
        }
        let state = json!({});
        let process = Process::start(&launch, &policy, &state)?;
        Ok(Self { launch, policy, state, process: Some(process) })
    }

    /// Evaluates a request, given the name of its message and its encoded bytes. Every error is a denial.
    pub fn evaluate(&mut self, request: &str, bytes: &[u8]) -> Verdict {
        let process = match self.process.take() {
            Some(process) => Ok(process),
            None => Process::start(&self.launch, &self.policy, &self.state),
        };
        let mut process = match process {
            Ok(process) => process,
            Err(error) => return Verdict::denied(error.to_string()),
        };
        match process.evaluate(request, bytes, &self.launch.limits) {
            Ok((verdict, state)) => {
                self.process = Some(process);
                if let Some(state) = state {
                    self.state = state;
                }
                verdict
            }
            Err(error) => Verdict::denied(error.to_string()),
        }
    }

    /// Sets the limits of further requests; a running process keeps its own evaluation limit.
    pub fn set_limits(&mut self, limits: Limits) {
        self.launch.limits = limits;
    }

    /// Returns the evaluator's pid, if it is alive.
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
    fn start(launch: &LaunchOptions, policy: &str, state: &Value) -> Result<Self, PolicyError> {
        let failed = |error: io::Error| PolicyError::Evaluator(format!("failed to start: {error}"));
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        let child = Command::new(&launch.program)
            .arg(EVALUATOR_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| failed(io::Error::other(format!("{}: {error}", launch.program.display()))))?;
        let mut process = Self { child, socket };
        let request = Request::Load { state: state.clone(), limit: launch.limits.evaluation };
        match process.exchange(&request, policy.as_bytes(), launch.limits.load, "loading the policy")? {
            Response::Loaded => Ok(process),
            Response::InvalidPolicy(why) => Err(PolicyError::InvalidPolicy(why)),
            Response::Evaluated { .. } => Err(PolicyError::Evaluator("unexpected response".into())),
        }
    }

    fn evaluate(
        &mut self,
        request: &str,
        bytes: &[u8],
        limits: &Limits,
    ) -> Result<(Verdict, Option<Value>), PolicyError> {
        let request = Request::Evaluate { request: request.to_owned() };
        match self.exchange(&request, bytes, limits.evaluation + limits.grace, "evaluation")? {
            Response::Evaluated { verdict, state } => Ok((verdict, state)),
            Response::Loaded | Response::InvalidPolicy(_) => Err(PolicyError::Evaluator("unexpected response".into())),
        }
    }

    fn exchange(
        &mut self,
        request: &impl Serialize,
        body: &[u8],
        limit: Duration,
        what: &str,
    ) -> Result<Response, PolicyError> {
        let begin = Instant::now();
        let mut socket = Timed { socket: &self.socket, end: begin + limit };
        let response = wire::write(&mut socket, request, body).and_then(|()| wire::read(&mut socket));
        match response {
            Ok((response, _)) => Ok(response),
            Err(error) => Err(PolicyError::Evaluator(self.kill_and_explain(what, begin.elapsed(), &error))),
        }
    }

    /// Kills the process and returns why there was no response.
    fn kill_and_explain(&mut self, what: &str, after: Duration, error: &io::Error) -> String {
        let timed_out = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let _ = self.child.kill();
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let after = after.as_secs_f32();
        if timed_out {
            return format!("{what} took longer than {after:.1} s: simplify the policy");
        }
        format!(
            "{what} crashed the evaluator after {after:.1} s ({status}): the policy recurses or needs too much memory"
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket with one deadline for all reads and writes.
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
