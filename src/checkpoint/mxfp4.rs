//! Sources that ship 4-bit floats with a power of two for each 32 columns, as gpt-oss and DeepSeek-V4 do (OCP MX v1.0, MXFP4).
//!
//! `w[r, c] = e2m1(code[r, c]) * 2^(scale[r, c / 32] - 127)`; two codes a byte, the even column in the low half.

use super::CheckpointError;
use crate::tensor::{e2m1_to_f32, e8m0_to_f32};

/// Columns that share a scale.
pub const BLOCK: usize = 32;

/// Some rows of a stored matrix, every `step`-th from `first` on.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// `[rows stored, C / 2]` bytes.
    pub codes: &'a [u8],
    /// `[rows stored, C / 32]` bytes.
    pub scales: &'a [u8],
    /// The stored row that is row 0 here.
    pub first: usize,
    /// Stored rows from one to the next.
    pub step: usize,
}

impl Rows<'_> {
    /// Decodes rows `from ..` into row-major `dst` `[n, cols]`; `cols` is a multiple of 32.
    pub fn decode(&self, dst: &mut [f32], cols: usize, from: usize) -> Result<(), CheckpointError> {
        let pairs: [[f32; 2]; 256] = std::array::from_fn(|b| [e2m1_to_f32(b as u8 & 15), e2m1_to_f32(b as u8 >> 4)]);
        for (i, row) in dst.chunks_exact_mut(cols.max(BLOCK)).enumerate() {
            let at = self.first + (from + i) * self.step;
            let codes = self.codes.get(at * cols / 2..(at + 1) * cols / 2);
            let scales = self.scales.get(at * cols / BLOCK..(at + 1) * cols / BLOCK);
            let (Some(codes), Some(scales)) = (codes, scales) else {
                let (expected, found) = (format!("of row {at}"), format!("{} bytes", self.codes.len()));
                return Err(CheckpointError::Dequantize { what: "codes", expected, found });
            };
            for ((dst, codes), &scale) in row.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2)).zip(scales) {
                let scale = e8m0_to_f32(scale);
                for (pair, &byte) in dst.chunks_exact_mut(2).zip(codes) {
                    pair[0] = pairs[byte as usize][0] * scale;
                    pair[1] = pairs[byte as usize][1] * scale;
                }
            }
        }
        Ok(())
    }
}
