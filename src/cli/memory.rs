//! Where a model's bytes may lie; typed the same way in every command that runs one on a GPU.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Memory of the GPU and of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct MemoryArgs {
    /// Most GPU memory to use, what the driver takes included, e.g. 24GiB (default: all that is free).
    #[arg(long, value_name = "SIZE")]
    pub vram_budget: Option<String>,
    /// Most page-locked host memory for the experts, e.g. 48GiB. With less than all of them take, those that stay in GPU memory for
    /// good have no copy there (default: enough for all).
    #[arg(long, value_name = "SIZE")]
    pub host_budget: Option<String>,
    /// Which part of the host's memory holds the experts, where each processor has a part of its own.
    #[arg(long, value_name = "HOW", default_value = "off")]
    pub numa: Numa,
    /// List of hot experts, which the GPU shall hold first (default: hot_experts.json in the model's directory, if there is one).
    #[arg(long, value_name = "FILE")]
    pub hot: Option<PathBuf>,
    /// Most experts that each layer brings into GPU memory for the one behind it before that one has chosen, 0 for none; auto: 1 if the
    /// first tokens come faster for it.
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub ahead: Ahead,
    /// What says which experts those are: maps of `profile-experts --lookahead` (default: lookahead.map in the model's directory, if there is
    /// one, else the next layer's router itself, applied a layer early).
    #[arg(long, value_name = "FILE")]
    pub lookahead: Option<PathBuf>,
}

/// How many experts come ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ahead {
    /// As it is faster.
    #[default]
    Auto,
    /// So many at most.
    AtMost(usize),
}

impl std::str::FromStr for Ahead {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Ahead::Auto),
            n => n.parse().map(Ahead::AtMost).map_err(|_| "neither `auto` nor a number".into()),
        }
    }
}

/// How page-locked memory is spread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Numa {
    /// As the driver does it.
    #[default]
    Off,
    /// Page by page over all parts.
    Interleave,
    /// In the part that the GPU is plugged into.
    Bind,
}

impl MemoryArgs {
    /// Whether anything was typed.
    pub fn is_given(&self) -> bool {
        *self != Self::default()
    }
}
