//! One file a subcommand: resolve what was typed, preflight, work, report.

mod bench;
mod calibrate;
mod doctor;
mod export;
mod inspect;
pub mod logits;
mod measure;
mod memory;
mod perplexity;
mod prepare;
mod profile_experts;
mod quantize;
mod run;
mod shape;
mod tiers;
mod verify;

use crate::artifact::error::ArtifactError;
use crate::artifact::manifest::ManifestError;
use crate::artifact::weights::{Weights, WeightsError};
use crate::calib::lockstep::Place;
use crate::calib::sets::SetError;
use crate::calib::solve::SolveError;
use crate::calib::windows::ProtocolError;
use crate::checkpoint::CheckpointError;
use crate::cli::{Cli, Command, Device, MemoryArgs};
use crate::engine::cuda::{self, CudaError, LoadError};
use crate::engine::{Engine, EngineError};
use crate::export::ExportError;
use crate::files::FileError;
use crate::model::config::ConfigError;
use crate::profile::precision::PrecisionError;
use crate::quant::format::FormatError;
use crate::quant::round::MethodError;
use crate::report::Out;
use crate::sample::SampleError;
use crate::text::TextError;
use crate::tiers::VramPlan;
use anyhow::Result;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Done = 0,
    /// The input or the usage is wrong; nothing was written.
    BadInput = 1,
    /// Something failed on the way.
    Failure = 2,
    /// Done, but a threshold was crossed.
    Crossed = 3,
}

/// An error in what the user gave, with its cure.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct UserError {
    message: String,
    hint: Option<String>,
}

impl UserError {
    /// An error without advice.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// Adds the cure.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// Runs a parsed command line.
pub fn dispatch(cli: Cli) -> Result<Status> {
    let out = Out { json: cli.json, quiet: cli.quiet, nested: false };
    if let Some(n) = cli.threads {
        if n == 0 {
            return Err(UserError::new("`--threads` is 0, expected at least 1").into());
        }
        rayon::ThreadPoolBuilder::new().num_threads(n).build_global()?;
    }
    match cli.command {
        Command::Logits(args) => logits::logits(&args, out),
        Command::Inspect(args) => inspect::inspect(&args, out),
        Command::Quantize(args) => quantize::quantize(&args, out),
        Command::Calibrate(args) => calibrate::calibrate(&args, out),
        Command::Perplexity(args) => perplexity::perplexity(&args, out),
        Command::Prepare(args) => prepare::prepare(&args, out),
        Command::ProfileExperts(args) => profile_experts::profile_experts(&args, out),
        Command::Tiers(args) => tiers::tiers(&args, out),
        Command::Verify(args) => verify::verify(&args, out),
        Command::Run(args) => run::run(&args, out),
        Command::Bench(args) => bench::bench(&args, out),
        Command::Export(args) => export::export(&args, out),
        Command::Doctor(args) => doctor::doctor(&args, out),
    }
}

/// Whether Ctrl-C was pressed. A process has one handler; pressed twice, it ends at once.
#[derive(Clone)]
struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Installs the handler, once.
    fn install() -> Result<Self> {
        static PRESSED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
        if let Some(pressed) = PRESSED.get() {
            return Ok(Self(Arc::clone(pressed)));
        }
        let pressed = Arc::clone(PRESSED.get_or_init(Arc::default));
        let flag = Arc::clone(&pressed);
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        })?;
        Ok(Self(pressed))
    }

    fn pressed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Opens a model.
fn open_model(dir: &Path) -> Result<Arc<Weights>> {
    Ok(Arc::new(Weights::open(dir)?))
}

/// Where to measure: on the processor unless a GPU is asked for, so that the same numbers come out everywhere.
fn place(device: Device, vram_budget: Option<&str>) -> Result<Place> {
    let budget_bytes = vram_budget.map(measure::bytes).transpose()?;
    match device {
        Device::Cuda => Ok(Place::Gpu { budget_bytes }),
        _ if budget_bytes.is_some() => Err(on_a_gpu("--device cuda")),
        _ => Ok(Place::Processor),
    }
}

fn on_a_gpu(cure: &str) -> anyhow::Error {
    UserError::new("a budget of GPU memory is given, but the processor would compute").hint(format!("add {cure}")).into()
}

/// What was typed about the engine.
struct Asked<'a> {
    device: Device,
    memory: &'a MemoryArgs,
    /// Tokens that the caches shall hold, if it is known.
    cache_tok: Option<usize>,
    /// Sequences at a time.
    batch: usize,
}

