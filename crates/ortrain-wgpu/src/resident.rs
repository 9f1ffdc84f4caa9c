//! Persistent buffers of a program on a device, and the bind groups of a run.

use std::collections::HashMap;
use std::sync::Arc;

use ortrain_codegen::{Binding, Fault, Launch, Lowered, MemoryId, RUN_WORDS};
use ortrain_program::{Bindings, DeviceError, Memory, Program, RunError, Scalars, Workspace};

use crate::device::{Constant, Device};
use crate::memory::{WgpuMemory, read_buffer};

/// Bytes of the fault.
const FAULT_BYTES: usize = size_of_val(&Fault::NONE);

/// Memory of a run: arena, scratch, or a plane of the program.
#[derive(Clone, Copy)]
struct RunMemory<'a> {
    memory: &'a Memory,
    /// Bytes that a run needs.
    bytes: usize,
    /// True if a run changes the memory.
    is_written: bool,
}

/// Buffers of a program, created once and used by one run at a time.
#[derive(Debug)]
pub(crate) struct ResidentBuffers {
    device: Arc<Device>,
    constants: Vec<Option<Arc<Constant>>>,
    tables: HashMap<Arc<[u32]>, wgpu::Buffer>,
    run: wgpu::Buffer,
    fault: wgpu::Buffer,
    empty: wgpu::Buffer,
    /// Device copies of host memory for a run, by the index of the memory.
    copies: HashMap<usize, wgpu::Buffer>,
    bound: Option<BoundGroups>,
}

/// Bind groups of the launches for particular buffers.
#[derive(Debug)]
struct BoundGroups {
    buffers: Vec<wgpu::Buffer>,
    groups: Vec<wgpu::BindGroup>,
}

impl ResidentBuffers {
    pub(crate) fn new(
        device: &Arc<Device>,
        program: &Program,
        lowered: &Lowered,
    ) -> Result<ResidentBuffers, DeviceError> {
        let constants = program.constants.iter();
        let constants = constants
            .map(|constant| (!constant.data().is_empty()).then(|| device.constant(constant)).transpose())
            .collect::<Result<_, _>>()?;
        let mut tables: HashMap<Arc<[u32]>, wgpu::Buffer> = HashMap::new();
        for binding in lowered.launches.iter().flat_map(|launch| &launch.bindings) {
            if let Binding::Table(words) = binding
                && !tables.contains_key(words)
            {
                tables.insert(words.clone(), device.upload_new(bytemuck::cast_slice(words))?);
            }
        }
        Ok(ResidentBuffers {
            device: device.clone(),
            constants,
            tables,
            run: device.buffer(size_of::<u32>() * RUN_WORDS),
            fault: device.buffer(FAULT_BYTES),
            empty: device.buffer(0),
            copies: HashMap::new(),
            bound: None,
        })
    }

