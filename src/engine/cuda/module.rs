//! Kernels from source to function: compiled for the device found with NVRTC, kept on disk, loaded through the driver.
//!
//! A compiled file is named by a hash of everything that went into it: sources, flags, target, compiler. It is written beside
//! its place and renamed, so that two processes that race leave one sound file.

use super::device::{self, CudaError, Device, During, Properties};
use super::launch::Grid;
use crate::files;
use cudarc::driver::{result, sys};
use cudarc::nvrtc::sys as nvrtc;
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A kernel source, embedded.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Path below `kernels/`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The form of weights whose kernels are wanted, for a source with kernels of many.
    pub form: Option<&'static str>,
    /// The only target whose instructions it is written for; `None`: any.
    pub arch: Option<&'static str>,
}

impl Source {
    /// Whether it can be compiled for a target.
    pub fn is_for(&self, arch: &str) -> bool {
        self.arch.is_none_or(|only| only == arch)
    }
}

macro_rules! source {
    ($name:literal) => {
        Source { name: $name, text: include_str!(concat!("../../../kernels/", $name)), form: None, arch: None }
    };
    ($name:literal, $form:literal) => {
        Source { form: Some($form), ..source!($name) }
    };
    ($name:literal, $form:literal, $arch:literal) => {
        Source { arch: Some($arch), ..source!($name, $form) }
    };
}

/// Files with kernels in them.
pub const PROGRAMS: &[Source] = &[
    source!("plain.cu"),
    source!("linear.cu", "w4"),
    source!("linear.cu", "w4_g64"),
    source!("linear.cu", "w4_g32"),
    source!("linear.cu", "w8"),
    source!("linear.cu", "w8_g64"),
    source!("linear.cu", "w8_g32"),
    source!("linear.cu", "w8_c"),
    source!("linear.cu", "w16"),
    source!("router.cu"),
    source!("wide.cu", "w4", "sm_90a"),
    source!("wide.cu", "w4_g64", "sm_90a"),
    source!("wide.cu", "w4_g32", "sm_90a"),
    source!("wide.cu", "w8", "sm_90a"),
    source!("wide.cu", "w8_g64", "sm_90a"),
    source!("wide.cu", "w8_g32", "sm_90a"),
    source!("wide.cu", "w8_c", "sm_90a"),
    source!("wide.cu", "w16", "sm_90a"),
    source!("moe.cu", "w4"),
    source!("moe.cu", "w4_g64"),
    source!("moe.cu", "w4_g32"),
    source!("moe.cu", "w8"),
    source!("moe.cu", "w8_g64"),
    source!("moe.cu", "w8_g32"),
    source!("moe.cu", "w8_c"),
    source!("moe.cu", "w16"),
    source!("attention.cu"),
    source!("step.cu", "w8_w4", "sm_90a"),
    source!("step.cu", "w4_w4", "sm_90a"),
    source!("step.cu", "w8_w4_long", "sm_90a"),
    source!("step.cu", "w4_w4_long", "sm_90a"),
    source!("latent.cu"),
    source!("rows.cu"),
    source!("tiers.cu"),
    source!("sample.cu"),
    source!("tiles.cu"),
    source!("solve.cu"),
];
/// Files they include.
pub const HEADERS: &[Source] = &[
    source!("common/attend.cuh"),
    source!("common/base.cuh"),
    source!("common/forms.cuh"),
    source!("common/linear.cuh"),
    source!("common/matrix.cuh"),
    source!("common/mma.cuh"),
    source!("common/pages.cuh"),
    source!("common/planes.cuh"),
    source!("common/reduce.cuh"),
    source!("common/routing.cuh"),
    source!("common/stream.cuh"),
];

/// A program by its name.
///
/// # Panics
/// If there is none.
pub(super) fn program(name: &str) -> &'static Source {
    PROGRAMS.iter().find(|p| p.name == name).unwrap_or_else(|| unreachable!("`{name}` is embedded"))
}

/// Targets that every kernel must compile for.
pub const ARCHES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"];

const FLAGS: [&str; 2] = ["--std=c++17", "--ptxas-options=-v"];

