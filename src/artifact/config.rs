//! The `quantization_config` of an artifact, in the intersection that vLLM, SGLang and transformers read.
//!
//! Knows how readers match module names: `re:` patterns are anchored at the start only, `ignore` is consulted first, the
//! first matching group wins, and transformers tells the experts' group from the dense one by the text `experts` in its
//! patterns. Format: compressed-tensors 0.15 to 0.20, `QuantizationConfig`.

use crate::ids::{Component, ExpertId, LayerId, Part, Role, TensorId};
use crate::model::names::{Readers, Spelling};
use crate::quant::format::{Bits, Format, Group, Zero};
use crate::tensor::Dtype;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Which readers an artifact leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Caveat {
    /// More schemes than the experts' and one for the rest.
    Schemes {
        /// Number of config groups.
        groups: usize,
    },
    /// Tensors outside the experts share the experts' group.
    Joined,
    /// transformers has no rule that assembles this family's experts.
    Experts,
    /// The family is none that this version runs.
    Unchecked,
    /// Experts have zero points.
    ExpertZeros,
    /// Matrices outside the experts have zero points.
    DenseZeros,
    /// Matrices of eight bits have zero points.
    EightZeros,
    /// The embedding has zero points.
    EmbeddingZeros,
    /// The embedding is quantized.
    Embedding,
    /// The head is quantized.
    Head,
    /// A router is quantized.
    Router,
}

impl fmt::Display for Caveat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Caveat::Schemes { groups } => write!(
                f,
                "{groups} schemes are in use; transformers with `dequantize=True` tells only two apart and cannot load this"
            ),
            Caveat::Joined => f.write_str(
                "tensors outside the experts have the experts' format; transformers loads this by default, with `dequantize=True` it does not",
            ),
            Caveat::Experts => f.write_str("transformers up to 5.24 does not assemble per-expert tensors of this family"),
            Caveat::Unchecked => f.write_str(
                "this version does not run the family: names and shapes follow the checkpoint, but no reader was tried",
            ),
            Caveat::ExpertZeros => f.write_str(
                "experts have zero points (asym): transformers up to 5.24 does not load them; vLLM and SGLang do in releases after June \
                2026, by Marlin on NVIDIA GPUs, and refuse them before and elsewhere",
            ),
            Caveat::DenseZeros => f.write_str(
                "matrices outside the experts have zero points (asym): transformers up to 5.24 loads these with `dequantize=True` only",
            ),
            Caveat::EightZeros => f.write_str(
                "8-bit matrices have zero points (asym): Marlin takes those of 4 bits only, so that vLLM and SGLang fail on them",
            ),
            Caveat::EmbeddingZeros => f.write_str(
                "the embedding has zero points (asym): vLLM computes as if it had none (drop `:asym` from its --set)",
            ),
            Caveat::Embedding => f.write_str(
                "the embedding is quantized; this tool loads it, transformers, most model files of vLLM and all of SGLang do not \
                (keep it with --set embed=source)",
            ),
            Caveat::Head => f.write_str("the head is quantized; readers need support for it by name (vLLM and SGLang have it)"),
            Caveat::Router => f.write_str("a router is quantized; vLLM and SGLang do not load that for most families"),
        }
    }
}

/// A finished `quantization_config`.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizationConfig {
    /// The value; `None` if nothing is quantized.
    pub value: Option<Value>,
    /// Which readers are left out.
    pub caveats: Vec<Caveat>,
}

/// Modules of one role, layer by layer (`None` outside the layers), with their formats.
type Formats = BTreeMap<Role, BTreeMap<Option<LayerId>, Format>>;
/// Some layers of a role that share a treatment.
type Members = (Role, Vec<Option<LayerId>>);

