//! Text to token ids and back, chat templates, and the generation defaults of a model folder.
//!
//! Knows the side files of a Hugging Face directory (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`,
//! `generation_config.json` ...) and must not know models, weights or devices. What transformers does with the same files
//! is the reference.

mod chat;
mod defaults;
mod stream;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use chat::Message;
pub use defaults::GenerationConfig;
pub use stream::{Emit, StopStrings, Stream};

/// Whether encoding adds the tokens that open (and close) a sequence, such as BOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    /// Add what the tokenizer adds to plain text.
    Yes,
    /// Add nothing; right for a rendered chat template, which spells its own BOS.
    No,
}

/// What goes wrong between text and tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The folder has no `tokenizer.json`.
    #[error("`{}` has no `tokenizer.json`{}", dir.display(), found.map(|f| format!(", only `{f}`")).unwrap_or_default())]
    NoTokenizer {
        /// The model folder.
        dir: PathBuf,
        /// A tokenizer of another format that is there.
        found: Option<&'static str>,
    },
    /// A file could not be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("`{}` is not valid JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A key has a value of the wrong kind.
    #[error("`{key}` in `{}` is {found}, expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What was expected.
        expected: &'static str,
        /// The value found.
        found: String,
    },
    /// `tokenizer.json` does not describe a tokenizer.
    #[error("cannot load `{}`: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer library's reason.
        reason: String,
    },
    /// Text could not be encoded.
    #[error("cannot encode text: {reason}")]
    Encode {
        /// The tokenizer library's reason.
        reason: String,
    },
    /// Tokens could not be decoded.
    #[error("cannot decode tokens: {reason}")]
    Decode {
        /// The tokenizer library's reason.
        reason: String,
    },
    /// The folder has no chat template.
    #[error("`{}` has no chat template", dir.display())]
    NoChatTemplate {
        /// The model folder.
        dir: PathBuf,
    },
    /// The chat template could not be rendered, or refused the messages.
    #[error("chat template of `{}`: {reason}", dir.display())]
    Template {
        /// The model folder.
        dir: PathBuf,
        /// Reason, with the template's line where known.
        reason: String,
    },
}

impl TextError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            TextError::NoTokenizer { dir, found: Some(found) } => Some(format!(
                "convert `{found}` once with transformers: AutoTokenizer.from_pretrained(\"{0}\").save_pretrained(\"{0}\") writes `tokenizer.json`",
                dir.display()
            )),
            TextError::NoTokenizer { found: None, .. } => {
                Some("copy the tokenizer files next to the weights; is this the folder that holds `config.json`?".into())
            }
            TextError::Tokenizer { .. } | TextError::Json { .. } => {
                Some("download the file again; a short text file may be a Git LFS pointer".into())
            }
            TextError::NoChatTemplate { .. } => {
                Some("a base model has none: give a plain prompt, or put the template in `chat_template.jinja`".into())
            }
            TextError::Read { .. }
            | TextError::Key { .. }
            | TextError::Encode { .. }
            | TextError::Decode { .. }
            | TextError::Template { .. } => None,
        }
    }
}

/// A token that opens, closes or pads sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedToken {
    text: String,
    id: Option<u32>,
}

/// What to do to the ends of an encoded sequence beyond the post-processor of `tokenizer.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    AsIs,
    Add(u32),
    Remove,
}

