//! Compares pooling with loops over the definition.

use ortrain_expr::{BinaryOp, DType, IndexKind, Scalar, SlidingAxis, Type, WindowPass, WindowShape};
use ortrain_kernels::{Compiler, Isa, Pool, WindowDesc, WindowKernel};
use proptest::prelude::*;

use crate::common::*;

const NUMBERS: [DType; 12] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
];

fn shape(pass: WindowPass, planes: usize, axes: &[SlidingAxis]) -> WindowShape {
    WindowShape { pass, planes, axes: axes.iter().copied().collect() }
}

/// Returns an axis with this kernel, stride, dilation, and padding at both ends; all windows that fit.
fn axis(input: usize, [kernel, stride, dilation, before, after]: [usize; 5]) -> SlidingAxis {
    let reach = (kernel - 1) * dilation + 1;
    let output = (input + before + after).checked_sub(reach).map_or(0, |span| span / stride + 1);
    SlidingAxis { input, output, kernel, stride, dilation, padding_before: before as isize }
}

fn lowest_value(dtype: DType) -> Scalar {
    match dtype {
        DType::I8 => Scalar::I64(i8::MIN.into()),
        DType::I16 => Scalar::I64(i16::MIN.into()),
        DType::I32 => Scalar::I64(i32::MIN.into()),
        DType::I64 => Scalar::I64(i64::MIN),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => Scalar::I64(0),
        _ => Scalar::F64(f64::NEG_INFINITY),
    }
    .convert(Type::of(dtype))
}

fn add(a: Scalar, b: Scalar) -> Scalar {
    Scalar::binary(BinaryOp::Add, a, b)
}

/// Returns true if `b` replaces the maximum `a`.
fn replaces_maximum(a: Scalar, b: Scalar) -> bool {
    match (a, b) {
        (Scalar::I64(a), Scalar::I64(b)) => b > a,
        (Scalar::U64(a), Scalar::U64(b)) => b > a,
        (a, b) => !a.to_f64().is_nan() && (b.to_f64().is_nan() || b.to_f64() > a.to_f64()),
    }
}

/// Positions as elements of the whole tensor.
const ELEMENT_POSITIONS: (IndexKind, DType) = (IndexKind::Element, DType::I64);

/// Computes the target and the positions of maxima by the definition, or with `numbered` the numbers of their cells.
fn pool_by_definition(
    shape: &WindowShape,
    dtype: DType,
    source: &[u8],
    index: &[i64],
    numbered: bool,
) -> (Vec<u8>, Vec<i64>) {
    let axes = &shape.axes;
    let sizes = |size: fn(&SlidingAxis) -> usize| axes.iter().map(size).collect::<Vec<usize>>();
    let (inputs, outputs, kernels) =
        (sizes(|axis| axis.input), indices(&sizes(|axis| axis.output)), indices(&sizes(|axis| axis.kernel)));
    let per_input = shape.plane_inputs();
    let [_, count] = shape.operands();
    let zero = Scalar::I64(0).convert(Type::of(dtype));
    let mut target = vec![if shape.pass == WindowPass::Max { lowest_value(dtype) } else { zero }; count];
    let mut positions = Vec::new();
    for plane in 0..shape.planes {
        for (o, output) in outputs.iter().enumerate() {
            let o = plane * outputs.len() + o;
            if shape.pass == WindowPass::MaxGradient && numbered {
                let Some(cell) =
                    usize::try_from(index[o]).ok().and_then(|cell_number| kernels.get(cell_number))
                else {
                    continue;
                };
                // Cells over padding, too, have the position that follows from the order of the elements.
                let i = axes.iter().zip(output).zip(cell).fold(0, |at, ((axis, &o), &k)| {
                    let input_index = (o * axis.stride + k * axis.dilation) as isize - axis.padding_before;
                    at * axis.input as isize + input_index
                });
                if (0..per_input as isize).contains(&i) {
                    let i = plane * per_input + i.unsigned_abs();
                    target[i] = add(target[i], get(source, dtype, o));
                }
                continue;
            }
            if shape.pass == WindowPass::MaxGradient {
                let first = (plane * per_input) as i64;
                if (first..first + per_input as i64).contains(&index[o]) {
                    let to = &mut target[index[o] as usize];
                    *to = add(*to, get(source, dtype, o));
                }
                continue;
            }
            let mut best = None;
            for (cell_number, cell) in kernels.iter().enumerate() {
                let coordinates =
                    axes.iter().zip(output).zip(cell).map(|((axis, &o), &k)| axis.input_at(o, k));
                let Some(coordinates) = coordinates.collect::<Option<Vec<usize>>>() else { continue };
                let i = coordinates
                    .iter()
                    .zip(&inputs)
                    .fold(plane, |at, (&coordinate, &size)| at * size + coordinate);
                match shape.pass {
                    WindowPass::Max => {
                        let next = get(source, dtype, i);
                        if best.is_none() || replaces_maximum(target[o], next) {
                            (target[o], best) = (next, Some(if numbered { cell_number } else { i }));
                        }
                    }
                    WindowPass::Sum => target[o] = add(target[o], get(source, dtype, i)),
                    _ => target[i] = add(target[i], get(source, dtype, o)),
                }
            }
            positions.push(best.unwrap_or(if numbered { 0 } else { plane * per_input }) as i64);
        }
    }
    let mut bytes = vec![0; count * dtype.size()];
    target.into_iter().enumerate().for_each(|(i, value)| put(&mut bytes, dtype, i, value));
    (bytes, positions)
}

