use super::*;
use crate::restart::MOST;
use proptest::prelude::*;

const DEADLINE: Duration = Duration::from_secs(30);

fn ended(effects: &[Effect]) -> (u64, bool, Decision) {
    match effects {
        [Effect::Ended { lived, served, next }] => (*lived, *served, *next),
        other => panic!("{other:?}"),
    }
}

#[test]
fn daemon_is_restarted_after_its_exit() {
    let mut life = Lifecycle::new(DEADLINE);
    assert_eq!(life.step(10, Event::Start), [Effect::Launch]);
    assert_eq!(life.next_deadline(), Some(30_000_010));
    assert_eq!(life.step(50, Event::Ready), [Effect::Ready(40)]);
    assert_eq!(life.next_deadline(), None);
    assert_eq!(life.step(1000, Event::MainEnded), [Effect::Kill], "helpers that it leaves behind go with it");
    let (lived, served, next) = ended(&life.step(1010, Event::Gone));
    assert_eq!((lived, served), (1000, true));
    assert_eq!(next, Decision::Restart { pause: Duration::from_millis(100), number: 1 });
    assert_eq!(life.step(101_009, Event::Clock), []);
    assert_eq!(life.step(101_010, Event::Clock), [Effect::Launch]);
}

#[test]
fn daemon_that_exits_at_once_reaches_the_restart_limit() {
    let mut life = Lifecycle::new(DEADLINE);
    let mut now = 0;
    assert_eq!(life.step(now, Event::Start), [Effect::Launch]);
    for number in 1..=MOST {
        assert_eq!(life.step(now, Event::MainEnded), [Effect::Kill]);
        let (_, served, next) = ended(&life.step(now, Event::Gone));
        assert!(!served && matches!(next, Decision::Restart { number: is, .. } if is == number));
        now = life.next_deadline().unwrap();
        assert_eq!(life.step(now, Event::Clock), [Effect::Launch]);
    }
    assert_eq!(ended(&life.step(now, Event::Gone)).2, Decision::LimitReached);
    assert!(life.is_over() && life.next_deadline().is_none());
    assert_eq!(life.step(now, Event::Start), []);
}

#[test]
fn daemon_with_tenants_has_no_restart_limit() {
    let mut life = Lifecycle::new(DEADLINE);
    let mut now = 0;
    life.step(now, Event::Start);
    life.step(now, Event::Ready);
    life.lift_restart_limit();
    for turn in 1..100 {
        let served = turn % 3 == 0;
        let (_, _, next) = ended(&life.step(now, Event::Gone));
        let Decision::Restart { pause, number } = next else { panic!("given up at turn {turn}") };
        assert!(number <= MOST + 1 && (number <= MOST || pause == NO_LIMIT_PAUSE), "{next:?}");
        now = life.next_deadline().unwrap();
        assert_eq!(life.step(now, Event::Clock), [Effect::Launch]);
        if served {
            life.step(now, Event::Ready);
        }
    }
    assert!(now > 60_000_000, "not in a hurry: {now} us for 100 starts");
}

