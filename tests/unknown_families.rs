//! Checkpoints of families that the engines do not run, with the names their authors gave: what is recognised, what stands aside,
//! what is refused. Every accepted one passes the checks of `common::artifact`: each source tensor accounted for, each module claimed by
//! exactly the right readers' patterns.

#[path = "common/artifact.rs"]
mod artifact;
mod common;

use artifact::{moe, quantized, tensors};
use common::{TestCheckpoint, random_values};
use moe::artifact::manifest::Action;
use moe::tensor::Dtype;
use serde_json::{Value, json};

const D: usize = 128;
const F: usize = 64;
const E: usize = 4;

/// A checkpoint by lines `name dims [F32]`; `{e}` stands for every expert, dims are numbers joined by `x`.
fn checkpoint(config: Value, lines: &str) -> TestCheckpoint {
    let mut built = TestCheckpoint::new().config(config);
    let mut seed = 0;
    for line in lines.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let mut words = line.split_whitespace();
        let (name, dims) = (words.next().unwrap(), words.next().unwrap());
        let dtype = if words.next() == Some("F32") { Dtype::F32 } else { Dtype::BF16 };
        let shape: Vec<usize> = dims.split('x').map(|d| d.parse().unwrap()).collect();
        let experts = if name.contains("{e}") { E } else { 1 };
        for e in 0..experts {
            seed += 1;
            built = built.random(&name.replace("{e}", &e.to_string()), dtype, &shape, seed);
        }
    }
    built
}

fn config(model_type: &str, extra: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "torch_dtype": "bfloat16", "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 32,
    });
    for (k, v) in extra.as_object().unwrap() {
        config[k] = v.clone();
    }
    config
}

/// What the artifact of a family must hold.
struct Family {
    config: Value,
    lines: &'static str,
    /// Number of packed modules, and one of each kind.
    packed: (usize, &'static [&'static str]),
    /// The router of layer 1, copied bit for bit.
    router: &'static str,
    /// Matrices that are copied.
    copied: &'static [&'static str],
}

