//! Fusion patterns of convolutional networks, built manually.

use std::sync::Arc;

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, ConvPass, ConvShape, DType, Mode, Precision, ReduceOp, Reduction,
    Reg, Scalar, SlidingAxis, Type, UnaryOp, WindowPass, WindowShape,
};

use crate::reference::evaluate;
use crate::{
    Backend, Bindings, BufferId, BufferIds, BufferLocation, Conv, FusionWeights, GradientMode, GradientModes,
    Instruction, Load, MatMul, Memory, Nest, Operand, PlaneId, Program, ProgramBuilder, Reference, Scalars,
    Window, WindowIndex, Workspace,
};

/// Builder of a program over images `[n, c, h * w]`.
struct Images {
    b: ProgramBuilder,
    n: usize,
    c: usize,
    h: usize,
    w: usize,
    node: Arc<str>,
}

/// Operands of a nest: buffers with their strides.
type Reads<'a> = &'a [(BufferId, &'a [isize])];

impl Images {
    fn new(n: usize, c: usize, h: usize, w: usize) -> Images {
        Images { b: ProgramBuilder::new(), n, c, h, w, node: "node".into() }
    }

    fn len(&self) -> usize {
        self.n * self.c * self.h * self.w
    }

    fn image(&mut self, name: &str) -> BufferId {
        self.b.work(name, DType::F32, self.len())
    }

    fn channels(&mut self, name: &str) -> BufferId {
        self.b.work(name, DType::F32, self.c)
    }

    fn operands(&self, list: Reads<'_>) -> Vec<Operand> {
        let operand = |&(id, strides): &(BufferId, &[isize])| {
            let (dtype, len) = (self.b.buffer(id).dtype, self.b.buffer(id).len);
            let strides = strides.iter().copied().collect();
            Operand { buffer: id, access: Access { dtype, offset: 0, strides, len } }
        };
        list.iter().map(operand).collect()
    }

    /// Returns an operand for a whole buffer in order.
    fn contiguous(&self, id: BufferId) -> Operand {
        Operand::contiguous(id, self.b.buffer(id).dtype, &[self.b.buffer(id).len])
    }

    fn nest(
        &self,
        dims: &[usize],
        loads: Reads<'_>,
        stores: Reads<'_>,
        f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
    ) -> Nest {
        let loads: Vec<Load> = self.operands(loads).into_iter().map(Load::Buffer).collect();
        let mut b = Builder::new();
        let regs: Vec<Reg> =
            loads.iter().enumerate().map(|(slot, load)| b.load(slot, Type::of(load.dtype()))).collect();
        let results = f(&mut b, &regs);
        let dims = dims.iter().copied().collect();
        Nest {
            dims,
            inner: 0,
            segments: None,
            loads,
            expr: b.finish(&results),
            reductions: Vec::new(),
            stores: self.operands(stores),
        }
    }

    fn emit(&mut self, instruction: Instruction, entries: GradientModes) {
        self.b.emit(instruction, entries, &self.node).unwrap();
    }

    fn map(
        &mut self,
        dims: &[usize],
        loads: Reads<'_>,
        stores: Reads<'_>,
        f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
    ) {
        let map = self.nest(dims, loads, stores, f);
        self.emit(Instruction::from(map), GradientModes::ALL);
    }

    /// Adds an element-wise map over the flattened images.
    fn flat(&mut self, from: &[BufferId], to: BufferId, f: impl FnOnce(&mut Builder, &[Reg]) -> Reg) {
        let loads: Vec<(BufferId, &[isize])> = from.iter().map(|&id| (id, &[1][..])).collect();
        self.map(&[self.len()], &loads, &[(to, &[1])], |b, regs| vec![f(b, regs)]);
    }

    /// Adds two sums per channel. The second summand depends on the first sum.
    fn sums(
        &mut self,
        from: &[BufferId],
        to: [BufferId; 2],
        f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
        g: impl FnOnce(&mut Builder, &[Reg], Reg) -> Reg,
    ) {
        let (plane, image) = ((self.h * self.w) as isize, (self.c * self.h * self.w) as isize);
        let strides = [plane, image, 1];
        let loads: Vec<(BufferId, &[isize])> = from
            .iter()
            .map(|&id| (id, if self.b.buffer(id).len == self.c { &[1, 0, 0][..] } else { &strides[..] }))
            .collect();
        let stores: Vec<(BufferId, &[isize])> = to.iter().map(|&id| (id, &[1, 0, 0][..])).collect();
        let mut values = Vec::new();
        let mut nest = self.nest(&[self.c, self.n, self.h * self.w], &loads, &stores, |b, regs| {
            let first = f(b, regs);
            let sum = b.reduced(0, Type::F32);
            let second = g(b, regs, sum);
            values = vec![first, second];
            let squares = b.reduced(1, Type::F32);
            // Kept alive as results, because `finish` drops unused instructions.
            vec![sum, squares, first, second]
        });
        let outputs = nest.expr.outputs().to_vec();
        let reductions =
            outputs[2..].iter().map(|&value| Reduction { op: ReduceOp::Sum, value }).collect::<Vec<_>>();
        let mut b = Builder::new();
        for &(inst, ty) in nest.expr.insts() {
            b.push(inst, ty);
        }
        let (expr, value_regs) = b.finish_keeping(&outputs[..2], &outputs[2..]);
        nest.expr = expr;
        nest.inner = 2;
        nest.reductions =
            reductions.into_iter().zip(value_regs).map(|(r, value)| Reduction { value, ..r }).collect();
        self.emit(Instruction::from(nest), GradientModes::ALL);
    }

    /// Adds `max(0, (x - mean) * factor + bias)`: a normalization per channel and an activation, as separate maps.
    fn normalised(&mut self, x: BufferId, [mean, factor, bias]: [BufferId; 3], y: BufferId) {
        let (plane, image) = ((self.h * self.w) as isize, (self.c * self.h * self.w) as isize);
        let z = self.image("z");
        let strides = [image, plane, 1];
        let dims = [self.n, self.c, self.h * self.w];
        let channel: &[isize] = &[0, 1, 0];
        let loads: [(BufferId, &[isize]); 4] =
            [(x, &strides), (mean, channel), (factor, channel), (bias, channel)];
        self.map(&dims, &loads, &[(z, &strides)], |b, regs| {
            let centred = b.sub(regs[0], regs[1]);
            let scaled = b.mul(centred, regs[2]);
            vec![b.add(scaled, regs[3])]
        });
        // The activation iterates over all four axes.
        let strides = [image, plane, self.w as isize, 1];
        let dims = [self.n, self.c, self.h, self.w];
        self.map(&dims, &[(z, &strides)], &[(y, &strides)], |b, regs| {
            let zero = b.constant(Type::F32, 0.0);
            vec![b.binary(BinaryOp::Max, regs[0], zero)]
        });
    }

    /// Adds the sums and the elements of `BatchNormalization` backward, after the backward pass of an activation.
    fn normalised_backward(
        &mut self,
        gradient: BufferId,
        y: BufferId,
        x: BufferId,
        mean: BufferId,
    ) -> BufferId {
        let g = self.image("g");
        self.flat(&[gradient, y], g, through_activation);
        let sums = [self.channels("sum"), self.channels("products")];
        self.sums(
            &[g, x, mean],
            sums,
            |_, regs| regs[0],
            |b, regs, _| {
                let centred = b.sub(regs[1], regs[2]);
                b.mul(regs[0], centred)
            },
        );
        let dx = self.image("dx");
        let (plane, image) = ((self.h * self.w) as isize, (self.c * self.h * self.w) as isize);
        let strides = [image, plane, 1];
        let channel: &[isize] = &[0, 1, 0];
        let loads: [(BufferId, &[isize]); 5] =
            [(g, &strides), (x, &strides), (mean, channel), (sums[0], channel), (sums[1], channel)];
        self.map(&[self.n, self.c, self.h * self.w], &loads, &[(dx, &strides)], |b, regs| {
            let centred = b.sub(regs[1], regs[2]);
            let along = b.mul(centred, regs[4]);
            let rest = b.sub(regs[0], regs[3]);
            vec![b.sub(rest, along)]
        });
        dx
    }

    fn conv(&mut self, pass: ConvPass, a: BufferId, filter: BufferId, to: BufferId) {
        let axis = |size| SlidingAxis {
            input: size,
            output: size,
            kernel: 3,
            stride: 1,
            dilation: 1,
            padding_before: 1,
        };
        let shape = ConvShape {
            pass,
            batch: self.n,
            groups: 1,
            channels_in: self.c,
            channels_out: self.c,
            axes: [axis(self.h), axis(self.w)].into_iter().collect(),
        };
        self.emit(conv_of(shape, a, filter, to), GradientModes::ALL);
    }

    fn filter(&mut self) -> BufferId {
        self.b.plane("filter", DType::F32, self.c * self.c * 9, PlaneId(0), 0)
    }

    /// Adds an instruction that cannot be fused: the gradient of a pooling.
    fn pooling_gradient(&mut self, from: BufferId, to: BufferId) {
        let axis = |size| SlidingAxis {
            input: size,
            output: size,
            kernel: 3,
            stride: 1,
            dilation: 1,
            padding_before: 1,
        };
        let axes = [axis(self.h), axis(self.w)].into_iter().collect();
        let shape = WindowShape { pass: WindowPass::SumGradient, planes: self.n * self.c, axes };
        let (source, target) = (self.contiguous(from), self.contiguous(to));
        self.emit(Instruction::from(Window { shape, source, index: None, target }), GradientModes::ALL);
    }

    fn finish(self, inputs: &[BufferId], outputs: &[BufferId]) -> Program {
        self.b.finish(inputs.to_vec(), outputs.to_vec()).unwrap()
    }
}

/// Returns an epilogue that stores its accumulator.
fn epilogue(dims: &[usize], to: BufferId) -> Nest {
    let mut b = Builder::new();
    let value = b.load(0, Type::F32);
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(DType::F32)],
        expr: b.finish(&[value]),
        reductions: Vec::new(),
        stores: vec![Operand::contiguous(to, DType::F32, dims)],
    }
}

