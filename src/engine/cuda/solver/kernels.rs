//! Launchers of `kernels/solve.cu`, and the structures it takes.

use crate::engine::cuda::module::kernels;

kernels! {
    /// Codes and scales.
    Kernels {
        solve_finite(src: u64, n: u64, bad: u64);
        solve_owed(dst: u64, products: u64, debt: u64, scale: u64, order: u64, tiles: u64, cols: i32);
        solve_aim(src: u64, change: u64, order: u64, tiles: u64, cols: i32, lost: u64);
        solve_scales(grid: u64, src: u64, energy: u64, tiles: u64, form: Form, bad: u64);
        solve_round(codes: u64, src: u64, grid: u64, form: Form, n: u64);
        solve_rest(dst: u64, src: u64, codes: u64, grid: u64, form: Form, n: u64);
        solve_signed(dst: u64, codes: u64, form: Form, n: u64);
        solve_stretch(dst: u64, src: u64, factor: f32, scale_kind: i32, n: u64);
        solve_dots(losses: u64, d: u64, product: u64, diagonal: u64, tiles: u64, cols: i32);
        solve_visit(w: u64, src: u64, order: u64, tiles: u64, cols: i32);
        solve_feed(w: u64, errors: u64, codes: u64, losses: u64, grid: u64, upper: u64, weight: u64, order: u64, tiles: u64, form: Form, first: i32);
        solve_improve(codes: u64, grid: u64, losses: u64, other_codes: u64, other_grid: u64, other_losses: u64, tiles: u64, form: Form);
        solve_equations(a: u64, b: u64, product: u64, codes: u64, src: u64, tiles: u64, form: Form, g: i32, base: i32);
        solve_refit(refitted: u64, grid: u64, a: u64, b: u64, tiles: u64, form: Form, base: i32);
        solve_sweep(codes: u64, gradient: u64, losses: u64, grid: u64, used: u64, own: u64, tiles: u64, form: Form, sweeps: i32);
        solve_pack(words: u64, scales: u64, losses: u64, before: u64, codes: u64, grid: u64, plain: u64, src: u64, tiles: u64, form: Form, fed: i32);
        solve_energies(dst: u64, sums: u64, cols: i32, full: i32);
        solve_moments(sets: u64, which: u64, correlated: u64, cols: i32, side: i32);
        solve_diagonal(sets: u64, which: u64, failed: u64, side: i32, step: i32);
        solve_panel(sets: u64, which: u64, side: i32, step: i32);
        solve_inverse(sets: u64, which: u64, side: i32, step: i32);
        solve_upper(sets: u64, which: u64, cols: i32, side: i32);
    }
}

/// How rows are stored; `Form` in `solve.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Form {
    pub cols: i32,
    pub group: i32,
    pub bits: i32,
    pub scale_kind: i32,
    pub positive: i32,
}

/// Rows of one matrix; `Tile` in `solve.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Tile {
    pub first: i32,
    pub rows: i32,
    pub moments: i32,
    pub pad: i32,
}

/// Second moments, and what they become; `Prepared` in `solve.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Prepared {
    pub sums: u64,
    pub energy: u64,
    pub order: u64,
    pub used: u64,
    pub own: u64,
    pub square: u64,
    pub inverse: u64,
    pub upper: u64,
    pub weight: u64,
    pub cost: u64,
    pub scale: f64,
    pub damping: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cuda::module::tests::parameters;

    /// A launcher whose parameters differ from the kernel's would corrupt memory; fails on any missing or swapped type.
    #[test]
    fn launchers_have_the_parameters_of_the_kernels() {
        let source = include_str!("../../../../kernels/solve.cu");
        for (kernel, types) in Kernels::SIGNATURES {
            assert_eq!(parameters(source, kernel), *types, "{kernel}");
        }
        assert_eq!(source.matches("extern \"C\" __global__").count(), Kernels::SIGNATURES.len());
        assert_eq!((size_of::<Form>(), size_of::<Tile>(), size_of::<Prepared>()), (20, 16, 96));
    }
}
