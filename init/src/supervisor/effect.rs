//! What components of the supervisor request from the main loop.
//!
//! A component owns its state. It takes an event, changes its own state and returns
//! effects; the main loop carries them out in order, see `carry_out`.

use firstlight_boot_record::{Gpu, LogLine};
use firstlight_init_control::{FromInit, RequestId};
use firstlight_pci::Address;

use crate::control::ClientId;
use crate::executor::End;
use crate::log::Source;
use crate::shutdown::{self, Goal};
use crate::unit_id::UnitId;

/// A client's request to load a kernel module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModuleRequest {
    /// The client.
    pub(super) client: ClientId,
    /// The request's id.
    pub(super) id: Option<RequestId>,
    /// The module's name.
    pub(super) name: String,
}

/// A request of a component to the main loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// End a unit.
    EndUnit(UnitId, End),
    /// Add an event of now to the boot record.
    Event {
        /// Its kind.
        kind: &'static str,
        /// Its object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Add an event to the boot record, before the queued console lines.
    UrgentEvent {
        /// When it happened, µs.
        at_us: u64,
        /// Its kind.
        kind: &'static str,
        /// Its object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Add the event of a client to the boot record.
    ClientEvent {
        /// When it happened, µs.
        at_us: u64,
        /// Its kind.
        kind: String,
        /// Its object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Put a GPU's row into the boot record and notify subscribers.
    Gpu {
        /// The row.
        row: Box<Gpu>,
        /// Whether the change is written to the console.
        console: bool,
    },
    /// Start writing to the console.
    StartConsole,
    /// Change the state of a guest that is ready to degraded.
    Degrade,
    /// Forward a log line.
    Log {
        /// The line.
        line: LogLine,
        /// Whether it goes to the console.
        console: bool,
        /// Whether it goes to the clients that read the log.
        clients: bool,
    },
    /// Forward a line of a daemon or another supervised program.
    ProgramLine(Source, String),
    /// Send the GPUs to all subscribers at the end of this loop iteration.
    GpusChanged,
    /// Send a message to all subscribers.
    Publish(FromInit),
    /// Send the state of GPUs and daemons to a new subscriber.
    SendState(ClientId),
    /// Send the boot record to a client as the reply to this request.
    SendRecord(ClientId, Option<RequestId>),
    /// Load a kernel module for a client.
    LoadModule {
        /// The request.
        request: ModuleRequest,
        /// The module's parameters.
        parameters: String,
    },
    /// Apply the failure policy to the failure of a unit.
    Fail(UnitId, String),
    /// Begin the shutdown; the text is the reason.
    BeginShutdown(Goal, String),
    /// Report progress to the shutdown.
    Shutdown(shutdown::Event),
    /// Handle the agent's report that it listens, of this time, µs.
    AgentListens(u64),
    /// Open a GPU's device node with this minor number on a thread.
    Attach(Address, u32),
    /// Create the device node of a GPU on a thread.
    MakeNode(Address),
    /// Attach a GPU that was added to the bus; whether the driver has bound it.
    AttachAdded(Address, bool),
    /// Close a removed GPU on a thread.
    CloseGpu(Address),
    /// Apply the settings of an attached GPU.
    ApplySettings(Address),
    /// Create the device nodes of the driver's capabilities.
    MakeCapabilities,
    /// Publish a GPU whose settings run is over, or exclude it: why MIG instances are missing, if they are.
    SettingsApplied(Address, Option<String>),
    /// Scan the PCI bus on a thread.
    ScanBus,
    /// Load the GPU driver on a thread.
    LoadDriver,
}

impl Effect {
    /// Returns an event without a time of its own.
    pub(super) fn event(kind: &'static str, object: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Event { kind, object: object.into(), detail: detail.into() }
    }
}
