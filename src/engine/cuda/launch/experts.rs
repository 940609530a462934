//! Both halves of the experts.

use super::{
    DIRECT_EXPERTS, EXPERT_POINTERS, GROUP_K, Grid, Limits, WIDE, WIDE_ROWS, WIDE_THREADS, Width, blocks_that_fit, eights, lines,
    plane_scales, wide_runs,
};

/// Tokens up to which the experts' rows are streamed whole.
const STREAMED_TOK: usize = 64;
/// Tokens up to which one kernel takes products and sums of the experts' second half.
const SUMMED_TOK: usize = 1;
/// Tokens and pairs up to which the experts' kernels choose for themselves.
const DIRECT_TOK: usize = 4;
const DIRECT_PAIRS: usize = 32;
/// Stages of a streaming kernel, and shared memory of it that is not asked for at launch.
const MOST_STAGES: usize = 8;
const STREAM_STATIC: usize = 2688;

/// Experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// `D`.
    pub d: usize,
    /// `F`.
    pub f: usize,
    /// `E`.
    pub experts: usize,
    /// `K`.
    pub top_k: usize,
    /// Of the gate and up matrices.
    pub first: Width,
    /// Of the down matrix.
    pub second: Width,
}

impl ExpertShape {
    /// Most experts that so many tokens choose.
    fn slots(&self, num_tok: usize) -> usize {
        (num_tok * self.top_k).min(self.experts)
    }

    /// Bytes of the addresses of all experts, which a block keeps that chooses for itself.
    fn table_bytes(&self, direct: bool) -> usize {
        if direct { 8 * EXPERT_POINTERS * self.experts } else { 0 }
    }
}

/// Whether the experts' kernels find the choice themselves instead of reading a list; for the plain highest only. Those that stream do, and rows
/// may be too long for them.
pub fn routes_directly(shape: &ExpertShape, num_tok: usize, limits: Limits) -> bool {
    let few = num_tok <= DIRECT_TOK && num_tok * shape.top_k <= DIRECT_PAIRS && shape.experts <= DIRECT_EXPERTS;
    let streams = |half: Option<ExpertsLaunch>| half.is_some_and(|l| l.variant == "s4");
    few && streams(gate_up(shape, num_tok, true, limits))
        && (down(shape, num_tok, true, limits).is_some() || streams(down_pairs(shape, num_tok, true, limits)))
}

/// How a half of the experts is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsLaunch {
    /// Ending of the kernel's name: `s4` streams whole rows, `n64` and `wg` are for many tokens.
    pub variant: &'static str,
    /// Tiles of rows, and blocks that walk over experts.
    pub grid: Grid,
    /// Tokens of an expert at a time.
    pub columns: usize,
    /// Tiles in shared memory and the teams that take them, for `s4`.
    pub stages: usize,
    /// Of four warps.
    pub teams: usize,
}

/// What differs between the halves of the experts.
struct Half {
    width: Width,
    /// Inner dimension, output rows, and matrices that a block reads side by side.
    inner: usize,
    rows: usize,
    matrices: usize,
    /// Rows of a tile of the streaming kernel, and its warps along k.
    tile_rows: usize,
    k_warps: usize,
}

/// The first half of the experts; `direct`: blocks choose for themselves.
pub fn gate_up(shape: &ExpertShape, num_tok: usize, direct: bool, limits: Limits) -> Option<ExpertsLaunch> {
    let half = Half { width: shape.first, inner: shape.d, rows: shape.f, matrices: 2, tile_rows: 32, k_warps: 4 };
    experts(shape, &half, num_tok, direct, limits)
}

/// The second half of the experts for pairs of tokens and experts, to be summed.
pub fn down_pairs(shape: &ExpertShape, num_tok: usize, direct: bool, limits: Limits) -> Option<ExpertsLaunch> {
    let half = Half { width: shape.second, inner: shape.f, rows: shape.d, matrices: 1, tile_rows: 64, k_warps: 1 };
    experts(shape, &half, num_tok, direct, limits)
}

/// Whether the experts of so many tokens are products by warpgroups.
pub fn wide_experts(num_tok: usize, limits: Limits) -> bool {
    limits.warpgroups && num_tok > STREAMED_TOK
}

