//! Standard streams of a process, through pipes or a terminal.
//!
//! EOF of a stream is reported once, and then its descriptor is closed:
//! * when every writer has closed it, or the terminal has hung up;
//! * or when the process has exited and [`GRACE`] has passed. Data in the pipe at that time is
//!   still delivered, so no output is lost; later data of a surviving grandchild is not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};

/// How long descendants of an exited process may hold its streams open.
pub const GRACE: Duration = Duration::from_millis(500);

/// Maximum data per reply, bytes. Some vsock devices lose larger writes.
pub const MAX_REPLY: usize = 16 * 1024;

/// Exit of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Exit status, or 128 plus the signal number.
    pub code: i32,
    /// When it was observed.
    pub at: Instant,
}

/// Receives the exit of a process.
pub type ExitWatch = watch::Receiver<Option<Exit>>;

/// An output stream.
#[derive(Debug)]
pub struct Output {
    state: Mutex<State>,
    exit: ExitWatch,
    /// Notified when EOF has been reported.
    eof: Notify,
}

#[derive(Debug)]
struct State {
    /// `None` once EOF has been reported.
    reader: Option<pipe::Receiver>,
    /// After the grace period: bytes that were in the pipe then and are still unread.
    left: Option<usize>,
}

impl Output {
    /// Creates a stream without pipe; [`Output::open`] adds it.
    #[must_use]
    pub fn new(exit: ExitWatch) -> Self {
        Self { state: Mutex::new(State { reader: None, left: None }), exit, eof: Notify::new() }
    }

    /// Sets the pipe or terminal, which must be non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be registered with epoll.
    pub async fn open(&self, fd: OwnedFd) -> io::Result<()> {
        // Unchecked: a terminal is not a pipe, but the operations used here work on both.
        self.state.lock().await.reader = Some(pipe::Receiver::from_owned_fd_unchecked(fd)?);
        Ok(())
    }

    /// Waits for output and returns at most `len` bytes; empty means EOF. Cancel-safe.
    ///
    /// # Errors
    /// The read fails.
    pub async fn read(&self, len: usize) -> Result<Vec<u8>> {
        let mut state = self.state.lock().await;
        let mut buffer = vec![0; len.clamp(1, MAX_REPLY)];
        let mut exit = self.exit.clone();
        loop {
            let State { reader, left } = &mut *state;
            let Some(pipe) = reader.as_ref() else { return Ok(Vec::new()) };
            if left.is_none() && after_grace(*exit.borrow()) {
                *left = Some(waiting(pipe));
            }
            let most = left.unwrap_or(buffer.len()).min(buffer.len());
            let got = if most == 0 { Ok(0) } else { pipe.try_read(&mut buffer[..most]) };
            match got {
                Ok(0) => {
                    *reader = None;
                    self.eof.notify_one();
                    return Ok(Vec::new());
                }
                Ok(got) => {
                    if let Some(left) = left {
                        *left -= got;
                    }
                    buffer.truncate(got);
                    return Ok(buffer);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // EIO: all users of the terminal have closed it.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                    *reader = None;
                    self.eof.notify_one();
                    return Ok(Vec::new());
                }
                Err(error) => return Err(Error::internal(format!("failed to read the stream: {error}"))),
            }
            let grace_over = left.is_some();
            tokio::select! {
                ready = pipe.readable() => {
                    ready.map_err(|error| Error::internal(format!("failed to wait for the stream: {error}")))?;
                }
                () = grace(&mut exit), if !grace_over => {}
            }
        }
    }

    /// Closes the stream and discards unread data.
    pub async fn close(&self) {
        self.state.lock().await.reader = None;
        self.eof.notify_one();
    }

    /// Closes the stream if it is empty and has no writers left. A terminal has none once its last
    /// user has closed it.
    pub fn close_if_drained(&self) {
        // A reader holds the lock, and will see EOF.
        let Ok(mut state) = self.state.try_lock() else { return };
        if state.reader.as_ref().is_some_and(|pipe| waiting(pipe) == 0 && hung_up(pipe)) {
            state.reader = None;
            self.eof.notify_one();
        }
    }

