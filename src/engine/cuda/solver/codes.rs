//! Second moments to codes: factorised in `f64`, then the search of `quant::feed` over all rows at once.

use super::super::device::CudaError;
use super::super::launch::{self, Grid};
use super::super::layout::float_kind;
use super::super::memory::{Buffer, aligned};
use super::super::plain::{Kind, Matrix};
use super::super::stager::Stager;
use super::super::tiles;
use super::kernels::{Form, Prepared, Tile};
use super::{Solver, Sums};
use crate::artifact::weights::{Data, Weight, Weights};
use crate::engine::solver::{Chosen, Job, SolverError, Work};
use crate::ids::TensorId;
use crate::quant::format::OwnedPacked;
use crate::quant::gptq::{Basis, DAMPING, FeedbackError, Loss, MOST_DAMPING, REFITS, STRETCH, SWEEPS};
use crate::quant::round::{RoundError, Rounding};
use std::collections::BTreeMap;
use std::ops::Range;

/// Columns whose errors are carried to the rest by one product; `BLOCK` in `solve.cu`.
const BLOCK: usize = 128;
/// Side of the squares of a factorisation; `SIDE` in `solve.cu`.
const SIDE: usize = 64;
/// Rows of a tile of products, and of one of kernels with a warp a row.
const COARSE: usize = 128;
const FINE: usize = 32;
/// Bytes of the equations of scales that are solved at a time.
const EQUATION_BYTES: usize = 512 << 20;

/// Moments of the jobs of a run, ready for use.
pub(super) struct Factors {
    bases: Vec<Basis>,
    pub dampings: Vec<f64>,
    /// Whether feedback has anything to carry.
    fed: Vec<bool>,
    /// Addresses, one for each job.
    energy: Buffer,
    order: Buffer,
    used: Buffer,
    own: Buffer,
    upper: Buffer,
    weight: Buffer,
    cost: Buffer,
    /// What they point to.
    _memory: [Buffer; 2],
}

/// A job with its place among those that were given.
pub(super) type Numbered = (usize, Job<Sums>);

/// A matrix of a run, or some rows of one.
pub(super) struct Placed<'a> {
    pub job: usize,
    pub id: TensorId,
    pub weight: Weight<'a>,
    pub first_row: usize,
    pub rows: usize,
    /// Which rows of the weight, where not all.
    pub which: Option<&'a [usize]>,
}

/// The best so far, or a try: codes `[R, K]`, scales `[R, K / group]`, losses `[R]`.
struct Found {
    codes: Buffer,
    grid: Buffer,
    losses: Buffer,
}

impl Solver {
    /// Jobs of one width at a time, as many as fit.
    pub(super) fn choose_all(&mut self, weights: &Weights, jobs: Vec<Job<Sums>>) -> Result<Vec<Vec<Chosen>>, SolverError> {
        let mut found: Vec<Vec<Chosen>> = jobs.iter().map(|_| Vec::new()).collect();
        let mut widths: BTreeMap<(usize, bool), Vec<Numbered>> = BTreeMap::new();
        for (i, mut job) in jobs.into_iter().enumerate() {
            if let Some(head) = job.sums.head.take() {
                found[i] = self.choose_by_sets(weights, job, *head)?;
                continue;
            }
            widths.entry((job.sums.cols, job.sums.full)).or_default().push((i, job));
        }
        for ((cols, full), jobs) in widths {
            let bytes = |job: &Job<Sums>| {
                let rows = |id: &TensorId| weights.get(*id).map_or(0, |w| w.rows);
                job_bytes(cols, full, job.matrices.iter().map(|(id, _)| rows(id)).sum())
            };
            let mut run: Vec<Numbered> = Vec::new();
            let mut taken = EQUATION_BYTES as u64;
            let room = self.room()?;
            for (i, job) in jobs {
                if !run.is_empty() && taken + bytes(&job) > room {
                    self.choose_run(weights, std::mem::take(&mut run), &mut found)?;
                    taken = EQUATION_BYTES as u64;
                }
                taken += bytes(&job);
                run.push((i, job));
            }
            self.choose_run(weights, run, &mut found)?;
        }
        Ok(found)
    }

