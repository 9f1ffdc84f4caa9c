//! Dropout and its gradient.
//!
//! Sources: ONNX Dropout-7, 10 (an attribute `ratio`; no element is ever dropped), 12, 13, 22 (inputs `ratio` and
//! `training_mode`); `DropoutGrad` of `com.microsoft`.
//!
//! In training mode an element is kept if a uniform number in [0, 1) is at least `ratio` (0.5 by default). Kept
//! elements are divided by `1 - ratio`; a ratio of 1 gives zeros. If `training_mode` is absent or false, the result is
//! the input and the mask is true everywhere, forward *and* backward. (The kernel of ONNX Runtime 1.19 still divides in
//! the backward pass.)
//!
//! The random bits of element `i` (row-major) are word `i % 4` of Philox4x32-10. The key is the run's seed; the counter
//! consists of a stream and `i / 4`. The stream is `fnv1a64(name) + train_step * 0x9E3779B97F4A7C15` (mod 2^64), where
//! `name` is the name of the node's first output in the model. If the node has the attribute `seed`, the hash continues
//! with the eight bytes of this int64 (little-endian). The upper 24 bits, divided by 2^24, are the uniform number.
//!
//! A mask therefore depends only on the seed, the step and the model. It does not depend on the order of nodes, the
//! number of threads or the backend. In the body of a Loop or Scan the seed is
//! `(seed + position + 1) * 0x2545F4914F6CDD1D` (mod 2^64) of the seed outside. The position is the position of the
//! iteration along the first scanned value (in a Loop, the iteration index). Each iteration therefore has a different
//! mask.

use ortrain_expr::{Access, BinaryOp, CompareOp, Inst, Reg, RunScalar, Scalar, Type, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::{Lower, NestBuilder};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

/// Default ratio.
const DEFAULT_RATIO: f64 = 0.5;

/// Odd number next to `2^64 / golden ratio`: different steps have different streams.
const STEP_STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

/// Computes the 64-bit FNV-1a hash.
pub(crate) fn fnv1a64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// Condition for dropping elements.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TrainingMode {
    Never,
    Always,
    /// Elements are dropped if this input is true at run time.
    IfInput(usize),
}

impl TrainingMode {
    /// Reads the condition from input `k`: `has` is true if the input is present, `constant` is its content if it is
    /// constant.
    fn read(has: bool, constant: Option<&Tensor>, k: usize) -> TrainingMode {
        match constant {
            _ if !has => TrainingMode::Never,
            None => TrainingMode::IfInput(k),
            Some(flag) if flag.to_f64().first() == Some(&1.0) => TrainingMode::Always,
            Some(_) => TrainingMode::Never,
        }
    }

    /// Loads the flag into a register, if it is only known at run time.
    fn load_flag(self, cx: &mut Lower<'_>, nest: &mut NestBuilder) -> Option<Reg> {
        let TrainingMode::IfInput(k) = self else { return None };
        let buffer = cx.input(k);
        let strides: Vec<isize> = vec![0; nest.dims().len()];
        Some(nest.load_strided(cx, buffer, 0, &strides))
    }
}

/// Checks ratio (input `k`) and training mode (input `k + 1`).
fn check_ratio_and_mode(cx: &Infer<'_>, k: usize) -> Result<(), OpError> {
    if cx.has_input(k) {
        cx.expect_dtype(k, "a float type", DType::is_float)?;
    }
    if cx.has_input(k + 1) {
        cx.expect_dtype(k + 1, "bool", |dtype| dtype == DType::Bool)?;
    }
    for (input, what) in [(k, "the ratio"), (k + 1, "training_mode")] {
        if let Some(shape) = cx.shape(input)
            && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
        {
            return Err(OpError::invalid(format!("{what} has shape {shape}; one element is needed")));
        }
    }
    match cx.constant(k).and_then(|ratio| ratio.to_f64().first().copied()) {
        Some(ratio) if !(0.0..=1.0).contains(&ratio) => {
            Err(OpError::invalid(format!("the ratio must be from 0 to 1, got {ratio}")))
        }
        _ => Ok(()),
    }
}

