//! The engine for NVIDIA GPUs. The only room that knows cudarc, device addresses and streams.
//!
//! Needs a driver and `libnvrtc` at run time and nothing at build time. Judged against the CPU engine row by row
//! ([`super::parity`]); `kernels/README.md` has the contracts of the fast kernels, `kernels/plain.cu` the plain ones.

pub mod ahead;
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
mod load;
pub mod measure;
mod memory;
pub mod module;
mod numa;
mod pages;
mod plain;
mod rotations;
pub mod routing;
mod sampling;
pub mod slots;
pub mod solver;
mod tiled;
mod tiles;
mod transfer;
mod workspace;

pub use device::{CudaError, Device, Properties};
pub use load::LoadError;
pub use numa::Numa;
pub use pages::PAGE_TOKENS;
pub use plain::Kind;

use super::{Batch, EngineError, Event, Segment};
use crate::artifact::lookahead::Lookahead;
use crate::artifact::weights::Weights;
use crate::files::Pages;
use crate::ids::{LayerId, SeqId, TensorId};
use crate::model::plan::{self, Plan, Slot, Step};
use crate::model::spec::{Attn, Ffn, ModelSpec};
use crate::quant::format::Format;
use crate::tiers::{self, Needs, Policy, VramPlan};
use ahead::{Ahead, Trial, Verdict};
use blocks::Ran;
use fast::Fast;
use fuse::Group;
use graph::Decode;
use launch::DECODE_TOK;
use load::{Layout, Residency, Store};
use memory::{Buffer, aligned};
use module::{Module, program};
use numa::Nodes;
use pages::PageTable;
use plain::Plain;
use rotations::Rotations;
use routing::Routing;
use slots::Tiers;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use tiled::Tiled;
use workspace::Workspace;

/// Tokens of the largest pass that memory is planned for; larger ones allocate more.
pub const PLANNED_TOK: usize = 1024;
/// Tokens that pass through the experts at a time.
const EXPERTS_TOK: usize = 1024;
/// Tokens that the caches of all sequences hold before further experts get memory.
const CACHE_TOK: usize = 4096;
/// Largest value and latent widths of the plain attention kernels.
const MAX_HEAD: usize = 256;
const MAX_LATENT: usize = 512;
const MAX_LATENT_KEY: usize = 640;

/// Choices of the caller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which device.
    pub index: usize,
    /// Most bytes of its memory to use, the driver's own included; `None`: all that is free.
    pub budget_bytes: Option<u64>,
    /// Most bytes of page-locked host memory for experts; where that is too little for a copy of all, some slots never change hands
    /// and need none; where that is too little still, the rest is on the disk alone.
    pub host_bytes: u64,
    /// Which part of the host's memory they lie in.
    pub numa: Numa,
    /// Page-locked bytes beyond which a system is imitated that refuses more.
    pub locked_limit: Option<u64>,
    /// How often a profile saw each expert used, `[layers with routers][E]`; empty without one.
    pub visits: Vec<Vec<u64>>,
    /// Maps that say a layer early what a router will choose, where experts come ahead; without one the router itself does.
    pub lookahead: Arc<Lookahead>,
    /// Slots of each layer with a router; `None`: as many as the budget allows.
    pub expert_slots: Option<usize>,
    /// Who stays in the slots; `None`: LRFU by the shape of each layer.
    pub policy: Option<Policy>,
    /// Bytes a second of a slower link to imitate while decoding.
    pub link_limit: Option<f64>,
    /// What comes ahead of experts' own layers.
    pub ahead: Ahead,
    /// Tokens that the caches of all sequences together shall hold, if need be in place of experts.
    pub cache_tok: usize,
    /// Element type of the key and value cache, `F32` or `Bf16`; the fast kernels need `Bf16`.
    pub cache: Kind,
    /// Which kernels.
    pub kernels: Kernels,
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// One plain kernel a step.
    Plain,
    /// The same in single precision, with products in tiles: for passes of many tokens.
    Tiled,
    /// Fast kernels for the blocks whose shapes and formats they take.
    #[default]
    Fast,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            index: 0,
            budget_bytes: None,
            host_bytes: u64::MAX,
            numa: Numa::Off,
            locked_limit: None,
            visits: Vec::new(),
            lookahead: Arc::default(),
            expert_slots: None,
            policy: None,
            link_limit: None,
            ahead: Ahead::AtMost(0),
            cache_tok: CACHE_TOK,
            cache: Kind::Bf16,
            kernels: Kernels::Fast,
        }
    }
}

