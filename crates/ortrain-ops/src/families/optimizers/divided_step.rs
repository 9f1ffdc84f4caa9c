//! Optimizer models for a state that is divided among ranks.
//!
//! With ZeRO a rank updates only a part of the elements. Sums over a parameter, and the norm of all gradients, follow from
//! the values of all ranks. One model computes the sums over the elements of a rank. Another model updates these elements,
//! with the sums of all ranks as inputs.

use ortrain_graph::{Attrs, DType, ValueType};
use ortrain_onnx::ModelProto;

use super::OptimizerSpec;
use super::model::{
    GRADIENT_NORM, ModelBuilder, SUM_INPUT, build_formula_graph, start_model, step_ports, update_elements,
};
use super::spec::MAX_NORM_PER_TENSOR;
use crate::OpError;
use crate::families::optimizers::row::{Optimizer, Rule};

/// Models of a step of an optimizer with a divided state.
#[derive(Clone, Debug)]
pub struct DividedModels {
    /// Model of the update. The norm of the gradients is the input `gradient_norm`, and each sum a sequence of settings.
    pub update: ModelProto,
    /// Model of the sums: one tensor of all parameters for each sum. `None` if a step has no sums.
    pub sums: Option<ModelProto>,
}

/// Names of the settings with sums over a parameter.
fn sum_inputs(count: usize) -> Vec<String> {
    (0..count).map(|k| format!("{SUM_INPUT}{k}")).collect()
}

/// Returns the number of a sum, from the name of its setting in [`DividedModels::update`].
#[must_use]
pub fn sum_input(name: &str) -> Option<usize> {
    name.strip_prefix(SUM_INPUT)?.parse().ok()
}

/// Builds the models of a row of element-wise formulas.
///
/// # Errors
/// Returns an error if the row computes with tensors, or a setting clips the gradient of each tensor.
pub fn divided_models(
    row: &'static Optimizer,
    spec: &OptimizerSpec,
    dtypes: &[DType],
) -> Result<DividedModels, OpError> {
    let Rule::Elements(formula) = row.update else {
        return Err(OpError::unsupported(format!(
            "{} computes with complete tensors, so its state cannot be divided among ranks",
            row.name
        )));
    };
    if spec.settings.contains_key(MAX_NORM_PER_TENSOR) {
        return Err(OpError::unsupported(
            "the state of an optimizer that clips the gradient of each tensor cannot be divided among ranks",
        ));
    }
    let spec = &spec.clone().complete_for(row)?.with_group_settings();
    let (slots, elements, settings, outputs) = step_ports(spec);

    // Sums of the elements of a rank.
    let (mut w, mut inputs, types, _) = start_model(spec, dtypes);
    add_norm_input(&mut w, &mut inputs, spec);
    let mut count = 0;
    let names: Vec<String> = sum_inputs(MAX_SUMS);
    let step = build_formula_graph(row.name, (elements.clone(), settings.clone()), &names, types, |step| {
        update_elements((row.flags, formula), spec, &slots, step);
        let sums = step.sheet.sums();
        count = sums.len();
        sums
    })?;
    let sums = (count > 0).then(|| {
        let sequences: Vec<(String, DType)> =
            (0..count).map(|k| (format!("{SUM_INPUT}{k}"), types.0)).collect();
        let sequences = w.add_map(step, &inputs, &sequences);
        w.graph.outputs = sequences
            .into_iter()
            .map(|sequence| {
                let concat = Attrs::new().with("axis", 0i64).with("new_axis", 1i64);
                let sums = w.emit("ConcatFromSequence", &[sequence], concat);
                w.emit("Cast", &[sums], Attrs::new().with("to", i64::from(DType::F64.to_onnx())))
            })
            .collect();
        w.to_model(spec)
    });

    // Update with the sums of all ranks.
    let (mut w, mut inputs, types, max_norm) = start_model(spec, dtypes);
    if max_norm.is_some() {
        return Err(OpError::unsupported(
            "the state of an optimizer with max_norm cannot be divided among ranks",
        ));
    }
    add_norm_input(&mut w, &mut inputs, spec);
    let mut settings = settings;
    for name in sum_inputs(count) {
        inputs.insert(name.clone(), w.input(&name, ValueType::Sequence(DType::F64)));
        settings.push(name);
    }
    let step = build_formula_graph(row.name, (elements, settings), &outputs, types, |step| {
        update_elements((row.flags, formula), spec, &slots, step)
    })?;
    w.add_updates(step, spec, &inputs, types);
    Ok(DividedModels { update: w.to_model(spec), sums })
}

/// Upper bound of the number of sums of a step.
const MAX_SUMS: usize = 16;

/// Adds the norm of all gradients as an input, if a step needs it.
fn add_norm_input(
    w: &mut ModelBuilder,
    inputs: &mut std::collections::BTreeMap<String, ortrain_graph::ValueId>,
    spec: &OptimizerSpec,
) {
    if spec.needs_norm() {
        let norm = w.input(GRADIENT_NORM, ValueType::tensor(DType::F64, &[1]));
        let scalar = w.emit("Squeeze", &[norm], Attrs::new());
        inputs.insert(GRADIENT_NORM.into(), scalar);
    }
}
