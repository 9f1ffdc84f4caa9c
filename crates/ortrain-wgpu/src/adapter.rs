//! Which device is opened.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::Device;

/// The kind of device that is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// A GPU, of several the one that the system takes for the fastest.
    Hardware,
    /// A driver that computes on the processor: for tests.
    Software,
}

/// There is no device of a kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{adapter}: {reason}; {remedy}")]
pub struct NoDevice {
    /// The adapter that was asked for.
    pub adapter: Adapter,
    /// Why it is not there.
    pub reason: String,
    /// The remedy.
    pub remedy: &'static str,
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Adapter::Hardware => "a GPU through Vulkan, Metal or Direct3D 12",
            Adapter::Software => "a Vulkan driver that computes on the processor",
        })
    }
}

impl Adapter {
    fn missing(self, reason: String) -> NoDevice {
        let remedy = match self {
            Adapter::Hardware => {
                "install the vendor's driver with its part for Vulkan, or use the device \"cpu\""
            }
            Adapter::Software => {
                "install the packages mesa-vulkan-drivers and libvulkan1, as make test does where it may"
            }
        };
        NoDevice { adapter: self, reason, remedy }
    }

    fn is(self, info: &wgpu::AdapterInfo) -> bool {
        (info.device_type == wgpu::DeviceType::Cpu) == (self == Adapter::Software)
    }
}

fn name_of(backend: wgpu::Backend) -> &'static str {
    match backend {
        wgpu::Backend::Vulkan => "vulkan",
        wgpu::Backend::Metal => "metal",
        wgpu::Backend::Dx12 => "dx12",
        _ => "webgpu",
    }
}

/// Opens the first device of a kind, faster kinds of GPU first.
pub(crate) fn open(kind: Adapter) -> Result<Device, NoDevice> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    // Checks of drivers' own layers, which print.
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    let found = adapters.len();
    adapters.retain(|adapter| kind.is(&adapter.get_info()));
    adapters.sort_by_key(|adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        _ => 2,
    });
    let Some(adapter) = adapters.first() else {
        let reason = match found {
            0 => "no driver was found".to_owned(),
            _ => format!("of {found} devices that were found none is of that kind"),
        };
        return Err(kind.missing(reason));
    };
    let info = adapter.get_info();
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("ortrain"),
        required_limits: adapter.limits(),
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
        .map_err(|error| kind.missing(format!("{} cannot be opened: {error}", info.name)))?;
    let failure = Arc::new(Mutex::new(None));
    let first = failure.clone();
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.to_string());
    }));
    let lost = failure.clone();
    device.set_device_lost_callback(move |reason, message| {
        let message = format!("the device is lost ({reason:?}): {message}");
        lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
    });
    let description = format!("{} ({} {})", info.name, info.driver, info.driver_info);
    Ok(Device::new(device, queue, name_of(info.backend), description, failure))
}
