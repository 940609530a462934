//! Dense `f32` products through the `gemm` crate, behind slices whose bounds are checked.

/// A row-major matrix inside a slice: element `(i, j)` lies at `i * stride + j`.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Elements.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

fn fits(len: usize, rows: usize, cols: usize, stride: usize) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * stride + cols <= len
}

/// `dst[m, n] = scale * a[m, k] b[n, k]'`, on the calling thread.
pub fn product_transposed(dst: &mut [f32], dst_stride: usize, a: Rows<'_>, b: Rows<'_>, dims: [usize; 3], scale: f32) {
    let [_, n, k] = dims;
    assert!(fits(b.data.len(), n, k, b.stride));
    multiply(dst, dst_stride, a, b, [b.stride, 1], dims, scale);
}

/// `dst[m, n] = a[m, k] b[k, n]`, on the calling thread.
pub fn product(dst: &mut [f32], dst_stride: usize, a: Rows<'_>, b: Rows<'_>, dims: [usize; 3]) {
    let [_, n, k] = dims;
    assert!(fits(b.data.len(), k, n, b.stride));
    multiply(dst, dst_stride, a, b, [1, b.stride], dims, 1.0);
}

/// `dst[i, j] = scale * sum over l of a[i, l] b[l, j]`, element `(l, j)` of `b` at `j * step[0] + l * step[1]`, which the callers
/// have checked to lie in it.
fn multiply(dst: &mut [f32], dst_stride: usize, a: Rows<'_>, b: Rows<'_>, step: [usize; 2], dims: [usize; 3], scale: f32) {
    let [m, n, k] = dims;
    assert!(fits(dst.len(), m, n, dst_stride) && fits(a.data.len(), m, k, a.stride));
    // SAFETY: every index that the strides can form inside the given dimensions was checked to lie in its slice, `b`'s by the
    // callers, and `dst` is borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            dst_stride as isize,
            false,
            a.data.as_ptr(),
            1,
            a.stride as isize,
            b.data.as_ptr(),
            step[0] as isize,
            step[1] as isize,
            0.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
