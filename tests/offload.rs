//! Experts outside of the GPU's memory change nothing but the time: logits and tokens have the same bits with any number of slots.
//!
//! Needs a GPU: prints SKIPPED without one, fails without one under `MOE_REQUIRE_GPU=1`.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::has_gpu;
use moe::artifact::lookahead::Lookahead;
use moe::artifact::weights::Weights;
use moe::calib::lookahead::Map;
use moe::engine::cuda::ahead::Ahead;
use moe::engine::cuda::routing::Routing;
use moe::engine::cuda::slots::{Traffic, Twin};
use moe::engine::cuda::{CudaError, Engine, Kernels, LoadError, Options};
use moe::engine::{Batch, Engine as AnyEngine, EngineError, Event, Rows, Turn};
use moe::ids::{Role, SeqId};
use moe::model::family;
use moe::model::plan::Slot;
use moe::model::spec::{Ffn, ModelSpec};
use moe::quant::format::Format;
use moe::sample::{Sampler, SamplerConfig, argmax};
use moe::tiers::{Layer, Policy};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// One model on the device at a time.
static DEVICE: Mutex<()> = Mutex::new(());

fn one() -> std::sync::MutexGuard<'static, ()> {
    DEVICE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny")
}

fn tiny(options: Options) -> Engine {
    open(&fixture(), options)
}

fn open(dir: &Path, options: Options) -> Engine {
    let weights = Arc::new(Weights::open(dir).unwrap());
    Engine::open(weights, options, &mut |_, _| (), &mut |_| ()).unwrap()
}

/// Many experts in int4, in the shape of a small Qwen3.
fn many(experts: usize, top_k: usize) -> ModelSpec {
    shape(experts, top_k, 512, 256)
}

fn shape(experts: usize, top_k: usize, width: usize, inner: usize) -> ModelSpec {
    family::read(&qwen3(experts, top_k, width, inner)).unwrap().1
}

fn qwen3(experts: usize, top_k: usize, width: usize, inner: usize) -> serde_json::Value {
    serde_json::json!({
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "vocab_size": 1009, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner, "intermediate_size": 512, "norm_topk_prob": true,
    })
}

fn greedy() -> Sampler {
    Sampler::new(SamplerConfig::default()).unwrap()
}

/// What goes over the link while a sequence of its own gets so many tokens.
fn decode(engine: &mut Engine, steps: usize) -> Traffic {
    engine.release(SeqId(0));
    let mut batch = Batch::default();
    batch.push(SeqId(0), 0, &[1, 2, 3], Rows::Last, 1024);
    engine.pass(&batch).unwrap();
    engine.tiers().unwrap().take_traffic().unwrap();
    let (mut tokens, mut sampler) = (vec![1, 2, 3, 4], greedy());
    let turn = Turn { seq: SeqId(0), tokens: &mut tokens, sampler: &mut sampler };
    engine.decode(&mut [turn], steps, 1024, &mut |_| ControlFlow::Continue(())).unwrap();
    engine.tiers().unwrap().take_traffic().unwrap()
}

fn random(spec: &ModelSpec, options: Options) -> Engine {
    random_with(spec, Format::Source, options)
}

/// The same with attention in this format.
fn random_with(spec: &ModelSpec, attention: Format, options: Options) -> Engine {
    let format = |id: moe::ids::TensorId, _: usize| match id.role {
        Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => Format::INT4_G128,
        Role::Q | Role::K | Role::V | Role::O => attention,
        _ => Format::Source,
    };
    Engine::random(spec, &format, 5, options, &mut |_| ()).unwrap()
}

/// Bits of the logits of prompts and continuations of one to eight sequences, and the tokens that were chosen.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    logits: Vec<u32>,
    tokens: Vec<u32>,
}

fn run(engine: Engine) -> (Found, Engine) {
    run_with(engine, &mut |_| ()).unwrap()
}

