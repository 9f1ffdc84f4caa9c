//! Optimizer operators of ONNX Runtime: `AdamWOptimizer`, `SGDOptimizerV2`, `InplaceClipGradNorm` and
//! `InPlaceAccumulatorV2` of `com.microsoft` version 1.
//!
//! They update sequences of tensors in place. The sequences are bound to whole planes of a state. So each update is one
//! instruction per element type, for any number of parameters. The padding between tensors is zero and stays zero. The
//! formulas equal ONNX Runtime's training operators. float32 planes are computed in float32, float64 planes in float64.

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, Reg, Type, UnaryOp};
use ortrain_graph::{DType, Graph, Node, Shape, ValueType};
use ortrain_program::{BufferId, GradientMode};

use crate::OpError;
use crate::class::Class;
use crate::infer::Infer;
use crate::lower::{Lower, NestBuilder, PlanePart};
use crate::op::{Definition, Op};

/// Number that `InplaceClipGradNorm` of ONNX Runtime adds to the norm.
const CLIP_EPSILON: f64 = 1e-6;

/// Bytes of a plane that are summed as one group. Planes are padded to multiples of 256 bytes, so every group is
/// complete.
const NORM_GROUP_BYTES: usize = 256;

fn check_float_sequence(cx: &Infer<'_>, k: usize) -> Result<DType, OpError> {
    match cx.ty(k) {
        ValueType::Sequence(dtype) if dtype.is_float() => Ok(*dtype),
        other => {
            Err(OpError::invalid(format!("input {k} has type {other}, expected a sequence of float tensors")))
        }
    }
}

/// Returns the plane parts of several sequences, grouped by part. If the first sequence is float16 or bfloat16, the
/// others may be float32.
fn matching_planes(cx: &Lower<'_>, sequences: &[usize]) -> Result<Vec<Vec<PlanePart>>, OpError> {
    let plane_lists = sequences.iter().map(|&k| cx.planes(k)).collect::<Result<Vec<_>, _>>()?;
    for (parts, &k) in plane_lists.iter().zip(sequences) {
        let fits = |p: &PlanePart, q: &PlanePart| {
            let wider = q.dtype == DType::F32 && matches!(p.dtype, DType::F16 | DType::BF16);
            p.has_same_layout(q) && (p.dtype == q.dtype || wider)
        };
        if parts.len() != plane_lists[0].len() || !plane_lists[0].iter().zip(parts).all(|(p, q)| fits(p, q)) {
            return Err(OpError::invalid(format!(
                "input sequences {} and {k} have tensors of different sizes or types",
                sequences[0]
            )));
        }
    }
    Ok((0..plane_lists[0].len())
        .map(|i| plane_lists.iter().map(|parts| parts[i].clone()).collect())
        .collect())
}

/// Loads a scalar input (one element) in a nest.
fn load_scalar(cx: &mut Lower<'_>, nest: &mut NestBuilder, k: usize, ty: Type) -> Reg {
    let buffer = cx.input(k);
    let strides = vec![0; nest.dims().len()];
    let value = nest.load_strided(cx, buffer, 0, &strides);
    nest.b.convert(value, ty)
}

/// Loads the element of a plane part in a nest over its elements. Returns the buffer of the part and the element.
fn load_plane(cx: &mut Lower<'_>, nest: &mut NestBuilder, part: &PlanePart, label: &str) -> (BufferId, Reg) {
    let buffer = cx.plane_buffer(part, label);
    (buffer, nest.load_broadcast(buffer, part.dtype, &[part.len]))
}

/// Sets output 0, the "updated" flag: the optional signal input, or true.
fn emit_updated_flag(cx: &mut Lower<'_>, signal: usize) {
    if cx.has_input(signal) {
        cx.alias(0, signal);
    } else {
        cx.set_true(0);
    }
}

/// Returns `new`, or `old` if the node has the signal input and the signal is false.
fn select_by_signal(cx: &mut Lower<'_>, nest: &mut NestBuilder, signal: usize, new: Reg, old: Reg) -> Reg {
    if !cx.has_input(signal) {
        return new;
    }
    let go = load_scalar(cx, nest, signal, Type::Bool);
    nest.b.select(go, new, old)
}

/// Binds the output sequences to the planes of the inputs that they overwrite.
fn bind_updated_sequences(op: &dyn Op, cx: &mut Lower<'_>) -> Result<(), OpError> {
    for &(output, input) in op.in_place_outputs() {
        let parts = cx.planes(input)?;
        cx.set_planes(output, parts);
    }
    Ok(())
}

/// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), in the two variants (`adam_mode`) of ONNX Runtime.
struct AdamW {
    alpha: f64,
    beta: f64,
    epsilon: f64,
    weight_decay: f64,
    correct_bias: bool,
    mode: i64,
}

