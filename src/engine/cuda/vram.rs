//! What goes into GPU memory: a plan made from numbers before a byte is loaded. Pure.

use crate::ids::Component;
use serde::Serialize;

/// What a model needs.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Weights by component.
    pub weights: Vec<(Component, u64)>,
    /// Keys and values of one page in all layers.
    pub page_bytes: u64,
    /// Pages below which nothing useful can be run.
    pub min_pages: u64,
    /// Pages beyond which more are of no use.
    pub max_pages: u64,
    /// Activations of the largest pass.
    pub workspace_bytes: u64,
}

/// Where the bytes go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VramPlan {
    /// What is stored and how many bytes it takes, in order.
    pub parts: Vec<(&'static str, u64)>,
    /// Pages of keys and values.
    pub pages: u64,
    /// Sum of the parts.
    pub total_bytes: u64,
    /// What they had to fit into.
    pub budget_bytes: u64,
}

/// A budget that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// The smallest budget that works.
    pub smallest_bytes: u64,
}

/// Fits a model into a budget: weights and workspace first, all the rest for pages.
pub fn plan(needs: &Needs, budget_bytes: u64) -> Result<VramPlan, TooSmall> {
    let fixed = needs.weights.iter().map(|w| w.1).sum::<u64>() + needs.workspace_bytes;
    let smallest_bytes = fixed + needs.min_pages * needs.page_bytes;
    if smallest_bytes > budget_bytes {
        return Err(TooSmall { smallest_bytes });
    }
    let pages = ((budget_bytes - fixed) / needs.page_bytes.max(1)).min(needs.max_pages).max(needs.min_pages);
    let mut parts: Vec<(&'static str, u64)> = needs.weights.iter().map(|(c, bytes)| (c.name(), *bytes)).collect();
    parts.push(("keys and values", pages * needs.page_bytes));
    parts.push(("workspace", needs.workspace_bytes));
    let total_bytes = parts.iter().map(|p| p.1).sum();
    Ok(VramPlan { parts, pages, total_bytes, budget_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs() -> Needs {
        Needs {
            weights: vec![(Component::Experts, 700), (Component::Attention, 100)],
            page_bytes: 10,
            min_pages: 4,
            max_pages: 50,
            workspace_bytes: 60,
        }
    }

    /// The named smallest budget works and one byte less does not.
    #[test]
    fn a_refusal_names_the_smallest_budget_that_works() {
        let TooSmall { smallest_bytes } = plan(&needs(), 0).unwrap_err();
        assert_eq!(smallest_bytes, 900);
        assert_eq!(plan(&needs(), 900).unwrap().pages, 4);
        assert!(plan(&needs(), 899).is_err());
    }

    #[test]
    fn pages_take_what_is_left_but_no_more_than_is_of_use() {
        assert_eq!(plan(&needs(), 1005).unwrap().pages, 14);
        let roomy = plan(&needs(), 1 << 40).unwrap();
        assert_eq!((roomy.pages, roomy.total_bytes), (50, 1360));
    }
}