/// A compiled program.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code for one target.
    pub cubin: Vec<u8>,
    /// Registers, stack and spills of each kernel, as the assembler reports them; empty if it came from the cache.
    pub log: String,
}

/// Version of the compiler, or why there is none.
pub fn compiler() -> Result<String, CudaError> {
    device::load_compiler()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers; the library was just found.
    check(unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) }, "ask for the compiler's version")?;
    Ok(format!("{major}.{minor}"))
}

/// Where the compiler lies, when it was found outside the loader's own search.
pub fn compiler_path() -> Option<PathBuf> {
    device::load_compiler().ok().flatten()
}

/// Where compiled kernels are kept.
pub fn cache_dir() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = variable("XDG_CACHE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("moe").join("kernels"))
}

/// Compiles a program for a target such as `sm_90`.
pub fn compile(source: &Source, arch: &str) -> Result<Compiled, CudaError> {
    compiler()?;
    let text = |s: &str| CString::new(s).map_err(|_| CudaError::Unsupported("a kernel source holds a zero byte".into()));
    let (code, name) = (text(source.text)?, text(source.name)?);
    // Headers include each other by their bare names, which NVRTC does not resolve by folder; one by two names would be there twice.
    let headers = HEADERS.iter().map(|h| text(&h.text.replace("#include \"", "#include \"common/")));
    let headers = headers.collect::<Result<Vec<_>, _>>()?;
    let names = HEADERS.iter().map(|h| text(h.name)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: all strings end in zero and outlive the program.
    let created = unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program.0,
            code.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            pointers(&headers).as_ptr(),
            pointers(&names).as_ptr(),
        )
    };
    check(created, "read a kernel source")?;
    let form = source.form.iter().flat_map(|f| [text("-DONE_FORM"), text(&format!("-DFORM_{f}"))]);
    let options = FLAGS.iter().map(|f| text(f)).chain([text(&format!("--gpu-architecture={arch}"))]).chain(form);
    let options = options.collect::<Result<Vec<_>, _>>()?;
    // SAFETY: the program and the options live.
    let compiled = unsafe { nvrtc::nvrtcCompileProgram(program.0, options.len() as i32, pointers(&options).as_ptr()) };
    let log = program.log();
    if compiled != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Err(CudaError::Compile { file: source.name.into(), arch: arch.into(), log });
    }
    let mut bytes = 0;
    // SAFETY: writes one integer.
    check(unsafe { nvrtc::nvrtcGetCUBINSize(program.0, &mut bytes) }, "read a compiled kernel")?;
    let mut cubin = vec![0u8; bytes];
    // SAFETY: the buffer has the size that was asked for.
    check(unsafe { nvrtc::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }, "read a compiled kernel")?;
    Ok(Compiled { cubin, log })
}

/// The same from the cache, or compiled and put there. A cache that cannot be written is no error.
pub fn cached(source: &Source, arch: &str) -> Result<Compiled, CudaError> {
    let Some(dir) = cache_dir() else { return compile(source, arch) };
    let version = compiler();
    let version = version.or_else(|e| newest_cached(&dir).ok_or(e))?;
    let path = dir.join(file_name(source, arch, &version));
    if let Ok(cubin) = files::read(&path) {
        return Ok(Compiled { cubin, log: String::new() });
    }
    let compiled = compile(source, arch)?;
    if std::fs::create_dir_all(&dir).is_ok() && files::write_atomic(&path, &compiled.cubin).is_ok() {
        let _ = files::write_atomic(&dir.join(VERSION), version.as_bytes());
    }
    Ok(compiled)
}

/// Names the compiler that filled the cache, so that it can be used where there is none.
const VERSION: &str = "compiler";

fn newest_cached(dir: &Path) -> Option<String> {
    String::from_utf8(files::read(&dir.join(VERSION)).ok()?).ok()
}

