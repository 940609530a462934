//! Weights from their files to the device: a layout computed from headers, then copies through page-locked memory.
//!
//! The device holds matrices as the disk does. Norm gains and biases become `f32`, FP8 blocks become bf16; both are decoded on
//! the way. The matrices of one expert lie next to each other, so that an expert is one run of bytes.

use super::cold::{Cold, Piece};
use super::device::{CudaError, Device, During};
use super::launch;
use super::launch::Width;
use super::memory::{Buffer, Event, Pinned, aligned, gigabytes};
use super::numa::Nodes;
use super::plain::{Kind, Matrix, Plain};
use super::slots::{Backing, ExpertRuns, Tiers};
use crate::artifact::lookahead::Lookahead;
use crate::artifact::weights::{Data, Weight, Weights};
use crate::checkpoint::CheckpointError;
use crate::files::{self, Pages, Reader};
use crate::ids::{Component, ExpertId, LayerId, Part, Role, TensorId};
use crate::model::names;
use crate::model::spec::{Ffn, ModelSpec};
use crate::quant::format::{Bits, Format, Zero};
use crate::tensor::{self, Dtype};
use crate::tiers::{self, Needs, Policy, VramPlan};
use cudarc::driver::result;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Bytes of one staging buffer at most; large enough that a copy is not all overhead.
const STAGING_BYTES: usize = 32 << 20;
/// Buffers in turn: one is filled while others travel.
const STAGING_BUFFERS: usize = 3;
/// Bytes in which a descriptor counts the way from codes to zero points; what aligns tensors is a multiple of it.
const ZEROS_UNIT: usize = 16;
/// Piece that one thread copies.
const COPY_BYTES: usize = 1 << 20;

/// Why weights could not be brought to the device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The files hold something undecodable.
    #[error(transparent)]
    Weight(#[from] CheckpointError),
}

impl LoadError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            LoadError::Cuda(e) => e.hint(),
            LoadError::Weight(e) => e.hint(),
        }
    }
}

/// Form of one tensor on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    rows: usize,
    cols: usize,
    kind: Kind,
    group: usize,
    scale_kind: Kind,
    zero: Zero,
}

impl Form {
    fn data_bytes(self) -> usize {
        let n = self.rows * self.cols;
        match self.kind {
            Kind::F32 => 4 * n,
            Kind::Bf16 | Kind::F16 => 2 * n,
            Kind::Int4 => n / 2,
            Kind::Int8 => n,
        }
    }

    /// Bytes with what aligns the next tensor.
    fn placed_bytes(self) -> usize {
        self.codes_bytes() + aligned(self.scale_bytes())
    }

    /// Bytes of the codes and the zero points behind them, with what aligns the next tensor.
    fn codes_bytes(self) -> usize {
        aligned(self.data_bytes()) + aligned(self.zero_bytes())
    }

    fn zero_bytes(self) -> usize {
        let per_word = match (self.zero, self.kind) {
            (Zero::Point, Kind::Int4) => 8,
            (Zero::Point, Kind::Int8) => 4,
            _ => return 0,
        };
        4 * self.rows.div_ceil(per_word) * (self.cols / self.group)
    }

    fn scale_bytes(self) -> usize {
        match self.kind {
            Kind::Int4 | Kind::Int8 => self.rows * (self.cols / self.group) * if self.scale_kind == Kind::F32 { 4 } else { 2 },
            _ => 0,
        }
    }
}

/// Where one tensor lies: in the allocation of all that every token uses, or in the run of its expert.
#[derive(Clone, Copy, Debug)]
struct Place {
    form: Form,
    data_at: usize,
    scales_at: usize,
}

impl Place {
    /// Zero points lie behind the codes.
    fn zeros_at(&self) -> usize {
        self.data_at + aligned(self.form.data_bytes())
    }
}

/// Where every tensor of a model lies.
pub(super) struct Layout {
    places: HashMap<TensorId, Place>,
    /// Every id in the order of the model.
    order: Vec<TensorId>,
    /// Bytes of everything but experts.
    dense_bytes: usize,
    /// The experts of each layer that has any.
    experts: BTreeMap<u32, ExpertRuns>,
    /// The same by component; experts, whose slots count them, are left out.
    pub by_component: Vec<(Component, u64)>,
}

