//! `moe quantize`: a plan from headers alone, then one pass over the weights.

mod allocate;
mod calibrated;
mod show;

use super::{Interrupt, Status, UserError, measure};
use crate::artifact::inventory::Inventory;
use crate::artifact::manifest::{Calibration, Manifest, Recipe};
use crate::artifact::plan::{self, Choice, Plan};
use crate::artifact::solved::Solved;
use crate::artifact::weights::Weights;
use crate::artifact::writer;
use crate::calib::lockstep::Place;
use crate::cli::{Device, QuantizeArgs};
use crate::files::{self, Existing, FileError};
use crate::ids::TensorId;
use crate::profile::precision::{Decisions, Profile, Rule, decide};
use crate::quant::format::{Format, Zero};
use crate::quant::round;
use crate::report::Out;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Below this the working memory of threads counts for more than the weights.
const LEAST_MEMORY: u64 = 16 << 20;

/// Runs the command.
pub fn quantize(args: &QuantizeArgs, out: Out) -> Result<Status> {
    let request = Request::resolve(args)?;
    // As a stage among others it leaves the device to those that have a use for it.
    if let (Method::Alone(_), Device::Cuda, false) = (request.method, args.device, out.nested) {
        let error =
            UserError::new(format!("`--method {}` rounds on the processor, it has no use for `--device cuda`", args.method));
        return Err(error.hint("add --method gptq, or drop --device").into());
    }
    let model = match request.method {
        Method::Alone(_) => Model::Tensors(Box::new(Inventory::open(&args.model)?)),
        Method::Calibrated { .. } => Model::Whole(Arc::new(Weights::open(&args.model)?)),
    };
    let weights = model.inventory();
    let decisions = decide(weights.tensors(), weights.outline().tied, &request.overrides, &request.profile);
    let choose = |id| choice(&decisions, id);
    let plan = plan::plan(weights, choose, request.shard_bytes)?;
    let mut problems = problems(args, &plan, &decisions);
    problems.extend(request.without_zero_points(weights, &decisions).err().map(Into::into));
    let offer = match allocate::budget(args, &plan)? {
        Some(budget) => allocate::offer(weights, &plan, &request, &decisions, budget).map_err(|e| problems.push(e)).ok(),
        None => None,
    };
    if args.dry_run || problems.is_empty() {
        show::show_plan(args, weights, &request, &plan, &decisions, offer.as_ref(), out)?;
    }
    if !problems.is_empty() {
        return Err(refusal(problems));
    }
    if args.dry_run {
        return Ok(Status::Done);
    }
    let started = Instant::now();
    let (manifest, read) = match (&model, request.method) {
        (Model::Tensors(weights), method) => write(args, &request, weights, &plan, method.of_weights(), None, out)?,
        (Model::Whole(weights), _) => calibrated::write(args, &request, weights, &decisions, &plan, offer, out)?,
    };
    show::show_result(args, &manifest, read, started.elapsed().as_secs_f64(), out)?;
    Ok(Status::Done)
}

/// What was opened: tensors are enough to round them, and calibration runs the model.
enum Model {
    Tensors(Box<Inventory>),
    Whole(Arc<Weights>),
}

impl Model {
    fn inventory(&self) -> &Inventory {
        match self {
            Model::Tensors(inventory) => inventory,
            Model::Whole(weights) => weights,
        }
    }
}

