//! What llama.cpp calls a family, and the keys from which it builds the graph.
//!
//! llama.cpp fixes parts of the computation in the code of an architecture (whether chosen weights are renormalised, whether
//! every layer has experts), so that a model which needs another is refused. Keys follow the converter of llama.cpp.

use super::ExportError;
use super::gguf::Value;
use crate::artifact::weights::Weights;
use crate::model::spec::{Attn, Ffn, ModelSpec, Moe, Scaling, Score, Select};
use serde_json::Value as Json;

/// Name of the architecture.
pub fn name(family: &str) -> Option<&'static str> {
    Some(match family {
        "mixtral" => "llama",
        "qwen2_moe" => "qwen2moe",
        "qwen3_moe" => "qwen3moe",
        "olmoe" => "olmoe",
        "deepseek_v2" => "deepseek2",
        "phimoe" => "phimoe",
        "granitemoe" => "granitemoe",
        _ => return None,
    })
}

/// Whether rows of q and k are reordered, from pairs half a head apart to neighbours.
pub fn pairs_are_neighbours(family: &str) -> bool {
    matches!(family, "mixtral" | "granitemoe")
}

type Keys = Vec<(String, Value)>;

/// All keys but those of the vocabulary, and what the user should know.
pub fn keys(weights: &Weights) -> Result<(Keys, Vec<String>), ExportError> {
    let spec = weights.spec();
    let family = weights.family().model_type;
    let refuse = |what: String| ExportError::Unsupported { family, what };
    let arch = name(family).ok_or_else(|| refuse("it knows no such architecture".into()))?;
    let moe = spec.layers.iter().find_map(|l| if let Ffn::Moe(m) = &l.ffn { Some(m) } else { None });
    let moe = moe.ok_or_else(|| refuse("no layer has experts".into()))?;
    let leading = spec.layers.iter().take_while(|l| matches!(l.ffn, Ffn::Dense { .. })).count();
    let dense_later = spec.layers.iter().skip(leading).any(|l| matches!(l.ffn, Ffn::Dense { .. }));
    if dense_later || (leading > 0 && arch != "deepseek2") {
        return Err(refuse("some layers have no experts, which its code for this architecture does not allow for".into()));
    }
    check_router(arch, moe).map_err(refuse)?;
    if matches!(spec.rope.scaling, Scaling::Llama3 { .. }) {
        return Err(refuse("its rotary embedding is scaled by wavelength, which is not carried over".into()));
    }
    let mut warnings = Vec::new();
    if spec.layers.iter().any(|l| l.window.is_some_and(|w| w < spec.max_positions)) {
        warnings.push("llama.cpp does not apply this family's sliding window; texts longer than it come out differently".into());
    }
    if arch == "phimoe" {
        warnings
            .push("llama.cpp routes this family by a plain softmax over its two best experts, not by its sparse mixer".into());
    }
    let dense = spec.layers.iter().find_map(|l| if let Ffn::Dense { width } = l.ffn { Some(width) } else { None });
    let mut out = Out { arch, keys: Vec::new() };
    out.general("architecture", Value::Text(arch.into()));
    out.general("type", Value::Text("model".into()));
    let dir = weights.checkpoint().dir();
    out.general("name", Value::Text(dir.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())));
    out.general("quantization_version", Value::Count(2));
    // The type of most tensors: mostly Q4_0, or mostly Q4_1.
    let offset = weights.tensors().iter().any(|(id, _)| id.expert.is_some() && weights.has_zero_points(*id));
    out.general("file_type", Value::Count(if offset { 3 } else { 2 }));
    out.count("block_count", spec.layers.len());
    out.count("context_length", spec.max_positions);
    out.count("embedding_length", spec.width);
    out.count("vocab_size", spec.vocab);
    let config_width = weights.checkpoint().config().get("intermediate_size").and_then(Json::as_u64);
    let width = config_width.map_or(dense.unwrap_or(moe.width), |n| n as usize);
    out.count("feed_forward_length", width);
    out.count("expert_count", moe.router.experts);
    out.count("expert_used_count", moe.router.top_k);
    if matches!(arch, "qwen2moe" | "qwen3moe" | "deepseek2") {
        out.count("expert_feed_forward_length", moe.width);
    }
    if let Some(shared) = moe.shared.filter(|_| arch != "deepseek2") {
        out.count("expert_shared_feed_forward_length", shared.width);
    }
    out.number("attention.layer_norm_rms_epsilon", spec.norm.eps);
    attention(&mut out, spec);
    if arch == "deepseek2" {
        out.count("leading_dense_block_count", leading);
        out.count("expert_shared_count", moe.shared.map_or(0, |s| s.width / moe.width.max(1)));
        out.number("expert_weights_scale", moe.router.scale);
        out.push("expert_weights_norm", Value::Flag(moe.router.renorm));
        out.count("expert_gating_func", 1);
        if let Select::GroupLimited { groups, keep } = moe.router.select {
            out.count("expert_group_count", groups);
            out.count("expert_group_used_count", keep);
            warnings.push("older versions of llama.cpp ignore this model's limit on groups of experts".into());
        }
    }
    if arch == "granitemoe" {
        out.number("embedding_scale", spec.embed_scale);
        out.number("residual_scale", spec.residual_scale);
        out.number("logit_scale", 1.0 / spec.logit_scale);
    }
    rope(&mut out, weights, spec);
    Ok((out.keys, warnings))
}

