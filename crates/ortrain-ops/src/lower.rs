//! What an operator sees when it is lowered to instructions.

use std::sync::Arc;

use ortrain_expr::{
    Access, Builder, ConvShape, Dims, Inst, Precision, ReduceOp, Reduction, Reg, RunScalar, Scalar, Segments,
    Strides, Type,
};
use ortrain_graph::{Attr, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::{
    BufferId, Conv, GradientMode, GradientModes, Instruction, Load, MatMul, Nest, Operand, PlaneId,
    ProgramBuilder, SEED_FACTOR,
};
use rustc_hash::FxHashMap;

use crate::OpError;
use crate::passes::decompose::decompose_node;
use crate::passes::fold::fold_node;
use crate::passes::infer::infer_node;
use crate::registry::build;

/// The attribute of a node of random numbers that came out of a branch: the names that its outputs had there. It is
/// set when a schedule is made and stands in no file.
pub(crate) const ORIGINAL_NAMES: &str = "ortrain.original_names";

/// The attribute of a node that came out of a body that was written out: the iterations that it belongs to, the
/// outermost loop first. It is set when a schedule is made and stands in no file.
pub(crate) const POSITIONS: &str = "ortrain.positions";

/// A part of the state that a sequence is bound to: a whole plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanePart {
    /// The element type.
    pub dtype: DType,
    /// The plane.
    pub plane: PlaneId,
    /// The first byte.
    pub offset: usize,
    /// The number of elements, padding between tensors included.
    pub len: usize,
    /// The tensors of the sequence, in order.
    pub tensors: Arc<[PartTensor]>,
}

/// A tensor in a part of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTensor {
    /// The first element, counted from that of the part.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
}

impl PlanePart {
    /// True if the tensors are single numbers, one behind the other.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.tensors.iter().enumerate().all(|(k, tensor)| *tensor == PartTensor { start: k, len: 1 })
    }

    /// True if tensors lie at the same elements as those of another part.
    #[must_use]
    pub fn lies_as(&self, other: &PlanePart) -> bool {
        self.len == other.len && self.tensors == other.tensors
    }
}

/// Where values are while a program is made.
#[derive(Debug, Default)]
pub(crate) struct Values {
    pub(crate) buffers: FxHashMap<ValueId, BufferId>,
    pub(crate) sequences: FxHashMap<ValueId, Vec<PlanePart>>,
    /// The value that says whether gradients overwrite or accumulate: it chooses the entry and has no buffer.
    pub(crate) reset_flag: Option<ValueId>,
    /// A constant that is true, if there is one.
    pub(crate) truth: Option<BufferId>,
}

/// One node while it is lowered. Every shape is a list of numbers.
pub struct Lower<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) node: &'a Node,
    pub(crate) builder: &'a mut ProgramBuilder,
    pub(crate) values: &'a mut Values,
    pub(crate) label: Arc<str>,
}

