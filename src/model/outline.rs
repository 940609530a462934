//! What a model is in a few numbers, whether or not the engines can run it.

use super::spec::{Attn, Ffn, ModelSpec};

/// Dimensions that reports show and that decide how a model may be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// `model_type`.
    pub model_type: String,
    /// `L`.
    pub layers: usize,
    /// `D`.
    pub width: usize,
    /// `V`; 0 where the checkpoint does not say.
    pub vocab: usize,
    /// Longest sequence, tokens; 0 where the config does not say.
    pub max_positions: usize,
    /// The head is the embedding.
    pub tied: bool,
    /// The experts of the layers that have any.
    pub experts: Option<Experts>,
    /// The attention of the first layer.
    pub attention: Heads,
    /// Every distinct inner width of a feed-forward block or expert.
    pub inner: Vec<usize>,
}

/// Routed experts, alike in every layer that has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// `E`.
    pub count: usize,
    /// `K`; `None` where the config does not say.
    pub top_k: Option<usize>,
    /// `F`.
    pub width: usize,
    /// Inner width of the shared expert.
    pub shared_width: Option<usize>,
    /// Number of layers with experts.
    pub layers: usize,
}

/// Heads of the attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Grouped-query attention.
    Grouped {
        /// `H`.
        heads: usize,
        /// `Hk`.
        kv_heads: usize,
        /// `Dh`.
        head_dim: usize,
    },
    /// Latent attention.
    Latent {
        /// `H`.
        heads: usize,
        /// `Rkv`.
        kv_rank: usize,
        /// `Rq`.
        q_rank: Option<usize>,
    },
    /// What a config says of a mechanism that the engines do not have.
    Other {
        /// `H`.
        heads: usize,
        /// `Hk`.
        kv_heads: usize,
    },
}

impl Outline {
    /// The numbers of a model that the engines run.
    pub fn of(spec: &ModelSpec) -> Self {
        let moe = |l: &super::spec::LayerSpec| match &l.ffn {
            Ffn::Moe(m) => Some(m.clone()),
            Ffn::Dense { .. } => None,
        };
        let experts = spec.layers.iter().find_map(moe).map(|m| Experts {
            count: m.router.experts,
            top_k: Some(m.router.top_k),
            width: m.width,
            shared_width: m.shared.map(|s| s.width),
            layers: spec.layers.iter().filter_map(moe).count(),
        });
        let mut inner: Vec<usize> = Vec::new();
        for layer in &spec.layers {
            match &layer.ffn {
                Ffn::Dense { width } => inner.push(*width),
                Ffn::Moe(m) => inner.extend(std::iter::once(m.width).chain(m.shared.map(|s| s.width))),
            }
        }
        inner.sort_unstable();
        inner.dedup();
        let attention = match spec.layers.first().map(|l| &l.attn) {
            Some(Attn::Gqa(a)) => Heads::Grouped { heads: a.heads, kv_heads: a.kv_heads, head_dim: a.head_dim },
            Some(Attn::Mla(a)) => Heads::Latent { heads: a.heads, kv_rank: a.kv_rank, q_rank: a.q_rank },
            None => Heads::Other { heads: 1, kv_heads: 1 },
        };
        Self {
            model_type: spec.family.into(),
            layers: spec.layers.len(),
            width: spec.width,
            vocab: spec.vocab,
            max_positions: spec.max_positions,
            tied: spec.tied,
            experts,
            attention,
            inner,
        }
    }

    /// Numbers of equal parts up to 16 into which engines can divide the model: heads, key/value heads (which may be repeated),
    /// and whole groups of `group` columns of every inner width.
    pub fn tensor_parallel(&self, group: usize) -> Vec<usize> {
        let heads = |n: usize| match self.attention {
            Heads::Grouped { heads, kv_heads, .. } | Heads::Other { heads, kv_heads } => {
                heads.is_multiple_of(n) && (kv_heads.is_multiple_of(n) || n.is_multiple_of(kv_heads))
            }
            Heads::Latent { heads, .. } => heads.is_multiple_of(n),
        };
        let whole = |n: usize, w: usize| w.is_multiple_of(n) && (n == 1 || (w / n).is_multiple_of(group));
        let fits = |n: usize| heads(n) && self.inner.iter().all(|&w| whole(n, w));
        [1, 2, 4, 8, 16].into_iter().filter(|&n| fits(n)).collect()
    }
}
