//! The GGUF container, version 3: keys, tensor descriptions, aligned data.
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

/// Data of every tensor begins at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 32;
const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// 32-bit unsigned integer.
    Count(u32),
    /// 32-bit float.
    Number(f32),
    /// Flag.
    Flag(bool),
    /// UTF-8 string.
    Text(String),
    /// List of strings.
    Texts(Vec<String>),
    /// List of 32-bit floats.
    Numbers(Vec<f32>),
    /// List of 32-bit signed integers.
    Integers(Vec<i32>),
}

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// Blocks of 32 four-bit codes.
    Q4_0,
    /// The same with an offset.
    Q4_1,
    /// Blocks of 32 eight-bit codes.
    Q8_0,
    /// 16-bit brain float.
    BF16,
}

impl Kind {
    /// Name as llama.cpp prints it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::F32 => "F32",
            Kind::F16 => "F16",
            Kind::Q4_0 => "Q4_0",
            Kind::Q4_1 => "Q4_1",
            Kind::Q8_0 => "Q8_0",
            Kind::BF16 => "BF16",
        }
    }

    fn number(self) -> u32 {
        match self {
            Kind::F32 => 0,
            Kind::F16 => 1,
            Kind::Q4_0 => 2,
            Kind::Q4_1 => 3,
            Kind::Q8_0 => 8,
            Kind::BF16 => 30,
        }
    }

    /// Bytes of `n` consecutive elements, whole blocks of them.
    pub fn bytes(self, n: u64) -> u64 {
        match self {
            Kind::F32 => n * 4,
            Kind::F16 | Kind::BF16 => n * 2,
            Kind::Q4_0 => n / 32 * 18,
            Kind::Q4_1 => n / 32 * 20,
            Kind::Q8_0 => n / 32 * 34,
        }
    }
}

/// A tensor's name, type and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Type.
    pub kind: Kind,
    /// Dimensions, the fastest last, as in the rest of this program; the file has them reversed.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    fn bytes(&self) -> u64 {
        self.kind.bytes(self.shape.iter().product())
    }
}

/// Everything before the data.
#[derive(Clone, Debug)]
pub struct Header {
    keys: Vec<(String, Value)>,
    tensors: Vec<TensorInfo>,
}

/// Zero bytes that follow a tensor of this size.
pub fn padding(bytes: u64) -> usize {
    (bytes.next_multiple_of(ALIGNMENT) - bytes) as usize
}

impl Header {
    /// Keys and tensors in the order in which they will lie.
    pub fn new(keys: Vec<(String, Value)>, tensors: Vec<TensorInfo>) -> Self {
        Self { keys, tensors }
    }

    /// Size of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.to_bytes().len() as u64 + self.tensors.iter().map(|t| t.bytes().next_multiple_of(ALIGNMENT)).sum::<u64>()
    }

    /// The bytes up to the first tensor's data.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            text(&mut out, key);
            put(&mut out, value);
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            text(&mut out, &t.name);
            out.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.kind.number().to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += t.bytes().next_multiple_of(ALIGNMENT);
        }
        out.resize((out.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
        out
    }
}

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

/// The type's number, then the value.
fn put(out: &mut Vec<u8>, value: &Value) {
    let list = |out: &mut Vec<u8>, kind: u32, n: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((n as u64).to_le_bytes());
    };
    match value {
        Value::Count(n) => {
            out.extend(4u32.to_le_bytes());
            out.extend(n.to_le_bytes());
        }
        Value::Number(x) => {
            out.extend(6u32.to_le_bytes());
            out.extend(x.to_le_bytes());
        }
        Value::Flag(b) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*b));
        }
        Value::Text(s) => {
            out.extend(8u32.to_le_bytes());
            text(out, s);
        }
        Value::Texts(all) => {
            list(out, 8, all.len());
            all.iter().for_each(|s| text(out, s));
        }
        Value::Numbers(all) => {
            list(out, 6, all.len());
            all.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        Value::Integers(all) => {
            list(out, 5, all.len());
            all.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
    }
}
