//! What `perplexity` and `calibrate` share: windows from texts or task sets, and where reports go.

use super::UserError;
use crate::artifact::sums::hex;
use crate::calib::sets::{self, TaskSet};
use crate::calib::windows::{self, Protocol, Window};
use crate::cli::{ReportArgs, TextArgs};
use crate::files;
use crate::model::spec::ModelSpec;
use crate::report::{self, Out};
use crate::text::{AddSpecial, Tokenizer};
use anyhow::Result;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Windows to run, and where they come from.
pub struct Material {
    /// The windows.
    pub windows: Vec<Window>,
    /// Names that [`Window::task`] indexes; one empty name for a plain text.
    pub tasks: Vec<String>,
    /// Source, sha256 and tokens, for the report.
    pub provenance: Value,
    /// Protocol, for the report.
    pub protocol: String,
}

/// A tokenizer that fits the model.
pub fn tokenizer(dir: &Path, spec: &ModelSpec) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::open(dir)?;
    let (have, vocab) = (tokenizer.vocab_size(), spec.vocab);
    if have > vocab {
        let message = format!("the tokenizer of `{}` has {have} entries, more than the model's {vocab}", dir.display());
        return Err(UserError::new(message).hint("tokenizer and weights come from different models").into());
    }
    Ok(tokenizer)
}

/// Windows of a text file.
pub fn from_text(path: &Path, args: &TextArgs, tokenizer: &Tokenizer, max_positions: usize) -> Result<Material> {
    let protocol: Protocol = args.protocol.parse()?;
    let window = args.window.unwrap_or_else(|| protocol.window(max_positions));
    if window < 2 || window > max_positions {
        return Err(UserError::new(format!("`--window` is {window}, expected 2 to {max_positions}, the model's limit")).into());
    }
    let text = sets::text(path)?;
    let tokens = tokenizer.encode(&text, AddSpecial::No)?;
    let windows = windows::cut(&tokens, protocol, window, args.max_windows);
    if windows.is_empty() {
        let message = format!("`{}` has {} tokens, less than one window of {window}", path.display(), tokens.len());
        return Err(UserError::new(message).hint("give a longer text or a smaller --window").into());
    }
    let name = path.file_name().map(|n| n.to_string_lossy().to_string()).unwrap_or_default();
    Ok(Material {
        windows,
        tasks: vec![String::new()],
        provenance: serde_json::json!({"source": name, "sha256": sha256(text.as_bytes()), "tokens": tokens.len()}),
        protocol: format!("{}, windows of {window}, no BOS", args.protocol),
    })
}

/// Windows of task sets, one a sample; samples longer than the model's context are split, and it is said so.
pub fn from_tasks(
    specs: &[String],
    most_samples: Option<usize>,
    max_windows: Option<usize>,
    tokenizer: &Tokenizer,
    max_positions: usize,
    out: Out,
) -> Result<Material> {
    let tasks: Vec<TaskSet> = sets::resolve(specs)?;
    let mut windows = Vec::new();
    let mut digest = Sha256::new();
    let (mut split, mut num_tok) = (0, 0);
    for (i, task) in tasks.iter().enumerate() {
        for sample in task.samples.iter().take(most_samples.unwrap_or(usize::MAX)) {
            let tokens = sample.tokens(tokenizer)?;
            tokens.iter().for_each(|t| digest.update(t.to_le_bytes()));
            num_tok += tokens.len();
            let pieces = windows::pieces(&tokens, i, max_positions);
            split += (pieces.len() > 1) as usize;
            windows.extend(pieces);
        }
    }
    if split > 0 {
        out.note(format!("{split} samples are longer than the model's {max_positions} tokens and were split"));
    }
    if let Some(most) = max_windows.filter(|&m| m > 0 && m < windows.len()) {
        let stride = windows.len() / most;
        windows = windows.into_iter().step_by(stride).take(most).collect();
    }
    if windows.is_empty() {
        return Err(UserError::new("the task sets hold no text of two tokens or more").into());
    }
    let names: Vec<String> = tasks.into_iter().map(|t| t.name).collect();
    Ok(Material {
        windows,
        provenance: serde_json::json!({"source": format!("tasks {}", names.join(", ")), "sha256": hex(digest.finalize()), "tokens": num_tok}),
        tasks: names,
        protocol: "task samples, one window each, every token but the first scored".into(),
    })
}

/// Checksum in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

/// A size such as `24GiB`, `512MB` or `1000`.
pub fn bytes(text: &str) -> Result<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.trim() {
        "" | "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        "TiB" => 1099511627776.0,
        _ => return Err(UserError::new(format!("`{text}` is no size, expected for example 4GiB or 500MB")).into()),
    };
    match number.parse::<f64>() {
        Ok(n) if n >= 0.0 => Ok((n * factor) as u64),
        _ => Err(UserError::new(format!("`{text}` is no size, expected for example 4GiB or 500MB")).into()),
    }
}

/// A share such as `0.5%` or `0.005`.
pub fn share(text: &str) -> Result<f64> {
    let (number, factor) = text.strip_suffix('%').map_or((text, 1.0), |n| (n, 0.01));
    match number.trim().parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x * factor),
        _ => Err(UserError::new(format!("`{text}` is no share, expected for example 0.5%")).into()),
    }
}

/// Writes the report in every form asked for.
pub fn write_reports(report: &Value, args: &ReportArgs) -> Result<()> {
    files::write_atomic(&args.report, &serde_json::to_vec_pretty(report)?)?;
    if let Some(path) = &args.html {
        files::write_atomic(path, report::page::html(report)?.as_bytes())?;
    }
    if let Some(path) = &args.md {
        files::write_atomic(path, report::page::markdown(report).as_bytes())?;
    }
    if let Some(path) = &args.csv {
        files::write_atomic(path, report::page::csv(report).as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares() {
        assert_eq!(bytes("1.5GiB").unwrap(), 1_610_612_736);
        assert_eq!(bytes("500MB").unwrap(), 500_000_000);
        assert!(bytes("5 parsecs").is_err());
        assert!((share("0.5%").unwrap() - 0.005).abs() < 1e-15);
    }
}
