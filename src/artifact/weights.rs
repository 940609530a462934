//! The one way to read a weight, from an original checkpoint or from an artifact.
//!
//! Opening checks names both ways from headers alone: every tensor the spec implies exists with its shape, every tensor in
//! the files is claimed. Reading is zero-copy: a [`Weight`] borrows the mapped file in the format it is stored in.

use super::inventory::Inventory;
use super::solved::Solved;
use crate::checkpoint::{Checkpoint, CheckpointError, mxfp4};
use crate::ids::{Part, TensorId};
use crate::model::config::ConfigError;
use crate::model::family::{self, Family};
use crate::model::names::{self, Fused};
use crate::model::outline::Outline;
use crate::model::spec::{Ffn, ModelSpec};
use crate::model::structure::{Aside, StructureError};
use crate::quant::format::{Bits, Format, Group, Packed, Zero};
use crate::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a directory cannot be read as a model.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The files are not a sound checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The config is not one of a supported model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Config and tensors disagree; all problems at once.
    #[error("{}: {} {} not fit `{family}`:\n  {}", dir.display(), problems.len(), if problems.len() == 1 { "tensor does" } else { "tensors do" }, shown(problems))]
    Tensors {
        /// The directory.
        dir: PathBuf,
        /// `model_type`.
        family: String,
        /// One line each.
        problems: Vec<String>,
    },
    /// The family is none that this version runs, and its structure does not tell enough.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// A quantization this version does not read.
    #[error("{}: `quantization_config` has {what}, which this version does not read", dir.display())]
    Quantization {
        /// The directory.
        dir: PathBuf,
        /// What was found.
        what: String,
    },
}

impl WeightsError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            WeightsError::Checkpoint(e) => e.hint(),
            WeightsError::Config(e) => e.hint(),
            WeightsError::Structure(e) => e.hint(),
            WeightsError::Tensors { .. } => Some("config.json and the weight files may come from different models".into()),
            WeightsError::Quantization { .. } => {
                Some("readable are 16-bit and 32-bit floats, FP8 and MXFP4 blocks, and compressed-tensors `pack-quantized` int4 and int8".into())
            }
        }
    }
}

fn shown(problems: &[String]) -> String {
    const MOST: usize = 20;
    let mut text = problems.iter().take(MOST).cloned().collect::<Vec<_>>().join("\n  ");
    if problems.len() > MOST {
        text += &format!("\n  and {} more", problems.len() - MOST);
    }
    text
}

/// How the tensors of one id lie in the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A tensor of its own.
    Plain {
        /// Its name.
        name: String,
    },
    /// A run of rows of a fused 3-D tensor.
    Slice {
        /// Which rows of which tensor.
        fused: Fused,
    },
    /// Values of a fused tensor that lie apart.
    Gather {
        /// Its name.
        tensor: String,
        /// Element of the first value.
        first: usize,
        /// Elements from row to row and from column to column.
        strides: [usize; 2],
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// Rows of 4-bit floats with a power of two for each 32 columns.
    Mxfp4 {
        /// The codes.
        codes: String,
        /// The scales.
        scales: String,
        /// Stored row that is row 0.
        first_row: usize,
        /// Stored rows from one to the next.
        step: usize,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// `weight_packed`, `weight_scale`, `weight_shape` of a module, and its `weight_zero_point` if it has zero points.
    Packed {
        /// The module.
        module: String,
        /// Width of a code.
        bits: Bits,
        /// Columns a scale covers.
        group: Group,
        /// The code of zero.
        zero: Zero,
    },
    /// An FP8 tensor with a scale for each block.
    Fp8 {
        /// The codes.
        name: String,
        /// The scales.
        scale: String,
        /// Rows and columns of a block.
        block: [usize; 2],
    },
}

impl Stored {
    /// The tensors in the files.
    pub fn file_tensors(&self) -> Vec<String> {
        match self {
            Stored::Plain { name } => vec![name.clone()],
            Stored::Slice { fused } => vec![fused.tensor.clone()],
            Stored::Gather { tensor, .. } => vec![tensor.clone()],
            Stored::Mxfp4 { codes, scales, .. } => vec![codes.clone(), scales.clone()],
            Stored::Packed { module, zero, .. } => {
                let zero_point = (*zero == Zero::Point).then_some("zero_point");
                ["packed", "scale", "shape"].into_iter().chain(zero_point).map(|s| format!("{module}.weight_{s}")).collect()
            }
            Stored::Fp8 { name, scale, .. } => vec![name.clone(), scale.clone()],
        }
    }

    /// The tensor that holds the values or codes.
    pub fn first_tensor(&self) -> String {
        self.file_tensors().swap_remove(0)
    }
}

/// A model directory that the engines can run, opened and checked: an inventory, what it means, and tensors taken from elsewhere.
#[derive(Clone)]
pub struct Weights {
    inventory: Arc<Inventory>,
    family: &'static Family,
    spec: ModelSpec,
    patches: Vec<Patch>,
}

/// Tensors taken from elsewhere.
#[derive(Clone)]
pub enum Patch {
    /// These, from an artifact of the same model.
    Model(Arc<Weights>, HashSet<TensorId>),
    /// All of a calibrated pass.
    Solved(Arc<Solved>),
    /// These of a calibrated pass.
    Some(Arc<Solved>, HashSet<TensorId>),
}

impl Patch {
    fn get(&self, id: TensorId) -> Option<Weight<'_>> {
        let packed = match self {
            Patch::Model(weights, ids) => return if ids.contains(&id) { weights.get(id) } else { None },
            Patch::Solved(solved) => solved.get(id),
            Patch::Some(solved, ids) => solved.get(id).filter(|_| ids.contains(&id)),
        };
        packed.map(|p| Weight { rows: p.rows, cols: p.cols, data: Data::Packed(p) })
    }

    fn release(&self, id: TensorId) {
        match self {
            Patch::Model(weights, _) => weights.release([&id]),
            Patch::Solved(solved) | Patch::Some(solved, _) => solved.release(id),
        }
    }
}

