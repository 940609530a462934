//! What routing traces say: which experts are hot, what holding them is worth, and how far the answer can be trusted.
//!
//! Traffic is counted in visits: one token in one layer makes `K` of them. Pure functions over counts and traces; must not know
//! models or files. Reuse distances after Mattson et al. 1970, "Evaluation techniques for storage hierarchies".

use super::trace::{Sample, Shape};
use rayon::prelude::*;
use std::collections::HashSet;

/// Visits and gate weights of every expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// Dimensions.
    pub shape: Shape,
    /// Visits, `[L, E]`; not whole after [`Counts::merge`].
    pub visits: Vec<f64>,
    /// Sums of the gate weights of those visits, `[L, E]`.
    pub weights: Vec<f64>,
}

/// Hot experts of each layer, most used first.
pub type HotSet = Vec<Vec<u16>>;

impl Counts {
    /// Nothing seen.
    pub fn new(shape: Shape) -> Self {
        let len = shape.layers * shape.experts;
        Self { shape, visits: vec![0.0; len], weights: vec![0.0; len] }
    }

    /// Counts some samples.
    pub fn of<'a>(shape: Shape, samples: impl IntoIterator<Item = &'a Sample>) -> Self {
        let mut counts = Self::new(shape);
        samples.into_iter().for_each(|s| counts.add(s));
        counts
    }

    /// Counts a sample.
    pub fn add(&mut self, sample: &Sample) {
        for token in sample.ids.chunks_exact((self.shape.layers * self.shape.top_k).max(1)) {
            for (layer, ids) in self.visits.chunks_exact_mut(self.shape.experts).zip(token.chunks_exact(self.shape.top_k)) {
                ids.iter().for_each(|&id| layer[id as usize] += 1.0);
            }
        }
    }

    /// Adds older counts of the same shape, each worth `decay` of a new one.
    pub fn merge(&mut self, old: &Counts, decay: f64) {
        let add = |new: &mut [f64], old: &[f64]| new.iter_mut().zip(old).for_each(|(new, old)| *new += decay * old);
        add(&mut self.visits, &old.visits);
        add(&mut self.weights, &old.weights);
    }

    /// Visits of one layer, `[E]`.
    pub fn layer(&self, layer: usize) -> &[f64] {
        &self.visits[layer * self.shape.experts..(layer + 1) * self.shape.experts]
    }

    /// Visits of all layers.
    pub fn total(&self) -> f64 {
        self.visits.iter().sum()
    }
}

/// Experts by use, most used first, equal ones by index.
fn ranked(visits: &[f64]) -> Vec<u16> {
    let mut ids: Vec<u16> = (0..visits.len()).map(|e| e as u16).collect();
    ids.sort_by(|&a, &b| visits[b as usize].total_cmp(&visits[a as usize]));
    ids
}

/// The smallest set of each layer that covers `target` of the layer's visits.
pub fn by_coverage(counts: &Counts, target: f64) -> HotSet {
    (0..counts.shape.layers)
        .map(|l| {
            let visits = counts.layer(l);
            let wanted = target * visits.iter().sum::<f64>();
            let mut covered = 0.0;
            let enough = |&id: &u16| {
                let more = covered < wanted;
                covered += visits[id as usize];
                more
            };
            ranked(visits).into_iter().take_while(enough).collect()
        })
        .collect()
}

/// The most used experts of each layer, `sizes[l]` of them.
pub fn by_size(counts: &Counts, sizes: &[usize]) -> HotSet {
    sizes.iter().enumerate().map(|(l, &n)| ranked(counts.layer(l)).into_iter().take(n).collect()).collect()
}

/// A budget that does not hold one token's experts in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{budget} bytes do not hold {top_k} experts in each of {layers} layers, which take {needed} bytes")]
pub struct BudgetError {
    /// What was given.
    pub budget: u64,
    /// What would do.
    pub needed: u64,
    /// `K`.
    pub top_k: usize,
    /// Layers with routers.
    pub layers: usize,
}

