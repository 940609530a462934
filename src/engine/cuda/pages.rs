//! Which pages of the key and value pool belong to which sequence. Pure.

use crate::ids::SeqId;
use std::collections::HashMap;

/// Tokens of a page; `PAGE` in the kernels.
pub const PAGE_TOKENS: usize = 16;

/// Pages and lengths of all sequences.
#[derive(Debug, Default)]
pub struct PageTable {
    free: Vec<u32>,
    num_pages: usize,
    sequences: HashMap<SeqId, Sequence>,
    /// A sequence gave its pages back since the last look.
    changed: bool,
}

#[derive(Debug, Default)]
struct Sequence {
    len: usize,
    pages: Vec<u32>,
}

impl PageTable {
    /// An empty pool.
    pub fn new(num_pages: usize) -> Self {
        Self { free: (0..num_pages as u32).rev().collect(), num_pages, sequences: HashMap::new(), changed: false }
    }

    /// Pages of the pool.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Adds pages to the pool, up to so many.
    pub fn grow(&mut self, num_pages: usize) {
        self.free.splice(0..0, (self.num_pages as u32..num_pages as u32).rev());
        self.num_pages = self.num_pages.max(num_pages);
    }

    /// Tokens that all pages together hold.
    pub fn capacity_tok(&self) -> usize {
        self.num_pages * PAGE_TOKENS
    }

    /// Tokens of a sequence whose keys are stored.
    pub fn len(&self, seq: SeqId) -> usize {
        self.sequences.get(&seq).map_or(0, |s| s.len)
    }

    /// Makes room for `len` tokens in all; false if the pool has too few pages left, and then nothing changes.
    #[must_use]
    pub fn reserve(&mut self, seq: SeqId, len: usize) -> bool {
        let sequence = self.sequences.entry(seq).or_default();
        let more = len.div_ceil(PAGE_TOKENS).saturating_sub(sequence.pages.len());
        if more > self.free.len() {
            return false;
        }
        sequence.pages.extend(self.free.drain(self.free.len() - more..).rev());
        true
    }

    /// Notes that a sequence now has `len` tokens stored.
    pub fn set_len(&mut self, seq: SeqId, len: usize) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            debug_assert!(len <= s.pages.len() * PAGE_TOKENS);
            s.len = len;
        }
    }

    /// Pages of a sequence in order.
    pub fn pages(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq).map_or(&[], |s| &s.pages)
    }

    /// Whether any sequence was released since this was last asked, so that a name and a number of pages no longer say which.
    pub fn changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Gives the pages of a sequence back.
    pub fn release(&mut self, seq: SeqId) {
        if let Some(s) = self.sequences.remove(&seq) {
            self.free.extend(s.pages.into_iter().rev());
            self.changed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No page is ever owned twice, and a refused reservation leaves the pool as it was.
    #[test]
    fn pages_have_one_owner() {
        let mut table = PageTable::new(4);
        assert!(table.reserve(SeqId(0), 17));
        assert!(table.reserve(SeqId(1), 16));
        assert!(!table.reserve(SeqId(1), 64));
        assert!(table.reserve(SeqId(1), 17));
        let mut all: Vec<u32> = [0, 1].iter().flat_map(|&s| table.pages(SeqId(s)).to_vec()).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3]);
        table.release(SeqId(0));
        assert!(table.reserve(SeqId(2), 32) && !table.reserve(SeqId(3), 1));
        table.grow(6);
        assert!(table.reserve(SeqId(3), 20) && !table.reserve(SeqId(3), 33));
        assert_eq!((table.pages(SeqId(3)), table.capacity_tok()), (&[4, 5][..], 96));
    }
}
