//! Packed formats: bit-equality with compressed-tensors, round trips, error bounds, products against decoded rows.
//! New formats get a case in the fixture script and a row here.

mod common;

use moe::artifact::weights::Weights;
use moe::quant::format::{Activations, Bits, Format, Group, Level, OwnedPacked, Zero, dot_rows, dot_rows_plain, fit};
use moe::quant::round::{Method, RoundError, Rounding, quantize_rows};
use moe::tensor::{Dtype, TensorView, encode, round_to};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn how(format: Format, method: Method, scale_dtype: Dtype) -> Rounding {
    let Format::Int { bits, group, zero } = format else { panic!("{format} has no codes") };
    Rounding { bits, group, zero, method, scale_dtype, positive_scales: false }
}

fn quantize(src: &[f32], cols: usize, how: &Rounding) -> OwnedPacked {
    quantize_rows(src, cols, None, how).unwrap()
}

fn decoded(packed: &OwnedPacked) -> Vec<f32> {
    let mut rows = vec![0.0; packed.rows * packed.cols];
    packed.view().dequantize_rows(&mut rows, 0);
    rows
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum()
}

/// Words, scales and zero points of `absmax` equal the library's, bit for bit, for every source type and format; the matrices hold
/// zero groups, spans of seven decades, values of one sign and ties, and six rows, which are no whole word of zero points. Fails if
/// a quotient, or its sum with the zero point, is not rounded to the source type, if ties go away from zero, or if zero points are
/// packed along columns.
#[test]
fn absmax_equals_compressed_tensors() {
    let cases = [
        ("int4_g128", Format::INT4_G128),
        ("int4_g64", "int4:g64".parse().unwrap()),
        ("int4_g32", "int4:g32".parse().unwrap()),
        ("int8_g128", Format::INT8_G128),
        ("int8_channel", Format::INT8_CHANNEL),
        ("int4_g128_asym", "int4:g128:asym".parse().unwrap()),
        ("int4_g32_asym", "int4:g32:asym".parse().unwrap()),
        ("int4_channel_asym", "int4:channel:asym".parse().unwrap()),
        ("int8_g64_asym", "int8:g64:asym".parse().unwrap()),
    ];
    for (name, dtype) in [("bf16", Dtype::BF16), ("f16", Dtype::F16), ("f32", Dtype::F32)] {
        let path = format!("{}/tests/fixtures/compressed_tensors/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (case, format) in cases {
            let tensor = |part: &str| file.tensor(&format!("{case}.{part}")).unwrap();
            let weight = tensor("weight");
            let src = TensorView { dtype, shape: weight.shape().to_vec(), bytes: weight.data() }.to_f32().unwrap();
            let found = quantize(&src, weight.shape()[1], &how(format, Method::Absmax, dtype));
            assert!(found.scales == tensor("weight_scale").data(), "{name} {case}: scales differ");
            let zeros = file.tensor(&format!("{case}.weight_zero_point")).ok();
            assert_eq!(found.zeros.as_deref(), zeros.as_ref().map(|z| z.data()), "{name} {case}: zero points differ");
            let shape = [format.zero_rows(weight.shape()[0]), format.scale_cols(weight.shape()[1])];
            assert!(zeros.is_none_or(|z| z.shape() == shape), "{name} {case}");
            assert!(found.words == tensor("weight_packed").data(), "{name} {case}: words differ");
        }
    }
}

/// The ladder: 128, 64, 32, 8 bits a row, source. Fails if a step is left out.
#[test]
fn the_ladder_finds_the_first_format_that_fits() {
    let rows = [
        (Format::INT4_G128, 2048, "int4:g128"),
        (Format::INT4_G128, 704, "int4:g64"),
        (Format::INT4_G128, 2880, "int4:g64"),
        (Format::INT4_G128, 96, "int4:g32"),
        (Format::INT4_G128, 40, "int8:channel"),
        (Format::INT8_G128, 10944, "int8:g64"),
        (Format::INT8_CHANNEL, 36, "int8:channel"),
        (Format::INT4_G128, 30, "source"),
        (Format::INT4_G128.with_zero(Zero::Point), 704, "int4:g64:asym"),
        (Format::INT4_G128.with_zero(Zero::Point), 40, "int8:channel"),
    ];
    for (wanted, cols, expected) in rows {
        assert_eq!(fit(wanted, cols).to_string(), expected, "{wanted} for {cols} columns");
    }
}

