//! From steps to blocks: a rewrite on data that recognises the halves of a layer which the fast kernels run as a few launches.
//!
//! A block takes the residual stream and leaves the residual stream; nothing else passes between blocks, so that each may run
//! fast or step by step. [`Block::steps`] gives the steps back, and a test holds the two together.

use crate::ids::{LayerId, TensorId};
use crate::model::plan::{Heads, Plan, Slot, Step};
use crate::model::spec::{Mla, Norm, NormKind, RouterSpec};
use std::ops::Range;

/// A run of steps, and the block it forms, if it forms one.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Indices into the plan.
    pub steps: Range<usize>,
    /// `None`: the steps run one by one.
    pub block: Option<Block>,
}

/// The norm at the head of a block, residual to [`Slot::Normed`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lead {
    /// Gain.
    pub w: TensorId,
    /// Bias.
    pub b: Option<TensorId>,
    /// Formula.
    pub norm: Norm,
    /// `D`.
    pub width: usize,
}

/// One matrix product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Where to.
    pub dst: Slot,
    /// Where from.
    pub src: Slot,
    /// Matrix.
    pub w: TensorId,
    /// Bias.
    pub b: Option<TensorId>,
}

/// The shared expert of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedPart {
    /// Gate projection.
    pub gate: Product,
    /// Up projection.
    pub up: Product,
    /// Down projection.
    pub down: Product,
    /// Scalar gate.
    pub router: Option<Product>,
}

/// What the decode attention kernel takes over: norms of queries and keys, clip, rotation, append, attention.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodePart {
    /// Gains of queries and keys with the width of a run.
    pub norms: Option<(TensorId, TensorId, f32, usize)>,
    /// Bound.
    pub clip: Option<f32>,
    /// Shape.
    pub heads: Heads,
    /// Sliding window.
    pub window: Option<usize>,
}

/// What the latent decode kernels take over at the end of the middle: norm of the latent, rotation, append, attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentPart {
    /// Steps of the middle that run before.
    pub before: usize,
    /// Gain of the latent's norm.
    pub gain: TensorId,
    /// Its epsilon.
    pub eps: f32,
    /// Matrix from latents to keys and values.
    pub up: TensorId,
    /// Whose cache.
    pub layer: LayerId,
    /// Shape.
    pub mla: Mla,
}

/// Half a layer, or what comes before and after the layers.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// Norm, projections, whatever lies between, output projection, residual.
    Attention {
        /// First norm.
        lead: Lead,
        /// Projections of the normed input.
        first: Vec<Product>,
        /// Steps between the projections.
        middle: Vec<Step>,
        /// What one kernel can do of the middle when every sequence has one new token.
        decode: Option<DecodePart>,
        /// The same for attention on latents.
        latent: Option<LatentPart>,
        /// Output projection.
        last: Product,
        /// Factor on the way into the residual.
        scale: f32,
    },
    /// Norm, router, experts, shared expert, residual.
    Moe {
        /// First norm.
        lead: Lead,
        /// Router matrix.
        router_w: TensorId,
        /// Router rule.
        router: RouterSpec,
        /// Layer index.
        layer: u32,
        /// `F`.
        width: usize,
        /// Shared expert.
        shared: Option<SharedPart>,
        /// Factor on the way into the residual.
        scale: f32,
    },
    /// Norm, gated MLP, residual.
    Mlp {
        /// First norm.
        lead: Lead,
        /// Gate projection.
        gate: Product,
        /// Up projection.
        up: Product,
        /// Down projection.
        down: Product,
        /// Factor on the way into the residual.
        scale: f32,
    },
    /// Final norm and logits.
    Head {
        /// Final norm.
        lead: Lead,
        /// Matrix.
        w: TensorId,
        /// Bias.
        b: Option<TensorId>,
        /// Factor.
        scale: f32,
    },
}

/// Splits a plan into groups that cover it in order.
pub fn fuse(plan: &Plan) -> Vec<Group> {
    let mut groups = Vec::new();
    let alone = |groups: &mut Vec<Group>, steps: Range<usize>| {
        if !steps.is_empty() {
            groups.push(Group { steps, block: None });
        }
    };
    alone(&mut groups, plan.prologue.clone());
    for layer in &plan.layers {
        let mut start = layer.start;
        for i in layer.clone() {
            if matches!(plan.steps[i], Step::Add { acc: Slot::Residual, add: Slot::Block, .. }) {
                groups.push(Group { steps: start..i + 1, block: half(&plan.steps[start..=i]) });
                start = i + 1;
            }
        }
        alone(&mut groups, start..layer.end);
    }
    let end = plan.epilogue.clone();
    groups.push(Group { steps: end.clone(), block: head(&plan.steps[end]) });
    groups
}

/// First of the groups behind the last attention, in which no token looks at another.
pub fn rows_apart(plan: &Plan, groups: &[Group]) -> usize {
    let attends = |s: &Step| matches!(s, Step::Attend { .. } | Step::AttendLatent { .. });
    groups.iter().rposition(|g| plan.steps[g.steps.clone()].iter().any(attends)).map_or(0, |last| last + 1)
}

