//! `moe inspect`: what a model is, how big it is, and how big it would be. Reads headers only.

use super::{Status, UserError, memory, shape};
use crate::artifact::config::quantization_config;
use crate::artifact::inventory::Inventory;
use crate::artifact::plan;
use crate::artifact::weights::{Data, Stored, Weights};
use crate::checkpoint::mxfp4;
use crate::cli::InspectArgs;
use crate::engine::cuda::budget;
use crate::ids::{Component, Role, TensorId};
use crate::model::family;
use crate::model::outline::{Heads, Outline};
use crate::profile::precision::{Decisions, Profile, decide};
use crate::quant::format::{Format, Group};
use crate::report::{self, Out};
use crate::tiers::VramPlan;
use anyhow::Result;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

/// Runs the command.
pub fn inspect(args: &InspectArgs, out: Out) -> Result<Status> {
    let plan = planned(args)?;
    let Some(model) = &args.model else {
        out.json(&json!({"shape": args.shape, "vram": plan}))?;
        plan.iter().for_each(|p| out.line(memory::shown(p, args.batch)));
        return Ok(Status::Done);
    };
    let weights = Inventory::open(model)?;
    let sizes = Sizes::of(&weights);
    let profiles = profile_sizes(&weights)?;
    let mut value = as_json(args, &weights, &sizes, &profiles);
    if let Some(plan) = &plan {
        value["vram"] = json!(plan);
    }
    out.json(&value)?;
    if !out.json {
        show(args, &weights, &sizes, &profiles, out);
        plan.iter().for_each(|p| out.line(format!("\n{}", memory::shown(p, args.batch))));
    }
    Ok(Status::Done)
}

