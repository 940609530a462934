//! Writes an artifact: one streaming pass over the source, in the order in which the bytes leave.
//!
//! [`plan`] decides from headers alone what every tensor of the source becomes; [`write()`] carries it out. Batches of row
//! chunks are computed in parallel while one thread writes and hashes the batch before, so that memory is bounded by three
//! batches whatever the model. Must not know how formats were chosen.

use super::config::{self, Caveat};
use super::layout::{self, Content, Shard, Tensor, Unit};
use super::manifest::{self, Action, FileSum, Manifest, Recipe, Row, Source, Totals, VERSION};
use super::weights::{Data, Stored, Weight, Weights};
use crate::checkpoint::CheckpointError;
use crate::files::{self, Existing, FileError, OutputDir};
use crate::ids::{Part, Role, TensorId};
use crate::quant::format::{Bits, Format, Group};
use crate::quant::round::{self, Method, RoundError, Rounding};
use crate::tensor::{self, Dtype};
use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// Elements of a chunk, so that its floats stay in a second-level cache.
const CHUNK_ELEMENTS: usize = 128 * 1024;
/// Bytes of a piece that is copied.
const COPY_BYTES: usize = 2 << 20;
/// Source bytes of a batch; three batches are in flight.
const BATCH_BYTES: usize = 48 << 20;

/// Why an artifact cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// A file cannot be created or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A source tensor cannot be decoded.
    #[error("`{tensor}`: {source}")]
    Decode {
        /// The tensor.
        tensor: String,
        /// Why.
        source: Box<CheckpointError>,
    },
    /// The side files cannot be listed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The source is an artifact.
    #[error("`{}` is quantized already: `{tensor}` holds packed codes", dir.display())]
    AlreadyQuantized {
        /// The directory.
        dir: PathBuf,
        /// One such module.
        tensor: String,
    },
    /// A weight is no number.
    #[error("`{tensor}` holds {value} at {index:?}")]
    NonFinite {
        /// The tensor in the files.
        tensor: String,
        /// Where.
        index: Vec<usize>,
        /// What.
        value: f32,
    },
    /// A weight does not fit the type of the scales.
    #[error("`{tensor}` holds {value:e} at {index:?}, which is beyond the range of the model's type {dtype}")]
    OutOfRange {
        /// The tensor in the files.
        tensor: String,
        /// Where.
        index: Vec<usize>,
        /// What.
        value: f32,
        /// The model's type.
        dtype: Dtype,
    },
    /// The disk is too small.
    #[error("`{}` needs {needed} bytes, but {available} are free", path.display())]
    Space {
        /// Where.
        path: PathBuf,
        /// Bytes to write.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// The manifest or config cannot be expressed as JSON.
    #[error("cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A tensor of the plan is not in the source.
    #[error("`{tensor}` vanished from the source")]
    Vanished {
        /// Which.
        tensor: String,
    },
}

impl ArtifactError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ArtifactError::File(e) => e.hint(),
            ArtifactError::Decode { source, .. } => source.hint(),
            ArtifactError::Checkpoint(source) => source.hint(),
            ArtifactError::AlreadyQuantized { .. } => Some("start from the 16-bit checkpoint it was made from".into()),
            ArtifactError::NonFinite { .. } => Some("the checkpoint is damaged; download it again or ask its author".into()),
            ArtifactError::OutOfRange { .. } => Some("set `dtype` in config.json to float32 or bfloat16".into()),
            ArtifactError::Space { .. } => Some("free space, choose another disk, or a smaller profile".into()),
            ArtifactError::Json(_) | ArtifactError::Vanished { .. } => None,
        }
    }

    /// Whether the input is at fault, rather than the machine.
    pub fn is_bad_input(&self) -> bool {
        match self {
            ArtifactError::File(e) => e.is_bad_input(),
            ArtifactError::Json(_) | ArtifactError::Vanished { .. } => false,
            _ => true,
        }
    }
}