impl AdamW {
    /// Computes the scalars of a step once: the step size, and the bias correction of the second moment (mode 0).
    ///
    /// The arithmetic is float64: for a decay rate near 1, float32 loses most digits of `1 - rate^step` in the first
    /// steps.
    fn step_scalars(&self, cx: &mut Lower<'_>, dtype: DType) -> Result<[BufferId; 2], OpError> {
        let ty = Type::of(DType::F64);
        let mut nest = cx.nest(&[], 0);
        let rate = load_scalar(cx, &mut nest, 0, ty);
        let step = load_scalar(cx, &mut nest, 1, ty);
        let b = &mut nest.b;
        let one = b.constant(ty, 1.0);
        let mut power = |factor: f64| {
            let base = b.constant(ty, factor);
            let power = b.binary(BinaryOp::Pow, base, step);
            b.sub(one, power)
        };
        let (first, second) = (power(self.alpha), power(self.beta));
        let b = &mut nest.b;
        let size = match (self.correct_bias, self.mode) {
            (false, _) => rate,
            (true, 0) => b.div(rate, first),
            (true, _) => {
                let root = b.unary(UnaryOp::Sqrt, second);
                let scaled = b.mul(rate, root);
                b.div(scaled, first)
            }
        };
        let buffers = [cx.alloc_temp("step_size", dtype, 1), cx.alloc_temp("second_correction", dtype, 1)];
        for (buffer, value) in buffers.into_iter().zip([size, second]) {
            let value = nest.b.convert(value, Type::of(dtype));
            nest.store_contiguous(cx, buffer, value);
        }
        cx.emit(nest.instruction())?;
        Ok(buffers)
    }
}

impl Op for AdamW {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(6, 7, 4)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        for k in 2..6 {
            check_float_sequence(cx, k)?;
        }
        cx.set_output(0, DType::Bool, cx.shape(1).cloned().or_else(|| Some(Shape::known(&[1]))));
        for &(output, input) in self.in_place_outputs() {
            cx.set_output_type(output, cx.ty(input).clone());
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let mut scalars: Vec<(DType, [BufferId; 2])> = Vec::new();
        for parts in matching_planes(cx, &[2, 3, 4, 5])? {
            // The moments of float16 and bfloat16 weights are float32.
            let (dtype, ty) = (parts[2].dtype, Type::of(parts[2].dtype));
            let known = scalars.iter().find(|(other, _)| *other == dtype).map(|&(_, buffers)| buffers);
            let [size, correction] = match known {
                Some(buffers) => buffers,
                None => {
                    let buffers = self.step_scalars(cx, dtype)?;
                    scalars.push((dtype, buffers));
                    buffers
                }
            };
            let mut nest = cx.nest(&[parts[0].len], 0);
            let (w_buffer, w) = load_plane(cx, &mut nest, &parts[0], "params");
            let (_, g) = load_plane(cx, &mut nest, &parts[1], "gradients");
            let (m_buffer, m) = load_plane(cx, &mut nest, &parts[2], "first_order_moments");
            let (v_buffer, v) = load_plane(cx, &mut nest, &parts[3], "second_order_moments");
            let rate = load_scalar(cx, &mut nest, 0, ty);
            let size = nest.load_broadcast(size, dtype, &[]);
            let correction = nest.load_broadcast(correction, dtype, &[]);
            let b = &mut nest.b;
            let mut blend = |factor: f64, old: Reg, new: Reg| {
                let (keep, take) = (b.constant(ty, factor), b.constant(ty, 1.0 - factor));
                let (old_part, new_part) = (b.mul(keep, old), b.mul(take, new));
                b.add(old_part, new_part)
            };
            let new_m = blend(self.alpha, m, g);
            let b = &mut nest.b;
            let square = b.mul(g, g);
            let (keep, take) = (b.constant(ty, self.beta), b.constant(ty, 1.0 - self.beta));
            let (old_part, new_part) = (b.mul(keep, v), b.mul(take, square));
            let new_v = b.add(old_part, new_part);
            let (epsilon, decay) = (b.constant(ty, self.epsilon), b.constant(ty, self.weight_decay));
            let decay_rate = b.mul(rate, decay);
            let update = |b: &mut ortrain_expr::Builder, second: Reg| {
                let root = b.unary(UnaryOp::Sqrt, second);
                let denominator = b.add(root, epsilon);
                let scaled = b.mul(size, new_m);
                b.div(scaled, denominator)
            };
            let step = match self.mode {
                0 => {
                    let second = b.div(new_v, correction);
                    update(b, second)
                }
                _ => update(b, new_v),
            };
            // Decay and step are added first, so that a weight is rounded once. In mode 1 the decay applies to the
            // weight after the step.
            let decrease = match (self.weight_decay, self.mode) {
                (0.0, _) => step,
                (_, mode) => {
                    let decaying = if mode == 0 { w } else { b.sub(w, step) };
                    let loss = b.mul(decay_rate, decaying);
                    b.add(loss, step)
                }
            };
            let new_w = b.sub(w, decrease);
            for (buffer, new, old) in [(w_buffer, new_w, w), (m_buffer, new_m, m), (v_buffer, new_v, v)] {
                let value = select_by_signal(cx, &mut nest, 6, new, old);
                nest.store_contiguous(cx, buffer, value);
            }
            cx.emit(nest.instruction())?;
        }
        emit_updated_flag(cx, 6);
        bind_updated_sequences(self, cx)
    }

