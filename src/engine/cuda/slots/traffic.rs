//! What fetching experts came to, in numbers.

/// Experts brought ahead from which their use can be judged.
const ENOUGH_AHEAD: u64 = 1000;

/// What went over the link in steps, summed over all layers; waves of prompts are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    /// Experts that steps used, each once a layer and step.
    pub chosen: u64,
    /// Of those, brought into a slot.
    pub fetched: u64,
    /// Of those, read over the link without taking a slot.
    pub direct: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Time in which bytes were on their way, nanoseconds.
    pub busy_ns: u64,
    /// Of that, time in which the products had nothing else to do.
    pub stall_ns: u64,
    /// Layers times steps.
    pub steps: u64,
    /// Brought into a slot for the layer behind before it asked.
    pub ahead: u64,
    /// Of those, used by it.
    pub used: u64,
    /// Experts read from the disk, those of prompts too.
    pub disk_experts: u64,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Time in which nothing but waiting for them was done, nanoseconds.
    pub disk_ns: u64,
}

impl Traffic {
    /// Experts used that nothing but the link could bring.
    pub fn missed(&self) -> u64 {
        self.fetched + self.direct + self.used
    }

    /// Share of the experts used that were in a slot and not brought there for this very use.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.missed() as f64 / self.chosen.max(1) as f64
    }

    /// Share of the missed experts that came before they were asked for.
    pub fn recall(&self) -> f64 {
        self.used as f64 / self.missed().max(1) as f64
    }

    /// Whether bringing experts ahead is known to cost more than it saves: one brought in vain takes as long on the link as one that is
    /// used spares, so half of them have to be. Too few tell nothing.
    pub fn ahead_in_vain(&self) -> bool {
        self.ahead >= ENOUGH_AHEAD && 2 * self.used < self.ahead
    }

    /// Share of what came before it was asked for that nobody asked for.
    pub fn waste(&self) -> f64 {
        1.0 - self.used as f64 / self.ahead.max(1) as f64
    }

    /// Bytes a second while fetching.
    pub fn link_bytes_s(&self) -> f64 {
        1e9 * self.bytes as f64 / self.busy_ns.max(1) as f64
    }

    /// Bytes a second while waiting for the disk.
    pub fn disk_bytes_s(&self) -> f64 {
        1e9 * self.disk_bytes as f64 / self.disk_ns.max(1) as f64
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            chosen: self.chosen + other.chosen,
            fetched: self.fetched + other.fetched,
            direct: self.direct + other.direct,
            bytes: self.bytes + other.bytes,
            busy_ns: self.busy_ns + other.busy_ns,
            stall_ns: self.stall_ns + other.stall_ns,
            steps: self.steps + other.steps,
            ahead: self.ahead + other.ahead,
            used: self.used + other.used,
            disk_experts: self.disk_experts + other.disk_experts,
            disk_bytes: self.disk_bytes + other.disk_bytes,
            disk_ns: self.disk_ns + other.disk_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One expert in two is the least that is worth it, and a thousand the fewest that say so.
    #[test]
    fn experts_brought_in_vain_are_given_up() {
        let traffic = |ahead, used| Traffic { ahead, used, ..Traffic::default() };
        let found = [(999, 0), (1000, 499), (1000, 500), (0, 0)].map(|(ahead, used)| traffic(ahead, used).ahead_in_vain());
        assert_eq!(found, [false, true, false, false]);
    }
}
