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

/// Queries of one task, rows `[heads, queries]`: a run of one head, or one of each of several heads that read the same keys.
struct Tile {
    seq: SeqId,
    /// Index of the first query in the batch.
    first_row: usize,
    /// Position of the first query.
    position: usize,
    queries: usize,
    /// First head.
    head: usize,
    heads: usize,
}

impl Tile {
    fn rows(&self) -> usize {
        self.heads * self.queries
    }
}

/// Tasks for `heads` of which each `group` read the same keys. Single queries take as many of those at a time as leave every thread a task.
fn tiles(batch: &Batch, heads: usize, group: usize) -> Vec<Tile> {
    let single = batch.segments.iter().filter(|s| s.len == 1).count();
    let threads = rayon::current_num_threads();
    let fits = |share: &usize| group.is_multiple_of(*share) && single * heads / share >= threads;
    let share = (1..=group).rev().find(fits).unwrap_or(1);
    let mut tiles = Vec::new();
    let mut first_row = 0;
    for s in &batch.segments {
        let share = if s.len == 1 { share } else { 1 };
        for t in (0..s.len).step_by(QUERY_TILE) {
            let queries = QUERY_TILE.min(s.len - t);
            tiles.extend((0..heads).step_by(share).map(|head| Tile {
                seq: s.seq,
                first_row: first_row + t,
                position: s.start + t,
                queries,
                head,
                heads: share,
            }));
        }
        first_row += s.len;
    }
    tiles
}

/// Softmax of each row over the keys its query may see; `first_key` is the position of the first score. Others become zero.
fn causal_softmax(scores: &mut [f32], num_keys: usize, first_key: usize, tile: &Tile, window: Option<usize>) {
    for (r, row) in scores.chunks_exact_mut(num_keys).enumerate() {
        let seen = tile.position + r % tile.queries + 1;
        let end = seen - first_key;
        let begin = window.map_or(0, |w| seen.saturating_sub(w).saturating_sub(first_key));
        softmax(&mut row[begin..end]);
        row[..begin].fill(0.0);
        row[end..].fill(0.0);
    }
}

