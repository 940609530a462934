//! What each target does with hostile bytes. A target ends with an answer or an error; a panic, an allocation out of
//! proportion to the input, or a path outside the model folder is a finding.

use moe::artifact::hot::{self, HotExperts};
use moe::artifact::inventory::Inventory;
use moe::artifact::manifest::{self, Manifest};
use moe::artifact::plan::{self, Choice};
use moe::checkpoint::Checkpoint;
use moe::model::{family, names};
use moe::profile::precision::{Profile, decide};
use moe::text::{GenerationConfig, Message, Tokenizer};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts what is allocated and not yet freed, and the highest such count.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only counters are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work` and holds its memory to `base` bytes and `factor` bytes for each byte of the input.
fn bounded<T>(len: usize, base: usize, factor: usize, work: impl FnOnce() -> T) -> T {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let used = PEAK.load(Relaxed).saturating_sub(before);
    assert!(used <= base + factor * len, "{used} bytes were allocated for an input of {len}");
    result
}

/// Fixed costs of opening a directory: messages, paths, buffers of threads.
const BASE: usize = 512 << 10;
/// A JSON value takes up to 72 bytes for two of text; an error message repeats a part of the text.
const FACTOR: usize = 256;

thread_local! {
    static FOLDER: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

/// A folder of this thread, prepared once by `prepare`.
fn folder<T>(prepare: impl FnOnce(&Path), work: impl FnOnce(&Path) -> T) -> T {
    FOLDER.with_borrow_mut(|slot| {
        let dir = slot.get_or_insert_with(|| {
            let memory = Path::new("/dev/shm");
            let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
            fs::create_dir(dir.path().join("model")).unwrap();
            prepare(&dir.path().join("model"));
            dir
        });
        work(&dir.path().join("model"))
    })
}

/// Opens the folder as a checkpoint and looks at every tensor.
fn open_checkpoint(dir: &Path, len: usize) {
    bounded(len, BASE, FACTOR, || {
        let Ok(checkpoint) = Checkpoint::open(dir) else { return };
        for shard in checkpoint.shards() {
            assert_eq!(shard.path.parent(), Some(dir), "a shard outside the folder");
        }
        let all: Vec<String> = checkpoint.names().map(String::from).collect();
        for name in &all {
            let view = checkpoint.tensor(name).unwrap();
            assert_eq!(view.bytes.len() * 8, view.len() * view.dtype.bits(), "{name}");
            std::hint::black_box(view.bytes.iter().fold(0u8, |a, b| a ^ b));
            checkpoint.will_need(name);
            checkpoint.release(name);
        }
    });
}

/// A whole safetensors file of a family that no row describes, with a layout of fused experts: what its structure tells, and the sizes under
/// every profile.
pub fn inventory(data: &[u8]) {
    folder(
        |dir| fs::write(dir.join("config.json"), r#"{"model_type":"gpt_oss","hidden_size":64,"num_local_experts":2}"#).unwrap(),
        |dir| {
            fs::write(dir.join("model.safetensors"), data).unwrap();
            bounded(data.len(), 4 << 20, 16 * FACTOR, || {
                let Ok(inventory) = Inventory::open(dir) else { return };
                let decisions = decide(inventory.tensors(), inventory.outline().tied, &[], &Profile::built_in("mixed").unwrap());
                let choose = |id| Choice { format: decisions.format(id), reason: None };
                let Ok(plan) = plan::plan(&inventory, choose, 1 << 20) else { return };
                let checkpoint = inventory.checkpoint();
                let bytes: usize = checkpoint.names().map(|n| checkpoint.entry(n).unwrap().range.len()).sum();
                assert_eq!(plan.totals.source_bytes, bytes as u64, "a tensor is not accounted for");
                for (id, shape) in inventory.tensors() {
                    let weight = inventory.get(*id).unwrap();
                    assert_eq!(weight.rows * weight.cols, shape.iter().product::<usize>());
                    drop(weight.to_f32());
                }
            });
        },
    );
}

/// A whole safetensors file.
pub fn safetensors_header(data: &[u8]) {
    folder(
        |dir| fs::write(dir.join("config.json"), "{}").unwrap(),
        |dir| {
            fs::write(dir.join("model.safetensors"), data).unwrap();
            open_checkpoint(dir, data.len());
        },
    );
}

/// `model.safetensors.index.json` beside a sound file, with a file of that name outside the folder.
pub fn index(data: &[u8]) {
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let sound = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    folder(
        |dir| {
            fs::write(dir.join("config.json"), "{}").unwrap();
            fs::write(dir.join("a.safetensors"), &sound).unwrap();
            fs::write(dir.join("../a.safetensors"), &sound).unwrap();
            fs::create_dir(dir.join("sub")).unwrap();
            fs::write(dir.join("sub/a.safetensors"), &sound).unwrap();
        },
        |dir| {
            fs::write(dir.join("model.safetensors.index.json"), data).unwrap();
            open_checkpoint(dir, data.len() + sound.len());
        },
    );
}

/// `config.json`: reading it, and deciding formats for the tensors it implies. These may be many, for few bytes.
pub fn config(data: &[u8]) {
    let Ok(value) = bounded(data.len(), BASE, FACTOR, || serde_json::from_slice(data)) else { return };
    let Ok((family, spec)) = bounded(data.len(), 1 << 30, FACTOR, || family::read(&value)) else { return };
    let experts: usize = spec.layers.iter().map(|l| format!("{:?}", l.ffn).len()).sum();
    if spec.layers.len() > 64 || experts > 1 << 16 {
        return;
    }
    let tensors = names::tensors(&spec);
    if tensors.len() > 4096 {
        return;
    }
    for (id, shape) in &tensors {
        assert!(shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_some());
        std::hint::black_box(family.names.tensor(*id));
    }
    decide(&tensors, spec.tied, &[], &Profile::built_in("mixed").unwrap());
}

/// `tokenizer_config.json`, which also serves as `generation_config.json`, beside a sound tokenizer; its chat template is rendered.
pub fn tokenizer_config(data: &[u8]) {
    let tokenizer = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":0,"content":"<s>","single_word":false,
        "lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
        "decoder":null,"model":{"type":"WordLevel","vocab":{"<s>":0,"a":1},"unk_token":"<s>"}}"#;
    folder(
        |dir| fs::write(dir.join("tokenizer.json"), tokenizer).unwrap(),
        |dir| {
            fs::write(dir.join("tokenizer_config.json"), data).unwrap();
            fs::write(dir.join("generation_config.json"), data).unwrap();
            bounded(data.len(), 64 << 20, 1 << 10, || {
                drop(GenerationConfig::open(dir));
                let Ok(tokenizer) = Tokenizer::open(dir) else { return };
                let message = |role: &str| Message { role: role.into(), content: "a <b> \u{e9}".into() };
                drop(tokenizer.chat(&[message("system"), message("user")], true));
                drop(tokenizer.encode("a <s>", moe::text::AddSpecial::Yes));
            });
        },
    );
}

/// `moe.json`.
pub fn manifest(data: &[u8]) {
    folder(
        |_| (),
        |dir| {
            fs::write(dir.join(manifest::FILE), data).unwrap();
            let read = bounded(data.len(), BASE, FACTOR, || Manifest::read(dir));
            if let Ok(Some(found)) = read {
                let again: Manifest = serde_json::from_slice(&found.to_bytes().unwrap()).unwrap();
                assert_eq!(again.tensors, found.tensors);
            }
        },
    );
}

/// A precision profile.
pub fn profile(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(profile) = bounded(data.len(), BASE, 2 * FACTOR, || Profile::parse("fuzz", text)) else { return };
    for rule in &profile.rules {
        for id in ["layers.3.attn.q", "layers.12.experts.17.down", "embed"] {
            std::hint::black_box(rule.pattern.matches(id));
        }
    }
}

/// `hot_experts.json`.
pub fn hot_experts(data: &[u8]) {
    folder(
        |_| (),
        |dir| {
            let path = dir.join(hot::FILE);
            fs::write(&path, data).unwrap();
            drop(bounded(data.len(), BASE, FACTOR, || HotExperts::read(&path)));
        },
    );
}
