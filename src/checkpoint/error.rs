//! Everything that can be wrong with a checkpoint, each with the file, the tensor, and the cure.

use std::io;
use std::path::PathBuf;

use crate::tensor::Dtype;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are explained by the message they appear in")]
pub enum CheckpointError {
    /// There is nothing at the path.
    #[error("checkpoint directory `{}` does not exist", dir.display())]
    DirMissing { dir: PathBuf },
    /// The path is that of a file.
    #[error("expected a checkpoint directory, found a file: `{}`", path.display())]
    NotADirectory { path: PathBuf },
    /// A hub cache folder does not say which snapshot is meant.
    #[error("hub folder `{}` has no usable `refs/main`, and {num_snapshots} snapshots where one was expected", dir.display())]
    NoSingleSnapshot { dir: PathBuf, num_snapshots: usize },
    /// The system refused.
    #[error("cannot {op} `{}`", path.display())]
    Io { op: &'static str, path: PathBuf, source: io::Error },

    /// `config.json` is not there.
    #[error("no `config.json` in `{}`", dir.display())]
    NoConfig { dir: PathBuf },
    /// `config.json` does not parse.
    #[error("`{}` is not JSON: {reason}", path.display())]
    ConfigNotJson { path: PathBuf, reason: String },
    /// `config.json` is JSON of another kind.
    #[error("`{}` must be a JSON object, found {found}", path.display())]
    ConfigNotObject { path: PathBuf, found: &'static str },

    /// No file that could hold weights.
    #[error("no weights in `{}`: expected `model.safetensors` or shards of it", dir.display())]
    NoWeights { dir: PathBuf },
    /// Weights only as pickles.
    #[error("expected safetensors in `{}`, found only PyTorch weights such as `{example}`", dir.display())]
    OnlyPytorch { dir: PathBuf, example: String },
    /// Weights only as GGUF.
    #[error("expected safetensors in `{}`, found only GGUF weights such as `{example}`", dir.display())]
    OnlyGguf { dir: PathBuf, example: String },
    /// Several weight files whose names do not make one set.
    #[error("{} weight files in `{}` ({}) and no `model.safetensors.index.json` to say how they belong together",
        files.len(), dir.display(), some_of(files))]
    NoIndex { dir: PathBuf, files: Vec<String> },
    /// Files that the index or the numbering implies are not there; all of them are listed.
    #[error("missing shard: {} of the {total} files that `{named_by}` implies are not in `{}`: {}",
        missing.len(), dir.display(), some_of(missing))]
    MissingShards { dir: PathBuf, named_by: String, missing: Vec<String>, total: usize },
    /// A weight file that neither index nor numbering accounts for.
    #[error("stray weight file `{}`: `{beside}` does not account for it", path.display())]
    StrayFile { path: PathBuf, beside: String },

    /// The index does not parse.
    #[error("index `{}` is not a JSON object: {reason}", path.display())]
    IndexNotJson { path: PathBuf, reason: String },
    /// The index names no tensor.
    #[error("index `{}` has no `weight_map` with entries", path.display())]
    NoWeightMap { path: PathBuf },
    /// The index names a file outside the directory, or one of another format.
    #[error("index `{}` puts tensor `{tensor}` into `{shard}`, expected the plain name of a safetensors file", path.display())]
    ShardNameRefused { path: PathBuf, tensor: String, shard: String },
    /// A tensor does not lie where the index says.
    #[error("index `{}` puts tensor `{tensor}` into shard `{shard}`, which lacks it{}{}",
        index.display(), elsewhere(found_in), and_more(*num_more))]
    ShardLacksTensor { index: PathBuf, tensor: String, shard: String, found_in: Option<String>, num_more: usize },
    /// A shard holds a tensor that the index does not name.
    #[error("stray tensor `{tensor}` in shard `{shard}`: index `{}` does not name it{}", index.display(), and_more(*num_more))]
    StrayTensor { index: PathBuf, tensor: String, shard: String, num_more: usize },
    /// Two shards hold the same name.
    #[error("tensor `{tensor}` lies in two shards, `{}` and `{}`", first.display(), second.display())]
    TensorInTwoShards { tensor: String, first: PathBuf, second: PathBuf },

    /// The repository was cloned without its large files.
    #[error("`{}` is a git-lfs pointer, not the weights it points to", path.display())]
    LfsPointer { path: PathBuf },
    /// Not even the length of a header fits into the file.
    #[error("`{}` has {file_bytes} bytes, too few for a safetensors header", path.display())]
    NoHeader { path: PathBuf, file_bytes: u64 },
    /// The header is longer than any reader accepts.
    #[error("`{}` claims a header of {header_bytes} bytes, expected at most {limit}", path.display())]
    HeaderTooLong { path: PathBuf, header_bytes: u64, limit: u64 },
    /// The header is longer than the file.
    #[error("`{}` claims a header of {header_bytes} bytes, found a file of {file_bytes}", path.display())]
    HeaderPastEnd { path: PathBuf, header_bytes: u64, file_bytes: u64 },
    /// The header is not text.
    #[error("the header of `{}` is not UTF-8 at byte {at}", path.display())]
    HeaderNotUtf8 { path: PathBuf, at: u64 },
    /// The header is not a JSON object.
    #[error("the header of `{}` is not a JSON object: {reason}", path.display())]
    HeaderNotJson { path: PathBuf, reason: String },
    /// A header or an index has two entries of one name.
    #[error("`{}` names tensor `{tensor}` twice", path.display())]
    DuplicateKey { path: PathBuf, tensor: String },
    /// The entry of a header or an index does not have the right fields.
    #[error("the entry of `{tensor}` in `{}` is malformed: {reason}", path.display())]
    MalformedEntry { path: PathBuf, tensor: String, reason: String },
    /// The format, as known here, has no such type.
    #[error("tensor `{tensor}` in `{}` has unknown dtype `{dtype}`", path.display())]
    UnknownDtype { path: PathBuf, tensor: String, dtype: String },
    /// A tensor of negative length.
    #[error("tensor `{tensor}` in `{}` begins at byte {begin} and ends before that, at {end}", path.display())]
    OffsetsReversed { path: PathBuf, tensor: String, begin: u64, end: u64 },
    /// The bits of a tensor do not fit into 64 bits.
    #[error("tensor `{tensor}` in `{}` claims {dtype} {shape:?}, more bytes than can be counted", path.display())]
    ShapeOverflow { path: PathBuf, tensor: String, dtype: Dtype, shape: Vec<usize> },
    /// Elements of less than a byte that do not fill the last one.
    #[error("tensor `{tensor}` in `{}` is {dtype} {shape:?}, which does not end on a whole byte", path.display())]
    PartialByte { path: PathBuf, tensor: String, dtype: Dtype, shape: Vec<usize> },
    /// Offsets that disagree with type and shape.
    #[error("tensor `{tensor}` in `{}` is {dtype} {shape:?}, expected {expected} bytes, found {found}", path.display())]
    SizeMismatch { path: PathBuf, tensor: String, dtype: Dtype, shape: Vec<usize>, expected: u64, found: u64 },
    /// A tensor ends behind the end of the file.
    #[error("`{}` is cut short: tensor `{tensor}` lies past its end; expected {expected} bytes, found {found}", path.display())]
    Truncated { path: PathBuf, tensor: String, expected: u64, found: u64 },
    /// Two tensors claim the same byte.
    #[error("tensor `{tensor}` in `{}` begins at byte {begin} of the data, inside tensor `{other}` that ends at {covered}",
        path.display())]
    Overlap { path: PathBuf, tensor: String, other: String, begin: u64, covered: u64 },
    /// Bytes between tensors that nobody claims.
    #[error("hole in `{}` before tensor `{tensor}`: no tensor owns bytes {covered} to {begin} of the data", path.display())]
    Hole { path: PathBuf, tensor: String, begin: u64, covered: u64 },
    /// Bytes behind the last tensor.
    #[error("`{}` has trailing bytes: its tensors end at byte {expected}, the file at {found}", path.display())]
    TrailingBytes { path: PathBuf, expected: u64, found: u64 },
    /// Somebody is writing the file.
    #[error("`{}` changed from {before} to {after} bytes while it was opened", path.display())]
    SizeChanged { path: PathBuf, before: u64, after: u64 },

    /// The arguments of a dequantization do not fit together; callers add the name of the tensor.
    #[error("cannot dequantize: expected {what} {expected}, found {found}")]
    Dequantize { what: &'static str, expected: String, found: String },
}

