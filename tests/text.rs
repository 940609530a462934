//! Tokenizers built here, chat templates against what transformers 5 rendered, and streams against one-shot decoding.

use std::fs;
use std::path::Path;

use moe::text::{AddSpecial, Emit, GenerationConfig, Message, StopStrings, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/text");
const REPLACED: char = char::REPLACEMENT_CHARACTER;

/// A model folder with these files, JSON values written as such and strings as they are.
fn folder(files: &[(&str, Value)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let text = content.as_str().map_or_else(|| content.to_string(), String::from);
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn special(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

fn tokenizer(specials: &[&str], vocab: &[String], parts: Value) -> Value {
    let added: Vec<Value> = specials.iter().enumerate().map(|(i, s)| special(i, s)).collect();
    let all = specials.iter().map(|s| s.to_string()).chain(vocab.iter().cloned());
    let vocab: serde_json::Map<String, Value> = all.enumerate().map(|(i, s)| (s, json!(i))).collect();
    let mut value = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []}
    });
    for (key, part) in parts.as_object().unwrap() {
        match key.strip_prefix("model.") {
            Some(key) => value["model"][key] = part.clone(),
            None => value[key] = part.clone(),
        }
    }
    value
}

/// GPT-2's characters for the bytes 0 to 255.
fn byte_chars() -> Vec<String> {
    let plain = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    let chars = (0..256).map(|b| if plain(b) { b } else { (next, next += 1).0 });
    chars.map(|c| char::from_u32(c).unwrap().to_string()).collect()
}

/// Byte-level, with merges that cross character boundaries: the last byte of one 🙂 with the first of the next.
fn byte_level() -> Value {
    let bytes = byte_chars();
    let pair = |a: usize, b: usize| json!([bytes[a], bytes[b]]);
    let mut vocab = bytes.clone();
    for (a, b) in [(b't', b'h'), (0x82, 0xF0), (0xE4, 0xBD)] {
        vocab.push(format!("{}{}", bytes[a as usize], bytes[b as usize]));
    }
    let merges = json!([pair(0x74, 0x68), pair(0x82, 0xF0), pair(0xE4, 0xBD)]);
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    tokenizer(&["<s>", "</s>"], &vocab, json!({"pre_tokenizer": level, "decoder": level, "model.merges": merges}))
}

/// Sentencepiece with byte fallback: a space is put before the text and taken off again.
fn fallback() -> Value {
    let mut vocab: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
    vocab.extend(["▁", "a", "b", "好", "é", "▁a", "▁▁"].map(String::from));
    let parts = json!({
        "model.byte_fallback": true, "model.merges": [["▁", "a"], ["▁", "▁"]],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    });
    tokenizer(&["<s>", "</s>"], &vocab, parts)
}

fn open(json: Value) -> Tokenizer {
    Tokenizer::open(folder(&[("tokenizer.json", json)]).path()).unwrap()
}

/// Every piece, and the remainder.
fn streamed(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream(prompt);
    let mut pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id).unwrap()).collect();
    pieces.extend(stream.finish().unwrap());
    pieces
}

fn texts() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        "[ -~]{0,8}",
        "[一-龥好佽]{1,4}",
        "[🙂🙁🇩🇪👩\u{200d}👧é]{1,4}",
        Just("\u{fffd}".to_string()),
        Just("  ".to_string()),
        "\\PC{0,4}"
    ];
    prop::collection::vec(word, 0..6).prop_map(|words| words.concat())
}

