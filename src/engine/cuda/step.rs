//! All layers of one token by one kernel, where a model's shapes, formats and memory allow it; the contract is in the head of
//! `kernels/step.cu`.

use super::batch::View;
use super::device::{CudaError, Device};
use super::exec::rule;
use super::fast::{AttentionArgs, AttentionLayer, StepArgs, StepLayer, StepMatrix};
use super::fuse::{Block, Group, Lead, Product};
use super::launch::{self, Limits, StepLaunch, StepShape, Width};
use super::layout::Layout;
use super::load::Store;
use super::memory::Buffer;
use super::plain::Kind;
use super::{Cache, Engine};
use crate::engine::EngineError;
use crate::ids::{ExpertId, LayerId, Role, TensorId};
use crate::model::plan::{Heads, Plan, Slot, Step};
use crate::model::spec::{NormKind, Pairing, RouterSpec, Select};
use crate::quant::format::Zero;
use std::sync::Arc;

/// Layers that are all alike but for their weights, and how they are launched.
pub(super) struct Found {
    common: Common,
    layers: Vec<LayerIds>,
    launch: StepLaunch,
}

/// What the layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Common {
    heads: Heads,
    /// Epsilon of the norms of queries and keys; `None`: there are none.
    head_eps: Option<f32>,
    clip: Option<f32>,
    window: Option<usize>,
    eps: f32,
    moe_eps: f32,
    /// Factors on the way into the residual.
    scale: f32,
    moe_scale: f32,
    router: RouterSpec,
    /// `F`.
    width: usize,
    attention: Width,
    expert: Width,
}

/// A layer's weights.
#[derive(Clone, Copy, Debug)]
struct LayerIds {
    layer: LayerId,
    gain: TensorId,
    /// q, k, v, o.
    products: [Product; 4],
    norms: Option<(TensorId, TensorId)>,
    moe_gain: TensorId,
    router: TensorId,
}

/// The kernel with what it knows of the layers.
pub(super) struct WholeStep {
    common: Common,
    launch: StepLaunch,
    /// `[L]` [`StepLayer`]. Caches of models whose experts are all resident never move, nor do their weights.
    layers: Buffer,
    num_layers: usize,
}

/// RMSNorm of whole rows without bias: its gain and epsilon.
fn rms(lead: &Lead, d: usize) -> Option<(TensorId, f32)> {
    (lead.norm.kind == NormKind::Rms && lead.b.is_none() && lead.width == d).then_some((lead.w, lead.norm.eps))
}

/// How the codes of a matrix of this shape are stored; `None` if they have zero points, or scales that the kernel does not read.
fn packed(layout: &Layout, id: TensorId, [rows, cols]: [usize; 2]) -> Option<Width> {
    let form = layout.places.get(&id)?.form;
    let bits = match form.kind {
        Kind::Int4 => 4,
        Kind::Int8 => 8,
        _ => return None,
    };
    let right = (form.rows, form.cols, form.scale_kind, form.zero) == (rows, cols, Kind::Bf16, Zero::Middle);
    right.then_some(Width { bits, group: form.group })
}

/// The one form of all matrices; `None` if they differ or one is not [`packed`].
fn alike(mut widths: impl Iterator<Item = Option<Width>>) -> Option<Width> {
    let first = widths.next()??;
    widths.all(|w| w == Some(first)).then_some(first)
}

