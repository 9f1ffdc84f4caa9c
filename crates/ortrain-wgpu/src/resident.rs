//! The memory of a program on a device.

use std::collections::HashMap;
use std::sync::Arc;

use ortrain_codegen::{Binding, Fault, Home, Launch, Lowered};
use ortrain_program::{Bindings, Memory, Place, PlaneId, Program, Scalars};

use crate::device::Device;

/// Memory of the host, a copy of which lies on the device.
#[derive(Debug)]
struct Copied {
    buffer: wgpu::Buffer,
    bytes: usize,
    /// True if a run changes it.
    written: bool,
    /// The first byte of its copy in the staging buffer.
    staged: usize,
}

/// Buffers and kernels of a program on a device: made once, and used by one run at a time.
#[derive(Debug)]
pub(crate) struct Resident {
    arena: Copied,
    planes: Vec<(usize, Copied)>,
    run: wgpu::Buffer,
    fault: wgpu::Buffer,
    /// The staging buffer of results: the fault first.
    staging: wgpu::Buffer,
    /// The bind group of each launch.
    pub(crate) groups: Vec<wgpu::BindGroup>,
}

/// Bytes of the fault in the staging buffer.
const FAULT: usize = size_of_val(&Fault::NONE);

impl Resident {
    pub(crate) fn new(
        device: &Device,
        program: &Program,
        lowered: &Lowered,
        kernels: &[wgpu::ComputePipeline],
    ) -> Resident {
        let mut staged = FAULT;
        let mut copied = |bytes: usize, written: bool| {
            let at = staged;
            staged += if written { bytes.next_multiple_of(4) } else { 0 };
            Copied { buffer: device.buffer(bytes), bytes, written, staged: at }
        };
        let arena = copied(program.work_bytes, true);
        let planes: Vec<(usize, Copied)> = program
            .planes
            .iter()
            .map(|used| (used.plane.0 as usize, copied(used.bytes, used.is_written)))
            .collect();
        let constants: Vec<Option<wgpu::Buffer>> = program
            .constants
            .iter()
            .map(|constant| (!constant.data().is_empty()).then(|| uploaded(device, constant.data())))
            .collect();
        let (scratch, nothing) = (device.buffer(lowered.scratch), device.buffer(0));
        let (run, fault) = (device.buffer(16), device.buffer(FAULT));
        let mut tables: HashMap<Arc<[u32]>, wgpu::Buffer> = HashMap::new();
        for launch in &lowered.launches {
            for binding in &launch.bindings {
                if let Binding::Table(words) = binding {
                    let upload = || uploaded(device, bytemuck::cast_slice(words));
                    tables.entry(words.clone()).or_insert_with(upload);
                }
            }
        }
        let plane = |id: PlaneId| planes.iter().find(|(number, _)| *number == id.0 as usize);
        let buffer_of = |home: Home| match home {
            Home::Work => Some(&arena.buffer),
            Home::Scratch => Some(&scratch),
            // A constant without elements is bound where a load that reads zeros outside of it is.
            Home::Constant(number) => Some(constants[number].as_ref().unwrap_or(&nothing)),
            Home::Plane(id) => plane(id).map(|(_, copied)| &copied.buffer),
        };
        let bound = |binding: &Binding| match binding {
            Binding::Bytes { home, start, len } => {
                let buffer = buffer_of(*home).expect("memory that a launch reads is there");
                range(buffer, *start, *len)
            }
            Binding::Run => run.as_entire_binding(),
            Binding::Fault => fault.as_entire_binding(),
            Binding::Table(words) => tables[words].as_entire_binding(),
        };
        let group = |(launch, kernel): (&Launch, &wgpu::ComputePipeline)| {
            let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..)
                .zip(&launch.bindings)
                .map(|(number, binding)| wgpu::BindGroupEntry { binding: number, resource: bound(binding) })
                .collect();
            device.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &kernel.get_bind_group_layout(0),
                entries: &entries,
            })
        };
        let groups = lowered.launches.iter().zip(kernels).map(group).collect();
        let staging = device.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: staged as u64,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Resident { arena, planes, run, fault, staging, groups }
    }

    /// Copies what a run reads to the device.
    pub(crate) fn upload(&self, device: &Device, bindings: &Bindings<'_>, arena: &Memory, scalars: Scalars) {
        let words = [scalars.seed, scalars.train_step].map(|v| [v as u32, (v >> 32) as u32]);
        device.queue.write_buffer(&self.run, 0, bytemuck::cast_slice(&words));
        device.queue.write_buffer(&self.fault, 0, bytemuck::cast_slice(&Fault::NONE));
        write(device, &self.arena, arena);
        for (number, copied) in &self.planes {
            // Planes that a part of a program does not use need not be bound.
            if let Some(plane) = bindings.planes.get(*number).filter(|plane| plane.len() >= copied.bytes) {
                write(device, copied, plane);
            }
        }
    }

    /// Has the device copy what a run has changed to where it can be read.
    pub(crate) fn stage(&self, encoder: &mut wgpu::CommandEncoder) {
        encoder.copy_buffer_to_buffer(&self.fault, 0, &self.staging, 0, FAULT as u64);
        for copied in self.written() {
            let bytes = copied.bytes.next_multiple_of(4) as u64;
            if bytes > 0 {
                encoder.copy_buffer_to_buffer(&copied.buffer, 0, &self.staging, copied.staged as u64, bytes);
            }
        }
    }

    fn written(&self) -> impl Iterator<Item = &Copied> {
        let planes = self.planes.iter().map(|(_, copied)| copied);
        [&self.arena].into_iter().chain(planes).filter(|copied| copied.written)
    }

    /// Waits for the end of a run, and copies what it has changed to the host, unless a guard has failed.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn download(
        &self,
        device: &Device,
        bindings: &Bindings<'_>,
        arena: &Memory,
    ) -> Result<Option<Fault>, String> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.staging.map_async(wgpu::MapMode::Read, .., move |outcome| {
            // The receiver goes only where waiting has failed, which is reported.
            let _ = sender.send(outcome);
        });
        device.wait()?;
        receiver.recv().map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let view = self.staging.get_mapped_range(..).map_err(|error| error.to_string())?;
        let mut words = Fault::NONE;
        bytemuck::cast_slice_mut::<u32, u8>(&mut words).copy_from_slice(&view[..FAULT]);
        let fault = Fault::read(words);
        if fault.is_none() {
            arena.write(0, &view[self.arena.staged..self.arena.staged + self.arena.bytes]);
            for (number, copied) in self.planes.iter().filter(|(_, copied)| copied.written) {
                if let Some(plane) = bindings.planes.get(*number).filter(|plane| plane.len() >= copied.bytes)
                {
                    plane.write(0, &view[copied.staged..copied.staged + copied.bytes]);
                }
            }
        }
        drop(view);
        self.staging.unmap();
        Ok(fault)
    }
}

