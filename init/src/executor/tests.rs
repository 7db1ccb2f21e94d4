use proptest::prelude::*;

use super::*;

fn node(name: &str, needs: &[usize], after: &[usize], severity: Severity) -> Node<String> {
    Node {
        id: name.into(),
        per: None,
        needs: needs.into(),
        after: after.into(),
        deadline_us: Some(100),
        severity,
        hint: "look there",
    }
}

fn executor(nodes: Vec<Node<String>>) -> Executor<String> {
    Executor::new(&Graph::new(nodes).unwrap())
}

fn ok() -> End {
    End::Ok(String::new())
}

fn failed() -> End {
    End::Failed("broken".into())
}

#[test]
fn units_start_when_their_needs_have_ended() {
    let all = Severity::Degraded;
    let mut run = executor(vec![node("a", &[], &[], all), node("b", &[], &[], all), node("c", &[0], &[1], all)]);
    assert_eq!(run.step(0, Event::Begin), [Effect::Start(0), Effect::Start(1)]);
    assert_eq!(run.step(1, Event::Ended(0, ok())), [Effect::Ended(0)]);
    assert_eq!(run.step(2, Event::Ended(1, failed())), [Effect::Ended(1), Effect::Start(2)]);
    assert_eq!(run.step(3, Event::Ended(2, ok())), [Effect::Ended(2), Effect::Finished]);
    assert!(run.degraded() && run.finished() && run.failed().is_none());
    assert_eq!((run.slots()[2].start_us, run.slots()[2].end_us), (Some(2), Some(3)));
}

#[test]
fn unit_that_needs_a_failed_unit_is_skipped_with_the_first_cause() {
    let all = Severity::Degraded;
    let mut run =
        executor(vec![node("module", &[], &[], all), node("nodes", &[0], &[], all), node("x", &[1], &[], all)]);
    run.step(0, Event::Begin);
    let effects = run.step(1, Event::Ended(0, failed()));
    assert_eq!(effects, [Effect::Ended(0), Effect::Ended(1), Effect::Ended(2), Effect::Finished]);
    assert_eq!(run.slots()[2].detail, "did not run because module failed: broken");
    assert_eq!(run.slots()[2].cause, Some(0));
}

#[test]
fn failed_required_unit_skips_all_units_not_started() {
    let mut run = executor(vec![
        node("a", &[], &[], Severity::Required),
        node("b", &[], &[], Severity::Degraded),
        node("c", &[], &[1], Severity::Required),
    ]);
    run.step(0, Event::Begin);
    let effects = run.step(1, Event::Ended(0, failed()));
    assert_eq!(effects, [Effect::Ended(0), Effect::RequiredFailed(0), Effect::Ended(2)]);
    assert_eq!(run.step(2, Event::Ended(1, ok())), [Effect::Ended(1), Effect::Finished]);
    assert_eq!(run.failed(), Some(0), "the first failure is the one that counts");
}

#[test]
fn skipped_required_unit_fails_the_boot_unless_it_is_not_needed() {
    let nodes = || vec![node("a", &[], &[], Severity::Degraded), node("b", &[0], &[], Severity::Required)];
    let mut run = executor(nodes());
    run.step(0, Event::Begin);
    let effects = run.step(1, Event::Ended(0, failed()));
    assert!(effects.contains(&Effect::RequiredFailed(1)));
    let mut run = executor(nodes());
    run.step(0, Event::Begin);
    let effects = run.step(1, Event::Ended(0, End::NotNeeded("mode cpu".into())));
    assert_eq!(effects, [Effect::Ended(0), Effect::Ended(1), Effect::Finished]);
    assert_eq!(run.slots()[1].detail, "not needed, as a was not: mode cpu");
    assert!(!run.degraded());
}

#[test]
fn unit_past_its_deadline_times_out_and_may_end_late() {
    let mut run = executor(vec![node("a", &[], &[], Severity::Degraded), node("b", &[], &[0], Severity::Degraded)]);
    run.step(5, Event::Begin);
    assert_eq!(run.next_deadline(), Some(105));
    assert_eq!(run.step(104, Event::Clock), []);
    assert_eq!(run.step(105, Event::Clock), [Effect::Ended(0), Effect::Start(1)]);
    assert_eq!(run.slots()[0].outcome, Outcome::TimedOut);
    assert_eq!(run.step(300, Event::Ended(0, ok())), [Effect::Late(0)]);
    assert_eq!(run.slots()[0].outcome, Outcome::TimedOut);
}

