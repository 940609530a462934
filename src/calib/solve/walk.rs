//! Hidden states on their way through the model, and what is chosen for the weights they meet.

use super::gather::{self, Gathered, Over, readers};
use super::stage::{Stage, blocks};
use super::{Advance, Module, Progress, SolveError, Task, codes_file, layer_name, modules_file, part, wave};
use crate::artifact::error::ArtifactError;
use crate::artifact::solved::Solved;
use crate::artifact::weights::{Patch, Weights};
use crate::calib::windows::Window;
use crate::engine::solver::{ExpertWork, Job, Solver, SolverError};
use crate::engine::{Batch, Rows};
use crate::files;
use crate::ids::{Part, Role, SeqId, TensorId};
use crate::model::plan::Step;
use crate::model::spec::Ffn;
use crate::quant::format::{Format, OwnedPacked};
use crate::quant::gptq::{FeedbackError, Moments};
use crate::quant::round::{self, RoundError, Rounding};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What the part at hand has so far, for one choice.
type Open = (HashMap<TensorId, Arc<OwnedPacked>>, Vec<Module>);

pub(super) struct Walk<'a, S: Solver> {
    task: &'a Task<'a>,
    groups: Vec<(usize, &'a [Window])>,
    solver: S,
    /// Tokens of the calibration text.
    rows: usize,
    /// Tensors of the part at hand.
    ids: Vec<TensorId>,
    open: Vec<Open>,
    on: &'a mut dyn FnMut(Progress<'_>) -> bool,
}

