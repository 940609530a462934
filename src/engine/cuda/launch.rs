//! Launch geometry: from a problem to blocks, threads and shared memory. Pure, so that it can be tested without a GPU.

mod attention;
mod copies;
mod experts;
mod step;

pub use attention::*;
pub use copies::*;
pub use experts::*;
pub use step::*;

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
    /// Whether warpgroups multiply from shared memory.
    pub warpgroups: bool,
    /// Whether there is an engine that copies between global and shared memory in bulk.
    pub bulk_copies: bool,
}

/// Tokens up to which a product makes the planes of its own input.
pub const STAGED_TOK: usize = 4;
/// Tokens up to which decode kernels and graphs are used.
pub const DECODE_TOK: usize = 64;
/// Tokens from which logits of the router come from a product of their own.
const ROUTER_ROWS_TOK: usize = 65;
/// Experts up to which a warp chooses from registers, so that the experts' kernels may do it themselves.
const DIRECT_EXPERTS: usize = 128;
/// Addresses of an expert.
const EXPERT_POINTERS: usize = 6;
/// Shared memory that each block costs beside its own.
const BLOCK_RESERVED: usize = 1024;
/// Tokens of the widest pass of a product for few tokens.
const FEW_TOK: usize = 32;
/// Output rows from which a product for few tokens does not split k.
const TALL_ROWS: usize = 40_000;
/// Cost of a pass over weights, in tokens; of one by warpgroups, whose tile of codes costs as much to bring and unpack as so many tokens.
const PASS_COST: usize = 16;
const WIDE_PASS_COST: usize = 64;
/// Output rows of a block of the products by warpgroups, and its threads.
const WIDE_ROWS: usize = 192;
const WIDE_THREADS: u32 = 512;
/// Weights whose activations share a scale.
const GROUP_K: usize = 128;

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
            (8, group) if group == cols && ![32, 64, 128].contains(&group) => Some("w8_c"),
            (4, 128) => Some("w4"),
            (4, 64) => Some("w4_g64"),
            (4, 32) => Some("w4_g32"),
            (8, 128) => Some("w8"),
            (8, 64) => Some("w8_g64"),
            (8, 32) => Some("w8_g32"),
            _ => None,
        }
    }

    /// Four scales a group, or sixteen bits, take the most registers: fewer blocks a multiprocessor.
    fn is_widest(self) -> bool {
        self.bits == 16 || self.group == 32
    }

    /// Scales of a group of 128.
    fn scales_a_group(self) -> usize {
        if self.bits == 16 { 0 } else { (GROUP_K / self.group).max(1) }
    }

    /// Scales of a row.
    fn scales(self, cols: usize) -> usize {
        if self.bits == 16 { 0 } else { cols / self.group }
    }

    /// Bytes of the planes of one token's group, without and with its scale.
    fn block(self) -> usize {
        block_bytes(self.bits)
    }

    /// Groups that a ring of codes holds.
    fn depth(self) -> usize {
        if self.bits == 16 { 2 } else { 3 }
    }

    /// Bytes of a ring of codes and scales of `tiles` tiles of sixteen rows a warp.
    fn ring(self, tiles: usize, warps: usize, depth: usize) -> usize {
        warps * depth * (256 * tiles * self.bits + 128 * self.scales_a_group())
    }
}

fn block_bytes(bits: usize) -> usize {
    if bits == 16 { 512 } else { 256 }
}

/// Bytes of the planes of a token with so many columns.
pub fn plane_bytes(bits: usize, cols: usize) -> usize {
    cols.div_ceil(GROUP_K) * block_bytes(bits)
}

/// Scales of the planes of a token with so many columns, whole 16 bytes.
pub fn plane_scales(cols: usize) -> usize {
    cols.div_ceil(GROUP_K).next_multiple_of(4)
}

/// Planes of rows.
pub fn planes(cols: usize, num_rows: usize) -> Grid {
    Grid::new([num_rows, 1, 1], if cols <= 1024 { 128 } else { 256 })
}

/// The kernel that makes planes in the order that products by warpgroups read, or the others.
pub fn planes_name(bits: usize, wide: bool) -> String {
    format!("planes_{}{bits}", if wide { "k" } else { "w" })
}

/// Multiples of eight from the largest down.
fn eights(least: usize, most: usize) -> impl Iterator<Item = usize> {
    (least / 8..=most / 8).rev().map(|n| 8 * n)
}

