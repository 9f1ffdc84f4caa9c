//! Instruction for products of bytes.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, ConvPass, ConvShape, DType, Dims, Inst, Load, ReduceOp, Reduction,
    Reg, SlidingAxis, Type, product_of_sizes,
};

use super::body::{Body, nest_fault};
use crate::buffer::{Buffer, BufferId, BufferIds};
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Nest, Operand, Use, batched_matrix_dims, nest_buffers_mut};

/// Sizes of a product of bytes.
#[derive(Clone, Debug)]
pub enum IntegerShape {
    /// Batched matrix product of A, over `batch + [m, k]`, and B, over `batch + [k, n]`. The epilogue is over
    /// `batch + [m, n]`.
    Matrices {
        /// Sizes of the batch axes.
        batch: Dims,
        /// Number of rows of the product.
        m: usize,
        /// Number of columns of the product.
        n: usize,
        /// Length of the sums.
        k: usize,
    },
    /// Convolution of an image A and a filter B, both whole and row-major ([`ConvShape::operands`]). The pass is the
    /// output. Padding has no distance from the zero point.
    Windows(ConvShape),
}

/// Matrix product or convolution of bytes, `U8` or `I8`, without their zero points, and an epilogue.
///
/// `product = sum of (a - zero point of a) * (b - zero point of b)`, accumulated in `i32`, which wraps. The accumulator
/// of the epilogue is the sum.
#[derive(Clone, Debug)]
pub struct IntegerProduct {
    /// Sizes.
    pub shape: IntegerShape,
    /// Operand A.
    pub a: Operand,
    /// Operand B.
    pub b: Operand,
    /// Zero points of A and B, of their types; without them zero. Zero points of matrices are over the space of the
    /// factor, and constant along the sums. Zero points of a convolution are whole buffers: one element, or for the
    /// filter one for each channel of the result.
    pub zero_points: [Option<Operand>; 2],
    /// Epilogue of the sums.
    pub epilogue: Nest,
}

/// Returns true for the types of factors.
fn is_byte(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8)
}

impl IntegerProduct {
    /// Returns the spaces of A and B.
    fn spaces(&self) -> [Dims; 2] {
        match &self.shape {
            IntegerShape::Matrices { batch, m, n, k } => {
                [[*m, *k], [*k, *n]].map(|sizes| batched_matrix_dims(batch, sizes))
            }
            IntegerShape::Windows(shape) => {
                let [a, b, _] = shape.operands();
                [a, b]
            }
        }
    }

    /// Returns the space of the sums.
    fn result_dims(&self) -> Dims {
        match &self.shape {
            IntegerShape::Matrices { batch, m, n, .. } => batched_matrix_dims(batch, [*m, *n]),
            IntegerShape::Windows(shape) => shape.output_dims(),
        }
    }

    fn operands(&self) -> impl Iterator<Item = &Operand> {
        [&self.a, &self.b].into_iter().chain(self.zero_points.iter().flatten())
    }

    /// Returns the first fault of the factors and their zero points.
    fn factor_fault(&self, buffers: &[Buffer]) -> Option<String> {
        if let Some(fault) = self.operands().find_map(|operand| operand.validate(buffers)) {
            return Some(fault);
        }
        let (along, channels) = match &self.shape {
            IntegerShape::Matrices { batch, .. } => ([batch.len() + 1, batch.len()], None),
            IntegerShape::Windows(shape) => {
                let is_output = shape.pass == ConvPass::Output;
                let fault = (!is_output).then(|| "a convolution of bytes computes its output".to_owned());
                if let Some(fault) = fault.or_else(|| shape.validate()) {
                    return Some(fault);
                }
                ([0, 0], Some([1, shape.groups * shape.channels_out]))
            }
        };
        for (i, (factor, dims)) in [&self.a, &self.b].into_iter().zip(self.spaces()).enumerate() {
            let dtype = factor.access.dtype;
            if !is_byte(dtype) {
                return Some(format!("a factor of type {dtype}, expected uint8 or int8"));
            }
            if factor.access.strides.len() != dims.len() {
                return Some("a factor's access does not fit its space".into());
            }
            if channels.is_some() && factor.access != Access::contiguous(dtype, &dims) {
                return Some("a factor of a convolution must be whole and row-major".into());
            }
            if let Some(fault) = factor.bounds_fault(&dims, "a factor") {
                return Some(fault);
            }
            let Some(zero_point) = &self.zero_points[i] else { continue };
            let access = &zero_point.access;
            if access.dtype != dtype {
                return Some(format!("zero points of type {} for a factor of type {dtype}", access.dtype));
            }
            let fits = match channels {
                Some(channels) => {
                    let is_whole = *access == Access::contiguous(dtype, &[access.len]);
                    is_whole && (access.len == 1 || access.len == channels[i])
                }
                None => access.strides.len() == dims.len() && access.strides[along[i]] == 0,
            };
            if !fits {
                return Some("the access to the zero points does not fit the factor".into());
            }
            if channels.is_none()
                && let Some(fault) = zero_point.bounds_fault(&dims, "the zero points")
            {
                return Some(fault);
            }
        }
        None
    }

