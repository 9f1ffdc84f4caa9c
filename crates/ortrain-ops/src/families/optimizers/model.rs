//! Optimizer model of a row, in plain ONNX.
//!
//! `SequenceMap` applies the step of one parameter to every parameter. Any runtime with the operators of opset 17 can
//! run the model. Settings that may differ between parameters are sequences, with a scalar for each parameter.
//!
//! The step is the body itself, not a function: onnxruntime does not sort the nodes of a function that it inlines in a
//! body.

use std::collections::BTreeMap;

use ortrain_expr::Type;
use ortrain_graph::{Attr, Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_onnx::{ModelProto, OperatorSetIdProto, StringStringEntryProto};

use super::formula::{Formula, FormulaInputs, Number};
use super::spec::{EMA, EMA_DECAY, MAX_NORM_CLIP, MAX_NORM_PER_TENSOR, MAX_VALUE};
use super::tensors::TensorBuilder;
use super::{OptimizerFunction, OptimizerSpec};
use crate::families::optimizers::row::{Flag, OPSET, Optimizer, Rule, StepResult, Update};
use crate::passes::functions::inline_functions;
use crate::support::onnx_decomposition::{NodeSink, emit_all_as_onnx};
use crate::{OpError, OperatorLibrary};

/// IR version of optimizer models.
const IR_VERSION: i64 = 10;
/// Number that is added to norms in clipping, as in `torch.nn.utils.clip_grad_norm_`.
const CLIP_EPSILON: f64 = 1e-6;
/// Metadata key of the optimizer description.
const DESCRIPTION: &str = "ortrain.optimizer";

/// Returns the metadata entry with the description of the optimizer.
pub(crate) fn description_entry(spec: &OptimizerSpec) -> StringStringEntryProto {
    StringStringEntryProto { key: DESCRIPTION.into(), value: spec.to_text() }
}

/// Reads the optimizer description from the metadata of an optimizer model, if there is one.
///
/// # Errors
/// Returns an error if the description is damaged.
pub fn read_description(model: &ModelProto) -> Result<Option<OptimizerSpec>, OpError> {
    let entry = model.metadata_props.iter().find(|entry| entry.key == DESCRIPTION);
    entry.map(|entry| OptimizerSpec::from_text(&entry.value)).transpose()
}

/// Input with the number of training steps that gradients are summed over.
const GATHERED_STEPS: &str = "gathered_steps";
/// Input with the scale of the loss, which the gradients contain.
const LOSS_SCALE: &str = "loss_scale";
/// Global norm of the gradients, before clipping by this norm.
pub(super) const GRADIENT_NORM: &str = "gradient_norm";
/// Inputs of the model with one number for all parameters. Their rank is 1.
const SHARED_INPUTS: [&str; 4] = ["learning_rate", "step", GATHERED_STEPS, LOSS_SCALE];
/// Prefix of the settings with sums over a parameter that the step does not compute itself, with their numbers.
pub(super) const SUM_INPUT: &str = "sum_over_parameter.";
/// Exponent of the power of two that divides gradients if their squares overflow float32.
const OVERFLOW_SCALE_EXPONENT: i32 = 80;

/// Returns the names of the shared inputs that divide the gradients before a step.
fn gradient_divisors(spec: &OptimizerSpec) -> impl Iterator<Item = &'static str> {
    let gathered = spec.mean_of_gathered.then_some(GATHERED_STEPS);
    gathered.into_iter().chain(spec.loss_scale.then_some(LOSS_SCALE))
}

/// Returns the names of the shared inputs that a step needs.
pub(super) fn shared_inputs(spec: &OptimizerSpec) -> impl Iterator<Item = String> {
    SHARED_INPUTS[..2].iter().copied().chain(gradient_divisors(spec)).map(String::from)
}

/// Inputs of a step by name.
pub(super) struct StepInputs<'a> {
    pub(super) sheet: FormulaInputs<'a>,
    /// Inputs with a value for each element, and slots.
    elements: Vec<String>,
    settings: Vec<String>,
}

