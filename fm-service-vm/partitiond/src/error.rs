//! Errors of the engine.

use std::path::PathBuf;

use firstlight_partitions::{Gpus, PartitionId, PlanError, TableError};
use firstlight_pci::Address;
use firstlight_sys::nvfm;

use crate::error_class::ErrorClass;
use crate::journal;

/// Why the engine refused or failed a request. Nothing has changed, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A text for journal and logs has an invalid length or character.
    #[error("invalid {what} {text:?}: it has to be 1 to 128 printable characters without spaces")]
    InvalidText {
        /// The name of the parameter.
        what: &'static str,
        /// Its value.
        text: String,
    },
    /// The request id was used for another request.
    #[error(
        "request id {request} was used before, to {was}; a retry has to repeat the same request, a new request needs a new id"
    )]
    RequestIdReused {
        /// The request id.
        request: String,
        /// The earlier request.
        was: String,
    },
    /// The activation that this request id stands for has ended.
    #[error(
        "request {request} activated partition {partition}, which is no longer active for it; a new activation needs a new request id"
    )]
    AssignmentEnded {
        /// The request id.
        request: String,
        /// The partition that it activated.
        partition: PartitionId,
    },
    /// The fabric manager restarted without state while tenants had partitions.
    #[error(
        "the fabric has lost partitions {partitions:?} while tenants had them ({reason}); stop those tenants, then reconcile \
         with the list of running tenants"
    )]
    Outage {
        /// The lost partitions.
        partitions: Vec<PartitionId>,
        /// The cause.
        reason: String,
    },
    /// A change was started, and its outcome is unknown: it may still complete.
    #[error(
        "the outcome of change {number} of partition {partition} is unknown ({reason}); it is determined when the fabric manager answers"
    )]
    OutcomeUnknown {
        /// The change's number.
        number: u64,
        /// The partition.
        partition: PartitionId,
        /// Why the outcome is unknown.
        reason: String,
    },
    /// No partition fits, or none is free.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The request depends on a module map that is not verified.
    #[error(
        "refused to give {what} while the module map is not verified: {reason}; {remedy}; --unverified-map overrides this for one request"
    )]
    UnverifiedMap {
        /// The partition.
        what: String,
        /// Why the map is not verified.
        reason: String,
        /// The commands to run.
        remedy: String,
    },
    /// The module map has no GPU at this address.
    #[error(
        "the module map has no GPU at {pci}; it has {}; fmctl inventory shows it, and fmctl inventory set, nvml and probe extend it",
        list(there)
    )]
    AddressNotInMap {
        /// The requested address.
        pci: Address,
        /// The addresses in the map.
        there: Vec<Address>,
    },
    /// A module map update is invalid or contradicts the map.
    #[error(transparent)]
    Map(#[from] firstlight_module_map::MapError),
    /// A module map update is for another baseboard.
    #[error(
        "this update is for baseboard {stated}, and the daemon runs on {actual}: was --baseboard-serial right, or was it measured on another server?"
    )]
    OtherBaseboard {
        /// The serial number in the update.
        stated: String,
        /// The daemon's.
        actual: String,
    },
    /// A probe result has to name one GPU and the partition of that GPU alone.
    #[error(
        "invalid probe: it has to name one GPU and the partition of that GPU alone; partition {partition} has GPUs {gpus}"
    )]
    InvalidProbe {
        /// The partition that was named.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
    },
    /// The module map file cannot be written.
    #[error("failed to write {}: {source}; the module map is unchanged", path.display())]
    MapFile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// There is no such partition.
    #[error("there is no partition {id}; there are {}", list(ids))]
    UnknownPartition {
        /// The requested id.
        id: PartitionId,
        /// The existing ids.
        ids: Vec<PartitionId>,
    },
    /// There is no such GPU.
    #[error("there is no GPU {gpu}; module ids are {gpus}")]
    UnknownGpu {
        /// The requested module id.
        gpu: u32,
        /// The existing ones.
        gpus: Gpus,
    },
    /// The switch is not recorded as faulty.
    #[error("NVSwitch {switch} is not marked faulty; faulty switches: {}", if there.is_empty() { "none" } else { there })]
    SwitchNotFaulty {
        /// The requested address.
        switch: String,
        /// The faulty switches.
        there: String,
    },
    /// A switch had a fatal error and was not released.
    #[error(
        "NVSwitch {switch} had a fatal error ({reason}), so partitions of several GPUs are not activated; stop the tenants that \
         have some, reset their GPUs, restart the service VM if the error recurs, then fmctl release {switch}"
    )]
    FaultySwitch {
        /// Its PCI address.
        switch: String,
        /// The kernel's message.
        reason: String,
    },
    /// The tenant's driver version does not match the fabric manager's.
    #[error("{0}; the daemon's --guest-driver-mismatch selects the policy")]
    GuestDriver(String),
    /// Two of the desired partitions share a GPU.
    #[error("partitions {0} and {1} share GPUs {2}: both cannot be active")]
    Overlap(PartitionId, PartitionId, Gpus),
    /// The partition has another owner.
    #[error("partition {partition} is owned by {holder}, not by {owner}")]
    OwnedByOther {
        /// The partition.
        partition: PartitionId,
        /// Its owner.
        holder: String,
        /// The owner that the request named.
        owner: String,
    },
    /// The partition is active, but not for a recorded owner.
    #[error("partition {partition} is active without a recorded owner; reconcile with the list of running tenants")]
    Unowned {
        /// The partition.
        partition: PartitionId,
    },
    /// FM refused the operation or does not answer.
    #[error("failed to {doing}: {error}; {}", ErrorClass::of_error(error).remedy())]
    FabricManager {
        /// The operation.
        doing: String,
        /// FM's error.
        error: nvfm::Error,
    },
    /// FM's partition list is inconsistent.
    #[error("the fabric manager's list is rejected: {0}; are libnvfm and the fabric manager of one version?")]
    InvalidTable(#[from] TableError),
    /// A partition in FM's list is invalid.
    #[error("the fabric manager's list is rejected: partition {partition}: {reason}")]
    InvalidPartition {
        /// The partition.
        partition: PartitionId,
        /// What is invalid.
        reason: String,
    },
    /// FM lists two active partitions that share a GPU.
    #[error("the fabric manager has partitions {0} and {1} active, and both have GPUs {2}; restart it, then reconcile")]
    ActiveOverlap(PartitionId, PartitionId, Gpus),
    /// The journal cannot be written, so the change is not started.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// A record contradicts the state: a bug in this program.
    #[error("the journal would become unreadable: {0}")]
    InvalidRecord(String),
}

fn list<T: ToString>(all: &[T]) -> String {
    let texts: Vec<String> = all.iter().map(ToString::to_string).collect();
    if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
}
