//! Routing traces: which experts every token visited in every layer, in order, for replay by cache policies.
//!
//! The file, all numbers little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | magic `MOETRACE` |
//! | 4 | version, 1 |
//! | 4 x 5 | `L` layers with routers, `E` experts a layer, `K` experts a token, number of tasks `N`, number of samples `S` |
//! | 4 x L | index of each layer in the model, rising |
//! | N x (4 + n) | names of the tasks: length, UTF-8 |
//! | S x 8 | task and tokens `T` of each sample |
//! | S x T x L x K | expert ids, one byte each if `E <= 256`, else two; token by token, all layers of a token together |
//!
//! Knows numbers only; must not know models or paths.

use std::io::{self, Cursor, Read, Seek, SeekFrom};

/// First bytes of a trace.
pub const MAGIC: [u8; 8] = *b"MOETRACE";
/// Form written and read by this version.
pub const VERSION: u32 = 1;

/// Why bytes are no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a routing trace: {0}")]
pub struct TraceError(String);

/// Dimensions of a trace, the same in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers with routers.
    pub layers: usize,
    /// `E`, at most 65536.
    pub experts: usize,
    /// `K`.
    pub top_k: usize,
}

/// The choices made for one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Index of its task.
    pub task: usize,
    /// Expert ids, `[T, L, K]`.
    pub ids: Vec<u16>,
}

impl Sample {
    /// Number of tokens.
    pub fn num_tok(&self, shape: Shape) -> usize {
        self.ids.len() / (shape.layers * shape.top_k).max(1)
    }
}

/// What a model did with a set of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Dimensions.
    pub shape: Shape,
    /// Index of each layer in the model, rising, `[L]`.
    pub layers: Vec<u32>,
    /// Names of the tasks.
    pub tasks: Vec<String>,
    /// The texts.
    pub samples: Vec<Sample>,
}

impl Trace {
    /// The bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Shape { layers, experts, top_k } = self.shape;
        let mut out = MAGIC.to_vec();
        let mut put = |n: usize| out.extend((n as u32).to_le_bytes());
        [VERSION as usize, layers, experts, top_k, self.tasks.len(), self.samples.len()].into_iter().for_each(&mut put);
        self.layers.iter().for_each(|&l| put(l as usize));
        for task in &self.tasks {
            out.extend((task.len() as u32).to_le_bytes());
            out.extend(task.as_bytes());
        }
        for s in &self.samples {
            out.extend((s.task as u32).to_le_bytes());
            out.extend((s.num_tok(self.shape) as u32).to_le_bytes());
        }
        for s in &self.samples {
            match experts <= 256 {
                true => out.extend(s.ids.iter().map(|&id| id as u8)),
                false => out.extend(s.ids.iter().flat_map(|id| id.to_le_bytes())),
            }
        }
        out
    }

    /// Reads the bytes of a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TraceError> {
        let mut reader = TraceReader::new(Cursor::new(bytes))?;
        let samples = (0..reader.samples().len()).map(|i| reader.sample(i)).collect::<Result<_, _>>()?;
        Ok(Self { shape: reader.shape, layers: reader.layers, tasks: reader.tasks, samples })
    }
}

/// A trace of which one sample at a time is in memory. Every length is checked against the bytes that are there before anything is
/// allocated for it.
pub struct TraceReader<R> {
    /// Dimensions.
    pub shape: Shape,
    /// Index of each layer in the model, rising, `[L]`.
    pub layers: Vec<u32>,
    /// Names of the tasks.
    pub tasks: Vec<String>,
    samples: Vec<Head>,
    rest: Source<R>,
}

/// Where a sample lies.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Index of its task.
    pub task: usize,
    /// Its tokens.
    pub num_tok: usize,
    at: u64,
}

impl<R: Read + Seek> TraceReader<R> {
    /// Reads all but the expert ids.
    pub fn new(file: R) -> Result<Self, TraceError> {
        let mut rest = Source::new(file)?;
        if rest.take(8, "magic")? != MAGIC {
            return Err(wrong("it does not begin with `MOETRACE`"));
        }
        let version = rest.u32("version")?;
        if version != VERSION {
            return Err(wrong(format!("it has version {version}, expected {VERSION}")));
        }
        let shape = Shape { layers: rest.len("layers")?, experts: rest.len("experts")?, top_k: rest.len("experts a token")? };
        let (num_tasks, num_samples) = (rest.len("tasks")?, rest.len("samples")?);
        if shape.layers == 0 || shape.top_k == 0 || shape.top_k > shape.experts || shape.experts > 1 << 16 {
            return Err(wrong(format!("{} of {} experts in {} layers", shape.top_k, shape.experts, shape.layers)));
        }
        let layers: Vec<u32> = rest.numbers(shape.layers, 1, "layer indices")?;
        if layers.windows(2).any(|w| w[0] >= w[1]) {
            return Err(wrong("layer indices do not rise"));
        }
        let mut tasks = Vec::new();
        for _ in 0..num_tasks {
            let len = rest.len("length of a task name")?;
            let name = String::from_utf8(rest.take(len, "task name")?).map_err(|_| wrong("a task name is not UTF-8"))?;
            tasks.push(name);
        }
        let heads = rest.numbers(num_samples, 2, "sample headers")?;
        let mut at = rest.at;
        let mut samples = Vec::new();
        for head in heads.chunks_exact(2) {
            let (task, num_tok) = (head[0] as usize, head[1] as usize);
            if task >= tasks.len() {
                return Err(wrong(format!("a sample of task {task}, but there are {} tasks", tasks.len())));
            }
            samples.push(Head { task, num_tok, at });
            let len = [shape.layers, shape.top_k, id_bytes(shape)].into_iter().try_fold(num_tok, usize::checked_mul);
            let end = len.and_then(|len| at.checked_add(len as u64)).filter(|end| *end <= rest.end);
            at = end.ok_or_else(|| wrong(format!("a sample has {num_tok} tokens, but {} bytes are left", rest.end - at)))?;
        }
        match rest.end - at {
            0 => Ok(Self { shape, layers, tasks, samples, rest }),
            n => Err(wrong(format!("{n} bytes follow the last sample"))),
        }
    }

