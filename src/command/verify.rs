//! `moe verify`: whether an artifact is whole, sound, and true to its source.

use super::{Status, UserError};
use crate::artifact::inventory::Inventory;
use crate::artifact::manifest::Manifest;
use crate::artifact::sums::hash_files;
use crate::artifact::weights::{Data, Stored, Weight};
use crate::cli::VerifyArgs;
use crate::files::FileError;
use crate::ids::TensorId;
use crate::quant::format::{Format, Packed};
use crate::report::{self, Out};
use crate::tensor;
use anyhow::Result;
use rayon::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Runs the command.
pub fn verify(args: &VerifyArgs, out: Out) -> Result<Status> {
    let weights = Inventory::open(&args.model)?;
    let manifest = Manifest::read(weights.checkpoint().dir())?;
    let source = args.source.as_deref().map(Inventory::open).transpose()?;
    if let Some(source) = &source
        && source.outline() != weights.outline()
    {
        let message = format!("`{}` is another model than `{}`", source.checkpoint().dir().display(), args.model.display());
        return Err(UserError::new(message).hint("pass the checkpoint that the artifact was made from").into());
    }
    let mut problems = Vec::new();
    match &manifest {
        Some(manifest) => problems.extend(checksums(&weights, manifest)?),
        None => out.note("no moe.json: checksums are not verified"),
    }
    problems.extend(tensors(&weights));
    let compared = match &source {
        Some(source) => {
            let (equal, different) = compare(&weights, source);
            problems.extend(different);
            Some(equal)
        }
        None => None,
    };
    let num_tensors = weights.tensors().len();
    let num_quantized = weights.tensors().iter().filter(|(id, _)| is_quantized(&weights, *id)).count();
    out.json(&json!({
        "model": args.model, "ok": problems.is_empty(), "problems": problems, "tensors": num_tensors, "quantized": num_quantized,
        "checksums": manifest.as_ref().map(|m| m.shards.len()), "equal_to_source": compared,
    }))?;
    for problem in &problems {
        out.line(format!("bad: {problem}"));
    }
    if problems.is_empty() {
        let sums = manifest.as_ref().map_or_else(String::new, |m| format!(", {} checksums", m.shards.len()));
        let equal = compared.map_or_else(String::new, |n| format!(", {n} unquantized tensors equal to the source"));
        out.line(format!("{}: good: {num_tensors} tensors, {num_quantized} quantized{sums}{equal}", args.model.display()));
        return Ok(Status::Done);
    }
    let hint = if source.is_some() { "quantize again from this source" } else { "copy the artifact again, or quantize again" };
    let count = if problems.len() == 1 { "1 problem".into() } else { format!("{} problems", problems.len()) };
    report::error(&format!("`{}` is not sound: {count}", args.model.display()), Some(hint));
    Ok(Status::Failure)
}

fn is_quantized(weights: &Inventory, id: TensorId) -> bool {
    weights.format(id).is_some_and(|f| f != Format::Source)
}

/// Shards whose bytes are not those that were written.
fn checksums(weights: &Inventory, manifest: &Manifest) -> Result<Vec<String>> {
    let shards = weights.checkpoint().shards();
    let paths: Vec<&Path> = shards.iter().map(|s| s.path.as_path()).collect();
    let sums = hash_files::<FileError>(&paths, &|| false, &|_| Ok(()))?;
    let mut problems = Vec::new();
    for wanted in &manifest.shards {
        match sums.iter().find(|s| s.name == wanted.name) {
            None => problems.push(format!("`{}` is named by moe.json but missing", wanted.name)),
            Some(found) if found.bytes != wanted.bytes => {
                problems.push(format!("`{}` has {} bytes, expected {}", wanted.name, found.bytes, wanted.bytes));
            }
            Some(found) if found.sha256 != wanted.sha256 => {
                problems.push(format!("`{}` has sha256 {}, expected {}", wanted.name, found.sha256, wanted.sha256));
            }
            Some(_) => {}
        }
    }
    let unknown = sums.iter().filter(|s| manifest.shards.iter().all(|w| w.name != s.name));
    problems.extend(unknown.map(|s| format!("`{}` is not named by moe.json", s.name)));
    Ok(problems)
}

/// Scales that are zero or no number, shapes that are not those of the model, floats that are no number.
fn tensors(weights: &Inventory) -> Vec<String> {
    let problems: Vec<Vec<String>> = weights
        .tensors()
        .par_iter()
        .map(|(id, shape)| {
            let mut problems = Vec::new();
            let Some(weight) = weights.get(*id) else { return vec![format!("`{id}` cannot be read")] };
            match (&weight.data, weights.stored(*id)) {
                (Data::Packed(packed), Some(Stored::Packed { module, .. })) => {
                    problems.extend(bad_scale(module, packed));
                    problems.extend(bad_shape(weights, module, shape));
                }
                _ => problems.extend(bad_float(weights, *id, &weight)),
            }
            weights.release([id]);
            problems
        })
        .collect();
    problems.into_iter().flatten().collect()
}