impl CheckpointError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        use CheckpointError::*;
        let hint = match self {
            DirMissing { .. } => "check the path; a model name of the hub must be downloaded first, e.g. with `hf download`",
            NotADirectory { .. } => "pass the directory that holds `config.json` and the weights",
            NoSingleSnapshot { .. } => "pass one directory below `snapshots/`",
            Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => "check the permissions of the file",
            Io { .. } => return None,
            NoConfig { .. } => "pass the directory that holds `config.json` beside the weights",
            ConfigNotJson { .. } | ConfigNotObject { .. } => "download `config.json` again",
            NoWeights { .. } => "download the weights too; `hf download` fetches the whole repository",
            OnlyPytorch { .. } => "convert it: load with transformers, then `save_pretrained(dir, safe_serialization=True)`",
            OnlyGguf { .. } => "GGUF is already quantized; start from the safetensors checkpoint that it was made from",
            NoIndex { .. } => "download `model.safetensors.index.json`, or leave only one model's files in the directory",
            MissingShards { .. } => "download the missing files; an interrupted `hf download` resumes where it stopped",
            StrayFile { .. } => {
                "move the file out of the directory: other weights, such as an adapter or a consolidated copy, \
                would be mixed into the model"
            }
            IndexNotJson { .. } | NoWeightMap { .. } => "download `model.safetensors.index.json` again",
            ShardNameRefused { .. } => "shards must lie beside the index; do not use this file unless you trust its source",
            ShardLacksTensor { .. } | StrayTensor { .. } => "index and shards are of different versions; download both again",
            TensorInTwoShards { .. } => "two versions of the checkpoint are mixed; download it again into an empty directory",
            LfsPointer { .. } => "fetch the weights with `git lfs pull`",
            NoHeader { .. } | HeaderPastEnd { .. } | Truncated { .. } | SizeChanged { .. } => {
                "the file is not complete; wait for its writer to finish, or download it again"
            }
            HeaderTooLong { .. } | HeaderNotUtf8 { .. } | HeaderNotJson { .. } => {
                "the file is not safetensors or is damaged; download it again"
            }
            DuplicateKey { .. }
            | MalformedEntry { .. }
            | OffsetsReversed { .. }
            | ShapeOverflow { .. }
            | PartialByte { .. }
            | SizeMismatch { .. }
            | Overlap { .. }
            | Hole { .. }
            | TrailingBytes { .. } => "the file is damaged or was written by a faulty tool; download it again or save it anew",
            UnknownDtype { .. } => "a newer version of this tool may know it",
            Dequantize { .. } => "check `weight_block_size` in the `quantization_config` of `config.json`",
        };
        Some(hint.to_owned())
    }
}

/// The first names of a list that may be long.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

fn elsewhere(found_in: &Option<String>) -> String {
    found_in.as_ref().map(|shard| format!(" (it lies in `{shard}`)")).unwrap_or_default()
}

fn and_more(num_more: usize) -> String {
    if num_more == 0 { String::new() } else { format!(" (and {num_more} more such)") }
}
