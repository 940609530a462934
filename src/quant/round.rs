//! Choosing scales and codes, one group of a row at a time.
//!
//! `absmax` repeats the observer and compressor of compressed-tensors bit for bit: scale `absmax / (half - 0.5)`, or with zero
//! points the range over the highest code, division and rounding in the scale's type, half to even. `search` tries scales around
//! that value, with both signs or with zero points around the one that centres the range.

use super::format::{Bits, Format, Group, Level, OwnedPacked, Zero};
use super::search::Search;
use crate::tensor::{Dtype, round_to};
use multiversion::multiversion;
use std::fmt;
use std::str::FromStr;

/// How a group's scale is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Least squared error over a grid of scales, of both signs or with zero points.
    #[default]
    Search,
    /// From the largest magnitude alone, or with zero points from the smallest and the largest value.
    Absmax,
}

/// A method that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no method, expected search or absmax")]
pub struct MethodError(String);

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(text: &str) -> Result<Self, MethodError> {
        match text {
            "search" => Ok(Method::Search),
            "absmax" => Ok(Method::Absmax),
            _ => Err(MethodError(text.to_string())),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Search => "search",
            Method::Absmax => "absmax",
        })
    }
}

/// Everything that decides a matrix's codes besides its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Width of a code.
    pub bits: Bits,
    /// Columns that share a scale.
    pub group: Group,
    /// The code of zero.
    pub zero: Zero,
    /// How scales are chosen.
    pub method: Method,
    /// Type in which scales are stored: `F32`, `F16` or `BF16`.
    pub scale_dtype: Dtype,
    /// No negative scales, for readers that refuse them.
    pub positive_scales: bool,
}

impl Rounding {
    /// What comes of it.
    pub fn format(&self) -> Format {
        Format::Int { bits: self.bits, group: self.group, zero: self.zero }
    }
}

/// A value that cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// Not a number or infinite.
    #[error("value at [{row}, {col}] is not finite")]
    NonFinite {
        /// Row of the block given.
        row: usize,
        /// Column.
        col: usize,
    },
    /// The scale exceeds its storage type.
    #[error("a group at [{row}, {col}] needs a scale beyond the range of its type")]
    ScaleOverflow {
        /// Row of the block given.
        row: usize,
        /// First column of the group.
        col: usize,
    },
}

impl RoundError {
    /// The same where the rows given are others of a larger matrix.
    pub fn of_rows(self, place: impl Fn(usize) -> usize) -> Self {
        match self {
            RoundError::NonFinite { row, col } => RoundError::NonFinite { row: place(row), col },
            RoundError::ScaleOverflow { row, col } => RoundError::ScaleOverflow { row: place(row), col },
        }
    }
}

/// Quantizes rows `src`, `[n, cols]`. `energy`, `[cols]`, weighs squared errors.
///
/// # Panics
/// If the format does not fit `cols`.
pub fn quantize_rows(src: &[f32], cols: usize, energy: Option<&[f32]>, how: &Rounding) -> Result<OwnedPacked, RoundError> {
    let group = how.group.columns(cols);
    let group_bytes = group * how.bits.count() / 8;
    assert!(how.format().fits(cols) && src.len().is_multiple_of(cols));
    let mut out = OwnedPacked::zeroed(src.len() / cols, cols, how.format(), how.scale_dtype);
    let mut search = Search::new(how);
    for (g, x) in src.chunks_exact(group).enumerate() {
        let (row, col) = (g * group / cols, g * group % cols);
        let range = range(x);
        if range[0].is_nan() {
            let i = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
            return Err(RoundError::NonFinite { row, col: col + i });
        }
        let energy = energy.map(|e| &e[col..col + group]);
        let level = match how.method {
            Method::Absmax => widest(range, how),
            Method::Search => search.level(x, range, energy).unwrap_or_else(|| widest(range, how)),
        };
        if !level.scale.is_finite() {
            return Err(RoundError::ScaleOverflow { row, col });
        }
        out.set_level(row, col / group, level);
        let reduced = if how.method == Method::Absmax { how.scale_dtype } else { Dtype::F32 };
        pack(&mut out.words[g * group_bytes..(g + 1) * group_bytes], x, level, how.bits, reduced);
    }
    Ok(out)
}

