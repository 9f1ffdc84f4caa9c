//! GPUs of the machine, by name.

use std::sync::{Arc, Mutex, PoisonError};

use ortrain_program::NoDevice;

use crate::device::Device;

/// GPU interfaces by their prefix in device names, in order of preference.
const INTERFACES: [(&str, wgpu::Backend, &str); 3] = [
    ("metal", wgpu::Backend::Metal, "Metal"),
    ("vulkan", wgpu::Backend::Vulkan, "Vulkan"),
    ("dx12", wgpu::Backend::Dx12, "Direct3D 12"),
];

/// Name of the best GPU, through the preferred interface of the platform.
const BEST_NAME: &str = "webgpu";

/// Kind of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AdapterKind {
    /// Card with its own memory.
    Discrete,
    /// Part of the processor, with shared memory.
    Integrated,
    /// GPU of a virtual machine, or of an unknown kind.
    Other,
    /// Driver that computes on the processor, for tests.
    Software,
}

impl AdapterKind {
    /// Returns the name: `"discrete"`, `"integrated"`, `"other"` or `"software"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Other => "other",
            AdapterKind::Software => "software",
        }
    }
}

/// GPU that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// Device name: `"vulkan"` for the first GPU with a Vulkan driver, `"vulkan:1"` for the next.
    pub name: String,
    /// Description by the driver.
    pub description: String,
    /// Driver, with its version.
    pub driver: String,
    /// Kind.
    pub kind: AdapterKind,
    /// Maximum bytes of one buffer.
    pub buffer_bytes: u64,
    /// Maximum bytes of one tensor in a kernel.
    pub binding_bytes: u64,
}

/// Returns true for a valid device name on any system: `vulkan`, `metal`, `dx12`, with or without a number after a
/// colon, or `webgpu`.
#[must_use]
pub fn is_adapter_name(name: &str) -> bool {
    parse_name(name).is_some()
}

/// Parses a name to its interface and its number; returns `None` for an invalid name.
fn parse_name(name: &str) -> Option<(&str, usize)> {
    let (interface, index) = match name.split_once(':') {
        Some((interface, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            (interface, number.parse().ok()?)
        }
        Some(_) => return None,
        None => (name, 0),
    };
    let is_known = INTERFACES.iter().any(|&(known, ..)| known == interface);
    (is_known || name == BEST_NAME).then_some((interface, index))
}

fn kind_of(adapter: &wgpu::Adapter) -> AdapterKind {
    match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
        wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
        wgpu::DeviceType::Cpu => AdapterKind::Software,
        _ => AdapterKind::Other,
    }
}

/// Calls drivers without access to the standard error of the process, if the environment has no `XDG_RUNTIME_DIR`.
/// Mesa's device selection layer otherwise prints that Wayland is not available.
#[cfg(target_os = "linux")]
fn without_complaints<T>(call: impl FnOnce() -> T) -> T {
    /// Original standard error, restored on drop, also in a panic.
    struct SavedStderr(std::os::fd::OwnedFd);
    impl Drop for SavedStderr {
        fn drop(&mut self) {
            let _ = rustix::stdio::dup2_stderr(&self.0);
        }
    }
    if std::env::var_os("XDG_RUNTIME_DIR").is_some() {
        return call();
    }
    let nowhere = std::fs::File::options().write(true).open("/dev/null");
    let saved_stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 0);
    let (Ok(nowhere), Ok(saved_stderr)) = (nowhere, saved_stderr) else { return call() };
    let _kept = SavedStderr(saved_stderr);
    let _ = rustix::stdio::dup2_stderr(nowhere);
    call()
}

/// Calls drivers.
#[cfg(not(target_os = "linux"))]
fn without_complaints<T>(call: impl FnOnce() -> T) -> T {
    call()
}

/// Returns the adapters of the machine with their names: by interface, faster kinds first.
fn named_adapters() -> Vec<(String, wgpu::Adapter)> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    // No validation layers of drivers, because they print.
    descriptor.flags = wgpu::InstanceFlags::empty();
    let mut adapters = without_complaints(|| {
        let instance = wgpu::Instance::new(descriptor);
        pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY))
    });
    adapters.sort_by_key(kind_of);
    let of_interface = |&(interface, backend, _): &(&'static str, wgpu::Backend, &str)| {
        let matching: Vec<_> = adapters.iter().filter(|a| a.get_info().backend == backend).cloned().collect();
        matching.into_iter().enumerate().map(move |(index, adapter)| match index {
            0 => (interface.to_owned(), adapter),
            _ => (format!("{interface}:{index}"), adapter),
        })
    };
    INTERFACES.iter().flat_map(of_interface).collect()
}

/// Returns the GPUs of the machine. Drivers that compute on the processor are included if `software` is true.
#[must_use]
pub fn adapters(software: bool) -> Vec<AdapterInfo> {
    let described = |(name, adapter): (String, wgpu::Adapter)| {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        let driver = [info.driver.as_str(), info.driver_info.as_str()];
        AdapterInfo {
            name,
            kind: kind_of(&adapter),
            driver: driver.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" "),
            description: info.name,
            buffer_bytes: limits.max_buffer_size,
            binding_bytes: limits.max_storage_buffer_binding_size,
        }
    };
    let described_adapters = named_adapters().into_iter().map(described);
    described_adapters.filter(|adapter| software || adapter.kind != AdapterKind::Software).collect()
}

