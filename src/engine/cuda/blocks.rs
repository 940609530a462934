//! Blocks as launches of the fast kernels. A block whose shapes or formats no fast kernel takes is left to the plain steps.

use super::Engine;
use super::batch::View;
use super::device::CudaError;
use super::fast::*;
use super::fuse::{Block, DecodePart, LatentPart, Lead, Product};
use super::launch::{self, Limits, Width};
use super::plain::{Kind, Matrix};
use super::workspace::Planes;
use crate::engine::EngineError;
use crate::model::plan::{Slot, Step};
use crate::model::spec::{NormKind, Pairing};

/// Whether a block was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ran {
    Yes,
    /// No kernel takes it; nothing was launched.
    No,
}

/// Where a product reads.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// Rows of the residual stream from an address on, through a norm.
    Normed(&'a Lead, u64),
    /// Rows of so many elements.
    Floats(u64, i32),
    /// `silu(gate) * up` of rows of so many elements.
    Gated { gate: u64, up: u64, stride: i32 },
}

/// A product with where it goes.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub w: Matrix,
    pub bias: Matrix,
    pub at: u64,
    pub stride: i32,
    /// Added after scaling; 0: nothing.
    pub add: u64,
    pub scale: f32,
}

/// What fast kernels know of a matrix; `None` for one they do not take, such as one with zero points.
pub(super) fn width(m: &Matrix) -> Option<Width> {
    let whole = m.cols % 32 == 0 && m.data.is_multiple_of(16) && m.zeros == 0;
    let scaled = m.scale_kind == Kind::Bf16;
    let bits = match m.kind {
        Kind::Bf16 => 16,
        Kind::Int4 if scaled => 4,
        Kind::Int8 if scaled => 8,
        _ => return None,
    };
    whole.then_some(Width { bits, group: if bits == 16 { 1 } else { m.group as usize } })
}

