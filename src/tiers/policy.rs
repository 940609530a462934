//! Which expert leaves a layer's slots when another comes.
//!
//! One rule serves all policies but the oracle. Experts have a *worth*: a score, then the step of the last visit (later is worth
//! more), then the index (lower is worth more), so that no two are equal. A step is a pass of one or more tokens through the layer,
//! with the set `R` of experts that those tokens chose, at most as many as there are slots:
//!
//! 1. the experts of `R` in the slots are hits, the others of `R` are misses;
//! 2. all scores of the layer decay, resident or not, then those of `R` rise, and `R` was visited last in this step;
//! 3. the misses, `m` of them, take the slots of the `m` least worthy residents outside `R`.
//!
//! Since what left keeps its score, an expert seen once goes again before those seen often: frequency decides who is admitted for
//! longer than a step.
//!
//! | policy | decay | rise | scores begin with |
//! |---|---|---|---|
//! | static | none | none | rank in the profile |
//! | LRU | none | none | 0 |
//! | LFU | none | 1 | 0 |
//! | LRFU | `s - ceil(s / 2^shift)` | [`VISIT`] | what the profile's traffic would have led to |
//!
//! LRFU is the combined recency and frequency of Lee et al. 2001, "LRFU: A Spectrum of Policies that Subsumes the Least Recently
//! Used and Least Frequently Used Policies", IEEE Trans. Computers 50(12): `C(t) = sum over visits i of 2^(-lambda (t - t_i))`,
//! kept by `C(t) = 2^-lambda C(t - 1) + [visited]`, here with `2^-lambda = 1 - 2^-shift`. `shift` 1 is their lambda = 1, which is
//! LRU; large ones approach LFU. Scores are integers of 32 bits, so that every device decides alike.

use super::sizing::Layer;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// What one visit adds to a score of LRFU.
pub const VISIT: u32 = 1 << 20;
/// Slowest decay: scores never exceed `VISIT << shift`, which has to fit 32 bits.
pub const MAX_SHIFT: u32 = 11;

/// How residents are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The experts that a profile saw most: each comes back for the next one worth less.
    Static,
    /// The most recently used.
    Lru,
    /// The most often used.
    Lfu,
    /// The most often used of late; a visit is worth half after about `0.7 * 2^shift` steps.
    Lrfu {
        /// From 1 to [`MAX_SHIFT`].
        shift: u32,
    },
    /// Those that will be needed soonest: the bound for all others. Knows the future.
    Belady,
}

impl Policy {
    /// LRFU for layers that choose `top_k` of `experts`. It looks back over about `4 E / K` steps, in which an expert of average
    /// use is seen four times: enough to tell it from a rare one, few enough to follow the text.
    pub fn lrfu(experts: usize, top_k: usize) -> Self {
        let steps = 4.0 * experts as f64 / top_k.max(1) as f64;
        Policy::Lrfu { shift: (steps.log2().round() as u32).clamp(1, MAX_SHIFT) }
    }

    /// One of each, for layers that choose `top_k` of `experts`.
    pub fn all(experts: usize, top_k: usize) -> [Self; 5] {
        [Policy::Static, Policy::Lru, Policy::Lfu, Policy::lrfu(experts, top_k), Policy::Belady]
    }

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Static => "static",
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Lrfu { .. } => "lrfu",
            Policy::Belady => "belady",
        }
    }
}

/// Scores that the experts of a layer begin with, `[E]`.
pub fn first_scores(policy: Policy, layer: &Layer) -> Vec<u32> {
    let total = layer.visits.iter().sum::<u64>().max(1);
    match policy {
        Policy::Static => {
            let mut scores = vec![0; layer.experts];
            layer.ranked().into_iter().rev().zip(0..).for_each(|(e, rank)| scores[e as usize] = rank);
            scores
        }
        // An expert visited with probability `p` each step settles at `p * VISIT * 2^shift`.
        Policy::Lrfu { shift } => {
            let settled = |visits: u64| {
                let often = (layer.top_k as f64 * visits as f64 / total as f64).min(1.0);
                (often * f64::from(VISIT << shift)) as u32
            };
            (0..layer.experts).map(|e| settled(layer.visits.get(e).copied().unwrap_or(0))).collect()
        }
        Policy::Lru | Policy::Lfu | Policy::Belady => vec![0; layer.experts],
    }
}

