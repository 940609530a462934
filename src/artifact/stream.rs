//! The bytes of the planned shards, in the order in which they leave: one streaming pass over the source.
//!
//! Batches of row chunks are computed in parallel while one thread writes and hashes the batch before, so that memory is
//! bounded by three batches whatever the model.

use super::error::ArtifactError;
use super::journal::Journal;
use super::layout::{Content, Shard, Tensor};
use super::manifest::FileSum;
use super::sums::hex;
use super::weights::{Data, Stored, Weight};
use super::writer::Job;
use crate::files::{self, FileError};
use crate::ids::TensorId;
use crate::quant::format::{Bits, Group, OwnedPacked, Packed, Zero};
use crate::quant::round::{self, RoundError, Rounding};
use crate::tensor::{self, Dtype};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

/// Elements of a chunk, so that its floats stay in a second-level cache.
const CHUNK_ELEMENTS: usize = 128 * 1024;
/// Bytes of a piece that is copied.
const COPY_BYTES: usize = 2 << 20;
/// Source bytes of a batch where memory allows.
const BATCH_BYTES: usize = 48 << 20;
/// Source bytes of a batch times this cover all memory in use: results of three batches, which are at most twice as large (an FP8
/// source that stays unquantized), and floats of the chunks at work.
const BATCHES_IN_MEMORY: u64 = 12;
/// Bytes after which a file is sent on its way to the disk, so that little is left to wait for at its end.
const SYNC_BYTES: u64 = 64 << 20;

/// A piece of work whose result is the next bytes of the output.
enum Chunk<'a> {
    Open(&'a Shard),
    Copy {
        bytes: &'a [u8],
        dtype: Dtype,
        from: Place<'a>,
        checked: bool,
    },
    Rows {
        weight: Weight<'a>,
        rows: std::ops::Range<usize>,
        from: Place<'a>,
        what: What,
    },
    Kept(TensorId, Kept),
    Chosen {
        id: TensorId,
        packed: Packed<'a>,
    },
    /// Codes chosen before have been taken over.
    Left(TensorId),
    Bytes(Vec<u8>),
    Release(String),
}

#[derive(Clone, Copy)]
enum What {
    Floats { dtype: Dtype },
    Codes { id: TensorId, bits: Bits, group: Group, zero: Zero },
}

/// What comes of a weight beside its codes, and is kept until its turn.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kept {
    Zeros,
    Scales,
}

/// Where a chunk's first element lies in its source tensor, for errors.
#[derive(Clone)]
struct Place<'a> {
    tensor: Cow<'a, str>,
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
    Coded { id: TensorId, codes: Cow<'a, [u8]>, scales: Cow<'a, [u8]>, zeros: Option<Cow<'a, [u8]>> },
    Kept(TensorId, Kept),
    Left(TensorId),
    Release(String),
}

/// Writes the shards of the plan that `journal` does not have yet into `dir`; returns sizes and checksums of all.
pub fn write_shards(job: &Job<'_>, dir: &Path, journal: &Journal) -> Result<Vec<FileSum>, ArtifactError> {
    let finished = |shard: &Shard| journal.shards.iter().find(|sum| sum.name == shard.name);
    let written = std::thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<Vec<Done<'_>>>(1);
        let (to_disk, whole) = mpsc::sync_channel(1);
        let syncing = scope.spawn(move || sync(whole, journal));
        let writing = scope.spawn(move || Sink { dir, job, kept: HashMap::new(), open: None, to_disk }.run(receive));
        let bytes = ((job.max_memory / BATCHES_IN_MEMORY) as usize).clamp(1, BATCH_BYTES);
        let mut batch = Batch { job, chunks: Vec::new(), filled: 0, bytes, send };
        let computed = batch.all(job.plan.shards.iter().filter(|shard| finished(shard).is_none()));
        drop(batch);
        let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let synced = syncing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // A closed channel says only that the next thread failed; why, that thread knows.
        match (computed, written) {
            (Err(Stop::Failed(e)), _) | (_, Err(Stop::Failed(e))) => Err(e),
            (Err(Stop::Closed), _) | (_, Err(Stop::Closed)) | (Ok(()), Ok(())) => synced,
        }
    })?;
    let sums = job.plan.shards.iter().map(|shard| {
        let sum = finished(shard).or_else(|| written.iter().find(|sum| sum.name == shard.name));
        sum.cloned().ok_or(ArtifactError::Interrupted)
    });
    sums.collect()
}

