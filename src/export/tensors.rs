//! Which tensors a GGUF file holds, in what type, and their bytes row by row.

use super::ExportError;
use super::arch;
use super::gguf::{Kind, TensorInfo};
use crate::artifact::weights::{Data, Weight, Weights};
use crate::ids::{Component, Part, Role, TensorId};
use crate::model::spec::{Attn, Scaling};
use crate::quant::format::{Bits, Packed, Zero};
use crate::quant::ggml;
use crate::tensor::{self, Dtype};
use rayon::prelude::*;

/// Scales that were written, and those among them that half precision cannot express.
#[derive(Clone, Copy, Default)]
pub struct Scales {
    pub all: usize,
    pub rounded: usize,
}

/// A tensor to write: one weight, or those of all experts one after the other, or a table of numbers.
pub struct Tensor<'a> {
    pub info: TensorInfo,
    parts: Vec<(TensorId, Weight<'a>)>,
    /// Row of the source for each row written, where the order changes.
    order: Option<Vec<usize>>,
    table: Vec<f32>,
}

/// Takes the next bytes of the file.
pub type Put<'p> = dyn FnMut(&[u8], Scales) -> Result<(), ExportError> + 'p;

/// Rows whose floats are computed together.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Everything to write. Packed weights whose groups are wider than a block are taken from `source` instead, if it is given.
pub fn plan<'a>(weights: &'a Weights, source: Option<&'a Weights>) -> Result<Vec<Tensor<'a>>, ExportError> {
    let mut all: Vec<Tensor<'a>> = Vec::new();
    let spec = weights.spec();
    for (id, shape) in weights.tensors() {
        let Some(mut weight) = weights.get(*id) else { continue };
        let wide = match &weight.data {
            Data::Packed(p) if p.group > ggml::BLOCK && p.bits == Bits::Four => Some(four_bits(p)),
            _ => None,
        };
        if let Some(other) = source.filter(|_| wide.is_some()).and_then(|s| s.get(*id)) {
            weight = other;
        }
        let kind = kind(*id, &weight, wide)?;
        let shape: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        let name = name(*id);
        // The experts of a layer come one after the other, three projections each.
        let begun = all.iter_mut().rev().take(3).find(|t| id.expert.is_some() && t.info.name == name);
        if let Some(tensor) = begun {
            tensor.info.shape[0] += 1;
            tensor.parts.push((*id, weight));
            continue;
        }
        let shape = if id.expert.is_some() { std::iter::once(1).chain(shape).collect() } else { shape };
        let order = permutation(weights, *id, &weight);
        let info = TensorInfo { name, kind, shape };
        all.push(Tensor { info, parts: vec![(*id, weight)], order, table: Vec::new() });
    }
    if let Scaling::LongRope { short, long, .. } = &spec.rope.scaling {
        for (name, factors) in [("rope_factors_long", long), ("rope_factors_short", short)] {
            let info = TensorInfo { name: format!("{name}.weight"), kind: Kind::F32, shape: vec![factors.len() as u64] };
            let table = factors.iter().map(|&x| x as f32).collect();
            all.push(Tensor { info, parts: Vec::new(), order: None, table });
        }
    }
    Ok(all)
}

/// Blocks of four-bit codes.
fn four_bits(p: &Packed<'_>) -> Kind {
    if p.zeros.is_some() { Kind::Q4_1 } else { Kind::Q4_0 }
}

/// Name in llama.cpp; the same for all experts of a layer.
fn name(id: TensorId) -> String {
    use Role::*;
    let inner = match id.role {
        Embed => "token_embd",
        FinalNorm => "output_norm",
        Head => "output",
        AttnNorm => "attn_norm",
        FfnNorm => "ffn_norm",
        Q => "attn_q",
        K => "attn_k",
        V => "attn_v",
        O => "attn_output",
        QNorm => "attn_q_norm",
        KNorm => "attn_k_norm",
        QA => "attn_q_a",
        QANorm => "attn_q_a_norm",
        QB => "attn_q_b",
        KvA => "attn_kv_a_mqa",
        KvANorm => "attn_kv_a_norm",
        KvB => "attn_kv_b",
        Router => "ffn_gate_inp",
        ExpertGate => "ffn_gate_exps",
        ExpertUp => "ffn_up_exps",
        ExpertDown => "ffn_down_exps",
        SharedGate => "ffn_gate_shexp",
        SharedUp => "ffn_up_shexp",
        SharedDown => "ffn_down_shexp",
        SharedRouter => "ffn_gate_inp_shexp",
        MlpGate => "ffn_gate",
        MlpUp => "ffn_up",
        MlpDown => "ffn_down",
    };
    let part = if id.part == Part::Bias { "bias" } else { "weight" };
    match id.layer {
        Some(layer) => format!("blk.{}.{inner}.{part}", layer.0),
        None => format!("{inner}.{part}"),
    }
}

