//! Attention over pages and over latents.

use super::{Grid, Limits};

/// Blocks of decode attention that leave partial results.
pub const SPLIT_BLOCKS: usize = 128;

/// Most blocks that share the pages of one sequence and head.
pub fn attention_splits(kv_heads: usize, num_tok: usize) -> usize {
    const MOST_SPLITS: usize = 32;
    (SPLIT_BLOCKS / (kv_heads * num_tok.max(1))).clamp(1, MOST_SPLITS)
}

/// The narrowest instance of decode attention for so many query heads a key head.
pub fn attention_name(head_dim: usize, group: usize) -> String {
    if group <= 8 { format!("attention_decode_d{head_dim}") } else { format!("attention_decode_wide_d{head_dim}") }
}

/// Decode attention.
pub fn attention(head_dim: usize, heads: usize, kv_heads: usize, num_tok: usize) -> Grid {
    const WARPS: usize = 8;
    let rows = if heads / kv_heads <= 8 { 8 } else { 16 };
    let pages = WARPS * 2 * 16 * (head_dim + 8) * 2;
    let merge = WARPS * rows * (head_dim + 4) * 4;
    let shared = pages.max(merge) + 18 * (head_dim + 8) * 2 + WARPS * head_dim * 4;
    Grid::new([attention_splits(kv_heads, num_tok), kv_heads, num_tok], 32 * WARPS as u32).shared(shared)
}

/// Attention of runs of new tokens.
pub fn attention_prefill(head_dim: usize, heads: usize, num_tok: usize) -> Grid {
    const RUN: usize = 64;
    Grid::new([heads, num_tok.div_ceil(RUN), 1], 128).shared(6 * RUN * (head_dim + 8) * 2)
}

/// Ranks of latents that kernels were built for, with rotary parts of [`LATENT_ROPE`].
pub const LATENT_RANKS: [usize; 1] = [512];
/// Rotary elements of a latent row.
pub const LATENT_ROPE: usize = 64;
/// Most elements of a latent head without position.
pub const LATENT_NOPE: usize = 128;
/// Tokens of a tile of latents; `TILE` in `latent.cu`.
const LATENT_TILE: usize = 32;

/// Most blocks that share the latents of one sequence and sixteen heads.
pub fn latent_splits(heads: usize, num_tok: usize) -> usize {
    (128 / (num_tok.max(1) * heads.div_ceil(16))).clamp(1, 64)
}

/// Queries in latent space.
pub fn latent_query(rank: usize, heads: usize, num_tok: usize) -> Grid {
    Grid::new([rank / 64, heads, num_tok.div_ceil(8)], 256)
}

/// Attention on latents.
pub fn latent_attention(rank: usize, heads: usize, num_tok: usize, limits: Limits) -> Grid {
    const SMALL_SHARED_BYTES: usize = 128 << 10;
    let queries = if limits.block_shared_bytes < SMALL_SHARED_BYTES { 0 } else { 16 };
    let tiles = (2 * LATENT_TILE + queries) * (rank + LATENT_ROPE + 8) * 2;
    let scores = 4 * 16 * (LATENT_TILE + 4) * 4 + 2 * 16 * (LATENT_TILE + 8) * 2;
    Grid::new([latent_splits(heads, num_tok), heads.div_ceil(16), num_tok], 256).shared(tiles + scores)
}

/// From mixed latents to values, with the rows of a block: each block merges the splits of its tokens, so that many tokens take
/// fewer and larger ones.
pub fn latent_value(v: usize, heads: usize, num_tok: usize) -> (Grid, usize) {
    let rows = match num_tok {
        0..=2 => 16,
        3..=8 => 32,
        _ => 64,
    };
    (Grid::new([v.div_ceil(rows), heads, num_tok.div_ceil(4)], 256), rows)
}

#[cfg(test)]
mod tests {
    use super::super::DECODE_TOK;
    use super::super::tests::{H200, RTX_3090};
    use super::*;

    /// Partial results of latent attention stay within what is kept for `DECODE_TOK` tokens of two splits, at any number of heads.
    #[test]
    fn latent_splits_fit_the_workspace() {
        for t in 1..=DECODE_TOK {
            for heads in [1, 16, 17, 128] {
                assert!(latent_splits(heads, t) * t <= 2 * DECODE_TOK, "{heads} {t}");
            }
            for limits in [H200, RTX_3090] {
                let shared = latent_attention(512, 16, t, limits).shared_bytes as usize;
                assert!(shared <= limits.block_shared_bytes, "{shared}");
            }
        }
    }
}
