//! Chat templates: Jinja as transformers sets it up, down to whitespace and JSON spacing.

use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Enumerator, Kwargs, Object};
use minijinja::{Environment, Error, ErrorKind, Value};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::{Side, TextError, read};

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// An object rather than a map, whose keys minijinja would sort: templates print messages with `tojson`.
impl Object for Message {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(Value::from(self.role.as_str())),
            "content" => Some(Value::from(self.content.as_str())),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

/// The folder's template: its own file first, then the processor's JSON, then the tokenizer's config.
pub(super) fn find(dir: &Path, config: &Side) -> Result<Option<String>, TextError> {
    let path = dir.join("chat_template.jinja");
    if let Some(bytes) = read(&path)? {
        let text = String::from_utf8(bytes).map_err(|e| TextError::Read { path, source: io::Error::other(e) })?;
        return Ok(Some(text));
    }
    match of(&Side::open(dir, "chat_template.json")?)? {
        Some(text) => Ok(Some(text)),
        None => of(config),
    }
}

/// `chat_template`: a string, or a list of `{name, template}` of which `default` is meant.
fn of(side: &Side) -> Result<Option<String>, TextError> {
    const EXPECTED: &str = "a string or a list of {name, template} with a `default`";
    side.read("chat_template", EXPECTED, |v| match v {
        serde_json::Value::Array(list) => {
            let one = list.iter().find(|t| t["name"] == "default").or(list.first().filter(|_| list.len() == 1))?;
            one["template"].as_str().map(String::from)
        }
        text => text.as_str().map(String::from),
    })
}

/// Instructions that one rendering may take; the templates of large models take a few hundred a message.
const FUEL: u64 = 4_000_000;
/// Widest indentation of JSON.
const MAX_INDENT: usize = 64;

/// Renders `source`; the error is a reason fit for the user.
pub(super) fn render<'t>(
    source: &str,
    messages: &[Message],
    add_generation_prompt: bool,
    tokens: impl Iterator<Item = (&'t str, &'t str)>,
) -> Result<String, String> {
    // transformers marks the assistant's part of training text with a tag of its own, which renders its body.
    static GENERATION: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());
    let source = match &*GENERATION {
        Some(tag) => tag.replace_all(source, |c: &regex::Captures<'_>| {
            let word = if c.get(2).is_some() { "endif" } else { "if true" };
            format!("{{%{} {word} {}%}}", &c[1], &c[3])
        }),
        None => source.into(),
    };
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", to_json);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    let mut context: Vec<(&str, Value)> = vec![
        ("messages", messages.iter().cloned().map(Value::from_object).collect()),
        ("add_generation_prompt", add_generation_prompt.into()),
        ("tools", ().into()),
        ("documents", ().into()),
    ];
    context.extend(tokens.map(|(name, text)| (name, Value::from(text))));
    let context: Value = context.into_iter().collect();
    env.template_from_named_str("chat_template", &source).and_then(|t| t.render(context)).map_err(|e| reason(&e))
}

fn reason(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), String::from);
    match error.line() {
        Some(line) => format!("{text} (line {line})"),
        None => text,
    }
}

/// `json.dumps` of Python rather than HTML-safe JSON.
fn to_json(value: Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get::<Option<usize>>("indent")?.map(|n| n.min(MAX_INDENT));
    let separators: Option<(String, String)> = match kwargs.get::<Option<Value>>("separators")? {
        None => None,
        Some(pair) => Some((pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())),
    };
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let bad = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut value = serde_json::to_value(&value).map_err(bad)?;
    if sort_keys {
        value.sort_all_objects();
    }
    let default = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or((default.into(), ": ".into()));
    let mut out = Vec::new();
    let style = PythonJson { indent, item, key, depth: 0, has_value: false };
    serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, style)).map_err(bad)?;
    let text = String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(if ensure_ascii { escape_non_ascii(&text) } else { text })
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if c.is_ascii() => out.push(c),
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    out
}

struct PythonJson {
    indent: Option<usize>,
    item: String,
    key: String,
    depth: usize,
    has_value: bool,
}

impl PythonJson {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.has_value = true;
        self.line(writer)
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(writer, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}

/// The date codes that templates use, in UTC (transformers: local time); other codes stay as written.
fn strftime(format: &str, now: SystemTime) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (year, month, day) = civil(seconds / 86_400);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(seconds / 86_400 % 7) as usize]);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a number of days since 1970-01-01 (Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Trips if leap years or the epoch's weekday move by one.
    #[test]
    fn dates() {
        let at = |days: u64| UNIX_EPOCH + Duration::from_secs(days * 86_400 + 3 * 3600 + 4 * 60 + 5);
        assert_eq!(strftime("%d %b %Y", at(0)), "01 Jan 1970");
        assert_eq!(strftime("%A %Y-%m-%d %H:%M:%S 100%%", at(19_782)), "Thursday 2024-02-29 03:04:05 100%");
        assert_eq!(strftime("%a, %B %y %Q%", at(11_016)), "Tue, February 00 %Q%");
    }

    /// Trips if a separator loses its space, keys are sorted unasked, or HTML is escaped.
    #[test]
    fn json_as_python_prints_it() {
        let line = |source: &str| {
            let messages = [Message { role: "user".into(), content: "<é> \"q\"".into() }];
            render(source, &messages, false, std::iter::empty()).unwrap()
        };
        assert_eq!(line("{{ messages | tojson }}"), r#"[{"role": "user", "content": "<é> \"q\""}]"#);
        assert_eq!(
            line("{{ messages[0] | tojson(sort_keys=true, ensure_ascii=true) }}"),
            r#"{"content": "<\u00e9> \"q\"", "role": "user"}"#
        );
        assert_eq!(line("{{ [1, [], {}, true, none] | tojson(indent=2) }}"), "[\n  1,\n  [],\n  {},\n  true,\n  null\n]");
        assert_eq!(line("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}"), r#"{"a":[1,2]}"#);
    }
}
