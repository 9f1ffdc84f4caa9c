//! Device of these tests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::{Arc, OnceLock};

use ortrain_program::Backend;
use ortrain_wgpu::{AdapterKind, Wgpu, adapters};

/// Environment variable with the name of another device for the tests.
const DEVICE: &str = "ORTRAIN_TEST_DEVICE";

/// Returns the driver that computes on the processor, or the device in the environment variable.
pub(crate) fn wgpu() -> &'static Wgpu {
    static OPENED: OnceLock<Wgpu> = OnceLock::new();
    OPENED.get_or_init(|| {
        let software = || adapters(true).into_iter().find(|adapter| adapter.kind == AdapterKind::Software);
        let name = std::env::var(DEVICE).ok().or_else(|| Some(software()?.name));
        let name = name.unwrap_or_else(|| {
            panic!("there is no Vulkan driver that computes on the processor; make build/vulkan.stamp installs it")
        });
        Wgpu::open(&name, true).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Returns the device as a backend.
pub(crate) fn device() -> Arc<dyn Backend> {
    Arc::new(wgpu().clone())
}
