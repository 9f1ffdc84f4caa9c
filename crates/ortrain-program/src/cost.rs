//! What an instruction costs: floating-point operations and bytes for reports, and one weight by which fusion decides.

use ortrain_expr::{Access, BinaryOp, Inst, SlidingAxis, Type, UnaryOp, WindowPass};
use smallvec::SmallVec;

use crate::target::FusionWeights;
use crate::{AttentionPass, Buffer, BufferId, Instruction, Load, Nest, Program};

/// The work of an instruction, whoever runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations. A fused multiply-add is two, any function of a scalar is one, and what is the same
    /// along an axis is computed once. Of convolutions, products with padding do not count.
    pub flops: u64,
    /// The least traffic: each buffer is read once and written once, as far as the instruction reaches into it.
    pub bytes: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops = self.flops.saturating_add(other.flops);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

impl Instruction {
    /// What it costs as an instruction of a program.
    #[must_use]
    pub fn cost(&self, program: &Program) -> Cost {
        cost(self, &program.buffers)
    }
}

/// A product of sizes, as large as a number can be.
fn count(dims: impl IntoIterator<Item = usize>) -> u64 {
    dims.into_iter().fold(1, |n: u64, dim| n.saturating_mul(dim as u64))
}

pub(crate) fn cost(instruction: &Instruction, buffers: &[Buffer]) -> Cost {
    let mut traffic = Traffic::new(buffers);
    let mut flops = 0u64;
    match instruction {
        Instruction::Nest(nest) => {
            traffic.nest(nest);
            flops = nest_flops(nest);
        }
        Instruction::MatMul(m) => {
            for (factor, dims) in [&m.a, &m.b].into_iter().zip(m.spaces()) {
                traffic.read(factor.buffer, reached(&factor.access, &dims));
            }
            traffic.nest(&m.epilogue);
            let products = count(m.batch.iter().copied().chain([m.m, m.n, m.k]));
            flops = products.saturating_mul(2).saturating_add(nest_flops(&m.epilogue));
        }
        Instruction::Conv(c) => {
            let [a, ..] = c.shape.operands();
            traffic.read(c.a.buffer, count(a));
            traffic.read(c.b.buffer, u64::MAX);
            traffic.nest(&c.epilogue);
            let s = &c.shape;
            let channels = count([s.batch, s.groups, s.channels_in, s.channels_out]);
            let products = s.axes.iter().map(pairs).fold(channels, u64::saturating_mul);
            flops = products.saturating_mul(2).saturating_add(nest_flops(&c.epilogue));
        }
        Instruction::Attention(a) => {
            let with = |dims: [usize; 2]| a.batch.iter().copied().chain(dims).collect::<SmallVec<[_; 6]>>();
            for (operand, sizes) in a.operands() {
                traffic.read(operand.buffer, reached(&operand.access, &with(sizes)));
            }
            for part in a.parts() {
                traffic.nest(part.nest);
                flops = flops.saturating_add(nest_flops(part.nest));
            }
            let scores = count(with([a.queries, a.keys]));
            // Products: two for the output; for gradients the scores again, and what is wanted. Then the softmax.
            let (sizes, widths, others) = match &a.pass {
                AttentionPass::Output(_) => (1, 1, 5),
                AttentionPass::Gradients(g) => {
                    let (q, k, v) = (g.q.is_some(), g.k.is_some(), g.v.is_some());
                    let back = u64::from(q || k);
                    (1 + u64::from(q) + u64::from(k), u64::from(v) + back, 5 + 4 * back)
                }
            };
            let products = (sizes * a.size as u64).saturating_add(widths * a.width as u64);
            let each = products.saturating_mul(2).saturating_add(others);
            flops = flops.saturating_add(scores.saturating_mul(each));
        }
        Instruction::Window(w) => {
            w.buffers(&mut |id, used| match used.writes() {
                true => traffic.write(id, u64::MAX),
                false => traffic.read(id, u64::MAX),
            });
            flops = match w.shape.pass {
                WindowPass::MaxGradient => count([w.shape.planes, w.shape.outputs()]),
                WindowPass::Max | WindowPass::Sum | WindowPass::SumGradient => {
                    w.shape.axes.iter().map(pairs).fold(w.shape.planes as u64, u64::saturating_mul)
                }
            };
        }
        Instruction::ScatterAdd(s) => {
            traffic.read(s.source.buffer, u64::MAX);
            traffic.read(s.index.buffer, u64::MAX);
            let added = count([s.outer, s.count, s.inner]);
            traffic.write(s.target.buffer, added);
            if !s.last {
                traffic.read(s.target.buffer, added);
                if s.target.access.dtype.is_float() {
                    flops = added;
                }
            }
        }
        // What changes hands is counted by whoever copies it.
        Instruction::HandOver(_) => {}
    }
    Cost { flops, bytes: traffic.bytes() }
}

