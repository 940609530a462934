//! `quantize` stopped at any moment: nothing under the final name but a whole artifact, and a resumed run equals an unbroken one.

mod common;

use common::{Built, TestCheckpoint};
use moe::model::{family, names};
use moe::tensor::Dtype;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A mixtral of about 400 kB in three files, whose artifact has a dozen; the head is the largest of them and the last.
fn model() -> Built {
    let config = json!({
        "model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_size": 128, "intermediate_size": 128, "vocab_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
    });
    let (family, spec) = family::read(&config).unwrap();
    let mut built = TestCheckpoint::new().config(config).shards(3);
    for (i, (id, shape)) in names::tensors(&spec).into_iter().enumerate() {
        let values = common::random_values(shape.iter().product(), i as u64 + 1);
        built = built.values(&family.names.tensor(id), Dtype::BF16, &shape, &values);
    }
    built.build()
}

fn program() -> PathBuf {
    assert_cmd::cargo::cargo_bin("moe")
}

/// `moe quantize` with what the runs of these tests have in common.
fn arguments(model: &Path, output: &Path, extra: &[&str]) -> Vec<String> {
    let fixed =
        ["quantize", model.to_str().unwrap(), "-o", output.to_str().unwrap(), "--shard-size", "30KB", "--set", "embed=int8"];
    fixed.iter().chain(extra).map(|s| s.to_string()).collect()
}

fn quantize(model: &Path, output: &Path, extra: &[&str]) -> Output {
    Command::new(program()).args(arguments(model, output, extra)).output().unwrap()
}

/// A run that takes `delay` milliseconds a write, about 150 of them.
fn slow(model: &Path, output: &Path, delay: &str, extra: &[&str]) -> Child {
    let extra: Vec<&str> = ["--write-delay", delay].iter().chain(extra).copied().collect();
    let mut command = Command::new(program());
    command.args(arguments(model, output, &extra)).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn ok(out: Output) {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Expects the exit code and the words in the error.
fn fails(out: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "expected `{word}` in: {text}");
    }
}

fn partial(output: &Path) -> PathBuf {
    output.with_file_name(format!(".{}.partial", output.file_name().unwrap().to_str().unwrap()))
}

/// Weight files that the journal of an unfinished run has.
fn finished(output: &Path) -> usize {
    let text = std::fs::read_to_string(partial(output).join(".journal")).unwrap_or_default();
    text.lines().filter(|line| line.starts_with("{\"shard\"")).count()
}

