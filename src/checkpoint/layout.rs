//! Which files of a directory are the checkpoint, and whether the index agrees with them.
//!
//! The index is the truth: what it names must be there, and weights of this model that it does not name must not.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::{CheckpointError, Entry};

const CONFIG: &str = "config.json";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: [&str; 10] = [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".index.json"];

/// The weight files of a directory, sorted, and the index that named them.
pub(super) struct Layout {
    pub shards: Vec<String>,
    /// Other safetensors files; whether they are stray weights shows in their tensors.
    pub beside: Vec<String>,
    pub index: Option<Index>,
}

/// `model.safetensors.index.json`: the shard of each tensor.
pub(super) struct Index {
    path: PathBuf,
    weight_map: BTreeMap<String, String>,
}

/// The directory that holds the files: `dir`, or the snapshot that a hub cache folder stands for.
pub(super) fn resolve(dir: &Path) -> Result<PathBuf, CheckpointError> {
    let meta = fs::metadata(dir).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::DirMissing { dir: dir.to_owned() },
        _ => CheckpointError::Io { op: "open", path: dir.to_owned(), source },
    })?;
    if !meta.is_dir() {
        return Err(CheckpointError::NotADirectory { path: dir.to_owned() });
    }
    let snapshots = dir.join("snapshots");
    if dir.join(CONFIG).exists() || !snapshots.is_dir() {
        return Ok(dir.to_owned());
    }
    if let Ok(revision) = fs::read_to_string(dir.join("refs").join("main")) {
        let revision = revision.trim();
        let snapshot = snapshots.join(revision);
        if is_plain_name(revision) && snapshot.is_dir() {
            return Ok(snapshot);
        }
    }
    let mut found: Vec<PathBuf> = read_dir(&snapshots)?.into_iter().filter(|path| path.is_dir()).collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        num_snapshots => Err(CheckpointError::NoSingleSnapshot { dir: dir.to_owned(), num_snapshots }),
    }
}

/// Names of the regular files at the top level, sorted; hidden ones and dangling links are left out.
pub(super) fn list(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let paths = read_dir(dir)?.into_iter().filter(|path| path.is_file());
    let names = paths.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
    Ok(names.filter(|name| !name.starts_with('.')).collect())
}

fn read_dir(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io = |source| CheckpointError::Io { op: "list", path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(io)?;
    let mut paths = entries.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>().map_err(io)?;
    paths.sort();
    Ok(paths)
}

/// The bytes of `config.json`.
pub(super) fn read_config(dir: &Path, files: &[String]) -> Result<Vec<u8>, CheckpointError> {
    let path = dir.join(CONFIG);
    fs::read(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => {
            let has = |end: &str| files.iter().any(|name| name.ends_with(end));
            match files.iter().find(|name| name.ends_with(".gguf")) {
                Some(example) if !has(".safetensors") => {
                    CheckpointError::OnlyGguf { dir: dir.to_owned(), example: example.clone() }
                }
                _ => CheckpointError::NoConfig { dir: dir.to_owned() },
            }
        }
        _ => CheckpointError::Io { op: "read", path, source },
    })
}

/// `config.json` as an object.
pub(super) fn parse_config(dir: &Path, bytes: &[u8]) -> Result<serde_json::Value, CheckpointError> {
    let path = dir.join(CONFIG);
    match serde_json::from_slice(bytes) {
        Ok(config @ serde_json::Value::Object(_)) => Ok(config),
        Ok(other) => Err(CheckpointError::ConfigNotObject { path, found: json_kind(&other) }),
        Err(e) => Err(CheckpointError::ConfigNotJson { path, reason: e.to_string() }),
    }
}

fn json_kind(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "a boolean",
        serde_json::Value::Number(_) => "a number",
        serde_json::Value::String(_) => "a string",
        serde_json::Value::Array(_) => "a list",
        serde_json::Value::Object(_) => "an object",
    }
}

