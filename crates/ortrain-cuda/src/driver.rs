//! Calls of the CUDA driver, with its handles as types.
//!
//! All functions require that [`libraries::open`](crate::libraries::open) has succeeded for the driver, and that the
//! context of the device is current on this thread; [`Context::enter`] ensures both.

use std::ffi::{CString, c_void};
use std::ptr::NonNull;

use cudarc::driver::{result, sys};

pub(crate) use cudarc::driver::DriverError;

/// Result of a call of the driver.
pub(crate) type Call<T> = Result<T, DriverError>;

/// Returns the driver's name and description of an error.
pub(crate) fn describe(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown error".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}

/// Returns true for the error of an allocation that is too large.
pub(crate) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// Device of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ordinal(sys::CUdevice);

/// Properties of a device.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) memory: u64,
    /// Compute capability: 90 for 9.0.
    pub(crate) capability: i32,
    /// True if the device shares the memory of the processor.
    pub(crate) is_integrated: bool,
}

/// Initializes the driver and returns its version: 13000 for 13.0.
pub(crate) fn initialize() -> Call<i32> {
    result::init()?;
    let mut version = 0;
    // SAFETY: the pointer is valid for a write.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version)
}

/// Returns the devices.
pub(crate) fn devices() -> Call<Vec<Ordinal>> {
    (0..result::device::get_count()?).map(|index| result::device::get(index).map(Ordinal)).collect()
}

impl Ordinal {
    pub(crate) fn properties(self) -> Call<Properties> {
        use sys::CUdevice_attribute as Attribute;
        // SAFETY: the device comes from `cuDeviceGet`.
        let attribute = |attribute| unsafe { result::device::get_attribute(self.0, attribute) };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Properties {
            name: result::device::get_name(self.0)?,
            // SAFETY: as above.
            memory: unsafe { result::device::total_mem(self.0) }? as u64,
            capability: 10 * major + minor,
            is_integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        })
    }

    /// Returns the primary context, which the process shares with other users of the device. It stays for the rest of
    /// the process.
    pub(crate) fn primary_context(self) -> Call<Context> {
        // SAFETY: the device comes from `cuDeviceGet`.
        unsafe { result::primary_ctx::retain(self.0) }.map(Context)
    }
}

/// Context of a device.
#[derive(Debug)]
pub(crate) struct Context(sys::CUcontext);

// SAFETY: the driver allows every thread to use a context, at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Time in which a context is current on this thread. The context from before is current afterwards.
pub(crate) struct Entered {
    previous: Option<sys::CUcontext>,
}

impl Context {
    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Call<Entered> {
        let previous = result::ctx::get_current()?;
        if previous == Some(self.0) {
            return Ok(Entered { previous: None });
        }
        // SAFETY: the context is retained for the rest of the process.
        unsafe { result::ctx::set_current(self.0) }?;
        Ok(Entered { previous: Some(previous.unwrap_or(std::ptr::null_mut())) })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: the context was current before. A context that its owner has destroyed since is an error.
            let _ = unsafe { result::ctx::set_current(previous) };
        }
    }
}

/// Address on a device.
pub(crate) type Address = u64;

/// Allocates memory with undefined content.
pub(crate) fn allocate(bytes: usize) -> Call<Address> {
    // SAFETY: the memory is not read before it is written: its owner clears it, or overwrites it.
    unsafe { result::malloc_sync(bytes) }
}

/// Frees memory, after all work of the device.
///
/// # Safety
/// The address comes from [`allocate`] and is not used again.
pub(crate) unsafe fn free(address: Address) -> Call<()> {
    // SAFETY: the contract of this function.
    unsafe { result::free_sync(address) }
}

