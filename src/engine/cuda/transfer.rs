//! Copies of experts in page-locked host memory, which kernels read through the link, and the ring through which prompts have
//! experts pass.
//!
//! What is copied there does not depend on files or the page cache any more: an artifact that is deleted or changed while a model
//! runs changes nothing for it.

use super::cold::Room;
use super::device::{CudaError, Device, During};
use super::memory::{Buffer, Event, Mapped, Pinned};
use super::numa::Nodes;
use cudarc::driver::{result, sys};
use rayon::prelude::*;
use std::cell::Cell;
use std::sync::Arc;

/// Largest chunk asked for; drivers refuse single allocations long before memory is full.
const CHUNK_BYTES: usize = 4 << 30;
/// Smallest chunk worth having.
const LEAST_CHUNK_BYTES: usize = 1 << 20;
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
    /// Makes room for runs of so many bytes, in chunks that halve whenever one is refused; of a system that locks no more than
    /// `limit_bytes`, if given.
    pub fn new(
        device: &Arc<Device>,
        runs: Vec<usize>,
        nodes: Option<&Nodes>,
        limit_bytes: Option<u64>,
    ) -> Result<Self, CudaError> {
        let mut left = limit_bytes.unwrap_or(u64::MAX);
        let mut allocate = |bytes: usize| {
            left = left
                .checked_sub(bytes as u64)
                .ok_or_else(|| CudaError::Driver { what: "allocate page-locked memory", error: "a limit is imitated".into() })?;
            Mapped::new(device, bytes, nodes)
        };
        let (chunks, places) = in_chunks(&runs, &mut allocate).map_err(|(had, error)| {
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

    /// The bytes of some runs, given in order, each once.
    pub fn some_mut(&mut self, runs: &[usize]) -> Vec<&mut [u8]> {
        let mut found = Vec::with_capacity(runs.len());
        let mut runs = runs.iter().peekable();
        for (index, chunk) in (0u32..).zip(&mut self.chunks) {
            let (mut rest, mut at) = (chunk.as_mut(), 0);
            while let Some(&run) = runs.next_if(|&&r| self.places[r].0 == index) {
                let (_, tail) = rest.split_at_mut(self.places[run].1 - at);
                let (mine, tail) = tail.split_at_mut(self.runs[run]);
                (rest, at) = (tail, self.places[run].1 + self.runs[run]);
                found.push(mine);
            }
        }
        found
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
    /// Where the next run of the half goes.
    at: Cell<usize>,
}

impl Ring {
    /// Allocates.
    pub fn new(device: &Arc<Device>, half_bytes: usize) -> Result<Self, CudaError> {
        let two = || -> Result<[Event; 2], CudaError> { Ok([Event::new(device)?, Event::new(device)?]) };
        let memory = Buffer::new(device, 2 * half_bytes)?;
        let (turn, at) = (Cell::new(0), Cell::new(0));
        Ok(Self { device: Arc::clone(device), memory, half_bytes, ready: two()?, free: two()?, turn, at })
    }

    /// Bytes of a half.
    pub fn half_bytes(&self) -> usize {
        self.half_bytes
    }

    /// Begins to fill the next half once the kernels are done with it; returns its address.
    pub fn begin(&self) -> Result<u64, CudaError> {
        let turn = self.turn.get();
        self.free[turn].gate(self.device.copy_stream())?;
        self.at.set(turn * self.half_bytes);
        Ok(self.memory.at(self.at.get()))
    }

    /// Appends a run to the half.
    pub fn push(&self, run: &[u8]) -> Result<(), CudaError> {
        let at = self.at.get();
        assert!(at + run.len() <= (self.turn.get() + 1) * self.half_bytes);
        self.device.current()?;
        // SAFETY: the range was just checked; page-locked runs live as long as the engine and are not written before the kernels
        // are done with the half, rooms not before the event that is recorded behind this copy.
        unsafe { result::memcpy_htod_async(self.memory.at(at), run, self.device.copy_stream()) }.during("copy experts")?;
        self.at.set(at + run.len());
        Ok(())
    }

    /// Kernels launched from now on wait for the half.
    pub fn end(&self) -> Result<(), CudaError> {
        let turn = self.turn.get();
        self.ready[turn].record(self.device.copy_stream())?;
        self.ready[turn].gate(self.device.stream())
    }

    /// The kernels launched so far are the last to read the half.
    pub fn release(&self) -> Result<(), CudaError> {
        let turn = self.turn.get();
        self.free[turn].record(self.device.stream())?;
        self.turn.set(1 - turn);
        Ok(())
    }
}

/// Page-locked memory that an expert comes from the disk into, and the copy that empties it.
pub(super) struct Staged {
    memory: Pinned,
    copied: Event,
}

impl Staged {
    /// Allocates.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: Pinned::new(device, bytes)?, copied: Event::new(device)? })
    }

    /// What was read.
    pub fn as_slice(&self) -> &[u8] {
        self.memory.as_slice()
    }

    /// Whatever is in a stream by now is the last to need it.
    pub fn release(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        self.copied.record(stream)
    }
}

impl Room for Staged {
    fn bytes(&mut self) -> &mut [u8] {
        self.memory.as_mut()
    }

    fn is_free(&self) -> bool {
        self.copied.is_over()
    }

    // An event that cannot be waited for belongs to a context that has failed, and whatever comes next says so.
    fn wait(&self) {
        self.copied.wait().ok();
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
