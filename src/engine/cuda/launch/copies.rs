//! Experts over the link, for a layer and for the one behind it.

use super::{Grid, Limits};

/// Blocks that copy experts by registers, a megabyte in flight together.
const COPY_BLOCKS: usize = 64;
/// Bytes that one of them copies at a time; `PIECE` in `tiers.cu`.
const COPY_PIECE: usize = 256 * 16 * 4;
/// Most pieces that one of them has in shared memory; `MOST_STAGES` there.
const COPY_MOST_STAGES: usize = 8;
/// Bytes in flight from which a link is busy even while pieces are counted, and most blocks that have them: one multiprocessor of so many.
const COPY_AHEAD: usize = 480 << 10;
const COPY_SHARE: usize = 13;
const COPY_MOST: usize = 10;
/// Shared memory that pieces leave to what the kernel knows of two layers.
const COPY_KNOWN: usize = 32 << 10;

/// How experts are brought over the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchLaunch {
    /// A block that decides, and those that copy.
    pub grid: Grid,
    /// Pieces that pass through shared memory at a time.
    pub stages: usize,
}

/// Blocks that copy through shared memory, and pieces that each has there. They ask for all of it: a fence waits for whatever its
/// multiprocessor has in flight over the link, so none that has other work to do shares one with them, nor both of their kernels.
fn staged_copies(limits: Limits) -> (usize, usize) {
    let fit = (limits.block_shared_bytes.saturating_sub(COPY_KNOWN) / COPY_PIECE).max(1);
    let blocks = (limits.num_sm / COPY_SHARE).clamp(1, COPY_MOST);
    (blocks, COPY_AHEAD.div_ceil(blocks * COPY_PIECE).min(fit).min(COPY_MOST_STAGES))
}

/// Missing experts over the link, of layers with so many experts and slots: the one they are for and the one behind. By registers of many
/// blocks, which begin sooner, or through shared memory of a few, which leave room for what others do meanwhile if any are brought `ahead`.
pub fn fetch(layers: &[(usize, usize)], ahead: bool, limits: Limits) -> FetchLaunch {
    let known = layers.iter().map(|&(experts, slots)| 12 * experts + 16 * slots + 12 * experts.div_ceil(32)).max();
    let (blocks, stages) = if ahead && limits.bulk_copies { staged_copies(limits) } else { (COPY_BLOCKS.min(limits.num_sm), 0) };
    let shared = if stages > 0 { limits.block_shared_bytes } else { known.unwrap_or(0) };
    let grid = Grid::new([1 + blocks, 1, 1], 256).shared(shared);
    FetchLaunch { grid, stages }
}

/// Experts for the layer behind, over the same link.
pub fn bring(limits: Limits) -> FetchLaunch {
    let (blocks, stages) = staged_copies(limits);
    FetchLaunch { grid: Grid::new([blocks, 1, 1], 256).shared(limits.block_shared_bytes), stages }
}

/// Pieces in which so many bytes of an expert are copied.
pub fn fetch_pieces(bytes: usize) -> usize {
    bytes.div_ceil(COPY_PIECE)
}

impl Limits {
    /// What is left where [`bring`] copies while others compute, and so has multiprocessors of its own, as [`fetch`] then.
    pub fn beside_fetches(self, ahead: bool) -> Self {
        let kept = if ahead && self.bulk_copies { 1 + 2 * staged_copies(self).0 } else { 0 };
        Self { num_sm: self.num_sm.saturating_sub(kept).max(self.num_sm / 2), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, RTX_3090};
    use super::*;

    /// Copies fit on cards with much and with little shared memory and many and few multiprocessors, with the largest layers, leave
    /// most of those to others, and nothing finds room beside them. Counted by hand; fails if any asks for less than all shared memory.
    #[test]
    fn copies_through_shared_memory_fit() {
        let small = Limits { bulk_copies: true, ..RTX_3090 };
        let smallest = Limits { num_sm: 12, ..small };
        for (limits, ahead, stages, blocks) in
            [(H200, true, 3, 11), (small, true, 4, 7), (smallest, true, 4, 2), (RTX_3090, true, 0, 65), (H200, false, 0, 65)]
        {
            let layers = [(128, 64), (1024, 1024)];
            let found = fetch(&layers, ahead, limits);
            let known = 12 * 1024 + 16 * 1024 + 12 * 32;
            let (needed, all) = (found.stages * COPY_PIECE + known, limits.block_shared_bytes);
            assert_eq!((found.stages, found.grid.blocks), (stages, [blocks, 1, 1]));
            assert!(needed <= all);
            let asked = if stages > 0 { all } else { needed };
            assert_eq!(found.grid.shared_bytes as usize, asked);
            if stages > 0 {
                assert_eq!(bring(limits).grid.shared_bytes as usize, all);
            }
        }
        assert_eq!(H200.beside_fetches(true).num_sm, 132 - 21);
        assert_eq!(small.beside_fetches(true).num_sm, 82 - 13);
        assert_eq!((RTX_3090.beside_fetches(true).num_sm, H200.beside_fetches(false).num_sm), (82, 132));
    }
}
