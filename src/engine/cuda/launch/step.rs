//! All layers of one token in one launch.

use super::super::pages::PAGE_TOKENS;
use super::{EXPERT_POINTERS, ExpertShape, GROUP_K, Grid, LINE, Limits, Width, attention, attention_splits, down, lines};

/// Groups of a row that the kernel takes at a time; `SLICE` in `step.cu`.
const SLICE: usize = 16;
/// Rows of a tile of the experts' second half where they are long, groups of one that a warp has, and tiles of a block; `LONG_ROWS` and `LONG_PLANES`
/// in `step.cu`.
const LONG_ROWS: usize = 4;
const LONG_PLANES: usize = 16;
/// Groups of long rows are a multiple of these: whole pairs of each quarter.
const LONG_GROUPS: usize = 8;
const LONG_TILES: usize = 32 / LONG_ROWS;
/// Pages of a tile of keys and values; `TILE_PAGES` in `step.cu`.
const TILE_PAGES: usize = 4;
/// Warps that compute, groups of planes of each, floats of partial sums; `COMPUTE`, `PLANE_GROUPS` and `RED` in `step.cu`.
const WARPS: usize = 8;
const PLANE_GROUPS: usize = 8;
const SUMS: usize = 2048;
/// Most experts, most of them a token, and most groups of a row of the model's width or of all heads.
const MOST_EXPERTS: usize = 128;
const MOST_TOP_K: usize = 32;
const MOST_GROUPS: usize = 32;

/// A model of equal layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// `D`.
    pub d: usize,
    /// `H`.
    pub heads: usize,
    /// `Hk`.
    pub kv_heads: usize,
    /// `Dh`.
    pub head_dim: usize,
    /// `F`.
    pub f: usize,
    /// `E`.
    pub experts: usize,
    /// `K`.
    pub top_k: usize,
    /// Of the matrices of attention.
    pub attention: Width,
    /// Of the experts'.
    pub expert: Width,
}

impl StepShape {
    fn experts(&self) -> ExpertShape {
        let &Self { d, f, experts, top_k, expert, .. } = self;
        ExpertShape { d, f, experts, top_k, first: expert, second: expert }
    }
}

/// How all layers of one token are launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLaunch {
    /// The instance.
    pub name: String,
    /// Blocks that are all resident at a time.
    pub grid: Grid,
    /// Bytes of the ring of tiles.
    pub ring: usize,
    /// Parts of a row of the second half of the experts.
    pub split: usize,
    /// Rows of a tile there.
    pub down_rows: usize,
}

/// The pair of formats that the kernel is compiled for, and whether for long rows in the second half of the experts, as its name spells it; `None`
/// where no kernel was built.
pub fn step_form(attention: Width, expert: Width, f: usize) -> Option<&'static str> {
    match (attention.bits, expert.bits, f > SLICE * GROUP_K) {
        _ if attention.group != GROUP_K || expert.group != GROUP_K => None,
        (8, 4, false) => Some("w8_w4"),
        (4, 4, false) => Some("w4_w4"),
        (8, 4, true) => Some("w8_w4_long"),
        (4, 4, true) => Some("w4_w4_long"),
        _ => None,
    }
}

/// Whether sums of so many groups are folded in the order of kernels whose warps split k into segments.
fn folds(groups: usize, segments: usize) -> bool {
    groups < segments || groups.is_multiple_of(segments)
}

