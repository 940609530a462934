//! Families without a row of their own: what can be told of a checkpoint from names, shapes and a few config keys.
//!
//! Experts are 2-D matrices `<layer>.<block>.experts.<E>.<projection>`, or lie in fused 3-D tensors whose layout the
//! `model_type` settles; the router is a matrix beside them with a row for each expert. Everything that is not recognised
//! stands aside and is copied. Knows spellings and shapes only; nothing here suffices to run a model.

mod fused;
mod keys;
mod path;

use super::names::{Readers, Spelling};
use super::outline::{Experts, Heads, Outline};
use crate::ids::{ExpertId, LayerId, Part, Role, TensorId};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use fused::{FUSED, FusedRule};
use keys::{EXPERT_KEYS, Keys, WIDTH_KEYS};
use path::{Path, is_number, module_of, predicts_further};

/// Why nothing can be done with a checkpoint of an unknown family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// It is no Mixture-of-Experts model, or none that can be told.
    #[error("`model_type` `{model_type}` is none that this version runs, and no tensor is named like an expert's")]
    NoExperts {
        /// `model_type`.
        model_type: String,
    },
    /// All experts of a layer lie in one tensor, in an unknown order.
    #[error("`{tensor}` {shape:?} holds all experts of a layer in a layout that `model_type` `{model_type}` does not settle")]
    Fused {
        /// `model_type`.
        model_type: String,
        /// Such a tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// No matrix beside the experts has a row for each of them.
    #[error("`{block}` has {experts} experts, but no matrix of {experts} rows beside them is a router")]
    NoRouter {
        /// The module that holds the experts.
        block: String,
        /// How many.
        experts: usize,
    },
    /// The experts of a layer are not all there or not alike.
    #[error("the experts of `{block}` are not whole: {what}")]
    Experts {
        /// The module that holds them.
        block: String,
        /// What is wrong.
        what: String,
    },
}

impl StructureError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            StructureError::NoExperts { .. } => "this tool is for Mixture-of-Experts models".into(),
            StructureError::Fused { .. } => "save the experts as one matrix each (`experts.<E>.gate_proj.weight` ...)".into(),
            StructureError::NoRouter { .. } => "the checkpoint may be incomplete; download it again".into(),
            StructureError::Experts { .. } => "the checkpoint may be incomplete; compare its index with the files".into(),
        })
    }
}

/// A tensor as it means, whatever codes hold it.
#[derive(Clone, Debug)]
pub struct Logical<'a> {
    /// Its name, that of a module and `weight` or `bias`, or of a fused tensor.
    pub name: &'a str,
    /// Its shape, decoded.
    pub shape: &'a [usize],
    /// Whether 4-bit blocks hold it, which run along the columns of `[E, out, in]` whatever the plain layout.
    pub blocks: bool,
}

/// Where the values of a recognised tensor lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a tensor of its own.
    Own {
        /// Its name.
        name: String,
    },
    /// In a fused tensor; strides of a row and a column, in elements.
    Part {
        /// Its name.
        name: String,
        /// Element of the first value.
        first: usize,
        /// Elements from row to row and from column to column.
        strides: [usize; 2],
    },
}

/// A recognised tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What it is.
    pub id: TensorId,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where it lies.
    pub place: Place,
}

/// Why a tensor stands aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aside {
    /// Buffers and blocks that predict further tokens.
    Unused,
    /// A tower for images or sound, or what joins it to the model.
    Tower,
    /// Of the model, but of no kind that rules know.
    Unruled,
}

impl fmt::Display for Aside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Aside::Unused => "not used by the forward pass",
            Aside::Tower => "of another tower",
            Aside::Unruled => "no rule quantizes tensors of this kind",
        })
    }
}

/// How this checkpoint spells what was recognised.
#[derive(Clone, Debug, Default)]
pub struct FoundNames {
    modules: HashMap<TensorId, String>,
    layers: String,
}

impl Spelling for FoundNames {
    fn module(&self, id: TensorId) -> String {
        self.modules.get(&TensorId { part: Part::Weight, ..id }).cloned().unwrap_or_default()
    }

    fn layers(&self) -> &str {
        &self.layers
    }

    fn readers(&self) -> Readers {
        Readers::Unchecked
    }
}

