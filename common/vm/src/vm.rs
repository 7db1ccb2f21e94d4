//! A running virtual machine.

use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{sleep, timeout};

use crate::helper::Helper;
use crate::machine::Files;
use crate::{Console, Machine, Qmp, VmError};

/// A running virtual machine. Dropping it kills QEMU and its daemons.
#[derive(Debug)]
pub struct Vm {
    qemu: Child,
    helpers: Vec<Helper>,
    console: Console,
    /// Set to stop throttling a slow console.
    unthrottle: Arc<AtomicBool>,
    dir: PathBuf,
    serial: PathBuf,
    started: Instant,
}

/// Log of the serial port, beside the console's: only the kernel's early failures.
const SERIAL_LOG: &str = "serial.log";

/// The exit of a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// QEMU's exit status: 0 also for a guest that powered off after a failure.
    pub status: ExitStatus,
    /// Time from QEMU's start to its exit.
    pub uptime: Duration,
}

/// Throttles a stream to `rate` bytes per second, with minimal buffering. Once
/// `unthrottle` is set, the rest passes unthrottled.
fn throttle(mut from: ChildStdout, rate: u32, unthrottle: Arc<AtomicBool>) -> DuplexStream {
    // A pipe otherwise buffers the output of a whole boot. On failure only the start is throttled less.
    let _ = rustix::pipe::fcntl_setpipe_size(from.as_fd(), 4096);
    let (mut to, slow) = tokio::io::duplex(64);
    tokio::spawn(async move {
        let chunk = usize::try_from(rate.div_ceil(10)).unwrap_or(1);
        let mut buffer = vec![0; chunk];
        while let Ok(len @ 1..) = from.read(&mut buffer).await {
            if to.write_all(&buffer[..len]).await.is_err() {
                break;
            }
            if !unthrottle.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(100)).await;
            }
        }
    });
    slow
}

impl Vm {
    /// Starts the daemons, then QEMU. All files of the machine are created in `dir`,
    /// whose path must be short enough for a Unix socket; the console is logged to
    /// `console_log`, the serial port to `serial.log` beside it.
    ///
    /// # Errors
    /// A program cannot be started, or a daemon exited before it listened.
    pub async fn start(machine: &Machine, dir: &Path, console_log: &Path) -> Result<Self, VmError> {
        let files = Files(dir);
        let mut helpers = Vec::new();
        let mut command = machine.vhost_vsock.command();
        command.arg("--vm").arg(format!(
            "guest-cid={},socket={},uds-path={}",
            machine.cid,
            files.vsock_backend().display(),
            files.vsock().display()
        ));
        let mut vsock = Helper::start("vhost-device-vsock", command, dir)?;
        for (at, share) in machine.shares.iter().enumerate() {
            let mut command = machine.virtiofsd.command();
            command.arg("--socket-path").arg(files.share(at)).arg("--shared-dir").arg(&share.dir);
            command.args(["--cache", "auto", "--log-level", "warn"]);
            let mut helper = Helper::start(&format!("virtiofsd{at}"), command, dir)?;
            helper.wait_for_socket(&files.share(at)).await?;
            helpers.push(helper);
        }
        vsock.wait_for_socket(&files.vsock_backend()).await?;
        helpers.push(vsock);

        let mut command = machine.qemu.command();
        firstlight_sys::child::die_with_parent(&mut command);
        let mut command = Command::from(command);
        let serial = console_log.with_file_name(SERIAL_LOG);
        command.args(machine.arguments(dir, &serial));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let errors = dir.join("qemu.log");
        let file = std::fs::File::create(&errors).map_err(|source| VmError::File { path: errors, source })?;
        command.stderr(file);
        let spawn = |source| VmError::Spawn { name: "QEMU".to_owned(), program: machine.qemu.program.clone(), source };
        let started = Instant::now();
        let mut qemu = command.spawn().map_err(spawn)?;
        let stdout = qemu.stdout.take().ok_or_else(|| spawn(io::Error::other("no standard output")))?;
        let unthrottle = Arc::new(AtomicBool::new(false));
        let console = match machine.slow_console {
            None => Console::follow(stdout, console_log).await?,
            Some(rate) => Console::follow(throttle(stdout, rate, Arc::clone(&unthrottle)), console_log).await?,
        };
        Ok(Self { qemu, helpers, console, unthrottle, dir: dir.to_owned(), serial, started })
    }

    /// Returns the guest's console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns the time since QEMU's start.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns QEMU's process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.qemu.id()
    }

    /// Returns the path of the Unix socket that leads to guest ports.
    #[must_use]
    pub fn vsock(&self) -> PathBuf {
        Files(&self.dir).vsock()
    }

    /// Connects to a port of the guest, with retries until `deadline` has passed.
    ///
    /// # Errors
    /// The guest did not accept a connection in that time.
    pub async fn connect(&self, port: u32, deadline: Duration) -> Result<UnixStream, VmError> {
        let begin = Instant::now();
        let socket = self.vsock();
        let mut last = String::from("no attempt finished");
        match timeout(deadline, firstlight_vsock::connect(&socket, port, |error| last = error.to_string())).await {
            Ok(stream) => Ok(stream),
            Err(_) => {
                let console_tail = self.console_tail();
                Err(VmError::Connect { port, elapsed: begin.elapsed(), last, console_tail })
            }
        }
    }

    /// Connects to QEMU's monitor, which accepts one connection at a time.
    ///
    /// # Errors
    /// QEMU has not created its socket yet, or has exited.
    pub async fn monitor(&self) -> Result<Qmp, VmError> {
        Qmp::connect(&Files(&self.dir).monitor()).await
    }

    /// Returns the last lines of the console, of QEMU's and the daemons' logs, and
    /// of the serial port if the console has no boot record.
    #[must_use]
    pub fn console_tail(&self) -> String {
        let mut tail = self.console.tail();
        let silent = self.console.record().is_none();
        let mut files = vec![("QEMU", self.dir.join("qemu.log"))];
        files.extend(self.helpers.iter().map(|helper| (helper.name(), helper.log().to_owned())));
        if silent {
            files.push(("serial port", self.serial.clone()));
        }
        for (name, file) in files {
            let text = std::fs::read(&file).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            for line in text.lines().rev().take(4).collect::<Vec<_>>().into_iter().rev() {
                let line: String = line.chars().filter(|c| !c.is_control()).take(200).collect();
                if !line.is_empty() {
                    tail.push_str(&format!("\n  {name}: {line}"));
                }
            }
        }
        tail
    }

    /// Waits until QEMU has exited and its console is read completely.
    ///
    /// # Errors
    /// Waiting for QEMU fails.
    pub async fn wait(&mut self) -> Result<Exit, VmError> {
        let status = self.qemu.wait().await.map_err(VmError::Wait)?;
        let uptime = self.started.elapsed();
        self.unthrottle.store(true, Ordering::Relaxed);
        self.console.ended().await;
        Ok(Exit { status, uptime })
    }

    /// Kills QEMU and the daemons and waits for them.
    pub async fn stop(mut self) {
        let _ = self.qemu.kill().await;
        for helper in self.helpers.drain(..) {
            helper.stop().await;
        }
    }
}
