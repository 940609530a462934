//! Launch geometry: from a problem to blocks, threads and shared memory. Pure, so that it can be tested without a GPU.

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in each direction; a zero launches nothing.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
}

impl Grid {
    /// Without dynamic shared memory.
    pub fn new(blocks: [usize; 3], threads: u32) -> Self {
        Self { blocks: blocks.map(|b| b as u32), threads, shared_bytes: 0 }
    }

    /// With dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self { shared_bytes: bytes as u32, ..self }
    }
}

/// Most blocks of a kernel that strides over its elements.
const ELEMENT_BLOCKS: usize = 4096;
/// Warps of a block that computes one output element a warp.
const ROW_WARPS: usize = 8;
/// Tokens that such a warp carries; `TOKENS` in `plain.cu`.
const ROW_TOKENS: usize = 8;

/// One thread an element, striding.
pub fn elements(n: usize) -> Grid {
    Grid::new([n.div_ceil(256).min(ELEMENT_BLOCKS), 1, 1], 256)
}

/// One block a token.
pub fn tokens(num_tok: usize) -> Grid {
    Grid::new([num_tok, 1, 1], 256)
}

/// One block for each of `each` parts of a token.
pub fn parts(each: usize, num_tok: usize, threads: u32) -> Grid {
    Grid::new([each, num_tok, 1], threads)
}

/// One warp an output row, carrying a few tokens.
pub fn rows(rows: usize, num_tok: usize) -> Grid {
    Grid::new([rows.div_ceil(ROW_WARPS), num_tok.div_ceil(ROW_TOKENS), 1], 32 * ROW_WARPS as u32)
}

/// One warp an output row of each of `outer` x `inner` problems.
pub fn rows_of(rows: usize, outer: usize, inner: usize) -> Grid {
    Grid::new([rows.div_ceil(ROW_WARPS), outer, inner], 32 * ROW_WARPS as u32)
}

/// The plain router: a warp a token with its scores, a copy, the groups and the chosen in shared memory.
pub fn route(experts: usize, groups: usize, top_k: usize, num_tok: usize) -> Grid {
    Grid::new([num_tok, 1, 1], 32).shared(4 * (2 * experts + groups + top_k))
}

/// What a device allows, for geometry.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Multiprocessors.
    pub num_sm: usize,
    /// Most shared memory of a block.
    pub block_shared_bytes: usize,
    /// Shared memory of a multiprocessor.
    pub sm_shared_bytes: usize,
}

/// Tokens up to which a product stages and normalises its own input.
pub const STAGED_TOK: usize = 4;
/// Tokens up to which decode kernels and graphs are used.
pub const DECODE_TOK: usize = 64;
/// Registers of a multiprocessor and threads it holds.
const SM_REGISTERS: usize = 65536;

/// 16-byte chunks from one staged row to the next, odd multiples of 4 so that rows fall into different banks.
fn chunk_stride(chunks: usize) -> usize {
    (chunks | 7) + 5
}

/// Columns that four lanes read at once.
fn step_cols(bits: usize) -> usize {
    512 / bits
}

/// How a matrix is stored, as kernel names spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Width {
    /// 4, 8 or 16.
    pub bits: usize,
    /// Columns a scale covers; ignored for 16 bits.
    pub group: usize,
}

impl Width {
    /// The part of a kernel's name that says so; `None` where no kernel was built.
    pub fn name(self, cols: usize) -> Option<&'static str> {
        match (self.bits, self.group) {
            (16, _) => Some("w16"),
            (8, group) if group == cols => Some("w8_c"),
            (4, 128) => Some("w4"),
            (4, 64) => Some("w4_g64"),
            (4, 32) => Some("w4_g32"),
            (8, 128) => Some("w8"),
            (8, 64) => Some("w8_g64"),
            (8, 32) => Some("w8_g32"),
            _ => None,
        }
    }

    /// Four groups a step take the most registers, hence half the warps.
    fn is_widest(self) -> bool {
        (self.bits, self.group) == (4, 32)
    }

    /// Steps of a group, at least one.
    fn steps_a_group(self, cols: usize) -> usize {
        if self.group == cols { 1 } else { (self.group / step_cols(self.bits)).max(1) }
    }
}

/// Which variant of a product, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearLaunch {
    /// `s` reads `f32` in natural order and may normalise; `n1`, `n2`, `n4` read bf16.
    pub variant: &'static str,
    /// Blocks walk over tiles of 16 rows.
    pub grid: Grid,
    /// Items of weights in shared memory.
    pub stages: usize,
}

