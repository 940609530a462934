//! Measuring commands end to end on the tiny trained fixture: perplexity, calibrate, their gates and their errors.
//! New measurements and thresholds get a test here; the maths of a metric is tested beside it.

use assert_cmd::Command;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

/// Perplexity of `fixtures/tiny` on `fixtures/measure/text.txt` by transformers, see scripts/make_perplexity_golden.py.
const GOLDEN: f64 = 27.418344625603616;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn moe(dir: &Path, args: &[&str]) -> Output {
    Command::cargo_bin("moe").unwrap().current_dir(dir).args(args).output().unwrap()
}

fn arg(path: &Path) -> String {
    path.to_string_lossy().to_string()
}

/// One artifact of the tiny model, made once for all tests of this process, at `mixed` or with overrides.
fn artifact(dir: &Path, name: &str, set: &[&str]) -> PathBuf {
    let output = dir.join(name);
    let mut args = vec!["quantize".to_string(), arg(&fixture("tiny")), "-o".into(), arg(&output), "--quiet".into()];
    args.extend(set.iter().flat_map(|s| ["--set".to_string(), s.to_string()]));
    let made = moe(dir, &args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    output
}

fn shared() -> &'static (tempfile::TempDir, PathBuf) {
    static MADE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let made = artifact(dir.path(), "mixed", &[]);
        (dir, made)
    })
}

fn calibrate(dir: &Path, original: &Path, artifact: &Path, more: &[&str]) -> (Output, Value) {
    let text = arg(&fixture("measure/text.txt"));
    let (original, artifact) = (arg(original), arg(artifact));
    let mut args = vec!["calibrate", &original, &artifact, "--text", &text, "--max-windows", "4", "--quiet"];
    args.extend(more);
    let out = moe(dir, &args);
    let report = std::fs::read(dir.join("report.json")).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();
    (out, report)
}

fn number(report: &Value, path: &str) -> f64 {
    report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}"))
}

/// Single-precision forward passes differ by about 1e-6 relative; 0.01 % leaves two decades. Fails if the first scored token of a
/// window is off by one.
#[test]
fn perplexity_is_that_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let (model, text, golden) = (arg(&fixture("tiny")), arg(&fixture("measure/text.txt")), GOLDEN.to_string());
    let gate =
        |expect: &str| moe(dir.path(), &["perplexity", &model, "--text", &text, "--expect", expect, "--tolerance", "0.01%"]);
    assert_eq!(gate(&golden).status.code(), Some(0));
    assert_eq!(gate(&(GOLDEN * 1.0002).to_string()).status.code(), Some(3));
}

#[test]
fn a_baseline_gates_and_belongs_to_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let model = arg(&fixture("tiny"));
    let run = |text: &Path, more: &[&str]| {
        let text = arg(text);
        let args: Vec<&str> =
            ["perplexity", &model, "--text", &text, "--max-windows", "2"].into_iter().chain(more.iter().copied()).collect();
        moe(dir.path(), &args)
    };
    let text = fixture("measure/text.txt");
    assert_eq!(run(&text, &["--write-baseline", "base.json"]).status.code(), Some(0));
    assert_eq!(run(&text, &["--baseline", "base.json"]).status.code(), Some(0));
    let other = dir.path().join("other.txt");
    std::fs::write(&other, std::fs::read_to_string(&text).unwrap().to_uppercase()).unwrap();
    let out = run(&other, &["--baseline", "base.json"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("recorded on another text"));
}

/// Exactly zero, not nearly: both sides compute the same sums in the same order.
#[test]
fn a_model_does_not_diverge_from_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (out, report) = calibrate(dir.path(), &fixture("tiny"), &fixture("tiny"), &[]);
    assert_eq!(out.status.code(), Some(0));
    for path in ["/kld/max", "/routers/2/kl_max", "/hidden_error/2"] {
        assert_eq!(number(&report, path), 0.0, "{path}");
    }
    assert_eq!(number(&report, "/same_top1"), 1.0);
    assert_eq!(number(&report, "/ppl_ratio"), 1.0);
}

/// One code of one expert of the artifact changed by one step must show against the artifact itself.
#[test]
fn one_flipped_code_shows() {
    let (_, artifact) = shared();
    let dir = tempfile::tempdir().unwrap();
    let flipped = dir.path().join("flipped");
    std::fs::create_dir(&flipped).unwrap();
    for entry in std::fs::read_dir(artifact).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), flipped.join(entry.file_name())).unwrap();
    }
    std::fs::remove_file(flipped.join("moe.json")).unwrap();
    let file = flipped.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = entries["model.layers.1.self_attn.q_proj.weight_packed"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[8 + header + at] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (_, report) = calibrate(dir.path(), artifact, &flipped, &[]);
    assert!(number(&report, "/kld/mean") > 0.0);
}

/// `mixed` leaves routers alone, so the local divergence is exactly zero and the drifted one is small; a router at 4 bits diverges
/// several times as much. Fails if the local mode looks at the artifact's hidden states.
#[test]
fn a_quantized_router_is_told_from_an_untouched_one() {
    let (_, artifact_dir) = shared();
    let dir = tempfile::tempdir().unwrap();
    let (_, untouched) = calibrate(dir.path(), &fixture("tiny"), artifact_dir, &[]);
    let coarse = artifact(dir.path(), "coarse", &["layers.*.router=int4"]);
    let (_, quantized) = calibrate(dir.path(), &fixture("tiny"), &coarse, &[]);
    for layer in 0..3 {
        assert_eq!(number(&untouched, &format!("/routers/{layer}/kl_local_max")), 0.0);
        assert!(number(&quantized, &format!("/routers/{layer}/kl_local_max")) > 0.0);
    }
    let mean = |report: &Value| (0..3).map(|l| number(report, &format!("/routers/{l}/kl_mean"))).sum::<f64>();
    assert!(mean(&quantized) > 2.0 * mean(&untouched), "{} against {}", mean(&quantized), mean(&untouched));
}