pub(super) fn float_kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::F32,
        Dtype::F16 => Kind::F16,
        _ => Kind::Bf16,
    }
}

/// Norm gains and biases.
fn is_vector(id: TensorId) -> bool {
    id.part == Part::Bias || id.role.component() == Component::Norms
}

fn form_of(id: TensorId, weight: &Weight<'_>) -> Form {
    let (rows, cols) = (weight.rows, weight.cols);
    let plain = |kind| Form { rows, cols, kind, group: cols.max(1), scale_kind: Kind::F32, zero: Zero::Middle };
    match &weight.data {
        _ if is_vector(id) => plain(Kind::F32),
        Data::Plain { dtype, .. } => plain(float_kind(*dtype)),
        Data::Fp8 { .. } | Data::Mxfp4(_) | Data::Gather { .. } => plain(Kind::Bf16),
        Data::Packed(p) => {
            let kind = if p.bits == Bits::Four { Kind::Int4 } else { Kind::Int8 };
            let zero = if p.zeros.is_some() { Zero::Point } else { Zero::Middle };
            Form { rows, cols, kind, group: p.group, scale_kind: float_kind(p.scale_dtype), zero }
        }
    }
}

impl Layout {
    /// Of a model directory.
    pub fn of_weights(weights: &Weights) -> Self {
        let forms = weights.tensors().iter().filter_map(|(id, _)| Some((*id, form_of(*id, &weights.get(*id)?))));
        Self::place(forms)
    }

    /// Of some tensors of a model.
    pub fn of_some(weights: &Weights, ids: &[TensorId]) -> Self {
        Self::place(ids.iter().filter_map(|id| Some((*id, form_of(*id, &weights.get(*id)?)))))
    }

    /// Of a model that exists as a spec only; `format` names how each matrix would be stored, scales and floats in bf16.
    pub fn of_spec(spec: &ModelSpec, format: &dyn Fn(TensorId, usize) -> Format) -> Self {
        let form = |(id, shape): (TensorId, Vec<usize>)| {
            let cols = shape.last().copied().unwrap_or(1);
            let rows = shape.iter().product::<usize>() / cols.max(1);
            let plain = |kind| Form { rows, cols, kind, group: cols, scale_kind: Kind::Bf16, zero: Zero::Middle };
            let form = match format(id, cols) {
                _ if is_vector(id) => plain(Kind::F32),
                Format::Source => plain(Kind::Bf16),
                Format::Int { bits, group, zero } => Form {
                    kind: if bits == Bits::Four { Kind::Int4 } else { Kind::Int8 },
                    group: group.columns(cols),
                    zero,
                    ..plain(Kind::Bf16)
                },
            };
            (id, form)
        };
        Self::place(names::tensors(spec).into_iter().map(form))
    }

    /// Words and zero points of the matrices of one expert first, then their scales; all others one after the other.
    fn place(forms: impl Iterator<Item = (TensorId, Form)>) -> Self {
        let (mut places, mut order) = (HashMap::new(), Vec::new());
        let mut dense_bytes = 0;
        let mut sizes: BTreeMap<Component, u64> = BTreeMap::new();
        let mut runs: BTreeMap<(u32, u32), Vec<(TensorId, Form)>> = BTreeMap::new();
        for (id, form) in forms {
            order.push(id);
            if let (Some(layer), Some(expert)) = (id.layer, id.expert) {
                runs.entry((layer.0, expert.0)).or_default().push((id, form));
                continue;
            }
            let scales_at = dense_bytes + form.codes_bytes();
            places.insert(id, Place { form, data_at: dense_bytes, scales_at });
            dense_bytes = scales_at + aligned(form.scale_bytes());
            *sizes.entry(id.role.component()).or_default() += form.placed_bytes() as u64;
        }
        let mut experts: BTreeMap<u32, ExpertRuns> = BTreeMap::new();
        for ((layer, expert), tensors) in runs {
            let mut at = 0;
            for &(id, form) in &tensors {
                places.insert(id, Place { form, data_at: at, scales_at: 0 });
                at += form.codes_bytes();
            }
            let mut late = (0, 0);
            for (id, form) in tensors {
                if let Some(place) = places.get_mut(&id) {
                    place.scales_at = at;
                    if id.role == Role::ExpertDown {
                        late = (place.data_at, place.data_at + aligned(form.data_bytes()));
                    }
                }
                at += aligned(form.scale_bytes());
            }
            let layer = experts.entry(layer).or_insert(ExpertRuns { num: 0, run_bytes: 0, late });
            let late = if layer.late == late { late } else { (0, 0) };
            *layer = ExpertRuns { num: layer.num.max(expert as usize + 1), run_bytes: layer.run_bytes.max(at), late };
        }
        Layout { places, order, dense_bytes, experts, by_component: sizes.into_iter().collect() }
    }

