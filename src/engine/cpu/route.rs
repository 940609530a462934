//! From router logits to experts and weights. Pure; equal scores go to the lower index.

use crate::model::spec::{RouterSpec, Score, Select};

/// Fills `experts` and `gates`, both `[T, K]`, from `logits`, `[T, E]`.
pub fn route(experts: &mut [u32], gates: &mut [f32], logits: &[f32], router: &RouterSpec) {
    let rows = experts.chunks_exact_mut(router.top_k).zip(gates.chunks_exact_mut(router.top_k));
    for ((experts, gates), logits) in rows.zip(logits.chunks_exact(router.experts)) {
        match router.select {
            Select::SparseMixer { jitter } => sparse_mixer(experts, gates, logits, jitter),
            Select::Top | Select::GroupLimited { .. } => top(experts, gates, logits, router),
        }
        gates.iter_mut().for_each(|g| *g *= router.scale);
    }
}

fn top(experts: &mut [u32], gates: &mut [f32], logits: &[f32], router: &RouterSpec) {
    let mut scores = logits.to_vec();
    if router.score == Score::Softmax {
        softmax(&mut scores);
    }
    if let Select::GroupLimited { groups, keep } = router.select {
        keep_best_groups(&mut scores, groups, keep);
    }
    let mut left = scores.clone();
    for (expert, gate) in experts.iter_mut().zip(gates.iter_mut()) {
        let best = first_max(&left);
        left[best] = f32::NEG_INFINITY;
        *expert = best as u32;
        *gate = scores[best];
    }
    if router.score == Score::SoftmaxOfChosen {
        softmax(gates);
    }
    if router.renorm {
        let sum: f32 = gates.iter().sum();
        gates.iter_mut().for_each(|g| *g /= sum);
    }
}

/// Zeroes the scores outside the `keep` groups with the highest maximum.
fn keep_best_groups(scores: &mut [f32], groups: usize, keep: usize) {
    let size = scores.len() / groups;
    let mut best: Vec<f32> = scores.chunks_exact(size).map(|g| g.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
    let mut kept = vec![false; groups];
    for _ in 0..keep {
        let g = first_max(&best);
        best[g] = f32::NEG_INFINITY;
        kept[g] = true;
    }
    for (group, _) in scores.chunks_exact_mut(size).zip(kept).filter(|(_, kept)| !kept) {
        group.fill(0.0);
    }
}

/// Both masks divide by the unmasked scores' magnitudes, clamped from below by the round's best.
fn sparse_mixer(experts: &mut [u32], gates: &mut [f32], logits: &[f32], jitter: f32) {
    let mut open = logits.to_vec();
    for (expert, gate) in experts.iter_mut().zip(gates) {
        let pick = first_max(&open);
        let best = open[pick];
        let mut row = open.clone();
        for (x, &score) in row.iter_mut().zip(logits) {
            if (best - score) / score.abs().max(best) > 2.0 * jitter {
                *x = f32::NEG_INFINITY;
            }
        }
        softmax(&mut row);
        *expert = pick as u32;
        *gate = row[pick];
        open[pick] = f32::NEG_INFINITY;
    }
}

/// Softmax in place; entries of minus infinity get zero.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|v| *v /= sum);
}

fn first_max(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in x.iter().enumerate() {
        if *v > x[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(experts: usize, top_k: usize) -> RouterSpec {
        RouterSpec { experts, top_k, score: Score::Softmax, select: Select::Top, renorm: false, scale: 1.0 }
    }

    fn run(logits: &[f32], router: RouterSpec) -> (Vec<u32>, Vec<f32>) {
        let (mut e, mut g) = (vec![0; router.top_k], vec![0.0; router.top_k]);
        route(&mut e, &mut g, logits, &router);
        (e, g)
    }

    /// Exact in the ids; sums of two floats near 1 carry at most one rounding, 1e-7. Fails without the division.
    #[test]
    fn renormalised_gates_sum_to_one() {
        let (e, g) = run(&[0.0, 3.0, 1.0, 2.0], RouterSpec { renorm: true, ..spec(4, 2) });
        assert_eq!(e, [1, 3]);
        assert!((g[0] + g[1] - 1.0).abs() <= 1e-7);
    }

    /// Expert 2 is second best overall but its group loses. Fails if groups are scored by their sum.
    #[test]
    fn groups_compete_by_their_best_expert() {
        let router = RouterSpec { select: Select::GroupLimited { groups: 2, keep: 1 }, ..spec(4, 2) };
        assert_eq!(run(&[5.0, -9.0, 4.0, 4.5], router).0, [0, 1]);
    }

    /// With a wide jitter both candidates compete: the weight is `1 / (1 + e^-0.01)`, exact to 1e-6 in single precision. Fails
    /// if the first mask keeps everyone or no one.
    #[test]
    fn sparse_mixer_weighs_close_competitors_only() {
        let router = RouterSpec { select: Select::SparseMixer { jitter: 0.01 }, ..spec(3, 2) };
        let (e, g) = run(&[1.0, 0.99, 0.5], router);
        assert_eq!(e, [0, 1]);
        assert!((g[0] - 1.0 / (1.0 + (-0.01f32).exp())).abs() < 1e-6);
        assert_eq!(g[1], 1.0);
    }
}