/// The same, where something happens to the engine before the prompts and the continuations of every batch.
fn run_with(engine: Engine, happen: &mut dyn FnMut(&mut Engine)) -> Result<(Found, Engine), EngineError> {
    let mut engine = AnyEngine::from(engine);
    let mut happen = |engine: &mut AnyEngine| match engine {
        AnyEngine::Cuda(engine) => happen(engine),
        AnyEngine::Cpu(_) => unreachable!("it was opened on a GPU"),
    };
    let vocab = engine.spec().vocab;
    let mut found = Found { logits: Vec::new(), tokens: Vec::new() };
    let keep = |engine: &AnyEngine, found: &mut Found| {
        let logits = engine.slot(Slot::Logits).unwrap();
        assert!(logits.iter().all(|x| x.is_finite()));
        found.logits.extend(logits.iter().map(|x| x.to_bits()));
        logits.chunks_exact(vocab).map(|row| argmax(row) as u32).collect::<Vec<u32>>()
    };
    for batch in [1, 2, 3, 4, 8] {
        let seqs: Vec<SeqId> = (0..batch).map(SeqId).collect();
        let mut histories = Vec::new();
        happen(&mut engine);
        for &seq in &seqs {
            let len = [70, 5, 200, 1][seq.0 as usize % 4];
            let prompt: Vec<u32> = (0..len).map(|i| (i * 7 + seq.0 * 131 + 3) % vocab as u32).collect();
            let mut pass = Batch::default();
            pass.push(seq, 0, &prompt, Rows::Last, 512);
            engine.pass(&pass)?;
            histories.push([prompt, keep(&engine, &mut found)].concat());
        }
        let mut on = |chosen: &[u32]| {
            found.tokens.extend_from_slice(chosen);
            ControlFlow::Continue(())
        };
        let mut samplers = vec![greedy(); seqs.len()];
        let turns = seqs.iter().zip(&mut histories).zip(&mut samplers);
        let mut turns: Vec<Turn<'_>> = turns.map(|((&seq, tokens), sampler)| Turn { seq, tokens, sampler }).collect();
        happen(&mut engine);
        engine.decode(&mut turns, 20, 512, &mut on)?;
        let mut pass = Batch::default();
        for (&seq, history) in seqs.iter().zip(&histories) {
            pass.push(seq, engine.cached(seq), &history[history.len() - 1..], Rows::Last, 512);
        }
        engine.pass(&pass)?;
        keep(&engine, &mut found);
        seqs.iter().for_each(|&s| engine.release(s));
    }
    match engine {
        AnyEngine::Cuda(engine) => Ok((found, *engine)),
        AnyEngine::Cpu(_) => unreachable!("it was opened on a GPU"),
    }
}

/// Exact. Fails if a slot is given to another expert while one of this step needs it, if a copy is a byte short, or if addresses do
/// not follow a move.
fn same_with_any_slots(open: &dyn Fn(Options) -> Engine, slots: &[usize], kernels: Kernels) {
    same_with_any_slots_and(open, slots, &Options { kernels, ..Options::default() });
}

fn same_with_any_slots_and(open: &dyn Fn(Options) -> Engine, slots: &[usize], options: &Options) {
    let kernels = options.kernels;
    let (expected, whole) = run(open(options.clone()));
    assert!(whole.tiers().is_none());
    drop(whole);
    assert!(!expected.tokens.is_empty());
    for &n in slots {
        let (found, engine) = run(open(Options { expert_slots: Some(n), ..options.clone() }));
        let traffic = engine.tiers().unwrap().take_traffic().unwrap();
        println!("{n} slots, {kernels:?}: hits {:.3}, {traffic:?}", traffic.hit_rate());
        assert!(found == expected, "{n} slots, {kernels:?}");
    }
}

#[test]
fn a_small_model_is_the_same_with_any_slots() {
    if has_gpu() {
        let _one = one();
        same_with_any_slots(&tiny, &[1, 2, 4, 7, 8], Kernels::Fast);
    }
}

/// Logits and twenty tokens after prompts of so many tokens, one sequence at a time.
fn run_alone(mut engine: Engine, lens: &[u32]) -> (Found, Engine) {
    let vocab = engine.spec().vocab as u32;
    let mut found = Found { logits: Vec::new(), tokens: Vec::new() };
    for &len in lens {
        let mut tokens: Vec<u32> = (0..=len).map(|i| (i * 7 + len + 3) % vocab).collect();
        let mut pass = Batch::default();
        pass.push(SeqId(0), 0, &tokens[..len as usize], Rows::Last, 4096);
        engine.pass(&pass).unwrap();
        let turn = Turn { seq: SeqId(0), tokens: &mut tokens, sampler: &mut greedy() };
        engine.decode(&mut [turn], 20, 4096, &mut |_| ControlFlow::Continue(())).unwrap();
        found.tokens.extend_from_slice(&tokens);
        let mut pass = Batch::default();
        pass.push(SeqId(0), engine.cached(SeqId(0)), &tokens[tokens.len() - 1..], Rows::Last, 4096);
        engine.pass(&pass).unwrap();
        found.logits.extend(engine.slot(Slot::Logits).unwrap().iter().map(|x| x.to_bits()));
        engine.release(SeqId(0));
    }
    (found, engine)
}

