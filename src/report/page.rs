//! The report as one self-contained HTML page.
//!
//! Knows which sections a report has and in what order a reader wants them; takes words and cells from `digest` and drawings
//! from `chart`. The page needs no network, script or font, follows the reader's light or dark setting, and prints.

use super::chart::{self, Curve, Heat, LayerBar, LayerBars, Mark, Ranked};
use super::digest::{self, Figure, Table, Verdict, entries, list, num, nums, sig, text};
use serde::Serialize;
use serde_json::Value;

pub use super::plain::{csv, markdown};

/// Router divergence above which a layer warns and fails, nats.
const ROUTER_LIMITS: (f64, f64) = (0.01, 0.1);

/// Why a page could not be made.
#[derive(Debug, thiserror::Error)]
#[error("report page: {0}")]
pub struct PageError(#[from] minijinja::Error);

/// A named fact.
#[derive(Debug, Serialize)]
pub(super) struct Fact {
    name: String,
    value: String,
}

/// What a section is made of; blocks fill two columns unless wide.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Block {
    Figures {
        figures: Vec<Figure>,
    },
    Table {
        table: Table,
        wide: bool,
    },
    /// A table for those who want every row.
    Folded {
        table: Table,
    },
    Chart {
        svg: String,
        title: String,
        caption: String,
    },
    Facts {
        facts: Vec<Fact>,
    },
}

#[derive(Debug, Serialize)]
pub(super) struct Section {
    title: &'static str,
    lead: String,
    blocks: Vec<Block>,
}

/// One command's share of a report.
#[derive(Debug, Serialize)]
struct Part {
    /// Absent where the report is of one command.
    title: Option<&'static str>,
    sections: Vec<Section>,
}

#[derive(Debug, Serialize)]
struct Page {
    command: String,
    subject: String,
    verdict: Option<Verdict>,
    parts: Vec<Part>,
    footer: String,
}

/// Commands within a report, in the order they ran. A report of one command is its own only part.
pub(super) fn commands(report: &Value) -> Vec<(&'static str, &Value)> {
    const STAGES: [(&str, &str); 5] = [
        ("quantize", "Quantize"),
        ("calibrate", "Calibrate"),
        ("profile", "Profile of the experts"),
        ("run", "Short run"),
        ("bench", "Bench"),
    ];
    let stages: Vec<_> =
        STAGES.iter().filter_map(|(k, title)| Some((*title, report.get(*k).filter(|v| v.is_object())?))).collect();
    if stages.is_empty() { vec![("", report)] } else { stages }
}

/// The command that wrote the report.
pub(super) fn command(report: &Value) -> String {
    format!("moe {}", text(report, "/command").unwrap_or("report"))
}

/// The page of a report.
///
/// Shows whatever sections the report has; `report` is the object that commands print with `--json`.
pub fn html(report: &Value) -> Result<String, PageError> {
    let stages = commands(report);
    let within = |key: &str| stages.iter().find_map(|(_, v)| text(v, key));
    let subject = within("/artifact").or(within("/model")).or(within("/original")).or(text(report, "/model"));
    let verdict = stages.iter().find_map(|(_, v)| digest::verdict(v)).or_else(|| {
        let sentence = stages.iter().find_map(|(_, v)| digest::coverage_sentence(v).or_else(|| super::tiers::sentence(v)))?;
        Some(Verdict { level: "none", word: "", sentence, findings: Vec::new() })
    });
    let page = Page {
        command: command(report),
        subject: subject.map(|path| path.rsplit(['/', '\\']).find(|s| !s.is_empty()).unwrap_or(path)).unwrap_or("Report").into(),
        verdict,
        parts: stages
            .iter()
            .map(|(title, v)| Part { title: (!title.is_empty()).then_some(*title), sections: sections(title, v) })
            .filter(|p| !p.sections.is_empty())
            .collect(),
        footer: text(report, "/tool").or(within("/tool")).unwrap_or("moe").into(),
    };
    let mut env = minijinja::Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    Ok(env.render_named_str("page.html", include_str!("page.html"), page)?)
}

