//! Runs of bytes on their way to the device.

use super::device::{CudaError, Device, During};
use super::memory::{Buffer, Event, Pinned};
use cudarc::driver::result;
use rayon::prelude::*;
use std::sync::Arc;

/// Bytes of one staging buffer at most; large enough that a copy is not all overhead.
const STAGING_BYTES: usize = 32 << 20;
/// Buffers in turn: one is filled while others travel.
const STAGING_BUFFERS: usize = 3;
/// Piece that one thread copies.
const COPY_BYTES: usize = 1 << 20;

/// Copies runs of bytes to the device through page-locked buffers, filling one while the others travel.
pub(super) struct Stager<'a> {
    device: &'a Arc<Device>,
    buffers: Vec<(Pinned, Event)>,
    /// Bytes of a buffer.
    each: usize,
    turn: usize,
    filled: usize,
}

impl<'a> Stager<'a> {
    /// For so many bytes.
    pub fn new(device: &'a Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let each = bytes.div_ceil(STAGING_BUFFERS).clamp(1, STAGING_BYTES).next_multiple_of(16);
        let buffers = (0..STAGING_BUFFERS).map(|_| Ok((Pinned::new(device, each)?, Event::new(device)?)));
        Ok(Self { device, buffers: buffers.collect::<Result<_, CudaError>>()?, each, turn: 0, filled: 0 })
    }

    pub fn push(&mut self, target: &Buffer, mut at: usize, mut src: &[u8]) -> Result<(), CudaError> {
        assert!(at + src.len() <= target.bytes());
        while !src.is_empty() {
            if self.filled == self.each {
                self.rotate()?;
            }
            let n = src.len().min(self.each - self.filled);
            let (now, rest) = src.split_at(n);
            let staged = &mut self.buffers[self.turn].0.as_mut()[self.filled..self.filled + n];
            staged.par_chunks_mut(COPY_BYTES).zip(now.par_chunks(COPY_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
            self.device.current()?;
            // SAFETY: the range of the target was checked above; the staged bytes are not touched before their event is over.
            unsafe { result::memcpy_htod_async(target.at(at), staged, self.device.copy_stream()) }.during("copy weights")?;
            self.filled = (self.filled + n).next_multiple_of(16).min(self.each);
            at += n;
            src = rest;
        }
        Ok(())
    }

    fn rotate(&mut self) -> Result<(), CudaError> {
        self.buffers[self.turn].1.record(self.device.copy_stream())?;
        self.turn = (self.turn + 1) % STAGING_BUFFERS;
        self.filled = 0;
        self.buffers[self.turn].1.wait()
    }

    pub fn finish(mut self) -> Result<(), CudaError> {
        for _ in 0..STAGING_BUFFERS {
            self.rotate()?;
        }
        Ok(())
    }
}
