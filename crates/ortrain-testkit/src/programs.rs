//! Random small programs: maps, reductions, products, convolutions and pooling over the elements of images,
//! with accumulation into planes. Fusion, planner and backends must preserve their results.

use std::sync::Arc;

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, ConvPass, ConvShape, DType, Dims, Expr, Precision, QuantizedMatrix,
    QuantizedNumbers, ReduceOp, Reduction, Reg, Segments, SlidingAxes, SlidingAxis, Strides, Type, UnaryOp,
    WindowPass, WindowShape,
};
use ortrain_graph::Tensor;
use ortrain_program::{
    Backend, Bindings, BufferId, BufferLocation, Conv, GradientMode, GradientModes, Instruction,
    IntegerProduct, IntegerShape, Load, MatMul, Memory, Nest, Operand, PlaneId, Program, ProgramBuilder,
    QuantizedFactor, QuantizedMatMul, Reference, Scalars, ScatterAdd, Window, WindowIndex, Workspace,
};

/// `SplitMix64` generator.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns a number in -1..1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Features of a random program.
#[derive(Clone, Copy, Debug)]
pub struct Kinds {
    /// Discontinuous results, which expose rounding: comparisons, positions of maxima.
    pub jumps: bool,
    /// Elements stored as float16.
    pub narrow: bool,
    /// Pooling.
    pub windows: bool,
    /// Parts of images: a single index that is read in place, or zeros outside of a part.
    pub parts: bool,
    /// Images that are updated in place, with reads before and after the update.
    pub updates: bool,
    /// Segments of images: in-place maps and sums, with a setting per segment.
    pub segments: bool,
    /// Size of the images.
    pub size: Size,
}

impl Kinds {
    /// All features, in small images.
    pub const ALL: Kinds = Kinds {
        jumps: true,
        narrow: true,
        windows: true,
        parts: true,
        updates: true,
        segments: true,
        size: Size::Small,
    };
}

/// Size of the images of a random program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A few elements.
    Small,
    /// Sufficient for products in a reduced precision ([`Precision::of_product`]).
    Middle,
    /// Sufficient for more than one thread.
    Large,
}

/// A random program that can be finished with or without fusion.
pub struct RandomProgram {
    builder: ProgramBuilder,
    inputs: Vec<BufferId>,
    outputs: Vec<BufferId>,
}

/// Maximum bytes of the plane of a [`RandomProgram`] of small images.
const MAX_PLANE_BYTES: usize = 1 << 16;

/// Float types that are narrower than the computation.
const NARROW_FLOATS: [DType; 2] = [DType::F16, DType::BF16];

/// Sizes of the images of a program: `[n, c, h, w]`.
#[derive(Clone, Copy)]
struct Sizes {
    n: usize,
    c: usize,
    h: usize,
    w: usize,
}

impl Sizes {
    fn all(self) -> [usize; 4] {
        [self.n, self.c, self.h, self.w]
    }

    fn len(self) -> usize {
        self.all().iter().product()
    }

    /// Returns the axes of a space over the images with their strides, in some order and grouping.
    fn space(self, random: &mut Random) -> Vec<(usize, isize)> {
        let Sizes { n, c, h, w } = self;
        let (image, plane) = ((c * h * w) as isize, (h * w) as isize);
        let mut axes: Vec<(usize, isize)> = match random.below(6) {
            0 => vec![(n * c * h * w, 1)],
            1 => vec![(n, image), (c, plane), (h * w, 1)],
            2 => vec![(c, plane), (n, image), (h * w, 1)],
            3 => vec![(n * c, plane), (h * w, 1)],
            4 => vec![(n, image), (c * h, w as isize), (w, 1)],
            _ => vec![(n, image), (c, plane), (h, w as isize), (w, 1)],
        };
        if random.chance(20) {
            let at = random.below(axes.len() + 1);
            axes.insert(at, (1, 0));
        }
        if random.chance(15) {
            let (a, b) = (random.below(axes.len()), random.below(axes.len()));
            axes.swap(a, b);
        }
        axes
    }
}

/// A value of the program under construction.
#[derive(Clone, Copy)]
struct Value {
    id: BufferId,
    dtype: DType,
    kind: Kind,
}

impl Value {
    /// Returns an operand with this access.
    fn operand_with(self, access: Access) -> Operand {
        Operand { buffer: self.id, access }
    }

    /// Returns an operand for the complete value, row-major.
    fn full_operand(self, dims: &[usize]) -> Operand {
        Operand::contiguous(self.id, self.dtype, dims)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Elements `[n, c, h, w]`.
    Image,
    /// One element per channel.
    Channels,
    /// A single element.
    One,
}

struct ProgramGenerator {
    random: Random,
    builder: ProgramBuilder,
    sizes: Sizes,
    values: Vec<Value>,
    node: Arc<str>,
    plane_end: usize,
}

fn access(dtype: DType, axes: &[(usize, isize)], len: usize) -> Access {
    Access { dtype, offset: 0, strides: axes.iter().map(|&(_, stride)| stride).collect(), len }
}

impl ProgramGenerator {
    fn new_value(&mut self, dtype: DType, kind: Kind) -> Value {
        let len = self.len_of(kind);
        let id = self.builder.work("value", dtype, len);
        Value { id, dtype, kind }
    }

    fn len_of(&self, kind: Kind) -> usize {
        match kind {
            Kind::Image => self.sizes.len(),
            Kind::Channels => self.sizes.c,
            Kind::One => 1,
        }
    }

