//! Runs the steps of a plan. Each engine is one exhaustive `match` over [`crate::model::plan::Step`]; callers see whole
//! buffers between steps and observe routing through [`Event`]s, so measuring needs no second forward pass.

pub mod cpu;

use crate::ids::{LayerId, SeqId};

/// Tokens to run in one pass, over one or several sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids of all segments, one after the other.
    pub tokens: Vec<u32>,
    /// Consecutive runs of `tokens`.
    pub segments: Vec<Segment>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose cache they extend.
    pub seq: SeqId,
    /// Position of the first token; the cache holds exactly this many.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Rows of logits wanted.
    pub rows: Rows,
    /// Length the sequence is planned to reach, tokens; LongRoPE chooses its table by it.
    pub context: usize,
}

/// Which rows of a segment get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None; the head is skipped.
    None,
    /// The last token's.
    Last,
    /// Every token's.
    All,
}

impl Batch {
    /// Adds a segment.
    pub fn push(&mut self, seq: SeqId, start: usize, tokens: &[u32], rows: Rows, context: usize) {
        self.tokens.extend_from_slice(tokens);
        self.segments.push(Segment { seq, start, len: tokens.len(), rows, context });
    }

    /// Indices into `tokens` of the rows that get logits, in order.
    pub fn logit_rows(&self) -> Vec<usize> {
        let mut rows = Vec::new();
        let mut first = 0;
        for s in &self.segments {
            match s.rows {
                Rows::None => {}
                Rows::Last => rows.extend((first + s.len).checked_sub(1).filter(|_| s.len > 0)),
                Rows::All => rows.extend(first..first + s.len),
            }
            first += s.len;
        }
        rows
    }
}

/// What an observer of a run sees.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A router has chosen.
    Routed {
        /// Which layer's.
        layer: LayerId,
        /// Logits before any softmax or grouping, `[T, E]`.
        logits: &'a [f32],
        /// Chosen experts, `[T, K]`.
        experts: &'a [u32],
        /// Their weights, `[T, K]`.
        gates: &'a [f32],
    },
}

/// Why a run stopped.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A token outside the vocabulary.
    #[error("token {token} at index {index} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Where in the batch.
        index: usize,
        /// `V`.
        vocab: usize,
    },
    /// A segment that does not continue its sequence.
    #[error("sequence {seq} has {cached} tokens in its cache, but the segment starts at {start}")]
    Position {
        /// Whose.
        seq: u32,
        /// Tokens in the cache.
        cached: usize,
        /// Position asked for.
        start: usize,
    },
    /// A weight that cannot be decoded.
    #[error(transparent)]
    Weight(#[from] crate::checkpoint::CheckpointError),
}
