//! Buffers of a pass: activations, what the router found, partial results.

use super::device::{CudaError, Device};
use super::launch::{self, DECODE_TOK};
use super::memory::{Buffer, aligned};
use super::{EXPERTS_TOK, fast};
use crate::model::plan::{Plan, Slot};
use crate::model::spec::{Attn, Ffn, ModelSpec};
use std::sync::Arc;

/// Activations.
pub(super) struct Workspace {
    /// Tokens the buffers hold.
    pub capacity_tok: usize,
    /// Rows of logits they hold.
    pub capacity_rows: usize,
    pub slots: Vec<Buffer>,
    /// Elements of a row in use, as the last step that wrote it left it.
    pub row: [usize; Slot::COUNT],
    /// Router logits `[T, E]`, experts and gates `[T, K]`.
    pub router_logits: Buffer,
    pub experts: Buffer,
    pub gates: Buffer,
    /// Expert activations `[T * K, F]`.
    pub inner: Buffer,
    /// Queries in latent space `[T, H, Rkv + Dr]` and mixed latents `[T, H, Rkv]`.
    pub latent_q: Buffer,
    pub latent_out: Buffer,
    /// Planes of the input of a product, of the experts' input, and of their activations, each with its scales.
    pub planes: Planes,
    pub expert_planes: Planes,
    pub inner_planes: Planes,
    /// Output of each pair of token and expert `[T * K, D]`, of a chunk.
    pub pair_outputs: Buffer,
    /// Experts in use and the tokens that chose them.
    pub expert_slots: Buffer,
    pub num_slots: Buffer,
    pub pairs: Buffer,
    /// Partial results of decode attention.
    pub partial: Buffer,
    /// Arrival counters, zero between launches: attention, router, greedy choice.
    pub counters: Buffer,
    pub router_counters_at: usize,
    pub argmax_counters_at: usize,
}

/// Activations as the products of the fast kernels read them.
pub(super) struct Planes {
    pub codes: Buffer,
    pub scales: Buffer,
}

impl Planes {
    /// Of so many rows of `cols` elements, whatever the weights beside them.
    pub fn new(device: &Arc<Device>, rows: usize, cols: usize) -> Result<Self, CudaError> {
        Ok(Self {
            codes: Buffer::new(device, rows * launch::plane_bytes(16, cols))?,
            scales: Buffer::new(device, rows * 4 * launch::plane_scales(cols))?,
        })
    }

    fn bytes(rows: usize, cols: usize) -> usize {
        rows * (launch::plane_bytes(16, cols) + 4 * launch::plane_scales(cols))
    }
}

/// Largest widths of a model's steps, for sizing buffers.
#[derive(Clone, Copy, Debug, Default)]
struct Widths {
    experts: usize,
    top_k: usize,
    expert: usize,
    /// Of one expert.
    inner: usize,
    latent_q: usize,
    latent_out: usize,
    partial: usize,
    kv_heads: usize,
}

impl Widths {
    fn of(spec: &ModelSpec) -> Self {
        let mut w = Self::default();
        for layer in &spec.layers {
            if let Ffn::Moe(m) = &layer.ffn {
                w.experts = w.experts.max(m.router.experts);
                w.top_k = w.top_k.max(m.router.top_k);
                w.expert = w.expert.max(m.router.top_k * m.width);
                w.inner = w.inner.max(m.width);
            }
            match &layer.attn {
                Attn::Mla(a) => {
                    w.latent_q = w.latent_q.max(a.heads * (a.kv_rank + a.rope));
                    w.latent_out = w.latent_out.max(a.heads * a.kv_rank);
                    w.partial = w.partial.max(a.heads * (a.kv_rank + 4));
                }
                Attn::Gqa(a) => {
                    w.partial = w.partial.max(16 * (a.head_dim + 4));
                    w.kv_heads = w.kv_heads.max(a.kv_heads);
                }
            }
        }
        w
    }
}

impl Workspace {
    pub fn new(device: &Arc<Device>, plan: &Plan, spec: &ModelSpec, tok: usize, rows: usize) -> Result<Self, CudaError> {
        let floats = |n: usize| Buffer::new(device, 4 * n);
        let w = Widths::of(spec);
        let pairs = tok.min(EXPERTS_TOK) * w.top_k;
        let slots = plan
            .widths
            .iter()
            .enumerate()
            .map(|(slot, width)| floats(if slot == Slot::Logits as usize { rows * spec.vocab } else { tok * width }));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        let router_counters_at = aligned(4 * DECODE_TOK * w.kv_heads);
        let argmax_counters_at = router_counters_at + aligned(4 * (tok + 1));
        let counters = Buffer::new(device, argmax_counters_at + 4 * DECODE_TOK)?;
        counters.clear()?;
        Ok(Self {
            capacity_tok: tok,
            capacity_rows: rows,
            slots,
            row: plan.widths,
            router_logits: floats(tok * w.experts)?,
            experts: floats(tok * w.top_k)?,
            gates: floats(tok * w.top_k)?,
            inner: floats(tok * w.expert)?,
            latent_q: floats(tok * w.latent_q)?,
            latent_out: floats(tok * w.latent_out)?,
            planes: Planes::new(device, tok.max(rows), Self::widest(plan))?,
            expert_planes: Planes::new(device, tok.min(EXPERTS_TOK), spec.width)?,
            inner_planes: Planes::new(device, pairs, w.inner)?,
            pair_outputs: floats(pairs * spec.width)?,
            expert_slots: Buffer::new(device, w.experts * fast::SLOT_BYTES)?,
            num_slots: floats(1)?,
            pairs: floats(tok * w.top_k)?,
            partial: floats(launch::SPLIT_BLOCKS * w.partial)?,
            counters,
            router_counters_at,
            argmax_counters_at,
        })
    }

    /// The longest row that a product reads.
    pub fn widest(plan: &Plan) -> usize {
        let slots = (0..Slot::COUNT).filter(|&s| s != Slot::Logits as usize);
        slots.map(|s| plan.widths[s]).max().unwrap_or(0)
    }

    pub fn planned_bytes(plan: &Plan, spec: &ModelSpec, tok: usize, rows: usize) -> u64 {
        let w = Widths::of(spec);
        let all: usize = plan.widths.iter().sum::<usize>() - plan.widths[Slot::Logits as usize];
        let pairs = tok.min(EXPERTS_TOK) * w.top_k;
        let floats = tok * (all + w.experts + 3 * w.top_k + w.expert + w.latent_q + w.latent_out) + pairs * spec.width;
        let planes = Planes::bytes(tok, Self::widest(plan) + spec.width) + Planes::bytes(pairs, w.inner);
        let decode = rows * spec.vocab + launch::SPLIT_BLOCKS * w.partial;
        (4 * (floats + decode) + planes) as u64
    }
}