impl<'a> StepInputs<'a> {
    pub(super) fn get(&self, name: &str) -> Number<'a> {
        let at = |list: &[String]| list.iter().position(|known| known == name);
        match at(&self.elements) {
            Some(k) => self.sheet.element(k),
            None => {
                let k = at(&self.settings).expect("a step reads only its own inputs");
                self.sheet.setting(self.elements.len() + k)
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.settings.iter().any(|known| known == name)
    }

    /// Returns the gradient after the divisions and clippings that precede the global norm.
    fn locally_clipped_gradient(&self) -> Number<'a> {
        let mut gradient = self.get("gradient");
        let divisors = [GATHERED_STEPS, LOSS_SCALE].into_iter().filter(|name| self.has(name));
        if let Some(divisor) = divisors.map(|name| self.get(name)).reduce(|a, b| a * b) {
            gradient = gradient / divisor;
        }
        if self.has(MAX_VALUE) {
            let max_value = self.get(MAX_VALUE);
            gradient = gradient.max(-max_value).min(max_value);
        }
        if self.has(MAX_NORM_PER_TENSOR) {
            gradient = gradient * clip_factor(self.get(MAX_NORM_PER_TENSOR), gradient.norm());
        }
        gradient
    }
}

/// Returns the factor that clips a norm to a maximum.
fn clip_factor<'a>(max_norm: Number<'a>, norm: Number<'a>) -> Number<'a> {
    let ratio = max_norm / (norm + CLIP_EPSILON);
    ratio.min(ratio.like(1.0))
}

/// Builds the graph of a formula for one parameter. The first inputs have the element type, the others are scalar
/// settings.
pub(super) fn build_formula_graph(
    name: &str,
    (elements, settings): (Vec<String>, Vec<String>),
    outputs: &[String],
    (element, casts): (DType, bool),
    write: impl for<'a> FnOnce(&StepInputs<'a>) -> Vec<Number<'a>>,
) -> Result<Graph, OpError> {
    let first_sum_input =
        settings.iter().position(|name| name.starts_with(SUM_INPUT)).map(|k| elements.len() + k);
    let formula = Formula::build(Type::of(element), first_sum_input, |sheet| {
        write(&StepInputs { sheet, elements: elements.clone(), settings: settings.clone() })
    });
    let mut graph = Graph::new(name);
    let inputs: Vec<String> = elements.into_iter().chain(settings).collect();
    let ids: Vec<ValueId> = inputs.iter().map(|name| graph.add_value(name, ValueType::Unknown)).collect();
    graph.inputs.clone_from(&ids);
    // Parameter and gradient may have a narrower type than the arithmetic.
    let is_cast = |k: usize| casts && matches!(inputs[k].as_str(), "parameter" | "gradient");
    let mut loaded: BTreeMap<usize, ValueId> = BTreeMap::new();
    let load = |graph: &mut Graph, k: usize| {
        *loaded.entry(k).or_insert_with(|| {
            let cast = |graph: &mut Graph, id: ValueId, to: DType| {
                graph.emit("Cast", &[Some(id)], Attrs::new().with("to", i64::from(to.to_onnx())))
            };
            if is_cast(k) {
                cast(graph, ids[k], element)
            } else if SHARED_INPUTS.contains(&inputs[k].as_str()) {
                let scalar = graph.emit("Squeeze", &[Some(ids[k])], Attrs::new());
                cast(graph, scalar, DType::F64)
            } else {
                ids[k]
            }
        })
    };
    let values = emit_all_as_onnx(&formula.expr, &formula.sums, element, &mut graph, load)?;
    for (reg, name) in formula.expr.outputs().iter().zip(outputs) {
        let value = values[usize::from(reg.0)];
        let (op, inputs) = match casts && name == "new_parameter" {
            true => ("CastLike", vec![Some(value), Some(ids[0])]),
            false => ("Identity", vec![Some(value)]),
        };
        let output = graph.add_value(if name.is_empty() { "number" } else { name }, ValueType::Unknown);
        graph.nodes.push(Node::new("", op, &inputs, &[Some(output)], Attrs::new()));
        graph.outputs.push(output);
    }
    Ok(graph)
}