/// The tokenizer of a model folder, with its chat template.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    dir: PathBuf,
    special: HashSet<u32>,
    bytes: stream::Bytes,
    vocab_size: usize,
    bos: Option<NamedToken>,
    eos: Option<NamedToken>,
    pad: Option<NamedToken>,
    unk: Option<NamedToken>,
    front: End,
    back: End,
    template: Option<String>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder and, where present, `tokenizer_config.json`, `special_tokens_map.json`,
    /// `chat_template.jinja` and `chat_template.json`.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let Some(json) = read(&path)? else {
            const OTHERS: [&str; 4] = ["tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json"];
            let found = OTHERS.into_iter().find(|f| dir.join(f).exists());
            return Err(TextError::NoTokenizer { dir: dir.into(), found: found.or_else(|| tiktoken(dir)) });
        };
        let refuse = |e: tokenizers::Error| TextError::Tokenizer { path: path.clone(), reason: e.to_string() };
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(refuse)?;
        // Limits of whoever saved the file: they would cut long prompts silently.
        inner.with_truncation(None).map_err(refuse)?.with_padding(None);

        let config = Side::open(dir, "tokenizer_config.json")?;
        let map = Side::open(dir, "special_tokens_map.json")?;
        let named = |key| -> Result<Option<NamedToken>, TextError> {
            let text = match config.token(key)? {
                Some(text) => Some(text),
                None => map.token(key)?,
            };
            Ok(text.map(|text| NamedToken { id: inner.token_to_id(&text), text }))
        };
        let (bos, eos, pad, unk) = (named("bos_token")?, named("eos_token")?, named("pad_token")?, named("unk_token")?);
        let empty = inner.encode_fast("", true).map_err(refuse)?;
        let front = end(config.flag("add_bos_token")?, bos.as_ref(), empty.get_ids().first());
        let back = end(config.flag("add_eos_token")?, eos.as_ref(), empty.get_ids().last());
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, t)| t.special).map(|(id, _)| id).collect();
        let bytes = stream::Bytes::of(inner.get_decoder());
        let template = chat::find(dir, &config)?;
        Ok(Tokenizer { inner, dir: dir.into(), special, bytes, vocab_size, bos, eos, pad, unk, front, back, template })
    }

    /// Token ids of `text`; special tokens spelt in it become their ids.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>, TextError> {
        let add = special == AddSpecial::Yes;
        let encoding = self.inner.encode_fast(text, add).map_err(|e| TextError::Encode { reason: e.to_string() })?;
        let mut ids = encoding.get_ids().to_vec();
        if add {
            match self.front {
                End::Add(id) => ids.insert(0, id),
                End::Remove => drop(ids.drain(..1)),
                End::AsIs => {}
            }
            match self.back {
                End::Add(id) => ids.push(id),
                End::Remove => drop(ids.pop()),
                End::AsIs => {}
            }
        }
        Ok(ids)
    }

    /// Text of `ids`. Ids without a token (models often pad their vocabulary) contribute nothing.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, !keep_special).map_err(|e| TextError::Decode { reason: e.to_string() })
    }

    /// Highest token id plus one, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Id of a token by its exact spelling in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Id of the token that begins a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.bos.as_ref().and_then(|t| t.id)
    }

    /// Id of the token that ends a sequence, by the tokenizer's own word; see [`GenerationConfig::eos`].
    pub fn eos(&self) -> Option<u32> {
        self.eos.as_ref().and_then(|t| t.id)
    }

    /// Whether the folder has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The conversation as the model was trained to see it. Encode the result with [`AddSpecial::No`].
    pub fn chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TextError> {
        let source = self.template.as_deref().ok_or_else(|| TextError::NoChatTemplate { dir: self.dir.clone() })?;
        let tokens = [("bos_token", &self.bos), ("eos_token", &self.eos), ("pad_token", &self.pad), ("unk_token", &self.unk)];
        let tokens = tokens.into_iter().filter_map(|(name, token)| Some((name, token.as_ref()?.text.as_str())));
        chat::render(source, messages, add_generation_prompt, tokens)
            .map_err(|reason| TextError::Template { dir: self.dir.clone(), reason })
    }

    /// Decodes a growing answer to `prompt` piece by piece, leaving special tokens out.
    pub fn stream(&self, prompt: &[u32]) -> Stream<'_> {
        Stream::new(self, prompt)
    }
}

/// `add_bos_token` and its twin are honoured in both directions: transformers lets them override the post-processor.
fn end(wanted: Option<bool>, token: Option<&NamedToken>, present: Option<&u32>) -> End {
    let Some(id) = token.and_then(|t| t.id) else { return End::AsIs };
    match (wanted, present == Some(&id)) {
        (Some(true), false) => End::Add(id),
        (Some(false), true) => End::Remove,
        _ => End::AsIs,
    }
}

fn tiktoken(dir: &Path) -> Option<&'static str> {
    let mut names = fs::read_dir(dir).ok()?.filter_map(|e| e.ok()?.file_name().into_string().ok());
    names.any(|n| n.ends_with(".tiktoken")).then_some("*.tiktoken")
}

/// A file's bytes; `None` where there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.into(), source }),
    }
}

/// An optional JSON side file; an absent one reads as empty.
#[derive(Debug)]
struct Side {
    path: PathBuf,
    value: Value,
}

impl Side {
    fn open(dir: &Path, name: &str) -> Result<Side, TextError> {
        let path = dir.join(name);
        let value = match read(&path)? {
            None => Value::Null,
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|source| TextError::Json { path: path.clone(), source })?,
        };
        Ok(Side { path, value })
    }

    /// The value of `key`; JSON null counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    fn refuse(&self, key: &str, expected: &'static str, found: &Value) -> TextError {
        TextError::Key { path: self.path.clone(), key: key.into(), expected, found: found.to_string() }
    }

    /// `key` through `convert`, which answers `None` for a value of the wrong kind.
    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, TextError> {
        self.get(key).map(|v| convert(v).ok_or_else(|| self.refuse(key, expected, v))).transpose()
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, TextError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A token, spelt as a string or as an object with `content`.
    fn token(&self, key: &str) -> Result<Option<String>, TextError> {
        let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(String::from);
        self.read(key, "a string or an object with `content`", text)
    }
}