fn families() -> Vec<Family> {
    vec![
        Family {
            config: config("deepseek_v3", json!({"n_routed_experts": E, "num_nextn_predict_layers": 1})),
            lines: "model.embed_tokens.weight 32x128
                model.norm.weight 128
                lm_head.weight 32x128
                model.layers.0.input_layernorm.weight 128
                model.layers.0.self_attn.q_a_proj.weight 64x128
                model.layers.0.self_attn.q_a_layernorm.weight 64
                model.layers.0.self_attn.q_b_proj.weight 96x64
                model.layers.0.self_attn.kv_a_proj_with_mqa.weight 48x128
                model.layers.0.self_attn.kv_b_proj.weight 128x32
                model.layers.0.self_attn.o_proj.weight 128x64
                model.layers.0.mlp.gate_proj.weight 256x128
                model.layers.0.mlp.up_proj.weight 256x128
                model.layers.0.mlp.down_proj.weight 128x256
                model.layers.1.self_attn.q_b_proj.weight 96x64
                model.layers.1.self_attn.o_proj.weight 128x64
                model.layers.1.mlp.gate.weight 4x128
                model.layers.1.mlp.gate.e_score_correction_bias 4 F32
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64
                model.layers.1.mlp.shared_experts.gate_proj.weight 64x128
                model.layers.1.mlp.shared_experts.up_proj.weight 64x128
                model.layers.1.mlp.shared_experts.down_proj.weight 128x64
                model.layers.2.eh_proj.weight 128x256
                model.layers.2.enorm.weight 128
                model.layers.2.embed_tokens.weight 32x128
                model.layers.2.shared_head.head.weight 32x128
                model.layers.2.self_attn.o_proj.weight 128x64
                model.layers.2.mlp.gate.weight 4x128
                model.layers.2.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.2.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.2.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (
                2 * 2 + 3 + 3 * E + 3,
                &[
                    "model.layers.0.mlp.down_proj",
                    "model.layers.1.mlp.experts.3.down_proj",
                    "model.layers.1.mlp.shared_experts.up_proj",
                ],
            ),
            router: "model.layers.1.mlp.gate.weight",
            copied: &[
                "model.layers.2.mlp.experts.1.up_proj.weight",
                "model.layers.2.eh_proj.weight",
                "model.layers.0.self_attn.kv_b_proj.weight",
                "model.layers.0.self_attn.q_a_proj.weight",
            ],
        },
        Family {
            config: config("qwen3_next", json!({"num_experts": E})),
            lines: "model.embed_tokens.weight 32x128
                lm_head.weight 32x128
                model.layers.0.linear_attn.in_proj_qkvz.weight 128x128
                model.layers.0.linear_attn.in_proj_ba.weight 8x128
                model.layers.0.linear_attn.conv1d.weight 64x1x4
                model.layers.0.linear_attn.A_log 4
                model.layers.0.linear_attn.out_proj.weight 128x64
                model.layers.0.mlp.gate.weight 4x128
                model.layers.0.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.0.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.0.mlp.experts.{e}.down_proj.weight 128x64
                model.layers.0.mlp.shared_expert.gate_proj.weight 64x128
                model.layers.0.mlp.shared_expert.up_proj.weight 64x128
                model.layers.0.mlp.shared_expert.down_proj.weight 128x64
                model.layers.0.mlp.shared_expert_gate.weight 1x128
                model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.self_attn.k_proj.weight 64x128
                model.layers.1.self_attn.v_proj.weight 64x128
                model.layers.1.self_attn.o_proj.weight 128x64
                model.layers.1.mlp.gate.weight 4x128
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64
                mtp.fc.weight 128x256
                mtp.layers.0.self_attn.q_proj.weight 128x128
                mtp.layers.0.mlp.gate.weight 4x128
                mtp.layers.0.mlp.experts.{e}.gate_proj.weight 64x128
                mtp.layers.0.mlp.experts.{e}.up_proj.weight 64x128
                mtp.layers.0.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (
                4 + 6 * E + 3,
                &[
                    "model.layers.1.self_attn.q_proj",
                    "model.layers.0.mlp.experts.0.gate_proj",
                    "model.layers.0.mlp.shared_expert.down_proj",
                ],
            ),
            router: "model.layers.1.mlp.gate.weight",
            copied: &[
                "mtp.layers.0.mlp.experts.2.down_proj.weight",
                "mtp.layers.0.self_attn.q_proj.weight",
                "model.layers.0.linear_attn.in_proj_qkvz.weight",
                "model.layers.0.mlp.shared_expert_gate.weight",
            ],
        },
        Family {
            config: config("ernie4_5_moe", json!({"moe_num_experts": E, "tie_word_embeddings": true})),
            lines: "model.embed_tokens.weight 32x128
                model.layers.0.mlp.gate_proj.weight 128x128
                model.layers.0.mlp.up_proj.weight 128x128
                model.layers.0.mlp.down_proj.weight 128x128
                model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.self_attn.k_proj.weight 64x128
                model.layers.1.self_attn.v_proj.weight 64x128
                model.layers.1.self_attn.o_proj.weight 128x128
                model.layers.1.mlp.gate.weight 4x128 F32
                model.layers.1.mlp.moe_statics.e_score_correction_bias 1x4 F32
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64
                model.mtp_block.0.self_attn.q_proj.weight 128x128
                model.mtp_linear_proj.0.weight 128x256",
            packed: (3 + 4 + 3 * E, &["model.layers.1.self_attn.v_proj", "model.layers.1.mlp.experts.1.down_proj"]),
            router: "model.layers.1.mlp.gate.weight",
            copied: &["model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_linear_proj.0.weight"],
        },
        Family {
            config: config("minimax_m2", json!({"num_local_experts": E})),
            lines: "model.layers.1.self_attn.q_norm.weight 128
                model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.self_attn.o_proj.weight 128x128
                model.layers.1.block_sparse_moe.gate.weight 4x128 F32
                model.layers.1.block_sparse_moe.e_score_correction_bias 4 F32
                model.layers.1.block_sparse_moe.experts.{e}.w1.weight 64x128
                model.layers.1.block_sparse_moe.experts.{e}.w2.weight 128x64
                model.layers.1.block_sparse_moe.experts.{e}.w3.weight 64x128",
            packed: (2 + 3 * E, &["model.layers.1.block_sparse_moe.experts.0.w2"]),
            router: "model.layers.1.block_sparse_moe.gate.weight",
            copied: &[],
        },
        Family {
            config: config("hunyuan_v1_moe", json!({"num_experts": [E, E], "moe_topk": [2, 2]})),
            lines: "model.layers.1.mlp.gate.wg.weight 4x128 F32
                model.layers.1.self_attn.query_layernorm.weight 32
                model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.mlp.shared_mlp.gate_proj.weight 64x128
                model.layers.1.mlp.shared_mlp.up_proj.weight 64x128
                model.layers.1.mlp.shared_mlp.down_proj.weight 128x64
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (1 + 3 + 3 * E, &["model.layers.1.mlp.shared_mlp.down_proj"]),
            router: "model.layers.1.mlp.gate.wg.weight",
            copied: &[],
        },
        Family {
            config: config("bailing_moe", json!({"num_experts": E})),
            lines: "model.word_embeddings.weight 32x128
                lm_head.weight 32x128
                model.layers.1.attention.query_key_value.weight 256x128
                model.layers.1.attention.dense.weight 128x128
                model.layers.1.mlp.gate.weight 4x128
                model.layers.1.mlp.shared_experts.gate_proj.weight 64x128
                model.layers.1.mlp.shared_experts.up_proj.weight 64x128
                model.layers.1.mlp.shared_experts.down_proj.weight 128x64
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (1 + 3 + 3 * E, &["model.layers.1.attention.dense"]),
            router: "model.layers.1.mlp.gate.weight",
            copied: &["model.layers.1.attention.query_key_value.weight", "model.word_embeddings.weight"],
        },
        Family {
            config: config("jamba", json!({"num_experts": E})),
            lines: "model.layers.0.mamba.in_proj.weight 256x128
                model.layers.0.mamba.x_proj.weight 24x128
                model.layers.0.mamba.A_log 128x16
                model.layers.0.mamba.D 128
                model.layers.0.feed_forward.gate_proj.weight 64x128
                model.layers.0.feed_forward.up_proj.weight 64x128
                model.layers.0.feed_forward.down_proj.weight 128x64
                model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.feed_forward.router.weight 4x128
                model.layers.1.feed_forward.experts.{e}.gate_proj.weight 64x128
                model.layers.1.feed_forward.experts.{e}.up_proj.weight 64x128
                model.layers.1.feed_forward.experts.{e}.down_proj.weight 128x64",
            packed: (3 + 1 + 3 * E, &["model.layers.0.feed_forward.down_proj"]),
            router: "model.layers.1.feed_forward.router.weight",
            copied: &["model.layers.0.mamba.in_proj.weight", "model.layers.0.mamba.x_proj.weight"],
        },
        // A shared expert as wide as there are experts is no router.
        Family {
            config: config("dots1", json!({"n_routed_experts": E})),
            lines: "model.layers.1.mlp.a_shared_experts.gate_proj.weight 4x128
                model.layers.1.mlp.shared_experts.gate_proj.weight 4x128
                model.layers.1.mlp.shared_experts.up_proj.weight 4x128
                model.layers.1.mlp.shared_experts.down_proj.weight 128x4
                model.layers.1.mlp.zz_router.weight 4x128
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (3 + 3 * E, &["model.layers.1.mlp.shared_experts.up_proj"]),
            router: "model.layers.1.mlp.zz_router.weight",
            copied: &["model.layers.1.mlp.a_shared_experts.gate_proj.weight"],
        },
        Family {
            config: config("arctic", json!({"num_local_experts": E})),
            lines: "model.layers.1.self_attn.q_proj.weight 128x128
                model.layers.1.residual_mlp.w1.weight 128x128
                model.layers.1.residual_mlp.w2.weight 128x128
                model.layers.1.residual_mlp.w3.weight 128x128
                model.layers.1.block_sparse_moe.gate.weight 4x128
                model.layers.1.block_sparse_moe.experts.{e}.w1.weight 64x128
                model.layers.1.block_sparse_moe.experts.{e}.w2.weight 128x64
                model.layers.1.block_sparse_moe.experts.{e}.w3.weight 64x128",
            packed: (1 + 3 + 3 * E, &["model.layers.1.residual_mlp.w2"]),
            router: "model.layers.1.block_sparse_moe.gate.weight",
            copied: &[],
        },
        Family {
            config: config("nemotron_h", json!({"n_routed_experts": E})),
            lines: "backbone.embeddings.weight 32x128
                backbone.layers.0.mixer.in_proj.weight 256x128
                backbone.layers.1.mixer.gate.weight 4x128
                backbone.layers.1.mixer.gate.e_score_correction_bias 4 F32
                backbone.layers.1.mixer.experts.{e}.up_proj.weight 64x128
                backbone.layers.1.mixer.experts.{e}.down_proj.weight 128x64
                backbone.layers.1.mixer.shared_experts.up_proj.weight 64x128
                backbone.layers.1.mixer.shared_experts.down_proj.weight 128x64
                lm_head.weight 32x128",
            packed: (2 * E + 2, &["backbone.layers.1.mixer.experts.2.down_proj"]),
            router: "backbone.layers.1.mixer.gate.weight",
            copied: &["backbone.layers.0.mixer.in_proj.weight", "backbone.embeddings.weight"],
        },
        Family {
            config: json!({
                "model_type": "kimi_vl", "vision_config": {"depth": 2},
                "text_config": {"hidden_size": D, "num_hidden_layers": 2, "n_routed_experts": E, "torch_dtype": "bfloat16",
                    "num_attention_heads": 4},
            }),
            lines: "language_model.model.embed_tokens.weight 32x128
                language_model.lm_head.weight 32x128
                language_model.model.layers.0.mlp.gate_proj.weight 64x128
                language_model.model.layers.0.mlp.up_proj.weight 64x128
                language_model.model.layers.0.mlp.down_proj.weight 128x64
                language_model.model.layers.1.self_attn.o_proj.weight 128x128
                language_model.model.layers.1.mlp.gate.weight 4x128
                language_model.model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                language_model.model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                language_model.model.layers.1.mlp.experts.{e}.down_proj.weight 128x64
                multi_modal_projector.linear_1.weight 128x64
                vision_tower.encoder.blocks.0.mlp.gate_proj.weight 64x128
                vision_tower.encoder.blocks.0.attn.q_proj.weight 64x64
                vision_tower.encoder.blocks.1.mlp.gate_proj.weight 64x128",
            packed: (3 + 1 + 3 * E, &["language_model.model.layers.1.mlp.experts.3.up_proj"]),
            router: "language_model.model.layers.1.mlp.gate.weight",
            copied: &["vision_tower.encoder.blocks.1.mlp.gate_proj.weight", "multi_modal_projector.linear_1.weight"],
        },
        Family {
            config: config("longcat_flash", json!({"n_routed_experts": E, "zero_expert_num": 2, "moe_topk": 2})),
            lines: "model.layers.1.self_attn.0.q_b_proj.weight 64x64
                model.layers.1.self_attn.1.q_b_proj.weight 64x64
                model.layers.1.mlps.0.gate_proj.weight 64x128
                model.layers.1.mlps.1.gate_proj.weight 64x128
                model.layers.1.mlp.router.classifier.weight 6x128 F32
                model.layers.1.mlp.router.e_score_correction_bias 6 F32
                model.layers.1.mlp.experts.{e}.gate_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.up_proj.weight 64x128
                model.layers.1.mlp.experts.{e}.down_proj.weight 128x64",
            packed: (3 * E, &["model.layers.1.mlp.experts.3.up_proj"]),
            router: "model.layers.1.mlp.router.classifier.weight",
            copied: &["model.layers.1.self_attn.1.q_b_proj.weight", "model.layers.1.mlps.0.gate_proj.weight"],
        },
        Family {
            config: config("grok", json!({"num_experts": E})),
            lines: "model.layers.1.attn.q_proj.weight 128x128
                model.layers.1.moe_block.gate.weight 4x128
                model.layers.1.moe_block.experts.{e}.linear.weight 64x128
                model.layers.1.moe_block.experts.{e}.linear_v.weight 64x128
                model.layers.1.moe_block.experts.{e}.linear_1.weight 128x64",
            packed: (1 + 3 * E, &["model.layers.1.moe_block.experts.3.linear_v"]),
            router: "model.layers.1.moe_block.gate.weight",
            copied: &[],
        },
    ]
}

