//! User-defined optimizers, as functions of ONNX.

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, Node, ValueId, ValueType};
use ortrain_onnx::FunctionProto;

use super::spec::{EMA, OPTIONS, OptimizerSpec, SlotSpec};
use super::tensors::TensorBuilder;
use crate::OpError;
use crate::families::optimizers::row::{OPSET, Optimizer};

/// Attribute with the element type of a function. A function with this attribute gets its numbers in float64.
pub(super) const ELEMENT_TYPE: &str = "element_type";
/// Inputs that every step has.
const STEP_INPUTS: [&str; 4] = ["parameter", "gradient", "rate", "step"];

/// Reserved value names of optimizer models. Slots and settings must not have these names.
const RESERVED_NAMES: [&str; 13] = [
    "params",
    "gradients",
    "learning_rate",
    "gathered_steps",
    "max_norm",
    "settings",
    "clip_factor",
    "lr",
    "lr_factor",
    "skipped_steps",
    "new_parameter",
    "updated_params",
    EMA,
];

/// Maximum number of settings of a function. Each setting is an input of the step of every parameter.
const MAX_SETTINGS: usize = 100;

/// Returns the first name that occurs twice.
fn first_duplicate(names: &[String]) -> Option<&String> {
    names.iter().enumerate().find(|(k, name)| names[..*k].contains(name)).map(|(_, name)| name)
}

/// Optimizer as a function of ONNX: the step of one parameter.
///
/// The inputs are any of `parameter`, `gradient`, `rate` (the learning rate of the parameter), `step` (from 1 on),
/// slots and settings. The outputs are `new_parameter`, and `new_` with the name of each slot.
///
/// A function with the attribute `element_type` gets rate, step and settings as float64 scalars, and the element type
/// by the attribute. A function without this attribute gets them in the element type.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerFunction {
    pub(super) proto: FunctionProto,
    settings: BTreeMap<String, f64>,
    slots: Vec<SlotSpec>,
    learning_rate: f64,
}

impl OptimizerFunction {
    /// Creates an optimizer from a function.
    ///
    /// `settings` has the defaults of the settings, `learning_rate` the default rate. `starts` has the initial values
    /// of slots that do not start at zero: `"one"`, `"parameter"`, or the name of a setting.
    ///
    /// # Errors
    /// Returns an error if an input of the function has no source, or the function does not return the new parameter.
    /// The name of an optimizer of the table is an error, too.
    pub fn new(
        proto: FunctionProto,
        settings: BTreeMap<String, f64>,
        learning_rate: f64,
        starts: &BTreeMap<String, String>,
    ) -> Result<OptimizerFunction, OpError> {
        let name = proto.name.clone();
        let wrong = |text: String| OpError::invalid(format!("the optimizer function {name:?}: {text}"));
        if proto.name.is_empty() {
            return Err(wrong("it has no name".into()));
        }
        if Optimizer::find(&proto.name).is_some() {
            return Err(wrong("a built-in optimizer has this name; choose another name".into()));
        }
        if let Some(name) = first_duplicate(&proto.input).or_else(|| first_duplicate(&proto.output)) {
            return Err(wrong(format!("{name:?} occurs twice in its inputs or in its outputs")));
        }
        if settings.len() > MAX_SETTINGS {
            return Err(wrong(format!(
                "it has {} settings, at most {MAX_SETTINGS} are supported",
                settings.len()
            )));
        }
        if proto.domain.is_empty() || proto.domain == "ai.onnx" {
            return Err(wrong("it is in the domain of ONNX; choose another domain".into()));
        }
        if proto.output.first().map(String::as_str) != Some("new_parameter") {
            return Err(wrong("its first output must be \"new_parameter\"".into()));
        }
        let mut slots = Vec::new();
        for output in &proto.output[1..] {
            let slot =
                output.strip_prefix("new_").filter(|slot| proto.input.iter().any(|input| input == slot));
            let slot = slot.ok_or_else(|| {
                wrong(format!("its output {output:?} must be \"new_\" followed by the name of an input"))
            })?;
            if STEP_INPUTS.contains(&slot) || settings.contains_key(slot) {
                return Err(wrong(format!(
                    "{slot:?} cannot be a slot: it is an input of every step or a setting"
                )));
            }
            let start = starts.get(slot).cloned().unwrap_or_else(|| "zero".into());
            if !["zero", "one", "parameter"].contains(&start.as_str()) && !settings.contains_key(&start) {
                return Err(wrong(format!(
                    "slot {slot:?} must start at \"zero\", \"one\", \"parameter\" or the name of a setting, got \
                     {start:?}"
                )));
            }
            slots.push(SlotSpec { start, ..SlotSpec::new(slot) });
        }
        for input in &proto.input {
            let known = STEP_INPUTS.contains(&input.as_str())
                || settings.contains_key(input)
                || slots.iter().any(|slot| slot.name == *input);
            if !known {
                return Err(wrong(format!(
                    "its input {input:?} is unknown: it is not one of {}, not a setting with a default, and not a \
                     slot (the function has no output \"new_{input}\")",
                    STEP_INPUTS.join(", ")
                )));
            }
        }
        let is_reserved = |name: &str| {
            RESERVED_NAMES.contains(&name)
                || OPTIONS.iter().any(|(option, _)| *option == name)
                || name.starts_with("updated_")
        };
        let named = slots.iter().map(|slot| slot.name.as_str()).chain(settings.keys().map(String::as_str));
        if let Some(reserved) = named.clone().find(|name| is_reserved(name)) {
            return Err(wrong(format!(
                "a slot or a setting cannot have the name {reserved:?}: optimizer models use it for another value"
            )));
        }
        if let Some(step_input) = STEP_INPUTS.iter().find(|name| settings.contains_key(**name)) {
            return Err(wrong(format!(
                "a setting cannot have the name {step_input:?}: it is an input of every step"
            )));
        }
        if let Some(unknown) = starts.keys().find(|start| !slots.iter().any(|slot| slot.name == **start)) {
            return Err(wrong(format!("{unknown:?} has a start value, but is not a slot of the function")));
        }
        if let Some((setting, value)) = settings.iter().find(|(_, value)| !value.is_finite()) {
            return Err(wrong(format!("{setting} must be a finite number, got {value}")));
        }
        let imports = proto.opset_import.iter().filter(|import| import.domain.is_empty());
        if let Some(import) = imports.into_iter().find(|import| import.version < OPSET) {
            return Err(wrong(format!(
                "it uses opset {}, but optimizer models need opset {OPSET} or newer",
                import.version
            )));
        }
        Ok(OptimizerFunction { proto, settings, slots, learning_rate })
    }

