//! Shapes of public models: a spec without weights.

use super::UserError;
use crate::files;
use crate::ids::{Component, Part, Role, TensorId};
use crate::model::family::{self, Family};
use crate::model::spec::ModelSpec;
use crate::profile::precision::Profile;
use crate::quant::format::{Format, fit};
use anyhow::{Context, Result};
use std::path::Path;

macro_rules! shape {
    ($name:literal) => {
        ($name, include_str!(concat!("../../profiles/shapes/", $name, ".json")))
    };
}

const SHAPES: &[(&str, &str)] = &[
    shape!("qwen3-30b-a3b"),
    shape!("mixtral-8x7b"),
    shape!("qwen1.5-moe-a2.7b"),
    shape!("phi-3.5-moe"),
    shape!("deepseek-v2-lite"),
    shape!("olmoe-1b-7b"),
    shape!("flash-125b-a6b"),
];

/// The spec of a named shape, or of a `config.json` by its path.
pub(super) fn spec(shape: &str) -> Result<(&'static Family, ModelSpec)> {
    let text = match SHAPES.iter().find(|(name, _)| *name == shape) {
        Some((_, text)) => text.as_bytes().to_vec(),
        None if shape.ends_with(".json") => files::read(Path::new(shape))?,
        None => {
            let names: Vec<&str> = SHAPES.iter().map(|s| s.0).collect();
            return Err(UserError::new(format!("there is no shape `{shape}`"))
                .hint(format!("shapes are {}", names.join(", ")))
                .into());
        }
    };
    let config = serde_json::from_slice(&text)
        .with_context(|| format!("shape `{shape}`"))
        .map_err(|e| UserError::new(format!("{e:#}")))?;
    Ok(family::read(&config)?)
}

/// Formats of a profile by id and columns; routers, gates, norms and `kv` projections of latents stay at source as in artifacts.
/// `bench` is int8 attention, MLPs and head with int4 experts.
pub(super) fn formats(name: &str) -> Result<Box<dyn Fn(TensorId, usize) -> Format>> {
    let kept = |id: TensorId| {
        let router = matches!(id.role, Role::Router | Role::SharedRouter | Role::KvA | Role::KvB | Role::QA);
        router || id.part == Part::Bias || id.role.component() == Component::Norms
    };
    if name == "bench" {
        return Ok(Box::new(move |id, cols| match id.role {
            _ if kept(id) => Format::Source,
            Role::Embed => Format::Source,
            Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => fit(Format::INT4_G128, cols),
            _ => fit(Format::INT8_G128, cols),
        }));
    }
    let profile = Profile::built_in(name)?;
    Ok(Box::new(move |id, cols| {
        let text = id.to_string();
        let rule = profile.rules.iter().find(|r| r.pattern.matches(&text)).filter(|_| !kept(id));
        rule.map_or(Format::Source, |r| fit(r.format, cols))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every shape is a config that the family readers take.
    #[test]
    fn shapes_are_configs() {
        for (name, _) in SHAPES {
            assert!(!spec(name).unwrap().1.layers.is_empty(), "{name}");
        }
        assert_eq!(spec("qwen3-30b-a3b").unwrap().1.layers.len(), 48);
    }
}
