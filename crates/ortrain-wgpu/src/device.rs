//! Open devices, with their kernels and limits.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ortrain_codegen::{Caps, Dialect as _, KernelSource, Lowered, Wgsl, lower};
use ortrain_graph::Tensor;
use ortrain_program::{DeviceError, Program, UnsupportedOnBackend};

use crate::buffer_pool::{BufferPool, buffer_size};

/// Maximum bytes of one write.
const MAX_WRITE_BYTES: usize = 4 << 20;
/// Maximum bytes of pending writes on the host.
const MAX_PENDING_BYTES: u64 = 8 << 20;

/// Counts of the objects created on a device so far, and of copied bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Number of kernels. Equal sources are one kernel.
    pub pipelines: usize,
    /// Number of buffers.
    pub buffers: usize,
    /// Number of bind groups.
    pub bind_groups: usize,
    /// Bytes of the existing buffers.
    pub buffer_bytes: u64,
    /// Bytes copied to the device.
    pub uploaded: u64,
    /// Bytes copied from the device.
    pub downloaded: u64,
}

/// Open device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// Device name.
    name: String,
    /// Interface, which is the name as a backend.
    pub(crate) interface: &'static str,
    /// Process that opened the device.
    process: u32,
    pub(crate) description: String,
    /// True if the device computes on the processor.
    pub(crate) is_software: bool,
    /// First error that no call has returned.
    failure: Arc<Mutex<Option<String>>>,
    /// Kernels by source.
    kernels: Mutex<HashMap<KernelSource, wgpu::ComputePipeline>>,
    /// Staging buffer for reads.
    pub(crate) staging: Mutex<Option<wgpu::Buffer>>,
    /// Buffers of dropped results, for reuse.
    pub(crate) spare: BufferPool,
    buffers: AtomicUsize,
    bind_groups: AtomicUsize,
    buffer_bytes: AtomicU64,
    uploaded: AtomicU64,
    pub(crate) downloaded: AtomicU64,
    /// Bytes of writes that are possibly pending.
    pending: AtomicU64,
    /// Constants of programs on the device, by their address on the host.
    constants: Mutex<HashMap<(usize, usize), Weak<Constant>>>,
}

/// Constant of programs on the device. It keeps the tensor alive, because the tensor's address is the key.
#[derive(Debug)]
pub(crate) struct Constant {
    device: Arc<Device>,
    pub(crate) buffer: wgpu::Buffer,
    _tensor: Tensor,
}

impl Drop for Constant {
    fn drop(&mut self) {
        self.device.release(&self.buffer);
    }
}

