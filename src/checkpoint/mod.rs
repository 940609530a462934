//! A Hugging Face checkpoint directory: config, shard index, mapped safetensors.
//!
//! Knows which bytes belong to which name, and proves it before handing out one of them: every header is read and checked
//! for full coverage, names are checked both ways against the index. Must not know what a tensor means.
//! Format: <https://huggingface.co/docs/safetensors/index#format>.

mod error;
pub mod fp8;
mod header;
mod layout;
pub mod mxfp4;

use std::collections::btree_map;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::prelude::*;

pub use error::CheckpointError;

use crate::tensor::{Dtype, TensorView};

/// A checkpoint whose headers have been read and found consistent; weights stay on disk until they are looked at.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: serde_json::Value,
    config_bytes: Vec<u8>,
    shards: Vec<Shard>,
    entries: BTreeMap<String, Entry>,
}

/// Where one tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position in [`Checkpoint::shards`].
    pub shard: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Bytes of the file, counted from its start.
    pub range: Range<usize>,
}

/// One mapped safetensors file.
#[derive(Debug)]
pub struct Shard {
    /// Path inside the checkpoint directory.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
    map: Mmap,
}

/// First component of a tensor's name: files of one model share it.
fn root(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

impl Checkpoint {
    /// Opens a directory holding `config.json` and safetensors: one file, or shards with or without an index. A
    /// `models--org--name` folder of the hub cache stands for its `refs/main` snapshot, or its only one.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let dir = layout::resolve(dir)?;
        let files = layout::list(&dir)?;
        let config_bytes = layout::read_config(&dir, &files)?;
        let config = layout::parse_config(&dir, &config_bytes)?;
        let layout = layout::discover(&dir, &files)?;
        let opened: Vec<_> = layout.shards.par_iter().enumerate().map(|(idx, name)| Shard::open(dir.join(name), idx)).collect();

        let mut shards: Vec<Shard> = Vec::with_capacity(opened.len());
        let mut entries = BTreeMap::new();
        for shard in opened {
            let (shard, tensors) = shard?;
            shards.push(shard);
            for (name, entry) in tensors {
                match entries.entry(name) {
                    btree_map::Entry::Vacant(slot) => {
                        slot.insert(entry);
                    }
                    btree_map::Entry::Occupied(slot) => {
                        return Err(CheckpointError::TensorInTwoShards {
                            tensor: slot.key().clone(),
                            first: shards[slot.get().shard].path.clone(),
                            second: shards[entry.shard].path.clone(),
                        });
                    }
                }
            }
        }
        let roots: BTreeSet<&str> = entries.keys().map(|name| root(name)).collect();
        for name in &layout.beside {
            let path = dir.join(name);
            let of_this_model = match Shard::open(path.clone(), 0) {
                Ok((_, tensors)) => tensors.iter().any(|(name, _)| roots.contains(root(name))),
                Err(_) => true,
            };
            if of_this_model {
                let beside = if layout.index.is_some() { layout::INDEX } else { &layout.shards[0] }.to_owned();
                return Err(CheckpointError::StrayFile { path, beside });
            }
        }
        if let Some(index) = &layout.index {
            index.check(&layout.shards, &entries)?;
        }
        Ok(Checkpoint { dir, config, config_bytes, shards, entries })
    }

    /// One safetensors file by itself, without a config.
    pub fn file(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let (shard, tensors) = Shard::open(path.to_path_buf(), 0)?;
        let dir = path.parent().unwrap_or(Path::new(".")).to_path_buf();
        let config = serde_json::Value::Object(serde_json::Map::new());
        Ok(Checkpoint { dir, config, config_bytes: Vec::new(), shards: vec![shard], entries: tensors.into_iter().collect() })
    }

    /// The directory that holds the files; for a hub folder, its snapshot.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json`, which is an object.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// `config.json` as it lies on disk.
    pub fn config_bytes(&self) -> &[u8] {
        &self.config_bytes
    }

    /// The weight files, sorted by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Every tensor's name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Type, shape and place of a tensor.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// A tensor's values, borrowed from the mapped file.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.entries.get(name)?;
        let bytes = self.shards.get(entry.shard)?.map.get(entry.range.clone())?;
        Some(TensorView { dtype: entry.dtype, shape: entry.shape.clone(), bytes })
    }

    /// Every other file of the directory's top level that belongs beside an artifact: tokenizer, templates, code, licence;
    /// sorted. Not weights in any format, their indices, `config.json`, or the files this tool writes itself.
    pub fn side_files(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let files = layout::list(&self.dir)?;
        Ok(files.iter().filter(|name| layout::is_side_file(name)).map(|name| self.dir.join(name)).collect())
    }

    /// Lets the system drop the resident pages lying wholly inside this tensor; a later look reads them from disk again.
    /// Best effort, and nothing at all where the system is not a Unix.
    pub fn release(&self, name: &str) {
        #[cfg(unix)]
        if let Some((shard, range)) = self.place(name) {
            shard.release(range);
        }
        #[cfg(not(unix))]
        let _ = name;
    }

    /// Asks the system to start reading this tensor's pages. Best effort, as [`Checkpoint::release`] is.
    pub fn will_need(&self, name: &str) {
        #[cfg(unix)]
        if let Some((shard, range)) = self.place(name) {
            shard.map.advise_range(memmap2::Advice::WillNeed, range.start, range.len()).ok();
        }
        #[cfg(not(unix))]
        let _ = name;
    }

    #[cfg(unix)]
    fn place(&self, name: &str) -> Option<(&Shard, Range<usize>)> {
        let entry = self.entries.get(name).filter(|entry| !entry.range.is_empty())?;
        Some((self.shards.get(entry.shard)?, entry.range.clone()))
    }
}

impl Shard {
    fn open(path: PathBuf, shard_idx: usize) -> Result<(Shard, Vec<(String, Entry)>), CheckpointError> {
        let io = |op| {
            let path = path.clone();
            move |source| CheckpointError::Io { op, path, source }
        };
        let mut file = File::open(&path).map_err(io("open"))?;
        let bytes = file.metadata().map_err(io("inspect"))?.len();
        let tensors = header::read(&path, &mut file, bytes, shard_idx)?;
        // SAFETY: the map is only ever read. Whoever truncates the file meanwhile makes reads fault; the mapping cannot
        // prevent that, and this crate never writes into a checkpoint it has open.
        let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
        if map.len() as u64 != bytes {
            return Err(CheckpointError::SizeChanged { path, before: bytes, after: map.len() as u64 });
        }
        Ok((Shard { path, bytes, map }, tensors))
    }

    /// Lets the system drop the pages lying wholly inside this range of the file, those that it keeps for other readers too.
    /// Best effort, and nothing at all where the system is not Linux.
    pub fn forget(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        {
            self.release(range.clone());
            if let (Some(len), Ok(file)) = (std::num::NonZeroU64::new(range.len() as u64), File::open(&self.path)) {
                rustix::fs::fadvise(&file, range.start as u64, Some(len), rustix::fs::Advice::DontNeed).ok();
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    #[cfg(unix)]
    fn release(&self, range: Range<usize>) {
        let page = rustix::param::page_size();
        let (begin, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if begin < end {
            // SAFETY: the map is read-only and backed by a file, so that a dropped page comes back with the same bytes, and views
            // borrowed from it stay valid.
            let advised = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, begin, end - begin) };
            advised.ok();
        }
    }
}