    /// Binds the memory of a run, and writes its scalars.
    pub(crate) fn begin(
        &mut self,
        device: &Arc<Device>,
        (program, lowered): (&Program, &Lowered),
        kernels: &[wgpu::ComputePipeline],
        (bindings, work): (&Bindings<'_>, &Workspace),
        scalars: Scalars,
    ) -> Result<&[wgpu::BindGroup], RunError> {
        let words = [scalars.seed, scalars.train_step].map(|v| [v as u32, (v >> 32) as u32]);
        device.upload(&self.run, 0, bytemuck::cast_slice(&words))?;
        device.upload(&self.fault, 0, bytemuck::cast_slice(&Fault::NONE))?;
        let mut buffers = Vec::with_capacity(2 + program.planes.len());
        for (index, part) in run_memories(program, lowered, bindings, work).enumerate() {
            buffers.push(match part {
                Some(part) => self.buffer(device, index, part)?,
                // Planes that a part of a program does not use may be unbound.
                None => self.empty.clone(),
            });
        }
        if self.bound.as_ref().is_none_or(|bound| bound.buffers != buffers) {
            let groups = self.create_groups(device, program, lowered, kernels, &buffers);
            self.bound = Some(BoundGroups { buffers, groups });
        }
        Ok(self.bound.as_ref().map_or(&[], |bound| &bound.groups))
    }

    /// Returns the buffer of a memory: its own, or a device copy of host memory.
    fn buffer(
        &mut self,
        device: &Arc<Device>,
        index: usize,
        part: RunMemory<'_>,
    ) -> Result<wgpu::Buffer, RunError> {
        if part.bytes == 0 {
            return Ok(self.empty.clone());
        }
        if let Some(buffer) = WgpuMemory::buffer_of(part.memory, device) {
            return Ok(buffer.clone());
        }
        let buffer = self.copies.entry(index).or_insert_with(|| device.buffer(part.bytes));
        let mut bytes = part.memory.to_vec(0, part.bytes)?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        device.upload(buffer, 0, &bytes)?;
        Ok(buffer.clone())
    }

    /// Creates the bind groups for buffers of arena, scratch and planes.
    fn create_groups(
        &self,
        device: &Device,
        program: &Program,
        lowered: &Lowered,
        kernels: &[wgpu::ComputePipeline],
        buffers: &[wgpu::Buffer],
    ) -> Vec<wgpu::BindGroup> {
        let buffer_of = |home: MemoryId| match home {
            MemoryId::Work => &buffers[0],
            MemoryId::Scratch => &buffers[1],
            // A constant without elements can be bound, because loads by computed index return zeros out of range.
            MemoryId::Constant(number) => {
                self.constants[number].as_ref().map_or(&self.empty, |constant| &constant.buffer)
            }
            MemoryId::Plane(id) => {
                let at = program.planes.iter().position(|used| used.plane == id);
                &buffers[2 + at.expect("a plane that a launch reads is one of the program's")]
            }
        };
        let bound = |binding: &Binding| match binding {
            // Memory that a part of a run does not use may be shorter.
            Binding::Bytes { memory: home, start, len } if buffer_of(*home).size() < (start + len) as u64 => {
                self.empty.as_entire_binding()
            }
            Binding::Bytes { memory: home, start, len } => buffer_range(buffer_of(*home), *start, *len),
            Binding::Run => self.run.as_entire_binding(),
            Binding::Fault => self.fault.as_entire_binding(),
            Binding::Table(words) => self.tables[words].as_entire_binding(),
        };
        let group = |(launch, kernel): (&Launch, &wgpu::ComputePipeline)| {
            let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..)
                .zip(&launch.bindings)
                .map(|(index, binding)| wgpu::BindGroupEntry { binding: index, resource: bound(binding) })
                .collect();
            device.bind_group(kernel, &entries)
        };
        lowered.launches.iter().zip(kernels).map(group).collect()
    }

    /// Returns the first failed guard. Waits for the end of the run.
    pub(crate) fn fault(&self, device: &Device) -> Result<Option<Fault>, DeviceError> {
        let mut words = Fault::NONE;
        read_buffer(device, &self.fault, 0, bytemuck::cast_slice_mut(&mut words))?;
        Ok(Fault::read(words))
    }

    /// Copies the changes of a run back to host memory.
    pub(crate) fn end(
        &self,
        device: &Device,
        (program, lowered): (&Program, &Lowered),
        (bindings, work): (&Bindings<'_>, &Workspace),
    ) -> Result<(), DeviceError> {
        for (index, part) in run_memories(program, lowered, bindings, work).enumerate() {
            let Some(RunMemory { memory, bytes, is_written: true }) = part else { continue };
            if memory.host().is_some() && bytes > 0 {
                let mut content = vec![0; bytes];
                read_buffer(device, &self.copies[&index], 0, &mut content)?;
                memory.write(0, &content)?;
            }
        }
        Ok(())
    }
}

impl Drop for ResidentBuffers {
    fn drop(&mut self) {
        let own_buffers = [&self.run, &self.fault, &self.empty];
        let buffers = own_buffers.into_iter().chain(self.tables.values()).chain(self.copies.values());
        buffers.for_each(|buffer| self.device.release(buffer));
    }
}

/// Returns the memory of a run, by index; `None` for an unbound plane.
fn run_memories<'a>(
    program: &'a Program,
    lowered: &Lowered,
    bindings: &'a Bindings<'_>,
    work: &'a Workspace,
) -> impl Iterator<Item = Option<RunMemory<'a>>> {
    let arena = RunMemory { memory: work.arena(), bytes: program.work_bytes, is_written: true };
    let scratch = RunMemory { memory: work.scratch(), bytes: lowered.scratch, is_written: false };
    let planes = program.planes.iter().map(|used| {
        let memory = *bindings.planes.get(used.plane.0 as usize)?;
        let (bytes, is_written) = (used.bytes, used.is_written);
        (memory.len() >= bytes).then_some(RunMemory { memory, bytes, is_written })
    });
    [Some(arena), Some(scratch)].into_iter().chain(planes)
}

fn buffer_range(buffer: &wgpu::Buffer, start: usize, len: usize) -> wgpu::BindingResource<'_> {
    wgpu::BindingResource::Buffer(wgpu::BufferBinding {
        buffer,
        offset: start as u64,
        size: wgpu::BufferSize::new(len as u64),
    })
}