/// Loads the ratio (input `k`) into a register.
fn load_ratio(cx: &mut Lower<'_>, nest: &mut NestBuilder, k: usize, ty: Type) -> Reg {
    if !cx.has_input(k) {
        return nest.b.constant(ty, DEFAULT_RATIO);
    }
    if let Some(ratio) = cx.constant(k) {
        let value = ratio.to_f64()[0];
        return nest.b.constant(ty, value);
    }
    let buffer = cx.input(k);
    let strides: Vec<isize> = vec![0; nest.dims().len()];
    let ratio = nest.load_strided(cx, buffer, 0, &strides);
    nest.b.convert(ratio, ty)
}

/// Computes `x / (1 - ratio)` where `keep` is true, and 0 elsewhere.
fn mask_and_scale(nest: &mut NestBuilder, x: Reg, ratio: Reg, keep: Reg) -> Reg {
    let ty = nest.b.ty(x);
    let (zero, one) = (nest.b.constant(ty, 0.0), nest.b.constant(ty, 1.0));
    let keep_ratio = nest.b.sub(one, ratio);
    let scale = nest.b.div(one, keep_ratio);
    let scaled = nest.b.mul(x, scale);
    nest.b.select(keep, scaled, zero)
}

/// Dropout: the input, or in training mode its kept elements, scaled, and zeros elsewhere.
struct Dropout {
    seed: Option<i64>,
}

impl Dropout {
    fn stream(&self, name: &str) -> u64 {
        let seed = self.seed.map(i64::to_le_bytes);
        fnv1a64(name.bytes().chain(seed.into_iter().flatten()))
    }
}

impl Op for Dropout {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 3, 2)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        check_ratio_and_mode(cx, 1)?;
        cx.set_output(0, dtype, cx.shape(0).cloned());
        cx.set_output(1, DType::Bool, cx.shape(0).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let flag = cx.optional_input(2);
        let training = TrainingMode::read(flag.is_some(), flag.and_then(|flag| cx.constant_of(flag)), 2);
        let mut ratio = cx.optional_input(1);
        if training == TrainingMode::Never {
            cx.set_grad(0, g);
            return Ok(());
        }
        if let (TrainingMode::IfInput(_), Some(flag)) = (training, flag) {
            // ONNX Runtime's operator ignores the flag. A ratio of 0 has the same effect.
            let dtype = ratio.map_or(Ok(DType::F32), |ratio| cx.dtype(ratio))?;
            let ratio_value =
                ratio.unwrap_or_else(|| cx.constant("ratio", Tensor::scalar(dtype, DEFAULT_RATIO)));
            let nothing = cx.constant("nothing", Tensor::scalar(dtype, 0.0));
            ratio = Some(cx.add("Where", &[flag, ratio_value, nothing], Attrs::new()));
        }
        let mask = cx.output(1, "mask");
        let inputs = [Some(g), Some(mask), ratio, flag];
        let gradient = cx.add_node("com.microsoft", "DropoutGrad", &inputs, 1, Attrs::new())[0];
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let training = TrainingMode::read(cx.has_input(2), cx.constant(2), 2);
        let dims = cx.dims(0);
        if training == TrainingMode::Never {
            cx.alias(0, 0);
            if cx.has_output(1) {
                let mask = cx.output(1);
                let mut nest = cx.nest(&dims, 0);
                let yes = nest.b.constant(Type::Bool, 1.0);
                nest.store_contiguous(cx, mask, yes);
                cx.emit(nest.instruction())?;
            }
            return Ok(());
        }
        let first = if cx.has_output(0) { 0 } else { 1 };
        let stream = self.stream(cx.output_name(first));
        let mut nest = cx.nest(&dims, 0);
        let uniform = draw_uniform(cx, &mut nest, stream);
        let limit = load_ratio(cx, &mut nest, 1, Type::F32);
        let mut keep = nest.b.compare(CompareOp::Le, limit, uniform);
        let flag = training.load_flag(cx, &mut nest);
        if cx.has_output(0) {
            let (input, output) = (cx.input(0), cx.output(0));
            let access = cx.contiguous_access(input, &dims);
            let x = nest.load(input, access);
            let ty = nest.b.ty(x);
            let ratio = load_ratio(cx, &mut nest, 1, ty);
            let mut y = mask_and_scale(&mut nest, x, ratio, keep);
            if let Some(flag) = flag {
                y = nest.b.select(flag, y, x);
            }
            nest.store_contiguous(cx, output, y);
        }
        if cx.has_output(1) {
            if let Some(flag) = flag {
                let idle = nest.b.unary(UnaryOp::Not, flag);
                keep = nest.b.binary(BinaryOp::Or, idle, keep);
            }
            let mask = cx.output(1);
            nest.store_contiguous(cx, mask, keep);
        }
        cx.emit(nest.instruction())
    }
}

