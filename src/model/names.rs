//! How checkpoints spell tensors: [`TensorId`] to module names and back to nothing else.
//!
//! The only place with Hugging Face names. Fused 3-D experts are a rule here, so nothing downstream sees two layouts.

use super::spec::*;
use crate::ids::{ExpertId, LayerId, Part, Role, TensorId};

/// How a checkpoint spells the modules of a model.
pub trait Spelling {
    /// Module that owns a tensor.
    fn module(&self, id: TensorId) -> String;
    /// What stands before a layer's number.
    fn layers(&self) -> &str;
    /// What is known of readers of artifacts with these names.
    fn readers(&self) -> Readers;
}

/// What is known of readers of a family's artifacts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// transformers loads them and gives the same outputs.
    Checked,
    /// transformers 5.24 has no rule that assembles per-expert tensors of this family.
    NotAssembled,
    /// No reader was tried.
    Unchecked,
}

/// Spelling of one family; everything not listed is common to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// Module of the expert block inside a layer.
    block: &'static str,
    /// Router inside the block.
    router: &'static str,
    /// Gate, up and down projections of an expert.
    expert: [&'static str; 3],
    /// Shared expert inside the block.
    shared: &'static str,
    /// Tensors holding all experts of a layer, inside the block: `[E, 2 F, D]` gate over up, and `[E, D, F]`.
    fused: [&'static str; 2],
    /// What is known of readers.
    readers: Readers,
}

impl Spelling for Names {
    fn module(&self, id: TensorId) -> String {
        Names::module(self, id)
    }

    fn layers(&self) -> &str {
        "model.layers"
    }

    fn readers(&self) -> Readers {
        self.readers
    }
}

impl Names {
    /// Mixtral and its kin.
    pub const MIXTRAL: Names = Names {
        block: "block_sparse_moe",
        router: "gate",
        expert: ["w1", "w3", "w2"],
        shared: "shared_expert",
        fused: ["experts.gate_up_proj", "experts.down_proj"],
        readers: Readers::Checked,
    };
    /// Qwen3-MoE and OLMoE.
    pub const QWEN3_MOE: Names = Names { block: "mlp", expert: ["gate_proj", "up_proj", "down_proj"], ..Names::MIXTRAL };
    /// Qwen2-MoE.
    pub const QWEN2_MOE: Names = Names::QWEN3_MOE;
    /// DeepSeek-V2.
    pub const DEEPSEEK: Names = Names { shared: "shared_experts", ..Names::QWEN3_MOE };
    /// Granite-MoE: always fused at the source; per-expert names follow vLLM's expert mapping for this family.
    pub const GRANITE: Names = Names {
        router: "router.layer",
        fused: ["input_linear.weight", "output_linear.weight"],
        readers: Readers::NotAssembled,
        ..Names::MIXTRAL
    };

    /// Module that owns a tensor, as a checkpoint with per-expert tensors spells it, e.g.
    /// `model.layers.3.mlp.experts.17.gate_proj`.
    pub fn module(&self, id: TensorId) -> String {
        use Role::*;
        let inner = match id.role {
            Embed => return "model.embed_tokens".into(),
            FinalNorm => return "model.norm".into(),
            Head => return "lm_head".into(),
            AttnNorm => "input_layernorm".into(),
            FfnNorm => "post_attention_layernorm".into(),
            Q => "self_attn.q_proj".into(),
            K => "self_attn.k_proj".into(),
            V => "self_attn.v_proj".into(),
            O => "self_attn.o_proj".into(),
            QNorm => "self_attn.q_norm".into(),
            KNorm => "self_attn.k_norm".into(),
            QA => "self_attn.q_a_proj".into(),
            QANorm => "self_attn.q_a_layernorm".into(),
            QB => "self_attn.q_b_proj".into(),
            KvA => "self_attn.kv_a_proj_with_mqa".into(),
            KvANorm => "self_attn.kv_a_layernorm".into(),
            KvB => "self_attn.kv_b_proj".into(),
            Router => format!("{}.{}", self.block, self.router),
            ExpertGate => self.expert_module(id, 0),
            ExpertUp => self.expert_module(id, 1),
            ExpertDown => self.expert_module(id, 2),
            SharedGate => format!("{}.{}.gate_proj", self.block, self.shared),
            SharedUp => format!("{}.{}.up_proj", self.block, self.shared),
            SharedDown => format!("{}.{}.down_proj", self.block, self.shared),
            SharedRouter => format!("{}.shared_expert_gate", self.block),
            MlpGate => "mlp.gate_proj".into(),
            MlpUp => "mlp.up_proj".into(),
            MlpDown => "mlp.down_proj".into(),
        };
        let LayerId(layer) = id.layer.unwrap_or(LayerId(0));
        format!("model.layers.{layer}.{inner}")
    }

    fn expert_module(&self, id: TensorId, projection: usize) -> String {
        let ExpertId(e) = id.expert.unwrap_or(ExpertId(0));
        format!("{}.experts.{e}.{}", self.block, self.expert[projection])
    }

    /// Module name of a whole expert, e.g. `model.layers.3.mlp.experts.17`.
    pub fn expert(&self, layer: LayerId, expert: ExpertId) -> String {
        format!("model.layers.{}.{}.experts.{}", layer.0, self.block, expert.0)
    }

    /// The plain tensor of an id where it has one of its own.
    pub fn tensor(&self, id: TensorId) -> String {
        let suffix = if id.part == Part::Bias { "bias" } else { "weight" };
        format!("{}.{suffix}", self.module(id))
    }

    /// The part of a fused 3-D tensor that holds a routed expert's matrix, for checkpoints that store experts so.
    pub fn fused(&self, id: TensorId, shape: &[usize], experts: usize) -> Option<Fused> {
        let (LayerId(layer), ExpertId(index)) = (id.layer?, id.expert?);
        let &[rows, cols] = shape else { return None };
        let (which, first_row, total_rows) = match id.role {
            Role::ExpertGate => (0, 0, 2 * rows),
            Role::ExpertUp => (0, rows, 2 * rows),
            Role::ExpertDown => (1, 0, rows),
            _ => return None,
        };
        Some(Fused {
            tensor: format!("model.layers.{layer}.{}.{}", self.block, self.fused[which]),
            shape: [experts, total_rows, cols],
            first_row: index as usize * total_rows + first_row,
            rows,
        })
    }

    /// Tensors of no use to the forward pass: buffers, next-token-prediction blocks past the last layer, other towers.
    pub fn is_side_tensor(&self, name: &str, num_layers: usize) -> bool {
        let past_last = name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next())
            .and_then(|n| n.parse::<usize>().ok())
            .is_some_and(|n| n >= num_layers);
        past_last || name.ends_with("rotary_emb.inv_freq") || name.starts_with("mtp.") || name.starts_with("model.mtp.")
    }
}

