//! Quantizing with a calibration text: the walk, its files, its memory waves, budgets, and what the user is told.

use assert_cmd::Command;
use moe::artifact::weights::{Patch, Weights};
use moe::calib::lockstep::{self, Candidate, Place};
use moe::calib::sets;
use moe::calib::solve::{self, Advance, Choice, Progress, SolveError, Task};
use moe::calib::windows::Window;
use moe::ids::{Component, Part, Role, TensorId};
use moe::quant::format::{Format, Zero};
use moe::tensor::Dtype;
use moe::text::{AddSpecial, Tokenizer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn arg(path: &Path) -> String {
    path.to_string_lossy().to_string()
}

fn quantize(output: &Path, more: &[&str]) -> Output {
    let mut moe = Command::cargo_bin("moe").unwrap();
    moe.args(["quantize", &arg(&fixture("tiny")), "-o", &arg(output), "--method", "gptq"]).args(more).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).to_string()
}

/// Every file of a directory by name.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file());
    entries.map(|p| (p.file_name().unwrap().to_string_lossy().to_string(), std::fs::read(&p).unwrap())).collect()
}

/// Names of files that are not the same in both.
fn different(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (files(a), files(b));
    let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    names.into_iter().filter(|n| a.get(*n) != b.get(*n)).cloned().collect()
}

fn format(id: TensorId) -> Format {
    match id.role.component() {
        _ if id.part == Part::Bias => Format::Source,
        // Of either kind, so that both go through every file.
        Component::Experts if id.layer.is_some_and(|l| l.0 % 2 == 1) => Format::INT4_G128.with_zero(Zero::Point),
        Component::Experts => Format::INT4_G128,
        Component::Attention | Component::Shared | Component::Mlp | Component::Embeddings => Format::INT8_CHANNEL,
        Component::Router | Component::Norms => Format::Source,
    }
}

fn windows(vocab: usize) -> Vec<Window> {
    let token = |w: usize, t: usize| ((w * 131 + t * 7 + t * t % 97) % vocab) as u32;
    (0..6).map(|w| Window { tokens: (0..96).map(|t| token(w, t)).collect(), scored: 1..96, task: 0 }).collect()
}

/// Chooses codes into `dir` and stops once the part named is filed.
fn solve_in(weights: &Arc<Weights>, dir: &Path, max_memory: u64, feedback: bool, stop: Option<&str>) -> Result<(), SolveError> {
    std::fs::create_dir_all(dir).unwrap();
    let windows = windows(weights.spec().vocab);
    let task = Task {
        weights,
        windows: &windows,
        choices: vec![Choice { format: &format, dir: dir.to_path_buf() }],
        advance: Advance::Solved,
        feedback,
        positive_scales: false,
        scale_dtype: Dtype::BF16,
        max_memory,
        place: Place::Processor,
    };
    solve::solve(&task, &mut |p| !matches!(p, Progress::Part(name, ..) if Some(name) == stop)).map(drop)
}

/// Byte for byte: nothing depends on how often the walk was broken off, on how many experts are in memory together, or on where
/// the hidden states lie. Fails if a replayed layer runs its source instead of its codes.
#[test]
fn breaks_and_memory_do_not_change_a_byte() {
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let root = tempfile::tempdir().unwrap();
    let [whole, broken, small] = ["whole", "broken", "small"].map(|n| root.path().join(n));
    solve_in(&weights, &whole, 1 << 30, true, None).unwrap();
    for stop in ["layer-0000", "layer-0002"] {
        let error = solve_in(&weights, &broken, 1 << 30, true, Some(stop)).unwrap_err();
        assert!(matches!(error, SolveError::Interrupted) && error.hint().unwrap().contains("--resume"));
    }
    solve_in(&weights, &broken, 1 << 30, true, None).unwrap();
    solve_in(&weights, &small, 1, true, None).unwrap();
    assert!(files(&whole).len() >= 10);
    assert_eq!(different(&whole, &broken), [""; 0]);
    assert_eq!(different(&whole, &small), [""; 0]);
}

