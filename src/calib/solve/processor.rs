//! Choosing codes on the processor: the reference.

use super::sets::{Set, Sets};
use crate::artifact::weights::Weights;
use crate::calib::hidden::Hidden;
use crate::engine::cpu::{Engine, experts};
use crate::engine::solver::{Chosen, ExpertWork, Inputs, Job, Solver, SolverError, Spent, Work};
use crate::engine::{Batch, EngineError, Event};
use crate::ids::{ExpertId, TensorId};
use crate::model::plan::{Plan, Slot};
use crate::quant::format::OwnedPacked;
use crate::quant::gptq::{Feedback, FeedbackError, Loss, Moments};
use crate::quant::round::Rounding;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// An engine with hidden states of its own, in memory or in a scratch file.
struct Stream {
    engine: Engine,
    hidden: Hidden,
}

/// Second moments of all inputs, and of the sets that a head's rows are divided into.
pub(super) struct Sums {
    all: Moments,
    sets: Sets,
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
        inputs.iter().map(|x| Ok(Sums { all: Moments::new(x.cols, full), sets: sets(x.head)? })).collect()
    }

    fn lift(&mut self, moments: Moments) -> Result<Sums, SolverError> {
        Ok(Sums { all: moments, sets: Sets::default() })
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
            sums.sets.add(&x, source, slot)?;
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
    let Job { sums: Sums { all, sets }, matrices } = job;
    let Some(first) = matrices.first().map(|(id, _)| *id) else { return Ok(Vec::new()) };
    let ready = |moments: &Moments| Feedback::new(moments).map_err(|source| SolverError::Codes { id: first, source });
    let feedback = ready(&all)?;
    let sets: Vec<(&Set, Feedback)> =
        sets.all.iter().map(|set| Ok((set, ready(&set.moments(&all))?))).collect::<Result<_, SolverError>>()?;
    drop(all);
    let mut found = Vec::new();
    for (id, ways) in matrices {
        let Some(weight) = weights.get(id) else { continue };
        let values = weight.to_f32().map_err(|e| SolverError::Weight { id, source: Box::new(e) })?;
        let quantize = |how| {
            if sets.is_empty() { feedback.quantize(&values, how) } else { by_sets(&feedback, &sets, &values, how) }
        };
        let codes = ways.iter().map(quantize).collect::<Result<_, _>>();
        found.push(Chosen { id, codes: codes.map_err(|source| SolverError::Codes { id, source })?, damping: feedback.damping });
    }
    Ok(found)
}

/// Quantizes what would best do the work of `src`, `[R, K]`, by all its inputs, the rows of a set weighed by the set's own moments.
fn by_sets(all: &Feedback, sets: &[(&Set, Feedback)], src: &[f32], how: &Rounding) -> Result<(OwnedPacked, Loss), FeedbackError> {
    let aim = all.aim(src);
    let rows: usize = sets.iter().map(|(set, _)| set.rows.len()).sum();
    let cols = src.len() / rows.max(1);
    let mut out = OwnedPacked::zeroed(rows, cols, how.format(), how.scale_dtype);
    let mut loss = Loss::default();
    for (set, feedback) in sets {
        let own: Vec<f32> = set.rows.iter().flat_map(|&r| aim[r * cols..(r + 1) * cols].iter().copied()).collect();
        let (packed, of_rows) = feedback.quantize(&own, how).map_err(|e| e.of_rows(|row| set.rows[row]))?;
        out.place(&packed, &set.rows);
        loss += of_rows;
    }
    Ok((out, loss))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::format::{Bits, Group, Zero};
    use crate::quant::round;
    use crate::tensor::Dtype;

    /// Rows come back to their places with codes, scales and zero points: where sets know no more than all tokens do, they change nothing,
    /// bit for bit. Fails if a row is put a place off, or the matrix is quantized in place of its aim.
    #[test]
    fn sets_that_know_nothing_change_nothing() {
        let (rows, k, tokens) = (200, 64, 300);
        let value = |i: usize| ((i * 7919 + i * i % 613) % 1009) as f32 / 504.5 - 1.0;
        let head: Vec<f32> = (0..rows * k).map(value).collect();
        let x: Vec<f32> = (0..tokens * k).map(|i| value(i + 5) + value(i / k)).collect();
        let mut all = Moments::new(k, true);
        all.add(&x);
        all.add_drift(&x.iter().map(|v| 1.1 * v).collect::<Vec<f32>>(), &x);
        let feedback = Feedback::new(&all).unwrap();
        let sets = Sets::divide(&head, k);
        assert!(sets.all.len() > 1);
        let sets: Vec<_> = sets.all.iter().map(|set| (set, Feedback::new(&set.moments(&all)).unwrap())).collect();
        for zero in [Zero::Middle, Zero::Point] {
            let (bits, group, scale_dtype) = (Bits::Four, Group::Of(32), Dtype::BF16);
            let how = Rounding { bits, group, zero, method: round::Method::Search, scale_dtype, positive_scales: false };
            let (whole, _) = feedback.quantize(&head, &how).unwrap();
            let (parts, _) = by_sets(&feedback, &sets, &head, &how).unwrap();
            assert_eq!(parts, whole);
        }
    }
}
