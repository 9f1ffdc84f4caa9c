//! Reading of optimizer models.

use ortrain_graph::{DType, Graph, ValueId, ValueType};
use ortrain_onnx::LoadedModel;
use ortrain_ops::optimizers::{
    BoundInputs, OptimizerSpec, SlotShape, SlotSpec, bind, bound_inputs, is_elementwise as elementwise,
    read_description, sum_input,
};
use ortrain_ops::passes::infer::infer;
use ortrain_ops::passes::versions::upgrade;
use ortrain_ops::training::{
    check_sequences, moment_count, onnxruntime_optimizer, uses_onnxruntime_optimizer,
};

use crate::model::graph::graph_of;
use crate::state::slots::RequiredSlots;
use crate::{Error, FileKind, Result};

/// A parsed optimizer model.
pub(crate) struct ParsedOptimizer {
    pub(crate) graph: Graph,
    pub(crate) spec: OptimizerSpec,
    pub(crate) in_model: bool,
    /// True if the model is expanded for each parameter: its step is not element-wise.
    pub(crate) is_spread: bool,
    pub(crate) slots: Vec<RequiredSlots>,
    pub(crate) columns: Vec<Column>,
}

/// Parses an optimizer model.
pub(crate) fn read_optimizer(label: &str, model: &LoadedModel) -> Result<ParsedOptimizer> {
    let mut graph = Graph::from_model(model).map_err(|source| Error::graph(label, source))?;
    let has =
        |name: &str| graph.inputs.iter().any(|&id| graph.name_of(id) == name && is_sequence(&graph, id));
    if uses_onnxruntime_optimizer(&graph) || !has("params") || !has("gradients") {
        return read_onnxruntime_optimizer(label, model);
    }
    let wrong = |reason: String| Error::WrongModel { model: label.to_owned(), reason };
    let in_words = |source| Error::model(label, source);
    let bound = bound_inputs(&graph).map_err(in_words)?;
    let gives = |id: &ValueId| graph.name_of(*id) == "updated_params" && is_sequence(&graph, *id);
    if !graph.outputs.iter().any(gives) {
        return Err(wrong(
            "it updates no parameters: it has neither an optimizer of ONNX Runtime nor a sequence output \
             \"updated_params\""
                .into(),
        ));
    }
    let declared = read_description(&model.proto).map_err(|source| wrong(source.to_string()))?;
    let spec = declared.unwrap_or_else(|| default_spec(&graph, &bound));
    spec.check().map_err(|source| wrong(format!("its description is invalid: {source}")))?;
    for &id in &graph.inputs {
        let (name, ty) = (graph.name_of(id), &graph.value(id).ty);
        let number = NumberInput::ALL.iter().find(|(known, ..)| *known == name);
        match (ty, number) {
            (ValueType::Sequence(_), _) => {}
            (ValueType::Tensor(dtype, _), Some((_, number, expected)))
                if dtype == expected && *number != NumberInput::Settings => {}
            (ty, Some((_, _, expected))) => {
                return Err(wrong(format!("input {name:?} should be {expected}[1] but is {ty}")));
            }
            (ty, None) => {
                let known: Vec<&str> = NumberInput::ALL[..5].iter().map(|(name, ..)| *name).collect();
                return Err(wrong(format!(
                    "input {name:?} ({ty}) is unknown: the inputs of an optimizer are {}, the sequences \"params\" \
                     and \"gradients\", slots (with outputs \"updated_\" and their names) and settings (sequences \
                     of float64)",
                    known.join(", ")
                )));
            }
        }
    }
    if spec.max_norm.is_none() && graph.inputs.iter().any(|&id| graph.name_of(id) == "max_norm") {
        return Err(wrong("it has an input \"max_norm\", but its description has no value for it".into()));
    }
    let columns = columns_of(label, &spec, &bound)?;
    let slots = bound.slots.iter().map(|name| {
        let id = graph.find(name).ok_or_else(|| wrong(format!("it has no input {name:?}")))?;
        let slot = spec.slots.iter().find(|slot| slot.name == *name).cloned();
        let slot = slot.unwrap_or_else(|| SlotSpec::new(name));
        Ok(RequiredSlots { slot, dtype: graph.value(id).ty.dtype() })
    });
    let slots = slots.collect::<Result<Vec<RequiredSlots>>>()?;
    // An element-wise step is one instruction over all parameters.
    let mut bound_graph = graph.clone();
    let is_scalar = |name: &str| {
        let slot = slots.iter().find(|slot| slot.slot.name == name);
        slot.is_some_and(|slot| slot.shape().is_ok_and(|shape| shape == SlotShape::Scalar))
    };
    let is_elementwise = bind(&mut bound_graph).is_ok_and(|found| found.is_some())
        && upgrade(&mut bound_graph).is_ok()
        && infer(&mut bound_graph).is_ok()
        && elementwise(&bound_graph, &is_scalar);
    if is_elementwise {
        graph = bound_graph;
    }
    Ok(ParsedOptimizer { graph, spec, in_model: false, is_spread: !is_elementwise, slots, columns })
}

/// Returns the columns of the settings table of a model.
pub(crate) fn columns_of(label: &str, spec: &OptimizerSpec, bound: &BoundInputs) -> Result<Vec<Column>> {
    let columns = bound.columns.iter().map(|name| match name.as_str() {
        "lr" => Ok(Column::Lr),
        "lr_factor" => Ok(Column::LrFactor),
        "skipped_steps" => Ok(Column::SkippedSteps),
        name if spec.settings.contains_key(name) => Ok(Column::Setting(name.to_owned())),
        name => sum_input(name).map(Column::Sum).ok_or_else(|| Error::WrongModel {
            model: label.to_owned(),
            reason: format!(
                "input {name:?} is unknown: it is neither a slot (there is no output \"updated_{name}\") nor a \
                 setting of its description"
            ),
        }),
    });
    columns.collect()
}

