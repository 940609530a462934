//! Hidden states on their way through the model, and what is chosen for the weights they meet.

use super::gather::{Gathered, Over, gather, readers};
use super::sets::{Set, Sets};
use super::stage::{Stage, blocks};
use super::{Advance, Module, Progress, SolveError, Task, codes_file, layer_name, modules_file, part, wave};
use crate::artifact::error::ArtifactError;
use crate::artifact::solved::Solved;
use crate::artifact::weights::Patch;
use crate::calib::hidden::{Hidden, groups};
use crate::calib::windows::Window;
use crate::engine::cpu::Engine;
use crate::engine::{Batch, Rows};
use crate::files;
use crate::ids::{Part, Role, SeqId, TensorId};
use crate::model::plan::{Slot, Step};
use crate::model::spec::Ffn;
use crate::quant::format::{Format, OwnedPacked};
use crate::quant::gptq::{Feedback, FeedbackError, Loss, Moments};
use crate::quant::round::{self, RoundError, Rounding};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What the part at hand has so far, for one choice.
type Open = (HashMap<TensorId, Arc<OwnedPacked>>, Vec<Module>);

/// A matrix and what became of it.
type Chosen = (TensorId, OwnedPacked, Module);

pub(super) struct Walk<'a> {
    task: &'a Task<'a>,
    groups: Vec<(usize, &'a [Window])>,
    hidden: Hidden,
    engine: Engine,
    /// The source with hidden states of its own, where what is chosen makes up for what was chosen before.
    source: Option<(Engine, Hidden)>,
    rows: usize,
    open: Vec<Open>,
    on: &'a mut dyn FnMut(Progress<'_>) -> bool,
}

impl<'a> Walk<'a> {
    pub fn new(
        task: &'a Task<'a>,
        hidden: Hidden,
        source: Option<Hidden>,
        rows: usize,
        on: &'a mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Self {
        let engine = Engine::new(Arc::clone(task.weights));
        let source = source.map(|hidden| (Engine::new(Arc::clone(task.weights)), hidden));
        Self { task, groups: groups(task.windows), hidden, engine, source, rows, open: Vec::new(), on }
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

    fn ids_of<'s>(&'s self, name: &'s str) -> impl Iterator<Item = TensorId> + 's {
        let tied = self.tied();
        self.task.weights.tensors().iter().map(|(id, _)| *id).filter(move |id| part(*id, tied) == name)
    }

    /// If every choice has this part on file, lets the engine run the first choice's.
    fn filed(&mut self, name: &str) -> Result<bool, SolveError> {
        if !self.task.choices.iter().all(|c| modules_file(&c.dir, name).is_file()) {
            return Ok(false);
        }
        if let (Advance::Solved, Some(choice)) = (self.task.advance, self.task.choices.first()) {
            let mut solved = Solved::default();
            solved.open(&codes_file(&choice.dir, name), self.ids_of(name))?;
            self.patch(solved);
        }
        Ok(true)
    }

    /// Starts a part: `true` if there is nothing to choose any more.
    fn begin(&mut self, name: &str) -> Result<bool, SolveError> {
        self.engine = Engine::new(Arc::clone(self.task.weights));
        if let Some((engine, _)) = &mut self.source {
            *engine = Engine::new(Arc::clone(self.task.weights));
        }
        self.open = self.task.choices.iter().map(|_| Open::default()).collect();
        let done = self.filed(name)?;
        if done {
            self.tell(Progress::Resumed(name))?;
        }
        Ok(done)
    }

    /// Files what was chosen; the list of modules comes last and makes it count.
    fn file(&mut self, name: &str) -> Result<(), SolveError> {
        // In the order of the model, whatever the waves were.
        let places: HashMap<String, usize> = self.ids_of(name).enumerate().map(|(i, id)| (id.to_string(), i)).collect();
        self.open.iter_mut().for_each(|(_, modules)| modules.sort_by_key(|m| places.get(&m.id).copied()));
        let first = self.open.first().map(|(_, m)| m.clone()).unwrap_or_default();
        for (choice, (chosen, modules)) in self.task.choices.iter().zip(std::mem::take(&mut self.open)) {
            Solved::of(chosen).write(&codes_file(&choice.dir, name))?;
            let json = serde_json::to_vec(&modules).map_err(ArtifactError::from)?;
            files::write_atomic(&modules_file(&choice.dir, name), &json)?;
        }
        self.tell(Progress::Part(name, &first))
    }

    fn tell(&mut self, progress: Progress<'_>) -> Result<(), SolveError> {
        if (self.on)(progress) { Ok(()) } else { Err(SolveError::Interrupted) }
    }

    fn patch(&mut self, solved: Solved) {
        self.engine = Engine::new(Arc::new(self.task.weights.patched(vec![Patch::Solved(Arc::new(solved))])));
    }

    /// Lets the engine run what was chosen so far, where the hidden states pass through that.
    fn run_chosen(&mut self) {
        if self.task.advance == Advance::Solved
            && let Some(chosen) = self.open.first().map(|(chosen, _)| chosen.clone())
        {
            self.patch(Solved::of(chosen));
        }
    }

    pub fn embed(&mut self) -> Result<(), SolveError> {
        if !self.begin("embed")? {
            let id = TensorId::global(Role::Embed);
            if !self.tied() && self.is_open(id) {
                let moments = readers(self.task, self.engine.plan())?;
                self.choose(vec![Gathered { ids: vec![id], expert: None, over: Over::Readers, moments, sets: Sets::default() }])?;
                self.run_chosen();
            }
            self.file("embed")?;
        }
        let width = self.task.weights.spec().width;
        for (first_row, windows) in self.groups.clone() {
            let batch = batch(windows, Rows::None);
            self.engine.begin(&batch)?;
            self.engine.run(self.engine.plan().prologue.clone(), &batch, &mut |_| ())?;
            self.hidden.write(first_row * width, self.engine.slot(Slot::Residual))?;
            if let Some((engine, hidden)) = &mut self.source {
                engine.begin(&batch)?;
                engine.run(engine.plan().prologue.clone(), &batch, &mut |_| ())?;
                hidden.write(first_row * width, engine.slot(Slot::Residual))?;
            }
            self.release(windows);
        }
        Ok(())
    }

    pub fn layer(&mut self, l: usize) -> Result<(), SolveError> {
        let name = layer_name(l);
        let done = self.begin(&name)?;
        let range = self.engine.plan().layers[l].clone();
        for block in blocks(&self.engine.plan().steps[range.clone()]) {
            let block = range.start + block.start..range.start + block.end;
            if !done {
                self.block(l, block.clone())?;
            }
            self.pass(block)?;
        }
        if !done {
            let rest: Vec<TensorId> = self.ids_of(&name).filter(|&id| self.is_open(id)).collect();
            rest.into_iter().try_for_each(|id| self.round(id))?;
            self.file(&name)?;
        }
        let ids: Vec<TensorId> = self.ids_of(&name).collect();
        self.task.weights.release(&ids);
        self.engine.weights().release(&ids);
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
            let steps = &self.engine.plan().steps[block.clone()];
            let wait = self.task.advance == Advance::Solved;
            let stage = Stage::next(steps, num_experts, &|id| self.is_open(id), wait, wave);
            if stage.is_last() {
                return Ok(());
            }
            let mut gathered = self.gather(&block, &stage)?;
            // Experts that no token chose: once more, with every token.
            gathered.retain(|g| !g.ids.is_empty());
            let idle: Vec<_> = gathered.iter().filter(|g| g.moments.tokens() == 0).filter_map(|g| g.expert).collect();
            if let Some(work) = stage.experts.clone().filter(|_| !idle.is_empty()) {
                let experts = work.experts.iter().copied().filter(|e| idle.contains(e)).collect();
                let work = super::stage::ExpertWork { experts, pooled: true, ..work };
                let again = Stage { watched: Vec::new(), experts: Some(work), runs: stage.runs.clone() };
                gathered.retain(|g| g.moments.tokens() > 0);
                gathered.extend(self.gather(&block, &again)?.into_iter().filter(|g| !g.ids.is_empty()));
            }
            self.choose(gathered)?;
            self.run_chosen();
        }
    }