pub(super) fn norm_code(lead: &Lead) -> i32 {
    match lead.norm.kind {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

impl Engine {
    /// What the device allows; kernels that bring experts have multiprocessors of their own.
    pub(super) fn limits(&self) -> Limits {
        let limits = self.device.properties().limits();
        self.tiers().map_or(limits, |_| limits.beside_fetches(self.ahead > 0))
    }

    /// Runs a block with the fast kernels, if they take it.
    pub(super) fn block(&mut self, block: &Block, view: &View) -> Result<Ran, EngineError> {
        if !self.takes(block, view) {
            return Ok(Ran::No);
        }
        match block {
            Block::Attention { lead, first, middle, decode, latent, last, scale } => {
                self.attention(lead, first, middle, decode.as_ref(), latent.as_ref(), last, *scale, view)?;
            }
            Block::Moe { lead, router_w, router, layer, width, shared, scale } => {
                self.moe(lead, self.store.matrix(*router_w), router, *layer, *width, shared.as_ref(), *scale, view)?;
            }
            Block::Mlp { lead, gate, up, down, scale } => {
                let add = self.at(Slot::Residual);
                self.gated_mlp(lead, gate, up, down, add, add, *scale, view)?;
            }
            Block::Head { lead, w, b, scale } => self.head(lead, self.store.matrix(*w), self.store.optional(*b), *scale, view)?,
        }
        Ok(Ran::Yes)
    }

    /// Whether every product and the router of a block have kernels at this size.
    fn takes(&self, block: &Block, view: &View) -> bool {
        let linear = |p: &Product| self.linear_fits(&self.store.matrix(p.w), view.num_tok);
        let aligned = self.spec.width.is_multiple_of(32);
        let fit = !self.unfit.iter().any(|kind| kind == block.name());
        aligned
            && fit
            && match block {
                Block::Attention { first, middle, last, .. } => {
                    let inner = middle.iter().all(|s| match s {
                        Step::Linear { w, .. } => self.linear_fits(&self.store.matrix(*w), view.num_tok),
                        _ => true,
                    });
                    first.iter().all(linear) && linear(last) && inner
                }
                Block::Moe { router_w, router, layer, width, shared, .. } => {
                    let shared_fits = shared.as_ref().is_none_or(|s| {
                        let router_fits = s.router.as_ref().is_none_or(linear);
                        linear(&s.gate) && linear(&s.up) && linear(&s.down) && router_fits
                    });
                    let w = self.store.matrix(*router_w);
                    let router_fits = matches!(w.kind, Kind::Bf16 | Kind::F32) && router.experts <= 512 && router.top_k <= 32;
                    shared_fits && router_fits && self.expert_chunk(*layer, router, *width).is_some()
                }
                Block::Mlp { gate, up, down, .. } => linear(gate) && linear(up) && linear(down),
                Block::Head { w, .. } => self.linear_fits(&self.store.matrix(*w), view.num_rows),
            }
    }

    /// Whether decode kernels do all attention of this size, so that no plain kernel needs rotations.
    pub(super) fn decodes_fully(&self, view: &View) -> bool {
        self.groups.iter().filter_map(|g| g.block.as_ref()).all(|block| match block {
            Block::Attention { decode, latent, .. } => {
                let heads = decode.as_ref().is_some_and(|d| self.attention_fits(d, view.num_tok));
                let latents = latent.as_ref().is_some_and(|l| self.latent_fits(l, view.num_tok));
                self.takes(block, view) && (heads || latents)
            }
            _ => true,
        })
    }

    fn linear_fits(&self, m: &Matrix, num_tok: usize) -> bool {
        let Some(w) = width(m) else { return false };
        let cols = m.cols as usize;
        w.name(cols).is_some() && launch::linear(w, cols, &[1], num_tok, false, self.limits()).is_some()
    }

    /// Products of one input, up to three of one format a launch. Few tokens make their planes inside the product where that fits.
    pub(super) fn products(&self, source: Source<'_>, outputs: &[Output], num_tok: usize) -> Result<(), EngineError> {
        self.products_where(None, source, outputs, num_tok)
    }

    /// The same where planes of the source by this name are there.
    pub(super) fn products_where(
        &self,
        mut made: Option<String>,
        source: Source<'_>,
        outputs: &[Output],
        num_tok: usize,
    ) -> Result<(), EngineError> {
        let mut rest = outputs;
        let layer_norm = matches!(source, Source::Normed(lead, _) if lead.norm.kind == NormKind::Layer);
        while let Some(first) = rest.first() {
            let Some(w) = width(&first.w) else { return Ok(()) };
            let same = rest.iter().take(3).take_while(|o| width(&o.w) == Some(w)).count();
            let (now, later) = rest.split_at(same);
            rest = later;
            let cols = first.w.cols as usize;
            let rows: Vec<usize> = now.iter().map(|o| o.w.rows as usize).collect();
            let few = num_tok <= launch::STAGED_TOK && !layer_norm;
            let plan = |staged| launch::linear(w, cols, &rows, num_tok, staged, self.limits());
            let staged = if few { plan(true) } else { None };
            let (Some(plan), Some(name)) = (staged.or_else(|| plan(false)), w.name(cols)) else { return Ok(()) };
            let mut args = LinearArgs { t: num_tok as i32, k: cols as i32, columns: plan.columns as i32, ..LinearArgs::ZERO };
            if staged.is_some() {
                (args.x, args.x_stride) = self.floats(source);
                match source {
                    Source::Normed(lead, _) => {
                        (args.norm, args.eps, args.gain) = (1, lead.norm.eps, self.store.matrix(lead.w).data);
                    }
                    Source::Gated { up, .. } => args.up = up,
                    Source::Floats(..) => {}
                }
            } else {
                let planes = launch::planes_name(w.bits, plan.variant == launch::WIDE);
                if made.as_ref() != Some(&planes) {
                    self.planes(&planes, &self.work.planes, None, source, cols, num_tok)?;
                    made = Some(planes);
                }
                (args.x_q, args.x_scale) = (self.work.planes.codes.at(0), self.work.planes.scales.at(0));
            }
            args.num_matrices = now.len() as i32;
            for (m, o) in args.m.iter_mut().zip(now) {
                *m = LinearMatrix {
                    packed: o.w.data,
                    scale: o.w.scales,
                    bias: o.bias.data,
                    add: o.add,
                    out: o.at,
                    rows: o.w.rows,
                    out_stride: o.stride,
                    out_scale: o.scale,
                    pad: 0,
                };
            }
            self.fast.launch(&format!("linear_{name}_{}", plan.variant), plan.grid, &args)?;
        }
        Ok(())
    }

    /// Where the rows of a source lie.
    fn floats(&self, source: Source<'_>) -> (u64, i32) {
        match source {
            Source::Normed(_, at) => (at, self.spec.width as i32),
            Source::Floats(at, stride) | Source::Gated { gate: at, stride, .. } => (at, stride),
        }
    }

    /// Makes the planes of `num_rows` rows by the kernel of that name.
    pub(super) fn planes(
        &self,
        name: &str,
        to: &Planes,
        bf16: Option<&Planes>,
        source: Source<'_>,
        cols: usize,
        num_rows: usize,
    ) -> Result<(), EngineError> {
        let (x, x_stride) = self.floats(source);
        let (q, scale, q_bf16) = (to.codes.at(0), to.scales.at(0), bf16.map_or(0, |b| b.codes.at(0)));
        let args = PlanesArgs { q, scale, q_bf16, x, x_stride, k: cols as i32, ..PlanesArgs::ZERO };
        let args = match source {
            Source::Normed(lead, _) => {
                let (gain, shift) = (self.store.matrix(lead.w).data, self.store.optional(lead.b).data);
                PlanesArgs { gain, shift, norm: norm_code(lead), eps: lead.norm.eps, ..args }
            }
            Source::Gated { up, .. } => PlanesArgs { up, ..args },
            Source::Floats(..) => args,
        };
        Ok(self.fast.launch(name, launch::planes(cols, num_rows), &args)?)
    }

    /// The whole residual stream through a norm.
    pub(super) fn normed<'a>(&self, lead: &'a Lead) -> Source<'a> {
        Source::Normed(lead, self.at(Slot::Residual))
    }

    /// A product into its slot.
    pub(super) fn to_slot(&self, p: &Product) -> Output {
        let w = self.store.matrix(p.w);
        Output { w, bias: self.store.optional(p.b), at: self.at(p.dst), stride: w.rows, add: 0, scale: 1.0 }
    }

    /// A product that joins the residual.
    pub(super) fn to_residual(&self, p: &Product, scale: f32) -> Output {
        Output { add: self.at(Slot::Residual), at: self.at(Slot::Residual), scale, ..self.to_slot(p) }
    }

    fn note_width(&mut self, p: &Product) {
        self.work.row[p.dst as usize] = self.store.matrix(p.w).rows as usize;
    }

    #[allow(clippy::too_many_arguments)]
    fn attention(
        &mut self,
        lead: &Lead,
        first: &[Product],
        middle: &[Step],
        decode: Option<&DecodePart>,
        latent: Option<&LatentPart>,
        last: &Product,
        scale: f32,
        view: &View,
    ) -> Result<(), EngineError> {
        let num_tok = view.num_tok;
        let outputs: Vec<Output> = first.iter().map(|p| self.to_slot(p)).collect();
        self.products(self.normed(lead), &outputs, num_tok)?;
        first.iter().for_each(|p| self.note_width(p));
        if let Some(part) = decode.filter(|d| view.decode && self.attention_fits(d, num_tok)) {
            self.decode_attention(middle, part, view)?;
            self.work.row[Slot::Attn as usize] = part.heads.q * part.heads.dim;
        } else if let Some(part) = decode.filter(|d| self.prefill_fits(d, num_tok)) {
            self.prefill_attention(middle, part, view)?;
            self.work.row[Slot::Attn as usize] = part.heads.q * part.heads.dim;
        } else {
            let reads_normed = |s: &Step| matches!(s, Step::Linear { src: Slot::Normed, .. });
            let latent = latent.filter(|l| view.decode && self.latent_fits(l, num_tok));
            let middle = latent.map_or(middle, |l| &middle[..l.before]);
            if middle.iter().any(reads_normed) {
                self.step(&lead_step(lead), view)?;
            }
            for step in middle {
                match step {
                    Step::Linear { dst, src, w, b } => {
                        let p = Product { dst: *dst, src: *src, w: *w, b: *b };
                        let from = Source::Floats(self.at(*src), self.work.row[*src as usize] as i32);
                        self.products(from, &[self.to_slot(&p)], num_tok)?;
                        self.note_width(&p);
                    }
                    other => self.step(other, view)?,
                }
            }
            if let Some(part) = latent {
                self.decode_latent(part, view)?;
            }
        }
        let source = Source::Floats(self.at(Slot::Attn), self.work.row[Slot::Attn as usize] as i32);
        self.products(source, &[self.to_residual(last, scale)], num_tok)
    }

    fn attention_fits(&self, part: &DecodePart, num_tok: usize) -> bool {
        let h = part.heads;
        let shared = launch::attention(h.dim, h.q, h.kv, num_tok).shared_bytes as usize <= self.limits().block_shared_bytes;
        let name = launch::attention_name(h.dim, h.q / h.kv);
        shared && self.fast.has(&name) && h.q / h.kv <= 16 && num_tok <= launch::DECODE_TOK
    }

    fn prefill_fits(&self, part: &DecodePart, num_tok: usize) -> bool {
        let shared = launch::attention_prefill(part.heads.dim, part.heads.q, num_tok).shared_bytes as usize;
        shared <= self.limits().block_shared_bytes && self.fast.has(&format!("attention_prefill_d{}", part.heads.dim))
    }

    /// Gains of queries and keys, which norm they are of, and its epsilon.
    fn head_norms(&self, part: &DecodePart) -> (u64, u64, i32, f32) {
        part.norms.map_or((0, 0, 0, 0.0), |(q, k, eps, width)| {
            (self.store.matrix(q).data, self.store.matrix(k).data, if width == part.heads.dim { 1 } else { 2 }, eps)
        })
    }

    fn decode_attention(&mut self, middle: &[Step], part: &DecodePart, view: &View) -> Result<(), EngineError> {
        let Some(Step::Attend { layer, .. }) = middle.last() else { return Ok(()) };
        let (k_pages, v_pages) = self.cache(*layer).addresses();
        let h = part.heads;
        let (q_width, kv_width) = ((h.q * h.dim) as i32, (h.kv * h.dim) as i32);
        let (q_gain, k_gain, norm, eps) = self.head_norms(part);
        let grid = launch::attention(h.dim, h.q, h.kv, view.num_tok);
        let args = AttentionArgs {
            out: self.at(Slot::Attn),
            q: self.at(Slot::Q),
            k: self.at(Slot::K),
            v: self.at(Slot::V),
            layer: AttentionLayer { q_gain, k_gain, k_pages, v_pages },
            page_table: view.table,
            positions: view.positions,
            partial: self.work.partial.at(0),
            counters: self.work.counters.at(0),
            cosines: view.cosines,
            sines: view.sines,
            q_stride: q_width,
            k_stride: kv_width,
            v_stride: kv_width,
            out_stride: q_width,
            h: h.q as i32,
            hk: h.kv as i32,
            max_pages: view.table_stride as i32,
            max_splits: launch::attention_splits(h.kv, view.num_tok) as i32,
            norm,
            eps,
            clip: part.clip.unwrap_or(f32::INFINITY),
            rope_dim: self.spec.rope.dim as i32,
            interleaved: (self.spec.rope.pairing == Pairing::Interleaved) as i32,
            window: part.window.unwrap_or(0) as i32,
            scale: h.scale,
            together: (grid.blocks.iter().product::<u32>() as usize <= self.limits().num_sm) as i32,
        };
        self.fast.launch(&launch::attention_name(h.dim, h.q / h.kv), grid, &args)?;
        self.count_keys();
        Ok(())
    }

    /// Any number of new tokens: keys and values into the pages, then attention over them.
    fn prefill_attention(&mut self, middle: &[Step], part: &DecodePart, view: &View) -> Result<(), EngineError> {
        let Some(Step::Attend { layer, .. }) = middle.last() else { return Ok(()) };
        let h = part.heads;
        let (q_width, kv_width) = ((h.q * h.dim) as i32, (h.kv * h.dim) as i32);
        let (q_gain, k_gain, norm, eps) = self.head_norms(part);
        let (k_pages, v_pages) = self.cache(*layer).addresses();
        let append = AppendArgs {
            q: self.at(Slot::Q),
            k: self.at(Slot::K),
            v: self.at(Slot::V),
            k_pages,
            v_pages,
            page_table: view.table,
            positions: view.positions,
            rows: view.rows,
            q_gain,
            k_gain,
            cosines: view.cos,
            sines: view.sin,
            q_stride: q_width,
            k_stride: kv_width,
            v_stride: kv_width,
            h: h.q as i32,
            hk: h.kv as i32,
            max_pages: view.table_stride as i32,
            norm,
            eps,
            clip: part.clip.unwrap_or(f32::INFINITY),
            rope_dim: self.spec.rope.dim as i32,
            interleaved: (self.spec.rope.pairing == Pairing::Interleaved) as i32,
        };
        self.fast.launch(&format!("append_d{}", h.dim), launch::tokens(view.num_tok), &append)?;
        let args = PrefillArgs {
            out: self.at(Slot::Attn),
            q: append.q,
            k_pages,
            v_pages,
            page_table: view.table,
            positions: view.positions,
            rows: view.rows,
            q_stride: q_width,
            out_stride: q_width,
            t: view.num_tok as i32,
            h: h.q as i32,
            hk: h.kv as i32,
            max_pages: view.table_stride as i32,
            window: part.window.unwrap_or(0) as i32,
            scale: h.scale,
        };
        let grid = launch::attention_prefill(h.dim, h.q, view.num_tok);
        self.fast.launch(&format!("attention_prefill_d{}", h.dim), grid, &args)?;
        self.count_keys();
        Ok(())
    }

    /// `into = add + scale * down(silu(gate) * up)` of the normed residual.
    #[allow(clippy::too_many_arguments)]
    fn gated_mlp(
        &self,
        lead: &Lead,
        gate: &Product,
        up: &Product,
        down: &Product,
        into: u64,
        add: u64,
        scale: f32,
        view: &View,
    ) -> Result<(), EngineError> {
        self.products(self.normed(lead), &[self.to_slot(gate), self.to_slot(up)], view.num_tok)?;
        self.second_half(gate, Output { add, at: into, scale, ..self.to_slot(down) }, view)
    }

    /// The gated activation of two slots and the product after it.
    pub(super) fn second_half(&self, gate: &Product, output: Output, view: &View) -> Result<(), EngineError> {
        let source = Source::Gated { gate: self.at(Slot::Gate), up: self.at(Slot::Up), stride: self.store.matrix(gate.w).rows };
        self.products(source, &[output], view.num_tok)
    }

    /// Moves the rows of the residual that get logits to its beginning; what looks at no other rows needs no more than this view of it.
    pub(super) fn only_wanted(&self, view: &View) -> Result<View, EngineError> {
        let (residual, picked) = (self.at(Slot::Residual), self.picked(view)?);
        if picked != residual {
            self.gather(residual, picked, 0, view.num_rows)?;
        }
        Ok(View { num_tok: view.num_rows, pick: 0, ..*view })
    }

    /// Where the rows of the residual that get logits are next to each other.
    fn picked(&self, view: &View) -> Result<u64, EngineError> {
        let (residual, picked) = (self.at(Slot::Residual), self.at(Slot::Block));
        if view.num_rows == view.num_tok {
            return Ok(residual);
        }
        self.gather(picked, residual, view.pick, view.num_rows)?;
        Ok(picked)
    }

    /// Copies so many rows as wide as the residual, those that `pick` names, or the first.
    fn gather(&self, to: u64, from: u64, pick: u64, num_rows: usize) -> Result<(), CudaError> {
        let d = self.spec.width as i32;
        self.plain.plain_pick(launch::tokens(num_rows), to, from, d, pick, d)
    }

    /// Final norm and logits of the rows asked for.
    fn head(&mut self, lead: &Lead, w: Matrix, bias: Matrix, scale: f32, view: &View) -> Result<(), EngineError> {
        if view.num_rows == 0 {
            return Ok(());
        }
        let output = Output { w, bias, at: self.at(Slot::Logits), stride: w.rows, add: 0, scale };
        self.products(Source::Normed(lead, self.picked(view)?), &[output], view.num_rows)
    }
}

fn lead_step(lead: &Lead) -> Step {
    Step::Norm { dst: Slot::Normed, src: Slot::Residual, w: lead.w, b: lead.b, norm: lead.norm, width: lead.width, runs: 1 }
}
