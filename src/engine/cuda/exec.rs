//! The steps of a plan as launches of the plain kernels: one exhaustive `match`.

use super::batch::View;
use super::experts::Beside;
use super::fast::FetchArgs;
use super::launch;
use super::plain::{Pages, Router};
use super::{CudaError, Engine, tiles};
use crate::engine::EngineError;
use crate::model::plan::{Slot, Step};
use crate::model::spec::{NormKind, Pairing, RouterSpec, Score, Select};

impl Engine {
    pub(super) fn at(&self, slot: Slot) -> u64 {
        self.work.slots[slot as usize].at(0)
    }

    pub(super) fn row(&self, slot: Slot) -> i32 {
        self.work.row[slot as usize] as i32
    }

    /// Runs one step on the plain kernels.
    pub(super) fn step(&mut self, step: &Step, view: &View) -> Result<(), EngineError> {
        let num_tok = view.num_tok;
        if let Some((dst, width)) = self.written(step) {
            self.work.row[dst as usize] = width;
        }
        if self.tiled_step(step, view)? {
            return Ok(());
        }
        let k = &self.plain;
        match step {
            Step::Embed { dst, table, scale } => {
                let (table, tokens) = (self.store.matrix(*table), view.tokens);
                k.plain_embed(launch::tokens(num_tok), self.at(*dst), self.row(*dst), table, tokens, *scale)?;
            }
            Step::Norm { dst, src, w, b, norm, width, runs } => {
                let (gain, bias) = (self.store.matrix(*w), self.store.optional(*b));
                let (layer, grid) = ((norm.kind == NormKind::Layer) as i32, launch::parts(*runs, num_tok, 256));
                let (to, from) = (self.at(*dst), self.at(*src));
                k.plain_norm(grid, to, self.row(*dst), from, self.row(*src), gain, bias, layer, norm.eps, *width as i32)?;
            }
            Step::Linear { dst, src, w, b } => {
                let (w, bias) = (self.store.matrix(*w), self.store.optional(*b));
                let grid = launch::rows(w.rows as usize, num_tok);
                let (to, from) = (self.at(*dst), self.at(*src));
                k.plain_linear(grid, to, self.row(*dst), from, self.row(*src), 0, w, bias, 1.0, num_tok as i32)?;
            }
            Step::Clip { buf, limit } => {
                let n = num_tok * self.row(*buf) as usize;
                k.plain_clip(launch::elements(n), self.at(*buf), n as u64, *limit)?;
            }
            Step::Rope { buf, heads, stride, offset } => {
                let (half, interleaved) = (self.spec.rope.dim / 2, self.spec.rope.pairing == Pairing::Interleaved);
                let (cos, sin) = (view.cos, view.sin);
                let (grid, row) = (launch::parts(*heads, num_tok, 64), self.row(*buf));
                let (stride, offset) = (*stride as i32, *offset as i32);
                k.plain_rope(grid, self.at(*buf), row, stride, offset, cos, sin, half as i32, interleaved as i32)?;
            }
            Step::Attend { dst, q, layer, heads, window, .. } => {
                self.append(step, view)?;
                let (keys, values) = self.cache(*layer).addresses();
                let (pages, dim) = (self.pages_of(view), heads.dim as i32);
                let (grid, window) = (launch::parts(heads.q, num_tok, 128), window.unwrap_or(0) as i32);
                let (to, from, kv) = (self.at(*dst), self.at(*q), heads.kv as i32);
                k.plain_attend(grid, to, self.row(*dst), from, self.row(*q), keys, values, pages, kv, dim, heads.scale, window)?;
                self.count_keys();
            }
            Step::AttendLatent { dst, q, latent, up, layer, mla } => {
                let (keys, pages) = (self.cache(*layer).keys.at(0), Pages { turned: 0, ..self.pages_of(view) });
                let (rank, rope, nope, v) = (mla.kv_rank as i32, mla.rope as i32, mla.nope as i32, mla.v as i32);
                let up = self.store.matrix(*up);
                let (query, mixed) = (self.work.latent_q.at(0), self.work.latent_out.at(0));
                k.plain_append(launch::parts(1, num_tok, 64), keys, self.at(*latent), self.row(*latent), pages, rank + rope)?;
                let grid = launch::parts(mla.heads, num_tok, 256);
                k.plain_latent_query(grid, query, self.at(*q), self.row(*q), up, nope, rope, v)?;
                let grid = launch::parts(mla.heads, num_tok, 128);
                k.plain_attend_latent(grid, mixed, query, keys, pages, rank, rope, mla.scale)?;
                let grid = launch::rows_of(mla.v, mla.heads, num_tok);
                k.plain_latent_value(grid, self.at(*dst), self.row(*dst), mixed, up, nope, v)?;
                self.count_keys();
            }
            Step::Route { src, w, router, .. } => {
                let (w, none) = (self.store.matrix(*w), self.store.optional(None));
                let (logits, experts, gates) = (self.work.router_logits.at(0), self.work.experts.at(0), self.work.gates.at(0));
                let (num_experts, from, tok) = (router.experts as i32, self.at(*src), num_tok as i32);
                match &self.tiled {
                    Some(tiled) => {
                        let grid = tiles::tiles(router.experts, num_tok, 1);
                        tiled.kernels.tiles_linear(grid, logits, num_experts, from, self.row(*src), 0, w, none, 1.0, tok)?;
                    }
                    None => {
                        let grid = launch::rows(router.experts, num_tok);
                        k.plain_linear(grid, logits, num_experts, from, self.row(*src), 0, w, none, 1.0, tok)?;
                    }
                }
                let rule = rule(router);
                let grid = launch::route(router.experts, rule.groups as usize, router.top_k, num_tok);
                k.plain_route(grid, experts, gates, logits, rule)?;
            }
            Step::Experts { dst, src, layer, width } => {
                let crate::model::spec::Ffn::Moe(moe) = &self.spec.layers[layer.0 as usize].ffn else { return Ok(()) };
                let (top_k, table) = (moe.router.top_k, self.store.table(layer.0));
                let (kk, f, d) = (top_k as i32, *width as i32, self.spec.width as i32);
                let most = self.store.tiers().map_or(usize::MAX, |t| t.most_pairs(layer.0)) / top_k.max(1);
                for first in (0..num_tok).step_by(most.max(1)) {
                    let (num_tok, pair) = (most.min(num_tok - first), first * top_k);
                    self.fetch(layer.0, pair, num_tok * top_k, 0, None)?;
                    let row = |slot: Slot| self.at(slot) + 4 * (first * self.row(slot) as usize) as u64;
                    let (experts, gates) = (self.work.experts.at(4 * pair), self.work.gates.at(4 * pair));
                    let inner = self.work.inner.at(4 * pair * width);
                    let grid = launch::rows_of(*width, num_tok * top_k, 1);
                    k.plain_experts_gate_up(grid, inner, row(*src), self.row(*src), table, experts, kk, f)?;
                    let grid = launch::rows_of(self.spec.width, num_tok, 1);
                    k.plain_experts_down(grid, row(*dst), self.row(*dst), inner, table, experts, gates, kk, f, d)?;
                }
            }
            Step::GatedAct { gate, up } => {
                let n = num_tok * self.row(*gate) as usize;
                k.plain_gated_act(launch::elements(n), self.at(*gate), self.at(*up), n as u64)?;
            }
            Step::AddGated { acc, add, gate } => {
                let gate = gate.map_or(0, |g| self.at(g));
                k.plain_add_gated(launch::tokens(num_tok), self.at(*acc), self.at(*add), gate, self.row(*acc))?;
            }
            Step::Add { acc, add, scale } => {
                let n = num_tok * self.row(*acc) as usize;
                k.plain_add(launch::elements(n), self.at(*acc), self.at(*add), n as u64, *scale)?;
            }
            Step::Head { dst, src, w, b, scale } => {
                let (w, bias, rows) = (self.store.matrix(*w), self.store.optional(*b), view.num_rows);
                let (pick, grid) = (view.pick, launch::rows(w.rows as usize, rows));
                let (to, from) = (self.at(*dst), self.at(*src));
                k.plain_linear(grid, to, w.rows, from, self.row(*src), pick, w, bias, *scale, rows as i32)?;
            }
        }
        Ok(())
    }