/// A product of `num_tok` rows of `cols` with `tiles` tiles of 16 rows; `None` if a block would need too much shared memory.
pub fn linear(width: Width, cols: usize, tiles: usize, num_tok: usize, staged: bool, limits: Limits) -> Option<LinearLaunch> {
    let (variant, columns) = match num_tok {
        _ if staged => ("s", 1),
        0..=8 => ("n1", 1),
        9..=16 => ("n2", 2),
        _ => ("n4", 4),
    };
    let step = step_cols(width.bits);
    let own = if columns > 1 { 4 } else { 8 };
    let runs = cols.div_ceil(own * step);
    let base = |warps: usize| 4 * (8 * warps).max(32) + 1280 * warps * columns;
    let launched = |warps: usize, shared: usize, registers: usize, stages: usize| {
        let fit = (limits.sm_shared_bytes / (shared + 1024)).min(SM_REGISTERS / (warps * 32 * registers)).max(1);
        let blocks = tiles.min(fit * limits.num_sm);
        let grid = Grid::new([blocks, 1, 1], 32 * warps as u32).shared(shared);
        let fits = shared <= limits.block_shared_bytes;
        fits.then_some((LinearLaunch { variant, grid, stages }, tiles <= fit * limits.num_sm))
    };
    if columns > 1 {
        let shared = |warps: usize| base(warps) + 16 * chunk_stride(step / 2) * 8 * columns * warps;
        let fewer = (0..4).map(|halvings| (runs.clamp(1, 8) >> halvings).max(1));
        return fewer.into_iter().find_map(|warps| launched(warps, shared(warps), 208, 1)).map(|l| l.0);
    }
    let row_bytes = cols * width.bits / 8;
    let mut warps = runs.clamp(1, 8);
    loop {
        let rounds = runs.div_ceil(warps);
        for stages in if rounds == 1 { 1..=2 } else { 2..=2 } {
            let activations = if staged { chunk_stride(runs * step) } else { warps * chunk_stride(step) };
            let shared = base(warps) + stages * 16 * line(row_bytes.min(512 * warps)) + 16 * num_tok * activations;
            match launched(warps, shared, 80, stages) {
                Some((_, false)) if stages == 1 => {}
                Some((launch, _)) => return Some(launch),
                None => break,
            }
        }
        if warps == 1 {
            return None;
        }
        warps /= 2;
    }
}

/// Bytes of one row's run of weights in shared memory, so that eight rows fall into different banks.
fn line(bytes: usize) -> usize {
    bytes.next_multiple_of(128) + 64
}

/// Tokens that a block of the fused router takes.
pub fn router_tokens(num_tok: usize) -> usize {
    if num_tok <= 32 { 1 } else { 4 }
}

/// The narrowest instance of the fused router.
pub fn router_name(experts: usize, plain_top: bool, num_tok: usize) -> &'static str {
    match router_tokens(num_tok) {
        _ if experts > 128 || !plain_top => "router_topk",
        1 => "router_topk_t1",
        _ => "router_topk_t4",
    }
}

/// The fused router.
pub fn router(experts: usize, top_k: usize, d: usize, num_tok: usize, limits: Limits) -> Option<Grid> {
    let tokens = router_tokens(num_tok);
    let shared = 4 * (tokens * (d + experts) + (tokens * experts).max(num_tok * top_k) + 64);
    let grid = Grid::new([8, num_tok.div_ceil(tokens), 1], 256).shared(shared);
    (shared <= limits.block_shared_bytes).then_some(grid)
}

/// Which instance of the first half of the experts, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateUpLaunch {
    /// Ending of the kernel's name: more warps a tile for one or two tokens, blocks that walk tiles for some more.
    pub variant: &'static str,
    /// One block a tile and slot, or fewer that walk.
    pub grid: Grid,
    /// Tiles in shared memory.
    pub stages: usize,
    /// Tokens of an expert at a time.
    pub columns: usize,
}

/// The first half of the experts.
pub fn gate_up(width: Width, d: usize, f: usize, slots: usize, num_tok: usize, limits: Limits) -> Option<GateUpLaunch> {
    let step = step_cols(width.bits);
    let (row_bytes, tiles) = (d * width.bits / 8, f.div_ceil(16));
    let one_round = row_bytes <= if width.is_widest() { 1024 } else { 2048 };
    if (3..=16).contains(&num_tok) && one_round {
        let (stages, columns, warps) = (2, num_tok.min(2), d.div_ceil(step).div_ceil(2).max(1));
        let shared = stages * 32 * row_bytes + warps * (2560 + 16 * stages * columns * chunk_stride(step / 4));
        if shared <= limits.block_shared_bytes {
            let fit = (limits.sm_shared_bytes / (shared + 1024)).min(SM_REGISTERS / (warps * 32 * 128)).max(1);
            let grid = Grid::new([(tiles * slots).min(fit * limits.num_sm), 1, 1], 32 * warps as u32).shared(shared);
            return Some(GateUpLaunch { variant: "_many", grid, stages, columns });
        }
    }
    let (variant, own) = if num_tok <= 2 { ("_few", 2) } else { ("", 4) };
    let fewer = (0..4).map(|halvings| (d.div_ceil(step).div_ceil(own).clamp(1, 8) >> halvings).max(1));
    fewer.into_iter().find_map(|warps| {
        let weights = 32 * line((64 * own * warps).min(row_bytes));
        let shared = weights + warps * (1280 + 16 * num_tok.min(8) * chunk_stride(own * step / 8));
        let grid = Grid::new([tiles, slots, 1], 32 * warps as u32).shared(shared);
        (shared <= limits.block_shared_bytes).then_some(GateUpLaunch { variant, grid, stages: 1, columns: 1 })
    })
}

