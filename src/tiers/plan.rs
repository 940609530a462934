//! What goes into the memory of the GPU and of the host: a plan made from numbers before a byte is loaded.

use super::sizing::{Layer, TooSmall, expected_coverage, slots_from, slots_per_layer};
use crate::ids::Component;
use serde::Serialize;

/// What a model needs.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Weights that are always there, by component: all but routed experts.
    pub weights: Vec<(Component, u64)>,
    /// Layers with routers, in order.
    pub layers: Vec<Layer>,
    /// Keys and values of one page in all layers.
    pub page_bytes: u64,
    /// Tokens of a page.
    pub page_tok: u64,
    /// Pages below which nothing useful can be run.
    pub min_pages: u64,
    /// Pages that come before further experts.
    pub wanted_pages: u64,
    /// Pages beyond which more are of no use.
    pub max_pages: u64,
    /// Through which prompts have experts without a slot pass, if there are any.
    pub ring_bytes: u64,
    /// Activations of the largest pass.
    pub workspace_bytes: u64,
    /// What the driver takes for itself: context, code of the kernels.
    pub driver_bytes: u64,
    /// Page-locked host memory through which experts come from the disk, if any lie only there.
    pub staging_bytes: u64,
}

/// Where the bytes go.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VramPlan {
    /// Weights that are always there, by name of the component.
    pub weights: Vec<(&'static str, u64)>,
    /// Experts in all layers together.
    pub experts: usize,
    /// Slots for experts of each layer with a router; all are filled from the start.
    pub slots: Vec<usize>,
    /// The slots.
    pub slot_bytes: u64,
    /// Share of the visits that the first residents are expected to serve.
    pub coverage: f64,
    /// Whether that comes from a profile, rather than from taking all experts to be used alike.
    pub profiled: bool,
    /// Experts without a slot.
    pub offloaded_bytes: u64,
    /// And in the memory of the host.
    #[serde(flatten)]
    pub host: HostPlan,
    /// Through which prompts have experts without a slot pass.
    pub ring_bytes: u64,
    /// Pages of keys and values.
    pub pages: u64,
    /// The pages.
    pub cache_bytes: u64,
    /// Tokens that they hold, of all sequences together.
    pub cache_tok: u64,
    /// Activations of the largest pass.
    pub workspace_bytes: u64,
    /// What the driver takes.
    pub driver_bytes: u64,
    /// Sum of all that lies in the memory of the GPU.
    pub total_bytes: u64,
    /// What it had to fit into.
    pub budget_bytes: u64,
    /// The smallest budget in which every expert has a slot.
    pub resident_bytes: u64,
}

/// What lies in the memory of the host, and what on the disk alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostPlan {
    /// Slots of each layer whose experts never leave, so that they need no copy in host memory.
    pub permanent: Vec<usize>,
    /// Copies in page-locked memory, by layer.
    #[serde(rename = "host_slots")]
    pub slots: Vec<usize>,
    /// Page-locked memory that is taken: the copies, and what experts from the disk pass through.
    #[serde(rename = "host_bytes")]
    pub bytes: u64,
    /// The least that works.
    #[serde(rename = "smallest_host_bytes")]
    pub smallest_bytes: u64,
    /// What was allowed.
    #[serde(rename = "host_budget_bytes")]
    pub budget_bytes: u64,
    /// Experts that are read from the disk whenever they are needed and neither in a slot nor in host memory by then.
    pub disk_bytes: u64,
}

impl HostPlan {
    /// Whether it is within what was allowed.
    pub fn fits(&self) -> bool {
        self.bytes <= self.budget_bytes
    }
}

impl Needs {
    fn fixed_bytes(&self) -> u64 {
        self.weights.iter().map(|w| w.1).sum::<u64>() + self.workspace_bytes + self.driver_bytes
    }

    /// The smallest budget in which every expert has a slot beside the pages that are wanted.
    pub fn resident_bytes(&self) -> u64 {
        let all: Vec<usize> = self.layers.iter().map(|l| l.experts).collect();
        self.fixed_bytes() + self.slot_bytes(&all) + self.wanted_pages.max(self.min_pages) * self.page_bytes
    }

