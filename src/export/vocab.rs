//! The vocabulary in the form of llama.cpp, from `tokenizer.json` and its companions.
//!
//! Two kinds of tokenizer can be carried over: byte-level BPE (`gpt2` there), where merges are kept and the splitting expression is
//! named, and BPE over characters with byte tokens for the rest (`llama` there), where a token's score is the rank of its merge.

use super::gguf::Value;
use super::{ExportError, side_file};
use crate::model::spec::ModelSpec;
use serde_json::Value as Json;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Keys of a vocabulary.
pub struct Vocab {
    pub keys: Vec<(String, Value)>,
    pub warnings: Vec<String>,
}

/// Kinds of token.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Reads the tokenizer of a directory; `None` if there is no `tokenizer.json`.
pub fn keys(dir: &Path, spec: &ModelSpec) -> Result<Option<Vocab>, ExportError> {
    let json = side_file(dir, "tokenizer.json")?;
    if json.is_null() {
        return Ok(None);
    }
    let refuse = |what: String| ExportError::Tokenizer { path: dir.join("tokenizer.json"), what };
    let model = &json["model"];
    let (Some(vocab), Some("BPE")) = (model["vocab"].as_object(), model["type"].as_str().or(Some("BPE"))) else {
        return Err(refuse(format!("its model is {}, and only BPE can be carried over", model["type"])));
    };
    let merges = merges(&model["merges"]).ok_or_else(|| refuse("its merges are neither pairs nor strings".into()))?;
    let mut tokens: BTreeMap<usize, (String, i32)> = BTreeMap::new();
    for (text, id) in vocab {
        let id = id.as_u64().ok_or_else(|| refuse(format!("token `{text}` has no id")))? as usize;
        let byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        tokens.insert(id, (text.clone(), if byte { BYTE } else { NORMAL }));
    }
    let unknown = model["unk_token"].as_str();
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(text)) = (added["id"].as_u64(), added["content"].as_str()) else { continue };
        let special = added["special"].as_bool().unwrap_or(false);
        tokens.insert(id as usize, (text.to_string(), if special { CONTROL } else { USER_DEFINED }));
    }
    if let Some((_, kind)) = tokens.values_mut().find(|(text, _)| Some(text.as_str()) == unknown) {
        *kind = UNKNOWN;
    }
    if let Some((&id, _)) = tokens.last_key_value().filter(|(id, _)| **id >= spec.vocab) {
        return Err(refuse(format!("token {id} lies past the embedding's {} rows", spec.vocab)));
    }
    let all: Vec<(String, i32)> =
        (0..spec.vocab).map(|id| tokens.get(&id).cloned().unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED))).collect();

    let mut warnings = Vec::new();
    let mut keys: Vec<(String, Value)> = Vec::new();
    let mut put = |key: &str, value: Value| keys.push((format!("tokenizer.ggml.{key}"), value));
    let characters = model["byte_fallback"].as_bool().unwrap_or(false);
    if characters {
        put("model", Value::Text("llama".into()));
        put("pre", Value::Text("default".into()));
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, [left, right]) in merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        // What no merge makes is a character, reached without merging, or never by text.
        let score = |text: &str| ranks.get(text).map_or(-1e6, |r| -(*r as f32));
        put("scores", Value::Numbers(all.iter().map(|(t, kind)| if *kind == NORMAL { score(t) } else { 0.0 }).collect()));
        put("add_space_prefix", Value::Flag(adds_prefix(&json)));
    } else {
        put("model", Value::Text("gpt2".into()));
        let pre = splitter(&json["pre_tokenizer"]);
        if pre.is_none() {
            warnings
                .push("the tokenizer splits text by an expression that llama.cpp has no name for; token ids may differ".into());
        }
        put("pre", Value::Text(pre.unwrap_or("default").into()));
        put("merges", Value::Texts(merges.iter().map(|[left, right]| format!("{left} {right}")).collect()));
    }
    put("token_type", Value::Integers(all.iter().map(|(_, kind)| *kind).collect()));
    let id_of: HashMap<&str, usize> = all.iter().enumerate().rev().map(|(id, (t, _))| (t.as_str(), id)).collect();
    let config = side_file(dir, "tokenizer_config.json")?;
    for (key, name) in [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")] {
        let text = config[key].as_str().or_else(|| config[key]["content"].as_str());
        if let Some(id) = text.and_then(|t| id_of.get(t)) {
            put(&format!("{name}_token_id"), Value::Count(*id as u32));
        }
    }
    for key in ["add_bos_token", "add_eos_token"] {
        if let Some(flag) = config[key].as_bool() {
            put(key, Value::Flag(flag));
        }
    }
    put("tokens", Value::Texts(all.into_iter().map(|(t, _)| t).collect()));
    let template = dir.join("chat_template.jinja");
    let template = if template.exists() {
        String::from_utf8(crate::files::read(&template)?).ok()
    } else {
        config["chat_template"].as_str().map(String::from)
    };
    keys.extend(template.map(|t| ("tokenizer.chat_template".to_string(), Value::Text(t))));
    Ok(Some(Vocab { keys, warnings }))
}

/// Pairs, spelled as lists or with a space between.
fn merges(value: &Json) -> Option<Vec<[String; 2]>> {
    let pair = |m: &Json| match m {
        Json::String(s) => s.split_once(' ').map(|(a, b)| [a.to_string(), b.to_string()]),
        Json::Array(a) => match &a[..] {
            [Json::String(a), Json::String(b)] => Some([a.clone(), b.clone()]),
            _ => None,
        },
        _ => None,
    };
    value.as_array()?.iter().map(pair).collect()
}

/// Whether a space is put before the text.
fn adds_prefix(json: &Json) -> bool {
    let normalizers = json["normalizer"]["normalizers"].as_array().cloned().unwrap_or_default();
    let prepends = normalizers.iter().any(|n| n["type"] == "Prepend");
    let scheme = &json["pre_tokenizer"]["prepend_scheme"];
    prepends || (json["pre_tokenizer"]["type"] == "Metaspace" && *scheme != "never")
}

/// llama.cpp's name for the way a byte-level tokenizer cuts text before merging, recognised by the expressions it uses.
fn splitter(pre: &Json) -> Option<&'static str> {
    let steps = match pre["pretokenizers"].as_array() {
        Some(steps) => steps.clone(),
        None => vec![pre.clone()],
    };
    let expressions: Vec<&str> =
        steps.iter().filter_map(|s| s["pattern"]["Regex"].as_str().or_else(|| s["pattern"]["String"].as_str())).collect();
    let digits = steps.iter().find(|s| s["type"] == "Digits").map(|s| s["individual_digits"].as_bool().unwrap_or(false));
    const WORDS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
    match expressions[..] {
        [] if steps.iter().any(|s| s["type"] == "ByteLevel") => match digits {
            None => Some("gpt-2"),
            Some(true) => Some("smollm"),
            Some(false) => None,
        },
        [one] if one.contains(WORDS) && one.contains(r"\p{N}{1,3}") => Some("llama-bpe"),
        [one] if one.contains(WORDS) && one.contains(r"|\p{N}|") => Some("qwen2"),
        [r"[\r\n]", ..] if digits.is_some() => Some("deepseek-llm"),
        [r"\p{N}{1,3}", ..] => Some("deepseek-v3"),
        _ => None,
    }
}
