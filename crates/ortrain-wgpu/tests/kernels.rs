//! Kernels of whole groups on the software driver, at sizes around the edges of their tiles, beside the reference evaluator.

use std::sync::{Arc, OnceLock};

use ortrain_expr::{
    Access, Builder, ConvPass, ConvShape, DType, Dims, Precision, SlidingAxis, Type, UnaryOp,
};
use ortrain_program::{
    Backend, Bf16Fallback, Bindings, BufferId, Conv, Entries, Entry, Instruction, Load, MatMul, Nest,
    Operand, Place, PlaneId, Program, ProgramBuilder, Reference, Scalars, Workspace,
};
use ortrain_testkit::programs::numbers;
use ortrain_testkit::tolerance;
use ortrain_wgpu::{Adapter, Wgpu};

const WORKS: &str = "the device works";

/// The device, at any precision.
fn device() -> Arc<dyn Backend> {
    static DEVICE: OnceLock<Arc<dyn Backend>> = OnceLock::new();
    let open = || Wgpu::open(Adapter::Software).unwrap_or_else(|error| panic!("{error}"));
    let emulated = || open().with_precision(Precision::Bf16x6, Bf16Fallback::Emulated);
    DEVICE.get_or_init(|| emulated().expect("it rounds what it loads")).clone()
}

/// Numbers in -1..1 that look random.
fn numbers_of(seed: usize, count: usize) -> Vec<f32> {
    let bits =
        |k: usize| (k as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed as u32).wrapping_mul(0x85eb_ca6b);
    (0..count).map(|k| ((bits(k) ^ (bits(k) >> 15)) >> 8) as f32 / (1u32 << 23) as f32 - 1.0).collect()
}

/// A program under construction, whose inputs have values.
#[derive(Default)]
struct Making {
    builder: ProgramBuilder,
    inputs: Vec<(BufferId, Vec<f32>)>,
    outputs: Vec<BufferId>,
    /// The values of the plane so far.
    plane: Vec<f32>,
}

/// A program and the values of its inputs and of its plane.
struct Made {
    program: Arc<Program>,
    inputs: Vec<Vec<f32>>,
    plane: Vec<f32>,
}

impl Making {
    fn new(precision: Precision) -> Making {
        Making { builder: ProgramBuilder::new().precision(precision), ..Making::default() }
    }

    fn given(&mut self, values: Vec<f32>) -> BufferId {
        let id = self.builder.work("x", DType::F32, values.len());
        self.inputs.push((id, values));
        id
    }

    /// A number of random inputs.
    fn random(&mut self, count: usize) -> BufferId {
        self.given(numbers_of(self.inputs.len() * 77 + count, count))
    }

    fn result(&mut self, len: usize) -> BufferId {
        let id = self.builder.work("y", DType::F32, len);
        self.outputs.push(id);
        id
    }

    /// A part of the plane.
    fn state(&mut self, len: usize) -> BufferId {
        let at = 4 * self.plane.len();
        self.plane.extend(numbers_of(self.plane.len() + 5, len));
        self.builder.plane("w", DType::F32, len, PlaneId(0), at)
    }

    fn emit(&mut self, instruction: impl Into<Instruction>) {
        self.builder.emit(instruction.into(), Entries::ALL, &"node".into()).expect("it is sound");
    }

    fn finish(self) -> Made {
        let ids = self.inputs.iter().map(|(id, _)| *id).collect();
        let program = self.builder.finish_unfused(ids, self.outputs).expect("it can be planned");
        let inputs = self.inputs.into_iter().map(|(_, values)| values).collect();
        Made { program: Arc::new(program), inputs, plane: self.plane }
    }
}

