//! Families as data: one row each, from a config to a [`ModelSpec`] and a table of names.
//!
//! Knows which key of which family means what. Must not know tensors, files or the order of computation. The meaning of each
//! key follows transformers 5.24, whose outputs are the reference. Adding a family whose mechanisms exist means one row in
//! [`FAMILIES`], one reading function, one [`Names`] table, a fixture and a line in the README.

use super::config::{ConfigError, ConfigReader};
use super::names::Names;
use super::spec::*;
use serde_json::Value;

/// One supported `model_type`.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    read: fn(&ConfigReader) -> Result<ModelSpec, ConfigError>,
    /// How this family spells its tensors.
    pub names: Names,
}

/// Every family the engines run.
pub const FAMILIES: &[Family] = &[
    Family { model_type: "mixtral", read: mixtral, names: Names::MIXTRAL },
    Family { model_type: "qwen2_moe", read: qwen2_moe, names: Names::QWEN2_MOE },
    Family { model_type: "qwen3_moe", read: qwen3_moe, names: Names::QWEN3_MOE },
    Family { model_type: "olmoe", read: olmoe, names: Names::QWEN3_MOE },
    Family { model_type: "deepseek_v2", read: deepseek_v2, names: Names::DEEPSEEK },
    Family { model_type: "phimoe", read: phimoe, names: Names::MIXTRAL },
    Family { model_type: "granitemoe", read: granitemoe, names: Names::GRANITE },
];

/// Finds the row of a config and reads it completely.
pub fn read(config: &Value) -> Result<(&'static Family, ModelSpec), ConfigError> {
    let reader = ConfigReader::new(config)?;
    let model_type = reader.text("model_type")?.ok_or(ConfigError::Missing { key: "model_type".into() })?;
    let family = FAMILIES.iter().find(|f| f.model_type == model_type).ok_or_else(|| ConfigError::Family {
        found: model_type.into(),
        known: FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", "),
    })?;
    let spec = (family.read)(&reader)?;
    reader.finish(model_type)?;
    check(&spec)?;
    Ok((family, spec))
}

fn mixtral(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    c.get("router_jitter_noise");
    let window = c.count("sliding_window")?;
    let moe = Moe { router: router(c, true)?, width: c.need(&["intermediate_size"])?, shared: None };
    decoder(c, "mixtral", 1e6, |_| (window, Ffn::Moe(moe.clone())), |gqa| gqa)
}

fn qwen2_moe(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    let windows = qwen2_windows(c)?;
    let renorm = c.need_flag("norm_topk_prob")?;
    let shared = Shared { width: c.need(&["shared_expert_intermediate_size"])?, gated: true };
    let moe = Moe { router: router(c, renorm)?, width: c.need(&["moe_intermediate_size"])?, shared: Some(shared) };
    let ffns = sparse_pattern(c, Ffn::Moe(moe))?;
    let qkv_bias = c.flag("qkv_bias")?.unwrap_or(true);
    decoder(c, "qwen2_moe", 1e4, |l| (windows[l], ffns[l].clone()), |gqa| Gqa { qkv_bias, ..gqa })
}

fn qwen3_moe(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    c.get("max_window_layers");
    let window = if c.flag("use_sliding_window")?.unwrap_or(false) {
        c.count("sliding_window")?
    } else {
        c.get("sliding_window").and(None)
    };
    let renorm = c.need_flag("norm_topk_prob")?;
    let moe = Moe { router: router(c, renorm)?, width: c.need(&["moe_intermediate_size"])?, shared: None };
    let ffns = sparse_pattern(c, Ffn::Moe(moe))?;
    decoder(c, "qwen3_moe", 1e4, |l| (window, ffns[l].clone()), |gqa| Gqa { qk_norm: QkNorm::PerHead, ..gqa })
}

fn olmoe(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    let renorm = c.need_flag("norm_topk_prob")?;
    let clip = c.number("clip_qkv")?.map(|x| x as f32);
    let moe = Moe { router: router(c, renorm)?, width: c.need(&["intermediate_size"])?, shared: None };
    decoder(c, "olmoe", 1e4, |_| (None, Ffn::Moe(moe.clone())), |gqa| Gqa { qk_norm: QkNorm::Whole, clip, ..gqa })
}

fn phimoe(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    let window = c.count("sliding_window")?;
    let jitter = c.number("router_jitter_noise")?.unwrap_or(0.01) as f32;
    let router = RouterSpec { select: Select::SparseMixer { jitter }, ..router(c, false)? };
    if router.top_k != 2 {
        return Err(c.unsupported("num_experts_per_tok", "2, the only count this router defines"));
    }
    let moe = Moe { router, width: c.need(&["intermediate_size"])?, shared: None };
    let head_bias = c.flag("lm_head_bias")?.unwrap_or(false);
    let spec = decoder(c, "phimoe", 1e6, |_| (window, Ffn::Moe(moe.clone())), |gqa| gqa)?;
    Ok(ModelSpec { norm: Norm { kind: NormKind::Layer, ..spec.norm }, head_bias, ..spec })
}

