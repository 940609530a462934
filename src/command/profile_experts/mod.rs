//! `moe profile-experts`: which experts are hot, and an honest account of what holding them buys.

mod lookahead;
mod report;
mod watch;

pub(super) use watch::Watch;

use super::measure;
use super::{Interrupt, Status, UserError, open_model};
use crate::artifact::hot::{self, HotError, HotExperts, Layer, Model, Task};
use crate::artifact::manifest::{self, Manifest};
use crate::artifact::weights::Weights;
use crate::calib::lockstep;
use crate::calib::routing::{self, Counts, HotSet, LruHits};
use crate::calib::sets::{self, TaskSet};
use crate::calib::trace::{Sample, Shape, Trace};
use crate::calib::windows::{self, Window};
use crate::cli::{ListFormat, ProfileExpertsArgs};
use crate::files;
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use crate::report::{Out, bytes};
use crate::text::Tokenizer;
use anyhow::Result;
use lookahead::Foresight;
use serde_json::{Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Share of each layer's traffic to cover when neither share nor budget is given.
const COVERAGE: f64 = 0.85;
/// One text of this many is held out.
const HOLD_OUT: usize = 4;
/// Pieces that a task of fewer than [`HOLD_OUT`] texts is cut into.
const PIECES: usize = 2 * HOLD_OUT;

/// Texts to run.
struct Material {
    tasks: Vec<Task>,
    windows: Vec<Window>,
    /// Index of each window's text in its task, from 0.
    texts: Vec<usize>,
    /// Whether each window is held out.
    held_out: Vec<bool>,
}

/// What was seen of one model.
struct Observed {
    material: Material,
    trace: Trace,
    /// Gate weights of each window, `[L, E]`.
    weights: Vec<Vec<f32>>,
    /// Maps to the next router, if they were asked for.
    foresight: Option<Foresight>,
}

/// Everything that is reported.
struct Findings {
    /// Of the texts that the list is made from, older counts included.
    fitted: Counts,
    hot: HotSet,
    hot_bytes: u64,
    held_out: Counts,
    lru: LruHits,
    /// By task: all texts, those not held out, those held out.
    by_task: Vec<[Counts; 3]>,
    halves: f64,
    by_samples: Vec<(usize, f64)>,
}

/// How the list is made.
enum Rule {
    Coverage(f64),
    Budget { budget: u64, expert_bytes: Vec<u64> },
}

impl Rule {
    fn apply(&self, counts: &Counts) -> Result<HotSet, UserError> {
        match self {
            Rule::Coverage(target) => Ok(routing::by_coverage(counts, *target)),
            Rule::Budget { budget, expert_bytes } => routing::by_budget(counts, *budget, expert_bytes).map_err(|e| {
                let (have, need) = (bytes(e.budget), bytes(e.needed));
                let what = format!("`--budget` is {have}; {} experts in each of {} layers take {need}", e.top_k, e.layers);
                UserError::new(what).hint(format!("a token visits {} experts a layer; give --budget {}", e.top_k, e.needed))
            }),
        }
    }
}

/// Runs the command.
pub fn profile_experts(args: &ProfileExpertsArgs, out: Out) -> Result<Status> {
    let report = profile(args, out)?;
    measure::write_reports(&report, &args.reports)?;
    out.json(&report)?;
    Ok(Status::Done)
}

/// Profiles, writes the list and the trace, prints, and returns the report.
pub fn profile(args: &ProfileExpertsArgs, out: Out) -> Result<Value> {
    let max_memory = measure::bytes(&args.max_memory)?;
    let budget = args.budget.as_deref().map(measure::bytes).transpose()?;
    let target = args.coverage.unwrap_or(COVERAGE);
    if !(target > 0.0 && target <= 1.0) {
        return Err(UserError::new(format!("`--coverage` is {target}, expected a share above 0, at most 1")).into());
    }
    if !(0.0..=1.0).contains(&args.decay) {
        return Err(UserError::new(format!("`--decay` is {}, expected 0 to 1", args.decay)).into());
    }
    let place = super::place(args.device, args.vram_budget.as_deref())?;
    let weights = open_model(&args.model)?;
    let (shape, layers) = shape(&weights, &args.model)?;
    let model = identity(&args.model, &weights)?;
    let list = list_path(args);
    check_outputs(args, &list)?;
    let old = args.merge.as_deref().map(|path| read_old(path, &weights, &model, "--merge")).transpose()?;
    let expert_bytes = expert_bytes(&weights, shape, &layers);
    let rule = match budget {
        Some(budget) => Rule::Budget { budget, expert_bytes: expert_bytes.clone() },
        None => Rule::Coverage(target),
    };
    rule.apply(&Counts::new(shape))?;
    let tokenizer = measure::tokenizer(&args.model, weights.spec())?;
    let material = material(args, &tokenizer, weights.spec().max_positions, out)?;

    let start = std::time::Instant::now();
    let foresight = || Foresight::new(&weights, shape.top_k, &material.windows, &material.held_out, max_memory);
    let foresight = args.lookahead.is_some().then(foresight).transpose()?;
    let observed = observe(&weights, place, material, foresight, shape, layers, max_memory, out)?;
    let found = analyse(&observed, &rule, old.as_ref(), args.decay, &expert_bytes)?;
    let written = hot_list(&observed, &found, model, &rule, old.as_ref(), args.decay, &weights);
    let mut report = report::value(args, &observed, &found, &rule, &list);
    report["seconds"] = json!(start.elapsed().as_secs_f64());

    if let Some(path) = &args.trace {
        files::write_atomic(path, &observed.trace.to_bytes())?;
    }
    if let (Some(path), Some(foresight)) = (&args.lookahead, &observed.foresight) {
        foresight.maps.write(path)?;
    }
    match args.format {
        ListFormat::Moe => written.write(&list)?,
        ListFormat::Sglang => files::write_atomic(&list, &serde_json::to_vec(&logical_count(&written, &weights))?)?,
    }
    report::print(&report, &observed, &found, &rule, &list, out);
    Ok(report)
}

/// Dimensions of the routers, and the layers that have one.
fn shape(weights: &Weights, dir: &Path) -> Result<(Shape, Vec<u32>), UserError> {
    let routers = weights.spec().routers().map(|(l, router)| (l, router.experts, router.top_k));
    let routers: Vec<(u32, usize, usize)> = routers.collect();
    let Some(&(_, experts, top_k)) = routers.first() else {
        return Err(UserError::new(format!("`{}` has no layer with experts", dir.display())));
    };
    if routers.iter().any(|&(_, e, k)| (e, k) != (experts, top_k)) || experts > 1 << 16 {
        return Err(UserError::new(format!("`{}` has routers of different sizes", dir.display())));
    }
    Ok((Shape { layers: routers.len(), experts, top_k }, routers.into_iter().map(|(l, ..)| l).collect()))
}

/// Which model the list is of; an artifact answers for the checkpoint it was made from, so that both share a list.
fn identity(dir: &Path, weights: &Weights) -> Result<Model> {
    if let Some(manifest) = Manifest::read(dir)? {
        let config = manifest.source.files.into_iter().find(|f| f.name == "config.json");
        if let Some(config) = config {
            return Ok(Model { name: manifest.source.name, config_sha256: config.sha256 });
        }
    }
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
    let name = absolute.file_name().map(|n| n.to_string_lossy().to_string()).unwrap_or_default();
    Ok(Model { name, config_sha256: measure::sha256(weights.checkpoint().config_bytes()) })
}

/// Where the list goes.
fn list_path(args: &ProfileExpertsArgs) -> PathBuf {
    let in_artifact = args.model.join(manifest::FILE).exists();
    match (&args.output, args.format) {
        (Some(path), _) => path.clone(),
        (None, ListFormat::Sglang) => "logical_count.json".into(),
        (None, ListFormat::Moe) if in_artifact => args.model.join(hot::FILE),
        (None, ListFormat::Moe) => hot::FILE.into(),
    }
}

/// Finds out before the work whether its results have a place.
fn check_outputs(args: &ProfileExpertsArgs, list: &Path) -> Result<(), UserError> {
    let reports = &args.reports;
    let others = [&args.trace, &args.lookahead, &reports.html, &reports.md, &reports.csv].into_iter().flatten();
    let mut seen: Vec<PathBuf> = Vec::new();
    for path in [list, reports.report.as_path()].into_iter().chain(others.map(PathBuf::as_path)) {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        if absolute.is_dir() {
            return Err(UserError::new(format!("`{}` is a directory, expected a file to write", path.display())));
        }
        if absolute.parent().is_some_and(|p| !p.is_dir()) {
            return Err(
                UserError::new(format!("`{}` is in a directory that does not exist", path.display())).hint("create it first")
            );
        }
        if seen.contains(&absolute) {
            return Err(UserError::new(format!("two results would be written to `{}`", path.display())));
        }
        seen.push(absolute);
    }
    Ok(())
}

/// An older list of the same model.
fn read_old(path: &Path, weights: &Weights, model: &Model, option: &str) -> Result<HotExperts> {
    let cure = || format!("{option} takes a hot_experts.json of this model");
    let read = || -> Result<HotExperts, HotError> {
        let old = HotExperts::read(path)?;
        old.check_model(path, weights.spec(), &weights.family().names)?;
        Ok(old)
    };
    let old = read().map_err(|e| match e {
        HotError::File(e) => anyhow::Error::from(e),
        e => UserError::new(e.to_string()).hint(cure()).into(),
    })?;
    if old.model.config_sha256 != model.config_sha256 {
        let message = format!("`{}` was made with another `config.json`, of `{}`", path.display(), old.model.name);
        return Err(UserError::new(message).hint(cure()).into());
    }
    Ok(old)
}

/// Bytes of every expert, `[L, E]`.
fn expert_bytes(weights: &Weights, shape: Shape, layers: &[u32]) -> Vec<u64> {
    let bytes = |id| weights.get(id).map_or(0, |w| w.stored_bytes() as u64);
    let expert = |l, e| {
        let id = |role| TensorId::expert(LayerId(l), ExpertId(e), role);
        [Role::ExpertGate, Role::ExpertUp, Role::ExpertDown].into_iter().map(|role| bytes(id(role))).sum()
    };
    layers.iter().flat_map(|&l| (0..shape.experts as u32).map(move |e| expert(l, e))).collect()
}

/// Windows of the task sets. Texts longer than the model's context are split, and tasks of few texts are cut into pieces so that
/// some can be held out; both are said.
fn material(args: &ProfileExpertsArgs, tokenizer: &Tokenizer, max_positions: usize, out: Out) -> Result<Material> {
    let sets: Vec<TaskSet> = sets::resolve(&args.task)?;
    if args.samples == Some(0) {
        return Err(UserError::new("`--samples` is 0, expected at least 1").into());
    }
    let mut found = Material { tasks: Vec::new(), windows: Vec::new(), texts: Vec::new(), held_out: Vec::new() };
    let mut split = 0;
    for (task, set) in sets.into_iter().enumerate() {
        if found.tasks.iter().any(|t| t.name == set.name) {
            return Err(UserError::new(format!("task `{}` is given twice", set.name))
                .hint("give each set a name of its own")
                .into());
        }
        let texts = set.samples.iter().take(args.samples.unwrap_or(usize::MAX));
        let texts: Vec<Vec<u32>> = texts.map(|s| s.tokens(tokenizer)).collect::<Result<_, _>>()?;
        let num_tok: usize = texts.iter().map(Vec::len).sum();
        let cut = texts.len() < HOLD_OUT;
        let limit = if cut { num_tok.div_ceil(PIECES).clamp(2, max_positions) } else { max_positions };
        let (mut text, first) = (0, found.windows.len());
        for tokens in &texts {
            let pieces = windows::pieces(tokens, task, limit);
            split += (!cut && pieces.len() > 1) as usize;
            let some = !pieces.is_empty();
            for piece in pieces {
                found.windows.push(piece);
                found.texts.push(text);
                text += cut as usize;
            }
            text += (!cut && some) as usize;
        }
        if text < 2 {
            let message = format!("task `{}` has {num_tok} tokens in {} texts, too few to hold some out", set.name, texts.len());
            return Err(UserError::new(message).hint("give more or longer texts").into());
        }
        if cut {
            out.note(format!(
                "task `{}` has {} texts; they were cut into {text} pieces of up to {limit} tokens",
                set.name,
                texts.len()
            ));
        }
        let held = |&i: &usize| i % HOLD_OUT == HOLD_OUT - 1 || (text < HOLD_OUT && i == text - 1);
        let which: Vec<bool> = found.texts[first..].iter().map(held).collect();
        found.held_out.extend(which);
        let tokens: usize = found.windows[first..].iter().map(|w| w.tokens.len()).sum();
        found.tasks.push(Task { name: set.name, samples: texts.len() as u64, tokens: tokens as u64 });
    }
    if split > 0 {
        out.note(format!("{split} samples are longer than the model's {max_positions} tokens and were split"));
    }
    Ok(found)
}

/// Runs all windows through the model and keeps what the routers chose.
#[allow(clippy::too_many_arguments, reason = "what is run, where, and who looks on")]
fn observe(
    weights: &Arc<Weights>,
    place: lockstep::Place,
    material: Material,
    mut foresight: Option<Foresight>,
    shape: Shape,
    layers: Vec<u32>,
    max_memory: u64,
    out: Out,
) -> Result<Observed> {
    let windows = &material.windows;
    let rows: Vec<Range<usize>> = windows::rows(windows).collect();
    let Shape { experts: e, top_k: k, .. } = shape;
    let mut samples: Vec<Sample> =
        windows.iter().map(|w| Sample { task: w.task, ids: vec![0; w.tokens.len() * shape.layers * k] }).collect();
    let mut sums = vec![vec![0.0f32; shape.layers * e]; windows.len()];
    let progress = out.count(weights.spec().layers.len() as u64 * lockstep::num_groups(windows), "profile");
    let stop = Interrupt::install()?;
    let mut on = |choices: lockstep::Choices<'_>| {
        foresight.iter_mut().try_for_each(|f| f.see(&choices))?;
        let Some(l) = layers.iter().position(|&l| l as usize == choices.layer) else { return Ok(()) };
        for (i, (ids, gates)) in choices.experts.chunks_exact(k).zip(choices.gates.chunks_exact(k)).enumerate() {
            let row = choices.first_row + i;
            let w = rows.partition_point(|r| r.end <= row);
            let at = ((row - rows[w].start) * shape.layers + l) * k;
            samples[w].ids[at..at + k].iter_mut().zip(ids).for_each(|(to, &id)| *to = id as u16);
            ids.iter().zip(gates).for_each(|(&id, g)| sums[w][l * e + id as usize] += g);
        }
        Ok(())
    };
    lockstep::observe(weights, place, windows, max_memory, &mut on, &mut || {
        progress.advance(1);
        !stop.pressed()
    })?;
    foresight.iter_mut().try_for_each(Foresight::finish)?;
    progress.finish();
    let tasks = material.tasks.iter().map(|t| t.name.clone()).collect();
    Ok(Observed { trace: Trace { shape, layers, tasks, samples }, weights: sums, foresight, material })
}

