//! What bits mean and how they are chosen: mathematics on rows and columns, no layers, no files.

mod feed;
pub mod format;
pub mod ggml;
pub mod gptq;
pub mod round;
mod search;
pub mod sets;