/// Returns a convolution of two whole buffers.
fn conv_of(shape: ConvShape, a: BufferId, b: BufferId, to: BufferId) -> Instruction {
    let [a_dims, b_dims, dims] = shape.operands();
    let [a, b] = [(a, a_dims), (b, b_dims)].map(|(id, dims)| Operand::contiguous(id, DType::F32, &dims));
    let epilogue = epilogue(&dims, to);
    Instruction::from(Conv { shape, a, b, precision: Precision::F32, epilogue })
}

/// Computes `gradient where y > 0, else 0`.
fn through_activation(b: &mut Builder, regs: &[Reg]) -> Reg {
    let zero = b.constant(Type::F32, 0.0);
    let positive = b.compare(CompareOp::Lt, zero, regs[1]);
    b.select(positive, regs[0], zero)
}

fn names(program: &Program) -> Vec<&'static str> {
    program.instructions.iter().map(|scheduled| scheduled.instruction.name()).collect()
}

/// Returns the number of reductions and of loads of an instruction's nest.
fn shape_of(program: &Program, k: usize) -> (usize, usize) {
    let nest = program.instructions[k].instruction.nest().unwrap();
    (nest.reductions.len(), nest.loads.len())
}

fn statistics(images: &mut Images, x: BufferId) -> [BufferId; 2] {
    let sums = [images.channels("mean"), images.channels("factor")];
    images.sums(
        &[x],
        sums,
        |_, regs| regs[0],
        |b, regs, sum| {
            let centred = b.sub(regs[0], sum);
            b.mul(centred, centred)
        },
    );
    sums
}