fn sections(stage: &str, v: &Value) -> Vec<Section> {
    match stage {
        "Quantize" | "Short run" | "Bench" => facts(v),
        _ => [
            key_figures(stage, v),
            tasks(v),
            output(v),
            by_layer(v),
            sensitivity(v),
            coverage(v),
            heat_maps(v),
            lookahead(v),
            stability(v),
            super::rounding::errors(v),
            super::rounding::allocation(v),
            super::tiers::replay(v),
            definitions(v),
            provenance(v),
        ]
        .into_iter()
        .flatten()
        .collect(),
    }
}

pub(super) fn section(title: &'static str, lead: &str, blocks: impl IntoIterator<Item = Option<Block>>) -> Option<Section> {
    let blocks: Vec<Block> = blocks.into_iter().flatten().collect();
    (!blocks.is_empty()).then(|| Section { title, lead: lead.into(), blocks })
}

#[cfg(test)]
impl Section {
    pub(super) fn into_blocks(self) -> Vec<Block> {
        self.blocks
    }
}

pub(super) fn drawn(svg: Option<String>, title: &str, caption: &str) -> Option<Block> {
    svg.map(|svg| Block::Chart { svg, title: title.into(), caption: caption.into() })
}

fn key_figures(stage: &str, v: &Value) -> Option<Section> {
    let figures: Vec<_> = digest::fidelity_figures(v).into_iter().chain(digest::coverage_figures(v)).collect();
    // A report of one command says this at its top.
    let lead = digest::coverage_sentence(v).filter(|_| !stage.is_empty()).unwrap_or_default();
    section("Key figures", &lead, [(!figures.is_empty()).then_some(Block::Figures { figures })])
}

fn tasks(v: &Value) -> Option<Section> {
    section("Tasks", "", [digest::tasks(v).map(|table| Block::Table { table, wide: true })])
}

fn output(v: &Value) -> Option<Section> {
    let marks: Vec<_> = [("median", "/kld/median"), ("mean", "/kld/mean"), ("99 %", "/kld/p99")]
        .into_iter()
        .filter_map(|(name, path)| Some(Mark { name, at: num(v, path)? }))
        .collect();
    let svg = chart::histogram(&nums(v, "/kld_histogram/edges"), &nums(v, "/kld_histogram/counts"), &marks);
    section(
        "Divergence of the output",
        "How far the next-token distribution of the artifact is from the original's, token by token.",
        [
            drawn(svg, "Tokens by divergence", "Logarithmic scale: each step to the right is ten times the divergence."),
            digest::spread(v).map(|table| Block::Table { table, wide: false }),
        ],
    )
}

fn by_layer(v: &Value) -> Option<Section> {
    let floors = list(v, "/noise_floor/routers");
    let bars: Vec<_> = list(v, "/routers")
        .iter()
        .filter_map(|r| {
            let layer = num(r, "/layer")?;
            let floor = floors.iter().find(|f| num(f, "/layer") == Some(layer)).and_then(|f| num(f, "/kl_mean"));
            Some(LayerBar { layer: layer as usize, value: num(r, "/kl_mean")?, p99: num(r, "/kl_p99"), floor })
        })
        .collect();
    let routers = chart::layer_bars(&LayerBars {
        title: "Router divergence by layer",
        name: "mean router KL, nats, logarithmic",
        bars: &bars,
        limits: Some(ROUTER_LIMITS),
    });
    let floors = nums(v, "/noise_floor/hidden_error");
    let errors: Vec<_> = nums(v, "/hidden_error")
        .into_iter()
        .enumerate()
        .map(|(layer, value)| LayerBar { layer, value, p99: None, floor: floors.get(layer).copied() })
        .collect();
    let hidden = chart::layer_bars(&LayerBars {
        title: "Error of the hidden state by layer",
        name: "relative error of the hidden state",
        bars: &errors,
        limits: None,
    });
    let folded = digest::routers(v, None).filter(|t| t.rows.len() > 5);
    section(
        "Layers",
        "",
        [
            drawn(routers, "Router KL", "Thin lines reach to the 99 % token; short strokes mark the noise floor."),
            drawn(hidden, "Hidden state", "After each layer, against the original; short strokes mark the noise floor."),
            digest::routers(v, Some(5)).map(|table| Block::Table { table, wide: true }),
            folded.map(|table| Block::Folded { table }),
        ],
    )
}

