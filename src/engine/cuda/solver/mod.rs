//! Choosing codes on a GPU: passes in single precision, second moments and error feedback, all experts of a layer in one launch.
//!
//! Hidden states stay on the device. Weights come to it part by part, those that are still to be chosen only to be quantized.

mod codes;
mod heads;
mod kernels;

use super::device::{CudaError, Device};
use super::memory::{Buffer, Event, aligned};
use super::module::{Module, program};
use super::tiled::{Pairs, Tiled};
use super::tiles::{self, Side, Tiles};
use super::{Engine, LoadError, Workspace, launch};
use crate::artifact::weights::Weights;
use crate::engine::solver::{Chosen, ExpertWork, Inputs, Job, Solver as Place, SolverError, Spent, Work};
use crate::engine::{Batch, EngineError};
use crate::ids::TensorId;
use crate::model::plan::{self, Plan, Slot};
use crate::model::spec::Ffn;
use crate::quant::gptq::Moments;
use cudarc::driver::result;
use heads::Head;
use kernels::Kernels;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of a pass: enough that every expert has a full tile of them.
pub const PASS_TOK: usize = 8192;
/// What is left to the driver of memory that is all to be used.
const SPARE_BYTES: u64 = 1 << 30;

/// Second moments on the device: the lower triangle of `[K, K]`, or the diagonal alone. Where the source runs beside, behind them what
/// inputs lack `[K, K]` and what outputs lack `[R, K]`, as in [`Moments`].
pub struct Sums {
    memory: Arc<Buffer>,
    at_bytes: usize,
    cols: usize,
    full: bool,
    /// Where the two begin; 0: there are none.
    drift: u64,
    debt: u64,
    /// Tokens that the host knows of, and where the device counts those of an expert.
    tokens: usize,
    counted: Option<(Arc<Buffer>, usize)>,
    totals: Arc<Buffer>,
    /// Of a head whose rows are told apart.
    head: Option<Box<Head>>,
}

impl Sums {
    fn at(&self) -> u64 {
        self.memory.at(self.at_bytes)
    }
}

/// An engine and its hidden states.
struct Stream {
    engine: Engine,
    hidden: Buffer,
}

impl Stream {
    fn new(device: &Arc<Device>, weights: &Arc<Weights>, rows: usize, [tok, seqs]: [usize; 2]) -> Result<Self, CudaError> {
        let hidden = Buffer::new(device, 4 * rows * weights.spec().width)?;
        Ok(Self { engine: Engine::in_parts(device, Arc::clone(weights), tok, seqs)?, hidden })
    }
}

/// The source beside, and how it differs.
struct Beside {
    stream: Stream,
    /// Differences of a buffer `[T, widest]` and of the residual streams `[T, D]`.
    drift: Buffer,
    missing: Buffer,
    /// Gates over the sums of their tokens' gates, `[T, K]`.
    shares: Buffer,
}