/// Shared memory of the sums of warps that split k.
fn reduction(columns: usize, rows: usize, k_warps: usize) -> usize {
    if k_warps == 1 { 0 } else { 4 * k_warps * columns.min(16) * (rows + 8) }
}

/// Blocks of a multiprocessor: what shared memory allows, up to what the kernel was compiled for.
fn blocks_that_fit(shared: usize, most: usize, limits: Limits) -> Option<usize> {
    (shared <= limits.block_shared_bytes).then(|| (limits.sm_shared_bytes / (shared + BLOCK_RESERVED)).clamp(1, most))
}

/// Which variant of a product, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearLaunch {
    /// `s4`, `h4` read `f32` and may normalise; `n32`, `n64`, `wg` read planes.
    pub variant: &'static str,
    /// Blocks walk over tiles of rows; the second direction is runs of tokens.
    pub grid: Grid,
    /// Tokens at a time.
    pub columns: usize,
}

/// A product of `num_tok` rows of `cols` with matrices of so many `rows`; `None` if a block would need too much shared memory.
pub fn linear(width: Width, cols: usize, rows: &[usize], num_tok: usize, staged: bool, limits: Limits) -> Option<LinearLaunch> {
    let num_tok = num_tok.max(1);
    let tall = rows.iter().sum::<usize>() >= TALL_ROWS;
    let few = num_tok <= FEW_TOK && !tall;
    let (depth, widest) = (width.depth(), width.is_widest() as usize);
    let split = Product { variant: "s4", tiles: 1, m_warps: 1, k_warps: 8, depth, most_blocks: 3 - widest, most_tok: STAGED_TOK };
    let whole = Product { variant: "h4", m_warps: 8, k_warps: 1, depth: depth + 1, most_blocks: 2 - widest, ..split };
    let most_tok = if (width.bits, width.group) == (4, 32) { FEW_TOK / 2 } else { FEW_TOK };
    let planes = Product { variant: "n32", tiles: 2, m_warps: 1, k_warps: 8, depth: 2, most_blocks: 1, most_tok };
    let many = Product { variant: "n64", m_warps: 4, k_warps: 1, depth, most_blocks: 2, most_tok: 64, ..planes };
    let of = |p: Product| p.launch(width, cols, rows, num_tok, staged, limits);
    if !staged && limits.warpgroups && num_tok > FEW_TOK {
        return wide_linear(width, rows, num_tok, limits);
    }
    match (staged, few) {
        (true, _) => of(if tall { whole } else { split }),
        (false, true) => of(planes).or_else(|| of(many)),
        (false, false) => of(many),
    }
}

/// Name of the products by warpgroups.
pub const WIDE: &str = "wg";

/// Tokens that a block of those takes at a time, from the most down, and the shared memory for each. An expert has few tokens: its runs are shorter
/// and more of its groups on their way.
fn wide_runs(width: Width, experts: bool, limits: Limits) -> impl Iterator<Item = (usize, usize)> {
    let (most, depth) = match (width.bits, experts) {
        (4, false) => (128, 4),
        (8, false) => (128, 3),
        (4, true) => (64, 6),
        (8, true) => (64, 4),
        _ => (32, 3),
    };
    let stage = move |columns: usize| (columns * width.block() + WIDE_ROWS * (16 * width.bits + 16) + 576).next_multiple_of(1024);
    let runs = (1..=most / 16).rev().map(|n| 16 * n).map(move |columns| (columns, 1024 + depth * stage(columns)));
    runs.filter(move |r| r.1 <= limits.block_shared_bytes)
}

fn wide_linear(width: Width, rows: &[usize], num_tok: usize, limits: Limits) -> Option<LinearLaunch> {
    let tiles: usize = rows.iter().map(|r| r.div_ceil(WIDE_ROWS)).sum();
    let launched = |(columns, shared): (usize, usize)| {
        let work = tiles * num_tok.div_ceil(columns);
        let grid = Grid::new([work.min(limits.num_sm), 1, 1], WIDE_THREADS).shared(shared);
        (work.div_ceil(limits.num_sm) * (columns + WIDE_PASS_COST), LinearLaunch { variant: WIDE, grid, columns })
    };
    wide_runs(width, false, limits).map(launched).min_by_key(|l| l.0).map(|l| l.1)
}

/// What differs between the variants of a product.
#[derive(Clone, Copy)]
struct Product {
    variant: &'static str,
    /// Tiles of sixteen rows a warp.
    tiles: usize,
    /// Warps side by side and along k.
    m_warps: usize,
    k_warps: usize,
    /// Groups in the ring.
    depth: usize,
    /// Blocks of a multiprocessor it was compiled for.
    most_blocks: usize,
    /// Tokens at a time.
    most_tok: usize,
}