fn file_name(source: &Source, arch: &str, version: &str) -> String {
    let mut hash = Sha256::new();
    let parts = HEADERS.iter().flat_map(|h| [h.name, h.text]).chain(FLAGS).chain([
        source.name,
        source.text,
        source.form.unwrap_or(""),
        arch,
        version,
    ]);
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let hex: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    let form = source.form.map(|f| format!("-{f}")).unwrap_or_default();
    format!("{}{form}-{arch}-{hex}.cubin", source.name.trim_end_matches(".cu"))
}

/// Where it is noted which blocks `moe doctor` found wrong with these kernels on this device.
fn unfit_path(properties: &Properties) -> Option<PathBuf> {
    let mut hash = Sha256::new();
    for part in HEADERS.iter().chain(PROGRAMS).map(|s| s.text).chain([&*properties.name, &*properties.driver]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let hex: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    Some(cache_dir()?.join(format!("unfit-{hex}.json")))
}

/// Kinds of blocks that `moe doctor` found wrong with these kernels on this device; plain kernels run them instead.
pub fn unfit(properties: &Properties) -> Vec<String> {
    let text = unfit_path(properties).and_then(|p| files::read(&p).ok());
    text.and_then(|t| serde_json::from_slice(&t).ok()).unwrap_or_default()
}

/// Notes which kinds of blocks are wrong on this device. A cache that cannot be written is no error.
pub fn set_unfit(properties: &Properties, blocks: &[String]) {
    let Some(path) = unfit_path(properties) else { return };
    if !blocks.is_empty() || path.exists() {
        let text = serde_json::to_vec(blocks).unwrap_or_default();
        let _ = path.parent().map(std::fs::create_dir_all);
        let _ = files::write_atomic(&path, &text);
    }
}

struct Program(nvrtc::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: writes one integer.
        if unsafe { nvrtc::nvrtcGetProgramLogSize(self.0, &mut bytes) } != nvrtc::nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has the size that was asked for.
        unsafe { nvrtc::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; null is refused without harm.
        unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn check(code: nvrtc::nvrtcResult, what: &'static str) -> Result<(), CudaError> {
    if code == nvrtc::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(CudaError::Driver { what, error: format!("{code:?}") }) }
}

/// A loaded program.
pub(super) struct Module {
    module: sys::CUmodule,
    device: Arc<Device>,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles or fetches, and loads.
    pub fn load(device: &Arc<Device>, source: &Source) -> Result<Arc<Self>, CudaError> {
        let compiled = cached(source, &device.properties().arch())?;
        device.current()?;
        // SAFETY: a cubin carries its own size in its header.
        let module = unsafe { result::module::load_data(compiled.cubin.as_ptr().cast()) }.during("load a kernel")?;
        Ok(Arc::new(Self { module, device: Arc::clone(device) }))
    }

    /// A kernel by its name.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Unsupported(format!("no kernel can be named `{name}`")))?;
        // SAFETY: the module lives.
        let function = unsafe { result::module::get_function(self.module, text) }.during("find a kernel")?;
        Ok(Function { name: name.to_string(), function, module: Arc::clone(self), shared_bytes: AtomicU32::new(0) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; the functions hold the module alive.
        unsafe {
            let _ = self.device.current();
            let _ = result::module::unload(self.module);
        }
    }
}

/// One kernel.
pub(super) struct Function {
    name: String,
    function: sys::CUfunction,
    module: Arc<Module>,
    /// What a block may use so far.
    shared_bytes: AtomicU32,
}

// SAFETY: function handles may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// How the blocks of a launch stand to the launch ahead of it and to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They start when it is done, as many at a time as there is room for.
    Ordered,
    /// They may start before it is done; kernels written for it wait by themselves.
    Overlapping,
    /// They start when it is done, and all are resident at a time, so that they may wait for each other; more than fit are refused.
    Cooperative,
}

impl Mode {
    fn attribute(self) -> Option<sys::CUlaunchAttribute> {
        // SAFETY: a struct of integers and a union of them, for which zero is a value.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        match self {
            Mode::Ordered => return None,
            Mode::Overlapping => {
                attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                attribute.value.programmaticStreamSerializationAllowed = 1;
            }
            Mode::Cooperative => {
                attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                attribute.value.cooperative = 1;
            }
        }
        Some(attribute)
    }
}

impl Function {
    /// Lets blocks use this much shared memory.
    fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        use sys::CUfunction_attribute_enum as A;
        if self.shared_bytes.load(Ordering::Relaxed) >= bytes {
            return Ok(());
        }
        let whole = sys::CUshared_carveout_enum::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as i32;
        let settings = [
            (A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32),
            (A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, whole),
        ];
        for (attribute, value) in settings {
            // SAFETY: the function lives.
            unsafe { result::function::set_function_attribute(self.function, attribute, value) }.during("size shared memory")?;
        }
        self.shared_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Puts the kernel behind everything already in the device's stream.
    ///
    /// # Safety
    /// `params` must point to one value for each parameter of the kernel, of its size, and every address among them must be
    /// good for what the kernel does with it.
    pub unsafe fn launch(&self, grid: Grid, mode: Mode, params: &mut [*mut c_void]) -> Result<(), CudaError> {
        // SAFETY: as the caller's.
        unsafe { self.launch_in(self.module.device.stream(), grid, mode, params) }
    }

    /// The device's stream for transfers.
    pub fn copy_stream(&self) -> sys::CUstream {
        self.module.device.copy_stream()
    }

    /// Puts the kernel behind everything already in a stream of the device.
    ///
    /// # Safety
    /// As for [`Function::launch`].
    pub unsafe fn launch_in(
        &self,
        stream: sys::CUstream,
        grid: Grid,
        mode: Mode,
        params: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.module.device.current()?;
        self.allow_shared(grid.shared_bytes)?;
        let mut attribute = mode.attribute();
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream,
            attrs: attribute.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut),
            numAttrs: attribute.is_some() as u32,
        };
        // SAFETY: the caller vouches for the parameters; the rest lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .during("launch a kernel")
            .map_err(|e| CudaError::Launch { kernel: self.name.clone(), grid: format!("{grid:?}"), error: e.to_string() })
    }
}