/// Fails if a router, a block past the last layer, a tower or a small projection of a recurrent layer is quantized, if experts are not at four
/// bits, or if a tensor is lost.
#[test]
fn experts_are_quantized_and_the_rest_is_kept() {
    for family in families() {
        let name = family.config["model_type"].as_str().unwrap().to_string();
        let built = checkpoint(family.config, family.lines).shards(2).build();
        let made = quantized(built.path(), &built.root().join("out"), &[]);
        assert_eq!(
            made.packed(),
            family.packed.0,
            "{name}: {:?}",
            made.tensors.keys().filter(|k| k.ends_with("packed")).collect::<Vec<_>>()
        );
        for module in family.packed.1 {
            let bits = if module.contains(".experts.") { 4 } else { 8 };
            assert_eq!(made.bits(module), bits, "{name}: {module}");
        }
        let source = tensors(built.path());
        for kept in family.copied.iter().chain([&family.router]) {
            assert!(made.tensors[*kept] == source[*kept], "{name}: `{kept}` is not the source's");
        }
        let (code, _, stderr) = moe(&["run", built.path().to_str().unwrap(), "-p", "x"]);
        assert_eq!(code, 1, "{name}");
        assert!(
            stderr.starts_with(&format!("moe: config.json: `model_type` is `{name}`")) && stderr.contains("hint: "),
            "{stderr}"
        );
        let (_, shown, _) = moe(&["inspect", built.path().to_str().unwrap()]);
        assert!(shown.contains("does not run it") && shown.contains("tensor parallel: 1"), "{shown}");
    }
}

