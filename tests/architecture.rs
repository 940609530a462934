//! The rules of ARCHITECTURE.md that a machine can check: who may use whom, where `unsafe` and `clap` may appear, no file of
//! leftovers, every module with a head.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Crate modules each module may name with `crate::`; itself is always allowed.
const MAY_USE: &[(&str, &[&str])] = &[
    ("tensor", &[]),
    ("ids", &[]),
    ("files", &[]),
    ("text", &["tensor"]),
    ("sample", &["tensor"]),
    ("checkpoint", &["tensor"]),
    ("quant", &["tensor"]),
    ("model", &["tensor", "ids"]),
    ("artifact", &["tensor", "ids", "files", "checkpoint", "quant", "model", "profile"]),
    ("profile", &["ids", "quant", "model", "tensor"]),
    ("tiers", &["ids"]),
    ("engine", &["tensor", "ids", "files", "model", "quant", "artifact", "checkpoint", "tiers", "sample"]),
    ("export", &["tensor", "ids", "files", "model", "quant", "artifact", "checkpoint"]),
    ("generate", &["engine", "sample", "ids", "model"]),
    ("report", &["ids"]),
    ("cli", &["ids"]),
    (
        "command",
        &[
            "artifact",
            "calib",
            "checkpoint",
            "cli",
            "engine",
            "export",
            "files",
            "generate",
            "ids",
            "model",
            "profile",
            "quant",
            "report",
            "sample",
            "tensor",
            "text",
            "tiers",
        ],
    ),
    ("calib", &["tensor", "ids", "files", "model", "quant", "artifact", "engine", "text"]),
];

fn sources() -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, out: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                out.push((path, text));
            }
        }
    }
    let mut out = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut out);
    out
}

fn module(path: &Path) -> String {
    let relative = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    relative.iter().next().unwrap().to_string_lossy().trim_end_matches(".rs").to_string()
}

#[test]
fn modules_use_only_what_the_table_allows() {
    let table: BTreeMap<_, _> = MAY_USE.iter().copied().collect();
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let from = module(&path);
        if from == "lib" || from == "main" {
            continue;
        }
        let allowed = table.get(from.as_str()).unwrap_or_else(|| panic!("`{from}` is not in the table"));
        for (n, line) in text.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//")) {
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if used != from && !allowed.contains(&used.as_str()) && !used.is_empty() {
                    wrong.push(format!("{}:{}: `{from}` uses `{used}`", path.display(), n + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn engines_never_see_each_other() {
    for (path, text) in sources() {
        let path = path.to_string_lossy();
        assert!(!(path.contains("engine/cpu") && text.contains("cuda")), "{path} names cuda");
        assert!(!(path.contains("engine/cuda") && text.contains("super::cpu")), "{path} names cpu");
    }
}

#[test]
fn special_words_stay_in_their_rooms() {
    let rooms: [(&str, &[&str]); 11] = [
        ("fs::write(", &["src/files"]),
        ("fs::rename(", &["src/files"]),
        ("fs::remove_file(", &["src/files"]),
        ("fs::remove_dir_all(", &["src/files"]),
        ("unsafe {", &["checkpoint/", "engine/cuda/", "engine/cpu/matmul.rs"]),
        ("clap::", &["cli/", "main.rs"]),
        ("anyhow::", &["command/", "main.rs"]),
        ("cudarc::", &["engine/cuda/"]),
        ("nvml_wrapper::", &["engine/cuda/"]),
        ("memmap2::", &["checkpoint/", "engine/cuda/numa.rs"]),
        ("libc::", &["engine/cuda/numa.rs"]),
    ];
    for (path, text) in sources() {
        let shown = path.to_string_lossy().to_string();
        for (word, places) in rooms {
            let code = text.lines().any(|l| !l.trim_start().starts_with("//") && l.contains(word));
            assert!(!code || places.iter().any(|p| shown.contains(p)), "`{word}` in {shown}");
        }
        assert!(text.starts_with("//!"), "{shown} has no head");
        let name = path.file_stem().unwrap().to_string_lossy().to_string();
        assert!(!["utils", "util", "helpers", "common", "misc"].contains(&name.as_str()), "{shown} is a file of leftovers");
    }
}
