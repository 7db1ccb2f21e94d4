//! Daemons as real processes in real cgroups.
//!
//! Behind the feature `real`: the tests need root and a mounted cgroup2, as PID 1
//! has them, and fail without.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firstlight_boot_record::Severity;
use firstlight_init::clock::now_us;
use firstlight_init::daemons::daemon::{Daemon, Report};
use firstlight_init::daemons::table::{Account, Arg, DaemonContext, DaemonSpec, EnabledBy, Ready};
use firstlight_init::mode::{Fabric, NvLinkGeneration};
use firstlight_init::root::Root;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, test_kill_process, wait};

/// Children are reaped for the whole process, so tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A root directory and a parent cgroup for the daemon.
struct Place {
    dir: tempfile::TempDir,
    groups: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn make() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // Orphans are reparented to this process, as to PID 1.
        set_child_subreaper(Some(Pid::INIT)).unwrap();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let cgroup2 = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let mount = cgroup2.and_then(|line| line.split(' ').nth(1)).unwrap_or_else(|| panic!("no cgroup2 is mounted"));
        let groups = Path::new(mount).join(format!("firstlight-test-{}", std::process::id()));
        fs::create_dir_all(&groups).unwrap_or_else(|error| panic!("{}: {error}; run this as root", groups.display()));
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("run/own")).unwrap();
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        Self { dir, groups, _alone: alone }
    }

    /// A daemon that is a shell script. `$ROOT` in it is the directory.
    fn daemon(&self, ready: Ready, deadline: Duration, script: &str) -> Run<'_> {
        let program = self.dir.path().join("usr/bin/stand-in");
        let root = self.dir.path().display();
        fs::write(&program, format!("#!/bin/sh\nROOT={root}\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let spec = Box::leak(Box::new(DaemonSpec {
            name: "stand-in",
            programs: &["/usr/bin/stand-in"],
            arguments: &[Arg::Resume("--restart", "/run/own/state")],
            account: Account::Root,
            enabled_by: EnabledBy::Parameter("firstlight.stand-in", |_| true),
            needs: &[],
            after: &[],
            dir: Some(("/run/own", 0o700)),
            config: None,
            log: Some("/run/own/log"),
            ready,
            deadline,
            severity: Severity::Degraded,
            service: None,
            about: "x",
            hint: "look at the script",
        }));
        let daemon = Daemon::new(spec, DaemonContext::default(), &Root::at(self.dir.path()), &self.groups);
        Run { place: self, daemon, reports: Vec::new() }
    }

    fn processes(&self) -> Vec<Pid> {
        let text = fs::read_to_string(self.groups.join("stand-in/cgroup.procs")).unwrap_or_default();
        text.lines().map(|line| Pid::from_raw(line.parse().unwrap()).unwrap()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::write(self.groups.join("stand-in/cgroup.kill"), "1");
        for _ in 0..100 {
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            if fs::remove_dir(self.groups.join("stand-in")).is_ok() || !self.groups.join("stand-in").exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = fs::remove_dir(&self.groups);
    }
}

/// A running daemon with a loop like PID 1's.
struct Run<'a> {
    place: &'a Place,
    daemon: Daemon,
    reports: Vec<Report>,
}