/// The GPU as a place to choose codes.
pub struct Solver {
    device: Arc<Device>,
    own: Stream,
    source: Option<Beside>,
    weights: Arc<Weights>,
    tiles: Tiles,
    kernels: Kernels,
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
    /// Prepares the first GPU for hidden states of `rows` rows, in passes of up to so many tokens of so many sequences; `beside`: the source
    /// has its own.
    pub fn open(
        weights: &Arc<Weights>,
        rows: usize,
        beside: bool,
        most: [usize; 2],
        budget_bytes: Option<u64>,
    ) -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let free = device.memory()?.0;
        let budget_bytes = budget_bytes.unwrap_or(free.saturating_sub(SPARE_BYTES)).min(free);
        let (spec, plan, tok) = (weights.spec(), plan::plan(weights.spec()), most[0]);
        let stream = 4 * (rows * spec.width) as u64 + Workspace::planned_bytes(&plan, spec, tok, 1) + Tiled::bytes(spec, tok);
        let (widest, top_k) = (Workspace::widest(&plan), Tiled::top_k(spec));
        let differences = 4 * (tok * (widest + spec.width + top_k)) as u64;
        let needed = if beside { 2 * stream + differences } else { stream };
        if needed > budget_bytes {
            return Err(CudaError::Budget { smallest_bytes: 2 * needed, budget_bytes });
        }
        let new = || Stream::new(&device, weights, rows, most);
        let floats = |width: usize| Buffer::new(&device, 4 * tok * width);
        let source = || {
            let (drift, missing, shares) = (floats(widest)?, floats(spec.width)?, floats(top_k)?);
            Ok::<_, CudaError>(Beside { stream: new()?, drift, missing, shares })
        };
        Ok(Self {
            own: new()?,
            source: beside.then(source).transpose()?,
            weights: Arc::clone(weights),
            tiles: Tiles::load(&Module::load(&device, program("tiles.cu"))?)?,
            kernels: Kernels::load(&Module::load(&device, program("solve.cu"))?)?,
            scratch: Buffer::new(&device, 12 * Tiled::experts(spec).max(1))?,
            budget_bytes: budget_bytes - needed,
            num_tok: 0,
            spans: Vec::new(),
            device,
        })
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
        4 * self.weights.spec().width
    }

    fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        std::iter::once(&mut self.own).chain(self.source.as_mut().map(|s| &mut s.stream))
    }

    /// Copies between hidden states and the residual stream, in the order of the kernels.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        use super::device::During;
        self.device.current()?;
        // SAFETY: the callers' ranges lie within buffers that they hold.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.device.stream()) }.during("copy on the device")
    }

    /// Puts addresses of sums, and of which experts they are, where kernels find them.
    fn tell(&self, addresses: &[u64], over: &Over) -> Result<[u64; 2], CudaError> {
        // Uploads follow the kernels before them, so that one place serves all calls.
        self.device.upload(&self.scratch, 0, addresses)?;
        let experts_at = 8 * addresses.len();
        self.device.upload(&self.scratch, experts_at, &over.experts)?;
        Ok([self.scratch.at(0), if over.experts.is_empty() { 0 } else { self.scratch.at(experts_at) }])
    }

    /// Adds second moments of `x`.
    fn add_moments(&self, sums: &[&mut Sums], x: Side, over: &Over) -> Result<(), CudaError> {
        let Some(full) = sums.first().map(|s| s.full) else { return Ok(()) };
        let [of, experts] = self.tell(&sums.iter().map(|s| s.at()).collect::<Vec<_>>(), over)?;
        let (n, cols, cap, (lists, counts)) = (sums.len(), x.cols as usize, self.num_tok as i32, (over.lists, over.counts));
        match full {
            true => self.tiles.tiles_moments(tiles::triangle(cols, n), of, x, lists, counts, cap, experts),
            false => self.tiles.tiles_energies(tiles::each_column(cols, n), of, x, lists, counts, cap, experts),
        }
    }

    /// Adds products of what lacks and of the inputs to sums at `at`.
    fn add_products(&self, at: &[u64], lack: Side, x: Side, over: &Over) -> Result<(), CudaError> {
        if at.is_empty() {
            return Ok(());
        }
        let [of, experts] = self.tell(at, over)?;
        let grid = tiles::tiles(x.cols as usize, lack.cols as usize, at.len());
        self.tiles.tiles_products(grid, of, lack, x, over.lists, over.counts, self.num_tok as i32, experts)
    }

    /// `dst = (a - b) * factor`, `n` floats.
    fn less(&self, dst: u64, a: u64, b: u64, factor: f32, n: usize) -> Result<(), CudaError> {
        self.tiles.tiles_less(launch::elements(n), dst, a, b, factor, n as u64)
    }

    /// Sums of nothing, `beside`: with room for what inputs and outputs lack.
    fn zeroed(&self, inputs: &[Inputs], full: bool, beside: bool) -> Result<Vec<Sums>, CudaError> {
        let own = |x: &Inputs| aligned(Moments::bytes(x.cols, full) as usize);
        let owed = |x: &Inputs| if beside { aligned(Moments::owed_bytes(x.cols, x.pays) as usize) } else { 0 };
        let memory = Arc::new(Buffer::new(&self.device, inputs.iter().map(|x| own(x) + owed(x)).sum())?);
        let totals = Arc::new(Buffer::new(&self.device, 4 * Tiled::experts(self.weights.spec()))?);
        memory.clear()?;
        totals.clear()?;
        let mut next = 0;
        let sums = inputs.iter().map(|x| {
            let (at_bytes, drift) = (next, memory.at(next + own(x)));
            next += own(x) + owed(x);
            Sums {
                memory: Arc::clone(&memory),
                at_bytes,
                cols: x.cols,
                full,
                drift: if beside { drift } else { 0 },
                debt: if beside && x.pays > 0 { drift + Moments::owed_bytes(x.cols, 0) } else { 0 },
                tokens: 0,
                counted: None,
                totals: Arc::clone(&totals),
                head: None,
            }
        });
        Ok(sums.collect())
    }

    /// Rows of a buffer.
    fn side(&self, slot: Slot, cols: usize) -> Side {
        let engine = &self.own.engine;
        Side { src: engine.at(slot), gates: 0, stride: engine.row(slot), divide: 1, cols: cols as i32, pad: 0 }
    }

    /// What the residual stream lacks to be the source's, in units of what blocks add to it.
    fn missing(&self, beside: &Beside) -> Result<Side, CudaError> {
        let spec = self.weights.spec();
        let [source, own] = [&beside.stream, &self.own].map(|s| s.engine.at(Slot::Residual));
        self.less(beside.missing.at(0), source, own, 1.0 / spec.residual_scale, self.num_tok * spec.width)?;
        let width = spec.width as i32;
        Ok(Side { src: beside.missing.at(0), stride: width, divide: 1, cols: width, ..Side::default() })
    }

    /// By how much a buffer differs from the source's, laid out alike.
    fn drift(&self, beside: &Beside, slot: Slot, x: Side) -> Result<Side, CudaError> {
        let (source, own) = (beside.stream.engine.at(slot), self.own.engine.at(slot));
        self.less(beside.drift.at(0), source, own, 1.0, self.num_tok * x.stride as usize)?;
        Ok(Side { src: beside.drift.at(0), ..x })
    }

    /// Adds what experts see of inputs that are in a buffer.
    fn add_inputs(&self, sums: &mut [&mut Sums], slot: Slot, x: Side, over: &Over) -> Result<(), CudaError> {
        self.add_moments(sums, x, over)?;
        let Some(beside) = self.source.as_ref().filter(|_| !sums.is_empty()) else { return Ok(()) };
        let drift: Vec<u64> = sums.iter().map(|s| s.drift).collect();
        self.add_products(&drift, self.drift(beside, slot, x)?, x, over)
    }

    /// Adds what their down projections see, of these pairs; `gates` and `shares` by pair.
    fn add_inner(
        &mut self,
        sums: &mut [&mut Sums],
        work: &ExpertWork,
        pairs: &Pairs,
        gates: u64,
        over: &Over,
    ) -> Result<(), CudaError> {
        self.timed(Work::Passes, |s| {
            let mut each = std::iter::once(&s.own).chain(s.source.as_ref().map(|b| &b.stream));
            each.try_for_each(|stream| stream.engine.expert_inner(work.src, work.layer, work.width, pairs))
        })?;
        self.timed(Work::Moments, |s| {
            let width = work.width as i32;
            let x = Side { src: s.own.engine.work.inner.at(0), gates, stride: width, divide: 1, cols: width, pad: 0 };
            s.add_moments(sums, x, over)?;
            let Some(beside) = &s.source else { return Ok(()) };
            // The source's own are not needed past their difference.
            let lack = Side { src: beside.stream.engine.work.inner.at(0), ..x };
            s.less(lack.src, lack.src, x.src, 1.0, pairs.tok * pairs.divide * work.width)?;
            s.add_products(&sums.iter().map(|s| s.drift).collect::<Vec<_>>(), lack, x, over)?;
            let debt: Vec<u64> = sums.iter().map(|s| s.debt).filter(|&at| at != 0).collect();
            if debt.is_empty() {
                return Ok(());
            }
            // Outputs are added times their gates: if every expert of a token gave what is missing, by their sum.
            let (n, shares) = (pairs.tok * pairs.divide, beside.shares.at(0));
            s.tiles.tiles_shares(launch::elements(n), shares, gates, pairs.divide as i32, n as u64)?;
            let missing = Side { gates: shares, divide: pairs.divide as i32, ..s.missing(beside)? };
            s.add_products(&debt, missing, x, over)
        })
    }
}

