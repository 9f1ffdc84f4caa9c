//! Optimizers with one node per parameter or for several parameters: `SGDOptimizer`, `AdamOptimizer` and
//! `LambOptimizer` of `com.microsoft` version 1.
//!
//! They occur in graphs that ONNX Runtime trains in a single session. Each node runs as other operators, built from the
//! formula of its row. float16 and bfloat16 weights and moments are computed in float32.
//!
//! Gradients are divided by `loss_scale`. If their norm, which is scaled as well, exceeds `loss_scale * max_norm_clip`,
//! the divisor is `norm / max_norm_clip` instead. A step with a false `update_signal` returns its inputs unchanged.

use std::collections::BTreeMap;

use ortrain_expr::Type;
use ortrain_graph::{Attrs, DType, Graph, Node, ValueId, ValueType};

use super::formula::{Formula, FormulaInputs, Number};
use super::spec::MAX_NORM_CLIP;
use super::{adam_optimizer, lamb_optimizer, sgd_optimizer};
use crate::OpError;
use crate::families::optimizers::row::{Optimizer, Rule, Update};
use crate::infer::{Infer, element_count};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::onnx_decomposition::emit_all_as_onnx;

/// Maximum number of parameters of one `LambOptimizer`.
const MAX_PARAMETERS: usize = 1024;
/// Number of inputs, and of outputs, of one parameter of `LambOptimizer`.
const PORTS_PER_PARAMETER: usize = 5;
/// Index of the first parameter input of `LambOptimizer`.
const LAMB_FIRST_PARAMETER: usize = 5;
/// Index of the learning rate input of `LambOptimizer`.
const LAMB_RATE: usize = 3;

/// Inputs that all parameters of a node share.
#[derive(Default)]
struct SharedInputs {
    rate: Option<ValueId>,
    /// Step count, from 1 on.
    step: Option<ValueId>,
    loss_scale: Option<ValueId>,
    norm: Option<ValueId>,
    signal: Option<ValueId>,
}

/// Inputs of one parameter.
struct ParameterInputs {
    parameter: ValueId,
    gradient: ValueId,
    slots: Vec<ValueId>,
    /// Copy of the parameter in a narrower type.
    copy: Option<ValueId>,
}

/// Results of a step of one parameter.
struct ParameterOutputs {
    parameter: ValueId,
    slots: Vec<ValueId>,
    copy: Option<ValueId>,
}

fn cast(dtype: DType) -> Attrs {
    Attrs::new().with("to", i64::from(dtype.to_onnx()))
}

/// Casts a value to a type, if the types differ.
fn cast_to(rw: &mut Rewrite<'_>, value: ValueId, dtype: DType) -> ValueId {
    if rw.dtype(value) == Some(dtype) { value } else { rw.add("Cast", &[value], cast(dtype)) }
}

/// Converts a number to a float64 scalar.
fn scalar_f64(rw: &mut Rewrite<'_>, value: ValueId) -> ValueId {
    let scalar = if rw.shape(value).is_some_and(|shape| shape.rank() == 0) {
        value
    } else {
        let shape = rw.ints("scalar", &[]);
        rw.add("Reshape", &[value, shape], Attrs::new())
    };
    cast_to(rw, scalar, DType::F64)
}

/// Returns `new` if the signal is true, else `old`. The type is the type of `old`.
fn select_by_signal(rw: &mut Rewrite<'_>, signal: Option<ValueId>, new: ValueId, old: ValueId) -> ValueId {
    let new = match rw.dtype(old) {
        Some(dtype) => cast_to(rw, new, dtype),
        None => new,
    };
    let Some(signal) = signal else { return new };
    let shape = rw.ints("scalar", &[]);
    let signal = rw.add("Reshape", &[signal, shape], Attrs::new());
    rw.add("Where", &[signal, new, old], Attrs::new())
}