/// One weight in the format it is stored in; vectors have one row.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    /// Rows, `out`.
    pub rows: usize,
    /// Columns, `in`.
    pub cols: usize,
    /// The stored bits.
    pub data: Data<'a>,
}

/// Stored bits of a weight.
#[derive(Clone, Debug)]
pub enum Data<'a> {
    /// Plain floats, row-major.
    Plain {
        /// Element type.
        dtype: Dtype,
        /// `rows * cols` elements.
        bytes: &'a [u8],
    },
    /// Floats that lie apart.
    Gather {
        /// Element type.
        dtype: Dtype,
        /// From the first value on.
        bytes: &'a [u8],
        /// Elements from row to row and from column to column.
        strides: [usize; 2],
    },
    /// Four-bit floats with block scales.
    Mxfp4(mxfp4::Rows<'a>),
    /// Packed integers with scales.
    Packed(Packed<'a>),
    /// FP8 with block scales.
    Fp8 {
        /// `[rows, cols]` codes.
        codes: TensorView<'a>,
        /// Block scales.
        scale: TensorView<'a>,
        /// Rows and columns of a block.
        block: [usize; 2],
    },
}

impl Weight<'_> {
    /// Decodes rows `first ..` into `dst`, `[n, cols]` row-major.
    pub fn decode_rows(&self, dst: &mut [f32], first: usize) -> Result<(), CheckpointError> {
        let n = dst.len() / self.cols.max(1);
        match &self.data {
            Data::Plain { dtype, bytes } => {
                let row_bytes = dtype.bytes(self.cols);
                crate::tensor::decode(dst, *dtype, &bytes[first * row_bytes..(first + n) * row_bytes]);
                Ok(())
            }
            Data::Gather { dtype, bytes, strides } => {
                gather(dst, *dtype, bytes, *strides, self.cols, first);
                Ok(())
            }
            Data::Mxfp4(rows) => rows.decode(dst, self.cols, first),
            Data::Packed(p) => {
                p.dequantize_rows(dst, first);
                Ok(())
            }
            Data::Fp8 { codes, scale, block } => {
                crate::checkpoint::fp8::dequantize_block(dst, codes, scale, *block, first..first + n)
            }
        }
    }

    /// The whole weight as floats, `[rows, cols]`.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        let mut dst = vec![0.0; self.rows * self.cols];
        self.decode_rows(&mut dst, 0)?;
        Ok(dst)
    }

    /// Bytes that reading the whole weight moves.
    pub fn stored_bytes(&self) -> usize {
        match &self.data {
            Data::Plain { bytes, .. } => bytes.len(),
            Data::Gather { dtype, .. } => dtype.bytes(self.rows * self.cols),
            Data::Mxfp4(_) => self.rows * (self.cols / 2 + self.cols / mxfp4::BLOCK),
            Data::Packed(p) => p.words.len() + p.scales.len() + p.zeros.map_or(0, <[u8]>::len),
            Data::Fp8 { codes, scale, .. } => codes.bytes.len() + scale.bytes.len(),
        }
    }
}

