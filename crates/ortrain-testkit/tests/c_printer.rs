//! Maps that are printed in C, compiled and run: their results equal the reference evaluator.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Expr, Inst, Mode, Precision, Reg, RunScalar, Scalar, Type,
    UnaryOp, philox4x32_10,
};
use ortrain_program::{
    BufferId, BufferLocation, GradientMode, GradientModes, Instruction, Load, Nest, Operand, PASSES, Program,
    ProgramBuilder, RunError, Scalars, index_of, reference,
};
use ortrain_testkit::c_printer::{PRELUDE, print_map};
use ortrain_testkit::programs::{Kinds, RandomProgram};
use ortrain_testkit::{cases, compile_with_precision, gradient_graph};

/// Tolerance in ULP for expressions with inexact functions: the C library has its own implementations, and
/// both may have an error of one ULP of a double.
///
/// Results in floats of at most 32 bits are rounded from doubles, and are nearly always equal. With glibc,
/// the difference is at most one ULP.
const FUNCTION_ULP_TOLERANCE: u64 = 4;

/// Environment variable that disables passes.
const PASSES_VARIABLE: &str = "ORTRAIN_PASSES";

/// Number of random programs; with and without fusion and in both gradient modes, each has about 20 maps.
const RANDOM_PROGRAMS: u64 = 200;

/// Number of C files that are compiled in parallel.
const FILES: usize = 4;

/// Scalars of the run, all nonzero.
const SCALARS: Scalars = Scalars { seed: 0x0123_4567_89ab_cdef, train_step: 1_000_003 };

/// C program that runs the functions.
///
/// It reads, in 64-bit words: the index of a function, the scalars of the run, the numbers of buffers and of
/// operands, the lengths and bytes of the buffers, and the buffer of each operand. It writes the return value
/// of the function, the failed guard, and the bytes of the buffers.
const DRIVER: &str = r"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int get(void *to, uint64_t bytes) { return fread(to, 1, bytes, stdin) == bytes; }

static uint64_t word(void) {
  uint64_t word;
  if (!get(&word, sizeof word)) exit(2);
  return word;
}

static void put(const void *from, uint64_t bytes) {
  if (fwrite(from, 1, bytes, stdout) != bytes) exit(3);
}

int main(void) {
  uint64_t function;
  while (get(&function, sizeof function)) {
    const uint64_t run[2] = {word(), word()}, count = word(), operand_count = word();
    uint64_t bytes[count + 1];
    void *buffers[count + 1], *operands[operand_count + 1];
    for (uint64_t k = 0; k < count; ++k) {
      bytes[k] = word();
      buffers[k] = malloc(bytes[k] + 1);
      if (!buffers[k] || !get(buffers[k], bytes[k])) exit(4);
    }
    for (uint64_t k = 0; k < operand_count; ++k) operands[k] = buffers[word()];
    int64_t failed[4] = {0, 0, 0, 0};
    failed[3] = maps[function](operands, run, failed);
    put(failed, sizeof failed);
    for (uint64_t k = 0; k < count; ++k) {
      put(buffers[k], bytes[k]);
      free(buffers[k]);
    }
  }
  return fflush(stdout) ? 5 : 0;
}
";

/// A map with its inputs and the results of the reference.
struct Sample {
    label: String,
    function: usize,
    /// Buffers before the map, without duplicates.
    buffers: Vec<(DType, Vec<u8>)>,
    /// Buffer index of each operand: loads, then stores.
    operands: Vec<usize>,
    stores: usize,
    /// Buffers after the map, or the point, the index and the bound of a failed guard.
    expected: Result<Vec<Vec<u8>>, (i64, i64, i64)>,
    is_exact: bool,
}

/// Maps to print and compare all at once.
#[derive(Default)]
struct Samples {
    functions: Vec<String>,
    known: HashMap<ortrain_expr::Nest, usize>,
    exprs: HashSet<Expr>,
    instructions: BTreeSet<String>,
    samples: Vec<Sample>,
    /// Number of maps with segments, which are not printed.
    segmented: usize,
}

/// Statistics of a comparison.
#[derive(Debug, Default)]
struct Outcome {
    maps: usize,
    /// Number of different maps, including sizes and accesses.
    functions: usize,
    /// Number of different expressions.
    exprs: usize,
    /// Number of maps with bit-identical results, or with the same failed guard.
    equal: usize,
    results: usize,
    different_results: usize,
    max_ulp_distance: u64,
    failed_guards: usize,
    segmented: usize,
}