impl Observed {
    /// Counts of the windows that `keep` wants.
    fn counts(&self, keep: impl Fn(usize) -> bool) -> Counts {
        let mut counts = Counts::new(self.trace.shape);
        for i in (0..self.trace.samples.len()).filter(|&i| keep(i)) {
            counts.add(&self.trace.samples[i]);
            counts.weights.iter_mut().zip(&self.weights[i]).for_each(|(sum, w)| *sum += *w as f64);
        }
        counts
    }
}

fn analyse(
    observed: &Observed,
    rule: &Rule,
    old: Option<&HotExperts>,
    decay: f64,
    expert_bytes: &[u64],
) -> Result<Findings, UserError> {
    let Observed { material, trace, .. } = observed;
    let shape = trace.shape;
    let held = &material.held_out;
    let now = observed.counts(|i| !held[i]);
    let held_out = observed.counts(|i| held[i]);
    let mut fitted = now.clone();
    if let Some(old) = old {
        fitted.merge(&old_counts(old, shape), decay);
    }
    let hot = rule.apply(&fitted)?;
    let task_of = |i: usize| trace.samples[i].task;
    let by_task = (0..trace.tasks.len())
        .map(|t| {
            let all = observed.counts(|i| task_of(i) == t);
            [all, observed.counts(|i| task_of(i) == t && !held[i]), observed.counts(|i| task_of(i) == t && held[i])]
        })
        .collect();

    let turns = routing::taking_turns(&trace.samples.iter().map(|s| s.task).collect::<Vec<_>>());
    let replay: Vec<&Sample> = turns.iter().filter(|&&i| held[i]).map(|&i| &trace.samples[i]).collect();
    let half = |odd: usize| rule.apply(&observed.counts(|i| material.texts[i] % 2 == odd));
    let halves = routing::overlap(&half(0)?, &half(1)?);

    let fit: Vec<usize> = turns.into_iter().filter(|&i| !held[i]).collect();
    let last = rule.apply(&now)?;
    let mut by_samples = Vec::new();
    let mut growing = Counts::new(shape);
    let mut next = trace.tasks.len();
    for (n, &i) in (1..).zip(&fit) {
        growing.add(&trace.samples[i]);
        if n == next || n == fit.len() {
            by_samples.push((n, routing::jaccard(&rule.apply(&growing)?, &last)));
            next *= 2;
        }
    }
    let e = shape.experts;
    let hot_bytes =
        hot.iter().enumerate().flat_map(|(l, ids)| ids.iter().map(move |&id| expert_bytes[l * e + id as usize])).sum();
    Ok(Findings { lru: routing::lru(shape, &replay), fitted, hot, hot_bytes, held_out, by_task, halves, by_samples })
}

