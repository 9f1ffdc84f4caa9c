//! Printed launches, and unsupported programs.

mod programs;

use ortrain_codegen::{Binding, Caps, Dialect as _, Launch, Lowered, MemoryId, Wgsl, lower, split_host_part};
use ortrain_expr::{Access, BinaryOp, Builder, DType, Precision, ReduceOp, Reduction, Type, UnaryOp};
use ortrain_graph::Tensor;
use ortrain_program::{
    BufferId, GradientModes, Instruction, Load, Nest, Operand, Program, ProgramBuilder, ScatterAdd,
};
use programs::products;

const CAPS: Caps = Caps { binding_bytes: 128 << 20, bindings: 16, groups: 65_535, has_late_faults: false };

/// Builds a chain of `count` exponential maps over `len` elements. All results are outputs, so that no map is fused.
fn exponentials(count: usize, dtype: DType, len: usize) -> Program {
    let mut b = ProgramBuilder::new();
    let first = b.work("x", dtype, len);
    let mut results: Vec<BufferId> = vec![first];
    for k in 0..count {
        let mut expr = Builder::new();
        let x = expr.load(0, Type::of(dtype));
        let y = expr.unary(UnaryOp::Exp, x);
        let to = b.work("y", dtype, len);
        let contiguous = |id: BufferId| Operand::contiguous(id, dtype, &[len]);
        let loads = vec![Load::Buffer(contiguous(results[k]))];
        let nest =
            Nest::elementwise([len].into_iter().collect(), loads, expr.finish(&[y]), vec![contiguous(to)]);
        b.emit(Instruction::from(nest), GradientModes::ALL, &"a layer".into()).expect("the map is valid");
        results.push(to);
    }
    b.finish_unfused(vec![first], results[1..].to_vec()).expect("it can be planned")
}

fn launches(program: &Program) -> Lowered {
    lower(program, &[], &CAPS, &Wgsl).expect("it can be lowered")
}

/// Returns the module of a launch.
fn module(launch: &Launch) -> String {
    Wgsl.module(&[&launch.kernel])
}

#[test]
fn equal_layers_share_a_kernel() {
    let lowered = launches(&exponentials(5, DType::F32, 1000));
    assert_eq!(lowered.launches.len(), 5);
    // The first one works in place, because its operand has no other reader: a buffer that is read and written is bound
    // once.
    let (in_place, others) = lowered.launches.split_first().expect("there are five");
    assert_eq!(in_place.bindings.len(), 1);
    let same = |launch: &Launch| launch.kernel == others[0].kernel && launch.groups == [4, 1, 1];
    assert!(others.iter().all(same));
    let starts: Vec<&Binding> = others.iter().map(|launch| &launch.bindings[1]).collect();
    assert!(starts.windows(2).all(|pair| pair[0] != pair[1]), "{starts:?}");
    let is_work = |binding: &Binding| matches!(binding, Binding::Bytes { memory: MemoryId::Work, start, .. } if start % 256 == 0);
    assert!(lowered.launches.iter().flat_map(|launch| &launch.bindings).all(is_work));
}

/// A kernel contains exactly the functions that it calls.
#[test]
fn kernels_include_called_functions() {
    let lowered = launches(&exponentials(1, DType::F32, 10));
    let source = module(&lowered.launches[0]);
    assert!(source.contains("fn exp_f32(") && source.contains("fn exp2_int("), "{source}");
    assert!(!source.contains("fn log_f32("), "{source}");
}

/// Groups beyond the limit of one axis continue along the second axis.
#[test]
fn groups_form_rows() {
    let caps = Caps { groups: 100, ..CAPS };
    let lowered =
        lower(&exponentials(1, DType::F32, 256 * 250), &[], &caps, &Wgsl).expect("it can be lowered");
    assert_eq!(lowered.launches[0].groups, [100, 3, 1]);
    let error =
        lower(&exponentials(1, DType::F32, 256 * 10_001 + 1), &[], &caps, &Wgsl).expect_err("too many");
    assert!(
        error.to_string().starts_with("a layer: this Map instruction has no kernel: it has 2560257 points"),
        "{error}"
    );
}

