//! Chooses codes layer by layer with the activations of a calibration text.
//!
//! Hidden states of all tokens advance through the model one block at a time. A block is passed several times: what is known of
//! it is run, second moments of the inputs of the next matrices are summed, these are quantized, and so on until a last pass
//! runs the quantized block. With feedback the source runs on hidden states of its own beside it, so that every matrix aims at what
//! the source computes, and errors of a head count where the source is in doubt. What is finished is filed, a layer a file; a run
//! that finds such files replays them and goes on.
//! Memory is one layer, one wave of second moments, one factorisation a thread, and the hidden states or their window of a file.

mod gather;
mod processor;
mod stage;
mod walk;

use super::hidden::{BATCH_TOK, groups_of};
use super::lockstep::Place;
use super::windows::Window;
use crate::artifact::error::ArtifactError;
use crate::artifact::solved::Solved;
use crate::artifact::weights::Weights;
use crate::engine::cuda;
use crate::engine::solver::{Solver, SolverError, Spent};
use crate::files::{self, FileError};
use crate::ids::{LayerId, Role, TensorId};
use crate::model::spec::{Ffn, LayerSpec};
use crate::quant::format::Format;
use crate::quant::gptq::{Loss, Moments};
use crate::tensor::Dtype;
use processor::Processor;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One way of storing every tensor, and where what was chosen for it is filed.
pub struct Choice<'a> {
    /// Format of a tensor.
    pub format: &'a (dyn Fn(TensorId) -> Format + Sync),
    /// A directory that exists.
    pub dir: PathBuf,
}

/// What the hidden states pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// What was chosen, of the first choice.
    Solved,
    /// The source, so that many choices share one pass.
    Source,
}

/// What is to be chosen, with what.
pub struct Task<'a> {
    /// The source.
    pub weights: &'a Arc<Weights>,
    /// The calibration text.
    pub windows: &'a [Window],
    /// Ways of storing it.
    pub choices: Vec<Choice<'a>>,
    /// What the hidden states pass through.
    pub advance: Advance,
    /// Error feedback; otherwise energies weigh the search alone.
    pub feedback: bool,
    /// No negative scales.
    pub positive_scales: bool,
    /// Type of the scales.
    pub scale_dtype: Dtype,
    /// Bytes of hidden states past which they go to a file, and of second moments past which experts go in waves; of a GPU's
    /// memory, all that is free within the budget of its place is used instead.
    pub max_memory: u64,
    /// Where all is computed.
    pub place: Place,
}

impl Task<'_> {
    /// Whether matrices make up for what was chosen before them, which takes full moments and a pass of the source beside.
    fn makes_up(&self) -> bool {
        self.feedback && self.advance == Advance::Solved
    }
}

/// What became of one matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Module {
    /// Canonical id.
    pub id: String,
    /// Its format.
    pub format: String,
    /// Tokens whose activations were summed; 0 of an embedding, which is weighed by the matrices that read it.
    pub tokens: usize,
    /// No token chose this expert: all tokens stand in.
    pub pooled: bool,
    /// Damping, as a share of the mean energy of its inputs.
    pub damping: f64,
    /// Squared error of its outputs, a calibration token, weighted by the squared gate.
    pub loss: Loss,
}

/// What a caller is told.
pub enum Progress<'a> {
    /// Tokens have passed through a block once more; the number is this group's share of a pass.
    Group,
    /// A part is finished: its name, the modules of the first choice, and the time that went into it.
    Part(&'a str, &'a [Module], Spent),
    /// A part was found finished.
    Resumed(&'a str),
}

/// Why choosing stopped.
#[derive(Debug, thiserror::Error)]
pub enum SolveError {
    /// The place where all is computed failed.
    #[error(transparent)]
    Solver(#[from] SolverError),
    /// A file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A weight is no number, or a file of finished layers is damaged.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Activations overflowed.
    #[error("activations of `{0}` are not finite on the calibration text")]
    Activations(String),
    /// A file of finished layers is damaged.
    #[error("`{}` is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// Asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl SolveError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            SolveError::Solver(e) => e.hint(),
            SolveError::File(e) => e.hint(),
            SolveError::Artifact(e) => e.hint(),
            SolveError::Activations(_) => Some("the checkpoint overflows on this text; quantize it with --method search".into()),
            SolveError::Damaged { .. } => Some("pass --force without --resume to start over".into()),
            SolveError::Interrupted => Some("run the same command with `--resume` to continue".into()),
        }
    }
}

/// What was chosen for one [`Choice`].
pub struct Outcome {
    /// Codes and scales, mapped.
    pub solved: Arc<Solved>,
    /// Every matrix, in order of computation.
    pub modules: Vec<Module>,
}