    fn in_place_outputs(&self) -> &'static [(usize, usize)] {
        &[(1, 2), (2, 4), (3, 5)]
    }

    fn writes_state(&self) -> bool {
        true
    }
}

/// `w -= lr * g`.
struct Sgd;

impl Op for Sgd {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 4, 2)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        check_float_sequence(cx, 1)?;
        check_float_sequence(cx, 2)?;
        cx.set_output(0, DType::Bool, Some(Shape::known(&[1])));
        cx.set_output_type(1, cx.ty(1).clone());
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        for parts in matching_planes(cx, &[1, 2])? {
            let ty = Type::of(parts[0].dtype);
            let mut nest = cx.nest(&[parts[0].len], 0);
            let (w_buffer, w) = load_plane(cx, &mut nest, &parts[0], "params");
            let (_, g) = load_plane(cx, &mut nest, &parts[1], "gradients");
            let rate = load_scalar(cx, &mut nest, 0, ty);
            let step = nest.b.mul(rate, g);
            let new = nest.b.sub(w, step);
            let value = select_by_signal(cx, &mut nest, 3, new, w);
            nest.store_contiguous(cx, w_buffer, value);
            cx.emit(nest.instruction())?;
        }
        emit_updated_flag(cx, 3);
        bind_updated_sequences(self, cx)
    }

    fn in_place_outputs(&self) -> &'static [(usize, usize)] {
        &[(1, 1)]
    }

    fn writes_state(&self) -> bool {
        true
    }
}

/// Scales all gradients by one factor, so that their global L2 norm is at most `max_norm`.
struct ClipGradNorm {
    max_norm: f64,
}

impl Op for ClipGradNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        check_float_sequence(cx, 0)?;
        cx.set_output_type(0, cx.ty(0).clone());
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let parts = cx.planes(0)?;
        let mut sums = Vec::with_capacity(parts.len());
        for part in &parts {
            // Sums squares within groups first, then over the groups, each in a fixed order.
            let group = (NORM_GROUP_BYTES / part.dtype.size()).min(part.len.max(1));
            let groups = part.len / group;
            let buffer = cx.plane_buffer(part, "gradients");
            let partial = cx.alloc_temp("group_sums", part.dtype, groups);
            let mut nest = cx.nest(&[groups, group], 1);
            let g = nest.load_strided(cx, buffer, 0, &[group as isize, 1]);
            let square = nest.b.mul(g, g);
            let sum = nest.reduce(ReduceOp::Sum, square);
            nest.store_outer(cx, partial, sum);
            cx.emit(nest.instruction())?;
            let total = cx.alloc_temp("sum", part.dtype, 1);
            let mut nest = cx.nest(&[groups], 1);
            let value = nest.load_strided(cx, partial, 0, &[1]);
            let sum = nest.reduce(ReduceOp::Sum, value);
            nest.store_outer(cx, total, sum);
            cx.emit(nest.instruction())?;
            sums.push(total);
        }
        for part in &parts {
            let ty = Type::of(part.dtype);
            let mut nest = cx.nest(&[], 0);
            let mut total = nest.b.constant(ty, 0.0);
            for &sum in &sums {
                let value = nest.load_broadcast(sum, cx.buffer_dtype(sum), &[]);
                let value = nest.b.convert(value, ty);
                total = nest.b.add(total, value);
            }
            let b = &mut nest.b;
            let norm = b.unary(UnaryOp::Sqrt, total);
            let (epsilon, max_norm, one) =
                (b.constant(ty, CLIP_EPSILON), b.constant(ty, self.max_norm), b.constant(ty, 1.0));
            let safe = b.add(norm, epsilon);
            let ratio = b.div(max_norm, safe);
            let too_long = b.compare(CompareOp::Lt, ratio, one);
            let factor = b.select(too_long, ratio, one);
            let scale = cx.alloc_temp("factor", part.dtype, 1);
            nest.store_contiguous(cx, scale, factor);
            cx.emit(nest.instruction())?;

            let mut nest = cx.nest(&[part.len], 0);
            let (buffer, g) = load_plane(cx, &mut nest, part, "gradients");
            let factor = nest.load_broadcast(scale, part.dtype, &[]);
            let clipped = nest.b.mul(g, factor);
            nest.store_contiguous(cx, buffer, clipped);
            cx.emit(nest.instruction())?;
        }
        bind_updated_sequences(self, cx)
    }

    fn in_place_outputs(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn writes_state(&self) -> bool {
        true
    }
}

