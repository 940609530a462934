//! Launchers of `kernels/tiles.cu`: products of many tokens.

use super::launch::{self, Grid};
use super::module::kernels;
use super::plain::Matrix;

kernels! {
    /// Products in tiles.
    Tiles {
        tiles_linear(dst: u64, dst_stride: i32, src: u64, src_stride: i32, pick: u64, w: Matrix, bias: Matrix, scale: f32, num_tok: i32);
        tiles_lists(lists: u64, counts: u64, totals: u64, experts: u64, num_pairs: i32, cap: i32);
        tiles_experts(dst: u64, dst_stride: i32, src: u64, src_stride: i32, divide: i32, table: u64, which: i32, lists: u64, counts: u64, cap: i32);
        tiles_combine(dst: u64, outputs: u64, gates: u64, top_k: i32, width: i32);
        tiles_moments(sums: u64, x: Side, lists: u64, counts: u64, cap: i32, experts: u64);
        tiles_energies(sums: u64, x: Side, lists: u64, counts: u64, cap: i32, experts: u64);
        tiles_products(sums: u64, left: Side, right: Side, lists: u64, counts: u64, cap: i32, experts: u64);
        tiles_less(dst: u64, a: u64, b: u64, factor: f32, n: u64);
        tiles_shares(shares: u64, gates: u64, top_k: i32, n: u64);
        tiles_weigh(roots: u64, roots_stride: i32, logits: u64, of: u64, num_rows: i32, num_sets: i32);
        tiles_scores(scores: u64, q: u64, q_stride: i32, k: u64, k_stride: i32, num_tok: i32, dim: i32, group: i32, scale: f32);
        tiles_softmax(scores: u64, num_tok: i32, window: i32);
        tiles_mix(dst: u64, dst_stride: i32, scores: u64, v: u64, v_stride: i32, num_tok: i32, dim: i32, group: i32);
        tiles_rows(dst: u64, a: u64, a_stride: i32, a_from: i32, b: u64, b_from: i32, tiles: u64, cols: i32, depth: i32, n_from: i32, subtract: i32);
        tiles_back(dst: u64, g: u64, upper: u64, weight: u64, tiles: u64, cols: i32);
        tiles_forth(dst: u64, g: u64, upper: u64, tiles: u64, cols: i32);
        tiles_pick(dst: u64, src: u64, rows: u64, cols: i32, n: u64);
        tiles_decode(dst: u64, w: Matrix);
    }
}

/// Rows of some pairs, each times its gate; `Side` in `tiles.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Side {
    pub src: u64,
    pub gates: u64,
    pub stride: i32,
    pub divide: i32,
    pub cols: i32,
    pub pad: i32,
}

/// Sums of a block, either way.
const TILE: usize = 128;
/// Threads of a block.
const THREADS: u32 = 256;

/// One block a tile of `cols` columns and `rows` rows, for each of `problems`.
pub(super) fn tiles(cols: usize, rows: usize, problems: usize) -> Grid {
    Grid::new([cols.div_ceil(TILE), rows.div_ceil(TILE), problems], THREADS)
}

/// One block a tile of `cols` columns, for each of `rows` tiles of rows.
pub(super) fn columns(cols: usize, rows: usize) -> Grid {
    Grid::new([cols.div_ceil(TILE), rows, 1], THREADS)
}

/// One block a tile on or below the diagonal.
pub(super) fn triangle(cols: usize, problems: usize) -> Grid {
    let n = cols.div_ceil(TILE);
    Grid::new([n * (n + 1) / 2, 1, problems], THREADS)
}

/// One thread a column.
pub(super) fn each_column(cols: usize, problems: usize) -> Grid {
    Grid::new([cols.div_ceil(256), 1, problems], 256)
}

/// Lists of the pairs of each expert.
pub(super) fn lists(experts: usize) -> Grid {
    Grid::new([experts, 1, 1], THREADS)
}

/// One block a row of scores.
pub(super) fn softmax(num_tok: usize, heads: usize) -> Grid {
    launch::parts(num_tok, heads, 128)
}

#[cfg(test)]
mod tests {
    use super::super::module::tests::parameters;
    use super::*;

    /// A launcher whose parameters differ from the kernel's would corrupt memory; fails on any missing or swapped type.
    #[test]
    fn launchers_have_the_parameters_of_the_kernels() {
        let source = include_str!("../../../kernels/tiles.cu");
        for (kernel, types) in Tiles::SIGNATURES {
            assert_eq!(parameters(source, kernel), *types, "{kernel}");
        }
        assert_eq!(source.matches("extern \"C\" __global__").count(), Tiles::SIGNATURES.len());
        assert_eq!(size_of::<Side>(), 32);
    }

    /// Every tile on or below the diagonal has a block, and no other.
    #[test]
    fn a_triangle_is_covered_once() {
        for cols in [1usize, 128, 129, 768, 2048] {
            let n = cols.div_ceil(TILE);
            let place = |mut x: usize| {
                let mut y = 0;
                while x > y {
                    y += 1;
                    x -= y;
                }
                (y, x)
            };
            let found: std::collections::BTreeSet<_> = (0..triangle(cols, 1).blocks[0] as usize).map(place).collect();
            let wanted = (0..n).flat_map(|y| (0..=y).map(move |x| (y, x))).collect();
            assert_eq!(found, wanted);
        }
    }
}
