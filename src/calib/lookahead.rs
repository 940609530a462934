//! Which experts the next router will choose, told from what this one sees: a ridge regression of its logits.
//!
//! Without data the best guess is the next router on this one's input (Eliseev and Mazur, arXiv 2312.17238, section 3.2). What it misses is
//! what attention and experts between the two add, and the part of that which is linear in the input is learned: with rows `x` of inputs and
//! `y` of logits, `B` the next router moved to this one's norm, the map is `B + R' X (X' X + lambda I)^-1` with `R = Y - X B'`, and lambda
//! the mean `|x|^2`. Few rows leave `B` as it is.

use crate::artifact::weights::Weights;
use crate::engine::EngineError;
use crate::ids::{LayerId, Role, TensorId};
use crate::tensor::{self, Dtype};
use faer::linalg::matmul::matmul;
use faer::prelude::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};
use rayon::prelude::*;

/// A linear map to logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// `[E, D]`.
    pub matrix: Vec<f32>,
    /// Added to the logits, `[E]`.
    pub shift: Vec<f32>,
}

impl Map {
    /// The router of layer `to` as a map of the input of the router of layer `from`, both behind a norm of their own layer.
    pub fn next_router(weights: &Weights, from: u32, to: u32) -> Result<Self, EngineError> {
        let read = |l: u32, role: Role, bias: bool| {
            let id = TensorId::layer(LayerId(l), role);
            let weight = weights.get(if bias { id.bias() } else { id });
            weight.map(|w| w.to_f32()).transpose()
        };
        let router = read(to, Role::Router, false)?.unwrap_or_default();
        let gain = |l| read(l, Role::FfnNorm, false).map(Option::unwrap_or_default);
        let (here, there) = (gain(from)?, gain(to)?);
        let width = here.len().max(1);
        let ratio: Vec<f32> = here.iter().zip(&there).map(|(h, t)| if *h == 0.0 { 0.0 } else { t / h }).collect();
        let none = || vec![0.0; width];
        let (before, after) =
            (read(from, Role::FfnNorm, true)?.unwrap_or_else(none), read(to, Role::FfnNorm, true)?.unwrap_or_else(none));
        let moved: Vec<f32> = after.iter().zip(&before).zip(&ratio).map(|((a, b), r)| a - b * r).collect();
        let shift = router.chunks_exact(width).map(|row| row.iter().zip(&moved).map(|(w, m)| w * m).sum()).collect();
        let matrix = router.chunks_exact(width).flat_map(|row| row.iter().zip(&ratio).map(|(w, r)| w * r)).collect();
        Ok(Self { matrix, shift })
    }

    /// The bytes of the matrix in bf16, and the map that they are.
    pub fn rounded(mut self) -> (Vec<u8>, Self) {
        let mut bytes = vec![0; Dtype::BF16.bytes(self.matrix.len())];
        tensor::encode(&mut bytes, Dtype::BF16, &self.matrix);
        self.matrix.iter_mut().for_each(|w| *w = tensor::round_to(Dtype::BF16, *w));
        (bytes, self)
    }

    /// How many of the choices `ids`, `[T, K]`, are among the K highest logits of the inputs `x`, `[T, D]`; of equal ones the first.
    pub fn named(&self, x: &[f32], ids: &[u16], top_k: usize) -> usize {
        let (e, d) = (self.shift.len(), self.matrix.len() / self.shift.len().max(1));
        let of_row = |(x, ids): (&[f32], &[u16])| {
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
            let logits: Vec<f32> = self.matrix.chunks_exact(d).zip(&self.shift).map(|(row, s)| dot(row) + s).collect();
            let mut order: Vec<usize> = (0..e).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order[..top_k].iter().filter(|&&o| ids.contains(&(o as u16))).count()
        };
        x.par_chunks_exact(d).zip(ids.par_chunks_exact(top_k)).map(of_row).sum()
    }
}

/// Columns of the sums that a thread adds to at a time.
const COLUMNS: usize = 128;

/// Sums of a regression.
pub struct Regression {
    prior: Map,
    /// `B'`, `[D, E]`.
    base: Mat<f64>,
    /// `X' X`, of which the lower half is kept, and `X' R`; column by column.
    squares: Vec<f64>,
    products: Vec<f64>,
    num_rows: usize,
}

impl Regression {
    /// Nothing seen yet.
    pub fn new(prior: Map) -> Self {
        let e = prior.shift.len();
        let d = prior.matrix.len() / e.max(1);
        let base = Mat::from_fn(d, e, |i, j| f64::from(prior.matrix[j * d + i]));
        Self { prior, base, squares: vec![0.0; d * d], products: vec![0.0; d * e], num_rows: 0 }
    }

    /// What it starts from.
    pub fn prior(&self) -> &Map {
        &self.prior
    }

