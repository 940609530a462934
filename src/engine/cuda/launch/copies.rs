//! Experts over the link, for a layer and for the one behind it.

use super::{BLOCK_RESERVED, Grid, Limits};

/// Blocks that copy experts by registers, a megabyte in flight together.
const COPY_BLOCKS: usize = 64;
/// Bytes that one of them copies at a time; `PIECE` in `tiers.cu`.
const COPY_PIECE: usize = 256 * 16 * 4;
/// Most pieces that one of them has in shared memory; `MOST_STAGES` there.
const COPY_MOST_STAGES: usize = 8;
/// Bytes in flight from which a link is busy even while pieces are counted, and most blocks that have them: one multiprocessor of so many.
const COPY_AHEAD: usize = 768 << 10;
const COPY_SHARE: usize = 9;
const COPY_MOST: usize = 12;
/// Shared memory of [`bring`] that is not asked for at launch.
const COPY_STATIC: usize = 640;
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

/// Blocks that copy through shared memory, and pieces that each has there.
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
    let grid = Grid::new([1 + blocks, 1, 1], 256).shared(stages * COPY_PIECE + known.unwrap_or(0));
    FetchLaunch { grid, stages }
}

/// Experts for the layer behind, over the same link.
pub fn bring(limits: Limits) -> FetchLaunch {
    let (blocks, stages) = staged_copies(limits);
    FetchLaunch { grid: Grid::new([blocks, 1, 1], 256).shared(stages * COPY_PIECE), stages }
}

/// Pieces in which so many bytes of an expert are copied.
pub fn fetch_pieces(bytes: usize) -> usize {
    bytes.div_ceil(COPY_PIECE)
}

impl Limits {
    /// What is left where [`bring`] copies while others compute, and so has multiprocessors of its own, as [`fetch`] then; one of each
    /// shares them where both fit. As they come first and spread, a product's block finds one of them on many.
    pub fn beside_fetches(self, ahead: bool) -> Self {
        let (blocks, stages) = staged_copies(self);
        let fit = (self.sm_shared_bytes / (stages * COPY_PIECE + COPY_KNOWN)).clamp(1, 2);
        let staged = ahead && self.bulk_copies;
        let kept = if staged { 1 + (2 * blocks).div_ceil(fit) } else { 0 };
        let beside_bytes = if staged { stages * COPY_PIECE + COPY_STATIC + BLOCK_RESERVED } else { 0 };
        Self { num_sm: self.num_sm.saturating_sub(kept).max(self.num_sm / 2), beside_bytes, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::super::experts::STREAM_STATIC;
    use super::super::tests::{H200, RTX_3090};
    use super::super::{ExpertShape, Width, gate_up};
    use super::*;

    /// Copies fit on cards with much and with little shared memory and many and few multiprocessors, beside the largest layers, and leave
    /// most of those to others. Counted by hand.
    #[test]
    fn copies_through_shared_memory_fit() {
        let small = Limits { bulk_copies: true, ..RTX_3090 };
        let smallest = Limits { num_sm: 12, ..small };
        for (limits, ahead, stages, blocks) in
            [(H200, true, 4, 13), (small, true, 4, 10), (smallest, true, 4, 2), (RTX_3090, true, 0, 65), (H200, false, 0, 65)]
        {
            let found = fetch(&[(128, 64), (1024, 1024)], ahead, limits);
            assert_eq!((found.stages, found.grid.blocks), (stages, [blocks, 1, 1]));
            assert!(found.grid.shared_bytes as usize <= limits.block_shared_bytes);
        }
        assert_eq!(H200.beside_fetches(true).num_sm, 132 - 13);
        assert_eq!(small.beside_fetches(true).num_sm, 82 - 19);
        assert_eq!((RTX_3090.beside_fetches(true).num_sm, H200.beside_fetches(false).num_sm), (82, 132));
    }

    /// A block of the experts' first half and one that brings experts share a multiprocessor, also where more stages would be of use (the third
    /// shape: 5 without the rule). Stages counted by hand.
    #[test]
    fn products_find_room_beside_copies() {
        let int4 = Width { bits: 4, group: 128 };
        let shape = |d, f, top_k| ExpertShape { d, f, experts: 128, top_k, first: int4, second: int4 };
        let limits = H200.beside_fetches(true);
        for (d, f, top_k, stages) in [(2048, 768, 8, 4), (4096, 14336, 2, 2), (2048, 1408, 6, 4)] {
            let l = gate_up(&shape(d, f, top_k), 1, false, limits).unwrap();
            let block = l.grid.shared_bytes as usize + STREAM_STATIC + BLOCK_RESERVED;
            let other = bring(H200).grid.shared_bytes as usize + COPY_STATIC + BLOCK_RESERVED;
            assert!(block + other <= H200.sm_shared_bytes, "{l:?}");
            assert_eq!(l.stages, stages, "{l:?}");
        }
        let alone = Limits { beside_bytes: 0, ..limits };
        assert_eq!(gate_up(&shape(2048, 1408, 6), 1, false, alone).unwrap().stages, 5);
    }
}
