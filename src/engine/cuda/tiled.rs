//! Steps of many tokens as products in tiles; what is no product is left to the plain kernels.

use super::batch::View;
use super::device::{CudaError, Device};
use super::memory::Buffer;
use super::module::{Module, program};
use super::tiles::{self, Tiles};
use super::{Engine, launch};
use crate::engine::EngineError;
use crate::ids::LayerId;
use crate::model::plan::{Heads, Slot, Step};
use crate::model::spec::{Ffn, ModelSpec, Moe};
use std::sync::Arc;

/// Bytes of the scores of one run of tokens that are made at a time, unless one group of heads takes more.
const SCORE_BYTES: usize = 256 << 20;

/// The kernels, and what is between those of one step.
pub(super) struct Tiled {
    pub kernels: Tiles,
    device: Arc<Device>,
    spec: ModelSpec,
    /// Tokens that the buffers hold.
    capacity_tok: usize,
    /// Up projections `[T * K, F]`, and outputs `[T * K, D]`, of pairs of token and rank.
    pub up: Buffer,
    pub outputs: Buffer,
    /// Pairs of each expert `[E, T]`, and how many.
    pub lists: Buffer,
    pub counts: Buffer,
    pub scores: Buffer,
}

/// Pairs of token and rank by expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs {
    /// Tokens, the most that an expert can have.
    pub tok: usize,
    /// Pairs of each.
    pub divide: usize,
    /// Pairs of each expert `[E, T]`, and how many.
    pub lists: u64,
    pub counts: u64,
}

impl Tiled {
    pub fn load(device: &Arc<Device>, spec: &ModelSpec) -> Result<Self, CudaError> {
        let kernels = Tiles::load(&Module::load(device, program("tiles.cu"))?)?;
        let none = || Buffer::new(device, 0);
        Ok(Self {
            kernels,
            device: Arc::clone(device),
            spec: spec.clone(),
            capacity_tok: 0,
            up: none()?,
            outputs: none()?,
            lists: none()?,
            counts: Buffer::new(device, 4 * Self::experts(spec))?,
            scores: none()?,
        })
    }

    /// Experts of the layer that has the most.
    pub fn experts(spec: &ModelSpec) -> usize {
        spec.layers.iter().map(|l| if let Ffn::Moe(m) = &l.ffn { m.router.experts } else { 0 }).max().unwrap_or(0)
    }

    /// Experts that a token chooses in the layer where it chooses the most.
    pub fn top_k(spec: &ModelSpec) -> usize {
        spec.layers.iter().map(|l| if let Ffn::Moe(m) = &l.ffn { m.router.top_k } else { 0 }).max().unwrap_or(0)
    }

    /// Bytes for passes of so many tokens, scores aside.
    pub fn bytes(spec: &ModelSpec, tok: usize) -> u64 {
        let of = |f: &dyn Fn(&Moe) -> usize| {
            spec.layers.iter().map(|l| if let Ffn::Moe(m) = &l.ffn { f(m) } else { 0 }).max().unwrap_or(0)
        };
        (4 * tok * (of(&|m| m.router.top_k * m.width) + of(&|m| m.router.top_k) * spec.width + Self::experts(spec))) as u64
    }

    /// The listed pairs of so many tokens.
    pub fn pairs(&self, tok: usize, divide: usize) -> Pairs {
        Pairs { tok, divide, lists: self.lists.at(0), counts: self.counts.at(0) }
    }

