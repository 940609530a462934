//! Experts that are not all in device memory: slots on the device, everything in host memory, and the kernel that moves experts
//! between them inside the decode graph by the rule of `crate::tiers`.

use super::device::CudaError;
use super::device::{Device, During};
use super::fast::{Arrivals, FetchArgs, SLOT_BYTES, WaveArgs};
use super::launch::{self, Grid, Limits};
use super::load::Residency;
use super::memory::Buffer;
use super::transfer::{HostRuns, Ring};
use crate::tiers::policy::{VISIT, first_scores};
use crate::tiers::{Layer, Policy};
use cudarc::driver::result;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Most experts of a layer; `MOST_MOVES` in `routing.cuh`.
const MOST_EXPERTS: usize = 1024;
/// Bytes of half a ring; a few milliseconds of a link.
const HALF_RING_BYTES: usize = 128 << 20;
/// Counters of the kernel.
const NUM_STATS: usize = 7;
/// Its cells: blocks that have read the state, whose turn it is, waits of the products, counters, pieces that are there.
const TURN_AT: usize = 4;
const WAITED_AT: usize = 8;
const STATS_AT: usize = WAITED_AT + 4 * 4;
const ARRIVED_AT: usize = STATS_AT + 8 * NUM_STATS;
const CELL_BYTES: usize = ARRIVED_AT + 4 * 4 * MOST_EXPERTS;

/// The decay that the kernel takes, 0 for none, and what a visit adds to a score.
fn decay_and_rise(policy: Policy) -> (u32, u32) {
    match policy {
        Policy::Static | Policy::Lru | Policy::Belady => (0, 0),
        Policy::Lfu => (0, 1),
        Policy::Lrfu { shift } => (shift, VISIT),
    }
}

/// The experts of a layer as runs of bytes, equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRuns {
    /// Number of experts.
    pub num: usize,
    /// Bytes of each: the layer's largest.
    pub run_bytes: usize,
    /// First byte and end of what the second half alone reads; nothing where experts differ.
    pub late: (usize, usize),
}

/// The halves of the experts: gate and up, then down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    First,
    Second,
}

/// What went over the link in steps, summed over all layers; waves of prompts are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    /// Experts that steps used, each once a layer and step.
    pub chosen: u64,
    /// Of those, brought into a slot.
    pub fetched: u64,
    /// Of those, read over the link without taking a slot.
    pub direct: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Time in which bytes were on their way, nanoseconds.
    pub busy_ns: u64,
    /// Of that, time in which the products had nothing else to do.
    pub stall_ns: u64,
    /// Layers times steps.
    pub steps: u64,
}

impl Traffic {
    /// Share of the experts used that were in a slot.
    pub fn hit_rate(&self) -> f64 {
        1.0 - (self.fetched + self.direct) as f64 / self.chosen.max(1) as f64
    }

    /// Bytes a second while fetching.
    pub fn link_bytes_s(&self) -> f64 {
        1e9 * self.bytes as f64 / self.busy_ns.max(1) as f64
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            chosen: self.chosen + other.chosen,
            fetched: self.fetched + other.fetched,
            direct: self.direct + other.direct,
            bytes: self.bytes + other.bytes,
            busy_ns: self.busy_ns + other.busy_ns,
            stall_ns: self.stall_ns + other.stall_ns,
            steps: self.steps + other.steps,
        }
    }
}

/// Slots of a layer and what the kernel knows of them.
struct LayerSlots {
    runs: ExpertRuns,
    first_run: usize,
    num_slots: usize,
    policy: Policy,
    slots_at: usize,
    /// Where its part of `Tiers::owners` begins.
    first_slot: usize,
    /// Scores, last visits, steps.
    score: Buffer,
    visited: Buffer,
    now: Buffer,
    /// Where each expert is in host memory.
    host: Buffer,
}

