//! `moe calibrate`: what quantization did to outputs and routers, and whether that is acceptable.

use super::measure::{self, Material};
use super::{Interrupt, Status, UserError, open_model};
use crate::artifact::manifest::{self, Manifest};
use crate::artifact::weights::{Patch, Weights};
use crate::calib::lockstep::{self, Candidate, Comparison};
use crate::calib::metrics::{RouterSummary, Summary};
use crate::calib::windows::Window;
use crate::cli::CalibrateArgs;
use crate::files;
use crate::ids::{Component, LayerId, Part, Role, TensorId};
use crate::quant::format::{Bits, Format, Group};
use crate::report::{Out, bytes, seconds, table};
use anyhow::Result;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Mean router divergence of a layer that fails, nats.
const ROUTER_FAIL: f64 = 0.1;
/// Mean router divergence of a layer that warns, nats.
const ROUTER_WARN: f64 = 0.01;
/// Multiple of the median layer's divergence that warns.
const ROUTER_OUTLIER: f64 = 5.0;
/// Windows on which the noise floor is measured.
const FLOOR_WINDOWS: usize = 2;
/// Tokens of a pass when the noise floor is measured: other sums in another order.
const FLOOR_CHUNK: usize = 8;
/// Windows on which the sensitivity is measured.
const SENSITIVITY_WINDOWS: usize = 8;

const DEFINITIONS: [(&str, &str); 9] = [
    ("perplexity", "exp of the mean -ln p(token) over scored tokens"),
    ("kld", "sum over the vocabulary of p_original ln(p_original / p_artifact), nats, mean over scored tokens"),
    ("same_top1", "share of scored tokens for which both models rank the same token first"),
    ("rms_dp", "root mean square change of the probability of the true token"),
    ("router kl", "the same divergence between softmaxes over all experts, each model on its own hidden state (drifted)"),
    ("router kl local", "the same with both routers on the original's hidden state; 0 when the router is untouched"),
    ("overlap", "experts chosen by both over experts chosen"),
    ("gate mass", "sum over experts chosen by both of the smaller gate, gates normalised to sum 1"),
    ("noise floor", "the original against itself, fed 8 tokens at a time: other orders of summation"),
];

/// Runs the command.
pub fn calibrate(args: &CalibrateArgs, out: Out) -> Result<Status> {
    let report = report(args, out)?;
    out.json(&report)?;
    measure::write_reports(&report, &args.reports)?;
    Ok(if report["verdict"] == "fail" { Status::Crossed } else { Status::Done })
}

