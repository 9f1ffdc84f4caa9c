//! Open devices.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ortrain_codegen::Fault;
use ortrain_expr::OutOfRange;
use ortrain_graph::Tensor;
use ortrain_program::{DeviceError, LateFault, NoDevice, Program, RunError};

use crate::driver::{self, Address, Call, Context, DriverError, Entered, Ordinal, Properties};
use crate::failure::Failure;
use crate::kernels::Kernels;
use crate::libraries::{self, MissingLibrary, Nvidia, open as open_library};
use crate::lt::Lt;
use crate::queue::{DEFAULT_STREAM, Queue};
use crate::spare::Spare;

/// Prefix of device names.
const NAME: &str = "cuda";
/// Lowest supported version of the driver.
const MIN_VERSION: i32 = 12_080;
/// Lowest supported compute capability. CUDA 13 compiles for no lower one.
const MIN_CAPABILITY: i32 = 75;

/// GPU that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// Device name: `"cuda"` for the first GPU, `"cuda:1"` for the next.
    pub name: String,
    /// Description by the driver.
    pub description: String,
    /// Version of the driver's interface.
    pub driver: String,
    /// Bytes of memory.
    pub memory: u64,
    /// True if the device shares the memory of the processor.
    pub is_integrated: bool,
}

/// Counts of the objects created on a device so far, and of copied bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaCounts {
    /// Number of allocations.
    pub allocations: usize,
    /// Bytes of the existing allocations.
    pub bytes: u64,
    /// Number of compilations.
    pub compilations: usize,
    /// Number of recorded graphs.
    pub graphs: usize,
    /// Number of launches. A recorded launch counts once.
    pub launches: usize,
    /// Bytes copied to the device.
    pub uploaded: u64,
    /// Bytes copied from the device.
    pub downloaded: u64,
}

/// The counters behind [`CudaCounts`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) allocations: AtomicUsize,
    pub(crate) bytes: AtomicU64,
    pub(crate) graphs: AtomicUsize,
    pub(crate) launches: AtomicUsize,
    pub(crate) uploaded: AtomicU64,
    pub(crate) downloaded: AtomicU64,
}

/// Open device.
#[derive(Debug)]
pub(crate) struct Device {
    /// Device name.
    name: String,
    /// Process that opened the device.
    process: u32,
    properties: Properties,
    context: Context,
    queue: Mutex<Queue>,
    /// First error that makes the device unusable.
    failure: Mutex<Option<String>>,
    pub(crate) kernels: Kernels,
    /// Library for products, opened by the first product that it may compute.
    lt: OnceLock<Option<Lt>>,
    /// Allocations of dropped results, for reuse.
    pub(crate) spare: Spare<Allocation>,
    pub(crate) counters: Counters,
    /// Constants of programs on the device, by their address on the host.
    constants: Mutex<HashMap<(usize, usize), Weak<Constant>>>,
}

/// Range of device memory.
pub(crate) struct Allocation {
    device: Arc<Device>,
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    /// Owner in another library, which frees the range.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} on {}", self.bytes, self.address, self.device.name)
    }
}

impl Allocation {
    /// Returns the bytes of an allocation for `bytes` bytes.
    pub(crate) fn size_for(bytes: usize) -> usize {
        bytes.max(1).checked_next_multiple_of(256).unwrap_or(usize::MAX)
    }

    /// Returns true if another library owns the range.
    pub(crate) fn is_adopted(&self) -> bool {
        self.owner.is_some()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.device.is_own_process() {
            return;
        }
        if let Some(owner) = self.owner.take() {
            // The owner may reuse the range at once.
            let _ = self.device.on_queue("cuStreamSynchronize", |queue| {
                queue.flush()?;
                queue.stream.wait()
            });
            return drop(owner);
        }
        self.device.counters.bytes.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        let mut queue = self.device.lock_queue();
        if let Ok(_entered) = self.device.context.enter() {
            queue.forget_writes(self.address, self.bytes);
            // SAFETY: the address comes from `driver::allocate`, and this was its last user.
            let freed = unsafe { driver::free(self.address) };
            if let Err(error) = freed {
                self.device.fail(error, "cuMemFree");
            }
        }
    }
}

/// Constant of programs on the device. It keeps the tensor alive, because the tensor's address is the key.
#[derive(Debug)]
pub(crate) struct Constant {
    pub(crate) allocation: Allocation,
    _tensor: Tensor,
}

