//! `moe.json`: what an artifact was made from, what was done with every tensor, and the checksums of what was written.
//!
//! Readers of the weights ignore it. It is written last, so that a directory with a manifest is complete.

use crate::files::{self, FileError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file.
pub const FILE: &str = "moe.json";
/// Form written and read by this version.
pub const VERSION: u32 = 1;

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not of the expected form.
    #[error("`{}` is not a manifest: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The file has a form that this version does not know.
    #[error("`{}` has version {found}, expected {VERSION}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u64,
    },
}

impl ManifestError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ManifestError::File(e) => e.hint(),
            ManifestError::Malformed { .. } => Some("quantize the model again".into()),
            ManifestError::Version { .. } => {
                Some("use the version of this tool that wrote it, or quantize the model again".into())
            }
        }
    }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Form of this file.
    pub version: u32,
    /// Version of the tool that wrote it.
    pub tool: String,
    /// `model_type`.
    pub family: String,
    /// The weight files it was made from.
    pub source: Source,
    /// How formats were chosen.
    pub recipe: Recipe,
    /// What was done with each tensor.
    pub tensors: Vec<Row>,
    /// The weight files beside this one.
    pub shards: Vec<FileSum>,
    /// Sums over everything.
    pub totals: Totals,
    /// Results of measuring the artifact against its source.
    pub measured: Option<serde_json::Value>,
}

/// What an artifact was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Name of the directory, without the path to it.
    pub name: String,
    /// `config.json` and the weight files.
    pub files: Vec<FileSum>,
}

/// A file with its checksum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSum {
    /// Name inside its directory.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// How formats, codes and scales were chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the profile.
    pub profile: String,
    /// Overrides, in order.
    pub overrides: Vec<String>,
    /// Group size that replaced the profile's.
    pub group_size: Option<usize>,
    /// Whether the four-bit formats of the profile were given zero points.
    #[serde(default)]
    pub asym: bool,
    /// Rounding method.
    pub method: String,
    /// Whether scales were kept positive.
    pub positive_scales: bool,
    /// Type of the scales.
    pub scale_dtype: String,
    /// The budget that formats were chosen under, as it was typed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The text that codes were chosen with, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
}

/// A calibration text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Names of the task sets.
    pub tasks: Vec<String>,
    /// Of the token ids, little endian.
    pub sha256: String,
    /// How many.
    pub tokens: usize,
}

/// What became of a tensor, or of the same tensor of every expert of a layer (`*` in place of the expert).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Canonical id; absent for tensors outside the forward pass.
    pub id: Option<String>,
    /// Names in the source files.
    pub source: Vec<String>,
    /// How many tensors of the model this row stands for.
    pub tensors: usize,
    /// What was done.
    pub action: Action,
    /// Why, where that is not plain from the recipe.
    pub reason: Option<String>,
    /// Format written.
    pub format: String,
    /// Bytes read, scales included.
    pub source_bytes: u64,
    /// Bytes written, scales and shapes included.
    pub bytes: u64,
}

/// What was done with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Written as codes and scales.
    Quantized,
    /// Taken out of a tensor that holds all experts, then quantized.
    Split,
    /// Copied byte for byte.
    Copied,
    /// Written as plain floats of the model's type.
    Decoded,
    /// Left out.
    Dropped,
}

/// Sums over an artifact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Parameters of the model.
    pub parameters: u64,
    /// Bytes of all source tensors.
    pub source_bytes: u64,
    /// Bytes of all tensors written.
    pub bytes: u64,
    /// Bits per parameter.
    pub bpw: f64,
}

impl Manifest {
    /// Reads the manifest of a directory; `None` if there is none.
    pub fn read(dir: &Path) -> Result<Option<Self>, ManifestError> {
        let path = dir.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = files::read(&path)?;
        let malformed = |e: serde_json::Error| ManifestError::Malformed { path: path.clone(), reason: e.to_string() };
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(malformed)?;
        match value.get("version").and_then(|v| v.as_u64()) {
            Some(v) if v == u64::from(VERSION) => serde_json::from_value(value).map(Some).map_err(malformed),
            Some(found) => Err(ManifestError::Version { path, found }),
            None => Err(ManifestError::Malformed { path, reason: "it has no `version`".into() }),
        }
    }

    /// The bytes of the file.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}
