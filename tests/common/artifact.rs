//! Reading back what `moe quantize` wrote, by other means than the tool's own.
#![allow(dead_code, reason = "each test binary uses its own part")]

use assert_cmd::Command;
use moe::artifact::manifest::{Action, Manifest};
use regex::Regex;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A tensor's type, shape and bytes.
pub type Raw = (Dtype, Vec<usize>, Vec<u8>);

/// Every tensor of a directory.
pub fn tensors(dir: &Path) -> BTreeMap<String, Raw> {
    let mut all = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            all.extend(file.iter().map(|(n, t)| (n.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))));
        }
    }
    all
}

/// Exit code, standard output and standard error of the tool.
pub fn moe(args: &[&str]) -> (i32, String, String) {
    let out = Command::cargo_bin("moe").unwrap().args(args).output().unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    (out.status.code().unwrap_or(-1), text(&out.stdout), text(&out.stderr))
}

/// An artifact, read back.
pub struct Artifact {
    pub dir: PathBuf,
    pub manifest: Manifest,
    pub config: Value,
    pub tensors: BTreeMap<String, Raw>,
}

/// Quantizes and reads back, after checking what holds of every artifact: see [`Artifact::check`].
pub fn quantized(model: &Path, output: &Path, extra: &[&str]) -> Artifact {
    let mut args = vec!["quantize", model.to_str().unwrap(), "-o", output.to_str().unwrap(), "-q", "--method", "absmax"];
    args.extend(extra);
    let (code, _, stderr) = moe(&args);
    assert_eq!(code, 0, "{stderr}");
    let manifest = Manifest::read(output).unwrap().unwrap();
    let config = serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
    let artifact = Artifact { dir: output.into(), manifest, config, tensors: tensors(output) };
    artifact.check(&tensors(model));
    let (code, stdout, stderr) = moe(&["verify", output.to_str().unwrap(), "--source", model.to_str().unwrap()]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    for dir in [model, output] {
        let (code, _, stderr) = moe(&["inspect", dir.to_str().unwrap(), "--json", "--tensors"]);
        assert_eq!(code, 0, "{stderr}");
    }
    artifact
}

fn starred(name: &str) -> String {
    Regex::new(r"\.experts\.\d+\.").unwrap().replace(name, ".experts.*.").into_owned()
}

impl Artifact {
    /// Every source tensor is in the manifest, with all bytes counted; every packed module is claimed by the group of its
    /// scheme and not ignored; every other matrix is ignored.
    fn check(&self, source: &BTreeMap<String, Raw>) {
        let wanted: BTreeSet<String> = source.keys().map(|n| starred(n)).collect();
        let listed: BTreeSet<String> = self.manifest.tensors.iter().flat_map(|r| r.source.clone()).collect();
        assert_eq!(listed, wanted, "the manifest does not account for every source tensor");
        let bytes: usize = source.values().map(|(_, _, b)| b.len()).sum();
        assert_eq!(self.manifest.totals.source_bytes, bytes as u64, "source bytes");
        let written: usize = self.tensors.values().map(|(_, _, b)| b.len()).sum();
        assert_eq!(self.manifest.totals.bytes, written as u64, "bytes written");
        for row in self.manifest.tensors.iter().filter(|r| r.action == Action::Dropped) {
            assert!(row.reason.is_some(), "{row:?} is dropped without a reason");
        }
        for (name, (dtype, _, bytes)) in &self.tensors {
            match name.strip_suffix(".weight_packed") {
                Some(module) => {
                    let bits = self.bits(module);
                    let targets: Vec<usize> = self.groups().filter(|(_, t)| self.matches(t, module)).map(|(b, _)| b).collect();
                    assert_eq!(targets.first(), Some(&bits), "`{module}` of {bits} bits meets {targets:?}");
                    assert!(!self.ignored(module), "`{module}` is packed and ignored");
                }
                None if name.ends_with(".weight") && self.tensors[name].1.len() > 1 && self.packed() > 0 => {
                    let module = name.trim_end_matches(".weight");
                    assert!(self.ignored(module), "`{module}` is neither packed nor ignored");
                }
                None if ["weight_shape", "weight_scale", "weight_zero_point"].iter().any(|part| name.ends_with(part)) => {}
                None => {
                    let of_source = source.get(name);
                    assert!(of_source.is_none_or(|s| s.0 != *dtype || s.2 == *bytes), "`{name}` changed");
                }
            }
        }
    }

    /// Width of a module's codes, from the stored shape.
    pub fn bits(&self, module: &str) -> usize {
        let shape = &self.tensors[&format!("{module}.weight_shape")].2;
        let cols = i64::from_le_bytes(shape[8..].try_into().unwrap()) as usize;
        self.tensors[&format!("{module}.weight_packed")].1[1] * 32 / cols
    }

    fn groups(&self) -> impl Iterator<Item = (usize, Vec<String>)> {
        let groups = self.config["quantization_config"]["config_groups"].as_object().cloned().unwrap_or_default();
        groups.into_iter().map(|(_, g)| {
            let targets = g["targets"].as_array().unwrap().iter().map(|t| t.as_str().unwrap().to_string()).collect();
            (g["weights"]["num_bits"].as_u64().unwrap() as usize, targets)
        })
    }

    fn matches(&self, patterns: &[String], module: &str) -> bool {
        patterns.iter().any(|p| match p.strip_prefix("re:") {
            Some(re) => Regex::new(&format!("^(?:{re})")).unwrap().is_match(module),
            None => p == module,
        })
    }

    /// Whether `ignore` names a module.
    pub fn ignored(&self, module: &str) -> bool {
        let list = self.config["quantization_config"]["ignore"].as_array().cloned().unwrap_or_default();
        let list: Vec<String> = list.iter().map(|p| p.as_str().unwrap().to_string()).collect();
        self.matches(&list, module)
    }

    /// Number of packed modules.
    pub fn packed(&self) -> usize {
        self.tensors.keys().filter(|n| n.ends_with(".weight_packed")).count()
    }

    /// A packed matrix, decoded with nothing but its tensors; scales are BF16.
    pub fn dequantized(&self, module: &str) -> Vec<f32> {
        let get = |what: &str| &self.tensors[&format!("{module}.weight_{what}")];
        let (words, scales, shape) = (get("packed"), get("scale"), get("shape"));
        let cols = i64::from_le_bytes(shape.2[8..].try_into().unwrap()) as usize;
        let bits = words.1[1] * 32 / cols;
        let scale: Vec<f32> = scales.2.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        let group = cols / scales.1[1];
        let zeros = self.tensors.get(&format!("{module}.weight_zero_point"));
        let zero = |row: usize, group: usize| match zeros {
            None => 1 << (bits - 1),
            Some((_, shape, bytes)) => {
                let word = (row * bits / 32 * shape[1] + group) * 4;
                let word = u32::from_le_bytes(bytes[word..word + 4].try_into().unwrap());
                (word >> (row * bits % 32)) as i32 & ((1 << bits) - 1)
            }
        };
        let code = |row: usize, col: usize| {
            let byte = words.2[row * words.1[1] * 4 + col * bits / 8];
            i32::from(if bits == 8 { byte } else { byte >> (4 * (col % 2)) & 15 }) - zero(row, col / group)
        };
        let rows = words.1[0];
        (0..rows * cols).map(|i| code(i / cols, i % cols) as f32 * scale[i / cols * scales.1[1] + i % cols / group]).collect()
    }

    /// The manifest's row that names a source tensor.
    pub fn row(&self, source: &str) -> &moe::artifact::manifest::Row {
        self.manifest.tensors.iter().find(|r| r.source.iter().any(|s| *s == starred(source))).unwrap()
    }
}
