//! Launchers of the fast kernels and the structs they take by value; `kernels/README.md` has the contracts. The structs are
//! compared with the sources by a test.

use super::device::{CudaError, Device};
use super::launch::{self, Grid};
use super::module::{Function, Mode, Module, PROGRAMS, Source, cached, structs};
use super::plain::{Matrix, Router};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

structs! {
    /// One product of a launch.
    pub(super) LinearMatrix in "common/linear.cuh" {
        packed: u64,
        scale: u64,
        bias: u64,
        add: u64,
        out: u64,
        rows: i32,
        out_stride: i32,
        out_scale: f32,
        pad: i32,
    }
    /// Up to three products of one input.
    pub(super) LinearArgs in "common/linear.cuh" {
        x: u64,
        up: u64,
        gain: u64,
        x_q: u64,
        x_scale: u64,
        m: [LinearMatrix; 3],
        num_matrices: i32,
        t: i32,
        k: i32,
        x_stride: i32,
        norm: i32,
        eps: f32,
        columns: i32,
    }
    /// The router.
    pub(super) RouterArgs in "router.cu" {
        logits: u64,
        ids: u64,
        gates: u64,
        slots: u64,
        num_slots: u64,
        pairs: u64,
        x_q: u64,
        x_scale: u64,
        x: u64,
        gain: u64,
        shift: u64,
        w: u64,
        table: u64,
        script: u64,
        step: u64,
        steps: i32,
        rows: i32,
        t: i32,
        d: i32,
        tokens: i32,
        w_is_f32: i32,
        ahead: i32,
        norm: i32,
        eps: f32,
        bits: i32,
        pending: i32,
        rule: RouteRule,
    }
    /// How a token's experts are chosen.
    pub(super) RouteRule in "common/routing.cuh" {
        e: i32,
        k: i32,
        select: i32,
        softmax_of_chosen: i32,
        renorm: i32,
        num_groups: i32,
        keep_groups: i32,
        jitter: f32,
        scale: f32,
    }
    /// Experts that arrive while the products run.
    pub(super) Arrivals in "common/routing.cuh" {
        pieces: u64,
        waited: u64,
        through: u64,
        needed: i32,
        blocks: i32,
    }
    /// The choice without a list.
    pub(super) DirectRoute in "common/routing.cuh" {
        logits: u64,
        table: u64,
        ids: u64,
        gates: u64,
        rule: RouteRule,
        pad: i32,
    }
    /// Either half of the experts.
    pub(super) ExpertsArgs in "common/routing.cuh" {
        out: u64,
        x_q: u64,
        x_scale: u64,
        slots: u64,
        num_slots: u64,
        pairs: u64,
        direct: DirectRoute,
        arrivals: Arrivals,
        t: i32,
        k: i32,
        inner: i32,
        rows: i32,
        columns: i32,
        stages: i32,
        teams: i32,
    }
    /// Second half with its sum.
    pub(super) DownArgs in "moe.cu" {
        y: u64,
        add: u64,
        h: u64,
        slots: u64,
        num_slots: u64,
        pairs: u64,
        gates: u64,
        direct: DirectRoute,
        arrivals: Arrivals,
        t: i32,
        d: i32,
        f: i32,
        k: i32,
        chunk: i32,
        stages: i32,
        split: i32,
        warps: i32,
        scale: f32,
    }
    /// What a layer's attention has of its own.
    pub(super) AttentionLayer in "common/attend.cuh" {
        q_gain: u64,
        k_gain: u64,
        k_pages: u64,
        v_pages: u64,
    }
    /// Attention of one new token a sequence.
    pub(super) AttentionArgs in "common/attend.cuh" {
        out: u64,
        q: u64,
        k: u64,
        v: u64,
        layer: AttentionLayer,
        page_table: u64,
        positions: u64,
        partial: u64,
        counters: u64,
        cosines: u64,
        sines: u64,
        q_stride: i32,
        k_stride: i32,
        v_stride: i32,
        out_stride: i32,
        h: i32,
        hk: i32,
        max_pages: i32,
        max_splits: i32,
        norm: i32,
        eps: f32,
        clip: f32,
        rope_dim: i32,
        interleaved: i32,
        window: i32,
        scale: f32,
        together: i32,
    }
    /// One matrix of a layer.
    pub(super) StepMatrix in "step.cu" {
        packed: u64,
        scale: u64,
        bias: u64,
    }
    /// A layer of the kernel that runs all of them.
    pub(super) StepLayer in "step.cu" {
        q: StepMatrix,
        k: StepMatrix,
        v: StepMatrix,
        o: StepMatrix,
        cache: AttentionLayer,
        gain: u64,
        moe_gain: u64,
        router: u64,
        table: u64,
    }
    /// All layers for one token.
    pub(super) StepArgs in "step.cu" {
        x: u64,
        layers: u64,
        x_box: u64,
        middle: u64,
        logits: u64,
        h: u64,
        partial: u64,
        uses: u64,
        attention: AttentionArgs,
        num_layers: i32,
        d: i32,
        f: i32,
        eps: f32,
        moe_eps: f32,
        scale: f32,
        moe_scale: f32,
        split: i32,
        down_rows: i32,
        ring: i32,
        rule: RouteRule,
    }
    /// Keys and values of new tokens, and their queries made ready.
    pub(super) AppendArgs in "attention.cu" {
        q: u64,
        k: u64,
        v: u64,
        k_pages: u64,
        v_pages: u64,
        page_table: u64,
        positions: u64,
        rows: u64,
        q_gain: u64,
        k_gain: u64,
        cosines: u64,
        sines: u64,
        q_stride: i32,
        k_stride: i32,
        v_stride: i32,
        h: i32,
        hk: i32,
        max_pages: i32,
        norm: i32,
        eps: f32,
        clip: f32,
        rope_dim: i32,
        interleaved: i32,
    }
    /// Attention of runs of new tokens.
    pub(super) PrefillArgs in "attention.cu" {
        out: u64,
        q: u64,
        k_pages: u64,
        v_pages: u64,
        page_table: u64,
        positions: u64,
        rows: u64,
        q_stride: i32,
        out_stride: i32,
        t: i32,
        h: i32,
        hk: i32,
        max_pages: i32,
        window: i32,
        scale: f32,
    }
    /// Experts that are not in device memory.
    pub(super) FetchArgs in "tiers.cu" {
        ids: u64,
        list: u64,
        ready: u64,
        num_slots: u64,
        now: u64,
        counter: u64,
        launches: u64,
        arrived: u64,
        waited: u64,
        through: u64,
        sets: u64,
        stats: u64,
        here: TierSlots,
        next: TierSlots,
        logits: u64,
        script: u64,
        step: u64,
        t: i32,
        k: i32,
        steps: i32,
        rows: i32,
        most_ahead: i32,
        set: i32,
        before: i32,
        ahead_blocks: i32,
        num_pairs: i32,
        shift: i32,
        rise: i32,
        stages: i32,
        ns_per_byte: f32,
    }
    /// What is brought for the layer behind.
    pub(super) BringArgs in "tiers.cu" {
        at: TierSlots,
        set: u64,
        arrived: u64,
        stats: u64,
        stages: i32,
        ns_per_byte: f32,
    }
    /// Slots of a layer.
    pub(super) TierSlots in "tiers.cu" {
        owner: u64,
        score: u64,
        visited: u64,
        host: u64,
        table: u64,
        matrices: u64,
        slots: u64,
        e: i32,
        s: i32,
        permanent: i32,
        run_bytes: i32,
        late: i32,
        late_end: i32,
    }
    /// Copies in host memory that came or went.
    pub(super) PlaceArgs in "tiers.cu" {
        moves: u64,
        host: u64,
        table: u64,
        matrices: u64,
        list: u64,
        num_slots: u64,
        num_moves: i32,
    }
    /// A wave of experts through the ring.
    pub(super) WaveArgs in "tiers.cu" {
        list: u64,
        num_slots: u64,
        wave: u64,
        num_wave: u64,
        owner: u64,
        host: u64,
        stage: u64,
        s: i32,
        e: i32,
        first: i32,
        end: i32,
        run_bytes: i32,
    }
    /// Queries in latent space, and the new row of the cache.
    pub(super) LatentQueryArgs in "latent.cu" {
        query: u64,
        q: u64,
        latent: u64,
        pages: u64,
        page_table: u64,
        positions: u64,
        gain: u64,
        cosines: u64,
        sines: u64,
        up: Matrix,
        q_stride: i32,
        latent_stride: i32,
        t: i32,
        h: i32,
        nope: i32,
        rope: i32,
        v: i32,
        max_pages: i32,
        interleaved: i32,
        eps: f32,
    }
    /// Attention on latents.
    pub(super) LatentAttentionArgs in "latent.cu" {
        partial: u64,
        query: u64,
        pages: u64,
        page_table: u64,
        positions: u64,
        h: i32,
        max_pages: i32,
        max_splits: i32,
        scale: f32,
    }
    /// From mixed latents to values.
    pub(super) LatentValueArgs in "latent.cu" {
        out: u64,
        partial: u64,
        positions: u64,
        up: Matrix,
        out_stride: i32,
        t: i32,
        h: i32,
        nope: i32,
        v: i32,
        max_splits: i32,
        rows: i32,
    }
    /// Planes of rows.
    pub(super) PlanesArgs in "rows.cu" {
        q: u64,
        scale: u64,
        x: u64,
        up: u64,
        gain: u64,
        shift: u64,
        q_bf16: u64,
        k: i32,
        x_stride: i32,
        norm: i32,
        eps: f32,
    }
    /// The sum over ranks.
    pub(super) CombineArgs in "rows.cu" {
        y: u64,
        add: u64,
        pairs: u64,
        gates: u64,
        d: i32,
        k: i32,
        scale: f32,
    }
    /// Gated sum.
    pub(super) AddGatedArgs in "rows.cu" {
        acc: u64,
        add: u64,
        gate: u64,
        d: i32,
        scale: f32,
    }
    /// How one row is sampled.
    pub(super) SampleRow in "sample.cu" {
        state: u64,
        least: u64,
        scale: f32,
        penalty: f32,
        top_p: f32,
        top_k: i32,
        reserved: u64,
    }
    /// Choices on their way to the host.
    pub(super) Sent in "common/base.cuh" {
        words: u64,
        steps: i32,
        each: i32,
    }
    /// Logits to tokens.
    pub(super) SampleArgs in "sample.cu" {
        tokens: u64,
        faults: u64,
        logits: u64,
        rows: u64,
        seen: u64,
        best: u64,
        bad: u64,
        counts: u64,
        masses: u64,
        slices: u64,
        positions: u64,
        sent: Sent,
        sent_faults: i32,
        v: i32,
    }
    /// Greedy choice.
    pub(super) ArgmaxArgs in "rows.cu" {
        tokens: u64,
        sent: Sent,
        logits: u64,
        best: u64,
        counters: u64,
        positions: u64,
        v: i32,
    }
}

