//! A batch as the kernels see it: checked against vocabulary and caches, and described in device memory.

use super::Engine;
use super::device::{CudaError, Device};
use super::memory::{Buffer, aligned};
use crate::engine::{Batch, EngineError, Segment};
use crate::model::plan::Slot;
use std::sync::Arc;

/// Where the kernels find a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub num_tok: usize,
    pub num_rows: usize,
    pub tokens: u64,
    pub positions: u64,
    /// Row of the page table of each token.
    pub rows: u64,
    pub table: u64,
    pub table_stride: usize,
    /// Tokens that get logits.
    pub pick: u64,
    /// Rotation of each token.
    pub cos: u64,
    pub sin: u64,
    /// Rotation of each position; decode only.
    pub cosines: u64,
    pub sines: u64,
    /// One new token a sequence, token `t` in row `t` of the page table.
    pub decode: bool,
}

/// What the kernels know of a batch.
pub(super) struct BatchBuffers {
    pub memory: Buffer,
    pub at: [usize; BatchPart::COUNT],
    pub num_tok: usize,
    pub num_rows: usize,
    pub table_stride: usize,
    /// The batch was begun as one new token a sequence.
    pub decode: bool,
    pub segments: Vec<Segment>,
}

#[derive(Clone, Copy)]
pub(super) enum BatchPart {
    Tokens,
    Positions,
    Rows,
    Pick,
    Table,
    Cos,
    Sin,
}

impl BatchBuffers {
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Buffer::new(device, 1 << 16)?,
            at: [0; BatchPart::COUNT],
            num_tok: 0,
            num_rows: 0,
            table_stride: 0,
            decode: false,
            segments: Vec::new(),
        })
    }
}

impl BatchPart {
    const COUNT: usize = 7;
}

impl Engine {
    /// Checks a batch against vocabulary and caches, and makes room for its keys.
    pub(super) fn admit(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let vocab = self.spec.vocab;
        if let Some((index, &token)) = batch.tokens.iter().enumerate().find(|&(_, &t)| t as usize >= vocab) {
            return Err(EngineError::Token { token, index, vocab });
        }
        for s in &batch.segments {
            let cached = self.cached(s.seq);
            if cached != s.start {
                return Err(EngineError::Position { seq: s.seq.0, cached, start: s.start });
            }
            self.reserve(s.seq, s.start + s.len)?;
        }
        Ok(())
    }

    /// Sizes the buffers for a batch, checks it against vocabulary and caches, and tells the device about it.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.admit(batch)?;
        let (num_tok, rows) = (batch.tokens.len(), batch.logit_rows());
        if num_tok > self.work.capacity_tok || rows.len() > self.work.capacity_rows {
            self.grow(num_tok.max(self.work.capacity_tok), rows.len().max(self.work.capacity_rows))?;
        }
        self.tiled.as_mut().map(|t| t.reserve(num_tok)).transpose()?;
        self.forget_rows();
        self.host = Default::default();
        self.pending = Some(batch.segments.iter().map(|s| (s.seq, s.start + s.len)).collect());
        self.describe(batch, &rows)
    }

    /// Buffers have the row lengths of the plan, whatever steps have written since.
    pub(super) fn forget_rows(&mut self) {
        self.work.row = self.plan.widths;
        self.work.row[Slot::Logits as usize] = self.spec.vocab;
    }

    /// Uploads tokens, positions, page tables and rotations.
    fn describe(&mut self, batch: &Batch, rows: &[usize]) -> Result<(), EngineError> {
        let num_tok = batch.tokens.len();
        let stride = batch.segments.iter().map(|s| self.pages.pages(s.seq).len()).max().unwrap_or(0);
        let half = self.spec.rope.dim / 2;
        let (mut positions, mut owners) = (Vec::with_capacity(num_tok), Vec::with_capacity(num_tok));
        let mut table = vec![0u32; stride * batch.segments.len()];
        let (mut cos, mut sin) = (Vec::with_capacity(num_tok * half), Vec::with_capacity(num_tok * half));
        for (i, s) in batch.segments.iter().enumerate() {
            let pages = self.pages.pages(s.seq);
            table[i * stride..i * stride + pages.len()].copy_from_slice(pages);
            let end = s.start + s.len;
            let [cosines, sines] = self.rotations.rows(&self.spec.rope, s.context.max(end), s.start..end);
            cos.extend_from_slice(cosines);
            sin.extend_from_slice(sines);
            positions.extend(s.start as u32..end as u32);
            owners.extend(std::iter::repeat_n(i as u32, s.len));
        }
        let rows: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
        let parts: [&[u32]; BatchPart::COUNT] = [&batch.tokens, &positions, &owners, &rows, &table, &cos, &sin];
        let mut all: Vec<u32> = Vec::new();
        for (at, part) in self.batch.at.iter_mut().zip(parts) {
            *at = 4 * all.len();
            all.extend_from_slice(part);
            all.resize(aligned(4 * all.len()) / 4, 0);
        }
        if 4 * all.len() > self.batch.memory.bytes() {
            self.device.synchronize()?;
            self.batch.memory = Buffer::new(&self.device, (4 * all.len()).next_power_of_two())?;
        }
        (self.batch.num_tok, self.batch.num_rows, self.batch.table_stride) = (num_tok, rows.len(), stride);
        self.batch.decode = false;
        self.batch.segments.clone_from(&batch.segments);
        Ok(self.device.upload(&self.batch.memory, 0, &all)?)
    }

    pub(super) fn view(&self) -> View {
        let part = |part: BatchPart| self.batch.memory.at(self.batch.at[part as usize]);
        View {
            num_tok: self.batch.num_tok,
            num_rows: self.batch.num_rows,
            tokens: part(BatchPart::Tokens),
            positions: part(BatchPart::Positions),
            rows: part(BatchPart::Rows),
            table: part(BatchPart::Table),
            table_stride: self.batch.table_stride,
            pick: part(BatchPart::Pick),
            cos: part(BatchPart::Cos),
            sin: part(BatchPart::Sin),
            cosines: 0,
            sines: 0,
            decode: false,
        }
    }
}
