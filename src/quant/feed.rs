//! Codes with error feedback, and the scales that suit it.
//!
//! Scales of the weighted search are best for plain rounding. With feedback an error costs what later columns cannot make up
//! for, and codes carry corrections of earlier ones. So rows try a few sets of scales, keep what leaves the least loss, refit
//! scales to codes by least squares, and at last move single codes while that helps.

use super::format::{Bits, Level};
use super::gptq::{Factor, Feedback, FeedbackError};
use super::round::{self, Rounding};
use crate::tensor::round_to;
use faer::linalg::matmul::matmul;
use faer::prelude::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};
use multiversion::multiversion;

/// Columns whose errors are carried to the rest by one product.
const BLOCK: usize = 128;
/// Factors on the scales of a row that are tried.
pub const STRETCH: [f32; 4] = [0.94, 0.97, 1.03, 1.06];
/// Times scales are refitted to codes and codes to scales.
pub const REFITS: usize = 2;
/// Times all codes of a row are visited at the end.
pub const SWEEPS: usize = 3;

/// The best found so far for some rows.
pub(super) struct Found {
    /// `[n, K]`.
    pub codes: Vec<u8>,
    /// Scales and codes of zero, `[n, K / group]`.
    pub grid: Vec<Level>,
    /// `diag(dW H dW')`.
    pub losses: Vec<f64>,
}

/// Rows `src`, `[n, K]`, and what their codes are chosen with.
pub(super) struct Search<'a> {
    pub feedback: &'a Feedback,
    pub factor: &'a Factor,
    pub src: &'a [f32],
    pub how: &'a Rounding,
    pub group: usize,
}