fn sensitivity(v: &Value) -> Option<Section> {
    let mut bars: Vec<_> = list(v, "/sensitivity")
        .iter()
        .filter_map(|s| {
            let value = num(s, "/kld_per_mb")?;
            let made = num(s, "/kld").zip(num(s, "/added_bytes"));
            let made = made.map(|(k, b)| format!("KLD {} for {}", sig(k, 3), super::bytes(b.max(0.0) as u64)));
            Some(Ranked { name: text(s, "/item")?.into(), detail: made.unwrap_or_default(), value })
        })
        .collect();
    bars.sort_by(|a, b| b.value.total_cmp(&a.value));
    let most = bars.first().map_or(0.0, |b| b.value);
    let (left, right) = bars.split_at(bars.len().div_ceil(if bars.len() > 5 { 2 } else { 1 }));
    let draw = |bars, title: &str| drawn(chart::ranked(bars, most, "Divergence by added megabyte"), title, "");
    section(
        "Sensitivity",
        "Divergence from quantizing one component alone, for each megabyte that keeping it would add. \
         The first ones repay higher precision most.",
        [draw(left, "KLD per added MB"), draw(right, "continued")],
    )
}

fn coverage(v: &Value) -> Option<Section> {
    let of = |key: &str| -> Vec<(f64, f64)> {
        list(v, "/curve").iter().filter_map(|p| Some((num(p, "/fraction")?, p.get(key)?.as_f64()?))).collect()
    };
    let lines = [("hot set", "static"), ("LRU cache", "lru"), ("uniform", "uniform")];
    let lines = lines.map(|(name, key)| Curve { name, class: key, points: of(key) });
    let chosen = num(v, "/coverage/hot_experts").zip(num(v, "/coverage/total_experts")).map(|(hot, all)| hot / all);
    let layers = digest::layers(v);
    section(
        "Coverage",
        "",
        [
            drawn(chart::curves(&lines, num(v, "/coverage/target"), chosen), "Routing served by the experts held", ""),
            digest::profiled_tasks(v).map(|table| Block::Table { table, wide: false }),
            layers.map(|table| Block::Folded { table }),
        ],
    )
}

/// Uses of each layer's experts, of one task or of all.
fn uses(v: &Value, task: Option<&str>) -> Vec<(usize, Vec<f64>)> {
    let row = |l: &Value| {
        let mut sum: Vec<f64> = Vec::new();
        for (_, counts) in entries(l, "/counts_by_task").filter(|(name, _)| task.is_none_or(|t| t == *name)) {
            let counts = nums(counts, "");
            sum.resize(sum.len().max(counts.len()), 0.0);
            sum.iter_mut().zip(counts).for_each(|(s, c)| *s += c);
        }
        Some((num(l, "/layer")? as usize, sum))
    };
    list(v, "/layers").iter().filter_map(row).collect()
}

/// Order in which a layer's experts are drawn: the hot set first, then by use, so that its outline is one line.
fn by_use(hot: &[usize], uses: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..uses.len()).collect();
    order.sort_by(|a, b| hot.contains(b).cmp(&hot.contains(a)).then(uses[*b].total_cmp(&uses[*a])));
    order
}

