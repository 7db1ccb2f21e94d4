//! The module dependency graph and its load order. No I/O.

/// The load state of a module.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum State {
    /// Not started.
    #[default]
    Waiting,
    /// Being loaded by a thread.
    Running,
    /// Loaded.
    Loaded,
    /// Could not be loaded.
    Failed,
}

/// A module of the set to load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// The module's name, as spelled by its file.
    pub name: String,
    /// The module's file, relative to the directory of `modules.dep`.
    pub file: String,
    /// Hard dependencies, as indices into the set.
    pub needs: Vec<usize>,
    /// Modules that are processed first, whether they load or not (soft dependencies), as indices
    /// into the set.
    pub after: Vec<usize>,
    /// Whether it was requested, or is a dependency of a requested module.
    pub requested: bool,
    /// The load state.
    pub state: State,
}

/// The next step of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Load this module.
    Load(usize),
    /// The first module cannot be loaded because the second, a hard dependency, failed.
    DependencyFailed(usize, usize),
    /// Wait for a running load.
    Wait,
    /// All modules are processed.
    Finished,
}

fn ended(state: State) -> bool {
    matches!(state, State::Loaded | State::Failed)
}

/// Returns the next step. Dependency cycles are broken in the set's order: soft dependencies first,
/// then hard ones, for which the kernel then decides.
#[must_use]
pub fn next(nodes: &[Node]) -> Next {
    let state = |at: usize| nodes.get(at).map_or(State::Loaded, |node| node.state);
    let waiting = || nodes.iter().enumerate().filter(|(_, node)| node.state == State::Waiting);
    for (at, node) in waiting() {
        if let Some(lost) = node.needs.iter().find(|need| state(**need) == State::Failed) {
            return Next::DependencyFailed(at, *lost);
        }
        if node.needs.iter().chain(&node.after).all(|other| ended(state(*other))) {
            return Next::Load(at);
        }
    }
    if nodes.iter().any(|node| node.state == State::Running) {
        return Next::Wait;
    }
    let yields = waiting().find(|(_, node)| node.needs.iter().all(|need| ended(state(*need))));
    yields.or_else(|| waiting().next()).map_or(Next::Finished, |(at, _)| Next::Load(at))
}

/// Returns how many modules can be loaded concurrently.
#[must_use]
pub fn width(nodes: &[Node]) -> usize {
    nodes.iter().filter(|node| node.state == State::Waiting && node.needs.is_empty() && node.after.is_empty()).count()
}

/// Marks dependencies of requested modules, whose failure is reported as an error.
pub fn mark_requested(nodes: &mut [Node]) {
    let mut open: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at].requested).collect();
    while let Some(at) = open.pop() {
        for need in nodes[at].needs.clone() {
            if let Some(node) = nodes.get_mut(need).filter(|node| !node.requested) {
                node.requested = true;
                open.push(need);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(needs: &[usize], after: &[usize]) -> Node {
        Node { needs: needs.to_vec(), after: after.to_vec(), ..Node::default() }
    }

    #[test]
    fn hard_and_soft_dependencies_and_cycles() {
        let mut nodes = [node(&[1], &[]), node(&[], &[2]), node(&[], &[])];
        assert_eq!((next(&nodes), width(&nodes)), (Next::Load(2), 1));
        nodes[2].state = State::Running;
        assert_eq!(next(&nodes), Next::Wait);
        nodes[2].state = State::Failed;
        assert_eq!(next(&nodes), Next::Load(1), "a failed soft dependency blocks no module");
        nodes[1].state = State::Failed;
        assert_eq!(next(&nodes), Next::DependencyFailed(0, 1));
        nodes[0].state = State::Failed;
        assert_eq!(next(&nodes), Next::Finished);
        assert_eq!(next(&[node(&[1], &[]), node(&[], &[0])]), Next::Load(1), "a hard dependency overrides a soft one");
        assert_eq!(next(&[node(&[1], &[]), node(&[0], &[])]), Next::Load(0));
        assert_eq!(next(&[node(&[0], &[0])]), Next::Load(0));
    }

    #[test]
    fn dependencies_of_requested_modules_are_requested() {
        let mut nodes =
            [Node { requested: true, ..node(&[1], &[3]) }, node(&[2], &[]), node(&[1], &[]), node(&[], &[])];
        mark_requested(&mut nodes);
        assert_eq!(nodes.map(|node| node.requested), [true, true, true, false]);
    }

    proptest! {
        /// For any graph, with cycles and edges to unknown nodes, each node is loaded once, and
        /// after its dependencies unless there is a cycle.
        #[test]
        fn ordering_any_graph_ends(
            edges in prop::collection::vec((prop::collection::vec(0_usize..12, 0..4), prop::collection::vec(0_usize..12, 0..3)), 1..10),
            fails in prop::collection::vec(any::<bool>(), 10),
        ) {
            let mut nodes: Vec<Node> = edges.iter().map(|(needs, after)| node(needs, after)).collect();
            let forward = edges.iter().enumerate().all(|(at, (needs, after))| {
                needs.iter().chain(after).all(|other| *other < at || *other >= edges.len())
            });
            let mut turns = 0;
            loop {
                match next(&nodes) {
                    Next::Load(at) => {
                        prop_assert_eq!(nodes[at].state, State::Waiting);
                        if forward {
                            prop_assert!(nodes[at].needs.iter().all(|need| nodes.get(*need).is_none_or(|need| need.state == State::Loaded)));
                            prop_assert!(nodes[at].after.iter().all(|other| nodes.get(*other).is_none_or(|other| ended(other.state))));
                        }
                        nodes[at].state = if fails[at] { State::Failed } else { State::Loaded };
                    }
                    Next::DependencyFailed(at, need) => {
                        prop_assert_eq!(nodes[need].state, State::Failed);
                        nodes[at].state = State::Failed;
                    }
                    Next::Wait => prop_assert!(false, "no module is loading"),
                    Next::Finished => break,
                }
                turns += 1;
            }
            prop_assert_eq!(turns, nodes.len());
        }
    }
}