impl Product {
    fn launch(
        self,
        width: Width,
        cols: usize,
        rows: &[usize],
        num_tok: usize,
        staged: bool,
        limits: Limits,
    ) -> Option<LinearLaunch> {
        let warps = self.m_warps * self.k_warps;
        let tile_rows = 16 * self.tiles * self.m_warps;
        let num_tiles: usize = rows.iter().map(|r| r.div_ceil(tile_rows)).sum();
        let shared = |columns: usize| {
            let planes = match staged {
                true => columns * cols.div_ceil(GROUP_K) * (width.block() + 8) + 16,
                false => self.k_warps * self.depth * columns * (width.block() + 4),
            };
            width.ring(self.tiles, warps, self.depth) + planes + reduction(self.most_tok, tile_rows, self.k_warps)
        };
        let launched = |columns: usize| {
            let fit = blocks_that_fit(shared(columns), self.most_blocks, limits)? * limits.num_sm;
            let runs = num_tok.div_ceil(columns);
            let cost = (num_tiles * runs).div_ceil(fit) * (columns + PASS_COST);
            let grid = Grid::new([num_tiles.min((fit / runs).max(1)), runs, 1], 32 * warps as u32).shared(shared(columns));
            Some((cost, LinearLaunch { variant: self.variant, grid, columns }))
        };
        if staged {
            return if num_tok <= self.most_tok { launched(num_tok).map(|l| l.1) } else { None };
        }
        let most = num_tok.next_multiple_of(8).min(self.most_tok);
        let least = if self.k_warps > 1 { most } else { most.min(16) };
        let narrower = || eights(8, least - 8).find_map(launched);
        eights(least, most).filter_map(launched).min_by_key(|l| l.0).or_else(narrower).map(|l| l.1)
    }
}

/// Whether the router's logits come from a product of their own.
pub fn routes_rows(num_tok: usize) -> bool {
    num_tok >= ROUTER_ROWS_TOK
}

/// How the router's logits are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsLaunch {
    /// A warp an expert; the second direction is runs of tokens.
    pub name: &'static str,
    /// A block eight experts.
    pub grid: Grid,
    /// Whether rows of 16 bits wait in shared memory.
    pub ahead: bool,
}

/// Logits of the router and planes of its input; `None` for rows that no kernel takes.
pub fn router_logits(experts: usize, d: usize, num_tok: usize, half: bool, limits: Limits) -> Option<LogitsLaunch> {
    const MOST_COLS: usize = 8192;
    let (name, tokens) = if num_tok == 1 { ("router_logits_t1", 1) } else { ("router_logits", 4) };
    if d > MOST_COLS {
        return None;
    }
    let of = |ahead: bool| {
        let shared = 4 * tokens * d + if ahead { 16 * d } else { 0 };
        // where experts are few, more blocks than they need share the planes
        let blocks = experts.div_ceil(8).max(d.div_ceil(2048));
        let grid = Grid::new([blocks, num_tok.div_ceil(tokens), 1], 256).shared(shared);
        (shared <= limits.block_shared_bytes).then_some(LogitsLaunch { name, grid, ahead })
    };
    (if half { of(true) } else { None }).or_else(|| of(false))
}

/// How experts are chosen and listed from logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsLaunch {
    /// The narrowest instance.
    pub name: &'static str,
    /// A warp a token.
    pub grid: Grid,
    /// Tokens of a block.
    pub tokens: usize,
    /// Of the kernel that lists what was chosen, where the first is more than one block.
    pub list: Option<Grid>,
}

/// The choice of experts where the logits are there; one block, which also lists them, as long as there are few.
pub fn router_rows(experts: usize, top_k: usize, plain_top: bool, num_tok: usize, limits: Limits) -> Option<RowsLaunch> {
    const SPREAD: usize = 8;
    const MOST_PAIRS: usize = u16::MAX as usize;
    let narrow = plain_top && experts <= DIRECT_EXPERTS;
    let (name, warps) = if narrow { ("router_rows_t4", 32) } else { ("router_rows", 16) };
    let of = |blocks: usize, warps: usize, lists: usize| {
        let shared = 4 * (lists + if narrow { 0 } else { warps * experts });
        Grid::new([blocks, 1, 1], 32 * warps as u32).shared(shared)
    };
    let pairs = num_tok * top_k;
    let launch = if num_tok <= DECODE_TOK {
        let grid = of(1, warps, pairs.next_multiple_of(4) + experts);
        RowsLaunch { name, grid, tokens: num_tok.next_multiple_of(warps), list: None }
    } else {
        let list = Some(Grid::new([experts, 1, 1], 256));
        RowsLaunch { name, grid: of(num_tok.div_ceil(SPREAD), SPREAD, 0), tokens: SPREAD, list }
    };
    (pairs <= MOST_PAIRS && launch.grid.shared_bytes as usize <= limits.block_shared_bytes).then_some(launch)
}

