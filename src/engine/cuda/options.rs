//! What the caller chooses.

use super::ahead::Ahead;
use super::numa::Numa;
use super::plain::Kind;
use crate::artifact::lookahead::Lookahead;
use crate::tiers::Policy;
use std::sync::Arc;

/// Tokens that the caches of all sequences hold before further experts get memory.
const CACHE_TOK: usize = 4096;

/// Choices of the caller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which device.
    pub index: usize,
    /// Most bytes of its memory to use, the driver's own included; `None`: all that is free.
    pub budget_bytes: Option<u64>,
    /// Most bytes of page-locked host memory for experts; where that is too little for a copy of all, some slots never change hands
    /// and need none; where that is too little still, the rest is on the disk alone.
    pub host_bytes: u64,
    /// Which part of the host's memory they lie in.
    pub numa: Numa,
    /// Page-locked bytes beyond which a system is imitated that refuses more.
    pub locked_limit: Option<u64>,
    /// How often a profile saw each expert used, `[layers with routers][E]`; empty without one.
    pub visits: Vec<Vec<u64>>,
    /// Maps that say a layer early what a router will choose, where experts come ahead; without one the router itself does.
    pub lookahead: Arc<Lookahead>,
    /// Slots of each layer with a router; `None`: as many as the budget allows.
    pub expert_slots: Option<usize>,
    /// Who stays in the slots; `None`: LRFU by the shape of each layer.
    pub policy: Option<Policy>,
    /// Bytes a second of a slower link to imitate while decoding.
    pub link_limit: Option<f64>,
    /// What comes ahead of experts' own layers.
    pub ahead: Ahead,
    /// Tokens that the caches of all sequences together shall hold, if need be in place of experts.
    pub cache_tok: usize,
    /// Element type of the key and value cache, `F32` or `Bf16`; the fast kernels need `Bf16`.
    pub cache: Kind,
    /// Which kernels.
    pub kernels: Kernels,
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// One plain kernel a step.
    Plain,
    /// The same in single precision, with products in tiles: for passes of many tokens.
    Tiled,
    /// Fast kernels for the blocks whose shapes and formats they take.
    #[default]
    Fast,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            index: 0,
            budget_bytes: None,
            host_bytes: u64::MAX,
            numa: Numa::Off,
            locked_limit: None,
            visits: Vec::new(),
            lookahead: Arc::default(),
            expert_slots: None,
            policy: None,
            link_limit: None,
            ahead: Ahead::AtMost(0),
            cache_tok: CACHE_TOK,
            cache: Kind::Bf16,
            kernels: Kernels::Fast,
        }
    }
}
