//! Models for other programs: a GGUF file for llama.cpp from an artifact or a checkpoint.
//!
//! Knows the file format, the names and keys that llama.cpp expects of each family, and its vocabulary. Must not know engines.

mod arch;
pub mod gguf;
mod tensors;
mod vocab;

use crate::artifact::weights::Weights;
use crate::checkpoint::CheckpointError;
use crate::files::{self, FileError};
use crate::quant::format::Format;
use crate::quant::round::RoundError;
use gguf::{Header, TensorInfo, Value};
use serde_json::Value as Json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a model cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A weight cannot be decoded.
    #[error("`{tensor}`: {source}")]
    Decode {
        /// Canonical id.
        tensor: String,
        /// Why.
        source: Box<CheckpointError>,
    },
    /// A weight cannot be rounded.
    #[error("`{tensor}`: {source}")]
    Round {
        /// Canonical id.
        tensor: String,
        /// Why.
        source: RoundError,
    },
    /// GGUF has no blocks of this form.
    #[error("`{tensor}` is {format}, and llama.cpp has no blocks of eight-bit codes with zero points")]
    Blocks {
        /// Canonical id.
        tensor: String,
        /// How it is stored.
        format: Format,
    },
    /// llama.cpp computes this family in one way only, and the model needs another.
    #[error("llama.cpp cannot run this `{family}`: {what}")]
    Unsupported {
        /// `model_type`.
        family: &'static str,
        /// What it lacks.
        what: String,
    },
    /// The tokenizer is not of a kind that can be carried over.
    #[error("`{}`: {what}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl ExportError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ExportError::File(e) => e.hint(),
            ExportError::Decode { source, .. } => source.hint(),
            ExportError::Round { .. } => Some("the weights are damaged; `moe verify` says where".into()),
            ExportError::Blocks { .. } => Some("quantize it as int8 without `:asym`; int4 with zero points becomes Q4_1".into()),
            ExportError::Unsupported { .. } => Some("such a model runs in this tool, vLLM, SGLang and transformers".into()),
            ExportError::Tokenizer { .. } => Some("move the tokenizer files away to export the weights alone".into()),
        }
    }

    /// Whether the input is at fault, rather than the machine.
    pub fn is_bad_input(&self) -> bool {
        match self {
            ExportError::File(e) => e.is_bad_input(),
            _ => true,
        }
    }
}

/// What was written.
#[derive(Clone, Debug, Default)]
pub struct Exported {
    /// Size of the file.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Tensors by type, in the order of first appearance.
    pub types: Vec<(&'static str, usize)>,
    /// Scales that are no half-precision number.
    pub rounded_scales: usize,
    /// Scales in all.
    pub scales: usize,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Writes `weights` as a GGUF file. Packed weights keep their codes, those with zero points as Q4_1; with `source`, the checkpoint that they were made from,
/// those whose groups are wider than a block of 32 are rounded anew. `progress` is told the bytes written
/// since the last call, and those of the whole file.
pub fn gguf(
    weights: &Weights,
    source: Option<&Weights>,
    path: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<Exported, ExportError> {
    let (mut keys, mut warnings) = arch::keys(weights)?;
    let dir = weights.checkpoint().dir();
    match vocab::keys(dir, weights.spec())? {
        Some(vocab) => {
            keys.extend(vocab.keys);
            warnings.extend(vocab.warnings);
        }
        None => {
            warnings.push("no tokenizer.json: the file has no vocabulary and takes token ids only".into());
            keys.push(("tokenizer.ggml.model".into(), Value::Text("none".into())));
        }
    }
    let plan = tensors::plan(weights, source)?;
    let infos: Vec<TensorInfo> = plan.iter().map(|t| t.info.clone()).collect();
    let header = Header::new(keys, infos);
    let mut exported = Exported { bytes: header.file_bytes(), tensors: plan.len(), warnings, ..Exported::default() };
    for tensor in &plan {
        let name = tensor.info.kind.name();
        match exported.types.iter_mut().find(|(n, _)| *n == name) {
            Some((_, count)) => *count += 1,
            None => exported.types.push((name, 1)),
        }
    }
    let total = exported.bytes;
    let io = |source: io::Error| ExportError::File(FileError::Io { op: "write", path: path.to_path_buf(), source });
    files::write_whole(path, |file| {
        file.write_all(&header.to_bytes()).map_err(io)?;
        for tensor in &plan {
            let mut written = 0u64;
            tensor.write(&mut |bytes: &[u8], counts: tensors::Scales| {
                written += bytes.len() as u64;
                exported.scales += counts.all;
                exported.rounded_scales += counts.rounded;
                progress(bytes.len() as u64, total);
                file.write_all(bytes).map_err(io)
            })?;
            file.write_all(&vec![0; gguf::padding(written)]).map_err(io)?;
        }
        Ok::<(), ExportError>(())
    })?;
    Ok(exported)
}

/// A JSON file beside the weights; absent reads as null.
fn side_file(dir: &Path, name: &str) -> Result<Json, ExportError> {
    let path = dir.join(name);
    if !path.exists() {
        return Ok(Json::Null);
    }
    serde_json::from_slice(&files::read(&path)?)
        .map_err(|e| ExportError::Tokenizer { path, what: format!("it is not JSON: {e}") })
}
