//! The header of one safetensors file, checked until every byte of the file has exactly one owner.
//!
//! Every length in it is hostile: arithmetic is checked, and nothing is allocated for a number that a header merely claims.
//! The checks are those of the `safetensors` crate, whose errors do not name the tensor.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{CheckpointError, Entry};
use crate::tensor::Dtype;

/// Longest header that readers of the format accept.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the little-endian header length that starts a file.
const LENGTH_BYTES: u64 = 8;
/// No tensor library goes beyond; bounds what one entry can make us allocate.
const MAX_RANK: usize = 64;
/// More than any disk holds, with room for sums and multiples.
const MAX_TENSOR_BITS: u64 = 1 << 56;
const METADATA: &str = "__metadata__";
const LFS_MAGIC: &[u8] = b"version https://git-lfs";

/// Reads and checks the header of an open file of `file_bytes` bytes. Touches nothing behind the header.
pub(super) fn read(path: &Path, file: &mut File, file_bytes: u64, shard: usize) -> Result<Vec<(String, Entry)>, CheckpointError> {
    let io = |source| CheckpointError::Io { op: "read", path: path.to_owned(), source };
    if file_bytes < LENGTH_BYTES {
        return Err(CheckpointError::NoHeader { path: path.to_owned(), file_bytes });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(io)?;
    if LFS_MAGIC.starts_with(&length) {
        return Err(CheckpointError::LfsPointer { path: path.to_owned() });
    }
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(CheckpointError::HeaderTooLong { path: path.to_owned(), header_bytes, limit: MAX_HEADER_BYTES });
    }
    if header_bytes > file_bytes - LENGTH_BYTES {
        return Err(CheckpointError::HeaderPastEnd { path: path.to_owned(), header_bytes, file_bytes });
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact(&mut header).map_err(io)?;
    parse(path, &header, file_bytes, shard)
}

fn parse(path: &Path, header: &[u8], file_bytes: u64, shard: usize) -> Result<Vec<(String, Entry)>, CheckpointError> {
    let text = std::str::from_utf8(header)
        .map_err(|e| CheckpointError::HeaderNotUtf8 { path: path.to_owned(), at: LENGTH_BYTES + e.valid_up_to() as u64 })?;
    if !text.starts_with('{') {
        let reason = "it does not start with `{`".to_owned();
        return Err(CheckpointError::HeaderNotJson { path: path.to_owned(), reason });
    }
    let data_start = LENGTH_BYTES + header.len() as u64;
    let data_bytes = file_bytes - data_start;
    let mut tensors = parse_json(path, text)?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(twice) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(CheckpointError::DuplicateKey { path: path.to_owned(), tensor: twice[0].0.clone() });
    }

    let mut spans = Vec::with_capacity(tensors.len());
    for (name, raw) in &tensors {
        spans.push((check_entry(path, name, raw)?, name.as_str()));
    }
    spans.sort();
    check_coverage(path, &spans, data_start, data_bytes)?;

    let place = |(name, raw): (String, RawEntry)| {
        let dtype = dtype_named(&raw.dtype).ok_or_else(|| CheckpointError::UnknownDtype {
            path: path.to_owned(),
            tensor: name.clone(),
            dtype: raw.dtype,
        })?;
        let (begin, end) = raw.data_offsets;
        let range = (data_start + begin) as usize..(data_start + end) as usize;
        Ok((name, Entry { shard, dtype, shape: raw.shape.0, range }))
    };
    tensors.into_iter().map(place).collect()
}

/// Type, order of offsets and size of one tensor, regardless of the others.
fn check_entry(path: &Path, name: &str, raw: &RawEntry) -> Result<(u64, u64), CheckpointError> {
    let (path, tensor) = (path.to_owned(), name.to_owned());
    let Some(dtype) = dtype_named(&raw.dtype) else {
        return Err(CheckpointError::UnknownDtype { path, tensor, dtype: raw.dtype.clone() });
    };
    let (begin, end) = raw.data_offsets;
    let Some(found) = end.checked_sub(begin) else {
        return Err(CheckpointError::OffsetsReversed { path, tensor, begin, end });
    };
    let shape = raw.shape.0.clone();
    // Dimensions beside a zero are bounded too, so that sizes computed from some of them stay within 64 bits.
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul((d as u64).max(1)));
    let bits = elements.and_then(|n| n.checked_mul(dtype.bits() as u64)).filter(|&bits| bits <= MAX_TENSOR_BITS);
    let Some(bits) = bits.map(|bits| if shape.contains(&0) { 0 } else { bits }) else {
        return Err(CheckpointError::ShapeOverflow { path, tensor, dtype, shape });
    };
    if bits % 8 != 0 {
        return Err(CheckpointError::PartialByte { path, tensor, dtype, shape });
    }
    if bits / 8 != found {
        return Err(CheckpointError::SizeMismatch { path, tensor, dtype, shape, expected: bits / 8, found });
    }
    Ok((begin, end))
}

