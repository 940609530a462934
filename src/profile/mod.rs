//! Precision profiles, hardware profiles and expert usage, as data and pure functions.

pub mod allocate;
pub mod precision;