/// Where a fused tensor holds one expert's matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fused {
    /// Name of the 3-D tensor.
    pub tensor: String,
    /// Its shape, `[E, rows, cols]`.
    pub shape: [usize; 3],
    /// First row of the matrix when the tensor is seen as `[E * rows, cols]`.
    pub first_row: usize,
    /// Number of rows of the matrix.
    pub rows: usize,
}

/// Every tensor that a spec implies, with its shape, in order of computation.
pub fn tensors(spec: &ModelSpec) -> Vec<(TensorId, Vec<usize>)> {
    let mut all = Vec::new();
    let d = spec.width;
    let norm = |all: &mut Vec<_>, id: TensorId, width: usize, kind: NormKind| {
        all.push((id, vec![width]));
        if kind == NormKind::Layer {
            all.push((id.bias(), vec![width]));
        }
    };
    all.push((TensorId::global(Role::Embed), vec![spec.vocab, d]));
    for (l, layer) in spec.layers.iter().enumerate() {
        let l = LayerId(l as u32);
        let id = |role| TensorId::layer(l, role);
        let linear = |all: &mut Vec<_>, role, rows: usize, cols: usize, bias: bool| {
            all.push((id(role), vec![rows, cols]));
            if bias {
                all.push((id(role).bias(), vec![rows]));
            }
        };
        norm(&mut all, id(Role::AttnNorm), d, spec.norm.kind);
        match &layer.attn {
            Attn::Gqa(a) => {
                let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
                linear(&mut all, Role::Q, q, d, a.qkv_bias);
                linear(&mut all, Role::K, kv, d, a.qkv_bias);
                linear(&mut all, Role::V, kv, d, a.qkv_bias);
                linear(&mut all, Role::O, d, q, a.o_bias);
                let widths = match a.qk_norm {
                    QkNorm::None => None,
                    QkNorm::PerHead => Some((a.head_dim, a.head_dim)),
                    QkNorm::Whole => Some((q, kv)),
                };
                if let Some((qw, kw)) = widths {
                    norm(&mut all, id(Role::QNorm), qw, NormKind::Rms);
                    norm(&mut all, id(Role::KNorm), kw, NormKind::Rms);
                }
            }
            Attn::Mla(a) => {
                let q = a.heads * (a.nope + a.rope);
                match a.q_rank {
                    None => linear(&mut all, Role::Q, q, d, false),
                    Some(rank) => {
                        linear(&mut all, Role::QA, rank, d, a.bias);
                        norm(&mut all, id(Role::QANorm), rank, NormKind::Rms);
                        linear(&mut all, Role::QB, q, rank, false);
                    }
                }
                linear(&mut all, Role::KvA, a.kv_rank + a.rope, d, a.bias);
                norm(&mut all, id(Role::KvANorm), a.kv_rank, NormKind::Rms);
                linear(&mut all, Role::KvB, a.heads * (a.nope + a.v), a.kv_rank, false);
                linear(&mut all, Role::O, d, a.heads * a.v, a.bias);
            }
        }
        norm(&mut all, id(Role::FfnNorm), d, spec.norm.kind);
        match &layer.ffn {
            Ffn::Dense { width } => {
                linear(&mut all, Role::MlpGate, *width, d, false);
                linear(&mut all, Role::MlpUp, *width, d, false);
                linear(&mut all, Role::MlpDown, d, *width, false);
            }
            Ffn::Moe(m) => {
                linear(&mut all, Role::Router, m.router.experts, d, false);
                for e in 0..m.router.experts as u32 {
                    let id = |role| TensorId::expert(l, ExpertId(e), role);
                    all.push((id(Role::ExpertGate), vec![m.width, d]));
                    all.push((id(Role::ExpertUp), vec![m.width, d]));
                    all.push((id(Role::ExpertDown), vec![d, m.width]));
                }
                if let Some(s) = m.shared {
                    linear(&mut all, Role::SharedGate, s.width, d, false);
                    linear(&mut all, Role::SharedUp, s.width, d, false);
                    linear(&mut all, Role::SharedDown, d, s.width, false);
                    if s.gated {
                        linear(&mut all, Role::SharedRouter, 1, d, false);
                    }
                }
            }
        }
    }
    norm(&mut all, TensorId::global(Role::FinalNorm), d, spec.norm.kind);
    if !spec.tied {
        all.push((TensorId::global(Role::Head), vec![spec.vocab, d]));
    }
    if spec.head_bias {
        all.push((TensorId::global(Role::Head).bias(), vec![spec.vocab]));
    }
    all
}
