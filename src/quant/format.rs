//! Packed integers with group scales: sizes, unpacking, and products straight from the packed words.
//!
//! `value = (code - zero) * scale`. Codes of a row are consecutive in little-endian 32-bit words, element 0 in the lowest bits
//! (compressed-tensors `pack-quantized`). A scale covers `group` consecutive columns of one row. The code of zero is the middle
//! one, 8 or 128, or each group has its own; such zero points are packed down the rows: a word holds those of one group of as many
//! consecutive rows as it has codes, the first in the lowest bits, and rows that the last word lacks are 0.

use crate::tensor::{Dtype, bf16_to_f32, decode, encode};
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

    /// The middle code, 8 or 128.
    pub fn half(self) -> i32 {
        1 << (self.count() - 1)
    }

    /// The highest code, 15 or 255.
    pub fn top(self) -> i32 {
        2 * self.half() - 1
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

/// Which code stands for zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Zero {
    /// The middle one everywhere: symmetric.
    #[default]
    Middle,
    /// One of each group's own: asymmetric.
    Point,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// As in the checkpoint.
    Source,
    /// Integers with scales.
    Int {
        /// Width of a code.
        bits: Bits,
        /// Columns a scale covers.
        group: Group,
        /// The code of zero.
        zero: Zero,
    },
}

/// A format that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no format, expected source, int4, int8, int4:g32, int4:g64, int4:g128, int8:g128, int8:channel, int4:g64:asym or the like"
)]
pub struct FormatError(String);

impl FromStr for Format {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let wrong = || FormatError(text.to_string());
        if text == "source" {
            return Ok(Format::Source);
        }
        let (text, zero) = text.strip_suffix(":asym").map_or((text, Zero::Middle), |rest| (rest, Zero::Point));
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
        Ok(Format::Int { bits, group, zero })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Format::Int { bits, group, zero } = self else { return f.write_str("source") };
        match group {
            Group::Of(n) => write!(f, "int{}:g{n}", bits.count())?,
            Group::Channel => write!(f, "int{}:channel", bits.count())?,
        }
        f.write_str(if *zero == Zero::Point { ":asym" } else { "" })
    }
}

impl Format {
    /// 4 bits, a scale every 128 columns.
    pub const INT4_G128: Format = Format::Int { bits: Bits::Four, group: Group::Of(128), zero: Zero::Middle };
    /// 8 bits, a scale every 128 columns.
    pub const INT8_G128: Format = Format::Int { bits: Bits::Eight, group: Group::Of(128), zero: Zero::Middle };
    /// 8 bits, a scale a row.
    pub const INT8_CHANNEL: Format = Format::Int { bits: Bits::Eight, group: Group::Channel, zero: Zero::Middle };

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

    /// Words of the zero points of so many rows, a line of [`Format::scale_cols`] each `per_word` rows; 0 where there are none.
    pub fn zero_rows(self, rows: usize) -> usize {
        match self {
            Format::Int { bits, zero: Zero::Point, .. } => rows.div_ceil(bits.per_word()),
            _ => 0,
        }
    }

    /// The same with another code of zero.
    pub fn with_zero(self, zero: Zero) -> Self {
        match self {
            Format::Source => self,
            Format::Int { bits, group, .. } => Format::Int { bits, group, zero },
        }
    }

    /// Whether each group has a zero point of its own.
    pub fn has_zero_points(self) -> bool {
        matches!(self, Format::Int { zero: Zero::Point, .. })
    }

