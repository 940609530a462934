//! `moe export`.

use clap::Args;
use std::path::PathBuf;

/// Write a model for another program: a GGUF file for llama.cpp.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Artifact directory, or a checkpoint.
    pub model: PathBuf,
    /// GGUF file to write.
    #[arg(long, value_name = "FILE", required = true)]
    pub gguf: PathBuf,
    /// The checkpoint that the artifact was made from: weights in groups wider than 32 are rounded anew from it.
    #[arg(long, value_name = "DIR")]
    pub source: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}
