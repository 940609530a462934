//! From a model to an engine: the plan of the memory, the device and its kernels, then the weights.

use super::ahead::{Ahead, Trial};
use super::batch::BatchBuffers;
use super::device::{CudaError, Device};
use super::fast::Fast;
use super::fuse::Group;
use super::graph::Decode;
use super::launch::DECODE_TOK;
use super::layout::Layout;
use super::load::{LoadError, Residency, Store};
use super::module::{self, Module, program};
use super::numa::Nodes;
use super::pages::{PAGE_TOKENS, PageTable};
use super::plain::{Kind, Plain};
use super::rotations::Rotations;
use super::step::{self, Found, WholeStep};
use super::tiled::Tiled;
use super::workspace::Workspace;
use super::{Cache, Engine, Kernels, Options, PLANNED_TOK, budget, fuse};
use crate::artifact::weights::Weights;
use crate::files::Pages;
use crate::ids::TensorId;
use crate::model::plan::{self, Plan};
use crate::model::spec::{Attn, ModelSpec};
use crate::quant::format::Format;
use crate::tiers::{self, Needs, VramPlan};
use std::collections::HashMap;
use std::sync::Arc;

/// Largest value and latent widths of the plain attention kernels.
const MAX_HEAD: usize = 256;
const MAX_LATENT: usize = 512;
const MAX_LATENT_KEY: usize = 640;

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
        let Start { device, plain, fast, step, plan, groups, unfit, residency } = start;
        // Nothing comes ahead where all are resident, nor where a step leaves the graph for the disk.
        let fetches = device.properties().limits().bulk_copies && store.tiers().is_some_and(|t| !t.reads());
        let trial = (options.ahead == Ahead::Tried && fetches).then(Trial::default);
        let Residency { needs, vram, notes, .. } = residency;
        let num_pages = vram.pages as usize;
        let caches = spec.layers.iter().map(|layer| Cache::new(&device, &layer.attn, num_pages, options.cache));
        let caches = caches.collect::<Result<Vec<_>, CudaError>>()?;
        let work = Workspace::new(&device, &plan, &spec, PLANNED_TOK, DECODE_TOK)?;
        let decode = Decode::new(&device, num_pages.min(spec.max_positions.div_ceil(PAGE_TOKENS)), spec.rope.dim / 2)?;
        let batch = BatchBuffers::new(&device)?;
        let step = step.map(|found| WholeStep::new(&device, found, &store, &caches)).transpose()?;
        let tiled = (options.kernels == Kernels::Tiled).then(|| Tiled::load(&device, &spec)).transpose()?;
        Ok(Self {
            device,
            plain,
            tiled,
            fast,
            step,
            kernels: options.kernels,
            unfit,
            weights,
            spec,
            groups,
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
    pub(super) fn in_parts(device: &Arc<Device>, weights: Arc<Weights>, tok: usize, seqs: usize) -> Result<Self, CudaError> {
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
            step: None,
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
    pub(super) fn attach(&mut self, weights: Arc<Weights>, ids: &[TensorId]) -> Result<(), LoadError> {
        let mut residency = Residency::resident();
        // What was there goes first: both together may not fit.
        self.store = Store::empty(&self.device, Layout::of_some(&weights, &[]), None, &mut residency)?;
        self.store = Store::load(&self.device, &weights, Layout::of_some(&weights, ids), &mut residency, &mut |_| ())?;
        self.weights = Some(weights);
        Ok(())
    }
}

/// Everything that comes before the weights.
struct Start {
    device: Arc<Device>,
    plain: Plain,
    fast: Fast,
    step: Option<Found>,
    plan: Plan,
    groups: Vec<Group>,
    /// Kinds of blocks that are left to the plain kernels.
    unfit: Vec<String>,
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
        if !vram.host.fits() {
            let (needed_bytes, had_bytes) = (vram.host.smallest_bytes, vram.host.budget_bytes);
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
        let (groups, unfit) = (fuse::fuse(&plan), module::unfit(device.properties()));
        let at_once = options.kernels == Kernels::Fast && options.cache == Kind::Bf16 && !residency.tiered && unfit.is_empty();
        let limits = device.properties().limits();
        let step = if at_once { step::find(&plan, &groups, layout, spec.width, limits) } else { None };
        let forms: Vec<&str> = layout.forms().into_iter().chain(step.as_ref().and_then(Found::form)).collect();
        let fast = Fast::load(&device, &forms)?;
        Ok(Self { device, plain, fast, step, plan, groups, unfit, residency })
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