/// What llama.cpp's code for an architecture does to router logits, whatever the keys.
fn check_router(arch: &str, moe: &Moe) -> Result<(), String> {
    let router = &moe.router;
    // A softmax over the chosen and a softmax over all, renormalised over the chosen, are the same weights.
    let renorm = router.renorm || router.score == Score::SoftmaxOfChosen;
    let wanted = match arch {
        "llama" | "qwen3moe" | "granitemoe" => Some(true),
        "qwen2moe" | "olmoe" => Some(false),
        _ => None,
    };
    match wanted {
        Some(true) if !renorm => Err("it renormalises the weights of chosen experts, and this model does not".into()),
        Some(false) if renorm => Err("it does not renormalise the weights of chosen experts, and this model does".into()),
        _ => Ok(()),
    }
}

fn attention(out: &mut Out, spec: &ModelSpec) {
    match spec.layers.first().map(|l| &l.attn) {
        Some(Attn::Gqa(a)) => {
            out.count("attention.head_count", a.heads);
            out.count("attention.head_count_kv", a.kv_heads);
            if a.head_dim * a.heads != spec.width || out.arch == "qwen3moe" {
                out.count("attention.key_length", a.head_dim);
                out.count("attention.value_length", a.head_dim);
            }
            if let Some(clip) = a.clip {
                out.number("attention.clamp_kqv", clip);
            }
            if out.arch == "granitemoe" {
                out.number("attention.scale", a.scale);
            }
            if let (Some(window), "phimoe") = (spec.layers[0].window, out.arch) {
                out.count("attention.sliding_window", window);
            }
        }
        Some(Attn::Mla(a)) => {
            out.count("attention.head_count", a.heads);
            out.count("attention.head_count_kv", a.heads);
            a.q_rank.iter().for_each(|rank| out.count("attention.q_lora_rank", *rank));
            out.count("attention.kv_lora_rank", a.kv_rank);
            out.count("attention.key_length", a.nope + a.rope);
            out.count("attention.value_length", a.v);
        }
        None => {}
    }
}

fn rope(out: &mut Out, weights: &Weights, spec: &ModelSpec) {
    out.count("rope.dimension_count", spec.rope.dim);
    out.number("rope.freq_base", spec.rope.theta as f32);
    match &spec.rope.scaling {
        // The last is refused above.
        Scaling::None | Scaling::Llama3 { .. } => {}
        Scaling::Linear { factor } => {
            out.push("rope.scaling.type", Value::Text("linear".into()));
            out.number("rope.scaling.factor", *factor as f32);
        }
        Scaling::Yarn { factor, original, .. } => {
            out.push("rope.scaling.type", Value::Text("yarn".into()));
            out.number("rope.scaling.factor", *factor as f32);
            out.count("rope.scaling.original_context_length", *original);
            let config = weights.checkpoint().config();
            let of = |key: &str| config.get(key)?.get("mscale_all_dim")?.as_f64();
            if let Some(mscale) = of("rope_scaling").or_else(|| of("rope_parameters")) {
                out.number("rope.scaling.yarn_log_multiplier", (0.1 * mscale) as f32);
            }
        }
        Scaling::LongRope { original, long_attention, .. } => {
            out.count("rope.scaling.original_context_length", *original);
            out.number("rope.scaling.attn_factor", *long_attention as f32);
        }
    }
}

struct Out {
    arch: &'static str,
    keys: Keys,
}

impl Out {
    fn push(&mut self, key: &str, value: Value) {
        self.keys.push((format!("{}.{key}", self.arch), value));
    }

    fn general(&mut self, key: &str, value: Value) {
        self.keys.push((format!("general.{key}"), value));
    }

    fn count(&mut self, key: &str, n: usize) {
        self.push(key, Value::Count(n as u32));
    }

    fn number(&mut self, key: &str, x: f32) {
        self.push(key, Value::Number(x));
    }
}
