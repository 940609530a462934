//! Why an artifact cannot be written, and what the user can do about it.

use crate::checkpoint::CheckpointError;
use crate::files::FileError;
use crate::tensor::Dtype;
use std::path::PathBuf;

/// The way on for a run that was stopped.
const RESUME: &str = "run the same command with `--resume` to continue";

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
    /// An earlier run has finished files that would be lost.
    #[error("`{}` holds an unfinished run, {finished} of {total} weight files done", path.display())]
    Unfinished {
        /// Where.
        path: PathBuf,
        /// Weight files done.
        finished: usize,
        /// Weight files in all.
        total: usize,
    },
    /// An unfinished run cannot be continued, because its result would not be that of one run.
    #[error("cannot resume `{}`: {what}", path.display())]
    Changed {
        /// The unfinished directory.
        path: PathBuf,
        /// What is other than it was.
        what: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Something failed, but what is done is kept.
    #[error("stopped with {finished} of {total} weight files done")]
    Stopped {
        /// Weight files done.
        finished: usize,
        /// Weight files in all.
        total: usize,
        /// Why.
        source: Box<ArtifactError>,
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
            ArtifactError::Unfinished { .. } => Some("pass `--resume` to continue it, or `--force` to start over".into()),
            ArtifactError::Changed { .. } => Some("undo the change, or pass `--force` without `--resume` to start over".into()),
            ArtifactError::Stopped { source, .. } => {
                let cure = source.hint().filter(|hint| hint != RESUME).map_or_else(String::new, |hint| hint + "; then ");
                Some(cure + RESUME)
            }
            ArtifactError::Interrupted => Some(RESUME.into()),
            ArtifactError::Json(_) | ArtifactError::Vanished { .. } => None,
        }
    }

    /// Whether a second attempt on the same source may succeed.
    pub fn is_passing(&self) -> bool {
        matches!(self, ArtifactError::File(_) | ArtifactError::Interrupted)
    }

    /// Whether the input is at fault, rather than the machine.
    pub fn is_bad_input(&self) -> bool {
        match self {
            ArtifactError::File(e) => e.is_bad_input(),
            ArtifactError::Json(_) | ArtifactError::Vanished { .. } => false,
            ArtifactError::Interrupted | ArtifactError::Stopped { .. } => false,
            _ => true,
        }
    }
}