/// Decodes rows `first ..` whose columns lie `strides[1]` elements apart.
fn gather(dst: &mut [f32], dtype: Dtype, bytes: &[u8], strides: [usize; 2], cols: usize, first: usize) {
    let rows = dst.len() / cols.max(1);
    // One column's values span a run of the file, which is decoded whole.
    let mut run = vec![0.0; (rows.max(1) - 1) * strides[0] + 1];
    for c in 0..cols {
        let at = dtype.bytes(first * strides[0] + c * strides[1]);
        let end = at + dtype.bytes(run.len());
        crate::tensor::decode(&mut run, dtype, &bytes[at..end]);
        run.iter().step_by(strides[0].max(1)).enumerate().for_each(|(r, x)| dst[r * cols + c] = *x);
    }
}

impl Deref for Weights {
    type Target = Inventory;

    fn deref(&self) -> &Inventory {
        &self.inventory
    }
}

impl Weights {
    /// Opens a checkpoint or artifact directory. Reads headers only.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        Self::from_checkpoint(Checkpoint::open(dir)?)
    }

    /// Checks an opened checkpoint against its config.
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Result<Self, WeightsError> {
        let (inventory, family, spec) = Self::read(checkpoint)?;
        Ok(Self { inventory: Arc::new(inventory), family, spec, patches: Vec::new() })
    }

    /// The tensors of a checkpoint, and what they mean together.
    pub(super) fn read(checkpoint: Checkpoint) -> Result<(Inventory, &'static Family, ModelSpec), WeightsError> {
        let (family, spec) = family::read(checkpoint.config())?;
        let Declared { block, zero } = quantization(&checkpoint)?;
        let order = names::tensors(&spec);
        let mut finder = Finder { checkpoint: &checkpoint, claimed: HashSet::new(), problems: Vec::new(), block, zero };
        let mut stored = HashMap::with_capacity(order.len());
        for (id, shape) in &order {
            if let Some(found) = finder.find(*id, shape, family, &spec) {
                stored.insert(*id, found);
            }
        }
        let Finder { claimed, mut problems, block, .. } = finder;
        let (mut side, mut asides) = (Vec::new(), HashMap::new());
        let mut scales: HashSet<String> = HashSet::new();
        for name in checkpoint.names().filter(|n| !claimed.contains(*n)) {
            let twin_of_embedding = spec.tied && name == "lm_head.weight";
            if twin_of_embedding || family.names.is_side_tensor(name, spec.layers.len()) {
                let stored = side_form(&checkpoint, name, block);
                scales.extend(stored.file_tensors().into_iter().skip(1));
                side.push(name.to_string());
                asides.insert(name.to_string(), (stored, Aside::Unused));
            } else {
                problems.push(format!("`{name}` {} is not part of this model", shape_of(&checkpoint, name)));
            }
        }
        side.retain(|name| !scales.contains(name));
        if problems.is_empty() {
            let (outline, names) = (Outline::of(&spec), Box::new(family.names));
            let inventory = Inventory { checkpoint, outline, names, stored, order, side, asides };
            Ok((inventory, family, spec))
        } else {
            Err(WeightsError::Tensors { dir: checkpoint.dir().to_path_buf(), family: family.model_type.into(), problems })
        }
    }

    /// The same model with tensors taken from elsewhere; the first patch that has one gives it.
    pub fn patched(&self, patches: Vec<Patch>) -> Self {
        Self { patches, ..self.clone() }
    }

    /// The family's row.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Reads a weight; `None` if the model has no such tensor.
    pub fn get(&self, id: TensorId) -> Option<Weight<'_>> {
        if let Some(weight) = self.patches.iter().find_map(|p| p.get(id)) {
            return Some(weight);
        }
        self.inventory.get(id)
    }

    /// Where the bytes of a weight lie, as [`Inventory::spans`] has it; `None` too for what was taken from elsewhere.
    pub fn spans(&self, id: TensorId) -> Option<Vec<(usize, Range<usize>)>> {
        if self.patches.iter().any(|p| p.get(id).is_some()) { None } else { self.inventory.spans(id) }
    }

    /// Lets the pages of these ids go, so that a reader that walks the layers keeps only one resident.
    pub fn release<'a>(&self, ids: impl IntoIterator<Item = &'a TensorId>) {
        for id in ids {
            self.patches.iter().for_each(|p| p.release(*id));
            self.inventory.release([id]);
        }
    }
}