#[test]
fn normalisation_and_activation_follow_their_statistics() {
    let mut i = Images::new(8, 96, 48, 48);
    let [x, y] = ["x", "y"].map(|name| i.image(name));
    let bias = i.channels("bias");
    let [mean, factor] = statistics(&mut i, x);
    i.normalised(x, [mean, factor, bias], y);
    let program = i.finish(&[x, bias], &[y, mean]);
    assert_eq!(names(&program), ["Reduce"], "{program}");
    assert_eq!(shape_of(&program, 0), (2, 2), "{program}");
    let Instruction::Nest(row) = &program.instructions[0].instruction else { unreachable!() };
    assert_eq!(row.stores.iter().map(|store| store.buffer).collect::<Vec<_>>(), [mean, y], "{program}");
}

#[test]
fn normalization_backward_takes_two_passes() {
    // Rows that fit into the cache, and rows that do not.
    let sizes = [(8, 96, 48, 48), (32, 64, 112, 112)];
    for ((n, c, h, w), expected) in
        sizes.into_iter().zip([&["Window", "Reduce"][..], &["Window", "Reduce", "Map"]])
    {
        let mut i = Images::new(n, c, h, w);
        let [x, y, from, gradient] = ["x", "y", "from", "gradient"].map(|name| i.image(name));
        let mean = i.channels("mean");
        i.pooling_gradient(from, gradient);
        let dx = i.normalised_backward(gradient, y, x, mean);
        let program = i.finish(&[x, y, from, mean], &[dx]);
        assert_eq!(names(&program), expected, "{program}");
    }
}

#[test]
fn shared_operand_is_inlined_into_both_readers() {
    // The elements have another consumer, so the map does not follow the sums.
    let mut i = Images::new(8, 96, 48, 48);
    let [y, from, gradient, g, last] = ["y", "from", "gradient", "g", "last"].map(|name| i.image(name));
    i.pooling_gradient(from, gradient);
    i.flat(&[gradient, y], g, through_activation);
    let sums = [i.channels("sum"), i.channels("squares")];
    i.sums(&[g], sums, |_, regs| regs[0], |b, regs, _| b.mul(regs[0], regs[0]));
    i.flat(&[g], last, |b, regs| b.mul(regs[0], regs[0]));
    let program = i.finish(&[y, from], &[sums[0], sums[1], last]);
    assert_eq!(names(&program), ["Window", "Reduce", "Map"], "{program}");
}

#[test]
fn activation_is_recomputed_from_loads() {
    let mut i = Images::new(8, 96, 48, 48);
    let [x, y, to, g0] = ["x", "y", "to", "gradient"].map(|name| i.image(name));
    let bias = i.channels("bias");
    let [mean, factor] = statistics(&mut i, x);
    i.normalised(x, [mean, factor, bias], y);
    let filter = i.filter();
    i.conv(ConvPass::Output, y, filter, to);
    let gradient = i.image("through the filter");
    i.conv(ConvPass::InputGradient, g0, filter, gradient);
    let dx = i.normalised_backward(gradient, y, x, mean);
    let program = i.finish(&[x, g0, bias], &[to, dx]);
    assert_eq!(names(&program), ["Reduce", "Conv", "Conv", "Reduce"], "{program}");
    // Only the convolution reads the result of the activation.
    assert!(!program.instructions[3].instruction.reads().contains(&y), "{program}");
}

/// `min(max(z, 0), 6)` of a normalization `z`, and its gradient, with separate maps for the conditions.
#[test]
fn clipped_activation_is_recomputed() {
    let mut i = Images::new(8, 96, 48, 48);
    let [x, z, y, to, g0] = ["x", "z", "y", "to", "g0"].map(|name| i.image(name));
    let bias = i.channels("bias");
    let [mean, factor] = statistics(&mut i, x);
    let (plane, image) = (2304, 96 * 2304);
    let (strides, channel): ([isize; 3], &[isize]) = ([image, plane, 1], &[0, 1, 0]);
    let loads: [(BufferId, &[isize]); 4] =
        [(x, &strides), (mean, channel), (factor, channel), (bias, channel)];
    i.map(&[8, 96, 2304], &loads, &[(z, &strides)], |b, regs| {
        let centred = b.sub(regs[0], regs[1]);
        let scaled = b.mul(centred, regs[2]);
        vec![b.add(scaled, regs[3])]
    });
    i.flat(&[z], y, |b, regs| {
        let (low, high) = (b.constant(Type::F32, 0.0), b.constant(Type::F32, 6.0));
        let above = b.binary(BinaryOp::Max, regs[0], low);
        b.binary(BinaryOp::Min, above, high)
    });
    let filter = i.filter();
    i.conv(ConvPass::Output, y, filter, to);
    let gradient = i.image("through the filter");
    i.conv(ConvPass::InputGradient, g0, filter, gradient);
    let len = i.len();
    let conditions = ["low", "high", "both"].map(|name| i.b.work(name, DType::Bool, len));
    let dz = i.image("dz");
    i.flat(&[z], conditions[0], |b, regs| {
        let low = b.constant(Type::F32, 0.0);
        b.compare(CompareOp::Le, low, regs[0])
    });
    i.flat(&[z], conditions[1], |b, regs| {
        let high = b.constant(Type::F32, 6.0);
        b.compare(CompareOp::Le, regs[0], high)
    });
    i.flat(&conditions[..2], conditions[2], |b, regs| b.binary(BinaryOp::And, regs[0], regs[1]));
    i.flat(&[conditions[2], gradient], dz, |b, regs| {
        let zero = b.constant(Type::F32, 0.0);
        b.select(regs[0], regs[1], zero)
    });
    let dx = i.image("dx");
    i.pooling_gradient(dz, dx);
    let program = i.finish(&[x, g0, bias], &[to, dx]);
    assert_eq!(names(&program), ["Reduce", "Conv", "Conv", "Window"], "{program}");
    assert!(program.instructions.iter().all(|i| !i.instruction.writes().contains(&z)), "{program}");
}