/// Returns true if a C library computes the same bits, except for NaN: additions and similar operations,
/// roots and remainders.
fn is_exact(expr: &Expr) -> bool {
    expr.insts().iter().all(|(inst, ty)| match inst {
        Inst::Unary(op, _) => matches!(
            op,
            UnaryOp::Neg
                | UnaryOp::Abs
                | UnaryOp::Sign
                | UnaryOp::Sqrt
                | UnaryOp::Rsqrt
                | UnaryOp::Floor
                | UnaryOp::Round
                | UnaryOp::Not
                | UnaryOp::ToF16
                | UnaryOp::ToBf16
        ),
        Inst::Binary(BinaryOp::Pow, ..) => !ty.is_float(),
        _ => true,
    })
}

/// Returns the kind of an instruction, with its operation and type.
fn kind(inst: Inst, ty: Type, expr: &Expr) -> String {
    match inst {
        Inst::Unary(op, _) => format!("{op:?} {ty:?}"),
        Inst::Binary(op, ..) => format!("{op:?} {ty:?}"),
        Inst::Compare(op, a, _) => format!("{op:?} {:?}", expr.ty(a)),
        Inst::Convert(a) => format!("Convert {:?} {ty:?}", expr.ty(a)),
        Inst::Run(scalar) => format!("{scalar:?}"),
        Inst::Const(_) => "Const".into(),
        Inst::Load(_) => "Load".into(),
        Inst::LoadAt(..) => "LoadAt".into(),
        Inst::Coordinate(_) => "Coordinate".into(),
        Inst::Reduced(_) => "Reduced".into(),
        Inst::Select(..) => "Select".into(),
        Inst::Guard(..) => "Guard".into(),
        Inst::Random(..) => "Random".into(),
    }
}

/// Returns the buffers of an instruction, without duplicates, and a program of this instruction alone on
/// these buffers.
fn single_instruction_program(program: &Program, instruction: &Instruction) -> (Vec<BufferId>, Program) {
    let mut ids = Vec::new();
    instruction.buffers(&mut |id, _| ids.push(id));
    ids.sort_unstable();
    ids.dedup();
    let mut b = ProgramBuilder::new();
    for (k, buffer) in program.buffers.iter().enumerate() {
        let is_used = ids.binary_search(&BufferId(k as u32)).is_ok();
        let _ = b.work(&buffer.label, buffer.dtype, if is_used { buffer.len } else { 0 });
    }
    b.emit(instruction.clone(), GradientModes::ALL, &"node".into()).expect("it is part of a program");
    let program = b.finish_unfused(ids.clone(), ids.clone()).expect("it is part of a program");
    (ids, program)
}

impl Samples {
    /// Interprets a program like the reference, from initial buffers, and records every map.
    fn interpret(
        &mut self,
        label: &str,
        program: &Program,
        entry: GradientMode,
        mut buffers: Vec<Vec<Scalar>>,
    ) {
        for (at, scheduled) in program.instructions_in(entry).enumerate() {
            let (ids, is_single) = single_instruction_program(program, &scheduled.instruction);
            let before: Vec<Vec<Scalar>> = ids.iter().map(|id| buffers[id.0 as usize].clone()).collect();
            let after = reference::evaluate(&is_single, Mode::Exact, &before, SCALARS);
            if let Instruction::Nest(nest) = &scheduled.instruction {
                self.add(&format!("{label}, instruction {at}"), program, nest, (&ids, &before), &after);
            }
            match after {
                Ok(after) => ids.iter().zip(after).for_each(|(id, after)| buffers[id.0 as usize] = after),
                Err(_) => break,
            }
        }
    }