proptest! {
    /// Trips if the window drops its context (a leading space vanishes), if a piece is shown before its last byte (a
    /// replacement character appears), or if a true U+FFFD is taken for an unfinished sequence.
    #[test]
    fn streams_equal_one_shot_decoding(text in texts(), prompt in texts()) {
        for tokenizer in [open(byte_level()), open(fallback())] {
            let ids = tokenizer.encode(&text, AddSpecial::No).unwrap();
            let whole = tokenizer.decode(&ids, false).unwrap();
            prop_assert_eq!(&whole, &text);
            let pieces = streamed(&tokenizer, &[], &ids);
            let whole_characters = pieces.iter().all(|p| !p.is_empty() && (!p.contains(REPLACED) || text.contains(REPLACED)));
            prop_assert!(whole_characters, "{:?}", pieces);
            prop_assert_eq!(pieces.concat(), whole);

            let before = tokenizer.encode(&prompt, AddSpecial::No).unwrap();
            let both = [&before[..], &[1], &ids[..]].concat();
            let expected = tokenizer.decode(&both, false).unwrap();
            let answer = expected.strip_prefix(&tokenizer.decode(&before, false).unwrap()).unwrap().to_string();
            prop_assert_eq!(streamed(&tokenizer, &[&before[..], &[1]].concat(), &ids).concat(), answer);
        }
    }

    /// Models emit anything. Trips if a byte-level stream loses or doubles text around bytes that are not UTF-8, or if
    /// any sequence of ids, known or not, fails.
    #[test]
    fn streams_survive_any_tokens(ids in prop::collection::vec(0u32..300, 0..24)) {
        let level = open(byte_level());
        prop_assert_eq!(streamed(&level, &[], &ids).concat(), level.decode(&ids, false).unwrap());
        streamed(&open(fallback()), &ids, &ids);
    }

    /// Trips if text that begins a stop string is let go, or if the outcome depends on how the text was cut.
    #[test]
    fn stop_strings_do_not_see_the_cuts(text in "[abc好]{0,16}", cuts in prop::collection::vec(any::<bool>(), 16)) {
        let stops = ["abca", "bc好", "cc"].map(String::from);
        let outcome = |pieces: Vec<String>| {
            let mut watch = StopStrings::new(stops.clone());
            let mut shown = String::new();
            let mut stopped = false;
            for piece in pieces {
                let emit = watch.push(&piece);
                shown.push_str(&emit.text);
                stopped |= emit.stopped;
            }
            (shown + &watch.finish(), stopped)
        };
        let mut pieces = vec![String::new()];
        for (c, cut) in text.chars().zip(cuts) {
            pieces.last_mut().unwrap().push(c);
            if cut { pieces.push(String::new()); }
        }
        let whole = outcome(vec![text.clone()]);
        prop_assert_eq!(whole.1, stops.iter().any(|s| text.contains(s)));
        prop_assert_eq!(outcome(pieces), whole);
    }
}

/// Trips if a piece waits longer than its bytes need, or not at all.
#[test]
fn pieces_come_as_soon_as_they_can() {
    let level = open(byte_level());
    let ids = level.encode("th🙂🙂x", AddSpecial::No).unwrap();
    // th | F0 9F 99 | 82 F0 | 9F 99 82 | x
    let mut stream = level.stream(&[]);
    let pieces: Vec<Option<String>> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    let shown: Vec<&str> = pieces.iter().map(|p| p.as_deref().unwrap_or("")).collect();
    assert_eq!(shown, ["th", "", "", "", "🙂", "", "", "🙂", "x"]);

    let mut stream = level.stream(&[]);
    let first = level.encode("好", AddSpecial::No).unwrap()[0];
    assert_eq!(stream.push(first).unwrap(), None);
    assert_eq!(stream.finish().unwrap().as_deref(), Some("\u{fffd}"));
    assert_eq!(stream.finish().unwrap(), None);
}

/// Trips if the first token of an answer loses its space, or keeps the one that was only put there.
#[test]
fn leading_spaces() {
    let sp = open(fallback());
    let a = sp.token_id("▁a").unwrap();
    assert_eq!(streamed(&sp, &[], &[a, a]), ["a", " a"]);
    assert_eq!(streamed(&sp, &[a], &[a]), [" a"]);
    assert_eq!(streamed(&sp, &[a, 1, 0], &[a]), [" a"]);
    assert_eq!(streamed(&sp, &[0], &[a]), ["a"]);
}