    /// Returns an equal nest: a reduction over the terms of the sums, and the epilogue.
    #[must_use]
    pub fn as_nest(&self) -> Nest {
        let mut terms = Terms { loads: Vec::new(), b: Builder::new(), dims: self.result_dims(), inner: 0 };
        let value = match &self.shape {
            IntegerShape::Matrices { batch, k, .. } => terms.of_matrices(self, batch.len(), *k),
            IntegerShape::Windows(shape) => terms.of_windows(self, shape),
        };
        let Terms { mut loads, mut b, dims, inner } = terms;
        let first = loads.len();
        let sum = b.reduced(0, Type::I32);
        // Slot 0 of the epilogue is the accumulator.
        let slots = |slot: u16| slot + first as u16;
        let expr = self.epilogue.expr.clone().with_slots(slots);
        let accumulator = slots(0);
        let regs = b.copy(&expr, |b, inst, ty| match inst {
            Inst::Load(slot) if slot == accumulator => sum,
            Inst::Load(slot) => b.push(Inst::Load(slot - 1), ty),
            Inst::LoadAt(slot, index) => b.push(Inst::LoadAt(slot - 1, index), ty),
            other => b.push(other, ty),
        });
        let outputs: Vec<Reg> = expr.outputs().iter().map(|reg| regs[usize::from(reg.0)]).collect();
        let (expr, values) = b.finish_keeping(&outputs, &[value]);
        let widened = |operand: &Operand| {
            let mut access = operand.access.clone();
            access.strides.resize(dims.len(), 0);
            operand.with_access(access)
        };
        loads.extend(self.epilogue.load_operands().map(|operand| Load::Buffer(widened(operand))));
        Nest {
            inner,
            segments: None,
            loads,
            expr,
            reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
            stores: self.epilogue.stores.iter().map(widened).collect(),
            dims,
        }
    }
}

/// Terms of the sums, under construction.
struct Terms {
    loads: Vec<Load<Operand>>,
    b: Builder,
    /// Space of the result, then of the terms.
    dims: Dims,
    /// Number of axes of the terms.
    inner: usize,
}

impl Terms {
    /// Loads an element as an integer.
    fn load(&mut self, operand: &Operand, strides: impl IntoIterator<Item = isize>) -> Reg {
        let access = Access { strides: strides.into_iter().collect(), ..operand.access.clone() };
        let ty = Type::of(access.dtype);
        self.loads.push(Load::Buffer(operand.with_access(access)));
        let element = self.b.load(self.loads.len() - 1, ty);
        self.b.convert(element, Type::I32)
    }

    /// Returns the term of two matrices.
    fn of_matrices(&mut self, product: &IntegerProduct, batch: usize, k: usize) -> Reg {
        self.dims.push(k);
        self.inner = 1;
        let factors = [(&product.a, &product.zero_points[0]), (&product.b, &product.zero_points[1])];
        let distances = [0, 1].map(|i| {
            let (factor, zero_point) = factors[i];
            // Axes of the nest: batch, rows, columns, terms.
            let strides = |operand: &Operand| {
                let own = &operand.access.strides;
                let (first, second) = (own[batch], own[batch + 1]);
                let rest = if i == 0 { [first, 0, second] } else { [0, second, first] };
                own[..batch].iter().copied().chain(rest).collect::<Vec<_>>()
            };
            let element = self.load(factor, strides(factor));
            match zero_point {
                None => element,
                Some(zero_point) => {
                    let zero_point = self.load(zero_point, strides(zero_point));
                    self.b.sub(element, zero_point)
                }
            }
        });
        self.b.mul(distances[0], distances[1])
    }