    /// Stores the keys and values of an attention step in their pages.
    pub(super) fn append(&self, step: &Step, view: &View) -> Result<(), CudaError> {
        let Step::Attend { k: key, v, layer, heads, .. } = step else { return Ok(()) };
        let ((keys, values), pages, dim) = (self.cache(*layer).addresses(), self.pages_of(view), heads.dim as i32);
        let grid = launch::parts(heads.kv, view.num_tok, 64);
        self.plain.plain_append(grid, keys, self.at(*key), self.row(*key), pages, dim)?;
        self.plain.plain_append(grid, values, self.at(*v), self.row(*v), pages, dim)
    }

    /// Brings the experts of some choices into slots; `list` is the router's or null. Nothing to do if all are on the device.
    pub(super) fn fetch(
        &self,
        layer: u32,
        first_pair: usize,
        num_pairs: usize,
        list: u64,
        beside: Option<Beside>,
    ) -> Result<(), EngineError> {
        let Some(tiers) = self.store.tiers() else { return Ok(()) };
        let num_slots = self.work.num_slots.at(0);
        let tables = (self.store.addresses(layer), self.store.table(layer));
        if tiers.reads() {
            let mut chosen = vec![0u32; num_pairs];
            self.device.download(&mut chosen, &self.work.experts, 4 * first_pair)?;
            if let Some((args, read)) = tiers.bring(layer, &chosen, (list, num_slots), tables.0, tables.1)? {
                self.fast.launch("tiers_place", launch::tokens(1), &args)?;
                read.map_err(CudaError::from)?;
            }
        }
        let ids = (self.work.experts.at(4 * first_pair), num_pairs);
        let Some(args) = tiers.fetch(layer, ids, (list, num_slots), tables, beside.is_some()) else { return Ok(()) };
        let behind = beside.and_then(|b| b.behind);
        let args = behind.map_or(args, |b| {
            let tables = (self.store.addresses(b.layer), self.store.table(b.layer));
            tiers.ahead(args, b.layer, tables, b.guess, self.ahead, self.limits())
        });
        let launch = tiers.launch(layer, behind.map(|b| b.layer), self.ahead > 0, self.limits());
        let args = FetchArgs { stages: launch.stages as i32, ..args };
        let ahead = args.next.e > 0;
        if ahead {
            tiers.fork()?;
        }
        self.fast.launch("tiers_fetch", launch.grid, &args)?;
        if ahead {
            let (args, grid) = tiers.bring_ahead(&args, self.limits());
            self.fast.launch_beside("tiers_ahead", grid, &args)?;
        }
        Ok(())
    }

