//! Preprocessing of tables, as scikit-learn's transformers do it: scaling, normalization, imputation, column selection,
//! label encoding.
//!
//! Scaler-1, Normalizer-1, Imputer-1, ArrayFeatureExtractor-1 and LabelEncoder-1, 2, 4 of ai.onnx.ml
//! (<https://onnx.ai/onnx/operators/index_ai_onnx_ml.html>). All are compositions. Their constants are attributes and
//! are not trained. Where the definition leaves a detail open, they follow onnxruntime:
//!
//! - Scaler and Normalizer compute in float32 and return float32. For float64 input they compute in float64 and round
//!   the result.
//! - Normalizer with `MAX` divides by the largest element, not by the largest magnitude. A row with norm 0 is
//!   unchanged.
//! - LabelEncoder uses the first of several equal keys. NaN is equal to NaN.
//!
//! Strings are an error that names the attribute.
//!
//! A training model contains the decomposition of Normalizer. Where onnxruntime can prove that the shapes are equal,
//! its Normalizer works in place. Its L2 norm then reads signs from elements that are already overwritten.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::formula::formula;
use crate::support::ml::{ML_DOMAIN, feature_count};

/// Returns the type of the arithmetic for inputs of type `dtype`; the float32 result is rounded from it.
fn arithmetic_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

fn is_number(dtype: DType) -> bool {
    dtype.is_number()
}

fn dtype_of(rw: &Rewrite<'_>, value: ValueId) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))
}

fn add(rw: &mut Rewrite<'_>, op: &str, inputs: &[ValueId]) -> ValueId {
    rw.add(op, inputs, Attrs::new())
}

/// Checks that a list of `count` floats has one element, or one for each feature.
fn check_list_length(what: &str, count: usize, features: Option<usize>) -> Result<(), OpError> {
    match features {
        _ if count == 1 => Ok(()),
        Some(features) if features != count => Err(OpError::invalid(format!(
            "{what} has {count} elements; expected 1 or {features} (the number of features)"
        ))),
        _ if count == 0 => {
            Err(OpError::invalid(format!("{what} is empty; expected 1 element or one for each feature")))
        }
        _ => Ok(()),
    }
}

/// Scaler: `(x - offset) * scale`.
struct Scaler {
    offset: Vec<f32>,
    scale: Vec<f32>,
}

impl Scaler {
    fn from_attrs(attrs: &Attrs) -> Result<Scaler, OpError> {
        let list = |name: &str, otherwise: f32| -> Result<Vec<f32>, OpError> {
            Ok(attrs.floats(name)?.map_or_else(|| vec![otherwise], <[f32]>::to_vec))
        };
        Ok(Scaler { offset: list("offset", 0.0)?, scale: list("scale", 1.0)? })
    }
}

impl Op for Scaler {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.expect_dtype(0, "a number", is_number)?;
        let features = feature_count(cx)?;
        check_list_length("offset", self.offset.len(), features)?;
        check_list_length("scale", self.scale.len(), features)?;
        cx.set_output(0, DType::F32, cx.shape(0).cloned());
        Ok(())
    }
}

/// Adds the floats of an attribute as a constant of type `dtype`. A single float becomes a scalar, which broadcasts.
fn add_float_constant(rw: &mut Rewrite<'_>, name: &str, values: &[f32], dtype: DType) -> ValueId {
    let dims: &[usize] = if values.len() == 1 { &[] } else { &[values.len()] };
    rw.constant(name, Tensor::f32(dims, values).converted(dtype))
}

fn decompose_scaler(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, scaler) = (rw.required_input(0)?, Scaler::from_attrs(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let wide = arithmetic_dtype(dtype);
    let x = cast(rw.patch().1, x, dtype, wide);
    let offset = add_float_constant(rw, "offset", &scaler.offset, wide);
    let scale = add_float_constant(rw, "scale", &scaler.scale, wide);
    let scaled = formula(rw, [x, offset, scale], |[x, offset, scale]| (x - offset) * scale);
    let scaled = cast(rw.patch().1, scaled, wide, DType::F32);
    rw.replace_output(0, scaled);
    Ok(())
}

fn build_scaler(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Scaler::from_attrs(&node.attrs)?))
}

/// Normalizer: divides each row by its norm.
struct Normalizer;