/// Builds the config for a model's tensors; `side` are the matrices that are copied as they are.
pub fn quantization_config(
    names: &dyn Spelling,
    tensors: &[(TensorId, Vec<usize>)],
    format: impl Fn(TensorId) -> Format,
    side: &[String],
) -> QuantizationConfig {
    let mut roles: Formats = BTreeMap::new();
    for (id, shape) in tensors {
        let linear = id.part == Part::Weight && shape.len() == 2 && id.role.component() != Component::Norms;
        if linear {
            roles.entry(id.role).or_default().insert(id.layer, format(*id));
        }
    }
    let is_expert = |role: Role| role.component() == Component::Experts;
    let schemes = |expert: bool| -> Vec<Format> {
        let mut all = Vec::new();
        for f in roles.iter().filter(|(r, _)| is_expert(**r) == expert).flat_map(|(_, layers)| layers.values()) {
            if *f != Format::Source && !all.contains(f) {
                all.push(*f);
            }
        }
        all
    };
    let (expert_schemes, dense_schemes) = (schemes(true), schemes(false));
    if expert_schemes.is_empty() && dense_schemes.is_empty() {
        return QuantizationConfig { value: None, caveats: Vec::new() };
    }
    // Where the rest needs two schemes and one of them is the experts', it joins the experts' group, so that two groups do.
    let joined = match expert_schemes[..] {
        [experts] if dense_schemes.len() > 1 && dense_schemes.contains(&experts) => Some(experts),
        _ => None,
    };
    let mut groups = Map::new();
    let mut add = |scheme: Format, parts: Vec<Members>| {
        let targets = patterns(names, &roles, parts);
        groups.insert(format!("group_{}", groups.len()), group(scheme, targets));
    };
    for scheme in &expert_schemes {
        let parts = parts_with(&roles, |role, f| f == *scheme && (is_expert(role) || joined == Some(f)));
        add(*scheme, parts);
    }
    let rest: Vec<Format> = dense_schemes.iter().copied().filter(|f| joined != Some(*f)).collect();
    for scheme in &rest {
        add(*scheme, parts_with(&roles, |role, f| f == *scheme && !is_expert(role)));
    }
    let mut caveats = Vec::new();
    if expert_schemes.len() > 1 || rest.len() > 1 {
        caveats.push(Caveat::Schemes { groups: groups.len() });
    }
    caveats.extend(joined.map(|_| Caveat::Joined));
    caveats.extend(match names.readers() {
        Readers::Checked => None,
        Readers::NotAssembled => (!expert_schemes.is_empty()).then_some(Caveat::Experts),
        Readers::Unchecked => Some(Caveat::Unchecked),
    });
    let quantized = |role: Role| roles.get(&role).is_some_and(|l| l.values().any(|f| *f != Format::Source));
    caveats.extend(
        [(Role::Embed, Caveat::Embedding), (Role::Head, Caveat::Head), (Role::Router, Caveat::Router)]
            .into_iter()
            .filter(|(r, _)| quantized(*r))
            .map(|(_, c)| c),
    );
    let zeros = |of: &dyn Fn(Role, Format) -> bool| {
        roles.iter().any(|(r, layers)| layers.values().any(|f| f.has_zero_points() && of(*r, *f)))
    };
    caveats.extend(zeros(&|r, _| is_expert(r)).then_some(Caveat::ExpertZeros));
    caveats.extend(zeros(&|r, _| !is_expert(r)).then_some(Caveat::DenseZeros));
    caveats.extend(zeros(&|_, f| matches!(f, Format::Int { bits: Bits::Eight, .. })).then_some(Caveat::EightZeros));
    caveats.extend(zeros(&|r, _| r == Role::Embed).then_some(Caveat::EmbeddingZeros));
    let value = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore(names, &roles, side),
        "kv_cache_scheme": null,
    });
    QuantizationConfig { value: Some(value), caveats }
}

/// `config.json` with another `quantization_config`; every other key keeps its place and value.
pub fn with_quantization(config: &Value, quantization: Option<Value>) -> Value {
    let mut config = config.clone();
    if let Some(map) = config.as_object_mut() {
        match quantization {
            Some(value) => drop(map.insert("quantization_config".into(), value)),
            None => drop(map.shift_remove("quantization_config")),
        }
    }
    config
}

