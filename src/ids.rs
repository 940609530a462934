//! Identities: layers, experts, sequences and tensors, with one canonical spelling.
//!
//! Past `model::names` no checkpoint name exists: profiles, reports, overrides and logs speak canonical ids such as
//! `layers.3.attn.q` or `layers.3.experts.17.down`. This module must not know how any checkpoint spells them.

use std::fmt;

/// Index of a decoder layer, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u32);

/// Index of a routed expert inside its layer, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId(pub u32);

/// A sequence being generated or scored; chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u32);

/// What a tensor does in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Token embedding, `[V, D]`.
    Embed,
    /// Norm before the attention, `[D]`.
    AttnNorm,
    /// Query projection, `[H * Dh, D]`.
    Q,
    /// Key projection, `[Hk * Dh, D]`.
    K,
    /// Value projection, `[Hk * Dh, D]`.
    V,
    /// Attention output projection, `[D, H * Dh]`.
    O,
    /// Query norm, `[Dh]` or `[H * Dh]`.
    QNorm,
    /// Key norm, `[Dh]` or `[Hk * Dh]`.
    KNorm,
    /// MLA query down-projection, `[Rq, D]`.
    QA,
    /// MLA query latent norm, `[Rq]`.
    QANorm,
    /// MLA query up-projection, `[H * (Dn + Dr), Rq]`.
    QB,
    /// MLA key/value down-projection with the shared rotary key, `[Rkv + Dr, D]`.
    KvA,
    /// MLA key/value latent norm, `[Rkv]`.
    KvANorm,
    /// MLA key/value up-projection, `[H * (Dn + Dv), Rkv]`.
    KvB,
    /// Norm before the feed-forward block, `[D]`.
    FfnNorm,
    /// Router, `[E, D]`.
    Router,
    /// Gate projection of a routed expert, `[F, D]`.
    ExpertGate,
    /// Up projection of a routed expert, `[F, D]`.
    ExpertUp,
    /// Down projection of a routed expert, `[D, F]`.
    ExpertDown,
    /// Gate projection of the shared expert.
    SharedGate,
    /// Up projection of the shared expert.
    SharedUp,
    /// Down projection of the shared expert.
    SharedDown,
    /// Scalar gate of the shared expert, `[1, D]`.
    SharedRouter,
    /// Gate projection of a dense feed-forward block.
    MlpGate,
    /// Up projection of a dense feed-forward block.
    MlpUp,
    /// Down projection of a dense feed-forward block.
    MlpDown,
    /// Norm after the last layer, `[D]`.
    FinalNorm,
    /// Output projection, `[V, D]`.
    Head,
}

/// The classes in which sizes are reported and precision is usually chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Routers and the shared expert's scalar gate.
    Router,
    /// All projections of the attention.
    Attention,
    /// Routed experts.
    Experts,
    /// The shared expert.
    Shared,
    /// Dense feed-forward blocks.
    Mlp,
    /// Embedding and output head.
    Embeddings,
    /// Norms.
    Norms,
}

impl Component {
    /// Every component in the order of reports.
    pub const ALL: [Component; 7] = [
        Component::Router,
        Component::Attention,
        Component::Experts,
        Component::Shared,
        Component::Mlp,
        Component::Embeddings,
        Component::Norms,
    ];

    /// Lower-case name used in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Component::Router => "router",
            Component::Attention => "attention",
            Component::Experts => "experts",
            Component::Shared => "shared",
            Component::Mlp => "mlp",
            Component::Embeddings => "embeddings",
            Component::Norms => "norms",
        }
    }
}

impl Role {
    /// The component this role is counted in.
    pub fn component(self) -> Component {
        use Role::*;
        match self {
            Router | SharedRouter => Component::Router,
            Q | K | V | O | QA | QB | KvA | KvB => Component::Attention,
            ExpertGate | ExpertUp | ExpertDown => Component::Experts,
            SharedGate | SharedUp | SharedDown => Component::Shared,
            MlpGate | MlpUp | MlpDown => Component::Mlp,
            Embed | Head => Component::Embeddings,
            AttnNorm | FfnNorm | QNorm | KNorm | QANorm | KvANorm | FinalNorm => Component::Norms,
        }
    }

    /// The last part of the canonical id.
    pub fn name(self) -> &'static str {
        use Role::*;
        match self {
            Embed => "embed",
            AttnNorm => "attn_norm",
            Q => "attn.q",
            K => "attn.k",
            V => "attn.v",
            O => "attn.o",
            QNorm => "attn.q_norm",
            KNorm => "attn.k_norm",
            QA => "attn.q_a",
            QANorm => "attn.q_a_norm",
            QB => "attn.q_b",
            KvA => "attn.kv_a",
            KvANorm => "attn.kv_a_norm",
            KvB => "attn.kv_b",
            FfnNorm => "ffn_norm",
            Router => "router",
            ExpertGate => "gate",
            ExpertUp => "up",
            ExpertDown => "down",
            SharedGate => "shared.gate",
            SharedUp => "shared.up",
            SharedDown => "shared.down",
            SharedRouter => "shared.router",
            MlpGate => "mlp.gate",
            MlpUp => "mlp.up",
            MlpDown => "mlp.down",
            FinalNorm => "norm",
            Head => "head",
        }
    }
}

/// The matrix or norm gain itself, or the bias beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The weight.
    Weight,
    /// The additive bias.
    Bias,
}

/// Identity of one tensor of the model, independent of how a checkpoint stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    /// `None` for embedding, final norm and head.
    pub layer: Option<LayerId>,
    /// `Some` for routed experts only.
    pub expert: Option<ExpertId>,
    /// What the tensor does.
    pub role: Role,
    /// Weight or bias.
    pub part: Part,
}

impl TensorId {
    /// A weight outside the layers.
    pub fn global(role: Role) -> Self {
        Self { layer: None, expert: None, role, part: Part::Weight }
    }

    /// A weight of a layer.
    pub fn layer(layer: LayerId, role: Role) -> Self {
        Self { layer: Some(layer), expert: None, role, part: Part::Weight }
    }

    /// A weight of a routed expert.
    pub fn expert(layer: LayerId, expert: ExpertId, role: Role) -> Self {
        Self { layer: Some(layer), expert: Some(expert), role, part: Part::Weight }
    }

    /// The bias that belongs to this weight.
    pub fn bias(self) -> Self {
        Self { part: Part::Bias, ..self }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(LayerId(l)) = self.layer {
            write!(f, "layers.{l}.")?;
        }
        if let Some(ExpertId(e)) = self.expert {
            write!(f, "experts.{e}.")?;
        }
        f.write_str(self.role.name())?;
        if self.part == Part::Bias { f.write_str(".bias") } else { Ok(()) }
    }
}