/// How a tensor that the forward pass does not use is stored: as floats of any kind, or as FP8 codes with scales.
fn side_form(checkpoint: &Checkpoint, name: &str, block: [usize; 2]) -> Stored {
    let coded = checkpoint.entry(name).is_some_and(|e| e.dtype == Dtype::F8E4M3 && e.shape.len() == 2);
    let module = name.strip_suffix(".weight").filter(|_| coded);
    let scale = module.and_then(|module| {
        ["weight_scale_inv", "weight_scale", "scale"]
            .map(|s| format!("{module}.{s}"))
            .into_iter()
            .find(|s| checkpoint.entry(s).is_some())
    });
    match scale {
        Some(scale) => Stored::Fp8 { name: name.into(), scale, block },
        None => Stored::Plain { name: name.into() },
    }
}

fn shape_of(checkpoint: &Checkpoint, name: &str) -> String {
    checkpoint.entry(name).map_or_else(String::new, |e| format!("{:?}", e.shape))
}

/// What a config says of quantized tensors.
#[derive(Clone, Copy)]
pub(super) struct Declared {
    /// Rows and columns that an FP8 scale covers.
    pub block: [usize; 2],
    /// The code of zero of all packed tensors; `None` where the config does not say it of all alike, and zero points tell.
    pub zero: Option<Zero>,
}

/// Accepts absent, compressed-tensors and FP8 block quantization.
pub(super) fn quantization(checkpoint: &Checkpoint) -> Result<Declared, WeightsError> {
    let plain = |block| Ok(Declared { block, zero: None });
    let block = [128, 128];
    let Some(config) = checkpoint.config().get("quantization_config").filter(|v| !v.is_null()) else { return plain(block) };
    let refuse = |what: String| Err(WeightsError::Quantization { dir: checkpoint.dir().to_path_buf(), what });
    match config.get("quant_method").and_then(|v| v.as_str()) {
        Some("compressed-tensors") => {
            let groups = config.get("config_groups").and_then(|v| v.as_object());
            let mut zeros = HashSet::new();
            for (name, group) in groups.into_iter().flatten() {
                let weights = group.get("weights").cloned().unwrap_or_default();
                let symmetric = weights.get("symmetric").and_then(|v| v.as_bool()).unwrap_or(true);
                let int = weights.get("type").and_then(|v| v.as_str()).unwrap_or("int") == "int";
                let bits = weights.get("num_bits").and_then(|v| v.as_u64());
                if !(int && matches!(bits, Some(4 | 8))) {
                    return refuse(format!("group `{name}` = {weights}"));
                }
                zeros.insert(if symmetric { Zero::Middle } else { Zero::Point });
            }
            let zero = if zeros.len() > 1 { None } else { Some(zeros.into_iter().next().unwrap_or_default()) };
            Ok(Declared { block, zero })
        }
        Some("fp8") => match config.get("weight_block_size") {
            None => plain(block),
            Some(v) => match v.as_array().map(|a| a.iter().filter_map(|x| x.as_u64()).collect::<Vec<_>>()).as_deref() {
                Some(&[r, c]) if r > 0 && c > 0 => plain([r as usize, c as usize]),
                _ => refuse(format!("`weight_block_size` = {v}")),
            },
        },
        Some("mxfp4") => plain(block),
        other => refuse(format!("`quant_method` = {}", other.unwrap_or("nothing"))),
    }
}

struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    claimed: HashSet<String>,
    problems: Vec<String>,
    block: [usize; 2],
    zero: Option<Zero>,
}

