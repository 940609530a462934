//! What becomes of every tensor of a source, decided from headers alone. Must not know how formats were chosen, or write.

use super::config::{self, Caveat};
use super::error::ArtifactError;
use super::inventory::Inventory;
use super::layout::{self, Content, Shard, Tensor, Unit};
use super::manifest::{Action, Row, Totals};
use super::weights::{Data, Stored};
use crate::checkpoint::mxfp4;
use crate::ids::{Part, Role, TensorId};
use crate::quant::format::Format;
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
pub fn plan(weights: &Inventory, choose: impl Fn(TensorId) -> Choice, shard_bytes: u64) -> Result<Plan, ArtifactError> {
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
        // Biases lie in fused tensors as the weights do, and go where these go.
        let of_weight = TensorId { part: Part::Weight, ..*id };
        let apart = id.part == Part::Bias
            && (choose(of_weight).format != Format::Source || matches!(weights.stored(of_weight), Some(Stored::Mxfp4 { .. })));
        planner.model_tensor(*id, shape, choose(*id), apart)?;
    }
    for name in weights.side_tensors() {
        planner.side_tensor(name)?;
    }
    let Planner { units, rows, .. } = planner;
    let shards = layout::arrange(units, shard_bytes);
    let quantization =
        config::quantization_config(weights.names(), weights.tensors(), |id| choose(id).format, &side_matrices(weights));
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

/// Tensors standing aside that readers may take for the weight of a linear module.
pub fn side_matrices(weights: &Inventory) -> Vec<String> {
    let is_matrix = |name: &&String| weights.checkpoint().entry(name).is_some_and(|e| e.shape.len() > 1);
    weights.side_tensors().iter().filter(is_matrix).cloned().collect()
}

/// The model's type, in which scales are stored; that of the first plain tensor where the config names none.
pub fn scale_dtype(weights: &Inventory) -> Dtype {
    if let Some(dtype) = config::model_dtype(weights.checkpoint().config()) {
        return dtype;
    }
    let types = weights.tensors().iter().filter_map(|(id, _)| weights.dtype(*id));
    types.into_iter().find(|d| d.is_float()).unwrap_or(Dtype::BF16)
}

struct Planner<'a> {
    weights: &'a Inventory,
    scale_dtype: Dtype,
    units: Vec<Unit>,
    rows: Vec<Row>,
    row_of: HashMap<(Option<String>, Action, String, Option<String>), usize>,
    copied: HashSet<String>,
    /// Layer and expert of the unit being filled.
    open: Option<TensorId>,
}