/// Returns the name of the reduction that computes the norm.
fn norm_reduction(attrs: &Attrs) -> Result<&'static str, OpError> {
    match attrs.string("norm")?.unwrap_or("MAX") {
        "MAX" => Ok("ReduceMax"),
        "L1" => Ok("ReduceL1"),
        "L2" => Ok("ReduceL2"),
        other => Err(OpError::invalid(format!("norm must be MAX, L1 or L2, got {other:?}"))),
    }
}

impl Op for Normalizer {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.expect_dtype(0, "a number", is_number)?;
        feature_count(cx)?;
        cx.set_output(0, DType::F32, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_normalizer(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, norm) = (rw.required_input(0)?, norm_reduction(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let wide = arithmetic_dtype(dtype);
    let x = cast(rw.patch().1, x, dtype, wide);
    let axes = rw.ints("axes", &[-1]);
    let norm = add(rw, norm, &[x, axes]);
    let zero = rw.constant("zero", Tensor::scalar(wide, 0.0));
    let one = rw.constant("one", Tensor::scalar(wide, 1.0));
    let safe = formula(rw, [norm, zero, one], |[norm, zero, one]| norm.equals(zero).choose(one, norm));
    let quotient = add(rw, "Div", &[x, safe]);
    let quotient = cast(rw.patch().1, quotient, wide, DType::F32);
    rw.replace_output(0, quotient);
    Ok(())
}

fn build_normalizer(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    norm_reduction(&node.attrs)?;
    Ok(Box::new(Normalizer))
}

/// Imputer: replaces missing values by constants.
struct Imputer(Attrs);

/// Returns the replacement values and the value to replace, from the float or the integer attributes, by the type of
/// the input.
fn read_imputation(attrs: &Attrs, dtype: DType) -> Result<(Tensor, f64), OpError> {
    let needed =
        |name: &str| OpError::invalid(format!("attribute {name} is missing; inputs of type {dtype} need it"));
    if dtype.is_float() {
        let values = attrs.floats("imputed_value_floats")?.ok_or_else(|| needed("imputed_value_floats"))?;
        let replaced = attrs.float("replaced_value_float")?.unwrap_or(0.0);
        return Ok((Tensor::f32(&[values.len()], values).converted(dtype), f64::from(replaced)));
    }
    let values = attrs.ints("imputed_value_int64s")?.ok_or_else(|| needed("imputed_value_int64s"))?;
    let replaced = attrs.int("replaced_value_int64")?.unwrap_or(0);
    Ok((Tensor::i64(&[values.len()], values).converted(dtype), replaced as f64))
}

impl Op for Imputer {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a number", is_number)?;
        let features = feature_count(cx)?;
        let (values, _) = read_imputation(&self.0, dtype)?;
        check_list_length("the list of imputed values", values.len(), features)?;
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_imputer(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let dtype = dtype_of(rw, x)?;
    let (values, replaced) = read_imputation(rw.attrs(), dtype)?;
    let values = rw.constant("imputed", values);
    let missing = if replaced.is_nan() {
        add(rw, "IsNaN", &[x])
    } else {
        let replaced = rw.constant("replaced", Tensor::scalar(dtype, replaced));
        add(rw, "Equal", &[x, replaced])
    };
    let filled = add(rw, "Where", &[missing, values, x]);
    rw.replace_output(0, filled);
    Ok(())
}

fn build_imputer(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Imputer(node.attrs.clone())))
}

/// ArrayFeatureExtractor: gathers elements of the last axis by index.
struct ArrayFeatureExtractor;

impl Op for ArrayFeatureExtractor {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let shape = cx.shape(0).cloned();
        if let Some(shape) = &shape
            && shape.rank() == 0
        {
            return Err(OpError::invalid("input 0 must have at least one axis, got a scalar"));
        }
        let sizes = cx.shape(1).map(|shape| shape.iter().map(Dim::known).product::<Option<usize>>());
        let count = match sizes {
            Some(Some(count)) => Dim::Known(count),
            // The number of indices is unknown, but for indices of rank 1 it is the size of their axis.
            _ => match cx.shape(1) {
                Some(shape) if shape.rank() == 1 => shape[0].clone(),
                _ => cx.unknown_dim(0, shape.as_ref().map_or(1, |shape| shape.rank().max(2) - 1)),
            },
        };
        let result = shape.map(|shape| {
            let mut dims: Vec<Dim> = shape.iter().cloned().collect();
            if dims.len() == 1 {
                dims.insert(0, Dim::Known(1));
            }
            dims.pop();
            dims.push(count);
            dims.into_iter().collect::<Shape>()
        });
        cx.set_output(0, dtype, result);
        Ok(())
    }
}

fn decompose_extractor(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, positions) = (rw.required_input(0)?, rw.required_input(1)?);
    let missing =
        || OpError::unsupported("the rank of input 0 must be known; declare its shape in the model");
    let rank = rw.shape(x).ok_or_else(missing)?.rank();
    let flat = rw.ints("flat", &[-1]);
    let positions = add(rw, "Reshape", &[positions, flat]);
    let mut selected = rw.add("Gather", &[x, positions], Attrs::new().with("axis", -1i64));
    if rank == 1 {
        let axis = rw.ints("axis", &[0]);
        selected = add(rw, "Unsqueeze", &[selected, axis]);
    }
    rw.replace_output(0, selected);
    Ok(())
}

