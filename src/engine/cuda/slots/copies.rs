//! Copies of experts in host memory, and the files behind those that have none.

use super::super::cold::{Ahead, Cold};
use super::super::device::{CudaError, Device};
use super::super::fast::PlaceArgs;
use super::super::memory::ALIGN;
use super::super::transfer::{HostRuns, Staged};
use super::twin::{NOBODY, Twin};
use super::{ExpertRuns, LayerSlots, Tiers, runs};
use crate::files::{ReadError, Scratch};
use crate::tiers::Layer;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Where an expert is said to lie that has no copy in host memory: nothing is ever there, and nothing may read it.
const NOWHERE: u64 = ALIGN as u64;

/// Copies of a layer's experts in host memory.
pub(super) struct Copies {
    /// Its first run of `HostSide::runs`.
    pub(super) first: usize,
    /// Which expert each is of, and who goes when another comes.
    pub(super) rule: Twin,
    /// Copy of each expert.
    pub(super) of: Vec<Option<u32>>,
}

/// What the host holds.
pub(super) struct HostSide {
    pub(super) runs: HostRuns,
    pub(super) layers: HashMap<u32, Copies>,
    pub(super) ahead: Option<Ahead<Staged>>,
    pub(super) disk: Disk,
}

impl HostSide {
    pub(super) fn run(&self, layer: u32, expert: u32) -> Option<usize> {
        let copies = &self.layers[&layer];
        copies.of[expert as usize].map(|c| copies.first + c as usize)
    }

    pub(super) fn address(&self, layer: u32, expert: u32) -> u64 {
        self.run(layer, expert).map_or(NOWHERE, |run| self.runs.at(run))
    }
}

/// What was read from the disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Disk {
    pub(super) experts: u64,
    pub(super) bytes: u64,
    pub(super) ns: u64,
}

/// Where experts are read from that are neither in a slot nor in host memory.
pub(in crate::engine::cuda) enum Backing {
    /// Every expert is in one of both.
    None,
    /// Files.
    Files(Arc<Cold>),
    /// A file that is filled while the model loads.
    Filling(Scratch),
}

/// What the kernel takes that tells which copies came or went, and whether those that were to come did.
pub(in crate::engine::cuda) type Brought = (PlaceArgs, Result<(), ReadError>);

impl Tiers {
    /// Choices of a layer that may be brought into host memory at a time.
    pub(in crate::engine::cuda) fn most_pairs(&self, layer: u32) -> usize {
        let copies = self.host.borrow().layers.get(&layer).map(|c| c.rule.owner.len());
        copies.filter(|_| self.reads()).unwrap_or(usize::MAX)
    }

    /// Reads those of a step's experts that are neither in a slot nor in host memory, and waits for them. Returns what the kernel
    /// takes that tells the others, if there were any, and whether they came: where they did not, what had to make room for them
    /// is gone all the same, and the kernel has to say so before anything else runs. The kernels before it must be done.
    pub(in crate::engine::cuda) fn bring(
        &self,
        layer: u32,
        ids: &[u32],
        list: (u64, u64),
        table: u64,
        matrices: u64,
    ) -> Result<Option<Brought>, CudaError> {
        let (Backing::Files(cold), Some(state)) = (&self.backing, self.layers.get(&layer)) else { return Ok(None) };
        let mut in_slot = vec![false; state.runs.num];
        self.residents(layer)?.into_iter().for_each(|e| in_slot[e as usize] = true);
        let host = &mut *self.host.borrow_mut();
        let Some(copies) = host.layers.get_mut(&layer) else { return Ok(None) };
        let before = copies.rule.owner.clone();
        let (_, mut moves) = copies.rule.step_beside(ids, |e| in_slot[e as usize]);
        if moves.is_empty() {
            return Ok(None);
        }
        moves.sort_unstable();
        let runs: Vec<usize> = moves.iter().map(|m| copies.first + m.0).collect();
        let began = Instant::now();
        let jobs = moves.iter().map(|m| state.first_run + m.1 as usize).zip(host.runs.some_mut(&runs));
        let read = cold.read_all(jobs.collect());
        let mut told: Vec<u64> = Vec::new();
        for (&(copy, expert), &run) in moves.iter().zip(&runs) {
            if let Some(left) = Some(before[copy]).filter(|&e| e != NOBODY) {
                copies.of[left as usize] = None;
                told.extend([u64::from(left), NOWHERE, u64::from(in_slot[left as usize])]);
            }
            if read.is_ok() {
                copies.of[expert as usize] = Some(copy as u32);
                told.extend([u64::from(expert), host.runs.at(run), 0]);
            } else {
                copies.rule.owner[copy] = NOBODY;
            }
        }
        host.disk.experts += moves.len() as u64;
        host.disk.bytes += (moves.len() * state.runs.run_bytes) as u64;
        host.disk.ns += began.elapsed().as_nanos() as u64;
        self.device.upload(&self.moves, 0, &told)?;
        let (list, num_slots) = list;
        let (moves, num_moves) = (self.moves.at(0), (told.len() / 3) as i32);
        let args = PlaceArgs { moves, host: state.host.at(0), table, matrices, list, num_slots, num_moves };
        Ok(Some((args, read)))
    }

