//! Kernels of a device: compiled once, and loaded once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ortrain_codegen::{CudaC, Dialect as _, KernelSource};

use crate::driver::{Function, Module, describe};
use crate::kernel_cache::{KernelCache, Key};
use crate::libraries::{self, MissingLibrary, Nvidia};
use crate::nvrtc::{self, CompileError};

/// Number of kernels that are compiled together. The compiler reads the library once for all of them, and several parts
/// of a program compile at the same time. The parts depend on the program alone, so that the cache finds them again.
const KERNELS_PER_MODULE: usize = 24;

/// Error for a kernel without machine code.
#[derive(Clone, Debug)]
pub(crate) struct KernelError {
    /// Index of the kernel among the requested ones.
    pub(crate) kernel: usize,
    pub(crate) reason: String,
}

/// Loaded kernels of a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    architecture: String,
    cache: KernelCache,
    /// Functions by kernel.
    functions: Mutex<HashMap<KernelSource, Function>>,
    compilations: AtomicUsize,
}

impl Kernels {
    pub(crate) fn new(architecture: &str) -> Kernels {
        Kernels {
            architecture: architecture.to_owned(),
            cache: KernelCache::of_user(),
            functions: Mutex::default(),
            compilations: AtomicUsize::new(0),
        }
    }

    /// Returns the number of modules that were compiled.
    pub(crate) fn compilations(&self) -> usize {
        self.compilations.load(Ordering::Relaxed)
    }

    /// Returns the functions of kernels, in order. The context of the device is current.
    ///
    /// # Errors
    /// When a kernel cannot be compiled or loaded.
    pub(crate) fn functions(&self, kernels: &[&KernelSource]) -> Result<Vec<Function>, KernelError> {
        let mut known = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<&KernelSource> = Vec::new();
        let mut names: HashMap<&str, &KernelSource> = HashMap::new();
        for (at, &kernel) in kernels.iter().enumerate() {
            if names.insert(&kernel.name, kernel).is_some_and(|other| other != kernel) {
                let reason = format!("two kernels have the name {}", kernel.name);
                return Err(KernelError { kernel: at, reason });
            }
            if !known.contains_key(kernel) && !missing.contains(&kernel) {
                missing.push(kernel);
            }
        }
        let images = self.images(&missing).map_err(|KernelError { kernel, reason }| {
            let kernel = kernels.iter().position(|&other| other == missing[kernel]).unwrap_or(0);
            KernelError { kernel, reason }
        })?;
        for (part, image) in missing.chunks(KERNELS_PER_MODULE).zip(images) {
            let failed = |action: &str, error| KernelError {
                kernel: kernels.iter().position(|&other| other == part[0]).unwrap_or(0),
                reason: format!(
                    "{action} failed with {}; install the latest driver of NVIDIA, or use \"vulkan\"",
                    describe(error)
                ),
            };
            // SAFETY: the image comes from the compiler, or from an entry of the cache with a correct checksum.
            let module =
                unsafe { Module::load(&image) }.map_err(|error| failed("cuModuleLoadData", error))?;
            for &kernel in part {
                let function =
                    module.function(&kernel.name).map_err(|error| failed("cuModuleGetFunction", error))?;
                known.insert(kernel.clone(), function);
            }
        }
        Ok(kernels.iter().map(|&kernel| known[kernel]).collect())
    }

    /// Returns the image of each part of some kernels, from the cache or from the compiler.
    fn images(&self, kernels: &[&KernelSource]) -> Result<Vec<Vec<u8>>, KernelError> {
        if kernels.is_empty() {
            return Ok(Vec::new());
        }
        let first = |error: CompileError| KernelError { kernel: 0, reason: compile_reason(error) };
        let compiler = self.compiler_version().map_err(first)?;
        let parts: Vec<&[&KernelSource]> = kernels.chunks(KERNELS_PER_MODULE).collect();
        let image = |part: &[&KernelSource]| {
            let source = CudaC.module(part);
            let key = Key { source: &source, architecture: &self.architecture, compiler: &compiler };
            if let Some(image) = self.cache.read(&key) {
                return Ok(image);
            }
            self.compilations.fetch_add(1, Ordering::Relaxed);
            let image = nvrtc::compile(&source, &self.architecture, &[])?.image;
            self.cache.write(&key, &image);
            Ok(image)
        };
        let images = in_parallel(&parts, &image);
        let mut done = Vec::with_capacity(parts.len());
        for (index, result) in images.into_iter().enumerate() {
            done.push(result.map_err(|error| {
                let (kernel, error) = self.culprit(parts[index]).unwrap_or((0, error));
                KernelError { kernel: index * KERNELS_PER_MODULE + kernel, reason: compile_reason(error) }
            })?);
        }
        Ok(done)
    }

    /// Returns the version of the compiler. A process that finds the version in the cache does not open the compiler.
    fn compiler_version(&self) -> Result<String, CompileError> {
        let path = libraries::path_of(Nvidia::Nvrtc);
        if let Some(known) = path.as_deref().and_then(|path| self.cache.compiler_version(path)) {
            return Ok(known);
        }
        let (major, minor) = nvrtc::version()?;
        let version = format!("{major}.{minor}");
        if let Some(path) = path {
            self.cache.set_compiler_version(&path, &version);
        }
        Ok(version)
    }

    /// Returns the first kernel of a part that does not compile alone, and its error.
    fn culprit(&self, part: &[&KernelSource]) -> Option<(usize, CompileError)> {
        part.iter().enumerate().find_map(|(at, &kernel)| {
            let compiled = nvrtc::compile(&CudaC.module(&[kernel]), &self.architecture, &[]);
            Some((at, compiled.err()?))
        })
    }
}

fn compile_reason(error: CompileError) -> String {
    match error {
        CompileError::Missing(MissingLibrary { reason, remedy }) => format!("{reason}; {remedy}"),
        CompileError::Refused(log) => {
            format!(
                "NVRTC rejected its kernel; install the latest version, or use \"vulkan\". NVRTC says {log}"
            )
        }
    }
}

/// Applies a function to items on all processors of the machine, and returns the results in order.
fn in_parallel<I: Sync + Copy, T: Send>(items: &[I], apply: &(impl Fn(I) -> T + Sync)) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    if threads <= 1 {
        return items.iter().map(|&item| apply(item)).collect();
    }
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<T>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&item) = items.get(at) else { return };
            let result = apply(item);
            *results[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let taken = |result: Mutex<Option<T>>| result.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().filter_map(taken).collect()
}