impl Search<'_> {
    /// Starts from the `grid` of the weighted search. Codes of zero stay as a search has chosen them.
    pub fn run(&self, grid: Vec<Level>) -> Result<Found, FeedbackError> {
        let mut best = self.feed(grid);
        best.improve(self.feed(self.searched()?), self.group);
        let start = best.grid.clone();
        for factor in STRETCH {
            let stretched = |l: &Level| Level { scale: round_to(self.how.scale_dtype, l.scale * factor), ..*l };
            best.improve(self.feed(start.iter().map(stretched).collect()), self.group);
        }
        for _ in 0..REFITS {
            let refitted = self.refit(&best);
            best.improve(self.feed(refitted), self.group);
        }
        self.descend(&mut best);
        Ok(best)
    }

    /// The grid of the search with the weights that errors have under feedback.
    fn searched(&self) -> Result<Vec<Level>, FeedbackError> {
        let packed = round::quantize_rows(self.src, self.feedback.cols, Some(&self.factor.energy), self.how)?;
        Ok(packed.view().levels())
    }

    /// Codes with error feedback on these scales.
    pub fn feed(&self, grid: Vec<Level>) -> Found {
        let Feedback { cols, order, .. } = self.feedback;
        let (k, group) = (*cols, self.group);
        let rows = self.src.len() / k;
        let mut w: Vec<f32> = self.src.chunks_exact(k).flat_map(|row| order.iter().map(|&c| row[c])).collect();
        let mut codes = vec![0u8; rows * k];
        let mut losses = vec![0.0f64; rows];
        let mut errors = vec![0.0f32; rows * BLOCK.min(k)];
        for first in (0..k).step_by(BLOCK) {
            let end = (first + BLOCK).min(k);
            let width = end - first;
            for r in 0..rows {
                let block = Block {
                    columns: &order[first..end],
                    upper: &self.factor.upper[first * k + first..],
                    stride: k,
                    weight: &self.factor.weight[first..end],
                    grid: &grid[r * k / group..(r + 1) * k / group],
                    group,
                    bits: self.how.bits,
                };
                let error = &mut errors[r * width..(r + 1) * width];
                losses[r] += feed_block(&mut w[r * k + first..r * k + end], error, &mut codes[r * k..(r + 1) * k], &block);
            }
            if end < k {
                let errors = MatRef::from_row_major_slice(&errors[..rows * width], rows, width);
                let factors = &self.factor.upper[first * k + end..end * k];
                let factors = MatRef::from_row_major_slice_with_stride(factors, width, k - end, k);
                let rest = rows_mut(&mut w[end..], rows, k - end, k);
                matmul(rest, Accum::Add, errors, factors, -1.0f32, Par::Seq);
            }
        }
        Found { codes, grid, losses }
    }

    /// The scales that leave the least loss with the codes as they are: for each row the solution of `A s = b` with
    /// `A_gh = c_g H c_h'` and `b_g = c_g H w'`, `c_g` being the codes of group `g`, counted from that of zero.
    fn refit(&self, best: &Found) -> Vec<Level> {
        let (k, group) = (self.feedback.cols, self.group);
        let (rows, groups) = (self.src.len() / k, k / group);
        let codes = best.codes.chunks_exact(group).zip(&best.grid);
        let codes: Vec<f32> = codes.flat_map(|(codes, level)| codes.iter().map(|&c| f32::from(c) - level.zero)).collect();
        let h = MatRef::from_row_major_slice(&self.feedback.used, k, k);
        let mut a = vec![0.0f64; rows * groups * groups];
        let mut b = vec![0.0f64; rows * groups];
        let mut product = vec![0.0f32; rows * k];
        for g in 0..groups {
            let own = MatRef::from_row_major_slice_with_stride(&codes[g * group..], rows, group, k);
            let dst = MatMut::from_row_major_slice_mut(&mut product, rows, k);
            matmul(dst, Accum::Replace, own, h.subrows(g * group, group), 1.0f32, Par::Seq);
            for r in 0..rows {
                let row = r * k..(r + 1) * k;
                b[r * groups + g] = dot(&product[row.clone()], &self.src[row.clone()]);
                for (other, (p, c)) in product[row.clone()].chunks_exact(group).zip(codes[row].chunks_exact(group)).enumerate() {
                    a[(r * groups + g) * groups + other] = dot(p, c);
                }
            }
        }
        let mut grid = best.grid.clone();
        for (r, grid) in grid.chunks_exact_mut(groups).enumerate() {
            let a = &a[r * groups * groups..(r + 1) * groups * groups];
            let matrix = Mat::from_fn(groups, groups, |i, j| 0.5 * (a[i * groups + j] + a[j * groups + i]));
            let right = Mat::from_fn(groups, 1, |i, _| b[r * groups + i]);
            let Ok(llt) = matrix.llt(Side::Lower) else { continue };
            let solution = llt.solve(&right);
            for (i, Level { scale, .. }) in grid.iter_mut().enumerate() {
                let refitted = round_to(self.how.scale_dtype, solution[(i, 0)] as f32);
                let usable = refitted.is_finite() && refitted != 0.0 && (refitted > 0.0) == (*scale > 0.0);
                *scale = if usable { refitted } else { *scale };
            }
        }
        grid
    }

    /// Moves single codes by one step while that lowers the loss.
    fn descend(&self, best: &mut Found) {
        let (k, group) = (self.feedback.cols, self.group);
        let rows = self.src.len() / k;
        let rest: Vec<f32> = (0..rows * k).map(|i| self.src[i] - best.grid[i / group].value(best.codes[i])).collect();
        let mut gradient = vec![0.0f32; rows * k];
        let h = MatRef::from_row_major_slice(&self.feedback.used, k, k);
        let d = MatRef::from_row_major_slice(&rest, rows, k);
        matmul(MatMut::from_row_major_slice_mut(&mut gradient, rows, k), Accum::Replace, d, h, 1.0f32, Par::Seq);
        for (r, gradient) in gradient.chunks_exact_mut(k).enumerate() {
            let grid = &best.grid[r * k / group..(r + 1) * k / group];
            let codes = &mut best.codes[r * k..(r + 1) * k];
            for _ in 0..SWEEPS {
                let gain = sweep(codes, gradient, &self.feedback.used, grid, group, self.how.bits);
                best.losses[r] -= gain;
                if gain <= 0.0 {
                    break;
                }
            }
        }
    }
}

