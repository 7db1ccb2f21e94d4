//! Hooks that run outside a container: `createRuntime` (before its root is changed), `poststart` and `poststop`.
//!
//! libcontainer discards their output, and at a timeout kills only the hook process itself, so the server takes
//! them out of the configuration and stores them in the bundle as [`FILE`]. A hook gets only its own environment,
//! `/` as working directory, the container's state on standard input, and a timeout for itself and all its
//! descendants.
//!
//! `createRuntime` hooks run in the middle of libcontainer's work. So libcontainer gets a single hook,
//! [`create_runtime_hook`]: this program, which runs those in the file with the state from its standard input.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use oci_spec::runtime::{ContainerState, Hook, HookBuilder, Hooks, StateBuilder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// The file in a bundle with the hooks that the runtime runs instead of libcontainer.
pub const FILE: &str = "hooks.json";

/// The first argument of the program as [`create_runtime_hook`]; the second is the bundle.
pub const ARGUMENT: &str = "runtime-hooks";

/// This program, even if its file has been renamed.
const PROGRAM: &str = "/proc/self/exe";

/// The largest state that is read, bytes; real ones are far shorter.
const MAX_STATE: u64 = 1 << 20;

/// The timeout of a hook that sets none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The most that is quoted of a failed hook's output, bytes.
const QUOTED: usize = 2048;

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    CreateRuntime,
    Poststart,
    Poststop,
}

impl Point {
    fn name(self) -> &'static str {
        match self {
            Self::CreateRuntime => "createRuntime",
            Self::Poststart => "poststart",
            Self::Poststop => "poststop",
        }
    }

    fn of(self, hooks: &Hooks) -> &[Hook] {
        let list = match self {
            Self::CreateRuntime => hooks.create_runtime(),
            Self::Poststart => hooks.poststart(),
            Self::Poststop => hooks.poststop(),
        };
        list.as_deref().unwrap_or_default()
    }
}

/// Returns the single `createRuntime` hook that libcontainer runs; it runs those of the bundle's [`FILE`]. They
/// have timeouts, so it needs none.
///
/// # Errors
/// Never for the values used here; oci-spec's builders are fallible by type.
pub fn create_runtime_hook(bundle: &Path) -> Result<Hook, oci_spec::OciSpecError> {
    let args = ["fl-hooks", ARGUMENT, &bundle.to_string_lossy()].map(str::to_owned).to_vec();
    HookBuilder::default().path(PROGRAM).args(args).env(Vec::<String>::new()).build()
}

/// Runs the program of [`create_runtime_hook`]: `arguments` are those after [`ARGUMENT`]. Errors go to standard
/// error, which the worker that creates the container captures.
#[must_use]
pub fn create_runtime_hook_main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(bundle) = arguments.next() else { return ExitCode::FAILURE };
    let mut state = String::new();
    let read = std::io::stdin().take(MAX_STATE).read_to_string(&mut state);
    let ran = match read {
        Ok(_) => run_all(Path::new(&bundle), Point::CreateRuntime, || state),
        Err(error) => Err(format!("hooks: failed to read the container's state: {error}")),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            let _ = std::io::stderr().write_all(text.as_bytes());
            ExitCode::FAILURE
        }
    }
}

/// Returns the container's state as hooks get it on standard input.
pub(crate) fn state(container: &str, bundle: &Path, point: Point, pid: Option<i32>) -> String {
    let status = match point {
        Point::CreateRuntime => ContainerState::Creating,
        Point::Poststart => ContainerState::Running,
        Point::Poststop => ContainerState::Stopped,
    };
    let state = StateBuilder::default().version("1.2.0").id(container).status(status).bundle(bundle);
    let state = match pid.filter(|_| point != Point::Poststop) {
        Some(pid) => state.pid(pid),
        None => state,
    };
    state.build().ok().and_then(|state| serde_json::to_string(&state).ok()).unwrap_or_default()
}

