//! Experts that are not all in device memory: slots on the device, copies in host memory, the rest on the disk, and the kernel that
//! moves experts from host memory into slots inside the decode graph by the rule of `crate::tiers`.
//!
//! Where some experts are on the disk alone, a step leaves the graph: after each router the host sees which experts were chosen,
//! reads those that are nowhere else into host memory, by the same rule, and the rest of the layer follows.

mod copies;
mod lookahead;
mod traffic;
mod twin;

pub(super) use copies::{Backing, staging_bytes};
pub(super) use lookahead::{Guess, GuessOf};
pub use traffic::Traffic;
pub use twin::Twin;

use copies::{Copies, Disk, HostSide, rooms, threads};
use twin::decay_and_rise;

use super::cold::{Ahead, Cold, Piece};
use super::device::{CudaError, Device};
use super::fast::{Arrivals, FetchArgs, SLOT_BYTES, TierSlots, WaveArgs};
use super::launch::{self, FetchLaunch, Limits};
use super::load::Residency;
use super::memory::{Buffer, Event};
use super::transfer::{HostRuns, Ring};
use crate::tiers::policy::first_scores;
use crate::tiers::{Layer, Policy};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Most experts of a layer; `MOST_MOVES` in `routing.cuh`.
const MOST_EXPERTS: usize = 1024;
/// What the driver rounds large allocations up to.
const ALLOCATION_BYTES: usize = 2 << 20;
/// Bytes of half a ring; a few milliseconds of a link.
const HALF_RING_BYTES: usize = 128 << 20;
/// Counters of the kernel.
const NUM_STATS: usize = 9;
/// Its cells: blocks that have read the state, launches so far, waits of the products, blocks of the first half that are through, counters,
/// what was brought ahead, pieces that are there.
const LAUNCHES_AT: usize = 4;
const WAITED_AT: usize = 8;
const THROUGH_AT: usize = WAITED_AT + 2 * 4;
const STATS_AT: usize = THROUGH_AT + 8;
const AHEAD_AT: usize = STATS_AT + 8 * NUM_STATS;
const ARRIVED_AT: usize = AHEAD_AT + 2 * AHEAD_BYTES;
const CELL_BYTES: usize = ARRIVED_AT + 2 * 4 * 4 * MOST_EXPERTS;
/// Bytes of an `AheadSet` in `tiers.cu`, and what it holds at most.
const AHEAD_BYTES: usize = 48 + MOST_AHEAD * (4 + 8 + 8);
pub(super) const MOST_AHEAD: usize = 32;
/// Guesses that the kernel looks at, `MOST_GUESSES` there.
pub(super) const MOST_GUESSES: usize = 256;

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

/// Slots of a layer and what the kernel knows of them.
struct LayerSlots {
    runs: ExpertRuns,
    /// Its experts among those of all layers, and its part of `Tiers::owners`.
    first_run: usize,
    num_slots: usize,
    /// Slots whose experts never leave, the first.
    permanent: usize,
    policy: Policy,
    /// Experts by use.
    ranked: Vec<u16>,
    slots: Buffer,
    /// Scores, last visits, steps.
    score: Buffer,
    visited: Buffer,
    now: Buffer,
    /// Where each expert's copy is in host memory.
    host: Buffer,
}

impl LayerSlots {
    fn slot(&self, slot: usize) -> u64 {
        self.slots.at(slot * self.runs.run_bytes)
    }
}

/// Experts in slots on the device, in host memory, and on the disk.
pub struct Tiers {
    device: Arc<Device>,
    host: RefCell<HostSide>,
    /// Expert of every slot, room for all experts of each layer.
    owners: Buffer,
    layers: BTreeMap<u32, LayerSlots>,
    backing: Backing,
    /// Arrivals, then the counters.
    cells: Buffer,
    ring: Ring,
    /// The list that the products take: those that are there first, or a wave's part, with its length.
    list: Buffer,
    num_wave: Buffer,
    guesses: Buffer,
    /// bf16 `[E, D]` of the layers whose routers are foreseen.
    maps: BTreeMap<u32, Buffer>,
    /// Between the kernels and what is brought beside them, and whether there is such.
    fork: Event,
    forked: Cell<bool>,
    /// The layer that the last launch named experts for.
    awaited: Cell<Option<u32>>,
    /// Copies that came or went.
    moves: Buffer,
    /// The owners as last asked for; `None` once a kernel may have moved any.
    known: RefCell<Option<Vec<u32>>>,
    ns_per_byte: f32,
    /// A layer has lost its slots.
    lost: bool,
}