impl Run<'_> {
    fn start(mut self) -> Self {
        self.daemon.start(now_us());
        self
    }

    fn turn(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let words = firstlight_init::agent::describe_exit(status.exit_status(), status.terminating_signal());
            self.daemon.process_ended(now_us(), pid, status.exit_status() == Some(0), &words);
        }
        let reports = self.daemon.turn(now_us());
        self.reports.extend(reports);
    }

    /// Loops until `done`. The daemon's descriptors wake the loop; children are polled
    /// every 20 ms, because SIGCHLD may be consumed by other threads.
    fn until(&mut self, what: &str, mut done: impl FnMut(&[Report]) -> bool) {
        let begin = Instant::now();
        loop {
            self.turn();
            if done(&self.reports) {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}: {:#?}", self.reports);
            assert!(!self.daemon.is_over(), "{what}: {:#?}", self.reports);
            let left = self.daemon.next_deadline().map_or(20_000, |at| at.saturating_sub(now_us()).min(20_000));
            let mut fds: Vec<_> =
                self.daemon.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::try_from(left * 1000).unwrap() };
            let _ = poll(&mut fds, Some(&timeout));
        }
    }

    fn until_ready(&mut self) {
        self.until("ready", |reports| reports.iter().any(|report| matches!(report, Report::Ready(_))));
    }

    fn stop(&mut self) {
        self.daemon.stop(now_us());
        self.until("stopped", |reports| reports.contains(&Report::Stopped));
        assert_eq!(self.place.processes(), []);
    }

    fn events(&self, what: &str) -> Vec<&str> {
        let of = |report| match report {
            &Report::Event(is, ref text) if is == what => Some(text.as_str()),
            _ => None,
        };
        self.reports.iter().filter_map(of).collect()
    }

    fn lines(&self) -> Vec<&str> {
        self.reports
            .iter()
            .filter_map(|report| match report {
                Report::Line(line) | Report::FileLine(line) => Some(line.as_str()),
                _ => None,
            })
            .collect()
    }
}

const LONG: Duration = Duration::from_secs(15);

#[test]
fn daemonised_process_is_tracked_and_restarted() {
    let place = Place::make();
    let script = "echo setting up\n(setsid sleep 1000 >/dev/null 2>&1 &) \nexit 0";
    let mut run = place.daemon(Ready::Exit, LONG, script).start();
    run.until_ready();
    assert_eq!(run.lines(), ["setting up"]);
    let processes = place.processes();
    assert_eq!(processes.len(), 1, "the launcher is gone, the daemon is there");
    kill_process(processes[0], Signal::KILL).unwrap();
    let twice = |reports: &[Report]| reports.iter().filter(|report| matches!(report, Report::Ready(_))).count() == 2;
    run.until("ready again", twice);
    let exited = run.events("daemon-exited");
    assert!(exited[0].starts_with("killed by signal 9 after ") && exited[0].contains("\"setting up\""), "{exited:?}");
    assert!(run.events("daemon-restart")[0].starts_with("restart 1 of at most 5, after a pause of 100ms"));
    assert_ne!(place.processes(), processes);
    run.stop();
}

#[test]
fn daemon_that_exits_at_once_reaches_restart_limit_with_status_and_last_line() {
    let place = Place::make();
    let script = "echo one; echo 'no NVSwitch found' >&2; exit 7";
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, script).start();
    run.until("restart limit reached", |reports| {
        reports.iter().any(|report| matches!(report, Report::RestartLimitReached(_)))
    });
    let exited = run.events("daemon-exited");
    assert_eq!(exited.len(), 6);
    let right = |text: &&str| text.starts_with("exit status 7 after ") && text.contains("before it was ready");
    assert!(exited.iter().all(right), "{exited:#?}");
    let Some(Report::RestartLimitReached(text)) = run.reports.last() else { panic!("{:?}", run.reports) };
    for part in [
        "it ended 6 times",
        "during start",
        "exit status 7",
        "no NVSwitch found",
        "firstlight.stand-in=on",
        "look at the script",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(run.daemon.is_over() && run.daemon.next_deadline().is_none());
    assert_eq!(run.lines().len(), 12);
}

