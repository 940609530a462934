//! `moe quantize`.

use super::Device;
use clap::Args;
use std::path::PathBuf;

/// Write a mixed-precision artifact of a 16-bit checkpoint.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// Directory to create.
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Precision profile: mixed, compact, speq, fast, int8, or a TOML file.
    #[arg(long, default_value = "mixed", value_name = "NAME")]
    pub profile: String,
    /// Override the format of tensors by canonical id, e.g. 'layers.*.attn.o=int8:g64'; repeatable, first match wins.
    #[arg(long, value_name = "PATTERN=FORMAT")]
    pub set: Vec<String>,
    /// How codes and scales are chosen: search; absmax (bit-equal to compressed-tensors); with a calibration text, importance
    /// (weighted search) or gptq (weighted search and error feedback).
    #[arg(long, default_value = "search", value_name = "METHOD")]
    pub method: String,
    /// Group size of every grouped format of the profile: 32, 64 or 128.
    #[arg(long, value_name = "N")]
    pub group_size: Option<usize>,
    /// Give every 4-bit format of the profile a zero point a group: nearer to the weights for 4 bits more a group. Fewer readers
    /// load it, and a warning says which do not. `--set PATTERN=int4:g64:asym` does it for some tensors.
    #[arg(long)]
    pub asym: bool,
    /// Calibration text of --method importance and gptq: a built-in task set or NAME=PATH; repeatable (default: all built-in).
    #[arg(long, value_name = "TASK")]
    pub calib: Vec<String>,
    /// Most tokens of the calibration text, taken from all sets in turn.
    #[arg(long, default_value_t = 131_072, value_name = "N")]
    pub calib_tokens: usize,
    /// Choose formats so that all tensors together take at most this, e.g. 14GB, with the least damage: for what the profile
    /// quantizes and no --set names. Needs --method importance or gptq.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["target_bpw", "group_size"])]
    pub target_size: Option<String>,
    /// The same budget in bits per weight, e.g. 4.6.
    #[arg(long, value_name = "BITS", conflicts_with = "group_size")]
    pub target_bpw: Option<f64>,
    /// Only positive scales, for readers that refuse negative ones.
    #[arg(long)]
    pub positive_scales: bool,
    /// Largest weight file, e.g. 5GB; one larger tensor or expert makes a larger file.
    #[arg(long, default_value = "5GB", value_name = "SIZE")]
    pub shard_size: String,
    /// Continue a run that was stopped, from the weight files or calibrated layers it had finished; the result is that of an
    /// unbroken run.
    #[arg(long)]
    pub resume: bool,
    /// Most memory for weights between reading and writing, of which more than 600MiB is never needed. With a calibration text,
    /// also for hidden states, past which they go to a scratch file, and for second moments, past which experts go in waves.
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    pub max_memory: String,
    /// Where --method importance and gptq compute; `auto` is the processor here, so that the same artifact comes out everywhere.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Most GPU memory to use, with --device cuda, e.g. 24GiB (default: all that is free). Experts go in waves past it.
    #[arg(long, value_name = "SIZE")]
    pub vram_budget: Option<String>,
    /// Milliseconds to wait before each write; for tests of interruption.
    #[arg(long, default_value_t = 0, value_name = "MS", hide = true)]
    pub write_delay: u64,
    /// Print the plan and every problem; write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Replace an existing artifact; without --resume, also throw away what a stopped run had finished.
    #[arg(long)]
    pub force: bool,
}

impl QuantizeArgs {
    /// The budget as it was typed.
    pub fn target(&self) -> Option<String> {
        self.target_size.clone().or_else(|| self.target_bpw.map(|b| format!("{b} bits per weight")))
    }
}
