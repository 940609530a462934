//! Owners of memory: on the device, and page-locked on the host.

use super::device::{CudaError, Device, During};
use super::numa::{Nodes, Region};
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// Alignment of everything that is placed inside a buffer.
pub(super) const ALIGN: usize = 256;

/// `n` rounded up to [`ALIGN`].
pub(super) fn aligned(n: usize) -> usize {
    n.next_multiple_of(ALIGN)
}

/// Device memory, freed when dropped.
pub(super) struct Buffer {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    device: Arc<Device>,
}

impl Buffer {
    /// Allocates; at least one byte, so that every buffer has an address.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        device.current()?;
        // SAFETY: the context is current; the memory is freed in `drop`.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(pointer) => Ok(Self { pointer, bytes, device: Arc::clone(device) }),
            Err(e) if e.0 == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = device.memory().map_or(0, |m| m.0);
                Err(CudaError::Memory { needed: gigabytes(bytes as u64), free: gigabytes(free) })
            }
            Err(e) => Err(e).during("allocate memory"),
        }
    }

    /// Allocates and fills.
    pub fn from_slice<T: Copy>(device: &Arc<Device>, src: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::new(device, size_of_val(src))?;
        device.upload(&buffer, 0, src)?;
        Ok(buffer)
    }

    /// Sets every byte to zero, in the order of the kernels.
    pub fn clear(&self) -> Result<(), CudaError> {
        self.fill(0)
    }

    /// Sets every byte, in the order of the kernels.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        self.device.current()?;
        // SAFETY: the range is the whole allocation.
        unsafe { result::memset_d8_async(self.pointer, byte, self.bytes, self.device.stream()) }.during("fill memory")
    }

    /// Size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of a byte inside.
    pub fn at(&self, at_bytes: usize) -> u64 {
        debug_assert!(at_bytes <= self.bytes);
        self.pointer + at_bytes as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once. Kernels in flight may still use it: freeing waits for them.
        unsafe {
            let _ = self.device.current();
            let _ = result::free_sync(self.pointer);
        }
    }
}

/// Page-locked host memory, freed when dropped.
pub(super) struct Pinned {
    pointer: *mut u8,
    bytes: usize,
    device: Arc<Device>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        Self::with_flags(device, bytes, 0)
    }

    fn with_flags(device: &Arc<Device>, bytes: usize, flags: u32) -> Result<Self, CudaError> {
        device.current()?;
        // SAFETY: the context is current; the memory is freed in `drop`.
        let pointer = unsafe { result::malloc_host(bytes.max(1), flags) }.during("allocate page-locked memory")?;
        Ok(Self { pointer: pointer.cast(), bytes, device: Arc::clone(device) })
    }

    /// The bytes.
    pub fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size; borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated with this size.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once.
        unsafe {
            let _ = self.device.current();
            let _ = result::free_host(self.pointer.cast());
        }
    }
}

/// Page-locked host memory with an address for kernels too, freed when dropped.
pub(super) struct Mapped {
    memory: Locked,
    address: sys::CUdeviceptr,
}

enum Locked {
    /// By the driver's allocation.
    Pinned(Pinned),
    /// After the fact.
    Region(Registered),
}

impl Mapped {
    /// Allocates, in these parts of the host's memory if they are given and such memory can be page-locked.
    pub fn new(device: &Arc<Device>, bytes: usize, nodes: Option<&Nodes>) -> Result<Self, CudaError> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut memory = match nodes.and_then(|nodes| Registered::new(device, bytes, nodes)) {
            Some(registered) => Locked::Region(registered),
            None => Locked::Pinned(Pinned::with_flags(device, bytes, flags)?),
        };
        let mut address = 0;
        let pointer = memory.as_mut().as_mut_ptr();
        // SAFETY: writes one address; the memory was just page-locked as mapped.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, pointer.cast(), 0) }
            .result()
            .during("map page-locked memory")?;
        Ok(Self { memory, address })
    }

    /// Address of a byte inside, for kernels.
    pub fn at(&self, at_bytes: usize) -> u64 {
        debug_assert!(at_bytes <= self.as_slice().len());
        self.address + at_bytes as u64
    }

    /// The bytes.
    pub fn as_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut()
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.memory {
            Locked::Pinned(p) => p.as_slice(),
            Locked::Region(r) => r.region.as_slice(),
        }
    }
}

impl Locked {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Locked::Pinned(p) => p.as_mut(),
            Locked::Region(r) => r.region.as_mut(),
        }
    }
}

/// Memory of our own that the driver has page-locked.
struct Registered {
    region: Region,
    device: Arc<Device>,
}

impl Registered {
    fn new(device: &Arc<Device>, bytes: usize, nodes: &Nodes) -> Option<Self> {
        device.current().ok()?;
        let mut region = Region::new(bytes, nodes).ok()?;
        let all = region.as_mut();
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the range is the region's, which lives until it is given back in `drop`.
        unsafe { sys::cuMemHostRegister_v2(all.as_mut_ptr().cast(), all.len(), flags) }.result().ok()?;
        Some(Self { region, device: Arc::clone(device) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, given back once, before the region is unmapped.
        unsafe {
            let _ = self.device.current();
            let _ = sys::cuMemHostUnregister(self.region.as_mut().as_mut_ptr().cast());
        }
    }
}

/// A point in the order of the kernels.
pub(super) struct Event {
    event: sys::CUevent,
    device: Arc<Device>,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that also takes the time.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.current()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).during("create an event")?;
        Ok(Self { event, device: Arc::clone(device) })
    }

    /// Puts it behind everything already in a stream.
    pub fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        self.device.current()?;
        // SAFETY: event and stream live.
        unsafe { result::event::record(self.event, stream) }.during("record an event")
    }

    /// Makes everything put into a stream from now on wait for it; nothing waits for an event that was never recorded.
    pub fn gate(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        self.device.current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream live.
        unsafe { result::stream::wait_event(stream, self.event, flags) }.during("wait for an event")
    }

    /// Waits for it.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.device.current()?;
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.during("wait for an event")
    }

    /// Whether it is over; one never recorded is.
    pub fn is_over(&self) -> bool {
        // SAFETY: the event lives; events may be asked from any context.
        unsafe { sys::cuEventQuery(self.event) == sys::CUresult::CUDA_SUCCESS }
    }

    /// Time since an earlier event; both must be over.
    pub fn ms_since(&self, earlier: &Event) -> Result<f32, CudaError> {
        // SAFETY: both events live.
        unsafe { result::event::elapsed(earlier.event, self.event) }.during("read an event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        unsafe {
            let _ = self.device.current();
            let _ = result::event::destroy(self.event);
        }
    }
}

/// Bytes as people read them in messages about memory.
pub(super) fn gigabytes(n: u64) -> String {
    format!("{:.2} GB", n as f64 / 1e9)
}