#[test]
fn daemon_that_hangs_times_out_is_killed_and_restarted() {
    let place = Place::make();
    let script = "echo thinking; sleep 1000 & sleep 1000";
    let begin = Instant::now();
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), Duration::from_millis(300), script).start();
    run.until("start timed out", |reports| reports.iter().any(|report| matches!(report, Report::StartTimedOut(_))));
    assert!((300..1300).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
    let Some(Report::StartTimedOut(text)) =
        run.reports.iter().find(|report| matches!(report, Report::StartTimedOut(_)))
    else {
        panic!()
    };
    for part in ["was not ready within 300ms", "thinking", "look at the script"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    run.until("both starts", |reports| {
        reports.iter().filter(|report| matches!(report, Report::Event("daemon-started", _))).count() == 2
    });
    assert!(run.events("daemon-exited")[0].starts_with("killed, as it was not ready within 300ms"));
    run.stop();
}

#[test]
fn daemon_that_ignores_sigterm_is_killed_after_grace_period() {
    let place = Place::make();
    let script = "trap '' TERM\necho up; (setsid sleep 1000 >/dev/null 2>&1 &)\nexit 0";
    let mut run = place.daemon(Ready::Exit, LONG, script).start();
    run.until_ready();
    let begin = Instant::now();
    run.stop();
    let took = begin.elapsed();
    assert!((Duration::from_secs(4)..Duration::from_secs(7)).contains(&took), "{took:?}");
    assert!(run.events("daemon-exited").is_empty(), "a requested stop is not a failure: {:?}", run.reports);
}

#[test]
fn socket_path_without_listener_is_not_readiness() {
    let place = Place::make();
    let path = place.dir.path().join("run/own/socket");
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, "exec sleep 1000").start();
    for _ in 0..5 {
        run.turn();
    }
    drop(UnixListener::bind(&path).unwrap());
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(5));
        run.turn();
    }
    assert!(!run.daemon.is_ready(), "no listener");
    fs::remove_file(&path).unwrap();
    let _listener = UnixListener::bind(&path).unwrap();
    run.until_ready();
    run.stop();
}

#[test]
fn helper_processes_are_killed_before_next_start() {
    let place = Place::make();
    let script = "(setsid sleep 1000 &)\nsleep 0.2; exit 3";
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, script).start();
    run.until("the second start", |reports| {
        reports.iter().filter(|report| matches!(report, Report::Event("daemon-started", _))).count() == 2
    });
    let helpers = |pid: &Pid| fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
    run.turn();
    let left: Vec<_> = place.processes().iter().map(helpers).filter(|name| name.trim() == "sleep").collect();
    assert!(left.len() <= 2, "one helper and one pause of the second, none of the first: {left:?}");
    assert!(run.events("daemon-exited")[0].starts_with("exit status 3"));
    run.stop();
}

#[test]
fn daemon_that_fails_to_resume_restarts_without_state_and_without_limit() {
    let place = Place::make();
    let fabric = Some(Fabric { generation: NvLinkGeneration::NvLink4, shared: true });
    // The first becomes ready and dies, the next two fail to resume, the fourth starts without state.
    let script = "echo \"start: $*\"; echo x >> $ROOT/run/own/state\n\
                  n=$(wc -l < $ROOT/run/own/state)\n\
                  if [ \"$1\" = --restart ]; then exit 3; fi\n\
                  echo listening > $ROOT/run/own/listening\nsleep 0.2\n[ $n -gt 3 ] && exec sleep 1000\nexit 1\n";
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), Duration::from_secs(30), script);
    run.daemon = Daemon::new(run.daemon.spec(), DaemonContext { fabric }, &Root::at(place.dir.path()), &place.groups);
    let mut run = run.start();
    // The test listens on the daemon's behalf.
    let socket = place.dir.path().join("run/own/socket");
    let listening = place.dir.path().join("run/own/listening");
    let mut listeners = Vec::new();
    let begin = Instant::now();
    while run.events("daemon-restarted-without-state").is_empty() || !run.daemon.is_ready() {
        run.turn();
        if fs::remove_file(&listening).is_ok() {
            let _ = fs::remove_file(&socket);
            listeners.push(UnixListener::bind(&socket).unwrap());
        }
        assert!(begin.elapsed() < Duration::from_secs(60) && !run.daemon.is_over(), "{:#?}", run.reports);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(run.lines(), ["start:", "start: --restart", "start: --restart", "start:"]);
    assert!(
        run.events("daemon-restarted-without-state")[0].contains("takes the fabric from tenants"),
        "{:?}",
        run.reports
    );
    run.stop();
}

