//! `moe tiers`.

use super::ReportArgs;
use clap::Args;
use std::path::PathBuf;

/// Replay routing traces: how often a cache of experts hits, by policy and budget.
#[derive(Debug, Args)]
pub struct TiersArgs {
    /// Checkpoint or artifact directory: sizes of the experts, and of all that has to lie beside them.
    pub model: PathBuf,
    /// Trace that `moe profile-experts --trace` wrote for this model.
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Budgets of GPU memory for the whole model, e.g. 12GiB,24GiB, or shares of the experts, e.g. 25%,50% (default: every tenth
    /// that holds one token's experts).
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',')]
    pub vram_budget: Vec<String>,
    /// Policies: static, lru, lfu, lrfu (or lrfu:SHIFT, for a decay of 1 - 2^-SHIFT a token), belady (default: all).
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// Precision profile in which the model is taken to be stored (default: as it is).
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// List of hot experts, made from other texts than the trace: who begins in the slots, and how many each layer gets (default:
    /// hot_experts.json in the model's directory, if there is one).
    #[arg(long, value_name = "FILE")]
    pub hot: Option<PathBuf>,
    /// Where results go.
    #[command(flatten)]
    pub reports: ReportArgs,
}