    /// Every tensor.
    pub fn ids(&self) -> impl Iterator<Item = &TensorId> {
        self.order.iter()
    }

    /// Forms of the matrices that fast kernels take, as their names spell them; sixteen bits always, for routers.
    pub fn forms(&self) -> Vec<&'static str> {
        let of = |p: &Place| {
            let bits = match (p.form.kind, p.form.zero) {
                (Kind::Int4, Zero::Middle) => 4,
                (Kind::Int8, Zero::Middle) => 8,
                (Kind::Int4 | Kind::Int8, Zero::Point) => return None,
                _ => 16,
            };
            Width { bits, group: p.form.group }.name(p.form.cols)
        };
        let forms: BTreeSet<&str> = self.places.values().filter_map(of).chain(["w16"]).collect();
        forms.into_iter().collect()
    }

    /// The layers with routers; `visits` are a profile's counts, `[layers with routers][E]`, or empty.
    pub fn expert_layers(&self, spec: &ModelSpec, visits: &[Vec<u64>]) -> Vec<tiers::Layer> {
        let routed = (0u32..).zip(&spec.layers).filter_map(|(l, layer)| match &layer.ffn {
            Ffn::Moe(m) => Some((l, m.router)),
            Ffn::Dense { .. } => None,
        });
        let layers = routed.enumerate().map(|(i, (layer, router))| tiers::Layer {
            experts: router.experts,
            top_k: router.top_k,
            slot_bytes: self.experts.get(&layer).map_or(0, |runs| runs.run_bytes as u64),
            visits: visits.get(i).cloned().unwrap_or_default(),
        });
        layers.collect()
    }

    /// Bytes of all tensors.
    fn bytes(&self) -> usize {
        self.dense_bytes + self.experts.values().map(|runs| runs.num * runs.run_bytes).sum::<usize>()
    }

    /// Where each expert's bytes lie in the model's files, layer by layer; `None` if any are stored otherwise there.
    fn pieces(&self, weights: &Weights) -> Option<Vec<Vec<Piece>>> {
        let mut runs: BTreeMap<(u32, u32), Vec<Piece>> = BTreeMap::new();
        for &id in &self.order {
            let (Some(layer), Some(expert)) = (id.layer, id.expert) else { continue };
            let (place, spans) = (self.places.get(&id)?, weights.spans(id).filter(|_| !is_vector(id))?);
            let form = place.form;
            let parts = [
                (place.data_at, form.data_bytes()),
                (place.zeros_at(), form.zero_bytes()),
                (place.scales_at, form.scale_bytes()),
            ];
            let parts = parts.into_iter().filter(|p| p.1 > 0);
            for ((to, len), (file, range)) in parts.zip(spans) {
                let piece = Piece { file, at: range.start as u64, len: range.len(), to };
                runs.entry((layer.0, expert.0)).or_default().push(Some(piece).filter(|_| len == range.len())?);
            }
        }
        Some(runs.into_values().collect())
    }

    /// Bytes that one tensor takes.
    pub fn stored_bytes(&self, id: TensorId) -> u64 {
        self.places.get(&id).map_or(0, |p| (p.form.data_bytes() + p.form.zero_bytes() + p.form.scale_bytes()) as u64)
    }
}

/// All weights of a model.
pub(super) struct Store {
    dense: Buffer,
    experts: Experts,
    layout: Layout,
    /// Per layer with experts: `[E][gate, up, down]` descriptors, and `[E][6]` addresses: gate, up, down, words then scales.
    tables: HashMap<u32, (Buffer, Buffer)>,
    /// Forms of a layer's experts, where all are stored alike.
    forms: HashMap<u32, [Matrix; 3]>,
}

