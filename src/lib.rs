//! Tools that make Mixture-of-Experts language models usable on hardware people own.
//!
//! A config becomes a [`model::spec::ModelSpec`], a spec becomes a list of [`model::plan::Step`]s, an [`engine`] runs the
//! steps; everything else watches the steps or decides where bytes live. `ARCHITECTURE.md` has the map and the rules.
//!
//! Dimension letters, the same in code, kernels and documents: `T` tokens, `D` model width, `L` layers, `H`/`Hk` query and
//! key/value heads, `Dh` head width, `E` experts, `K` experts a token, `F` expert width, `V` vocabulary, `G` group;
//! for latent attention `Rq`, `Rkv` ranks and `Dn`, `Dr`, `Dv` head parts. Matrices are row-major `[out, in]`.
#![deny(missing_docs)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod artifact;
pub mod calib;
pub mod checkpoint;
pub mod cli;
pub mod command;
pub mod engine;
pub mod export;
pub mod files;
pub mod generate;
pub mod ids;
pub mod model;
pub mod profile;
pub mod quant;
pub mod report;
pub mod sample;
pub mod tensor;
pub mod text;
pub mod tiers;