    /// Has what prompts need of a layer and of the one behind it read, where it is on the disk alone.
    pub(super) fn read_ahead(&self, layer: u32) {
        let cold = |layer: u32, host: &HostSide| -> Vec<usize> {
            let state = &self.layers[&layer];
            let missing = self.missing(layer, 0..state.runs.num).into_iter();
            missing.filter(|&e| host.run(layer, e as u32).is_none()).map(|e| state.first_run + e).collect()
        };
        let host = &mut *self.host.borrow_mut();
        let runs: Vec<usize> = self.layers.range(layer..).take(2).flat_map(|(&l, _)| cold(l, host)).collect();
        host.ahead.iter_mut().for_each(|ahead| ahead.plan(&runs));
    }

    /// Appends an expert to the ring that is on the disk alone.
    pub(super) fn push_cold(&self, state: &LayerSlots, expert: usize, host: &mut HostSide) -> Result<(), CudaError> {
        let began = Instant::now();
        let room = host.ahead.as_mut().and_then(|ahead| ahead.take(state.first_run + expert));
        let room = room.ok_or_else(|| threads("a thread that reads experts is gone"))??;
        host.disk.ns += began.elapsed().as_nanos() as u64;
        host.disk.experts += 1;
        host.disk.bytes += state.runs.run_bytes as u64;
        self.ring.push(&room.as_slice()[..state.runs.run_bytes])?;
        room.release(self.device.copy_stream())?;
        if let Some(ahead) = &mut host.ahead {
            ahead.give_back(room);
        }
        Ok(())
    }
}

pub(super) fn threads(error: impl std::fmt::Display) -> CudaError {
    CudaError::Driver { what: "read experts", error: error.to_string() }
}

/// Memory that experts come from the disk into.
pub(super) fn rooms<'a>(device: &Arc<Device>, layers: impl Iterator<Item = &'a ExpertRuns>) -> Result<Vec<Staged>, CudaError> {
    let (num, bytes) = staging(layers);
    (0..num).map(|_| Staged::new(device, bytes)).collect()
}

/// Rooms that experts come from the disk into, and the bytes of each: enough for the reads under way and the copies behind them,
/// but no more than a quarter of a gigabyte, or of a layer.
fn staging<'a>(layers: impl Iterator<Item = &'a ExpertRuns>) -> (usize, usize) {
    let (num, bytes) = layers.fold((0, 0), |(num, bytes), r| (r.num.max(num), r.run_bytes.max(bytes)));
    (((256 << 20) / bytes.max(1)).min(16).min(num / 4).max(2), bytes)
}

/// Page-locked bytes that experts of these layers come from the disk through.
pub(in crate::engine::cuda) fn staging_bytes(layers: &[Layer]) -> u64 {
    let (num, bytes) = staging(runs(layers).iter());
    (num * bytes) as u64
}