fn templated() -> Executor<String> {
    let scan = node("scan", &[], &[], Severity::Degraded);
    let gpu = Node { per: Some(0), ..node("gpu", &[0], &[], Severity::Degraded) };
    executor(vec![scan, gpu, node("cdi", &[], &[1], Severity::Degraded)])
}

#[test]
fn template_is_expanded_into_instances() {
    let mut run = templated();
    assert_eq!(run.step(0, Event::Begin), [Effect::Start(0)]);
    assert_eq!(run.step(1, Event::Expanded(1, vec!["gpu[x]".into(), "gpu[y]".into()])), []);
    assert_eq!(run.slots()[3].node.id, "gpu[x]");
    assert_eq!(run.step(1, Event::Ended(0, ok())), [Effect::Ended(0), Effect::Start(3), Effect::Start(4)]);
    assert_eq!(run.step(2, Event::Ended(4, ok())), [Effect::Ended(4)]);
    assert_eq!(run.step(3, Event::Ended(3, failed())), [Effect::Ended(3), Effect::Start(2)]);
}

#[test]
fn template_without_instances_blocks_no_unit() {
    let mut run = templated();
    run.step(0, Event::Begin);
    assert_eq!(run.step(1, Event::Ended(0, ok())), [Effect::Ended(0), Effect::Start(2)]);
    let mut run = templated();
    run.step(0, Event::Begin);
    assert_eq!(run.step(1, Event::Ended(0, failed())), [Effect::Ended(0), Effect::Start(2)]);
}

/// Runs a plan in every order in which its running units can end.
fn every_order(
    run: &Executor<String>,
    now: u64,
    effects: &[Effect],
    running: &[usize],
    ends: &[Option<End>],
    seen: &mut usize,
) {
    let mut running = running.to_vec();
    for effect in effects {
        if let Effect::Start(unit) = effect {
            let slot = &run.slots()[*unit];
            let needs = slot.node.needs.iter().all(|need| run.slots()[*need].outcome == Outcome::Ok);
            let after = slot.node.after.iter().all(|other| run.slots()[*other].outcome.ended());
            assert!(needs && after, "{} started too early", slot.node.id);
            running.push(*unit);
        }
    }
    if running.is_empty() {
        *seen += 1;
        assert!(run.finished() && run.slots().iter().all(|slot| slot.outcome.ended()));
        assert_eq!(effects.iter().filter(|effect| **effect == Effect::Finished).count(), 1);
        let required = |slot: &Slot<String>| slot.node.severity == Severity::Required && slot.outcome != Outcome::Ok;
        assert_eq!(run.failed().is_some(), run.slots().iter().any(|slot| required(slot) && !slot.not_needed));
        return;
    }
    for (at, unit) in running.iter().enumerate() {
        let mut next = run.clone();
        let rest: Vec<usize> = running.iter().copied().enumerate().filter(|(n, _)| *n != at).map(|(_, u)| u).collect();
        match &ends[*unit] {
            Some(end) => {
                let effects = next.step(now, Event::Ended(*unit, end.clone()));
                every_order(&next, now, &effects, &rest, ends, seen);
            }
            // It never answers, like all others of its kind: all of them time out.
            None => {
                let effects = next.step(now + 1000, Event::Clock);
                let left: Vec<usize> =
                    running.iter().copied().filter(|u| next.slots()[*u].outcome == Outcome::Running).collect();
                every_order(&next, now + 1000, &effects, &left, ends, seen);
            }
        }
    }
}