    /// Waits until EOF has been reported. One waiter at a time.
    pub async fn closed(&self) {
        while self.is_open() {
            self.eof.notified().await;
        }
    }

    /// Returns whether EOF has not been reported yet.
    #[must_use]
    pub fn is_open(&self) -> bool {
        // A reader holds the lock for as long as it waits.
        self.state.try_lock().map_or(true, |state| state.reader.is_some())
    }
}

fn waiting(pipe: &pipe::Receiver) -> usize {
    rustix::io::ioctl_fionread(pipe.as_fd()).ok().and_then(|len| usize::try_from(len).ok()).unwrap_or(0)
}

/// Returns whether there are no writers left.
fn hung_up(pipe: &pipe::Receiver) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn after_grace(exit: Option<Exit>) -> bool {
    exit.is_some_and(|exit| exit.at.elapsed() >= GRACE)
}

/// Returns [`GRACE`] after the process has exited.
async fn grace(exit: &mut ExitWatch) {
    let at = exit.wait_for(Option::is_some).await.ok().and_then(|exit| exit.map(|exit| exit.at));
    match at {
        Some(at) => tokio::time::sleep_until(at + GRACE).await,
        // The sender was dropped, so no exit will be reported.
        None => std::future::pending().await,
    }
}

/// Standard input of a process.
#[derive(Debug)]
pub struct Input {
    state: Mutex<Option<pipe::Sender>>,
    exit: ExitWatch,
    terminal: bool,
}

/// EOT, which a terminal in canonical mode takes as end of input.
const END_OF_TRANSMISSION: &[u8] = &[4];

impl Input {
    /// Creates an input without pipe; [`Input::open`] adds it.
    #[must_use]
    pub fn new(exit: ExitWatch, terminal: bool) -> Self {
        Self { state: Mutex::new(None), exit, terminal }
    }

    /// Returns whether the process has a terminal.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Sets the pipe or terminal, which must be non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be registered with epoll.
    pub async fn open(&self, fd: OwnedFd) -> io::Result<()> {
        *self.state.lock().await = Some(pipe::Sender::from_owned_fd_unchecked(fd)?);
        Ok(())
    }

    /// Writes all of `data`; waits while the pipe is full.
    ///
    /// # Errors
    /// The input is closed, or the process has exited.
    pub async fn write(&self, data: &[u8]) -> Result<()> {
        let state = self.state.lock().await;
        let closed = || Error::internal("standard input is closed");
        let pipe = state.as_ref().ok_or_else(closed)?;
        self.write_to(pipe, data).await
    }

    async fn write_to(&self, pipe: &pipe::Sender, mut data: &[u8]) -> Result<()> {
        let mut exit = self.exit.clone();
        while !data.is_empty() {
            match pipe.try_write(data) {
                Ok(written) => data = &data[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::select! {
                        ready = pipe.writable() => {
                            ready.map_err(|error| Error::internal(format!("failed to wait for the stream: {error}")))?;
                        }
                        () = grace(&mut exit) => return Err(Error::internal("the process has exited")),
                    }
                }
                Err(error) => return Err(Error::internal(format!("failed to write to standard input: {error}"))),
            }
        }
        Ok(())
    }

    /// Closes the input: a pipe is closed, a terminal gets EOT. Idempotent.
    pub async fn close(&self) {
        let pipe = self.state.lock().await.take();
        if let Some(pipe) = pipe.filter(|_| self.terminal) {
            let _ = pipe.try_write(END_OF_TRANSMISSION);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    fn pair() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap()
    }

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(future)
    }

    fn ended(at: Instant) -> Option<Exit> {
        Some(Exit { code: 0, at })
    }

