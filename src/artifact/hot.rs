//! `hot_experts.json`: which experts are used most, by which texts that was found, and how much of the traffic they cover.
//!
//! Modules carry the names of the checkpoint, so that other programs can use the list. Readers of the weights ignore it.

use crate::files::{self, FileError};
use crate::ids::{ExpertId, LayerId};
use crate::model::names::Names;
use crate::model::spec::ModelSpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Name of the file.
pub const FILE: &str = "hot_experts.json";
/// Form written and read by this version.
pub const VERSION: u32 = 1;

/// Why a list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HotError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not of the expected form.
    #[error("`{}` is not a list of hot experts: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The list is of another model.
    #[error("`{}` is a list of another model: {reason}", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotExperts {
    /// Form of this file.
    pub version: u32,
    /// The model that was run.
    pub model: Model,
    /// The texts it ran on.
    pub tasks: Vec<Task>,
    /// Share of the visits that each layer's list was made to cover; absent if it was made to fit a budget.
    pub target_coverage: Option<f64>,
    /// Every layer with a router, in order.
    pub layers: Vec<Layer>,
    /// All hot experts as modules of the checkpoint, layer by layer, most used first.
    pub hot: Vec<String>,
}

/// The model that was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Name of the directory; of an artifact, that of the checkpoint it was made from.
    pub name: String,
    /// Checksum of `config.json`; of an artifact, that of the checkpoint it was made from.
    pub config_sha256: String,
}

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Its name.
    pub name: String,
    /// Number of texts.
    pub samples: u64,
    /// Number of tokens.
    pub tokens: u64,
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Its index in the model.
    pub layer: u32,
    /// Visits of each expert, `[E]`.
    pub counts: Vec<u64>,
    /// Sums of the gate weights of those visits, `[E]`.
    pub weight_sums: Vec<f64>,
    /// Hot experts, most used first.
    pub hot: Vec<u32>,
    /// Share of held-out visits that they cover.
    pub coverage: f64,
}

impl HotExperts {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, HotError> {
        let bytes = files::read(path)?;
        let malformed = |reason: String| HotError::Malformed { path: path.to_path_buf(), reason };
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| malformed(e.to_string()))?;
        match value.get("version").and_then(Value::as_u64) {
            Some(v) if v == VERSION as u64 => {}
            Some(v) => return Err(malformed(format!("it has version {v}, expected {VERSION}"))),
            None => return Err(malformed("it has no `version`".into())),
        }
        let list: Self = serde_json::from_value(value).map_err(|e| malformed(e.to_string()))?;
        list.check().map_err(malformed)?;
        Ok(list)
    }

    /// Writes the file whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), HotError> {
        let malformed = |e: serde_json::Error| HotError::Malformed { path: path.to_path_buf(), reason: e.to_string() };
        let mut bytes = serde_json::to_vec_pretty(self).map_err(malformed)?;
        bytes.push(b'\n');
        Ok(files::write_atomic(path, &bytes)?)
    }

    /// What must hold whatever the model.
    fn check(&self) -> Result<(), String> {
        let share = |x: f64| (0.0..=1.0).contains(&x);
        if self.target_coverage.is_some_and(|t| !share(t)) {
            return Err("`target_coverage` is no share".into());
        }
        if self.layers.windows(2).any(|w| w[0].layer >= w[1].layer) {
            return Err("layers do not rise".into());
        }
        for l in &self.layers {
            let (at, experts) = (l.layer, l.counts.len());
            if l.weight_sums.len() != experts {
                return Err(format!("layer {at} has {experts} counts, but {} weight sums", l.weight_sums.len()));
            }
            if l.weight_sums.iter().any(|w| !w.is_finite()) || !share(l.coverage) {
                return Err(format!("layer {at} has a weight sum or coverage that cannot be"));
            }
            let mut seen = HashSet::new();
            if let Some(e) = l.hot.iter().find(|&&e| e as usize >= experts || !seen.insert(e)) {
                return Err(format!("layer {at} lists expert {e} twice, or has only {experts} experts"));
            }
        }
        let listed: usize = self.layers.iter().map(|l| l.hot.len()).sum();
        if listed != self.hot.len() {
            return Err(format!("`hot` has {} modules, the layers have {listed} hot experts", self.hot.len()));
        }
        Ok(())
    }

    /// Checks that the list speaks of this model: the same layers, experts and module names. `path` is for the message.
    pub fn check_model(&self, path: &Path, spec: &ModelSpec, names: &Names) -> Result<(), HotError> {
        let other = |reason: String| Err(HotError::OtherModel { path: path.to_path_buf(), reason });
        let have: Vec<(u32, usize)> = self.layers.iter().map(|l| (l.layer, l.counts.len())).collect();
        let want: Vec<(u32, usize)> = spec.routers().map(|(l, router)| (l, router.experts)).collect();
        if have.len() != want.len() {
            return other(format!("{} layers with experts, expected {}", have.len(), want.len()));
        }
        if let Some((h, w)) = have.iter().zip(&want).find(|(h, w)| h != w) {
            return other(format!("layer {} with {} experts, expected layer {} with {}", h.0, h.1, w.0, w.1));
        }
        match self.hot.iter().zip(modules(&self.layers, names)).find(|(have, want)| *have != want) {
            Some((have, want)) => other(format!("module `{have}`, expected `{want}`")),
            None => Ok(()),
        }
    }
}