/// Spends `budget` bytes: first the `K` most used experts of every layer, for no layer may be starved, then whatever covers most
/// visits a byte anywhere. `bytes`, `[L, E]`, are the experts' sizes. Experts never used are left out even if there is room.
pub fn by_budget(counts: &Counts, budget: u64, bytes: &[u64]) -> Result<HotSet, BudgetError> {
    let Shape { layers, experts, top_k } = counts.shape;
    let mut hot = by_size(counts, &vec![top_k; layers]);
    let spent: u64 = hot.iter().enumerate().flat_map(|(l, ids)| ids.iter().map(move |&e| bytes[l * experts + e as usize])).sum();
    let Some(mut left) = budget.checked_sub(spent) else {
        return Err(BudgetError { budget, needed: spent, top_k, layers });
    };
    let mut rest: Vec<usize> = (0..layers * experts)
        .filter(|&i| counts.visits[i] > 0.0 && !hot[i / experts].contains(&((i % experts) as u16)))
        .collect();
    let share: Vec<f64> = (0..layers).map(|l| counts.layer(l).iter().sum::<f64>().max(f64::MIN_POSITIVE)).collect();
    let worth = |i: usize| counts.visits[i] / share[i / experts] / bytes[i].max(1) as f64;
    rest.sort_by(|&a, &b| worth(b).total_cmp(&worth(a)));
    for i in rest {
        if bytes[i] <= left {
            left -= bytes[i];
            hot[i / experts].push((i % experts) as u16);
        }
    }
    for (l, ids) in hot.iter_mut().enumerate() {
        let visits = counts.layer(l);
        ids.sort_by(|&a, &b| visits[b as usize].total_cmp(&visits[a as usize]).then(a.cmp(&b)));
    }
    Ok(hot)
}

/// Number of experts of each layer.
pub fn sizes(hot: &HotSet) -> Vec<usize> {
    hot.iter().map(Vec::len).collect()
}

/// Share of each layer's visits that a hot set covers; 0 for a layer without visits.
pub fn coverage_by_layer(hot: &HotSet, counts: &Counts) -> Vec<f64> {
    hot.iter()
        .enumerate()
        .map(|(l, ids)| {
            let visits = counts.layer(l);
            let all: f64 = visits.iter().sum();
            if all > 0.0 { ids.iter().map(|&e| visits[e as usize]).sum::<f64>() / all } else { 0.0 }
        })
        .collect()
}

/// Share of all visits that a hot set covers.
pub fn coverage(hot: &HotSet, counts: &Counts) -> f64 {
    let covered: f64 = hot.iter().enumerate().flat_map(|(l, ids)| ids.iter().map(move |&e| counts.layer(l)[e as usize])).sum();
    covered / counts.total().max(f64::MIN_POSITIVE)
}

/// Share that the same number of experts would cover if routing were uniform.
pub fn uniform(hot: &HotSet, shape: Shape) -> f64 {
    sizes(hot).iter().sum::<usize>() as f64 / (shape.layers * shape.experts).max(1) as f64
}

/// Hits of a least-recently-used cache for every number of slots at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LruHits {
    /// Hits with `n` slots, `[L][E + 1]`.
    hits: Vec<Vec<u64>>,
    /// Visits of one layer.
    visits: u64,
}

/// Replays samples, one after the other, through a cache in each layer that begins empty and is never cleared. The experts of a
/// token are looked up together and held together; a lookup hits with `n` slots if fewer than `n` other experts have been used
/// since.
pub fn lru(shape: Shape, samples: &[&Sample]) -> LruHits {
    let hits = (0..shape.layers)
        .into_par_iter()
        .map(|l| {
            let mut hits = vec![0u64; shape.experts + 1];
            let mut recent: Vec<u16> = Vec::with_capacity(shape.experts);
            let mut next = Vec::with_capacity(shape.experts);
            for token in samples.iter().flat_map(|s| s.ids.chunks_exact(shape.layers * shape.top_k)) {
                let ids = &token[l * shape.top_k..(l + 1) * shape.top_k];
                for id in ids {
                    if let Some(depth) = recent.iter().position(|r| r == id) {
                        hits[depth + 1] += 1;
                    }
                }
                next.clear();
                next.extend_from_slice(ids);
                next.extend(recent.iter().filter(|r| !ids.contains(r)));
                std::mem::swap(&mut recent, &mut next);
            }
            for n in 1..hits.len() {
                hits[n] += hits[n - 1];
            }
            hits
        })
        .collect();
    let num_tok: usize = samples.iter().map(|s| s.num_tok(shape)).sum();
    LruHits { hits, visits: (num_tok * shape.top_k) as u64 }
}

