//! `moe quantize`: a plan from headers alone, then one pass over the weights.

use super::{Interrupt, Status, UserError, measure};
use crate::artifact::config::Caveat;
use crate::artifact::inventory::Inventory;
use crate::artifact::manifest::{Action, Manifest, Recipe};
use crate::artifact::plan::{self, Choice, Plan};
use crate::artifact::writer;
use crate::cli::QuantizeArgs;
use crate::files::{self, Existing, FileError};
use crate::ids::{Component, Role, TensorId};
use crate::model::family;
use crate::profile::precision::{Decisions, Profile, Rule, decide};
use crate::quant::round::Method;
use crate::report::{self, Out};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Below this the working memory of threads counts for more than the weights.
const LEAST_MEMORY: u64 = 16 << 20;

/// Runs the command.
pub fn quantize(args: &QuantizeArgs, out: Out) -> Result<Status> {
    let request = Request::resolve(args)?;
    let weights = Inventory::open(&args.model)?;
    let decisions = decide(weights.tensors(), weights.outline().tied, &request.overrides, &request.profile);
    let choose = |id| choice(&decisions, id);
    let plan = plan::plan(&weights, choose, request.shard_bytes)?;
    let problems = problems(args, &plan, &decisions);
    if args.dry_run || problems.is_empty() {
        show_plan(args, &weights, &request, &plan, &decisions, out)?;
    }
    if !problems.is_empty() {
        return Err(refusal(problems));
    }
    if args.dry_run {
        return Ok(Status::Done);
    }
    let interrupt = Interrupt::install()?;
    let read = AtomicU64::new(0);
    let started = Instant::now();
    let bar = out.bytes(plan.totals.source_bytes, "quantize");
    let written = writer::write(writer::Job {
        weights: &weights,
        plan: &plan,
        recipe: request.recipe(args),
        method: request.method,
        positive_scales: args.positive_scales,
        output: &args.output,
        existing: if args.force { Existing::Replace } else { Existing::Refuse },
        resume: args.resume,
        max_memory: request.max_memory,
        write_delay: Duration::from_millis(args.write_delay),
        stopped: &|| interrupt.pressed(),
        resumed: &|finished, total, saved| {
            out.note(format!("resuming with {finished} of {total} weight files done"));
            bar.advance(saved);
        },
        progress: &|n| {
            read.fetch_add(n, Ordering::Relaxed);
            bar.advance(n);
        },
    });
    bar.finish();
    let manifest = written?;
    show_result(args, &manifest, read.into_inner(), started.elapsed().as_secs_f64(), out)?;
    Ok(Status::Done)
}

/// What was typed, understood.
struct Request {
    profile: Profile,
    overrides: Vec<Rule>,
    method: Method,
    shard_bytes: u64,
    max_memory: u64,
}

impl Request {
    fn resolve(args: &QuantizeArgs) -> Result<Self> {
        if let Some(n) = args.group_size.filter(|n| ![32, 64, 128].contains(n)) {
            return Err(UserError::new(format!("`--group-size` is {n}, expected 32, 64 or 128")).into());
        }
        let profile = load_profile(&args.profile)?;
        let profile = args.group_size.into_iter().fold(profile, Profile::with_group);
        let overrides = args.set.iter().map(|s| Rule::parse(s).with_context(|| format!("`--set {s}`"))).collect::<Result<_>>()?;
        let method: Method = args
            .method
            .parse()
            .map_err(|_| UserError::new(format!("there is no method `{}`", args.method)).hint("methods are search and absmax"))?;
        let shard_bytes = measure::bytes(&args.shard_size).context("`--shard-size`")?;
        if shard_bytes == 0 {
            return Err(UserError::new("`--shard-size` is 0, expected a size such as 5GB").into());
        }
        let max_memory = measure::bytes(&args.max_memory).context("`--max-memory`")?;
        if max_memory < LEAST_MEMORY {
            return Err(UserError::new(format!("`--max-memory` is {}, expected at least 16MiB", args.max_memory)).into());
        }
        Ok(Self { profile, overrides, method, shard_bytes, max_memory })
    }

    fn recipe(&self, args: &QuantizeArgs) -> Recipe {
        Recipe {
            profile: self.profile.name.clone(),
            overrides: self.overrides.iter().map(Rule::to_string).collect(),
            group_size: args.group_size,
            method: args.method.clone(),
            positive_scales: args.positive_scales,
            scale_dtype: String::new(),
        }
    }
}

/// A built-in profile by name, or a file by path.
pub fn load_profile(name: &str) -> Result<Profile> {
    if Profile::names().contains(&name) || !(name.ends_with(".toml") || name.contains(['/', '\\'])) {
        return Ok(Profile::built_in(name)?);
    }
    let text =
        String::from_utf8(files::read(Path::new(name))?).map_err(|_| UserError::new(format!("`{name}` is not UTF-8 text")))?;
    Ok(Profile::parse(name, &text)?)
}

/// The decision for a tensor in the words of the writer.
pub fn choice(decisions: &Decisions, id: TensorId) -> Choice {
    let decision = decisions.get(id);
    Choice { format: decision.format, reason: decision.reason.map(|r| r.to_string()) }
}

/// Everything that stands in the way, found before the first byte is written.
fn problems(args: &QuantizeArgs, plan: &Plan, decisions: &Decisions) -> Vec<anyhow::Error> {
    let mut problems: Vec<anyhow::Error> = decisions.problems.iter().map(|p| UserError::new(p.clone()).into()).collect();
    let disjoint = files::check_disjoint(&args.model, &args.output);
    let exists = args.output.symlink_metadata().is_ok() && !args.force;
    match disjoint {
        Err(e) => problems.push(e.into()),
        Ok(()) if exists => problems.push(FileError::Exists { path: args.output.clone() }.into()),
        Ok(()) => {}
    }
    problems.extend(writer::check_space(plan, &args.output).err().map(Into::into));
    problems
}

/// One error for all problems; a single one keeps its own cure.
fn refusal(mut problems: Vec<anyhow::Error>) -> anyhow::Error {
    if problems.len() == 1 {
        return problems.remove(0);
    }
    let lines: Vec<String> = problems.iter().map(|e| format!("\n  {e:#}")).collect();
    let hints: Vec<String> = problems.iter().filter_map(super::hint).collect();
    let error = UserError::new(format!("{} problems:{}", lines.len(), lines.concat()));
    if hints.is_empty() { error.into() } else { error.hint(hints.join("; ")).into() }
}

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

fn show_plan(
    args: &QuantizeArgs,
    weights: &Inventory,
    request: &Request,
    plan: &Plan,
    decisions: &Decisions,
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
        out.json(&json!({
            "dry_run": true, "model": args.model, "output": args.output, "family": weights.outline().model_type,
            "recipe": request.recipe(args), "classes": classes, "totals": totals, "readers": readers(plan), "caveats": caveats,
            "warnings": decisions.warnings, "shards": plan.shards.iter().map(|s| json!({"name": s.name, "bytes": s.bytes})).collect::<Vec<_>>(),
        }))?;
    }
    for warning in decisions.warnings.iter().chain(&caveats) {
        out.warn(warning);
    }
    if out.quiet && !args.dry_run {
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

fn show_result(args: &QuantizeArgs, manifest: &Manifest, read: u64, seconds: f64, out: Out) -> Result<()> {
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