/// Each expert's matrix out of a fused tensor equals what an index formula takes out of it, after rounding to codes: both go through the
/// same absmax rounding, so they are equal to the bit. Fails if gate and up change places, or rows and columns do.
#[test]
fn fused_experts_are_split_as_their_family_lays_them_out() {
    let attention = "model.layers.0.self_attn.q_proj.weight 128x128\nmodel.layers.0.self_attn.o_proj.weight 128x128";
    // Element of gate (0) or up (1) at row r, column c of expert e; of down (2) likewise.
    type At = fn(usize, usize, usize, usize) -> usize;
    let concat: At = |m, e, r, c| if m < 2 { (e * 2 * F + m * F + r) * D + c } else { (e * D + r) * F + c };
    let transposed: At = |m, e, r, c| if m < 2 { (e * D + c) * 2 * F + m * F + r } else { (e * F + c) * D + r };
    let interleaved: At = |m, e, r, c| if m < 2 { (e * D + c) * 2 * F + 2 * r + m } else { (e * F + c) * D + r };
    let cases: [(&str, &str, &str, At); 5] = [
        (
            "granitemoehybrid",
            "block_sparse_moe.router.layer.weight 4x128\nshared_mlp.input_linear.weight 256x128\nmamba.in_proj.weight 64x128",
            "block_sparse_moe.input_linear.weight 4x128x128\nblock_sparse_moe.output_linear.weight 4x128x64",
            concat,
        ),
        ("qwen3_5_moe", "mlp.gate.weight 4x128", "mlp.experts.gate_up_proj 4x128x128\nmlp.experts.down_proj 4x128x64", concat),
        (
            "qwen3_vl_moe",
            "mlp.gate.weight 4x128",
            "mlp.experts.gate_up_proj 4x128x128\nmlp.experts.down_proj 4x64x128",
            transposed,
        ),
        (
            "llama4",
            "feed_forward.router.weight 4x128",
            "feed_forward.experts.gate_up_proj 4x128x128\nfeed_forward.experts.down_proj 4x64x128",
            transposed,
        ),
        ("gpt_oss", "mlp.router.weight 4x128", "mlp.experts.gate_up_proj 4x128x128\nmlp.experts.down_proj 4x64x128", interleaved),
    ];
    for (model_type, router, fused, at) in cases {
        let lines: String = router.lines().chain(fused.lines()).map(|l| format!("model.layers.0.{l}\n")).collect();
        let built =
            checkpoint(config(model_type, json!({"num_experts": E, "num_hidden_layers": 1})), &(lines + attention)).build();
        let made = quantized(built.path(), &built.root().join("out"), &[]);
        let block = fused.split('.').next().unwrap();
        let stored: Vec<&str> = fused.lines().map(|l| l.split(' ').next().unwrap()).collect();
        let children = if block == "block_sparse_moe" { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        let source = tensors(built.path());
        let values = |name: &str| -> Vec<f32> {
            source[name].2.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        };
        let both = [values(&format!("model.layers.0.{}", stored[0])), values(&format!("model.layers.0.{}", stored[1]))];
        // The same experts as matrices of their own, quantized by the same tool.
        let mut plain = TestCheckpoint::new().config(config("dots1", json!({"num_experts": E, "num_hidden_layers": 1})));
        plain = plain.random("model.layers.0.mlp.gate.weight", Dtype::BF16, &[E, D], 1);
        for e in 0..E {
            for (m, child) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
                let (rows, cols) = if m < 2 { (F, D) } else { (D, F) };
                let matrix: Vec<f32> = (0..rows * cols).map(|i| both[m / 2][at(m, e, i / cols, i % cols)]).collect();
                plain = plain.bf16(&format!("model.layers.0.mlp.experts.{e}.{child}.weight"), &[rows, cols], &matrix);
            }
        }
        let plain = plain.build();
        let wanted = quantized(plain.path(), &plain.root().join("out"), &[]);
        for e in 0..E {
            for (child, plain) in children.into_iter().zip(["gate_proj", "up_proj", "down_proj"]) {
                let found = made.dequantized(&format!("model.layers.0.{block}.experts.{e}.{child}"));
                assert!(
                    found == wanted.dequantized(&format!("model.layers.0.mlp.experts.{e}.{plain}")),
                    "{model_type} {e} {child}"
                );
            }
        }
        assert_eq!(made.row(&format!("model.layers.0.{}", stored[1])).action, Action::Split);
    }
}