/// A layer of two blocks.
fn layer(halves: &[Group], layout: &Layout, d: usize) -> Option<(Common, LayerIds)> {
    let [
        Group { block: Some(Block::Attention { lead, first, middle, decode: Some(part), latent: None, last, scale }), .. },
        Group {
            block: Some(Block::Moe { lead: moe_lead, router_w, router, layer: experts_of, width, shared: None, scale: moe_scale }),
            ..
        },
    ] = halves
    else {
        return None;
    };
    let Some(Step::Attend { layer, .. }) = middle.last() else { return None };
    let heads = part.heads;
    let (q_width, kv_width) = (heads.q * heads.dim, heads.kv * heads.dim);
    let of = |dst: Slot| first.iter().find(|p| p.dst == dst).copied();
    let products = [of(Slot::Q)?, of(Slot::K)?, of(Slot::V)?, *last];
    let shapes = [[q_width, d], [kv_width, d], [kv_width, d], [d, q_width]];
    let attention = alike(products.iter().zip(shapes).map(|(p, shape)| packed(layout, p.w, shape)))?;
    let shapes = [(Role::ExpertGate, [*width, d]), (Role::ExpertUp, [*width, d]), (Role::ExpertDown, [d, *width])];
    let experts = (0..router.experts as u32).flat_map(|e| {
        shapes.map(|(role, shape)| packed(layout, TensorId::expert(LayerId(*experts_of), ExpertId(e), role), shape))
    });
    let expert = alike(experts)?;
    let router_form = layout.places.get(router_w)?.form;
    let routed = (router_form.kind, router_form.rows, router_form.cols) == (Kind::Bf16, router.experts, d);
    let per_head = part.norms.is_none_or(|(.., width)| width == heads.dim);
    if first.len() != 3 || layer.0 != *experts_of || !routed || router.select != Select::Top || !per_head {
        return None;
    }
    let ((gain, eps), (moe_gain, moe_eps)) = (rms(lead, d)?, rms(moe_lead, d)?);
    let common = Common {
        heads,
        head_eps: part.norms.map(|n| n.2),
        clip: part.clip,
        window: part.window,
        eps,
        moe_eps,
        scale: *scale,
        moe_scale: *moe_scale,
        router: *router,
        width: *width,
        attention,
        expert,
    };
    let ids = LayerIds { layer: *layer, gain, products, norms: part.norms.map(|n| (n.0, n.1)), moe_gain, router: *router_w };
    Some((common, ids))
}

/// Whether one kernel can run all layers of a model of width `d` whose experts are all on the device.
pub(super) fn find(plan: &Plan, groups: &[Group], layout: &Layout, d: usize, limits: Limits) -> Option<Found> {
    let ([prologue, halves @ .., head], true) = (groups, limits.warpgroups) else { return None };
    let embeds = matches!(plan.steps[prologue.steps.clone()], [Step::Embed { dst: Slot::Residual, .. }]);
    let heads = matches!(head.block, Some(Block::Head { .. }));
    if !embeds || !heads || halves.len() != 2 * plan.layers.len() {
        return None;
    }
    let (commons, layers): (Vec<Common>, Vec<LayerIds>) =
        halves.chunks_exact(2).map(|halves| layer(halves, layout, d)).collect::<Option<Vec<_>>>()?.into_iter().unzip();
    let common = *commons.first().filter(|first| commons.iter().all(|c| c == *first))?;
    let shape = StepShape {
        d,
        heads: common.heads.q,
        kv_heads: common.heads.kv,
        head_dim: common.heads.dim,
        f: common.width,
        experts: common.router.experts,
        top_k: common.router.top_k,
        attention: common.attention,
        expert: common.expert,
    };
    let launch = launch::step(&shape, limits)?;
    Some(Found { common, layers, launch })
}

impl Found {
    /// The pair of forms whose kernel is needed.
    pub fn form(&self) -> Option<&'static str> {
        launch::step_form(self.common.attention, self.common.expert, self.common.width)
    }
}

impl WholeStep {
    /// Tells the kernel where everything is.
    pub fn new(device: &Arc<Device>, found: Found, store: &Store, caches: &[Cache]) -> Result<Self, CudaError> {
        let matrix = |p: &Product| {
            let w = store.matrix(p.w);
            StepMatrix { packed: w.data, scale: w.scales, bias: store.optional(p.b).data }
        };
        let data = |id: TensorId| store.matrix(id).data;
        let of = |ids: &LayerIds| {
            let [q, k, v, o] = ids.products.each_ref().map(matrix);
            let (q_gain, k_gain) = ids.norms.map_or((0, 0), |(q, k)| (data(q), data(k)));
            let (k_pages, v_pages) = caches[ids.layer.0 as usize].addresses();
            StepLayer {
                q,
                k,
                v,
                o,
                cache: AttentionLayer { q_gain, k_gain, k_pages, v_pages },
                gain: data(ids.gain),
                moe_gain: data(ids.moe_gain),
                router: data(ids.router),
                table: store.addresses(ids.layer.0),
            }
        };
        let layers: Vec<StepLayer> = found.layers.iter().map(of).collect();
        let (common, launch) = (found.common, found.launch);
        Ok(Self { common, launch, layers: Buffer::from_slice(device, &layers)?, num_layers: layers.len() })
    }
}

impl Engine {
    /// Whether one kernel runs all layers of a decode step of one token.
    pub fn runs_layers_at_once(&self) -> bool {
        self.runs_whole(1)
    }

