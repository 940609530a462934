//! Choosing codes on the processor: the reference.

use crate::artifact::weights::Weights;
use crate::calib::hidden::Hidden;
use crate::engine::cpu::{Engine, experts};
use crate::engine::solver::{Chosen, ExpertWork, Inputs, Job, Solver, SolverError, Spent, Work};
use crate::engine::{Batch, EngineError, Event};
use crate::ids::{ExpertId, TensorId};
use crate::model::plan::{Plan, Slot};
use crate::quant::gptq::{Feedback, Moments};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// An engine with hidden states of its own, in memory or in a scratch file.
struct Stream {
    engine: Engine,
    hidden: Hidden,
}

/// The reference engine, and the source beside it where matrices make up for what was chosen before them.
pub(super) struct Processor {
    own: Stream,
    source: Option<Stream>,
    weights: Arc<Weights>,
    num_tok: usize,
    /// What the router of the batch has chosen: experts and gates, `[T, K]`.
    routed: (Vec<u32>, Vec<f32>),
    spent: Spent,
}

impl Processor {
    /// With hidden states of so many rows, in memory if that is within `max_memory`; `beside`: the source has its own.
    pub fn new(weights: &Arc<Weights>, rows: usize, beside: bool, max_memory: u64) -> Result<Self, SolverError> {
        let len = rows * weights.spec().width;
        let in_memory = (4 * len * if beside { 2 } else { 1 }) as u64 <= max_memory;
        let stream =
            || Ok::<_, SolverError>(Stream { engine: Engine::new(Arc::clone(weights)), hidden: Hidden::new(len, in_memory)? });
        Ok(Self {
            own: stream()?,
            source: beside.then(stream).transpose()?,
            weights: Arc::clone(weights),
            num_tok: 0,
            routed: Default::default(),
            spent: Spent::default(),
        })
    }

    fn spend(&mut self, work: Work, since: Instant) {
        self.spent[work as usize] += since.elapsed().as_secs_f64();
    }

    fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        std::iter::once(&mut self.own).chain(&mut self.source)
    }

    fn width(&self) -> usize {
        self.weights.spec().width
    }

    /// What the residual stream lacks to be the source's, `[T, D]`, in units of what blocks add to it.
    fn missing(&self, source: &Stream) -> Vec<f32> {
        let scale = self.weights.spec().residual_scale;
        let [source, own] = [source, &self.own].map(|s| s.engine.slot(Slot::Residual));
        source.iter().zip(own).map(|(s, x)| (s - x) / scale).collect()
    }

    /// Adds what one expert of a batch sees.
    fn add_expert(
        &self,
        source: Option<(&Engine, &[f32])>,
        work: &ExpertWork,
        expert: ExpertId,
        sums: &mut [&mut Moments],
    ) -> Result<(), EngineError> {
        let (num_tok, (chosen, gates)) = (self.num_tok, &self.routed);
        let top_k = chosen.len() / num_tok.max(1);
        let visits: Vec<(usize, f32)> = if work.pooled {
            (0..num_tok).map(|t| (t, 1.0)).collect()
        } else {
            let own = chosen.iter().zip(gates).enumerate().filter(|(_, (e, _))| **e == expert.0);
            own.map(|(i, (_, gate))| (i / top_k, *gate)).collect()
        };
        let engine = &self.own.engine;
        let src = engine.slot(work.src);
        let width = src.len() / num_tok.max(1);
        let last = sums.len() - 1;
        for visits in visits.chunks(experts::VISITS) {
            let rows = |src: &[f32]| -> Vec<f32> {
                visits.iter().flat_map(|&(t, _)| src[t * width..(t + 1) * width].iter().copied()).collect()
            };
            let mut x = rows(src);
            let mut made_for = source.map(|(s, _)| rows(s.slot(work.src)));
            let weigh = |x: &mut [f32], width: usize| {
                for (row, (_, gate)) in x.chunks_exact_mut(width).zip(visits) {
                    row.iter_mut().for_each(|v| *v *= gate);
                }
            };
            if work.inner {
                let mut inner = experts::inner(engine.weights(), work.layer, expert, &x, work.width)?;
                weigh(&mut inner, work.width);
                sums[last].add(&inner);
                if let (Some((source, missing)), Some(made_for)) = (source, &made_for) {
                    let mut made_for = experts::inner(source.weights(), work.layer, expert, made_for, work.width)?;
                    weigh(&mut made_for, work.width);
                    sums[last].add_drift(&made_for, &inner);
                    if !work.pooled {
                        // Outputs are added times their gates: if every expert of a token gave what is missing, by their sum.
                        let mut missing = rows(missing);
                        for (row, &(t, gate)) in missing.chunks_exact_mut(width).zip(visits) {
                            let all: f32 = gates[t * top_k..(t + 1) * top_k].iter().sum();
                            row.iter_mut().for_each(|v| *v *= gate / all.max(f32::MIN_POSITIVE));
                        }
                        sums[last].add_debt(&missing, &inner);
                    }
                }
            }
            if work.inputs {
                weigh(&mut x, width);
                sums[0].add(&x);
                if let Some(made_for) = &mut made_for {
                    weigh(made_for, width);
                    sums[0].add_drift(made_for, &x);
                }
            }
        }
        Ok(())
    }
}