/// Runs plans on a GPU.
pub struct Engine {
    device: Arc<Device>,
    plain: Plain,
    /// Of [`Kernels::Tiled`].
    tiled: Option<Tiled>,
    fast: Fast,
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
}

/// Where the kernels find a batch.
#[derive(Clone, Copy, Debug)]
struct View {
    num_tok: usize,
    num_rows: usize,
    tokens: u64,
    positions: u64,
    /// Row of the page table of each token.
    rows: u64,
    table: u64,
    table_stride: usize,
    /// Tokens that get logits.
    pick: u64,
    /// Rotation of each token.
    cos: u64,
    sin: u64,
    /// Rotation of each position; decode only.
    cosines: u64,
    sines: u64,
    /// One new token a sequence, token `t` in row `t` of the page table.
    decode: bool,
}

/// What the kernels know of a batch.
struct BatchBuffers {
    memory: Buffer,
    at: [usize; BatchPart::COUNT],
    num_tok: usize,
    num_rows: usize,
    table_stride: usize,
    /// The batch was begun as one new token a sequence.
    decode: bool,
    segments: Vec<Segment>,
}

#[derive(Clone, Copy)]
enum BatchPart {
    Tokens,
    Positions,
    Rows,
    Pick,
    Table,
    Cos,
    Sin,
}

impl BatchBuffers {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Buffer::new(device, 1 << 16)?,
            at: [0; BatchPart::COUNT],
            num_tok: 0,
            num_rows: 0,
            table_stride: 0,
            decode: false,
            segments: Vec::new(),
        })
    }
}

impl BatchPart {
    const COUNT: usize = 7;
}

impl Engine {
    /// Plans memory, loads the kernels and copies the weights; `planned` sees the plan before a byte is loaded, `loaded` every
    /// run of bytes taken from the files.
    pub fn open(
        weights: Arc<Weights>,
        options: Options,
        planned: &mut dyn FnMut(&VramPlan, u64),
        loaded: &mut dyn FnMut(u64),
    ) -> Result<Self, LoadError> {
        let spec = weights.spec().clone();
        let layout = Layout::of_weights(&weights);
        let mut start = Start::new(&spec, &layout, &options)?;
        planned(
            &start.residency.vram,
            weights.tensors().iter().filter_map(|(id, _)| weights.get(*id)).map(|w| w.stored_bytes() as u64).sum(),
        );
        let store = Store::load(&start.device, &weights, layout, &mut start.residency, loaded)?;
        Ok(Self::assemble(start, Some(weights), spec, store, options)?)
    }

    /// A model of random weights, made on the device; `format` says how each matrix of so many columns is stored, `planned` sees
    /// the plan of the memory before anything is made.
    pub fn random(
        spec: &ModelSpec,
        format: &dyn Fn(TensorId, usize) -> Format,
        seed: u64,
        options: Options,
        planned: &mut dyn FnMut(&VramPlan),
    ) -> Result<Self, CudaError> {
        let layout = Layout::of_spec(spec, format);
        let mut start = Start::new(spec, &layout, &options)?;
        planned(&start.residency.vram);
        let store = Store::random(&start.device, &start.plain, spec, layout, &mut start.residency, seed)?;
        Self::assemble(start, None, spec.clone(), store, options)
    }

    fn assemble(
        start: Start,
        weights: Option<Arc<Weights>>,
        spec: ModelSpec,
        store: Store,
        options: Options,
    ) -> Result<Self, CudaError> {
        let Start { device, plain, fast, plan, residency } = start;
        // Nothing comes ahead where all are resident, nor where a step leaves the graph for the disk.
        let fetches = device.properties().limits().bulk_copies && store.tiers().is_some_and(|t| !t.reads());
        let trial = (options.ahead == Ahead::Tried && fetches).then(Trial::default);
        let Residency { needs, vram, notes, .. } = residency;
        let unfit = module::unfit(device.properties());
        let num_pages = vram.pages as usize;
        let caches = spec.layers.iter().map(|layer| Cache::new(&device, &layer.attn, num_pages, options.cache));
        let caches = caches.collect::<Result<Vec<_>, CudaError>>()?;
        let work = Workspace::new(&device, &plan, &spec, PLANNED_TOK, DECODE_TOK)?;
        let decode = Decode::new(&device, num_pages.min(spec.max_positions.div_ceil(PAGE_TOKENS)), spec.rope.dim / 2)?;
        let batch = BatchBuffers::new(&device)?;
        let tiled = (options.kernels == Kernels::Tiled).then(|| Tiled::load(&device, &spec)).transpose()?;
        Ok(Self {
            device,
            plain,
            tiled,
            fast,
            kernels: options.kernels,
            unfit,
            weights,
            spec,
            groups: fuse::fuse(&plan),
            plan,
            store,
            needs,
            vram,
            notes,
            caches,
            cache_kind: options.cache,
            pages: PageTable::new(num_pages),
            rotations: Rotations::default(),
            work,
            batch,
            decode,
            scripts: HashMap::new(),
            ahead: if let Ahead::AtMost(n) = options.ahead { n } else { 0 },
            trial,
            pending: None,
            host: Default::default(),
        })
    }