/// What is to be done with a tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The format it gets.
    pub format: Format,
    /// Why, where that is not plain.
    pub reason: Option<String>,
}

/// Everything that will be written, known from headers alone.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The weight files.
    pub shards: Vec<Shard>,
    /// What becomes of every source tensor.
    pub rows: Vec<Row>,
    /// `config.json` of the artifact.
    pub config: Value,
    /// Which readers are left out.
    pub caveats: Vec<Caveat>,
    /// Type of the scales.
    pub scale_dtype: Dtype,
    /// Sums.
    pub totals: Totals,
}

/// Decides what every tensor of the source becomes.
pub fn plan(weights: &Weights, choose: impl Fn(TensorId) -> Choice, shard_bytes: u64) -> Result<Plan, ArtifactError> {
    let checkpoint = weights.checkpoint();
    let scale_dtype = scale_dtype(weights);
    let mut planner = Planner {
        weights,
        scale_dtype,
        units: Vec::new(),
        rows: Vec::new(),
        row_of: HashMap::new(),
        copied: HashSet::new(),
        open: None,
    };
    for (id, shape) in weights.tensors() {
        planner.model_tensor(*id, shape, choose(*id))?;
    }
    for name in weights.side_tensors() {
        planner.side_tensor(name)?;
    }
    let Planner { units, rows, .. } = planner;
    let shards = layout::arrange(units, shard_bytes);
    let quantization =
        config::quantization_config(&weights.family().names, weights.tensors(), |id| choose(id).format, weights.side_tensors());
    let parameters: u64 = weights.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum();
    let model_bytes: u64 = rows.iter().filter(|r| r.id.is_some()).map(|r| r.bytes).sum();
    let totals = Totals {
        parameters,
        source_bytes: rows.iter().map(|r| r.source_bytes).sum(),
        bytes: rows.iter().map(|r| r.bytes).sum(),
        bpw: model_bytes as f64 * 8.0 / parameters.max(1) as f64,
    };
    let config = config::with_quantization(checkpoint.config(), quantization.value);
    Ok(Plan { shards, rows, config, caveats: quantization.caveats, scale_dtype, totals })
}

/// The model's type, in which scales are stored; that of the first plain tensor where the config names none.
pub fn scale_dtype(weights: &Weights) -> Dtype {
    if let Some(dtype) = config::model_dtype(weights.checkpoint().config()) {
        return dtype;
    }
    let types = weights.tensors().iter().filter_map(|(id, _)| weights.dtype(*id));
    types.into_iter().find(|d| d.is_float()).unwrap_or(Dtype::BF16)
}

struct Planner<'a> {
    weights: &'a Weights,
    scale_dtype: Dtype,
    units: Vec<Unit>,
    rows: Vec<Row>,
    row_of: HashMap<(Option<String>, Action, String, Option<String>), usize>,
    copied: HashSet<String>,
    /// Layer and expert of the unit being filled.
    open: Option<TensorId>,
}

