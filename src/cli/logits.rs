//! `moe logits`.

use super::{Device, MemoryArgs};
use clap::Args;
use std::path::PathBuf;

/// Write logits, hidden states and router outputs for given token ids.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// Checkpoint or artifact directory.
    pub model: PathBuf,
    /// Safetensors file with `input_ids`, I64 or I32 [B, T].
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Where to write `logits`, F32 [B, T, V].
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Also write `hidden.<i>`, F32 [B, T, D]: what enters layer i, the last one after the final norm.
    #[arg(long)]
    pub hidden: bool,
    /// Also write `router_output.<layer>`, F32 [B * T, E]: router logits before any softmax.
    #[arg(long)]
    pub routers: bool,
    /// Go token by token through the cache instead of all at once.
    #[arg(long)]
    pub step: bool,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Memory of the GPU and of the host.
    #[command(flatten)]
    pub memory: MemoryArgs,
}