/// Invocations of long maps, and of maps that store parts of words, compute four adjacent elements if these are aligned
/// quads.
#[test]
fn long_maps_are_vectorized() {
    let lowered = |dtype, len| {
        let launch = launches(&exponentials(1, dtype, len)).launches.remove(0);
        let text = &launch.kernel.text;
        (launch.groups[0], text.contains("array<vec4<u32>>"), text.contains("atomicAnd"))
    };
    assert_eq!(lowered(DType::F32, 1 << 16), (64, true, false));
    assert_eq!(lowered(DType::F32, (1 << 16) - 4), (256, false, false));
    assert_eq!(lowered(DType::F32, (1 << 16) + 2), (257, false, false));
    assert_eq!(lowered(DType::F16, 1 << 10), (1, false, false));
    assert_eq!(lowered(DType::F16, (1 << 10) + 2), (5, false, true));
}

#[test]
fn float64_functions_are_rejected_by_name() {
    let error =
        lower(&exponentials(1, DType::F64, 10), &[], &CAPS, &Wgsl).expect_err("it has no such function");
    assert_eq!(
        error.to_string(),
        "a layer: this Map instruction has no kernel: it computes exp in float64, which this device does not \
         support; use float32 or the cpu backend"
    );
}

#[test]
fn float64_instructions_are_rejected() {
    let mut b = ProgramBuilder::new();
    let [target, source] = ["target", "source"].map(|label| b.work(label, DType::F64, 6));
    let index = b.work("index", DType::I64, 2);
    let sums = ScatterAdd {
        target: Operand::contiguous(target, DType::F64, &[6]),
        source: Operand::contiguous(source, DType::F64, &[6]),
        index: Operand::contiguous(index, DType::I64, &[2]),
        outer: 1,
        rows: 2,
        count: 2,
        inner: 3,
        overwrites: false,
    };
    b.emit(Instruction::from(sums), GradientModes::ALL, &"a layer".into()).expect("the sums are valid");
    let program = b.finish(vec![target, source, index], vec![target]).expect("it can be planned");
    let error = lower(&program, &[], &CAPS, &Wgsl).expect_err("it has no float64");
    assert_eq!(
        error.reason,
        "it computes with float64, which this device does not support; use float32 or the cpu backend"
    );
}

#[test]
fn buffers_that_are_larger_than_a_binding_are_named() {
    let caps = Caps { binding_bytes: 4096, ..CAPS };
    assert!(lower(&exponentials(1, DType::F32, 1024), &[], &caps, &Wgsl).is_ok());
    let error = lower(&exponentials(1, DType::F32, 1025), &[], &caps, &Wgsl).expect_err("too large");
    assert_eq!(error.reason, "\"x\" needs a binding of 4100 bytes, but this device allows at most 4096");
}

/// A dump lists each launch with its kernel, and the source of a shared kernel once.
#[test]
fn launches_as_text() {
    let program = exponentials(3, DType::F32, 1000);
    let text = launches(&program).text(&program, &Wgsl);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "3 launches, 2 kernels, 0 bytes of scratch");
    assert_eq!(
        lines[2],
        "  launch 1: kernel 1 in [4, 1, 1] groups, of instruction 1 Map (work 0..4000, work 4096..8096)  # a layer"
    );
    assert_eq!(text.matches("@compute").count(), 2);
    assert_eq!(lines.iter().filter(|line| line.starts_with("kernel ")).count(), 2);
}

/// Returns the groups of the launches of a product, and for each launch true if it uses shared memory.
fn groups_of(sides: [usize; 3]) -> Vec<(u32, bool)> {
    let launches = launches(&products(1, sides, Precision::F32)).launches;
    launches.iter().map(|launch| (launch.groups[0], launch.kernel.text.contains("var<workgroup>"))).collect()
}

/// The tiles are 128x128 for very large products, 64x64 for large products, and 32x32 with a short side. Products with
/// few rows or columns use lines. Long sums of few tiles are split: a second launch, with an invocation per element,
/// adds the parts.
#[test]
fn products_are_computed_by_groups() {
    assert_eq!(groups_of([2048, 2048, 64]), [(256, true)]);
    assert_eq!(groups_of([1024, 1024, 64]), [(256, true)]);
    assert_eq!(groups_of([1024, 32, 64]), [(32, true)]);
    assert_eq!(groups_of([2, 640, 64]), [(20, true)]);
    assert_eq!(groups_of([640, 8, 64]), [(80, true)]);
    assert_eq!(groups_of([1024, 1024, 3]), [(4096, false)]);
    assert_eq!(groups_of([512, 512, 512]), [(128, true), (1024, false)]);
    assert_eq!(groups_of([64, 32, 4096]), [(32, true), (8, false)]);
    let lowered = launches(&products(1, [64, 32, 4096], Precision::F32));
    assert_eq!(lowered.scratch, 16 * 64 * 32 * 4);
}