impl Finder<'_> {
    fn find(&mut self, id: TensorId, shape: &[usize], family: &Family, spec: &ModelSpec) -> Option<Stored> {
        let name = family.names.tensor(id);
        let module = family.names.module(id);
        let packed = format!("{module}.weight_packed");
        if id.part == Part::Weight && self.checkpoint.entry(&packed).is_some() {
            if self.checkpoint.entry(&name).is_some() {
                self.problems.push(format!("`{module}` has both `weight` and `weight_packed`"));
            }
            return self.packed(module, shape);
        }
        if let Some(entry) = self.checkpoint.entry(&name) {
            let (dtype, found) = (entry.dtype, entry.shape.clone());
            self.claimed.insert(name.clone());
            if found != shape {
                self.problems.push(format!("`{name}` has shape {found:?}, expected {shape:?}"));
                return None;
            }
            if dtype == Dtype::F8E4M3 {
                return self.fp8(name, module);
            }
            return self.plain(dtype, name.clone(), Stored::Plain { name });
        }
        if let Some(fused) = self.experts(id, spec).and_then(|e| family.names.fused(id, shape, e))
            && let Some(entry) = self.checkpoint.entry(&fused.tensor)
        {
            let (dtype, found) = (entry.dtype, entry.shape.clone());
            if self.claimed.insert(fused.tensor.clone()) && found != fused.shape {
                self.problems.push(format!("`{}` has shape {found:?}, expected {:?}", fused.tensor, fused.shape));
            }
            return if found == fused.shape { self.plain(dtype, fused.tensor.clone(), Stored::Slice { fused }) } else { None };
        }
        self.problems.push(format!("`{name}` {shape:?} is missing ({id})"));
        None
    }

    fn experts(&self, id: TensorId, spec: &ModelSpec) -> Option<usize> {
        match &spec.layers.get(id.layer?.0 as usize)?.ffn {
            Ffn::Moe(m) => Some(m.router.experts),
            Ffn::Dense { .. } => None,
        }
    }

    fn plain(&mut self, dtype: Dtype, name: String, stored: Stored) -> Option<Stored> {
        if dtype.is_float() {
            return Some(stored);
        }
        self.problems.push(format!("`{name}` has type {dtype}, expected F32, F16, BF16 or F8_E4M3 with scales"));
        None
    }

    fn fp8(&mut self, name: String, module: String) -> Option<Stored> {
        let scale = ["weight_scale_inv", "weight_scale", "scale"].map(|s| format!("{module}.{s}"));
        let Some(scale) = scale.into_iter().find(|s| self.checkpoint.entry(s).is_some()) else {
            self.problems.push(format!("`{name}` is F8_E4M3 but `{module}.weight_scale_inv` is missing"));
            return None;
        };
        self.claimed.insert(scale.clone());
        Some(Stored::Fp8 { name, scale, block: self.block })
    }

    fn packed(&mut self, module: String, shape: &[usize]) -> Option<Stored> {
        let names = ["packed", "scale", "shape", "zero_point"].map(|s| (s, format!("{module}.weight_{s}")));
        let entries: BTreeMap<&str, (Dtype, Vec<usize>)> =
            names.iter().filter_map(|(s, n)| self.checkpoint.entry(n).map(|e| (*s, (e.dtype, e.shape.clone())))).collect();
        for (s, name) in names {
            let needed = s != "zero_point" || self.zero == Some(Zero::Point);
            if needed && !entries.contains_key(s) {
                let other = if s == "packed" { "scale" } else { "packed" };
                self.problems.push(format!("`{name}` is missing beside `{module}.weight_{other}`"));
            }
            if s == "zero_point" && self.zero == Some(Zero::Middle) && entries.contains_key(s) {
                self.problems.push(format!("`{name}` exists, but config.json calls every group symmetric"));
            }
            self.claimed.insert(name);
        }
        let found = |s: &str| entries.get(s).map(|(dtype, shape)| (*dtype, &shape[..]));
        let (words, scales) = (found("packed")?, found("scale")?);
        let &[rows, cols] = shape else { return None };
        let form = packed_form([rows, cols], words, scales, found("zero_point"));
        let Some(Format::Int { bits, group, zero }) = form else {
            let zeros = found("zero_point").map_or_else(String::new, |(t, s)| format!(", zero points {t} {s:?}"));
            self.problems.push(format!(
                "`{module}` has packed {} {:?} and scales {} {:?}{zeros}, which are no int4 or int8 form of {shape:?}",
                words.0, words.1, scales.0, scales.1
            ));
            return None;
        };
        Some(Stored::Packed { module, bits, group, zero })
    }
}

/// The format of a matrix whose codes, scales and zero points have these types and shapes; `None` if they form none.
pub(super) fn packed_form(
    [rows, cols]: [usize; 2],
    words: (Dtype, &[usize]),
    scales: (Dtype, &[usize]),
    zeros: Option<(Dtype, &[usize])>,
) -> Option<Format> {
    let group = match *scales.1 {
        [r, 1] if r == rows => Group::Channel,
        [r, n] if r == rows && n > 0 && cols.is_multiple_of(n) => Group::Of(cols / n),
        _ => return None,
    };
    let zero = if zeros.is_some() { Zero::Point } else { Zero::Middle };
    // Four columns are one word at eight bits, and less than one at four.
    let whole = [Bits::Four, Bits::Eight].into_iter().filter(|bits| cols.is_multiple_of(bits.per_word()));
    let mut formats = whole.map(|bits| Format::Int { bits, group, zero });
    let format = formats.find(|f| *words.1 == [rows, f.packed_cols(cols)])?;
    let zeros_fit =
        zeros.is_none_or(|(dtype, shape)| dtype == Dtype::I32 && *shape == [format.zero_rows(rows), format.scale_cols(cols)]);
    (zeros_fit && words.0 == Dtype::I32 && scales.0.is_float()).then_some(format)
}
