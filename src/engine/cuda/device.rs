//! One GPU: opening it, what it is, and the two streams work runs on. Everything that can be missing has its own error.

use super::launch::Limits;
use super::memory::{Buffer, gigabytes};
use crate::files::{FileError, ReadError};
use cudarc::driver::{DriverError, result, sys};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why the GPU cannot be used, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No `libcuda`.
    #[error("no CUDA driver is installed")]
    NoDriver,
    /// A driver without a device.
    #[error("the CUDA driver sees no device")]
    NoDevice,
    /// A device older than the kernels.
    #[error("`{name}` has compute capability {major}.{minor}, the kernels need 8.0 or newer")]
    TooOld {
        /// The device.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// No `libnvrtc` and no cached kernels.
    #[error("the kernel compiler `libnvrtc` was not found")]
    NoCompiler,
    /// A kernel does not compile.
    #[error("`{file}` does not compile for {arch}: {log}")]
    Compile {
        /// The source.
        file: String,
        /// The target.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// A model that does not fit.
    #[error("{needed} of GPU memory are needed, {free} are free")]
    Memory {
        /// With unit.
        needed: String,
        /// With unit.
        free: String,
    },
    /// A model that does not fit what it was given.
    #[error("the model does not fit {} of GPU memory, the smallest budget that works is {}", gigabytes(*budget_bytes), gigabytes(*smallest_bytes))]
    Budget {
        /// What would do.
        smallest_bytes: u64,
        /// What there was.
        budget_bytes: u64,
    },
    /// Experts that do not fit into page-locked memory.
    #[error("{} of page-locked host memory are needed for the experts, {} could be had: {error}", gigabytes(*needed_bytes), gigabytes(*had_bytes))]
    PageLocked {
        /// For all experts.
        needed_bytes: u64,
        /// What was granted or allowed.
        had_bytes: u64,
        /// The driver's word.
        error: String,
    },
    /// Experts on the disk that cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file of experts that cannot be opened or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A call of the driver failed.
    #[error("CUDA failed to {what}: {error}")]
    Driver {
        /// What was being done.
        what: &'static str,
        /// The driver's word.
        error: String,
    },
    /// A kernel could not be launched, or one before it failed.
    #[error("at `{kernel}` with {grid}: {error}")]
    Launch {
        /// Which.
        kernel: String,
        /// How.
        grid: String,
        /// The driver's word.
        error: String,
    },
    /// A model beyond what the kernels were written for.
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            CudaError::NoDriver => Some("install an NVIDIA driver, or use --device cpu".into()),
            CudaError::NoDevice => Some("check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device cpu".into()),
            CudaError::NoCompiler => {
                Some("`pip install nvidia-cuda-nvrtc`, or put a CUDA toolkit's lib64 into LD_LIBRARY_PATH".into())
            }
            CudaError::Memory { .. } => Some("quantize further (--profile compact), or use --device cpu".into()),
            CudaError::Budget { smallest_bytes, .. } => {
                Some(format!("give --vram-budget {smallest_bytes}, quantize further (--profile compact), or use --device cpu"))
            }
            CudaError::PageLocked { .. } => Some(
                "free host memory, raise the limit of locked memory (`ulimit -l`, a container's memory) or --host-budget, or quantize further"
                    .into(),
            ),
            CudaError::Read(_) => Some(
                "leave the model's files as they are while it runs, check the disk, or raise --host-budget so that nothing is read"
                    .into(),
            ),
            CudaError::File(e) => e.hint(),
            CudaError::TooOld { .. } | CudaError::Unsupported(_) => Some("use --device cpu".into()),
            CudaError::Compile { .. } | CudaError::Driver { .. } | CudaError::Launch { .. } => None,
        }
    }
}

