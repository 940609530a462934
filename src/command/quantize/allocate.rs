//! `moe quantize --target-size`: formats chosen under a budget of bytes, by what each does to the model's answers.
//!
//! One pass over the calibration text quantizes everything in every format. What an item does alone is measured once, in one
//! format; its other formats are taken to do damage in proportion to their output error. The cheapest allocations by that sum,
//! and every uniform recipe that fits, are then measured whole. The winner's codes are chosen anew on its own activations; where it
//! is no uniform recipe, so are the best uniform recipe's, and the better of the two is written.

use super::calibrated::Run;
use super::{Request, choice};
use crate::artifact::inventory::Inventory;
use crate::artifact::plan::{self, Choice, Plan};
use crate::artifact::solved::Solved;
use crate::artifact::weights::{Patch, Weights};
use crate::calib::lockstep::{self, Comparison};
use crate::calib::solve::{Advance, Outcome};
use crate::calib::windows::Window;
use crate::cli::QuantizeArgs;
use crate::command::{Interrupt, UserError, measure};
use crate::files::WorkDir;
use crate::ids::{Component, LayerId, Part, Role, TensorId};
use crate::profile::allocate::{self, Infeasible};
use crate::profile::precision::Decisions;
use crate::quant::format::{self, Bits, Format, Zero};
use crate::report::{self, Out};
use crate::tensor::Dtype;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Every how many windows one is kept for measuring.
const HELD_OUT: usize = 8;
/// Most windows on which items are measured alone.
const ALONE_WINDOWS: usize = 8;
/// Most windows on which whole candidates are measured.
const WHOLE_WINDOWS: usize = 24;
/// Candidates besides the uniform one.
const CANDIDATES: usize = 3;
/// What an item may get, coarsest first; the source is always possible.
const OPTIONS: [&str; 6] = ["int4:channel", "int4:g128", "int4:g64", "int4:g32", "int8:channel", "int8:g128"];
/// The format in which an item is measured alone, where it may have it, be it with zero points or without.
const MEASURED: Format = Format::INT4_G128;

/// One of [`OPTIONS`] for items of a kind: four bits with zero points if asked for, but of embeddings, which no reader takes so.
fn option(text: &str, kind: &str, asym: bool) -> Option<Format> {
    let format: Format = text.parse().ok()?;
    let pointed = asym && kind != "embedding" && matches!(format, Format::Int { bits: Bits::Four, .. });
    Some(if pointed { format.with_zero(Zero::Point) } else { format })
}

/// Bytes that all tensors may take.
pub(super) fn budget(args: &QuantizeArgs, plan: &Plan) -> Result<Option<u64>> {
    if let Some(size) = &args.target_size {
        return Ok(Some(measure::bytes(size).context("`--target-size`")?));
    }
    let Some(bpw) = args.target_bpw else { return Ok(None) };
    if !(bpw.is_finite() && bpw > 0.0) {
        return Err(UserError::new(format!("`--target-bpw` is {bpw}, expected for example 4.6")).into());
    }
    let model: u64 = plan.rows.iter().filter(|r| r.id.is_some()).map(|r| r.bytes).sum();
    Ok(Some((bpw * plan.totals.parameters as f64 / 8.0) as u64 + plan.totals.bytes - model))
}

/// Tensors that readers take in one format.
struct Item {
    name: String,
    kind: &'static str,
    ids: Vec<TensorId>,
    /// Format, bytes of all its tensors, predicted divergence.
    options: Vec<(Format, allocate::Choice)>,
}

/// A format for every tensor of an item, and how the report names it.
pub(super) struct Finalist {
    pub name: String,
    pub formats: HashMap<TensorId, Format>,
}

/// What was chosen, and what is known about it.
pub(super) struct Allocated {
    /// The candidate with the least measured divergence first; the best uniform recipe second unless it is the first.
    pub finalists: Vec<Finalist>,
    /// For the report.
    pub report: Value,
}