    /// A model that runs part by part, with products in tiles: no weights before [`Engine::attach`], one pool of keys for all layers,
    /// room for passes of `tok` tokens in up to `seqs` sequences.
    fn in_parts(device: &Arc<Device>, weights: Arc<Weights>, tok: usize, seqs: usize) -> Result<Self, CudaError> {
        let spec = weights.spec().clone();
        check(&spec)?;
        let plan = plan::plan(&spec);
        let num_pages = tok.div_ceil(PAGE_TOKENS) + seqs;
        let widest = spec.layers.iter().max_by_key(|layer| Cache::page(&layer.attn, Kind::F32).0);
        let caches = widest.map(|layer| Cache::new(device, &layer.attn, num_pages, Kind::F32)).into_iter();
        let work = Workspace::new(device, &plan, &spec, tok, 1)?;
        let bytes = Workspace::planned_bytes(&plan, &spec, PLANNED_TOK, DECODE_TOK);
        let mut tiled = Tiled::load(device, &spec)?;
        tiled.reserve(tok)?;
        Ok(Self {
            plain: Plain::load(&Module::load(device, program("plain.cu"))?)?,
            tiled: Some(tiled),
            fast: Fast::none(),
            kernels: Kernels::Tiled,
            unfit: Vec::new(),
            store: Store::empty(device, Layout::of_some(&weights, &[]), None, &mut Residency::resident())?,
            weights: Some(weights),
            groups: fuse::fuse(&plan),
            plan,
            needs: Needs::default(),
            notes: Vec::new(),
            vram: VramPlan { workspace_bytes: bytes, total_bytes: bytes, budget_bytes: u64::MAX, ..VramPlan::default() },
            caches: caches.collect::<Result<_, _>>()?,
            cache_kind: Kind::F32,
            pages: PageTable::new(num_pages),
            rotations: Rotations::default(),
            work,
            batch: BatchBuffers::new(device)?,
            decode: Decode::new(device, num_pages, spec.rope.dim / 2)?,
            scripts: HashMap::new(),
            ahead: 0,
            trial: None,
            pending: None,
            host: Default::default(),
            spec,
            device: Arc::clone(device),
        })
    }

