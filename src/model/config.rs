//! Reading `config.json` so that nothing in it can be overlooked.
//!
//! A [`ConfigReader`] remembers which keys a family asked for; [`ConfigReader::finish`] refuses any other key that could
//! change the computation. It knows JSON and key aliases, not what the values are for.

use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Why a config cannot be turned into a model.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// A key without which the model is undefined.
    #[error("config.json lacks `{key}`")]
    Missing {
        /// The key, aliases joined by `|`.
        key: String,
    },
    /// A value of the wrong JSON type or out of range.
    #[error("config.json: `{key}` is {found}, expected {expected}")]
    Invalid {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// What is accepted.
        expected: String,
    },
    /// Keys nobody read.
    #[error("config.json has keys that `{family}` does not define and that may change the computation: {}", keys.join(", "))]
    Unknown {
        /// `model_type`.
        family: String,
        /// The keys with their values.
        keys: Vec<String>,
    },
    /// No such family.
    #[error("config.json: `model_type` is `{found}`, which this version cannot run")]
    Family {
        /// The value found.
        found: String,
        /// The families that can be run.
        known: String,
    },
}

impl ConfigError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ConfigError::Family { known, .. } => {
                Some(format!("this version runs {known}; `moe inspect` and `moe quantize` also take other families"))
            }
            ConfigError::Unknown { .. } => {
                Some("remove the key if it is an annotation; otherwise this model needs a newer version".into())
            }
            _ => None,
        }
    }
}

