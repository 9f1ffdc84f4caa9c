//! Cost of an instruction: floating-point operations and memory traffic.

use ortrain_expr::{Inst, UnaryOp};
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId};
use crate::operand::{Load, Nest, Operand};

/// Work of an instruction, independent of the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations. A fused multiply-add counts as two, a scalar function as one. Values that are
    /// constant along an axis are computed once. Products with the padding of a convolution do not count.
    pub flops: u64,
    /// Minimum traffic in bytes: the accessed elements of each buffer are read once and written once.
    pub bytes: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops = self.flops.saturating_add(other.flops);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Number of elements read and written, per buffer.
pub(crate) struct Traffic<'a> {
    buffers: &'a [Buffer],
    reads: SmallVec<[(BufferId, u64); 16]>,
    writes: SmallVec<[(BufferId, u64); 4]>,
}

impl<'a> Traffic<'a> {
    /// Starts without traffic.
    pub(crate) fn new(buffers: &'a [Buffer]) -> Traffic<'a> {
        Traffic { buffers, reads: SmallVec::new(), writes: SmallVec::new() }
    }

    /// Records a read of `elements` elements.
    pub(crate) fn add_read(&mut self, id: BufferId, elements: u64) {
        self.reads.push((id, elements));
    }

    /// Records a read of the elements that an operand reaches over a space.
    pub(crate) fn add_read_over(&mut self, operand: &Operand, dims: &[usize]) {
        self.add_read(operand.buffer, operand.access.elements_reached(dims));
    }

    /// Records a write of `elements` elements.
    pub(crate) fn add_write(&mut self, id: BufferId, elements: u64) {
        self.writes.push((id, elements));
    }

    /// Records the reads and writes of a nest.
    pub(crate) fn add_nest(&mut self, nest: &Nest) {
        if nest.outer_dims().contains(&0) {
            return;
        }
        let gathered = nest.gathered_loads();
        for (slot, load) in nest.loads.iter().enumerate() {
            let Load::Buffer(operand) = load else { continue };
            let is_gathered = gathered.contains(&(slot as u16));
            let reached_elements = if is_gathered {
                nest.points_along(u64::MAX)
            } else {
                nest.elements_reached_by(&operand.access)
            };
            // Two loads of the same operand are one read.
            if !nest.loads[..slot].contains(load) {
                self.add_read(operand.buffer, reached_elements);
            }
        }
        for store in &nest.stores {
            self.add_write(store.buffer, nest.elements_reached_by(&store.access));
        }
    }

    /// Returns the total number of bytes. Several accesses to one buffer count at most its size.
    pub(crate) fn bytes(mut self) -> u64 {
        let of = |list: &mut [(BufferId, u64)]| {
            list.sort_unstable();
            let mut total = 0u64;
            for same in list.chunk_by(|(a, _), (b, _)| a == b) {
                let id = same[0].0;
                let elements = same.iter().fold(0u64, |n, &(_, more)| n.saturating_add(more));
                let buffer = &self.buffers[id.0 as usize];
                let elements = elements.min(buffer.len as u64);
                total = total.saturating_add(elements.saturating_mul(buffer.dtype.size() as u64));
            }
            total
        };
        of(&mut self.reads).saturating_add(of(&mut self.writes))
    }
}

/// Returns the number of operations of a nest, including its reductions.
pub(crate) fn nest_flops(nest: &Nest) -> u64 {
    if nest.outer_dims().contains(&0) {
        return 0;
    }
    let axes = nest.dependent_axes();
    let mut flops = 0u64;
    for (&(inst, ty), &axes) in nest.expr.insts().iter().zip(&axes) {
        let rounds = matches!(inst, Inst::Unary(UnaryOp::ToF16 | UnaryOp::ToBf16, _));
        if ty.is_float() && !rounds && matches!(inst, Inst::Unary(..) | Inst::Binary(..)) {
            flops = flops.saturating_add(nest.points_along(axes));
        }
    }
    for reduction in &nest.reductions {
        if nest.expr.ty(reduction.value).is_float() {
            flops = flops.saturating_add(nest.points_along(u64::MAX));
        }
    }
    flops
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{
        Access, Builder, ConvPass, ConvShape, DType, Precision, SlidingAxis, Type, UnaryOp, WindowPass,
        WindowShape,
    };

    use super::*;
    use crate::{Conv, GradientModes, Instruction, ProgramBuilder, Window};

    /// A buffer with two accesses, one of them broadcast, and a function that is computed once per channel.
    #[test]
    fn cost_of_a_map_over_channels() {
        let mut b = ProgramBuilder::new();
        let node: Arc<str> = "node".into();
        let (x, s, y) =
            (b.work("x", DType::F32, 24), b.work("s", DType::F32, 3), b.work("y", DType::F32, 24));
        let operand = |buffer, strides: [isize; 3], len| Operand {
            buffer,
            access: Access { dtype: DType::F32, offset: 0, strides: strides.into_iter().collect(), len },
        };
        let mut e = Builder::new();
        let (value, scale) = (e.load(0, Type::F32), e.load(1, Type::F32));
        let root = e.unary(UnaryOp::Sqrt, scale);
        let product = e.mul(value, root);
        let nest = Nest {
            dims: [2, 3, 4].into_iter().collect(),
            inner: 0,
            segments: None,
            loads: [operand(x, [12, 4, 1], 24), operand(s, [0, 1, 0], 3)].map(Load::Buffer).to_vec(),
            expr: e.finish(&[product]),
            reductions: Vec::new(),
            stores: vec![operand(y, [12, 4, 1], 24)],
        };
        b.emit(Instruction::from(nest), GradientModes::ALL, &node).unwrap();
        let program = b.finish(vec![x, s], vec![y]).unwrap();
        let cost = program.instructions[0].instruction.cost(&program);
        assert_eq!(cost, Cost { flops: 3 + 24, bytes: 4 * (24 + 3 + 24) });
    }

    #[test]
    fn cost_of_convolution_and_pooling() {
        let mut b = ProgramBuilder::new();
        let node: Arc<str> = "node".into();
        let axis = SlidingAxis { input: 4, output: 4, kernel: 3, stride: 1, dilation: 1, padding_before: 1 };
        let [x, f, y, z] =
            [("x", 32), ("f", 54), ("y", 48), ("z", 48)].map(|(name, len)| b.work(name, DType::F32, len));
        let dims = [1, 3, 4, 4];
        let mut e = Builder::new();
        let product = e.load(0, Type::F32);
        let epilogue = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Accumulator(DType::F32)],
            expr: e.finish(&[product]),
            reductions: Vec::new(),
            stores: vec![Operand::contiguous(y, DType::F32, &dims)],
        };
        let axes: smallvec::SmallVec<[SlidingAxis; 3]> = [axis, axis].into_iter().collect();
        let shape = ConvShape {
            pass: ConvPass::Output,
            batch: 1,
            groups: 1,
            channels_in: 2,
            channels_out: 3,
            axes: axes.clone(),
        };
        let [a, filter, _] = shape.operands();
        let (a, filter) =
            (Operand::contiguous(x, DType::F32, &a), Operand::contiguous(f, DType::F32, &filter));
        let conv = Conv { shape, a, b: filter, precision: Precision::F32, epilogue };
        b.emit(Instruction::from(conv), GradientModes::ALL, &node).unwrap();
        let shape = WindowShape { pass: WindowPass::Sum, planes: 3, axes };
        let [source, target] = [y, z].map(|id| Operand::contiguous(id, DType::F32, &[48]));
        let window = Window { shape, source, index: None, target };
        b.emit(Instruction::from(window), GradientModes::ALL, &node).unwrap();
        let program = b.finish(vec![x, f], vec![z]).unwrap();
        let costs: Vec<Cost> = program.instructions.iter().map(|i| i.instruction.cost(&program)).collect();
        // Ten of twelve positions along each axis are inside the input.
        assert_eq!(costs[0], Cost { flops: 2 * 6 * 100, bytes: 4 * (32 + 54 + 48) });
        assert_eq!(costs[1], Cost { flops: 3 * 100, bytes: 4 * (48 + 48) });
    }
}