fn experts(shape: &ExpertShape, half: &Half, num_tok: usize, direct: bool, limits: Limits) -> Option<ExpertsLaunch> {
    let (width, slots) = (half.width, shape.slots(num_tok));
    if wide_experts(num_tok, limits) {
        let (columns, shared) = wide_runs(width, true, limits).find(|r| r.0 <= num_tok.next_multiple_of(16))?;
        let work = half.rows.div_ceil(WIDE_ROWS / half.matrices) * slots * num_tok.div_ceil(columns);
        let grid = Grid::new([work.min(limits.num_sm), 1, 1], WIDE_THREADS).shared(shared + 4 * slots);
        let fits = grid.shared_bytes as usize <= limits.block_shared_bytes;
        return fits.then_some(ExpertsLaunch { variant: WIDE, grid, columns, stages: 0, teams: 0 });
    }
    let streamed = match num_tok {
        ..=STREAMED_TOK => streamed_experts(half, slots, shape.table_bytes(direct), num_tok, limits),
        _ => None,
    };
    let many = || {
        let tiles = half.rows.div_ceil(128 / half.matrices);
        let most_blocks = if half.matrices == 1 && width.is_widest() { 1 } else { 2 };
        eights(8, num_tok.next_multiple_of(8).min(64)).find_map(|columns| {
            let shared = width.ring(2, 4, width.depth()) + width.depth() * columns * (width.block() + 4);
            let fit = blocks_that_fit(shared, most_blocks, limits)? * limits.num_sm;
            let grid = Grid::new([tiles, slots.min((fit / tiles).max(1)), 1], 128).shared(shared);
            Some(ExpertsLaunch { variant: "n64", grid, columns, stages: 0, teams: 0 })
        })
    };
    streamed.or_else(many)
}

/// As many stages as fit and are of use, then as many teams; a team meets its own stages again.
fn streamed_experts(half: &Half, slots: usize, table_bytes: usize, num_tok: usize, limits: Limits) -> Option<ExpertsLaunch> {
    const COLUMNS: usize = 4;
    const MOST_TEAMS: usize = 3;
    const TEAM_WARPS: usize = 4;
    let (width, columns, groups) = (half.width, num_tok.clamp(1, COLUMNS), half.inner.div_ceil(GROUP_K));
    let codes = lines(half.tile_rows * half.inner * width.bits / 8);
    let planes = columns * (groups * width.block() + 4 * plane_scales(half.inner));
    let stage = lines(lines(codes + half.tile_rows * 2 * width.scales(half.inner)) + planes);
    let tiles = half.rows.div_ceil(half.tile_rows / half.matrices) * slots;
    let each = tiles.div_ceil(limits.num_sm);
    let sums = if half.k_warps > 1 { 4 * 2 * half.k_warps * COLUMNS * (half.tile_rows + 8) } else { 0 };
    let of = |teams: usize, stages: usize| {
        let shared = stages * stage + teams * sums + table_bytes;
        let grid = Grid::new([tiles.min(limits.num_sm), 1, 1], 32 * (TEAM_WARPS * teams + 1) as u32).shared(shared);
        let fits = shared + STREAM_STATIC <= limits.block_shared_bytes;
        fits.then_some(ExpertsLaunch { variant: "s4", grid, columns, stages, teams })
    };
    let all = (1..=MOST_TEAMS.min(each)).flat_map(|teams| (1..=MOST_STAGES / teams).map(move |n| (teams, n * teams)));
    let useful = all.filter(|&(teams, stages)| stages <= each.max(teams));
    useful.filter_map(|(teams, stages)| of(teams, stages)).max_by_key(|l| (l.stages, l.teams))
}

/// How the second half of the experts is launched where one kernel also sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownLaunch {
    /// Blocks walk over tiles of 16 rows.
    pub grid: Grid,
    /// Groups of a stage.
    pub chunk: usize,
    /// Stages in shared memory.
    pub stages: usize,
    /// Parts of a stage, and warps that share it.
    pub split: usize,
    /// See `split`.
    pub warps: usize,
}

