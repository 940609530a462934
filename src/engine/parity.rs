//! The CUDA engine against the CPU engine, one row a step and format, at awkward shapes; used by tests and by `moe doctor`.
//!
//! Small models with one mechanism each are written to a temporary directory with random weights in the format under test.
//! Both engines run the same steps on the same inputs, copied from the CPU before every step, so that no row inherits the
//! error of another.
//!
//! Tolerances, relative in the L2 norm: single precision sums of a few hundred terms in another order leave about 1e-6, bounded
//! by [`EXACT`]. Fast products read activations as two planes of 2^-16 of the largest of 128, 3e-5 of a typical element, a few
//! in a row, bounded by [`PLANES`]. Fast attention keeps what bf16 leaves of queries and probabilities, 2^-17, and is compared with
//! keys and values rounded to bf16, as its cache has them. Where those of the two engines lie on two sides of the middle between two
//! bf16 numbers they round apart: a share e / u of elements by u = 2^-8, so that an error e of 1e-4 before becomes sqrt(e u) = 6e-4
//! after. A sequence of one token shows all of that.

use super::cuda::{self, Kernels, Kind, Options};
use super::{Batch, EngineError, Event, Rows, Turn, cpu};
use crate::artifact::weights::{Weights, WeightsError};
use crate::files::{self, Existing, FileError, OutputDir};
use crate::ids::{Component, Part, Role, SeqId, TensorId};
use crate::model::family;
use crate::model::names;
use crate::model::plan::Slot;
use crate::quant::format::{Bits, Format, Group, Zero, fit};
use crate::sample::SplitMix64;
use crate::sample::{Sampler, SamplerConfig};
use crate::tensor::{self, Dtype};
use safetensors::SafeTensorError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

/// Bound of kernels that compute in single precision throughout.
pub const EXACT: f64 = 2e-5;
/// Bound of kernels that read activations as planes, or keys and values in bf16.
pub const PLANES: f64 = 1e-3;

/// One comparison: the worst over all shapes tried.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// What was computed, e.g. `linear`; fused steps are joined by `+`.
    pub step: String,
    /// How the weights were stored.
    pub format: String,
    /// Relative error in the L2 norm.
    pub error: f64,
    /// What it may be.
    pub tolerance: f64,
    /// Most tokens of a pass.
    pub most_tok: usize,
}

