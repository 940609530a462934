//! What the hardware can do, and where a decode step's time goes.

use super::device::{CudaError, Device, During};
use super::launch::Grid;
use super::memory::{Buffer, Event, Mapped};
use super::module::{Module, program};
use super::plain::{Kind, Plain};
use super::{Engine, launch};
use crate::engine::EngineError;
use crate::ids::{Role, SeqId};
use crate::model::spec::{Attn, Ffn};
use cudarc::driver::result;
use std::sync::Arc;

/// Measured rates, bytes a second.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Rates {
    /// Reading device memory.
    pub read_bytes_s: f64,
    /// From page-locked host memory to the device, by the copy engine.
    pub host_to_device_bytes_s: f64,
    /// The same, read by kernels, as experts without a slot are fetched.
    pub host_read_bytes_s: f64,
}

/// Bytes read in one go; far beyond any cache.
const READ_BYTES: u64 = 4 << 30;
const LINK_BYTES: usize = 256 << 20;
const REPEATS: usize = 10;

/// Measures a device on memory of its own; medians of ten.
pub fn rates(device: &Arc<Device>) -> Result<Rates, CudaError> {
    let plain = Plain::load(&Module::load(device, program("plain.cu"))?)?;
    let bytes = READ_BYTES.min(device.memory()?.0 / 2) as usize & !15;
    let (buffer, sink) = (Buffer::new(device, bytes)?, Buffer::new(device, 4)?);
    let words = (bytes / 4) as u64;
    plain.plain_random(launch::elements(words as usize), buffer.at(0), words, 1, Kind::Int8 as i32, 0.0)?;
    let grid = Grid::new([32 * device.properties().num_sm as usize, 1, 1], 256);
    let read = median(device, || plain.plain_read(grid, sink.at(0), buffer.at(0), (bytes / 16) as u64))?;
    let link = LINK_BYTES.min(bytes);
    let pinned = Mapped::new(device, link, None)?;
    let copy = median(device, || {
        device.current()?;
        // SAFETY: both sides hold so many bytes and outlive the measurement, which waits.
        unsafe { result::memcpy_htod_async(buffer.at(0), pinned.as_slice(), device.stream()) }.during("copy to the device")
    })?;
    let grid = Grid::new([device.properties().num_sm as usize, 1, 1], 256);
    let host_read = median(device, || plain.plain_read(grid, sink.at(0), pinned.at(0), (link / 16) as u64))?;
    Ok(Rates {
        read_bytes_s: bytes as f64 / read,
        host_to_device_bytes_s: link as f64 / copy,
        host_read_bytes_s: link as f64 / host_read,
    })
}

/// Seconds of some work on the stream.
fn median(device: &Arc<Device>, mut work: impl FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    let mut seconds = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        start.record(device.stream())?;
        work()?;
        end.record(device.stream())?;
        end.wait()?;
        seconds.push(end.ms_since(&start)? as f64 / 1e3);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[REPEATS / 2])
}

/// Time of the blocks of one kind in a decode step.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BlockTime {
    /// Kind.
    pub kind: &'static str,
    /// How many a step has.
    pub count: usize,
    /// Of one.
    pub us: f64,
}

impl Engine {
    /// Times each kind of block at the sequences' present lengths, all blocks of a kind in one graph.
    pub fn time_blocks(&mut self, seqs: &[SeqId], tokens: &[u32], context: usize) -> Result<Vec<BlockTime>, EngineError> {
        let positions: Vec<u32> = seqs.iter().map(|&s| self.cached(s).saturating_sub(1) as u32).collect();
        self.prepare(seqs, tokens, &positions, context)?;
        let name = |g: &super::fuse::Group| g.block.as_ref().map_or("embed", |b| b.name());
        let kinds: Vec<&'static str> = self.groups().iter().map(name).collect();
        let mut times = Vec::new();
        for kind in ["embed", "attention", "latent", "moe", "mlp", "head"] {
            let which: Vec<usize> = (0..kinds.len()).filter(|&i| kinds[i] == kind).collect();
            if which.is_empty() {
                continue;
            }
            let graph = self.capture_groups(seqs.len(), &which)?;
            let device = Arc::clone(self.device());
            graph.launch()?;
            let seconds = median(&device, || graph.launch())?;
            times.push(BlockTime { kind, count: which.len(), us: seconds * 1e6 / which.len() as f64 });
        }
        Ok(times)
    }

    /// Bytes that a decode step of `batch` sequences of `len` tokens must read: every weight but the embedding once, of the
    /// experts as many as are chosen on average when all are equally likely, and all keys and values.
    pub fn step_bytes(&self, batch: usize, len: usize) -> u64 {
        let layout = self.store.layout();
        let of = |keep: &dyn Fn(Role) -> bool| {
            layout.ids().filter(|id| keep(id.role)).map(|&id| layout.stored_bytes(id)).sum::<u64>() as f64
        };
        let is_expert = |r: Role| matches!(r, Role::ExpertGate | Role::ExpertUp | Role::ExpertDown);
        let tied = self.spec.tied;
        let dense = of(&|r| !is_expert(r) && (r != Role::Embed || tied));
        let share = |layer: &crate::model::spec::LayerSpec| match &layer.ffn {
            Ffn::Moe(m) => 1.0 - (1.0 - m.router.top_k as f64 / m.router.experts as f64).powi(batch as i32),
            Ffn::Dense { .. } => 0.0,
        };
        let experts: f64 = self
            .spec
            .layers
            .iter()
            .enumerate()
            .map(|(l, layer)| {
                let in_layer = layout.ids().filter(|id| is_expert(id.role) && id.layer.is_some_and(|x| x.0 as usize == l));
                share(layer) * in_layer.map(|&id| layout.stored_bytes(id)).sum::<u64>() as f64
            })
            .sum();
        let row = |layer: &crate::model::spec::LayerSpec| match &layer.attn {
            Attn::Gqa(a) => 2 * a.kv_heads * a.head_dim * layer.window.map_or(len, |w| w.min(len)),
            Attn::Mla(a) => (a.kv_rank + a.rope) * len,
        };
        let element = if self.cache_kind == Kind::F32 { 4 } else { 2 };
        let cache = self.spec.layers.iter().map(row).sum::<usize>() * element * batch;
        (dense + experts) as u64 + cache as u64
    }
}
