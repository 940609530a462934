//! The findings of `moe profile-experts` as a report and as tables.
//!
//! Keys of the report, stable: `command`, `tool`, `model`, `list`, `tasks[].{name, samples, tokens}`,
//! `coverage.{target, budget_bytes, hot_bytes, hot_experts, total_experts, held_out, fitted, uniform, lru, left_out.<task>,
//! by_task.<task>, single_task.<task>.{own, others}}`, `layers[].{layer, experts, hot, coverage, lru, cv, unused,
//! unused_experts, counts_by_task.<task>}`, `stability.{halves_overlap, jaccard_tasks.<task>.<task>,
//! by_samples[].{samples, jaccard}}`, `curve[].{fraction, static, lru, uniform}`, `lookahead[].{layer, next_router, map}` (null unless
//! asked for), `text`, `definitions`, `seconds`.

use super::lookahead::Recall;
use super::{Findings, Observed, Rule};
use crate::calib::routing::{self, Counts, HotSet};
use crate::cli::ProfileExpertsArgs;
use crate::command::measure;
use crate::report::{self, Out};
use serde_json::{Map, Value, json};
use std::path::Path;

const DEFINITIONS: [(&str, &str); 11] = [
    ("traffic", "visits: one token in one layer makes as many as it chooses experts"),
    ("held_out", "share of the visits of every fourth text that the list covers; the list is made from the other texts"),
    ("left_out", "the same on one task, by a list of the same size made from the other tasks"),
    ("single_task", "by a list of the same size made from one task: on its own held-out texts, and on those of the others"),
    (
        "lru",
        "hit rate on the held-out texts, tasks taking turns, of a least-recently-used cache in each layer with as many slots",
    ),
    ("uniform", "what as many experts would cover if all were used alike"),
    ("cv", "standard deviation over mean of the visits of a layer's experts"),
    ("halves_overlap", "lists made from every other text: shared experts over the size of the larger list"),
    ("jaccard_tasks", "lists of the same size made from one task each: shared over joint experts"),
    (
        "lookahead",
        "share of a router's choices on held-out texts that are among as many named from what the router before it saw: by its own \
         weights applied there, and by the map that was fitted on the other texts",
    ),
    ("by_samples", "list made from the first texts of every task against the one made from all: shared over joint experts"),
];

/// The report.
pub(super) fn value(args: &ProfileExpertsArgs, observed: &Observed, found: &Findings, rule: &Rule, list: &Path) -> Value {
    let Observed { material, trace, .. } = observed;
    let shape = trace.shape;
    let sizes = routing::sizes(&found.hot);
    let named = |value: &dyn Fn(usize) -> Value| -> Value {
        trace.tasks.iter().enumerate().map(|(t, name)| (name.clone(), value(t))).collect::<Map<_, _>>().into()
    };
    let sum = |which: usize, keep: &dyn Fn(usize) -> bool| {
        let mut sum = Counts::new(shape);
        found.by_task.iter().enumerate().filter(|(t, _)| keep(*t)).for_each(|(_, c)| sum.merge(&c[which], 1.0));
        sum
    };
    let several = trace.tasks.len() > 1;
    let single: Vec<HotSet> = found.by_task.iter().map(|[_, fitted, _]| routing::by_size(fitted, &sizes)).collect();
    let left_out = |t: usize| {
        let rest = routing::by_size(&sum(1, &|other| other != t), &sizes);
        json!(routing::coverage(&rest, &found.by_task[t][2]))
    };
    let single_task = |t: usize| {
        let own = routing::coverage(&single[t], &found.by_task[t][2]);
        let others = several.then(|| routing::coverage(&single[t], &sum(2, &|other| other != t)));
        json!({"own": own, "others": others})
    };
    let (target, budget) = match rule {
        Rule::Coverage(target) => (Some(*target), None),
        Rule::Budget { budget, .. } => (None, Some(*budget)),
    };
    let all = sum(0, &|_| true);
    let coverage = routing::coverage_by_layer(&found.hot, &found.held_out);
    let e = shape.experts;
    let layers: Vec<Value> = (0..shape.layers)
        .map(|l| {
            let unused = routing::unused(all.layer(l));
            let counts = |t: usize| json!(found.by_task[t][0].layer(l).iter().map(|c| *c as u64).collect::<Vec<_>>());
            json!({
                "layer": trace.layers[l],
                "experts": e,
                "hot": found.hot[l],
                "coverage": coverage[l],
                "lru": found.lru.layer(l, sizes[l]),
                "cv": routing::variation(all.layer(l)),
                "unused": unused.len(),
                "unused_experts": unused,
                "counts_by_task": named(&counts),
            })
        })
        .collect();
    let mut pairs = Map::new();
    for (a, name) in trace.tasks.iter().enumerate() {
        let later = (a + 1..single.len()).map(|b| (trace.tasks[b].clone(), json!(routing::jaccard(&single[a], &single[b]))));
        let later: Map<String, Value> = later.collect();
        if !later.is_empty() {
            pairs.insert(name.clone(), later.into());
        }
    }
    let by_samples: Vec<Value> = found.by_samples.iter().map(|(n, j)| json!({"samples": n, "jaccard": j})).collect();
    let tokens: Vec<u8> = material.windows.iter().flat_map(|w| w.tokens.iter().flat_map(|t| t.to_le_bytes())).collect();
    let recall = |r: &Recall| json!({"layer": r.layer, "next_router": r.next_router, "map": r.map});
    json!({
        "command": "profile-experts",
        "tool": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "list": list,
        "tasks": material.tasks,
        "coverage": {
            "target": target,
            "budget_bytes": budget,
            "hot_bytes": found.hot_bytes,
            "hot_experts": sizes.iter().sum::<usize>(),
            "total_experts": shape.layers * e,
            "held_out": routing::coverage(&found.hot, &found.held_out),
            "fitted": routing::coverage(&found.hot, &found.fitted),
            "uniform": routing::uniform(&found.hot, shape),
            "lru": found.lru.overall(&sizes),
            "left_out": if several { named(&left_out) } else { json!({}) },
            "by_task": named(&|t| json!(routing::coverage(&found.hot, &found.by_task[t][2]))),
            "single_task": named(&single_task),
        },
        "layers": layers,
        "stability": {"halves_overlap": found.halves, "jaccard_tasks": pairs, "by_samples": by_samples},
        "curve": routing::curve(&found.fitted, &found.held_out, &found.lru),
        "lookahead": observed.foresight.as_ref().map(|f| f.recall.iter().map(recall).collect::<Vec<_>>()),
        "text": {"source": format!("tasks {}", trace.tasks.join(", ")), "sha256": measure::sha256(&tokens)},
        "definitions": DEFINITIONS.iter().map(|(k, v)| (k.to_string(), json!(v))).collect::<Map<_, _>>(),
    })
}

