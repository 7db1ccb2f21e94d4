//! What a process writes and reads, through pipes or a terminal.
//!
//! The end of a stream is told once, and then its descriptor is closed:
//! * every writer has closed it, or the terminal has hung up;
//! * or the process has ended and [`GRACE`] is over. What is in the pipe at
//!   that moment still comes, so no output is lost; what a forgotten
//!   grandchild writes later does not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};

/// How long the descendants of a process that has ended may keep its streams open.
pub const GRACE: Duration = Duration::from_millis(500);

/// The most that one reply carries, bytes. Some vsock devices lose larger writes.
pub const MAX_REPLY: usize = 16 * 1024;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Its exit status, or 128 and the signal's number.
    pub code: i32,
    /// When that was seen.
    pub at: Instant,
}

/// Tells whether and how a process has ended.
pub type ExitWatch = watch::Receiver<Option<Exit>>;

/// An output stream.
#[derive(Debug)]
pub struct Output {
    state: Mutex<State>,
    exit: ExitWatch,
    /// Told when the end has been told.
    told: Notify,
}

#[derive(Debug)]
struct State {
    /// `None` once the end has been told.
    reader: Option<pipe::Receiver>,
    /// After the grace: what was in the pipe then and has not been read yet.
    left: Option<usize>,
}

impl Output {
    /// A stream with nothing in it; it gets its pipe with [`Output::open`].
    #[must_use]
    pub fn new(exit: ExitWatch) -> Self {
        Self { state: Mutex::new(State { reader: None, left: None }), exit, told: Notify::new() }
    }

    /// Gives the stream its pipe or terminal, which must be non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be waited for.
    pub async fn open(&self, fd: OwnedFd) -> io::Result<()> {
        // Unchecked because a terminal is no pipe; everything used here works on both.
        self.state.lock().await.reader = Some(pipe::Receiver::from_owned_fd_unchecked(fd)?);
        Ok(())
    }

    /// Waits for output and returns at most `len` bytes of it; nothing means
    /// the end. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The kernel's, with the reason.
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
                    self.told.notify_one();
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
                // A terminal whose last user is gone.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                    *reader = None;
                    self.told.notify_one();
                    return Ok(Vec::new());
                }
                Err(error) => return Err(Error::internal(format!("cannot read the stream: {error}"))),
            }
            let grace_over = left.is_some();
            tokio::select! {
                ready = pipe.readable() => {
                    ready.map_err(|error| Error::internal(format!("cannot wait for the stream: {error}")))?;
                }
                () = grace(&mut exit), if !grace_over => {}
            }
        }
    }

    /// Closes the stream, whatever is still in it.
    pub async fn close(&self) {
        self.state.lock().await.reader = None;
        self.told.notify_one();
    }

    /// Closes the stream if nothing is in it and nobody can write to it any
    /// more: then there is nothing to keep it for. To a terminal nobody can
    /// write once its last user is gone.
    pub fn close_if_spent(&self) {
        // Whoever reads holds the lock, and will be told the end.
        let Ok(mut state) = self.state.try_lock() else { return };
        if state.reader.as_ref().is_some_and(|pipe| waiting(pipe) == 0 && hung_up(pipe)) {
            state.reader = None;
            self.told.notify_one();
        }
    }

    /// Waits until the end has been told. For one who waits at a time.
    pub async fn told(&self) {
        while self.is_open() {
            self.told.notified().await;
        }
    }

    /// Whether the end has not been told yet.
    #[must_use]
    pub fn is_open(&self) -> bool {
        // A reader holds the lock for as long as it waits.
        self.state.try_lock().map_or(true, |state| state.reader.is_some())
    }
}

fn waiting(pipe: &pipe::Receiver) -> usize {
    rustix::io::ioctl_fionread(pipe.as_fd()).ok().and_then(|len| usize::try_from(len).ok()).unwrap_or(0)
}

/// Whether every writer is gone.
fn hung_up(pipe: &pipe::Receiver) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn after_grace(exit: Option<Exit>) -> bool {
    exit.is_some_and(|exit| exit.at.elapsed() >= GRACE)
}

/// Ends [`GRACE`] after the process has.
async fn grace(exit: &mut ExitWatch) {
    let at = exit.wait_for(Option::is_some).await.ok().and_then(|exit| exit.map(|exit| exit.at));
    match at {
        Some(at) => tokio::time::sleep_until(at + GRACE).await,
        // The process's record is gone, and with it whoever could tell.
        None => std::future::pending().await,
    }
}

/// The input stream.
#[derive(Debug)]
pub struct Input {
    state: Mutex<Option<pipe::Sender>>,
    exit: ExitWatch,
    terminal: bool,
}

/// What a terminal in its usual mode takes as the end of input.
const END_OF_TRANSMISSION: &[u8] = &[4];

