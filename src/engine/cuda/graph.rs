//! Decode: one new token for each of a few sequences, as a CUDA graph for each number of sequences.
//!
//! Token ids, positions and page tables stay on the device; a replay reads the ids that the one before it chose, so that the
//! host only launches. A graph is captured for the exact number of sequences when it is first met, since padding rows would
//! choose experts of their own and have them read for nothing.

use super::Engine;
use super::ahead::UNTIMED;
use super::batch::View;
use super::device::{CudaError, Device, During};
use super::fast::{ArgmaxArgs, Sent};
use super::launch::{self, DECODE_TOK};
use super::memory::{Buffer, Event, Mapped};
use super::sampling::{Choice, FAULT_WORDS, Sampling};
use super::slots::Tiers;
use crate::engine::{Batch, EngineError, Rows, Turn};
use crate::ids::SeqId;
use crate::model::plan::Slot;
use crate::model::rope;
use cudarc::driver::{result, sys};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps whose choices are on their way to the host at a time.
const RING: usize = 4;
/// Tokens between two looks at the pool of pages.
const WINDOW: usize = 512;
/// Words of the ids that a step chose, and of what was wrong with its logits.
const CHOSEN_WORDS: usize = DECODE_TOK * (1 + FAULT_WORDS);
/// Positions that the first rotation tables cover.
const FIRST_POSITIONS: usize = 4096;

/// What the graphs read and write, at addresses that stay.
pub(super) struct Decode {
    /// Ids, then faults of the logits they were chosen from.
    pub(super) tokens: Buffer,
    pub(super) positions: Buffer,
    /// Row of the page table of each sequence: itself.
    rows: Buffer,
    table: Buffer,
    table_stride: usize,
    /// Rotation of each sequence's position, for plain kernels: cosines, then sines.
    angles: Buffer,
    best: Buffer,
    pub(super) sampling: Option<Sampling>,
    rotation: Option<Rotation>,
    /// By number of sequences, how ids are chosen, and what comes ahead.
    graphs: HashMap<(usize, Choice, usize), Graph>,
    /// Pages of each row of the table as uploaded.
    uploaded: Vec<(SeqId, usize)>,
    /// `[RING][CHOSEN_WORDS]`: where a step writes its choices for the host, by the position of each sequence.
    sent: Mapped,
    /// After each step, in turn.
    done: Vec<Event>,
    /// Time spent waiting for chosen ids.
    waited: Duration,
}

/// Cosines and sines of all positions.
struct Rotation {
    freqs: Vec<f32>,
    attention: f32,
    len: usize,
    cosines: Buffer,
    sines: Buffer,
}

pub(super) struct Graph {
    exec: sys::CUgraphExec,
    device: Arc<Device>,
}

impl Graph {
    /// Replays it behind everything already in the stream.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.device.current()?;
        // SAFETY: the graph's buffers live as long as the engine; whoever replaces one forgets the graphs.
        unsafe { result::graph::launch(self.exec, self.device.stream()) }.during("launch a graph")
    }
}

// SAFETY: graph handles may be used from any thread, one at a time, which `&mut Engine` sees to.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once.
        unsafe {
            let _ = self.device.current();
            let _ = result::graph::exec_destroy(self.exec);
        }
    }
}

impl Decode {
    pub fn new(device: &Arc<Device>, max_pages: usize, half: usize) -> Result<Self, CudaError> {
        let words = |n: usize| Buffer::new(device, 4 * n);
        let best = Buffer::new(device, 8 * DECODE_TOK)?;
        best.clear()?;
        let rows: Vec<u32> = (0..DECODE_TOK as u32).collect();
        Ok(Self {
            tokens: words(CHOSEN_WORDS)?,
            positions: words(DECODE_TOK)?,
            rows: Buffer::from_slice(device, &rows)?,
            table: words(DECODE_TOK * max_pages)?,
            table_stride: max_pages,
            angles: words(2 * DECODE_TOK * half)?,
            best,
            sampling: None,
            rotation: None,
            graphs: HashMap::new(),
            uploaded: Vec::new(),
            waited: Duration::ZERO,
            sent: Mapped::new(device, 4 * RING * CHOSEN_WORDS, None)?,
            done: (0..RING).map(|_| Event::new(device)).collect::<Result<_, CudaError>>()?,
        })
    }

    /// Where the kernels that choose write for the host.
    pub fn sent(&self) -> Sent {
        Sent { words: self.sent.at(0), steps: RING as i32, each: CHOSEN_WORDS as i32 }
    }