fn heat_maps(v: &Value) -> Option<Section> {
    let layers = list(v, "/layers").iter().filter(|l| num(l, "/layer").is_some());
    let hot: Vec<Vec<usize>> = layers.map(|l| nums(l, "/hot").into_iter().map(|e| e as usize).collect()).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in list(v, "/layers").iter().flat_map(|l| entries(l, "/counts_by_task")) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let all = uses(v, None);
    let orders: Vec<Vec<usize>> = hot.iter().zip(&all).map(|(hot, (_, row))| by_use(hot, row)).collect();
    let drawn_first: Vec<Vec<usize>> =
        orders.iter().zip(&hot).map(|(order, hot)| (0..order.len()).filter(|i| hot.contains(&order[*i])).collect()).collect();
    let draw = |name: &str, task: Option<&str>| {
        let ordered = |((layer, row), order): (&(usize, Vec<f64>), &Vec<usize>)| {
            (*layer, order.iter().map(|e| row.get(*e).copied().unwrap_or(0.0)).collect())
        };
        let rows: Vec<(usize, Vec<f64>)> = uses(v, task).iter().zip(&orders).map(ordered).collect();
        drawn(chart::heat(&Heat { name, rows: &rows, hot: &drawn_first, first: task.is_none() }), name, "")
    };
    let whole = draw("All tasks", None)?;
    let key = Block::Chart {
        svg: chart::heat_key(),
        title: "Key".into(),
        caption:
            "Uses of an expert over the mean of its layer. Every map has the same order, by use over all tasks, and the same \
                  outline: dark cells right of it are experts that a task needs and the hot set lacks."
                .into(),
    };
    section("Use of the experts", "", [Some(whole), Some(key)].into_iter().chain(names.iter().map(|n| draw(n, Some(n)))))
}

fn lookahead(v: &Value) -> Option<Section> {
    let table = digest::lookahead(v).map(|table| Block::Table { table, wide: false });
    section(
        "A layer early",
        "Share of a router's choices that are among as many named from what the router before it saw.",
        [table],
    )
}

fn stability(v: &Value) -> Option<Section> {
    let tables = digest::stability(v).into_iter().map(|table| Some(Block::Table { table, wide: false }));
    section("Stability", "Jaccard: experts that two hot sets share, over those in either.", tables)
}

fn definitions(v: &Value) -> Option<Section> {
    let facts: Vec<_> = entries(v, "/definitions")
        .filter_map(|(k, x)| Some(Fact { name: k.replace('_', " "), value: x.as_str()?.into() }))
        .collect();
    section("Definitions", "", [(!facts.is_empty()).then_some(Block::Facts { facts })])
}

fn provenance(v: &Value) -> Option<Section> {
    let rows = [
        ("Original", "/original"),
        ("Artifact", "/artifact"),
        ("Model", "/model"),
        ("Protocol", "/protocol"),
        ("Windows", "/windows"),
        ("Tokens scored", "/tokens"),
        ("Text", "/text/source"),
        ("Text, sha256", "/text/sha256"),
        ("Text, tokens", "/text/tokens"),
        ("Tool", "/tool"),
    ];
    let shown = |path: &str| text(v, path).map(String::from).or_else(|| num(v, path).map(digest::count));
    let facts: Vec<_> = rows.iter().filter_map(|(name, path)| Some(Fact { name: (*name).into(), value: shown(path)? })).collect();
    section("Provenance", "", [(!facts.is_empty()).then_some(Block::Facts { facts })])
}

/// A value with the unit that its name ends in.
fn with_unit(name: &str, v: &Value) -> Option<(String, String)> {
    let shown = match v {
        Value::String(s) => return Some((name.replace('_', " "), s.clone())),
        Value::Bool(b) => return Some((name.replace('_', " "), if *b { "yes" } else { "no" }.into())),
        v => v.as_f64()?,
    };
    let whole = shown.fract() == 0.0 && shown.abs() < 1e15;
    let plain = || if whole { digest::count(shown) } else { sig(shown, 4) };
    let (stem, value) = if let Some(stem) = name.strip_suffix("_bytes") {
        (stem, super::bytes(shown.max(0.0) as u64))
    } else if let Some(stem) = name.strip_suffix("_tok_s") {
        (stem, format!("{} tok/s", sig(shown, 3)))
    } else if let Some(stem) = name.strip_suffix("_ms") {
        (stem, format!("{} ms", sig(shown, 3)))
    } else if name == "seconds" {
        ("time", super::seconds(shown))
    } else {
        (name, plain())
    };
    Some((stem.replace('_', " "), value))
}

/// Sections of a stage with no charts of its own: its facts, and a table of each list of objects.
fn facts(v: &Value) -> Vec<Section> {
    let mut facts = Vec::new();
    let mut tables = Vec::new();
    collect_facts("", v, &mut facts, &mut tables);
    let blocks = (!facts.is_empty()).then_some(Block::Facts { facts });
    section("Facts", "", std::iter::once(blocks).chain(tables.into_iter().map(Some))).into_iter().collect()
}