/// Failed allocation.
pub(crate) enum AllocationFailure {
    /// The device has no more memory.
    OutOfMemory,
    Device(DeviceError),
}

impl Device {
    fn new(name: &str, ordinal: Ordinal, properties: Properties) -> Result<Device, NoDevice> {
        let failed = |error: DriverError| NoDevice {
            device: name.to_owned(),
            reason: format!("{} cannot be opened: {}", properties.name, driver::describe(error)),
            remedy: "end other programs that use it, or choose another device".to_owned(),
        };
        let context = ordinal.primary_context().map_err(failed)?;
        let entered = context.enter().map_err(failed)?;
        let queue = Queue::new().map_err(failed)?;
        drop(entered);
        let kernels = Kernels::new(&format!("sm_{}", properties.capability));
        Ok(Device {
            name: name.to_owned(),
            process: std::process::id(),
            properties,
            context,
            queue: Mutex::new(queue),
            failure: Mutex::default(),
            kernels,
            lt: OnceLock::new(),
            spare: Spare::default(),
            counters: Counters::default(),
            constants: Mutex::default(),
        })
    }

    pub(crate) fn counts(&self) -> CudaCounts {
        let Counters { allocations, bytes, graphs, launches, uploaded, downloaded } = &self.counters;
        CudaCounts {
            allocations: allocations.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
            compilations: self.kernels.compilations(),
            graphs: graphs.load(Ordering::Relaxed),
            launches: launches.load(Ordering::Relaxed),
            uploaded: uploaded.load(Ordering::Relaxed),
            downloaded: downloaded.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn description(&self) -> &str {
        &self.properties.name
    }

    /// Returns the library for products, if it is installed. The context of the device is current.
    pub(crate) fn lt(&self) -> Option<&Lt> {
        self.lt.get_or_init(Lt::open).as_ref()
    }

    /// Returns the bytes of memory.
    pub(crate) fn memory(&self) -> u64 {
        self.properties.memory
    }

    /// Returns false in a process that was forked from the opening process: the driver does not support forks.
    pub(crate) fn is_own_process(&self) -> bool {
        self.process == std::process::id()
    }

    pub(crate) fn lock_queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, reason: &str) -> DeviceError {
        DeviceError::new(&*self.name, format!("{}: {reason}", self.properties.name))
    }

    /// Returns an error for a call that changed nothing. The device stays usable.
    pub(crate) fn refusal(&self, error: impl Into<Failure>, action: &str) -> DeviceError {
        self.error(&format!(
            "{action} failed with {}; nothing has changed, try again",
            error.into().describe()
        ))
    }

    /// Returns an error for a call that failed, and makes the device unusable.
    pub(crate) fn fail(&self, error: impl Into<Failure>, action: &str) -> DeviceError {
        let reason = format!(
            "{action} failed with {}; load the last checkpoint, on this device or on \"cpu\"",
            error.into().describe()
        );
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        self.error(failure.get_or_insert(reason))
    }

    /// Returns an error if the device is unusable.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        if !self.is_own_process() {
            return Err(self.error(
                "it was opened before the process forked; load the checkpoint again in this process, and create a \
                 new module",
            ));
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map_or(Ok(()), |reason| Err(self.error(reason)))
    }

    /// Makes the device current on this thread, if it is usable.
    pub(crate) fn enter(&self) -> Result<Entered, DeviceError> {
        self.check()?;
        self.context.enter().map_err(|error| self.fail(error, "cuCtxSetCurrent"))
    }

    /// Calls the driver on the queue of the device.
    ///
    /// # Errors
    /// When the driver fails. The device is then unusable.
    pub(crate) fn on_queue<T>(
        &self,
        action: &str,
        call: impl FnOnce(&mut Queue) -> Call<T>,
    ) -> Result<T, DeviceError> {
        let _entered = self.enter()?;
        let mut queue = self.lock_queue();
        queue.wait_for_consumers();
        let result = call(&mut queue);
        drop(queue);
        result.map_err(|error| self.fail(error, action))
    }