    fn slot_bytes(&self, slots: &[usize]) -> u64 {
        self.layers.iter().zip(slots).map(|(l, &n)| n as u64 * l.slot_bytes).sum()
    }

    fn affordable(&self, bytes: u64, most: u64) -> u64 {
        bytes.checked_div(self.page_bytes).map_or(most, |n| n.min(most))
    }

    /// The plan with these slots, which fit: the rest goes to pages, those that are wanted, or all of use if every expert is there.
    fn with(&self, slots: Vec<usize>, budget_bytes: u64, host_budget_bytes: u64) -> VramPlan {
        let all: u64 = self.layers.iter().map(|l| l.experts as u64 * l.slot_bytes).sum();
        let slot_bytes = self.slot_bytes(&slots);
        let offloaded_bytes = all - slot_bytes;
        let ring_bytes = if offloaded_bytes > 0 { self.ring_bytes } else { 0 };
        let host = self.host(&slots, host_budget_bytes);
        let most = if offloaded_bytes > 0 { self.wanted_pages } else { self.max_pages }.max(self.min_pages);
        let pages = self.affordable(budget_bytes - self.fixed_bytes() - slot_bytes - ring_bytes, most);
        let cache_bytes = pages * self.page_bytes;
        VramPlan {
            weights: self.weights.iter().map(|(c, bytes)| (c.name(), *bytes)).collect(),
            experts: self.layers.iter().map(|l| l.experts).sum(),
            coverage: expected_coverage(&self.layers, &slots),
            profiled: self.layers.iter().any(Layer::is_profiled),
            slots,
            slot_bytes,
            offloaded_bytes,
            host,
            ring_bytes,
            pages,
            cache_bytes,
            cache_tok: pages * self.page_tok,
            workspace_bytes: self.workspace_bytes,
            driver_bytes: self.driver_bytes,
            total_bytes: self.fixed_bytes() + slot_bytes + ring_bytes + cache_bytes,
            budget_bytes,
            resident_bytes: self.resident_bytes(),
        }
    }

    /// What lies in host memory beside these slots: a copy of every expert, since any may leave its slot. Where that is too much,
    /// as many slots as need be never change hands and their experts' copies are given back, down to one token's slots that do.
    /// Where that is too little too, half of those slots stay, and copies are spent like slots are: the rest is on the disk. Below one
    /// token's copies the plan takes more than the budget.
    fn host(&self, slots: &[usize], budget_bytes: u64) -> HostPlan {
        let bytes = |n: &[usize]| self.slot_bytes(n);
        let all: Vec<usize> = self.layers.iter().map(|l| l.experts).collect();
        let none = vec![0; all.len()];
        if slots == all {
            return HostPlan { permanent: all, slots: none, budget_bytes, ..HostPlan::default() };
        }
        let without = |permanent: &[usize]| all.iter().zip(permanent).map(|(e, p)| e - p).collect::<Vec<_>>();
        let most: Vec<usize> = self.layers.iter().zip(slots).map(|(l, &s)| s.saturating_sub(l.floor())).collect();
        let half: Vec<usize> = most.iter().map(|p| p / 2).collect();
        let least: Vec<usize> = self.layers.iter().zip(&half).map(|(l, p)| (p + l.floor()).min(l.experts)).collect();
        let in_memory = bytes(&without(&most));
        let with_disk = bytes(&least) - bytes(&half) + self.staging_bytes;
        let smallest_bytes = in_memory.min(with_disk);
        let mut permanent = none;
        let mut taken = bytes(&all);
        while taken > budget_bytes {
            let before = taken;
            for (l, layer) in self.layers.iter().enumerate() {
                if taken > budget_bytes && permanent[l] < most[l] {
                    permanent[l] += 1;
                    taken -= layer.slot_bytes;
                }
            }
            if taken == before {
                let left = budget_bytes.saturating_sub(self.staging_bytes) + bytes(&half);
                let held = slots_from(&self.layers, least.clone(), left).unwrap_or(least);
                let disk_bytes = bytes(&all) - bytes(&held);
                let copies: Vec<usize> = held.iter().zip(&half).map(|(n, p)| n - p).collect();
                let bytes = bytes(&copies) + self.staging_bytes;
                return HostPlan { permanent: half, slots: copies, bytes, smallest_bytes, budget_bytes, disk_bytes };
            }
        }
        HostPlan { slots: without(&permanent), permanent, bytes: taken, smallest_bytes, budget_bytes, disk_bytes: 0 }
    }