/// Opens a model on the device asked for; `auto` falls back to the processor and says why.
fn open_engine(dir: &Path, asked: &Asked<'_>, out: Out) -> Result<Engine> {
    open_engine_with(dir, asked, &|_| Ok(()), out)
}

/// The same with further choices for a GPU.
fn open_engine_with(
    dir: &Path,
    asked: &Asked<'_>,
    change: &dyn Fn(&mut cuda::Options) -> Result<()>,
    out: Out,
) -> Result<Engine> {
    let weights = open_model(dir)?;
    if asked.device == Device::Cpu {
        return if asked.memory.is_given() { Err(on_a_gpu("--device cuda")) } else { Ok(Engine::cpu(weights)) };
    }
    let mut options = memory::options(asked.memory, Some(dir), weights.spec(), weights.family())?;
    options.cache_tok = asked.cache_tok.unwrap_or(options.cache_tok);
    change(&mut options)?;
    match open_cuda(Arc::clone(&weights), options, asked.batch, out) {
        Ok(engine) => Ok(engine),
        Err(LoadError::Cuda(reason)) if asked.device == Device::Auto && !(refused(&reason) && asked.memory.is_given()) => {
            out.note(format!("computing on the processor: {reason}"));
            Ok(Engine::cpu(weights))
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether a budget is too small, which another device does not cure.
fn refused(error: &CudaError) -> bool {
    matches!(error, CudaError::Budget { .. })
}

fn open_cuda(weights: Arc<Weights>, options: cuda::Options, batch: usize, out: Out) -> Result<Engine, LoadError> {
    let bar = std::cell::OnceCell::new();
    let mut planned = |plan: &VramPlan, total: u64| {
        out.note(memory::shown(plan, batch));
        bar.get_or_init(|| out.bytes(total, "loading"));
    };
    let with_zeros = weights.tensors().iter().filter(|(id, _)| weights.has_zero_points(*id)).count();
    if with_zeros > 0 {
        out.note(format!(
            "{with_zeros} matrices have zero points: plain kernels run their blocks, which is several times slower"
        ));
    }
    let mut engine = cuda::Engine::open(weights, options, &mut planned, &mut |n| {
        bar.get().iter().for_each(|b| b.advance(n));
    })?;
    bar.get().iter().for_each(|b| b.finish());
    engine.take_notes().iter().for_each(|note| out.note(note));
    Ok(engine.into())
}

macro_rules! first_of {
    ($error:expr, $($kind:ty),+) => {
        $error.chain().find_map(|e| { $(if let Some(e) = e.downcast_ref::<$kind>() { return Some(e.hint()); })+ None })
    };
}

/// The cure for an error, if the error knows one.
pub fn hint(error: &anyhow::Error) -> Option<String> {
    if let Some(user) = error.chain().find_map(|e| e.downcast_ref::<UserError>()) {
        return user.hint.clone();
    }
    first_of!(
        error,
        EngineError,
        CudaError,
        LoadError,
        WeightsError,
        SolveError,
        ArtifactError,
        ManifestError,
        PrecisionError,
        CheckpointError,
        ConfigError,
        FileError,
        TextError,
        SetError,
        ExportError
    )
    .flatten()
}

/// The exit code of an error: wrong input, or a failure on the way.
pub fn exit_status(error: &anyhow::Error) -> Status {
    let bad = error.chain().any(|e| {
        e.is::<UserError>()
            || e.is::<WeightsError>()
            || e.is::<CheckpointError>()
            || e.is::<ConfigError>()
            || e.downcast_ref::<EngineError>().is_some_and(|e| !matches!(e, EngineError::Cuda(_)))
            || e.downcast_ref::<CudaError>().is_some_and(refused)
            || e.downcast_ref::<LoadError>().is_some_and(|e| matches!(e, LoadError::Cuda(e) if refused(e)))
            || e.is::<TextError>()
            || e.is::<SampleError>()
            || e.is::<PrecisionError>()
            || e.is::<SetError>()
            || e.is::<ProtocolError>()
            || e.is::<FormatError>()
            || e.is::<MethodError>()
            || e.downcast_ref::<ArtifactError>().is_some_and(ArtifactError::is_bad_input)
            || e.downcast_ref::<ExportError>().is_some_and(ExportError::is_bad_input)
            || e.downcast_ref::<ManifestError>().is_some_and(|e| !matches!(e, ManifestError::File(_)))
    });
    let file = error.chain().find_map(|e| e.downcast_ref::<FileError>()).map(FileError::is_bad_input);
    if bad || file == Some(true) { Status::BadInput } else { Status::Failure }
}