    fn choose_run(&mut self, weights: &Weights, run: Vec<Numbered>, found: &mut [Vec<Chosen>]) -> Result<(), SolverError> {
        let mut placed = Vec::new();
        let mut rows = 0;
        for (j, (_, job)) in run.iter().enumerate() {
            for (id, _) in &job.matrices {
                let Some(weight) = weights.get(*id) else { continue };
                rows += weight.rows;
                placed.push(Placed { job: j, id: *id, first_row: rows - weight.rows, rows: weight.rows, which: None, weight });
            }
        }
        let Some((_, first)) = run.first().filter(|_| rows > 0) else { return Ok(()) };
        let cols = first.sums.cols;
        let factors = self.timed(Work::Factors, |s| s.factors(&run))?;
        let src = self.timed(Work::Weights, |s| s.bring(&placed, rows, cols))?;
        self.timed(Work::Codes, |s| s.aim(&run, &placed, &src, &factors))?;
        let mut chosen: Vec<Chosen> =
            placed.iter().map(|p| Chosen { id: p.id, codes: Vec::new(), damping: factors.dampings[p.job] }).collect();
        // Matrices of one way of storing at a time; most often all.
        let most = run.iter().flat_map(|(_, job)| &job.matrices).map(|(_, ways)| ways.len()).max().unwrap_or(0);
        for turn in 0..most {
            let way = |p: &Placed<'_>| {
                let ways = run[p.job].1.matrices.iter().find(|(id, _)| *id == p.id).map(|(_, ways)| ways);
                ways.and_then(|w| w.get(turn)).copied()
            };
            let mut left: Vec<usize> = (0..placed.len()).filter(|&i| way(&placed[i]).is_some()).collect();
            while let Some(how) = left.first().and_then(|&i| way(&placed[i])) {
                let (now, later): (Vec<usize>, Vec<usize>) = left.iter().partition(|&&i| way(&placed[i]) == Some(how));
                let some: Vec<&Placed<'_>> = now.iter().map(|&i| &placed[i]).collect();
                let results = self.timed(Work::Codes, |s| s.search(&some, rows, cols, &src, &factors, &how))?;
                for (i, result) in now.into_iter().zip(results) {
                    chosen[i].codes.push(result);
                }
                left = later;
            }
        }
        for (p, chosen) in placed.iter().zip(chosen) {
            found[run[p.job].0].push(chosen);
        }
        Ok(())
    }

    /// Brings matrices to the device as floats, `[R, K]`.
    pub(super) fn bring(&self, placed: &[Placed<'_>], rows: usize, cols: usize) -> Result<Buffer, SolverError> {
        fn stored<'w>(p: &Placed<'w>) -> Option<(Kind, &'w [u8])> {
            match &p.weight.data {
                Data::Plain { dtype, bytes } => Some((float_kind(*dtype), *bytes)),
                _ => None,
            }
        }
        let src = Buffer::new(&self.device, 4 * rows * cols)?;
        // Where the source runs beside, its floats are there.
        let there = |p: &Placed<'_>| match self.source.as_ref().filter(|_| stored(p).is_some()) {
            Some(beside) => beside.stream.engine.store.find(p.id).map(|m| Some(m).filter(|m| m.data != 0)),
            None => Ok(None),
        };
        let there = placed.iter().map(there).collect::<Result<Vec<Option<Matrix>>, CudaError>>()?;
        let absent = placed.iter().zip(&there).filter(|(_, there)| there.is_none()).filter_map(|(p, _)| stored(p));
        let bytes: usize = absent.map(|(_, bytes)| aligned(bytes.len())).sum();
        let raw = Buffer::new(&self.device, bytes)?;
        let mut stager = Stager::new(&self.device, bytes)?;
        let mut at = 0;
        let mut decoded = Vec::new();
        for (p, there) in placed.iter().zip(there) {
            match (stored(p), there) {
                (_, Some(matrix)) => decoded.push((p.first_row, matrix)),
                (Some((kind, bytes)), None) => {
                    stager.push(&raw, at, bytes)?;
                    let (rows, group) = (p.rows as i32, cols as i32);
                    let matrix = Matrix { data: raw.at(at), rows, cols: cols as i32, group, kind, ..Matrix::NONE };
                    decoded.push((p.first_row, matrix));
                    at += aligned(bytes.len());
                }
                (None, None) => {
                    let values = p.weight.to_f32().map_err(|e| SolverError::Weight { id: p.id, source: Box::new(e) })?;
                    self.device.upload(&src, 4 * p.first_row * cols, &values)?;
                }
            }
        }
        stager.finish()?;
        for (first_row, matrix) in decoded {
            let grid = launch::elements(matrix.rows as usize * cols);
            self.tiles.tiles_decode(grid, src.at(4 * first_row * cols), matrix)?;
        }
        // `raw` is freed once the kernels are done.
        Ok(src)
    }

    /// Makes of matrices `src` those to come nearest to: `src + (src drift + debt) H^-1`, as `Feedback` does.
    pub(super) fn aim(
        &self,
        run: &[Numbered],
        placed: &[Placed<'_>],
        src: &Buffer,
        factors: &Factors,
    ) -> Result<(), SolverError> {
        let sums = |p: &Placed<'_>| &run[p.job].1.sums;
        let owed: Vec<&Placed<'_>> = placed.iter().filter(|p| factors.fed[p.job] && sums(p).drift != 0).collect();
        let Some(cols) = owed.first().map(|p| sums(p).cols) else { return Ok(()) };
        let (device, k, n) = (&self.device, &self.kernels, src.bytes() / 4);
        let mut bad = [u64::MAX];
        let place = Buffer::from_slice(device, &bad)?;
        k.solve_finite(launch::elements(n), src.at(0), n as u64, place.at(0))?;
        device.download(&mut bad, &place, 0)?;
        // A value that is no number is left for rounding to find where it is.
        if bad[0] != u64::MAX {
            return Ok(());
        }
        let lists = Lists::new(self, &owed.iter().collect::<Vec<_>>())?;
        let mut debt = vec![0u64; run.len()];
        for p in owed.iter().filter(|p| sums(p).debt != 0) {
            // Only a matrix alone with its inputs pays.
            debug_assert_eq!(run[p.job].1.matrices.len(), 1);
            debt[p.job] = sums(p).debt.wrapping_sub(4 * (p.first_row * cols) as u64);
        }
        let debt = Buffer::from_slice(device, &debt)?;
        let drift = Buffer::from_slice(device, &run.iter().map(|(_, job)| job.sums.drift).collect::<Vec<_>>())?;
        let scale = Buffer::from_slice(device, &factors.bases.iter().map(|b| b.shrink as f32).collect::<Vec<_>>())?;
        let lost = Buffer::from_slice(device, &vec![0u32; run.len()])?;
        let (one, other) = (Buffer::new(device, src.bytes())?, Buffer::new(device, src.bytes())?);
        let (products, rows) = (tiles::columns(cols, lists.each.len()), lists.rows());
        let (fine, coarse, width) = (lists.fine.at(0), lists.coarse.at(0), cols as i32);
        let (upper, weight, order) = (factors.upper.at(0), factors.weight.at(0), factors.order.at(0));
        self.tiles.tiles_rows(products, one.at(0), src.at(0), width, 0, drift.at(0), 0, coarse, width, width, 0, 0)?;
        k.solve_owed(rows, other.at(0), one.at(0), debt.at(0), scale.at(0), order, fine, width)?;
        self.tiles.tiles_back(products, one.at(0), other.at(0), upper, weight, coarse, width)?;
        self.tiles.tiles_forth(products, other.at(0), one.at(0), upper, coarse, width)?;
        k.solve_aim(rows, src.at(0), other.at(0), order, fine, width, lost.at(0))?;
        let mut failed = vec![0u32; run.len()];
        device.download(&mut failed, &lost, 0)?;
        match owed.iter().find(|p| failed[p.job] != 0) {
            Some(p) => Err(SolverError::Codes { id: p.id, source: FeedbackError::NonFinite }),
            None => Ok(()),
        }
    }

    /// Shrinks, damps and factorises the moments of some jobs of one width.
    pub(super) fn factors(&self, run: &[Numbered]) -> Result<Factors, SolverError> {
        let (device, n) = (&self.device, run.len());
        let (cols, full) = run.first().map_or((0, false), |(_, job)| (job.sums.cols, job.sums.full));
        let side = cols.next_multiple_of(SIDE);
        let addresses: Vec<u64> = run.iter().map(|(_, job)| job.sums.at()).collect();
        let sums = Buffer::from_slice(device, &addresses)?;
        let energies = Buffer::new(device, 4 * n * cols)?;
        let grid = Grid::new([cols.div_ceil(256), n, 1], 256);
        self.kernels.solve_energies(grid, energies.at(0), sums.at(0), cols as i32, full as i32)?;
        let mut diagonals = vec![0.0f32; n * cols];
        device.download(&mut diagonals, &energies, 0)?;
        let mut bases = Vec::with_capacity(n);
        let mut tokens = Vec::with_capacity(n);
        for ((_, job), diagonal) in run.iter().zip(diagonals.chunks_exact(cols)) {
            tokens.push(crate::engine::solver::Solver::tokens(self, &job.sums)?);
            let id = || job.matrices.first().map_or(TensorId::global(crate::ids::Role::Embed), |(id, _)| *id);
            let basis = Basis::of(diagonal, tokens[bases.len()]);
            bases.push(basis.map_err(|source| SolverError::Codes { id: id(), source })?);
        }
        // Vectors: energy, own, weight, cost, order; matrices: used and upper. Squares go once the factors are there.
        let vector = aligned(4 * cols);
        let matrix = if full { aligned(4 * cols * cols) } else { 0 };
        let square = if full { aligned(8 * side * side) } else { 0 };
        let kept = [Buffer::new(device, 5 * n * vector)?, Buffer::new(device, 2 * n * matrix)?];
        let squares = Buffer::new(device, 2 * n * square)?;
        let of = |i: usize, which: usize| kept[0].at((5 * i + which) * vector);
        let mut sets: Vec<Prepared> = (0..n)
            .map(|i| Prepared {
                sums: addresses[i],
                energy: of(i, 0),
                own: of(i, 1),
                weight: of(i, 2),
                cost: of(i, 3),
                order: of(i, 4),
                used: kept[1].at(2 * i * matrix),
                upper: kept[1].at((2 * i + 1) * matrix),
                square: squares.at(2 * i * square),
                inverse: squares.at((2 * i + 1) * square),
                scale: bases[i].shrink,
                damping: DAMPING,
            })
            .collect();
        for (i, basis) in bases.iter().enumerate() {
            device.upload(&kept[0], 5 * i * vector, &basis.energy)?;
            let order: Vec<u32> = basis.order.iter().map(|&c| c as u32).collect();
            device.upload(&kept[0], (5 * i + 4) * vector, &order)?;
            // Without correlation errors are weighed by energies alone.
            device.upload(&kept[0], (5 * i + 1) * vector, &basis.energy)?;
        }
        let (mut fed, mut dampings) = (vec![false; n], vec![0.0; n]);
        let mut left: Vec<u32> = (0..n as u32).filter(|&i| full && tokens[i as usize] > 0).collect();
        let mut damping = DAMPING;
        while !left.is_empty() {
            for &i in &left {
                (sets[i as usize].damping, dampings[i as usize]) = (damping, damping);
            }
            let (correlated, failed) = self.factorise(&sets, &left, cols, side)?;
            for &i in &left {
                let i = i as usize;
                fed[i] = correlated[i] && !failed[i];
                if !correlated[i] {
                    dampings[i] = 0.0;
                    device.upload(&kept[0], (5 * i + 1) * vector, &bases[i].energy)?;
                }
            }
            left.retain(|&i| correlated[i as usize] && failed[i as usize]);
            damping *= 10.0;
            if damping > MOST_DAMPING {
                break;
            }
        }
        for &i in &left {
            dampings[i as usize] = damping;
            device.upload(&kept[0], (5 * i as usize + 1) * vector, &bases[i as usize].energy)?;
        }
        let pointers = |f: &dyn Fn(&Prepared) -> u64| Buffer::from_slice(device, &sets.iter().map(f).collect::<Vec<u64>>());
        Ok(Factors {
            energy: pointers(&|p| p.energy)?,
            order: pointers(&|p| p.order)?,
            used: pointers(&|p| p.used)?,
            own: pointers(&|p| p.own)?,
            upper: pointers(&|p| p.upper)?,
            weight: pointers(&|p| p.weight)?,
            cost: pointers(&|p| p.cost)?,
            bases,
            dampings,
            fed,
            _memory: kept,
        })
    }

    /// Whether the moments of each set have products of different columns, and whether it has no factor.
    fn factorise(&self, sets: &[Prepared], which: &[u32], cols: usize, side: usize) -> Result<(Vec<bool>, Vec<bool>), CudaError> {
        let (device, k) = (&self.device, &self.kernels);
        let prepared = Buffer::from_slice(device, sets)?;
        let list = Buffer::from_slice(device, which)?;
        let flags = Buffer::new(device, 8 * sets.len())?;
        flags.clear()?;
        let (of, list, failed) = (prepared.at(0), list.at(0), flags.at(4 * sets.len()));
        let (n, columns, s) = (which.len(), cols as i32, side as i32);
        let shared = 2 * 8 * SIDE * (SIDE + 1);
        k.solve_moments(Grid::new([side.div_ceil(256), side, n], 256), of, list, flags.at(0), columns, s)?;
        let squares = side / SIDE;
        for step in 0..squares {
            k.solve_diagonal(Grid::new([n, 1, 1], 256).shared(shared), of, list, failed, s, step as i32)?;
            k.solve_panel(Grid::new([squares - step - 1, n, 1], 256).shared(shared), of, list, s, step as i32)?;
        }
        for step in 1..squares {
            k.solve_inverse(Grid::new([step, n, 1], 256).shared(shared), of, list, s, step as i32)?;
        }
        k.solve_upper(Grid::new([cols.div_ceil(256), cols, n], 256), of, list, columns, s)?;
        let mut found = vec![0u32; 2 * sets.len()];
        device.download(&mut found, &flags, 0)?;
        let (correlated, failed) = found.split_at(sets.len());
        Ok((correlated.iter().map(|&x| x != 0).collect(), failed.iter().map(|&x| x != 0).collect()))
    }

    /// Codes and scales of matrices that are stored alike, among all rows of a run.
    pub(super) fn search(
        &self,
        placed: &[&Placed<'_>],
        rows: usize,
        cols: usize,
        src: &Buffer,
        factors: &Factors,
        how: &Rounding,
    ) -> Result<Vec<(OwnedPacked, Loss)>, SolverError> {
        let group = how.group.columns(cols);
        let kind = float_kind(how.scale_dtype);
        let form = Form {
            cols: cols as i32,
            group: group as i32,
            bits: how.bits.count() as i32,
            scale_kind: kind as i32,
            positive: how.positive_scales as i32,
        };
        let search = Search::new(self, placed, rows, src, factors, form)?;
        search.run()?;
        let words_each = cols / how.bits.per_word();
        let words = Buffer::new(&self.device, 4 * rows * words_each)?;
        let scale_bytes = if kind == Kind::F32 { 4 } else { 2 };
        let scales = Buffer::new(&self.device, scale_bytes * rows * (cols / group))?;
        search.pack(&words, &scales)?;
        if let Some((p, error)) = search.fault(placed)? {
            return Err(SolverError::Codes { id: p.id, source: error });
        }
        let [before, after, whole] = [&search.before, &search.best.losses, &search.whole].map(|buffer| {
            let mut values = vec![0.0f64; rows];
            self.device.download(&mut values, buffer, 0).map(|()| values)
        });
        let (before, after, whole) = (before?, after?, whole?);
        let mut results = Vec::with_capacity(placed.len());
        for p in placed {
            let mut packed = OwnedPacked::zeroed(p.rows, cols, how.format(), how.scale_dtype);
            self.device.download(&mut packed.words, &words, 4 * p.first_row * words_each)?;
            self.device.download(&mut packed.scales, &scales, scale_bytes * p.first_row * (cols / group))?;
            let sum = |x: &[f64]| x[p.first_row..p.first_row + p.rows].iter().sum::<f64>() * factors.bases[p.job].mean;
            results.push((packed, Loss { before: sum(&before), after: sum(&after), whole: sum(&whole) }));
        }
        Ok(results)
    }
}

/// Bytes that a job takes besides its sums.
fn job_bytes(cols: usize, full: bool, rows: usize) -> u64 {
    let side = cols.next_multiple_of(SIDE);
    let moments = if full { 8 * cols * cols + 16 * side * side } else { 0 } + 20 * cols;
    // Floats: source, working rows, products. Half a float at most of what is stored, one of codes and words, scales of groups of 32.
    let row = if full { 12 * cols + 4 * BLOCK } else { 8 * cols } + 2 * cols + 3 * cols + cols / 2 + 64;
    (moments + rows * row) as u64
}

/// Tiles of rows: fine ones for kernels with a warp a row, coarse ones for products.
struct Lists {
    fine: Buffer,
    num_fine: usize,
    coarse: Buffer,
    /// What is in `coarse`, each with its first fine tile.
    each: Vec<(Tile, usize)>,
}

impl Lists {
    fn new(solver: &Solver, placed: &[&&Placed<'_>]) -> Result<Self, CudaError> {
        let (mut fine, mut each): (Vec<Tile>, Vec<(Tile, usize)>) = Default::default();
        for p in placed {
            let of = |most: usize| {
                (0..p.rows).step_by(most).map(move |first| Tile {
                    first: (p.first_row + first) as i32,
                    rows: (p.rows - first).min(most) as i32,
                    moments: p.job as i32,
                    pad: 0,
                })
            };
            let before = fine.len();
            fine.extend(of(FINE));
            each.extend(of(COARSE).enumerate().map(|(i, tile)| (tile, before + i * (COARSE / FINE))));
        }
        let coarse: Vec<Tile> = each.iter().map(|(tile, _)| *tile).collect();
        Ok(Self {
            num_fine: fine.len(),
            fine: Buffer::from_slice(&solver.device, &fine)?,
            coarse: Buffer::from_slice(&solver.device, &coarse)?,
            each,
        })
    }

    fn rows(&self) -> Grid {
        Grid::new([self.num_fine, 1, 1], 256)
    }

    /// The first fine tile of a coarse one, or how many there are.
    fn fine_of(&self, coarse: usize) -> usize {
        self.each.get(coarse).map_or(self.num_fine, |(_, fine)| *fine)
    }

    /// Runs of coarse tiles that span at most so many rows, or are one tile.
    fn runs(&self, rows: usize) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (i, (tile, _)) in self.each.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if (tile.first + tile.rows - self.each[run.start].0.first) as usize <= rows => run.end = i + 1,
                _ => runs.push(i..i + 1),
            }
        }
        runs
    }

    /// Rows from the first of a run to its last.
    fn span(&self, run: &Range<usize>) -> usize {
        let last = self.each[run.end - 1].0;
        (last.first + last.rows - self.each[run.start].0.first) as usize
    }
}

