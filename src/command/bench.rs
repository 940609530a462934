//! `moe bench`: speed of a model, or of the shape of one.

use super::{Asked, Status, UserError, measure as parse, memory, open_engine_with, shape};
use crate::calib::trace::Trace;
use crate::cli::{BenchArgs, Device};
use crate::engine::cuda::clocks::{Clocks, Reading};
use crate::engine::cuda::routing::Routing;
use crate::engine::cuda::slots::Traffic;
use crate::engine::cuda::{self, Device as Gpu, measure};
use crate::engine::{Batch, Engine, Rows, Turn};
use crate::files;
use crate::ids::SeqId;
use crate::model::plan::Slot;
use crate::report::{Out, bytes, markdown, table};
use crate::sample::{Sampler, SamplerConfig, argmax};
use crate::tiers::Policy;
use crate::tiers::policy::MAX_SHIFT;
use anyhow::Result;
use serde::Serialize;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of a prompt pass, of one or several prompts.
const PASS_TOK: usize = cuda::PLANNED_TOK;
const SEED: u64 = 1;
/// What `build.rs` found.
const COMMIT: &str = env!("MOE_COMMIT");

/// Results of one batch size.
#[derive(Clone, Debug, Serialize)]
struct Row {
    batch: usize,
    /// Decoded tokens a second, all sequences together: mean and standard deviation over the repeats.
    tok_s: f64,
    tok_s_sd: f64,
    tok_s_per_user: f64,
    ttft_ms_p50: f64,
    ttft_ms_p95: f64,
    itl_ms_p50: f64,
    itl_ms_p99: f64,
    prefill_tok_s: f64,
    /// Most memory taken since before the model was loaded, as the driver counts it, and what that is over the plan.
    vram_peak_bytes: Option<u64>,
    vram_over_plan: Option<f64>,
    /// The worst reading of all runs, each right after its last step.
    clocks: Option<Reading>,
    bytes_per_tok: Option<f64>,
    /// Shares of the memory bandwidth on the data sheet and as measured.
    share_of_spec: Option<f64>,
    share_of_measured: Option<f64>,
    /// The host's own work a step, microseconds, of which most is done while the device computes.
    host_us: Option<f64>,
    blocks: Option<Vec<measure::BlockTime>>,
    /// Of the experts while decoding, where not all are in the GPU's memory.
    experts: Option<Fetching>,
}

/// What fetching experts did to a decode step.
#[derive(Clone, Copy, Debug, Serialize)]
struct Fetching {
    /// Share of the experts used that were in a slot.
    hit_rate: f64,
    /// Share that was read over the link without taking one.
    direct_rate: f64,
    /// Of the experts that were not, share that came a layer ahead; of those that came so, share that was not used.
    recall: Option<f64>,
    waste: Option<f64>,
    link_bytes_per_tok: f64,
    /// While fetching, and that as a share of the link as measured.
    link_bytes_s: f64,
    share_of_link: f64,
    /// Of a step, milliseconds: bytes were on their way, and the products had nothing else to do.
    busy_ms: f64,
    stall_ms: f64,
    /// From the disk, and of a step the milliseconds in which it was waited for.
    disk_bytes_per_tok: f64,
    disk_ms: f64,
    /// Least time of a step, milliseconds: the larger of reading memory and moving the missing bytes; and its share of the time.
    bound_ms: f64,
    share_of_bound: f64,
}

/// Times of one run.
struct Run {
    ttft_ms: Vec<f64>,
    prefill_s: f64,
    steps_ms: Vec<f64>,
    /// Part of the steps in which the host waited for the device.
    waited_ms: Option<f64>,
    traffic: Option<Traffic>,
    clocks: Option<Reading>,
}

/// What watches the device while the runs go on.
struct Watch {
    device: Arc<Gpu>,
    clocks: Clocks,
    /// Before anything was loaded.
    free_before: u64,
    least_free: u64,
}

impl Watch {
    fn new(device: Arc<Gpu>) -> Result<Self> {
        let free = device.memory()?.0;
        Ok(Self { clocks: Clocks::of(&device), device, free_before: free, least_free: free })
    }

    fn sample(&mut self) -> Result<Reading> {
        self.least_free = self.least_free.min(self.device.memory()?.0);
        Ok(self.clocks.read())
    }

