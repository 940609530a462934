//! The command line on input that is wrong: the exit code, one `moe:` line, and nothing written.

mod common;

use assert_cmd::Command;
use common::TestCheckpoint;
use moe::model::{family, names};
use moe::tensor::Dtype;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn config() -> Value {
    json!({
        "model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2,
        "num_experts_per_tok": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
    })
}

/// A sound mixtral, with `change` applied to the values of each tensor.
fn model(config: Value, dtype: Dtype, change: impl Fn(&str, &mut Vec<f32>)) -> TestCheckpoint {
    let (family, spec) = family::read(&config).unwrap();
    let mut built = TestCheckpoint::new().config(config);
    for (i, (id, shape)) in names::tensors(&spec).into_iter().enumerate() {
        let name = family.names.tensor(id);
        let mut values = common::random_values(shape.iter().product(), i as u64 + 1);
        change(&name, &mut values);
        built = built.values(&name, dtype, &shape, &values);
    }
    built
}

fn sound() -> TestCheckpoint {
    model(config(), Dtype::BF16, |_, _| ())
}

const W1: &str = "model.layers.0.block_sparse_moe.experts.1.w1.weight";

struct Ran {
    code: i32,
    stderr: String,
}

fn moe(args: &[&str]) -> Ran {
    let out = Command::cargo_bin("moe").unwrap().args(args).output().unwrap();
    Ran { code: out.status.code().unwrap_or(-1), stderr: String::from_utf8_lossy(&out.stderr).into_owned() }
}

fn lists(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

/// Quantizes `model` and expects exit code 1, the words, and no trace of the output.
fn refused(model: &Path, root: &Path, extra: &[&str], words: &[&str]) {
    let before = lists(root);
    let output = root.join("out");
    let mut args = vec!["quantize", model.to_str().unwrap(), "-o", output.to_str().unwrap(), "--quiet"];
    args.extend(extra);
    let ran = moe(&args);
    check(&ran, 1, words);
    assert_eq!(lists(root), before, "{words:?} left something");
}

fn check(ran: &Ran, code: i32, words: &[&str]) {
    assert_eq!(ran.code, code, "{words:?}: {}", ran.stderr);
    let lines = ran.stderr.lines().filter(|l| l.starts_with("moe: ")).count();
    assert_eq!(lines, 1, "{}", ran.stderr);
    for word in words {
        assert!(ran.stderr.contains(word), "expected `{word}` in: {}", ran.stderr);
    }
}

#[test]
fn the_sound_model_is_accepted() {
    let built = sound().shards(3).build();
    let output = built.root().join("out");
    let ran = moe(&["quantize", built.path().to_str().unwrap(), "-o", output.to_str().unwrap(), "--quiet"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(moe(&["verify", output.to_str().unwrap(), "--source", built.path().to_str().unwrap()]).code, 0);
    assert_eq!(moe(&["inspect", output.to_str().unwrap(), "--tensors", "--json"]).code, 0);
}

#[test]
fn damaged_directories() {
    type Damage = fn(&Path);
    let cases: &[(Damage, &[&str])] = &[
        (|d| std::fs::remove_file(d.join("config.json")).unwrap(), &["config.json"]),
        (|d| std::fs::remove_file(d.join("model-00002-of-00003.safetensors")).unwrap(), &["model-00002-of-00003.safetensors"]),
        (
            |d| {
                std::fs::copy(d.join("model-00001-of-00003.safetensors"), d.join("model-00009-of-00009.safetensors")).unwrap();
            },
            &["model-00009-of-00009.safetensors"],
        ),
        (
            |d| {
                let path = d.join("model-00001-of-00003.safetensors");
                let bytes = std::fs::read(&path).unwrap();
                std::fs::write(path, &bytes[..bytes.len() - 10]).unwrap();
            },
            &["model-00001-of-00003.safetensors"],
        ),
        (|d| std::fs::write(d.join("model-00001-of-00003.safetensors"), [0xff; 64]).unwrap(), &["header", "100000000"]),
        (
            |d| {
                let bytes = [&16u64.to_le_bytes()[..], b"this is not json"].concat();
                std::fs::write(d.join("model-00001-of-00003.safetensors"), bytes).unwrap();
            },
            &["JSON"],
        ),
        (
            |d| {
                let path = d.join("model.safetensors.index.json");
                let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                index["weight_map"]["ghost.weight"] = "model-00001-of-00003.safetensors".into();
                std::fs::write(path, index.to_string()).unwrap();
            },
            &["ghost.weight"],
        ),
    ];
    for (damage, words) in cases {
        let built = sound().shards(3).build();
        damage(built.path());
        refused(built.path(), built.root(), &[], words);
    }
}

#[test]
fn offsets_that_overlap_or_leave_the_file() {
    for (entry, word) in [(json!([0, 8]), "tensor `b`"), (json!([1000, 1008]), "tensor `b`")] {
        let header = json!({
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": entry},
        })
        .to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
        let built = TestCheckpoint::new().config(config()).file("model.safetensors", bytes).build();
        refused(built.path(), built.root(), &[], &[word, "model.safetensors"]);
    }
}

#[test]
fn configs_that_are_not_understood() {
    let mut matters = config();
    matters["logit_surprise"] = 3.5.into();
    let built = sound().config(matters).build();
    refused(built.path(), built.root(), &[], &["logit_surprise", "3.5"]);
}

/// What needs no understanding of the model takes any family; what computes with it does not, and `prepare` says so before it writes.
#[test]
fn families_that_do_not_run() {
    let mut unknown = config();
    unknown["model_type"] = "nobody_knows".into();
    let built = sound().config(unknown).build();
    let (model, output) = (built.path().to_str().unwrap(), built.root().join("out"));
    let words = ["`nobody_knows`, which this version cannot run", "hint: this version runs mixtral"];
    for args in [
        vec!["run", model, "--prompt", "x"],
        vec!["perplexity", model, "--text", "x"],
        vec!["prepare", model, "-o", output.to_str().unwrap()],
        vec!["export", model, "--gguf", output.to_str().unwrap()],
    ] {
        check(&moe(&args), 1, &words);
    }
    assert!(!output.exists());
    assert_eq!(moe(&["quantize", model, "-o", output.to_str().unwrap(), "--quiet"]).code, 0);
}

#[test]
fn a_wrong_shape_names_the_tensor() {
    let mut other = config();
    other["intermediate_size"] = 256.into();
    let built = sound().config(other).build();
    refused(built.path(), built.root(), &[], &[W1, "[128, 128]", "[256, 128]"]);
}

#[test]
fn values_that_are_no_numbers_or_too_large() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let built = model(config(), Dtype::BF16, |name, v| {
            if name == W1 {
                v[3 * 128 + 5] = value
            }
        })
        .build();
        refused(built.path(), built.root(), &[], &[W1, shown, "[3, 5]"]);
        let built = model(config(), Dtype::BF16, |name, v| {
            if name == "lm_head.weight" {
                v[2 * 128 + 1] = value
            }
        })
        .build();
        refused(built.path(), built.root(), &[], &["lm_head.weight", shown, "[2, 1]"]);
    }
    let mut half = config();
    half["torch_dtype"] = "float16".into();
    let built = model(half, Dtype::F32, |name, v| {
        if name == W1 {
            v[130] = 1e6
        }
    })
    .build();
    refused(built.path(), built.root(), &[], &[W1, "[1, 2]", "F16"]);
}

#[test]
fn requests_that_make_no_sense() {
    let built = sound().build();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--profile", "tiny"], &["tiny", "mixed"]),
        (&["--set", "layers.*.nothing=int4"], &["layers.*.nothing", "matches no tensor"]),
        (&["--set", "Layers=int4"], &["Layers"]),
        (&["--set", "layers.*.attn.o"], &["PATTERN=FORMAT"]),
        (&["--set", "layers.*.attn.o=int3"], &["int3"]),
        (&["--set", "layers.*.attn_norm=int4"], &["never quantized"]),
        (&["--set", "layers.*.attn.q=int4"], &["q, k and v", "share one format"]),
        (&["--set", "layers.*.experts.*.down=int8"], &["all experts of a layer", "layer 0"]),
        (&["--set", "layers.*.nothing=int4", "--set", "layers.*.attn.q=int4"], &["2 problems", "nothing", "q, k and v"]),
        (&["--group-size", "48"], &["48"]),
        (&["--method", "magic"], &["magic", "absmax"]),
        (&["--shard-size", "lots"], &["lots"]),
        (&["--max-memory", "1MB"], &["--max-memory", "16MiB"]),
        (&["--profile", "/nowhere/mine.toml"], &["/nowhere/mine.toml"]),
    ];
    for (extra, words) in cases {
        refused(built.path(), built.root(), extra, words);
    }
    let profile = built.root().join("mine.toml");
    std::fs::write(&profile, "about = \"x\"\nsurprise = 1\n").unwrap();
    refused(built.path(), built.root(), &["--profile", profile.to_str().unwrap()], &["mine.toml", "surprise"]);
}