impl Lower<'_> {
    /// The node.
    #[must_use]
    pub fn node(&self) -> &Node {
        self.node
    }

    /// Whether input `k` is there.
    #[must_use]
    pub fn has(&self, k: usize) -> bool {
        self.node.inputs.get(k).copied().flatten().is_some()
    }

    /// Whether output `k` is used.
    #[must_use]
    pub fn wants(&self, k: usize) -> bool {
        self.node.outputs.get(k).copied().flatten().is_some()
    }

    fn input_id(&self, k: usize) -> ValueId {
        self.node.inputs.get(k).copied().flatten().expect("inference checked that the input is there")
    }

    fn output_id(&self, k: usize) -> ValueId {
        self.node.outputs.get(k).copied().flatten().expect("asked for an output that is used")
    }

    fn dims_of(&self, id: ValueId) -> Vec<usize> {
        let shape = self.graph.value(id).ty.shape().and_then(ortrain_graph::Shape::concrete);
        shape.expect("nodes are lowered when all shapes are numbers")
    }

    fn dtype_of(&self, id: ValueId) -> DType {
        self.graph.value(id).ty.dtype().expect("inference found the type")
    }

    /// The shape of input `k`.
    #[must_use]
    pub fn dims(&self, k: usize) -> Vec<usize> {
        self.dims_of(self.input_id(k))
    }

    /// The element type of input `k`.
    #[must_use]
    pub fn dtype(&self, k: usize) -> DType {
        self.dtype_of(self.input_id(k))
    }

    /// The shape of output `k`.
    #[must_use]
    pub fn out_dims(&self, k: usize) -> Vec<usize> {
        self.dims_of(self.output_id(k))
    }

    /// The element type of output `k`.
    #[must_use]
    pub fn out_dtype(&self, k: usize) -> DType {
        self.dtype_of(self.output_id(k))
    }

    /// The content of input `k`, if it is constant.
    #[must_use]
    pub fn constant(&self, k: usize) -> Option<&Tensor> {
        self.graph.value(self.node.inputs.get(k).copied().flatten()?).constant.as_ref()
    }

    /// The name of output `k`, for streams of random numbers.
    #[must_use]
    pub fn output_name(&self, k: usize) -> &str {
        let original = match self.node.attrs.0.get(ORIGINAL_NAMES) {
            Some(Attr::Strings(names)) => names.get(k).map(String::as_str),
            _ => None,
        };
        original.unwrap_or_else(|| self.graph.name_of(self.output_id(k)))
    }

    /// The seed of random numbers: that of the run, changed for the iteration of a loop that the node came from.
    pub fn seed(&self, b: &mut Builder) -> Reg {
        let mut seed = b.run_scalar(RunScalar::Seed);
        if let Some(Attr::Ints(positions)) = self.node.attrs.0.get(POSITIONS) {
            let exact = |b: &mut Builder, value: u64| b.push(Inst::Const(Scalar::U64(value)), Type::U64);
            for &position in positions {
                // The same as `iteration_seed`.
                let (next, factor) = (exact(b, position as u64 + 1), exact(b, SEED_FACTOR));
                let moved = b.add(seed, next);
                seed = b.mul(moved, factor);
            }
        }
        seed
    }

    /// True if input `k` is a sequence.
    #[must_use]
    pub fn is_sequence(&self, k: usize) -> bool {
        matches!(self.graph.value(self.input_id(k)).ty, ValueType::Sequence(_))
    }

    /// The buffer of output `k`, a sequence of so many scalars.
    pub fn scalars(&mut self, k: usize, count: usize) -> BufferId {
        let id = self.output_id(k);
        let buffer = self.builder.work(self.graph.name_of(id), self.dtype_of(id), count);
        self.values.buffers.insert(id, buffer);
        buffer
    }

    /// The planes that input `k`, a sequence, is bound to.
    ///
    /// # Errors
    /// When it is bound to none.
    pub fn planes(&self, k: usize) -> Result<Vec<PlanePart>, OpError> {
        self.values.sequences.get(&self.input_id(k)).cloned().ok_or_else(|| {
            OpError::unsupported(
                "a sequence of tensors can only be run when it is bound to the planes of a state",
            )
        })
    }

    /// Says that output `k` is the sequence bound to these planes.
    pub fn set_planes(&mut self, k: usize, parts: Vec<PlanePart>) {
        if self.wants(k) {
            self.values.sequences.insert(self.output_id(k), parts);
        }
    }

    /// The buffer of a part of a plane.
    pub fn plane_buffer(&mut self, part: &PlanePart, label: &str) -> BufferId {
        self.builder.plane(label, part.dtype, part.len, part.plane, part.offset)
    }

    fn buffer_of(&mut self, id: ValueId) -> BufferId {
        if let Some(&buffer) = self.values.buffers.get(&id) {
            return buffer;
        }
        let value = self.graph.value(id);
        let tensor = value.constant.as_ref().expect("a value is made before it is used");
        let buffer = self.builder.constant(&value.name, tensor);
        self.values.buffers.insert(id, buffer);
        buffer
    }

    /// The buffer of input `k`.
    pub fn input(&mut self, k: usize) -> BufferId {
        self.buffer_of(self.input_id(k))
    }

    /// The buffer of output `k`, in the work arena.
    pub fn output(&mut self, k: usize) -> BufferId {
        let id = self.output_id(k);
        if let Some(&buffer) = self.values.buffers.get(&id) {
            return buffer;
        }
        let len = self.dims_of(id).iter().product();
        let buffer = self.builder.work(self.graph.name_of(id), self.dtype_of(id), len);
        self.values.buffers.insert(id, buffer);
        buffer
    }

    /// Says that output `k` is the same elements as input `i` (under another shape, perhaps). Nothing is copied.
    pub fn alias(&mut self, k: usize, i: usize) {
        if !self.wants(k) {
            return;
        }
        let buffer = self.input(i);
        self.values.buffers.insert(self.output_id(k), buffer);
    }

    /// Says that output `k` is this buffer.
    pub fn alias_buffer(&mut self, k: usize, buffer: BufferId) {
        if self.wants(k) {
            self.values.buffers.insert(self.output_id(k), buffer);
        }
    }

    /// Makes output `k`, a flag of one element, true: the constant that all nodes have for that.
    pub fn say_true(&mut self, k: usize) {
        let values = &mut *self.values;
        let new = || self.builder.constant("true", &Tensor::filled(DType::Bool, &[1], 1.0));
        let flag = *values.truth.get_or_insert_with(new);
        self.alias_buffer(k, flag);
    }

    /// A buffer for something in between.
    pub fn temp(&mut self, name: &str, dtype: DType, len: usize) -> BufferId {
        let label =
            format!("{}/{name}", self.node.present_outputs().next().map_or("", |id| self.graph.name_of(id)));
        self.builder.work(&label, dtype, len)
    }

    /// A constant.
    pub fn constant_buffer(&mut self, name: &str, tensor: &Tensor) -> BufferId {
        self.builder.constant(name, tensor)
    }

    /// The space of a map that guards the elements of input `k`, and their strides in it: its axes, so that a failure says
    /// where the element stands.
    #[must_use]
    pub fn guarded_space(&self, k: usize) -> (Vec<usize>, Strides) {
        let mut dims = self.dims(k);
        if dims.is_empty() {
            dims.push(1);
        }
        let strides = Access::contiguous(self.dtype(k), &dims).strides;
        (dims, strides)
    }

    /// Makes the run fail if an element of input `k`, integers, lies outside `0..=most`.
    ///
    /// # Errors
    /// When the instruction is faulty.
    pub fn guard_up_to(&mut self, k: usize, most: usize) -> Result<(), OpError> {
        let (dims, strides) = self.guarded_space(k);
        let buffer = self.input(k);
        let mut nest = self.nest(&dims, 0);
        let value = nest.load_strided(self, buffer, 0, &strides);
        let value = nest.b.convert(value, Type::I64);
        nest.b.guard(value, most as i64 + 1);
        self.emit(nest.instruction())
    }

    /// Whether input `k` is the flag that chooses between overwriting and accumulating gradients.
    #[must_use]
    pub fn is_reset_flag(&self, k: usize) -> bool {
        self.node.inputs.get(k).copied().flatten().is_some_and(|id| self.values.reset_flag == Some(id))
    }

    /// Emits an instruction.
    ///
    /// # Errors
    /// When it is faulty.
    pub fn emit(&mut self, instruction: Instruction) -> Result<(), OpError> {
        Ok(self.builder.emit(instruction, GradientModes::ALL, &self.label)?)
    }

    /// Emits an instruction for one entry.
    ///
    /// # Errors
    /// When it is faulty.
    pub fn emit_for(&mut self, entry: GradientMode, instruction: Instruction) -> Result<(), OpError> {
        Ok(self.builder.emit(instruction, GradientModes::only(entry), &self.label)?)
    }

    /// Starts a nest over `dims`, of whose axes the last `inner` are reduced.
    #[must_use]
    pub fn nest(&self, dims: &[usize], inner: usize) -> NestBuilder {
        NestBuilder {
            dims: dims.iter().copied().collect(),
            inner,
            segments: None,
            loads: Vec::new(),
            reductions: Vec::new(),
            stores: Vec::new(),
            results: Vec::new(),
            b: Builder::new(),
        }
    }

    /// Starts a nest over segments of a plane of `len` elements, of whose points those of each segment are reduced if `inner`
    /// is 1 (0 for a map).
    ///
    /// Its axes are the segment and the position in the plane. [`NestBuilder::load_strided`] and
    /// [`NestBuilder::store_strided`] reach what it reads and writes, [`NestBuilder::load_plane`] and
    /// [`NestBuilder::store_plane`] planes, and [`NestBuilder::store_outer`] what there is one of for each segment.
    #[must_use]
    pub fn nest_of_segments(&self, segments: Segments, len: usize, inner: usize) -> NestBuilder {
        let dims = [segments.len(), len];
        NestBuilder { segments: Some(segments), ..self.nest(&dims, inner) }
    }

    /// The element type of a buffer.
    #[must_use]
    pub fn buffer_dtype(&self, buffer: BufferId) -> DType {
        self.builder.buffer(buffer).dtype
    }

    /// The number of elements of a buffer.
    #[must_use]
    pub fn buffer_len(&self, buffer: BufferId) -> usize {
        self.builder.buffer(buffer).len
    }

    /// A buffer of shape `dims`, row-major, as an operand.
    #[must_use]
    pub fn operand(&self, buffer: BufferId, dims: &[usize]) -> Operand {
        let access = Access { len: self.buffer_len(buffer), ..self.whole(buffer, dims) };
        Operand { buffer, access }
    }

    /// All elements of a buffer, in order, as an operand.
    #[must_use]
    pub fn flat(&self, buffer: BufferId) -> Operand {
        self.operand(buffer, &[self.buffer_len(buffer)])
    }

    /// A row-major access to a buffer of shape `dims`.
    #[must_use]
    pub fn whole(&self, buffer: BufferId, dims: &[usize]) -> Access {
        Access::contiguous(self.buffer_dtype(buffer), dims)
    }

    /// Lowers the operator's decomposition.
    ///
    /// # Errors
    /// When it has none, or a part of it cannot be lowered.
    pub fn lower_decomposition(&mut self) -> Result<(), OpError> {
        let mut graph = self.graph.clone();
        let index = graph.nodes.iter().position(|node| node.outputs == self.node.outputs);
        let index = index.expect("the node is one of its graph");
        let nested = |error: crate::Error| OpError::Subgraph(Box::new(error));
        let count = decompose_node(&mut graph, index).map_err(nested)?.ok_or_else(|| {
            OpError::unsupported("it can be read and written, but there is nothing to run it with yet")
        })?;
        for at in index..index + count {
            infer_node(&mut graph, at).map_err(nested)?;
            fold_node(&mut graph, at).map_err(nested)?;
            let node = graph.nodes[at].clone();
            if node.present_outputs().all(|id| graph.value(id).constant.is_some()) {
                continue;
            }
            let op = build(&graph, &node).map_err(nested)?;
            let mut inner = Lower {
                graph: &graph,
                node: &node,
                builder: self.builder,
                values: self.values,
                label: self.label.clone(),
            };
            op.lower(&mut inner)?;
        }
        // The next decomposition gives the same numbers to its own values.
        let there = |id: &ValueId| (id.0 as usize) < self.graph.value_count();
        self.values.buffers.retain(|id, _| there(id));
        self.values.sequences.retain(|id, _| there(id));
        // A result that turned out constant still needs its buffer.
        for id in self.node.present_outputs() {
            if let (None, Some(tensor)) = (self.values.buffers.get(&id), &graph.value(id).constant) {
                let buffer = self.builder.constant(graph.name_of(id), tensor);
                self.values.buffers.insert(id, buffer);
            }
        }
        Ok(())
    }
}

