//! Mutable form of a program, for the passes.

use ortrain_expr::Precision;
use ortrain_graph::Tensor;

use crate::buffer::{Buffer, BufferId, BufferLocation, is_work};
use crate::error::ProgramError;
use crate::instruction::Instruction;
use crate::liveness::Liveness;
use crate::program::{PlaneUse, Program};
use crate::scheduled::{self, FinalVersions, ScheduledInstruction};
use crate::uses::DefUse;

/// Mutable form of a program, which the passes rewrite: instructions over buffers, in order of execution.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) instructions: Vec<ScheduledInstruction>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) constants: Vec<Tensor>,
    pub(crate) inputs: Vec<BufferId>,
    pub(crate) outputs: Vec<BufferId>,
    /// Precision of inner products that are large enough to profit from it.
    pub(crate) precision: Precision,
    /// Versions of the externally visible buffers at the end of the program. Passes must preserve them.
    final_versions: FinalVersions,
    /// Bytes of the work arena, after the memory plan.
    pub(crate) work_bytes: usize,
}

impl Draft {
    /// Creates a draft of a newly built program, and numbers the versions of its writes.
    pub(crate) fn new(
        mut instructions: Vec<ScheduledInstruction>,
        buffers: Vec<Buffer>,
        constants: Vec<Tensor>,
        (inputs, outputs): (Vec<BufferId>, Vec<BufferId>),
        precision: Precision,
    ) -> Draft {
        let last_versions = scheduled::number_versions(&mut instructions, &buffers, &outputs);
        Draft {
            instructions,
            buffers,
            constants,
            inputs,
            outputs,
            precision,
            final_versions: last_versions,
            work_bytes: 0,
        }
    }

    /// Creates a mutable copy of a program.
    pub(crate) fn from_program(program: &Program) -> Draft {
        let Program {
            buffers,
            instructions,
            constants,
            inputs,
            outputs,
            work_bytes,
            final_versions: last_versions,
            ..
        } = program;
        Draft {
            instructions: instructions.clone(),
            buffers: buffers.clone(),
            constants: constants.clone(),
            inputs: inputs.clone(),
            outputs: outputs.clone(),
            precision: Precision::default(),
            final_versions: last_versions.clone(),
            work_bytes: *work_bytes,
        }
    }

    /// Returns the definitions and uses of all buffers.
    pub(crate) fn uses(&self) -> DefUse {
        DefUse::from_instructions(&self.buffers, &self.instructions)
    }

    /// Returns the live ranges of all buffers. Inputs are live before the first instruction, outputs after the last.
    pub(crate) fn liveness(&self) -> Liveness {
        let mut ranges = Liveness::new(self.buffers.len());
        self.inputs.iter().for_each(|id| ranges.extend_to(id.0 as usize, -1));
        for (at, scheduled) in self.instructions.iter().enumerate() {
            scheduled.instruction.buffers(&mut |id, _| ranges.extend_to(id.0 as usize, at as isize));
        }
        self.outputs.iter().for_each(|id| ranges.extend_to(id.0 as usize, self.instructions.len() as isize));
        ranges
    }

    pub(crate) fn is_work(&self, id: BufferId) -> bool {
        is_work(&self.buffers, id)
    }

    /// Returns true if a buffer is no intermediate value: it is an input, an output, or outside of the work arena.
    pub(crate) fn is_visible(&self, id: BufferId) -> bool {
        !self.is_work(id) || self.inputs.contains(&id) || self.outputs.contains(&id)
    }

    /// Checks that no instruction accesses memory outside its buffers, and that each reads its recorded versions.
    ///
    /// # Errors
    /// Returns the first fault.
    pub(crate) fn check(&self) -> Result<(), ProgramError> {
        for ScheduledInstruction { instruction, node, .. } in &self.instructions {
            if let Some(fault) = instruction.validate(&self.buffers) {
                return Err(ProgramError::faulty(node, instruction, fault));
            }
        }
        scheduled::check_versions(&self.instructions, &self.buffers, &self.final_versions)
    }

    /// Replaces constants without a reader by empty tensors. The indices of the other constants remain valid.
    fn drop_unused_constants(&mut self) {
        let mut used = vec![false; self.constants.len()];
        let reads = self.instructions.iter().flat_map(|scheduled| scheduled.instruction.reads());
        for id in reads.chain(self.outputs.iter().copied()) {
            if let BufferLocation::Constant(index) = self.buffers[id.0 as usize].location {
                used[index] = true;
            }
        }
        for (constant, _) in self.constants.iter_mut().zip(used).filter(|(_, used)| !used) {
            *constant = Tensor::filled(constant.dtype(), &[0], 0.0);
        }
    }

    /// Returns the use of each plane, in ascending order of planes.
    fn plane_uses(&self) -> Vec<PlaneUse> {
        let Draft { instructions, buffers, outputs, .. } = self;
        let mut uses = Vec::new();
        let mut is_early = true;
        let buffer = |id: &BufferId| &buffers[id.0 as usize];
        for ScheduledInstruction { instruction, .. } in instructions {
            instruction
                .reads()
                .iter()
                .for_each(|id| PlaneUse::record(&mut uses, buffer(id), false, is_early));
            // Reads of the yield are early, because the caller reads the values in place. Later uses are not.
            is_early &= !matches!(instruction, Instruction::Yield(_));
            instruction
                .writes()
                .iter()
                .for_each(|id| PlaneUse::record(&mut uses, buffer(id), true, is_early));
        }
        outputs.iter().for_each(|id| PlaneUse::record(&mut uses, buffer(id), false, false));
        uses.sort_unstable_by_key(|used| used.plane);
        uses
    }

    /// Returns the finished program, after all passes.
    pub(crate) fn into_program(mut self) -> Program {
        self.drop_unused_constants();
        let planes = self.plane_uses();
        let Draft {
            instructions,
            buffers,
            constants,
            inputs,
            outputs,
            work_bytes,
            final_versions: last_versions,
            ..
        } = self;
        Program {
            buffers,
            instructions,
            constants,
            inputs,
            outputs,
            work_bytes,
            planes,
            final_versions: last_versions,
        }
    }
}
