//! NVIDIA's libraries: where they are, and whether they have every function that this crate calls.
//!
//! `cudarc` looks functions up when they are first called, in libraries that it opens by their names. It panics if a
//! library or a function is missing. [`open`] therefore opens a library by its path, so that its name refers to an open
//! library, and looks up all functions first.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::Library;

/// Environment variable with the only folder to search.
const FOLDER_VARIABLE: &str = "ORTRAIN_CUDA_LIBRARIES";

/// One of NVIDIA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nvidia {
    /// CUDA driver.
    Driver,
    /// Compiler NVRTC.
    Nvrtc,
    /// Library cuBLASLt for matrix products.
    CublasLt,
}

/// Number of libraries.
const COUNT: usize = 3;

/// Functions of the driver that this crate calls.
const DRIVER_FUNCTIONS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
];

/// Functions of NVRTC that this crate calls.
const NVRTC_FUNCTIONS: &[&str] = &[
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetErrorString",
];

/// Functions of cuBLASLt that this crate calls.
const CUBLASLT_FUNCTIONS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
];

/// Error for a library that is missing, or that lacks functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingLibrary {
    pub(crate) reason: String,
    pub(crate) remedy: String,
}

impl Nvidia {
    /// Returns the name in file names: `libNAME.so`.
    fn stem(self) -> &'static str {
        match self {
            Nvidia::Driver => "cuda",
            Nvidia::Nvrtc => "nvrtc",
            Nvidia::CublasLt => "cublasLt",
        }
    }

    /// Returns the name for messages.
    fn title(self) -> &'static str {
        match self {
            Nvidia::Driver => "the CUDA driver",
            Nvidia::Nvrtc => "NVIDIA's compiler NVRTC",
            Nvidia::CublasLt => "NVIDIA's library cuBLASLt",
        }
    }

    fn functions(self) -> &'static [&'static str] {
        match self {
            Nvidia::Driver => DRIVER_FUNCTIONS,
            Nvidia::Nvrtc => NVRTC_FUNCTIONS,
            Nvidia::CublasLt => CUBLASLT_FUNCTIONS,
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Nvidia::Driver => "install NVIDIA's driver, version 570 or later",
            Nvidia::Nvrtc | Nvidia::CublasLt => {
                "install it with the extra \"ortrain[cuda13]\", or \"ortrain[cuda12]\" for a driver before version 580"
            }
        }
    }

    fn missing(self, reason: String) -> MissingLibrary {
        MissingLibrary { reason, remedy: self.remedy().to_owned() }
    }
}

/// Folders that a caller adds to the search.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds folders of Python packages to the search for libraries: the folders of `sys.path`.
pub fn search_packages(folders: impl IntoIterator<Item = PathBuf>) {
    let mut known = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    for folder in folders {
        if !known.contains(&folder) {
            known.push(folder);
        }
    }
}

/// Paths of libraries that were opened by their path.
static FOUND: [OnceLock<PathBuf>; COUNT] = [const { OnceLock::new() }; COUNT];

/// Opens a library and checks its functions. Later calls return the first success.
///
/// The driver is the library of the system. The compiler comes from the first folder of the search, or else from the
/// system. A folder in the environment replaces both.
///
/// # Errors
/// When the library or one of its functions is missing.
pub(crate) fn open(library: Nvidia) -> Result<(), MissingLibrary> {
    static OPENED: [OnceLock<()>; COUNT] = [const { OnceLock::new() }; COUNT];
    let opened = &OPENED[library as usize];
    if opened.get().is_some() {
        return Ok(());
    }
    let has_folder = std::env::var_os(FOLDER_VARIABLE).is_some();
    let is_known = library == Nvidia::Driver && !has_folder && open_by_name(library).is_some();
    if !is_known {
        let found = open_by_path(library);
        if has_folder || open_by_name(library).is_none() {
            found?;
        }
    }
    // The library in which cudarc will look functions up.
    let known = open_by_name(library).ok_or_else(|| {
        library.missing(format!("{} was found, but cannot be opened by its name", library.title()))
    })?;
    check_functions(library, &known)?;
    std::mem::forget(known);
    let _ = opened.set(());
    Ok(())
}