#[test]
fn launcher_that_leaves_no_process_has_failed() {
    let place = Place::make();
    let mut run = place.daemon(Ready::Exit, LONG, "exit 0").start();
    run.until("it ended", |reports| reports.iter().any(|report| matches!(report, Report::Event("daemon-exited", _))));
    assert!(run.events("daemon-exited")[0].starts_with("exit status 0, but no daemon process remained"));
    assert!(!run.reports.iter().any(|report| matches!(report, Report::Ready(_))));
    run.stop();
}

#[test]
fn program_that_cannot_run_is_reported_with_errno() {
    let place = Place::make();
    let mut run = place.daemon(Ready::Exit, LONG, "exit 0");
    fs::set_permissions(place.dir.path().join("usr/bin/stand-in"), fs::Permissions::from_mode(0o644)).unwrap();
    run = run.start();
    run.until("restart limit reached", |reports| {
        reports.iter().any(|report| matches!(report, Report::RestartLimitReached(_)))
    });
    let Some(Report::RestartLimitReached(text)) = run.reports.last() else { panic!("{:?}", run.reports) };
    assert!(text.contains("cannot execute its program: Permission denied"), "{text}");
}

#[test]
fn daemon_starts_with_minimal_environment_and_privileges() {
    let place = Place::make();
    let script = "
        while read -r key value; do case $key in CapBnd:|CapEff:|SigBlk:|SigIgn:|NoNewPrivs:) echo $key $value;; esac; done < /proc/self/status
        echo oom $(cat /proc/self/oom_score_adj)
        echo cwd $(pwd)
        echo environment $(cat /proc/$$/environ | tr '\\0' '\\n' | cut -d= -f1 | sort | tr '\\n' ' ')
        echo group $(cat /proc/self/cgroup | grep '^0::')
        echo session $(cut -d' ' -f6 /proc/$$/stat) $$
        echo end
        exec sleep 1000";
    let careless = fs::File::open("/").unwrap();
    rustix::io::fcntl_setfd(&careless, rustix::io::FdFlags::empty()).unwrap();
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, script).start();
    run.until("all lines", |reports| reports.contains(&Report::Line("end".into())));
    let field = |name: &str| {
        let lines = run.lines();
        let line = lines.iter().find(|line| line.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("{name} in {lines:?}"))
            .split_once(' ')
            .unwrap_or_else(|| panic!("{name} in {lines:?}"))
            .1
            .trim()
            .to_owned()
    };
    let bits = |name: &str| u64::from_str_radix(&field(name), 16).unwrap();
    assert_eq!(bits("CapBnd:") & (1 << 16), 0, "CAP_SYS_MODULE");
    assert_eq!(bits("CapEff:") & (1 << 16), 0, "CAP_SYS_MODULE");
    assert_eq!((bits("SigBlk:"), field("NoNewPrivs:").as_str()), (0, "1"));
    assert_eq!(bits("SigIgn:") & (1 << (libc::SIGPIPE - 1)), 0);
    // Without CAP_SYS_RESOURCE the score is inherited.
    let own = fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    assert!(field("oom") == "-900" || field("oom") == own.trim(), "{}", field("oom"));
    assert_eq!(field("cwd"), "/");
    let environment = field("environment");
    let names: Vec<_> = environment.split(' ').filter(|name| !["_", "OLDPWD", "PWD", "SHLVL"].contains(name)).collect();
    assert_eq!(names, ["HOME", "LANG", "PATH"]);
    assert!(field("group").ends_with("/stand-in"), "{}", field("group"));
    let session = field("session");
    assert!(session.split_once(' ').is_some_and(|(session, pid)| session == pid), "{session}");
    let of = |what: &str| format!("/proc/{}/{what}", place.processes()[0].as_raw_nonzero());
    // The shell's own descriptors are closed after exec.
    run.until("another program", |_| fs::read_to_string(of("comm")).is_ok_and(|name| name == "sleep\n"));
    // Its loader still opens libraries and closes them; a leaked descriptor stays.
    let mut last = Vec::new();
    run.until("no descriptor but three", |_| {
        let entries = fs::read_dir(of("fd")).unwrap().map_while(Result::ok);
        let mut now: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        now.sort_unstable();
        if now != last {
            println!("descriptors: {now:?}");
            last.clone_from(&now);
        }
        now == ["0", "1", "2"]
    });
    assert_eq!(fs::read_link(of("fd/0")).unwrap(), Path::new("/dev/null"));
    run.stop();
}

