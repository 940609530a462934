//! The plan of the memory, from what was typed to a table.

use super::{UserError, measure};
use crate::artifact::hot::{self, HotError, HotExperts};
use crate::artifact::lookahead::{self, Lookahead, LookaheadError};
use crate::cli::{Ahead, MemoryArgs, Numa};
use crate::engine::cuda::{self, CudaError, Options};
use crate::model::family::Family;
use crate::model::spec::ModelSpec;
use crate::report::{bytes, table};
use crate::tiers::{Needs, VramPlan, plan};
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;

/// Options of the engine; `dir` is where the model lies, if it lies anywhere.
pub(super) fn options(args: &MemoryArgs, dir: Option<&Path>, spec: &ModelSpec, family: &Family) -> Result<Options> {
    let beside = |name: &str| dir.map(|d| d.join(name)).filter(|p| p.is_file());
    let visits = args.hot.clone().or_else(|| beside(hot::FILE)).map(|path| visits(&path, spec, family)).transpose()?;
    let lookahead = args.lookahead.clone().or_else(|| beside(lookahead::FILE)).map(|path| maps(&path, spec)).transpose()?;
    Ok(Options {
        budget_bytes: args.vram_budget.as_deref().map(measure::bytes).transpose()?,
        host_bytes: args.host_budget.as_deref().map(measure::bytes).transpose()?.unwrap_or(u64::MAX),
        ahead: match args.ahead {
            Ahead::Auto => cuda::ahead::Ahead::Tried,
            Ahead::AtMost(n) => cuda::ahead::Ahead::AtMost(n),
        },
        numa: match args.numa {
            Numa::Off => cuda::Numa::Off,
            Numa::Interleave => cuda::Numa::Interleave,
            Numa::Bind => cuda::Numa::Bind,
        },
        visits: visits.unwrap_or_default(),
        lookahead: Arc::new(lookahead.unwrap_or_default()),
        ..Options::default()
    })
}

/// Visits of every expert as a list of hot experts counted them, `[layers with routers][E]`.
fn visits(path: &Path, spec: &ModelSpec, family: &Family) -> Result<Vec<Vec<u64>>> {
    let read = || -> Result<HotExperts, HotError> {
        let list = HotExperts::read(path)?;
        list.check_model(path, spec, &family.names)?;
        Ok(list)
    };
    let list = read().map_err(|e| match e {
        HotError::File(e) => anyhow::Error::from(e),
        e => UserError::new(e.to_string())
            .hint("--hot takes a hot_experts.json of this model; `moe profile-experts` makes one")
            .into(),
    })?;
    Ok(list.layers.into_iter().map(|l| l.counts).collect())
}

/// Maps to the routers of a model.
fn maps(path: &Path, spec: &ModelSpec) -> Result<Lookahead> {
    let read = || -> Result<Lookahead, LookaheadError> {
        let maps = Lookahead::read(path)?;
        maps.check_model(path, spec)?;
        Ok(maps)
    };
    read().map_err(|e| match e {
        LookaheadError::File(e) => anyhow::Error::from(e),
        e => UserError::new(e.to_string())
            .hint("--lookahead takes maps of this model; `moe profile-experts --lookahead FILE` makes them")
            .into(),
    })
}

/// The plan for a budget, with no GPU asked.
pub(super) fn offline(needs: &Needs, budget_bytes: u64, host_bytes: u64) -> Result<VramPlan, CudaError> {
    plan::plan(needs, budget_bytes, host_bytes).map_err(|e| CudaError::Budget { smallest_bytes: e.smallest_bytes, budget_bytes })
}

/// The plan as a table, for so many sequences at a time.
pub(super) fn shown(plan: &VramPlan, batch: usize) -> String {
    let mut rows: Vec<(String, u64)> = plan.weights.iter().map(|(what, n)| (what.to_string(), *n)).collect();
    if plan.experts > 0 {
        rows.push((experts(plan), plan.slot_bytes));
    }
    let each =
        if batch > 1 { format!(", {} for each of {batch} sequences", plan.cache_tok / batch as u64) } else { String::new() };
    rows.push((format!("keys and values: {} tokens in {} pages{each}", plan.cache_tok, plan.pages), plan.cache_bytes));
    if plan.ring_bytes > 0 {
        rows.push(("ring for prompts".into(), plan.ring_bytes));
    }
    rows.push(("workspace".into(), plan.workspace_bytes));
    rows.push(("driver".into(), plan.driver_bytes));
    rows.push(("sum".into(), plan.total_bytes));
    rows.push(("budget".into(), plan.budget_bytes));
    let cells: Vec<Vec<String>> = rows.into_iter().map(|(what, n)| vec![what, bytes(n)]).collect();
    let mut text = table(&["GPU memory", "bytes"], &cells);
    if plan.offloaded_bytes > 0 {
        text += &format!("\n{}", table(&["host memory", "bytes"], &host(plan)));
        text += &format!("\nall experts fit into GPU memory from {}", bytes(plan.resident_bytes));
        if !plan.host.fits() {
            let least = plan.host.smallest_bytes;
            text += &format!("\n--host-budget is too small: the least that works is {least} ({})", bytes(least));
        }
    }
    text
}

/// What lies outside of the GPU's memory.
fn host(plan: &VramPlan) -> Vec<Vec<String>> {
    let (copies, permanent): (usize, usize) = (plan.host.slots.iter().sum(), plan.host.permanent.iter().sum());
    let mut rows = vec![vec![format!("page-locked: copies of {copies} experts"), bytes(plan.host.bytes)]];
    if permanent > 0 {
        rows.push(vec![format!("no copy: {permanent} experts stay in GPU memory for good"), "-".into()]);
    }
    if plan.host.disk_bytes > 0 {
        let left = plan.experts - copies - permanent;
        rows.push(vec![format!("read from the disk when needed: {left} experts"), bytes(plan.host.disk_bytes)]);
    }
    rows
}

fn experts(plan: &VramPlan) -> String {
    let slots: usize = plan.slots.iter().sum();
    if plan.offloaded_bytes == 0 {
        return format!("experts: all {}", plan.experts);
    }
    let (least, most) = (plan.slots.iter().min().unwrap_or(&0), plan.slots.iter().max().unwrap_or(&0));
    let by_layer = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let (all, share) = (plan.experts, 100.0 * plan.coverage);
    let from = if plan.profiled { "by the profile" } else { "without a profile" };
    format!("experts: {slots} of {all} resident, {by_layer} slots a layer, {share:.0} % of visits expected {from}")
}
