//! Codes chosen on a GPU against those of the processor: second moments, error feedback, whole artifacts.
//!
//! Needs a GPU: prints SKIPPED without one, fails without one under `MOE_REQUIRE_GPU=1`.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::has_gpu;
use moe::artifact::solved::Solved;
use moe::artifact::weights::{Patch, Weights};
use moe::calib::lockstep::{self, Candidate, Place};
use moe::calib::solve::{self, Advance, Choice, Module, Outcome, Progress, SolveError, Task};
use moe::calib::windows::Window;
use moe::ids::{Component, Part, TensorId};
use moe::quant::format::{Bits, Format, Group, Zero, fit};
use moe::tensor::Dtype;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name, format of each tensor, and whether errors are fed back.
type Recipe<'a> = (&'a str, &'a (dyn Fn(TensorId) -> Format + Sync), bool);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Windows of unlike lengths: no count of tokens is a whole tile.
const LENGTHS: &[usize] = &[96, 33, 130, 1, 64, 57];

fn windows(vocab: usize, lengths: &[usize]) -> Vec<Window> {
    let token = |w: usize, t: usize| ((w * 131 + t * 7 + t * t % 97) % vocab) as u32;
    let window = |(w, &len): (usize, &usize)| Window { tokens: (0..len).map(|t| token(w, t)).collect(), scored: 1..len, task: 0 };
    lengths.iter().enumerate().map(window).collect()
}

/// What to choose with, besides the place.
struct Setup<'a> {
    weights: &'a Arc<Weights>,
    format: &'a (dyn Fn(TensorId) -> Format + Sync),
    windows: &'a [Window],
    advance: Advance,
    feedback: bool,
}

/// Chooses into `dir`, and stops once the part named is filed.
fn solve_in(setup: &Setup<'_>, dir: &Path, place: Place, stop: Option<&str>) -> Result<Outcome, SolveError> {
    let Setup { weights, format, windows, advance, feedback } = *setup;
    let task = Task {
        weights,
        windows,
        choices: vec![Choice { format, dir: dir.to_path_buf() }],
        advance,
        feedback,
        positive_scales: false,
        scale_dtype: Dtype::BF16,
        max_memory: 1 << 30,
        place,
    };
    let found = solve::solve(&task, &mut |p| !matches!(p, Progress::Part(name, ..) if Some(name) == stop));
    found.map(|mut outcomes| outcomes.remove(0))
}

fn solved(setup: &Setup<'_>, place: Place) -> Outcome {
    solve_in(setup, tempfile::tempdir().unwrap().path(), place, None).unwrap()
}

/// How many codes two choices have in common, and how many there are.
fn in_common(weights: &Weights, [a, b]: [&Solved; 2]) -> [usize; 2] {
    let mut counts = [0; 2];
    for (id, _) in weights.tensors() {
        let (Some(a), Some(b)) = (a.get(*id), b.get(*id)) else { continue };
        assert_eq!((a.rows, a.cols, a.group), (b.rows, b.cols, b.group));
        let codes = |w: &[u8]| -> Vec<u8> {
            if a.bits == Bits::Four { w.iter().flat_map(|b| [b & 15, b >> 4]).collect() } else { w.to_vec() }
        };
        let (x, y) = (codes(a.words), codes(b.words));
        counts[0] += x.iter().zip(&y).filter(|(x, y)| x == y).count();
        counts[1] += x.len();
    }
    counts
}

/// Experts in int4, all else in int8, as the default profile has it.
fn mixed(id: TensorId) -> Format {
    match id.role.component() {
        _ if id.part == Part::Bias => Format::Source,
        Component::Router | Component::Norms => Format::Source,
        Component::Experts => Format::INT4_G128,
        _ => Format::INT8_G128,
    }
}

/// Divergence of a choice from the original on windows of the fixture's own tokens.
fn divergence(weights: &Arc<Weights>, found: &Outcome, windows: &[Window]) -> f64 {
    let candidate = Arc::new(weights.patched(vec![Patch::Solved(Arc::clone(&found.solved))]));
    let candidate = Candidate { weights: candidate, chunk: usize::MAX };
    let compared = lockstep::compare(weights, &[candidate], Place::Processor, windows, 1 << 30, &mut || true).unwrap();
    compared[0].summary().kld.mean
}

const GPU: Place = Place::Gpu { budget_bytes: None };

