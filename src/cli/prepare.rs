//! `moe prepare`.

use super::QuantizeArgs;
use clap::Args;
use std::path::PathBuf;

/// The whole pipeline: quantize, calibrate, profile the experts, generate; one report.
#[derive(Debug, Args)]
pub struct PrepareArgs {
    /// What to write and how.
    #[command(flatten)]
    pub quantize: QuantizeArgs,
    /// Samples of each task set to measure on.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub samples: usize,
    /// Prompt of the generation.
    #[arg(long, short, default_value = "The water flows", value_name = "TEXT")]
    pub prompt: String,
    /// Tokens to generate.
    #[arg(long, short = 'n', default_value_t = 64, value_name = "N")]
    pub max_tokens: usize,
    /// Where to write the web page (default: report.html in the artifact).
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