/// Computes the same by the kernel. Buffers have the lengths of the description, and start at odd addresses.
fn run_window<'a>(
    desc: &WindowDesc,
    compiler: impl Into<Compiler<'a>>,
    threads: usize,
    source: &[u8],
    index: &[i64],
) -> (Vec<u8>, Vec<i64>) {
    let kernel = WindowKernel::new(desc, compiler).unwrap_or_else(|fault| panic!("{fault}: {desc:?}"));
    let outputs = desc.shape.planes * desc.shape.plane_outputs();
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let unaligned = |bytes: &[u8]| [&[0x55], bytes].concat();
    let mut target = unaligned(&vec![0xa5; desc.shape.operands()[1] * desc.dtype.size()]);
    let size = desc.index.map_or(8, |(_, dtype)| dtype.size());
    let index_bytes: Vec<u8> =
        index.iter().flat_map(|position| position.to_le_bytes()[..size].to_vec()).collect();
    let mut index = unaligned(&if desc.shape.pass == WindowPass::MaxGradient {
        index_bytes
    } else {
        vec![0xa5; outputs * size]
    });
    let source = unaligned(source);
    // SAFETY: buffers have the description's shapes and belong to this test.
    unsafe {
        kernel.run(
            source.as_ptr().add(1),
            index.as_mut_ptr().add(1),
            target.as_mut_ptr().add(1),
            &Pool::new(threads),
            memory.scratch(),
        );
    };
    let position =
        |bytes: &[u8]| bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)) as i64;
    (target[1..].to_vec(), index[1..].chunks_exact(size).map(position).collect())
}

