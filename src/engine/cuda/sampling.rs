//! Sampling on the device: what `sample.cu` reads and writes beside the logits. The rules are those of [`crate::sample`].

use super::Engine;
use super::device::{CudaError, Device};
use super::fast::{SampleArgs, SampleRow};
use super::launch::{self, DECODE_TOK, SAMPLE_BINS, SAMPLE_SLICES};
use super::memory::Buffer;
use crate::engine::{EngineError, Turn};
use crate::model::plan::Slot;
use crate::sample::{SampleError, Sampler};
use std::sync::Arc;

/// Words that say what was wrong with a row of logits: 0, one more than the index of the first that is no number, or -1 where none can
/// be chosen; and the bits of that logit.
pub(super) const FAULT_WORDS: usize = 2;

/// How a decode step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Choice {
    /// The best token of each row.
    Best,
    /// As each row's sampler says.
    Drawn,
}

/// At addresses that stay, so that graphs are captured once whatever the settings.
pub(super) struct Sampling {
    rows: Buffer,
    /// A bit a token and row.
    seen: Buffer,
    best: Buffer,
    bad: Buffer,
    counts: Buffer,
    masses: Buffer,
    slices: Buffer,
}

fn seen_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

impl Sampling {
    fn new(device: &Arc<Device>, vocab: usize) -> Result<Self, CudaError> {
        let zeroed = |bytes: usize| {
            let buffer = Buffer::new(device, bytes)?;
            buffer.clear()?;
            Ok::<_, CudaError>(buffer)
        };
        Ok(Self {
            rows: zeroed(DECODE_TOK * size_of::<SampleRow>())?,
            seen: zeroed(4 * DECODE_TOK * seen_words(vocab))?,
            best: zeroed(8 * DECODE_TOK)?,
            bad: zeroed(4 * DECODE_TOK)?,
            counts: zeroed(4 * DECODE_TOK * SAMPLE_BINS)?,
            masses: zeroed(8 * DECODE_TOK * SAMPLE_BINS)?,
            slices: zeroed(8 * DECODE_TOK * SAMPLE_SLICES)?,
        })
    }
}

fn row(sampler: &Sampler) -> SampleRow {
    let config = sampler.config();
    SampleRow {
        state: sampler.state(),
        least: config.least_weight(),
        scale: config.scale(),
        penalty: config.repeat_penalty,
        top_p: config.top_p.unwrap_or(1.0),
        top_k: config.top_k.map_or(0, |k| k.min(i32::MAX as usize) as i32),
        reserved: 0,
    }
}

impl Engine {
    /// Whether the device samples as the host would; `moe doctor` may have found that it does not.
    pub(in crate::engine) fn samples(&self) -> bool {
        !self.unfit.iter().any(|kind| kind == "sample")
    }

