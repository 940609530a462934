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
    chunks: Vec<Mapped>,
    /// Chunk and offset of each run.
    places: Vec<(u32, usize)>,
    runs: Vec<usize>,
}

impl HostRuns {
    /// Makes room for runs of so many bytes, in chunks that halve whenever one is refused.
    pub fn new(device: &Arc<Device>, runs: Vec<usize>) -> Result<Self, CudaError> {
        let (chunks, places) = in_chunks(&runs, &mut |bytes| Mapped::new(device, bytes)).map_err(|(had, error)| {
            let needed_bytes = runs.iter().sum::<usize>() as u64;
            CudaError::PageLocked { needed_bytes, had_bytes: had as u64, error: error.to_string() }
        })?;
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

type InChunks<C> = (Vec<C>, Vec<(u32, usize)>);

/// Chunks that hold runs of so many bytes whole, and chunk and offset of each run. What is refused is asked for in halves; where
/// the smallest is refused too, how many bytes were had, and why no more.
fn in_chunks<C, E>(runs: &[usize], allocate: &mut dyn FnMut(usize) -> Result<C, E>) -> Result<InChunks<C>, (usize, E)> {
    let largest = runs.iter().copied().max().unwrap_or(0);
    let least = LEAST_CHUNK_BYTES.max(largest);
    let (mut most, mut had) = (CHUNK_BYTES.max(largest), 0);
    let (mut chunks, mut places) = (Vec::new(), Vec::with_capacity(runs.len()));
    while places.len() < runs.len() {
        let mut ends = Vec::new();
        let mut bytes = 0;
        for run in &runs[places.len()..] {
            if bytes > 0 && bytes + run > most {
                break;
            }
            ends.push(bytes);
            bytes += run;
        }
        match allocate(bytes) {
            Ok(chunk) => {
                places.extend(ends.into_iter().map(|at| (chunks.len() as u32, at)));
                chunks.push(chunk);
                had += bytes;
            }
            Err(_) if most > least => most = (most / 2).max(least),
            Err(error) => return Err((had, error)),
        }
    }
    Ok((chunks, places))
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

    /// Exact. Fails if a run is divided or left out, or if a chunk that was refused is given up rather than halved.
    #[test]
    fn what_is_refused_comes_in_smaller_chunks() {
        let runs = vec![100 << 20; 30];
        let at_most = |limit: usize| {
            let mut asked = Vec::new();
            let chunks = in_chunks(&runs, &mut |bytes| {
                if bytes <= limit {
                    return Ok(bytes);
                }
                asked.push(bytes);
                Err("no more")
            });
            (chunks, asked)
        };
        let (whole, asked) = at_most(usize::MAX);
        assert_eq!((whole.unwrap().0, asked.len()), (vec![30 * (100 << 20)], 0));
        let (halved, asked) = at_most(1 << 30);
        let (chunks, places) = halved.unwrap();
        assert_eq!((chunks, asked), (vec![10 * (100 << 20); 3], vec![30 * (100 << 20), 20 * (100 << 20)]));
        assert_eq!((places[9], places[10], places[29]), ((0, 9 * (100 << 20)), (1, 0), (2, 9 * (100 << 20))));
        assert_eq!(at_most(99 << 20).0, Err((0, "no more")));
    }

    /// Exact: a machine that gives 700 MB in all.
    #[test]
    fn a_refusal_says_how_much_was_had() {
        let mut left = 700 << 20;
        let refused = in_chunks(&[100 << 20; 30], &mut |bytes| {
            left = if bytes <= left { left - bytes } else { return Err("no more") };
            Ok(())
        });
        assert_eq!(refused, Err((700 << 20, "no more")));
    }
}
