//! Error feedback: codes of one column are chosen knowing what earlier columns left behind.
//!
//! GPTQ (Frantar et al., arXiv 2210.17323) in its Cholesky form, with static groups: scales come from the untouched weights by
//! the weighted search of [`super::round`], so that columns can be visited in any order and none is stored. Where inputs are not those
//! that a matrix was made for, another matrix that makes up for that is quantized in its place. Columns go by
//! falling energy, in blocks of 128. Second moments are shrunk towards their diagonal where they were gathered from few tokens,
//! and a row that feedback did not improve keeps its plain rounding. Must not know where matrices or tokens come from.

pub use super::feed::{REFITS, STRETCH, SWEEPS};
use super::feed::{Search, pack, rows_mut};
use super::format::OwnedPacked;
use super::round::{self, RoundError, Rounding};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::prelude::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};
use rayon::prelude::*;

/// Share of the mean diagonal added to it before factorising.
pub const DAMPING: f64 = 0.01;
/// Damping beyond which the off-diagonals are given up; it grows tenfold at a time.
pub const MOST_DAMPING: f64 = 1.0;
/// Rows of a second-moment matrix that one task sums.
const PANEL: usize = 128;
/// Rows of a matrix that one task quantizes.
const TASK_ROWS: usize = 8 * OwnedPacked::STEP_ROWS;

/// Second moments of a matrix's inputs, `sum over tokens of w x x'`.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// `K`.
    cols: usize,
    /// Tokens summed.
    tokens: usize,
    /// `[K, K]`, the lower triangle valid; or `[K]`, the diagonal alone.
    sums: Vec<f32>,
    /// `sum of w (t - x) x'`, `[K, K]`, of inputs `t` that the matrix was made for; empty where they are `x`.
    drift: Vec<f32>,
    /// `sum of w s x'`, `[R, K]`, of outputs `s` that are missing whatever the matrix; empty where none are.
    debt: Vec<f32>,
    full: bool,
}

impl Moments {
    /// Nothing summed yet; `full` keeps the products of different columns too.
    pub fn new(cols: usize, full: bool) -> Self {
        Self {
            cols,
            tokens: 0,
            sums: vec![0.0; if full { cols * cols } else { cols }],
            drift: Vec::new(),
            debt: Vec::new(),
            full,
        }
    }

    /// Full ones of so many tokens that were summed elsewhere: `[K, K]`, the lower triangle valid.
    pub fn of(cols: usize, tokens: usize, sums: Vec<f32>) -> Self {
        debug_assert_eq!(sums.len(), cols * cols);
        Self { tokens, sums, ..Self::new(cols, true) }
    }

    /// Adds by how much inputs `x`, `[T, K]`, differ from those that the matrix was made for, `made_for`; rows weighted as those of
    /// [`Moments::add`]. Needs full moments.
    pub fn add_drift(&mut self, made_for: &[f32], x: &[f32]) {
        let short: Vec<f32> = made_for.iter().zip(x).map(|(t, x)| t - x).collect();
        add_products(&mut self.drift, &short, x, self.cols);
    }

    /// Adds outputs that are missing whatever the matrix, `[T, R]`, where its inputs are `x`, `[T, K]`; rows weighted alike. Needs
    /// full moments.
    pub fn add_debt(&mut self, missing: &[f32], x: &[f32]) {
        add_products(&mut self.debt, missing, x, self.cols);
    }

    /// The moments of uncorrelated inputs of equal energy, as if from this many tokens.
    pub fn identity(cols: usize, tokens: usize) -> Self {
        let mut one = Self::new(cols, false);
        one.sums.fill(1.0);
        one.tokens = tokens;
        one
    }

    /// Bytes of one of `cols` columns.
    pub fn bytes(cols: usize, full: bool) -> u64 {
        4 * (if full { cols * cols } else { cols }) as u64
    }

    /// Bytes of drift, and of debt to `rows` outputs.
    pub fn owed_bytes(cols: usize, rows: usize) -> u64 {
        4 * (cols * (cols + rows)) as u64
    }

