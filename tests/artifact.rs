//! The artifact: where bytes lie, what its config says to each reader, what profiles decide, and that nothing is lost.

mod common;

use assert_cmd::Command;
use moe::artifact::config::{Caveat, quantization_config};
use moe::artifact::layout::{self, Content, Tensor, Unit};
use moe::artifact::manifest::{Action, Manifest};
use moe::artifact::weights::Weights;
use moe::checkpoint::Checkpoint;
use moe::ids::{ExpertId, LayerId, Role, TensorId};
use moe::model::{family, names};
use moe::profile::precision::{Decisions, Pattern, Profile, Rule, decide};
use moe::quant::format::{Format, Group};
use moe::tensor::Dtype;
use regex::Regex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FAMILIES: [&str; 7] = ["deepseek_v2", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn moe(args: &[&str]) -> std::process::Output {
    Command::cargo_bin("moe").unwrap().args(args).output().unwrap()
}

fn quantize(model: &Path, output: &Path, extra: &[&str]) {
    let mut args = vec!["quantize", model.to_str().unwrap(), "-o", output.to_str().unwrap(), "-q", "--method", "absmax"];
    args.extend(extra);
    let out = moe(&args);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn decisions(family: &str, profile: &str, set: &[&str]) -> (Weights, Decisions) {
    let weights = Weights::open(&folder(family)).unwrap();
    let rules: Vec<Rule> = set.iter().map(|s| Rule::parse(s).unwrap()).collect();
    let profile = Profile::built_in(profile).unwrap();
    let decided = decide(weights.tensors(), weights.spec().tied, &rules, &profile);
    (weights, decided)
}

// Patterns.

#[test]
fn stars_stay_inside_a_part_and_double_stars_do_not() {
    for (pattern, id, wanted) in [
        ("layers.*.attn.o", "layers.12.attn.o", true),
        ("layers.*.attn.o", "layers.12.attn.o.bias", false),
        ("layers.*.router", "layers.1.shared.router", false),
        ("layers.*.attn.*", "layers.0.attn.kv_a", true),
        ("layers.*.experts.*.*", "layers.0.experts.31.down", true),
        ("layers.3.**", "layers.3.experts.31.down", true),
        ("layers.3.**", "layers.31.attn.q", false),
        ("**", "embed", true),
        ("*", "embed", true),
        ("embed*", "embed", false),
    ] {
        assert_eq!(Pattern::new(pattern).unwrap().matches(id), wanted, "{pattern} {id}");
    }
}

// Profiles.

#[test]
fn profiles_decide_as_their_table_says() {
    let table: [(&str, [&str; 6]); 5] = [
        ("mixed", ["int8:g128", "int8:g128", "int8:g128", "int4:g128", "source", "source"]),
        ("compact", ["int8:g128", "int4:g128", "int8:g128", "int4:g128", "int8:g128", "int8:g128"]),
        ("speq", ["source", "source", "source", "int4:g128", "source", "source"]),
        ("fast", ["int4:g128", "int4:g128", "int4:g128", "int4:g128", "source", "source"]),
        ("int8", ["int8:g128", "int8:g128", "int8:g128", "int8:g128", "source", "source"]),
    ];
    let layer = |role| TensorId::layer(LayerId(1), role);
    for (profile, wanted) in table {
        let (weights, decided) = decisions("qwen2_moe", profile, &[]);
        let ids = [
            layer(Role::V),
            layer(Role::O),
            layer(Role::SharedDown),
            TensorId::expert(LayerId(1), ExpertId(7), Role::ExpertUp),
            TensorId::global(Role::Embed),
            TensorId::global(Role::Head),
        ];
        let found = ids.map(|id| decided.format(id).to_string());
        assert_eq!(found.each_ref().map(String::as_str), wanted, "{profile}");
        for (id, shape) in weights.tensors() {
            if shape.len() < 2 || matches!(id.role, Role::Router | Role::SharedRouter) {
                assert_eq!(decided.format(*id), Format::Source, "{profile} {id}");
            }
        }
        let (_, latent) = decisions("deepseek_v2", profile, &[]);
        assert_eq!(latent.format(layer(Role::KvA)), Format::Source);
        assert_eq!(latent.format(layer(Role::KvB)), Format::Source);
        let (_, tied) = decisions("granitemoe", profile, &[]);
        assert_eq!(tied.format(TensorId::global(Role::Embed)), Format::Source);
    }
}

#[test]
fn a_group_that_does_not_divide_brings_its_whole_bundle_along() {
    let expert = |role| TensorId::expert(LayerId(0), ExpertId(0), role);
    let tensors = vec![
        (expert(Role::ExpertGate), vec![704, 2816]),
        (expert(Role::ExpertUp), vec![704, 2816]),
        (expert(Role::ExpertDown), vec![2816, 704]),
        (TensorId::layer(LayerId(0), Role::MlpGate), vec![10944, 2048]),
        (TensorId::layer(LayerId(0), Role::MlpUp), vec![10944, 2048]),
        (TensorId::layer(LayerId(0), Role::MlpDown), vec![2048, 10948]),
    ];
    let decided = decide(&tensors, false, &[], &Profile::built_in("mixed").unwrap());
    for role in [Role::ExpertGate, Role::ExpertUp, Role::ExpertDown] {
        assert_eq!(decided.format(expert(role)).to_string(), "int4:g64", "{role:?}");
        assert!(decided.get(expert(role)).reason.is_some());
    }
    assert_eq!(decided.format(TensorId::layer(LayerId(0), Role::MlpUp)).to_string(), "int8:g128");
    assert_eq!(decided.format(TensorId::layer(LayerId(0), Role::MlpDown)), Format::INT8_CHANNEL);
}

#[test]
fn an_override_may_quantize_a_router_and_says_so() {
    let (_, decided) = decisions("qwen3_moe", "mixed", &["layers.*.router=int4"]);
    assert_eq!(decided.format(TensorId::layer(LayerId(0), Role::Router)), Format::INT4_G128);
    assert!(decided.problems.is_empty() && decided.warnings[0].contains("router"));
    let (_, finer) = decisions("qwen3_moe", "mixed", &["layers.*.experts.**=int4:g32", "layers.1.**=int8"]);
    assert_eq!(
        finer.format(TensorId::expert(LayerId(1), ExpertId(0), Role::ExpertUp)).to_string(),
        "int4:g32",
        "first match wins"
    );
}

// Config, read as the engines read it.

/// compressed-tensors' rule: `re:` patterns are matched from the start of the name and need not reach its end.
fn hits(pattern: &str, module: &str) -> bool {
    match pattern.strip_prefix("re:") {
        Some(re) => Regex::new(&format!("^(?:{re})")).unwrap().is_match(module),
        None => pattern == module,
    }
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect()
}

/// Names of the groups whose targets match; `ignore` comes first in all readers.
fn groups<'a>(config: &'a Value, module: &str) -> Vec<&'a str> {
    let ignored = strings(&config["ignore"]).iter().any(|p| hits(p, module));
    let all = config["config_groups"].as_object().unwrap();
    let found: Vec<&str> =
        all.iter().filter(|(_, g)| strings(&g["targets"]).iter().any(|p| hits(p, module))).map(|(n, _)| n.as_str()).collect();
    assert!(!ignored || found.is_empty(), "`{module}` is both ignored and a target");
    found
}