    /// Allocates memory with undefined content.
    pub(crate) fn allocate(self: &Arc<Device>, bytes: usize) -> Result<Allocation, AllocationFailure> {
        let _entered = self.enter().map_err(AllocationFailure::Device)?;
        let size = Allocation::size_for(bytes);
        let address = driver::allocate(size).map_err(|error| match driver::is_out_of_memory(error) {
            true => AllocationFailure::OutOfMemory,
            false => AllocationFailure::Device(self.fail(error, "cuMemAlloc")),
        })?;
        self.counters.allocations.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(size as u64, Ordering::Relaxed);
        Ok(Allocation { device: self.clone(), address, bytes: size, owner: None })
    }

    /// Returns a range that another library owns. From now on, work of this process waits for the default stream.
    pub(crate) fn adopt(
        self: &Arc<Device>,
        address: Address,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Allocation {
        // A device that fails here reports the failure at its next use.
        let _ = self.on_queue("the order of two streams", |queue| queue.order_before(DEFAULT_STREAM));
        Allocation { device: self.clone(), address, bytes, owner: Some(owner) }
    }

    /// Returns the index of the device for other libraries.
    pub(crate) fn index(&self) -> i32 {
        parse_name(&self.name).map_or(0, |index| index as i32)
    }

    /// Allocates memory with these bytes.
    pub(crate) fn allocate_with(self: &Arc<Device>, bytes: &[u8]) -> Result<Allocation, AllocationFailure> {
        let allocation = self.allocate(bytes.len())?;
        self.write(allocation.address, bytes).map_err(AllocationFailure::Device)?;
        Ok(allocation)
    }

    /// Copies bytes to an allocated range.
    pub(crate) fn write(&self, to: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.counters.uploaded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        // SAFETY: callers write to ranges of their own allocations.
        self.on_queue("a copy to the device", |queue| unsafe { queue.write(to, bytes) })
    }

    /// Copies bytes of an allocated range to the host, after all earlier work.
    pub(crate) fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.counters.downloaded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let fault = self.on_queue("a copy from the device", |queue| {
            // SAFETY: callers read ranges of their own allocations.
            unsafe { queue.read(from, bytes) }?;
            queue.take_fault()
        })?;
        self.report(fault)
    }

    /// Returns the fault of earlier runs as an error.
    fn report(&self, fault: Option<(Fault, Arc<Program>)>) -> Result<(), DeviceError> {
        let Some((Fault { instruction, point, index, bound, .. }, program)) = fault else { return Ok(()) };
        let Some(scheduled) = program.instructions.get(instruction) else { return Ok(()) };
        let error = RunError::out_of_range(scheduled, OutOfRange { point, index, bound });
        let mut failed = self.error(&error.to_string());
        if let RunError::IndexOutOfRange { node, at, index, bound } = error {
            failed.fault = Some(Box::new(LateFault { node, at, index, bound }));
        }
        Err(failed)
    }

    /// Waits for earlier runs, and reports their fault.
    pub(crate) fn settle(&self) -> Result<(), DeviceError> {
        let fault = self.on_queue("a copy from the device", Queue::take_fault)?;
        self.report(fault)
    }

    /// Returns a constant of a program on the device. Programs share constants.
    pub(crate) fn constant(self: &Arc<Device>, tensor: &Tensor) -> Result<Arc<Constant>, AllocationFailure> {
        let key = (tensor.data().as_ptr() as usize, tensor.data().len());
        let mut constants = self.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = constants.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        constants.retain(|_, constant| constant.strong_count() > 0);
        let allocation = self.allocate_with(tensor.data())?;
        let constant = Arc::new(Constant { allocation, _tensor: tensor.clone() });
        constants.insert(key, Arc::downgrade(&constant));
        Ok(constant)
    }

    /// Makes the device unusable, like a failing driver.
    pub(crate) fn abandon(&self) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| "the device was closed; load the last checkpoint".to_owned());
    }
}

/// Returns true for a valid device name: `cuda`, with or without a number after a colon.
#[must_use]
pub fn is_cuda_name(name: &str) -> bool {
    parse_name(name).is_some()
}

/// Returns the index of the device of a name; `None` for an invalid name.
fn parse_name(name: &str) -> Option<usize> {
    match name.strip_prefix(NAME)? {
        "" => Some(0),
        rest => {
            let number = rest.strip_prefix(':')?;
            let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| number.parse().ok())?
        }
    }
}

