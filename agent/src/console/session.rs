//! One session of the debug console: a terminal, a shell on it, and the client's stream.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use firstlight_sys::spawn::{Program, Stdio, spawn};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::time::timeout;

use crate::background;
use crate::error::Error;
use crate::stream::MAX_REPLY;

/// Time for a shell to exit after SIGHUP, and for its last output.
const GRACE: Duration = Duration::from_millis(500);

const ENVIRONMENT: &[&CStr] =
    &[c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", c"TERM=linux", c"HOME=/root"];

/// Runs a session until the shell exits or the client disconnects.
pub(super) async fn run<S>(stream: S, shells: &'static [&'static CStr]) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (master, terminal) = terminal()?;
    let mut keys = pipe::Sender::from_owned_fd_unchecked(master.try_clone()?)?;
    let mut screen = pipe::Receiver::from_owned_fd_unchecked(master)?;
    let shell = Shell::start(terminal, shells).await?;
    let (mut from, mut to) = tokio::io::split(stream);
    {
        let typed = pump(&mut from, &mut keys);
        let mut shown = std::pin::pin!(pump(&mut screen, &mut to));
        tokio::select! {
            _ = typed => {}
            _ = &mut shown => {}
            _ = shell.ended() => {
                // Drains the last output; a background program may hold the terminal open.
                let _ = timeout(GRACE, shown).await;
            }
        }
    }
    // Closing the master hangs up the terminal, on which most shells exit.
    drop((keys, screen));
    shell.end().await;
    let _ = to.shutdown().await;
    Ok(())
}

/// Opens a terminal: returns its non-blocking master and its name.
fn terminal() -> io::Result<(OwnedFd, CString)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    rustix::fs::fcntl_setfl(&master, rustix::fs::fcntl_getfl(&master)? | OFlags::NONBLOCK)?;
    Ok((master, name))
}

/// Copies until one side closes; the end of a terminal is an error (`EIO`).
async fn pump(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let mut buffer = vec![0; 4096.min(MAX_REPLY)];
    loop {
        let len = from.read(&mut buffer).await?;
        if len == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..len]).await?;
    }
}

/// A running shell, leader of its session and process group.
struct Shell {
    pid: Pid,
    /// A pidfd, which becomes readable when the process exits.
    alive: pipe::Receiver,
}

impl Shell {
    /// Starts the first available shell. As leader of a new session, it gets the terminal that it
    /// opens as controlling terminal.
    async fn start(terminal: CString, shells: &'static [&'static CStr]) -> io::Result<Self> {
        let started = background::blocking(move || {
            let mut last = String::from("no shell configured");
            for shell in shells {
                let stdio = [Stdio::Open(&terminal); 3];
                let program = Program { path: shell, arguments: &[shell], environment: ENVIRONMENT, stdio };
                match spawn(&program) {
                    Ok(pid) => return Ok(pid),
                    Err(error) => last = format!("{}: {error}", shell.to_string_lossy()),
                }
            }
            Err(Error::internal(format!("failed to start a shell, last {last}; add one to the image")))
        });
        let pid = started.await.map_err(io::Error::other)?;
        let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("the shell has no process id"))?;
        // The agent has a low OOM score; its shells must not inherit it.
        let _ = std::fs::write(format!("/proc/{}/oom_score_adj", pid.as_raw_pid()), "0");
        let watched = pidfd_open(pid, PidfdFlags::NONBLOCK)
            .map_err(io::Error::from)
            .and_then(pipe::Receiver::from_owned_fd_unchecked);
        match watched {
            Ok(alive) => Ok(Self { pid, alive }),
            Err(error) => {
                // Killed: without a pidfd its exit cannot be awaited.
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = background::blocking(move || Ok(waitid(WaitId::Pid(pid), WaitIdOptions::EXITED))).await;
                Err(error)
            }
        }
    }

    /// Waits for the shell's exit. It stays a zombie, so its PID is not reused.
    async fn ended(&self) -> io::Result<()> {
        self.alive.readable().await.map(drop)
    }

    /// Terminates the shell's process group, and reaps the shell.
    async fn end(self) {
        let _ = kill_process_group(self.pid, Signal::HUP);
        let _ = timeout(GRACE, self.ended()).await;
        // Even if it has exited: other processes of its group may not have.
        let _ = kill_process_group(self.pid, Signal::KILL);
        let _ = timeout(GRACE, self.ended()).await;
        if !matches!(waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG), Ok(Some(_))) {
            log::error!("debug console: process {} has not exited after SIGKILL", self.pid.as_raw_pid());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::net::UnixStream;

    const TESTED: &[&CStr] = &[c"/nonexistent/shell", c"/bin/sh"];

    fn run_async<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn is_running(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[test]
    fn shell_has_a_terminal_and_a_clean_environment() {
        run_async(async {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let user = async {
                theirs
                    .write_all(b"stty -echo; echo n=$((6*7)); tty; echo j=$-; echo e=$(env | grep -c =); exit\n")
                    .await
                    .unwrap();
                let mut all = String::new();
                theirs.read_to_string(&mut all).await.unwrap();
                all
            };
            let (end, all) = tokio::join!(timeout(Duration::from_secs(20), run(ours, TESTED)), user);
            end.expect("it ends with the shell").unwrap();
            assert!(all.contains("n=42") && all.contains("/dev/pts/"), "{all:?}");
            let jobs = all.lines().find_map(|line| line.strip_prefix("j=")).unwrap();
            assert!(jobs.contains('i') && jobs.contains('m'), "interactive with job control: {jobs}");
            let variables: usize =
                all.lines().find_map(|line| line.strip_prefix("e=")).unwrap().trim().parse().unwrap();
            assert!(variables < 10, "{variables}");
        });
    }

    #[test]
    fn disconnect_kills_the_shell() {
        run_async(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let user = async {
                let (reader, mut writer) = theirs.into_split();
                writer.write_all(b"stty -echo; echo pid=$$\n").await.unwrap();
                let mut lines = BufReader::new(reader).lines();
                let pid = loop {
                    let line = lines.next_line().await.unwrap().unwrap();
                    if let Some((_, pid)) =
                        line.rsplit_once("pid=").filter(|(_, pid)| pid.trim().parse::<u32>().is_ok())
                    {
                        break pid.trim().to_owned();
                    }
                };
                assert!(is_running(&pid));
                let score = std::fs::read_to_string(Path::new("/proc").join(&pid).join("oom_score_adj")).unwrap();
                assert_eq!(score.trim(), "0");
                // Ignores everything but SIGKILL.
                writer.write_all(b"trap '' HUP TERM; exec sleep 1000\n").await.unwrap();
                tokio::time::sleep(Duration::from_millis(300)).await;
                pid
            };
            let (end, pid) = tokio::join!(timeout(Duration::from_secs(20), run(ours, TESTED)), user);
            end.expect("it ends with the connection").unwrap();
            assert!(!Path::new("/proc").join(&pid).exists(), "reaped");
        });
    }

    #[test]
    fn missing_shell_closes_the_connection() {
        run_async(async {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let error = run(ours, &[c"/nonexistent/shell"]).await.unwrap_err().to_string();
            assert!(error.contains("/nonexistent/shell") && error.contains("image"), "{error}");
        });
    }
}