    fn add(
        &mut self,
        label: &str,
        program: &Program,
        nest: &Nest,
        (ids, before): (&[BufferId], &[Vec<Scalar>]),
        after: &Result<Vec<Vec<Scalar>>, RunError>,
    ) {
        if nest.is_map() && nest.segments.is_some() {
            assert_eq!(print_map(nest, "map"), None, "{label} has segments, which are not printed");
            self.segmented += 1;
            return;
        }
        let plain = nest.map_operands(|operand| operand.access.clone());
        let function = match self.known.get(&plain) {
            Some(&function) => function,
            None => {
                let function = self.functions.len();
                let Some(printed) = print_map(nest, &format!("map_{function}")) else {
                    assert!(!nest.is_map(), "{label} is a map that is not printed: {}", nest.expr);
                    return;
                };
                self.functions.push(printed);
                self.known.insert(plain, function);
                let insts = nest.expr.insts().iter();
                self.instructions.extend(insts.map(|&(inst, ty)| kind(inst, ty, &nest.expr)));
                self.exprs.insert(nest.expr.clone());
                function
            }
        };
        let dtype = |id: &BufferId| program.buffer(*id).dtype;
        let bytes = |elements: &[Vec<Scalar>]| -> Vec<Vec<u8>> {
            ids.iter().zip(elements).map(|(id, elements)| Scalar::to_bytes(dtype(id), elements)).collect()
        };
        let expected = match after {
            Ok(after) => Ok(bytes(after)),
            Err(RunError::IndexOutOfRange { at, index, bound, .. }) => {
                let point = at.iter().zip(&nest.dims).fold(0, |point, (&at, &size)| point * size + at);
                assert_eq!(&index_of(point, &nest.dims), at);
                Err((point as i64, *index, *bound))
            }
            Err(error) => panic!("{label}: {error}"),
        };
        self.samples.push(Sample {
            label: format!("{label} {:?}: {}", nest.dims.as_slice(), nest.expr),
            function,
            buffers: ids.iter().map(dtype).zip(bytes(before)).collect(),
            operands: nest
                .operands()
                .map(|operand| ids.binary_search(&operand.buffer).expect("a buffer of the instruction"))
                .collect(),
            stores: nest.stores.len(),
            expected,
            is_exact: is_exact(&nest.expr),
        });
    }

    /// Prints and compiles the C program of all functions.
    fn compile(&self, folder: &PathBuf) -> PathBuf {
        fs::create_dir_all(folder).unwrap();
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let words: Vec<&str> = compiler.split_whitespace().collect();
        let cc = || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).args(["-std=c99", "-O1", "-ffp-contract=off", "-fno-fast-math"]);
            command.current_dir(folder).stderr(Stdio::piped());
            command
        };
        let per_file = self.functions.len().div_ceil(FILES).max(1);
        let mut running = Vec::new();
        for (k, functions) in self.functions.chunks(per_file).enumerate() {
            let name = format!("maps_{k}");
            fs::write(folder.join(format!("{name}.c")), format!("{PRELUDE}\n{}", functions.concat()))
                .unwrap();
            let child = cc().args(["-c", &format!("{name}.c")]).spawn();
            running.push((
                child.unwrap_or_else(|error| panic!("the C compiler {compiler:?} does not start: {error}")),
                format!("{name}.o"),
            ));
        }
        let mut main =
            "#include <stdint.h>\ntypedef int map(void **, const uint64_t *, int64_t *);\n".to_owned();
        let names: Vec<String> = (0..self.functions.len()).map(|k| format!("map_{k}")).collect();
        names.iter().for_each(|name| main += &format!("map {name};\n"));
        main += &format!("static map *const maps[] = {{{}}};\n{DRIVER}", names.join(", "));
        fs::write(folder.join("main.c"), main).unwrap();
        let mut objects = Vec::new();
        for (child, object) in running {
            let done = child.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            objects.push(object);
        }
        let done = cc().args(["main.c", "-o", "maps"]).args(&objects).arg("-lm").output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        folder.join("maps")
    }

    /// Runs all functions and compares the results. Returns the failures and the statistics.
    fn compare(&self, name: &str) -> (Vec<String>, Outcome) {
        let folder =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}_{}", std::process::id()));
        let executable = self.compile(&folder);
        let mut input = BufWriter::new(File::create(folder.join("input")).unwrap());
        for sample in &self.samples {
            let mut put = |word: u64| input.write_all(&word.to_ne_bytes()).unwrap();
            [sample.function as u64, SCALARS.seed, SCALARS.train_step].into_iter().for_each(&mut put);
            [sample.buffers.len(), sample.operands.len()].into_iter().for_each(|count| put(count as u64));
            for (_, bytes) in &sample.buffers {
                input.write_all(&(bytes.len() as u64).to_ne_bytes()).unwrap();
                input.write_all(bytes).unwrap();
            }
            let mut put = |word: u64| input.write_all(&word.to_ne_bytes()).unwrap();
            sample.operands.iter().for_each(|&operand| put(operand as u64));
        }
        input.flush().unwrap();
        let done = Command::new(executable)
            .stdin(File::open(folder.join("input")).unwrap())
            .stdout(File::create(folder.join("output")).unwrap())
            .status()
            .unwrap();
        assert!(done.success(), "the printed program ends with {done}");
        let output = fs::read(folder.join("output")).unwrap();
        fs::remove_dir_all(&folder).unwrap();

        let (mut rest, mut failures, mut outcome) = (&output[..], Vec::new(), Outcome::default());
        (outcome.functions, outcome.exprs) = (self.functions.len(), self.exprs.len());
        outcome.segmented = self.segmented;
        for sample in &self.samples {
            let mut next_bytes = |bytes: usize| {
                let (head, left) = rest.split_at(bytes);
                rest = left;
                head
            };
            let failed: Vec<i64> = next_bytes(32)
                .chunks_exact(8)
                .map(|word| i64::from_ne_bytes(word.try_into().unwrap()))
                .collect();
            let actual: Vec<&[u8]> =
                sample.buffers.iter().map(|(_, bytes)| next_bytes(bytes.len())).collect();
            outcome.maps += 1;
            let fault = match &sample.expected {
                Err(guard) => {
                    outcome.failed_guards += 1;
                    let failure = (failed[3] == 1).then_some((failed[0], failed[1], failed[2]));
                    outcome.equal += usize::from(failure == Some(*guard));
                    (failure != Some(*guard)).then(|| format!("guard {failure:?}, not {guard:?}"))
                }
                Ok(_) if failed[3] != 0 => Some(format!("a guard failed: {failed:?}")),
                Ok(expected) => sample.first_difference(&actual, expected, &mut outcome),
            };
            failures.extend(fault.map(|fault| format!("{}\n    {fault}", sample.label)));
        }
        assert!(rest.is_empty());
        (failures, outcome)
    }
}