    /// The buffer whose row length a step sets, and that length.
    fn written(&self, step: &Step) -> Option<(Slot, usize)> {
        match step {
            Step::Embed { dst, .. } | Step::Experts { dst, .. } => Some((*dst, self.spec.width)),
            Step::Norm { dst, src, .. } => Some((*dst, self.work.row[*src as usize])),
            Step::Linear { dst, w, .. } | Step::Head { dst, w, .. } => Some((*dst, self.store.matrix(*w).rows as usize)),
            Step::Attend { dst, heads, .. } => Some((*dst, heads.q * heads.dim)),
            Step::AttendLatent { dst, mla, .. } => Some((*dst, mla.heads * mla.v)),
            Step::Clip { .. }
            | Step::Rope { .. }
            | Step::Route { .. }
            | Step::GatedAct { .. }
            | Step::AddGated { .. }
            | Step::Add { .. } => None,
        }
    }

    fn pages_of(&self, view: &View) -> Pages {
        let stride = view.table_stride as i32;
        Pages { position: view.positions, row: view.rows, table: view.table, stride, kind: self.cache_kind, turned: 1 }
    }

    /// The first attention of a pass stores the batch's keys; from then on they count.
    pub(super) fn count_keys(&mut self) {
        for (seq, len) in self.pending.take().into_iter().flatten() {
            self.pages.set_len(seq, len);
        }
    }
}

/// A router's rule as the kernels take it.
pub(super) fn rule(router: &RouterSpec) -> Router {
    let (select, groups, keep, jitter) = match router.select {
        Select::Top => (0, 0, 0, 0.0),
        Select::GroupLimited { groups, keep } => (1, groups as i32, keep as i32, 0.0),
        Select::SparseMixer { jitter } => (2, 0, 0, jitter),
    };
    Router {
        experts: router.experts as i32,
        top_k: router.top_k as i32,
        softmax_of_chosen: (router.score == Score::SoftmaxOfChosen) as i32,
        select,
        groups,
        keep,
        renorm: router.renorm as i32,
        jitter,
        scale: router.scale,
    }
}
