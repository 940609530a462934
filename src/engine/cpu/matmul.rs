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
    let [m, n, k] = dims;
    assert!(fits(dst.len(), m, n, dst_stride) && fits(a.data.len(), m, k, a.stride) && fits(b.data.len(), n, k, b.stride));
    // SAFETY: every index `(i, j)` that the strides can form inside the given dimensions was just checked to lie in its slice,
    // and `dst` is borrowed mutably, so it overlaps neither operand.
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
            b.stride as isize,
            1,
            0.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `dst[m, n] = a[m, k] b[k, n]`, on the calling thread.
pub fn product(dst: &mut [f32], dst_stride: usize, a: Rows<'_>, b: Rows<'_>, dims: [usize; 3]) {
    let [m, n, k] = dims;
    assert!(fits(dst.len(), m, n, dst_stride) && fits(a.data.len(), m, k, a.stride) && fits(b.data.len(), k, n, b.stride));
    // SAFETY: as in `product_transposed`.
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
            1,
            b.stride as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