#[test]
fn residual_and_activation_fuse_into_convolution() {
    let mut i = Images::new(4, 64, 28, 28);
    let [x, skipped, y, sum, result] = ["x", "skipped", "y", "sum", "result"].map(|name| i.image(name));
    let bias = i.channels("bias");
    let filter = i.filter();
    i.conv(ConvPass::Output, x, filter, y);
    // The bias is over [n * c, h * w], the sum over all elements, the activation over four axes.
    let biased = i.image("biased");
    let plane = (i.h * i.w) as isize;
    let (n, c, image) = (i.n, i.c, (i.c * i.h * i.w) as isize);
    let strides = [image, plane, 1];
    i.map(&[n, c, 784], &[(y, &strides), (bias, &[0, 1, 0])], &[(biased, &strides)], |b, regs| {
        vec![b.add(regs[0], regs[1])]
    });
    i.flat(&[biased, skipped], sum, |b, regs| b.add(regs[0], regs[1]));
    i.flat(&[sum], result, |b, regs| {
        let zero = b.constant(Type::F32, 0.0);
        b.binary(BinaryOp::Max, regs[0], zero)
    });
    let program = i.finish(&[x, skipped, bias], &[result]);
    assert_eq!(names(&program), ["Conv"], "{program}");
    // The result reuses the bytes of the skipped operand, at its last use.
    let location = |id: BufferId| program.buffer(id).location;
    assert_eq!(location(skipped), location(result), "{program}");
}

#[test]
fn gradient_accumulation_fuses_into_producer() {
    let mut i = Images::new(2, 3, 4, 4);
    let [x, g] = ["x", "g"].map(|name| i.image(name));
    let result = i.b.work("made", DType::F32, 81);
    let total = i.b.plane("total", DType::F32, 81, PlaneId(1), 0);
    let axis = SlidingAxis { input: 4, output: 4, kernel: 3, stride: 1, dilation: 1, padding_before: 1 };
    let shape = ConvShape {
        pass: ConvPass::FilterGradient,
        batch: 2,
        groups: 1,
        channels_in: 3,
        channels_out: 3,
        axes: [axis, axis].into_iter().collect(),
    };
    i.emit(conv_of(shape, g, x, result), GradientModes::ALL);
    let add = i.nest(&[81], &[(total, &[1]), (result, &[1])], &[(total, &[1])], |b, regs| {
        vec![b.add(regs[0], regs[1])]
    });
    let put = i.nest(&[81], &[(result, &[1])], &[(total, &[1])], |_, regs| vec![regs[0]]);
    i.emit(Instruction::from(add), GradientModes::only(GradientMode::Accumulate));
    i.emit(Instruction::from(put), GradientModes::only(GradientMode::Overwrite));
    let program = i.finish(&[x, g], &[]);
    assert_eq!(names(&program), ["Conv", "Conv"], "{program}");
    for (scheduled, entry) in
        program.instructions.iter().zip([GradientMode::Accumulate, GradientMode::Overwrite])
    {
        assert_eq!(scheduled.gradient_modes, GradientModes::only(entry));
        assert_eq!(scheduled.instruction.writes().as_slice(), [total]);
    }
}

#[test]
fn expensive_maps_are_computed_once() {
    let program = |f: fn(&mut Builder, Reg) -> Reg| {
        let mut i = Images::new(8, 64, 56, 56);
        let [x, y] = ["x", "y"].map(|name| i.image(name));
        let sums = [i.channels("sum"), i.channels("squares")];
        i.flat(&[x], y, |b, regs| f(b, regs[0]));
        i.sums(&[y], sums, |_, regs| regs[0], |b, regs, _| b.mul(regs[0], regs[0]));
        let out = i.image("out");
        i.pooling_gradient(x, out);
        let last = i.image("last");
        i.flat(&[out, y], last, |b, regs| b.mul(regs[0], regs[1]));
        i.finish(&[x], &[sums[0], sums[1], last])
    };
    let cheap = program(|b, x| b.unary(UnaryOp::Neg, x));
    assert_eq!(names(&cheap), ["Reduce", "Window", "Map"], "{cheap}");
    let dear = program(|b, x| {
        let x = b.unary(UnaryOp::Erf, x);
        b.unary(UnaryOp::Exp, x)
    });
    assert_eq!(names(&dear), ["Map", "Reduce", "Window", "Map"], "{dear}");
}