/// Prints it as tables.
pub(super) fn print(report: &Value, observed: &Observed, found: &Findings, rule: &Rule, list: &Path, out: Out) {
    let share = |v: &Value| v.as_f64().map_or_else(String::new, |x| format!("{:.1} %", 100.0 * x));
    let whole = |v: &Value| v.as_f64().map_or_else(String::new, |x| format!("{:.0} %", 100.0 * x));
    let c = &report["coverage"];
    out.line(format!(
        "{} of {} experts cover {} of held-out traffic (uniform would cover {}, an LRU cache of the same size {})",
        c["hot_experts"],
        c["total_experts"],
        whole(&c["held_out"]),
        whole(&c["uniform"]),
        whole(&c["lru"])
    ));
    let made = match rule {
        Rule::Coverage(target) => format!("chosen to cover {:.0} % of each layer", 100.0 * target),
        Rule::Budget { budget, .. } => format!("chosen to fit {}", report::bytes(*budget)),
    };
    out.line(format!("{made}; they take {}", report::bytes(found.hot_bytes)));
    out.line("");
    let rows: Vec<Vec<String>> = report["layers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|l| {
            let hot = l["hot"].as_array().map_or(0, Vec::len);
            let cv = l["cv"].as_f64().unwrap_or_default();
            let cells = [format!("{hot} of {}", l["experts"]), share(&l["coverage"]), share(&l["lru"]), format!("{cv:.2}")];
            [l["layer"].to_string()].into_iter().chain(cells).chain([l["unused"].to_string()]).collect()
        })
        .collect();
    out.line(report::table(&["layer", "hot", "held out", "LRU", "variation", "never used"], &rows));
    out.line("");
    let rows: Vec<Vec<String>> = (observed.material.tasks.iter())
        .map(|t| {
            let alone = &c["single_task"][&t.name];
            let cells = [&c["by_task"][&t.name], &c["left_out"][&t.name], &alone["own"], &alone["others"]].map(share);
            [t.name.clone(), t.samples.to_string(), t.tokens.to_string()].into_iter().chain(cells).collect()
        })
        .collect();
    out.line(report::table(&["task", "samples", "tokens", "held out", "left out", "own list", "own list elsewhere"], &rows));
    out.line("");
    let rows: Vec<Vec<String>> =
        found.by_samples.iter().map(|(n, j)| vec![n.to_string(), format!("{:.1} %", 100.0 * j)]).collect();
    out.line(report::table(&["samples", "agrees with the list of all"], &rows));
    out.line(format!("lists of two disjoint halves share {:.1} % of their experts", 100.0 * found.halves));
    let mut pairs: Vec<(f64, String)> = Vec::new();
    for (a, later) in report["stability"]["jaccard_tasks"].as_object().into_iter().flatten() {
        for (b, j) in later.as_object().into_iter().flatten() {
            pairs.push((j.as_f64().unwrap_or_default(), format!("{a} and {b}")));
        }
    }
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let (Some(least), Some(most)) = (pairs.first(), pairs.last()) {
        let shown = |p: &(f64, String)| format!("{:.0} % ({})", 100.0 * p.0, p.1);
        out.line(format!("lists of single tasks agree by {} to {}, shared over joint experts", shown(least), shown(most)));
    }
    if let Some(foresight) = observed.foresight.as_ref().filter(|f| !f.recall.is_empty()) {
        let cells = |r: &Recall| vec![r.layer.to_string(), share(&json!(r.next_router)), share(&json!(r.map))];
        let rows: Vec<Vec<String>> = foresight.recall.iter().map(cells).collect();
        let mean = |of: fn(&Recall) -> f64| foresight.recall.iter().map(of).sum::<f64>() / rows.len() as f64;
        let (map, router) = (whole(&json!(mean(|r| r.map))), whole(&json!(mean(|r| r.next_router))));
        out.line("");
        out.line(format!("the maps name {map} of a router's choices a layer early, the router itself {router}"));
        out.line(report::table(&["layer", "by its router", "by the map"], &rows));
    }
    out.line("");
    out.line(format!("list written to {}", list.display()));
    if let Some(s) = report["seconds"].as_f64() {
        out.note(format!("measured in {}", report::seconds(s)));
    }
}