enum Stop {
    Closed,
    Failed(ArtifactError),
}

impl<E: Into<ArtifactError>> From<E> for Stop {
    fn from(e: E) -> Self {
        Stop::Failed(e.into())
    }
}

/// Cuts the plan into chunks, in the order of the output, and computes them a batch at a time.
struct Batch<'a> {
    job: &'a Job<'a>,
    chunks: Vec<Chunk<'a>>,
    /// Source bytes of the chunks, and as many as a batch may have.
    filled: usize,
    bytes: usize,
    send: mpsc::SyncSender<Vec<Done<'a>>>,
}

impl<'a> Batch<'a> {
    fn all(&mut self, shards: impl Iterator<Item = &'a Shard>) -> Result<(), Stop> {
        for shard in shards {
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
                let checked = view.dtype.is_float() && weights.aside(source).is_none();
                for (i, bytes) in view.bytes.chunks(COPY_BYTES).enumerate() {
                    let from = Place { tensor: source.into(), shape: view.shape.clone(), first: i * COPY_BYTES / element };
                    self.push(Chunk::Copy { bytes, dtype: view.dtype, from, checked }, bytes.len())?;
                }
                self.push(Chunk::Release(source.clone()), 0)
            }
            Content::Decoded { id } => self.weight(*id, What::Floats { dtype: tensor.dtype }),
            Content::DecodedSide { source } => {
                let vanished = || ArtifactError::Vanished { tensor: source.clone() };
                let (weight, stored) =
                    (weights.side(source).ok_or_else(vanished)?, weights.side_stored(source).ok_or_else(vanished)?);
                self.rows(weight, stored, What::Floats { dtype: tensor.dtype })
            }
            Content::Codes { id, bits, group, zero } => match self.job.solved.and_then(|s| s.get(*id)) {
                Some(packed) => {
                    self.push(Chunk::Chosen { id: *id, packed }, packed.words.len())?;
                    self.push(Chunk::Left(*id), 0)?;
                    weights.file_tensors(*id).into_iter().try_for_each(|name| self.push(Chunk::Release(name), 0))
                }
                None => self.weight(*id, What::Codes { id: *id, bits: *bits, group: *group, zero: *zero }),
            },
            Content::Zeros { id } => self.push(Chunk::Kept(*id, Kept::Zeros), 0),
            Content::Scales { id } => self.push(Chunk::Kept(*id, Kept::Scales), 0),
            Content::Shape { shape } => {
                self.push(Chunk::Bytes(shape.iter().flat_map(|&n| (n as i64).to_le_bytes()).collect()), 0)
            }
        }
    }

    fn weight(&mut self, id: TensorId, what: What) -> Result<(), Stop> {
        let weights = self.job.weights;
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        self.rows(weights.get(id).ok_or_else(vanished)?, weights.stored(id).ok_or_else(vanished)?, what)
    }

    fn rows(&mut self, weight: Weight<'a>, stored: &Stored, what: What) -> Result<(), Stop> {
        let names = stored.file_tensors();
        let tensor = stored.first_tensor();
        let (shape, first) = match stored {
            Stored::Slice { fused } => (fused.shape.to_vec(), fused.first_row * weight.cols),
            _ => (vec![weight.rows, weight.cols], 0),
        };
        let step = (CHUNK_ELEMENTS / weight.cols.max(1)).max(1).next_multiple_of(OwnedPacked::STEP_ROWS);
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
        self.filled += bytes;
        if self.filled >= self.bytes { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        let job = self.job;
        self.filled = 0;
        let chunks = std::mem::take(&mut self.chunks);
        let done: Vec<Result<Done<'a>, ArtifactError>> =
            chunks.into_par_iter().map_init(Vec::new, |floats, chunk| compute(job, chunk, floats)).collect();
        // The first error in the order of the output, so that the same input always gives the same message.
        let done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
        self.send.send(done).map_err(|_| Stop::Closed)
    }
}

