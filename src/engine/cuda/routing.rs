//! Choices of experts made beforehand, in place of the router's: random weights route alike whatever the text, so that a shape's
//! speed under misses needs routing of a known kind.

use crate::sample::SplitMix64;
use std::sync::Arc;

/// How experts are chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Routing {
    /// All alike, whatever came before.
    Uniform,
    /// Each is one of the previous token's with this probability, else one of the others, all alike.
    Local(f64),
    /// As recorded: `[T][L][K]`, sequence `b` from token `b * T / B` on, again from the start at the end.
    Recorded(Arc<Vec<u16>>),
}

/// A layer's choices, `[steps][rows][K]`.
pub(super) type Script = Vec<u32>;

/// What the `index`-th of `layers` layers chooses of `experts` experts, `top_k` for each of `rows` sequences in each step.
pub(super) fn script(
    routing: &Routing,
    (index, layers): (usize, usize),
    experts: usize,
    top_k: usize,
    rows: usize,
    steps: usize,
) -> Script {
    let mut out = vec![0u32; steps * rows * top_k];
    for row in 0..rows {
        let mut random = SplitMix64((index * rows + row) as u64 + 1);
        let mut last: Vec<u32> = Vec::new();
        for step in 0..steps {
            let now = match routing {
                Routing::Uniform => choose(&mut random, experts, top_k, &[], 0.0),
                Routing::Local(p) => choose(&mut random, experts, top_k, &last, *p),
                Routing::Recorded(ids) => {
                    let each = layers * top_k;
                    let num_tok = (ids.len() / each.max(1)).max(1);
                    let at = ((row * num_tok / rows + step) % num_tok) * each + index * top_k;
                    ids.get(at..at + top_k).map_or(Vec::new(), |ids| ids.iter().map(|&e| u32::from(e)).collect())
                }
            };
            out[(step * rows + row) * top_k..][..now.len()].copy_from_slice(&now);
            last = now;
        }
    }
    out
}

/// Guesses at choices `[..][K]`, each right with probability `recall`, else one of the experts not chosen.
pub(super) fn guesses(choices: &[u32], top_k: usize, experts: usize, recall: f64, seed: u64) -> Script {
    let mut random = SplitMix64(!seed);
    let mut out = Vec::with_capacity(choices.len());
    for chosen in choices.chunks(top_k.max(1)) {
        let others: Vec<u32> = (0..experts as u32).filter(|e| !chosen.contains(e)).collect();
        out.extend(chosen.iter().map(|&e| match random.unit() < recall || others.is_empty() {
            true => e,
            false => others[((random.unit() * others.len() as f64) as usize).min(others.len() - 1)],
        }));
    }
    out
}

/// Different experts, each with probability `repeat` one of `last`.
fn choose(random: &mut SplitMix64, experts: usize, top_k: usize, last: &[u32], repeat: f64) -> Vec<u32> {
    let mut chosen: Vec<u32> = Vec::with_capacity(top_k);
    while chosen.len() < top_k.min(experts) {
        let again = random.unit() < repeat;
        let open = |e: &u32| !chosen.contains(e) && (last.is_empty() || last.contains(e) == again);
        let mut pool: Vec<u32> = (0..experts as u32).filter(open).collect();
        if pool.is_empty() {
            pool = (0..experts as u32).filter(|e| !chosen.contains(e)).collect();
        }
        let at = (random.unit() * pool.len() as f64) as usize;
        chosen.push(pool[at.min(pool.len() - 1)]);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repeats(script: &[u32], top_k: usize) -> f64 {
        let steps: Vec<&[u32]> = script.chunks_exact(top_k).collect();
        let again: usize = steps.windows(2).map(|w| w[1].iter().filter(|e| w[0].contains(e)).count()).sum();
        again as f64 / ((steps.len() - 1) * top_k) as f64
    }

    /// 16000 choices of probability 0.45 leave a standard deviation of 0.004: four of them. Fails if a repeat may also come from
    /// the uniform choice (0.48).
    #[test]
    fn local_routing_repeats_as_often_as_asked() {
        let local = script(&Routing::Local(0.45), (0, 1), 128, 8, 1, 2000);
        assert!((repeats(&local, 8) - 0.45).abs() < 0.016, "{}", repeats(&local, 8));
        let uniform = script(&Routing::Uniform, (0, 1), 128, 8, 1, 2000);
        assert!((repeats(&uniform, 8) - 8.0 / 128.0).abs() < 0.008, "{}", repeats(&uniform, 8));
        assert!(local.chunks_exact(8).all(|c| (1..8).all(|i| !c[..i].contains(&c[i]))), "no expert twice");
    }

    /// Sequences of a batch begin at different places of a recording.
    #[test]
    fn recordings_are_dealt_out() {
        let recorded = Routing::Recorded(Arc::new(vec![0, 10, 1, 11, 2, 12, 3, 13]));
        assert_eq!(script(&recorded, (1, 2), 16, 1, 2, 3), [10, 12, 11, 13, 12, 10]);
    }
}