/// What decides where experts are, and what came of it.
#[derive(Clone, Debug)]
pub(super) struct Residency {
    pub needs: Needs,
    pub vram: VramPlan,
    /// Whether any expert may be elsewhere than on the device.
    pub tiered: bool,
    /// `None`: by the shape of each layer.
    pub policy: Option<Policy>,
    /// Maps to the next routers.
    pub lookahead: Arc<Lookahead>,
    /// Bytes a second of a slower link to imitate.
    pub link_limit: Option<f64>,
    /// Page-locked bytes beyond which a system is imitated that refuses more.
    pub locked_limit: Option<u64>,
    /// Where in the host's memory copies lie; `None`: wherever the driver has them.
    pub nodes: Option<Nodes>,
    /// Whether experts that are read from the disk stay in the system's cache of pages too.
    pub pages: Pages,
    /// What did not go as planned.
    pub notes: Vec<String>,
}

impl Residency {
    /// All on the device.
    pub fn resident() -> Self {
        Self {
            needs: Needs::default(),
            vram: VramPlan::default(),
            tiered: false,
            policy: None,
            lookahead: Arc::default(),
            link_limit: None,
            locked_limit: None,
            nodes: None,
            pages: Pages::Past,
            notes: Vec::new(),
        }
    }

    /// A plan that does without what was refused; the error if there is none.
    fn without(&mut self, error: CudaError) -> Result<(), CudaError> {
        match error {
            CudaError::PageLocked { had_bytes, .. } if had_bytes < self.vram.host_bytes => {
                // What was had in chunks need not be had again to the last byte.
                let vram = self.needs.beside(&self.vram, had_bytes / 16 * 15);
                if vram.host_bytes > vram.host_budget_bytes {
                    return Err(error);
                }
                let had = gigabytes(had_bytes);
                self.notes.push(match vram.disk_bytes {
                    0 => format!("{had} of page-locked memory could be had; more experts stay in GPU memory for good"),
                    _ => format!(
                        "{had} of page-locked memory could be had; other experts are read through the system's cache of files"
                    ),
                });
                (self.vram, self.pages) = (vram, Pages::Kept);
                Ok(())
            }
            CudaError::Memory { .. } => {
                let (layers, plan) = (&self.needs.layers, &self.vram);
                let Some(slots) = tiers::plan::give_back(layers, &plan.slots, &plan.permanent, plan.slot_bytes / 8) else {
                    return Err(error);
                };
                let before = plan.slots.iter().sum::<usize>();
                let vram = self.needs.beside(&plan.with(&self.needs, slots, plan.pages), plan.host_budget_bytes);
                if vram.host_bytes > vram.host_budget_bytes {
                    return Err(error);
                }
                self.vram = vram;
                let now = self.vram.slots.iter().sum::<usize>();
                self.notes.push(format!("another process has taken GPU memory: {now} slots for experts instead of {before}"));
                Ok(())
            }
            error => Err(error),
        }
    }
}

/// Where experts are.
enum Experts {
    /// All on the device, and the first byte of each layer.
    Resident(Buffer, HashMap<u32, usize>),
    /// Some on the device, others in host memory or on the disk.
    Tiered(Box<Tiers>),
}

impl Experts {
    /// As planned, or by a plan that does without what is refused.
    fn new(
        device: &Arc<Device>,
        layout: &Layout,
        weights: Option<&Weights>,
        residency: &mut Residency,
    ) -> Result<Self, CudaError> {
        while residency.tiered {
            let backing = backing(layout, weights, residency)?;
            match Tiers::new(device, &layout.experts, residency, backing) {
                Ok(tiers) => return Ok(Experts::Tiered(Box::new(tiers))),
                Err(error) => residency.without(error)?,
            }
        }
        let mut bytes = 0;
        let starts = layout.experts.iter().map(|(&layer, runs)| {
            let start = bytes;
            bytes += runs.num * runs.run_bytes;
            (layer, start)
        });
        let starts = starts.collect();
        Ok(Experts::Resident(Buffer::new(device, bytes)?, starts))
    }
}