fn compute<'a>(job: &Job<'_>, chunk: Chunk<'a>, floats: &mut Vec<f32>) -> Result<Done<'a>, ArtifactError> {
    if (job.stopped)() {
        return Err(ArtifactError::Interrupted);
    }
    match chunk {
        Chunk::Open(shard) => Ok(Done::Open(shard)),
        Chunk::Kept(id, kept) => Ok(Done::Kept(id, kept)),
        Chunk::Chosen { id, packed } => {
            let read: u64 = job.weights.get(id).map_or(0, |w| w.stored_bytes() as u64);
            (job.progress)(read);
            let (codes, scales, zeros) = (packed.words.into(), packed.scales.into(), packed.zeros.map(Cow::from));
            Ok(Done::Coded { id, codes, scales, zeros })
        }
        Chunk::Bytes(bytes) => Ok(Done::Owned(bytes)),
        Chunk::Release(name) => Ok(Done::Release(name)),
        Chunk::Left(id) => Ok(Done::Left(id)),
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
            let target = match what {
                What::Floats { dtype } => dtype,
                What::Codes { .. } => job.plan.scale_dtype,
            };
            let narrow = matches!(&weight.data, Data::Plain { dtype, .. } if *dtype == target || *dtype == Dtype::F16);
            // Choosing codes finds values that are no numbers; what else may happen to them must not come first.
            if !narrow || matches!(what, What::Floats { .. }) {
                finite(floats, &from)?;
            }
            if !narrow {
                within(floats, target, &from)?;
            }
            let done = match what {
                What::Floats { dtype } => {
                    let mut bytes = vec![0; dtype.bytes(floats.len())];
                    tensor::encode(&mut bytes, dtype, floats);
                    Done::Owned(bytes)
                }
                What::Codes { id, bits, group, zero } => {
                    let (scale_dtype, positive_scales) = (job.plan.scale_dtype, job.positive_scales);
                    let how = Rounding { bits, group, zero, method: job.method, scale_dtype, positive_scales };
                    let OwnedPacked { words, scales, zeros, .. } = encode(floats, weight.cols, &how, &from)?;
                    Done::Coded { id, codes: words.into(), scales: scales.into(), zeros: zeros.map(Cow::from) }
                }
            };
            (job.progress)((weight.stored_bytes() / weight.rows.max(1) * rows.len()) as u64);
            Ok(done)
        }
    }
}