    /// Runs what a stage may run, and sums what it watches.
    fn gather(&mut self, block: &Range<usize>, stage: &Stage) -> Result<Vec<Gathered>, SolveError> {
        let mut found = Gathered::start(stage, self.task, &|id| self.is_open(id))?;
        let width = self.task.weights.spec().width;
        for (first_row, windows) in self.groups.clone() {
            let batch = self.load(first_row, windows, width)?;
            gather(&mut self.engine, self.source.as_mut().map(|(e, _)| e), block, stage, &batch, &mut found)?;
            self.release(windows);
            self.tell(Progress::Group)?;
        }
        Ok(found)
    }

    /// Runs a block and stores what comes out.
    fn pass(&mut self, block: Range<usize>) -> Result<(), SolveError> {
        let width = self.task.weights.spec().width;
        for (first_row, windows) in self.groups.clone() {
            let batch = self.load(first_row, windows, width)?;
            self.engine.run(block.clone(), &batch, &mut |_| ())?;
            self.hidden.write(first_row * width, self.engine.slot(Slot::Residual))?;
            if let Some((engine, hidden)) = &mut self.source {
                engine.run(block.clone(), &batch, &mut |_| ())?;
                hidden.write(first_row * width, engine.slot(Slot::Residual))?;
            }
            self.release(windows);
            self.tell(Progress::Group)?;
        }
        Ok(())
    }

    fn load(&mut self, first_row: usize, windows: &[Window], width: usize) -> Result<Batch, SolveError> {
        let batch = batch(windows, Rows::None);
        let rows = batch.tokens.len();
        self.engine.begin(&batch)?;
        let at = first_row * width..(first_row + rows) * width;
        *self.engine.slot_mut(Slot::Residual) = self.hidden.read(at.clone())?;
        if let Some((engine, hidden)) = &mut self.source {
            engine.begin(&batch)?;
            *engine.slot_mut(Slot::Residual) = hidden.read(at)?;
        }
        Ok(batch)
    }