/// Splits off the windows that candidates are measured on.
pub(super) fn hold_out(windows: Vec<Window>) -> (Vec<Window>, Vec<Window>) {
    let many = windows.len() >= 2 * HELD_OUT;
    let (kept, held): (Vec<_>, Vec<_>) =
        windows.into_iter().enumerate().partition(|(i, _)| !many || i % HELD_OUT != HELD_OUT - 1);
    let kept: Vec<Window> = kept.into_iter().map(|(_, w)| w).collect();
    let held = if many { held.into_iter().map(|(_, w)| w).collect() } else { kept.clone() };
    (kept, held)
}

/// Chooses a format for every tensor that the profile quantizes and no override names.
pub(super) fn allocate(
    run: &Run<'_>,
    decisions: &Decisions,
    held: &[Window],
    work: &WorkDir,
    Offer { mut items, budget, fixed }: Offer,
    out: Out,
) -> Result<Allocated> {
    let budget = budget - fixed;
    let ways = ways(&items);
    let formats: Vec<Box<dyn Fn(TensorId) -> Format + Sync>> = ways
        .iter()
        .map(|(_, map)| Box::new(|id: TensorId| map.get(&id).copied().unwrap_or_else(|| decisions.format(id))) as Box<_>)
        .collect();
    let named: Vec<(&str, _)> = ways.iter().zip(&formats).map(|((name, _), f)| (name.as_str(), &**f)).collect();
    out.note(format!("one pass in {} formats", ways.len()));
    let solved = run.solve(work, &named, Advance::Source, out)?;
    predict(run, &mut items, &ways, &solved, held, out)?;

    let mut tried: Vec<Candidate> = uniform(&items, decisions, budget, run.args.asym);
    let uniform = tried.len();
    for choices in candidates(&items, budget) {
        if tried.iter().all(|t| t.choices != choices) {
            tried.push(Candidate { name: format!("allocation {}", tried.len() - uniform + 1), choices });
        }
    }
    let few: Vec<Window> = held.iter().take(WHOLE_WINDOWS).cloned().collect();
    let patched: Vec<Weights> = tried.iter().map(|t| patched(run.weights, &items, &t.choices, &ways, &solved)).collect();
    let measured = divergence(run, patched, &few, "candidates", out)?;
    let least = |of: std::ops::Range<usize>| of.min_by(|&a, &b| measured[a].total_cmp(&measured[b]));
    let best = least(0..tried.len()).unwrap_or(0);
    let other = least(0..uniform).filter(|&u| u != best);
    let rows: Vec<Row> = tried
        .iter()
        .zip(&measured)
        .map(|(t, &measured)| Row {
            predicted: total(&items, &t.choices, |c| c.cost),
            measured,
            bytes: fixed + total(&items, &t.choices, |c| c.bytes as f64) as u64,
        })
        .collect();
    show(&items, &tried, best, &rows, out);
    let finalists = std::iter::once(best).chain(other).map(|t| tried[t].formats(&items)).collect();
    Ok(Allocated { finalists, report: report_of(&items, &tried, best, &rows, budget + fixed) })
}

/// An allocation to be measured: for each item the index of its option.
struct Candidate {
    name: String,
    choices: Vec<usize>,
}

impl Candidate {
    fn formats(&self, items: &[Item]) -> Finalist {
        let each = items.iter().zip(&self.choices);
        let formats = each.flat_map(|(i, &c)| i.ids.iter().map(move |&id| (id, i.options[c].0))).collect();
        Finalist { name: self.name.clone(), formats }
    }
}

/// What is known of a candidate.
struct Row {
    predicted: f64,
    measured: f64,
    bytes: u64,
}

/// What a budget can be spent on.
pub(super) struct Offer {
    items: Vec<Item>,
    /// Bytes that all tensors may take.
    pub budget: u64,
    /// Bytes of everything else than the items.
    pub fixed: u64,
}

/// The items of a model, if the budget holds the smallest of each.
pub(super) fn offer(weights: &Inventory, plan: &Plan, request: &Request, decisions: &Decisions, budget: u64) -> Result<Offer> {
    let items = items(weights, plan, request, decisions);
    let fixed = plan.totals.bytes - items.iter().map(|i| current(i, decisions, weights, plan)).sum::<u64>();
    let sizes: Vec<Vec<allocate::Choice>> = items.iter().map(|i| i.options.iter().map(|(_, c)| *c).collect()).collect();
    match allocate::allocate(&sizes, budget.saturating_sub(fixed)) {
        Err(Infeasible { smallest }) => Err(infeasible(budget, smallest + fixed, decisions, weights)),
        Ok(_) => Ok(Offer { items, budget, fixed }),
    }
}

