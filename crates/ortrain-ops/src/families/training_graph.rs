//! Operators around the gradients in a graph that trains in one run: sums of gradients over several runs, tests for
//! finite values, products with a scale, barriers. All are of `com.microsoft` version 1, and run as their
//! decompositions.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::{Infer, element_count};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::formula::formula;

fn cast(dtype: DType) -> Attrs {
    Attrs::new().with("to", i64::from(dtype.to_onnx()))
}

/// Checks that inputs are tensors of floats.
fn check_floats(cx: &Infer<'_>, inputs: std::ops::Range<usize>) -> Result<(), OpError> {
    for k in inputs {
        cx.expect_dtype(k, "a float type", DType::is_float)?;
    }
    Ok(())
}

fn known_dtype(rw: &Rewrite<'_>, value: ValueId) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid("the type of an input is not known"))
}

/// `InPlaceAccumulator`: adds a value of any float type to a sum, unless a signal is false.
struct Accumulate;

impl Op for Accumulate {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        check_floats(cx, 0..2)?;
        if cx.has_input(2) {
            cx.expect_dtype(2, "bool", |dtype| dtype == DType::Bool)?;
        }
        if let (Some(sum), Some(value)) = (cx.shape(0), cx.shape(1)) {
            let differs = |(x, y): (&Dim, &Dim)| x.known().zip(y.known()).is_some_and(|(x, y)| x != y);
            if sum.rank() != value.rank() || sum.iter().zip(value.iter()).any(differs) {
                return Err(OpError::invalid(format!(
                    "the sum has shape {sum}, the value has shape {value}"
                )));
            }
        }
        cx.set_output_type(0, cx.ty(0).clone());
        Ok(())
    }
}

fn decompose_accumulate(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (sum, mut value) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = known_dtype(rw, sum)?;
    if rw.dtype(value) != Some(dtype) {
        value = rw.add("Cast", &[value], cast(dtype));
    }
    let mut result = rw.add("Add", &[sum, value], Attrs::new());
    if let Some(signal) = rw.input(2) {
        let shape = rw.ints("scalar", &[]);
        let signal = rw.add("Reshape", &[signal, shape], Attrs::new());
        result = rw.add("Where", &[signal, result, sum], Attrs::new());
    }
    rw.replace_output(0, result);
    Ok(())
}

/// `ZeroGradient`: zeros like the first input, once the second is present.
struct ZeroGradient;

impl Op for ZeroGradient {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        check_floats(cx, 0..1)?;
        cx.set_output_type(0, cx.ty(0).clone());
        Ok(())
    }
}

fn decompose_zero(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let old = rw.required_input(0)?;
    let zero = Tensor::from_f64(known_dtype(rw, old)?, vec![1], &[0.0]);
    let shape = rw.add("Shape", &[old], Attrs::new());
    let zeros = rw.add("ConstantOfShape", &[shape], Attrs::new().with("value", zero));
    rw.replace_output(0, zeros);
    Ok(())
}

/// Attributes of a test for finite values.
#[derive(Clone, Copy)]
struct FiniteTest {
    /// Only infinities are found.
    infinities_only: bool,
    /// Only NaN is found.
    nan_only: bool,
}

impl FiniteTest {
    fn from_attrs(attrs: &Attrs) -> Result<FiniteTest, OpError> {
        let flag = |name: &str| Ok::<bool, OpError>(attrs.int(name)?.unwrap_or(0) != 0);
        let test = FiniteTest { infinities_only: flag("isinf_only")?, nan_only: flag("isnan_only")? };
        match test.infinities_only && test.nan_only {
            true => Err(OpError::invalid("isinf_only and isnan_only cannot both be 1")),
            false => Ok(test),
        }
    }

