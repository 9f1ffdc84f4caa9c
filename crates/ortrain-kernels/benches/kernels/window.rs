//! Cases of pooling and its gradients.

use ortrain_expr::{DType, IndexKind, Precision, SlidingAxis, WindowPass, WindowShape};
use ortrain_kernels::{Isa, Pool, WindowDesc, WindowKernel};

use crate::case::{Buffers, Case};

/// Pooling of square images.
#[derive(Clone, Copy)]
struct Layer {
    name: &'static str,
    batch: usize,
    channels: usize,
    size: usize,
    kernel: usize,
    stride: usize,
    pad: usize,
}

/// Kind of the positions, and their type.
type Index = Option<(IndexKind, DType)>;

/// Computed functions, with the kind of their positions.
const PASSES: [(&str, WindowPass, Index); 7] = [
    ("maximum", WindowPass::Max, None),
    ("maximum with positions", WindowPass::Max, Some((IndexKind::Element, DType::I64))),
    ("maximum with cells", WindowPass::Max, Some((IndexKind::Cell, DType::U8))),
    ("gradient of a maximum", WindowPass::MaxGradient, Some((IndexKind::Element, DType::I64))),
    ("gradient of a maximum by cells", WindowPass::MaxGradient, Some((IndexKind::Cell, DType::U8))),
    ("sum", WindowPass::Sum, None),
    ("gradient of a sum", WindowPass::SumGradient, None),
];

pub(crate) fn cases() -> Vec<Case> {
    let layer = |name, [batch, channels, size]: [usize; 3], kernel, stride, pad| Layer {
        name,
        batch,
        channels,
        size,
        kernel,
        stride,
        pad,
    };
    let layers = [
        layer("lenet", [64, 16, 28], 2, 2, 0),
        layer("lenet", [64, 32, 10], 2, 2, 0),
        layer("resnet first", [4, 64, 112], 3, 2, 1),
        layer("inception", [4, 192, 28], 3, 1, 1),
        layer("resnet global", [4, 512, 7], 7, 1, 0),
        layer("mobilenet global", [8, 1280, 3], 3, 1, 0),
    ];
    layers.iter().flat_map(|&layer| PASSES.map(|pass| case(layer, pass))).collect()
}

fn case(layer: Layer, (what, pass, index): (&str, WindowPass, Index)) -> Case {
    let Layer { name, batch, channels, size, kernel, stride, pad } = layer;
    let output = (size + 2 * pad - kernel) / stride + 1;
    let axis = SlidingAxis { input: size, output, kernel, stride, dilation: 1, padding_before: pad as isize };
    let shape = WindowShape { pass, planes: batch * channels, axes: [axis; 2].into_iter().collect() };
    // Cells over padding need no work.
    let inside: usize = (0..output).map(|o| axis.cells_over_input(o).len()).sum();
    let [source, target] = shape.operands();
    let positions = shape.planes * shape.plane_outputs() * index.map_or(0, |(_, dtype)| dtype.size());
    let each = if pass == WindowPass::MaxGradient { shape.plane_outputs() } else { inside * inside };
    Case {
        name: format!("window {what} {name} {batch}x{channels} {size}x{size} k{kernel} s{stride}"),
        flops: (shape.planes * each) as f64,
        // A comparison or a sum is half of a multiply-add.
        rate: 0.5,
        precision: Precision::F32,
        bytes: ((source + target) * size_of::<f32>() + positions) as f64,
        compile: Box::new(move |isa, threads| {
            let desc = WindowDesc { shape: shape.clone(), dtype: DType::F32, index };
            let kernel = WindowKernel::new(&desc, isa).expect("valid description");
            let sizes = [source * 4, positions, target * 4];
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            if pass == WindowPass::MaxGradient {
                let forward = WindowShape { pass: WindowPass::Max, ..shape.clone() };
                find_positions(forward, isa, index, buffers.bases()[1]);
            }
            Box::new(move |pool| {
                let bases = buffers.bases();
                // SAFETY: buffers have the lengths of the shape, and belong to this case.
                unsafe { kernel.run(bases[0], bases[1], bases[2], pool, buffers.scratch()) };
            })
        }),
    }
}

/// Writes the positions of the maxima of a random image to `to`, which has the capacity of them.
fn find_positions(shape: WindowShape, isa: Isa, index: Index, to: *mut u8) {
    let [source, target] = shape.operands();
    let desc = WindowDesc { shape, dtype: DType::F32, index };
    let kernel = WindowKernel::new(&desc, isa).expect("valid description");
    let mut buffers = Buffers::new(&[source * 4, target * 4], kernel.scratch_bytes(1));
    let bases = buffers.bases();
    // SAFETY: buffers have the lengths of the shape, and belong to this function.
    unsafe { kernel.run(bases[0], to, bases[1], &Pool::new(1), buffers.scratch()) };
}