/// What copies into shared memory are to begin with; `COPY_LINE` in `stream.cuh`.
const LINE: usize = 128;

/// `bytes` up to whole lines.
fn lines(bytes: usize) -> usize {
    bytes.next_multiple_of(LINE)
}

/// Slices of a row of logits, and bins of a histogram of weights; `SLICES` and `BINS` in `sample.cu`.
pub const SAMPLE_SLICES: usize = 32;
/// See [`SAMPLE_SLICES`].
pub const SAMPLE_BINS: usize = 2048;

/// Histograms of weights.
pub fn sample_bins(num_rows: usize) -> Grid {
    Grid::new([SAMPLE_SLICES, num_rows, 1], 256)
}

/// Cuts and draws.
pub fn sample_draw(num_rows: usize) -> Grid {
    Grid::new([num_rows, 1, 1], 1024)
}

/// Greedy choice: enough blocks to read the logits of few rows at full speed.
pub fn argmax(num_rows: usize) -> Grid {
    Grid::new([(64 / num_rows.max(1)).max(4), num_rows, 1], 256)
}

#[cfg(test)]
pub(super) mod tests {
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

    pub(in super::super) const H200: Limits =
        Limits { num_sm: 132, block_shared_bytes: 232_448, sm_shared_bytes: 233_472, warpgroups: true, bulk_copies: true };
    pub(super) const RTX_3090: Limits =
        Limits { num_sm: 82, block_shared_bytes: 101_376, sm_shared_bytes: 102_400, warpgroups: false, bulk_copies: false };

    /// The shapes of the models in the README launch on the smallest supported cards at any batch.
    #[test]
    fn products_fit_small_cards() {
        let w = |bits, group| Width { bits, group };
        for limits in [H200, RTX_3090] {
            for t in [1, 2, 4, 5, 8, 16, 32, 64, 512] {
                for (d, f, experts, top_k) in [(2048, 768, 128, 8), (4096, 14336, 8, 2), (2048, 1408, 60, 4)] {
                    for width in [w(8, 128), w(4, 32), w(16, 1)] {
                        assert!(linear(width, d, &[d, 512], t, false, limits).is_some(), "linear {width:?} {d} {t}");
                        let shape = ExpertShape { d, f, experts, top_k, first: width, second: width };
                        assert!(gate_up(&shape, t, false, limits).is_some(), "gate_up {width:?} {d} {t}");
                        assert!(down_pairs(&shape, t, false, limits).is_some(), "down_pairs {width:?} {d} {t}");
                    }
                    assert!(routes_rows(t) || router_logits(experts, d, t, true, limits).is_some(), "router {d} {t}");
                    assert!(router_rows(experts, top_k, false, t, limits).is_some(), "router_rows {d} {t}");
                }
            }
        }
    }

    /// Every token is in a run, and no run is empty.
    #[test]
    fn runs_cover_the_tokens() {
        for t in 1..200 {
            assert!(
                linear(Width { bits: 8, group: 128 }, 2048, &[5120], 0, false, H200).is_some(),
                "a pass that asks for no logits"
            );
            for rows in [&[5120][..], &[2048], &[151_936]] {
                let l = linear(Width { bits: 8, group: 128 }, 2048, rows, t, t <= STAGED_TOK, H200).unwrap();
                if l.variant == WIDE {
                    assert!(l.columns.is_multiple_of(16) && t > FEW_TOK, "{t} {l:?}");
                    continue;
                }
                let runs = l.grid.blocks[1] as usize;
                assert!(runs * l.columns >= t && (runs - 1) * l.columns < t, "{t} {l:?}");
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
        assert_eq!(name(8, 128, 128), Some("w8"));
        assert_eq!(name(4, 96, 192), None);
        assert_eq!(name(16, 7, 7), Some("w16"));
    }
}