    /// Returns the description of the optimizer with its defaults.
    #[must_use]
    pub fn spec(&self) -> OptimizerSpec {
        OptimizerSpec {
            learning_rate: self.learning_rate,
            settings: self.settings.clone(),
            ..OptimizerSpec::of_model(&self.proto.name, self.slots.clone())
        }
    }

    /// Checks a description, and sets the defaults of missing settings and the slots.
    ///
    /// # Errors
    /// The same as [`OptimizerSpec::complete`].
    pub fn complete(&self, spec: &OptimizerSpec) -> Result<OptimizerSpec, OpError> {
        let mut spec = spec.clone();
        if spec.optimizer != self.proto.name {
            return Err(OpError::invalid(format!(
                "the description is of {:?}, but the function is {:?}",
                spec.optimizer, self.proto.name
            )));
        }
        let known = |name: &String| {
            self.settings.contains_key(name) || OPTIONS.iter().any(|(option, _)| *option == name.as_str())
        };
        if let Some(unknown) = spec.settings.keys().find(|name| !known(name)) {
            let names: Vec<&str> = self.settings.keys().map(String::as_str).collect();
            return Err(OpError::invalid(format!(
                "{} has no setting {unknown:?}; its settings are {}",
                self.proto.name,
                names.join(", ")
            )));
        }
        for (name, &value) in &self.settings {
            spec.settings.entry(name.clone()).or_insert(value);
        }
        spec.check()?;
        Ok(spec.with_slots(self.slots.clone()))
    }

    pub(super) fn has_element_type(&self) -> bool {
        self.proto.attribute.iter().any(|name| name == ELEMENT_TYPE)
    }
}

impl TensorBuilder<'_> {
    /// Adds a call of a function and returns the results.
    pub(super) fn call(&mut self, function: &OptimizerFunction, inputs: &[ValueId]) -> Vec<ValueId> {
        let proto = &function.proto;
        let attrs = match function.has_element_type() {
            true => Attrs::new().with(ELEMENT_TYPE, i64::from(self.element.to_onnx())),
            false => Attrs::new(),
        };
        let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let (node, ids) = Node::labelled(
            &proto.name,
            &proto.domain,
            &proto.name,
            &ports,
            proto.output.len(),
            attrs,
            |name| self.graph.add_value(name, ValueType::Unknown),
        );
        self.graph.nodes.push(node);
        ids
    }
}