impl Offer {
    /// The choices by kind of item, and what they take: name, how many, formats, fewest and most bytes.
    pub fn choices(&self) -> Vec<(&'static str, usize, Vec<String>, [u64; 2])> {
        let mut kinds: Vec<&'static str> = Vec::new();
        for item in &self.items {
            if !kinds.contains(&item.kind) {
                kinds.push(item.kind);
            }
        }
        let row = |kind: &'static str| {
            let members = || self.items.iter().filter(|i| i.kind == kind);
            let mut formats: Vec<String> = Vec::new();
            for (format, _) in members().flat_map(|i| &i.options) {
                if !formats.contains(&format.to_string()) {
                    formats.push(format.to_string());
                }
            }
            let bytes = |i: &'_ Item| i.options.iter().map(|(_, c)| c.bytes).collect::<Vec<_>>();
            let sum = |of: fn(Vec<u64>) -> Option<u64>| members().filter_map(|i| of(bytes(i))).sum();
            (kind, members().count(), formats, [sum(|b| b.into_iter().min()), sum(|b| b.into_iter().max())])
        };
        kinds.into_iter().map(row).collect()
    }
}

fn infeasible(budget: u64, smallest: u64, decisions: &Decisions, weights: &Inventory) -> anyhow::Error {
    let message = format!(
        "{} ({budget} bytes) cannot be reached; the smallest possible is {} ({smallest} bytes)",
        report::bytes(budget),
        report::bytes(smallest)
    );
    let plain = |role| decisions.format(TensorId::global(role)) == Format::Source;
    let hint = if plain(Role::Embed) && plain(Role::Head) && !weights.outline().tied {
        "allow quantized embeddings with --profile compact, or raise the budget"
    } else {
        "raise the budget"
    };
    UserError::new(message).hint(hint).into()
}

/// Layer, kind, and whether an override names it.
type Bundle = (Option<LayerId>, &'static str, bool);

/// Tensors by what readers need in one format; those that are quantized and have no choice form items of one option.
fn items(weights: &Inventory, plan: &Plan, request: &Request, decisions: &Decisions) -> Vec<Item> {
    let mut groups: BTreeMap<Bundle, Vec<(TensorId, [usize; 2])>> = BTreeMap::new();
    for (id, shape) in weights.tensors() {
        let &[rows, cols] = &shape[..] else { continue };
        if id.part == Part::Weight && decisions.format(*id) != Format::Source {
            let pinned = request.overrides.iter().any(|r| r.pattern.matches(&id.to_string()));
            groups.entry((id.layer, kind(id.role), pinned)).or_default().push((*id, [rows, cols]));
        }
    }
    let item = |((layer, kind, pinned), members): (Bundle, Vec<(TensorId, [usize; 2])>)| {
        let wanted: Vec<Format> = match pinned {
            true => vec![decisions.format(members[0].0)],
            false => OPTIONS.iter().filter_map(|o| option(o, kind, request.asym)).chain([Format::Source]).collect(),
        };
        let mut options: Vec<(Format, allocate::Choice)> = Vec::new();
        for format in wanted {
            let fits = members.iter().all(|(_, [_, cols])| format::fit(format, *cols) == format);
            if (fits || pinned) && options.iter().all(|(f, _)| *f != format) {
                let bytes = members.iter().map(|(id, shape)| bytes(weights, plan, *id, *shape, format)).sum();
                options.push((format, allocate::Choice { bytes, cost: 0.0 }));
            }
        }
        let layer = layer.map_or(String::new(), |LayerId(l)| format!("layer {l} "));
        let name = format!("{layer}{kind}{}", if pinned { " (set)" } else { "" });
        Item { name, kind, ids: members.into_iter().map(|(id, _)| id).collect(), options }
    };
    groups.into_iter().map(item).collect()
}

fn kind(role: Role) -> &'static str {
    match (role.component(), role) {
        (_, Role::Q | Role::K | Role::V) => "q, k, v",
        (_, Role::O) => "o",
        (_, Role::Embed) => "embedding",
        (_, Role::Head) => "head",
        (Component::Attention, role) => role.name(),
        (component, _) => component.name(),
    }
}