/// All layers of one token by one kernel, and by those that it replaces, which run where an expert may be missing: exact, at contexts around
/// pages and at one that more than eight blocks share. Fails if `fold` takes segments of another length, if a block's arrivals are
/// counted for another layer, if a float is taken for one of the layer before, if rows in several ways take each other's columns, or if a
/// warp takes another's page; for prompts of 2 to 4 tokens, if kernels that read a list are left without one; with blocks slowed down
/// (memcheck), if one without rows of o asks for keys where a warp still sums.
#[test]
fn all_layers_by_one_kernel_give_the_same_bits() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let of = |changes: &[(&str, usize)]| {
        let mut config = qwen3(64, 8, 1024, 256);
        changes.iter().for_each(|&(key, value)| config[key] = value.into());
        config["max_position_embeddings"] = 4096.into();
        family::read(&config).unwrap().1
    };
    let cases = [
        (of(&[]), Format::INT8_G128),
        (of(&[("head_dim", 128), ("num_experts", 128), ("moe_intermediate_size", 768)]), Format::INT8_G128),
        (
            of(&[("hidden_size", 128), ("num_attention_heads", 4), ("num_experts", 4), ("num_experts_per_tok", 1)]),
            Format::INT4_G128,
        ),
        (
            of(&[
                ("hidden_size", 4096),
                ("num_attention_heads", 16),
                ("num_experts_per_tok", 2),
                ("moe_intermediate_size", 1024),
            ]),
            Format::INT4_G128,
        ),
        (
            of(&[
                ("hidden_size", 4096),
                ("num_attention_heads", 32),
                ("num_key_value_heads", 4),
                ("head_dim", 128),
                ("num_experts", 4),
                ("num_experts_per_tok", 2),
                ("moe_intermediate_size", 4096),
            ]),
            Format::INT8_G128,
        ),
        (
            of(&[
                ("hidden_size", 1024),
                ("num_attention_heads", 16),
                ("head_dim", 64),
                ("num_experts", 4),
                ("num_experts_per_tok", 3),
                ("moe_intermediate_size", 14336),
            ]),
            Format::INT4_G128,
        ),
        (
            of(&[
                ("hidden_size", 1024),
                ("num_attention_heads", 16),
                ("head_dim", 64),
                ("num_experts", 5),
                ("num_experts_per_tok", 3),
                ("moe_intermediate_size", 7168),
            ]),
            Format::INT4_G128,
        ),
        // eight blocks a head: of 1500 tokens each has more pages than warps
        (of(&[("num_attention_heads", 16), ("num_key_value_heads", 16), ("head_dim", 128)]), Format::INT8_G128),
    ];
    for (spec, attention) in cases {
        let options = Options::default();
        let lens = [1, 2, 4, 15, 16, 130, 1500];
        let (expected, engine) = run_alone(random_with(&spec, attention, options.clone()), &lens);
        assert!(engine.runs_layers_at_once() || engine.device().properties().sm != 90, "{spec:?}");
        drop(engine);
        let (_, router) = spec.routers().next().unwrap();
        for slots in [router.top_k, router.experts - 1] {
            let (found, engine) =
                run_alone(random_with(&spec, attention, Options { expert_slots: Some(slots), ..options.clone() }), &lens);
            assert!(!engine.runs_layers_at_once());
            assert!(found == expected, "{slots} slots, {attention:?}, {spec:?}");
        }
    }
}

