//! The section of a replayed trace: what a cache of experts hits, by policy and budget.

use super::chart::{self, Curve};
use super::digest::{Table, entries, list, num, percent, text};
use super::page::{Block, Section, drawn, section};
use serde_json::Value;

/// Policies in the order of the report, and the class of each curve.
fn policies(v: &Value) -> Vec<(&String, &'static str)> {
    const CLASSES: [&str; 4] = ["static", "lru", "lfu", "belady"];
    let class = |name: &str| CLASSES.into_iter().find(|c| *c == name).unwrap_or("lrfu");
    list(v, "/replay").first().into_iter().flat_map(|b| entries(b, "/policies")).map(|(name, _)| (name, class(name))).collect()
}

fn of(budget: &Value, policy: &str, key: &str) -> Option<f64> {
    budget.get("policies")?.get(policy)?.get(key)?.as_f64()
}

/// The answer, as a sentence.
pub(super) fn sentence(v: &Value) -> Option<String> {
    text(v, "/answer").map(|a| format!("{a}."))
}

/// Hit rates, bytes and distance from the bound by budget.
pub(super) fn tables(v: &Value) -> Vec<Table> {
    let table = |title: &str, key: &str, show: &dyn Fn(f64) -> String| {
        let columns = policies(v);
        let row = |b: &Value| {
            let cells = columns.iter().map(|(p, _)| of(b, p, key).map_or("\u{2013}".into(), show));
            Some([text(b, "/budget")?.to_string(), percent(num(b, "/fraction")?)].into_iter().chain(cells).collect())
        };
        let rows: Vec<Vec<String>> = list(v, "/replay").iter().filter_map(row).collect();
        let header = ["budget", "experts held"].into_iter().chain(columns.iter().map(|(p, _)| p.as_str()));
        let any = list(v, "/replay").iter().any(|b| columns.iter().any(|(p, _)| of(b, p, key).is_some()));
        any.then(|| Table { title: title.into(), header: header.map(String::from).collect(), rows })
    };
    let tables = [
        table("Visits that hit", "hit_rate", &percent),
        table("Fetched a token", "bytes_per_tok", &|x| super::bytes(x as u64)),
        table("Misses over Belady's", "misses_over_belady", &|x| format!("{x:.2}")),
    ];
    tables.into_iter().flatten().collect()
}

/// Curves and tables.
pub(super) fn replay(v: &Value) -> Option<Section> {
    let curves: Vec<Curve<'_>> = policies(v)
        .into_iter()
        .map(|(name, class)| {
            let points = list(v, "/replay").iter().filter_map(|b| Some((num(b, "/fraction")?, of(b, name, "hit_rate")?)));
            Curve { name, class, points: points.collect() }
        })
        .collect();
    let drawing = drawn(chart::curves(&curves, None, None), "Visits that hit, by share of the experts held", "");
    section(
        "Replay",
        "",
        [drawing].into_iter().chain(tables(v).into_iter().map(|table| Some(Block::Table { table, wide: true }))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_row_for_each_budget_and_a_curve_for_each_policy() {
        let p = |hit: f64| json!({"hit_rate": hit, "bytes_per_tok": 1e6, "misses_over_belady": null});
        let v = json!({"answer": "lrfu:3 hits most", "replay": [
            {"budget": "25%", "fraction": 0.25, "policies": {"lru": p(0.5), "lrfu:3": p(0.6)}},
            {"budget": "50%", "fraction": 0.5, "policies": {"lru": p(0.8), "lrfu:3": p(0.9)}}]});
        let tables = tables(&v);
        assert_eq!(tables.len(), 2, "a table without numbers is left out");
        assert_eq!(tables[0].header, ["budget", "experts held", "lru", "lrfu:3"]);
        assert_eq!(tables[0].rows, [["25%", "25 %", "50 %", "60 %"], ["50%", "50 %", "80 %", "90 %"]]);
        assert_eq!(tables[1].rows[0][2..], ["1.00 MB", "1.00 MB"]);
        let Some(Block::Chart { svg, .. }) = replay(&v).map(|s| s.into_blocks().remove(0)) else { panic!("no chart") };
        assert!(svg.contains(r#"class="curve lrfu""#) && svg.contains(r#"class="curve lru""#) && svg.contains("lrfu:3"));
        assert!(replay(&json!({})).is_none() && sentence(&json!({})).is_none());
    }
}
