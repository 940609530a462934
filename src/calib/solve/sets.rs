//! Rows of a head by what they compete for: an error of a logit counts where its token is likely, and tokens that are likely at the
//! same places can share second moments. Must not know how codes are chosen.

use crate::engine::EngineError;
use crate::engine::cpu::Engine;
use crate::engine::cpu::route::softmax;
use crate::model::plan::Slot;
use crate::quant::gptq::Moments;
use rayon::prelude::*;

/// Most sets.
const SETS: usize = 16;
/// Most bytes of all their moments. A constant, since codes must not depend on how much memory there is.
const MOST_BYTES: u64 = 1 << 30;
/// Rows a set has at least on average.
const LEAST_ROWS: usize = 64;
/// Rounds of moving rows to the set whose mean they are nearest to.
const ROUNDS: usize = 10;
/// Tokens whose logits are in memory together.
const TOKENS: usize = 128;

/// Rows that share second moments.
pub(super) struct Set {
    /// In rising order.
    pub rows: Vec<usize>,
    /// Of the head's inputs, a token weighted by the sum over these rows of `p (1 - p)`, what a squared error of a logit adds to twice
    /// the divergence where the others are right.
    moments: Moments,
    /// Sum of the weights, and of their squares.
    weight: [f64; 2],
}

impl Set {
    /// Its moments as far as its tokens tell: mixed with those of all tokens by `n / (n + 2 K)`, `n` being the equal weights that would
    /// be as certain.
    pub fn moments(&self, all: &Moments) -> Moments {
        let [sum, squares] = self.weight;
        let n = if squares > 0.0 { sum * sum / squares } else { 0.0 };
        self.moments.mixed(all, n / (n + 2.0 * all.cols() as f64))
    }
}

/// The rows of a head, divided by the directions they look in.
#[derive(Default)]
pub(super) struct Sets {
    pub all: Vec<Set>,
    /// The set of each row.
    of: Vec<u8>,
}

impl Sets {
    /// Divides the rows of `head`, `[V, D]`, by k-means of their directions around the mean row, starting from rows evenly spaced. No sets where
    /// rows are few.
    pub fn divide(head: &[f32], cols: usize) -> Self {
        let rows = head.len().checked_div(cols).unwrap_or(0);
        let affordable = MOST_BYTES / Moments::bytes(cols, true).max(1);
        let num_sets = SETS.min(rows / LEAST_ROWS).min(usize::try_from(affordable).unwrap_or(SETS));
        if num_sets < 2 {
            return Self::default();
        }
        let mut mean = vec![0.0f64; cols];
        head.chunks_exact(cols).for_each(|row| mean.iter_mut().zip(row).for_each(|(m, x)| *m += f64::from(*x) / rows as f64));
        let mut directions: Vec<f32> = head.to_vec();
        directions.par_chunks_exact_mut(cols).for_each(|row| {
            row.iter_mut().zip(&mean).for_each(|(x, m)| *x -= *m as f32);
            normalise(row);
        });
        let mut centres: Vec<f32> =
            (0..num_sets).flat_map(|s| directions[s * rows / num_sets * cols..][..cols].iter().copied()).collect();
        let mut of = vec![0u8; rows];
        for _ in 0..ROUNDS {
            of.par_iter_mut().zip(directions.par_chunks_exact(cols)).for_each(|(of, row)| *of = nearest(row, &centres));
            centres.par_chunks_exact_mut(cols).enumerate().for_each(|(s, centre)| {
                let members = || of.iter().zip(directions.chunks_exact(cols)).filter(|(of, _)| usize::from(**of) == s);
                // A set that lost all its rows keeps its centre.
                if members().next().is_some() {
                    centre.fill(0.0);
                    members().for_each(|(_, row)| centre.iter_mut().zip(row).for_each(|(c, x)| *c += x));
                    normalise(centre);
                }
            });
        }
        let rows_of = |s: usize| (0..rows).filter(|&r| usize::from(of[r]) == s).collect();
        let all = (0..num_sets).map(|s| Set { rows: rows_of(s), moments: Moments::new(cols, true), weight: [0.0; 2] }).collect();
        Self { all, of }
    }

