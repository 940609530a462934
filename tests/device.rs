//! What the CUDA engine does as a whole: budgets, sampling, contexts and prompts of any length.
//!
//! Needs a GPU: prints SKIPPED without one, fails without one under `MOE_REQUIRE_GPU=1`.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::has_gpu;
use moe::artifact::weights::Weights;
use moe::engine::cuda::{self, CudaError, Kernels, Options};
use moe::engine::parity::distance;
use moe::engine::{Batch, Engine, EngineError, Rows, Turn};
use moe::ids::SeqId;
use moe::model::family;
use moe::model::plan::Slot;
use moe::model::spec::ModelSpec;
use moe::quant::format::Format;
use moe::sample::{Sampler, SamplerConfig};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

fn open(budget_bytes: Option<u64>) -> cuda::Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny");
    let weights = Arc::new(Weights::open(&dir).unwrap());
    let options = Options { budget_bytes, ..Options::default() };
    cuda::Engine::open(weights, options, &mut |_, _| (), &mut |_| ()).unwrap()
}

/// One layer with two experts, both of which every token chooses, so that no choice depends on rounding; the sizes are the caller's.
fn one_layer(mut sizes: serde_json::Value) -> ModelSpec {
    let mut config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_act": "silu", "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "rope_theta": 10000.0, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 256,
        "norm_topk_prob": true,
    });
    config.as_object_mut().unwrap().append(sizes.as_object_mut().unwrap());
    family::read(&config).unwrap().1
}

/// Tokens that differ from their neighbours; `shift` tells texts apart.
fn text(num_tok: usize, vocab: usize, shift: usize) -> Vec<u32> {
    (0..num_tok).map(|i| ((i * i * 31 + i * 7 + shift) % vocab) as u32).collect()
}

fn pass(seqs: std::ops::Range<u32>, len: usize) -> Batch {
    let mut batch = Batch::default();
    seqs.for_each(|s| batch.push(SeqId(s), 0, &vec![1; len], Rows::Last, len));
    batch
}

/// The workspace of 32 prompts is many times the planned one, the budget leaves 1 % over the plan of one. Trips if growth is not held
/// against the budget, or if a refused pass leaves the engine unusable.
#[test]
fn a_pass_that_outgrows_the_budget_is_refused() {
    if !has_gpu() {
        return;
    }
    let roomy = open(None).vram().clone();
    let page = roomy.cache_bytes / roomy.pages;
    let budget = roomy.total_bytes - roomy.cache_bytes + 1024 * page;
    let mut engine = open(Some(budget + budget / 100));
    let error = engine.pass(&pass(0..32, 256)).unwrap_err();
    assert!(matches!(error, EngineError::Cuda(CudaError::Memory { .. })), "{error}");
    (0..32).for_each(|s| engine.release(SeqId(s)));
    engine.pass(&pass(0..1, 256)).unwrap();
    assert!(engine.slot(Slot::Logits).unwrap().iter().all(|x| x.is_finite()));
}

/// Tokens that the device samples in its graph are those that the host samples from the logits of the same graph, pass by pass, over
/// several page borders, for sequences of different settings. Exact: both sum integers. Trips if a sequence is given another's
/// settings, state or history.
#[test]
fn sampled_tokens_are_the_hosts() {
    const STEPS: usize = 60;
    if !has_gpu() {
        return;
    }
    let config = |i: usize| SamplerConfig {
        temperature: [0.8, 0.0, 1.3][i],
        top_k: [Some(20), None, None][i],
        top_p: [Some(0.9), None, None][i],
        min_p: [None, None, Some(0.05)][i],
        repeat_penalty: [1.0, 1.3, 1.1][i],
        seed: i as u64,
    };
    let run = |on_device: bool| {
        let mut tokens: Vec<Vec<u32>> = (0..3).map(|i| vec![5 + i; 11 + i as usize]).collect();
        let mut samplers: Vec<Sampler> = (0..3).map(|i| Sampler::new(config(i)).unwrap()).collect();
        let mut engine = Engine::from(open(None));
        let vocab = engine.spec().vocab;
        let mut prompts = Batch::default();
        for (seq, tokens) in (0..).zip(&tokens) {
            prompts.push(SeqId(seq), 0, &tokens[..tokens.len() - 1], Rows::None, 128);
        }
        engine.pass(&prompts).unwrap();
        if on_device {
            let turns = (0..).map(SeqId).zip(&mut tokens).zip(&mut samplers);
            let mut turns: Vec<Turn<'_>> = turns.map(|((seq, tokens), sampler)| Turn { seq, tokens, sampler }).collect();
            engine.decode(&mut turns, STEPS, 128, &mut |_| ControlFlow::Continue(())).unwrap();
        }
        for _ in 0..if on_device { 0 } else { STEPS } {
            let mut batch = Batch::default();
            for (seq, tokens) in (0..).zip(&tokens) {
                batch.push(SeqId(seq), tokens.len() - 1, &tokens[tokens.len() - 1..], Rows::Last, 128);
            }
            engine.pass(&batch).unwrap();
            let logits = engine.slot(Slot::Logits).unwrap();
            for ((row, sampler), tokens) in logits.chunks_exact(vocab).zip(&mut samplers).zip(&mut tokens) {
                tokens.push(sampler.sample(row, tokens).unwrap());
            }
        }
        (tokens, samplers.iter().map(Sampler::state).collect::<Vec<u64>>())
    };
    assert_eq!(run(true), run(false));
}

