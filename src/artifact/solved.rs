//! Codes and scales that a calibrated pass has chosen, one file a layer, until the artifact is written from them.
//!
//! A file is a safetensors file of its own names: `<id>.packed`, `<id>.scale`, `<id>.shape` and, of asymmetric ones, `<id>.zero`. It is mapped, so that whoever
//! walks the layers keeps one of them in memory.

use super::error::ArtifactError;
use crate::checkpoint::Checkpoint;
use crate::files::{self, FileError};
use crate::ids::TensorId;
use crate::quant::format::{Bits, Format, OwnedPacked, Packed};
use crate::tensor::Dtype;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// Quantized tensors, in memory or in mapped files.
#[derive(Default)]
pub struct Solved {
    memory: HashMap<TensorId, Arc<OwnedPacked>>,
    files: Vec<Checkpoint>,
    /// Position in `files`, and the shape.
    filed: HashMap<TensorId, (usize, [usize; 2])>,
}

impl Solved {
    /// These matrices.
    pub fn of(memory: HashMap<TensorId, Arc<OwnedPacked>>) -> Self {
        Self { memory, ..Self::default() }
    }

    /// Whether this tensor is here.
    pub fn contains(&self, id: TensorId) -> bool {
        self.memory.contains_key(&id) || self.filed.contains_key(&id)
    }

    /// A matrix; `None` if it is not here.
    pub fn get(&self, id: TensorId) -> Option<Packed<'_>> {
        if let Some(packed) = self.memory.get(&id) {
            return Some(packed.view());
        }
        let &(file, [rows, cols]) = self.filed.get(&id)?;
        let file = &self.files[file];
        let (words, scales) = (file.tensor(&format!("{id}.packed"))?, file.tensor(&format!("{id}.scale"))?);
        let bits = if words.shape.get(1)? * 32 == cols * 4 { Bits::Four } else { Bits::Eight };
        let group = cols / (*scales.shape.get(1)?).max(1);
        let zeros = file.tensor(&format!("{id}.zero")).map(|t| t.bytes);
        let scale_dtype = scales.dtype;
        Some(Packed { bits, group, rows, cols, words: words.bytes, scales: scales.bytes, scale_dtype, zeros })
    }

    /// Lets the pages of a tensor go.
    pub fn release(&self, id: TensorId) {
        if let Some(&(file, _)) = self.filed.get(&id) {
            ["packed", "scale", "zero"].iter().for_each(|part| self.files[file].release(&format!("{id}.{part}")));
        }
    }

    /// Writes what is in memory, in the order of ids, and syncs it.
    pub fn write(&self, path: &Path) -> Result<(), ArtifactError> {
        let mut ids: Vec<TensorId> = self.memory.keys().copied().collect();
        ids.sort();
        let mut header = Map::new();
        let mut at = 0;
        let mut shapes = Vec::new();
        for id in &ids {
            let p = &self.memory[id];
            let (format, groups) = (p.format(), p.format().scale_cols(p.cols));
            let zeros = p.zeros.as_ref().map(|z| ("zero", Dtype::I32, [format.zero_rows(p.rows), groups], z.len()));
            let parts = [
                ("packed", Dtype::I32, [p.rows, format.packed_cols(p.cols)], p.words.len()),
                ("scale", p.scale_dtype, [p.rows, groups], p.scales.len()),
            ];
            for (part, dtype, shape, bytes) in parts.into_iter().chain(zeros) {
                header.insert(format!("{id}.{part}"), entry(dtype, &shape, at, bytes));
                at += bytes;
            }
            shapes.extend([p.rows as i64, p.cols as i64].into_iter().flat_map(i64::to_le_bytes));
        }
        for id in &ids {
            header.insert(format!("{id}.shape"), entry(Dtype::I64, &[2], at, 16));
            at += 16;
        }
        let mut json = Value::Object(header).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut file = files::create(path)?;
        let matrices = ids.iter().map(|id| self.memory[id].view());
        let matrices = matrices.flat_map(|p| [p.words, p.scales, p.zeros.unwrap_or_default()]);
        let length = (json.len() as u64).to_le_bytes();
        for bytes in [&length[..], &json[..]].into_iter().chain(matrices).chain([&shapes[..]]) {
            file.write_all(bytes).map_err(|source| FileError::Io { op: "write", path: path.to_path_buf(), source })?;
        }
        file.sync_all().map_err(|source| FileError::Io { op: "sync", path: path.to_path_buf(), source })?;
        Ok(())
    }

    /// Adds those of `ids` that a written file holds.
    pub fn open(&mut self, path: &Path, ids: impl Iterator<Item = TensorId>) -> Result<(), ArtifactError> {
        let file = Checkpoint::file(path)?;
        for id in ids {
            let Some(shape) = file.tensor(&format!("{id}.shape")).filter(|t| t.bytes.len() == 16) else { continue };
            let number = |at: usize| i64::from_le_bytes(std::array::from_fn(|i| shape.bytes[at + i])) as usize;
            self.filed.insert(id, (self.files.len(), [number(0), number(8)]));
        }
        self.files.push(file);
        Ok(())
    }

    /// Format of a tensor.
    pub fn format(&self, id: TensorId) -> Option<Format> {
        self.get(id).map(|p| p.format())
    }
}

fn entry(dtype: Dtype, shape: &[usize], at: usize, bytes: usize) -> Value {
    json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [at, at + bytes]})
}