/// Pairs of a window position and a cell that lie over the input and not over padding.
fn pairs(axis: &SlidingAxis) -> u64 {
    // Of `number` places `step` apart, the first at `from`: those that lie over the input.
    let inside = |from: i128, step: usize, number: usize| {
        let step = step as i128;
        let before = |limit: i128| (limit - from + step - 1).div_euclid(step).clamp(0, number as i128);
        u64::try_from(before(axis.input as i128) - before(0)).unwrap_or(0)
    };
    let place = |index: usize, step: usize| index as i128 * step as i128 - axis.before as i128;
    let (outputs, cells) = (axis.output, axis.kernel);
    if outputs.min(cells) > MOST_COUNTED {
        return count([outputs, cells]);
    }
    if cells <= outputs {
        let of_cell = |k| inside(place(k, axis.dilation), axis.stride, outputs);
        (0..cells).map(of_cell).fold(0, u64::saturating_add)
    } else {
        let of_window = |o| inside(place(o, axis.stride), axis.dilation, cells);
        (0..outputs).map(of_window).fold(0, u64::saturating_add)
    }
}

/// Windows or cells that are looked at one by one; with more of both, all pairs are taken to lie over the input.
const MOST_COUNTED: usize = 1 << 16;

/// Elements that an access reaches: those it moves between.
fn reached(access: &Access, dims: &[usize]) -> u64 {
    count(dims.iter().zip(&access.strides).filter(|&(_, &stride)| stride != 0).map(|(&dim, _)| dim))
}

/// Elements that an access of a nest reaches.
fn reached_by(nest: &Nest, access: &Access) -> u64 {
    match (&nest.segments, access.strides.as_slice()) {
        (Some(_), &[across, along]) => points(nest, u64::from(across != 0) | u64::from(along != 0) << 1),
        _ => reached(access, &nest.dims),
    }
}

/// Elements read and written, per buffer.
struct Traffic<'a> {
    buffers: &'a [Buffer],
    reads: SmallVec<[(BufferId, u64); 16]>,
    writes: SmallVec<[(BufferId, u64); 4]>,
}

