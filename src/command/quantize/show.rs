//! What `moe quantize` prints: the plan before, the result after.

use super::Request;
use super::allocate::Offer;
use crate::artifact::config::Caveat;
use crate::artifact::inventory::Inventory;
use crate::artifact::manifest::{Action, Manifest};
use crate::artifact::plan::Plan;
use crate::cli::QuantizeArgs;
use crate::ids::{Component, Role};
use crate::model::family;
use crate::profile::precision::Decisions;
use crate::report::{self, Out};
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A line of the plan: tensors of one role that are treated alike.
struct Line {
    component: &'static str,
    role: String,
    tensors: usize,
    format: String,
    bytes: [u64; 2],
    note: String,
}

fn lines(weights: &Inventory, plan: &Plan) -> Vec<Line> {
    let mut roles: BTreeMap<String, (Component, Role)> = BTreeMap::new();
    for (id, _) in weights.tensors() {
        roles.insert(class(&id.to_string()), (id.role.component(), id.role));
    }
    let mut lines: Vec<(usize, Role, Line)> = Vec::new();
    for row in &plan.rows {
        let (component, class) = match row.id.as_deref() {
            Some(id) => (roles.get(&class(id)).copied(), class(id)),
            None => (None, "other".into()),
        };
        let order = component.and_then(|(c, _)| Component::ALL.iter().position(|x| *x == c)).unwrap_or(Component::ALL.len());
        let role = component.map_or(Role::Head, |(_, r)| r);
        let component = component.map_or("other", |(c, _)| c.name());
        let class = if component == "norms" { "norms".to_string() } else { class };
        let action = if row.action == Action::Dropped { "dropped" } else { row.format.as_str() };
        let note = row.reason.clone().unwrap_or_default();
        match lines.iter_mut().find(|(_, _, l)| l.role == class && l.format == action && l.note == note) {
            Some((_, _, line)) => {
                line.tensors += row.tensors;
                line.bytes[0] += row.source_bytes;
                line.bytes[1] += row.bytes;
            }
            None => {
                let bytes = [row.source_bytes, row.bytes];
                let line = Line { component, role: class, tensors: row.tensors, format: action.into(), bytes, note };
                lines.push((order, role, line));
            }
        }
    }
    lines.sort_by_key(|(order, role, _)| (*order, *role));
    lines.into_iter().map(|(_, _, line)| line).collect()
}

/// An id without layer and expert, e.g. `experts.gate`.
fn class(id: &str) -> String {
    id.split('.')
        .filter(|part| !part.chars().all(|c| c.is_ascii_digit() || c == '*') && *part != "layers")
        .collect::<Vec<_>>()
        .join(".")
}

pub(super) fn show_plan(
    args: &QuantizeArgs,
    weights: &Inventory,
    request: &Request,
    plan: &Plan,
    decisions: &Decisions,
    offer: Option<&Offer>,
    out: Out,
) -> Result<()> {
    let totals = &plan.totals;
    let lines = lines(weights, plan);
    let caveats: Vec<String> = plan.caveats.iter().map(Caveat::to_string).collect();
    if args.dry_run {
        let classes: Vec<Value> = lines
            .iter()
            .map(|l| json!({"component": l.component, "class": l.role, "tensors": l.tensors, "format": l.format, "source_bytes": l.bytes[0], "bytes": l.bytes[1], "reason": l.note}))
            .collect();
        let choices: Option<Vec<Value>> = offer.map(|o| {
            let row = |(kind, items, formats, [least, most]): (&str, usize, Vec<String>, [u64; 2])| {
                json!({"item": kind, "count": items, "choices": formats, "least_bytes": least, "most_bytes": most})
            };
            o.choices().into_iter().map(row).collect()
        });
        out.json(&json!({
            "dry_run": true, "model": args.model, "output": args.output, "family": weights.outline().model_type,
            "recipe": request.recipe(args, None), "classes": classes, "totals": totals, "readers": readers(plan), "caveats": caveats,
            "budget_bytes": offer.map(|o| o.budget), "choices": choices, "warnings": decisions.warnings, "shards": plan.shards.iter().map(|s| json!({"name": s.name, "bytes": s.bytes})).collect::<Vec<_>>(),
        }))?;
    }
    for warning in decisions.warnings.iter().chain(&caveats) {
        out.warn(warning);
    }
    if out.quiet && !args.dry_run {
        return Ok(());
    }
    if let Some(offer) = offer {
        let row = |(kind, items, formats, [least, most]): (&str, usize, Vec<String>, [u64; 2])| {
            vec![kind.into(), items.to_string(), formats.join(" "), report::bytes(least), report::bytes(most)]
        };
        let rows: Vec<Vec<String>> = offer.choices().into_iter().map(row).collect();
        out.line(report::table(&["item", "count", "choices", "least", "most"], &rows));
        out.line(format!(
            "{} parameters: {} -> at most {}, of which {} are fixed",
            report::count(totals.parameters),
            report::bytes(totals.source_bytes),
            report::bytes(offer.budget),
            report::bytes(offer.fixed),
        ));
        return Ok(());
    }
    let rows: Vec<Vec<String>> = lines
        .iter()
        .map(|l| {
            vec![
                l.component.into(),
                l.role.clone(),
                l.tensors.to_string(),
                l.format.clone(),
                report::bytes(l.bytes[0]),
                report::bytes(l.bytes[1]),
                l.note.clone(),
            ]
        })
        .collect();
    out.line(report::table(&["component", "tensor", "count", "format", "before", "after", "note"], &rows));
    out.line(format!(
        "{} parameters: {} -> {}, {:.3} bits per weight, {:.2}x smaller, in {} {}",
        report::count(totals.parameters),
        report::bytes(totals.source_bytes),
        report::bytes(totals.bytes),
        totals.bpw,
        totals.source_bytes as f64 / totals.bytes.max(1) as f64,
        plan.shards.len(),
        if plan.shards.len() == 1 { "file" } else { "files" },
    ));
    out.line(readers(plan));
    Ok(())
}

/// Who can load the artifact.
fn readers(plan: &Plan) -> String {
    let quantized = plan.config.get("quantization_config").is_some();
    match (quantized, plan.caveats.is_empty()) {
        (false, _) => "loads wherever the source does: nothing is quantized".into(),
        (true, true) => "loads in this tool, vLLM, SGLang and transformers >= 5.15".into(),
        (true, false) if plan.caveats.contains(&Caveat::Unchecked) => "see the warnings for readers".into(),
        (true, false) => "loads in this tool; see the warnings for other readers".into(),
    }
}

pub(super) fn show_result(args: &QuantizeArgs, manifest: &Manifest, read: u64, seconds: f64, out: Out) -> Result<()> {
    let totals = &manifest.totals;
    let gb_s = read as f64 / 1e9 / seconds.max(1e-9);
    out.json(&json!({
        "output": args.output, "family": manifest.family, "recipe": manifest.recipe, "totals": totals,
        "shards": manifest.shards, "seconds": seconds, "read_gb_s": gb_s,
    }))?;
    out.line(format!(
        "{}: {}, {:.3} bits per weight, {} at {gb_s:.2} GB/s",
        args.output.display(),
        report::bytes(totals.bytes),
        totals.bpw,
        report::seconds(seconds),
    ));
    if family::FAMILIES.iter().any(|f| f.model_type == manifest.family) {
        out.note(format!("next: moe run {} --prompt \"Once upon a time\"", args.output.display()));
    }
    Ok(())
}
