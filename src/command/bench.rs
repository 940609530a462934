//! `moe bench`: speed of a model, or of the shape of one.

use super::{Status, UserError, open_engine};
use crate::cli::{BenchArgs, Device};
use crate::engine::cuda::clocks::{Clocks, Reading};
use crate::engine::cuda::{self, Device as Gpu, measure};
use crate::engine::{Batch, Engine, Rows, Turn};
use crate::files;
use crate::ids::{Component, Part, Role, SeqId, TensorId};
use crate::model::family;
use crate::model::plan::Slot;
use crate::profile::precision::Profile;
use crate::quant::format::{Format, fit};
use crate::report::{Out, bytes, markdown, table};
use crate::sample::{Sampler, SamplerConfig, argmax};
use anyhow::{Context, Result};
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

macro_rules! shape {
    ($name:literal) => {
        ($name, include_str!(concat!("../../profiles/shapes/", $name, ".json")))
    };
}

/// Shapes of public models.
const SHAPES: &[(&str, &str)] = &[
    shape!("qwen3-30b-a3b"),
    shape!("mixtral-8x7b"),
    shape!("qwen1.5-moe-a2.7b"),
    shape!("phi-3.5-moe"),
    shape!("deepseek-v2-lite"),
    shape!("olmoe-1b-7b"),
];

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
    blocks: Option<Vec<measure::BlockTime>>,
}

/// Times of one run.
struct Run {
    ttft_ms: Vec<f64>,
    prefill_s: f64,
    steps_ms: Vec<f64>,
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
    for &batch in &args.batch {
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
    report(args, out, &name, &engine, &rows, rates)
}

fn open(args: &BenchArgs, out: Out) -> Result<(String, Engine)> {
    let Some(shape) = &args.shape else {
        let Some(dir) = &args.model else { return Err(UserError::new("no model given").into()) };
        return Ok((dir.display().to_string(), open_engine(dir, args.device, out)?));
    };
    if args.device == Device::Cpu {
        return Err(UserError::new("--shape makes its weights on a GPU")
            .hint("give a model directory to measure the processor")
            .into());
    }
    let text = match SHAPES.iter().find(|(name, _)| name == shape) {
        Some((_, text)) => text.as_bytes().to_vec(),
        None if shape.ends_with(".json") => files::read(Path::new(shape))?,
        None => {
            let names: Vec<&str> = SHAPES.iter().map(|s| s.0).collect();
            return Err(UserError::new(format!("there is no shape `{shape}`"))
                .hint(format!("shapes are {}", names.join(", ")))
                .into());
        }
    };
    let config = serde_json::from_slice(&text)
        .with_context(|| format!("shape `{shape}`"))
        .map_err(|e| UserError::new(format!("{e:#}")))?;
    let (_, spec) = family::read(&config)?;
    let format = formats(&args.profile)?;
    let engine = cuda::Engine::random(&spec, &*format, SEED, cuda::Options::default())?;
    out.note(vram_line(&engine));
    Ok((format!("{shape} ({})", args.profile), engine.into()))
}

fn vram_line(engine: &cuda::Engine) -> String {
    let plan = engine.vram();
    let parts = plan.parts.iter().filter(|p| p.1 > 0).map(|(what, n)| format!("{what} {}", bytes(*n)));
    format!("GPU memory: {}; {} in all", parts.collect::<Vec<_>>().join(", "), bytes(plan.total_bytes))
}

/// Formats of a profile by id and columns; routers, gates, norms and `kv` projections of latents stay at source as in artifacts.
fn formats(name: &str) -> Result<Box<dyn Fn(TensorId, usize) -> Format>> {
    let kept = |id: TensorId| {
        let router = matches!(id.role, Role::Router | Role::SharedRouter | Role::KvA | Role::KvB | Role::QA);
        router || id.part == Part::Bias || id.role.component() == Component::Norms
    };
    if name == "bench" {
        return Ok(Box::new(move |id, cols| match id.role {
            _ if kept(id) => Format::Source,
            Role::Embed => Format::Source,
            Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => fit(Format::INT4_G128, cols),
            _ => fit(Format::INT8_G128, cols),
        }));
    }
    let profile = Profile::built_in(name)?;
    Ok(Box::new(move |id, cols| {
        let text = id.to_string();
        let rule = profile.rules.iter().find(|r| r.pattern.matches(&text)).filter(|_| !kept(id));
        rule.map_or(Format::Source, |r| fit(r.format, cols))
    }))
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
    Ok(Run { ttft_ms, prefill_s, steps_ms, clocks })
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
        blocks: None,
    };
    if let Engine::Cuda(e) = engine {
        let step = e.step_bytes(batch, args.prompt + args.generate / 2) as f64;
        let rate = step * mean / batch as f64;
        row.vram_over_plan = row.vram_peak_bytes.map(|peak| peak as f64 / e.vram().total_bytes as f64 - 1.0);
        row.bytes_per_tok = Some(step / batch as f64);
        row.share_of_spec = Some(rate / e.device().properties().spec_bandwidth());
        row.share_of_measured = rates.map(|r| rate / r.read_bytes_s);
        if args.profile_kernels {
            let seqs: Vec<SeqId> = (0..batch as u32).map(SeqId).collect();
            row.blocks = Some(e.time_blocks(&seqs, &vec![1; batch], args.prompt + args.generate)?);
        }
    }
    Ok(row)
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
        out.line(format!("measured: read {}, host to device {}", gb(r.read_bytes_s), gb(r.host_to_device_bytes_s)));
    }
    out.line(table(&header, &cells));
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
    use crate::model::spec::ModelSpec;

    fn spec(name: &str) -> ModelSpec {
        let text = SHAPES.iter().find(|s| s.0 == name).unwrap().1;
        family::read(&serde_json::from_str(text).unwrap()).unwrap().1
    }

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

    /// Every shape is a config that the family readers take.
    #[test]
    fn shapes_are_configs() {
        for (name, _) in SHAPES {
            assert!(!spec(name).layers.is_empty(), "{name}");
        }
        assert_eq!(spec("qwen3-30b-a3b").layers.len(), 48);
    }
}