impl LruHits {
    /// Hit rate of one layer with `slots`.
    pub fn layer(&self, layer: usize, slots: usize) -> f64 {
        self.hits[layer][slots.min(self.hits[layer].len() - 1)] as f64 / self.visits.max(1) as f64
    }

    /// Hit rate over all layers, with `slots[l]` each.
    pub fn overall(&self, slots: &[usize]) -> f64 {
        slots.iter().enumerate().map(|(l, &n)| self.layer(l, n)).sum::<f64>() / slots.len().max(1) as f64
    }
}

/// Shared over joint experts of two sets; 1 for two empty ones.
pub fn jaccard(a: &HotSet, b: &HotSet) -> f64 {
    let (shared, a, b) = shared(a, b);
    if a + b == 0 { 1.0 } else { shared as f64 / (a + b - shared) as f64 }
}

/// Shared experts over the larger of two sets; 1 for two empty ones.
pub fn overlap(a: &HotSet, b: &HotSet) -> f64 {
    let (shared, a, b) = shared(a, b);
    if a + b == 0 { 1.0 } else { shared as f64 / a.max(b) as f64 }
}

/// Shared experts, and the size of both sets.
fn shared(a: &HotSet, b: &HotSet) -> (usize, usize, usize) {
    let in_layer = |a: &[u16], b: &[u16]| {
        let b: HashSet<u16> = b.iter().copied().collect();
        a.iter().filter(|e| b.contains(e)).count()
    };
    let shared = a.iter().zip(b).map(|(a, b)| in_layer(a, b)).sum();
    (shared, sizes(a).iter().sum(), sizes(b).iter().sum())
}

/// Coefficient of variation of a layer's visits: standard deviation over mean, 0 when all experts are used alike.
pub fn variation(visits: &[f64]) -> f64 {
    let n = visits.len().max(1) as f64;
    let mean = visits.iter().sum::<f64>() / n;
    let var = visits.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    if mean > 0.0 { var.sqrt() / mean } else { 0.0 }
}

/// Experts of a layer without a visit.
pub fn unused(visits: &[f64]) -> Vec<usize> {
    visits.iter().enumerate().filter(|(_, v)| **v == 0.0).map(|(e, _)| e).collect()
}

/// What caches of `n` experts in every layer would serve, for one `n`.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct CurvePoint {
    /// Experts held over experts.
    pub fraction: f64,
    /// The most used experts of `fitted`, held for good.
    #[serde(rename = "static")]
    pub fixed: f64,
    /// The most recently used ones.
    pub lru: f64,
    /// Any, were routing uniform.
    pub uniform: f64,
}

/// Coverage of held-out visits against the share of experts held, at most 65 points.
pub fn curve(fitted: &Counts, held_out: &Counts, lru: &LruHits) -> Vec<CurvePoint> {
    let Shape { layers, experts, .. } = fitted.shape;
    let points = experts.min(64);
    (0..=points)
        .map(|p| {
            let slots = vec![p * experts / points; layers];
            let fraction = slots[0] as f64 / experts as f64;
            let fixed = coverage(&by_size(fitted, &slots), held_out);
            CurvePoint { fraction, fixed, lru: lru.overall(&slots), uniform: fraction }
        })
        .collect()
}