    /// What is known of each sample without reading it.
    pub fn samples(&self) -> &[Head] {
        &self.samples
    }

    /// Reads one sample.
    pub fn sample(&mut self, index: usize) -> Result<Sample, TraceError> {
        let (shape, Head { task, num_tok, at }) = (self.shape, self.samples[index]);
        self.rest.seek(at)?;
        let raw = self.rest.take(num_tok * shape.layers * shape.top_k * id_bytes(shape), "expert ids")?;
        let ids: Vec<u16> = match id_bytes(shape) {
            1 => raw.iter().map(|&b| b as u16).collect(),
            _ => raw.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect(),
        };
        match ids.iter().find(|&&id| id as usize >= shape.experts) {
            Some(id) => Err(wrong(format!("expert {id} of {}", shape.experts))),
            None => Ok(Sample { task, ids }),
        }
    }
}

fn id_bytes(shape: Shape) -> usize {
    if shape.experts <= 256 { 1 } else { 2 }
}

fn wrong(what: impl Into<String>) -> TraceError {
    TraceError(what.into())
}

fn unread(error: io::Error) -> TraceError {
    wrong(format!("it cannot be read: {error}"))
}

/// A file of known length, and how far it is read.
struct Source<R> {
    file: R,
    at: u64,
    end: u64,
}

impl<R: Read + Seek> Source<R> {
    fn new(mut file: R) -> Result<Self, TraceError> {
        let end = file.seek(SeekFrom::End(0)).and_then(|end| file.rewind().map(|()| end)).map_err(unread)?;
        Ok(Self { file, at: 0, end })
    }

    fn seek(&mut self, at: u64) -> Result<(), TraceError> {
        self.at = self.file.seek(SeekFrom::Start(at)).map_err(unread)?;
        Ok(())
    }

    fn take(&mut self, n: usize, what: &str) -> Result<Vec<u8>, TraceError> {
        if n as u64 > self.end - self.at {
            return Err(wrong(format!("{what} should have {n} bytes, {} are left", self.end - self.at)));
        }
        let mut bytes = vec![0; n];
        self.file.read_exact(&mut bytes).map_err(unread)?;
        self.at += n as u64;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, TraceError> {
        self.take(4, what).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn len(&mut self, what: &str) -> Result<usize, TraceError> {
        self.u32(what).map(|n| n as usize)
    }

    /// `n` rows of `width` numbers.
    fn numbers(&mut self, n: usize, width: usize, what: &str) -> Result<Vec<u32>, TraceError> {
        let len = n.checked_mul(4 * width).ok_or_else(|| wrong(format!("too many {what}")))?;
        Ok(self.take(len, what)?.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace(experts: usize) -> Trace {
        let last = (experts - 1) as u16;
        Trace {
            shape: Shape { layers: 2, experts, top_k: 2 },
            layers: vec![1, 3],
            tasks: vec!["prose".into(), "中文".into()],
            samples: vec![
                Sample { task: 1, ids: vec![0, last, 1, 0, last, 2, 3, 1] },
                Sample { task: 0, ids: vec![] },
                Sample { task: 0, ids: vec![3, 1, 0, last] },
            ],
        }
    }

    #[test]
    fn what_is_written_is_read_with_one_and_two_byte_ids() {
        for (experts, id_bytes) in [(256, 1), (257, 2)] {
            let bytes = trace(experts).to_bytes();
            assert_eq!(bytes.len(), 8 + 6 * 4 + 2 * 4 + (4 + 5) + (4 + 6) + 3 * 8 + 12 * id_bytes);
            assert_eq!(Trace::from_bytes(&bytes).unwrap(), trace(experts));
        }
    }

    #[test]
    fn every_cut_and_every_addition_is_refused() {
        let bytes = trace(300).to_bytes();
        for n in 0..bytes.len() {
            assert!(Trace::from_bytes(&bytes[..n]).is_err(), "{n} bytes");
        }
        assert!(Trace::from_bytes(&[&bytes[..], &[0]].concat()).unwrap_err().to_string().contains("1 bytes follow"));
    }

    #[test]
    fn lengths_that_lie_allocate_nothing() {
        let good = trace(300).to_bytes();
        // Layers, experts, experts a token, tasks, samples, then the tokens of the first sample.
        for at in [12, 16, 20, 24, 28, 8 + 24 + 8 + 19 + 4] {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            assert!(Trace::from_bytes(&bytes).is_err(), "length at {at}");
        }
    }

    #[test]
    fn an_expert_that_is_not_there_is_refused() {
        let mut bytes = trace(300).to_bytes();
        let end = bytes.len();
        bytes[end - 2..].copy_from_slice(&300u16.to_le_bytes());
        assert_eq!(Trace::from_bytes(&bytes).unwrap_err().to_string(), "not a routing trace: expert 300 of 300");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(at in 8usize..80, value in any::<u8>(), tail in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut bytes = trace(5).to_bytes();
            if let Some(b) = bytes.get_mut(at) { *b = value; }
            bytes.truncate(at + 1);
            bytes.extend(tail);
            let _ = Trace::from_bytes(&bytes);
        }
    }
}
