//! The quantized directory: reading weights from it or from an original, and writing it.

pub mod config;
pub mod error;
pub mod hot;
pub mod inventory;
mod journal;
pub mod layout;
pub mod lookahead;
pub mod manifest;
pub mod plan;
pub mod solved;
mod stream;
pub mod sums;
pub mod weights;
pub mod writer;