/// Everything that may be quantized in one format that fits.
fn all_in(weights: &Weights, bits: Bits, group: Group) -> impl Fn(TensorId) -> Format + Sync + '_ {
    move |id| match id.role.component() {
        _ if id.part == Part::Bias => Format::Source,
        Component::Router | Component::Norms => Format::Source,
        _ => fit(Format::Int { bits, group, zero: Zero::Middle }, weights.get(id).map_or(0, |w| w.cols)),
    }
}

/// How far losses may lie apart, as a share: of a matrix as it is aimed at, of the weighted search, and after feedback.
type Apart = [f64; 3];

/// Behind the same weights: the same sums agree to 1e-5, a hundred roundings; a search of a scale at a tie gives one of a thousand groups of a
/// matrix another one, whose loss differs by half at most; after feedback a tie broken the other way sends a row its own way, so that one
/// matrix may differ by 1 %.
const SAME: Apart = [1e-5, 5e-4, 1e-2];

/// Losses and counts of each matrix. Where a router may be at a tie, experts that differ in their tokens are not compared: `moved` is the
/// share of all visits that may lie elsewhere. Returns the largest differences.
fn assert_alike(cpu: &[Module], gpu: &[Module], apart: Apart, moved: f64) -> Apart {
    assert_eq!(cpu.len(), gpu.len());
    let mut largest = Apart::default();
    let visits: usize = cpu.iter().map(|m| m.tokens).sum();
    let elsewhere: usize = cpu.iter().zip(gpu).map(|(a, b)| a.tokens.abs_diff(b.tokens)).sum();
    assert!(elsewhere as f64 <= moved * visits as f64, "{elsewhere} of {visits}");
    for (a, b) in cpu.iter().zip(gpu) {
        assert_eq!((&a.id, &a.format), (&b.id, &b.format));
        if a.tokens != b.tokens {
            continue;
        }
        assert_eq!(a.pooled, b.pooled, "{}", a.id);
        assert!((a.damping - b.damping).abs() < 1e-12, "{} {} {}", a.id, a.damping, b.damping);
        let pairs = [(a.loss.whole, b.loss.whole), (a.loss.before, b.loss.before), (a.loss.after, b.loss.after)];
        for ((what, (x, y)), (most, found)) in ["whole", "before", "after"].iter().zip(pairs).zip(apart.iter().zip(&mut largest))
        {
            *found = found.max((x - y).abs() / x.abs().max(f64::MIN_POSITIVE));
            assert!((x - y).abs() <= most * x.abs(), "{} {what} {x} {y}", a.id);
        }
    }
    largest
}

/// Behind source layers both places see the same inputs but for rounding. Codes of one block are made by the same operations and differ
/// only after a tie within 1e-6 of what products between blocks leave: one in a thousand may be another, and losses of all matrices
/// together agree to 1e-4. Fails if the product between blocks has a hole at a tile's edge, if columns are visited in another order, or
/// if any of the refinements is left out (2 to 6 % of the losses).
#[test]
fn codes_are_those_of_the_processor() {
    if !has_gpu() {
        return;
    }
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let windows = windows(weights.spec().vocab, LENGTHS);
    for (bits, group) in [
        (Bits::Four, Group::Of(32)),
        (Bits::Four, Group::Of(64)),
        (Bits::Four, Group::Of(128)),
        (Bits::Eight, Group::Of(128)),
        (Bits::Eight, Group::Channel),
    ] {
        let format = all_in(&weights, bits, group);
        let setup = Setup { weights: &weights, format: &format, windows: &windows, advance: Advance::Source, feedback: true };
        let [cpu, gpu] = [Place::Processor, GPU].map(|place| solved(&setup, place));
        assert_alike(&cpu.modules, &gpu.modules, SAME, 0.0);
        let sums = [&cpu, &gpu].map(|o| o.modules.iter().map(|m| m.loss.after).sum::<f64>());
        let [same, all] = in_common(&weights, [&cpu.solved, &gpu.solved]);
        println!("{bits:?} {group:?}: {same} of {all} codes are the same, losses {:e} {:e}", sums[0], sums[1]);
        assert!(1000 * (all - same) < all, "{same} of {all}");
        assert!((sums[1] / sums[0] - 1.0).abs() < 1e-4, "{sums:?}");
    }
}

