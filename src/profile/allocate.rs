//! Which item gets which of its choices so that the predicted damage is least within a budget of bytes: an exact
//! multiple-choice knapsack. Pure; must not know what an item is.

/// One way of storing an item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// What it takes.
    pub bytes: u64,
    /// Damage it does; costs of items add up.
    pub cost: f64,
}

/// The budget is below the smallest possible size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Infeasible {
    /// That size.
    pub smallest: u64,
}

/// A partial allocation: what it takes so far, and the way back to its choices.
#[derive(Clone, Copy)]
struct State {
    bytes: u64,
    cost: f64,
    /// Position in the list of all states' last choices.
    from: usize,
}

/// For each item, of which each has a choice, the index of the one that belongs to the cheapest allocation of at most `budget` bytes.
///
/// Dynamic programming over undominated pairs of bytes and cost. A pair is dropped when the Lagrangian bound shows that nothing
/// it leads to can beat an allocation already known (Dyer, Kayal and Walker 1984 bound the same problem this way), which leaves
/// few however many items there are.
pub fn allocate(items: &[Vec<Choice>], budget: u64) -> Result<Vec<usize>, Infeasible> {
    let least = |item: &Vec<Choice>| item.iter().map(|c| c.bytes).min().unwrap_or(0);
    let smallest: u64 = items.iter().map(least).sum();
    if smallest > budget {
        return Err(Infeasible { smallest });
    }
    let (price, known) = relax(items, budget);
    let priced = |c: &Choice| c.cost + price * c.bytes as f64;
    let mut later_bytes: u64 = smallest;
    let mut later_cost: f64 = items.iter().map(|i| i.iter().map(priced).fold(f64::INFINITY, f64::min)).sum();
    let mut states = vec![State { bytes: 0, cost: 0.0, from: usize::MAX }];
    // Last choice of every state ever kept, with the one before.
    let mut trail: Vec<(usize, usize)> = Vec::new();
    let slack = 1e-9 * known.abs() + f64::MIN_POSITIVE;
    for item in items {
        later_bytes -= least(item);
        later_cost -= item.iter().map(priced).fold(f64::INFINITY, f64::min);
        let mut next: Vec<(State, usize)> = Vec::with_capacity(states.len() * item.len());
        for state in &states {
            for (i, choice) in item.iter().enumerate() {
                let (bytes, cost) = (state.bytes + choice.bytes, state.cost + choice.cost);
                let bound = cost + later_cost - price * (budget as f64 - bytes as f64);
                if bytes + later_bytes <= budget && bound <= known + slack {
                    next.push((State { bytes, cost, from: state.from }, i));
                }
            }
        }
        next.sort_by(|(a, _), (b, _)| a.bytes.cmp(&b.bytes).then(a.cost.total_cmp(&b.cost)));
        states.clear();
        for (state, choice) in next {
            if states.last().is_none_or(|last: &State| state.cost < last.cost) {
                trail.push((state.from, choice));
                states.push(State { from: trail.len() - 1, ..state });
            }
        }
    }
    let mut at = states.last().map_or(usize::MAX, |s| s.from);
    let mut chosen = Vec::with_capacity(items.len());
    while let Some(&(before, choice)) = trail.get(at) {
        chosen.push(choice);
        at = before;
    }
    chosen.reverse();
    Ok(chosen)
}

/// The price of a byte at which choosing for each item alone just fits, and the cost of what is then chosen.
fn relax(items: &[Vec<Choice>], budget: u64) -> (f64, f64) {
    let at = |price: f64| {
        let one = |item: &Vec<Choice>| {
            let key = |c: &Choice| c.cost + price * c.bytes as f64;
            item.iter()
                .copied()
                .min_by(|a, b| key(a).total_cmp(&key(b)).then(a.bytes.cmp(&b.bytes)))
                .unwrap_or(Choice { bytes: 0, cost: 0.0 })
        };
        items.iter().map(one).fold((0, 0.0), |(bytes, cost), c| (bytes + c.bytes, cost + c.cost))
    };
    if at(0.0).0 <= budget {
        return (0.0, at(0.0).1);
    }
    let mut high = 1e-30;
    while at(high).0 > budget {
        high *= 4.0;
    }
    let mut low = high / 4.0;
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if at(middle).0 > budget { low = middle } else { high = middle }
    }
    (high, at(high).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn total(items: &[Vec<Choice>], chosen: &[usize]) -> (u64, f64) {
        items.iter().zip(chosen).fold((0, 0.0), |(b, c), (item, &i)| (b + item[i].bytes, c + item[i].cost))
    }

    /// Every allocation, one after the other.
    fn exhaustive(items: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let mut best: Option<f64> = None;
        let count: usize = items.iter().map(Vec::len).product();
        for mut n in 0..count {
            let chosen: Vec<usize> = items
                .iter()
                .map(|item| {
                    let i = n % item.len();
                    n /= item.len();
                    i
                })
                .collect();
            let (bytes, cost) = total(items, &chosen);
            if bytes <= budget && best.is_none_or(|b| cost < b) {
                best = Some(cost);
            }
        }
        best
    }

    proptest! {
        /// Exact, to the rounding of sums of a few costs. Fails if dominance keeps the wrong one of two states.
        #[test]
        fn nothing_beats_the_allocation(
            items in proptest::collection::vec(proptest::collection::vec((0u64..50, 0u32..1000), 1..5), 1..7),
            budget in 0u64..250,
        ) {
            let items: Vec<Vec<Choice>> = items
                .into_iter()
                .map(|i| i.into_iter().map(|(bytes, c)| Choice { bytes, cost: f64::from(c) / 64.0 }).collect())
                .collect();
            match (allocate(&items, budget), exhaustive(&items, budget)) {
                (Ok(chosen), Some(best)) => {
                    let (bytes, cost) = total(&items, &chosen);
                    prop_assert!(bytes <= budget && chosen.len() == items.len());
                    prop_assert!((cost - best).abs() < 1e-9, "{} {}", cost, best);
                }
                (Err(Infeasible { smallest }), None) => prop_assert!(smallest > budget),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }

    /// As many items as a deep model has; without the bound, states multiply to millions.
    #[test]
    fn three_hundred_items_take_no_time() {
        let item = |i: usize| {
            let weight = 1.0 + (i * 7919 % 101) as f64 / 10.0;
            let size = [1_000_003, 130_001, 17_011][i % 3];
            (0..5).map(|c| Choice { bytes: size * (4 + c as u64), cost: weight * 0.25f64.powi(c) }).collect()
        };
        let items: Vec<Vec<Choice>> = (0..300).map(item).collect();
        let least: u64 = items.iter().map(|i| i[0].bytes).sum();
        let budget = least * 5 / 4;
        let start = std::time::Instant::now();
        let chosen = allocate(&items, budget).unwrap();
        assert!(start.elapsed().as_secs() < 5);
        let (bytes, cost) = total(&items, &chosen);
        assert!(bytes <= budget && cost <= relax(&items, budget).1);
    }
}
