//! Second moments of the inputs of matrices, summed while a block is run.

use super::stage::{Stage, blocks};
use super::{SolveError, Task};
use crate::artifact::error::ArtifactError;
use crate::engine::Batch;
use crate::engine::solver::{Inputs, Solver};
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use crate::model::plan::{Plan, Slot, Step};
use crate::model::spec::{Ffn, ModelSpec};
use crate::quant::gptq::Moments;
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
pub(super) struct Gathered<S> {
    pub ids: Vec<TensorId>,
    pub expert: Option<ExpertId>,
    pub over: Over,
    pub sums: S,
}

/// Empty sums for everything a stage watches: its buffers in order, then its experts, inputs before what down sees.
pub(super) fn start<S: Solver>(
    solver: &mut S,
    block: &Range<usize>,
    stage: &Stage,
    task: &Task<'_>,
    open: &dyn Fn(TensorId) -> bool,
) -> Result<Vec<Gathered<S::Sums>>, SolveError> {
    let width = task.weights.spec().width;
    let paid = |pays: bool| if pays { width } else { 0 };
    let watched = stage
        .watched
        .iter()
        .map(|(i, _, ids)| (ids.clone(), None, Over::Tokens, paid(pays(&solver.plan().steps[block.start + i]))));
    let mut all: Vec<(Vec<TensorId>, Option<ExpertId>, Over, usize)> = watched.collect();
    if let Some(work) = &stage.experts {
        let over = if work.pooled { Over::AllTokens } else { Over::Tokens };
        for &e in &work.experts {
            let of = |roles: &[Role]| -> Vec<TensorId> {
                roles.iter().map(|&r| TensorId::expert(work.layer, e, r)).filter(|&id| open(id)).collect()
            };
            if work.inputs {
                all.push((of(&[Role::ExpertGate, Role::ExpertUp]), Some(e), over, 0));
            }
            if work.inner {
                all.push((of(&[Role::ExpertDown]), Some(e), over, paid(!work.pooled)));
            }
        }
    }
    let cols = |ids: &[TensorId]| ids.first().and_then(|&id| task.weights.get(id)).map_or(0, |w| w.cols);
    let head = |ids: &[TensorId]| ids.iter().copied().find(|id| matches!(id.role, Role::Head | Role::Embed));
    let inputs = all.iter().map(|(ids, .., pays)| Inputs { cols: cols(ids), pays: *pays, head: head(ids) });
    let inputs: Vec<Inputs> = inputs.collect();
    let sums = solver.empty(&inputs, task.feedback)?;
    let all = all.into_iter().zip(sums);
    Ok(all.map(|((ids, expert, over, _), sums)| Gathered { ids, expert, over, sums }).collect())
}

/// Whether a product goes to the residual stream, and so can pay what is missing there.
fn pays(step: &Step) -> bool {
    matches!(step, Step::Linear { dst: Slot::Block, .. })
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

/// Runs the steps of `block` that the stage allows on a batch whose residual is loaded, and adds what it watches to `found`.
pub(super) fn gather<S: Solver>(
    solver: &mut S,
    block: &Range<usize>,
    stage: &Stage,
    batch: &Batch,
    found: &mut [Gathered<S::Sums>],
) -> Result<(), SolveError> {
    let (watched, of_experts) = found.split_at_mut(stage.watched.len());
    for (i, runs) in stage.runs.iter().enumerate() {
        for ((_, slot, _), gathered) in stage.watched.iter().zip(watched.iter_mut()).filter(|((at, ..), _)| *at == i) {
            solver.add(&mut gathered.sums, *slot, pays(&solver.plan().steps[block.start + i]))?;
        }
        if *runs {
            solver.run(block.start + i..block.start + i + 1, batch)?;
        }
    }
    if let Some(work) = &stage.experts {
        let mut sums: Vec<&mut S::Sums> = of_experts.iter_mut().map(|g| &mut g.sums).collect();
        solver.add_experts(work, &mut sums)?;
    }
    Ok(())
}
