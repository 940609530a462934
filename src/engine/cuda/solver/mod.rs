//! Choosing codes on a GPU: passes in single precision, second moments and error feedback, all experts of a layer in one launch.
//!
//! Hidden states stay on the device. Weights come to it part by part, those that are still to be chosen only to be quantized.

mod codes;
mod kernels;

use super::device::{CudaError, Device};
use super::memory::{Buffer, Event};
use super::module::{Module, program};
use super::tiled::Tiled;
use super::{Engine, LoadError, Workspace, tiles};
use crate::artifact::weights::Weights;
use crate::engine::solver::{Chosen, ExpertWork, Job, Solver as Place, SolverError, Spent, Work};
use crate::engine::{Batch, EngineError};
use crate::ids::TensorId;
use crate::model::plan::{self, Plan, Slot};
use crate::model::spec::Ffn;
use crate::quant::gptq::Moments;
use cudarc::driver::result;
use kernels::Kernels;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of a pass: enough that every expert has a full tile of them.
pub const PASS_TOK: usize = 8192;
/// What is left to the driver of memory that is all to be used.
const SPARE_BYTES: u64 = 1 << 30;

/// Second moments on the device: the lower triangle of `[K, K]`, or the diagonal alone.
pub struct Sums {
    memory: Arc<Buffer>,
    at_bytes: usize,
    cols: usize,
    full: bool,
    /// Tokens that the host knows of, and where the device counts those of an expert.
    tokens: usize,
    counted: Option<(Arc<Buffer>, usize)>,
    totals: Arc<Buffer>,
}

impl Sums {
    fn at(&self) -> u64 {
        self.memory.at(self.at_bytes)
    }
}

/// The GPU as a place to choose codes.
pub struct Solver {
    device: Arc<Device>,
    engine: Engine,
    kernels: Kernels,
    hidden: Buffer,
    /// Addresses of sums, and whose they are.
    scratch: Buffer,
    budget_bytes: u64,
    num_tok: usize,
    /// Work whose time the device takes.
    spans: Vec<(Work, Event, Event)>,
}

/// Bytes of second moments that may be on the first GPU together, of a budget or of all that is free.
pub fn sums_bytes(budget_bytes: Option<u64>) -> Result<u64, CudaError> {
    let free = Device::open(0)?.memory()?.0;
    Ok(budget_bytes.unwrap_or(free).min(free) / 8)
}

impl Solver {
    /// Prepares the first GPU for hidden states of `rows` rows, in passes of up to `tok` tokens of `seqs` sequences.
    pub fn open(
        weights: &Arc<Weights>,
        rows: usize,
        tok: usize,
        seqs: usize,
        budget_bytes: Option<u64>,
    ) -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let free = device.memory()?.0;
        let budget_bytes = budget_bytes.unwrap_or(free.saturating_sub(SPARE_BYTES)).min(free);
        let spec = weights.spec();
        let hidden = 4 * (rows * spec.width) as u64;
        let needed = hidden + Workspace::planned_bytes(&plan::plan(spec), spec, tok, 1) + Tiled::bytes(spec, tok);
        if needed > budget_bytes {
            return Err(CudaError::Budget { smallest_bytes: 2 * needed, budget_bytes });
        }
        let kernels = Kernels::load(&Module::load(&device, program("solve.cu"))?)?;
        let engine = Engine::in_parts(&device, Arc::clone(weights), tok, seqs)?;
        let hidden = Buffer::new(&device, hidden as usize)?;
        let scratch = Buffer::new(&device, 12 * Tiled::experts(spec).max(1))?;
        Ok(Self { device, engine, kernels, hidden, scratch, budget_bytes: budget_bytes - needed, num_tok: 0, spans: Vec::new() })
    }

    /// Has the device take the time from before some work until it is done.
    fn timed<T, E: From<CudaError>>(&mut self, work: Work, run: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(self.device.stream())?;
        let result = run(self)?;
        end.record(self.device.stream())?;
        self.spans.push((work, start, end));
        Ok(result)
    }

    /// Bytes of the budget that are still to be had.
    fn room(&self) -> Result<u64, CudaError> {
        Ok(self.device.memory()?.0.saturating_sub(SPARE_BYTES / 2).min(self.budget_bytes))
    }

    fn row_bytes(&self) -> usize {
        4 * self.engine.spec().width
    }

    /// Copies between hidden states and the residual stream, in the order of the kernels.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        use super::device::During;
        self.device.current()?;
        // SAFETY: the callers' ranges lie within buffers that they hold.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.device.stream()) }.during("copy on the device")
    }

    /// Adds rows of `cols`; see `tiles_moments`.
    fn add_rows(&self, sums: &[&mut Sums], rows: &Rows) -> Result<(), CudaError> {
        let Some(first) = sums.first() else { return Ok(()) };
        // Uploads follow the kernels before them, so that one place serves all calls.
        let addresses: Vec<u64> = sums.iter().map(|s| s.at()).collect();
        self.device.upload(&self.scratch, 0, &addresses)?;
        self.device.upload(&self.scratch, 8 * addresses.len(), &rows.experts)?;
        let experts = self.scratch.at(8 * addresses.len());
        let (cols, tiled) = (first.cols, self.engine.tiled.as_ref());
        let Some(Tiled { kernels, lists, counts, .. }) = tiled else { return Ok(()) };
        let (of, n) = (self.scratch.at(0), sums.len());
        let listed = |at: u64| if rows.experts.is_empty() { 0 } else { at };
        let (lists, counts, experts) = (listed(lists.at(0)), listed(counts.at(0)), listed(experts));
        let (src, stride, divide, gates, cap) = (rows.src, rows.stride, rows.divide, rows.gates, self.num_tok as i32);
        if first.full {
            let grid = tiles::triangle(cols, n);
            kernels.tiles_moments(grid, of, src, stride, divide, gates, lists, counts, cap, experts, cols as i32)
        } else {
            let grid = tiles::each_column(cols, n);
            kernels.tiles_energies(grid, of, src, stride, divide, gates, lists, counts, cap, experts, cols as i32)
        }
    }
}