/// Whether a top-level file is to be copied beside an artifact made from this checkpoint.
pub(super) fn is_side_file(name: &str) -> bool {
    let lower = name.to_lowercase();
    let ours = [CONFIG, "moe.json", "hot_experts.json", "quantize.json", "quantize.html"].contains(&name);
    !ours && !WEIGHTS.iter().any(|end| lower.ends_with(end))
}

/// Finds the weight files among `files`.
pub(super) fn discover(dir: &Path, files: &[String]) -> Result<Layout, CheckpointError> {
    let weights: Vec<&str> = files.iter().map(String::as_str).filter(|name| name.ends_with(".safetensors")).collect();
    if files.iter().any(|name| name == INDEX) {
        return from_index(dir, &weights);
    }
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (shards, beside) = match weights.as_slice() {
        [] => return Err(no_weights(dir, files)),
        [only] if numbered(only).is_none() => (owned(&[only]), Vec::new()),
        several => match several.iter().position(|name| *name == "model.safetensors") {
            Some(i) => (owned(&[several[i]]), owned(&[&several[..i], &several[i + 1..]].concat())),
            None => (complete_set(dir, several)?, Vec::new()),
        },
    };
    Ok(Layout { shards, beside, index: None })
}

fn no_weights(dir: &Path, files: &[String]) -> CheckpointError {
    let dir = dir.to_owned();
    let ending = |ends: &[&str]| files.iter().find(|name| ends.iter().any(|end| name.ends_with(end))).cloned();
    if let Some(example) = ending(&[".bin", ".pt", ".pth"]) {
        CheckpointError::OnlyPytorch { dir, example }
    } else if let Some(example) = ending(&[".gguf"]) {
        CheckpointError::OnlyGguf { dir, example }
    } else {
        CheckpointError::NoWeights { dir }
    }
}

fn from_index(dir: &Path, weights: &[&str]) -> Result<Layout, CheckpointError> {
    let index = Index::read(dir.join(INDEX))?;
    let named: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let missing: Vec<String> =
        named.iter().filter(|name| weights.binary_search(name).is_err()).map(|name| (*name).to_owned()).collect();
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards {
            dir: dir.to_owned(),
            named_by: INDEX.to_owned(),
            missing,
            total: named.len(),
        });
    }
    let beside = weights.iter().filter(|name| !named.contains(*name)).map(|name| (*name).to_owned()).collect();
    let shards = named.into_iter().map(str::to_owned).collect();
    Ok(Layout { shards, beside, index: Some(index) })
}

/// Files `<stem>-0000i-of-0000n.safetensors` that make a whole; the only way several files go without an index.
fn complete_set(dir: &Path, weights: &[&str]) -> Result<Vec<String>, CheckpointError> {
    let num_plain = weights.iter().filter(|name| numbered(name).is_none()).count();
    let sets: BTreeSet<(&str, usize)> = weights.iter().filter_map(|name| numbered(name)).map(|(stem, _, n)| (stem, n)).collect();
    let several = || CheckpointError::NoIndex { dir: dir.to_owned(), files: weights.iter().map(|s| (*s).to_owned()).collect() };
    let [(stem, total)] = sets.into_iter().collect::<Vec<_>>()[..] else {
        return Err(several());
    };
    if num_plain > 0 {
        let stray = weights.iter().find(|name| numbered(name).is_none()).unwrap_or(&weights[0]);
        return Err(CheckpointError::StrayFile { path: dir.join(stray), beside: weights[0].to_owned() });
    }
    let present: BTreeSet<usize> = weights.iter().filter_map(|name| numbered(name)).map(|(_, i, _)| i).collect();
    let name_of = |i| format!("{stem}-{i:05}-of-{total:05}.safetensors");
    let missing: Vec<String> = (1..=total).filter(|i| !present.contains(i)).map(name_of).collect();
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards { dir: dir.to_owned(), named_by: weights[0].to_owned(), missing, total });
    }
    if weights.len() != total {
        return Err(several());
    }
    Ok(weights.iter().map(|name| (*name).to_owned()).collect())
}

