//! `moe prepare`: the whole pipeline and one report.

use super::{Status, calibrate, measure, profile_experts, quantize, run};
use crate::artifact::manifest::Manifest;
use crate::artifact::weights::Weights;
use crate::cli::{CalibrateArgs, ListFormat, PrepareArgs, ProfileExpertsArgs, ReportArgs, RunArgs, TextArgs};
use crate::report::Out;
use anyhow::Result;
use serde_json::json;

/// Runs the command.
pub fn prepare(args: &PrepareArgs, out: Out) -> Result<Status> {
    let (source, artifact) = (&args.quantize.model, &args.quantize.output);
    // All stages but the first run the model; a family that does not run is refused before anything is written.
    drop(Weights::open(source)?);
    let inner = Out { nested: true, ..out };
    let stage = |name: &str| out.line(format!("\n== {name}"));
    stage("quantize");
    quantize::quantize(&args.quantize, inner)?;
    if args.quantize.dry_run {
        return Ok(Status::Done);
    }
    let reports = ReportArgs {
        report: artifact.join("report.json"),
        html: Some(args.html.clone().unwrap_or_else(|| artifact.join("report.html"))),
        md: None,
        csv: None,
    };
    stage("calibrate");
    let calibrated = calibrate::report(&calibration(args), inner)?;
    stage("profile experts");
    let profiled = profile_experts::profile(&profiling(args), inner)?;
    stage("run");
    let ran = run::report(&generation(args), inner)?;
    let report = json!({
        "command": "prepare",
        "tool": env!("CARGO_PKG_VERSION"),
        "source": source,
        "artifact": artifact,
        "verdict": calibrated["verdict"],
        "quantize": Manifest::read(artifact)?.map(|m| json!({"recipe": m.recipe, "totals": m.totals})),
        "calibrate": calibrated,
        "profile": profiled,
        "run": ran,
    });
    measure::write_reports(&report, &reports)?;
    out.json(&report)?;
    out.line(format!("\n{}: artifact, hot_experts.json, report.json and report.html", artifact.display()));
    Ok(if report["verdict"] == "fail" { Status::Crossed } else { Status::Done })
}

fn calibration(args: &PrepareArgs) -> CalibrateArgs {
    CalibrateArgs {
        original: args.quantize.model.clone(),
        artifact: args.quantize.output.clone(),
        text: TextArgs::tasks(args.quantize.device),
        task: Vec::new(),
        samples: Some(args.samples),
        max_kld: None,
        max_ppl_increase: None,
        sensitivity: false,
        reports: ReportArgs::default(),
    }
}

fn profiling(args: &PrepareArgs) -> ProfileExpertsArgs {
    ProfileExpertsArgs {
        model: args.quantize.output.clone(),
        task: Vec::new(),
        samples: Some(args.samples),
        coverage: None,
        budget: None,
        output: None,
        merge: None,
        decay: 0.5,
        trace: None,
        lookahead: None,
        format: ListFormat::Moe,
        device: args.quantize.device,
        vram_budget: None,
        max_memory: "1GiB".into(),
        reports: ReportArgs { report: args.quantize.output.join("report.json"), ..ReportArgs::default() },
    }
}

fn generation(args: &PrepareArgs) -> RunArgs {
    RunArgs {
        prompt: Some(args.prompt.clone()),
        max_tokens: args.max_tokens,
        temperature: Some(0.0),
        ..RunArgs::new(&args.quantize.output, args.quantize.device)
    }
}