/// Returns the inputs of a formula: clipped gradient, learning rate, step count, settings and slots.
pub(super) fn build_update<'a>(
    flags: &'static [Flag],
    spec: &OptimizerSpec,
    inputs: &StepInputs<'a>,
) -> Update<'a> {
    let mut gradient = inputs.locally_clipped_gradient();
    if inputs.has("clip_factor") {
        gradient = gradient * inputs.get("clip_factor");
    }
    if inputs.has(MAX_NORM_CLIP) {
        let (max_norm, norm) = (inputs.get(MAX_NORM_CLIP), inputs.get(GRADIENT_NORM));
        let factor = (norm - max_norm).greater_than(0.0).select(max_norm / norm, norm.like(1.0));
        gradient = gradient * factor;
    }
    Update {
        parameter: inputs.get("parameter"),
        gradient,
        rate: inputs.get("lr") + inputs.get("lr_factor") * inputs.get("learning_rate"),
        step: inputs.get("step") - inputs.get("skipped_steps"),
        settings: spec.settings.keys().map(|name| (name.clone(), inputs.get(name))).collect(),
        flags: flags.iter().map(|flag| (flag.name, spec.flags[flag.name])).collect(),
        slots: spec.slots.iter().map(|slot| (slot.name.clone(), inputs.get(&slot.name))).collect(),
        new_slots: BTreeMap::new(),
    }
}

/// Computes the new parameter and the new slots by the formula of a row.
pub(super) fn update_elements<'a>(
    (flags, formula): (&'static [Flag], fn(&mut Update<'a>) -> Number<'a>),
    spec: &OptimizerSpec,
    slots: &[String],
    inputs: &StepInputs<'a>,
) -> Vec<Number<'a>> {
    let mut update = build_update(flags, spec, inputs);
    let new = formula(&mut update);
    if let Some(&average) = update.slots.get(EMA) {
        update.store_slot(EMA, average.blend(inputs.get(EMA_DECAY), new));
    }
    // A frozen parameter does not change.
    let mut active = update.step.greater_than(0.0);
    if spec.loss_scale {
        active = active.and(inputs.get(GRADIENT_NORM).less_than(f64::INFINITY));
    }
    let mut results = vec![active.select(new, update.parameter)];
    for name in slots {
        let old = update.slots[name];
        results.push(update.new_slots.get(name).map_or(old, |&new| active.select(new, old)));
    }
    results
}

/// Builds the graph of the step of a row.
fn build_step(row: &'static Optimizer, spec: &OptimizerSpec, types: (DType, bool)) -> Result<Graph, OpError> {
    let (slots, elements, settings, outputs) = step_ports(spec);
    let (numbers, step) = match row.update {
        Rule::Elements(formula) => {
            return build_formula_graph(row.name, (elements, settings), &outputs, types, |inputs| {
                update_elements((row.flags, formula), spec, &slots, inputs)
            });
        }
        Rule::Tensors { numbers, step } => (numbers, step),
    };
    // A formula computes the scalars; operators over tensors follow.
    build_tensor_step(
        row.name,
        (elements, settings),
        types,
        (&slots, &outputs),
        |inputs| {
            let update = build_update(row.flags, spec, inputs);
            let mut named =
                vec![("parameter", update.parameter), ("gradient", update.gradient), ("step", update.step)];
            for name in [EMA_DECAY, GRADIENT_NORM].into_iter().filter(|name| inputs.has(name)) {
                named.push((name, inputs.get(name)));
            }
            named.extend(numbers(&update));
            named.into_iter().map(|(name, number)| (name.to_owned(), number)).collect()
        },
        |tensors| {
            tensors.cast_numbers();
            Ok(step(tensors))
        },
    )
}

/// Builds the graph of the step of a function. The function call is between the operators that all steps have.
fn build_function_step(
    function: &OptimizerFunction,
    spec: &OptimizerSpec,
    types: (DType, bool),
) -> Result<Graph, OpError> {
    let (slots, elements, settings, outputs) = step_ports(spec);
    let names: Vec<String> = function.proto.input.clone();
    build_tensor_step(
        &spec.optimizer,
        (elements, settings),
        types,
        (&slots, &outputs),
        |inputs| {
            let update = build_update(&[], spec, inputs);
            let mut scalars = vec![
                ("parameter".to_owned(), update.parameter),
                ("gradient".to_owned(), update.gradient),
                ("step".to_owned(), update.step),
                ("rate".to_owned(), update.rate),
            ];
            scalars.extend(update.settings.iter().map(|(name, &value)| (name.clone(), value)));
            if inputs.has(GRADIENT_NORM) {
                scalars.push((GRADIENT_NORM.to_owned(), inputs.get(GRADIENT_NORM)));
            }
            scalars
        },
        |tensors| {
            if !function.has_element_type() {
                tensors.cast_numbers();
            }
            let arguments: Vec<ValueId> = names.iter().map(|name| tensors.get(name)).collect();
            let results = tensors.call(function, &arguments);
            // The options continue with numbers in the type of the arithmetic.
            if function.has_element_type() {
                tensors.cast_numbers();
            }
            let mut new_values = function
                .proto
                .output
                .iter()
                .zip(results)
                .filter_map(|(name, id)| Some((name.strip_prefix("new_")?.to_owned(), id)));
            let (_, new) =
                new_values.next().ok_or_else(|| OpError::invalid("the function has no outputs"))?;
            Ok((new, new_values.collect()))
        },
    )
}