fn bad_scale(module: &str, packed: &Packed<'_>) -> Option<String> {
    let element = packed.scale_dtype.bits() / 8;
    let groups = packed.cols / packed.group.max(1);
    let mut values = vec![0.0; packed.scales.len() / element.max(1)];
    tensor::decode(&mut values, packed.scale_dtype, packed.scales);
    let i = values.iter().position(|x| !x.is_finite() || *x == 0.0)?;
    let place = [i / groups.max(1), i % groups.max(1)];
    Some(format!("`{module}.weight_scale` holds {} at {place:?}, expected a finite number other than zero", values[i]))
}

fn bad_shape(weights: &Inventory, module: &str, shape: &[usize]) -> Option<String> {
    let name = format!("{module}.weight_shape");
    let view = weights.checkpoint().tensor(&name)?;
    let found: Option<Vec<i64>> = match view.dtype {
        tensor::Dtype::I64 => {
            Some(view.bytes.chunks_exact(8).filter_map(|b| Some(i64::from_le_bytes(b.try_into().ok()?))).collect())
        }
        tensor::Dtype::I32 => {
            Some(view.bytes.chunks_exact(4).filter_map(|b| Some(i32::from_le_bytes(b.try_into().ok()?).into())).collect())
        }
        _ => None,
    };
    let wanted: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
    match found {
        Some(found) if found == wanted => None,
        Some(found) => Some(format!("`{name}` is {found:?}, expected {wanted:?}")),
        None => Some(format!("`{name}` has type {}, expected I64", view.dtype)),
    }
}

fn bad_float(weights: &Inventory, id: TensorId, weight: &Weight<'_>) -> Option<String> {
    let name = weights.file_tensors(id).into_iter().next().unwrap_or_else(|| id.to_string());
    let step = (1 << 18) / weight.cols.max(1) + 1;
    let mut floats = Vec::new();
    for first in (0..weight.rows).step_by(step) {
        let rows = step.min(weight.rows - first);
        floats.resize(rows * weight.cols, 0.0);
        if let Err(e) = weight.decode_rows(&mut floats, first) {
            return Some(format!("`{name}`: {e}"));
        }
        if let Some(i) = floats.iter().position(|x| !x.is_finite()) {
            let place = [first + i / weight.cols, i % weight.cols];
            return Some(format!("`{name}` holds {} at {place:?}", floats[i]));
        }
    }
    None
}

/// Number of tensors that are those of the source, and lines on those that should be and are not.
fn compare(weights: &Inventory, source: &Inventory) -> (usize, Vec<String>) {
    let kept = weights.tensors().iter().map(|(id, _)| *id).filter(|id| !is_quantized(weights, *id));
    // Parts of one fused tensor are compared as the one tensor they lie in.
    let mut files: BTreeMap<String, Option<TensorId>> = BTreeMap::new();
    files.extend(kept.filter_map(|id| Some((weights.stored(id)?.first_tensor(), Some(id)))));
    files.extend(weights.side_tensors().iter().map(|name| (name.clone(), None)));
    let files: Vec<(String, Option<TensorId>)> = files.into_iter().collect();
    let checked: Vec<Option<String>> = files
        .par_iter()
        .map(|(name, id)| {
            let (found, wanted) = (weights.checkpoint().tensor(name), source.checkpoint().tensor(name));
            let values = match id {
                Some(id) => weights.get(*id).zip(source.get(*id)),
                None => weights.side(name).zip(source.side(name)),
            };
            let problem = match (found, wanted, values) {
                (Some(a), Some(b), _) if (a.dtype, &a.shape) == (b.dtype, &b.shape) => {
                    let differs = a.bytes.iter().zip(b.bytes).position(|(x, y)| x != y);
                    differs.map(|i| format!("`{name}` differs from the source from element {} on", i * 8 / a.dtype.bits().max(1)))
                }
                (Some(a), Some(b), _) if b.dtype.is_float() || a.shape != b.shape => {
                    Some(format!("`{name}` is {} {:?}, in the source {} {:?}", a.dtype, a.shape, b.dtype, b.shape))
                }
                // Decoded or taken out of a fused tensor: the values must be the source's, in the type they were written in.
                (Some(a), _, Some((kept, original))) => other_values(name, a.dtype, &kept, &original),
                _ => Some(format!("`{name}` is not in the source")),
            };
            weights.checkpoint().release(name);
            source.checkpoint().release(name);
            problem
        })
        .collect();
    let different: Vec<String> = checked.into_iter().flatten().collect();
    (files.len() - different.len(), different)
}

/// A line on values that are not the source's, rounded to the type in which they are kept.
fn other_values(name: &str, dtype: tensor::Dtype, kept: &Weight<'_>, original: &Weight<'_>) -> Option<String> {
    if (kept.rows, kept.cols) != (original.rows, original.cols) {
        return Some(format!("`{name}` has another shape than in the source"));
    }
    let (kept, original) = match (kept.to_f32(), original.to_f32()) {
        (Ok(kept), Ok(original)) => (kept, original),
        (Err(e), _) | (_, Err(e)) => return Some(format!("`{name}`: {e}")),
    };
    let i = kept.iter().zip(&original).position(|(k, o)| k.to_bits() != tensor::round_to(dtype, *o).to_bits())?;
    Some(format!("`{name}` differs from the source from element {i} on"))
}
