//! Checkpoints as they are found on disks: how files are cut, linked and named, and tensors that are unusual in themselves. What comes out
//! of each passes the checks of `common::artifact`.

#[path = "common/artifact.rs"]
mod artifact;
mod common;

use artifact::{Artifact, moe, quantized, tensors};
use common::{TestCheckpoint, random_values};
use moe::artifact::manifest::Action;
use moe::model::{family, names};
use moe::tensor::{Dtype, e4m3_to_f32, e8m0_to_f32};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

fn mixtral(extra: Value) -> Value {
    let mut config = json!({
        "model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
    });
    for (k, v) in extra.as_object().unwrap() {
        config[k] = v.clone();
    }
    config
}

/// Random tensors of everything that a config implies.
fn model(config: Value) -> TestCheckpoint {
    let (family, spec) = family::read(&config).unwrap();
    let all = names::tensors(&spec).into_iter().enumerate();
    all.fold(TestCheckpoint::new().config(config), |built, (i, (id, shape))| {
        built.random(&family.names.tensor(id), Dtype::BF16, &shape, i as u64 + 1)
    })
}

fn unknown(extra: Value) -> Value {
    let mut config = json!({"model_type": "dots1", "torch_dtype": "bfloat16", "hidden_size": 32, "num_hidden_layers": 1});
    for (k, v) in extra.as_object().unwrap() {
        config[k] = v.clone();
    }
    config
}

/// A model of an unknown family with `experts` experts of width `width` and model width `d`.
fn plain(d: usize, width: usize, experts: usize) -> TestCheckpoint {
    let mut built = TestCheckpoint::new().config(unknown(json!({"hidden_size": d, "n_routed_experts": experts})));
    built = built.random("model.layers.0.mlp.gate.weight", Dtype::BF16, &[experts, d], 1);
    for e in 0..experts {
        let name = |child: &str| format!("model.layers.0.mlp.experts.{e}.{child}.weight");
        built = built.random(&name("gate_proj"), Dtype::BF16, &[width, d], e as u64 + 2);
        built = built.random(&name("up_proj"), Dtype::BF16, &[width, d], e as u64 + 3);
        built = built.random(&name("down_proj"), Dtype::BF16, &[d, width], e as u64 + 4);
    }
    built
}

fn same_tensors(a: &Artifact, b: &Artifact) {
    assert!(a.tensors.keys().eq(b.tensors.keys()));
    for (name, tensor) in &a.tensors {
        assert!(*tensor == b.tensors[name], "`{name}` differs");
    }
}

#[test]
fn one_tensor_a_shard_is_the_same_model() {
    let built = model(mixtral(json!({})));
    let num = built.tensors().len();
    let (whole, cut) = (built.build(), built.clone().shards(num).build());
    assert_eq!(std::fs::read_dir(cut.path()).unwrap().count(), num + 2);
    let whole = quantized(whole.path(), &whole.root().join("out"), &[]);
    same_tensors(&whole, &quantized(cut.path(), &cut.root().join("out"), &[]));
    let many = quantized(cut.path(), &cut.root().join("many"), &["--shard-size", "1"]);
    same_tensors(&whole, &many);
    assert!(many.manifest.shards.len() > 8, "{}", many.manifest.shards.len());
}