impl<'a> Traffic<'a> {
    fn new(buffers: &'a [Buffer]) -> Traffic<'a> {
        Traffic { buffers, reads: SmallVec::new(), writes: SmallVec::new() }
    }

    fn read(&mut self, id: BufferId, elements: u64) {
        self.reads.push((id, elements));
    }

    fn write(&mut self, id: BufferId, elements: u64) {
        self.writes.push((id, elements));
    }

    fn nest(&mut self, nest: &Nest) {
        if nest.outer_dims().contains(&0) {
            return;
        }
        let gathered = gathered(nest);
        for (slot, load) in nest.loads.iter().enumerate() {
            let Load::Buffer(operand) = load else { continue };
            let is_gathered = gathered.contains(&(slot as u16));
            let reached =
                if is_gathered { points(nest, u64::MAX) } else { reached_by(nest, &operand.access) };
            // The same operand twice is one read.
            if !nest.loads[..slot].contains(load) {
                self.read(operand.buffer, reached);
            }
        }
        for store in &nest.stores {
            self.write(store.buffer, reached_by(nest, &store.access));
        }
    }

    /// Several accesses to one buffer reach no more than all of it.
    fn bytes(&self) -> u64 {
        let of = |list: &[(BufferId, u64)]| {
            let mut list: SmallVec<[(BufferId, u64); 16]> = list.into();
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
        of(&self.reads).saturating_add(of(&self.writes))
    }
}

/// The loads that are read by computed index.
fn gathered(nest: &Nest) -> SmallVec<[u16; 4]> {
    let slots = nest.expr.insts().iter().filter_map(|(inst, _)| match *inst {
        Inst::LoadAt(slot, _) => Some(slot),
        _ => None,
    });
    let mut slots: SmallVec<[u16; 4]> = slots.collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

/// For each instruction of a nest's expression the axes along which its result changes, as bits.
fn axes_of(nest: &Nest) -> Vec<u64> {
    let bit = |axis: usize| if axis < 64 { 1u64 << axis } else { u64::MAX };
    let moving = |load: &Load| {
        // An accumulator has a value of its own at every point.
        let stride = |axis: usize| load.access().map_or(1, |access| access.strides[axis]);
        let axes = nest.dims.iter().enumerate().filter(|&(axis, &dim)| dim > 1 && stride(axis) != 0);
        axes.fold(0, |all, (axis, _)| all | bit(axis))
    };
    let outer = (0..nest.dims.len() - nest.inner).filter(|&axis| nest.dims[axis] > 1);
    let outer = outer.fold(0, |all, axis| all | bit(axis));
    let mut axes: Vec<u64> = Vec::with_capacity(nest.expr.insts().len());
    for (inst, _) in nest.expr.insts() {
        let own = match *inst {
            Inst::Load(slot) => moving(&nest.loads[usize::from(slot)]),
            Inst::Coordinate(axis) => bit(usize::from(axis)),
            Inst::Reduced(_) => outer,
            _ => 0,
        };
        let operands = inst.operands().fold(0, |all, reg| all | axes[usize::from(reg.0)]);
        axes.push(own | operands);
    }
    axes
}

/// Points of a nest along some axes, given as bits.
fn points(nest: &Nest, axes: u64) -> u64 {
    if let Some(segments) = &nest.segments {
        return match axes & 0b11 {
            0 => 1,
            1 => segments.len() as u64,
            _ => segments.elements() as u64,
        };
    }
    let along = |&(axis, _): &(usize, &usize)| axis >= 64 || axes & (1 << axis) != 0;
    count(nest.dims.iter().enumerate().filter(along).map(|(_, &dim)| dim))
}

/// Operations of a nest, its reductions included.
fn nest_flops(nest: &Nest) -> u64 {
    if nest.outer_dims().contains(&0) {
        return 0;
    }
    let axes = axes_of(nest);
    let mut flops = 0u64;
    for (&(inst, ty), &axes) in nest.expr.insts().iter().zip(&axes) {
        if ty.is_float() && matches!(inst, Inst::Unary(..) | Inst::Binary(..)) {
            flops = flops.saturating_add(points(nest, axes));
        }
    }
    for reduction in &nest.reductions {
        if nest.expr.ty(reduction.value).is_float() {
            flops = flops.saturating_add(points(nest, u64::MAX));
        }
    }
    flops
}

// --- The weight by which fusion decides -----------------------------------------------------------------------------
//
// A rewrite is made if the instructions weigh less after it than before it: see [`FusionWeights`].

/// One arithmetic operation on one element of four bytes.
pub(crate) fn operation(inst: Inst, ty: Type) -> u64 {
    let wide = if matches!(ty, Type::F64 | Type::I64 | Type::U64) { 2 } else { 1 };
    wide * match inst {
        Inst::Const(_) | Inst::Load(_) | Inst::Run(_) | Inst::Reduced(_) => 0,
        Inst::Unary(op, _) => match op {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Not => 1,
            UnaryOp::Sign | UnaryOp::Floor => 2,
            UnaryOp::Sqrt => 4,
            UnaryOp::Rsqrt => 8,
            _ => 16,
        },
        Inst::Binary(op, ..) => match op {
            BinaryOp::Div if ty.is_float() => 4,
            BinaryOp::Div | BinaryOp::Rem => 8,
            BinaryOp::Pow => 32,
            _ => 1,
        },
        Inst::Compare(..) | Inst::Select(..) | Inst::Convert(_) => 1,
        Inst::Coordinate(_) | Inst::Guard(..) => 2,
        Inst::LoadAt(..) => 4,
        Inst::Random(..) => 40,
    }
}

/// What an instruction weighs.
pub(crate) fn weight(instruction: &Instruction, buffers: &[Buffer], weights: &FusionWeights) -> u64 {
    // Fusion leaves instructions without a nest as they are.
    let extra = instruction.nest().map_or(0, |nest| Passes::of(nest).weight(nest, weights));
    weights.start.saturating_add(cost(instruction, buffers).bytes).saturating_add(extra)
}

/// The most that a nest without reductions gets lighter when it has these loads, all of one buffer, no more.
pub(crate) fn read_weight(
    nest: &Nest,
    slots: &[usize],
    (buffers, weights): (&[Buffer], &FusionWeights),
) -> u64 {
    let operand = |slot: &usize| nest.loads[*slot].operand();
    let Some(first) = slots.first().and_then(operand) else { return 0 };
    let buffer = &buffers[first.buffer.0 as usize];
    let gathered = gathered(nest);
    let (mut elements, mut walks) = (0u64, 0u64);
    for (&slot, access) in slots.iter().filter_map(|slot| Some((slot, &operand(slot)?.access))) {
        let all = gathered.contains(&(slot as u16));
        let reached = if all { points(nest, u64::MAX) } else { reached_by(nest, access) };
        elements = elements.saturating_add(reached);
        walks = walks.saturating_add(runs(access, &nest.dims, 0).saturating_mul(weights.run));
    }
    elements.min(buffer.len as u64).saturating_mul(buffer.dtype.size() as u64).saturating_add(walks)
}

/// How often each instruction of a nest is evaluated on every point: the passes over a row.
struct Passes {
    /// For each instruction, in how many passes it is needed.
    needed: Vec<u64>,
    axes: Vec<u64>,
}

impl Passes {
    fn of(nest: &Nest) -> Passes {
        let insts = nest.expr.insts();
        let axes = axes_of(nest);
        // Reductions that do not need each other share a pass; the results are made in the last one.
        let mut pass_of: Vec<usize> = Vec::new();
        let mut roots: Vec<Vec<ortrain_expr::Reg>> = Vec::new();
        for reduction in &nest.reductions {
            let needed = nest.expr.needed_by(&[reduction.value]);
            let after = insts.iter().zip(&needed).filter(|&(_, &needed)| needed);
            let pass = after
                .filter_map(|((inst, _), _)| match *inst {
                    Inst::Reduced(k) => pass_of.get(usize::from(k)).map(|pass| pass + 1),
                    _ => None,
                })
                .max()
                .unwrap_or(0);
            pass_of.push(pass);
            if roots.len() <= pass {
                roots.resize(pass + 1, Vec::new());
            }
            roots[pass].push(reduction.value);
        }
        roots.push(nest.expr.outputs().to_vec());
        let mut needed = vec![0u64; insts.len()];
        for roots in &roots {
            let mask = nest.expr.needed_by(roots);
            needed.iter_mut().zip(mask).for_each(|(n, needed)| *n += u64::from(needed));
        }
        Passes { needed, axes }
    }

    /// Everything but the least traffic: arithmetic, repeated reads, uneven walks.
    fn weight(&self, nest: &Nest, weights: &FusionWeights) -> u64 {
        let all = points(nest, u64::MAX);
        let outer = count(nest.outer_dims().iter().copied());
        let kept = nest.dims.len() - nest.inner;
        let inner_axes = (kept..nest.dims.len().min(64)).fold(0u64, |all, axis| all | 1 << axis);
        let mut weight = 0u64;
        for ((&(inst, ty), &axes), &needed) in nest.expr.insts().iter().zip(&self.axes).zip(&self.needed) {
            let evaluated = if axes == 0 {
                1
            } else if nest.inner > 0 && axes & inner_axes == 0 {
                outer
            } else {
                all
            };
            weight =
                weight.saturating_add(operation(inst, ty).saturating_mul(evaluated).saturating_mul(needed));
        }
        weight = weight.saturating_add(all.saturating_mul(nest.reductions.len() as u64));

        // What later passes read again.
        let loads = nest.loads.iter().enumerate();
        let loads: SmallVec<[(usize, &Access); 8]> =
            loads.filter_map(|(slot, load)| Some((slot, load.access()?))).collect();
        let bytes = |access: &Access| reached_by(nest, access).saturating_mul(access.dtype.size() as u64);
        let passes_over = |slot: usize| {
            let uses = nest.expr.insts().iter().zip(&self.needed);
            let of_slot =
                uses.filter(|((inst, _), _)| matches!(inst, Inst::Load(s) if usize::from(*s) == slot));
            of_slot.map(|(_, &needed)| needed).max().unwrap_or(0)
        };
        let along_rows = |access: &Access| {
            let strides = access.strides[kept..].iter().zip(nest.inner_dims());
            strides.into_iter().any(|(&stride, &dim)| stride != 0 && dim > 1)
        };
        if nest.inner > 0 {
            let rows = if outer < weights.few_rows { 1 } else { outer.max(1) };
            let resident = loads.iter().filter(|(_, access)| along_rows(access));
            let resident = resident.fold(0u64, |sum, (_, access)| sum.saturating_add(bytes(access)));
            let share = if resident / rows <= weights.row_in_cache { weights.cached } else { 1 };
            for &(slot, access) in loads.iter().filter(|(_, access)| along_rows(access)) {
                let again = passes_over(slot).saturating_sub(1);
                weight = weight.saturating_add(bytes(access).saturating_mul(again) / share);
            }
        }

        for access in nest.operands().map(|operand| &operand.access) {
            if nest.inner > 0 && !along_rows(access) {
                continue;
            }
            let runs = runs(access, &nest.dims, if nest.inner == 0 { 0 } else { kept });
            let last = nest.dims.iter().rposition(|&dim| dim > 1);
            let stays = last.is_some_and(|axis| access.strides[axis] == 0);
            weight = weight
                .saturating_add(runs.saturating_mul(weights.run) / if stays { weights.same } else { 1 });
        }
        weight
    }
}

/// Evenly spaced runs of elements that an access consists of: one for each row (of the axes from `kept` on), or more.
fn runs(access: &Access, dims: &[usize], kept: usize) -> u64 {
    let mut run: Option<(u64, isize)> = None;
    let mut axis = dims.len();
    while axis > kept {
        let (dim, stride) = (dims[axis - 1], access.strides[axis - 1]);
        match run {
            _ if dim == 1 => {}
            None => run = Some((dim as u64, stride)),
            Some((len, step)) if step.checked_mul(len as isize) == Some(stride) => {
                run = Some((len.saturating_mul(dim as u64), step));
            }
            Some(_) => break,
        }
        axis -= 1;
    }
    count(dims[..axis].iter().copied())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{Builder, ConvPass, ConvShape, DType, Precision, WindowShape};

    use super::*;
    use crate::{Conv, Entries, Operand, ProgramBuilder, Window};

    #[test]
    fn products_with_padding_do_not_count() {
        for input in 0..6 {
            for kernel in 0..5 {
                for (stride, dilation, before) in [(1, 1, 1), (2, 1, 0), (1, 3, 2), (3, 2, 4), (2, 2, -1)] {
                    for output in 0..6 {
                        let axis = SlidingAxis { input, output, kernel, stride, dilation, before };
                        let all = (0..output).flat_map(|o| (0..kernel).map(move |k| (o, k)));
                        let over_input = all.filter(|&(o, k)| axis.input_at(o, k).is_some()).count();
                        assert_eq!(pairs(&axis), over_input as u64, "{axis:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_huge_window_is_counted_at_once() {
        let axis = SlidingAxis {
            input: 1 << 40,
            output: 1 << 20,
            kernel: 1 << 30,
            stride: 1,
            dilation: 1,
            before: 0,
        };
        assert_eq!(pairs(&axis), 1 << 50);
    }

    /// A buffer read by two accesses, one broadcast, and a function of each channel that is computed once for it.
    #[test]
    fn a_map_over_channels() {
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
        b.emit(Instruction::Nest(nest), Entries::ALL, &node).unwrap();
        let program = b.finish(vec![x, s], vec![y]).unwrap();
        let cost = program.instructions[0].instruction.cost(&program);
        assert_eq!(cost, Cost { flops: 3 + 24, bytes: 4 * (24 + 3 + 24) });
    }

    #[test]
    fn convolution_and_pooling() {
        let mut b = ProgramBuilder::new();
        let node: Arc<str> = "node".into();
        let axis = SlidingAxis { input: 4, output: 4, kernel: 3, stride: 1, dilation: 1, before: 1 };
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
            stores: vec![Operand::whole(y, DType::F32, &dims)],
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
        let (a, filter) = (Operand::whole(x, DType::F32, &a), Operand::whole(f, DType::F32, &filter));
        let conv = Conv { shape, a, b: filter, precision: Precision::F32, epilogue };
        b.emit(Instruction::Conv(Box::new(conv)), Entries::ALL, &node).unwrap();
        let shape = WindowShape { pass: WindowPass::Sum, planes: 3, axes };
        let [source, target] = [y, z].map(|id| Operand::whole(id, DType::F32, &[48]));
        let window = Window { shape, source, index: None, target };
        b.emit(Instruction::Window(window), Entries::ALL, &node).unwrap();
        let program = b.finish(vec![x, f], vec![z]).unwrap();
        let costs: Vec<Cost> = program.instructions.iter().map(|i| i.instruction.cost(&program)).collect();
        // Ten of twelve places along each axis lie over the input.
        assert_eq!(costs[0], Cost { flops: 2 * 6 * 100, bytes: 4 * (32 + 54 + 48) });
        assert_eq!(costs[1], Cost { flops: 3 * 100, bytes: 4 * (48 + 48) });
    }
}