impl Sample {
    /// Returns the first element that differs by more than the tolerance, in a stored buffer or in one that
    /// must not change.
    fn first_difference(
        &self,
        actual: &[&[u8]],
        expected: &[Vec<u8>],
        outcome: &mut Outcome,
    ) -> Option<String> {
        let stored = &self.operands[self.operands.len() - self.stores..];
        let (mut max_distance, mut fault) = (0, None);
        for (k, ((dtype, _), (actual, expected))) in
            self.buffers.iter().zip(actual.iter().zip(expected)).enumerate()
        {
            let is_stored = stored.contains(&k);
            let elements = actual.chunks_exact(dtype.size()).zip(expected.chunks_exact(dtype.size()));
            for (index, (actual_value, expected)) in elements.enumerate() {
                let steps = ulp_distance(*dtype, actual_value, expected);
                outcome.results += usize::from(is_stored);
                outcome.different_results += usize::from(steps > 0);
                max_distance = max_distance.max(steps);
                if steps > if self.is_exact { 0 } else { FUNCTION_ULP_TOLERANCE } && fault.is_none() {
                    let [actual_scalar, expected] =
                        [actual_value, expected].map(|bytes| Scalar::read(*dtype, bytes));
                    fault = Some(format!(
                        "buffer {k} of {dtype} at {index} is {actual_scalar}, not {expected}: {steps}"
                    ));
                }
            }
        }
        outcome.equal += usize::from(max_distance == 0);
        outcome.max_ulp_distance = outcome.max_ulp_distance.max(max_distance);
        fault
    }
}

/// Returns the distance of two stored elements in ULP. It is zero for two NaN. Integers and booleans must be
/// equal.
fn ulp_distance(dtype: DType, a: &[u8], b: &[u8]) -> u64 {
    if a == b {
        return 0;
    }
    let [x, y] = [a, b].map(|bytes| Scalar::read(dtype, bytes).to_f64());
    if !dtype.is_float() || x.is_nan() != y.is_nan() || (x == 0.0 && y == 0.0) {
        return u64::MAX;
    }
    if x.is_nan() {
        return 0;
    }
    // Floats of the same sign are ordered like their bits.
    let rank = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(word);
        let sign = 1 << (8 * bytes.len() - 1);
        if bits & sign == 0 { i128::from(bits) } else { -i128::from(bits ^ sign) }
    };
    rank(a).abs_diff(rank(b)).try_into().unwrap_or(u64::MAX)
}