fn granitemoe(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    let moe = Moe {
        router: RouterSpec { score: Score::SoftmaxOfChosen, ..router(c, false)? },
        width: c.need(&["intermediate_size"])?,
        shared: None,
    };
    let scale = c.number("attention_multiplier")?.unwrap_or(1.0) as f32;
    let spec = decoder(c, "granitemoe", 1e4, |_| (None, Ffn::Moe(moe.clone())), |gqa| Gqa { scale, ..gqa })?;
    Ok(ModelSpec {
        embed_scale: c.number("embedding_multiplier")?.unwrap_or(1.0) as f32,
        residual_scale: c.number("residual_multiplier")?.unwrap_or(1.0) as f32,
        logit_scale: 1.0 / c.number("logits_scaling")?.unwrap_or(1.0) as f32,
        ..spec
    })
}

fn deepseek_v2(c: &ConfigReader) -> Result<ModelSpec, ConfigError> {
    for (key, wanted) in [("moe_layer_freq", Value::from(1)), ("scoring_func", "softmax".into()), ("mlp_bias", false.into())] {
        c.expect(key, wanted)?;
    }
    c.expect("norm_topk_prob", false)?;
    c.get("head_dim");
    let router_base = router(c, false)?;
    let experts = router_base.experts;
    let (groups, keep) = (c.count("n_group")?, c.count("topk_group")?);
    let select = match c.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => Select::Top,
        "group_limited_greedy" => {
            let groups = groups.ok_or_else(|| ConfigError::Missing { key: "n_group".into() })?;
            let keep = keep.ok_or_else(|| ConfigError::Missing { key: "topk_group".into() })?;
            if !experts.is_multiple_of(groups) || keep > groups || keep * (experts / groups) < router_base.top_k {
                return Err(
                    c.unsupported("n_group", format!("groups that divide {experts} experts and leave enough to choose from"))
                );
            }
            Select::GroupLimited { groups, keep }
        }
        _ => return Err(c.unsupported("topk_method", "`greedy` or `group_limited_greedy`")),
    };
    let scale = c.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let width = c.need(&["moe_intermediate_size"])?;
    let shared = c.index("n_shared_experts")?.filter(|&n| n > 0).map(|n| Shared { width: n * width, gated: false });
    let moe = Moe { router: RouterSpec { select, scale, ..router_base }, width, shared };
    let first = c.index("first_k_dense_replace")?.unwrap_or(0);
    let dense = c.need(&["intermediate_size"])?;
    let (nope, rope) = (c.need(&["qk_nope_head_dim"])?, c.need(&["qk_rope_head_dim"])?);
    c.expect("qk_head_dim", nope + rope)?;
    let heads = c.need(&["num_attention_heads"])?;
    c.expect("num_key_value_heads", heads)?;
    let (rope_spec, softmax_factor) = rope_spec(c, "deepseek_v2", rope, Pairing::Interleaved, 1e4)?;
    let mla = Mla {
        heads,
        q_rank: c.count("q_lora_rank")?,
        kv_rank: c.need(&["kv_lora_rank"])?,
        nope,
        rope,
        v: c.need(&["v_head_dim"])?,
        bias: c.flag("attention_bias")?.unwrap_or(false),
        latent_eps: 1e-6,
        scale: ((nope + rope) as f64).powf(-0.5) as f32 * softmax_factor as f32,
    };
    let ffn = |l: usize| if l < first { Ffn::Dense { width: dense } } else { Ffn::Moe(moe.clone()) };
    shell(c, "deepseek_v2", rope_spec, |l| LayerSpec { attn: Attn::Mla(mla.clone()), window: None, ffn: ffn(l) })
}