/// Puts a nest together: loads, expression, reductions, stores.
pub struct NestBuilder {
    dims: Dims,
    inner: usize,
    segments: Option<Segments>,
    loads: Vec<Load>,
    reductions: Vec<(ReduceOp, Reg)>,
    stores: Vec<Operand>,
    results: Vec<Reg>,
    /// The expression.
    pub b: Builder,
}

impl NestBuilder {
    /// The sizes of the axes.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Adds a load and returns its slot.
    fn slot(&mut self, buffer: BufferId, access: Access) -> usize {
        self.loads.push(Load::Buffer(Operand { buffer, access }));
        self.loads.len() - 1
    }

    /// The element of a buffer at the current index, in the type it is computed in.
    pub fn load(&mut self, buffer: BufferId, access: Access) -> Reg {
        let ty = Type::of(access.dtype);
        let slot = self.slot(buffer, access);
        self.b.load(slot, ty)
    }

    /// A load of a buffer of shape `dims`, broadcast to the nest's space (trailing axes aligned). A plane under segments has
    /// its length alone for a shape.
    pub fn load_broadcast(&mut self, buffer: BufferId, dtype: DType, dims: &[usize]) -> Reg {
        let access = Access::broadcast(dtype, dims, &self.dims);
        self.load(buffer, access)
    }

