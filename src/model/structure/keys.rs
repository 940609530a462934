//! The few keys of a config that structure is held against.

use super::path::predicts_further;
use super::{Logical, StructureError};
use serde_json::Value;

/// The config's few keys, wherever it nests its text model.
pub(super) struct Keys<'a> {
    pub model_type: String,
    objects: Vec<&'a Value>,
}

/// Spellings of the number of experts.
pub(super) const EXPERT_KEYS: &[&str] = &["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];

/// Spellings of the model's width.
pub(super) const WIDTH_KEYS: &[&str] = &["hidden_size", "d_model", "n_embd"];

impl<'a> Keys<'a> {
    pub fn of(config: &'a Value) -> Self {
        let nested = ["text_config", "llm_config", "language_config", "ffn_config", "attn_config"];
        let mut objects = vec![config];
        objects.extend(nested.iter().filter_map(|k| config.get(k)).filter(|v| v.is_object()));
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_string();
        Self { model_type, objects }
    }

    pub fn get(&self, keys: &[&str]) -> Option<&'a Value> {
        self.objects.iter().find_map(|o| keys.iter().find_map(|k| o.get(k).filter(|v| !v.is_null())))
    }

    pub fn count(&self, keys: &[&str]) -> Option<usize> {
        self.get(keys)?.as_u64().and_then(|n| usize::try_from(n).ok())
    }

    pub fn tied(&self) -> Option<bool> {
        self.get(&["tie_word_embeddings"]).and_then(Value::as_bool)
    }

    /// Why no experts were found: a fused tensor is the likeliest cause, if there is one.
    pub fn refusal(&self, tensors: &[Logical<'_>]) -> StructureError {
        let experts = self.count(EXPERT_KEYS);
        let stacked = |t: &&Logical<'_>| t.shape.len() == 3 && experts.is_some_and(|e| t.shape[0] == e);
        let named = |t: &&Logical<'_>| t.shape.len() >= 2 && t.name.split('.').any(|p| p == "experts");
        let model_type = self.model_type.clone();
        let of_model = || tensors.iter().filter(|t| !predicts_further(t.name));
        match of_model().find(stacked).or_else(|| of_model().find(named)) {
            Some(t) => StructureError::Fused { model_type, tensor: t.name.into(), shape: t.shape.to_vec() },
            None => StructureError::NoExperts { model_type },
        }
    }
}
