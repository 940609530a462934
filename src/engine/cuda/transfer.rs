//! The host's copy of all experts, page-locked memory that kernels read through the link, and the ring through which prompts have
//! them pass.
//!
//! Everything is copied there once, so that neither files nor the page cache matter afterwards: an artifact that is deleted or
//! changed while a model runs changes nothing.

use super::device::{CudaError, Device, During};
use super::memory::{Buffer, Event, Mapped};
use cudarc::driver::result;
use rayon::prelude::*;
use std::cell::Cell;
use std::sync::Arc;

/// Largest chunk asked for; drivers refuse single allocations long before memory is full.
const CHUNK_BYTES: usize = 4 << 30;
/// Smallest chunk worth having.
const LEAST_CHUNK_BYTES: usize = 64 << 20;
/// Piece that one thread copies.
const COPY_BYTES: usize = 1 << 20;

/// Consecutive runs of bytes in chunks, none of which is divided.
pub(super) struct HostRuns {
    /// First run of each chunk, and where every run of it lies.
    chunks: Vec<Mapped>,
    /// Chunk and offset of each run.
    places: Vec<(u32, usize)>,
    runs: Vec<usize>,
}

impl HostRuns {
    /// Makes room for runs of so many bytes, in chunks that halve whenever one is refused.
    pub fn new(device: &Arc<Device>, runs: Vec<usize>) -> Result<Self, CudaError> {
        let largest = runs.iter().copied().max().unwrap_or(0);
        let least = LEAST_CHUNK_BYTES.max(largest);
        let needed: usize = runs.iter().sum();
        let (mut chunks, mut places) = (Vec::new(), Vec::with_capacity(runs.len()));
        let mut most = CHUNK_BYTES.max(largest);
        let mut had = 0;
        while places.len() < runs.len() {
            let taken = fill(&runs[places.len()..], most);
            let bytes: usize = runs[places.len()..places.len() + taken].iter().sum();
            match Mapped::new(device, bytes) {
                Ok(chunk) => {
                    let mut at = 0;
                    for run in &runs[places.len()..places.len() + taken] {
                        places.push((chunks.len() as u32, at));
                        at += run;
                    }
                    had += bytes;
                    chunks.push(chunk);
                }
                Err(_) if most > least => most = (most / 2).max(least),
                Err(error) => {
                    let (needed_bytes, had_bytes) = (needed as u64, had as u64);
                    return Err(CudaError::PageLocked { needed_bytes, had_bytes, error: error.to_string() });
                }
            }
        }
        Ok(Self { chunks, places, runs })
    }

    /// Address of a run for kernels.
    pub fn at(&self, run: usize) -> u64 {
        let (chunk, at) = self.places[run];
        self.chunks[chunk as usize].at(at)
    }

    /// Fills part of a run.
    pub fn write(&mut self, run: usize, at: usize, src: &[u8]) {
        assert!(at + src.len() <= self.runs[run]);
        let (chunk, first) = self.places[run];
        let to = &mut self.chunks[chunk as usize].as_mut()[first + at..first + at + src.len()];
        to.par_chunks_mut(COPY_BYTES).zip(src.par_chunks(COPY_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
    }

    /// A run's bytes.
    pub fn bytes(&self, run: usize) -> &[u8] {
        let (chunk, at) = self.places[run];
        &self.chunks[chunk as usize].as_slice()[at..at + self.runs[run]]
    }
}

/// How many of the first runs fit into so many bytes; at least one.
fn fill(runs: &[usize], most: usize) -> usize {
    let mut bytes = 0;
    let fit = runs.iter().take_while(|&&r| {
        bytes += r;
        bytes <= most
    });
    fit.count().max(1)
}

/// Two halves of device memory: one is filled on the stream for transfers while kernels read the other.
pub(super) struct Ring {
    device: Arc<Device>,
    memory: Buffer,
    half_bytes: usize,
    /// The bytes of a half are there; the kernels are done with them.
    ready: [Event; 2],
    free: [Event; 2],
    turn: Cell<usize>,
}

impl Ring {
    /// Allocates.
    pub fn new(device: &Arc<Device>, half_bytes: usize) -> Result<Self, CudaError> {
        let two = || Ok([Event::new(device)?, Event::new(device)?]);
        let memory = Buffer::new(device, 2 * half_bytes)?;
        Ok(Self { device: Arc::clone(device), memory, half_bytes, ready: two()?, free: two()?, turn: Cell::new(0) })
    }

    /// Bytes of a half.
    pub fn half_bytes(&self) -> usize {
        self.half_bytes
    }

    /// Fills the next half with runs, one after the other, once the kernels are done with it; kernels launched from now on wait
    /// for it. Returns its address.
    pub fn fill<'a>(&self, runs: impl Iterator<Item = &'a [u8]>) -> Result<u64, CudaError> {
        let (turn, copies) = (self.turn.get(), self.device.copy_stream());
        let start = turn * self.half_bytes;
        self.free[turn].gate(copies)?;
        let mut at = start;
        for run in runs {
            assert!(at + run.len() <= start + self.half_bytes);
            // SAFETY: the range was just checked; page-locked runs live as long as the engine and are not written any more.
            unsafe { result::memcpy_htod_async(self.memory.at(at), run, copies) }.during("copy experts")?;
            at += run.len();
        }
        self.ready[turn].record(copies)?;
        self.ready[turn].gate(self.device.stream())?;
        Ok(self.memory.at(start))
    }

    /// The kernels launched so far are the last to read the half.
    pub fn release(&self) -> Result<(), CudaError> {
        let turn = self.turn.get();
        self.free[turn].record(self.device.stream())?;
        self.turn.set(1 - turn);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No run is divided, none is left out, and one that is larger than a chunk has its own.
    #[test]
    fn chunks_hold_whole_runs() {
        assert_eq!(fill(&[4, 4, 4], 8), 2);
        assert_eq!(fill(&[4, 4, 4], 7), 1);
        assert_eq!(fill(&[9, 1], 8), 1);
        assert_eq!(fill(&[1], 8), 1);
    }
}
