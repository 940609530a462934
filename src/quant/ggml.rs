//! The blocks of 32 that llama.cpp stores: Q4_0 and Q8_0, from packed integers without a change of value, or from floats.
//!
//! Q4_0 is a 16-bit scale and 16 bytes, element `i` in the low half of byte `i` and element `i + 16` in its high half, of value
//! `(code - 8) * scale`; Q8_0 is a 16-bit scale and 32 signed bytes of value `code * scale`. These are the codes of packed
//! integers in another order, and their scales in half precision.

use super::format::{Bits, Format, Group, Packed};
use super::round::{self, Method, RoundError, Rounding};
use crate::tensor::Dtype;
use half::f16;

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Bytes of a block.
pub fn block_bytes(bits: Bits) -> usize {
    2 + BLOCK * bits.count() / 8
}

/// Whether rows of a packed matrix are whole blocks, each under one scale.
pub fn fits(group: usize, cols: usize) -> bool {
    cols.is_multiple_of(BLOCK) && group.is_multiple_of(BLOCK)
}

/// Blocks of one row of a packed matrix. Returns how many scales are no half-precision number and were rounded to one.
///
/// # Panics
/// If the matrix does not [`fits`], or `dst` is not as long as the row's blocks.
pub fn repack_row(dst: &mut [u8], packed: &Packed<'_>, row: usize) -> usize {
    let mut scales = vec![0.0; packed.cols / packed.group];
    packed.row_scales(row, &mut scales);
    let words = packed.row_words(row);
    let rounded = scales.iter().filter(|&&s| f16::from_f32(s).to_f32() != s).count();
    let bytes = BLOCK * packed.bits.count() / 8;
    for (i, (block, codes)) in dst.chunks_exact_mut(block_bytes(packed.bits)).zip(words.chunks_exact(bytes)).enumerate() {
        write_block(block, codes, f16::from_f32(scales[i * BLOCK / packed.group]), packed.bits);
    }
    rounded
}

/// Blocks of rows of floats, `[n, cols]`, their scales searched for least squared error.
///
/// # Panics
/// If `cols` is not a multiple of 32, or `dst` is not as long as the rows' blocks.
pub fn quantize_rows(dst: &mut [u8], src: &[f32], cols: usize, bits: Bits) -> Result<(), RoundError> {
    let how = Rounding { bits, group: Group::Of(BLOCK), method: Method::Search, scale_dtype: Dtype::F16, positive_scales: false };
    let format = Format::Int { bits, group: how.group };
    let rows = src.len() / cols.max(1);
    let mut words = vec![0; rows * format.packed_cols(cols) * 4];
    let mut scales = vec![0; rows * format.scale_cols(cols) * 2];
    round::quantize_rows(&mut words, &mut scales, src, cols, None, &how)?;
    let blocks = dst.chunks_exact_mut(block_bytes(bits)).zip(words.chunks_exact(BLOCK * bits.count() / 8));
    for ((block, codes), scale) in blocks.zip(scales.chunks_exact(2)) {
        write_block(block, codes, f16::from_le_bytes([scale[0], scale[1]]), bits);
    }
    Ok(())
}

fn write_block(block: &mut [u8], codes: &[u8], scale: f16, bits: Bits) {
    let (head, body) = block.split_at_mut(2);
    head.copy_from_slice(&scale.to_le_bytes());
    match bits {
        Bits::Four => {
            let code = |i: usize| (codes[i / 2] >> (4 * (i % 2))) & 15;
            body.iter_mut().enumerate().for_each(|(i, b)| *b = code(i) | code(i + BLOCK / 2) << 4);
        }
        // Offset binary to two's complement.
        Bits::Eight => body.iter_mut().zip(codes).for_each(|(b, code)| *b = code ^ 0x80),
    }
}