/// Rows to add to sums.
struct Rows {
    src: u64,
    stride: i32,
    /// Pairs of a row.
    divide: i32,
    gates: u64,
    /// Whose listed pairs, for each of the sums; none: all rows.
    experts: Vec<u32>,
}

impl Place for Solver {
    type Sums = Sums;

    fn plan(&self) -> &Plan {
        self.engine.plan()
    }

    fn attach(&mut self, weights: Arc<Weights>, ids: &[TensorId]) -> Result<(), SolverError> {
        self.timed(Work::Weights, |s| Ok(s.engine.attach(weights, ids)?))
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), SolverError> {
        self.num_tok = batch.tokens.len();
        Ok(self.engine.begin(batch)?)
    }

    fn load(&mut self, batch: &Batch, first_row: usize) -> Result<(), SolverError> {
        let bytes = batch.tokens.len() * self.row_bytes();
        let from = self.hidden.at(first_row * self.row_bytes());
        self.engine.work.row[Slot::Residual as usize] = self.engine.spec().width;
        Ok(self.copy(self.engine.at(Slot::Residual), from, bytes)?)
    }

    fn store(&mut self, first_row: usize) -> Result<(), SolverError> {
        let bytes = self.num_tok * self.row_bytes();
        Ok(self.copy(self.hidden.at(first_row * self.row_bytes()), self.engine.at(Slot::Residual), bytes)?)
    }

    fn run(&mut self, steps: Range<usize>, _batch: &Batch) -> Result<(), SolverError> {
        self.timed(Work::Passes, |s| Ok(s.engine.run(steps, None)?))
    }

    fn end(&mut self, batch: &Batch) {
        batch.segments.iter().for_each(|s| self.engine.release(s.seq));
    }

    fn empty(&mut self, cols: &[usize], full: bool) -> Result<Vec<Sums>, SolverError> {
        let each = |cols: usize| super::memory::aligned(Moments::bytes(cols, full) as usize);
        let memory = Arc::new(Buffer::new(&self.device, cols.iter().map(|&k| each(k)).sum())?);
        let totals = Arc::new(Buffer::new(&self.device, 4 * Tiled::experts(self.engine.spec()))?);
        memory.clear()?;
        totals.clear()?;
        let mut next = 0;
        let sums = cols.iter().map(|&cols| {
            let at_bytes = next;
            next += each(cols);
            let (memory, totals) = (Arc::clone(&memory), Arc::clone(&totals));
            Sums { memory, at_bytes, cols, full, tokens: 0, counted: None, totals }
        });
        Ok(sums.collect())
    }