impl Solver for Processor {
    type Sums = Moments;

    fn plan(&self) -> &Plan {
        self.own.engine.plan()
    }

    fn attach(&mut self, weights: Arc<Weights>, _ids: &[TensorId]) -> Result<(), SolverError> {
        self.own.engine = Engine::new(weights);
        Ok(())
    }

    fn attach_source(&mut self, _ids: &[TensorId]) -> Result<(), SolverError> {
        if let Some(source) = &mut self.source {
            source.engine = Engine::new(Arc::clone(&self.weights));
        }
        Ok(())
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), SolverError> {
        self.num_tok = batch.tokens.len();
        Ok(self.streams().try_for_each(|s| s.engine.begin(batch))?)
    }

    fn load(&mut self, batch: &Batch, first_row: usize) -> Result<(), SolverError> {
        let width = self.width();
        let rows = first_row * width..(first_row + batch.tokens.len()) * width;
        self.streams().try_for_each(|s| {
            *s.engine.slot_mut(Slot::Residual) = s.hidden.read(rows.clone())?;
            Ok(())
        })
    }

    fn store(&mut self, first_row: usize) -> Result<(), SolverError> {
        let width = self.width();
        Ok(self.streams().try_for_each(|s| s.hidden.write(first_row * width, s.engine.slot(Slot::Residual)))?)
    }

    fn run(&mut self, steps: Range<usize>, batch: &Batch) -> Result<(), SolverError> {
        let (routed, started) = (&mut self.routed, Instant::now());
        self.own.engine.run(steps.clone(), batch, &mut |event| {
            let Event::Routed { experts, gates, .. } = event;
            *routed = (experts.to_vec(), gates.to_vec());
        })?;
        if let Some(source) = &mut self.source {
            source.engine.run(steps, batch, &mut |_| ())?;
        }
        self.spend(Work::Passes, started);
        Ok(())
    }

    fn end(&mut self, batch: &Batch) {
        self.streams().for_each(|stream| batch.segments.iter().for_each(|s| stream.engine.release(s.seq)));
    }

    fn empty(&mut self, inputs: &[Inputs], full: bool) -> Result<Vec<Moments>, SolverError> {
        Ok(inputs.iter().map(|x| Moments::new(x.cols, full)).collect())
    }

    fn lift(&mut self, moments: Moments) -> Result<Moments, SolverError> {
        Ok(moments)
    }

    fn tokens(&self, sums: &Moments) -> Result<usize, SolverError> {
        Ok(sums.tokens())
    }

    fn add(&mut self, sums: &mut Moments, slot: Slot, pays: bool) -> Result<(), SolverError> {
        let (x, started) = (self.own.engine.slot(slot), Instant::now());
        debug_assert_eq!(x.len() % self.num_tok, 0);
        sums.add(x);
        if let Some(source) = &self.source {
            sums.add_drift(source.engine.slot(slot), x);
            if pays {
                sums.add_debt(&self.missing(source), x);
            }
        }
        self.spend(Work::Moments, started);
        Ok(())
    }

    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Moments]) -> Result<(), SolverError> {
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let (jobs, started) = (sums.par_chunks_mut(each).zip(&work.experts), Instant::now());
        let source = self.source.as_ref().map(|s| (&s.engine, self.missing(s)));
        let source = source.as_ref().map(|(engine, missing)| (*engine, &missing[..]));
        jobs.try_for_each(|(sums, &e)| self.add_expert(source, work, e, sums))?;
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
