//! The scale of a group with the least squared error, over a grid of scales of both signs, each rounded to its storage type
//! before codes are chosen. Errors are weighted by activation energy if given.
//!
//! The whole grid is walked for every value, one candidate a lane. Only values near the ends of the range of codes can be
//! clipped by a candidate; they are set apart, because for all others a scale and its negative leave the same error.

use super::format::Bits;
use super::round::{ROUND, Rounding, bf16_round};
use crate::tensor::{Dtype, round_to};
use multiversion::multiversion;

/// Candidates tried in hundredths of the absmax scale, which comes first and so wins ties: where nothing tells candidates apart,
/// nothing is clipped. Zeros fill the last lanes.
const GRID4: [f32; 48] = grid(60);
const GRID8: [f32; 16] = grid(94);
/// Values whose errors are summed before the sum joins the others', so that long groups lose no digits.
const BLOCK: usize = 256;

/// 100, then down to `lowest`, then 101 to 105.
const fn grid<const LANES: usize>(lowest: i32) -> [f32; LANES] {
    let mut grid = [0.0; LANES];
    let mut i = 0;
    while 100 - i as i32 >= lowest {
        grid[i] = (100 - i as i32) as f32;
        i += 1;
    }
    let mut above = 101;
    while above <= 105 {
        grid[i] = above as f32;
        (i, above) = (i + 1, above + 1);
    }
    grid
}

/// Values with their weights, which mean nothing where errors are not weighted.
#[derive(Default)]
struct Values {
    x: Vec<f32>,
    energy: Vec<f32>,
}

impl Values {
    fn first(&self, n: usize) -> (&[f32], &[f32]) {
        (&self.x[..n], &self.energy[..n])
    }
}

/// The search and its working memory, for group after group.
pub(super) struct Search<'a> {
    how: &'a Rounding,
    /// Values that no candidate clips.
    inner: Values,
    /// The others.
    outer: Values,
}

impl<'a> Search<'a> {
    pub(super) fn new(how: &'a Rounding) -> Self {
        Self { how, inner: Values::default(), outer: Values::default() }
    }

