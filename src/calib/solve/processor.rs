//! Choosing codes on the processor: the reference.

use crate::artifact::weights::Weights;
use crate::calib::hidden::Hidden;
use crate::engine::cpu::route::softmax;
use crate::engine::cpu::{Engine, experts};
use crate::engine::solver::{Chosen, ExpertWork, Inputs, Job, Solver, SolverError, Spent, Work};
use crate::engine::{Batch, EngineError, Event};
use crate::ids::{ExpertId, TensorId};
use crate::model::plan::{Plan, Slot};
use crate::quant::gptq::{Feedback, Moments};
use crate::quant::sets::Sets;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// An engine with hidden states of its own, in memory or in a scratch file.
struct Stream {
    engine: Engine,
    hidden: Hidden,
}

/// Tokens whose logits are in memory together.
const LOGIT_TOK: usize = 128;

/// Second moments of all inputs, and of the sets that a head's rows are divided into.
pub(super) struct Sums {
    all: Moments,
    sets: Sets,
    of_sets: Vec<Moments>,
}

impl Sums {
    /// Adds inputs `x`, `[T, D]`, to the sets whose tokens are likely by the logits of `source`, which has its own in this slot.
    fn add_to_sets(&mut self, x: &[f32], source: &mut Engine, slot: Slot) -> Result<(), EngineError> {
        let cols = source.weights().spec().width;
        let made_for = source.slot(slot).to_vec();
        let mut weights: Vec<Vec<f32>> = self.sets.all.iter().map(|_| Vec::new()).collect();
        for made_for in made_for.chunks(LOGIT_TOK * cols) {
            let mut logits = source.logits(made_for)?;
            let each = logits.par_chunks_exact_mut(self.sets.of.len()).map(|row| {
                softmax(row);
                self.sets.weigh(row)
            });
            let each: Vec<Vec<f32>> = each.collect();
            each.iter().for_each(|of_token| weights.iter_mut().zip(of_token).for_each(|(w, x)| w.push(*x)));
        }
        for ((set, moments), weights) in self.sets.all.iter_mut().zip(&mut self.of_sets).zip(weights) {
            let weighted = x.chunks_exact(cols).zip(&weights).flat_map(|(row, w)| row.iter().map(|x| x * w.sqrt()));
            moments.add(&weighted.collect::<Vec<f32>>());
            set.count(weights.into_iter());
        }
        Ok(())
    }
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
        sums: &mut [&mut Sums],
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
                sums[last].all.add(&inner);
                if let (Some((source, missing)), Some(made_for)) = (source, &made_for) {
                    let mut made_for = experts::inner(source.weights(), work.layer, expert, made_for, work.width)?;
                    weigh(&mut made_for, work.width);
                    sums[last].all.add_drift(&made_for, &inner);
                    if !work.pooled {
                        // Outputs are added times their gates: if every expert of a token gave what is missing, by their sum.
                        let mut missing = rows(missing);
                        for (row, &(t, gate)) in missing.chunks_exact_mut(width).zip(visits) {
                            let all: f32 = gates[t * top_k..(t + 1) * top_k].iter().sum();
                            row.iter_mut().for_each(|v| *v *= gate / all.max(f32::MIN_POSITIVE));
                        }
                        sums[last].all.add_debt(&missing, &inner);
                    }
                }
            }
            if work.inputs {
                weigh(&mut x, width);
                sums[0].all.add(&x);
                if let Some(made_for) = &mut made_for {
                    weigh(made_for, width);
                    sums[0].all.add_drift(made_for, &x);
                }
            }
        }
        Ok(())
    }
}

impl Solver for Processor {
    type Sums = Sums;

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

