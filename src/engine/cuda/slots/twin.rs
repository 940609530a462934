//! The rule that the kernel follows, on the host: for copies in host memory, and for whoever checks the kernel. Must not know where experts lie.

use crate::tiers::policy::{VISIT, first_scores};
use crate::tiers::{Layer, Policy};
use std::cmp::Reverse;

/// In the place of an expert: none.
pub(super) const NOBODY: u32 = u32::MAX;

/// The decay that the kernel takes, 0 for none, and what a visit adds to a score.
pub(super) fn decay_and_rise(policy: Policy) -> (u32, u32) {
    match policy {
        Policy::Static | Policy::Lru | Policy::Belady => (0, 0),
        Policy::Lfu => (0, 1),
        Policy::Lrfu { shift } => (shift, VISIT),
    }
}

/// The rule of `crate::tiers` for one layer as the kernel follows it, slot by slot: the missing experts in order of index take the
/// slots of the least worthy residents outside the step that are not permanent, in order of worth.
#[derive(Clone, Debug)]
pub struct Twin {
    policy: Policy,
    /// Expert of each slot, `[S]`.
    pub(super) owner: Vec<u32>,
    permanent: usize,
    score: Vec<u32>,
    visited: Vec<u32>,
    now: u32,
}

impl Twin {
    /// With the first residents of a layer.
    pub fn new(policy: Policy, layer: &Layer, slots: usize) -> Self {
        let owner = layer.residents(slots).into_iter().map(u32::from).collect();
        Self { policy, owner, permanent: 0, score: first_scores(policy, layer), visited: vec![0; layer.experts], now: 0 }
    }

    /// With these experts in its slots.
    pub(super) fn holding(self, owner: Vec<u32>) -> Self {
        Self { owner, ..self }
    }

    /// The experts of the first slots never leave.
    pub fn permanent(self, slots: usize) -> Self {
        Self { permanent: slots, ..self }
    }

    /// Experts of the slots.
    pub fn owner(&self) -> &[u32] {
        &self.owner
    }

    /// One step in which these experts were chosen, in any order and number; returns how many were not there.
    pub fn step(&mut self, ids: &[u32]) -> usize {
        self.step_beside(ids, |_| false).0
    }

    /// The same where some experts are in another place and need no slot; returns the slots that were taken too, and by whom.
    pub(super) fn step_beside(&mut self, ids: &[u32], elsewhere: impl Fn(u32) -> bool) -> (usize, Vec<(usize, u32)>) {
        self.now += 1;
        let (shift, rise) = decay_and_rise(self.policy);
        if shift > 0 {
            self.score.iter_mut().for_each(|s| *s -= s.div_ceil(1 << shift));
        }
        let mut missing = ids.to_vec();
        missing.sort_unstable();
        missing.dedup();
        for &e in &missing {
            self.score[e as usize] += rise;
            self.visited[e as usize] = self.now;
        }
        missing.retain(|e| !self.owner.contains(e) && !elsewhere(*e));
        // A slot of nobody is worth least.
        let worth = |e: u32| match e {
            NOBODY => (0, 0, Reverse(e)),
            e => (self.score[e as usize], self.visited[e as usize], Reverse(e)),
        };
        let outside = |s: &usize| worth(self.owner[*s]).1 < self.now;
        let mut others: Vec<usize> = (self.permanent..self.owner.len()).filter(outside).collect();
        others.sort_unstable_by_key(|&s| worth(self.owner[s]));
        let moves: Vec<(usize, u32)> = others.into_iter().zip(missing.iter().copied()).collect();
        moves.iter().for_each(|&(s, e)| self.owner[s] = e);
        (missing.len(), moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::Cache;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// The twin hits whenever the rule does. Exact; fails if equal worth is broken by the higher index, if a chosen resident may
    /// leave, or if scores decay after they rise.
    #[test]
    fn the_twin_follows_the_rule() {
        let mut random = Random(3);
        for (experts, top_k, slots) in [(8, 2, 2), (16, 4, 5), (40, 8, 20), (64, 8, 63)] {
            let visits = (0..experts as u64).map(|e| e * e % 7).collect();
            let layer = Layer { experts, top_k, slot_bytes: 1, visits };
            for policy in [Policy::Static, Policy::Lru, Policy::Lfu, Policy::Lrfu { shift: 2 }, Policy::Lrfu { shift: 6 }] {
                let (mut twin, mut rule) = (Twin::new(policy, &layer, slots), Cache::new(policy, &layer, slots));
                for _ in 0..300 {
                    let mut ids: Vec<u32> = (0..top_k).map(|_| random.below(experts) as u32).collect();
                    let missing = twin.step(&ids);
                    ids.sort_unstable();
                    ids.dedup();
                    let hits = rule.step(&ids.iter().map(|&e| e as u16).collect::<Vec<_>>());
                    assert_eq!(missing, ids.len() - hits, "{policy:?}, {slots} of {experts}");
                }
            }
        }
    }

    /// What is permanent stays whatever is chosen, what is elsewhere takes no slot, and an empty slot goes first. Counted by hand.
    #[test]
    fn slots_may_be_permanent_or_empty() {
        let layer = Layer { experts: 6, top_k: 2, slot_bytes: 1, visits: Vec::new() };
        let mut twin = Twin::new(Policy::Lru, &layer, 3).permanent(1);
        assert_eq!((twin.step(&[4, 5]), twin.owner()), (2, &[0, 5, 4][..]));
        assert_eq!((twin.step(&[1, 2, 3]), twin.owner()), (3, &[0, 1, 2][..]));
        twin.owner[2] = NOBODY;
        assert_eq!(twin.step_beside(&[3, 4], |e| e == 4), (1, vec![(2, 3)]));
    }
}