fn build_extractor(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ArrayFeatureExtractor))
}

/// LabelEncoder: maps keys to values by a table.
struct LabelEncoder {
    keys: Tensor,
    values: Tensor,
    /// Value for inputs that equal no key.
    default: Tensor,
}

/// Reads the list of keys or values (`what`) from the attribute that the version and the type use.
fn read_table(attrs: &Attrs, what: &str) -> Result<Tensor, OpError> {
    if let Some(tensor) = attrs.tensor(&format!("{what}_tensor"))? {
        return Ok(tensor.clone());
    }
    if let Some(numbers) = attrs.ints(&format!("{what}_int64s"))? {
        return Ok(Tensor::i64(&[numbers.len()], numbers));
    }
    if let Some(numbers) = attrs.floats(&format!("{what}_floats"))? {
        return Ok(Tensor::f32(&[numbers.len()], numbers));
    }
    let texts = format!("{what}_strings");
    for name in [texts.as_str(), "classes_strings"] {
        if attrs.0.contains_key(name) {
            return Err(OpError::unsupported(format!(
                "string {what} ({name}) are not supported; map the strings to numbers outside of the model"
            )));
        }
    }
    Err(OpError::invalid(format!(
        "{what} are missing: {what}_tensor, {what}_int64s or {what}_floats is needed"
    )))
}

impl LabelEncoder {
    fn from_attrs(attrs: &Attrs) -> Result<LabelEncoder, OpError> {
        let (keys, values) = (read_table(attrs, "keys")?, read_table(attrs, "values")?);
        if keys.len() != values.len() || keys.is_empty() {
            let (keys, values) = (keys.len(), values.len());
            return Err(OpError::invalid(format!(
                "expected at least one key, and one key for each value, got {keys} keys and {values} values"
            )));
        }
        let default = match attrs.tensor("default_tensor")? {
            Some(default) if default.len() == 1 => default.converted(values.dtype()),
            Some(default) => {
                let count = default.len();
                return Err(OpError::invalid(format!("default_tensor has {count} elements; one is needed")));
            }
            None if values.dtype().is_float() => {
                let default = attrs.float("default_float")?.unwrap_or(-0.0);
                Tensor::f32(&[1], &[default]).converted(values.dtype())
            }
            None => Tensor::i64(&[1], &[attrs.int("default_int64")?.unwrap_or(-1)]).converted(values.dtype()),
        };
        Ok(LabelEncoder { keys, values, default })
    }
}

