//! `moe inspect`.

use super::MemoryArgs;
use clap::Args;
use std::path::PathBuf;

/// Show what a model is made of, its size under each precision profile, and what a budget of GPU memory would hold.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Checkpoint or artifact directory.
    #[arg(required_unless_present = "shape")]
    pub model: Option<PathBuf>,
    /// The shape of a public model instead, as in `moe bench`; shows what --vram-budget would hold.
    #[arg(long, conflicts_with_all = ["model", "tensors"], requires = "vram_budget", value_name = "NAME")]
    pub shape: Option<String>,
    /// Plan the memory as if the model were stored in this precision profile (default: as it is stored; for --shape, `bench`).
    #[arg(long, requires = "vram_budget", value_name = "NAME")]
    pub profile: Option<String>,
    /// Sequences at a time that the plan is shown for.
    #[arg(long, default_value_t = 1, requires = "vram_budget", value_name = "N")]
    pub batch: usize,
    /// List every tensor.
    #[arg(long)]
    pub tensors: bool,
    /// Memory of the GPU and of the host.
    #[command(flatten)]
    pub memory: MemoryArgs,
}
