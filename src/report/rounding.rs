//! The sections of a calibrated quantization: what error feedback did, and how a budget was spent.

use super::chart::{self, LayerBar, LayerBars, Ranked};
use super::digest::{Table, entries, list, num, sig, text};
use super::page::{Block, Section, drawn, section};
use serde_json::Value;

fn cells(v: &Value, path: &str, title: &str, header: &[&str], row: impl Fn(&Value) -> Option<Vec<String>>) -> Option<Table> {
    let rows: Vec<Vec<String>> = list(v, path).iter().filter_map(row).collect();
    let header = header.iter().map(|h| h.to_string()).collect();
    (!rows.is_empty()).then(|| Table { title: title.into(), header, rows })
}

/// Output errors before and after feedback, and the tokens that experts saw.
pub(super) fn errors(v: &Value) -> Option<Section> {
    let bars: Vec<LayerBar> = list(v, "/error_by_layer")
        .iter()
        .filter_map(|l| {
            let whole = num(l, "/whole").filter(|w| *w > 0.0)?;
            let layer = num(l, "/layer")? as usize;
            Some(LayerBar { layer, value: num(l, "/after")? / whole, p99: num(l, "/before").map(|b| b / whole), floor: None })
        })
        .collect();
    let drawing = chart::layer_bars(&LayerBars {
        title: "Relative output error by layer",
        name: "squared output error over squared output",
        bars: &bars,
        limits: None,
    });
    let percent = |l: &Value| Some(sig(100.0 * num(l, "/after")? / num(l, "/before").filter(|b| *b > 0.0)?, 3));
    let table = cells(
        v,
        "/errors",
        "By layer and kind",
        &["matrices", "format", "count", "relative error by search", "chosen", "of search, %", "fewest tokens", "most tokens"],
        |l| {
            let whole = num(l, "/whole").filter(|w| *w > 0.0)?;
            let relative = |key: &str| num(l, key).map(|x| sig(x / whole, 3));
            let number = |key: &str| num(l, key).map_or_else(String::new, super::digest::count);
            Some(vec![
                text(l, "/name")?.into(),
                text(l, "/format")?.into(),
                number("/matrices"),
                relative("/before")?,
                relative("/after")?,
                percent(l)?,
                number("/least_tokens"),
                number("/most_tokens"),
            ])
        },
    );
    let others: Vec<Vec<String>> =
        entries(v, "/other_tasks").filter_map(|(name, x)| Some(vec![name.clone(), sig(x.as_f64()?, 3)])).collect();
    let others = (!others.is_empty()).then(|| Table {
        title: "Tasks that the calibration text leaves out".into(),
        header: vec!["task".into(), "KLD".into()],
        rows: others,
    });
    section(
        "Output error",
        "Squared error of each matrix's outputs on the calibration text, over their squares.",
        [
            drawn(drawing, "Error by layer", "Thin lines reach to the error of the weighted search alone."),
            others.map(|table| Block::Table { table, wide: false }),
            table.map(|table| Block::Folded { table }),
        ],
    )
}

/// What the budget was spent on.
pub(super) fn allocation(v: &Value) -> Option<Section> {
    let shown = |x: &Value, key: &str| num(x, key).map(|k| format!("{k:.5}"));
    let bytes = |x: &Value| num(x, "/bytes").map(|b| super::bytes(b.max(0.0) as u64));
    let mut bars: Vec<Ranked> = list(v, "/allocation/items")
        .iter()
        .filter_map(|i| {
            let detail = format!("{}, {}", text(i, "/format")?, bytes(i)?);
            Some(Ranked { name: text(i, "/item")?.into(), detail, value: num(i, "/predicted_kld")? })
        })
        .collect();
    bars.sort_by(|a, b| b.value.total_cmp(&a.value));
    let most = bars.first().map_or(0.0, |b| b.value);
    let candidates =
        cells(v, "/allocation/candidates", "Candidates", &["candidate", "bytes", "KLD predicted", "measured", ""], |c| {
            let chosen = if c.get("chosen").and_then(Value::as_bool) == Some(true) { "chosen" } else { "" };
            Some(vec![
                text(c, "/name")?.into(),
                bytes(c)?,
                shown(c, "/predicted_kld")?,
                shown(c, "/measured_kld")?,
                chosen.into(),
            ])
        });
    let items = cells(v, "/allocation/items", "Items", &["item", "format", "bytes", "KLD predicted", "coarsest"], |i| {
        let (predicted, coarsest) = (shown(i, "/predicted_kld")?, shown(i, "/coarsest_kld")?);
        Some(vec![text(i, "/item")?.into(), text(i, "/format")?.into(), bytes(i)?, predicted, coarsest])
    });
    let last = num(v, "/allocation/measured_kld");
    let lead = last.map(|k| format!("The artifact, its codes chosen anew behind its own quantized layers, measures {k:.5}."));
    section(
        "Allocation",
        &lead.unwrap_or_default(),
        [
            drawn(chart::ranked(&bars, most, "Predicted divergence by item"), "What is left of the damage", ""),
            candidates.map(|table| Block::Table { table, wide: false }),
            items.map(|table| Block::Folded { table }),
        ],
    )
}