    /// Tells the device how each sequence is sampled and what it has said.
    pub(super) fn prepare_choice(&mut self, turns: &[Turn<'_>]) -> Result<Choice, EngineError> {
        if turns.iter().all(|t| t.sampler.config().is_greedy()) {
            return Ok(Choice::Best);
        }
        let vocab = self.spec.vocab;
        if self.decode.sampling.is_none() {
            self.decode.sampling = Some(Sampling::new(&self.device, vocab)?);
        }
        let Some(sampling) = &self.decode.sampling else { return Ok(Choice::Best) };
        let rows: Vec<SampleRow> = turns.iter().map(|t| row(t.sampler)).collect();
        self.device.upload(&sampling.rows, 0, &rows)?;
        for (i, turn) in turns.iter().enumerate().filter(|(_, t)| t.sampler.config().repeat_penalty != 1.0) {
            let mut seen = vec![0u32; seen_words(vocab)];
            for &id in turn.tokens.iter() {
                if id as usize >= vocab {
                    return Err(SampleError::History { id, len: vocab }.into());
                }
                seen[id as usize / 32] |= 1 << (id % 32);
            }
            self.device.upload(&sampling.seen, 4 * i * seen.len(), &seen)?;
        }
        Ok(Choice::Drawn)
    }

    /// Chooses a token of each of the first rows of logits, by the kernels.
    pub(super) fn draw(&self, num_rows: usize) -> Result<(), EngineError> {
        let Some(s) = &self.decode.sampling else { return Ok(()) };
        let args = SampleArgs {
            tokens: self.decode.tokens.at(0),
            faults: self.decode.tokens.at(4 * DECODE_TOK),
            logits: self.at(Slot::Logits),
            rows: s.rows.at(0),
            seen: s.seen.at(0),
            best: s.best.at(0),
            bad: s.bad.at(0),
            counts: s.counts.at(0),
            masses: s.masses.at(0),
            slices: s.slices.at(0),
            positions: self.decode.positions.at(0),
            sent: self.decode.sent(),
            sent_faults: DECODE_TOK as i32,
            v: self.spec.vocab as i32,
        };
        self.fast.launch("sample_best", launch::argmax(num_rows), &args)?;
        self.fast.launch("sample_bins", launch::sample_bins(num_rows), &args)?;
        Ok(self.fast.launch("sample_draw", launch::sample_draw(num_rows), &args)?)
    }

    /// Chooses the next token of every sequence from logits given from outside, `[turns, V]`, without a pass.
    pub fn sample_rows(&mut self, logits: &[f32], turns: &mut [Turn<'_>]) -> Result<Vec<u32>, EngineError> {
        self.device.upload(&self.work.slots[Slot::Logits as usize], 0, logits)?;
        self.device.upload(&self.decode.positions, 0, &vec![0u32; turns.len()])?;
        if self.prepare_choice(turns)? == Choice::Best {
            return Ok(logits.chunks_exact(self.spec.vocab).map(|row| crate::sample::argmax(row) as u32).collect());
        }
        self.draw(turns.len())?;
        let mut words = vec![0u32; DECODE_TOK + FAULT_WORDS * turns.len()];
        self.device.download(&mut words, &self.decode.tokens, 0)?;
        if let Some(error) = self.fault(&words[DECODE_TOK..]) {
            return Err(error);
        }
        for (turn, &token) in turns.iter_mut().zip(&words) {
            turn.tokens.push(token);
            turn.sampler.skip(1);
        }
        Ok(words[..turns.len()].to_vec())
    }

    /// What is wrong with the logits of a step, if anything is.
    pub(super) fn fault(&self, words: &[u32]) -> Option<EngineError> {
        let len = self.spec.vocab;
        words.chunks_exact(FAULT_WORDS).find_map(|fault| match fault[0] as i32 {
            0 => None,
            1.. => Some(SampleError::NotFinite { index: fault[0] as usize - 1, len, value: f32::from_bits(fault[1]) }.into()),
            _ => Some(SampleError::NoCandidate { len }.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::SamplerConfig;

    /// What `sample.cu` does to one row, in its order: the best, the histogram, a cut for each filter, the slice, the token.
    fn twin(logits: &[f32], row: &mut SampleRow) -> u32 {
        const LEAST: f32 = 40.0;
        let key = |x: f32| if x.to_bits() >> 31 == 1 { !x.to_bits() } else { x.to_bits() | (1 << 31) };
        let clean: Vec<f32> = logits.iter().map(|x| x + 0.0).collect();
        let best = (0..clean.len()).rev().max_by_key(|&v| key(clean[v])).unwrap();
        let exponent = |v: usize| (clean[v] - clean[best]) * row.scale;
        let bin = |v: usize| ((exponent(v) * -(SAMPLE_BINS as f32 / (LEAST + 1.0))) as usize).min(SAMPLE_BINS - 1);
        let rank = |v: usize| (u64::from(key(clean[best]) - key(clean[v])) << 32) | v as u64;
        let weight = |v: usize| crate::sample::weight(clean[v], clean[best], row.scale);
        let mass = |v: usize| Some(weight(v)).filter(|&w| w >= row.least).unwrap_or(0);
        let alive: Vec<usize> = (0..clean.len()).filter(|&v| exponent(v) >= -LEAST).collect();
        // The first bin whose sum reaches the goal, then the first rank in it.
        let cut = |goal: u64, of: &dyn Fn(usize) -> u64| {
            let mut bins = vec![0u64; SAMPLE_BINS];
            alive.iter().for_each(|&v| bins[bin(v)] += of(v));
            let mut before = 0;
            let found = bins.iter().position(|n| {
                before += n;
                before >= goal
            });
            before -= bins[found.unwrap()];
            let mut listed: Vec<usize> = alive.iter().copied().filter(|&v| bin(v) == found.unwrap()).collect();
            listed.sort_by_key(|&v| rank(v));
            let reached = listed.iter().find(|&&v| {
                before += of(v);
                before >= goal
            });
            rank(*reached.unwrap())
        };
        let total_to = |limit: u64| alive.iter().filter(|&&v| rank(v) <= limit).map(|&v| mass(v)).sum::<u64>();
        let mut limit = u64::MAX;
        if row.top_k > 0 && (row.top_k as usize) < alive.len() {
            limit = cut(row.top_k as u64, &|_| 1);
        }
        if row.top_p < 1.0 {
            let total = total_to(limit);
            limit = cut(((f64::from(row.top_p) * total as f64).ceil() as u64).clamp(1, total), &mass);
        }
        let total = total_to(limit);
        row.state = row.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = row.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let point = (((z >> 11) as f64 / (1u64 << 53) as f64 * total as f64) as u64).min(total - 1);
        let kept = |v: &usize| rank(*v) <= limit && exponent(*v) >= -LEAST;
        let mut sum = 0;
        let reaches = |v: &usize| {
            sum += mass(*v);
            sum > point
        };
        (0..clean.len()).filter(kept).find(reaches).unwrap() as u32
    }

    fn values(seed: u64, n: usize, of: impl Fn(u64) -> f32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 33
        };
        (0..n).map(|_| of(next())).collect()
    }

    /// The same token as the host's sampler for every filter, with spread logits, ties, zeros of both signs and masked tokens, at
    /// temperatures that leave one candidate and that crowd all into one bin. Exact: both sides sum integers. Trips if a filter is
    /// cut by bin alone, ties go by anything but id, or min-p comes after top-p.
    #[test]
    fn cuts_choose_what_sorting_chooses() {
        let mut draws = 0;
        for (kind, n) in (0..4).flat_map(|kind| [7usize, 259, 5000].map(|n| (kind, n))) {
            let logits = match kind {
                0 => values(n as u64, n, |x| (x % 20_000) as f32 * 1e-3 - 10.0),
                1 => values(n as u64, n, |x| (x % 5) as f32 * if x % 2 == 0 { 1.0 } else { -0.0 }),
                2 => values(n as u64, n, |x| (x % 1000) as f32 * 1e-6),
                _ => values(n as u64, n, |x| if x % 3 == 0 { 0.25 + (x % 7) as f32 } else { f32::NEG_INFINITY }),
            };
            for (temperature, top_k, top_p, min_p) in [
                (1.0, None, None, None),
                (1.0, Some(3), None, None),
                (0.7, Some(40), Some(0.9), None),
                (1.0, None, Some(0.5), Some(0.1)),
                (60.0, Some(200), Some(0.31), Some(0.4)),
                (1e-30, None, Some(0.9), None),
                (2.0, None, None, Some(0.05)),
            ] {
                let config = SamplerConfig { temperature, top_k, top_p, min_p, repeat_penalty: 1.0, seed: n as u64 };
                let mut host = Sampler::new(config).unwrap();
                let mut device = row(&host);
                for _ in 0..4 {
                    let expected = host.sample(&logits, &[]).unwrap();
                    assert_eq!(twin(&logits, &mut device), expected, "{kind} {n} {:?}", host.config());
                    assert_eq!(device.state, host.state());
                    draws += 1;
                }
            }
        }
        assert_eq!(draws, 4 * 3 * 7 * 4);
    }
}