/// Every family's plan is walked, shared experts and latent attention among them, and everything that is asked for is chosen.
#[test]
fn every_family_is_quantized_whole() {
    let root = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("reference")).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let weights = Arc::new(Weights::open(&path).unwrap());
        let windows = windows(weights.spec().vocab);
        let fitting = |id: TensorId| moe::quant::format::fit(format(id), weights.get(id).map_or(0, |w| w.cols));
        let dir = root.path().join(path.file_name().unwrap());
        std::fs::create_dir_all(&dir).unwrap();
        for (advance, sub) in [(Advance::Solved, "a"), (Advance::Source, "b")] {
            let dir = dir.join(sub);
            std::fs::create_dir_all(&dir).unwrap();
            let task = Task {
                weights: &weights,
                windows: &windows,
                choices: vec![Choice { format: &fitting, dir }],
                advance,
                feedback: true,
                positive_scales: false,
                scale_dtype: Dtype::BF16,
                max_memory: 1 << 20,
                place: Place::Processor,
            };
            let found = solve::solve(&task, &mut |_| true).unwrap().remove(0);
            let wanted = weights.tensors().iter().filter(|(id, _)| fitting(*id) != Format::Source);
            for (id, _) in wanted.clone() {
                assert!(found.solved.contains(*id), "{} {id}", path.display());
            }
            assert_eq!(found.modules.len(), wanted.count());
            assert!(found.modules.iter().all(|m| m.loss.after <= m.loss.before && m.loss.after.is_finite()));
        }
    }
}

/// A run killed outright, between two layers or within one, ends in the same artifact as one that was not.
#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed) = (root.path().join("whole"), root.path().join("killed"));
    let more = ["--calib-tokens", "6000", "--quiet"];
    assert!(quantize(&whole, &more).status.success());
    let work = root.path().join(".killed.work");
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("moe"))
        .args(["quantize", &arg(&fixture("tiny")), "-o", &arg(&killed), "--method", "gptq"])
        .args(more)
        .spawn()
        .unwrap();
    let filed = || {
        let folders = std::fs::read_dir(&work).into_iter().flatten().flatten();
        folders.into_iter().any(|f| f.path().join("layer-0000.json").is_file())
    };
    while !filed() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it could be killed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.exists());
    let refused = quantize(&killed, &more);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("--resume"), "{}", stderr(&refused));
    let other = quantize(&killed, &["--calib-tokens", "5000", "--quiet", "--resume"]);
    assert!(stderr(&other).contains("begun with other input or options"), "{}", stderr(&other));
    let resumed = quantize(&killed, &["--calib-tokens", "6000", "--resume"]);
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    assert!(stderr(&resumed).contains("layer-0000: done by an earlier run"));
    assert!(!work.exists());
    // The reports name the directory.
    assert_eq!(different(&whole, &killed), ["quantize.html", "quantize.json"]);
}

