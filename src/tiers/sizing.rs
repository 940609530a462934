//! Slots of each layer out of a budget, and who begins in them.

use std::cmp::Reverse;

/// A layer with a router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// `E`, at most 65536.
    pub experts: usize,
    /// `K`: experts of one token, and the fewest slots the layer can do with.
    pub top_k: usize,
    /// Bytes of one slot: the layer's largest expert.
    pub slot_bytes: u64,
    /// How often a profile saw each expert used, `[E]`; empty if there is no profile.
    pub visits: Vec<u64>,
}

/// A budget that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// The smallest budget that works, bytes.
    pub smallest_bytes: u64,
}

impl Layer {
    fn visits(&self, expert: usize) -> u64 {
        self.visits.get(expert).copied().unwrap_or(0)
    }

    fn total(&self) -> u64 {
        self.visits.iter().sum()
    }

    /// Whether a profile saw any of the experts used.
    pub fn is_profiled(&self) -> bool {
        self.total() > 0
    }

    /// The fewest slots: `K`, so that one token's experts are there at the same time.
    pub fn floor(&self) -> usize {
        self.top_k.min(self.experts)
    }

    /// Experts by use, most used first and equal ones by index; by index without a profile.
    pub fn ranked(&self) -> Vec<u16> {
        let mut ids: Vec<u16> = (0..self.experts).map(|e| e as u16).collect();
        ids.sort_by_key(|&e| Reverse(self.visits(e as usize)));
        ids
    }

    /// The experts that begin in the layer's slots, most used first.
    pub fn residents(&self, slots: usize) -> Vec<u16> {
        let mut ids = self.ranked();
        ids.truncate(slots);
        ids
    }

    /// Share of the layer's visits to the `slots` most used experts, 0 to 1; as if all were used alike without a profile.
    pub fn coverage(&self, slots: usize) -> f64 {
        match self.total() {
            0 => slots.min(self.experts) as f64 / self.experts.max(1) as f64,
            total => self.residents(slots).into_iter().map(|e| self.visits(e as usize)).sum::<u64>() as f64 / total as f64,
        }
    }
}

/// Spends `budget_bytes` on slots: `K` in every layer, then one after the other where a token is likeliest to be spared a fetch,
/// up to `E`. Returns the slots of each layer.
///
/// A hit spares as many bytes as the slot takes, so the worth of a byte is the number of visits that a token makes to the expert
/// that the slot would hold, `K` times its share of the layer's visits. Ranked shares fall, hence taking the best step each time is
/// optimal; equal steps go to the layer of which the smaller share is held. The order of the steps does not depend on the budget,
/// and the first that does not fit is the last: a larger budget never takes a slot from any layer.
pub fn slots_per_layer(layers: &[Layer], budget_bytes: u64) -> Result<Vec<usize>, TooSmall> {
    slots_from(layers, layers.iter().map(Layer::floor).collect(), budget_bytes)
}