/// Where experts are read from that have no other place: the model's files, or one of their own if they are stored otherwise there.
fn backing(layout: &Layout, weights: Option<&Weights>, residency: &Residency) -> Result<Backing, CudaError> {
    if residency.vram.disk_bytes == 0 {
        return Ok(Backing::None);
    }
    let Some((weights, pieces)) = weights.and_then(|w| Some((w, layout.pieces(w)?))) else {
        return Ok(Backing::Filling(files::scratch()?));
    };
    let files: Result<_, _> = weights.checkpoint().shards().iter().map(|s| Reader::open(&s.path, residency.pages)).collect();
    let cold =
        Cold::new(files?, pieces).map_err(|e| CudaError::Driver { what: "start threads that read", error: e.to_string() })?;
    Ok(Backing::Files(Arc::new(cold)))
}

impl Store {
    /// Copies a model directory; `on` is told of every byte that has been taken from the files.
    pub fn load(
        device: &Arc<Device>,
        weights: &Weights,
        layout: Layout,
        residency: &mut Residency,
        on: &mut dyn FnMut(u64),
    ) -> Result<Self, LoadError> {
        let mut store = Self::empty(device, layout, Some(weights), residency)?;
        let mut stager = Stager::new(device, store.layout.bytes())?;
        for id in store.layout.order.clone() {
            let (Some(weight), Some(place)) = (weights.get(id), store.layout.places.get(&id).copied()) else { continue };
            match &weight.data {
                Data::Packed(p) => {
                    store.push(&mut stager, id, place.data_at, p.words)?;
                    store.push(&mut stager, id, place.scales_at, p.scales)?;
                    p.zeros.map_or(Ok(()), |zeros| store.push(&mut stager, id, place.zeros_at(), zeros))?;
                }
                Data::Plain { bytes, .. } if !is_vector(id) => store.push(&mut stager, id, place.data_at, bytes)?,
                _ => {
                    let dtype = if is_vector(id) { Dtype::F32 } else { Dtype::BF16 };
                    let values = weight.to_f32()?;
                    let mut bytes = vec![0; dtype.bytes(values.len())];
                    tensor::encode(&mut bytes, dtype, &values);
                    store.push(&mut stager, id, place.data_at, &bytes)?;
                }
            }
            store.forget(weights, id);
            on(weight.stored_bytes() as u64);
        }
        stager.finish()?;
        Ok(store.with_tables(device, weights.spec())?)
    }

    /// Lets the system forget what has a copy in host memory, so that it is not there twice.
    fn forget(&self, weights: &Weights, id: TensorId) {
        if let (Experts::Tiered(tiers), Some(layer), Some(expert)) = (&self.experts, id.layer, id.expert)
            && tiers.copy(layer.0, expert.0).is_some()
        {
            let spans = weights.spans(id).into_iter().flatten();
            spans.for_each(|(shard, range)| weights.checkpoint().shards()[shard].forget(range));
        }
    }

    /// Fills a layout with random codes of a fitting scale and unit gains, on the device.
    pub fn random(
        device: &Arc<Device>,
        plain: &Plain,
        spec: &ModelSpec,
        layout: Layout,
        residency: &mut Residency,
        seed: u64,
    ) -> Result<Self, CudaError> {
        let mut store = Self::empty(device, layout, None, residency)?;
        let largest = store.layout.experts.values().map(|r| r.run_bytes).max().unwrap_or(0);
        let stage = Buffer::new(device, if store.tiers().is_some_and(Tiers::is_filling) { largest } else { 0 })?;
        let mut experts: BTreeMap<(u32, u32), Vec<(usize, TensorId)>> = BTreeMap::new();
        for (i, &id) in store.layout.order.iter().enumerate() {
            match (id.layer, id.expert) {
                (Some(layer), Some(expert)) => experts.entry((layer.0, expert.0)).or_default().push((i, id)),
                _ => store.randomize(plain, i, id, store.dense.at(0), seed)?,
            }
        }
        for ((layer, expert), tensors) in experts {
            // The same values wherever the expert lies.
            let places = match &store.experts {
                Experts::Resident(memory, starts) => {
                    vec![memory.at(starts[&layer] + expert as usize * store.layout.experts[&layer].run_bytes)]
                }
                Experts::Tiered(tiers) => {
                    let slot = tiers.slot(layer, expert)?.map(|(slots, at)| slots.at(at));
                    let stage = tiers.is_filling().then(|| stage.at(0));
                    slot.into_iter().chain(tiers.copy(layer, expert)).chain(stage).collect()
                }
            };
            for &place in &places {
                tensors.iter().try_for_each(|&(i, id)| store.randomize(plain, i, id, place, seed))?;
            }
            if let Experts::Tiered(tiers) = &mut store.experts
                && tiers.is_filling()
            {
                let mut bytes = vec![0; store.layout.experts[&layer].run_bytes];
                device.download(&mut bytes, &stage, 0)?;
                tiers.write(layer, expert, 0, &bytes)?;
            }
        }
        device.synchronize()?;
        store.with_tables(device, spec)
    }

