//! Sources that ship 8-bit floats with a scale for each block of the matrix, as DeepSeek-V3 does.
//!
//! `w[r, c] = e4m3(weight[r, c]) * scale[r / bh, c / bw]`; the last block of a row or column may be ragged. The scale is a
//! multiplier even where its tensor is called `weight_scale_inv`.

use std::ops::Range;

use super::CheckpointError;
use crate::tensor::{self, Dtype, TensorView};

/// Dequantizes `rows` of `weight`, an E4M3 matrix `[R, C]`, into row-major `dst` `[rows.len(), C]`.
///
/// `scale` is F32, BF16, F16 or E8M0 and has one value for each `block` (`[ceil(R / bh), ceil(C / bw)]`), for each row
/// (`[R, 1]`), or for the whole matrix (`[]` or `[1]`). The views carry no names: callers say which tensor an error is about.
pub fn dequantize_block(
    dst: &mut [f32],
    weight: &TensorView,
    scale: &TensorView,
    block: [usize; 2],
    rows: Range<usize>,
) -> Result<(), CheckpointError> {
    let &[r, c] = weight.shape.as_slice() else {
        return Err(mismatch("a weight of shape", "[rows, columns]".into(), format!("{:?}", weight.shape)));
    };
    if weight.dtype != Dtype::F8E4M3 {
        return Err(mismatch("a weight of type", Dtype::F8E4M3.to_string(), weight.dtype.to_string()));
    }
    if r.checked_mul(c) != Some(weight.bytes.len()) {
        return Err(mismatch("weight bytes for", format!("[{r}, {c}]"), weight.bytes.len().to_string()));
    }
    if block.contains(&0) {
        return Err(mismatch("a block of", "at least [1, 1]".into(), format!("{block:?}")));
    }
    if rows.start > rows.end || rows.end > r {
        return Err(mismatch("rows within", format!("0..{r}"), format!("{rows:?}")));
    }
    if dst.len() != rows.len() * c {
        return Err(mismatch("room for values:", (rows.len() * c).to_string(), dst.len().to_string()));
    }

    let grid = [r.div_ceil(block[0]), c.div_ceil(block[1])];
    // Rows and columns that share one scale, and scales in a row of the grid.
    let (bh, bw, stride) = match scale.shape.as_slice() {
        [] | [1] => (r.max(1), c.max(1), 1),
        shape if *shape == grid => (block[0], block[1], grid[1]),
        [rows, 1] if *rows == r => (1, c.max(1), 1),
        other => {
            let expected = format!("{grid:?} for blocks of {block:?}, [{r}, 1], [1] or []");
            return Err(mismatch("a scale of shape", expected, format!("{other:?}")));
        }
    };
    let scales = scale_values(scale)?;
    let values: [f32; 256] = std::array::from_fn(|bits| tensor::e4m3_to_f32(bits as u8));
    for (row, dst) in rows.zip(dst.chunks_exact_mut(c.max(1))) {
        let scales = &scales[row / bh * stride..][..stride];
        let codes = weight.bytes[row * c..][..c].chunks(bw);
        for ((dst, codes), scale) in dst.chunks_mut(bw).zip(codes).zip(scales) {
            dst.iter_mut().zip(codes).for_each(|(d, &code)| *d = values[code as usize] * scale);
        }
    }
    Ok(())
}

fn scale_values(scale: &TensorView) -> Result<Vec<f32>, CheckpointError> {
    let len = scale.len();
    if scale.bytes.len() != scale.dtype.bytes(len) {
        return Err(mismatch("scale bytes for", format!("{} {:?}", scale.dtype, scale.shape), scale.bytes.len().to_string()));
    }
    match scale.dtype {
        Dtype::F8E8M0 => Ok(scale.bytes.iter().map(|&bits| tensor::e8m0_to_f32(bits)).collect()),
        _ => {
            scale.to_f32().ok_or_else(|| mismatch("a scale of type", "F32, BF16, F16 or F8_E8M0".into(), scale.dtype.to_string()))
        }
    }
}

fn mismatch(what: &'static str, expected: String, found: String) -> CheckpointError {
    CheckpointError::Dequantize { what, expected, found }
}