/// Draws a uniform number in [0, 1) for each element of a nest over a complete tensor.
fn draw_uniform(cx: &Lower<'_>, nest: &mut NestBuilder, stream: u64) -> Reg {
    let dims = nest.dims().to_vec();
    let b = &mut nest.b;
    let index = b.element_number(&dims);
    let index = b.convert(index, Type::U64);
    let exact =
        |b: &mut ortrain_expr::Builder, value: u64| b.push(Inst::Const(Scalar::U64(value)), Type::U64);
    let (key, step) = (cx.seed(b), b.run_scalar(RunScalar::TrainStep));
    let (name, stride) = (exact(b, stream), exact(b, STEP_STRIDE));
    let moved = b.mul(step, stride);
    let stream = b.add(name, moved);
    let bits = b.push(Inst::Random(key, stream, index), Type::U32);
    // float32 represents 24 bits exactly.
    let low = b.constant(Type::U32, 256.0);
    let upper = b.div(bits, low);
    let number = b.convert(upper, Type::F32);
    let unit = b.constant(Type::F32, 1.0 / 16_777_216.0);
    b.mul(number, unit)
}

/// Gradient of [`Dropout`]. The inputs are the gradient of the result, the mask, and the ratio and training mode of the
/// forward node.
struct DropoutGrad;

impl Op for DropoutGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "bool", |dtype| dtype == DType::Bool)?;
        check_ratio_and_mode(cx, 2)?;
        if let (Some(g), Some(mask)) = (cx.shape(0), cx.shape(1)) {
            let differ =
                |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            if g.rank() != mask.rank() || g.iter().zip(mask.iter()).any(differ) {
                return Err(OpError::invalid(format!(
                    "the gradient has shape {g}, but the mask has shape {mask}"
                )));
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let training = TrainingMode::read(cx.has_input(3), cx.constant(3), 3);
        if training == TrainingMode::Never {
            cx.alias(0, 0);
            return Ok(());
        }
        let dims = cx.dims(0);
        let mut nest = cx.nest(&dims, 0);
        let (gradient, mask, output) = (cx.input(0), cx.input(1), cx.output(0));
        let access = cx.contiguous_access(gradient, &dims);
        let g = nest.load(gradient, access);
        let keep = nest.load(mask, Access::contiguous(DType::Bool, &dims));
        let ty = nest.b.ty(g);
        let ratio = load_ratio(cx, &mut nest, 2, ty);
        let mut value = mask_and_scale(&mut nest, g, ratio, keep);
        if let Some(flag) = training.load_flag(cx, &mut nest) {
            value = nest.b.select(flag, value, g);
        }
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Upgrades a node. Before opset 12 the ratio is an attribute and no element is dropped. Before 10 the mask has the
/// type of the data.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 12 {
        let inputs = rw.node().inputs.clone();
        rw.emit_same_op(&inputs, rw.attrs().clone());
        return Ok(());
    }
    let x = rw.required_input(0)?;
    let ratio = rw.attrs().float("ratio")?.unwrap_or(DEFAULT_RATIO as f32);
    let ratio = rw.constant("ratio", Tensor::f32(&[], &[ratio]));
    let inputs = [Some(x), Some(ratio)];
    if rw.version() < 10 && rw.is_output_used(1) {
        let dtype = rw.dtype(x);
        let outputs = rw.add_node("", "Dropout", &inputs, 2, Attrs::new());
        let mask = match dtype {
            Some(dtype) => rw.add("Cast", &[outputs[1]], Attrs::new().with("to", i64::from(dtype.to_onnx()))),
            // The type is not declared. A power of zero is one in every type, even for NaN.
            None => {
                let zero = rw.constant("zero", Tensor::scalar(DType::F32, 0.0));
                let ones = rw.add("Pow", &[x, zero], Attrs::new());
                let zeros = rw.add("Sub", &[ones, ones], Attrs::new());
                rw.add("Where", &[outputs[1], ones, zeros], Attrs::new())
            }
        };
        rw.replace_output(0, outputs[0]);
        rw.replace_output(1, mask);
        return Ok(());
    }
    if rw.version() < 10 && rw.has_output(1) {
        // The unused mask would now have another type, so it is removed.
        let outputs = rw.add_node("", "Dropout", &inputs, 1, Attrs::new());
        rw.replace_output(0, outputs[0]);
        return Ok(());
    }
    rw.emit_same_op(&inputs, Attrs::new());
    Ok(())
}

