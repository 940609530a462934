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
    /// Arrival counters, zero between launches: attention, greedy choice.
    pub counters: B,
    pub boxes: Boxes<B>,
    pub argmax_counters_at: usize,
}

/// Multiprocessors of the largest device.
const MOST_BLOCKS: usize = 1024;

/// What passes between the blocks of the kernel that runs all layers of one token.
pub(super) struct Boxes<B = Buffer> {
    /// Residual stream `[D]` at the head of a layer, and between attention and experts.
    pub x: B,
    pub middle: B,
    /// Queries, keys and values `[(H + 2 Hk) Dh]`.
    pub projected: B,
    /// Output of attention `[H Dh]`.
    pub attended: B,
    /// Router logits `[E]`, whole 16 bytes.
    pub logits: B,
    /// Expert activations `[K F]`.
    pub inner: B,
    /// Partial results of attention, words of 64 bits `[Hk][splits][16][Dh + 2]`.
    pub partial: B,
    /// Layers so far, of each block.
    pub uses: B,
}

/// Activations as the products of the fast kernels read them.
pub(super) struct Planes<B = Buffer> {
    pub codes: B,
    pub scales: B,
}

impl<B> Boxes<B> {
    fn of<E>(w: &Widths, d: usize, make: &mut impl FnMut(usize) -> Result<B, E>) -> Result<Self, E> {
        Ok(Self {
            x: make(4 * d)?,
            middle: make(4 * d)?,
            projected: make(4 * w.projected)?,
            attended: make(4 * w.attended)?,
            logits: make(4 * w.experts.next_multiple_of(4))?,
            inner: make(4 * w.expert)?,
            partial: make(8 * w.step_partial)?,
            uses: make(4 * MOST_BLOCKS)?,
        })
    }
}

impl Boxes {
    /// As before the first layer, whose floats have a last bit of one; its input has that of the layer before.
    fn reset(&self) -> Result<(), CudaError> {
        let Boxes { x, middle, projected, attended, logits, inner, partial, uses } = self;
        x.fill(1)?;
        [middle, projected, attended, logits, inner, partial, uses].into_iter().try_for_each(Buffer::clear)
    }
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
    projected: usize,
    attended: usize,
    /// Of the kernel that runs all layers.
    step_partial: usize,
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
                    w.projected = w.projected.max((a.heads + 2 * a.kv_heads) * a.head_dim);
                    w.attended = w.attended.max(a.heads * a.head_dim);
                    let splits = launch::attention_splits(a.kv_heads, 1);
                    w.step_partial = w.step_partial.max(a.kv_heads * splits * 16 * (a.head_dim + 2));
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
        let argmax_counters_at = aligned(4 * DECODE_TOK * w.kv_heads);
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
            boxes: Boxes::of(&w, spec.width, &mut make)?,
            argmax_counters_at,
        })
    }
}

impl Workspace {
    pub fn new(device: &Arc<Device>, plan: &Plan, spec: &ModelSpec, tok: usize, rows: usize) -> Result<Self, CudaError> {
        let made = Self::of(plan, spec, [tok, rows], |bytes| Buffer::new(device, bytes))?;
        made.counters.clear()?;
        made.boxes.reset()?;
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
