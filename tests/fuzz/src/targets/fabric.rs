//! The partition daemon: its journal, and the fabric manager's list of partitions.

use firstlight_partitiond::FabricSnapshot;
use firstlight_partitiond::journal::replay;
use firstlight_partitiond::state::{Record, State};
use firstlight_partitions::{Allocation, Gpus, Request};
use firstlight_sys::nvfm::{Gpu, Partition};

/// Journal records, one per line.
pub(super) const RECORDS: &[&[u8]] = &[
    br#"{"started":{"number":1,"request":"r","summary":"a","change":{"activate":{"partition":3,"gpus":[1,3],"owner":"t"}}}}
{"finished":"done"}
{"quarantined":{"gpu":3,"reason":"Xid 79"}}
{"started":{"number":2,"request":"s","summary":"b","change":{"deactivate":{"partition":3}}}}
{"finished":{"failed":{"reason":"no"}}}
{"released":{"gpu":3}}
{"adopted":{"partition":9,"gpus":[5],"owner":"t"}}
{"lost":{"partitions":[3],"reason":"w"}}
"reconciled""#,
];

/// Replaying a snapshot of any journal's state gives the same state.
pub(super) fn journal(bytes: &[u8]) {
    let _ = replay(bytes);
    let mut state = State::default();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Ok(record) = serde_json::from_slice::<Record>(line) else { continue };
        let before = state.clone();
        if state.apply(record).is_err() {
            state = before;
        }
        let _ = (state.busy(), state.quarantined());
    }
    let Ok(text) = serde_json::to_vec(&Record::Snapshot(Box::new(state.clone()))) else { return };
    let mut again = State::default();
    let read = serde_json::from_slice(&text).map_err(|error| error.to_string()).and_then(|record| again.apply(record));
    assert_eq!((read, again), (Ok(()), state));
}

/// Each partition is its id, whether it is active, the number of GPUs, and their module ids.
pub(super) fn list(bytes: &[u8]) {
    let (mut rest, mut listed) = (bytes, Vec::new());
    while let [id, is_active, count, more @ ..] = rest {
        let (gpus, more) = more.split_at(more.len().min(usize::from(count % 17)));
        let gpu = |id: &u8| Gpu {
            physical_id: u32::from(*id),
            uuid: String::new(),
            pci: String::new(),
            links: 0,
            max_links: 0,
            line_rate: 0,
        };
        let gpus = gpus.iter().map(gpu).collect();
        listed.push(Partition { id: u32::from(*id), is_active: is_active % 2 == 1, gpus });
        rest = more;
    }
    let Ok(snapshot) = FabricSnapshot::of(&listed) else { return };
    let state = State::default();
    let (unowned, busy) = (snapshot.unowned(&state), snapshot.busy());
    assert_eq!(unowned.len(), snapshot.active.len());
    for size in snapshot.table.sizes() {
        let taken = Allocation { busy, quarantined: Gpus::NONE };
        if let Ok(choice) = snapshot.table.plan(&taken, Request::Count(size)) {
            assert!(!choice.partition.gpus.overlaps(busy) && choice.partition.gpus.count() == size);
        }
    }
    let requested: Vec<(u32, String)> = unowned.into_iter().map(|id| (id, "t".to_owned())).collect();
    assert!(snapshot.steps(&state, &requested).is_ok_and(|steps| steps.len() == requested.len()));
}
