//! Every stage between a file and its instructions, as text.

use ortrain_graph::{DType, Dim, Graph, Tensor, ValueId, ValueType};
use ortrain_ops::passes::{differentiate::differentiate, infer::infer};
use ortrain_ops::{Role, Specialiser};

use crate::binding::{RESET_FLAG, parameter_of_gradient};
use crate::module::graph_of;
use crate::{Error, ModelSource, Result};

/// What to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The graph: newest versions of the operators, all types inferred.
    Graph,
    /// The graph with the gradients of its first output with respect to every initializer of floats. A training model has
    /// its gradients already.
    Gradient,
    /// The schedule: its programs with their instructions, buffers, offsets and peak bytes.
    Program,
}

/// Prints a stage of a model. `shapes` gives the shapes of inputs, by name, for [`Stage::Program`]; symbolic sizes that
/// it does not determine are 1. Values of inputs that reach a shape are zeros there.
///
/// # Errors
/// When the model does not get as far as the stage.
pub fn dump(model: ModelSource, stage: Stage, shapes: &[(String, Vec<usize>)]) -> Result<String> {
    let label = model.label("the model");
    let mut graph = graph_of(&label, &model.load()?)?;
    infer(&mut graph).map_err(|source| Error::model(&label, source))?;
    let training = graph.inputs.iter().any(|&id| graph.name_of(id) == RESET_FLAG);
    match stage {
        Stage::Graph => Ok(graph.to_string()),
        Stage::Gradient if training => Ok(graph.to_string()),
        Stage::Gradient => {
            gradient(&label, &mut graph)?;
            Ok(graph.to_string())
        }
        Stage::Program => program(&label, graph, shapes, training),
    }
}

/// Adds the gradients of the first output with respect to the initializers it depends on.
fn gradient(label: &str, graph: &mut Graph) -> Result<()> {
    let Some(&loss) = graph.outputs.first() else {
        return Err(Error::WrongModel { model: label.to_owned(), reason: "it has no outputs".into() });
    };
    let mut reached = vec![false; graph.value_count()];
    reached[loss.0 as usize] = true;
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|id| reached[id.0 as usize]) {
            node.present_inputs().for_each(|id| reached[id.0 as usize] = true);
        }
    }
    let is_weight = |&id: &ValueId| {
        let value = graph.value(id);
        reached[id.0 as usize] && value.constant.is_some() && value.ty.dtype().is_some_and(DType::is_float)
    };
    // What a node made is no initializer, even where its content is known.
    let producers = graph.producers();
    let mut targets: Vec<ValueId> =
        graph.value_ids().filter(is_weight).filter(|id| producers[id.0 as usize].is_none()).collect();
    let gradients = loop {
        let mut attempt = graph.clone();
        match differentiate(&mut attempt, loss, &targets) {
            Ok(gradients) => {
                *graph = attempt;
                break gradients;
            }
            // What gets no gradient (a ratio, a bound) is no weight.
            Err(ortrain_ops::Error::NoPath { value, .. }) => targets.retain(|&id| graph.name_of(id) != value),
            Err(source) => return Err(Error::model(label, source)),
        }
    };
    graph.outputs.extend(gradients);
    Ok(())
}

fn program(label: &str, graph: Graph, shapes: &[(String, Vec<usize>)], training: bool) -> Result<String> {
    for (name, _) in shapes {
        if !graph.inputs.iter().any(|&id| graph.name_of(id) == name) {
            return Err(Error::Argument(format!("{label} has no input {name:?}")));
        }
    }
    // Sizes of symbols, from the shapes given.
    let mut symbols: Vec<(&Dim, usize)> = Vec::new();
    for &id in &graph.inputs {
        let given = shapes.iter().find(|(name, _)| name == graph.name_of(id));
        let (Some((_, given)), Some(declared)) = (given, graph.value(id).ty.shape()) else { continue };
        if given.len() != declared.rank() {
            return Err(Error::Argument(format!(
                "input {:?} is {}, so the shape {given:?} does not fit",
                graph.name_of(id),
                graph.value(id).ty
            )));
        }
        symbols.extend(declared.iter().zip(given.iter().copied()));
    }
    let mut inputs = Vec::new();
    let mut roles = Vec::new();
    for &id in &graph.inputs {
        let name = graph.name_of(id);
        if training && name == RESET_FLAG {
            roles.push(Role::ResetFlag);
            continue;
        }
        roles.push(Role::User);
        let ValueType::Tensor(dtype, declared) = &graph.value(id).ty else {
            return Err(Error::Argument(format!(
                "input {name:?} is {}; only models of tensors can be specialised by themselves",
                graph.value(id).ty
            )));
        };
        let given = shapes.iter().find(|(known, _)| known == name).map(|(_, dims)| dims.clone());
        let size = |dim: &Dim| {
            let known = symbols.iter().find(|(symbol, _)| *symbol == dim).map(|&(_, size)| size);
            dim.known().or(known).unwrap_or(1)
        };
        let dims =
            given.or_else(|| declared.as_ref().map(|dims| dims.iter().map(size).collect())).ok_or_else(
                || Error::Argument(format!("not even the rank of input {name:?} is known; give its shape")),
            )?;
        let zeros = Tensor::zeros(*dtype, dims)
            .map_err(|error| Error::Argument(format!("input {name:?}: {error}")))?;
        inputs.push(zeros);
        debug_assert!(!training || parameter_of_gradient(name).is_none() || !name.is_empty());
    }
    let specialiser = Specialiser::new(graph, roles);
    let schedule = specialiser.schedule(&inputs).map_err(|source| Error::model(label, source))?;
    Ok(schedule.to_string())
}
