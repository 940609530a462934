//! Every family against transformers: logits, hidden states and router outputs of small random checkpoints.
//!
//! Every folder in `fixtures/reference` and `fixtures/variants` is tested (their READMEs say how they are made); a new family
//! gets one in the first, other settings of its config one in the second.
//!
//! Tolerance: both sides compute in single precision with sums of a few hundred terms in different order, which leaves about
//! 5e-7 relative; 1e-5 is twenty times that and a third of the smallest perturbation tried below.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::has_gpu;
use moe::artifact::weights::Weights;
use moe::calib::lookahead::Map;
use moe::command::logits::{Outputs, compute};
use moe::engine::{Batch, Engine, Event, Rows, cuda};
use moe::ids::SeqId;
use moe::model::family::FAMILIES;
use moe::model::plan::{Slot, Step};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TOLERANCE: f64 = 1e-5;

struct Reference {
    ids: Vec<u32>,
    num_tok: usize,
    tensors: BTreeMap<String, Vec<f32>>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn folder(name: &str) -> PathBuf {
    checkpoints().remove(name).unwrap()
}

/// Every checkpoint with a reference, by name; each supported family is among them.
fn checkpoints() -> BTreeMap<String, PathBuf> {
    let entries = ["reference", "variants"].into_iter().flat_map(|dir| std::fs::read_dir(fixtures().join(dir)).unwrap());
    let folders = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let found: BTreeMap<String, PathBuf> =
        folders.map(|path| (path.file_name().unwrap().to_str().unwrap().into(), path)).collect();
    assert!(FAMILIES.iter().all(|family| found.contains_key(family.model_type)));
    found
}

fn reference(dir: &Path) -> Reference {
    let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
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

fn all_agree(step: bool) {
    let errors = checkpoints().into_iter().map(|(name, dir)| {
        let reference = reference(&dir);
        let found = compute(&mut engine(&dir), &reference.ids, reference.num_tok, step, true, true).unwrap();
        let (tensor, e) = worst(&found, &reference);
        println!("{name}: `{tensor}` is off by {e:.2e}");
        (name, tensor, e)
    });
    let wrong: Vec<_> = errors.filter(|(.., e)| e.is_nan() || *e >= TOLERANCE).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn whole_sequences_in_one_batch_agree() {
    all_agree(false);
}

#[test]
fn token_by_token_through_the_cache_agrees() {
    all_agree(true);
}

#[test]
fn a_sequence_alone_agrees_with_itself_in_a_batch() {
    for (name, dir) in checkpoints() {
        let reference = reference(&dir);
        let ids = &reference.ids[reference.num_tok..];
        let found = compute(&mut engine(&dir), ids, reference.num_tok, false, false, false).unwrap();
        let logits = &found.tensors["logits"].1;
        let e = error(logits, &reference.tensors["logits"][logits.len()..]);
        assert!(e < TOLERANCE, "{name}: {e:.2e}");
    }
}

/// Errors of the rows of some logits, smallest first.
fn row_errors(found: &[f32], expected: &[f32], vocab: usize) -> Vec<f64> {
    let rows = found.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
    let mut errors: Vec<f64> = rows.map(|(f, e)| error(f, e)).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

/// Every family on the GPU, whole and token by token. Single precision throughout leaves what the processor leaves; keys and
/// values in bf16 about 1e-3 of the values that attention mixes. Where two experts score alike such a rounding decides between
/// them, and later tokens attend to what it decided: among the variants one token in five may be further off.
#[test]
fn the_gpu_agrees() {
    if !has_gpu() {
        return;
    }
    for (cache, tolerance) in [(cuda::Kind::F32, TOLERANCE), (cuda::Kind::Bf16, 1e-2)] {
        for (family, dir) in checkpoints() {
            for step in [false, true] {
                let weights = Arc::new(Weights::open(&dir).unwrap());
                let options = cuda::Options { cache, ..Default::default() };
                let mut engine = Engine::from(cuda::Engine::open(weights, options, &mut |_, _| (), &mut |_| ()).unwrap());
                let reference = reference(&dir);
                let found = compute(&mut engine, &reference.ids, reference.num_tok, step, true, true).unwrap();
                let (name, e) = worst(&found, &reference);
                println!("{family} {cache:?} step {step}: `{name}` is off by {e:.2e}");
                let is_variant = dir.parent().is_some_and(|p| p.ends_with("variants"));
                let rows = row_errors(&found.tensors["logits"].1, &reference.tensors["logits"], engine.spec().vocab);
                let in_rows = is_variant && cache == cuda::Kind::Bf16 && rows[rows.len() * 4 / 5] < tolerance;
                assert!(e < tolerance || in_rows, "{family} {cache:?} step {step}: `{name}` is off by {e:.2e}");
            }
        }
    }
}

/// The fast kernels: prompts in one pass, then token by token through the decode graph. Queries, keys, values and probabilities are
/// rounded to bf16, 1e-3 each, mostly independent. One token in five may be further off, as above.
#[test]
fn the_fast_path_agrees() {
    if !has_gpu() {
        return;
    }
    let mut wrong = Vec::new();
    for (family, dir) in checkpoints() {
        let reference = reference(&dir);
        let (num_tok, expected) = (reference.num_tok, &reference.tensors["logits"]);
        let num_seq = reference.ids.len() / num_tok;
        let weights = Arc::new(Weights::open(&dir).unwrap());
        let mut engine = Engine::from(cuda::Engine::open(weights, Default::default(), &mut |_, _| (), &mut |_| ()).unwrap());
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
            let errors = row_errors(&found, expected, vocab);
            let (median, most) = (errors[errors.len() / 2], errors[errors.len() * 4 / 5]);
            println!("{family} {step} at a time: logits are off by {median:.2e}, four in five by less than {most:.2e}");
            if !(median < 6e-3 && most < 1e-2) {
                wrong.push((family.clone(), step, median, most));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Exact, since only the place of the same numbers changes. Fails if gate and up are swapped or rows are counted from the
/// wrong expert.
#[test]
fn experts_in_fused_tensors_give_the_same_bits() {
    let reference = reference(&folder("qwen3_moe"));
    let run = |dir: &Path| compute(&mut engine(dir), &reference.ids, reference.num_tok, false, true, true).unwrap();
    let dir = fused_qwen3_moe();
    let (fused, apart) = (run(dir.path()), run(&folder("qwen3_moe")));
    let bits = |outputs: &Outputs| {
        let values =
            outputs.tensors.iter().map(|(name, (_, values))| (name.clone(), values.iter().map(|x| x.to_bits()).collect()));
        values.collect::<Vec<(String, Vec<u32>)>>()
    };
    assert!(bits(&fused) == bits(&apart));
}

/// The qwen3_moe fixture with the experts of a layer in `gate_up_proj` `[E, 2 F, D]` and `down_proj` `[E, D, F]`.
fn fused_qwen3_moe() -> tempfile::TempDir {
    let source = folder("qwen3_moe");
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let plain = file.iter().filter(|(name, _)| !name.contains(".experts."));
    tensors.extend(plain.map(|(name, t)| (name.to_string(), (t.shape().to_vec(), t.data().to_vec()))));
    for layer in 0.. {
        let experts = format!("model.layers.{layer}.mlp.experts");
        let of = |e: usize, projection: &str| file.tensor(&format!("{experts}.{e}.{projection}.weight")).ok();
        let num_experts = (0..).take_while(|&e| of(e, "up_proj").is_some()).count();
        if num_experts == 0 {
            break;
        }
        for (fused, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let views: Vec<_> =
                (0..num_experts).flat_map(|e| parts.iter().map(move |p| (e, p))).map(|(e, p)| of(e, p).unwrap()).collect();
            let shape = vec![num_experts, parts.len() * views[0].shape()[0], views[0].shape()[1]];
            tensors.insert(format!("{experts}.{fused}"), (shape, views.iter().flat_map(|v| v.data().to_vec()).collect()));
        }
    }
    let views = tensors.iter().map(|(name, (shape, data))| (name, TensorView::new(Dtype::BF16, shape.clone(), data).unwrap()));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
    dir
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
    let reference = reference(&folder(family));
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
    let changes: [(&str, &str, serde_json::Value); 40] = [
        ("deepseek_v2", "/routed_scaling_factor", 1.01.into()),
        ("deepseek_v2", "/rope_theta", 10100.0.into()),
        ("deepseek_v2_direct", "/rope_scaling/factor", 5.into()),
        ("deepseek_v2_direct", "/rope_scaling/mscale", 0.8.into()),
        ("deepseek_v2_direct", "/rope_scaling/mscale_all_dim", 0.8.into()),
        ("deepseek_v2_groups", "/rope_scaling/beta_slow", 1.into()),
        ("deepseek_v2_groups", "/rope_scaling/mscale", 0.8.into()),
        ("deepseek_v2_groups", "/rope_scaling/mscale_all_dim", 0.9.into()),
        ("deepseek_v2_groups", "/rope_scaling/original_max_position_embeddings", 4.into()),
        ("deepseek_v2_groups", "/topk_group", 3.into()),
        ("deepseek_v2_groups", "/topk_method", "greedy".into()),
        ("granitemoe", "/attention_multiplier", 0.0404.into()),
        ("granitemoe", "/embedding_multiplier", 6.06.into()),
        ("granitemoe", "/residual_multiplier", 0.303.into()),
        ("granitemoe", "/logits_scaling", 4.04.into()),
        ("mixtral", "/sliding_window", 8.into()),
        ("mixtral_window", "/rope_scaling/factor", 2.6.into()),
        ("mixtral_window", "/sliding_window", 7.into()),
        ("olmoe", "/clip_qkv", 0.5.into()),
        ("olmoe", "/norm_topk_prob", true.into()),
        ("olmoe_clip", "/clip_qkv", 0.505.into()),
        ("olmoe_clip", "/norm_topk_prob", false.into()),
        ("phimoe", "/router_jitter_noise", 0.2.into()),
        ("phimoe_long", "/rope_scaling/long_factor/3", 3.1.into()),
        ("phimoe_long", "/rope_scaling/long_mscale", 1.26.into()),
        ("phimoe_long", "/rope_scaling/original_max_position_embeddings", 40.into()),
        ("phimoe_short", "/rope_scaling/original_max_position_embeddings", 39.into()),
        ("phimoe_short", "/rope_scaling/short_factor/3", 1.3.into()),
        ("phimoe_short", "/rope_scaling/short_mscale", 1.11.into()),
        ("phimoe_short", "/sliding_window", 13.into()),
        ("qwen2_moe", "/norm_topk_prob", true.into()),
        ("qwen2_moe_layer_types", "/layer_types/3", "sliding_attention".into()),
        ("qwen2_moe_layer_types", "/norm_topk_prob", false.into()),
        ("qwen2_moe_windows", "/max_window_layers", 2.into()),
        ("qwen2_moe_windows", "/sliding_window", 9.into()),
        ("qwen3_moe", "/norm_topk_prob", false.into()),
        ("qwen3_moe_mixed", "/rope_parameters/high_freq_factor", 5.0.into()),
        ("qwen3_moe_mixed", "/rope_parameters/low_freq_factor", 1.5.into()),
        ("qwen3_moe_mixed", "/sliding_window", 11.into()),
        ("qwen3_moe_yarn", "/rope_scaling/factor", 5.0.into()),
    ];
    for (name, key, value) in changes {
        let set = |config: &mut serde_json::Value| *config.pointer_mut(key).unwrap() = value.clone();
        trips(name, key, &changed(name, set, None));
    }
}

/// The next router as a map of what this one sees gives that router's logits, had nothing been added between the two: whatever the norm.
/// Fails if a gain is multiplied where it divides, or if the bias of a LayerNorm is left out.
#[test]
fn the_next_router_is_a_map_of_the_same_input() {
    let mut compared = 0;
    for (name, dir) in checkpoints() {
        let weights = Arc::new(Weights::open(&dir).unwrap());
        let width = weights.spec().width;
        let mut engine = Engine::cpu(Arc::clone(&weights));
        let steps = engine.plan().steps.clone();
        let routes = steps.iter().enumerate().filter_map(|(at, step)| match step {
            Step::Route { layer, .. } => Some((at, layer.0)),
            _ => None,
        });
        let routes: Vec<(usize, u32)> = routes.collect();
        let residual: Vec<f32> = (0..3 * width).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 0.9).collect();
        let mut seen = |at: usize| {
            let norm = steps[..at].iter().rposition(|s| matches!(s, Step::Norm { dst: Slot::Normed, .. })).unwrap();
            let mut batch = Batch::default();
            batch.push(SeqId(0), 0, &[0; 3], Rows::None, 3);
            engine.begin(&batch).unwrap();
            engine.set_slot(Slot::Residual, &residual).unwrap();
            engine.run(norm..norm + 1, &batch, &mut |_| ()).unwrap();
            let input = engine.slot(Slot::Normed).unwrap().to_vec();
            let mut logits = Vec::new();
            let mut on = |Event::Routed { logits: found, .. }: Event<'_>| logits = found.to_vec();
            engine.run(at..at + 1, &batch, &mut on).unwrap();
            engine.release(SeqId(0));
            (input, logits)
        };
        for pair in routes.windows(2) {
            let [(from, l), (to, next)] = [pair[0], pair[1]];
            let map = Map::next_router(&weights, l, next).unwrap();
            let (input, _) = seen(from);
            let (_, expected) = seen(to);
            let row = |x: &[f32]| {
                let dot = |w: &[f32]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
                map.matrix.chunks_exact(width).zip(&map.shift).map(|(w, s)| dot(w) + s).collect::<Vec<_>>()
            };
            let found: Vec<f32> = input.chunks_exact(width).flat_map(row).collect();
            let error = error(&found, &expected);
            assert!(error < TOLERANCE, "{name} {l} to {next}: {error:.1e}");
            compared += 1;
        }
    }
    assert!(compared >= FAMILIES.len(), "{compared}");
}
