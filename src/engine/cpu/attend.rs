//! Causal attention over cached keys and values, grouped-query and latent.

use super::LayerCache;
use super::matmul::{self, Rows};
use super::route::softmax;
use crate::engine::Batch;
use crate::ids::{LayerId, SeqId};
use crate::model::plan::Heads;
use crate::model::spec::Mla;
use rayon::prelude::*;
use std::collections::HashMap;

/// Queries of one task; scores of 64 queries over 2048 keys are 512 KiB.
const QUERY_TILE: usize = 64;

/// One run of queries of one head: where it reads and what it may see.
struct Tile {
    seq: SeqId,
    /// Index of the first query in the batch.
    first_row: usize,
    /// Position of the first query.
    position: usize,
    queries: usize,
    head: usize,
}

fn tiles(batch: &Batch, heads: usize) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first_row = 0;
    for s in &batch.segments {
        for t in (0..s.len).step_by(QUERY_TILE) {
            let queries = QUERY_TILE.min(s.len - t);
            tiles.extend((0..heads).map(|head| Tile {
                seq: s.seq,
                first_row: first_row + t,
                position: s.start + t,
                queries,
                head,
            }));
        }
        first_row += s.len;
    }
    tiles
}

/// Softmax of each row over the keys its query may see; `first_key` is the position of the first score. Others become zero.
fn causal_softmax(scores: &mut [f32], num_keys: usize, first_key: usize, position: usize, window: Option<usize>) {
    for (t, row) in scores.chunks_exact_mut(num_keys).enumerate() {
        let end = position + t + 1 - first_key;
        let begin = window.map_or(0, |w| (position + t + 1).saturating_sub(w).saturating_sub(first_key));
        softmax(&mut row[begin..end]);
        row[..begin].fill(0.0);
        row[end..].fill(0.0);
    }
}

/// Scatters the per-tile results `[queries, width]` into `dst[T, heads * width]`.
fn gather(dst: &mut [f32], tiles: &[Tile], parts: &[Vec<f32>], heads: usize, width: usize) {
    for (tile, part) in tiles.iter().zip(parts) {
        for (t, row) in part.chunks_exact(width).enumerate() {
            let at = ((tile.first_row + t) * heads + tile.head) * width;
            dst[at..at + width].copy_from_slice(row);
        }
    }
}

/// Grouped-query attention: `dst` and `q` are `[T, H * Dh]`.
pub(super) fn grouped(
    dst: &mut [f32],
    q: &[f32],
    batch: &Batch,
    caches: &HashMap<SeqId, Vec<LayerCache>>,
    layer: LayerId,
    heads: &Heads,
    window: Option<usize>,
) {
    let (dim, kv_stride, q_stride) = (heads.dim, heads.kv * heads.dim, heads.q * heads.dim);
    let tiles = tiles(batch, heads.q);
    let one = |tile: &Tile| {
        let cache = &caches[&tile.seq][layer.0 as usize];
        let kv_head = tile.head / (heads.q / heads.kv);
        let last_key = tile.position + tile.queries;
        let first_key = window.map_or(0, |w| (tile.position + 1).saturating_sub(w));
        let num_keys = last_key - first_key;
        let kv_at = first_key * kv_stride + kv_head * dim;
        let queries = Rows { data: &q[tile.first_row * q_stride + tile.head * dim..], stride: q_stride };
        let mut scores = vec![0.0; tile.queries * num_keys];
        let keys = Rows { data: &cache.k[kv_at..], stride: kv_stride };
        matmul::product_transposed(&mut scores, num_keys, queries, keys, [tile.queries, num_keys, dim], heads.scale);
        causal_softmax(&mut scores, num_keys, first_key, tile.position, window);
        let mut out = vec![0.0; tile.queries * dim];
        let values = Rows { data: &cache.v[kv_at..], stride: kv_stride };
        matmul::product(&mut out, dim, Rows { data: &scores, stride: num_keys }, values, [tile.queries, dim, num_keys]);
        out
    };
    let parts: Vec<Vec<f32>> = tiles.par_iter().map(one).collect();
    gather(dst, &tiles, &parts, heads.q, dim);
}

/// Latent attention: `dst` is `[T, H * Dv]`, `q` is `[T, H * (Dn + Dr)]`, `up` is `[H * (Dn + Dv), Rkv]`. Scores are
/// `scale * (q_n U_n c + q_r k_r)`, the output is `U_v sum(p c)`.
pub(super) fn latent(
    dst: &mut [f32],
    q: &[f32],
    batch: &Batch,
    caches: &HashMap<SeqId, Vec<LayerCache>>,
    layer: LayerId,
    mla: &Mla,
    up: &[f32],
) {
    let (rank, row) = (mla.kv_rank, mla.kv_rank + mla.rope);
    let (q_width, q_stride) = (mla.nope + mla.rope, mla.heads * (mla.nope + mla.rope));
    let tiles = tiles(batch, mla.heads);
    let one = |tile: &Tile| {
        let cache = &caches[&tile.seq][layer.0 as usize];
        let num_keys = tile.position + tile.queries;
        let q_at = tile.first_row * q_stride + tile.head * q_width;
        let up_head = &up[tile.head * (mla.nope + mla.v) * rank..][..(mla.nope + mla.v) * rank];
        let mut queries = vec![0.0; tile.queries * row];
        let nope = Rows { data: &q[q_at..], stride: q_stride };
        matmul::product(&mut queries, row, nope, Rows { data: up_head, stride: rank }, [tile.queries, rank, mla.nope]);
        for t in 0..tile.queries {
            let from = q_at + t * q_stride + mla.nope;
            queries[t * row + rank..(t + 1) * row].copy_from_slice(&q[from..from + mla.rope]);
        }
        let mut scores = vec![0.0; tile.queries * num_keys];
        let keys = Rows { data: &cache.k, stride: row };
        let lhs = Rows { data: &queries, stride: row };
        matmul::product_transposed(&mut scores, num_keys, lhs, keys, [tile.queries, num_keys, row], mla.scale);
        causal_softmax(&mut scores, num_keys, 0, tile.position, None);
        let mut mixed = vec![0.0; tile.queries * rank];
        matmul::product(&mut mixed, rank, Rows { data: &scores, stride: num_keys }, keys, [tile.queries, rank, num_keys]);
        let mut out = vec![0.0; tile.queries * mla.v];
        let up_v = Rows { data: &up_head[mla.nope * rank..], stride: rank };
        matmul::product_transposed(&mut out, mla.v, Rows { data: &mixed, stride: rank }, up_v, [tile.queries, mla.v, rank], 1.0);
        out
    };
    let parts: Vec<Vec<f32>> = tiles.par_iter().map(one).collect();
    gather(dst, &tiles, &parts, mla.heads, mla.v);
}
