//! A running daemon: its lifecycle, processes and output.

use std::fs::create_dir_all;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use firstlight_sys::daemon::{Daemon as Program, start};
use rustix::fs::inotify;
use rustix::process::Pid;

use super::cgroup::Cgroup;
use super::launch::{self, ENVIRONMENT, Launch, OOM_SCORE};
use super::lifecycle::{Effect, Event, Lifecycle};
use super::output::{Pipe, Tail};
use super::ready::{Probe, ReadyEndpoint};
use super::table::{DaemonContext, DaemonSpec, Ready};
use crate::clock::ms;
use crate::restart::{Decision, MOST};
use crate::root::Root;

/// How long to wait for the exit status after the cgroup is empty, µs. The kernel
/// removes a process from its cgroup shortly before the parent can reap it.
const STATUS_US: u64 = 500_000;

/// A resumed instance that ended within this time has failed to resume, µs. A fabric manager with `--restart`
/// waits 60 s for a client to activate the partitions again.
const FAILED_RESUME_US: u64 = 75_000_000;

/// After so many consecutive failed resumes the next instance starts without state.
const MAX_FAILED_RESUMES: usize = 2;

/// A report to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A line of its output.
    Line(String),
    /// A line of its log file.
    FileLine(String),
    /// A boot-record event: name and detail.
    Event(&'static str, String),
    /// It is ready.
    Ready(String),
    /// It was not ready within the deadline of its first start.
    StartTimedOut(String),
    /// It reached its restart limit and will not be started again.
    RestartLimitReached(String),
    /// It is stopped.
    Stopped,
}

/// One daemon.
#[derive(Debug)]
pub struct Daemon {
    spec: &'static DaemonSpec,
    context: DaemonContext,
    root: Root,
    groups: PathBuf,
    lifecycle: Lifecycle,
    group: Option<Cgroup>,
    /// inotify watch on its cgroup, directory and log file.
    watch: Option<OwnedFd>,
    pipe: Option<Pipe>,
    tail: Option<Tail>,
    probe: Option<Probe>,
    /// The started process, until it has ended.
    main: Option<Pid>,
    /// Processes that were not reaped yet.
    members: Vec<Pid>,
    /// Exit status of the process that was reaped last.
    end: Option<String>,
    /// A more specific cause of its end, if known.
    cause: Option<String>,
    /// How its last instance ended.
    failure: String,
    /// The cgroup is empty; when to stop waiting for exit statuses, µs.
    empty_until: Option<u64>,
    /// Whether any instance was ready.
    served: bool,
    /// Whether the first start has succeeded or its timeout was reported.
    reported: bool,
    starts: usize,
    /// Whether the last start resumed from the previous state.
    resumed: bool,
    /// Consecutive failed resumes.
    failed_resumes: usize,
    first_us: u64,
    last_line: String,
    reports: Vec<Report>,
}

impl Daemon {
    /// Creates a daemon that is not started, with its cgroup below `groups`.
    #[must_use]
    pub fn new(spec: &'static DaemonSpec, context: DaemonContext, root: &Root, groups: &Path) -> Self {
        Self {
            spec,
            context,
            root: root.clone(),
            groups: groups.to_owned(),
            lifecycle: Lifecycle::new(spec.deadline),
            group: None,
            watch: None,
            pipe: None,
            tail: None,
            probe: None,
            main: None,
            members: Vec::new(),
            end: None,
            cause: None,
            failure: String::new(),
            empty_until: None,
            served: false,
            reported: false,
            starts: 0,
            resumed: false,
            failed_resumes: 0,
            first_us: 0,
            last_line: String::new(),
            reports: Vec::new(),
        }
    }