/// Pairs to sum over.
struct Over {
    lists: u64,
    counts: u64,
    /// Whose, for each of the sums.
    experts: Vec<u32>,
}

impl Over {
    /// All rows, for every sum.
    const ALL: Self = Self { lists: 0, counts: 0, experts: Vec::new() };
}

impl Place for Solver {
    type Sums = Sums;

    fn plan(&self) -> &Plan {
        self.own.engine.plan()
    }

    fn attach(&mut self, weights: Arc<Weights>, ids: &[TensorId]) -> Result<(), SolverError> {
        self.timed(Work::Weights, |s| Ok(s.own.engine.attach(weights, ids)?))
    }

    fn attach_source(&mut self, ids: &[TensorId]) -> Result<(), SolverError> {
        self.timed(Work::Weights, |s| {
            let weights = Arc::clone(&s.weights);
            s.source.as_mut().map_or(Ok(()), |b| Ok(b.stream.engine.attach(weights, ids)?))
        })
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), SolverError> {
        self.num_tok = batch.tokens.len();
        Ok(self.streams().try_for_each(|s| s.engine.begin(batch))?)
    }

    fn load(&mut self, batch: &Batch, first_row: usize) -> Result<(), SolverError> {
        let (bytes, at, width) = (batch.tokens.len() * self.row_bytes(), first_row * self.row_bytes(), self.weights.spec().width);
        let places = self.streams().map(|s| {
            s.engine.work.row[Slot::Residual as usize] = width;
            (s.engine.at(Slot::Residual), s.hidden.at(at))
        });
        let places: Vec<_> = places.collect();
        Ok(places.into_iter().try_for_each(|(to, from)| self.copy(to, from, bytes))?)
    }