fn scheme(config: &Value, group: &str) -> (u64, Option<u64>) {
    let weights = &config["config_groups"][group]["weights"];
    (weights["num_bits"].as_u64().unwrap(), weights["group_size"].as_u64())
}

fn check_config(family: &str, profile: &str, set: &[&str]) -> (Value, Vec<Caveat>) {
    let (weights, decided) = decisions(family, profile, set);
    assert!(decided.problems.is_empty(), "{:?}", decided.problems);
    let names = weights.family().names;
    let made = quantization_config(&names, weights.tensors(), |id| decided.format(id), &[]);
    let config = made.value.unwrap();
    for (id, shape) in weights.tensors().iter().filter(|(_, shape)| shape.len() == 2) {
        let module = names.module(*id);
        let found = groups(&config, &module);
        match decided.format(*id) {
            Format::Source => {
                assert!(found.is_empty(), "{family} {profile} {module}");
                let ignored = strings(&config["ignore"]).iter().any(|p| hits(p, &module));
                assert!(ignored, "{family} {profile}: {module} {shape:?} is neither target nor ignored");
            }
            Format::Int { bits, group, .. } => {
                assert_eq!(found.len(), 1, "{family} {profile} {module}: {found:?}");
                let group = match group {
                    Group::Of(n) => Some(n as u64),
                    Group::Channel => None,
                };
                assert_eq!(scheme(&config, found[0]), (bits.count() as u64, group), "{module}");
            }
        }
        if let Some(expert) = id.expert {
            // SGLang asks for these names whatever the family calls its projections.
            let base = module.rsplit_once('.').unwrap().0;
            for name in ["gate_proj", "up_proj", "down_proj"] {
                assert_eq!(groups(&config, &format!("{base}.{name}")), found, "expert {}", expert.0);
            }
        }
    }
    for (name, group) in config["config_groups"].as_object().unwrap() {
        let targets = strings(&group["targets"]);
        assert!(
            targets.iter().all(|t| !t.starts_with("re:^") && (!t.starts_with("re:") || t.ends_with('$'))),
            "{name} {targets:?}"
        );
        let keys: Vec<&String> = group["weights"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"]);
    }
    (config, made.caveats)
}

#[test]
fn every_module_is_named_once_for_every_family_and_profile() {
    for family in FAMILIES {
        for profile in Profile::names() {
            let (config, caveats) = check_config(family, profile, &[]);
            let groups: Vec<bool> = config["config_groups"]
                .as_object()
                .unwrap()
                .values()
                .map(|g| strings(&g["targets"]).iter().any(|t| t.contains("experts")))
                .collect();
            // transformers tells two groups apart: the first that says `experts`, and the first that does not.
            let wanted: &[bool] = if profile == "speq" { &[true] } else { &[true, false] };
            assert_eq!(groups, wanted, "{family} {profile}");
            assert!(!caveats.iter().any(|c| matches!(c, Caveat::Schemes { .. })));
        }
    }
}

#[test]
fn overrides_of_single_layers_become_patterns_of_single_layers() {
    for family in FAMILIES {
        check_config(family, "mixed", &["layers.1.attn.o=source"]);
        check_config(family, "mixed", &["layers.1.experts.**=source"]);
        let (config, caveats) = check_config(family, "mixed", &["layers.1.experts.**=int4:g32", "layers.0.attn.o=int4:g64"]);
        if family != "deepseek_v2" {
            assert_eq!(config["config_groups"].as_object().unwrap().len(), 4);
        }
        assert!(caveats.iter().any(|c| matches!(c, Caveat::Schemes { .. })));
    }
    check_config("granitemoe", "mixed", &["layers.*.router=int8"]);
}

#[test]
fn blocks_past_the_last_layer_are_ignored_by_prefix() {
    let (weights, decided) = decisions("qwen3_moe", "mixed", &[]);
    let side = ["model.layers.2.self_attn.q_proj.weight".to_string(), "mtp.layers.0.mlp.gate_proj.weight".to_string()];
    let made = quantization_config(&weights.family().names, weights.tensors(), |id| decided.format(id), &side);
    let config = made.value.unwrap();
    let ignored = |module: &str| strings(&config["ignore"]).iter().any(|p| hits(p, module));
    assert!(ignored("model.layers.2.self_attn.q_proj") && ignored("mtp.layers.0.mlp.gate_proj"));
    assert!(!ignored("model.layers.0.self_attn.q_proj"));
}

// Layout.

fn tensor(name: &str, dtype: Dtype, shape: &[usize]) -> Tensor {
    Tensor { name: name.into(), dtype, shape: shape.to_vec(), content: Content::Copy { source: name.into() } }
}

#[test]
fn odd_sizes_never_misalign_a_neighbour() {
    let unit = |tensors: Vec<Tensor>| Unit { tensors, shapes: Vec::new() };
    let mut quantized = unit(vec![tensor("p", Dtype::I32, &[3, 1]), tensor("s", Dtype::BF16, &[3, 1])]);
    quantized.shapes.push(tensor("shape", Dtype::I64, &[2]));
    let units = vec![
        unit(vec![tensor("bytes", Dtype::U8, &[5])]),
        quantized,
        unit(vec![tensor("f", Dtype::F32, &[3])]),
        unit(vec![tensor("h", Dtype::BF16, &[7])]),
        unit(vec![tensor("i", Dtype::I64, &[3])]),
    ];
    for shard_bytes in [1, 40, u64::MAX] {
        for shard in layout::arrange(units.clone(), shard_bytes) {
            assert!(shard.header.len().is_multiple_of(4096));
            let mut offset = 0;
            for t in &shard.tensors {
                assert!(offset % (t.dtype.bits() as u64 / 8) == 0, "`{}` at {offset}", t.name);
                offset += t.bytes();
            }
            assert_eq!(shard.bytes, shard.header.len() as u64 + offset);
        }
    }
}

#[test]
fn an_expert_is_one_run_of_bytes_in_one_shard() {
    let root = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        for shard_size in ["200KB", "5GB"] {
            let output = root.path().join(format!("{family}-{shard_size}"));
            quantize(&folder(family), &output, &["--shard-size", shard_size]);
            let checkpoint = Checkpoint::open(&output).unwrap();
            assert_eq!(output.join("model.safetensors.index.json").exists(), shard_size == "200KB");
            let mut experts: BTreeMap<String, Vec<(std::ops::Range<usize>, usize, bool)>> = BTreeMap::new();
            for name in checkpoint.names() {
                let entry = checkpoint.entry(name).unwrap();
                assert!(entry.range.start.is_multiple_of(entry.dtype.bits() / 8), "{name}");
                if let Some((before, after)) = name.split_once(".experts.")
                    && !name.ends_with("weight_shape")
                {
                    let expert = format!("{before}.{}", after.split('.').next().unwrap());
                    let scale = name.ends_with("weight_scale");
                    experts.entry(expert).or_default().push((entry.range.clone(), entry.shard, scale));
                }
            }
            assert!(!experts.is_empty());
            for (expert, mut parts) in experts {
                parts.sort_by_key(|(range, _, _)| range.start);
                assert_eq!(parts.len(), 6, "{expert}");
                assert!(parts.windows(2).all(|w| w[0].0.end == w[1].0.start && w[0].1 == w[1].1), "{expert}");
                assert_eq!(parts.iter().map(|p| p.2).collect::<Vec<_>>(), [false, false, false, true, true, true]);
            }
            for shard in checkpoint.shards() {
                let bytes = std::fs::read(&shard.path).unwrap();
                let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!((header + 8).is_multiple_of(4096));
            }
        }
    }
}