    /// Makes room for passes of so many tokens.
    pub fn reserve(&mut self, tok: usize) -> Result<(), CudaError> {
        if tok <= self.capacity_tok {
            return Ok(());
        }
        let of = |f: &dyn Fn(&Moe) -> usize| {
            self.spec.layers.iter().map(|l| if let Ffn::Moe(m) = &l.ffn { f(m) } else { 0 }).max().unwrap_or(0)
        };
        self.capacity_tok = 0;
        for buffer in [&mut self.up, &mut self.outputs, &mut self.lists] {
            *buffer = Buffer::new(&self.device, 0)?;
        }
        self.up = Buffer::new(&self.device, 4 * tok * of(&|m| m.router.top_k * m.width))?;
        self.outputs = Buffer::new(&self.device, 4 * tok * of(&|m| m.router.top_k) * self.spec.width)?;
        self.lists = Buffer::new(&self.device, 4 * tok * Self::experts(&self.spec))?;
        self.capacity_tok = tok;
        Ok(())
    }

    /// Heads whose scores are made together: whole groups that share keys.
    pub fn heads_at_a_time(&mut self, heads: usize, group: usize, num_tok: usize) -> Result<usize, CudaError> {
        let each = 4 * num_tok * num_tok;
        let groups = (SCORE_BYTES / (each * group).max(1)).clamp(1, heads / group.max(1));
        if each * group * groups > self.scores.bytes() {
            self.scores = Buffer::new(&self.device, 0)?;
            self.scores = Buffer::new(&self.device, each * group * groups)?;
        }
        Ok(group * groups)
    }
}