/// The type the model computes in, which readers allocate scales in: `dtype` (transformers 5) or `torch_dtype`.
pub fn model_dtype(config: &Value) -> Option<Dtype> {
    let of = |object: &Value| ["dtype", "torch_dtype"].into_iter().find_map(|key| object.get(key)?.as_str().map(String::from));
    let name = of(config).or_else(|| of(config.get("text_config")?))?;
    match name.trim_start_matches("torch.") {
        "bfloat16" => Some(Dtype::BF16),
        "float16" | "half" => Some(Dtype::F16),
        "float32" | "float" => Some(Dtype::F32),
        _ => None,
    }
}

fn group(scheme: Format, targets: Vec<String>) -> Value {
    let Format::Int { bits, group, zero } = scheme else { return Value::Null };
    let (strategy, group_size) = match group {
        Group::Of(n) => ("group", json!(n)),
        Group::Channel => ("channel", Value::Null),
    };
    json!({
        "targets": targets,
        "format": "pack-quantized",
        "weights": {
            "num_bits": bits.count(), "type": "int", "symmetric": zero == Zero::Middle,
            "strategy": strategy, "group_size": group_size, "dynamic": false,
        },
    })
}

fn parts_with(roles: &Formats, wanted: impl Fn(Role, Format) -> bool) -> Vec<Members> {
    roles
        .iter()
        .map(|(role, layers)| (*role, layers.iter().filter(|(_, f)| wanted(*role, **f)).map(|(l, _)| *l).collect::<Vec<_>>()))
        .filter(|(_, layers)| !layers.is_empty())
        .collect()
}

/// Patterns for modules, experts first; roles with the same parent and layers share one.
fn patterns(names: &dyn Spelling, roles: &Formats, parts: Vec<Members>) -> Vec<String> {
    let mut whole = Vec::new();
    // Parent pattern and layers (`None`: all), in order of first appearance, with the children.
    let mut merged: Vec<(String, Option<Vec<u32>>, Vec<String>)> = Vec::new();
    for (role, layers) in parts {
        match role {
            Role::Head if names.module(TensorId::global(Role::Head)) != "lm_head" => whole.push("re:.*lm_head$".to_string()),
            Role::Head => whole.push("lm_head".to_string()),
            Role::Embed => whole.push("re:.*embed_tokens$".to_string()),
            _ => {
                let all = roles.get(&role).is_some_and(|of_role| of_role.len() == layers.len());
                let some = (!all).then(|| layers.iter().flatten().map(|l| l.0).collect::<Vec<_>>());
                let layer = roles.get(&role).and_then(|l| l.keys().flatten().next()).copied().unwrap_or(LayerId(0));
                let (parent, child) = place(names, layer, role);
                match merged.iter_mut().find(|(p, l, _)| *p == parent && *l == some) {
                    Some((_, _, children)) => children.push(child),
                    None => merged.push((parent, some, vec![child])),
                }
            }
        }
    }
    merged.sort_by_key(|(parent, _, _)| !parent.contains("experts"));
    let pattern = |(parent, layers, mut children): (String, Option<Vec<u32>>, Vec<String>)| {
        // SGLang asks for these spellings whatever the family calls its projections.
        if parent.contains("experts") {
            let others = std::mem::replace(&mut children, EXPERT_CHILDREN.map(String::from).to_vec());
            let new: Vec<String> = others.into_iter().filter(|c| !children.contains(c)).collect();
            children.extend(new);
        }
        let children = if children.len() == 1 { children.remove(0) } else { format!("({})", children.join("|")) };
        match layers {
            None => format!("re:.*{parent}\\.{children}$"),
            Some(layers) => {
                let layers = layers.iter().map(u32::to_string).collect::<Vec<_>>().join("|");
                let between = if parent.starts_with('\\') { "(\\..*)?" } else { "\\..*" };
                let holder = names.layers().rsplit('.').next().unwrap_or_default();
                format!("re:.*{holder}\\.({layers}){between}{parent}\\.{children}$")
            }
        }
    };
    merged.into_iter().map(pattern).chain(whole).collect()
}

/// Spellings of an expert's projections that readers ask for.
const EXPERT_CHILDREN: [&str; 6] = ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"];