impl Made {
    /// The numbers of its results, then those of the plane.
    fn run(&self, backend: &Arc<dyn Backend>) -> Vec<Vec<u8>> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let program = &self.program;
        let plane_bytes =
            program.planes.iter().map(|used| used.bytes).max().unwrap_or(0).max(4 * self.plane.len());
        let plane = backend.allocate(plane_bytes.max(4), plane_bytes.max(4)).expect("a little memory");
        if !self.plane.is_empty() {
            plane.write(0, &bytes(&self.plane)).expect(WORKS);
        }
        let executable = backend.compile(program.clone()).expect("it can run");
        let mut work = Workspace::new(backend.clone());
        work.reserve(program.work_bytes, executable.scratch_bytes()).expect("a little memory");
        work.arena().write(0, &vec![0xa5; program.work_bytes]).expect(WORKS);
        for (&id, values) in program.inputs.iter().zip(&self.inputs) {
            if let Place::Work(offset) = program.buffer(id).place {
                work.arena().write(offset, &bytes(values)).expect(WORKS);
            }
        }
        let planes = Bindings { planes: &[&plane] };
        executable.run(&planes, &mut work, Entry::Overwrite, Scalars::default()).expect("it runs");
        let read = |&id: &BufferId| match program.buffer(id).place {
            Place::Work(offset) => work.arena().to_vec(offset, program.buffer(id).bytes()).expect(WORKS),
            _ => unreachable!("results are work"),
        };
        let plane = plane.to_vec(0, 4 * self.plane.len()).expect(WORKS);
        program.outputs.iter().map(read).chain([plane]).collect()
    }

    /// Checks the results of the device, and that a second run has the same bits.
    fn agrees(&self, what: &str) {
        let want = self.run(&(Arc::new(Reference) as Arc<dyn Backend>));
        let [got, again] = [(); 2].map(|()| self.run(&device()));
        assert!(got == again, "{what}: two runs differ");
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            let largest =
                numbers(want).filter(|want| want.is_finite()).fold(1.0f64, |most, want| most.max(want.abs()));
            for (at, (got, want)) in numbers(got).zip(numbers(want)).enumerate() {
                let is_same = got == want || (got.is_nan() && want.is_nan());
                let is_close = is_same || (got - want).abs() <= tolerance::FLOAT32 * largest;
                assert!(is_close, "{what}: element {at} of result {k} is {got}, and not {want}");
            }
        }
    }
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain,
    Transposed,
    /// Every second element.
    Strided,
    /// The same row again and again.
    OneRow,
    /// The same column again and again.
    OneColumn,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Plain, Layout::Transposed, Layout::Strided, Layout::OneRow, Layout::OneColumn];

impl Layout {
    /// An access to so many matrices, of which there may be one for all.
    fn access(self, batch: &[usize], [rows, columns]: [usize; 2], is_one: bool) -> Access {
        let (row, column) = (rows as isize, columns as isize);
        let (own, step) = match self {
            Layout::Plain => ([column, 1], row * column),
            Layout::Transposed => ([1, row], row * column),
            Layout::Strided => ([2 * column, 2], 2 * row * column),
            Layout::OneRow => ([0, 1], column),
            Layout::OneColumn => ([1, 0], row),
        };
        let step = if is_one { 0 } else { step };
        let strides = batch.iter().map(|_| step).chain(own).collect();
        let dims: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
        let mut access = Access { dtype: DType::F32, offset: 3, strides, len: usize::MAX };
        access.len = access.reach(&dims).map_or(0, |(_, high)| high as usize + 1);
        access
    }
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    Store,
    /// With a bias for each column, through the hyperbolic tangent.
    Activated,
    /// Added to what a plane holds.
    Accumulated,
    /// The result, and twice the result in another order of axes.
    Twice,
}

const FINISHES: [Finish; 4] = [Finish::Store, Finish::Activated, Finish::Accumulated, Finish::Twice];

impl Finish {
    fn nest(self, making: &mut Making, dims: &[usize]) -> Nest {
        let len = dims.iter().product();
        let whole = |id: BufferId| Operand::whole(id, DType::F32, dims);
        let mut loads = vec![Load::Accumulator(DType::F32)];
        let mut b = Builder::new();
        let product = b.load(0, Type::F32);
        let (results, stores) = match self {
            Finish::Store => (vec![product], vec![whole(making.result(len))]),
            Finish::Activated => {
                let columns = dims[dims.len() - 1];
                let bias = making.random(columns);
                let access = Access::broadcast(DType::F32, &[columns], dims);
                loads.push(Load::Buffer(Operand { buffer: bias, access }));
                let bias = b.load(1, Type::F32);
                let sum = b.add(product, bias);
                (vec![b.unary(UnaryOp::Tanh, sum)], vec![whole(making.result(len))])
            }
            Finish::Accumulated => {
                let state = making.state(len);
                loads.push(Load::Buffer(whole(state)));
                let old = b.load(1, Type::F32);
                (vec![b.add(old, product)], vec![whole(state)])
            }
            Finish::Twice => {
                let mut turned = whole(making.result(len));
                let axis = dims.len() - 2;
                turned.access.strides[axis] = 1;
                turned.access.strides[axis + 1] = dims[axis] as isize;
                (vec![product, b.add(product, product)], vec![whole(making.result(len)), turned])
            }
        };
        Nest::elementwise(Dims::from_slice(dims), loads, b.finish(&results), stores)
    }
}