/// Measured: gptq leaves about 0.7 of the divergence of plain search on `tiny`; below 0.95 the sign and the order are right. Fails
/// if codes are packed in the order in which they were chosen.
#[test]
fn feedback_lowers_divergence_and_a_narrow_text_is_told() {
    let root = tempfile::tempdir().unwrap();
    let (plain, fed) = (root.path().join("plain"), root.path().join("fed"));
    let mut moe = Command::cargo_bin("moe").unwrap();
    moe.args(["quantize", &arg(&fixture("tiny")), "-o", &arg(&plain), "--quiet"]).assert().success();
    let done = quantize(&fed, &["--calib", "prose", "--calib", "dialogue", "--calib-tokens", "8000"]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(stderr(&done).contains("the calibration text is narrow (prose, dialogue)"), "{}", stderr(&done));
    let report: Value = serde_json::from_slice(&std::fs::read(fed.join("quantize.json")).unwrap()).unwrap();
    assert_eq!(report["other_tasks"].as_object().unwrap().len(), 6);
    assert!(report["errors"].as_array().unwrap().iter().all(|e| e["after"].as_f64() <= e["before"].as_f64()));
    let page = std::fs::read_to_string(fed.join("quantize.html")).unwrap();
    assert!(page.contains("Output error") && page.contains("Tasks that the calibration text leaves out"));
    let kld = |artifact: &Path| {
        let text = arg(&fixture("measure/text.txt"));
        let mut moe = Command::cargo_bin("moe").unwrap();
        moe.current_dir(root.path()).args([
            "calibrate",
            &arg(&fixture("tiny")),
            &arg(artifact),
            "--text",
            &text,
            "--max-windows",
            "6",
            "--quiet",
        ]);
        moe.output().unwrap();
        let report: Value = serde_json::from_slice(&std::fs::read(root.path().join("report.json")).unwrap()).unwrap();
        report["kld"]["mean"].as_f64().unwrap()
    };
    let (plain, fed) = (kld(&plain), kld(&fed));
    assert!(fed < 0.95 * plain, "{fed} {plain}");
}

/// The budget holds to the byte, what was measured is printed beside what was predicted, and no candidate beats the winner.
#[test]
fn a_budget_is_kept_and_an_impossible_one_is_answered_with_the_smallest() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let more = ["--calib-tokens", "6000", "--profile", "compact"];
    let refused = quantize(&out, &[&more[..], &["--target-size", "1MB"]].concat());
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("the smallest possible is"), "{}", stderr(&refused));
    let plain = quantize(&out, &["--calib-tokens", "6000", "--target-bpw", "1", "--force"]);
    assert!(stderr(&plain).contains("--profile compact"), "{}", stderr(&plain));
    let done = quantize(&out, &[&more[..], &["--target-bpw", "4.9", "--force"]].concat());
    assert!(done.status.success(), "{}", stderr(&done));
    let manifest: Value = serde_json::from_slice(&std::fs::read(out.join("moe.json")).unwrap()).unwrap();
    assert!(manifest["totals"]["bpw"].as_f64().unwrap() <= 4.9);
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("quantize.json")).unwrap()).unwrap();
    let tried = report["allocation"]["candidates"].as_array().unwrap();
    let measured = |c: &Value| c["measured_kld"].as_f64().unwrap();
    let chosen = tried.iter().find(|c| c["chosen"] == true).unwrap();
    assert!(tried.len() >= 2 && tried.iter().all(|c| measured(chosen) <= measured(c)));
    assert!(std::fs::read_to_string(out.join("quantize.html")).unwrap().contains("Allocation"));
}

/// At the bytes of the recipe of all experts in int4 with groups of 128, that recipe is among the candidates and what is written is at
/// least as good, both with codes chosen anew. Fails if uniform recipes that fit are left out, or finalists are not compared.
#[test]
fn a_budget_is_never_spent_worse_than_uniformly() {
    let root = tempfile::tempdir().unwrap();
    let (uniform, spent) = (root.path().join("uniform"), root.path().join("spent"));
    let more = ["--calib-tokens", "6000", "--profile", "compact", "--quiet"];
    let done = quantize(&uniform, &[&more[..], &["--set", "layers.*.attn.*=int8:g128"]].concat());
    assert!(done.status.success(), "{}", stderr(&done));
    let bytes = |dir: &Path| {
        let manifest: Value = serde_json::from_slice(&std::fs::read(dir.join("moe.json")).unwrap()).unwrap();
        manifest["totals"]["bytes"].as_u64().unwrap()
    };
    let budget = bytes(&uniform).to_string();
    let done = quantize(&spent, &[&more[..], &["--target-size", &budget]].concat());
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(bytes(&spent) <= bytes(&uniform));
    let report: Value = serde_json::from_slice(&std::fs::read(spent.join("quantize.json")).unwrap()).unwrap();
    let allocation = &report["allocation"];
    let named = |c: &&Value| c["name"] == "experts int4:g128, rest int8:g128";
    let equal = allocation["candidates"].as_array().unwrap().iter().find(named).unwrap();
    assert_eq!(equal["bytes"], bytes(&uniform));
    let anew = allocation["anew"].as_array().unwrap();
    let is_allocation = |c: &Value| c["name"].as_str().unwrap().starts_with("allocation");
    assert!(anew.iter().any(|c| !is_allocation(c)));
    assert!(anew.iter().all(|c| allocation["measured_kld"].as_f64() <= c["measured_kld"].as_f64()));
}

