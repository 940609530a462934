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
const SM_THREADS: usize = 2048;

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

    /// Groups shorter than a step of four lanes need more registers, hence smaller blocks.
    fn is_small(self) -> bool {
        self.bits != 16 && self.group < step_cols(self.bits)
    }
}

/// Which variant of a product, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearLaunch {
    /// `s` reads `f32` in natural order and may normalise; `n1`, `n2`, `n4` read bf16.
    pub variant: &'static str,
    /// Blocks walk over tiles of 16 rows.
    pub grid: Grid,
}

/// A product of `num_tok` rows of `cols` with `tiles` tiles of 16 rows; `None` if a block would need too much shared memory.
pub fn linear(width: Width, cols: usize, tiles: usize, num_tok: usize, staged: bool, limits: Limits) -> Option<LinearLaunch> {
    let (variant, wide) = match num_tok {
        _ if staged => ("s", 1),
        0..=8 => ("n1", 1),
        9..=16 => ("n2", 2),
        _ => ("n4", 4),
    };
    let step = step_cols(width.bits);
    let quads = cols.div_ceil(4 * step);
    let small = wide > 1 || width.is_small();
    let warps = quads.clamp(1, if small { 8 } else { 16 });
    let (chunks, rows) = if staged { (quads * step / 2, num_tok) } else { (step / 2, 8 * wide * warps) };
    let shared = 4 * (8 * warps).max(32) + 1280 * warps * wide + 16 * chunk_stride(chunks) * rows;
    if shared > limits.block_shared_bytes {
        return None;
    }
    let registers = if small { 208 } else { 80 };
    let fit =
        (limits.sm_shared_bytes / (shared + 1024)).min(SM_REGISTERS / (warps * 32 * registers)).min(SM_THREADS / (warps * 32));
    let blocks = tiles.min(fit.max(1) * limits.num_sm);
    Some(LinearLaunch { variant, grid: Grid::new([blocks, 1, 1], 32 * warps as u32).shared(shared) })
}

/// Tokens that a block of the fused router takes.
pub fn router_tokens(num_tok: usize) -> usize {
    if num_tok == 1 { 1 } else { 4 }
}

/// The narrowest instance of the fused router.
pub fn router_name(experts: usize, plain_top: bool, num_tok: usize) -> &'static str {
    match num_tok {
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

/// The first half of the experts.
pub fn gate_up(width: Width, d: usize, f: usize, slots: usize, limits: Limits) -> Option<Grid> {
    let step = step_cols(width.bits);
    let each = 128 * chunk_stride(step / 4) + 1280;
    let most = (limits.block_shared_bytes / each).min(if width.is_small() { 8 } else { 16 }).max(1);
    let warps = d.div_ceil(step).div_ceil(2).clamp(1, most);
    let shared = warps * each;
    let grid = Grid::new([f.div_ceil(16), slots, 1], 32 * warps as u32).shared(shared);
    (shared <= limits.block_shared_bytes).then_some(grid)
}

/// The second half of the experts, and the steps of a chunk.
pub fn down(width: Width, d: usize, f: usize, top_k: usize, num_tok: usize, limits: Limits) -> Option<(Grid, usize)> {
    const MOST_STEPS: usize = 3;
    let step = step_cols(width.bits);
    let steps = f.div_ceil(step);
    let chunk_steps = steps.div_ceil(steps.div_ceil(MOST_STEPS));
    let chunks = steps.div_ceil(chunk_steps);
    let threads = if width.is_small() { 256 } else { 512 };
    let staged = 16 * (threads / 32) * num_tok.min(8) * chunk_stride(chunk_steps * step / 8);
    let shared = staged + 64 * num_tok * top_k * chunks;
    let grid = Grid::new([d.div_ceil(16), 1, 1], threads as u32).shared(shared);
    (shared <= limits.block_shared_bytes && num_tok * top_k <= 65535).then_some((grid, chunk_steps))
}

/// Most blocks that share the pages of one sequence and head.
pub fn attention_splits(num_tok: usize) -> usize {
    (128 / num_tok.max(1)).clamp(1, 32)
}

/// Decode attention.
pub fn attention(head_dim: usize, kv_heads: usize, num_tok: usize) -> Grid {
    let pages = 4 * 2 * 16 * (head_dim + 8) * 2;
    let merge = 4 * 16 * (head_dim + 2) * 4;
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
                    assert!(gate_up(w(4, 128), d, f, (t * top_k).min(experts), limits).is_some(), "gate_up {d} {t}");
                    assert!(t > 8 || down(w(4, 128), d, f, top_k, t, limits).is_some(), "down {f} {t}");
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