/// Exact. Fails if what is brought ahead takes the place of an expert in use, is used before all of it has come, or is not where the
/// tables say; if it is counted in vain or does not come at all, the counts at the end do.
#[test]
fn experts_brought_ahead_change_nothing() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    for ahead in [1, 3, 32] {
        let options = Options { ahead: Ahead::AtMost(ahead), ..Options::default() };
        same_with_any_slots_and(&tiny, &[1, 2, 5], &options);
        let spec = many(64, 8);
        same_with_any_slots_and(&|o| random(&spec, o), &[1, 8, 20, 63], &options);
    }
    let spec = many(512, 10);
    same_with_any_slots_and(
        &|o| random(&spec, o),
        &[10, 160],
        &Options { ahead: Ahead::AtMost(4), link_limit: Some(5e9), ..Options::default() },
    );
}

/// Where nobody says how many come ahead, both ways are tried and the faster stays, which changes no bit: what is said of it is what is done
/// from then on. Guesses that are never right only cost, on a link that is always busy. Fails if a turn keeps the graph of the one before.
#[test]
fn what_is_faster_is_found() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let options = Options { ahead: Ahead::Tried, ..Options::default() };
    let spec = many(64, 8);
    same_with_any_slots_and(&|o| random(&spec, o), &[20], &options);
    for recall in [1.0, 0.0] {
        let options = Options { expert_slots: Some(32), link_limit: Some(2e9), ..options.clone() };
        let mut engine = random(&spec, options);
        engine.set_routing(Some(&Routing::Local(0.3)), 1, 300, Some(recall)).unwrap();
        assert!(decode(&mut engine, 100).ahead > 0);
        let notes = engine.take_notes();
        println!("{notes:?}");
        let [comes, none] =
            ["experts come a layer ahead", "no experts come a layer ahead"].map(|said| notes.iter().any(|n| n.starts_with(said)));
        assert!(comes != none && (recall > 0.0 || none), "{notes:?}");
        assert_eq!(decode(&mut engine, 100).ahead > 0, comes);
    }
}

/// Guesses that are always right are all used where nothing limits them, half of them where half are right. 8 of 64 experts, the last two
/// of three layers: 3200 choices; about 40 % of them are in none of 32 slots, of which half is known to 0.025 in two standard
/// deviations; four of them.
#[test]
fn what_is_brought_ahead_is_counted() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    for recall in [1.0, 0.5] {
        let mut engine = random(&spec, Options { expert_slots: Some(32), ahead: Ahead::AtMost(8), ..Options::default() });
        engine.set_routing(Some(&Routing::Local(0.3)), 1, 200, Some(recall)).unwrap();
        let traffic = decode(&mut engine, 200);
        println!("{traffic:?}");
        let of_two_layers = traffic.used as f64 / (traffic.missed() as f64 * 2.0 / 3.0);
        assert!((of_two_layers / recall - 1.0).abs() < 0.1, "{recall}: {of_two_layers}");
        assert!(recall < 1.0 || traffic.used == traffic.ahead, "{traffic:?}");
    }
}

/// Maps of a model to its own routers, each moved to the norm of the router before, times `sign`.
fn own_routers(dir: &Path, sign: f32) -> Lookahead {
    let weights = Weights::open(dir).unwrap();
    let mut maps = Lookahead::default();
    for layer in 1..weights.spec().layers.len() as u32 {
        let mut map = Map::next_router(&weights, layer - 1, layer).unwrap();
        map.matrix.iter_mut().for_each(|w| *w *= sign);
        let shape = [map.shift.len(), map.matrix.len() / map.shift.len()];
        maps.insert(layer, shape, map.rounded().0);
    }
    maps
}

/// A map is asked in the place of the next router, behind this layer's norm: one that is that router names the same, but for what bf16 cannot
/// tell apart, three of 100 at most; one that is its opposite names what is wanted least. No bit of the result changes. Fails if the map of
/// another layer is taken, if the input is behind the next layer's norm, or if maps are not taken at all.
#[test]
fn maps_say_what_comes_ahead() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let options = |lookahead| Options {
        expert_slots: Some(3),
        ahead: Ahead::AtMost(2),
        lookahead: Arc::new(lookahead),
        ..Options::default()
    };
    let used = |lookahead| {
        let traffic = decode(&mut tiny(options(lookahead)), 200);
        println!("{traffic:?}");
        traffic.used as f64 / traffic.ahead as f64
    };
    let [router, map, opposite] = [Lookahead::default(), own_routers(&fixture(), 1.0), own_routers(&fixture(), -1.0)].map(used);
    assert!((map - router).abs() < 0.03 && opposite < 0.5 * router, "{router} {map} {opposite}");
    let lookahead = Arc::new(own_routers(&fixture(), -1.0));
    same_with_any_slots_and(&tiny, &[2, 5], &Options { lookahead, ahead: Ahead::AtMost(2), ..Options::default() });
}

