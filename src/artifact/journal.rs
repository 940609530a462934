//! What an unfinished run has done, so that another run can continue it: lines of JSON in the unfinished directory.
//!
//! The first line says what was begun: tool, recipe, source, plan. Each further line is a source file that was hashed or a
//! weight file that is on disk, with size and sha256. A run that would not write the same bytes is refused.

use super::error::ArtifactError;
use super::inventory::Inventory;
use super::manifest::{FileSum, Recipe};
use super::plan::Plan;
use super::sums::{hash_files, hex};
use crate::files::{self, FileError, JOURNAL, LineLog};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Form written and read by this version.
const VERSION: u32 = 1;

/// What a run set out to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    version: u32,
    tool: String,
    recipe: Recipe,
    /// Checksum of all headers and of the config to be written.
    plan: String,
    source: Vec<Stamp>,
}

/// A source file as it was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    name: String,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: Option<u64>,
}

impl Begun {
    /// What a run of `plan` over `weights` sets out to do.
    pub fn new(weights: &Inventory, plan: &Plan, recipe: &Recipe) -> Result<Self, ArtifactError> {
        let mut digest = Sha256::new();
        plan.shards.iter().for_each(|shard| digest.update(&shard.header));
        digest.update(serde_json::to_vec(&plan.config)?);
        let stamp = |path: &Path| -> Result<Stamp, FileError> {
            let (bytes, modified) = files::stamp(path)?;
            Ok(Stamp { name: name(path), bytes, modified })
        };
        Ok(Self {
            version: VERSION,
            tool: env!("CARGO_PKG_VERSION").into(),
            recipe: recipe.clone(),
            plan: hex(digest.finalize()),
            source: weights.checkpoint().shards().iter().map(|s| stamp(&s.path)).collect::<Result<_, _>>()?,
        })
    }

    /// The first difference that other bytes would come of, apart from the source.
    fn difference(&self, now: &Begun) -> Result<Option<String>, ArtifactError> {
        if (self.version, &self.tool) != (now.version, &now.tool) {
            return Ok(Some(format!("it was begun by version {} of this tool, this is {}", self.tool, now.tool)));
        }
        let (before, after) = (serde_json::to_value(&self.recipe)?, serde_json::to_value(&now.recipe)?);
        let keys = after.as_object().into_iter().flatten();
        if let Some((key, value)) = keys.into_iter().find(|(key, value)| before.get(key) != Some(*value)) {
            let before = before.get(key).unwrap_or(&serde_json::Value::Null);
            return Ok(Some(format!("it was begun with `{key}` = {before}, now it is {value}")));
        }
        let other = "the files would be laid out otherwise: `--shard-size`, the profile, or the model's config.json has changed";
        Ok((self.plan != now.plan).then(|| other.to_string()))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Begun(Box<Begun>),
    Source(FileSum),
    Shard(FileSum),
}

/// What is done so far; lines may be added from several threads.
pub struct Journal {
    begun: Begun,
    log: Mutex<LineLog>,
    /// Source files that need not be hashed again.
    pub sources: Vec<FileSum>,
    /// Weight files that need not be written again.
    pub shards: Vec<FileSum>,
}

impl Journal {
    /// Starts the journal of an unfinished directory.
    pub fn start(dir: &Path, begun: Begun) -> Result<Self, ArtifactError> {
        let log = Mutex::new(LineLog::create(&dir.join(JOURNAL))?);
        let journal = Self { begun, log, sources: Vec::new(), shards: Vec::new() };
        journal.append(&Line::Begun(Box::new(journal.begun.clone())))?;
        Ok(journal)
    }

    /// The journal that an unfinished run left in its directory; `None` if there is none, or none that says what was begun.
    pub fn open(dir: &Path) -> Result<Option<Self>, ArtifactError> {
        let Some((log, lines)) = LineLog::open(&dir.join(JOURNAL))? else { return Ok(None) };
        let mut lines = lines.iter().map_while(|line| serde_json::from_str(line).ok());
        let Some(Line::Begun(begun)) = lines.next() else { return Ok(None) };
        let (mut sources, mut shards) = (Vec::new(), Vec::new());
        for line in lines {
            let (sums, sum): (&mut Vec<FileSum>, FileSum) = match line {
                Line::Source(sum) => (&mut sources, sum),
                Line::Shard(sum) => (&mut shards, sum),
                Line::Begun(_) => continue,
            };
            sums.retain(|s| s.name != sum.name);
            sums.push(sum);
        }
        Ok(Some(Self { begun: *begun, log: Mutex::new(log), sources, shards }))
    }

    /// Fails unless a run that begins as `now` says would write the same bytes. Source files that look other than they did are
    /// hashed where that can tell; what was finished in `dir` and is damaged will be written again.
    pub fn check(
        &mut self,
        dir: &Path,
        weights: &Inventory,
        now: &Begun,
        stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), ArtifactError> {
        let changed = |what: String| ArtifactError::Changed { path: dir.to_path_buf(), what };
        if let Some(what) = self.begun.difference(now)? {
            return Err(changed(what));
        }
        for (i, stamp) in now.source.iter().enumerate() {
            let before = self.begun.source.iter().find(|s| s.name == stamp.name);
            if before == Some(stamp) {
                continue;
            }
            let path = &weights.checkpoint().shards()[i].path;
            let sum = self.sources.iter().find(|s| s.name == stamp.name && s.bytes == stamp.bytes);
            let same = match sum {
                Some(sum) => hash_files::<FileError>(&[path], stopped, &|_| Ok(()))?.contains(sum),
                None => false,
            };
            if !same && !stopped() {
                return Err(changed(format!("`{}` has changed since", path.display())));
            }
        }
        let intact = |sum: &&FileSum| files::stamp(&dir.join(&sum.name)).is_ok_and(|(bytes, _)| bytes == sum.bytes);
        let paths: Vec<_> = self.shards.iter().filter(intact).map(|sum| dir.join(&sum.name)).collect();
        let found = hash_files::<FileError>(&paths.iter().map(|p| p.as_path()).collect::<Vec<_>>(), stopped, &|_| Ok(()))?;
        if stopped() {
            return Err(ArtifactError::Interrupted);
        }
        self.shards.retain(|sum| found.contains(sum));
        Ok(())
    }

    /// A source file is hashed.
    pub fn source(&self, sum: &FileSum) -> Result<(), ArtifactError> {
        self.append(&Line::Source(sum.clone()))
    }

    /// A weight file is on disk.
    pub fn shard(&self, sum: &FileSum) -> Result<(), ArtifactError> {
        self.append(&Line::Shard(sum.clone()))
    }

    fn append(&self, line: &Line) -> Result<(), ArtifactError> {
        let text = serde_json::to_string(line)?;
        Ok(self.log.lock().unwrap_or_else(PoisonError::into_inner).append(&text)?)
    }
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}