    fn pick_value(&mut self, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        let candidates: Vec<Value> = self.values.iter().copied().filter(fits).collect();
        // Prefer recent values.
        let recent = &candidates[candidates.len().saturating_sub(4)..];
        (!candidates.is_empty()).then(|| {
            if self.random.chance(75) { self.random.pick(recent) } else { self.random.pick(&candidates) }
        })
    }

    /// Returns the access of a value at the points of a space over images; `None` if the space does not
    /// determine its index.
    fn read(&mut self, value: Value, axes: &[(usize, isize)]) -> Option<Operand> {
        let Sizes { c, h, w, .. } = self.sizes;
        let (image, plane) = ((c * h * w) as isize, (h * w) as isize);
        let access = match value.kind {
            Kind::Image => access(value.dtype, axes, self.sizes.len()),
            Kind::One => Access { strides: axes.iter().map(|_| 0).collect(), ..access(value.dtype, &[], 1) },
            Kind::Channels => {
                let mut strides = Strides::new();
                for &(size, step) in axes {
                    strides.push(match step {
                        _ if size == 1 => 0,
                        _ if step == image => 0,
                        _ if step == plane && size == c => 1,
                        _ if step * size as isize <= plane => 0,
                        _ => return None,
                    });
                }
                Access { dtype: value.dtype, offset: 0, strides, len: c }
            }
        };
        Some(value.operand_with(access))
    }

    /// Builds a bounded function of some registers.
    fn function(&mut self, b: &mut Builder, operands: &[Reg], kinds: Kinds) -> Reg {
        let mut regs = operands.to_vec();
        for _ in 0..1 + self.random.below(3) {
            let (x, y) = (self.random.pick(&regs), self.random.pick(&regs));
            let zero = b.constant(Type::F32, 0.0);
            let half = b.constant(Type::F32, 0.5);
            let next = match self.random.below(if kinds.jumps { 9 } else { 7 }) {
                0 => b.add(x, y),
                1 => b.sub(x, y),
                2 => b.mul(x, y),
                3 => b.binary(BinaryOp::Max, x, zero),
                4 => b.unary(UnaryOp::Tanh, x),
                5 => b.mul(x, half),
                6 => b.unary(UnaryOp::Abs, x),
                7 => {
                    let positive = b.compare(CompareOp::Lt, zero, x);
                    b.select(positive, y, zero)
                }
                _ => {
                    let less = b.compare(CompareOp::Le, x, y);
                    b.convert(less, Type::F32)
                }
            };
            regs.push(next);
        }
        let last = *regs.last().unwrap_or(&operands[0]);
        // Bounded, so that products of products do not overflow.
        let quarter = b.constant(Type::F32, 0.25);
        let small = b.mul(last, quarter);
        b.unary(UnaryOp::Tanh, small)
    }

    fn emit(&mut self, instruction: Instruction, entries: GradientModes) {
        self.builder.emit(instruction, entries, &self.node).expect("random instructions are valid");
    }

    fn loads(&mut self, axes: &[(usize, isize)]) -> Vec<Load> {
        let mut loads = Vec::new();
        for _ in 0..1 + self.random.below(3) {
            let Some(value) = self.pick_value(|_| true) else { continue };
            loads.extend(self.read(value, axes).map(Load::Buffer));
        }
        if loads.is_empty()
            && let Some(image) = self.pick_value(|value| value.kind == Kind::Image)
        {
            loads.extend(self.read(image, axes).map(Load::Buffer));
        }
        loads
    }

    fn map(&mut self, kinds: Kinds) {
        let axes = self.sizes.space(&mut self.random);
        let dims: Dims = axes.iter().map(|&(size, _)| size).collect();
        let loads = self.loads(&axes);
        let mut b = Builder::new();
        let mut regs: Vec<Reg> = loads
            .iter()
            .enumerate()
            .map(|(slot, load)| {
                let reg = b.load(slot, Type::of(load.dtype()));
                b.convert(reg, Type::F32)
            })
            .collect();
        if self.random.chance(15) {
            let position = b.coordinate(self.random.below(dims.len()));
            regs.push(b.convert(position, Type::F32));
        }
        let (mut stores, mut results, mut created) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..if self.random.chance(15) { 2 } else { 1 } {
            let dtype = match self.random.below(12) {
                0 | 2 if kinds.narrow => self.random.pick(&NARROW_FLOATS),
                1 if kinds.jumps => DType::Bool,
                _ => DType::F32,
            };
            let value = self.function(&mut b, &regs, kinds);
            let to = self.new_value(dtype, Kind::Image);
            results.push(b.convert(value, Type::of(dtype)));
            stores.push(to.operand_with(access(dtype, &axes, self.sizes.len())));
            created.push(to);
        }
        let nest = Nest {
            dims,
            inner: 0,
            segments: None,
            loads,
            expr: b.finish(&results),
            reductions: Vec::new(),
            stores,
        };
        self.emit(Instruction::from(nest), GradientModes::ALL);
        self.values.extend(created);
    }

    /// Emits a value that a map computes from one load.
    fn emit_copy(&mut self, dims: Dims, from: Operand, expr: Expr, (to, store): (Value, Access)) {
        let nest = Nest {
            dims,
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(from)],
            expr,
            reductions: Vec::new(),
            stores: vec![to.operand_with(store)],
        };
        self.emit(Instruction::from(nest), GradientModes::ALL);
        self.values.push(to);
    }