/// Names what failed.
pub(super) trait During<T> {
    fn during(self, what: &'static str) -> Result<T, CudaError>;
}

impl<T> During<T> for Result<T, DriverError> {
    fn during(self, what: &'static str) -> Result<T, CudaError> {
        self.map_err(|e| {
            let text = e.error_string().map(|s| s.to_string_lossy().into_owned());
            CudaError::Driver { what, error: text.unwrap_or_else(|_| format!("{e:?}")) }
        })
    }
}

/// Left in a block for what kernels declare statically: barriers, sums, lists.
const STATIC_SHARED_BYTES: usize = 2 << 10;

/// What a device is, for plans and reports.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Properties {
    /// Marketing name.
    pub name: String,
    /// Compute capability, ten times major plus minor.
    pub sm: u32,
    /// Streaming multiprocessors.
    pub num_sm: u32,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// Most shared memory of a block.
    pub block_shared_bytes: u64,
    /// Shared memory of a multiprocessor.
    pub sm_shared_bytes: u64,
    /// Highest SM clock.
    pub sm_clock_mhz: u32,
    /// Highest memory clock.
    pub memory_clock_mhz: u32,
    /// Width of the memory bus.
    pub memory_bus_bits: u32,
    /// Newest CUDA the driver speaks, e.g. `13.0`.
    pub driver: String,
    /// Where it is plugged in, e.g. `0000:4e:00.0`; names the device to the management library.
    pub bus_id: String,
}

impl Properties {
    /// Name of the target that NVRTC compiles for; Hopper's own instructions have one of their own.
    pub fn arch(&self) -> String {
        format!("sm_{}{}", self.sm, if self.has_warpgroups() { "a" } else { "" })
    }

    /// Whether warpgroups multiply from shared memory.
    fn has_warpgroups(&self) -> bool {
        self.sm == 90
    }

    /// What launch geometry needs to know.
    pub fn limits(&self) -> Limits {
        Limits {
            num_sm: self.num_sm as usize,
            block_shared_bytes: (self.block_shared_bytes as usize).saturating_sub(STATIC_SHARED_BYTES),
            sm_shared_bytes: self.sm_shared_bytes as usize,
            warpgroups: self.has_warpgroups(),
            bulk_copies: self.sm >= 90,
        }
    }

    /// Two transfers a clock, as GDDR and HBM do.
    pub fn spec_bandwidth(&self) -> f64 {
        2.0 * self.memory_clock_mhz as f64 * 1e6 * self.memory_bus_bits as f64 / 8.0
    }
}

/// An opened device. Calls are made current to the thread that makes them, so it may be used from any one at a time.
pub struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    copy_stream: sys::CUstream,
    properties: Properties,
}

