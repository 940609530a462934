//! What a model needs of the memory of a GPU, from headers or a spec alone: no device is asked.

use super::layout::Layout;
use super::pages::PAGE_TOKENS;
use super::plain::Kind;
use super::slots::{ring_bytes, staging_bytes};
use super::{Options, PLANNED_TOK, Workspace};
use crate::artifact::weights::Weights;
use crate::ids::{Component, TensorId};
use crate::model::plan::{self, Plan};
use crate::model::spec::{Attn, ModelSpec};
use crate::quant::format::Format;
use crate::tiers::Needs;

/// What the driver is taken to use: context, code and local memory of the kernels.
const DRIVER_BYTES: u64 = 512 << 20;

/// What a model directory needs.
pub fn needs_of_weights(weights: &Weights, options: &Options) -> Needs {
    needs(weights.spec(), &plan::plan(weights.spec()), &Layout::of_weights(weights), options)
}

/// What a model that exists as a spec only would need; `format` says how each matrix of so many columns is stored.
pub fn needs_of_spec(spec: &ModelSpec, format: &dyn Fn(TensorId, usize) -> Format, options: &Options) -> Needs {
    needs(spec, &plan::plan(spec), &Layout::of_spec(spec, format), options)
}

pub(super) fn needs(spec: &ModelSpec, plan: &Plan, layout: &Layout, options: &Options) -> Needs {
    let element = if options.cache == Kind::F32 { 4 } else { 2 };
    let row: usize = spec
        .layers
        .iter()
        .map(|layer| match &layer.attn {
            Attn::Gqa(a) => 2 * a.kv_heads * a.head_dim,
            Attn::Mla(a) => a.kv_rank + a.rope,
        })
        .sum();
    let context = spec.max_positions.div_ceil(PAGE_TOKENS) as u64;
    let min_pages = context.min((PLANNED_TOK / PAGE_TOKENS) as u64);
    let max_pages = (64 * context).clamp(1 << 10, 1 << 14);
    let layers = layout.expert_layers(spec, &options.visits);
    let mut weights = layout.by_component.clone();
    let maps = options.lookahead.bytes() as u64;
    weights.iter_mut().filter(|(c, _)| *c == Component::Router).for_each(|(_, bytes)| *bytes += maps);
    Needs {
        weights,
        ring_bytes: ring_bytes(&layers),
        staging_bytes: staging_bytes(&layers),
        layers,
        page_bytes: (PAGE_TOKENS * row * element) as u64,
        page_tok: PAGE_TOKENS as u64,
        min_pages,
        wanted_pages: (options.cache_tok.div_ceil(PAGE_TOKENS) as u64).clamp(min_pages, max_pages),
        max_pages,
        workspace_bytes: Workspace::planned_bytes(plan, spec, PLANNED_TOK, super::launch::DECODE_TOK),
        driver_bytes: DRIVER_BYTES,
    }
}
