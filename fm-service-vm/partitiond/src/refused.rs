//! Why something was not done.

use std::path::PathBuf;

use firstlight_partitions::{Gpus, PartitionId, Refusal, TableError};
use firstlight_pci::Address;
use firstlight_sys::nvfm;

use crate::journal;
use crate::meaning::Meaning;

/// Why something was not done; nothing has changed then, but where it says so.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A word that goes into journals and logs has to be one.
    #[error("{what} {text:?} is not 1 to 128 printable characters without spaces")]
    Word {
        /// What it is.
        what: &'static str,
        /// What was given.
        text: String,
    },
    /// The identifier was used before.
    #[error(
        "request {request} was used before, to {was}; a request that is sent again asks for the same, a new one has a new identifier"
    )]
    Request {
        /// The identifier.
        request: String,
        /// What it asked for then.
        was: String,
    },
    /// What it gave is over.
    #[error(
        "request {request} activated partition {partition}, which is not active for it any more; who wants one again asks with a new identifier"
    )]
    Over {
        /// The identifier.
        request: String,
        /// What it was given.
        partition: PartitionId,
    },
    /// The fabric manager has forgotten partitions while tenants had them.
    #[error(
        "the fabric has lost partitions {partitions:?} while tenants had them ({why}); stop those tenants, then reconcile \
         with the list of tenants that run"
    )]
    Outage {
        /// Which.
        partitions: Vec<PartitionId>,
        /// How it came to that.
        why: String,
    },
    /// A change has begun and nobody knows what came of it.
    #[error(
        "what came of change {number} of partition {partition} is not known ({why}); it is settled when the fabric manager answers"
    )]
    Unsettled {
        /// Which change.
        number: u64,
        /// Of which partition.
        partition: PartitionId,
        /// Why it is not known.
        why: String,
    },
    /// Nothing fits, or nothing is free.
    #[error(transparent)]
    Plan(#[from] Refusal),
    /// The map by which it would be given is not verified.
    #[error(
        "{what} is not given while which GPU is which is not verified: {why}; {advice}; --unverified-map overrides that for one request"
    )]
    Unverified {
        /// What would be given.
        what: String,
        /// What is wrong with the map.
        why: String,
        /// What to run.
        advice: String,
    },
    /// The map has no GPU there.
    #[error(
        "the module map has no GPU at {pci}; it has {}; fmctl inventory shows it, and fmctl inventory set, nvml and probe make it",
        places(there)
    )]
    NotInMap {
        /// What was asked for.
        pci: Address,
        /// What there is.
        there: Vec<Address>,
    },
    /// What is said of GPUs' places cannot be, or contradicts the map.
    #[error(transparent)]
    Map(#[from] firstlight_module_map::Refused),
    /// It is said of another baseboard than the daemon's.
    #[error(
        "this is said of baseboard {said}, and the daemon runs on {is}: was --baseboard-serial right, or is the measurement of another server?"
    )]
    OtherBaseboard {
        /// What was said.
        said: String,
        /// What the daemon was told.
        is: String,
    },
    /// A probe says something of one GPU, by its own partition.
    #[error("a probe is of one GPU and of the partition of that GPU alone; partition {partition} has GPUs {gpus}")]
    Probe {
        /// Which was named.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
    },
    /// The map cannot be written down.
    #[error("cannot write {}: {source}; the module map is as it was", path.display())]
    MapFile {
        /// Its file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// There is no such partition.
    #[error("there is no partition {id}; there are {}", numbers(ids))]
    NoPartition {
        /// What was asked for.
        id: PartitionId,
        /// What there is.
        ids: Vec<PartitionId>,
    },
    /// There is no such GPU.
    #[error("there is no GPU {gpu}; module ids are {gpus}")]
    NoGpu {
        /// What was asked for.
        gpu: u32,
        /// What there is.
        gpus: Gpus,
    },
    /// There is no such switch among those that are not relied on.
    #[error("NVSwitch {switch} is not out of use; these are: {}", if there.is_empty() { "none" } else { there })]
    NoSwitch {
        /// What was asked for.
        switch: String,
        /// What there is.
        there: String,
    },
    /// A switch is not to be relied on.
    #[error(
        "NVSwitch {switch} had a fatal error ({reason}), so partitions of several GPUs are not given; stop the tenants that \
         have some, reset their GPUs, start the service VM again if the error comes again, then fmctl release {switch}"
    )]
    Switch {
        /// Which.
        switch: String,
        /// What the kernel said.
        reason: String,
    },
    /// The tenant's driver does not go with the fabric manager.
    #[error("{0}; the daemon's --guest-driver says what is done about it")]
    GuestDriver(String),
    /// Two of the partitions that are wanted share a GPU.
    #[error("partitions {0} and {1} share GPUs {2}: both cannot be active")]
    Overlap(PartitionId, PartitionId, Gpus),
    /// It is somebody else's.
    #[error("partition {partition} is {holder}'s, not {owner}'s")]
    Held {
        /// Which.
        partition: PartitionId,
        /// Whose it is.
        holder: String,
        /// Who asked.
        owner: String,
    },
    /// It is active, and nobody has asked for it here.
    #[error("partition {partition} is active and nobody's here; reconcile with the list of tenants that run")]
    Foreign {
        /// Which.
        partition: PartitionId,
    },
    /// FM does not do it, or does not answer.
    #[error("{doing}: {error}; {}", Meaning::of_error(error).advice())]
    Fabric {
        /// What was tried.
        doing: String,
        /// FM's answer.
        error: nvfm::Error,
    },
    /// FM lists what cannot be.
    #[error("the fabric manager's list is not to be believed: {0}; are libnvfm and the fabric manager of one version?")]
    Table(#[from] TableError),
    /// FM lists a GPU that cannot be.
    #[error("the fabric manager's list is not to be believed: in partition {partition} {why}")]
    Listed {
        /// Where.
        partition: PartitionId,
        /// What is wrong.
        why: String,
    },
    /// FM has two partitions active that share a GPU.
    #[error("the fabric manager has partitions {0} and {1} active, and both have GPUs {2}; restart it, and reconcile")]
    Impossible(PartitionId, PartitionId, Gpus),
    /// What is done cannot be written down, so nothing is done.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// A record does not fit to what is known: a fault of this program.
    #[error("the journal would not be readable: {0}")]
    Record(String),
}

fn numbers(ids: &[PartitionId]) -> String {
    let words: Vec<String> = ids.iter().map(ToString::to_string).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn places(there: &[Address]) -> String {
    let words: Vec<String> = there.iter().map(ToString::to_string).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}
