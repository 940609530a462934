//! What a report says, in words and cells: the verdict, the key figures and the tables that the page, Markdown and CSV share.
//!
//! Knows the keys of `report.json`, every one of them optional; must not know how a page looks.

use serde::Serialize;
use serde_json::Value;

/// A number at a JSON pointer.
pub(super) fn num(v: &Value, path: &str) -> Option<f64> {
    v.pointer(path).and_then(Value::as_f64)
}

/// A text at a JSON pointer.
pub(super) fn text<'a>(v: &'a Value, path: &str) -> Option<&'a str> {
    v.pointer(path).and_then(Value::as_str)
}

/// A list at a JSON pointer; empty when absent.
pub(super) fn list<'a>(v: &'a Value, path: &str) -> &'a [Value] {
    v.pointer(path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The numbers of a list, what is not a number left out.
pub(super) fn nums(v: &Value, path: &str) -> Vec<f64> {
    list(v, path).iter().filter_map(Value::as_f64).collect()
}

/// Entries of an object in their order; none when absent.
pub(super) fn entries<'a>(v: &'a Value, path: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    v.pointer(path).and_then(Value::as_object).into_iter().flatten()
}

/// The character of a digit or minus sign raised.
pub(super) fn superscript(c: char) -> char {
    match c {
        '1' => '\u{b9}',
        '2' => '\u{b2}',
        '3' => '\u{b3}',
        '-' => '\u{207b}',
        c => c.to_digit(10).and_then(|d| char::from_u32(0x2070 + d)).unwrap_or(c),
    }
}

