//! Rotary frequencies: from a [`RopeSpec`] to angles per position. Pure; single precision where transformers is.

use super::spec::{RopeSpec, Scaling};

/// Inverse frequencies of the `dim / 2` pairs and the factor on cos and sin, for sequences of up to `len` tokens.
pub fn frequencies(spec: &RopeSpec, len: usize) -> (Vec<f32>, f32) {
    let half = spec.dim / 2;
    let base = |i: usize| (spec.theta as f32).powf(2.0 * i as f32 / spec.dim as f32);
    let plain = |i: usize| 1.0 / base(i);
    match &spec.scaling {
        Scaling::None => ((0..half).map(plain).collect(), 1.0),
        Scaling::Linear { factor } => ((0..half).map(|i| plain(i) / *factor as f32).collect(), 1.0),
        Scaling::Yarn { factor, original, beta_fast, beta_slow, truncate, attention } => {
            let (low, high) = yarn_range(spec, *original, *beta_fast, *beta_slow, *truncate);
            let high = if low == high { high + 0.001 } else { high };
            let freq = |i: usize| {
                let keep = 1.0 - ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let stretched = 1.0 / (*factor as f32 * base(i));
                stretched * (1.0 - keep) + plain(i) * keep
            };
            ((0..half).map(freq).collect(), *attention as f32)
        }
        Scaling::LongRope { short, long, original, short_attention, long_attention } => {
            let (factors, attention) = if len > *original { (long, long_attention) } else { (short, short_attention) };
            ((0..half).map(|i| 1.0 / (factors[i] as f32 * base(i))).collect(), *attention as f32)
        }
        Scaling::Llama3 { factor, low, high, original } => {
            let freq = |i: usize| {
                let f = plain(i) as f64;
                let wavelength = 2.0 * std::f64::consts::PI / f;
                let original = *original as f64;
                let smooth = (original / wavelength - low) / (high - low);
                (if wavelength > original / low {
                    f / factor
                } else if wavelength < original / high {
                    f
                } else {
                    (1.0 - smooth) * f / factor + smooth * f
                }) as f32
            };
            ((0..half).map(freq).collect(), 1.0)
        }
    }
}

/// First and last dimension of YaRN's ramp (section 3.2, equations 17-18 solved for the dimension).
fn yarn_range(spec: &RopeSpec, original: usize, fast: f64, slow: f64, truncate: bool) -> (f64, f64) {
    let dim = spec.dim as f64;
    let at = |rotations: f64| dim * (original as f64 / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * spec.theta.ln());
    let (mut low, mut high) = (at(fast), at(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low.max(0.0), high.min(dim - 1.0))
}

/// Cosines and sines of one position, `dim / 2` each, multiplied by `attention`.
pub fn angles(cos: &mut [f32], sin: &mut [f32], freqs: &[f32], attention: f32, position: usize) {
    for ((c, s), f) in cos.iter_mut().zip(sin).zip(freqs) {
        let angle = position as f32 * f;
        *c = angle.cos() * attention;
        *s = angle.sin() * attention;
    }
}