fn bytes(weights: &Inventory, plan: &Plan, id: TensorId, [rows, cols]: [usize; 2], format: Format) -> u64 {
    match format {
        Format::Source => weights.dtype(id).unwrap_or(Dtype::BF16).bytes(rows * cols) as u64,
        // Rows, columns: two 64-bit numbers.
        _ => format.bytes(rows, cols, plan.scale_dtype) as u64 + 16,
    }
}

/// Bytes that an item takes by the decisions the plan was made of.
fn current(item: &Item, decisions: &Decisions, weights: &Inventory, plan: &Plan) -> u64 {
    let shapes: HashMap<TensorId, &Vec<usize>> = weights.tensors().iter().map(|(id, s)| (*id, s)).collect();
    let one = |id: &TensorId| bytes(weights, plan, *id, [shapes[id][0], shapes[id][1]], decisions.format(*id));
    item.ids.iter().map(one).sum()
}

/// A way of storing every item that may have a format in it.
type Way = (String, HashMap<TensorId, Format>);

fn ways(items: &[Item]) -> Vec<Way> {
    let mut formats: Vec<Format> = items.iter().flat_map(|i| i.options.iter().map(|(f, _)| *f)).collect();
    formats.retain(|f| *f != Format::Source);
    formats.sort();
    formats.dedup();
    let way = |format: Format| {
        let map = items.iter().flat_map(|i| {
            let has = i.options.iter().any(|(f, _)| *f == format);
            i.ids.iter().map(move |&id| (id, if has { format } else { Format::Source }))
        });
        (format.to_string().replace(':', "-"), map.collect())
    };
    formats.into_iter().map(way).collect()
}

/// The way that stores an item in a format.
fn way_of(ways: &[Way], item: &Item, format: Format) -> Option<usize> {
    ways.iter().position(|(_, map)| item.ids.first().is_some_and(|id| map.get(id) == Some(&format)))
}

/// Fills in the costs: the divergence of an item alone in one format, times the ratio of output errors.
fn predict(run: &Run<'_>, items: &mut [Item], ways: &[Way], solved: &[Outcome], held: &[Window], out: Out) -> Result<()> {
    let losses: Vec<HashMap<&str, f64>> =
        solved.iter().map(|o| o.modules.iter().map(|m| (m.id.as_str(), m.loss.after)).collect()).collect();
    let loss = |item: &Item, format: Format| -> f64 {
        let Some(way) = way_of(ways, item, format) else { return 0.0 };
        item.ids.iter().filter_map(|id| losses[way].get(id.to_string().as_str())).sum()
    };
    let reference = |item: &Item| {
        let measured = item.options.iter().find(|(f, _)| f.with_zero(Zero::Middle) == MEASURED);
        measured.or(item.options.first()).map_or(Format::Source, |(f, _)| *f)
    };
    let alone = |item: &Item| {
        let way = way_of(ways, item, reference(item));
        let patch = way.map(|w| Patch::Some(Arc::clone(&solved[w].solved), item.ids.iter().copied().collect()));
        run.weights.patched(patch.into_iter().collect())
    };
    let few: Vec<Window> = held.iter().take(ALONE_WINDOWS).cloned().collect();
    let measured = divergence(run, items.iter().map(alone).collect(), &few, "sensitivity", out)?;
    for (item, kld) in items.iter_mut().zip(measured) {
        let known = loss(item, reference(item));
        let costs: Vec<f64> =
            item.options.iter().map(|(f, _)| if known > 0.0 { kld * loss(item, *f) / known } else { 0.0 }).collect();
        item.options.iter_mut().zip(costs).for_each(|((_, choice), cost)| choice.cost = cost);
    }
    Ok(())
}

/// Mean divergence of some models from the source.
fn divergence(run: &Run<'_>, models: Vec<Weights>, windows: &[Window], label: &str, out: Out) -> Result<Vec<f64>> {
    Ok(comparisons(run, models, windows, label, out)?.iter().map(|c| c.summary().kld.mean).collect())
}

