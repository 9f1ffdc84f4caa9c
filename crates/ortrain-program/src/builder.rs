//! Putting a program together.

use std::sync::Arc;

use ortrain_expr::{DType, Precision};
use ortrain_graph::Tensor;
use rustc_hash::FxHashMap;

use crate::ALIGNMENT;
use crate::draft::Draft;
use crate::error::ProgramError;
use crate::operand::only_moves;
use crate::passes::{self, PassLog};
use crate::target::Target;
use crate::versions::Versions;
use crate::{
    Buffer, BufferId, GradientModes, Instruction, Operand, Place, PlaneId, Program, ScheduledInstruction,
};

/// Collects buffers and instructions; [`ProgramBuilder::finish`] makes a program of them.
#[derive(Debug, Default)]
pub struct ProgramBuilder {
    buffers: Vec<Buffer>,
    instructions: Vec<ScheduledInstruction>,
    constants: Vec<Tensor>,
    placed: FxHashMap<(PlaneId, usize, usize, DType), BufferId>,
    precision: Precision,
}

impl ProgramBuilder {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> ProgramBuilder {
        ProgramBuilder::default()
    }

    /// With inner products of this precision: those of [`Instruction::MatMul`] and [`Instruction::Conv`] that are summed in
    /// `f32` and are worth it ([`Precision::of_product`]), and nothing else. [`Instruction::Attention`] keeps its own in
    /// `f32`.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> ProgramBuilder {
        self.precision = precision;
        self
    }

    fn push(&mut self, label: &str, dtype: DType, len: usize, place: Place) -> BufferId {
        self.buffers.push(Buffer { label: label.into(), dtype, len, place });
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// A buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The instructions so far, in order.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.instructions.iter().map(|scheduled| &scheduled.instruction)
    }

    /// The content of a buffer, if it is a constant.
    #[must_use]
    pub fn constant_of(&self, id: BufferId) -> Option<&Tensor> {
        match self.buffer(id).place {
            Place::Constant(number) => Some(&self.constants[number]),
            _ => None,
        }
    }

    /// A buffer of the work arena.
    pub fn work(&mut self, label: &str, dtype: DType, len: usize) -> BufferId {
        self.push(label, dtype, len, Place::Work(0))
    }

    /// A part of a plane, by its first byte. The same part is the same buffer.
    pub fn plane(
        &mut self,
        label: &str,
        dtype: DType,
        len: usize,
        plane: PlaneId,
        offset: usize,
    ) -> BufferId {
        if let Some(&known) = self.placed.get(&(plane, offset, len, dtype)) {
            return known;
        }
        let id = self.push(label, dtype, len, Place::Plane(plane, offset));
        self.placed.insert((plane, offset, len, dtype), id);
        id
    }

    /// A constant. Its elements are shared if they are aligned, or else copied.
    pub fn constant(&mut self, label: &str, tensor: &Tensor) -> BufferId {
        self.constants.push(tensor.aligned(ALIGNMENT));
        self.push(label, tensor.dtype(), tensor.len(), Place::Constant(self.constants.len() - 1))
    }

    /// Appends an instruction for the given entries.
    ///
    /// # Errors
    /// [`ProgramError::Faulty`] when it reaches outside its buffers or contradicts itself.
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
            let fault = "a second point at which the caller takes over".to_owned();
            return Err(ProgramError::faulty(node, &instruction, fault));
        }
        // Over an empty space there is nothing to do (an empty batch, say).
        // What was checked once need not be checked again (labels, in the loss and in its gradient).
        if !instruction.is_empty() && !self.is_checked(&instruction, entries) {
            let (node, versions) = (node.clone(), Versions::default());
            self.instructions.push(ScheduledInstruction { instruction, entries, node, versions });
        }
        Ok(())
    }

    /// Whether its instructions, of which there are some, only move elements.
    #[must_use]
    pub fn only_moves(&self) -> bool {
        let moves = |scheduled: &ScheduledInstruction| scheduled.instruction.as_map().is_some_and(only_moves);
        !self.instructions.is_empty() && self.instructions.iter().all(moves)
    }

    /// Whether a map that only guards stands there already. Values are made whole before they are used, so it sees
    /// the same ones.
    fn is_checked(&self, instruction: &Instruction, entries: GradientModes) -> bool {
        let Some(guard) = instruction.as_map() else { return false };
        let made_here =
            |from: &Operand| matches!(self.buffer(from.buffer).place, Place::Work(_) | Place::Constant(_));
        guard.stores.is_empty()
            && guard.loaded().all(made_here)
            && self.instructions.iter().any(|earlier| {
                earlier.entries == entries && earlier.instruction.as_map().is_some_and(|other| other == guard)
            })
    }

    /// The program with these inputs and outputs, as all [`PASSES`](crate::PASSES) make it for a processor.
    ///
    /// # Errors
    /// When the plan cannot be addressed, or a pass has made a mistake.
    pub fn finish(self, inputs: Vec<BufferId>, outputs: Vec<BufferId>) -> Result<Program, ProgramError> {
        self.finish_for(&Target::default(), inputs, outputs, None)
    }

    /// The same for a target; a log takes down what each pass does.
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

    /// The program as it was put together, after those passes alone that every program needs: nothing is fused. The oracle of
    /// the others.
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
        Draft::new(instructions, buffers, constants, (inputs, outputs), precision)
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, Type};

    use super::*;
    use crate::{Load, Nest, Part, RunError, Yield};

    const N: usize = 100;

    /// `to = from`, element by element.
    fn copy(from: BufferId, to: BufferId) -> Instruction {
        let mut e = Builder::new();
        let x = e.load(0, Type::F32);
        let [from, to] = [from, to].map(|id| Operand::whole(id, DType::F32, &[N]));
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
        let of = |id: BufferId| match program.buffer(id).place {
            Place::Constant(number) => &program.constants[number],
            other => panic!("{other:?}"),
        };
        assert_eq!(of(used).data().as_ptr(), constant.data().as_ptr());
        assert!(of(unused).is_empty());
        assert_eq!(program.constant_bytes(), 4 * N);
    }

    /// `y = x` is given, `dx = dy` is made of what is taken.
    fn two_parts() -> (ProgramBuilder, [BufferId; 4]) {
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
    fn parts_of_a_program_end_and_begin_where_the_caller_takes_over() {
        let (b, [x, .., dx]) = two_parts();
        let program = b.finish(vec![x], vec![dx]).unwrap();
        let (at, yielded) = program.yield_values().unwrap();
        assert_eq!((yielded.outputs.len(), yielded.inputs.len()), (1, 1));
        let end = program.instructions.len();
        assert_eq!(program.part(Part::Before), Ok(0..at));
        assert_eq!(program.part(Part::After), Ok(at + 1..end));
        let error = program.part(Part::Whole).unwrap_err().to_string();
        assert!(error.starts_with("yield hands over to the caller"), "{error}");
        // What is given stays until then, though nobody else reads it; what is taken has bytes of its own there.
        let place = |id: BufferId| program.buffer(id).place;
        assert_ne!(place(yielded.outputs[0]), place(yielded.inputs[0]));
        // It is no instruction that may run twice.
        assert_eq!(program.within(0).yield_values().map(|(_, h)| h.inputs.len()), Some(1));

        let mut b = ProgramBuilder::new();
        let [x, y] = ["x", "y"].map(|name| b.work(name, DType::F32, N));
        b.emit(copy(x, y), GradientModes::ALL, &"node".into()).unwrap();
        let program = b.finish(vec![x], vec![y]).unwrap();
        assert_eq!(program.part(Part::Before), Err(RunError::NoYield));
    }

    #[test]
    fn the_caller_takes_over_once_and_hands_in_values_of_the_arena() {
        let (mut b, [x, y, ..]) = two_parts();
        let again = Instruction::Yield(Yield { outputs: vec![x], inputs: vec![y] });
        let error = b.emit(again, GradientModes::ALL, &"yield".into()).unwrap_err().to_string();
        assert!(error.ends_with("a second point at which the caller takes over"), "{error}");
        let mut b = ProgramBuilder::new();
        let weight = b.plane("weight", DType::F32, N, PlaneId(0), 0);
        let wrong = Instruction::Yield(Yield { outputs: Vec::new(), inputs: vec![weight] });
        let error = b.emit(wrong, GradientModes::ALL, &"yield".into()).unwrap_err().to_string();
        assert!(error.ends_with("\"weight\" cannot be handed in: it is no value of the arena"), "{error}");
    }

    #[test]
    fn nothing_is_written_to_a_constant() {
        let mut b = ProgramBuilder::new();
        let constant = b.constant("one", &Tensor::f32(&[N], &[1.0; N]));
        let x = b.work("x", DType::F32, N);
        let error = b.emit(copy(x, constant), GradientModes::ALL, &"node".into()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "node was lowered to a faulty Map instruction: a result that is the constant \"one\""
        );
    }
}