/// Passes through the blocks that [`solve`] makes at most, times the groups of a pass; for a progress bar.
pub fn num_passes(task: &Task<'_>) -> u64 {
    let spec = task.weights.spec();
    let passes = |layer: &LayerSpec| {
        let experts = match &layer.ffn {
            Ffn::Dense { .. } => 0,
            Ffn::Moe(m) => 2 * (m.router.experts.div_ceil(wave(task, spec.width, m.width)) - 1),
        };
        match task.advance {
            Advance::Solved => 6 + experts,
            Advance::Source => 3 + experts / 2,
        }
    };
    (spec.layers.iter().map(passes).sum::<usize>() * groups_of(task.windows, pass_tok(task)).len()) as u64
}

/// Tokens of a pass.
fn pass_tok(task: &Task<'_>) -> usize {
    match task.place {
        Place::Processor => BATCH_TOK,
        Place::Gpu { .. } => cuda::solver::PASS_TOK,
    }
}

/// Experts whose second moments are in memory together.
fn wave(task: &Task<'_>, width: usize, inner: usize) -> usize {
    let mut each = Moments::bytes(width, task.feedback) + Moments::bytes(inner, task.feedback);
    if task.makes_up() {
        each += Moments::owed_bytes(width, 0) + Moments::owed_bytes(inner, width);
    }
    let bytes = match task.place {
        Place::Processor => task.max_memory,
        // Without a GPU there is no walk.
        Place::Gpu { budget_bytes } => cuda::solver::sums_bytes(budget_bytes).unwrap_or(0),
    };
    (bytes / each.max(1)).clamp(1, 1 << 20) as usize
}

/// Chooses codes and scales for every tensor that a choice quantizes.
pub fn solve(task: &Task<'_>, on: &mut dyn FnMut(Progress<'_>) -> bool) -> Result<Vec<Outcome>, SolveError> {
    let rows: usize = task.windows.iter().map(|w| w.tokens.len()).sum();
    let groups = groups_of(task.windows, pass_tok(task));
    match task.place {
        Place::Processor => walk(task, Processor::new(task.weights, rows, task.makes_up(), task.max_memory)?, groups, on)?,
        Place::Gpu { budget_bytes } => {
            let tok = groups.iter().map(|(_, windows)| windows.iter().map(|w| w.tokens.len()).sum()).max().unwrap_or(0);
            let seqs = groups.iter().map(|(_, windows)| windows.len()).max().unwrap_or(0);
            let solver = cuda::solver::Solver::open(task.weights, rows, task.makes_up(), [tok, seqs], budget_bytes)
                .map_err(SolverError::from)?;
            walk(task, solver, groups, on)?
        }
    }
    task.choices.iter().map(|c| outcome(task, c)).collect()
}

fn walk<S: Solver>(
    task: &Task<'_>,
    solver: S,
    groups: Vec<(usize, &[Window])>,
    on: &mut dyn FnMut(Progress<'_>) -> bool,
) -> Result<(), SolveError> {
    let mut walk = walk::Walk::new(task, solver, groups, on);
    walk.embed()?;
    for l in 0..task.weights.spec().layers.len() {
        walk.layer(l)?;
    }
    walk.head()
}

fn outcome(task: &Task<'_>, choice: &Choice<'_>) -> Result<Outcome, SolveError> {
    let mut solved = Solved::default();
    let mut modules = Vec::new();
    let tied = task.weights.spec().tied;
    let layers = (0..task.weights.spec().layers.len()).map(layer_name);
    for name in std::iter::once("embed".to_string()).chain(layers).chain(["head".to_string()]) {
        let ids = task.weights.tensors().iter().map(|(id, _)| *id).filter(|id| part(*id, tied) == name);
        solved.open(&codes_file(&choice.dir, &name), ids)?;
        modules.extend(read_modules(&modules_file(&choice.dir, &name))?);
    }
    Ok(Outcome { solved: Arc::new(solved), modules })
}

fn layer_name(l: usize) -> String {
    format!("layer-{l:04}")
}

/// The part of the model that a tensor is filed with.
fn part(id: TensorId, tied: bool) -> String {
    match (id.layer, id.role) {
        (Some(LayerId(l)), _) => layer_name(l as usize),
        (None, Role::Embed) if !tied => "embed".into(),
        (None, _) => "head".into(),
    }
}

fn codes_file(dir: &Path, part: &str) -> PathBuf {
    dir.join(format!("{part}.safetensors"))
}

fn modules_file(dir: &Path, part: &str) -> PathBuf {
    dir.join(format!("{part}.json"))
}

fn read_modules(path: &Path) -> Result<Vec<Module>, SolveError> {
    let bytes = files::read(path)?;
    serde_json::from_slice(&bytes).map_err(|e| SolveError::Damaged { path: path.to_path_buf(), reason: e.to_string() })
}
