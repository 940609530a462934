//! `y = x W' + b` for every stored format. Few tokens: dot products straight from the stored bits. Many: a tile of rows is
//! decoded into a buffer that stays in cache and multiplied as floats; never a whole matrix.

use super::matmul::{self, Rows};
use crate::artifact::weights::{Data, Weight};
use crate::checkpoint::CheckpointError;
use crate::quant::format::{Activations, dot_rows, dot_rows_plain};
use rayon::prelude::*;

/// Tokens up to which codes are expanded in registers rather than in tiles.
const FEW_TOKENS: usize = 8;
/// Rows of a tile; 64 rows of 2048 columns are 512 KiB, within a second-level cache.
const TILE_ROWS: usize = 64;
/// Multiply-adds below which a task is not worth handing to another thread.
const TASK_MACS: usize = 1 << 16;

/// `dst[T, rows] = src[T, cols] W' + bias`.
pub fn linear(dst: &mut [f32], src: &[f32], w: &Weight<'_>, bias: Option<&[f32]>) -> Result<(), CheckpointError> {
    if w.rows == 0 || w.cols == 0 || dst.is_empty() {
        return Ok(());
    }
    let num_tok = src.len() / w.cols;
    if num_tok == 1 {
        transposed(dst, src, w)?;
    } else {
        let mut columns = vec![0.0; dst.len()];
        transposed(&mut columns, src, w)?;
        dst.par_chunks_exact_mut(w.rows).enumerate().for_each(|(t, row)| {
            row.iter_mut().zip(columns[t..].iter().step_by(num_tok)).for_each(|(d, s)| *d = *s);
        });
    }
    if let Some(bias) = bias {
        dst.chunks_exact_mut(w.rows).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
    }
    Ok(())
}

/// `dst[rows, T] = W src'`, in parallel over runs of rows.
pub fn transposed(dst: &mut [f32], src: &[f32], w: &Weight<'_>) -> Result<(), CheckpointError> {
    let num_tok = src.len() / w.cols;
    let few = num_tok <= FEW_TOKENS && matches!(w.data, Data::Plain { .. } | Data::Packed(_));
    let task_rows = TASK_MACS.div_ceil(w.cols * num_tok).clamp(1, TILE_ROWS);
    let rows_each = if few { task_rows } else { TILE_ROWS.min(w.rows.div_ceil(rayon::current_num_threads()).max(8)) };
    let ordered = match &w.data {
        Data::Packed(p) if few => Some((p, Activations::new(src, p))),
        _ => None,
    };
    dst.par_chunks_mut(rows_each * num_tok).enumerate().try_for_each_init(Vec::new, |tile, (i, out)| {
        let (first, rows) = (i * rows_each, out.len() / num_tok);
        match (&w.data, &ordered) {
            (_, Some((p, x))) => dot_rows(out, p, first..first + rows, x),
            (Data::Plain { dtype, bytes }, _) if few => {
                dot_rows_plain(out, *dtype, bytes, w.cols, first..first + rows, src, num_tok)
            }
            _ => {
                tile.resize(rows * w.cols, 0.0);
                w.decode_rows(tile, first)?;
                let a = Rows { data: tile, stride: w.cols };
                let b = Rows { data: src, stride: w.cols };
                matmul::product_transposed(out, num_tok, a, b, [rows, num_tok, w.cols], 1.0);
            }
        }
        Ok(())
    })
}
