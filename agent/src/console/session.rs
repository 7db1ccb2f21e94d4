//! One session: a terminal, a shell on it, and a stream to its user.

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

use crate::error::Error;
use crate::stream::MAX_REPLY;
use crate::work;

/// How long a shell may take to end after it was told to, and its last output to come.
const GRACE: Duration = Duration::from_millis(500);

const ENVIRONMENT: &[&CStr] =
    &[c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", c"TERM=linux", c"HOME=/root"];

/// Runs a session to its end: the shell's, or the user's.
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
                // What it wrote last; a program that it left behind may keep the terminal open.
                let _ = timeout(GRACE, shown).await;
            }
        }
    }
    // The terminal hangs up, which most shells take as the end.
    drop((keys, screen));
    shell.end().await;
    let _ = to.shutdown().await;
    Ok(())
}

/// A new terminal: its master, not blocking, and its name.
fn terminal() -> io::Result<(OwnedFd, CString)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    rustix::fs::fcntl_setfl(&master, rustix::fs::fcntl_getfl(&master)? | OFlags::NONBLOCK)?;
    Ok((master, name))
}

/// Copies until one side has ended; a terminal's end is an error (`EIO`).
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

/// A running shell, the leader of its session and process group.
struct Shell {
    pid: Pid,
    /// A pidfd, which becomes readable like a pipe when the process has ended.
    alive: pipe::Receiver,
}

impl Shell {
    /// Starts the first shell that is there. It opens the terminal as the
    /// leader of a new session, and so gets it as its controlling terminal.
    async fn start(terminal: CString, shells: &'static [&'static CStr]) -> io::Result<Self> {
        let started = work::blocking(move || {
            let mut last = String::from("no shell is known");
            for shell in shells {
                let stdio = [Stdio::Open(&terminal); 3];
                let program = Program { path: shell, arguments: &[shell], environment: ENVIRONMENT, stdio };
                match spawn(&program) {
                    Ok(pid) => return Ok(pid),
                    Err(error) => last = format!("{}: {error}", shell.to_string_lossy()),
                }
            }
            Err(Error::internal(format!("no shell can be started, the last {last}; add one to the image")))
        });
        let pid = started.await.map_err(io::Error::other)?;
        let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("the shell has no process id"))?;
        // The agent is the last that the kernel kills for memory; its shells are not.
        let _ = std::fs::write(format!("/proc/{}/oom_score_adj", pid.as_raw_pid()), "0");
        let watched = pidfd_open(pid, PidfdFlags::NONBLOCK)
            .map_err(io::Error::from)
            .and_then(pipe::Receiver::from_owned_fd_unchecked);
        match watched {
            Ok(alive) => Ok(Self { pid, alive }),
            Err(error) => {
                // One that cannot be watched must not stay.
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = work::blocking(move || Ok(waitid(WaitId::Pid(pid), WaitIdOptions::EXITED))).await;
                Err(error)
            }
        }
    }

    /// Waits for the shell's end. It stays a zombie, so its number stays its own.
    async fn ended(&self) -> io::Result<()> {
        self.alive.readable().await.map(drop)
    }

    /// Ends the shell and its group, and reaps it.
    async fn end(self) {
        let _ = kill_process_group(self.pid, Signal::HUP);
        let _ = timeout(GRACE, self.ended()).await;
        // Also when it has ended: others of its group may not have.
        let _ = kill_process_group(self.pid, Signal::KILL);
        let _ = timeout(GRACE, self.ended()).await;
        if !matches!(waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG), Ok(Some(_))) {
            log::error!("debug console: process {} does not end", self.pid.as_raw_pid());
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
    fn a_shell_has_a_terminal_and_a_clean_environment() {
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
    fn the_users_end_is_the_shells() {
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
                // Deaf to the hang-up, and to everything but a kill.
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
    fn without_a_shell_the_user_is_let_go() {
        run_async(async {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let error = run(ours, &[c"/nonexistent/shell"]).await.unwrap_err().to_string();
            assert!(error.contains("/nonexistent/shell") && error.contains("image"), "{error}");
        });
    }
}