    /// Whether rows of this length are whole words and whole groups.
    pub fn fits(self, cols: usize) -> bool {
        match self {
            Format::Source => true,
            Format::Int { bits, group, .. } => {
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
        let zeros = 4 * self.zero_rows(rows) * self.scale_cols(cols);
        match self {
            Format::Source => source.bytes(rows * cols),
            Format::Int { .. } => rows * (4 * self.packed_cols(cols) + source.bytes(self.scale_cols(cols))) + zeros,
        }
    }

    /// Bits a weight, scales of type `scale` and zero points included.
    pub fn bits_per_weight(self, cols: usize, scale: Dtype) -> f64 {
        const ROWS: usize = 8;
        self.bytes(ROWS, cols, scale) as f64 / cols as f64 * 8.0 / ROWS as f64
    }
}

/// The first format that fits rows of `cols`: the wanted one, smaller groups of 64 and 32, 8 bits a channel, source.
pub fn fit(wanted: Format, cols: usize) -> Format {
    let Format::Int { bits, group, zero } = wanted else { return Format::Source };
    let smaller = [64, 32].into_iter().filter(|&n| matches!(group, Group::Of(g) if n < g)).map(|n| Format::Int {
        bits,
        group: Group::Of(n),
        zero,
    });
    let ladder = std::iter::once(wanted).chain(smaller).chain([Format::INT8_CHANNEL]);
    ladder.into_iter().find(|f| f.fits(cols)).unwrap_or(Format::Source)
}

/// What codes of one group mean: `value = (code - zero) * scale`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Level {
    /// Distance between values of neighbouring codes; negative turns their order around.
    pub scale: f32,
    /// The code of zero, an integer.
    pub zero: f32,
}

impl Level {
    /// The value of a code.
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        (f32::from(code) - self.zero) * self.scale
    }
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
    /// Zero points, `[rows / bits.per_word() rounded up, cols / group]` words; `None`: the middle code is zero.
    pub zeros: Option<&'a [u8]>,
}

impl<'a> Packed<'a> {
    /// Bytes of one row's words.
    pub fn row_words(&self, row: usize) -> &'a [u8] {
        let n = self.cols / self.bits.per_word() * 4;
        &self.words[row * n..(row + 1) * n]
    }

    /// Scales and zero points of one row, `dst.len() = cols / group`.
    pub fn row_levels(&self, row: usize, dst: &mut [Level]) {
        let (groups, element) = (self.cols / self.group, self.scale_dtype.bytes(1));
        let (dst, scales) = (&mut dst[..groups], &self.scales[row * groups * element..]);
        let zero = self.bits.half() as f32;
        if self.scale_dtype == Dtype::BF16 {
            let scales = scales.as_chunks().0.iter().map(|&bytes| bf16_to_f32(u16::from_le_bytes(bytes)));
            dst.iter_mut().zip(scales).for_each(|(level, scale)| *level = Level { scale, zero });
        } else {
            for (level, scale) in dst.iter_mut().zip(scales.chunks_exact(element)) {
                decode(std::slice::from_mut(&mut level.scale), self.scale_dtype, scale);
                level.zero = zero;
            }
        }
        if let Some(zeros) = self.zeros {
            for (g, level) in dst.iter_mut().enumerate() {
                let (at, shift) = zero_place(self.bits, groups, row, g);
                level.zero = f32::from(zeros[at] >> shift & self.bits.top() as u8);
            }
        }
    }

    /// Scales and zero points of all rows, `[rows, cols / group]`.
    pub fn levels(&self) -> Vec<Level> {
        let mut levels = vec![Level::default(); self.rows * self.cols / self.group];
        levels.chunks_exact_mut(self.cols / self.group).enumerate().for_each(|(row, dst)| self.row_levels(row, dst));
        levels
    }

    /// Decodes rows `first ..` into `dst`, `[n, cols]`.
    pub fn dequantize_rows(&self, dst: &mut [f32], first: usize) {
        let mut levels = vec![Level::default(); self.cols / self.group];
        for (i, row) in dst.chunks_exact_mut(self.cols).enumerate() {
            self.row_levels(first + i, &mut levels);
            let words = self.row_words(first + i);
            dequantize(row, words, &levels, self.bits, self.group);
        }
    }

    /// How it is stored.
    pub fn format(&self) -> Format {
        let group = if self.group == self.cols { Group::Channel } else { Group::Of(self.group) };
        Format::Int { bits: self.bits, group, zero: if self.zeros.is_some() { Zero::Point } else { Zero::Middle } }
    }
}

/// Byte of a zero point among the words of all, and its lowest bit there; `groups` a row.
fn zero_place(bits: Bits, groups: usize, row: usize, group: usize) -> (usize, usize) {
    let (word, bit) = (row / bits.per_word() * groups + group, row % bits.per_word() * bits.count());
    (4 * word + bit / 8, bit % 8)
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
    /// As in [`Packed`].
    pub zeros: Option<Vec<u8>>,
}