/// The search over the rows of some matrices.
struct Search<'a> {
    solver: &'a Solver,
    factors: &'a Factors,
    form: Form,
    rows: usize,
    src: &'a Buffer,
    /// All rows that take part, those with feedback, and those without.
    all: Lists,
    fed: Lists,
    alone: Lists,
    /// Rows at work, and their products, `[R, K]`; errors of a block, `[R, 128]`.
    w: Buffer,
    product: Buffer,
    errors: Buffer,
    best: Found,
    other: Found,
    /// Scales of the weighted search alone.
    plain: Buffer,
    before: Buffer,
    whole: Buffer,
    bad: Buffer,
}

impl<'a> Search<'a> {
    fn new(
        solver: &'a Solver,
        placed: &[&Placed<'_>],
        rows: usize,
        src: &'a Buffer,
        factors: &'a Factors,
        form: Form,
    ) -> Result<Self, CudaError> {
        let device = &solver.device;
        let (cols, groups) = (form.cols as usize, (form.cols / form.group) as usize);
        let of = |keep: &dyn Fn(bool) -> bool| {
            Lists::new(solver, &placed.iter().filter(|p| keep(factors.fed[p.job])).collect::<Vec<_>>())
        };
        let (all, fed, alone) = (of(&|_| true)?, of(&|fed| fed)?, of(&|fed| !fed)?);
        let any = fed.num_fine > 0;
        let when = |needed: bool, bytes: usize| Buffer::new(device, if needed { bytes } else { 0 });
        let found = |needed: bool| {
            let (codes, grid) = (Buffer::new(device, rows * cols)?, when(needed, 4 * rows * groups)?);
            Ok::<_, CudaError>(Found { codes, grid, losses: Buffer::new(device, 8 * rows)? })
        };
        Ok(Self {
            w: Buffer::new(device, 4 * rows * cols)?,
            product: when(any, 4 * rows * cols)?,
            errors: when(any, 4 * rows * BLOCK)?,
            best: found(any)?,
            other: found(any)?,
            plain: Buffer::new(device, 4 * rows * groups)?,
            before: Buffer::new(device, 8 * rows)?,
            whole: Buffer::new(device, 8 * rows)?,
            bad: Buffer::from_slice(device, &[u64::MAX])?,
            solver,
            factors,
            form,
            rows,
            src,
            all,
            fed,
            alone,
        })
    }

    fn elements(&self) -> (Grid, u64) {
        let n = self.rows * self.form.cols as usize;
        (launch::elements(n), n as u64)
    }

    /// Leaves the best codes and scales of the rows with feedback, the scales of the weighted search, and all losses.
    fn run(&self) -> Result<(), CudaError> {
        let (k, form, (grid, n)) = (&self.solver.kernels, self.form, self.elements());
        let (src, all) = (self.src.at(0), self.all.fine.at(0));
        k.solve_scales(self.all.rows(), self.plain.at(0), src, self.factors.energy.at(0), all, form, self.bad.at(0))?;
        k.solve_round(grid, self.other.codes.at(0), src, self.plain.at(0), form, n)?;
        k.solve_rest(grid, self.w.at(0), src, self.other.codes.at(0), self.plain.at(0), form, n)?;
        self.losses(&self.before, &self.w)?;
        self.losses(&self.whole, self.src)?;
        if self.fed.num_fine == 0 {
            return Ok(());
        }
        self.copy_grid(&self.best.grid, &self.plain)?;
        self.feed(&self.best)?;
        let (fed, tried) = (self.fed.fine.at(0), self.other.grid.at(0));
        k.solve_scales(self.fed.rows(), tried, src, self.factors.cost.at(0), fed, form, self.bad.at(0))?;
        self.try_other()?;
        let start = Buffer::new(&self.solver.device, self.best.grid.bytes())?;
        self.copy_grid(&start, &self.best.grid)?;
        let scales = start.bytes() / 4;
        for factor in STRETCH {
            k.solve_stretch(launch::elements(scales), tried, start.at(0), factor, form.scale_kind, scales as u64)?;
            self.try_other()?;
        }
        for _ in 0..REFITS {
            self.refit()?;
            self.try_other()?;
        }
        k.solve_rest(grid, self.w.at(0), src, self.best.codes.at(0), self.best.grid.at(0), form, n)?;
        self.against(&self.w, 0, form.cols, 0..self.fed.each.len())?;
        let (codes, slope, losses, scales) =
            (self.best.codes.at(0), self.product.at(0), self.best.losses.at(0), self.best.grid.at(0));
        let (used, own) = (self.factors.used.at(0), self.factors.own.at(0));
        k.solve_sweep(self.fed.rows(), codes, slope, losses, scales, used, own, fed, form, SWEEPS as i32)
    }

    fn copy_grid(&self, to: &Buffer, from: &Buffer) -> Result<(), CudaError> {
        self.solver.copy(to.at(0), from.at(0), from.bytes().min(to.bytes()))
    }

    /// `product = d H` for columns `from .. from + depth` of `d` and some coarse tiles.
    fn against(&self, d: &Buffer, from: i32, depth: i32, coarse: Range<usize>) -> Result<(), CudaError> {
        let (kernels, cols, used) = (&self.solver.tiles, self.form.cols, self.factors.used.at(0));
        let (grid, fed) = (tiles::columns(cols as usize, coarse.len()), self.fed.coarse.at(coarse.start * size_of::<Tile>()));
        kernels.tiles_rows(grid, self.product.at(0), d.at(0), cols, from, used, from, fed, cols, depth, 0, 0)
    }

    /// `losses = diag(d H d')`.
    fn losses(&self, losses: &Buffer, d: &Buffer) -> Result<(), CudaError> {
        let (k, own, cols) = (&self.solver.kernels, self.factors.own.at(0), self.form.cols);
        if self.fed.num_fine > 0 {
            self.against(d, 0, cols, 0..self.fed.each.len())?;
            k.solve_dots(self.fed.rows(), losses.at(0), d.at(0), self.product.at(0), own, self.fed.fine.at(0), cols)?;
        }
        k.solve_dots(self.alone.rows(), losses.at(0), d.at(0), 0, own, self.alone.fine.at(0), cols)
    }

    /// Codes with error feedback on the scales that are there.
    fn feed(&self, found: &Found) -> Result<(), CudaError> {
        let kernels = &self.solver.tiles;
        let (k, f, form, fed) = (&self.solver.kernels, self.factors, self.form, self.fed.fine.at(0));
        let (w, errors, order, upper) = (self.w.at(0), self.errors.at(0), f.order.at(0), f.upper.at(0));
        k.solve_visit(self.fed.rows(), w, self.src.at(0), order, fed, form.cols)?;
        let grid = self.fed.rows().shared(4 * BLOCK * BLOCK);
        for first in (0..form.cols).step_by(BLOCK) {
            let (codes, losses, scales) = (found.codes.at(0), found.losses.at(0), found.grid.at(0));
            k.solve_feed(grid, w, errors, codes, losses, scales, upper, f.weight.at(0), order, fed, form, first)?;
            let end = (first + BLOCK as i32).min(form.cols);
            if end < form.cols {
                let rest = tiles::columns((form.cols - end) as usize, self.fed.each.len());
                let coarse = self.fed.coarse.at(0);
                kernels.tiles_rows(rest, w, errors, BLOCK as i32, 0, upper, first, coarse, form.cols, end - first, end, 1)?;
            }
        }
        Ok(())
    }

    /// Codes on the other scales, which replace the best where they are better.
    fn try_other(&self) -> Result<(), CudaError> {
        self.feed(&self.other)?;
        let (best, other) = (&self.best, &self.other);
        let [codes, grid, losses] = [&best.codes, &best.grid, &best.losses].map(|b| b.at(0));
        let [other_codes, other_grid, other_losses] = [&other.codes, &other.grid, &other.losses].map(|b| b.at(0));
        let fed = self.fed.fine.at(0);
        let k = &self.solver.kernels;
        k.solve_improve(self.fed.rows(), codes, grid, losses, other_codes, other_grid, other_losses, fed, self.form)
    }

    /// Puts scales that suit the best codes into the other's, for as many rows at a time as their equations fit.
    fn refit(&self) -> Result<(), CudaError> {
        let (k, form, (grid, n)) = (&self.solver.kernels, self.form, self.elements());
        let (cols, groups) = (form.cols as usize, (form.cols / form.group) as usize);
        k.solve_signed(grid, self.w.at(0), self.best.codes.at(0), form, n)?;
        let runs = self.fed.runs(EQUATION_BYTES / (8 * groups * groups));
        let most = runs.iter().map(|run| self.fed.span(run)).max().unwrap_or(0);
        let a = Buffer::new(&self.solver.device, 8 * most * groups * groups)?;
        let b = Buffer::new(&self.solver.device, 8 * most * groups)?;
        for run in runs {
            let (first, end) = (self.fed.fine_of(run.start), self.fed.fine_of(run.end));
            let (grid, fed) = (Grid::new([end - first, 1, 1], 256), self.fed.fine.at(first * size_of::<Tile>()));
            let base = self.fed.each[run.start].0.first;
            for (g, own) in (0..cols).step_by(form.group as usize).enumerate() {
                self.against(&self.w, own as i32, form.group, run.clone())?;
                let (product, codes, src) = (self.product.at(0), self.w.at(0), self.src.at(0));
                k.solve_equations(grid, a.at(0), b.at(0), product, codes, src, fed, form, g as i32, base)?;
            }
            k.solve_refit(grid, self.other.grid.at(0), self.best.grid.at(0), a.at(0), b.at(0), fed, form, base)?;
        }
        Ok(())
    }

    fn pack(&self, words: &Buffer, scales: &Buffer) -> Result<(), CudaError> {
        let k = &self.solver.kernels;
        let (losses, before) = (self.best.losses.at(0), self.before.at(0));
        let (codes, grid, plain, src) = (self.best.codes.at(0), self.best.grid.at(0), self.plain.at(0), self.src.at(0));
        for (lists, fed) in [(&self.fed, 1), (&self.alone, 0)] {
            let tiles = lists.fine.at(0);
            k.solve_pack(
                lists.rows(),
                words.at(0),
                scales.at(0),
                losses,
                before,
                codes,
                grid,
                plain,
                src,
                tiles,
                self.form,
                fed,
            )?;
        }
        Ok(())
    }

    /// The first value that cannot be rounded.
    fn fault<'p, 'w>(&self, placed: &[&'p Placed<'w>]) -> Result<Option<(&'p Placed<'w>, FeedbackError)>, CudaError> {
        let mut bad = [0u64];
        self.solver.device.download(&mut bad, &self.bad, 0)?;
        if bad[0] == u64::MAX {
            return Ok(None);
        }
        let (at, cols) = ((bad[0] / 2) as usize, self.form.cols as usize);
        let (row, col) = (at / cols, at % cols);
        let found = placed.iter().find(|p| (p.first_row..p.first_row + p.rows).contains(&row));
        Ok(found.map(|p| {
            let row = p.which.map_or(row - p.first_row, |which| which[row - p.first_row]);
            let error = if bad[0].is_multiple_of(2) {
                RoundError::NonFinite { row, col }
            } else {
                RoundError::ScaleOverflow { row, col }
            };
            (*p, error.into())
        }))
    }
}
