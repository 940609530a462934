//! The report as Markdown for pull requests and as CSV for spreadsheets.
//!
//! Knows the same keys as the page; numbers are rounded in Markdown and whole in CSV.

use super::digest::{self, Figure, Table};
use super::page::{command, commands};
use serde_json::Value;

/// Text that neither Markdown nor the HTML inside it takes for markup.
fn literal(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace(['\n', '\r'], " ")
}

fn figures(figures: &[Figure]) -> Option<String> {
    let rows: Vec<Vec<String>> = figures.iter().map(|f| vec![f.label.into(), f.value.clone(), literal(&f.detail)]).collect();
    (!rows.is_empty()).then(|| super::markdown(&["figure", "value", ""], &rows))
}

fn table(table: &Table) -> String {
    let header: Vec<&str> = table.header.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = table.rows.iter().map(|r| r.iter().map(|c| literal(c)).collect()).collect();
    format!("**{}**\n\n{}", table.title, super::markdown(&header, &rows))
}

/// The short form of a report for a pull request: verdict, key figures, tasks, the routers that diverge most.
pub fn markdown(report: &Value) -> String {
    let stages = commands(report);
    let verdict = stages.iter().find_map(|(_, v)| digest::verdict(v));
    let word = verdict.as_ref().map(|v| format!(": {}", v.word.to_lowercase())).unwrap_or_default();
    let mut out = vec![format!("### {}{word}", literal(&command(report)))];
    if let Some(verdict) = &verdict {
        out.push(literal(&verdict.sentence));
        let findings: Vec<String> = verdict.findings.iter().map(|f| format!("- {}", literal(f))).collect();
        out.extend((!findings.is_empty()).then(|| findings.join("\n")));
    }
    for (_, v) in stages {
        out.extend(figures(&digest::fidelity_figures(v)));
        out.extend(digest::tasks(v).as_ref().map(table));
        out.extend(digest::routers(v, Some(5)).as_ref().map(table));
        out.extend(digest::coverage_sentence(v));
        out.extend(figures(&digest::coverage_figures(v)));
        out.extend(digest::profiled_tasks(v).as_ref().map(table));
        out.extend(digest::lookahead(v).as_ref().map(table));
        out.extend(super::tiers::sentence(v));
        out.extend(super::tiers::tables(v).iter().map(table));
    }
    out.join("\n\n") + "\n"
}

/// Every metric of a report, one row each: section, name, value. Left out are definitions, expert ids and raw counts.
pub fn csv(report: &Value) -> String {
    let mut out = String::from("section,name,value\n");
    for (key, x) in digest::entries(report, "") {
        match x {
            Value::Object(_) | Value::Array(_) => rows(&mut out, key, "", x),
            x => row(&mut out, "summary", key, x),
        }
    }
    out
}

fn rows(out: &mut String, section: &str, name: &str, v: &Value) {
    let join = |key: &str| if name.is_empty() { key.to_string() } else { format!("{name}.{key}") };
    match v {
        Value::Object(map) => {
            for (key, x) in map {
                match x {
                    _ if ["definitions", "counts_by_task", "hot"].contains(&key.as_str()) => {}
                    // A stage of a longer report keeps its sections apart.
                    Value::Object(_) | Value::Array(_) if name.is_empty() && ["calibrate", "profile"].contains(&section) => {
                        rows(out, &format!("{section}.{key}"), "", x);
                    }
                    x => rows(out, section, &join(key), x),
                }
            }
        }
        Value::Array(items) => {
            for (i, x) in items.iter().enumerate() {
                let named = ["layer", "name", "item", "samples", "fraction"].iter().find_map(|k| x.get(*k));
                let key = named.map_or(i.to_string(), |k| k.as_str().map_or_else(|| k.to_string(), String::from));
                rows(out, section, &join(&key), x);
            }
        }
        x if section != "definitions" => row(out, section, name, x),
        _ => {}
    }
}

fn row(out: &mut String, section: &str, name: &str, v: &Value) {
    let value = match v {
        Value::Null => String::new(),
        Value::String(s) => s.clone(),
        v => v.to_string(),
    };
    let cell = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_string(),
    };
    out.push_str(&format!("{},{},{}\n", cell(section), cell(name), cell(&value)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> Value {
        json!({
            "command": "calibrate", "ppl_ratio": 1.0126, "same_top1": 0.9412, "kld": {"mean": 0.021, "stderr": 0.001},
            "routers": [{"layer": 7, "kl_mean": 0.02, "overlap": 0.97}], "tasks": {"a|b": {"tokens": 1024, "ppl_ratio": 0.99}},
            "noise_floor": {"kld": {"mean": 0.00001}}, "verdict": "warn", "findings": ["router of layer 7 <above> 0.01"],
            "definitions": {"kld": "text"}, "layers": [{"layer": 0, "hot": [1], "cv": 0.5}]
        })
    }

    #[test]
    fn markdown_is_stable() {
        let expected = "### moe calibrate: warning

The artifact is usable, with reservations: perplexity +1.26 %, the same first token for 94.1 % of the tokens, worst router KL \
0.0200 (layer 7).

- router of layer 7 &lt;above> 0.01

| figure | value |  |
| --- | ---: | ---: |
| Perplexity change | +1.26 % |  |
| KLD, mean | 0.0210 | \u{b1} 0.0010, floor 1.00\u{d7}10\u{207b}\u{2075} |
| Same first token | 94.1 % |  |
| Router KL, worst layer | 0.0200 | layer 7 |
| Same experts, worst layer | 97 % | layer 7 |

**Perplexity and divergence by task**

| task | tokens | change |
| --- | ---: | ---: |
| a\\|b | 1,024 | \u{2212}1.00 % |

**Routers that diverge most**

| layer | KL | overlap,\u{a0}% |
| --- | ---: | ---: |
| 7 | 0.02000 | 97.00 |
";
        assert_eq!(markdown(&report()), expected);
    }

    #[test]
    fn csv_is_stable() {
        let expected = "section,name,value
summary,command,calibrate
summary,ppl_ratio,1.0126
summary,same_top1,0.9412
kld,mean,0.021
kld,stderr,0.001
routers,7.layer,7
routers,7.kl_mean,0.02
routers,7.overlap,0.97
tasks,a|b.tokens,1024
tasks,a|b.ppl_ratio,0.99
noise_floor,kld.mean,0.00001
summary,verdict,warn
findings,0,router of layer 7 <above> 0.01
layers,0.layer,0
layers,0.cv,0.5
";
        assert_eq!(csv(&report()), expected);
    }

    #[test]
    fn cells_with_commas_are_quoted_and_stages_keep_apart() {
        let csv = csv(&json!({"calibrate": {"protocol": "a, \"b\"", "kld": {"mean": 1.0}}}));
        assert_eq!(csv, "section,name,value\ncalibrate,protocol,\"a, \"\"b\"\"\"\ncalibrate.kld,mean,1.0\n");
    }
}
