//! Tensor names taken apart.

use super::Logical;
use super::fused::FusedRule;
use crate::ids::Part;

/// A name taken apart: what holds the layers, which layer, what lies inside it.
pub(super) struct Path<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub blocks: bool,
    /// Before the number of the layer.
    pub layers: &'a str,
    pub layer: Option<u32>,
    /// Behind it, or the whole name.
    pub inner: &'a str,
}

pub(super) fn is_number(part: &str) -> bool {
    !part.is_empty() && part.len() <= 6 && part.bytes().all(|b| b.is_ascii_digit())
}

impl<'a> Path<'a> {
    pub fn of(tensor: &Logical<'a>) -> Self {
        let mut at = 0;
        let (mut layers, mut layer, mut inner) = ("", None, tensor.name);
        for part in tensor.name.split('.') {
            if at > 0 && is_number(part) {
                layers = &tensor.name[..at - 1];
                layer = part.parse().ok();
                inner = tensor.name.get(at + part.len() + 1..).unwrap_or_default();
                break;
            }
            at += part.len() + 1;
        }
        Self { name: tensor.name, shape: tensor.shape, blocks: tensor.blocks, layers, layer, inner }
    }

    /// Block, expert and projection of an expert's own tensor, and whether it is a bias.
    pub fn expert(&self) -> Option<(&'a str, u32, &'a str, Part)> {
        let (module, part) = module_of(self.inner)?;
        let at = module.find("experts.").filter(|&at| at == 0 || module.as_bytes()[at - 1] == b'.')?;
        let (index, projection) = module[at + "experts.".len()..].split_once('.')?;
        let whole = is_number(index) && !projection.contains('.');
        whole.then(|| (module[..at].trim_end_matches('.'), index.parse().unwrap_or(0), projection, part))
    }

    /// Block, which of the two tensors, and part of a fused tensor.
    pub fn fused(&self, rule: &FusedRule) -> Option<(&'a str, usize, Part)> {
        rule.tensors.iter().enumerate().find_map(|(which, end)| {
            let bias = format!("{}_bias", end.trim_end_matches(".weight"));
            let cut = |end: &str, rank: usize| {
                let block = self.inner.strip_suffix(end).filter(|b| b.is_empty() || b.ends_with('.'))?;
                (self.shape.len() == rank).then(|| block.trim_end_matches('.'))
            };
            cut(end, 3).map(|b| (b, which, Part::Weight)).or_else(|| cut(&bias, 2).map(|b| (b, which, Part::Bias)))
        })
    }
}

pub(super) fn module_of(name: &str) -> Option<(&str, Part)> {
    name.strip_suffix(".weight").map(|m| (m, Part::Weight)).or_else(|| name.strip_suffix(".bias").map(|m| (m, Part::Bias)))
}

/// Whether a name is that of a block that predicts further tokens.
pub(super) fn predicts_further(name: &str) -> bool {
    name.split('.').any(|part| part.starts_with("mtp") || part.starts_with("nextn"))
}