    /// The best scale for finite values `x` of largest magnitude `absmax`; `None` if the storage type holds no candidate.
    pub(super) fn scale(&mut self, x: &[f32], absmax: f32, energy: Option<&[f32]>) -> Option<f32> {
        match (self.how.bits, energy) {
            (Bits::Four, None) => best::<48, false>(self, &GRID4, x, x, absmax),
            (Bits::Four, Some(energy)) => best::<48, true>(self, &GRID4, x, energy, absmax),
            (Bits::Eight, None) => best::<16, false>(self, &GRID8, x, x, absmax),
            (Bits::Eight, Some(energy)) => best::<16, true>(self, &GRID8, x, energy, absmax),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn best<const LANES: usize, const WEIGHTED: bool>(
    search: &mut Search<'_>,
    grid: &[f32; LANES],
    x: &[f32],
    energy: &[f32],
    absmax: f32,
) -> Option<f32> {
    let Search { how, inner, outer } = search;
    let half = how.bits.half() as f32;
    let base = absmax / (half - 0.5);
    let mut scales = [0.0; LANES];
    match how.scale_dtype {
        Dtype::BF16 => (0..LANES).for_each(|i| scales[i] = bf16_round(grid[i] * 0.01 * base)),
        dtype => (0..LANES).for_each(|i| scales[i] = round_to(dtype, grid[i] * 0.01 * base)),
    }
    // Candidates that the storage type turns into zero or infinity take no part.
    let (mut inverse, mut unit) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        let sound = scales[i] > 0.0 && scales[i] < f32::INFINITY;
        inverse[i] = if sound { 1.0 / scales[i] } else { 0.0 };
        // Errors in units of the scale, then of the largest value, so that no square of a small weight underflows.
        unit[i] = if sound { (scales[i] / absmax) * (scales[i] / absmax) } else { f32::NAN };
    }
    // Below this every quotient is rounded to a code that both signs have; a thousandth covers the rounding of the quotient.
    let threshold = scales.iter().fold(f32::INFINITY, |m, &s| if s > 0.0 { smaller(m, s) } else { m }) * (half - 0.5) * 0.999;
    let (num_inner, num_outer) = split::<WEIGHTED>(inner, outer, x, energy, threshold);
    let common = common_errors::<LANES, WEIGHTED>(inner.first(num_inner), &inverse);
    let (mut positive, mut negative) = signed_errors::<LANES, WEIGHTED>(outer.first(num_outer), &inverse, half);
    let mut least = [f32::INFINITY; LANES];
    for i in 0..LANES {
        positive[i] = (positive[i] + common[i]) * unit[i];
        negative[i] = if how.positive_scales { f32::NAN } else { (negative[i] + common[i]) * unit[i] };
        least[i] = smaller(smaller(least[i], positive[i]), negative[i]);
    }
    let least = least.into_iter().fold(f32::INFINITY, smaller);
    let first = (0..LANES).find(|&i| positive[i] == least || negative[i] == least)?;
    Some(if positive[first] == least { scales[first] } else { -scales[first] })
}

/// The smaller of two, the first if the second is no number.
#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

/// Fills `inner` with the values below `threshold` and `outer` with the others; returns how many each has.
#[inline(always)]
fn split<const WEIGHTED: bool>(
    inner: &mut Values,
    outer: &mut Values,
    x: &[f32],
    energy: &[f32],
    threshold: f32,
) -> (usize, usize) {
    // Every value is written to both before it is known where it stays.
    for values in [&mut *inner, &mut *outer] {
        values.x.resize(x.len() + 1, 0.0);
        values.energy.resize(x.len() + 1, 0.0);
    }
    let (mut num_inner, mut num_outer) = (0, 0);
    for (&v, &w) in x.iter().zip(energy) {
        let big = v.abs() >= threshold;
        inner.x[num_inner] = v;
        outer.x[num_outer] = v;
        if WEIGHTED {
            inner.energy[num_inner] = w;
            outer.energy[num_outer] = w;
        }
        num_inner += !big as usize;
        num_outer += big as usize;
    }
    (num_inner, num_outer)
}

/// What rounding leaves of values that are not clipped, for each candidate, in units of its scale squared.
#[inline(always)]
fn common_errors<const LANES: usize, const WEIGHTED: bool>(
    (x, energy): (&[f32], &[f32]),
    inverse: &[f32; LANES],
) -> [f32; LANES] {
    let mut totals = [0.0; LANES];
    for (x, energy) in x.chunks(BLOCK).zip(energy.chunks(BLOCK)) {
        let mut sums = [0.0; LANES];
        for (&v, &w) in x.iter().zip(energy) {
            for i in 0..LANES {
                let q = v.mul_add(inverse[i], ROUND) - ROUND;
                let d = v.mul_add(inverse[i], -q);
                sums[i] = if WEIGHTED { (d * w).mul_add(d, sums[i]) } else { d.mul_add(d, sums[i]) };
            }
        }
        totals.iter_mut().zip(sums).for_each(|(t, s)| *t += s);
    }
    totals
}

/// What each candidate and its negative leave of values, in units of the scale squared: the codes of the latter are those of
/// the former with the range mirrored.
#[inline(always)]
fn signed_errors<const LANES: usize, const WEIGHTED: bool>(
    (x, energy): (&[f32], &[f32]),
    inverse: &[f32; LANES],
    half: f32,
) -> ([f32; LANES], [f32; LANES]) {
    let (mut positive, mut negative) = ([0.0; LANES], [0.0; LANES]);
    for (&v, &w) in x.iter().zip(energy) {
        let w = if WEIGHTED { w } else { 1.0 };
        for i in 0..LANES {
            let q = v.mul_add(inverse[i], ROUND) - ROUND;
            let p = v.mul_add(inverse[i], -clamp(q, -half, half - 1.0));
            let n = v.mul_add(inverse[i], -clamp(q, 1.0 - half, half));
            positive[i] = (p * w).mul_add(p, positive[i]);
            negative[i] = (n * w).mul_add(n, negative[i]);
        }
    }
    (positive, negative)
}

/// [`f32::clamp`] in two instructions, for a number.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}
