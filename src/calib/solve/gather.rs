//! Second moments of the inputs of matrices, summed while a block is run.

use super::sets::Sets;
use super::stage::{ExpertWork, Stage, blocks};
use super::{SolveError, Task};
use crate::artifact::error::ArtifactError;
use crate::engine::cpu::{Engine, experts};
use crate::engine::{Batch, EngineError, Event};
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use crate::model::plan::{Plan, Slot, Step};
use crate::model::spec::{Ffn, ModelSpec};
use crate::quant::gptq::Moments;
use rayon::prelude::*;
use std::ops::Range;

/// What second moments are summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Tokens that these matrices see.
    Tokens,
    /// All tokens, since none chose these.
    AllTokens,
    /// Rows of the matrices that read what these write.
    Readers,
}

/// Inputs that some matrices share.
pub(super) struct Gathered {
    pub ids: Vec<TensorId>,
    pub expert: Option<ExpertId>,
    pub over: Over,
    pub moments: Moments,
    /// Rows that have moments of their own: a head's.
    pub sets: Sets,
}

impl Gathered {
    /// Empty sums for everything a stage watches: its buffers in order, then its experts, inputs before what down sees.
    pub fn start(stage: &Stage, task: &Task<'_>, open: &dyn Fn(TensorId) -> bool) -> Result<Vec<Self>, SolveError> {
        let cols = |id: TensorId| task.weights.get(id).map_or(0, |w| w.cols);
        let new = |ids: Vec<TensorId>, expert, over| {
            let moments = Moments::new(ids.first().map_or(0, |&id| cols(id)), task.feedback);
            Gathered { ids, expert, over, moments, sets: Sets::default() }
        };
        let mut all: Vec<Self> = stage.watched.iter().map(|(_, _, ids)| new(ids.clone(), None, Over::Tokens)).collect();
        for of_head in
            all.iter_mut().filter(|g| task.feedback && g.ids.iter().any(|id| matches!(id.role, Role::Head | Role::Embed)))
        {
            of_head.sets = Sets::divide(&values(task, of_head.ids[0])?, cols(of_head.ids[0]));
        }
        if let Some(work) = &stage.experts {
            let over = if work.pooled { Over::AllTokens } else { Over::Tokens };
            for &e in &work.experts {
                let of = |roles: &[Role]| -> Vec<TensorId> {
                    roles.iter().map(|&r| TensorId::expert(work.layer, e, r)).filter(|&id| open(id)).collect()
                };
                if work.inputs {
                    all.push(new(of(&[Role::ExpertGate, Role::ExpertUp]), Some(e), over));
                }
                if work.inner {
                    all.push(new(of(&[Role::ExpertDown]), Some(e), over));
                }
            }
        }
        Ok(all)
    }
}

fn values(task: &Task<'_>, id: TensorId) -> Result<Vec<f32>, SolveError> {
    let weight = task.weights.get(id).ok_or_else(|| ArtifactError::Vanished { tensor: id.to_string() })?;
    Ok(weight.to_f32().map_err(|e| ArtifactError::Decode { tensor: id.to_string(), source: Box::new(e) })?)
}

/// What an error of the embedding does to the products of the first layer, each block of it counting alike: second moments of the
/// rows of the matrices that read the residual stream, each times the gain of the norm before it. Later layers read it through what
/// these have made of it.
pub(super) fn readers(task: &Task<'_>, plan: &Plan) -> Result<Moments, SolveError> {
    let spec = task.weights.spec();
    let mut all = Moments::new(spec.width, task.feedback);
    let steps = plan.layers.first().map_or(&[][..], |layer| &plan.steps[layer.clone()]);
    for block in blocks(steps) {
        let mut found = Moments::new(spec.width, task.feedback);
        let mut normed: Option<(Slot, Vec<f32>)> = None;
        for step in &steps[block] {
            if let Step::Norm { dst, src: Slot::Residual, w, .. } = *step {
                normed = Some((dst, values(task, w)?));
            }
            let Some((slot, gain)) = &normed else { continue };
            let ids: Vec<TensorId> = match *step {
                Step::Experts { src, layer, .. } if src == *slot => {
                    let roles = [Role::ExpertGate, Role::ExpertUp];
                    let experts = (0..num_experts(spec, layer)).map(|e| ExpertId(e as u32));
                    experts.flat_map(|e| roles.map(|role| TensorId::expert(layer, e, role))).collect()
                }
                _ => step.product().filter(|(_, src)| src == slot).map(|(w, _)| w).into_iter().collect(),
            };
            for id in ids {
                let mut rows = values(task, id)?;
                rows.chunks_exact_mut(spec.width).for_each(|row| row.iter_mut().zip(gain).for_each(|(x, g)| *x *= g));
                found.add(&rows);
            }
        }
        all.add_normalised(&found);
    }
    Ok(all)
}