// --- Printed programs --------------------------------------------------------------------------------------

/// Returns the initial contents of the buffers of a program, except for its inputs and state: constants, and
/// zeros.
fn initial_contents(program: &Program) -> Vec<Vec<Scalar>> {
    let elements = |buffer: &ortrain_program::Buffer| match buffer.location {
        BufferLocation::Constant(number) => Scalar::read_all(buffer.dtype, program.constants[number].data()),
        _ => vec![Scalar::from_f64(Type::of(buffer.dtype), 0.0); buffer.len],
    };
    program.buffers.iter().map(elements).collect()
}

/// Adds every case, and the gradients of every case.
fn add_cases(samples: &mut Samples) {
    for case in cases() {
        let gradients = gradient_graph(&case).expect("every case has gradients");
        for (graph, what) in [(case.graph.clone(), "results"), (gradients, "gradients")] {
            let program =
                compile_with_precision(graph, &case.inputs, Precision::F32).expect("it can be compiled");
            let mut buffers = initial_contents(&program);
            for (id, input) in program.inputs.iter().zip(&case.inputs) {
                buffers[id.0 as usize] = Scalar::read_all(input.dtype(), input.data());
            }
            let label = format!("{} ({}), {what}", case.operator, case.name);
            samples.interpret(&label, &program, GradientMode::Overwrite, buffers);
        }
    }
}

/// Adds random programs, with and without fusion, in both gradient modes.
fn add_random_programs(samples: &mut Samples) {
    let kinds = Kinds::ALL;
    for seed in 0..RANDOM_PROGRAMS {
        for is_fused in [false, true] {
            let program = RandomProgram::new(seed, kinds).finish(is_fused);
            for entry in [GradientMode::Accumulate, GradientMode::Overwrite] {
                let mut buffers = initial_contents(&program);
                for (k, buffer) in program.buffers.iter().enumerate() {
                    let is_state = matches!(buffer.location, BufferLocation::Plane(..));
                    if !is_state && !program.inputs.contains(&BufferId(k as u32)) {
                        continue;
                    }
                    // Between -1 and 1.
                    let sample = |index: usize| {
                        f64::from(philox4x32_10(seed, k as u64, index as u64)[0] as i32) / 2f64.powi(31)
                    };
                    buffers[k] = (0..buffer.len)
                        .map(|index| Scalar::from_f64(Type::of(buffer.dtype), sample(index)))
                        .collect();
                }
                let label = format!("random program {seed}, fused {is_fused}, {entry:?}");
                samples.interpret(&label, &program, entry, buffers);
            }
        }
    }
}

/// Returns numbers at the limits of types, and some in between.
fn edge_values(dtype: DType) -> Vec<Scalar> {
    let ty = Type::of(dtype);
    let bits = [7, 8, 15, 16, 31, 32, 53, 63, 64];
    let elements: Vec<Scalar> = if dtype.is_float() {
        let small = [0.0, 0.3, 1.0, 1.5, 2.5, 3.0, 7.25, 88.7, 745.2, 1e-40, 6e-8, 5e-324];
        let large = [65519.9, 65520.0, 1e6, 1e30, 1e38, 1e300, f64::INFINITY];
        let powers = bits.iter().flat_map(|&bits| [2f64.powi(bits), 2f64.powi(bits) - 0.5]);
        // The last one is also a NaN, with all bits set.
        let sizes = small.into_iter().chain(large).chain(powers).chain([f64::NAN, f64::from_bits(u64::MAX)]);
        sizes.flat_map(|size| [size, -size]).map(|value| Scalar::from_f64(ty, value)).collect()
    } else {
        let small = [0, 1, 2, 3, 5, 31, 40, 100, 200].into_iter();
        let powers = bits.iter().map(|&bits| 1i64.checked_shl(bits as u32).unwrap_or(0));
        let neighbors = powers.flat_map(|power| [power.wrapping_sub(1), power, power.wrapping_add(1)]);
        let signed = small.chain(neighbors).flat_map(|value| [value, value.wrapping_neg()]);
        signed.map(|value| Scalar::I64(value).convert(ty)).collect()
    };
    // As they are read back from memory.
    Scalar::read_all(dtype, &Scalar::to_bytes(dtype, &elements))
}