    /// The element of a plane at the current position: a load of a nest of segments. `offset` is where the plane begins in the
    /// buffer.
    pub fn load_plane(&mut self, cx: &Lower<'_>, buffer: BufferId, offset: usize) -> Reg {
        self.load_strided(cx, buffer, offset, &[0, 1])
    }

    /// A load whose strides are given. In a nest of segments they are those from segment to segment and from position to
    /// position: `[8, 0]` for a setting of which a table has eight for each segment.
    pub fn load_strided(
        &mut self,
        cx: &Lower<'_>,
        buffer: BufferId,
        offset: usize,
        strides: &[isize],
    ) -> Reg {
        let access = Access {
            dtype: cx.buffer_dtype(buffer),
            offset,
            strides: strides.iter().copied().collect(),
            len: cx.buffer_len(buffer),
        };
        self.load(buffer, access)
    }

    /// The element of a buffer at a computed index (`I64`, counted from its start), in the type it is computed in; zero
    /// where that lies outside. The load itself moves along no axis: the index alone says where the element is.
    pub fn gather(&mut self, cx: &Lower<'_>, buffer: BufferId, index: Reg) -> Reg {
        let dtype = cx.buffer_dtype(buffer);
        let strides = self.dims.iter().map(|_| 0).collect();
        let slot = self.slot(buffer, Access { dtype, offset: 0, strides, len: cx.buffer_len(buffer) });
        self.b.load_at(slot, index, Type::of(dtype))
    }