/// Runs every hook of a point. A failure does not skip the following hooks, except for `createRuntime`, where it
/// aborts the creation.
///
/// # Errors
/// The first failure, with the hook's name and output.
pub(crate) fn run_all(bundle: &Path, point: Point, state: impl FnOnce() -> String) -> Result<(), String> {
    let file = bundle.join(FILE);
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("hooks: failed to read {}: {error}", file.display())),
    };
    let hooks: Hooks =
        serde_json::from_slice(&text).map_err(|error| format!("hooks: invalid {}: {error}", file.display()))?;
    let list = point.of(&hooks);
    if list.is_empty() {
        return Ok(());
    }
    let state = state();
    let mut result = Ok(());
    for hook in list {
        let ran = run(hook, &state).map_err(|text| format!("{} hook {}: {text}", point.name(), hook.path().display()));
        result = result.and(ran);
        if result.is_err() && point == Point::CreateRuntime {
            break;
        }
    }
    result
}

fn run(hook: &Hook, state: &str) -> Result<(), String> {
    let timeout = hook.timeout().and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
    let timeout = timeout.map_or(DEFAULT_TIMEOUT, Duration::from_secs);
    let mut command = Command::new(hook.path());
    if let Some((name, rest)) = hook.args().as_deref().and_then(<[String]>::split_first) {
        command.arg0(name).args(rest);
    }
    let own = hook.env().iter().flatten().filter_map(|entry| entry.split_once('='));
    command.env_clear().envs(own).current_dir("/").process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let begin = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("failed to run: {error}"))?;
    let (status, captured) =
        follow(&mut child, state, begin + timeout).map_err(|error| format!("failed to wait for it: {error}"))?;
    let took = begin.elapsed().as_millis();
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(format!("{status} after {took} ms{}", quote(&captured))),
        None => Err(format!("timed out after {took} ms, killed{}", quote(&captured))),
    }
}

fn quote(captured: &[u8]) -> String {
    let text = String::from_utf8_lossy(captured);
    let line: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.is_empty() { "; no output".to_owned() } else { format!("; output: {line}") }
}