impl OwnedPacked {
    /// Rows that begin at a multiple of this many hold whole words of zero points, and so can be packed apart.
    pub const STEP_ROWS: usize = 8;

    /// Room for a matrix, of `format`'s integers.
    ///
    /// # Panics
    /// If these are none.
    pub fn zeroed(rows: usize, cols: usize, format: Format, scale_dtype: Dtype) -> Self {
        let Format::Int { bits, group, zero } = format else { panic!("{format} has no codes") };
        let words = vec![0; rows * format.packed_cols(cols) * 4];
        let scales = vec![0; scale_dtype.bytes(rows * format.scale_cols(cols))];
        let zeros = (zero == Zero::Point).then(|| vec![0; format.zero_rows(rows) * format.scale_cols(cols) * 4]);
        Self { bits, group, rows, cols, words, scales, scale_dtype, zeros }
    }

    /// Sets what the codes of a group mean; the zero point only where there are any, and once.
    pub(super) fn set_level(&mut self, row: usize, group: usize, level: Level) {
        let groups = self.cols / self.group.columns(self.cols).max(1);
        let element = self.scale_dtype.bytes(1);
        let at = (row * groups + group) * element;
        encode(&mut self.scales[at..at + element], self.scale_dtype, &[level.scale]);
        if let Some(zeros) = &mut self.zeros {
            let (at, shift) = zero_place(self.bits, groups, row, group);
            let mask = (self.bits.top() as u8) << shift;
            zeros[at] = (zeros[at] & !mask) | (level.zero as u8) << shift;
        }
    }

    /// Adds the rows of another below; this one has a multiple of [`OwnedPacked::STEP_ROWS`].
    pub(super) fn append(&mut self, other: &Self) {
        debug_assert!(self.rows.is_multiple_of(Self::STEP_ROWS) && self.format() == other.format());
        self.rows += other.rows;
        self.words.extend_from_slice(&other.words);
        self.scales.extend_from_slice(&other.scales);
        if let (Some(zeros), Some(others)) = (&mut self.zeros, &other.zeros) {
            zeros.extend_from_slice(others);
        }
    }

    /// Puts the rows of another, of the same format, in place of these.
    pub fn place(&mut self, other: &Self, rows: &[usize]) {
        debug_assert!(other.rows == rows.len() && self.format() == other.format());
        let row_bytes = self.cols * self.bits.count() / 8;
        let levels = other.view().levels();
        let groups = levels.len() / other.rows.max(1);
        for (i, &row) in rows.iter().enumerate() {
            self.words[row * row_bytes..][..row_bytes].copy_from_slice(&other.words[i * row_bytes..][..row_bytes]);
            levels[i * groups..][..groups].iter().enumerate().for_each(|(g, level)| self.set_level(row, g, *level));
        }
    }

    /// How it is stored.
    pub fn format(&self) -> Format {
        let zero = if self.zeros.is_some() { Zero::Point } else { Zero::Middle };
        Format::Int { bits: self.bits, group: self.group, zero }
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
            zeros: self.zeros.as_deref(),
        }
    }
}

/// Elements a vector loop handles at once: two 512-bit or four 256-bit registers.
const LANES: usize = 32;

#[inline(always)]
fn codes<const BITS: usize>(out: &mut [f32; LANES], words: &[u8], zero: f32) {
    if BITS == 4 {
        for (o, &b) in out.chunks_exact_mut(2).zip(&words[..LANES / 2]) {
            o[0] = (b & 15) as f32 - zero;
            o[1] = (b >> 4) as f32 - zero;
        }
    } else {
        for (o, &b) in out.iter_mut().zip(&words[..LANES]) {
            *o = b as f32 - zero;
        }
    }
}

/// Decodes one row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dequantize(row: &mut [f32], words: &[u8], levels: &[Level], bits: Bits, group: usize) {
    match bits {
        Bits::Four => dequantize_as::<4>(row, words, levels, group),
        Bits::Eight => dequantize_as::<8>(row, words, levels, group),
    }
}