/// Writes the artifact of a plan; codes and scales chosen before are taken as they are.
fn write(
    args: &QuantizeArgs,
    request: &Request,
    weights: &Inventory,
    plan: &Plan,
    method: round::Method,
    chosen: Option<(&Solved, Calibration)>,
    out: Out,
) -> Result<(Manifest, u64)> {
    let (solved, calibration) = chosen.unzip();
    let interrupt = Interrupt::install()?;
    let bar = out.bytes(plan.totals.source_bytes, "quantize");
    let read = AtomicU64::new(0);
    let written = writer::write(writer::Job {
        weights,
        plan,
        recipe: request.recipe(args, calibration),
        method,
        solved,
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
    Ok((written?, read.into_inner()))
}

/// How codes are chosen.
#[derive(Clone, Copy)]
enum Method {
    /// From the weights alone.
    Alone(round::Method),
    /// With the activations of a calibration text.
    Calibrated { feedback: bool },
}

impl Method {
    /// How what no calibration chose is rounded.
    fn of_weights(self) -> round::Method {
        match self {
            Method::Alone(method) => method,
            Method::Calibrated { .. } => round::Method::Search,
        }
    }

    fn feeds_back(self) -> bool {
        matches!(self, Method::Calibrated { feedback: true })
    }
}

/// What was typed, understood.
struct Request {
    profile: Profile,
    overrides: Vec<Rule>,
    method: Method,
    asym: bool,
    shard_bytes: u64,
    max_memory: u64,
    place: Place,
}

impl Request {
    fn resolve(args: &QuantizeArgs) -> Result<Self> {
        if let Some(n) = args.group_size.filter(|n| ![32, 64, 128].contains(n)) {
            return Err(UserError::new(format!("`--group-size` is {n}, expected 32, 64 or 128")).into());
        }
        let profile = load_profile(&args.profile)?;
        let profile = args.group_size.into_iter().fold(profile, Profile::with_group);
        let profile = if args.asym { profile.with_zero_points() } else { profile };
        let overrides = args.set.iter().map(|s| Rule::parse(s).with_context(|| format!("`--set {s}`"))).collect::<Result<_>>()?;
        let method = match args.method.as_str() {
            "importance" => Method::Calibrated { feedback: false },
            "gptq" => Method::Calibrated { feedback: true },
            alone => Method::Alone(alone.parse().map_err(|_| {
                UserError::new(format!("there is no method `{alone}`")).hint("methods are search, absmax, importance and gptq")
            })?),
        };
        if let (Method::Alone(_), false) = (method, args.calib.is_empty()) {
            let error = UserError::new(format!("`--method {}` uses no calibration text", args.method));
            return Err(error.hint("add --method gptq, or drop --calib").into());
        }
        let shard_bytes = measure::bytes(&args.shard_size).context("`--shard-size`")?;
        if shard_bytes == 0 {
            return Err(UserError::new("`--shard-size` is 0, expected a size such as 5GB").into());
        }
        if let (Method::Alone(_), Some(_)) = (method, args.target()) {
            let error = UserError::new("a budget needs a calibration text to tell what formats do");
            return Err(error.hint("add --method gptq").into());
        }
        let max_memory = measure::bytes(&args.max_memory).context("`--max-memory`")?;
        if max_memory < LEAST_MEMORY {
            return Err(UserError::new(format!("`--max-memory` is {}, expected at least 16MiB", args.max_memory)).into());
        }
        let place = super::place(args.device, args.vram_budget.as_deref())?;
        Ok(Self { profile, overrides, method, asym: args.asym, shard_bytes, max_memory, place })
    }

    /// Zero points are chosen on the processor alone.
    fn without_zero_points(&self, weights: &Inventory, decisions: &Decisions) -> Result<(), UserError> {
        let asks = |id: TensorId| matches!(decisions.format(id), Format::Int { zero: Zero::Point, .. });
        match (self.place, weights.tensors().iter().find(|(id, _)| asks(*id))) {
            (Place::Gpu { .. }, Some((id, _))) => {
                let error = UserError::new(format!("`{id}` is to have zero points, which `--device cuda` does not choose"));
                Err(error.hint("drop --device cuda, or --asym and `:asym`"))
            }
            _ => Ok(()),
        }
    }

    fn recipe(&self, args: &QuantizeArgs, calibration: Option<Calibration>) -> Recipe {
        Recipe {
            profile: self.profile.name.clone(),
            overrides: self.overrides.iter().map(Rule::to_string).collect(),
            group_size: args.group_size,
            asym: self.asym,
            target: args.target(),
            method: args.method.clone(),
            positive_scales: args.positive_scales,
            scale_dtype: String::new(),
            calibration,
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