/// A matrix product that is tried.
#[derive(Clone, Debug)]
struct Product {
    batch: Vec<usize>,
    sides: [usize; 3],
    layouts: [Layout; 2],
    precision: Precision,
    /// What factors are rounded to.
    rounded: [Option<DType>; 2],
    finish: Finish,
}

impl Product {
    fn plain(sides: [usize; 3]) -> Product {
        Product {
            batch: Vec::new(),
            sides,
            layouts: [Layout::Plain; 2],
            precision: Precision::F32,
            rounded: [None; 2],
            finish: Finish::Store,
        }
    }

    fn made(&self) -> Made {
        let mut making = Making::new(self.precision);
        let [m, n, k] = self.sides;
        let accesses = [(self.layouts[0], [m, k], false), (self.layouts[1], [k, n], self.batch.len() > 1)]
            .map(|(layout, size, is_one)| layout.access(&self.batch, size, is_one));
        let [a, b] = accesses.map(|access| Operand { buffer: making.random(access.len), access });
        let dims: Vec<usize> = self.batch.iter().copied().chain([m, n]).collect();
        let epilogue = self.finish.nest(&mut making, &dims);
        let batch = Dims::from_slice(&self.batch);
        let (precision, rounded) = (self.precision.of_product(self.sides), self.rounded);
        making.emit(MatMul { batch, m, n, k, a, b, rounded, precision, epilogue });
        making.finish()
    }

    fn agrees(&self) {
        self.made().agrees(&format!("{self:?}"));
    }
}

const EDGES: [usize; 12] = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 130];

#[test]
fn products_at_the_edges_of_tiles() {
    for (i, &m) in EDGES.iter().enumerate() {
        for (j, &n) in EDGES.iter().enumerate() {
            let at = i * EDGES.len() + j;
            let k = [1, 15, 16, 17, 40][at % 5];
            let layouts = [LAYOUTS[(at / 2) % 3], LAYOUTS[(at / 6) % 3]];
            Product { layouts, finish: FINISHES[at % 4], ..Product::plain([m, n, k]) }.agrees();
        }
    }
}

#[test]
fn products_of_any_layout() {
    for a in LAYOUTS {
        for b in LAYOUTS {
            for (sides, batch) in [([33, 65, 19], vec![2]), ([3, 70, 50], vec![2, 2]), ([70, 8, 33], vec![])]
            {
                Product { layouts: [a, b], batch, ..Product::plain(sides) }.agrees();
            }
        }
    }
}

/// Sums that are cut into parts.
#[test]
fn long_sums_of_few_tiles() {
    for (at, sides) in
        [[64, 64, 4096], [65, 33, 4096], [9, 40, 700], [1, 1, 4096], [8, 33, 1500], [100, 2, 4100]]
            .into_iter()
            .enumerate()
    {
        for layouts in [[Layout::Plain; 2], [Layout::Transposed; 2], [Layout::Strided, Layout::OneColumn]] {
            let batch = if at % 2 == 0 { vec![] } else { vec![2] };
            Product { layouts, finish: FINISHES[at % 4], batch, ..Product::plain(sides) }.agrees();
        }
    }
}

/// Tiles of 64 by 64, which are for products that have many.
#[test]
fn products_of_many_large_tiles() {
    let batch = vec![40];
    let [activated, twice] = [Finish::Activated, Finish::Twice];
    Product { batch: batch.clone(), finish: activated, ..Product::plain([65, 70, 17]) }.agrees();
    let layouts = [Layout::Transposed; 2];
    Product { batch: batch.clone(), finish: twice, layouts, ..Product::plain([127, 66, 20]) }.agrees();
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        Product { batch: batch.clone(), precision, ..Product::plain([65, 128, 17]) }.agrees();
    }
}

