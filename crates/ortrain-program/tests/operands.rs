//! Operands that do not fit their instruction: programs with invalid operands are rejected.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use ortrain_expr::{
    Access, Builder, ConvPass, ConvShape, DType, Dims, Precision, SlidingAxes, SlidingAxis, Type, WindowPass,
    WindowShape,
};
use ortrain_program::{
    Conv, GradientModes, Instruction, Load, MatMul, Nest, Operand, ProgramBuilder, ScatterAdd, Window,
    WindowIndex,
};

/// Size of the square factors of a product.
const SIDE: usize = 3;

fn floats(b: &mut ProgramBuilder, name: &str, dims: &[usize]) -> Operand {
    Operand::contiguous(b.work(name, DType::F32, dims.iter().product()), DType::F32, dims)
}

/// Returns the error for an invalid instruction, or `None`.
fn rejection_message(mut b: ProgramBuilder, instruction: Instruction) -> Option<String> {
    b.emit(instruction, GradientModes::ALL, &"node \"y\" (Op)".into()).err().map(|error| error.to_string())
}

fn faulty(instruction: &str, fault: &str) -> Option<String> {
    Some(format!("node \"y\" (Op) was lowered to an invalid {instruction} instruction: {fault}"))
}

/// Returns a map that stores the sum of its loads.
fn sum(loads: Vec<Load>, store: Operand, dims: &[usize]) -> Nest {
    let mut e = Builder::new();
    let mut result = e.constant(Type::F32, 0.0);
    for slot in 0..loads.len() {
        let value = e.load(slot, Type::F32);
        result = e.add(result, value);
    }
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads,
        expr: e.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![store],
    }
}

/// Returns the error for a product with these loads in its epilogue.
fn product(loads: impl FnOnce(Load) -> Vec<Load>) -> Option<String> {
    rounded_product([DType::F32; 2], [None; 2], loads)
}

/// Returns the error for a product with rounded factors of these types.
fn rounded_product(
    dtypes: [DType; 2],
    rounded: [Option<DType>; 2],
    loads: impl FnOnce(Load) -> Vec<Load>,
) -> Option<String> {
    let dims = [SIDE, SIDE];
    let mut b = ProgramBuilder::new();
    let [a, c] = dtypes.map(|dtype| Operand::contiguous(b.work("factor", dtype, SIDE * SIDE), dtype, &dims));
    let [bias, y] = ["bias", "y"].map(|name| floats(&mut b, name, &dims));
    let product = MatMul {
        batch: Dims::new(),
        m: SIDE,
        n: SIDE,
        k: SIDE,
        a,
        b: c,
        rounded,
        precision: Precision::F32,
        epilogue: sum(loads(Load::Buffer(bias)), y, &dims),
    };
    rejection_message(b, Instruction::from(product))
}

#[test]
fn epilogue_needs_one_leading_accumulator() {
    let accumulator = || Load::Accumulator(DType::F32);
    assert_eq!(product(|_| vec![accumulator()]), None);
    assert_eq!(product(|bias| vec![accumulator(), bias]), None);
    assert_eq!(product(|bias| vec![bias]), faulty("MatMul", "accumulators [], expected [float32]"));
    assert_eq!(
        product(|bias| vec![accumulator(), accumulator(), bias]),
        faulty("MatMul", "accumulators [float32, float32], expected [float32]")
    );
    // Accumulators must come before other loads.
    assert_eq!(
        product(|bias| vec![accumulator(), bias, accumulator()]),
        faulty("MatMul", "accumulators must precede the loads of buffers")
    );
}

#[test]
fn factors_of_float32_are_rounded_to_floats_of_16_bits() {
    let accumulators = |_| vec![Load::Accumulator(DType::F32)];
    let rounds = |dtype, to| rounded_product([DType::F32, dtype], [None, Some(to)], accumulators);
    assert_eq!(rounds(DType::F32, DType::F16), None);
    assert_eq!(rounds(DType::F32, DType::BF16), None);
    for (dtype, to) in [(DType::F16, DType::F16), (DType::F64, DType::BF16), (DType::F32, DType::F32)] {
        assert_eq!(
            rounds(dtype, to),
            faulty("MatMul", &format!("a factor of type {dtype} cannot be rounded to {to}"))
        );
    }
}

#[test]
fn a_map_has_no_accumulator() {
    let map = |load: fn(Operand) -> Vec<Load>| {
        let mut b = ProgramBuilder::new();
        let [x, y] = ["x", "y"].map(|name| floats(&mut b, name, &[SIDE]));
        rejection_message(b, Instruction::from(sum(load(x), y, &[SIDE])))
    };
    assert_eq!(map(|x| vec![Load::Buffer(x)]), None);
    let expected = faulty("Map", "accumulators [float32], expected []");
    assert_eq!(map(|_| vec![Load::Accumulator(DType::F32)]), expected);
    assert_eq!(map(|x| vec![Load::Accumulator(DType::F32), Load::Buffer(x)]), expected);
}

fn axes() -> SlidingAxes {
    let axis = SlidingAxis { input: 4, output: 3, kernel: 2, stride: 1, dilation: 1, padding_before: 0 };
    [axis, axis].into_iter().collect()
}

