//! `moe quantize --method importance` and `gptq`: codes chosen with the activations of a calibration text.

use super::Request;
use super::allocate::{self, Offer};
use crate::artifact::manifest::{Calibration, Manifest};
use crate::artifact::plan::Plan;
use crate::artifact::weights::Weights;
use crate::calib::lockstep::Place;
use crate::calib::sets::{self, TaskSet};
use crate::calib::solve::{self, Advance, Module, Outcome, Progress, Task};
use crate::calib::windows::Window;
use crate::cli::{Device, QuantizeArgs};
use crate::command::bench::gpu;
use crate::command::{Interrupt, UserError, measure};
use crate::engine::solver::{Spent, Work};
use crate::files::{self, WorkDir};
use crate::ids::TensorId;
use crate::profile::precision::Decisions;
use crate::quant::format::Format;
use crate::quant::gptq::Loss;
use crate::quant::round;
use crate::report::{self, Out, seconds};
use crate::text::Tokenizer;
use anyhow::Result;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Longest sequence of the calibration text, tokens.
const WINDOW: usize = 512;
/// Fewer task sets than this make a narrow calibration text.
const BROAD: usize = 3;
/// Tokens of each other task on which a narrow text is judged.
const OTHER_TOKENS: usize = 2048;
/// What a run is that a later one may go on from; it must agree to the last value.
const RUN_FILE: &str = "run.json";

/// A calibration text.
pub(super) struct Text {
    pub windows: Vec<Window>,
    pub calibration: Calibration,
}

impl Text {
    /// As many tokens of all sets as were asked for.
    pub fn read(args: &QuantizeArgs, weights: &Weights) -> Result<Self> {
        let tokenizer = measure::tokenizer(&args.model, weights.spec())?;
        let tasks = sets::resolve(&args.calib)?;
        let limit = WINDOW.min(weights.spec().max_positions);
        let windows = in_turn(&tasks, args.calib_tokens, limit, &tokenizer)?;
        let mut digest = Sha256::new();
        windows.iter().flat_map(|w| &w.tokens).for_each(|t| digest.update(t.to_le_bytes()));
        let tokens = windows.iter().map(|w| w.tokens.len()).sum();
        if tokens == 0 {
            return Err(UserError::new("the calibration text has no two tokens").into());
        }
        let tasks = tasks.into_iter().map(|t| t.name).collect();
        Ok(Self { windows, calibration: Calibration { tasks, sha256: crate::artifact::sums::hex(digest.finalize()), tokens } })
    }
}

/// Windows of `limit` tokens, `most` tokens in all, of samples one after the other; the next is always from the set that has
/// given the fewest tokens. A window whose samples are of several sets counts for that of its first token.
fn in_turn(tasks: &[TaskSet], most: usize, limit: usize, tokenizer: &Tokenizer) -> Result<Vec<Window>> {
    let mut stream: Vec<(u32, usize)> = Vec::new();
    let mut given = vec![(0, 0); tasks.len()];
    while stream.len() < most {
        let left = |t: &usize| given[*t].1 < tasks[*t].samples.len();
        let Some(task) = (0..tasks.len()).filter(left).min_by_key(|&t| given[t].0) else { break };
        let tokens = tasks[task].samples[given[task].1].tokens(tokenizer)?;
        given[task] = (given[task].0 + tokens.len(), given[task].1 + 1);
        stream.extend(tokens.into_iter().map(|t| (t, task)));
    }
    stream.truncate(most);
    let window = |piece: &[(u32, usize)]| Window {
        tokens: piece.iter().map(|(t, _)| *t).collect(),
        scored: 1..piece.len(),
        task: piece[0].1,
    };
    Ok(stream.chunks(limit).filter(|p| p.len() > 1).map(window).collect())
}