    /// Emits the test result of each element.
    fn emit_test(self, rw: &mut Rewrite<'_>, value: ValueId) -> Result<ValueId, OpError> {
        // float32 represents every 16-bit float.
        let value = match known_dtype(rw, value)? {
            DType::F32 | DType::F64 => value,
            _ => rw.add("Cast", &[value], cast(DType::F32)),
        };
        let bad = if self.nan_only {
            rw.add("IsNaN", &[value], Attrs::new())
        } else if self.infinities_only {
            rw.add("IsInf", &[value], Attrs::new())
        } else {
            let (nan, infinite) =
                (rw.add("IsNaN", &[value], Attrs::new()), rw.add("IsInf", &[value], Attrs::new()));
            rw.add("Or", &[nan, infinite], Attrs::new())
        };
        Ok(rw.add("Not", &[bad], Attrs::new()))
    }
}

/// Emits a scalar that is true if all elements are true; also true for zero elements.
fn emit_all(rw: &mut Rewrite<'_>, value: ValueId) -> ValueId {
    let wrong = rw.add("Not", &[value], Attrs::new());
    let wrong = rw.add("Cast", &[wrong], cast(DType::I64));
    let count = rw.add("ReduceSum", &[wrong], Attrs::new().with("keepdims", 0i64));
    let zero = rw.constant("zero", Tensor::i64(&[], &[0]));
    rw.add("Equal", &[count, zero], Attrs::new())
}

/// `IsFinite`: for each element, true unless it is infinite or NaN.
struct IsFinite;

impl Op for IsFinite {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        check_floats(cx, 0..1)?;
        cx.set_output(0, DType::Bool, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_is_finite(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let finite = FiniteTest::from_attrs(rw.attrs())?.emit_test(rw, rw.required_input(0)?)?;
    rw.replace_output(0, finite);
    Ok(())
}

/// `IsAllFinite`: true if every element of every input is finite.
struct IsAllFinite;

impl Op for IsAllFinite {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, usize::MAX, 1)?;
        check_floats(cx, 0..cx.node().inputs.len())?;
        cx.set_output(0, DType::Bool, Some(Shape::scalar()));
        Ok(())
    }
}

fn decompose_is_all_finite(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let finite = FiniteTest::from_attrs(rw.attrs())?;
    let mut result: Option<ValueId> = None;
    for k in 0..rw.node().inputs.len() {
        let each = finite.emit_test(rw, rw.required_input(k)?)?;
        let is_finite = emit_all(rw, each);
        result = Some(match result {
            Some(others) => rw.add("And", &[others, is_finite], Attrs::new()),
            None => is_finite,
        });
    }
    if let Some(combined) = result {
        rw.replace_output(0, combined);
    }
    Ok(())
}

/// `All`: true if every element is true.
struct All;

impl Op for All {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.expect_dtype(0, "bool", |dtype| dtype == DType::Bool)?;
        cx.set_output(0, DType::Bool, Some(Shape::scalar()));
        Ok(())
    }
}

fn decompose_all(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let result = emit_all(rw, rw.required_input(0)?);
    rw.replace_output(0, result);
    Ok(())
}

/// `MixedPrecisionScale`: inputs times a scale, converted to another type. With `fused` the results are concatenated to
/// one vector.
struct MixedPrecisionScale {
    to: DType,
    fused: bool,
}

fn parse_scale(attrs: &Attrs) -> Result<MixedPrecisionScale, OpError> {
    let to = attrs.int("to")?.ok_or_else(|| OpError::invalid("attribute \"to\" is missing"))?;
    let to = i32::try_from(to)
        .ok()
        .and_then(DType::from_onnx)
        .filter(|dtype| dtype.is_float())
        .ok_or_else(|| OpError::invalid(format!("\"to\" is {to}, which is not a float type")))?;
    Ok(MixedPrecisionScale { to, fused: attrs.int("fuse_outputs")?.unwrap_or(0) != 0 })
}

impl Op for MixedPrecisionScale {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let input_count = cx.node().inputs.len();
        cx.check_arity(2, usize::MAX, if self.fused { 1 } else { input_count.saturating_sub(1) })?;
        check_floats(cx, 0..input_count)?;
        if self.fused {
            let total = (1..input_count)
                .map(|k| cx.shape(k).and_then(element_count))
                .try_fold(0_usize, |total, elements| total.checked_add(elements?));
            let dim = total.map_or_else(|| Dim::symbol("fused"), Dim::from);
            cx.set_output(0, self.to, Some([dim].into_iter().collect()));
            return Ok(());
        }
        for k in 1..input_count {
            cx.set_output(k - 1, self.to, cx.shape(k).cloned());
        }
        Ok(())
    }
}

