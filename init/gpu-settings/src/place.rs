//! Where instances go on a GPU.
//!
//! If instances are created one after the other where the driver places them, the last
//! may have no placement although another order has one for all. So placements are
//! computed for all instances before the first is created.

use firstlight_sys::nvml::Placement;

/// Tries before it is given up; a GPU of today needs a few hundred.
const MOST_TRIES: u32 = 1 << 20;

fn mask(place: Placement) -> Option<u64> {
    let end = place.start.checked_add(place.size).filter(|end| *end <= 64 && place.size > 0)?;
    let below = |count: u32| if count == 64 { u64::MAX } else { (1 << count) - 1 };
    Some(below(end) & !below(place.start))
}

/// A place for each of these, in their order, so that no two share a slice.
/// `choices` has the places that each can have.
pub(crate) fn places(choices: &[Vec<Placement>]) -> Option<Vec<Placement>> {
    // The largest first: they have the fewest places.
    let mut order: Vec<usize> = (0..choices.len()).collect();
    let size = |at: usize| choices[at].iter().map(|place| place.size).max().unwrap_or_default();
    order.sort_by_key(|at| (std::cmp::Reverse(size(*at)), choices[*at].len()));
    let mut chosen = vec![None; choices.len()];
    let mut tries = 0;
    if !place_rest(choices, &order, 0, &mut chosen, &mut tries) {
        return None;
    }
    chosen.into_iter().collect()
}

fn place_rest(
    choices: &[Vec<Placement>],
    order: &[usize],
    taken: u64,
    chosen: &mut [Option<Placement>],
    tries: &mut u32,
) -> bool {
    let Some((at, rest)) = order.split_first() else { return true };
    for place in &choices[*at] {
        *tries += 1;
        if *tries > MOST_TRIES {
            return false;
        }
        let Some(mask) = mask(*place).filter(|mask| mask & taken == 0) else { continue };
        chosen[*at] = Some(*place);
        if place_rest(choices, rest, taken | mask, chosen, tries) {
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

    /// What an H200 has.
    fn kind(slices: u32) -> Vec<Placement> {
        match slices {
            1 => at(&[0, 1, 2, 3, 4, 5, 6], 1),
            2 => at(&[0, 2, 4], 2),
            3 => at(&[0, 4], 4),
            4 => at(&[0], 4),
            _ => at(&[0], 8),
        }
    }

    fn starts(slices: &[u32]) -> Option<Vec<u32>> {
        let choices: Vec<_> = slices.iter().map(|slices| kind(*slices)).collect();
        Some(places(&choices)?.iter().map(|place| place.start).collect())
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
        assert_eq!(places(&[vec![]]), None);
        assert_eq!(places(&[at(&[60], 8)]), None, "beyond what is counted");
        assert_eq!(places(&[at(&[u32::MAX], 8)]), None);
        assert_eq!(places(&[at(&[0], 64)]), Some(at(&[0], 64)));
    }

    #[test]
    fn invalid_placements_are_searched_in_bounded_time() {
        let choices = vec![at(&(0..64).collect::<Vec<_>>(), 3); 30];
        assert_eq!(places(&choices), None);
    }

    proptest! {
        #[test]
        fn no_two_share_a_slice_and_each_is_where_it_can_be(slices in proptest::collection::vec(1..5u32, 0..7)) {
            let choices: Vec<_> = slices.iter().map(|slices| kind(*slices)).collect();
            if let Some(found) = places(&choices) {
                let mut taken = 0;
                for (place, choices) in found.iter().zip(&choices) {
                    prop_assert!(choices.contains(place));
                    let mask = mask(*place).unwrap();
                    prop_assert_eq!(taken & mask, 0);
                    taken |= mask;
                }
            } else {
                // Three slices of processors take four of memory.
                let needed: u32 = slices.iter().map(|slices| slices + u32::from(*slices == 3)).sum();
                prop_assert!(needed > 4, "half of the memory always has a place");
            }
        }
    }
}
