//! `moe tiers` and the plan of `moe inspect` on the small trained model: the bound holds, budgets mean what they say, a refusal
//! names what would do.

use assert_cmd::Command;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Three layers of eight experts, two a token.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny")
}

/// Exit code, standard output and standard error of `moe ...` in `dir`.
fn moe(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let out = Command::cargo_bin("moe").unwrap().current_dir(dir).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code().unwrap_or(-1), text(&out.stdout), text(&out.stderr))
}

/// A trace of held-out tasks and a list made from others, in `dir`.
fn traced(dir: &Path) {
    let model = tiny();
    let model = model.to_str().unwrap();
    for (tasks, outputs) in [(["prose", "chinese"], ["-o", "list.json"]), (["qa", "math"], ["--trace", "t.trace"])] {
        let some = ["profile-experts", model, "-q", "--samples", "4", "--task", tasks[0], "--task", tasks[1]];
        let (code, _, stderr) = moe(dir, &[&some[..], &outputs].concat());
        assert_eq!(code, 0, "{stderr}");
    }
}

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn no_policy_beats_the_bound_and_lrfu_is_no_worse_than_lru() {
    let dir = tempfile::tempdir().unwrap();
    traced(dir.path());
    let model = tiny();
    let base = ["tiers", model.to_str().unwrap(), "--trace", "t.trace", "--hot", "list.json"];
    let (code, stdout, stderr) = moe(dir.path(), &[&base[..], &["--json", "--html", "t.html", "--md", "t.md"]].concat());
    assert_eq!(code, 0, "{stderr}");
    let report = value(&stdout);
    assert_eq!(report, value(&std::fs::read_to_string(dir.path().join("report.json")).unwrap()));
    assert!(report["answer"].as_str().unwrap().starts_with("lrfu hits most at "), "{}", report["answer"]);
    let rows = report["replay"].as_array().unwrap();
    assert_eq!(rows.first().unwrap()["budget"], "30%", "a fifth does not hold two of eight experts in every layer");
    let mut before = 0.0;
    for row in rows {
        let rate = |name: &str| row["policies"][name]["hit_rate"].as_f64().unwrap();
        let others = ["static", "lru", "lfu", "lrfu"];
        assert!(others.iter().all(|p| rate(p) <= rate("belady")), "{row}");
        assert!(rate("lrfu") >= rate("lru"), "{row}");
        assert!(rate("belady") >= before && rate("belady") < 1.0, "{row}");
        before = rate("belady");
        // Every expert has the same bytes, so what is fetched is misses: 6 visits a token, 3 x 128 x 256 bf16 values each. Sums of
        // a few thousand integers, hence 1e-9. Fails if a token's visits are counted in one layer only.
        let fetched = row["policies"]["lru"]["bytes_per_tok"].as_f64().unwrap() / (6.0 * 196_608.0);
        assert!((fetched + rate("lru") - 1.0).abs() < 1e-9, "{row}");
    }
    let page = std::fs::read_to_string(dir.path().join("t.html")).unwrap();
    assert!(page.contains("curve lrfu") && page.contains("curve belady") && page.contains("hits most"));
    assert!(std::fs::read_to_string(dir.path().join("t.md")).unwrap().contains("| 50% |"));

    let (_, stdout, _) = moe(dir.path(), &[&base[..], &["--vram-budget", "50%", "--policy", "lru,lrfu:1,lrfu"]].concat());
    let first = stdout.lines().next().unwrap();
    assert!(first.starts_with("lrfu hits most at 1 of 1 budgets: ") && first.ends_with("% at 50%"), "{first}");
}