/// Adds the step of one parameter, by the formula of a row.
fn add_step(
    rw: &mut Rewrite<'_>,
    row: &Optimizer,
    settings: &BTreeMap<String, f64>,
    shared: &SharedInputs,
    tensors: &ParameterInputs,
) -> Result<ParameterOutputs, OpError> {
    let Rule::Elements(formula) = row.update else {
        return Err(OpError::invalid("the formula of the node is not element-wise"));
    };
    let element = if rw.dtype(tensors.parameter) == Some(DType::F64) { DType::F64 } else { DType::F32 };
    let elements: Vec<ValueId> = [tensors.parameter, tensors.gradient]
        .into_iter()
        .chain(tensors.slots.iter().copied())
        .map(|value| cast_to(rw, value, element))
        .collect();
    let numbers = [shared.rate, shared.step, shared.loss_scale, shared.norm];
    let numbers: Vec<Option<ValueId>> =
        numbers.map(|value| value.map(|value| scalar_f64(rw, value))).to_vec();
    let written = Formula::build(Type::of(element), None, |sheet: FormulaInputs<'_>| {
        let scalar = |k: usize| numbers[k].map(|_| sheet.setting(elements.len() + k));
        let one = sheet.constant(1.0);
        let constants: BTreeMap<String, Number<'_>> =
            settings.iter().map(|(name, &value)| (name.clone(), one.like(value))).collect();
        let scale = scalar(2).unwrap_or(one);
        let divisor = match (scalar(3), constants.get(MAX_NORM_CLIP)) {
            (Some(norm), Some(&max_norm)) => {
                (norm - scale * max_norm).greater_than(0.0).select(norm / max_norm, scale)
            }
            _ => scale,
        };
        let slots =
            row.slots.iter().enumerate().map(|(k, slot)| (slot.name.to_owned(), sheet.element(k + 2)));
        let mut update = Update {
            parameter: sheet.element(0),
            gradient: sheet.element(1) / divisor,
            rate: scalar(0).unwrap_or(one),
            step: scalar(1).unwrap_or(one),
            settings: constants,
            flags: BTreeMap::new(),
            slots: slots.collect(),
            new_slots: BTreeMap::new(),
        };
        let new = formula(&mut update);
        let slots = row.slots.iter().map(|slot| update.new_slots.get(slot.name).copied());
        let new_slots: Vec<Number<'_>> = slots
            .enumerate()
            .map(|(k, slot_value)| slot_value.unwrap_or_else(|| sheet.element(k + 2)))
            .collect();
        std::iter::once(new).chain(new_slots).collect()
    });
    let values = emit_all_as_onnx(&written.expr, &written.sums, element, rw, |_, k| match elements.get(k) {
        Some(&value) => value,
        None => numbers[k - elements.len()].expect("a formula loads only existing numbers"),
    })?;
    let mut results = written.expr.outputs().iter().map(|reg| values[usize::from(reg.0)]);
    let new = results.next().ok_or_else(|| OpError::invalid("the formula of the node has no result"))?;
    let slots: Vec<ValueId> = results.collect();
    let slots = slots
        .iter()
        .zip(&tensors.slots)
        .map(|(&new, &old)| select_by_signal(rw, shared.signal, new, old))
        .collect();
    let parameter = select_by_signal(rw, shared.signal, new, tensors.parameter);
    let copy = tensors.copy.map(|old| select_by_signal(rw, shared.signal, new, old));
    Ok(ParameterOutputs { parameter, slots, copy })
}

/// Returns the step count plus one, or unchanged if the signal is false.
fn next_step(rw: &mut Rewrite<'_>, step: ValueId, signal: Option<ValueId>) -> ValueId {
    let one = rw.ints("one", &[1]);
    let next = rw.add("Add", &[step, one], Attrs::new());
    select_by_signal(rw, signal, next, step)
}

/// Checks the inputs of one parameter, and sets the types of its outputs.
fn infer_parameter(
    cx: &mut Infer<'_>,
    inputs: [usize; PORTS_PER_PARAMETER],
    outputs: [usize; PORTS_PER_PARAMETER],
) -> Result<(), OpError> {
    let [parameter, gradient, ..] = inputs;
    for k in inputs.into_iter().filter(|&k| cx.has_input(k)).collect::<Vec<_>>() {
        cx.expect_dtype(k, "a float type", DType::is_float)?;
        if let (Some(parameter_shape), Some(other)) = (cx.shape(parameter), cx.shape(k)) {
            let differs = |(x, y): (Option<usize>, Option<usize>)| x.zip(y).is_some_and(|(x, y)| x != y);
            let sizes = parameter_shape.iter().zip(other.iter()).map(|(x, y)| (x.known(), y.known()));
            if parameter_shape.rank() != other.rank() || sizes.into_iter().any(differs) {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {other}, but the weights have shape {parameter_shape}"
                )));
            }
        }
    }
    let sources = [parameter, gradient, inputs[2], inputs[3], inputs[4]];
    for (output, input) in outputs.into_iter().zip(sources) {
        if cx.has_input(input) {
            let ty = if input == gradient { cx.ty(parameter).clone() } else { cx.ty(input).clone() };
            cx.set_output_type(output, ty);
        }
    }
    Ok(())
}