    /// Ids, then faults, of sequences that are at these positions when a step begins, once it is done.
    fn chosen(&mut self, step: usize, positions: impl Iterator<Item = usize>) -> Result<(Vec<u32>, Vec<u32>), CudaError> {
        let started = Instant::now();
        self.done[step % RING].wait()?;
        self.waited += started.elapsed();
        let words = self.sent.as_slice();
        let word = |at: usize| u32::from_le_bytes([words[4 * at], words[4 * at + 1], words[4 * at + 2], words[4 * at + 3]]);
        let rows: Vec<usize> = positions.map(|p| p % RING * CHOSEN_WORDS).collect();
        let ids = rows.iter().enumerate().map(|(row, at)| word(at + row)).collect();
        let fault = |row: usize, at: usize| (0..FAULT_WORDS).map(move |i| at + DECODE_TOK + FAULT_WORDS * row + i);
        let faults = rows.iter().enumerate().flat_map(|(row, &at)| fault(row, at)).map(word).collect();
        Ok((ids, faults))
    }

    /// Makes the page table hold sequences of so many pages.
    pub fn widen(&mut self, device: &Arc<Device>, max_pages: usize) -> Result<(), CudaError> {
        self.table = Buffer::new(device, 4 * DECODE_TOK * max_pages)?;
        self.table_stride = max_pages;
        self.uploaded.clear();
        Ok(())
    }

    /// Forgets the graphs, whose addresses no longer hold.
    pub fn forget_graphs(&mut self) {
        self.graphs.clear();
    }
}

impl Engine {
    /// Whether a batch is one new token for each of a few sequences that rotate alike.
    pub(super) fn is_decode(&self, batch: &Batch) -> bool {
        let one = |s: &crate::engine::Segment| s.len == 1 && s.rows == Rows::Last;
        let Some(first) = batch.segments.first() else { return false };
        let alike = || {
            let of = |s: &crate::engine::Segment| rope::frequencies(&self.spec.rope, s.context.max(s.start + 1));
            let expected = of(first);
            batch.segments.iter().all(|s| s.context == first.context || of(s) == expected)
        };
        self.is_fast() && batch.segments.len() <= DECODE_TOK && batch.segments.iter().all(one) && alike()
    }

    /// One token of each sequence through the graph; logits stay on the device.
    pub(super) fn decode_pass(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.admit(batch)?;
        let seqs: Vec<SeqId> = batch.segments.iter().map(|s| s.seq).collect();
        let starts: Vec<u32> = batch.segments.iter().map(|s| s.start as u32).collect();
        let context = batch.segments.iter().map(|s| s.context.max(s.start + 1)).max().unwrap_or(1);
        self.prepare(&seqs, &batch.tokens, &starts, context)?;
        self.replay(seqs.len(), Choice::Best)?;
        for s in &batch.segments {
            self.pages.set_len(s.seq, s.start + 1);
        }
        Ok(())
    }