/// Adds a gradient to its buffer, or overwrites the buffer if the flag is true.
struct InPlaceAccumulator;

impl Op for InPlaceAccumulator {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 2)?;
        cx.expect_same_dtype([0, 1])?;
        if let (Some(buffer), Some(value)) = (cx.shape(0), cx.shape(1)) {
            let differ = buffer.rank() != value.rank()
                || buffer
                    .iter()
                    .zip(value.iter())
                    .any(|(x, y)| matches!((x.known(), y.known()), (Some(x), Some(y)) if x != y));
            if differ {
                return Err(OpError::invalid(format!(
                    "the buffer has shape {buffer}, the value has shape {value}"
                )));
            }
        }
        if cx.has_input(2) {
            cx.expect_dtype(2, "bool", |dtype| dtype == DType::Bool)?;
        }
        cx.set_output(0, DType::Bool, Some(Shape::known(&[1])));
        cx.set_output_type(1, cx.ty(0).clone());
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, dtype) = (cx.dims(0), cx.dtype(0));
        let (buffer, value) = (cx.input(0), cx.input(1));
        let step = |cx: &mut Lower<'_>, overwrite: Option<bool>| {
            let mut nest = cx.nest(&dims, 0);
            let new = nest.load_broadcast(value, dtype, &dims);
            let result = match overwrite {
                Some(true) => new,
                Some(false) => {
                    let old = nest.load_broadcast(buffer, dtype, &dims);
                    nest.b.add(old, new)
                }
                None => {
                    let old = nest.load_broadcast(buffer, dtype, &dims);
                    let sum = nest.b.add(old, new);
                    let flag = load_scalar(cx, &mut nest, 2, Type::Bool);
                    nest.b.select(flag, new, sum)
                }
            };
            nest.store_contiguous(cx, buffer, result);
            nest.instruction()
        };
        if cx.is_reset_flag(2) {
            let (overwrite, accumulate) = (step(cx, Some(true)), step(cx, Some(false)));
            cx.emit_for(GradientMode::Overwrite, overwrite)?;
            cx.emit_for(GradientMode::Accumulate, accumulate)?;
        } else {
            let known = cx.constant(2).map(|flag| flag.data().iter().any(|&byte| byte != 0));
            let overwrite = if cx.has_input(2) { known } else { Some(false) };
            let step = step(cx, overwrite);
            cx.emit(step)?;
        }
        cx.set_true(0);
        cx.alias(1, 0);
        Ok(())
    }

    fn writes_state(&self) -> bool {
        true
    }
}

fn build_adamw(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let float = |name: &str, default: f32| -> Result<f64, OpError> {
        Ok(f64::from(node.attrs.float(name)?.unwrap_or(default)))
    };
    let op = AdamW {
        alpha: float("alpha", 0.9)?,
        beta: float("beta", 0.999)?,
        epsilon: float("epsilon", 1e-8)?,
        weight_decay: float("weight_decay", 1e-2)?,
        correct_bias: node.attrs.int("correct_bias")?.unwrap_or(1) != 0,
        mode: node.attrs.int("adam_mode")?.unwrap_or(0),
    };
    if !matches!(op.mode, 0 | 1) {
        return Err(OpError::invalid(format!("adam_mode must be 0 or 1, got {}", op.mode)));
    }
    if op.mode == 0 && !op.correct_bias {
        return Err(OpError::invalid("adam_mode 0 requires correct_bias 1"));
    }
    Ok(Box::new(op))
}

fn build_clip(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let norm = node.attrs.string("norm_type")?.unwrap_or("fro");
    if norm != "fro" {
        return Err(OpError::unsupported(format!("norm_type must be \"fro\", got {norm:?}")));
    }
    Ok(Box::new(ClipGradNorm { max_norm: f64::from(node.attrs.float("max_norm")?.unwrap_or(1.0)) }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("com.microsoft", "AdamWOptimizer", &[1], build_adamw)
            .class(Class::OptimizerStep { moments: 2 }),
        // It uses no moments, but its models have an input for one.
        Definition::new("com.microsoft", "SGDOptimizerV2", &[1], |_, _| Ok(Box::new(Sgd)))
            .class(Class::OptimizerStep { moments: 1 }),
        Definition::new("com.microsoft", "InplaceClipGradNorm", &[1], build_clip).class(Class::GradientClip),
        Definition::new("com.microsoft", "InPlaceAccumulatorV2", &[1], |_, _| {
            Ok(Box::new(InPlaceAccumulator))
        }),
    ]
}
