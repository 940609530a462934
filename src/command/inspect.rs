//! `moe inspect`: what a model is, how big it is, and how big it would be. Reads headers only.

use super::Status;
use crate::artifact::config::quantization_config;
use crate::artifact::plan;
use crate::artifact::weights::{Stored, Weights};
use crate::cli::InspectArgs;
use crate::ids::{Component, Role, TensorId};
use crate::model::spec::{Attn, Ffn, ModelSpec, Moe};
use crate::profile::precision::{Decisions, Profile, decide};
use crate::quant::format::{Format, Group};
use crate::report::{self, Out};
use anyhow::Result;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

/// Runs the command.
pub fn inspect(args: &InspectArgs, out: Out) -> Result<Status> {
    let weights = Weights::open(&args.model)?;
    let sizes = Sizes::of(&weights);
    let profiles = profile_sizes(&weights)?;
    out.json(&as_json(args, &weights, &sizes, &profiles))?;
    if !out.json {
        show(args, &weights, &sizes, &profiles, out);
    }
    Ok(Status::Done)
}

/// Parameters and bytes of a model as it is stored.
struct Sizes {
    /// Parameters of each component, in the order of [`Component::ALL`].
    parameters: [u64; 7],
    /// Parameters that one token uses.
    active: [u64; 7],
    bytes: u64,
    active_bytes: u64,
    side_bytes: u64,
}

/// How much of a tensor one token reads: a fraction of the experts, one row of an embedding.
fn share(spec: &ModelSpec, id: TensorId) -> f64 {
    match id.role {
        Role::Embed if spec.tied => 1.0,
        Role::Embed => 1.0 / spec.vocab as f64,
        _ if id.expert.is_some() => moe_of(spec, id).map_or(1.0, |m| m.router.top_k as f64 / m.router.experts as f64),
        _ => 1.0,
    }
}

fn moe_of(spec: &ModelSpec, id: TensorId) -> Option<&Moe> {
    match &spec.layers.get(id.layer?.0 as usize)?.ffn {
        Ffn::Moe(m) => Some(m),
        Ffn::Dense { .. } => None,
    }
}

/// Bytes in which an id is stored now.
fn stored_bytes(weights: &Weights, id: TensorId, shape: &[usize]) -> u64 {
    let checkpoint = weights.checkpoint();
    match weights.stored(id) {
        Some(Stored::Slice { fused }) => {
            checkpoint.entry(&fused.tensor).map_or(0, |e| e.dtype.bytes(shape.iter().product()) as u64)
        }
        _ => weights.file_tensors(id).iter().filter_map(|n| checkpoint.entry(n)).map(|e| e.range.len() as u64).sum(),
    }
}

impl Sizes {
    fn of(weights: &Weights) -> Self {
        let (mut parameters, mut active) = ([0u64; 7], [0f64; 7]);
        let (mut bytes, mut active_bytes) = (0, 0.0);
        for (id, shape) in weights.tensors() {
            let n = shape.iter().product::<usize>() as u64;
            let share = share(weights.spec(), *id);
            let component = Component::ALL.iter().position(|c| *c == id.role.component()).unwrap_or(0);
            parameters[component] += n;
            active[component] += n as f64 * share;
            let stored = stored_bytes(weights, *id, shape);
            bytes += stored;
            active_bytes += stored as f64 * share;
        }
        let side = weights.side_tensors().iter().filter_map(|n| weights.checkpoint().entry(n));
        let side_bytes = side.map(|e| e.range.len() as u64).sum();
        Self {
            parameters,
            active: active.map(|x| x.round() as u64),
            bytes,
            active_bytes: active_bytes.round() as u64,
            side_bytes,
        }
    }
}

/// The size of a model under a profile.
struct ProfileSize {
    name: String,
    about: String,
    bytes: u64,
    active_bytes: u64,
    bpw: f64,
    caveats: Vec<String>,
}

