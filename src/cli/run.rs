//! `moe run`.

use super::{Device, MemoryArgs};
use clap::Args;
use std::path::PathBuf;

/// Generate text.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Checkpoint or artifact directory.
    pub model: PathBuf,
    /// Prompt; without any, standard input is read.
    #[arg(long, short, conflicts_with = "prompt_file")]
    pub prompt: Option<String>,
    /// File holding the prompt.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Converse, with the model's own chat template.
    #[arg(long, conflicts_with_all = ["prompt_file", "raw"])]
    pub chat: bool,
    /// Take the prompt as it is: no special tokens added.
    #[arg(long)]
    pub raw: bool,
    /// Most tokens to generate.
    #[arg(long, short = 'n', default_value_t = 256, value_name = "N")]
    pub max_tokens: usize,
    /// Randomness; 0 always takes the likeliest token (default: the model's, else 0).
    #[arg(long, value_name = "X")]
    pub temperature: Option<f32>,
    /// Sample among the K likeliest tokens.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample among the likeliest tokens whose mass reaches P.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Sample among tokens at least P times as likely as the likeliest.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide positive and multiply negative logits of tokens already seen.
    #[arg(long, value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// Seed of the sampler (default: from the clock, printed).
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop when this text appears; repeatable.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Count the experts used and add them to this list of hot experts, for `moe profile-experts --merge`; on a GPU this takes
    /// slower kernels.
    #[arg(long, value_name = "FILE")]
    pub update_profile: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Memory of the GPU and of the host.
    #[command(flatten)]
    pub memory: MemoryArgs,
}

impl RunArgs {
    /// Nothing typed but the model.
    pub fn new(model: &std::path::Path, device: Device) -> Self {
        Self {
            model: model.to_path_buf(),
            prompt: None,
            prompt_file: None,
            chat: false,
            raw: false,
            max_tokens: 256,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repeat_penalty: None,
            seed: None,
            stop: Vec::new(),
            update_profile: None,
            device,
            memory: MemoryArgs::default(),
        }
    }
}
