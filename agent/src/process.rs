//! One process of a container: its streams, terminal and exit code.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::termios::Winsize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::stream::{Exit, Input, Output};

/// A process. Created before the runtime starts the process, so that an early exit is not lost.
#[derive(Debug)]
pub struct Process {
    exit: watch::Sender<Option<Exit>>,
    /// Standard input.
    pub stdin: Input,
    /// Standard output.
    pub stdout: Output,
    /// Standard error; with a terminal, at its end from the start.
    pub stderr: Output,
    /// The terminal's master, for resizing.
    terminal: OnceLock<OwnedFd>,
}

/// The process's ends of its pipes.
#[derive(Debug)]
pub struct PipeEnds(pub Vec<OwnedFd>);

impl Process {
    /// Creates the entry of a process that is about to be created.
    #[must_use]
    pub fn new(terminal: bool) -> Self {
        let (exit, watch) = watch::channel(None);
        Self {
            exit,
            stdin: Input::new(watch.clone(), terminal),
            stdout: Output::new(watch.clone()),
            stderr: Output::new(watch),
            terminal: OnceLock::new(),
        }
    }

    /// Creates the three pipes, with capacity `size` if given, and returns the process's ends.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub async fn create_pipes(&self, size: Option<usize>) -> Result<PipeEnds> {
        let failed = |error: std::io::Error| Error::internal(format!("failed to create a pipe: {error}"));
        let pair = || pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(error.into()));
        let (stdin, input) = pair()?;
        let (output, stdout) = pair()?;
        let (errors, stderr) = pair()?;
        for ours in [&input, &output, &errors] {
            nonblocking(ours).map_err(failed)?;
            if let Some(size) = size
                && let Err(error) = rustix::pipe::fcntl_setpipe_size(ours, size)
            {
                // A smaller pipe only reduces throughput.
                log::warn!("agent.container_pipe_size={size}: {error}; the kernel's size is used");
            }
        }
        self.stdin.open(input).await.map_err(failed)?;
        self.stdout.open(output).await.map_err(failed)?;
        self.stderr.open(errors).await.map_err(failed)?;
        Ok(PipeEnds(vec![stdin, stdout, stderr]))
    }

    /// Stores the master of the process's terminal, if it is to have one.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub async fn attach(&self, master: Option<OwnedFd>) -> Result<()> {
        let failed = |error: std::io::Error| Error::internal(format!("failed to set up the terminal: {error}"));
        let Some(master) = master else {
            let lost = || {
                failed(std::io::Error::other("its descriptor did not arrive; the agent may have no free descriptor"))
            };
            return if self.stdin.is_terminal() { Err(lost()) } else { Ok(()) };
        };
        nonblocking(&master).map_err(failed)?;
        self.stdin.open(master.try_clone().map_err(failed)?).await.map_err(failed)?;
        self.stdout.open(master.try_clone().map_err(failed)?).await.map_err(failed)?;
        let _ = self.terminal.set(master);
        Ok(())
    }

    /// Resizes the terminal.
    ///
    /// # Errors
    /// `UNAVAILABLE`: the process has no terminal.
    pub fn resize(&self, size: Winsize) -> Result<()> {
        let master = self.terminal.get().ok_or_else(|| Error::new(ttrpc::Code::UNAVAILABLE, "no tty"))?;
        rustix::termios::tcsetwinsize(master, size)
            .map_err(|error| Error::internal(format!("failed to resize the terminal: {error}")))
    }

    /// Records the exit.
    pub fn ended(&self, code: i32) {
        self.exit.send_replace(Some(Exit { code, at: Instant::now() }));
    }

    /// Returns the exit code, if the process has exited.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.exit.borrow().map(|exit| exit.code)
    }

    /// Waits for the process to exit. Cancel-safe.
    pub async fn wait(&self) -> i32 {
        let mut watch = self.exit.subscribe();
        match watch.wait_for(Option::is_some).await.map(|exit| exit.map(|exit| exit.code)) {
            Ok(Some(code)) => code,
            // Unreachable: `self` holds the sender, and the value was waited for.
            _ => std::future::pending().await,
        }
    }

    /// Closes all streams.
    pub async fn close(&self) {
        self.stdin.close().await;
        self.stdout.close().await;
        self.stderr.close().await;
    }

    /// Returns whether a stream may still be read.
    #[must_use]
    pub fn has_output(&self) -> bool {
        self.stdout.is_open() || self.stderr.is_open()
    }
}

/// Only our end: the program at the other end expects blocking I/O. The two ends of a pipe, and of
/// a terminal, have separate flags.
fn nonblocking(fd: &OwnedFd) -> std::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn every_waiter_gets_the_exit_code() {
        run(async {
            let process = Process::new(false);
            assert_eq!(process.code(), None);
            let end = async {
                tokio::task::yield_now().await;
                process.ended(3);
            };
            let (first, second, ()) = tokio::join!(process.wait(), process.wait(), end);
            assert_eq!((first, second, process.wait().await), (3, 3, 3));
        });
    }

    #[test]
    fn pipes_carry_data_and_close() {
        run(async {
            let process = Process::new(false);
            let PipeEnds(ends) = process.create_pipes(None).await.unwrap();
            process.stdin.write(b"in").await.unwrap();
            let mut buffer = [0; 8];
            assert_eq!(rustix::io::read(&ends[0], &mut buffer).unwrap(), 2);
            rustix::io::write(&ends[2], b"err").unwrap();
            assert_eq!(process.stderr.read(8).await.unwrap(), b"err");
            assert!(process.has_output());
            assert!(!rustix::fs::fcntl_getfl(&ends[1]).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
            process.close().await;
            assert!(!process.has_output());
        });
    }

    #[test]
    fn pipes_have_the_requested_capacity() {
        run(async {
            let size = |fd: &OwnedFd| rustix::pipe::fcntl_getpipe_size(fd).unwrap();
            let PipeEnds(usual) = Process::new(false).create_pipes(None).await.unwrap();
            let PipeEnds(wide) = Process::new(false).create_pipes(Some(2 * size(&usual[0]))).await.unwrap();
            assert!(wide.iter().all(|end| size(end) == 2 * size(&usual[0])));
            // Above every kernel's limit: the pipes are created all the same.
            assert_eq!(Process::new(false).create_pipes(Some(1 << 40)).await.unwrap().0.len(), 3);
        });
    }

    #[test]
    fn resize_without_a_terminal_fails() {
        let size = Winsize { ws_row: 1, ws_col: 2, ws_xpixel: 0, ws_ypixel: 0 };
        assert_eq!(Process::new(false).resize(size).unwrap_err().code, ttrpc::Code::UNAVAILABLE);
    }

    #[test]
    fn terminal_output_ends_without_an_error() {
        run(async {
            use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
            let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
            grantpt(&master).unwrap();
            unlockpt(&master).unwrap();
            let name = ptsname(&master, Vec::new()).unwrap();
            let slave = std::fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
            let process = Process::new(true);
            let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
            assert!(process.attach(None).await.unwrap_err().message.contains("did not arrive"));
            process.attach(Some(master)).await.unwrap();
            process.resize(size).unwrap();
            assert_eq!(rustix::termios::tcgetwinsize(&slave).unwrap().ws_col, 80);
            rustix::io::write(&slave, b"hi").unwrap();
            assert_eq!(process.stdout.read(8).await.unwrap(), b"hi");
            assert_eq!(process.stderr.read(8).await.unwrap(), b"");
            drop(slave);
            assert_eq!(process.stdout.read(8).await.unwrap(), b"");
        });
    }
}