fn collect_facts(prefix: &str, v: &Value, facts: &mut Vec<Fact>, tables: &mut Vec<Block>) {
    for (key, x) in entries(v, "").filter(|(k, _)| *k != "command") {
        match x {
            Value::Object(_) => collect_facts(&format!("{prefix}{key}: "), x, facts, tables),
            Value::Array(rows) if rows.first().is_some_and(Value::is_object) => {
                let names: Vec<&String> = entries(&rows[0], "").map(|(k, _)| k).collect();
                let cell = |r: &Value, k: &str| r.get(k).and_then(|x| with_unit(k, x)).map_or("\u{2013}".into(), |(_, v)| v);
                let header = names.iter().map(|k| with_unit(k, &rows[0][k.as_str()]).map_or((*k).clone(), |(n, _)| n)).collect();
                let rows = rows.iter().map(|r| names.iter().map(|k| cell(r, k)).collect()).collect();
                tables.push(Block::Table { table: Table { title: key.replace('_', " "), header, rows }, wide: true });
            }
            Value::Array(items) => {
                let items: Vec<String> = items.iter().filter_map(|x| with_unit(key, x)).map(|(_, v)| v).collect();
                facts.push(Fact { name: format!("{prefix}{}", key.replace('_', " ")), value: items.join(", ") });
            }
            x => facts.extend(with_unit(key, x).map(|(name, value)| Fact { name: format!("{prefix}{name}"), value })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::digest::percent;
    use super::*;
    use serde_json::json;

    fn calibrate() -> Value {
        json!({
            "command": "calibrate", "tool": "moe 0.1.0", "original": "/models/a", "artifact": "/models/a <b>&\"'", "protocol": "gguf",
            "windows": 2, "tokens": 512, "text": {"source": "calib", "sha256": "00ff", "tokens": 1024},
            "perplexity": 8.81, "perplexity_original": 8.7, "perplexity_stderr": 0.13, "ppl_ratio": 1.0126, "ppl_ratio_stderr": 0.003,
            "kld": {"mean": 0.021, "stderr": 0.001, "median": 0.006, "p90": 0.05, "p95": 0.09, "p99": 0.24, "p999": 0.8, "max": 2.0},
            "kld_histogram": {"edges": [-3.0, -2.0, -1.0, 0.0], "counts": [10, 20, 5]}, "same_top1": 0.94, "rms_dp": 0.03,
            "routers": [
                {"layer": 0, "kl_mean": 0.0, "kl_p99": 0.0, "kl_local_max": 0.0, "overlap": 1.0, "exact_set": 1.0, "top1": 1.0},
                {"layer": 1, "kl_mean": 0.14, "kl_p99": 0.9, "kl_local_max": 0.2, "overlap": 0.9, "exact_set": 0.5, "top1": 0.9}],
            "hidden_error": [0.01, 0.03],
            "tasks": {"prose|<i>": {"tokens": 256, "perplexity": 9.0, "perplexity_original": 8.9, "ppl_ratio": 1.011,
                      "kld": {"mean": 0.02}, "same_top1": 0.95}},
            "noise_floor": {"kld": {"mean": 2e-6}, "ppl_ratio": 1.0, "same_top1": 0.999,
                            "routers": [{"layer": 1, "kl_mean": 1e-6}], "hidden_error": [1e-4, 1e-4]},
            "sensitivity": [{"item": "router <r>", "added_bytes": 2_000_000, "kld": 0.02, "kld_per_mb": 0.01}],
            "verdict": "fail", "findings": ["layer 1 is above 0.1 <&>"], "definitions": {"kld": "p ln(p / q)"}
        })
    }

    fn profile() -> Value {
        json!({
            "command": "profile-experts", "model": "/models/a", "tasks": [{"name": "prose", "samples": 128, "tokens": 9000}],
            "coverage": {"target": 0.85, "hot_experts": 3, "total_experts": 8, "held_out": 0.84, "left_out": {"prose": 0.7},
                         "uniform": 0.375, "lru": 0.8},
            "layers": [{"layer": 0, "experts": 4, "hot": [1, 2], "coverage": 0.9, "cv": 0.5, "unused": 1,
                        "counts_by_task": {"prose": [0, 9, 5, 1]}},
                       {"layer": 1, "experts": 4, "hot": [3], "coverage": 0.8, "cv": 0.7, "unused": 0,
                        "counts_by_task": {"prose": [1, 1, 1, 12]}}],
            "stability": {"halves_overlap": 0.93, "jaccard_tasks": {"a": {"b": 0.5}}, "by_samples": [{"samples": 16, "jaccard": 0.7}]},
            "curve": [{"fraction": 0.0, "static": 0.0, "lru": 0.0, "uniform": 0.0},
                      {"fraction": 1.0, "static": 1.0, "lru": 1.0, "uniform": 1.0}],
            "lookahead": [{"layer": 1, "next_router": 0.44, "map": 0.743}]
        })
    }

    fn prepare() -> Value {
        json!({
            "command": "prepare", "quantize": {"written_bytes": 41_000_000, "seconds": 2.5, "nested": {"profile": "balanced"}},
            "calibrate": calibrate(), "profile": profile(), "run": {"prompt": "<script>", "text": "ok", "decode_tok_s": 41.0, "ttft_ms": 9.0},
            "bench": {"rows": [{"batch": 1, "decode_tok_s": 42.0}]}
        })
    }

    #[test]
    fn a_page_asks_for_nothing_from_outside() {
        for report in [calibrate(), profile(), prepare()] {
            let page = html(&report).unwrap();
            for outside in ["http", "src=", "url(", "@import", "<script", "<link"] {
                assert!(!page.contains(outside), "{outside}");
            }
            let links: Vec<_> = page.match_indices("href=").filter(|(i, _)| !page[*i..].starts_with("href=\"#")).collect();
            assert!(links.is_empty(), "{links:?}");
        }
    }

    #[test]
    fn every_section_is_there() {
        let page = html(&prepare()).unwrap();
        let titles =
            ["Key figures", "Tasks", "Divergence of the output", "Layers", "Sensitivity", "Coverage", "Use of the experts"];
        for title in
            titles.iter().chain(&["A layer early", "Stability", "Definitions", "Provenance", "Quantize", "Short run", "Bench"])
        {
            assert!(page.contains(&format!(">{title}</h")), "{title}");
        }
        assert_eq!(page.matches("<svg").count(), page.matches("</desc>").count());
        assert_eq!(page.matches("id=\"hot-set\"").count(), 1);
    }

    /// Any key may be absent, null or of another type than it should be.
    #[test]
    fn a_page_lives_without_any_key() {
        for whole in [calibrate(), profile(), prepare()] {
            for key in whole.as_object().unwrap().keys() {
                for other in [None, Some(Value::Null), Some(json!("text")), Some(json!([])), Some(json!({})), Some(json!(-1))] {
                    let mut report = whole.clone();
                    match other {
                        None => report.as_object_mut().unwrap().shift_remove(key),
                        Some(other) => report.as_object_mut().unwrap().insert(key.clone(), other),
                    };
                    let page = html(&report).unwrap();
                    assert!(!page.contains("NaN") && !page.contains("inf\""), "{key}");
                    markdown(&report);
                    csv(&report);
                }
            }
        }
        assert!(html(&json!({})).unwrap().contains("</html>"));
        assert!(html(&Value::Null).unwrap().contains("</html>"));
    }

    #[test]
    fn names_are_escaped() {
        let page = html(&prepare()).unwrap();
        for raw in ["<i>", "<b>", "<r>", "<&>", "<script>"] {
            assert!(!page.contains(raw), "{raw}");
        }
        assert!(page.contains("router &lt;r&gt;") && page.contains("prose|&lt;i&gt;"));
    }

    /// The limits colour the bars: 0.14 is over the failing line, 0 is drawn without colour.
    #[test]
    fn bars_over_a_limit_are_marked() {
        let page = html(&calibrate()).unwrap();
        assert_eq!(page.matches("class=\"bar fail\"").count(), 1);
        assert_eq!(page.matches("class=\"bar warn\"").count(), 0);
        assert!(page.contains("0.14 ") || page.contains("0.140"));
        assert_eq!(percent(0.84), "84 %");
    }
}
