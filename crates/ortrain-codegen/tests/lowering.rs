//! Launches that are printed, and programs that are refused.

use ortrain_codegen::{Binding, Caps, Home, Launch, Lowered, Wgsl, lower, split};
use ortrain_expr::{Access, BinaryOp, Builder, DType, Type, UnaryOp};
use ortrain_program::{
    BufferId, Entries, Instruction, Load, Nest, Operand, Program, ProgramBuilder, ScatterAdd,
};

const CAPS: Caps = Caps { binding_bytes: 128 << 20, bindings: 16, groups: 65_535 };

/// A program of maps one after the other, each the exponential of the one before, over so many elements. All are results, so
/// that none is fused.
fn exponentials(count: usize, dtype: DType, len: usize) -> Program {
    let mut b = ProgramBuilder::new();
    let first = b.work("x", dtype, len);
    let mut made: Vec<BufferId> = vec![first];
    for k in 0..count {
        let mut expr = Builder::new();
        let x = expr.load(0, Type::of(dtype));
        let y = expr.unary(UnaryOp::Exp, x);
        let to = b.work("y", dtype, len);
        let whole = |id: BufferId| Operand::whole(id, dtype, &[len]);
        let loads = vec![Load::Buffer(whole(made[k]))];
        let nest = Nest::elementwise([len].into_iter().collect(), loads, expr.finish(&[y]), vec![whole(to)]);
        b.emit(Instruction::from(nest), Entries::ALL, &"a layer".into()).expect("the map is sound");
        made.push(to);
    }
    b.finish_unfused(vec![first], made[1..].to_vec()).expect("it can be planned")
}

fn launches(program: &Program) -> Lowered {
    lower(program, &CAPS, &Wgsl).expect("it can be printed")
}

#[test]
fn layers_that_differ_in_place_alone_are_one_kernel() {
    let lowered = launches(&exponentials(5, DType::F32, 1000));
    assert_eq!(lowered.launches.len(), 5);
    // The first one works in place, because nobody reads its operand again: a buffer that is read and written is bound once.
    let (in_place, others) = lowered.launches.split_first().expect("there are five");
    assert_eq!(in_place.bindings.len(), 1);
    let same = |launch: &Launch| launch.source == others[0].source && launch.groups == [4, 1, 1];
    assert!(others.iter().all(same));
    let starts: Vec<&Binding> = others.iter().map(|launch| &launch.bindings[1]).collect();
    assert!(starts.windows(2).all(|pair| pair[0] != pair[1]), "{starts:?}");
    let is_work = |binding: &Binding| matches!(binding, Binding::Bytes { home: Home::Work, start, .. } if start % 256 == 0);
    assert!(lowered.launches.iter().flat_map(|launch| &launch.bindings).all(is_work));
}

/// The functions that a kernel calls are there, and no others.
#[test]
fn kernels_bring_the_functions_that_they_call() {
    let lowered = launches(&exponentials(1, DType::F32, 10));
    let source = &lowered.launches[0].source;
    assert!(source.contains("fn exp_f32(") && source.contains("fn exp2_int("), "{source}");
    assert!(!source.contains("fn log_f32("), "{source}");
}

/// Points beyond those of one axis of groups go along the second one.
#[test]
fn groups_are_cut_into_rows() {
    let caps = Caps { groups: 100, ..CAPS };
    let lowered = lower(&exponentials(1, DType::F32, 256 * 250), &caps, &Wgsl).expect("it can be printed");
    assert_eq!(lowered.launches[0].groups, [100, 3, 1]);
    let error = lower(&exponentials(1, DType::F32, 256 * 10_001), &caps, &Wgsl).expect_err("too many");
    assert!(
        error.to_string().starts_with("a layer: this Map instruction has no kernel: it has 2560256 points"),
        "{error}"
    );
}

#[test]
fn functions_of_doubles_are_refused_by_node_and_name() {
    let error = lower(&exponentials(1, DType::F64, 10), &CAPS, &Wgsl).expect_err("it has no such function");
    assert_eq!(
        error.to_string(),
        "a layer: this Map instruction has no kernel: it computes exp in float64, which this device does not have; float32 \
         is there, and the cpu backend has both"
    );
}