    #[test]
    fn eof_follows_the_data_when_every_writer_has_closed() {
        run(async {
            let (_exit_sender, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            rustix::io::write(&writer, &[7; 20_000]).unwrap();
            assert_eq!(output.read(5).await.unwrap(), [7; 5]);
            assert_eq!(output.read(usize::MAX).await.unwrap().len(), MAX_REPLY);
            assert_eq!(output.read(0).await.unwrap().len(), 1, "a length of 0 would mean EOF");
            drop(writer);
            assert_eq!(output.read(usize::MAX).await.unwrap().len(), 20_000 - MAX_REPLY - 6);
            assert_eq!(output.read(9).await.unwrap(), b"");
            assert!(!output.is_open());
        });
    }

    #[test]
    fn only_an_empty_stream_without_writers_is_closed_as_drained() {
        run(async {
            let (_exit_sender, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            output.close_if_drained();
            assert!(output.is_open(), "a writer is left");
            rustix::io::write(&writer, b"last").unwrap();
            drop(writer);
            output.close_if_drained();
            assert_eq!(output.read(9).await.unwrap(), b"last");
            assert!(output.is_open(), "EOF has not been reported");
            output.close_if_drained();
            assert!(!output.is_open());
            output.closed().await;
            assert_eq!(output.read(9).await.unwrap(), b"");
        });
    }

    #[test]
    fn grandchild_cannot_hold_the_stream_open() {
        run(async {
            for pending in [true, false] {
                let (exit_sender, exit) = watch::channel(None);
                let output = Output::new(exit);
                let (reader, writer) = pair();
                output.open(reader).await.unwrap();
                rustix::io::write(&writer, b"tail").unwrap();
                let start = Instant::now();
                let read = async {
                    if !pending {
                        exit_sender.send_replace(ended(start));
                        tokio::time::sleep(Duration::from_secs(2)).await;
                    }
                    let tail = output.read(100).await.unwrap();
                    (tail, output.read(100).await.unwrap())
                };
                let exit = async {
                    tokio::task::yield_now().await;
                    if pending {
                        exit_sender.send_replace(ended(start));
                    }
                };
                let ((tail, end), ()) = tokio::join!(read, exit);
                assert_eq!((tail.as_slice(), end.as_slice()), (&b"tail"[..], &b""[..]));
                assert!(start.elapsed() < Duration::from_secs(3));
                // Later data does not reopen the stream.
                let _ = rustix::io::write(&writer, b"late");
                assert_eq!(output.read(100).await.unwrap(), b"");
            }
        });
    }

    #[test]
    fn data_written_after_the_grace_period_is_not_delivered() {
        run(async {
            let (exit_sender, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            exit_sender.send_replace(ended(Instant::now()));
            tokio::time::sleep(GRACE * 2).await;
            rustix::io::write(&writer, b"abcd").unwrap();
            assert_eq!(output.read(2).await.unwrap(), b"ab");
            rustix::io::write(&writer, b"efgh").unwrap();
            assert_eq!(output.read(100).await.unwrap(), b"cd");
            assert_eq!(output.read(100).await.unwrap(), b"");
        });
    }

    #[test]
    fn input_is_written_completely_and_closes() {
        run(async {
            let (exit_sender, exit) = watch::channel(None);
            let input = Input::new(exit, false);
            assert!(input.write(b"x").await.is_err());
            let (reader, writer) = pair();
            input.open(writer).await.unwrap();
            let drain = async {
                let mut all = 0;
                let mut buffer = vec![0; 65536];
                while all < 200_000 {
                    all += rustix::io::read(&reader, &mut buffer).unwrap_or(0);
                    tokio::task::yield_now().await;
                }
            };
            let data = vec![1; 200_000];
            let (written, ()) = tokio::join!(input.write(&data), drain);
            written.unwrap();
            // No reader, and the process has exited: the write fails.
            exit_sender.send_replace(ended(Instant::now()));
            assert!(input.write(&data).await.unwrap_err().message.contains("exited"));
            input.close().await;
            input.close().await;
            assert!(input.write(b"x").await.unwrap_err().message.contains("closed"));
        });
    }
}