impl Planner<'_> {
    fn model_tensor(&mut self, id: TensorId, shape: &[usize], choice: Choice) -> Result<(), ArtifactError> {
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        let stored = self.weights.stored(id).ok_or_else(vanished)?;
        let names = self.weights.family().names;
        let elements: usize = shape.iter().product();
        let (tensors, shapes, action) = match (stored, choice.format) {
            (Stored::Packed { module, .. }, _) => {
                let dir = self.weights.checkpoint().dir().to_path_buf();
                return Err(ArtifactError::AlreadyQuantized { dir, tensor: module.clone() });
            }
            (Stored::Plain { name }, Format::Source) => (vec![self.copy(name)?], Vec::new(), Action::Copied),
            (Stored::Slice { fused }, Format::Source) => {
                let once = self.copied.insert(fused.tensor.clone());
                (if once { vec![self.copy(&fused.tensor)?] } else { Vec::new() }, Vec::new(), Action::Copied)
            }
            (Stored::Fp8 { name, .. }, Format::Source) => {
                let content = Content::Decoded { id };
                let tensor = Tensor { name: name.clone(), dtype: self.scale_dtype, shape: shape.to_vec(), content };
                (vec![tensor], Vec::new(), Action::Decoded)
            }
            (stored, Format::Int { bits, group }) => {
                let &[rows, cols] = shape else { return Err(vanished()) };
                let (codes, scales, dims) = quantized(&names.module(id), id, [rows, cols], bits, group, self.scale_dtype);
                let action = if matches!(stored, Stored::Slice { .. }) { Action::Split } else { Action::Quantized };
                (vec![codes, scales], vec![dims], action)
            }
        };
        let source_bytes: u64 = match stored {
            Stored::Slice { fused } => self.source_dtype(&fused.tensor)?.bytes(elements) as u64,
            _ => self.weights.file_tensors(id).iter().map(|n| self.entry_bytes(n)).sum::<Result<u64, _>>()?,
        };
        let bytes = match (stored, choice.format) {
            (Stored::Slice { .. }, Format::Source) => source_bytes,
            _ => tensors.iter().chain(&shapes).map(Tensor::bytes).sum(),
        };
        let format = match choice.format {
            Format::Source => tensors
                .first()
                .map_or(self.weights.dtype(id), |t| Some(t.dtype))
                .map_or_else(String::new, |d| d.name().to_lowercase()),
            quantized => quantized.to_string(),
        };
        self.record(Some(id), self.weights.file_tensors(id), action, format, choice.reason, [source_bytes, bytes]);
        self.place(id, tensors, shapes);
        Ok(())
    }

    /// Adds tensors to the plan, those of one expert to one unit: codes of all projections, then their scales.
    fn place(&mut self, id: TensorId, tensors: Vec<Tensor>, mut shapes: Vec<Tensor>) {
        let key = TensorId { role: Role::ExpertGate, part: Part::Weight, ..id };
        let same = id.expert.is_some() && self.open == Some(key);
        self.open = id.expert.map(|_| key);
        if tensors.is_empty() {
            return;
        }
        match self.units.last_mut().filter(|_| same) {
            Some(unit) => {
                unit.tensors.extend(tensors);
                unit.shapes.append(&mut shapes);
                unit.tensors.sort_by_key(|t| matches!(t.content, Content::Scales { .. }));
            }
            None => self.units.push(Unit { tensors, shapes }),
        }
    }

    fn side_tensor(&mut self, name: &str) -> Result<(), ArtifactError> {
        let bytes = self.entry_bytes(name)?;
        let dtype = self.source_dtype(name)?.name().to_lowercase();
        let embed = TensorId::global(Role::Embed);
        if name == "lm_head.weight" && self.weights.spec().tied {
            let same = match (self.weights.checkpoint().tensor(name), self.weights.get(embed).map(|w| w.data)) {
                (Some(head), Some(Data::Plain { bytes, .. })) => head.bytes == bytes,
                _ => false,
            };
            if same {
                let reason = Some("a copy of the tied embedding".to_string());
                self.record(None, vec![name.into()], Action::Dropped, dtype, reason, [bytes, 0]);
                return Ok(());
            }
        }
        let unit = Unit { tensors: vec![self.copy(name)?], shapes: Vec::new() };
        self.units.push(unit);
        let reason = Some("not used by the forward pass".to_string());
        self.record(None, vec![name.into()], Action::Copied, dtype, reason, [bytes, bytes]);
        Ok(())
    }

    fn record(
        &mut self,
        id: Option<TensorId>,
        source: Vec<String>,
        action: Action,
        format: String,
        reason: Option<String>,
        bytes: [u64; 2],
    ) {
        let starred = id.map(|id| match id.expert {
            Some(e) => id.to_string().replacen(&format!("experts.{}.", e.0), "experts.*.", 1),
            None => id.to_string(),
        });
        let of_expert = id.and_then(|id| id.expert);
        let source: Vec<String> = source
            .into_iter()
            .map(|n| match of_expert {
                Some(e) => n.replacen(&format!(".experts.{}.", e.0), ".experts.*.", 1),
                None => n,
            })
            .collect();
        let key = (starred.clone().or_else(|| source.first().cloned()), action, format.clone(), reason.clone());
        match self.row_of.get(&key) {
            Some(&i) => {
                let row = &mut self.rows[i];
                row.tensors += 1;
                row.source_bytes += bytes[0];
                row.bytes += bytes[1];
            }
            None => {
                self.row_of.insert(key, self.rows.len());
                let [source_bytes, bytes] = bytes;
                self.rows.push(Row { id: starred, source, tensors: 1, action, reason, format, source_bytes, bytes });
            }
        }
    }

    fn copy(&self, name: &str) -> Result<Tensor, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })?;
        let content = Content::Copy { source: name.into() };
        Ok(Tensor { name: name.into(), dtype: entry.dtype, shape: entry.shape.clone(), content })
    }

    fn source_dtype(&self, name: &str) -> Result<Dtype, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name);
        entry.map(|e| e.dtype).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })
    }

    fn entry_bytes(&self, name: &str) -> Result<u64, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name);
        entry.map(|e| e.range.len() as u64).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })
    }
}