fn num_experts(spec: &ModelSpec, layer: LayerId) -> usize {
    match spec.layers.get(layer.0 as usize).map(|l| &l.ffn) {
        Some(Ffn::Moe(m)) => m.router.experts,
        Some(Ffn::Dense { .. }) | None => 0,
    }
}

/// Runs the steps of `block` that the stage allows on a batch whose residual is loaded, and adds what it watches to `found`; `source`
/// runs them on its own residual, and tells what the inputs should have been.
pub(super) fn gather(
    engine: &mut Engine,
    mut source: Option<&mut Engine>,
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
            if let Some(source) = &source {
                gathered.moments.add_drift(source.slot(*slot), engine.slot(*slot));
                // What goes to the residual stream can pay what is missing there.
                if let Step::Linear { dst: Slot::Block, .. } = engine.plan().steps[block.start + i] {
                    gathered.moments.add_debt(&missing(engine, source), engine.slot(*slot));
                }
            }
            if !gathered.sets.all.is_empty() {
                let x = engine.slot(*slot).to_vec();
                gathered.sets.add(&x, source.as_deref_mut().unwrap_or(engine), *slot)?;
            }
        }
        if *runs {
            engine.run(block.start + i..block.start + i + 1, batch, &mut |event| {
                let Event::Routed { experts, gates, .. } = event;
                routed = (experts.to_vec(), gates.to_vec());
            })?;
            if let Some(source) = &mut source {
                source.run(block.start + i..block.start + i + 1, batch, &mut |_| ())?;
            }
        }
    }
    if let Some(work) = &stage.experts {
        let each = usize::from(work.inputs) + usize::from(work.inner);
        let jobs = of_experts.par_chunks_mut(each).zip(&work.experts);
        let source = source.as_deref().map(|s| (s, missing(engine, s)));
        let source = source.as_ref().map(|(s, m)| (*s, &m[..]));
        jobs.try_for_each(|(sums, &e)| expert(engine, source, work, e, &routed, num_tok, sums))?;
    }
    Ok(())
}

/// What the residual stream lacks to be the source's, `[T, D]`, in units of what blocks add to it.
fn missing(engine: &Engine, source: &Engine) -> Vec<f32> {
    let scale = engine.weights().spec().residual_scale;
    source.slot(Slot::Residual).iter().zip(engine.slot(Slot::Residual)).map(|(s, x)| (s - x) / scale).collect()
}

/// Adds what one expert of a batch sees.
fn expert(
    engine: &Engine,
    source: Option<(&Engine, &[f32])>,
    work: &ExpertWork,
    expert: ExpertId,
    (chosen, gates): &(Vec<u32>, Vec<f32>),
    num_tok: usize,
    sums: &mut [Gathered],
) -> Result<(), EngineError> {
    let top_k = chosen.len() / num_tok.max(1);
    let visits: Vec<(usize, f32)> = if work.pooled {
        (0..num_tok).map(|t| (t, 1.0)).collect()
    } else {
        let own = chosen.iter().zip(gates).enumerate().filter(|(_, (e, _))| **e == expert.0);
        own.map(|(i, (_, gate))| (i / top_k, *gate)).collect()
    };
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
            sums[last].moments.add(&inner);
            if let (Some((source, missing)), Some(made_for)) = (source, &made_for) {
                let mut made_for = experts::inner(source.weights(), work.layer, expert, made_for, work.width)?;
                weigh(&mut made_for, work.width);
                sums[last].moments.add_drift(&made_for, &inner);
                if !work.pooled {
                    // Outputs are added times their gates: if every expert of a token gave what is missing, by their sum.
                    let mut missing = rows(missing);
                    for (row, &(t, gate)) in missing.chunks_exact_mut(width).zip(visits) {
                        let all: f32 = gates[t * top_k..(t + 1) * top_k].iter().sum();
                        row.iter_mut().for_each(|v| *v *= gate / all.max(f32::MIN_POSITIVE));
                    }
                    sums[last].moments.add_debt(&missing, &inner);
                }
            }
        }
        if work.inputs {
            weigh(&mut x, width);
            sums[0].moments.add(&x);
            if let Some(made_for) = &mut made_for {
                weigh(made_for, width);
                sums[0].moments.add_drift(made_for, &x);
            }
        }
    }
    Ok(())
}