    /// Returns the term of a convolution.
    fn of_windows(&mut self, product: &IntegerProduct, shape: &ConvShape) -> Reg {
        let ConvShape { groups, channels_in, channels_out, axes, .. } = shape;
        let outer = self.dims.len();
        self.dims.push(*channels_in);
        self.dims.extend(axes.iter().map(|axis| axis.kernel));
        self.inner = 1 + axes.len();
        let rank = self.dims.len();
        let b = &mut self.b;
        // The element of the image under a cell of the window, and whether there is one.
        let [image, channel, term_channel] = [0, 1, outer].map(|axis| b.coordinate(axis));
        let all = b.int((groups * channels_in) as i64);
        let mut index = b.mul(image, all);
        if *groups > 1 {
            let (of_group, inputs) = (b.int(*channels_out as i64), b.int(*channels_in as i64));
            let group = b.binary(BinaryOp::Div, channel, of_group);
            let first = b.mul(group, inputs);
            index = b.add(index, first);
        }
        index = b.add(index, term_channel);
        let mut conditions = Vec::new();
        let zero = b.int(0);
        for (i, axis) in axes.iter().enumerate() {
            let &SlidingAxis { input, stride, dilation, padding_before, .. } = axis;
            let (o, cell) = (b.coordinate(2 + i), b.coordinate(outer + 1 + i));
            let [stride, dilation, input] = [stride, dilation, input].map(|size| b.int(size as i64));
            let (at, of_cell, before) =
                (b.mul(o, stride), b.mul(cell, dilation), b.int(padding_before as i64));
            let at = b.add(at, of_cell);
            let at = b.sub(at, before);
            conditions.push(b.compare(CompareOp::Le, zero, at));
            conditions.push(b.compare(CompareOp::Lt, at, input));
            let line = b.mul(index, input);
            index = b.add(line, at);
        }
        let a = &product.a;
        let ty = Type::of(a.access.dtype);
        let access = Access { strides: std::iter::repeat_n(0, rank).collect(), ..a.access.clone() };
        self.loads.push(Load::Buffer(a.with_access(access)));
        let element = self.b.load_at(self.loads.len() - 1, index, ty);
        let mut distance = self.b.convert(element, Type::I32);
        let nothing = vec![0; rank];
        if let Some(zero_point) = &product.zero_points[0] {
            let zero_point = self.load(zero_point, nothing.iter().copied());
            distance = self.b.sub(distance, zero_point);
        }
        let padding = self.b.constant(Type::I32, 0.0);
        for condition in conditions {
            distance = self.b.select(condition, distance, padding);
        }
        let mut strides = nothing.clone();
        let of_filter = &product.b.access.strides;
        (strides[1], strides[outer]) = (of_filter[0], of_filter[1]);
        strides[outer + 1..].copy_from_slice(&of_filter[2..]);
        let mut weight = self.load(&product.b, strides);
        if let Some(zero_point) = &product.zero_points[1] {
            let mut strides = nothing;
            strides[1] = isize::from(zero_point.access.len > 1);
            let zero_point = self.load(zero_point, strides);
            weight = self.b.sub(weight, zero_point);
        }
        self.b.mul(distance, weight)
    }
}

impl Body for IntegerProduct {
    fn name(&self) -> &'static str {
        "IntegerProduct"
    }

    fn describe_sizes(&self) -> String {
        let types = format!("{} x {}", self.a.access.dtype, self.b.access.dtype);
        match &self.shape {
            IntegerShape::Matrices { batch, m, n, k } => {
                format!("{:?} {m}x{n}x{k} of {types}", batch.as_slice())
            }
            IntegerShape::Windows(shape) => {
                let [a, b, _] = shape.operands();
                format!("{:?} x {:?} of {types}", a.as_slice(), b.as_slice())
            }
        }
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let epilogue = &self.epilogue;
        if epilogue.segments.is_some() {
            return Some("the epilogue of a product cannot have segments".into());
        }
        if let Some(fault) = self.factor_fault(buffers) {
            return Some(fault);
        }
        if epilogue.dims != self.result_dims() || epilogue.inner != 0 {
            return Some("the epilogue and the product have different spaces".into());
        }
        nest_fault(epilogue, &[DType::I32], buffers).or_else(|| epilogue.validate())
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        for (factor, dims) in [&self.a, &self.b].into_iter().zip(self.spaces()) {
            traffic.add_read(factor.buffer, product_of_sizes(dims));
        }
        self.zero_points.iter().flatten().for_each(|operand| traffic.add_read(operand.buffer, u64::MAX));
        traffic.add_nest(&self.epilogue);
    }

    fn flops(&self) -> u64 {
        let terms = match &self.shape {
            IntegerShape::Matrices { k, .. } => *k as u64,
            IntegerShape::Windows(shape) => product_of_sizes(shape.filter_dims().into_iter().skip(1)),
        };
        let products = product_of_sizes(self.result_dims()).saturating_mul(terms);
        products.saturating_mul(2).saturating_add(nest_flops(&self.epilogue))
    }

    fn nest(&self) -> Option<&Nest> {
        Some(&self.epilogue)
    }

    fn nest_mut(&mut self) -> Option<&mut Nest> {
        Some(&mut self.epilogue)
    }

    fn factor_buffers(&self) -> Option<BufferIds> {
        Some(self.operands().map(|operand| operand.buffer).collect())
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let zero_points = self.zero_points.iter_mut().flatten();
        let operands = [&mut self.a, &mut self.b].into_iter().chain(zero_points);
        operands.for_each(|operand| each(&mut operand.buffer, Use::Read));
        nest_buffers_mut(&mut self.epilogue, each);
    }
}