fn lead(step: &Step) -> Option<Lead> {
    match step {
        Step::Norm { dst: Slot::Normed, src: Slot::Residual, w, b, norm, width, runs: 1 } => {
            Some(Lead { w: *w, b: *b, norm: *norm, width: *width })
        }
        _ => None,
    }
}

fn product(step: &Step) -> Option<Product> {
    match step {
        Step::Linear { dst, src, w, b } => Some(Product { dst: *dst, src: *src, w: *w, b: *b }),
        _ => None,
    }
}

fn head(steps: &[Step]) -> Option<Block> {
    match steps {
        [norm, Step::Head { dst: Slot::Logits, src: Slot::Normed, w, b, scale }] => {
            Some(Block::Head { lead: lead(norm)?, w: *w, b: *b, scale: *scale })
        }
        _ => None,
    }
}

/// Three products around a gated activation, from the normed input to `to`.
fn gated(steps: &[Step], to: Slot) -> Option<[Product; 3]> {
    match steps {
        [gate, up, Step::GatedAct { gate: Slot::Gate, up: Slot::Up }, down] => {
            let (gate, up, down) = (product(gate)?, product(up)?, product(down)?);
            let right = (gate.dst, up.dst, down.src, down.dst) == (Slot::Gate, Slot::Up, Slot::Gate, to)
                && (gate.src, up.src) == (Slot::Normed, Slot::Normed);
            right.then_some([gate, up, down])
        }
        _ => None,
    }
}

fn half(steps: &[Step]) -> Option<Block> {
    let (first, rest) = steps.split_first()?;
    let (last, inner) = rest.split_last()?;
    let (lead, Step::Add { scale, .. }) = (lead(first)?, last) else { return None };
    let scale = *scale;
    match inner {
        [
            Step::Route { src: Slot::Normed, w, router, layer },
            Step::Experts { dst: Slot::Block, src: Slot::Normed, width, .. },
            tail @ ..,
        ] => {
            let shared = if tail.is_empty() { None } else { Some(shared(tail)?) };
            Some(Block::Moe { lead, router_w: *w, router: *router, layer: layer.0, width: *width, shared, scale })
        }
        _ if matches!(inner, [.., Step::GatedAct { .. }, _]) => {
            let [gate, up, down] = gated(inner, Slot::Block)?;
            Some(Block::Mlp { lead, gate, up, down, scale })
        }
        _ => attention(lead, inner, scale),
    }
}

fn shared(steps: &[Step]) -> Option<SharedPart> {
    let (body, tail) = steps.split_at_checked(4)?;
    let [gate, up, down] = gated(body, Slot::Shared)?;
    let router = match tail {
        [Step::AddGated { acc: Slot::Block, add: Slot::Shared, gate: None }] => None,
        [router, Step::AddGated { acc: Slot::Block, add: Slot::Shared, gate: Some(Slot::SharedGate) }] => Some(product(router)?),
        _ => return None,
    };
    Some(SharedPart { gate, up, down, router })
}

fn attention(lead: Lead, inner: &[Step], scale: f32) -> Option<Block> {
    let (last, inner) = inner.split_last()?;
    let last = product(last).filter(|p| p.src == Slot::Attn && p.dst == Slot::Block)?;
    // Products of the normed input may run ahead of what follows them: they write buffers of their own.
    let num_first = inner.iter().take_while(|s| product(s).is_some_and(|p| p.src == Slot::Normed)).count();
    let (first, middle) = inner.split_at(num_first);
    let first = first.iter().map(product).collect::<Option<Vec<_>>>()?;
    let (decode, latent) = (decode(middle), latent(middle));
    (num_first > 0).then(|| Block::Attention { lead, first, middle: middle.to_vec(), decode, latent, last, scale })
}

fn latent(middle: &[Step]) -> Option<LatentPart> {
    let before = middle.len().checked_sub(4)?;
    match &middle[before..] {
        [
            Step::Norm { dst: Slot::K, src: Slot::K, w, b: None, norm: Norm { kind: NormKind::Rms, eps }, width, runs: 1 },
            Step::Rope { buf: Slot::Q, heads, stride, offset },
            Step::Rope { buf: Slot::K, heads: 1, offset: rank, .. },
            Step::AttendLatent { dst: Slot::Attn, q: Slot::Q, latent: Slot::K, up, layer, mla },
        ] => {
            let shape = (*heads, *stride, *offset, *rank, *width);
            let expected = (mla.heads, mla.nope + mla.rope, mla.nope, mla.kv_rank, mla.kv_rank);
            let part = LatentPart { before, gain: *w, eps: *eps, up: *up, layer: *layer, mla: mla.clone() };
            (shape == expected).then_some(part)
        }
        _ => None,
    }
}