/// Runs a pooling with each kind of positions and compares the results.
fn check(shape: &WindowShape, dtype: DType, random: &mut Random, threads: &[usize]) {
    let source = buffer(random, dtype, shape.operands()[0]);
    let outputs = shape.planes * shape.plane_outputs();
    let gradient = shape.pass == WindowPass::MaxGradient;
    let numbers = [DType::U8, DType::U16].map(|dtype| (IndexKind::Cell, dtype));
    let numbers = numbers.into_iter().filter(|&(kind, dtype)| shape.has_positions(kind, dtype));
    let ways: Vec<Option<(IndexKind, DType)>> = match shape.pass {
        WindowPass::Max => [None, Some(ELEMENT_POSITIONS)].into_iter().chain(numbers.map(Some)).collect(),
        WindowPass::MaxGradient => [Some(ELEMENT_POSITIONS)].into_iter().chain(numbers.map(Some)).collect(),
        _ => vec![None],
    };
    for index_type in ways {
        let numbered = matches!(index_type, Some((IndexKind::Cell, _)));
        // Many positions inside of the plane, some in other planes or over padding, some invalid.
        let (total, wild) = if numbered {
            let cells = shape.axes.iter().map(|axis| axis.kernel).product::<usize>();
            (cells, vec![cells as i64, 0xff, 0xffff])
        } else {
            let total = shape.planes * shape.plane_inputs();
            (total, vec![i64::MIN, -1, total as i64, i64::MAX])
        };
        let index: Vec<i64> =
            (0..if gradient { outputs } else { 0 })
                .map(|_| if random.chance(10) { random.pick(&wild) } else { random.below(total + 1) as i64 })
                .map(|position| {
                    if index_type == Some((IndexKind::Cell, DType::U8)) { position & 0xff } else { position }
                })
                .collect();
        // Also the positions of real maxima, each under its own window.
        let forward = WindowShape { pass: WindowPass::Max, ..shape.clone() };
        let image = buffer(random, dtype, if gradient { forward.operands()[0] } else { 0 });
        let max_positions = gradient.then(|| pool_by_definition(&forward, dtype, &image, &[], numbered).1);
        for index in [index].into_iter().chain(max_positions) {
            let (expected, positions) = pool_by_definition(shape, dtype, &source, &index, numbered);
            for isa in Isa::available() {
                let desc = WindowDesc { shape: shape.clone(), dtype, index: index_type };
                let filters = kernel_filters("window.", isa, |filter| {
                    let compiler = Compiler::from(isa).with_kernels(filter);
                    WindowKernel::new(&desc, compiler).unwrap().describe().to_owned()
                });
                for (filter, &threads) in
                    filters.iter().flat_map(|filter| threads.iter().map(move |n| (filter, n)))
                {
                    let compiler = Compiler::from(isa).with_kernels(filter);
                    let (got, positions_found) = run_window(&desc, compiler, threads, &source, &index);
                    let what = format!("{desc:?} on {threads} threads at {isa}, {filter:?}");
                    assert_same(dtype, &got, &expected, &what);
                    if shape.pass == WindowPass::Max && index_type.is_some() {
                        assert!(
                            positions_found == positions,
                            "{what}: positions {positions_found:?}, not {positions:?}"
                        );
                    }
                }
            }
        }
    }
}

const PASSES: [WindowPass; 4] =
    [WindowPass::Max, WindowPass::MaxGradient, WindowPass::Sum, WindowPass::SumGradient];