/// Planning and writing take time in proportion to the tensors: 10 000 of them within ten seconds of a debug build on a busy machine (about one
/// is needed), where a search through all of them for each would take minutes.
#[test]
fn ten_thousand_tensors_in_one_file_are_quick() {
    let mut built = plain(32, 32, 3000);
    for i in 0..1000 {
        built = built.raw(&format!("mtp.buffers.{i}"), "F32", &[], vec![0; 4]);
    }
    assert!(built.tensors().len() > 10_000);
    let built = built.build();
    let out = built.root().join("out");
    let started = Instant::now();
    let (code, _, stderr) = moe(&["quantize", built.path().to_str().unwrap(), "-o", out.to_str().unwrap(), "-q"]);
    let took = started.elapsed();
    assert_eq!(code, 0, "{stderr}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(tensors(&out).len(), 9000 * 3 + 1 + 1000);
}

#[test]
fn a_tied_head_may_be_written_or_not() {
    let tied = || model(mixtral(json!({"tie_word_embeddings": true})));
    let once = tied().build();
    let embed = tied().tensors().iter().find(|t| t.name == "model.embed_tokens.weight").unwrap().clone();
    let twice = tied().raw("lm_head.weight", "BF16", &embed.shape, embed.bytes.clone()).build();
    let (a, b) = (quantized(once.path(), &once.root().join("out"), &[]), quantized(twice.path(), &twice.root().join("out"), &[]));
    same_tensors(&a, &b);
    let row = b.row("lm_head.weight");
    assert_eq!((row.action, row.reason.as_deref()), (Action::Dropped, Some("a copy of the tied embedding")));

    // One that differs from the embedding is no copy, and is kept.
    let other = tied().random("lm_head.weight", Dtype::BF16, &embed.shape, 99).build();
    let c = quantized(other.path(), &other.root().join("out"), &[]);
    assert_eq!(c.row("lm_head.weight").action, Action::Copied);

    // Of a family that the engines do not know, the same.
    let head = random_values(64 * 32, 5);
    let unknown = plain(32, 32, 2).config(unknown(json!({"tie_word_embeddings": true})));
    let unknown = unknown.bf16("model.embed_tokens.weight", &[64, 32], &head).bf16("lm_head.weight", &[64, 32], &head).build();
    let d = quantized(unknown.path(), &unknown.root().join("out"), &[]);
    assert_eq!(d.row("lm_head.weight").action, Action::Dropped);
    assert!(!d.tensors.contains_key("lm_head.weight") && d.tensors.contains_key("model.embed_tokens.weight"));
}

/// Two names for the same bytes of a file are a second meaning that no reader of the format accepts; the same values stored twice are two tensors.
#[test]
fn shared_memory_is_refused_and_copies_are_kept() {
    let built = plain(32, 32, 2);
    let same = random_values(64, 7);
    let twice = built.clone().bf16("mtp.a.weight", &[2, 32], &same).bf16("mtp.b.weight", &[2, 32], &same).build();
    let made = quantized(twice.path(), &twice.root().join("out"), &[]);
    assert!(made.tensors["mtp.a.weight"] == made.tensors["mtp.b.weight"]);

    let header = json!({
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    });
    let shared = TestCheckpoint::new()
        .config(unknown(json!({})))
        .file("model.safetensors", common::with_header(header.to_string(), &[0; 8]));
    let shared = shared.build();
    let (code, _, stderr) = moe(&["inspect", shared.path().to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(stderr.contains("tensor `b`") && stderr.contains("inside tensor `a`") && stderr.contains("hint: "), "{stderr}");
}

#[test]
fn scalars_and_empty_tensors_pass_through() {
    let built = plain(32, 32, 2)
        .raw("model.layers.0.self_attn.scale", "F32", &[], 2.5f32.to_le_bytes().to_vec())
        .raw("model.layers.0.self_attn.empty", "BF16", &[0, 32], Vec::new())
        .raw("model.layers.0.mlp.steps", "I64", &[1], vec![7, 0, 0, 0, 0, 0, 0, 0])
        .raw("model.layers.0.mlp.flag", "BOOL", &[3], vec![1, 0, 1])
        .raw("model.layers.0.mlp.nothing", "F32", &[4, 0, 2], Vec::new())
        .build();
    let made = quantized(built.path(), &built.root().join("out"), &[]);
    let source = tensors(built.path());
    for name in ["self_attn.scale", "self_attn.empty", "mlp.steps", "mlp.flag", "mlp.nothing"] {
        let name = format!("model.layers.0.{name}");
        assert!(made.tensors[&name] == source[&name], "{name}");
        assert_eq!(made.row(&name).action, Action::Copied);
    }
}

/// FP8 weights that are not quantized are written as the values they stand for, in the model's type, since the artifact's config no longer
/// tells of FP8: embeddings-like matrices, latent projections, and the next-token block. Ragged last blocks, scales of three names and three
/// types, one scale a row, one a matrix. Fails if a scale is dropped or its block is that of a neighbour.
#[test]
fn fp8_that_stays_is_decoded() {
    let (rows, cols) = (40, 80);
    let layouts: [(&str, &str, [usize; 2], Vec<usize>); 6] = [
        ("weight_scale_inv", "F32", [32, 32], vec![2, 3]),
        ("weight_scale_inv", "F8_E8M0", [32, 32], vec![2, 3]),
        ("weight_scale", "BF16", [40, 80], vec![40, 1]),
        ("weight_scale", "F32", [40, 80], vec![1]),
        ("scale", "F8_E8M0", [16, 48], vec![3, 2]),
        ("weight_scale", "F32", [40, 80], vec![]),
    ];
    for (i, (suffix, dtype, block, shape)) in layouts.into_iter().enumerate() {
        let config = unknown(json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}));
        let mut built = plain(32, 32, 2).config(config);
        let codes: Vec<u8> =
            random_values(rows * cols, 3 + i as u64).iter().map(|x| ((x + 1.0) * 60.0) as u8 | u8::from(*x > 0.5) << 7).collect();
        let n: usize = shape.iter().product();
        let (scale_bytes, scales): (Vec<u8>, Vec<f32>) = match dtype {
            "F8_E8M0" => {
                let codes: Vec<u8> = (0..n).map(|k| 120 + k as u8).collect();
                (codes.clone(), codes.iter().map(|c| e8m0_to_f32(*c)).collect())
            }
            "BF16" => {
                let scales: Vec<f32> = (0..n).map(|k| 2f32.powi(k as i32 % 5 - 3)).collect();
                (scales.iter().flat_map(|s| half::bf16::from_f32(*s).to_le_bytes()).collect(), scales)
            }
            _ => {
                let scales: Vec<f32> = (0..n).map(|k| 0.01 * (k + 1) as f32).collect();
                (scales.iter().flat_map(|s| s.to_le_bytes()).collect(), scales)
            }
        };
        let scale = |i: usize| match shape.as_slice() {
            [_, 1] => scales[i / cols],
            [_, across] => scales[i / cols / block[0] * across + i % cols / block[1]],
            _ => scales[0],
        };
        for module in ["model.layers.0.linear_attn.in_proj", "mtp.fc"] {
            built = built.raw(&format!("{module}.weight"), "F8_E4M3", &[rows, cols], codes.clone());
            built = built.raw(&format!("{module}.{suffix}"), dtype, &shape, scale_bytes.clone());
        }
        let built = built.build();
        let made = quantized(built.path(), &built.root().join("out"), &[]);
        for module in ["model.layers.0.linear_attn.in_proj", "mtp.fc"] {
            let wanted: Vec<u8> =
                (0..rows * cols).flat_map(|i| half::bf16::from_f32(e4m3_to_f32(codes[i]) * scale(i)).to_le_bytes()).collect();
            assert!(made.tensors[&format!("{module}.weight")].2 == wanted, "{suffix} {dtype} {shape:?}: {module}");
            assert!(!made.tensors.contains_key(&format!("{module}.{suffix}")));
            assert_eq!(made.row(&format!("{module}.{suffix}")).action, Action::Decoded);
        }
    }
}

/// A router in F32 beside BF16 weights keeps its type and every bit, in a family that runs as in one that does not.
#[test]
fn routers_in_f32_stay_so() {
    let router = random_values(2 * 128, 77);
    let known = model(mixtral(json!({})));
    let name = "model.layers.0.block_sparse_moe.gate.weight";
    let rest = known.tensors().iter().filter(|t| t.name != name);
    let built =
        rest.fold(TestCheckpoint::new().config(mixtral(json!({}))), |b, t| b.raw(&t.name, &t.dtype, &t.shape, t.bytes.clone()));
    let built = built.f32(name, &[2, 128], &router).build();
    let made = quantized(built.path(), &built.root().join("out"), &[]);
    assert!(made.tensors[name] == tensors(built.path())[name]);
}

/// What the ladder gives for widths that 128, 32, 8 and 4 do not divide; experts of a layer share one scheme.
#[test]
fn odd_widths_go_down_the_ladder() {
    let cases = [
        (192, "int4:g64"),
        (160, "int4:g32"),
        (96, "int4:g32"),
        (40, "int8:channel"),
        (20, "int8:channel"),
        (18, "bf16"),
        (9, "bf16"),
    ];
    for (width, wanted) in cases {
        let built = plain(128, width, 2).build();
        let made = quantized(built.path(), &built.root().join("out"), &[]);
        for child in ["gate_proj", "up_proj", "down_proj"] {
            let row = made.row(&format!("model.layers.0.mlp.experts.0.{child}.weight"));
            assert_eq!(row.format, wanted, "width {width}, {child}");
        }
    }
}

#[test]
fn pickles_alone_are_refused_with_a_hint() {
    let built = TestCheckpoint::new().config(mixtral(json!({}))).build();
    std::fs::remove_file(built.path().join("model.safetensors")).unwrap();
    std::fs::write(built.path().join("pytorch_model-00001-of-00002.bin"), "pickle").unwrap();
    let (code, _, stderr) = moe(&["quantize", built.path().to_str().unwrap(), "-o", built.root().join("out").to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(
        stderr.contains("pytorch_model-00001-of-00002.bin") && stderr.contains("hint: ") && stderr.contains("safe_serialization"),
        "{stderr}"
    );
}

/// `models--org--name/snapshots/<revision>/*` linking into `blobs/`, opened by the folder, by the snapshot, and by a link to it; with what the
/// hub leaves beside (`refs/`, a lock, a partial download).
#[cfg(unix)]
#[test]
fn hub_caches_open_by_any_of_their_names() {
    use std::os::unix::fs::symlink;
    let built = model(mixtral(json!({}))).shards(2).file("tokenizer.json", "{}").file("LICENSE", "free").build();
    let hub = built.root().join("models--org--name");
    let snapshot = hub.join("snapshots/0123abcd");
    for dir in ["blobs", "refs", "snapshots/0123abcd"] {
        std::fs::create_dir_all(hub.join(dir)).unwrap();
    }
    for (i, file) in std::fs::read_dir(built.path()).unwrap().enumerate() {
        let file = file.unwrap();
        let blob = format!("{i:064x}");
        std::fs::copy(file.path(), hub.join("blobs").join(&blob)).unwrap();
        symlink(Path::new("../../blobs").join(&blob), snapshot.join(file.file_name())).unwrap();
    }
    std::fs::write(hub.join("refs/main"), "0123abcd\n").unwrap();
    std::fs::write(hub.join("blobs/ffff.incomplete"), "half").unwrap();
    symlink("../../blobs/gone", snapshot.join("dangling.bin")).unwrap();
    symlink(&snapshot, built.root().join("link")).unwrap();
    let wanted = quantized(built.path(), &built.root().join("wanted"), &[]);
    for (i, path) in [hub.clone(), snapshot.clone(), built.root().join("link")].iter().enumerate() {
        let out = built.root().join(format!("out{i}"));
        let (code, _, stderr) =
            moe(&["quantize", path.to_str().unwrap(), "-o", out.to_str().unwrap(), "-q", "--method", "absmax"]);
        assert_eq!(code, 0, "{stderr}");
        assert!(tensors(&out) == wanted.tensors);
        for side in ["tokenizer.json", "LICENSE"] {
            let meta = std::fs::symlink_metadata(out.join(side)).unwrap();
            assert!(meta.is_file(), "{side} must be a file of its own");
        }
    }
    // Without refs/main the only snapshot is meant; of two, none.
    std::fs::remove_file(hub.join("refs/main")).unwrap();
    assert_eq!(moe(&["inspect", hub.to_str().unwrap()]).0, 0);
    std::fs::create_dir(hub.join("snapshots/second")).unwrap();
    let (code, _, stderr) = moe(&["inspect", hub.to_str().unwrap()]);
    assert!(code == 1 && stderr.contains("2 snapshots"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn inputs_need_no_write_permission() {
    use std::os::unix::fs::PermissionsExt;
    let built = model(mixtral(json!({}))).build();
    let lock = |mode: u32, dir: u32| {
        for file in std::fs::read_dir(built.path()).unwrap() {
            std::fs::set_permissions(file.unwrap().path(), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        std::fs::set_permissions(built.path(), std::fs::Permissions::from_mode(dir)).unwrap();
    };
    let before: Vec<_> =
        std::fs::read_dir(built.path()).unwrap().map(|f| f.unwrap().metadata().unwrap().modified().unwrap()).collect();
    lock(0o444, 0o555);
    let made = quantized(built.path(), &built.root().join("out"), &[]);
    let after: Vec<_> =
        std::fs::read_dir(built.path()).unwrap().map(|f| f.unwrap().metadata().unwrap().modified().unwrap()).collect();
    lock(0o644, 0o755);
    assert_eq!(before, after);
    let mode = std::fs::metadata(made.dir.join("config.json")).unwrap().permissions().mode();
    assert!(mode & 0o200 != 0, "the artifact must not inherit a read-only mode: {mode:o}");
}

#[test]
fn paths_may_hold_spaces_and_any_letters() {
    let built = model(mixtral(json!({}))).build();
    for name in ["a model (v2)", "modèle-混合专家 №1", "-dash", "q'uote\"d"] {
        let dir = built.root().join(name);
        model(mixtral(json!({}))).write(&dir);
        let made = quantized(&dir, &built.root().join(format!("{name} out")), &[]);
        assert_eq!(made.manifest.source.name, name);
    }
}