/// The three tensors of a quantized weight: packed codes, scales, shape.
fn quantized(module: &str, id: TensorId, shape: [usize; 2], bits: Bits, group: Group, scale: Dtype) -> (Tensor, Tensor, Tensor) {
    let [rows, cols] = shape;
    let format = Format::Int { bits, group };
    let tensor =
        |what: &str, dtype, shape: Vec<usize>, content| Tensor { name: format!("{module}.weight_{what}"), dtype, shape, content };
    (
        tensor("packed", Dtype::I32, vec![rows, format.packed_cols(cols)], Content::Codes { id, bits, group }),
        tensor("scale", scale, vec![rows, format.scale_cols(cols)], Content::Scales { id }),
        tensor("shape", Dtype::I64, vec![2], Content::Shape { shape }),
    )
}

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

/// Checksums of files, several at once; `next` is the number of the next file to take.
pub fn hash_files(paths: &[&Path], next: &AtomicUsize) -> Result<Vec<FileSum>, FileError> {
    let workers = (rayon::current_num_threads() / 4).clamp(1, 4).min(paths.len().max(1));
    let mut sums: Vec<(usize, FileSum)> = std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(path) = paths.get(i) else { return Ok::<_, FileError>(done) };
                done.push((i, hash_file(path)?));
            }
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let joined = handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Result<Vec<_>, _>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    sums.sort_by_key(|(i, _)| *i);
    Ok(sums.into_iter().map(|(_, sum)| sum).collect())
}

fn hash_file(path: &Path) -> Result<FileSum, FileError> {
    let failed = |op| move |source| FileError::Io { op, path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(failed("open"))?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer).map_err(failed("read"))?;
        if n == 0 {
            break;
        }
        bytes += n as u64;
        hash.update(&buffer[..n]);
    }
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    Ok(FileSum { name, bytes, sha256: hex(hash.finalize()) })
}

/// Bytes of a digest in lower-case hexadecimal.
pub fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// A piece of work whose result is the next bytes of the output.
enum Chunk<'a> {
    Open(&'a Shard),
    Copy { bytes: &'a [u8], dtype: Dtype, from: Place<'a>, checked: bool },
    Rows { weight: Weight<'a>, rows: std::ops::Range<usize>, from: Place<'a>, what: What },
    Scales(TensorId),
    Bytes(Vec<u8>),
    Release(String),
}

#[derive(Clone, Copy)]
enum What {
    Floats,
    Codes { id: TensorId, bits: Bits, group: Group },
}

/// Where a chunk's first element lies in its source tensor, for errors.
#[derive(Clone)]
struct Place<'a> {
    tensor: std::borrow::Cow<'a, str>,
    shape: Vec<usize>,
    first: usize,
}