impl Tiers {
    /// Makes room for the experts of each layer, as planned.
    pub(super) fn new(
        device: &Arc<Device>,
        layers: &BTreeMap<u32, ExpertRuns>,
        residency: &Residency,
        backing: Backing,
    ) -> Result<Self, CudaError> {
        if let Some((layer, runs)) = layers.iter().find(|(_, r)| r.num > MOST_EXPERTS) {
            let num = runs.num;
            return Err(CudaError::Unsupported(format!(
                "layer {layer} has {num} experts, at most {MOST_EXPERTS} can be kept outside of the GPU's memory"
            )));
        }
        let plan = &residency.vram;
        let copies = layers.values().zip(&plan.host.slots).flat_map(|(r, &n)| std::iter::repeat_n(r.run_bytes, n));
        let runs = HostRuns::new(device, copies.collect(), residency.nodes.as_ref(), residency.locked_limit)?;
        let mut host = HostSide { runs, layers: HashMap::new(), ahead: None, disk: Disk::default() };
        let cells = Buffer::new(device, CELL_BYTES)?;
        cells.clear()?;
        let (mut first_run, mut first_copy) = (0, 0);
        let (mut owners, mut states) = (Vec::new(), BTreeMap::new());
        for (i, (&layer, &runs)) in layers.iter().enumerate() {
            let (traffic, num_slots, permanent) = (&residency.needs.layers[i], plan.slots[i], plan.host.permanent[i]);
            let policy = residency.policy.unwrap_or(Policy::lrfu(traffic.experts, traffic.top_k));
            let ranked = traffic.ranked();
            let mut of = vec![None; runs.num];
            let copied: Vec<u32> = ranked[permanent..][..plan.host.slots[i]].iter().map(|&e| u32::from(e)).collect();
            copied.iter().zip(0..).for_each(|(&e, copy)| of[e as usize] = Some(copy));
            let rule = Twin::new(policy, traffic, 0).holding(copied);
            host.layers.insert(layer, Copies { first: first_copy, rule, of });
            let addresses: Vec<u64> = (0..runs.num as u32).map(|e| host.address(layer, e)).collect();
            let mut owner = vec![0; runs.num];
            owner.iter_mut().zip(&ranked[..num_slots]).for_each(|(o, &e)| *o = u32::from(e));
            owners.extend(owner);
            let state = LayerSlots {
                runs,
                first_run,
                num_slots,
                permanent,
                policy,
                ranked,
                slots: Buffer::new(device, num_slots * runs.run_bytes)?,
                score: Buffer::from_slice(device, &first_scores(policy, traffic))?,
                visited: Buffer::from_slice(device, &vec![0u32; runs.num])?,
                now: Buffer::from_slice(device, &[0u32])?,
                host: Buffer::from_slice(device, &addresses)?,
            };
            states.insert(layer, state);
            first_run += runs.num;
            first_copy += plan.host.slots[i];
        }
        if let Backing::Files(cold) = &backing {
            host.ahead = Some(Ahead::new(cold, rooms(device, layers.values())?));
        }
        let most = layers.values().map(|r| r.num).max().unwrap_or(0);
        let maps = residency.lookahead.layers().map(|(l, map)| Ok((l, Buffer::from_slice(device, map)?)));
        let tiers = Self {
            device: Arc::clone(device),
            host: RefCell::new(host),
            owners: Buffer::from_slice(device, &owners)?,
            layers: states,
            backing,
            cells,
            ring: Ring::new(device, half_ring_bytes(layers.values()))?,
            list: Buffer::new(device, most * SLOT_BYTES)?,
            num_wave: Buffer::new(device, 4)?,
            fork: Event::new(device)?,
            forked: Cell::new(false),
            awaited: Cell::new(None),
            guesses: Buffer::new(
                device,
                4 * most * residency.needs.layers.iter().map(|l| MOST_GUESSES / l.top_k.max(1)).max().unwrap_or(0),
            )?,
            maps: maps.collect::<Result<_, CudaError>>()?,
            moves: Buffer::new(device, 2 * 24 * most)?,
            known: RefCell::new(Some(owners)),
            ns_per_byte: residency.link_limit.map_or(0.0, |rate| (1e9 / rate) as f32),
            lost: false,
        };
        Ok(tiers)
    }

