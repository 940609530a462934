//! `moe profile-experts` on the small trained model: the list, the trace and the report agree with each other; wrong input ends
//! with one line and writes nothing.

mod common;

use assert_cmd::Command;
use moe::artifact::hot::HotExperts;
use moe::artifact::lookahead::Lookahead;
use moe::artifact::weights::Weights;
use moe::calib::routing::Counts;
use moe::calib::trace::Trace;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Three layers of eight experts, two a token.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny")
}

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

/// Runs `profile-experts MODEL ...` in `dir`.
fn profile(dir: &Path, model: &Path, args: &[&str]) -> Ran {
    let mut command = Command::cargo_bin("moe").unwrap();
    let out = command.current_dir(dir).arg("profile-experts").arg(model).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran { code: out.status.code().unwrap_or(-1), stdout: text(&out.stdout), stderr: text(&out.stderr) }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

/// Expects exit code 1, one `moe:` line with the words, and an unchanged directory.
fn refused(dir: &Path, model: &Path, args: &[&str], words: &[&str]) {
    let before = names(dir);
    let ran = profile(dir, model, args);
    assert_eq!(ran.code, 1, "{args:?}: {}", ran.stderr);
    assert_eq!(ran.stderr.lines().filter(|l| l.starts_with("moe: ")).count(), 1, "{}", ran.stderr);
    for word in words {
        assert!(ran.stderr.contains(word), "expected `{word}` in: {}", ran.stderr);
    }
    assert!(ran.stdout.is_empty(), "{}", ran.stdout);
    assert_eq!(names(dir), before, "{args:?} left something");
}

const TWO: [&str; 6] = ["--task", "prose", "--task", "chinese", "--samples", "12"];

/// The maps fit the model, name more of the held-out choices than the routers do themselves a layer early, and what names them is refused
/// where it is of another model. Fails if rows of one text are fitted to those of another, or if held-out texts are counted in another
/// order.
#[test]
fn maps_name_the_next_choice() {
    let dir = tempfile::tempdir().unwrap();
    let ran = profile(dir.path(), &tiny(), &[&TWO[..], &["--lookahead", "lookahead.map", "--max-memory", "64KiB"]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let path = dir.path().join("lookahead.map");
    let maps = Lookahead::read(&path).unwrap();
    let spec = Weights::open(&tiny()).unwrap().spec().clone();
    maps.check_model(&path, &spec).unwrap();
    assert_eq!(maps.layers().map(|(l, _)| l).collect::<Vec<_>>(), [1, 2]);
    let report = json(&dir.path().join("report.json"));
    let recall = report["lookahead"].as_array().unwrap();
    assert_eq!(recall.len(), 2);
    for r in recall {
        let [router, map] = [&r["next_router"], &r["map"]].map(|v| v.as_f64().unwrap());
        assert!(0.25 < router && router < map && map < 1.0, "{r}");
    }
    assert!(ran.stdout.contains("a layer early"), "{}", ran.stdout);

    let mut other = Lookahead::default();
    other.insert(1, [2, 2], vec![0; 8]);
    other.write(&path).unwrap();
    let mut command = Command::cargo_bin("moe").unwrap();
    let out = command.args(["inspect", "--vram-budget", "8GiB", "--lookahead"]).arg(&path).arg(tiny()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("maps of another model") && text.contains("[2, 2]"), "{text}");
}

#[test]
fn list_trace_and_report_tell_the_same_story() {
    let dir = tempfile::tempdir().unwrap();
    let ran = profile(dir.path(), &tiny(), &[&TWO[..], &["--trace", "t.trace"]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(names(dir.path()), ["hot_experts.json", "report.json", "t.trace"]);
    let first = ran.stdout.lines().next().unwrap();
    assert!(first.contains("of 24 experts cover") && first.contains("an LRU cache of the same size"), "{first}");

    let list = HotExperts::read(&dir.path().join("hot_experts.json")).unwrap();
    let report = json(&dir.path().join("report.json"));
    let trace = Trace::from_bytes(&std::fs::read(dir.path().join("t.trace")).unwrap()).unwrap();
    assert_eq!((list.layers.len(), list.target_coverage), (3, Some(0.85)));
    assert!(list.hot[0].starts_with("model.layers.0.block_sparse_moe.experts."), "{}", list.hot[0]);
    assert_eq!((trace.layers.as_slice(), trace.tasks.len(), trace.samples.len()), (&[0, 1, 2][..], 2, 24));

    // Every fourth text is held out, so the list is made from nine of each twelve.
    let fitted = trace.samples.iter().enumerate().filter(|(i, _)| i % 4 != 3).map(|(_, s)| s);
    let counts = Counts::of(trace.shape, fitted);
    let total: u64 = list.tasks.iter().map(|t| t.tokens).sum();
    assert!(list.tasks.iter().all(|t| t.samples == 9));
    for (l, layer) in list.layers.iter().enumerate() {
        assert_eq!(layer.counts.iter().map(|&c| c as f64).collect::<Vec<_>>(), counts.layer(l));
        assert_eq!(layer.counts.iter().sum::<u64>(), 2 * total);
        // Gates of this family sum to 1 for every token: single precision over two addends, 1e-6 relative. Fails if the gates of
        // one token in a thousand go missing.
        let weight: f64 = layer.weight_sums.iter().sum();
        assert!((weight / total as f64 - 1.0).abs() < 1e-5, "{weight} for {total} tokens");
        assert_eq!(report["layers"][l]["hot"], serde_json::json!(layer.hot));
        assert_eq!(report["layers"][l]["coverage"].as_f64(), Some(layer.coverage));
        let mut seen = [0; 8];
        for task in ["prose", "chinese"] {
            let by_task = report["layers"][l]["counts_by_task"][task].as_array().unwrap();
            by_task.iter().zip(&mut seen).for_each(|(c, s)| *s += c.as_u64().unwrap());
        }
        assert_eq!(seen.iter().sum::<u64>() as usize, trace.samples.iter().map(|s| 2 * s.num_tok(trace.shape)).sum::<usize>());
    }
    let coverage = &report["coverage"];
    assert_eq!(coverage["total_experts"], 24);
    assert_eq!(coverage["hot_experts"].as_u64().unwrap() as usize, list.hot.len());
    assert!(coverage["fitted"].as_f64().unwrap() >= 0.85);
    let held = coverage["held_out"].as_f64().unwrap();
    assert!(held > coverage["uniform"].as_f64().unwrap(), "{coverage}");
    for task in ["prose", "chinese"] {
        let alone = &coverage["single_task"][task];
        assert!(alone["own"].as_f64().unwrap() > alone["others"].as_f64().unwrap(), "{task}: {alone}");
        assert!(coverage["left_out"][task].as_f64().unwrap() < held, "{task}");
    }
    assert_eq!(report["tasks"][0]["samples"], 12);
    assert!(report["stability"]["halves_overlap"].as_f64().unwrap() > 0.5);
    assert!(report["stability"]["jaccard_tasks"]["prose"]["chinese"].as_f64().unwrap() < 1.0);
    assert_eq!(report["stability"]["by_samples"].as_array().unwrap().last().unwrap()["jaccard"], 1.0);
    let curve = report["curve"].as_array().unwrap();
    assert_eq!((curve.len(), &curve[8]["static"]), (9, &serde_json::json!(1.0)));
}

#[test]
fn json_is_the_report_and_other_forms_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let args = ["--task", "math", "--samples", "4", "--json", "--format", "sglang", "--report", "r.json", "--html", "r.html"];
    let ran = profile(dir.path(), &model, &args);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), json(&dir.path().join("r.json")));
    assert_eq!(names(dir.path()), ["logical_count.json", "r.html", "r.json"]);
    let counts = json(&dir.path().join("logical_count.json"));
    let rows = counts["logical_count"].as_array().unwrap();
    assert_eq!((rows.len(), rows[0].as_array().unwrap().len()), (3, 8));
}

#[test]
fn an_artifact_keeps_its_list_and_answers_for_its_original() {
    let dir = tempfile::tempdir().unwrap();
    let mut quantize = Command::cargo_bin("moe").unwrap();
    quantize.current_dir(dir.path()).arg("quantize").arg(tiny()).args(["-o", "art", "-q", "--method", "absmax"]);
    quantize.assert().success();
    let few = ["--task", "qa", "--samples", "4", "-q"];
    assert_eq!(profile(dir.path(), &tiny(), &few).code, 0);
    assert_eq!(profile(dir.path(), Path::new("art"), &few).code, 0);
    let of = |path: &str| HotExperts::read(&dir.path().join(path)).unwrap();
    let (original, artifact) = (of("hot_experts.json"), of("art/hot_experts.json"));
    assert_eq!(original.model, artifact.model);

    // Old counts are worth half: integers, exact up to the rounding of one half.
    let merge = [&few[..], &["--merge", "hot_experts.json", "-o", "merged.json"]].concat();
    let ran = profile(dir.path(), Path::new("art"), &merge);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let merged = of("merged.json");
    for ((m, new), old) in merged.layers.iter().zip(&artifact.layers).zip(&original.layers) {
        let want: Vec<u64> =
            new.counts.iter().zip(&old.counts).map(|(n, o)| (*n as f64 + *o as f64 / 2.0).round() as u64).collect();
        assert_eq!(m.counts, want);
    }
    assert_eq!(merged.tasks[0].samples, 3 + 2);
}

#[test]
fn a_budget_is_kept_and_too_small_a_one_names_the_least() {
    let dir = tempfile::tempdir().unwrap();
    // An expert is 3 x 128 x 256 bf16 values; six are needed, two a layer.
    let expert = 3 * 128 * 256 * 2;
    let ran = profile(dir.path(), &tiny(), &[&TWO[..], &["--budget", &(10 * expert + 5).to_string()]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let list = HotExperts::read(&dir.path().join("hot_experts.json")).unwrap();
    assert_eq!((list.hot.len(), list.target_coverage), (10, None));
    assert!(list.layers.iter().all(|l| l.hot.len() >= 2));
    assert_eq!(json(&dir.path().join("report.json"))["coverage"]["hot_bytes"], 10 * expert);

    let empty = tempfile::tempdir().unwrap();
    let needed = format!("--budget {}", 6 * expert);
    refused(empty.path(), &tiny(), &["--budget", "1MB"], &["1.00 MB", &needed]);
}

#[test]
fn one_long_text_is_cut_so_that_some_is_held_out() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("own.txt"), "The river was low and the mill stood still all summer. ".repeat(60)).unwrap();
    let ran = profile(dir.path(), &tiny(), &["--task", "own=own.txt"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("cut into") && ran.stderr.contains("pieces"), "{}", ran.stderr);
    let long = serde_json::json!({"text": "one two three four five six seven eight nine ten ".repeat(300)}).to_string();
    std::fs::write(dir.path().join("long.jsonl"), [long.as_str(); 4].join("\n")).unwrap();
    let ran = profile(dir.path(), &tiny(), &["--task", "own=long.jsonl"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("4 samples are longer than the model's 1024 tokens and were split"), "{}", ran.stderr);
}

#[test]
fn sets_that_cannot_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    put("empty.jsonl", b"\n\n");
    put("latin.txt", b"caf\xe9 au lait");
    put("lines.jsonl", b"{\"text\": \"fine\"}\n{\"body\": \"not\"}\n");
    put("short.txt", b"a");
    put("fine.txt", b"some words that make enough tokens to hold a few of them out of the list");
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--task", "x=empty.jsonl"], &["task `x` has no sample", "hint:"]),
        (&["--task", "x=folder"], &["task `x` has no sample"]),
        (&["--task", "x=latin.txt"], &["latin.txt", "not UTF-8", "byte at 3"]),
        (&["--task", "x=lines.jsonl"], &["lines.jsonl` line 2", "neither `text` nor `messages`"]),
        (&["--task", "poetry"], &["`poetry` is no built-in task", "hint: built-in tasks: prose"]),
        (&["--task", "x=absent.txt"], &["absent.txt"]),
        (&["--task", "x=short.txt"], &["task `x`", "too few to hold some out"]),
        (&["--task", "x=fine.txt", "--task", "x=fine.txt"], &["given twice"]),
        (&["--samples", "0"], &["--samples"]),
        (&["--coverage", "1.5"], &["--coverage"]),
        (&["--budget", "much"], &["`much` is no size"]),
        (&["--merge", "fine.txt"], &["fine.txt", "not a list of hot experts"]),
        (&["--merge", "absent.json"], &["absent.json"]),
        (&["-o", "nowhere/list.json"], &["nowhere/list.json", "does not exist"]),
        (&["-o", "folder"], &["is a directory"]),
        (&["-o", "report.json"], &["two results"]),
        (&["--decay", "0.5"], &[]),
    ];
    for (args, words) in cases {
        match args[0] {
            "--decay" => assert_eq!(profile(dir.path(), &tiny(), args).code, 1, "a decay needs an older list"),
            _ => refused(dir.path(), &tiny(), args, words),
        }
    }
}

#[test]
fn a_list_or_tokenizer_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let few = ["--task", "qa", "--samples", "4", "-q"];
    assert_eq!(profile(dir.path(), &tiny(), &few).code, 0);
    let path = dir.path().join("hot_experts.json");
    let sound = json(&path);
    let mut other = sound.clone();
    other["model"]["config_sha256"] = "00".into();
    std::fs::write(&path, other.to_string()).unwrap();
    refused(dir.path(), &tiny(), &["--merge", "hot_experts.json"], &["another `config.json`"]);
    let mut other = sound;
    other["hot"][0] = "model.layers.0.mlp.experts.0".into();
    std::fs::write(&path, other.to_string()).unwrap();
    refused(dir.path(), &tiny(), &["--merge", "hot_experts.json"], &["another model", "model.layers.0.mlp.experts.0"]);

    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for name in names(&tiny()) {
        std::fs::copy(tiny().join(&name), model.join(&name)).unwrap();
    }
    let tokenizer = model.join("tokenizer.json");
    let mut value = json(&tokenizer);
    value["model"]["vocab"]["one token too many"] = 2048.into();
    std::fs::write(&tokenizer, value.to_string()).unwrap();
    refused(dir.path(), &model, &few, &["2049 entries", "2048"]);
}

/// What `moe run` saw is a list that `--merge` takes, and a second run adds to it. Integers, exact: visits are two a token and layer.
/// Fails if a chunk of the prompt or the decoded tokens go uncounted.
#[test]
fn a_run_adds_what_it_saw_to_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let run = |prompt: &str| -> Value {
        let mut command = Command::cargo_bin("moe").unwrap();
        command.current_dir(dir.path()).arg("run").arg(&model).args(["-p", prompt, "--device", "cpu", "-n", "8", "--json", "-q"]);
        let out = command.args(["--temperature", "0", "--update-profile", "seen.json"]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    // The last token is not computed. The second prompt is longer than a chunk of 256 tokens.
    let tokens = |v: Value| v["prompt_tok"].as_u64().unwrap() + v["generated_tok"].as_u64().unwrap() - 1;
    let first = tokens(run("The water flows"));
    let both = first + tokens(run(&"Count the sheep and the goats. ".repeat(60)));
    assert!(both > first + 256, "{both}");
    let list = HotExperts::read(&dir.path().join("seen.json")).unwrap();
    assert_eq!((list.tasks.len(), list.tasks[0].samples, list.tasks[0].tokens), (1, 2, both));
    assert!(list.layers.iter().all(|l| l.counts.iter().sum::<u64>() == 2 * both && l.coverage >= 0.85));
    let ran = profile(dir.path(), &model, &["--task", "qa", "--samples", "4", "-q", "--merge", "seen.json", "-o", "merged.json"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let merged = HotExperts::read(&dir.path().join("merged.json")).unwrap();
    assert_eq!(merged.tasks.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["qa", "run"]);
}