    /// For how long decoding has waited for the device since this was last asked; the rest of its time is the host's own work.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.decode.waited)
    }

    /// Continues sequences for `steps` tokens. `on` sees the chosen ids of every step, one step behind the device, and may stop.
    pub fn decode(
        &mut self,
        turns: &mut [Turn<'_>],
        steps: usize,
        context: usize,
        on: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<(), EngineError> {
        let furthest = turns.iter().map(|t| self.cached(t.seq)).max().unwrap_or(0) + steps;
        let mut done = 0;
        while done < steps {
            let tried = self.trial.as_mut().and_then(|t| t.next(turns.len()));
            let most = tried.map_or(WINDOW, |(steps, ahead)| {
                self.ahead = ahead;
                steps
            });
            let window = most.min(steps - done);
            if self.decode_window(turns, window, context.max(furthest), on)?.is_break() {
                break;
            }
            done += window;
        }
        Ok(())
    }

    /// The same for as many steps as pages are reserved for at a time.
    fn decode_window(
        &mut self,
        turns: &mut [Turn<'_>],
        steps: usize,
        context: usize,
        on: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let seqs: Vec<SeqId> = turns.iter().map(|t| t.seq).collect();
        let starts: Vec<usize> = seqs.iter().map(|&s| self.cached(s)).collect();
        for (&seq, &start) in seqs.iter().zip(&starts) {
            self.reserve(seq, start + steps)?;
        }
        let positions: Vec<u32> = starts.iter().map(|&s| s as u32).collect();
        let newest: Vec<u32> = turns.iter().map(|t| t.tokens.last().copied().unwrap_or(0)).collect();
        self.prepare(&seqs, &newest, &positions, context)?;
        let choice = self.prepare_choice(turns)?;
        let (mut seen, mut timed) = (0, Instant::now());
        let mut flow = ControlFlow::Continue(());
        let mut failed = None;
        for step in 0..=steps {
            if step < steps {
                let done = |engine: &Self| Ok(engine.decode.done[step % RING].record(engine.device.stream())?);
                let launched = self.replay(seqs.len(), choice).and_then(|()| done(self));
                // What came before it is there all the same.
                if let Err(error) = launched {
                    failed = Some(error);
                    break;
                }
            }
            if step > 0 {
                let (chosen, faults) = self.decode.chosen(step - 1, starts.iter().map(|start| start + step - 1))?;
                failed = if choice == Choice::Drawn { self.fault(&faults) } else { None };
                if failed.is_some() {
                    break;
                }
                seen = step;
                if step == UNTIMED {
                    timed = Instant::now();
                }
                for (turn, &token) in turns.iter_mut().zip(&chosen) {
                    turn.tokens.push(token);
                    turn.sampler.skip(1);
                }
                flow = on(&chosen);
                if flow.is_break() {
                    break;
                }
            }
        }
        for (&seq, &start) in seqs.iter().zip(&starts) {
            self.pages.set_len(seq, start + seen);
        }
        if failed.is_none() {
            let verdict = self.trial.as_mut().and_then(|t| t.add(seen.saturating_sub(UNTIMED), timed.elapsed()));
            verdict.into_iter().for_each(|v| self.follow(v));
            self.judge_ahead()?;
        }
        failed.map_or(Ok(flow), Err)
    }

    /// Uploads what the graph starts from.
    pub(super) fn prepare(
        &mut self,
        seqs: &[SeqId],
        tokens: &[u32],
        positions: &[u32],
        context: usize,
    ) -> Result<(), EngineError> {
        self.rotate_up_to(context, positions.iter().max().map_or(1, |&p| p as usize + 1))?;
        let wanted: Vec<(SeqId, usize)> = seqs.iter().map(|&s| (s, self.pages.pages(s).len())).collect();
        let same = |a: &[(SeqId, usize)], b: &[(SeqId, usize)]| a.len() >= b.len() && a[..b.len()] == *b;
        if !same(&self.decode.uploaded, &wanted) || self.pages.changed() {
            for (i, &seq) in seqs.iter().enumerate() {
                self.device.upload(&self.decode.table, 4 * i * self.decode.table_stride, self.pages.pages(seq))?;
            }
            self.decode.uploaded = wanted;
        }
        self.device.upload(&self.decode.tokens, 0, tokens)?;
        self.device.upload(&self.decode.positions, 0, positions)?;
        Ok(())
    }

    /// Makes the rotation tables cover a context.
    fn rotate_up_to(&mut self, context: usize, at_least: usize) -> Result<(), EngineError> {
        let (freqs, attention) = rope::frequencies(&self.spec.rope, context);
        let need = at_least.max(context.min(self.spec.max_positions));
        let fits = |r: &Rotation| r.len >= need && r.attention == attention && r.freqs == freqs;
        if self.decode.rotation.as_ref().is_some_and(fits) {
            return Ok(());
        }
        self.device.synchronize()?;
        self.decode.forget_graphs();
        let (half, len) = (freqs.len(), need.next_power_of_two().max(FIRST_POSITIONS));
        let (mut cos, mut sin) = (vec![0.0f32; len * half], vec![0.0f32; len * half]);
        cos.par_chunks_exact_mut(half.max(1)).zip(sin.par_chunks_exact_mut(half.max(1))).enumerate().for_each(|(p, (c, s))| {
            rope::angles(c, s, &freqs, attention, p);
        });
        let (cosines, sines) = (Buffer::from_slice(&self.device, &cos)?, Buffer::from_slice(&self.device, &sin)?);
        self.decode.rotation = Some(Rotation { freqs, attention, len, cosines, sines });
        Ok(())
    }

    /// Looks up each token's rotation, for plain kernels.
    pub(super) fn rotate(&self, view: &View) -> Result<(), EngineError> {
        let half = (self.spec.rope.dim / 2) as i32;
        let grid = launch::parts(view.num_tok, 1, 64);
        Ok(self.plain.plain_rotations(grid, view.cos, view.sin, view.cosines, view.sines, view.positions, half)?)
    }

    pub(super) fn decode_view(&self, num_tok: usize) -> View {
        let d = &self.decode;
        let half = self.spec.rope.dim / 2;
        let table = |b: fn(&Rotation) -> &Buffer| d.rotation.as_ref().map_or(0, |r| b(r).at(0));
        View {
            num_tok,
            num_rows: num_tok,
            tokens: d.tokens.at(0),
            positions: d.positions.at(0),
            rows: d.rows.at(0),
            table: d.table.at(0),
            table_stride: d.table_stride,
            pick: d.rows.at(0),
            cos: d.angles.at(0),
            sin: d.angles.at(4 * DECODE_TOK * half),
            cosines: table(|r| &r.cosines),
            sines: table(|r| &r.sines),
            decode: true,
        }
    }

    /// Launches the graph for so many sequences, capturing it first if it is new.
    fn replay(&mut self, num_tok: usize, choice: Choice) -> Result<(), EngineError> {
        let key = (num_tok, choice, self.ahead);
        let stops = self.tiers().is_some_and(Tiers::reads);
        if !stops && !self.decode.graphs.contains_key(&key) {
            let graph = self.captured(|engine| engine.decode_step(num_tok, choice))?;
            self.decode.graphs.insert(key, graph);
        }
        if stops {
            self.decode_step(num_tok, choice)?;
        } else if let Some(graph) = self.decode.graphs.get(&key) {
            self.store.tiers().iter().for_each(|t| t.forget());
            graph.launch()?;
        }
        self.host = Default::default();
        (self.batch.num_tok, self.batch.num_rows) = (num_tok, num_tok);
        self.forget_rows();
        Ok(())
    }

    /// A graph of some groups alone, for timing.
    pub(super) fn capture_groups(&mut self, num_tok: usize, groups: &[usize]) -> Result<Graph, EngineError> {
        if self.tiers().is_some_and(Tiers::reads) {
            let reason = "blocks cannot be timed one by one while experts are read from the disk".into();
            return Err(CudaError::Unsupported(reason).into());
        }
        let view = self.decode_view(num_tok);
        self.captured(|engine| {
            groups.iter().try_for_each(|&i| engine.group(i, &view).map(drop))?;
            Ok(engine.join()?)
        })
    }

    /// Puts what is brought beside the kernels before whatever follows.
    pub(super) fn join(&self) -> Result<(), CudaError> {
        self.store.tiers().map_or(Ok(()), Tiers::join)
    }

    fn captured(&mut self, launches: impl FnOnce(&mut Self) -> Result<(), EngineError>) -> Result<Graph, EngineError> {
        self.device.synchronize()?;
        let stream = self.device.stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        unsafe { result::stream::begin_capture(stream, mode) }.during("capture a graph")?;
        let launched = launches(self);
        // SAFETY: capture began above; it must end whether or not the launches went well.
        let graph = unsafe { result::stream::end_capture(stream) }.during("capture a graph");
        launched?;
        let graph = graph?;
        // SAFETY: the graph was just made, and is destroyed once.
        let exec = unsafe {
            let exec =
                result::graph::instantiate(graph, sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
            let _ = result::graph::destroy(graph);
            exec
        };
        Ok(Graph { exec: exec.during("make a graph")?, device: Arc::clone(&self.device) })
    }

    /// The launches of one step: the plan, then the choice, which also moves the positions on.
    fn decode_step(&mut self, num_tok: usize, choice: Choice) -> Result<(), EngineError> {
        let view = self.decode_view(num_tok);
        self.forget_rows();
        if !self.decodes_fully(&view) {
            self.rotate(&view)?;
        }
        let last = self.groups.len() - 1;
        if self.runs_whole(num_tok) {
            self.group(0, &view)?;
            self.whole(&view)?;
            self.group(last, &view)?;
        } else {
            (0..=last).try_for_each(|i| self.group(i, &view).map(drop))?;
        }
        self.join()?;
        if choice == Choice::Drawn {
            return self.draw(num_tok);
        }
        let args = ArgmaxArgs {
            tokens: view.tokens,
            sent: self.decode.sent(),
            logits: self.work.slots[Slot::Logits as usize].at(0),
            best: self.decode.best.at(0),
            counters: self.work.counters.at(self.work.argmax_counters_at),
            positions: view.positions,
            v: self.spec.vocab as i32,
        };
        Ok(self.fast.launch("argmax_rows", launch::argmax(num_tok), &args)?)
    }
}