/// Checks that an input is one number.
fn check_scalar(cx: &Infer<'_>, k: usize, expected: &str, fits: fn(DType) -> bool) -> Result<(), OpError> {
    if !cx.has_input(k) {
        return Ok(());
    }
    cx.expect_dtype(k, expected, fits)?;
    match cx.shape(k).and_then(element_count) {
        Some(count) if count != 1 => {
            Err(OpError::invalid(format!("input {k} has {count} elements, expected one")))
        }
        _ => Ok(()),
    }
}

fn is_bool(dtype: DType) -> bool {
    dtype == DType::Bool
}

fn is_i64(dtype: DType) -> bool {
    dtype == DType::I64
}

/// `w - eta * g`, and the difference.
struct Sgd;

impl Op for Sgd {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 2)?;
        check_scalar(cx, 0, "a float type", DType::is_float)?;
        for k in 1..3 {
            cx.expect_dtype(k, "a float type", DType::is_float)?;
        }
        for k in 0..2 {
            cx.set_output_type(k, cx.ty(1).clone());
        }
        Ok(())
    }
}

fn decompose_sgd(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let parameter = rw.required_input(1)?;
    let tensors =
        ParameterInputs { parameter, gradient: rw.required_input(2)?, slots: Vec::new(), copy: None };
    let shared = SharedInputs { rate: Some(rw.required_input(0)?), ..SharedInputs::default() };
    let results = add_step(rw, &sgd_optimizer::SGD_OPTIMIZER, &BTreeMap::new(), &shared, &tensors)?;
    if rw.has_output(1) {
        let difference = rw.add("Sub", &[results.parameter, parameter], Attrs::new());
        rw.replace_output(1, difference);
    }
    rw.replace_output(0, results.parameter);
    Ok(())
}

/// Adam step of one parameter.
struct Adam;

impl Op for Adam {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(6, 10, 6)?;
        check_scalar(cx, 0, "a float type", DType::is_float)?;
        check_scalar(cx, 1, "int64", is_i64)?;
        check_scalar(cx, 7, "a float type", DType::is_float)?;
        check_scalar(cx, 8, "a float type", DType::is_float)?;
        check_scalar(cx, 9, "bool", is_bool)?;
        cx.set_output_type(0, cx.ty(1).clone());
        infer_parameter(cx, [2, 3, 4, 5, 6], [3, 4, 1, 2, 5])
    }
}

/// Reads the settings of an `AdamOptimizer`.
fn read_adam_settings(attrs: &Attrs) -> Result<BTreeMap<String, f64>, OpError> {
    let mut settings = BTreeMap::new();
    let known = adam_optimizer::ADAM_OPTIMIZER.settings.iter().map(|setting| (setting.name, setting.default));
    for (name, default) in known.chain([(MAX_NORM_CLIP, 1.0)]) {
        let value = match name {
            "do_bias_correction" | "weight_decay_mode" => attrs.int(name)?.map(|value| value as f64),
            _ => attrs.float(name)?.map(f64::from),
        };
        settings.insert(name.to_owned(), value.unwrap_or(f64::from(default as f32)));
    }
    let mode = settings["weight_decay_mode"];
    if ![0.0, 1.0].contains(&mode) {
        return Err(OpError::invalid(format!("weight_decay_mode must be 0 or 1, got {mode}")));
    }
    Ok(settings)
}

fn decompose_adam(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let settings = read_adam_settings(rw.attrs())?;
    let shared = SharedInputs {
        rate: Some(rw.required_input(0)?),
        step: Some(rw.required_input(1)?),
        loss_scale: rw.input(7),
        norm: rw.input(8),
        signal: rw.input(9),
    };
    let tensors = ParameterInputs {
        parameter: rw.required_input(2)?,
        gradient: rw.required_input(3)?,
        slots: vec![rw.required_input(4)?, rw.required_input(5)?],
        copy: rw.input(6),
    };
    let results = add_step(rw, &adam_optimizer::ADAM_OPTIMIZER, &settings, &shared, &tensors)?;
    if rw.has_output(4) {
        let difference = rw.add("Sub", &[results.parameter, tensors.parameter], Attrs::new());
        rw.replace_output(4, difference);
    }
    let counted = next_step(rw, rw.required_input(1)?, shared.signal);
    rw.replace_output(0, counted);
    rw.replace_output(1, results.slots[0]);
    rw.replace_output(2, results.slots[1]);
    rw.replace_output(3, results.parameter);
    if let Some(copy) = results.copy {
        rw.replace_output(5, copy);
    }
    Ok(())
}

