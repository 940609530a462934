//! What choosing codes asks of a place to compute: passes of hidden states that it keeps, second moments of what matrices see, and
//! codes chosen with these. Whoever walks through a model knows nothing else of where that happens.

use super::{Batch, EngineError, cuda};
use crate::artifact::weights::Weights;
use crate::checkpoint::CheckpointError;
use crate::files::FileError;
use crate::ids::{ExpertId, LayerId, TensorId};
use crate::model::plan::{Plan, Slot};
use crate::quant::format::OwnedPacked;
use crate::quant::gptq::{FeedbackError, Loss, Moments};
use crate::quant::round::Rounding;
use std::ops::Range;
use std::sync::Arc;

/// What time goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Bringing weights to where they are used.
    Weights,
    /// Running steps.
    Passes,
    /// Summing second moments.
    Moments,
    /// Factorising them.
    Factors,
    /// Choosing codes; on the processor with the factors.
    Codes,
}

impl Work {
    /// Every kind.
    pub const ALL: [Work; 5] = [Work::Weights, Work::Passes, Work::Moments, Work::Factors, Work::Codes];

    /// As reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Work::Weights => "weights",
            Work::Passes => "passes",
            Work::Moments => "moments",
            Work::Factors => "factors",
            Work::Codes => "codes",
        }
    }
}

/// Seconds of each kind of work, in the order of [`Work::ALL`].
pub type Spent = [f64; Work::ALL.len()];

/// Inputs to sum of some experts of a layer, once its router has chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWork {
    /// Whose.
    pub layer: LayerId,
    /// `F`.
    pub width: usize,
    /// The buffer that experts read.
    pub src: Slot,
    /// Which.
    pub experts: Vec<ExpertId>,
    /// Of gate and up.
    pub inputs: bool,
    /// Of down.
    pub inner: bool,
    /// All tokens with weight 1, for experts that no token chose.
    pub pooled: bool,
}

/// Inputs of which second moments are to be summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// `K`.
    pub cols: usize,
    /// Outputs that can pay what the residual stream lacks, `R`; 0: they go elsewhere.
    pub pays: usize,
    /// The head, if it reads them: a place may tell apart for which of its rows an input counts.
    pub head: Option<TensorId>,
}

/// Matrices that share their inputs.
pub struct Job<S> {
    /// Second moments of the inputs.
    pub sums: S,
    /// The matrices, and the ways in which each is stored.
    pub matrices: Vec<(TensorId, Vec<Rounding>)>,
}

/// What was chosen for one matrix.
pub struct Chosen {
    /// Which.
    pub id: TensorId,
    /// One for each way.
    pub codes: Vec<(OwnedPacked, Loss)>,
    /// Damping that its moments needed, as a share of the mean diagonal.
    pub damping: f64,
}

/// Why a place cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SolverError {
    /// An engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Weights could not be brought to the GPU.
    #[error(transparent)]
    Load(#[from] cuda::LoadError),
    /// The scratch file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A weight cannot be decoded.
    #[error("{id}: {source}")]
    Weight {
        /// Which.
        id: TensorId,
        /// Why.
        source: Box<CheckpointError>,
    },
    /// No codes for this matrix.
    #[error("{id}: {source}")]
    Codes {
        /// Which.
        id: TensorId,
        /// Why.
        source: FeedbackError,
    },
}

impl SolverError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            SolverError::Engine(e) => e.hint(),
            SolverError::Load(e) => e.hint(),
            SolverError::File(e) => e.hint(),
            SolverError::Weight { source, .. } => source.hint(),
            SolverError::Codes { .. } => None,
        }
    }
}

impl From<cuda::CudaError> for SolverError {
    fn from(error: cuda::CudaError) -> Self {
        SolverError::Engine(error.into())
    }
}

/// A place to compute. Where matrices make up for what was chosen before them, it passes hidden states through the source beside, and
/// sums how its inputs and its residual stream differ.
pub trait Solver {
    /// Second moments where they are summed.
    type Sums;

    /// The steps that are run.
    fn plan(&self) -> &Plan;

    /// From now on runs these weights, of which no others than `ids` are asked for.
    fn attach(&mut self, weights: Arc<Weights>, ids: &[TensorId]) -> Result<(), SolverError>;

    /// The same of the source, if it runs beside.
    fn attach_source(&mut self, ids: &[TensorId]) -> Result<(), SolverError>;

    /// Begins a pass over whole sequences.
    fn begin(&mut self, batch: &Batch) -> Result<(), SolverError>;

    /// Makes the hidden states from row `first_row` on the residual stream of the batch.
    fn load(&mut self, batch: &Batch, first_row: usize) -> Result<(), SolverError>;

    /// Keeps the residual stream as the hidden states from row `first_row` on.
    fn store(&mut self, first_row: usize) -> Result<(), SolverError>;

    /// Runs some steps.
    fn run(&mut self, steps: Range<usize>, batch: &Batch) -> Result<(), SolverError>;

    /// Ends a pass: its sequences are forgotten.
    fn end(&mut self, batch: &Batch);

    /// Sums of nothing for each of these inputs; `full`: with the products of different columns.
    fn empty(&mut self, inputs: &[Inputs], full: bool) -> Result<Vec<Self::Sums>, SolverError>;

    /// Sums that were made elsewhere.
    fn lift(&mut self, moments: Moments) -> Result<Self::Sums, SolverError>;

    /// Tokens summed.
    fn tokens(&self, sums: &Self::Sums) -> Result<usize, SolverError>;

    /// Adds every row of a buffer; `pays`: with what the residual stream lacks.
    fn add(&mut self, sums: &mut Self::Sums, slot: Slot, pays: bool) -> Result<(), SolverError>;

    /// Adds what experts see of the batch, times the gate; `sums` are theirs one after the other, inputs before what down sees.
    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Self::Sums]) -> Result<(), SolverError>;

    /// Chooses codes for matrices of `weights`, one list a job.
    fn choose(&mut self, weights: &Weights, jobs: Vec<Job<Self::Sums>>) -> Result<Vec<Vec<Chosen>>, SolverError>;

    /// Time since this was last asked.
    fn spent(&mut self) -> Result<Spent, SolverError>;
}
