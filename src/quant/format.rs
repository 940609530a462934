//! Packed integers with group scales: sizes, unpacking, and products straight from the packed words.
//!
//! `value = (code - half) * scale`, with `half` 8 or 128. Codes of a row are consecutive in little-endian 32-bit words, element
//! 0 in the lowest bits (compressed-tensors `pack-quantized`). A scale covers `group` consecutive columns of one row.

use crate::tensor::{Dtype, bf16_to_f32, decode};
use multiversion::multiversion;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Width of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bits {
    /// Codes 0..=15.
    Four,
    /// Codes 0..=255.
    Eight,
}

impl Bits {
    /// 4 or 8.
    pub fn count(self) -> usize {
        match self {
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// The code of zero, 8 or 128.
    pub fn half(self) -> i32 {
        1 << (self.count() - 1)
    }

    /// Codes in a 32-bit word.
    pub fn per_word(self) -> usize {
        32 / self.count()
    }
}

/// Columns that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// This many.
    Of(usize),
    /// The whole row.
    Channel,
}

impl Group {
    /// How many columns these are, of rows of `cols`.
    pub fn columns(self, cols: usize) -> usize {
        match self {
            Group::Of(n) => n,
            Group::Channel => cols,
        }
    }
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// As in the checkpoint.
    Source,
    /// Symmetric integers with scales.
    Int {
        /// Width of a code.
        bits: Bits,
        /// Columns a scale covers.
        group: Group,
    },
}

/// A format that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no format, expected source, int4, int8, int4:g32, int4:g64, int4:g128, int8:g128, int8:channel or the like")]
pub struct FormatError(String);

impl FromStr for Format {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let wrong = || FormatError(text.to_string());
        if text == "source" {
            return Ok(Format::Source);
        }
        let (name, group) = text.split_once(':').unwrap_or((text, "g128"));
        let bits = match name {
            "int4" => Bits::Four,
            "int8" => Bits::Eight,
            _ => return Err(wrong()),
        };
        let group = match group {
            "channel" => Group::Channel,
            g => match g.strip_prefix('g').and_then(|n| n.parse().ok()) {
                Some(n @ (32 | 64 | 128)) => Group::Of(n),
                _ => return Err(wrong()),
            },
        };
        Ok(Format::Int { bits, group })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Source => f.write_str("source"),
            Format::Int { bits, group: Group::Of(n) } => write!(f, "int{}:g{n}", bits.count()),
            Format::Int { bits, group: Group::Channel } => write!(f, "int{}:channel", bits.count()),
        }
    }
}

impl Format {
    /// 4 bits, a scale every 128 columns.
    pub const INT4_G128: Format = Format::Int { bits: Bits::Four, group: Group::Of(128) };
    /// 8 bits, a scale every 128 columns.
    pub const INT8_G128: Format = Format::Int { bits: Bits::Eight, group: Group::Of(128) };
    /// 8 bits, a scale a row.
    pub const INT8_CHANNEL: Format = Format::Int { bits: Bits::Eight, group: Group::Channel };

    /// 32-bit words of a row; 0 for [`Format::Source`].
    pub fn packed_cols(self, cols: usize) -> usize {
        match self {
            Format::Source => 0,
            Format::Int { bits, .. } => cols.div_ceil(bits.per_word()),
        }
    }

    /// Scales of a row; 0 for [`Format::Source`].
    pub fn scale_cols(self, cols: usize) -> usize {
        match self {
            Format::Source => 0,
            Format::Int { group: Group::Of(n), .. } => cols.div_ceil(n),
            Format::Int { group: Group::Channel, .. } => 1,
        }
    }

    /// Whether rows of this length are whole words and whole groups.
    pub fn fits(self, cols: usize) -> bool {
        match self {
            Format::Source => true,
            Format::Int { bits, group } => {
                let grouped = match group {
                    Group::Of(n) => cols.is_multiple_of(n),
                    Group::Channel => true,
                };
                cols > 0 && cols.is_multiple_of(bits.per_word()) && grouped
            }
        }
    }

