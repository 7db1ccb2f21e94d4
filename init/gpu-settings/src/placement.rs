//! Computes the placements of MIG instances on a GPU.
//!
//! If the driver chose a placement for each instance, the last might not fit although
//! another order fits. So placements are computed for all instances before the first
//! is created.

use firstlight_sys::nvml::Placement;

/// Maximum number of search steps; current GPUs need a few hundred.
const MAX_STEPS: u32 = 1 << 20;

/// Returns the bit mask of the slices of a placement; `None` if it is out of range.
fn mask(placement: Placement) -> Option<u64> {
    let end = placement.start.checked_add(placement.size).filter(|end| *end <= 64 && placement.size > 0)?;
    let below = |count: u32| if count == 64 { u64::MAX } else { (1 << count) - 1 };
    Some(below(end) & !below(placement.start))
}

/// Returns a placement for each instance, in their order, so that no two share a slice.
/// `choices` has the possible placements of each instance.
pub(crate) fn find_placements(choices: &[Vec<Placement>]) -> Option<Vec<Placement>> {
    // The largest instances first: they have the fewest placements.
    let mut order: Vec<usize> = (0..choices.len()).collect();
    let size = |at: usize| choices[at].iter().map(|placement| placement.size).max().unwrap_or_default();
    order.sort_by_key(|at| (std::cmp::Reverse(size(*at)), choices[*at].len()));
    let mut chosen = vec![None; choices.len()];
    let mut steps = 0;
    if !place_remaining(choices, &order, 0, &mut chosen, &mut steps) {
        return None;
    }
    chosen.into_iter().collect()
}

fn place_remaining(
    choices: &[Vec<Placement>],
    order: &[usize],
    used: u64,
    chosen: &mut [Option<Placement>],
    steps: &mut u32,
) -> bool {
    let Some((at, remaining)) = order.split_first() else { return true };
    for placement in &choices[*at] {
        *steps += 1;
        if *steps > MAX_STEPS {
            return false;
        }
        let Some(mask) = mask(*placement).filter(|mask| mask & used == 0) else { continue };
        chosen[*at] = Some(*placement);
        if place_remaining(choices, remaining, used | mask, chosen, steps) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(starts: &[u32], size: u32) -> Vec<Placement> {
        starts.iter().map(|start| Placement { start: *start, size }).collect()
    }

    /// Returns the placements of an H200 for instances with this number of compute slices.
    fn placements_of(slices: u32) -> Vec<Placement> {
        match slices {
            1 => at(&[0, 1, 2, 3, 4, 5, 6], 1),
            2 => at(&[0, 2, 4], 2),
            3 => at(&[0, 4], 4),
            4 => at(&[0], 4),
            _ => at(&[0], 8),
        }
    }

    fn starts(slices: &[u32]) -> Option<Vec<u32>> {
        let choices: Vec<_> = slices.iter().map(|slices| placements_of(*slices)).collect();
        Some(find_placements(&choices)?.iter().map(|placement| placement.start).collect())
    }

    #[test]
    fn request_order_does_not_matter() {
        assert_eq!(starts(&[3, 4]), Some(vec![4, 0]));
        assert_eq!(starts(&[4, 3]), Some(vec![0, 4]));
        assert_eq!(starts(&[1, 2, 4]), Some(vec![6, 4, 0]));
        assert_eq!(starts(&[1; 7]), Some((0..7).collect()));
        assert_eq!(starts(&[1, 1, 1, 3]), Some(vec![4, 5, 6, 0]));
        assert_eq!(starts(&[]), Some(vec![]));
    }

    #[test]
    fn layout_that_does_not_fit_has_no_placement() {
        for slices in [&[4, 4][..], &[7, 1], &[3, 3, 1], &[1; 8], &[2, 2, 2, 2]] {
            assert_eq!(starts(slices), None, "{slices:?}");
        }
        assert_eq!(find_placements(&[vec![]]), None);
        assert_eq!(find_placements(&[at(&[60], 8)]), None, "beyond 64 slices");
        assert_eq!(find_placements(&[at(&[u32::MAX], 8)]), None);
        assert_eq!(find_placements(&[at(&[0], 64)]), Some(at(&[0], 64)));
    }

    #[test]
    fn search_without_result_is_bounded() {
        let choices = vec![at(&(0..64).collect::<Vec<_>>(), 3); 30];
        assert_eq!(find_placements(&choices), None);
    }

    proptest! {
        #[test]
        fn placements_do_not_overlap_and_are_possible(slices in proptest::collection::vec(1..5u32, 0..7)) {
            let choices: Vec<_> = slices.iter().map(|slices| placements_of(*slices)).collect();
            if let Some(found) = find_placements(&choices) {
                let mut used = 0;
                for (placement, choices) in found.iter().zip(&choices) {
                    prop_assert!(choices.contains(placement));
                    let mask = mask(*placement).unwrap();
                    prop_assert_eq!(used & mask, 0);
                    used |= mask;
                }
            } else {
                // Instances with three compute slices use four memory slices.
                let needed: u32 = slices.iter().map(|slices| slices + u32::from(*slices == 3)).sum();
                prop_assert!(needed > 4, "instances that need up to half of the memory always fit");
            }
        }
    }
}
