//! Blocks as launches of the fast kernels. A block whose shapes or formats no fast kernel takes is left to the plain steps.

use super::exec::rule;
use super::fast::*;
use super::fuse::{Block, DecodePart, LatentPart, Lead, Product, SharedPart};
use super::launch::{self, Limits, Width};
use super::plain::{Kind, Matrix};
use super::{EXPERTS_TOK, Engine, Planes, View};
use crate::engine::EngineError;
use crate::model::plan::{Slot, Step};
use crate::model::spec::{NormKind, Pairing, RouterSpec};

/// Whether a block was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ran {
    Yes,
    /// No kernel takes it; nothing was launched.
    No,
}

/// Where a product reads.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// Rows of the residual stream from an address on, through a norm.
    Normed(&'a Lead, u64),
    /// Rows of so many elements.
    Floats(u64, i32),
    /// `silu(gate) * up` of rows of so many elements.
    Gated { gate: u64, up: u64, stride: i32 },
}

/// A product with where it goes.
#[derive(Clone, Copy)]
struct Output {
    w: Matrix,
    bias: Matrix,
    at: u64,
    stride: i32,
    /// Added after scaling; 0: nothing.
    add: u64,
    scale: f32,
}

fn width(m: &Matrix) -> Option<Width> {
    let whole = m.cols % 32 == 0 && m.data.is_multiple_of(16);
    let scaled = m.scale_kind == Kind::Bf16;
    let bits = match m.kind {
        Kind::Bf16 => 16,
        Kind::Int4 if scaled => 4,
        Kind::Int8 if scaled => 8,
        _ => return None,
    };
    whole.then_some(Width { bits, group: if bits == 16 { 1 } else { m.group as usize } })
}

