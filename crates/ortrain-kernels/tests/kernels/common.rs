//! Buffers, a random source, the reference evaluation of a nest, and comparisons.

use ortrain_expr::{
    Access, BinaryOp, DType, Evaluation, Expr, Mode, Nest, OutOfRange, Precision, ReduceOp, Reg, RunScalar,
    Scalar, Strides, Type,
};
use ortrain_kernels::{
    Bf16Unit, Isa, KernelFilter, NestKernel, Order, Pool, Products, RunScalars, Scratch, kernel_names,
};

pub(crate) const SCALARS: RunScalars = RunScalars { seed: 0x0123_4567_89ab_cdef, train_step: 42 };

/// Maximum error of a product in f32, relative to the sum of the magnitudes of its terms: some roundings of 2⁻²⁴ along
/// chains of some hundreds. Equal terms, from strides of zero, are all rounded in one direction: about fifty times
/// 2⁻²⁴.
const F32_ERROR: f64 = 3e-6;

/// Returns the maximum error of a sum of products in a precision, relative to the sum of the magnitudes: the rounding
/// error of the factors, and the error of sums in f32.
pub(crate) fn max_relative_error(precision: Precision) -> f64 {
    let lost = match precision {
        Precision::F32 => 0.0,
        // The last of 8 bits is 2⁻⁷, and rounding may lose half of it in each factor.
        Precision::Bf16 => 2f64.powi(-7) + 2f64.powi(-16),
        // A second term is at most 2⁻⁸, and loses half of its last bit, 2⁻¹⁷. The product of two second terms is left
        // out.
        Precision::Bf16x3 => 2.0 * 2f64.powi(-17) + 2f64.powi(-16),
        // Factors are exact. The products of second terms (2⁻⁸) and third terms (2⁻¹⁷), and of two third terms, are left
        // out.
        Precision::Bf16x6 => 2.0 * 2f64.powi(-25) + 2f64.powi(-34),
    };
    lost + F32_ERROR
}

/// Returns every level of this machine with each bfloat16 unit for a precision: all levels with the emulated unit, the
/// best level also with the units of the processor.
pub(crate) fn machines_for(precision: Precision) -> Vec<(Isa, Products)> {
    let levels = Isa::available();
    let best = *levels.last().unwrap();
    let emulated = levels.into_iter().map(|isa| (isa, Bf16Unit::EMULATED));
    let units = if precision == Precision::F32 { Vec::new() } else { Bf16Unit::available() };
    let others = units.into_iter().filter(|&unit| unit != Bf16Unit::EMULATED).map(|unit| (best, unit));
    emulated.chain(others).map(|(isa, unit)| (isa, Products { precision, unit })).collect()
}

/// Returns the filter without entries and, at the best level of this machine, filters that force each other kernel of a
/// table. `describe` describes the kernel that a filter selects.
pub(crate) fn kernel_filters(
    table: &str,
    isa: Isa,
    describe: impl Fn(&KernelFilter) -> String,
) -> Vec<KernelFilter> {
    let mut filters = vec![KernelFilter::default()];
    if Isa::available().last() != Some(&isa) {
        return filters;
    }
    let mut known = vec![describe(&filters[0])];
    for name in kernel_names().into_iter().filter(|name| name.starts_with(table)) {
        let filter = KernelFilter::parse(&format!("+{name}")).unwrap();
        let description = describe(&filter);
        if !known.contains(&description) {
            known.push(description);
            filters.push(filter);
        }
    }
    filters
}

/// Random number generator `SplitMix64`.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns a number in -1..1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Returns an ordinary value, or an edge case of the type.
    pub(crate) fn scalar(&mut self, dtype: DType) -> Scalar {
        if dtype.is_float() {
            let edges =
                [0.0, -0.0, 1.0, -1.0, 0.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-42, 3e38, -2.5];
            let value = if self.chance(15) {
                self.pick(&edges)
            } else {
                self.unit() * self.pick(&[0.1, 1.0, 10.0, 1e5])
            };
            return Scalar::F64(value);
        }
        let bits = self.bits() as i64;
        Scalar::I64(match self.below(6) {
            0 => bits,
            1 => self.pick(&[0, 1, -1, i64::MIN, i64::MAX, 127, 128, 255, 65535, 1 << 31]),
            _ => bits % 20,
        })
    }
}