/// Poolings of well-known networks, and many variants.
#[test]
fn pooling_by_the_definition() {
    let mut random = Random(9);
    for (planes, axes) in [
        (3, vec![axis(8, [2, 2, 1, 0, 0]), axis(8, [2, 2, 1, 0, 0])]),
        (2, vec![axis(13, [3, 2, 1, 1, 1]), axis(45, [3, 2, 1, 1, 1])]),
        (1, vec![axis(9, [3, 1, 1, 1, 1]), axis(37, [3, 1, 1, 1, 1])]),
        (5, vec![axis(7, [3, 2, 1, 0, 0]), axis(70, [3, 2, 1, 0, 0])]),
        // Windows along the contiguous axis only, and along the other axis only.
        (2, vec![axis(6, [5, 1, 1, 2, 2]), axis(100, [1, 1, 1, 0, 0])]),
        (2, vec![axis(6, [4, 1, 1, 2, 1]), axis(19, [1, 1, 1, 0, 0])]),
        (2, vec![axis(3, [1, 1, 1, 0, 0]), axis(50, [5, 1, 1, 2, 2])]),
        // Other strides and dilations.
        (2, vec![axis(12, [2, 3, 2, 1, 0]), axis(61, [4, 3, 2, 5, 0])]),
        (2, vec![axis(12, [2, 1, 4, 0, 0]), axis(40, [3, 2, 4, 3, 4])]),
        (1, vec![axis(10, [3, 5, 1, 0, 0]), axis(90, [2, 5, 1, 0, 0])]),
        // 1-D and 3-D, and axes of one position.
        (4, vec![axis(200, [4, 2, 1, 1, 2])]),
        (2, vec![axis(5, [2, 2, 1, 0, 1]), axis(6, [3, 1, 1, 1, 1]), axis(21, [3, 2, 1, 1, 1])]),
        (2, vec![axis(1, [1, 1, 1, 0, 0]), axis(33, [3, 1, 1, 1, 1]), axis(1, [1, 1, 1, 0, 0])]),
        (7, vec![axis(1, [1, 1, 1, 0, 0])]),
        (7, vec![]),
        (3, vec![axis(4, [4, 1, 1, 0, 0]), axis(5, [5, 1, 1, 0, 0])]),
        // Windows larger than the plane, and windows over padding only.
        (2, vec![axis(2, [5, 1, 1, 2, 2]), axis(3, [9, 1, 1, 8, 8])]),
        (2, vec![axis(4, [2, 1, 1, 3, 3]), axis(20, [2, 1, 1, 3, 3])]),
        (1, vec![axis(4, [2, 2, 1, 6, 0]), axis(20, [2, 2, 1, 30, 30])]),
        (1, vec![axis(1, [3, 1, 1, 1, 1]), axis(1, [3, 1, 1, 1, 1])]),
        // A last window that extends beyond the end; skipped positions.
        (
            2,
            vec![
                SlidingAxis { output: 5, ..axis(8, [2, 2, 1, 0, 0]) },
                SlidingAxis { output: 30, padding_before: -3, ..axis(40, [3, 1, 1, 0, 0]) },
            ],
        ),
        // More cells than a byte can number, and an axis of one position under a window with padding.
        (2, vec![axis(20, [17, 1, 1, 8, 8]), axis(35, [19, 2, 1, 9, 9])]),
        (2, vec![axis(9, [3, 1, 1, 1, 1]), axis(1, [3, 1, 1, 1, 1]), axis(33, [3, 1, 1, 1, 1])]),
        (3, vec![axis(1, [4, 1, 1, 2, 1]), axis(9, [3, 1, 1, 1, 1]), axis(1, [3, 1, 1, 1, 1])]),
        // A single window; a next one would be out of range.
        (
            2,
            vec![
                SlidingAxis { stride: usize::MAX / 8, ..axis(5, [5, 1, 1, 0, 0]) },
                axis(20, [3, 1, 1, 1, 1]),
            ],
        ),
        // Windows that do not overlap: pairs of elements, others, with gaps, beyond the ends, in three axes, and whole
        // planes.
        (5, vec![axis(5, [2, 2, 1, 0, 0]), axis(33, [2, 2, 1, 0, 0])]),
        (3, vec![axis(7, [3, 2, 1, 0, 0]), axis(9, [1, 2, 1, 0, 0])]),
        (2, vec![axis(13, [3, 3, 1, 1, 1]), axis(35, [3, 3, 1, 1, 1])]),
        (2, vec![axis(9, [2, 4, 1, 1, 0]), axis(40, [3, 4, 1, 2, 1])]),
        (2, vec![axis(20, [9, 9, 1, 4, 3]), axis(47, [9, 9, 1, 4, 3])]),
        (2, vec![axis(34, [17, 17, 1, 0, 0]), axis(70, [17, 18, 1, 1, 0])]),
        (3, vec![axis(5, [2, 2, 1, 0, 1]), axis(6, [2, 2, 1, 0, 0]), axis(11, [2, 2, 1, 0, 0])]),
        (9, vec![axis(3, [3, 1, 1, 0, 0]), axis(3, [3, 1, 1, 0, 0])]),
        (3, vec![axis(7, [7, 1, 1, 0, 0]), axis(7, [7, 1, 1, 0, 0])]),
        // Windows that overlap, with masks and without.
        (3, vec![axis(9, [2, 1, 1, 0, 1]), axis(50, [2, 1, 1, 1, 0])]),
        (2, vec![axis(14, [5, 2, 1, 2, 2]), axis(31, [7, 4, 1, 3, 3])]),
        (2, vec![axis(10, [3, 2, 3, 3, 3]), axis(38, [4, 2, 3, 4, 5])]),
        // Empty shapes.
        (0, vec![axis(4, [2, 2, 1, 0, 0])]),
        (2, vec![axis(0, [2, 1, 1, 4, 4]), axis(20, [1, 1, 1, 0, 0])]),
        (2, vec![axis(3, [2, 1, 1, 0, 0]), axis(0, [1, 1, 1, 8, 8])]),
        (2, vec![SlidingAxis { output: 0, ..axis(3, [2, 1, 1, 0, 0]) }]),
        (2, vec![SlidingAxis { kernel: 0, ..axis(30, [2, 1, 1, 0, 0]) }]),
    ] {
        for pass in PASSES {
            let shape = shape(pass, planes, &axes);
            for dtype in NUMBERS {
                check(&shape, dtype, &mut random, &[1]);
            }
            check(&shape, DType::F32, &mut random, &[2, 3]);
        }
    }
}