/// A program of maps over one space, each with separate results.
struct Maps {
    builder: ProgramBuilder,
    inputs: Vec<(BufferId, Vec<Scalar>)>,
    outputs: Vec<BufferId>,
    dims: Vec<usize>,
}

impl Maps {
    fn over(dims: &[usize]) -> Maps {
        Maps { builder: ProgramBuilder::new(), inputs: Vec::new(), outputs: Vec::new(), dims: dims.to_vec() }
    }

    fn input(&mut self, dtype: DType, elements: Vec<Scalar>) -> BufferId {
        let id = self.builder.work("input", dtype, elements.len());
        self.inputs.push((id, elements));
        id
    }

    /// Adds a map with one result. Each load starts at an element and has these strides.
    fn map(
        &mut self,
        loads: &[(BufferId, usize, &[isize])],
        to: DType,
        f: impl FnOnce(&mut Builder, &[Type]) -> Reg,
    ) {
        let mut operands = Vec::new();
        for &(buffer, offset, steps) in loads {
            let (dtype, len) = (self.builder.buffer(buffer).dtype, self.builder.buffer(buffer).len);
            let access = Access { dtype, offset, strides: steps.iter().copied().collect(), len };
            operands.push(Operand { buffer, access });
        }
        let types: Vec<Type> = operands.iter().map(|operand| Type::of(operand.access.dtype)).collect();
        let mut b = Builder::new();
        let result = f(&mut b, &types);
        let result = b.convert(result, Type::of(to));
        let target = self.builder.work("result", to, self.dims.iter().product());
        let nest = Nest {
            dims: self.dims.iter().copied().collect(),
            inner: 0,
            segments: None,
            loads: operands.into_iter().map(Load::Buffer).collect(),
            expr: b.finish(&[result]),
            reductions: Vec::new(),
            stores: vec![Operand::contiguous(target, to, &self.dims)],
        };
        self.builder.emit(Instruction::from(nest), GradientModes::ALL, &"node".into()).expect("it is valid");
        self.outputs.push(target);
    }

    fn add_to(self, label: &str, samples: &mut Samples) {
        let ids = self.inputs.iter().map(|(id, _)| *id).collect();
        let program = self.builder.finish_unfused(ids, self.outputs).expect("it fits in memory");
        let mut buffers = initial_contents(&program);
        self.inputs.into_iter().for_each(|(id, elements)| buffers[id.0 as usize] = elements);
        samples.interpret(label, &program, GradientMode::Overwrite, buffers);
    }
}

const UNARY: [UnaryOp; 18] = [
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Sign,
    UnaryOp::Exp,
    UnaryOp::Log,
    UnaryOp::Sqrt,
    UnaryOp::Rsqrt,
    UnaryOp::Sin,
    UnaryOp::Cos,
    UnaryOp::Atan,
    UnaryOp::Erf,
    UnaryOp::Tanh,
    UnaryOp::Sigmoid,
    UnaryOp::Floor,
    UnaryOp::Round,
    UnaryOp::Not,
    UnaryOp::ToF16,
    UnaryOp::ToBf16,
];

const BINARY: [BinaryOp; 11] = [
    BinaryOp::Add,
    BinaryOp::Sub,
    BinaryOp::Mul,
    BinaryOp::Div,
    BinaryOp::Rem,
    BinaryOp::Pow,
    BinaryOp::Min,
    BinaryOp::Max,
    BinaryOp::And,
    BinaryOp::Or,
    BinaryOp::Xor,
];

const COMPARE: [CompareOp; 3] = [CompareOp::Eq, CompareOp::Lt, CompareOp::Le];

fn has_unary(op: UnaryOp, ty: Type) -> bool {
    match op {
        UnaryOp::Not => ty == Type::Bool,
        UnaryOp::ToF16 | UnaryOp::ToBf16 => ty == Type::F32,
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round => ty != Type::Bool,
        _ => ty.is_float(),
    }
}

fn has_binary(op: BinaryOp, ty: Type) -> bool {
    match op {
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !ty.is_float(),
        _ => ty != Type::Bool,
    }
}