    /// A plan with the same slots where host memory is another.
    pub fn beside(&self, plan: &VramPlan, host_budget_bytes: u64) -> VramPlan {
        VramPlan { host: self.host(&plan.slots, host_budget_bytes), ..plan.clone() }
    }
}

impl VramPlan {
    /// The plan with other slots and pages, what lies on the host as it is.
    pub fn with(&self, needs: &Needs, slots: Vec<usize>, pages: u64) -> Self {
        let (slot_bytes, cache_bytes) = (needs.slot_bytes(&slots), pages * needs.page_bytes);
        Self {
            coverage: expected_coverage(&needs.layers, &slots),
            offloaded_bytes: self.offloaded_bytes + self.slot_bytes - slot_bytes,
            total_bytes: self.total_bytes - self.slot_bytes - self.cache_bytes + slot_bytes + cache_bytes,
            slots,
            slot_bytes,
            pages,
            cache_bytes,
            cache_tok: pages * needs.page_tok,
            ..self.clone()
        }
    }
}

/// The slots without as many as free so many bytes, each time one of the layer that has most beyond its permanent ones; `None` if
/// that leaves a layer without any.
pub fn give_back(layers: &[Layer], slots: &[usize], permanent: &[usize], bytes: u64) -> Option<Vec<usize>> {
    let mut left = slots.to_vec();
    let mut freed = 0;
    while freed < bytes {
        let spare = |l: &usize| left[*l] - permanent[*l].max(1).min(left[*l]);
        let l = (0..left.len()).filter(|l| spare(l) > 0).max_by_key(|l| (spare(l), std::cmp::Reverse(*l)))?;
        left[l] -= 1;
        freed += layers[l].slot_bytes;
    }
    Some(left)
}

/// Fits a model into a budget. What must be there comes first: weights that every token uses, workspace, driver, the fewest slots
/// and pages. Then pages up to those that are wanted, then slots up to all experts, then pages up to those that are of use. With a
/// slot for every expert there is no ring: where its bytes are slots enough for all, they are, so that a larger budget never has fewer
/// experts resident. `host_bytes` bounds page-locked memory.
pub fn plan(needs: &Needs, budget_bytes: u64, host_bytes: u64) -> Result<VramPlan, TooSmall> {
    let all: Vec<usize> = needs.layers.iter().map(|l| l.experts).collect();
    let whole = needs.fixed_bytes() + needs.slot_bytes(&all) + needs.min_pages * needs.page_bytes;
    let floor: Vec<usize> = needs.layers.iter().map(Layer::floor).collect();
    let least = needs.fixed_bytes() + needs.slot_bytes(&floor) + needs.ring_bytes + needs.min_pages * needs.page_bytes;
    let smallest_bytes = whole.min(least);
    if budget_bytes < smallest_bytes {
        return Err(TooSmall { smallest_bytes });
    }
    let wanted = needs.wanted_pages.saturating_sub(needs.min_pages);
    let spare = needs.affordable(budget_bytes.saturating_sub(least), wanted);
    if budget_bytes < least || budget_bytes >= whole + spare * needs.page_bytes {
        return Ok(needs.with(all, budget_bytes, host_bytes));
    }
    let pages = needs.min_pages + spare;
    let for_slots = budget_bytes - needs.fixed_bytes() - needs.ring_bytes - pages * needs.page_bytes;
    Ok(needs.with(slots_per_layer(&needs.layers, for_slots)?, budget_bytes, host_bytes))
}

