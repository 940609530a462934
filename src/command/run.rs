//! `moe run`: a prompt, a file, a pipe or a conversation, continued.

use super::profile_experts::Watch;
use super::{Asked, Interrupt, Status, UserError, measure, open_engine};
use crate::cli::RunArgs;
use crate::engine::{Engine, Event};
use crate::files;
use crate::generate::{self, Finish, Limits, Outcome, Watcher};
use crate::ids::SeqId;
use crate::report::{Out, bytes};
use crate::sample::{Sampler, SamplerConfig};
use crate::text::{AddSpecial, GenerationConfig, Message, StopStrings, Tokenizer};
use anyhow::Result;
use serde_json::Value;
use std::io::{BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;

/// Everything a generation needs besides its prompt.
struct Session {
    engine: Engine,
    tokenizer: Tokenizer,
    sampler: Sampler,
    eos: Vec<u32>,
    stop: Vec<String>,
    max_tokens: usize,
    max_positions: usize,
    interrupted: Interrupt,
    watch: Option<Watch>,
    out: Out,
}

/// Runs the command.
pub fn run(args: &RunArgs, out: Out) -> Result<Status> {
    let mut session = open(args, out)?;
    if args.chat {
        converse(&mut session, args.prompt.as_deref())?;
    } else {
        let report = complete(&mut session, args)?;
        out.json(&report)?;
    }
    if let Some(watch) = &session.watch {
        watch.write()?;
    }
    Ok(Status::Done)
}

/// Continues the prompt, printing it and what follows as it goes, and returns what happened.
pub fn report(args: &RunArgs, out: Out) -> Result<Value> {
    let mut session = open(args, out)?;
    if let Some(prompt) = args.prompt.as_ref().filter(|_| !out.json) {
        out.piece(prompt);
    }
    complete(&mut session, args)
}

fn open(args: &RunArgs, out: Out) -> Result<Session> {
    let asked = Asked { device: args.device, memory: &args.memory, cache_tok: None, batch: 1 };
    let engine = open_engine(&args.model, &asked, out)?;
    let watch = match (&args.update_profile, engine.weights()) {
        (Some(path), Some(weights)) => Some(Watch::open(path, &args.model, weights)?),
        _ => None,
    };
    let tokenizer = measure::tokenizer(&args.model, engine.spec())?;
    let defaults = GenerationConfig::open(&args.model)?;
    let sampler = sampler(args, &defaults, out)?;
    let eos = if defaults.eos.is_empty() { tokenizer.eos().into_iter().collect() } else { defaults.eos.clone() };
    Ok(Session {
        max_positions: engine.spec().max_positions,
        engine,
        tokenizer,
        sampler,
        eos,
        stop: args.stop.clone(),
        max_tokens: args.max_tokens,
        interrupted: Interrupt::install()?,
        watch,
        out,
    })
}

fn sampler(args: &RunArgs, defaults: &GenerationConfig, out: Out) -> Result<Sampler> {
    let default_temperature = if defaults.do_sample == Some(true) { defaults.temperature.unwrap_or(1.0) } else { 0.0 };
    let temperature = args.temperature.unwrap_or(default_temperature);
    let seed = args.seed.unwrap_or_else(|| {
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        clock.as_nanos() as u64 & 0xffff_ffff
    });
    if temperature > 0.0 && args.seed.is_none() {
        out.note(format!("seed {seed}"));
    }
    Ok(Sampler::new(SamplerConfig {
        temperature,
        top_k: args.top_k.or(defaults.top_k),
        top_p: args.top_p.or(defaults.top_p),
        min_p: args.min_p.or(defaults.min_p),
        repeat_penalty: args.repeat_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
        seed,
    })?)
}

fn complete(session: &mut Session, args: &RunArgs) -> Result<Value> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => String::from_utf8(files::read(path)?).map_err(|e| {
            UserError::new(format!("`{}` is not UTF-8: invalid byte at {}", path.display(), e.utf8_error().valid_up_to()))
        })?,
        (None, None) => {
            if std::io::stdin().is_terminal() {
                return Err(UserError::new("no prompt given")
                    .hint("use -p TEXT, --prompt-file FILE, --chat, or pipe text in")
                    .into());
            }
            let mut bytes = Vec::new();
            std::io::stdin().read_to_end(&mut bytes)?;
            String::from_utf8(bytes).map_err(|_| UserError::new("standard input is not UTF-8"))?
        }
    };
    let special = if args.raw { AddSpecial::No } else { AddSpecial::Yes };
    let mut history = session.tokenizer.encode(&prompt, special)?;
    if history.is_empty() {
        return Err(UserError::new("the prompt is empty, expected at least one token").into());
    }
    let (text, outcome) = answer(session, &mut history)?;
    Ok(serde_json::json!({
        "prompt": prompt,
        "text": text,
        "finish": format!("{:?}", outcome.finish).to_lowercase(),
        "prompt_tok": outcome.prompt_tok,
        "generated_tok": outcome.generated_tok,
        "ttft_ms": outcome.first_token.as_secs_f64() * 1e3,
        "decode_tok_s": outcome.tok_s(),
    }))
}