/// What was recognised.
#[derive(Clone, Debug)]
pub struct Structure {
    /// A few numbers.
    pub outline: Outline,
    /// Spellings.
    pub names: FoundNames,
    /// Recognised tensors, in order of id.
    pub members: Vec<Member>,
    /// All others.
    pub aside: Vec<(String, Aside)>,
}

/// Components that hold a text model without being one.
const TOWERS: &[&str] = &["visual", "vision", "audio", "multi_modal", "multimodal", "mm_projector", "aligner", "image", "speech"];

/// Recognises the tensors of a checkpoint. `tensors` are sorted by name.
pub fn read(config: &Value, tensors: &[Logical<'_>]) -> Result<Structure, StructureError> {
    let keys = Keys::of(config);
    let paths: Vec<Path<'_>> = tensors.iter().map(Path::of).collect();
    let fused = FUSED.iter().find(|rule| rule.model_types.contains(&keys.model_type.as_str()));
    let layers = main_layers(&paths, fused).ok_or_else(|| keys.refusal(tensors))?;
    let num_layers = keys.count(&["num_hidden_layers", "num_layers", "n_layer", "n_layers"]);
    let mut reading = Reading {
        keys: &keys,
        fused,
        layers: &layers,
        members: BTreeMap::new(),
        modules: HashMap::new(),
        aside: Vec::new(),
        twice: Vec::new(),
    };
    let mut blocks: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for path in &paths {
        match reading.aside(path, num_layers) {
            Some(why) => reading.aside.push((path.name.into(), why)),
            None => {
                if let Some(block) = reading.experts(path)? {
                    blocks.entry(path.layer.unwrap_or(0)).or_default().insert(block);
                }
            }
        }
    }
    if blocks.is_empty() {
        return Err(keys.refusal(tensors));
    }
    reading.routers(&paths, &blocks)?;
    let claimed: BTreeSet<String> = reading.claimed();
    for path in paths.iter().filter(|p| !claimed.contains(p.name)) {
        if reading.aside(path, num_layers).is_none() {
            reading.dense(path, &blocks);
        }
    }
    reading.one_spelling_a_role();
    let claimed = reading.claimed();
    let known: BTreeSet<String> = reading.aside.iter().map(|(n, _)| n.clone()).collect();
    let rest = paths.iter().filter(|p| !claimed.contains(p.name) && !known.contains(p.name));
    reading.aside.extend(rest.map(|p| (p.name.to_string(), Aside::Unruled)));
    reading.aside.sort_by(|a, b| a.0.cmp(&b.0));
    let Reading { members, modules, aside, .. } = reading;
    let members: Vec<Member> = members.into_values().collect();
    let outline = outline(&keys, &members, num_layers);
    Ok(Structure { outline, names: FoundNames { modules, layers }, members, aside })
}

/// What holds the layers that most experts lie in.
fn main_layers(paths: &[Path<'_>], fused: Option<&FusedRule>) -> Option<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let is_expert = |p: &&Path<'_>| p.expert().is_some() || fused.is_some_and(|rule| p.fused(rule).is_some());
    for path in paths.iter().filter(|p| p.layer.is_some() && !predicts_further(p.layers)).filter(is_expert) {
        *counts.entry(path.layers).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, n)| *n).map(|(layers, _)| layers.to_string())
}

struct Reading<'a> {
    keys: &'a Keys<'a>,
    fused: Option<&'static FusedRule>,
    layers: &'a str,
    members: BTreeMap<TensorId, Member>,
    modules: HashMap<TensorId, String>,
    aside: Vec<(String, Aside)>,
    /// Ids that a layer spells more than once.
    twice: Vec<TensorId>,
}

