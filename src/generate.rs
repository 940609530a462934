//! The loop that turns a prompt into tokens: prefill in chunks, then decode, sample, stop. Knows ids, not text.

use crate::engine::{Batch, Engine, EngineError, Event, Rows, Turn};
use crate::ids::SeqId;
use crate::sample::{SampleError, Sampler};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Prompt tokens of one pass; small enough that an interrupt is noticed soon.
const PREFILL_CHUNK: usize = 256;

/// Bounds of one generation.
#[derive(Clone, Debug)]
pub struct Limits<'a> {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Ids that end the text; the ending id is not passed on.
    pub eos: &'a [u32],
    /// Length the sequence may reach, tokens; see [`crate::engine::Segment::context`].
    pub context: usize,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model said so.
    Eos,
    /// The caller said so.
    Stopped,
    /// As many tokens as were asked for, or as fit.
    Length,
}

/// What a generation did.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Why it ended.
    pub finish: Finish,
    /// Prompt tokens computed, without those already cached.
    pub prompt_tok: usize,
    /// Tokens generated, an ending id included.
    pub generated_tok: usize,
    /// From the start to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Outcome {
    /// Decoded tokens a second after the first one.
    pub fn tok_s(&self) -> f64 {
        (self.generated_tok.saturating_sub(1)) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// Why a generation failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The sampler failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Nothing to continue.
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt,
}

/// What sees the routers of a generation.
pub type Watcher<'a> = &'a mut dyn FnMut(Event<'_>);

/// Continues `history` of sequence `seq`, of which the engine has cached a prefix, and appends to it. `on` sees every new
/// token and may stop; it is also asked with `None` between chunks of the prompt. `watch` sees the routers, for which a GPU takes
/// slower kernels.
pub fn generate(
    engine: &mut Engine,
    seq: SeqId,
    history: &mut Vec<u32>,
    sampler: &mut Sampler,
    limits: &Limits<'_>,
    mut watch: Option<Watcher<'_>>,
    on: &mut dyn FnMut(Option<u32>) -> ControlFlow<()>,
) -> Result<Outcome, GenerateError> {
    let start = Instant::now();
    let cached = engine.cached(seq);
    if history.len() <= cached {
        return Err(GenerateError::EmptyPrompt);
    }
    let mut outcome = Outcome {
        finish: Finish::Length,
        prompt_tok: history.len() - cached,
        generated_tok: 0,
        first_token: Duration::ZERO,
        decode: Duration::ZERO,
    };
    let mut at = cached;
    while history.len() - at > PREFILL_CHUNK {
        pass(engine, seq, at, &history[at..at + PREFILL_CHUNK], Rows::None, limits.context, &mut watch)?;
        at += PREFILL_CHUNK;
        if on(None).is_break() {
            return Ok(Outcome { finish: Finish::Stopped, ..outcome });
        }
    }
    let most = limits.max_tokens.min(limits.context.saturating_sub(history.len()));
    if most == 0 {
        return Ok(outcome);
    }
    pass(engine, seq, at, &history[at..], Rows::Last, limits.context, &mut watch)?;
    let token = sampler.sample(engine.slot(crate::model::plan::Slot::Logits)?, history)?;
    history.push(token);
    let mut see = |token: u32| {
        outcome.generated_tok += 1;
        match outcome.generated_tok {
            1 => outcome.first_token = start.elapsed(),
            _ => outcome.decode = start.elapsed() - outcome.first_token,
        }
        if limits.eos.contains(&token) {
            outcome.finish = Finish::Eos;
            return ControlFlow::Break(());
        }
        let flow = on(Some(token));
        if flow.is_break() {
            outcome.finish = Finish::Stopped;
        }
        flow
    };
    let mut going = see(token).is_continue();
    if going && watch.is_none() {
        let turn = Turn { seq, tokens: history, sampler };
        engine.decode(&mut [turn], most - 1, limits.context, &mut |chosen| see(chosen[0]))?;
        return Ok(outcome);
    }
    for _ in 1..most {
        if !going {
            break;
        }
        let newest = history.len() - 1;
        pass(engine, seq, newest, &history[newest..], Rows::Last, limits.context, &mut watch)?;
        let token = sampler.sample(engine.slot(crate::model::plan::Slot::Logits)?, history)?;
        history.push(token);
        going = see(token).is_continue();
    }
    Ok(outcome)
}

fn pass(
    engine: &mut Engine,
    seq: SeqId,
    start: usize,
    tokens: &[u32],
    rows: Rows,
    context: usize,
    watch: &mut Option<Watcher<'_>>,
) -> Result<(), EngineError> {
    let mut batch = Batch::default();
    batch.push(seq, start, tokens, rows, context);
    match watch {
        Some(watch) => engine.forward(&batch, watch).map(drop),
        None => engine.pass(&batch),
    }
}