/// Scatters the per-tile results `[heads, queries, width]` into `dst[T, heads * width]`.
fn gather(dst: &mut [f32], tiles: &[Tile], parts: &[Vec<f32>], heads: usize, width: usize) {
    for (tile, part) in tiles.iter().zip(parts) {
        for (r, row) in part.chunks_exact(width).enumerate() {
            let at = ((tile.first_row + r % tile.queries) * heads + tile.head + r / tile.queries) * width;
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
    let group = heads.q / heads.kv;
    let tiles = tiles(batch, heads.q, group);
    let one = |tile: &Tile| {
        let cache = &caches[&tile.seq][layer.0 as usize];
        let kv_head = tile.head / group;
        let last_key = tile.position + tile.queries;
        let first_key = window.map_or(0, |w| (tile.position + 1).saturating_sub(w));
        let num_keys = last_key - first_key;
        let kv_at = first_key * kv_stride + kv_head * dim;
        let stride = if tile.queries == 1 { dim } else { q_stride };
        let queries = Rows { data: &q[tile.first_row * q_stride + tile.head * dim..], stride };
        let mut scores = vec![0.0; tile.rows() * num_keys];
        let keys = Rows { data: &cache.k[kv_at..], stride: kv_stride };
        matmul::product_transposed(&mut scores, num_keys, queries, keys, [tile.rows(), num_keys, dim], heads.scale);
        causal_softmax(&mut scores, num_keys, first_key, tile, window);
        let mut out = vec![0.0; tile.rows() * dim];
        let values = Rows { data: &cache.v[kv_at..], stride: kv_stride };
        matmul::product(&mut out, dim, Rows { data: &scores, stride: num_keys }, values, [tile.rows(), dim, num_keys]);
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
    let tiles = tiles(batch, mla.heads, mla.heads);
    let one = |tile: &Tile| {
        let cache = &caches[&tile.seq][layer.0 as usize];
        let num_keys = tile.position + tile.queries;
        let up_head = |head: usize| &up[head * (mla.nope + mla.v) * rank..][..(mla.nope + mla.v) * rank];
        let mut queries = vec![0.0; tile.rows() * row];
        for (queries, head) in queries.chunks_exact_mut(tile.queries * row).zip(tile.head..) {
            let q_at = tile.first_row * q_stride + head * q_width;
            let nope = Rows { data: &q[q_at..], stride: q_stride };
            matmul::product(queries, row, nope, Rows { data: up_head(head), stride: rank }, [tile.queries, rank, mla.nope]);
            for (t, query) in queries.chunks_exact_mut(row).enumerate() {
                let from = q_at + t * q_stride + mla.nope;
                query[rank..].copy_from_slice(&q[from..from + mla.rope]);
            }
        }
        let mut scores = vec![0.0; tile.rows() * num_keys];
        let keys = Rows { data: &cache.k, stride: row };
        let lhs = Rows { data: &queries, stride: row };
        matmul::product_transposed(&mut scores, num_keys, lhs, keys, [tile.rows(), num_keys, row], mla.scale);
        causal_softmax(&mut scores, num_keys, 0, tile, None);
        let mut mixed = vec![0.0; tile.rows() * rank];
        matmul::product(&mut mixed, rank, Rows { data: &scores, stride: num_keys }, keys, [tile.rows(), rank, num_keys]);
        let mut out = vec![0.0; tile.rows() * mla.v];
        let heads = out.chunks_exact_mut(tile.queries * mla.v).zip(mixed.chunks_exact(tile.queries * rank)).zip(tile.head..);
        for ((out, mixed), head) in heads {
            let up_v = Rows { data: &up_head(head)[mla.nope * rank..], stride: rank };
            matmul::product_transposed(out, mla.v, Rows { data: mixed, stride: rank }, up_v, [tile.queries, mla.v, rank], 1.0);
        }
        out
    };
    let parts: Vec<Vec<f32>> = tiles.par_iter().map(one).collect();
    gather(dst, &tiles, &parts, mla.heads, mla.v);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Rows as Wanted;

    fn noise(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 997) as f32 / 498.0 - 1.0).collect()
    }

    /// Single tokens beside a run: one thread takes all heads of a token that read the same keys at once, 64 threads take one each. Products of
    /// other heights add in another order: 1e-5 of the largest output, a few roundings of 200 terms. Fails if a head's place or a row's
    /// position is taken from another.
    #[test]
    fn heads_together_attend_as_heads_alone() {
        let mut batch = Batch::default();
        let positions = [(SeqId(0), 70, 1), (SeqId(1), 3, 5), (SeqId(2), 0, 1), (SeqId(3), 199, 1)];
        positions.iter().for_each(|&(seq, start, len)| batch.push(seq, start, &vec![1; len], Wanted::Last, 512));
        let in_pool = |threads: usize, run: &(dyn Fn() -> Vec<f32> + Sync)| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
        };
        let agree = |run: &(dyn Fn() -> Vec<f32> + Sync), what: &str| {
            let alone = in_pool(64, run);
            let largest = alone.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for threads in [1, 3] {
                let worst = in_pool(threads, run).iter().zip(&alone).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= 1e-5 * largest, "{what}, {threads} threads: {worst:.1e} of {largest:.1e}");
            }
        };
        let caches = |k: usize, v: usize| -> HashMap<SeqId, Vec<LayerCache>> {
            let of = |i: usize, rows: usize| vec![LayerCache { k: noise(rows * k, i), v: noise(rows * v, i + 9) }];
            positions.iter().enumerate().map(|(i, &(seq, start, len))| (seq, of(i, start + len))).collect()
        };

        let heads = Heads { q: 12, kv: 2, dim: 24, scale: 0.2 };
        let (q, cache) = (noise(8 * 12 * 24, 31), caches(2 * 24, 2 * 24));
        for window in [None, Some(20)] {
            let run = || {
                let mut dst = vec![f32::NAN; q.len()];
                grouped(&mut dst, &q, &batch, &cache, LayerId(0), &heads, window);
                dst
            };
            agree(&run, "grouped");
        }

        let mla =
            Mla { heads: 6, q_rank: None, kv_rank: 40, nope: 16, rope: 8, v: 12, bias: false, latent_eps: 1e-6, scale: 0.2 };
        let (q, cache, up) = (noise(8 * 6 * 24, 32), caches(48, 0), noise(6 * 28 * 40, 33));
        let run = || {
            let mut dst = vec![f32::NAN; 8 * 6 * 12];
            latent(&mut dst, &q, &batch, &cache, LayerId(0), &mla, &up);
            dst
        };
        agree(&run, "latent");
    }
}
