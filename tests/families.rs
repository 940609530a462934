//! Every family against transformers: logits, hidden states and router outputs of small random checkpoints.
//!
//! New families get a folder in `fixtures/reference` (its README says how it is made) and a line in [`FAMILIES`].
//!
//! Tolerance: both sides compute in single precision with sums of a few hundred terms in different order, which leaves about
//! 1e-6 relative; 1e-4 is a hundred times that and a hundredth of the smallest perturbation tried below.

use moe::artifact::weights::Weights;
use moe::command::logits::{Outputs, compute};
use moe::engine::{Batch, Engine, Rows, cuda};
use moe::ids::SeqId;
use moe::model::plan::Slot;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FAMILIES: [&str; 7] = ["deepseek_v2", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"];
const TOLERANCE: f64 = 1e-5;

struct Reference {
    ids: Vec<u32>,
    num_tok: usize,
    tensors: BTreeMap<String, Vec<f32>>,
}

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn reference(family: &str) -> Reference {
    let bytes = std::fs::read(folder(family).join("reference.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor("input_ids").unwrap();
    let words = |data: &[u8]| data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect::<Vec<f32>>();
    Reference {
        num_tok: ids.shape()[1],
        ids: ids.data().chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as u32).collect(),
        tensors: file.iter().filter(|(n, _)| *n != "input_ids").map(|(n, t)| (n.to_string(), words(t.data()))).collect(),
    }
}

fn engine(dir: &Path) -> Engine {
    Engine::cpu(Arc::new(Weights::open(dir).unwrap()))
}

fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let diff: f64 = found.iter().zip(expected).map(|(a, b)| square((a - b) as f64)).sum();
    (diff / expected.iter().map(|b| square(*b as f64)).sum::<f64>()).sqrt()
}

fn worst(found: &Outputs, reference: &Reference) -> (String, f64) {
    let names: Vec<_> = found.tensors.keys().collect();
    assert_eq!(names, reference.tensors.keys().collect::<Vec<_>>());
    let errors = reference.tensors.iter().map(|(name, expected)| (name.clone(), error(&found.tensors[name].1, expected)));
    errors.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}

#[test]
fn whole_sequences_in_one_batch_agree() {
    for family in FAMILIES {
        let reference = reference(family);
        let found = compute(&mut engine(&folder(family)), &reference.ids, reference.num_tok, false, true, true).unwrap();
        let (name, e) = worst(&found, &reference);
        println!("{family}: `{name}` is off by {e:.2e}");
        assert!(e < TOLERANCE, "{family}: `{name}` is off by {e:.2e}");
    }
}

#[test]
fn token_by_token_through_the_cache_agrees() {
    for family in FAMILIES {
        let reference = reference(family);
        let found = compute(&mut engine(&folder(family)), &reference.ids, reference.num_tok, true, true, true).unwrap();
        let (name, e) = worst(&found, &reference);
        println!("{family}: `{name}` is off by {e:.2e}");
        assert!(e < TOLERANCE, "{family}: `{name}` is off by {e:.2e}");
    }
}

#[test]
fn a_sequence_alone_agrees_with_itself_in_a_batch() {
    for family in FAMILIES {
        let reference = reference(family);
        let ids = &reference.ids[reference.num_tok..];
        let found = compute(&mut engine(&folder(family)), ids, reference.num_tok, false, false, false).unwrap();
        let logits = &found.tensors["logits"].1;
        let e = error(logits, &reference.tensors["logits"][logits.len()..]);
        assert!(e < TOLERANCE, "{family}: {e:.2e}");
    }
}

/// Every family on the GPU, whole and token by token. Single precision throughout leaves what the processor leaves; keys and
/// values in bf16 about 1e-3 of the values that attention mixes.
#[test]
fn the_gpu_agrees() {
    if let Err(reason) = cuda::Device::open(0) {
        assert!(std::env::var_os("MOE_REQUIRE_GPU").is_none(), "{reason}");
        println!("SKIPPED: {reason}");
        return;
    }
    for (cache, tolerance) in [(cuda::Kind::F32, TOLERANCE), (cuda::Kind::Bf16, 1e-2)] {
        for family in FAMILIES {
            for step in [false, true] {
                let weights = Arc::new(Weights::open(&folder(family)).unwrap());
                let options = cuda::Options { cache, ..Default::default() };
                let mut engine = Engine::from(cuda::Engine::open(weights, options, &mut |_, _| (), &mut |_| ()).unwrap());
                let reference = reference(family);
                let found = compute(&mut engine, &reference.ids, reference.num_tok, step, true, true).unwrap();
                let (name, e) = worst(&found, &reference);
                println!("{family} {cache:?} step {step}: `{name}` is off by {e:.2e}");
                assert!(e < tolerance, "{family} {cache:?} step {step}: `{name}` is off by {e:.2e}");
            }
        }
    }
}

/// The fast kernels: prompts in one pass, then token by token through the decode graph. Activations are rounded to bf16 about ten
/// times a layer, 1e-3 each, mostly independent. One token in ten may be further off: where two experts score alike, rounding
/// decides between them.
#[test]
fn the_fast_path_agrees() {
    if let Err(reason) = cuda::Device::open(0) {
        assert!(std::env::var_os("MOE_REQUIRE_GPU").is_none(), "{reason}");
        println!("SKIPPED: {reason}");
        return;
    }
    for family in FAMILIES {
        let reference = reference(family);
        let (num_tok, expected) = (reference.num_tok, &reference.tensors["logits"]);
        let num_seq = reference.ids.len() / num_tok;
        let weights = Arc::new(Weights::open(&folder(family)).unwrap());
        let mut engine =
            Engine::from(cuda::Engine::open(weights, Default::default(), &mut |_, _| (), &mut |_| ()).unwrap());
        let vocab = engine.spec().vocab;
        for step in [num_tok, 1] {
            let mut found = vec![0.0; expected.len()];
            for start in (0..num_tok).step_by(step) {
                let mut batch = Batch::default();
                for s in 0..num_seq {
                    let ids = &reference.ids[s * num_tok + start..][..step];
                    batch.push(SeqId(s as u32), start, ids, if step == 1 { Rows::Last } else { Rows::All }, num_tok);
                }
                engine.pass(&batch).unwrap();
                let logits = engine.slot(Slot::Logits).unwrap();
                for s in 0..num_seq {
                    let to = (s * num_tok + start) * vocab;
                    found[to..to + step * vocab].copy_from_slice(&logits[s * step * vocab..(s + 1) * step * vocab]);
                }
            }
            (0..num_seq).for_each(|s| engine.release(SeqId(s as u32)));
            let rows = found.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
            let mut errors: Vec<f64> = rows.map(|(f, e)| error(f, e)).collect();
            errors.sort_by(f64::total_cmp);
            let (median, ninth) = (errors[errors.len() / 2], errors[errors.len() * 9 / 10]);
            println!("{family} {step} at a time: logits are off by {median:.2e}, nine in ten by less than {ninth:.2e}");
            assert!(ninth < 1e-2, "{family} {step} at a time: logits are off by {median:.2e}, nine in ten by {ninth:.2e}");
        }
    }
}

/// A checkpoint with one value of its files changed, in a temporary folder.
fn changed(family: &str, config: impl Fn(&mut serde_json::Value), tensor: Option<&str>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder(family).join("config.json")).unwrap()).unwrap();
    config(&mut json);
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    let mut bytes = std::fs::read(folder(family).join("model.safetensors")).unwrap();
    if let Some(name) = tensor {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let at = |i: usize| 8 + header + entries[name]["data_offsets"][i].as_u64().unwrap() as usize;
        for value in bytes[at(0)..at(1)].chunks_exact_mut(2) {
            let x = half::bf16::from_le_bytes([value[0], value[1]]).to_f32();
            value.copy_from_slice(&half::bf16::from_f32(x * 1.01).to_le_bytes());
        }
    }
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

