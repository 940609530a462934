//! The modules of every family as vLLM and SGLang name them, resolved by their published rules against the config that is written.
//!
//! vLLM (0.33, `find_matched_target`, `should_ignore_layer`): `ignore` first, for a fused layer all of its shards or none; then the name,
//! exactly or by `re:` from the start; a fused layer needs all shards matched and takes the first shard's scheme; a layer without a match
//! stays unquantized. Its expert layer asks for gate, up and down of expert 0 by the checkpoint's names, which must agree. SGLang (0.5.23) does the
//! same, but refuses a linear layer that neither matches nor is ignored, and asks for `gate_proj`, `up_proj`, `down_proj` whatever the checkpoint's
//! names are.

use moe::artifact::config::quantization_config;
use moe::artifact::weights::Weights;
use moe::ids::{Component, ExpertId, LayerId, Role, TensorId};
use moe::profile::precision::{Decisions, Profile, decide};
use moe::quant::format::{Format, Group, Zero};
use regex::Regex;
use serde_json::Value;
use std::path::Path;

const FAMILIES: [&str; 7] = ["deepseek_v2", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"];

/// Width of codes, columns of a scale (`None`: a row), and whether there are no zero points.
type Codes = (u64, Option<u64>, bool);
/// `None` for an unquantized layer.
type Scheme = Option<Codes>;

struct Reader {
    ignore: Vec<String>,
    groups: Vec<(Vec<String>, Codes)>,
    strict: bool,
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect()
}

fn hits(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix("re:") {
        Some(re) => Regex::new(&format!("^(?:{re})")).unwrap().is_match(name),
        None => pattern == name,
    }
}

impl Reader {
    fn new(config: &Value, strict: bool) -> Self {
        let group = |g: &Value| {
            let w = &g["weights"];
            let symmetric = w["symmetric"].as_bool().unwrap();
            (strings(&g["targets"]), (w["num_bits"].as_u64().unwrap(), w["group_size"].as_u64(), symmetric))
        };
        let groups = config["config_groups"].as_object().unwrap().values().map(group).collect();
        Self { ignore: strings(&config["ignore"]), groups, strict }
    }

    fn ignored(&self, name: &str) -> bool {
        self.ignore.iter().any(|p| hits(p, name))
    }

    fn target(&self, name: &str) -> Scheme {
        self.groups.iter().find(|(targets, _)| targets.iter().any(|p| hits(p, name))).map(|(_, scheme)| *scheme)
    }

    /// Scheme of a linear layer, which may be fused of several in the checkpoint (`shards`: their last names).
    fn linear(&self, prefix: &str, layer: &str, shards: &[&str]) -> Result<Scheme, String> {
        let name = format!("{prefix}.{layer}");
        let parts: Vec<String> = shards.iter().map(|s| format!("{prefix}.{s}")).collect();
        let ignored = parts.iter().filter(|p| self.ignored(p)).count();
        if ignored > 0 && ignored < parts.len() {
            return Err(format!("some but not all shards of `{name}` are ignored"));
        }
        if ignored > 0 || self.ignored(&name) {
            return Ok(None);
        }
        if let Some(scheme) = self.target(&name) {
            return Ok(Some(scheme));
        }
        let found: Vec<_> = parts.iter().filter_map(|p| self.target(p)).collect();
        if found.len() == parts.len() && !parts.is_empty() {
            return Ok(Some(found[0]));
        }
        if self.strict { Err(format!("unable to find a matching target for `{name}`")) } else { Ok(None) }
    }

    /// Scheme of a layer's experts, from those of expert 0's projections.
    fn experts(&self, block: &str, names: [&str; 3]) -> Result<Scheme, String> {
        let name = format!("{block}.experts");
        let module = |n: &str| format!("{name}.0.{n}");
        if self.ignored(&name) || names.iter().all(|n| self.ignored(&module(n))) {
            return Ok(None);
        }
        let found: Vec<Option<_>> = names.iter().map(|n| self.target(&module(n))).collect();
        if found.iter().any(|f| *f != found[0]) {
            return Err(format!("`{name}` has more than one scheme"));
        }
        if found[0].is_none() && self.strict { Err(format!("no scheme for `{name}`")) } else { Ok(found[0]) }
    }
}

/// Every built-in profile, and what `--asym` makes of it.
fn profiles() -> Vec<Profile> {
    let built_in = || Profile::names().into_iter().map(|name| Profile::built_in(name).unwrap());
    built_in().chain(built_in().map(Profile::with_zero_points)).collect()
}

fn expected(decided: &Decisions, id: TensorId) -> Scheme {
    match decided.format(id) {
        Format::Source => None,
        Format::Int { bits, group, zero } => Some((
            bits.count() as u64,
            match group {
                Group::Of(n) => Some(n as u64),
                Group::Channel => None,
            },
            zero == Zero::Middle,
        )),
    }
}

/// Every linear layer of every family under every profile gets the scheme in which its weights are written, from both engines, also where an
/// engine puts another prefix before the layers or calls the attention `attn`. Fails if a pattern is anchored at `^model`, a router or the
/// scalar gate of a shared expert is left unnamed, or one of q, k and v is ignored alone.
#[test]
fn both_engines_find_the_scheme_of_every_linear_layer() {
    let mut resolved = 0;
    for family in FAMILIES {
        let weights =
            Weights::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)).unwrap();
        let names = weights.family().names;
        for profile in profiles() {
            let decided = decide(weights.tensors(), weights.spec().tied, &[], &profile);
            let config = quantization_config(&names, weights.tensors(), |id| decided.format(id), &[]).value.unwrap();
            for (engine, strict) in [("vLLM", false), ("SGLang", true)] {
                let reader = Reader::new(&config, strict);
                let shown = |what: &str| format!("{engine}, {family}, {}: {what}", profile.name);
                for (id, shape) in weights.tensors().iter().filter(|(_, shape)| shape.len() == 2) {
                    let module = names.module(*id);
                    let (parent, child) = module.rsplit_once('.').unwrap_or(("", &module));
                    let (layer, shards): (&str, &[&str]) = match id.role {
                        Role::Q | Role::K | Role::V if weights.stored(TensorId { role: Role::K, ..*id }).is_some() => {
                            ("qkv_proj", &["q_proj", "k_proj", "v_proj"])
                        }
                        Role::QA | Role::KvA if weights.stored(TensorId { role: Role::QA, ..*id }).is_some() => {
                            ("fused_qkv_a_proj", &["q_a_proj", "kv_a_proj_with_mqa"])
                        }
                        Role::MlpGate | Role::MlpUp | Role::SharedGate | Role::SharedUp => {
                            ("gate_up_proj", &["gate_proj", "up_proj"])
                        }
                        Role::Embed | Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => continue,
                        // The router is `gate` in every model of vLLM, whatever the checkpoint says.
                        Role::Router => ("gate", &["gate"]),
                        _ => (child, &[]),
                    };
                    let shards = if shards.is_empty() { &[child][..] } else { shards };
                    let want = expected(&decided, *id);
                    if id.role == Role::Head {
                        let found = if reader.ignored("lm_head") { None } else { reader.target("lm_head") };
                        assert_eq!(found, want, "{}", shown("lm_head"));
                        continue;
                    }
                    let mut prefixes = vec![parent.to_string(), parent.replacen("model.", "language_model.model.", 1)];
                    if id.role.component() == Component::Attention {
                        prefixes.push(parent.replace(".self_attn", ".attn"));
                    }
                    for prefix in prefixes {
                        let found = reader.linear(&prefix, layer, shards).unwrap_or_else(|e| panic!("{}", shown(&e)));
                        assert_eq!(found, want, "{}", shown(&format!("{prefix}.{layer} {shape:?}")));
                        resolved += 1;
                    }
                }
                for layer in (0..weights.spec().layers.len() as u32).map(LayerId) {
                    let id = TensorId::expert(layer, ExpertId(0), Role::ExpertGate);
                    if weights.stored(id).is_none() {
                        continue;
                    }
                    let module = names.module(id);
                    let block = module.split(".experts.").next().unwrap();
                    let child =
                        |role| names.module(TensorId::expert(layer, ExpertId(0), role)).rsplit('.').next().unwrap().to_string();
                    let own = [child(Role::ExpertGate), child(Role::ExpertUp), child(Role::ExpertDown)];
                    let own = own.each_ref().map(String::as_str);
                    let asked = if strict { ["gate_proj", "up_proj", "down_proj"] } else { own };
                    let found = reader.experts(block, asked).unwrap_or_else(|e| panic!("{}", shown(&e)));
                    assert_eq!(found, expected(&decided, id), "{}", shown(block));
                    resolved += 1;
                }
            }
        }
    }
    assert!(resolved > 2000, "{resolved}");
}

/// SGLang takes packed experts only from a config whose format is `pack-quantized` at the top, and no reader takes keys that it does not know inside a scheme.
#[test]
fn the_form_is_the_one_all_readers_share() {
    for family in FAMILIES {
        let weights =
            Weights::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)).unwrap();
        for profile in profiles() {
            let decided = decide(weights.tensors(), weights.spec().tied, &[], &profile);
            let names = weights.family().names;
            let config = quantization_config(&names, weights.tensors(), |id| decided.format(id), &[]).value.unwrap();
            assert_eq!(config["format"], "pack-quantized");
            assert_eq!(config["quantization_status"], "compressed");
            assert!(config["kv_cache_scheme"].is_null());
            for (name, group) in config["config_groups"].as_object().unwrap() {
                let keys: Vec<&String> = group.as_object().unwrap().keys().collect();
                assert_eq!(keys, ["targets", "format", "weights"], "{name}");
                assert_eq!(group["format"], "pack-quantized");
                let w = &group["weights"];
                assert!(w["symmetric"].is_boolean() && w["type"] == "int" && w["dynamic"] == false, "{w}");
                assert_eq!(w["strategy"], if w["group_size"].is_null() { "channel" } else { "group" });
            }
        }
    }
}