impl Place<'_> {
    fn index(&self, element: usize) -> Vec<usize> {
        let mut rest = self.first + element;
        let mut index: Vec<usize> = self
            .shape
            .iter()
            .rev()
            .map(|&n| {
                let i = rest % n.max(1);
                rest /= n.max(1);
                i
            })
            .collect();
        index.reverse();
        index
    }
}

enum Done<'a> {
    Open(&'a Shard),
    Borrowed(&'a [u8]),
    Owned(Vec<u8>),
    Coded { id: TensorId, codes: Vec<u8>, scales: Vec<u8> },
    Scales(TensorId),
    Release(String),
}

fn write_shards(job: &Job<'_>, dir: &Path) -> Result<Vec<FileSum>, ArtifactError> {
    std::thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<Vec<Done<'_>>>(1);
        let writing = scope.spawn(move || Sink { dir, job, scales: HashMap::new(), open: None, sums: Vec::new() }.run(receive));
        let mut batch = Batch { job, chunks: Vec::new(), bytes: 0, send };
        let computed = batch.all();
        drop(batch);
        let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (computed, written) {
            // A closed channel says only that writing failed; why, the writer knows.
            (Err(Stop::Closed) | Ok(()), written) => written,
            (Err(Stop::Failed(e)), _) => Err(e),
        }
    })
}

enum Stop {
    Closed,
    Failed(ArtifactError),
}

impl From<ArtifactError> for Stop {
    fn from(e: ArtifactError) -> Self {
        Stop::Failed(e)
    }
}

/// Cuts the plan into chunks, in the order of the output, and computes them a batch at a time.
struct Batch<'a> {
    job: &'a Job<'a>,
    chunks: Vec<Chunk<'a>>,
    bytes: usize,
    send: mpsc::SyncSender<Vec<Done<'a>>>,
}

impl<'a> Batch<'a> {
    fn all(&mut self) -> Result<(), Stop> {
        for shard in &self.job.plan.shards {
            self.push(Chunk::Open(shard), 0)?;
            for tensor in &shard.tensors {
                self.tensor(tensor)?;
            }
        }
        self.flush()
    }

    fn tensor(&mut self, tensor: &'a Tensor) -> Result<(), Stop> {
        let weights = self.job.weights;
        match &tensor.content {
            Content::Copy { source } => {
                let checkpoint = weights.checkpoint();
                let view = checkpoint.tensor(source).ok_or_else(|| ArtifactError::Vanished { tensor: source.clone() })?;
                let element = view.dtype.bits().div_ceil(8).max(1);
                let checked = view.dtype.is_float() && !weights.side_tensors().contains(source);
                for (i, bytes) in view.bytes.chunks(COPY_BYTES).enumerate() {
                    let from = Place { tensor: source.into(), shape: view.shape.clone(), first: i * COPY_BYTES / element };
                    self.push(Chunk::Copy { bytes, dtype: view.dtype, from, checked }, bytes.len())?;
                }
                self.push(Chunk::Release(source.clone()), 0)
            }
            Content::Decoded { id } => self.rows(*id, What::Floats),
            Content::Codes { id, bits, group } => self.rows(*id, What::Codes { id: *id, bits: *bits, group: *group }),
            Content::Scales { id } => self.push(Chunk::Scales(*id), 0),
            Content::Shape { shape } => {
                self.push(Chunk::Bytes(shape.iter().flat_map(|&n| (n as i64).to_le_bytes()).collect()), 0)
            }
        }
    }

    fn rows(&mut self, id: TensorId, what: What) -> Result<(), Stop> {
        let weights = self.job.weights;
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        let weight = weights.get(id).ok_or_else(vanished)?;
        let names = weights.file_tensors(id);
        let tensor = names.first().ok_or_else(vanished)?;
        let (shape, first) = match weights.stored(id) {
            Some(Stored::Slice { fused }) => (fused.shape.to_vec(), fused.first_row * weight.cols),
            _ => (vec![weight.rows, weight.cols], 0),
        };
        let step = (CHUNK_ELEMENTS / weight.cols.max(1)).max(1);
        let row_bytes = weight.stored_bytes() / weight.rows.max(1);
        for start in (0..weight.rows).step_by(step) {
            let rows = start..(start + step).min(weight.rows);
            let from = Place { tensor: tensor.clone().into(), shape: shape.clone(), first: first + start * weight.cols };
            let bytes = rows.len() * row_bytes;
            self.push(Chunk::Rows { weight: weight.clone(), rows, from, what }, bytes)?;
        }
        names.into_iter().try_for_each(|name| self.push(Chunk::Release(name), 0))
    }