    /// Emits a map that reads an image in another order: reversed along one axis, or by computed index.
    fn emit_reordering(&mut self) {
        let Some(source) = self.pick_value(|value| value.kind == Kind::Image) else { return };
        let Sizes { c, h, w, .. } = self.sizes;
        let dims: Dims = self.sizes.all().into_iter().collect();
        let mut strides: Strides =
            [(c * h * w) as isize, (h * w) as isize, w as isize, 1].into_iter().collect();
        let to = self.new_value(source.dtype, Kind::Image);
        let store = Access::contiguous(source.dtype, &dims);
        let mut b = Builder::new();
        let ty = Type::of(source.dtype);
        let len = self.sizes.len();
        let (load, result) = if self.random.chance(50) {
            let axis = self.random.below(4);
            let offset = (dims[axis] - 1) * strides[axis].unsigned_abs();
            strides[axis] = -strides[axis];
            (Access { dtype: source.dtype, offset, strides, len }, b.load(0, ty))
        } else {
            // Element (i * 3) % len.
            let mut index = b.int(0);
            for (axis, stride) in strides.iter().enumerate() {
                let (position, step) = (b.coordinate(axis), b.int(*stride as i64));
                let part = b.mul(position, step);
                index = b.add(index, part);
            }
            let (three, bound) = (b.int(3), b.int(len as i64));
            let product = b.mul(index, three);
            let index = b.binary(BinaryOp::Rem, product, bound);
            let index = b.guard(index, len as i64);
            let load =
                Access { dtype: source.dtype, offset: 0, strides: strides.iter().map(|_| 0).collect(), len };
            (load, b.load_at(0, index, ty))
        };
        self.emit_copy(dims, source.operand_with(load), b.finish(&[result]), (to, store));
    }

    /// Emits a selection of one index along an axis of an image, or zeros outside of a range.
    fn emit_part(&mut self) {
        let Some(source) = self.pick_value(|value| value.kind == Kind::Image) else { return };
        let mut dims: Dims = self.sizes.all().into_iter().collect();
        let to = self.new_value(source.dtype, Kind::Image);
        let mut load = Access::contiguous(source.dtype, &dims);
        let mut store = load.clone();
        let axis = self.random.below(4);
        let from = self.random.below(dims[axis]);
        load.offset = from * load.strides[axis].unsigned_abs();
        if self.random.chance(50) {
            load.strides[axis] = 0;
        } else {
            let mut zeros = Builder::new();
            let zero = zeros.constant(Type::of(source.dtype), 0.0);
            let nest = Nest {
                dims: dims.clone(),
                inner: 0,
                segments: None,
                loads: Vec::new(),
                expr: zeros.finish(&[zero]),
                reductions: Vec::new(),
                stores: vec![to.operand_with(store.clone())],
            };
            self.emit(Instruction::from(nest), GradientModes::ALL);
            store.offset = load.offset;
            dims[axis] = 1 + self.random.below(dims[axis] - from);
        }
        let mut b = Builder::new();
        let result = b.load(0, Type::of(source.dtype));
        self.emit_copy(dims, source.operand_with(load), b.finish(&[result]), (to, store));
    }

    /// Emits an in-place update of an image: channels of another image are added to some of its channels, or
    /// a map overwrites its operand. The image may be read before the update, and is read after it.
    fn emit_update(&mut self, kinds: Kinds) {
        let is_image = |value: &Value| value.kind == Kind::Image && value.dtype == DType::F32;
        let (Some(data), Some(source)) = (self.pick_value(is_image), self.pick_value(is_image)) else {
            return;
        };
        let Sizes { n, c, h, w } = self.sizes;
        let dims: Dims = self.sizes.all().into_iter().collect();
        let contiguous = Access::contiguous(DType::F32, &dims);
        let target = self.new_value(DType::F32, Kind::Image);
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let start = if self.random.chance(50) { x } else { self.function(&mut b, &[x], kinds) };
        self.emit_copy(dims.clone(), data.full_operand(&dims), b.finish(&[start]), (target, contiguous));
        if self.random.chance(50) {
            self.map(kinds);
        }
        if self.random.chance(70) {
            let rows: Vec<i64> = (0..c).map(|_| self.random.below(2 * c) as i64 - c as i64).collect();
            let index = self.builder.constant("rows", &Tensor::i64(&[c], &rows));
            let sums = ScatterAdd {
                outer: n,
                rows: c,
                count: c,
                inner: h * w,
                source: source.full_operand(&[self.sizes.len()]),
                index: Operand::contiguous(index, DType::I64, &[c]),
                target: target.full_operand(&[self.sizes.len()]),
                overwrites: self.random.chance(30),
            };
            // An in-place addition that reads its own target would have no defined order.
            if source.id != target.id {
                self.emit(Instruction::from(sums), GradientModes::ALL);
            }
        } else {
            let mut b = Builder::new();
            let operands = [b.load(0, Type::F32), b.load(1, Type::F32)];
            let result = self.function(&mut b, &operands, kinds);
            // `finish` omits unused loads, but nests list all of them.
            let loads = [target, source].map(|value| Load::Buffer(value.full_operand(&dims))).to_vec();
            let stores = vec![target.full_operand(&dims)];
            let expr = b.finish(&[result]);
            let nest = Nest { dims, inner: 0, segments: None, loads, expr, reductions: Vec::new(), stores };
            self.emit(Instruction::from(nest), GradientModes::ALL);
        }
    }

