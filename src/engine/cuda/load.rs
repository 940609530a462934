//! Weights from their files to where the layout has them, through page-locked memory.
//!
//! The device holds matrices as the disk does. Norm gains and biases become `f32`, FP8 blocks become bf16; both are decoded on
//! the way.

use super::cold::Cold;
use super::device::{CudaError, Device};
use super::launch;
use super::layout::{Layout, is_vector};
use super::memory::{Buffer, gigabytes};
use super::numa::Nodes;
use super::plain::{Kind, Matrix, Plain};
use super::slots::{Backing, Tiers};
use super::stager::Stager;
use crate::artifact::lookahead::Lookahead;
use crate::artifact::weights::{Data, Weights};
use crate::checkpoint::CheckpointError;
use crate::files::{self, Pages, Reader};
use crate::ids::{ExpertId, LayerId, Part, Role, TensorId};
use crate::model::spec::{Ffn, ModelSpec};
use crate::tensor::{self, Dtype};
use crate::tiers::{self, Needs, Policy, VramPlan};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Bytes in which a descriptor counts the way from codes to zero points; what aligns tensors is a multiple of it.
const ZEROS_UNIT: usize = 16;

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
            CudaError::PageLocked { had_bytes, .. } if had_bytes < self.vram.host.bytes => {
                // What was had in chunks need not be had again to the last byte.
                let vram = self.needs.beside(&self.vram, had_bytes / 16 * 15);
                if !vram.host.fits() {
                    return Err(error);
                }
                let had = gigabytes(had_bytes);
                self.notes.push(match vram.host.disk_bytes {
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
                let Some(slots) = tiers::plan::give_back(layers, &plan.slots, &plan.host.permanent, plan.slot_bytes / 8) else {
                    return Err(error);
                };
                let before = plan.slots.iter().sum::<usize>();
                let vram = self.needs.beside(&plan.with(&self.needs, slots, plan.pages), plan.host.budget_bytes);
                if !vram.host.fits() {
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
    if residency.vram.host.disk_bytes == 0 {
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
