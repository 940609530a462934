//! Every kernel compiles for every target, with no GPU; kernels of the decode path spill nothing to local memory.
//!
//! Needs `libnvrtc`: prints SKIPPED without it, fails without it under `MOE_REQUIRE_NVRTC=1`.

use moe::engine::cuda::module::{ARCHES, PROGRAMS, Source, compile, compiler};
use rayon::prelude::*;

fn has_compiler() -> bool {
    match compiler() {
        Ok(version) => {
            println!("NVRTC {version}");
            true
        }
        Err(reason) => {
            assert!(std::env::var_os("MOE_REQUIRE_NVRTC").is_none(), "{reason}");
            println!("SKIPPED: {reason}");
            false
        }
    }
}

/// Kernel names with the bytes each spills, from the assembler's report.
fn spills(log: &str) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    let mut kernel = String::new();
    for line in log.lines() {
        if let Some(name) = line.split("Function properties for ").nth(1) {
            kernel = name.trim().to_string();
        } else if line.contains("bytes spill stores") {
            let number = |part: &str| part.split_whitespace().find_map(|w| w.parse::<u64>().ok()).unwrap_or(0);
            let parts: Vec<&str> = line.split(',').collect();
            found.push((kernel.clone(), parts.iter().skip(1).map(|p| number(p)).sum()));
        }
    }
    found
}

/// Compiles a program and returns the kernels that spill.
fn check(program: &Source, arch: &'static str) -> Vec<(&'static str, &'static str, (String, u64))> {
    let compiled = compile(program, arch).unwrap_or_else(|e| panic!("{e}"));
    assert!(!compiled.cubin.is_empty());
    let spills = spills(&compiled.log);
    let declared = program.text.matches("extern \"C\" __global__").count();
    assert!(declared == 0 || !spills.is_empty(), "{} {arch}: no report of spills in `{}`", program.name, compiled.log);
    // `n64`, `wg` and `tiles` carry many tokens, where a few spilled registers cost nothing that can be measured.
    let carries_many = |name: &str| name.ends_with("_n64") || name.ends_with("_wg") || name.starts_with("tiles_");
    let wrong = spills.into_iter().filter(|s| s.1 > 0 && !carries_many(&s.0));
    wrong.map(|w| (program.name, arch, w)).collect()
}

#[test]
fn every_kernel_compiles_for_every_target_without_spills() {
    if !has_compiler() {
        return;
    }
    let all: Vec<_> = PROGRAMS
        .par_iter()
        .flat_map(|p| ARCHES.par_iter().filter(|a| p.is_for(a)).flat_map_iter(|arch| check(p, arch)))
        .collect();
    assert!(all.is_empty(), "spills: {all:?}");
}

/// The reader of the report above must be able to fail.
#[test]
fn a_reported_spill_is_seen() {
    let log = "ptxas info    : Function properties for f\nptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads";
    assert_eq!(spills(log), [("f".to_string(), 84)]);
}