/// How the second half of the experts is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownLaunch {
    /// One block 16 rows.
    pub grid: Grid,
    /// Steps that a warp takes at once.
    pub chunk_steps: usize,
    /// Items of weights in shared memory a warp.
    pub stages: usize,
    /// Tokens of an expert at a time.
    pub columns: usize,
}

/// The second half of the experts: the longest chunks and most stages that fit.
pub fn down(width: Width, d: usize, f: usize, top_k: usize, num_tok: usize, limits: Limits) -> Option<DownLaunch> {
    const MOST_STEPS: usize = 6;
    let warps = if width.is_widest() { 8 } else { 16 };
    let longest = if num_tok == 1 { 3 } else { MOST_STEPS };
    let step = step_cols(width.bits);
    let (steps, whole) = (f.div_ceil(step), width.steps_a_group(f));
    if num_tok * top_k > 65535 {
        return None;
    }
    for most in (1..=longest).rev() {
        let chunk_steps = steps.div_ceil(steps.div_ceil(most)).next_multiple_of(whole);
        if chunk_steps > MOST_STEPS {
            continue;
        }
        let chunks = steps.div_ceil(chunk_steps);
        let most_stages = if num_tok * top_k * chunks <= warps { 1 } else { 2 };
        for stages in (1..=most_stages).rev() {
            let weights = stages * line((64 * chunk_steps).min(f * width.bits / 8));
            let columns = 1;
            let activations = stages * columns * chunk_stride(chunk_steps * step / 8);
            let shared = warps * 16 * (weights + activations) + 64 * num_tok * top_k * chunks;
            if shared <= limits.block_shared_bytes {
                let grid = Grid::new([d.div_ceil(16), 1, 1], 32 * warps as u32).shared(shared);
                return Some(DownLaunch { grid, chunk_steps, stages, columns });
            }
        }
    }
    None
}

/// Most blocks that share the pages of one sequence and head.
pub fn attention_splits(num_tok: usize) -> usize {
    (128 / num_tok.max(1)).clamp(1, 32)
}

/// Decode attention.
pub fn attention(head_dim: usize, kv_heads: usize, num_tok: usize) -> Grid {
    let pages = 4 * 2 * 16 * (head_dim + 8) * 2;
    let merge = 4 * 16 * (head_dim + 4) * 4;
    let shared = pages.max(merge) + 18 * (head_dim + 8) * 2 + 18 * head_dim * 4;
    Grid::new([attention_splits(num_tok), kv_heads, num_tok], 128).shared(shared)
}

/// Greedy choice: enough blocks to read the logits of few rows at full speed.
pub fn argmax(num_rows: usize) -> Grid {
    Grid::new([(64 / num_rows.max(1)).max(4), num_rows, 1], 256)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row and token is covered, and no block is wholly idle.
    #[test]
    fn rows_cover_edges_exactly() {
        for n in [1, 7, 8, 9, 768, 151_936] {
            for t in [1, 8, 9, 512] {
                let g = rows(n, t);
                let covered = |blocks: u32, each: usize| blocks as usize * each;
                assert!(covered(g.blocks[0], 8) >= n && covered(g.blocks[0] - 1, 8) < n);
                assert!(covered(g.blocks[1], 8) >= t && covered(g.blocks[1] - 1, 8) < t);
            }
        }
    }

    const H200: Limits = Limits { num_sm: 132, block_shared_bytes: 232_448, sm_shared_bytes: 233_472 };
    const RTX_3090: Limits = Limits { num_sm: 82, block_shared_bytes: 101_376, sm_shared_bytes: 102_400 };

    /// The shapes of the models in the README launch on the smallest supported cards at batch 1 to 32.
    #[test]
    fn decode_fits_small_cards() {
        let w = |bits, group| Width { bits, group };
        for limits in [H200, RTX_3090] {
            for t in [1, 2, 4, 8, 16, 32] {
                for (d, f, experts, top_k) in [(2048, 768, 128, 8), (4096, 14336, 8, 2), (2048, 1408, 60, 4)] {
                    assert!(linear(w(8, 128), d, 512, t, t <= STAGED_TOK, limits).is_some(), "linear {d} {t}");
                    assert!(router(experts, top_k, d, t, limits).is_some(), "router {d} {t}");
                    assert!(gate_up(w(4, 128), d, f, (t * top_k).min(experts), t, limits).is_some(), "gate_up {d} {t}");
                    assert!(t > 4 || down(w(4, 128), d, f, top_k, t, limits).is_some(), "down {f} {t}");
                }
            }
        }
    }

    /// A kernel without a matching instance must not be named.
    #[test]
    fn widths_name_built_kernels_only() {
        let name = |bits, group, cols| Width { bits, group }.name(cols);
        assert_eq!(name(4, 128, 2048), Some("w4"));
        assert_eq!(name(4, 64, 192), Some("w4_g64"));
        assert_eq!(name(8, 1408, 1408), Some("w8_c"));
        assert_eq!(name(8, 32, 96), Some("w8_g32"));
        assert_eq!(name(4, 96, 192), None);
        assert_eq!(name(16, 7, 7), Some("w16"));
    }
}