/// Returns a buffer of random elements, aligned to one byte only.
pub(crate) fn buffer(random: &mut Random, dtype: DType, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len * dtype.size()];
    for element in bytes.chunks_exact_mut(dtype.size()) {
        random.scalar(dtype).write(dtype, element);
    }
    bytes
}

pub(crate) fn f32_buffer(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).flat_map(|_| (random.unit() as f32).to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[repr(align(64))]
#[derive(Clone)]
struct Line(#[allow(dead_code, reason = "only its bytes are used")] [u8; 64]);

/// Scratch memory with arbitrary contents, which must not matter.
pub(crate) struct Memory(Vec<Line>);

impl Memory {
    pub(crate) fn new(bytes: usize) -> Memory {
        Memory(vec![Line([0xa5; 64]); bytes.div_ceil(64)])
    }

    pub(crate) fn scratch(&mut self) -> Scratch {
        Scratch::new(self.0.as_mut_ptr().cast(), self.0.len() * 64)
    }
}

/// Runs a kernel and returns its results: one buffer for each store, with initial contents `outs`.
pub(crate) fn run(
    nest: &Nest,
    isa: Isa,
    order: Order,
    threads: usize,
    loads: &[Vec<u8>],
    outs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, OutOfRange> {
    let kernel =
        NestKernel::with_order(nest, isa, order).unwrap_or_else(|fault| panic!("{fault}: {}", nest.expr));
    let pool = Pool::new(threads);
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let mut loads = loads.to_vec();
    let mut outs = outs.to_vec();
    let bases: Vec<*mut u8> = loads.iter_mut().chain(&mut outs).map(Vec::as_mut_ptr).collect();
    for (access, buffer) in nest.operands().zip(loads.iter().chain(&outs)) {
        assert!(buffer.len() >= access.len * access.dtype.size(), "buffers are as long as accesses say");
    }
    // SAFETY: buffers have the lengths of the accesses, and belong to this test.
    unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }?;
    Ok(outs)
}

fn element(access: &Access, index: &[usize]) -> usize {
    let offset: isize = access.strides.iter().zip(index).map(|(&stride, &i)| stride * i as isize).sum();
    (access.offset as isize + offset) as usize
}

pub(crate) fn get(buffer: &[u8], dtype: DType, i: usize) -> Scalar {
    Scalar::read(dtype, &buffer[i * dtype.size()..])
}

pub(crate) fn put(buffer: &mut [u8], dtype: DType, i: usize, value: Scalar) {
    value.write(dtype, &mut buffer[i * dtype.size()..]);
}

struct Point<'a> {
    nest: &'a Nest,
    loads: &'a [Vec<u8>],
    index: &'a [usize],
    reduced: &'a [Scalar],
}

impl Point<'_> {
    fn access(&self, slot: usize) -> &Access {
        self.nest.loads[slot].access().expect("nests of these tests finish nothing")
    }
}

impl Evaluation for Point<'_> {
    fn load(&mut self, slot: usize) -> Scalar {
        let access = self.access(slot);
        get(&self.loads[slot], access.dtype, element(access, self.index))
    }

    fn load_at(&mut self, slot: usize, index: i64) -> Scalar {
        let access = self.access(slot);
        match usize::try_from(index)
            .ok()
            .and_then(|i| i.checked_add(access.offset))
            .filter(|&i| i < access.len)
        {
            Some(i) => get(&self.loads[slot], access.dtype, i),
            None => Scalar::I64(0).convert(Type::of(access.dtype)),
        }
    }

    fn coordinate(&mut self, axis: usize) -> i64 {
        self.index[axis] as i64
    }

    fn run_scalar(&mut self, scalar: RunScalar) -> u64 {
        match scalar {
            RunScalar::Seed => SCALARS.seed,
            RunScalar::TrainStep => SCALARS.train_step,
        }
    }

    fn reduced(&mut self, k: usize) -> Scalar {
        self.reduced[k]
    }
}

