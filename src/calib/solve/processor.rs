//! Choosing codes on the processor: the reference.

use crate::artifact::weights::Weights;
use crate::calib::hidden::Hidden;
use crate::engine::cpu::{Engine, experts};
use crate::engine::solver::{Chosen, ExpertWork, Job, Solver, SolverError, Spent, Work};
use crate::engine::{Batch, Event};
use crate::ids::{ExpertId, TensorId};
use crate::model::plan::{Plan, Slot};
use crate::quant::gptq::{Feedback, Moments};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The reference engine, and the hidden states in memory or in a scratch file.
pub(super) struct Processor {
    engine: Engine,
    hidden: Hidden,
    num_tok: usize,
    /// What the router of the batch has chosen: experts and gates, `[T, K]`.
    routed: (Vec<u32>, Vec<f32>),
    spent: Spent,
}

impl Processor {
    /// With hidden states of so many rows, in memory if that is within `max_memory`.
    pub fn new(weights: &Arc<Weights>, rows: usize, max_memory: u64) -> Result<Self, SolverError> {
        let len = rows * weights.spec().width;
        let hidden = Hidden::new(len, 4 * len as u64 <= max_memory)?;
        Ok(Self {
            engine: Engine::new(Arc::clone(weights)),
            hidden,
            num_tok: 0,
            routed: Default::default(),
            spent: Spent::default(),
        })
    }

    fn spend(&mut self, work: Work, since: Instant) {
        self.spent[work as usize] += since.elapsed().as_secs_f64();
    }

    fn width(&self) -> usize {
        self.engine.weights().spec().width
    }

    /// Adds what one expert of a batch sees.
    fn add_expert(&self, work: &ExpertWork, expert: ExpertId, sums: &mut [&mut Moments]) -> Result<(), SolverError> {
        let (num_tok, (chosen, gates)) = (self.num_tok, &self.routed);
        let top_k = chosen.len() / num_tok.max(1);
        let visits: Vec<(usize, f32)> = if work.pooled {
            (0..num_tok).map(|t| (t, 1.0)).collect()
        } else {
            let own = chosen.iter().zip(gates).enumerate().filter(|(_, (e, _))| **e == expert.0);
            own.map(|(i, (_, gate))| (i / top_k, *gate)).collect()
        };
        let src = self.engine.slot(work.src);
        let width = src.len() / num_tok.max(1);
        let last = sums.len() - 1;
        for visits in visits.chunks(experts::VISITS) {
            let mut x: Vec<f32> = visits.iter().flat_map(|&(t, _)| src[t * width..(t + 1) * width].iter().copied()).collect();
            let weigh = |x: &mut [f32], width: usize| {
                for (row, (_, gate)) in x.chunks_exact_mut(width).zip(visits) {
                    row.iter_mut().for_each(|v| *v *= gate);
                }
            };
            if work.inner {
                let inner = experts::inner(self.engine.weights(), work.layer, expert, &x, work.width);
                let mut inner = inner.map_err(crate::engine::EngineError::from)?;
                weigh(&mut inner, work.width);
                sums[last].add(&inner);
            }
            if work.inputs {
                weigh(&mut x, width);
                sums[0].add(&x);
            }
        }
        Ok(())
    }
}

impl Solver for Processor {
    type Sums = Moments;

    fn plan(&self) -> &Plan {
        self.engine.plan()
    }

    fn attach(&mut self, weights: Arc<Weights>, _ids: &[TensorId]) -> Result<(), SolverError> {
        self.engine = Engine::new(weights);
        Ok(())
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), SolverError> {
        self.num_tok = batch.tokens.len();
        Ok(self.engine.begin(batch)?)
    }

    fn load(&mut self, batch: &Batch, first_row: usize) -> Result<(), SolverError> {
        let width = self.width();
        let rows = first_row * width..(first_row + batch.tokens.len()) * width;
        *self.engine.slot_mut(Slot::Residual) = self.hidden.read(rows)?;
        Ok(())
    }

    fn store(&mut self, first_row: usize) -> Result<(), SolverError> {
        let width = self.width();
        Ok(self.hidden.write(first_row * width, self.engine.slot(Slot::Residual))?)
    }

    fn run(&mut self, steps: Range<usize>, batch: &Batch) -> Result<(), SolverError> {
        let (routed, started) = (&mut self.routed, Instant::now());
        self.engine.run(steps, batch, &mut |event| {
            let Event::Routed { experts, gates, .. } = event;
            *routed = (experts.to_vec(), gates.to_vec());
        })?;
        self.spend(Work::Passes, started);
        Ok(())
    }

    fn end(&mut self, batch: &Batch) {
        batch.segments.iter().for_each(|s| self.engine.release(s.seq));
    }

    fn empty(&mut self, cols: &[usize], full: bool) -> Result<Vec<Moments>, SolverError> {
        Ok(cols.iter().map(|&k| Moments::new(k, full)).collect())
    }

    fn lift(&mut self, moments: Moments) -> Result<Moments, SolverError> {
        Ok(moments)
    }

    fn tokens(&self, sums: &Moments) -> Result<usize, SolverError> {
        Ok(sums.tokens())
    }

    fn add(&mut self, sums: &mut Moments, slot: Slot) -> Result<(), SolverError> {
        debug_assert_eq!(self.engine.slot(slot).len() % self.num_tok, 0);
        let started = Instant::now();
        sums.add(self.engine.slot(slot));
        self.spend(Work::Moments, started);
        Ok(())
    }

    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Moments]) -> Result<(), SolverError> {
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let (jobs, started) = (sums.par_chunks_mut(each).zip(&work.experts), Instant::now());
        jobs.try_for_each(|(sums, &e)| self.add_expert(work, e, sums))?;
        self.spend(Work::Moments, started);
        Ok(())
    }

    fn choose(&mut self, weights: &Weights, jobs: Vec<Job<Moments>>) -> Result<Vec<Vec<Chosen>>, SolverError> {
        let started = Instant::now();
        let found = jobs.into_par_iter().map(|job| choose(weights, job)).collect();
        self.spend(Work::Codes, started);
        found
    }

    fn spent(&mut self) -> Result<Spent, SolverError> {
        Ok(std::mem::take(&mut self.spent))
    }
}

fn choose(weights: &Weights, job: Job<Moments>) -> Result<Vec<Chosen>, SolverError> {
    let Job { sums, matrices } = job;
    let first = matrices.first().map(|(id, _)| *id);
    let feedback = match (Feedback::new(&sums), first) {
        (Ok(feedback), Some(_)) => feedback,
        (Err(source), Some(id)) => return Err(SolverError::Codes { id, source }),
        (_, None) => return Ok(Vec::new()),
    };
    drop(sums);
    let mut found = Vec::new();
    for (id, ways) in matrices {
        let Some(weight) = weights.get(id) else { continue };
        let values = weight.to_f32().map_err(|e| SolverError::Weight { id, source: Box::new(e) })?;
        let codes = ways.iter().map(|how| feedback.quantize(&values, how)).collect::<Result<_, _>>();
        found.push(Chosen { id, codes: codes.map_err(|source| SolverError::Codes { id, source })?, damping: feedback.damping });
    }
    Ok(found)
}