/// Finds the adapter of a name, and returns it with its canonical name.
fn find_adapter(name: &str, software: bool) -> Result<(String, wgpu::Adapter), NoDevice> {
    let missing = |reason: String, remedy: &str| NoDevice {
        device: name.to_owned(),
        reason,
        remedy: remedy.to_owned(),
    };
    let Some((interface, index)) = parse_name(name) else {
        return Err(missing(
            "the name is unknown".to_owned(),
            "names are \"webgpu\", \"vulkan\", \"metal\" and \"dx12\", the last three with an optional index, as in \
             \"vulkan:1\"",
        ));
    };
    let named = INTERFACES.iter().find(|&&(known, ..)| known == interface);
    let title = named.map_or("Vulkan, Metal or Direct3D 12", |&(_, _, title)| title);
    let other_systems = match interface {
        "metal" if !cfg!(any(target_os = "macos", target_os = "ios")) => Some("Apple's systems"),
        "dx12" if !cfg!(windows) => Some("Windows"),
        _ => None,
    };
    if let Some(systems) = other_systems {
        let remedy = "\"webgpu\" selects the best GPU on every system";
        return Err(missing(format!("{title} exists only on {systems}"), remedy));
    }
    let mut candidates = named_adapters();
    if named.is_some() {
        candidates.retain(|(known, _)| known.split(':').next() == Some(interface));
    } else {
        candidates.sort_by_key(|(_, adapter)| kind_of(adapter));
    }
    let software_driver =
        candidates.iter().find(|(_, a)| kind_of(a) == AdapterKind::Software).map(|(_, a)| a.get_info().name);
    if !software {
        candidates.retain(|(_, adapter)| kind_of(adapter) != AdapterKind::Software);
    }
    let count = candidates.len();
    if let Some((known, adapter)) = candidates.into_iter().nth(index) {
        return Ok((known, adapter));
    }
    Err(match (count, software_driver) {
        (0, Some(driver)) if !software => missing(
            format!("the only driver is {driver}, which computes on the processor"),
            "set the environment variable ORTRAIN_SOFTWARE_GPU to 1 to use it, or use \"cpu\", which is faster",
        ),
        (0, _) => missing(
            format!("no driver for {title} was found"),
            "install the driver of the GPU's vendor, with its part for Vulkan, or use \"cpu\"",
        ),
        (1, _) => missing(format!("the only device is {interface:?}"), "leave out the index"),
        (count, _) => missing(
            format!("there are {count} such devices"),
            "ortrain.devices() lists the devices of this machine",
        ),
    })
}

/// Open devices. They stay open until the process ends, so that all users of a device share it, and so that a forked
/// process closes nothing.
static OPENED: Mutex<Vec<(String, Arc<Device>)>> = Mutex::new(Vec::new());

/// Returns the working open device of a name, or else registers `new` under this name and returns it.
fn find_or_register(name: &str, software: bool, new: Option<Arc<Device>>) -> Option<Arc<Device>> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let works = |device: &Arc<Device>| (software || !device.is_software) && device.check().is_ok();
    let entry = opened.iter().find(|(known, device)| known == name && works(device));
    let existing = entry.map(|(_, device)| device.clone());
    if existing.is_none() {
        opened.extend(new.clone().map(|device| (name.to_owned(), device)));
    }
    existing.or(new)
}

/// Returns the device of a name. Opens a device if none is open, or if the open device is lost.
pub(crate) fn open(name: &str, software: bool) -> Result<Arc<Device>, NoDevice> {
    if let Some(device) = find_or_register(name, software, None) {
        return Ok(device);
    }
    let (known, adapter) = find_adapter(name, software)?;
    let device = match find_or_register(&known, software, None) {
        Some(device) => device,
        None => {
            let device = Arc::new(new_device(name, &known, &adapter)?);
            find_or_register(&known, software, Some(device.clone())).unwrap_or(device)
        }
    };
    Ok(find_or_register(name, software, Some(device.clone())).unwrap_or(device))
}

/// Opens an adapter. `name` is the requested name, `known` the canonical name of the adapter.
fn new_device(name: &str, known: &str, adapter: &wgpu::Adapter) -> Result<Device, NoDevice> {
    let info = adapter.get_info();
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("ortrain"),
        required_limits: adapter.limits(),
        // Timestamps for profiles.
        required_features: adapter.features() & wgpu::Features::TIMESTAMP_QUERY,
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..Default::default()
    };
    let (device, queue) =
        pollster::block_on(adapter.request_device(&descriptor)).map_err(|error| NoDevice {
            device: name.to_owned(),
            reason: format!("{} cannot be opened: {error}", info.name),
            remedy: "try a newer driver or another device".to_owned(),
        })?;
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
    let mut interfaces = INTERFACES.into_iter().map(|(interface, ..)| interface);
    let interface = interfaces.find(|&interface| known.starts_with(interface)).unwrap_or(BEST_NAME);
    let is_software = kind_of(adapter) == AdapterKind::Software;
    Ok(Device::new(device, queue, (known.to_owned(), interface), description, is_software, failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_interface_and_a_number() {
        assert_eq!(parse_name("vulkan"), Some(("vulkan", 0)));
        assert_eq!(parse_name("dx12:3"), Some(("dx12", 3)));
        assert_eq!(parse_name("webgpu"), Some(("webgpu", 0)));
        for other in ["webgpu:1", "vulkan:", "vulkan:x", "vulkan:-1", "Vulkan", "cpu", "", ":", "vulkan:1:2"]
        {
            assert_eq!(parse_name(other), None, "{other}");
        }
        assert_eq!(parse_name("vulkan:99999999999999999999"), None);
    }
}