fn norm_code(lead: &Lead) -> i32 {
    match lead.norm.kind {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

impl Engine {
    pub(super) fn limits(&self) -> Limits {
        self.device.properties().limits()
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
    fn products(&self, source: Source<'_>, outputs: &[Output], num_tok: usize) -> Result<(), EngineError> {
        let mut rest = outputs;
        let mut made: Option<usize> = None;
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
                if made != Some(w.bits) {
                    self.planes(&self.work.planes, source, cols, w.bits, num_tok)?;
                    made = Some(w.bits);
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

    /// Makes the planes of `num_rows` rows for weights of so many bits.
    fn planes(&self, to: &Planes, source: Source<'_>, cols: usize, bits: usize, num_rows: usize) -> Result<(), EngineError> {
        let (x, x_stride) = self.floats(source);
        let args = PlanesArgs { q: to.codes.at(0), scale: to.scales.at(0), x, x_stride, k: cols as i32, ..PlanesArgs::ZERO };
        let args = match source {
            Source::Normed(lead, _) => {
                let (gain, shift) = (self.store.matrix(lead.w).data, self.store.optional(lead.b).data);
                PlanesArgs { gain, shift, norm: norm_code(lead), eps: lead.norm.eps, ..args }
            }
            Source::Gated { up, .. } => PlanesArgs { up, ..args },
            Source::Floats(..) => args,
        };
        Ok(self.fast.launch(&format!("planes_w{bits}"), launch::planes(cols, num_rows), &args)?)
    }

    /// The whole residual stream through a norm.
    fn normed<'a>(&self, lead: &'a Lead) -> Source<'a> {
        Source::Normed(lead, self.at(Slot::Residual))
    }

    /// A product into its slot.
    fn to_slot(&self, p: &Product) -> Output {
        let w = self.store.matrix(p.w);
        Output { w, bias: self.store.optional(p.b), at: self.at(p.dst), stride: w.rows, add: 0, scale: 1.0 }
    }

    /// A product that joins the residual.
    fn to_residual(&self, p: &Product, scale: f32) -> Output {
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
        let cache = &self.caches[layer.0 as usize];
        let h = part.heads;
        let (q_width, kv_width) = ((h.q * h.dim) as i32, (h.kv * h.dim) as i32);
        let (q_gain, k_gain, norm, eps) = self.head_norms(part);
        let args = AttentionArgs {
            out: self.at(Slot::Attn),
            q: self.at(Slot::Q),
            k: self.at(Slot::K),
            v: self.at(Slot::V),
            k_pages: cache.keys.at(0),
            v_pages: cache.values.as_ref().map_or(0, |b| b.at(0)),
            page_table: view.table,
            positions: view.positions,
            partial: self.work.partial.at(0),
            counters: self.work.counters.at(0),
            q_gain,
            k_gain,
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
        };
        let grid = launch::attention(h.dim, h.q, h.kv, view.num_tok);
        self.fast.launch(&launch::attention_name(h.dim, h.q / h.kv), grid, &args)?;
        self.count_keys();
        Ok(())
    }

    /// Any number of new tokens: keys and values into the pages, then attention over them.
    fn prefill_attention(&mut self, middle: &[Step], part: &DecodePart, view: &View) -> Result<(), EngineError> {
        let Some(Step::Attend { layer, .. }) = middle.last() else { return Ok(()) };
        let cache = &self.caches[layer.0 as usize];
        let h = part.heads;
        let (q_width, kv_width) = ((h.q * h.dim) as i32, (h.kv * h.dim) as i32);
        let (q_gain, k_gain, norm, eps) = self.head_norms(part);
        let (k_pages, v_pages) = (cache.keys.at(0), cache.values.as_ref().map_or(0, |b| b.at(0)));
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
    fn second_half(&self, gate: &Product, output: Output, view: &View) -> Result<(), EngineError> {
        let source = Source::Gated { gate: self.at(Slot::Gate), up: self.at(Slot::Up), stride: self.store.matrix(gate.w).rows };
        self.products(source, &[output], view.num_tok)
    }

    /// Most tokens that the expert kernels of a layer take at once; `None` if they do not take its formats.
    fn expert_chunk(&self, layer: u32, router: &RouterSpec, f: usize) -> Option<usize> {
        let [gate, up, down] = self.store.expert(layer);
        let (g, u, d) = (width(&gate)?, width(&up)?, width(&down)?);
        let names = g.name(gate.cols as usize).is_some() && d.name(down.cols as usize).is_some();
        if !names || g != u {
            return None;
        }
        let (limits, width) = (self.limits(), self.spec.width);
        let (experts, top_k) = (router.experts, router.top_k);
        let fits = |t: &usize| {
            launch::down_pairs(d, width, f, 1, *t, None, limits).is_some()
                && launch::gate_up(g, width, f, 1, *t, None, limits).is_some()
                && launch::router_rows(experts, top_k, false, *t, limits).is_some()
                && launch::router_logits(experts, width, *t, false, limits).is_some()
        };
        [EXPERTS_TOK, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1].into_iter().find(fits)
    }

    #[allow(clippy::too_many_arguments)]
    fn moe(
        &mut self,
        lead: &Lead,
        router_w: Matrix,
        router: &RouterSpec,
        layer: u32,
        f: usize,
        shared: Option<&SharedPart>,
        scale: f32,
        view: &View,
    ) -> Result<(), EngineError> {
        let Some(chunk) = self.expert_chunk(layer, router, f) else { return Ok(()) };
        if let Some(s) = shared {
            let mut first = vec![self.to_slot(&s.gate), self.to_slot(&s.up)];
            first.extend(s.router.as_ref().map(|r| self.to_slot(r)));
            self.products(self.normed(lead), &first, view.num_tok)?;
            if s.router.is_some() {
                self.second_half(&s.gate, self.to_slot(&s.down), view)?;
            }
        }
        for start in (0..view.num_tok).step_by(chunk) {
            self.experts(lead, router_w, router, layer, f, scale, start, chunk.min(view.num_tok - start), view.decode)?;
        }
        match shared {
            Some(s) if s.router.is_some() => {
                let d = self.spec.width as i32;
                let (acc, add, gate) = (self.at(Slot::Residual), self.at(Slot::Shared), self.at(Slot::SharedGate));
                let grid = launch::parts((d as usize).div_ceil(256), view.num_tok, 256);
                self.fast.launch("add_gated", grid, &AddGatedArgs { acc, add, gate, d, scale })?;
            }
            Some(s) => self.second_half(&s.gate, self.to_residual(&s.down, scale), view)?,
            None => {}
        }
        Ok(())
    }

    /// Router and experts of a run of tokens.
    #[allow(clippy::too_many_arguments)]
    fn experts(
        &self,
        lead: &Lead,
        router_w: Matrix,
        router: &RouterSpec,
        layer: u32,
        f: usize,
        scale: f32,
        start: usize,
        num_tok: usize,
        decode: bool,
    ) -> Result<(), EngineError> {
        let [gate, _, down] = self.store.expert(layer);
        let (Some(g), Some(d)) = (width(&gate), width(&down)) else { return Ok(()) };
        let (limits, width, top_k) = (self.limits(), self.spec.width, router.top_k);
        let slots = (num_tok * top_k).min(router.experts);
        let x = self.at(Slot::Residual) + (start * width * 4) as u64;
        let direct = self.route(lead, router_w, router, layer, g.bits, x, start, num_tok)?;
        if decode {
            self.replay_routing(layer, start, num_tok, router)?;
        }
        let chooses = (direct.logits != 0).then_some(router.experts);
        let Some(first) = launch::gate_up(g, width, f, slots, num_tok, chooses, limits) else { return Ok(()) };

        let gates = self.work.gates.at(start * top_k * 4);
        let (h, planes) = (self.work.inner.at(0), &self.work.expert_planes);
        let (list, num_slots, pairs) = (self.work.expert_slots.at(0), self.work.num_slots.at(0), self.work.pairs.at(0));
        let (t, wide, inner, k) = (num_tok as i32, width as i32, f as i32, top_k as i32);
        let args = ExpertsArgs {
            out: h,
            x_q: planes.codes.at(0),
            x_scale: planes.scales.at(0),
            slots: list,
            num_slots,
            pairs,
            direct,
            t,
            k,
            inner: wide,
            rows: inner,
            columns: first.columns as i32,
            stages: first.stages as i32,
            teams: first.teams as i32,
        };
        let name = |w: launch::Width, m: &Matrix| w.name(m.cols as usize).unwrap_or("");
        let gate_up = |slots: u64, num_slots: u64| {
            let args = ExpertsArgs { slots, num_slots, ..args };
            self.fast.launch(&format!("moe_gate_up_{}_{}", name(g, &gate), first.variant), first.grid, &args)
        };

        if let Some(whole) = launch::down(d, width, f, top_k, num_tok, chooses, limits) {
            self.fetch(layer, start * top_k, num_tok * top_k, list)?;
            gate_up(list, num_slots)?;
            let args = DownArgs {
                y: x,
                add: x,
                h,
                slots: list,
                num_slots,
                pairs,
                gates,
                direct,
                t,
                d: wide,
                f: inner,
                k,
                chunk: whole.chunk as i32,
                stages: whole.stages as i32,
                split: whole.split as i32,
                scale,
            };
            return Ok(self.fast.launch(&format!("moe_down_{}", name(d, &down)), whole.grid, &args)?);
        }
        let Some(second) = launch::down_pairs(d, width, f, slots, num_tok, chooses, limits) else { return Ok(()) };
        let planes = &self.work.inner_planes;
        let outputs = self.work.pair_outputs.at(0);
        let both = |slots: u64, num_slots: u64| -> Result<(), EngineError> {
            gate_up(slots, num_slots)?;
            self.planes(planes, Source::Floats(h, inner), f, d.bits, num_tok * top_k)?;
            let args = ExpertsArgs {
                out: outputs,
                x_q: planes.codes.at(0),
                x_scale: planes.scales.at(0),
                slots,
                num_slots,
                inner,
                rows: wide,
                columns: second.columns as i32,
                stages: second.stages as i32,
                teams: second.teams as i32,
                ..args
            };
            Ok(self.fast.launch(&format!("moe_down_pairs_{}_{}", name(d, &down), second.variant), second.grid, &args)?)
        };
        let waves = self.store.tiers().filter(|_| !decode).map(|tiers| Ok((tiers, tiers.waves(layer, num_tok * top_k)?)));
        match waves.transpose().map_err(EngineError::Cuda)? {
            Some((tiers, Some(waves))) => {
                for wave in waves {
                    if let Some((args, slots, num_slots)) = tiers.send(layer, wave, list, num_slots)? {
                        self.fast.launch("tiers_wave", launch::tokens(1), &args)?;
                        both(slots, num_slots)?;
                        tiers.sent()?;
                    }
                }
            }
            _ => {
                self.fetch(layer, start * top_k, num_tok * top_k, list)?;
                both(list, num_slots)?;
            }
        }
        let args = CombineArgs { y: x, add: x, pairs: outputs, gates, d: wide, k, scale };
        Ok(self.fast.launch("moe_combine", launch::combine(width, num_tok), &args)?)
    }

    /// Planes of the experts' input, and experts, gates and list of a run of tokens; or what the experts' kernels need to choose themselves.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &self,
        lead: &Lead,
        w: Matrix,
        router: &RouterSpec,
        layer: u32,
        bits: usize,
        x: u64,
        start: usize,
        num_tok: usize,
    ) -> Result<DirectRoute, EngineError> {
        let (limits, width, experts, top_k) = (self.limits(), self.spec.width, router.experts, router.top_k);
        let rule = rule(router);
        let planes = &self.work.expert_planes;
        let args = RouterArgs {
            logits: self.work.router_logits.at(start * experts * 4),
            ids: self.work.experts.at(start * top_k * 4),
            gates: self.work.gates.at(start * top_k * 4),
            slots: self.work.expert_slots.at(0),
            num_slots: self.work.num_slots.at(0),
            pairs: self.work.pairs.at(0),
            x_q: planes.codes.at(0),
            x_scale: planes.scales.at(0),
            x,
            gain: self.store.matrix(lead.w).data,
            shift: self.store.optional(lead.b).data,
            w: w.data,
            table: self.store.addresses(layer),
            counters: self.work.counters.at(self.work.router_counters_at),
            t: num_tok as i32,
            d: width as i32,
            tokens: 0,
            w_is_f32: (w.kind == Kind::F32) as i32,
            ahead: 0,
            norm: norm_code(lead),
            eps: lead.norm.eps,
            bits: bits as i32,
            rule: RouteRule {
                e: rule.experts,
                k: rule.top_k,
                select: rule.select,
                softmax_of_chosen: rule.softmax_of_chosen,
                renorm: rule.renorm,
                num_groups: rule.groups,
                keep_groups: rule.keep,
                jitter: rule.jitter,
                scale: rule.scale,
            },
        };
        if launch::routes_rows(num_tok) && w.kind == Kind::Bf16 {
            self.planes(planes, Source::Normed(lead, x), width, bits, num_tok)?;
            let logits = Output { w, bias: Matrix::NONE, at: args.logits, stride: rule.experts, add: 0, scale: 1.0 };
            self.products(Source::Normed(lead, x), &[logits], num_tok)?;
        } else {
            let half = w.kind == Kind::Bf16;
            let Some(launch) = launch::router_logits(experts, width, num_tok, half, limits) else { return Ok(DirectRoute::ZERO) };
            let args = RouterArgs { ahead: launch.ahead as i32, ..args };
            self.fast.launch(launch.name, launch.grid, &args)?;
        }
        let plain_top = matches!(router.select, crate::model::spec::Select::Top);
        let listed = self.store.tiers().is_some() || self.scripts.contains_key(&layer);
        if plain_top && !listed && launch::routes_directly(experts, top_k, num_tok) {
            let RouterArgs { logits, table, ids, gates, rule, .. } = args;
            return Ok(DirectRoute { logits, table, ids, gates, rule, pad: 0 });
        }
        let Some(rows) = launch::router_rows(experts, top_k, plain_top, num_tok, limits) else { return Ok(DirectRoute::ZERO) };
        let args = RouterArgs { tokens: rows.tokens as i32, ..args };
        self.fast.launch(rows.name, rows.grid, &args)?;
        Ok(DirectRoute::ZERO)
    }

    /// Puts choices made beforehand in the place of the router's, if there are any.
    fn replay_routing(&self, layer: u32, start: usize, num_tok: usize, router: &RouterSpec) -> Result<(), EngineError> {
        let Some((script, step, steps, rows)) = self.scripts.get(&layer).filter(|s| start == 0 && num_tok <= s.3) else {
            return Ok(());
        };
        let args = ReplayArgs {
            script: script.at(0),
            step: step.at(0),
            ids: self.work.experts.at(0),
            list: self.work.expert_slots.at(0),
            num_slots: self.work.num_slots.at(0),
            pairs: self.work.pairs.at(0),
            table: self.store.addresses(layer),
            t: num_tok as i32,
            e: router.experts as i32,
            k: router.top_k as i32,
            steps: *steps as i32,
            rows: *rows as i32,
        };
        Ok(self.fast.launch("tiers_replay", launch::tokens(1), &args)?)
    }

    /// Final norm and logits of the rows asked for. The rows are gathered over the residual's own normed slot.
    fn head(&mut self, lead: &Lead, w: Matrix, bias: Matrix, scale: f32, view: &View) -> Result<(), EngineError> {
        if view.num_rows == 0 {
            return Ok(());
        }
        let output = Output { w, bias, at: self.at(Slot::Logits), stride: w.rows, add: 0, scale };
        if view.num_rows == view.num_tok {
            return self.products(self.normed(lead), &[output], view.num_tok);
        }
        self.step(&lead_step(lead), view)?;
        let (d, rows) = (self.spec.width as i32, launch::tokens(view.num_rows));
        let (picked, normed) = (self.at(Slot::Block), self.at(Slot::Normed));
        self.plain.plain_pick(rows, picked, normed, d, view.pick, d)?;
        self.products(Source::Floats(picked, d), &[output], view.num_rows)
    }
}

fn lead_step(lead: &Lead) -> Step {
    Step::Norm { dst: Slot::Normed, src: Slot::Residual, w: lead.w, b: lead.b, norm: lead.norm, width: lead.width, runs: 1 }
}