#[inline(always)]
fn dequantize_as<const BITS: usize>(row: &mut [f32], words: &[u8], levels: &[Level], group: usize) {
    for ((x, w), &level) in row.chunks_mut(group).zip(words.chunks(group * BITS / 8)).zip(levels) {
        let mut blocks = x.chunks_exact_mut(LANES);
        let mut bytes = w.chunks_exact(LANES * BITS / 8);
        for (block, bytes) in blocks.by_ref().zip(bytes.by_ref()) {
            let mut c = [0.0; LANES];
            codes::<BITS>(&mut c, bytes, level.zero);
            block.iter_mut().zip(c).for_each(|(x, c)| *x = c * level.scale);
        }
        let bytes = bytes.remainder();
        for (i, x) in blocks.into_remainder().iter_mut().enumerate() {
            let code = if BITS == 4 { (bytes[i / 2] >> (4 * (i % 2))) & 15 } else { bytes[i] };
            *x = level.value(code);
        }
    }
}

/// Activations in the order in which a byte stream yields codes: in each block of 32 columns of 4-bit codes the even columns come
/// before the odd ones, since one byte holds an even and an odd column. Columns past the last whole block of a group stay.
pub struct Activations {
    /// `[T, cols]`.
    x: Vec<f32>,
    /// `[T, cols / group]` sums of `x`.
    sums: Vec<f32>,
}

impl Activations {
    /// Orders `x`, `[T, cols]`, for products with `w`.
    pub fn new(x: &[f32], w: &Packed<'_>) -> Self {
        let sums = x.chunks_exact(w.group).map(|g| g.iter().map(|&x| f64::from(x)).sum::<f64>() as f32).collect();
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
        Self { x, sums }
    }
}

/// `dst[row - rows.start, t] = W[row] . x[t]`, a group at a time straight from the packed words. Codes count from the middle of
/// their range, so that weights without a zero point are sums without cancellation however long a group is; what a zero point
/// differs from the middle is taken off once a group, through the sum of its activations.
pub fn dot_rows(dst: &mut [f32], w: &Packed<'_>, rows: Range<usize>, x: &Activations) {
    let mut levels = vec![Level::default(); w.cols / w.group];
    let num_tok = x.x.len() / w.cols;
    for (out, row) in dst.chunks_exact_mut(num_tok).zip(rows) {
        w.row_levels(row, &mut levels);
        dot_row(out, w.row_words(row), &levels, w, x);
    }
}

/// One row against every token.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dot_row(out: &mut [f32], words: &[u8], levels: &[Level], w: &Packed<'_>, x: &Activations) {
    match w.bits {
        Bits::Four => dot_row_as::<4>(out, words, levels, w.group, x, w.cols),
        Bits::Eight => dot_row_as::<8>(out, words, levels, w.group, x, w.cols),
    }
}

#[inline(always)]
fn dot_row_as<const BITS: usize>(out: &mut [f32], words: &[u8], levels: &[Level], group: usize, x: &Activations, cols: usize) {
    let whole = group / LANES * LANES;
    for (t, out) in out.iter_mut().enumerate() {
        let (x, sums) = (&x.x[t * cols..(t + 1) * cols], &x.sums[t * levels.len()..(t + 1) * levels.len()]);
        let mut total = [0.0f32; LANES];
        let mut rest = 0.0;
        let groups = words.chunks_exact(group * BITS / 8).zip(x.chunks_exact(group));
        for (((bytes, x), &level), sum) in groups.zip(levels).zip(sums) {
            let mut part = [[0.0f32; LANES / 2]; 2];
            for (bytes, x) in bytes.chunks_exact(LANES * BITS / 8).zip(x.chunks_exact(LANES)) {
                block::<BITS>(&mut part, bytes, x);
            }
            for (total, part) in total.iter_mut().zip(part.as_flattened()) {
                *total = part.mul_add(level.scale, *total);
            }
            let mut tail = (half::<BITS>() as f32 - level.zero) * sum;
            for (i, x) in x.iter().enumerate().skip(whole) {
                let code = if BITS == 4 { (bytes[i / 2] >> (4 * (i % 2))) & 15 } else { bytes[i] };
                tail += centred::<BITS>(code) * x;
            }
            rest += level.scale * tail;
        }
        *out = tree_sum(&total) + rest;
    }
}