    /// Emits an in-place update of segments of an image, one per channel, each with a setting. The update may
    /// depend on sums per segment, which may also be stored.
    fn emit_segments(&mut self, kinds: Kinds) {
        let is_image = |value: &Value| value.kind == Kind::Image && value.dtype == DType::F32;
        let is_setting = |value: &Value| value.kind == Kind::Channels;
        let (Some(data), Some(other), Some(setting)) =
            (self.pick_value(is_image), self.pick_value(is_image), self.pick_value(is_setting))
        else {
            return;
        };
        let (count, len) = (self.sizes.c, self.sizes.len());
        let mut cuts: Vec<usize> = (0..2 * count).map(|_| self.random.below(len + 1)).collect();
        cuts.sort_unstable();
        let segments = Segments::new(cuts.chunks_exact(2).map(|bounds| bounds[0]..bounds[1]));
        let target = if self.random.chance(30) {
            let id = self.input(len);
            Value { id, dtype: DType::F32, kind: Kind::Image }
        } else {
            let mut b = Builder::new();
            let x = b.load(0, Type::F32);
            let start = self.function(&mut b, &[x], kinds);
            let target = self.new_value(DType::F32, Kind::Image);
            let (dims, contiguous) = ([len].into_iter().collect(), Access::contiguous(DType::F32, &[len]));
            self.emit_copy(dims, data.full_operand(&[len]), b.finish(&[start]), (target, contiguous));
            target
        };
        let plane = access(DType::F32, &[(count, 0), (len, 1)], len);
        let table = access(DType::F32, &[(count, 1), (len, 0)], count);
        let settings = setting.operand_with(Access { dtype: setting.dtype, ..table.clone() });
        let loads = vec![target.operand_with(plane.clone()), other.operand_with(plane.clone()), settings];
        let mut b = Builder::new();
        let mut regs: Vec<Reg> = (0..loads.len()).map(|slot| b.load(slot, Type::F32)).collect();
        let inner = self.random.below(2);
        let (mut stores, mut results) = (vec![target.operand_with(plane)], Vec::new());
        let mut reductions = Vec::new();
        for k in 0..if inner == 1 { self.random.below(3) } else { 0 } {
            let value = self.function(&mut b, &regs, kinds);
            let op = self.random.pick(&[ReduceOp::Sum, ReduceOp::Max]);
            reductions.push(Reduction { op, value });
            let total = b.reduced(k, Type::F32);
            // An empty segment has no largest element.
            let [lowest, scale] = [-4.0, 1.0 / len as f64].map(|value| b.constant(Type::F32, value));
            let total = if op == ReduceOp::Sum {
                b.mul(total, scale)
            } else {
                b.binary(BinaryOp::Max, total, lowest)
            };
            regs.push(total);
            let state = self.new_value(DType::F32, Kind::Channels);
            results.push(total);
            stores.push(state.operand_with(table.clone()));
            self.values.push(state);
        }
        let result = self.function(&mut b, &regs, kinds);
        results.insert(0, result);
        let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
        let (expr, values) = b.finish_keeping(&results, &values);
        reductions.iter_mut().zip(values).for_each(|(reduction, value)| reduction.value = value);
        let dims = [count, len].into_iter().collect();
        let loads = loads.into_iter().map(Load::Buffer).collect();
        let nest = Nest { dims, inner, segments: Some(segments), loads, expr, reductions, stores };
        self.emit(Instruction::from(nest), GradientModes::ALL);
    }

    /// Emits sums over the elements of each channel, or over all elements, optionally with a result at every
    /// point.
    fn emit_row_sums(&mut self, kinds: Kinds) {
        let Sizes { n, c, h, w } = self.sizes;
        let (image, plane) = ((c * h * w) as isize, (h * w) as isize);
        let (axes, kind, inner) = match self.random.below(4) {
            0 => (vec![(n * c * h * w, 1)], Kind::One, 1),
            1 => (vec![(c, plane), (n, image), (h, w as isize), (w, 1)], Kind::Channels, 3),
            _ => (vec![(c, plane), (n, image), (h * w, 1)], Kind::Channels, 2),
        };
        let dims: Dims = axes.iter().map(|&(size, _)| size).collect();
        let loads = self.loads(&axes);
        let mut b = Builder::new();
        let regs: Vec<Reg> = loads
            .iter()
            .enumerate()
            .map(|(slot, load)| {
                let reg = b.load(slot, Type::of(load.dtype()));
                b.convert(reg, Type::F32)
            })
            .collect();
        let mut reductions = Vec::new();
        let mut sums: Vec<Reg> = Vec::new();
        let count = b.constant(Type::F32, 1.0 / (n * h * w) as f64);
        for k in 0..1 + self.random.below(2) {
            let mut operands = regs.clone();
            if self.random.chance(60) {
                operands.extend(&sums);
            }
            let value = self.function(&mut b, &operands, kinds);
            let op = self.random.pick(&[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max]);
            reductions.push(Reduction { op, value });
            let total = b.reduced(k, Type::F32);
            sums.push(if op == ReduceOp::Sum { b.mul(total, count) } else { total });
        }
        let per_row: Strides =
            axes.iter().enumerate().map(|(k, _)| isize::from(k == 0 && kind == Kind::Channels)).collect();
        let (mut stores, mut results, mut created) = (Vec::new(), Vec::new(), Vec::new());
        for &sum in &sums {
            let to = self.new_value(DType::F32, kind);
            let len = self.len_of(kind);
            stores.push(to.operand_with(Access {
                dtype: DType::F32,
                offset: 0,
                strides: per_row.clone(),
                len,
            }));
            results.push(sum);
            created.push(to);
        }
        if self.random.chance(25) {
            let to = self.new_value(DType::F32, Kind::Image);
            let operands: Vec<Reg> = regs.iter().chain(&sums).copied().collect();
            results.push(self.function(&mut b, &operands, kinds));
            stores.push(to.operand_with(access(DType::F32, &axes, self.sizes.len())));
            created.push(to);
        }
        let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
        let (expr, values) = b.finish_keeping(&results, &values);
        reductions.iter_mut().zip(values).for_each(|(reduction, value)| reduction.value = value);
        let nest = Nest { dims, inner, segments: None, loads, expr, reductions, stores };
        self.emit(Instruction::from(nest), GradientModes::ALL);
        self.values.extend(created);
    }

