//! How many experts come ahead: as many as was asked for, or one a layer if that proves faster. Must not know how they come.

use std::time::Duration;

/// Most experts that a layer brings for the one behind it, as that one's router chooses on this one's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// So many.
    AtMost(usize),
    /// One if steps are shorter for it, else none: tried both ways on the first steps of each number of sequences.
    Tried,
}

/// Steps of a turn of a trial that are timed, and those before them that are not: the first of a turn makes a graph.
const TIMED: usize = 16;
pub(super) const UNTIMED: usize = 2;
/// Turns, without and with in alternation, so that a drift of the caches favours neither.
const TURNS: usize = 4;
/// Part of the time without that has to be saved.
const LEAST_GAIN: f64 = 0.02;

/// A trial of one number of sequences.
#[derive(Debug, Default)]
pub(super) struct Trial {
    num_tok: usize,
    turn: usize,
    /// Without, and with.
    spent: [Duration; 2],
}

/// What a trial found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Verdict {
    pub ahead: usize,
    /// Milliseconds of a step without, and with.
    pub step_ms: [f64; 2],
}

impl Trial {
    /// How many steps to run next, and what comes ahead of them, for so many sequences; `None` once it is over.
    pub fn next(&mut self, num_tok: usize) -> Option<(usize, usize)> {
        if self.num_tok != num_tok {
            *self = Self { num_tok, ..Self::default() };
        }
        (self.turn < TURNS).then_some((UNTIMED + TIMED, self.turn % 2))
    }

    /// Takes the time of the timed steps of a turn; one that was cut short does not count. The verdict comes with the last.
    pub fn add(&mut self, steps: usize, spent: Duration) -> Option<Verdict> {
        if self.turn >= TURNS || steps < TIMED {
            return None;
        }
        self.spent[self.turn % 2] += spent;
        self.turn += 1;
        let step_ms = self.spent.map(|spent| 1e3 * spent.as_secs_f64() / (TURNS / 2 * TIMED) as f64);
        let gains = step_ms[1] < (1.0 - LEAST_GAIN) * step_ms[0];
        (self.turn == TURNS).then_some(Verdict { ahead: usize::from(gains), step_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(trial: &mut Trial, num_tok: usize, step_us: [u64; 2]) -> Option<Verdict> {
        let mut verdict = None;
        while let Some((steps, ahead)) = trial.next(num_tok) {
            assert!(verdict.is_none());
            let timed = steps - UNTIMED;
            verdict = trial.add(timed, Duration::from_micros(step_us[ahead] * timed as u64));
        }
        verdict
    }

    /// Fails if without and with are mixed up, if a gain of a hundredth is enough, or if another batch keeps the verdict of the last.
    #[test]
    fn what_is_faster_stays() {
        let mut trial = Trial::default();
        let found = tried(&mut trial, 1, [7000, 6000]).unwrap();
        assert_eq!((found.ahead, found.step_ms), (1, [7.0, 6.0]));
        assert_eq!(trial.next(1), None);
        assert_eq!(tried(&mut trial, 8, [7000, 7500]).unwrap().ahead, 0);
        assert_eq!(tried(&mut trial, 1, [7000, 6930]).unwrap().ahead, 0);
    }

    /// A text that ends in the middle of a turn says nothing.
    #[test]
    fn short_turns_do_not_count() {
        let mut trial = Trial::default();
        let first = trial.next(1);
        assert_eq!(trial.add(TIMED - 1, Duration::ZERO), None);
        assert_eq!(trial.next(1), first);
    }
}
