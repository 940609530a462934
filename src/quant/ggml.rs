//! The blocks of 32 that llama.cpp stores: Q4_0, Q4_1 and Q8_0, from packed integers without a change of value, or from floats.
//!
//! Q4_0 is a 16-bit scale and 16 bytes, element `i` in the low half of byte `i` and element `i + 16` in its high half, of value
//! `(code - 8) * scale`; Q4_1 has a 16-bit offset behind the scale and values `code * scale + offset`; Q8_0 is a 16-bit scale and
//! 32 signed bytes of value `code * scale`. These are the codes of packed integers in another order, and their scales and zero
//! points in half precision.

use super::format::{Bits, Group, Level, Packed, Zero};
use super::round::{self, Method, RoundError, Rounding};
use crate::tensor::Dtype;
use half::f16;

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Bytes of a block; there is none of eight bits with zero points.
pub fn block_bytes(bits: Bits, zero: Zero) -> usize {
    let offset = if zero == Zero::Point { 2 } else { 0 };
    2 + offset + BLOCK * bits.count() / 8
}

/// Whether rows of a packed matrix are whole blocks, each under one scale.
pub fn fits(group: usize, cols: usize) -> bool {
    cols.is_multiple_of(BLOCK) && group.is_multiple_of(BLOCK)
}

/// Blocks of one row of a packed matrix. Returns how many groups have a scale or an offset that is no half-precision number and
/// was rounded to one.
///
/// # Panics
/// If the matrix does not [`fits`], or `dst` is not as long as the row's blocks.
pub fn repack_row(dst: &mut [u8], packed: &Packed<'_>, row: usize) -> usize {
    let mut levels = vec![Level::default(); packed.cols / packed.group];
    packed.row_levels(row, &mut levels);
    let zero = if packed.zeros.is_some() { Zero::Point } else { Zero::Middle };
    let exact = |x: f32| f16::from_f32(x).to_f32() == x;
    let whole = |l: &Level| exact(l.scale) && (zero == Zero::Middle || exact(offset(*l)));
    let rounded = levels.iter().filter(|l| !whole(l)).count();
    let bytes = BLOCK * packed.bits.count() / 8;
    let blocks = dst.chunks_exact_mut(block_bytes(packed.bits, zero)).zip(packed.row_words(row).chunks_exact(bytes));
    for (i, (block, codes)) in blocks.enumerate() {
        write_block(block, codes, levels[i * BLOCK / packed.group], packed.bits, zero);
    }
    rounded
}

/// Blocks of rows of floats, `[n, cols]`, their scales searched for least squared error.
///
/// # Panics
/// If `cols` is not a multiple of 32, or `dst` is not as long as the rows' blocks.
pub fn quantize_rows(dst: &mut [u8], src: &[f32], cols: usize, bits: Bits, zero: Zero) -> Result<(), RoundError> {
    let (group, method) = (Group::Of(BLOCK), Method::Search);
    let how = Rounding { bits, group, zero, method, scale_dtype: Dtype::F16, positive_scales: false };
    let packed = round::quantize_rows(src, cols, None, &how)?;
    let row_bytes = cols / BLOCK * block_bytes(bits, zero);
    for (row, dst) in dst.chunks_exact_mut(row_bytes).enumerate() {
        repack_row(dst, &packed.view(), row);
    }
    Ok(())
}

/// The value of code 0.
fn offset(level: Level) -> f32 {
    -level.zero * level.scale
}

fn write_block(block: &mut [u8], codes: &[u8], level: Level, bits: Bits, zero: Zero) {
    let (head, body) = block.split_at_mut(block_bytes(bits, zero) - BLOCK * bits.count() / 8);
    let halves = [f16::from_f32(level.scale), f16::from_f32(offset(level))];
    head.chunks_exact_mut(2).zip(halves).for_each(|(bytes, half)| bytes.copy_from_slice(&half.to_le_bytes()));
    match bits {
        Bits::Four => {
            let code = |i: usize| (codes[i / 2] >> (4 * (i % 2))) & 15;
            body.iter_mut().enumerate().for_each(|(i, b)| *b = code(i) | code(i + BLOCK / 2) << 4);
        }
        // Offset binary to two's complement.
        Bits::Eight => body.iter_mut().zip(codes).for_each(|(b, code)| *b = code ^ 0x80),
    }
}
