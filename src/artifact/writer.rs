//! Writes an artifact: carries out a [`Plan`], adds the side files, and ends with the manifest.

use super::error::ArtifactError;
use super::inventory::Inventory;
use super::journal::{Begun, Journal};
use super::layout;
use super::manifest::{self, FileSum, Manifest, Recipe, Source, VERSION};
use super::plan::Plan;
use super::solved::Solved;
use super::stream::write_shards;
use super::sums::{hash_files, hex};
use crate::files::{self, Existing, JOURNAL, OutputDir};
use crate::quant::round::Method;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where and how an artifact is written.
pub struct Job<'a> {
    /// The source.
    pub weights: &'a Inventory,
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
    /// Continue the unfinished run that the output's directory may hold.
    pub resume: bool,
    /// Bytes of memory for weights on their way.
    pub max_memory: u64,
    /// Waited for before each write; for measuring what interruptions do.
    pub write_delay: Duration,
    /// Asked often; once it says so, writing ends soon.
    pub stopped: &'a (dyn Fn() -> bool + Sync),
    /// Called before the first byte of a resumed run with the number of weight files done, of files in all, and about how many
    /// source bytes that saves.
    pub resumed: &'a (dyn Fn(usize, usize, u64) + Sync),
    /// Called with the number of source bytes done since the last call.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// Writes the artifact. Where it ends early for a reason that may pass, finished weight files are kept for `resume`; else nothing
/// is left.
pub fn write(job: Job<'_>) -> Result<Manifest, ArtifactError> {
    let plan = job.plan;
    check_space(plan, job.output)?;
    let recipe = Recipe { scale_dtype: plan.scale_dtype.name().to_lowercase(), ..job.recipe.clone() };
    let begun = Begun::new(job.weights, plan, &recipe)?;
    let total = plan.shards.len();
    let mut dir = OutputDir::claim(job.output, job.existing)?;
    let past = match Journal::open(dir.path())? {
        Some(mut past) if job.resume => {
            past.check(dir.path(), job.weights, &begun, job.stopped)?;
            Some(past)
        }
        Some(past) if !past.shards.is_empty() && job.existing == Existing::Refuse => {
            return Err(ArtifactError::Unfinished { path: dir.path().to_path_buf(), finished: past.shards.len(), total });
        }
        _ => None,
    };
    let journal = match past {
        Some(past) => {
            let finished = past.shards.iter().map(|sum| sum.name.as_str());
            dir.clear(&finished.chain([JOURNAL]).collect::<Vec<_>>())?;
            let written: u64 = past.shards.iter().map(|sum| sum.bytes).sum();
            let share = written as f64 / plan.shards.iter().map(|shard| shard.bytes).sum::<u64>().max(1) as f64;
            (job.resumed)(past.shards.len(), total, (share * plan.totals.source_bytes as f64) as u64);
            past
        }
        None => {
            dir.clear(&[])?;
            Journal::start(dir.path(), begun)?
        }
    };
    dir.keep();
    let stopped = |finished, source| ArtifactError::Stopped { finished, total, source: Box::new(source) };
    match fill(&job, recipe, dir.path(), &journal) {
        Ok(manifest) => dir.commit().map(|()| manifest).map_err(|e| stopped(total, e.into())),
        Err(e) => {
            let finished = Journal::open(dir.path()).ok().flatten().map_or(0, |journal| journal.shards.len());
            if matches!(e, ArtifactError::Interrupted) || (finished > 0 && e.is_passing()) {
                return Err(stopped(finished, e));
            }
            dir.discard();
            Err(e)
        }
    }
}

/// Writes every file into `dir`.
fn fill(job: &Job<'_>, recipe: Recipe, dir: &Path, journal: &Journal) -> Result<Manifest, ArtifactError> {
    let plan = job.plan;
    let checkpoint = job.weights.checkpoint();
    let known = |path: &Path| journal.sources.iter().find(|sum| path.file_name().is_some_and(|name| name == sum.name.as_str()));
    let unknown: Vec<&Path> = checkpoint.shards().iter().map(|s| s.path.as_path()).filter(|p| known(p).is_none()).collect();
    let failed = AtomicBool::new(false);
    let stopped = || failed.load(Ordering::Relaxed) || (job.stopped)();
    let (shards, hashed) = std::thread::scope(|scope| {
        let hashing = scope.spawn(|| hash_files(&unknown, &stopped, &|sum| journal.source(sum)));
        let shards = write_shards(job, dir, journal);
        failed.store(shards.is_err(), Ordering::Relaxed);
        let hashed = hashing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ArtifactError>((shards?, hashed?))
    })?;
    if (job.stopped)() {
        return Err(ArtifactError::Interrupted);
    }
    let mut sources: Vec<FileSum> = journal.sources.iter().cloned().chain(hashed).collect();
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    for side in checkpoint.side_files()? {
        if let Some(name) = side.file_name() {
            files::copy(&side, &dir.join(name))?;
        }
    }
    let put = |name: &str, bytes: &[u8]| files::write_atomic(&dir.join(name), bytes);
    if let Some(index) = layout::index(&plan.shards) {
        put("model.safetensors.index.json", pretty(&index)?.as_bytes())?;
    }
    put("config.json", pretty(&plan.config)?.as_bytes())?;
    let config = checkpoint.config_bytes();
    let config_sum = FileSum { name: "config.json".into(), bytes: config.len() as u64, sha256: hex(Sha256::digest(config)) };
    let manifest = Manifest {
        version: VERSION,
        tool: env!("CARGO_PKG_VERSION").into(),
        family: job.weights.outline().model_type.clone(),
        source: Source {
            name: checkpoint.dir().file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
            files: std::iter::once(config_sum).chain(sources).collect(),
        },
        recipe,
        tensors: plan.rows.clone(),
        shards,
        totals: plan.totals,
        measured: None,
    };
    put(manifest::FILE, &manifest.to_bytes()?)?;
    Ok(manifest)
}

/// Fails if the weights will not fit the disk of `output`, beside or in place of what an unfinished run has left.
pub fn check_space(plan: &Plan, output: &Path) -> Result<(), ArtifactError> {
    let needed: u64 = plan.shards.iter().map(|s| s.bytes).sum();
    match files::available_bytes(output).map(|bytes| bytes + files::partial_bytes(output)) {
        Some(available) if available < needed => Err(ArtifactError::Space { path: output.to_path_buf(), needed, available }),
        _ => Ok(()),
    }
}

fn pretty(value: &Value) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(value).map(|text| text + "\n")
}