    /// Fills one tensor, the `i`th, of what begins at `base`.
    fn randomize(&self, plain: &Plain, i: usize, id: TensorId, base: u64, seed: u64) -> Result<(), CudaError> {
        let Some(place) = self.layout.places.get(&id) else { return Ok(()) };
        let (form, seed) = (place.form, seed.wrapping_add((i as u64) << 40));
        let (data, scales) = (base + place.data_at as u64, base + place.scales_at as u64);
        let spread = (3.0 / form.cols as f32).sqrt();
        let fill =
            |at: u64, n: usize, kind: i32, scale: f32| plain.plain_random(launch::elements(n), at, n as u64, seed, kind, scale);
        match form.kind {
            Kind::Int4 | Kind::Int8 => {
                fill(data, form.data_bytes() / 4, form.kind as i32, 0.0)?;
                if form.zero_bytes() > 0 {
                    fill(base + place.zeros_at() as u64, form.zero_bytes() / 4, form.kind as i32, 0.0)?;
                }
                let steps = if form.kind == Kind::Int4 { 8.0 } else { 128.0 };
                let n = form.rows * (form.cols / form.group);
                plain.plain_fill(launch::elements(n), scales, n as u64, Kind::Bf16 as i32, spread / steps)
            }
            _ if id.part == Part::Weight && is_vector(id) => {
                plain.plain_fill(launch::elements(form.cols), data, form.cols as u64, form.kind as i32, 1.0)
            }
            _ => fill(data, form.rows * form.cols, form.kind as i32, if id.role == Role::Embed { 1.0 } else { spread }),
        }
    }

    /// Room for a layout.
    pub fn empty(
        device: &Arc<Device>,
        layout: Layout,
        weights: Option<&Weights>,
        residency: &mut Residency,
    ) -> Result<Self, CudaError> {
        let dense = Buffer::new(device, layout.dense_bytes)?;
        let experts = Experts::new(device, &layout, weights, residency)?;
        Ok(Self { dense, experts, layout, tables: HashMap::new(), forms: HashMap::new() })
    }

    /// Copies bytes to wherever a tensor lies, `at` from the start of its allocation or run.
    fn push(&mut self, stager: &mut Stager<'_>, id: TensorId, at: usize, src: &[u8]) -> Result<(), CudaError> {
        match (&mut self.experts, id.layer, id.expert) {
            (Experts::Tiered(tiers), Some(layer), Some(expert)) => {
                if let Some((slots, start)) = tiers.slot(layer.0, expert.0)? {
                    stager.push(slots, start + at, src)?;
                }
                tiers.write(layer.0, expert.0, at, src)
            }
            (Experts::Resident(memory, starts), Some(layer), Some(expert)) => {
                let first = starts[&layer.0] + expert.0 as usize * self.layout.experts[&layer.0].run_bytes;
                stager.push(memory, first + at, src)
            }
            _ => stager.push(&self.dense, at, src),
        }
    }

    /// First byte of an expert for the kernels.
    fn base(&self, layer: u32, expert: u32) -> Result<u64, CudaError> {
        match &self.experts {
            Experts::Tiered(tiers) => tiers.place(layer, expert),
            Experts::Resident(memory, starts) => {
                Ok(memory.at(starts[&layer] + expert as usize * self.layout.experts[&layer].run_bytes))
            }
        }
    }