#[test]
fn products_of_equal_shape_are_one_kernel() {
    let lowered = launches(&products(3, [100, 70, 600], Precision::F32));
    let sources: Vec<&str> = lowered.launches.iter().map(|launch| &*launch.kernel.text).collect();
    assert_eq!(sources.len(), 6);
    assert!(sources.chunks(2).all(|pair| pair == &sources[..2]));
}

/// Builds a program that sums rows, or subtracts the sums from the rows. With `by_columns`, adjacent elements belong to
/// different rows.
fn sums([rows, size]: [usize; 2], by_columns: bool, with_rows: bool) -> Program {
    let len = rows * size;
    let strides = if by_columns { [1, rows as isize] } else { [size as isize, 1] };
    let access = |strides: [isize; 2], len| Access {
        dtype: DType::F32,
        offset: 0,
        strides: strides.into_iter().collect(),
        len,
    };
    let mut b = ProgramBuilder::new();
    let [from, to, total] = [len, rows, len].map(|len| b.work("x", DType::F32, len));
    let mut expr = Builder::new();
    let x = expr.load(0, Type::F32);
    let sum = expr.reduced(0, Type::F32);
    let rest = expr.sub(x, sum);
    let (results, stores) = match with_rows {
        true => (vec![rest], vec![Operand { buffer: total, access: access(strides, len) }]),
        false => (vec![sum], vec![Operand { buffer: to, access: access([1, 0], rows) }]),
    };
    let outputs = stores.iter().map(|store| store.buffer).collect();
    let (expr, values) = expr.finish_keeping(&results, &[x]);
    let nest = Nest {
        dims: [rows, size].into_iter().collect(),
        inner: 1,
        segments: None,
        loads: vec![Load::Buffer(Operand { buffer: from, access: access(strides, len) })],
        expr,
        reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
        stores,
    };
    b.emit(Instruction::from(nest), GradientModes::ALL, &"a layer".into()).expect("the nest is valid");
    b.finish_unfused(vec![from], outputs).expect("it can be planned")
}

/// Short rows have an invocation each, longer rows several invocations of a group, and a few long rows several groups.
/// A small number of columns is split into parts. The last launch executes the remaining stores.
#[test]
fn reductions_are_computed_by_groups() {
    let groups = |sizes, by_columns, with_rows| -> Vec<(u32, bool)> {
        let launches = launches(&sums(sizes, by_columns, with_rows)).launches;
        launches
            .iter()
            .map(|launch| (launch.groups[0], launch.kernel.text.contains("var<workgroup>")))
            .collect()
    };
    assert_eq!(groups([1000, 32], false, false), [(4, false)]);
    assert_eq!(groups([1000, 100], false, false), [(125, true)]);
    assert_eq!(groups([1000, 100], false, true), [(125, true)]);
    assert_eq!(groups([1000, 20_000], false, true), [(1000, true)]);
    assert_eq!(groups([3, 20_000], false, false), [(6, true), (3, true)]);
    assert_eq!(groups([3, 20_000], false, true), [(6, true), (3, true), (235, false)]);
    assert_eq!(groups([100, 40], true, false), [(2, true)]);
    assert_eq!(groups([100, 4000], true, false), [(250, true), (2, true)]);
    assert_eq!(groups([100, 4000], true, true), [(250, true), (2, true), (1563, false)]);
    assert_eq!(groups([100_000, 40], true, true), [(391, false)]);
}

/// Builds a program of one map that sums `count` vectors. With `with_constants`, the vectors are constants.
fn sum_of_vectors(count: usize, with_constants: bool) -> Program {
    const LEN: usize = 100;
    let mut b = ProgramBuilder::new();
    let mut inputs = Vec::new();
    let loads: Vec<BufferId> = (0..count)
        .map(|k| {
            if with_constants {
                return b.constant("c", &Tensor::f32(&[LEN], &[k as f32; LEN]));
            }
            let input = b.work("x", DType::F32, LEN);
            inputs.push(input);
            input
        })
        .collect();
    let mut expr = Builder::new();
    let terms: Vec<_> = (0..count).map(|k| expr.load(k, Type::F32)).collect();
    let sum = terms[1..].iter().fold(terms[0], |sum, &term| expr.binary(BinaryOp::Add, sum, term));
    let to = b.work("y", DType::F32, LEN);
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[LEN]);
    let loads = loads.into_iter().map(|id| Load::Buffer(contiguous(id))).collect();
    let nest =
        Nest::elementwise([LEN].into_iter().collect(), loads, expr.finish(&[sum]), vec![contiguous(to)]);
    b.emit(Instruction::from(nest), GradientModes::ALL, &"a sum".into()).expect("the map is valid");
    b.finish_unfused(inputs, vec![to]).expect("it can be planned")
}

