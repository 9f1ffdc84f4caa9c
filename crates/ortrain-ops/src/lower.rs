//! Context of an operator during its lowering to instructions.

use std::sync::Arc;

use ortrain_expr::{
    Access, Builder, ConvShape, Dims, Inst, Precision, ReduceOp, Reduction, Reg, RunScalar, Scalar, Segments,
    Strides, Type,
};
use ortrain_graph::{Attr, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::{
    BufferId, Conv, GradientMode, GradientModes, Instruction, IntegerProduct, IntegerShape, Load, MatMul,
    Nest, Operand, PlaneId, ProgramBuilder, SEED_FACTOR,
};
use rustc_hash::FxHashMap;

use crate::{Error, OpError};

/// Attribute of a random-number node that was moved out of a branch: the names of its outputs in the branch. It is set
/// when a schedule is built, and no file contains it.
pub(crate) const ORIGINAL_NAMES: &str = "ortrain.original_names";

/// Attribute of a node that was moved out of an unrolled loop body: its iteration indices, the outermost loop first. It
/// is set when a schedule is built, and no file contains it.
pub(crate) const POSITIONS: &str = "ortrain.positions";

/// Part of the state that a sequence is bound to: a complete plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanePart {
    /// Element type.
    pub dtype: DType,
    /// Plane that holds the part.
    pub plane: PlaneId,
    /// Offset in bytes.
    pub offset: usize,
    /// Number of elements, including padding between tensors.
    pub len: usize,
    /// Tensors of the sequence, in order.
    pub tensors: Arc<[PartTensor]>,
}

/// Position of a tensor in a part of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTensor {
    /// Index of the first element, relative to the start of the part.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl PlanePart {
    /// Returns true if the tensors are single numbers at consecutive positions.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.tensors.iter().enumerate().all(|(k, tensor)| *tensor == PartTensor { start: k, len: 1 })
    }

    /// Returns true if the tensors have the same positions and lengths as the tensors of another part.
    #[must_use]
    pub fn has_same_layout(&self, other: &PlanePart) -> bool {
        self.len == other.len && self.tensors == other.tensors
    }
}

/// Storage of values while a program is built.
#[derive(Debug, Default)]
pub(crate) struct ValueBuffers {
    pub(crate) buffers: FxHashMap<ValueId, BufferId>,
    pub(crate) sequences: FxHashMap<ValueId, Vec<PlanePart>>,
    /// Value that selects whether gradients overwrite or accumulate. It selects the gradient mode and has no buffer.
    pub(crate) reset_flag: Option<ValueId>,
    /// Constant true, once it has been created.
    pub(crate) true_constant: Option<BufferId>,
}

/// Passes that operators use while they are lowered. Passes call operators, so the caller of an operator hands them
/// over.
#[derive(Clone, Copy)]
pub(crate) struct LoweringPasses {
    /// Infers the types of a subgraph with typed inputs, and folds constants.
    pub(crate) infer: fn(&mut Graph) -> Result<bool, Error>,
    /// Lowers the node of a context.
    pub(crate) lower_node: fn(&mut Lower<'_>) -> Result<(), OpError>,
    /// Lowers the decomposition of the node of a context.
    pub(crate) lower_decomposition: fn(&mut Lower<'_>) -> Result<(), OpError>,
}

/// One node during its lowering. Every shape is concrete.
pub struct Lower<'a> {
    /// Passes for subgraphs of the node and for its decomposition.
    pub(crate) passes: LoweringPasses,
    pub(crate) graph: &'a Graph,
    pub(crate) node: &'a Node,
    pub(crate) builder: &'a mut ProgramBuilder,
    pub(crate) values: &'a mut ValueBuffers,
    pub(crate) label: Arc<str>,
}

impl Lower<'_> {
    /// Returns the node.
    #[must_use]
    pub fn node(&self) -> &Node {
        self.node
    }

    /// Returns true if input `k` is present.
    #[must_use]
    pub fn has_input(&self, k: usize) -> bool {
        self.node.inputs.get(k).copied().flatten().is_some()
    }

    /// Returns true if output `k` is used.
    #[must_use]
    pub fn has_output(&self, k: usize) -> bool {
        self.node.outputs.get(k).copied().flatten().is_some()
    }

    fn input_id(&self, k: usize) -> ValueId {
        self.node.inputs.get(k).copied().flatten().expect("inference checked that the input exists")
    }

