//! `lookahead.map`: for each router but the first a linear map from what the router before it saw to its own logits, so that its choice is
//! known a layer early.
//!
//! A safetensors container under another name, since programs load every file of a model that carries that one. Tensor `layers.N` is the map
//! to the router of layer N, bf16 `[E, D]`; its input is the normed input of the router before.

use crate::files::{self, FileError};
use crate::model::spec::ModelSpec;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Name of the file.
pub const FILE: &str = "lookahead.map";
/// Form written and read by this version.
const VERSION: &str = "1";

/// Why maps cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LookaheadError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not of the expected form.
    #[error("`{}` holds no maps to the next router: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The maps are of another model.
    #[error("`{}` holds maps of another model: {reason}", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
}

/// Maps to the routers of some layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lookahead {
    layers: BTreeMap<u32, Stored>,
}

/// bf16 `[E, D]`.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    shape: [usize; 2],
    bytes: Vec<u8>,
}

impl Lookahead {
    /// Adds the map to the router of `layer`: the bytes of bf16 `[E, D]`.
    pub fn insert(&mut self, layer: u32, shape: [usize; 2], bytes: Vec<u8>) {
        self.layers.insert(layer, Stored { shape, bytes });
    }

    /// Layers whose routers are foreseen, each with the bytes of its bf16 `[E, D]`.
    pub fn layers(&self) -> impl Iterator<Item = (u32, &[u8])> {
        self.layers.iter().map(|(&layer, map)| (layer, map.bytes.as_slice()))
    }

    /// Bytes of all maps.
    pub fn bytes(&self) -> usize {
        self.layers.values().map(|map| map.bytes.len()).sum()
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, LookaheadError> {
        let bytes = files::read(path)?;
        let malformed = |reason: String| LookaheadError::Malformed { path: path.to_path_buf(), reason };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| malformed(e.to_string()))?;
        match header.metadata().as_ref().and_then(|m| m.get("version")) {
            Some(v) if v == VERSION => {}
            Some(v) => return Err(malformed(format!("it has version {v}, expected {VERSION}"))),
            None => return Err(malformed("it has no version".into())),
        }
        let mut found = Self::default();
        for (name, tensor) in SafeTensors::deserialize(&bytes).map_err(|e| malformed(e.to_string()))?.iter() {
            let layer = name.strip_prefix("layers.").and_then(|l| l.parse().ok());
            match (layer, tensor.dtype(), tensor.shape()) {
                (Some(layer), Dtype::BF16, &[experts, width]) => found.insert(layer, [experts, width], tensor.data().to_vec()),
                (_, dtype, shape) => {
                    return Err(malformed(format!("`{name}` is {dtype:?} {shape:?}, expected BF16 [E, D] of a layer")));
                }
            }
        }
        Ok(found)
    }

    /// Writes the file whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), LookaheadError> {
        let malformed =
            |e: safetensors::SafeTensorError| LookaheadError::Malformed { path: path.to_path_buf(), reason: e.to_string() };
        let views = self.layers.iter().map(|(layer, map)| {
            let view = TensorView::new(Dtype::BF16, map.shape.to_vec(), &map.bytes).map_err(malformed)?;
            Ok((format!("layers.{layer}"), view))
        });
        let views = views.collect::<Result<Vec<_>, LookaheadError>>()?;
        let metadata = HashMap::from([("version".to_string(), VERSION.to_string())]);
        Ok(files::write_atomic(path, &safetensors::serialize(views, Some(metadata)).map_err(malformed)?)?)
    }

    /// Checks that the maps have the sizes of this model. `path` is for the message.
    pub fn check_model(&self, path: &Path, spec: &ModelSpec) -> Result<(), LookaheadError> {
        let shapes = spec.routers().map(|(l, router)| (l, [router.experts, spec.width]));
        let want: BTreeMap<u32, [usize; 2]> = shapes.skip(1).collect();
        let have: BTreeMap<u32, [usize; 2]> = self.layers.iter().map(|(&l, map)| (l, map.shape)).collect();
        let other = |reason: String| Err(LookaheadError::OtherModel { path: path.to_path_buf(), reason });
        match have.iter().find(|(layer, shape)| want.get(*layer) != Some(*shape)) {
            Some((layer, [experts, width])) => {
                let expected = want.get(layer).map_or("none".into(), |[e, d]| format!("[{e}, {d}]"));
                other(format!("its map to layer {layer} is [{experts}, {width}], expected {expected}"))
            }
            None if have.len() != want.len() => other(format!("{} maps, expected {}", have.len(), want.len())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps() -> Lookahead {
        let mut maps = Lookahead::default();
        maps.insert(1, [2, 3], (0..12).collect());
        maps.insert(4, [2, 3], (12..24).collect());
        maps
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        maps().write(&path).unwrap();
        let read = Lookahead::read(&path).unwrap();
        assert_eq!(read, maps());
        assert_eq!((read.bytes(), read.layers().map(|(l, _)| l).collect::<Vec<_>>()), (24, vec![1, 4]));
    }

    /// Every cut is refused, and so are other containers.
    #[test]
    fn what_is_no_map_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        maps().write(&path).unwrap();
        let whole = files::read(&path).unwrap();
        for end in 0..whole.len() {
            files::write_atomic(&path, &whole[..end]).unwrap();
            assert!(matches!(Lookahead::read(&path), Err(LookaheadError::Malformed { .. })), "{end} bytes");
        }
        let data = [0u8; 24];
        for (version, name, dtype, shape, word) in [
            ("1", "layers.1", Dtype::F32, vec![2, 3], "F32"),
            ("1", "layers.x", Dtype::BF16, vec![2, 6], "layers.x"),
            ("1", "layers.1", Dtype::BF16, vec![12], "[12]"),
            ("2", "layers.1", Dtype::BF16, vec![2, 6], "version 2"),
        ] {
            let view = TensorView::new(dtype, shape, &data).unwrap();
            let metadata = HashMap::from([("version".to_string(), version.to_string())]);
            files::write_atomic(&path, &safetensors::serialize([(name, view)], Some(metadata)).unwrap()).unwrap();
            let error = Lookahead::read(&path).unwrap_err().to_string();
            assert!(error.contains(word), "expected `{word}` in: {error}");
        }
    }
}
