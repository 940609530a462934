//! `moe tiers`: what a cache of experts would have served, replayed from a routing trace.
//!
//! Keys of the report, stable: `command`, `tool`, `model`, `trace`, `tokens`, `layers`, `experts`, `top_k`, `profiled`, `answer`,
//! `replay[].{budget, budget_bytes, fraction, slots, slots_least, slots_most, slot_bytes, policies.<policy>.{hit_rate,
//! bytes_per_tok, misses_over_belady}}`, `definitions`, `seconds`.

use super::{Interrupt, Status, UserError, measure, memory, open_model, shape};
use crate::calib::routing;
use crate::calib::trace::TraceReader;
use crate::cli::{MemoryArgs, TiersArgs};
use crate::engine::cuda::budget;
use crate::files;
use crate::report::{self, Out, bytes, table};
use crate::tiers::policy::MAX_SHIFT;
use crate::tiers::{Cache, Layer, Needs, Policy, slots_per_layer};
use anyhow::{Context, Result};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::io::{Read, Seek};

const DEFINITIONS: [(&str, &str); 5] = [
    (
        "replay",
        "every token decoded alone, texts one after the other, tasks taking turns; caches are filled at the start and never emptied",
    ),
    ("hit_rate", "visits to experts in a slot over all visits; a token visits K experts in every layer with a router"),
    ("bytes_per_tok", "bytes of the experts that had to be fetched, for each token"),
    ("misses_over_belady", "misses over those of the policy that knows the future, which no other can fall below"),
    ("static", "the profile's rank decides who leaves: all but the last few slots keep the hot set"),
];

/// Slots of every layer under one budget.
struct Budget {
    /// As it was typed.
    name: String,
    slots: Vec<usize>,
    /// Of the whole model; `None` for a share of the experts.
    vram_bytes: Option<u64>,
}

/// Runs the command.
pub fn tiers(args: &TiersArgs, out: Out) -> Result<Status> {
    let start = std::time::Instant::now();
    let weights = open_model(&args.model)?;
    let typed = MemoryArgs { hot: args.hot.clone(), ..MemoryArgs::default() };
    let options = memory::options(&typed, Some(&args.model), weights.spec(), weights.family())?;
    let needs = match &args.profile {
        Some(profile) => budget::needs_of_spec(weights.spec(), &*shape::formats(profile)?, &options),
        None => budget::needs_of_weights(&weights, &options),
    };
    let file = std::io::BufReader::new(files::open(&args.trace)?);
    let mut trace = TraceReader::new(file).map_err(|e| UserError::new(format!("`{}` is {e}", args.trace.display())))?;
    fits(&trace, &needs.layers)?;
    let budgets = budgets(&args.vram_budget, &needs)?;
    let policies = policies(&args.policy, &needs.layers[0])?;
    let misses = replay(&mut trace, &needs.layers, &budgets, &policies, out)
        .with_context(|| format!("cannot replay `{}`", args.trace.display()))?;

    let tokens: usize = trace.samples().iter().map(|s| s.num_tok).sum();
    let mut report = json!({
        "command": "tiers",
        "tool": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "trace": args.trace,
        "tokens": tokens,
        "layers": trace.shape.layers,
        "experts": trace.shape.experts,
        "top_k": trace.shape.top_k,
        "profiled": needs.layers.iter().any(Layer::is_profiled),
        "replay": budgets.iter().zip(&misses).map(|(b, m)| row(b, m, &policies, &needs.layers, tokens)).collect::<Vec<_>>(),
        "definitions": DEFINITIONS.iter().map(|(k, v)| (k.to_string(), json!(v))).collect::<Map<_, _>>(),
        "seconds": start.elapsed().as_secs_f64(),
    });
    report["answer"] = json!(answer(&report));
    measure::write_reports(&report, &args.reports)?;
    out.json(&report)?;
    print(&report, out);
    Ok(Status::Done)
}

/// Checks that a trace is of this model.
fn fits<R: Read + Seek>(trace: &TraceReader<R>, layers: &[Layer]) -> Result<(), UserError> {
    let shape = trace.shape;
    let alike = |l: &Layer| (l.experts, l.top_k) == (shape.experts, shape.top_k);
    if layers.len() == shape.layers && layers.iter().all(alike) {
        return Ok(());
    }
    let of = |layers: usize, experts: usize, k: usize| format!("{layers} layers that choose {k} of {experts} experts");
    let model = layers.first().map_or("no layer with experts".into(), |l| of(layers.len(), l.experts, l.top_k));
    let trace = of(shape.layers, shape.experts, shape.top_k);
    Err(UserError::new(format!("the trace has {trace}, the model {model}")).hint("give the model that the trace was made with"))
}

