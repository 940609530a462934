//! The reference engine: plain loops with `f32` accumulation, products of 4-bit and 8-bit weights straight from packed words.
//!
//! Correct before fast; every other engine is judged against it, and it against transformers.

mod attend;
pub mod experts;
mod linear;
mod matmul;
pub mod route;

use super::{Batch, EngineError, Event};
use crate::artifact::weights::Weights;
use crate::ids::{LayerId, SeqId, TensorId};
use crate::model::plan::{self, Plan, Slot, Step};
use crate::model::rope;
use crate::model::spec::{Norm, NormKind, Pairing};
use crate::tensor::{self, Dtype};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Keys and values, or latents, of one sequence in one layer, one row a token.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerCache {
    /// `[S, Hk * Dh]` keys, or `[S, Rkv + Dr]` latents.
    pub k: Vec<f32>,
    /// `[S, Hk * Dh]` values; empty for latents.
    pub v: Vec<f32>,
}

/// Router output of the layer that ran last.
#[derive(Debug, Default)]
pub(crate) struct Routed {
    /// `[T, E]`.
    pub logits: Vec<f32>,
    /// `[T, K]`.
    pub experts: Vec<u32>,
    /// `[T, K]`.
    pub gates: Vec<f32>,
    /// `K`.
    pub top_k: usize,
}