/// Measures, prints, records the measurement in the artifact, and returns the report.
pub fn report(args: &CalibrateArgs, out: Out) -> Result<Value> {
    let max_memory = measure::bytes(&args.text.max_memory)?;
    let max_increase = args.max_ppl_increase.as_deref().map(measure::share).transpose()?;
    let place = super::place(args.text.device, args.text.vram_budget.as_deref())?;
    let original = open_model(&args.original)?;
    let artifact = open_model(&args.artifact)?;
    if original.spec() != artifact.spec() {
        let message = format!("`{}` is another model than `{}`", args.artifact.display(), args.original.display());
        return Err(UserError::new(message).hint("give the checkpoint that the artifact was made from").into());
    }
    let tokenizer = measure::tokenizer(&args.original, original.spec())?;
    let limit = original.spec().max_positions;
    let material = match &args.text.text {
        Some(path) => measure::from_text(path, &args.text, &tokenizer, limit)?,
        None => measure::from_tasks(&args.task, args.samples, args.text.max_windows, &tokenizer, limit, out)?,
    };

    let start = std::time::Instant::now();
    let stop = Interrupt::install()?;
    let run = |candidates: &[Candidate], windows: &[Window], label: &str| -> Result<Vec<Comparison>> {
        let progress = out.count(lockstep::num_ticks(&original, windows), label);
        let found = lockstep::compare(&original, candidates, place, windows, max_memory, &mut || {
            progress.advance(1);
            !stop.pressed()
        })?;
        progress.finish();
        Ok(found)
    };
    let whole = |weights: &Arc<Weights>| Candidate { weights: Arc::clone(weights), chunk: usize::MAX };
    let found = run(&[whole(&artifact)], &material.windows, "calibrate")?.remove(0);
    let few = spaced(&material.windows, FLOOR_WINDOWS);
    let floor = run(&[Candidate { weights: Arc::clone(&original), chunk: FLOOR_CHUNK }], &few, "noise floor")?.remove(0);
    let sensitivity = if args.sensitivity {
        let items = items(&original, &artifact);
        let few = spaced(&material.windows, SENSITIVITY_WINDOWS);
        let alone = |i: &Item| original.patched(vec![Patch::Model(Arc::clone(&artifact), i.ids.clone())]);
        let candidates: Vec<Candidate> = items.iter().map(|i| whole(&Arc::new(alone(i)))).collect();
        let found = run(&candidates, &few, "sensitivity")?;
        items.into_iter().zip(found).map(|(item, c)| (item, c.summary().kld.mean)).collect()
    } else {
        Vec::new()
    };

    let summary = found.summary();
    let thresholds = Thresholds { max_kld: args.max_kld, max_increase };
    let judged = judge(&summary, &found.routers, &thresholds, &original, &artifact);
    let mut report = report_of(args, &material, &found, &floor, &sensitivity, &judged);
    report["seconds"] = json!(start.elapsed().as_secs_f64());
    print(&report, &summary, &found, &floor, &material, &sensitivity, &judged, out);
    record(&args.artifact, &report, out)?;
    Ok(report)
}

/// At most `most` windows, evenly spaced.
fn spaced(windows: &[Window], most: usize) -> Vec<Window> {
    let stride = (windows.len() / most).max(1);
    windows.iter().step_by(stride).take(most).cloned().collect()
}

struct Thresholds {
    max_kld: Option<f64>,
    max_increase: Option<f64>,
}

struct Judged {
    verdict: &'static str,
    findings: Vec<String>,
}

/// Compares the measurements with the thresholds; on failure says what to change, in the order that helps.
fn judge(summary: &Summary, routers: &[RouterSummary], limits: &Thresholds, original: &Weights, artifact: &Weights) -> Judged {
    let mut failures = Vec::new();
    let mut warnings = Vec::new();
    let increase = summary.ppl_ratio - 1.0;
    if let Some(most) = limits.max_kld.filter(|&m| summary.kld.mean > m) {
        failures.push(format!("mean KLD {:.5} is above {most}", summary.kld.mean));
    }
    if let Some(most) = limits.max_increase.filter(|&m| increase > m) {
        failures.push(format!("perplexity rose by {:.2} %, more than {:.2} %", 100.0 * increase, 100.0 * most));
    }
    let mut means: Vec<f64> = routers.iter().map(|r| r.kl_mean).collect();
    means.sort_by(f64::total_cmp);
    let median = means.get(means.len() / 2).copied().unwrap_or(0.0);
    for r in routers {
        if r.kl_mean > ROUTER_FAIL {
            failures.push(format!("router of layer {} diverges by {:.4} on average, above {ROUTER_FAIL}", r.layer, r.kl_mean));
        } else if r.kl_mean > ROUTER_WARN || r.kl_mean > ROUTER_OUTLIER * median {
            warnings
                .push(format!("router of layer {} diverges by {:.4} on average, median layer {median:.4}", r.layer, r.kl_mean));
        }
    }
    if summary.kld.mean.is_nan() {
        failures.push("the artifact computes values that are not numbers".into());
    }
    let verdict = if !failures.is_empty() {
        "fail"
    } else if !warnings.is_empty() {
        "warn"
    } else {
        "pass"
    };
    let advice = if failures.is_empty() { Vec::new() } else { advice(routers, original, artifact) };
    Judged { verdict, findings: failures.into_iter().chain(warnings).chain(advice).collect() }
}