fn budgets(typed: &[String], needs: &Needs) -> Result<Vec<Budget>> {
    let layers = &needs.layers;
    let all: u64 = layers.iter().map(|l| l.experts as u64 * l.slot_bytes).sum();
    let share = |name: String, share: f64| -> Result<Budget> {
        let slots = slots_per_layer(layers, (share * all as f64) as u64).map_err(|e| {
            let least = 100.0 * e.smallest_bytes as f64 / all.max(1) as f64;
            UserError::new(format!("`{name}` of the experts does not hold one token's in every layer"))
                .hint(format!("the least is {:.1}%", (10.0 * least).ceil() / 10.0))
        })?;
        Ok(Budget { name, slots, vram_bytes: None })
    };
    if typed.is_empty() {
        return Ok((1..10).filter_map(|n| share(format!("{}%", 10 * n), n as f64 / 10.0).ok()).collect());
    }
    let budget = |name: &String| match name.strip_suffix('%') {
        Some(_) => share(name.clone(), measure::share(name)?),
        None => {
            let plan = memory::offline(needs, measure::bytes(name)?, u64::MAX)?;
            Ok(Budget { name: name.clone(), vram_bytes: Some(plan.budget_bytes), slots: plan.slots })
        }
    };
    typed.iter().map(budget).collect()
}

fn policies(typed: &[String], layer: &Layer) -> Result<Vec<(String, Policy)>, UserError> {
    let all = Policy::all(layer.experts, layer.top_k);
    if typed.is_empty() {
        return Ok(all.into_iter().map(|p| (p.name().into(), p)).collect());
    }
    let parse = |name: &String| {
        let shift = name.strip_prefix("lrfu:").and_then(|s| s.parse().ok()).filter(|s| (1..=MAX_SHIFT).contains(s));
        let named = all.into_iter().find(|p| p.name() == name);
        named.or(shift.map(|shift| Policy::Lrfu { shift })).map(|p| (name.clone(), p)).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|p| p.name()).collect();
            UserError::new(format!("there is no policy `{name}`"))
                .hint(format!("policies are {}, and lrfu:1 to lrfu:{MAX_SHIFT}", names.join(", ")))
        })
    };
    typed.iter().map(parse).collect()
}

/// Misses of each budget, policy and layer.
fn replay<R: Read + Seek>(
    trace: &mut TraceReader<R>,
    layers: &[Layer],
    budgets: &[Budget],
    policies: &[(String, Policy)],
    out: Out,
) -> Result<Vec<Vec<Vec<u64>>>> {
    let k = trace.shape.top_k;
    let mut caches: Vec<Vec<(Cache, u64)>> = layers
        .iter()
        .enumerate()
        .map(|(l, layer)| {
            let of = |b: &Budget| policies.iter().map(|(_, p)| (Cache::new(*p, layer, b.slots[l]), 0)).collect::<Vec<_>>();
            budgets.iter().flat_map(of).collect()
        })
        .collect();
    let tasks: Vec<usize> = trace.samples().iter().map(|s| s.task).collect();
    let progress = out.count(tasks.len() as u64, "replay");
    let stop = Interrupt::install()?;
    for i in routing::taking_turns(&tasks) {
        let ids = trace.sample(i).map_err(|e| UserError::new(e.to_string()))?.ids;
        caches.par_iter_mut().enumerate().for_each(|(l, caches)| {
            for token in ids.chunks_exact(layers.len() * k) {
                let chosen = &token[l * k..(l + 1) * k];
                caches.iter_mut().for_each(|(cache, misses)| *misses += (k - cache.step(chosen)) as u64);
            }
        });
        progress.advance(1);
        if stop.pressed() {
            anyhow::bail!("interrupted");
        }
    }
    progress.finish();
    let of = |b: usize, p: usize| caches.iter().map(|c| c[b * policies.len() + p].1).collect();
    Ok((0..budgets.len()).map(|b| (0..policies.len()).map(|p| of(b, p)).collect()).collect())
}