#[test]
fn formats_print_as_they_parse() {
    for text in ["source", "int4:g128", "int4:g32", "int8:g64", "int8:channel", "int4:g64:asym", "int8:channel:asym"] {
        assert_eq!(text.parse::<Format>().unwrap().to_string(), text);
    }
    assert_eq!("int8".parse(), Ok(Format::INT8_G128));
    assert_eq!("int4:asym".parse(), Ok(Format::INT4_G128.with_zero(Zero::Point)));
    for wrong in ["int3", "int4:g7", "source:asym", "int4:asym:g32", "int4:sym"] {
        assert!(wrong.parse::<Format>().is_err(), "{wrong}");
    }
}

/// Bytes of `mixed` for one expert matrix, by hand: 768 rows of 2048 columns are 786 432 bytes of codes and 24 576 of scales; zero points
/// of 16 groups are 64 bytes for each eight rows, also for the last ones.
#[test]
fn sizes_count_codes_and_scales() {
    assert_eq!(Format::INT4_G128.bytes(768, 2048, Dtype::BF16), 786_432 + 24_576);
    assert_eq!(Format::INT4_G128.bits_per_weight(2048, Dtype::BF16), 4.125);
    let asym = Format::INT4_G128.with_zero(Zero::Point);
    assert_eq!(asym.bytes(768, 2048, Dtype::BF16), 786_432 + 24_576 + 96 * 64);
    assert_eq!(asym.bytes(3, 2048, Dtype::BF16), 3 * (1024 + 32) + 64);
    assert_eq!(asym.bits_per_weight(2048, Dtype::BF16), 4.15625);
}

#[test]
fn values_that_cannot_be_stored_are_named() {
    let mut src = vec![0.5f32; 256];
    src[200] = f32::INFINITY;
    let how = Rounding { scale_dtype: Dtype::F16, ..how(Format::INT4_G128, Method::Search, Dtype::F16) };
    assert_eq!(quantize_rows(&src, 256, None, &how), Err(RoundError::NonFinite { row: 0, col: 200 }));
    src[200] = 1e6;
    assert_eq!(quantize_rows(&src, 256, None, &how), Err(RoundError::ScaleOverflow { row: 0, col: 128 }));
}

/// Unit activation energies weigh nothing: the choice is that of the plain search. Fails if the weight enters squared and scaled.
#[test]
fn equal_energies_change_nothing() {
    let src: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
    for zero in [Zero::Middle, Zero::Point] {
        let how = how(Format::INT4_G128.with_zero(zero), Method::Search, Dtype::BF16);
        assert_eq!(quantize_rows(&src, 256, Some(&[1.0; 256]), &how).unwrap(), quantize(&src, 256, &how));
    }
}

/// Where errors weigh nothing, or are too small to square, nothing is clipped: the scale is that of absmax. Fails if the first
/// candidate of the grid is its lowest.
#[test]
fn search_without_evidence_keeps_the_absmax_scale() {
    let src: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
    let tiny: Vec<f32> = src.iter().map(|x| x * 1e-24).collect();
    for zero in [Zero::Middle, Zero::Point] {
        let how = |method, dtype| how(Format::INT4_G128.with_zero(zero), method, dtype);
        let found = quantize_rows(&src, 128, Some(&[0.0; 128]), &how(Method::Search, Dtype::BF16)).unwrap();
        let widest = quantize(&src, 128, &how(Method::Absmax, Dtype::BF16));
        assert!(found.scales == widest.scales);
        let error = |method| squared_error(&tiny, &decoded(&quantize(&tiny, 128, &how(method, Dtype::F32))));
        assert!(error(Method::Search) < error(Method::Absmax));
    }
}

/// The definition of the search in double precision: every scale of the grid with both signs, or with every code of zero that
/// is at most three from the one that centres the range; the first of the least errors, and that error.
fn whole_grid(x: &[f32], energy: &[f32], how: &Rounding) -> (Level, f64) {
    let (half, top) = (how.bits.half() as f32, how.bits.top() as f32);
    let (low, high) = x.iter().fold((0f32, 0f32), |(l, h), &v| (l.min(v), h.max(v)));
    let base = if how.zero == Zero::Point { (high - low) / top } else { high.max(-low) / (half - 0.5) };
    let lowest = if how.bits == Bits::Four { 60 } else { 94 };
    let (mut best, mut least) = (Level::default(), f64::INFINITY);
    for f in [100].into_iter().chain((lowest..100).rev()).chain(101..=105) {
        let scale = round_to(how.scale_dtype, f as f32 * 0.01 * base);
        let centre = (half - 0.5 - 0.5 * (low + high) * (1.0 / scale)).round_ties_even();
        let pointed = [0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0].map(|d| Level { scale, zero: (centre + d).clamp(0.0, top) });
        let signed = [scale, -scale].map(|scale| Level { scale, zero: half });
        for level in if how.zero == Zero::Point { &pointed[..] } else { &signed[..] } {
            let error = level_error(*level, top, x, energy);
            if error < least {
                (best, least) = (*level, error);
            }
        }
    }
    (best, least)
}

