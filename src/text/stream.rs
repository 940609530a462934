//! Tokens to text piece by piece: what may be shown now, and what must wait for the next token.
//!
//! A token may end inside a UTF-8 sequence (byte-level BPE) or be a single byte of one (byte fallback), and its text may
//! depend on what stands before it (sentencepiece drops the first space). So the answer is decoded in a small sliding
//! window that begins at a character boundary with at least one token already shown, and the shown part is cut off.

use tokenizers::DecoderWrapper;

use super::{TextError, Tokenizer};

/// How the tokens of a vocabulary spell bytes that are no characters by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bytes {
    /// Every character stands for one byte (GPT-2).
    Level,
    /// `<0xE4>` stands for one byte, all other tokens are whole characters.
    Fallback,
    /// All tokens are whole characters.
    Never,
}

impl Bytes {
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> Bytes {
        match decoder {
            Some(DecoderWrapper::ByteLevel(_)) => Bytes::Level,
            Some(DecoderWrapper::ByteFallback(_)) => Bytes::Fallback,
            Some(DecoderWrapper::Sequence(parts)) => {
                let kinds = parts.get_decoders().iter().map(|d| Bytes::of(Some(d)));
                kinds.fold(Bytes::Never, |found, kind| if found == Bytes::Never { kind } else { found })
            }
            _ => Bytes::Never,
        }
    }

    /// Appends the bytes of `token` to `out`.
    fn spell(self, token: &str, out: &mut Vec<u8>) {
        match self {
            Bytes::Level => {
                let bytes: Option<Vec<u8>> = token.chars().map(level_byte).collect();
                out.extend(bytes.unwrap_or_else(|| token.into()));
            }
            Bytes::Fallback => match fallback_byte(token) {
                Some(byte) => out.push(byte),
                None => out.extend(token.bytes()),
            },
            Bytes::Never => out.clear(),
        }
    }
}

/// The byte behind a character of a byte-level vocabulary: printable Latin-1 is itself, the others follow U+0100 in order.
fn level_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// Leaves in `bytes` only the beginning of a UTF-8 sequence that more bytes could still complete.
fn keep_incomplete(bytes: &mut Vec<u8>) {
    let mut at = 0;
    while let Err(e) = std::str::from_utf8(&bytes[at..]) {
        match e.error_len() {
            Some(len) => at += e.valid_up_to() + len,
            None => {
                bytes.drain(..at + e.valid_up_to());
                return;
            }
        }
    }
    bytes.clear();
}

/// Decodes the answer to a prompt token by token; made by [`Tokenizer::stream`].
///
/// The pieces, with [`Stream::finish`], concatenate to the one-shot decode of the answer after its prompt. Special tokens
/// are left out.
#[derive(Clone, Debug)]
pub struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    /// The window; from `fresh` on, tokens not shown in full.
    ids: Vec<u32>,
    fresh: usize,
    /// Text of the window that has been shown.
    shown: String,
    /// Beginning of an unfinished UTF-8 sequence.
    tail: Vec<u8>,
}

impl<'a> Stream<'a> {
    /// Context from the end of the prompt: at least one token with text, and from a character boundary on.
    pub(super) fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        const REACH: usize = 16;
        let mut ids: Vec<u32> = Vec::new();
        let mut shown = String::new();
        for &id in prompt.iter().rev().filter(|id| tokenizer.text_of(**id).is_some()).take(REACH) {
            ids.insert(0, id);
            shown = tokenizer.decode(&ids, false).unwrap_or_default();
            if !shown.contains(char::REPLACEMENT_CHARACTER) {
                break;
            }
        }
        Stream { tokenizer, fresh: ids.len(), ids, shown, tail: Vec::new() }
    }

    /// The text that `id` completes, if any.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        let Some(token) = self.tokenizer.text_of(id) else { return Ok(None) };
        self.ids.push(id);
        self.tokenizer.bytes.spell(&token, &mut self.tail);
        keep_incomplete(&mut self.tail);
        if self.tail.is_empty() {
            return self.show_all();
        }
        if self.tokenizer.bytes != Bytes::Level {
            return Ok(None);
        }
        // The unfinished sequence decodes to one replacement character; what precedes it is final.
        let text = self.tokenizer.decode(&self.ids, false)?;
        let stable = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or_default();
        let piece = stable.strip_prefix(&self.shown).filter(|p| !p.is_empty()).map(String::from);
        if piece.is_some() {
            self.shown = stable.to_string();
        }
        Ok(piece)
    }

    /// Whatever is left, with replacement characters for a sequence that was never finished.
    pub fn finish(&mut self) -> Result<Option<String>, TextError> {
        if self.tail.is_empty() {
            return Ok(None);
        }
        self.tail.clear();
        self.show_all()
    }

    /// Shows all text of the window, then drops from it what the newest tokens do not need.
    fn show_all(&mut self) -> Result<Option<String>, TextError> {
        let text = self.tokenizer.decode(&self.ids, false)?;
        let piece = match text.strip_prefix(&self.shown) {
            Some(piece) => piece.to_string(),
            // Invalid bytes behind shown ones change how a whole run decodes: the new tokens speak for themselves.
            None => self.tokenizer.decode(&self.ids[self.fresh..], false)?,
        };
        self.ids.drain(..self.fresh);
        self.fresh = self.ids.len();
        self.shown = self.tokenizer.decode(&self.ids, false)?;
        Ok(Some(piece).filter(|p| !p.is_empty()))
    }
}

impl Tokenizer {
    /// Spelling of a token that contributes text: known and not special.
    fn text_of(&self, id: u32) -> Option<String> {
        if self.special.contains(&id) { None } else { self.inner.id_to_token(id) }
    }
}

/// Text that may be shown, and whether a stop string has been met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Emit {
    /// Text before the stop string, or text that cannot be part of one.
    pub text: String,
    /// Whether generation should end.
    pub stopped: bool,
}

/// Watches streamed text for stop strings, holding back what could be the beginning of one.
///
/// However the text is cut into pieces, the outcome is the same: the stop string that ends first wins, of those the longest.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// Watches for `stops`; empty ones are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|s| !s.is_empty()).collect();
        StopStrings { stops, held: String::new(), stopped: false }
    }

    /// Takes the next piece; after a stop, all further text is swallowed.
    pub fn push(&mut self, piece: &str) -> Emit {
        if self.stopped {
            return Emit { text: String::new(), stopped: true };
        }
        self.held.push_str(piece);
        let hits = self.stops.iter().filter_map(|s| self.held.find(s.as_str()).map(|start| (start + s.len(), start)));
        if let Some((_, start)) = hits.min() {
            self.held.truncate(start);
            self.stopped = true;
            return Emit { text: std::mem::take(&mut self.held), stopped: true };
        }
        let starts = self.held.char_indices().map(|(at, _)| at);
        let keep = starts.into_iter().find(|&at| self.stops.iter().any(|s| s.starts_with(&self.held[at..])));
        let held = self.held.split_off(keep.unwrap_or(self.held.len()));
        Emit { text: std::mem::replace(&mut self.held, held), stopped: false }
    }

    /// The text still held back, once no more will come.
    pub fn finish(self) -> String {
        self.held
    }
}
