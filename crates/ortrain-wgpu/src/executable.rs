//! A program whose instructions are launches.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ortrain_codegen::{Fault, Launch, Lowered};
use ortrain_expr::OutOfRange;
use ortrain_program::{
    Bindings, Entry, Executable, Marks, Observer, OutOfMemory, Part, Program, RunError, Scalars,
    UnsupportedOnBackend, Workspace,
};

use crate::device::Device;
use crate::resident::{self, Resident};

/// A program ready to run on a device.
#[derive(Debug)]
pub(crate) struct WgpuExecutable {
    program: Arc<Program>,
    device: Arc<Device>,
    lowered: Lowered,
    kernels: Vec<wgpu::ComputePipeline>,
    marks: Marks,
    /// Its memory, made by the first run.
    resident: Mutex<Option<Resident>>,
}

impl WgpuExecutable {
    pub(crate) fn new(
        program: Arc<Program>,
        device: Arc<Device>,
    ) -> Result<WgpuExecutable, UnsupportedOnBackend> {
        let lowered = device.lower(&program)?;
        let kernel = |launch: &Launch| {
            let scheduled = &program.instructions[launch.instruction as usize];
            device.kernel(&launch.source).map_err(|reason| UnsupportedOnBackend {
                backend: device.name,
                node: scheduled.node.to_string(),
                instruction: scheduled.instruction.name(),
                reason,
            })
        };
        let kernels = lowered.launches.iter().map(kernel).collect::<Result<_, _>>()?;
        let marks = Marks::of(&program);
        Ok(WgpuExecutable { program, device, lowered, kernels, marks, resident: Mutex::new(None) })
    }

    /// An error of the device as that of a run.
    fn failed(&self, message: String) -> RunError {
        RunError::Host { node: self.device.description.clone(), message }
    }

    /// The memory of the program, made if there is none.
    fn resident<'a>(&self, resident: &'a mut Option<Resident>) -> Result<&'a Resident, RunError> {
        if resident.is_none() {
            let most = self.device.device.limits().max_buffer_size;
            if resident::largest(&self.program, &self.lowered) as u64 > most {
                return Err(OutOfMemory { bytes: resident::bytes(&self.program, &self.lowered) }.into());
            }
            let scope = self.device.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
            let made = Resident::new(&self.device, &self.program, &self.lowered, &self.kernels);
            if pollster::block_on(scope.pop()).is_some() {
                return Err(OutOfMemory { bytes: resident::bytes(&self.program, &self.lowered) }.into());
            }
            *resident = Some(made);
        }
        Ok(resident.as_ref().expect("it was made"))
    }

    /// Hands the launches of some instructions of an entry to the device, in one pass.
    fn record(
        &self,
        resident: &Resident,
        encoder: &mut wgpu::CommandEncoder,
        entry: Entry,
        places: &Range<usize>,
    ) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for ((launch, kernel), group) in self.lowered.launches.iter().zip(&self.kernels).zip(&resident.groups)
        {
            let at = launch.instruction as usize;
            if places.contains(&at) && self.program.instructions[at].entries.contains(entry) {
                pass.set_pipeline(kernel);
                pass.set_bind_group(0, group, &[]);
                let [x, y, z] = launch.groups;
                pass.dispatch_workgroups(x, y, z);
            }
        }
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Runs instructions one by one, and tells an observer when each was done.
    fn observed(
        &self,
        resident: &Resident,
        entry: Entry,
        places: Range<usize>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        for at in places {
            if !self.program.instructions[at].entries.contains(entry) {
                continue;
            }
            let start = Instant::now();
            let mut encoder = self.encoder();
            self.record(resident, &mut encoder, entry, &(at..at + 1));
            self.device.queue.submit([encoder.finish()]);
            self.device.wait().map_err(|message| self.failed(message))?;
            observer.instruction(&self.program, at, start, Instant::now());
        }
        Ok(())
    }
}

impl Executable for WgpuExecutable {
    fn program(&self) -> &Program {
        &self.program
    }

    /// Nothing on the host.
    fn scratch_bytes(&self) -> usize {
        0
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: Entry,
        part: Part,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        let places = self.program.part(part)?;
        self.program.check_bindings(bindings, part)?;
        work.reserve(self.program.work_bytes, 0)?;
        // Nothing of the host changes before the end: whoever ends the run does it now.
        let mut watch = work.watch();
        let mut ran = places.clone().filter(|&at| self.program.instructions[at].entries.contains(entry));
        let outcome = ran.try_for_each(|at| self.marks.before(at, bindings, &mut watch));
        work.watch_again(watch);
        outcome?;
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let resident = self.resident(&mut resident)?;
        resident.upload(&self.device, bindings, work.arena(), scalars);
        let mut encoder = self.encoder();
        match observer {
            Some(observer) => self.observed(resident, entry, places, observer)?,
            None => self.record(resident, &mut encoder, entry, &places),
        }
        resident.stage(&mut encoder);
        self.device.queue.submit([encoder.finish()]);
        let fault = resident.download(&self.device, bindings, work.arena());
        match fault.map_err(|message| self.failed(message))? {
            None => Ok(()),
            Some(Fault { instruction, point, index, bound }) => {
                let scheduled = &self.program.instructions[instruction];
                Err(RunError::out_of_range(scheduled, OutOfRange { point, index, bound }))
            }
        }
    }
}