/// Sizes under every built-in profile; none for a model that is quantized already.
fn profile_sizes(weights: &Weights) -> Result<Vec<ProfileSize>> {
    if is_quantized(weights) {
        return Ok(Vec::new());
    }
    Profile::names()
        .into_par_iter()
        .map(|name| {
            let profile = Profile::built_in(name)?;
            let decisions = decide(weights.tensors(), weights.spec().tied, &[], &profile);
            let [bytes, model_bytes, active_bytes] = bytes_under(weights, &decisions);
            let names = &weights.family().names;
            let config = quantization_config(names, weights.tensors(), |id| decisions.format(id), weights.side_tensors());
            let parameters: usize = weights.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            Ok(ProfileSize {
                name: name.into(),
                about: profile.about,
                bytes,
                active_bytes,
                bpw: model_bytes as f64 * 8.0 / parameters.max(1) as f64,
                caveats: config.caveats.iter().map(|c| c.to_string()).collect(),
            })
        })
        .collect()
}

fn is_quantized(weights: &Weights) -> bool {
    weights.tensors().iter().any(|(id, _)| matches!(weights.stored(*id), Some(Stored::Packed { .. })))
}

/// Bytes of all tensors, of the model's alone, and of those a token reads, were they stored as decided; what
/// [`plan::plan`] would write, without planning where. A head stored beside a tied embedding counts as its copy.
fn bytes_under(weights: &Weights, decisions: &Decisions) -> [u64; 3] {
    const SHAPE_BYTES: usize = 16;
    let scales = plan::scale_dtype(weights);
    let (mut model, mut active) = (0, 0.0);
    for (id, shape) in weights.tensors() {
        let elements = shape.iter().product();
        let bytes = match (decisions.format(*id), weights.stored(*id), &shape[..]) {
            (format @ Format::Int { .. }, _, &[rows, cols]) => format.bytes(rows, cols, scales) + SHAPE_BYTES,
            (_, Some(Stored::Fp8 { .. }), _) => scales.bytes(elements),
            _ => weights.dtype(*id).map_or(0, |d| d.bytes(elements)),
        };
        model += bytes as u64;
        active += bytes as f64 * share(weights.spec(), *id);
    }
    let entry = |name: &String| weights.checkpoint().entry(name).map_or(0, |e| e.range.len() as u64);
    let twin = |name: &String| weights.spec().tied && name == "lm_head.weight";
    let side: u64 = weights.side_tensors().iter().filter(|n| !twin(n)).map(entry).sum();
    [model + side, model, active.round() as u64]
}

/// Numbers of equal parts into which engines can divide the model: heads, key/value heads (which may be repeated), and whole
/// groups of the experts' inner width.
fn tensor_parallel(weights: &Weights, group: usize) -> Vec<usize> {
    let fits = |n: usize| {
        weights.spec().layers.iter().all(|layer| {
            let attn = match &layer.attn {
                Attn::Gqa(a) => a.heads.is_multiple_of(n) && (a.kv_heads.is_multiple_of(n) || n.is_multiple_of(a.kv_heads)),
                Attn::Mla(a) => a.heads.is_multiple_of(n),
            };
            let widths = match &layer.ffn {
                Ffn::Dense { width } => vec![*width],
                Ffn::Moe(m) => std::iter::once(m.width).chain(m.shared.map(|s| s.width)).collect(),
            };
            attn && widths.into_iter().all(|w| w.is_multiple_of(n) && (n == 1 || (w / n).is_multiple_of(group)))
        })
    };
    [1, 2, 4, 8, 16].into_iter().filter(|&n| fits(n)).collect()
}

/// The group size that the experts have, or would have under the default profile.
fn expert_group(weights: &Weights) -> usize {
    let now = weights.tensors().iter().find(|(id, _)| id.expert.is_some()).and_then(|(id, _)| weights.format(*id));
    match now {
        Some(Format::Int { group: Group::Of(n), .. }) => n,
        Some(Format::Int { .. }) => 1,
        _ => Profile::built_in("mixed").ok().map_or(1, |p| {
            let expert = weights.tensors().iter().find(|(id, _)| id.expert.is_some());
            let layer = expert.and_then(|(id, _)| id.layer);
            let of_layer: Vec<_> = weights.tensors().iter().filter(|(id, _)| id.layer == layer).cloned().collect();
            let decisions = decide(&of_layer, weights.spec().tied, &[], &p);
            match expert.map(|(id, _)| decisions.format(*id)) {
                Some(Format::Int { group: Group::Of(n), .. }) => n,
                _ => 1,
            }
        }),
    }
}

