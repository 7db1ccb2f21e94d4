use super::*;
use crate::state::{Change, Outcome, PendingChange};
use firstlight_partitions::Gpus;
use proptest::prelude::*;

/// A directory in memory if possible: the tests sync thousands of times.
pub(crate) fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Consistent records of all kinds.
fn records(count: u64) -> Vec<Record> {
    let mut all = Vec::new();
    for number in 1..=count {
        let partition = u32::try_from(number % 15).unwrap();
        let change = match number % 3 {
            0 => Change::Deactivate { partition },
            _ => Change::Activate { partition, gpus: Gpus::of([1, 3]).unwrap(), owner: "tenant".into() },
        };
        all.push(Record::Started(PendingChange { number, request: format!("r{number}"), summary: "x".into(), change }));
        let reason = "no".to_owned();
        all.push(Record::Finished(if number % 4 == 0 { Outcome::Failed { reason } } else { Outcome::Done }));
        all.push(Record::Quarantined { gpu: partition, reason: "Xid 79".into() });
    }
    all
}

/// Writes the records; returns the journal's length and the state after each.
fn written(path: &Path, records: Vec<Record>) -> Vec<(u64, State)> {
    let (mut journal, mut state) = Journal::open(path).unwrap();
    let mut known = vec![(journal.end(), state.clone())];
    for record in records {
        state.apply(record.clone()).unwrap();
        journal.append(&record, &state).unwrap();
        known.push((journal.end(), state.clone()));
    }
    known
}

#[test]
fn journal_truncated_at_any_byte_keeps_all_synced_records() {
    let dir = dir();
    let path = dir.path().join("journal");
    let known = written(&path, records(4));
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, known.last().unwrap().0);
    for cut in 0..=bytes.len() {
        let expected = known.iter().rev().find(|(end, _)| *end <= cut as u64).map(|(_, state)| state);
        let expected = expected.cloned().unwrap_or_default();
        // A truncated file, and one that was extended before its bytes were written.
        for zeros in [0, 1, 7, 8, 400] {
            let torn = [&bytes[..cut], &vec![0; zeros]].concat();
            let replayed = replay(&torn).unwrap();
            assert_eq!(replayed.state, expected, "cut at {cut}, {zeros} zeros");
        }
        // File operations are slow, so they run for a sample of lengths and at record boundaries.
        if cut % 7 > 0 && !known.iter().any(|(end, _)| end.abs_diff(cut as u64) < 2) {
            continue;
        }
        let other = dir.path().join("cut");
        fs::write(&other, &bytes[..cut]).unwrap();
        let (mut journal, mut state) = Journal::open(&other).unwrap();
        assert_eq!(state, expected);
        // Appending after the truncation works.
        let record = Record::Released { gpu: 5 };
        state.apply(record.clone()).unwrap();
        journal.append(&record, &state).unwrap();
        drop(journal);
        assert_eq!(Journal::open(&other).unwrap().1, state, "cut at {cut}");
    }
}

#[test]
fn damage_not_caused_by_a_crash_is_reported_and_refused() {
    let dir = dir();
    let path = dir.path().join("journal");
    let known = written(&path, records(3));
    let bytes = fs::read(&path).unwrap();
    let last = known[known.len() - 2].0;
    for at in 0..usize::try_from(last).unwrap() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let (named, what) = replay(&damaged).unwrap_err();
        assert!(named <= at, "{at}: {named} {what}");
        if at % 17 == 0 {
            fs::write(&path, &damaged).unwrap();
            let error = Journal::open(&path).unwrap_err().to_string();
            assert!(error.contains("Move it away and reconcile") && error.contains(&what), "{error}");
            assert_eq!(fs::read(&path).unwrap(), damaged, "it is unchanged");
        }
    }
}

#[test]
fn inconsistent_records_are_damage() {
    let dir = dir();
    let path = dir.path().join("journal");
    let (mut journal, state) = Journal::open(&path).unwrap();
    journal.append(&Record::Finished(Outcome::Done), &state).unwrap();
    drop(journal);
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("damaged at byte 8: no change is in progress"), "{error}");
    fs::write(&path, "[partitions]\n").unwrap();
    assert!(Journal::open(&path).unwrap_err().to_string().contains("does not begin like a journal"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(Journal::open(&path).unwrap_err().to_string().contains("failed to open"));
}

#[test]
fn journal_is_locked_by_one_daemon() {
    let dir = dir();
    let path = dir.path().join("journal");
    let first = Journal::open(&path).unwrap();
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("another daemon"), "{error}");
    drop(first);
    Journal::open(&path).unwrap();
}

#[test]
fn long_journal_is_compacted_to_the_same_state() {
    let dir = dir();
    let path = dir.path().join("journal");
    let (mut journal, mut state) = Journal::open(&path).unwrap();
    journal.compact_after = 100;
    let mut longest = 0;
    for gpu in (0..8).cycle().take(220) {
        let record = Record::Quarantined { gpu, reason: "x".into() };
        state.apply(record.clone()).unwrap();
        journal.append(&record, &state).unwrap();
        longest = longest.max(journal.end());
        if journal.records < 3 {
            let second = Journal::open(&path).unwrap_err();
            assert!(matches!(second, Error::Locked { .. }), "the new file is locked as the old one was: {second}");
        }
    }
    assert!(journal.records < 60 && journal.end() < longest / 2);
    drop(journal);
    let (journal, again) = Journal::open(&path).unwrap();
    assert_eq!(again, state);
    assert!(journal.records > 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn failed_journal_write_is_reported_and_recovered() {
    let dir = dir();
    let path = dir.path().join("journal");
    let (mut journal, state) = Journal::open(&path).unwrap();
    let record = Record::Quarantined { gpu: 1, reason: "x".repeat(MAX_RECORD) };
    assert!(matches!(journal.append(&record, &state), Err(Error::TooLong { .. })));
    // A file that is opened for reading only.
    let good = File::open(&path).unwrap();
    let writable = std::mem::replace(&mut journal.file, good);
    let error = journal.append(&Record::Released { gpu: 1 }, &state).unwrap_err().to_string();
    assert!(error.contains("failed to write") && error.contains("journal"), "{error}");
    journal.file = writable;
    journal.append(&Record::Released { gpu: 2 }, &state).unwrap();
    drop(journal);
    assert_eq!(replay(&fs::read(&path).unwrap()).unwrap().records, 1);
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), magic: bool) {
        let bytes = if magic { [&MAGIC[..], &bytes].concat() } else { bytes };
        if let Ok(replayed) = replay(&bytes) {
            prop_assert!(replayed.end <= bytes.len());
        }
    }
}