/// Returns all indices of a space, in order.
pub(crate) fn indices(dims: &[usize]) -> Vec<Vec<usize>> {
    dims.iter().fold(vec![Vec::new()], |list, &dim| {
        list.iter().flat_map(|index| (0..dim).map(|i| [index.as_slice(), &[i]].concat())).collect()
    })
}

/// Returns the outer indices of a nest, in order.
fn outer_indices(nest: &Nest) -> Vec<Vec<usize>> {
    match &nest.segments {
        Some(segments) if nest.inner == 0 => {
            let points = segments.iter().enumerate().flat_map(|(k, range)| range.map(move |i| vec![k, i]));
            points.collect()
        }
        _ => indices(nest.outer_dims()),
    }
}

/// Returns the indices of the points with an outer index, in order.
fn row_indices(nest: &Nest, outer: &[usize]) -> Vec<Vec<usize>> {
    match (&nest.segments, outer) {
        (Some(segments), &[k]) => segments.range(k).map(|i| vec![k, i]).collect(),
        _ => indices(nest.inner_dims()).iter().map(|inner| [outer, inner].concat()).collect(),
    }
}

fn combine(op: ReduceOp, a: Scalar, b: Scalar) -> Scalar {
    let op = match op {
        ReduceOp::Sum => BinaryOp::Add,
        ReduceOp::Prod => BinaryOp::Mul,
        ReduceOp::Max => BinaryOp::Max,
        ReduceOp::Min => BinaryOp::Min,
    };
    Scalar::binary(op, a, b)
}

fn neutral(op: ReduceOp, ty: Type) -> Scalar {
    let ends = |is_lowest: bool| match ty {
        Type::F32 | Type::F64 => Scalar::F64(if is_lowest { f64::NEG_INFINITY } else { f64::INFINITY }),
        Type::I32 => Scalar::I32(if is_lowest { i32::MIN } else { i32::MAX }),
        Type::I64 => Scalar::I64(if is_lowest { i64::MIN } else { i64::MAX }),
        Type::U32 => Scalar::U32(if is_lowest { 0 } else { u32::MAX }),
        Type::U64 => Scalar::U64(if is_lowest { 0 } else { u64::MAX }),
        Type::Bool => Scalar::Bool(!is_lowest),
    };
    match op {
        ReduceOp::Sum => Scalar::I64(0),
        ReduceOp::Prod => Scalar::I64(1),
        ReduceOp::Max => ends(true),
        ReduceOp::Min => ends(false),
    }
    .convert(ty)
}

/// Computes the results with the reference semantics; sums and products of f32 are computed in f64.
pub(crate) fn reference(
    nest: &Nest,
    loads: &[Vec<u8>],
    outs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, OutOfRange> {
    let mut outs = outs.to_vec();
    let expr: &Expr = &nest.expr;
    let outer_rank = nest.dims.len() - nest.inner;
    let row_store = |access: &Access| {
        nest.inner > 0
            && (outer_rank..nest.dims.len())
                .all(|axis| access.strides[axis] == 0 || nest.dims[axis] == 1 && nest.segments.is_none())
    };
    let mut regs = Vec::new();
    for outer in outer_indices(nest) {
        let points = row_indices(nest, &outer);
        let mut reduced: Vec<Scalar> = Vec::new();
        for reduction in &nest.reductions {
            let ty = expr.ty(reduction.value);
            let wide = if ty == Type::F32 { Type::F64 } else { ty };
            let mut total = neutral(reduction.op, wide);
            let needed = expr.dependencies_of(&[reduction.value]);
            for index in &points {
                let mut at = Point { nest, loads, index, reduced: &reduced };
                expr.evaluate_into(Mode::Exact, &needed, &mut at, &mut regs)?;
                total = combine(reduction.op, total, regs[usize::from(reduction.value.0)].convert(wide));
            }
            reduced.push(total.convert(ty));
        }
        for index in &points {
            let mut at = Point { nest, loads, index, reduced: &reduced };
            let results = expr.evaluate(Mode::Exact, &mut at)?;
            for ((access, out), value) in nest.stores.iter().zip(&mut outs).zip(results) {
                put(out, access.dtype, element(access, index), value);
            }
        }
        if points.is_empty() {
            let index = [outer.as_slice(), &vec![0; nest.inner]].concat();
            for (slot, access) in nest.stores.iter().enumerate().filter(|(_, access)| row_store(access)) {
                let root: Reg = expr.outputs()[slot];
                let mut at = Point { nest, loads, index: &index, reduced: &reduced };
                expr.evaluate_into(Mode::Exact, &expr.dependencies_of(&[root]), &mut at, &mut regs)?;
                put(&mut outs[slot], access.dtype, element(access, &index), regs[usize::from(root.0)]);
            }
        }
    }
    Ok(outs)
}

/// Returns the distance in representable numbers; NaN equals NaN.
pub(crate) fn ulp(a: f32, b: f32) -> u64 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() && b.is_nan() { 0 } else { u64::MAX };
    }
    let order = |v: f32| {
        let bits = v.to_bits() as i32;
        i64::from(if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits })
    };
    (order(a) - order(b)).unsigned_abs()
}

