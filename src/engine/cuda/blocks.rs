//! Blocks as launches of the fast kernels. A block whose shapes or formats no fast kernel takes is left to the plain steps.

use super::exec::rule;
use super::fast::*;
use super::fuse::{Block, DecodePart, Lead, Product, SharedPart};
use super::launch::{self, Limits, Width};
use super::plain::{Kind, Matrix};
use super::{Engine, View};
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
    /// The residual stream through a norm.
    Normed(&'a Lead),
    /// `f32` rows of so many elements.
    Floats(u64, i32),
    /// bf16 rows, natural order, when `nibble` is false.
    Rounded { at: u64, stride: i32, nibble: bool },
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
    fn limits(&self) -> Limits {
        self.device.properties().limits()
    }

    /// Runs a block with the fast kernels, if they take it.
    pub(super) fn block(&mut self, block: &Block, view: &View) -> Result<Ran, EngineError> {
        if !self.takes(block, view) {
            return Ok(Ran::No);
        }
        match block {
            Block::Attention { lead, first, middle, decode, last, scale } => {
                self.attention(lead, first, middle, decode.as_ref(), last, *scale, view)?;
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
        aligned
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
            Block::Attention { decode, .. } => {
                self.takes(block, view) && decode.as_ref().is_some_and(|d| self.attention_fits(d, view.num_tok))
            }
            _ => true,
        })
    }

    fn linear_fits(&self, m: &Matrix, num_tok: usize) -> bool {
        let Some(w) = width(m) else { return false };
        let cols = m.cols as usize;
        let name = w.name(cols).is_some();
        name && launch::linear(w, cols, 1, num_tok, false, self.limits()).is_some()
    }

    /// Staged for few tokens of `f32` where it fits, else from bf16.
    fn variant(&self, w: Width, cols: usize, tiles: usize, num_tok: usize, floats: bool) -> Option<launch::LinearLaunch> {
        let limits = self.limits();
        let few = floats && num_tok <= launch::STAGED_TOK;
        let staged = if few { launch::linear(w, cols, tiles, num_tok, true, limits) } else { None };
        staged.or_else(|| launch::linear(w, cols, tiles, num_tok, false, limits))
    }

    /// Products of one input, up to three of one format a launch.
    fn products(&self, source: Source<'_>, outputs: &[Output], num_tok: usize) -> Result<(), EngineError> {
        let mut rest = outputs;
        let mut rounded: Option<bool> = None;
        while let Some(first) = rest.first() {
            let Some(w) = width(&first.w) else { return Ok(()) };
            let same = rest.iter().take(3).take_while(|o| width(&o.w) == Some(w)).count();
            let (now, later) = rest.split_at(same);
            rest = later;
            let cols = first.w.cols as usize;
            let tiles = now.iter().map(|o| (o.w.rows as usize).div_ceil(16)).sum();
            let (Some(plan), Some(name)) =
                (self.variant(w, cols, tiles, num_tok, !matches!(source, Source::Rounded { .. })), w.name(cols))
            else {
                return Ok(());
            };
            let mut args = LinearArgs { t: num_tok as i32, k: cols as i32, g: first.w.group, ..LinearArgs::ZERO };
            let mut variant = plan.variant;
            if variant == "s" {
                self.staged_source(&mut args, source);
                variant = if args.norm == 1 { "r" } else { "s" };
            } else {
                let nibble = w.bits == 4;
                (args.x, args.x_stride) = self.rounded_source(source, cols, nibble, &mut rounded, num_tok)?;
            }
            args.num_matrices = now.len() as i32;
            args.stages = plan.stages as i32;
            for (m, o) in args.m.iter_mut().zip(now) {
                *m = LinearMatrix {
                    packed: o.w.data,
                    scale: o.w.scales,
                    bias: o.bias.data,
                    add: o.add,
                    out: o.at,
                    rows: o.w.rows,
                    out_stride: o.stride,
                    out_is_bf16: 0,
                    out_scale: o.scale,
                };
            }
            self.fast.launch(&format!("linear_{name}_{variant}"), plan.grid, &args)?;
        }
        Ok(())
    }

    fn staged_source(&self, args: &mut LinearArgs, source: Source<'_>) {
        match source {
            Source::Normed(lead) => {
                (args.x, args.x_stride, args.x_is_f32) = (self.at(Slot::Residual), self.spec.width as i32, 1);
                (args.norm, args.eps) = (norm_code(lead), lead.norm.eps);
                args.gain = self.store.matrix(lead.w).data;
                args.shift = self.store.optional(lead.b).data;
            }
            Source::Floats(at, stride) => (args.x, args.x_stride, args.x_is_f32) = (at, stride, 1),
            Source::Rounded { at, stride, .. } => (args.x, args.x_stride) = (at, stride),
        }
    }

    /// bf16 rows in the order asked for; `have` remembers the order that the scratch rows were written in.
    fn rounded_source(
        &self,
        source: Source<'_>,
        cols: usize,
        nibble: bool,
        have: &mut Option<bool>,
        num_tok: usize,
    ) -> Result<(u64, i32), EngineError> {
        if let Source::Rounded { at, stride, nibble: order } = source
            && order == nibble
        {
            return Ok((at, stride));
        }
        let scratch = self.work.rounded.at(0);
        if *have != Some(nibble) {
            let (x, x_stride, x_is_bf16) = match source {
                Source::Normed(_) => (self.at(Slot::Residual), self.spec.width as i32, 0),
                Source::Floats(at, stride) => (at, stride, 0),
                Source::Rounded { at, stride, .. } => (at, stride, 1),
            };
            let mut args = NormArgs {
                y: scratch,
                x,
                width: cols as i32,
                runs: 1,
                x_stride,
                y_stride: cols as i32,
                x_is_bf16,
                nibble_order: nibble as i32,
                ..NormArgs::ZERO
            };
            if let Source::Normed(lead) = source {
                (args.norm, args.eps) = (norm_code(lead), lead.norm.eps);
                args.gain = self.store.matrix(lead.w).data;
                args.shift = self.store.optional(lead.b).data;
            }
            self.fast.launch("norm_rows", launch::parts(1, num_tok, 256), &args)?;
            *have = Some(nibble);
        }
        Ok((scratch, cols as i32))
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
        last: &Product,
        scale: f32,
        view: &View,
    ) -> Result<(), EngineError> {
        let num_tok = view.num_tok;
        let outputs: Vec<Output> = first.iter().map(|p| self.to_slot(p)).collect();
        self.products(Source::Normed(lead), &outputs, num_tok)?;
        first.iter().for_each(|p| self.note_width(p));
        let last_w = self.store.matrix(last.w);
        let fused = decode.filter(|d| view.decode && self.attention_fits(d, num_tok));
        let source = if let Some(part) = fused {
            let nibble = last_w.kind == Kind::Int4;
            self.decode_attention(middle, part, nibble, view)?;
            Source::Rounded { at: self.work.rounded_attn.at(0), stride: (part.heads.q * part.heads.dim) as i32, nibble }
        } else {
            let reads_normed = |s: &Step| matches!(s, Step::Linear { src: Slot::Normed, .. });
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
            Source::Floats(self.at(Slot::Attn), self.work.row[Slot::Attn as usize] as i32)
        };
        self.products(source, &[self.to_residual(last, scale)], num_tok)
    }

    fn attention_fits(&self, part: &DecodePart, num_tok: usize) -> bool {
        let h = part.heads;
        let shared = launch::attention(h.dim, h.kv, num_tok).shared_bytes as usize <= self.limits().block_shared_bytes;
        shared && self.fast.has(&format!("attention_decode_d{}", h.dim)) && h.q / h.kv <= 16 && num_tok <= launch::DECODE_TOK
    }

    fn decode_attention(&mut self, middle: &[Step], part: &DecodePart, nibble: bool, view: &View) -> Result<(), EngineError> {
        let Some(Step::Attend { layer, .. }) = middle.last() else { return Ok(()) };
        let cache = &self.caches[layer.0 as usize];
        let h = part.heads;
        let (q_width, kv_width) = ((h.q * h.dim) as i32, (h.kv * h.dim) as i32);
        let mut args = AttentionArgs {
            out: self.work.rounded_attn.at(0),
            q: self.at(Slot::Q),
            k: self.at(Slot::K),
            v: self.at(Slot::V),
            k_pages: cache.keys.at(0),
            v_pages: cache.values.as_ref().map_or(0, |b| b.at(0)),
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
            max_splits: launch::attention_splits(view.num_tok) as i32,
            clip: part.clip.unwrap_or(f32::INFINITY),
            rope_dim: self.spec.rope.dim as i32,
            interleaved: (self.spec.rope.pairing == Pairing::Interleaved) as i32,
            window: part.window.unwrap_or(0) as i32,
            nibble_order: nibble as i32,
            scale: h.scale,
            ..AttentionArgs::ZERO
        };
        if let Some((q, k, eps, width)) = part.norms {
            args.norm = if width == h.dim { 1 } else { 2 };
            args.eps = eps;
            (args.q_gain, args.k_gain) = (self.store.matrix(q).data, self.store.matrix(k).data);
        }
        let grid = launch::attention(h.dim, h.kv, view.num_tok);
        self.fast.launch(&format!("attention_decode_d{}", h.dim), grid, &args)?;
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
        self.products(Source::Normed(lead), &[self.to_slot(gate), self.to_slot(up)], view.num_tok)?;
        self.second_half(gate, down, Output { add, at: into, scale, ..self.to_slot(down) }, view)
    }

    /// The gated activation of two slots and the product after it.
    fn second_half(&self, gate: &Product, down: &Product, output: Output, view: &View) -> Result<(), EngineError> {
        let (f, w) = (self.store.matrix(gate.w).rows, self.store.matrix(down.w));
        let nibble = w.kind == Kind::Int4;
        let y = self.work.rounded_act.at(0);
        let args = GatedActArgs { y, gate: self.at(Slot::Gate), up: self.at(Slot::Up), f, nibble_order: nibble as i32 };
        self.fast.launch("gated_act", launch::parts((f as usize).div_ceil(256), view.num_tok, 256), &args)?;
        self.products(Source::Rounded { at: y, stride: f, nibble }, &[output], view.num_tok)
    }

    /// Most tokens that the expert kernels of a layer take at once; `None` if they do not take its formats.
    fn expert_chunk(&self, layer: u32, router: &RouterSpec, f: usize) -> Option<usize> {
        let [gate, up, down] = self.store.expert(layer);
        let (g, u, d) = (width(&gate)?, width(&up)?, width(&down)?);
        let names = g.name(gate.cols as usize).is_some() && d.name(down.cols as usize).is_some();
        if !names || g != u || g.bits != d.bits || g.bits == 16 {
            return None;
        }
        let (limits, width) = (self.limits(), self.spec.width);
        let fits = |t: &usize| {
            launch::down(d, width, f, router.top_k, *t, limits).is_some()
                && launch::router(router.experts, router.top_k, width, *t, limits).is_some()
                && launch::gate_up(g, width, f, 1, *t, limits).is_some()
        };
        [256, 192, 128, 96, 64, 32, 16, 8, 4, 2, 1].into_iter().find(fits)
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
            self.products(Source::Normed(lead), &first, view.num_tok)?;
            if s.router.is_some() {
                self.second_half(&s.gate, &s.down, self.to_slot(&s.down), view)?;
            }
        }
        for start in (0..view.num_tok).step_by(chunk) {
            self.experts(lead, router_w, router, layer, f, scale, start, chunk.min(view.num_tok - start))?;
        }
        match shared {
            Some(s) if s.router.is_some() => {
                let d = self.spec.width as i32;
                let (acc, add, gate) = (self.at(Slot::Residual), self.at(Slot::Shared), self.at(Slot::SharedGate));
                let grid = launch::parts((d as usize).div_ceil(256), view.num_tok, 256);
                self.fast.launch("add_gated", grid, &AddGatedArgs { acc, add, gate, d, scale })?;
            }
            Some(s) => self.second_half(&s.gate, &s.down, self.to_residual(&s.down, scale), view)?,
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
    ) -> Result<(), EngineError> {
        let [gate, _, down] = self.store.expert(layer);
        let (Some(g), Some(d)) = (width(&gate), width(&down)) else { return Ok(()) };
        let (limits, width, top_k) = (self.limits(), self.spec.width, router.top_k);
        let slots = (num_tok * top_k).min(router.experts);
        let (Some(router_grid), Some(first), Some(second)) = (
            launch::router(router.experts, top_k, width, num_tok, limits),
            launch::gate_up(g, width, f, slots, num_tok, limits),
            launch::down(d, width, f, top_k, num_tok, limits),
        ) else {
            return Ok(());
        };
        let rule = rule(router);
        let x = self.at(Slot::Residual) + (start * width * 4) as u64;
        let gates = self.work.gates.at(start * top_k * 4);
        let (normed, h) = (self.work.rounded.at(0), self.work.rounded_inner.at(0));
        let (list, num_slots, pairs) = (self.work.expert_slots.at(0), self.work.num_slots.at(0), self.work.pairs.at(0));
        let args = RouterArgs {
            logits: self.work.router_logits.at(start * router.experts * 4),
            ids: self.work.experts.at(start * top_k * 4),
            gates,
            slots: list,
            num_slots,
            pairs,
            normed,
            x,
            gain: self.store.matrix(lead.w).data,
            shift: self.store.optional(lead.b).data,
            w: router_w.data,
            table: self.store.addresses(layer),
            counters: self.work.counters.at(self.work.router_counters_at),
            t: num_tok as i32,
            d: width as i32,
            e: rule.experts,
            k: rule.top_k,
            tokens: launch::router_tokens(num_tok) as i32,
            w_is_f32: (router_w.kind == Kind::F32) as i32,
            norm: norm_code(lead),
            eps: lead.norm.eps,
            nibble_order: (g.bits == 4) as i32,
            select: rule.select,
            softmax_of_chosen: rule.softmax_of_chosen,
            renorm: rule.renorm,
            num_groups: rule.groups,
            keep_groups: rule.keep,
            jitter: rule.jitter,
            scale: rule.scale,
            ..RouterArgs::ZERO
        };
        let plain_top = matches!(router.select, crate::model::spec::Select::Top);
        self.fast.launch(launch::router_name(router.experts, plain_top, num_tok), router_grid, &args)?;
        let (f, k) = (f as i32, top_k as i32);
        let args = GateUpArgs {
            h,
            x: normed,
            slots: list,
            num_slots,
            pairs,
            t: num_tok as i32,
            d: width as i32,
            f,
            k,
            g: gate.group,
            stages: first.stages as i32,
            columns: first.columns as i32,
        };
        let name = |w: super::launch::Width, m: &Matrix| w.name(m.cols as usize).unwrap_or("");
        self.fast.launch(&format!("moe_gate_up_{}{}", name(g, &gate), first.variant), first.grid, &args)?;
        let args = DownArgs {
            y: x,
            add: x,
            h,
            slots: list,
            num_slots,
            pairs,
            gates,
            t: num_tok as i32,
            d: width as i32,
            f,
            k,
            g: down.group,
            chunk_steps: second.chunk_steps as i32,
            stages: second.stages as i32,
            columns: second.columns as i32,
            scale,
        };
        Ok(self.fast.launch(&format!("moe_down_{}", name(d, &down)), second.grid, &args)?)
    }

    /// Final norm and logits of the rows asked for. The rows are gathered over the residual's own normed slot.
    fn head(&mut self, lead: &Lead, w: Matrix, bias: Matrix, scale: f32, view: &View) -> Result<(), EngineError> {
        if view.num_rows == 0 {
            return Ok(());
        }
        let output = Output { w, bias, at: self.at(Slot::Logits), stride: w.rows, add: 0, scale };
        if view.num_rows == view.num_tok {
            return self.products(Source::Normed(lead), &[output], view.num_tok);
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
