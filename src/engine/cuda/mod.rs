//! The engine for NVIDIA GPUs. The only room that knows cudarc, device addresses and streams.
//!
//! Needs a driver and `libnvrtc` at run time and nothing at build time. Judged against the CPU engine row by row
//! ([`super::parity`]); `kernels/README.md` has the contracts of the fast kernels, `kernels/plain.cu` the plain ones.

pub mod ahead;
mod batch;
mod blocks;
pub mod budget;
pub mod clocks;
mod cold;
pub mod device;
mod exec;
mod experts;
mod fast;
pub mod fuse;
mod graph;
mod latent;
pub mod launch;
mod layout;
mod load;
pub mod measure;
mod memory;
pub mod module;
mod numa;
mod options;
mod pages;
mod plain;
mod room;
mod rotations;
pub mod routing;
mod sampling;
pub mod slots;
pub mod solver;
mod stager;
mod start;
mod step;
mod tiled;
mod tiles;
mod transfer;
mod workspace;

pub use device::{CudaError, Device, Properties};
pub use load::LoadError;
pub use numa::Numa;
pub use options::{Kernels, Options};
pub use pages::PAGE_TOKENS;
pub use plain::Kind;

use super::{Batch, EngineError, Event};
use crate::artifact::weights::Weights;
use crate::ids::{LayerId, SeqId, TensorId};
use crate::model::plan::{Plan, Slot, Step};
use crate::model::spec::{Attn, ModelSpec};
use crate::tiers::{Needs, VramPlan};
use ahead::Trial;
use batch::{BatchBuffers, View};
use blocks::Ran;
use fast::Fast;
use fuse::Group;
use graph::Decode;
use load::Store;
use memory::Buffer;
use pages::PageTable;
use plain::Plain;
use rotations::Rotations;
use routing::Routing;
use slots::Tiers;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use step::WholeStep;
use tiled::Tiled;
use workspace::Workspace;

/// Tokens of the largest pass that memory is planned for; larger ones allocate more.
pub const PLANNED_TOK: usize = 2048;
/// Tokens that pass through the experts at a time.
const EXPERTS_TOK: usize = 2048;
/// Runs plans on a GPU.
pub struct Engine {
    device: Arc<Device>,
    plain: Plain,
    /// Of [`Kernels::Tiled`].
    tiled: Option<Tiled>,
    fast: Fast,
    /// All layers of one token by one kernel, where it takes the model.
    step: Option<WholeStep>,
    kernels: Kernels,
    /// Kinds of blocks that are left to the plain kernels on this device.
    unfit: Vec<String>,
    weights: Option<Arc<Weights>>,
    spec: ModelSpec,
    plan: Plan,
    groups: Vec<Group>,
    store: Store,
    needs: Needs,
    vram: VramPlan,
    notes: Vec<String>,
    /// Keys and values, or latents, of each layer; or one pool that all layers use in turn.
    caches: Vec<Cache>,
    cache_kind: Kind,
    pages: PageTable,
    rotations: Rotations,
    work: Workspace,
    batch: BatchBuffers,
    decode: Decode,
    /// Choices that decode steps make instead of the routers', by layer.
    scripts: HashMap<u32, Scripted>,
    /// Most experts that a layer brings for the one behind it, and what decides it if nobody else does.
    ahead: usize,
    trial: Option<Trial>,
    /// The batch whose keys are not yet counted.
    pending: Option<Vec<(SeqId, usize)>>,
    /// Buffers copied to the host since the last step.
    host: [OnceCell<Vec<f32>>; Slot::COUNT],
}

/// Choices made beforehand, `[steps][rows][K]`.
struct Scripted {
    choices: Buffer,
    /// What the layer before takes them for.
    guesses: Option<Buffer>,
    /// Steps so far.
    step: Buffer,
    steps: usize,
    rows: usize,
}

/// Pool of one layer: `[pages][heads][PAGE_TOKENS][width]` keys, then values.
struct Cache {
    keys: Buffer,
    values: Option<Buffer>,
}