// SAFETY: handles of the driver API may be used from any thread once the context is current there, which `current` sees to.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device by its index.
    pub fn open(index: usize) -> Result<Arc<Self>, CudaError> {
        // SAFETY: loading the driver library runs its initialisers only.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        result::init().map_err(|_| CudaError::NoDevice)?;
        if result::device::get_count().unwrap_or(0) <= index as i32 {
            return Err(CudaError::NoDevice);
        }
        let device = result::device::get(index as i32).during("open the device")?;
        let properties = properties(device)?;
        let (major, minor) = (properties.sm as i32 / 10, properties.sm as i32 % 10);
        if major < 8 {
            return Err(CudaError::TooOld { name: properties.name, major, minor });
        }
        // SAFETY: `device` is valid; the context is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.during("open the device")?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.during("open the device")?;
        let stream = || result::stream::create(result::stream::StreamKind::NonBlocking).during("create a stream");
        Ok(Arc::new(Self { device, context, stream: stream()?, copy_stream: stream()?, properties }))
    }

    /// What it is.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Free and total bytes of its memory.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.current()?;
        let (free, total) = result::mem_get_info().during("ask for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Makes the context current to this thread.
    pub(super) fn current(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.during("use the device")
    }

    /// Where kernels run.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Where transfers run that kernels do not wait for.
    pub(super) fn copy_stream(&self) -> sys::CUstream {
        self.copy_stream
    }

    /// Waits for all kernels.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.current()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }.during("finish the kernels")
    }

    /// Copies bytes to the device in the order of the kernels; `src` may be reused at once.
    pub(super) fn upload<T: Copy>(&self, dst: &Buffer, at_bytes: usize, src: &[T]) -> Result<(), CudaError> {
        assert!(at_bytes + size_of_val(src) <= dst.bytes());
        self.current()?;
        // SAFETY: the range was just checked; from pageable memory the call returns once `src` has been staged.
        unsafe { result::memcpy_htod_async(dst.at(at_bytes), src, self.stream) }.during("copy to the device")
    }

    /// Copies all of a buffer to the start of another, in the order of the kernels.
    pub(super) fn copy(&self, dst: &Buffer, src: &Buffer) -> Result<(), CudaError> {
        assert!(src.bytes() <= dst.bytes());
        self.current()?;
        // SAFETY: the range was just checked.
        unsafe { result::memcpy_dtod_async(dst.at(0), src.at(0), src.bytes(), self.stream) }.during("copy on the device")
    }

    /// Copies bytes from the device once the kernels before it are done.
    pub(super) fn download<T: Copy>(&self, dst: &mut [T], src: &Buffer, at_bytes: usize) -> Result<(), CudaError> {
        assert!(at_bytes + size_of_val(dst) <= src.bytes());
        self.current()?;
        // SAFETY: the range was just checked; the stream is waited for before `dst` is seen.
        unsafe { result::memcpy_dtoh_async(dst, src.at(at_bytes), self.stream) }.during("copy from the device")?;
        self.synchronize()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: created in `open`, released once; errors at the end of a process have no reader.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::destroy(self.stream);
            let _ = result::stream::destroy(self.copy_stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

fn properties(device: sys::CUdevice) -> Result<Properties, CudaError> {
    use sys::CUdevice_attribute as A;
    let get = |attribute: A| {
        // SAFETY: `device` is valid.
        unsafe { result::device::get_attribute(device, attribute) }.during("ask what the device is")
    };
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().during("ask for the driver's version")?;
    let major = get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Properties {
        name: result::device::get_name(device).during("ask what the device is")?,
        sm: (major * 10 + minor) as u32,
        num_sm: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // SAFETY: `device` is valid.
        memory_bytes: unsafe { result::device::total_mem(device) }.during("ask what the device is")? as u64,
        l2_bytes: get(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        block_shared_bytes: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u64,
        sm_shared_bytes: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as u64,
        sm_clock_mhz: get(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? as u32 / 1000,
        memory_clock_mhz: get(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? as u32 / 1000,
        memory_bus_bits: get(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)? as u32,
        driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        bus_id: bus_id(device)?,
    })
}

fn bus_id(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut text = [0u8; 32];
    // SAFETY: the length is the buffer's.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) }
        .result()
        .during("ask what the device is")?;
    Ok(text.iter().take_while(|&&b| b != 0).map(|&b| b as char).collect())
}

/// Finds `libnvrtc` where the dynamic loader does not look: CUDA's usual folders, conda, and pip packages. Once loaded by its
/// path, the loader gives the same library to whoever asks for it by name.
pub(super) fn load_compiler() -> Result<Option<PathBuf>, CudaError> {
    use std::sync::OnceLock;
    static FOUND: OnceLock<Option<(libloading::Library, Option<PathBuf>)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let named = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
        // SAFETY: loading NVRTC runs its initialisers only.
        if let Some(library) = named.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok()) {
            return Some((library, None));
        }
        // SAFETY: as above.
        compiler_paths().into_iter().find_map(|p| Some((unsafe { libloading::Library::new(&p) }.ok()?, Some(p))))
    });
    match found {
        Some((_, path)) => Ok(path.clone()),
        None => Err(CudaError::NoCompiler),
    }
}

/// Files that may be NVRTC, likeliest first.
fn compiler_paths() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut roots: Vec<PathBuf> = Vec::new();
    roots.extend(variable("CUDA_HOME").or_else(|| variable("CUDA_PATH")));
    roots.extend(variable("CONDA_PREFIX"));
    roots.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    let mut folders: Vec<PathBuf> =
        roots.iter().flat_map(|r| ["lib64", "lib", "targets/x86_64-linux/lib"].map(|l| r.join(l))).collect();
    let mut pythons: Vec<PathBuf> = variable("VIRTUAL_ENV").into_iter().collect();
    pythons.push(".venv-nvrtc".into());
    pythons.extend(variable("HOME").map(|h| h.join(".local")));
    pythons.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for python in pythons {
        for version in entries(&python.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = version.join(packages).join("nvidia");
                folders.extend(["cu13", "cu12", "cuda_nvrtc"].map(|p| nvidia.join(p).join("lib")));
            }
        }
    }
    folders.iter().flat_map(|f| entries(f, "libnvrtc.so")).collect()
}

fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let read = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        read.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect();
    found.sort();
    found
}
