//! Every tensor of a model directory with an identity, whether or not the engines can run the model.
//!
//! A family with a row of its own is checked name by name ([`super::weights::Weights`]); of any other, what its structure tells
//! is identified and the rest stands aside. Opening reads headers, and 16 bytes for each packed matrix.

use super::weights::{Data, Declared, Stored, Weight, Weights, WeightsError, packed_form};
use crate::checkpoint::{Checkpoint, mxfp4};
use crate::ids::{Part, TensorId};
use crate::model::config::ConfigError;
use crate::model::names::Spelling;
use crate::model::outline::Outline;
use crate::model::structure::{self, Aside, Logical, Place};
use crate::quant::format::{Format, Packed, Zero};
use crate::tensor::Dtype;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// A model directory whose tensors are identified.
pub struct Inventory {
    pub(super) checkpoint: Checkpoint,
    pub(super) outline: Outline,
    pub(super) names: Box<dyn Spelling + Send + Sync>,
    pub(super) stored: HashMap<TensorId, Stored>,
    pub(super) order: Vec<(TensorId, Vec<usize>)>,
    pub(super) side: Vec<String>,
    pub(super) asides: HashMap<String, (Stored, Aside)>,
}

impl Inventory {
    /// Opens a checkpoint or artifact directory of any family.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(dir)?;
        match crate::model::family::read(checkpoint.config()) {
            Err(ConfigError::Family { .. }) => Self::of_structure(checkpoint),
            _ => Weights::read(checkpoint).map(|(inventory, ..)| inventory),
        }
    }

    fn of_structure(checkpoint: Checkpoint) -> Result<Self, WeightsError> {
        let declared = super::weights::quantization(&checkpoint)?;
        let (decoded, claimed) = decoded(&checkpoint, declared);
        let mut tensors: Vec<Logical<'_>> =
            decoded.iter().map(|(name, (shape, stored))| Logical { name, shape, blocks: is_blocks(stored) }).collect();
        let plain = checkpoint.names().filter(|n| !claimed.contains(*n) && !decoded.contains_key(*n));
        let plain = plain.filter_map(|name| Some(Logical { name, shape: &checkpoint.entry(name)?.shape, blocks: false }));
        tensors.extend(plain);
        tensors.sort_by(|a, b| a.name.cmp(b.name));
        let read = structure::read(checkpoint.config(), &tensors)?;
        let own =
            |name: &str| decoded.get(name).map_or_else(|| Stored::Plain { name: name.into() }, |(_, stored)| stored.clone());
        let (mut stored, mut order, mut problems) = (HashMap::new(), Vec::new(), Vec::new());
        for member in read.members {
            let found = match member.place {
                Place::Own { name } => own(&name),
                Place::Part { name, first, strides } => {
                    let cols = if member.id.part == Part::Bias { member.shape[0] } else { member.shape[1] };
                    let rows = member.shape.iter().product::<usize>() / cols.max(1);
                    match own(&name) {
                        Stored::Mxfp4 { codes, scales, .. } => {
                            let (first_row, step) = (first / cols.max(1), strides[0] / cols.max(1));
                            Stored::Mxfp4 { codes, scales, first_row, step, rows, cols }
                        }
                        Stored::Plain { name } => Stored::Gather { tensor: name, first, strides, rows, cols },
                        _ => {
                            problems.push(format!("`{name}` is coded in a way that cannot be divided among experts"));
                            continue;
                        }
                    }
                }
            };
            if let Stored::Plain { name } | Stored::Gather { tensor: name, .. } = &found
                && let Some(entry) = checkpoint.entry(name).filter(|e| !e.dtype.is_float())
            {
                problems.push(format!("`{name}` has type {}, expected a float, or codes with scales", entry.dtype));
            }
            stored.insert(member.id, found);
            order.push((member.id, member.shape));
        }
        if !problems.is_empty() {
            let dir = checkpoint.dir().to_path_buf();
            return Err(WeightsError::Tensors { dir, family: read.outline.model_type, problems });
        }
        let (mut side, mut asides) = (Vec::new(), HashMap::new());
        for (name, why) in read.aside {
            let forms = match own(&name) {
                // Blocks in a layout that nothing settles are copied as they are.
                Stored::Mxfp4 { codes, scales, .. } if codes.ends_with(BLOCKS) => {
                    [codes, scales].map(|name| Stored::Plain { name }).to_vec()
                }
                form => vec![form],
            };
            for form in forms {
                side.push(form.first_tensor());
                asides.insert(form.first_tensor(), (form, why));
            }
        }
        Ok(Self { outline: read.outline, names: Box::new(read.names), stored, order, side, asides, checkpoint })
    }

    /// The files below.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// A few numbers.
    pub fn outline(&self) -> &Outline {
        &self.outline
    }

    /// How the checkpoint spells its modules.
    pub fn names(&self) -> &dyn Spelling {
        &*self.names
    }

    /// Every identified tensor with its shape, in order of computation where the family is known, else of id.
    pub fn tensors(&self) -> &[(TensorId, Vec<usize>)] {
        &self.order
    }

    /// Tensors in the files that stand aside: those of codes where codes hold them.
    pub fn side_tensors(&self) -> &[String] {
        &self.side
    }

    /// Why a tensor stands aside.
    pub fn aside(&self, name: &str) -> Option<Aside> {
        self.asides.get(name).map(|(_, why)| *why)
    }

    /// How a tensor that stands aside is stored.
    pub fn side_stored(&self, name: &str) -> Option<&Stored> {
        self.asides.get(name).map(|(stored, _)| stored)
    }

    /// How an id is stored.
    pub fn stored(&self, id: TensorId) -> Option<&Stored> {
        self.stored.get(&id)
    }

    /// The names of the tensors in the files that hold an id.
    pub fn file_tensors(&self, id: TensorId) -> Vec<String> {
        self.stored.get(&id).map_or_else(Vec::new, Stored::file_tensors)
    }

    /// Format an id is stored in; all forms but packed integers count as [`Format::Source`].
    pub fn format(&self, id: TensorId) -> Option<Format> {
        self.stored.get(&id).map(|s| match s {
            Stored::Packed { bits, group, zero, .. } => Format::Int { bits: *bits, group: *group, zero: *zero },
            _ => Format::Source,
        })
    }

    /// Whether an id is stored as integers with zero points.
    pub fn has_zero_points(&self, id: TensorId) -> bool {
        self.format(id).is_some_and(Format::has_zero_points)
    }

    /// Element type of an id's tensor in the files, the codes' for coded ones.
    pub fn dtype(&self, id: TensorId) -> Option<Dtype> {
        self.checkpoint.entry(&self.stored.get(&id)?.first_tensor()).map(|e| e.dtype)
    }

    /// Reads a weight; `None` if the model has no such tensor.
    pub fn get(&self, id: TensorId) -> Option<Weight<'_>> {
        self.read(self.stored.get(&id)?)
    }

    /// Reads a tensor that stands aside and is stored as codes or floats.
    pub fn side(&self, name: &str) -> Option<Weight<'_>> {
        self.read(&self.asides.get(name)?.0)
    }

    fn read(&self, stored: &Stored) -> Option<Weight<'_>> {
        let tensor = |name: &str| self.checkpoint.tensor(name);
        let weight = match stored {
            Stored::Plain { name } => {
                let t = tensor(name)?;
                let cols = t.shape.last().copied().unwrap_or(1);
                let rows = t.len() / cols.max(1);
                Weight { rows, cols, data: Data::Plain { dtype: t.dtype, bytes: t.bytes } }
            }
            Stored::Slice { fused } => {
                let t = tensor(&fused.tensor)?;
                let cols = fused.shape[2];
                let row_bytes = t.dtype.bytes(cols);
                let bytes = &t.bytes[fused.first_row * row_bytes..(fused.first_row + fused.rows) * row_bytes];
                Weight { rows: fused.rows, cols, data: Data::Plain { dtype: t.dtype, bytes } }
            }
            Stored::Gather { tensor: name, first, strides, rows, cols } => {
                let t = tensor(name)?;
                let bytes = t.bytes.get(t.dtype.bytes(*first)..)?;
                Weight { rows: *rows, cols: *cols, data: Data::Gather { dtype: t.dtype, bytes, strides: *strides } }
            }
            Stored::Mxfp4 { codes, scales, first_row, step, rows, cols } => {
                let (codes, scales) = (tensor(codes)?.bytes, tensor(scales)?.bytes);
                let data = Data::Mxfp4(mxfp4::Rows { codes, scales, first: *first_row, step: *step });
                Weight { rows: *rows, cols: *cols, data }
            }
            Stored::Packed { module, bits, group, zero } => {
                let part = |what: &str| tensor(&format!("{module}.weight_{what}"));
                let (words, scales) = (part("packed")?, part("scale")?);
                let zeros = if *zero == Zero::Point { Some(part("zero_point")?.bytes) } else { None };
                let (rows, cols) = (words.shape[0], words.shape[1] * bits.per_word());
                let (bits, group, scale_dtype) = (*bits, group.columns(cols), scales.dtype);
                let packed = Packed { bits, group, rows, cols, words: words.bytes, scales: scales.bytes, scale_dtype, zeros };
                Weight { rows, cols, data: Data::Packed(packed) }
            }
            Stored::Fp8 { name, scale, block } => {
                let (codes, scale) = (tensor(name)?, tensor(scale)?);
                let (rows, cols) = (codes.shape[0], codes.shape[1]);
                Weight { rows, cols, data: Data::Fp8 { codes, scale, block: *block } }
            }
        };
        Some(weight)
    }

    /// Where the bytes of a weight lie whose stored bits are those of its floats, or its codes, zero points if it has any, and scales:
    /// the shard and the range of its file. `None` for what has to be decoded.
    pub fn spans(&self, id: TensorId) -> Option<Vec<(usize, Range<usize>)>> {
        let span = |name: &str| self.checkpoint.entry(name).map(|e| (e.shard, e.range.clone()));
        match self.stored.get(&id)? {
            Stored::Plain { name } => Some(vec![span(name)?]),
            Stored::Slice { fused } => {
                let entry = self.checkpoint.entry(&fused.tensor)?;
                let row_bytes = entry.dtype.bytes(fused.shape[2]);
                let start = entry.range.start + fused.first_row * row_bytes;
                Some(vec![(entry.shard, start..start + fused.rows * row_bytes)])
            }
            Stored::Packed { module, zero, .. } => {
                let points = (*zero == Zero::Point).then_some("zero_point");
                let parts = ["packed"].into_iter().chain(points).chain(["scale"]);
                parts.map(|part| span(&format!("{module}.weight_{part}"))).collect()
            }
            Stored::Gather { .. } | Stored::Mxfp4 { .. } | Stored::Fp8 { .. } => None,
        }
    }

    /// Lets the pages of these ids go, so that a reader that walks the layers keeps only one resident.
    pub fn release<'a>(&self, ids: impl IntoIterator<Item = &'a TensorId>) {
        for name in ids.into_iter().flat_map(|&id| self.file_tensors(id)) {
            self.checkpoint.release(&name);
        }
    }
}