/// One budget of the report; `misses` are `[policies][layers]`.
fn row(budget: &Budget, misses: &[Vec<u64>], policies: &[(String, Policy)], layers: &[Layer], tokens: usize) -> Value {
    let visits: u64 = layers.iter().map(|l| (tokens * l.top_k) as u64).sum();
    let (slots, all) = (budget.slots.iter().sum::<usize>(), layers.iter().map(|l| l.experts).sum::<usize>());
    let sum = |m: &[u64]| m.iter().sum::<u64>();
    let oracle = policies.iter().zip(misses).find(|(p, _)| p.1 == Policy::Belady).map(|(_, m)| sum(m));
    let of = |m: &Vec<u64>| {
        let fetched: u64 = m.iter().zip(layers).map(|(n, l)| n * l.slot_bytes).sum();
        json!({
            "hit_rate": 1.0 - sum(m) as f64 / visits.max(1) as f64,
            "bytes_per_tok": fetched as f64 / tokens.max(1) as f64,
            "misses_over_belady": oracle.filter(|o| *o > 0).map(|o| sum(m) as f64 / o as f64),
        })
    };
    json!({
        "budget": budget.name,
        "budget_bytes": budget.vram_bytes,
        "fraction": slots as f64 / all.max(1) as f64,
        "slots": slots,
        "slots_least": budget.slots.iter().min(),
        "slots_most": budget.slots.iter().max(),
        "slot_bytes": budget.slots.iter().zip(layers).map(|(&n, l)| n as u64 * l.slot_bytes).sum::<u64>(),
        "policies": policies.iter().zip(misses).map(|((name, _), m)| (name.clone(), of(m))).collect::<Map<_, _>>(),
    })
}

/// Budgets of a report, each with its policies by name.
fn rows(report: &Value) -> Vec<(&Value, Vec<(&String, &Value)>)> {
    let budgets = report["replay"].as_array().into_iter().flatten();
    budgets.map(|b| (b, b["policies"].as_object().into_iter().flatten().collect())).collect()
}

/// Which policy hits most, and how often at the first, the middle and the last budget.
fn answer(report: &Value) -> String {
    let rate = |p: &Value| p["hit_rate"].as_f64().unwrap_or_default();
    let rows = rows(report);
    let best = |policies: &[(&String, &Value)]| -> Option<String> {
        let real = policies.iter().filter(|(name, _)| *name != Policy::Belady.name());
        real.max_by(|a, b| rate(a.1).total_cmp(&rate(b.1))).map(|(name, _)| (*name).clone())
    };
    let winners: Vec<Option<String>> = rows.iter().map(|(_, p)| best(p)).collect();
    let wins = |name: &String| winners.iter().flatten().filter(|w| *w == name).count();
    let Some(winner) = winners.iter().flatten().max_by_key(|w| wins(w)) else { return "nothing was replayed".into() };
    let mut shown = vec![0, rows.len() / 2, rows.len() - 1];
    shown.dedup();
    let told = shown.into_iter().filter_map(|i| {
        let (budget, policies) = &rows[i];
        let (_, p) = policies.iter().find(|(name, _)| *name == winner)?;
        Some(format!("{:.1} % at {}", 100.0 * rate(p), budget["budget"].as_str().unwrap_or_default()))
    });
    let told = told.collect::<Vec<_>>().join(", ");
    format!("{winner} hits most at {} of {} budgets: {told}", wins(winner), rows.len())
}

fn print(report: &Value, out: Out) {
    out.line(report["answer"].as_str().unwrap_or_default());
    let from = if report["profiled"] == true { "a list of hot experts" } else { "the first experts: no list is given" };
    out.line(format!("{} tokens, one at a time; slots begin with {from}", report["tokens"]));
    let rows = rows(report);
    let Some((_, policies)) = rows.first() else { return };
    let names: Vec<&str> = policies.iter().map(|(name, _)| name.as_str()).collect();
    let shown = |title: &str, what: &dyn Fn(&Value) -> String| {
        let header: Vec<&str> = ["budget", "experts held"].into_iter().chain(names.iter().copied()).collect();
        let cells: Vec<Vec<String>> = rows
            .iter()
            .map(|(b, policies)| {
                let held = format!("{} ({} to {})", b["slots"], b["slots_least"], b["slots_most"]);
                let first = [b["budget"].as_str().unwrap_or_default().to_string(), held];
                first.into_iter().chain(policies.iter().map(|(_, p)| what(p))).collect()
            })
            .collect();
        out.line(format!("\n{title}"));
        out.line(table(&header, &cells));
    };
    shown("visits that hit", &|p| p["hit_rate"].as_f64().map_or_else(String::new, |x| format!("{:.2} %", 100.0 * x)));
    shown("fetched a token", &|p| p["bytes_per_tok"].as_f64().map_or_else(String::new, |x| bytes(x as u64)));
    if policies.iter().any(|(_, p)| p["misses_over_belady"].is_number()) {
        shown("misses over Belady's", &|p| p["misses_over_belady"].as_f64().map_or_else(String::new, |x| format!("{x:.2}")));
    }
    if let Some(s) = report["seconds"].as_f64() {
        out.note(format!("replayed in {}", report::seconds(s)));
    }
}