#[test]
fn rounded_products() {
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        for (sides, layouts) in [
            ([17, 33, 17], [Layout::Plain, Layout::Transposed]),
            ([64, 64, 40], [Layout::Transposed, Layout::Plain]),
            ([33, 32, 700], [Layout::Plain, Layout::Plain]),
        ] {
            Product { precision, layouts, finish: Finish::Activated, ..Product::plain(sides) }.agrees();
        }
    }
    let to = [Some(DType::BF16), Some(DType::F16)];
    for rounded in [to, [to[1], None], [None, to[0]]] {
        for sides in [[33, 40, 20], [5, 40, 90]] {
            Product { rounded, ..Product::plain(sides) }.agrees();
        }
    }
}

/// A convolution that is tried: images, groups, channels of a group, axes, and cells.
fn convolution(
    pass: ConvPass,
    shape: [usize; 4],
    axes: &[SlidingAxis],
    precision: Precision,
    finish: Finish,
) {
    let [batch, groups, channels_in, channels_out] = shape;
    let axes = axes.iter().copied().collect();
    let shape = ConvShape { pass, batch, groups, channels_in, channels_out, axes };
    let [a_dims, b_dims, dims] = shape.operands();
    let mut making = Making::new(precision);
    let [a, b] =
        [a_dims, b_dims].map(|dims| Operand::whole(making.random(dims.iter().product()), DType::F32, &dims));
    let epilogue = finish.nest(&mut making, &dims);
    let precision = precision.of_product(shape.product_sides());
    let what = format!("{shape:?} {precision} {finish:?}");
    making.emit(Conv { shape, a, b, precision, epilogue });
    making.finish().agrees(&what);
}

const PASSES: [ConvPass; 3] = [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient];

/// An axis that a window slides along.
fn axis(
    input: usize,
    kernel: usize,
    [stride, dilation]: [usize; 2],
    before: isize,
    after: isize,
) -> SlidingAxis {
    let room = input as isize + before + after - ((kernel - 1) * dilation) as isize - 1;
    let output = room.max(0).unsigned_abs() / stride + 1;
    SlidingAxis { input, output, kernel, stride, dilation, before }
}

#[test]
fn convolutions_of_every_pass() {
    let near = [axis(9, 3, [1, 1], 1, 1), axis(10, 3, [1, 1], 1, 1)];
    let moved = [axis(11, 3, [2, 1], 1, 2), axis(12, 2, [1, 3], 0, 1)];
    let point = [axis(6, 1, [1, 1], 0, 0), axis(7, 1, [1, 1], 0, 0)];
    let line = [axis(40, 5, [3, 2], 4, 4)];
    let space = [axis(4, 2, [1, 1], 1, 0), axis(5, 3, [2, 1], 1, 1), axis(3, 1, [1, 1], 0, 0)];
    let cut = [axis(9, 3, [1, 1], -1, 1), axis(8, 2, [2, 1], 0, -1)];
    for (at, (shape, axes)) in [
        ([2, 1, 33, 40], &near[..]),
        ([3, 1, 9, 65], &moved[..]),
        ([2, 1, 64, 63], &point[..]),
        ([4, 1, 17, 9], &line[..]),
        ([2, 2, 10, 12], &near[..]),
        ([1, 3, 20, 7], &moved[..]),
        ([2, 5, 1, 1], &near[..]),
        ([2, 2, 3, 4], &moved[..]),
        ([1, 1, 3, 34], &near[..]),
        ([2, 1, 12, 1], &near[..]),
        ([2, 1, 9, 10], &space[..]),
        ([2, 1, 10, 11], &cut[..]),
    ]
    .into_iter()
    .enumerate()
    {
        for pass in PASSES {
            convolution(pass, shape, axes, Precision::F32, FINISHES[at % 4]);
        }
    }
}

#[test]
fn rounded_convolutions() {
    let axes = [axis(6, 3, [1, 1], 1, 1), axis(7, 3, [2, 1], 1, 1)];
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        for pass in PASSES {
            convolution(pass, [2, 1, 33, 20], &axes, precision, Finish::Store);
        }
    }
}

/// The gradients of filters: long sums over images and places.
#[test]
fn long_gradients_of_filters() {
    let axes = [axis(20, 3, [1, 1], 1, 1), axis(21, 3, [1, 1], 1, 1)];
    for shape in [[4, 1, 9, 12], [3, 6, 1, 1], [5, 1, 3, 8]] {
        convolution(ConvPass::FilterGradient, shape, &axes, Precision::F32, Finish::Accumulated);
    }
}
