//! Kernels in other languages. naga, the shader translator of wgpu, translates every kernel of the suites to Metal and
//! to Direct3D 12 without an error.

mod programs;

use std::collections::HashSet;

use naga::back::{hlsl, msl};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use ortrain_codegen::{Caps, Dialect as _, Launch, Wgsl, lower};
use ortrain_expr::{BinaryOp, Builder, CompareOp, DType, Precision, Reg, Type, UnaryOp};
use ortrain_program::{GradientModes, Instruction, Load, Nest, Operand, Program, ProgramBuilder};
use ortrain_testkit::kernels::suite_kernels;
use ortrain_testkit::programs::{Kinds, RandomProgram, Size};
use programs::products;

const CAPS: Caps = Caps { binding_bytes: 128 << 20, bindings: 16, groups: 65_535, has_late_faults: false };

/// Returns the module of a launch.
fn module(launch: &Launch) -> String {
    Wgsl.module(&[&launch.kernel])
}

/// Translates a kernel to both languages.
fn translate(source: &str) -> Result<(), String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::default());
    let info = validator.validate(&module).map_err(|error| error.emit_to_string(source))?;
    let bindings = module.global_variables.iter().filter_map(|(_, variable)| variable.binding);
    let resources = bindings
        .map(|binding| {
            let slot = u8::try_from(binding.binding).expect("there are few bindings");
            (binding, msl::BindTarget { buffer: Some(slot), mutable: true, ..Default::default() })
        })
        .collect();
    let entry = msl::EntryPointResources { resources, sizes_buffer: Some(30), ..Default::default() };
    let options = msl::Options {
        per_entry_point_map: [(module.entry_points[0].name.clone(), entry)].into_iter().collect(),
        fake_missing_bindings: false,
        ..Default::default()
    };
    let options = msl::Options { bounds_check_policies: BoundsCheckPolicies::default(), ..options };
    msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
        .map_err(|error| format!("MSL: {error}\n{source}"))?;
    let mut text = String::new();
    let options = hlsl::Options::default();
    let pipeline = hlsl::PipelineOptions::default();
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(&module, &info, None)
        .map_err(|error| format!("HLSL: {error}\n{source}"))?;
    Ok(())
}

#[test]
fn kernels_of_all_suites_translate() {
    let kernels = suite_kernels(&Wgsl, CAPS, Some(DType::F64));
    let sources: Vec<String> = kernels.iter().map(|kernel| Wgsl.module(&[kernel])).collect();
    let failures: Vec<String> = sources.iter().filter_map(|source| translate(source).err()).collect();
    let count = sources.len();
    assert!(failures.is_empty(), "{} of {count} kernels: {}", failures.len(), failures[0]);
    assert!(count > 1000, "{count} kernels");
}

/// Group kernels of programs that are too large for execution here, at every precision.
#[test]
fn group_kernels_translate() {
    let mut sources: HashSet<String> = HashSet::new();
    let mut add = |program: &Program| {
        let lowered = lower(program, &[], &CAPS, &Wgsl).expect("it can be lowered");
        sources.extend(lowered.launches.iter().map(module));
    };
    for precision in Precision::ALL {
        for sides in [[1024, 1000, 65], [100, 70, 4096], [65, 31, 100], [2, 333, 700], [513, 7, 40]] {
            add(&products(1, sides, precision));
        }
        let kinds = Kinds { jumps: false, size: Size::Large, ..Kinds::ALL };
        (0..150).for_each(|seed| add(&RandomProgram::new(seed, kinds).precision(precision).finish(true)));
    }
    let shares = |source: &&String| source.contains("var<workgroup>");
    let count = sources.iter().filter(shares).count();
    let failures: Vec<String> = sources.iter().filter_map(|source| translate(source).err()).collect();
    assert!(failures.is_empty(), "{} kernels: {}", failures.len(), failures[0]);
    assert!(count > 60, "{count} kernels of groups");
}

/// Returns a program of one map with every function of 64-bit floats, and every conversion from and to them.
fn doubles() -> Program {
    let types = [DType::F32, DType::I32, DType::U32, DType::I64, DType::U64, DType::Bool];
    let mut expr = Builder::new();
    let [x, y] = [0, 1].map(|slot| expr.load(slot, Type::F64));
    use UnaryOp::{Abs, Floor, Neg, Round, Rsqrt, Sign, Sqrt};
    let unary = [Neg, Abs, Sign, Floor, Round, Sqrt, Rsqrt];
    let binary = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div, BinaryOp::Min, BinaryOp::Max];
    let mut results: Vec<(Reg, DType)> = unary.iter().map(|&op| (expr.unary(op, x), DType::F64)).collect();
    results.extend(binary.iter().map(|&op| (expr.binary(op, x, y), DType::F64)));
    for op in [CompareOp::Eq, CompareOp::Lt, CompareOp::Le] {
        results.push((expr.compare(op, x, y), DType::Bool));
    }
    for (k, &other) in types.iter().enumerate() {
        let narrow = expr.load(2 + k, Type::of(other));
        results.push((expr.convert(narrow, Type::F64), DType::F64));
        results.push((expr.convert(x, Type::of(other)), other));
    }
    let mut b = ProgramBuilder::new();
    let mut operand = |dtype: DType| Operand::contiguous(b.work("x", dtype, 10), dtype, &[10]);
    let loads: Vec<Operand> = [DType::F64; 2].iter().chain(&types).map(|&dtype| operand(dtype)).collect();
    let stores: Vec<Operand> = results.iter().map(|&(_, dtype)| operand(dtype)).collect();
    let buffers = |operands: &[Operand]| operands.iter().map(|operand| operand.buffer).collect();
    let (loaded, stored) = (buffers(&loads), buffers(&stores));
    let roots: Vec<Reg> = results.iter().map(|&(reg, _)| reg).collect();
    let loads = loads.into_iter().map(Load::Buffer).collect();
    let nest = Nest::elementwise([10].into_iter().collect(), loads, expr.finish(&roots), stores);
    b.emit(Instruction::from(nest), GradientModes::ALL, &"node".into()).expect("the map is valid");
    b.finish(loaded, stored).expect("it can be planned")
}

/// All library functions for 64-bit floats are covered.
#[test]
fn functions_of_doubles_translate() {
    let caps = Caps { bindings: 64, ..CAPS };
    let lowered = lower(&doubles(), &[], &caps, &Wgsl).expect("it can be lowered");
    let source = module(&lowered.launches[0]);
    for head in include_str!("../src/wgsl/doubles.wgsl").lines().filter(|line| line.starts_with("fn ")) {
        assert!(source.contains(head), "nothing calls {head}");
    }
    translate(&source).unwrap_or_else(|error| panic!("{error}"));
}