/// Divergence of `tiny` with nothing but its embedding quantized: what reads the embedding weighs its errors. Measured: 0.64 of plain
/// rounding's; below 0.8 the gains and the readers are the right ones. Fails if its errors are weighed alike.
#[test]
fn an_embedding_is_rounded_for_its_readers() {
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let windows = windows(weights.spec().vocab);
    let root = tempfile::tempdir().unwrap();
    let format = |id: TensorId| if id == TensorId::global(Role::Embed) { Format::INT4_G128 } else { Format::Source };
    let kld = |feedback: bool| {
        let dir = root.path().join(feedback.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        let task = Task {
            weights: &weights,
            windows: &windows,
            choices: vec![Choice { format: &format, dir }],
            advance: Advance::Source,
            feedback,
            positive_scales: false,
            scale_dtype: Dtype::BF16,
            max_memory: 1 << 30,
            place: Place::Processor,
        };
        let found = solve::solve(&task, &mut |_| true).unwrap().remove(0);
        let candidate = weights.patched(vec![Patch::Solved(found.solved)]);
        let candidate = Candidate { weights: Arc::new(candidate), chunk: usize::MAX };
        let compared = lockstep::compare(&weights, &[candidate], Place::Processor, &windows, 1 << 30, &mut || true).unwrap();
        compared[0].summary().kld.mean
    };
    let (alike, weighed) = (kld(false), kld(true));
    assert!(weighed < 0.8 * alike, "{weighed} {alike}");
}

/// Divergence of `tiny` with an int4 embedding behind which attention is int8: matrices chosen behind the embedding take part of its
/// damage back, those chosen on the source's own activations none. Measured: 0.87 of what these leave; below 0.93 the aim is the
/// source's. Fails if what is missing is taken from the wrong side, or what inputs lack is not looked at.
#[test]
fn later_matrices_make_up_for_the_embedding() {
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let tokenizer = Tokenizer::open(&fixture("tiny")).unwrap();
    let windows = |tokens: Vec<u32>, most: usize| -> Vec<Window> {
        let piece = |t: &[u32]| Window { tokens: t.to_vec(), scored: 1..t.len(), task: 0 };
        tokens.chunks_exact(256).take(most).map(piece).collect()
    };
    let samples = sets::builtin().unwrap();
    let each = samples.iter().flat_map(|set| set.samples.iter().take(6)).map(|s| s.tokens(&tokenizer).unwrap());
    let calibration = windows(each.flatten().collect(), 32);
    let text = std::fs::read_to_string(fixture("measure/text.txt")).unwrap();
    let held = windows(tokenizer.encode(&text, AddSpecial::No).unwrap(), 8);
    let format = |id: TensorId| match id.role.component() {
        _ if id == TensorId::global(Role::Embed) => Format::INT4_G128,
        Component::Attention if id.part == Part::Weight => Format::INT8_CHANNEL,
        _ => Format::Source,
    };
    let root = tempfile::tempdir().unwrap();
    let kld = |advance: Advance, name: &str| {
        let dir = root.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let task = Task {
            weights: &weights,
            windows: &calibration,
            choices: vec![Choice { format: &format, dir }],
            advance,
            feedback: true,
            positive_scales: false,
            scale_dtype: Dtype::BF16,
            max_memory: 1 << 30,
            place: Place::Processor,
        };
        let found = solve::solve(&task, &mut |_| true).unwrap().remove(0);
        let candidate = weights.patched(vec![Patch::Solved(found.solved)]);
        let candidate = Candidate { weights: Arc::new(candidate), chunk: usize::MAX };
        let compared = lockstep::compare(&weights, &[candidate], Place::Processor, &held, 1 << 30, &mut || true).unwrap();
        compared[0].summary().kld.mean
    };
    let (apart, behind) = (kld(Advance::Source, "apart"), kld(Advance::Solved, "behind"));
    assert!(behind < 0.93 * apart, "{} {behind} {apart}", behind / apart);
}
