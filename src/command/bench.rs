//! `moe bench`: speed of a model, or of the shape of one.

use super::{Asked, Status, UserError, memory, open_engine, shape};
use crate::cli::{BenchArgs, Device};
use crate::engine::cuda::{self, Device as Gpu, measure};
use crate::engine::{Batch, Engine, Rows, first_max};
use crate::files;
use crate::ids::SeqId;
use crate::model::plan::Slot;
use crate::report::{Out, markdown, table};
use anyhow::Result;
use serde::Serialize;
use std::ops::ControlFlow;
use std::time::Instant;

/// Tokens of a prompt pass.
const CHUNK: usize = 512;
const SEED: u64 = 1;

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
    vram_used_bytes: Option<u64>,
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
}

/// Runs the command.
pub fn bench(args: &BenchArgs, out: Out) -> Result<Status> {
    if args.batch.contains(&0) || args.prompt == 0 || args.generate < 2 || args.repeats == 0 {
        return Err(UserError::new("batch sizes, --prompt and --repeats start at 1, --generate at 2").into());
    }
    let (name, mut engine) = open(args, out)?;
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
            let run = one(&mut engine, args, batch)?;
            progress.advance(1);
            if repeat > 0 {
                runs.push(run);
            }
        }
        rows.push(row(&mut engine, args, batch, &runs, rates.as_ref())?);
    }
    progress.finish();
    report(args, out, &name, &engine, &rows, rates)
}

fn open(args: &BenchArgs, out: Out) -> Result<(String, Engine)> {
    let batch = args.batch.iter().copied().max().unwrap_or(1);
    let tokens = batch * (args.prompt + args.generate).next_multiple_of(cuda::PAGE_TOKENS);
    let Some(name) = &args.shape else {
        let Some(dir) = &args.model else { return Err(UserError::new("no model given").into()) };
        let asked = Asked { device: args.device, memory: &args.memory, cache_tok: Some(tokens), batch };
        return Ok((dir.display().to_string(), open_engine(dir, &asked, out)?));
    };
    if args.device == Device::Cpu {
        return Err(UserError::new("--shape makes its weights on a GPU")
            .hint("give a model directory to measure the processor")
            .into());
    }
    let (family, spec) = shape::spec(name)?;
    let format = shape::formats(&args.profile)?;
    let options = cuda::Options { cache_tok: tokens, ..memory::options(&args.memory, None, &spec, family)? };
    let engine = cuda::Engine::random(&spec, &*format, SEED, options, &mut |plan| out.note(memory::shown(plan, batch)))?;
    Ok((format!("{name} ({})", args.profile), engine.into()))
}

/// One prompt for each sequence, then greedy decoding of all together.
fn one(engine: &mut Engine, args: &BenchArgs, batch: usize) -> Result<Run> {
    let context = args.prompt + args.generate;
    let seqs: Vec<SeqId> = (0..batch as u32).map(SeqId).collect();
    seqs.iter().for_each(|&s| engine.release(s));
    let vocab = engine.spec().vocab;
    let (mut ttft_ms, mut last) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for &seq in &seqs {
        let prompt = prompt(seq, args.prompt, vocab);
        for (i, chunk) in prompt.chunks(CHUNK).enumerate() {
            let at = i * CHUNK;
            let rows = if at + chunk.len() == prompt.len() { Rows::Last } else { Rows::None };
            let mut pass = Batch::default();
            pass.push(seq, at, chunk, rows, context);
            engine.pass(&pass)?;
        }
        last.push(first_max(engine.slot(Slot::Logits)?));
        ttft_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let prefill_s = start.elapsed().as_secs_f64();
    let mut steps_ms = Vec::with_capacity(args.generate);
    let mut before = Instant::now();
    engine.greedy(&seqs, &last, args.generate - 1, context, &mut |_| {
        let now = Instant::now();
        steps_ms.push((now - before).as_secs_f64() * 1e3);
        before = now;
        ControlFlow::Continue(())
    })?;
    Ok(Run { ttft_ms, prefill_s, steps_ms })
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

fn row(engine: &mut Engine, args: &BenchArgs, batch: usize, runs: &[Run], rates: Option<&measure::Rates>) -> Result<Row> {
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
        vram_used_bytes: None,
        bytes_per_tok: None,
        share_of_spec: None,
        share_of_measured: None,
        blocks: None,
    };
    if let Engine::Cuda(e) = engine {
        let (free, total) = e.device().memory()?;
        let step = e.step_bytes(batch, args.prompt + args.generate / 2) as f64;
        let rate = step * mean / batch as f64;
        row.vram_used_bytes = Some(total - free);
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
            ]
        })
        .collect();
    let title =
        format!("{name}: prompt {}, generate {}, on {}", args.prompt, args.generate, device["name"].as_str().unwrap_or("?"));
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
        "command": "bench", "tool": env!("CARGO_PKG_VERSION"), "commit": option_env!("MOE_COMMIT"), "model": name,
        "prompt_tok": args.prompt, "generate_tok": args.generate, "repeats": args.repeats, "device": device, "measured": rates,
        "rows": rows,
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
pub(super) fn gpu() -> Result<std::sync::Arc<Gpu>, cuda::CudaError> {
    Gpu::open(0)
}
