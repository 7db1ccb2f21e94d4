//! Effects: the requests of components to the main loop.
//!
//! A component owns its state. A component takes an event, changes its own state and returns
//! effects; the main loop carries out the effects in order (`carry_out`).

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
    /// Add an event with the current time to the boot record.
    Event {
        /// The event's kind.
        kind: &'static str,
        /// The event's object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Add an event to the boot record; its console line precedes the queued lines.
    UrgentEvent {
        /// Time of the event, µs.
        at_us: u64,
        /// The event's kind.
        kind: &'static str,
        /// The event's object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Add a client's event to the boot record.
    ClientEvent {
        /// Time of the event, µs.
        at_us: u64,
        /// The event's kind.
        kind: String,
        /// The event's object.
        object: String,
        /// One line of detail.
        detail: String,
    },
    /// Put a GPU's row into the boot record and notify subscribers.
    Gpu {
        /// The row.
        row: Box<Gpu>,
        /// Whether a line is written to the console.
        console: bool,
    },
    /// Start the console writer.
    StartConsole,
    /// Change the guest's state from ready to degraded.
    Degrade,
    /// Forward a log line.
    Log {
        /// The line.
        line: LogLine,
        /// Whether the line is written to the console.
        console: bool,
        /// Whether the line is sent to the clients that subscribed to the log.
        clients: bool,
    },
    /// Forward an output line of a daemon or of the GPU settings program.
    ProgramLine(Source, String),
    /// Send the list of GPUs to all subscribers at the end of this loop iteration.
    GpusChanged,
    /// Send a message to all subscribers.
    Publish(FromInit),
    /// Send the list of GPUs and the state of the daemons to a new subscriber.
    SendState(ClientId),
    /// Send the boot record to a client as the reply to the request with this id.
    SendRecord(ClientId, Option<RequestId>),
    /// Load a kernel module for a client.
    LoadModule {
        /// The request.
        request: ModuleRequest,
        /// The module's parameters.
        parameters: String,
    },
    /// Apply the failure policy to the failure of this unit; the text is the error.
    Fail(UnitId, String),
    /// Begin the shutdown; the text is the reason.
    BeginShutdown(Goal, String),
    /// Pass an event to the shutdown state machine.
    Shutdown(shutdown::Event),
    /// Handle the agent's report that it listens; the number is the time, µs.
    AgentListens(u64),
    /// Open the device node with this minor number on a thread, which attaches the GPU.
    Attach(Address, u32),
    /// Create the device node of a hotplugged GPU on a thread.
    MakeNode(Address),
    /// Attach a GPU that was added to the bus; the flag is set if the driver has bound the GPU.
    AttachAdded(Address, bool),
    /// Close a removed GPU on a thread.
    CloseGpu(Address),
    /// Apply the settings of an attached GPU.
    ApplySettings(Address),
    /// Create the device nodes of the driver's capabilities.
    MakeCapabilities,
    /// Publish a GPU after its settings run. If the text is set, the GPU lacks MIG instances for
    /// that reason: a GPU for which they were requested is excluded instead.
    SettingsApplied(Address, Option<String>),
    /// Scan the PCI bus on a thread.
    ScanBus,
    /// Load the GPU driver on a thread.
    LoadDriver,
}

impl Effect {
    /// Creates an [`Effect::Event`], which gets the current time when it is carried out.
    pub(super) fn event(kind: &'static str, object: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Event { kind, object: object.into(), detail: detail.into() }
    }
}