impl<'a, S: Solver> Walk<'a, S> {
    pub fn new(
        task: &'a Task<'a>,
        solver: S,
        groups: Vec<(usize, &'a [Window])>,
        on: &'a mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Self {
        let rows = task.windows.iter().map(|w| w.tokens.len()).sum();
        Self { task, groups, solver, rows, ids: Vec::new(), open: Vec::new(), on }
    }

    /// Whether any choice quantizes this tensor.
    fn wanted(&self, id: TensorId) -> bool {
        id.part == Part::Weight && self.task.choices.iter().any(|c| (c.format)(id) != Format::Source)
    }

    /// Whether it does and has not yet.
    fn is_open(&self, id: TensorId) -> bool {
        self.wanted(id) && !self.open.iter().any(|(chosen, _)| chosen.contains_key(&id))
    }

    /// Whether the embedding is also the head, and then chosen as the head.
    fn tied(&self) -> bool {
        self.task.weights.spec().tied
    }

    fn ids_of(&self, name: &str) -> Vec<TensorId> {
        let tied = self.tied();
        self.task.weights.tensors().iter().map(|(id, _)| *id).filter(|id| part(*id, tied) == name).collect()
    }

    /// Starts a part: `true` if every choice has it on file, and there is nothing to choose any more.
    fn begin(&mut self, name: &str) -> Result<bool, SolveError> {
        self.ids = self.ids_of(name);
        self.solver.attach_source(&self.ids)?;
        self.open = self.task.choices.iter().map(|_| Open::default()).collect();
        let done = self.task.choices.iter().all(|c| modules_file(&c.dir, name).is_file());
        let weights = match (self.task.advance, self.task.choices.first()) {
            (Advance::Solved, Some(choice)) if done => {
                let mut solved = Solved::default();
                solved.open(&codes_file(&choice.dir, name), self.ids.iter().copied())?;
                self.patched(solved)
            }
            _ => Arc::clone(self.task.weights),
        };
        self.attach(weights, done)?;
        if done {
            self.tell(Progress::Resumed(name))?;
        }
        Ok(done)
    }

    fn patched(&self, solved: Solved) -> Arc<Weights> {
        Arc::new(self.task.weights.patched(vec![Patch::Solved(Arc::new(solved))]))
    }

    /// Runs these weights from now on; what is still to be chosen is not run before it is, unless the source is.
    fn attach(&mut self, weights: Arc<Weights>, whole: bool) -> Result<(), SolveError> {
        let whole = whole || self.task.advance == Advance::Source;
        let ids: Vec<TensorId> = self.ids.iter().copied().filter(|&id| whole || !self.is_open(id)).collect();
        Ok(self.solver.attach(weights, &ids)?)
    }

    /// Files what was chosen; the list of modules comes last and makes it count.
    fn file(&mut self, name: &str) -> Result<(), SolveError> {
        // In the order of the model, whatever the waves were.
        let places: HashMap<String, usize> = self.ids.iter().enumerate().map(|(i, id)| (id.to_string(), i)).collect();
        self.open.iter_mut().for_each(|(_, modules)| modules.sort_by_key(|m| places.get(&m.id).copied()));
        let first = self.open.first().map(|(_, m)| m.clone()).unwrap_or_default();
        for (choice, (chosen, modules)) in self.task.choices.iter().zip(std::mem::take(&mut self.open)) {
            Solved::of(chosen).write(&codes_file(&choice.dir, name))?;
            let json = serde_json::to_vec(&modules).map_err(ArtifactError::from)?;
            files::write_atomic(&modules_file(&choice.dir, name), &json)?;
        }
        let spent = self.solver.spent()?;
        self.tell(Progress::Part(name, &first, spent))
    }

    fn tell(&mut self, progress: Progress<'_>) -> Result<(), SolveError> {
        if (self.on)(progress) { Ok(()) } else { Err(SolveError::Interrupted) }
    }

    /// Lets what was chosen so far be run, where the hidden states pass through that.
    fn run_chosen(&mut self) -> Result<(), SolveError> {
        if self.task.advance == Advance::Solved
            && let Some(chosen) = self.open.first().map(|(chosen, _)| chosen.clone())
        {
            let weights = self.patched(Solved::of(chosen));
            self.attach(weights, false)?;
        }
        Ok(())
    }

    pub fn embed(&mut self) -> Result<(), SolveError> {
        let id = TensorId::global(Role::Embed);
        if !self.begin("embed")? {
            if !self.tied() && self.is_open(id) {
                let moments = readers(self.task, self.solver.plan())?;
                let sums = self.solver.lift(moments)?;
                self.choose(vec![Gathered { ids: vec![id], expert: None, over: Over::Readers, sums }])?;
                self.run_chosen()?;
            }
            self.file("embed")?;
        }
        if self.tied() {
            self.solver.attach(Arc::clone(self.task.weights), &[id])?;
            self.solver.attach_source(&[id])?;
        }
        for (first_row, windows) in self.groups.clone() {
            let batch = batch(windows, Rows::None);
            self.solver.begin(&batch)?;
            self.solver.run(self.solver.plan().prologue.clone(), &batch)?;
            self.solver.store(first_row)?;
            self.solver.end(&batch);
        }
        Ok(())
    }

    pub fn layer(&mut self, l: usize) -> Result<(), SolveError> {
        let name = layer_name(l);
        let done = self.begin(&name)?;
        let range = self.solver.plan().layers[l].clone();
        for block in blocks(&self.solver.plan().steps[range.clone()]) {
            let block = range.start + block.start..range.start + block.end;
            if !done {
                self.block(l, block.clone())?;
            }
            self.pass(block)?;
        }
        if !done {
            let rest: Vec<TensorId> = self.ids.iter().copied().filter(|&id| self.is_open(id)).collect();
            rest.into_iter().try_for_each(|id| self.round(id))?;
            self.file(&name)?;
        }
        self.task.weights.release(&self.ids);
        Ok(())
    }

    /// Chooses every weight of a block.
    fn block(&mut self, l: usize, block: Range<usize>) -> Result<(), SolveError> {
        let spec = self.task.weights.spec();
        let (num_experts, wave) = match &spec.layers[l].ffn {
            Ffn::Dense { .. } => (0, 1),
            Ffn::Moe(m) => (m.router.experts, wave(self.task, spec.width, m.width)),
        };
        loop {
            let steps = &self.solver.plan().steps[block.clone()];
            let wait = self.task.advance == Advance::Solved;
            let stage = Stage::next(steps, num_experts, &|id| self.is_open(id), wait, wave);
            if stage.is_last() {
                return Ok(());
            }
            let mut gathered = self.gather(&block, &stage)?;
            // Experts that no token chose: once more, with every token.
            gathered.retain(|g| !g.ids.is_empty());
            let seen =
                gathered.iter().map(|g| Ok(self.solver.tokens(&g.sums)? > 0)).collect::<Result<Vec<bool>, SolverError>>()?;
            let idle: Vec<_> = gathered.iter().zip(&seen).filter(|(_, seen)| !**seen).filter_map(|(g, _)| g.expert).collect();
            if let Some(work) = stage.experts.clone().filter(|_| !idle.is_empty()) {
                let experts = work.experts.iter().copied().filter(|e| idle.contains(e)).collect();
                let work = ExpertWork { experts, pooled: true, ..work };
                let again = Stage { watched: Vec::new(), experts: Some(work), runs: stage.runs.clone() };
                gathered = gathered.into_iter().zip(seen).filter(|(_, seen)| *seen).map(|(g, _)| g).collect();
                gathered.extend(self.gather(&block, &again)?.into_iter().filter(|g| !g.ids.is_empty()));
            }
            self.choose(gathered)?;
            self.run_chosen()?;
        }
    }

    /// Runs what a stage may run, and sums what it watches.
    fn gather(&mut self, block: &Range<usize>, stage: &Stage) -> Result<Vec<Gathered<S::Sums>>, SolveError> {
        let open: Vec<TensorId> = self.ids.iter().copied().filter(|&id| self.is_open(id)).collect();
        let mut found = gather::start(&mut self.solver, block, stage, self.task, &|id| open.contains(&id))?;
        for (first_row, windows) in self.groups.clone() {
            let batch = self.load(first_row, windows)?;
            gather::gather(&mut self.solver, block, stage, &batch, &mut found)?;
            self.solver.end(&batch);
            self.tell(Progress::Group)?;
        }
        Ok(found)
    }

    /// Runs a block and stores what comes out.
    fn pass(&mut self, block: Range<usize>) -> Result<(), SolveError> {
        for (first_row, windows) in self.groups.clone() {
            let batch = self.load(first_row, windows)?;
            self.solver.run(block.clone(), &batch)?;
            self.solver.store(first_row)?;
            self.solver.end(&batch);
            self.tell(Progress::Group)?;
        }
        Ok(())
    }

    fn load(&mut self, first_row: usize, windows: &[Window]) -> Result<Batch, SolveError> {
        let batch = batch(windows, Rows::None);
        self.solver.begin(&batch)?;
        self.solver.load(&batch, first_row)?;
        Ok(batch)
    }

    pub fn head(&mut self) -> Result<(), SolveError> {
        if self.begin("head")? {
            return Ok(());
        }
        let id = TensorId::global(if self.tied() { Role::Embed } else { Role::Head });
        if self.is_open(id) {
            let range = self.solver.plan().epilogue.clone();
            let steps = &self.solver.plan().steps[range.clone()];
            let mut stage = Stage::next(steps, 0, &|id| self.is_open(id), true, 1);
            steps.iter().zip(&mut stage.runs).for_each(|(s, runs)| *runs &= !matches!(s, Step::Head { .. }));
            let gathered = self.gather(&range, &stage)?;
            self.choose(gathered)?;
        }
        self.file("head")
    }

    /// Rounds a tensor whose inputs are not products: nothing weighs its errors.
    fn round(&mut self, id: TensorId) -> Result<(), SolveError> {
        let Some(cols) = self.task.weights.get(id).filter(|_| self.is_open(id)).map(|w| w.cols) else { return Ok(()) };
        let sums = self.solver.lift(Moments::identity(cols, 0))?;
        self.choose(vec![Gathered { ids: vec![id], expert: None, over: Over::Tokens, sums }])
    }

    /// Quantizes the matrices whose inputs were gathered, for every choice.
    fn choose(&mut self, gathered: Vec<Gathered<S::Sums>>) -> Result<(), SolveError> {
        let task = self.task;
        let mut jobs = Vec::with_capacity(gathered.len());
        let mut facts = Vec::with_capacity(gathered.len());
        for Gathered { ids, over, sums, .. } in gathered {
            let tokens = if over == Over::Readers { 0 } else { self.solver.tokens(&sums)? };
            facts.push((over, tokens));
            let ways = |id: TensorId| task.choices.iter().filter_map(|c| rounding(task, (c.format)(id))).collect();
            jobs.push(Job { sums, matrices: ids.into_iter().map(|id| (id, ways(id))).collect() });
        }
        let found = self.solver.choose(task.weights, jobs).map_err(|e| fault(e, task))?;
        for ((over, tokens), found) in facts.into_iter().zip(found) {
            let per_token = match over {
                _ if tokens == 0 => 1.0,
                Over::AllTokens => 1.0 / tokens as f64,
                Over::Tokens | Over::Readers => 1.0 / self.rows.max(1) as f64,
            };
            for chosen in found {
                let mut codes = chosen.codes.into_iter();
                for (choice, (packed, modules)) in task.choices.iter().zip(&mut self.open) {
                    let format = (choice.format)(chosen.id);
                    let Some((new, mut loss)) = rounding(task, format).and_then(|_| codes.next()) else { continue };
                    for part in [&mut loss.before, &mut loss.after, &mut loss.whole] {
                        *part *= per_token;
                    }
                    let (id, pooled, damping) = (chosen.id.to_string(), over == Over::AllTokens, chosen.damping);
                    modules.push(Module { id, format: format.to_string(), tokens, pooled, damping, loss });
                    packed.insert(chosen.id, Arc::new(new));
                }
            }
        }
        Ok(())
    }
}

/// How a matrix of some format is rounded; `None` for one that is not.
fn rounding(task: &Task<'_>, format: Format) -> Option<Rounding> {
    let Format::Int { bits, group, zero } = format else { return None };
    let (scale_dtype, positive_scales) = (task.scale_dtype, task.positive_scales);
    Some(Rounding { bits, group, zero, method: round::Method::Search, scale_dtype, positive_scales })
}

/// Names the tensor as the files do, and the value at fault.
fn fault(error: SolverError, task: &Task<'_>) -> SolveError {
    let name = |id: TensorId| task.weights.file_tensors(id).into_iter().next().unwrap_or_else(|| id.to_string());
    let value = |id: TensorId, row: usize, col: usize| {
        let weight = task.weights.get(id)?;
        let mut values = vec![0.0; weight.cols];
        weight.decode_rows(&mut values, row).ok()?;
        values.get(col).copied()
    };
    match error {
        SolverError::Weight { id, source } => ArtifactError::Decode { tensor: name(id), source }.into(),
        SolverError::Codes { id, source: FeedbackError::NonFinite } => SolveError::Activations(id.to_string()),
        SolverError::Codes { id, source: FeedbackError::Round(RoundError::NonFinite { row, col }) } => {
            let value = value(id, row, col).unwrap_or(f32::NAN);
            ArtifactError::NonFinite { tensor: name(id), index: vec![row, col], value }.into()
        }
        SolverError::Codes { id, source: FeedbackError::Round(RoundError::ScaleOverflow { row, col }) } => {
            let value = value(id, row, col).unwrap_or(f32::NAN);
            ArtifactError::OutOfRange { tensor: name(id), index: vec![row, col], value, dtype: task.scale_dtype }.into()
        }
        other => other.into(),
    }
}

/// Whole windows in one pass.
fn batch(windows: &[Window], rows: Rows) -> Batch {
    let mut batch = Batch::default();
    for (i, w) in windows.iter().enumerate() {
        batch.push(SeqId(i as u32), 0, &w.tokens, rows, w.tokens.len());
    }
    batch
}