/// All experts in host memory and some on the device.
pub struct Tiers {
    device: Arc<Device>,
    host: HostRuns,
    slots: Buffer,
    /// Expert of every slot, layer by layer.
    owners: Buffer,
    layers: HashMap<u32, LayerSlots>,
    cells: Buffer,
    ring: Ring,
    /// The list that the products take: those that are there first, or a wave's part, with its length.
    list: Buffer,
    num_wave: Buffer,
    /// The owners as last asked for; `None` once a kernel may have moved any.
    known: RefCell<Option<Vec<u32>>>,
    ns_per_byte: f32,
}

impl Tiers {
    /// Makes room for the experts of each layer on the host, and for so many of each on the device.
    pub(super) fn new(
        device: &Arc<Device>,
        layers: &BTreeMap<u32, ExpertRuns>,
        residency: &Residency,
    ) -> Result<Self, CudaError> {
        if let Some((layer, runs)) = layers.iter().find(|(_, r)| r.num > MOST_EXPERTS) {
            let num = runs.num;
            return Err(CudaError::Unsupported(format!(
                "layer {layer} has {num} experts, at most {MOST_EXPERTS} can be kept outside of the GPU's memory"
            )));
        }
        let runs = layers.values().flat_map(|r| std::iter::repeat_n(r.run_bytes, r.num)).collect();
        let host = HostRuns::new(device, runs)?;
        let cells = Buffer::new(device, CELL_BYTES)?;
        cells.clear()?;
        let (mut slots_at, mut first_run, mut owners) = (0, 0, Vec::new());
        let mut states = HashMap::new();
        let of = residency.layers.iter().zip(residency.slots.iter().flatten());
        for ((&layer, &runs), (traffic, &num_slots)) in layers.iter().zip(of) {
            let num_slots = num_slots.clamp(1, runs.num);
            let policy = residency.policy.unwrap_or(Policy::lrfu(traffic.experts, traffic.top_k));
            let first: Vec<u32> = traffic.residents(num_slots).into_iter().map(u32::from).collect();
            let addresses: Vec<u64> = (0..runs.num).map(|e| host.at(first_run + e)).collect();
            let state = LayerSlots {
                runs,
                first_run,
                num_slots,
                slots_at,
                policy,
                first_slot: owners.len(),
                score: Buffer::from_slice(device, &first_scores(policy, traffic))?,
                visited: Buffer::from_slice(device, &vec![0u32; runs.num])?,
                now: Buffer::from_slice(device, &[0u32])?,
                host: Buffer::from_slice(device, &addresses)?,
            };
            states.insert(layer, state);
            owners.extend_from_slice(&first);
            slots_at += num_slots * runs.run_bytes;
            first_run += runs.num;
        }
        let slots = Buffer::new(device, slots_at)?;
        let ring = Ring::new(device, half_ring_bytes(layers.values()))?;
        let most = layers.values().map(|r| r.num).max().unwrap_or(0);
        let (list, num_wave) = (Buffer::new(device, most * SLOT_BYTES)?, Buffer::new(device, 4)?);
        let (owners, known) = (Buffer::from_slice(device, &owners)?, RefCell::new(None));
        let ns_per_byte = residency.link_limit.map_or(0.0, |rate| (1e9 / rate) as f32);
        Ok(Self {
            device: Arc::clone(device),
            host,
            slots,
            owners,
            layers: states,
            cells,
            ring,
            list,
            num_wave,
            known,
            ns_per_byte,
        })
    }

    /// Address of an expert in host memory.
    pub(super) fn host(&self, layer: u32, expert: u32) -> u64 {
        self.host.at(self.layers[&layer].first_run + expert as usize)
    }

    /// Fills part of an expert's run in host memory.
    pub(super) fn write(&mut self, layer: u32, expert: u32, at: usize, src: &[u8]) {
        self.host.write(self.layers[&layer].first_run + expert as usize, at, src);
    }