/// A number with `digits` significant digits; powers of ten outside 0.0001 to a million.
pub(super) fn sig(x: f64, digits: i32) -> String {
    if x == 0.0 || !x.is_finite() {
        return x.abs().to_string();
    }
    let shown = format!("{x:.*e}", (digits - 1).max(0) as usize);
    let (mantissa, power) = shown.split_once('e').unwrap_or((&shown, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    if !(-4..6).contains(&power) {
        return format!("{mantissa}\u{d7}10{}", power.to_string().chars().map(superscript).collect::<String>());
    }
    format!("{x:.*}", (digits - 1 - power).max(0) as usize)
}

/// A share in percent, with more digits close to all.
pub(super) fn percent(x: f64) -> String {
    let p = x * 100.0;
    match p {
        0.0 => "0 %".into(),
        p if p == p.round() => format!("{p:.0} %"),
        p if (1.0..99.0).contains(&p) => format!("{p:.1} %"),
        p if p.abs() < 0.01 => format!("{} %", sig(p, 2)),
        p => format!("{p:.2} %"),
    }
}

/// A ratio as its signed difference from one, in percent.
pub(super) fn change(ratio: f64) -> String {
    let p = (ratio - 1.0) * 100.0;
    let digits = if p.abs() < 0.1 { 4 } else { 2 };
    let sign = if p < 0.0 { '\u{2212}' } else { '+' };
    format!("{sign}{:.digits$} %", p.abs())
}

/// A count with its thousands apart.
pub(super) fn count(n: f64) -> String {
    let digits = format!("{n:.0}");
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Cells of one column with the same number of decimals, so that points line up: the largest value gets `digits`.
fn column(values: impl Iterator<Item = Option<f64>> + Clone, digits: i32) -> Vec<String> {
    let most = values.clone().flatten().fold(0.0f64, |m, x| m.max(x.abs()));
    let power = if most > 0.0 { most.log10().floor() as i32 } else { 0 };
    let decimals = (digits - 1 - power).clamp(0, 7) as usize;
    values.map(|v| v.map_or("\u{2013}".into(), |x| format!("{x:.decimals$}"))).collect()
}

/// A key figure.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    /// What it is.
    pub(super) label: &'static str,
    /// Its value.
    pub(super) value: String,
    /// Error, unit, noise floor.
    pub(super) detail: String,
}

/// A table; columns after the first hold numbers.
#[derive(Debug, Default, Serialize)]
pub(super) struct Table {
    /// Title.
    pub(super) title: String,
    /// Column names.
    pub(super) header: Vec<String>,
    /// Cells.
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    /// From columns; `None` without rows. Columns without any number are left out.
    fn of(title: &str, first: &str, names: Vec<String>, columns: Vec<(&str, Vec<String>)>) -> Option<Self> {
        let columns: Vec<_> = columns.into_iter().filter(|(_, c)| c.iter().any(|x| x != "\u{2013}")).collect();
        let header = std::iter::once(first).chain(columns.iter().map(|(h, _)| *h)).map(String::from).collect();
        let row = |(i, name): (usize, String)| std::iter::once(name).chain(columns.iter().map(|(_, c)| c[i].clone())).collect();
        let rows: Vec<Vec<String>> = names.into_iter().enumerate().map(row).collect();
        (!rows.is_empty()).then(|| Self { title: title.into(), header, rows })
    }
}

/// The answer of a report.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    /// `pass`, `warn`, `fail`, or `none` where nothing was judged.
    pub(super) level: &'static str,
    /// The word shown.
    pub(super) word: &'static str,
    /// The answer.
    pub(super) sentence: String,
    /// Reasons and cures.
    pub(super) findings: Vec<String>,
}

/// The router with the largest mean divergence.
fn worst_router(v: &Value) -> Option<&Value> {
    let kl = |r: &Value| num(r, "/kl_mean").unwrap_or(f64::NEG_INFINITY);
    list(v, "/routers").iter().max_by(|a, b| kl(a).total_cmp(&kl(b)))
}

/// The verdict of a comparison.
pub(super) fn verdict(v: &Value) -> Option<Verdict> {
    let given = text(v, "/verdict")?;
    let (level, word, answer) = match given {
        "pass" => ("pass", "Pass", "The artifact can stand in for the original"),
        "warn" => ("warn", "Warning", "The artifact is usable, with reservations"),
        "fail" => ("fail", "Fail", "The artifact should not be used as it is"),
        _ => ("none", "Not judged", "No verdict was reached"),
    };
    let mut facts = Vec::new();
    facts.extend(num(v, "/ppl_ratio").map(|r| format!("perplexity {}", change(r))));
    facts.extend(num(v, "/same_top1").map(|s| format!("the same first token for {} of the tokens", percent(s))));
    if let Some((kl, layer)) = worst_router(v).and_then(|r| Some((num(r, "/kl_mean")?, num(r, "/layer")?))) {
        facts.push(format!("worst router KL {} (layer {layer})", sig(kl, 3)));
    }
    let sentence = if facts.is_empty() { format!("{answer}.") } else { format!("{answer}: {}.", facts.join(", ")) };
    let findings = list(v, "/findings").iter().filter_map(Value::as_str).map(String::from).collect();
    Some(Verdict { level, word, sentence, findings })
}

/// What a hot set buys, in one sentence.
pub(super) fn coverage_sentence(v: &Value) -> Option<String> {
    let (hot, all, held) = (num(v, "/coverage/hot_experts")?, num(v, "/coverage/total_experts")?, num(v, "/coverage/held_out")?);
    let mut against = Vec::new();
    against.extend(num(v, "/coverage/lru").map(|x| format!("{} by an LRU cache of the same size", percent(x))));
    against.extend(num(v, "/coverage/uniform").map(|x| format!("{} by a uniform choice", percent(x))));
    let against = if against.is_empty() { String::new() } else { format!(", against {}", against.join(" and ")) };
    Some(format!("{} of the experts serve {} of the routing of held-out samples{against}.", percent(hot / all), percent(held)))
}

fn joined(parts: impl IntoIterator<Item = Option<String>>) -> String {
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Key figures of a comparison, each beside its noise floor.
pub(super) fn fidelity_figures(v: &Value) -> Vec<Figure> {
    let n = |path: &str| num(v, path);
    let mut out = Vec::new();
    let mut push = |label, value: Option<String>, detail: String| {
        out.extend(value.map(|value| Figure { label, value, detail }));
    };
    let floor = |path: &str, show: &dyn Fn(f64) -> String| n(path).map(|x| format!("floor {}", show(x)));
    let sig3 = |x: f64| sig(x, 3);
    let error = n("/ppl_ratio_stderr").map(|e| format!("\u{b1} {} %", sig(e * 100.0, 2)));
    push("Perplexity change", n("/ppl_ratio").map(change), joined([error, floor("/noise_floor/ppl_ratio", &change)]));
    let error = n("/perplexity_stderr").map(|e| format!("\u{b1} {}", sig(e, 2)));
    let original = n("/perplexity_original").map(|p| format!("original {}", sig(p, 4)));
    push("Perplexity", n("/perplexity").map(|p| sig(p, 4)), joined([error, original]));
    let error = n("/kld/stderr").map(|e| format!("\u{b1} {}", sig(e, 2)));
    push("KLD, mean", n("/kld/mean").map(sig3), joined([error, floor("/noise_floor/kld/mean", &sig3)]));
    push("KLD, 99 %", n("/kld/p99").map(sig3), joined([n("/kld/max").map(|x| format!("largest {}", sig3(x)))]));
    push("Same first token", n("/same_top1").map(percent), joined([floor("/noise_floor/same_top1", &percent)]));
    push("RMS change of p", n("/rms_dp").map(percent), "probability of the true token".into());
    if let Some(r) = worst_router(v) {
        let layer = num(r, "/layer");
        let floors = list(v, "/noise_floor/routers");
        let noise = floors.iter().find(|f| num(f, "/layer") == layer).and_then(|f| num(f, "/kl_mean"));
        let detail = joined([layer.map(|l| format!("layer {l}")), noise.map(|x| format!("floor {}", sig3(x)))]);
        push("Router KL, worst layer", num(r, "/kl_mean").map(sig3), detail);
    }
    let overlap = |r: &Value| num(r, "/overlap").unwrap_or(f64::INFINITY);
    if let Some(r) = list(v, "/routers").iter().min_by(|a, b| overlap(a).total_cmp(&overlap(b))) {
        let layer = num(r, "/layer").map(|l| format!("layer {l}"));
        push("Same experts, worst layer", num(r, "/overlap").map(percent), joined([layer]));
    }
    out
}

/// Key figures of a hot set.
pub(super) fn coverage_figures(v: &Value) -> Vec<Figure> {
    let n = |path: &str| num(v, path);
    let mut out = Vec::new();
    let mut push = |label, value: Option<String>, detail: String| {
        out.extend(value.map(|value| Figure { label, value, detail }));
    };
    let target = n("/coverage/target").map(|t| format!("target {}", percent(t)));
    push("Coverage, held-out samples", n("/coverage/held_out").map(percent), joined([target]));
    let all = n("/coverage/total_experts");
    let share = all.zip(n("/coverage/hot_experts")).map(|(all, hot)| format!("{} of {}", percent(hot / all), count(all)));
    push("Hot experts", n("/coverage/hot_experts").map(count), joined([share]));
    push("LRU, same size", n("/coverage/lru").map(percent), "replayed trace".into());
    push("Uniform choice, same size", n("/coverage/uniform").map(percent), String::new());
    let left = entries(v, "/coverage/left_out").filter_map(|(k, x)| Some((k, x.as_f64()?))).min_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((task, x)) = left {
        push("Coverage, worst left-out task", Some(percent(x)), task.clone());
    }
    push("Hot sets of two halves", n("/stability/halves_overlap").map(percent), "shared".into());
    let unused: Vec<f64> = list(v, "/layers").iter().filter_map(|l| num(l, "/unused")).collect();
    if !unused.is_empty() {
        push("Experts never used", Some(count(unused.iter().sum())), String::new());
    }
    out
}

/// Output metrics by task.
pub(super) fn tasks(v: &Value) -> Option<Table> {
    let rows: Vec<_> = entries(v, "/tasks").collect();
    let col = |path: &str, digits| column(rows.iter().map(|(_, t)| num(t, path)), digits);
    let show = |path: &str, f: &dyn Fn(f64) -> String| -> Vec<String> {
        rows.iter().map(|(_, t)| num(t, path).map_or("\u{2013}".into(), f)).collect()
    };
    let percents = |path: &str| column(rows.iter().map(|(_, t)| num(t, path).map(|x| x * 100.0)), 4);
    let columns = vec![
        ("tokens", show("/tokens", &count)),
        ("original", col("/perplexity_original", 5)),
        ("artifact", col("/perplexity", 5)),
        ("change", show("/ppl_ratio", &change)),
        ("KLD", col("/kld/mean", 3)),
        ("99 %", col("/kld/p99", 3)),
        ("largest", col("/kld/max", 3)),
        ("same first,\u{a0}%", percents("/same_top1")),
    ];
    Table::of("Perplexity and divergence by task", "task", rows.iter().map(|(k, _)| k.to_string()).collect(), columns)
}

/// The tail of the divergence.
pub(super) fn spread(v: &Value) -> Option<Table> {
    let names = [
        ("mean", "mean"),
        ("stderr", "standard error"),
        ("median", "median"),
        ("p90", "90 %"),
        ("p95", "95 %"),
        ("p99", "99 %"),
        ("p999", "99.9 %"),
        ("max", "largest"),
    ];
    let shown: Vec<_> = names.iter().filter_map(|(k, name)| Some((*name, num(v, &format!("/kld/{k}"))?))).collect();
    let cells = shown.iter().map(|(_, x)| format!("{x:.5}")).collect();
    let mut table =
        Table::of("KLD of the tokens", "", shown.iter().map(|(n, _)| n.to_string()).collect(), vec![("nats", cells)])?;
    table.rows.extend(num(v, "/noise_floor/kld/mean").map(|x| vec!["noise floor, mean".into(), sig(x, 3)]));
    Some(table)
}

fn layer_names<'a>(rows: impl Iterator<Item = &'a Value>) -> Vec<String> {
    rows.map(|r| num(r, "/layer").map_or("\u{2013}".into(), |l| l.to_string())).collect()
}

/// Routers, all in order or the `worst` few by divergence.
pub(super) fn routers(v: &Value, worst: Option<usize>) -> Option<Table> {
    let floors = list(v, "/noise_floor/routers");
    let mut rows: Vec<&Value> = list(v, "/routers").iter().collect();
    if let Some(n) = worst {
        let kl = |r: &Value| num(r, "/kl_mean").unwrap_or(f64::NEG_INFINITY);
        rows.sort_by(|a, b| kl(b).total_cmp(&kl(a)));
        rows.truncate(n);
    }
    let col = |path: &str, digits| column(rows.iter().map(|r| num(r, path)), digits);
    let percents = |path: &str| column(rows.iter().map(|r| num(r, path).map(|x| x * 100.0)), 4);
    let floor = |r: &&Value| floors.iter().find(|f| num(f, "/layer") == num(r, "/layer")).and_then(|f| num(f, "/kl_mean"));
    let columns = vec![
        ("KL", col("/kl_mean", 4)),
        ("floor", rows.iter().map(|r| floor(r).map_or("\u{2013}".into(), |x| sig(x, 2))).collect()),
        ("99 %", col("/kl_p99", 3)),
        ("over 0.1,\u{a0}%", percents("/kl_above_0_1")),
        ("local, largest", col("/kl_local_max", 3)),
        ("overlap,\u{a0}%", percents("/overlap")),
        ("same set,\u{a0}%", percents("/exact_set")),
        ("same first,\u{a0}%", percents("/top1")),
        ("gate mass,\u{a0}%", percents("/gate_mass")),
    ];
    let title = if worst.is_some() { "Routers that diverge most" } else { "All routers" };
    let names = layer_names(rows.into_iter());
    Table::of(title, "layer", names, columns)
}

/// Samples of a profile and how the hot set does on a task that it has not seen.
pub(super) fn profiled_tasks(v: &Value) -> Option<Table> {
    let rows = list(v, "/tasks");
    let show = |path: &str| -> Vec<String> { rows.iter().map(|t| num(t, path).map_or("\u{2013}".into(), count)).collect() };
    let left = |t: &Value| v.pointer("/coverage/left_out")?.get(text(t, "/name")?)?.as_f64();
    let columns = vec![
        ("samples", show("/samples")),
        ("tokens", show("/tokens")),
        ("covered if left out,\u{a0}%", column(rows.iter().map(|t| left(t).map(|x| x * 100.0)), 3)),
    ];
    Table::of("Tasks", "task", rows.iter().map(|t| text(t, "/name").unwrap_or("\u{2013}").into()).collect(), columns)
}

/// Balance of the layers.
pub(super) fn layers(v: &Value) -> Option<Table> {
    let rows = list(v, "/layers");
    let show = |path: &str| -> Vec<String> { rows.iter().map(|l| num(l, path).map_or("\u{2013}".into(), count)).collect() };
    let hot = rows.iter().map(|l| l.get("hot").and_then(Value::as_array).map_or("\u{2013}".into(), |h| h.len().to_string()));
    let columns = vec![
        ("experts", show("/experts")),
        ("hot", hot.collect()),
        ("coverage,\u{a0}%", column(rows.iter().map(|l| num(l, "/coverage").map(|x| x * 100.0)), 3)),
        ("variation", column(rows.iter().map(|l| num(l, "/cv")), 3)),
        ("never used", show("/unused")),
    ];
    let names = layer_names(rows.iter());
    Table::of("All layers", "layer", names, columns)
}

/// How well choices are named a layer early.
pub(super) fn lookahead(v: &Value) -> Option<Table> {
    let rows = list(v, "/lookahead");
    let share = |path: &str| column(rows.iter().map(|l| num(l, path).map(|x| x * 100.0)), 3);
    let columns = vec![("by its router,\u{a0}%", share("/next_router")), ("by the map,\u{a0}%", share("/map"))];
    let names = layer_names(rows.iter());
    Table::of("Choices named a layer early", "layer", names, columns)
}

/// How the hot set settles with samples, and how tasks agree on it.
pub(super) fn stability(v: &Value) -> Vec<Table> {
    let samples = list(v, "/stability/by_samples");
    let names = samples.iter().map(|s| num(s, "/samples").map_or("\u{2013}".into(), count)).collect();
    let cells = column(samples.iter().map(|s| num(s, "/jaccard")), 3);
    let by_samples = Table::of("Hot set by number of samples", "samples", names, vec![("Jaccard", cells)]);
    let mut pairs = Vec::new();
    for (a, x) in entries(v, "/stability/jaccard_tasks") {
        match x.as_object() {
            Some(inner) => pairs.extend(inner.iter().map(|(b, x)| (format!("{a} / {b}"), x.as_f64()))),
            None => pairs.push((a.clone(), x.as_f64())),
        }
    }
    let cells = column(pairs.iter().map(|(_, x)| *x), 3);
    let by_task = Table::of("Hot sets of tasks", "task", pairs.into_iter().map(|(n, _)| n).collect(), vec![("Jaccard", cells)]);
    [by_samples, by_task].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_sensible_digits() {
        let shown = [0.0, 2.134e-6, 0.01234, 8.8127, 123.4, 9.999].map(|x| sig(x, 3));
        assert_eq!(shown, ["0", "2.13\u{d7}10\u{207b}\u{2076}", "0.0123", "8.81", "123", "10.0"]);
        assert_eq!([0.0, 0.9412, 0.99932, 1.0, 0.000_04].map(percent), ["0 %", "94.1 %", "99.93 %", "100 %", "0.0040 %"]);
        assert_eq!([1.01259, 0.99, 1.000_002_1].map(change), ["+1.26 %", "\u{2212}1.00 %", "+0.0002 %"]);
        assert_eq!([7.0, 1234.0, 1_234_567.0].map(count), ["7", "1,234", "1,234,567"]);
    }

    #[test]
    fn points_of_a_column_line_up() {
        assert_eq!(column([Some(0.0213), None, Some(0.001)].into_iter(), 3), ["0.0213", "\u{2013}", "0.0010"]);
    }
}