    /// Returns its table entry.
    #[must_use]
    pub fn spec(&self) -> &'static DaemonSpec {
        self.spec
    }

    /// Returns the guest's properties.
    #[must_use]
    pub fn context(&self) -> DaemonContext {
        self.context
    }

    /// Returns whether it is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.lifecycle.is_ready()
    }

    /// Returns whether it is stopped or has reached its restart limit.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lifecycle.is_over()
    }

    /// Returns the descriptors to poll.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.watch.as_ref().map(OwnedFd::as_fd).into_iter().chain(self.pipe.as_ref().map(Pipe::as_fd))
    }

    /// Returns when [`Daemon::turn`] is due if no descriptor is ready, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let probe = self.probe.as_ref().and_then(Probe::next_deadline);
        [self.lifecycle.next_deadline(), self.empty_until, probe].into_iter().flatten().min()
    }

    /// Starts it for the first time.
    pub fn start(&mut self, now: u64) {
        self.first_us = now;
        self.step(now, Event::Start);
    }

    /// Stops it for good.
    pub fn stop(&mut self, now: u64) {
        self.step(now, Event::Stop);
    }

    /// Returns whether this process belongs to it.
    #[must_use]
    pub fn has(&self, pid: Pid) -> bool {
        self.members.contains(&pid)
    }

    /// Handles a reaped process; `false` if it did not belong to this daemon.
    pub fn process_ended(&mut self, now: u64, pid: Pid, good: bool, words: &str) -> bool {
        let Some(at) = self.members.iter().position(|member| *member == pid) else { return false };
        self.members.remove(at);
        self.end = Some(words.to_owned());
        if self.main == Some(pid) {
            self.main = None;
            self.main_ended(now, good);
        }
        true
    }

    fn main_ended(&mut self, now: u64, good: bool) {
        let group = self.group.as_ref();
        let launcher = self.spec.ready_in(self.context) == Ready::Exit;
        if launcher && good && self.lifecycle.is_starting() && group.is_some_and(Cgroup::populated) {
            // The forked processes are reparented to PID 1, which reaps them.
            self.members = group.map(Cgroup::processes).unwrap_or_default();
            self.step(now, Event::Ready);
        } else {
            if launcher && good {
                self.cause = Some("exit status 0, but no daemon process remained".to_owned());
            }
            self.step(now, Event::MainEnded);
        }
    }

    /// Handles everything that may have changed and returns the reports.
    pub fn turn(&mut self, now: u64) -> Vec<Report> {
        let changed = self.drain_watch();
        let wrote = self.read(changed);
        if let Some(probe) = self.probe.as_mut().filter(|_| self.lifecycle.is_starting())
            && probe.turn(now, changed || wrote)
        {
            self.step(now, Event::Ready);
        }
        if changed || self.empty_until.is_some() {
            self.look_for_end(now);
        }
        self.step(now, Event::Clock);
        if !self.reported && !self.lifecycle.is_over() && now >= self.first_deadline() {
            self.reported = true;
            let text = self.sentence(now, "it is not ready", &self.failure);
            self.reports.push(Report::StartTimedOut(text));
        }
        std::mem::take(&mut self.reports)
    }

    fn first_deadline(&self) -> u64 {
        self.first_us.saturating_add(u64::try_from(self.spec.deadline.as_micros()).unwrap_or(u64::MAX))
    }

    fn drain_watch(&self) -> bool {
        let Some(watch) = &self.watch else { return false };
        let mut buffer = [std::mem::MaybeUninit::uninit(); 1024];
        let mut reader = inotify::Reader::new(watch, &mut buffer);
        let mut any = false;
        // The caller checks everything, so the events' content does not matter.
        while reader.next().is_ok() {
            any = true;
        }
        any
    }

    fn read(&mut self, changed: bool) -> bool {
        let mut lines = Vec::new();
        let mut signs = 0;
        if let Some(pipe) = &mut self.pipe {
            let open = pipe.read(&mut lines);
            if !open {
                pipe.end(&mut lines);
            }
            signs = lines.len();
            if signs > 0 {
                pipe.last().clone_into(&mut self.last_line);
            }
            if !open {
                // A pipe at EOF would keep waking PID 1.
                self.pipe = None;
            }
        }
        if changed && self.tail.is_none() {
            self.tail = self.spec.log.and_then(|path| Tail::open(&self.root.path(path)).ok());
        }
        self.reports.extend(lines.drain(..).map(Report::Line));
        if let Some(tail) = self.tail.as_mut().filter(|_| changed) {
            tail.read(&mut lines);
            if !lines.is_empty() {
                tail.last().clone_into(&mut self.last_line);
            }
        }
        self.reports.extend(lines.into_iter().map(Report::FileLine));
        signs > 0
    }

    fn look_for_end(&mut self, now: u64) {
        if self.group.as_ref().is_none_or(Cgroup::populated) {
            self.empty_until = None;
            return;
        }
        let until = *self.empty_until.get_or_insert(now.saturating_add(STATUS_US));
        if self.members.is_empty() || until <= now {
            self.empty_until = None;
            self.members.clear();
            self.main = None;
            self.read(true);
            self.step(now, Event::Gone);
        }
    }

    fn step(&mut self, now: u64, event: Event) {
        for effect in self.lifecycle.step(now, event) {
            self.follow(now, effect);
        }
    }

    fn follow(&mut self, now: u64, effect: Effect) {
        match effect {
            Effect::Launch => self.launch(now),
            Effect::Terminate => {
                if let Some(group) = &self.group {
                    group.terminate();
                }
            }
            Effect::Kill => self.kill(),
            Effect::Ready(took) => self.serves(took),
            Effect::Hung => {
                let limit = self.spec.deadline;
                let text =
                    format!("it was not ready within {limit:?} of its start and is killed{}", self.last_line_suffix());
                self.failure = format!("killed, as it was not ready within {limit:?} of its start");
                self.cause = Some(self.failure.clone());
                self.reports.push(Report::Event("daemon-start-timed-out", text));
            }
            Effect::Ended { lived, served, next } => self.ended(now, lived, served, next),
            Effect::Stuck => {
                let left = self.group.as_ref().map(Cgroup::processes).unwrap_or_default();
                let left: Vec<String> = left.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
                let text = format!("killed, but the kernel still holds its processes {}", left.join(", "));
                self.reports.push(Report::Event("daemon-not-killable", text));
            }
            Effect::Stopped => {
                self.release_resources();
                self.reports.push(Report::Stopped);
            }
        }
    }

    fn kill(&self) {
        let Some(group) = &self.group else { return };
        // A process that escapes the fallback is still in the cgroup.
        let _ = group.kill();
    }

    fn launch(&mut self, now: u64) {
        self.starts += 1;
        (self.end, self.cause) = (None, None);
        self.last_line.clear();
        let from_scratch = self.failed_resumes >= MAX_FAILED_RESUMES;
        if from_scratch {
            let text = format!(
                "the last {MAX_FAILED_RESUMES} instances failed to resume and ended within {} s: this one starts without state, \
                 which takes the fabric from tenants",
                FAILED_RESUME_US / 1_000_000
            );
            self.reports.push(Report::Event("daemon-restarted-without-state", text));
            self.failed_resumes = 0;
        }
        let launched = launch::prepare(self.spec, &self.root, self.context, self.served && !from_scratch)
            .and_then(|launch| self.run(now, &launch).map(|pid| (launch, pid)));
        match launched {
            Ok((launch, pid)) => {
                self.resumed = launch.resumed;
                if let Some(text) = launch.warning.filter(|_| self.starts == 1) {
                    self.reports.push(Report::Event("daemon-as-root", text));
                }
                self.main = Some(pid);
                self.members = vec![pid];
                let text = format!("pid {}, start {}", pid.as_raw_nonzero(), self.starts);
                self.reports.push(Report::Event("daemon-started", text));
            }
            Err(text) => {
                self.release_resources();
                self.end = Some(text);
                self.step(now, Event::NotStarted);
            }
        }
    }

    fn run(&mut self, now: u64, launch: &Launch) -> Result<Pid, String> {
        let group = Cgroup::make(&self.groups, self.spec.name)?;
        let endpoint = ReadyEndpoint::of(self.spec.ready_in(self.context), &self.root);
        self.watch = Some(self.watch_for(&group).map_err(|error| format!("failed to set up inotify: {error}"))?);
        let (pipe, writer) =
            Pipe::make().map_err(|error| format!("failed to create a pipe for its output: {error}"))?;
        let arguments: Vec<_> = launch.arguments.iter().map(std::ffi::CString::as_c_str).collect();
        let pid = start(&Program {
            path: &launch.program,
            arguments: &arguments,
            environment: ENVIRONMENT,
            output: writer.as_fd(),
            cgroup: group.as_fd(),
            user: launch.user.map(|user| (user.user, user.group)),
            oom_score: OOM_SCORE,
        })
        .map_err(|error| format!("failed to start {}: {error}", launch.program.to_string_lossy()))?;
        (self.group, self.pipe, self.tail) = (Some(group), Some(pipe), None);
        self.probe = endpoint.map(Probe::new);
        if let Some(probe) = &mut self.probe {
            // inotify cannot report a port: the first attempt schedules the next.
            probe.turn(now, true);
        }
        Pid::from_raw(pid).ok_or_else(|| "it has no process id".to_owned())
    }

    fn watch_for(&self, group: &Cgroup) -> rustix::io::Result<OwnedFd> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, group.events(), inotify::WatchFlags::MODIFY)?;
        // The kernel notifies of the next change only after the file was read once.
        let _ = group.populated();
        if let Some((dir, _)) = self.spec.dir {
            let dir = self.root.path(dir);
            let _ = create_dir_all(&dir);
            let names = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::ATTRIB;
            let content =
                if self.spec.log.is_some() { inotify::WatchFlags::MODIFY } else { inotify::WatchFlags::empty() };
            inotify::add_watch(&watch, dir, names | content)?;
        }
        Ok(watch)
    }

    fn serves(&mut self, took: u64) {
        self.probe = None;
        let text = if self.starts > 1 {
            format!("ready after {} ms, start {}", ms(took), self.starts)
        } else {
            format!("ready after {} ms", ms(took))
        };
        if self.reported {
            self.reports.push(Report::Event("daemon-ready", text.clone()));
        }
        self.reports.push(Report::Ready(text));
        (self.served, self.reported) = (true, true);
        if self.context.is_service() {
            self.lifecycle.lift_restart_limit();
        }
    }

    fn ended(&mut self, now: u64, lived: u64, served: bool, next: Decision) {
        self.release_resources();
        self.failed_resumes =
            if std::mem::take(&mut self.resumed) && lived < FAILED_RESUME_US { self.failed_resumes + 1 } else { 0 };
        let end =
            self.cause.take().or_else(|| self.end.take()).unwrap_or_else(|| "ended with unknown status".to_owned());
        self.failure.clone_from(&end);
        let state = if served { "" } else { " before it was ready" };
        let text = format!("{end} after {} ms{state}{}", ms(lived), self.last_line_suffix());
        self.reports.push(Report::Event("daemon-exited", text));
        match next {
            Decision::Restart { pause, number } if number > MOST => {
                let text =
                    format!("tenants depend on it, so it has no restart limit: restart after a pause of {pause:?}");
                self.reports.push(Report::Event("daemon-restart", text));
            }
            Decision::Restart { pause, number } => {
                let text = format!("restart {number} of at most {MOST}, after a pause of {pause:?}");
                self.reports.push(Report::Event("daemon-restart", text));
            }
            Decision::LimitReached => {
                let text =
                    self.sentence(now, &format!("it ended {} times and reached its restart limit", self.starts), &end);
                self.reported = true;
                self.reports.push(Report::RestartLimitReached(text));
            }
        }
    }

    fn last_line_suffix(&self) -> String {
        if self.last_line.is_empty() {
            "; it wrote nothing".to_owned()
        } else {
            format!("; its last line: {:?}", self.last_line)
        }
    }

    /// Composes the error message: what failed, in which step, after how long, why, what to try.
    fn sentence(&self, now: u64, what: &str, end: &str) -> String {
        let step = if self.served { "after it was ready" } else { "during start" };
        let took = ms(now.saturating_sub(self.first_us));
        format!(
            "{what}, {step}, {took} ms after the first start: {end}{}; enabled by {}; {}",
            self.last_line_suffix(),
            launch::enabled_by(self.spec),
            self.spec.hint
        )
    }

    fn release_resources(&mut self) {
        (self.group, self.watch, self.pipe, self.tail, self.probe) = (None, None, None, None, None);
        (self.main, self.empty_until) = (None, None);
        self.members.clear();
    }
}