/// What a budget of GPU memory would hold; `None` without a budget.
fn planned(args: &InspectArgs) -> Result<Option<VramPlan>> {
    if args.memory.vram_budget.is_none() {
        return match args.memory.is_given() {
            true => Err(UserError::new("no budget of GPU memory is given").hint("add --vram-budget SIZE").into()),
            false => Ok(None),
        };
    }
    let weights = args.model.as_deref().map(Weights::open).transpose()?;
    let (family, spec) = match (&weights, &args.shape) {
        (Some(w), _) => (w.family(), w.spec().clone()),
        (None, shape) => shape::spec(shape.as_deref().unwrap_or_default())?,
    };
    let options = memory::options(&args.memory, args.model.as_deref(), &spec, family)?;
    let needs = match (&weights, args.profile.as_deref()) {
        (Some(weights), None) => budget::needs_of_weights(weights, &options),
        (_, profile) => budget::needs_of_spec(&spec, &*shape::formats(profile.unwrap_or("bench"))?, &options),
    };
    Ok(Some(memory::offline(&needs, options.budget_bytes.unwrap_or(u64::MAX), options.host_bytes)?))
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
fn share(outline: &Outline, id: TensorId) -> f64 {
    match (id.role, outline.experts) {
        (Role::Embed, _) if outline.tied => 1.0,
        (Role::Embed, _) => 1.0 / outline.vocab.max(1) as f64,
        (_, Some(e)) if id.expert.is_some() => e.top_k.map_or(1.0, |k| k as f64 / e.count.max(1) as f64),
        _ => 1.0,
    }
}

/// Bytes in which an id is stored now.
fn stored_bytes(weights: &Inventory, id: TensorId, shape: &[usize]) -> u64 {
    let checkpoint = weights.checkpoint();
    match weights.stored(id) {
        Some(stored @ (Stored::Slice { .. } | Stored::Gather { .. })) => {
            checkpoint.entry(&stored.first_tensor()).map_or(0, |e| e.dtype.bytes(shape.iter().product()) as u64)
        }
        Some(Stored::Mxfp4 { rows, cols, .. }) => (rows * (cols / 2 + cols / mxfp4::BLOCK)) as u64,
        _ => weights.file_tensors(id).iter().filter_map(|n| checkpoint.entry(n)).map(|e| e.range.len() as u64).sum(),
    }
}

impl Sizes {
    fn of(weights: &Inventory) -> Self {
        let (mut parameters, mut active) = ([0u64; 7], [0f64; 7]);
        let (mut bytes, mut active_bytes) = (0, 0.0);
        for (id, shape) in weights.tensors() {
            let n = shape.iter().product::<usize>() as u64;
            let share = share(weights.outline(), *id);
            let component = Component::ALL.iter().position(|c| *c == id.role.component()).unwrap_or(0);
            parameters[component] += n;
            active[component] += n as f64 * share;
            let stored = stored_bytes(weights, *id, shape);
            bytes += stored;
            active_bytes += stored as f64 * share;
        }
        let side = weights.side_tensors().iter().filter_map(|n| weights.side_stored(n)).flat_map(Stored::file_tensors);
        let side_bytes = side.filter_map(|n| weights.checkpoint().entry(&n)).map(|e| e.range.len() as u64).sum();
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
fn profile_sizes(weights: &Inventory) -> Result<Vec<ProfileSize>> {
    if is_quantized(weights) {
        return Ok(Vec::new());
    }
    Profile::names()
        .into_par_iter()
        .map(|name| {
            let profile = Profile::built_in(name)?;
            let decisions = decide(weights.tensors(), weights.outline().tied, &[], &profile);
            let [bytes, model_bytes, active_bytes] = bytes_under(weights, &decisions);
            let side = plan::side_matrices(weights);
            let config = quantization_config(weights.names(), weights.tensors(), |id| decisions.format(id), &side);
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

fn is_quantized(weights: &Inventory) -> bool {
    weights.tensors().iter().any(|(id, _)| matches!(weights.stored(*id), Some(Stored::Packed { .. })))
}

/// Bytes of all tensors, of the model's alone, and of those a token reads, were they stored as decided; what
/// [`plan::plan`] would write, without planning where. A head stored beside a tied embedding counts as its copy.
fn bytes_under(weights: &Inventory, decisions: &Decisions) -> [u64; 3] {
    const SHAPE_BYTES: usize = 16;
    let scales = plan::scale_dtype(weights);
    let (mut model, mut active) = (0, 0.0);
    for (id, shape) in weights.tensors() {
        let elements = shape.iter().product();
        let bytes = match (decisions.format(*id), weights.stored(*id), &shape[..]) {
            (format @ Format::Int { .. }, _, &[rows, cols]) => format.bytes(rows, cols, scales) + SHAPE_BYTES,
            (_, Some(Stored::Fp8 { .. } | Stored::Mxfp4 { .. }), _) => scales.bytes(elements),
            _ => weights.dtype(*id).map_or(0, |d| d.bytes(elements)),
        };
        model += bytes as u64;
        active += bytes as f64 * share(weights.outline(), *id);
    }
    let entry = |name: &String| match weights.side(name).filter(|w| matches!(w.data, Data::Fp8 { .. } | Data::Mxfp4(_))) {
        Some(w) => scales.bytes(w.rows * w.cols) as u64,
        None => weights.checkpoint().entry(name).map_or(0, |e| e.range.len() as u64),
    };
    let twin = |name: &String| weights.outline().tied && name == "lm_head.weight";
    let side: u64 = weights.side_tensors().iter().filter(|n| !twin(n)).map(entry).sum();
    [model + side, model, active.round() as u64]
}

/// The group size that the experts have, or would have under the default profile.
fn expert_group(weights: &Inventory) -> usize {
    let now = weights.tensors().iter().find(|(id, _)| id.expert.is_some()).and_then(|(id, _)| weights.format(*id));
    match now {
        Some(Format::Int { group: Group::Of(n), .. }) => n,
        Some(Format::Int { .. }) => 1,
        _ => Profile::built_in("mixed").ok().map_or(1, |p| {
            let expert = weights.tensors().iter().find(|(id, _)| id.expert.is_some());
            let layer = expert.and_then(|(id, _)| id.layer);
            let of_layer: Vec<_> = weights.tensors().iter().filter(|(id, _)| id.layer == layer).cloned().collect();
            let decisions = decide(&of_layer, weights.outline().tied, &[], &p);
            match expert.map(|(id, _)| decisions.format(*id)) {
                Some(Format::Int { group: Group::Of(n), .. }) => n,
                _ => 1,
            }
        }),
    }
}

/// Whether the engines run the family.
fn runs(outline: &Outline) -> bool {
    family::FAMILIES.iter().any(|f| f.model_type == outline.model_type)
}

fn headline(weights: &Inventory, sizes: &Sizes, profiles: &[ProfileSize]) -> String {
    let total: u64 = sizes.parameters.iter().sum();
    let active: u64 = sizes.active.iter().sum();
    let bpw = sizes.bytes as f64 * 8.0 / total.max(1) as f64;
    let would = profiles.first().map_or_else(
        || format!("quantized, {bpw:.2} bits per weight"),
        |p| format!("{} as `{}`", report::bytes(p.bytes), p.name),
    );
    format!(
        "{}: {} parameters, {} active a token; {} now, {would}",
        weights.outline().model_type,
        report::count(total),
        report::count(active),
        report::bytes(sizes.bytes + sizes.side_bytes),
    )
}

fn show(args: &InspectArgs, weights: &Inventory, sizes: &Sizes, profiles: &[ProfileSize], out: Out) {
    let outline = weights.outline();
    out.line(headline(weights, sizes, profiles));
    let attention = match outline.attention {
        Heads::Grouped { heads, kv_heads, head_dim } => format!("{heads} heads of {head_dim}, {kv_heads} key/value heads"),
        Heads::Latent { heads, kv_rank, .. } => format!("{heads} latent heads, key/value rank {kv_rank}"),
        Heads::Other { heads, kv_heads } => format!("{heads} heads, {kv_heads} key/value heads"),
    };
    out.line(format!(
        "{} layers, width {}, {attention}, vocabulary {}, {} positions{}",
        outline.layers,
        outline.width,
        outline.vocab,
        outline.max_positions,
        if outline.tied { ", head tied to the embedding" } else { "" },
    ));
    if let Some(e) = outline.experts {
        let shared = e.shared_width.map_or_else(String::new, |s| format!(", shared expert of width {s}"));
        let top_k = e.top_k.map_or_else(String::new, |k| format!(", {k} a token"));
        out.line(format!("{} layers with {} experts of width {}{top_k}{shared}", e.layers, e.count, e.width));
    }
    if !runs(outline) {
        out.line("this version quantizes this family, but does not run it");
    }
    let group = expert_group(weights);
    let parallel: Vec<String> = outline.tensor_parallel(group).iter().map(usize::to_string).collect();
    out.line(format!("tensor parallel: {} (whole groups of {group} columns)", parallel.join(", ")));
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

fn tensor_rows(weights: &Inventory) -> Vec<TensorRow> {
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

fn as_json(args: &InspectArgs, weights: &Inventory, sizes: &Sizes, profiles: &[ProfileSize]) -> Value {
    let outline = weights.outline();
    let by_component = |values: &[u64; 7]| -> Map<String, Value> {
        Component::ALL.iter().zip(values).filter(|(_, n)| **n > 0).map(|(c, n)| (c.name().to_string(), json!(n))).collect()
    };
    let (total, active): (u64, u64) = (sizes.parameters.iter().sum(), sizes.active.iter().sum());
    let mut value = json!({
        "model": args.model,
        "family": outline.model_type,
        "runs": runs(outline),
        "layers": outline.layers,
        "width": outline.width,
        "vocab": outline.vocab,
        "max_positions": outline.max_positions,
        "tied": outline.tied,
        "experts": outline.experts.map(|e| json!({
            "count": e.count, "top_k": e.top_k, "width": e.width, "shared_width": e.shared_width, "layers": e.layers,
        })),
        "attention": match outline.attention {
            Heads::Grouped { heads, kv_heads, head_dim } => {
                json!({"kind": "grouped", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim})
            }
            Heads::Latent { heads, kv_rank, q_rank } => {
                json!({"kind": "latent", "heads": heads, "kv_rank": kv_rank, "q_rank": q_rank})
            }
            Heads::Other { heads, kv_heads } => json!({"kind": "other", "heads": heads, "kv_heads": kv_heads}),
        },
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
        "tensor_parallel": outline.tensor_parallel(expert_group(weights)),
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