/// Indices of samples, tasks taking turns, so that every beginning of the list has all tasks in it.
pub fn taking_turns(tasks: &[usize]) -> Vec<usize> {
    let mut turn = vec![0usize; tasks.iter().max().map_or(0, |t| t + 1)];
    let mut order: Vec<(usize, usize, usize)> = Vec::with_capacity(tasks.len());
    for (i, &task) in tasks.iter().enumerate() {
        order.push((turn[task], task, i));
        turn[task] += 1;
    }
    order.sort_unstable();
    order.into_iter().map(|(_, _, i)| i).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { layers: 2, experts: 4, top_k: 1 };

    /// `[L, E]` visits of two layers of four experts.
    fn counts(visits: [f64; 8]) -> Counts {
        Counts { shape: SHAPE, visits: visits.to_vec(), weights: vec![0.0; 8] }
    }

    fn one_layer(top_k: usize, experts: usize, ids: &[u16]) -> (Shape, Sample) {
        (Shape { layers: 1, experts, top_k }, Sample { task: 0, ids: ids.to_vec() })
    }

    /// Integers, exact. Fails if layers and tokens change places: the second layer would then see expert 2.
    #[test]
    fn visits_are_counted_by_layer() {
        let c = Counts::of(SHAPE, [&Sample { task: 0, ids: vec![0, 3, 2, 3, 0, 1] }]);
        assert_eq!(c.visits, [2.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 2.0]);
    }

    /// Integers, exact. Fails if a set stops one expert late: 60 + 25 is exactly the target in layer 0.
    #[test]
    fn the_smallest_set_that_reaches_the_target() {
        let c = counts([60.0, 5.0, 25.0, 10.0, 25.0, 25.0, 25.0, 25.0]);
        assert_eq!(by_coverage(&c, 0.85), [vec![0, 2], vec![0, 1, 2, 3]]);
        assert_eq!(by_coverage(&c, 0.86)[0], [0, 2, 3]);
        assert_eq!(by_coverage(&counts([0.0; 8]), 0.85), [vec![], vec![]] as [Vec<u16>; 2]);
    }

    /// Sums of integers over 100 or 200, so the only error is one division: 1e-15. Fails if layers are averaged by size.
    #[test]
    fn coverage_is_the_share_of_visits() {
        let c = counts([60.0, 5.0, 25.0, 10.0, 10.0, 20.0, 30.0, 40.0]);
        let hot = vec![vec![0, 2], vec![3]];
        assert_eq!(coverage_by_layer(&hot, &c), [0.85, 0.4]);
        assert!((coverage(&hot, &c) - 125.0 / 200.0).abs() < 1e-15);
        assert_eq!(uniform(&hot, SHAPE), 3.0 / 8.0);
    }

    /// Exact. Each layer gets its `K` first although layer 1 is flat, the rest goes where it covers most a byte. Fails if sizes
    /// are ignored: expert 1 of layer 0 has more visits than expert 2, but twice the bytes.
    #[test]
    fn a_budget_goes_where_it_covers_most() {
        let c = counts([50.0, 26.0, 24.0, 0.0, 25.0, 25.0, 25.0, 25.0]);
        let bytes = [10, 20, 10, 10, 30, 30, 30, 30];
        assert_eq!(by_budget(&c, 50, &bytes).unwrap(), [vec![0, 2], vec![0]]);
        assert_eq!(by_budget(&c, 70, &bytes).unwrap(), [vec![0, 1, 2], vec![0]]);
        assert_eq!(by_budget(&c, 10_000, &bytes).unwrap(), [vec![0, 1, 2], vec![0, 1, 2, 3]]);
        assert_eq!(by_budget(&c, 39, &bytes).unwrap_err().needed, 40);
    }

    /// A cache written the plain way, for one size.
    fn plain_lru(top_k: usize, slots: usize, ids: &[u16]) -> u64 {
        let (mut cache, mut hits) = (Vec::<u16>::new(), 0);
        for token in ids.chunks_exact(top_k) {
            hits += token.iter().filter(|id| cache.contains(id)).count() as u64;
            let mut next = token.to_vec();
            next.extend(cache.iter().filter(|c| !token.contains(c)));
            next.truncate(slots);
            cache = next;
        }
        hits
    }

    /// Integers, exact, against a plain cache of every size. Fails if a hit is counted one slot too early or late.
    #[test]
    fn reuse_distances_give_the_hits_of_every_size() {
        let ids: Vec<u16> = (0..600u32).map(|i| ((i * i / 7 + 3 * i) % 11) as u16).collect();
        let (shape, sample) = one_layer(1, 12, &ids);
        let found = lru(shape, &[&sample]);
        for n in 0..=12 {
            assert_eq!(found.hits[0][n], plain_lru(1, n, &ids), "{n} slots");
        }
        let pairs: Vec<u16> = ids.chunks_exact(2).flat_map(|p| [p[0], if p[1] == p[0] { 11 } else { p[1] }]).collect();
        let (shape, sample) = one_layer(2, 12, &pairs);
        let found = lru(shape, &[&sample]);
        for n in 2..=12 {
            assert_eq!(found.hits[0][n], plain_lru(2, n, &pairs), "{n} slots");
        }
    }

    /// Exact: of six lookups four hit with two slots, one with one. Fails if a cache is cleared between samples.
    #[test]
    fn the_cache_outlives_a_sample() {
        let (shape, a) = one_layer(1, 4, &[0, 1]);
        let (_, b) = one_layer(1, 4, &[1, 0]);
        let found = lru(shape, &[&a, &b, &b]);
        assert_eq!([found.layer(0, 1), found.layer(0, 2), found.overall(&[4])], [1.0 / 6.0, 4.0 / 6.0, 4.0 / 6.0]);
    }

    /// Small integers, exact. Fails if layers are pooled: expert 1 is in both sets, but in different layers.
    #[test]
    fn agreement_of_sets() {
        let (a, b) = (vec![vec![0, 1], vec![2]], vec![vec![0], vec![2, 1, 3]]);
        assert_eq!(jaccard(&a, &b), 2.0 / 5.0);
        assert_eq!(overlap(&a, &b), 2.0 / 4.0);
        assert_eq!(jaccard(&a, &a), 1.0);
    }

    /// `{1, 3}` has mean 2 and deviation 1, so 0.5 exactly; a deviation over n - 1 would give 0.707.
    #[test]
    fn balance_of_a_layer() {
        assert_eq!(variation(&[1.0, 3.0]), 0.5);
        assert_eq!(variation(&[2.0, 2.0]), 0.0);
        assert_eq!(unused(&[1.0, 0.0, 2.0, 0.0]), [1, 3]);
    }

    /// Powers of two, exact. Fails if new and old change places.
    #[test]
    fn old_counts_fade() {
        let mut new = counts([8.0; 8]);
        new.merge(&counts([2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 16.0]), 0.5);
        assert_eq!(new.visits, [9.0, 10.0, 8.0, 8.0, 8.0, 8.0, 8.0, 16.0]);
    }

    /// Exact at both ends; in between 60 of 100 with the most used expert of four. Fails if the fit is taken from the held-out
    /// counts, which would give 70.
    #[test]
    fn the_curve_runs_from_nothing_to_everything() {
        let fitted = counts([60.0, 40.0, 0.0, 0.0, 60.0, 40.0, 0.0, 0.0]);
        let held = counts([60.0, 40.0, 0.0, 0.0, 20.0, 80.0, 0.0, 0.0]);
        let (_, sample) = (0, Sample { task: 0, ids: vec![0, 0, 0, 0] });
        let points = curve(&fitted, &held, &lru(SHAPE, &[&sample]));
        assert_eq!(points.len(), 5);
        assert_eq!((points[0].fixed, points[0].lru, points[0].uniform), (0.0, 0.0, 0.0));
        assert_eq!((points[1].fixed, points[1].lru, points[1].uniform), (80.0 / 200.0, 0.5, 0.25));
        assert_eq!((points[4].fixed, points[4].fraction), (1.0, 1.0));
    }

    #[test]
    fn tasks_take_turns() {
        assert_eq!(taking_turns(&[0, 0, 0, 1, 1, 2]), [0, 3, 5, 1, 4, 2]);
    }
}