/// Returns a description for an optimizer model without one.
pub(crate) fn default_spec(graph: &Graph, bound: &BoundInputs) -> OptimizerSpec {
    let name = if graph.name.is_empty() { "optimizer" } else { &*graph.name };
    OptimizerSpec::of_model(name, bound.slots.iter().map(|name| SlotSpec::new(name)).collect())
}

/// Parses a model with an ONNX Runtime optimizer.
pub(crate) fn read_onnxruntime_optimizer(label: &str, model: &LoadedModel) -> Result<ParsedOptimizer> {
    let wrong = |reason: String| Error::WrongModel { model: label.to_owned(), reason };
    let mut graph = graph_of(label, model)?;
    let moments = moment_count(&graph).map_err(|source| match FileKind::of_graph(&graph) {
        FileKind::OptimizerModel => Error::model(label, source),
        kind => wrong(format!(
            "it is {}, and {source}; give the optimizer model that was made together with the checkpoint \
             (optimizer_model.onnx)",
            kind.name_with_article()
        )),
    })?;
    let expected: Vec<&str> =
        SCALAR_INPUTS.into_iter().chain(SEQUENCE_INPUTS[..2 + moments].iter().copied()).collect();
    let actual: Vec<&str> = graph.inputs.iter().map(|&id| graph.name_of(id)).collect();
    if expected != actual {
        let (expected, actual) = (expected.join(", "), actual.join(", "));
        return Err(wrong(format!("its inputs should be {expected}, in this order, but are {actual}")));
    }
    for (k, &id) in graph.inputs.iter().enumerate() {
        let ty = &graph.value(id).ty;
        let fits = match k {
            0 => ty.dtype() == Some(DType::F32) && ty.shape().is_none_or(|shape| shape.rank() == 1),
            1 => ty.dtype() == Some(DType::I64) && ty.shape().is_none_or(|shape| shape.rank() == 1),
            _ => matches!(ty, ValueType::Sequence(_)),
        };
        if !fits {
            let expected_type = ["float32[1]", "int64[1]"].get(k).unwrap_or(&"a sequence of tensors");
            return Err(wrong(format!(
                "input {:?} should be {expected_type} but is {ty}",
                graph.name_of(id)
            )));
        }
    }
    let spec = match read_description(&model.proto).map_err(|source| wrong(source.to_string()))? {
        Some(spec) => spec,
        None => onnxruntime_optimizer(&graph).map_err(|source| Error::model(label, source))?,
    };
    infer(&mut graph).map_err(|source| Error::model(label, source))?;
    check_sequences(&graph).map_err(|source| Error::model(label, source))?;
    if graph.outputs.is_empty() {
        return Err(wrong("it has no output that says whether it updated the parameters".into()));
    }
    let slots = (0..moments)
        .map(|k| RequiredSlots { slot: SlotSpec::new(&format!("momentum{k}")), dtype: None })
        .collect();
    Ok(ParsedOptimizer { graph, spec, in_model: true, is_spread: false, slots, columns: Vec::new() })
}

/// Inputs of ONNX Runtime's optimizer models: two scalars, then sequences.
pub(crate) const SCALAR_INPUTS: [&str; 2] = ["learning_rate", "step"];

pub(crate) const SEQUENCE_INPUTS: [&str; 4] =
    ["params", "gradients", "first_order_moments", "second_order_moments"];

/// A scalar or table input of an optimizer model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberInput {
    /// The learning rate, float32.
    LearningRate,
    /// Step number, starting at 1, int64.
    Step,
    /// Number of training steps in the accumulated gradients, int64.
    GatheredSteps,
    /// Maximum norm of all gradients together, float64.
    MaxNorm,
    /// Loss scale of the gradients, float32.
    LossScale,
    /// Table of settings, float64: a row for each parameter.
    Settings,
    /// Norm of the gradients on all ranks, float64, if the state is divided among ranks.
    GradientNorm,
}

impl NumberInput {
    pub(crate) const ALL: [(&'static str, NumberInput, DType); 7] = [
        ("learning_rate", NumberInput::LearningRate, DType::F32),
        ("step", NumberInput::Step, DType::I64),
        ("gathered_steps", NumberInput::GatheredSteps, DType::I64),
        ("max_norm", NumberInput::MaxNorm, DType::F64),
        ("loss_scale", NumberInput::LossScale, DType::F32),
        ("settings", NumberInput::Settings, DType::F64),
        ("gradient_norm", NumberInput::GradientNorm, DType::F64),
    ];

    /// Returns the input with this name.
    pub(crate) fn of(name: &str) -> Option<NumberInput> {
        NumberInput::ALL.iter().find(|(known, ..)| *known == name).map(|&(_, number, _)| number)
    }
}

/// A column of the settings table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// Own learning rate of a group, including the current schedule factor.
    Lr,
    /// Factor of the optimizer's learning rate.
    LrFactor,
    /// Number of steps during which the group was frozen.
    SkippedSteps,
    /// A setting.
    Setting(String),
    /// A sum over the parameter on all ranks, by its number, if the state is divided among ranks.
    Sum(usize),
}

pub(crate) fn is_sequence(graph: &Graph, id: ortrain_graph::ValueId) -> bool {
    matches!(graph.value(id).ty, ValueType::Sequence(_))
}
