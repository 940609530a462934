//! The quantized directory: reading weights from it or from an original, and writing it.

pub mod weights;