#[test]
fn outputs_in_the_wrong_place() {
    let built = sound().build();
    let model = built.path().to_str().unwrap();
    let quantize = |output: &Path| moe(&["quantize", model, "-o", output.to_str().unwrap(), "--quiet"]);
    let before = lists(built.path());
    check(&quantize(&built.path().join("inside")), 1, &["inside"]);
    assert_eq!(lists(built.path()), before);
    let below_a_file = built.path().join("config.json").join("out");
    assert_ne!(quantize(&below_a_file).code, 0);
    let file = built.root().join("file");
    std::fs::write(&file, "x").unwrap();
    check(&quantize(&file.join("out")), 1, &["file"]);
    check(&quantize(&file), 1, &["already exists", "--force"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"x");

    let output = built.root().join("out");
    assert_eq!(quantize(&output).code, 0);
    check(&quantize(&output), 1, &["already exists"]);
    let again = moe(&["quantize", model, "-o", output.to_str().unwrap(), "--quiet", "--force"]);
    assert_eq!(again.code, 0, "{}", again.stderr);
    let twice = moe(&["quantize", output.to_str().unwrap(), "-o", file.with_extension("2").to_str().unwrap(), "--quiet"]);
    check(&twice, 1, &["quantized already"]);
}

#[test]
fn a_dry_run_writes_nothing() {
    let built = sound().build();
    let before = lists(built.root());
    let output = built.root().join("out");
    let ran = moe(&["quantize", built.path().to_str().unwrap(), "-o", output.to_str().unwrap(), "--dry-run", "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(lists(built.root()), before);
}

/// A limit on file sizes stands for a full disk: the write fails half way, without root and without a file system of its own.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_is_a_failure_and_leaves_nothing() {
    let built = sound().build();
    let output = built.root().join("out");
    let before = lists(built.root());
    let script = format!(
        "trap '' XFSZ; ulimit -f 64; exec '{}' quantize '{}' -o '{}' --quiet",
        assert_cmd::cargo::cargo_bin("moe").display(),
        built.path().display(),
        output.display()
    );
    let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    let ran = Ran { code: out.status.code().unwrap_or(-1), stderr: String::from_utf8_lossy(&out.stderr).into_owned() };
    check(&ran, 2, &["cannot write", "model.safetensors"]);
    assert_eq!(lists(built.root()), before);
}