impl Row {
    /// Whether the error is within bounds; not a number never is.
    pub fn holds(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Why no comparison could be made.
#[derive(Debug, thiserror::Error)]
pub enum ParityError {
    /// An engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] cuda::LoadError),
    /// The model could not be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The model could not be written.
    #[error(transparent)]
    Tensors(#[from] SafeTensorError),
    /// The model could not be read back.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// What is compared.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Odd elements of every input of the CUDA engine are multiplied by this; 1 but for proving that errors are seen.
    pub disturb: f32,
    /// Which kernels.
    pub kernels: Kernels,
}

/// How often [`rows`] calls its `on`.
pub fn parts(kernels: Kernels) -> u64 {
    (models().len() * formats().len() + if kernels == Kernels::Fast { 2 } else { 0 }) as u64
}

/// Compares every step in every format; `on` sees each model before it is tried.
pub fn rows(trial: Trial, on: &mut dyn FnMut(&str)) -> Result<Vec<Row>, ParityError> {
    let mut worst: BTreeMap<(String, String), Row> = BTreeMap::new();
    for (name, config) in models() {
        for format in formats() {
            on(&format!("{name} {}", format.name));
            let dir =
                std::env::temp_dir().join(format!("moe-parity-{}-{name}-{}", std::process::id(), format.name.replace(':', "-")));
            let dir = OutputDir::create(&dir, Existing::Replace)?;
            write_model(dir.path(), &config, &format)?;
            for row in compare(dir.path(), &format, trial)? {
                let key = (row.step.clone(), row.format.clone());
                let entry = worst.entry(key).or_insert_with(|| Row { error: 0.0, ..row.clone() });
                entry.error = if row.error.is_nan() { f64::INFINITY } else { entry.error.max(row.error) };
                entry.most_tok = entry.most_tok.max(row.most_tok);
            }
        }
    }
    let mut found: Vec<Row> = worst.into_values().collect();
    if trial.kernels == Kernels::Fast {
        on("sample");
        found.push(sampling()?);
        on("layers");
        found.extend(layers_at_once()?);
    }
    Ok(found)
}

/// The kernel that runs all layers of one token against those that it replaces, which have rows of their own. Sums have the same order, so that there
/// is no tolerance. No rows on devices that it was not made for.
fn layers_at_once() -> Result<Vec<Row>, ParityError> {
    const STEPS: usize = 24;
    let mut found = Vec::new();
    for (name, bits, [d, heads, head_dim, f]) in [
        ("int8, int4", Format::INT8_G128, [512, 16, 128, 256]),
        ("int4, int4", Format::INT4_G128, [512, 8, 64, 768]),
        ("int8, int4 long", Format::INT8_G128, [4096, 32, 128, 4096]),
        ("int4, int4 long", Format::INT4_G128, [1024, 16, 64, 7168]),
        ("int4, int4 longest", Format::INT4_G128, [1024, 16, 64, 14336]),
    ] {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": d, "intermediate_size": 256, "moe_intermediate_size": f,
            "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": heads / 4, "head_dim": head_dim,
            "max_position_embeddings": 512, "vocab_size": 259, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_experts": 5,
            "num_experts_per_tok": 3, "norm_topk_prob": true, "tie_word_embeddings": false,
        });
        let (_, spec) = family::read(&config).map_err(WeightsError::from)?;
        let format = |id: TensorId, _: usize| match id.role {
            Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => Format::INT4_G128,
            Role::Q | Role::K | Role::V | Role::O => bits,
            _ => Format::Source,
        };
        let mut device = cuda::Engine::random(&spec, &format, 3, Options::default(), &mut |_| {}).map_err(EngineError::from)?;
        if !device.runs_layers_at_once() {
            continue;
        }
        // Contexts of one page and of more than eight, which several blocks share.
        let logits = |device: &mut cuda::Engine| -> Result<Vec<f32>, ParityError> {
            let mut all = Vec::new();
            let mut sampler = Sampler::new(SamplerConfig::default()).map_err(EngineError::from)?;
            for (seq, len) in [(SeqId(0), 3u32), (SeqId(1), 150)] {
                let mut tokens: Vec<u32> = (0..len).map(|i| (i * 7 + 3) % 259).collect();
                let mut pass = Batch::default();
                pass.push(seq, 0, &tokens[..len as usize - 1], Rows::Last, 512);
                device.pass(&pass)?;
                for _ in 0..STEPS {
                    let turn = Turn { seq, tokens: &mut tokens, sampler: &mut sampler };
                    device.decode(&mut [turn], 1, 512, &mut |_| ControlFlow::Continue(()))?;
                    all.extend_from_slice(device.slot(Slot::Logits)?);
                }
                device.release(seq);
            }
            Ok(all)
        };
        let at_once = logits(&mut device)?;
        device.part_layers();
        let error = distance(&at_once, &logits(&mut device)?);
        found.push(Row { step: "layers decode".into(), format: name.into(), error, tolerance: 0.0, most_tok: 1 });
    }
    Ok(found)
}

/// Tokens that the device draws otherwise than the host, a share of all: both sum integers, so there is no tolerance.
fn sampling() -> Result<Row, ParityError> {
    const ROWS: usize = 32;
    const VOCAB: usize = 50_021;
    let config = json!({
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_local_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": false,
    });
    let (_, spec) = family::read(&config).map_err(WeightsError::from)?;
    let mut device =
        cuda::Engine::random(&spec, &|_, _| Format::Source, 1, Options::default(), &mut |_| {}).map_err(EngineError::from)?;
    let mut random = Random(SplitMix64(5));
    let (mut wrong, mut all) = (0, 0);
    for spread in [12.0, 0.01, 3.0] {
        let coarse = spread == 3.0;
        let logits: Vec<f32> = (0..ROWS * VOCAB).map(|_| spread * (random.unit() + random.unit() + random.unit())).collect();
        let logits: Vec<f32> = logits.into_iter().map(|x| if coarse { x.round() } else { x }).collect();
        let config = |i: usize| SamplerConfig {
            temperature: [0.0, 0.6, 1.0, 8.0][i % 4],
            top_k: [None, Some(40), Some(3000)][i % 3],
            top_p: [None, Some(0.9)][i / 2 % 2],
            min_p: [None, Some(0.02)][i / 8 % 2],
            repeat_penalty: [1.0, 1.2][i / 16],
            seed: i as u64,
        };
        let samplers = (0..ROWS).map(|i| Sampler::new(config(i))).collect::<Result<Vec<_>, _>>();
        let mut here = samplers.map_err(EngineError::from)?;
        let mut there = here.clone();
        let mut tokens: Vec<Vec<u32>> =
            (0..ROWS as u32).map(|i| (0..100).map(|t| (t * 37 + i) % VOCAB as u32).collect()).collect();
        for _ in 0..3 {
            let rows = logits.chunks_exact(VOCAB).zip(&mut here).zip(&tokens);
            let expected: Vec<u32> = rows
                .map(|((row, sampler), tokens)| sampler.sample(row, tokens))
                .collect::<Result<_, _>>()
                .map_err(EngineError::from)?;
            let turns = (0..).map(SeqId).zip(&mut tokens).zip(&mut there);
            let mut turns: Vec<Turn<'_>> = turns.map(|((seq, tokens), sampler)| Turn { seq, tokens, sampler }).collect();
            let found = device.sample_rows(&logits, &mut turns)?;
            wrong += found.iter().zip(&expected).filter(|(f, e)| f != e).count();
            all += ROWS;
            for (tokens, token) in tokens.iter_mut().zip(expected) {
                tokens.pop();
                tokens.push(token);
            }
        }
    }
    let error = wrong as f64 / all as f64;
    Ok(Row { step: "sample draw".into(), format: "f32".into(), error, tolerance: 0.0, most_tok: ROWS })
}

/// How the matrices of a model are stored.
struct Storage {
    name: &'static str,
    /// Of plain floats and scales.
    dtype: Dtype,
    /// Of the projections.
    format: Format,
    /// Of embedding and head.
    embeddings: Format,
}

fn formats() -> Vec<Storage> {
    let int = |bits, group| Format::Int { bits, group, zero: Zero::Middle };
    let of = |name, format| Storage { name, dtype: Dtype::BF16, format, embeddings: Format::Source };
    vec![
        of("bf16", Format::Source),
        Storage { dtype: Dtype::F16, ..of("f16", Format::Source) },
        Storage { dtype: Dtype::F32, ..of("f32", Format::Source) },
        of("int4:g128", Format::INT4_G128),
        of("int4:g64", int(Bits::Four, Group::Of(64))),
        of("int4:g32", int(Bits::Four, Group::Of(32))),
        Storage { embeddings: Format::INT8_G128, ..of("int8:g128", Format::INT8_G128) },
        of("int8:g32", int(Bits::Eight, Group::Of(32))),
        Storage { embeddings: Format::INT8_CHANNEL, ..of("int8:channel", Format::INT8_CHANNEL) },
        of("int4:g32:asym", int(Bits::Four, Group::Of(32)).with_zero(Zero::Point)),
        Storage {
            embeddings: Format::INT8_CHANNEL.with_zero(Zero::Point),
            ..of("int8:g128:asym", Format::INT8_G128.with_zero(Zero::Point))
        },
    ]
}

/// One small model for each set of mechanisms; widths are no multiples of tiles, counts are no powers of two.
fn models() -> Vec<(&'static str, Value)> {
    let base = |model_type: &str, own: Value| {
        let mut config = json!({
            "model_type": model_type, "hidden_act": "silu", "hidden_size": 384, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 259,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_theta": 10000.0, "num_experts_per_tok": 3,
        });
        if let (Value::Object(config), Value::Object(own)) = (&mut config, own) {
            config.extend(own);
        }
        config
    };
    vec![
        (
            "windowed",
            base(
                "mixtral",
                json!({"intermediate_size": 128, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 11}),
            ),
        ),
        (
            "head-norms",
            base(
                "qwen3_moe",
                json!({"head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 96, "num_experts": 9, "norm_topk_prob": true}),
            ),
        ),
        // decode of so many heads a key is left to plain kernels, which read what the fast ones of the prompt wrote
        (
            "many-heads",
            base(
                "qwen3_moe",
                json!({"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 128,
                       "moe_intermediate_size": 64, "num_experts": 4, "norm_topk_prob": true}),
            ),
        ),
        (
            "whole-norms",
            base(
                "olmoe",
                json!({"intermediate_size": 160, "num_experts": 8, "norm_topk_prob": false, "clip_qkv": 0.8, "num_key_value_heads": 6}),
            ),
        ),
        (
            "sparse-mixer",
            base(
                "phimoe",
                json!({"attention_bias": true, "lm_head_bias": true, "intermediate_size": 256, "num_local_experts": 5,
                       "num_experts_per_tok": 2, "router_jitter_noise": 0.1, "input_jitter_noise": 0.0}),
            ),
        ),
        (
            "shared",
            base(
                "qwen2_moe",
                json!({"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 7, "norm_topk_prob": false,
                       "shared_expert_intermediate_size": 192, "decoder_sparse_step": 1, "mlp_only_layers": []}),
            ),
        ),
        (
            "latent",
            base(
                "deepseek_v2",
                json!({"first_k_dense_replace": 1, "intermediate_size": 320, "moe_intermediate_size": 96, "kv_lora_rank": 64,
                       "q_lora_rank": null, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 2,
                       "topk_group": 1, "topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_shared_experts": 2,
                       "norm_topk_prob": false, "routed_scaling_factor": 2.0, "num_key_value_heads": 6, "moe_layer_freq": 1,
                       "attention_bias": false, "mlp_bias": false}),
            ),
        ),
        (
            "latent-512",
            base(
                "deepseek_v2",
                json!({"first_k_dense_replace": 1, "intermediate_size": 256, "moe_intermediate_size": 64, "kv_lora_rank": 512,
                       "q_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
                       "topk_group": 1, "topk_method": "greedy", "n_routed_experts": 4, "n_shared_experts": 1,
                       "norm_topk_prob": false, "routed_scaling_factor": 1.0, "num_key_value_heads": 6, "moe_layer_freq": 1,
                       "attention_bias": false, "mlp_bias": false}),
            ),
        ),
        (
            "scaled",
            base(
                "granitemoe",
                json!({"intermediate_size": 128, "num_local_experts": 8, "attention_multiplier": 0.04, "embedding_multiplier": 6.0,
                       "residual_multiplier": 0.3, "logits_scaling": 4.0, "tie_word_embeddings": true}),
            ),
        ),
    ]
}

/// Deterministic values in -1..1.
struct Random(SplitMix64);

impl Random {
    fn unit(&mut self) -> f32 {
        (self.0.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn encoded(&mut self, dtype: Dtype, n: usize, value: impl Fn(f32) -> f32) -> Vec<u8> {
        let values: Vec<f32> = (0..n).map(|_| value(self.unit())).collect();
        let mut bytes = vec![0; dtype.bytes(n)];
        tensor::encode(&mut bytes, dtype, &values);
        bytes
    }
}

struct Stored {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn write_model(dir: &Path, config: &Value, storage: &Storage) -> Result<(), ParityError> {
    let (family, spec) = family::read(config).map_err(WeightsError::from)?;
    let mut random = Random(SplitMix64(7));
    let mut tensors: BTreeMap<String, Stored> = BTreeMap::new();
    for (id, shape) in names::tensors(&spec) {
        let cols = shape.last().copied().unwrap_or(1);
        let n: usize = shape.iter().product();
        let spread = (3.0 / cols as f32).sqrt();
        match fit(wanted(id, storage), cols) {
            Format::Source => {
                let value = move |x: f32| match (id.part, id.role) {
                    (Part::Bias, _) => 0.2 * x,
                    (_, Role::Embed) => x,
                    (_, role) if role.component() == Component::Norms => 1.0 + 0.3 * x,
                    (_, Role::Router) => 3.0 * spread * x,
                    _ => spread * x,
                };
                let bytes = random.encoded(storage.dtype, n, value);
                let dtype = match storage.dtype {
                    Dtype::F32 => safetensors::Dtype::F32,
                    Dtype::F16 => safetensors::Dtype::F16,
                    _ => safetensors::Dtype::BF16,
                };
                tensors.insert(family.names.tensor(id), Stored { dtype, shape, bytes });
            }
            format @ Format::Int { bits, .. } => {
                let (rows, words, scales) = (n / cols, format.packed_cols(cols), format.scale_cols(cols));
                let packed = (0..rows * words).flat_map(|_| (random.0.next() as u32).to_le_bytes()).collect();
                let step = spread / bits.half() as f32;
                let scale = random.encoded(Dtype::BF16, rows * scales, |x| step * if x < 0.0 { x - 0.5 } else { x + 0.5 });
                let whole = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
                let module = family.names.module(id);
                let zero_rows = format.zero_rows(rows);
                let zeros: Vec<u8> = (0..zero_rows * scales).flat_map(|_| (random.0.next() as u32).to_le_bytes()).collect();
                let zeros = (zero_rows > 0).then_some(("zero_point", safetensors::Dtype::I32, vec![zero_rows, scales], zeros));
                let parts = [
                    ("packed", safetensors::Dtype::I32, vec![rows, words], packed),
                    ("scale", safetensors::Dtype::BF16, vec![rows, scales], scale),
                    ("shape", safetensors::Dtype::I64, vec![2], whole),
                ];
                for (part, dtype, shape, bytes) in parts.into_iter().chain(zeros) {
                    tensors.insert(format!("{module}.weight_{part}"), Stored { dtype, shape, bytes });
                }
            }
        }
    }
    let views = tensors
        .iter()
        .map(|(name, t)| Ok((name, safetensors::tensor::TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?)))
        .collect::<Result<Vec<_>, SafeTensorError>>()?;
    files::write_atomic(&dir.join("model.safetensors"), &safetensors::serialize(views, None)?)?;
    files::write_atomic(&dir.join("config.json"), config.to_string().as_bytes())?;
    Ok(())
}

/// Routers, small gates, norms and `kv_b` stay as they are, like in every artifact.
fn wanted(id: TensorId, storage: &Storage) -> Format {
    match (id.part, id.role) {
        (Part::Bias, _) | (_, Role::Router | Role::SharedRouter | Role::KvA | Role::KvB) => Format::Source,
        (_, Role::Embed | Role::Head) => storage.embeddings,
        (_, role) if role.component() == Component::Norms => Format::Source,
        _ => storage.format,
    }
}

/// Passes over two to forty sequences: a prompt that crosses pages, single tokens, a continuation, prompts whose experts are chosen by one block and
/// by several, many at once.
fn batches(vocab: usize, random: &mut Random) -> Vec<Batch> {
    let mut tokens = |n: usize| (0..n).map(|_| (random.0.next() % vocab as u64) as u32).collect::<Vec<_>>();
    let segments: [&[(u32, usize, usize, Rows)]; 7] = [
        &[(0, 0, 1, Rows::Last)],
        &[(0, 1, 33, Rows::All), (1, 0, 15, Rows::Last), (2, 0, 5, Rows::None)],
        &[(0, 34, 1, Rows::Last), (1, 15, 1, Rows::Last), (2, 5, 1, Rows::Last)],
        &[(1, 16, 9, Rows::Last), (2, 6, 8, Rows::Last)],
        &[(0, 35, 1, Rows::Last)],
        &[(3, 0, 70, Rows::Last)],
        &[(4, 0, 300, Rows::Last)],
    ];
    let mut all: Vec<Batch> = Vec::new();
    for segments in segments {
        let mut batch = Batch::default();
        for &(seq, start, len, rows) in segments {
            batch.push(SeqId(seq), start, &tokens(len), rows, 512);
        }
        all.push(batch);
    }
    let mut batch = Batch::default();
    for seq in 10..42 {
        batch.push(SeqId(seq), 0, &tokens(1), Rows::Last, 512);
    }
    all.push(batch);
    all
}

fn compare(dir: &Path, storage: &Storage, trial: Trial) -> Result<Vec<Row>, ParityError> {
    let weights = Arc::new(Weights::open(dir)?);
    let fast = trial.kernels == Kernels::Fast;
    let cache = if fast { Kind::Bf16 } else { Kind::F32 };
    let options = Options { cache, kernels: trial.kernels, ..Options::default() };
    let mut device = cuda::Engine::open(Arc::clone(&weights), options, &mut |_, _| (), &mut |_| ())?;
    let mut host = cpu::Engine::new(weights).with_cache(if fast { Dtype::BF16 } else { Dtype::F32 });
    let mut found = Vec::new();
    let mut random = Random(SplitMix64(11));
    for batch in batches(host.weights().spec().vocab, &mut random) {
        host.begin(&batch)?;
        let decode = device.begin_decode(&batch)?;
        if !decode {
            device.begin(&batch)?;
        }
        let groups = device.groups().to_vec();
        for (g, group) in groups.iter().enumerate() {
            let whole = fast && group.block.is_some();
            let pieces: Vec<Range<usize>> =
                if whole { vec![group.steps.clone()] } else { group.steps.clone().map(|i| i..i + 1).collect() };
            for steps in pieces {
                let mut step = host.plan().steps[steps.start].kind().to_string();
                let work = if whole { Work::Group(g, steps) } else { Work::Steps(steps) };
                let (error, ran_fast) = one(&mut host, &mut device, &batch, work, trial.disturb)?;
                if let Some(block) = group.block.as_ref().filter(|_| whole) {
                    let when = if decode { "decode" } else { "prefill" };
                    step = format!("{} {when}{}", block.name(), if ran_fast { "" } else { " (plain)" });
                }
                let tolerance = if fast { PLANES } else { EXACT };
                found.push(Row { step, format: storage.name.to_string(), error, tolerance, most_tok: batch.tokens.len() });
            }
        }
    }
    Ok(found)
}

/// Logits, experts and gates of a router.
type Chosen = (Vec<f32>, Vec<u32>, Vec<f32>);

/// What one row runs.
enum Work {
    /// Steps on plain kernels, compared in every buffer.
    Steps(Range<usize>),
    /// A group of these steps, compared in what it adds to the residual and in the logits.
    Group(usize, Range<usize>),
}

/// Error of a run of steps, the largest of all that is compared, and whether fast kernels ran.
fn one(
    host: &mut cpu::Engine,
    device: &mut cuda::Engine,
    batch: &Batch,
    work: Work,
    disturb: f32,
) -> Result<(f64, bool), ParityError> {
    let num_tok = batch.tokens.len();
    let before = host.slot(Slot::Residual).to_vec();
    for slot in Slot::ALL.into_iter().filter(|&s| s != Slot::Logits) {
        let mut values = host.slot(slot).to_vec();
        if !values.is_empty() && values.len().is_multiple_of(num_tok) {
            values.iter_mut().skip(1).step_by(2).for_each(|x| *x *= disturb);
            device.set_slot(slot, &values)?;
        }
    }
    let mut routed: [Vec<Chosen>; 2] = Default::default();
    let mut keep = |side: usize, event: Event<'_>| {
        let Event::Routed { logits, experts, gates, .. } = event;
        routed[side].push((logits.to_vec(), experts.to_vec(), gates.to_vec()));
    };
    let mut ran_fast = false;
    let slots: &[Slot] = match work {
        Work::Steps(steps) => {
            host.run(steps.clone(), batch, &mut |event| keep(0, event))?;
            device.run(steps, Some(&mut |event| keep(1, event)))?;
            &Slot::ALL
        }
        Work::Group(group, steps) => {
            host.run(steps, batch, &mut |_| ())?;
            ran_fast = device.run_group(group)?;
            &[Slot::Residual, Slot::Logits]
        }
    };
    let mut worst = 0.0f64;
    let mut see = |found: &[f32], expected: &[f32]| {
        let error = distance(found, expected);
        worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
    };
    for &slot in slots {
        let expected = host.slot(slot);
        if expected.is_empty() || (slot != Slot::Logits && !expected.len().is_multiple_of(num_tok)) {
            continue;
        }
        let found = device.slot(slot)?;
        if slot == Slot::Residual && before.len() == expected.len() && before != expected {
            let change = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            see(&change(found), &change(expected));
        } else if found.len() == expected.len() {
            see(found, expected);
        }
    }
    let [expected, found] = routed;
    for (e, f) in expected.iter().zip(&found) {
        see(&f.0, &e.0);
        see(&f.2, &e.2);
        see(&f.1.iter().map(|&x| x as f32).collect::<Vec<_>>(), &e.1.iter().map(|&x| x as f32).collect::<Vec<_>>());
    }
    Ok((worst, ran_fast))
}

/// `|found - expected| / |expected|`; zero for two zeros.
pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let diff: f64 = found.iter().zip(expected).map(|(a, b)| square((a - b) as f64)).sum();
    let norm: f64 = expected.iter().map(|b| square(*b as f64)).sum();
    if diff == 0.0 { 0.0 } else { (diff / norm).sqrt() }
}