    fn release(&mut self, windows: &[Window]) {
        for i in 0..windows.len() {
            self.engine.release(SeqId(i as u32));
            if let Some((engine, _)) = &mut self.source {
                engine.release(SeqId(i as u32));
            }
        }
    }

    pub fn head(&mut self) -> Result<(), SolveError> {
        if self.begin("head")? {
            return Ok(());
        }
        let id = TensorId::global(if self.tied() { Role::Embed } else { Role::Head });
        if self.is_open(id) {
            let range = self.engine.plan().epilogue.clone();
            let steps = &self.engine.plan().steps[range.clone()];
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
        self.choose(vec![Gathered {
            ids: vec![id],
            expert: None,
            over: Over::Tokens,
            moments: Moments::identity(cols, 0),
            sets: Sets::default(),
        }])
    }

    /// Quantizes the matrices whose inputs were gathered, for every choice.
    fn choose(&mut self, gathered: Vec<Gathered>) -> Result<(), SolveError> {
        let (task, rows) = (self.task, self.rows);
        let found: Vec<Vec<Vec<Chosen>>> = gathered.into_par_iter().map(|g| choose(task, g, rows)).collect::<Result<_, _>>()?;
        for of_choices in found {
            for ((chosen, modules), new) in self.open.iter_mut().zip(of_choices) {
                for (id, packed, module) in new {
                    chosen.insert(id, Arc::new(packed));
                    modules.push(module);
                }
            }
        }
        Ok(())
    }
}

/// For each choice, what becomes of the matrices that share these inputs.
fn choose(task: &Task<'_>, gathered: Gathered, rows: usize) -> Result<Vec<Vec<Chosen>>, SolveError> {
    let Gathered { ids, moments, over, sets, .. } = gathered;
    let ready = |moments: &Moments| {
        Feedback::new(moments).map_err(|_| SolveError::Activations(ids.first().map(TensorId::to_string).unwrap_or_default()))
    };
    let feedback = ready(&moments)?;
    let sets: Vec<(&Set, Feedback)> =
        sets.all.iter().map(|set| Ok((set, ready(&set.moments(&moments))?))).collect::<Result<_, SolveError>>()?;
    let tokens = if over == Over::Readers { 0 } else { moments.tokens() };
    drop(moments);
    let pooled = over == Over::AllTokens;
    let per_token = match over {
        _ if tokens == 0 => 1.0,
        Over::AllTokens => 1.0 / tokens as f64,
        Over::Tokens | Over::Readers => 1.0 / rows.max(1) as f64,
    };
    let mut found: Vec<Vec<Chosen>> = task.choices.iter().map(|_| Vec::new()).collect();
    for id in ids.iter().copied() {
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        let weight = task.weights.get(id).ok_or_else(vanished)?;
        let (cols, name) = (weight.cols, task.weights.file_tensors(id).into_iter().next().ok_or_else(vanished)?);
        let values = weight.to_f32().map_err(|e| ArtifactError::Decode { tensor: name.clone(), source: Box::new(e) })?;
        for (choice, found) in task.choices.iter().zip(&mut found) {
            let Format::Int { bits, group, zero } = (choice.format)(id) else { continue };
            let how = Rounding {
                bits,
                group,
                zero,
                method: round::Method::Search,
                scale_dtype: task.scale_dtype,
                positive_scales: task.positive_scales,
            };
            let chosen =
                if sets.is_empty() { feedback.quantize(&values, &how) } else { by_sets(&feedback, &sets, &values, &how) };
            let (packed, mut loss) = chosen.map_err(|e| fault(e, &name, &values, cols, task))?;
            for part in [&mut loss.before, &mut loss.after, &mut loss.whole] {
                *part *= per_token;
            }
            let format = how.format().to_string();
            found.push((id, packed, Module { id: id.to_string(), format, tokens, pooled, damping: feedback.damping, loss }));
        }
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

fn fault(error: FeedbackError, tensor: &str, values: &[f32], cols: usize, task: &Task<'_>) -> SolveError {
    let at = |row: usize, col: usize| (tensor.to_string(), vec![row, col], values[row * cols + col]);
    match error {
        FeedbackError::NonFinite => SolveError::Activations(tensor.into()),
        FeedbackError::Round(RoundError::NonFinite { row, col }) => {
            let (tensor, index, value) = at(row, col);
            ArtifactError::NonFinite { tensor, index, value }.into()
        }
        FeedbackError::Round(RoundError::ScaleOverflow { row, col }) => {
            let (tensor, index, value) = at(row, col);
            ArtifactError::OutOfRange { tensor, index, value, dtype: task.scale_dtype }.into()
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::format::{Bits, Group, Zero};
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
