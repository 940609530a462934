//! From token streams to windows. Pure: integers only.

use std::ops::Range;
use std::str::FromStr;

/// How a text is cut and which of its tokens are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Windows of 512 from the start, tokens 256.. scored: llama.cpp's default, comparable with published GGUF figures.
    Gguf,
    /// Windows of 2048 or the model's limit, every token but the first scored: the convention of papers.
    Paper,
}

/// A protocol that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no protocol, expected gguf or paper")]
pub struct ProtocolError(String);

impl FromStr for Protocol {
    type Err = ProtocolError;

    fn from_str(text: &str) -> Result<Self, ProtocolError> {
        match text {
            "gguf" => Ok(Protocol::Gguf),
            "paper" => Ok(Protocol::Paper),
            _ => Err(ProtocolError(text.to_string())),
        }
    }
}

impl Protocol {
    /// Tokens of a window for a model of this context.
    pub fn window(self, max_positions: usize) -> usize {
        match self {
            Protocol::Gguf => 512.min(max_positions),
            Protocol::Paper => 2048.min(max_positions),
        }
    }

    /// Tokens of a window of `len` whose prediction is scored.
    pub fn scored(self, len: usize) -> Range<usize> {
        match self {
            Protocol::Gguf => len / 2..len,
            Protocol::Paper => 1..len,
        }
    }
}

/// Tokens to run as one sequence, and which of their predictions count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Tokens whose prediction is scored; the logits row before each is used, so 0 is never in it.
    pub scored: Range<usize>,
    /// Index of the task the text belongs to.
    pub task: usize,
}

/// Rows of each window where all lie one after the other.
pub fn rows(windows: &[Window]) -> impl Iterator<Item = Range<usize>> {
    windows.iter().scan(0, |end, w| {
        let start = *end;
        *end += w.tokens.len();
        Some(start..*end)
    })
}

/// Cuts a stream into whole windows from the start, drops the tail, and of `n` windows keeps every `n / most`-th, at most `most`.
pub fn cut(tokens: &[u32], protocol: Protocol, window: usize, most: Option<usize>) -> Vec<Window> {
    let whole: Vec<&[u32]> = tokens.chunks_exact(window).collect();
    let most = most.unwrap_or(whole.len()).max(1);
    let stride = (whole.len() / most).max(1);
    let kept = whole.into_iter().step_by(stride).take(most);
    kept.map(|w| Window { tokens: w.to_vec(), scored: protocol.scored(w.len()), task: 0 }).collect()
}

/// A sample as windows of at most `limit` tokens, every token but the first of each scored; pieces of one token are dropped.
pub fn pieces(tokens: &[u32], task: usize, limit: usize) -> Vec<Window> {
    let pieces = tokens.chunks(limit).filter(|p| p.len() > 1);
    pieces.map(|p| Window { tokens: p.to_vec(), scored: 1..p.len(), task }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_spread_evenly_and_the_tail_is_dropped() {
        let tokens: Vec<u32> = (0..10 * 512 + 100).collect();
        let windows = cut(&tokens, Protocol::Gguf, 512, Some(4));
        assert_eq!(windows.iter().map(|w| w.tokens[0] / 512).collect::<Vec<_>>(), [0, 2, 4, 6]);
        assert_eq!(windows[0].scored, 256..512);
        assert_eq!(cut(&tokens, Protocol::Paper, 512, None).len(), 10);
    }

    #[test]
    fn long_samples_are_split_not_cut() {
        let tokens: Vec<u32> = (0..11).collect();
        let sizes: Vec<usize> = pieces(&tokens, 3, 5).iter().map(|w| w.tokens.len()).collect();
        assert_eq!(sizes, [5, 5]);
    }
}