    /// Copies the first residents of a layer to its slots; returns the address of each and its expert.
    pub(super) fn fill(&self, layer: u32) -> Result<Vec<(u64, u32)>, CudaError> {
        let state = &self.layers[&layer];
        let residents = self.residents(layer)?;
        let each = residents.into_iter().enumerate().map(|(slot, expert)| {
            let to = self.slots.at(state.slots_at + slot * state.runs.run_bytes);
            let from = self.host.bytes(state.first_run + expert as usize);
            // SAFETY: the slot has the length of the run; the run lives as long as `self` and is not written any more.
            unsafe { result::memcpy_htod_async(to, from, self.device.stream()) }.during("copy experts")?;
            Ok((to, expert))
        });
        each.collect()
    }

    /// Whether some experts of a layer have no slot.
    pub(super) fn lacks(&self, layer: u32) -> bool {
        self.layers.get(&layer).is_some_and(|s| s.num_slots < s.runs.num)
    }

    /// How the kernel is launched for a layer.
    pub(super) fn grid(&self, layer: u32, limits: Limits) -> Grid {
        self.layers.get(&layer).map_or(Grid::new([0, 0, 0], 0), |s| launch::fetch(s.runs.num, s.num_slots, limits))
    }

    /// The list that the products take after it.
    pub(super) fn list(&self) -> u64 {
        self.list.at(0)
    }

    /// What products need that run beside it.
    pub(super) fn arrivals(&self, layer: u32, half: Half) -> Arrivals {
        let Some(ExpertRuns { run_bytes, late, .. }) = self.layers.get(&layer).map(|s| s.runs) else { return Arrivals::ZERO };
        let (at, bytes) = match half {
            Half::First => (0, run_bytes - (late.1 - late.0)),
            Half::Second => (1, late.1 - late.0),
        };
        Arrivals {
            pieces: self.cells.at(ARRIVED_AT + at * 4 * MOST_EXPERTS),
            waited: self.cells.at(WAITED_AT + at * 4),
            needed: launch::fetch_pieces(bytes) as i32,
            pad: 0,
        }
    }

    /// What the kernel takes for a layer; `ids` are the `num_pairs` choices, the list is the router's or null, with its length, the tables
    /// are the layer's addresses and descriptors, `beside`: the products run beside it. `None` if all its experts are in slots.
    pub(super) fn fetch(
        &self,
        layer: u32,
        (ids, num_pairs): (u64, usize),
        (list, num_slots): (u64, u64),
        (table, matrices): (u64, u64),
        beside: bool,
    ) -> Option<FetchArgs> {
        let state = self.layers.get(&layer).filter(|_| self.lacks(layer))?;
        self.forget();
        let (shift, rise) = decay_and_rise(state.policy);
        Some(FetchArgs {
            ids,
            list,
            ready: self.list.at(0),
            num_slots,
            owner: self.owners.at(4 * state.first_slot),
            score: state.score.at(0),
            visited: state.visited.at(0),
            now: state.now.at(0),
            host: state.host.at(0),
            table,
            matrices,
            counter: self.cells.at(0),
            turn: self.cells.at(TURN_AT),
            arrived: self.cells.at(ARRIVED_AT),
            waited: if beside { self.cells.at(WAITED_AT) } else { 0 },
            stats: self.cells.at(STATS_AT),
            slots: self.slots.at(state.slots_at),
            num_pairs: num_pairs as i32,
            e: state.runs.num as i32,
            s: state.num_slots as i32,
            run_bytes: state.runs.run_bytes as i32,
            late: state.runs.late.0 as i32,
            late_end: state.runs.late.1 as i32,
            shift: shift as i32,
            rise: rise as i32,
            ns_per_byte: self.ns_per_byte,
        })
    }

    /// What is known of the slots no longer holds.
    pub(super) fn forget(&self) {
        *self.known.borrow_mut() = None;
    }

    /// Ranges of a layer's experts that together are all of them, each with no more missing ones than half a ring holds; `None` if
    /// `num_pairs` choices are too few to need most of them.
    pub(super) fn waves(&self, layer: u32, num_pairs: usize) -> Result<Option<Vec<Range<usize>>>, CudaError> {
        let Some(state) = self.layers.get(&layer).filter(|s| num_pairs >= s.runs.num && s.num_slots < s.runs.num) else {
            return Ok(None);
        };
        if self.known.borrow().is_none() {
            let mut owners = vec![0u32; self.owners.bytes() / 4];
            self.device.download(&mut owners, &self.owners, 0)?;
            *self.known.borrow_mut() = Some(owners);
        }
        let missing = self.missing(layer, 0..state.runs.num);
        Ok(Some(waves(&missing, state.runs.num, (self.ring.half_bytes() / state.runs.run_bytes).max(1))))
    }

