//! Why an artifact cannot be written, and what the user can do about it.

use crate::checkpoint::CheckpointError;
use crate::files::FileError;
use crate::tensor::Dtype;
use std::path::PathBuf;

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
