//! Task sets: the project's own, and the user's as JSON lines, plain text or a folder of texts.

use crate::text::{Message, TextError, Tokenizer};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A named list of texts of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskSet {
    /// Short name, e.g. `prose`.
    pub name: String,
    /// The texts.
    pub samples: Vec<Sample>,
}

/// One text, plain or as a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Plain text.
    Text(String),
    /// Turns, rendered with the model's chat template.
    Chat(Vec<Message>),
}

/// Why a set cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SetError {
    /// No such built-in set.
    #[error("`{name}` is no built-in task")]
    Unknown {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A file that cannot be read.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Bytes that are no text.
    #[error("`{}` is not UTF-8: invalid byte at {at}", path.display())]
    Utf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first bad byte.
        at: usize,
    },
    /// A line that is no sample.
    #[error("`{}` line {line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// No sample at all.
    #[error("task `{name}` has no sample")]
    Empty {
        /// The task.
        name: String,
    },
    /// `--task` not in the form NAME=PATH.
    #[error("`{0}` is not of the form NAME=PATH")]
    Form(String),
}

impl SetError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            SetError::Unknown { known, .. } => Some(format!("built-in tasks: {known}; own ones are given as NAME=PATH")),
            SetError::Line { .. } => Some("each line is an object with `text`, or `messages` of {role, content}".into()),
            SetError::Empty { .. } => Some("give a file of JSON lines, a plain text, or a folder of text files".into()),
            _ => None,
        }
    }
}

macro_rules! builtin {
    ($($name:literal),+) => { [$(($name, include_str!(concat!("../../calib/", $name, ".jsonl")))),+] };
}

/// The project's own sets, in `calib/`.
const BUILTIN: [(&str, &str); 8] = builtin!["prose", "code", "systems_code", "math", "qa", "dialogue", "howto", "chinese"];

/// The eight built-in sets.
pub fn builtin() -> Result<Vec<TaskSet>, SetError> {
    BUILTIN.iter().map(|(name, text)| Ok(TaskSet { name: (*name).into(), samples: json_lines(Path::new(name), text)? })).collect()
}

/// Sets named by the user: a built-in name, or `NAME=PATH`. Without any, all built-in ones.
pub fn resolve(specs: &[String]) -> Result<Vec<TaskSet>, SetError> {
    if specs.is_empty() {
        return builtin();
    }
    specs
        .iter()
        .map(|spec| match spec.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => read(name, Path::new(path)),
            Some(_) => Err(SetError::Form(spec.clone())),
            None => {
                let known = || BUILTIN.map(|(name, _)| name).join(", ");
                let all = builtin()?;
                all.into_iter().find(|s| s.name == *spec).ok_or_else(|| SetError::Unknown { name: spec.clone(), known: known() })
            }
        })
        .collect()
}

/// Reads a set: `.jsonl` as JSON lines, a folder as one sample a file, anything else as one text.
pub fn read(name: &str, path: &Path) -> Result<TaskSet, SetError> {
    let io = |source| SetError::Io { path: path.to_path_buf(), source };
    let samples = if path.is_dir() {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(path).map_err(io)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>().map_err(io)?;
        files.retain(|f| f.is_file());
        files.sort();
        files.iter().map(|f| Ok(Sample::Text(text(f)?))).collect::<Result<Vec<_>, SetError>>()?
    } else if path.extension().is_some_and(|e| e == "jsonl" || e == "json") {
        json_lines(path, &text(path)?)?
    } else {
        vec![Sample::Text(text(path)?)]
    };
    let samples: Vec<Sample> = samples.into_iter().filter(|s| !matches!(s, Sample::Text(t) if t.trim().is_empty())).collect();
    if samples.is_empty() {
        return Err(SetError::Empty { name: name.into() });
    }
    Ok(TaskSet { name: name.into(), samples })
}

/// A whole file as text.
pub fn text(path: &Path) -> Result<String, SetError> {
    let bytes = std::fs::read(path).map_err(|source| SetError::Io { path: path.to_path_buf(), source })?;
    String::from_utf8(bytes).map_err(|e| SetError::Utf8 { path: path.to_path_buf(), at: e.utf8_error().valid_up_to() })
}

#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    messages: Option<Vec<Message>>,
}

fn json_lines(path: &Path, text: &str) -> Result<Vec<Sample>, SetError> {
    let wrong = |line: usize, what: String| SetError::Line { path: path.to_path_buf(), line: line + 1, what };
    text.lines()
        .enumerate()
        .filter(|(_, l)| !l.trim().is_empty())
        .map(|(n, l)| match serde_json::from_str::<Line>(l) {
            Ok(Line { text: Some(text), .. }) => Ok(Sample::Text(text)),
            Ok(Line { messages: Some(messages), .. }) if !messages.is_empty() => Ok(Sample::Chat(messages)),
            Ok(_) => Err(wrong(n, "has neither `text` nor `messages`".into())),
            Err(e) => Err(wrong(n, e.to_string())),
        })
        .collect()
}

impl Sample {
    /// Token ids. A conversation goes through the chat template; a model without one sees the contents, one paragraph a turn.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
        use crate::text::AddSpecial;
        match self {
            Sample::Text(text) => tokenizer.encode(text, AddSpecial::Yes),
            Sample::Chat(messages) if tokenizer.has_chat_template() => {
                tokenizer.encode(&tokenizer.chat(messages, false)?, AddSpecial::No)
            }
            Sample::Chat(messages) => {
                let text: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
                tokenizer.encode(&text.join("\n\n"), AddSpecial::Yes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_sets_of_a_hundred_are_built_in() {
        let sets = builtin().unwrap();
        assert_eq!(sets.len(), 8);
        assert!(sets.iter().all(|s| s.samples.len() >= 100), "{:?}", sets.iter().map(|s| s.samples.len()).collect::<Vec<_>>());
    }

    /// Fails when a set changes and its checksum does not, or two samples of a set are equal.
    #[test]
    fn sets_are_as_listed() {
        use sha2::Digest;
        let listed: toml::Table = include_str!("../../calib/sets.toml").parse().unwrap();
        for (row, (name, text)) in listed["set"].as_array().unwrap().iter().zip(BUILTIN) {
            let sum: String = sha2::Sha256::digest(text).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!((row["name"].as_str(), row["sha256"].as_str()), (Some(name), Some(sum.as_str())));
            let lines: std::collections::HashSet<&str> = text.lines().collect();
            assert_eq!(row["samples"].as_integer(), Some(lines.len() as i64), "{name}");
        }
    }

    #[test]
    fn a_line_without_text_is_named() {
        let error = json_lines(Path::new("x.jsonl"), "{\"text\": \"a\"}\n{\"texts\": 1}").unwrap_err();
        assert_eq!(error.to_string(), "`x.jsonl` line 2: has neither `text` nor `messages`");
    }
}
