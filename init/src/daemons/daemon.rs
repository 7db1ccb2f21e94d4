//! A daemon as it is: its life, its processes, its output.

use std::fs::create_dir_all;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use firstlight_sys::daemon::{Daemon as Program, start};
use rustix::fs::inotify;
use rustix::process::Pid;

use super::group::Group;
use super::launch::{self, ENVIRONMENT, Launch, OOM_SCORE};
use super::life::{Effect, Event, Life};
use super::output::{Pipe, Tail};
use super::ready::{Door, Probe};
use super::table::{DaemonSpec, Ready, Wish};
use crate::clock::ms;
use crate::restart::{Decision, MOST};
use crate::root::Root;

/// How long the end of a process may be known to its group only, µs. The kernel
/// takes it from the group a moment before it tells the parent.
const STATUS_US: u64 = 500_000;

/// One that was told to go on where the last one was, and ended within this time, has not done so, µs. The fabric manager
/// waits 60 s for somebody who tells it what is active.
const IN_VAIN_US: u64 = 75_000_000;

/// So many of these in a row, and the next one begins anew.
const MOST_IN_VAIN: usize = 2;

/// What the supervisor has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It wrote a line.
    Line(String),
    /// It wrote a line into its log file.
    FileLine(String),
    /// Something for the boot record: what happened, one word, and one line about it.
    Event(&'static str, String),
    /// It serves.
    Ready(String),
    /// It did not serve within the deadline of its first start.
    Late(String),
    /// It will not be started again.
    GivenUp(String),
    /// It is stopped.
    Stopped,
}

/// One daemon.
#[derive(Debug)]
pub struct Daemon {
    spec: &'static DaemonSpec,
    wish: Wish,
    root: Root,
    groups: PathBuf,
    life: Life,
    group: Option<Group>,
    /// What tells of changes in its group, its directory and its log.
    watch: Option<OwnedFd>,
    pipe: Option<Pipe>,
    tail: Option<Tail>,
    probe: Option<Probe>,
    /// The process that was started, until it has ended.
    main: Option<Pid>,
    /// Processes of which the end was not yet told to us.
    members: Vec<Pid>,
    /// How the last of them ended.
    end: Option<String>,
    /// Why that was, if it is known better.
    cause: Option<String>,
    /// How its last life ended.
    failure: String,
    /// Its group is empty; when that is enough, µs.
    empty_until: Option<u64>,
    /// Whether it has served in any life.
    served: bool,
    /// Whether its first start was told to be late, or has ended well.
    told: bool,
    starts: usize,
    /// Whether the last start was to go on where the one before was.
    goes_on: bool,
    /// How many of these in a row did not.
    in_vain: usize,
    first_us: u64,
    last_words: String,
    reports: Vec<Report>,
}

impl Daemon {
    /// A daemon that was never started, with its group below `groups`.
    #[must_use]
    pub fn new(spec: &'static DaemonSpec, wish: Wish, root: &Root, groups: &Path) -> Self {
        Self {
            spec,
            wish,
            root: root.clone(),
            groups: groups.to_owned(),
            life: Life::new(spec.deadline),
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
            told: false,
            starts: 0,
            goes_on: false,
            in_vain: 0,
            first_us: 0,
            last_words: String::new(),
            reports: Vec::new(),
        }
    }