fn advice(routers: &[RouterSummary], original: &Weights, artifact: &Weights) -> Vec<String> {
    let mut advice = Vec::new();
    let formats = |role: Role| -> HashSet<Format> {
        let ids = artifact.tensors().iter().filter(|(id, _)| id.role == role && id.part == Part::Weight);
        ids.filter_map(|(id, _)| artifact.format(*id)).collect()
    };
    let coarse = |role: Role| formats(role).iter().any(|f| matches!(f, Format::Int { bits: Bits::Four, .. }));
    if formats(Role::Router).iter().any(|f| *f != Format::Source) {
        advice.push("first: keep routers at source precision (drop the `router` override)".into());
    }
    if coarse(Role::O) {
        advice.push("then: attention output at 8 bits, --set 'layers.*.attn.o=int8'".into());
    }
    if coarse(Role::SharedDown) || coarse(Role::SharedUp) {
        advice.push("then: shared experts at 8 bits, --set 'layers.*.shared.*=int8'".into());
    }
    if formats(Role::ExpertDown).iter().any(|f| matches!(f, Format::Int { bits: Bits::Four, group: Group::Of(n), .. } if *n > 32))
    {
        advice.push("then: smaller groups for experts, --group-size 64 or 32".into());
    }
    let mut jumps: Vec<(f64, usize)> = routers
        .windows(2)
        .map(|w| (w[1].kl_mean - w[0].kl_mean, w[1].layer.saturating_sub(1)))
        .filter(|(j, _)| *j > 0.0)
        .collect();
    jumps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let layers: Vec<String> = jumps.iter().take(3).map(|(_, l)| l.to_string()).collect();
    if !layers.is_empty() && original.spec().layers.len() > 2 {
        advice.push(format!("layers after which routing moves most: {}", layers.join(", ")));
    }
    advice
}

/// A set of tensors that is quantized alone.
struct Item {
    name: String,
    ids: HashSet<TensorId>,
    added_bytes: u64,
}

/// Every quantized component, attention split into q/k/v and o, and every layer's experts.
fn items(original: &Weights, artifact: &Weights) -> Vec<Item> {
    let quantized: Vec<TensorId> = artifact
        .tensors()
        .iter()
        .map(|(id, _)| *id)
        .filter(|id| artifact.format(*id).is_some_and(|f| f != Format::Source))
        .collect();
    let size = |w: &Weights, id: TensorId| w.get(id).map_or(0, |w| w.stored_bytes() as u64);
    let item = |name: String, keep: &dyn Fn(&TensorId) -> bool| {
        let ids: HashSet<TensorId> = quantized.iter().copied().filter(|id| keep(id)).collect();
        let added_bytes = ids.iter().map(|&id| size(original, id).saturating_sub(size(artifact, id))).sum();
        Item { name, ids, added_bytes }
    };
    let mut items = vec![
        item("attention q, k, v".into(), &|id| id.role.component() == Component::Attention && id.role != Role::O),
        item("attention o".into(), &|id| id.role == Role::O),
        item("head".into(), &|id| id.role == Role::Head),
        item("embedding".into(), &|id| id.role == Role::Embed),
    ];
    for component in [Component::Router, Component::Shared, Component::Mlp, Component::Experts] {
        items.push(item(component.name().into(), &|id| id.role.component() == component));
    }
    for l in 0..original.spec().layers.len() {
        let layer = Some(LayerId(l as u32));
        items.push(item(format!("experts of layer {l}"), &|id| id.layer == layer && id.role.component() == Component::Experts));
    }
    items.retain(|i| !i.ids.is_empty());
    items
}

