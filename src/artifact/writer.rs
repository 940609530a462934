//! Writes an artifact: carries out a [`Plan`], adds the side files, and ends with the manifest.

use super::error::ArtifactError;
use super::layout;
use super::manifest::{self, FileSum, Manifest, Recipe, Source, VERSION};
use super::plan::Plan;
use super::solved::Solved;
use super::stream::write_shards;
use super::sums::{hash_files, hex};
use super::weights::Weights;
use crate::files::{self, Existing, OutputDir};
use crate::quant::round::Method;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where and how an artifact is written.
pub struct Job<'a> {
    /// The source.
    pub weights: &'a Weights,
    /// What becomes of it.
    pub plan: &'a Plan,
    /// For the manifest.
    pub recipe: Recipe,
    /// How scales are chosen.
    pub method: Method,
    /// Codes and scales chosen before; the rest is rounded.
    pub solved: Option<&'a Solved>,
    /// No negative scales.
    pub positive_scales: bool,
    /// The directory to create.
    pub output: &'a Path,
    /// What to do if it exists.
    pub existing: Existing,
    /// Called with the number of source bytes done since the last call.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// Writes the artifact; nothing is left of it unless everything succeeds.
pub fn write(job: Job<'_>) -> Result<Manifest, ArtifactError> {
    let plan = job.plan;
    check_space(plan, job.output)?;
    let dir = OutputDir::create(job.output, job.existing)?;
    let checkpoint = job.weights.checkpoint();
    let sources: Vec<&Path> = checkpoint.shards().iter().map(|s| s.path.as_path()).collect();
    let stop = AtomicUsize::new(0);
    let (shards, sources) = std::thread::scope(|scope| {
        let hashing = scope.spawn(|| hash_files(&sources, &stop));
        let shards = write_shards(&job, dir.path());
        if shards.is_err() {
            // Whoever takes the next number past the end stops.
            stop.store(usize::MAX / 2, Ordering::Relaxed);
        }
        let sources = hashing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ArtifactError>((shards?, sources?))
    })?;
    for side in checkpoint.side_files()? {
        if let Some(name) = side.file_name() {
            files::copy(&side, &dir.path().join(name))?;
        }
    }
    let put = |name: &str, bytes: &[u8]| files::write_atomic(&dir.path().join(name), bytes);
    if let Some(index) = layout::index(&plan.shards) {
        put("model.safetensors.index.json", pretty(&index)?.as_bytes())?;
    }
    put("config.json", pretty(&plan.config)?.as_bytes())?;
    let config = checkpoint.config_bytes();
    let config_sum = FileSum { name: "config.json".into(), bytes: config.len() as u64, sha256: hex(Sha256::digest(config)) };
    let manifest = Manifest {
        version: VERSION,
        tool: env!("CARGO_PKG_VERSION").into(),
        family: job.weights.family().model_type.into(),
        source: Source {
            name: checkpoint.dir().file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
            files: std::iter::once(config_sum).chain(sources).collect(),
        },
        recipe: Recipe { scale_dtype: plan.scale_dtype.name().to_lowercase(), ..job.recipe },
        tensors: plan.rows.clone(),
        shards,
        totals: plan.totals,
        measured: None,
    };
    put(manifest::FILE, &manifest.to_bytes()?)?;
    dir.commit()?;
    Ok(manifest)
}

/// Fails if the weights will not fit the disk of `output`.
pub fn check_space(plan: &Plan, output: &Path) -> Result<(), ArtifactError> {
    let needed: u64 = plan.shards.iter().map(|s| s.bytes).sum();
    match files::available_bytes(output) {
        Some(available) if available < needed => Err(ArtifactError::Space { path: output.to_path_buf(), needed, available }),
        _ => Ok(()),
    }
}

fn pretty(value: &Value) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(value).map(|text| text + "\n")
}
