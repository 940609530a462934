//! Checkpoints in FP8 with block scales: run and quantized as if their values had been stored plainly.
//! Other FP8 layouts (scale names, per-row and power-of-two scales) get a row in [`LAYOUTS`].

use assert_cmd::Command;
use moe::artifact::weights::Weights;
use moe::command::logits::compute;
use moe::engine::{Engine, cpu};
use moe::tensor::{e4m3_to_f32, e8m0_to_f32};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Suffix and type of the scales, and rows and columns of a block.
const LAYOUTS: [(&str, Dtype, [usize; 2]); 3] = [
    ("weight_scale_inv", Dtype::F32, [128, 128]),
    ("weight_scale_inv", Dtype::F32, [48, 80]),
    ("weight_scale", Dtype::F8_E8M0, [32, 64]),
];

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

/// The nearest E4M3 code, by trying all of them.
fn nearest(x: f32) -> u8 {
    let finite = (0..=255u8).filter(|c| e4m3_to_f32(*c).is_finite());
    finite.min_by(|a, b| (e4m3_to_f32(*a) - x).abs().total_cmp(&(e4m3_to_f32(*b) - x).abs())).unwrap()
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn write(dir: &Path, config: &serde_json::Value, tensors: &Tensors) {
    std::fs::create_dir_all(dir).unwrap();
    let views: Vec<(&String, TensorView)> =
        tensors.iter().map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap())).collect();
    std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// A family's fixture twice: projections as FP8 codes with scales, and as the values that these stand for.
fn pair(family: &str, (suffix, scale_type, block): (&str, Dtype, [usize; 2]), root: &Path) -> (PathBuf, PathBuf) {
    let bytes = std::fs::read(fixture(family).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut coded, mut plain) = (Tensors::new(), Tensors::new());
    for (name, t) in file.iter() {
        let projection = name.ends_with("_proj.weight") || name.ends_with("_mqa.weight");
        if !projection {
            let copy = (t.dtype(), t.shape().to_vec(), t.data().to_vec());
            coded.insert(name.into(), copy.clone());
            plain.insert(name.into(), copy);
            continue;
        }
        let (rows, cols) = (t.shape()[0], t.shape()[1]);
        let values: Vec<f32> = t.data().chunks_exact(2).map(|c| half::bf16::from_le_bytes([c[0], c[1]]).to_f32()).collect();
        let [down, across] = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
        let mut scales = vec![0.0f32; down * across];
        for (i, v) in values.iter().enumerate() {
            let s = &mut scales[i / cols / block[0] * across + i % cols / block[1]];
            *s = s.max(v.abs() / 448.0);
        }
        let scale_bytes: Vec<u8> = match scale_type {
            Dtype::F32 => scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
            _ => {
                let codes: Vec<u8> = scales.iter().map(|s| (s.log2().ceil() + 127.0) as u8).collect();
                scales = codes.iter().map(|c| e8m0_to_f32(*c)).collect();
                codes
            }
        };
        let scale = |i: usize| scales[i / cols / block[0] * across + i % cols / block[1]];
        let codes: Vec<u8> = values.iter().enumerate().map(|(i, v)| nearest(v / scale(i))).collect();
        let stood_for = codes.iter().enumerate().flat_map(|(i, c)| (e4m3_to_f32(*c) * scale(i)).to_le_bytes()).collect();
        plain.insert(name.into(), (Dtype::F32, vec![rows, cols], stood_for));
        coded.insert(name.into(), (Dtype::F8_E4M3, vec![rows, cols], codes));
        coded.insert(name.replace("weight", suffix), (scale_type, vec![down, across], scale_bytes));
    }
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture(family).join("config.json")).unwrap()).unwrap();
    let (a, b) = (root.join("coded"), root.join("plain"));
    write(&b, &config, &plain);
    config["quantization_config"] = serde_json::json!({"quant_method": "fp8", "weight_block_size": block});
    write(&a, &config, &coded);
    (a, b)
}

fn logits(dir: &Path) -> Vec<f32> {
    let mut engine = Engine::from(cpu::Engine::new(Arc::new(Weights::open(dir).unwrap())));
    let ids: Vec<u32> = (0..24).map(|i| i * 7 % 200).collect();
    compute(&mut engine, &ids, 24, false, false, false).unwrap().tensors["logits"].1.clone()
}

/// Decoding a code and its scale is one exact product, so both checkpoints give the same floats, and the same sums up to the tile
/// they are formed in (1e-6 of the largest logit). Fails if a ragged block takes its neighbour's scale, or rows and columns of the
/// block are swapped.
#[test]
fn fp8_runs_as_the_values_it_stands_for() {
    for family in ["deepseek_v2", "qwen3_moe"] {
        for layout in LAYOUTS {
            let root = tempfile::tempdir().unwrap();
            let (coded, plain) = pair(family, layout, root.path());
            let (a, b) = (logits(&coded), logits(&plain));
            let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let worst = a.iter().zip(&b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-6 * largest, "{family} {layout:?}: {worst} of {largest}");
        }
    }
}

/// Codes and scales of the artifact are those of the plain twin, bit for bit. Fails if values pass through the model's 16-bit type
/// on the way.
#[test]
fn fp8_quantizes_as_the_values_it_stands_for() {
    for family in ["deepseek_v2", "qwen3_moe"] {
        let root = tempfile::tempdir().unwrap();
        let (coded, plain) = pair(family, LAYOUTS[0], root.path());
        let artifact = |from: &Path, name: &str| {
            let to = root.path().join(name);
            let done =
                Command::cargo_bin("moe").unwrap().arg("quantize").args([from, Path::new("-o"), &to]).arg("--quiet").output();
            let done = done.unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            std::fs::read(to.join("model.safetensors")).unwrap()
        };
        let (a, b) = (artifact(&coded, "a"), artifact(&plain, "b"));
        let (a, b) = (SafeTensors::deserialize(&a).unwrap(), SafeTensors::deserialize(&b).unwrap());
        let mut compared = 0;
        for (name, t) in a.iter().filter(|(n, _)| n.ends_with("weight_packed") || n.ends_with("weight_scale")) {
            assert!(t.data() == b.tensor(name).unwrap().data(), "{family}: `{name}` differs");
            compared += 1;
        }
        assert!(compared > 40, "only {compared} tensors are quantized");
    }
}
