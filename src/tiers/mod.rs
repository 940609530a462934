//! Which experts lie in the memory of the GPU: how many slots each layer gets out of a budget, which experts begin there, and which
//! one leaves when another comes.
//!
//! Pure functions over numbers: no device, no file, no model. The rules are written so that a kernel can follow them to the letter.

pub mod plan;
pub mod policy;
pub mod sizing;

pub use plan::{Needs, VramPlan};
pub use policy::{Cache, Policy};
pub use sizing::{Layer, TooSmall, expected_coverage, slots_per_layer};