/// Returns the names of slots, inputs with a value for each element, scalar inputs, and outputs of the step of one
/// parameter.
pub(super) fn step_ports(spec: &OptimizerSpec) -> (Vec<String>, Vec<String>, Vec<String>, Vec<String>) {
    let slots: Vec<String> = spec.slots.iter().map(|slot| slot.name.clone()).collect();
    let elements: Vec<String> =
        ["parameter", "gradient"].into_iter().map(String::from).chain(slots.iter().cloned()).collect();
    let mut settings: Vec<String> = shared_inputs(spec).collect();
    settings.extend(spec.max_norm.map(|_| "clip_factor".to_owned()));
    let reads_norm = spec.loss_scale || spec.settings.contains_key(MAX_NORM_CLIP);
    settings.extend(reads_norm.then(|| GRADIENT_NORM.to_owned()));
    settings.extend(spec.columns().into_iter().map(String::from));
    let outputs: Vec<String> = std::iter::once("new_parameter".to_owned())
        .chain(slots.iter().map(|name| format!("new_{name}")))
        .collect();
    (slots, elements, settings, outputs)
}

/// Builds the step of one parameter from operators over tensors. A formula computes the scalars first.
fn build_tensor_step(
    name: &str,
    (elements, settings): (Vec<String>, Vec<String>),
    types: (DType, bool),
    (slots, outputs): (&[String], &[String]),
    numbers: impl for<'a> FnOnce(&StepInputs<'a>) -> Vec<(String, Number<'a>)>,
    step: impl FnOnce(&mut TensorBuilder<'_>) -> Result<StepResult, OpError>,
) -> Result<Graph, OpError> {
    let mut names: Vec<String> = Vec::new();
    let loss_scale = settings.iter().any(|name| name == LOSS_SCALE);
    let unnamed: Vec<String> = vec![String::new(); MAX_SCALARS];
    let mut graph = build_formula_graph(name, (elements, settings), &unnamed, types, |inputs| {
        let scalars = numbers(inputs);
        names = scalars.iter().map(|(name, _)| name.clone()).collect();
        scalars.into_iter().map(|(_, number)| number).collect()
    })?;
    let graph_outputs = std::mem::take(&mut graph.outputs);
    let mut named: BTreeMap<String, ValueId> = names.into_iter().zip(graph_outputs).collect();
    for name in slots {
        let id = graph.find(name).ok_or_else(|| OpError::invalid(format!("there is no slot {name:?}")))?;
        named.insert(name.clone(), id);
    }
    let numbers: Vec<String> = (named.keys())
        .filter(|name| !matches!(name.as_str(), "parameter" | "gradient") && !slots.contains(name))
        .cloned()
        .collect();
    let stored = graph.inputs[0];
    let mut tensors = TensorBuilder::new(&mut graph, types.0, named, numbers);
    let (new, mut new_slots) = step(&mut tensors)?;
    if slots.iter().any(|name| name == EMA) {
        let one = tensors.constant(1.0);
        let share = tensors.op("Sub", &[one, tensors.get(EMA_DECAY)]);
        let average = tensors.lerp(tensors.get(EMA), new, share);
        new_slots.push((EMA.to_owned(), average));
    }
    let zero = tensors.constant(0.0);
    let mut active = tensors.op("Less", &[zero, tensors.get("step")]);
    if loss_scale {
        let infinity = tensors.constant(f64::INFINITY);
        let finite = tensors.op("Less", &[tensors.get(GRADIENT_NORM), infinity]);
        active = tensors.op("And", &[active, finite]);
    }
    let mut results = vec![tensors.op("Where", &[active, new, tensors.get("parameter")])];
    for name in slots {
        let old = tensors.get(name);
        let new = new_slots.iter().find(|(known, _)| known == name).map_or(old, |&(_, new)| new);
        results.push(tensors.op("Where", &[active, new, old]));
    }
    for (k, (id, name)) in results.into_iter().zip(outputs).enumerate() {
        let (op, inputs) = match k == 0 && types.1 {
            true => ("CastLike", vec![Some(id), Some(stored)]),
            false => ("Identity", vec![Some(id)]),
        };
        let output = graph.add_value(name, ValueType::Unknown);
        graph.nodes.push(Node::new("", op, &inputs, &[Some(output)], Attrs::new()));
        graph.outputs.push(output);
    }
    Ok(graph)
}

/// Upper bound of the number of scalars of a step.
const MAX_SCALARS: usize = 128;

/// Prefixes the names of all values of a graph and its subgraphs, except the last inputs, which are captured.
fn prefix_names(graph: &mut Graph, prefix: &str, captures: usize) {
    let captured = graph.inputs[graph.inputs.len() - captures..].to_vec();
    for id in graph.value_ids().filter(|id| !captured.contains(id)).collect::<Vec<ValueId>>() {
        let name = format!("{prefix}.{}", graph.name_of(id));
        graph.rename(id, &name);
    }
    let mut nodes = std::mem::take(&mut graph.nodes);
    for (at, node) in nodes.iter_mut().enumerate() {
        let outer: Vec<String> = node.inputs[node.inputs.len() - node.captures..]
            .iter()
            .map(|port| port.map_or_else(String::new, |id| graph.name_of(id).to_owned()))
            .collect();
        for attr in node.attrs.0.values_mut() {
            if let Attr::Graph(inner) = attr {
                let captured = inner.inputs[inner.inputs.len() - outer.len()..].to_vec();
                captured.iter().zip(&outer).for_each(|(&id, name)| inner.rename(id, name));
                let prefix = format!("{prefix}.{at}.{}", inner.name);
                prefix_names(inner, &prefix, outer.len());
            }
        }
    }
    graph.nodes = nodes;
}

/// Model under construction.
pub(super) struct ModelBuilder {
    pub(super) graph: Graph,
}

impl ModelBuilder {
    pub(super) fn input(&mut self, name: &str, ty: ValueType) -> ValueId {
        let id = self.graph.add_value(name, ty);
        self.graph.inputs.push(id);
        id
    }

    fn constant(&mut self, value: f64) -> ValueId {
        self.graph.add_constant("constant", Tensor::from_f64(DType::F64, vec![1], &[value]))
    }

    pub(super) fn emit(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.graph.emit(op, &inputs, attrs)
    }

    /// Adds a `SequenceMap` that applies a graph to every parameter. `inputs` has a value for each input name of the
    /// graph. Returns the outputs, with these names and types.
    pub(super) fn add_map(
        &mut self,
        mut body: Graph,
        inputs: &BTreeMap<String, ValueId>,
        outputs: &[(String, DType)],
    ) -> Vec<ValueId> {
        // The first input is a sequence: the parameters or the gradients.
        let arguments: Vec<ValueId> = body.inputs.iter().map(|&id| inputs[body.name_of(id)]).collect();
        for (formal, &id) in body.inputs.clone().into_iter().zip(&arguments) {
            let dtype = self.graph.value(id).ty.dtype();
            body.value_mut(formal).ty = ValueType::Tensor(dtype.unwrap_or(DType::F64), None);
        }
        for (id, (_, dtype)) in body.outputs.clone().into_iter().zip(outputs) {
            body.value_mut(id).ty = ValueType::Tensor(*dtype, None);
        }
        // Value names must be unique across the model and all bodies.
        let prefix = body.name.clone();
        prefix_names(&mut body, &prefix, 0);
        let sequence =
            |(name, dtype): &(String, DType)| self.graph.add_value(name, ValueType::Sequence(*dtype));
        let results: Vec<ValueId> = outputs.iter().map(sequence).collect();
        let ports = |ids: &[ValueId]| ids.iter().copied().map(Some).collect::<Vec<_>>();
        let attrs = Attrs::new().with("body", body);
        self.graph.nodes.push(Node::new("", "SequenceMap", &ports(&arguments), &ports(&results), attrs));
        results
    }

    /// Adds the updates of parameters and slots by a step, as outputs.
    pub(super) fn add_updates(
        &mut self,
        step: Graph,
        spec: &OptimizerSpec,
        inputs: &BTreeMap<String, ValueId>,
        (element, _): (DType, bool),
    ) {
        let stored = self.graph.value(inputs["parameter"]).ty.dtype().unwrap_or(element);
        let mut results = vec![("updated_params".to_owned(), stored)];
        results.extend(spec.slots.iter().map(|slot| (format!("updated_{}", slot.name), element)));
        self.graph.outputs = self.add_map(step, inputs, &results);
    }

    /// Returns the model, with the description of the optimizer.
    pub(super) fn to_model(&self, spec: &OptimizerSpec) -> ModelProto {
        ModelProto {
            ir_version: IR_VERSION,
            producer_name: "ortrain".into(),
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: OPSET }],
            graph: Some(self.graph.to_proto()),
            metadata_props: vec![description_entry(spec)],
            ..ModelProto::default()
        }
    }
}

