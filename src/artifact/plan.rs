//! What becomes of every tensor of a source, decided from headers alone. Must not know how formats were chosen, or write.

use super::config::{self, Caveat};
use super::error::ArtifactError;
use super::layout::{self, Content, Shard, Tensor, Unit};
use super::manifest::{Action, Row, Totals};
use super::weights::{Data, Stored, Weights};
use crate::ids::{Part, Role, TensorId};
use crate::quant::format::{Bits, Format, Group};
use crate::tensor::Dtype;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// What is to be done with a tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The format it gets.
    pub format: Format,
    /// Why, where that is not plain.
    pub reason: Option<String>,
}

/// Everything that will be written, known from headers alone.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The weight files.
    pub shards: Vec<Shard>,
    /// What becomes of every source tensor.
    pub rows: Vec<Row>,
    /// `config.json` of the artifact.
    pub config: Value,
    /// Which readers are left out.
    pub caveats: Vec<Caveat>,
    /// Type of the scales.
    pub scale_dtype: Dtype,
    /// Sums.
    pub totals: Totals,
}

/// Decides what every tensor of the source becomes.
pub fn plan(weights: &Weights, choose: impl Fn(TensorId) -> Choice, shard_bytes: u64) -> Result<Plan, ArtifactError> {
    let checkpoint = weights.checkpoint();
    let scale_dtype = scale_dtype(weights);
    let mut planner = Planner {
        weights,
        scale_dtype,
        units: Vec::new(),
        rows: Vec::new(),
        row_of: HashMap::new(),
        copied: HashSet::new(),
        open: None,
    };
    for (id, shape) in weights.tensors() {
        planner.model_tensor(*id, shape, choose(*id))?;
    }
    for name in weights.side_tensors() {
        planner.side_tensor(name)?;
    }
    let Planner { units, rows, .. } = planner;
    let shards = layout::arrange(units, shard_bytes);
    let quantization =
        config::quantization_config(&weights.family().names, weights.tensors(), |id| choose(id).format, weights.side_tensors());
    let parameters: u64 = weights.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum();
    let model_bytes: u64 = rows.iter().filter(|r| r.id.is_some()).map(|r| r.bytes).sum();
    let totals = Totals {
        parameters,
        source_bytes: rows.iter().map(|r| r.source_bytes).sum(),
        bytes: rows.iter().map(|r| r.bytes).sum(),
        bpw: model_bytes as f64 * 8.0 / parameters.max(1) as f64,
    };
    let config = config::with_quantization(checkpoint.config(), quantization.value);
    Ok(Plan { shards, rows, config, caveats: quantization.caveats, scale_dtype, totals })
}

/// The model's type, in which scales are stored; that of the first plain tensor where the config names none.
pub fn scale_dtype(weights: &Weights) -> Dtype {
    if let Some(dtype) = config::model_dtype(weights.checkpoint().config()) {
        return dtype;
    }
    let types = weights.tensors().iter().filter_map(|(id, _)| weights.dtype(*id));
    types.into_iter().find(|d| d.is_float()).unwrap_or(Dtype::BF16)
}

struct Planner<'a> {
    weights: &'a Weights,
    scale_dtype: Dtype,
    units: Vec<Unit>,
    rows: Vec<Row>,
    row_of: HashMap<(Option<String>, Action, String, Option<String>), usize>,
    copied: HashSet<String>,
    /// Layer and expert of the unit being filled.
    open: Option<TensorId>,
}