/// The type a tensor gets. Packed codes keep their width; of floats, experts get 4 bits, other projections 8, embedding, head and
/// latent projections stay, and what llama.cpp adds or compares in full precision becomes F32. `anew` is the type of blocks of a
/// matrix that was taken from the source.
fn kind(id: TensorId, weight: &Weight<'_>, anew: Option<Kind>) -> Result<Kind, ExportError> {
    let whole = weight.cols.is_multiple_of(ggml::BLOCK);
    let float = match &weight.data {
        Data::Plain { dtype: Dtype::F16, .. } | Data::Gather { dtype: Dtype::F16, .. } => Kind::F16,
        Data::Plain { dtype: Dtype::F32, .. } | Data::Gather { dtype: Dtype::F32, .. } => Kind::F32,
        Data::Packed(p) if p.scale_dtype == Dtype::F16 => Kind::F16,
        Data::Packed(p) if p.scale_dtype == Dtype::F32 => Kind::F32,
        _ => Kind::BF16,
    };
    let vector = id.part == Part::Bias || id.role.component() == Component::Norms;
    Ok(match (&weight.data, id.role) {
        _ if vector => Kind::F32,
        (_, Role::Router | Role::SharedRouter) => Kind::F32,
        (Data::Packed(p), _) if ggml::fits(p.group, p.cols) => match (p.bits, p.zeros) {
            (Bits::Four, _) => four_bits(p),
            (Bits::Eight, None) => Kind::Q8_0,
            (Bits::Eight, Some(_)) => return Err(ExportError::Blocks { tensor: id.to_string(), format: p.format() }),
        },
        _ if !whole => float,
        (Data::Packed(p), _) => match p.bits {
            Bits::Four => four_bits(p),
            Bits::Eight => Kind::Q8_0,
        },
        _ if let Some(anew) = anew => anew,
        (_, Role::Embed | Role::Head | Role::QA | Role::KvA | Role::KvB) => float,
        _ if id.expert.is_some() => Kind::Q4_0,
        _ => Kind::Q8_0,
    })
}

/// Rows of q and k in the order of llama.cpp's rotary embedding: `(2 i, 2 i + 1)` for what were `(i, i + Dh / 2)`.
fn permutation(weights: &Weights, id: TensorId, weight: &Weight<'_>) -> Option<Vec<usize>> {
    if !matches!(id.role, Role::Q | Role::K) || !arch::pairs_are_neighbours(weights.family().model_type) {
        return None;
    }
    let Attn::Gqa(a) = &weights.spec().layers.get(id.layer?.0 as usize)?.attn else { return None };
    let half = a.head_dim / 2;
    let rows = if id.part == Part::Bias { weight.cols } else { weight.rows };
    Some((0..rows).map(|r| r / a.head_dim * a.head_dim + r % 2 * half + r % a.head_dim / 2).collect())
}

impl Tensor<'_> {
    /// Hands out the bytes in order, in pieces.
    pub fn write(&self, put: &mut Put<'_>) -> Result<(), ExportError> {
        if !self.table.is_empty() {
            let bytes: Vec<u8> = self.table.iter().flat_map(|x| x.to_le_bytes()).collect();
            return put(&bytes, Scales::default());
        }
        for (id, weight) in &self.parts {
            let row_bytes = self.info.kind.bytes(weight.cols as u64) as usize;
            let step = (CHUNK_ELEMENTS / weight.cols.max(1)).max(1);
            for start in (0..weight.rows).step_by(step) {
                let rows = start..(start + step).min(weight.rows);
                let mut bytes = vec![0; rows.len() * row_bytes];
                let counts = bytes
                    .par_chunks_exact_mut(row_bytes.max(1))
                    .zip(rows)
                    .map_init(Vec::new, |floats, (dst, row)| self.row(dst, *id, weight, row, floats))
                    .try_reduce(Scales::default, |a, b| Ok(Scales { all: a.all + b.all, rounded: a.rounded + b.rounded }))?;
                put(&bytes, counts)?;
            }
        }
        Ok(())
    }

    /// One row as it is written.
    fn row(
        &self,
        dst: &mut [u8],
        id: TensorId,
        weight: &Weight<'_>,
        row: usize,
        floats: &mut Vec<f32>,
    ) -> Result<Scales, ExportError> {
        let bias = id.part == Part::Bias;
        let from = match &self.order {
            Some(order) if !bias => order[row],
            _ => row,
        };
        if let (Data::Packed(p), Kind::Q4_0 | Kind::Q4_1 | Kind::Q8_0) = (&weight.data, self.info.kind)
            && ggml::fits(p.group, p.cols)
        {
            let rounded = ggml::repack_row(dst, p, from);
            return Ok(Scales { all: p.cols / p.group, rounded });
        }
        floats.resize(weight.cols, 0.0);
        weight
            .decode_rows(floats, from)
            .map_err(|source| ExportError::Decode { tensor: id.to_string(), source: Box::new(source) })?;
        if let (Some(order), true) = (&self.order, bias) {
            let plain = floats.clone();
            floats.iter_mut().zip(order).for_each(|(x, &i)| *x = plain[i]);
        }
        let (bits, zero) = match self.info.kind {
            Kind::F32 => return encoded(dst, Dtype::F32, floats),
            Kind::F16 => return encoded(dst, Dtype::F16, floats),
            Kind::BF16 => return encoded(dst, Dtype::BF16, floats),
            Kind::Q4_0 => (Bits::Four, Zero::Middle),
            Kind::Q4_1 => (Bits::Four, Zero::Point),
            Kind::Q8_0 => (Bits::Eight, Zero::Middle),
        };
        let round = ggml::quantize_rows(dst, floats, weight.cols, bits, zero);
        round.map_err(|source| ExportError::Round { tensor: id.to_string(), source })?;
        Ok(Scales { all: weight.cols / ggml::BLOCK, rounded: 0 })
    }
}

fn encoded(dst: &mut [u8], dtype: Dtype, floats: &[f32]) -> Result<Scales, ExportError> {
    tensor::encode(dst, dtype, floats);
    Ok(Scales::default())
}
