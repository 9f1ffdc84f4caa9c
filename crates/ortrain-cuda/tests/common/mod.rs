//! Device of these tests.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod checked;
pub(crate) mod software;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use ortrain_cuda::Cuda;
use ortrain_program::Backend;

/// Environment variable with the name of another device for the tests.
const DEVICE: &str = "ORTRAIN_TEST_DEVICE";

/// Returns the folder of NVIDIA's libraries that compute on the processor.
pub(crate) fn software_libraries() -> PathBuf {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../build/cuda"));
    assert!(
        folder.join("libcuda.so.1").exists(),
        "CUDA's libraries that compute on the processor are missing; make build/cuda.stamp builds them"
    );
    folder
}

/// Selects the software libraries for this process, unless the environment names a device. Call it before anything
/// else.
pub(crate) fn select_software() {
    static SELECTED: OnceLock<()> = OnceLock::new();
    SELECTED.get_or_init(|| {
        if std::env::var_os(DEVICE).is_some() {
            return;
        }
        let folder = software_libraries();
        let cache = folder.join("modules");
        std::fs::create_dir_all(&cache).expect("the folder of the build is writable");
        // SAFETY: tests run in processes of their own, and this is the first thing that they do.
        unsafe {
            std::env::set_var("ORTRAIN_CUDA_LIBRARIES", &folder);
            std::env::set_var("ORTRAIN_CUDA_CACHE", "");
            std::env::set_var("SOFTWARE_NVRTC_CACHE", &cache);
        }
    });
}

/// Returns the software device, or the device in the environment variable.
pub(crate) fn cuda() -> &'static Cuda {
    static OPENED: OnceLock<Cuda> = OnceLock::new();
    OPENED.get_or_init(|| {
        select_software();
        let name = std::env::var(DEVICE).unwrap_or_else(|_| "cuda".to_owned());
        Cuda::open(&name).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Returns the device as a backend.
pub(crate) fn device() -> Arc<dyn Backend> {
    Arc::new(cuda().clone())
}