#[test]
fn output_flood_blocks_neither_daemon_nor_pid1() {
    let place = Place::make();
    let script = "yes flood | head -n 300000\necho done > $ROOT/run/own/done\nexec sleep 1000";
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, script).start();
    let done = place.dir.path().join("run/own/done");
    let (mut longest, mut most) = (Duration::ZERO, 0);
    let begin = Instant::now();
    while !done.exists() {
        let (turn, before) = (Instant::now(), run.reports.len());
        run.turn();
        longest = longest.max(turn.elapsed());
        most = most.max(run.reports.len() - before);
        assert!(begin.elapsed() < Duration::from_secs(60), "the daemon is blocked");
    }
    assert!(longest < Duration::from_secs(2), "one turn took {longest:?}");
    // Lines forwarded per turn; the log's rate limit is applied later.
    assert!(most > 0 && most < 10_000, "{most} lines in one turn");
    run.stop();
}

#[test]
fn log_file_lines_are_reported_as_written() {
    let place = Place::make();
    let script =
        "echo one > $ROOT/run/own/log\nread -r x < $ROOT/run/own/go\necho two >> $ROOT/run/own/log\nexec sleep 1000";
    let go = place.dir.path().join("run/own/go");
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let mut run = place.daemon(Ready::Unix("/run/own/socket"), LONG, script).start();
    run.until("one", |reports| reports.contains(&Report::FileLine("one".into())));
    fs::write(&go, "go\n").unwrap();
    run.until("two", |reports| reports.contains(&Report::FileLine("two".into())));
    assert_eq!(run.lines(), ["one", "two"]);
    run.stop();
}

#[test]
fn daemon_runs_as_its_account() {
    let place = Place::make();
    fs::create_dir_all(place.dir.path().join("etc")).unwrap();
    fs::write(place.dir.path().join("etc/passwd"), "nobody:x:65534:65533::/:/bin/false\n").unwrap();
    // The directory of a test is root's own.
    fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut run =
        place.daemon(Ready::Unix("/run/own/socket"), LONG, "echo $(id -u) $(id -g) $(id -G)\nexec sleep 1000");
    let spec = DaemonSpec { account: Account::User("nobody"), ..copy(run.daemon.spec()) };
    run.daemon =
        Daemon::new(Box::leak(Box::new(spec)), DaemonContext::default(), &Root::at(place.dir.path()), &place.groups);
    run = run.start();
    run.until("its line", |reports| reports.iter().any(|report| matches!(report, Report::Line(_))));
    assert_eq!(run.lines(), ["65534 65533 65533"]);
    let pid = place.processes()[0];
    assert!(test_kill_process(pid).is_ok());
    run.stop();
}

fn copy(spec: &'static DaemonSpec) -> DaemonSpec {
    DaemonSpec {
        name: spec.name,
        programs: spec.programs,
        arguments: spec.arguments,
        account: spec.account,
        enabled_by: spec.enabled_by,
        needs: spec.needs,
        after: spec.after,
        dir: spec.dir,
        config: None,
        log: spec.log,
        ready: spec.ready,
        deadline: spec.deadline,
        severity: spec.severity,
        service: None,
        about: spec.about,
        hint: spec.hint,
    }
}