/// A set of kernels of one source with typed launchers, one a kernel, named alike. The parameter lists are compared with the
/// source by a test.
macro_rules! kernels {
    ($(#[$doc:meta])* $set:ident { $($name:ident($($arg:ident: $ty:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        pub(super) struct $set {
            $($name: $crate::engine::cuda::module::Function,)*
        }

        impl $set {
            /// Finds every kernel in a loaded program.
            pub fn load(module: &std::sync::Arc<$crate::engine::cuda::module::Module>) -> Result<Self, $crate::engine::cuda::CudaError> {
                Ok(Self { $($name: module.function(stringify!($name))?,)* })
            }

            /// Names and parameter types.
            #[cfg(test)]
            pub const SIGNATURES: &[(&str, &[&str])] = &[$((stringify!($name), &[$(stringify!($ty)),*])),*];

            $(
                #[allow(clippy::too_many_arguments)]
                pub fn $name(&self, grid: $crate::engine::cuda::launch::Grid, $($arg: $ty),*) -> Result<(), $crate::engine::cuda::CudaError> {
                    let mut params = [$((&raw const $arg).cast_mut().cast::<std::ffi::c_void>()),*];
                    // SAFETY: one parameter each, of the types the source declares, which a test compares; addresses come from
                    // buffers that the engine sized for the step and keeps until the stream is done.
                    unsafe { self.$name.launch(grid, $crate::engine::cuda::module::Mode::Ordered, &mut params) }
                }
            )*
        }
    };
}
pub(super) use kernels;

