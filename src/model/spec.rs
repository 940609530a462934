//! What a model is, as data: dimensions, one entry a layer, and the mechanisms in use. No tensor, no file, no family name
//! is needed to compute with it.

/// A whole decoder-only model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `model_type` of the checkpoint, for reports.
    pub family: &'static str,
    /// `V`.
    pub vocab: usize,
    /// `D`.
    pub width: usize,
    /// One entry a layer.
    pub layers: Vec<LayerSpec>,
    /// Kind and epsilon of every norm of width `D`.
    pub norm: Norm,
    /// Rotary embedding, shared by all layers.
    pub rope: RopeSpec,
    /// Embedding rows are multiplied by this.
    pub embed_scale: f32,
    /// Block outputs are multiplied by this before they join the residual.
    pub residual_scale: f32,
    /// Logits are multiplied by this.
    pub logit_scale: f32,
    /// The head is the embedding.
    pub tied: bool,
    /// The head adds a bias `[V]`.
    pub head_bias: bool,
    /// Longest sequence the model was made for, tokens.
    pub max_positions: usize,
}

impl ModelSpec {
    /// Routers with the index of their layer, in order.
    pub fn routers(&self) -> impl Iterator<Item = (u32, &RouterSpec)> + Clone {
        (0u32..).zip(&self.layers).filter_map(|(l, layer)| match &layer.ffn {
            Ffn::Moe(m) => Some((l, &m.router)),
            Ffn::Dense { .. } => None,
        })
    }
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The attention block.
    pub attn: Attn,
    /// A token sees itself and `window - 1` tokens before it; `None`: all before it.
    pub window: Option<usize>,
    /// The feed-forward block.
    pub ffn: Ffn,
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Which formula.
    pub kind: NormKind,
    /// Added to the mean square or variance.
    pub eps: f32,
}

/// Formula of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * w` (RMSNorm, Zhang and Sennrich 2019).
    Rms,
    /// `(x - mean) / sqrt(var + eps) * w + b` (LayerNorm, Ba et al. 2016).
    Layer,
}

/// Attention mechanism.
#[derive(Clone, Debug, PartialEq)]
pub enum Attn {
    /// Grouped-query attention.
    Gqa(Gqa),
    /// Multi-head latent attention (DeepSeek-V2, section 2.1).
    Mla(Mla),
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// `H`.
    pub heads: usize,
    /// `Hk`.
    pub kv_heads: usize,
    /// `Dh`.
    pub head_dim: usize,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Norm on queries and keys before the rotary embedding.
    pub qk_norm: QkNorm,
    /// Clamp q, k and v to `[-clip, clip]` after the norm.
    pub clip: Option<f32>,
    /// Scores are multiplied by this.
    pub scale: f32,
}

/// Where queries and keys are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Not at all.
    None,
    /// Each head alone, gain `[Dh]`.
    PerHead,
    /// The whole projection at once, gains `[H * Dh]` and `[Hk * Dh]`.
    Whole,
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// `H`.
    pub heads: usize,
    /// `Rq`; `None`: queries are projected directly.
    pub q_rank: Option<usize>,
    /// `Rkv`.
    pub kv_rank: usize,
    /// `Dn`, width of a head's part without position.
    pub nope: usize,
    /// `Dr`, width of a head's rotary part.
    pub rope: usize,
    /// `Dv`.
    pub v: usize,
    /// Biases on the down-projections and o.
    pub bias: bool,
    /// Epsilon of the latent norms.
    pub latent_eps: f32,
    /// Scores are multiplied by this, YaRN's second factor included.
    pub scale: f32,
}

/// Feed-forward block.
#[derive(Clone, Debug, PartialEq)]
pub enum Ffn {
    /// One gated MLP.
    Dense {
        /// Inner width.
        width: usize,
    },
    /// Routed experts.
    Moe(Moe),
}

/// A Mixture-of-Experts block; every expert is `down(silu(gate x) * up x)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// How experts are chosen and weighted.
    pub router: RouterSpec,
    /// `F`.
    pub width: usize,
    /// An expert that every token visits.
    pub shared: Option<Shared>,
}

/// The shared expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Inner width.
    pub width: usize,
    /// Its output is multiplied by `sigmoid(x . w)`, w `[1, D]`.
    pub gated: bool,
}

/// How a token's experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// `E`.
    pub experts: usize,
    /// `K`.
    pub top_k: usize,
    /// From logits to scores.
    pub score: Score,
    /// From scores to chosen experts.
    pub select: Select,
    /// Divide the chosen scores by their sum.
    pub renorm: bool,
    /// Multiply the weights by this, last.
    pub scale: f32,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts only.
    SoftmaxOfChosen,
}

/// From scores to chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Select {
    /// The `K` highest.
    Top,
    /// The `K` highest inside the `keep` groups whose best expert scores highest (DeepSeek-V2, section 2.2.2).
    GroupLimited {
        /// Number of equal groups.
        groups: usize,
        /// Groups that stay eligible.
        keep: usize,
    },
    /// Two rounds of argmax, each weighted by a softmax over the experts within `2 * jitter` of the best
    /// (GRIN, arXiv 2409.12136).
    SparseMixer {
        /// Relative width of the competition.
        jitter: f32,
    },
}

/// Rotary position embedding (Su et al. 2021).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Number of rotated elements of a head, even.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Which elements form a pair.
    pub pairing: Pairing,
    /// Extension to longer contexts.
    pub scaling: Scaling,
}

/// Which elements are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + dim / 2)`.
    Half,
    /// `(2 i, 2 i + 1)`.
    Interleaved,
}

/// Context extension of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    None,
    /// All frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
    Linear {
        /// Stretch.
        factor: f64,
    },
    /// By-parts interpolation (YaRN, arXiv 2309.00071).
    Yarn {
        /// Stretch.
        factor: f64,
        /// Context before the stretch, tokens.
        original: usize,
        /// Rotations above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated.
        beta_slow: f64,
        /// Round the bounds of the ramp to whole dimensions.
        truncate: bool,
        /// Factor on cos and sin.
        attention: f64,
    },
    /// Two tables of per-dimension factors (LongRoPE, arXiv 2402.13753).
    LongRope {
        /// Factors for sequences up to `original`, `dim / 2` of them.
        short: Vec<f64>,
        /// Factors for longer sequences.
        long: Vec<f64>,
        /// Context of the short table, tokens.
        original: usize,
        /// Factor on cos and sin with the short table.
        short_attention: f64,
        /// Factor on cos and sin with the long table.
        long_attention: f64,
    },
    /// Wavelength-dependent interpolation (Llama 3.1).
    Llama3 {
        /// Stretch.
        factor: f64,
        /// Wavelengths above `original / low` are stretched.
        low: f64,
        /// Wavelengths below `original / high` are left alone.
        high: f64,
        /// Context before the stretch, tokens.
        original: usize,
    },
}
