//! Scalars as they lie in files: element types, byte views, and their exact conversion to `f32`.
//!
//! Knows bits. Must not know files, names or models. All multi-byte values are little endian, as safetensors requires.

use std::fmt;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit brain float.
    BF16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (OCP FP8 E4M3).
    F8E4M3,
    /// 8-bit power of two, bias 127, 255 is NaN (OCP MX scale).
    F8E8M0,
    /// Unsigned bytes.
    U8,
    /// Signed bytes.
    I8,
    /// 32-bit signed integers; packed words of quantized weights.
    I32,
    /// 64-bit signed integers.
    I64,
    /// Any other type, of which only the element size is known; can be copied through but not computed with.
    Other {
        /// Name as the file spells it.
        name: &'static str,
        /// Bits of one element.
        bits: u8,
    },
}

impl Dtype {
    /// Bits of one element.
    pub fn bits(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 32,
            Dtype::F16 | Dtype::BF16 => 16,
            Dtype::F8E4M3 | Dtype::F8E8M0 | Dtype::U8 | Dtype::I8 => 8,
            Dtype::I64 => 64,
            Dtype::Other { bits, .. } => bits as usize,
        }
    }

    /// Name as safetensors spells it.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
            Dtype::F8E4M3 => "F8_E4M3",
            Dtype::F8E8M0 => "F8_E8M0",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::I32 => "I32",
            Dtype::I64 => "I64",
            Dtype::Other { name, .. } => name,
        }
    }

    /// Whether values convert to `f32` without a separate scale tensor.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// Bytes of `n` elements, rounded up for sub-byte types.
    pub fn bytes(self, n: usize) -> usize {
        (self.bits() * n).div_ceil(8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor lying in memory, row-major, borrowed from a mapped file.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// `dtype.bytes(num_elements)` bytes, of no particular alignment.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values as `f32`; `None` for types that are not plain floats.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        if !self.dtype.is_float() {
            return None;
        }
        let mut out = vec![0.0; self.len()];
        decode(&mut out, self.dtype, self.bytes);
        Some(out)
    }
}

/// Decodes `dst.len()` values of a plain float type.
///
/// # Panics
/// If `dtype` is not a plain float or `src` is shorter than `dst` needs.
pub fn decode(dst: &mut [f32], dtype: Dtype, src: &[u8]) {
    match dtype {
        Dtype::F32 => {
            dst.iter_mut().zip(src.chunks_exact(4)).for_each(|(d, s)| *d = f32::from_le_bytes([s[0], s[1], s[2], s[3]]))
        }
        Dtype::BF16 => {
            dst.iter_mut().zip(src.chunks_exact(2)).for_each(|(d, s)| *d = bf16_to_f32(u16::from_le_bytes([s[0], s[1]])))
        }
        Dtype::F16 => {
            dst.iter_mut().zip(src.chunks_exact(2)).for_each(|(d, s)| *d = half::f16::from_le_bytes([s[0], s[1]]).to_f32())
        }
        Dtype::F8E4M3 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = e4m3_to_f32(s)),
        other => panic!("{other} is not a float type"),
    }
}

/// Encodes values into a plain float type, rounding half to even.
///
/// # Panics
/// If `dtype` is not `F32`, `F16` or `BF16`, or the lengths disagree.
pub fn encode(dst: &mut [u8], dtype: Dtype, src: &[f32]) {
    assert_eq!(dst.len(), dtype.bytes(src.len()));
    match dtype {
        Dtype::F32 => dst.chunks_exact_mut(4).zip(src).for_each(|(d, s)| d.copy_from_slice(&s.to_le_bytes())),
        Dtype::BF16 => {
            dst.chunks_exact_mut(2).zip(src).for_each(|(d, &s)| d.copy_from_slice(&half::bf16::from_f32(s).to_le_bytes()))
        }
        Dtype::F16 => {
            dst.chunks_exact_mut(2).zip(src).for_each(|(d, &s)| d.copy_from_slice(&half::f16::from_f32(s).to_le_bytes()))
        }
        other => panic!("{other} is not a float type"),
    }
}

/// `x` rounded to the nearest value of a plain float type, ties to even.
pub fn round_to(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::BF16 => half::bf16::from_f32(x).to_f32(),
        Dtype::F16 => half::f16::from_f32(x).to_f32(),
        other => panic!("{other} is not a float type"),
    }
}

/// The value of a brain float.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The value of an E4M3 byte: bias 7, `0x7f`/`0xff` are NaN, no infinities (OCP FP8, section 5.2).
pub fn e4m3_to_f32(bits: u8) -> f32 {
    let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exp, man) = ((bits >> 3) & 15, (bits & 7) as f32);
    match (exp, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * man * (-9f32).exp2(),
        _ => sign * (1.0 + man / 8.0) * (exp as f32 - 7.0).exp2(),
    }
}

/// The value of a four-bit E2M1 code: sign, two exponent bits of bias 1, one mantissa bit (OCP MX v1.0, section 5.3.3).
pub fn e2m1_to_f32(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// The value of an E8M0 byte: `2^(bits - 127)`, 255 is NaN (OCP MX v1.0, section 5.4.1).
pub fn e8m0_to_f32(bits: u8) -> f32 {
    if bits == 255 { f32::NAN } else { (bits as f32 - 127.0).exp2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_spans_its_range() {
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(e4m3_to_f32(0xb8), -1.0);
        assert!(e4m3_to_f32(0xff).is_nan());
    }

    #[test]
    fn plain_floats_survive_a_round_trip() {
        let src = [0.0, -1.5, 3.0, 1024.0, -0.0078125];
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let mut bytes = vec![0; dtype.bytes(src.len())];
            encode(&mut bytes, dtype, &src);
            let mut back = [0.0; 5];
            decode(&mut back, dtype, &bytes);
            assert_eq!(src, back, "{dtype}");
        }
    }
}