fn level_error(level: Level, top: f32, x: &[f32], energy: &[f32]) -> f64 {
    let (scale, zero) = (level.scale as f64, level.zero as f64);
    let left = |v: f32| v as f64 - (v as f64 / scale).round_ties_even().clamp(-zero, top as f64 - zero) * scale;
    x.iter().zip(energy).map(|(&v, &w)| w as f64 * left(v).powi(2)).sum()
}

/// The search chooses the scale of the whole grid on 99.9 % of groups (99.6 % with zero points, of which there are 3.5 times as many
/// candidates), be they normal, of heavy tails, or of a trained model, weighted or not; the rest are ties that single-precision sums of
/// 128 squares cannot tell apart, 1e-5 relative at most. Fails if the values that can be
/// clipped are told by the absmax scale instead of the smallest, if a candidate is left out, if weights are mixed up, or if zero points
/// of a group are taken for another's.
#[test]
fn the_search_is_the_whole_grid() {
    let uniform = common::random_values(2 * 128 * 8192, 1);
    let normal: Vec<f32> = uniform
        .chunks_exact(2)
        .map(|u| (-2.0 * (0.5 * (u[0] + 1.0)).max(1e-7).ln()).sqrt() * (std::f32::consts::PI * u[1]).cos())
        .collect();
    // Student's t with three degrees of freedom.
    let heavy: Vec<f32> =
        normal.chunks_exact(4).map(|z| z[0] / ((z[1] * z[1] + z[2] * z[2] + z[3] * z[3]) / 3.0).sqrt().max(1e-3)).collect();
    let tiny = Weights::open(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny"))).unwrap();
    let matrices = tiny.tensors().iter().filter(|(_, shape)| shape.len() == 2 && shape[1].is_multiple_of(128)).step_by(5);
    let trained: Vec<f32> = matrices.flat_map(|(id, _)| tiny.get(*id).unwrap().to_f32().unwrap()).collect();
    let plain = vec![1.0; 128];
    let energy: Vec<f32> = common::random_values(128, 2).iter().map(|x| x * x).collect();
    for (name, src) in [("normal", normal), ("heavy", heavy), ("trained", trained)] {
        for format in ["int4:g128", "int8:g128", "int4:g32", "int4:g128:asym", "int8:g64:asym"].map(|f| f.parse().unwrap()) {
            for (weighted, energy) in [(false, &plain), (true, &energy)] {
                let how = how(format, Method::Search, Dtype::BF16);
                let Group::Of(group) = how.group else { unreachable!() };
                // As many candidates in all, with zero points or without.
                let groups = if how.zero == Zero::Point { 600 } else { 2048 };
                let src = &src[..src.len().min(groups * group)];
                let found = quantize_rows(src, 128, weighted.then_some(&energy[..]), &how).unwrap().view().levels();
                let differ = (0..found.len())
                    .filter(|g| {
                        let first = g * group % 128;
                        let (x, energy) = (&src[g * group..][..group], &energy[first..first + group]);
                        let (best, least) = whole_grid(x, energy, &how);
                        let error = level_error(found[*g], how.bits.top() as f32, x, energy);
                        assert!(error <= least * (1.0 + 1e-5), "{name} {format} weighted {weighted}: {error} {least}");
                        found[*g] != best
                    })
                    .count();
                let allowed = found.len() * if how.zero == Zero::Point { 4 } else { 1 } / 1000;
                assert!(differ <= allowed, "{name} {format} weighted {weighted}: {differ} of {}", found.len());
                assert!(found.len() * 50 >= groups * 49, "{name}: {}", found.len());
            }
        }
    }
}

fn sample() -> impl Strategy<Value = (Vec<f32>, Format, Dtype)> {
    let formats = ["int4:g128", "int4:g64", "int4:g32", "int8:g128", "int8:channel", "int4:g64:asym", "int8:channel:asym"];
    let formats = prop::sample::select(formats.to_vec());
    let values = prop::collection::vec(-1.0f32..1.0, 3 * 384);
    let scale = prop::sample::select(vec![1e-5f32, 0.03, 200.0]);
    (values, formats, prop::sample::select(vec![Dtype::BF16, Dtype::F32]), scale)
        .prop_map(|(v, f, d, s)| (v.into_iter().map(|x| x * s).collect(), f.parse().unwrap(), d))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The search never leaves more squared error than absmax whose scale is on its grid, up to the single-precision sums that
    /// choose it (1e-4 relative). Fails if the sign of the scale is lost in packing.
    #[test]
    fn search_is_at_least_as_close_as_absmax((src, format, dtype) in sample()) {
        let error = |method| {
            squared_error(&src, &decoded(&quantize(&src, 384, &how(format, method, dtype))))
        };
        let (search, absmax) = (error(Method::Search), error(Method::Absmax));
        prop_assert!(search <= absmax * 1.0001, "{search} > {absmax}");
    }

    /// Products from packed words equal products of decoded rows to single-precision summation, 1e-5 of the norms' product. Fails
    /// if a nibble is taken from the wrong half or a scale from the next group.
    #[test]
    fn products_agree_with_decoded_rows((src, format, dtype) in sample(), num_tok in 1usize..4) {
        let packed = quantize(&src, 384, &how(format, Method::Search, dtype));
        let (w, rows) = (packed.view(), decoded(&packed));
        let x: Vec<f32> = (0..num_tok * 384).map(|i| ((i * 29 % 83) as f32 - 41.0) / 41.0).collect();
        let mut found = vec![0.0; 2 * num_tok];
        dot_rows(&mut found, &w, 1..3, &Activations::new(&x, &w));
        let mut bytes = vec![0; Dtype::F32.bytes(rows.len())];
        encode(&mut bytes, Dtype::F32, &rows);
        let mut plain = vec![0.0; 2 * num_tok];
        dot_rows_plain(&mut plain, Dtype::F32, &bytes, 384, 1..3, &x, num_tok);
        for r in 0..2 {
            for t in 0..num_tok {
                let (row, x) = (&rows[(r + 1) * 384..(r + 2) * 384], &x[t * 384..(t + 1) * 384]);
                let exact: f64 = row.iter().zip(x).map(|(a, b)| *a as f64 * *b as f64).sum();
                let norm = |v: &[f32]| v.iter().map(|x| (*x as f64).powi(2)).sum::<f64>().sqrt();
                let bound = 1e-5 * norm(row) * norm(x) + 1e-30;
                prop_assert!((found[r * num_tok + t] as f64 - exact).abs() <= bound);
                prop_assert!((plain[r * num_tok + t] as f64 - exact).abs() <= bound);
            }
        }
    }

    /// Inside the range of codes no value moves by more than half a scale, plus a rounding of the product. Fails if codes are
    /// truncated instead of rounded.
    #[test]
    fn absmax_moves_values_by_half_a_step((src, format, _) in sample()) {
        let how = how(format, Method::Absmax, Dtype::F32);
        let packed = quantize(&src, 384, &how);
        let levels = packed.view().levels();
        for (i, (a, b)) in src.iter().zip(&decoded(&packed)).enumerate() {
            let Level { scale, zero } = levels[i / how.group.columns(384)];
            if -zero * scale <= *a && *a <= (how.bits.top() as f32 - zero) * scale {
                prop_assert!((a - b).abs() <= 0.5001 * scale, "{a} became {b} with scale {scale}");
            }
        }
    }
}

/// Activations that share a sign, groups as long as a row among the formats: products are within 1e-6 of exact ones in the L2 norm over
/// rows (64 additions a lane leave about 8 roundings of 6e-8, of partial sums up to twice the result). Fails if codes are counted
/// from zero and the sum of the activations, in single precision, makes up for it: 4e-6 to 5e-5.
#[test]
fn long_groups_lose_nothing_to_cancellation() {
    const COLS: usize = 2048;
    let mut state = 3u64;
    let mut unit = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let src: Vec<f32> = (0..64 * COLS).map(|_| unit()).collect();
    let x: Vec<f32> = (0..2 * COLS).map(|_| 1.0 + 0.1 * unit()).collect();
    let formats = ["int4:g128", "int4:channel", "int8:g128", "int8:channel", "int8:g128:asym", "int8:channel:asym"];
    for (format, tokens) in formats.into_iter().flat_map(|f| [(f, 1), (f, 2)]) {
        let packed = quantize(&src, COLS, &how(format.parse().unwrap(), Method::Absmax, Dtype::BF16));
        let (w, rows) = (packed.view(), decoded(&packed));
        let mut found = vec![0.0; 64 * tokens];
        dot_rows(&mut found, &w, 0..64, &Activations::new(&x[..tokens * COLS], &w));
        let product = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
        let of_row = |row| x[..tokens * COLS].chunks_exact(COLS).map(move |x| product(row, x));
        let exact: Vec<f32> = rows.chunks_exact(COLS).flat_map(of_row).collect();
        let error = (squared_error(&found, &exact) / squared_error(&exact, &vec![0.0; exact.len()])).sqrt();
        println!("{format} {tokens}: {error:.1e}");
        assert!(error < 1e-6, "{format}, {tokens} tokens: {error:.1e}");
    }
}