#[test]
fn instructions_with_doubles_are_refused_by_type() {
    let mut b = ProgramBuilder::new();
    let [target, source] = ["target", "source"].map(|label| b.work(label, DType::F64, 6));
    let index = b.work("index", DType::I64, 2);
    let sums = ScatterAdd {
        target: Operand::whole(target, DType::F64, &[6]),
        source: Operand::whole(source, DType::F64, &[6]),
        index: Operand::whole(index, DType::I64, &[2]),
        outer: 1,
        rows: 2,
        count: 2,
        inner: 3,
        last: false,
    };
    b.emit(Instruction::from(sums), Entries::ALL, &"a layer".into()).expect("the sums are sound");
    let program = b.finish(vec![target, source, index], vec![target]).expect("it can be planned");
    let error = lower(&program, &CAPS, &Wgsl).expect_err("it has no float64");
    assert_eq!(
        error.reason,
        "it computes with float64, which this device does not have; float32 is there, and the cpu backend has both"
    );
}

#[test]
fn buffers_that_are_larger_than_a_binding_are_named() {
    let caps = Caps { binding_bytes: 4096, ..CAPS };
    assert!(lower(&exponentials(1, DType::F32, 1024), &caps, &Wgsl).is_ok());
    let error = lower(&exponentials(1, DType::F32, 1025), &caps, &Wgsl).expect_err("too large");
    assert_eq!(error.reason, "\"x\" is bound with 4100 bytes, and this device binds at most 4096");
}

/// A dump names each launch with its kernel, and has the source of a kernel that several launches share once.
#[test]
fn launches_as_text() {
    let program = exponentials(3, DType::F32, 1000);
    let text = launches(&program).text(&program);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "3 launches, 2 kernels, 0 bytes of scratch");
    assert_eq!(
        lines[2],
        "  launch 1: kernel 1 in [4, 1, 1] groups, of instruction 1 Map (work 0..4000, work 4096..8096)  # a layer"
    );
    assert_eq!(text.matches("fn main(").count(), 2);
    assert_eq!(lines.iter().filter(|line| line.starts_with("kernel ")).count(), 2);
}

/// A nest that multiplies its elements by a number, in float64: the host computes the number, a power that no device has, and the
/// device computes the products.
#[test]
fn the_host_computes_numbers_that_go_on_in_float64() {
    let (rows, len) = (2, 10);
    let mut b = ProgramBuilder::new();
    let [x, y] = ["x", "y"].map(|label| b.work(label, DType::F32, rows * len));
    let step = b.work("step", DType::F64, 1);
    let mut expr = Builder::new();
    let (value, number) = (expr.load(0, Type::F32), expr.load(1, Type::F64));
    let base = expr.constant(Type::F64, 0.9);
    let power = expr.binary(BinaryOp::Pow, base, number);
    let wide = expr.convert(value, Type::F64);
    let product = expr.mul(wide, power);
    let result = expr.convert(product, Type::F32);
    let once = Access { strides: [0, 0].into_iter().collect(), ..Access::contiguous(DType::F64, &[1]) };
    let whole = |id: BufferId| Operand::whole(id, DType::F32, &[rows, len]);
    let loads = vec![Load::Buffer(whole(x)), Load::Buffer(Operand { buffer: step, access: once })];
    let dims = [rows, len].into_iter().collect();
    let nest = Nest { inner: 1, ..Nest::elementwise(dims, loads, expr.finish(&[result]), vec![whole(y)]) };
    b.emit(Instruction::from(nest), Entries::ALL, &"a layer".into()).expect("the nest is sound");
    let program = b.finish(vec![x, step], vec![y]).expect("it can be planned");
    let error = lower(&program, &CAPS, &Wgsl).expect_err("it has no powers");
    assert!(error.reason.starts_with("it computes pow in float64"), "{error}");
    let (rest, host) = split(&program).expect("the host computes the power");
    assert_eq!((host.inputs.as_slice(), host.results.len()), ([step].as_slice(), 1));
    let lowered = launches(&rest);
    assert!(lowered.launches[0].source.contains("fn mul_f64("), "{}", lowered.text(&rest));
}