    /// From now on layers of one token run by the kernels of their parts.
    pub fn part_layers(&mut self) {
        self.step = None;
        self.decode.forget_graphs();
    }

    /// Whether one kernel runs all layers of a decode step of so many tokens; it chooses experts by the router alone.
    pub(super) fn runs_whole(&self, num_tok: usize) -> bool {
        num_tok == 1 && self.step.is_some() && self.scripts.is_empty()
    }

    /// All layers of one token, from residual to residual.
    pub(super) fn whole(&self, view: &View) -> Result<(), EngineError> {
        let Some(step) = &self.step else { return Ok(()) };
        let (c, boxes) = (&step.common, &self.work.boxes);
        let (h, hk, dim) = (c.heads.q, c.heads.kv, c.heads.dim);
        let attention = AttentionArgs {
            out: boxes.attended.at(0),
            q: boxes.projected.at(0),
            k: boxes.projected.at(4 * h * dim),
            v: boxes.projected.at(4 * (h + hk) * dim),
            page_table: view.table,
            positions: view.positions,
            cosines: view.cosines,
            sines: view.sines,
            h: h as i32,
            hk: hk as i32,
            max_pages: view.table_stride as i32,
            max_splits: launch::attention_splits(hk, 1) as i32,
            norm: c.head_eps.is_some() as i32,
            eps: c.head_eps.unwrap_or(0.0),
            clip: c.clip.unwrap_or(f32::INFINITY),
            rope_dim: self.spec.rope.dim as i32,
            interleaved: (self.spec.rope.pairing == Pairing::Interleaved) as i32,
            window: c.window.unwrap_or(0) as i32,
            scale: c.heads.scale,
            ..AttentionArgs::ZERO
        };
        let args = StepArgs {
            x: self.at(Slot::Residual),
            layers: step.layers.at(0),
            x_box: boxes.x.at(0),
            middle: boxes.middle.at(0),
            logits: boxes.logits.at(0),
            h: boxes.inner.at(0),
            partial: boxes.partial.at(0),
            uses: boxes.uses.at(0),
            attention,
            num_layers: step.num_layers as i32,
            d: self.spec.width as i32,
            f: c.width as i32,
            eps: c.eps,
            moe_eps: c.moe_eps,
            scale: c.scale,
            moe_scale: c.moe_scale,
            split: step.launch.split as i32,
            down_rows: step.launch.down_rows as i32,
            ring: step.launch.ring as i32,
            rule: rule(&c.router).into(),
        };
        Ok(self.fast.launch_resident(&step.launch.name, step.launch.grid, &args)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fuse;
    use super::*;
    use crate::model::{family, plan};
    use crate::quant::format::{Bits, Format, Group as Columns};

    const H200: Limits = Limits { block_shared_bytes: 230_400, ..launch::tests::H200 };

    /// The pair of forms that a shape runs by with 8 bits for attention and 4 for experts, the experts of layer 1 in groups of `group`.
    fn form(shape: &str, group: usize) -> Option<&'static str> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("profiles/shapes/{shape}.json"));
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        config["num_hidden_layers"] = 2.into();
        let (_, spec) = family::read(&config).unwrap();
        let format = |id: TensorId, _: usize| {
            let int = |bits, n| Format::Int { bits, group: Columns::Of(n), zero: Zero::Middle };
            match (id.expert, id.layer, id.role) {
                (_, _, Role::Router) => Format::Source,
                (Some(_), Some(LayerId(1)), _) => int(Bits::Four, group),
                (Some(_), ..) => int(Bits::Four, 128),
                _ => int(Bits::Eight, 128),
            }
        };
        let (layout, plan) = (Layout::of_spec(&spec, &format), plan::plan(&spec));
        find(&plan, &fuse::fuse(&plan), &layout, spec.width, H200)?.form()
    }

    /// One layer that is stored otherwise, norms of whole rows, a shared expert, two rounds of argmax and latents each keep a model from it.
    #[test]
    fn models_of_equal_layers_run_by_one_kernel() {
        assert_eq!(form("qwen3-30b-a3b", 128), Some("w8_w4"));
        assert_eq!(form("qwen3-30b-a3b", 64), None);
        assert_eq!(form("mixtral-8x7b", 128), Some("w8_w4_long"));
        for shape in ["olmoe-1b-7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe", "deepseek-v2-lite"] {
            assert_eq!(form(shape, 128), None, "{shape}");
        }
    }
}
