//! `moe doctor`: whether this machine's GPU can be used, how fast its memory is, and whether every kernel computes what the
//! processor computes.

use super::Status;
use super::bench::gpu;
use crate::cli::DoctorArgs;
use crate::engine::cuda::{Kernels, measure, module};
use crate::engine::parity::{self, Row, Trial};
use crate::report::{Out, bytes, table};
use anyhow::Result;
use std::collections::BTreeSet;

/// Relative error above which a row is pointed out although it is within its bound.
const NOTABLE: f64 = 1e-3;

/// Runs the command.
pub fn doctor(args: &DoctorArgs, out: Out) -> Result<Status> {
    let device = match gpu() {
        Ok(device) => device,
        Err(reason) => {
            out.line(format!("GPU       {reason}: everything runs on the processor"));
            if let Some(hint) = reason.hint() {
                out.line(format!("hint      {hint}"));
            }
            out.json(&serde_json::json!({"command": "doctor", "gpu": null, "reason": reason.to_string()}))?;
            return Ok(Status::Done);
        }
    };
    let p = device.properties().clone();
    let (free, total) = device.memory()?;
    out.line(format!(
        "GPU       {}, {}, {} multiprocessors, {} of {} free",
        p.name,
        p.arch(),
        p.num_sm,
        bytes(free),
        bytes(total)
    ));
    out.line(format!("driver    speaks CUDA {}", p.driver));
    let compiler = module::compiler();
    match &compiler {
        Ok(version) => {
            let place = module::compiler_path().map_or(String::new(), |p| format!(", {}", p.display()));
            out.line(format!("compiler  NVRTC {version}{place}"));
        }
        Err(reason) => {
            out.line(format!("compiler  {reason}"));
            out.line(format!("hint      {}", reason.hint().unwrap_or_default()));
        }
    }
    out.line(format!("cache     {}", module::cache_dir().map_or("none".into(), |d| d.display().to_string())));
    let rates = measure::rates(&device)?;
    let share = 100.0 * rates.read_bytes_s / p.spec_bandwidth();
    let (read, spec) = (rates.read_bytes_s / 1e9, p.spec_bandwidth() / 1e9);
    let (link, by_kernels) = (rates.host_to_device_bytes_s / 1e9, rates.host_read_bytes_s / 1e9);
    out.line(format!(
        "memory    {read:.0} GB/s read, {share:.0} % of {spec:.0}; host to device {link:.1} GB/s, read by kernels {by_kernels:.1}"
    ));
    let mut rows = Vec::new();
    if args.quick {
        out.line("kernels   were not compared");
    } else {
        module::set_unfit(&p, &[]);
        let both = [Kernels::Plain, Kernels::Fast];
        let progress = out.count(both.map(parity::parts).iter().sum(), "comparing kernels");
        for kernels in both {
            let mut found = parity::rows(Trial { disturb: 1.0, kernels }, &mut |_| progress.advance(1))?;
            found.retain(|r| kernels == Kernels::Plain || !r.step.ends_with("(plain)") && r.step != "embed");
            rows.extend(found);
        }
        progress.finish();
        let wrong: Vec<&Row> = rows.iter().filter(|r| !r.holds()).collect();
        let blocks: BTreeSet<String> = wrong.iter().filter_map(|r| Some(r.step.split_once(' ')?.0.into())).collect();
        let blocks: Vec<String> = blocks.into_iter().collect();
        module::set_unfit(&p, &blocks);
        out.line(if wrong.is_empty() {
            format!("kernels   all {} compute what the processor computes", rows.len())
        } else {
            let names: Vec<String> = wrong.iter().map(|r| format!("{} {}", r.step, r.format)).collect();
            format!("kernels   {} of {} are WRONG on this machine: {}", wrong.len(), rows.len(), names.join(", "))
        });
        if !blocks.is_empty() {
            out.line(format!("hint      from now on plain kernels run here: {}", blocks.join(", ")));
        }
        let cells: Vec<Vec<String>> = rows
            .iter()
            .map(|r| {
                let verdict = if !r.holds() {
                    "WRONG"
                } else if r.error > NOTABLE {
                    "rounded to bf16"
                } else {
                    "exact"
                };
                vec![r.step.clone(), r.format.clone(), format!("{:.1e}", r.error), format!("{:.0e}", r.tolerance), verdict.into()]
            })
            .collect();
        out.line(table(&["kernel", "format", "error", "bound", ""], &cells));
    }
    out.json(&serde_json::json!({
        "command": "doctor", "tool": env!("CARGO_PKG_VERSION"), "gpu": p, "free_bytes": free, "compiler": compiler.ok(),
        "cache": module::cache_dir(), "measured": rates, "rows": rows,
    }))?;
    Ok(if rows.iter().all(Row::holds) { Status::Done } else { Status::Crossed })
}
