//! What a run saw of its routers, added to a list of hot experts.

use super::{COVERAGE, identity, list_of, old_counts, read_old, shape};
use crate::artifact::hot::{HotExperts, Model, Task};
use crate::artifact::weights::Weights;
use crate::calib::routing::{self, Counts};
use crate::engine::Event;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the task that runs are counted as.
const TASK: &str = "run";

/// Counts of one run.
pub(in crate::command) struct Watch {
    path: PathBuf,
    weights: Arc<Weights>,
    model: Model,
    layers: Vec<u32>,
    old: Option<HotExperts>,
    counts: Counts,
    texts: u64,
}

impl Watch {
    /// For the model in `dir`; a list that is already at `path` must be of this model and is added to.
    pub fn open(path: &Path, dir: &Path, weights: &Arc<Weights>) -> Result<Self> {
        let (shape, layers) = shape(weights, dir)?;
        let model = identity(dir, weights)?;
        let old = path.exists().then(|| read_old(path, weights, &model, "--update-profile")).transpose()?;
        let counts = Counts::new(shape);
        Ok(Self { path: path.to_path_buf(), weights: Arc::clone(weights), model, layers, old, counts, texts: 0 })
    }

    /// Notes that a text begins.
    pub fn begin(&mut self) {
        self.texts += 1;
    }

    /// Counts what a router chose.
    pub fn see(&mut self, event: Event<'_>) {
        let Event::Routed { layer, experts, gates, .. } = event;
        let Some(l) = self.layers.iter().position(|&l| l == layer.0) else { return };
        let first = l * self.counts.shape.experts;
        for (&e, &gate) in experts.iter().zip(gates) {
            self.counts.visits[first + e as usize] += 1.0;
            self.counts.weights[first + e as usize] += f64::from(gate);
        }
    }

    /// Writes the list: counts of this run and of the runs before, the experts that cover them, and how well they do.
    pub fn write(&self) -> Result<()> {
        let shape = self.counts.shape;
        let mut all = self.counts.clone();
        let mut tasks = self.old.as_ref().map(|o| o.tasks.clone()).unwrap_or_default();
        self.old.iter().for_each(|old| all.merge(&old_counts(old, shape), 1.0));
        let tokens = self.counts.layer(0).iter().sum::<f64>() as u64 / shape.top_k as u64;
        match tasks.iter_mut().find(|t| t.name == TASK) {
            Some(t) => (t.samples, t.tokens) = (t.samples + self.texts, t.tokens + tokens),
            None => tasks.push(Task { name: TASK.into(), samples: self.texts, tokens }),
        }
        let hot = routing::by_coverage(&all, COVERAGE);
        let coverage = routing::coverage_by_layer(&hot, &all);
        let list = list_of(&all, &hot, &coverage, &self.layers, tasks, Some(COVERAGE), self.model.clone(), &self.weights);
        Ok(list.write(&self.path)?)
    }
}