// The whole way.

#[test]
fn what_is_written_reads_back_close_to_its_source_and_every_tensor_is_accounted_for() {
    let root = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let output = root.path().join(family);
        quantize(&folder(family), &output, &["--profile", "compact"]);
        let (source, made) = (Weights::open(&folder(family)).unwrap(), Weights::open(&output).unwrap());
        assert_eq!(source.spec(), made.spec());
        for (id, _) in source.tensors() {
            let (a, b) = (source.get(*id).unwrap().to_f32().unwrap(), made.get(*id).unwrap().to_f32().unwrap());
            let square = |x: f32| f64::from(x) * f64::from(x);
            let noise: f64 = a.iter().zip(&b).map(|(a, b)| square(a - b)).sum();
            let ratio = (noise / a.iter().map(|x| square(*x)).sum::<f64>().max(1e-30)).sqrt();
            let limit = match made.format(*id).unwrap() {
                Format::Source => 0.0,
                Format::Int { bits, .. } if bits.count() == 8 => 0.02,
                Format::Int { .. } => 0.25,
            };
            assert!(ratio <= limit, "{family} {id}: {ratio}");
        }
        let manifest = Manifest::read(&output).unwrap().unwrap();
        let of_model: usize = manifest.tensors.iter().filter(|r| r.id.is_some()).map(|r| r.tensors).sum();
        assert_eq!(of_model, source.tensors().len());
        let source_bytes: u64 =
            source.checkpoint().names().map(|n| source.checkpoint().entry(n).unwrap().range.len() as u64).sum();
        assert_eq!(manifest.totals.source_bytes, source_bytes);
        let bytes: u64 = made.checkpoint().names().map(|n| made.checkpoint().entry(n).unwrap().range.len() as u64).sum();
        assert_eq!(manifest.totals.bytes, bytes);
        assert_eq!(manifest.source.files.len(), 2);
        if family == "granitemoe" {
            assert!(manifest.tensors.iter().any(|r| r.action == Action::Split));
        }
        let before: Value = serde_json::from_slice(&std::fs::read(folder(family).join("config.json")).unwrap()).unwrap();
        let mut after: Value = serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
        let names: Vec<String> = after.as_object().unwrap().keys().cloned().collect();
        after.as_object_mut().unwrap().shift_remove("quantization_config");
        assert_eq!(before, after, "{family}");
        let kept: Vec<&String> = names.iter().filter(|n| *n != "quantization_config").collect();
        assert_eq!(kept, before.as_object().unwrap().keys().collect::<Vec<_>>());
        assert!(output.join("generation_config.json").exists() && !output.join("reference.safetensors").exists());
    }
}