/// Few large planes, which are cut, and rows that are wider than a tile.
#[test]
fn large_planes_are_cut_with_equal_results() {
    let mut random = Random(5);
    for (planes, axes) in [
        (1, vec![axis(130, [3, 2, 1, 1, 1]), axis(200, [3, 2, 1, 1, 1])]),
        (2, vec![axis(11, [3, 1, 1, 1, 1]), axis(5003, [3, 1, 1, 1, 1])]),
        (1, vec![axis(20_000, [5, 3, 2, 4, 4])]),
        (40, vec![axis(30, [2, 2, 1, 0, 0]), axis(30, [2, 2, 1, 0, 0])]),
        (1, vec![axis(301, [2, 2, 1, 0, 0]), axis(203, [2, 2, 1, 0, 0])]),
        (2, vec![axis(200, [3, 3, 1, 1, 1]), axis(161, [3, 3, 1, 1, 1])]),
    ] {
        for pass in PASSES {
            let shape = shape(pass, planes, &axes);
            check(&shape, DType::F32, &mut random, &[1, 3]);
            check(&shape, DType::F16, &mut random, &[2]);
        }
    }
}

#[test]
fn ties_and_nan_go_to_the_first() {
    let axes = [axis(4, [2, 2, 1, 0, 0]), axis(8, [2, 2, 1, 0, 0])];
    let nan = f32::NAN;
    let lowest = f32::NEG_INFINITY;
    #[rustfmt::skip]
    let plane = [
        1., 1., -0., 0., nan, 2., lowest, lowest,
        1., 1., 0., -0., 3., nan, lowest, lowest,
        2., 3., 5., nan, 7., 8., lowest, nan,
        3., 3., nan, 6., 8., 8., 1., nan,
    ];
    let source = bytes_of(&plane);
    let desc = WindowDesc {
        shape: shape(WindowPass::Max, 1, &axes),
        dtype: DType::F32,
        index: Some(ELEMENT_POSITIONS),
    };
    for isa in Isa::available() {
        let (got, positions) = run_window(&desc, isa, 1, &source, &[]);
        assert_eq!(positions, [0, 2, 4, 6, 17, 19, 21, 23], "{isa}");
        let got = floats(&got);
        assert_eq!((got[0], got[1].to_bits(), got[3]), (1.0, (-0.0f32).to_bits(), lowest), "{isa}");
        assert!(got[2].is_nan() && got[5].is_nan() && got[7].is_nan(), "{got:?} at {isa}");
        let (_, cells) = run_window(
            &WindowDesc { index: Some((IndexKind::Cell, DType::U8)), ..desc.clone() },
            isa,
            1,
            &source,
            &[],
        );
        assert_eq!(cells, [0, 0, 0, 0, 1, 1, 1, 1], "{isa}");
    }
}