/// After a value is inlined, its former readers must not read it again through another inlined value.
#[test]
fn inlined_values_are_not_read_again() {
    let mut images = Images::new(3, 4, 3, 2);
    let (x, statistic) = (images.image("x"), images.channels("statistic"));
    let (factor, spread) = (images.channels("factor"), images.image("spread"));
    let bounded = |b: &mut Builder, x: Reg| {
        let quarter = b.constant(Type::F32, 0.25);
        let small = b.mul(x, quarter);
        b.unary(UnaryOp::Tanh, small)
    };
    images.map(&[4], &[(statistic, &[1])], &[(factor, &[1])], |b, regs| vec![bounded(b, regs[0])]);
    images.map(&[4, 3, 6], &[(factor, &[1, 0, 0])], &[(spread, &[6, 24, 1])], |b, regs| {
        let square = b.mul(regs[0], regs[0]);
        vec![bounded(b, square)]
    });
    let sums = [images.channels("sum"), images.channels("squares")];
    let second = |b: &mut Builder, regs: &[Reg], _: Reg| b.mul(regs[2], regs[2]);
    let first = |b: &mut Builder, regs: &[Reg]| {
        let sum = b.add(regs[1], regs[2]);
        bounded(b, sum)
    };
    images.sums(&[factor, spread, x], sums, first, second);
    let program = images.finish(&[x, statistic], &sums);
    let mut initialized = program.inputs.clone();
    for scheduled in &program.instructions {
        assert!(scheduled.instruction.reads().iter().all(|id| initialized.contains(id)), "{program}");
        initialized.extend(scheduled.instruction.writes());
    }
}

#[test]
fn no_rewrite_raises_the_peak() {
    // One cheap map of three large operands, which is read again at the peak.
    let mut i = Images::new(8, 64, 56, 56);
    let inputs = ["p", "q", "r"].map(|name| i.image(name));
    let y = i.image("y");
    i.flat(&inputs, y, |b, regs| {
        let sum = b.add(regs[0], regs[1]);
        b.add(sum, regs[2])
    });
    let mut parts = Vec::new();
    let mut last = y;
    for k in 0..4 {
        let next = i.image("pooled");
        i.pooling_gradient(last, next);
        parts.push(next);
        last = next;
        assert!(k < 4);
    }
    let out = i.image("out");
    parts.push(y);
    i.flat(&parts, out, |b, regs| regs.iter().copied().reduce(|x, y| b.add(x, y)).unwrap());
    let program = i.finish(&inputs, &[out]);
    assert_eq!(names(&program), ["Map", "Window", "Window", "Window", "Window", "Map"], "{program}");
}

#[test]
fn a_product_reads_through_a_transposition() {
    let (m, n, k) = (64, 48, 32);
    let mut i = Images::new(1, 1, 1, 1);
    let a = i.b.work("a", DType::F32, m * k);
    let transposed = i.b.work("turned", DType::F32, m * k);
    let right = i.b.work("b", DType::F32, k * n);
    let product = i.b.work("product", DType::F32, m * n);
    i.map(&[m, k], &[(a, &[1, m as isize])], &[(transposed, &[k as isize, 1])], |_, regs| vec![regs[0]]);
    let instruction = MatMul {
        batch: [].into_iter().collect(),
        m,
        n,
        k,
        a: Operand::contiguous(transposed, DType::F32, &[m, k]),
        b: Operand::contiguous(right, DType::F32, &[k, n]),
        rounded: [None; 2],
        precision: Precision::F32,
        epilogue: epilogue(&[m, n], product),
    };
    i.emit(Instruction::from(instruction), GradientModes::ALL);
    let program = i.finish(&[a, right], &[product]);
    assert_eq!(names(&program), ["MatMul"], "{program}");
    let Instruction::MatMul(instruction) = &program.instructions[0].instruction else { unreachable!() };
    let factor = &instruction.a;
    assert_eq!((factor.buffer, factor.access.strides.as_slice()), (a, &[1, m as isize][..]));
}

/// Returns the type and the rounding of the factor of a product that reads a copy of a buffer.
fn reads_through_a_copy(from: DType, to: DType) -> (DType, Option<DType>) {
    let mut i = Images::new(1, 1, 1, 1);
    let a = i.b.plane("weights", from, 64 * 64, PlaneId(0), 0);
    let right = i.b.work("factor", DType::F32, 64 * 64);
    let [copy, product] = [to, DType::F32].map(|dtype| i.b.work("made", dtype, 64 * 64));
    i.map(&[64, 64], &[(a, &[64, 1])], &[(copy, &[64, 1])], |b, regs| vec![b.convert(regs[0], Type::of(to))]);
    let instruction = MatMul {
        batch: [].into_iter().collect(),
        m: 64,
        n: 64,
        k: 64,
        a: Operand::contiguous(copy, to, &[64, 64]),
        b: Operand::contiguous(right, DType::F32, &[64, 64]),
        rounded: [None; 2],
        precision: Precision::F32,
        epilogue: epilogue(&[64, 64], product),
    };
    i.emit(Instruction::from(instruction), GradientModes::ALL);
    let program = i.finish(&[right], &[product]);
    let last = &program.instructions.last().unwrap().instruction;
    let Instruction::MatMul(instruction) = last else { unreachable!() };
    assert_eq!(instruction.rounded[1], None);
    (instruction.a.access.dtype, instruction.rounded[0])
}