fn first_moe(spec: &ModelSpec) -> Option<&Moe> {
    spec.layers.iter().find_map(|l| match &l.ffn {
        Ffn::Moe(m) => Some(m),
        Ffn::Dense { .. } => None,
    })
}

fn headline(weights: &Weights, sizes: &Sizes, profiles: &[ProfileSize]) -> String {
    let total: u64 = sizes.parameters.iter().sum();
    let active: u64 = sizes.active.iter().sum();
    let bpw = sizes.bytes as f64 * 8.0 / total.max(1) as f64;
    let would = profiles.first().map_or_else(
        || format!("quantized, {bpw:.2} bits per weight"),
        |p| format!("{} as `{}`", report::bytes(p.bytes), p.name),
    );
    format!(
        "{}: {} parameters, {} active a token; {} now, {would}",
        weights.spec().family,
        report::count(total),
        report::count(active),
        report::bytes(sizes.bytes + sizes.side_bytes),
    )
}

fn show(args: &InspectArgs, weights: &Weights, sizes: &Sizes, profiles: &[ProfileSize], out: Out) {
    let spec = weights.spec();
    out.line(headline(weights, sizes, profiles));
    let attention = match spec.layers.first().map(|l| &l.attn) {
        Some(Attn::Gqa(a)) => format!("{} heads of {}, {} key/value heads", a.heads, a.head_dim, a.kv_heads),
        Some(Attn::Mla(a)) => format!("{} latent heads, key/value rank {}", a.heads, a.kv_rank),
        None => "no attention".into(),
    };
    out.line(format!(
        "{} layers, width {}, {attention}, vocabulary {}, {} positions{}",
        spec.layers.len(),
        spec.width,
        spec.vocab,
        spec.max_positions,
        if spec.tied { ", head tied to the embedding" } else { "" },
    ));
    if let Some(m) = first_moe(spec) {
        let shared = m.shared.map_or_else(String::new, |s| format!(", shared expert of width {}", s.width));
        let num = spec.layers.iter().filter(|l| matches!(l.ffn, Ffn::Moe(_))).count();
        out.line(format!(
            "{num} layers with {} experts of width {}, {} a token{shared}",
            m.router.experts, m.width, m.router.top_k
        ));
    }
    let parallel: Vec<String> = tensor_parallel(weights, expert_group(weights)).iter().map(usize::to_string).collect();
    out.line(format!("tensor parallel: {}", parallel.join(", ")));
    out.line("");
    let rows: Vec<Vec<String>> = Component::ALL
        .iter()
        .enumerate()
        .filter(|(i, _)| sizes.parameters[*i] > 0)
        .map(|(i, c)| vec![c.name().into(), report::count(sizes.parameters[i]), report::count(sizes.active[i])])
        .collect();
    out.line(report::table(&["component", "parameters", "active a token"], &rows));
    out.line("");
    let total: u64 = sizes.parameters.iter().sum();
    let bpw = format!("{:.3}", sizes.bytes as f64 * 8.0 / total.max(1) as f64);
    let mut rows =
        vec![vec!["now".into(), report::bytes(sizes.bytes + sizes.side_bytes), bpw, report::bytes(sizes.active_bytes)]];
    rows.extend(
        profiles
            .iter()
            .map(|p| vec![p.name.clone(), report::bytes(p.bytes), format!("{:.3}", p.bpw), report::bytes(p.active_bytes)]),
    );
    out.line(report::table(&["profile", "bytes", "bits per weight", "read a token"], &rows));
    if args.tensors {
        out.line("");
        let rows: Vec<Vec<String>> = tensor_rows(weights)
            .into_iter()
            .map(|t| vec![t.id, t.names.join(" "), t.format, format!("{:?}", t.shape), report::bytes(t.bytes)])
            .collect();
        out.line(report::table(&["id", "name", "format", "shape", "bytes"], &rows));
    }
}