    /// Experts of a range that have no slot, as far as is known.
    fn missing(&self, layer: u32, range: Range<usize>) -> Vec<usize> {
        let (state, known) = (&self.layers[&layer], self.known.borrow());
        let mut there = vec![false; state.runs.num];
        let residents = known.iter().flat_map(|owners| &owners[state.first_slot..][..state.num_slots]);
        residents.for_each(|&e| there[e as usize] = true);
        range.filter(|&e| !there[e]).collect()
    }

    /// Sends the missing experts of a wave on their way; returns what the kernel takes that makes its list, at the two addresses
    /// returned with it.
    pub(super) fn send(
        &self,
        layer: u32,
        range: Range<usize>,
        list: u64,
        num_slots: u64,
    ) -> Result<Option<(WaveArgs, u64, u64)>, CudaError> {
        let Some(state) = self.layers.get(&layer) else { return Ok(None) };
        let missing = self.missing(layer, range.clone());
        let stage = self.ring.fill(missing.iter().map(|e| self.host.bytes(state.first_run + e)))?;
        let (wave, num_wave) = (self.list.at(0), self.num_wave.at(0));
        let args = WaveArgs {
            list,
            num_slots,
            wave,
            num_wave,
            owner: self.owners.at(4 * state.first_slot),
            host: state.host.at(0),
            stage,
            s: state.num_slots as i32,
            e: state.runs.num as i32,
            first: range.start as i32,
            end: range.end as i32,
            run_bytes: state.runs.run_bytes as i32,
        };
        Ok(Some((args, wave, num_wave)))
    }

    /// The kernels launched so far are the last to read the wave that was sent.
    pub(super) fn sent(&self) -> Result<(), CudaError> {
        self.ring.release()
    }

    /// Slots of each layer, in order.
    pub fn slots(&self) -> Vec<(u32, usize)> {
        let mut slots: Vec<(u32, usize)> = self.layers.iter().map(|(&l, s)| (l, s.num_slots)).collect();
        slots.sort_unstable();
        slots
    }

    /// Experts in the slots of a layer, once the kernels are done.
    pub fn residents(&self, layer: u32) -> Result<Vec<u32>, CudaError> {
        let Some(state) = self.layers.get(&layer) else { return Ok(Vec::new()) };
        let mut owners = vec![0u32; state.num_slots];
        self.device.download(&mut owners, &self.owners, 4 * state.first_slot)?;
        Ok(owners)
    }

    /// What has gone over the link since this was last asked, once the kernels are done.
    pub fn take_traffic(&self) -> Result<Traffic, CudaError> {
        let mut n = [0u64; NUM_STATS];
        self.device.download(&mut n, &self.cells, STATS_AT)?;
        self.device.upload(&self.cells, STATS_AT, &[0u64; NUM_STATS])?;
        let [chosen, fetched, direct, bytes, busy_ns, stall_ns, steps] = n;
        Ok(Traffic { chosen, fetched, direct, bytes, busy_ns, stall_ns, steps })
    }
}

/// Bytes of half a ring for these layers: the largest expert at least, no more than a layer.
fn half_ring_bytes<'a>(layers: impl Iterator<Item = &'a ExpertRuns>) -> usize {
    layers.map(|r| HALF_RING_BYTES.min(r.num * r.run_bytes).max(r.run_bytes)).max().unwrap_or(0)
}

/// Bytes on the device beside the slots: the ring.
pub(super) fn ring_bytes(layers: &[Layer]) -> u64 {
    let runs: Vec<_> =
        layers.iter().map(|l| ExpertRuns { num: l.experts, run_bytes: l.slot_bytes as usize, late: (0, 0) }).collect();
    2 * half_ring_bytes(runs.iter()) as u64
}