    fn empty(&mut self, inputs: &[Inputs], full: bool) -> Result<Vec<Sums>, SolverError> {
        let sets = |head: Option<TensorId>| -> Result<Sets, SolverError> {
            match head.and_then(|id| Some((id, self.weights.get(id)?))) {
                Some((id, head)) if full => {
                    let values = head.to_f32().map_err(|e| SolverError::Weight { id, source: Box::new(e) })?;
                    Ok(Sets::divide(&values, head.cols))
                }
                _ => Ok(Sets::default()),
            }
        };
        let sums = |x: &Inputs| {
            let sets = sets(x.head)?;
            let of_sets = sets.all.iter().map(|_| Moments::new(x.cols, full)).collect();
            Ok(Sums { all: Moments::new(x.cols, full), sets, of_sets })
        };
        inputs.iter().map(sums).collect()
    }

    fn lift(&mut self, moments: Moments) -> Result<Sums, SolverError> {
        Ok(Sums { all: moments, sets: Sets::default(), of_sets: Vec::new() })
    }

    fn tokens(&self, sums: &Sums) -> Result<usize, SolverError> {
        Ok(sums.all.tokens())
    }

    fn add(&mut self, sums: &mut Sums, slot: Slot, pays: bool) -> Result<(), SolverError> {
        let (x, started) = (self.own.engine.slot(slot), Instant::now());
        debug_assert_eq!(x.len() % self.num_tok, 0);
        sums.all.add(x);
        if let Some(source) = &self.source {
            sums.all.add_drift(source.engine.slot(slot), x);
            if pays {
                sums.all.add_debt(&self.missing(source), x);
            }
        }
        if !sums.sets.all.is_empty() {
            let x = x.to_vec();
            let source = self.source.as_mut().map_or(&mut self.own.engine, |s| &mut s.engine);
            sums.add_to_sets(&x, source, slot)?;
        }
        self.spend(Work::Moments, started);
        Ok(())
    }

    fn add_experts(&mut self, work: &ExpertWork, sums: &mut [&mut Sums]) -> Result<(), SolverError> {
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let (jobs, started) = (sums.par_chunks_mut(each).zip(&work.experts), Instant::now());
        let source = self.source.as_ref().map(|s| (&s.engine, self.missing(s)));
        let source = source.as_ref().map(|(engine, missing)| (*engine, &missing[..]));
        jobs.try_for_each(|(sums, &e)| self.add_expert(source, work, e, sums))?;
        self.spend(Work::Moments, started);
        Ok(())
    }

    fn choose(&mut self, weights: &Weights, jobs: Vec<Job<Sums>>) -> Result<Vec<Vec<Chosen>>, SolverError> {
        let started = Instant::now();
        let found = jobs.into_par_iter().map(|job| choose(weights, job)).collect();
        self.spend(Work::Codes, started);
        found
    }

    fn spent(&mut self) -> Result<Spent, SolverError> {
        Ok(std::mem::take(&mut self.spent))
    }
}

fn choose(weights: &Weights, job: Job<Sums>) -> Result<Vec<Chosen>, SolverError> {
    let Job { sums: Sums { all, sets, of_sets }, matrices } = job;
    let Some(first) = matrices.first().map(|(id, _)| *id) else { return Ok(Vec::new()) };
    let ready = |moments: &Moments| Feedback::new(moments).map_err(|source| SolverError::Codes { id: first, source });
    let feedback = ready(&all)?;
    let each = sets.all.iter().zip(&of_sets).map(|(set, own)| ready(&set.moments(own, &all)));
    let each: Vec<Feedback> = each.collect::<Result<_, _>>()?;
    drop((all, of_sets));
    let mut found = Vec::new();
    for (id, ways) in matrices {
        let Some(weight) = weights.get(id) else { continue };
        let values = weight.to_f32().map_err(|e| SolverError::Weight { id, source: Box::new(e) })?;
        let quantize = |how| {
            if each.is_empty() { feedback.quantize(&values, how) } else { sets.quantize(&feedback, &each, &values, how) }
        };
        let codes = ways.iter().map(quantize).collect::<Result<_, _>>();
        found.push(Chosen { id, codes: codes.map_err(|source| SolverError::Codes { id, source })?, damping: feedback.damping });
    }
    Ok(found)
}