fn comparisons(run: &Run<'_>, models: Vec<Weights>, windows: &[Window], label: &str, out: Out) -> Result<Vec<Comparison>> {
    let stop = Interrupt::install()?;
    let bar = out.count(lockstep::num_ticks(run.weights, windows), label);
    let model = |w| lockstep::Candidate { weights: Arc::new(w), chunk: usize::MAX };
    let candidates: Vec<_> = models.into_iter().map(model).collect();
    let found = lockstep::compare(run.weights, &candidates, lockstep::Place::Processor, windows, run.max_memory, &mut || {
        bar.advance(1);
        !stop.pressed()
    })?;
    bar.finish();
    Ok(found)
}

/// What was chosen against the source, on some windows.
pub(super) fn compare(run: &Run<'_>, solved: &Arc<Solved>, windows: &[Window], label: &str, out: Out) -> Result<Comparison> {
    let model = run.weights.patched(vec![Patch::Solved(Arc::clone(solved))]);
    Ok(comparisons(run, vec![model], windows, label, out)?.remove(0))
}

/// Divergence of what was chosen on windows that it was not chosen with.
pub(super) fn measure_whole(run: &Run<'_>, solved: &Arc<Solved>, held: &[Window], out: Out) -> Result<f64> {
    let few: Vec<Window> = held.iter().take(WHOLE_WINDOWS).cloned().collect();
    Ok(compare(run, solved, &few, "artifact", out)?.summary().kld.mean)
}

fn patched(weights: &Arc<Weights>, items: &[Item], chosen: &[usize], ways: &[Way], solved: &[Outcome]) -> Weights {
    let mut ids: Vec<HashSet<TensorId>> = vec![HashSet::new(); ways.len()];
    for (item, &c) in items.iter().zip(chosen) {
        if let Some(way) = way_of(ways, item, item.options[c].0) {
            ids[way].extend(&item.ids);
        }
    }
    let patches = ids.into_iter().zip(solved).map(|(ids, o)| Patch::Some(Arc::clone(&o.solved), ids)).collect();
    weights.patched(patches)
}

fn total(items: &[Item], chosen: &[usize], of: impl Fn(&allocate::Choice) -> f64) -> f64 {
    items.iter().zip(chosen).map(|(i, &c)| of(&i.options[c].1)).sum()
}

/// The cheapest allocations: by the costs as predicted, and with those of one kind of item doubled or halved, since it is between
/// kinds that predictions err most. The best few by the undoubted prediction.
fn candidates(items: &[Item], budget: u64) -> Vec<Vec<usize>> {
    let mut kinds: Vec<Option<&str>> = items.iter().map(|i| Some(i.kind)).collect();
    kinds.sort();
    kinds.dedup();
    kinds.insert(0, None);
    let mut found: Vec<Vec<usize>> = Vec::new();
    for kind in kinds {
        for doubt in [2.0, 0.5] {
            let costs: Vec<Vec<allocate::Choice>> = items
                .iter()
                .map(|i| {
                    let factor = if Some(i.kind) == kind { doubt } else { 1.0 };
                    i.options.iter().map(|(_, c)| allocate::Choice { cost: factor * c.cost, ..*c }).collect()
                })
                .collect();
            if let Ok(chosen) = allocate::allocate(&costs, budget)
                && !found.contains(&chosen)
            {
                found.push(chosen);
            }
        }
    }
    found.sort_by(|a, b| total(items, a, |c| c.cost).total_cmp(&total(items, b, |c| c.cost)));
    found.truncate(CANDIDATES);
    found
}

