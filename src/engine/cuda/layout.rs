//! Where every tensor of a model lies on the device, computed from headers. The matrices of one expert lie next to each other, so that an
//! expert is one run of bytes.

use super::cold::Piece;
use super::launch::Width;
use super::memory::aligned;
use super::plain::Kind;
use super::slots::ExpertRuns;
use crate::artifact::weights::{Data, Weight, Weights};
use crate::ids::{Component, Part, Role, TensorId};
use crate::model::names;
use crate::model::spec::ModelSpec;
use crate::quant::format::{Bits, Format, Zero};
use crate::tensor::Dtype;
use crate::tiers;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Form of one tensor on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub rows: usize,
    pub cols: usize,
    pub kind: Kind,
    pub group: usize,
    pub scale_kind: Kind,
    pub zero: Zero,
}

impl Form {
    pub fn data_bytes(self) -> usize {
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

    pub fn zero_bytes(self) -> usize {
        let per_word = match (self.zero, self.kind) {
            (Zero::Point, Kind::Int4) => 8,
            (Zero::Point, Kind::Int8) => 4,
            _ => return 0,
        };
        4 * self.rows.div_ceil(per_word) * (self.cols / self.group)
    }

    pub fn scale_bytes(self) -> usize {
        match self.kind {
            Kind::Int4 | Kind::Int8 => self.rows * (self.cols / self.group) * if self.scale_kind == Kind::F32 { 4 } else { 2 },
            _ => 0,
        }
    }
}

/// Where one tensor lies: in the allocation of all that every token uses, or in the run of its expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub form: Form,
    pub data_at: usize,
    pub scales_at: usize,
}

impl Place {
    /// Zero points lie behind the codes.
    pub fn zeros_at(&self) -> usize {
        self.data_at + aligned(self.form.data_bytes())
    }
}

/// Where every tensor of a model lies.
pub(super) struct Layout {
    pub places: HashMap<TensorId, Place>,
    /// Every id in the order of the model.
    pub order: Vec<TensorId>,
    /// Bytes of everything but experts.
    pub dense_bytes: usize,
    /// The experts of each layer that has any.
    pub experts: BTreeMap<u32, ExpertRuns>,
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
pub(super) fn is_vector(id: TensorId) -> bool {
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
        let layers = spec.routers().enumerate().map(|(i, (layer, router))| tiers::Layer {
            experts: router.experts,
            top_k: router.top_k,
            slot_bytes: self.experts.get(&layer).map_or(0, |runs| runs.run_bytes as u64),
            visits: visits.get(i).cloned().unwrap_or_default(),
        });
        layers.collect()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.dense_bytes + self.experts.values().map(|runs| runs.num * runs.run_bytes).sum::<usize>()
    }

    /// Where each expert's bytes lie in the model's files, layer by layer; `None` if any are stored otherwise there.
    pub fn pieces(&self, weights: &Weights) -> Option<Vec<Vec<Piece>>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ExpertId, LayerId};

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
