//! `moe perplexity`: one number, and whether it is the one expected.

use super::measure::{self, Material};
use super::{Interrupt, Status, UserError, open_model};
use crate::calib::lockstep;
use crate::calib::metrics::mean_stderr;
use crate::cli::PerplexityArgs;
use crate::files;
use crate::report::Out;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// What a baseline file records.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Baseline {
    perplexity: f64,
    tokens: usize,
    protocol: String,
    text_sha256: String,
}

/// Runs the command.
pub fn perplexity(args: &PerplexityArgs, out: Out) -> Result<Status> {
    let Some(path) = &args.text.text else {
        return Err(UserError::new("no text given").hint("use --text FILE").into());
    };
    let tolerance = measure::share(&args.tolerance)?;
    let max_memory = measure::bytes(&args.text.max_memory)?;
    let place = super::place(args.text.device, args.text.vram_budget.as_deref())?;
    let weights = open_model(&args.model)?;
    let tokenizer = measure::tokenizer(&args.model, weights.spec())?;
    let material = measure::from_text(path, &args.text, &tokenizer, weights.spec().max_positions)?;
    let baseline = args.baseline.as_ref().map(|p| read_baseline(p, &material)).transpose()?;

    let progress = out.count(lockstep::num_ticks(&weights, &material.windows), "perplexity");
    let stop = Interrupt::install()?;
    let start = std::time::Instant::now();
    let nll = lockstep::alone(&weights, place, &material.windows, max_memory, &mut || {
        progress.advance(1);
        !stop.pressed()
    })?;
    progress.finish();
    let (mean, stderr) = mean_stderr(nll.iter().copied());
    let ppl = mean.exp();
    let seconds = start.elapsed().as_secs_f64();
    let expected = args.expect.or(baseline.map(|b| b.perplexity));
    let off = expected.map(|e| (ppl / e - 1.0).abs());
    let crossed = off.is_some_and(|o| o.is_nan() || o > tolerance);
    let report = serde_json::json!({
        "command": "perplexity",
        "tool": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "perplexity": ppl,
        "perplexity_stderr": ppl * stderr,
        "tokens": nll.len(),
        "windows": material.windows.len(),
        "protocol": material.protocol,
        "text": material.provenance,
        "expected": expected,
        "tolerance": tolerance,
        "verdict": if crossed { "fail" } else { "pass" },
        "seconds": seconds,
    });
    let verdict = match (expected, off) {
        (Some(e), Some(o)) if crossed => format!(", {:.3} % from {e:.4}: beyond the tolerance of {}", 100.0 * o, args.tolerance),
        (Some(e), Some(o)) => format!(", {:.3} % from {e:.4}: within {}", 100.0 * o, args.tolerance),
        _ => String::new(),
    };
    out.line(format!("perplexity {ppl:.4} +- {:.4}{verdict}", ppl * stderr));
    out.line(format!("{} tokens in {} windows, {}", nll.len(), material.windows.len(), material.protocol));
    out.json(&report)?;
    measure::write_reports(&report, &args.reports)?;
    if let Some(path) = &args.write_baseline {
        let text_sha256 = material.provenance["sha256"].as_str().unwrap_or_default().to_string();
        let record = Baseline { perplexity: ppl, tokens: nll.len(), protocol: material.protocol, text_sha256 };
        files::write_atomic(path, &serde_json::to_vec_pretty(&record)?)?;
    }
    Ok(if crossed { Status::Crossed } else { Status::Done })
}

fn read_baseline(path: &std::path::Path, material: &Material) -> Result<Baseline> {
    let bytes = files::read(path)?;
    let baseline: Baseline =
        serde_json::from_slice(&bytes).map_err(|e| UserError::new(format!("`{}` is no baseline: {e}", path.display())))?;
    if baseline.protocol != material.protocol || material.provenance["sha256"] != baseline.text_sha256.as_str() {
        let message = format!("`{}` was recorded on another text or protocol ({})", path.display(), baseline.protocol);
        return Err(UserError::new(message).hint("record it again with --write-baseline").into());
    }
    Ok(baseline)
}
