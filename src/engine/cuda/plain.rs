//! Launchers of `kernels/plain.cu`, and the structures they take by value.

use super::module::{kernels, structs};

/// How elements of a weight are stored; `Kind` in `plain.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Kind {
    /// 32-bit floats.
    F32 = 0,
    /// Brain floats.
    Bf16 = 1,
    /// 16-bit IEEE floats.
    F16 = 2,
    /// Packed 4-bit codes.
    Int4 = 3,
    /// Packed 8-bit codes.
    Int8 = 4,
}

structs! {
    /// A weight on the device.
    #[derive(Debug, PartialEq, Eq)]
    pub Matrix in "plain.cu" {
        /// Address of the floats or words; 0: absent.
        data: u64,
        /// Address of the scales; 0: none.
        scales: u64,
        /// Rows.
        rows: i32,
        /// Columns.
        cols: i32,
        /// Columns a scale covers.
        group: i32,
        /// Stored elements.
        kind: Kind,
        /// Stored scales.
        scale_kind: Kind,
        /// Where the zero points begin, in units of 16 bytes from `data`; 0: the middle code is zero.
        zeros: i32,
    }
    /// Where the tokens of a batch keep their keys and values.
    pub(super) Pages in "plain.cu" {
        position: u64,
        row: u64,
        table: u64,
        stride: i32,
        kind: Kind,
        turned: i32,
    }
    /// A router's rule.
    pub(super) Router in "plain.cu" {
        experts: i32,
        top_k: i32,
        softmax_of_chosen: i32,
        select: i32,
        groups: i32,
        keep: i32,
        renorm: i32,
        jitter: f32,
        scale: f32,
    }
}

impl Matrix {
    /// No weight.
    pub const NONE: Matrix =
        Matrix { data: 0, scales: 0, rows: 0, cols: 0, group: 1, kind: Kind::F32, scale_kind: Kind::F32, zeros: 0 };
}

kernels! {
    /// The plain kernels.
    Plain {
        plain_embed(dst: u64, dst_stride: i32, table: Matrix, tokens: u64, scale: f32);
        plain_norm(dst: u64, dst_stride: i32, src: u64, src_stride: i32, gain: Matrix, bias: Matrix, layer: i32, eps: f32, width: i32);
        plain_linear(dst: u64, dst_stride: i32, src: u64, src_stride: i32, pick: u64, w: Matrix, bias: Matrix, scale: f32, num_tok: i32);
        plain_clip(buf: u64, n: u64, limit: f32);
        plain_rope(buf: u64, row_stride: i32, stride: i32, offset: i32, cos: u64, sin: u64, half: i32, interleaved: i32);
        plain_append(cache: u64, src: u64, src_stride: i32, pages: Pages, dim: i32);
        plain_attend(dst: u64, dst_stride: i32, q: u64, q_stride: i32, keys: u64, values: u64, pages: Pages, kv_heads: i32, dim: i32, scale: f32, window: i32);
        plain_latent_query(dst: u64, q: u64, q_stride: i32, up: Matrix, nope: i32, rope: i32, v: i32);
        plain_attend_latent(dst: u64, q: u64, latents: u64, pages: Pages, rank: i32, rope: i32, scale: f32);
        plain_latent_value(dst: u64, dst_stride: i32, mixed: u64, up: Matrix, nope: i32, v: i32);
        plain_route(experts: u64, gates: u64, logits: u64, router: Router);
        plain_experts_gate_up(inner: u64, src: u64, src_stride: i32, table: u64, experts: u64, top_k: i32, width: i32);
        plain_experts_down(dst: u64, dst_stride: i32, inner: u64, table: u64, experts: u64, gates: u64, top_k: i32, width: i32, model_width: i32);
        plain_gated_act(gate: u64, up: u64, n: u64);
        plain_add_gated(acc: u64, add: u64, gate: u64, width: i32);
        plain_add(acc: u64, add: u64, n: u64, scale: f32);
        plain_random(dst: u64, n: u64, seed: u64, kind: i32, scale: f32);
        plain_fill(dst: u64, n: u64, kind: i32, value: f32);
        plain_read(sink: u64, src: u64, n: u64);
        plain_pick(dst: u64, src: u64, src_stride: i32, pick: u64, width: i32);
        plain_rotations(cos: u64, sin: u64, cosines: u64, sines: u64, position: u64, half: i32);
    }
}

#[cfg(test)]
mod tests {
    use super::super::module::tests::{are_declared, parameters};
    use super::*;

    /// A launcher whose parameters differ from the kernel's would corrupt memory; fails on any missing or swapped type.
    #[test]
    fn launchers_have_the_parameters_of_the_kernels() {
        let source = include_str!("../../../kernels/plain.cu");
        for (kernel, types) in Plain::SIGNATURES {
            assert_eq!(parameters(source, kernel), *types, "{kernel}");
        }
        assert_eq!(source.matches("extern \"C\" __global__").count(), Plain::SIGNATURES.len());
        are_declared(STRUCTS);
    }
}