/// Quantizes with a calibration text, within what is offered of a budget if there is one, and writes the artifact.
pub(super) fn write(
    args: &QuantizeArgs,
    request: &Request,
    weights: &Arc<Weights>,
    decisions: &Decisions,
    plan: &Plan,
    offer: Option<Offer>,
    out: Out,
) -> Result<(Manifest, u64)> {
    let mut text = Text::read(args, weights)?;
    let held = match offer {
        Some(_) => {
            let (kept, held) = allocate::hold_out(std::mem::take(&mut text.windows));
            text.windows = kept;
            held
        }
        None => Vec::new(),
    };
    if args.device == Device::Cuda {
        // Nothing is begun that cannot go on.
        drop(gpu()?);
    }
    let work = WorkDir::open(&args.output)?;
    let run = Run {
        args,
        weights,
        text: &text,
        feedback: request.method.feeds_back(),
        plan,
        max_memory: request.max_memory,
        place: request.place,
        spent: RefCell::default(),
    };
    run.prepare(&work)?;
    let mut report = json!({
        "command": "quantize", "tool": env!("CARGO_PKG_VERSION"), "model": args.model, "artifact": args.output,
        "calibration": text.calibration,
    });
    let (chosen_plan, outcome) = match offer {
        None => (None, run.solve_plan(&work, plan, &|id| decisions.format(id), out)?),
        Some(offer) => {
            let allocated = allocate::allocate(&run, decisions, &held, &work, offer, out)?;
            report["allocation"] = allocated.report;
            let mut anew = Vec::new();
            let mut best: Option<(f64, Plan, Outcome)> = None;
            for finalist in &allocated.finalists {
                let plan = allocate::replan(&run, decisions, &finalist.formats, request.shard_bytes)?;
                let format = |id: TensorId| finalist.formats.get(&id).copied().unwrap_or_else(|| decisions.format(id));
                let outcome = run.solve_plan(&work, &plan, &format, out)?;
                let measured = allocate::measure_whole(&run, &outcome.solved, &held, out)?;
                out.line(format!("{}, codes chosen anew behind its own layers: KLD {measured:.5}", finalist.name));
                anew.push(json!({"name": finalist.name, "measured_kld": measured}));
                if best.as_ref().is_none_or(|(least, ..)| measured < *least) {
                    report["allocation"]["measured_kld"] = json!(measured);
                    report["allocation"]["written"] = json!(finalist.name);
                    best = Some((measured, plan, outcome));
                }
            }
            report["allocation"]["anew"] = json!(anew);
            let (_, plan, outcome) = best.ok_or_else(|| UserError::new("nothing could be allocated"))?;
            (Some(plan), outcome)
        }
    };
    if let Some(others) = run.other_tasks(&outcome, out)? {
        report["other_tasks"] = others;
    }
    let spent = run.spent.borrow();
    report["seconds"] = Work::ALL.iter().zip(spent.iter()).map(|(work, s)| (work.name().to_string(), json!(s))).collect();
    report["error_by_layer"] = by_layer(&outcome.modules);
    report["errors"] = by_kind(&outcome.modules);
    report["modules"] = json!(outcome.modules);
    let chosen = Some((&*outcome.solved, text.calibration.clone()));
    let plan = chosen_plan.as_ref().unwrap_or(plan);
    let written = super::write(args, request, weights, plan, round::Method::Search, chosen, out)?;
    files::write_atomic(&args.output.join("quantize.json"), &serde_json::to_vec_pretty(&report)?)?;
    files::write_atomic(&args.output.join("quantize.html"), report::page::html(&report)?.as_bytes())?;
    work.remove()?;
    Ok(written)
}

/// A format for every tensor.
type Formats<'a> = &'a (dyn Fn(TensorId) -> Format + Sync);

/// What all passes of a run share.
pub(super) struct Run<'a> {
    pub args: &'a QuantizeArgs,
    pub weights: &'a Arc<Weights>,
    pub text: &'a Text,
    pub feedback: bool,
    pub plan: &'a Plan,
    pub max_memory: u64,
    pub place: Place,
    /// Seconds of each kind of work so far.
    pub spent: RefCell<Spent>,
}