    fn peak_bytes(&self) -> u64 {
        self.free_before - self.least_free
    }
}

/// Runs the command.
pub fn bench(args: &BenchArgs, out: Out) -> Result<Status> {
    if args.batch.contains(&0) || args.prompt == 0 || args.generate < 2 || args.repeats == 0 {
        return Err(UserError::new("batch sizes, --prompt and --repeats start at 1, --generate at 2").into());
    }
    if let Some(recall) = args.recall
        && !((0.0..=1.0).contains(&recall) && args.routing.is_some())
    {
        return Err(UserError::new(format!("--recall {recall} is no share of the choices of --routing"))
            .hint("give both, the share between 0 and 1; the model's own routers are foreseen as well as they are")
            .into());
    }
    let mut watch = if args.device == Device::Cpu { None } else { gpu().ok().map(Watch::new).transpose()? };
    let (name, mut engine) = open(args, out)?;
    watch = watch.filter(|_| matches!(engine, Engine::Cuda(_)));
    let context = args.prompt + args.generate;
    if context > engine.spec().max_positions {
        return Err(UserError::new(format!(
            "{context} tokens are more than the {} this model was made for",
            engine.spec().max_positions
        ))
        .hint("lower --prompt or --generate")
        .into());
    }
    let rates = match &engine {
        Engine::Cuda(e) => Some(measure::rates(e.device())?),
        Engine::Cpu(_) => None,
    };
    let progress = out.count((args.batch.len() * (args.repeats + 1)) as u64, "bench");
    let mut rows = Vec::new();
    let routing = args.routing.as_deref().map(|text| routing(text, &engine)).transpose()?;
    for &batch in &args.batch {
        if let Engine::Cuda(e) = &mut engine {
            // Choices of their own for the run that warms up and for each repeat: what comes again only by repetition is no hit.
            let steps = (args.generate - 1) * (args.repeats + 1);
            e.set_routing(routing.as_ref(), batch, steps, args.recall)?;
        }
        let mut runs = Vec::new();
        for repeat in 0..=args.repeats {
            let run = one(&mut engine, args, batch, watch.as_mut())?;
            progress.advance(1);
            if repeat > 0 {
                runs.push(run);
            }
        }
        rows.push(row(&mut engine, args, batch, &runs, rates.as_ref(), watch.as_ref())?);
    }
    progress.finish();
    engine.take_notes().iter().for_each(|note| out.note(note));
    report(args, out, &name, &engine, &rows, rates)
}

fn open(args: &BenchArgs, out: Out) -> Result<(String, Engine)> {
    let batch = args.batch.iter().copied().max().unwrap_or(1);
    let tokens = batch * (args.prompt + args.generate).next_multiple_of(cuda::PAGE_TOKENS);
    let Some(name) = &args.shape else {
        let Some(dir) = &args.model else { return Err(UserError::new("no model given").into()) };
        let asked = Asked { device: args.device, memory: &args.memory, cache_tok: Some(tokens), batch };
        let change = |options: &mut cuda::Options| choose(args, options);
        return Ok((dir.display().to_string(), open_engine_with(dir, &asked, &change, out)?));
    };
    if args.device == Device::Cpu {
        return Err(UserError::new("--shape makes its weights on a GPU")
            .hint("give a model directory to measure the processor")
            .into());
    }
    if args.memory.lookahead.is_some() {
        return Err(UserError::new("--lookahead foresees the routers of a model; a shape has random ones")
            .hint("--recall says how many choices of --routing are named right")
            .into());
    }
    let (family, spec) = shape::spec(name)?;
    let format = shape::formats(&args.profile)?;
    let mut options = cuda::Options { cache_tok: tokens, ..memory::options(&args.memory, None, &spec, family)? };
    choose(args, &mut options)?;
    let mut engine = cuda::Engine::random(&spec, &*format, SEED, options, &mut |plan| out.note(memory::shown(plan, batch)))?;
    engine.take_notes().iter().for_each(|note| out.note(note));
    Ok((format!("{name} ({})", args.profile), engine.into()))
}