/// Adds every function of every type, at the limits of types, and conversions between all element types.
fn add_functions(samples: &mut Samples) {
    for dtype in DType::ALL {
        let (ty, elements) = (Type::of(dtype), edge_values(dtype));
        let count = elements.len();

        let mut maps = Maps::over(&[count]);
        let x = maps.input(dtype, elements.clone());
        for to in DType::ALL {
            maps.map(&[(x, 0, &[1])], to, |b, types| b.load(0, types[0]));
        }
        for op in UNARY.into_iter().filter(|&op| has_unary(op, ty)) {
            maps.map(&[(x, 0, &[1])], ty.storage(), |b, types| {
                let x = b.load(0, types[0]);
                b.unary(op, x)
            });
        }
        // Backwards, from the last element.
        maps.map(&[(x, count - 1, &[-1])], dtype, |b, types| b.load(0, types[0]));
        maps.add_to(&format!("functions of one {dtype}"), samples);

        let mut maps = Maps::over(&[count, count]);
        let x = maps.input(dtype, elements.clone());
        let mut map = |to: DType, f: &dyn Fn(&mut Builder, Reg, Reg) -> Reg| {
            maps.map(&[(x, 0, &[1, 0]), (x, 0, &[0, 1])], to, |b, types| {
                let [x, y] = [0, 1].map(|slot| b.load(slot, types[slot]));
                f(b, x, y)
            });
        };
        for op in BINARY.into_iter().filter(|&op| has_binary(op, ty)) {
            map(ty.storage(), &|b, x, y| b.binary(op, x, y));
        }
        for op in COMPARE {
            map(DType::Bool, &|b, x, y| b.compare(op, x, y));
        }
        map(ty.storage(), &|b, x, y| {
            let holds = b.convert(x, Type::Bool);
            b.select(holds, y, x)
        });
        maps.add_to(&format!("functions of two {dtype}"), samples);

        let mut maps = Maps::over(&[]);
        for value in elements {
            maps.map(&[], ty.storage(), |b, _| b.push(Inst::Const(value), ty));
        }
        maps.add_to(&format!("constants of {dtype}"), samples);
    }
}

/// Adds every 16-bit float, and the numbers halfway between neighbors.
fn add_narrow_floats(samples: &mut Samples) {
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        let elements = Scalar::read_all(dtype, &patterns);
        let mut maps = Maps::over(&[elements.len()]);
        let x = maps.input(dtype, elements);
        maps.map(&[(x, 0, &[1])], DType::F32, |b, types| b.load(0, types[0]));
        for part in [0.5, 0.499, 0.501] {
            maps.map(&[(x, 0, &[1]), (x, 0, &[0])], dtype, |b, types| {
                let (coordinate, one) = (b.coordinate(0), b.int(1));
                let next = b.add(coordinate, one);
                let [x, y] = [b.load(0, types[0]), b.load_at(1, next, types[1])];
                let [x, y] = [x, y].map(|reg| b.convert(reg, Type::F64));
                let step = b.sub(y, x);
                let part = b.constant(Type::F64, part);
                let part = b.mul(step, part);
                let sum = b.add(x, part);
                b.convert(sum, Type::F32)
            });
        }
        maps.add_to(&format!("all of {dtype}"), samples);
    }
}

/// Adds coordinates, computed indices inside and outside of the bounds, scalars of the run, random bits, and
/// guards that hold or fail.
fn add_coordinates_and_indices(samples: &mut Samples) {
    let numbers = |count: i64| (0..count).map(|k| Scalar::I64(k * 7 - 9)).collect::<Vec<_>>();
    let mut maps = Maps::over(&[3, 4, 5]);
    let x = maps.input(DType::I64, numbers(24));
    for axis in 0..3 {
        maps.map(&[], DType::I64, |b, _| b.coordinate(axis));
    }
    for scalar in [RunScalar::Seed, RunScalar::TrainStep] {
        maps.map(&[], DType::U64, |b, _| b.run_scalar(scalar));
    }
    let linear = |b: &mut Builder| b.element_number(&[3, 4, 5]);
    for (offset, shift) in [(0, -10), (5, -10), (23, -1), (3, i64::MAX - 30), (3, i64::MIN)] {
        maps.map(&[(x, offset, &[0, 0, 0])], DType::I64, |b, types| {
            let (at, shift) = (linear(b), b.int(shift));
            let at = b.add(at, shift);
            b.load_at(0, at, types[0])
        });
    }
    for stream in [0, 1 << 40, -1] {
        maps.map(&[], DType::U32, |b, _| {
            let (key, index, stream) = (b.run_scalar(RunScalar::Seed), linear(b), b.int(stream));
            let [stream, index] = [stream, index].map(|reg| b.convert(reg, Type::U64));
            // Also across the wraparound of the index.
            let index = b.sub(index, key);
            b.push(Inst::Random(key, stream, index), Type::U32)
        });
    }
    maps.map(&[], DType::I64, |b, _| {
        let at = linear(b);
        b.guard(at, 60)
    });
    maps.add_to("places", samples);
    for (shift, bound) in [(0, 59), (0, 1), (0, 0), (-1, 60), (-60, 60), (i64::MAX - 40, i64::MAX)] {
        let mut maps = Maps::over(&[3, 4, 5]);
        maps.map(&[], DType::I64, |b, _| {
            let (at, shift) = (linear(b), b.int(shift));
            let at = b.add(at, shift);
            b.guard(at, bound)
        });
        maps.add_to(&format!("an index from {shift} on below {bound}"), samples);
    }
    // A space without axes.
    let mut maps = Maps::over(&[]);
    maps.map(&[], DType::U64, |b, _| b.run_scalar(RunScalar::Seed));
    maps.add_to("one point", samples);
}