/// The parts that every decoder with grouped-query attention shares; `layer` gives window and feed-forward of a layer, `tune`
/// adds what is special about the attention.
fn decoder(
    c: &ConfigReader,
    family: &'static str,
    default_theta: f64,
    layer: impl Fn(usize) -> (Option<usize>, Ffn),
    tune: impl Fn(Gqa) -> Gqa,
) -> Result<ModelSpec, ConfigError> {
    let width = c.need(&["hidden_size"])?;
    let heads = c.need(&["num_attention_heads"])?;
    let head_dim = match c.count("head_dim")? {
        Some(d) => d,
        None if width.is_multiple_of(heads) => width / heads,
        None => return Err(c.unsupported("num_attention_heads", format!("a divisor of hidden_size = {width}"))),
    };
    let bias = c.flag("attention_bias")?.unwrap_or(false);
    let gqa = tune(Gqa {
        heads,
        kv_heads: c.count("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: QkNorm::None,
        clip: None,
        scale: (head_dim as f64).powf(-0.5) as f32,
    });
    if !gqa.heads.is_multiple_of(gqa.kv_heads) {
        return Err(c.unsupported("num_key_value_heads", format!("a divisor of num_attention_heads = {}", gqa.heads)));
    }
    let (rope, _) = rope_spec(c, family, head_dim, Pairing::Half, default_theta)?;
    shell(c, family, rope, |l| {
        let (window, ffn) = layer(l);
        LayerSpec { attn: Attn::Gqa(gqa.clone()), window, ffn }
    })
}

/// What every decoder has around its layers.
fn shell(
    c: &ConfigReader,
    family: &'static str,
    rope: RopeSpec,
    layer: impl Fn(usize) -> LayerSpec,
) -> Result<ModelSpec, ConfigError> {
    c.expect("hidden_act", "silu")?;
    let spec = ModelSpec {
        family,
        vocab: c.need(&["vocab_size"])?,
        width: c.need(&["hidden_size"])?,
        layers: (0..c.need(&["num_hidden_layers"])?).map(layer).collect(),
        norm: Norm { kind: NormKind::Rms, eps: c.need_number("rms_norm_eps")? as f32 },
        rope,
        embed_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        tied: c.flag("tie_word_embeddings")?.unwrap_or(false),
        head_bias: false,
        max_positions: c.need(&["max_position_embeddings"])?,
    };
    Ok(spec)
}

fn router(c: &ConfigReader, renorm: bool) -> Result<RouterSpec, ConfigError> {
    let experts = c.need(&["num_local_experts", "num_experts", "n_routed_experts"])?;
    let top_k = c.need(&["num_experts_per_tok"])?;
    if top_k > experts {
        return Err(c.unsupported("num_experts_per_tok", format!("at most {experts}, the number of experts")));
    }
    Ok(RouterSpec { experts, top_k, score: Score::Softmax, select: Select::Top, renorm, scale: 1.0 })
}

/// Layers with experts: not named by `mlp_only_layers`, and every `decoder_sparse_step`-th; `mlp_layer_types` overrides both.
fn sparse_pattern(c: &ConfigReader, moe: Ffn) -> Result<Vec<Ffn>, ConfigError> {
    let num_layers = c.need(&["num_hidden_layers"])?;
    let dense_layers = c.indices("mlp_only_layers")?;
    let step = c.count("decoder_sparse_step")?.unwrap_or(1);
    let width = c.need(&["intermediate_size"])?;
    let kinds = c.words("mlp_layer_types", num_layers)?;
    (0..num_layers)
        .map(|l| {
            let sparse = match kinds.as_ref().map(|k| k[l]) {
                None => !dense_layers.contains(&l) && (l + 1).is_multiple_of(step),
                Some("sparse") => true,
                Some("dense") => false,
                Some(_) => return Err(c.unsupported("mlp_layer_types", "entries `sparse` or `dense`")),
            };
            Ok(if sparse { moe.clone() } else { Ffn::Dense { width } })
        })
        .collect()
}

/// Windows of qwen2_moe by layer: `layer_types` if given, else every even layer below `max_window_layers`.
fn qwen2_windows(c: &ConfigReader) -> Result<Vec<Option<usize>>, ConfigError> {
    let num_layers = c.need(&["num_hidden_layers"])?;
    let enabled = c.flag("use_sliding_window")?.unwrap_or(false);
    let window = c.index("sliding_window")?.filter(|&w| enabled && w > 0);
    let below = c.index("max_window_layers")?.unwrap_or(28);
    let kinds = c.words("layer_types", num_layers)?;
    (0..num_layers)
        .map(|l| match kinds.as_ref().map(|k| k[l]) {
            None => Ok(window.filter(|_| l.is_multiple_of(2) && l < below)),
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_some() => Ok(window),
            Some(_) => Err(c.unsupported("layer_types", "`full_attention`, or `sliding_attention` with a sliding_window in use")),
        })
        .collect()
}

/// Rotary embedding in both spellings: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`. The second
/// value is YaRN's factor on attention scores, `mscale(factor, mscale_all_dim)^2`, which only latent attention applies.
fn rope_spec(
    c: &ConfigReader,
    family: &str,
    dim: usize,
    pairing: Pairing,
    default_theta: f64,
) -> Result<(RopeSpec, f64), ConfigError> {
    if !dim.is_multiple_of(2) {
        return Err(c.unsupported("head_dim", "an even number"));
    }
    let max_positions = c.need(&["max_position_embeddings"])?;
    let outer_theta = c.number("rope_theta")?;
    let outer_original = c.count("original_max_position_embeddings")?;
    c.expect("partial_rotary_factor", 1.0)?;
    let parameters = c.nested("rope_parameters")?;
    let scaling = c.nested("rope_scaling")?;
    let Some(r) = scaling.or(parameters) else {
        let theta = outer_theta.unwrap_or(default_theta);
        return Ok((RopeSpec { dim, theta, pairing, scaling: Scaling::None }, 1.0));
    };
    let theta = r.number("rope_theta")?.or(outer_theta).unwrap_or(default_theta);
    r.expect("partial_rotary_factor", 1.0)?;
    let (new, old) = (r.text("rope_type")?, r.text("type")?);
    let inner_original = r.count("original_max_position_embeddings")?;
    let original = outer_original.or(inner_original).unwrap_or(max_positions);
    let given_factor = r.number("factor")?;
    let factor = given_factor.unwrap_or(max_positions as f64 / original as f64);
    if factor <= 0.0 {
        return Err(r.unsupported("factor", "a positive number"));
    }
    let attention = r.number("attention_factor")?;
    let mut softmax_factor = 1.0;
    let scaling = match new.or(old).unwrap_or("default") {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: r.need_number("factor")? },
        "yarn" => {
            let (mscale, all_dim) =
                (r.number("mscale")?.filter(|&m| m != 0.0), r.number("mscale_all_dim")?.filter(|&m| m != 0.0));
            if let Some(m) = all_dim {
                softmax_factor = yarn_mscale(factor, m).powi(2);
            }
            let ratio = match (mscale, all_dim) {
                (Some(m), Some(a)) => yarn_mscale(factor, m) / yarn_mscale(factor, a),
                _ => yarn_mscale(factor, 1.0),
            };
            Scaling::Yarn {
                factor,
                original,
                beta_fast: r.number("beta_fast")?.filter(|&b| b != 0.0).unwrap_or(32.0),
                beta_slow: r.number("beta_slow")?.filter(|&b| b != 0.0).unwrap_or(1.0),
                truncate: r.flag("truncate")?.unwrap_or(true),
                attention: attention.unwrap_or(ratio),
            }
        }
        "longrope" | "su" => {
            let plain = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
            let attention = attention.unwrap_or(plain);
            Scaling::LongRope {
                short: r.numbers("short_factor", dim / 2)?,
                long: r.numbers("long_factor", dim / 2)?,
                original,
                short_attention: r.number("short_mscale")?.unwrap_or(attention),
                long_attention: r.number("long_mscale")?.unwrap_or(attention),
            }
        }
        "llama3" => Scaling::Llama3 {
            factor: r.need_number("factor")?,
            low: r.need_number("low_freq_factor")?,
            high: r.need_number("high_freq_factor")?,
            original,
        },
        _ => return Err(r.unsupported("rope_type", "`default`, `linear`, `yarn`, `longrope` or `llama3`")),
    };
    r.finish(family)?;
    Ok((RopeSpec { dim, theta, pairing, scaling }, softmax_factor))
}

