//! What the user typed, before anything is opened. One file a subcommand; only this module names clap.

mod bench;
mod doctor;
mod export;
mod inspect;
mod logits;
mod measure;
mod memory;
mod prepare;
mod profile_experts;
mod quantize;
mod run;
mod tiers;
mod verify;

pub use bench::BenchArgs;
pub use doctor::DoctorArgs;
pub use export::ExportArgs;
pub use inspect::InspectArgs;
pub use logits::LogitsArgs;
pub use measure::{CalibrateArgs, PerplexityArgs, ReportArgs, TextArgs};
pub use memory::{Ahead, MemoryArgs, Numa};
pub use prepare::PrepareArgs;
pub use profile_experts::{ListFormat, ProfileExpertsArgs};
pub use quantize::QuantizeArgs;
pub use run::RunArgs;
pub use tiers::TiersArgs;
pub use verify::VerifyArgs;

use clap::{Parser, Subcommand, ValueEnum};

/// Quantize, measure, profile and run Mixture-of-Experts language models on your own hardware.
#[derive(Debug, Parser)]
#[command(name = "moe", version, propagate_version = true, max_term_width = 110)]
#[command(after_help = "Exit codes: 0 done, 1 bad input or usage, 2 failure, 3 done but a threshold was crossed.")]
pub struct Cli {
    /// Print one JSON object instead of tables.
    #[arg(long, global = true, help_heading = "In every command")]
    pub json: bool,
    /// No progress and no notes.
    #[arg(long, short, global = true, help_heading = "In every command")]
    pub quiet: bool,
    /// Worker threads (default: all cores).
    #[arg(long, global = true, value_name = "N", help_heading = "In every command")]
    pub threads: Option<usize>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Shown after the options of `moe quantize`.
const QUANTIZE_HELP: &str = "\
Examples:
  moe quantize Qwen3-30B-A3B -o Qwen3-30B-A3B-moe --dry-run   what would be written, and who can load it
  moe quantize Qwen3-30B-A3B -o Qwen3-30B-A3B-moe             write it
  moe quantize Qwen3-30B-A3B -o Qwen3-30B-A3B-moe --resume    go on after Ctrl-C, a crash or a full disk

Until everything is on disk, files lie in .<DIR>.partial beside the output; nothing half-written ever has its name.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what a model is made of, and its size under each precision profile.
    Inspect(InspectArgs),
    /// The whole pipeline: quantize, calibrate, profile the experts, generate; one report.
    Prepare(PrepareArgs),
    /// Write a mixed-precision artifact of a 16-bit checkpoint.
    #[command(after_help = QUANTIZE_HELP)]
    Quantize(QuantizeArgs),
    /// Measure what quantization did: perplexity, divergence of the outputs and of every router.
    Calibrate(CalibrateArgs),
    /// Measure the perplexity of a model; compare it with an expectation or a baseline.
    Perplexity(PerplexityArgs),
    /// Find the experts that are used most, and what holding them is worth.
    ProfileExperts(ProfileExpertsArgs),
    /// Replay routing traces: how often a cache of experts hits, by policy and budget.
    Tiers(TiersArgs),
    /// Generate text.
    Run(RunArgs),
    /// Write logits, hidden states and router outputs for given token ids.
    Logits(LogitsArgs),
    /// Measure speed: decoding at several batch sizes, prompts, time to the first token.
    Bench(BenchArgs),
    /// Check an artifact: names, shapes, scales, checksums.
    Verify(VerifyArgs),
    /// Write a GGUF file for llama.cpp.
    Export(ExportArgs),
    /// Check the GPU: driver, compiler, memory, bandwidth, and every kernel against the processor.
    Doctor(DoctorArgs),
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// A GPU if one is usable, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// A CUDA GPU, or fail.
    Cuda,
}