fn converse(session: &mut Session, first: Option<&str>) -> Result<()> {
    if !session.tokenizer.has_chat_template() {
        return Err(UserError::new("this model has no chat template").hint("use -p TEXT to complete plain text").into());
    }
    let mut messages: Vec<Message> = Vec::new();
    let mut history: Vec<u32> = Vec::new();
    let mut next = first.map(str::to_string);
    session.out.note("one line a message; an empty line or Ctrl-D ends");
    loop {
        let line = match next.take() {
            Some(line) => line,
            None => match read_line(session)? {
                Some(line) => line,
                None => return Ok(()),
            },
        };
        messages.push(Message { role: "user".into(), content: line });
        let prompt = session.tokenizer.chat(&messages, true)?;
        let tokens = session.tokenizer.encode(&prompt, AddSpecial::No)?;
        if !tokens.starts_with(&history) || session.engine.cached(SeqId(0)) >= tokens.len() {
            session.engine.release(SeqId(0));
        }
        history = tokens;
        session.interrupted.clear();
        let (text, _) = answer(session, &mut history)?;
        history.truncate(session.engine.cached(SeqId(0)));
        messages.push(Message { role: "assistant".into(), content: text });
    }
}

fn read_line(session: &Session) -> Result<Option<String>> {
    if std::io::stdin().is_terminal() && !session.out.quiet {
        session.out.piece("> ");
        std::io::stdout().flush()?;
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line)?;
    let line = line.trim_end_matches(['\n', '\r']).to_string();
    Ok((read > 0 && !line.is_empty() && !session.interrupted.pressed()).then_some(line))
}

/// Continues `history`, printing as it goes; returns the text and what happened.
fn answer(session: &mut Session, history: &mut Vec<u32>) -> Result<(String, Outcome)> {
    let Session { engine, tokenizer, sampler, eos, stop, interrupted, watch, out, .. } = session;
    if history.len() >= session.max_positions {
        return Err(UserError::new(format!(
            "the prompt has {} tokens, but this model was made for at most {}",
            history.len(),
            session.max_positions
        ))
        .into());
    }
    let context = session.max_positions.min(history.len() + session.max_tokens);
    let limits = Limits { max_tokens: session.max_tokens, eos, context };
    let mut stream = tokenizer.stream(history);
    let mut stops = StopStrings::new(stop.clone());
    let mut text = String::new();
    let mut failed = None;
    let emit = |piece: &str, text: &mut String| {
        text.push_str(piece);
        if !out.json && !piece.is_empty() {
            out.piece(piece);
        }
    };
    engine.take_traffic()?;
    let mut see = watch.as_mut().map(|watch| {
        watch.begin();
        |event: Event<'_>| watch.see(event)
    });
    let watcher = see.as_mut().map(|see| see as Watcher<'_>);
    let outcome = generate::generate(engine, SeqId(0), history, sampler, &limits, watcher, &mut |token| {
        if interrupted.pressed() {
            return ControlFlow::Break(());
        }
        let Some(token) = token else { return ControlFlow::Continue(()) };
        match stream.push(token) {
            Ok(None) => ControlFlow::Continue(()),
            Ok(Some(piece)) => {
                let found = stops.push(&piece);
                emit(&found.text, &mut text);
                if found.stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(e) = failed {
        return Err(e.into());
    }
    if let Some(rest) = stream.finish()? {
        let found = stops.push(&rest);
        emit(&found.text, &mut text);
    }
    emit(&stops.finish(), &mut text);
    out.line("");
    let why = match outcome.finish {
        _ if interrupted.pressed() => ", interrupted",
        Finish::Length if context == session.max_positions => ", context full",
        _ => "",
    };
    out.note(format!(
        "{} prompt tokens, first token after {}; {} tokens at {:.1} tok/s{why}",
        outcome.prompt_tok,
        crate::report::seconds(outcome.first_token.as_secs_f64()),
        outcome.generated_tok,
        outcome.tok_s()
    ));
    if let Some(t) = engine.take_traffic()? {
        out.note(format!(
            "{:.1} % of the experts used were in GPU memory; {} a token over the link at {:.1} GB/s",
            100.0 * t.hit_rate(),
            bytes(t.bytes / outcome.generated_tok.max(1) as u64),
            t.link_bytes_s() / 1e9
        ));
        if t.ahead > 0 {
            let (recall, waste) = (100.0 * t.recall(), 100.0 * t.waste());
            out.note(format!("{recall:.1} % of the others came a layer ahead; {waste:.1} % of what came ahead was not used"));
        }
        if t.disk_experts > 0 {
            out.note(format!(
                "{} experts read from the disk, {} at {:.2} GB/s",
                t.disk_experts,
                bytes(t.disk_bytes),
                t.disk_bytes_s() / 1e9
            ));
        }
    }
    engine.take_notes().iter().for_each(|note| out.note(note));
    Ok((text, outcome))
}