/// Returns the error for a convolution with changed operands. Each buffer has one element more than necessary.
fn convolution(change: impl FnOnce(&mut Operand, &mut Operand)) -> Option<String> {
    let shape = ConvShape {
        pass: ConvPass::Output,
        batch: 2,
        groups: 1,
        channels_in: 2,
        channels_out: 5,
        axes: axes(),
    };
    let [a_dims, b_dims, dims] = shape.operands();
    let mut b = ProgramBuilder::new();
    let mut longer = |name: &str, dims: &Dims| {
        let len = dims.iter().product::<usize>() + 1;
        let access = Access { len, ..Access::contiguous(DType::F32, dims) };
        Operand { buffer: b.work(name, DType::F32, len), access }
    };
    let (mut image, mut filter) = (longer("image", &a_dims), longer("filter", &b_dims));
    change(&mut image, &mut filter);
    let y = floats(&mut b, "y", &dims);
    let epilogue = sum(vec![Load::Accumulator(DType::F32)], y, &dims);
    let conv = Conv { shape, a: image, b: filter, precision: Precision::F32, epilogue };
    rejection_message(b, Instruction::from(conv))
}

#[test]
fn operands_of_a_convolution_are_row_major() {
    assert_eq!(convolution(|_, _| {}), None);
    let of = |name: &str| faulty("Conv", &format!("an operand's access does not fit {name:?}"));
    // Rows and columns are swapped.
    assert_eq!(convolution(|image, _| image.access.strides.swap(2, 3)), of("image"));
    assert_eq!(convolution(|_, filter| filter.access.strides.swap(2, 3)), of("filter"));
    // One axis more, and one axis less.
    assert_eq!(convolution(|image, _| image.access.strides.push(0)), of("image"));
    assert_eq!(convolution(|_, filter| filter.access.strides.truncate(3)), of("filter"));
    // A length or a type that differs from the buffer.
    assert_eq!(convolution(|image, _| image.access.len -= 1), of("image"));
    assert_eq!(convolution(|_, filter| filter.access.dtype = DType::F16), of("filter"));
}

#[test]
fn operand_b_of_a_convolution_starts_at_the_first_element() {
    assert_eq!(convolution(|image, _| image.access.offset = 1), None);
    let expected = faulty("Conv", "operand B must start at the first element of its buffer");
    assert_eq!(convolution(|_, filter| filter.access.offset = 1), expected);
    let expected = faulty("Conv", "operand \"image\" must hold floats of shape [2, 2, 4, 4]");
    assert_eq!(convolution(|image, _| image.access.offset = 2), expected, "one element is missing");
}

/// Returns accesses to a buffer that are not the whole buffer in order.
fn partial_accesses(dtype: DType, len: usize) -> Vec<Access> {
    let contiguous = Access::contiguous(dtype, &[len]);
    vec![
        Access { offset: 1, ..contiguous.clone() },
        Access { offset: len - 1, strides: [-1].into_iter().collect(), ..contiguous.clone() },
        Access { len: len - 1, ..contiguous },
        Access::contiguous(dtype, &[len, 1]),
        Access::contiguous(DType::U8, &[len]),
    ]
}

/// Asserts that an instruction accepts whole buffers, and rejects any other access to one of them.
fn assert_needs_contiguous_buffers<const N: usize>(
    name: &str,
    buffers: [(&str, DType, usize); N],
    instruction: impl Fn([Operand; N]) -> Instruction,
) {
    let refused_with = |changed: Option<(usize, Access)>| {
        let mut b = ProgramBuilder::new();
        let mut operands =
            buffers.map(|(label, dtype, len)| Operand::contiguous(b.work(label, dtype, len), dtype, &[len]));
        if let Some((k, access)) = changed {
            operands[k].access = access;
        }
        rejection_message(b, instruction(operands))
    };
    assert_eq!(refused_with(None), None);
    for (k, (label, dtype, len)) in buffers.into_iter().enumerate() {
        let expected =
            faulty(name, &format!("the access to {label:?} must be contiguous and cover the whole buffer"));
        for access in partial_accesses(dtype, len) {
            assert_eq!(refused_with(Some((k, access.clone()))), expected, "{access:?}");
        }
    }
}

#[test]
fn windows_need_contiguous_buffers() {
    let shape = |pass| WindowShape { pass, planes: 2, axes: axes() };
    let [inputs, outputs] = shape(WindowPass::Max).operands();
    let (x, y) = (("x", DType::F32, inputs), ("y", DType::F32, outputs));
    let positions = ("positions", DType::I64, outputs);
    assert_needs_contiguous_buffers("Window", [x, positions, y], |[source, index, target]| {
        Instruction::from(Window {
            shape: shape(WindowPass::Max),
            source,
            index: Some(WindowIndex::with_element_positions(index)),
            target,
        })
    });
    assert_needs_contiguous_buffers("Window", [y, positions, x], |[source, index, target]| {
        let shape = shape(WindowPass::MaxGradient);
        Instruction::from(Window {
            shape,
            source,
            index: Some(WindowIndex::with_element_positions(index)),
            target,
        })
    });
    assert_needs_contiguous_buffers("Window", [x, y], |[source, target]| {
        Instruction::from(Window { shape: shape(WindowPass::Sum), source, index: None, target })
    });
}

#[test]
fn scatter_add_needs_contiguous_buffers() {
    let (outer, rows, count, inner) = (2, 4, 3, 5);
    let source = ("x", DType::F32, outer * count * inner);
    let index = ("index", DType::I64, count);
    let target = ("y", DType::F32, outer * rows * inner);
    for last in [false, true] {
        assert_needs_contiguous_buffers("ScatterAdd", [source, index, target], |[source, index, target]| {
            Instruction::from(ScatterAdd {
                outer,
                rows,
                count,
                inner,
                source,
                index,
                target,
                overwrites: last,
            })
        });
    }
}