/// `0.1 m ln(s) + 1` (YaRN, section 3.4).
fn yarn_mscale(scale: f64, m: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 }
}

/// Bounds that keep every later size computation inside 64 bits.
fn check(spec: &ModelSpec) -> Result<(), ConfigError> {
    let limit = 1 << 24;
    let mut sizes = vec![("vocab_size", spec.vocab), ("hidden_size", spec.width), ("num_hidden_layers", spec.layers.len())];
    for layer in &spec.layers {
        match &layer.attn {
            Attn::Gqa(a) => sizes.push(("num_attention_heads * head_dim", a.heads.saturating_mul(a.head_dim))),
            Attn::Mla(a) => {
                sizes.push(("num_attention_heads * head dimensions", a.heads.saturating_mul(a.nope + a.rope + a.v)));
                sizes.push(("kv_lora_rank", a.kv_rank));
            }
        }
        match &layer.ffn {
            Ffn::Dense { width } => sizes.push(("intermediate_size", *width)),
            Ffn::Moe(m) => {
                sizes.push(("moe_intermediate_size", m.width));
                sizes.push(("num_experts", m.router.experts));
                sizes.push(("shared expert width", m.shared.map_or(0, |s| s.width)));
            }
        }
    }
    match sizes.into_iter().find(|&(_, n)| n > limit) {
        None => Ok(()),
        Some((key, n)) => {
            Err(ConfigError::Invalid { key: key.into(), found: n.to_string(), expected: format!("at most {limit}") })
        }
    }
}