fn report_of(
    args: &CalibrateArgs,
    material: &Material,
    found: &Comparison,
    floor: &Comparison,
    sensitivity: &[(Item, f64)],
    judged: &Judged,
) -> Value {
    let mut report = json!({
        "command": "calibrate",
        "tool": env!("CARGO_PKG_VERSION"),
        "verdict": judged.verdict,
        "findings": judged.findings,
        "original": args.original,
        "artifact": args.artifact,
        "protocol": material.protocol,
        "windows": material.windows.len(),
        "text": material.provenance,
    });
    let merge = |report: &mut Value, from: Value| {
        if let (Some(into), Value::Object(from)) = (report.as_object_mut(), from) {
            into.extend(from);
        }
    };
    merge(&mut report, json!(found.summary()));
    report["kld_histogram"] = histogram(found);
    report["routers"] = json!(found.routers);
    report["hidden_error"] = json!(found.hidden_error);
    let tasks: Map<String, Value> = material
        .tasks
        .iter()
        .enumerate()
        .filter(|(_, name)| !name.is_empty())
        .map(|(i, name)| (name.clone(), json!(found.task(i))))
        .collect();
    report["tasks"] = Value::Object(tasks);
    report["noise_floor"] = json!(floor.summary());
    report["noise_floor"]["routers"] = json!(floor.routers);
    report["noise_floor"]["hidden_error"] = json!(floor.hidden_error);
    report["sensitivity"] = sensitivity
        .iter()
        .map(|(item, kld)| {
            let mb = item.added_bytes as f64 / 1e6;
            json!({"item": item.name, "added_bytes": item.added_bytes, "kld": kld, "kld_per_mb": kld / mb.max(1e-9)})
        })
        .collect();
    report["definitions"] = DEFINITIONS.iter().map(|(k, v)| (k.to_string(), json!(v))).collect::<Map<_, _>>().into();
    report
}

/// Tokens by the decimal logarithm of their divergence, quarter decades from 1e-8 to 100; smaller ones count in the first bin.
fn histogram(found: &Comparison) -> Value {
    const FIRST: f64 = -8.0;
    const BINS: usize = 40;
    let mut counts = [0u64; BINS];
    for s in &found.tokens {
        let bin = ((s.kld.max(1e-300).log10() - FIRST) * 4.0).floor().clamp(0.0, BINS as f64 - 1.0);
        counts[bin as usize] += 1;
    }
    let edges: Vec<f64> = (0..=BINS).map(|i| FIRST + i as f64 / 4.0).collect();
    json!({"edges": edges, "counts": counts.to_vec()})
}

