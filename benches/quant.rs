//! Speed of rounding and of products with packed rows, bytes of the 16-bit source a second, one thread.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use moe::quant::format::{Activations, Bits, Group, Zero, dot_rows, dot_rows_plain};
use moe::quant::round::{Method, Rounding, quantize_rows};
use moe::tensor::{Dtype, encode};
use std::hint::black_box;

const ROWS: usize = 512;
const COLS: usize = 2048;

/// Deterministic values of a roughly normal distribution.
fn weights() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..ROWS * COLS).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 0.03).collect()
}

fn rounding(bits: Bits, zero: Zero, method: Method) -> Rounding {
    Rounding { bits, group: Group::Of(128), zero, method, scale_dtype: Dtype::BF16, positive_scales: false }
}

const FORMS: [(Bits, Zero); 3] = [(Bits::Four, Zero::Middle), (Bits::Four, Zero::Point), (Bits::Eight, Zero::Middle)];

fn quantize(c: &mut Criterion) {
    let src = weights();
    let mut group = c.benchmark_group("quantize");
    group.sample_size(20).throughput(Throughput::Bytes(2 * src.len() as u64));
    for (bits, zero) in FORMS {
        for method in [Method::Absmax, Method::Search] {
            let how = rounding(bits, zero, method);
            group.bench_function(format!("{method} {}", how.format()), |b| {
                b.iter(|| quantize_rows(black_box(&src), COLS, None, &how))
            });
        }
    }
}

fn products(c: &mut Criterion) {
    let src = weights();
    let x = &weights()[..COLS];
    let mut out = vec![0.0; ROWS];
    let mut group = c.benchmark_group("one token, weights");
    group.throughput(Throughput::Elements(src.len() as u64));
    for (bits, zero) in FORMS {
        let how = rounding(bits, zero, Method::Absmax);
        let Ok(packed) = quantize_rows(&src, COLS, None, &how) else { panic!("{} cannot hold the weights", how.format()) };
        let packed = packed.view();
        group.bench_function(how.format().to_string(), |b| {
            b.iter(|| dot_rows(&mut out, &packed, 0..ROWS, &Activations::new(black_box(x), &packed)))
        });
    }
    for dtype in [Dtype::BF16, Dtype::F32] {
        let mut bytes = vec![0; dtype.bytes(src.len())];
        encode(&mut bytes, dtype, &src);
        group.bench_function(format!("{dtype}"), |b| {
            b.iter(|| dot_rows_plain(&mut out, dtype, &bytes, COLS, 0..ROWS, black_box(x), 1))
        });
    }
    group.bench_function("plain f32 loop", |b| {
        b.iter(|| {
            for (o, row) in out.iter_mut().zip(black_box(&src).chunks_exact(COLS)) {
                *o = row.iter().zip(x).map(|(a, b)| a * b).sum();
            }
        })
    });
}

criterion_group!(benches, quantize, products);
criterion_main!(benches);