    /// Runs these tensors of `weights` from now on, and no others.
    fn attach(&mut self, weights: Arc<Weights>, ids: &[TensorId]) -> Result<(), LoadError> {
        let mut residency = Residency::resident();
        // What was there goes first: both together may not fit.
        self.store = Store::empty(&self.device, Layout::of_some(&weights, &[]), None, &mut residency)?;
        self.store = Store::load(&self.device, &weights, Layout::of_some(&weights, ids), &mut residency, &mut |_| ())?;
        self.weights = Some(weights);
        Ok(())
    }

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
        let moe = self.spec.layers.iter().enumerate().filter_map(|(l, layer)| match &layer.ffn {
            Ffn::Moe(m) => Some((l as u32, m.router)),
            Ffn::Dense { .. } => None,
        });
        let moe: Vec<_> = moe.collect();
        for (index, (layer, router)) in moe.iter().enumerate() {
            let choices = routing::script(routing, (index, moe.len()), router.experts, router.top_k, rows, steps);
            let guesses = recall.map(|r| routing::guesses(&choices, router.top_k, router.experts, r, index as u64));
            let script = Scripted {
                choices: Buffer::from_slice(&self.device, &choices)?,
                guesses: guesses.map(|g| Buffer::from_slice(&self.device, &g)).transpose()?,
                step: Buffer::from_slice(&self.device, &[0u32])?,
                steps,
                rows,
            };
            self.scripts.insert(*layer, script);
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

    /// Checks a batch against vocabulary and caches, and makes room for its keys.
    fn admit(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let vocab = self.spec.vocab;
        if let Some((index, &token)) = batch.tokens.iter().enumerate().find(|&(_, &t)| t as usize >= vocab) {
            return Err(EngineError::Token { token, index, vocab });
        }
        for s in &batch.segments {
            let cached = self.cached(s.seq);
            if cached != s.start {
                return Err(EngineError::Position { seq: s.seq.0, cached, start: s.start });
            }
            self.reserve(s.seq, s.start + s.len)?;
        }
        Ok(())
    }

    /// Sizes the buffers for a batch, checks it against vocabulary and caches, and tells the device about it.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.admit(batch)?;
        let (num_tok, rows) = (batch.tokens.len(), batch.logit_rows());
        if num_tok > self.work.capacity_tok || rows.len() > self.work.capacity_rows {
            self.grow(num_tok.max(self.work.capacity_tok), rows.len().max(self.work.capacity_rows))?;
        }
        self.tiled.as_mut().map(|t| t.reserve(num_tok)).transpose()?;
        self.forget_rows();
        self.host = Default::default();
        self.pending = Some(batch.segments.iter().map(|s| (s.seq, s.start + s.len)).collect());
        self.describe(batch, &rows)
    }

    /// Buffers have the row lengths of the plan, whatever steps have written since.
    fn forget_rows(&mut self) {
        self.work.row = self.plan.widths;
        self.work.row[Slot::Logits as usize] = self.spec.vocab;
    }

