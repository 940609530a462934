//! The order of computation, as data: a [`ModelSpec`] becomes a list of [`Step`]s over named buffers.
//!
//! Knows that attention comes before the router; must not know precision, devices or where weights lie. Each engine runs the
//! same list with one exhaustive `match`.

use super::spec::*;
use crate::ids::{LayerId, Role, TensorId};
use std::ops::Range;

/// An activation buffer, one row a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Slot {
    /// The residual stream, `[T, D]`.
    Residual,
    /// Normalised input of a block, `[T, D]`.
    Normed,
    /// Queries.
    Q,
    /// Keys, or the latent with the shared rotary key.
    K,
    /// Values, or the normalised query latent.
    V,
    /// Attention output before its projection.
    Attn,
    /// Output of a block, `[T, D]`.
    Block,
    /// Gate projection of a dense or shared MLP.
    Gate,
    /// Up projection of a dense or shared MLP.
    Up,
    /// Output of the shared expert, `[T, D]`.
    Shared,
    /// Gate of the shared expert, `[T, 1]`.
    SharedGate,
    /// Logits, `[rows asked for, V]`.
    Logits,
}

impl Slot {
    /// Number of slots.
    pub const COUNT: usize = 12;
    /// Every slot.
    pub const ALL: [Slot; Slot::COUNT] = [
        Slot::Residual,
        Slot::Normed,
        Slot::Q,
        Slot::K,
        Slot::V,
        Slot::Attn,
        Slot::Block,
        Slot::Gate,
        Slot::Up,
        Slot::Shared,
        Slot::SharedGate,
        Slot::Logits,
    ];
}

/// One operation on whole buffers. Shapes: `[T, width of slot]`.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// `dst = table[token] * scale`.
    Embed {
        /// Where to.
        dst: Slot,
        /// `[V, D]`.
        table: TensorId,
        /// Factor.
        scale: f32,
    },
    /// Normalises the first `runs` runs of `width` elements of a row, in place when `dst == src`.
    Norm {
        /// Where to.
        dst: Slot,
        /// Where from.
        src: Slot,
        /// Gain, `[width]`.
        w: TensorId,
        /// Bias, `[width]`.
        b: Option<TensorId>,
        /// Formula and epsilon.
        norm: Norm,
        /// Length of a run.
        width: usize,
        /// Runs in a row; the rest of the row is left alone.
        runs: usize,
    },
    /// `dst = src W' + b`.
    Linear {
        /// Where to.
        dst: Slot,
        /// Where from.
        src: Slot,
        /// `[out, in]`.
        w: TensorId,
        /// `[out]`.
        b: Option<TensorId>,
    },
    /// Clamps to `[-limit, limit]`.
    Clip {
        /// In place.
        buf: Slot,
        /// Bound.
        limit: f32,
    },
    /// Rotates `rope.dim` elements at `offset` of each of `heads` runs of `stride`.
    Rope {
        /// In place.
        buf: Slot,
        /// Heads in a row.
        heads: usize,
        /// Elements from one head to the next.
        stride: usize,
        /// First rotated element of a head.
        offset: usize,
    },
    /// Appends keys and values to the cache of `layer`, then attends causally.
    Attend {
        /// `[T, H * Dh]`.
        dst: Slot,
        /// `[T, H * Dh]`.
        q: Slot,
        /// `[T, Hk * Dh]`.
        k: Slot,
        /// `[T, Hk * Dh]`.
        v: Slot,
        /// Whose cache.
        layer: LayerId,
        /// Heads and scale.
        heads: Heads,
        /// Sliding window.
        window: Option<usize>,
    },
    /// Appends the latent `[Rkv + Dr]` to the cache of `layer`, then attends in latent space with `up` absorbed into the
    /// queries and the output (DeepSeek-V2, section 2.1.2).
    AttendLatent {
        /// `[T, H * Dv]`.
        dst: Slot,
        /// `[T, H * (Dn + Dr)]`.
        q: Slot,
        /// `[T, Rkv + Dr]`, latent normalised, key rotated.
        latent: Slot,
        /// `[H * (Dn + Dv), Rkv]`.
        up: TensorId,
        /// Whose cache.
        layer: LayerId,
        /// Dimensions and scale.
        mla: Mla,
    },
    /// Router logits, chosen experts and their weights.
    Route {
        /// `[T, D]`.
        src: Slot,
        /// `[E, D]`.
        w: TensorId,
        /// Rule.
        router: RouterSpec,
        /// Whose router.
        layer: LayerId,
    },
    /// `dst = sum over chosen e of weight_e * down_e(silu(gate_e src) * up_e src)`.
    Experts {
        /// `[T, D]`.
        dst: Slot,
        /// `[T, D]`.
        src: Slot,
        /// Whose experts.
        layer: LayerId,
        /// `F`.
        width: usize,
    },
    /// `gate = silu(gate) * up`.
    GatedAct {
        /// In place.
        gate: Slot,
        /// The other factor.
        up: Slot,
    },
    /// `acc += sigmoid(gate) * add`, or `acc += add` without a gate.
    AddGated {
        /// Accumulator.
        acc: Slot,
        /// What is added.
        add: Slot,
        /// `[T, 1]`.
        gate: Option<Slot>,
    },
    /// `acc += add * scale`.
    Add {
        /// Accumulator.
        acc: Slot,
        /// What is added.
        add: Slot,
        /// Factor.
        scale: f32,
    },
    /// Logits of the rows that were asked for: `dst = (src W' + b) * scale`.
    Head {
        /// `[rows, V]`.
        dst: Slot,
        /// `[T, D]`.
        src: Slot,
        /// `[V, D]`.
        w: TensorId,
        /// `[V]`.
        b: Option<TensorId>,
        /// Factor.
        scale: f32,
    },
}