/// What is typed to measure experts outside of the GPU's memory.
fn choose(args: &BenchArgs, options: &mut cuda::Options) -> Result<()> {
    options.expert_slots = args.expert_slots;
    options.policy = args.policy.as_deref().map(policy).transpose()?.flatten();
    options.link_limit = link_limit(args)?;
    Ok(())
}

/// A rule that keeps experts; `None`: LRFU by the shape of each layer.
fn policy(text: &str) -> Result<Option<Policy>> {
    let shift = text.strip_prefix("lrfu:").and_then(|n| n.parse().ok()).filter(|n| (1..=MAX_SHIFT).contains(n));
    match (text, shift) {
        ("lrfu", _) => Ok(None),
        ("static", _) => Ok(Some(Policy::Static)),
        ("lru", _) => Ok(Some(Policy::Lru)),
        ("lfu", _) => Ok(Some(Policy::Lfu)),
        (_, Some(shift)) => Ok(Some(Policy::Lrfu { shift })),
        _ => Err(UserError::new(format!("`{text}` is no policy that can be followed"))
            .hint(format!("policies are static, lru, lfu, lrfu, and lrfu:1 to lrfu:{MAX_SHIFT}"))
            .into()),
    }
}

fn link_limit(args: &BenchArgs) -> Result<Option<f64>> {
    args.link_limit.as_ref().map(|text| parse::bytes(text.trim_end_matches("/s")).map(|n| n as f64)).transpose()
}

/// A rule that chooses experts.
fn routing(text: &str, engine: &Engine) -> Result<Routing> {
    let unknown = || UserError::new(format!("`{text}` is no routing")).hint("expected uniform, local:P or trace:FILE");
    match text.split_once(':') {
        None if text == "uniform" => Ok(Routing::Uniform),
        Some(("local", p)) => match p.parse::<f64>() {
            Ok(p) if (0.0..=1.0).contains(&p) => Ok(Routing::Local(p)),
            _ => Err(unknown().into()),
        },
        Some(("trace", file)) => {
            let trace =
                Trace::from_bytes(&files::read(Path::new(file))?).map_err(|e| UserError::new(format!("`{file}`: {e}")))?;
            let moe = engine.spec().routers().map(|(_, router)| (router.experts, router.top_k));
            let shape = (trace.shape.experts, trace.shape.top_k);
            if moe.clone().count() != trace.shape.layers || moe.clone().any(|m| m != shape) {
                return Err(UserError::new(format!("`{file}` is a trace of another model")).into());
            }
            let ids = trace.samples.into_iter().flat_map(|s| s.ids).collect::<Vec<u16>>();
            Ok(Routing::Recorded(ids.into()))
        }
        _ => Err(unknown().into()),
    }
}

/// One prompt for each sequence, then greedy decoding of all together.
fn one(engine: &mut Engine, args: &BenchArgs, batch: usize, watch: Option<&mut Watch>) -> Result<Run> {
    let context = args.prompt + args.generate;
    let seqs: Vec<SeqId> = (0..batch as u32).map(SeqId).collect();
    seqs.iter().for_each(|&s| engine.release(s));
    let vocab = engine.spec().vocab;
    let (mut ttft_ms, mut tokens) = (Vec::new(), Vec::new());
    let start = Instant::now();
    let prompts: Vec<Vec<u32>> = seqs.iter().map(|&s| prompt(s, args.prompt, vocab)).collect();
    for parts in passes(batch, args.prompt, PASS_TOK) {
        let mut pass = Batch::default();
        for (i, part) in &parts {
            let rows = if part.end == args.prompt { Rows::Last } else { Rows::None };
            pass.push(seqs[*i], part.start, &prompts[*i][part.clone()], rows, context);
        }
        engine.pass(&pass)?;
        let logits = engine.slot(Slot::Logits)?;
        tokens.extend(logits.chunks_exact(vocab).map(|row| vec![argmax(row) as u32]));
        ttft_ms.resize(tokens.len(), start.elapsed().as_secs_f64() * 1e3);
    }
    let prefill_s = start.elapsed().as_secs_f64();
    engine.take_traffic()?;
    engine.take_waited();
    let mut steps_ms = Vec::with_capacity(args.generate);
    let mut before = Instant::now();
    let mut samplers = vec![Sampler::new(SamplerConfig::default())?; batch];
    let turns = seqs.iter().zip(&mut tokens).zip(&mut samplers);
    let mut turns: Vec<Turn<'_>> = turns.map(|((&seq, tokens), sampler)| Turn { seq, tokens, sampler }).collect();
    engine.decode(&mut turns, args.generate - 1, context, &mut |_| {
        let now = Instant::now();
        steps_ms.push((now - before).as_secs_f64() * 1e3);
        before = now;
        ControlFlow::Continue(())
    })?;
    let clocks = watch.map(Watch::sample).transpose()?;
    let waited_ms = engine.take_waited().map(|waited| waited.as_secs_f64() * 1e3);
    Ok(Run { ttft_ms, prefill_s, steps_ms, waited_ms, traffic: engine.take_traffic()?, clocks })
}

