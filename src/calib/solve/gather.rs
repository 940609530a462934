//! Second moments of the inputs of matrices, summed while a block is run.

use super::stage::{ExpertWork, Stage};
use super::{SolveError, Task};
use crate::engine::cpu::{Engine, experts};
use crate::engine::{Batch, EngineError, Event};
use crate::ids::{ExpertId, Role, TensorId};
use crate::quant::gptq::Moments;
use rayon::prelude::*;
use std::ops::Range;

/// Inputs that some matrices share.
pub(super) struct Gathered {
    pub ids: Vec<TensorId>,
    pub expert: Option<ExpertId>,
    /// All tokens stand in for those that chose none of these.
    pub pooled: bool,
    pub moments: Moments,
}

impl Gathered {
    /// Empty sums for everything a stage watches: its buffers in order, then its experts, inputs before what down sees.
    pub fn start(stage: &Stage, task: &Task<'_>, open: &dyn Fn(TensorId) -> bool) -> Vec<Self> {
        let cols = |id: TensorId| task.weights.get(id).map_or(0, |w| w.cols);
        let new = |ids: Vec<TensorId>, expert, pooled| {
            let moments = Moments::new(ids.first().map_or(0, |&id| cols(id)), task.feedback);
            Gathered { ids, expert, pooled, moments }
        };
        let mut all: Vec<Self> = stage.watched.iter().map(|(_, _, ids)| new(ids.clone(), None, false)).collect();
        if let Some(work) = &stage.experts {
            for &e in &work.experts {
                let of = |roles: &[Role]| -> Vec<TensorId> {
                    roles.iter().map(|&r| TensorId::expert(work.layer, e, r)).filter(|&id| open(id)).collect()
                };
                if work.inputs {
                    all.push(new(of(&[Role::ExpertGate, Role::ExpertUp]), Some(e), work.pooled));
                }
                if work.inner {
                    all.push(new(of(&[Role::ExpertDown]), Some(e), work.pooled));
                }
            }
        }
        all
    }
}

/// Runs the steps of `block` that the stage allows on a batch whose residual is loaded, and adds what it watches to `found`.
pub(super) fn gather(
    engine: &mut Engine,
    block: &Range<usize>,
    stage: &Stage,
    batch: &Batch,
    found: &mut [Gathered],
) -> Result<(), SolveError> {
    let num_tok = batch.tokens.len();
    let (watched, of_experts) = found.split_at_mut(stage.watched.len());
    let mut routed: (Vec<u32>, Vec<f32>) = Default::default();
    for (i, runs) in stage.runs.iter().enumerate() {
        for ((_, slot, _), gathered) in stage.watched.iter().zip(watched.iter_mut()).filter(|((at, ..), _)| *at == i) {
            debug_assert_eq!(engine.slot(*slot).len() % num_tok, 0);
            gathered.moments.add(engine.slot(*slot));
        }
        if *runs {
            engine.run(block.start + i..block.start + i + 1, batch, &mut |event| {
                let Event::Routed { experts, gates, .. } = event;
                routed = (experts.to_vec(), gates.to_vec());
            })?;
        }
    }
    if let Some(work) = &stage.experts {
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let jobs = of_experts.par_chunks_mut(each).zip(&work.experts);
        jobs.try_for_each(|(sums, &e)| expert(engine, work, e, &routed, num_tok, sums))?;
    }
    Ok(())
}

/// Adds what one expert of a batch sees.
fn expert(
    engine: &Engine,
    work: &ExpertWork,
    expert: ExpertId,
    (experts, gates): &(Vec<u32>, Vec<f32>),
    num_tok: usize,
    sums: &mut [Gathered],
) -> Result<(), EngineError> {
    let top_k = experts.len() / num_tok.max(1);
    let visits: Vec<(usize, f32)> = if work.pooled {
        (0..num_tok).map(|t| (t, 1.0)).collect()
    } else {
        let chosen = experts.iter().zip(gates).enumerate().filter(|(_, (e, _))| **e == expert.0);
        chosen.map(|(i, (_, gate))| (i / top_k, *gate)).collect()
    };
    if visits.is_empty() {
        return Ok(());
    }
    let src = engine.slot(work.src);
    let width = src.len() / num_tok;
    let mut x: Vec<f32> = visits.iter().flat_map(|&(t, _)| src[t * width..(t + 1) * width].iter().copied()).collect();
    let weigh = |x: &mut [f32], width: usize| {
        for (row, (_, gate)) in x.chunks_exact_mut(width).zip(&visits) {
            row.iter_mut().for_each(|v| *v *= gate);
        }
    };
    let last = sums.len() - 1;
    if work.inner {
        let mut inner = experts::inner(engine.weights(), work.layer, expert, &x, work.width)?;
        weigh(&mut inner, work.width);
        sums[last].moments.add(&inner);
    }
    if work.inputs {
        weigh(&mut x, width);
        sums[0].moments.add(&x);
    }
    Ok(())
}
