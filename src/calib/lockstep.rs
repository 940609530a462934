//! Runs an original and its candidates side by side, one layer of each at a time, and compares what they compute.
//!
//! Peak memory is two layers of weights and the hidden states of all windows; the latter go to a scratch file past a limit, so
//! that depth and text length cost disk, not memory.

use super::hidden::{Hidden, groups};
use super::metrics::{self, Choice, RouterScore, RouterSummary, Summary, TokenScore};
use super::windows::Window;
use crate::artifact::weights::Weights;
use crate::engine::{Batch, Engine, EngineError, Event, Rows, cuda};
use crate::files::FileError;
use crate::ids::{LayerId, SeqId};
use crate::model::plan::{Slot, Step};
use rayon::prelude::*;
use std::sync::Arc;

/// Rows of logits held at once.
const LOGIT_ROWS: usize = 128;

/// A model to compare with the original, and how its windows are fed.
#[derive(Clone)]
pub struct Candidate {
    /// The weights.
    pub weights: Arc<Weights>,
    /// Tokens of a window in one pass; other values than the original's change the order of sums and show the noise floor.
    pub chunk: usize,
}

/// Everything measured about one candidate.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Every scored token.
    pub tokens: Vec<TokenScore>,
    /// Every layer with a router.
    pub routers: Vec<RouterSummary>,
    /// Relative error of the hidden state after each layer, `|a - b| / |a|`.
    pub hidden_error: Vec<f64>,
}

impl Comparison {
    /// Metrics over all tokens.
    pub fn summary(&self) -> Summary {
        Summary::of(self.tokens.iter())
    }

    /// Metrics of one task.
    pub fn task(&self, task: usize) -> Summary {
        Summary::of(self.tokens.iter().filter(move |s| s.task == task))
    }
}

/// Why a comparison stopped.
#[derive(Debug, thiserror::Error)]
pub enum LockstepError {
    /// An engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A model could not be put on the GPU.
    #[error(transparent)]
    Load(#[from] cuda::LoadError),
    /// The scratch file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Where layers are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the processor.
    Processor,
    /// On the first GPU, in single precision throughout.
    Gpu {
        /// Most bytes of its memory for each model; `None`: all that is free.
        budget_bytes: Option<u64>,
    },
}

/// One model walking through its layers.
struct Walker {
    engine: Engine,
    weights: Arc<Weights>,
    hidden: Hidden,
    chunk: usize,
}

/// What one layer did to some rows.
#[derive(Default)]
struct LayerOutput {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    logits: Vec<f32>,
    experts: Vec<u32>,
    gates: Vec<f32>,
}

impl Walker {
    fn new(weights: &Arc<Weights>, place: Place, chunk: usize, rows: usize, in_memory: bool) -> Result<Self, LockstepError> {
        let width = weights.spec().width;
        let engine = match place {
            Place::Processor => Engine::cpu(Arc::clone(weights)),
            Place::Gpu { budget_bytes } => {
                let (cache, kernels) = (cuda::Kind::F32, cuda::Kernels::Plain);
                let options = cuda::Options { budget_bytes, cache, kernels, ..Default::default() };
                cuda::Engine::open(Arc::clone(weights), options, &mut |_, _| (), &mut |_| ())?.into()
            }
        };
        Ok(Self { engine, weights: Arc::clone(weights), hidden: Hidden::new(rows * width, in_memory)?, chunk })
    }

    fn embed(&mut self, windows: &[Window]) -> Result<(), LockstepError> {
        let width = self.weights.spec().width;
        let mut row = 0;
        for w in windows {
            let mut batch = Batch::default();
            batch.push(SeqId(0), 0, &w.tokens, Rows::None, w.tokens.len());
            self.engine.begin(&batch)?;
            self.engine.run(self.engine.plan().prologue.clone(), &batch, &mut |_| ())?;
            self.hidden.write(row * width, self.engine.slot(Slot::Residual)?)?;
            self.engine.release(SeqId(0));
            row += w.tokens.len();
        }
        Ok(())
    }