    /// Adds inputs `x`, `[T, D]`, and logits `y`, `[T, E]`.
    pub fn add(&mut self, x: &[f32], y: &[f32]) {
        let (d, e) = (self.base.nrows(), self.base.ncols());
        let rows = x.len() / d.max(1);
        let x = Mat::from_fn(rows, d, |i, j| f64::from(x[i * d + j]));
        let mut rest = Mat::from_fn(rows, e, |i, j| f64::from(y[i * e + j]));
        matmul(rest.as_mut(), Accum::Add, x.as_ref(), self.base.as_ref(), -1.0, Par::Seq);
        let add = |to: &mut [f64], from: MatRef<'_, f64>, first: usize, top: usize| {
            let cols = to.len() / d;
            let to = MatMut::from_column_major_slice_mut(to, d, cols).subrows_mut(top, d - top);
            let x = x.transpose().subrows(top, d - top);
            matmul(to, Accum::Add, x, from.subcols(first, cols), 1.0, Par::Seq);
        };
        let squares = self.squares.par_chunks_mut(d * COLUMNS).enumerate();
        squares.for_each(|(i, to)| add(to, x.as_ref(), i * COLUMNS, i * COLUMNS));
        let products = self.products.par_chunks_mut(d * COLUMNS).enumerate();
        products.for_each(|(i, to)| add(to, rest.as_ref(), i * COLUMNS, 0));
        self.num_rows += rows;
    }

    /// The map; what was known before if nothing was seen, or nothing that is a number.
    pub fn solve(mut self) -> Map {
        let (d, e) = (self.base.nrows(), self.base.ncols());
        let diagonal = || (0..d).map(|i| i * d + i);
        let lambda = diagonal().map(|i| self.squares[i]).sum::<f64>() / self.num_rows.max(1) as f64;
        if !(lambda > 0.0 && lambda.is_finite()) {
            return self.prior;
        }
        diagonal().for_each(|i| self.squares[i] += lambda);
        let squares = MatRef::from_column_major_slice(&self.squares, d, d);
        let products = MatRef::from_column_major_slice(&self.products, d, e);
        let Ok(llt) = squares.llt(Side::Lower) else { return self.prior };
        let learned = llt.solve(products);
        let weight = |n: usize| (self.base[(n % d, n / d)] + learned[(n % d, n / d)]) as f32;
        let matrix: Vec<f32> = (0..e * d).map(weight).collect();
        if matrix.iter().all(|w| w.is_finite()) { Map { matrix, shift: vec![0.0; e] } } else { self.prior }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: usize = 6;
    const E: usize = 4;

    fn noise(seed: &mut u64) -> f32 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn blank() -> Map {
        Map { matrix: vec![0.0; E * D], shift: vec![0.0; E] }
    }

    fn logits(map: &Map, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
        x.chunks_exact(D).flat_map(|x| map.matrix.chunks_exact(D).map(|row| dot(row, x)).collect::<Vec<_>>()).collect()
    }

    /// Logits that are linear in the input are found, from any start. The ridge is D of 4000 rows: 1.5e-3 of a start at most 2 away
    /// is left. Fails if the residual forgets the start, if rows and columns change places, or without the ridge's
    /// division by the number of rows.
    #[test]
    fn what_is_linear_is_found() {
        let mut seed = 3;
        let truth = Map { matrix: (0..E * D).map(|_| noise(&mut seed)).collect(), shift: vec![0.0; E] };
        let start = Map { matrix: (0..E * D).map(|_| noise(&mut seed)).collect(), shift: vec![0.0; E] };
        for prior in [blank(), start] {
            let mut fit = Regression::new(prior);
            for _ in 0..4 {
                let x: Vec<f32> = (0..1000 * D).map(|_| noise(&mut seed)).collect();
                fit.add(&x, &logits(&truth, &x));
            }
            let found = fit.solve();
            let worst = found.matrix.iter().zip(&truth.matrix).map(|(f, t)| (f - t).abs()).fold(0.0, f32::max);
            assert!(worst < 4e-3, "{worst}");
        }
    }

    /// Exact: without rows, and with rows that are no numbers, the start stays; one row that it foresees changes nothing.
    #[test]
    fn nothing_learned_leaves_the_router() {
        let mut seed = 5;
        let prior = Map { matrix: (0..E * D).map(|_| noise(&mut seed)).collect(), shift: vec![1.0; E] };
        assert_eq!(Regression::new(prior.clone()).solve(), prior);
        let mut fit = Regression::new(prior.clone());
        fit.add(&[f32::NAN; D], &[0.0; E]);
        assert_eq!(fit.solve(), prior);
    }

    /// Counted by hand: the two highest of each row.
    #[test]
    fn choices_among_the_highest_are_counted() {
        let matrix = vec![1.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0, -1.0];
        let map = Map { matrix, shift: vec![0.0; 4] };
        let x = [3.0, 2.0, -1.0, 5.0];
        assert_eq!(map.named(&x, &[0, 1, 1, 2], 2), 4);
        assert_eq!(map.named(&x, &[2, 1, 0, 3], 2), 1);
        let shifted = Map { shift: vec![0.0, 0.0, 9.0, 0.0], ..map };
        assert_eq!(shifted.named(&x, &[0, 1, 1, 2], 2), 3);
    }

    /// Within bf16's 2^-9 of each weight, and the bytes say the same.
    #[test]
    fn what_is_stored_is_what_is_measured() {
        let mut seed = 9;
        let map = Map { matrix: (0..E * D).map(|_| noise(&mut seed)).collect(), shift: vec![0.0; E] };
        let (bytes, rounded) = map.clone().rounded();
        let mut read = vec![0.0; E * D];
        tensor::decode(&mut read, Dtype::BF16, &bytes);
        assert_eq!(read, rounded.matrix);
        assert!(map.matrix.iter().zip(&read).all(|(a, b)| (a - b).abs() <= a.abs() / 256.0));
    }
}