#[test]
fn hanging_daemon_reaches_the_restart_limit_outside_the_window() {
    let mut life = Lifecycle::new(Duration::from_secs(120));
    let mut launches = life.step(0, Event::Start).len();
    while let Some(at) = life.next_deadline() {
        assert_eq!(life.step(at - 1, Event::Clock), []);
        match life.step(at, Event::Clock).as_slice() {
            [Effect::Hung, Effect::Kill] => drop(life.step(at, Event::Gone)),
            [Effect::Launch] => launches += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(launches, MOST + 1);
    assert!(life.is_over());
}

#[test]
fn daemon_blocked_in_the_kernel_is_not_started_twice() {
    let mut life = Lifecycle::new(DEADLINE);
    life.step(0, Event::Start);
    life.step(30_000_000, Event::Clock);
    assert_eq!(life.step(30_000_000 + REAP_US, Event::Clock), [Effect::Stuck]);
    assert_eq!(life.next_deadline(), None);
    assert!(matches!(ended(&life.step(90_000_000, Event::Gone)).2, Decision::Restart { .. }));
}

#[test]
fn stop_terminates_then_kills_and_ends() {
    let mut life = Lifecycle::new(DEADLINE);
    life.step(0, Event::Start);
    life.step(1, Event::Ready);
    assert_eq!(life.step(10, Event::Stop), [Effect::Terminate]);
    assert_eq!(life.step(10, Event::MainEnded), []);
    let mut willing = life.clone();
    assert_eq!(willing.step(11, Event::Gone), [Effect::Stopped]);
    assert_eq!(life.step(10 + GRACE_US, Event::Clock), [Effect::Kill]);
    assert_eq!(life.step(10 + GRACE_US + REAP_US, Event::Clock), [Effect::Stuck, Effect::Stopped]);
    assert_eq!(life.step(99_999_999, Event::Gone), []);
    assert_eq!(Lifecycle::new(DEADLINE).step(0, Event::Stop), [Effect::Stopped]);
    assert_eq!(willing.step(0, Event::Stop), [Effect::Stopped], "the supervisor is notified that it has stopped");
}

/// What a daemon, the kernel and people do, in any order that they can.
#[derive(Debug, Clone, Copy)]
enum Act {
    Serve,
    MainDies,
    AllGone,
    Refused,
    Stop,
    Wait(u64),
    Deadline,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => Just(Act::Serve),
        3 => Just(Act::MainDies),
        5 => Just(Act::AllGone),
        2 => Just(Act::Refused),
        1 => Just(Act::Stop),
        4 => (0u64..100_000_000).prop_map(Act::Wait),
        6 => Just(Act::Deadline),
    ]
}

proptest! {
    #[test]
    fn instances_never_overlap_and_delays_are_bounded(acts in proptest::collection::vec(act(), 1..300)) {
        let mut life = Lifecycle::new(DEADLINE);
        let mut now = 0;
        let (mut alive, mut fresh, mut stopped) = (false, false, false);
        let mut launches: Vec<u64> = Vec::new();
        let mut last_end = None;
        let mut events = vec![Event::Start];
        for act in acts {
            match act {
                Act::Serve if alive => events.push(Event::Ready),
                Act::MainDies if alive => events.push(Event::MainEnded),
                Act::AllGone if alive => { alive = false; events.push(Event::Gone); }
                Act::Refused if alive && fresh => { alive = false; events.push(Event::NotStarted); }
                Act::Stop => events.push(Event::Stop),
                Act::Wait(time) => { now += time; events.push(Event::Clock); }
                Act::Deadline => if let Some(at) = life.next_deadline() { now = now.max(at); events.push(Event::Clock); },
                _ => {}
            }
            for event in events.drain(..) {
                fresh = false;
                stopped |= event == Event::Stop;
                for effect in life.step(now, event) {
                    match effect {
                        Effect::Launch => {
                            prop_assert!(!alive, "two at {now}");
                            prop_assert!(!stopped, "started after it was stopped");
                            if let Some(end) = last_end {
                                prop_assert!(now - end >= 100_000, "started {} us after its end", now - end);
                            }
                            (alive, fresh) = (true, true);
                            launches.push(now);
                            let recent = launches.iter().filter(|at| now - **at < 60_000_000).count();
                            prop_assert!(recent <= MOST + 1, "{recent} starts in a minute");
                        }
                        Effect::Ended { next: Decision::Restart { pause, number }, .. } => {
                            last_end = Some(now);
                            prop_assert!((1..=MOST).contains(&number));
                            prop_assert!((100..=1600).contains(&pause.as_millis()), "{pause:?}");
                            prop_assert_eq!(life.next_deadline(), Some(now + u64::try_from(pause.as_micros()).unwrap()));
                        }
                        Effect::Ended { next: Decision::LimitReached, .. } | Effect::Stopped => prop_assert!(life.is_over()),
                        _ => {}
                    }
                }
                // Every wait has a deadline, unless the daemon serves, is blocked in the kernel, or is never restarted.
                prop_assert!(life.next_deadline().is_none_or(|at| at <= now + GRACE_US + 30_000_000));
            }
        }
    }
}
