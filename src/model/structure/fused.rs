//! Layouts of tensors that hold all experts of a layer, settled by the `model_type`.

use super::path::Path;
use super::{EXPERT_KEYS, Place, Reading, StructureError, WIDTH_KEYS};
use crate::ids::{ExpertId, LayerId, Part, Role, TensorId};

/// A layout of fused experts that a `model_type` settles.
pub(super) struct FusedRule {
    pub model_types: &'static [&'static str],
    /// Names of the tensors inside the block: gate and up, and down.
    pub tensors: [&'static str; 2],
    /// Spelling of gate, up and down where each expert has its own.
    pub children: [&'static str; 3],
    /// `[E, in, out]` rather than `[E, out, in]`.
    pub transposed: bool,
    /// Gate and up alternate rather than follow one another.
    pub interleaved: bool,
}

pub(super) const FUSED: &[FusedRule] = &[
    FusedRule {
        model_types: &["qwen3_5_moe", "qwen3_5_moe_text", "gemma4", "gemma4_text"],
        tensors: ["experts.gate_up_proj", "experts.down_proj"],
        children: ["gate_proj", "up_proj", "down_proj"],
        transposed: false,
        interleaved: false,
    },
    FusedRule {
        model_types: &["granitemoeshared", "granitemoehybrid"],
        tensors: ["input_linear.weight", "output_linear.weight"],
        children: ["w1", "w3", "w2"],
        transposed: false,
        interleaved: false,
    },
    FusedRule {
        model_types: &["llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"],
        tensors: ["experts.gate_up_proj", "experts.down_proj"],
        children: ["gate_proj", "up_proj", "down_proj"],
        transposed: true,
        interleaved: false,
    },
    FusedRule {
        model_types: &["gpt_oss"],
        tensors: ["experts.gate_up_proj", "experts.down_proj"],
        children: ["gate_proj", "up_proj", "down_proj"],
        transposed: true,
        interleaved: true,
    },
];

impl Reading<'_> {
    /// The experts' matrices inside a fused tensor, as a rule of this `model_type` lays them out.
    pub(super) fn split(
        &mut self,
        path: &Path<'_>,
        layer: LayerId,
        block: &str,
        which: usize,
        part: Part,
    ) -> Result<(), StructureError> {
        let refuse = || StructureError::Fused {
            model_type: self.keys.model_type.clone(),
            tensor: path.name.into(),
            shape: path.shape.to_vec(),
        };
        let Some(rule) = self.fused else { return Err(refuse()) };
        let transposed = rule.transposed && !path.blocks && part == Part::Weight;
        let (experts, out, cols) = match (part, path.shape) {
            (Part::Bias, &[e, out]) => (e, out, 1),
            (Part::Weight, &[e, cols, out]) if transposed => (e, out, cols),
            (Part::Weight, &[e, out, cols]) => (e, out, cols),
            _ => return Err(refuse()),
        };
        let width = self.keys.count(WIDTH_KEYS);
        let facing = if which == 0 { cols } else { out };
        let matrices = if which == 0 { 2 } else { 1 };
        let sound = !path.shape.contains(&0)
            && out % matrices == 0
            && (which == 0 && part == Part::Bias || width.is_none_or(|w| w == facing));
        if !sound || self.keys.count(EXPERT_KEYS).is_some_and(|n| n != experts) {
            return Err(refuse());
        }
        let rows = out / matrices;
        let (row, col) = if transposed { (1, out) } else { (cols, 1) };
        for e in 0..experts {
            for m in 0..matrices {
                let role = [[Role::ExpertGate, Role::ExpertUp], [Role::ExpertDown, Role::ExpertDown]][which][m];
                let (first_row, step) = if matrices == 2 && rule.interleaved { (m, 2) } else { (m * rows, 1) };
                let first = e * out * cols + first_row * row;
                let id = TensorId { part, ..TensorId::expert(layer, ExpertId(e as u32), role) };
                let (strides, shape) = match part {
                    Part::Weight => ([step * row, col], vec![rows, cols]),
                    Part::Bias => ([step * rows, step], vec![rows]),
                };
                let child = rule.children[which * 2 + m];
                let module = format!("{}.{}.{block}", self.layers, layer.0);
                let module = format!("{}.experts.{e}.{child}", module.trim_end_matches('.'));
                if !self.add(id, module, shape, Place::Part { name: path.name.into(), first, strides }) {
                    return Err(refuse());
                }
            }
        }
        Ok(())
    }
}