/// LAMB step of several parameters.
struct Lamb {
    parameters: usize,
}

impl Op for Lamb {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(
            0,
            LAMB_FIRST_PARAMETER + PORTS_PER_PARAMETER * MAX_PARAMETERS,
            1 + PORTS_PER_PARAMETER * MAX_PARAMETERS,
        )?;
        let needed = (0..self.parameters).flat_map(|group| {
            (0..PORTS_PER_PARAMETER - 1).map(move |k| LAMB_FIRST_PARAMETER + PORTS_PER_PARAMETER * group + k)
        });
        if let Some(missing) = std::iter::once(LAMB_RATE).chain(needed).find(|&k| !cx.has_input(k)) {
            return Err(OpError::invalid(format!("input {missing} is missing")));
        }
        check_scalar(cx, 0, "bool", is_bool)?;
        for k in 1..4 {
            check_scalar(cx, k, "a float type", DType::is_float)?;
        }
        check_scalar(cx, 4, "int64", is_i64)?;
        if cx.has_input(4) {
            cx.set_output_type(0, cx.ty(4).clone());
        }
        for group in 0..self.parameters {
            let (input, output) =
                (LAMB_FIRST_PARAMETER + PORTS_PER_PARAMETER * group, 1 + PORTS_PER_PARAMETER * group);
            infer_parameter(cx, std::array::from_fn(|k| input + k), std::array::from_fn(|k| output + k))?;
        }
        Ok(())
    }
}

/// Reads the settings of each parameter of a `LambOptimizer`.
fn read_lamb_settings(attrs: &Attrs, parameters: usize) -> Result<Vec<BTreeMap<String, f64>>, OpError> {
    let mut settings = vec![BTreeMap::new(); parameters];
    let known = lamb_optimizer::LAMB_OPTIMIZER.settings.iter().map(|setting| (setting.name, setting.default));
    for (name, default) in known.chain([(MAX_NORM_CLIP, 1.0)]) {
        let listed: Option<Vec<f64>> = match name {
            "do_bias_correction" => {
                // The default of the operator is 1; the default of the row is 0.
                Some(vec![attrs.int(name)?.unwrap_or(1) as f64; parameters])
            }
            "ratio_min" | "ratio_max" => {
                attrs.float(name)?.map(|value| vec![f64::from(value).clamp(f64::MIN, f64::MAX); parameters])
            }
            _ => attrs.floats(name)?.map(|values| values.iter().map(|&value| f64::from(value)).collect()),
        };
        let values =
            listed.unwrap_or_else(|| vec![f64::from(default as f32).clamp(f64::MIN, f64::MAX); parameters]);
        if values.len() < parameters {
            return Err(OpError::invalid(format!(
                "{name} has {} numbers, expected one for each of {parameters} weights",
                values.len()
            )));
        }
        for (settings, value) in settings.iter_mut().zip(values) {
            settings.insert(name.to_owned(), value);
        }
    }
    Ok(settings)
}

/// Returns the number of parameters of a `LambOptimizer`.
fn count_lamb_parameters(node: &Node) -> usize {
    node.inputs.len().saturating_sub(LAMB_FIRST_PARAMETER).div_ceil(PORTS_PER_PARAMETER)
}