/// Trips if a stop string split over pieces is missed or its beginning leaks.
#[test]
fn stop_strings() {
    let mut watch = StopStrings::new(["</s>".to_string(), String::new()]);
    assert_eq!(watch.push("a</"), Emit { text: "a".into(), stopped: false });
    assert_eq!(watch.push("p><"), Emit { text: "</p>".into(), stopped: false });
    assert_eq!(watch.push("/s>b"), Emit { text: "".into(), stopped: true });
    assert_eq!(watch.push("c"), Emit { text: "".into(), stopped: true });
    assert_eq!(watch.finish(), "");
    let mut watch = StopStrings::new(["stop".to_string()]);
    assert_eq!(watch.push("好st").text, "好");
    assert_eq!(watch.finish(), "st");
}

/// Trips if `add_bos_token` is ignored in either direction, doubles a BOS, or a saved truncation cuts the text.
#[test]
fn sequence_ends() {
    let bos = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]});
    let cut = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    for (processor, flag, front) in [
        (Value::Null, Value::Null, false),
        (Value::Null, json!(true), true),
        (bos.clone(), Value::Null, true),
        (bos.clone(), json!(true), true),
        (bos, json!(false), false),
    ] {
        let mut file = byte_level();
        file["post_processor"] = processor;
        file["truncation"] = cut.clone();
        let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": flag, "add_eos_token": true});
        let dir = folder(&[("tokenizer.json", file), ("tokenizer_config.json", config)]);
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        let plain = tokenizer.encode("this", AddSpecial::No).unwrap();
        assert_eq!(plain.len(), 3);
        let expected = [&[0][..usize::from(front)], &plain[..], &[1]].concat();
        assert_eq!(tokenizer.encode("this", AddSpecial::Yes).unwrap(), expected);
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), "this");
        assert!(tokenizer.decode(&expected, true).unwrap().ends_with("this</s>"));
    }
}

/// Trips if the size counts tokens instead of the highest id, or an id without a token is an error.
#[test]
fn vocabulary() {
    let mut file = byte_level();
    file["added_tokens"].as_array_mut().unwrap().push(special(261, "<|end|>"));
    let tokenizer = open(file);
    assert_eq!(tokenizer.vocab_size(), 262);
    assert_eq!(tokenizer.token_id("<|end|>"), Some(261));
    assert_eq!(tokenizer.token_id("nothing"), None);
    assert_eq!(tokenizer.decode(&[9999], true).unwrap(), "");
    assert!(!tokenizer.has_chat_template());
    let none = tokenizer.chat(&[], true).unwrap_err();
    assert!(matches!(none, TextError::NoChatTemplate { .. }) && none.hint().is_some());
}

/// Trips if a folder with another tokenizer is called empty, or a broken file goes unnamed.
#[test]
fn refusals() {
    for (name, expected) in
        [("tokenizer.model", "`tokenizer.model`"), ("tekken.json", "`tekken.json`"), ("x.tiktoken", "`*.tiktoken`")]
    {
        let error = Tokenizer::open(folder(&[(name, json!("x"))]).path()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().unwrap().contains("save_pretrained"));
    }
    let error = Tokenizer::open(folder(&[]).path()).unwrap_err();
    assert!(error.to_string().ends_with("has no `tokenizer.json`") && error.hint().unwrap().contains("config.json"));
    let error = Tokenizer::open(folder(&[("tokenizer.json", json!("version https://git-lfs"))]).path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json") && error.hint().unwrap().contains("LFS"));
    let bad = folder(&[("tokenizer.json", byte_level()), ("tokenizer_config.json", json!({"eos_token": 3}))]);
    let error = Tokenizer::open(bad.path()).unwrap_err().to_string();
    assert!(error.contains("`eos_token`") && error.contains("is 3, expected"), "{error}");
}

fn conversation() -> Vec<Message> {
    serde_json::from_slice(&fs::read(Path::new(FIXTURES).join("conversation.json")).unwrap()).unwrap()
}

fn chatty(template: &str) -> TempDir {
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}});
    folder(&[("tokenizer.json", byte_level()), ("tokenizer_config.json", config), ("chat_template.jinja", json!(template))])
}

