//! What each router's input says about the choice of the next, while the layers pass by.

use crate::artifact::lookahead::Lookahead;
use crate::artifact::weights::Weights;
use crate::calib::hidden::Hidden;
use crate::calib::lockstep::{Choices, LockstepError};
use crate::calib::lookahead::{Map, Regression};
use crate::calib::windows::{self, Window};
use crate::files::FileError;
use std::ops::Range;
use std::sync::Arc;

/// How well the choices of one router were named by what the router before it saw, of held-out tokens.
pub(super) struct Recall {
    /// The layer whose router was foreseen.
    pub layer: u32,
    /// Share of its choices among as many named by its own router, applied a layer early.
    pub next_router: f64,
    /// The same by the map.
    pub map: f64,
}

/// Regressions of one layer after the other.
pub(super) struct Foresight {
    weights: Arc<Weights>,
    top_k: usize,
    /// Rows of windows, and whether they are held out.
    windows: Vec<(Range<usize>, bool)>,
    /// Inputs of the router before, and of the router whose layer runs.
    inputs: [Hidden; 2],
    /// The layer that runs.
    layer: Option<u32>,
    fit: Option<Regression>,
    /// Choices of the router whose layer runs, of held-out rows in order.
    chosen: Vec<u16>,
    /// What was learned.
    pub maps: Lookahead,
    /// And what it is worth.
    pub recall: Vec<Recall>,
}

impl Foresight {
    /// For windows in the order in which they are run, each held out or not; hidden states beyond `max_memory` go to a scratch file.
    pub fn new(
        weights: &Arc<Weights>,
        top_k: usize,
        windows: &[Window],
        held_out: &[bool],
        max_memory: u64,
    ) -> Result<Self, FileError> {
        let len = windows.iter().map(|w| w.tokens.len()).sum::<usize>() * weights.spec().width;
        let windows = windows::rows(windows).zip(held_out.iter().copied()).collect();
        let hidden = || Hidden::new(len, (3 * 4 * len) as u64 <= max_memory);
        Ok(Self {
            weights: Arc::clone(weights),
            top_k,
            windows,
            inputs: [hidden()?, hidden()?],
            layer: None,
            fit: None,
            chosen: Vec::new(),
            maps: Lookahead::default(),
            recall: Vec::new(),
        })
    }

    /// Takes some rows of a layer, after those before them and all of the layer before.
    pub fn see(&mut self, seen: &Choices<'_>) -> Result<(), LockstepError> {
        if self.layer != Some(seen.layer as u32) {
            self.turn(Some(seen.layer as u32))?;
        }
        let width = self.weights.spec().width;
        let num_tok = seen.inputs.len() / width;
        let (k, e) = (self.top_k, seen.logits.len() / num_tok.max(1));
        let rows = seen.first_row..seen.first_row + num_tok;
        for (window, held_out) in self.windows.iter().filter(|(w, _)| w.start < rows.end && rows.start < w.end) {
            let at = window.start.max(rows.start)..window.end.min(rows.end);
            let here = at.start - rows.start..at.end - rows.start;
            if *held_out {
                self.chosen.extend(seen.experts[here.start * k..here.end * k].iter().map(|&e| e as u16));
            } else if let Some(fit) = &mut self.fit {
                let before = self.inputs[0].read(at.start * width..at.end * width)?;
                fit.add(&before, &seen.logits[here.start * e..here.end * e]);
            }
        }
        Ok(self.inputs[1].write(rows.start * width, seen.inputs)?)
    }

    /// Takes the last layer to its end.
    pub fn finish(&mut self) -> Result<(), LockstepError> {
        self.turn(None)
    }

    /// Ends the layer that runs and begins the next.
    fn turn(&mut self, next: Option<u32>) -> Result<(), LockstepError> {
        let ended = self.layer;
        if let (Some(layer), Some(fit)) = (ended, self.fit.take()) {
            let router = fit.prior().clone();
            let experts = router.shift.len();
            let (bytes, map) = fit.solve().rounded();
            let mut named = [0; 2];
            let mut choices = self.chosen.as_slice();
            let width = self.weights.spec().width;
            for (rows, _) in self.windows.iter().filter(|(_, held_out)| *held_out) {
                let x = self.inputs[0].read(rows.start * width..rows.end * width)?;
                let (ids, rest) = choices.split_at(rows.len() * self.top_k);
                named[0] += router.named(&x, ids, self.top_k);
                named[1] += map.named(&x, ids, self.top_k);
                choices = rest;
            }
            let [next_router, map] = named.map(|n| n as f64 / self.chosen.len().max(1) as f64);
            self.recall.push(Recall { layer, next_router, map });
            self.maps.insert(layer, [experts, width], bytes);
        }
        self.chosen.clear();
        self.inputs.swap(0, 1);
        self.layer = next;
        if let (Some(ended), Some(next)) = (ended, next) {
            self.fit = Some(Regression::new(Map::next_router(&self.weights, ended, next)?));
        }
        Ok(())
    }
}
