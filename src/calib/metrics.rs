//! What a measured token contributes, and how tokens are summed up. Definitions follow llama.cpp's perplexity tool where it has
//! one; everything is natural logarithm, over the whole vocabulary, in double precision.

use serde::Serialize;

/// One scored token, seen by the original (`a`) and the candidate (`b`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// `-ln p_a(token)`.
    pub nll_a: f64,
    /// `-ln p_b(token)`.
    pub nll_b: f64,
    /// `sum p_a ln(p_a / p_b)`, nats.
    pub kld: f64,
    /// Both rank the same token first.
    pub same_top1: bool,
    /// Index of the task.
    pub task: usize,
}

/// Log-probabilities of a row of logits.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - max).exp()).sum();
    let shift = max + sum.ln();
    logits.iter().map(|&x| x as f64 - shift).collect()
}

/// `sum p_a ln(p_a / p_b)` of two rows of logits; exactly 0 for equal rows.
pub fn kl(a: &[f32], b: &[f32]) -> f64 {
    let (a, b) = (log_softmax(a), log_softmax(b));
    a.iter().zip(&b).map(|(a, b)| if *a == f64::NEG_INFINITY { 0.0 } else { a.exp() * (a - b) }).sum()
}

/// `-ln p(token)`.
pub fn nll(logits: &[f32], token: u32) -> f64 {
    -log_softmax(logits)[token as usize]
}

/// Compares two rows of logits, `[V]` each.
pub fn score(a: &[f32], b: &[f32], token: u32, task: usize) -> TokenScore {
    let (la, lb) = (log_softmax(a), log_softmax(b));
    let kld = la.iter().zip(&lb).map(|(a, b)| a.exp() * (a - b)).sum();
    let best = |l: &[f64]| l.iter().enumerate().fold(0, |best, (i, x)| if *x > l[best] { i } else { best });
    TokenScore { nll_a: -la[token as usize], nll_b: -lb[token as usize], kld, same_top1: best(&la) == best(&lb), task }
}

/// A mean with its standard error and the tail of its distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean, tokens taken as independent.
    pub stderr: f64,
    /// Half of the tokens are below.
    pub median: f64,
    /// 90 % are below.
    pub p90: f64,
    /// 95 % are below.
    pub p95: f64,
    /// 99 % are below.
    pub p99: f64,
    /// 99.9 % are below.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Sums up some values.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut v: Vec<f64> = values.collect();
        if v.is_empty() {
            return Self::default();
        }
        v.sort_by(f64::total_cmp);
        let at = |q: f64| v[((v.len() - 1) as f64 * q).round() as usize];
        let (mean, stderr) = mean_stderr(v.iter().copied());
        Self { mean, stderr, median: at(0.5), p90: at(0.9), p95: at(0.95), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// Mean and standard error of the mean.
pub fn mean_stderr(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count().max(1) as f64;
    let mean = values.clone().sum::<f64>() / n;
    let var = values.map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, (var / n).sqrt())
}

/// Output metrics of some tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Scored tokens.
    pub tokens: usize,
    /// Perplexity of the original.
    pub perplexity_original: f64,
    /// Perplexity of the candidate.
    pub perplexity: f64,
    /// Standard error of the candidate's perplexity.
    pub perplexity_stderr: f64,
    /// Candidate over original.
    pub ppl_ratio: f64,
    /// Standard error of the ratio, from paired differences.
    pub ppl_ratio_stderr: f64,
    /// Divergence of the outputs, nats.
    pub kld: Spread,
    /// Share of tokens for which both rank the same token first.
    pub same_top1: f64,
    /// Root mean square change of the true token's probability.
    pub rms_dp: f64,
}

impl Summary {
    /// Sums up tokens.
    pub fn of<'a>(scores: impl Iterator<Item = &'a TokenScore> + Clone) -> Self {
        let n = scores.clone().count();
        if n == 0 {
            return Self::default();
        }
        let (a, _) = mean_stderr(scores.clone().map(|s| s.nll_a));
        let (b, b_err) = mean_stderr(scores.clone().map(|s| s.nll_b));
        let (d, d_err) = mean_stderr(scores.clone().map(|s| s.nll_b - s.nll_a));
        let dp = scores.clone().map(|s| ((-s.nll_b).exp() - (-s.nll_a).exp()).powi(2)).sum::<f64>() / n as f64;
        Self {
            tokens: n,
            perplexity_original: a.exp(),
            perplexity: b.exp(),
            perplexity_stderr: b.exp() * b_err,
            ppl_ratio: d.exp(),
            ppl_ratio_stderr: d.exp() * d_err,
            kld: Spread::of(scores.clone().map(|s| s.kld)),
            same_top1: scores.filter(|s| s.same_top1).count() as f64 / n as f64,
            rms_dp: dp.sqrt(),
        }
    }
}