/// Codes, scales and zero points of whole rows.
fn encode(floats: &[f32], cols: usize, how: &Rounding, from: &Place<'_>) -> Result<OwnedPacked, ArtifactError> {
    round::quantize_rows(floats, cols, None, how).map_err(|e| {
        let tensor = from.tensor.clone().into_owned();
        match e {
            RoundError::NonFinite { row, col } => {
                let element = row * cols + col;
                ArtifactError::NonFinite { tensor, index: from.index(element), value: floats[element] }
            }
            RoundError::ScaleOverflow { row, col } => {
                let element = row * cols + col;
                ArtifactError::OutOfRange { tensor, index: from.index(element), value: floats[element], dtype: how.scale_dtype }
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
    /// Scales and zero points of weights whose codes are written and whose turn has not come.
    kept: HashMap<(TensorId, Kept), Vec<u8>>,
    open: Option<Open<'a>>,
    to_disk: mpsc::SyncSender<ToDisk>,
}

/// A shard being written.
struct Open<'a> {
    shard: &'a Shard,
    path: PathBuf,
    file: Arc<File>,
    hash: Sha256,
    written: u64,
    /// Bytes written since the file was last sent to the disk.
    unsynced: u64,
}

/// A file to sync; with its checksum once it is whole.
struct ToDisk {
    path: PathBuf,
    file: Arc<File>,
    whole: Option<FileSum>,
}

impl<'a> Sink<'a> {
    fn run(mut self, receive: mpsc::Receiver<Vec<Done<'a>>>) -> Result<(), Stop> {
        for done in receive.into_iter().flatten() {
            if (self.job.stopped)() {
                return Err(ArtifactError::Interrupted.into());
            }
            match done {
                Done::Open(shard) => {
                    self.close()?;
                    let path = self.dir.join(&shard.name);
                    let file = Arc::new(files::create(&path)?);
                    self.open = Some(Open { shard, path, file, hash: Sha256::new(), written: 0, unsynced: 0 });
                    self.put(&shard.header)?;
                }
                Done::Borrowed(bytes) => self.put(bytes)?,
                Done::Owned(bytes) => self.put(&bytes)?,
                Done::Coded { id, codes, scales, zeros } => {
                    self.put(&codes)?;
                    for (kept, bytes) in [(Kept::Scales, Some(scales)), (Kept::Zeros, zeros)] {
                        bytes.iter().for_each(|b| self.kept.entry((id, kept)).or_default().extend_from_slice(b));
                    }
                }
                Done::Kept(id, kept) => {
                    let bytes = self.kept.remove(&(id, kept)).unwrap_or_default();
                    self.put(&bytes)?;
                }
                Done::Left(id) => self.job.solved.iter().for_each(|s| s.release(id)),
                Done::Release(name) => self.job.weights.checkpoint().release(&name),
            }
        }
        self.close()
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let Some(open) = &mut self.open else { return Ok(()) };
        std::thread::sleep(self.job.write_delay);
        (&*open.file).write_all(bytes).map_err(|source| FileError::Io { op: "write", path: open.path.clone(), source })?;
        open.hash.update(bytes);
        open.written += bytes.len() as u64;
        open.unsynced += bytes.len() as u64;
        if open.unsynced >= SYNC_BYTES {
            open.unsynced = 0;
            let part = ToDisk { path: open.path.clone(), file: Arc::clone(&open.file), whole: None };
            match self.to_disk.try_send(part) {
                Err(mpsc::TrySendError::Disconnected(_)) => return Err(Stop::Closed),
                // The disk is behind; it will be asked again.
                Ok(()) | Err(mpsc::TrySendError::Full(_)) => {}
            }
        }
        Ok(())
    }

    /// Hands the open shard on, unless its last bytes never came.
    fn close(&mut self) -> Result<(), Stop> {
        let Some(open) = self.open.take_if(|open| open.written == open.shard.bytes) else { return Ok(()) };
        let sum = FileSum { name: open.shard.name.clone(), bytes: open.written, sha256: hex(open.hash.finalize()) };
        self.to_disk.send(ToDisk { path: open.path, file: open.file, whole: Some(sum) }).map_err(|_| Stop::Closed)
    }
}

/// Waits for the disk in place of the thread that writes, and notes in the journal which files it has whole.
fn sync(receive: mpsc::Receiver<ToDisk>, journal: &Journal) -> Result<Vec<FileSum>, ArtifactError> {
    let mut sums = Vec::new();
    for ToDisk { path, file, whole } in receive {
        file.sync_data().map_err(|source| FileError::Io { op: "sync", path, source })?;
        if let Some(sum) = whole {
            journal.shard(&sum)?;
            sums.push(sum);
        }
    }
    Ok(sums)
}
