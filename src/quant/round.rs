//! Choosing scales and codes, one group of a row at a time.
//!
//! `absmax` repeats the observer and compressor of compressed-tensors bit for bit: scale `absmax / (half - 0.5)`, division and
//! rounding in the scale's type, half to even. `search` tries scales around that value with both signs.

use super::format::{Bits, Group};
use super::search::Search;
use crate::tensor::{Dtype, encode, round_to};
use multiversion::multiversion;
use std::fmt;
use std::str::FromStr;

/// How a group's scale is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Least squared error over a grid of scales of both signs.
    #[default]
    Search,
    /// From the largest magnitude alone.
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
    /// How scales are chosen.
    pub method: Method,
    /// Type in which scales are stored: `F32`, `F16` or `BF16`.
    pub scale_dtype: Dtype,
    /// No negative scales, for readers that refuse them.
    pub positive_scales: bool,
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
    /// The same where the block given begins at `first` of a longer one.
    pub fn below(self, first: usize) -> Self {
        match self {
            RoundError::NonFinite { row, col } => RoundError::NonFinite { row: first + row, col },
            RoundError::ScaleOverflow { row, col } => RoundError::ScaleOverflow { row: first + row, col },
        }
    }
}

/// Quantizes rows `src`, `[n, cols]`, into packed `words` and `scales`. `energy`, `[cols]`, weighs squared errors.
///
/// # Panics
/// If the format does not fit `cols`, or buffer lengths disagree.
pub fn quantize_rows(
    words: &mut [u8],
    scales: &mut [u8],
    src: &[f32],
    cols: usize,
    energy: Option<&[f32]>,
    how: &Rounding,
) -> Result<(), RoundError> {
    let group = match how.group {
        Group::Of(n) => n,
        Group::Channel => cols,
    };
    let group_bytes = group * how.bits.count() / 8;
    let scale_bytes = how.scale_dtype.bytes(1);
    assert!(cols.is_multiple_of(group) && group.is_multiple_of(how.bits.per_word()));
    assert_eq!(words.len(), src.len() * how.bits.count() / 8);
    assert_eq!(scales.len(), src.len() / group * scale_bytes);
    let groups = src.chunks_exact(group).zip(words.chunks_exact_mut(group_bytes)).zip(scales.chunks_exact_mut(scale_bytes));
    let mut search = Search::new(how);
    for (g, ((x, words), scale_out)) in groups.enumerate() {
        let (row, col) = (g * group / cols, g * group % cols);
        let absmax = absmax(x);
        if !absmax.is_finite() {
            let i = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
            return Err(RoundError::NonFinite { row, col: col + i });
        }
        let energy = energy.map(|e| &e[col..col + group]);
        let scale = match how.method {
            Method::Absmax => absmax_scale(absmax, how),
            Method::Search => search.scale(x, absmax, energy).unwrap_or_else(|| absmax_scale(absmax, how)),
        };
        if !scale.is_finite() {
            return Err(RoundError::ScaleOverflow { row, col });
        }
        encode(scale_out, how.scale_dtype, &[scale]);
        let reduced = if how.method == Method::Absmax { how.scale_dtype } else { Dtype::F32 };
        pack(words, x, scale, how.bits, reduced);
    }
    Ok(())
}

/// Largest magnitude; not finite if any value is not.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn absmax(x: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut most = [0.0f32; LANES];
    let mut bad = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    for (i, &v) in chunks.remainder().iter().enumerate() {
        most[i] = v.abs();
        bad[i] = v * 0.0;
    }
    for chunk in chunks {
        for i in 0..LANES {
            most[i] = if chunk[i].abs() > most[i] { chunk[i].abs() } else { most[i] };
            bad[i] += chunk[i] * 0.0;
        }
    }
    let most = most.into_iter().fold(0.0, f32::max);
    if bad.iter().all(|b| *b == 0.0) { most } else { f32::NAN }
}

/// `absmax / (half - 0.5)` in the scale's type; a zero scale becomes the type's epsilon.
fn absmax_scale(absmax: f32, how: &Rounding) -> f32 {
    let scale = round_to(how.scale_dtype, absmax / (how.bits.half() as f32 - 0.5));
    if scale == 0.0 { epsilon(how.scale_dtype) } else { scale }
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

/// Packs the codes of one group; `reduced` rounds quotients to that type first, as arithmetic in it would.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn pack(words: &mut [u8], x: &[f32], scale: f32, bits: Bits, reduced: Dtype) {
    match reduced {
        Dtype::BF16 => pack_with(words, x, bits, |v| bf16_round(v / scale)),
        Dtype::F16 => pack_with(words, x, bits, |v| round_to(Dtype::F16, v / scale)),
        _ => pack_with(words, x, bits, |v| v / scale),
    }
}

/// Code of a value over its scale.
#[inline(always)]
pub(super) fn code(quotient: f32, half: f32) -> u8 {
    let rounded = quotient.max(-half).min(half - 1.0) + ROUND;
    (rounded.to_bits() as u8).wrapping_add(half as u8)
}

#[inline(always)]
fn pack_with(words: &mut [u8], x: &[f32], bits: Bits, quotient: impl Fn(f32) -> f32) {
    const LANES: usize = 32;
    let half = bits.half() as f32;
    let code = |v: f32| code(quotient(v), half);
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
