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
}