/// The same with so many in each layer to begin with.
pub(super) fn slots_from(layers: &[Layer], mut slots: Vec<usize>, budget_bytes: u64) -> Result<Vec<usize>, TooSmall> {
    let smallest_bytes: u64 = layers.iter().zip(&slots).map(|(l, &n)| n as u64 * l.slot_bytes).sum();
    let mut left = budget_bytes.checked_sub(smallest_bytes).ok_or(TooSmall { smallest_bytes })?;
    let mut steps: Vec<(f64, f64, usize)> = Vec::new();
    for (l, layer) in layers.iter().enumerate() {
        let (k, e, total) = (layer.top_k as f64, layer.experts as f64, layer.total() as f64);
        let worth = |id: u16| if total > 0.0 { k * layer.visits(id as usize) as f64 / total } else { k / e };
        let more = layer.ranked().into_iter().enumerate().skip(slots[l]);
        steps.extend(more.map(|(held, id)| (worth(id), held as f64 / e, l)));
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
    for (_, _, l) in steps {
        let Some(rest) = left.checked_sub(layers[l].slot_bytes) else { break };
        left = rest;
        slots[l] += 1;
    }
    Ok(slots)
}

/// Share of all visits to the experts that begin in the slots, 0 to 1; 1 without layers.
pub fn expected_coverage(layers: &[Layer], slots: &[usize]) -> f64 {
    let all: usize = layers.iter().map(|l| l.top_k).sum();
    let covered: f64 = layers.iter().zip(slots).map(|(l, &n)| l.top_k as f64 * l.coverage(n)).sum();
    if all == 0 { 1.0 } else { covered / all as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layer(top_k: usize, slot_bytes: u64, visits: &[u64]) -> Layer {
        Layer { experts: visits.len(), top_k, slot_bytes, visits: visits.to_vec() }
    }

    fn blank(experts: usize, top_k: usize, slot_bytes: u64) -> Layer {
        Layer { experts, top_k, slot_bytes, visits: Vec::new() }
    }

    /// Integers, exact. Fails if worth is not a share: layer 1 has fewer visits, but its second expert takes 40 % of them.
    #[test]
    fn slots_go_where_a_token_is_likeliest_to_hit() {
        let layers = [layer(1, 10, &[50, 30, 20, 0]), layer(1, 10, &[0, 4, 6, 0])];
        assert_eq!(slots_per_layer(&layers, 20), Ok(vec![1, 1]));
        assert_eq!(slots_per_layer(&layers, 30), Ok(vec![1, 2]));
        assert_eq!(slots_per_layer(&layers, 49), Ok(vec![2, 2]));
        assert_eq!(slots_per_layer(&layers, 1000), Ok(vec![4, 4]));
        assert_eq!(layers[1].residents(3), [2, 1, 0]);
        assert_eq!(slots_per_layer(&layers, 19), Err(TooSmall { smallest_bytes: 20 }));
    }

    /// Exact. Fails if bytes divide the worth: a hit in layer 1 spares three times as much and costs three times as much.
    #[test]
    fn a_hit_is_worth_the_bytes_it_spares() {
        let layers = [layer(1, 10, &[50, 25, 25]), layer(1, 30, &[50, 30, 20])];
        assert_eq!(slots_per_layer(&layers, 70), Ok(vec![1, 2]));
    }

    /// Exact. Fails if ties go by layer: the first layer would fill before the second gets a slot.
    #[test]
    fn without_a_profile_layers_share_alike() {
        let layers = [blank(8, 2, 1), blank(8, 2, 1), blank(4, 1, 1)];
        assert_eq!(slots_per_layer(&layers, 10), Ok(vec![4, 4, 2]));
        assert_eq!(layers[0].residents(3), [0, 1, 2]);
        assert!((expected_coverage(&layers, &[4, 4, 2]) - 0.5).abs() < 1e-15, "a division or two: 1e-15");
    }

    prop_compose! {
        fn any_layer()(experts in 1usize..40, top_k in 1usize..9, slot_bytes in 0u64..50, known in any::<bool>())
            (visits in proptest::collection::vec(0u64..30, if known { experts } else { 0 }),
             experts in Just(experts), top_k in Just(top_k), slot_bytes in Just(slot_bytes)) -> Layer {
            Layer { experts, top_k: top_k.min(experts), slot_bytes, visits }
        }
    }

    proptest! {
        /// Floor, cap and budget hold, a larger budget takes no slot from any layer, and what a refusal names works while one byte
        /// less does not. Fails if smaller steps may jump the queue: they would then be taken back by a larger budget.
        #[test]
        fn slots_keep_to_floor_cap_and_budget(
            layers in proptest::collection::vec(any_layer(), 1..6), budget in 0u64..4000, more in 0u64..200,
        ) {
            let smallest = slots_per_layer(&layers, 0).err().map_or(0, |e| e.smallest_bytes);
            prop_assert!(slots_per_layer(&layers, smallest).is_ok());
            if smallest > 0 {
                prop_assert_eq!(slots_per_layer(&layers, smallest - 1), Err(TooSmall { smallest_bytes: smallest }));
            }
            let (small, large) = (slots_per_layer(&layers, smallest + budget), slots_per_layer(&layers, smallest + budget + more));
            let (small, large) = (small.unwrap(), large.unwrap());
            for ((layer, a), b) in layers.iter().zip(&small).zip(&large) {
                prop_assert!(layer.floor() <= *a && a <= b && *b <= layer.experts);
            }
            let taken: u64 = layers.iter().zip(&small).map(|(l, &n)| n as u64 * l.slot_bytes).sum();
            prop_assert!(taken <= smallest + budget);
        }

        /// No other split of the same total is expected to hit more; sums of shares, so 1e-9. Fails if steps are taken worst first.
        #[test]
        fn moving_a_slot_never_helps(layers in proptest::collection::vec(any_layer(), 2..5), budget in 0u64..3000) {
            let layers: Vec<Layer> = layers.into_iter().map(|l| Layer { slot_bytes: 7, ..l }).collect();
            let smallest = slots_per_layer(&layers, 0).err().map_or(0, |e| e.smallest_bytes);
            let slots = slots_per_layer(&layers, smallest + budget).unwrap();
            let best = expected_coverage(&layers, &slots);
            for from in 0..layers.len() {
                for to in 0..layers.len() {
                    let mut other = slots.clone();
                    if from != to && other[from] > layers[from].floor() && other[to] < layers[to].experts {
                        other[from] -= 1;
                        other[to] += 1;
                        prop_assert!(expected_coverage(&layers, &other) <= best + 1e-9);
                    }
                }
            }
        }
    }
}