    fn store(&mut self, first_row: usize) -> Result<(), SolverError> {
        let (bytes, at) = (self.num_tok * self.row_bytes(), first_row * self.row_bytes());
        let places: Vec<_> = self.streams().map(|s| (s.hidden.at(at), s.engine.at(Slot::Residual))).collect();
        Ok(places.into_iter().try_for_each(|(to, from)| self.copy(to, from, bytes))?)
    }

    fn run(&mut self, steps: Range<usize>, _batch: &Batch) -> Result<(), SolverError> {
        self.timed(Work::Passes, |s| Ok(s.streams().try_for_each(|stream| stream.engine.run(steps.clone(), None))?))
    }

    fn end(&mut self, batch: &Batch) {
        self.streams().for_each(|stream| batch.segments.iter().for_each(|s| stream.engine.release(s.seq)));
    }

    fn empty(&mut self, inputs: &[Inputs], full: bool) -> Result<Vec<Sums>, SolverError> {
        let mut sums = self.zeroed(inputs, full, self.source.is_some() && full)?;
        for (sums, inputs) in sums.iter_mut().zip(inputs).filter(|_| full) {
            sums.head = inputs.head.map(|id| self.divide(id)).transpose()?.flatten().map(Box::new);
        }
        Ok(sums)
    }

    fn lift(&mut self, moments: Moments) -> Result<Sums, SolverError> {
        let sums = self.empty(&[Inputs { cols: moments.cols(), pays: 0, head: None }], moments.is_full())?.remove(0);
        self.device.upload(&sums.memory, sums.at_bytes, moments.sums())?;
        Ok(Sums { tokens: moments.tokens(), drift: 0, ..sums })
    }

    fn tokens(&self, sums: &Sums) -> Result<usize, SolverError> {
        let Some((totals, expert)) = &sums.counted else { return Ok(sums.tokens) };
        let mut count = [0u32];
        self.device.download(&mut count, totals, 4 * expert)?;
        Ok(sums.tokens + count[0] as usize)
    }

    fn add(&mut self, sums: &mut Sums, slot: Slot, pays: bool) -> Result<(), SolverError> {
        sums.tokens += self.num_tok;
        debug_assert!(!pays || self.source.is_none() || sums.debt != 0);
        let x = self.side(slot, sums.cols);
        self.timed(Work::Moments, |s| {
            let debt = sums.debt;
            if let Some(head) = &mut sums.head {
                s.add_to_sets(head, slot, x)?;
            }
            s.add_inputs(&mut [sums], slot, x, &Over::ALL)?;
            match s.source.as_ref().filter(|_| debt != 0) {
                Some(beside) => Ok(s.add_products(&[debt], s.missing(beside)?, x, &Over::ALL)?),
                None => Ok(()),
            }
        })
    }

    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Sums]) -> Result<(), SolverError> {
        let Ffn::Moe(moe) = &self.weights.spec().layers[work.layer.0 as usize].ffn else { return Ok(()) };
        let (top_k, num_experts, tok) = (moe.router.top_k, moe.router.experts, self.num_tok);
        let (Some(first), Some(tiled)) = (sums.first(), &self.own.engine.tiled) else { return Ok(()) };
        let (totals, x) = (Arc::clone(&first.totals), self.side(work.src, self.weights.spec().width));
        let pairs = tiled.pairs(tok, top_k);
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
        if !work.pooled {
            let gates = self.own.engine.work.gates.at(0);
            let over = Over { lists: pairs.lists, counts: pairs.counts, experts };
            self.timed(Work::Moments, |s| {
                s.own.engine.list_pairs(work.layer, tok, totals.at(0))?;
                s.add_inputs(&mut inputs, work.src, Side { gates, divide: top_k as i32, ..x }, &over)
            })?;
            if work.inner {
                self.add_inner(&mut inner, work, &pairs, gates, &over)?;
            }
            return Ok(());
        }
        for sums in inputs {
            self.timed(Work::Moments, |s| s.add_inputs(&mut [sums], work.src, x, &Over::ALL))?;
        }
        // Every token visits one expert after the other.
        let all: Vec<u32> = (0..tok as u32).collect();
        for (sums, &expert) in inner.into_iter().zip(&experts) {
            let mut counts = vec![0u32; num_experts];
            counts[expert as usize] = tok as u32;
            if let Some(tiled) = &self.own.engine.tiled {
                self.device.upload(&tiled.counts, 0, &counts)?;
                self.device.upload(&tiled.lists, 4 * tok * expert as usize, &all)?;
            }
            self.add_inner(&mut [sums], work, &Pairs { divide: 1, ..pairs }, 0, &Over::ALL)?;
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