/// Adds the global norm of the gradients before clipping by this norm, as a tensor of one element.
///
/// Squares are summed twice: as they are, and after a division of the gradients by a large number. So the norm is
/// finite even if the squares overflow their type.
fn add_gradient_norm(
    w: &mut ModelBuilder,
    spec: &OptimizerSpec,
    inputs: &BTreeMap<String, ValueId>,
    types: (DType, bool),
) -> Result<ValueId, OpError> {
    let clips = [MAX_VALUE, MAX_NORM_PER_TENSOR].into_iter().filter(|name| inputs.contains_key(*name));
    let settings: Vec<String> = gradient_divisors(spec).chain(clips).map(String::from).collect();
    let large = 2f64.powi(OVERFLOW_SCALE_EXPONENT);
    let outputs = ["square", "small_square"].map(String::from);
    let square = build_formula_graph(
        "squared_norm",
        (vec!["gradient".to_owned()], settings),
        &outputs,
        types,
        |inputs| {
            let gradient = inputs.locally_clipped_gradient();
            let small = gradient * (1.0 / large);
            vec![(gradient * gradient).sum(), (small * small).sum()]
        },
    )?;
    let sums = [("squares".to_owned(), types.0), ("small_squares".to_owned(), types.0)];
    let [norm, large_norm] = w.add_map(square, inputs, &sums)[..]
        .try_into()
        .map(|sums: [ValueId; 2]| {
            sums.map(|squares| {
                let concat = Attrs::new().with("axis", 0i64).with("new_axis", 1i64);
                let squares = w.emit("ConcatFromSequence", &[squares], concat);
                let squares =
                    w.emit("Cast", &[squares], Attrs::new().with("to", i64::from(DType::F64.to_onnx())));
                let sum = w.emit("ReduceSum", &[squares], Attrs::new().with("keepdims", 1i64));
                w.emit("Sqrt", &[sum], Attrs::new())
            })
        })
        .expect("there are two sums");
    let factor = w.constant(large);
    let large_norm = w.emit("Mul", &[large_norm, factor], Attrs::new());
    let infinity = w.constant(f64::INFINITY);
    let fits = w.emit("Less", &[norm, infinity], Attrs::new());
    let length = w.emit("Where", &[fits, norm, large_norm], Attrs::new());
    w.graph.rename(length, GRADIENT_NORM);
    w.graph.value_mut(length).ty = ValueType::tensor(DType::F64, &[1]);
    Ok(length)
}

