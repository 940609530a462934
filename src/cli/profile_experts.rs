//! `moe profile-experts`.

use super::{Device, ReportArgs};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Find the experts that are used most, and what holding them is worth.
#[derive(Debug, Args)]
pub struct ProfileExpertsArgs {
    /// Checkpoint or artifact directory.
    pub model: PathBuf,
    /// Task set: a built-in name, or NAME=PATH of JSON lines, a text or a folder; repeatable (default: the eight built-in sets).
    #[arg(long, value_name = "TASK")]
    pub task: Vec<String>,
    /// Most samples of a task; every fourth is held out to measure on.
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Share of each layer's traffic that the hot experts shall cover (default: 0.85).
    #[arg(long, value_name = "X", conflicts_with = "budget")]
    pub coverage: Option<f64>,
    /// Bytes that the hot experts may take, e.g. 12GiB, spent where they cover most.
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<String>,
    /// Where to write the list (default: hot_experts.json in the artifact, or here for an original).
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Add the counts of an older list of this model.
    #[arg(long, value_name = "FILE")]
    pub merge: Option<PathBuf>,
    /// What an old count is worth when merging.
    #[arg(long, value_name = "X", default_value_t = 0.5, requires = "merge")]
    pub decay: f64,
    /// Also write which experts every token visited, for replay.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also fit, for each router but the first, a linear map to its choices from what the router before it sees, and write them; `run` and
    /// `bench` take them with --lookahead, or find lookahead.map in the model's directory.
    #[arg(long, value_name = "FILE")]
    pub lookahead: Option<PathBuf>,
    /// Form of the list.
    #[arg(long, value_enum, default_value_t)]
    pub format: ListFormat,
    /// Where to compute; `auto` is the processor here, so that the same numbers come out everywhere.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Most GPU memory to use, with --device cuda, e.g. 24GiB (default: all that is free).
    #[arg(long, value_name = "SIZE")]
    pub vram_budget: Option<String>,
    /// Memory for hidden states before they go to a scratch file, e.g. 4GiB.
    #[arg(long, default_value = "1GiB", value_name = "BYTES")]
    pub max_memory: String,
    /// Where results go.
    #[command(flatten)]
    pub reports: ReportArgs,
}

/// Form of a list of hot experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ListFormat {
    /// hot_experts.json.
    #[default]
    Moe,
    /// Counts by layer and expert, as SGLang's --init-expert-location reads them.
    Sglang,
}
