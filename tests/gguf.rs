//! `moe export --gguf`, read back by a reader of this test's own: keys, names, shapes, and every value.

#[path = "common/artifact.rs"]
mod artifact;
mod common;

use artifact::moe;
use moe::artifact::weights::Weights;
use moe::ids::{ExpertId, LayerId, Role, TensorId};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Count(u32),
    Number(f32),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f32>),
    Integers(Vec<i32>),
}

struct Tensor {
    /// As the file has them, the fastest first.
    dims: Vec<usize>,
    kind: u32,
    values: Vec<f32>,
}

struct Gguf {
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

struct Cursor<'a>(&'a [u8], usize);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        self.1 += N;
        self.0[self.1 - N..self.1].try_into().unwrap()
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> usize {
        u64::from_le_bytes(self.take()) as usize
    }
    fn f32(&mut self) -> f32 {
        f32::from_le_bytes(self.take())
    }
    fn text(&mut self) -> String {
        let n = self.u64();
        self.1 += n;
        String::from_utf8(self.0[self.1 - n..self.1].to_vec()).unwrap()
    }
}

fn half(b: &[u8]) -> f32 {
    half::f16::from_le_bytes([b[0], b[1]]).to_f32()
}

/// Bytes of `n` elements, and their values.
fn decode(kind: u32, bytes: &[u8], n: usize) -> (usize, Vec<f32>) {
    match kind {
        0 => (4 * n, bytes[..4 * n].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()),
        1 => (2 * n, bytes[..2 * n].chunks(2).map(half).collect()),
        30 => (2 * n, bytes[..2 * n].chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()),
        2 => {
            let blocks = bytes[..n / 32 * 18].chunks(18);
            let value = |b: &[u8], i: usize| (f32::from(b[2 + i % 16] >> (4 * (i / 16)) & 15) - 8.0) * half(b);
            (n / 32 * 18, blocks.flat_map(|b| (0..32).map(|i| value(b, i)).collect::<Vec<_>>()).collect())
        }
        3 => {
            let blocks = bytes[..n / 32 * 20].chunks(20);
            let value = |b: &[u8], i: usize| f32::from(b[4 + i % 16] >> (4 * (i / 16)) & 15) * half(b) + half(&b[2..]);
            (n / 32 * 20, blocks.flat_map(|b| (0..32).map(|i| value(b, i)).collect::<Vec<_>>()).collect())
        }
        8 => {
            let blocks = bytes[..n / 32 * 34].chunks(34);
            (n / 32 * 34, blocks.flat_map(|b| b[2..].iter().map(|c| f32::from(*c as i8) * half(b)).collect::<Vec<_>>()).collect())
        }
        other => panic!("type {other}"),
    }
}