fn decompose_lamb(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let shared = SharedInputs {
        signal: rw.input(0),
        loss_scale: rw.input(1),
        norm: rw.input(2),
        rate: Some(rw.required_input(LAMB_RATE)?),
        step: rw.input(4),
    };
    let settings = read_lamb_settings(rw.attrs(), count_lamb_parameters(rw.node()))?;
    for (group, settings) in settings.iter().enumerate() {
        let (input, output) =
            (LAMB_FIRST_PARAMETER + PORTS_PER_PARAMETER * group, 1 + PORTS_PER_PARAMETER * group);
        let parameter = rw.required_input(input)?;
        let tensors = ParameterInputs {
            parameter,
            gradient: rw.required_input(input + 1)?,
            slots: vec![rw.required_input(input + 2)?, rw.required_input(input + 3)?],
            copy: rw.input(input + 4),
        };
        let results = add_step(rw, &lamb_optimizer::LAMB_OPTIMIZER, settings, &shared, &tensors)?;
        if rw.has_output(output + 1) {
            let difference = rw.add("Sub", &[results.parameter, parameter], Attrs::new());
            rw.replace_output(output + 1, difference);
        }
        rw.replace_output(output, results.parameter);
        rw.replace_output(output + 2, results.slots[0]);
        rw.replace_output(output + 3, results.slots[1]);
        if let Some(copy) = results.copy {
            rw.replace_output(output + 4, copy);
        }
    }
    if let Some(step) = shared.step {
        let counted = next_step(rw, step, shared.signal);
        rw.replace_output(0, counted);
    }
    Ok(())
}

fn build_adam(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_adam_settings(&node.attrs)?;
    Ok(Box::new(Adam))
}