impl Reading<'_> {
    /// Why a tensor cannot belong to the layers that are quantized.
    fn aside(&self, path: &Path<'_>, num_layers: Option<usize>) -> Option<Aside> {
        let past_last = || num_layers.is_some_and(|n| path.layer.is_some_and(|l| l as usize >= n));
        let outside = if path.layer.is_some() { path.layers } else { path.inner };
        let of_tower = |part: &str| TOWERS.iter().any(|t| part.starts_with(t));
        if predicts_further(outside) || path.name.ends_with("rotary_emb.inv_freq") {
            Some(Aside::Unused)
        } else if path.layers == self.layers {
            past_last().then_some(Aside::Unused)
        } else if outside.split('.').any(of_tower) {
            Some(Aside::Tower)
        } else {
            path.layer.is_some().then_some(Aside::Unruled)
        }
    }

    fn claimed(&self) -> BTreeSet<String> {
        let name = |m: &Member| match &m.place {
            Place::Own { name } | Place::Part { name, .. } => name.clone(),
        };
        self.members.values().map(name).collect()
    }

    fn add(&mut self, id: TensorId, module: String, shape: Vec<usize>, place: Place) -> bool {
        if self.members.contains_key(&id) {
            return false;
        }
        self.modules.entry(TensorId { part: Part::Weight, ..id }).or_insert(module);
        self.members.insert(id, Member { id, shape, place });
        true
    }

    /// Takes in an expert's tensor, or all tensors of a fused one; returns the block that holds it.
    fn experts(&mut self, path: &Path<'_>) -> Result<Option<String>, StructureError> {
        let Some(layer) = path.layer.map(LayerId) else { return Ok(None) };
        let layers = self.layers;
        let block_of = |block: &str| format!("{layers}.{}.{block}", layer.0).trim_end_matches('.').to_string();
        if let Some((block, expert, projection, part)) = path.expert() {
            let matrix = path.shape.len() == if part == Part::Bias { 1 } else { 2 };
            let role = self.projection(projection, path.shape).filter(|_| matrix);
            let Some(role) = role else {
                let what = format!("`{}` {:?} is no projection known here", path.name, path.shape);
                return Err(StructureError::Experts { block: block_of(block), what });
            };
            let id = TensorId { part, ..TensorId::expert(layer, ExpertId(expert), role) };
            let module = module_of(path.name).map_or(path.name, |(m, _)| m).to_string();
            let name = path.name.to_string();
            if !self.add(id, module, path.shape.to_vec(), Place::Own { name }) {
                let what = format!("`{}` is a second {} projection", path.name, role.name());
                return Err(StructureError::Experts { block: block_of(block), what });
            }
            return Ok(Some(block.into()));
        }
        let Some((block, which, part)) = self.fused.and_then(|rule| path.fused(rule)) else {
            return Ok(None);
        };
        self.split(path, layer, block, which, part)?;
        Ok(Some(block.into()))
    }

    /// The role of an expert's projection: by its usual names, else by which side faces the model.
    fn projection(&self, name: &str, shape: &[usize]) -> Option<Role> {
        match name {
            "gate_proj" | "w1" | "gate" | "wi_0" => return Some(Role::ExpertGate),
            "up_proj" | "w3" | "up" | "wi_1" | "fc1" | "wi" => return Some(Role::ExpertUp),
            "down_proj" | "w2" | "down" | "fc2" | "wo" => return Some(Role::ExpertDown),
            _ => {}
        }
        let width = self.keys.count(WIDTH_KEYS)?;
        match *shape {
            [rows, cols] if rows == width && cols != width => Some(Role::ExpertDown),
            [rows, cols] if cols == width && rows != width && name.ends_with(['v', '3']) => Some(Role::ExpertUp),
            [rows, cols] if cols == width && rows != width => Some(Role::ExpertGate),
            _ => None,
        }
    }

    /// Checks that the experts of every block are whole, and finds the router beside them.
    fn routers(&mut self, paths: &[Path<'_>], blocks: &BTreeMap<u32, BTreeSet<String>>) -> Result<(), StructureError> {
        let wanted = self.keys.count(EXPERT_KEYS);
        let idle = self.keys.count(&["zero_expert_num"]).unwrap_or(0);
        for (&layer, of_layer) in blocks {
            let whole = |block: &str| format!("{}.{layer}.{block}", self.layers).trim_end_matches('.').to_string();
            let (Some(block), 1) = (of_layer.first(), of_layer.len()) else {
                let what = "there is more than one such block in a layer".into();
                return Err(StructureError::Experts { block: whole(of_layer.first().map_or("", |b| b)), what });
            };
            let mut roles: BTreeMap<u32, BTreeSet<(Role, Part)>> = BTreeMap::new();
            let ids = self.members.keys().filter(|id| id.layer == Some(LayerId(layer)));
            for (expert, id) in ids.filter_map(|id| Some((id.expert?.0, id))) {
                roles.entry(expert).or_default().insert((id.role, id.part));
            }
            let experts = roles.len();
            let error = |what: String| Err(StructureError::Experts { block: whole(block), what });
            if let Some(missing) = (0..experts as u32).find(|e| !roles.contains_key(e)) {
                return error(format!("expert {missing} is missing, while there are {experts} others"));
            }
            if let Some(n) = wanted.filter(|&n| n != experts) {
                return error(format!("there are {experts}, the config says {n}"));
            }
            if let Some((e, _)) = roles.iter().find(|(_, r)| **r != roles[&0]) {
                return error(format!("expert {e} has other projections than expert 0"));
            }
            let inside = if block.is_empty() { String::new() } else { format!("{block}.") };
            let beside = |p: &&Path<'_>| {
                let rest = p.inner.strip_prefix(inside.as_str()).and_then(|rest| rest.strip_suffix(".weight"));
                let rest =
                    rest.filter(|rest| p.layer == Some(layer) && p.layers == self.layers && !rest.starts_with("experts."))?;
                let rows = p.shape.len() == 2 && (p.shape[0] == experts || (idle > 0 && p.shape[0] == experts + idle));
                let projection = rest.ends_with("_proj") || ["w1", "w2", "w3"].contains(&rest.rsplit('.').next()?);
                let named = rest.split('.').any(|part| part == "gate" || part == "router");
                (rows && !projection && (named || !block.is_empty())).then_some(named)
            };
            // One that is called so before one that only has its shape.
            let router = paths.iter().filter_map(|p| Some((beside(&p)?, p))).min_by_key(|(named, _)| !named).map(|(_, p)| p);
            let Some(router) = router else { return Err(StructureError::NoRouter { block: whole(block), experts }) };
            let module = router.name.trim_end_matches(".weight").to_string();
            let id = TensorId::layer(LayerId(layer), Role::Router);
            self.add(id, module, router.shape.to_vec(), Place::Own { name: router.name.into() });
        }
        Ok(())
    }

    /// Projections of attention, shared experts and dense blocks, embedding and head, where they are spelled as usual.
    fn dense(&mut self, path: &Path<'_>, blocks: &BTreeMap<u32, BTreeSet<String>>) {
        let Some((module, Part::Weight)) = module_of(path.inner) else { return };
        if path.shape.len() != 2 {
            return;
        }
        let (parent, child) = module.rsplit_once('.').unwrap_or(("", module));
        let near = parent.rsplit('.').next().unwrap_or_default();
        let id = match path.layer {
            None if child == "embed_tokens" => TensorId::global(Role::Embed),
            // Where the config says that the head is the embedding, whatever is stored is a copy or of no use.
            None if child == "lm_head" && self.keys.tied() != Some(true) => TensorId::global(Role::Head),
            None => return,
            Some(layer) => {
                let block = blocks.get(&layer).and_then(|b| b.first()).filter(|b| !b.is_empty());
                let in_block = |role| block.is_some_and(|b| parent == b.as_str()).then_some(role);
                let shared = near.starts_with("shared_exp") || near == "shared_mlp" || near == "share_expert";
                let attention = ["self_attn", "attn", "attention", "self_attention"].contains(&near);
                let mlp = ["mlp", "feed_forward", "ffn", "residual_mlp"].contains(&near);
                let role = match child {
                    "q_proj" => Some(Role::Q),
                    "k_proj" => Some(Role::K),
                    "v_proj" => Some(Role::V),
                    "o_proj" => Some(Role::O),
                    "q_a_proj" => Some(Role::QA),
                    "q_b_proj" => Some(Role::QB),
                    "kv_a_proj_with_mqa" => Some(Role::KvA),
                    "kv_b_proj" => Some(Role::KvB),
                    "wq" | "query" if attention => Some(Role::Q),
                    "wk" | "key" if attention => Some(Role::K),
                    "wv" | "value" if attention => Some(Role::V),
                    "wo" | "dense" | "out_proj" if attention => Some(Role::O),
                    "shared_expert_gate" => in_block(Role::SharedRouter),
                    "gate_proj" | "w1" if shared => Some(Role::SharedGate),
                    "up_proj" | "w3" if shared => Some(Role::SharedUp),
                    "down_proj" | "w2" if shared => Some(Role::SharedDown),
                    "gate_proj" | "w1" if mlp => Some(Role::MlpGate),
                    "up_proj" | "w3" if mlp => Some(Role::MlpUp),
                    "down_proj" | "w2" if mlp => Some(Role::MlpDown),
                    _ => None,
                };
                let Some(role) = role else { return };
                TensorId::layer(LayerId(layer), role)
            }
        };
        let module = path.name.trim_end_matches(".weight").to_string();
        if is_number(near) || !self.add(id, module, path.shape.to_vec(), Place::Own { name: path.name.into() }) {
            self.twice.push(id);
        }
    }

    /// Leaves a role its commonest spelling, so that one pattern names it; the others stand aside. The same for tensors that a
    /// layer spells twice, of which only one could have been taken.
    fn one_spelling_a_role(&mut self) {
        let inner = |module: &str| {
            let rest = module.strip_prefix(self.layers).and_then(|r| r.strip_prefix('.')).unwrap_or(module);
            let rest = rest.split_once('.').map_or(rest, |(_, inner)| inner);
            rest.split('.').map(|p| if is_number(p) { "*" } else { p }).collect::<Vec<_>>().join(".")
        };
        let mut spellings: BTreeMap<Role, BTreeMap<String, usize>> = BTreeMap::new();
        for id in self.members.keys().filter(|id| id.layer.is_some()) {
            let module = self.modules.get(&TensorId { part: Part::Weight, ..*id }).map_or("", String::as_str);
            *spellings.entry(id.role).or_default().entry(inner(module)).or_default() += 1;
        }
        let commonest: BTreeMap<Role, String> = spellings
            .into_iter()
            .filter_map(|(role, all)| all.into_iter().max_by_key(|(_, n)| *n).map(|(spelling, _)| (role, spelling)))
            .collect();
        let odd: Vec<TensorId> = self
            .members
            .keys()
            .filter(|id| id.layer.is_some() && id.expert.is_none() && id.role != Role::Router)
            .filter(|id| commonest.get(&id.role) != self.modules.get(id).map(|m| inner(m)).as_ref())
            .copied()
            .collect();
        for id in odd.into_iter().chain(std::mem::take(&mut self.twice)) {
            self.members.remove(&id);
            self.modules.remove(&id);
        }
    }
}