/// Within a layer a tie in its first matrices changes what the next ones see and aim at, and aims are made
/// of few tokens: 2.2e-3 of the first was measured for a down projection in `int4:g64`.
const BEHIND: Apart = [1e-2, 2e-2, 5e-2];

/// A changed code of int4 in a layer's attention moves logits of its router by up to 1e-3, and one in four hundred choices is that near to
/// another; it counts at the expert left and at the one taken.
const MOVED: f64 = 5e-3;

/// Each part chosen on the GPU behind the processor's own earlier parts, so that only what happens within a layer adds up: both streams of
/// hidden states are the same at its start. Fails if a matrix aims at its own weights (losses of the int4 recipes lie apart by per cents),
/// if debt misses its share of the gates, or if the source's inner activations are those of its own router.
#[test]
fn layers_behind_the_same_layers_are_chosen_alike() {
    if !has_gpu() {
        return;
    }
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let windows = windows(weights.spec().vocab, LENGTHS);
    let of = |group| all_in(&weights, Bits::Four, Group::Of(group));
    let (g32, g64) = (of(32), of(64));
    let recipes: [Recipe<'_>; 4] =
        [("mixed", &mixed, true), ("int4:g64", &g64, true), ("int4:g32", &g32, true), ("mixed, importance", &mixed, false)];
    for (name, format, feedback) in recipes {
        let setup = Setup { weights: &weights, format, windows: &windows, advance: Advance::Solved, feedback };
        let root = tempfile::tempdir().unwrap();
        let [whole, behind] = ["whole", "behind"].map(|n| root.path().join(n));
        [&whole, &behind].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        solve_in(&setup, &whole, Place::Processor, None).unwrap();
        let layers = (0..weights.spec().layers.len()).map(|l| format!("layer-{l:04}"));
        let parts: Vec<String> = std::iter::once("embed".into()).chain(layers).chain(["head".into()]).collect();
        let (mut same, mut all) = (0, 0);
        for part in &parts {
            let stopped = solve_in(&setup, &behind, GPU, Some(part));
            assert!(matches!(stopped, Err(SolveError::Interrupted)), "{name} {part}");
            let [cpu, gpu] = [&whole, &behind].map(|dir| {
                let mut solved = Solved::default();
                let ids = weights.tensors().iter().map(|(id, _)| *id);
                solved.open(&dir.join(format!("{part}.safetensors")), ids).unwrap();
                let modules = std::fs::read(dir.join(format!("{part}.json"))).unwrap();
                (solved, serde_json::from_slice::<Vec<Module>>(&modules).unwrap())
            });
            let [same_here, all_here] = in_common(&weights, [&cpu.0, &gpu.0]);
            let apart = assert_alike(&cpu.1, &gpu.1, BEHIND, MOVED);
            println!("{name} {part}: {same_here} of {all_here} codes are the same, losses apart by {apart:?}");
            (same, all) = (same + same_here, all + all_here);
            for kind in ["safetensors", "json"] {
                std::fs::copy(whole.join(part).with_extension(kind), behind.join(part).with_extension(kind)).unwrap();
            }
        }
        println!("{name}: {same} of {all} codes are the same");
        assert!(20 * (all - same) < all, "{name}: {same} of {all}");
    }
}

/// Second moments of experts that saw no token, one, or a few more than a tile of slices: `tr(W H W')` of every matrix. Fails if a pair
/// of the last, partial slab is left out or counted twice, or if an idle expert is not given all tokens.
#[test]
fn experts_of_any_number_of_tokens_have_their_moments() {
    if !has_gpu() {
        return;
    }
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let format = all_in(&weights, Bits::Four, Group::Of(128));
    let mut seen = Vec::new();
    for lengths in [&[5][..], &[40, 31, 64]] {
        let windows = windows(weights.spec().vocab, lengths);
        for feedback in [true, false] {
            let setup = Setup { weights: &weights, format: &format, windows: &windows, advance: Advance::Source, feedback };
            let [cpu, gpu] = [Place::Processor, GPU].map(|place| solved(&setup, place));
            assert_alike(&cpu.modules, &gpu.modules, SAME, 0.0);
            seen.extend(gpu.modules.iter().filter(|m| m.id.ends_with("down")).map(|m| if m.pooled { 0 } else { m.tokens }));
        }
    }
    assert!([0, 1].iter().all(|n| seen.contains(n)) && seen.iter().any(|n| (17..128).contains(n)), "{seen:?}");
}

/// Divergence from the original of what the GPU makes of `tiny`, each layer behind its own quantized layers, is within 1e-3, which is
/// what is promised, of what the processor makes. Each run parts from each other at the first tie: it becomes a tenth of the codes of the third
/// layer through the routers, and a token that goes to another expert is a hundredth of the divergence. So both are asked in several orders of
/// the same windows and their means are compared: within what is promised and twice the standard error of their difference. Fails if
/// experts' moments miss their gates.
#[test]
fn artifacts_diverge_alike() {
    if !has_gpu() {
        return;
    }
    let weights = Arc::new(Weights::open(&fixture("tiny")).unwrap());
    let asked = windows(weights.spec().vocab, &LENGTHS.repeat(8));
    let g64 = all_in(&weights, Bits::Four, Group::Of(64));
    let recipes: [Recipe<'_>; 3] = [("mixed", &mixed, true), ("int4:g64", &g64, true), ("mixed, importance", &mixed, false)];
    for (name, format, feedback) in recipes {
        let ask = |place| {
            let each: Vec<f64> = (0..LENGTHS.len())
                .map(|turn| {
                    let mut windows = asked.clone();
                    windows.rotate_left(turn);
                    let setup = Setup { weights: &weights, format, windows: &windows, advance: Advance::Solved, feedback };
                    divergence(&weights, &solved(&setup, place), &asked)
                })
                .collect();
            println!("{name} {place:?}: KLD {each:.5?}");
            let n = each.len() as f64;
            let mean = each.iter().sum::<f64>() / n;
            (mean, each.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0) / n)
        };
        let [cpu, gpu] = [Place::Processor, GPU].map(ask);
        let error = (cpu.1 + gpu.1).sqrt();
        assert!((cpu.0 - gpu.0).abs() < 1e-3 + 2.0 * error, "{name}: {} {} +- {error}", cpu.0, gpu.0);
    }
}

/// Every family's plan is walked on the GPU, shared experts and latent attention among them; what its losses are, the processor's are to
/// 1 % in all. Fails if a step in tiles takes a buffer of another width.
#[test]
fn every_family_is_quantized_on_a_gpu() {
    if !has_gpu() {
        return;
    }
    for entry in std::fs::read_dir(fixture("reference")).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let weights = Arc::new(Weights::open(&path).unwrap());
        let format = all_in(&weights, Bits::Four, Group::Of(32));
        let windows = windows(weights.spec().vocab, LENGTHS);
        let setup = Setup { weights: &weights, format: &format, windows: &windows, advance: Advance::Source, feedback: true };
        let [cpu, gpu] = [Place::Processor, GPU].map(|place| solved(&setup, place));
        let sum = |o: &Outcome| o.modules.iter().map(|m| m.loss.after / m.loss.whole.max(1e-30)).sum::<f64>();
        println!("{}: {} matrices, relative losses {:.5} {:.5}", path.display(), cpu.modules.len(), sum(&cpu), sum(&gpu));
        assert_eq!(cpu.modules.len(), gpu.modules.len());
        assert!((sum(&gpu) / sum(&cpu) - 1.0).abs() < 1e-2, "{}", path.display());
    }
}

/// A machine that cannot do what is asked is told so before anything lies there that the next try would trip over.
#[test]
fn without_a_gpu_nothing_is_begun() {
    if moe::engine::cuda::Device::open(0).is_ok() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let (model, out) = (fixture("tiny"), out.to_str().unwrap());
    let args = ["quantize", model.to_str().unwrap(), "-o", out, "--method", "gptq", "--device", "cuda"];
    let ran = std::process::Command::new(env!("CARGO_BIN_EXE_moe")).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(2), "{said}");
    assert!(said.contains("hint: "), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{said}");
}

/// `--device cuda` is refused where it would do nothing, and is not where other stages compute there.
#[test]
fn a_device_is_refused_only_where_nothing_uses_it() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (fixture("tiny"), dir.path().join("out"));
    let status = |command: &str| {
        let args = [command, model.to_str().unwrap(), "-o", out.to_str().unwrap(), "--device", "cuda", "--dry-run"];
        std::process::Command::new(env!("CARGO_BIN_EXE_moe")).args(args).output().unwrap().status.code()
    };
    assert_eq!((status("quantize"), status("prepare")), (Some(1), Some(0)));
}