/// A token that comes after its context attends as it does in a prompt of all: one block a head, a few that the last merges, and many that each
/// merge a share. Both read the same keys and values and keep what bf16 leaves of queries and probabilities, so that 2^-17 of either is left out;
/// the sum of a few such is under 1e-4. A split that is left out is a thirtieth of the keys or more, and a fifth of their mean.
#[test]
fn contexts_of_any_length_are_attended_to() {
    if !has_gpu() {
        return;
    }
    let spec = one_layer(serde_json::json!({
        "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 8192,
        "vocab_size": 1009,
    }));
    let mut engine = cuda::Engine::random(&spec, &|_, _| Format::Source, 3, Options::default(), &mut |_| ()).unwrap();
    for len in [1, 15, 16, 17, 127, 129, 1023, 1024, 1025, 1151, 1153, 4095, 4097, 6007] {
        let tokens = text(len + 1, 1009, 0);
        let mut ask = |ends: &[usize]| {
            engine.release(SeqId(0));
            for part in [&[0], ends].concat().windows(2) {
                let mut batch = Batch::default();
                batch.push(SeqId(0), part[0], &tokens[part[0]..part[1]], Rows::Last, len + 1);
                engine.pass(&batch).unwrap();
            }
            let width = 16 * 128;
            let all = engine.slot(Slot::Attn).unwrap();
            all[all.len() - width..].to_vec()
        };
        let (whole, after) = (ask(&[len + 1]), ask(&[len, len + 1]));
        let most = whole.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let error = whole.iter().zip(&after).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / most;
        println!("{len} tokens before it: {error:.1e}");
        assert!(error < 1e-4, "{len}: {error}");
    }
}

/// Products of runs of tokens of every length, up to the longest that a block takes: logits of a head with tiles for every multiprocessor are those of
/// the plain kernels, which take weights of the same seed. What the head reads may differ by more: a key that the cache rounds the other way moves what
/// 64 elements attend to by 1e-3. Rows of random weights keep a relative error within a factor of four (the mean of int4 codes is a ninth of their
/// deviation and doubles what lies along it), and 16 bits of activations leave 2^-16, which is under 1e-4. Fails if tokens of a run behind the 64th are
/// copied, scaled or added elsewhere: they are then off by as much as they are.
#[test]
fn runs_of_any_length_are_products() {
    const VOCAB: usize = 26_000;
    if !has_gpu() {
        return;
    }
    let spec = one_layer(serde_json::json!({
        "hidden_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "vocab_size": VOCAB,
    }));
    let most = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
    for format in [Format::INT8_G128, Format::INT4_G128] {
        let logits = |kernels: Kernels| {
            let options = Options { kernels, ..Options::default() };
            let mut engine = cuda::Engine::random(&spec, &|_, _| format, 5, options, &mut |_| ()).unwrap();
            let mut of = |len: u32| {
                let mut batch = Batch::default();
                batch.push(SeqId(len), 0, &text(len as usize, VOCAB, 0), Rows::All, len as usize);
                engine.pass(&batch).unwrap();
                [Slot::Residual, Slot::Logits].map(|slot| engine.slot(slot).unwrap().to_vec())
            };
            [33, 48, 64, 65, 81, 96, 97, 113, 127, 128, 129, 255].map(|len| (len, of(len)))
        };
        for ((len, fast), (_, plain)) in logits(Kernels::Fast).into_iter().zip(logits(Kernels::Plain)) {
            let [input, logits] = [(0, spec.width), (1, VOCAB)].map(|(slot, width)| {
                let tokens = fast[slot].chunks_exact(width).zip(plain[slot].chunks_exact(width));
                tokens.map(|(f, p)| distance(f, p)).collect::<Vec<f64>>()
            });
            assert_eq!((input.len(), logits.len()), (len as usize, len as usize));
            println!("{format}: {len} tokens: {:.1e} of {:.1e}", most(&logits), most(&input));
            for (token, (input, logits)) in input.iter().zip(&logits).enumerate() {
                assert!(
                    *logits < 1e-4 + 4.0 * input,
                    "{format}: token {token} of {len} is {logits:.1e} off, its input {input:.1e}"
                );
            }
        }
    }
}

/// Tokens without logits end at the last attention; those with logits have what they have where all go on. Behind it few tokens pass through
/// other kernels than many: three products in a row, each of which keeps 16 bits of its input (2^-16 of its largest element, under 1e-4). Fails
/// if a neighbour's row is taken, which is off by as much as it is.
#[test]
fn tokens_without_logits_change_nothing() {
    if !has_gpu() {
        return;
    }
    let spec = one_layer(serde_json::json!({
        "hidden_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "vocab_size": 1009,
    }));
    for kernels in [Kernels::Fast, Kernels::Plain] {
        let options = Options { kernels, ..Options::default() };
        let mut engine = cuda::Engine::random(&spec, &|_, _| Format::INT4_G128, 7, options, &mut |_| ()).unwrap();
        for len in [2, 9, 70, 300] {
            let parts = [(len, Rows::Last), (3, Rows::None), (len + 1, Rows::Last), (1, Rows::None)];
            let mut logits = |all: bool| {
                let mut batch = Batch::default();
                for (seq, (len, rows)) in (0..).zip(parts) {
                    engine.release(SeqId(seq));
                    let tokens = text(len, 1009, seq as usize);
                    batch.push(SeqId(seq), 0, &tokens, if all { Rows::All } else { rows }, 512);
                }
                engine.pass(&batch).unwrap();
                engine.slot(Slot::Logits).unwrap().chunks_exact(1009).map(<[f32]>::to_vec).collect::<Vec<_>>()
            };
            let (some, all) = (logits(false), logits(true));
            assert_eq!((some.len(), all.len()), (2, 2 * len + 5));
            for (found, at) in some.iter().zip([len - 1, 2 * len + 3]) {
                let error = distance(found, &all[at]);
                println!("{kernels:?}: {len}: {error:.1e}");
                assert!(error < 3e-4, "{kernels:?}: token {at} is {error:.1e} off");
            }
        }
    }
}