    /// Tokens summed.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// `K`.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether the products of different columns are kept.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// `[K, K]`, the lower triangle valid; or `[K]`, the diagonal alone.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    /// Adds inputs `x`, `[T, K]`, each row already times the square root of its weight. Sums are `f32` of one order whatever the
    /// number of threads.
    pub fn add(&mut self, x: &[f32]) {
        if self.cols == 0 {
            return;
        }
        let (k, n) = (self.cols, x.len() / self.cols);
        self.tokens += n;
        if !self.full {
            for row in x.chunks_exact(k) {
                self.sums.iter_mut().zip(row).for_each(|(s, v)| *s += v * v);
            }
            return;
        }
        let x = MatRef::from_row_major_slice(x, n, k);
        self.sums.par_chunks_mut(PANEL * k).enumerate().for_each(|(i, panel)| {
            let rows = panel.len() / k;
            let (first, end) = (i * PANEL, i * PANEL + rows);
            let dst = rows_mut(panel, rows, end, k);
            matmul(dst, Accum::Add, x.subcols(first, rows).transpose(), x.subcols(0, end), 1.0f32, Par::Seq);
        });
    }

    /// Adds the sums of `other`, of as many columns and as full, brought to a mean energy of 1.
    pub fn add_normalised(&mut self, other: &Self) {
        let energy: f64 = other.diagonal().iter().map(|d| f64::from(*d)).sum();
        let factor = if energy > 0.0 { (self.cols as f64 / energy) as f32 } else { 0.0 };
        self.tokens += other.tokens;
        self.sums.iter_mut().zip(&other.sums).for_each(|(s, o)| *s += factor * o);
    }

    /// A mixture of these sums, so large a share, and those of `all`, of as many columns and as full, in its units and for its tokens.
    pub fn mixed(&self, all: &Self, share: f64) -> Self {
        let energy = |m: &Self| m.diagonal().iter().map(|d| f64::from(*d)).sum::<f64>();
        let (own, common) = (energy(self), energy(all));
        let share = if own > 0.0 { share } else { 0.0 };
        let (of_own, of_all) = ((share * common / own.max(f64::MIN_POSITIVE)) as f32, (1.0 - share) as f32);
        let sums = self.sums.iter().zip(&all.sums).map(|(s, a)| of_own * s + of_all * a).collect();
        Self { cols: all.cols, tokens: all.tokens, sums, drift: Vec::new(), debt: Vec::new(), full: all.full }
    }

    /// `sum of w x_i^2`, `[K]`.
    pub fn diagonal(&self) -> Vec<f32> {
        let step = if self.full { self.cols + 1 } else { 1 };
        self.sums.iter().step_by(step).copied().collect()
    }
}

/// Adds `left' right` to `sums`, `[L, K]`; `left` is `[T, L]`, `right` is `[T, K]`.
fn add_products(sums: &mut Vec<f32>, left: &[f32], right: &[f32], k: usize) {
    let n = right.len().checked_div(k).unwrap_or(0);
    if n == 0 {
        return;
    }
    sums.resize(left.len() / n * k, 0.0);
    let (left, right) = (MatRef::from_row_major_slice(left, n, left.len() / n), MatRef::from_row_major_slice(right, n, k));
    sums.par_chunks_mut(PANEL * k).enumerate().for_each(|(i, panel)| {
        let rows = panel.len() / k;
        let dst = MatMut::from_row_major_slice_mut(panel, rows, k);
        matmul(dst, Accum::Add, left.subcols(i * PANEL, rows).transpose(), right, 1.0f32, Par::Seq);
    });
}

/// Why second moments are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedbackError {
    /// Activations overflowed.
    #[error("activations are not finite")]
    NonFinite,
    /// The weights cannot be rounded.
    #[error(transparent)]
    Round(#[from] RoundError),
}

impl FeedbackError {
    /// The same where the rows given are others of a larger matrix.
    pub fn of_rows(self, place: impl Fn(usize) -> usize) -> Self {
        match self {
            FeedbackError::Round(e) => FeedbackError::Round(e.of_rows(place)),
            other => other,
        }
    }
}

