//! What a model is and in which order it computes: config to spec, spec to names and steps. No files, no tensors, no devices.

pub mod config;
pub mod family;
pub mod names;
pub mod outline;
pub mod plan;
pub mod rope;
pub mod spec;
pub mod structure;