/// Waits until a run has finished `n` weight files.
fn wait_for(output: &Path, n: usize) {
    let started = Instant::now();
    while finished(output) < n {
        assert!(started.elapsed() < Duration::from_secs(20), "no {n} files after 20 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// The artifact is there, whole, equal to that of an unbroken run, and nothing is left beside it.
fn same(output: &Path, whole: &BTreeMap<String, Vec<u8>>) {
    let found = contents(output);
    assert_eq!(found.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
    for (name, bytes) in whole {
        assert!(found[name] == *bytes, "`{name}` differs from that of an unbroken run");
    }
    assert!(!partial(output).exists());
}

/// The model, an output to try, and the files of an unbroken run.
fn setup() -> (Built, PathBuf, BTreeMap<String, Vec<u8>>) {
    let built = model();
    let unbroken = built.root().join("unbroken");
    ok(quantize(built.path(), &unbroken, &[]));
    let whole = contents(&unbroken);
    assert!(whole.len() > 10, "{:?}", whole.keys());
    let output = built.root().join("out");
    (built, output, whole)
}

/// Fails if a file counts as finished before its last byte is written, if leftovers of a killed run enter the output, if the
/// manifest of a resumed run lacks what the first one did, or if the final name appears before the last file.
#[test]
fn fifty_kills() {
    let (built, output, whole) = setup();
    let moments = common::random_values(100, std::process::id().into());
    let (mut resumed, mut moments) = (0, moments.iter().map(|x| Duration::from_micros((90e3 * (x + 1.0)) as u64)));
    for round in 0..50 {
        for _ in 0..1 + round % 2 {
            let child = slow(built.path(), &output, "1", &["--resume"]);
            std::thread::sleep(moments.next().unwrap());
            kill(child);
            resumed += (finished(&output) > 0) as usize;
            if output.exists() {
                break;
            }
        }
        if output.exists() {
            assert!(contents(&output).iter().filter(|(name, _)| !name.starts_with('.')).eq(&whole), "half an artifact");
        } else {
            ok(quantize(built.path(), &output, &["--resume"]));
            same(&output, &whole);
        }
        std::fs::remove_dir_all(&output).unwrap();
    }
    assert!(resumed >= 20, "only {resumed} kills left something to resume");
}

/// Fails if the signal is looked at only between files, or if what was done is removed.
#[test]
fn an_interrupt_stops_at_once_and_can_be_resumed() {
    let (built, output, whole) = setup();
    let child = slow(built.path(), &output, "20", &[]);
    wait_for(&output, 1);
    let pressed = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    assert!(pressed.elapsed() < Duration::from_secs(1), "{:?}", pressed.elapsed());
    fails(&out, 2, &["stopped with", "interrupted", "hint: run the same command with `--resume`"]);
    assert!(!output.exists() && finished(&output) > 0);
    fails(&quantize(built.path(), &output, &[]), 1, &["unfinished run", "`--resume`", "`--force`"]);
    let resumed = quantize(built.path(), &output, &["--resume"]);
    fails(&resumed, 0, &["resuming with", "of 18 weight files done"]);
    same(&output, &whole);
}

/// Fails if the lock is not taken, does not name its holder, or outlives it.
#[test]
fn two_runs_never_share_an_output() {
    let (built, output, whole) = setup();
    let child = slow(built.path(), &output, "20", &[]);
    wait_for(&output, 1);
    let pid = child.id().to_string();
    for extra in [&[][..], &["--resume"], &["--force"]] {
        fails(&quantize(built.path(), &output, extra), 1, &["being written by another process", &pid, "hint:"]);
    }
    kill(child);
    ok(quantize(built.path(), &output, &["--resume"]));
    same(&output, &whole);
}

/// Fails if a source is told by its size alone, if a recipe or another version of this tool slips through, if a damaged file is
/// taken for finished, or if `--force` continues.
#[test]
fn only_the_same_run_is_resumed() {
    let (built, output, whole) = setup();
    let child = slow(built.path(), &output, "5", &[]);
    wait_for(&output, 3);
    kill(child);
    let resume = |extra: &[&str]| quantize(built.path(), &output, &[&["--resume"], extra].concat());
    fails(&resume(&["--profile", "fast"]), 1, &["cannot resume", "`profile` = \"mixed\", now it is \"fast\"", "hint:"]);
    fails(&resume(&["--positive-scales"]), 1, &["`positive_scales` = false"]);
    fails(&resume(&["--asym"]), 1, &["`asym` = false"]);
    let other: Vec<String> = arguments(built.path(), &output, &["--resume"]).iter().map(|a| a.replace("30KB", "50KB")).collect();
    fails(&Command::new(program()).args(other).output().unwrap(), 1, &["laid out otherwise", "`--shard-size`"]);

    let source = built.path().join("model-00002-of-00003.safetensors");
    let sound = std::fs::read(&source).unwrap();
    let mut flipped = sound.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&source, &flipped).unwrap();
    fails(&resume(&[]), 1, &["model-00002-of-00003.safetensors` has changed since", "hint:"]);
    std::fs::write(&source, &sound).unwrap();

    let journal = partial(&output).join(".journal");
    let text = std::fs::read_to_string(&journal).unwrap();
    std::fs::write(&journal, text.replacen(env!("CARGO_PKG_VERSION"), "0.0.0", 1)).unwrap();
    fails(&resume(&[]), 1, &["begun by version 0.0.0"]);
    std::fs::write(&journal, &text).unwrap();

    let config = built.path().join("config.json");
    let sound_config = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, sound_config.replacen("64", "32", 1)).unwrap();
    fails(&resume(&[]), 1, &["config.json has changed"]);
    std::fs::write(&config, sound_config).unwrap();

    // A source that was written again with the same bytes is the same source; a damaged output is written again.
    let shard = partial(&output).join(whole.keys().find(|name| name.starts_with("model-00002")).unwrap());
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    ok(resume(&[]));
    same(&output, &whole);

    std::fs::remove_dir_all(&output).unwrap();
    let child = slow(built.path(), &output, "5", &[]);
    wait_for(&output, 2);
    kill(child);
    ok(quantize(built.path(), &output, &["--force"]));
    same(&output, &whole);
}

/// A write that fails, here because the system lets no file grow past 120 kB, which only the head needs. Fails if finished files are
/// removed, or if the failure is called bad input.
#[test]
fn a_failing_write_can_be_resumed() {
    let (built, output, whole) = setup();
    let run = format!("trap '' XFSZ; ulimit -f 234; exec \"{}\" \"$@\"", program().display());
    let args = arguments(built.path(), &output, &[]);
    let out = Command::new("sh").args(["-c", &run, "sh"]).args(args).output().unwrap();
    fails(&out, 2, &["stopped with", "cannot write", ".safetensors", "File too large", "`--resume` to continue"]);
    assert!(!output.exists() && finished(&output) > 5);
    ok(quantize(built.path(), &output, &["--resume"]));
    same(&output, &whole);
}

/// A disk that fills while a run writes to it, and is given room again: a file system of 700 kB in a name space of its own, which
/// any user may make unless the system forbids it. Fails if the run leaves something under the final name.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_can_be_resumed() {
    let allowed = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("name spaces are forbidden here: a_failing_write_can_be_resumed alone covers a failing disk");
        return;
    }
    let (built, _, whole) = setup();
    let disk = built.root().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let saved = built.root().join("out");
    let script = r#"
        mount -t tmpfs -o size=700k tmpfs "$DISK"
        "$MOE" "$@" --write-delay 10 2> "$SAVED.log" &
        until [ "$(grep -c '^{"shard"' "$DISK/.out.partial/.journal" 2> /dev/null)" -ge 2 ] 2> /dev/null; do sleep 0.01; done
        cat /dev/zero > "$DISK/filler" 2> /dev/null
        wait $!
        echo "code $?" >> "$SAVED.log"
        [ -e "$DISK/out" ] && echo "a half-written artifact" >> "$SAVED.log"
        rm "$DISK/filler"
        "$MOE" "$@" --resume --quiet && cp -r "$DISK/out" "$SAVED"
    "#;
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", script, "sh"]).args(arguments(built.path(), &disk.join("out"), &[]));
    let status = command.env("DISK", &disk).env("MOE", program()).env("SAVED", &saved).status().unwrap();
    let log = std::fs::read_to_string(built.root().join("out.log")).unwrap();
    for word in ["code 2", "stopped with", "No space left on device", "free space", "`--resume` to continue"] {
        assert!(log.contains(word), "expected `{word}` in: {log}");
    }
    assert!(!log.contains("half-written") && status.success(), "{log}");
    same(&saved, &whole);
}