#[test]
fn invalid_descriptions_are_rejected() {
    let good = WindowDesc {
        shape: shape(WindowPass::Max, 2, &[axis(8, [2, 2, 1, 0, 0])]),
        dtype: DType::F32,
        index: Some(ELEMENT_POSITIONS),
    };
    let with = |shape: WindowShape| WindowDesc { shape, ..good.clone() };
    let huge = SlidingAxis { kernel: usize::MAX / 2, dilation: 3, ..good.shape.axes[0] };
    WindowKernel::new(&good, Isa::PORTABLE).unwrap();
    for (desc, needle) in [
        (WindowDesc { dtype: DType::Bool, ..good.clone() }, "pooling of bool is not supported"),
        (
            WindowDesc { index: Some((IndexKind::Element, DType::I32)), ..good.clone() },
            "positions of type int32 are not supported for these windows",
        ),
        (
            WindowDesc {
                index: Some((IndexKind::Cell, DType::U8)),
                ..with(shape(WindowPass::Max, 2, &[axis(300, [257, 1, 1, 0, 0])]))
            },
            "positions of type uint8 are not supported for these windows",
        ),
        (
            WindowDesc { index: None, ..with(shape(WindowPass::MaxGradient, 2, &good.shape.axes)) },
            "the gradient of a maximum needs the positions",
        ),
        (with(shape(WindowPass::Sum, 2, &good.shape.axes)), "a sum cannot have positions"),
        (with(shape(WindowPass::Max, usize::MAX / 9, &good.shape.axes)), "too large to count"),
        (with(shape(WindowPass::Max, 2, &[huge])), "too large to count"),
        (
            with(shape(WindowPass::Max, 2, &[axis(2, [1, 1, 1, 0, 0]); 9])),
            "a window has 9 axes, but at most 8 are supported",
        ),
    ] {
        let fault = WindowKernel::new(&desc, Isa::PORTABLE).unwrap_err();
        assert!(fault.contains(needle), "{fault}");
    }
}

/// Windows and paddings far larger than the image cost no more than the image.
#[test]
fn enormous_windows_are_cheap() {
    let enormous = SlidingAxis {
        input: 5,
        output: 3,
        kernel: 1 << 40,
        stride: 1 << 20,
        dilation: 1,
        padding_before: 1 << 39,
    };
    let mut random = Random(6);
    for pass in PASSES {
        let shape = shape(pass, 2, &[enormous, enormous]);
        let desc = WindowDesc { shape: shape.clone(), dtype: DType::F32, index: positions_of(pass) };
        let kernel = WindowKernel::new(&desc, Isa::detect().unwrap()).unwrap();
        assert!(kernel.scratch_bytes(1) < 1 << 20);
        let source = f32_buffer(&mut random, shape.operands()[0]);
        let (got, _) = run_window(&desc, Isa::detect().unwrap(), 2, &source, &[0; 18]);
        assert_eq!(got.len(), shape.operands()[1] * 4);
    }
}

/// Returns `I64` positions for the passes with positions.
fn positions_of(pass: WindowPass) -> Option<(IndexKind, DType)> {
    matches!(pass, WindowPass::Max | WindowPass::MaxGradient).then_some(ELEMENT_POSITIONS)
}

fn any_axis() -> impl Strategy<Value = SlidingAxis> {
    (0usize..40, 1usize..6, 1usize..5, 1usize..4, -3isize..8, 0usize..25).prop_map(
        |(input, kernel, stride, dilation, before, output)| SlidingAxis {
            input,
            output,
            kernel,
            stride,
            dilation,
            padding_before: before,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_window(
        axes in proptest::collection::vec(any_axis(), 1..3),
        planes in 0usize..4,
        pass in proptest::sample::select(&PASSES[..]),
        dtype in proptest::sample::select(&NUMBERS[..]),
        seed: u64,
        threads in 1usize..4,
    ) {
        check(&shape(pass, planes, &axes), dtype, &mut Random(seed), &[threads]);
    }
}