/// Runs plans on the processor.
pub struct Engine {
    weights: Arc<Weights>,
    plan: Plan,
    slots: [Vec<f32>; Slot::COUNT],
    caches: HashMap<SeqId, Vec<LayerCache>>,
    /// What keys and values are rounded to.
    cache_dtype: Dtype,
    routed: Routed,
    vectors: HashMap<TensorId, Arc<[f32]>>,
    /// `[T, dim / 2]` cosines and sines of the batch.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Engine {
    /// Prepares to run a model; reads nothing yet.
    pub fn new(weights: Arc<Weights>) -> Self {
        let plan = plan::plan(weights.spec());
        Self {
            weights,
            plan,
            slots: Default::default(),
            caches: HashMap::new(),
            cache_dtype: Dtype::F32,
            routed: Routed::default(),
            vectors: HashMap::new(),
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Rounds keys and values to a type as they enter the caches, as an engine does that keeps them in it.
    pub fn with_cache(self, cache_dtype: Dtype) -> Self {
        Self { cache_dtype, ..self }
    }

    /// The steps this engine runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Forgets a sequence.
    pub fn release(&mut self, seq: SeqId) {
        self.caches.remove(&seq);
    }

    /// Tokens of a sequence in the cache.
    pub fn cached(&self, seq: SeqId) -> usize {
        let most = self.caches.get(&seq).into_iter().flatten().map(|c| c.k.len()).max().unwrap_or(0);
        most / self.plan.widths[Slot::K as usize].max(1)
    }

    /// A buffer as the last step left it, `[T, width]`; [`Slot::Logits`] is `[rows asked for, V]`.
    pub fn slot(&self, slot: Slot) -> &[f32] {
        &self.slots[slot as usize]
    }

    /// A buffer to be filled by the caller, e.g. the residual stream when layers are run one by one.
    pub fn slot_mut(&mut self, slot: Slot) -> &mut Vec<f32> {
        &mut self.slots[slot as usize]
    }

    /// Runs the whole plan and returns the logits, `[rows asked for, V]`.
    pub fn forward(&mut self, batch: &Batch, on: &mut dyn FnMut(Event<'_>)) -> Result<&[f32], EngineError> {
        self.begin(batch)?;
        self.run(0..self.plan.steps.len(), batch, on)?;
        Ok(self.slot(Slot::Logits))
    }

    /// Sizes the buffers for a batch and checks it against vocabulary and caches.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let vocab = self.weights.spec().vocab;
        if let Some((index, &token)) = batch.tokens.iter().enumerate().find(|&(_, &t)| t as usize >= vocab) {
            return Err(EngineError::Token { token, index, vocab });
        }
        let num_layers = self.plan.layers.len();
        for s in &batch.segments {
            self.caches.entry(s.seq).or_insert_with(|| vec![LayerCache::default(); num_layers]);
            let cached = self.cached(s.seq);
            if cached != s.start {
                return Err(EngineError::Position { seq: s.seq.0, cached, start: s.start });
            }
        }
        let num_tok = batch.tokens.len();
        for (slot, &width) in self.slots.iter_mut().zip(&self.plan.widths) {
            slot.resize(num_tok * width, 0.0);
        }
        let spec = &self.weights.spec().rope;
        let half = spec.dim / 2;
        self.cos.resize(num_tok * half, 0.0);
        self.sin.resize(num_tok * half, 0.0);
        let mut first = 0;
        for s in &batch.segments {
            let (freqs, attention) = rope::frequencies(spec, s.context.max(s.start + s.len));
            for t in 0..s.len {
                let at = (first + t) * half..(first + t + 1) * half;
                rope::angles(&mut self.cos[at.clone()], &mut self.sin[at], &freqs, attention, s.start + t);
            }
            first += s.len;
        }
        Ok(())
    }

    /// Runs some steps of the plan on a batch that [`Engine::begin`] has seen.
    pub fn run(&mut self, steps: Range<usize>, batch: &Batch, on: &mut dyn FnMut(Event<'_>)) -> Result<(), EngineError> {
        for i in steps {
            let step = self.plan.steps[i].clone();
            self.step(&step, batch, on)?;
        }
        Ok(())
    }

    fn step(&mut self, step: &Step, batch: &Batch, on: &mut dyn FnMut(Event<'_>)) -> Result<(), EngineError> {
        let num_tok = batch.tokens.len();
        match step {
            Step::Embed { dst, table, scale } => {
                let width = self.plan.widths[*dst as usize];
                let weights = Arc::clone(&self.weights);
                let table = required(&weights, *table);
                for (row, &token) in self.slots[*dst as usize].chunks_exact_mut(width).zip(&batch.tokens) {
                    table.decode_rows(row, token as usize)?;
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
            Step::Norm { dst, src, w, b, norm, width, runs } => {
                let gain = self.vector(*w)?;
                let bias = b.map(|b| self.vector(b)).transpose()?;
                if dst != src {
                    let source = std::mem::take(&mut self.slots[*src as usize]);
                    self.slots[*dst as usize].copy_from_slice(&source);
                    self.slots[*src as usize] = source;
                }
                let stride = self.plan.widths[*dst as usize];
                let used = self.used_width(*dst, num_tok, stride);
                self.slots[*dst as usize].par_chunks_exact_mut(used).for_each(|row| {
                    row[..width * runs].chunks_exact_mut(*width).for_each(|x| normalise(x, &gain, bias.as_deref(), *norm))
                });
            }
            Step::Linear { dst, src, w, b } => {
                let bias = b.map(|b| self.vector(b)).transpose()?;
                let weights = Arc::clone(&self.weights);
                let weight = required(&weights, *w);
                let mut out = std::mem::take(&mut self.slots[*dst as usize]);
                out.resize(num_tok * weight.rows, 0.0);
                linear::linear(&mut out, &self.slots[*src as usize], &weight, bias.as_deref())?;
                self.slots[*dst as usize] = out;
            }
            Step::Clip { buf, limit } => self.slots[*buf as usize].iter_mut().for_each(|x| *x = x.clamp(-limit, *limit)),
            Step::Rope { buf, heads, stride, offset } => {
                let spec = &self.weights.spec().rope;
                let (half, pairing) = (spec.dim / 2, spec.pairing);
                let rows = self.slots[*buf as usize].chunks_exact_mut(heads * stride);
                for ((row, cos), sin) in rows.zip(self.cos.chunks_exact(half)).zip(self.sin.chunks_exact(half)) {
                    for head in row.chunks_exact_mut(*stride) {
                        rotate(&mut head[*offset..offset + 2 * half], cos, sin, pairing);
                    }
                }
            }
            Step::Attend { dst, q, k, v, layer, heads, window } => {
                self.append(batch, *layer, *k, Some(*v));
                let mut out = std::mem::take(&mut self.slots[*dst as usize]);
                out.resize(num_tok * heads.q * heads.dim, 0.0);
                attend::grouped(&mut out, &self.slots[*q as usize], batch, &self.caches, *layer, heads, *window);
                self.slots[*dst as usize] = out;
            }
            Step::AttendLatent { dst, q, latent, up, layer, mla } => {
                self.append(batch, *layer, *latent, None);
                let weights = Arc::clone(&self.weights);
                let up = required(&weights, *up).to_f32()?;
                let mut out = std::mem::take(&mut self.slots[*dst as usize]);
                out.resize(num_tok * mla.heads * mla.v, 0.0);
                attend::latent(&mut out, &self.slots[*q as usize], batch, &self.caches, *layer, mla, &up);
                self.slots[*dst as usize] = out;
            }
            Step::Route { src, w, router, layer } => {
                let weights = Arc::clone(&self.weights);
                let weight = required(&weights, *w);
                let r = &mut self.routed;
                r.top_k = router.top_k;
                r.logits.resize(num_tok * router.experts, 0.0);
                r.experts.resize(num_tok * router.top_k, 0);
                r.gates.resize(num_tok * router.top_k, 0.0);
                linear::linear(&mut r.logits, &self.slots[*src as usize], &weight, None)?;
                route::route(&mut r.experts, &mut r.gates, &r.logits, router);
                on(Event::Routed { layer: *layer, logits: &r.logits, experts: &r.experts, gates: &r.gates });
            }
            Step::Experts { dst, src, layer, width } => {
                let mut out = std::mem::take(&mut self.slots[*dst as usize]);
                experts::experts(&mut out, &self.slots[*src as usize], &self.routed, &self.weights, *layer, *width)?;
                self.slots[*dst as usize] = out;
            }
            Step::GatedAct { gate, up } => {
                let factor = std::mem::take(&mut self.slots[*up as usize]);
                self.slots[*gate as usize].iter_mut().zip(&factor).for_each(|(g, u)| *g = silu(*g) * u);
                self.slots[*up as usize] = factor;
            }
            Step::AddGated { acc, add, gate } => {
                let width = self.plan.widths[*acc as usize];
                let other = std::mem::take(&mut self.slots[*add as usize]);
                let gates: Option<Vec<f32>> =
                    gate.map(|g| self.slots[g as usize].iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect());
                let rows = self.slots[*acc as usize].chunks_exact_mut(width).zip(other.chunks_exact(width));
                for (t, (row, add)) in rows.enumerate() {
                    let factor = gates.as_ref().map_or(1.0, |g| g[t]);
                    row.iter_mut().zip(add).for_each(|(x, y)| *x += factor * y);
                }
                self.slots[*add as usize] = other;
            }
            Step::Add { acc, add, scale } => {
                let other = std::mem::take(&mut self.slots[*add as usize]);
                self.slots[*acc as usize].iter_mut().zip(&other).for_each(|(x, y)| *x += scale * y);
                self.slots[*add as usize] = other;
            }
            Step::Head { dst, src, w, b, scale } => {
                let rows = batch.logit_rows();
                let width = self.plan.widths[*src as usize];
                let x: Vec<f32> =
                    rows.iter().flat_map(|&r| self.slots[*src as usize][r * width..(r + 1) * width].iter().copied()).collect();
                self.slots[*dst as usize] = self.head(&x, *w, *b, *scale)?;
            }
        }
        Ok(())
    }

    /// Logits, `[T, V]`, of what the head reads, `[T, D]`.
    pub fn logits(&mut self, x: &[f32]) -> Result<Vec<f32>, EngineError> {
        match self.plan.steps[self.plan.epilogue.clone()] {
            [.., Step::Head { w, b, scale, .. }] => self.head(x, w, b, scale),
            _ => unreachable!("a plan ends with the head"),
        }
    }

    fn head(&mut self, x: &[f32], w: TensorId, b: Option<TensorId>, scale: f32) -> Result<Vec<f32>, EngineError> {
        let bias = b.map(|b| self.vector(b)).transpose()?;
        let weight = required(&self.weights, w);
        let mut out = vec![0.0; x.len() / weight.cols.max(1) * weight.rows];
        linear::linear(&mut out, x, &weight, bias.as_deref())?;
        if scale != 1.0 {
            out.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(out)
    }

    /// Row length in use: a slot shared by projections of several widths is resized by whoever wrote it last.
    fn used_width(&self, slot: Slot, num_tok: usize, fallback: usize) -> usize {
        self.slots[slot as usize].len().checked_div(num_tok).filter(|&w| w > 0).unwrap_or(fallback.max(1))
    }

    fn append(&mut self, batch: &Batch, layer: LayerId, k: Slot, v: Option<Slot>) {
        let num_tok = batch.tokens.len().max(1);
        let row = |slot: Slot| self.slots[slot as usize].len() / num_tok;
        let (k_width, v_width) = (row(k), v.map_or(0, row));
        let dtype = self.cache_dtype;
        let slots = &self.slots;
        let rounded = |slot: Slot, at: Range<usize>| slots[slot as usize][at].iter().map(move |&x| tensor::round_to(dtype, x));
        let mut first = 0;
        for s in &batch.segments {
            if let Some(layers) = self.caches.get_mut(&s.seq) {
                let cache = &mut layers[layer.0 as usize];
                cache.k.extend(rounded(k, first * k_width..(first + s.len) * k_width));
                if let Some(v) = v {
                    cache.v.extend(rounded(v, first * v_width..(first + s.len) * v_width));
                }
            }
            first += s.len;
        }
    }

    /// A norm gain or bias as floats, decoded once.
    fn vector(&mut self, id: TensorId) -> Result<Arc<[f32]>, EngineError> {
        if let Some(v) = self.vectors.get(&id) {
            return Ok(Arc::clone(v));
        }
        let v: Arc<[f32]> = required(&self.weights, id).to_f32()?.into();
        self.vectors.insert(id, Arc::clone(&v));
        Ok(v)
    }
}

/// A weight that the preflight of [`Weights::open`] has seen.
fn required(weights: &Weights, id: TensorId) -> crate::artifact::weights::Weight<'_> {
    weights.get(id).unwrap_or_else(|| unreachable!("{id} passed the preflight"))
}

pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn normalise(x: &mut [f32], gain: &[f32], bias: Option<&[f32]>, norm: Norm) {
    let n = x.len() as f32;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().sum::<f32>() / n,
    };
    let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n;
    let inv = 1.0 / (var + norm.eps).sqrt();
    x.iter_mut().zip(gain).for_each(|(v, g)| *v = (*v - mean) * inv * g);
    if let Some(bias) = bias {
        x.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
    }
}

fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32], pairing: Pairing) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = match pairing {
            Pairing::Half => (i, i + half),
            Pairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (p, q) = (x[a], x[b]);
        x[a] = p * cos[i] - q * sin[i];
        x[b] = q * cos[i] + p * sin[i];
    }
}