impl From<Router> for RouteRule {
    fn from(r: Router) -> Self {
        Self {
            e: r.experts,
            k: r.top_k,
            select: r.select,
            softmax_of_chosen: r.softmax_of_chosen,
            renorm: r.renorm,
            num_groups: r.groups,
            keep_groups: r.keep,
            jitter: r.jitter,
            scale: r.scale,
        }
    }
}

/// Bytes of an `ExpertSlot`.
pub(super) const SLOT_BYTES: usize = 96;

/// The fast kernels of a device.
pub(super) struct Fast {
    functions: HashMap<String, Function>,
    mode: Mode,
}

impl Fast {
    /// Loads the kernels for weights of some forms, and pairs of forms, as kernel names spell them.
    pub fn load(device: &Arc<Device>, forms: &[&str]) -> Result<Self, CudaError> {
        let mode = if device.properties().sm >= 90 { Mode::Overlapping } else { Mode::Ordered };
        let arch = device.properties().arch();
        let wanted = |p: &&Source| !OTHERS.contains(&p.name) && p.is_for(&arch) && p.form.is_none_or(|f| forms.contains(&f));
        let programs: Vec<&Source> = PROGRAMS.iter().filter(wanted).collect();
        // The first start on a machine compiles; each program keeps one core busy for seconds.
        programs.par_iter().try_for_each(|program| cached(program, &arch).map(drop))?;
        let mut functions = HashMap::new();
        for program in programs {
            let module = Module::load(device, program)?;
            for name in names(program) {
                functions.insert(name.clone(), module.function(&name)?);
            }
        }
        Ok(Self { functions, mode })
    }

