//! What changes while a model runs: slots of experts become pages, buffers or another program's memory, and what comes ahead is given up.

use super::ahead::Verdict;
use super::device::CudaError;
use super::memory::{self, Buffer};
use super::pages::PAGE_TOKENS;
use super::slots::Tiers;
use super::workspace::Workspace;
use super::{Cache, Engine};
use crate::engine::EngineError;
use crate::ids::SeqId;
use crate::tiers;

impl Engine {
    /// Makes the workspace larger, within the budget. Where there is no room it keeps its size and the engine goes on.
    pub(super) fn grow(&mut self, tok: usize, rows: usize) -> Result<(), EngineError> {
        let before = (self.work.capacity_tok, self.work.capacity_rows);
        let needed = Workspace::planned_bytes(&self.plan, &self.spec, tok, rows);
        let more = needed.saturating_sub(self.vram.workspace_bytes);
        self.make_room(more)?;
        self.device.synchronize()?;
        self.decode.forget_graphs();
        // The old one goes first: both together may not fit.
        self.work = self.workspace(0, 0)?;
        let (made, result) = loop {
            match self.workspace(tok, rows) {
                Err(CudaError::Memory { .. }) if self.give_back(more.max(1)).is_ok() => {}
                Err(error) => break (self.workspace(before.0, before.1)?, Err(error.into())),
                Ok(made) => {
                    self.vram.workspace_bytes += more;
                    self.vram.total_bytes += more;
                    break (made, Ok(()));
                }
            }
        };
        self.work = made;
        result
    }

    fn workspace(&self, tok: usize, rows: usize) -> Result<Workspace, CudaError> {
        Workspace::new(&self.device, &self.plan, &self.spec, tok, rows)
    }

    /// Gives every layer so many slots for experts, permanent ones at least; for engines whose experts are not all on the device.
    pub fn set_expert_slots(&mut self, slots: usize) -> Result<(), EngineError> {
        let wanted: Vec<usize> = self.needs.layers.iter().map(|l| slots.clamp(1, l.experts)).collect();
        let plan = self.vram.with(&self.needs, wanted, self.vram.pages);
        if plan.total_bytes > self.vram.budget_bytes {
            let (needed, free) = (memory::gigabytes(plan.total_bytes), memory::gigabytes(self.vram.budget_bytes));
            return Err(CudaError::Memory { needed, free }.into());
        }
        self.resize(&plan.slots)
    }

    fn resize(&mut self, slots: &[usize]) -> Result<(), EngineError> {
        self.device.synchronize()?;
        self.decode.forget_graphs();
        self.store.resize(&self.device, slots)?;
        if let Some(tiers) = self.store.tiers() {
            let slots = tiers.slots().into_iter().map(|s| s.1).collect();
            self.vram = self.vram.with(&self.needs, slots, self.vram.pages);
        }
        Ok(())
    }

    /// Gives up bringing experts ahead where most of them are brought in vain.
    pub(super) fn judge_ahead(&mut self) -> Result<(), EngineError> {
        let Some(tiers) = self.store.tiers().filter(|_| self.ahead > 0 && self.trial.is_none()) else { return Ok(()) };
        let traffic = tiers.traffic()?;
        if traffic.ahead_in_vain() {
            self.notes.push(format!("no more experts are brought ahead: {:.0} % of them were not used", 100.0 * traffic.waste()));
            self.ahead = 0;
            self.decode.forget_graphs();
        }
        Ok(())
    }

    /// Goes by what was faster, once that is known.
    pub(super) fn follow(&mut self, verdict: Verdict) {
        let Verdict { ahead, step_ms: [without, with] } = verdict;
        self.ahead = ahead;
        let what = if ahead > 0 { "experts come a layer ahead" } else { "no experts come a layer ahead" };
        self.notes.push(format!("{what}: a step takes {with:.2} ms with one and {without:.2} ms without"));
    }

    /// Frees so many bytes of slots.
    fn give_back(&mut self, bytes: u64) -> Result<(), EngineError> {
        let before = self.vram.slots.iter().sum::<usize>();
        let given = self
            .tiers()
            .and_then(|_| tiers::plan::give_back(&self.needs.layers, &self.vram.slots, &self.vram.host.permanent, bytes));
        let Some(slots) = given else {
            let needed = memory::gigabytes(self.vram.total_bytes + bytes);
            return Err(CudaError::Memory { needed, free: memory::gigabytes(self.vram.budget_bytes) }.into());
        };
        self.resize(&slots)?;
        let now = self.vram.slots.iter().sum::<usize>();
        self.notes.push(format!("experts have {now} slots instead of {before}: the memory is needed elsewhere"));
        Ok(())
    }

    /// Sees to it that so many bytes more are within the budget.
    fn make_room(&mut self, bytes: u64) -> Result<(), EngineError> {
        match (self.vram.total_bytes + bytes).saturating_sub(self.vram.budget_bytes) {
            0 => Ok(()),
            over => self.give_back(over),
        }
    }

    /// Makes room for `len` tokens of a sequence; slots of experts become pages where the pool has too few.
    pub(super) fn reserve(&mut self, seq: SeqId, len: usize) -> Result<(), EngineError> {
        self.tiers().map_or(Ok(()), Tiers::check)?;
        if self.pages.reserve(seq, len) {
            return Ok(());
        }
        let full = EngineError::CacheFull { capacity_tok: self.pages.capacity_tok() };
        let short = (len - self.cached(seq)).div_ceil(PAGE_TOKENS);
        // A quarter more, so that this does not happen page by page.
        let num_pages = self.pages.num_pages() + short.max(self.pages.num_pages() / 4);
        if self.tiers().is_none()
            || self.grow_cache(num_pages).is_err() && self.grow_cache(self.pages.num_pages() + short).is_err()
        {
            return Err(full);
        }
        if self.pages.reserve(seq, len) { Ok(()) } else { Err(full) }
    }

    /// Moves keys and values into a larger pool.
    fn grow_cache(&mut self, num_pages: usize) -> Result<(), EngineError> {
        let more = (num_pages - self.pages.num_pages()) as u64;
        let largest = self.caches.iter().map(|c| c.keys.bytes()).max().unwrap_or(0) as u64;
        // While it moves, one layer's keys are there twice.
        self.make_room(more * self.needs.page_bytes + largest)?;
        self.device.synchronize()?;
        self.decode.forget_graphs();
        for layer in 0..self.caches.len() {
            let bytes = num_pages * Cache::page(&self.spec.layers[layer].attn, self.cache_kind).0;
            loop {
                let cache = &mut self.caches[layer];
                let old = [Some(&mut cache.keys), cache.values.as_mut()].into_iter().flatten().find(|b| b.bytes() < bytes);
                let Some(old) = old else { break };
                match Buffer::new(&self.device, bytes) {
                    Ok(new) => {
                        self.device.copy(&new, old)?;
                        *old = new;
                    }
                    Err(CudaError::Memory { .. }) => self.give_back(largest.max(1))?,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        self.decode.widen(&self.device, num_pages.min(self.spec.max_positions.div_ceil(PAGE_TOKENS)))?;
        self.pages.grow(num_pages);
        self.vram = self.vram.with(&self.needs, self.vram.slots.clone(), num_pages as u64);
        Ok(())
    }
}