/// The same with so many slots in each layer, whatever would fit: the fewest pages come with them.
pub fn with_slots(needs: &Needs, slots: usize, budget_bytes: u64, host_bytes: u64) -> Result<VramPlan, TooSmall> {
    let slots: Vec<usize> = needs.layers.iter().map(|l| slots.clamp(1, l.experts)).collect();
    let smallest_bytes = needs.fixed_bytes() + needs.slot_bytes(&slots) + needs.ring_bytes + needs.min_pages * needs.page_bytes;
    if budget_bytes < smallest_bytes {
        return Err(TooSmall { smallest_bytes });
    }
    Ok(needs.with(slots, budget_bytes, host_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two layers of four experts of 100 bytes, two a token, beside 260 bytes that are always there and pages of 10.
    fn needs() -> Needs {
        let layer = Layer { experts: 4, top_k: 2, slot_bytes: 100, visits: vec![6, 2, 1, 1] };
        Needs {
            weights: vec![(Component::Router, 50), (Component::Attention, 100)],
            layers: vec![layer.clone(), Layer { visits: vec![4, 3, 3, 0], ..layer }],
            page_bytes: 10,
            page_tok: 16,
            min_pages: 4,
            wanted_pages: 10,
            max_pages: 50,
            ring_bytes: 0,
            workspace_bytes: 60,
            driver_bytes: 50,
            staging_bytes: 100,
        }
    }

    /// The named smallest budget works and one byte less does not. Fails if slots or the driver are left out of the sum.
    #[test]
    fn a_refusal_names_the_smallest_budget_that_works() {
        let TooSmall { smallest_bytes } = plan(&needs(), 0, 0).unwrap_err();
        assert_eq!(smallest_bytes, 260 + 4 * 100 + 40);
        let least = plan(&needs(), smallest_bytes, 0).unwrap();
        assert_eq!((least.pages, &least.slots[..], least.total_bytes), (4, &[2, 2][..], smallest_bytes));
        assert_eq!(plan(&needs(), smallest_bytes - 1, 0), Err(TooSmall { smallest_bytes }));
    }

    /// Integers, exact.
    #[test]
    fn every_expert_has_a_slot_from_the_budget_that_says_so() {
        let all = needs().resident_bytes();
        assert_eq!(all, 260 + 800 + 100);
        assert_eq!(plan(&needs(), all, 0).unwrap().offloaded_bytes, 0);
        assert_eq!(plan(&needs(), all - 1, 0).unwrap().offloaded_bytes, 100);
    }

    /// Integers, exact. Fails if slots come before the pages that are wanted, or pages beyond those before the last slot.
    #[test]
    fn pages_that_are_wanted_then_experts_then_pages_of_use() {
        let at = |budget| plan(&needs(), budget, 150).unwrap();
        let p = at(755);
        assert_eq!((p.pages, &p.slots[..], p.total_bytes), (9, &[2, 2][..], 750));
        let p = at(860);
        assert_eq!((p.pages, &p.slots[..], p.offloaded_bytes), (10, &[2, 3][..], 300));
        assert!((p.coverage - (0.8 + 1.0) / 2.0).abs() < 1e-15 && p.profiled, "two divisions: 1e-15");
        let p = at(1200);
        assert_eq!((p.pages, &p.slots[..], p.offloaded_bytes, p.host.bytes), (14, &[4, 4][..], 0, 0));
        let p = at(1 << 40);
        assert_eq!((p.pages, p.cache_tok, p.total_bytes), (50, 800, 260 + 800 + 500));
    }

    /// Integers, exact: a slot for every expert needs no ring, so that a budget may hold all of a small model and yet not a part of
    /// it; and slots that are asked for come before pages.
    #[test]
    fn the_ring_comes_with_the_first_expert_without_a_slot() {
        let needs = Needs { ring_bytes: 90, ..needs() };
        let p = plan(&needs, 1159, 1 << 40).unwrap();
        assert_eq!((p.ring_bytes, &p.slots[..], p.host.bytes, p.total_bytes), (90, &[4, 3][..], 800, 260 + 700 + 90 + 100));
        let large = Needs { ring_bytes: 450, ..needs.clone() };
        assert_eq!(plan(&large, 1099, 0), Err(TooSmall { smallest_bytes: 260 + 800 + 40 }));
        assert_eq!(plan(&large, 1100, 0).unwrap().ring_bytes, 0);
        let level = Needs { ring_bytes: 400, ..needs.clone() };
        assert!((1100..1200).all(|budget| plan(&level, budget, 0).unwrap().offloaded_bytes == 0));
        let asked = with_slots(&needs, 3, 1010, 1 << 40).unwrap();
        assert_eq!((asked.pages, &asked.slots[..]), (6, &[3, 3][..]));
        assert_eq!(with_slots(&needs, 3, 989, 0), Err(TooSmall { smallest_bytes: 990 }));
    }

    /// Integers, exact. Ten experts, two a token, in eight and six slots. Fails if permanent ones keep their copies, if the slots of
    /// one token may become permanent, or if what experts from the disk pass through is not counted.
    #[test]
    fn residents_give_their_copies_back_before_anything_is_left_on_the_disk() {
        let layer = Layer { experts: 10, top_k: 2, slot_bytes: 100, visits: Vec::new() };
        let needs = Needs { layers: vec![layer; 2], ..needs() };
        let at = |host| needs.host(&[8, 6], host);
        let host = at(2000);
        assert_eq!((&host.permanent[..], &host.slots[..], host.bytes, host.disk_bytes), (&[0, 0][..], &[10, 10][..], 2000, 0));
        let host = at(1650);
        assert_eq!((&host.permanent[..], &host.slots[..], host.bytes, host.disk_bytes), (&[2, 2][..], &[8, 8][..], 1600, 0));
        let host = at(1000);
        assert_eq!((&host.permanent[..], &host.slots[..], host.bytes, host.disk_bytes), (&[6, 4][..], &[4, 6][..], 1000, 0));
        let host = at(999);
        assert_eq!((&host.permanent[..], &host.slots[..], host.bytes, host.disk_bytes), (&[3, 2][..], &[4, 4][..], 900, 700));
        assert_eq!((at(0).smallest_bytes, &at(0).slots[..]), (500, &[2, 2][..]));
        assert_eq!(needs.host(&[10, 10], 0).bytes, 0);
    }

    /// Integers, exact.
    #[test]
    fn slots_are_given_back_where_most_can_be_spared() {
        let layers = needs().layers;
        assert_eq!(give_back(&layers, &[4, 3], &[0, 0], 0), Some(vec![4, 3]));
        assert_eq!(give_back(&layers, &[4, 3], &[0, 0], 250), Some(vec![2, 2]));
        assert_eq!(give_back(&layers, &[4, 3], &[3, 0], 250), Some(vec![3, 1]));
        assert_eq!(give_back(&layers, &[4, 3], &[0, 0], 501), None);
    }

    proptest! {
        /// Every expert is in one place at least, and no more is locked than is allowed, if that works at all.
        #[test]
        fn the_host_keeps_to_its_budget(s in 1usize..5, t in 1usize..5, budget in 0u64..900) {
            let host = needs().host(&[s, t], budget);
            let copies = needs().slot_bytes(&host.slots) + needs().slot_bytes(&host.permanent);
            prop_assert!(host.bytes <= budget.max(host.smallest_bytes));
            prop_assert!(s == 4 && t == 4 || copies + host.disk_bytes == 800);
            prop_assert!(budget < host.smallest_bytes || host.bytes <= budget);
        }

        /// Fails if a ring that is as large as the experts it serves keeps them out.
        #[test]
        fn a_larger_budget_has_no_fewer_residents(budget in 700u64..1400, more in 0u64..200, ring_bytes in 0u64..500) {
            let needs = Needs { ring_bytes, ..needs() };
            let at = |budget| plan(&needs, budget, 0).map_or(0, |p| p.slot_bytes);
            prop_assert!(at(budget) <= at(budget + more));
        }

        /// Fails if the pages of use are counted from the whole budget again.
        #[test]
        fn the_sum_never_exceeds_the_budget(budget in 700u64..4000) {
            let p = plan(&needs(), budget, 0).unwrap();
            let parts = p.weights.iter().map(|w| w.1).sum::<u64>() + p.slot_bytes + p.cache_bytes + p.workspace_bytes + p.driver_bytes;
            prop_assert!(parts == p.total_bytes && p.total_bytes <= budget);
            prop_assert_eq!(p.slot_bytes + p.offloaded_bytes, 800);
        }
    }
}