    /// Emits a map over the channels.
    fn emit_channel_map(&mut self, kinds: Kinds) {
        let c = self.sizes.c;
        let mut loads = Vec::new();
        for _ in 0..1 + self.random.below(2) {
            let Some(value) = self.pick_value(|value| value.kind == Kind::Channels) else { return };
            loads.push(Load::Buffer(value.full_operand(&[c])));
        }
        let mut b = Builder::new();
        let regs: Vec<Reg> = (0..loads.len()).map(|slot| b.load(slot, Type::F32)).collect();
        let result = self.function(&mut b, &regs, kinds);
        let to = self.new_value(DType::F32, Kind::Channels);
        let nest = Nest {
            dims: [c].into_iter().collect(),
            inner: 0,
            segments: None,
            loads,
            expr: b.finish(&[result]),
            reductions: Vec::new(),
            stores: vec![to.full_operand(&[c])],
        };
        self.emit(Instruction::from(nest), GradientModes::ALL);
        self.values.push(to);
    }

    /// Builds an epilogue over the images that adds its loads to the product.
    fn epilogue(&mut self, dims: &[usize], kinds: Kinds) -> (Nest, Value) {
        let mut steps: Vec<isize> = vec![1];
        for &dim in dims[1..].iter().rev() {
            steps.insert(0, steps[0] * dim as isize);
        }
        let axes: Vec<(usize, isize)> = dims.iter().copied().zip(steps).collect();
        let dtype = if kinds.narrow && self.random.chance(20) {
            self.random.pick(&NARROW_FLOATS)
        } else {
            DType::F32
        };
        let to = self.new_value(dtype, Kind::Image);
        let mut loads = vec![Load::Accumulator(DType::F32)];
        if self.random.chance(30) {
            loads.extend(self.loads(&axes));
        }
        let mut b = Builder::new();
        let regs: Vec<Reg> = loads
            .iter()
            .enumerate()
            .map(|(slot, load)| {
                let reg = b.load(slot, Type::of(load.dtype()));
                b.convert(reg, Type::F32)
            })
            .collect();
        let result = if regs.len() > 1 { self.function(&mut b, &regs, kinds) } else { regs[0] };
        let nest = Nest {
            dims: dims.iter().copied().collect(),
            inner: 0,
            segments: None,
            loads,
            expr: b.finish(&[result]),
            reductions: Vec::new(),
            stores: vec![to.full_operand(dims)],
        };
        (nest, to)
    }