/// Builds the optimizer model of a row of the table, for trained parameters of these element types.
///
/// # Errors
/// Returns an error if the description does not fit its row ([`OptimizerSpec::check`]).
pub fn optimizer_model(spec: &OptimizerSpec, dtypes: &[DType]) -> Result<ModelProto, OpError> {
    let spec = spec.clone().complete()?;
    let row = Optimizer::find(&spec.optimizer)
        .expect("the settings were completed with the optimizer of this name");
    optimizer_model_of_row(row, &spec, dtypes)
}

/// Builds the optimizer model of a row, of the table or user-defined.
///
/// # Errors
/// The same as [`optimizer_model`].
pub fn optimizer_model_of_row(
    row: &'static Optimizer,
    spec: &OptimizerSpec,
    dtypes: &[DType],
) -> Result<ModelProto, OpError> {
    let spec = spec.clone().complete_for(row)?.with_group_settings();
    build_model(&spec, dtypes, |types| build_step(row, &spec, types))
}

/// Builds the optimizer model of a function of ONNX: see [`OptimizerFunction`].
///
/// # Errors
/// Returns an error if the description does not fit the function, or the function is invalid.
pub fn optimizer_model_of_function(
    function: &OptimizerFunction,
    spec: &OptimizerSpec,
    dtypes: &[DType],
) -> Result<ModelProto, OpError> {
    let spec = function.complete(spec)?.with_group_settings();
    let mut model = build_model(&spec, dtypes, |types| build_function_step(function, &spec, types))?;
    model.functions.push(function.proto.clone());
    let imports = &function.proto.opset_import;
    let version = imports.iter().filter(|import| import.domain.is_empty()).map(|import| import.version).max();
    for import in &mut model.opset_import {
        import.version = import.version.max(version.unwrap_or(OPSET));
    }
    model.opset_import.push(OperatorSetIdProto { domain: function.proto.domain.clone(), version: 1 });
    inline_functions(&mut model, &OperatorLibrary::default())
        .map_err(|source| OpError::Subgraph(Box::new(source)))?;
    model.opset_import.retain(|import| import.domain.is_empty());
    model.functions.clear();
    Ok(model)
}