/// Pinned memory of the host, which the device copies from and to while the host goes on.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates memory. It stays for the rest of the process, because a device that failed may still write to it.
    pub(crate) fn new(bytes: usize) -> Call<Pinned> {
        // SAFETY: any number of bytes is valid.
        let start = unsafe { result::malloc_host(bytes, 0) }?.cast::<u8>();
        let start = NonNull::new(start).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        // SAFETY: the allocation has this size.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has this size and is initialized. Callers wait for copies before they read.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// Queue of work of a device.
#[derive(Debug)]
pub(crate) struct Stream(sys::CUstream);

// SAFETY: the driver allows every thread to use a stream.
unsafe impl Send for Stream {}

impl Stream {
    /// Creates a stream that does not wait for the default stream.
    pub(crate) fn new() -> Call<Stream> {
        result::stream::create(result::stream::StreamKind::NonBlocking).map(Stream)
    }

    /// Returns the handle, for other libraries of NVIDIA.
    pub(crate) fn as_raw(&self) -> sys::CUstream {
        self.0
    }

    /// Returns the stream with a handle of another library. The handles 1 and 2 are the default streams.
    pub(crate) fn from_handle(handle: u64) -> Stream {
        Stream(handle as usize as sys::CUstream)
    }

    /// Makes later work of this stream wait for the earlier work of another one.
    ///
    /// # Errors
    /// When the driver fails, for example because the other stream does not exist any more.
    pub(crate) fn wait_for(&self, other: &Stream) -> Call<()> {
        let reached = Event::new(false)?;
        reached.record(other)?;
        // SAFETY: the event exists. A stream that does not exist is an error of the driver.
        let waited = unsafe {
            result::stream::wait_event(self.0, reached.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        };
        // The driver keeps the event until it is reached.
        reached.destroy()?;
        waited
    }

    /// Waits for all work.
    pub(crate) fn wait(&self) -> Call<()> {
        // SAFETY: the stream is never destroyed.
        unsafe { result::stream::synchronize(self.0) }
    }

    /// Enqueues a copy from pinned memory.
    ///
    /// # Safety
    /// The caller does not change `from` before the copy has run. The range at `to` is allocated.
    pub(crate) unsafe fn upload(&self, to: Address, from: &[u8]) -> Call<()> {
        // SAFETY: the contract of this function.
        unsafe { result::memcpy_htod_async(to, from, self.0) }
    }

    /// Enqueues a copy to pinned memory.
    ///
    /// # Safety
    /// The caller does not read `to` before the copy has run. The range at `from` is allocated.
    pub(crate) unsafe fn download(&self, to: &mut [u8], from: Address) -> Call<()> {
        // SAFETY: the contract of this function.
        unsafe { result::memcpy_dtoh_async(to, from, self.0) }
    }

    /// Enqueues a copy on the device.
    ///
    /// # Safety
    /// Both ranges are allocated when the copy runs.
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Call<()> {
        // SAFETY: the contract of this function.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.0) }
    }

    /// Enqueues the writing of zeros.
    ///
    /// # Safety
    /// The range is allocated when the work runs.
    pub(crate) unsafe fn clear(&self, at: Address, bytes: usize) -> Call<()> {
        // SAFETY: the contract of this function.
        unsafe { result::memset_d8_async(at, 0, bytes, self.0) }
    }

    /// Enqueues a kernel with one address for each parameter. `parameters` has room for one pointer per address.
    ///
    /// # Safety
    /// The kernel has a pointer parameter for each address, and accesses only allocated memory.
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        [x, y, z]: [u32; 3],
        block: u32,
        addresses: &[Address],
        parameters: &mut [*mut c_void],
    ) -> Call<()> {
        for (parameter, address) in parameters.iter_mut().zip(addresses) {
            *parameter = std::ptr::from_ref(address).cast_mut().cast();
        }
        // SAFETY: the contract of this function; the driver copies the parameters before it returns.
        unsafe { result::launch_kernel(function.0, (x, y, z), (block, 1, 1), 0, self.0, parameters) }
    }

    /// Records the work that `enqueue` enqueues, and returns it as a graph without running it.
    ///
    /// # Errors
    /// When the driver or `enqueue` fails. The stream then does not record, and no work has run.
    pub(crate) fn capture<E: From<DriverError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is never destroyed.
        unsafe { result::stream::begin_capture(self.0, mode) }?;
        let enqueued = enqueue();
        // SAFETY: as above.
        let recorded = unsafe { result::stream::end_capture(self.0) };
        let recorded = match (enqueued, recorded) {
            (Ok(()), recorded) => recorded?,
            (Err(error), recorded) => {
                if let Ok(graph) = recorded.map(NonNull::new)
                    && let Some(graph) = graph
                {
                    // SAFETY: the graph was just created.
                    let _ = unsafe { result::graph::destroy(graph.as_ptr()) };
                }
                return Err(error);
            }
        };
        // SAFETY: the graph was just created. An instance does not need it any more.
        let (instance, _) = unsafe {
            let instance = result::graph::instantiate(recorded, sys::CUgraphInstantiate_flags(0));
            (instance, result::graph::destroy(recorded))
        };
        Ok(Graph(instance?))
    }

    /// Enqueues a graph.
    ///
    /// # Safety
    /// The memory that the graph accesses is allocated when it runs.
    pub(crate) unsafe fn replay(&self, graph: &Graph) -> Call<()> {
        // SAFETY: the contract of this function.
        unsafe { result::graph::launch(graph.0, self.0) }
    }
}

/// Recorded work, ready to run.
#[derive(Debug)]
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: the driver allows every thread to use a graph, one at a time; a graph is used with its stream locked.
unsafe impl Send for Graph {}

impl Graph {
    /// Destroys the graph, after its last run.
    pub(crate) fn destroy(self) -> Call<()> {
        // SAFETY: the value is consumed. The driver delays the end until the graph has run.
        unsafe { result::graph::exec_destroy(self.0) }
    }
}

/// Point in a stream.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver allows every thread to use an event.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event; with `times`, it has a time.
    pub(crate) fn new(times: bool) -> Call<Event> {
        use sys::CUevent_flags as Flags;
        result::event::create(if times { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING })
            .map(Event)
    }

    /// Marks the end of the work so far.
    pub(crate) fn record(&self, stream: &Stream) -> Call<()> {
        // SAFETY: neither is destroyed.
        unsafe { result::event::record(self.0, stream.0) }
    }

    /// Waits for the last mark.
    pub(crate) fn wait(&self) -> Call<()> {
        // SAFETY: the event is not destroyed.
        unsafe { result::event::synchronize(self.0) }
    }

    /// Returns the milliseconds between two marks that have been reached.
    pub(crate) fn milliseconds_until(&self, end: &Event) -> Call<f32> {
        // SAFETY: neither is destroyed.
        unsafe { result::event::elapsed(self.0, end.0) }
    }

    pub(crate) fn destroy(self) -> Call<()> {
        // SAFETY: the value is consumed.
        unsafe { result::event::destroy(self.0) }
    }
}

/// Loaded kernels. They stay for the rest of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Module(sys::CUmodule);

/// Kernel of a module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: modules and functions are immutable, and the driver allows every thread to use them.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads an image of NVRTC.
    ///
    /// # Safety
    /// The image is a complete image of NVRTC.
    pub(crate) unsafe fn load(image: &[u8]) -> Call<Module> {
        // SAFETY: the contract of this function.
        unsafe { result::module::load_data(image.as_ptr().cast()) }.map(Module)
    }

    pub(crate) fn function(self, name: &str) -> Call<Function> {
        let name = CString::new(name).map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
        // SAFETY: the module is never unloaded.
        unsafe { result::module::get_function(self.0, name) }.map(Function)
    }
}