impl Planner<'_> {
    fn model_tensor(&mut self, id: TensorId, shape: &[usize], choice: Choice) -> Result<(), ArtifactError> {
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        let stored = self.weights.stored(id).ok_or_else(vanished)?;
        let names = self.weights.family().names;
        let elements: usize = shape.iter().product();
        let (tensors, shapes, action) = match (stored, choice.format) {
            (Stored::Packed { module, .. }, _) => {
                let dir = self.weights.checkpoint().dir().to_path_buf();
                return Err(ArtifactError::AlreadyQuantized { dir, tensor: module.clone() });
            }
            (Stored::Plain { name }, Format::Source) => (vec![self.copy(name)?], Vec::new(), Action::Copied),
            (Stored::Slice { fused }, Format::Source) => {
                let once = self.copied.insert(fused.tensor.clone());
                (if once { vec![self.copy(&fused.tensor)?] } else { Vec::new() }, Vec::new(), Action::Copied)
            }
            (Stored::Fp8 { name, .. }, Format::Source) => {
                let content = Content::Decoded { id };
                let tensor = Tensor { name: name.clone(), dtype: self.scale_dtype, shape: shape.to_vec(), content };
                (vec![tensor], Vec::new(), Action::Decoded)
            }
            (stored, Format::Int { bits, group }) => {
                let &[rows, cols] = shape else { return Err(vanished()) };
                let (codes, scales, dims) = quantized(&names.module(id), id, [rows, cols], bits, group, self.scale_dtype);
                let action = if matches!(stored, Stored::Slice { .. }) { Action::Split } else { Action::Quantized };
                (vec![codes, scales], vec![dims], action)
            }
        };
        let source_bytes: u64 = match stored {
            Stored::Slice { fused } => self.source_dtype(&fused.tensor)?.bytes(elements) as u64,
            _ => self.weights.file_tensors(id).iter().map(|n| self.entry_bytes(n)).sum::<Result<u64, _>>()?,
        };
        let bytes = match (stored, choice.format) {
            (Stored::Slice { .. }, Format::Source) => source_bytes,
            _ => tensors.iter().chain(&shapes).map(Tensor::bytes).sum(),
        };
        let format = match choice.format {
            Format::Source => tensors
                .first()
                .map_or(self.weights.dtype(id), |t| Some(t.dtype))
                .map_or_else(String::new, |d| d.name().to_lowercase()),
            quantized => quantized.to_string(),
        };
        self.record(Some(id), self.weights.file_tensors(id), action, format, choice.reason, [source_bytes, bytes]);
        self.place(id, tensors, shapes);
        Ok(())
    }

    /// Adds tensors to the plan, those of one expert to one unit: codes of all projections, then their scales.
    fn place(&mut self, id: TensorId, tensors: Vec<Tensor>, mut shapes: Vec<Tensor>) {
        let key = TensorId { role: Role::ExpertGate, part: Part::Weight, ..id };
        let same = id.expert.is_some() && self.open == Some(key);
        self.open = id.expert.map(|_| key);
        if tensors.is_empty() {
            return;
        }
        match self.units.last_mut().filter(|_| same) {
            Some(unit) => {
                unit.tensors.extend(tensors);
                unit.shapes.append(&mut shapes);
                unit.tensors.sort_by_key(|t| matches!(t.content, Content::Scales { .. }));
            }
            None => self.units.push(Unit { tensors, shapes }),
        }
    }

    fn side_tensor(&mut self, name: &str) -> Result<(), ArtifactError> {
        let bytes = self.entry_bytes(name)?;
        let dtype = self.source_dtype(name)?.name().to_lowercase();
        let embed = TensorId::global(Role::Embed);
        if name == "lm_head.weight" && self.weights.spec().tied {
            let same = match (self.weights.checkpoint().tensor(name), self.weights.get(embed).map(|w| w.data)) {
                (Some(head), Some(Data::Plain { bytes, .. })) => head.bytes == bytes,
                _ => false,
            };
            if same {
                let reason = Some("a copy of the tied embedding".to_string());
                self.record(None, vec![name.into()], Action::Dropped, dtype, reason, [bytes, 0]);
                return Ok(());
            }
        }
        let unit = Unit { tensors: vec![self.copy(name)?], shapes: Vec::new() };
        self.units.push(unit);
        let reason = Some("not used by the forward pass".to_string());
        self.record(None, vec![name.into()], Action::Copied, dtype, reason, [bytes, bytes]);
        Ok(())
    }

    fn record(
        &mut self,
        id: Option<TensorId>,
        source: Vec<String>,
        action: Action,
        format: String,
        reason: Option<String>,
        bytes: [u64; 2],
    ) {
        let starred = id.map(|id| match id.expert {
            Some(e) => id.to_string().replacen(&format!("experts.{}.", e.0), "experts.*.", 1),
            None => id.to_string(),
        });
        let of_expert = id.and_then(|id| id.expert);
        let source: Vec<String> = source
            .into_iter()
            .map(|n| match of_expert {
                Some(e) => n.replacen(&format!(".experts.{}.", e.0), ".experts.*.", 1),
                None => n,
            })
            .collect();
        let key = (starred.clone().or_else(|| source.first().cloned()), action, format.clone(), reason.clone());
        match self.row_of.get(&key) {
            Some(&i) => {
                let row = &mut self.rows[i];
                row.tensors += 1;
                row.source_bytes += bytes[0];
                row.bytes += bytes[1];
            }
            None => {
                self.row_of.insert(key, self.rows.len());
                let [source_bytes, bytes] = bytes;
                self.rows.push(Row { id: starred, source, tensors: 1, action, reason, format, source_bytes, bytes });
            }
        }
    }

    fn copy(&self, name: &str) -> Result<Tensor, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })?;
        let content = Content::Copy { source: name.into() };
        Ok(Tensor { name: name.into(), dtype: entry.dtype, shape: entry.shape.clone(), content })
    }

    fn source_dtype(&self, name: &str) -> Result<Dtype, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name);
        entry.map(|e| e.dtype).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })
    }

    fn entry_bytes(&self, name: &str) -> Result<u64, ArtifactError> {
        let entry = self.weights.checkpoint().entry(name);
        entry.map(|e| e.range.len() as u64).ok_or_else(|| ArtifactError::Vanished { tensor: name.into() })
    }
}

/// The three tensors of a quantized weight: packed codes, scales, shape.
fn quantized(module: &str, id: TensorId, shape: [usize; 2], bits: Bits, group: Group, scale: Dtype) -> (Tensor, Tensor, Tensor) {
    let [rows, cols] = shape;
    let format = Format::Int { bits, group };
    let tensor =
        |what: &str, dtype, shape: Vec<usize>, content| Tensor { name: format!("{module}.weight_{what}"), dtype, shape, content };
    (
        tensor("packed", Dtype::I32, vec![rows, format.packed_cols(cols)], Content::Codes { id, bits, group }),
        tensor("scale", scale, vec![rows, format.scale_cols(cols)], Content::Scales { id }),
        tensor("shape", Dtype::I64, vec![2], Content::Shape { shape }),
    )
}