/// Guesses that are mostly wrong are given up, and that is said; tokens go on as before. Fails if the graphs that bring them are kept.
#[test]
fn what_is_brought_in_vain_is_given_up() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let mut engine = random(&spec, Options { expert_slots: Some(32), ahead: Ahead::AtMost(8), ..Options::default() });
    engine.set_routing(Some(&Routing::Uniform), 1, 600, Some(0.1)).unwrap();
    assert!(decode(&mut engine, 300).ahead > 0);
    assert_eq!(decode(&mut engine, 300).ahead, 0);
    assert!(engine.take_notes().iter().any(|n| n.contains("no more experts are brought ahead")));
}

#[test]
fn plain_kernels_are_the_same_with_any_slots() {
    if has_gpu() {
        let _one = one();
        same_with_any_slots(&tiny, &[1, 3], Kernels::Plain);
    }
}

#[test]
fn many_experts_are_the_same_with_any_slots() {
    if has_gpu() {
        let _one = one();
        let spec = many(64, 8);
        same_with_any_slots(&|o| random(&spec, o), &[1, 8, 32, 63, 64], Kernels::Fast);
        let spec = many(512, 10);
        same_with_any_slots(&|o| random(&spec, o), &[10, 160], Kernels::Fast);
        let spec = many(4, 4); // every token chooses all, a prompt of one as well
        same_with_any_slots(&|o| random(&spec, o), &[1, 3], Kernels::Fast);
    }
}

/// A layer of 207 MB passes through half a ring of 134 MB in two waves.
#[test]
fn prompts_are_the_same_in_several_waves() {
    if has_gpu() {
        let _one = one();
        let spec = shape(128, 8, 1024, 1024);
        same_with_any_slots(&|o| random(&spec, o), &[8, 40], Kernels::Fast);
    }
}

/// Host memory of which the least works, in steps up to what a copy of every expert takes: first experts on the disk alone, read
/// from the model's files or from a file of their own, then none. Exact; fails if an address is left behind where a copy was, if
/// what a prompt reads ahead is taken for another expert, or if a permanent resident leaves its slot.
fn same_with_little_host_memory(open: &dyn Fn(Options) -> Engine, slots: usize, kernels: Kernels) {
    let options = Options { kernels, expert_slots: Some(slots), ..Options::default() };
    let (expected, roomy) = run(open(Options { expert_slots: None, ..options.clone() }));
    drop(roomy);
    let plan = open(options.clone()).vram().clone();
    let (least, all) = (plan.host.smallest_bytes, plan.host.bytes);
    for host_bytes in [least, (2 * least + all) / 3, (least + 2 * all) / 3, all] {
        let (found, engine) = run(open(Options { host_bytes, ..options.clone() }));
        let plan = engine.vram();
        let traffic = engine.tiers().unwrap().take_traffic().unwrap();
        println!(
            "{slots} slots, {host_bytes} bytes of {least} to {all}, {kernels:?}: permanent {:?}, copies {:?}, {traffic:?}",
            plan.host.permanent, plan.host.slots
        );
        assert!(plan.host.bytes <= host_bytes && (plan.host.disk_bytes > 0) == (traffic.disk_bytes > 0));
        assert!(found == expected, "{slots} slots, {host_bytes} bytes, {kernels:?}");
    }
}

#[test]
fn a_small_model_is_the_same_with_little_host_memory() {
    if has_gpu() {
        let _one = one();
        same_with_little_host_memory(&tiny, 2, Kernels::Fast);
        same_with_little_host_memory(&tiny, 5, Kernels::Fast);
        same_with_little_host_memory(&tiny, 3, Kernels::Plain);
    }
}

#[test]
fn many_experts_are_the_same_with_little_host_memory() {
    if has_gpu() {
        let _one = one();
        let spec = many(64, 8);
        same_with_little_host_memory(&|o| random(&spec, o), 8, Kernels::Fast);
        same_with_little_host_memory(&|o| random(&spec, o), 24, Kernels::Fast);
    }
}

