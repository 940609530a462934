//! `moe export`: a GGUF file for llama.cpp.

use super::{Status, UserError};
use crate::artifact::weights::Weights;
use crate::cli::ExportArgs;
use crate::export;
use crate::files::FileError;
use crate::report::{self, Out};
use anyhow::Result;
use serde_json::{Map, json};

/// Runs the command.
pub fn export(args: &ExportArgs, out: Out) -> Result<Status> {
    let weights = Weights::open(&args.model)?;
    let source = args.source.as_deref().map(Weights::open).transpose()?;
    if source.as_ref().is_some_and(|s| s.spec() != weights.spec()) {
        let message = format!("`--source` is another model than `{}`", args.model.display());
        return Err(UserError::new(message).hint("pass the checkpoint that the artifact was made from").into());
    }
    if args.gguf.is_dir() {
        return Err(UserError::new(format!("`{}` is a directory, expected the name of a file", args.gguf.display())).into());
    }
    if args.gguf.exists() && !args.force {
        return Err(FileError::Exists { path: args.gguf.clone() }.into());
    }
    let bar = std::cell::OnceCell::new();
    let advance = |n: u64, total: u64| bar.get_or_init(|| out.bytes(total, "export")).advance(n);
    let done = export::gguf(&weights, source.as_ref(), &args.gguf, &advance);
    bar.get().iter().for_each(|b| b.finish());
    let done = done?;
    for warning in &done.warnings {
        out.warn(warning);
    }
    let types: Map<String, serde_json::Value> = done.types.iter().map(|(name, n)| (name.to_string(), json!(n))).collect();
    out.json(&json!({
        "output": args.gguf, "bytes": done.bytes, "tensors": done.tensors, "types": types, "scales": done.scales,
        "rounded_scales": done.rounded_scales, "warnings": done.warnings,
    }))?;
    let shown: Vec<String> = done.types.iter().map(|(name, n)| format!("{n} {name}")).collect();
    let exact = match done.rounded_scales {
        0 => "every code and scale as in the model or newly rounded".to_string(),
        n => format!("{n} of {} scales rounded to half precision", done.scales),
    };
    out.line(format!(
        "{}: {}, {} tensors ({}), {exact}",
        args.gguf.display(),
        report::bytes(done.bytes),
        done.tensors,
        shown.join(", ")
    ));
    Ok(Status::Done)
}