    /// Bytes of a matrix whose plain form and scales have type `source`; the 16 bytes of `weight_shape` are not counted.
    pub fn bytes(self, rows: usize, cols: usize, source: Dtype) -> usize {
        match self {
            Format::Source => source.bytes(rows * cols),
            Format::Int { .. } => rows * (4 * self.packed_cols(cols) + source.bytes(self.scale_cols(cols))),
        }
    }

    /// Bits a weight, scales of type `scale` included.
    pub fn bits_per_weight(self, cols: usize, scale: Dtype) -> f64 {
        8.0 * self.bytes(1, cols, scale) as f64 / cols as f64
    }
}

/// The first format that fits rows of `cols`: the wanted one, smaller groups of 64 and 32, 8 bits a channel, source.
pub fn fit(wanted: Format, cols: usize) -> Format {
    let Format::Int { bits, group } = wanted else { return Format::Source };
    let smaller = [64, 32]
        .into_iter()
        .filter(|&n| matches!(group, Group::Of(g) if n < g))
        .map(|n| Format::Int { bits, group: Group::Of(n) });
    let ladder = std::iter::once(wanted).chain(smaller).chain([Format::INT8_CHANNEL]);
    ladder.into_iter().find(|f| f.fits(cols)).unwrap_or(Format::Source)
}

/// A packed matrix, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Width of a code.
    pub bits: Bits,
    /// Columns a scale covers; `cols` for a scale a row.
    pub group: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// `rows * cols / bits.per_word()` little-endian words.
    pub words: &'a [u8],
    /// `rows * cols / group` scales.
    pub scales: &'a [u8],
    /// Type of the scales.
    pub scale_dtype: Dtype,
}

impl<'a> Packed<'a> {
    /// Bytes of one row's words.
    pub fn row_words(&self, row: usize) -> &'a [u8] {
        let n = self.cols / self.bits.per_word() * 4;
        &self.words[row * n..(row + 1) * n]
    }

    /// Decodes one row's scales, `dst.len() = cols / group`.
    pub fn row_scales(&self, row: usize, dst: &mut [f32]) {
        let n = self.scale_dtype.bytes(self.cols / self.group);
        decode(dst, self.scale_dtype, &self.scales[row * n..(row + 1) * n]);
    }

    /// Decodes rows `first ..` into `dst`, `[n, cols]`.
    pub fn dequantize_rows(&self, dst: &mut [f32], first: usize) {
        let mut scales = vec![0.0; self.cols / self.group];
        for (i, row) in dst.chunks_exact_mut(self.cols).enumerate() {
            self.row_scales(first + i, &mut scales);
            let words = self.row_words(first + i);
            dequantize(row, words, &scales, self.bits, self.group);
        }
    }
}

/// A packed matrix in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedPacked {
    /// Width of a code.
    pub bits: Bits,
    /// Columns a scale covers.
    pub group: Group,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// As in [`Packed`].
    pub words: Vec<u8>,
    /// As in [`Packed`].
    pub scales: Vec<u8>,
    /// Type of the scales.
    pub scale_dtype: Dtype,
}

impl OwnedPacked {
    /// Room for a matrix.
    pub fn zeroed(rows: usize, cols: usize, bits: Bits, group: Group, scale_dtype: Dtype) -> Self {
        let format = Format::Int { bits, group };
        let words = vec![0; rows * format.packed_cols(cols) * 4];
        let scales = vec![0; scale_dtype.bytes(rows * format.scale_cols(cols))];
        Self { bits, group, rows, cols, words, scales, scale_dtype }
    }

    /// Bytes of a row's words and of its scales.
    pub fn row_bytes(&self) -> [usize; 2] {
        [self.words.len() / self.rows.max(1), self.scales.len() / self.rows.max(1)]
    }

    /// The matrix, borrowed.
    pub fn view(&self) -> Packed<'_> {
        Packed {
            bits: self.bits,
            group: self.group.columns(self.cols),
            rows: self.rows,
            cols: self.cols,
            words: &self.words,
            scales: &self.scales,
            scale_dtype: self.scale_dtype,
        }
    }
}

/// Elements a vector loop handles at once: two 512-bit or four 256-bit registers.
const LANES: usize = 32;

