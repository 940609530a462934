//! The routed experts of a layer: tokens grouped by expert, each expert's three products, weighted sum in order of rank.

use super::linear::transposed;
use super::{Routed, required, silu};
use crate::artifact::weights::Weights;
use crate::checkpoint::CheckpointError;
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use rayon::prelude::*;

/// Most tokens of an expert at work together, so that memory does not depend on how evenly tokens are spread.
pub const VISITS: usize = 512;

/// `silu(gate_e x) * up_e x`, `[T, F]`, of inputs `x`, `[T, D]`: what an expert's down projection sees.
pub fn inner(weights: &Weights, layer: LayerId, expert: ExpertId, x: &[f32], width: usize) -> Result<Vec<f32>, CheckpointError> {
    let id = |role| TensorId::expert(layer, expert, role);
    let n = x.len() / weights.spec().width;
    let (mut gate, mut up) = (vec![0.0; width * n], vec![0.0; width * n]);
    transposed(&mut gate, x, &required(weights, id(Role::ExpertGate)))?;
    transposed(&mut up, x, &required(weights, id(Role::ExpertUp)))?;
    let mut inner = vec![0.0; n * width];
    for (t, row) in inner.chunks_exact_mut(width).enumerate() {
        row.iter_mut().enumerate().for_each(|(f, v)| *v = silu(gate[f * n + t]) * up[f * n + t]);
    }
    Ok(inner)
}

/// `dst[T, D] = sum over k of gate * down(silu(gate x) * up x)`.
pub(super) fn experts(
    dst: &mut [f32],
    src: &[f32],
    routed: &Routed,
    weights: &Weights,
    layer: LayerId,
    width: usize,
) -> Result<(), CheckpointError> {
    let d = weights.spec().width;
    let top_k = routed.top_k;
    let num_experts = routed.logits.len() * top_k / routed.experts.len().max(1);
    let mut visits: Vec<Vec<usize>> = vec![Vec::new(); num_experts];
    for (i, &e) in routed.experts.iter().enumerate() {
        visits[e as usize].push(i);
    }
    let busy: Vec<(usize, &[usize])> =
        visits.iter().enumerate().flat_map(|(e, v)| v.chunks(VISITS).map(move |v| (e, v))).collect();
    let outputs: Vec<Vec<f32>> = busy
        .par_iter()
        .map(|(e, visits)| {
            let x: Vec<f32> = visits.iter().flat_map(|&i| src[i / top_k * d..(i / top_k + 1) * d].iter().copied()).collect();
            let n = visits.len();
            let expert = ExpertId(*e as u32);
            let inner = inner(weights, layer, expert, &x, width)?;
            let mut out = vec![0.0; d * n];
            transposed(&mut out, &inner, &required(weights, TensorId::expert(layer, expert, Role::ExpertDown)))?;
            Ok(out)
        })
        .collect::<Result<_, CheckpointError>>()?;
    let mut place = vec![(0, 0); routed.experts.len()];
    for (b, (_, visits)) in busy.iter().enumerate() {
        visits.iter().enumerate().for_each(|(column, &i)| place[i] = (b, column));
    }
    dst.par_chunks_exact_mut(d).enumerate().for_each(|(t, row)| {
        row.fill(0.0);
        let chosen = t * top_k..(t + 1) * top_k;
        for (&(b, column), &gate) in place[chosen.clone()].iter().zip(&routed.gates[chosen]) {
            let n = busy[b].1.len();
            row.iter_mut().zip(outputs[b][column..].iter().step_by(n)).for_each(|(x, y)| *x += gate * y);
        }
    });
    Ok(())
}