    /// Runs layer `l` on the rows of `windows`, the first of which is `first_row`, and stores the result.
    fn layer(&mut self, l: usize, windows: &[Window], first_row: usize) -> Result<LayerOutput, LockstepError> {
        let width = self.weights.spec().width;
        let rows: usize = windows.iter().map(|w| w.tokens.len()).sum();
        let mut out =
            LayerOutput { hidden: self.hidden.read(first_row * width..(first_row + rows) * width)?, ..LayerOutput::default() };
        out.normed.resize(rows * width, 0.0);
        let longest = windows.iter().map(|w| w.tokens.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(self.chunk.min(longest).max(1)) {
            let mut batch = Batch::default();
            let mut places = Vec::new();
            let mut row = 0;
            for (i, w) in windows.iter().enumerate() {
                let end = w.tokens.len().min(start.saturating_add(self.chunk));
                if start < end {
                    batch.push(SeqId(i as u32), start, &w.tokens[start..end], Rows::None, w.tokens.len());
                    places.extend(row + start..row + end);
                }
                row += w.tokens.len();
            }
            self.engine.begin(&batch)?;
            self.engine.set_slot(Slot::Residual, &gathered(&out.hidden, &places, width))?;
            let (logits, experts, gates) = (&mut out.logits, &mut out.experts, &mut out.gates);
            self.engine.run(self.engine.plan().layers[l].clone(), &batch, &mut |event| {
                let Event::Routed { logits: new_logits, experts: new_experts, gates: new_gates, .. } = event;
                scatter(logits, new_logits, &places, rows);
                scatter(experts, new_experts, &places, rows);
                scatter(gates, new_gates, &places, rows);
            })?;
            scatter(&mut out.hidden, self.engine.slot(Slot::Residual)?, &places, rows);
            scatter(&mut out.normed, self.engine.slot(Slot::Normed)?, &places, rows);
        }
        (0..windows.len()).for_each(|i| self.engine.release(SeqId(i as u32)));
        self.hidden.write(first_row * width, &out.hidden)?;
        Ok(out)
    }

    /// Router logits of layer `l` on given inputs, `[rows, D]`; empty for a layer without a router.
    fn route(&mut self, l: usize, normed: &[f32]) -> Result<Vec<f32>, LockstepError> {
        let range = self.engine.plan().layers[l].clone();
        let Some(at) = self.engine.plan().steps[range.clone()].iter().position(|s| matches!(s, Step::Route { .. })) else {
            return Ok(Vec::new());
        };
        let rows = normed.len() / self.weights.spec().width;
        let batch = rows_batch(rows, Rows::None);
        self.engine.begin(&batch)?;
        self.engine.set_slot(Slot::Normed, normed)?;
        let mut found = Vec::new();
        self.engine.run(range.start + at..range.start + at + 1, &batch, &mut |event| {
            let Event::Routed { logits, .. } = event;
            found = logits.to_vec();
        })?;
        self.engine.release(SeqId(0));
        Ok(found)
    }

    /// Logits of some rows, `[rows.len(), V]`.
    fn logits(&mut self, rows: &[usize]) -> Result<Vec<f32>, LockstepError> {
        let width = self.weights.spec().width;
        let batch = rows_batch(rows.len(), Rows::All);
        self.engine.begin(&batch)?;
        let mut values = Vec::with_capacity(rows.len() * width);
        for &row in rows {
            values.extend(self.hidden.read(row * width..(row + 1) * width)?);
        }
        self.engine.set_slot(Slot::Residual, &values)?;
        self.engine.run(self.engine.plan().epilogue.clone(), &batch, &mut |_| ())?;
        self.engine.release(SeqId(0));
        Ok(self.engine.slot(Slot::Logits)?.to_vec())
    }

    /// Lets the pages of a finished layer go.
    fn leave(&self, l: usize) {
        let weights = &self.weights;
        let ids = weights.tensors().iter().map(|(id, _)| id).filter(|id| id.layer == Some(LayerId(l as u32)));
        weights.release(ids);
    }
}

/// A batch of rows whose tokens do not matter.
fn rows_batch(rows: usize, wanted: Rows) -> Batch {
    let mut batch = Batch::default();
    batch.push(SeqId(0), 0, &vec![0; rows], wanted, rows);
    batch
}

/// Some rows of `src`, one after the other.
fn gathered(src: &[f32], rows: &[usize], width: usize) -> Vec<f32> {
    rows.iter().flat_map(|&row| &src[row * width..(row + 1) * width]).copied().collect()
}

/// Puts `src`, one row for each of `places`, into `dst` of `rows` rows.
fn scatter<T: Copy + Default>(dst: &mut Vec<T>, src: &[T], places: &[usize], rows: usize) {
    let width = src.len() / places.len().max(1);
    dst.resize(rows * width, T::default());
    for (from, &row) in src.chunks_exact(width).zip(places) {
        dst[row * width..(row + 1) * width].copy_from_slice(from);
    }
}

/// Compares candidates with an original over some windows. `tick` is called after each group of each layer and may stop the run
/// by returning `false`; it is called `(L + 1) * groups` times.
pub fn compare(
    original: &Arc<Weights>,
    candidates: &[Candidate],
    place: Place,
    windows: &[Window],
    max_memory: u64,
    tick: &mut dyn FnMut() -> bool,
) -> Result<Vec<Comparison>, LockstepError> {
    let rows: usize = windows.iter().map(|w| w.tokens.len()).sum();
    let width = original.spec().width;
    let in_memory = (4 * rows * width * (candidates.len() + 1)) as u64 <= max_memory;
    let mut first = Walker::new(original, place, usize::MAX, rows, in_memory)?;
    let mut others: Vec<Walker> =
        candidates.iter().map(|c| Walker::new(&c.weights, place, c.chunk, rows, in_memory)).collect::<Result<_, _>>()?;
    let blank = Comparison { tokens: Vec::new(), routers: Vec::new(), hidden_error: Vec::new() };
    let mut found = vec![blank; candidates.len()];
    first.embed(windows)?;
    for other in &mut others {
        other.embed(windows)?;
    }
    let groups = groups(windows);
    for l in 0..original.spec().layers.len() {
        let mut scores: Vec<Vec<RouterScore>> = vec![Vec::new(); candidates.len()];
        let mut errors = vec![[0.0f64; 2]; candidates.len()];
        for (first_row, windows) in &groups {
            let a = first.layer(l, windows, *first_row)?;
            for ((other, scores), errors) in others.iter_mut().zip(&mut scores).zip(&mut errors) {
                let b = other.layer(l, windows, *first_row)?;
                let local = other.route(l, &a.normed)?;
                scores.extend(routing(&a, &b, &local, a.hidden.len() / width));
                for (x, y) in a.hidden.iter().zip(&b.hidden) {
                    errors[0] += ((x - y) as f64).powi(2);
                    errors[1] += (*x as f64).powi(2);
                }
            }
            if !tick() {
                return Err(LockstepError::Interrupted);
            }
        }
        for ((found, scores), [diff, norm]) in found.iter_mut().zip(&scores).zip(errors) {
            found.hidden_error.push((diff / norm.max(f64::MIN_POSITIVE)).sqrt());
            if !scores.is_empty() {
                found.routers.push(RouterSummary::of(l, scores));
            }
        }
        first.leave(l);
        others.iter().for_each(|w| w.leave(l));
    }
    for (first_row, windows) in &groups {
        for part in scored(windows, *first_row).chunks(LOGIT_ROWS) {
            let rows: Vec<usize> = part.iter().map(|(row, ..)| *row).collect();
            let a = first.logits(&rows)?;
            let vocab = a.len() / rows.len();
            for (other, found) in others.iter_mut().zip(&mut found) {
                let b = other.logits(&rows)?;
                let scored: Vec<TokenScore> = part
                    .par_iter()
                    .zip(a.par_chunks_exact(vocab).zip(b.par_chunks_exact(vocab)))
                    .map(|(&(_, token, task), (a, b))| metrics::score(a, b, token, task))
                    .collect();
                found.tokens.extend(scored);
            }
        }
        if !tick() {
            return Err(LockstepError::Interrupted);
        }
    }
    Ok(found)
}

/// `-ln p` of every scored token of one model; calls `tick` as [`compare`] does.
pub fn alone(
    weights: &Arc<Weights>,
    place: Place,
    windows: &[Window],
    max_memory: u64,
    tick: &mut dyn FnMut() -> bool,
) -> Result<Vec<f64>, LockstepError> {
    let mut walker = walk(weights, place, windows, max_memory, &mut |_| Ok(()), tick)?;
    let mut found = Vec::new();
    for (first_row, windows) in groups(windows) {
        for part in scored(windows, first_row).chunks(LOGIT_ROWS) {
            let rows: Vec<usize> = part.iter().map(|(row, ..)| *row).collect();
            let logits = walker.logits(&rows)?;
            let vocab = logits.len() / rows.len();
            let nll = logits.par_chunks_exact(vocab).zip(part).map(|(logits, &(_, token, _))| metrics::nll(logits, token));
            found.extend(nll.collect::<Vec<f64>>());
        }
        if !tick() {
            return Err(LockstepError::Interrupted);
        }
    }
    Ok(found)
}

/// What one router saw and chose for some rows.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// The first row among those of all windows.
    pub first_row: usize,
    /// What the router saw, `[T, D]`.
    pub inputs: &'a [f32],
    /// Its logits, `[T, E]`.
    pub logits: &'a [f32],
    /// Expert ids, `[T, K]`.
    pub experts: &'a [u32],
    /// Their weights, `[T, K]`.
    pub gates: &'a [f32],
}

/// Runs one model, layer by layer, and shows what every router saw and chose. `tick` is called `L * groups` times, see [`num_groups`],
/// and may stop the run by returning `false`.
pub fn observe(
    weights: &Arc<Weights>,
    place: Place,
    windows: &[Window],
    max_memory: u64,
    on: &mut dyn FnMut(Choices<'_>) -> Result<(), LockstepError>,
    tick: &mut dyn FnMut() -> bool,
) -> Result<(), LockstepError> {
    walk(weights, place, windows, max_memory, on, tick).map(drop)
}

/// Takes one model through all its layers; the walker is left with the hidden states that the last one made.
fn walk(
    weights: &Arc<Weights>,
    place: Place,
    windows: &[Window],
    max_memory: u64,
    on: &mut dyn FnMut(Choices<'_>) -> Result<(), LockstepError>,
    tick: &mut dyn FnMut() -> bool,
) -> Result<Walker, LockstepError> {
    let rows: usize = windows.iter().map(|w| w.tokens.len()).sum();
    let in_memory = (4 * rows * weights.spec().width) as u64 <= max_memory;
    let mut walker = Walker::new(weights, place, usize::MAX, rows, in_memory)?;
    walker.embed(windows)?;
    let groups = groups(windows);
    for layer in 0..weights.spec().layers.len() {
        for &(first_row, windows) in &groups {
            let out = walker.layer(layer, windows, first_row)?;
            if !out.experts.is_empty() {
                let (inputs, logits) = (&out.normed, &out.logits);
                on(Choices { layer, first_row, inputs, logits, experts: &out.experts, gates: &out.gates })?;
            }
            if !tick() {
                return Err(LockstepError::Interrupted);
            }
        }
        walker.leave(layer);
    }
    Ok(walker)
}

/// Passes that some windows take through a layer.
pub fn num_groups(windows: &[Window]) -> u64 {
    groups(windows).len() as u64
}

/// Row of hidden states, token it predicts and task, for every scored token.
fn scored(windows: &[Window], first_row: usize) -> Vec<(usize, u32, usize)> {
    let mut wanted = Vec::new();
    let mut row = first_row;
    for w in windows {
        wanted.extend(w.scored.clone().map(|p| (row + p - 1, w.tokens[p], w.task)));
        row += w.tokens.len();
    }
    wanted
}

/// How often [`compare`] calls `tick`.
pub fn num_ticks(original: &Weights, windows: &[Window]) -> u64 {
    ((original.spec().layers.len() + 1) * groups(windows).len()) as u64
}

/// Routing of every row by both; `local` are the candidate's router logits on the original's inputs.
fn routing(a: &LayerOutput, b: &LayerOutput, local: &[f32], rows: usize) -> Vec<RouterScore> {
    if a.logits.is_empty() {
        return Vec::new();
    }
    let (num_experts, top_k) = (a.logits.len() / rows, a.experts.len() / rows);
    (0..rows)
        .into_par_iter()
        .map(|row| {
            let (e, k) = (row * num_experts..(row + 1) * num_experts, row * top_k..(row + 1) * top_k);
            let a = Choice { logits: &a.logits[e.clone()], experts: &a.experts[k.clone()], gates: &a.gates[k.clone()] };
            let b = Choice { logits: &b.logits[e.clone()], experts: &b.experts[k.clone()], gates: &b.gates[k] };
            metrics::route_score(a, b, &local[e])
        })
        .collect()
}