impl Device {
    pub(crate) fn new(
        device: wgpu::Device,
        queue: wgpu::Queue,
        (name, interface): (String, &'static str),
        description: String,
        is_software: bool,
        failure: Arc<Mutex<Option<String>>>,
    ) -> Device {
        Device {
            device,
            queue,
            name,
            interface,
            process: std::process::id(),
            description,
            is_software,
            failure,
            kernels: Mutex::default(),
            staging: Mutex::default(),
            spare: BufferPool::default(),
            buffers: AtomicUsize::new(0),
            bind_groups: AtomicUsize::new(0),
            buffer_bytes: AtomicU64::new(0),
            uploaded: AtomicU64::new(0),
            downloaded: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            constants: Mutex::default(),
        }
    }

    pub(crate) fn counts(&self) -> DeviceCounts {
        DeviceCounts {
            pipelines: self.kernels.lock().unwrap_or_else(PoisonError::into_inner).len(),
            buffers: self.buffers.load(Ordering::Relaxed),
            bind_groups: self.bind_groups.load(Ordering::Relaxed),
            buffer_bytes: self.buffer_bytes.load(Ordering::Relaxed),
            uploaded: self.uploaded.load(Ordering::Relaxed),
            downloaded: self.downloaded.load(Ordering::Relaxed),
        }
    }

    /// Returns the device name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns false in a process that was forked from the opening process: drivers do not support forks.
    pub(crate) fn is_own_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Returns the error that made the device unusable, if any.
    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn caps(&self) -> Caps {
        let limits = self.device.limits();
        Caps {
            binding_bytes: limits.max_storage_buffer_binding_size,
            bindings: limits.max_storage_buffers_per_shader_stage,
            groups: limits.max_compute_workgroups_per_dimension,
            has_late_faults: false,
        }
    }

    /// Lowers a program to launches. The host checks the guards of the instructions at `checked`.
    pub(crate) fn lower(
        &self,
        program: &Program,
        checked: &[usize],
    ) -> Result<Lowered, UnsupportedOnBackend> {
        lower(program, checked, &self.caps(), &Wgsl).map_err(|unsupported| UnsupportedOnBackend {
            backend: self.interface,
            node: unsupported.node,
            instruction: unsupported.instruction,
            reason: unsupported.reason,
        })
    }

    /// Returns the cached kernel of a source, or compiles it.
    ///
    /// # Errors
    /// The message of the driver.
    pub(crate) fn kernel(&self, source: &KernelSource) -> Result<wgpu::ComputePipeline, String> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(source) {
            return Ok(kernel.clone());
        }
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(Wgsl.module(&[source]).into()),
        });
        let kernel = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: Some(&*source.name),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(format!("its kernel was rejected: {error}"));
        }
        kernels.insert(source.clone(), kernel.clone());
        Ok(kernel)
    }

    /// Creates a buffer for kernels and copies. The caller calls [`Device::release`] when the buffer is dropped.
    pub(crate) fn buffer(&self, bytes: usize) -> wgpu::Buffer {
        self.buffers.fetch_add(1, Ordering::Relaxed);
        self.buffer_bytes.fetch_add(buffer_size(bytes), Ordering::Relaxed);
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer_size(bytes),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        })
    }

    /// Records that a buffer is dropped.
    pub(crate) fn release(&self, buffer: &wgpu::Buffer) {
        self.buffer_bytes.fetch_sub(buffer.size(), Ordering::Relaxed);
    }

    /// Writes bytes (whole words) to a buffer. The host holds copies until the device has consumed them, at most
    /// [`MAX_PENDING_BYTES`] bytes.
    pub(crate) fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        for (at, piece) in (offset..).step_by(MAX_WRITE_BYTES).zip(bytes.chunks(MAX_WRITE_BYTES)) {
            let more = piece.len() as u64;
            self.uploaded.fetch_add(more, Ordering::Relaxed);
            if self.pending.fetch_add(more, Ordering::Relaxed) + more > MAX_PENDING_BYTES {
                self.queue.submit([]);
                self.wait()?;
                self.pending.store(more, Ordering::Relaxed);
            }
            self.queue.write_buffer(buffer, at, piece);
        }
        self.check()
    }

    /// Creates a buffer with these bytes, padded with zeros to a whole word.
    pub(crate) fn upload_new(&self, bytes: &[u8]) -> Result<wgpu::Buffer, DeviceError> {
        let buffer = self.buffer(bytes.len());
        let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
        self.upload(&buffer, 0, words)?;
        if !rest.is_empty() {
            let mut last = [0; 4];
            last[..rest.len()].copy_from_slice(rest);
            self.upload(&buffer, words.len() as u64, &last)?;
        }
        Ok(buffer)
    }

    /// Returns a constant of a program on the device. Programs share constants.
    pub(crate) fn constant(self: &Arc<Device>, tensor: &Tensor) -> Result<Arc<Constant>, DeviceError> {
        let key = (tensor.data().as_ptr() as usize, tensor.data().len());
        let mut constants = self.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = constants.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        constants.retain(|_, constant| constant.strong_count() > 0);
        let buffer = self.upload_new(tensor.data())?;
        let constant = Arc::new(Constant { device: self.clone(), buffer, _tensor: tensor.clone() });
        constants.insert(key, Arc::downgrade(&constant));
        Ok(constant)
    }

    /// Creates a buffer that the host can read.
    pub(crate) fn readable_buffer(&self, bytes: u64) -> wgpu::Buffer {
        self.buffers.fetch_add(1, Ordering::Relaxed);
        self.buffer_bytes.fetch_add(bytes.next_multiple_of(256), Ordering::Relaxed);
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes.next_multiple_of(256),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// Creates the bind group of a kernel: binding `k` is entry `k`.
    pub(crate) fn bind_group(
        &self,
        kernel: &wgpu::ComputePipeline,
        entries: &[wgpu::BindGroupEntry<'_>],
    ) -> wgpu::BindGroup {
        self.bind_groups.fetch_add(1, Ordering::Relaxed);
        let layout = &kernel.get_bind_group_layout(0);
        self.device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries })
    }

    pub(crate) fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Returns an error about the device.
    pub(crate) fn error(&self, reason: &dyn Display) -> DeviceError {
        DeviceError::new(&*self.name, format!("{}: {reason}", self.description))
    }

    /// Destroys the device.
    pub(crate) fn destroy(&self) {
        self.device.destroy();
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| "the device is lost (Destroyed): it was closed".to_owned());
    }

    /// Returns an error if the device is unusable.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        if !self.is_own_process() {
            let reason = "it was opened before the process forked; load the checkpoint again in this process, and \
                          create a new module";
            return Err(self.error(&reason));
        }
        self.failure().map_or(Ok(()), |reason| Err(self.error(&reason)))
    }

    /// Waits until the device has completed all submitted work.
    ///
    /// # Errors
    /// When the device fails before.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        let waited = self.device.poll(wgpu::PollType::wait_indefinitely());
        waited.map_err(|error| self.error(&error))?;
        self.check()
    }
}
