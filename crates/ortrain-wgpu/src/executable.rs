//! Executables: programs as launches on a device.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ortrain_codegen::{Fault, HostExecutable, Launch, Lowered, Wgsl, split_host_part};
use ortrain_expr::OutOfRange;
use ortrain_program::{
    Bindings, BufferId, Executable, GradientMode, InterruptPoints, Observer, Program, RunError, RunPart,
    Scalars, UnsupportedOnBackend, Workspace,
};

use crate::device::Device;
use crate::resident::ResidentBuffers;
use crate::timing::{MAX_TIMED_INSTRUCTIONS, TimestampQueries};

/// Program prepared for a device.
#[derive(Debug)]
pub(crate) struct WgpuExecutable {
    program: Arc<Program>,
    device: Arc<Device>,
    lowered: Lowered,
    kernels: Vec<wgpu::ComputePipeline>,
    /// Positions of the instructions of each submission.
    submissions: Vec<Range<usize>>,
    marks: InterruptPoints,
    host: Option<HostExecutable>,
    /// Buffers of the program on the device, created by the first run.
    resident: Mutex<Option<ResidentBuffers>>,
}

/// Minimum number of launches of a submission. A submission costs as much as the recording of some dozens of launches.
const MIN_LAUNCHES: usize = 32;
/// Maximum number of submissions of a run without long instructions.
const MAX_SUBMISSIONS: usize = 8;
/// Maximum operations of a submission of several instructions: half a second of a slow GPU. Systems abort submissions
/// of a few seconds.
const MAX_SUBMISSION_FLOPS: u64 = 50_000_000_000;

/// Splits the instructions of a program into submissions.
fn split_submissions(program: &Program, lowered: &Lowered) -> Vec<Range<usize>> {
    let enough = (lowered.launches.len() / MAX_SUBMISSIONS).max(MIN_LAUNCHES);
    let mut counts = vec![0; program.instructions.len()];
    for launch in &lowered.launches {
        counts[launch.instruction as usize] += 1;
    }
    let mut parts = Vec::new();
    let (mut start, mut launches, mut flops) = (0, 0, 0);
    for (at, scheduled) in program.instructions.iter().enumerate() {
        let more = scheduled.instruction.cost(program).flops;
        if launches >= enough || (at > start && flops + more > MAX_SUBMISSION_FLOPS) {
            parts.push(start..at);
            (start, launches, flops) = (at, 0, 0);
        }
        launches += counts[at];
        flops += more;
    }
    parts.push(start..program.instructions.len());
    parts
}

impl WgpuExecutable {
    pub(crate) fn new(
        program: Arc<Program>,
        device: Arc<Device>,
    ) -> Result<WgpuExecutable, UnsupportedOnBackend> {
        let (program, host) = match split_host_part(&program, &Wgsl) {
            Some((rest, part)) => {
                (Arc::new(rest), Some(HostExecutable::new(part, ortrain_cpu::host_backend())?))
            }
            None => (program, None),
        };
        let checked = host.as_ref().map_or(&[][..], HostExecutable::checked);
        let lowered = device.lower(&program, checked)?;
        let kernel = |launch: &Launch| {
            let scheduled = &program.instructions[launch.instruction as usize];
            device.kernel(&launch.kernel).map_err(|reason| UnsupportedOnBackend {
                backend: device.interface,
                node: scheduled.node.to_string(),
                instruction: scheduled.instruction.name(),
                reason,
            })
        };
        let kernels = lowered.launches.iter().map(kernel).collect::<Result<_, _>>()?;
        let (marks, submissions) =
            (InterruptPoints::from_program(&program), split_submissions(&program, &lowered));
        let resident = Mutex::new(None);
        Ok(WgpuExecutable { program, device, lowered, kernels, submissions, marks, host, resident })
    }

    /// Records the launches of some instructions in a gradient mode.
    fn record(
        &self,
        groups: &[wgpu::BindGroup],
        pass: &mut wgpu::ComputePass<'_>,
        entry: GradientMode,
        positions: &Range<usize>,
    ) {
        for ((launch, kernel), group) in self.lowered.launches.iter().zip(&self.kernels).zip(groups) {
            let at = launch.instruction as usize;
            if positions.contains(&at) && self.program.instructions[at].gradient_modes.contains(entry) {
                pass.set_pipeline(kernel);
                pass.set_bind_group(0, group, &[]);
                let [x, y, z] = launch.groups;
                pass.dispatch_workgroups(x, y, z);
            }
        }
    }