/// The bytes that a program needs on a device.
pub(crate) fn bytes(program: &Program, lowered: &Lowered) -> usize {
    let planes: usize = program.planes.iter().map(|used| used.bytes).sum();
    program.work_bytes + planes + program.constant_bytes() + lowered.scratch
}

/// The largest buffer that a program needs on a device.
pub(crate) fn largest(program: &Program, lowered: &Lowered) -> usize {
    let constants = program.buffers.iter().filter(|buffer| matches!(buffer.place, Place::Constant(_)));
    let constants = constants.map(ortrain_program::Buffer::bytes);
    let planes = program.planes.iter().map(|used| used.bytes);
    let sizes = constants.chain(planes).chain([program.work_bytes, lowered.scratch]);
    sizes.max().unwrap_or(0)
}

fn range(buffer: &wgpu::Buffer, start: usize, len: usize) -> wgpu::BindingResource<'_> {
    wgpu::BindingResource::Buffer(wgpu::BufferBinding {
        buffer,
        offset: start as u64,
        size: wgpu::BufferSize::new(len as u64),
    })
}

fn write(device: &Device, copied: &Copied, from: &Memory) {
    if copied.bytes > 0 {
        send(device, &copied.buffer, from.to_vec(0, copied.bytes));
    }
}

/// A buffer that holds bytes.
fn uploaded(device: &Device, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = device.buffer(bytes.len());
    send(device, &buffer, bytes.to_vec());
    buffer
}

/// Writes bytes to the beginning of a buffer: whole words, the last one filled with zeros.
fn send(device: &Device, buffer: &wgpu::Buffer, mut bytes: Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    device.queue.write_buffer(buffer, 0, &bytes);
}