    /// Makes the workspace larger, within the budget. Where there is no room it keeps its size and the engine goes on.
    fn grow(&mut self, tok: usize, rows: usize) -> Result<(), EngineError> {
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

    /// Uploads tokens, positions, page tables and rotations.
    fn describe(&mut self, batch: &Batch, rows: &[usize]) -> Result<(), EngineError> {
        let num_tok = batch.tokens.len();
        let stride = batch.segments.iter().map(|s| self.pages.pages(s.seq).len()).max().unwrap_or(0);
        let half = self.spec.rope.dim / 2;
        let (mut positions, mut owners) = (Vec::with_capacity(num_tok), Vec::with_capacity(num_tok));
        let mut table = vec![0u32; stride * batch.segments.len()];
        let (mut cos, mut sin) = (Vec::with_capacity(num_tok * half), Vec::with_capacity(num_tok * half));
        for (i, s) in batch.segments.iter().enumerate() {
            let pages = self.pages.pages(s.seq);
            table[i * stride..i * stride + pages.len()].copy_from_slice(pages);
            let end = s.start + s.len;
            let [cosines, sines] = self.rotations.rows(&self.spec.rope, s.context.max(end), s.start..end);
            cos.extend_from_slice(cosines);
            sin.extend_from_slice(sines);
            positions.extend(s.start as u32..end as u32);
            owners.extend(std::iter::repeat_n(i as u32, s.len));
        }
        let rows: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
        let parts: [&[u32]; BatchPart::COUNT] = [&batch.tokens, &positions, &owners, &rows, &table, &cos, &sin];
        let mut all: Vec<u32> = Vec::new();
        for (at, part) in self.batch.at.iter_mut().zip(parts) {
            *at = 4 * all.len();
            all.extend_from_slice(part);
            all.resize(aligned(4 * all.len()) / 4, 0);
        }
        if 4 * all.len() > self.batch.memory.bytes() {
            self.device.synchronize()?;
            self.batch.memory = Buffer::new(&self.device, (4 * all.len()).next_power_of_two())?;
        }
        (self.batch.num_tok, self.batch.num_rows, self.batch.table_stride) = (num_tok, rows.len(), stride);
        self.batch.decode = false;
        self.batch.segments.clone_from(&batch.segments);
        Ok(self.device.upload(&self.batch.memory, 0, &all)?)
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

    /// Runs the whole plan unobserved the fastest way there is; the logits stay on the device until they are asked for.
    pub fn pass(&mut self, batch: &Batch) -> Result<(), EngineError> {
        if self.is_decode(batch) {
            return self.decode_pass(batch);
        }
        self.begin(batch)?;
        let view = self.view();
        (0..self.groups.len()).try_for_each(|i| self.group(i, &view).map(drop))
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

    fn view(&self) -> View {
        let part = |part: BatchPart| self.batch.memory.at(self.batch.at[part as usize]);
        View {
            num_tok: self.batch.num_tok,
            num_rows: self.batch.num_rows,
            tokens: part(BatchPart::Tokens),
            positions: part(BatchPart::Positions),
            rows: part(BatchPart::Rows),
            table: part(BatchPart::Table),
            table_stride: self.batch.table_stride,
            pick: part(BatchPart::Pick),
            cos: part(BatchPart::Cos),
            sin: part(BatchPart::Sin),
            cosines: 0,
            sines: 0,
            decode: false,
        }
    }
}

/// What changes while a model runs.
impl Engine {
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
    fn judge_ahead(&mut self) -> Result<(), EngineError> {
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
    fn follow(&mut self, verdict: Verdict) {
        let Verdict { ahead, step_ms: [without, with] } = verdict;
        self.ahead = ahead;
        let what = if ahead > 0 { "experts come a layer ahead" } else { "no experts come a layer ahead" };
        self.notes.push(format!("{what}: a step takes {with:.2} ms with one and {without:.2} ms without"));
    }

    /// What did not go as planned since this was last asked.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Frees so many bytes of slots.
    fn give_back(&mut self, bytes: u64) -> Result<(), EngineError> {
        let before = self.vram.slots.iter().sum::<usize>();
        let given =
            self.tiers().and_then(|_| tiers::plan::give_back(&self.needs.layers, &self.vram.slots, &self.vram.permanent, bytes));
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

/// Everything that comes before the weights.
struct Start {
    device: Arc<Device>,
    plain: Plain,
    fast: Fast,
    plan: Plan,
    residency: Residency,
}

impl Start {
    fn new(spec: &ModelSpec, layout: &Layout, options: &Options) -> Result<Self, CudaError> {
        check(spec)?;
        let device = Device::open(options.index)?;
        let plan = plan::plan(spec);
        let needs = budget::needs(spec, &plan, layout, options);
        let free = device.memory()?.0;
        let budget_bytes = options.budget_bytes.unwrap_or(free).min(free);
        let small = |e: tiers::TooSmall| CudaError::Budget { smallest_bytes: e.smallest_bytes, budget_bytes };
        let planned = match options.expert_slots {
            Some(slots) => tiers::plan::with_slots(&needs, slots, budget_bytes, options.host_bytes),
            None => tiers::plan::plan(&needs, budget_bytes, options.host_bytes),
        };
        let vram = planned.map_err(small)?;
        if vram.host_bytes > vram.host_budget_bytes {
            let (needed_bytes, had_bytes) = (vram.smallest_host_bytes, vram.host_budget_bytes);
            return Err(CudaError::PageLocked { needed_bytes, had_bytes, error: "no more is allowed".into() });
        }
        let mut notes = Vec::new();
        let nodes = Nodes::new(options.numa, &device.properties().bus_id).unwrap_or_else(|error| {
            notes.push(format!("--numa has no effect, the system does not allow it: {error}"));
            None
        });
        let residency = Residency {
            needs,
            tiered: options.expert_slots.is_some() || vram.offloaded_bytes > 0,
            vram,
            policy: options.policy,
            lookahead: Arc::clone(&options.lookahead),
            link_limit: options.link_limit,
            locked_limit: options.locked_limit,
            nodes,
            pages: Pages::Past,
            notes,
        };
        let plain = Plain::load(&Module::load(&device, program("plain.cu"))?)?;
        let fast = Fast::load(&device, &layout.forms())?;
        Ok(Self { device, plain, fast, plan, residency })
    }
}

/// Bounds of the kernels that a model may exceed.
fn check(spec: &ModelSpec) -> Result<(), CudaError> {
    for (l, layer) in spec.layers.iter().enumerate() {
        let (found, most) = match &layer.attn {
            Attn::Gqa(a) => (a.head_dim, MAX_HEAD),
            Attn::Mla(a) if a.kv_rank > MAX_LATENT => (a.kv_rank, MAX_LATENT),
            Attn::Mla(a) => (a.kv_rank + a.rope, MAX_LATENT_KEY),
        };
        if found > most {
            return Err(CudaError::Unsupported(format!("layer {l} has heads of width {found}, the kernels take at most {most}")));
        }
    }
    Ok(())
}
