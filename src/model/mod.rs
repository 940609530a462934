//! What a model is and in which order it computes.

pub mod spec;
