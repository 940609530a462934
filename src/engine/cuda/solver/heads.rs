//! Rows of a head by what they compete for, as `quant::sets` divides them: weighed by probabilities that are made here, and chosen for
//! by the search over rows, each set behind its own second moments.

use super::super::device::CudaError;
use super::super::launch::{self, Grid};
use super::super::memory::Buffer;
use super::super::tiles::{self, Side};
use super::codes::{Numbered, Placed};
use super::{Over, PASS_TOK, Solver, Sums};
use crate::artifact::weights::Weights;
use crate::engine::solver::{Chosen, Inputs, Job, Solver as _, SolverError, Work};
use crate::ids::TensorId;
use crate::model::plan::{Slot, Step};
use crate::quant::format::OwnedPacked;
use crate::quant::gptq::{Loss, Moments};
use crate::quant::sets::Sets;

/// Bytes of logits that are there together.
const LOGIT_BYTES: usize = 256 << 20;

/// The sets of a head's rows, and what is summed for each.
pub(super) struct Head {
    sets: Sets,
    sums: Vec<Sums>,
    /// The set of each row, `[V]` bytes.
    of: Buffer,
    /// `[tokens at a time, V]`.
    logits: Buffer,
    /// Roots of what tokens of a pass count for each set, `[sets, T]`.
    roots: Buffer,
}

impl Solver {
    /// Divides the rows of a head; `None` where they are few.
    pub(super) fn divide(&self, id: TensorId) -> Result<Option<Head>, SolverError> {
        let Some(weight) = self.weights.get(id) else { return Ok(None) };
        let values = weight.to_f32().map_err(|e| SolverError::Weight { id, source: Box::new(e) })?;
        let (device, cols) = (&self.device, weight.cols);
        let sets = Sets::divide(&values, cols);
        let n = sets.all.len();
        if n == 0 {
            return Ok(None);
        }
        let sums = self.zeroed(&vec![Inputs { cols, pays: 0, head: None }; n], true, false)?;
        let of = Buffer::from_slice(device, &sets.of)?;
        let tok = (LOGIT_BYTES / (4 * weight.rows)).clamp(1, PASS_TOK);
        let (logits, roots) = (Buffer::new(device, 4 * tok * weight.rows)?, Buffer::new(device, 4 * n * PASS_TOK)?);
        Ok(Some(Head { sums, sets, of, logits, roots }))
    }

    /// Adds inputs `x` to the sets whose tokens are likely by the source's logits.
    pub(super) fn add_to_sets(&self, head: &mut Head, slot: Slot, x: Side) -> Result<(), SolverError> {
        let source = self.source.as_ref().map_or(&self.own, |s| &s.stream);
        let engine = &source.engine;
        let [.., Step::Head { w, b, scale, .. }] = engine.plan().steps[engine.plan().epilogue.clone()] else {
            unreachable!("a plan ends with the head")
        };
        let (w, bias, row, num_tok) = (engine.store.matrix(w), engine.store.optional(b), engine.row(slot), self.num_tok);
        let (rows, num_sets, stride) = (w.rows as usize, head.sets.all.len(), PASS_TOK as i32);
        let most = head.logits.bytes() / (4 * rows);
        for first in (0..num_tok).step_by(most) {
            let (n, from) = (most.min(num_tok - first), engine.at(slot) + 4 * (first * row as usize) as u64);
            let (grid, logits) = (tiles::tiles(rows, n, 1), head.logits.at(0));
            self.tiles.tiles_linear(grid, logits, w.rows, from, row, 0, w, bias, scale, n as i32)?;
            let (grid, roots) = (Grid::new([n, 1, 1], 256), head.roots.at(4 * first));
            self.tiles.tiles_weigh(grid, roots, stride, logits, head.of.at(0), w.rows, num_sets as i32)?;
        }
        for (s, sums) in head.sums.iter_mut().enumerate() {
            sums.tokens += num_tok;
            self.add_moments(&[sums], Side { gates: head.roots.at(4 * s * PASS_TOK), ..x }, &Over::ALL)?;
        }
        let mut roots = vec![0.0f32; num_sets * PASS_TOK];
        self.device.download(&mut roots, &head.roots, 0)?;
        for (set, roots) in head.sets.all.iter_mut().zip(roots.chunks_exact(PASS_TOK)) {
            set.count(roots[..num_tok].iter().map(|root| root * root));
        }
        Ok(())
    }

    fn fetch(&self, sums: &Sums) -> Result<Moments, CudaError> {
        let mut values = vec![0.0f32; sums.cols * sums.cols];
        self.device.download(&mut values, &sums.memory, sums.at_bytes)?;
        Ok(Moments::of(sums.cols, sums.tokens, values))
    }

    /// Chooses for what would best do the work of the head by all its inputs, the rows of each set behind the set's own moments.
    pub(super) fn choose_by_sets(&mut self, weights: &Weights, job: Job<Sums>, head: Head) -> Result<Vec<Chosen>, SolverError> {
        let Head { sets, sums, of, logits, roots } = head;
        drop((of, logits, roots));
        let all = self.fetch(&job.sums)?;
        let (run, cols) = ([(0, job)], all.cols());
        let mut found = Vec::new();
        let factors = self.timed(Work::Factors, |s| s.factors(&run))?;
        let parts = sets.all.iter().zip(sums).map(|(set, own)| {
            let moments = set.moments(&self.fetch(&own)?, &all);
            let named = run[0].1.matrices.iter().map(|(id, _)| (*id, Vec::new())).collect();
            Ok((0, Job { sums: self.lift(moments)?, matrices: named }))
        });
        let parts: Vec<Numbered> = parts.collect::<Result<_, SolverError>>()?;
        let of_parts = self.timed(Work::Factors, |s| s.factors(&parts))?;
        for (id, ways) in &run[0].1.matrices {
            let Some(weight) = weights.get(*id) else { continue };
            let rows = weight.rows;
            let whole = [Placed { job: 0, id: *id, weight: weight.clone(), first_row: 0, rows, which: None }];
            let src = self.timed(Work::Weights, |s| s.bring(&whole, rows, cols))?;
            self.timed(Work::Codes, |s| s.aim(&run, &whole, &src, &factors))?;
            let order: Vec<u32> = sets.all.iter().flat_map(|set| &set.rows).map(|&r| r as u32).collect();
            let (order, aim) = (Buffer::from_slice(&self.device, &order)?, Buffer::new(&self.device, src.bytes())?);
            let (grid, width) = (launch::elements(rows * cols), cols as i32);
            self.tiles.tiles_pick(grid, aim.at(0), src.at(0), order.at(0), width, rows as u64)?;
            let mut first_row = 0;
            let placed = sets.all.iter().enumerate().map(|(job, set)| {
                first_row += set.rows.len();
                let (first_row, rows) = (first_row - set.rows.len(), set.rows.len());
                Placed { job, id: *id, weight: weight.clone(), first_row, rows, which: Some(&set.rows) }
            });
            let placed: Vec<Placed<'_>> = placed.collect();
            let placed: Vec<&Placed<'_>> = placed.iter().collect();
            let mut codes: Vec<(OwnedPacked, Loss)> = Vec::new();
            for how in ways {
                let found = self.timed(Work::Codes, |s| s.search(&placed, rows, cols, &aim, &of_parts, how))?;
                codes.push(sets.join(&found, cols, how));
            }
            found.push(Chosen { id: *id, codes, damping: factors.dampings[0] });
        }
        Ok(found)
    }
}