fn outline(keys: &Keys<'_>, members: &[Member], num_layers: Option<usize>) -> Outline {
    let width_of = |role: Role| {
        let first = members.iter().find(|m| m.id.role == role && m.id.part == Part::Weight);
        first.and_then(|m| {
            if matches!(role, Role::ExpertDown | Role::SharedDown | Role::MlpDown) { m.shape.get(1) } else { m.shape.first() }
        })
    };
    let with_experts: BTreeSet<LayerId> = members.iter().filter(|m| m.id.expert.is_some()).filter_map(|m| m.id.layer).collect();
    let first = with_experts.first().copied();
    let of_first = |m: &&Member| m.id.layer == first && m.id.expert.is_some();
    let experts = Experts {
        count: members.iter().filter(of_first).filter_map(|m| m.id.expert).collect::<BTreeSet<_>>().len(),
        top_k: keys.count(&["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"]),
        width: width_of(Role::ExpertDown).copied().unwrap_or(0),
        shared_width: width_of(Role::SharedDown).copied(),
        layers: with_experts.len(),
    };
    let mut inner: Vec<usize> = [Role::ExpertDown, Role::SharedDown, Role::MlpDown]
        .into_iter()
        .flat_map(|role| members.iter().filter(move |m| m.id.role == role && m.id.part == Part::Weight))
        .filter_map(|m| m.shape.get(1).copied())
        .collect();
    inner.sort_unstable();
    inner.dedup();
    let heads = keys.count(&["num_attention_heads", "n_heads", "n_head"]).unwrap_or(1).max(1);
    let kv_heads = keys.count(&["num_key_value_heads", "kv_n_heads"]).unwrap_or(heads).max(1);
    let vocab = members.iter().find(|m| m.id.role == Role::Embed).and_then(|m| m.shape.first().copied());
    let has_head = members.iter().any(|m| m.id.role == Role::Head);
    let down = members.iter().find(|m| m.id.role == Role::ExpertDown && m.id.part == Part::Weight);
    Outline {
        model_type: keys.model_type.clone(),
        layers: num_layers.unwrap_or_else(|| members.iter().filter_map(|m| m.id.layer).max().map_or(0, |l| l.0 as usize + 1)),
        width: down.and_then(|m| m.shape.first().copied()).unwrap_or(0),
        vocab: vocab.or(keys.count(&["vocab_size"])).unwrap_or(0),
        max_positions: keys.count(&["max_position_embeddings", "max_seq_len"]).unwrap_or(0),
        tied: keys.tied().unwrap_or(!has_head),
        experts: Some(experts),
        attention: Heads::Other { heads, kv_heads },
        inner,
    }
}
