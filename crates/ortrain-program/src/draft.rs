//! A program while passes change it.

use ortrain_expr::Precision;
use ortrain_graph::Tensor;

use crate::buffer::{Buffer, BufferId, Place, is_work};
use crate::error::ProgramError;
use crate::instruction::Instruction;
use crate::liveness::Liveness;
use crate::program::{PlaneUse, Program};
use crate::scheduled::{self, FinalVersions, ScheduledInstruction};
use crate::uses::Uses;

/// A program while passes change it: instructions over buffers, in the order in which they run.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) instructions: Vec<ScheduledInstruction>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) constants: Vec<Tensor>,
    pub(crate) inputs: Vec<BufferId>,
    pub(crate) outputs: Vec<BufferId>,
    /// Of inner products that are worth it.
    pub(crate) precision: Precision,
    /// What the buffers that are seen outside hold in the end.
    last_versions: FinalVersions,
    /// Bytes of the arena, once it is planned.
    pub(crate) work_bytes: usize,
}

impl Draft {
    /// A program as it was put together. Its writes get their versions.
    pub(crate) fn new(
        mut instructions: Vec<ScheduledInstruction>,
        buffers: Vec<Buffer>,
        constants: Vec<Tensor>,
        (inputs, outputs): (Vec<BufferId>, Vec<BufferId>),
        precision: Precision,
    ) -> Draft {
        let last_versions = scheduled::number(&mut instructions, &buffers, &outputs);
        Draft { instructions, buffers, constants, inputs, outputs, precision, last_versions, work_bytes: 0 }
    }

    /// A program to be changed.
    pub(crate) fn of(program: &Program) -> Draft {
        let Program { buffers, instructions, constants, inputs, outputs, work_bytes, last_versions, .. } =
            program;
        Draft {
            instructions: instructions.clone(),
            buffers: buffers.clone(),
            constants: constants.clone(),
            inputs: inputs.clone(),
            outputs: outputs.clone(),
            precision: Precision::default(),
            last_versions: last_versions.clone(),
            work_bytes: *work_bytes,
        }
    }

    /// Definitions and uses of all buffers.
    pub(crate) fn uses(&self) -> Uses {
        Uses::of(&self.buffers, &self.instructions)
    }

    /// From where to where each buffer is needed. Inputs are there before the first instruction, outputs behind the last one.
    pub(crate) fn liveness(&self) -> Liveness {
        let mut lives = Liveness::new(self.buffers.len());
        self.inputs.iter().for_each(|id| lives.touch(id.0 as usize, -1));
        for (at, scheduled) in self.instructions.iter().enumerate() {
            scheduled.instruction.buffers(&mut |id, _| lives.touch(id.0 as usize, at as isize));
        }
        self.outputs.iter().for_each(|id| lives.touch(id.0 as usize, self.instructions.len() as isize));
        lives
    }

    pub(crate) fn is_work(&self, id: BufferId) -> bool {
        is_work(&self.buffers, id)
    }

    /// True if a buffer is seen outside of the work of the program.
    pub(crate) fn is_seen(&self, id: BufferId) -> bool {
        !self.is_work(id) || self.inputs.contains(&id) || self.outputs.contains(&id)
    }

    /// Checks that no instruction reaches outside its buffers, and that each reads the versions that it was given.
    ///
    /// # Errors
    /// The first fault.
    pub(crate) fn check(&self) -> Result<(), ProgramError> {
        for ScheduledInstruction { instruction, node, .. } in &self.instructions {
            if let Some(fault) = instruction.validate(&self.buffers) {
                return Err(ProgramError::faulty(node, instruction, fault));
            }
        }
        scheduled::check(&self.instructions, &self.buffers, &self.last_versions)
    }

    /// Lets go of the elements of constants that nothing reads.
    fn forget_unused_constants(&mut self) {
        let mut used = vec![false; self.constants.len()];
        let reads = self.instructions.iter().flat_map(|scheduled| scheduled.instruction.reads());
        for id in reads.chain(self.outputs.iter().copied()) {
            if let Place::Constant(number) = self.buffers[id.0 as usize].place {
                used[number] = true;
            }
        }
        for (constant, _) in self.constants.iter_mut().zip(used).filter(|(_, used)| !used) {
            *constant = Tensor::filled(constant.dtype(), &[0], 0.0);
        }
    }

    /// Uses of planes, the first plane first.
    fn plane_uses(&self) -> Vec<PlaneUse> {
        let Draft { instructions, buffers, outputs, .. } = self;
        let mut uses = Vec::new();
        let mut is_early = true;
        let buffer = |id: &BufferId| &buffers[id.0 as usize];
        for ScheduledInstruction { instruction, .. } in instructions {
            instruction.reads().iter().for_each(|id| PlaneUse::note(&mut uses, buffer(id), false, is_early));
            // What is handed over is read where it lies.
            is_early &= !matches!(instruction, Instruction::Yield(_));
            instruction.writes().iter().for_each(|id| PlaneUse::note(&mut uses, buffer(id), true, is_early));
        }
        outputs.iter().for_each(|id| PlaneUse::note(&mut uses, buffer(id), false, false));
        uses.sort_unstable_by_key(|used| used.plane);
        uses
    }

    /// The program, when all passes are done.
    pub(crate) fn into_program(mut self) -> Program {
        self.forget_unused_constants();
        let planes = self.plane_uses();
        let Draft { instructions, buffers, constants, inputs, outputs, work_bytes, last_versions, .. } = self;
        Program { buffers, instructions, constants, inputs, outputs, work_bytes, planes, last_versions }
    }
}
