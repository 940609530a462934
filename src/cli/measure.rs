//! `moe perplexity` and `moe calibrate`: what to measure on is typed the same way.

use super::Device;
use clap::Args;
use std::path::PathBuf;

/// What to measure on.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Text file to measure on.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// gguf: windows of 512, second half scored; paper: windows of 2048 or the model's limit, all scored.
    #[arg(long, default_value = "gguf", value_name = "NAME")]
    pub protocol: String,
    /// Window length, tokens (default: the protocol's).
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,
    /// Most windows, taken evenly spaced (default: all).
    #[arg(long, value_name = "N")]
    pub max_windows: Option<usize>,
    /// Where to compute; `auto` is the processor here, so that the same numbers come out everywhere.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Most GPU memory to use for each model, with --device cuda, e.g. 24GiB (default: all that is free).
    #[arg(long, value_name = "SIZE")]
    pub vram_budget: Option<String>,
    /// Memory for hidden states before they go to a scratch file, e.g. 4GiB.
    #[arg(long, default_value = "1GiB", value_name = "BYTES")]
    pub max_memory: String,
}

impl TextArgs {
    /// Nothing typed: the task sets, at the defaults.
    pub fn tasks(device: Device) -> Self {
        Self {
            text: None,
            protocol: "gguf".into(),
            window: None,
            max_windows: None,
            device,
            vram_budget: None,
            max_memory: "1GiB".into(),
        }
    }
}

/// Where results go besides the screen.
#[derive(Clone, Debug, Default, Args)]
pub struct ReportArgs {
    /// JSON report, the same object as --json.
    #[arg(long, default_value = "report.json", value_name = "FILE")]
    pub report: PathBuf,
    /// Also one self-contained web page.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Also Markdown, for pull requests.
    #[arg(long, value_name = "FILE")]
    pub md: Option<PathBuf>,
    /// Also CSV, for spreadsheets.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

/// Measure the perplexity of a model; compare it with an expectation or a baseline.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// Checkpoint or artifact directory.
    pub model: PathBuf,
    /// What to measure on.
    #[command(flatten)]
    pub text: TextArgs,
    /// Perplexity expected; further away than the tolerance ends with exit code 3.
    #[arg(long, value_name = "X", conflicts_with = "baseline")]
    pub expect: Option<f64>,
    /// How far from the expectation or baseline is accepted, e.g. 0.5%.
    #[arg(long, default_value = "0.5%", value_name = "P")]
    pub tolerance: String,
    /// Compare with the perplexity, text and protocol recorded in this file.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Record perplexity, text and protocol in this file.
    #[arg(long, value_name = "FILE")]
    pub write_baseline: Option<PathBuf>,
    /// Where results go.
    #[command(flatten)]
    pub reports: ReportArgs,
}

/// Measure what quantization did: perplexity, divergence of the outputs and of every router.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// The checkpoint.
    pub original: PathBuf,
    /// The artifact made from it.
    pub artifact: PathBuf,
    /// What to measure on; without --text, the task sets.
    #[command(flatten)]
    pub text: TextArgs,
    /// Task set: a built-in name, or NAME=PATH of JSON lines, a text or a folder; repeatable.
    #[arg(long, value_name = "TASK", conflicts_with = "text")]
    pub task: Vec<String>,
    /// Most samples of a task.
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Mean divergence of the outputs above which the exit code is 3, nats.
    #[arg(long, value_name = "X")]
    pub max_kld: Option<f64>,
    /// Increase of the perplexity above which the exit code is 3, e.g. 2%.
    #[arg(long, value_name = "P")]
    pub max_ppl_increase: Option<String>,
    /// Also quantize one component, and one layer's experts, at a time.
    #[arg(long)]
    pub sensitivity: bool,
    /// Where results go.
    #[command(flatten)]
    pub reports: ReportArgs,
}
