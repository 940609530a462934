//! The scale of a group with the least squared error, over a grid of scales, each rounded to its storage type before codes are
//! chosen. Errors are weighted by activation energy if given.
//!
//! Each scale is tried with a few codes of zero. Without zero points these are the middle code and the one below, which is
//! what a negative scale amounts to: it mirrors the codes. With zero points they lie around the one that centres the range.
//!
//! The whole grid is walked for every value, one scale a lane. Only values near the ends of the range of codes can be clipped by
//! a candidate; they are set apart, because for all others the code of zero makes no difference.

use super::format::{Bits, Level, Zero};
use super::round::{ROUND, Rounding, bf16_round};
use crate::tensor::{Dtype, round_to};
use multiversion::multiversion;

/// Candidates tried in hundredths of the absmax scale, which comes first and so wins ties: where nothing tells candidates apart,
/// nothing is clipped. Zeros fill the last lanes.
const GRID4: [f32; 48] = grid(60);
const GRID8: [f32; 16] = grid(94);
/// Codes of zero from the middle one: a scale, and its negative.
const SIGNS: [f32; 2] = [0.0, -1.0];
/// Codes of zero from the one that centres the range, which comes first and so wins ties. The lowest scale of four-bit codes leaves
/// out six codes' worth of the range, so three either way clip all of it on one side.
const SHIFTS: [f32; 7] = [0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0];
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

    /// The best scale and code of zero for finite values `x` within `range`; `None` if the storage type holds no candidate.
    pub(super) fn level(&mut self, x: &[f32], range: [f32; 2], energy: Option<&[f32]>) -> Option<Level> {
        match (self.how.bits, self.how.zero) {
            (Bits::Four, Zero::Middle) => self.among(&GRID4, &SIGNS, x, range, energy),
            (Bits::Four, Zero::Point) => self.among(&GRID4, &SHIFTS, x, range, energy),
            (Bits::Eight, Zero::Middle) => self.among(&GRID8, &SIGNS, x, range, energy),
            (Bits::Eight, Zero::Point) => self.among(&GRID8, &SHIFTS, x, range, energy),
        }
    }

    fn among<const LANES: usize, const ZEROS: usize>(
        &mut self,
        grid: &[f32; LANES],
        shifts: &[f32; ZEROS],
        x: &[f32],
        range: [f32; 2],
        energy: Option<&[f32]>,
    ) -> Option<Level> {
        match energy {
            None => best::<LANES, ZEROS, false>(self, grid, shifts, x, x, range),
            Some(energy) => best::<LANES, ZEROS, true>(self, grid, shifts, x, energy, range),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn best<const LANES: usize, const ZEROS: usize, const WEIGHTED: bool>(
    search: &mut Search<'_>,
    grid: &[f32; LANES],
    shifts: &[f32; ZEROS],
    x: &[f32],
    energy: &[f32],
    [low, high]: [f32; 2],
) -> Option<Level> {
    let Search { how, inner, outer } = search;
    let (half, top) = (how.bits.half() as f32, how.bits.top() as f32);
    let symmetric = how.zero == Zero::Middle;
    let absmax = if high > -low { high } else { -low };
    let base = if symmetric { absmax / (half - 0.5) } else { (high - low) / top };
    let mut scales = [0.0; LANES];
    match how.scale_dtype {
        Dtype::BF16 => (0..LANES).for_each(|i| scales[i] = bf16_round(grid[i] * 0.01 * base)),
        dtype => (0..LANES).for_each(|i| scales[i] = round_to(dtype, grid[i] * 0.01 * base)),
    }
    // Candidates that the storage type turns into zero or infinity take no part.
    let (mut inverse, mut unit, mut reach) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        let sound = scales[i] > 0.0 && scales[i] < f32::INFINITY;
        inverse[i] = if sound { 1.0 / scales[i] } else { 0.0 };
        reach[i] = if sound { scales[i] } else { f32::INFINITY };
        // Errors in units of the scale, then of the largest value, so that no square of a small weight underflows.
        unit[i] = if sound { (scales[i] / absmax) * (scales[i] / absmax) } else { f32::NAN };
    }
    let mut zeros = [[0.0; LANES]; ZEROS];
    // Between these every quotient is rounded to a code that all candidates have.
    let (mut below, mut above) = (f32::INFINITY, f32::INFINITY);
    for (zeros, shift) in zeros.iter_mut().zip(shifts) {
        for i in 0..LANES {
            let centre = if symmetric { half } else { (half - 0.5 - 0.5 * (low + high) * inverse[i]) + ROUND - ROUND };
            zeros[i] = clamp(centre + shift, 0.0, top);
            below = smaller(below, (zeros[i] + 0.5) * reach[i]);
            above = smaller(above, (top - zeros[i] + 0.5) * reach[i]);
        }
    }
    // A thousandth covers the rounding of the quotient.
    let (num_inner, num_outer) = split::<WEIGHTED>(inner, outer, x, energy, [-0.999 * below, 0.999 * above]);
    let common = common_errors::<LANES, WEIGHTED>(inner.first(num_inner), &inverse);
    let mut errors = clipped_errors::<LANES, ZEROS, WEIGHTED>(outer.first(num_outer), &inverse, &zeros, top);
    let mut least = [f32::INFINITY; LANES];
    for (z, errors) in errors.iter_mut().enumerate() {
        let barred = symmetric && how.positive_scales && z > 0;
        for i in 0..LANES {
            errors[i] = if barred { f32::NAN } else { (errors[i] + common[i]) * unit[i] };
            least[i] = smaller(least[i], errors[i]);
        }
    }
    let least = least.into_iter().fold(f32::INFINITY, smaller);
    let (i, z) = (0..LANES).find_map(|i| Some((i, errors.iter().position(|e| e[i] == least)?)))?;
    Some(match how.zero {
        Zero::Middle => Level { scale: if z == 0 { scales[i] } else { -scales[i] }, zero: half },
        Zero::Point => Level { scale: scales[i], zero: zeros[z][i] },
    })
}

/// The smaller of two, the first if the second is no number.
#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

/// Fills `inner` with the values between the bounds and `outer` with the others; returns how many each has.
#[inline(always)]
fn split<const WEIGHTED: bool>(
    inner: &mut Values,
    outer: &mut Values,
    x: &[f32],
    energy: &[f32],
    [below, above]: [f32; 2],
) -> (usize, usize) {
    // Every value is written to both before it is known where it stays.
    for values in [&mut *inner, &mut *outer] {
        values.x.resize(x.len() + 1, 0.0);
        values.energy.resize(x.len() + 1, 0.0);
    }
    let (mut num_inner, mut num_outer) = (0, 0);
    for (&v, &w) in x.iter().zip(energy) {
        let big = v <= below || v >= above;
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

/// What each candidate leaves of values, for each of its codes of zero, in units of the scale squared.
#[inline(always)]
fn clipped_errors<const LANES: usize, const ZEROS: usize, const WEIGHTED: bool>(
    (x, energy): (&[f32], &[f32]),
    inverse: &[f32; LANES],
    zeros: &[[f32; LANES]; ZEROS],
    top: f32,
) -> [[f32; LANES]; ZEROS] {
    let mut errors = [[0.0; LANES]; ZEROS];
    for (&v, &w) in x.iter().zip(energy) {
        let w = if WEIGHTED { w } else { 1.0 };
        let mut quotients = [0.0; LANES];
        for i in 0..LANES {
            quotients[i] = v.mul_add(inverse[i], ROUND) - ROUND;
        }
        for (errors, zeros) in errors.iter_mut().zip(zeros) {
            for i in 0..LANES {
                let d = v.mul_add(inverse[i], -clamp(quotients[i], -zeros[i], top - zeros[i]));
                errors[i] = (d * w).mul_add(d, errors[i]);
            }
        }
    }
    errors
}

/// [`f32::clamp`] in two instructions, for a number.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}