impl Run<'_> {
    /// Goes on from what a stopped run has finished, if asked to and if it was the same run; else starts over.
    pub fn prepare(&self, work: &WorkDir) -> Result<()> {
        let shards = self.weights.checkpoint().shards().iter();
        let files = shards.map(|s| Ok(json!({"path": s.path, "stamp": files::stamp(&s.path)?}))).collect::<Result<Vec<_>>>()?;
        let this = json!({
            "tool": env!("CARGO_PKG_VERSION"), "files": files, "calibration": self.text.calibration, "method": self.args.method,
            "positive_scales": self.args.positive_scales, "rows": self.plan.rows, "target": self.args.target(),
            "device": format!("{:?}", self.args.device).to_lowercase(),
        });
        let path = work.path().join(RUN_FILE);
        let found = path.is_file().then(|| files::read(&path)).transpose()?;
        let same = found.as_ref().map(|bytes| serde_json::from_slice::<Value>(bytes).is_ok_and(|v| v == this));
        match (same, self.args.resume, self.args.force) {
            (Some(true), true, _) => return Ok(()),
            (Some(false), true, _) => {
                let message = format!("`{}` was begun with other input or options", work.path().display());
                return Err(UserError::new(message)
                    .hint("undo the change, or pass --force without --resume to start over")
                    .into());
            }
            (Some(_), false, false) => {
                let message = format!("`{}` holds layers of an unfinished run", work.path().display());
                return Err(UserError::new(message).hint("pass --resume to continue it, or --force to start over").into());
            }
            (Some(_), false, true) | (None, ..) => {}
        }
        work.clear()?;
        Ok(files::write_atomic(&path, &serde_json::to_vec(&this)?)?)
    }

    /// With a calibration text of few kinds: a warning, and what the artifact does to texts of the others.
    fn other_tasks(&self, outcome: &Outcome, out: Out) -> Result<Option<Value>> {
        let given = &self.text.calibration.tasks;
        if given.len() >= BROAD {
            return Ok(None);
        }
        let tokenizer = measure::tokenizer(&self.args.model, self.weights.spec())?;
        let others: Vec<TaskSet> = sets::builtin()?.into_iter().filter(|t| !given.contains(&t.name)).collect();
        let mut windows = Vec::new();
        for (i, task) in others.iter().enumerate() {
            let most = OTHER_TOKENS.min(self.args.calib_tokens);
            let found = in_turn(std::slice::from_ref(task), most, WINDOW.min(self.weights.spec().max_positions), &tokenizer)?;
            windows.extend(found.into_iter().map(|w| Window { task: i, ..w }));
        }
        let found = allocate::compare(self, &outcome.solved, &windows, "other tasks", out)?;
        let klds: Vec<(&str, f64)> = others.iter().enumerate().map(|(i, t)| (t.name.as_str(), found.task(i).kld.mean)).collect();
        out.warn(format!(
            "the calibration text is narrow ({}); other tasks may pay for it, see the table (--calib takes several sets)",
            given.join(", ")
        ));
        let rows: Vec<Vec<String>> = klds.iter().map(|(name, kld)| vec![name.to_string(), format!("{kld:.5}")]).collect();
        out.line(report::table(&["other task", "KLD"], &rows));
        Ok(Some(klds.into_iter().map(|(name, kld)| (name.to_string(), json!(kld))).collect::<serde_json::Map<_, _>>().into()))
    }

    /// Chooses codes for one way of storing the model, each layer behind the layers chosen before.
    fn solve_plan(&self, work: &WorkDir, plan: &Plan, format: Formats<'_>, out: Out) -> Result<Outcome> {
        let folder = format!("codes-{}", &measure::sha256(&serde_json::to_vec(&plan.rows)?)[..12]);
        Ok(self.solve(work, &[(&folder, format)], Advance::Solved, out)?.remove(0))
    }

    /// Chooses codes for some ways of storing the model, each filed in its folder.
    pub fn solve(&self, work: &WorkDir, ways: &[(&str, Formats<'_>)], advance: Advance, out: Out) -> Result<Vec<Outcome>> {
        let choices = ways
            .iter()
            .map(|(folder, format)| Ok(solve::Choice { format: *format, dir: work.folder(folder)? }))
            .collect::<Result<Vec<_>>>()?;
        let task = Task {
            weights: self.weights,
            windows: &self.text.windows,
            choices,
            advance,
            feedback: self.feedback,
            positive_scales: self.args.positive_scales,
            scale_dtype: self.plan.scale_dtype,
            max_memory: self.max_memory,
            place: self.place,
        };
        let stop = Interrupt::install()?;
        let bar = out.count(solve::num_passes(&task), "calibrate");
        let started = Instant::now();
        let found = solve::solve(&task, &mut |progress| {
            match progress {
                Progress::Group => bar.advance(1),
                Progress::Part(name, modules, spent) => {
                    out.note(told(name, modules, started.elapsed().as_secs_f64(), spent));
                    let mut sums = self.spent.borrow_mut();
                    sums.iter_mut().zip(spent).for_each(|(sum, new)| *sum += new);
                }
                Progress::Resumed(name) => out.note(format!("{name}: done by an earlier run")),
            }
            !stop.pressed()
        });
        bar.finish();
        Ok(found?)
    }
}

/// One line about a finished part: what error feedback did, and how many tokens its experts saw.
fn told(name: &str, modules: &[Module], elapsed: f64, spent: Spent) -> String {
    let sum = |of: fn(&Module) -> f64| modules.iter().map(of).sum::<f64>();
    let (before, after, whole) = (sum(|m| m.loss.before), sum(|m| m.loss.after), sum(|m| m.loss.whole));
    let experts: Vec<usize> =
        modules.iter().filter(|m| m.id.ends_with("down") && m.id.contains(".experts.")).map(|m| m.tokens).collect();
    let mut text = format!("{name}: {} matrices in {}", modules.len(), seconds(elapsed));
    if whole > 0.0 {
        text += &format!(", relative output error {:.2e} by search, {:.2e} now", before / whole, after / whole);
    }
    if let (Some(least), Some(most)) = (experts.iter().min(), experts.iter().max()) {
        text += &format!(", tokens an expert {least} to {most}");
    }
    let pooled = modules.iter().filter(|m| m.pooled && m.id.ends_with("down")).map(|m| m.id.trim_end_matches(".down"));
    let pooled: Vec<&str> = pooled.collect();
    if !pooled.is_empty() {
        text += &format!(", without tokens of their own: {}", pooled.join(" "));
    }
    let spent = Work::ALL.iter().zip(spent).filter(|(_, s)| *s >= 0.1);
    let spent: Vec<String> = spent.map(|(work, s)| format!("{} {s:.1} s", work.name())).collect();
    if !spent.is_empty() {
        text += &format!(", here {}", spent.join(", "));
    }
    let damped = modules.iter().filter(|m| m.damping > 0.011).count();
    if damped > 0 {
        text += &format!(", {damped} needed more damping");
    }
    text
}

/// A module's layer, kind and the rest of its name, e.g. `3`, `experts.gate`.
fn class(id: &str) -> (Option<usize>, String) {
    let parts: Vec<&str> = id.split('.').collect();
    let layer = parts.get(1).filter(|_| parts[0] == "layers").and_then(|n| n.parse().ok());
    let rest = parts.iter().skip(if layer.is_some() { 2 } else { 0 }).filter(|p| p.parse::<usize>().is_err());
    (layer, rest.copied().collect::<Vec<_>>().join("."))
}

fn by_layer(modules: &[Module]) -> Value {
    let mut sums: BTreeMap<usize, Loss> = BTreeMap::new();
    for m in modules {
        if let Some(layer) = class(&m.id).0 {
            *sums.entry(layer).or_default() += m.loss;
        }
    }
    let row = |(layer, l): (usize, Loss)| json!({"layer": layer, "before": l.before, "after": l.after, "whole": l.whole});
    sums.into_iter().map(row).collect()
}

fn by_kind(modules: &[Module]) -> Value {
    let mut rows: Vec<(String, Vec<&Module>)> = Vec::new();
    for m in modules {
        let (layer, rest) = class(&m.id);
        let name = layer.map_or(rest.clone(), |l| format!("layers.{l}.{rest}"));
        match rows.iter_mut().find(|(n, _)| *n == name) {
            Some((_, members)) => members.push(m),
            None => rows.push((name, vec![m])),
        }
    }
    let row = |(name, members): (String, Vec<&Module>)| {
        let mut loss = Loss::default();
        members.iter().for_each(|m| loss += m.loss);
        let tokens = || members.iter().map(|m| m.tokens);
        json!({
            "name": name, "format": members[0].format, "matrices": members.len(), "before": loss.before, "after": loss.after,
            "whole": loss.whole, "least_tokens": tokens().min(), "most_tokens": tokens().max(),
            "without_tokens": members.iter().filter(|m| m.pooled).map(|m| &m.id).collect::<Vec<_>>(),
        })
    };
    rows.into_iter().map(row).collect()
}