    fn output_id(&self, k: usize) -> ValueId {
        self.node.outputs.get(k).copied().flatten().expect("the output is used")
    }

    fn dims_of(&self, id: ValueId) -> Vec<usize> {
        let shape = self.graph.value(id).ty.shape().and_then(ortrain_graph::Shape::concrete);
        shape.expect("nodes are lowered when all shapes are numbers")
    }

    /// Returns the type of the buffer of a value: bytes for a type without arithmetic.
    fn dtype_of(&self, id: ValueId) -> DType {
        self.element_type(id).stored()
    }

    fn element_type(&self, id: ValueId) -> DType {
        self.graph.value(id).ty.dtype().expect("inference found the type")
    }

    /// Returns the element type of input `k` in the model.
    #[must_use]
    pub fn input_element_type(&self, k: usize) -> DType {
        self.element_type(self.input_id(k))
    }

    /// Returns the shape of input `k`.
    #[must_use]
    pub fn dims(&self, k: usize) -> Vec<usize> {
        self.dims_of(self.input_id(k))
    }

    /// Returns the element type of the buffer of input `k`.
    #[must_use]
    pub fn dtype(&self, k: usize) -> DType {
        self.dtype_of(self.input_id(k))
    }

    /// Returns the shape of output `k`.
    #[must_use]
    pub fn out_dims(&self, k: usize) -> Vec<usize> {
        self.dims_of(self.output_id(k))
    }

    /// Returns the element type of the buffer of output `k`.
    #[must_use]
    pub fn out_dtype(&self, k: usize) -> DType {
        self.dtype_of(self.output_id(k))
    }

    /// Returns the content of input `k`, if it is constant.
    #[must_use]
    pub fn constant(&self, k: usize) -> Option<&Tensor> {
        self.graph.value(self.node.inputs.get(k).copied().flatten()?).constant.as_ref()
    }

    /// Returns the name of output `k`, which identifies streams of random numbers.
    #[must_use]
    pub fn output_name(&self, k: usize) -> &str {
        let original = match self.node.attrs.0.get(ORIGINAL_NAMES) {
            Some(Attr::Strings(names)) => names.get(k).map(String::as_str),
            _ => None,
        };
        original.unwrap_or_else(|| self.graph.name_of(self.output_id(k)))
    }

    /// Returns the seed for random numbers: the seed of the run, mixed with the iteration index of an unrolled loop.
    pub fn seed(&self, b: &mut Builder) -> Reg {
        let mut seed = b.run_scalar(RunScalar::Seed);
        if let Some(Attr::Ints(positions)) = self.node.attrs.0.get(POSITIONS) {
            let exact = |b: &mut Builder, value: u64| b.push(Inst::Const(Scalar::U64(value)), Type::U64);
            for &position in positions {
                // Must match `iteration_seed`.
                let (next, factor) = (exact(b, position as u64 + 1), exact(b, SEED_FACTOR));
                let moved = b.add(seed, next);
                seed = b.mul(moved, factor);
            }
        }
        seed
    }

    /// Returns true if input `k` is a sequence.
    #[must_use]
    pub fn is_sequence(&self, k: usize) -> bool {
        matches!(self.graph.value(self.input_id(k)).ty, ValueType::Sequence(_))
    }

    /// Allocates the buffer of output `k`, a sequence of `count` scalars.
    pub fn alloc_scalars(&mut self, k: usize, count: usize) -> BufferId {
        let id = self.output_id(k);
        let buffer = self.builder.work(self.graph.name_of(id), self.dtype_of(id), count);
        self.values.buffers.insert(id, buffer);
        buffer
    }

    /// Returns the planes that input `k`, a sequence, is bound to.
    ///
    /// # Errors
    /// Returns an error if the sequence is not bound to planes.
    pub fn planes(&self, k: usize) -> Result<Vec<PlanePart>, OpError> {
        self.values.sequences.get(&self.input_id(k)).cloned().ok_or_else(|| {
            OpError::unsupported(
                "a sequence of tensors cannot be run unless it is bound to buffers of a state",
            )
        })
    }

    /// Binds output `k`, a sequence, to these planes.
    pub fn set_planes(&mut self, k: usize, parts: Vec<PlanePart>) {
        if self.has_output(k) {
            self.values.sequences.insert(self.output_id(k), parts);
        }
    }