fn decompose_mixed_precision_scale(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let MixedPrecisionScale { to, fused } = parse_scale(rw.attrs())?;
    let shape = rw.ints("scalar", &[]);
    let scale = rw.add("Reshape", &[rw.required_input(0)?, shape], Attrs::new());
    let flat = rw.ints("flat", &[-1]);
    let mut scaled = Vec::with_capacity(rw.node().inputs.len());
    for k in 1..rw.node().inputs.len() {
        let value = rw.required_input(k)?;
        // Products of narrow floats are computed in float32.
        let wide = if known_dtype(rw, value)? == DType::F64 { DType::F64 } else { DType::F32 };
        let product =
            formula(rw, [value, scale], |[value, scale]| (value.cast(wide) * scale.cast(wide)).cast(to));
        scaled.push(if fused { rw.add("Reshape", &[product, flat], Attrs::new()) } else { product });
    }
    if fused {
        let joined = rw.add("Concat", &scaled, Attrs::new().with("axis", 0i64));
        rw.replace_output(0, joined);
        return Ok(());
    }
    for (k, value) in scaled.into_iter().enumerate() {
        rw.replace_output(k, value);
    }
    Ok(())
}

/// `Group`: true, once all inputs are present.
struct Group;

impl Op for Group {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, usize::MAX, 1)?;
        cx.set_output(0, DType::Bool, Some(Shape::scalar()));
        Ok(())
    }
}

fn decompose_group(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let done = rw.constant("done", Tensor::scalar(DType::Bool, 1.0));
    rw.replace_output(0, done);
    Ok(())
}

/// `PassThrough`: the inputs, once all are present.
struct PassThrough;

impl Op for PassThrough {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let input_count = cx.node().inputs.len();
        cx.check_arity(1, usize::MAX, input_count)?;
        for k in 0..input_count {
            cx.set_output_type(k, cx.ty(k).clone());
        }
        Ok(())
    }
}

fn decompose_pass_through(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    for k in 0..rw.node().inputs.len() {
        let value = rw.required_input(k)?;
        rw.replace_output(k, value);
    }
    Ok(())
}

/// `View`: consecutive parts of one tensor, each with a shape from an input.
struct View;

impl Op for View {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let input_count = cx.node().inputs.len();
        cx.check_arity(2, usize::MAX, input_count.saturating_sub(1))?;
        let dtype = cx.dtype(0)?;
        let mut total = Some(0_usize);
        for k in 1..input_count {
            cx.expect_dtype(k, "int64", |dtype| dtype == DType::I64)?;
            if cx.shape(k).is_some_and(|shape| shape.rank() != 1) {
                return Err(OpError::invalid(format!("input {k} must be a vector of sizes")));
            }
            let shape: Option<Shape> = cx.sizes(k).map(|dims| dims.into_iter().collect());
            let elements = shape.as_ref().and_then(element_count);
            total = total.zip(elements).and_then(|(total, elements)| total.checked_add(elements));
            cx.set_output(k - 1, dtype, shape);
        }
        let input_len = cx.shape(0).and_then(element_count);
        match (input_len, total) {
            (Some(input_len), Some(total)) if input_len != total => Err(OpError::invalid(format!(
                "the views have {total} elements in total, but the input has {input_len} elements"
            ))),
            _ => Ok(()),
        }
    }
}

