//! The process: sockets, threads and exit.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::board::Board;
use crate::call::Call;
use crate::codes::{self, Family};
use crate::config::{Address, Config};
use crate::control::{Answer, Latency};
use crate::machine::{Event, Phase, Rules};
use crate::scenario::{Scenario, ScenarioError};
use crate::simulation::{Simulation, sxid, xid};
use crate::state_file::StateFile;
use crate::tenant_monitor::TenantMonitor;
use crate::wire::{self, Reply, Request};

/// The exit code after a violation.
pub const VIOLATED: u8 = 70;

/// Why it failed to run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The stand-in's own file.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// A failed device that does not exist.
    #[error("FAKE_FM: {0}")]
    Board(String),
    /// A log or socket cannot be opened.
    #[error("{0}: {1}")]
    Open(PathBuf, #[source] std::io::Error),
    /// Signals, threads.
    #[error("failed to start: {0}")]
    System(#[from] std::io::Error),
    /// The manager failed after its start.
    #[error("{0}")]
    Ended(String),
}

enum End {
    Signalled,
    Failed(String),
}

struct Server {
    config: Config,
    scenario: Scenario,
    rules: Rules,
    simulation: Mutex<Simulation>,
    /// Signals that a hanging call may continue.
    released: Condvar,
    /// Calls are serialised.
    turn: Mutex<()>,
    log: Mutex<Option<File>>,
    end: Mutex<Sender<End>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until a signal or a failure; returns the exit code.
///
/// # Errors
/// It failed to start, or the simulated manager fails.
pub fn run(config: Config, scenario: Scenario) -> Result<u8, ServerError> {
    let (end, ended) = channel();
    let server = Arc::new(Server::new(config, scenario, end)?);
    if let Some(path) = server.scenario.control.clone() {
        let listener = listen(&path)?;
        spawn(&server, move |server| server.accept_control(&listener))?;
    }
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    spawn(&server, move |server| {
        if signals.forever().next().is_some() {
            server.end(End::Signalled);
        }
    })?;
    spawn(&server, |server| server.run_lifecycle())?;
    server.wait(&ended)
}

fn spawn(server: &Arc<Server>, work: impl FnOnce(&Arc<Server>) + Send + 'static) -> Result<(), std::io::Error> {
    let server = Arc::clone(server);
    thread::Builder::new().spawn(move || work(&server)).map(drop)
}

/// Removes the socket file of a killed process first.
fn listen(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |error| ServerError::Open(path.to_owned(), error);
    if std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket()) {
        std::fs::remove_file(path).map_err(failed)?;
    }
    UnixListener::bind(path).map_err(failed)
}

fn append(path: Option<&PathBuf>) -> Result<Option<File>, ServerError> {
    let open = |path: &PathBuf| OpenOptions::new().append(true).create(true).open(path);
    path.map(|path| open(path).map_err(|error| ServerError::Open(path.clone(), error))).transpose()
}

impl Server {
    fn new(config: Config, scenario: Scenario, end: Sender<End>) -> Result<Self, ServerError> {
        let known = scenario.known()?;
        let board = Board::new(known, scenario.failed.clone(), config.policy);
        board.check().map_err(ServerError::Board)?;
        let shared = config.mode == 1;
        let family = scenario.codes.unwrap_or_else(|| Family::of(known));
        // Without the shared mode there is no list of active partitions.
        let restart = config.restart && shared;
        let unexpected_list_code = scenario.unexpected_list_code;
        let rules = Rules { board, family, shared, restart, resident: config.resident, unexpected_list_code };
        let tenant_monitor = TenantMonitor::new(scenario.tenants.clone());
        let journal = append(scenario.log.as_ref())?;
        Ok(Self {
            simulation: Mutex::new(Simulation::new(rules.clone(), tenant_monitor, Latency::of(&scenario), journal)),
            log: Mutex::new(append(config.log.as_ref())?),
            released: Condvar::new(),
            turn: Mutex::new(()),
            end: Mutex::new(end),
            config,
            scenario,
            rules,
        })
    }

    /// Writes a line to the manager's log.
    fn log_line(&self, line: &str) {
        // The reader of stderr may be gone.
        let _ = match &mut *lock(&self.log) {
            Some(file) => writeln!(file, "{line}"),
            None => writeln!(std::io::stderr(), "{line}"),
        };
    }

    fn end(&self, end: End) {
        // After the first message the receiver is gone.
        let _ = lock(&self.end).send(end);
    }

    fn wait(&self, ended: &Receiver<End>) -> Result<u8, ServerError> {
        match ended.recv() {
            Ok(End::Failed(line)) => {
                if self.config.log.is_some() {
                    self.log_line(&line);
                }
                Err(ServerError::Ended(line))
            }
            Ok(End::Signalled) | Err(_) => Ok(if lock(&self.simulation).is_clean() { 0 } else { VIOLATED }),
        }
    }

    /// Runs the lifecycle until the window for the list has passed.
    fn run_lifecycle(self: &Arc<Self>) {
        self.log_line(&format!("Fabric Manager (stand-in) version {} starting", self.scenario.version));
        let drivers = self.drivers();
        if let (Err(line), false) = (&drivers, self.rules.resident) {
            return self.end(End::Failed(line.clone()));
        }
        thread::sleep(Duration::from_millis(self.scenario.listen_ms));
        if let Err(error) = self.open() {
            return self.end(End::Failed(error.to_string()));
        }
        thread::sleep(Duration::from_millis(self.scenario.start_ms));
        let started = drivers.and_then(|()| self.start());
        let event = if started.is_ok() { Event::Started } else { Event::StartFailed };
        let phase = lock(&self.simulation).apply_event(&event);
        match (phase, started) {
            (Phase::Ended, Err(line)) => self.end(End::Failed(line)),
            (_, Err(line)) => self.log_line(&format!("{line}; staying, not initialised")),
            (Phase::RestartWait, Ok(())) => self.wait_for_list(),
            (_, Ok(())) => {
                self.log_line("Successfully configured all the available NVSwitches to route GPU NVLink traffic.")
            }
        }
    }

    fn drivers(&self) -> Result<(), String> {
        let Scenario { version, driver_version, .. } = &self.scenario;
        match driver_version {
            Some(driver) if driver != version => {
                Err(format!("fabric manager version {version} don't match with driver version {driver}"))
            }
            _ => Ok(()),
        }
    }

    fn start(&self) -> Result<(), String> {
        if let Some(line) = &self.scenario.start_fails {
            return Err(line.clone());
        }
        let state = StateFile::new(&self.scenario.version, self.rules.board.known);
        let path = &self.config.state_file;
        if self.rules.restart { state.check(path) } else { state.write(path) }.map_err(|error| error.to_string())?;
        self.log_line("Connected to 1 node.");
        if !self.rules.board.reports_devices() {
            // The lists do not report failures.
            let failed = &self.scenario.failed;
            failed.switches.iter().for_each(|switch| self.log_line(&sxid(*switch, 22_013)));
            let gpus = failed.gpus.iter().chain(failed.links.iter().map(|(gpu, _)| gpu));
            gpus.for_each(|gpu| self.log_line(&xid(*gpu, 74)));
        }
        Ok(())
    }

    fn wait_for_list(&self) {
        self.log_line("restarted; waiting for the list of activated partitions");
        thread::sleep(Duration::from_millis(self.scenario.restart_window_ms));
        if lock(&self.simulation).apply_event(&Event::WindowOver) == Phase::Ended {
            let window = self.scenario.restart_window_ms;
            self.end(End::Failed(format!("restart: no list of activated partitions within {window} ms")));
        }
    }

    fn open(self: &Arc<Self>) -> Result<(), ServerError> {
        if let Some(path) = self.config.internal.as_ref().filter(|_| self.rules.family == Family::Nvl4) {
            let listener = listen(path)?;
            spawn(self, move |server| {
                accept(server, listener.incoming(), |_, stream| serve(stream, |_| Reply::code(codes::UNINITIALIZED)));
            })?;
        }
        match &self.config.address {
            Address::Unix(path) => {
                let listener = listen(path)?;
                spawn(self, move |server| accept(server, listener.incoming(), Self::serve))?;
            }
            Address::Tcp(host, port) => {
                let failed = |error| ServerError::Open(format!("{host}:{port}").into(), error);
                let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
                spawn(self, move |server| accept(server, listener.incoming(), Self::serve))?;
            }
        }
        Ok(())
    }

    fn serve<S: Read + Write>(&self, stream: S) {
        serve(stream, |request| self.call(request));
    }

    /// Executes one call at a time.
    fn call(&self, request: Call) -> Reply {
        let _turn = lock(&self.turn);
        let mut simulation = lock(&self.simulation);
        while simulation.hangs(request.op()) {
            simulation.hanging = true;
            simulation = self.released.wait(simulation).unwrap_or_else(PoisonError::into_inner);
        }
        simulation.hanging = false;
        let (fault, time) = simulation.begin(&request);
        drop(simulation);
        thread::sleep(time);
        lock(&self.simulation).finish(request, fault.as_ref())
    }

    fn accept_control(self: &Arc<Self>, listener: &UnixListener) {
        accept(self, listener.incoming(), |server, stream| server.serve_control(stream));
    }

    fn serve_control(&self, stream: UnixStream) {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while stream.read_line(&mut line).is_ok_and(|length| length > 0) {
            let (answer, said) = match serde_json::from_str(&line) {
                Ok(command) => lock(&self.simulation).control(command),
                Err(error) => (Answer::Error(error.to_string()), None),
            };
            self.released.notify_all();
            if let Some(said) = said {
                self.log_line(&said);
            }
            line.clear();
            let Ok(mut text) = serde_json::to_vec(&answer) else { return };
            text.push(b'\n');
            if stream.get_mut().write_all(&text).is_err() {
                return;
            }
        }
    }
}

/// Serves each connection on a thread; a failed spawn drops that connection only.
fn accept<S: Send + 'static>(
    server: &Arc<Server>,
    streams: impl Iterator<Item = Result<S, std::io::Error>>,
    work: impl Fn(&Server, S) + Clone + Send + 'static,
) {
    for stream in streams.flatten() {
        let work = work.clone();
        if let Err(error) = spawn(server, move |server| work(server, stream)) {
            server.log_line(&format!("a connection is dropped: {error}"));
        }
    }
}

/// Serves requests until the client disconnects or sends an invalid one.
fn serve<S: Read + Write>(mut stream: S, mut call: impl FnMut(Call) -> Reply) {
    while let Ok(request) = wire::read(&mut stream) {
        let reply = match request {
            Request::Hello => Reply::code(codes::SUCCESS),
            Request::Call(request) => call(request),
        };
        if wire::write(&mut stream, &reply).is_err() {
            return;
        }
    }
}