/// The slots of one layer.
pub struct Cache(State);

enum State {
    Scored(Scored),
    Oracle(Oracle),
}

impl Cache {
    /// A layer's slots with their first residents: [`Layer::residents`].
    pub fn new(policy: Policy, layer: &Layer, slots: usize) -> Self {
        Self(match policy {
            Policy::Belady => State::Oracle(Oracle::new(layer, slots)),
            policy => State::Scored(Scored::new(policy, layer, slots)),
        })
    }

    /// One step: `ids` are the experts chosen, each once. Returns how many of them were there.
    pub fn step(&mut self, ids: &[u16]) -> usize {
        match &mut self.0 {
            State::Scored(s) => s.step(ids),
            State::Oracle(o) => o.step(ids),
        }
    }
}

/// The rule of the module's head.
struct Scored {
    policy: Policy,
    /// `[E]`.
    scores: Vec<u32>,
    /// Step of the last visit, 0 for none, `[E]`.
    visited: Vec<u32>,
    resident: Vec<bool>,
    /// Experts in the slots, in no order.
    slots: Vec<u16>,
    now: u32,
}

impl Scored {
    fn new(policy: Policy, layer: &Layer, slots: usize) -> Self {
        let slots = layer.residents(slots);
        let mut resident = vec![false; layer.experts];
        slots.iter().for_each(|&e| resident[e as usize] = true);
        Self { policy, scores: first_scores(policy, layer), visited: vec![0; layer.experts], resident, slots, now: 0 }
    }

    fn worth(&self, e: u16) -> (u32, u32, Reverse<u16>) {
        (self.scores[e as usize], self.visited[e as usize], Reverse(e))
    }

    fn step(&mut self, ids: &[u16]) -> usize {
        let missing: Vec<u16> = ids.iter().copied().filter(|&e| !self.resident[e as usize]).collect();
        let hits = ids.len() - missing.len();
        self.now += 1;
        if let Policy::Lrfu { shift } = self.policy {
            self.scores.iter_mut().for_each(|s| *s -= s.div_ceil(1 << shift));
        }
        let rise = match self.policy {
            Policy::Lrfu { .. } => VISIT,
            Policy::Lfu => 1,
            _ => 0,
        };
        for &e in ids {
            self.scores[e as usize] += rise;
            self.visited[e as usize] = self.now;
        }
        let mut others: Vec<usize> = (0..self.slots.len()).filter(|&s| self.visited[self.slots[s] as usize] < self.now).collect();
        others.sort_unstable_by_key(|&s| self.worth(self.slots[s]));
        for (e, slot) in missing.into_iter().zip(others) {
            let left = std::mem::replace(&mut self.slots[slot], e);
            self.resident[left as usize] = false;
            self.resident[e as usize] = true;
        }
        hits
    }
}

/// Belady's optimum, told from the past alone. Between two visits an expert either keeps a slot, and the second visit hits, or
/// does not; in every step between, `R` takes `|R|` slots and leaves the others to such spans. Taking spans in the order of their
/// ends, each that still fits, keeps as many as can be kept: the greedy interval scheduling of Carlisle and Lloyd 1995, "On the
/// k-coloring of intervals", and how Jain and Lin 2016 tell hits of the optimum in "Back to the future: leveraging Belady's
/// algorithm for improved cache replacement".
struct Oracle {
    slots: usize,
    /// Step of the last visit of each expert, 0 for the first residents, `[E]`.
    visited: Vec<Option<u32>>,
    /// First step after the last one whose slots are all taken: no span across that one fits any more.
    open: u32,
    /// Slots left in each step from `open` to the last.
    left: VecDeque<u16>,
    now: u32,
}

impl Oracle {
    fn new(layer: &Layer, slots: usize) -> Self {
        let mut visited = vec![None; layer.experts];
        layer.residents(slots).into_iter().for_each(|e| visited[e as usize] = Some(0));
        Self { slots, visited, open: 1, left: VecDeque::new(), now: 0 }
    }