/// Shape of grouped-query attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// `H`.
    pub q: usize,
    /// `Hk`.
    pub kv: usize,
    /// `Dh`.
    pub dim: usize,
    /// Factor on the scores.
    pub scale: f32,
}

impl Step {
    /// Kind and tensor or layer, for profiles and errors.
    pub fn label(&self) -> String {
        let (name, id) = match self {
            Step::Embed { table, .. } => ("embed", Some(*table)),
            Step::Norm { w, .. } => ("norm", Some(*w)),
            Step::Linear { w, .. } => ("linear", Some(*w)),
            Step::Clip { buf, .. } => return format!("clip {buf:?}"),
            Step::Rope { buf, .. } => return format!("rope {buf:?}"),
            Step::Attend { layer, .. } => return format!("attend layers.{}", layer.0),
            Step::AttendLatent { layer, .. } => return format!("attend_latent layers.{}", layer.0),
            Step::Route { w, .. } => ("route", Some(*w)),
            Step::Experts { layer, .. } => return format!("experts layers.{}", layer.0),
            Step::GatedAct { .. } => ("gated_act", None),
            Step::AddGated { .. } => ("add_gated", None),
            Step::Add { .. } => ("add", None),
            Step::Head { w, .. } => ("head", Some(*w)),
        };
        id.map_or_else(|| name.to_string(), |id| format!("{name} {id}"))
    }

    /// Buffers whose content the result depends on.
    pub fn reads(&self) -> Vec<Slot> {
        match *self {
            Step::Embed { .. } => vec![],
            Step::Norm { dst, src, .. } if dst == src => vec![dst],
            Step::Norm { src, .. } | Step::Linear { src, .. } | Step::Route { src, .. } => vec![src],
            Step::Experts { src, .. } | Step::Head { src, .. } => vec![src],
            Step::Clip { buf, .. } | Step::Rope { buf, .. } => vec![buf],
            Step::Attend { q, k, v, .. } => vec![q, k, v],
            Step::AttendLatent { q, latent, .. } => vec![q, latent],
            Step::GatedAct { gate, up } => vec![gate, up],
            Step::AddGated { acc, add, gate } => [acc, add].into_iter().chain(gate).collect(),
            Step::Add { acc, add, .. } => vec![acc, add],
        }
    }

    /// The buffer that is written; a router writes none.
    pub fn writes(&self) -> Option<Slot> {
        match *self {
            Step::Embed { dst, .. } | Step::Norm { dst, .. } | Step::Linear { dst, .. } => Some(dst),
            Step::Attend { dst, .. } | Step::AttendLatent { dst, .. } => Some(dst),
            Step::Experts { dst, .. } | Step::Head { dst, .. } => Some(dst),
            Step::Clip { buf, .. } | Step::Rope { buf, .. } => Some(buf),
            Step::GatedAct { gate, .. } => Some(gate),
            Step::AddGated { acc, .. } | Step::Add { acc, .. } => Some(acc),
            Step::Route { .. } => None,
        }
    }

    /// The matrix that is multiplied with a buffer, and that buffer; the experts' are not among these.
    pub fn product(&self) -> Option<(TensorId, Slot)> {
        match *self {
            Step::Linear { src, w, .. } | Step::Route { src, w, .. } | Step::Head { src, w, .. } => Some((w, src)),
            _ => None,
        }
    }