    /// Emits a copy of a matrix in a narrow type, transposed or not.
    fn narrow_copy(&mut self, matrix: Operand, dims: [usize; 2]) -> Operand {
        let dtype = self.random.pick(&NARROW_FLOATS);
        let copy = self.builder.work("copy", dtype, dims.iter().product());
        let store = Operand::contiguous(copy, dtype, &dims);
        let mut from = matrix;
        if self.random.chance(30) {
            from.access.strides.reverse();
        }
        let mut b = Builder::new();
        let element = b.load(0, Type::F32);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(from)],
            expr: b.finish(&[element]),
            reductions: Vec::new(),
            stores: vec![store.clone()],
        };
        self.emit(Instruction::from(nest), GradientModes::ALL);
        store
    }

    fn matmul(&mut self, kinds: Kinds) {
        let Sizes { n, c, h, w } = self.sizes;
        let (m, k) = (n * c, h * w);
        let is_factor = |dtype| dtype == DType::F32 || kinds.narrow && UnaryOp::rounding_to(dtype).is_some();
        let Some(a) = self.pick_value(|value| value.kind == Kind::Image && is_factor(value.dtype)) else {
            return;
        };
        let mut weights = Operand::contiguous(self.input(k * k), DType::F32, &[k, k]);
        if kinds.narrow && self.random.chance(50) {
            weights = self.narrow_copy(weights, [k, k]);
        }
        let (epilogue, to) = self.epilogue(&[m, k], kinds);
        if self.random.chance(25) {
            let (a, b) = (a.full_operand(&[m, k]), self.quantized_factor(k, kinds));
            let precision = Precision::F32;
            let product = QuantizedMatMul { m, n: k, k, a, b, precision, epilogue };
            self.emit(Instruction::from(product), GradientModes::ALL);
            self.values.push(to);
            return;
        }
        if self.random.chance(15) {
            let product = self.integer_product([m, k], epilogue);
            self.emit(Instruction::from(product), GradientModes::ALL);
            self.values.push(to);
            return;
        }
        if self.random.chance(50) {
            weights.access.strides.reverse();
        }
        self.emit(
            Instruction::from(MatMul {
                batch: Dims::new(),
                m,
                n: k,
                k,
                a: a.full_operand(&[m, k]),
                b: weights,
                rounded: [None; 2],
                precision: Precision::F32,
                epilogue,
            }),
            GradientModes::ALL,
        );
        self.values.push(to);
    }

    /// Builds a square factor of packed integers with `size` columns.
    fn quantized_factor(&mut self, size: usize, kinds: Kinds) -> QuantizedFactor {
        let (bits, block) = (self.random.pick(&[2, 4, 8]), self.random.pick(&[16, 32, 48]));
        let numbers = match bits == 4 && self.random.chance(40) {
            true => QuantizedNumbers::Table(std::array::from_fn(|_| self.random.unit())),
            false => QuantizedNumbers::Distances { zero_point: (1 << (bits - 1)) as f32 },
        };
        let blocks = size.div_ceil(block);
        let is_high_first = self.random.chance(30);
        let matrix = QuantizedMatrix { bits, is_high_first, block, blocks, lines: size, numbers };
        let bytes: Vec<u8> = (0..matrix.num_bytes()).map(|_| self.random.below(256) as u8).collect();
        let bytes = Tensor::from_slice(DType::U8, &[bytes.len()], &bytes).stored();
        let bytes = self.builder.constant("integers", &bytes);
        // The decoded elements are at most about one.
        let scale = 1.0 / (1 << (bits - 1)) as f32;
        let mut of_blocks = |name: &str, scale: f32| {
            let values: Vec<f32> = (0..matrix.num_blocks()).map(|_| scale * self.random.unit()).collect();
            self.builder.constant(name, &Tensor::f32(&[values.len()], &values).stored())
        };
        let scales = of_blocks("scales", scale);
        let zero_points = of_blocks("zero points", 1.0 / scale);
        let has_zero_points = !matches!(numbers, QuantizedNumbers::Table(_)) && self.random.chance(50);
        QuantizedFactor {
            matrix,
            has_lines_of_columns: self.random.chance(50),
            bytes,
            scales,
            zero_points: has_zero_points.then_some(zero_points),
            rounded: (kinds.narrow && self.random.chance(30)).then_some(DType::F16),
        }
    }

    /// Builds a product of constant bytes with an epilogue for a product of floats.
    fn integer_product(&mut self, [m, n]: [usize; 2], epilogue: Nest) -> IntegerProduct {
        let k = 1 + self.random.below(70);
        let mut bytes = |name: &str, dtype: DType, dims: &[usize]| {
            let values: Vec<u8> = (0..dims.iter().product()).map(|_| self.random.below(256) as u8).collect();
            let tensor = Tensor::from_slice(dtype, dims, &values).stored();
            Operand::contiguous(self.builder.constant(name, &tensor), dtype, dims)
        };
        let types = [DType::U8, DType::I8];
        let [of_a, of_b] = [0, 1].map(|side| types[(m + n + k + side * n) % 2]);
        let (a, b) = (bytes("bytes", of_a, &[m, k]), bytes("bytes", of_b, &[k, n]));
        let mut of_rows = bytes("zero points", of_a, &[m]);
        of_rows.access.strides.push(0);
        let mut of_columns = bytes("zero points", of_b, &[n]);
        of_columns.access.strides.insert(0, 0);
        let zero_points = [of_rows, of_columns].map(|operand| self.random.chance(50).then_some(operand));
        // The sums are as large as the other values of the program.
        let mut b_expr = Builder::new();
        let outputs = b_expr.inline(&epilogue.expr, |b, slot, ty| {
            if slot > 0 {
                return b.load(slot, ty);
            }
            let sum = b.load(0, Type::I32);
            let (sum, scale) = (b.convert(sum, ty), b.constant(ty, 1.0 / f64::from(1 << 20)));
            b.mul(sum, scale)
        });
        let mut epilogue = Nest { expr: b_expr.finish(&outputs), ..epilogue };
        epilogue.loads[0] = Load::Accumulator(DType::I32);
        let shape = IntegerShape::Matrices { batch: Dims::new(), m, n, k };
        IntegerProduct { shape, a, b, zero_points, epilogue }
    }

    fn input(&mut self, len: usize) -> BufferId {
        let id = self.builder.plane("weights", DType::F32, len, PlaneId(0), self.plane_end);
        self.plane_end += len * 4;
        id
    }

    /// Builds a window with one position per element of the axis; each element is covered by one of its cells
    /// at some position.
    fn covering(&mut self, size: usize) -> SlidingAxis {
        let random = &mut self.random;
        let (kernel, dilation) = (random.pick(&[1, 2, 3, 3, 4]), random.pick(&[1, 1, 2, 3]));
        let before = (random.below(kernel) * dilation) as isize;
        SlidingAxis { input: size, output: size, kernel, stride: 1, dilation, padding_before: before }
    }

    /// Builds a window with one position per element of the axis; some positions may cover only padding.
    fn axis(&mut self, size: usize) -> SlidingAxis {
        let axis = self.covering(size);
        if self.random.chance(70) {
            return axis;
        }
        let before = self.random.below(4) as isize - 1;
        SlidingAxis { stride: self.random.pick(&[1, 2]), padding_before: before, ..axis }
    }

    fn conv(&mut self, kinds: Kinds) {
        let Sizes { n, c, h, w } = self.sizes;
        let Some(a) = self.pick_value(|value| value.kind == Kind::Image && value.dtype == DType::F32) else {
            return;
        };
        let depthwise = self.random.chance(40);
        let (groups, channels) = if depthwise { (c, 1) } else { (1, c) };
        let axes: SlidingAxes = [self.axis(h), self.axis(w)].into_iter().collect();
        let cells: usize = axes.iter().map(|axis| axis.kernel).product();
        let weights = self.input(groups * channels * channels * cells);
        let shape = ConvShape {
            pass: self.random.pick(&[ConvPass::Output, ConvPass::InputGradient]),
            batch: n,
            groups,
            channels_in: channels,
            channels_out: channels,
            axes,
        };
        let [a_dims, b_dims, dims] = shape.operands();
        let (epilogue, to) = self.epilogue(&dims, kinds);
        let (a, b) = (a.full_operand(&a_dims), Operand::contiguous(weights, DType::F32, &b_dims));
        let conv = Conv { shape, a, b, precision: Precision::F32, epilogue };
        self.emit(Instruction::from(conv), GradientModes::ALL);
        self.values.push(to);
    }

    fn window(&mut self, kinds: Kinds) {
        let Sizes { n, c, h, w } = self.sizes;
        let Some(source) = self.pick_value(|value| value.kind == Kind::Image && value.dtype == DType::F32)
        else {
            return;
        };
        let pass = self.random.pick(&[WindowPass::Max, WindowPass::Sum, WindowPass::SumGradient]);
        // Over rows and columns, additionally over channels, or over the flattened elements of a channel.
        let (planes, sizes) = match self.random.below(4) {
            0 => (n * c, vec![h * w]),
            1 => (n, vec![c, h, w]),
            _ => (n * c, vec![h, w]),
        };
        let axis = if pass == WindowPass::Max { ProgramGenerator::covering } else { ProgramGenerator::axis };
        let axes: SlidingAxes = sizes.into_iter().map(|size| axis(self, size)).collect();
        let len = self.sizes.len();
        let positions = (pass == WindowPass::Max && kinds.jumps && self.random.chance(60))
            .then(|| Operand::contiguous(self.builder.work("positions", DType::I64, len), DType::I64, &[len]))
            .map(WindowIndex::with_element_positions);
        let shape = |pass| WindowShape { pass, planes, axes: axes.clone() };
        let to = self.new_value(DType::F32, Kind::Image);
        let (source, target) = (source.full_operand(&[len]), to.full_operand(&[len]));
        let window = Window { shape: shape(pass), source, index: positions.clone(), target };
        self.emit(Instruction::from(window), GradientModes::ALL);
        if positions.is_some()
            && self.random.chance(70)
            && let Some(gradient) =
                self.pick_value(|value| value.kind == Kind::Image && value.dtype == DType::F32)
        {
            let input_gradient = self.new_value(DType::F32, Kind::Image);
            let (source, target) = (gradient.full_operand(&[len]), input_gradient.full_operand(&[len]));
            let shape = shape(WindowPass::MaxGradient);
            let window = Window { shape, source, index: positions, target };
            self.emit(Instruction::from(window), GradientModes::ALL);
            self.values.push(input_gradient);
        }
        self.values.push(to);
    }

    /// Emits a value that is added or written to a part of a plane, or a state that moves towards a value in
    /// every gradient mode.
    fn emit_state(&mut self) {
        let Some(value) = self.pick_value(|value| value.dtype == DType::F32) else { return };
        let len = self.len_of(value.kind);
        let target = Operand::contiguous(self.input(len), DType::F32, &[len]);
        let instruction = |add: bool| {
            let mut b = Builder::new();
            let x = b.load(0, Type::F32);
            let (mut loads, mut result) = (vec![Load::Buffer(value.full_operand(&[len]))], x);
            if add {
                let old = b.load(1, Type::F32);
                result = b.add(old, x);
                loads.push(Load::Buffer(target.clone()));
            }
            Instruction::from(Nest {
                dims: [len].into_iter().collect(),
                inner: 0,
                segments: None,
                loads,
                expr: b.finish(&[result]),
                reductions: Vec::new(),
                stores: vec![target.clone()],
            })
        };
        if self.random.chance(70) {
            self.emit(instruction(true), GradientModes::only(GradientMode::Accumulate));
            self.emit(instruction(false), GradientModes::only(GradientMode::Overwrite));
        } else {
            self.emit(instruction(true), GradientModes::ALL);
        }
    }
}