    /// Returns the buffer of a part of a plane.
    pub fn plane_buffer(&mut self, part: &PlanePart, label: &str) -> BufferId {
        self.builder.plane(label, part.dtype, part.len, part.plane, part.offset)
    }

    fn buffer_of(&mut self, id: ValueId) -> BufferId {
        if let Some(&buffer) = self.values.buffers.get(&id) {
            return buffer;
        }
        let value = self.graph.value(id);
        let tensor = value.constant.as_ref().expect("a value is computed before its use");
        let buffer = self.builder.constant(&value.name, &tensor.stored());
        self.values.buffers.insert(id, buffer);
        buffer
    }

    /// Returns the buffer of input `k`.
    pub fn input(&mut self, k: usize) -> BufferId {
        self.buffer_of(self.input_id(k))
    }

    /// Returns the buffer of output `k`, in the work arena.
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

    /// Makes output `k` an alias of input `i`, possibly with another shape. No element is copied.
    pub fn alias(&mut self, k: usize, i: usize) {
        if !self.has_output(k) {
            return;
        }
        let buffer = self.input(i);
        self.values.buffers.insert(self.output_id(k), buffer);
    }

    /// Sets the buffer of output `k`.
    pub fn alias_buffer(&mut self, k: usize, buffer: BufferId) {
        if self.has_output(k) {
            self.values.buffers.insert(self.output_id(k), buffer);
        }
    }

    /// Sets output `k`, a flag of one element, to true. All nodes share one constant.
    pub fn set_true(&mut self, k: usize) {
        let values = &mut *self.values;
        let new = || self.builder.constant("true", &Tensor::filled(DType::Bool, &[1], 1.0));
        let flag = *values.true_constant.get_or_insert_with(new);
        self.alias_buffer(k, flag);
    }

    /// Allocates a buffer for an intermediate result.
    pub fn alloc_temp(&mut self, name: &str, dtype: DType, len: usize) -> BufferId {
        let label =
            format!("{}/{name}", self.node.present_outputs().next().map_or("", |id| self.graph.name_of(id)));
        self.builder.work(&label, dtype, len)
    }

    /// Adds a constant.
    pub fn constant_buffer(&mut self, name: &str, tensor: &Tensor) -> BufferId {
        self.builder.constant(name, &tensor.stored())
    }

    /// Returns the axes of input `k` and its strides, for a map that guards its elements. With these axes an error
    /// message can report the position of an element.
    #[must_use]
    pub fn guarded_space(&self, k: usize) -> (Vec<usize>, Strides) {
        let mut dims = self.dims(k);
        if dims.is_empty() {
            dims.push(1);
        }
        let strides = Access::contiguous(self.dtype(k), &dims).strides;
        (dims, strides)
    }

    /// Adds a check: the run fails if an element of the integer input `k` is outside `0..=most`.
    ///
    /// # Errors
    /// Returns an error if the instruction is invalid.
    pub fn guard_range(&mut self, k: usize, max: usize) -> Result<(), OpError> {
        let (dims, strides) = self.guarded_space(k);
        let buffer = self.input(k);
        let mut nest = self.nest(&dims, 0);
        let value = nest.load_strided(self, buffer, 0, &strides);
        let value = nest.b.convert(value, Type::I64);
        nest.b.guard(value, max as i64 + 1);
        self.emit(nest.instruction())
    }

    /// Returns true if input `k` is the flag that selects between overwriting and accumulating gradients.
    #[must_use]
    pub fn is_reset_flag(&self, k: usize) -> bool {
        self.node.inputs.get(k).copied().flatten().is_some_and(|id| self.values.reset_flag == Some(id))
    }

    /// Emits an instruction.
    ///
    /// # Errors
    /// Returns an error if the instruction is invalid.
    pub fn emit(&mut self, instruction: Instruction) -> Result<(), OpError> {
        Ok(self.builder.emit(instruction, GradientModes::ALL, &self.label)?)
    }

    /// Emits an instruction for one gradient mode.
    ///
    /// # Errors
    /// Returns an error if the instruction is invalid.
    pub fn emit_for(&mut self, entry: GradientMode, instruction: Instruction) -> Result<(), OpError> {
        Ok(self.builder.emit(instruction, GradientModes::only(entry), &self.label)?)
    }

    /// Starts a nest over `dims`. The last `inner` axes are reduced.
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