/// Ranges of `num` experts with at most `most` of the missing ones each.
fn waves(missing: &[usize], num: usize, most: usize) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = missing.iter().copied().step_by(most).skip(1).collect();
    starts.insert(0, 0);
    let ends = starts[1..].iter().copied().chain([num]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}

/// The rule of `crate::tiers` for one layer as the kernel follows it, slot by slot: the missing experts in order of index take the
/// slots of the least worthy residents outside the step, in order of worth.
#[derive(Clone, Debug)]
pub struct Twin {
    policy: Policy,
    /// Expert of each slot, `[S]`.
    owner: Vec<u32>,
    score: Vec<u32>,
    visited: Vec<u32>,
    now: u32,
}

impl Twin {
    /// With the first residents of a layer.
    pub fn new(policy: Policy, layer: &Layer, slots: usize) -> Self {
        let owner = layer.residents(slots).into_iter().map(u32::from).collect();
        Self { policy, owner, score: first_scores(policy, layer), visited: vec![0; layer.experts], now: 0 }
    }

    /// Experts of the slots.
    pub fn owner(&self) -> &[u32] {
        &self.owner
    }

    /// One step in which these experts were chosen, in any order and number; returns how many were not there.
    pub fn step(&mut self, ids: &[u32]) -> usize {
        self.now += 1;
        let (shift, rise) = decay_and_rise(self.policy);
        if shift > 0 {
            self.score.iter_mut().for_each(|s| *s -= s.div_ceil(1 << shift));
        }
        let mut missing = ids.to_vec();
        missing.sort_unstable();
        missing.dedup();
        for &e in &missing {
            self.score[e as usize] += rise;
            self.visited[e as usize] = self.now;
        }
        missing.retain(|e| !self.owner.contains(e));
        let outside = |s: &usize| self.visited[self.owner[*s] as usize] < self.now;
        let mut others: Vec<usize> = (0..self.owner.len()).filter(outside).collect();
        let worth = |e: u32| (self.score[e as usize], self.visited[e as usize], Reverse(e));
        others.sort_unstable_by_key(|&s| worth(self.owner[s]));
        missing.iter().zip(others).for_each(|(&e, s)| self.owner[s] = e);
        missing.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::Cache;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// The twin hits whenever the rule does. Exact; fails if equal worth is broken by the higher index, if a chosen resident may
    /// leave, or if scores decay after they rise.
    #[test]
    fn the_twin_follows_the_rule() {
        let mut random = Random(3);
        for (experts, top_k, slots) in [(8, 2, 2), (16, 4, 5), (40, 8, 20), (64, 8, 63)] {
            let visits = (0..experts as u64).map(|e| e * e % 7).collect();
            let layer = Layer { experts, top_k, slot_bytes: 1, visits };
            for policy in [Policy::Static, Policy::Lru, Policy::Lfu, Policy::Lrfu { shift: 2 }, Policy::Lrfu { shift: 6 }] {
                let (mut twin, mut rule) = (Twin::new(policy, &layer, slots), Cache::new(policy, &layer, slots));
                for _ in 0..300 {
                    let mut ids: Vec<u32> = (0..top_k).map(|_| random.below(experts) as u32).collect();
                    let missing = twin.step(&ids);
                    ids.sort_unstable();
                    ids.dedup();
                    let hits = rule.step(&ids.iter().map(|&e| e as u16).collect::<Vec<_>>());
                    assert_eq!(missing, ids.len() - hits, "{policy:?}, {slots} of {experts}");
                }
            }
        }
    }

    /// Every expert is in one wave, and none has more missing ones than fit.
    #[test]
    fn waves_cover_all_experts() {
        assert_eq!(waves(&[], 4, 2), vec![0..4; 1]);
        assert_eq!(waves(&[0, 1, 2, 3], 4, 2), [0..2, 2..4]);
        assert_eq!(waves(&[1, 3, 4, 6, 9], 12, 2), [0..4, 4..9, 9..12]);
    }
}