/// The hot experts of some layers as modules of the checkpoint.
pub fn modules(layers: &[Layer], names: &Names) -> Vec<String> {
    layers.iter().flat_map(|l| l.hot.iter().map(|&e| names.expert(LayerId(l.layer), ExpertId(e)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> HotExperts {
        let layers = vec![
            Layer { layer: 1, counts: vec![3, 9, 0], weight_sums: vec![1.5, 6.25, 0.0], hot: vec![1, 0], coverage: 0.75 },
            Layer { layer: 2, counts: vec![8, 2, 2], weight_sums: vec![4.0, 0.1, 0.3], hot: vec![0], coverage: 0.5 },
        ];
        HotExperts {
            version: VERSION,
            model: Model { name: "m".into(), config_sha256: "ab".into() },
            tasks: vec![Task { name: "prose".into(), samples: 3, tokens: 12 }],
            target_coverage: Some(0.85),
            hot: modules(&layers, &Names::QWEN3_MOE),
            layers,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        list().write(&path).unwrap();
        assert_eq!(HotExperts::read(&path).unwrap(), list());
        assert_eq!(list().hot, ["model.layers.1.mlp.experts.1", "model.layers.1.mlp.experts.0", "model.layers.2.mlp.experts.0"]);
    }

    #[test]
    fn contradictions_are_refused() {
        type Damage = fn(&mut Value);
        let cases: [(Damage, &str); 8] = [
            (|v| v["version"] = 2.into(), "version 2"),
            (|v| v["layers"][0]["hot"][0] = 3.into(), "only 3 experts"),
            (|v| v["layers"][0]["hot"][0] = 0.into(), "twice"),
            (|v| v["layers"][0]["counts"][0] = (-1).into(), "invalid value"),
            (|v| v["layers"][0]["weight_sums"] = serde_json::json!([1.0]), "1 weight sums"),
            (|v| v["layers"][1]["layer"] = 1.into(), "do not rise"),
            (|v| v["hot"] = serde_json::json!([]), "0 modules"),
            (|v| v["surprise"] = 1.into(), "surprise"),
        ];
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        for (damage, word) in cases {
            let mut value = serde_json::to_value(list()).unwrap();
            damage(&mut value);
            files::write_atomic(&path, value.to_string().as_bytes()).unwrap();
            let error = HotExperts::read(&path).unwrap_err().to_string();
            assert!(error.contains(word), "expected `{word}` in: {error}");
        }
    }
}