    /// Its row of the table.
    #[must_use]
    pub fn spec(&self) -> &'static DaemonSpec {
        self.spec
    }

    /// Where and how it runs.
    #[must_use]
    pub fn wish(&self) -> Wish {
        self.wish
    }

    /// Whether it serves.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.life.is_ready()
    }

    /// Whether it is stopped or given up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.life.is_over()
    }

    /// What wakes it.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.watch.as_ref().map(OwnedFd::as_fd).into_iter().chain(self.pipe.as_ref().map(Pipe::as_fd))
    }

    /// When [`Daemon::turn`] is due without anything else, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let probe = self.probe.as_ref().and_then(Probe::next_deadline);
        [self.life.next_deadline(), self.empty_until, probe].into_iter().flatten().min()
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

    /// Whether this process is one of its.
    #[must_use]
    pub fn has(&self, pid: Pid) -> bool {
        self.members.contains(&pid)
    }

    /// A process of PID 1 has ended; `false` if it was none of this daemon.
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
        let launcher = self.spec.ready_in(self.wish) == Ready::Exit;
        if launcher && good && self.life.is_starting() && group.is_some_and(Group::populated) {
            // Whom it left behind are ours now, and we are told of their end.
            self.members = group.map(Group::processes).unwrap_or_default();
            self.step(now, Event::Ready);
        } else {
            if launcher && good {
                self.cause = Some("exit status 0, and it left no daemon behind".to_owned());
            }
            self.step(now, Event::MainEnded);
        }
    }

    /// Looks at everything that may have changed, and hands out what there is to tell.
    pub fn turn(&mut self, now: u64) -> Vec<Report> {
        let changed = self.drain_watch();
        let wrote = self.read(changed);
        if let Some(probe) = self.probe.as_mut().filter(|_| self.life.is_starting())
            && probe.turn(now, changed || wrote)
        {
            self.step(now, Event::Ready);
        }
        if changed || self.empty_until.is_some() {
            self.look_for_end(now);
        }
        self.step(now, Event::Clock);
        if !self.told && !self.life.is_over() && now >= self.first_deadline() {
            self.told = true;
            let text = self.sentence(now, "it does not serve", &self.failure);
            self.reports.push(Report::Late(text));
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
        // Who asks looks at everything, so what has changed does not matter.
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
                pipe.last().clone_into(&mut self.last_words);
            }
            if !open {
                // A pipe at its end would wake PID 1 for ever.
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
                tail.last().clone_into(&mut self.last_words);
            }
        }
        self.reports.extend(lines.into_iter().map(Report::FileLine));
        signs > 0
    }

    fn look_for_end(&mut self, now: u64) {
        if self.group.as_ref().is_none_or(Group::populated) {
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
        for effect in self.life.step(now, event) {
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
                let text = format!("it did not serve within {limit:?} of its start and is killed{}", self.words());
                self.failure = format!("killed, as it did not serve within {limit:?} of its start");
                self.cause = Some(self.failure.clone());
                self.reports.push(Report::Event("daemon-hung", text));
            }
            Effect::Ended { lived, served, next } => self.ended(now, lived, served, next),
            Effect::Stuck => {
                let left = self.group.as_ref().map(Group::processes).unwrap_or_default();
                let left: Vec<String> = left.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
                let text = format!("killed, but the kernel still holds its processes {}", left.join(", "));
                self.reports.push(Report::Event("daemon-stuck", text));
            }
            Effect::Stopped => {
                self.let_go();
                self.reports.push(Report::Stopped);
            }
        }
    }

    fn kill(&self) {
        let Some(group) = &self.group else { return };
        // One that escapes the slower way is found by the group again.
        let _ = group.kill();
    }

    fn launch(&mut self, now: u64) {
        self.starts += 1;
        (self.end, self.cause) = (None, None);
        self.last_words.clear();
        let anew = self.in_vain >= MOST_IN_VAIN;
        if anew {
            let text = format!(
                "the last {MOST_IN_VAIN} were told to go on where the one before was, and ended within {} s: this one begins anew, \
                 which takes the fabric from tenants that have it",
                IN_VAIN_US / 1_000_000
            );
            self.reports.push(Report::Event("daemon-anew", text));
            self.in_vain = 0;
        }
        let launched = launch::prepare(self.spec, &self.root, self.wish, self.served && !anew)
            .and_then(|launch| self.run(now, &launch).map(|pid| (launch, pid)));
        match launched {
            Ok((launch, pid)) => {
                self.goes_on = launch.again;
                if let Some(text) = launch.warning.filter(|_| self.starts == 1) {
                    self.reports.push(Report::Event("daemon-as-root", text));
                }
                self.main = Some(pid);
                self.members = vec![pid];
                let text = format!("pid {}, start {}", pid.as_raw_nonzero(), self.starts);
                self.reports.push(Report::Event("daemon-started", text));
            }
            Err(text) => {
                self.let_go();
                self.end = Some(text);
                self.step(now, Event::NotStarted);
            }
        }
    }

    fn run(&mut self, now: u64, launch: &Launch) -> Result<Pid, String> {
        let group = Group::make(&self.groups, self.spec.name)?;
        let door = Door::of(self.spec.ready_in(self.wish), &self.root);
        self.watch = Some(self.watch_for(&group).map_err(|error| format!("cannot watch it: {error}"))?);
        let (pipe, writer) = Pipe::make().map_err(|error| format!("cannot make a pipe for its output: {error}"))?;
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
        .map_err(|error| format!("cannot start {}: {error}", launch.program.to_string_lossy()))?;
        (self.group, self.pipe, self.tail) = (Some(group), Some(pipe), None);
        self.probe = door.map(Probe::new);
        if let Some(probe) = &mut self.probe {
            // A port has no name that could appear: from now on there is a next try.
            probe.turn(now, true);
        }
        Pid::from_raw(pid).ok_or_else(|| "it has no process id".to_owned())
    }

    fn watch_for(&self, group: &Group) -> rustix::io::Result<OwnedFd> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, group.events(), inotify::WatchFlags::MODIFY)?;
        // The first look at the group is what makes the kernel tell of the next change.
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
            format!("serves after {} ms, start {}", ms(took), self.starts)
        } else {
            format!("serves after {} ms", ms(took))
        };
        if self.told {
            self.reports.push(Report::Event("daemon-ready", text.clone()));
        }
        self.reports.push(Report::Ready(text));
        (self.served, self.told) = (true, true);
        if self.wish.is_service() {
            self.life.keep();
        }
    }

    fn ended(&mut self, now: u64, lived: u64, served: bool, next: Decision) {
        self.let_go();
        self.in_vain = if std::mem::take(&mut self.goes_on) && lived < IN_VAIN_US { self.in_vain + 1 } else { 0 };
        let end =
            self.cause.take().or_else(|| self.end.take()).unwrap_or_else(|| "ended, its status unknown".to_owned());
        self.failure.clone_from(&end);
        let state = if served { "" } else { " before it served" };
        let text = format!("{end} after {} ms{state}{}", ms(lived), self.words());
        self.reports.push(Report::Event("daemon-exited", text));
        match next {
            Decision::Again { pause, number } if number > MOST => {
                let text = format!("tenants depend on it, so it is not given up: again after a pause of {pause:?}");
                self.reports.push(Report::Event("daemon-restart", text));
            }
            Decision::Again { pause, number } => {
                let text = format!("number {number} of at most {MOST}, after a pause of {pause:?}");
                self.reports.push(Report::Event("daemon-restart", text));
            }
            Decision::GiveUp => {
                let text = self.sentence(now, &format!("it ended {} times and is given up", self.starts), &end);
                self.told = true;
                self.reports.push(Report::GivenUp(text));
            }
        }
    }

    fn words(&self) -> String {
        if self.last_words.is_empty() {
            "; it wrote nothing".to_owned()
        } else {
            format!("; its last line: {:?}", self.last_words)
        }
    }

    /// What a user reads about a daemon that is not there: what, where, how long, why, what next.
    fn sentence(&self, now: u64, what: &str, end: &str) -> String {
        let step = if self.served { "after it had served" } else { "in its start" };
        let took = ms(now.saturating_sub(self.first_us));
        format!(
            "{what}, {step}, {took} ms after the first start: {end}{}; wanted by {}; {}",
            self.words(),
            launch::reason(self.spec),
            self.spec.hint
        )
    }

    fn let_go(&mut self) {
        (self.group, self.watch, self.pipe, self.tail, self.probe) = (None, None, None, None, None);
        (self.main, self.empty_until) = (None, None);
        self.members.clear();
    }
}