/// What the diagonal of second moments and the number of tokens say.
#[derive(Clone, Debug, PartialEq)]
pub struct Basis {
    /// Columns in the order in which codes are chosen: by falling energy.
    pub order: Vec<usize>,
    /// What the search weighs errors with, `[K]`, mean 1. A column that no token used has the mean energy.
    pub energy: Vec<f32>,
    /// Mean of the diagonal: turns losses in units of `energy` into weighted squares of outputs.
    pub mean: f64,
    /// What products of different columns are multiplied with, in units of the mean: `n / (n + 2 K)` for `n` tokens, so that none
    /// remain of no tokens, and then feedback is rounding.
    pub shrink: f64,
}

impl Basis {
    /// Of `diagonal`, `[K]`, summed over so many tokens.
    pub fn of(diagonal: &[f32], tokens: usize) -> Result<Self, FeedbackError> {
        if !diagonal.iter().all(|x| x.is_finite()) {
            return Err(FeedbackError::NonFinite);
        }
        let k = diagonal.len();
        let alive = diagonal.iter().filter(|d| **d > 0.0).count();
        let mean = match diagonal.iter().map(|d| f64::from(*d)).sum::<f64>() / alive.max(1) as f64 {
            m if m > 0.0 => m,
            _ => 1.0,
        };
        let energy: Vec<f32> = diagonal.iter().map(|&d| if d > 0.0 { (f64::from(d) / mean) as f32 } else { 1.0 }).collect();
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by(|&a, &b| energy[b].total_cmp(&energy[a]));
        let n = tokens as f64;
        Ok(Self { order, energy, mean, shrink: n / (n + 2.0 * k as f64) / mean })
    }
}

/// Second moments made ready: factorised once, used for every matrix with the same inputs.
pub struct Feedback {
    pub(super) cols: usize,
    /// Columns in the order in which codes are chosen.
    pub(super) order: Vec<usize>,
    /// What the search weighs errors with, `[K]`, mean 1.
    energy: Vec<f32>,
    /// Damped and shrunk moments, `[K, K]`; or their diagonal, `[K]`.
    pub(super) used: Vec<f32>,
    /// Absent where only energies are known, or nothing is correlated.
    factor: Option<Factor>,
    /// `drift H^-1`, `[K, K]`, or empty.
    drift: Vec<f32>,
    /// `debt H^-1`, `[R, K]`, or empty.
    debt: Vec<f32>,
    /// What turns losses in units of `used` into weighted squares of outputs.
    unit: f64,
    /// Damping that was needed, as a share of the mean diagonal.
    pub damping: f64,
}

/// `H^-1 = U' U` in the order in which codes are chosen.
pub(super) struct Factor {
    /// `U / diag(U)`, `[K, K]`.
    pub upper: Vec<f32>,
    /// `1 / diag(U)^2`, what a squared rounding error costs once later columns have made up for what they can.
    pub weight: Vec<f32>,
    /// The same by column of the matrix.
    pub energy: Vec<f32>,
}

/// Squared output error of some rows, `tr(dW H dW')` in units of the inputs' weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Loss {
    /// Of the weighted search alone.
    pub before: f64,
    /// With error feedback; the same where there is none.
    pub after: f64,
    /// `tr(W H W')`, what the errors are relative to.
    pub whole: f64,
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        self.before += other.before;
        self.after += other.after;
        self.whole += other.whole;
    }
}

impl Feedback {
    /// Shrinks, damps and factorises.
    pub fn new(moments: &Moments) -> Result<Self, FeedbackError> {
        let k = moments.cols;
        if ![&moments.sums, &moments.drift, &moments.debt].iter().all(|sums| sums.iter().all(|x| x.is_finite())) {
            return Err(FeedbackError::NonFinite);
        }
        let Basis { order, energy, mean, shrink } = Basis::of(&moments.diagonal(), moments.tokens)?;
        let mut out = Self {
            cols: k,
            order,
            used: energy.clone(),
            energy,
            factor: None,
            drift: Vec::new(),
            debt: Vec::new(),
            unit: mean,
            damping: 0.0,
        };
        let correlated = |i: usize| i % k < i / k && moments.sums[i] != 0.0;
        if moments.full && moments.tokens > 0 && (0..k * k).any(correlated) {
            out.factorise(moments, shrink);
        }
        Ok(out)
    }