    /// Reduces a value over the inner axes.
    pub fn reduce(&mut self, op: ReduceOp, value: Reg) -> Reg {
        let ty = self.b.ty(value);
        self.reductions.push((op, value));
        self.b.reduced(self.reductions.len() - 1, ty)
    }

    /// Stores a value, converted to the type of the access.
    pub fn store(&mut self, buffer: BufferId, access: Access, value: Reg) {
        let value = self.b.convert(value, Type::of(access.dtype));
        self.stores.push(Operand { buffer, access });
        self.results.push(value);
    }

    /// Stores a value at the current position of a plane: a store of a nest of segments. `offset` is where the plane begins in
    /// the buffer.
    pub fn store_plane(&mut self, cx: &Lower<'_>, buffer: BufferId, offset: usize, value: Reg) {
        self.store_strided(cx, buffer, offset, [0, 1].into_iter().collect(), value);
    }

    /// Stores a value at every index, row-major. That is no plane under segments.
    pub fn store_whole(&mut self, cx: &Lower<'_>, buffer: BufferId, value: Reg) {
        let access = Access::contiguous(cx.buffer_dtype(buffer), &self.dims);
        self.store(buffer, access, value);
    }

    /// Stores a value once per outer point, row-major over the outer axes.
    pub fn store_outer(&mut self, cx: &Lower<'_>, buffer: BufferId, value: Reg) {
        let outer = self.dims.len() - self.inner;
        let mut access = Access::contiguous(cx.buffer_dtype(buffer), &self.dims[..outer]);
        access.strides.resize(self.dims.len(), 0);
        self.store(buffer, access, value);
    }

    /// Stores a value with the given strides.
    pub fn store_strided(
        &mut self,
        cx: &Lower<'_>,
        buffer: BufferId,
        offset: usize,
        strides: Strides,
        value: Reg,
    ) {
        let access = Access { dtype: cx.buffer_dtype(buffer), offset, strides, len: cx.buffer_len(buffer) };
        self.store(buffer, access, value);
    }