    fn push(&mut self, chunk: Chunk<'a>, bytes: usize) -> Result<(), Stop> {
        self.chunks.push(chunk);
        self.bytes += bytes;
        if self.bytes >= BATCH_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        let job = self.job;
        self.bytes = 0;
        let chunks = std::mem::take(&mut self.chunks);
        let done: Vec<Result<Done<'a>, ArtifactError>> =
            chunks.into_par_iter().map_init(Vec::new, |floats, chunk| compute(job, chunk, floats)).collect();
        // The first error in the order of the output, so that the same input always gives the same message.
        let done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
        self.send.send(done).map_err(|_| Stop::Closed)
    }
}

fn compute<'a>(job: &Job<'_>, chunk: Chunk<'a>, floats: &mut Vec<f32>) -> Result<Done<'a>, ArtifactError> {
    match chunk {
        Chunk::Open(shard) => Ok(Done::Open(shard)),
        Chunk::Scales(id) => Ok(Done::Scales(id)),
        Chunk::Bytes(bytes) => Ok(Done::Owned(bytes)),
        Chunk::Release(name) => Ok(Done::Release(name)),
        Chunk::Copy { bytes, dtype, from, checked } => {
            if checked && !all_finite(bytes, dtype) {
                floats.resize(bytes.len() * 8 / dtype.bits(), 0.0);
                tensor::decode(floats, dtype, bytes);
                finite(floats, &from)?;
            }
            (job.progress)(bytes.len() as u64);
            Ok(Done::Borrowed(bytes))
        }
        Chunk::Rows { weight, rows, from, what } => {
            floats.resize(rows.len() * weight.cols, 0.0);
            let decoded = weight.decode_rows(floats, rows.start);
            decoded
                .map_err(|source| ArtifactError::Decode { tensor: from.tensor.clone().into_owned(), source: Box::new(source) })?;
            finite(floats, &from)?;
            let target = job.plan.scale_dtype;
            let narrow = matches!(&weight.data, Data::Plain { dtype, .. } if *dtype == target || *dtype == Dtype::F16);
            if !narrow {
                within(floats, target, &from)?;
            }
            let done = match what {
                What::Floats => {
                    let mut bytes = vec![0; target.bytes(floats.len())];
                    tensor::encode(&mut bytes, target, floats);
                    Done::Owned(bytes)
                }
                What::Codes { id, bits, group } => {
                    let (codes, scales) = encode(job, floats, weight.cols, (bits, group), &from)?;
                    Done::Coded { id, codes, scales }
                }
            };
            (job.progress)((weight.stored_bytes() / weight.rows.max(1) * rows.len()) as u64);
            Ok(done)
        }
    }
}

/// Codes and scales of whole rows.
fn encode(
    job: &Job<'_>,
    floats: &[f32],
    cols: usize,
    (bits, group): (Bits, Group),
    from: &Place<'_>,
) -> Result<(Vec<u8>, Vec<u8>), ArtifactError> {
    let scale_dtype = job.plan.scale_dtype;
    let format = Format::Int { bits, group };
    let rows = floats.len() / cols.max(1);
    let mut codes = vec![0; rows * format.packed_cols(cols) * 4];
    let mut scales = vec![0; scale_dtype.bytes(rows * format.scale_cols(cols))];
    let how = Rounding { bits, group, method: job.method, scale_dtype, positive_scales: job.positive_scales };
    let done = round::quantize_rows(&mut codes, &mut scales, floats, cols, None, &how);
    done.map(|()| (codes, scales)).map_err(|e| {
        let tensor = from.tensor.clone().into_owned();
        match e {
            RoundError::NonFinite { row, col } => {
                let element = row * cols + col;
                ArtifactError::NonFinite { tensor, index: from.index(element), value: floats[element] }
            }
            RoundError::ScaleOverflow { row, col } => {
                let element = row * cols + col;
                ArtifactError::OutOfRange { tensor, index: from.index(element), value: floats[element], dtype: scale_dtype }
            }
        }
    })
}