    /// Slots of a layer and the byte at which an expert's begins, if it has one.
    pub(super) fn slot(&self, layer: u32, expert: u32) -> Result<Option<(&Buffer, usize)>, CudaError> {
        self.know()?;
        let (state, known) = (&self.layers[&layer], self.known.borrow());
        let mut owners = known.iter().flat_map(|o| &o[state.first_run..][..state.num_slots]);
        Ok(owners.position(|&o| o == expert).map(|slot| (&state.slots, slot * state.runs.run_bytes)))
    }

    /// Address of an expert's copy in host memory, if it has one.
    pub(super) fn copy(&self, layer: u32, expert: u32) -> Option<u64> {
        let host = self.host.borrow();
        host.run(layer, expert).map(|run| host.runs.at(run))
    }

    /// Where the kernels find an expert: in its slot, in host memory, or at an address at which nothing lies.
    pub(super) fn place(&self, layer: u32, expert: u32) -> Result<u64, CudaError> {
        let slot = self.slot(layer, expert)?.map(|(slots, at)| slots.at(at));
        Ok(slot.unwrap_or_else(|| self.host.borrow().address(layer, expert)))
    }

    /// Fills part of an expert's run, wherever it lies but in a slot.
    pub(super) fn write(&mut self, layer: u32, expert: u32, at: usize, src: &[u8]) -> Result<(), CudaError> {
        let state = &self.layers[&layer];
        if let Backing::Filling(scratch) = &mut self.backing {
            scratch.write_at(start_of(&self.layers, state.first_run + expert as usize) + at as u64, src)?;
        }
        let host = self.host.get_mut();
        if let Some(run) = host.run(layer, expert) {
            host.runs.write(run, at, src);
        }
        Ok(())
    }

    /// Whether what is written is also to be read again from a file of its own.
    pub(super) fn is_filling(&self) -> bool {
        matches!(self.backing, Backing::Filling(_))
    }

    /// All has been written.
    pub(super) fn seal(&mut self) -> Result<(), CudaError> {
        if let Backing::Filling(scratch) = &self.backing {
            let (mut pieces, mut at) = (Vec::new(), 0);
            for runs in self.layers.values().map(|s| s.runs) {
                for _ in 0..runs.num {
                    pieces.push(vec![Piece { file: 0, at, len: runs.run_bytes, to: 0 }]);
                    at += runs.run_bytes as u64;
                }
            }
            let cold = Arc::new(Cold::new(vec![scratch.reader()?], pieces).map_err(threads)?);
            let rooms = rooms(&self.device, self.layers.values().map(|s| &s.runs))?;
            self.host.get_mut().ahead = Some(Ahead::new(&cold, rooms));
            self.backing = Backing::Files(cold);
        }
        Ok(())
    }

    /// Whether experts may have to be read from the disk, which a graph cannot wait for.
    pub(super) fn reads(&self) -> bool {
        !matches!(self.backing, Backing::None)
    }

