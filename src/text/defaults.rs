//! Generation defaults: which tokens end an answer and how its author samples.

use std::path::Path;

use serde_json::Value;

use super::{Side, TextError, Tokenizer};

/// What `generation_config.json` recommends; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end an answer; several for chat models.
    pub eos: Vec<u32>,
    /// Whether to sample at all rather than take the best token.
    pub do_sample: Option<bool>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Number of best tokens kept; the file's 0, "keep all", reads as `None`.
    pub top_k: Option<usize>,
    /// Mass kept.
    pub top_p: Option<f32>,
    /// Least probability relative to the best.
    pub min_p: Option<f32>,
    /// Penalty on tokens already seen.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads `generation_config.json`; where it names no end token, `eos_token_id` of `config.json` (or of its
    /// `text_config`) answers. Both files may be absent. Finish with [`GenerationConfig::or_tokenizer_eos`].
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let own = Side::open(dir, "generation_config.json")?;
        let number = |key| own.read(key, "a number", |v| v.as_f64().map(|x| x as f32));
        let count = |v: &Value| v.as_u64().and_then(|k| usize::try_from(k).ok());
        let mut eos = eos(&own)?;
        if eos.is_empty() {
            let config = Side::open(dir, "config.json")?;
            eos = self::eos(&config)?;
            if let (true, Some(text)) = (eos.is_empty(), config.get("text_config")) {
                eos = self::eos(&Side { path: config.path.clone(), value: text.clone() })?;
            }
        }
        Ok(GenerationConfig {
            eos,
            do_sample: own.flag("do_sample")?,
            temperature: number("temperature")?,
            top_k: own.read("top_k", "a count", count)?.filter(|k| *k > 0),
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }

    /// With the tokenizer's end token where the files named none.
    pub fn or_tokenizer_eos(mut self, tokenizer: &Tokenizer) -> Self {
        if self.eos.is_empty() {
            self.eos.extend(tokenizer.eos());
        }
        self
    }
}

/// `eos_token_id`: an integer, a list of them, or null.
fn eos(side: &Side) -> Result<Vec<u32>, TextError> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = side.read("eos_token_id", "a token id or a list of them", |v| match v {
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    })?;
    Ok(ids.unwrap_or_default())
}