    /// Kind of the step, for profiles.
    pub fn kind(&self) -> &'static str {
        match self {
            Step::Embed { .. } => "embed",
            Step::Norm { .. } => "norm",
            Step::Linear { .. } => "linear",
            Step::Clip { .. } => "clip",
            Step::Rope { .. } => "rope",
            Step::Attend { .. } => "attend",
            Step::AttendLatent { .. } => "attend_latent",
            Step::Route { .. } => "route",
            Step::Experts { .. } => "experts",
            Step::GatedAct { .. } => "gated_act",
            Step::AddGated { .. } => "add_gated",
            Step::Add { .. } => "add",
            Step::Head { .. } => "head",
        }
    }
}

/// A whole forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// All steps in order.
    pub steps: Vec<Step>,
    /// Steps of the embedding.
    pub prologue: Range<usize>,
    /// Steps of each layer; they read and write [`Slot::Residual`].
    pub layers: Vec<Range<usize>>,
    /// Final norm and head.
    pub epilogue: Range<usize>,
    /// Elements a token needs in each slot, indexed by `Slot as usize`; 0 for unused ones and for logits.
    pub widths: [usize; Slot::COUNT],
}

/// Emits the steps of a model.
pub fn plan(spec: &ModelSpec) -> Plan {
    let mut b = Builder { steps: Vec::new(), widths: [0; Slot::COUNT], spec };
    let d = spec.width;
    for slot in [Slot::Residual, Slot::Normed, Slot::Block] {
        b.need(slot, d);
    }
    b.steps.push(Step::Embed { dst: Slot::Residual, table: TensorId::global(Role::Embed), scale: spec.embed_scale });
    let prologue = 0..b.steps.len();
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (l, layer) in spec.layers.iter().enumerate() {
        let start = b.steps.len();
        let l = LayerId(l as u32);
        b.norm(Slot::Normed, Slot::Residual, TensorId::layer(l, Role::AttnNorm));
        match &layer.attn {
            Attn::Gqa(a) => b.gqa(l, a, layer.window),
            Attn::Mla(a) => b.mla(l, a),
        }
        b.join();
        b.norm(Slot::Normed, Slot::Residual, TensorId::layer(l, Role::FfnNorm));
        match &layer.ffn {
            Ffn::Dense { width } => b.mlp(Slot::Block, l, [Role::MlpGate, Role::MlpUp, Role::MlpDown], *width),
            Ffn::Moe(m) => b.moe(l, m),
        }
        b.join();
        layers.push(start..b.steps.len());
    }
    let start = b.steps.len();
    b.norm(Slot::Normed, Slot::Residual, TensorId::global(Role::FinalNorm));
    let head = TensorId::global(Role::Head);
    b.steps.push(Step::Head {
        dst: Slot::Logits,
        src: Slot::Normed,
        w: if spec.tied { TensorId::global(Role::Embed) } else { head },
        b: spec.head_bias.then(|| head.bias()),
        scale: spec.logit_scale,
    });
    let epilogue = start..b.steps.len();
    Plan { steps: b.steps, prologue, layers, epilogue, widths: b.widths }
}

struct Builder<'a> {
    steps: Vec<Step>,
    widths: [usize; Slot::COUNT],
    spec: &'a ModelSpec,
}

