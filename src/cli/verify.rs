//! `moe verify`.

use clap::Args;
use std::path::PathBuf;

/// Check an artifact: names, shapes, scales, checksums.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Artifact directory.
    pub model: PathBuf,
    /// The checkpoint it was made from: routers and everything else unquantized must be equal bit for bit.
    #[arg(long, value_name = "DIR")]
    pub source: Option<PathBuf>,
}
