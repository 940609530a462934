//! `moe doctor`.

use clap::Args;

/// Check the GPU: driver, compiler, memory, bandwidth, and every kernel against the processor.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Leave out the comparison of the kernels.
    #[arg(long)]
    pub quick: bool,
}