/// E2M1 by its definition: sign, two bits of exponent with bias 1, one bit of mantissa.
fn e2m1(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 1 & 3, f32::from(code & 1));
    let magnitude = if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f32.powi(i32::from(exponent) - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The blocks of gpt-oss quantize as the values they stand for: exact, since E2M1 times a power of two is a BF16 value. Fails if a nibble
/// order, gate and up, or a scale's neighbour is confused. Biases are split beside.
#[test]
fn mxfp4_blocks_quantize_as_the_values_they_stand_for() {
    let bytes = |n: usize, seed: u64, span: f32, base: f32| -> Vec<u8> {
        random_values(n, seed).iter().map(|x| ((x + 1.0) * span / 2.0 + base) as u8).collect()
    };
    let coded = |out: usize, cols: usize, seed: u64| {
        (bytes(E * out * cols / 2, seed, 255.9, 0.0), bytes(E * out * cols / 32, seed + 1, 8.0, 118.0))
    };
    let (up, down) = (coded(2 * F, D, 10), coded(D, F, 20));
    let value = |(codes, scales): &(Vec<u8>, Vec<u8>), row: usize, c: usize, cols: usize| {
        let byte = codes[row * cols / 2 + c / 2];
        e2m1(if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
            * 2f32.powi(i32::from(scales[row * cols / 32 + c / 32]) - 127)
    };
    let quantization = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    let at = "model.layers.0.mlp";
    let built = checkpoint(
        config("gpt_oss", json!({"num_local_experts": E, "num_hidden_layers": 1, "quantization_config": quantization})),
        "model.layers.0.mlp.router.weight 4x128
         model.layers.0.mlp.router.bias 4
         model.layers.0.mlp.experts.gate_up_proj_bias 4x128
         model.layers.0.mlp.experts.down_proj_bias 4x128
         model.layers.0.self_attn.sinks 4
         model.layers.0.self_attn.q_proj.weight 128x128",
    )
    .raw(&format!("{at}.experts.gate_up_proj_blocks"), "U8", &[E, 2 * F, D / 32, 16], up.0.clone())
    .raw(&format!("{at}.experts.gate_up_proj_scales"), "U8", &[E, 2 * F, D / 32], up.1.clone())
    .raw(&format!("{at}.experts.down_proj_blocks"), "U8", &[E, D, F / 32, 16], down.0.clone())
    .raw(&format!("{at}.experts.down_proj_scales"), "U8", &[E, D, F / 32], down.1.clone())
    .build();
    let made = quantized(built.path(), &built.root().join("out"), &[]);
    let source = tensors(built.path());
    let mut plain = TestCheckpoint::new().config(config("dots1", json!({"num_experts": E, "num_hidden_layers": 1})));
    plain = plain.random(&format!("{at}.gate.weight"), Dtype::BF16, &[E, D], 1);
    for e in 0..E {
        for (m, child) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
            let (rows, cols) = if m < 2 { (F, D) } else { (D, F) };
            let matrix: Vec<f32> = (0..rows * cols)
                .map(|i| match m {
                    2 => value(&down, e * D + i / cols, i % cols, cols),
                    _ => value(&up, e * 2 * F + 2 * (i / cols) + m, i % cols, cols),
                })
                .collect();
            plain = plain.bf16(&format!("{at}.experts.{e}.{child}.weight"), &[rows, cols], &matrix);
            let bias = &made.tensors[&format!("{at}.experts.{e}.{child}.bias")];
            let fused = &source[&format!("{at}.experts.{}_bias", if m < 2 { "gate_up_proj" } else { "down_proj" })].2;
            let wanted: Vec<u8> = (0..rows)
                .map(|r| if m < 2 { e * 2 * F + 2 * r + m } else { e * D + r })
                .flat_map(|i| fused[2 * i..2 * i + 2].to_vec())
                .collect();
            assert_eq!((&bias.1, &bias.2), (&vec![rows], &wanted), "bias of {e} {child}");
        }
    }
    let plain = plain.build();
    let wanted = quantized(plain.path(), &plain.root().join("out"), &[]);
    for e in 0..E {
        for child in ["gate_proj", "up_proj", "down_proj"] {
            let module = format!("{at}.experts.{e}.{child}");
            assert!(made.dequantized(&module) == wanted.dequantized(&module), "{module}");
        }
    }
    assert_eq!(made.row(&format!("{at}.experts.down_proj_blocks")).action, Action::Split);
    assert_eq!(made.config["quantization_config"]["quant_method"], "compressed-tensors");
}

#[test]
fn what_cannot_be_told_is_refused() {
    let cases: [(&str, &str, &[&str]); 8] = [
        (
            "dbrx",
            "transformer.blocks.0.ffn.experts.mlp.w1 256x128\ntransformer.blocks.0.ffn.router.layer.weight 4x128",
            &["`transformer.blocks.0.ffn.experts.mlp.w1`", "`dbrx` does not settle", "hint: "],
        ),
        (
            "step3p5",
            "model.layers.0.moe.gate_proj.weight 4x64x128\nmodel.layers.0.moe.gate.weight 4x128",
            &["moe.gate_proj.weight", "settle"],
        ),
        ("jetmoe", "model.layers.0.mlp.input_linear.weight 4x128x128", &["input_linear", "settle"]),
        ("brand_new", "model.layers.0.mlp.experts.gate_up_proj 4x128x128", &["gate_up_proj", "`brand_new`", "settle"]),
        ("llama", "model.layers.0.mlp.gate_proj.weight 64x128", &["no tensor is named like an expert's"]),
        (
            "a",
            "model.layers.0.mlp.gate.weight 3x128\nmodel.layers.0.mlp.experts.{e}.up_proj.weight 64x128",
            &["no matrix of 4 rows"],
        ),
        (
            "b",
            "model.layers.0.mlp.gate.weight 4x128\nmodel.layers.0.mlp.experts.{e}.up_proj.weight 64x128\n\
             model.layers.0.mlp.experts.0.gate_proj.weight 64x128",
            &["expert 1 has other projections"],
        ),
        (
            "c",
            "model.layers.0.mlp.gate.weight 4x128\nmodel.layers.0.mlp.experts.{e}.up_proj.weight 64x128\n\
             model.layers.0.mlp.experts.5.up_proj.weight 64x128",
            &["expert 4 is missing"],
        ),
    ];
    for (model_type, lines, words) in cases {
        let built = checkpoint(config(model_type, json!({"num_experts": E})), lines).build();
        for command in [&["inspect"][..], &["quantize", "-o", built.root().join("out").to_str().unwrap()]] {
            let mut args = command.to_vec();
            args.insert(1, built.path().to_str().unwrap());
            let (code, _, stderr) = moe(&args);
            assert_eq!(code, 1, "{model_type}: {stderr}");
            assert!(words.iter().all(|w| stderr.contains(w)), "{model_type}: {stderr}");
        }
        assert!(!built.root().join("out").exists());
    }
}
