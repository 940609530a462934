//! `moe logits`: exact outputs for comparison with any other engine.

use super::{Asked, Status, UserError, open_engine};
use crate::cli::LogitsArgs;
use crate::engine::{Batch, Engine, Event, Rows};
use crate::files;
use crate::ids::SeqId;
use crate::model::plan::Slot;
use crate::report::Out;
use anyhow::{Context, Result};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;

/// Outputs of one pass, each `[B * T, width]`.
#[derive(Debug, Default)]
pub struct Outputs {
    /// By name, as in the file written: width and values, rows ordered by sequence, then position.
    pub tensors: BTreeMap<String, (usize, Vec<f32>)>,
}

/// Runs the command.
pub fn logits(args: &LogitsArgs, out: Out) -> Result<Status> {
    let (ids, [num_seq, num_tok]) = read_ids(&args.ids)?;
    let asked = Asked { device: args.device, memory: &args.memory, cache_tok: Some(ids.len()), batch: num_seq };
    let mut engine = open_engine(&args.model, &asked, out)?;
    let outputs = compute(&mut engine, &ids, num_tok, args.step, args.hidden, args.routers)?;
    let bytes: BTreeMap<&str, (Vec<usize>, Vec<u8>)> = outputs
        .tensors
        .iter()
        .map(|(name, (width, values))| {
            let shape = match name.starts_with("router_output") {
                true => vec![num_seq * num_tok, *width],
                false => vec![num_seq, num_tok, *width],
            };
            (name.as_str(), (shape, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        })
        .collect();
    let views: Vec<(&str, TensorView<'_>)> = bytes
        .iter()
        .map(|(name, (shape, bytes))| Ok((*name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<_>>()?;
    files::write_atomic(&args.output, &safetensors::serialize(views, None)?)?;
    out.json(&serde_json::json!({"output": args.output, "tensors": outputs.tensors.keys().collect::<Vec<_>>(), "sequences": num_seq, "tokens": num_tok}))?;
    out.line(format!("{}: {} tensors, {num_seq} x {num_tok} tokens", args.output.display(), outputs.tensors.len()));
    Ok(Status::Done)
}

/// `[B, T]` token ids from a safetensors file.
fn read_ids(path: &std::path::Path) -> Result<(Vec<u32>, [usize; 2])> {
    let bytes = files::read(path)?;
    let file = SafeTensors::deserialize(&bytes)
        .with_context(|| format!("`{}` is not a safetensors file", path.display()))
        .map_err(|e| UserError::new(format!("{e:#}")))?;
    let view =
        file.tensor("input_ids").map_err(|_| UserError::new(format!("`{}` holds no tensor `input_ids`", path.display())))?;
    let &[num_seq, num_tok] = view.shape() else {
        return Err(UserError::new(format!("`input_ids` has shape {:?}, expected [B, T]", view.shape())).into());
    };
    let values: Vec<i64> = match view.dtype() {
        Dtype::I64 => {
            view.data().chunks_exact(8).map(|c| i64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]])).collect()
        }
        Dtype::I32 => view.data().chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]]) as i64).collect(),
        other => return Err(UserError::new(format!("`input_ids` has type {other:?}, expected I64 or I32")).into()),
    };
    let ids = values
        .iter()
        .map(|&v| u32::try_from(v).map_err(|_| UserError::new(format!("`input_ids` holds {v}, which is no token id"))))
        .collect::<Result<Vec<u32>, _>>()?;
    if ids.is_empty() {
        return Err(UserError::new("`input_ids` is empty").into());
    }
    Ok((ids, [num_seq, num_tok]))
}

/// Runs `ids`, `[B, T]`, whole or token by token, and collects what was asked for.
pub fn compute(engine: &mut Engine, ids: &[u32], num_tok: usize, step: bool, hidden: bool, routers: bool) -> Result<Outputs> {
    let num_seq = ids.len() / num_tok;
    let chunk = if step { 1 } else { num_tok };
    let mut outputs = Outputs::default();
    for start in (0..num_tok).step_by(chunk) {
        let mut batch = Batch::default();
        for (s, row) in ids.chunks_exact(num_tok).enumerate() {
            batch.push(SeqId(s as u32), start, &row[start..start + chunk], Rows::All, num_tok);
        }
        let mut put = |name: String, values: &[f32]| {
            let width = values.len() / batch.tokens.len();
            let entry = outputs.tensors.entry(name).or_insert_with(|| (width, vec![0.0; ids.len() * width]));
            for s in 0..num_seq {
                let to = (s * num_tok + start) * width;
                entry.1[to..to + chunk * width].copy_from_slice(&values[s * chunk * width..(s + 1) * chunk * width]);
            }
        };
        engine.begin(&batch)?;
        let plan = engine.plan();
        let (prologue, layers, epilogue) = (plan.prologue.clone(), plan.layers.clone(), plan.epilogue.clone());
        engine.run(prologue, &batch, &mut |_| ())?;
        for (l, layer) in layers.into_iter().enumerate() {
            if hidden {
                put(format!("hidden.{l}"), engine.slot(Slot::Residual)?);
            }
            engine.run(layer, &batch, &mut |event| {
                let Event::Routed { layer, logits, .. } = event;
                if routers {
                    put(format!("router_output.{}", layer.0), logits);
                }
            })?;
        }
        engine.run(epilogue.start..epilogue.start + 1, &batch, &mut |_| ())?;
        if hidden {
            put(format!("hidden.{}", engine.plan().layers.len()), engine.slot(Slot::Normed)?);
        }
        engine.run(epilogue.start + 1..epilogue.end, &batch, &mut |_| ())?;
        put("logits".into(), engine.slot(Slot::Logits)?);
    }
    Ok(outputs)
}