/// Returns the devices of the driver, and the version of the driver.
fn driver_devices() -> Result<(Vec<Ordinal>, i32), MissingLibrary> {
    open_library(Nvidia::Driver)?;
    let failed = |error: DriverError| MissingLibrary {
        reason: format!("the CUDA driver failed with {}", driver::describe(error)),
        remedy: "check that the driver and its kernel module have one version; a restart loads both"
            .to_owned(),
    };
    let version = driver::initialize().map_err(failed)?;
    if version < MIN_VERSION {
        return Err(MissingLibrary {
            reason: format!(
                "the driver supports CUDA {}, but ortrain needs {} or later",
                version_text(version),
                version_text(MIN_VERSION)
            ),
            remedy: "install NVIDIA's driver, version 570 or later".to_owned(),
        });
    }
    Ok((driver::devices().map_err(failed)?, version))
}

/// Returns the text of a version: 13010 is "13.1".
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns the GPUs of the machine; none without a driver.
#[must_use]
pub fn cuda_devices() -> Vec<CudaInfo> {
    let Ok((ordinals, version)) = driver_devices() else { return Vec::new() };
    let info = |(index, ordinal): (usize, Ordinal)| {
        let properties = ordinal.properties().ok()?;
        (properties.capability >= MIN_CAPABILITY).then(|| CudaInfo {
            name: if index == 0 { NAME.to_owned() } else { format!("{NAME}:{index}") },
            description: properties.name,
            driver: format!("CUDA {}", version_text(version)),
            memory: properties.memory,
            is_integrated: properties.is_integrated,
        })
    };
    ordinals.into_iter().enumerate().filter_map(info).collect()
}

/// Open devices by index. They stay open until the process ends, so that all users of a device share it, and so that a
/// forked process closes nothing.
static OPENED: Mutex<Vec<(usize, Arc<Device>)>> = Mutex::new(Vec::new());

/// Returns the device of a name. Opens a device if none is open, or if the open device is unusable.
pub(crate) fn open(name: &str) -> Result<Arc<Device>, NoDevice> {
    let missing = |reason: String, remedy: String| NoDevice { device: name.to_owned(), reason, remedy };
    let index = parse_name(name).ok_or_else(|| {
        missing(
            "the name is unknown".to_owned(),
            "names are \"cuda\", and \"cuda:1\" for the second GPU".to_owned(),
        )
    })?;
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let works = |(known, device): &&(usize, Arc<Device>)| *known == index && device.check().is_ok();
    if let Some((_, device)) = opened.iter().find(works) {
        return Ok(device.clone());
    }
    let (ordinals, _) =
        driver_devices().map_err(|MissingLibrary { reason, remedy }| missing(reason, remedy))?;
    let Some(&ordinal) = ordinals.get(index) else {
        return Err(match ordinals.len() {
            0 => missing(
                "the driver sees no GPU".to_owned(),
                "check CUDA_VISIBLE_DEVICES, or use \"webgpu\" or \"cpu\"".to_owned(),
            ),
            1 => missing("the only device is \"cuda\"".to_owned(), "leave out the index".to_owned()),
            count => missing(
                format!("there are {count} such devices"),
                "ortrain.devices() lists the devices of this machine".to_owned(),
            ),
        });
    };
    let properties = ordinal.properties().map_err(|error| {
        missing(
            format!("the CUDA driver failed with {}", driver::describe(error)),
            "restart the machine".to_owned(),
        )
    })?;
    if properties.capability < MIN_CAPABILITY {
        return Err(missing(
            format!(
                "{} has the compute capability {}.{}, but CUDA kernels need 7.5 or later",
                properties.name,
                properties.capability / 10,
                properties.capability % 10
            ),
            "use \"vulkan\", which supports older GPUs".to_owned(),
        ));
    }
    // A compiler that the cache makes unnecessary is not opened.
    if libraries::path_of(Nvidia::Nvrtc).is_none() {
        open_library(Nvidia::Nvrtc).map_err(|MissingLibrary { reason, remedy }| missing(reason, remedy))?;
    }
    let known = if index == 0 { NAME.to_owned() } else { format!("{NAME}:{index}") };
    let device = Arc::new(Device::new(&known, ordinal, properties)?);
    opened.push((index, device.clone()));
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_number() {
        assert_eq!(parse_name("cuda"), Some(0));
        assert_eq!(parse_name("cuda:3"), Some(3));
        for other in
            ["cuda:", "cuda:x", "cuda:-1", "CUDA", "cuda1", "cuda:99999999999999999999", "vulkan", ""]
        {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