fn old_counts(old: &HotExperts, shape: Shape) -> Counts {
    Counts {
        shape,
        visits: old.layers.iter().flat_map(|l| l.counts.iter().map(|&c| c as f64)).collect(),
        weights: old.layers.iter().flat_map(|l| l.weight_sums.iter().copied()).collect(),
    }
}

/// The list to write. Tasks of an older list stay, worth as much as its counts.
fn hot_list(
    observed: &Observed,
    found: &Findings,
    model: Model,
    rule: &Rule,
    old: Option<&HotExperts>,
    decay: f64,
    weights: &Weights,
) -> HotExperts {
    let Observed { material, trace, .. } = observed;
    let mut tasks: Vec<Task> = material.tasks.clone();
    for (t, task) in tasks.iter_mut().enumerate() {
        let fitted = |i: &usize| trace.samples[*i].task == t && !material.held_out[*i];
        let kept: Vec<usize> = (0..trace.samples.len()).filter(fitted).collect();
        let mut texts: Vec<usize> = kept.iter().map(|&i| material.texts[i]).collect();
        texts.dedup();
        task.samples = texts.len() as u64;
        task.tokens = kept.iter().map(|&i| trace.samples[i].num_tok(trace.shape) as u64).sum();
    }
    for o in old.iter().flat_map(|o| &o.tasks) {
        let faded = |n: u64| (decay * n as f64).round() as u64;
        match tasks.iter_mut().find(|t| t.name == o.name) {
            Some(t) => (t.samples, t.tokens) = (t.samples + faded(o.samples), t.tokens + faded(o.tokens)),
            None => tasks.push(Task { name: o.name.clone(), samples: faded(o.samples), tokens: faded(o.tokens) }),
        }
    }
    let coverage = routing::coverage_by_layer(&found.hot, &found.held_out);
    let target = match rule {
        Rule::Coverage(target) => Some(*target),
        Rule::Budget { .. } => None,
    };
    list_of(&found.fitted, &found.hot, &coverage, &trace.layers, tasks, target, model, weights)
}