impl Planner<'_> {
    /// `apart`: a part of a fused tensor becomes a tensor of its own even where it is not quantized.
    fn model_tensor(&mut self, id: TensorId, shape: &[usize], choice: Choice, apart: bool) -> Result<(), ArtifactError> {
        let vanished = || ArtifactError::Vanished { tensor: id.to_string() };
        let stored = self.weights.stored(id).ok_or_else(vanished)?;
        let names = self.weights.names();
        let elements: usize = shape.iter().product();
        let (tensors, shapes, action) = match (stored, choice.format) {
            (Stored::Packed { module, .. }, _) => {
                let dir = self.weights.checkpoint().dir().to_path_buf();
                return Err(ArtifactError::AlreadyQuantized { dir, tensor: module.clone() });
            }
            (Stored::Plain { name }, Format::Source) => (vec![self.copy(name)?], Vec::new(), Action::Copied),
            (Stored::Slice { .. } | Stored::Gather { .. }, Format::Source) if !apart => {
                let whole = stored.first_tensor();
                let once = self.copied.insert(whole.clone());
                (if once { vec![self.copy(&whole)?] } else { Vec::new() }, Vec::new(), Action::Copied)
            }
            (stored, Format::Source) => {
                let part = if id.part == Part::Bias { "bias" } else { "weight" };
                let split = matches!(stored, Stored::Slice { .. } | Stored::Gather { .. });
                let dtype = if split { self.source_dtype(&stored.first_tensor())? } else { self.scale_dtype };
                let name = format!("{}.{part}", names.module(id));
                let tensor = Tensor { name, dtype, shape: shape.to_vec(), content: Content::Decoded { id } };
                (vec![tensor], Vec::new(), if split { Action::Split } else { Action::Decoded })
            }
            (stored, Format::Int { bits, group, zero }) => {
                let &[rows, cols] = shape else { return Err(vanished()) };
                let codes = Content::Codes { id, bits, group, zero };
                let (tensors, dims) = quantized(&names.module(id), id, [rows, cols], choice.format, codes, self.scale_dtype);
                let rank = self.weights.checkpoint().entry(&stored.first_tensor()).map_or(2, |e| e.shape.len());
                let action = if rank > 2 { Action::Split } else { Action::Quantized };
                (tensors, vec![dims], action)
            }
        };
        let source_bytes: u64 = match stored {
            Stored::Slice { .. } | Stored::Gather { .. } => self.source_dtype(&stored.first_tensor())?.bytes(elements) as u64,
            Stored::Mxfp4 { rows, cols, .. } => (rows * (cols / 2 + cols / mxfp4::BLOCK)) as u64,
            _ => self.weights.file_tensors(id).iter().map(|n| self.entry_bytes(n)).sum::<Result<u64, _>>()?,
        };
        let bytes = match (stored, choice.format) {
            (Stored::Slice { .. } | Stored::Gather { .. }, Format::Source) => source_bytes,
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

    /// Adds tensors to the plan, those of one expert to one unit: codes of all projections, then their zero points, then their scales.
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
                unit.tensors.sort_by_key(|t| match t.content {
                    Content::Scales { .. } => 2,
                    Content::Zeros { .. } => 1,
                    _ => 0,
                });
            }
            None => self.units.push(Unit { tensors, shapes }),
        }
    }

    fn side_tensor(&mut self, name: &str) -> Result<(), ArtifactError> {
        let bytes = self.entry_bytes(name)?;
        let dtype = self.source_dtype(name)?.name().to_lowercase();
        let embed = TensorId::global(Role::Embed);
        let outline = self.weights.outline();
        if name.ends_with("lm_head.weight") && outline.tied {
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
        let reason = self.weights.aside(name).map(|why| why.to_string());
        let stored = self.weights.side_stored(name);
        let coded = stored.filter(|s| matches!(s, Stored::Fp8 { .. } | Stored::Mxfp4 { .. }));
        let (tensor, files, action) = match coded {
            None => (self.copy(name)?, vec![name.to_string()], Action::Copied),
            Some(stored) => {
                let rows_cols = self.weights.side(name).map(|w| vec![w.rows, w.cols]).unwrap_or_default();
                let content = Content::DecodedSide { source: name.into() };
                let tensor = Tensor { name: name.into(), dtype: self.scale_dtype, shape: rows_cols, content };
                (tensor, stored.file_tensors(), Action::Decoded)
            }
        };
        let source_bytes = files.iter().map(|n| self.entry_bytes(n)).sum::<Result<u64, _>>()?;
        let (format, bytes) = (tensor.dtype.name().to_lowercase(), tensor.bytes());
        self.units.push(Unit { tensors: vec![tensor], shapes: Vec::new() });
        self.record(None, files, action, format, reason, [source_bytes, bytes]);
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
        let source: Vec<String> = source.into_iter().map(|n| without_expert(&n)).collect();
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

/// A name with `*` in place of the expert's number.
fn without_expert(name: &str) -> String {
    const BEFORE: &str = ".experts.";
    let Some(at) = name.find(BEFORE).map(|at| at + BEFORE.len()) else { return name.into() };
    let digits = name[at..].bytes().take_while(u8::is_ascii_digit).count();
    if digits == 0 { name.into() } else { format!("{}*{}", &name[..at], &name[at + digits..]) }
}

/// The tensors of a quantized weight: its `codes`, zero points if it has any, and scales; and its shape.
fn quantized(
    module: &str,
    id: TensorId,
    shape: [usize; 2],
    format: Format,
    codes: Content,
    scale: Dtype,
) -> (Vec<Tensor>, Tensor) {
    let [rows, cols] = shape;
    let tensor =
        |what: &str, dtype, shape: Vec<usize>, content| Tensor { name: format!("{module}.weight_{what}"), dtype, shape, content };
    let groups = format.scale_cols(cols);
    let mut tensors = vec![tensor("packed", Dtype::I32, vec![rows, format.packed_cols(cols)], codes)];
    if format.has_zero_points() {
        tensors.push(tensor("zero_point", Dtype::I32, vec![format.zero_rows(rows), groups], Content::Zeros { id }));
    }
    tensors.push(tensor("scale", scale, vec![rows, groups], Content::Scales { id }));
    (tensors, tensor("shape", Dtype::I64, vec![2], Content::Shape { shape }))
}