#[test]
fn all_plans_of_three_units_end() {
    let ends = [Some(ok()), Some(failed()), Some(End::NotNeeded("no".into())), None];
    let mut seen = 0;
    for shape in 0..27 * 8 * 64 {
        let (edges, severities, choice) = (shape % 27, shape / 27 % 8, shape / 216);
        let edge = |pair: u32| edges / 3u32.pow(pair) % 3;
        let pairs = [(1, 0, edge(0)), (2, 0, edge(1)), (2, 1, edge(2))];
        let nodes = (0..3)
            .map(|unit| {
                let of = |kind| {
                    pairs
                        .iter()
                        .filter(|(from, _, k)| *from == unit && *k == kind)
                        .map(|(_, to, _)| *to)
                        .collect::<Vec<_>>()
                };
                let severity = if severities & (1 << unit) == 0 { Severity::Degraded } else { Severity::Required };
                node(&format!("u{unit}"), &of(1), &of(2), severity)
            })
            .collect();
        let ends: Vec<_> =
            (0..3).map(|unit| ends[usize::try_from(choice / 4u32.pow(unit) % 4).unwrap()].clone()).collect();
        let mut run = executor(nodes);
        let effects = run.step(0, Event::Begin);
        every_order(&run, 0, &effects, &[], &ends, &mut seen);
    }
    assert!(seen > 20_000, "{seen}");
}

/// Generates random plans without cycles: edges lead to lower indices only.
fn plans(severity: Severity) -> impl Strategy<Value = (Vec<Node<String>>, Vec<u8>)> {
    prop::collection::vec((any::<u16>(), any::<u16>(), any::<u8>()), 1..12).prop_map(move |rows| {
        let bits = |mask: u16, below: usize| (0..below).filter(|at| mask & (1 << at) != 0).collect::<Vec<_>>();
        let nodes = rows
            .iter()
            .enumerate()
            .map(|(at, (needs, after, _))| {
                node(&format!("u{at}"), &bits(*needs & 0x5555, at), &bits(*after & 0x2222, at), severity)
            })
            .collect();
        (nodes, rows.iter().map(|row| row.2).collect())
    })
}

/// Runs a plan; `order` chooses which running unit ends next.
fn run_to_end(nodes: &[Node<String>], ends: &[u8], order: &[u8]) -> Executor<String> {
    let mut run = executor(nodes.to_vec());
    let mut running = Vec::new();
    let mut now = 0;
    let mut pending = run.step(now, Event::Begin);
    loop {
        for effect in pending.drain(..) {
            if let Effect::Start(unit) = effect {
                let slot = &run.slots()[unit];
                for need in &slot.node.needs {
                    assert_eq!(run.slots()[*need].outcome, Outcome::Ok, "{} started before its need", slot.node.id);
                }
                for other in &slot.node.after {
                    assert!(run.slots()[*other].outcome.ended(), "{} started too early", slot.node.id);
                }
                running.push(unit);
            }
        }
        if running.is_empty() {
            return run;
        }
        now += 1;
        let pick = usize::from(order[usize::try_from(now).unwrap() % order.len()]) % running.len();
        let unit = running.swap_remove(pick);
        let end = match ends[unit] % 4 {
            0 => failed(),
            1 => End::NotNeeded("no".into()),
            _ => ok(),
        };
        pending = run.step(now, Event::Ended(unit, end));
    }
}

proptest! {
    #[test]
    fn every_plan_ends((nodes, ends) in plans(Severity::Required), order in prop::collection::vec(any::<u8>(), 1..9)) {
        let run = run_to_end(&nodes, &ends, &order);
        prop_assert!(run.finished());
        prop_assert!(run.slots().iter().all(|slot| slot.outcome.ended()));
    }

    #[test]
    fn outcomes_do_not_depend_on_the_order_of_ends(
        (nodes, ends) in plans(Severity::Degraded),
        one in prop::collection::vec(any::<u8>(), 1..9),
        two in prop::collection::vec(any::<u8>(), 1..9),
    ) {
        let (one, two) = (run_to_end(&nodes, &ends, &one), run_to_end(&nodes, &ends, &two));
        for (a, b) in one.slots().iter().zip(two.slots()) {
            prop_assert_eq!((a.outcome, a.not_needed), (b.outcome, b.not_needed));
        }
    }

    #[test]
    fn every_plan_ends_if_no_unit_ends((nodes, _) in plans(Severity::Degraded)) {
        let mut run = executor(nodes);
        run.step(0, Event::Begin);
        let mut steps = 0;
        while let Some(at) = run.next_deadline() {
            run.step(at, Event::Clock);
            steps += 1;
            prop_assert!(steps <= 12);
        }
        prop_assert!(run.finished());
    }
}
