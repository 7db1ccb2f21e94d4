use proptest::prelude::*;

use super::*;

fn begun(policy: Policy, gpus: usize) -> (Group, Vec<Effect>) {
    let mut group = Group::new(policy, Limits { silence_us: 100, whole_us: 1000 }, gpus);
    let effects = (0..gpus).flat_map(|gpu| group.step(0, Event::Begin(gpu))).collect();
    (group, effects)
}

const READY: fn(usize) -> Effect = |gpu| Effect::Ready { gpu, late: false };
const FAILED: fn(usize) -> Effect = |gpu| Effect::Failed { gpu, late: false };

fn silent(gpu: usize, late: bool) -> Effect {
    Effect::TimedOut { gpu, late, overdue: Overdue::Silent }
}

#[test]
fn progress_extends_the_deadline_but_not_the_limit() {
    let (mut group, _) = begun(Policy::Parallel, 2);
    assert_eq!(group.silent(99).count(), 0);
    assert_eq!(group.silent(100).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(group.step(100, Event::Progress(0)), []);
    assert_eq!(group.step(100, Event::Clock), [silent(1, false)]);
    for now in (200..1000).step_by(100) {
        assert_eq!(group.next_deadline(), Some(now));
        group.step(now, Event::Progress(0));
        assert_eq!(group.step(now, Event::Clock), []);
    }
    assert_eq!(group.silent(1000).count(), 0, "a sign would not help");
    group.step(1000, Event::Progress(0));
    let overdue = Overdue::TooLong;
    assert_eq!(group.step(1000, Event::Clock), [Effect::TimedOut { gpu: 0, late: false, overdue }]);
    assert_eq!(group.step(2000, Event::Attached(0)), [Effect::Ready { gpu: 0, late: true }]);
}

#[test]
fn answer_for_one_gpu_is_progress_of_all() {
    let (mut group, _) = begun(Policy::Parallel, 3);
    group.step(90, Event::Attached(1));
    assert_eq!(group.next_deadline(), Some(190));
    group.step(180, Event::Failed(2));
    assert_eq!(group.step(200, Event::Clock), []);
    assert_eq!(group.step(280, Event::Clock), [silent(0, false)]);
}

#[test]
fn hot_plugged_gpu_starts_from_scratch() {
    let (mut group, _) = begun(Policy::Auto, 1);
    assert!(!group.renew(0), "one in the driver stays there");
    assert_eq!(group.step(1, Event::Attached(0)), [READY(0)]);
    assert!(group.renew(0));
    assert_eq!(group.step(2, Event::Begin(0)), [Effect::Start(0)]);
    assert_eq!(group.step(2, Event::Abandoned(0)), [], "no GPU waits for it");
    assert!(group.renew(0) && group.renew(1));
    assert_eq!(group.step(3, Event::Begin(1)), [Effect::Start(1)]);
    assert_eq!((group.attempts(0), group.attempts(1), group.attempts(2)), (0, 1, 0));
}

#[test]
fn parallel_starts_all_gpus_once() {
    let (mut group, effects) = begun(Policy::Parallel, 3);
    assert_eq!(effects, [Effect::Start(0), Effect::Start(1), Effect::Start(2)]);
    assert_eq!(group.step(1, Event::Failed(1)), [FAILED(1)]);
    assert_eq!(group.step(2, Event::Attached(0)), [READY(0)]);
    assert_eq!(group.next_deadline(), Some(102));
}

#[test]
fn serial_starts_the_next_when_one_ends_or_hangs() {
    let (mut group, effects) = begun(Policy::Serial, 3);
    assert_eq!(effects, [Effect::Start(0)]);
    assert_eq!(group.step(5, Event::Failed(0)), [FAILED(0), Effect::Start(1)]);
    assert_eq!(group.step(105, Event::Clock), [silent(1, false), Effect::Start(2)]);
    assert_eq!(group.step(110, Event::Attached(1)), [Effect::Ready { gpu: 1, late: true }]);
    assert_eq!(group.step(120, Event::Attached(2)), [READY(2)]);
    assert_eq!(group.next_deadline(), None);
}

#[test]
fn auto_retries_failed_gpus_serially_after_all_first_attempts() {
    let (mut group, _) = begun(Policy::Auto, 3);
    assert_eq!(group.step(1, Event::Failed(0)), [Effect::Retry(0)]);
    assert_eq!(group.step(2, Event::Failed(2)), [Effect::Retry(2)]);
    assert_eq!(group.step(3, Event::Attached(1)), [READY(1), Effect::Start(0)]);
    assert_eq!(group.step(4, Event::Attached(0)), [READY(0), Effect::Start(2)]);
    assert_eq!(group.step(5, Event::Failed(2)), [FAILED(2)]);
    assert_eq!(group.attempts(2), 2);
}

#[test]
fn hung_attach_is_retried_only_after_it_failed() {
    let (mut group, _) = begun(Policy::Auto, 2);
    assert_eq!(group.step(50, Event::Failed(0)), [Effect::Retry(0)]);
    let effects = group.step(150, Event::Clock);
    assert_eq!(effects, [silent(1, false), Effect::Start(0)], "a hung GPU does not block others");
    assert_eq!(group.step(151, Event::Attached(0)), [READY(0)]);
    assert_eq!(group.step(500, Event::Failed(1)), [Effect::Retry(1), Effect::Start(1)]);
    assert_eq!(group.step(600, Event::Clock), [silent(1, true)]);
    assert_eq!(group.step(700, Event::Failed(1)), [Effect::Failed { gpu: 1, late: true }]);
}

#[test]
fn unexpected_answers_are_ignored() {
    let (mut group, _) = begun(Policy::Serial, 2);
    assert_eq!(group.step(1, Event::Attached(1)), []);
    assert_eq!(group.step(1, Event::Failed(7)), []);
    group.step(2, Event::Attached(0));
    assert_eq!(group.step(3, Event::Attached(0)), []);
    assert_eq!(group.step(3, Event::Begin(0)), []);
}

#[test]
fn confidential_guests_attach_in_series_unless_configured_otherwise() {
    assert_eq!(Policy::Auto.resolve(true), Policy::Serial);
    assert_eq!(Policy::Auto.resolve(false), Policy::Auto);
    assert_eq!(Policy::Parallel.resolve(true), Policy::Parallel);
}

proptest! {
    /// Whatever the driver answers and when, every GPU gets exactly one result that is not late, at
    /// most one attempt per GPU is in the driver, and under `Serial` at most one attempt that has
    /// not exceeded its deadline.
    #[test]
    fn every_gpu_gets_exactly_one_result(
        policy in prop::sample::select(vec![Policy::Parallel, Policy::Serial, Policy::Auto]),
        gpus in 1usize..6,
        answers in prop::collection::vec((any::<u8>(), 0u8..5), 0..60),
    ) {
        let (mut group, effects) = begun(policy, gpus);
        let (mut in_progress, mut hung) = (vec![0u32; gpus], vec![false; gpus]);
        let mut verdicts = vec![0u32; gpus];
        let mut queue = effects;
        let mut answers = answers.into_iter();
        let mut now = 0;
        loop {
            for effect in queue.drain(..) {
                match effect {
                    Effect::Start(gpu) => in_progress[gpu] += 1,
                    Effect::Retry(_) => {}
                    Effect::TimedOut { gpu, late, .. } => {
                        hung[gpu] = true;
                        verdicts[gpu] += u32::from(!late);
                    }
                    Effect::Ready { gpu, late } | Effect::Failed { gpu, late } => verdicts[gpu] += u32::from(!late),
                }
            }
            prop_assert!(in_progress.iter().all(|n| *n <= 1));
            if policy == Policy::Serial {
                prop_assert!((0..gpus).filter(|gpu| in_progress[*gpu] == 1 && !hung[*gpu]).count() <= 1);
            }
            let running: Vec<usize> = (0..gpus).filter(|gpu| in_progress[*gpu] == 1).collect();
            if running.is_empty() {
                break;
            }
            // When the random answers are used up, every attempt succeeds.
            let (pick, kind) = answers.next().unwrap_or((0, 0));
            let gpu = running[usize::from(pick) % running.len()];
            now += 1;
            queue = match kind {
                0 => { in_progress[gpu] = 0; hung[gpu] = false; group.step(now, Event::Attached(gpu)) }
                1 => { in_progress[gpu] = 0; hung[gpu] = false; group.step(now, Event::Failed(gpu)) }
                2 => { now += 100; group.step(now, Event::Clock) }
                3 => group.step(now, Event::Progress(gpu)),
                _ => group.step(now, Event::Clock),
            };
        }
        prop_assert!(verdicts.iter().all(|n| *n == 1), "{:?}", verdicts);
    }
}