    /// Submits the launches of some instructions in a gradient mode. Several submissions let the device start before
    /// all launches are recorded.
    fn submit(&self, groups: &[wgpu::BindGroup], entry: GradientMode, positions: &Range<usize>) {
        for part in &self.submissions {
            let part = part.start.max(positions.start)..part.end.min(positions.end);
            if !part.is_empty() {
                let mut encoder = self.device.encoder();
                self.record(groups, &mut encoder.begin_compute_pass(&Default::default()), entry, &part);
                self.device.queue.submit([encoder.finish()]);
            }
        }
    }

    /// Runs each instruction in its own pass, and notifies an observer with its times: by the clock of the device, if
    /// available.
    fn run_timed(
        &self,
        groups: &[wgpu::BindGroup],
        entry: GradientMode,
        positions: Range<usize>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let ran = positions.filter(|&at| self.program.instructions[at].gradient_modes.contains(entry));
        for part in ran.collect::<Vec<_>>().chunks(MAX_TIMED_INSTRUCTIONS) {
            let Some(times) = TimestampQueries::new(&self.device, part.len()) else {
                for &at in part {
                    let start = Instant::now();
                    let mut encoder = self.device.encoder();
                    let mut pass = encoder.begin_compute_pass(&Default::default());
                    self.record(groups, &mut pass, entry, &(at..at + 1));
                    drop(pass);
                    self.device.queue.submit([encoder.finish()]);
                    self.device.wait()?;
                    observer.instruction(&self.program, at, start, Instant::now());
                }
                continue;
            };
            let mut encoder = self.device.encoder();
            for (index, &at) in part.iter().enumerate() {
                self.record(groups, &mut times.pass(&mut encoder, index), entry, &(at..at + 1));
            }
            for (&at, (start, end)) in part.iter().zip(times.finish(&self.device, encoder)?) {
                observer.instruction(&self.program, at, start, end);
            }
        }
        Ok(())
    }
}

impl Executable for WgpuExecutable {
    fn program(&self) -> &Program {
        &self.program
    }

    fn scratch_bytes(&self) -> usize {
        self.lowered.scratch
    }

    fn host_inputs(&self) -> &[BufferId] {
        self.host.as_ref().map_or(&[], HostExecutable::inputs)
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        self.device.check()?;
        let positions = self.program.part_positions(part)?;
        self.program.check_bindings(bindings, part)?;
        work.reserve(self.program.work_bytes, self.lowered.scratch)?;
        // A run is submitted as a whole, so interrupts are checked only before.
        let mut watch = work.take_watch();
        let mut ran =
            positions.clone().filter(|&at| self.program.instructions[at].gradient_modes.contains(entry));
        let outcome = ran.try_for_each(|at| self.marks.check_before(at, bindings, &mut watch));
        work.restore_watch(watch);
        outcome?;
        if let Some(host) = self.host.as_ref().filter(|_| part != RunPart::AfterYield) {
            let saved_inputs = work.take_saved_inputs();
            let ran = host.run(&self.program, work, &saved_inputs, scalars);
            work.return_saved_inputs(saved_inputs);
            ran?;
        }
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let resident = match &mut *resident {
            Some(resident) => resident,
            none => none.insert(ResidentBuffers::new(&self.device, &self.program, &self.lowered)?),
        };
        let (what, memory) = ((&*self.program, &self.lowered), (bindings, &*work));
        let groups = resident.begin(&self.device, what, &self.kernels, memory, scalars)?;
        match observer {
            Some(observer) => self.run_timed(groups, entry, positions.clone(), observer)?,
            None => self.submit(groups, entry, &positions),
        }
        self.device.check()?;
        let checked = self.host.as_ref().map_or(&[][..], HostExecutable::checked);
        let fault = match positions.into_iter().any(|at| {
            let scheduled = &self.program.instructions[at];
            scheduled.gradient_modes.contains(entry)
                && scheduled.instruction.can_fail()
                && !checked.contains(&at)
        }) {
            true => resident.fault(&self.device)?,
            false => None,
        };
        if let Some(Fault { instruction, point, index, bound, .. }) = fault {
            let scheduled = &self.program.instructions[instruction];
            return Err(RunError::out_of_range(scheduled, OutOfRange { point, index, bound }));
        }
        Ok(resident.end(&self.device, what, memory)?)
    }
}