    /// Fails if a layer has lost its slots.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let lost = || CudaError::Memory { needed: "more".into(), free: "none for a layer that gave its slots back".into() };
        if self.lost { Err(lost()) } else { Ok(()) }
    }

    /// Whether some experts of a layer have no slot.
    pub(super) fn lacks(&self, layer: u32) -> bool {
        self.layers.get(&layer).is_some_and(|s| s.num_slots < s.runs.num)
    }

    /// How the kernel is launched for a layer, and for the one behind that it looks ahead to; `ahead`: some look ahead.
    pub(super) fn launch(&self, layer: u32, next: Option<u32>, ahead: bool, limits: Limits) -> FetchLaunch {
        let sizes = [Some(layer), next].into_iter().flatten().filter_map(|l| self.layers.get(&l));
        launch::fetch(&sizes.map(|s| (s.runs.num, s.num_slots)).collect::<Vec<_>>(), ahead, limits)
    }

    /// The list that the products take after it.
    pub(super) fn list(&self) -> u64 {
        self.list.at(0)
    }

    /// What products need that run beside it; `blocks`: of the first half, if the second reads what they write itself.
    pub(super) fn arrivals(&self, layer: u32, half: Half, blocks: Option<u32>) -> Arrivals {
        let Some(ExpertRuns { run_bytes, late, .. }) = self.layers.get(&layer).map(|s| s.runs) else { return Arrivals::ZERO };
        let (at, bytes) = match half {
            Half::First => (0, run_bytes - (late.1 - late.0)),
            Half::Second => (1, late.1 - late.0),
        };
        Arrivals {
            pieces: self.cells.at(ARRIVED_AT + at * 4 * MOST_EXPERTS),
            waited: self.cells.at(WAITED_AT + at * 4),
            through: blocks.map_or(0, |_| self.cells.at(THROUGH_AT)),
            needed: launch::fetch_pieces(bytes) as i32,
            blocks: blocks.unwrap_or(0) as i32,
        }
    }

    /// What the kernel knows of a layer, whose addresses and descriptors are these.
    fn known_slots(&self, state: &LayerSlots, (table, matrices): (u64, u64)) -> TierSlots {
        TierSlots {
            owner: self.owners.at(4 * state.first_run),
            score: state.score.at(0),
            visited: state.visited.at(0),
            host: state.host.at(0),
            table,
            matrices,
            slots: state.slot(0),
            e: state.runs.num as i32,
            s: state.num_slots as i32,
            permanent: state.permanent as i32,
            run_bytes: state.runs.run_bytes as i32,
            late: state.runs.late.0 as i32,
            late_end: state.runs.late.1 as i32,
        }
    }

    /// What the kernel takes for a layer; `ids` are the `num_pairs` choices, the list is the router's or null, with its length, the tables
    /// are the layer's addresses and descriptors, `beside`: the products run beside it. `None` if all its experts are in slots.
    pub(super) fn fetch(
        &self,
        layer: u32,
        (ids, num_pairs): (u64, usize),
        (list, num_slots): (u64, u64),
        tables: (u64, u64),
        beside: bool,
    ) -> Option<FetchArgs> {
        let state = self.layers.get(&layer).filter(|_| self.lacks(layer))?;
        self.forget();
        let before = self.awaited.take() == Some(layer);
        let (shift, rise) = decay_and_rise(state.policy);
        Some(FetchArgs {
            ids,
            list,
            ready: self.list.at(0),
            num_slots,
            now: state.now.at(0),
            counter: self.cells.at(0),
            launches: self.cells.at(LAUNCHES_AT),
            arrived: self.cells.at(ARRIVED_AT),
            waited: if beside { self.cells.at(WAITED_AT) } else { 0 },
            through: if beside { self.cells.at(THROUGH_AT) } else { 0 },
            sets: self.cells.at(AHEAD_AT),
            set: self.set(layer) as i32,
            before: before as i32,
            stats: self.cells.at(STATS_AT),
            here: self.known_slots(state, tables),
            num_pairs: num_pairs as i32,
            shift: shift as i32,
            rise: rise as i32,
            ns_per_byte: self.ns_per_byte,
            ..FetchArgs::ZERO
        })
    }

    /// What is known of the slots no longer holds.
    pub(super) fn forget(&self) {
        *self.known.borrow_mut() = None;
    }

    /// Asks who is in the slots, once the kernels are done, unless it is known.
    fn know(&self) -> Result<(), CudaError> {
        if self.known.borrow().is_none() {
            let mut owners = vec![0u32; self.owners.bytes() / 4];
            self.device.download(&mut owners, &self.owners, 0)?;
            *self.known.borrow_mut() = Some(owners);
        }
        Ok(())
    }

    /// Ranges of a layer's experts that together are all of them, each with no more missing ones than half a ring holds; `None` if
    /// `num_pairs` choices are not too many to be brought into host memory, and of `few` tokens or too few to need most experts.
    pub(super) fn waves(&self, layer: u32, num_pairs: usize, few: bool) -> Result<Option<Vec<Range<usize>>>, CudaError> {
        let Some(state) = self.layers.get(&layer).filter(|s| s.num_slots < s.runs.num) else { return Ok(None) };
        if num_pairs <= self.most_pairs(layer) && (few || num_pairs < state.runs.num) {
            return Ok(None);
        }
        self.know()?;
        let missing = self.missing(layer, 0..state.runs.num);
        self.read_ahead(layer);
        Ok(Some(waves(&missing, state.runs.num, (self.ring.half_bytes() / state.runs.run_bytes).max(1))))
    }

    /// Experts of a range that have no slot, as far as is known.
    fn missing(&self, layer: u32, range: Range<usize>) -> Vec<usize> {
        let (state, known) = (&self.layers[&layer], self.known.borrow());
        let mut there = vec![false; state.runs.num];
        let residents = known.iter().flat_map(|owners| &owners[state.first_run..][..state.num_slots]);
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
        let stage = self.ring.begin()?;
        let host = &mut *self.host.borrow_mut();
        for expert in self.missing(layer, range.clone()) {
            match host.run(layer, expert as u32) {
                Some(run) => self.ring.push(host.runs.bytes(run))?,
                None => self.push_cold(state, expert, host)?,
            }
        }
        self.ring.end()?;
        let (wave, num_wave) = (self.list.at(0), self.num_wave.at(0));
        let args = WaveArgs {
            list,
            num_slots,
            wave,
            num_wave,
            owner: self.owners.at(4 * state.first_run),
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

    /// Gives each layer so many slots, from the permanent ones to one for each expert; what stays in one, stays. Where another
    /// process has taken what was freed it makes do with fewer. The kernels must be done, and all addresses of slots are new.
    pub(super) fn resize(&mut self, slots: &[usize]) -> Result<(), CudaError> {
        self.know()?;
        self.lost = true;
        let mut owners = self.known.take().unwrap_or_default();
        for ((&layer, state), &wanted) in self.layers.iter_mut().zip(slots) {
            let wanted = wanted.clamp(state.permanent.max(1), state.runs.num);
            if wanted == state.num_slots {
                continue;
            }
            let owner = &mut owners[state.first_run..][..state.runs.num];
            let mut stays: Vec<u32> = owner[..state.num_slots.min(wanted)].to_vec();
            let others = state.ranked.iter().map(|&e| u32::from(e)).filter(|e| !owner[..state.num_slots].contains(e));
            stays.extend(others.take(wanted - stays.len()));
            let host = self.host.get_mut();
            // What has a copy comes from there, what has a slot only waits in ordinary memory while the slots are made anew.
            let mut kept: HashMap<u32, Vec<u8>> = HashMap::new();
            for (slot, &expert) in stays.iter().enumerate().filter(|s| host.run(layer, *s.1).is_none()) {
                let mut bytes = vec![0; state.runs.run_bytes];
                match &self.backing {
                    _ if slot < state.num_slots => self.device.download(&mut bytes, &state.slots, slot * state.runs.run_bytes)?,
                    Backing::Files(cold) => cold.read_all(vec![(state.first_run + expert as usize, &mut bytes)])?,
                    _ => return Err(threads("an expert without a slot has no copy")),
                }
                kept.insert(expert, bytes);
            }
            state.slots = Buffer::new(&self.device, 0)?;
            let (made, room) = fewer(wanted, state.permanent.max(1), |n| Buffer::new(&self.device, n * state.runs.run_bytes))?;
            (state.num_slots, state.slots) = (made, room);
            stays.truncate(made);
            for (slot, expert) in stays.iter().enumerate() {
                let bytes = match host.run(layer, *expert) {
                    Some(run) => host.runs.bytes(run),
                    None => &kept[expert],
                };
                self.device.upload(&state.slots, slot * state.runs.run_bytes, bytes)?;
            }
            owner[..made].copy_from_slice(&stays);
        }
        self.device.upload(&self.owners, 0, &owners)?;
        self.device.synchronize()?;
        *self.known.get_mut() = Some(owners);
        self.lost = false;
        Ok(())
    }

    /// Slots of each layer, in order.
    pub fn slots(&self) -> Vec<(u32, usize)> {
        self.layers.iter().map(|(&l, s)| (l, s.num_slots)).collect()
    }

    /// Experts in the slots of a layer, once the kernels are done.
    pub fn residents(&self, layer: u32) -> Result<Vec<u32>, CudaError> {
        let Some(state) = self.layers.get(&layer) else { return Ok(Vec::new()) };
        let mut owners = vec![0u32; state.num_slots];
        self.device.download(&mut owners, &self.owners, 4 * state.first_run)?;
        Ok(owners)
    }

    /// What has gone over the link since this was last asked, once the kernels are done.
    pub fn take_traffic(&self) -> Result<Traffic, CudaError> {
        let traffic = self.traffic()?;
        self.device.upload(&self.cells, STATS_AT, &[0u64; NUM_STATS])?;
        self.host.borrow_mut().disk = Disk::default();
        Ok(traffic)
    }

    /// The same, without beginning anew.
    pub(super) fn traffic(&self) -> Result<Traffic, CudaError> {
        let mut n = [0u64; NUM_STATS];
        self.device.download(&mut n, &self.cells, STATS_AT)?;
        let [chosen, fetched, direct, bytes, busy_ns, stall_ns, steps, ahead, used] = n;
        let disk = self.host.borrow().disk;
        let (disk_experts, disk_bytes, disk_ns) = (disk.experts, disk.bytes, disk.ns);
        Ok(Traffic { chosen, fetched, direct, bytes, busy_ns, stall_ns, steps, ahead, used, disk_experts, disk_bytes, disk_ns })
    }
}

/// Byte at which a run begins if all lie one after the other.
fn start_of(layers: &BTreeMap<u32, LayerSlots>, run: usize) -> u64 {
    let of = |s: &LayerSlots| s.runs.num.min(run.saturating_sub(s.first_run)) * s.runs.run_bytes;
    layers.values().map(|s| of(s) as u64).sum()
}

/// The largest of `most`, seven eighths of it, and so on down to `least` that can be made.
fn fewer<T>(most: usize, least: usize, mut make: impl FnMut(usize) -> Result<T, CudaError>) -> Result<(usize, T), CudaError> {
    let mut n = most;
    loop {
        match make(n) {
            Err(CudaError::Memory { .. }) if n > least => n = (n * 7 / 8).max(least),
            made => return Ok((n, made?)),
        }
    }
}

fn runs(layers: &[Layer]) -> Vec<ExpertRuns> {
    layers.iter().map(|l| ExpertRuns { num: l.experts, run_bytes: l.slot_bytes as usize, late: (0, 0) }).collect()
}

/// Bytes of half a ring for these layers: the largest expert at least, no more than a layer.
fn half_ring_bytes<'a>(layers: impl Iterator<Item = &'a ExpertRuns>) -> usize {
    layers.map(|r| HALF_RING_BYTES.min(r.num * r.run_bytes).max(r.run_bytes)).max().unwrap_or(0)
}

/// Bytes on the device beside the slots: the ring, and what rounding up the slots of each layer takes.
pub(super) fn ring_bytes(layers: &[Layer]) -> u64 {
    let runs = runs(layers);
    let rounded = runs.iter().filter(|r| r.num * r.run_bytes >= ALLOCATION_BYTES).count();
    (2 * half_ring_bytes(runs.iter()) + rounded * ALLOCATION_BYTES) as u64
}

/// Ranges of `num` experts with at most `most` of the missing ones each.
fn waves(missing: &[usize], num: usize, most: usize) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = missing.iter().copied().step_by(most).skip(1).collect();
    starts.insert(0, 0);
    let ends = starts[1..].iter().copied().chain([num]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every expert is in one wave, and none has more missing ones than fit.
    #[test]
    fn waves_cover_all_experts() {
        assert_eq!(waves(&[], 4, 2), vec![0..4; 1]);
        assert_eq!(waves(&[0, 1, 2, 3], 4, 2), [0..2, 2..4]);
        assert_eq!(waves(&[1, 3, 4, 6, 9], 12, 2), [0..4, 4..9, 9..12]);
    }
}