/// A budget may change at any time, on every tier.
#[test]
fn slots_may_come_and_go_while_a_model_runs() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let (expected, whole) = run(random(&spec, Options::default()));
    drop(whole);
    let options = Options { expert_slots: Some(20), ..Options::default() };
    let plan = random(&spec, options.clone()).vram().clone();
    for host_bytes in [plan.host.bytes, plan.host.bytes * 9 / 10, plan.host.smallest_bytes] {
        let engine = random(&spec, Options { host_bytes, ..options.clone() });
        let mut wanted = [8, 40, 1, 63, 64, 20, 12].into_iter().cycle();
        let mut change = |engine: &mut Engine| {
            let slots = wanted.next().unwrap();
            engine.set_expert_slots(slots).unwrap();
            for ((_, had), least) in engine.tiers().unwrap().slots().into_iter().zip(&engine.vram().host.permanent) {
                assert_eq!(had, slots.max(*least));
            }
        };
        let (found, _) = run_with(engine, &mut change).unwrap();
        assert!(found == expected, "{host_bytes}");
    }
}

/// Three prompts of 700 tokens, and twenty tokens of each: more than the pages of the smallest pool.
fn run_long(engine: Engine) -> (Found, Engine) {
    let mut engine = AnyEngine::from(engine);
    let vocab = engine.spec().vocab as u32;
    let mut found = Found { logits: Vec::new(), tokens: Vec::new() };
    let mut histories: Vec<Vec<u32>> = (0..3).map(|s| (0..700).map(|i| (i * 7 + s * 131 + 3) % vocab).collect()).collect();
    for (seq, history) in (0..).map(SeqId).zip(&mut histories) {
        for start in [0, 350] {
            let mut pass = Batch::default();
            pass.push(seq, start, &history[start..start + 350], Rows::Last, 1024);
            engine.pass(&pass).unwrap();
        }
        let logits = engine.slot(Slot::Logits).unwrap();
        found.logits.extend(logits.iter().map(|x| x.to_bits()));
        history.push(argmax(logits) as u32);
    }
    let mut samplers = vec![greedy(); 3];
    let turns = (0..).map(SeqId).zip(&mut histories).zip(&mut samplers);
    let mut turns: Vec<Turn<'_>> = turns.map(|((seq, tokens), sampler)| Turn { seq, tokens, sampler }).collect();
    engine.decode(&mut turns, 20, 1024, &mut |_| ControlFlow::Continue(())).unwrap();
    found.tokens.extend(histories.into_iter().flatten());
    match engine {
        AnyEngine::Cuda(engine) => (found, *engine),
        AnyEngine::Cpu(_) => unreachable!("it was opened on a GPU"),
    }
}

/// One byte less than all experts need beside the smallest pool: pages come out of the slots, within the budget. Fails if keys are
/// left behind when the pool grows.
#[test]
fn pages_take_the_place_of_experts() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let (expected, whole) = run_long(random(&spec, Options::default()));
    let resident = whole.vram().resident_bytes;
    drop(whole);
    let few = random(&spec, Options { cache_tok: 1, budget_bytes: Some(resident), ..Options::default() }).vram().resident_bytes;
    let engine = random(&spec, Options { cache_tok: 1, budget_bytes: Some(few - 1), ..Options::default() });
    let before = engine.vram().clone();
    assert!(before.offloaded_bytes > 0 && before.cache_tok < 2100, "{before:?}");
    let (found, mut engine) = run_long(engine);
    let (notes, after) = (engine.take_notes(), engine.vram());
    println!("{notes:?}");
    assert!(found == expected);
    assert!(after.cache_tok >= 2160 && after.slots < before.slots && after.total_bytes <= after.budget_bytes, "{after:?}");
    assert!(notes.iter().any(|n| n.contains("slots instead of")), "{notes:?}");
}

/// Takes what is left of the GPU's memory until it is dropped, as another process would.
struct Ballast(Vec<u64>);