fn read(path: &Path) -> Gguf {
    let bytes = std::fs::read(path).unwrap();
    let mut at = Cursor(&bytes, 0);
    assert_eq!(&at.take::<4>(), b"GGUF");
    assert_eq!(at.u32(), 3);
    let (num_tensors, num_keys) = (at.u64(), at.u64());
    let mut keys = BTreeMap::new();
    for _ in 0..num_keys {
        let key = at.text();
        let value = match at.u32() {
            4 => Value::Count(at.u32()),
            6 => Value::Number(at.f32()),
            7 => Value::Flag(at.take::<1>()[0] != 0),
            8 => Value::Text(at.text()),
            9 => match (at.u32(), at.u64()) {
                (8, n) => Value::Texts((0..n).map(|_| at.text()).collect()),
                (6, n) => Value::Numbers((0..n).map(|_| at.f32()).collect()),
                (5, n) => Value::Integers((0..n).map(|_| at.u32() as i32).collect()),
                other => panic!("list of {other:?}"),
            },
            other => panic!("value of type {other}"),
        };
        assert!(keys.insert(key.clone(), value).is_none(), "`{key}` twice");
    }
    let infos: Vec<(String, Vec<usize>, u32, usize)> = (0..num_tensors)
        .map(|_| {
            let (name, rank) = (at.text(), at.u32());
            (name, (0..rank).map(|_| at.u64()).collect(), at.u32(), at.u64())
        })
        .collect();
    let data = at.1.next_multiple_of(32);
    let mut end = 0;
    let mut tensors = BTreeMap::new();
    for (name, dims, kind, offset) in infos {
        assert_eq!(offset, end, "`{name}` leaves a hole or overlaps");
        let (used, values) = decode(kind, &bytes[data + offset..], dims.iter().product());
        end = (offset + used).next_multiple_of(32);
        assert!(tensors.insert(name.clone(), Tensor { dims, kind, values }).is_none(), "`{name}` twice");
    }
    assert_eq!(data + end, bytes.len(), "the file does not end with its last tensor");
    Gguf { keys, tensors }
}

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn run(args: &[&str]) -> String {
    let (code, stdout, stderr) = moe(args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    stdout
}

const FAMILIES: [(&str, &str); 7] = [
    ("mixtral", "llama"),
    ("qwen2_moe", "qwen2moe"),
    ("qwen3_moe", "qwen3moe"),
    ("olmoe", "olmoe"),
    ("deepseek_v2", "deepseek2"),
    ("phimoe", "phimoe"),
    ("granitemoe", "granitemoe"),
];

/// Where a weight of ours lies in the file, and whether its rows are reordered for the rotary embedding.
fn name(id: TensorId) -> Option<String> {
    let l = id.layer.map_or(0, |l| l.0);
    Some(match id.role {
        Role::Embed => "token_embd.weight".into(),
        Role::Head => "output.weight".into(),
        Role::Q => format!("blk.{l}.attn_q.weight"),
        Role::K => format!("blk.{l}.attn_k.weight"),
        Role::V => format!("blk.{l}.attn_v.weight"),
        Role::O => format!("blk.{l}.attn_output.weight"),
        Role::KvB => format!("blk.{l}.attn_kv_b.weight"),
        Role::Router => format!("blk.{l}.ffn_gate_inp.weight"),
        Role::ExpertGate => format!("blk.{l}.ffn_gate_exps.weight"),
        Role::ExpertUp => format!("blk.{l}.ffn_up_exps.weight"),
        Role::ExpertDown => format!("blk.{l}.ffn_down_exps.weight"),
        Role::SharedDown => format!("blk.{l}.ffn_down_shexp.weight"),
        Role::MlpUp => format!("blk.{l}.ffn_up.weight"),
        _ => return None,
    })
}

/// The row of ours that is row `r` of llama.cpp's q or k: pairs `(2 i, 2 i + 1)` of a head were `(i, i + Dh / 2)`.
fn reordered(r: usize, head: usize) -> usize {
    let (h, i) = (r / head, r % head);
    h * head + (i % 2) * (head / 2) + i / 2
}

/// Every value in the file is the artifact's, up to the rounding of scales to half precision: eleven bits, or half the smallest subnormal
/// (2^-25) times the largest code, 128. Zero points become offsets of up to the largest value, rounded alike. Fails if a nibble, an expert, gate and up, or the order of a rotary pair is confused.
#[test]
fn values_are_those_of_the_artifact() {
    for (family, arch) in FAMILIES {
        for (group, asym) in [("32", &[][..]), ("128", &[]), ("32", &["--asym"]), ("64", &["--asym"])] {
            let root = tempfile::tempdir().unwrap();
            let (artifact, file) = (root.path().join("artifact"), root.path().join("model.gguf"));
            let (source, output) = (fixture(family), artifact.to_str().unwrap());
            let quantize =
                ["quantize", source.to_str().unwrap(), "-o", output, "-q", "--method", "absmax", "--group-size", group];
            run(&[&quantize[..], asym].concat());
            run(&["export", artifact.to_str().unwrap(), "--gguf", file.to_str().unwrap(), "-q"]);
            let gguf = read(&file);
            let weights = Weights::open(&artifact).unwrap();
            let mut compared = 0;
            for (id, shape) in weights.tensors() {
                let Some(name) = name(*id).filter(|_| shape.len() == 2) else { continue };
                let tensor = gguf.tensors.get(&name).unwrap_or_else(|| panic!("{family}: `{name}` is missing"));
                let (rows, cols) = (shape[0], shape[1]);
                assert_eq!(tensor.dims[..2], [cols, rows], "{family}: {name}");
                let first = id.expert.map_or(0, |e| e.0 as usize * rows * cols);
                let wanted = weights.get(*id).unwrap().to_f32().unwrap();
                // Values on both sides of an offset, each rounded.
                let largest = 2.0 * wanted.iter().fold(0f32, |m, x| m.max(x.abs()));
                let head = match id.role {
                    Role::Q | Role::K if matches!(arch, "llama" | "granitemoe") => match &weights.spec().layers[0].attn {
                        moe::model::spec::Attn::Gqa(a) => Some(a.head_dim),
                        _ => None,
                    },
                    _ => None,
                };
                for r in 0..rows {
                    let from = head.map_or(r, |h| reordered(r, h));
                    for c in 0..cols {
                        let (found, wanted) = (tensor.values[first + r * cols + c], wanted[from * cols + c]);
                        let size = if tensor.kind == 3 { largest } else { wanted.abs() };
                        let near = (found - wanted).abs() <= size * 2f32.powi(-11) + 128.0 * 2f32.powi(-25);
                        assert!(near, "{family} g{group}: {name} [{r}, {c}] is {found}, expected {wanted}");
                    }
                }
                let kind = match id.role {
                    _ if id.expert.is_some() => {
                        if asym.is_empty() {
                            2
                        } else {
                            3
                        }
                    }
                    Role::Router => 0,
                    Role::Embed | Role::Head | Role::KvB => 30,
                    _ => 8,
                };
                assert_eq!(tensor.kind, kind, "{family}: type of {name}");
                compared += 1;
            }
            assert!(compared > 20, "{family}: {compared}");
            let experts = TensorId::expert(LayerId(1), ExpertId(0), Role::ExpertGate);
            assert!(weights.get(experts).is_some());
            assert_eq!(gguf.keys["general.architecture"], Value::Text(arch.into()));
            let spec = weights.spec();
            assert_eq!(gguf.keys[&format!("{arch}.block_count")], Value::Count(spec.layers.len() as u32));
            assert_eq!(gguf.keys[&format!("{arch}.embedding_length")], Value::Count(spec.width as u32));
            assert_eq!(gguf.keys[&format!("{arch}.rope.freq_base")], Value::Number(spec.rope.theta as f32));
            assert_eq!(gguf.keys["tokenizer.ggml.model"], Value::Text("none".into()));
            assert_eq!(gguf.tensors.contains_key("output.weight"), !spec.tied, "{family}");
        }
    }
}

/// With scales that half precision expresses (the tiny model's do), nothing at all changes.
#[test]
fn a_trained_model_is_carried_over_to_the_bit_with_its_vocabulary() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny");
    let root = tempfile::tempdir().unwrap();
    let (artifact, file) = (root.path().join("artifact"), root.path().join("model.gguf"));
    run(&["quantize", tiny.to_str().unwrap(), "-o", artifact.to_str().unwrap(), "-q", "--group-size", "32"]);
    let report = run(&["export", artifact.to_str().unwrap(), "--gguf", file.to_str().unwrap(), "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["rounded_scales"], 0, "{report}");
    assert_eq!(report["bytes"], std::fs::metadata(&file).unwrap().len());
    let gguf = read(&file);
    let weights = Weights::open(&artifact).unwrap();
    for e in 0..2 {
        let id = TensorId::expert(LayerId(1), ExpertId(e), Role::ExpertDown);
        let (wanted, tensor) = (weights.get(id).unwrap().to_f32().unwrap(), &gguf.tensors["blk.1.ffn_down_exps.weight"]);
        assert_eq!(tensor.values[e as usize * wanted.len()..][..wanted.len()], wanted);
    }
    let Value::Texts(tokens) = &gguf.keys["tokenizer.ggml.tokens"] else { panic!() };
    let Value::Texts(merges) = &gguf.keys["tokenizer.ggml.merges"] else { panic!() };
    let Value::Integers(types) = &gguf.keys["tokenizer.ggml.token_type"] else { panic!() };
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(tiny.join("tokenizer.json")).unwrap()).unwrap();
    assert_eq!((tokens.len(), types.len()), (weights.spec().vocab, weights.spec().vocab));
    assert_eq!(merges.len(), json["model"]["merges"].as_array().unwrap().len());
    for (text, id) in json["model"]["vocab"].as_object().unwrap() {
        assert_eq!(&tokens[id.as_u64().unwrap() as usize], text);
    }
    let end = tokens.iter().position(|t| t == "<|endoftext|>").unwrap();
    assert_eq!(types[end], 3, "a special token is a control token");
    assert_eq!(gguf.keys["tokenizer.ggml.eos_token_id"], Value::Count(end as u32));
    assert!(matches!(&gguf.keys["tokenizer.chat_template"], Value::Text(t) if t.contains("im_start")));
}

/// Rounded anew from the checkpoint, a block of 32 is nearer to the original than one whose scale 128 columns share. Fails if `--source` is ignored.
#[test]
fn a_source_makes_wide_groups_better() {
    let root = tempfile::tempdir().unwrap();
    let (artifact, a, b) = (root.path().join("artifact"), root.path().join("a.gguf"), root.path().join("b.gguf"));
    let source = fixture("qwen3_moe");
    run(&["quantize", source.to_str().unwrap(), "-o", artifact.to_str().unwrap(), "-q"]);
    run(&["export", artifact.to_str().unwrap(), "--gguf", a.to_str().unwrap(), "-q"]);
    run(&["export", artifact.to_str().unwrap(), "--gguf", b.to_str().unwrap(), "-q", "--source", source.to_str().unwrap()]);
    let original = Weights::open(&source).unwrap();
    let wanted = original.get(TensorId::expert(LayerId(0), ExpertId(0), Role::ExpertGate)).unwrap().to_f32().unwrap();
    let error = |file: &Path| -> f64 {
        let found = &read(file).tensors["blk.0.ffn_gate_exps.weight"].values[..wanted.len()];
        found.iter().zip(&wanted).map(|(x, y)| f64::from(x - y).powi(2)).sum()
    };
    let (shared, own) = (error(&a), error(&b));
    assert!(own < 0.9 * shared, "{own} against {shared}");
}

#[test]
fn what_llama_cpp_cannot_run_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("x.gguf");
    let variant = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/variants/qwen3_moe_mixed");
    let (code, _, stderr) = moe(&["export", variant.to_str().unwrap(), "--gguf", out.to_str().unwrap()]);
    assert!(code == 1 && stderr.contains("some layers have no experts") && stderr.contains("hint: "), "{stderr}");
    assert!(std::fs::read_dir(root.path()).unwrap().next().is_none());
    std::fs::write(&out, "mine").unwrap();
    let (code, _, stderr) = moe(&["export", fixture("olmoe").to_str().unwrap(), "--gguf", out.to_str().unwrap()]);
    assert!(code == 1 && stderr.contains("already exists"), "{stderr}");
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
}