/// The `.txt` files are what transformers 5.24 rendered from the `.jinja` files. Trips if blocks are not trimmed, JSON is
/// spaced or ordered otherwise, a Python method is missing, or the tokens are not passed.
#[test]
fn templates_render_as_transformers_renders_them() {
    for name in ["chatml", "inst", "headers", "bars", "namespace"] {
        let dir = chatty(&fs::read_to_string(Path::new(FIXTURES).join(format!("{name}.jinja"))).unwrap());
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        for (add_generation_prompt, kind) in [(true, "prompt"), (false, "whole")] {
            let expected = fs::read_to_string(Path::new(FIXTURES).join(format!("{name}.{kind}.txt"))).unwrap();
            assert_eq!(tokenizer.chat(&conversation(), add_generation_prompt).unwrap(), expected, "{name}.{kind}");
        }
    }
}

/// Trips if a template's own refusal is swallowed or wrapped beyond recognition.
#[test]
fn templates_refuse() {
    let dir = chatty(&fs::read_to_string(Path::new(FIXTURES).join("inst.jinja")).unwrap());
    let error = Tokenizer::open(dir.path()).unwrap().chat(&conversation()[2..], true).unwrap_err();
    assert!(error.to_string().contains("turns must alternate"), "{error}");
    let error = Tokenizer::open(chatty("\n{% for %}").path()).unwrap().chat(&conversation(), true).unwrap_err();
    assert!(error.to_string().contains("line 2"), "{error}");
}

/// Trips if the order of the three places changes, or another template than `default` is taken from a list.
#[test]
fn templates_are_found() {
    let list = json!({"chat_template": [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "config"}]});
    let files = [
        ("tokenizer.json", byte_level()),
        ("tokenizer_config.json", list),
        ("chat_template.json", json!({"chat_template": "json"})),
        ("chat_template.jinja", json!("jinja")),
    ];
    for (n, expected) in [(2, "config"), (3, "json"), (4, "jinja")] {
        assert_eq!(Tokenizer::open(folder(&files[..n]).path()).unwrap().chat(&[], true).unwrap(), expected);
    }
    let now = Tokenizer::open(chatty("{{ strftime_now('%Y') }}").path()).unwrap().chat(&[], true).unwrap();
    assert!(now.len() == 4 && now.as_str() >= "2024");
}

/// Trips if a list of end tokens is cut, a fallback is skipped, or it overrides what the first file said.
#[test]
fn generation_defaults() {
    let own = json!({"eos_token_id": [7, 9], "do_sample": true, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1});
    let config =
        GenerationConfig::open(folder(&[("generation_config.json", own), ("config.json", json!({"eos_token_id": 1}))]).path());
    let expected = GenerationConfig {
        eos: vec![7, 9],
        do_sample: Some(true),
        temperature: Some(0.7),
        top_k: None,
        top_p: Some(0.9),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
    };
    assert_eq!(config.unwrap(), expected);

    let eos = |files: &[(&str, Value)]| GenerationConfig::open(folder(files).path()).map(|c| c.eos);
    assert_eq!(
        eos(&[("generation_config.json", json!({"eos_token_id": null})), ("config.json", json!({"eos_token_id": 1}))]).unwrap(),
        [1]
    );
    assert_eq!(eos(&[("config.json", json!({"text_config": {"eos_token_id": [2, 3]}}))]).unwrap(), [2, 3]);
    let error = eos(&[("config.json", json!({"eos_token_id": -1}))]).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("is -1"), "{error}");

    let dir = folder(&[("tokenizer.json", byte_level()), ("tokenizer_config.json", json!({"eos_token": "</s>"}))]);
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    assert_eq!(GenerationConfig::open(dir.path()).unwrap().or_tokenizer_eos(&tokenizer).eos, [1]);
    let one = GenerationConfig { eos: vec![5], ..GenerationConfig::default() };
    assert_eq!(one.or_tokenizer_eos(&tokenizer).eos, [5]);
}