/// The second half of the experts where one kernel also sums.
pub fn down(shape: &ExpertShape, num_tok: usize, direct: bool, limits: Limits) -> Option<DownLaunch> {
    const WARPS: usize = 8;
    const MOST_SLICE: usize = 2048;
    const MOST_GROUPS: usize = 6;
    let &ExpertShape { d, f, top_k, second: width, .. } = shape;
    if num_tok > SUMMED_TOK || num_tok * top_k > DIRECT_PAIRS {
        return None;
    }
    let (groups, row_bytes, pairs) = (f.div_ceil(GROUP_K), f * width.bits / 8, num_tok * top_k);
    let chunk = groups.div_ceil(row_bytes.div_ceil(MOST_SLICE));
    let chunks = groups.div_ceil(chunk);
    // Long stages take so many groups a warp that a warp's latency shows: they get twice as many warps.
    let (split, warps, teams) = match [1, 2, 4].into_iter().find(|s| chunk <= MOST_GROUPS * s) {
        Some(split) => (split, split, WARPS / split),
        None => {
            let split = chunk.div_ceil(2);
            (split, split.div_ceil(split.div_ceil(WARPS)), 2)
        }
    };
    let stage = lines(lines(16 * (16 * chunk * width.bits).min(row_bytes)) + 32 * width.scales(f));
    let planes = pairs * groups * width.block() + (4 * pairs * groups).next_multiple_of(16);
    let rest = planes + 2 * 64 * pairs * chunks * split + shape.table_bytes(direct);
    let tiles = d.div_ceil(16);
    let useful = (pairs * chunks * tiles.div_ceil(limits.num_sm)).next_multiple_of(teams).min(MOST_STAGES);
    let fits = |stages: &usize| stages * stage + rest + STREAM_STATIC <= limits.block_shared_bytes;
    let stages = (1..=useful / teams).rev().map(|n| n * teams).find(fits)?;
    let threads = 32 * (teams * warps + 1) as u32;
    let grid = Grid::new([tiles.min(limits.num_sm), 1, 1], threads).shared(stages * stage + rest);
    Some(DownLaunch { grid, chunk, stages, split, warps })
}

/// The sum over ranks.
pub fn combine(d: usize, num_tok: usize) -> Grid {
    Grid::new([d.div_ceil(512), num_tok, 1], 128)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, RTX_3090};
    use super::*;

    /// A team that met a stage of another team could take it for full; fails if stages are no multiple of the teams.
    #[test]
    fn teams_meet_their_own_stages() {
        for limits in [H200, RTX_3090] {
            for width in [Width { bits: 4, group: 128 }, Width { bits: 8, group: 32 }, Width { bits: 16, group: 1 }] {
                for (d, f, top_k) in [(2048, 768, 8), (4096, 14336, 2), (256, 96, 4), (2048, 1408, 6)] {
                    let shape = ExpertShape { d, f, experts: 512, top_k, first: width, second: width };
                    for t in [1, 2, 5, 64] {
                        let halves = [gate_up(&shape, t, false, limits), down_pairs(&shape, t, false, limits)];
                        for l in halves.into_iter().flatten().filter(|l| l.variant == "s4") {
                            assert!(l.stages % l.teams == 0 && (1..=MOST_STAGES).contains(&l.stages), "{l:?}");
                        }
                    }
                    for l in (1..=SUMMED_TOK).filter_map(|t| down(&shape, t, false, limits)) {
                        let teams = (l.grid.threads as usize / 32 - 1) / l.warps;
                        assert!(l.stages % teams == 0 && (1..=MOST_STAGES).contains(&l.stages), "{l:?}");
                    }
                }
            }
        }
    }

    /// Kernels that do not stream know nothing of a choice without a list: where either half falls to them, there is one. Fails if only the first
    /// half, or neither, is asked.
    #[test]
    fn only_streaming_kernels_go_without_a_list() {
        let w = |bits, group| Width { bits, group };
        let mut seen = [0, 0];
        for limits in [H200, RTX_3090] {
            for first in [w(4, 128), w(8, 128), w(16, 1)] {
                for second in [first, w(8, 32)] {
                    for (d, f, experts, top_k) in
                        [(2048, 768, 128, 8), (4096, 14336, 8, 2), (1024, 7168, 5, 3), (4096, 1024, 16, 2), (8192, 256, 8, 2)]
                    {
                        for t in 1..=6 {
                            let shape = ExpertShape { d, f, experts, top_k, first, second };
                            let direct = routes_directly(&shape, t, limits);
                            seen[direct as usize] += 1;
                            if !direct {
                                continue;
                            }
                            assert!(t <= DIRECT_TOK && t * top_k <= DIRECT_PAIRS, "{shape:?} {t}");
                            let half = gate_up(&shape, t, true, limits).unwrap();
                            assert_eq!(half.variant, "s4", "{shape:?} {t}");
                            if down(&shape, t, true, limits).is_none() {
                                let half = down_pairs(&shape, t, true, limits).unwrap();
                                assert_eq!(half.variant, "s4", "{shape:?} {t}");
                            }
                        }
                    }
                }
            }
        }
        assert!(seen[0] > 50 && seen[1] > 50, "{seen:?}");
        let int4 = w(4, 128);
        let mixtral = ExpertShape { d: 4096, f: 14336, experts: 8, top_k: 2, first: int4, second: int4 };
        assert_eq!([1, 2, 4].map(|t| routes_directly(&mixtral, t, H200)), [true, false, false]);
    }
}
