//! `moe inspect`.

use clap::Args;
use std::path::PathBuf;

/// Show what a model is made of, and its size under each precision profile.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Checkpoint or artifact directory.
    pub model: PathBuf,
    /// List every tensor.
    #[arg(long)]
    pub tensors: bool,
}