/// Pattern of the module that holds a role's module, and the name inside it. Not anchored, and no more of the path than needed:
/// engines rename what lies above.
fn place(names: &dyn Spelling, layer: LayerId, role: Role) -> (String, String) {
    let module = names.module(match role.component() {
        Component::Experts => TensorId::expert(layer, ExpertId(0), role),
        _ => TensorId::layer(layer, role),
    });
    let before = names.layers().split('.').count() + 1;
    let mut path: Vec<&str> = module.split('.').skip(before).collect();
    let child = path.pop().unwrap_or_default().to_string();
    let near = path.last().copied().unwrap_or_default();
    let parent = match role.component() {
        Component::Attention if near.contains("attn") => "attn".into(),
        Component::Experts => "\\.experts\\.\\d+".into(),
        // Never spelled out: the text `experts` would make transformers take this group for the experts'.
        Component::Shared if near.starts_with("shared_exp") => "\\.shared_exp[a-z]*".into(),
        _ => format!("\\.{near}"),
    };
    (parent, child)
}

/// Every module that stays unquantized: SGLang refuses one that neither a target nor this list names.
fn ignore(names: &dyn Spelling, roles: &Formats, side: &[String]) -> Vec<String> {
    let mut list: Vec<String> = Vec::new();
    if !roles.contains_key(&Role::Head) {
        list.push("lm_head".into());
    }
    let parts = parts_with(roles, |_, f| f == Format::Source);
    let unquantized = |role: Role| roles.get(&role).is_none_or(|l| l.values().all(|f| *f == Format::Source));
    let (fixed, rest): (Vec<Members>, Vec<Members>) =
        parts.into_iter().partition(|(role, _)| matches!(role, Role::Head | Role::Embed));
    list.extend(patterns(names, roles, fixed));
    if unquantized(Role::Router) {
        // vLLM calls the module `gate` in every family, whatever the checkpoint calls it.
        list.push("re:.*\\.gate$".into());
    }
    let rest: Vec<Members> = rest.into_iter().collect();
    for pattern in patterns(names, roles, rest) {
        if let Some((head, _)) = pattern.split_once("\\.experts\\.\\d+\\.") {
            list.push(format!("{head}\\.experts$"));
        }
        if pattern != "re:.*\\.mlp\\.gate$" && pattern != "re:.*\\.block_sparse_moe\\.gate$" {
            list.push(pattern);
        }
    }
    let aside: BTreeSet<String> = side.iter().filter_map(|name| aside(names, roles, name.strip_suffix(".weight")?)).collect();
    list.extend(aside.into_iter().filter(|pattern| !list.contains(pattern)).collect::<Vec<_>>());
    list
}

/// A pattern for a module that is copied: whole blocks and towers by their prefix, since readers name what is inside them in
/// ways of their own; inside the model's layers the module itself.
fn aside(names: &dyn Spelling, roles: &Formats, module: &str) -> Option<String> {
    let path: Vec<&str> = module.split('.').collect();
    let number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let of_layers = module.strip_prefix(names.layers()).and_then(|rest| rest.strip_prefix('.'));
    if let Some((n, inner)) = of_layers.and_then(|rest| rest.split_once('.')).filter(|(n, _)| number(n)) {
        if !is_layer(roles, n) {
            let layers = names.layers().rsplit('.').next().unwrap_or_default();
            return Some(format!("re:.*{layers}\\.{n}\\..*"));
        }
        let inner: Vec<&str> = inner.split('.').map(|p| if number(&p) { "\\d+" } else { p }).collect();
        return Some(format!("re:.*\\.{}$", inner.join("\\.")));
    }
    let holders = ["model", "language_model", "transformer", "backbone", "text_model", "decoder"];
    let root = path.iter().find(|part| !holders.contains(part))?;
    let leaf = path.last() == Some(root);
    Some(if leaf { format!("re:(.*\\.)?{root}$") } else { format!("re:(.*\\.)?{root}\\..*") })
}

fn is_layer(roles: &Formats, number: &str) -> bool {
    roles.values().any(|layers| layers.keys().flatten().any(|l| l.0.to_string() == number))
}