    fn factorise(&mut self, Moments { sums, drift, debt, .. }: &Moments, scale: f64) {
        let k = self.cols;
        let (order, energy) = (&self.order, &self.energy);
        let off = |i: usize, j: usize| f64::from(sums[i.max(j) * k + i.min(j)]) * scale;
        let mut damping = DAMPING;
        // Backwards, so that the lower factor of the reversed matrix is the upper factor U^-1 of the matrix.
        let found = loop {
            let at = |i: usize, j: usize| match (order[k - 1 - i], order[k - 1 - j]) {
                (a, b) if a == b => f64::from(energy[a]) + damping,
                (a, b) => off(a, b),
            };
            if let Ok(llt) = Mat::from_fn(k, k, at).llt(Side::Lower) {
                break Some(llt);
            }
            damping *= 10.0;
            if damping > MOST_DAMPING {
                break None;
            }
        };
        self.damping = damping;
        let Some(llt) = found else { return };
        let order = &self.order;
        let times_inverse = |products: &[f32]| {
            let rows = products.len() / k;
            let right = Mat::from_fn(k, rows, |i, j| f64::from(products[j * k + order[k - 1 - i]]) * scale);
            let solution = llt.solve(&right);
            let mut found = vec![0.0; products.len()];
            (0..k).for_each(|i| (0..rows).for_each(|j| found[j * k + order[k - 1 - i]] = solution[(i, j)] as f32));
            found
        };
        (self.drift, self.debt) = (times_inverse(drift), times_inverse(debt));
        let mut inverse = Mat::<f64>::zeros(k, k);
        invert_lower_triangular(inverse.as_mut(), llt.L(), Par::Seq);
        let mut factor = Factor { upper: vec![0.0; k * k], weight: vec![0.0; k], energy: vec![0.0; k] };
        for i in 0..k {
            let own = inverse[(k - 1 - i, k - 1 - i)];
            factor.weight[i] = (1.0 / (own * own)) as f32;
            factor.energy[order[i]] = factor.weight[i];
            for j in i + 1..k {
                factor.upper[i * k + j] = (inverse[(k - 1 - i, k - 1 - j)] / own) as f32;
            }
        }
        self.factor = Some(factor);
        self.used = (0..k * k)
            .map(|i| match (i / k, i % k) {
                (a, b) if a == b => (f64::from(self.energy[a]) + damping) as f32,
                (a, b) => off(a, b) as f32,
            })
            .collect();
    }

    /// `diag(d H d')` for rows `d`, `[n, K]`.
    fn quadratic(&self, rows: &[f32]) -> Vec<f64> {
        let k = self.cols;
        if self.used.len() == k {
            let one = |row: &[f32]| row.iter().zip(&self.used).map(|(d, h)| f64::from(d * d * h)).sum();
            return rows.chunks_exact(k).map(one).collect();
        }
        let n = rows.len() / k;
        let mut product = vec![0.0f32; rows.len()];
        let (d, h) = (MatRef::from_row_major_slice(rows, n, k), MatRef::from_row_major_slice(&self.used, k, k));
        matmul(MatMut::from_row_major_slice_mut(&mut product, n, k), Accum::Replace, d, h, 1.0f32, Par::Seq);
        let dot = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
        rows.chunks_exact(k).zip(product.chunks_exact(k)).map(dot).collect()
    }

    /// The matrix that comes nearest, on the inputs it gets, to what `src`, `[R, K]`, gave on those it was made for and to the
    /// outputs that are missing: `src + (src drift + debt) H^-1`, by ridge regression.
    pub fn aim(&self, src: &[f32]) -> Vec<f32> {
        let k = self.cols;
        let mut aim = src.to_vec();
        // A value that is no number is left for rounding to find where it is.
        if !src.iter().all(|x| x.is_finite()) {
            return aim;
        }
        aim.iter_mut().zip(&self.debt).for_each(|(w, d)| *w += d);
        if !self.drift.is_empty() {
            let tasks = aim.par_chunks_mut(TASK_ROWS * k).zip(src.par_chunks(TASK_ROWS * k));
            tasks.for_each(|(aim, src)| {
                let rows = src.len() / k;
                let (src, drift) = (MatRef::from_row_major_slice(src, rows, k), MatRef::from_row_major_slice(&self.drift, k, k));
                matmul(MatMut::from_row_major_slice_mut(aim, rows, k), Accum::Add, src, drift, 1.0f32, Par::Seq);
            });
        }
        aim
    }