impl Builder<'_> {
    fn need(&mut self, slot: Slot, width: usize) {
        let w = &mut self.widths[slot as usize];
        *w = (*w).max(width);
    }

    fn norm(&mut self, dst: Slot, src: Slot, w: TensorId) {
        let norm = self.spec.norm;
        let b = (norm.kind == NormKind::Layer).then(|| w.bias());
        self.steps.push(Step::Norm { dst, src, w, b, norm, width: self.spec.width, runs: 1 });
    }

    fn rms(&mut self, buf: Slot, w: TensorId, eps: f32, width: usize, runs: usize) {
        self.steps.push(Step::Norm { dst: buf, src: buf, w, b: None, norm: Norm { kind: NormKind::Rms, eps }, width, runs });
    }

    fn linear(&mut self, dst: Slot, src: Slot, w: TensorId, out: usize, bias: bool) {
        self.need(dst, out);
        self.steps.push(Step::Linear { dst, src, w, b: bias.then(|| w.bias()) });
    }

    fn join(&mut self) {
        self.steps.push(Step::Add { acc: Slot::Residual, add: Slot::Block, scale: self.spec.residual_scale });
    }

    fn gqa(&mut self, l: LayerId, a: &Gqa, window: Option<usize>) {
        let id = |role| TensorId::layer(l, role);
        let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.linear(Slot::Q, Slot::Normed, id(Role::Q), q, a.qkv_bias);
        self.linear(Slot::K, Slot::Normed, id(Role::K), kv, a.qkv_bias);
        self.linear(Slot::V, Slot::Normed, id(Role::V), kv, a.qkv_bias);
        let eps = self.spec.norm.eps;
        match a.qk_norm {
            QkNorm::None => {}
            QkNorm::PerHead => {
                self.rms(Slot::Q, id(Role::QNorm), eps, a.head_dim, a.heads);
                self.rms(Slot::K, id(Role::KNorm), eps, a.head_dim, a.kv_heads);
            }
            QkNorm::Whole => {
                self.rms(Slot::Q, id(Role::QNorm), eps, q, 1);
                self.rms(Slot::K, id(Role::KNorm), eps, kv, 1);
            }
        }
        if let Some(limit) = a.clip {
            for buf in [Slot::Q, Slot::K, Slot::V] {
                self.steps.push(Step::Clip { buf, limit });
            }
        }
        for (buf, heads) in [(Slot::Q, a.heads), (Slot::K, a.kv_heads)] {
            self.steps.push(Step::Rope { buf, heads, stride: a.head_dim, offset: 0 });
        }
        self.need(Slot::Attn, q);
        let heads = Heads { q: a.heads, kv: a.kv_heads, dim: a.head_dim, scale: a.scale };
        self.steps.push(Step::Attend { dst: Slot::Attn, q: Slot::Q, k: Slot::K, v: Slot::V, layer: l, heads, window });
        self.linear(Slot::Block, Slot::Attn, id(Role::O), self.spec.width, a.o_bias);
    }

    fn mla(&mut self, l: LayerId, a: &Mla) {
        let id = |role| TensorId::layer(l, role);
        let q = a.heads * (a.nope + a.rope);
        match a.q_rank {
            None => self.linear(Slot::Q, Slot::Normed, id(Role::Q), q, false),
            Some(rank) => {
                self.linear(Slot::V, Slot::Normed, id(Role::QA), rank, a.bias);
                self.rms(Slot::V, id(Role::QANorm), a.latent_eps, rank, 1);
                self.linear(Slot::Q, Slot::V, id(Role::QB), q, false);
            }
        }
        self.linear(Slot::K, Slot::Normed, id(Role::KvA), a.kv_rank + a.rope, a.bias);
        self.rms(Slot::K, id(Role::KvANorm), a.latent_eps, a.kv_rank, 1);
        self.steps.push(Step::Rope { buf: Slot::Q, heads: a.heads, stride: a.nope + a.rope, offset: a.nope });
        self.steps.push(Step::Rope { buf: Slot::K, heads: 1, stride: a.kv_rank + a.rope, offset: a.kv_rank });
        self.need(Slot::Attn, a.heads * a.v);
        self.steps.push(Step::AttendLatent {
            dst: Slot::Attn,
            q: Slot::Q,
            latent: Slot::K,
            up: id(Role::KvB),
            layer: l,
            mla: a.clone(),
        });
        self.linear(Slot::Block, Slot::Attn, id(Role::O), self.spec.width, a.bias);
    }

    fn mlp(&mut self, dst: Slot, l: LayerId, roles: [Role; 3], width: usize) {
        let [gate, up, down] = roles.map(|role| TensorId::layer(l, role));
        self.linear(Slot::Gate, Slot::Normed, gate, width, false);
        self.linear(Slot::Up, Slot::Normed, up, width, false);
        self.steps.push(Step::GatedAct { gate: Slot::Gate, up: Slot::Up });
        self.linear(dst, Slot::Gate, down, self.spec.width, false);
    }

    fn moe(&mut self, l: LayerId, m: &Moe) {
        self.steps.push(Step::Route { src: Slot::Normed, w: TensorId::layer(l, Role::Router), router: m.router, layer: l });
        self.steps.push(Step::Experts { dst: Slot::Block, src: Slot::Normed, layer: l, width: m.width });
        if let Some(s) = m.shared {
            self.mlp(Slot::Shared, l, [Role::SharedGate, Role::SharedUp, Role::SharedDown], s.width);
            let gate = s.gated.then_some(Slot::SharedGate);
            if s.gated {
                self.linear(Slot::SharedGate, Slot::Normed, TensorId::layer(l, Role::SharedRouter), 1, false);
            }
            self.steps.push(Step::AddGated { acc: Slot::Block, add: Slot::Shared, gate });
        }
    }
}