/// Buffers of the arena share bindings if a device has too few bindings. Each constant has its own memory.
#[test]
fn buffers_share_scarce_bindings() {
    for bindings in [1, 2, 5, 8] {
        let caps = Caps { bindings, ..CAPS };
        let lowered = lower(&sum_of_vectors(12, false), &[], &caps, &Wgsl).expect("it can be lowered");
        assert_eq!(lowered.launches[0].bindings.len(), bindings as usize);
    }
    let error = lower(&sum_of_vectors(12, true), &[], &CAPS, &Wgsl).map(|_| ());
    assert_eq!(error, Ok(()));
    let caps = Caps { bindings: 8, ..CAPS };
    let error = lower(&sum_of_vectors(12, true), &[], &caps, &Wgsl).expect_err("too many");
    assert!(
        error.reason.contains("it needs 13 buffer bindings, but this device allows at most 8"),
        "{error}"
    );
}

/// The steps of a sequence access different offsets, and share a kernel.
#[test]
fn steps_of_a_sequence_are_one_kernel() {
    const WIDTH: usize = 64;
    const STEPS: usize = 6;
    let mut b = ProgramBuilder::new();
    let sequence = b.work("h", DType::F32, WIDTH * STEPS);
    for step in 1..STEPS {
        let at = |step: usize| {
            let steps = Access::contiguous(DType::F32, &[WIDTH]);
            let access = Access { offset: step * WIDTH, len: WIDTH * STEPS, ..steps };
            Operand { buffer: sequence, access }
        };
        let mut expr = Builder::new();
        let x = expr.load(0, Type::F32);
        let y = expr.unary(UnaryOp::Exp, x);
        let dims = [WIDTH].into_iter().collect();
        let nest =
            Nest::elementwise(dims, vec![Load::Buffer(at(step - 1))], expr.finish(&[y]), vec![at(step)]);
        b.emit(Instruction::from(nest), GradientModes::ALL, &"a step".into()).expect("the map is valid");
    }
    let program = b.finish_unfused(vec![sequence], vec![sequence]).expect("it can be planned");
    let lowered = launches(&program);
    assert_eq!(lowered.launches.len(), STEPS - 1);
    assert!(lowered.launches.iter().all(|launch| launch.kernel == lowered.launches[0].kernel));
}

/// A nest multiplies its elements by a float64 number. The host computes the number, a power that no device supports,
/// and the device computes the products.
#[test]
fn host_computes_unsupported_float64_numbers() {
    let (rows, len) = (2, 10);
    let mut b = ProgramBuilder::new();
    let [x, y] = ["x", "y"].map(|label| b.work(label, DType::F32, rows * len));
    let step = b.work("step", DType::F64, 1);
    let mut expr = Builder::new();
    let (value, exponent) = (expr.load(0, Type::F32), expr.load(1, Type::F64));
    let base = expr.constant(Type::F64, 0.9);
    let power = expr.binary(BinaryOp::Pow, base, exponent);
    let wide = expr.convert(value, Type::F64);
    let product = expr.mul(wide, power);
    let result = expr.convert(product, Type::F32);
    let scalar = Access { strides: [0, 0].into_iter().collect(), ..Access::contiguous(DType::F64, &[1]) };
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[rows, len]);
    let loads = vec![Load::Buffer(contiguous(x)), Load::Buffer(Operand { buffer: step, access: scalar })];
    let dims = [rows, len].into_iter().collect();
    let nest =
        Nest { inner: 1, ..Nest::elementwise(dims, loads, expr.finish(&[result]), vec![contiguous(y)]) };
    b.emit(Instruction::from(nest), GradientModes::ALL, &"a layer".into()).expect("the nest is valid");
    let program = b.finish(vec![x, step], vec![y]).expect("it can be planned");
    let error = lower(&program, &[], &CAPS, &Wgsl).expect_err("it has no powers");
    assert!(error.reason.starts_with("it computes pow in float64"), "{error}");
    let (rest, host) = split_host_part(&program, &Wgsl).expect("the host computes the power");
    assert_eq!((host.inputs.as_slice(), host.results.len()), ([step].as_slice(), 1));
    let lowered = launches(&rest);
    assert!(module(&lowered.launches[0]).contains("fn mul_f64("), "{}", lowered.text(&rest, &Wgsl));
}