    /// Quantizes a matrix `src`, `[rows, K]`, in parallel over runs of rows: what would best do its work on these inputs, where they
    /// are not those it was made for. Losses are relative to that.
    ///
    /// # Panics
    /// If the format does not fit `K`.
    pub fn quantize(&self, src: &[f32], how: &Rounding) -> Result<(OwnedPacked, Loss), FeedbackError> {
        let src = self.aim(src);
        let tasks: Vec<(OwnedPacked, Loss)> = src
            .par_chunks(TASK_ROWS * self.cols)
            .enumerate()
            .map(|(i, src)| self.quantize_rows(src, how).map_err(|e| e.of_rows(|row| i * TASK_ROWS + row)))
            .collect::<Result<_, _>>()?;
        let mut out = OwnedPacked::zeroed(0, self.cols, how.format(), how.scale_dtype);
        let mut loss = Loss::default();
        for (rows, of_rows) in &tasks {
            out.append(rows);
            loss += *of_rows;
        }
        Ok((out, loss))
    }

    /// Quantizes rows `src`, `[n, K]`.
    fn quantize_rows(&self, src: &[f32], how: &Rounding) -> Result<(OwnedPacked, Loss), FeedbackError> {
        let k = self.cols;
        let mut out = round::quantize_rows(src, k, Some(&self.energy), how)?;
        let group = how.group.columns(k);
        let mut rounded = vec![0.0; src.len()];
        out.view().dequantize_rows(&mut rounded, 0);
        let difference: Vec<f32> = src.iter().zip(&rounded).map(|(a, b)| a - b).collect();
        let (before, whole) = (self.quadratic(&difference), self.quadratic(src));
        let mut loss = Loss { before: before.iter().sum(), after: before.iter().sum(), whole: whole.iter().sum() };
        if let Some(factor) = &self.factor {
            let found = Search { feedback: self, factor, src, how, group }.run(out.view().levels())?;
            loss.after = 0.0;
            for (r, before) in before.iter().enumerate() {
                // Only where correlations are such that feedback cannot help does rounding win.
                if found.losses[r] < *before {
                    let row_bytes = k * how.bits.count() / 8;
                    pack(&mut out.words[r * row_bytes..(r + 1) * row_bytes], &found.codes[r * k..(r + 1) * k], how.bits);
                    let levels = &found.grid[r * k / group..(r + 1) * k / group];
                    levels.iter().enumerate().for_each(|(g, level)| out.set_level(r, g, *level));
                }
                loss.after += found.losses[r].min(*before);
            }
        }
        for part in [&mut loss.before, &mut loss.after, &mut loss.whole] {
            *part *= self.unit;
        }
        Ok((out, loss))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::format::{Bits, Group, Zero};
    use crate::quant::round::Method;
    use crate::tensor::Dtype;

    /// `[n, cols]` standard normal values by Box and Muller over a linear congruence, the same everywhere.
    fn normal(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
        };
        (0..n).map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos()).collect()
    }

    /// Inputs whose neighbours are correlated and whose energies differ.
    fn inputs(tokens: usize, cols: usize) -> Vec<f32> {
        let mut x = normal(tokens * cols, 7);
        for row in x.chunks_exact_mut(cols) {
            for i in 1..cols {
                row[i] += 0.8 * row[i - 1];
            }
            row.iter_mut().enumerate().for_each(|(i, v)| *v *= 1.0 + (i * 7 % 13) as f32 / 4.0);
        }
        x
    }

    fn how(bits: Bits, group: usize) -> Rounding {
        let (group, zero) = (Group::Of(group), Zero::Middle);
        Rounding { bits, group, zero, method: Method::Search, scale_dtype: Dtype::BF16, positive_scales: false }
    }

    fn asymmetric(how: Rounding) -> Rounding {
        Rounding { zero: Zero::Point, ..how }
    }

    fn moments(x: &[f32], cols: usize, full: bool) -> Moments {
        let mut m = Moments::new(cols, full);
        x.chunks(cols * 100).for_each(|x| m.add(x));
        m
    }

    /// Sums of 1000 products in `f32` against `f64`: a relative error of 1e-5 is a hundred roundings. Fails if the lower triangle
    /// has a hole at a panel's edge.
    #[test]
    fn second_moments_are_sums_of_products() {
        let (n, k) = (1000, 300);
        let x = inputs(n, k);
        let m = moments(&x, k, true);
        for (i, j) in [(0, 0), (127, 3), (128, 127), (128, 128), (299, 0), (299, 256), (299, 299)] {
            let sum: f64 = x.chunks_exact(k).map(|r| f64::from(r[i]) * f64::from(r[j])).sum();
            let size: f64 = x.chunks_exact(k).map(|r| (f64::from(r[i]) * f64::from(r[j])).abs()).sum();
            assert!((f64::from(m.sums[i * k + j]) - sum).abs() < 1e-5 * size, "{i} {j}");
        }
        assert_eq!(m.tokens(), n);
    }

    #[test]
    fn uncorrelated_inputs_of_equal_energy_give_plain_search() {
        let (rows, k) = (9, 256);
        let w = normal(rows * k, 1);
        for (bits, group) in [(Bits::Four, 128), (Bits::Four, 32), (Bits::Eight, 64)] {
            let mut m = Moments::new(k, true);
            m.sums.iter_mut().step_by(k + 1).for_each(|d| *d = 3.0);
            m.tokens = 10_000;
            for how in [how(bits, group), asymmetric(how(bits, group))] {
                let (found, loss) = Feedback::new(&m).unwrap().quantize(&w, &how).unwrap();
                assert_eq!(found, round::quantize_rows(&w, k, None, &how).unwrap());
                assert!((loss.after / loss.before - 1.0).abs() < 1e-6);
            }
        }
    }

    /// On moments with no correlation but one too small to matter, feedback itself runs and carries nothing: on the scales of the
    /// plain search its codes are those of the search, bit for bit. Fails if the order is not undone before packing.
    #[test]
    fn feedback_without_correlation_is_rounding() {
        let (rows, k, group) = (7, 256, 128);
        let w = normal(rows * k, 2);
        let mut m = Moments::new(k, true);
        m.sums.iter_mut().step_by(k + 1).for_each(|d| *d = 1.0);
        m.sums[k] = 1e-30;
        m.tokens = 1 << 20;
        let feedback = Feedback::new(&m).unwrap();
        let factor = feedback.factor.as_ref().unwrap();
        for how in [how(Bits::Four, group), asymmetric(how(Bits::Four, group))] {
            let plain = round::quantize_rows(&w, k, None, &how).unwrap();
            let found = Search { feedback: &feedback, factor, src: &w, how: &how, group }.feed(plain.view().levels());
            let mut words = vec![0; plain.words.len()];
            for (row, codes) in words.chunks_exact_mut(k / 2).zip(found.codes.chunks_exact(k)) {
                pack(row, codes, Bits::Four);
            }
            assert_eq!(words, plain.words);
        }
    }

    /// `tr(dW H dW')` of what was packed, computed in `f64` from the packed words, against the loss that was reported; a sum of
    /// 500 000 products in `f32` is good to 1e-4. Fails if a row's codes and scales come from different tries.
    #[test]
    fn the_reported_loss_is_that_of_the_packed_words_and_never_above_rounding() {
        let (rows, k) = (70, 256);
        let w = normal(rows * k, 3);
        for tokens in [40, 300, 4000] {
            let feedback = Feedback::new(&moments(&inputs(tokens, k), k, true)).unwrap();
            let plain = Feedback { factor: None, ..Feedback::new(&moments(&inputs(tokens, k), k, true)).unwrap() };
            let symmetric = [how(Bits::Four, 128), how(Bits::Four, 32), how(Bits::Eight, 128)];
            for how in symmetric.into_iter().chain(symmetric.map(asymmetric)) {
                let (found, loss) = feedback.quantize(&w, &how).unwrap();
                let (_, rounded) = plain.quantize(&w, &how).unwrap();
                let mut values = vec![0.0; rows * k];
                found.view().dequantize_rows(&mut values, 0);
                let difference: Vec<f32> = w.iter().zip(&values).map(|(a, b)| a - b).collect();
                let mut sum = 0.0;
                for d in difference.chunks_exact(k) {
                    for i in 0..k {
                        let row: f64 = (0..k).map(|j| f64::from(feedback.used[i * k + j]) * f64::from(d[j])).sum();
                        sum += f64::from(d[i]) * row;
                    }
                }
                let sum = sum * feedback.unit;
                assert!((sum / loss.after - 1.0).abs() < 1e-3, "{tokens} {}: {sum} {}", how.format(), loss.after);
                assert!(loss.after <= rounded.before && loss.before == rounded.before);
            }
        }
    }

    /// Half of the squared error can be fed back where neighbours correlate by 0.8; measured 0.53 to 0.6 of rounding's. Fails if
    /// errors are carried with the wrong sign, which leaves more than rounding and so exactly rounding.
    #[test]
    fn feedback_uses_what_inputs_have_in_common() {
        let (rows, k) = (64, 256);
        let w = normal(rows * k, 4);
        let feedback = Feedback::new(&moments(&inputs(8000, k), k, true)).unwrap();
        let (_, loss) = feedback.quantize(&w, &how(Bits::Four, 128)).unwrap();
        assert!(loss.after < 0.7 * loss.before, "{}", loss.after / loss.before);
    }

    /// Moments of no token have only the energies they were given: feedback shrinks to the weighted search.
    #[test]
    fn without_tokens_only_energies_count() {
        let (rows, k) = (8, 256);
        let w = normal(rows * k, 5);
        let mut m = moments(&inputs(500, k), k, true);
        m.tokens = 0;
        let (found, _) = Feedback::new(&m).unwrap().quantize(&w, &how(Bits::Four, 64)).unwrap();
        let weighted = Feedback::new(&moments(&inputs(500, k), k, false)).unwrap();
        let (plain, _) = weighted.quantize(&w, &how(Bits::Four, 64)).unwrap();
        assert_eq!(found, plain);
    }

    /// The aim leaves less error than the matrix itself: 0.74 of it measured where inputs drifted by noise, most of which no map takes
    /// out, 0.008 where outputs are missing that a linear map of the inputs makes, which is shrinkage and damping. With nothing amiss it
    /// is the matrix, bit for bit. Fails if a product is transposed, or a sign is wrong.
    #[test]
    fn the_aim_makes_up_for_what_inputs_and_outputs_lack() {
        let (rows, k, tokens) = (24, 96, 4000);
        let (w, lacking, noise) = (normal(rows * k, 8), normal(rows * k, 9), normal(tokens * k, 10));
        let product = |x: &[f32], w: &[f32]| -> Vec<f32> {
            let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
            x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w))).collect()
        };
        let made_for = inputs(tokens, k);
        let drifted: Vec<f32> = made_for.iter().zip(&noise).map(|(t, n)| t + n).collect();
        let ratio = |x: &[f32], missing: &[f32]| {
            let mut m = moments(x, k, true);
            m.add_drift(&made_for, x);
            m.add_debt(missing, x);
            let aim = Feedback::new(&m).unwrap().aim(&w);
            let wanted = product(&made_for, &w);
            let error = |w: &[f32]| -> f64 {
                let each = product(x, w).into_iter().zip(&wanted).zip(missing);
                each.map(|((y, wanted), missing)| f64::from(y - wanted - missing).powi(2)).sum()
            };
            (error(&aim) / error(&w), aim)
        };
        let none = vec![0.0; tokens * rows];
        let (_, aim) = ratio(&made_for, &none);
        assert_eq!(aim, w);
        let (of_drift, _) = ratio(&drifted, &none);
        let (of_debt, _) = ratio(&made_for, &product(&made_for, &lacking));
        assert!(of_drift < 0.8 && of_debt < 0.02, "{of_drift} {of_debt}");
    }

    /// Second moments of fewer tokens than columns are singular; shrinking and damping make them usable at the first try.
    #[test]
    fn few_tokens_need_no_more_damping() {
        let feedback = Feedback::new(&moments(&inputs(20, 256), 256, true)).unwrap();
        assert_eq!(feedback.damping, DAMPING);
        assert!(Feedback::new(&moments(&[f32::MAX; 256], 256, true)).is_err());
    }
}