#[inline(always)]
fn codes<const BITS: usize>(out: &mut [f32; LANES], words: &[u8]) {
    let half = (1 << (BITS - 1)) as f32;
    if BITS == 4 {
        for (o, &b) in out.chunks_exact_mut(2).zip(&words[..LANES / 2]) {
            o[0] = (b & 15) as f32 - half;
            o[1] = (b >> 4) as f32 - half;
        }
    } else {
        for (o, &b) in out.iter_mut().zip(&words[..LANES]) {
            *o = b as f32 - half;
        }
    }
}

/// Decodes one row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dequantize(row: &mut [f32], words: &[u8], scales: &[f32], bits: Bits, group: usize) {
    match bits {
        Bits::Four => dequantize_as::<4>(row, words, scales, group),
        Bits::Eight => dequantize_as::<8>(row, words, scales, group),
    }
}

#[inline(always)]
fn dequantize_as<const BITS: usize>(row: &mut [f32], words: &[u8], scales: &[f32], group: usize) {
    let half = (1 << (BITS - 1)) as f32;
    for ((x, w), &scale) in row.chunks_mut(group).zip(words.chunks(group * BITS / 8)).zip(scales) {
        let mut blocks = x.chunks_exact_mut(LANES);
        let mut bytes = w.chunks_exact(LANES * BITS / 8);
        for (block, bytes) in blocks.by_ref().zip(bytes.by_ref()) {
            let mut c = [0.0; LANES];
            codes::<BITS>(&mut c, bytes);
            block.iter_mut().zip(c).for_each(|(x, c)| *x = c * scale);
        }
        let bytes = bytes.remainder();
        for (i, x) in blocks.into_remainder().iter_mut().enumerate() {
            let code = if BITS == 4 { (bytes[i / 2] >> (4 * (i % 2))) & 15 } else { bytes[i] };
            *x = (code as f32 - half) * scale;
        }
    }
}

/// Activations in the order in which a byte stream yields codes: in each block of 32 columns of 4-bit codes the even columns come
/// before the odd ones, since one byte holds an even and an odd column. Columns past the last whole block of a group stay.
pub struct Activations {
    /// `[T, cols]`.
    x: Vec<f32>,
    /// `[T, cols / group]` sums of `x`, times the code of zero.
    offsets: Vec<f32>,
}

impl Activations {
    /// Orders `x`, `[T, cols]`, for products with `w`.
    pub fn new(x: &[f32], w: &Packed<'_>) -> Self {
        let half = w.bits.half() as f32;
        let offsets = x.chunks_exact(w.group).map(|g| half * g.iter().sum::<f32>()).collect();
        let mut x = x.to_vec();
        if w.bits == Bits::Four {
            for block in x.chunks_exact_mut(w.group).flat_map(|g| g.chunks_exact_mut(LANES)) {
                let columns: [f32; LANES] = std::array::from_fn(|i| block[i]);
                for i in 0..LANES / 2 {
                    block[i] = columns[2 * i];
                    block[i + LANES / 2] = columns[2 * i + 1];
                }
            }
        }
        Self { x, offsets }
    }
}

/// `dst[row - rows.start, t] = W[row] . x[t]`, a group at a time straight from the packed words. The code
/// of zero is taken off once a group, through the sum of its activations.
pub fn dot_rows(dst: &mut [f32], w: &Packed<'_>, rows: Range<usize>, x: &Activations) {
    let mut scales = vec![0.0; w.cols / w.group];
    let num_tok = x.x.len() / w.cols;
    for (out, row) in dst.chunks_exact_mut(num_tok).zip(rows) {
        w.row_scales(row, &mut scales);
        dot_row(out, w.row_words(row), &scales, w, x);
    }
}

/// One row against every token.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dot_row(out: &mut [f32], words: &[u8], scales: &[f32], w: &Packed<'_>, x: &Activations) {
    match w.bits {
        Bits::Four => dot_row_as::<4>(out, words, scales, w.group, x, w.cols),
        Bits::Eight => dot_row_as::<8>(out, words, scales, w.group, x, w.cols),
    }
}