#[test]
fn a_budget_of_bytes_is_the_plan_that_inspect_shows() {
    let dir = tempfile::tempdir().unwrap();
    traced(dir.path());
    let model = tiny();
    let model = model.to_str().unwrap();
    let inspect = |budget: &str| moe(dir.path(), &["inspect", model, "--json", "--vram-budget", budget, "--host-budget", "1MB"]);
    let (code, stdout, stderr) = inspect("1MB");
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    let least = stderr.split("--vram-budget ").nth(1).unwrap().split(',').next().unwrap();
    assert_eq!(inspect(&(least.parse::<u64>().unwrap() - 1).to_string()).0, 1);
    let (code, stdout, stderr) = inspect(least);
    assert_eq!(code, 0, "{stderr}");
    let plan = value(&stdout)["vram"].clone();
    assert_eq!((&plan["total_bytes"], &plan["slots"]), (&plan["budget_bytes"], &serde_json::json!([2, 2, 2])));
    // Two slots a layer change hands for one token alone, so none is permanent. A megabyte is too little even for the copies of one token's
    // experts, two of each layer, and the two rooms that the others come from the disk through.
    assert_eq!((&plan["offloaded_bytes"], &plan["host_bytes"]), (&(18 * 196_608).into(), &((6 + 2) * 196_608).into()));
    assert_eq!((&plan["disk_bytes"], &plan["smallest_host_bytes"]), (&(18 * 196_608).into(), &plan["host_bytes"]));
    let shown = |host: &str| moe(dir.path(), &["inspect", model, "--vram-budget", least, "--host-budget", host]).1;
    assert!(shown("1MB").contains("--host-budget is too small: the least that works is 1572864"), "{}", shown("1MB"));
    assert!(shown("2MB").contains("read from the disk when needed: 16 experts"), "{}", shown("2MB"));
    assert!(shown("1GB").contains("copies of 24 experts"), "{}", shown("1GB"));

    // One byte less than all experts need makes room for a ring first, which takes most of what they took.
    let all = plan["resident_bytes"].as_u64().unwrap();
    let short = (all - 1).to_string();
    let (code, stdout, stderr) = moe(dir.path(), &["inspect", model, "--json", "--vram-budget", &short]);
    assert_eq!(code, 0, "{stderr}");
    let some: u64 = value(&stdout)["vram"]["slots"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).sum();
    assert!(some > 6 && some < 24, "{stdout}");
    let budgets = format!("{least},{short},{all}");
    let args = ["tiers", model, "--trace", "t.trace", "--json", "--policy", "lru", "--vram-budget", &budgets];
    let (code, stdout, stderr) = moe(dir.path(), &args);
    assert_eq!(code, 0, "{stderr}");
    let slots: Vec<u64> = value(&stdout)["replay"].as_array().unwrap().iter().map(|r| r["slots"].as_u64().unwrap()).collect();
    assert_eq!(slots, [6, some, 24]);
    let (code, stdout, _) = moe(dir.path(), &["inspect", model, "--vram-budget", &short]);
    assert!(code == 0 && stdout.contains(&format!("experts: {some} of 24 resident, ")), "{stdout}");
}

#[test]
fn shapes_are_planned_without_a_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) =
        moe(dir.path(), &["inspect", "--shape", "qwen3-30b-a3b", "--vram-budget", "12GiB", "--batch", "4"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains(" of 6144 resident, ") && stdout.contains("1024 for each of 4 sequences"), "{stdout}");
    let (code, _, stderr) = moe(dir.path(), &["inspect", "--shape", "qwen3-30b-a3b", "--vram-budget", "2GiB"]);
    assert!(code == 1 && stderr.contains("the smallest budget that works is"), "{stderr}");
}

#[test]
fn what_cannot_be_replayed_is_said() {
    let dir = tempfile::tempdir().unwrap();
    traced(dir.path());
    let model = tiny();
    let model = model.to_str().unwrap();
    let whole = std::fs::read(dir.path().join("t.trace")).unwrap();
    std::fs::write(dir.path().join("cut.trace"), &whole[..whole.len() - 1]).unwrap();
    let mut other = whole.clone();
    other[16] = 9;
    std::fs::write(dir.path().join("other.trace"), &other).unwrap();
    let cases: [(&[&str], &str); 8] = [
        (&["--trace", "absent.trace"], "absent.trace"),
        (&["--trace", "cut.trace"], "bytes are left"),
        (&["--trace", "list.json"], "not a routing trace"),
        (&["--trace", "other.trace"], "choose 2 of 9 experts, the model 3 layers that choose 2 of 8"),
        (&["--trace", "t.trace", "--vram-budget", "1MB"], "--vram-budget "),
        (&["--trace", "t.trace", "--vram-budget", "20%"], "the least is 25.0%"),
        (&["--trace", "t.trace", "--policy", "lrfu:12"], "lrfu:1 to lrfu:11"),
        (&["--trace", "t.trace", "--hot", "t.trace"], "not a list of hot experts"),
    ];
    for (args, words) in cases {
        let (code, stdout, stderr) = moe(dir.path(), &[&["tiers", model], args].concat());
        assert!(code == 1 && stdout.is_empty() && stderr.contains(words), "{args:?}: {stderr}");
    }
    let (code, _, stderr) = moe(dir.path(), &["run", model, "-p", "x", "--device", "cpu", "--vram-budget", "1GiB"]);
    assert!(code == 1 && stderr.contains("the processor would compute"), "{stderr}");
}
