//! Logits to a token: repetition penalty, temperature, top-k, min-p, top-p, then one draw.
//!
//! Knows a row of numbers, not where it was computed and not what a token spells. The filters run in that order:
//!
//! 1. repetition penalty (Keskar et al. 2019, CTRL): the logit of every token in the history, once each, is divided by the
//!    penalty where positive and multiplied where negative;
//! 2. temperature: logits are divided by it; 0 means the best token, and nothing below is asked;
//! 3. top-k: the `k` best stay;
//! 4. min-p: tokens at least `min_p` times as likely as the best one stay (Nguyen et al. 2024);
//! 5. top-p: of what is left, renormalised, the smallest set of best tokens whose mass reaches `top_p` stays, never none
//!    (Holtzman et al. 2019).
//!
//! transformers applies the same order but for min-p, which it puts after top-p; vLLM puts it before, as here. Either way
//! the best token survives. Equal logits rank by token id, so cuts are exact in size and the same everywhere.

use std::cmp::Ordering;
use std::collections::HashSet;

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// Divides the logits; 0 chooses the best token and ignores the filters and the seed.
    pub temperature: f32,
    /// Number of best tokens kept.
    pub top_k: Option<usize>,
    /// Mass that the kept best tokens must reach, in (0, 1].
    pub top_p: Option<f32>,
    /// Least probability relative to the best token, in \[0, 1\].
    pub min_p: Option<f32>,
    /// Penalty on tokens already in the history; 1 changes nothing.
    pub repeat_penalty: f32,
    /// Seed of the draws: the same seed, logits and history give the same tokens.
    pub seed: u64,
}

impl Default for SamplerConfig {
    /// Greedy, without a penalty.
    fn default() -> Self {
        SamplerConfig { temperature: 0.0, top_k: None, top_p: None, min_p: None, repeat_penalty: 1.0, seed: 0 }
    }
}