/// Feeds the hook its input and reads its output until it exits. Background processes that it leaves running are
/// not waited for. `None`: it was killed.
fn follow(child: &mut Child, state: &str, deadline: Instant) -> std::io::Result<(Option<ExitStatus>, Vec<u8>)> {
    let pid = Pid::from_child(child);
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    let (mut input, mut left) = (child.stdin.take(), state.as_bytes());
    let (mut output, mut errors) = (child.stdout.take(), child.stderr.take());
    let fds = [input.as_ref().map(AsFd::as_fd), output.as_ref().map(AsFd::as_fd), errors.as_ref().map(AsFd::as_fd)];
    for fd in fds.into_iter().flatten() {
        rustix::io::ioctl_fionbio(fd, true)?;
    }
    let mut captured = Vec::new();
    loop {
        let left_time = deadline.saturating_duration_since(Instant::now());
        if left_time.is_zero() {
            let _ = kill_process_group(pid, Signal::KILL);
            let _ = child.wait();
            return Ok((None, captured));
        }
        let mut waited = vec![PollFd::new(&ended, PollFlags::IN)];
        waited.extend(input.as_ref().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)));
        waited.extend(output.as_ref().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
        waited.extend(errors.as_ref().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
        match poll(&mut waited, Timespec::try_from(left_time).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let over = !waited[0].revents().is_empty();
        drop(waited);
        if let Some(pipe) = &mut input {
            match pipe.write(left) {
                Ok(len) => left = &left[len..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // The hook closed its standard input.
                Err(_) => left = &[],
            }
            if left.is_empty() {
                input = None;
            }
        }
        drain(&mut output, &mut captured);
        drain(&mut errors, &mut captured);
        if over {
            return child.wait().map(|status| (Some(status), captured));
        }
    }
}

/// Reads what is available in a pipe; closes it at end of file.
fn drain(pipe: &mut Option<impl Read>, captured: &mut Vec<u8>) {
    let mut buffer = [0; 4096];
    // Bounded, so that a hook that writes without end is still stopped at its deadline.
    for _ in 0..16 {
        let Some(open) = pipe else { return };
        match open.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(len) => captured.extend_from_slice(&buffer[..len.min(QUOTED.saturating_sub(captured.len()))]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(_) => *pipe = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::{HookBuilder, HooksBuilder};

    fn hook(script: &str, timeout: i64) -> Hook {
        let args = ["sh", "-c", script].map(str::to_owned).to_vec();
        HookBuilder::default()
            .path("/bin/sh")
            .args(args)
            .env(vec!["OWN=1".to_owned()])
            .timeout(timeout)
            .build()
            .unwrap()
    }

    #[test]
    fn hook_gets_its_own_environment_the_root_directory_and_the_state() {
        let script = r#"[ "$PWD" = / ] && [ -z "$HOME" ] && [ "$OWN" = 1 ] && [ "$(cat)" = state ]"#;
        run(&hook(script, 5), "state").unwrap();
        // More than a pipe holds, to a hook that does not read.
        run(&hook("exit 0", 5), &"x".repeat(1 << 20)).unwrap();
    }

    #[test]
    fn failure_is_reported_with_the_output() {
        let text = run(&hook("echo out; echo err >&2; exit 3", 5), "").unwrap_err();
        for part in ["exit status: 3", "out", "err", "ms"] {
            assert!(text.contains(part), "{text}");
        }
        let text = run(&hook("yes | head -c 100000; exit 1", 5), "").unwrap_err();
        assert!(text.len() < QUOTED + 200, "{}", text.len());
        let missing = HookBuilder::default().path("/nonexistent/hook").build().unwrap();
        assert!(run(&missing, "").unwrap_err().contains("failed to run"));
    }

    #[test]
    fn hook_and_its_descendants_have_a_deadline() {
        let begin = Instant::now();
        let text = run(&hook("echo before; sleep 60; true", 1), "").unwrap_err();
        assert!(text.contains("killed") && text.contains("before"), "{text}");
        assert!(begin.elapsed() < Duration::from_secs(20));
        // Background processes do not delay the result.
        let begin = Instant::now();
        run(&hook("sleep 30 & exit 0", 20), "").unwrap();
        assert!(begin.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn failed_create_runtime_hook_skips_the_following_ones() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark");
        let list = vec![hook("cat; exit 4", 5), hook(&format!("cat > {}", mark.display()), 5)];
        let hooks = HooksBuilder::default().create_runtime(list).build().unwrap();
        fs::write(dir.path().join(FILE), serde_json::to_vec(&hooks).unwrap()).unwrap();
        let text = run_all(dir.path(), Point::CreateRuntime, || "the state".to_owned()).unwrap_err();
        assert!(text.contains("createRuntime hook /bin/sh") && text.contains("output: the state"), "{text}");
        assert!(!mark.exists());
        let hook = create_runtime_hook(dir.path()).unwrap();
        assert_eq!(hook.args().as_ref().unwrap()[1..], [ARGUMENT, dir.path().to_str().unwrap()]);
        assert_eq!((hook.timeout(), hook.env().as_ref().unwrap().len()), (None, 0));
    }

    #[test]
    fn all_poststop_hooks_run_and_the_first_failure_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        run_all(dir.path(), Point::Poststop, String::new).unwrap();
        let mark = dir.path().join("mark");
        let list = vec![hook("exit 4", 5), hook(&format!("cat > {}", mark.display()), 5)];
        let hooks = HooksBuilder::default().poststop(list).build().unwrap();
        fs::write(dir.path().join(FILE), serde_json::to_vec(&hooks).unwrap()).unwrap();
        run_all(dir.path(), Point::Poststart, || unreachable!("there is no poststart hook")).unwrap();
        let stopped = || state("c1", Path::new("/b"), Point::Poststop, Some(7));
        let text = run_all(dir.path(), Point::Poststop, stopped).unwrap_err();
        assert!(text.contains("poststop hook /bin/sh") && text.contains('4'), "{text}");
        let state: serde_json::Value = serde_json::from_slice(&fs::read(mark).unwrap()).unwrap();
        assert_eq!((state["id"].as_str(), state["status"].as_str()), (Some("c1"), Some("stopped")));
        assert!(state.get("pid").is_none_or(serde_json::Value::is_null), "{state}");
    }
}