/// Smallest and largest value, zero among them; not numbers if any value is not finite.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn range(x: &[f32]) -> [f32; 2] {
    const LANES: usize = 16;
    let (mut low, mut high, mut bad) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
    let mut see = |i: usize, v: f32| {
        low[i] = if v < low[i] { v } else { low[i] };
        high[i] = if v > high[i] { v } else { high[i] };
        bad[i] += v * 0.0;
    };
    let chunks = x.chunks_exact(LANES);
    for (i, &v) in chunks.remainder().iter().enumerate() {
        see(i, v);
    }
    for chunk in chunks {
        for (i, &v) in chunk.iter().enumerate() {
            see(i, v);
        }
    }
    if bad.iter().all(|b| *b == 0.0) {
        [low.into_iter().fold(0.0, f32::min), high.into_iter().fold(0.0, f32::max)]
    } else {
        [f32::NAN; 2]
    }
}

/// The scale that clips nothing, in its type, zero replaced by the type's epsilon; with zero points the one of the smallest value.
fn widest([low, high]: [f32; 2], how: &Rounding) -> Level {
    let (half, round) = (how.bits.half() as f32, |x| round_to(how.scale_dtype, x));
    let (scale, zero) = match how.zero {
        Zero::Middle => (round(high.max(-low) / (half - 0.5)), half),
        Zero::Point => {
            let scale = round(round(high - low) / how.bits.top() as f32);
            let below = round(-half - round(low / scale)).clamp(-half, half - 1.0).round_ties_even();
            (scale, if below.is_nan() { half } else { half + below })
        }
    };
    Level { scale: if scale == 0.0 { epsilon(how.scale_dtype) } else { scale }, zero }
}

fn epsilon(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::EPSILON.to_f32(),
        Dtype::BF16 => half::bf16::EPSILON.to_f32(),
        _ => f32::EPSILON,
    }
}

/// Adding this to a magnitude below 2^22 rounds to an integer, half to even, and leaves its low byte in the lowest bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// A finite value rounded to the nearest brain float, ties to even.
#[inline(always)]
pub(super) fn bf16_round(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

/// Packs the codes of one group; `reduced` rounds quotients and sums to that type first, as arithmetic in it would.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn pack(words: &mut [u8], x: &[f32], level: Level, bits: Bits, reduced: Dtype) {
    let (scale, shift) = (level.scale, level.zero - bits.half() as f32);
    match reduced {
        Dtype::BF16 => pack_with(words, x, bits, |v| bf16_round(bf16_round(v / scale) + shift)),
        Dtype::F16 => pack_with(words, x, bits, |v| round_to(Dtype::F16, round_to(Dtype::F16, v / scale) + shift)),
        _ => pack_with(words, x, bits, |v| v / scale + shift),
    }
}

/// Code of a value: of its distance from the middle code, in codes.
#[inline(always)]
pub(super) fn code(from_middle: f32, half: f32) -> u8 {
    let rounded = from_middle.max(-half).min(half - 1.0) + ROUND;
    (rounded.to_bits() as u8).wrapping_add(half as u8)
}

#[inline(always)]
fn pack_with(words: &mut [u8], x: &[f32], bits: Bits, from_middle: impl Fn(f32) -> f32) {
    const LANES: usize = 32;
    let half = bits.half() as f32;
    let code = |v: f32| code(from_middle(v), half);
    if bits == Bits::Eight {
        words.iter_mut().zip(x).for_each(|(b, &v)| *b = code(v));
        return;
    }
    let pair = |low: u8, high: u8| low | (high << 4);
    let (chunks, values) = (words.chunks_exact_mut(LANES / 2), x.chunks_exact(LANES));
    let rest = values.remainder();
    for (bytes, values) in chunks.zip(values) {
        let mut codes = [0u8; LANES];
        codes.iter_mut().zip(values).for_each(|(c, &v)| *c = code(v));
        for (b, c) in bytes.iter_mut().zip(codes.chunks_exact(2)) {
            *b = pair(c[0], c[1]);
        }
    }
    let packed = (x.len() - rest.len()) / 2;
    for (b, v) in words[packed..].iter_mut().zip(rest.chunks_exact(2)) {
        *b = pair(code(v[0]), code(v[1]));
    }
}
