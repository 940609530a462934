//! Rows of a head by what they compete for: an error of a logit counts where its token is likely, and tokens that are likely at the
//! same places can share second moments. Must not know where logits come from.

use super::format::OwnedPacked;
use super::gptq::{Feedback, FeedbackError, Loss, Moments};
use super::round::Rounding;
use rayon::prelude::*;

/// Most sets.
const SETS: usize = 16;
/// Most bytes of all their moments. A constant, since codes must not depend on how much memory there is.
const MOST_BYTES: u64 = 1 << 30;
/// Rows a set has at least on average.
const LEAST_ROWS: usize = 64;
/// Rounds of moving rows to the set whose mean they are nearest to.
const ROUNDS: usize = 10;

/// Rows that share second moments.
pub struct Set {
    /// In rising order.
    pub rows: Vec<usize>,
    /// Sum of the weights of tokens, and of their squares.
    weight: [f64; 2],
}

impl Set {
    /// Counts tokens of these weights.
    pub fn count(&mut self, weights: impl Iterator<Item = f32>) {
        for w in weights.map(f64::from) {
            self.weight = [self.weight[0] + w, self.weight[1] + w * w];
        }
    }

    /// Its moments as far as its tokens tell: `own`, of inputs a token of which is weighted by the sum over these rows of `p (1 - p)`, what a
    /// squared error of a logit adds to twice the divergence where the others are right, mixed with those of all tokens by `n / (n + 2 K)`, `n`
    /// being the equal weights that would be as certain.
    pub fn moments(&self, own: &Moments, all: &Moments) -> Moments {
        let [sum, squares] = self.weight;
        let n = if squares > 0.0 { sum * sum / squares } else { 0.0 };
        own.mixed(all, n / (n + 2.0 * all.cols() as f64))
    }
}

/// The rows of a head, divided by the directions they look in.
#[derive(Default)]
pub struct Sets {
    /// Each with rows of its own.
    pub all: Vec<Set>,
    /// The set of each row.
    pub of: Vec<u8>,
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
        let all = (0..num_sets).map(|s| Set { rows: rows_of(s), weight: [0.0; 2] }).collect();
        Self { all, of }
    }

    /// What a token of these probabilities, `[V]`, counts for each set.
    pub fn weigh(&self, probabilities: &[f32]) -> Vec<f32> {
        let mut weights = vec![0.0; self.all.len()];
        probabilities.iter().zip(&self.of).for_each(|(p, &set)| weights[usize::from(set)] += p * (1.0 - p));
        weights
    }

    /// One matrix of `cols` columns of what was chosen for the rows of each set, in order.
    pub fn join(&self, parts: &[(OwnedPacked, Loss)], cols: usize, how: &Rounding) -> (OwnedPacked, Loss) {
        let mut out = OwnedPacked::zeroed(self.of.len(), cols, how.format(), how.scale_dtype);
        let mut loss = Loss::default();
        for (set, (packed, of_rows)) in self.all.iter().zip(parts) {
            out.place(packed, &set.rows);
            loss += *of_rows;
        }
        (out, loss)
    }

    /// Quantizes what would best do the work of `src`, `[R, K]`, by all its inputs, the rows of a set weighed by the set's own moments.
    pub fn quantize(
        &self,
        all: &Feedback,
        each: &[Feedback],
        src: &[f32],
        how: &Rounding,
    ) -> Result<(OwnedPacked, Loss), FeedbackError> {
        let aim = all.aim(src);
        let cols = src.len() / self.of.len().max(1);
        let parts = self.all.iter().zip(each).map(|(set, feedback)| {
            let own: Vec<f32> = set.rows.iter().flat_map(|&r| aim[r * cols..(r + 1) * cols].iter().copied()).collect();
            feedback.quantize(&own, how).map_err(|e| e.of_rows(|row| set.rows[row]))
        });
        Ok(self.join(&parts.collect::<Result<Vec<_>, _>>()?, cols, how))
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
    use crate::quant::format::{Bits, Group, Zero};
    use crate::quant::round::Method;
    use crate::tensor::Dtype;

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
            let mut probabilities = vec![0.0; 260];
            likely.iter().for_each(|&r| probabilities[r] = 1.0 / likely.len() as f32);
            let by_set = sets.weigh(&probabilities);
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
        let mut set = Set { rows: vec![0], weight: [0.0; 2] };
        assert_eq!(set.moments(&own, &all), all);
        // Four tokens of weight 1 and K = 2: half of either; own energies 16, 0 in the units of 2, 2 are 4, 0.
        set.count([1.0; 4].into_iter());
        assert_eq!(set.moments(&own, &all).diagonal(), [3.0, 1.0]);
    }

    /// Rows come back to their places with codes, scales and zero points: where sets know no more than all tokens do, they change nothing,
    /// bit for bit. Fails if a row is put a place off, or the matrix is quantized in place of its aim.
    #[test]
    fn sets_that_know_nothing_change_nothing() {
        let (rows, k, tokens) = (200, 64, 300);
        let value = |i: usize| ((i * 7919 + i * i % 613) % 1009) as f32 / 504.5 - 1.0;
        let head: Vec<f32> = (0..rows * k).map(value).collect();
        let x: Vec<f32> = (0..tokens * k).map(|i| value(i + 5) + value(i / k)).collect();
        let mut all = Moments::new(k, true);
        all.add(&x);
        all.add_drift(&x.iter().map(|v| 1.1 * v).collect::<Vec<f32>>(), &x);
        let feedback = Feedback::new(&all).unwrap();
        let sets = Sets::divide(&head, k);
        assert!(sets.all.len() > 1);
        let unseen = Moments::new(k, true);
        let each: Vec<_> = sets.all.iter().map(|set| Feedback::new(&set.moments(&unseen, &all)).unwrap()).collect();
        for zero in [Zero::Middle, Zero::Point] {
            let (bits, group, scale_dtype) = (Bits::Four, Group::Of(32), Dtype::BF16);
            let how = Rounding { bits, group, zero, method: Method::Search, scale_dtype, positive_scales: false };
            let (whole, _) = feedback.quantize(&head, &how).unwrap();
            let (parts, _) = sets.quantize(&feedback, &each, &head, &how).unwrap();
            assert_eq!(parts, whole);
        }
    }
}