fn decode(middle: &[Step]) -> Option<DecodePart> {
    let mut rest = middle;
    let mut part = DecodePart { norms: None, clip: None, heads: Heads { q: 0, kv: 0, dim: 0, scale: 0.0 }, window: None };
    if let [Step::Norm { dst: Slot::Q, w: q, norm, width, .. }, Step::Norm { dst: Slot::K, w: k, .. }, tail @ ..] = rest {
        part.norms = Some((*q, *k, norm.eps, *width));
        rest = tail;
    }
    if let [Step::Clip { buf: Slot::Q, limit }, Step::Clip { buf: Slot::K, .. }, Step::Clip { buf: Slot::V, .. }, tail @ ..] =
        rest
    {
        part.clip = Some(*limit);
        rest = tail;
    }
    match rest {
        [
            Step::Rope { buf: Slot::Q, offset: 0, .. },
            Step::Rope { buf: Slot::K, offset: 0, .. },
            Step::Attend { dst: Slot::Attn, q: Slot::Q, k: Slot::K, v: Slot::V, heads, window, .. },
        ] => Some(DecodePart { heads: *heads, window: *window, ..part }),
        _ => None,
    }
}

impl Lead {
    fn step(self) -> Step {
        Step::Norm { dst: Slot::Normed, src: Slot::Residual, w: self.w, b: self.b, norm: self.norm, width: self.width, runs: 1 }
    }
}

impl Product {
    fn step(self) -> Step {
        Step::Linear { dst: self.dst, src: self.src, w: self.w, b: self.b }
    }
}

impl Block {
    /// A word for reports.
    pub fn name(&self) -> &'static str {
        match self {
            Block::Attention { latent: Some(_), .. } => "latent",
            Block::Attention { .. } => "attention",
            Block::Moe { .. } => "moe",
            Block::Mlp { .. } => "mlp",
            Block::Head { .. } => "head",
        }
    }

    /// The steps that the block stands for.
    pub fn steps(&self) -> Vec<Step> {
        let add = |scale: &f32| Step::Add { acc: Slot::Residual, add: Slot::Block, scale: *scale };
        let act = Step::GatedAct { gate: Slot::Gate, up: Slot::Up };
        match self {
            Block::Attention { lead, first, middle, last, scale, .. } => {
                let mut steps = vec![lead.step()];
                steps.extend(first.iter().map(|p| p.step()));
                steps.extend_from_slice(middle);
                steps.extend([last.step(), add(scale)]);
                steps
            }
            Block::Moe { lead, router_w, router, layer, width, shared, scale } => {
                let layer = LayerId(*layer);
                let mut steps = vec![
                    lead.step(),
                    Step::Route { src: Slot::Normed, w: *router_w, router: *router, layer },
                    Step::Experts { dst: Slot::Block, src: Slot::Normed, layer, width: *width },
                ];
                if let Some(s) = shared {
                    steps.extend([s.gate.step(), s.up.step(), act, s.down.step()]);
                    steps.extend(s.router.map(Product::step));
                    let gate = s.router.map(|_| Slot::SharedGate);
                    steps.push(Step::AddGated { acc: Slot::Block, add: Slot::Shared, gate });
                }
                steps.push(add(scale));
                steps
            }
            Block::Mlp { lead, gate, up, down, scale } => {
                vec![lead.step(), gate.step(), up.step(), act, down.step(), add(scale)]
            }
            Block::Head { lead, w, b, scale } => {
                vec![lead.step(), Step::Head { dst: Slot::Logits, src: Slot::Normed, w: *w, b: *b, scale: *scale }]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{family, plan};

    /// Every half of every layer of every family is recognised, and its block stands for exactly the steps it replaces.
    #[test]
    fn blocks_stand_for_the_steps_they_replace() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference");
        for family in ["deepseek_v2", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"] {
            let config = std::fs::read(folder.join(family).join("config.json")).unwrap();
            let (_, spec) = family::read(&serde_json::from_slice(&config).unwrap()).unwrap();
            let plan = plan::plan(&spec);
            let groups = fuse(&plan);
            let mut at = 0;
            for group in &groups {
                assert_eq!(group.steps.start, at);
                at = group.steps.end;
                if let Some(block) = &group.block {
                    assert_eq!(block.steps(), plan.steps[group.steps.clone()], "{family}");
                }
            }
            assert_eq!(at, plan.steps.len());
            assert_eq!(rows_apart(&plan, &groups), groups.len() - 2, "the last layer's second half and the head, {family}");
            assert_eq!(groups.iter().filter(|g| g.block.is_some()).count(), 2 * spec.layers.len() + 1, "{family}");
            let count = |of: fn(&Block) -> bool| groups.iter().filter(|g| g.block.as_ref().is_some_and(of)).count();
            let decodes = count(|b| matches!(b, Block::Attention { decode: Some(_), latent: None, .. }));
            let latents = count(|b| matches!(b, Block::Attention { decode: None, latent: Some(_), .. }));
            let all = spec.layers.len();
            assert_eq!((decodes, latents), if family == "deepseek_v2" { (0, all) } else { (all, 0) }, "{family}");
        }
    }
}
