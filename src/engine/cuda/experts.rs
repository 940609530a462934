//! Router and experts as launches of `router.cu`, `moe.cu`, `linear.cu` and `tiers.cu`.

use super::batch::View;
use super::blocks::{Output, Source, norm_code, width};
use super::exec::rule;
use super::fast::*;
use super::fuse::{Block, Lead, SharedPart};
use super::launch;
use super::plain::{Kind, Matrix};
use super::slots::{Guess, GuessOf, Half, MOST_GUESSES, Tiers};
use super::{EXPERTS_TOK, Engine};
use crate::engine::EngineError;
use crate::model::plan::Slot;
use crate::model::spec::{RouterSpec, Select};

/// Products that run while their experts arrive.
#[derive(Clone, Copy)]
pub(super) struct Beside {
    /// Brought ahead meanwhile.
    pub behind: Option<Behind>,
}

/// The layer that experts are brought ahead for.
#[derive(Clone, Copy)]
pub(super) struct Behind {
    pub layer: u32,
    pub guess: Guess,
}

impl Engine {
    /// Most tokens that the expert kernels of a layer take at once; `None` if they do not take its formats.
    pub(super) fn expert_chunk(&self, layer: u32, router: &RouterSpec, f: usize) -> Option<usize> {
        let [gate, up, down] = self.store.expert(layer);
        let (g, u, d) = (width(&gate)?, width(&up)?, width(&down)?);
        let names = g.name(gate.cols as usize).is_some() && d.name(down.cols as usize).is_some();
        if !names || g != u {
            return None;
        }
        let (limits, width) = (self.limits(), self.spec.width);
        let (experts, top_k) = (router.experts, router.top_k);
        let shape = launch::ExpertShape { d: width, f, experts, top_k, first: g, second: d };
        let fits = |t: &usize| {
            launch::down_pairs(&shape, *t, false, limits).is_some()
                && launch::gate_up(&shape, *t, false, limits).is_some()
                && launch::router_rows(experts, top_k, false, *t, limits).is_some()
                && launch::router_logits(experts, width, *t, false, limits).is_some()
        };
        std::iter::successors(Some(EXPERTS_TOK), |t| (*t > 1).then_some(t / 2)).find(fits)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn moe(
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
            let num_tok = chunk.min(view.num_tok - start);
            let behind = if view.decode && num_tok == view.num_tok { self.behind(layer, num_tok) } else { None };
            self.experts(lead, router_w, router, layer, f, scale, start, num_tok, view.decode, behind)?;
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
        behind: Option<Behind>,
    ) -> Result<(), EngineError> {
        let [gate, _, down] = self.store.expert(layer);
        let (Some(g), Some(d)) = (width(&gate), width(&down)) else { return Ok(()) };
        let (limits, width, top_k) = (self.limits(), self.spec.width, router.top_k);
        let x = self.at(Slot::Residual) + (start * width * 4) as u64;
        let tiers = self.store.tiers().filter(|t| t.lacks(layer));
        // One token's sums have an order of their own, in a prompt as in a step.
        let waves = tiers.map(|t| t.waves(layer, num_tok * top_k, decode || num_tok == 1));
        let waves = waves.transpose()?.flatten();
        let fetches = tiers.filter(|_| waves.is_none());
        let behind = behind.filter(|_| fetches.is_some() && self.fast.overlaps());
        let shape = launch::ExpertShape { d: width, f, experts: router.experts, top_k, first: g, second: d };
        let direct = self.route(lead, router_w, router, layer, &shape, x, start, num_tok, decode, fetches.is_some())?;
        if let Some(behind) = &behind {
            self.guess(behind, lead, x, num_tok)?;
        }
        let chooses = direct.logits != 0;
        let first = launch::gate_up(&shape, num_tok, chooses, limits);
        let second = launch::down_pairs(&shape, num_tok, chooses, limits);
        // Takes the whole list at once, of which waves are parts.
        let whole = launch::down(&shape, num_tok, chooses, limits).filter(|_| waves.is_none());
        let (Some(first), Some(second)) = (first, second) else { return Ok(()) };
        let beside =
            fetches.is_some() && self.fast.overlaps() && first.variant == "s4" && (whole.is_some() || second.variant == "s4");
        let blocks = whole.map(|_| first.grid.blocks[0]);
        let arrivals = |half| fetches.filter(|_| beside).map_or(Arrivals::ZERO, |t| t.arrivals(layer, half, blocks));

        let gates = self.work.gates.at(start * top_k * 4);
        let (h, planes) = (self.work.inner.at(0), &self.work.expert_planes);
        let (routed, num_slots, pairs) = (self.work.expert_slots.at(0), self.work.num_slots.at(0), self.work.pairs.at(0));
        let list = fetches.map_or(routed, |t| t.list());
        let (t, wide, inner, k) = (num_tok as i32, width as i32, f as i32, top_k as i32);
        let args = ExpertsArgs {
            out: h,
            x_q: planes.codes.at(0),
            x_scale: planes.scales.at(0),
            slots: list,
            num_slots,
            pairs,
            direct,
            arrivals: arrivals(Half::First),
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

        if waves.is_none() {
            self.fetch(layer, start * top_k, num_tok * top_k, routed, beside.then_some(Beside { behind }))?;
        }
        if let Some(whole) = whole {
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
                arrivals: arrivals(Half::Second),
                t,
                d: wide,
                f: inner,
                k,
                chunk: whole.chunk as i32,
                stages: whole.stages as i32,
                split: whole.split as i32,
                warps: whole.warps as i32,
                scale,
            };
            return Ok(self.fast.launch(&format!("moe_down_{}", name(d, &down)), whole.grid, &args)?);
        }
        let planes = &self.work.inner_planes;
        let outputs = self.work.pair_outputs.at(0);
        let both = |slots: u64, num_slots: u64| -> Result<(), EngineError> {
            gate_up(slots, num_slots)?;
            let made_by = launch::planes_name(d.bits, second.variant == launch::WIDE);
            self.planes(&made_by, planes, None, Source::Floats(h, inner), f, num_tok * top_k)?;
            let args = ExpertsArgs {
                out: outputs,
                x_q: planes.codes.at(0),
                x_scale: planes.scales.at(0),
                slots,
                num_slots,
                arrivals: arrivals(Half::Second),
                inner,
                rows: wide,
                columns: second.columns as i32,
                stages: second.stages as i32,
                teams: second.teams as i32,
                ..args
            };
            Ok(self.fast.launch(&format!("moe_down_pairs_{}_{}", name(d, &down), second.variant), second.grid, &args)?)
        };
        match (tiers, waves) {
            (Some(tiers), Some(waves)) => {
                for wave in waves {
                    if let Some((args, slots, num_slots)) = tiers.send(layer, wave, routed, num_slots)? {
                        self.fast.launch("tiers_wave", launch::tokens(1), &args)?;
                        both(slots, num_slots)?;
                        tiers.sent()?;
                    }
                }
            }
            _ => both(list, num_slots)?,
        }
        let args = CombineArgs { y: x, add: x, pairs: outputs, gates, d: wide, k, scale };
        Ok(self.fast.launch("moe_combine", launch::combine(width, num_tok), &args)?)
    }

    /// Planes of the experts' input, and experts, gates and list of a run of tokens; or what the experts' kernels need to choose
    /// themselves. `decode`: choices made beforehand take the place of its own; `pending`: another kernel makes the list that the products take.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &self,
        lead: &Lead,
        w: Matrix,
        router: &RouterSpec,
        layer: u32,
        shape: &launch::ExpertShape,
        x: u64,
        start: usize,
        num_tok: usize,
        decode: bool,
        pending: bool,
    ) -> Result<DirectRoute, EngineError> {
        let &launch::ExpertShape { d: width, experts, top_k, first: launch::Width { bits, .. }, .. } = shape;
        let limits = self.limits();
        let planes = &self.work.expert_planes;
        let script = self.scripts.get(&layer).filter(|s| decode && start == 0 && num_tok <= s.rows);
        let args = RouterArgs {
            logits: self.work.router_logits.at(start * experts * 4),
            ids: self.work.experts.at(start * top_k * 4),
            gates: self.work.gates.at(start * top_k * 4),
            slots: self.work.expert_slots.at(0),
            num_slots: self.work.num_slots.at(0),
            pairs: self.work.pairs.at(0),
            x_q: planes.codes.at(0),
            x_scale: planes.scales.at(0),
            table: self.store.addresses(layer),
            script: script.map_or(0, |s| s.choices.at(0)),
            step: script.map_or(0, |s| s.step.at(0)),
            steps: script.map_or(0, |s| s.steps as i32),
            rows: script.map_or(0, |s| s.rows as i32),
            bits: bits as i32,
            pending: pending as i32,
            ..self.router_args(lead, w, router, x, num_tok)
        };
        let (many, wide) = (launch::routes_rows(num_tok) && w.kind == Kind::Bf16, launch::wide_experts(num_tok, limits));
        let source = Source::Normed(lead, x);
        let make_planes = |bf16| self.planes(&launch::planes_name(bits, wide), planes, bf16, source, width, num_tok);
        if many {
            let both = wide && bits != 16;
            make_planes(both.then_some(&self.work.planes))?;
            let logits = Output { w, bias: Matrix::NONE, at: args.logits, stride: experts as i32, add: 0, scale: 1.0 };
            self.products_where(both.then(|| launch::planes_name(16, true)), source, &[logits], num_tok)?;
        } else {
            let half = w.kind == Kind::Bf16;
            let Some(launch) = launch::router_logits(experts, width, num_tok, half, limits) else { return Ok(DirectRoute::ZERO) };
            let args = RouterArgs { ahead: launch.ahead as i32, ..args };
            self.fast.launch(launch.name, launch.grid, &args)?;
            if wide {
                make_planes(None)?;
            }
        }
        let plain_top = matches!(router.select, Select::Top);
        let listed = self.store.tiers().is_some() || script.is_some();
        if plain_top && !listed && launch::routes_directly(shape, num_tok, limits) {
            let RouterArgs { logits, table, ids, gates, rule, .. } = args;
            return Ok(DirectRoute { logits, table, ids, gates, rule, pad: 0 });
        }
        let Some(rows) = launch::router_rows(experts, top_k, plain_top, num_tok, limits) else { return Ok(DirectRoute::ZERO) };
        let args = RouterArgs { tokens: rows.tokens as i32, ..args };
        self.fast.launch(rows.name, rows.grid, &args)?;
        if let Some(grid) = rows.list {
            self.fast.launch("router_list", grid, &args)?;
        }
        Ok(DirectRoute::ZERO)
    }