#[allow(clippy::too_many_arguments)]
fn print(
    report: &Value,
    summary: &Summary,
    found: &Comparison,
    floor: &Comparison,
    material: &Material,
    sensitivity: &[(Item, f64)],
    judged: &Judged,
    out: Out,
) {
    let noise = floor.summary();
    let worst = found.routers.iter().max_by(|a, b| a.kl_mean.total_cmp(&b.kl_mean));
    let router = worst.map_or_else(String::new, |r| format!(", routers at most {:.5} (layer {})", r.kl_mean, r.layer));
    out.line(format!(
        "{}: perplexity {:+.2} %, KLD {:.5}, same top token {:.2} %{router}",
        judged.verdict,
        100.0 * (summary.ppl_ratio - 1.0),
        summary.kld.mean,
        100.0 * summary.same_top1
    ));
    judged.findings.iter().for_each(|f| out.line(format!("  {f}")));
    out.line("");
    let k = &summary.kld;
    let rows = vec![
        row("perplexity of the original", format!("{:.4}", summary.perplexity_original), String::new()),
        row(
            "perplexity of the artifact",
            format!("{:.4} +- {:.4}", summary.perplexity, summary.perplexity_stderr),
            String::new(),
        ),
        row("ratio", format!("{:.5} +- {:.5}", summary.ppl_ratio, summary.ppl_ratio_stderr), format!("{:.7}", noise.ppl_ratio)),
        row("KLD mean", format!("{:.5} +- {:.5}", k.mean, k.stderr), format!("{:.1e}", noise.kld.mean)),
        row("KLD median", format!("{:.5}", k.median), format!("{:.1e}", noise.kld.median)),
        row("KLD 90 / 95 %", format!("{:.4} / {:.4}", k.p90, k.p95), format!("{:.1e}", noise.kld.p95)),
        row("KLD 99 / 99.9 %", format!("{:.4} / {:.4}", k.p99, k.p999), format!("{:.1e}", noise.kld.p999)),
        row("KLD max", format!("{:.3}", k.max), format!("{:.1e}", noise.kld.max)),
        row("same top token", format!("{:.2} %", 100.0 * summary.same_top1), format!("{:.2} %", 100.0 * noise.same_top1)),
        row("RMS change of p", format!("{:.3} %", 100.0 * summary.rms_dp), format!("{:.1e} %", 100.0 * noise.rms_dp)),
    ];
    out.line(table(&["output", "measured", "noise floor"], &rows));
    if !found.routers.is_empty() {
        out.line("");
        let rows: Vec<Vec<String>> = found
            .routers
            .iter()
            .map(|r| {
                let noise = floor.routers.iter().find(|f| f.layer == r.layer).map_or(0.0, |f| f.kl_mean);
                vec![
                    r.layer.to_string(),
                    format!("{:.5}", r.kl_mean),
                    format!("{noise:.0e}"),
                    format!("{:.4}", r.kl_p99),
                    format!("{:.2} %", 100.0 * r.kl_above_0_1),
                    format!("{:.1e}", r.kl_local_max),
                    format!("{:.4}", r.overlap),
                    format!("{:.1} %", 100.0 * r.exact_set),
                    format!("{:.1} %", 100.0 * r.top1),
                    format!("{:.4}", r.gate_mass),
                    format!("{:.4}", found.hidden_error.get(r.layer).copied().unwrap_or(0.0)),
                ]
            })
            .collect();
        let header = [
            "router",
            "KL mean",
            "floor",
            "99 %",
            "> 0.1",
            "local max",
            "overlap",
            "same set",
            "same first",
            "gate mass",
            "hidden error",
        ];
        out.line(table(&header, &rows));
    }
    if material.tasks.len() > 1 {
        out.line("");
        let rows: Vec<Vec<String>> = material
            .tasks
            .iter()
            .enumerate()
            .map(|(i, name)| {
                let s = found.task(i);
                vec![
                    name.clone(),
                    s.tokens.to_string(),
                    format!("{:.3}", s.perplexity_original),
                    format!("{:+.2} %", 100.0 * (s.ppl_ratio - 1.0)),
                    format!("{:.5}", s.kld.mean),
                    format!("{:.2} %", 100.0 * s.same_top1),
                ]
            })
            .collect();
        out.line(table(&["task", "tokens", "perplexity", "change", "KLD", "same top"], &rows));
    }
    if !sensitivity.is_empty() {
        out.line("");
        let rows: Vec<Vec<String>> = sensitivity
            .iter()
            .map(|(item, kld)| {
                let mb = item.added_bytes as f64 / 1e6;
                vec![item.name.clone(), bytes(item.added_bytes), format!("{kld:.5}"), format!("{:.2e}", kld / mb.max(1e-9))]
            })
            .collect();
        out.line(table(&["quantized alone", "bytes to undo", "KLD", "KLD a MB"], &rows));
    }
    out.line("");
    out.line(format!("{} tokens in {} windows; {}", summary.tokens, material.windows.len(), material.protocol));
    if let Some(s) = report["seconds"].as_f64() {
        out.note(format!("measured in {}", seconds(s)));
    }
}

fn row(name: &str, value: String, noise: String) -> Vec<String> {
    vec![name.into(), value, noise]
}

/// Records the measurement in the artifact's manifest, where there is one.
fn record(dir: &std::path::Path, report: &Value, out: Out) -> Result<()> {
    let Some(mut manifest) = Manifest::read(dir)? else { return Ok(()) };
    let mut measured = report.clone();
    if let Some(map) = measured.as_object_mut() {
        ["definitions", "kld_histogram"].iter().for_each(|k| drop(map.remove(*k)));
    }
    manifest.measured = Some(measured);
    if let Err(error) = files::write_atomic(&dir.join(manifest::FILE), &manifest.to_bytes()?) {
        out.warn(format!("the measurement was not recorded in the artifact: {error}"));
    }
    Ok(())
}