/// Whether no element has an exponent of all ones; looks at bits, several elements an instruction.
fn all_finite(bytes: &[u8], dtype: Dtype) -> bool {
    let any16 = |mask: u16| bytes.chunks_exact(2).fold(false, |bad, b| bad | (u16::from_le_bytes([b[0], b[1]]) & mask == mask));
    match dtype {
        Dtype::BF16 => !any16(0x7f80),
        Dtype::F16 => !any16(0x7c00),
        _ => !bytes
            .chunks_exact(4)
            .fold(false, |bad, b| bad | (u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7f80_0000 == 0x7f80_0000)),
    }
}

fn finite(floats: &[f32], from: &Place<'_>) -> Result<(), ArtifactError> {
    if !floats.iter().fold(false, |bad, x| bad | !x.is_finite()) {
        return Ok(());
    }
    match floats.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(i) => {
            Err(ArtifactError::NonFinite { tensor: from.tensor.clone().into_owned(), index: from.index(i), value: floats[i] })
        }
    }
}

fn within(floats: &[f32], dtype: Dtype, from: &Place<'_>) -> Result<(), ArtifactError> {
    let largest = floats.iter().fold(0f32, |m, x| m.max(x.abs()));
    if tensor::round_to(dtype, largest).is_finite() {
        return Ok(());
    }
    let i = floats.iter().position(|x| !tensor::round_to(dtype, *x).is_finite()).unwrap_or(0);
    let (tensor, index) = (from.tensor.clone().into_owned(), from.index(i));
    Err(ArtifactError::OutOfRange { tensor, index, value: floats[i], dtype })
}

/// Writes and hashes what was computed.
struct Sink<'a> {
    dir: &'a Path,
    job: &'a Job<'a>,
    /// Scales of weights whose codes are written and whose turn has not come.
    scales: HashMap<TensorId, Vec<u8>>,
    open: Option<(PathBuf, File, Sha256, u64)>,
    sums: Vec<FileSum>,
}

impl Sink<'_> {
    fn run(mut self, receive: mpsc::Receiver<Vec<Done<'_>>>) -> Result<Vec<FileSum>, ArtifactError> {
        for done in receive.into_iter().flatten() {
            match done {
                Done::Open(shard) => {
                    self.close();
                    let path = self.dir.join(&shard.name);
                    let file = files::create(&path)?;
                    self.open = Some((path, file, Sha256::new(), 0));
                    self.put(&shard.header)?;
                }
                Done::Borrowed(bytes) => self.put(bytes)?,
                Done::Owned(bytes) => self.put(&bytes)?,
                Done::Coded { id, codes, scales } => {
                    self.put(&codes)?;
                    self.scales.entry(id).or_default().extend(scales);
                }
                Done::Scales(id) => {
                    let scales = self.scales.remove(&id).unwrap_or_default();
                    self.put(&scales)?;
                }
                Done::Release(name) => self.job.weights.checkpoint().release(&name),
            }
        }
        self.close();
        Ok(self.sums)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        let Some((path, file, hash, written)) = &mut self.open else { return Ok(()) };
        file.write_all(bytes).map_err(|source| FileError::Io { op: "write", path: path.clone(), source })?;
        hash.update(bytes);
        *written += bytes.len() as u64;
        Ok(())
    }

    fn close(&mut self) {
        if let Some((path, _, hash, bytes)) = self.open.take() {
            let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            self.sums.push(FileSum { name, bytes, sha256: hex(hash.finalize()) });
        }
    }
}
