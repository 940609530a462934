//! Where every tensor of an artifact lies: order, shards, headers. A pure function over names and sizes.
//!
//! The tensors of one expert are neighbours (gate, up, down: packed, then zero points, then scales), so that an expert is one read. The
//! data of a shard begins at a page; no holes; every tensor begins at a multiple of its element size; small tensors and
//! shapes come last.

use crate::ids::TensorId;
use crate::quant::format::{Bits, Group, Zero};
use crate::tensor::Dtype;
use serde_json::{Map, Value, json};

/// The data of a shard begins at a multiple of this many bytes of the file.
pub const PAGE_BYTES: u64 = 4096;
/// Largest shard by default, bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;
/// Tensors up to this size come after the large ones.
const SMALL_BYTES: u64 = 64 * 1024;
/// Every element size divides this.
const WIDEST_BYTES: u64 = 8;

/// Where the bytes of a tensor come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The same bytes as a source tensor.
    Copy {
        /// Its name.
        source: String,
    },
    /// A weight of the model, decoded to plain floats.
    Decoded {
        /// Which.
        id: TensorId,
    },
    /// A tensor that stands aside, decoded to plain floats.
    DecodedSide {
        /// The tensor that holds its codes.
        source: String,
    },
    /// The packed codes of a weight.
    Codes {
        /// Which.
        id: TensorId,
        /// Width of a code.
        bits: Bits,
        /// Columns a scale covers.
        group: Group,
        /// The code of zero.
        zero: Zero,
    },
    /// The zero points of a weight, whose codes come earlier in the same shard.
    Zeros {
        /// Which.
        id: TensorId,
    },
    /// The scales of a weight, whose codes come earlier in the same shard.
    Scales {
        /// Which.
        id: TensorId,
    },
    /// Rows and columns of a weight.
    Shape {
        /// The two.
        shape: [usize; 2],
    },
}

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the artifact.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub content: Content,
}

impl Tensor {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes(self.shape.iter().product()) as u64
    }

    fn element_bytes(&self) -> u64 {
        (self.dtype.bits() as u64).div_ceil(8).max(1)
    }
}

/// Tensors that stay neighbours, and are never divided between shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    /// In order, element sizes falling.
    pub tensors: Vec<Tensor>,
    /// Tensors of the same shard that go last.
    pub shapes: Vec<Tensor>,
}

impl Unit {
    fn bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    fn all_bytes(&self) -> u64 {
        self.bytes() + self.shapes.iter().map(Tensor::bytes).sum::<u64>()
    }
}

/// One file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Name of the file.
    pub name: String,
    /// Length field, JSON and padding.
    pub header: Vec<u8>,
    /// In the order in which they lie.
    pub tensors: Vec<Tensor>,
    /// Size of the file.
    pub bytes: u64,
}

/// Divides units among shards of at most `shard_bytes`, where a unit is not larger itself, and orders each shard.
pub fn arrange(units: Vec<Unit>, shard_bytes: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<Unit>> = Vec::new();
    let mut filled = 0;
    for unit in units {
        let bytes = unit.all_bytes();
        match groups.last_mut() {
            Some(group) if filled + bytes <= shard_bytes => {
                filled += bytes;
                group.push(unit);
            }
            _ => {
                filled = bytes;
                groups.push(vec![unit]);
            }
        }
    }
    let total = groups.len();
    let name = |i: usize| match total {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{total:05}.safetensors", i + 1),
    };
    groups.into_iter().enumerate().map(|(i, group)| shard(name(i), ordered(group))).collect()
}

/// `model.safetensors.index.json` for several shards; one shard needs none.
pub fn index(shards: &[Shard]) -> Option<Value> {
    if shards.len() < 2 {
        return None;
    }
    let total: u64 = shards.iter().flat_map(|s| &s.tensors).map(Tensor::bytes).sum();
    let mut names: Vec<(&str, &str)> =
        shards.iter().flat_map(|s| s.tensors.iter().map(|t| (t.name.as_str(), s.name.as_str()))).collect();
    names.sort();
    let map: Map<String, Value> = names.into_iter().map(|(t, s)| (t.to_string(), s.into())).collect();
    Some(json!({"metadata": {"total_size": total}, "weight_map": map}))
}

/// Large units whose size keeps the next one aligned, then small ones, then shapes, then what would misalign others, widest
/// elements first.
fn ordered(units: Vec<Unit>) -> Vec<Tensor> {
    let mut shapes = Vec::new();
    let (mut large, mut small, mut ragged) = (Vec::new(), Vec::new(), Vec::new());
    for mut unit in units {
        shapes.append(&mut unit.shapes);
        let bytes = unit.bytes();
        if !bytes.is_multiple_of(WIDEST_BYTES) {
            ragged.push(unit);
        } else if bytes <= SMALL_BYTES && unit.tensors.len() == 1 {
            small.push(unit);
        } else {
            large.push(unit);
        }
    }
    let mut tensors: Vec<Tensor> = large.into_iter().chain(small).flat_map(|u| u.tensors).collect();
    tensors.append(&mut shapes);
    // Units that end at a multiple of four keep the next unit's words aligned; in others each tensor stands for itself.
    let (words, odd): (Vec<Unit>, Vec<Unit>) =
        ragged.into_iter().partition(|u| u.bytes().is_multiple_of(4) && u.tensors.iter().all(|t| t.element_bytes() <= 4));
    let mut odd: Vec<Tensor> = odd.into_iter().flat_map(|u| u.tensors).collect();
    odd.sort_by_key(|t| std::cmp::Reverse(t.element_bytes()));
    let wide = odd.iter().take_while(|t| t.element_bytes() > 4).count();
    let rest = odd.split_off(wide);
    tensors.extend(odd);
    tensors.extend(words.into_iter().flat_map(|u| u.tensors));
    tensors.extend(rest);
    tensors
}

fn shard(name: String, tensors: Vec<Tensor>) -> Shard {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in &tensors {
        let end = offset + tensor.bytes();
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [offset, end]});
        entries.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    let unpadded = json.len() as u64 + 8;
    json.resize((unpadded.next_multiple_of(PAGE_BYTES) - 8) as usize, b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Shard { name, bytes: header.len() as u64 + offset, header, tensors }
}