impl Engine {
    /// Runs a step that is a product of all tokens; false for another.
    pub(super) fn tiled_step(&mut self, step: &Step, view: &View) -> Result<bool, EngineError> {
        let Some(tiled) = &self.tiled else { return Ok(false) };
        let k = &tiled.kernels;
        match step {
            Step::Linear { dst, src, w, b } => {
                let (w, bias) = (self.store.matrix(*w), self.store.optional(*b));
                let (grid, tok) = (tiles::tiles(w.rows as usize, view.num_tok, 1), view.num_tok as i32);
                k.tiles_linear(grid, self.at(*dst), self.row(*dst), self.at(*src), self.row(*src), 0, w, bias, 1.0, tok)?;
            }
            Step::Head { dst, src, w, b, scale } => {
                let (w, bias, rows) = (self.store.matrix(*w), self.store.optional(*b), view.num_rows);
                let (grid, to, from) = (tiles::tiles(w.rows as usize, rows, 1), self.at(*dst), self.at(*src));
                k.tiles_linear(grid, to, w.rows, from, self.row(*src), view.pick, w, bias, *scale, rows as i32)?;
            }
            Step::Attend { dst, q, k: key, v, heads, window, .. } => {
                let whole = self.batch.segments.iter().all(|s| s.start == 0);
                let fours = [heads.dim as i32, self.row(*v)].iter().all(|n| n % 4 == 0);
                if !whole || !fours {
                    return Ok(false);
                }
                self.append(step, view)?;
                self.attend_whole([*dst, *q, *key, *v], heads, window.unwrap_or(0))?;
                self.count_keys();
            }
            Step::Experts { dst, src, layer, width } => {
                let Ffn::Moe(moe) = &self.spec.layers[layer.0 as usize].ffn else { return Ok(false) };
                let (router, pairs) = (moe.router, view.num_tok * moe.router.top_k);
                self.fetch(layer.0, 0, pairs, 0, None)?;
                self.list_pairs(*layer, view.num_tok, 0)?;
                self.expert_inner(*src, *layer, *width, &tiled.pairs(view.num_tok, router.top_k))?;
                let (inner, outputs, d) = (self.work.inner.at(0), tiled.outputs.at(0), self.spec.width as i32);
                let (grid, table) = (tiles::tiles(self.spec.width, view.num_tok, router.experts), self.store.table(layer.0));
                let (lists, counts, cap) = (tiled.lists.at(0), tiled.counts.at(0), view.num_tok as i32);
                k.tiles_experts(grid, outputs, d, inner, *width as i32, 1, table, 2, lists, counts, cap)?;
                let gates = self.work.gates.at(0);
                k.tiles_combine(launch::tokens(view.num_tok), self.at(*dst), outputs, gates, router.top_k as i32, d)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Lists which pairs of token and rank chose each expert of a layer; counts are also added to `totals`, which may be null.
    pub(super) fn list_pairs(&self, layer: LayerId, num_tok: usize, totals: u64) -> Result<(), CudaError> {
        let (Some(tiled), Ffn::Moe(moe)) = (&self.tiled, &self.spec.layers[layer.0 as usize].ffn) else { return Ok(()) };
        let (lists, counts, chosen) = (tiled.lists.at(0), tiled.counts.at(0), self.work.experts.at(0));
        let pairs = (num_tok * moe.router.top_k) as i32;
        tiled.kernels.tiles_lists(tiles::lists(moe.router.experts), lists, counts, totals, chosen, pairs, num_tok as i32)
    }

    /// What down projections see of some pairs, `[pairs, F]`; a pair is of token `pair / divide`.
    pub(super) fn expert_inner(&self, src: Slot, layer: LayerId, width: usize, pairs: &Pairs) -> Result<(), CudaError> {
        let (Some(tiled), Ffn::Moe(moe)) = (&self.tiled, &self.spec.layers[layer.0 as usize].ffn) else { return Ok(()) };
        let (from, stride, table) = (self.at(src), self.row(src), self.store.table(layer.0));
        let (grid, Pairs { lists, counts, .. }) = (tiles::tiles(width, pairs.tok, moe.router.experts), *pairs);
        for (which, to) in [(0, self.work.inner.at(0)), (1, tiled.up.at(0))] {
            let (row, divide, cap) = (width as i32, pairs.divide as i32, pairs.tok as i32);
            tiled.kernels.tiles_experts(grid, to, row, from, stride, divide, table, which, lists, counts, cap)?;
        }
        let n = pairs.tok * pairs.divide * width;
        self.plain.plain_gated_act(launch::elements(n), self.work.inner.at(0), tiled.up.at(0), n as u64)
    }

    /// Causal attention of sequences that are whole in the batch: scores, softmax, mixture, one run of tokens after the other.
    fn attend_whole(&mut self, [dst, q, k, v]: [Slot; 4], heads: &Heads, window: usize) -> Result<(), CudaError> {
        let (group, dim) = (heads.q / heads.kv, heads.dim);
        let at = |slot: Slot, row: usize, column: usize| self.at(slot) + 4 * (row * self.row(slot) as usize + column) as u64;
        let mut runs = Vec::new();
        let mut first = 0;
        for s in &self.batch.segments {
            for h in 0..heads.q / group {
                let places = [
                    at(dst, first, h * group * dim),
                    at(q, first, h * group * dim),
                    at(k, first, h * dim),
                    at(v, first, h * dim),
                ];
                runs.push((places, s.len));
            }
            first += s.len;
        }
        let strides = [dst, q, k, v].map(|slot| self.row(slot));
        let Some(tiled) = &mut self.tiled else { return Ok(()) };
        let mut rest = &runs[..];
        while let Some(&([to, query, keys, values], n)) = rest.first() {
            // Groups of heads lie next to each other within a run of tokens.
            let left = rest.len().min(heads.kv - (runs.len() - rest.len()) % heads.kv);
            let count = tiled.heads_at_a_time(left * group, group, n)?;
            let (scores, tok, d, g) = (tiled.scores.at(0), n as i32, dim as i32, group as i32);
            let kernels = &tiled.kernels;
            kernels.tiles_scores(
                tiles::tiles(n, n, count),
                scores,
                query,
                strides[1],
                keys,
                strides[2],
                tok,
                d,
                g,
                heads.scale,
            )?;
            kernels.tiles_softmax(tiles::softmax(n, count), scores, tok, window as i32)?;
            kernels.tiles_mix(tiles::tiles(dim, n, count), to, strides[0], scores, values, strides[3], tok, d, g)?;
            rest = &rest[count / group..];
        }
        Ok(())
    }
}
