//! Text to measure on, the protocols that cut it into windows, and what two runs over it say about each other.

pub mod hidden;
pub mod lockstep;
pub mod lookahead;
pub mod metrics;
pub mod routing;
pub mod sets;
pub mod solve;
pub mod trace;
pub mod windows;