    /// The next layer with a router, and where to learn what it will probably choose; `None` if nothing is to be brought ahead for it.
    fn behind(&self, layer: u32, num_tok: usize) -> Option<Behind> {
        if self.ahead == 0 || self.tiers().is_some_and(Tiers::reads) {
            return None;
        }
        let moe = |b: &Block| match b {
            Block::Moe { layer: l, router, .. } if *l > layer => Some((*l, router.top_k)),
            _ => None,
        };
        let (next, top_k) = self.groups.iter().filter_map(|g| g.block.as_ref()).find_map(moe)?;
        let fits = self.tiers().is_some_and(|t| t.lacks(next)) && num_tok * top_k <= MOST_GUESSES;
        let of = match self.scripts.get(&next) {
            None => GuessOf::Logits,
            Some(s) => {
                let script = s.guesses.as_ref().filter(|_| num_tok <= s.rows)?.at(0);
                GuessOf::Script { script, step: s.step.at(0), steps: s.steps, rows: s.rows }
            }
        };
        fits.then_some(Behind { layer: next, guess: Guess { num_tok, top_k, of } })
    }

    /// Logits of the router of the layer behind on this layer's input, which `lead` norms: as a map was taught, or as that router has them.
    fn guess(&self, behind: &Behind, lead: &Lead, x: u64, num_tok: usize) -> Result<(), EngineError> {
        let of = |b: &Block| match b {
            Block::Moe { layer, lead, router_w, router, .. } if *layer == behind.layer => Some((*lead, *router_w, *router)),
            _ => None,
        };
        let found = self.groups.iter().filter_map(|g| g.block.as_ref()).find_map(of);
        let (GuessOf::Logits, Some(tiers), Some((next, w, router))) = (behind.guess.of, self.store.tiers(), found) else {
            return Ok(());
        };
        let w = self.store.matrix(w);
        let (lead, w) = match tiers.map(behind.layer) {
            Some(data) => (*lead, Matrix { data, kind: Kind::Bf16, ..w }),
            None => (next, w),
        };
        let half = w.kind == Kind::Bf16;
        let Some(launch) = launch::router_logits(router.experts, self.spec.width, num_tok, half, self.limits()) else {
            return Ok(());
        };
        let args =
            RouterArgs { logits: tiers.guesses(), ahead: launch.ahead as i32, ..self.router_args(&lead, w, &router, x, num_tok) };
        Ok(self.fast.launch(launch.name, launch.grid, &args)?)
    }

    /// What the router's kernels take for its logits alone.
    fn router_args(&self, lead: &Lead, w: Matrix, router: &RouterSpec, x: u64, num_tok: usize) -> RouterArgs {
        RouterArgs {
            x,
            gain: self.store.matrix(lead.w).data,
            shift: self.store.optional(lead.b).data,
            w: w.data,
            t: num_tok as i32,
            d: self.spec.width as i32,
            w_is_f32: (w.kind == Kind::F32) as i32,
            norm: norm_code(lead),
            eps: lead.norm.eps,
            rule: rule(router).into(),
            ..RouterArgs::ZERO
        }
    }
}