fn trips(family: &str, what: &str, dir: &tempfile::TempDir) {
    let reference = reference(family);
    let found = compute(&mut engine(dir.path()), &reference.ids, reference.num_tok, false, true, true).unwrap();
    let (_, e) = worst(&found, &reference);
    assert!(e > TOLERANCE, "{family}: a changed {what} goes unseen ({e:.2e})");
}

/// One tensor of each kind multiplied by 1.01 must be seen.
#[test]
fn one_percent_on_any_kind_of_tensor_is_seen() {
    let layer = "model.layers.1.";
    let common = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"];
    let gqa = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"];
    let own: [(&str, &[&str]); 7] = [
        (
            "deepseek_v2",
            &[
                "self_attn.q_proj.weight",
                "self_attn.kv_a_proj_with_mqa.weight",
                "self_attn.kv_a_layernorm.weight",
                "self_attn.kv_b_proj.weight",
                "mlp.gate.weight",
                "mlp.experts.2.up_proj.weight",
                "mlp.shared_experts.down_proj.weight",
            ],
        ),
        (
            "granitemoe",
            &[
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.router.layer.weight",
            ],
        ),
        ("mixtral", &["block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w3.weight"]),
        ("olmoe", &["self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight", "mlp.experts.1.down_proj.weight"]),
        (
            "phimoe",
            &[
                "input_layernorm.bias",
                "self_attn.q_proj.bias",
                "self_attn.o_proj.bias",
                "block_sparse_moe.gate.weight",
                "block_sparse_moe.experts.1.w1.weight",
            ],
        ),
        (
            "qwen2_moe",
            &["self_attn.k_proj.bias", "mlp.gate.weight", "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight"],
        ),
        (
            "qwen3_moe",
            &["self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight", "mlp.experts.3.gate_proj.weight"],
        ),
    ];
    for (family, tensors) in own {
        let shared = common.iter().chain(if family == "deepseek_v2" { &[][..] } else { &gqa[..] });
        for name in shared.chain(tensors) {
            let name = format!("{layer}{name}");
            trips(family, &name, &changed(family, |_| (), Some(&name)));
        }
    }
    trips("phimoe", "lm_head.bias", &changed("phimoe", |_| (), Some("lm_head.bias")));
}

/// Config values that are easy to overlook must be seen too.
#[test]
fn a_changed_config_value_is_seen() {
    let changes: [(&str, &str, serde_json::Value); 12] = [
        ("deepseek_v2", "routed_scaling_factor", 1.01.into()),
        ("deepseek_v2", "rope_theta", 10100.0.into()),
        ("granitemoe", "attention_multiplier", 0.0404.into()),
        ("granitemoe", "embedding_multiplier", 6.06.into()),
        ("granitemoe", "residual_multiplier", 0.303.into()),
        ("granitemoe", "logits_scaling", 4.04.into()),
        ("mixtral", "sliding_window", 8.into()),
        ("olmoe", "clip_qkv", 0.5.into()),
        ("olmoe", "norm_topk_prob", true.into()),
        ("phimoe", "router_jitter_noise", 0.2.into()),
        ("qwen2_moe", "norm_topk_prob", true.into()),
        ("qwen3_moe", "norm_topk_prob", false.into()),
    ];
    for (family, key, value) in changes {
        trips(family, key, &changed(family, |config| config[key] = value.clone(), None));
    }
}