struct TensorRow {
    id: String,
    names: Vec<String>,
    format: String,
    shape: Vec<usize>,
    bytes: u64,
}

fn tensor_rows(weights: &Weights) -> Vec<TensorRow> {
    let of_model = weights.tensors().iter().map(|(id, shape)| {
        let format = match weights.format(*id) {
            Some(Format::Source) | None => weights.dtype(*id).map_or_else(String::new, |d| d.name().to_lowercase()),
            Some(quantized) => quantized.to_string(),
        };
        let names = weights.file_tensors(*id);
        TensorRow { id: id.to_string(), names, format, shape: shape.clone(), bytes: stored_bytes(weights, *id, shape) }
    });
    let side = weights.side_tensors().iter().filter_map(|name| {
        let entry = weights.checkpoint().entry(name)?;
        let format = entry.dtype.name().to_lowercase();
        Some(TensorRow {
            id: "-".into(),
            names: vec![name.clone()],
            format,
            shape: entry.shape.clone(),
            bytes: entry.range.len() as u64,
        })
    });
    of_model.chain(side).collect()
}

fn as_json(args: &InspectArgs, weights: &Weights, sizes: &Sizes, profiles: &[ProfileSize]) -> Value {
    let spec = weights.spec();
    let by_component = |values: &[u64; 7]| -> Map<String, Value> {
        Component::ALL.iter().zip(values).filter(|(_, n)| **n > 0).map(|(c, n)| (c.name().to_string(), json!(n))).collect()
    };
    let (total, active): (u64, u64) = (sizes.parameters.iter().sum(), sizes.active.iter().sum());
    let mut value = json!({
        "model": args.model,
        "family": spec.family,
        "layers": spec.layers.len(),
        "width": spec.width,
        "vocab": spec.vocab,
        "max_positions": spec.max_positions,
        "tied": spec.tied,
        "experts": first_moe(spec).map(|m| json!({
            "count": m.router.experts, "top_k": m.router.top_k, "width": m.width, "shared_width": m.shared.map(|s| s.width),
            "layers": spec.layers.iter().filter(|l| matches!(l.ffn, Ffn::Moe(_))).count(),
        })),
        "attention": spec.layers.first().map(|l| match &l.attn {
            Attn::Gqa(a) => json!({"kind": "grouped", "heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}),
            Attn::Mla(a) => json!({"kind": "latent", "heads": a.heads, "kv_rank": a.kv_rank, "q_rank": a.q_rank}),
        }),
        "parameters": total,
        "active_parameters": active,
        "parameters_by_component": by_component(&sizes.parameters),
        "active_by_component": by_component(&sizes.active),
        "quantized": is_quantized(weights),
        "shards": weights.checkpoint().shards().len(),
        "tensors_in_files": weights.checkpoint().len(),
        "bytes": sizes.bytes,
        "side_bytes": sizes.side_bytes,
        "active_bytes": sizes.active_bytes,
        "bpw": sizes.bytes as f64 * 8.0 / total.max(1) as f64,
        "tensor_parallel": tensor_parallel(weights, expert_group(weights)),
        "profiles": profiles.iter().map(|p| json!({
            "name": p.name, "about": p.about, "bytes": p.bytes, "active_bytes": p.active_bytes, "bpw": p.bpw, "caveats": p.caveats,
        })).collect::<Vec<_>>(),
    });
    if args.tensors {
        let rows: Vec<Value> = tensor_rows(weights)
            .into_iter()
            .map(|t| json!({"id": t.id, "names": t.names, "format": t.format, "shape": t.shape, "bytes": t.bytes}))
            .collect();
        value["tensors"] = rows.into();
    }
    value
}