impl Cache {
    /// Bytes of a page of keys, and whether there are as many of values.
    fn page(attn: &Attn, kind: Kind) -> (usize, bool) {
        let (width, values) = match attn {
            Attn::Gqa(a) => (a.kv_heads * a.head_dim, true),
            Attn::Mla(a) => (a.kv_rank + a.rope, false),
        };
        (PAGE_TOKENS * width * if kind == Kind::F32 { 4 } else { 2 }, values)
    }

    fn new(device: &Arc<Device>, attn: &Attn, num_pages: usize, kind: Kind) -> Result<Self, CudaError> {
        let (bytes, values) = Self::page(attn, kind);
        let pool = || Buffer::new(device, num_pages * bytes);
        Ok(Self { keys: pool()?, values: if values { Some(pool()?) } else { None } })
    }

    /// Where keys and values are; null where there are no values.
    fn addresses(&self) -> (u64, u64) {
        (self.keys.at(0), self.values.as_ref().map_or(0, |b| b.at(0)))
    }
}

impl Engine {
    /// Keys and values of a layer.
    fn cache(&self, layer: LayerId) -> &Cache {
        &self.caches[layer.0 as usize % self.caches.len()]
    }

    /// The steps this engine runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model's files; `None` for random weights.
    pub fn weights(&self) -> Option<&Arc<Weights>> {
        self.weights.as_ref()
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The device it runs on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where the memory went.
    pub fn vram(&self) -> &VramPlan {
        &self.vram
    }

    /// Where experts are that do not fit on the device; `None` if all do.
    pub fn tiers(&self) -> Option<&Tiers> {
        self.store.tiers()
    }

    /// What did not go as planned since this was last asked.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Makes decode steps of up to `rows` sequences choose experts in this way for `steps` steps, then again from the start;
    /// `None`: the routers choose. Of these choices the layer before guesses a share of `recall` right, `None`: it does not guess.
    pub fn set_routing(
        &mut self,
        routing: Option<&Routing>,
        rows: usize,
        steps: usize,
        recall: Option<f64>,
    ) -> Result<(), CudaError> {
        self.device.synchronize()?;
        self.decode.forget_graphs();
        self.scripts.clear();
        let Some(routing) = routing else { return Ok(()) };
        let moe: Vec<_> = self.spec.routers().collect();
        for (index, &(layer, router)) in moe.iter().enumerate() {
            let choices = routing::script(routing, (index, moe.len()), router.experts, router.top_k, rows, steps);
            let guesses = recall.map(|r| routing::guesses(&choices, router.top_k, router.experts, r, index as u64));
            let script = Scripted {
                choices: Buffer::from_slice(&self.device, &choices)?,
                guesses: guesses.map(|g| Buffer::from_slice(&self.device, &g)).transpose()?,
                step: Buffer::from_slice(&self.device, &[0u32])?,
                steps,
                rows,
            };
            self.scripts.insert(layer, script);
        }
        Ok(())
    }

    /// Bytes that one tensor takes on the device.
    pub fn stored_bytes(&self, id: TensorId) -> u64 {
        self.store.layout().stored_bytes(id)
    }

    /// Forgets a sequence.
    pub fn release(&mut self, seq: SeqId) {
        self.pages.release(seq);
    }

    /// Tokens of a sequence in the cache.
    pub fn cached(&self, seq: SeqId) -> usize {
        self.pages.len(seq)
    }

    /// A buffer as the last step left it, copied to the host.
    pub fn slot(&self, slot: Slot) -> Result<&[f32], EngineError> {
        let cell = &self.host[slot as usize];
        if let Some(values) = cell.get() {
            return Ok(values);
        }
        let rows = if slot == Slot::Logits { self.batch.num_rows } else { self.batch.num_tok };
        let mut values = vec![0.0f32; rows * self.work.row[slot as usize]];
        self.device.download(&mut values, &self.work.slots[slot as usize], 0)?;
        Ok(cell.get_or_init(|| values))
    }

    /// Fills a buffer from the host, one row a token of the batch.
    pub fn set_slot(&mut self, slot: Slot, values: &[f32]) -> Result<(), EngineError> {
        self.host[slot as usize].take();
        self.work.row[slot as usize] = values.len() / self.batch.num_tok.max(1);
        Ok(self.device.upload(&self.work.slots[slot as usize], 0, values)?)
    }

    /// Runs some steps of the plan on a batch that [`Engine::begin`] has seen; without an observer nothing is copied back.
    pub fn run(&mut self, steps: Range<usize>, mut on: Option<&mut dyn FnMut(Event<'_>)>) -> Result<(), EngineError> {
        self.host = Default::default();
        for i in steps {
            let step = self.plan.steps[i].clone();
            self.step(&step, &self.view())?;
            if let (Step::Route { router, layer, .. }, Some(on)) = (&step, on.as_mut()) {
                let num_tok = self.batch.num_tok;
                let mut logits = vec![0.0f32; num_tok * router.experts];
                let (mut experts, mut gates) = (vec![0u32; num_tok * router.top_k], vec![0.0f32; num_tok * router.top_k]);
                self.device.download(&mut logits, &self.work.router_logits, 0)?;
                self.device.download(&mut experts, &self.work.experts, 0)?;
                self.device.download(&mut gates, &self.work.gates, 0)?;
                on(Event::Routed { layer: *layer, logits: &logits, experts: &experts, gates: &gates });
            }
        }
        Ok(())
    }

    /// Runs the whole plan and returns the logits, `[rows asked for, V]`.
    pub fn forward(&mut self, batch: &Batch, on: Option<&mut dyn FnMut(Event<'_>)>) -> Result<&[f32], EngineError> {
        self.begin(batch)?;
        self.run(0..self.plan.steps.len(), on)?;
        self.slot(Slot::Logits)
    }

    /// Runs the whole plan unobserved the fastest way there is; the logits stay on the device until they are asked for. Behind the last
    /// attention only tokens that get logits go on, and buffers hold theirs first.
    pub fn pass(&mut self, batch: &Batch) -> Result<(), EngineError> {
        if self.is_decode(batch) {
            return self.decode_pass(batch);
        }
        self.begin(batch)?;
        let (view, apart) = (self.view(), fuse::rows_apart(&self.plan, &self.groups));
        (0..apart).try_for_each(|i| self.group(i, &view).map(drop))?;
        if view.num_rows == 0 {
            return Ok(());
        }
        let view = self.only_wanted(&view)?;
        (apart..self.groups.len()).try_for_each(|i| self.group(i, &view).map(drop))
    }

    /// The runs of steps that one block or the plain kernels take, in order.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Begins a batch of one new token a sequence for the decode kernels; false if it is none.
    pub fn begin_decode(&mut self, batch: &Batch) -> Result<bool, EngineError> {
        if !self.is_decode(batch) {
            return Ok(false);
        }
        self.begin(batch)?;
        let seqs: Vec<SeqId> = batch.segments.iter().map(|s| s.seq).collect();
        let starts: Vec<u32> = batch.segments.iter().map(|s| s.start as u32).collect();
        let context = batch.segments.iter().map(|s| s.context.max(s.start + 1)).max().unwrap_or(1);
        self.prepare(&seqs, &batch.tokens, &starts, context)?;
        self.rotate(&self.decode_view(seqs.len()))?;
        self.batch.decode = true;
        Ok(true)
    }

    /// Runs a group on a batch that [`Engine::begin`] has seen; true if fast kernels did it.
    pub fn run_group(&mut self, index: usize) -> Result<bool, EngineError> {
        self.host = Default::default();
        let view = if self.batch.decode { self.decode_view(self.batch.num_tok) } else { self.view() };
        let ran = self.group(index, &view)?;
        self.join()?;
        Ok(ran == Ran::Yes)
    }

    pub(super) fn is_fast(&self) -> bool {
        self.kernels == Kernels::Fast && self.cache_kind == Kind::Bf16
    }

    /// Runs a group, fast if it is a block that fast kernels take.
    fn group(&mut self, index: usize, view: &View) -> Result<Ran, EngineError> {
        let Group { steps, block } = self.groups[index].clone();
        if let Some(block) = block.filter(|_| self.is_fast())
            && self.block(&block, view)? == Ran::Yes
        {
            return Ok(Ran::Yes);
        }
        for i in steps {
            let step = self.plan.steps[i].clone();
            self.step(&step, view)?;
        }
        Ok(Ran::No)
    }
}