#[test]
fn unquantized_fused_experts_stay_fused() {
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("out");
    quantize(&folder("granitemoe"), &output, &["--set", "layers.*.experts.**=source"]);
    let out = moe(&["verify", output.to_str().unwrap(), "--source", folder("granitemoe").to_str().unwrap()]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}

#[test]
fn the_same_input_gives_the_same_bytes_whatever_the_threads() {
    let root = tempfile::tempdir().unwrap();
    let outputs = ["1", "2"].map(|threads| {
        let output = root.path().join(threads);
        quantize(&folder("olmoe"), &output, &["--threads", threads, "--shard-size", "300KB"]);
        output
    });
    let files = |dir: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(files(&outputs[0]), files(&outputs[1]));
    for name in files(&outputs[0]) {
        assert!(std::fs::read(outputs[0].join(&name)).unwrap() == std::fs::read(outputs[1].join(&name)).unwrap(), "{name:?}");
    }
}

#[test]
fn verify_finds_a_flipped_byte_and_a_zero_scale() {
    let root = tempfile::tempdir().unwrap();
    let source = folder("qwen3_moe");
    let output = root.path().join("out");
    quantize(&source, &output, &[]);
    let file = output.join("model.safetensors");
    let sound = std::fs::read(&file).unwrap();
    let range = |name: &str| Checkpoint::open(&output).unwrap().entry(name).unwrap().range.clone();
    let (router, scale, shape) = (
        range("model.layers.0.mlp.gate.weight"),
        range("model.layers.1.mlp.experts.3.up_proj.weight_scale"),
        range("model.layers.1.self_attn.q_proj.weight_shape"),
    );
    let check = |change: &dyn Fn(&mut Vec<u8>), words: &[&str]| {
        let mut bytes = sound.clone();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        let out = moe(&["verify", output.to_str().unwrap(), "--source", source.to_str().unwrap()]);
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{text}");
        for word in words {
            assert!(text.contains(word), "expected `{word}` in {text}");
        }
    };
    check(
        &|b| b[router.start + 4] ^= 1,
        &["sha256", "`model.layers.0.mlp.gate.weight` differs from the source from element 2 on", "hint:"],
    );
    check(&|b| b[scale.start..scale.start + 2].fill(0), &["sha256", "experts.3.up_proj.weight_scale` holds 0 at [0, 0]"]);
    check(&|b| b[scale.start..scale.start + 2].copy_from_slice(&[0x80, 0x7f]), &["holds inf at [0, 0]"]);
    check(&|b| b[shape.start] ^= 1, &["q_proj.weight_shape` is ["]);
    std::fs::write(&file, &sound).unwrap();
    assert!(moe(&["verify", output.to_str().unwrap()]).status.success());

    let manifest = output.join("moe.json");
    let text = std::fs::read_to_string(&manifest).unwrap().replacen("\"version\": 1", "\"version\": 99", 1);
    std::fs::write(&manifest, text).unwrap();
    let out = moe(&["verify", output.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("99"));
}

#[test]
fn inspect_says_first_what_it_is_and_how_big_it_would_be() {
    for name in FAMILIES {
        let out = moe(&["inspect", folder(name).to_str().unwrap(), "--tensors"]);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success() && text.starts_with(&format!("{name}: ")), "{text}");
        assert!(text.lines().next().unwrap().contains("as `mixed`"));
        let (_, spec) = family::read(Checkpoint::open(&folder(name)).unwrap().config()).unwrap();
        for (id, _) in names::tensors(&spec).iter().step_by(7) {
            assert!(text.contains(&id.to_string()), "{id}");
        }
        let json = moe(&["inspect", folder(name).to_str().unwrap(), "--json"]);
        let value: Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!(value["profiles"].as_array().unwrap().len(), 5);
    }
}

/// What `inspect` says a profile would take is what `quantize` plans, to the byte, for every family and profile. Fails if shapes,
/// scales or unquantized tensors are left out of the sum.
#[test]
fn inspect_and_quantize_agree_on_sizes() {
    let run = |args: &[&str]| -> Value {
        let out = assert_cmd::Command::cargo_bin("moe").unwrap().args(args).arg("--json").arg("--quiet").output().unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{args:?}: {}", String::from_utf8_lossy(&out.stderr)))
    };
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("out").to_string_lossy().to_string();
    for family in ["deepseek_v2", "granitemoe", "mixtral", "qwen2_moe"] {
        let model = folder(family).to_string_lossy().to_string();
        let sizes = run(&["inspect", &model]);
        for profile in sizes["profiles"].as_array().unwrap() {
            let name = profile["name"].as_str().unwrap();
            let plan = run(&["quantize", &model, "-o", &output, "--profile", name, "--dry-run"]);
            assert_eq!(profile["bytes"], plan["totals"]["bytes"], "{family} as {name}");
        }
    }
}
