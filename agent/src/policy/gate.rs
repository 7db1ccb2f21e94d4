//! Policy checks in a dedicated thread, one request at a time.
//!
//! An evaluation may take seconds. The agent's event loop awaits the result, so `Check` is answered
//! in the meantime; no lock is held, as only the thread has the judge process. The thread starts
//! with the first policy.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use firstlight_agent_api::agent::SetPolicyRequest;
use firstlight_policy::{Decision, Evaluator, LaunchOptions, PolicyError, Verdict};
use protobuf::Message as _;
use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// A job of the policy thread.
enum Job {
    /// Evaluate these bytes as a request of this type.
    Judge(&'static str, Vec<u8>, oneshot::Sender<Result<()>>),
    /// Authorise SetPolicy, then replace the policy.
    Replace(Vec<u8>, oneshot::Sender<Result<()>>),
    /// Load a policy without authorisation.
    Load(String, oneshot::Sender<Result<()>>),
}

/// The policy check that every request passes.
#[derive(Debug, Default)]
pub struct Gate {
    /// Unset until there is a policy.
    thread: OnceLock<Sender<Job>>,
}

impl Gate {
    /// Creates a gate with a policy.
    ///
    /// # Errors
    /// The policy is unusable; the text has reason and position.
    pub(super) async fn open(policy: String) -> io::Result<Self> {
        let gate = Self::default();
        gate.submit(|reply| Job::Load(policy, reply)).await.map_err(io::Error::other)?;
        Ok(gate)
    }

    /// Authorises a request.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` with the policy's prints; `INVALID_ARGUMENT`: not a valid request.
    pub async fn authorise(&self, request: &'static str, bytes: &[u8]) -> Result<()> {
        if self.thread.get().is_none() {
            return Ok(());
        }
        self.submit(|reply| Job::Judge(request, bytes.to_vec(), reply)).await
    }

    /// Handles `SetPolicy`, given the encoded request.
    ///
    /// # Errors
    /// As [`Self::authorise`]; `INVALID_ARGUMENT`: the policy is unusable, and the previous one stays in
    /// force.
    pub async fn replace(&self, request: Vec<u8>) -> Result<()> {
        self.submit(|reply| Job::Replace(request, reply)).await
    }

    async fn submit(&self, job: impl FnOnce(oneshot::Sender<Result<()>>) -> Job) -> Result<()> {
        let gone = || Error::internal("the policy thread has ended");
        let (reply, answer) = oneshot::channel();
        self.thread()?.send(job(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    fn thread(&self) -> Result<&Sender<Job>> {
        if let Some(thread) = self.thread.get() {
            return Ok(thread);
        }
        let (sender, receiver) = channel();
        let started = thread::Builder::new().name("policy".into()).spawn(move || work(&receiver));
        started.map_err(|error| Error::internal(format!("failed to start the policy thread: {error}")))?;
        Ok(self.thread.get_or_init(|| sender))
    }
}

/// Runs until the agent exits. A judge process dies with the thread that started it, so this thread
/// is permanent.
fn work(jobs: &Receiver<Job>) {
    let mut judge = None;
    while let Ok(job) = jobs.recv() {
        // The receiver may have been dropped.
        let _ = match job {
            Job::Judge(request, bytes, reply) => reply.send(authorise(judge.as_mut(), request, &bytes)),
            Job::Replace(bytes, reply) => reply.send(replace(&mut judge, &bytes)),
            Job::Load(policy, reply) => reply.send(load(&mut judge, policy)),
        };
    }
}

fn replace(judge: &mut Option<Evaluator>, bytes: &[u8]) -> Result<()> {
    authorise(judge.as_mut(), SetPolicyRequest::NAME, bytes)?;
    let request = SetPolicyRequest::parse_from_bytes(bytes).map_err(|error| Error::invalid(error.to_string()))?;
    load(judge, request.policy).map_err(|error| error.during("SetPolicy"))
}

fn load(judge: &mut Option<Evaluator>, policy: String) -> Result<()> {
    let started = Evaluator::start(LaunchOptions::default(), policy).map_err(|fault| match fault {
        PolicyError::InvalidPolicy(_) => Error::invalid(fault.to_string()),
        PolicyError::Evaluator(_) => Error::internal(fault.to_string()),
    });
    *judge = Some(started?);
    Ok(())
}

fn authorise(judge: Option<&mut Evaluator>, request: &str, bytes: &[u8]) -> Result<()> {
    let Some(judge) = judge else { return Ok(()) };
    let Verdict { decision, text } = judge.evaluate(request, bytes);
    match decision {
        Decision::Allowed => Ok(()),
        Decision::Tolerated => {
            log::warn!("{request} violates the policy, allowed by AllowRequestsFailingPolicy: {text}");
            Ok(())
        }
        Decision::Denied => Err(Error::new(ttrpc::Code::PERMISSION_DENIED, blocked(request, &text))),
        Decision::Malformed => Err(Error::invalid(text)),
    }
}

/// Formats the message as Kata's agent does.
fn blocked(request: &str, text: &str) -> String {
    format!("{request} is blocked by policy: {text}")
}