    /// All is written: tells the kernels where everything is.
    fn with_tables(mut self, device: &Arc<Device>, spec: &ModelSpec) -> Result<Self, CudaError> {
        if let Experts::Tiered(tiers) = &mut self.experts {
            tiers.seal()?;
        }
        for (l, layer) in (0u32..).zip(&spec.layers) {
            let Ffn::Moe(moe) = &layer.ffn else { continue };
            if !self.layout.experts.contains_key(&l) {
                continue;
            }
            let table = self.placed(l, moe.router.experts as u32)?;
            let alike = |a: &Matrix, b: &Matrix| Matrix { data: 0, scales: 0, ..*a } == Matrix { data: 0, scales: 0, ..*b };
            if table.chunks_exact(3).all(|e| e.iter().zip(&table).all(|(a, b)| alike(a, b))) {
                self.forms.insert(l, [table[0], table[1], table[2]]);
            }
            self.tables.insert(l, (Buffer::from_slice(device, &table)?, Buffer::from_slice(device, &addresses(&table))?));
        }
        device.synchronize()?;
        Ok(self)
    }

    /// Descriptors of a layer's experts where they lie now, `[E][gate, up, down]`.
    fn placed(&self, layer: u32, experts: u32) -> Result<Vec<Matrix>, CudaError> {
        let mut table = Vec::with_capacity(3 * experts as usize);
        for e in 0..experts {
            let base = if (e as usize) < self.layout.experts[&layer].num { self.base(layer, e)? } else { 0 };
            let id = |role| TensorId::expert(LayerId(layer), ExpertId(e), role);
            table.extend([Role::ExpertGate, Role::ExpertUp, Role::ExpertDown].map(|role| self.matrix_at(id(role), base)));
        }
        Ok(table)
    }

    /// Gives each layer so many slots and tells the kernels where everything is now; they must be done.
    pub fn resize(&mut self, device: &Device, slots: &[usize]) -> Result<(), CudaError> {
        let Experts::Tiered(tiers) = &mut self.experts else { return Ok(()) };
        tiers.resize(slots)?;
        for (&layer, (matrices, table)) in &self.tables {
            let placed = self.placed(layer, (matrices.bytes() / size_of::<Matrix>() / 3) as u32)?;
            device.upload(matrices, 0, &placed)?;
            device.upload(table, 0, &addresses(&placed))?;
        }
        device.synchronize()
    }

    /// Descriptor of a weight that is of no expert, as it was loaded; [`Matrix::NONE`] for one the model does not have.
    pub fn matrix(&self, id: TensorId) -> Matrix {
        debug_assert!(id.expert.is_none());
        self.matrix_at(id, self.dense.at(0))
    }

    /// The same of any weight, wherever it lies now.
    pub fn find(&self, id: TensorId) -> Result<Matrix, CudaError> {
        match (id.layer, id.expert) {
            _ if !self.layout.places.contains_key(&id) => Ok(Matrix::NONE),
            (Some(layer), Some(expert)) => Ok(self.matrix_at(id, self.base(layer.0, expert.0)?)),
            _ => Ok(self.matrix(id)),
        }
    }

    fn matrix_at(&self, id: TensorId, base: u64) -> Matrix {
        let Some(place) = self.layout.places.get(&id) else { return Matrix::NONE };
        let form = place.form;
        Matrix {
            data: base + place.data_at as u64,
            scales: if form.scale_bytes() > 0 { base + place.scales_at as u64 } else { 0 },
            rows: form.rows as i32,
            cols: form.cols as i32,
            group: form.group as i32,
            kind: form.kind,
            scale_kind: form.scale_kind,
            zeros: if form.zero_bytes() > 0 { ((place.zeros_at() - place.data_at) / ZEROS_UNIT) as i32 } else { 0 },
        }
    }

    /// The optional bias beside a weight.
    pub fn optional(&self, id: Option<TensorId>) -> Matrix {
        id.map_or(Matrix::NONE, |id| self.matrix(id))
    }

    /// Experts that are not all on the device.
    pub fn tiers(&self) -> Option<&Tiers> {
        match &self.experts {
            Experts::Resident(..) => None,
            Experts::Tiered(tiers) => Some(tiers),
        }
    }

    /// Address of a layer's expert descriptors.
    pub fn table(&self, layer: u32) -> u64 {
        self.tables.get(&layer).map_or(0, |t| t.0.at(0))
    }

    /// Address of a layer's expert addresses.
    pub fn addresses(&self, layer: u32) -> u64 {
        self.tables.get(&layer).map_or(0, |t| t.1.at(0))
    }

