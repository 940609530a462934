//! What `Checkpoint` accepts and refuses, from files on disk.
//!
//! Belongs here: hostile or damaged headers, indices and directories, the message each gets, and what is opened all the same
//! (links, odd names, read-only files). What tensors mean is tested elsewhere. Each test says which mutation of the reader
//! trips it.

mod common;

use std::fs;
use std::path::Path;
use std::time::Instant;

use common::{TestCheckpoint, safetensors_bytes, shard_name, with_header};
use moe::checkpoint::{Checkpoint, CheckpointError, fp8};
use moe::tensor::{Dtype, TensorView, e4m3_to_f32};
use proptest::prelude::*;
use serde_json::json;

/// The variant's name, without its fields.
fn variant(error: &CheckpointError) -> String {
    format!("{error:?}").split([' ', '{', '(']).next().unwrap().to_owned()
}

#[track_caller]
fn refused(dir: &Path, expected: &str, mentions: &[&str]) {
    let error = Checkpoint::open(dir).expect_err(expected);
    let message = error.to_string();
    assert_eq!(variant(&error), expected, "{message}");
    for word in mentions {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
    assert!(!message.starts_with(char::is_uppercase), "{message}");
    assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "no hint: {message}");
}

/// Every row is one way to be wrong; dropping the check behind a variant makes its row open, or fail under another name.
#[test]
fn damaged_weight_files_are_refused_by_name() {
    let entry = |shape: &str, begin: u64, end: u64| format!(r#"{{"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]}}"#);
    let one = |name: &str, entry: &str| format!(r#"{{"{name}":{entry}}}"#);
    let two = |a: &str, b: &str| format!(r#"{{"t.a":{a},"t.b":{b}}}"#);
    let max = u64::MAX;
    let full = with_header(one("t.a", &entry("[4]", 0, 4)), &[0; 4]);
    let mut invalid_utf8 = full.clone();
    invalid_utf8[11] = 0xff;
    let rank = format!("[{}]", vec!["1"; 65].join(","));
    let twice_metadata = r#"{"__metadata__":{},"__metadata__":{}}"#;
    #[rustfmt::skip]
    let rows: Vec<(&str, Vec<u8>, &str, &str)> = vec![
        ("empty file", vec![], "NoHeader", "0 bytes"),
        ("seven bytes", vec![0; 7], "NoHeader", "7 bytes"),
        ("git-lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(), "LfsPointer", ""),
        ("header over the limit", [100_000_001u64.to_le_bytes().to_vec(), vec![b' '; 9]].concat(), "HeaderTooLong", "100000001"),
        ("header of all ones", vec![0xff; 64], "HeaderTooLong", "18446744073709551615"),
        ("header past the end", [3u64.to_le_bytes().to_vec(), b"{}".to_vec()].concat(), "HeaderPastEnd", "3"),
        ("not UTF-8", invalid_utf8, "HeaderNotUtf8", "byte 11"),
        ("no header at all", with_header("", &[]), "HeaderNotJson", ""),
        ("leading space", with_header(" {}", &[]), "HeaderNotJson", "start"),
        ("a list", with_header("[]", &[]), "HeaderNotJson", ""),
        ("cut JSON", with_header(r#"{"t.a":{"dtype":"U8""#, &[]), "HeaderNotJson", ""),
        ("text after the object", with_header("{} {}", &[]), "HeaderNotJson", ""),
        ("deep nesting", with_header(format!(r#"{{"t.a":{}"#, "[".repeat(100_000)), &[]), "MalformedEntry", "t.a"),
        ("metadata not text", with_header(r#"{"__metadata__":{"n":1}}"#, &[]), "MalformedEntry", "__metadata__"),
        ("metadata twice", with_header(twice_metadata, &[]), "MalformedEntry", "__metadata__"),
        ("same key twice", with_header(format!(r#"{{"t.a":{0},"t.a":{0}}}"#, entry("[4]", 0, 4)), &[0; 4]), "DuplicateKey", "t.a"),
        ("same key twice, once escaped", with_header(format!(r#"{{"t.a":{0},"\u0074.a":{0}}}"#, entry("[0]", 0, 0)), &[]), "DuplicateKey", "t.a"),
        ("entry null", with_header(one("t.a", "null"), &[]), "MalformedEntry", "t.a"),
        ("no dtype", with_header(one("t.a", r#"{"shape":[],"data_offsets":[0,1]}"#), &[0]), "MalformedEntry", "dtype"),
        ("no shape", with_header(one("t.a", r#"{"dtype":"U8","data_offsets":[0,1]}"#), &[0]), "MalformedEntry", "shape"),
        ("no offsets", with_header(one("t.a", r#"{"dtype":"U8","shape":[1]}"#), &[0]), "MalformedEntry", "data_offsets"),
        ("dtype twice", with_header(one("t.a", r#"{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}"#), &[0]), "MalformedEntry", "t.a"),
        ("negative dimension", with_header(one("t.a", &entry("[-1]", 0, 1)), &[0]), "MalformedEntry", "-1"),
        ("fractional dimension", with_header(one("t.a", &entry("[1.5]", 0, 1)), &[0]), "MalformedEntry", "1.5"),
        ("dimension over 64 bits", with_header(one("t.a", &entry("[18446744073709551616]", 0, 1)), &[0]), "MalformedEntry", "t.a"),
        ("65 dimensions", with_header(one("t.a", &entry(&rank, 0, 1)), &[0]), "MalformedEntry", "64"),
        ("three offsets", with_header(one("t.a", r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}"#), &[0]), "MalformedEntry", "t.a"),
        ("one offset", with_header(one("t.a", r#"{"dtype":"U8","shape":[1],"data_offsets":[0]}"#), &[0]), "MalformedEntry", "t.a"),
        ("unknown dtype", with_header(one("t.a", r#"{"dtype":"F7","shape":[1],"data_offsets":[0,1]}"#), &[0]), "UnknownDtype", "`F7`"),
        ("begin after end", with_header(one("t.a", &entry("[1]", 1, 0)), &[0]), "OffsetsReversed", "t.a"),
        ("one byte short of its shape", with_header(one("t.a", &entry("[5]", 0, 4)), &[0; 4]), "SizeMismatch", "expected 5 bytes, found 4"),
        ("scalar of no bytes", with_header(one("t.a", &entry("[]", 0, 0)), &[]), "SizeMismatch", "t.a"),
        ("empty tensor with bytes", with_header(one("t.a", &entry("[0]", 0, 4)), &[0; 4]), "SizeMismatch", "t.a"),
        ("product overflows", with_header(one("t.a", &entry(&format!("[{max},2]"), 0, 4)), &[0; 4]), "ShapeOverflow", "t.a"),
        ("bits overflow", with_header(one("t.a", &entry(&format!("[{}]", 1u64 << 61), 0, 4)), &[0; 4]), "ShapeOverflow", "t.a"),
        ("half a byte", with_header(one("t.a", r#"{"dtype":"F4","shape":[3],"data_offsets":[0,2]}"#), &[0; 2]), "PartialByte", "F4 [3]"),
        ("file one byte short", full[..full.len() - 1].to_vec(), "Truncated", "t.a"),
        ("ends at the last offset there is", with_header(one("t.a", &entry("[0]", max, max)), &[]), "Truncated", "t.a"),
        ("one byte too many", [full.clone(), vec![0]].concat(), "TrailingBytes", ""),
        ("data without tensors", with_header("{}", &[0]), "TrailingBytes", ""),
        ("shared bytes", with_header(two(&entry("[4]", 0, 4), &entry("[4]", 0, 4)), &[0; 4]), "Overlap", "t.a"),
        ("one byte shared", with_header(two(&entry("[4]", 0, 4), &entry("[4]", 3, 7)), &[0; 7]), "Overlap", "t.b"),
        ("empty tensor inside another", with_header(two(&entry("[4]", 0, 4), &entry("[0]", 2, 2)), &[0; 4]), "Overlap", "t.b"),
        ("hole between", with_header(two(&entry("[4]", 0, 4), &entry("[4]", 5, 9)), &[0; 9]), "Hole", "t.b"),
        ("hole in front", with_header(one("t.a", &entry("[4]", 1, 5)), &[0; 5]), "Hole", "t.a"),
    ];
    for (what, bytes, expected, mention) in rows {
        println!("{what}");
        let built = TestCheckpoint::new().file("model.safetensors", bytes).build();
        refused(built.path(), expected, &["`", "model.safetensors", mention]);
    }
}

/// Every row is one way for a directory to be wrong as a whole.
#[test]
fn damaged_directories_are_refused_by_name() {
    let base = || TestCheckpoint::new().f32("t.a", &[1], &[1.0]).f32("t.b", &[1], &[2.0]).shards(2);
    let (first, second) = (shard_name(0, 2), shard_name(1, 2));
    let index = |a: &str, b: &str| json!({"weight_map": {"t.a": a, "t.b": b}});
    let extra = base().f32("t.c", &[1], &[3.0]);
    let one = safetensors_bytes(base().shards(1).tensors());
    let without = |checkpoint: TestCheckpoint, name: &str| {
        let built = checkpoint.build();
        fs::remove_file(built.path().join(name)).unwrap();
        built
    };
    let bare = |names: &[&str]| {
        let built = without(TestCheckpoint::new(), "model.safetensors");
        names.iter().for_each(|name| fs::write(built.path().join(name), "x").unwrap());
        built
    };
    const INDEX: &str = "model.safetensors.index.json";
    #[rustfmt::skip]
    let rows = vec![
        ("no config", without(base(), "config.json"), "NoConfig", vec!["config.json"]),
        ("config not JSON", base().file("config.json", "{,}").build(), "ConfigNotJson", vec!["config.json"]),
        ("config a list", base().file("config.json", "[]").build(), "ConfigNotObject", vec!["config.json", "a list"]),
        ("no weights", bare(&["README.md"]), "NoWeights", vec!["model.safetensors"]),
        ("only .bin", bare(&["pytorch_model.bin"]), "OnlyPytorch", vec!["pytorch_model.bin"]),
        ("only .pth", bare(&["consolidated.00.pth"]), "OnlyPytorch", vec!["consolidated.00.pth"]),
        ("only GGUF", bare(&["x.gguf"]), "OnlyGguf", vec!["x.gguf"]),
        ("GGUF and no config", { let b = bare(&["x.gguf"]); fs::remove_file(b.path().join("config.json")).unwrap(); b }, "OnlyGguf", vec!["x.gguf"]),
        ("index not JSON", base().file(INDEX, "{").build(), "IndexNotJson", vec![INDEX]),
        ("index a list", base().file(INDEX, "[]").build(), "IndexNotJson", vec![INDEX]),
        ("no weight_map", base().index(json!({"metadata": {}})).build(), "NoWeightMap", vec![INDEX]),
        ("empty weight_map", base().index(json!({"weight_map": {}})).build(), "NoWeightMap", vec![INDEX]),
        ("weight_map of numbers", base().index(json!({"weight_map": {"t.a": 1}})).build(), "MalformedEntry", vec![INDEX, "t.a"]),
        ("tensor twice in the index", base().file(INDEX, format!(r#"{{"weight_map":{{"t.a":"{first}","t.a":"{second}"}}}}"#)).build(), "DuplicateKey", vec![INDEX, "t.a"]),
        ("shard above", base().index(index("../x.safetensors", &second)).build(), "ShardNameRefused", vec!["t.a", "../x.safetensors"]),
        ("shard at the root", base().index(index("/x.safetensors", &second)).build(), "ShardNameRefused", vec!["t.a"]),
        ("shard below", base().index(index("a/x.safetensors", &second)).build(), "ShardNameRefused", vec!["t.a"]),
        ("shard below, the other way", base().index(index("a\\x.safetensors", &second)).build(), "ShardNameRefused", vec!["t.a"]),
        ("shard on a drive", base().index(index("c:x.safetensors", &second)).build(), "ShardNameRefused", vec!["t.a"]),
        ("shard of no name", base().index(index("", &second)).build(), "ShardNameRefused", vec!["t.a"]),
        ("shard of another kind", base().index(index("x.bin", &second)).build(), "ShardNameRefused", vec!["t.a", "x.bin"]),
        ("missing shard", without(base(), &second), "MissingShards", vec!["missing shard: 1 of the 2", second.as_str()]),
        ("missing shard, no index", without(base().without_index(), &second), "MissingShards", vec!["missing shard: 1 of the 2", second.as_str()]),
        ("all shards missing", { let b = without(base(), &second); fs::remove_file(b.path().join(&first)).unwrap(); b }, "MissingShards", vec!["2 of the 2", first.as_str(), second.as_str()]),
        ("shard lacks a tensor", base().index(index(&second, &second)).file(&first, with_header("{}", &[])).build(), "ShardLacksTensor", vec!["t.a", second.as_str()]),
        ("index swapped", base().index(index(&second, &first)).build(), "ShardLacksTensor", vec!["t.a", second.as_str(), first.as_str(), "1 more"]),
        ("index names too much", base().index(json!({"weight_map": {"t.a": first, "t.b": second, "t.z": second}})).build(), "ShardLacksTensor", vec!["t.z", second.as_str()]),
        ("stray tensor", extra.index(index(&first, &second)).build(), "StrayTensor", vec!["t.c", second.as_str()]),
        ("stray file", base().file("adapter_model.safetensors", one.clone()).build(), "StrayFile", vec!["adapter_model.safetensors"]),
        ("stray file, one model", base().shards(1).file("consolidated.safetensors", one.clone()).build(), "StrayFile", vec!["consolidated.safetensors"]),
        ("stray file, no index", base().without_index().file("extra.safetensors", one.clone()).build(), "StrayFile", vec!["extra.safetensors"]),
        ("two of unknown kinship", { let b = bare(&[]); for n in ["a", "b"] { fs::write(b.path().join(n).with_extension("safetensors"), &one).unwrap(); } b }, "NoIndex", vec!["a.safetensors", "b.safetensors"]),
        ("two sets", base().without_index().file("other-00001-of-00001.safetensors", one.clone()).build(), "NoIndex", vec!["other-"]),
        ("numbered from zero", base().without_index().file("model-00000-of-00002.safetensors", one.clone()).build(), "NoIndex", vec!["model-00000"]),
        ("tensor in two shards", base().without_index().file(&second, one.clone()).build(), "TensorInTwoShards", vec!["t.a", first.as_str(), second.as_str()]),
    ];
    for (what, built, expected, mentions) in rows {
        println!("{what}");
        refused(built.path(), expected, &mentions);
    }
    let built = base().build();
    refused(&built.root().join("nowhere"), "DirMissing", &["nowhere"]);
    refused(&built.path().join(first), "NotADirectory", &["model-00001"]);
}

/// Trips when missing shards are reported one at a time: a user must learn all of them from one run.
#[test]
fn missing_shards_are_listed_together() {
    let built = (0..40).fold(TestCheckpoint::new(), |c, i| c.f32(&format!("t.{i}"), &[1], &[0.0])).shards(40).build();
    (30..33).for_each(|i| fs::remove_file(built.path().join(shard_name(i, 40))).unwrap());
    refused(built.path(), "MissingShards", &["3 of the 40", "00031", "00032", "00033"]);
    (0..20).for_each(|i| fs::remove_file(built.path().join(shard_name(i, 40))).unwrap());
    refused(built.path(), "MissingShards", &["23 of the 40", "and 15 more"]);
}

/// Trips when a type is left out of the table, or given other bits: its tensor would be refused.
#[test]
fn every_dtype_of_the_format_is_read() {
    let dtypes = [
        ("F32", 32),
        ("F16", 16),
        ("BF16", 16),
        ("F64", 64),
        ("C64", 64),
        ("F8_E4M3", 8),
        ("F8_E5M2", 8),
        ("F8_E8M0", 8),
        ("F8_E4M3FNUZ", 8),
        ("F8_E5M2FNUZ", 8),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("F4", 4),
        ("BOOL", 8),
        ("U8", 8),
        ("I8", 8),
        ("U16", 16),
        ("I16", 16),
        ("U32", 32),
        ("I32", 32),
        ("U64", 64),
        ("I64", 64),
    ];
    let checkpoint = dtypes.iter().fold(TestCheckpoint::new(), |c, (name, bits)| c.raw(name, name, &[4, 2], vec![0; *bits]));
    let built = checkpoint.build();
    let opened = Checkpoint::open(built.path()).unwrap();
    assert_eq!(opened.len(), dtypes.len());
    for (name, bits) in dtypes {
        let dtype = opened.entry(name).unwrap().dtype;
        assert_eq!((dtype.name(), dtype.bits()), (name, bits));
    }
}

/// Trips when a range is counted from the data and not from the file, or when empty tensors and scalars are refused.
#[test]
fn tensors_are_views_of_the_file() {
    let checkpoint = TestCheckpoint::new()
        .f32("z", &[2, 2], &[1.0, 2.0, 3.0, 4.0])
        .raw("empty", "BF16", &[0, 7], vec![])
        .f32("scalar", &[], &[5.0])
        .random("r", Dtype::BF16, &[3, 5], 1);
    let built = checkpoint.shards(2).build();
    let opened = Checkpoint::open(built.path()).unwrap();
    assert_eq!(opened.names().collect::<Vec<_>>(), ["empty", "r", "scalar", "z"]);
    assert_eq!(opened.tensor("z").unwrap().to_f32().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(opened.tensor("scalar").unwrap().to_f32().unwrap(), [5.0]);
    assert_eq!(opened.tensor("empty").unwrap().shape, [0, 7]);
    assert!(opened.tensor("absent").is_none());
    let entry = opened.entry("z").unwrap();
    let file = fs::read(&opened.shards()[entry.shard].path).unwrap();
    assert_eq!(opened.shards()[entry.shard].bytes, file.len() as u64);
    assert_eq!(&file[entry.range.clone()], opened.tensor("z").unwrap().bytes);
    assert_eq!(opened.config()["model_type"], "test");
    assert_eq!(opened.config_bytes(), fs::read(built.path().join("config.json")).unwrap());
}

/// Trips when `release` drops pages that do not come back, or reaches beyond the tensor.
#[test]
fn released_tensors_read_the_same_again() {
    let shape = [300, 1000];
    let names = ["a", "b", "c"];
    let checkpoint = names
        .iter()
        .zip(0..)
        .fold(TestCheckpoint::new().raw("odd", "U8", &[3], vec![7; 3]), |c, (n, seed)| c.random(n, Dtype::F32, &shape, seed));
    let built = checkpoint.build();
    let opened = Checkpoint::open(built.path()).unwrap();
    for _ in 0..2 {
        for (name, seed) in names.iter().zip(0..) {
            opened.will_need(name);
            assert_eq!(opened.tensor(name).unwrap().to_f32().unwrap(), common::random_values(300_000, seed));
            opened.release(name);
        }
    }
    opened.release("odd");
    opened.release("absent");
    assert_eq!(opened.tensor("odd").unwrap().bytes, [7; 3]);
}

/// Trips when opening touches data, when `release` does nothing, or when it drops less than all but the edges.
#[cfg(target_os = "linux")]
#[test]
fn only_what_is_looked_at_is_resident() {
    let built = TestCheckpoint::new().raw("a", "U8", &[16 << 20], vec![1; 16 << 20]).build();
    let opened = Checkpoint::open(built.path()).unwrap();
    let path = fs::canonicalize(&opened.shards()[0].path).unwrap();
    let resident_kib = || -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let lines = smaps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = lines.filter_map(|line| line.strip_prefix("Rss:")).next().unwrap();
        rss.trim_end_matches("kB").trim().parse().unwrap()
    };
    assert_eq!(resident_kib(), 0);
    let sum: u64 = opened.tensor("a").unwrap().bytes.iter().map(|&b| b as u64).sum();
    assert_eq!(sum, 16 << 20);
    assert!(resident_kib() > 15 << 10);
    opened.release("a");
    assert!(resident_kib() <= 2 * 64, "{} KiB left", resident_kib());
}

/// Trips when weights in another format, or what the artifact writes itself, would be copied; or a tokenizer would not.
#[test]
fn side_files_are_all_but_weights() {
    let wanted = [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "modeling_x.py",
        "tokenizer.json",
        "tokenizer.model",
    ];
    let unwanted = [
        "moe.json",
        "hot_experts.json",
        "pytorch_model.bin",
        "x.GGUF",
        "a.pt",
        "a.pth",
        "pytorch_model.bin.index.json",
        ".gitattributes",
    ];
    let checkpoint = TestCheckpoint::new().f32("t.a", &[1], &[0.0]).f32("t.b", &[1], &[0.0]).shards(2);
    let built = wanted.iter().chain(&unwanted).fold(checkpoint, |c, name| c.file(name, "x")).build();
    fs::create_dir(built.path().join("original")).unwrap();
    let opened = Checkpoint::open(built.path()).unwrap();
    let files = opened.side_files().unwrap();
    assert_eq!(files, wanted.map(|name| built.path().join(name)));
}

/// Trips when files are told apart by anything but the links' names, or when a hub folder is not looked through.
#[cfg(unix)]
#[test]
fn a_hub_cache_is_opened_through_its_links() {
    use std::os::unix::fs::symlink;
    let built = TestCheckpoint::new().f32("t.a", &[1], &[1.0]).f32("t.b", &[1], &[2.0]).shards(2).build();
    let hub = built.root().join("models--ä b--name");
    let snapshot = |revision: &str| {
        let dir = hub.join("snapshots").join(revision);
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(hub.join("blobs")).unwrap();
        for (i, entry) in fs::read_dir(built.path()).unwrap().enumerate() {
            let path = entry.unwrap().path();
            let blob = format!("{revision}{i}");
            fs::copy(&path, hub.join("blobs").join(&blob)).unwrap();
            symlink(Path::new("../../blobs").join(&blob), dir.join(path.file_name().unwrap())).unwrap();
        }
        dir
    };
    fs::create_dir_all(hub.join("snapshots")).unwrap();
    refused(&hub, "NoSingleSnapshot", &["0 snapshots"]);
    let first = snapshot("aaa");
    assert_eq!(Checkpoint::open(&hub).unwrap().dir(), first);
    assert_eq!(Checkpoint::open(&first).unwrap().tensor("t.b").unwrap().to_f32().unwrap(), [2.0]);
    let second = snapshot("bbb");
    refused(&hub, "NoSingleSnapshot", &["2 snapshots"]);
    fs::create_dir(hub.join("refs")).unwrap();
    fs::write(hub.join("refs/main"), "bbb\n").unwrap();
    assert_eq!(Checkpoint::open(&hub).unwrap().dir(), second);
    fs::write(hub.join("refs/main"), "../../model").unwrap();
    refused(&hub, "NoSingleSnapshot", &["2 snapshots"]);
    let shard = second.join(shard_name(1, 2));
    fs::remove_file(shard.canonicalize().unwrap()).unwrap();
    refused(&second, "MissingShards", &["00002"]);
}

/// Trips when opening needs write permission, an ASCII path, or exactly the usual file names.
#[test]
fn odd_but_sound_directories_open() {
    let built = TestCheckpoint::new().f32("t.a", &[1], &[1.0]).f32("t.b", &[1], &[2.0]).build();
    let single = fs::read(built.path().join("model.safetensors")).unwrap();
    for name in ["weights ö.safetensors", "model-00001-of-00001.safetensors"] {
        let dir = built.root().join("modèle avec 空白");
        TestCheckpoint::new().file(name, single.clone()).file("._model.safetensors", "x").write(&dir);
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let mut permissions = fs::metadata(&path).unwrap().permissions();
            permissions.set_readonly(true);
            fs::set_permissions(&path, permissions).unwrap();
        }
        assert_eq!(Checkpoint::open(&dir).unwrap().len(), 2, "{name}");
        fs::remove_dir_all(&dir).unwrap();
    }
    let unindexed = TestCheckpoint::new().f32("t.a", &[1], &[1.0]).f32("t.b", &[1], &[2.0]).shards(2).without_index().build();
    assert_eq!(Checkpoint::open(unindexed.path()).unwrap().len(), 2);
    let padded = with_header(r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":"x"}}        "#, &[9]);
    let padded = TestCheckpoint::new().file("model.safetensors", padded).build();
    assert_eq!(Checkpoint::open(padded.path()).unwrap().tensor("t").unwrap().bytes, [9]);
}

/// 1,000 shards of 20 tensors open within a second; about 0.05 s on two cores, hence a margin of twenty. Trips when data is
/// read, or when names are compared with each other pairwise.
#[test]
fn a_thousand_shards_open_within_a_second() {
    let mut checkpoint = TestCheckpoint::new().shards(1000);
    for i in 0..20_000 {
        checkpoint = checkpoint.raw(&format!("model.layers.{}.mlp.experts.{i}.w", i / 200), "U8", &[64], vec![0; 64]);
    }
    let built = checkpoint.build();
    let start = Instant::now();
    let opened = Checkpoint::open(built.path()).unwrap();
    let elapsed = start.elapsed();
    println!("opened in {elapsed:?}");
    assert_eq!((opened.shards().len(), opened.len()), (1000, 20_000));
    assert!(elapsed.as_secs_f64() < 1.0, "{elapsed:?}");
}

/// A weight whose every value differs from its neighbours', and its dequantization straight from the definition.
#[allow(clippy::type_complexity)]
fn fp8_case(r: usize, c: usize) -> (Vec<u8>, impl Fn(&dyn Fn(usize, usize) -> f32) -> Vec<f32>) {
    let codes: Vec<u8> = (0..r * c).map(|i| (i * 37 % 251) as u8).map(|b| if b & 0x7f == 0x7f { 1 } else { b }).collect();
    let copy = codes.clone();
    (codes, move |scale: &dyn Fn(usize, usize) -> f32| (0..r * c).map(|i| e4m3_to_f32(copy[i]) * scale(i / c, i % c)).collect())
}

/// Trips when rows and columns of the block are swapped, when ragged edges take a neighbour's scale, when a range of rows
/// starts counting at zero, or when any scale is off by 1 %.
#[test]
fn fp8_blocks_dequantize_by_the_definition() {
    for (r, c, bh, bw) in [(1, 1, 1, 1), (4, 6, 2, 3), (5, 7, 2, 3), (130, 129, 128, 128), (3, 300, 128, 128), (6, 4, 1, 4)] {
        let (codes, definition) = fp8_case(r, c);
        let weight = TensorView { dtype: Dtype::F8E4M3, shape: vec![r, c], bytes: &codes };
        let grid = [r.div_ceil(bh), c.div_ceil(bw)];
        let values: Vec<f32> = (0..grid[0] * grid[1]).map(|i| 0.25 + i as f32 / 8.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let scale = TensorView { dtype: Dtype::F32, shape: grid.to_vec(), bytes: &bytes };
        let expected = definition(&|row, col| values[row / bh * grid[1] + col / bw]);
        for rows in [0..r, r / 2..r, 0..r / 2, r..r] {
            let mut dst = vec![f32::NAN; rows.len() * c];
            fp8::dequantize_block(&mut dst, &weight, &scale, [bh, bw], rows.clone()).unwrap();
            assert_eq!(dst, expected[rows.start * c..rows.end * c], "[{r}, {c}] by [{bh}, {bw}], rows {rows:?}");
        }
    }
}

/// Trips when a scale of rows, of the whole matrix, or of powers of two is read as another kind.
#[test]
fn fp8_scales_come_in_four_forms() {
    let (r, c) = (5, 7);
    let (codes, definition) = fp8_case(r, c);
    let weight = TensorView { dtype: Dtype::F8E4M3, shape: vec![r, c], bytes: &codes };
    let run = |dtype, shape: &[usize], bytes: &[u8], block| {
        let mut dst = vec![f32::NAN; r * c];
        let scale = TensorView { dtype, shape: shape.to_vec(), bytes };
        fp8::dequantize_block(&mut dst, &weight, &scale, block, 0..r).map(|()| dst)
    };
    let per_row: Vec<u8> = (1..=r as u16).flat_map(|v| half::bf16::from_f32(v as f32).to_le_bytes()).collect();
    assert_eq!(run(Dtype::BF16, &[r, 1], &per_row, [128, 128]).unwrap(), definition(&|row, _| (row + 1) as f32));
    let half = half::f16::from_f32(1.5).to_le_bytes();
    assert_eq!(run(Dtype::F16, &[], &half, [2, 2]).unwrap(), definition(&|_, _| 1.5));
    assert_eq!(run(Dtype::F16, &[1], &half, [2, 2]).unwrap(), definition(&|_, _| 1.5));
    let powers: Vec<u8> = (0..3 * 2).map(|i| 124 + i).collect();
    let expected = definition(&|row, col| 2f32.powi((row / 2 * 2 + col / 4) as i32 - 3));
    assert_eq!(run(Dtype::F8E8M0, &[3, 2], &powers, [2, 4]).unwrap(), expected);

    for (dtype, shape, bytes, block) in [
        (Dtype::F8E8M0, &[2, 3][..], &powers[..], [2, 4]),
        (Dtype::F8E8M0, &[3, 2], &powers[..5], [2, 4]),
        (Dtype::F8E8M0, &[3, 2], &powers, [0, 4]),
        (Dtype::U8, &[3, 2], &powers, [2, 4]),
    ] {
        let error = run(dtype, shape, bytes, block).unwrap_err();
        assert!(matches!(error, CheckpointError::Dequantize { .. }), "{error}");
    }
}

fn tensors() -> impl Strategy<Value = Vec<(Vec<usize>, u8)>> {
    prop::collection::vec((prop::collection::vec(0usize..5, 0..4), any::<u8>()), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What the safetensors crate writes is read back bit for bit. Trips when a range is off by one byte anywhere.
    #[test]
    fn files_of_the_safetensors_crate_read_back_equal(tensors in tensors()) {
        use safetensors::{Dtype as D, tensor::TensorView as View};
        let dtypes = [(D::F32, "F32", 4), (D::BF16, "BF16", 2), (D::U8, "U8", 1), (D::I64, "I64", 8), (D::F8_E5M2, "F8_E5M2", 1)];
        let data: Vec<_> = tensors.iter().enumerate().map(|(i, (shape, seed))| {
            let (dtype, name, bytes) = dtypes[*seed as usize % dtypes.len()];
            let len = shape.iter().product::<usize>() * bytes;
            (format!("t.{i}"), dtype, name, shape, (0..len).map(|j| (j as u8).wrapping_mul(31) ^ seed).collect::<Vec<u8>>())
        }).collect();
        let views = data.iter().map(|(name, dtype, _, shape, bytes)| (name, View::new(*dtype, shape.to_vec(), bytes).unwrap()));
        let file = safetensors::serialize(views, None).unwrap();
        let built = TestCheckpoint::new().file("model.safetensors", file).build();
        let opened = Checkpoint::open(built.path()).unwrap();
        prop_assert_eq!(opened.len(), data.len());
        for (name, _, dtype, shape, bytes) in &data {
            let tensor = opened.tensor(name).unwrap();
            prop_assert_eq!(tensor.dtype.name(), *dtype);
            prop_assert_eq!(&tensor.shape, *shape);
            prop_assert_eq!(tensor.bytes, &bytes[..]);
        }
    }

    /// One changed byte of a file never panics, and never yields a tensor outside it. Trips on unchecked arithmetic.
    #[test]
    fn a_changed_byte_is_refused_or_harmless(at in 0usize..220, to in any::<u8>()) {
        let mut file = safetensors_bytes(TestCheckpoint::new().f32("t.a", &[2], &[1.0; 2]).f32("t.b", &[1], &[1.0]).tensors());
        let at = at % file.len();
        file[at] = to;
        let built = TestCheckpoint::new().file("model.safetensors", file).build();
        if let Ok(opened) = Checkpoint::open(built.path()) {
            let total: usize = opened.names().map(|name| opened.tensor(name).unwrap().bytes.len()).sum();
            prop_assert_eq!(total, 12);
        }
    }
}

/// Answers kept beside a model are no weights of it: told apart by the first component of their tensors' names. Trips when every
/// safetensors file beside the model's counts as stray, or none does.
#[test]
fn other_safetensors_files_may_lie_beside_a_model() {
    let mut other = TestCheckpoint::new().f32("logits", &[1], &[1.0]).f32("hidden.0", &[1], &[1.0]);
    let answers = safetensors_bytes(other.tensors());
    other = TestCheckpoint::new().f32("t.a", &[1], &[1.0]).f32("t.b", &[1], &[2.0]);
    for built in [
        other.file("reference.safetensors", answers.clone()).build(),
        TestCheckpoint::new()
            .f32("t.a", &[1], &[1.0])
            .f32("t.b", &[1], &[2.0])
            .shards(2)
            .file("reference.safetensors", answers)
            .build(),
    ] {
        assert_eq!(Checkpoint::open(built.path()).unwrap().names().collect::<Vec<_>>(), ["t.a", "t.b"]);
    }
}