impl SamplerConfig {
    /// Refuses values outside their ranges.
    pub fn validate(&self) -> Result<(), SampleError> {
        let refuse = |name, value: f32, expected| Err(SampleError::Config { name, value: value.to_string(), expected });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("temperature", self.temperature, "a finite number >= 0 (0 is greedy)");
        }
        if self.top_k == Some(0) {
            return refuse("top_k", 0.0, "at least 1; leave it out to keep every token");
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return refuse("top_p", p, "a number in (0, 1]");
        }
        if let Some(p) = self.min_p.filter(|p| !(0.0..=1.0).contains(p)) {
            return refuse("min_p", p, "a number in [0, 1]");
        }
        if !(self.repeat_penalty.is_finite() && self.repeat_penalty > 0.0) {
            return refuse("repeat_penalty", self.repeat_penalty, "a finite number > 0 (1 is none)");
        }
        Ok(())
    }
}

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A setting outside its range.
    #[error("`{name}` is {value}, expected {expected}")]
    Config {
        /// Field of [`SamplerConfig`].
        name: &'static str,
        /// What was given.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// A logit is NaN or +infinity; -infinity is allowed and never chosen.
    #[error("logit {index} of {len} is {value}, expected a finite number or -inf")]
    NotFinite {
        /// Token id.
        index: usize,
        /// Number of logits.
        len: usize,
        /// The value.
        value: f32,
    },
    /// Nothing to choose from.
    #[error("no token can be chosen: none of the {len} logits is finite")]
    NoCandidate {
        /// Number of logits.
        len: usize,
    },
    /// A token of the history is not in the vocabulary.
    #[error("token {id} of the history is outside the {len} logits")]
    History {
        /// Token id.
        id: u32,
        /// Number of logits.
        len: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Best first; equal logits by id.
    fn rank(&self, other: &Candidate) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// Chooses tokens for one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    random: SplitMix64,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    pub fn new(config: SamplerConfig) -> Result<Self, SampleError> {
        config.validate()?;
        let random = SplitMix64(config.seed);
        Ok(Sampler { config, random, candidates: Vec::new() })
    }

    /// The settings.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// The next token, given `logits` `[V]` and the tokens so far (prompt and answer), which only the penalty looks at.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, SampleError> {
        let len = logits.len();
        if let Some(index) = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(SampleError::NotFinite { index, len, value: logits[index] });
        }
        if self.config.temperature == 0.0 && self.config.repeat_penalty == 1.0 {
            let best = argmax(logits);
            return match logits.get(best) {
                Some(&x) if x > f32::NEG_INFINITY => Ok(best as u32),
                _ => Err(SampleError::NoCandidate { len }),
            };
        }
        // -0.0 and 0.0 are equal logits, yet `total_cmp` tells them apart: adding 0.0 leaves one zero.
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits).map(|(id, &logit)| Candidate { id, logit: logit + 0.0 }));
        self.penalise(history)?;
        self.candidates.retain(|c| c.logit > f32::NEG_INFINITY);
        let best = self.candidates.iter().copied().min_by(Candidate::rank).ok_or(SampleError::NoCandidate { len })?;
        if self.config.temperature == 0.0 {
            return Ok(best.id);
        }
        self.keep_top_k();
        self.keep_min_p(best.logit);
        self.keep_top_p(best.logit);
        Ok(self.draw(best))
    }

    fn penalise(&mut self, history: &[u32]) -> Result<(), SampleError> {
        let penalty = self.config.repeat_penalty;
        if penalty == 1.0 {
            return Ok(());
        }
        let len = self.candidates.len();
        for id in history.iter().copied().collect::<HashSet<u32>>() {
            let c = self.candidates.get_mut(id as usize).ok_or(SampleError::History { id, len })?;
            let logit = if c.logit > 0.0 { c.logit / penalty } else { c.logit * penalty };
            // A tiny penalty can overflow; the largest finite value keeps the order without an infinite mass.
            c.logit = if c.logit.is_finite() { logit.clamp(f32::MIN, f32::MAX) + 0.0 } else { c.logit };
        }
        Ok(())
    }

    fn keep_top_k(&mut self) {
        if let Some(k) = self.config.top_k.filter(|k| *k < self.candidates.len()) {
            self.candidates.select_nth_unstable_by(k, Candidate::rank);
            self.candidates.truncate(k);
        }
    }

    fn keep_min_p(&mut self, best: f32) {
        if let Some(min_p) = self.config.min_p {
            let temperature = self.config.temperature;
            self.candidates.retain(|c| weight(c.logit, best, temperature) >= f64::from(min_p));
        }
    }

    /// Sorts only as many of the best as the mass needs: a vocabulary has 10^5 tokens, a nucleus seldom 10^3.
    fn keep_top_p(&mut self, best: f32) {
        let Some(top_p) = self.config.top_p.filter(|p| *p < 1.0) else { return };
        let temperature = self.config.temperature;
        let total: f64 = self.candidates.iter().map(|c| weight(c.logit, best, temperature)).sum();
        let goal = f64::from(top_p) * total;
        let (mut mass, mut kept) = (0.0, 0);
        while mass < goal && kept < self.candidates.len() {
            let rest = &mut self.candidates[kept..];
            let chunk = rest.len().min(256.max(kept));
            if chunk < rest.len() {
                rest.select_nth_unstable_by(chunk, Candidate::rank);
            }
            rest[..chunk].sort_unstable_by(Candidate::rank);
            for c in &rest[..chunk] {
                mass += weight(c.logit, best, temperature);
                kept += 1;
                if mass >= goal {
                    break;
                }
            }
        }
        self.candidates.truncate(kept.max(1));
    }

    fn draw(&mut self, best: Candidate) -> u32 {
        let temperature = self.config.temperature;
        // Filters leave an order that depends on how they select; a draw must depend on the set alone.
        self.candidates.sort_unstable_by_key(|c| c.id);
        let total: f64 = self.candidates.iter().map(|c| weight(c.logit, best.logit, temperature)).sum();
        let mut point = self.random.unit() * total;
        for c in &self.candidates {
            point -= weight(c.logit, best.logit, temperature);
            if point < 0.0 {
                return c.id;
            }
        }
        best.id
    }
}

/// Probability relative to the best token, so that no temperature overflows.
fn weight(logit: f32, best: f32, temperature: f32) -> f64 {
    ((f64::from(logit) - f64::from(best)) / f64::from(temperature)).exp()
}

/// SplitMix64 (Steele, Lea, Flood 2014): one 64-bit state, full period, the same on every platform.
#[derive(Clone, Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1) with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Index of the largest logit, the first of equals; NaN is never chosen, and 0 answers for an empty slice.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] || (logits[best].is_nan() && !x.is_nan()) {
            best = i;
        }
    }
    best
}

/// Natural logarithm of the softmax of `logits` at `id`, summed in `f64`.
///
/// # Panics
/// If `id` is outside `logits`.
pub fn log_softmax_at(logits: &[f32], id: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
    f64::from(logits[id]) - f64::from(max) - sum.ln()
}