    /// Adds inputs `x`, `[T, D]`, where `source` has its own in this slot.
    pub fn add(&mut self, x: &[f32], source: &mut Engine, slot: Slot) -> Result<(), EngineError> {
        let cols = source.weights().spec().width;
        let made_for = source.slot(slot).to_vec();
        let mut weights: Vec<Vec<f32>> = self.all.iter().map(|_| Vec::new()).collect();
        for made_for in made_for.chunks(TOKENS * cols) {
            let mut logits = source.logits(made_for)?;
            let each: Vec<Vec<f32>> = logits.par_chunks_exact_mut(self.of.len()).map(|row| self.weigh(row)).collect();
            each.iter().for_each(|of_token| weights.iter_mut().zip(of_token).for_each(|(w, x)| w.push(*x)));
        }
        for (set, weights) in self.all.iter_mut().zip(weights) {
            let weighted = x.chunks_exact(cols).zip(&weights).flat_map(|(row, w)| row.iter().map(|x| x * w.sqrt()));
            set.moments.add(&weighted.collect::<Vec<f32>>());
            for w in weights.into_iter().map(f64::from) {
                set.weight = [set.weight[0] + w, set.weight[1] + w * w];
            }
        }
        Ok(())
    }

    /// What a token counts for each set. Makes probabilities of its logits.
    fn weigh(&self, logits: &mut [f32]) -> Vec<f32> {
        softmax(logits);
        let mut weights = vec![0.0; self.all.len()];
        logits.iter().zip(&self.of).for_each(|(p, &set)| weights[usize::from(set)] += p * (1.0 - p));
        weights
    }
}

fn normalise(row: &mut [f32]) {
    let length = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    row.iter_mut().for_each(|x| *x /= length);
}

fn nearest(row: &[f32], centres: &[f32]) -> u8 {
    let dot = |centre: &[f32]| row.iter().zip(centre).map(|(x, c)| x * c).sum::<f32>();
    let mut best = (0, f32::NEG_INFINITY);
    for (s, centre) in centres.chunks_exact(row.len()).enumerate() {
        let near = dot(centre);
        if near > best.1 {
            best = (s as u8, near);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows `[260, 8]` that look in one of four directions by their number, of lengths that differ.
    fn head() -> Vec<f32> {
        let value = |r: usize, c: usize| if c == r % 4 { 1.0 + r as f32 / 64.0 } else { 0.01 * ((r * 7 + c * 3) % 5) as f32 };
        (0..260).flat_map(|r| (0..8).map(move |c| value(r, c))).collect()
    }

    /// Rows that look the same way are together, and every row is somewhere once. Fails if rows are not brought to one length, or a centre
    /// takes in another set's rows.
    #[test]
    fn rows_that_look_the_same_way_are_together() {
        let sets = Sets::divide(&head(), 8);
        assert_eq!(sets.all.len(), 4);
        let mut found: Vec<Vec<usize>> = sets.all.iter().map(|s| s.rows.clone()).collect();
        found.sort();
        let wanted: Vec<Vec<usize>> = (0..4).map(|d| (d..260).step_by(4).collect()).collect();
        assert_eq!(found, wanted);
        assert!(sets.all.iter().enumerate().all(|(s, set)| set.rows.iter().all(|&r| usize::from(sets.of[r]) == s)));
        assert!(Sets::divide(&head()[..8 * 127], 8).all.is_empty());
    }

    /// `p (1 - p)` of a sure token is nothing, of one of two equally likely a quarter. 1e-6 is the rounding of a handful of operations.
    /// Fails if `p` alone is summed.
    #[test]
    fn a_token_counts_for_what_is_open_at_it() {
        let sets = Sets::divide(&head(), 8);
        let weights = |likely: &[usize]| -> Vec<f32> {
            let mut logits = vec![-1000.0; 260];
            likely.iter().for_each(|&r| logits[r] = 3.0);
            let by_set = sets.weigh(&mut logits);
            (0..4).map(|direction| by_set[usize::from(sets.of[direction])]).collect()
        };
        let near = |a: Vec<f32>, b: [f32; 4]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near(weights(&[5]), [0.0; 4]));
        assert!(near(weights(&[5, 9]), [0.0, 0.5, 0.0, 0.0]));
        assert!(near(weights(&[5, 6]), [0.0, 0.25, 0.25, 0.0]));
    }

    /// As many equal weights as columns twice over count for half; no weight leaves the moments of all tokens, bit for bit.
    #[test]
    fn moments_are_trusted_as_far_as_tokens_go() {
        let mut all = Moments::new(2, true);
        all.add(&[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
        let mut own = Moments::new(2, true);
        own.add(&[2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0]);
        let mut set = Set { rows: vec![0], moments: own, weight: [0.0; 2] };
        assert_eq!(set.moments(&all), all);
        // Four tokens of weight 1 and K = 2: half of either; own energies 16, 0 in the units of 2, 2 are 4, 0.
        set.weight = [4.0, 4.0];
        assert_eq!(set.moments(&all).diagonal(), [3.0, 1.0]);
    }
}