/// A product fuses narrowing copies of a factor; it cannot express other conversions.
#[test]
fn a_product_rounds_in_place_of_a_narrow_copy() {
    use DType::{BF16, F16, F32, I32};
    assert_eq!(reads_through_a_copy(F32, F16), (F32, Some(F16)));
    assert_eq!(reads_through_a_copy(F32, BF16), (F32, Some(BF16)));
    for (from, to) in [(BF16, F16), (F16, F32), (I32, F16)] {
        assert_eq!(reads_through_a_copy(from, to), (to, None), "{from} as {to}");
    }
}

/// Instructions that can fail come before every write to state, even if one instruction computes both a checked value
/// and state.
#[test]
fn state_is_written_after_everything_that_can_fail() {
    let mut i = Images::new(1, 4, 1, 1);
    let x = i.channels("x");
    let y = i.channels("y");
    let checked = i.channels("checked");
    let running = i.b.plane("running", DType::F32, 4, PlaneId(0), 0);
    i.map(&[4], &[(x, &[1]), (running, &[1])], &[(y, &[1]), (running, &[1])], |b, regs| {
        vec![b.unary(UnaryOp::Tanh, regs[0]), b.add(regs[0], regs[1])]
    });
    i.map(&[4], &[(y, &[1])], &[(checked, &[1])], |b, regs| {
        let index = b.convert(regs[0], Type::I64);
        let index = b.guard(index, 1);
        vec![b.convert(index, Type::F32)]
    });
    let program = i.finish(&[x], &[checked]);
    let fails = program.instructions.iter().rposition(|i| i.instruction.can_fail()).unwrap();
    let writes = program.instructions.iter().position(|i| i.instruction.writes().contains(&running)).unwrap();
    assert!(fails < writes, "{program}");
}

/// Builds `y = tanh(x)`, `running = y`, `y = y - x`, and a check of `y`.
fn state_before_an_update(fused: bool) -> (Program, [BufferId; 2]) {
    let mut i = Images::new(1, 4, 1, 1);
    let [x, y, checked] = ["x", "y", "checked"].map(|name| i.channels(name));
    let running = i.b.plane("running", DType::F32, 4, PlaneId(0), 0);
    i.map(&[4], &[(x, &[1])], &[(y, &[1])], |b, regs| vec![b.unary(UnaryOp::Tanh, regs[0])]);
    i.map(&[4], &[(y, &[1])], &[(running, &[1])], |_, regs| vec![regs[0]]);
    i.map(&[4], &[(y, &[1]), (x, &[1])], &[(y, &[1])], |b, regs| vec![b.sub(regs[0], regs[1])]);
    i.map(&[4], &[(y, &[1])], &[(checked, &[1])], |b, regs| {
        let index = b.convert(regs[0], Type::I64);
        let index = b.guard(index, 4);
        vec![b.convert(index, Type::F32)]
    });
    let (inputs, outputs) = (vec![x], vec![checked]);
    let program = if fused { i.b.finish(inputs, outputs) } else { i.b.finish_unfused(inputs, outputs) };
    (program.unwrap(), [x, running])
}

/// State takes a value before an update, and an instruction that can fail reads the updated value. The state is written
/// last, from a copy.
#[test]
fn state_receives_the_value_before_an_early_update() {
    for fused in [false, true] {
        let (program, [x, running]) = state_before_an_update(fused);
        let fails = program.instructions.iter().rposition(|i| i.instruction.can_fail()).unwrap();
        let writes =
            program.instructions.iter().position(|i| i.instruction.writes().contains(&running)).unwrap();
        assert!(fails < writes, "{program}");
        let values = [-0.5f32, 0.25, 1.0, -1.5];
        let executable = Reference.compile(Arc::new(program)).unwrap();
        let program = executable.program();
        let mut work = Workspace::new(Arc::new(Reference));
        work.reserve(program.work_bytes, executable.scratch_bytes()).unwrap();
        let BufferLocation::Work(at) = program.buffer(x).location else {
            unreachable!("an input is a work buffer")
        };
        work.arena().write(at, bytemuck::cast_slice(&values)).unwrap();
        let plane = Memory::new(16);
        executable
            .run(&Bindings { planes: &[&plane] }, &mut work, GradientMode::Overwrite, Scalars::default())
            .unwrap();
        let actual: Vec<f32> = bytemuck::pod_collect_to_vec(&plane.to_vec(0, 16).unwrap());
        assert_eq!(actual, values.map(|x| f64::from(x).tanh() as f32), "{program}");
    }
}

/// Builds `y = x * tanh(x)` and its gradient `g * t + g * (x * (1 - t * t))`. With `read_again`, `x` has another reader
/// at the end.
fn activated(fused: bool, read_again: bool) -> Program {
    let mut i = Images::new(4, 8, 16, 16);
    let names = ["from", "x", "t", "y", "to", "g0", "g", "a", "s", "b", "dx", "last"];
    let [from, x, t, y, to, g0, g, a, s, b, dx, last] = names.map(|name| i.image(name));
    i.pooling_gradient(from, x);
    i.flat(&[x], t, |e, regs| e.unary(UnaryOp::Tanh, regs[0]));
    i.flat(&[x, t], y, |e, regs| e.mul(regs[0], regs[1]));
    i.pooling_gradient(y, to);
    i.pooling_gradient(g0, g);
    i.flat(&[g, t], a, |e, regs| e.mul(regs[0], regs[1]));
    i.flat(&[x, t], s, |e, regs| {
        let (one, square) = (e.constant(Type::F32, 1.0), e.mul(regs[1], regs[1]));
        let rest = e.sub(one, square);
        e.mul(regs[0], rest)
    });
    i.flat(&[g, s], b, |e, regs| e.mul(regs[0], regs[1]));
    i.flat(&[a, b], dx, |e, regs| e.add(regs[0], regs[1]));
    i.pooling_gradient(if read_again { x } else { dx }, last);
    let (inputs, outputs) = (vec![from, g0], vec![to, dx, last]);
    if fused { i.b.finish(inputs, outputs).unwrap() } else { i.b.finish_unfused(inputs, outputs).unwrap() }
}