/// Sorted spans must tile the data without overlap, hole or remainder; the last two let a file carry a second meaning.
fn check_coverage(path: &Path, spans: &[((u64, u64), &str)], data_start: u64, data_bytes: u64) -> Result<(), CheckpointError> {
    let path = path.to_owned();
    let needed = spans.iter().map(|((_, end), _)| *end).max().unwrap_or(0);
    if let Some((_, tensor)) = spans.iter().find(|((_, end), _)| *end > data_bytes) {
        return Err(CheckpointError::Truncated {
            path,
            tensor: (*tensor).to_owned(),
            expected: data_start.saturating_add(needed),
            found: data_start + data_bytes,
        });
    }
    let mut covered = 0;
    let mut previous = "";
    for &((begin, end), name) in spans {
        let tensor = name.to_owned();
        if begin < covered {
            return Err(CheckpointError::Overlap { path, tensor, other: previous.to_owned(), begin, covered });
        }
        if begin > covered {
            return Err(CheckpointError::Hole { path, tensor, begin, covered });
        }
        (covered, previous) = (end, name);
    }
    if covered != data_bytes {
        return Err(CheckpointError::TrailingBytes { path, expected: data_start + covered, found: data_start + data_bytes });
    }
    Ok(())
}

fn parse_json(path: &Path, text: &str) -> Result<Vec<(String, RawEntry)>, CheckpointError> {
    let at = RefCell::new(None);
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = json.deserialize_map(HeaderVisitor { at: &at }).and_then(|tensors| json.end().map(|()| tensors));
    parsed.map_err(|e| match at.take() {
        Some(tensor) if !e.is_eof() => CheckpointError::MalformedEntry { path: path.to_owned(), tensor, reason: e.to_string() },
        _ => CheckpointError::HeaderNotJson { path: path.to_owned(), reason: e.to_string() },
    })
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        let mut shape = Vec::new();
        while let Some(dim) = seq.next_element()? {
            if shape.len() == MAX_RANK {
                return Err(de::Error::custom(format_args!("more than {MAX_RANK} dimensions")));
            }
            shape.push(dim);
        }
        Ok(Shape(shape))
    }
}

/// Reads the whole header in file order, leaving in `at` the name of the entry that it stumbled over.
struct HeaderVisitor<'a> {
    at: &'a RefCell<Option<String>>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Vec<(String, RawEntry)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            *self.at.borrow_mut() = Some(name.clone());
            if name == METADATA {
                if metadata.replace(map.next_value::<BTreeMap<String, String>>()?).is_some() {
                    return Err(de::Error::custom("it appears twice"));
                }
            } else {
                tensors.push((name, map.next_value()?));
            }
            self.at.take();
        }
        Ok(tensors)
    }
}

/// The type a header calls `name`; those without a variant of their own can still be copied through.
fn dtype_named(name: &str) -> Option<Dtype> {
    let plain = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8E4M3, Dtype::F8E8M0, Dtype::U8, Dtype::I8, Dtype::I32, Dtype::I64];
    let others = [
        ("BOOL", 8),
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("F8_E5M2", 8),
        ("F8_E4M3FNUZ", 8),
        ("F8_E5M2FNUZ", 8),
        ("I16", 16),
        ("U16", 16),
        ("U32", 32),
        ("U64", 64),
        ("F64", 64),
        ("C64", 64),
    ];
    let other = || others.iter().find(|(n, _)| *n == name).map(|&(name, bits)| Dtype::Other { name, bits });
    plain.into_iter().find(|d| d.name() == name).or_else(other)
}