/// Builds the model around the step of one parameter. `step` builds the step for an element type.
fn build_model(
    spec: &OptimizerSpec,
    dtypes: &[DType],
    step: impl FnOnce((DType, bool)) -> Result<Graph, OpError>,
) -> Result<ModelProto, OpError> {
    let (mut w, mut inputs, types, max_norm) = start_model(spec, dtypes);
    let norm = spec.needs_norm().then(|| add_gradient_norm(&mut w, spec, &inputs, types)).transpose()?;
    if let Some(norm) = norm {
        let scalar = w.emit("Squeeze", &[norm], Attrs::new());
        inputs.insert(GRADIENT_NORM.into(), scalar);
    }
    if let (Some(norm), Some(max_norm)) = (norm, max_norm) {
        let (epsilon, max_factor) = (w.constant(CLIP_EPSILON), w.constant(1.0));
        let safe = w.emit("Add", &[norm, epsilon], Attrs::new());
        let ratio = w.emit("Div", &[max_norm, safe], Attrs::new());
        let factor = w.emit("Min", &[ratio, max_factor], Attrs::new());
        inputs.insert("clip_factor".into(), w.emit("Squeeze", &[factor], Attrs::new()));
    }
    let stepped = step(types)?;
    w.add_updates(stepped, spec, &inputs, types);
    w.graph.outputs.extend(norm);
    Ok(w.to_model(spec))
}

/// Returns a model with the inputs of an optimizer, and these inputs by their names in a step. Also returns the element
/// type, with true if parameters are cast to this type, and the input with the maximum norm.
pub(super) fn start_model(
    spec: &OptimizerSpec,
    dtypes: &[DType],
) -> (ModelBuilder, BTreeMap<String, ValueId>, (DType, bool), Option<ValueId>) {
    let element = if dtypes.contains(&DType::F64) { DType::F64 } else { DType::F32 };
    let stored = match dtypes {
        [first, others @ ..] if others.iter().all(|dtype| dtype == first) => *first,
        _ => element,
    };
    // A sequence type has one element type. With parameters of several types each parameter is cast.
    let types = (element, dtypes.iter().any(|&dtype| dtype != element));
    let mut w = ModelBuilder { graph: Graph::new("graph") };
    let scalar_type = |dtype| ValueType::tensor(dtype, &[1]);
    let mut inputs: BTreeMap<String, ValueId> = BTreeMap::new();
    for name in shared_inputs(spec) {
        let dtype =
            if matches!(name.as_str(), "learning_rate" | LOSS_SCALE) { DType::F32 } else { DType::I64 };
        let id = w.input(&name, scalar_type(dtype));
        inputs.insert(name, id);
    }
    let max_norm = spec.max_norm.map(|_| w.input("max_norm", scalar_type(DType::F64)));
    for (name, formal) in [("params", "parameter"), ("gradients", "gradient")] {
        inputs.insert(formal.into(), w.input(name, ValueType::Sequence(stored)));
    }
    for slot in &spec.slots {
        inputs.insert(slot.name.clone(), w.input(&slot.name, ValueType::Sequence(element)));
    }
    for name in spec.columns() {
        inputs.insert(name.into(), w.input(name, ValueType::Sequence(DType::F64)));
    }
    (w, inputs, types, max_norm)
}