    /// A layer's first expert; [`Matrix::NONE`] if its experts are not all stored alike.
    pub fn expert(&self, layer: u32) -> [Matrix; 3] {
        self.forms.get(&layer).copied().unwrap_or([Matrix::NONE; 3])
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Addresses alone, words before scales.
fn addresses(table: &[Matrix]) -> Vec<u64> {
    table.iter().flat_map(|m| [m.data, m.scales]).collect()
}

/// Copies runs of bytes to the device through page-locked buffers, filling one while the others travel.
pub(super) struct Stager<'a> {
    device: &'a Arc<Device>,
    buffers: Vec<(Pinned, Event)>,
    /// Bytes of a buffer.
    each: usize,
    turn: usize,
    filled: usize,
}

impl<'a> Stager<'a> {
    /// For so many bytes.
    pub fn new(device: &'a Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let each = bytes.div_ceil(STAGING_BUFFERS).clamp(1, STAGING_BYTES).next_multiple_of(16);
        let buffers = (0..STAGING_BUFFERS).map(|_| Ok((Pinned::new(device, each)?, Event::new(device)?)));
        Ok(Self { device, buffers: buffers.collect::<Result<_, CudaError>>()?, each, turn: 0, filled: 0 })
    }

    pub fn push(&mut self, target: &Buffer, mut at: usize, mut src: &[u8]) -> Result<(), CudaError> {
        assert!(at + src.len() <= target.bytes());
        while !src.is_empty() {
            if self.filled == self.each {
                self.rotate()?;
            }
            let n = src.len().min(self.each - self.filled);
            let (now, rest) = src.split_at(n);
            let staged = &mut self.buffers[self.turn].0.as_mut()[self.filled..self.filled + n];
            staged.par_chunks_mut(COPY_BYTES).zip(now.par_chunks(COPY_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
            self.device.current()?;
            // SAFETY: the range of the target was checked above; the staged bytes are not touched before their event is over.
            unsafe { result::memcpy_htod_async(target.at(at), staged, self.device.copy_stream()) }.during("copy weights")?;
            self.filled = (self.filled + n).next_multiple_of(16).min(self.each);
            at += n;
            src = rest;
        }
        Ok(())
    }

    fn rotate(&mut self) -> Result<(), CudaError> {
        self.buffers[self.turn].1.record(self.device.copy_stream())?;
        self.turn = (self.turn + 1) % STAGING_BUFFERS;
        self.filled = 0;
        self.buffers[self.turn].1.wait()
    }

    pub fn finish(mut self) -> Result<(), CudaError> {
        for _ in 0..STAGING_BUFFERS {
            self.rotate()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An expert is one run of bytes, words and zero points before scales, and no two tensors overlap.
    #[test]
    fn an_expert_is_one_run_of_bytes() {
        let form = |rows, cols| Form { rows, cols, kind: Kind::Int4, group: 32, scale_kind: Kind::Bf16, zero: Zero::Point };
        let expert = |e, role| TensorId::expert(LayerId(0), ExpertId(e), role);
        let all = [0, 1]
            .into_iter()
            .flat_map(|e| [(expert(e, Role::ExpertGate), form(48, 64)), (expert(e, Role::ExpertDown), form(64, 96))]);
        let layout = Layout::place(all.chain([(TensorId::global(Role::Head), form(10, 64))]));
        let disjoint = |keep: &dyn Fn(&TensorId) -> bool, bytes: usize| {
            let mut spans: Vec<(usize, usize)> = Vec::new();
            for (_, p) in layout.places.iter().filter(|(id, _)| keep(id)) {
                spans.push((p.data_at, p.data_at + p.form.data_bytes()));
                spans.push((p.zeros_at(), p.zeros_at() + p.form.zero_bytes()));
                spans.push((p.scales_at, p.scales_at + p.form.scale_bytes()));
            }
            spans.sort_unstable();
            spans.windows(2).all(|w| w[0].1 <= w[1].0) && spans.last().unwrap().1 <= bytes
        };
        let runs = layout.experts[&0];
        assert_eq!(runs.num, 2);
        assert!(disjoint(&|id| id.expert.is_none(), layout.dense_bytes));
        assert!([0, 1].into_iter().all(|e| disjoint(&|id| id.expert == Some(ExpertId(e)), runs.run_bytes)));
        let of = |e, role| layout.places[&expert(e, role)];
        assert!(of(0, Role::ExpertDown).data_at < of(0, Role::ExpertGate).scales_at);
    }
}