fn decompose_view(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let flat = rw.ints("flat", &[-1]);
    let flattened = rw.add("Reshape", &[rw.required_input(0)?, flat], Attrs::new());
    let mut start = rw.ints("start", &[0]);
    for k in 1..rw.node().inputs.len() {
        let shape = rw.required_input(k)?;
        let elements = rw.add("ReduceProd", &[shape], Attrs::new().with("keepdims", 1i64));
        let end = rw.add("Add", &[start, elements], Attrs::new());
        let part = rw.add("Slice", &[flattened, start, end], Attrs::new());
        let part = rw.add("Reshape", &[part, shape], Attrs::new().with("allowzero", 1i64));
        rw.replace_output(k - 1, part);
        start = end;
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    fn build_scale(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
        Ok(Box::new(parse_scale(&node.attrs)?))
    }
    fn build_finite(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
        FiniteTest::from_attrs(&node.attrs)?;
        Ok(Box::new(IsFinite))
    }
    fn build_all_finite(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
        FiniteTest::from_attrs(&node.attrs)?;
        Ok(Box::new(IsAllFinite))
    }
    let new = |name, build| Definition::new("com.microsoft", name, &[1], build);
    vec![
        new("InPlaceAccumulator", |_, _| Ok(Box::new(Accumulate))).composition(decompose_accumulate),
        new("ZeroGradient", |_, _| Ok(Box::new(ZeroGradient))).composition(decompose_zero),
        new("IsFinite", build_finite).composition(decompose_is_finite),
        new("IsAllFinite", build_all_finite).composition(decompose_is_all_finite),
        new("All", |_, _| Ok(Box::new(All))).composition(decompose_all),
        new("MixedPrecisionScale", build_scale)
            .composition(decompose_mixed_precision_scale)
            .sample(|_| Sample::of(Attrs::new().with("to", i64::from(DType::F16.to_onnx())))),
        new("Group", |_, _| Ok(Box::new(Group))).composition(decompose_group),
        new("PassThrough", |_, _| Ok(Box::new(PassThrough))).composition(decompose_pass_through),
        new("View", |_, _| Ok(Box::new(View))).composition(decompose_view),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Failure, assert_close, f64s, run_node};

    const MICROSOFT: &str = "com.microsoft";

    fn run_op(op: &'static str, inputs: &[&Tensor], outputs: usize, attrs: Attrs) -> Vec<Tensor> {
        let ports: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        run_node((MICROSOFT, op), &ports, outputs, attrs).expect("the graph runs")
    }

    fn truth_values(tensor: &Tensor) -> Vec<f64> {
        assert_eq!(tensor.dtype(), DType::Bool);
        tensor.to_f64()
    }

    #[test]
    fn accumulates_unless_signal_is_false() {
        let (sum, value) =
            (Tensor::f32(&[2], &[1.0, 2.0]), Tensor::f32(&[2], &[10.0, 20.0]).converted(DType::F16));
        let signal = |on: f64| Tensor::filled(DType::Bool, &[1], on);
        let plain = run_op("InPlaceAccumulator", &[&sum, &value], 1, Attrs::new());
        assert_close(&plain[0], &Tensor::f32(&[2], &[11.0, 22.0]), 0.0);
        for (on, expected) in [(1.0, [11.0, 22.0]), (0.0, [1.0, 2.0])] {
            let got = run_op("InPlaceAccumulator", &[&sum, &value, &signal(on)], 1, Attrs::new());
            assert_close(&got[0], &Tensor::f32(&[2], &expected), 0.0);
        }
        let short = Tensor::f32(&[1], &[1.0]);
        let failure =
            run_node((MICROSOFT, "InPlaceAccumulator"), &[Some(&sum), Some(&short)], 1, Attrs::new());
        let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
        assert!(error.to_string().contains("the sum has shape [2], the value has shape [1]"), "{error}");
    }

    #[test]
    fn zero_gradient_ignores_values() {
        let old = Tensor::f32(&[3], &[1.0, f32::NAN, f32::INFINITY]);
        let done = Tensor::filled(DType::Bool, &[1], 1.0);
        let got = run_op("ZeroGradient", &[&old, &done], 1, Attrs::new());
        assert_close(&got[0], &Tensor::f32(&[3], &[0.0; 3]), 0.0);
    }

    #[test]
    fn detects_infinities_and_nan() {
        let x = Tensor::f32(&[4], &[1.0, f32::NAN, f32::NEG_INFINITY, f32::MAX]);
        let cases = [
            ("", [1.0, 0.0, 0.0, 1.0]),
            ("isinf_only", [1.0, 1.0, 0.0, 1.0]),
            ("isnan_only", [1.0, 0.0, 1.0, 1.0]),
        ];
        for (name, expected) in cases {
            let attrs = if name.is_empty() { Attrs::new() } else { Attrs::new().with(name, 1i64) };
            for x in [x.clone(), x.converted(DType::F64)] {
                assert_eq!(truth_values(&run_op("IsFinite", &[&x], 1, attrs.clone())[0]), expected, "{name}");
            }
        }
        let good = f64s(&[2, 2], &[1.0, 2.0, 3.0, -4.0]);
        let bad = f64s(&[1], &[f64::INFINITY]);
        assert_eq!(truth_values(&run_op("IsAllFinite", &[&good], 1, Attrs::new())[0]), [1.0]);
        assert_eq!(truth_values(&run_op("IsAllFinite", &[&good, &bad], 1, Attrs::new())[0]), [0.0]);
        let nan_only = Attrs::new().with("isnan_only", 1i64);
        assert_eq!(truth_values(&run_op("IsAllFinite", &[&good, &bad], 1, nan_only)[0]), [1.0]);
        // An infinite float16 is infinite in float32.
        let narrow = Tensor::f32(&[1], &[1e6]).converted(DType::F16);
        assert_eq!(truth_values(&run_op("IsAllFinite", &[&narrow], 1, Attrs::new())[0]), [0.0]);
    }

    #[test]
    fn all_of_zero_elements_is_true() {
        let flags = |values: &[f64]| Tensor::from_f64(DType::Bool, vec![values.len()], values);
        for (values, expected) in [(&[1.0, 1.0][..], 1.0), (&[1.0, 0.0], 0.0), (&[], 1.0)] {
            let got = run_op("All", &[&flags(values)], 1, Attrs::new());
            assert_eq!((truth_values(&got[0]), got[0].dims().len()), (vec![expected], 0));
        }
    }

    #[test]
    fn scaled_products_are_separate_or_fused() {
        let (scale, x) = (Tensor::f32(&[1], &[0.5]), Tensor::f32(&[2, 1], &[4.0, 8.0]));
        let y = Tensor::f32(&[], &[1.0]).converted(DType::F16);
        let attrs = Attrs::new().with("to", i64::from(DType::F16.to_onnx()));
        let got = run_op("MixedPrecisionScale", &[&scale, &x, &y], 2, attrs.clone());
        assert_eq!(
            (got[0].dtype(), got[0].dims(), got[0].to_f64()),
            (DType::F16, &[2, 1][..], vec![2.0, 4.0])
        );
        assert_eq!((got[1].dims(), got[1].to_f64()), (&[][..], vec![0.5]));
        let got = run_op("MixedPrecisionScale", &[&scale, &x, &y], 1, attrs.with("fuse_outputs", 1i64));
        assert_eq!((got[0].dims(), got[0].to_f64()), (&[3][..], vec![2.0, 4.0, 0.5]));
    }

    #[test]
    fn barriers_return_their_inputs() {
        let (x, y) = (Tensor::f32(&[2], &[1.0, 2.0]), Tensor::i64(&[1], &[7]));
        let got = run_op("PassThrough", &[&x, &y], 2, Attrs::new());
        assert_eq!((got[0].to_f64(), got[1].to_f64()), (vec![1.0, 2.0], vec![7.0]));
        assert_eq!(truth_values(&run_op("Group", &[&x, &y], 1, Attrs::new())[0]), [1.0]);
    }

    #[test]
    fn views_are_consecutive_parts() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let (pair, square) = (Tensor::i64(&[1], &[2]), Tensor::i64(&[2], &[2, 2]));
        let got = run_op("View", &[&x, &pair, &square], 2, Attrs::new());
        assert_eq!((got[0].dims(), got[0].to_f64()), (&[2][..], vec![1.0, 2.0]));
        assert_eq!((got[1].dims(), got[1].to_f64()), (&[2, 2][..], vec![3.0, 4.0, 5.0, 6.0]));
        let failure = run_node((MICROSOFT, "View"), &[Some(&x), Some(&square)], 1, Attrs::new());
        assert!(failure.is_err(), "two elements are left over");
    }
}