impl Op for LabelEncoder {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let (dtype, keys) = (cx.dtype(0)?, self.keys.dtype());
        if dtype != keys {
            return Err(OpError::invalid(format!(
                "input 0 is of type {dtype}, but the keys are of type {keys}"
            )));
        }
        cx.set_output(0, self.values.dtype(), cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_encoder(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, encoder) = (rw.required_input(0)?, LabelEncoder::from_attrs(rw.attrs())?);
    let (count, keys) = (encoder.keys.len(), encoder.keys.dtype());
    // Compares each element with each key.
    let axis = rw.ints("axis", &[-1]);
    let column = add(rw, "Unsqueeze", &[x, axis]);
    let row = rw.constant("keys", encoder.keys.clone());
    let mut equal = add(rw, "Equal", &[column, row]);
    if keys.is_float() && encoder.keys.to_f64().iter().any(|key| key.is_nan()) {
        let (left, right) = (add(rw, "IsNaN", &[column]), add(rw, "IsNaN", &[row]));
        let both = add(rw, "And", &[left, right]);
        equal = add(rw, "Or", &[equal, both]);
    }
    let equal = cast(rw.patch().1, equal, DType::Bool, DType::I32);
    let first = rw.add("ArgMax", &[equal], Attrs::new().with("axis", -1i64).with("keepdims", 0i64));
    let any = rw.add("ReduceMax", &[equal, axis], Attrs::new().with("keepdims", 0i64));
    let any = cast(rw.patch().1, any, DType::I32, DType::Bool);
    // The default value follows the values.
    let not_found = rw.constant("behind", Tensor::scalar(DType::I64, count as f64));
    let position = add(rw, "Where", &[any, first, not_found]);
    let mut bytes = encoder.values.data().to_vec();
    bytes.extend_from_slice(encoder.default.data());
    let values = Tensor::new(encoder.values.dtype(), vec![count + 1], bytes.into());
    let values = values.map_err(|error| OpError::invalid(error.to_string()))?;
    let values = rw.constant("values", values);
    let looked_up = add(rw, "Gather", &[values, position]);
    rw.replace_output(0, looked_up);
    Ok(())
}

fn build_encoder(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(LabelEncoder::from_attrs(&node.attrs)?))
}

fn sample_extractor(_: &Definition) -> Sample {
    let inputs =
        vec![Some(ValueType::tensor(DType::F32, &[2, 4])), Some(ValueType::tensor(DType::I64, &[2]))];
    Sample { inputs, ..Sample::default() }
}

fn sample_encoder(_: &Definition) -> Sample {
    let attrs = Attrs::new().with("keys_int64s", vec![1i64, 2]).with("values_floats", vec![0.5f32, 1.5]);
    Sample { attrs, inputs: vec![Some(ValueType::tensor(DType::I64, &[2, 4]))], ..Sample::default() }
}

fn sample_imputer(_: &Definition) -> Sample {
    Sample::of(
        Attrs::new().with("imputed_value_floats", vec![1.0f32]).with("imputed_value_int64s", vec![1i64]),
    )
}