/// Half the range of a code.
#[inline(always)]
const fn half<const BITS: usize>() -> u8 {
    1 << (BITS - 1)
}

/// A code counted from the middle of its range.
#[inline(always)]
fn centred<const BITS: usize>(code: u8) -> f32 {
    f32::from(code.wrapping_sub(half::<BITS>()) as i8)
}

/// `part += codes * x` for one block of 32 columns, by halves of 16 lanes.
#[inline(always)]
fn block<const BITS: usize>([low, high]: &mut [[f32; LANES / 2]; 2], bytes: &[u8], x: &[f32]) {
    let (x_low, x_high) = x.split_at(LANES / 2);
    if BITS == 4 {
        accumulate::<BITS>(low, bytes.iter().map(|b| b & 15), x_low);
        accumulate::<BITS>(high, bytes.iter().map(|b| b >> 4), x_high);
    } else {
        let (bytes_low, bytes_high) = bytes.split_at(LANES / 2);
        accumulate::<BITS>(low, bytes_low.iter().copied(), x_low);
        accumulate::<BITS>(high, bytes_high.iter().copied(), x_high);
    }
}

/// Codes stay bytes until they are counted from the middle of their range, so that one instruction does that to many.
#[inline(always)]
fn accumulate<const BITS: usize>(part: &mut [f32; LANES / 2], codes: impl Iterator<Item = u8>, x: &[f32]) {
    for ((p, code), &x) in part.iter_mut().zip(codes).zip(x) {
        *p = centred::<BITS>(code).mul_add(x, *p);
    }
}

/// Sum of lanes by halves. A call: were it part of a loop's function, the compiler would keep lanes in the pairs that this sum adds.
#[inline(never)]
fn tree_sum(lanes: &[f32; LANES]) -> f32 {
    let sixteen: [f32; 16] = std::array::from_fn(|i| lanes[i] + lanes[i + 16]);
    let eight: [f32; 8] = std::array::from_fn(|i| sixteen[i] + sixteen[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// The same for plain rows of type `F32`, `F16` or `BF16`.
pub fn dot_rows_plain(dst: &mut [f32], dtype: Dtype, w: &[u8], cols: usize, rows: Range<usize>, x: &[f32], num_tok: usize) {
    let row_bytes = dtype.bytes(cols);
    for (out, row) in dst.chunks_exact_mut(num_tok).zip(rows) {
        let bytes = &w[row * row_bytes..(row + 1) * row_bytes];
        dot_row_plain(out, dtype, bytes, x, cols);
    }
}

/// One plain row against every token.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+bmi2+fma", "x86_64+avx2+bmi2+fma"))]
fn dot_row_plain(out: &mut [f32], dtype: Dtype, w: &[u8], x: &[f32], cols: usize) {
    match dtype {
        Dtype::F32 => dot_row_of(out, w, x, cols, f32::from_le_bytes),
        Dtype::BF16 => dot_row_of(out, w, x, cols, |bytes| bf16_to_f32(u16::from_le_bytes(bytes))),
        Dtype::F16 => dot_row_of(out, w, x, cols, |bytes| half::f16::from_le_bytes(bytes).to_f32()),
        other => panic!("{other} is not a plain float type"),
    }
}

#[inline(always)]
fn dot_row_of<const BYTES: usize>(out: &mut [f32], w: &[u8], x: &[f32], cols: usize, value: impl Fn([u8; BYTES]) -> f32) {
    let (blocks, rest) = w.as_chunks::<BYTES>().0.as_chunks::<LANES>();
    for (out, x) in out.iter_mut().zip(x.chunks_exact(cols)) {
        let (x, x_rest) = x.as_chunks::<LANES>();
        let mut total = [0.0f32; LANES];
        for (block, x) in blocks.iter().zip(x) {
            for ((total, &bytes), &x) in total.iter_mut().zip(block).zip(x) {
                *total = value(bytes).mul_add(x, *total);
            }
        }
        *out = tree_sum(&total) + rest.iter().zip(x_rest).map(|(&bytes, x)| value(bytes) * x).sum::<f32>();
    }
}