/// Keys that describe training, files or defaults of libraries, and never the forward pass.
const IGNORABLE: &[&str] = &[
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "ep_size",
    "hidden_dropout",
    "initializer_range",
    "input_jitter_noise",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "seq_aux",
    "sep_token_id",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// A config object that records what was asked of it.
pub struct ConfigReader<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> ConfigReader<'a> {
    /// Wraps a parsed `config.json`.
    pub fn new(config: &'a Value) -> Result<Self, ConfigError> {
        let map = config.as_object().ok_or_else(|| ConfigError::Invalid {
            key: "config.json".into(),
            found: kind(config).into(),
            expected: "an object".into(),
        })?;
        Ok(Self { map, prefix: String::new(), read: RefCell::default() })
    }

    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of a key; JSON `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(key.to_string());
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn invalid(&self, key: &str, found: &Value, expected: impl Into<String>) -> ConfigError {
        ConfigError::Invalid { key: self.path(key), found: found.to_string(), expected: expected.into() }
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: self.path(key) }
    }

    /// A positive count, if given.
    pub fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=u32::MAX as u64).contains(&n) => Ok(Some(n as usize)),
                _ => Err(self.invalid(key, v, "a positive integer")),
            },
        }
    }

    /// A count that may be zero, if given.
    pub fn index(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if n <= u32::MAX as u64 => Ok(Some(n as usize)),
                _ => Err(self.invalid(key, v, "a non-negative integer")),
            },
        }
    }

    /// A positive count that must be given under one of several spellings.
    pub fn need(&self, aliases: &[&str]) -> Result<usize, ConfigError> {
        let mut found = None;
        for key in aliases {
            if let Some(n) = self.count(key)? {
                found = found.or(Some(n));
            }
        }
        found.ok_or_else(|| self.missing(&aliases.join("|")))
    }

    /// A finite number, if given.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) if x.is_finite() => Ok(Some(x)),
                _ => Err(self.invalid(key, v, "a number")),
            },
        }
    }

    /// A finite number that must be given.
    pub fn need_number(&self, key: &str) -> Result<f64, ConfigError> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }

    /// A flag, if given.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_bool().map(Some).ok_or_else(|| self.invalid(key, v, "true or false")),
        }
    }

    /// A flag without which the model is undefined.
    pub fn need_flag(&self, key: &str) -> Result<bool, ConfigError> {
        self.flag(key)?.ok_or_else(|| self.missing(key))
    }

    /// A string, if given.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| self.invalid(key, v, "a string")),
        }
    }

    /// A list of numbers of a given length.
    pub fn numbers(&self, key: &str, len: usize) -> Result<Vec<f64>, ConfigError> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        let list: Option<Vec<f64>> =
            value.as_array().and_then(|a| a.iter().map(|v| v.as_f64().filter(|x| x.is_finite())).collect());
        match list {
            Some(list) if list.len() == len => Ok(list),
            _ => Err(self.invalid(key, value, format!("a list of {len} numbers"))),
        }
    }

    /// A list of indices, empty if absent.
    pub fn indices(&self, key: &str) -> Result<Vec<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let list: Option<Vec<usize>> =
            value.as_array().and_then(|a| a.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect());
        list.ok_or_else(|| self.invalid(key, value, "a list of non-negative integers"))
    }

    /// A list of strings of a given length, if given.
    pub fn words(&self, key: &str, len: usize) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list: Option<Vec<&str>> = value.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
        match list {
            Some(list) if list.len() == len => Ok(Some(list)),
            _ => Err(self.invalid(key, value, format!("a list of {len} strings"))),
        }
    }

    /// Refuses any value of `key` other than `wanted`; absent counts as `wanted`.
    pub fn expect(&self, key: &str, wanted: impl Into<Value>) -> Result<(), ConfigError> {
        let wanted = wanted.into();
        match self.get(key) {
            Some(v) if *v != wanted => Err(self.invalid(key, v, format!("{wanted} (other values are not supported)"))),
            _ => Ok(()),
        }
    }

    /// Builds the error for a value that a family does not support.
    pub fn unsupported(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        let found = self.map.get(key).cloned().unwrap_or(Value::Null);
        self.invalid(key, &found, expected)
    }

    /// A nested object, read with its own record; it must be finished too.
    pub fn nested(&self, key: &str) -> Result<Option<ConfigReader<'a>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => {
                let map = v.as_object().ok_or_else(|| self.invalid(key, v, "an object"))?;
                Ok(Some(ConfigReader { map, prefix: format!("{}{key}.", self.prefix), read: RefCell::default() }))
            }
        }
    }

    /// Refuses keys that were never read, outside a short list of keys that cannot matter.
    pub fn finish(&self, family: &str) -> Result<(), ConfigError> {
        let read = self.read.borrow();
        let keys: Vec<String> = self
            .map
            .iter()
            .filter(|(k, v)| !v.is_null() && !read.contains(*k))
            .filter(|(k, _)| !self.prefix.is_empty() || !IGNORABLE.contains(&k.as_str()))
            .map(|(k, v)| {
                let value = v.to_string();
                let shown: String = value.chars().take(40).collect();
                format!("`{}` = {shown}", self.path(k))
            })
            .collect();
        if keys.is_empty() { Ok(()) } else { Err(ConfigError::Unknown { family: family.into(), keys }) }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_unread_key_is_named_with_its_value() {
        let config = json!({"hidden_size": 8, "n_group": 4, "torch_dtype": "bfloat16", "clip_qkv": null});
        let reader = ConfigReader::new(&config).unwrap();
        assert_eq!(reader.need(&["hidden_size"]), Ok(8));
        let error = reader.finish("mixtral").unwrap_err();
        assert_eq!(error, ConfigError::Unknown { family: "mixtral".into(), keys: vec!["`n_group` = 4".into()] });
    }

    #[test]
    fn nested_keys_are_reported_with_their_path() {
        let config = json!({"rope_scaling": {"type": "yarn", "surprise": 1}});
        let reader = ConfigReader::new(&config).unwrap();
        let nested = reader.nested("rope_scaling").unwrap().unwrap();
        nested.text("type").unwrap();
        assert!(nested.finish("x").unwrap_err().to_string().contains("`rope_scaling.surprise` = 1"));
    }
}