// --- The tests ---------------------------------------------------------------------------------------------

#[track_caller]
fn check(name: &str, samples: &Samples) -> Outcome {
    let (failures, outcome) = samples.compare(name);
    let shown = failures.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} maps differ:\n{shown}", failures.len(), outcome.maps);
    outcome
}

/// Every instruction of every type, at the limits.
#[test]
fn printed_functions_match_at_edges() {
    let mut samples = Samples::default();
    add_functions(&mut samples);
    add_narrow_floats(&mut samples);
    add_coordinates_and_indices(&mut samples);
    let outcome = check("edges", &samples);
    println!("{outcome:?}");
    assert_eq!(outcome.failed_guards, 6);
    let types = [Type::F32, Type::F64, Type::I32, Type::I64, Type::U32, Type::U64, Type::Bool];
    let mut unseen: BTreeSet<String> =
        ["Const", "Load", "LoadAt", "Coordinate", "Select", "Guard", "Random", "Seed", "TrainStep"]
            .map(str::to_owned)
            .into();
    for ty in types {
        let unary = UNARY.into_iter().filter(|&op| has_unary(op, ty));
        unseen.extend(unary.map(|op| format!("{op:?} {ty:?}")));
        let binary = BINARY.into_iter().filter(|&op| has_binary(op, ty));
        unseen.extend(binary.map(|op| format!("{op:?} {ty:?}")));
        unseen.extend(COMPARE.map(|op| format!("{op:?} {ty:?}")));
        let others = types.into_iter().filter(|&other| other != ty);
        unseen.extend(others.map(|other| format!("Convert {other:?} {ty:?}")));
    }
    let missing: Vec<&String> = unseen.difference(&samples.instructions).collect();
    assert!(missing.is_empty(), "nothing was printed of {missing:?}");
}

#[test]
fn printed_cases_are_the_same() {
    let mut samples = Samples::default();
    add_cases(&mut samples);
    let outcome = check("cases", &samples);
    println!("{outcome:?}");
    assert!(outcome.maps > 1000, "{outcome:?}");
}

/// Runs in a separate process with all optional passes disabled.
#[test]
fn unfused_printed_cases_match() {
    let optional = PASSES.iter().filter(|pass| pass.is_optional);
    let left_out = optional.map(|pass| format!("-{}", pass.name)).collect::<Vec<_>>().join(",");
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "printed_cases_are_the_same", "--nocapture"])
        .env(PASSES_VARIABLE, left_out)
        .output()
        .unwrap();
    let [stdout, errors] = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(done.status.success() && stdout.contains("1 passed"), "{stdout}{errors}");
    println!("{stdout}");
    // Fusion would leave a quarter of the maps.
    let maps =
        stdout.split_once("maps: ").and_then(|(_, rest)| rest.split(',').next()?.parse::<usize>().ok());
    assert!(maps.is_some_and(|maps| maps > 5000), "{stdout}");
}

#[test]
fn printed_random_programs_are_the_same() {
    let mut samples = Samples::default();
    add_random_programs(&mut samples);
    let outcome = check("random_programs", &samples);
    println!("{outcome:?}");
    assert!(outcome.maps > 1000 && outcome.segmented > 0, "{outcome:?}");
}
