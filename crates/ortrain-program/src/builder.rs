//! Builder of programs.

use std::sync::Arc;

use ortrain_expr::{DType, Precision};
use ortrain_graph::Tensor;
use rustc_hash::FxHashMap;

use crate::ALIGNMENT;
use crate::draft::Draft;
use crate::error::ProgramError;
use crate::operand::only_moves_elements;
use crate::passes::{self, PassLog};
use crate::target::Target;
use crate::versions::Versions;
use crate::{
    Buffer, BufferId, BufferLocation, GradientModes, Instruction, Operand, PlaneId, Program,
    ScheduledInstruction,
};

/// Builder that collects buffers and instructions; [`ProgramBuilder::finish`] compiles them to a program.
#[derive(Debug, Default)]
pub struct ProgramBuilder {
    buffers: Vec<Buffer>,
    instructions: Vec<ScheduledInstruction>,
    constants: Vec<Tensor>,
    plane_buffers: FxHashMap<(PlaneId, usize, usize, DType), BufferId>,
    precision: Precision,
}

impl ProgramBuilder {
    /// Creates an empty builder.
    #[must_use]
    pub fn new() -> ProgramBuilder {
        ProgramBuilder::default()
    }

    /// Sets the precision of inner products. It applies to [`Instruction::MatMul`] and [`Instruction::Conv`] with sums
    /// in `f32` and enough work ([`Precision::of_product`]). [`Instruction::Attention`] always uses `f32`.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> ProgramBuilder {
        self.precision = precision;
        self
    }

    fn push(&mut self, label: &str, dtype: DType, len: usize, location: BufferLocation) -> BufferId {
        self.buffers.push(Buffer { label: label.into(), dtype, len, location });
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// Returns a buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// Returns the instructions so far, in order.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.instructions.iter().map(|scheduled| &scheduled.instruction)
    }

    /// Returns the content of a buffer, if it is a constant.
    #[must_use]
    pub fn constant_of(&self, id: BufferId) -> Option<&Tensor> {
        match self.buffer(id).location {
            BufferLocation::Constant(number) => Some(&self.constants[number]),
            _ => None,
        }
    }

    /// Adds a buffer in the work arena.
    pub fn work(&mut self, label: &str, dtype: DType, len: usize) -> BufferId {
        self.push(label, dtype, len, BufferLocation::Work(0))
    }

    /// Returns the buffer for a part of a plane, by its first byte. The same part gives the same buffer.
    pub fn plane(
        &mut self,
        label: &str,
        dtype: DType,
        len: usize,
        plane: PlaneId,
        offset: usize,
    ) -> BufferId {
        if let Some(&known) = self.plane_buffers.get(&(plane, offset, len, dtype)) {
            return known;
        }
        let id = self.push(label, dtype, len, BufferLocation::Plane(plane, offset));
        self.plane_buffers.insert((plane, offset, len, dtype), id);
        id
    }

    /// Adds a constant. The program shares its elements if they are aligned, and copies them otherwise.
    pub fn constant(&mut self, label: &str, tensor: &Tensor) -> BufferId {
        self.constants.push(tensor.clone());
        self.push(label, tensor.dtype(), tensor.len(), BufferLocation::Constant(self.constants.len() - 1))
    }

    /// Appends an instruction for some gradient modes.
    ///
    /// # Errors
    /// [`ProgramError::Faulty`] when the instruction accesses memory outside its buffers or contradicts itself.
    pub fn emit(
        &mut self,
        instruction: Instruction,
        entries: GradientModes,
        node: &Arc<str>,
    ) -> Result<(), ProgramError> {
        if let Some(fault) = instruction.validate(&self.buffers) {
            return Err(ProgramError::faulty(node, &instruction, fault));
        }
        let hands_over = |instruction: &Instruction| matches!(instruction, Instruction::Yield(_));
        if hands_over(&instruction) && self.instructions().any(hands_over) {
            let fault = "a program can return to the caller only once".to_owned();
            return Err(ProgramError::faulty(node, &instruction, fault));
        }
        // An instruction over an empty space (for example an empty batch) does nothing.
        // A check is not repeated (for example of the labels, in the loss and in its gradient).
        if !instruction.is_empty() && !self.is_repeated_guard(&instruction, entries) {
            let (node, versions) = (node.clone(), Versions::default());
            self.instructions.push(ScheduledInstruction {
                instruction,
                gradient_modes: entries,
                node,
                versions,
            });
        }
        Ok(())
    }

    /// Returns true if the builder has instructions, and all of them only move elements.
    #[must_use]
    pub fn only_moves_elements(&self) -> bool {
        let moves = |scheduled: &ScheduledInstruction| {
            scheduled.instruction.as_map().is_some_and(only_moves_elements)
        };
        !self.instructions.is_empty() && self.instructions.iter().all(moves)
    }

    /// Returns true if the instruction is a map that only checks guards and an equal map was emitted before. Both see
    /// the same values, because values are complete before their first use.
    fn is_repeated_guard(&self, instruction: &Instruction, entries: GradientModes) -> bool {
        let Some(guard) = instruction.as_map() else { return false };
        let is_recorded = |from: &Operand| {
            matches!(self.buffer(from.buffer).location, BufferLocation::Work(_) | BufferLocation::Constant(_))
        };
        guard.stores.is_empty()
            && guard.load_operands().all(is_recorded)
            && self.instructions.iter().any(|earlier| {
                earlier.gradient_modes == entries
                    && earlier.instruction.as_map().is_some_and(|other| other == guard)
            })
    }

    /// Compiles the program with these inputs and outputs. All [`PASSES`](crate::PASSES) run, for a processor target.
    ///
    /// # Errors
    /// When the memory plan exceeds the address space, or a pass has a bug.
    pub fn finish(self, inputs: Vec<BufferId>, outputs: Vec<BufferId>) -> Result<Program, ProgramError> {
        self.finish_for(&Target::default(), inputs, outputs, None)
    }

    /// Compiles the program for a target. A log records the work of each pass.
    ///
    /// # Errors
    /// As [`ProgramBuilder::finish`].
    pub fn finish_for(
        self,
        target: &Target,
        inputs: Vec<BufferId>,
        outputs: Vec<BufferId>,
        log: Option<&PassLog>,
    ) -> Result<Program, ProgramError> {
        passes::run(self.draft(inputs, outputs), target, true, log).map(Draft::into_program)
    }

    /// Compiles the program with only the required passes, without fusion. The result is the oracle for fused programs.
    ///
    /// # Errors
    /// As [`ProgramBuilder::finish`].
    pub fn finish_unfused(
        self,
        inputs: Vec<BufferId>,
        outputs: Vec<BufferId>,
    ) -> Result<Program, ProgramError> {
        passes::run(self.draft(inputs, outputs), &Target::default(), false, None).map(Draft::into_program)
    }

    fn draft(self, inputs: Vec<BufferId>, outputs: Vec<BufferId>) -> Draft {
        let ProgramBuilder { buffers, instructions, constants, precision, .. } = self;
        let constants = constants.iter().map(|constant| constant.aligned(ALIGNMENT)).collect();
        Draft::new(instructions, buffers, constants, (inputs, outputs), precision)
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, Type};

    use super::*;
    use crate::{Load, Nest, RunError, RunPart, Yield};

    const N: usize = 100;

    /// Returns the instruction `to = from`, element by element.
    fn copy(from: BufferId, to: BufferId) -> Instruction {
        let mut e = Builder::new();
        let x = e.load(0, Type::F32);
        let [from, to] = [from, to].map(|id| Operand::contiguous(id, DType::F32, &[N]));
        Instruction::from(Nest {
            dims: [N].into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(from)],
            expr: e.finish(&[x]),
            reductions: Vec::new(),
            stores: vec![to],
        })
    }

    #[test]
    fn programs_share_the_elements_of_constants() {
        let constant = Tensor::f32(&[N], &[1.5; N]).aligned(ALIGNMENT);
        let mut b = ProgramBuilder::new();
        let node: Arc<str> = "node".into();
        let [used, unused] = ["used", "unused"].map(|name| b.constant(name, &constant));
        let y = b.work("y", DType::F32, N);
        b.emit(copy(used, y), GradientModes::ALL, &node).unwrap();
        let program = b.finish(vec![], vec![y]).unwrap();
        let of = |id: BufferId| match program.buffer(id).location {
            BufferLocation::Constant(number) => &program.constants[number],
            other => panic!("{other:?}"),
        };
        assert_eq!(of(used).data().as_ptr(), constant.data().as_ptr());
        assert!(of(unused).is_empty());
        assert_eq!(program.constant_bytes(), 4 * N);
    }

    /// Returns a program that yields `y = x`, receives `dy`, and computes `dx = dy`.
    fn program_with_yield() -> (ProgramBuilder, [BufferId; 4]) {
        let mut b = ProgramBuilder::new();
        let ids = ["x", "y", "dy", "dx"].map(|name| b.work(name, DType::F32, N));
        let [x, y, dy, dx] = ids;
        let node: Arc<str> = "node".into();
        b.emit(copy(x, y), GradientModes::ALL, &node).unwrap();
        b.emit(
            Instruction::Yield(Yield { outputs: vec![y], inputs: vec![dy] }),
            GradientModes::ALL,
            &"yield".into(),
        )
        .unwrap();
        b.emit(copy(dy, dx), GradientModes::ALL, &node).unwrap();
        (b, ids)
    }

    #[test]
    fn parts_split_at_the_yield() {
        let (b, [x, .., dx]) = program_with_yield();
        let program = b.finish(vec![x], vec![dx]).unwrap();
        let (at, yielded) = program.find_yield().unwrap();
        assert_eq!((yielded.outputs.len(), yielded.inputs.len()), (1, 1));
        let end = program.instructions.len();
        assert_eq!(program.part_positions(RunPart::BeforeYield), Ok(0..at));
        assert_eq!(program.part_positions(RunPart::AfterYield), Ok(at + 1..end));
        let error = program.part_positions(RunPart::Full).unwrap_err().to_string();
        assert!(error.starts_with("yield returns to the caller"), "{error}");
        // A yielded value stays live until the yield although no instruction reads it. A received value has its own
        // bytes there.
        let location = |id: BufferId| program.buffer(id).location;
        assert_ne!(location(yielded.outputs[0]), location(yielded.inputs[0]));
        // The yield must not run twice.
        assert_eq!(program.within(0).find_yield().map(|(_, h)| h.inputs.len()), Some(1));

        let mut b = ProgramBuilder::new();
        let [x, y] = ["x", "y"].map(|name| b.work(name, DType::F32, N));
        b.emit(copy(x, y), GradientModes::ALL, &"node".into()).unwrap();
        let program = b.finish(vec![x], vec![y]).unwrap();
        assert_eq!(program.part_positions(RunPart::BeforeYield), Err(RunError::NoYield));
    }

    #[test]
    fn invalid_yields_are_rejected() {
        let (mut b, [x, y, ..]) = program_with_yield();
        let second = Instruction::Yield(Yield { outputs: vec![x], inputs: vec![y] });
        let error = b.emit(second, GradientModes::ALL, &"yield".into()).unwrap_err().to_string();
        assert!(error.ends_with("a program can return to the caller only once"), "{error}");
        let mut b = ProgramBuilder::new();
        let weight = b.plane("weight", DType::F32, N, PlaneId(0), 0);
        let invalid = Instruction::Yield(Yield { outputs: Vec::new(), inputs: vec![weight] });
        let error = b.emit(invalid, GradientModes::ALL, &"yield".into()).unwrap_err().to_string();
        assert!(
            error.ends_with("\"weight\" cannot be an input of the yield: it is not in the work arena"),
            "{error}"
        );
    }

    #[test]
    fn writes_to_constants_are_rejected() {
        let mut b = ProgramBuilder::new();
        let constant = b.constant("one", &Tensor::f32(&[N], &[1.0; N]));
        let x = b.work("x", DType::F32, N);
        let error = b.emit(copy(x, constant), GradientModes::ALL, &"node".into()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "node was lowered to an invalid Map instruction: it writes the constant \"one\""
        );
    }
}