/// A list of some counts; `coverage` is by layer.
#[allow(clippy::too_many_arguments, reason = "a list has as many parts")]
fn list_of(
    counts: &Counts,
    hot: &HotSet,
    coverage: &[f64],
    layers: &[u32],
    tasks: Vec<Task>,
    target_coverage: Option<f64>,
    model: Model,
    weights: &Weights,
) -> HotExperts {
    let e = counts.shape.experts;
    let layers: Vec<Layer> = (0..counts.shape.layers)
        .map(|l| Layer {
            layer: layers[l],
            counts: counts.layer(l).iter().map(|c| c.round() as u64).collect(),
            weight_sums: counts.weights[l * e..(l + 1) * e].to_vec(),
            hot: hot[l].iter().map(|&id| id as u32).collect(),
            coverage: coverage[l],
        })
        .collect();
    let hot = hot::modules(&layers, &weights.family().names);
    HotExperts { version: hot::VERSION, model, tasks, target_coverage, layers, hot }
}

/// Counts of every layer of the model, dense ones as zeros: SGLang indexes rows by the model's layers.
fn logical_count(list: &HotExperts, weights: &Weights) -> Value {
    let experts = list.layers.first().map_or(0, |l| l.counts.len());
    let row = |l: usize| match list.layers.iter().find(|x| x.layer as usize == l) {
        Some(layer) => layer.counts.clone(),
        None => vec![0; experts],
    };
    json!({"logical_count": (0..weights.spec().layers.len()).map(row).collect::<Vec<_>>()})
}
