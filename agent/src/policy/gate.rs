//! One thread that asks the judge, one request after the other.
//!
//! An evaluation is work that may take seconds. The agent's loop only waits
//! for answers, so `Check` is answered meanwhile; and no lock is held, as the
//! thread alone has the judge. It begins with the first policy.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use firstlight_agent_api::agent::SetPolicyRequest;
use firstlight_policy::{Decision, Evaluator, LaunchOptions, PolicyError, Verdict};
use protobuf::Message as _;
use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// What the judge's thread is told.
enum Job {
    /// Judge these bytes as the request of that name.
    Judge(&'static str, Vec<u8>, oneshot::Sender<Result<()>>),
    /// Judge the replacement of the policy, then do it.
    Replace(Vec<u8>, oneshot::Sender<Result<()>>),
    /// Put a policy in force, whatever is in force.
    Load(String, oneshot::Sender<Result<()>>),
}

/// Where every request passes.
#[derive(Debug, Default)]
pub struct Gate {
    /// Not there until there is a policy.
    thread: OnceLock<Sender<Job>>,
}

impl Gate {
    /// A gate with a policy.
    ///
    /// # Errors
    /// The policy cannot be used; the text says why and where.
    pub(super) async fn open(policy: String) -> io::Result<Self> {
        let gate = Self::default();
        gate.tell(|reply| Job::Load(policy, reply)).await.map_err(io::Error::other)?;
        Ok(gate)
    }

    /// Lets a request pass, or not.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` with what the policy printed; `INVALID_ARGUMENT`: it is no such request.
    pub async fn pass(&self, request: &'static str, bytes: &[u8]) -> Result<()> {
        if self.thread.get().is_none() {
            return Ok(());
        }
        self.tell(|reply| Job::Judge(request, bytes.to_vec(), reply)).await
    }

    /// `SetPolicy`, given its request's bytes.
    ///
    /// # Errors
    /// As of [`Self::pass`]; `INVALID_ARGUMENT`: the policy cannot be used, and the one before stays.
    pub async fn replace(&self, request: Vec<u8>) -> Result<()> {
        self.tell(|reply| Job::Replace(request, reply)).await
    }

    async fn tell(&self, job: impl FnOnce(oneshot::Sender<Result<()>>) -> Job) -> Result<()> {
        let gone = || Error::internal("the policy's thread is gone");
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
        started.map_err(|error| Error::internal(format!("a thread for the policy: {error}")))?;
        Ok(self.thread.get_or_init(|| sender))
    }
}

/// Works until the agent ends. Judges die with this thread, so it is one that stays.
fn work(jobs: &Receiver<Job>) {
    let mut judge = None;
    while let Ok(job) = jobs.recv() {
        // Whoever does not wait any more does not want an answer.
        let _ = match job {
            Job::Judge(request, bytes, reply) => reply.send(judged(judge.as_mut(), request, &bytes)),
            Job::Replace(bytes, reply) => reply.send(replace(&mut judge, &bytes)),
            Job::Load(policy, reply) => reply.send(load(&mut judge, policy)),
        };
    }
}

fn replace(judge: &mut Option<Evaluator>, bytes: &[u8]) -> Result<()> {
    judged(judge.as_mut(), SetPolicyRequest::NAME, bytes)?;
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

fn judged(judge: Option<&mut Evaluator>, request: &str, bytes: &[u8]) -> Result<()> {
    let Some(judge) = judge else { return Ok(()) };
    let Verdict { decision, text } = judge.evaluate(request, bytes);
    match decision {
        Decision::Allowed => Ok(()),
        Decision::Tolerated => {
            log::warn!("{request} is against the policy, which has AllowRequestsFailingPolicy: {text}");
            Ok(())
        }
        Decision::Denied => Err(Error::new(ttrpc::Code::PERMISSION_DENIED, blocked(request, &text))),
        Decision::Malformed => Err(Error::invalid(text)),
    }
}

/// The words that callers of Kata's agent know.
fn blocked(request: &str, text: &str) -> String {
    format!("{request} is blocked by policy: {text}")
}