pub(crate) fn definitions() -> Vec<Definition> {
    let new = |name, since, build| Definition::new(ML_DOMAIN, name, since, build);
    vec![
        new("ArrayFeatureExtractor", &[1], build_extractor)
            .traits(Traits::TAKES_PARTS)
            .composition(decompose_extractor)
            .sample(sample_extractor),
        new("Imputer", &[1], build_imputer).composition(decompose_imputer).sample(sample_imputer),
        new("LabelEncoder", &[1, 2, 4], build_encoder).composition(decompose_encoder).sample(sample_encoder),
        new("Normalizer", &[1], build_normalizer)
            .class(Class::RowNorm)
            .composition(decompose_normalizer)
            .downgrade(decompose_normalizer),
        new("Scaler", &[1], build_scaler).composition(decompose_scaler),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_gradients, f64s, generic_tensor, gradient_graph, one_node_graph, run,
        run_node,
    };

    /// Runs an operator on one tensor and returns the result.
    fn run_op(op: &str, x: &Tensor, attrs: &Attrs) -> Tensor {
        run_node((ML_DOMAIN, op), &[Some(x)], 1, attrs.clone()).expect("it runs").remove(0)
    }

    fn error_message(op: &str, x: &Tensor, attrs: &Attrs) -> String {
        match run_node((ML_DOMAIN, op), &[Some(x)], 1, attrs.clone()) {
            Err(Failure::Prepare(error)) => error.to_string(),
            other => panic!("{op}: {other:?}"),
        }
    }

    #[test]
    fn float64_input_is_rounded_after_arithmetic() {
        // Neither number is representable in float32, but their difference is.
        let x = f64s(&[1, 2], &[16_777_217.0, 16_777_219.0]);
        let attrs = Attrs::new().with("offset", vec![16_777_216.0f32]).with("scale", vec![0.5f32, 0.25]);
        assert_eq!(run_op("Scaler", &x, &attrs), Tensor::f32(&[1, 2], &[0.5, 0.75]));
    }

    #[test]
    fn zero_norm_rows_are_unchanged_with_finite_gradients() {
        let x = f64s(&[3, 2], &[0.0, 0.0, -1.0, 0.0, 3.0, -4.0]);
        for (norm, expected) in [
            ("MAX", [0.0, 0.0, -1.0, 0.0, 1.0, -4.0 / 3.0]),
            ("L1", [0.0, 0.0, -1.0, 0.0, 3.0 / 7.0, -4.0 / 7.0]),
            ("L2", [0.0, 0.0, -1.0, 0.0, 0.6, -0.8]),
        ] {
            let attrs = Attrs::new().with("norm", norm);
            let expected: Vec<f32> = expected.iter().map(|&x: &f64| x as f32).collect();
            assert_close(&run_op("Normalizer", &x, &attrs), &Tensor::f32(&[3, 2], &expected), 1e-6);
            let graph = one_node_graph(NEWEST_OPSET, (ML_DOMAIN, "Normalizer"), &[Some(&x)], 1, attrs)
                .expect("valid");
            let inputs = Tensor::f32(&[3, 2], &[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
            let gradient = gradient_graph(&graph, &[Some(inputs)], &[0]);
            let got = run(&gradient, std::slice::from_ref(&x)).expect("it runs").remove(0).to_f64();
            assert!(got.iter().all(|slope| slope.is_finite()), "{norm}: {got:?}");
        }
    }

    #[test]
    fn gradients_of_extractor_and_imputer() {
        let x = generic_tensor(&[3, 4], 2);
        let attrs =
            Attrs::new().with("imputed_value_floats", vec![1.0f32]).with("replaced_value_float", 9.0f32);
        let graph =
            one_node_graph(NEWEST_OPSET, (ML_DOMAIN, "Imputer"), &[Some(&x)], 1, attrs).expect("valid");
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        let positions = Tensor::i64(&[1, 3], &[3, 0, 3]);
        let ports = [Some(&x), Some(&positions)];
        let op = (ML_DOMAIN, "ArrayFeatureExtractor");
        let graph = one_node_graph(NEWEST_OPSET, op, &ports, 1, Attrs::new()).expect("valid");
        check_gradients(&graph, &[x, positions], &[0], &[0]);
    }

    #[test]
    fn label_encoder_matches_first_key_and_nan() {
        let nan = f32::NAN;
        let attrs =
            Attrs::new().with("keys_floats", vec![2.0f32, nan, 2.0]).with("values_int64s", vec![5i64, 6, 7]);
        let x = Tensor::f32(&[2, 2], &[nan, 2.0, 0.0, -2.0]);
        assert_eq!(run_op("LabelEncoder", &x, &attrs), Tensor::i64(&[2, 2], &[6, 5, -1, -1]));
        let attrs = attrs.with("default_int64", 9i64);
        assert_eq!(run_op("LabelEncoder", &x, &attrs).to_i64().expect("integers")[2..], [9, 9]);
    }

    #[test]
    fn rejects_invalid_attributes() {
        let x = Tensor::f32(&[2, 3], &[0.0; 6]);
        for (op, attrs, message) in [
            (
                "Scaler",
                Attrs::new().with("scale", Vec::<f32>::new()),
                "scale has 0 elements; expected 1 or 3 (the number of features)",
            ),
            ("Normalizer", Attrs::new().with("norm", "l2"), "norm must be MAX, L1 or L2, got \"l2\""),
            (
                "Imputer",
                Attrs::new(),
                "attribute imputed_value_floats is missing; inputs of type float32 need it",
            ),
            (
                "LabelEncoder",
                Attrs::new().with("keys_floats", vec![1.0f32]).with("values_floats", vec![1.0f32, 2.0]),
                "expected at least one key, and one key for each value, got 1 keys and 2 values",
            ),
        ] {
            let error_text = error_message(op, &x, &attrs);
            assert!(error_text.contains(message), "{op}: {error_text}");
        }
        let number = Tensor::f32(&[], &[1.0]);
        let attrs = Attrs::new();
        assert!(
            error_message("Normalizer", &number, &attrs)
                .contains("[features] or [batch, features] is needed")
        );
    }
}