#[inline(always)]
fn dot_row_as<const BITS: usize>(out: &mut [f32], words: &[u8], scales: &[f32], group: usize, x: &Activations, cols: usize) {
    let whole = group / LANES * LANES;
    for (t, out) in out.iter_mut().enumerate() {
        let (x, offsets) = (&x.x[t * cols..(t + 1) * cols], &x.offsets[t * scales.len()..(t + 1) * scales.len()]);
        let mut total = [0.0f32; LANES];
        let mut rest = 0.0;
        let groups = words.chunks_exact(group * BITS / 8).zip(x.chunks_exact(group));
        for (((bytes, x), &scale), offset) in groups.zip(scales).zip(offsets) {
            let mut part = [0.0f32; LANES];
            for (bytes, x) in bytes.chunks_exact(LANES * BITS / 8).zip(x.chunks_exact(LANES)) {
                block::<BITS>(&mut part, bytes, x);
            }
            for (total, part) in total.iter_mut().zip(part) {
                *total = part.mul_add(scale, *total);
            }
            let mut tail = -offset;
            for (i, x) in x.iter().enumerate().skip(whole) {
                let code = if BITS == 4 { (bytes[i / 2] >> (4 * (i % 2))) & 15 } else { bytes[i] };
                tail += code as f32 * x;
            }
            rest += scale * tail;
        }
        *out = tree_sum(total) + rest;
    }
}

/// `part += codes * x` for one block of 32 columns.
#[inline(always)]
fn block<const BITS: usize>(part: &mut [f32; LANES], bytes: &[u8], x: &[f32]) {
    if BITS == 4 {
        let (low, high) = part.split_at_mut(LANES / 2);
        let (x_low, x_high) = x.split_at(LANES / 2);
        for ((p, &b), &x) in low.iter_mut().zip(&bytes[..LANES / 2]).zip(x_low) {
            *p = ((b & 15) as i32 as f32).mul_add(x, *p);
        }
        for ((p, &b), &x) in high.iter_mut().zip(&bytes[..LANES / 2]).zip(x_high) {
            *p = ((b >> 4) as i32 as f32).mul_add(x, *p);
        }
    } else {
        for ((p, &b), &x) in part.iter_mut().zip(&bytes[..LANES]).zip(x) {
            *p = (b as i32 as f32).mul_add(x, *p);
        }
    }
}

#[inline(always)]
fn tree_sum(mut acc: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            acc[i] += acc[i + n];
        }
        n /= 2;
    }
    acc[0]
}

/// The same for plain rows of type `F32`, `F16` or `BF16`.
pub fn dot_rows_plain(dst: &mut [f32], dtype: Dtype, w: &[u8], cols: usize, rows: Range<usize>, x: &[f32], num_tok: usize) {
    let row_bytes = dtype.bytes(cols);
    for (out, row) in dst.chunks_exact_mut(num_tok).zip(rows) {
        let bytes = &w[row * row_bytes..(row + 1) * row_bytes];
        dot_row_plain(out, dtype, bytes, x, cols);
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let whole = a.len() / LANES * LANES;
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for i in 0..LANES {
            acc[i] = a[i].mul_add(b[i], acc[i]);
        }
    }
    tree_sum(acc) + a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum::<f32>()
}

/// One plain row against every token; a block of it is decoded once for all of them.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dot_row_plain(out: &mut [f32], dtype: Dtype, w: &[u8], x: &[f32], cols: usize) {
    const BLOCK: usize = 256;
    out.fill(0.0);
    let mut block = [0.0f32; BLOCK];
    for (i, bytes) in w.chunks(dtype.bytes(BLOCK)).enumerate() {
        let n = BLOCK.min(cols - i * BLOCK);
        match dtype {
            Dtype::BF16 => {
                block.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(d, s)| *d = bf16_to_f32(u16::from_le_bytes([s[0], s[1]])))
            }
            other => decode(&mut block[..n], other, bytes),
        }
        for (t, out) in out.iter_mut().enumerate() {
            *out += dot(&block[..n], &x[t * cols + i * BLOCK..][..n]);
        }
    }
}