/// Returns the bits of a value; all NaN have the same bits.
fn canonical(value: Scalar) -> u64 {
    match value {
        Scalar::F32(v) if v.is_nan() => u64::MAX,
        Scalar::F64(v) if v.is_nan() => u64::MAX,
        other => other.bits(),
    }
}

#[track_caller]
pub(crate) fn assert_same(dtype: DType, got: &[u8], expected: &[u8], what: &str) {
    for i in 0..expected.len() / dtype.size() {
        let (g, w) = (get(got, dtype, i), get(expected, dtype, i));
        assert!(canonical(g) == canonical(w), "{what}: element {i} is {g}, not {w}");
    }
}

/// As [`assert_same`], but zeros may have other signs: of several zeros, a maximum or minimum takes any.
#[track_caller]
pub(crate) fn assert_same_but_zero_signs(dtype: DType, got: &[u8], expected: &[u8], what: &str) {
    for i in 0..expected.len() / dtype.size() {
        let (g, w) = (get(got, dtype, i), get(expected, dtype, i));
        let are_zeros = g.to_f64() == 0.0 && w.to_f64() == 0.0;
        assert!(are_zeros || canonical(g) == canonical(w), "{what}: element {i} is {g}, not {w}");
    }
}

#[track_caller]
pub(crate) fn assert_close(
    dtype: DType,
    got: &[u8],
    expected: &[u8],
    relative: f64,
    absolute: f64,
    what: &str,
) {
    for i in 0..expected.len() / dtype.size() {
        let (g, w) = (get(got, dtype, i).to_f64(), get(expected, dtype, i).to_f64());
        let is_close = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= absolute + relative * w.abs();
        assert!(is_close, "{what}: element {i} is {g}, not {w}");
    }
}

/// Returns a random access over `dims`: axes in any order, some broadcast, some reversed, some with gaps.
pub(crate) fn random_access(
    random: &mut Random,
    dtype: DType,
    dims: &[usize],
    store: bool,
    fixed: &[usize],
) -> Access {
    let mut strides: Strides = dims.iter().map(|_| 0).collect();
    let mut axes: Vec<usize> = (0..dims.len()).collect();
    if random.chance(40) {
        for i in (1..axes.len()).rev() {
            axes.swap(i, random.below(i + 1));
        }
    }
    let mut step = if random.chance(20) { 2 } else { 1 };
    let mut offset = random.below(3);
    let simple = random.chance(40);
    for &axis in axes.iter().rev() {
        if fixed.contains(&axis) || (!store && random.chance(25)) {
            continue;
        }
        let reversed = !simple && random.chance(20);
        strides[axis] = if reversed { -(step as isize) } else { step as isize };
        if reversed {
            offset += step * dims[axis].saturating_sub(1);
        }
        step *= dims[axis].max(1);
        if !simple && random.chance(20) {
            step += random.below(4);
        }
    }
    let mut access = Access { dtype, offset, strides, len: offset + random.below(4) };
    // An operand that is constant along a row exists even if the row is empty.
    let dims: Vec<usize> = dims.iter().map(|&dim| dim.max(1)).collect();
    access.len =
        access.position_range(&dims).map_or(access.len, |(_, high)| high as usize + 1 + random.below(4));
    access
}
