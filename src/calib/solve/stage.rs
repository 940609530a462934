//! What of a block can be computed, and whose inputs are known, while some of its weights are still to be chosen. Pure.

use crate::engine::solver::ExpertWork;
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use crate::model::plan::{Slot, Step};
use std::collections::{HashMap, HashSet};

/// One pass over all tokens through a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stage {
    /// Whether each step is run.
    pub runs: Vec<bool>,
    /// Buffers looked at before a step, and the matrices multiplied with them.
    pub watched: Vec<(usize, Slot, Vec<TensorId>)>,
    /// Experts whose inputs are gathered once the router has chosen.
    pub experts: Option<ExpertWork>,
}

impl Stage {
    /// Nothing is left to gather: a last pass may run all steps.
    pub fn is_last(&self) -> bool {
        self.watched.is_empty() && self.experts.is_none()
    }

    /// Plans the next pass. `open` are the weights still to be chosen; with `wait`, what follows from them is not computed
    /// before they are chosen. At most `wave` experts are taken.
    pub fn next(steps: &[Step], num_experts: usize, open: &dyn Fn(TensorId) -> bool, wait: bool, wave: usize) -> Self {
        let mut stage = Stage::default();
        let mut unknown: HashSet<Slot> = HashSet::new();
        let mut routed = true;
        let mut version: HashMap<Slot, usize> = HashMap::new();
        let mut watched: HashMap<(Slot, usize), usize> = HashMap::new();
        for (i, step) in steps.iter().enumerate() {
            let known = step.reads().iter().all(|s| !unknown.contains(s));
            let mut runs = known;
            if let Some((w, src)) = step.product().filter(|(w, _)| open(*w)) {
                if known {
                    let key = (src, version.get(&src).copied().unwrap_or(0));
                    let at = *watched.entry(key).or_insert_with(|| {
                        stage.watched.push((i, src, Vec::new()));
                        stage.watched.len() - 1
                    });
                    stage.watched[at].2.push(w);
                }
                runs &= !wait;
            }
            match *step {
                Step::Experts { src, layer, width, .. } => {
                    let work = experts(layer, width, src, num_experts, open, wait, wave);
                    runs &= routed && work.is_none();
                    stage.experts = stage.experts.or(work.filter(|_| known && routed));
                }
                Step::Route { .. } => routed = runs,
                _ => {}
            }
            if let Some(dst) = step.writes() {
                if runs {
                    unknown.remove(&dst)
                } else {
                    unknown.insert(dst)
                };
                *version.entry(dst).or_default() += 1;
            }
            stage.runs.push(runs);
        }
        stage
    }
}

fn experts(
    layer: LayerId,
    width: usize,
    src: Slot,
    num_experts: usize,
    open: &dyn Fn(TensorId) -> bool,
    wait: bool,
    wave: usize,
) -> Option<ExpertWork> {
    let all = || (0..num_experts as u32).map(ExpertId);
    let of = |e: ExpertId, role| open(TensorId::expert(layer, e, role));
    let outer = |e: ExpertId| of(e, Role::ExpertGate) || of(e, Role::ExpertUp);
    let down = |e: ExpertId| of(e, Role::ExpertDown);
    let work = |experts: Vec<ExpertId>, inputs, inner| {
        let work = ExpertWork { layer, width, src, experts, inputs, inner, pooled: false };
        Some(work).filter(|w| !w.experts.is_empty())
    };
    if !wait {
        return work(all().filter(|&e| outer(e) || down(e)).take(wave).collect(), true, true);
    }
    // A wave is finished before the next begins, so that no more than one is in memory.
    let ready = || all().filter(|&e| down(e) && !outer(e)).take(wave).collect();
    work(ready(), false, true).or_else(|| work(all().filter(|&e| outer(e)).take(wave).collect(), true, false))
}

/// Runs of steps that begin and end with the residual stream alone: the blocks of a layer.
pub(super) fn blocks(steps: &[Step]) -> Vec<std::ops::Range<usize>> {
    let mut blocks = Vec::new();
    let mut start = 0;
    for (i, step) in steps.iter().enumerate() {
        if matches!(step, Step::Add { acc: Slot::Residual, .. }) {
            blocks.push(start..i + 1);
            start = i + 1;
        }
    }
    blocks
}