    fn step(&mut self, ids: &[u16]) -> usize {
        self.now += 1;
        let mut hits = 0;
        for &e in ids {
            let last = self.visited[e as usize].replace(self.now);
            let Some(from) = last.map(|l| l + 1).filter(|from| *from >= self.open) else { continue };
            hits += 1;
            let mut full = None;
            for (step, left) in (self.open..).zip(&mut self.left).skip((from - self.open) as usize) {
                *left -= 1;
                full = if *left == 0 { Some(step) } else { full };
            }
            full.into_iter().for_each(|step| self.close(step));
        }
        self.left.push_back(self.slots.saturating_sub(ids.len()) as u16);
        if self.left.back() == Some(&0) {
            self.close(self.now);
        }
        hits
    }

    /// Notes that no slot is left in this step.
    fn close(&mut self, step: u32) {
        self.left.drain(..=(step - self.open) as usize);
        self.open = step + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layer(experts: usize, top_k: usize, visits: &[u64]) -> Layer {
        Layer { experts, top_k, slot_bytes: 1, visits: visits.to_vec() }
    }

    fn hits(policy: Policy, layer: &Layer, slots: usize, steps: &[Vec<u16>]) -> usize {
        let mut cache = Cache::new(policy, layer, slots);
        steps.iter().map(|ids| cache.step(ids)).sum()
    }

    /// Counted by hand, two slots that begin with experts 0 and 1, static with 3 and 2. Fails for LRFU if scores do not decay (4),
    /// for LFU if a score is lost with its slot (3), for the oracle if a step's own expert takes no slot (6).
    #[test]
    fn a_trace_counted_by_hand() {
        let steps = [0, 0, 2, 3, 0, 2, 3, 0, 2].map(|e| vec![e]);
        let blank = layer(4, 1, &[]);
        assert_eq!(hits(Policy::Static, &layer(4, 1, &[1, 2, 3, 9]), 2, &steps), 3);
        assert_eq!(hits(Policy::Lru, &blank, 2, &steps), 2);
        assert_eq!(hits(Policy::Lfu, &blank, 2, &steps), 4);
        assert_eq!(hits(Policy::Lrfu { shift: 2 }, &blank, 2, &steps), 3);
        assert_eq!(hits(Policy::Belady, &blank, 2, &steps), 5);
    }

    /// Counted by hand. Two experts a step, three slots that begin with 0, 1, 2: the third is all that a policy can choose.
    #[test]
    fn experts_of_one_step_are_there_together() {
        let steps = [vec![0, 3], vec![1, 0], vec![3, 4], vec![1, 3]];
        let blank = layer(5, 2, &[]);
        // 0 hits and 3 takes 2's slot; both hit; 3 hits and 4 takes the slot of 1, visited as late as 0; 3 hits.
        assert_eq!(hits(Policy::Lru, &blank, 3, &steps), 5);
        // As above, but 4 takes the slot of 0, which does not come back.
        assert_eq!(hits(Policy::Belady, &blank, 3, &steps), 6);
    }

    /// The look-back is four visits of an expert of average use: integers, exact.
    #[test]
    fn the_decay_follows_the_share_of_experts_used() {
        let shift = |e, k| match Policy::lrfu(e, k) {
            Policy::Lrfu { shift } => shift,
            _ => 0,
        };
        assert_eq!([shift(16, 4), shift(8, 2), shift(128, 8), shift(512, 10), shift(1, 1), shift(65536, 1)], [4, 4, 6, 8, 2, 11]);
    }

    /// A score that is raised every step stays below 32 bits and goes back to nothing. Fails if the decay rounds down: the last
    /// `2^shift - 1` would never go.
    #[test]
    fn scores_neither_overflow_nor_stay() {
        for shift in [1, 6, MAX_SHIFT] {
            let mut s = Scored::new(Policy::Lrfu { shift }, &layer(2, 1, &[1, 0]), 1);
            assert_eq!(s.scores, [VISIT << shift, 0], "a visit in every step settles here");
            assert_eq!((0..100_000).map(|_| s.step(&[0])).sum::<usize>(), 100_000);
            assert!(s.scores[0] <= VISIT << shift && s.scores[0] >= (VISIT << shift) - (1 << shift), "{}", s.scores[0]);
            assert_eq!((0..100_000).map(|_| s.step(&[1])).sum::<usize>(), 99_999);
            assert_eq!(s.scores[0], 0);
        }
    }

    /// Hits of the policy that knows the future, the plain way: out goes who is needed last.
    fn clairvoyant(layer: &Layer, slots: usize, steps: &[Vec<u16>]) -> usize {
        let mut here = layer.residents(slots);
        let mut hits = 0;
        for (t, ids) in steps.iter().enumerate() {
            hits += ids.iter().filter(|e| here.contains(e)).count();
            for &e in ids {
                if !here.contains(&e) {
                    let next = |r: u16| steps[t + 1..].iter().position(|s| s.contains(&r)).unwrap_or(usize::MAX);
                    let others = (0..here.len()).filter(|&s| !ids.contains(&here[s]));
                    let slot = others.max_by_key(|&s| next(here[s])).unwrap();
                    here[slot] = e;
                }
            }
        }
        hits
    }

    prop_compose! {
        /// A layer, slots for it, and steps of `K` different experts.
        fn any_trace()(experts in 2usize..9, top_k in 1usize..4)
            (steps in proptest::collection::vec(proptest::sample::subsequence((0..experts as u16).collect::<Vec<_>>(), top_k.min(experts)), 1..60),
             visits in proptest::collection::vec(0u64..9, experts), known in any::<bool>(), more in 0usize..6,
             experts in Just(experts), top_k in Just(top_k.min(experts))) -> (Layer, usize, Vec<Vec<u16>>) {
            let visits = if known { visits } else { Vec::new() };
            (Layer { experts, top_k, slot_bytes: 1, visits }, (top_k + more).min(experts), steps)
        }
    }

    proptest! {
        /// Integers, exact. Fails if the first residents may not be hit, or if a span takes a slot in the step that ends it.
        #[test]
        fn the_oracle_hits_as_often_as_one_who_knows_the_future((layer, slots, steps) in any_trace()) {
            prop_assert_eq!(hits(Policy::Belady, &layer, slots, &steps), clairvoyant(&layer, slots, &steps));
        }

        #[test]
        fn no_policy_hits_more_than_the_oracle((layer, slots, steps) in any_trace(), shift in 1u32..12) {
            let most = hits(Policy::Belady, &layer, slots, &steps);
            for policy in [Policy::Static, Policy::Lru, Policy::Lfu, Policy::Lrfu { shift }] {
                prop_assert!(hits(policy, &layer, slots, &steps) <= most, "{:?}", policy);
            }
        }

        /// Lee's limits. At lambda = 1 an expert visited later never has the lower score, and hits are LRU's where a step has one
        /// expert and hence no ties; towards lambda = 0 an expert visited more often has the higher score: over at most 60 steps
        /// the slowest decay takes 3 % of a count below 30. Fails if the decay is one shift off, or rises before it decays.
        #[test]
        fn lrfu_lies_between_lru_and_lfu((layer, slots, steps) in any_trace()) {
            let layer = Layer { visits: Vec::new(), ..layer };
            let mut recent = Scored::new(Policy::Lrfu { shift: 1 }, &layer, slots);
            let mut often = Scored::new(Policy::Lrfu { shift: MAX_SHIFT }, &layer, slots);
            let mut count = Scored::new(Policy::Lfu, &layer, slots);
            for ids in &steps {
                for s in [&mut recent, &mut often, &mut count] {
                    s.step(ids);
                }
                for a in 0..layer.experts {
                    for b in 0..layer.experts {
                        let later = recent.visited[a] > recent.visited[b];
                        prop_assert!(!later || recent.scores[a] >= recent.scores[b]);
                        let oftener = count.scores[a] > count.scores[b] && count.scores[a] < 30;
                        prop_assert!(!oftener || often.scores[a] > often.scores[b]);
                    }
                }
            }
            if layer.top_k == 1 {
                prop_assert_eq!(hits(Policy::Lrfu { shift: 1 }, &layer, slots, &steps), hits(Policy::Lru, &layer, slots, &steps));
            }
        }
    }
}