impl Ballast {
    fn all(engine: &Engine) -> Self {
        engine.device().memory().unwrap();
        let mut taken = Vec::new();
        let mut bytes: usize = 1 << 36;
        while bytes >= 1 << 16 {
            // SAFETY: the context of the engine's device is current to this thread since it was asked for its memory.
            match unsafe { cudarc::driver::result::malloc_sync(bytes) } {
                Ok(at) => taken.push(at),
                Err(_) => bytes /= 2,
            }
        }
        Self(taken)
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        for at in self.0.drain(..) {
            // SAFETY: allocated above, freed once.
            unsafe { cudarc::driver::result::free_sync(at).unwrap() }
        }
    }
}

/// All memory is taken by someone else once the model is loaded: pages still come, out of slots, and a pass that needs more than
/// all slots together is refused and leaves a working engine.
#[test]
fn a_full_gpu_costs_slots_or_is_said() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = shape(128, 8, 1024, 512);
    let (expected, whole) = run_long(random(&spec, Options::default()));
    let total = whole.vram().total_bytes;
    drop(whole);
    let few = |slots| Options { expert_slots: Some(slots), cache_tok: 1, budget_bytes: Some(2 * total), ..Options::default() };
    let mut engine = random(&spec, few(96));
    let ballast = Ballast::all(&engine);
    let mut pass = Batch::default();
    (0..16).for_each(|s| pass.push(SeqId(100 + s), 0, &vec![1; 1000], Rows::All, 1024));
    let error = engine.pass(&pass).unwrap_err();
    assert!(matches!(error, EngineError::Cuda(CudaError::Memory { .. }) | EngineError::CacheFull { .. }), "{error}");
    (0..16).for_each(|s| engine.release(SeqId(100 + s)));
    let (found, mut engine) = run_long(engine);
    println!("{:?}, {:?}", engine.take_notes(), engine.tiers().unwrap().slots());
    assert!(found == expected && engine.vram().cache_tok >= 2160);
    drop(ballast);
}

/// Page-locked memory of which a system gives less than planned: the rest is done without, and said.
#[test]
fn refused_page_locked_memory_costs_time_only() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let (expected, whole) = run(tiny(Options::default()));
    drop(whole);
    let options = Options { expert_slots: Some(4), ..Options::default() };
    let plan = tiny(options.clone()).vram().clone();
    for share in [90, 75, 60] {
        let locked_limit = Some(plan.host.bytes * share / 100);
        let (found, mut engine) = run(tiny(Options { locked_limit, ..options.clone() }));
        let notes = engine.take_notes();
        println!("{share} %: {notes:?}");
        assert!(found == expected && notes.iter().any(|n| n.contains("page-locked")), "{share} %: {notes:?}");
    }
    let weights = Arc::new(Weights::open(&fixture()).unwrap());
    let none = Options { locked_limit: Some(1), ..options };
    let refused = Engine::open(weights, none, &mut |_, _| (), &mut |_| ()).err();
    assert!(matches!(refused, Some(LoadError::Cuda(CudaError::PageLocked { .. }))), "{refused:?}");
}

/// The files of a model whose experts are read while it runs. Deleted, they can still be read; cut short, the run ends with an
/// error that names the file, without a signal and without another token, and what came before is right.
#[test]
fn a_model_that_is_deleted_or_cut_short_gives_no_wrong_token() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let (expected, whole) = run(tiny(Options::default()));
    drop(whole);
    let options = Options { expert_slots: Some(2), ..Options::default() };
    let least = tiny(options.clone()).vram().host.smallest_bytes;
    let copied = || {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let engine = open(dir.path(), Options { host_bytes: least, ..options.clone() });
        assert!(engine.vram().host.disk_bytes > 0);
        (dir, engine)
    };
    let (dir, engine) = copied();
    dir.close().unwrap();
    assert!(run(engine).0 == expected);

    let (dir, engine) = copied();
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap();
    let half = file.metadata().unwrap().len() / 2;
    let mut calls = 0;
    let error = run_with(engine, &mut |_| {
        calls += 1;
        if calls == 4 {
            file.set_len(half).unwrap();
        }
    });
    let error = error.map(drop).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, EngineError::Cuda(CudaError::Read(_))) && text.contains("model.safetensors"), "{text}");
}

/// The kernel follows the rule of its host twin. Exact; fails if decay, rise, or the order of equal experts differ.
#[test]
fn slots_hold_what_the_rule_says() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    for policy in [Policy::Static, Policy::Lru, Policy::Lfu, Policy::Lrfu { shift: 2 }, Policy::Lrfu { shift: 6 }] {
        follows_the_rule(&spec, policy, u64::MAX);
    }
    let all = random(&spec, Options { expert_slots: Some(20), ..Options::default() }).vram().host.bytes;
    follows_the_rule(&spec, Policy::Lrfu { shift: 3 }, all * 9 / 10);
}

