//! Runs the steps of a plan. Each engine is one exhaustive `match` over [`crate::model::plan::Step`]; callers see whole
//! buffers between steps and observe routing through [`Event`]s, so measuring needs no second forward pass.

pub mod cpu;
pub mod cuda;
pub mod parity;
pub mod solver;

use crate::artifact::weights::Weights;
use crate::ids::{LayerId, SeqId};
use crate::model::plan::{Plan, Slot};
use crate::model::spec::ModelSpec;
use crate::sample::{SampleError, Sampler};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// Runs plans, somewhere.
pub enum Engine {
    /// On the processor: the reference.
    Cpu(Box<cpu::Engine>),
    /// On a GPU.
    Cuda(Box<cuda::Engine>),
}

impl From<cpu::Engine> for Engine {
    fn from(engine: cpu::Engine) -> Self {
        Engine::Cpu(Box::new(engine))
    }
}

impl From<cuda::Engine> for Engine {
    fn from(engine: cuda::Engine) -> Self {
        Engine::Cuda(Box::new(engine))
    }
}

impl Engine {
    /// On the processor.
    pub fn cpu(weights: Arc<Weights>) -> Self {
        Engine::Cpu(Box::new(cpu::Engine::new(weights)))
    }

    /// The steps it runs.
    pub fn plan(&self) -> &Plan {
        match self {
            Engine::Cpu(e) => e.plan(),
            Engine::Cuda(e) => e.plan(),
        }
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        match self {
            Engine::Cpu(e) => e.weights().spec(),
            Engine::Cuda(e) => e.spec(),
        }
    }

    /// The model's files; `None` for random weights.
    pub fn weights(&self) -> Option<&Arc<Weights>> {
        match self {
            Engine::Cpu(e) => Some(e.weights()),
            Engine::Cuda(e) => e.weights(),
        }
    }

    /// Forgets a sequence.
    pub fn release(&mut self, seq: SeqId) {
        match self {
            Engine::Cpu(e) => e.release(seq),
            Engine::Cuda(e) => e.release(seq),
        }
    }

    /// Tokens of a sequence in the cache.
    pub fn cached(&self, seq: SeqId) -> usize {
        match self {
            Engine::Cpu(e) => e.cached(seq),
            Engine::Cuda(e) => e.cached(seq),
        }
    }

    /// What has gone over the link for experts since this was last asked; `None` if all are where they are computed.
    pub fn take_traffic(&self) -> Result<Option<cuda::slots::Traffic>, EngineError> {
        match self {
            Engine::Cpu(_) => Ok(None),
            Engine::Cuda(e) => Ok(e.tiers().map(|t| t.take_traffic()).transpose()?),
        }
    }

    /// For how long decoding has waited for a device since this was last asked; `None` where there is none.
    pub fn take_waited(&mut self) -> Option<std::time::Duration> {
        match self {
            Engine::Cpu(_) => None,
            Engine::Cuda(e) => Some(e.take_waited()),
        }
    }

    /// What did not go as planned since this was last asked, a sentence each.
    pub fn take_notes(&mut self) -> Vec<String> {
        match self {
            Engine::Cpu(_) => Vec::new(),
            Engine::Cuda(e) => e.take_notes(),
        }
    }