/// All layers of one token; `None` if the kernel does not take the shape. The sums are those of [`down`] and the other kernels that it replaces.
pub fn step(shape: &StepShape, limits: Limits) -> Option<StepLaunch> {
    let StepShape { d, heads, kv_heads, head_dim, f, experts, top_k, .. } = *shape;
    let form = step_form(shape.attention, shape.expert, f)?;
    let width = heads * head_dim;
    let [d_groups, o_groups, f_groups] = [d, width, f].map(|n| n / GROUP_K);
    let whole = [d, width, f].iter().all(|&n| n > 0 && n.is_multiple_of(GROUP_K)) && d_groups.max(o_groups) <= MOST_GROUPS;
    let folded = folds(d_groups, WARPS) && folds(o_groups, WARPS) && folds(d_groups, WARPS / 2);
    let long = f_groups > SLICE;
    let grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads / kv_heads <= 8 && [64, 128].contains(&head_dim);
    let routed = experts <= MOST_EXPERTS && top_k <= MOST_TOP_K.min(experts);
    let resident = kv_heads * attention_splits(kv_heads, 1) <= limits.num_sm;
    if !(limits.warpgroups && limits.bulk_copies && whole && folded && grouped && routed && resident) {
        return None;
    }
    let down_rows = match long {
        true => LONG_ROWS,
        false if d / 16 > limits.num_sm => 32,
        false => 16,
    };
    let sums = down(&shape.experts(), 1, true, limits)?;
    let alike = if long {
        // Pairs of groups, none of them in two stages.
        let pairs = sums.chunk.is_multiple_of(2) && sums.chunk.div_ceil(sums.split) == 2;
        pairs
            && f_groups.is_multiple_of(LONG_GROUPS)
            && f_groups <= WARPS * LONG_PLANES
            && d.div_ceil(LONG_ROWS * limits.num_sm) <= LONG_TILES
    } else {
        sums.chunk == f_groups && WARPS.is_multiple_of(sums.split)
    };

    let unit = lines(attention(head_dim, heads, kv_heads, 1).shared_bytes as usize);
    let fixed = unit + WARPS * PLANE_GROUPS * 264 + 2 * 4 * SUMS + 8 * EXPERT_POINTERS * MOST_EXPERTS;
    let ring = limits.block_shared_bytes.checked_sub(fixed)? / LINE * LINE;
    let rows = |groups: usize| if groups > SLICE { 8 } else { 16 };
    let tile = |rows: usize, groups: usize, of: Width| lines(rows * groups * (16 * of.bits + 2));
    let projected = |groups: usize| tile(rows(groups), groups, shape.attention);
    let gate_up = tile(2 * rows(d_groups), d_groups, shape.expert);
    let longest = if long { tile(LONG_ROWS, f_groups, shape.expert) } else { 0 };
    let pages = TILE_PAGES * PAGE_TOKENS * 4 * head_dim;
    // In the place of attention: planes of h of all warps, or a tile of each expert. Sums: of a tile of each part of all rows of a block.
    let (kept, sums_kept) = match long {
        true => (WARPS * LONG_PLANES * 264, f_groups / 2 * LONG_ROWS * LONG_TILES),
        false => (top_k * down_rows * f_groups * (16 * shape.expert.bits + 2), top_k * sums.split * down_rows),
    };
    let fits = 2 * projected(d_groups).max(projected(o_groups)).max(gate_up).max(longest).max(pages) <= ring
        && kept <= unit
        && sums_kept <= SUMS
        && d.is_multiple_of(down_rows);
    let grid = Grid::new([limits.num_sm, 1, 1], 32 * (WARPS as u32 + 4)).shared(fixed + ring);
    let name = format!("step_{form}_d{head_dim}");
    (alike && fits).then_some(StepLaunch { name, grid, ring, split: sums.split, down_rows })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, RTX_3090};
    use super::*;

    fn int(bits: usize) -> Width {
        Width { bits, group: 128 }
    }

    const QWEN3: StepShape = StepShape {
        d: 2048,
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        f: 768,
        experts: 128,
        top_k: 8,
        attention: Width { bits: 8, group: 128 },
        expert: Width { bits: 4, group: 128 },
    };
    const MIXTRAL: StepShape = StepShape { d: 4096, kv_heads: 8, f: 14336, experts: 8, top_k: 2, ..QWEN3 };

    /// Counted by hand.
    #[test]
    fn models_of_the_readme_are_taken() {
        let fixed = 78_720 + 64 * 264 + 16_384 + 6144;
        let qwen3 = step(&QWEN3, H200).unwrap();
        assert_eq!((qwen3.name.as_str(), qwen3.split, qwen3.down_rows), ("step_w8_w4_d128", 1, 16));
        assert_eq!((qwen3.grid.blocks, qwen3.grid.threads), ([132, 1, 1], 384));
        assert_eq!(qwen3.grid.shared_bytes as usize, fixed + qwen3.ring);
        let mixtral = step(&MIXTRAL, H200).unwrap();
        assert_eq!((mixtral.name.as_str(), mixtral.split, mixtral.down_rows), ("step_w8_w4_long_d128", 14, 4));
        assert_eq!(mixtral.ring, qwen3.ring);
        assert_eq!(step(&StepShape { f: 1536, ..MIXTRAL }, H200).map(|l| (l.split, l.down_rows)), Some((2, 32)));
        assert_eq!(step(&StepShape { attention: int(4), ..QWEN3 }, H200).unwrap().name, "step_w4_w4_d128");
    }

    /// What a block asks for and declares fits, and the second half's sums are those of the kernel for it alone.
    #[test]
    fn blocks_fit_and_sum_alike() {
        for base in [QWEN3, MIXTRAL] {
            for (d, f, top_k, experts) in [
                (1024, 512, 4, 60),
                (2048, 1408, 4, 60),
                (2048, 2048, 4, 64),
                (4096, 1024, 2, 16),
                (512, 1024, 8, 128),
                (2048, 4096, 2, 8),
                (1024, 7168, 3, 5),
                (4096, 14336, 2, 8),
            ] {
                let shape = StepShape { d, f, top_k, experts, ..base };
                let l = step(&shape, H200).unwrap_or_else(|| panic!("{shape:?}"));
                assert!(l.grid.shared_bytes as usize <= H200.block_shared_bytes && l.ring.is_multiple_of(128), "{shape:?}");
                let sums = down(&shape.experts(), 1, true, H200).unwrap();
                let long = f > SLICE * 128;
                let kept = if long { f / 256 * LONG_ROWS * LONG_TILES } else { top_k * l.split * l.down_rows };
                assert!(kept <= SUMS && d.is_multiple_of(l.down_rows), "{shape:?} {l:?}");
                if long {
                    // A part is a pair of groups.
                    let chunks = (f / 128).div_ceil(sums.chunk);
                    assert_eq!((sums.split * chunks, sums.chunk % 2, l.split), (f / 256, 0, sums.split), "{shape:?}");
                } else {
                    assert_eq!((sums.split, sums.chunk), (l.split, f / 128), "{shape:?}");
                }
            }
        }
    }

    /// Each of these breaks one bound of the kernel.
    #[test]
    fn other_shapes_are_left_alone() {
        let broken = [
            StepShape { d: 2048 + 128, ..QWEN3 },
            StepShape { d: 640, ..QWEN3 },
            StepShape { d: 8192, ..QWEN3 },
            StepShape { head_dim: 96, ..QWEN3 },
            StepShape { kv_heads: 2, ..QWEN3 },
            StepShape { f: 17 * 128, ..QWEN3 },
            StepShape { f: 136 * 128, ..MIXTRAL },
            StepShape { f: 84 * 128, ..MIXTRAL },
            StepShape { f: 700, ..QWEN3 },
            StepShape { experts: 160, ..QWEN3 },
            StepShape { top_k: 16, f: 1536, ..QWEN3 },
            StepShape { attention: Width { bits: 16, group: 1 }, ..QWEN3 },
            StepShape { expert: Width { bits: 4, group: 32 }, ..QWEN3 },
            StepShape { expert: int(8), ..QWEN3 },
        ];
        for shape in broken {
            assert_eq!(step(&shape, H200), None, "{shape:?}");
        }
        assert_eq!(step(&QWEN3, RTX_3090), None);
    }
}