impl RandomProgram {
    /// Builds the program of a seed, deterministically.
    ///
    /// # Panics
    /// If the generator makes an error.
    #[must_use]
    pub fn new(seed: u64, kinds: Kinds) -> RandomProgram {
        let mut random = Random(seed);
        let mut size = |sizes: &[usize]| random.pick(sizes);
        let sizes = match kinds.size {
            Size::Small => Sizes {
                n: size(&[1, 2, 3]),
                c: size(&[1, 2, 3, 4]),
                h: size(&[1, 2, 3, 5]),
                w: size(&[1, 2, 4]),
            },
            Size::Middle => {
                Sizes { n: size(&[1, 2, 7]), c: size(&[3, 18, 21]), h: size(&[4, 5]), w: size(&[5, 6]) }
            }
            Size::Large => {
                Sizes { n: size(&[2, 5]), c: size(&[3, 16]), h: size(&[16, 23]), w: size(&[20, 33]) }
            }
        };
        let mut generator = ProgramGenerator {
            random,
            builder: ProgramBuilder::new(),
            sizes,
            values: Vec::new(),
            node: "node".into(),
            plane_end: 0,
        };
        for kind in [Kind::Image, Kind::Image, Kind::Channels, Kind::One] {
            let value = generator.new_value(DType::F32, kind);
            generator.values.push(value);
        }
        let inputs = generator.values.iter().map(|value| value.id).collect();
        for _ in 0..3 + generator.random.below(10) {
            if kinds.segments && generator.random.chance(30) {
                generator.emit_segments(kinds);
                continue;
            }
            if kinds.updates && generator.random.chance(30) {
                generator.emit_update(kinds);
                continue;
            }
            match generator.random.below(if kinds.parts { 17 } else { 14 }) {
                0..=4 => generator.map(kinds),
                5 => generator.emit_reordering(),
                6..=8 => generator.emit_row_sums(kinds),
                9 => generator.emit_channel_map(kinds),
                10 => generator.matmul(kinds),
                11 => generator.conv(kinds),
                12 if kinds.windows => generator.window(kinds),
                13..=15 if kinds.parts => generator.emit_part(),
                _ => generator.emit_state(),
            }
        }
        let mut outputs = Vec::new();
        for k in 4..generator.values.len() {
            let last = k + 1 == generator.values.len();
            if last || generator.random.chance(20) {
                outputs.push(generator.values[k].id);
            }
        }
        RandomProgram { builder: generator.builder, inputs, outputs }
    }