/// Structs that kernels take by value or find in memory, laid out as the sources lay them out. Names and order of fields are compared with the
/// sources by tests.
macro_rules! structs {
    ($($(#[$meta:meta])* $vis:vis $name:ident in $file:literal { $($(#[$doc:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy)]
            #[repr(C)]
            $vis struct $name { $($(#[$doc])* pub $field: $ty,)* }

            impl $name {
                /// All zero, which is null, no and none.
                #[allow(dead_code, reason = "small structs are written out in full")]
                pub const ZERO: $name = {
                    // SAFETY: integers, floats and numbered kinds only, for which zero is a value.
                    unsafe { std::mem::zeroed() }
                };
            }
        )*

        #[cfg(test)]
        const STRUCTS: &[$crate::engine::cuda::module::tests::Struct] =
            &[$((stringify!($name), include_str!(concat!("../../../kernels/", $file)), &[$((stringify!($field), stringify!($ty))),*])),*];
    };
}
pub(super) use structs;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Name of a struct, its source, and its fields with their types.
    pub type Struct = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

    /// Types of a kernel's parameters as the launchers spell them.
    pub fn parameters(source: &str, kernel: &str) -> Vec<String> {
        let start = source.find(&format!("void {kernel}(")).unwrap_or_else(|| panic!("`{kernel}` is not in the source"));
        let list = source[start..].split_once('(').unwrap().1.split_once(')').unwrap().0;
        let spelt = |p: &str| match p {
            p if p.contains('*') => "u64".to_string(),
            p if p.starts_with("int ") => "i32".to_string(),
            p if p.starts_with("float ") => "f32".to_string(),
            p => p.split(' ').take(1).collect(),
        };
        list.split(',').map(|p| spelt(p.trim())).collect()
    }

    /// Fields of a struct in a source, with their types as the launchers spell them.
    fn declared(source: &str, name: &str) -> Vec<(String, String)> {
        let start = source.find(&format!("struct {name} {{")).unwrap_or_else(|| panic!("`{name}` is not in the source"));
        let body = source[start..].split_once('{').unwrap().1.split_once("};").unwrap().0;
        let code: String = body.lines().map(|l| l.split("//").next().unwrap()).collect();
        let mut fields = Vec::new();
        for declaration in code.split(';').map(str::trim).filter(|d| !d.is_empty()) {
            let (ty, list) = declaration.strip_prefix("const ").unwrap_or(declaration).split_once(' ').unwrap();
            for field in list.split(',').map(str::trim) {
                let pointer = ty.contains('*') || field.starts_with('*');
                let field = field.trim_start_matches('*');
                let spelt = match (pointer, ty) {
                    (true, _) | (_, "u64") => "u64",
                    (_, "int") => "i32",
                    (_, "float") => "f32",
                    (_, "LinearMatrix") => "[LinearMatrix; 3]",
                    (
                        _,
                        "RouteRule" | "DirectRoute" | "Arrivals" | "TierSlots" | "AttentionLayer" | "AttentionArgs"
                        | "StepMatrix" | "Sent",
                    ) => ty,
                    (_, "LatentMatrix") => "Matrix",
                    other => panic!("`{name}` has a field of type {other:?}"),
                };
                fields.push((field.trim_end_matches("[3]").to_lowercase(), spelt.to_string()));
            }
        }
        fields
    }

    /// Compares structs with their sources, field by field; fails on any missing, swapped or retyped, which would hand a kernel wrong addresses.
    pub fn are_declared(structs: &[Struct]) {
        for (name, source, fields) in structs {
            let spelt = |t: &str| if t == "Kind" { "i32".to_string() } else { t.to_string() };
            let ours: Vec<_> = fields.iter().map(|(f, t)| (f.to_string(), spelt(t))).collect();
            assert_eq!(declared(source, name), ours, "{name}");
        }
    }

    /// Fails if any part of what is compiled is left out of the name.
    #[test]
    fn a_compiled_file_is_named_by_all_that_made_it() {
        let base = file_name(&PROGRAMS[0], "sm_90", "13.0");
        assert_eq!(base, file_name(&PROGRAMS[0], "sm_90", "13.0"));
        assert_ne!(base, file_name(&PROGRAMS[0], "sm_80", "13.0"));
        assert_ne!(base, file_name(&PROGRAMS[0], "sm_90", "12.9"));
        assert_ne!(base, file_name(&Source { text: "", ..PROGRAMS[0] }, "sm_90", "13.0"));
        assert_ne!(base, file_name(&Source { form: Some("w4"), ..PROGRAMS[0] }, "sm_90", "13.0"));
    }
}