fn build_lamb(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let parameters = count_lamb_parameters(node);
    read_lamb_settings(&node.attrs, parameters)?;
    Ok(Box::new(Lamb { parameters }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    let new = |name, build| Definition::new("com.microsoft", name, &[1], build);
    vec![
        new("SGDOptimizer", |_, _| Ok(Box::new(Sgd))).runs_as(decompose_sgd),
        new("AdamOptimizer", build_adam).runs_as(decompose_adam).sample(|_| {
            let number = |dtype| Some(ValueType::tensor(dtype, &[1]));
            let tensor = Some(ValueType::tensor(DType::F32, &[2]));
            let inputs = [number(DType::F32), number(DType::I64)].into_iter();
            let inputs = inputs.chain(std::iter::repeat_n(tensor, 4)).collect();
            Sample { inputs, ..Sample::default() }
        }),
        new("LambOptimizer", build_lamb).runs_as(decompose_lamb).sample(|_| {
            let tensor = |dims: &[usize]| Some(ValueType::tensor(DType::F32, dims));
            let first = [None, None, None, tensor(&[1]), Some(ValueType::tensor(DType::I64, &[1]))];
            let inputs = first.into_iter().chain(std::iter::repeat_n(tensor(&[2]), 4)).collect();
            Sample { inputs, ..Sample::default() }
        }),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::testing::{Failure, assert_close, f64s, run_node};

    const MICROSOFT: &str = "com.microsoft";
    const ALPHA: f64 = 0.8;
    const BETA: f64 = 0.95;
    const LAMBDA: f64 = 0.1;
    const EPSILON: f64 = 1e-3;
    /// Tolerance: the expected results use float64 settings, the attributes are float32.
    const TOLERANCE: f64 = 1e-6;

    fn attrs() -> Attrs {
        let numbers = [("alpha", ALPHA), ("beta", BETA), ("lambda", LAMBDA), ("epsilon", EPSILON)];
        numbers.into_iter().fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value as f32))
    }

    /// Weight, gradient and moments.
    fn tensors() -> [Tensor; 4] {
        [&[1.0, -2.0, 0.5][..], &[0.3, 4.0, -1.2], &[0.1, 0.2, -0.3], &[0.01, 0.5, 0.2]]
            .map(|x| f64s(&[3], x))
    }

    /// Computes an Adam step of one element: the new moments and the new weight.
    fn expected_adam([w, g, m, v]: [f64; 4], rate: f64, step: i32, after: bool, corrected: bool) -> [f64; 3] {
        let (m, v) = (ALPHA * m + (1.0 - ALPHA) * g, BETA * v + (1.0 - BETA) * g * g);
        let correction = |factor: f64| if corrected { 1.0 - factor.powi(step) } else { 1.0 };
        let (c1, c2) = (correction(ALPHA), correction(BETA));
        let new = if after {
            let moved = w - rate * c2.sqrt() / c1 * m / (v.sqrt() + EPSILON);
            moved - rate * LAMBDA * moved
        } else {
            w - rate * (m / c1 / ((v / c2).sqrt() + EPSILON) + LAMBDA * w)
        };
        [m, v, new]
    }

    fn elements(tensors: &[Tensor; 4]) -> Vec<[f64; 4]> {
        let values = tensors.each_ref().map(Tensor::to_f64);
        (0..values[0].len()).map(|k| values.each_ref().map(|tensor| tensor[k])).collect()
    }

    #[test]
    fn adam_matches_formulas() {
        let (rate, step) = (f64s(&[1], &[0.1]), Tensor::i64(&[1], &[3]));
        let operands = tensors();
        for (mode, corrected) in [(0i64, 1i64), (1, 1), (0, 0), (1, 0)] {
            let attrs = attrs().with("weight_decay_mode", mode).with("do_bias_correction", corrected);
            let inputs: Vec<Option<&Tensor>> =
                [&rate, &step].into_iter().chain(&operands).map(Some).collect();
            let got = run_node((MICROSOFT, "AdamOptimizer"), &inputs, 5, attrs).expect("the graph runs");
            assert_eq!(got[0].to_i64(), Some(vec![4]));
            for (k, element) in elements(&operands).into_iter().enumerate() {
                let [m, v, w] = expected_adam(element, 0.1, 3, mode == 1, corrected == 1);
                let actual_values = [1, 2, 3, 4].map(|port| got[port].to_f64()[k]);
                for (actual, expected) in actual_values.into_iter().zip([m, v, w, w - element[0]]) {
                    assert!((actual - expected).abs() < TOLERANCE, "mode {mode}: {actual} for {expected}");
                }
            }
        }
    }

    #[test]
    fn adam_unscales_and_clips() {
        let (rate, step) = (f64s(&[1], &[0.1]), Tensor::i64(&[1], &[1]));
        let operands = tensors();
        let (scale, norm) = (64.0, 640.0);
        for (max_norm, divisor) in [(1.0, 640.0), (4.0, 160.0), (20.0, 64.0)] {
            let (scale, norm) = (f64s(&[1], &[scale]), f64s(&[], &[norm]));
            let attrs = attrs().with("max_norm_clip", max_norm as f32);
            let mut inputs: Vec<Option<&Tensor>> =
                [&rate, &step].into_iter().chain(&operands).map(Some).collect();
            inputs.extend([None, Some(&scale), Some(&norm)]);
            let got = run_node((MICROSOFT, "AdamOptimizer"), &inputs, 4, attrs).expect("the graph runs");
            for (k, [w, g, m, v]) in elements(&operands).into_iter().enumerate() {
                let expected = expected_adam([w, g / divisor, m, v], 0.1, 1, false, true)[2];
                assert!((got[3].to_f64()[k] - expected).abs() < TOLERANCE, "{max_norm}");
            }
        }
    }

    #[test]
    fn false_update_signal_changes_nothing() {
        let (rate, step, off) =
            (f64s(&[1], &[0.1]), Tensor::i64(&[1], &[9]), Tensor::filled(DType::Bool, &[], 0.0));
        let operands = tensors();
        let copy = operands[0].converted(DType::F16);
        let mut inputs: Vec<Option<&Tensor>> =
            [&rate, &step].into_iter().chain(&operands).map(Some).collect();
        inputs.extend([Some(&copy), None, None, Some(&off)]);
        let got = run_node((MICROSOFT, "AdamOptimizer"), &inputs, 6, Attrs::new()).expect("the graph runs");
        for (port, expected) in
            [(0, &step), (1, &operands[2]), (2, &operands[3]), (3, &operands[0]), (5, &copy)]
        {
            assert_close(&got[port], expected, 0.0);
        }
        let [weight, gradient, first, second] = &operands;
        let inputs = [
            Some(&off),
            None,
            None,
            Some(&rate),
            Some(&step),
            Some(weight),
            Some(gradient),
            Some(first),
            Some(second),
        ];
        let got =
            run_node((MICROSOFT, "LambOptimizer"), &inputs, 5, Attrs::new().with("alpha", vec![0.5f32]));
        let got = got.expect("the graph runs");
        for (port, expected) in [(0, &step), (1, weight), (3, first), (4, second)] {
            assert_close(&got[port], expected, 0.0);
        }
    }

    /// Computes a LAMB step of one tensor.
    fn expected_lamb(operands: &[Tensor; 4], rate: f64, (min_ratio, max_ratio): (f64, f64)) -> Vec<f64> {
        let direction = |[w, g, m, v]: [f64; 4]| {
            let (m, v) = (ALPHA * m + (1.0 - ALPHA) * g, BETA * v + (1.0 - BETA) * g * g);
            let lamb_direction = LAMBDA * w + m / (v.sqrt() + EPSILON);
            if lamb_direction.is_finite() && v.is_finite() { lamb_direction } else { 0.0 }
        };
        let directions: Vec<f64> = elements(operands).into_iter().map(direction).collect();
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let (weights, steps) = (norm(&operands[0].to_f64()), norm(&directions));
        let ratio =
            if weights > 0.0 && steps > 0.0 { (weights / steps).min(max_ratio).max(min_ratio) } else { 1.0 };
        operands[0].to_f64().iter().zip(&directions).map(|(w, d)| w - rate * ratio * d).collect()
    }

    fn run_lamb(operands: &[Tensor; 4], attrs: &Attrs) -> Vec<Tensor> {
        let (rate, step) = (f64s(&[1], &[0.1]), Tensor::i64(&[1], &[1]));
        let mut inputs = vec![None, None, None, Some(&rate), Some(&step)];
        inputs.extend(operands.iter().map(Some));
        run_node((MICROSOFT, "LambOptimizer"), &inputs, 5, attrs.clone()).expect("the graph runs")
    }

    #[test]
    fn lamb_matches_formula() {
        let numbers = [("alpha", ALPHA), ("beta", BETA), ("lambda", LAMBDA), ("epsilon", EPSILON)];
        let lists = numbers
            .into_iter()
            .fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, vec![value as f32]));
        let plain = lists.with("do_bias_correction", 0i64);
        let zeros = {
            let mut zeros = tensors();
            zeros[0] = f64s(&[3], &[0.0; 3]);
            zeros
        };
        let not_finite = {
            let mut operands = tensors();
            operands[1] = f64s(&[3], &[0.3, f64::INFINITY, -1.2]);
            operands
        };
        let unbounded = (f64::MIN, f64::MAX);
        let bounded = plain.clone().with("ratio_min", 2.0f32).with("ratio_max", 3.0f32);
        let small = plain.clone().with("ratio_max", 0.25f32);
        let cases = [
            (tensors(), &plain, unbounded),
            (zeros, &plain, unbounded),
            (not_finite, &plain, unbounded),
            (tensors(), &bounded, (2.0, 3.0)),
            (tensors(), &small, (f64::MIN, 0.25)),
        ];
        for (k, (case_operands, attrs, bounds)) in cases.into_iter().enumerate() {
            let got = run_lamb(&case_operands, attrs);
            assert_eq!(got[0].to_i64(), Some(vec![2]));
            assert_close(&got[1], &f64s(&[3], &expected_lamb(&case_operands, 0.1, bounds)), TOLERANCE);
            if k == 2 {
                assert_eq!(
                    got[3].to_f64()[1].to_bits(),
                    case_operands[2].to_f64()[1].to_bits(),
                    "its moments stay"
                );
                assert_eq!(got[4].to_f64()[1].to_bits(), case_operands[3].to_f64()[1].to_bits());
            }
        }
    }

    #[test]
    fn rejects_too_short_settings() {
        let operands = tensors();
        let (rate, step) = (f64s(&[1], &[0.1]), Tensor::i64(&[1], &[1]));
        let mut inputs = vec![None, None, None, Some(&rate), Some(&step)];
        inputs.extend(operands.iter().map(Some));
        inputs.push(None);
        inputs.extend(operands.iter().map(Some));
        let failure =
            run_node((MICROSOFT, "LambOptimizer"), &inputs, 10, Attrs::new().with("alpha", vec![0.9f32]));
        let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
        assert!(
            error.to_string().contains("alpha has 1 numbers, expected one for each of 2 weights"),
            "{error}"
        );
    }

    #[test]
    fn float16_weight_is_updated_in_float32() {
        let (rate, w, g) = (f64s(&[1], &[0.5]), f64s(&[2], &[1.0, 2.0]), f64s(&[2], &[0.5, -0.5]));
        let narrow = w.converted(DType::F16);
        let got =
            run_node((MICROSOFT, "SGDOptimizer"), &[Some(&rate), Some(&narrow), Some(&g)], 2, Attrs::new());
        let got = got.expect("the graph runs");
        assert_eq!((got[0].dtype(), got[0].to_f64()), (DType::F16, vec![0.75, 2.25]));
        assert_eq!(got[1].to_f64(), [-0.25, 0.25]);
    }
}