    /// Sets the precision of inner products.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> RandomProgram {
        self.builder = self.builder.with_precision(precision);
        self
    }

    /// Finishes the program, with or without fusion.
    ///
    /// # Panics
    /// If it cannot be planned.
    #[must_use]
    pub fn finish(self, fused: bool) -> Program {
        let RandomProgram { builder, inputs, outputs } = self;
        let finished =
            if fused { builder.finish(inputs, outputs) } else { builder.finish_unfused(inputs, outputs) };
        finished.expect("small programs have small plans")
    }
}

/// Returns the reference evaluator as a backend.
#[must_use]
pub fn reference() -> Arc<dyn Backend> {
    Arc::new(Reference)
}

/// Returns the float32 numbers of a result of [`run_program`].
pub fn numbers(bytes: &[u8]) -> impl Iterator<Item = f64> + '_ {
    bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

/// Runs a program on random values that depend on the seed (and for large images on the plane's size).
/// Returns the bytes of its outputs, then of the plane.
///
/// # Panics
/// If the backend cannot run it.
#[must_use]
pub fn run_program(
    program: &Arc<Program>,
    backend: &Arc<dyn Backend>,
    seed: u64,
    entry: GradientMode,
) -> Vec<Vec<u8>> {
    let bytes = program.planes.iter().map(|used| used.bytes).max().unwrap_or(0).max(MAX_PLANE_BYTES);
    let plane = backend.allocate(bytes, bytes).expect("a little memory");
    run_program_on(program, backend, seed, entry, &plane)
}

/// Runs a program like [`run_program`] on an existing plane, which is overwritten. Planes of equal length
/// give the same results.
///
/// # Panics
/// If the backend cannot run it.
#[must_use]
pub fn run_program_on(
    program: &Arc<Program>,
    backend: &Arc<dyn Backend>,
    seed: u64,
    entry: GradientMode,
    plane: &Memory,
) -> Vec<Vec<u8>> {
    let mut random = Random(!seed);
    let mut floats =
        |bytes: usize| -> Vec<u8> { (0..bytes / 4).flat_map(|_| random.unit().to_le_bytes()).collect() };
    let bytes = plane.len();
    const WORKS: &str = "the device works";
    plane.write(0, &floats(bytes)).expect(WORKS);
    let executable = backend.compile(program.clone()).expect("every instruction can run");
    let mut work = Workspace::new(backend.clone());
    work.reserve(program.work_bytes, executable.scratch_bytes()).expect("a little memory");
    // The initial content of the arena must not matter.
    work.arena().write(0, &vec![0xa5; program.work_bytes]).expect(WORKS);
    for &id in &program.inputs {
        let buffer = program.buffer(id);
        let bytes = floats(buffer.bytes());
        if let BufferLocation::Work(offset) = buffer.location {
            work.arena().write(offset, &bytes).expect(WORKS);
        }
    }
    executable
        .run(&Bindings { planes: &[plane] }, &mut work, entry, Scalars::default())
        .expect("indices are in range");
    let read = |&id: &BufferId| {
        let buffer = program.buffer(id);
        match buffer.location {
            BufferLocation::Work(offset) => work.arena().to_vec(offset, buffer.bytes()).expect(WORKS),
            BufferLocation::Plane(_, offset) => plane.to_vec(offset, buffer.bytes()).expect(WORKS),
            BufferLocation::Constant(number) => program.constants[number].data().to_vec(),
        }
    };
    program.outputs.iter().map(read).chain([plane.to_vec(0, bytes).expect(WORKS)]).collect()
}
