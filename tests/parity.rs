//! The CUDA engine against the CPU engine, step by step and format by format.
//!
//! Needs a GPU: prints SKIPPED without one, fails without one under `MOE_REQUIRE_GPU=1`. New steps, formats and kernels get
//! their rows in `src/engine/parity.rs`, which `moe doctor` runs too.

#[path = "common/gpu.rs"]
mod gpu;

use gpu::has_gpu;
use moe::engine::cuda::Kernels;
use moe::engine::parity::{Row, Trial, rows};
use std::sync::Mutex;

/// One model on the device at a time.
static DEVICE: Mutex<()> = Mutex::new(());

fn shown(rows: &[Row]) -> String {
    let line = |r: &Row| {
        format!("{:16} {:14} {:.2e} (bound {:.0e}, up to {} tokens)", r.step, r.format, r.error, r.tolerance, r.most_tok)
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn all_hold(kernels: Kernels) {
    let _one = DEVICE.lock().unwrap();
    let rows = rows(Trial { disturb: 1.0, kernels }, &mut |_| ()).unwrap();
    println!("{}", shown(&rows));
    let wrong: Vec<Row> = rows.into_iter().filter(|r| !r.holds()).collect();
    assert!(wrong.is_empty(), "{}", shown(&wrong));
}

#[test]
fn plain_kernels_agree() {
    if has_gpu() {
        all_hold(Kernels::Plain);
    }
}

#[test]
fn fast_kernels_agree() {
    if has_gpu() {
        all_hold(Kernels::Fast);
    }
}

/// One percent on half of the inputs must be seen by every row that has inputs beside the token ids.
#[test]
fn one_percent_on_the_inputs_is_seen() {
    if !has_gpu() {
        return;
    }
    let _one = DEVICE.lock().unwrap();
    for row in rows(Trial { disturb: 1.01, kernels: Kernels::Plain }, &mut |_| ()).unwrap() {
        assert!(row.step == "embed" || !row.holds(), "{} {} sees nothing: {:.2e}", row.step, row.format, row.error);
    }
}
