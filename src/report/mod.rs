//! Tables, JSON, units and progress: the only module that prints.
//!
//! Knows how wide a column is; must not know models or engines. Results go to standard output, everything else to standard
//! error, so that a pipe carries results alone.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod chart;
mod digest;
pub mod page;
mod plain;
mod rounding;
mod tiers;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// What the user asked to see.
#[derive(Clone, Copy, Debug, Default)]
pub struct Out {
    /// One JSON object instead of tables.
    pub json: bool,
    /// No progress, no notes.
    pub quiet: bool,
    /// Part of a larger command, whose JSON object will hold this one's.
    pub nested: bool,
}

impl Out {
    /// The result as JSON, if JSON was asked for.
    pub fn json(&self, value: &impl Serialize) -> std::io::Result<()> {
        if self.json && !self.nested {
            let mut out = std::io::stdout().lock();
            serde_json::to_writer_pretty(&mut out, value)?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// A line of the result, unless JSON was asked for. A closed pipe is success.
    pub fn line(&self, text: impl AsRef<str>) {
        if !self.json {
            write_out(text.as_ref(), true);
        }
    }

    /// A piece of text of the result without a line end, flushed at once.
    pub fn piece(&self, text: &str) {
        write_out(text, false);
    }

    /// A note to the user on standard error, unless quiet.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            eprintln!("{}", text.as_ref());
        }
    }

    /// A warning on standard error.
    pub fn warn(&self, text: impl AsRef<str>) {
        eprintln!("warning: {}", text.as_ref());
    }

    /// A progress bar over bytes, drawn on a terminal only.
    pub fn bytes(&self, total: u64, label: &str) -> Progress {
        self.bar(total, label, "{msg:12} {bar:32} {binary_bytes} / {binary_total_bytes}  {binary_bytes_per_sec}  eta {eta}")
    }

    /// A progress bar over counted things, drawn on a terminal only.
    pub fn count(&self, total: u64, label: &str) -> Progress {
        self.bar(total, label, "{msg:12} {bar:32} {pos} / {len}  {per_sec}  eta {eta}")
    }

    fn bar(&self, total: u64, label: &str, template: &str) -> Progress {
        let shown = !self.quiet && std::io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(8) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label.to_string());
        Progress(bar)
    }
}

/// Prints the chain of an error and its cure.
pub fn error(chain: &str, hint: Option<&str>) {
    eprintln!("moe: {chain}");
    if let Some(hint) = hint {
        eprintln!("hint: {hint}");
    }
}

fn write_out(text: &str, line: bool) {
    let mut out = std::io::stdout().lock();
    let done = out.write_all(text.as_bytes()).and_then(|()| if line { out.write_all(b"\n") } else { out.flush() });
    if done.is_err_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) {
        std::process::exit(0);
    }
}

/// A running count, safe to advance from any thread.
#[derive(Clone, Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Counts forward.
    pub fn advance(&self, n: u64) {
        self.0.inc(n);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// A table with a header; columns after the first are right-aligned.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|h| h.to_string()).collect::<Vec<_>>());
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        column.set_cell_alignment(if i == 0 { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.lines().map(|l| l.trim_end().to_string()).collect::<Vec<_>>().join("\n")
}

/// The same as a Markdown table.
pub fn markdown(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let mut lines = vec![line(header.iter().map(|h| h.to_string()).collect())];
    lines.push(line(header.iter().enumerate().map(|(i, _)| if i == 0 { "---".into() } else { "---:".into() }).collect()));
    lines.extend(rows.iter().map(|r| line(r.iter().map(|c| c.replace('|', "\\|")).collect())));
    lines.join("\n")
}

/// Bytes in decimal units with three significant digits, e.g. `41.2 MB`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, &["B", "kB", "MB", "GB", "TB"])
}

/// A count with decimal prefixes, e.g. `50.9 M`.
pub fn count(n: u64) -> String {
    scaled(n as f64, &["", "k", "M", "B", "T"]).trim_end().to_string()
}

fn scaled(mut x: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while x >= 999.5 && unit + 1 < units.len() {
        x /= 1000.0;
        unit += 1;
    }
    let digits = if unit == 0 || x >= 99.95 {
        0
    } else if x >= 9.995 {
        1
    } else {
        2
    };
    format!("{x:.digits$} {}", units[unit])
}

/// Seconds for people, e.g. `1 h 02 min`, `3.4 s`, `56 ms`.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0),
        s => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), s % 3600.0 / 60.0),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn units_change_at_three_digits() {
        assert_eq!(super::bytes(999), "999 B");
        assert_eq!(super::bytes(999_600), "1.00 MB");
        assert_eq!(super::bytes(41_150_000), "41.1 MB");
        assert_eq!(super::count(50_900_000), "50.9 M");
    }
}