/// One token's routing in one layer, by both models.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterScore {
    /// Divergence of the softmax over all experts, each model on its own hidden state, nats.
    pub kl: f64,
    /// The same with both routers on the original's hidden state.
    pub kl_local: f64,
    /// Shared experts over `K`.
    pub overlap: f64,
    /// The same set of experts.
    pub exact: bool,
    /// The same expert first.
    pub top1: bool,
    /// `sum over shared experts of min(gate_a, gate_b)`, gates normalised to sum 1.
    pub gate_mass: f64,
}

/// One model's choice for a token.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Router logits, `[E]`.
    pub logits: &'a [f32],
    /// Experts, `[K]`.
    pub experts: &'a [u32],
    /// Weights, `[K]`.
    pub gates: &'a [f32],
}

/// Compares two choices; `local` are the candidate's logits on the original's hidden state.
pub fn route_score(a: Choice<'_>, b: Choice<'_>, local: &[f32]) -> RouterScore {
    let norm = |c: Choice<'_>| 1.0 / c.gates.iter().map(|g| *g as f64).sum::<f64>().max(f64::MIN_POSITIVE);
    let (na, nb) = (norm(a), norm(b));
    let first =
        |c: Choice<'_>| c.experts[c.gates.iter().enumerate().fold(0, |best, (i, g)| if *g > c.gates[best] { i } else { best })];
    let (mut shared, mut mass) = (0, 0.0);
    for (e, ga) in a.experts.iter().zip(a.gates) {
        if let Some(i) = b.experts.iter().position(|x| x == e) {
            shared += 1;
            mass += (*ga as f64 * na).min(b.gates[i] as f64 * nb);
        }
    }
    RouterScore {
        kl: kl(a.logits, b.logits),
        kl_local: kl(a.logits, local),
        overlap: shared as f64 / a.experts.len() as f64,
        exact: shared == a.experts.len(),
        top1: first(a) == first(b),
        gate_mass: mass,
    }
}

/// Routing of one layer over all tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RouterSummary {
    /// Layer index.
    pub layer: usize,
    /// Mean divergence, nats.
    pub kl_mean: f64,
    /// 99 % of the tokens are below.
    pub kl_p99: f64,
    /// Largest.
    pub kl_max: f64,
    /// Share of tokens above 0.1 nats.
    pub kl_above_0_1: f64,
    /// Largest divergence with both routers on the same input; 0 if the router is untouched.
    pub kl_local_max: f64,
    /// Mean share of the `K` experts that both chose.
    pub overlap: f64,
    /// Share of tokens with the same set.
    pub exact_set: f64,
    /// Share of tokens with the same expert first.
    pub top1: f64,
    /// Mean shared gate mass.
    pub gate_mass: f64,
}

impl RouterSummary {
    /// Sums up a layer's tokens.
    pub fn of(layer: usize, scores: &[RouterScore]) -> Self {
        let kl = Spread::of(scores.iter().map(|s| s.kl));
        let mean = |f: &dyn Fn(&RouterScore) -> f64| scores.iter().map(f).sum::<f64>() / scores.len().max(1) as f64;
        Self {
            layer,
            kl_mean: kl.mean,
            kl_p99: kl.p99,
            kl_max: kl.max,
            kl_above_0_1: mean(&|s| (s.kl > 0.1) as u8 as f64),
            kl_local_max: scores.iter().map(|s| s.kl_local).fold(0.0, f64::max),
            overlap: mean(&|s| s.overlap),
            exact_set: mean(&|s| s.exact as u8 as f64),
            top1: mean(&|s| s.top1 as u8 as f64),
            gate_mass: mean(&|s| s.gate_mass),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two coins: `KL(0.5 || 0.25) = 0.5 ln 2 + 0.5 ln(2/3)`; exact to double rounding of single-precision logits, 1e-7. Fails if
    /// the arguments are swapped.
    #[test]
    fn divergence_of_two_coins() {
        let b = [0.0, 3f32.ln()];
        assert!((kl(&[0.0, 0.0], &b) - (0.5 * 2f64.ln() + 0.5 * (2.0f64 / 3.0).ln())).abs() < 1e-7);
        assert_eq!(kl(&b, &b), 0.0);
    }

    #[test]
    fn shared_gate_mass_counts_common_experts_only() {
        let a = Choice { logits: &[0.0; 4], experts: &[1, 2], gates: &[0.75, 0.25] };
        let b = Choice { logits: &[0.0; 4], experts: &[2, 3], gates: &[1.0, 1.0] };
        let s = route_score(a, b, a.logits);
        assert_eq!((s.overlap, s.exact, s.top1, s.gate_mass), (0.5, false, false, 0.25));
    }
}