/// Prompts in order, cut and packed into passes of `most` tokens; each part is a prompt and a range of it.
fn passes(num_prompts: usize, len: usize, most: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let total = num_prompts * len;
    let pass = |start: usize| {
        let end = (start + most).min(total);
        let part = |i: usize| (i, start.max(i * len) - i * len..end.min((i + 1) * len) - i * len);
        (start / len..end.div_ceil(len)).map(part).collect()
    };
    (0..total).step_by(most).map(pass).collect()
}

/// Repeatable tokens, different for each sequence.
fn prompt(seq: SeqId, len: usize, vocab: usize) -> Vec<u32> {
    let mut state = u64::from(seq.0) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % vocab
    };
    (0..len).map(|_| next() as u32).collect()
}

fn row(
    engine: &mut Engine,
    args: &BenchArgs,
    batch: usize,
    runs: &[Run],
    rates: Option<&measure::Rates>,
    watch: Option<&Watch>,
) -> Result<Row> {
    let speeds: Vec<f64> =
        runs.iter().map(|r| (batch * r.steps_ms.len()) as f64 / (r.steps_ms.iter().sum::<f64>() / 1e3)).collect();
    let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
    let sd = match speeds.len() {
        1 => 0.0,
        n => (speeds.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / (n - 1) as f64).sqrt(),
    };
    let all = |of: &dyn Fn(&Run) -> &Vec<f64>| -> Vec<f64> {
        let mut v: Vec<f64> = runs.iter().flat_map(|r| of(r).iter().copied()).collect();
        v.sort_by(f64::total_cmp);
        v
    };
    let (ttft, steps) = (all(&|r| &r.ttft_ms), all(&|r| &r.steps_ms));
    let prefill: f64 = runs.iter().map(|r| r.prefill_s).sum::<f64>() / runs.len() as f64;
    let mut row = Row {
        batch,
        tok_s: mean,
        tok_s_sd: sd,
        tok_s_per_user: mean / batch as f64,
        ttft_ms_p50: quantile(&ttft, 0.5),
        ttft_ms_p95: quantile(&ttft, 0.95),
        itl_ms_p50: quantile(&steps, 0.5),
        itl_ms_p99: quantile(&steps, 0.99),
        prefill_tok_s: (batch * args.prompt) as f64 / prefill,
        vram_peak_bytes: watch.map(Watch::peak_bytes),
        vram_over_plan: None,
        clocks: runs.iter().filter_map(|r| r.clocks).reduce(Reading::worst),
        bytes_per_tok: None,
        share_of_spec: None,
        share_of_measured: None,
        host_us: host_us(runs),
        blocks: None,
        experts: None,
    };
    if let Engine::Cuda(e) = engine {
        let step = e.step_bytes(batch, args.prompt + args.generate / 2) as f64;
        let rate = step * mean / batch as f64;
        // The count begins when the driver has taken its share.
        let planned = e.vram().total_bytes - e.vram().driver_bytes;
        row.vram_over_plan = row.vram_peak_bytes.map(|peak| peak as f64 / planned as f64 - 1.0);
        row.bytes_per_tok = Some(step / batch as f64);
        row.share_of_spec = Some(rate / e.device().properties().spec_bandwidth());
        row.share_of_measured = rates.map(|r| rate / r.read_bytes_s);
        if let Some(r) = rates {
            let link = link_limit(args)?.unwrap_or(f64::INFINITY).min(r.host_to_device_bytes_s);
            row.experts = fetching(runs, step, link, r.read_bytes_s, batch);
        }
        if args.profile_kernels {
            let seqs: Vec<SeqId> = (0..batch as u32).map(SeqId).collect();
            row.blocks = Some(e.time_blocks(&seqs, &vec![1; batch], args.prompt + args.generate)?);
        }
    }
    Ok(row)
}

