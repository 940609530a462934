//! Small checkpoints for tests, written to a temporary directory.
//!
//! ```ignore
//! let built = TestCheckpoint::new()
//!     .config(json!({"model_type": "mixtral"}))
//!     .f32("model.norm.weight", &[4], &[1.0; 4])
//!     .random("lm_head.weight", Dtype::BF16, &[16, 4], 7)
//!     .shards(2)
//!     .build();
//! Checkpoint::open(built.path())
//! ```
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};

use moe::tensor::{self, Dtype};
use serde_json::{Map, Value, json};

/// Describes a checkpoint; `build` or `write` puts it on disk.
#[derive(Clone)]
pub struct TestCheckpoint {
    config: Value,
    tensors: Vec<TestTensor>,
    num_shards: usize,
    index: TestIndex,
    files: Vec<(String, Vec<u8>)>,
}

/// One tensor as it goes to disk.
#[derive(Clone)]
pub struct TestTensor {
    pub name: String,
    /// As safetensors spells it.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

#[derive(Clone)]
enum TestIndex {
    IfSharded,
    Never,
    Exactly(Value),
}

/// A checkpoint on disk that is removed when dropped.
pub struct Built {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl Built {
    /// The checkpoint's directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The temporary directory around it, for outputs and for what must not lie inside the checkpoint.
    pub fn root(&self) -> &Path {
        self.root.path()
    }
}

impl Default for TestCheckpoint {
    fn default() -> Self {
        Self::new()
    }
}

impl TestCheckpoint {
    /// No tensors, an almost empty config, one file.
    pub fn new() -> Self {
        let config = json!({"model_type": "test"});
        TestCheckpoint { config, tensors: Vec::new(), num_shards: 1, index: TestIndex::IfSharded, files: Vec::new() }
    }

    /// Sets `config.json`.
    pub fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    /// Adds a tensor of any type from its bytes.
    pub fn raw(mut self, name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors.push(TestTensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes });
        self
    }

    /// Adds a tensor of `F32`, `F16` or `BF16` from values, rounded to it.
    pub fn values(self, name: &str, dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
        let mut bytes = vec![0; dtype.bytes(values.len())];
        tensor::encode(&mut bytes, dtype, values);
        self.raw(name, dtype.name(), shape, bytes)
    }

    /// Adds an F32 tensor.
    pub fn f32(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.values(name, Dtype::F32, shape, values)
    }

    /// Adds a BF16 tensor.
    pub fn bf16(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.values(name, Dtype::BF16, shape, values)
    }

    /// Adds a tensor of values in -1..1 that depend on `seed` alone.
    pub fn random(self, name: &str, dtype: Dtype, shape: &[usize], seed: u64) -> Self {
        let values = random_values(shape.iter().product(), seed);
        self.values(name, dtype, shape, &values)
    }

    /// Spreads the tensors over `num_shards` files, in order, as evenly as their number allows.
    pub fn shards(mut self, num_shards: usize) -> Self {
        assert!(num_shards > 0);
        self.num_shards = num_shards;
        self
    }

    /// Leaves the index out although there are shards.
    pub fn without_index(mut self) -> Self {
        self.index = TestIndex::Never;
        self
    }

    /// Writes this index instead of the right one.
    pub fn index(mut self, index: Value) -> Self {
        self.index = TestIndex::Exactly(index);
        self
    }

    /// Adds a file beside the weights, or instead of one of them.
    pub fn file(mut self, name: &str, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), bytes.into()));
        self
    }

    /// The tensors added so far.
    pub fn tensors(&self) -> &[TestTensor] {
        &self.tensors
    }

    /// Writes everything to `model/` in a fresh temporary directory.
    pub fn build(&self) -> Built {
        let root = tempfile::tempdir().expect("temporary directory");
        let dir = root.path().join("model");
        self.write(&dir);
        Built { root, dir }
    }

    /// Writes everything to `dir`, which is created.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).expect("checkpoint directory");
        let put = |name: &str, bytes: &[u8]| fs::write(dir.join(name), bytes).expect("checkpoint file");
        put("config.json", self.config.to_string().as_bytes());
        let mut weight_map = Map::new();
        for idx in 0..self.num_shards {
            let bound = |i| i * self.tensors.len() / self.num_shards;
            let tensors = &self.tensors[bound(idx)..bound(idx + 1)];
            let name = shard_name(idx, self.num_shards);
            put(&name, &safetensors_bytes(tensors));
            weight_map.extend(tensors.iter().map(|t| (t.name.clone(), json!(name))));
        }
        let total: usize = self.tensors.iter().map(|t| t.bytes.len()).sum();
        let index = match &self.index {
            TestIndex::IfSharded if self.num_shards > 1 => {
                Some(json!({"metadata": {"total_size": total}, "weight_map": weight_map}))
            }
            TestIndex::IfSharded | TestIndex::Never => None,
            TestIndex::Exactly(index) => Some(index.clone()),
        };
        if let Some(index) = index {
            put("model.safetensors.index.json", index.to_string().as_bytes());
        }
        for (name, bytes) in &self.files {
            put(name, bytes);
        }
    }
}

/// The name that `save_pretrained` gives to a shard.
pub fn shard_name(idx: usize, num_shards: usize) -> String {
    match num_shards {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{num_shards:05}.safetensors", idx + 1),
    }
}

/// A safetensors file of these tensors in this order. Checks nothing, so that it can write what readers must refuse.
pub fn safetensors_bytes(tensors: &[TestTensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for t in tensors {
        let begin = data.len();
        data.extend_from_slice(&t.bytes);
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]});
        header.insert(t.name.clone(), entry);
    }
    with_header(Value::Object(header).to_string(), &data)
}

/// A safetensors file of a header, whatever it says, and data.
pub fn with_header(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend_from_slice(data);
    file
}

/// `n` values in -1..1 by splitmix64, the same on every machine.
pub fn random_values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..n).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}