    /// No kernel.
    pub fn none() -> Self {
        Self { functions: HashMap::new(), mode: Mode::Ordered }
    }

    /// Whether kernels may start before those ahead of them are done.
    pub fn overlaps(&self) -> bool {
        self.mode == Mode::Overlapping
    }

    /// Whether there is such a kernel.
    pub fn has(&self, name: &str) -> bool {
        self.functions.contains_key(name)
    }

    /// Launches a kernel whose one parameter is `args`.
    pub fn launch<A: Copy>(&self, name: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        self.launch_as(self.mode, name, grid, args)
    }

    /// The same with all blocks resident at a time.
    pub fn launch_resident<A: Copy>(&self, name: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        self.launch_as(Mode::Cooperative, name, grid, args)
    }

    fn launch_as<A: Copy>(&self, mode: Mode, name: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        let function = self.function(name)?;
        let mut params = [(&raw const *args).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: fast kernels take one struct, whose layout a test compares with the source; addresses come from buffers that
        // the engine sized for the block and keeps until the stream is done.
        unsafe { function.launch(grid, mode, &mut params) }
    }

    /// The same beside the kernels, behind everything already in the stream for transfers.
    pub fn launch_beside<A: Copy>(&self, name: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        let function = self.function(name)?;
        let mut params = [(&raw const *args).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: as above; who reads what it writes waits for its counts, and the stream of the kernels joins that of the transfers.
        unsafe { function.launch_in(function.copy_stream(), grid, Mode::Ordered, &mut params) }
    }

    fn function(&self, name: &str) -> Result<&Function, CudaError> {
        self.functions.get(name).ok_or_else(|| CudaError::Unsupported(format!("there is no kernel `{name}`")))
    }
}

/// Programs whose kernels have launchers of their own.
const OTHERS: [&str; 3] = ["plain.cu", "tiles.cu", "solve.cu"];

/// Kernels of a program.
fn names(program: &Source) -> Vec<String> {
    let of_form = |patterns: &[&str]| patterns.iter().map(|p| p.replace('X', program.form.unwrap_or_default())).collect();
    match program.name {
        "linear.cu" => {
            of_form(&["linear_X_s4", "linear_X_h4", "linear_X_n32", "linear_X_n64", "moe_gate_up_X_n64", "moe_down_pairs_X_n64"])
        }
        "wide.cu" => of_form(&["linear_X_wg", "moe_gate_up_X_wg", "moe_down_pairs_X_wg"]),
        "moe.cu" => of_form(&["moe_gate_up_X_s4", "moe_down_pairs_X_s4", "moe_down_X"]),
        "router.cu" => {
            ["router_logits_t1", "router_logits", "router_rows", "router_rows_t4", "router_list"].map(String::from).to_vec()
        }
        "attention.cu" => {
            let each =
                |d| ["attention_decode", "attention_decode_wide", "append", "attention_prefill"].map(|n| format!("{n}_d{d}"));
            [32, 64, 96, 128].into_iter().flat_map(each).collect()
        }
        "step.cu" => of_form(&["step_X_d64", "step_X_d128"]),
        "latent.cu" => {
            let each = |r| ["latent_query", "latent_attention", "latent_value"].map(|n| format!("{n}_r{r}"));
            launch::LATENT_RANKS.into_iter().flat_map(each).collect()
        }
        "rows.cu" => {
            let planes = [4, 8, 16].into_iter().flat_map(|bits| ["w", "k"].map(|order| format!("planes_{order}{bits}")));
            planes.chain(["moe_combine", "add_gated", "argmax_rows"].map(String::from)).collect()
        }
        "tiers.cu" => ["tiers_fetch", "tiers_ahead", "tiers_place", "tiers_wave"].map(String::from).to_vec(),
        "sample.cu" => ["sample_best", "sample_bins", "sample_draw"].map(String::from).to_vec(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::module::tests::are_declared;
    use super::*;

    /// A list of experts with entries of another size would be written past its end.
    #[test]
    fn slots_have_the_size_of_the_kernels() {
        let source = include_str!("../../../kernels/common/routing.cuh");
        let body = source.split_once("struct ExpertSlot {").unwrap().1.split_once("};").unwrap().0;
        let size = |line: &str| match line.split("//").next().unwrap().trim() {
            l if l.contains('*') => 8,
            l if l.starts_with("int ") => 4,
            l if l.starts_with("u16 ") && l.contains("[8]") => 16,
            "" => 0,
            l => panic!("`{l}`"),
        };
        assert_eq!(body.lines().map(size).sum::<usize>(), SLOT_BYTES);
    }

    /// A struct that differs from the kernel's would hand it wrong addresses; fails on any field missing, swapped or retyped.
    #[test]
    fn structs_are_those_of_the_kernels() {
        are_declared(STRUCTS);
    }
}