    /// Starts a nest over segments of a plane of `len` elements. If `inner` is 1, the points of each segment are
    /// reduced; 0 makes a map.
    ///
    /// The axes are the segment and the position in the plane:
    /// - [`NestBuilder::load_strided`] and [`NestBuilder::store_strided`] access any buffer;
    /// - [`NestBuilder::load_plane`] and [`NestBuilder::store_plane`] access planes;
    /// - [`NestBuilder::store_outer`] stores one value for each segment.
    #[must_use]
    pub fn nest_of_segments(&self, segments: Segments, len: usize, inner: usize) -> NestBuilder {
        let dims = [segments.len(), len];
        NestBuilder { segments: Some(segments), ..self.nest(&dims, inner) }
    }

    /// Returns the element type of a buffer.
    #[must_use]
    pub fn buffer_dtype(&self, buffer: BufferId) -> DType {
        self.builder.buffer(buffer).dtype
    }

    /// Returns the number of elements of a buffer.
    #[must_use]
    pub fn buffer_len(&self, buffer: BufferId) -> usize {
        self.builder.buffer(buffer).len
    }

    /// Returns a row-major buffer of shape `dims` as an operand.
    #[must_use]
    pub fn operand(&self, buffer: BufferId, dims: &[usize]) -> Operand {
        let access = Access { len: self.buffer_len(buffer), ..self.contiguous_access(buffer, dims) };
        Operand { buffer, access }
    }

    /// Returns all elements of a buffer, in order, as an operand.
    #[must_use]
    pub fn flat_operand(&self, buffer: BufferId) -> Operand {
        self.operand(buffer, &[self.buffer_len(buffer)])
    }

    /// Returns a row-major access to a buffer of shape `dims`.
    #[must_use]
    pub fn contiguous_access(&self, buffer: BufferId, dims: &[usize]) -> Access {
        Access::contiguous(self.buffer_dtype(buffer), dims)
    }

    /// Lowers the operator's decomposition.
    ///
    /// # Errors
    /// Returns an error if the operator has no decomposition, or if a node of it cannot be lowered.
    pub fn lower_decomposition(&mut self) -> Result<(), OpError> {
        (self.passes.lower_decomposition)(self)
    }
}

/// Builder of a nest: loads, expression, reductions, stores.
pub struct NestBuilder {
    dims: Dims,
    inner: usize,
    segments: Option<Segments>,
    loads: Vec<Load>,
    reductions: Vec<(ReduceOp, Reg)>,
    stores: Vec<Operand>,
    results: Vec<Reg>,
    /// Builder of the expression.
    pub b: Builder,
}

impl NestBuilder {
    /// Returns the sizes of the axes.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Adds a load and returns its slot.
    fn slot(&mut self, buffer: BufferId, access: Access) -> usize {
        self.loads.push(Load::Buffer(Operand { buffer, access }));
        self.loads.len() - 1
    }

    /// Loads the element of a buffer at the current index, converted to its compute type.
    pub fn load(&mut self, buffer: BufferId, access: Access) -> Reg {
        let ty = Type::of(access.dtype);
        let slot = self.slot(buffer, access);
        self.b.load(slot, ty)
    }

    /// Loads a buffer of shape `dims`, broadcast to the nest's space (trailing axes aligned). In a nest of segments,
    /// the shape of a plane is its length.
    pub fn load_broadcast(&mut self, buffer: BufferId, dtype: DType, dims: &[usize]) -> Reg {
        let access = Access::broadcast(dtype, dims, &self.dims);
        self.load(buffer, access)
    }

    /// Loads the element of a plane at the current position of a nest of segments. The plane begins at `offset` in the
    /// buffer.
    pub fn load_plane(&mut self, cx: &Lower<'_>, buffer: BufferId, offset: usize) -> Reg {
        self.load_strided(cx, buffer, offset, &[0, 1])
    }

    /// Loads with explicit strides. In a nest of segments these are the strides between segments and between positions:
    /// `[8, 0]` reads one column of a table with eight settings per segment.
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

    /// Loads the element of a buffer at a computed index (`I64`, relative to the start of the buffer), in its compute
    /// type. An index outside of the buffer gives zero. The load has zero strides: only the index determines the
    /// element.
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

    /// Stores a value at the current position of a plane, in a nest of segments. The plane begins at `offset` in the
    /// buffer.
    pub fn store_plane(&mut self, cx: &Lower<'_>, buffer: BufferId, offset: usize, value: Reg) {
        self.store_strided(cx, buffer, offset, [0, 1].into_iter().collect(), value);
    }