/// Downgrades a node. Before opset 12 only a Dropout that drops no element can be written.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 12 || rw.node().inputs.len() == 1 {
        return Ok(());
    }
    let flag = rw.input(2);
    let training = TrainingMode::read(flag.is_some(), flag.and_then(|flag| rw.constant_of(flag)), 2);
    if training != TrainingMode::Never {
        return Err(OpError::unsupported("a Dropout that drops elements needs opset 12 or newer"));
    }
    let ratio =
        rw.input(1).and_then(|ratio| rw.constant_of(ratio)).and_then(|ratio| ratio.to_f64().first().copied());
    let attrs = ratio.map_or(Attrs::new(), |ratio| Attrs::new().with("ratio", ratio as f32));
    if rw.version() < 10 && rw.has_output(1) {
        let outputs = rw.add_node("", "Dropout", &[rw.input(0)], 2, attrs);
        let mask = rw.add("Cast", &[outputs[1]], Attrs::new().with("to", i64::from(DType::Bool.to_onnx())));
        rw.replace_output(0, outputs[0]);
        rw.replace_output(1, mask);
        return Ok(());
    }
    rw.emit_same_op(&[rw.input(0)], attrs);
    Ok(())
}

/// Decomposes the gradient into operators of `ai.onnx`.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, mask) = (rw.required_input(0)?, rw.required_input(1)?);
    let flag = rw.input(3);
    let training = TrainingMode::read(flag.is_some(), flag.and_then(|flag| rw.constant_of(flag)), 3);
    if training == TrainingMode::Never {
        let result = rw.add("Identity", &[g], Attrs::new());
        rw.replace_output(0, result);
        return Ok(());
    }
    let dtype = rw.dtype(g).ok_or_else(|| OpError::invalid("the type of the gradient is not known"))?;
    let constant = match rw.input(2) {
        None => Some(DEFAULT_RATIO),
        Some(ratio) => rw.constant_of(ratio).and_then(|ratio| ratio.to_f64().first().copied()),
    };
    let keep_ratio: ValueId = match constant {
        Some(ratio) => rw.constant("kept", Tensor::scalar(dtype, 1.0 - ratio)),
        None => {
            let to = Attrs::new().with("to", i64::from(dtype.to_onnx()));
            let ratio = rw.add("Cast", &[rw.required_input(2)?], to);
            let one = rw.constant("one", Tensor::scalar(dtype, 1.0));
            rw.add("Sub", &[one, ratio], Attrs::new())
        }
    };
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let values = [mask, g, keep_ratio, zero];
    let mut result = formula(rw, values, |[mask, g, kept, zero]| mask.choose(g / kept, zero));
    if let (TrainingMode::IfInput(_), Some(flag)) = (training, flag) {
        result = rw.add("Where", &[flag, result, g], Attrs::new());
    }
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Dropout { seed: node.attrs.int("seed")? }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Dropout", &[7, 10, 12, 13, 22], build)
            .class(Class::Dropout)
            .traits(Traits::FOLLOWS_HEAD)
            .inputs_without_gradient(&[1, 2])
            .kept_inputs(&[1])
            .upgrade(upgrade)
            .downgrade(downgrade),
        Definition::new("com.microsoft", "DropoutGrad", &[1], |_, _| Ok(Box::new(DropoutGrad)))
            .differentiated_as(decompose_grad),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_program::Scalars;

    use super::*;
    use crate::testing::{
        add, assert_close, check_decomposition, check_downgrade, f64s, generic_tensor, gradient_graph, graph,
        one_node_graph, run, run_node, run_with,
    };

    const NEWEST: i64 = crate::NEWEST_OPSET;
    const DROPOUT: (&str, &str) = ("", "Dropout");
    const GRAD: (&str, &str) = ("com.microsoft", "DropoutGrad");

    fn flag(on: bool) -> Tensor {
        Tensor::from_slice(DType::Bool, &[], &[u8::from(on)])
    }

    /// Returns a graph with a Dropout of `x`, with constant ratio and training mode.
    fn constant_dropout(x: &Tensor, ratio: f64, training: bool, attrs: Attrs) -> Graph {
        let (mut graph, ids) = graph(&[x]);
        let ratio = graph.add_constant("ratio", Tensor::scalar(DType::F32, ratio));
        let training = graph.add_constant("training", flag(training));
        add(&mut graph, DROPOUT, "y", &[Some(ids[0]), Some(ratio), Some(training)], 2, attrs);
        crate::passes::infer::infer(&mut graph).expect("it is right");
        graph
    }

    #[test]
    fn hash_is_fnv1a() {
        // Known answers published with the algorithm (Fowler, Noll, Vo).
        assert_eq!(fnv1a64([]), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a64(*b"a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(fnv1a64(*b"foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn inference_drops_nothing() {
        let x = generic_tensor(&[3, 4], 1);
        let ratio = Tensor::scalar(DType::F32, 0.5);
        let off = flag(false);
        for ports in [&[Some(&x)][..], &[Some(&x), Some(&ratio)], &[Some(&x), Some(&ratio), Some(&off)]] {
            let got = run_node(DROPOUT, ports, 2, Attrs::new()).expect("it runs");
            assert_eq!(got[0], x);
            assert_eq!(got[1].to_f64(), [1.0; 12]);
        }
        let graph = constant_dropout(&x, 0.5, false, Attrs::new());
        let got = run(&graph, std::slice::from_ref(&x)).expect("it runs");
        assert_eq!((&got[0], got[1].to_f64()), (&x, vec![1.0; 12]));
    }

    #[test]
    fn old_masks_have_the_data_type() {
        for x in [f64s(&[3], &[f64::NAN, 2.0, f64::INFINITY]), Tensor::f32(&[3], &[1.0, 0.0, -2.0])] {
            let (mut old, ids) = graph(&[&x]);
            // The type of this value is not declared.
            let hidden = add(&mut old, ("", "Identity"), "h", &[Some(ids[0])], 1, Attrs::new())[0];
            old.outputs.clear();
            add(&mut old, DROPOUT, "y", &[Some(hidden)], 2, Attrs::new());
            old.opsets.insert(String::new(), 7);
            crate::passes::versions::upgrade(&mut old).expect("known");
            crate::passes::infer::infer(&mut old).expect("valid");
            let got = run(&old, std::slice::from_ref(&x)).expect("it runs");
            assert_eq!(got[1], Tensor::filled(x.dtype(), &[3], 1.0));
        }
    }

    #[test]
    fn random_masks() {
        let x = Tensor::filled(DType::F64, &[100, 50], 1.0);
        let graph = constant_dropout(&x, 0.25, true, Attrs::new());
        let inputs = std::slice::from_ref(&x);
        let at = |seed, train_step| run_with(&graph, inputs, Scalars { seed, train_step }).expect("it runs");
        let got = at(7, 3);
        let (y, mask) = (got[0].to_f64(), got[1].to_f64());
        for (y, retained) in y.iter().zip(&mask) {
            assert_eq!(*y, if *retained == 1.0 { 1.0 / 0.75 } else { 0.0 });
        }
        let share = mask.iter().sum::<f64>() / mask.len() as f64;
        // Five standard deviations of the mean of 5000 draws.
        assert!((share - 0.75).abs() < 5.0 * (0.75f64 * 0.25 / 5000.0).sqrt(), "{share}");

        assert_eq!(at(7, 3), got, "the same again");
        assert_ne!(at(8, 3)[1], got[1], "another seed");
        assert_ne!(at(7, 4)[1], got[1], "another step");
        let other = constant_dropout(&x, 0.25, true, Attrs::new().with("seed", 1i64));
        let other = run_with(&other, inputs, Scalars { seed: 7, train_step: 3 }).expect("it runs");
        assert_ne!(other[1], got[1], "another node");
    }

    #[test]
    fn random_bits_match_documentation() {
        let x = Tensor::filled(DType::F32, &[2, 3], 1.0);
        let graph = constant_dropout(&x, 0.5, true, Attrs::new());
        let scalars = Scalars { seed: 42, train_step: 9 };
        let got = run_with(&graph, std::slice::from_ref(&x), scalars).expect("it runs");
        let stream = fnv1a64(*b"y").wrapping_add(9u64.wrapping_mul(STEP_STRIDE));
        let expected: Vec<f64> = (0..6)
            .map(|k| {
                let bits = ortrain_expr::random_bits(42, stream, k);
                f64::from(u8::from(f64::from(bits >> 8) / 16_777_216.0 >= 0.5))
            })
            .collect();
        assert_eq!(got[1].to_f64(), expected);
    }

    #[test]
    fn ratio_and_mode_at_run_time() {
        let x = generic_tensor(&[4, 5], 2);
        for (ratio, training) in [(0.5, true), (0.5, false), (0.0, true), (1.0, true)] {
            let (rate, mode) = (Tensor::scalar(DType::F64, ratio), flag(training));
            let ports = [Some(&x), Some(&rate), Some(&mode)];
            let got = run_node(DROPOUT, &ports, 2, Attrs::new()).expect("it runs");
            let graph = constant_dropout(&x, ratio, training, Attrs::new());
            let expected = run(&graph, std::slice::from_ref(&x)).expect("it runs");
            assert_eq!(got, expected);
            if ratio == 0.0 {
                assert_eq!(got[0], x);
            }
            if ratio == 1.0 {
                assert_eq!(got[0].to_f64(), [0.0; 20]);
            }
        }
        let error = run_node(DROPOUT, &[Some(&x), Some(&x)], 1, Attrs::new()).expect_err("no scalar");
        assert!(format!("{error:?}").contains("one element is needed"), "{error:?}");
    }

    #[test]
    fn gradient_uses_the_mask_of_the_forward_pass() {
        let x = Tensor::filled(DType::F64, &[4, 5], 3.0);
        let scalars = Scalars { seed: 1, train_step: 2 };
        for single in [false, true] {
            for (ratio, training) in [(0.25, true), (0.25, false), (1.0, true)] {
                let mut forward = constant_dropout(&x, ratio, training, Attrs::new());
                let g = generic_tensor(&[4, 5], 3);
                let y =
                    run_with(&forward, std::slice::from_ref(&x), scalars).expect("it runs").swap_remove(0);
                if single {
                    forward.nodes[0].outputs.truncate(1);
                    forward.outputs.truncate(1);
                }
                let gradients = gradient_graph(&forward, &[Some(g.clone()), None], &[0]);
                if !training {
                    assert!(gradients.nodes.iter().all(|node| &*node.op == "Identity"), "{gradients}");
                }
                let got = run_with(&gradients, std::slice::from_ref(&x), scalars).expect("it runs");
                let expected: Vec<f64> =
                    y.to_f64().iter().zip(g.to_f64()).map(|(y, g)| y / 3.0 * g).collect();
                assert_close(&got[0], &f64s(&[4, 5], &expected), 1e-12);
            }
        }
    }

    #[test]
    fn gradient_with_ratio_and_mode_at_run_time() {
        let x = Tensor::filled(DType::F64, &[4, 5], 3.0);
        for training in [false, true] {
            for with_ratio in [false, true] {
                let (rate, mode) = (Tensor::scalar(DType::F32, 0.25), flag(training));
                let ports = [Some(&x), with_ratio.then_some(&rate), Some(&mode)];
                let forward = one_node_graph(NEWEST, DROPOUT, &ports, 1, Attrs::new()).expect("it is read");
                let inputs: Vec<Tensor> = ports.iter().copied().flatten().cloned().collect();
                let g = generic_tensor(&[4, 5], 4);
                let y = run(&forward, &inputs).expect("it runs").swap_remove(0);
                let got = run(&gradient_graph(&forward, &[Some(g.clone())], &[0]), &inputs).expect("it runs");
                let expected: Vec<f64> =
                    y.to_f64().iter().zip(g.to_f64()).map(|(y, g)| y / 3.0 * g).collect();
                assert_close(&got[0], &f64s(&[4, 5], &expected), 1e-12);
            }
        }
    }

    #[test]
    fn gradient_operator() {
        let g = f64s(&[4], &[1.0, f64::INFINITY, 3.0, f64::NAN]);
        let mask = Tensor::from_slice(DType::Bool, &[4], &[1u8, 0, 1, 0]);
        let ratio = Tensor::scalar(DType::F32, 0.75);
        let (on, off) = (flag(true), flag(false));
        let ports = [Some(&g), Some(&mask), Some(&ratio), Some(&on)];
        let got = run_node(GRAD, &ports, 1, Attrs::new()).expect("it runs");
        assert_eq!(got[0].to_f64(), [4.0, 0.0, 12.0, 0.0], "what was dropped does not leak");
        let ports = [Some(&g), Some(&mask), None, Some(&on)];
        assert_eq!(
            run_node(GRAD, &ports, 1, Attrs::new()).expect("it runs")[0].to_f64(),
            [2.0, 0.0, 6.0, 0.0]
        );
        for ports in [&[Some(&g), Some(&mask), Some(&ratio), Some(&off)][..], &[Some(&g), Some(&mask)]] {
            let got = run_node(GRAD, ports, 1, Attrs::new()).expect("it runs");
            assert_close(&got[0], &g, 0.0);
        }
        for mode in [&on, &off] {
            for ratio in [None, Some(&ratio)] {
                let ports = [Some(&g), Some(&mask), ratio, Some(mode)];
                let inputs: Vec<Tensor> = ports.iter().copied().flatten().cloned().collect();
                let graph = one_node_graph(NEWEST, GRAD, &ports, 1, Attrs::new()).expect("it is read");
                check_decomposition(&graph, &inputs, 1e-12);
                let mut constant = graph.clone();
                let id = *constant.inputs.last().expect("inputs");
                constant.value_mut(id).constant = Some(mode.clone());
                constant.inputs.pop();
                check_decomposition(&constant, &inputs[..inputs.len() - 1], 1e-12);
            }
        }
    }

    #[test]
    fn older_opsets_drop_nothing() {
        let x = generic_tensor(&[2, 3], 5);
        let attrs = Attrs::new().with("ratio", 0.3f32);
        for opset in [7, 10] {
            let graph = one_node_graph(opset, DROPOUT, &[Some(&x)], 1, attrs.clone()).expect("it is read");
            assert_eq!(run(&graph, std::slice::from_ref(&x)).expect("it runs")[0], x);
            let old = check_downgrade(&graph, std::slice::from_ref(&x), opset);
            assert_eq!(old.nodes[0].attrs, attrs);
            assert_eq!(old.nodes[0].inputs.len(), 1);
        }
        let got = one_node_graph(7, DROPOUT, &[Some(&x)], 2, attrs).expect("it is read");
        let got = run(&got, std::slice::from_ref(&x)).expect("it runs");
        assert_eq!(got[1], Tensor::filled(DType::F64, &[2, 3], 1.0), "a mask of the type of the data");

        let newest = constant_dropout(&x, 0.3, false, Attrs::new());
        assert_eq!(newest.outputs.len(), 2);
        for opset in [7, 10] {
            check_downgrade(&newest, std::slice::from_ref(&x), opset);
        }
        let mut unused = one_node_graph(28, DROPOUT, &[Some(&x)], 2, Attrs::new()).expect("it is read");
        unused.outputs.pop();
        unused.opsets.insert(String::new(), 9);
        crate::passes::versions::upgrade(&mut unused).expect("known");
        assert_eq!((unused.nodes.len(), unused.nodes[0].outputs.len()), (1, 1), "{unused}");

        let mut graph = constant_dropout(&x, 0.3, true, Attrs::new());
        let error = crate::passes::versions::downgrade(&mut graph, 11).expect_err("it drops");
        assert!(error.to_string().contains("needs opset 12"), "{error}");
    }

    #[test]
    fn rejects_ratio_out_of_range() {
        let x = generic_tensor(&[2], 6);
        for ratio in [-0.1, 1.5, f64::NAN] {
            let (mut graph, ids) = graph(&[&x]);
            let ratio = graph.add_constant("ratio", Tensor::scalar(DType::F32, ratio));
            add(&mut graph, DROPOUT, "y", &[Some(ids[0]), Some(ratio)], 1, Attrs::new());
            let error = crate::passes::infer::infer(&mut graph).expect_err("no ratio");
            assert!(error.to_string().contains("from 0 to 1"), "{error}");
        }
    }
}