/// The host's own work a step.
fn host_us(runs: &[Run]) -> Option<f64> {
    let waited: Option<f64> = runs.iter().map(|r| r.waited_ms).sum();
    let (all, steps) = (runs.iter().flat_map(|r| &r.steps_ms).sum::<f64>(), runs.iter().map(|r| r.steps_ms.len()).sum::<usize>());
    waited.map(|waited| 1e3 * (all - waited) / steps as f64)
}

/// What went over the link in all runs together; `step_bytes` is what a step reads in all.
fn fetching(runs: &[Run], step_bytes: f64, link_bytes_s: f64, read_bytes_s: f64, batch: usize) -> Option<Fetching> {
    let total = runs.iter().filter_map(|r| r.traffic).reduce(|a, b| a + b)?;
    let steps: f64 = runs.iter().map(|r| r.steps_ms.len() as f64).sum();
    let step_ms = runs.iter().flat_map(|r| &r.steps_ms).sum::<f64>() / steps;
    let link_bytes_per_step = total.bytes as f64 / steps;
    // What was brought in vain is no part of the bound.
    let needed = total.missed() as f64 / (total.fetched + total.direct + total.ahead).max(1) as f64;
    let bound_ms = 1e3 * (step_bytes / read_bytes_s).max(needed * link_bytes_per_step / link_bytes_s);
    Some(Fetching {
        hit_rate: total.hit_rate(),
        direct_rate: total.direct as f64 / total.chosen.max(1) as f64,
        recall: (total.ahead > 0).then(|| total.recall()),
        waste: (total.ahead > 0).then(|| total.waste()),
        link_bytes_per_tok: link_bytes_per_step / batch as f64,
        link_bytes_s: total.link_bytes_s(),
        share_of_link: total.link_bytes_s() / link_bytes_s,
        busy_ms: total.busy_ns as f64 / 1e6 / steps,
        stall_ms: total.stall_ns as f64 / 1e6 / steps,
        disk_bytes_per_tok: total.disk_bytes as f64 / steps / batch as f64,
        disk_ms: total.disk_ns as f64 / 1e6 / steps,
        bound_ms,
        share_of_bound: bound_ms / step_ms,
    })
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = (q * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

fn report(
    args: &BenchArgs,
    out: Out,
    name: &str,
    engine: &Engine,
    rows: &[Row],
    rates: Option<measure::Rates>,
) -> Result<Status> {
    let device = match engine {
        Engine::Cuda(e) => serde_json::to_value(e.device().properties())?,
        Engine::Cpu(_) => serde_json::json!({"name": "processor", "threads": rayon::current_num_threads()}),
    };
    let planned = if let Engine::Cuda(e) = engine { Some(e.vram().total_bytes) } else { None };
    let header = [
        "batch",
        "tok/s",
        "+-",
        "per user",
        "TTFT p50",
        "p95",
        "ITL p50",
        "p99",
        "host",
        "prefill tok/s",
        "MB/tok",
        "of spec",
        "of read",
        "VRAM",
        "over plan",
        "SM MHz",
    ];
    let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.1} %", 100.0 * x));
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            vec![
                r.batch.to_string(),
                format!("{:.1}", r.tok_s),
                format!("{:.1}", r.tok_s_sd),
                format!("{:.1}", r.tok_s_per_user),
                format!("{:.1} ms", r.ttft_ms_p50),
                format!("{:.1} ms", r.ttft_ms_p95),
                format!("{:.3} ms", r.itl_ms_p50),
                format!("{:.3} ms", r.itl_ms_p99),
                r.host_us.map_or("-".into(), |us| format!("{us:.0} us")),
                format!("{:.0}", r.prefill_tok_s),
                r.bytes_per_tok.map_or("-".into(), |b| format!("{:.0}", b / 1e6)),
                percent(r.share_of_spec),
                percent(r.share_of_measured),
                r.vram_peak_bytes.map_or("-".into(), bytes),
                percent(r.vram_over_plan),
                r.clocks.and_then(|c| c.sm_mhz).map_or("-".into(), |mhz| mhz.to_string()),
            ]
        })
        .collect();
    let on = device["name"].as_str().unwrap_or("?");
    let title = format!("{name}: prompt {}, generate {}, on {on}, commit {COMMIT}", args.prompt, args.generate);
    out.line(&title);
    if let Some(r) = rates {
        let gb = |x: f64| format!("{:.0} GB/s", x / 1e9);
        out.line(format!(
            "measured: read {}, host to device {}, read by kernels {}",
            gb(r.read_bytes_s),
            gb(r.host_to_device_bytes_s),
            gb(r.host_read_bytes_s)
        ));
    }
    out.line(table(&header, &cells));
    let fetching = rows.iter().filter_map(|r| Some((r.batch, r.experts?)));
    let tiers: Vec<Vec<String>> = fetching
        .map(|(batch, f)| {
            vec![
                batch.to_string(),
                percent(Some(f.hit_rate)),
                percent(Some(f.direct_rate)),
                percent(f.recall),
                percent(f.waste),
                format!("{:.1}", f.link_bytes_per_tok / 1e6),
                format!("{:.1}", f.link_bytes_s / 1e9),
                percent(Some(f.share_of_link)),
                format!("{:.3} ms", f.busy_ms),
                format!("{:.3} ms", f.stall_ms),
                format!("{:.1}", f.disk_bytes_per_tok / 1e6),
                format!("{:.3} ms", f.disk_ms),
                format!("{:.3} ms", f.bound_ms),
                percent(Some(f.share_of_bound)),
            ]
        })
        .collect();
    if !tiers.is_empty() {
        let header = [
            "batch",
            "hits",
            "direct",
            "ahead",
            "waste",
            "link MB/tok",
            "link GB/s",
            "of link",
            "link/step",
            "stall/step",
            "disk MB/tok",
            "disk/step",
            "bound/step",
            "of bound",
        ];
        out.line(table(&header, &tiers));
    }
    for r in rows {
        for b in r.blocks.iter().flatten() {
            out.line(format!("batch {:2}  {:10} {:3} x {:8.2} us", r.batch, b.kind, b.count, b.us));
        }
    }
    out.json(&serde_json::json!({
        "command": "bench", "tool": env!("CARGO_PKG_VERSION"), "commit": COMMIT, "model": name,
        "prompt_tok": args.prompt, "generate_tok": args.generate, "repeats": args.repeats, "device": device, "measured": rates,
        "vram_planned_bytes": planned, "rows": rows,
    }))?;
    if let Some(path) = &args.csv {
        let lines = std::iter::once(header.join(",")).chain(cells.iter().map(|c| c.join(",")));
        files::write_atomic(path, (lines.collect::<Vec<_>>().join("\n") + "\n").as_bytes())?;
    }
    if let Some(path) = &args.md {
        files::write_atomic(path, format!("{title}\n\n{}\n", markdown(&header, &cells)).as_bytes())?;
    }
    Ok(Status::Done)
}

/// Whether there is a GPU to use.
pub(super) fn gpu() -> Result<Arc<Gpu>, cuda::CudaError> {
    Gpu::open(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token of every prompt once and in order, no pass longer than allowed. Trips if a prompt's rest or the last pass is lost.
    #[test]
    fn passes_cover_the_prompts() {
        for (num, len, most) in [(1, 1, 512), (3, 512, 512), (4, 512, 2048), (5, 300, 512), (2, 1100, 512), (32, 7, 64)] {
            let passes = passes(num, len, most);
            let all: Vec<(usize, usize)> = passes.iter().flatten().flat_map(|(i, part)| part.clone().map(|t| (*i, t))).collect();
            let expected: Vec<(usize, usize)> = (0..num).flat_map(|i| (0..len).map(move |t| (i, t))).collect();
            assert_eq!(all, expected, "{num} {len} {most}");
            assert!(passes.iter().all(|p| p.iter().map(|(_, part)| part.len()).sum::<usize>() <= most));
        }
    }
}
