//! Buffers of a pass: activations, what the router found, partial results.

use super::device::{CudaError, Device};
use super::launch::{self, DECODE_TOK};
use super::memory::{Buffer, aligned};
use super::{EXPERTS_TOK, fast};
use crate::model::plan::{Plan, Slot};
use crate::model::spec::{Attn, Ffn, ModelSpec};
use std::sync::Arc;

/// Activations; of what is not there yet, for a plan, in place of buffers nothing.
pub(super) struct Workspace<B = Buffer> {
    /// Tokens the buffers hold.
    pub capacity_tok: usize,
    /// Rows of logits they hold.
    pub capacity_rows: usize,
    pub slots: Vec<B>,
    /// Elements of a row in use, as the last step that wrote it left it.
    pub row: [usize; Slot::COUNT],
    /// Router logits `[T, E]`, experts and gates `[T, K]`.
    pub router_logits: B,
    pub experts: B,
    pub gates: B,
    /// Expert activations `[T * K, F]`.
    pub inner: B,
    /// Queries in latent space `[T, H, Rkv + Dr]` and mixed latents `[T, H, Rkv]`.
    pub latent_q: B,
    pub latent_out: B,
    /// Planes of the input of a product, of the experts' input, and of their activations, each with its scales.
    pub planes: Planes<B>,
    pub expert_planes: Planes<B>,
    pub inner_planes: Planes<B>,
    /// Output of each pair of token and expert `[T * K, D]`, of a chunk.
    pub pair_outputs: B,
    /// Experts in use and the tokens that chose them.
    pub expert_slots: B,
    pub num_slots: B,
    pub pairs: B,
    /// Partial results of decode attention.
    pub partial: B,
    /// Arrival counters, zero between launches: attention, router, greedy choice.
    pub counters: B,
    pub router_counters_at: usize,
    pub argmax_counters_at: usize,
}

/// Activations as the products of the fast kernels read them.
pub(super) struct Planes<B = Buffer> {
    pub codes: B,
    pub scales: B,
}

impl<B> Planes<B> {
    /// Of so many rows of `cols` elements, whatever the weights beside them.
    fn of<E>(rows: usize, cols: usize, make: &mut impl FnMut(usize) -> Result<B, E>) -> Result<Self, E> {
        Ok(Self { codes: make(rows * launch::plane_bytes(16, cols))?, scales: make(rows * 4 * launch::plane_scales(cols))? })
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

impl<B> Workspace<B> {
    /// For passes of up to so many tokens and rows of logits; `make` has the bytes of each buffer.
    fn of<E>(
        plan: &Plan,
        spec: &ModelSpec,
        [tok, rows]: [usize; 2],
        mut make: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let w = Widths::of(spec);
        let pairs = tok.min(EXPERTS_TOK) * w.top_k;
        let slot = |(slot, width): (usize, &usize)| if slot == Slot::Logits as usize { rows * spec.vocab } else { tok * width };
        let slots = plan.widths.iter().enumerate().map(slot).map(|n| make(4 * n)).collect::<Result<Vec<_>, E>>()?;
        let router_counters_at = aligned(4 * DECODE_TOK * w.kv_heads);
        let argmax_counters_at = router_counters_at + aligned(4 * (tok + 1));
        Ok(Self {
            capacity_tok: tok,
            capacity_rows: rows,
            slots,
            row: plan.widths,
            router_logits: make(4 * tok * w.experts)?,
            experts: make(4 * tok * w.top_k)?,
            gates: make(4 * tok * w.top_k)?,
            inner: make(4 * tok * w.expert)?,
            latent_q: make(4 * tok * w.latent_q)?,
            latent_out: make(4 * tok * w.latent_out)?,
            planes: Planes::of(tok.max(rows), Workspace::widest(plan), &mut make)?,
            expert_planes: Planes::of(tok.min(EXPERTS_TOK), spec.width, &mut make)?,
            inner_planes: Planes::of(pairs, w.inner, &mut make)?,
            pair_outputs: make(4 * pairs * spec.width)?,
            expert_slots: make(w.experts * fast::SLOT_BYTES)?,
            num_slots: make(4)?,
            pairs: make(4 * tok * w.top_k)?,
            partial: make(4 * launch::SPLIT_BLOCKS * w.partial)?,
            counters: make(argmax_counters_at + 4 * DECODE_TOK)?,
            router_counters_at,
            argmax_counters_at,
        })
    }
}

impl Workspace {
    pub fn new(device: &Arc<Device>, plan: &Plan, spec: &ModelSpec, tok: usize, rows: usize) -> Result<Self, CudaError> {
        let made = Self::of(plan, spec, [tok, rows], |bytes| Buffer::new(device, bytes))?;
        made.counters.clear()?;
        Ok(made)
    }

    /// Bytes of all buffers.
    pub fn planned_bytes(plan: &Plan, spec: &ModelSpec, tok: usize, rows: usize) -> u64 {
        let mut all = 0;
        let Ok(_) = Workspace::of(plan, spec, [tok, rows], |bytes| {
            all += bytes as u64;
            Ok::<_, std::convert::Infallible>(())
        });
        all
    }

    /// The longest row that a product reads.
    pub fn widest(plan: &Plan) -> usize {
        let slots = (0..Slot::COUNT).filter(|&s| s != Slot::Logits as usize);
        slots.map(|s| plan.widths[s]).max().unwrap_or(0)
    }
}