/// Splits `<stem>-0000i-of-0000n.safetensors`; five digits each, so that `total` is small enough to enumerate.
fn numbered(name: &str) -> Option<(&str, usize, usize)> {
    let digits = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok()).flatten();
    let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, i) = rest.rsplit_once('-')?;
    Some((stem, digits(i)?, digits(total)?))
}

/// Whether a string from a file is the name of something directly inside a directory, on any system.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let single = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
    single && !name.contains(['/', '\\', ':', '\0'])
}

impl Index {
    fn read(path: PathBuf) -> Result<Index, CheckpointError> {
        let bytes = fs::read(&path).map_err(|source| CheckpointError::Io { op: "read", path: path.clone(), source })?;
        let at = RefCell::new(None);
        let mut json = serde_json::Deserializer::from_slice(&bytes);
        let parsed = json.deserialize_map(IndexVisitor { at: &at }).and_then(|map| json.end().map(|()| map));
        let pairs = match parsed {
            Ok(Some(pairs)) => pairs,
            Ok(None) => return Err(CheckpointError::NoWeightMap { path }),
            Err(e) => {
                let reason = e.to_string();
                return Err(match at.take() {
                    Some(tensor) if !e.is_eof() => CheckpointError::MalformedEntry { path, tensor, reason },
                    _ => CheckpointError::IndexNotJson { path, reason },
                });
            }
        };
        let mut weight_map = BTreeMap::new();
        for (tensor, shard) in pairs {
            if !is_plain_name(&shard) || !shard.ends_with(".safetensors") {
                return Err(CheckpointError::ShardNameRefused { path, tensor, shard });
            }
            if weight_map.insert(tensor.clone(), shard).is_some() {
                return Err(CheckpointError::DuplicateKey { path, tensor });
            }
        }
        if weight_map.is_empty() {
            return Err(CheckpointError::NoWeightMap { path });
        }
        Ok(Index { path, weight_map })
    }

    /// Names both ways: each tensor of the index lies in the shard it says, and no shard holds one beside them.
    pub(super) fn check(&self, shards: &[String], entries: &BTreeMap<String, Entry>) -> Result<(), CheckpointError> {
        let index = || self.path.clone();
        let lies_in = |tensor: &str| entries.get(tensor).map(|entry| shards[entry.shard].as_str());
        let mut absent = self.weight_map.iter().filter(|(tensor, shard)| lies_in(tensor) != Some(shard.as_str()));
        if let Some((tensor, shard)) = absent.next() {
            return Err(CheckpointError::ShardLacksTensor {
                index: index(),
                tensor: tensor.clone(),
                shard: shard.clone(),
                found_in: lies_in(tensor).map(str::to_owned),
                num_more: absent.count(),
            });
        }
        let mut stray = entries.iter().filter(|(tensor, _)| !self.weight_map.contains_key(*tensor));
        if let Some((tensor, entry)) = stray.next() {
            return Err(CheckpointError::StrayTensor {
                index: index(),
                tensor: tensor.clone(),
                shard: shards[entry.shard].clone(),
                num_more: stray.count(),
            });
        }
        Ok(())
    }
}

struct IndexVisitor<'a> {
    at: &'a RefCell<Option<String>>,
}

impl<'de> Visitor<'de> for IndexVisitor<'_> {
    type Value = Option<Vec<(String, String)>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if pairs.replace(map.next_value_seed(WeightMap { at: self.at })?).is_some() {
                return Err(de::Error::duplicate_field("weight_map"));
            }
        }
        Ok(pairs)
    }
}

/// The pairs of `weight_map` in file order, leaving in `at` the name of the tensor that it stumbled over.
struct WeightMap<'a> {
    at: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = Vec<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object from tensor to file name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(tensor) = map.next_key::<String>()? {
            *self.at.borrow_mut() = Some(tensor.clone());
            pairs.push((tensor, map.next_value()?));
            self.at.take();
        }
        Ok(pairs)
    }
}