    fn lift(&mut self, moments: Moments) -> Result<Sums, SolverError> {
        let mut sums = self.empty(&[moments.cols()], moments.is_full())?.remove(0);
        sums.tokens = moments.tokens();
        self.device.upload(&sums.memory, sums.at_bytes, moments.sums())?;
        Ok(sums)
    }

    fn tokens(&self, sums: &Sums) -> Result<usize, SolverError> {
        let Some((totals, expert)) = &sums.counted else { return Ok(sums.tokens) };
        let mut count = [0u32];
        self.device.download(&mut count, totals, 4 * expert)?;
        Ok(sums.tokens + count[0] as usize)
    }

    fn add(&mut self, sums: &mut Sums, slot: Slot) -> Result<(), SolverError> {
        sums.tokens += self.num_tok;
        let rows = Rows { src: self.engine.at(slot), stride: self.engine.row(slot), divide: 1, gates: 0, experts: Vec::new() };
        self.timed(Work::Moments, |s| Ok(s.add_rows(&[sums], &rows)?))
    }

    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Sums]) -> Result<(), SolverError> {
        let Ffn::Moe(moe) = &self.engine.spec().layers[work.layer.0 as usize].ffn else { return Ok(()) };
        let (top_k, num_experts, tok) = (moe.router.top_k, moe.router.experts, self.num_tok);
        let (src, stride) = (self.engine.at(work.src), self.engine.row(work.src));
        let Some(totals) = sums.first().map(|s| Arc::clone(&s.totals)) else { return Ok(()) };
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let (mut inputs, mut inner) = (Vec::new(), Vec::new());
        for (chunk, expert) in sums.chunks_mut(each).zip(&work.experts) {
            for (i, sums) in chunk.iter_mut().enumerate() {
                match work.pooled {
                    true => sums.tokens += tok,
                    false => sums.counted = Some((Arc::clone(&totals), expert.0 as usize)),
                }
                let kind = if work.inputs && i == 0 { &mut inputs } else { &mut inner };
                kind.push(&mut **sums);
            }
        }
        let experts: Vec<u32> = work.experts.iter().map(|e| e.0).collect();
        let width = work.width as i32;
        if !work.pooled {
            let gates = self.engine.work.gates.at(0);
            let rows = Rows { src, stride, divide: top_k as i32, gates, experts: experts.clone() };
            self.timed(Work::Moments, |s| {
                s.engine.list_pairs(work.layer, tok, totals.at(0))?;
                s.add_rows(&inputs, &rows)
            })?;
            if work.inner {
                self.timed(Work::Passes, |s| s.engine.expert_inner(work.src, work.layer, work.width, tok, top_k, tok * top_k))?;
                let rows = Rows { src: self.engine.work.inner.at(0), stride: width, divide: 1, gates, experts };
                self.timed(Work::Moments, |s| s.add_rows(&inner, &rows))?;
            }
            return Ok(());
        }
        for sums in inputs {
            self.add_rows(&[sums], &Rows { src, stride, divide: 1, gates: 0, experts: Vec::new() })?;
        }
        // Every token visits one expert after the other.
        let all: Vec<u32> = (0..tok as u32).collect();
        for (sums, &expert) in inner.into_iter().zip(&experts) {
            let mut counts = vec![0u32; num_experts];
            counts[expert as usize] = tok as u32;
            if let Some(tiled) = &self.engine.tiled {
                self.device.upload(&tiled.counts, 0, &counts)?;
                self.device.upload(&tiled.lists, 4 * tok * expert as usize, &all)?;
            }
            self.engine.expert_inner(work.src, work.layer, work.width, tok, 1, tok)?;
            let src = self.engine.work.inner.at(0);
            self.add_rows(&[sums], &Rows { src, stride: width, divide: 1, gates: 0, experts: Vec::new() })?;
        }
        Ok(())
    }

    fn choose(&mut self, weights: &Weights, jobs: Vec<Job<Sums>>) -> Result<Vec<Vec<Chosen>>, SolverError> {
        self.choose_all(weights, jobs)
    }

    fn spent(&mut self) -> Result<Spent, SolverError> {
        let mut spent = Spent::default();
        for (work, start, end) in self.spans.drain(..) {
            end.wait()?;
            spent[work as usize] += f64::from(end.ms_since(&start)?) / 1e3;
        }
        Ok(spent)
    }
}

impl From<LoadError> for EngineError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Cuda(e) => e.into(),
            LoadError::Weight(e) => e.into(),
        }
    }
}