    /// Stores a value at every index, row-major. In a nest of segments the result is not a plane.
    pub fn store_contiguous(&mut self, cx: &Lower<'_>, buffer: BufferId, value: Reg) {
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

    /// Stores a value with explicit strides.
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

    /// Returns the nest.
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

    /// Returns the nest as an instruction.
    #[must_use]
    pub fn instruction(self) -> Instruction {
        Instruction::from(self.finish())
    }

    /// Returns a matrix product with the nest as its epilogue. The nest reads the product as its
    /// [accumulator](NestBuilder::accumulator).
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

    /// Returns a convolution with the nest as its epilogue. The nest reads the result as its
    /// [accumulator](NestBuilder::accumulator). Its space is the space of the result ([`ConvShape::operands`]).
    #[must_use]
    pub fn conv(self, shape: ConvShape, a: Operand, b: Operand) -> Instruction {
        let (precision, epilogue) = (Precision::F32, self.finish());
        Instruction::from(Conv { shape, a, b, precision, epilogue })
    }

    /// Returns a product of bytes with the nest as its epilogue. The nest reads the sum as its
    /// [accumulator](NestBuilder::accumulator), of type `I32`.
    #[must_use]
    pub fn integer_product(
        self,
        shape: IntegerShape,
        [a, b]: [Operand; 2],
        zero_points: [Option<Operand>; 2],
    ) -> Instruction {
        let epilogue = self.finish();
        Instruction::from(IntegerProduct { shape, a, b, zero_points, epilogue })
    }

    /// Loads an element of the matrix product or convolution that the nest is the epilogue of. Must be the first load.
    pub fn accumulator(&mut self, dtype: DType) -> Reg {
        assert!(self.loads.is_empty(), "the accumulator is the first load");
        self.loads.push(Load::Accumulator(dtype));
        self.b.load(0, Type::of(dtype))
    }
}

/// Splits a shape at an axis: the number of elements of the axes before it, its own size, and the number of elements of
/// the axes after it.
pub(crate) fn split_at_axis(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of three tensors, a table of two settings for each, and a sum of squares of each.
    #[test]
    fn segment_nests_are_maps_and_rows() {
        let graph = Graph::new("test");
        let node = Node::new("", "Test", &[], &[], Default::default());
        let (mut builder, mut values) = (ProgramBuilder::new(), ValueBuffers::default());
        let label = "node".into();
        let passes = crate::passes::node::LOWERING_PASSES;
        let mut cx =
            Lower { passes, graph: &graph, node: &node, builder: &mut builder, values: &mut values, label };
        let part = |plane: u32, len: usize| PlanePart {
            dtype: DType::F32,
            plane: PlaneId(plane),
            offset: 0,
            len,
            tensors: [].into(),
        };
        let (plane, table) = (cx.plane_buffer(&part(0, 200), "p"), cx.plane_buffer(&part(1, 6), "settings"));
        let sums = cx.alloc_temp("sums", DType::F32, 3);
        let segments = Segments::new([0..10, 64..64, 64..200]);

        let mut nest = cx.nest_of_segments(segments.clone(), 200, 0);
        let (p, decay) = (nest.load_plane(&cx, plane, 0), nest.load_strided(&cx, table, 1, &[2, 0]));
        let p = nest.b.mul(p, decay);
        nest.store_plane(&cx, plane, 0, p);
        let map = nest.instruction();
        assert_eq!((map.name(), map.describe_sizes().as_str()), ("Map", "3 segments of 200"));
        cx.emit(map).expect("a sound instruction");

        // The last outer axis is contiguous in the table. In other nests this gives the instruction `Col`.
        let mut nest = cx.nest_of_segments(segments, 200, 1);
        let rate = nest.load_strided(&cx, table, 0, &[1, 0]);
        let p = nest.load_strided(&cx, plane, 0, &[0, 0]);
        let product = nest.b.mul(p, rate);
        let sum = nest.reduce(ReduceOp::Sum, product);
        nest.store_outer(&cx, sums, sum);
        let row = nest.instruction();
        assert_eq!((row.name(), row.describe_sizes().as_str()), ("Reduce", "3 segments of 200"));
        cx.emit(row).expect("a sound instruction");
    }
}