impl Found {
    /// Takes the rows over that another set of scales serves better.
    fn improve(&mut self, other: Found, group: usize) {
        let rows = self.losses.len().max(1);
        let (k, groups) = (self.codes.len() / rows, self.grid.len() / rows);
        debug_assert_eq!(k, groups * group);
        for r in 0..rows {
            if other.losses[r] < self.losses[r] {
                self.losses[r] = other.losses[r];
                self.codes[r * k..(r + 1) * k].copy_from_slice(&other.codes[r * k..(r + 1) * k]);
                self.grid[r * groups..(r + 1) * groups].copy_from_slice(&other.grid[r * groups..(r + 1) * groups]);
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum()
}

/// A row-major matrix of rows `stride` apart, seen through its transpose: faer 0.24's own mutable view of such rows mixes up the
/// strides.
pub(super) fn rows_mut(data: &mut [f32], rows: usize, cols: usize, stride: usize) -> MatMut<'_, f32> {
    MatMut::from_column_major_slice_with_stride_mut(data, cols, rows, stride).transpose_mut()
}

/// Consecutive columns, in the order in which codes are chosen, of one row.
struct Block<'a> {
    columns: &'a [usize],
    /// `[width, width]` within rows of `stride`.
    upper: &'a [f32],
    stride: usize,
    weight: &'a [f32],
    grid: &'a [Level],
    group: usize,
    bits: Bits,
}

/// Chooses the codes of a block one after the other; `w` and `error` are in its order, `codes` in that of the matrix.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn feed_block(w: &mut [f32], error: &mut [f32], codes: &mut [u8], block: &Block<'_>) -> f64 {
    let half = block.bits.half() as f32;
    let mut loss = 0.0f64;
    for (i, &column) in block.columns.iter().enumerate() {
        let level = block.grid[column / block.group];
        let code = round::code(w[i] / level.scale + (level.zero - half), half);
        codes[column] = code;
        let e = w[i] - level.value(code);
        error[i] = e;
        loss += f64::from(e * e * block.weight[i]);
        let factors = &block.upper[i * block.stride + i + 1..i * block.stride + block.columns.len()];
        w[i + 1..].iter_mut().zip(factors).for_each(|(x, u)| *x = (-e).mul_add(*u, *x));
    }
    loss
}

/// Visits every code of a row once; `gradient` is `H d'` of its error `d` and follows. Returns what the loss fell by.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn sweep(codes: &mut [u8], gradient: &mut [f32], h: &[f32], grid: &[Level], group: usize, bits: Bits) -> f64 {
    let k = codes.len();
    let most = bits.top() as f32;
    let mut gain = 0.0f64;
    for i in 0..k {
        let (scale, own) = (grid[i / group].scale, h[i * k + i]);
        // The step that would be best without a grid, in units of codes.
        let wanted = gradient[i] / (own * scale);
        if wanted.abs() <= 0.5 {
            continue;
        }
        let code = f32::from(codes[i]);
        let moved = (code + wanted.round()).max(0.0).min(most);
        let step = (moved - code) * scale;
        let fall = step * (2.0 * gradient[i] - step * own);
        if fall > 0.0 {
            codes[i] = moved as u8;
            gain += f64::from(fall);
            gradient.iter_mut().zip(&h[i * k..(i + 1) * k]).for_each(|(g, h)| *g = (-step).mul_add(*h, *g));
        }
    }
    gain
}

/// Packs the codes of a row.
pub(super) fn pack(words: &mut [u8], codes: &[u8], bits: Bits) {
    match bits {
        Bits::Four => words.iter_mut().zip(codes.chunks_exact(2)).for_each(|(b, c)| *b = c[0] | (c[1] << 4)),
        Bits::Eight => words.copy_from_slice(codes),
    }
}