/// Recipes that give all items the same option, or the experts theirs and the rest 8 bits, and what the profile says, as far as they
/// fit and no other of them is finer everywhere.
fn uniform(items: &[Item], decisions: &Decisions, budget: u64, asym: bool) -> Vec<Candidate> {
    let pick = |of: &dyn Fn(&Item) -> Option<Format>| -> Option<Vec<usize>> {
        let index = |i: &Item| match i.options.len() {
            1 => Some(0),
            _ => i.options.iter().position(|(f, _)| Some(*f) == of(i)),
        };
        items.iter().map(index).collect()
    };
    let profile = pick(&|i| i.ids.first().map(|&id| decisions.format(id))).map(|c| ("profile".to_string(), c));
    let recipes =
        OPTIONS.iter().flat_map(|o| [(*o, *o), (*o, "int8:channel"), (*o, "int8:g128")]).filter_map(|(experts, rest)| {
            let choices = pick(&|i| option(if i.kind == "experts" { experts } else { rest }, i.kind, asym))?;
            let [e, r] = [option(experts, "experts", asym)?, option(rest, "", asym)?];
            Some((if e == r { format!("uniform {e}") } else { format!("experts {e}, rest {r}") }, choices))
        });
    let mut fitting: Vec<Candidate> = Vec::new();
    for (name, choices) in profile.into_iter().chain(recipes) {
        if total(items, &choices, |c| c.bytes as f64) <= budget as f64 && fitting.iter().all(|f| f.choices != choices) {
            fitting.push(Candidate { name, choices });
        }
    }
    let finer = |a: &[usize], b: &[usize]| a != b && a.iter().zip(b).all(|(a, b)| a >= b);
    let beaten: Vec<bool> = fitting.iter().map(|f| fitting.iter().any(|o| finer(&o.choices, &f.choices))).collect();
    fitting.into_iter().zip(beaten).filter(|(_, beaten)| !beaten).map(|(f, _)| f).collect()
}

fn show(items: &[Item], tried: &[Candidate], best: usize, rows: &[Row], out: Out) {
    let mut by_kind: Vec<&str> = Vec::new();
    items.iter().filter(|i| i.options.len() > 1).for_each(|i| {
        if !by_kind.contains(&i.kind) {
            by_kind.push(i.kind);
        }
    });
    let table: Vec<Vec<String>> = by_kind
        .iter()
        .map(|kind| {
            let chosen: Vec<String> = items
                .iter()
                .zip(&tried[best].choices)
                .filter(|(i, _)| i.kind == *kind && i.options.len() > 1)
                .map(|(i, &c)| i.options[c].0.to_string())
                .collect();
            vec![kind.to_string(), chosen.join(" ")]
        })
        .collect();
    out.line(report::table(&["item", "format, layer by layer"], &table));
    let table: Vec<Vec<String>> = tried
        .iter()
        .zip(rows)
        .enumerate()
        .map(|(i, (t, row))| {
            let mark = if i == best { "chosen" } else { "" };
            let [predicted, measured] = [row.predicted, row.measured].map(|k| format!("{k:.5}"));
            vec![t.name.clone(), report::bytes(row.bytes), predicted, measured, mark.into()]
        })
        .collect();
    out.line(report::table(&["candidate", "bytes", "KLD predicted", "KLD measured", ""], &table));
}

fn report_of(items: &[Item], tried: &[Candidate], best: usize, rows: &[Row], budget: u64) -> Value {
    let table: Vec<Value> = items
        .iter()
        .zip(&tried[best].choices)
        .map(|(i, &c)| {
            let (format, choice) = &i.options[c];
            json!({"item": i.name, "format": format.to_string(), "bytes": choice.bytes, "predicted_kld": choice.cost,
                   "coarsest_kld": i.options[0].1.cost})
        })
        .collect();
    let tried: Vec<Value> = tried
        .iter()
        .zip(rows)
        .enumerate()
        .map(|(i, (t, row))| {
            json!({"name": t.name, "bytes": row.bytes, "predicted_kld": row.predicted, "measured_kld": row.measured,
                   "chosen": i == best})
        })
        .collect();
    json!({"budget_bytes": budget, "items": table, "candidates": tried})
}

/// The plan with allocated formats.
pub(super) fn replan(
    run: &Run<'_>,
    decisions: &Decisions,
    formats: &HashMap<TensorId, Format>,
    shard_bytes: u64,
) -> Result<Plan> {
    let choose = |id: TensorId| match formats.get(&id) {
        Some(&format) => Choice { format, reason: Some("allocated".into()) },
        None => choice(decisions, id),
    };
    Ok(plan::plan(run.weights, choose, shard_bytes)?)
}