/// Ends the names of tensors of 4-bit codes that hold all experts of a layer.
const BLOCKS: &str = "_blocks";

fn is_blocks(stored: &Stored) -> bool {
    matches!(stored, Stored::Mxfp4 { .. })
}

/// Tensors that stand for others by name: the shape they decode to, and how they are stored.
type Decoded = BTreeMap<String, (Vec<usize>, Stored)>;

/// Pairs of codes and scales, found by type and name; and the names of all that belong to a pair.
fn decoded(checkpoint: &Checkpoint, declared: Declared) -> (Decoded, HashSet<String>) {
    let (mut found, mut claimed) = (Decoded::new(), HashSet::new());
    for name in checkpoint.names() {
        let Some(entry) = checkpoint.entry(name) else { continue };
        let entry_of = |name: &str| checkpoint.entry(name).map(|e| (e.dtype, e.shape.as_slice()));
        let scale_of = |module: &str| {
            ["weight_scale_inv", "weight_scale", "scale"]
                .map(|s| format!("{module}.{s}"))
                .into_iter()
                .find(|s| entry_of(s).is_some())
        };
        let parts = if let Some(module) = name.strip_suffix(".weight_packed") {
            packed(checkpoint, module, declared.zero).map(|(shape, stored)| (format!("{module}.weight"), shape, stored))
        } else if let (Some(stem), Dtype::U8, &[e, out, n, 16]) = (name.strip_suffix(BLOCKS), entry.dtype, &entry.shape[..]) {
            let scales = format!("{stem}_scales");
            let fits = matches!(entry_of(&scales), Some((Dtype::U8 | Dtype::F8E8M0, &[a, b, c])) if [a, b, c] == [e, out, n]);
            let cols = n * mxfp4::BLOCK;
            let stored = Stored::Mxfp4 { codes: name.into(), scales, first_row: 0, step: 1, rows: e * out, cols };
            fits.then(|| (stem.to_string(), vec![e, out, cols], stored))
        } else if let (Some(module), Dtype::I8 | Dtype::U8, &[rows, half]) =
            (name.strip_suffix(".weight"), entry.dtype, &entry.shape[..])
        {
            let cols = half * 2;
            scale_of(module)
                .filter(|s| matches!(entry_of(s), Some((Dtype::F8E8M0 | Dtype::U8, &[r, n])) if r == rows && n * mxfp4::BLOCK == cols))
                .map(|scales| {
                    let stored = Stored::Mxfp4 { codes: name.into(), scales, first_row: 0, step: 1, rows, cols };
                    (name.to_string(), vec![rows, cols], stored)
                })
        } else if let (Some(module), Dtype::F8E4M3, &[rows, cols]) = (name.strip_suffix(".weight"), entry.dtype, &entry.shape[..])
        {
            let stored = |scale| Stored::Fp8 { name: name.into(), scale, block: declared.block };
            scale_of(module).map(|scale| (name.to_string(), vec![rows, cols], stored(scale)))
        } else {
            None
        };
        if let Some((logical, shape, stored)) = parts {
            claimed.extend(stored.file_tensors());
            found.insert(logical, (shape, stored));
        }
    }
    (found, claimed)
}

/// The logical shape and form of a packed module, from the shape stored beside it; `None` also where its zero points are not what
/// the config declares.
fn packed(checkpoint: &Checkpoint, module: &str, declared: Option<Zero>) -> Option<(Vec<usize>, Stored)> {
    let entry = |what: &str| checkpoint.entry(&format!("{module}.weight_{what}")).map(|e| (e.dtype, &e.shape[..]));
    let (words, scales) = (entry("packed")?, entry("scale")?);
    let view = checkpoint.tensor(&format!("{module}.weight_shape")).filter(|v| v.dtype == Dtype::I64 && v.bytes.len() == 16)?;
    let dims: Vec<usize> =
        view.bytes.chunks_exact(8).filter_map(|b| usize::try_from(i64::from_le_bytes(b.try_into().ok()?)).ok()).collect();
    let &[rows, cols] = &dims[..] else { return None };
    let Format::Int { bits, group, zero } = packed_form([rows, cols], words, scales, entry("zero_point"))? else { return None };
    declared.is_none_or(|d| d == zero).then(|| (dims, Stored::Packed { module: module.into(), bits, group, zero }))
}