    /// Sizes the buffers for a batch and checks it against vocabulary and caches.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        match self {
            Engine::Cpu(e) => e.begin(batch),
            Engine::Cuda(e) => e.begin(batch),
        }
    }

    /// Runs some steps of the plan on a batch that [`Engine::begin`] has seen.
    pub fn run(&mut self, steps: Range<usize>, batch: &Batch, on: &mut dyn FnMut(Event<'_>)) -> Result<(), EngineError> {
        match self {
            Engine::Cpu(e) => e.run(steps, batch, on),
            Engine::Cuda(e) => e.run(steps, Some(on)),
        }
    }

    /// Runs the whole plan, observed, and returns the logits, `[rows asked for, V]`.
    pub fn forward(&mut self, batch: &Batch, on: &mut dyn FnMut(Event<'_>)) -> Result<&[f32], EngineError> {
        match self {
            Engine::Cpu(e) => e.forward(batch, on),
            Engine::Cuda(e) => e.forward(batch, Some(on)),
        }
    }

    /// Runs the whole plan the fastest way there is; the logits are read with [`Engine::slot`].
    pub fn pass(&mut self, batch: &Batch) -> Result<(), EngineError> {
        match self {
            Engine::Cpu(e) => e.forward(batch, &mut |_| ()).map(drop),
            Engine::Cuda(e) => e.pass(batch),
        }
    }

    /// Continues sequences for `steps` tokens, which their samplers choose and which join their tokens; `on` sees the chosen ids of
    /// every step and may stop. A GPU samples by itself and runs one step ahead of what `on` sees.
    pub fn decode(
        &mut self,
        turns: &mut [Turn<'_>],
        steps: usize,
        context: usize,
        on: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<(), EngineError> {
        if let Engine::Cuda(e) = self
            && e.is_fast()
            && turns.len() <= cuda::launch::DECODE_TOK
            && (e.samples() || turns.iter().all(|t| t.sampler.config().is_greedy()))
        {
            return e.decode(turns, steps, context, on);
        }
        for _ in 0..steps {
            let mut batch = Batch::default();
            for turn in turns.iter() {
                let newest = turn.tokens.len().saturating_sub(1);
                batch.push(turn.seq, self.cached(turn.seq), &turn.tokens[newest..], Rows::Last, context);
            }
            self.pass(&batch)?;
            let (vocab, logits) = (self.spec().vocab, self.slot(Slot::Logits)?);
            let mut chosen = Vec::with_capacity(turns.len());
            for (turn, row) in turns.iter_mut().zip(logits.chunks_exact(vocab)) {
                let token = turn.sampler.sample(row, turn.tokens)?;
                turn.tokens.push(token);
                chosen.push(token);
            }
            if on(&chosen).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// A buffer as the last step left it, `[T, width]`; [`Slot::Logits`] is `[rows asked for, V]`.
    pub fn slot(&self, slot: Slot) -> Result<&[f32], EngineError> {
        match self {
            Engine::Cpu(e) => Ok(e.slot(slot)),
            Engine::Cuda(e) => e.slot(slot),
        }
    }

    /// Fills a buffer, e.g. the residual stream when layers are run one by one.
    pub fn set_slot(&mut self, slot: Slot, values: &[f32]) -> Result<(), EngineError> {
        match self {
            Engine::Cpu(e) => {
                let buffer = e.slot_mut(slot);
                buffer.clear();
                buffer.extend_from_slice(values);
                Ok(())
            }
            Engine::Cuda(e) => e.set_slot(slot, values),
        }
    }
}

/// A sequence to continue.
pub struct Turn<'a> {
    /// Whose cache holds all of its tokens but the newest.
    pub seq: SeqId,
    /// Prompt and answer so far.
    pub tokens: &'a mut Vec<u32>,
    /// Chooses the next token.
    pub sampler: &'a mut Sampler,
}

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
    /// More tokens than the cache holds.
    #[error("the key and value cache is full, it holds {capacity_tok} tokens in all")]
    CacheFull {
        /// Of all sequences together.
        capacity_tok: usize,
    },
    /// A weight that cannot be decoded.
    #[error(transparent)]
    Weight(#[from] crate::checkpoint::CheckpointError),
    /// The GPU failed.
    #[error(transparent)]
    Cuda(#[from] cuda::CudaError),
    /// The logits offer no token.
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl EngineError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::CacheFull { .. } => Some("use fewer or shorter sequences at a time".into()),
            EngineError::Weight(e) => e.hint(),
            EngineError::Cuda(e) => e.hint(),
            EngineError::Token { .. } | EngineError::Position { .. } | EngineError::Sample(_) => None,
        }
    }
}