    /// The nest.
    #[must_use]
    pub fn finish(self) -> Nest {
        let values: Vec<Reg> = self.reductions.iter().map(|&(_, value)| value).collect();
        let (expr, values) = self.b.finish_keeping(&self.results, &values);
        let reductions =
            self.reductions.iter().zip(values).map(|(&(op, _), value)| Reduction { op, value }).collect();
        Nest {
            dims: self.dims,
            inner: self.inner,
            segments: self.segments,
            loads: self.loads,
            expr,
            reductions,
            stores: self.stores,
        }
    }

    /// The nest as an instruction.
    #[must_use]
    pub fn instruction(self) -> Instruction {
        Instruction::from(self.finish())
    }

    /// The nest as the epilogue of a product, which it has as its [accumulator](NestBuilder::accumulator).
    #[must_use]
    pub fn matmul(
        self,
        (batch, m, n, k): (&[usize], usize, usize, usize),
        a: Operand,
        b: Operand,
    ) -> Instruction {
        let batch = batch.iter().copied().collect();
        let (rounded, precision, epilogue) = ([None; 2], Precision::F32, self.finish());
        Instruction::from(MatMul { batch, m, n, k, a, b, rounded, precision, epilogue })
    }

    /// The nest as the epilogue of a convolution, which it has as its [accumulator](NestBuilder::accumulator). Its space is
    /// that of the result ([`ConvShape::operands`]).
    #[must_use]
    pub fn conv(self, shape: ConvShape, a: Operand, b: Operand) -> Instruction {
        let (precision, epilogue) = (Precision::F32, self.finish());
        Instruction::from(Conv { shape, a, b, precision, epilogue })
    }

    /// An element of the product of the matrices, or of the convolution, that the nest finishes. Must be the first load.
    pub fn accumulator(&mut self, dtype: DType) -> Reg {
        assert!(self.loads.is_empty(), "the accumulator is the first load");
        self.loads.push(Load::Accumulator(dtype));
        self.b.load(0, Type::of(dtype))
    }
}

/// A shape around one of its axes: the number of elements of the axes before it, its own size, and the number of
/// elements of the axes behind it.
pub(crate) fn around(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of three tensors, a table of two settings for each, and a sum of squares of each.
    #[test]
    fn nests_of_segments_are_maps_and_rows() {
        let graph = Graph::new("test");
        let node = Node::new("", "Test", &[], &[], Default::default());
        let (mut builder, mut values) = (ProgramBuilder::new(), Values::default());
        let label = "node".into();
        let mut cx = Lower { graph: &graph, node: &node, builder: &mut builder, values: &mut values, label };
        let part = |plane: u32, len: usize| PlanePart {
            dtype: DType::F32,
            plane: PlaneId(plane),
            offset: 0,
            len,
            tensors: [].into(),
        };
        let (plane, table) = (cx.plane_buffer(&part(0, 200), "p"), cx.plane_buffer(&part(1, 6), "settings"));
        let sums = cx.temp("sums", DType::F32, 3);
        let segments = Segments::new([0..10, 64..64, 64..200]);

        let mut nest = cx.nest_of_segments(segments.clone(), 200, 0);
        let (p, decay) = (nest.load_plane(&cx, plane, 0), nest.load_strided(&cx, table, 1, &[2, 0]));
        let p = nest.b.mul(p, decay);
        nest.store_plane(&cx, plane, 0, p);
        let map = nest.instruction();
        assert_eq!((map.name(), map.shapes().as_str()), ("Map", "3 segments of 200"));
        cx.emit(map).expect("a sound instruction");

        // The last outer axis is contiguous in the table, which makes a Col of other nests.
        let mut nest = cx.nest_of_segments(segments, 200, 1);
        let rate = nest.load_strided(&cx, table, 0, &[1, 0]);
        let p = nest.load_strided(&cx, plane, 0, &[0, 0]);
        let product = nest.b.mul(p, rate);
        let sum = nest.reduce(ReduceOp::Sum, product);
        nest.store_outer(&cx, sums, sum);
        let row = nest.instruction();
        assert_eq!((row.name(), row.shapes().as_str()), ("Reduce", "3 segments of 200"));
        cx.emit(row).expect("a sound instruction");
    }
}