/// Returns the path of a library: of the open one, or of the one that [`open`] would open. `None` for a library of the
/// system.
pub(crate) fn path_of(library: Nvidia) -> Option<PathBuf> {
    let found = FOUND[library as usize].get().cloned();
    found.or_else(|| candidates(library).into_iter().next())
}

/// Opens the library that `cudarc` opens: the first of its names that refers to an open library, or to a library of the
/// system.
fn open_by_name(library: Nvidia) -> Option<Library> {
    let mut names = cudarc::get_lib_name_candidates(library.stem()).into_iter();
    // SAFETY: the library is NVIDIA's, or named by the owner of the process. Its initialization has no precondition.
    names.find_map(|name| unsafe { Library::new(name) }.ok())
}

/// Opens the first library in the folders of the search by its path, for the rest of the process.
fn open_by_path(library: Nvidia) -> Result<(), MissingLibrary> {
    let mut reason = format!("{} was not found", library.title());
    for path in candidates(library) {
        if library == Nvidia::Nvrtc {
            open_builtins(&path);
        }
        // SAFETY: as in `open_by_name`.
        match unsafe { Library::new(&path) } {
            Ok(opened) => {
                std::mem::forget(opened);
                let _ = FOUND[library as usize].set(path);
                return Ok(());
            }
            Err(error) => {
                reason = format!("{} at {} cannot be opened: {error}", library.title(), path.display());
            }
        }
    }
    Err(library.missing(reason))
}

/// Opens the part of NVRTC that NVRTC opens by its name. Some packages do not tell the system where it is.
fn open_builtins(nvrtc: &Path) {
    let Some(folder) = nvrtc.parent() else { return };
    for path in files_with_prefix(folder, "libnvrtc-builtins.so") {
        // SAFETY: as in `open_by_name`.
        if let Ok(opened) = unsafe { Library::new(path) } {
            std::mem::forget(opened);
        }
    }
}

fn check_functions(library: Nvidia, opened: &Library) -> Result<(), MissingLibrary> {
    // SAFETY: the symbol is only looked up.
    let is_missing = |name: &&&str| unsafe { opened.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err();
    let missing: Vec<&str> = library.functions().iter().filter(is_missing).copied().collect();
    match missing.as_slice() {
        [] => Ok(()),
        [first, rest @ ..] => {
            let others = if rest.is_empty() { String::new() } else { format!(" and {} others", rest.len()) };
            Err(library
                .missing(format!("{} is too old: it has no function {first}{others}", library.title())))
        }
    }
}

/// Returns the files that may be a library, in order of preference.
fn candidates(library: Nvidia) -> Vec<PathBuf> {
    let name = format!("lib{}.so", library.stem());
    folders().iter().flat_map(|folder| files_with_prefix(folder, &name)).collect()
}

/// Returns the files of a folder with a name that begins with a prefix, the latest version first.
fn files_with_prefix(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let has_prefix = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    let mut files: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(has_prefix).collect();
    files.sort();
    files.reverse();
    files
}

/// Returns the folders of the search: Python packages, conda, `CUDA_HOME`, and the system. A folder in the environment
/// replaces all of them.
fn folders() -> Vec<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        return vec![PathBuf::from(folder)];
    }
    let mut folders = Vec::new();
    let mut packages = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = std::env::var_os(variable) else { continue };
        let Ok(versions) = std::fs::read_dir(Path::new(&root).join("lib")) else { continue };
        packages.extend(versions.filter_map(|entry| Some(entry.ok()?.path().join("site-packages"))));
    }
    // Packages of CUDA 13, then packages of CUDA 12.
    for part in ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib"] {
        folders.extend(packages.iter().map(|packages| packages.join(part)));
    }
    folders.extend(std::env::var_os("CONDA_PREFIX").map(|root| Path::new(&root).join("lib")));
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        let Some(root) = std::env::var_os(variable) else { continue };
        folders.extend(["lib64", "lib"].map(|part| Path::new(&root).join(part)));
    }
    let system = [
        "/usr/local/cuda/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/wsl/lib",
    ];
    folders.extend(system.map(PathBuf::from));
    folders
}