impl Input {
    /// An input with nothing to write to; it gets its pipe with [`Input::open`].
    #[must_use]
    pub fn new(exit: ExitWatch, terminal: bool) -> Self {
        Self { state: Mutex::new(None), exit, terminal }
    }

    /// Whether it is to be a terminal's.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Gives the input its pipe or terminal, which must be non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be waited for.
    pub async fn open(&self, fd: OwnedFd) -> io::Result<()> {
        *self.state.lock().await = Some(pipe::Sender::from_owned_fd_unchecked(fd)?);
        Ok(())
    }

    /// Writes all of `data`; waits while the process does not read.
    ///
    /// # Errors
    /// The input is closed, or the process has ended.
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
                            ready.map_err(|error| Error::internal(format!("cannot wait for the stream: {error}")))?;
                        }
                        () = grace(&mut exit) => return Err(Error::internal("the process has ended")),
                    }
                }
                Err(error) => return Err(Error::internal(format!("cannot write to standard input: {error}"))),
            }
        }
        Ok(())
    }

    /// Ends the input: a pipe is closed, a terminal is told. A second time changes nothing.
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
    fn data_then_the_end_when_every_writer_is_gone() {
        run(async {
            let (_told, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            rustix::io::write(&writer, &[7; 20_000]).unwrap();
            assert_eq!(output.read(5).await.unwrap(), [7; 5]);
            assert_eq!(output.read(usize::MAX).await.unwrap().len(), MAX_REPLY);
            assert_eq!(output.read(0).await.unwrap().len(), 1, "a length of 0 would mean the end");
            drop(writer);
            assert_eq!(output.read(usize::MAX).await.unwrap().len(), 20_000 - MAX_REPLY - 6);
            assert_eq!(output.read(9).await.unwrap(), b"");
            assert!(!output.is_open());
        });
    }

    #[test]
    fn only_a_stream_from_which_nothing_can_come_is_spent() {
        run(async {
            let (_told, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            output.close_if_spent();
            assert!(output.is_open(), "somebody may write");
            rustix::io::write(&writer, b"last").unwrap();
            drop(writer);
            output.close_if_spent();
            assert_eq!(output.read(9).await.unwrap(), b"last");
            assert!(output.is_open(), "the end has not been told");
            output.close_if_spent();
            assert!(!output.is_open());
            output.told().await;
            assert_eq!(output.read(9).await.unwrap(), b"");
        });
    }

    #[test]
    fn a_grandchild_cannot_hold_the_stream_whenever_the_read_began() {
        run(async {
            for pending in [true, false] {
                let (told, exit) = watch::channel(None);
                let output = Output::new(exit);
                let (reader, writer) = pair();
                output.open(reader).await.unwrap();
                rustix::io::write(&writer, b"tail").unwrap();
                let start = Instant::now();
                let read = async {
                    if !pending {
                        told.send_replace(ended(start));
                        tokio::time::sleep(Duration::from_secs(2)).await;
                    }
                    let tail = output.read(100).await.unwrap();
                    (tail, output.read(100).await.unwrap())
                };
                let exit = async {
                    tokio::task::yield_now().await;
                    if pending {
                        told.send_replace(ended(start));
                    }
                };
                let ((tail, end), ()) = tokio::join!(read, exit);
                assert_eq!((tail.as_slice(), end.as_slice()), (&b"tail"[..], &b""[..]));
                assert!(start.elapsed() < Duration::from_secs(3));
                // Nothing that comes later brings the stream back.
                let _ = rustix::io::write(&writer, b"late");
                assert_eq!(output.read(100).await.unwrap(), b"");
            }
        });
    }

    #[test]
    fn a_chatty_grandchild_gets_no_more_than_was_there() {
        run(async {
            let (told, exit) = watch::channel(None);
            let output = Output::new(exit);
            let (reader, writer) = pair();
            output.open(reader).await.unwrap();
            told.send_replace(ended(Instant::now()));
            tokio::time::sleep(GRACE * 2).await;
            rustix::io::write(&writer, b"abcd").unwrap();
            assert_eq!(output.read(2).await.unwrap(), b"ab");
            rustix::io::write(&writer, b"efgh").unwrap();
            assert_eq!(output.read(100).await.unwrap(), b"cd");
            assert_eq!(output.read(100).await.unwrap(), b"");
        });
    }

    #[test]
    fn input_is_written_whole_and_ends() {
        run(async {
            let (told, exit) = watch::channel(None);
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
            // Nobody reads, and the process is gone: the writer is let go.
            told.send_replace(ended(Instant::now()));
            assert!(input.write(&data).await.unwrap_err().message.contains("ended"));
            input.close().await;
            input.close().await;
            assert!(input.write(b"x").await.unwrap_err().message.contains("closed"));
        });
    }
}
