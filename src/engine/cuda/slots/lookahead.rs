//! Experts that come for the layer behind before it has chosen, in a branch beside the kernels.

use super::super::device::CudaError;
use super::super::fast::{BringArgs, FetchArgs};
use super::super::launch::{self, Grid, Limits};
use super::{AHEAD_AT, AHEAD_BYTES, ARRIVED_AT, MOST_AHEAD, MOST_EXPERTS, Tiers};

/// What a layer will probably choose for so many tokens.
#[derive(Clone, Copy)]
pub(in crate::engine::cuda) struct Guess {
    pub num_tok: usize,
    pub top_k: usize,
    pub of: GuessOf,
}

/// Where it is from.
#[derive(Clone, Copy)]
pub(in crate::engine::cuda) enum GuessOf {
    /// The highest of [`Tiers::guesses`], which a map or the layer's own router leaves there.
    Logits,
    /// Choices `[steps][rows][K]` made beforehand, at the step that is counted there.
    Script { script: u64, step: u64, steps: usize, rows: usize },
}

impl Tiers {
    /// Which of two sets holds what a layer names for the one behind it.
    pub(super) fn set(&self, layer: u32) -> usize {
        self.layers.range(..layer).count() % 2
    }

    /// What is put on the stream of copies from now on begins with what is put on the other.
    pub(in crate::engine::cuda) fn fork(&self) -> Result<(), CudaError> {
        self.fork.record(self.device.stream())?;
        self.fork.gate(self.device.copy_stream())?;
        self.forked.set(true);
        Ok(())
    }

    /// What the kernel takes that brings experts for the layer behind, as [`Tiers::ahead`] has them named, and how it is launched.
    pub(in crate::engine::cuda) fn bring_ahead(&self, args: &FetchArgs, limits: Limits) -> (BringArgs, Grid) {
        let (launch, set) = (launch::bring(limits), args.set as usize);
        let bring = BringArgs {
            at: args.next,
            set: self.cells.at(AHEAD_AT + set * AHEAD_BYTES),
            arrived: self.cells.at(ARRIVED_AT + (2 + set) * 2 * 4 * MOST_EXPERTS),
            stats: args.stats,
            stages: launch.stages as i32,
            ns_per_byte: args.ns_per_byte,
        };
        (bring, launch.grid)
    }

    /// Whatever is put behind the kernels from now on waits for what is brought beside them too.
    pub(in crate::engine::cuda) fn join(&self) -> Result<(), CudaError> {
        self.awaited.set(None);
        if self.forked.replace(false) {
            self.fork.record(self.device.copy_stream())?;
            self.fork.gate(self.device.stream())?;
        }
        Ok(())
    }

    /// The same, with experts named for the layer behind, whose addresses and descriptors are these.
    pub(in crate::engine::cuda) fn ahead(
        &self,
        args: FetchArgs,
        next: u32,
        tables: (u64, u64),
        guess: Guess,
        most: usize,
        limits: Limits,
    ) -> FetchArgs {
        let Some(state) = self.layers.get(&next).filter(|_| self.lacks(next)) else { return args };
        self.awaited.set(Some(next));
        let args = FetchArgs {
            ahead_blocks: launch::bring(limits).grid.blocks[0] as i32,
            next: self.known_slots(state, tables),
            t: guess.num_tok as i32,
            k: guess.top_k as i32,
            most_ahead: most.min(MOST_AHEAD) as i32,
            ..args
        };
        match guess.of {
            GuessOf::Logits => FetchArgs { logits: self.guesses(), ..args },
            GuessOf::Script { script, step, steps, rows } => {
                FetchArgs { script, step, steps: steps as i32, rows: rows as i32, ..args }
            }
        }
    }

    /// The map that foresees a layer's router from what the one before it sees, bf16 `[E, D]`, if it was learned.
    pub(in crate::engine::cuda) fn map(&self, layer: u32) -> Option<u64> {
        self.maps.get(&layer).map(|map| map.at(0))
    }

    /// Where the logits of a layer's router are before it is the layer's turn, `[T, E]`.
    pub(in crate::engine::cuda) fn guesses(&self) -> u64 {
        self.guesses.at(0)
    }
}