/// A threshold that is crossed ends with code 3 and says what to change first.
#[test]
fn a_crossed_threshold_says_what_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let coarse = artifact(dir.path(), "coarse", &["layers.*.router=int4", "layers.*.attn.o=int4"]);
    let (out, report) = calibrate(dir.path(), &fixture("tiny"), &coarse, &["--max-kld", "0.000001"]);
    assert_eq!(out.status.code(), Some(3));
    assert_eq!(report["verdict"], "fail");
    let findings: Vec<&str> = report["findings"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let at = |word: &str| findings.iter().position(|f| f.contains(word)).unwrap_or_else(|| panic!("{word}: {findings:?}"));
    assert!(at("keep routers at source") < at("attention output at 8 bits"));
}

/// The artifact remembers its measurement; the report has the documented keys, tasks included.
#[test]
fn the_measurement_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let made = artifact(dir.path(), "made", &[]);
    let (original, made_arg) = (arg(&fixture("tiny")), arg(&made));
    let out = moe(dir.path(), &["calibrate", &original, &made_arg, "--samples", "1", "--sensitivity", "--json", "--quiet"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let shown: Value = serde_json::from_slice(&out.stdout).unwrap();
    let written: Value = serde_json::from_slice(&std::fs::read(dir.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(shown, written);
    for key in ["perplexity", "tokens", "kld", "same_top1", "ppl_ratio", "routers", "tasks", "noise_floor", "sensitivity"] {
        assert!(!shown[key].is_null(), "{key}");
    }
    assert_eq!(shown["tasks"].as_object().unwrap().len(), 8);
    let manifest: Value = serde_json::from_slice(&std::fs::read(made.join("moe.json")).unwrap()).unwrap();
    assert_eq!(manifest["measured"]["perplexity"], shown["perplexity"]);
}

/// Every way to measure on the wrong thing is one line, exit code 1, and no report.
#[test]
fn wrong_material_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        arg(&path)
    };
    let (tiny, other) = (arg(&fixture("tiny")), arg(&fixture("reference/mixtral")));
    let empty = format!("x={}", write("empty.jsonl", b""));
    let textless = format!("x={}", write("textless.jsonl", b"{\"txt\": 1}\n"));
    let latin = write("latin.txt", &[b'a', 0xe9, b'b']);
    let short = write("short.txt", b"too short");
    let rows: [(&[&str], &str); 8] = [
        (&["calibrate", &tiny, &other, "--text", &short], "is another model"),
        (&["calibrate", &tiny, &tiny, "--task", &empty], "has no sample"),
        (&["calibrate", &tiny, &tiny, "--task", &textless], "line 1: has neither"),
        (&["calibrate", &tiny, &tiny, "--task", "poetry"], "is no built-in task"),
        (&["perplexity", &tiny, "--text", &latin], "is not UTF-8: invalid byte at 1"),
        (&["perplexity", &tiny, "--text", &short], "less than one window"),
        (&["perplexity", &tiny], "no text given"),
        (&["perplexity", &tiny, "--text", &short, "--protocol", "wiki"], "is no protocol"),
    ];
    for (args, message) in rows {
        let out = moe(dir.path(), args);
        let stderr = String::from_utf8_lossy(&out.stderr).to_string();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains(message), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().filter(|l| l.starts_with("moe:")).count(), 1, "{stderr}");
        assert!(!dir.path().join("report.json").exists());
    }
}

/// A tokenizer of another model is refused before anything runs.
#[test]
fn a_tokenizer_larger_than_the_vocabulary_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for (from, name) in [
        ("reference/mixtral", "config.json"),
        ("reference/mixtral", "model.safetensors"),
        ("tiny", "tokenizer.json"),
        ("tiny", "tokenizer_config.json"),
    ] {
        std::fs::copy(fixture(from).join(name), model.join(name)).unwrap();
    }
    let out = moe(dir.path(), &["perplexity", &arg(&model), "--text", &arg(&fixture("measure/text.txt"))]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("more than the model's 256"));
}

/// The whole pipeline leaves an artifact with its list of hot experts and one report; its JSON is one object.
#[test]
fn prepare_is_one_command_and_one_report() {
    let dir = tempfile::tempdir().unwrap();
    let model = arg(&fixture("tiny"));
    let out =
        moe(dir.path(), &["prepare", &model, "-o", "made", "--samples", "4", "-n", "8", "--device", "cpu", "--json", "--quiet"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["verdict"], "pass");
    assert_eq!(report["run"]["generated_tok"], 8);
    assert!(number(&report, "/calibrate/kld/mean") > 0.0 && number(&report, "/profile/coverage/held_out") > 0.5);
    for file in ["moe.json", "hot_experts.json", "report.json", "report.html"] {
        assert!(dir.path().join("made").join(file).exists(), "{file}");
    }
}