fn follows_the_rule(spec: &ModelSpec, policy: Policy, host_bytes: u64) {
    let mut engine = random(spec, Options { expert_slots: Some(20), policy: Some(policy), host_bytes, ..Options::default() });
    let layer = Layer { experts: 64, top_k: 8, slot_bytes: 0, visits: Vec::new() };
    let permanent = engine.vram().host.permanent.clone();
    assert_eq!(permanent.iter().any(|&p| p > 0), host_bytes < u64::MAX);
    let mut twins: Vec<Twin> = permanent.iter().map(|&p| Twin::new(policy, &layer, 20).permanent(p)).collect();
    let mut moved = 0;
    for step in 0..40u32 {
        let mut batch = Batch::default();
        let seqs = 1 + step % 3;
        for seq in 0..seqs {
            batch.push(SeqId(seq), engine.cached(SeqId(seq)), &[(step * 37 + seq * 11) % 1009], Rows::Last, 512);
        }
        let mut see = |event: Event<'_>| {
            let Event::Routed { layer, experts, .. } = event;
            moved += twins[layer.0 as usize].step(experts);
        };
        engine.forward(&batch, Some(&mut see)).unwrap();
        for (l, twin) in twins.iter().enumerate() {
            let residents = engine.tiers().unwrap().residents(l as u32).unwrap();
            assert_eq!(residents, twin.owner(), "{policy:?}, step {step}, layer {l}");
        }
    }
    let traffic = engine.tiers().unwrap().take_traffic().unwrap();
    assert_eq!(moved as u64, traffic.fetched + traffic.direct);
    assert!(moved > 100, "{policy:?}: {moved}");
}

/// Choices made beforehand are what a decode step uses, and they repeat as asked: with a slot for each of the last two tokens'
/// experts, nothing that repeats is fetched again. 8 of 64 experts, 200 steps, 3 layers: 4800 choices of probability 0.5, standard
/// deviation 0.007; four of them. Some of the others are still in a slot, at most 8 of 56.
#[test]
fn routing_made_beforehand_is_followed() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let mut engine = random(&spec, Options { expert_slots: Some(16), policy: Some(Policy::Lru), ..Options::default() });
    engine.set_routing(Some(&Routing::Local(0.5)), 1, 200, None).unwrap();
    let traffic = decode(&mut engine, 200);
    assert_eq!((traffic.steps, traffic.chosen), (600, 4800));
    let hits = traffic.hit_rate();
    assert!(hits > 0.5 - 0.03 && hits < 0.5 + 0.5 * 8.0 / 56.0 + 0.03, "{hits}");
    let layers = spec.layers.iter().filter(|l| matches!(l.ffn, Ffn::Moe(_))).count();
    assert_eq!(layers, 3);
}

/// A slower link is imitated: as many bytes as were counted take at least their time.
#[test]
fn a_limited_link_is_no_faster() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let limit = 1e9;
    let (_, engine) = run(random(&spec, Options { expert_slots: Some(8), link_limit: Some(limit), ..Options::default() }));
    let traffic = engine.tiers().unwrap().take_traffic().unwrap();
    assert!(traffic.bytes > 0 && traffic.busy_ns as f64 >= 0.99 * traffic.bytes as f64 / limit * 1e9, "{traffic:?}");
}

/// What is too little for one slot a layer is refused, and the refusal says what is needed.
#[test]
fn a_budget_under_the_minimum_is_refused() {
    if !has_gpu() {
        return;
    }
    let _one = one();
    let spec = many(64, 8);
    let format = |_: moe::ids::TensorId, _: usize| Format::Source;
    let open =
        |budget| Engine::random(&spec, &format, 5, Options { budget_bytes: Some(budget), ..Options::default() }, &mut |_| ());
    let Some(CudaError::Budget { smallest_bytes, .. }) = open(1 << 20).err() else { panic!("a megabyte is too little") };
    assert!(open(smallest_bytes - 1).is_err());
    open(smallest_bytes).unwrap();
}