#[test]
fn slope_is_saved_instead_of_its_operands() {
    let program = activated(true, false);
    let slope = program.buffers.iter().position(|buffer| &*buffer.label == "dx/slope").unwrap();
    let slope = BufferId(slope as u32);
    let positions = |buffers: &dyn Fn(&Instruction) -> BufferIds| -> Vec<usize> {
        let instructions = program.instructions.iter().enumerate();
        instructions.filter(|(_, i)| buffers(&i.instruction).contains(&slope)).map(|(at, _)| at).collect()
    };
    // Computed with the activation, before other instructions; read once, by the instruction that has the gradient.
    assert_eq!(positions(&|instruction| instruction.writes()), [1], "{program}");
    assert_eq!(positions(&|instruction| instruction.reads()).len(), 1, "{program}");
    let image = program.buffer(slope).bytes();
    // The incoming gradient, the result, and the slope.
    assert!(program.work_bytes <= 4 * image, "{program}");

    let inputs: Vec<Vec<Scalar>> = (0..2)
        .map(|k| {
            let sample = |j: usize| ((j * 37 + k * 11) % 101) as f32 / 50.0 - 1.0;
            (0..4 * 8 * 16 * 16).map(|j| Scalar::F32(sample(j))).collect()
        })
        .collect();
    let run = |program: &Program| evaluate(program, Mode::Exact, &inputs, Scalars::default()).unwrap();
    for (got, expected) in run(&program).iter().flatten().zip(run(&activated(false, false)).iter().flatten())
    {
        let (got, expected) = (got.to_f64(), expected.to_f64());
        assert!((got - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{got} is not {expected}");
    }
}

#[test]
fn no_slope_for_saved_operands() {
    let program = activated(true, true);
    assert!(program.buffers.iter().all(|buffer| !buffer.label.ends_with("slope")), "{program}");
}

/// A condition must not become a factor: zero times infinity would give NaN.
#[test]
fn conditions_are_not_slopes() {
    let mut i = Images::new(4, 8, 16, 16);
    let [from, x, z, y, g0, g, dx] = ["from", "x", "z", "y", "g0", "g", "dx"].map(|name| i.image(name));
    i.pooling_gradient(from, x);
    i.flat(&[x], z, |e, regs| e.unary(UnaryOp::Tanh, regs[0]));
    i.pooling_gradient(z, y);
    i.pooling_gradient(g0, g);
    i.flat(&[g, x, z], dx, |e, regs| {
        let (positive, zero) = (e.compare(CompareOp::Lt, regs[1], regs[2]), e.constant(Type::F32, 0.0));
        e.select(positive, regs[0], zero)
    });
    let program = i.finish(&[from, g0], &[y, dx]);
    assert!(program.buffers.iter().all(|buffer| !buffer.label.ends_with("slope")), "{program}");
}

/// Additional use in the program besides a maximum and its gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ExtraUse {
    Nothing,
    Output,
    Reader,
    OtherWindows,
}

/// Returns the type of the positions of a maximum over windows of `kernel` elements along each axis, after fusion.
fn fused_position_type(kernel: usize, before: isize, extra_use: ExtraUse) -> (DType, Program) {
    let mut images = Images::new(2, 3, 20, 20);
    let (x, y, g, dx) = (images.image("x"), images.image("y"), images.image("g"), images.image("back"));
    let index = images.b.work("positions", DType::I64, images.len());
    let axis = SlidingAxis { input: 20, output: 20, kernel, stride: 1, dilation: 1, padding_before: before };
    let shape = |pass| WindowShape { pass, planes: 6, axes: [axis, axis].into_iter().collect() };
    let mut window = |shape, source, target| {
        let [source, index, target] = [source, index, target].map(|id| images.contiguous(id));
        images.emit(
            Instruction::from(Window {
                shape,
                source,
                index: Some(WindowIndex::with_element_positions(index)),
                target,
            }),
            GradientModes::ALL,
        );
    };
    window(shape(WindowPass::Max), x, y);
    let mut gradient = shape(WindowPass::MaxGradient);
    if extra_use == ExtraUse::OtherWindows {
        gradient.axes[0].padding_before += 1;
    }
    window(gradient, g, dx);
    let mut outputs = vec![y, dx];
    match extra_use {
        ExtraUse::Output => outputs.push(index),
        ExtraUse::Reader => {
            let copy = images.b.work("copy", DType::I64, images.len());
            images.map(&[2400], &[(index, &[1])], &[(copy, &[1])], |_, regs| vec![regs[0]]);
            outputs.push(copy);
        }
        ExtraUse::Nothing | ExtraUse::OtherWindows => {}
    }
    let program = images.finish(&[x, g], &outputs);
    (program.buffer(index).dtype, program)
}

#[test]
fn gradient_only_positions_become_cells() {
    let (dtype, program) = fused_position_type(3, 1, ExtraUse::Nothing);
    assert_eq!(dtype, DType::U8);
    assert!(program.to_string().contains("uint8[2400] work@"), "{program}");
    assert_eq!(fused_position_type(16, 8, ExtraUse::Nothing).0, DType::U8);
    assert_eq!(fused_position_type(17, 8, ExtraUse::Nothing).0, DType::U16);
    for extra_use in [ExtraUse::Output, ExtraUse::Reader, ExtraUse::OtherWindows] {
        assert_eq!(fused_position_type(3, 1, extra_use).0, DType::I64, "{extra_use:?}");
    }
    // Windows that only cover padding have a position but no cell.
    assert_eq!(fused_position_type(3, 3, ExtraUse::Nothing).0, DType::I64);
    // Each position takes one byte instead of eight.
    let (wide, narrow) = (fused_position_type(3, 1, ExtraUse::OtherWindows).1, program);
    assert!(wide.work_bytes >= narrow.work_bytes + 2400 * 7 - 1024, "{wide}\n{narrow}");
}

/// Another computation in the reader of an expensive map.
#[derive(Clone, Copy)]
enum Shared {
    /// None: the reader does not load the operand of the map.
    Nothing,
    /// Another function of the operand.
    Operand,
    /// The value of the map.
    Value,
}

/// Returns the result of the test for an instruction that reads 16 elements with some strides, and an expensive map.
fn cannot_save_weight(dims: &[usize], strides: &[isize], shared: Shared) -> bool {
    let mut images = Images::new(1, 1, 4, 4);
    let [x, y, z] = ["x", "y", "z"].map(|name| images.image(name));
    let square: &[isize] = &[4, 1];
    let map = images.nest(&[4, 4], &[(x, square)], &[(y, square)], |b, regs| {
        let exponential = b.unary(UnaryOp::Exp, regs[0]);
        vec![b.unary(UnaryOp::Exp, exponential)]
    });
    let loads = [(y, strides), (x, square)];
    let count = if matches!(shared, Shared::Nothing) { 1 } else { 2 };
    let reader = images.nest(dims, &loads[..count], &[(z, square)], |b, regs| {
        let value = b.unary(UnaryOp::Neg, regs[0]);
        match shared {
            Shared::Nothing => vec![value],
            Shared::Operand => vec![b.binary(BinaryOp::Add, value, regs[1])],
            Shared::Value => {
                let exponential = b.unary(UnaryOp::Exp, regs[1]);
                let same = b.unary(UnaryOp::Exp, exponential);
                vec![b.binary(BinaryOp::Add, value, same)]
            }
        }
    });
    let buffers = [x, y, z].map(|id| images.b.buffer(id).clone());
    let machine = (&buffers[..], &FusionWeights::CPU_CORE);
    let own_numbers = super::recompute_filter::ValueNumbers::new();
    let reader = Instruction::from(reader);
    super::recompute_filter::cannot_save_weight(&reader, &own_numbers, y, (&map, 0), machine)
}

/// The test rejects only instructions that read each element at one point. Other instructions could compute the value
/// at fewer points than the map.
#[test]
fn recomputation_of_single_reads_is_rejected() {
    for shared in [Shared::Nothing, Shared::Operand] {
        assert!(cannot_save_weight(&[4, 4], &[4, 1], shared));
        assert!(cannot_save_weight(&[4, 4], &[1, 4], shared));
        assert!(!cannot_save_weight(&[4, 4], &[0, 0], shared), "one element");
        assert!(!cannot_save_weight(&[4, 4], &[0, 1], shared), "one row");
        assert!(!cannot_save_weight(&[2, 4], &[4, 1], shared), "two rows");
    }
}

#[test]
fn recomputation_of_a_computed_value_is_not_rejected() {
    assert!(!cannot_save_weight(&[4, 4], &[4, 1], Shared::Value));
}

/// A map may read a few buffers through many accesses.
#[test]
fn loads_of_one_buffer_are_one_load() {
    let mut images = Images::new(1, 1, 1, 64);
    let ids = ["x", "y"].map(|name| images.image(name));
    let to = images.image("z");
    let loads: Vec<(BufferId, &[isize])> = (0..40).map(|k| (ids[k % 2], &[1][..])).collect();
    let map = images.nest(&[64], &loads, &[(to, &[1])], |b, regs| {
        // Each load has another position, so no load is dropped.
        let sum = regs.iter().copied().reduce(|sum, value| b.binary(BinaryOp::Add, sum, value));
        vec![sum.unwrap()]
    });
    assert_eq!(map.loads.len(), 40);
    assert_eq!(super::inline_nest::count_loads(&map), 2);
}

/// A map with many readers merges with few of them: the fusion of every further one would take longer.
#[test]
fn fused_nests_write_a_bounded_number_of_buffers() {
    let mut i = Images::new(1, 4, 1, 1);
    let [x, y] = ["x", "y"].map(|name| i.image(name));
    i.flat(&[x], y, |b, regs| b.unary(UnaryOp::Tanh, regs[0]));
    let outputs: Vec<BufferId> = (0..200).map(|_| i.image("out")).collect();
    for &out in &outputs {
        i.flat(&[y], out, |b, regs| b.unary(UnaryOp::Exp, regs[0]));
    }
    let program = i.finish(&[x], &outputs);
    let stores = |scheduled: &crate::ScheduledInstruction| scheduled.instruction.writes().len();
    let most = program.instructions.iter().map(stores).max().unwrap();
    assert!((32..=64).contains(&most), "{program}");
}
