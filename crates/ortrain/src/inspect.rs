//! What of a model would be trained, what would not, and why, before anything is written.

use std::fmt;

use ortrain_graph::{DType, Graph, Node, ValueId, ValueType};
use ortrain_onnx::LoadedModel;
use ortrain_ops::Registry;
use ortrain_ops::passes::{
    differentiate::backpropagate,
    functions::{keeps_nodes, write_out_nodes},
};
use rustc_hash::FxHashMap;

use crate::artifacts::inferred;
use crate::tail;
use crate::{Error, ModelSource, Result};

/// What becomes of a constant of a model in training.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let statistics: Vec<&str> = found.names(ParameterRole::Statistic).take(2).collect();
/// assert_eq!(statistics, ["block1.mean", "block1.var"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// It is trained.
    Trained,
    /// It is a running statistic: in the checkpoint, but not trained.
    Statistic,
    /// It stays in the models as it is.
    Constant,
}

/// A constant of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterInfo, ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let ParameterInfo { name, dims, role, reason, .. } = &found.parameters[0];
/// assert_eq!((name.as_str(), dims.as_slice()), ("fc1.weight", &[96, 64][..]));
/// assert_eq!(*role, ParameterRole::Trained);
/// assert_eq!(reason, r#"it is a weight of node "fc1" (Gemm)"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub dims: Vec<usize>,
    /// What becomes of it if nobody says otherwise.
    pub role: ParameterRole,
    /// Why, as a part of a sentence.
    pub reason: String,
}

/// What is known of a model before it is trained.
///
/// The text of an inspection is a report:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// assert_eq!(found.obstacle, None);
/// assert!(found.to_string().starts_with("trained: 4 tensors, 7210 elements\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The initializers of the model, in its order, then the values of its Constant nodes.
    pub parameters: Vec<ParameterInfo>,
    /// Why the model cannot be trained as it is, if it cannot: the error that making artifacts would give.
    pub obstacle: Option<String>,
}

impl Inspection {
    /// The names of a role, in the model's order.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{ParameterRole, Scope, inspect};
    ///
    /// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
    /// let biases: Vec<&str> =
    ///     found.names(ParameterRole::Trained).filter(|name| name.ends_with(".bias")).collect();
    /// assert_eq!(biases, ["fc1.bias", "fc2.bias"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn names(&self, role: ParameterRole) -> impl Iterator<Item = &str> {
        self.parameters.iter().filter(move |info| info.role == role).map(|info| info.name.as_str())
    }
}

/// Which values the loss is made of.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// // A loss of the hidden layer does not reach the second one.
/// let found = inspect(setup::MODEL.into(), &Scope::Values(vec!["hidden".into()]))?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All outputs of the model.
    #[default]
    Outputs,
    /// The first output.
    FirstOutput,
    /// These values.
    Values(Vec<String>),
}

/// Says which constants of a model would be trained: floats that reach the loss through operators with a gradient.
/// Running statistics are none of them, nor are single numbers in arithmetic (an epsilon, an exponent, a scale).
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the model cannot be read, or a value of the scope is not there.
pub fn inspect(model: ModelSource, scope: &Scope) -> Result<Inspection> {
    let label = model.label("the model");
    inspect_loaded(&label, &model.load_for_gradients()?, scope)
}

/// [`inspect`] for a model that was read already, for gradients.
pub(crate) fn inspect_loaded(label: &str, model: &LoadedModel, scope: &Scope) -> Result<Inspection> {
    let outputs = tail::outputs(model);
    let values = match scope {
        Scope::Outputs => outputs,
        Scope::FirstOutput => outputs.into_iter().take(1).collect(),
        Scope::Values(names) => names.iter().map(String::as_str).collect(),
    };
    let shorter = tail::without(model, &values);
    let model = shorter.as_ref().unwrap_or(model);
    // What a constant is for, its nodes say; the gradients may be the user's.
    let kept = model.proto.graph.as_ref().is_some_and(keeps_nodes);
    let written_out = kept.then(|| {
        let mut model = model.clone();
        model.proto.graph.as_mut().map(write_out_nodes);
        model
    });
    let plain = written_out.as_ref().unwrap_or(model);
    let raw = Graph::from_model(plain).map_err(|source| tail::advised(Error::graph(label, source), plain))?;
    let graph = inferred(label, plain).map_err(|error| tail::advised(error, plain))?;

    let uses = uses(&graph);
    let mut parameters = Vec::new();
    let mut wanted: Vec<usize> = Vec::new();
    for name in constants(&raw) {
        let Some(id) = graph.find(&name) else { continue };
        // Of what is no tensor of known size (a string, a sparse one) nothing can be trained.
        let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty else { continue };
        let Some(dims) = shape.concrete() else { continue };
        let dtype = *dtype;
        let (role, reason) = role(&graph, uses.get(&id).map_or(&[][..], Vec::as_slice), dtype, &dims);
        if role == ParameterRole::Trained {
            wanted.push(parameters.len());
        }
        parameters.push(ParameterInfo { name, dtype, dims, role, reason });
    }

    let constant = |info: &mut ParameterInfo, reason: &str| {
        info.role = ParameterRole::Constant;
        info.reason = reason.into();
    };
    let mut graph = if kept { inferred(label, model)? } else { graph };
    let seeds = seeds(&mut graph, scope)?;
    // What is made inside of a call with a gradient of the user's is no value of its own.
    let mut targets: Vec<ValueId> = Vec::new();
    wanted.retain(|&at| match graph.find(&parameters[at].name) {
        Some(id) => {
            targets.push(id);
            true
        }
        None => {
            constant(&mut parameters[at], "it is part of an operator with a gradient of its own");
            false
        }
    });
    let mut obstacle = None;
    match backpropagate(&mut graph, &seeds, &targets) {
        Ok(gradients) => {
            for (&at, gradient) in wanted.iter().zip(gradients) {
                if gradient.is_none() {
                    constant(&mut parameters[at], "no gradient of the loss reaches it");
                }
            }
        }
        Err(error) => obstacle = Some(Error::model(label, error).to_string()),
    }
    Ok(Inspection { parameters, obstacle })
}

/// The values that gradients come from, each with a gradient of its own.
fn seeds(graph: &mut Graph, scope: &Scope) -> Result<Vec<(ValueId, ValueId)>> {
    let values: Vec<ValueId> = match scope {
        Scope::Outputs => graph.outputs.clone(),
        Scope::FirstOutput => graph.outputs.iter().copied().take(1).collect(),
        Scope::Values(names) => {
            let find = |name: &String| {
                let missing = || Error::Argument(format!("the model has no value {name:?}"));
                graph.find(name).ok_or_else(missing)
            };
            names.iter().map(find).collect::<Result<_>>()?
        }
    };
    let mut seeds = Vec::new();
    for id in values {
        let ty = graph.value(id).ty.clone();
        if matches!(&ty, ValueType::Tensor(dtype, _) if dtype.is_float()) {
            let seed = graph.add_value(&format!("{}_grad", graph.name_of(id)), ty);
            seeds.push((id, seed));
        }
    }
    Ok(seeds)
}

/// The names of a graph's initializers, then those of the results of its Constant nodes.
fn constants(graph: &Graph) -> Vec<String> {
    let producers = graph.producers();
    let initializers = graph
        .value_ids()
        .filter(|id| graph.value(*id).constant.is_some() && producers[id.0 as usize].is_none());
    let made = graph.nodes.iter().filter(|node| node.inputs.is_empty());
    let made = made.flat_map(Node::present_outputs);
    initializers.chain(made).map(|id| graph.name_of(id).to_owned()).filter(|name| !name.is_empty()).collect()
}

/// A node that uses a value, and at which input.
type Use = (usize, usize);

fn uses(graph: &Graph) -> FxHashMap<ValueId, Vec<Use>> {
    let mut uses: FxHashMap<ValueId, Vec<Use>> = FxHashMap::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        for (k, id) in node.inputs.iter().enumerate() {
            if let Some(id) = id {
                uses.entry(*id).or_default().push((index, k));
            }
        }
    }
    uses
}

fn role(graph: &Graph, uses: &[Use], dtype: DType, dims: &[usize]) -> (ParameterRole, String) {
    let definition = |node: &Node| Registry::standard().find(&node.domain, &node.op);
    let of = |found: fn(&ortrain_ops::Definition) -> &'static [usize]| {
        uses.iter().find(|&&(index, k)| {
            definition(&graph.nodes[index]).is_some_and(|definition| found(definition).contains(&k))
        })
    };
    if let Some(&(index, _)) = of(|definition| definition.statistics) {
        let node = graph.node_label(&graph.nodes[index]);
        return (ParameterRole::Statistic, format!("it is a running statistic of {node}"));
    }
    let constant = |reason: String| (ParameterRole::Constant, reason);
    if uses.is_empty() {
        return constant("nothing uses it".into());
    }
    if !dtype.is_float() {
        return constant(format!("it is {dtype}; floats are trained"));
    }
    let weight = of(|definition| definition.weights);
    let elements: usize = dims.iter().product();
    let names = || {
        // Uses are in the order of the nodes.
        let mut nodes: Vec<usize> = uses.iter().map(|&(index, _)| index).collect();
        nodes.dedup();
        let rest = nodes.len() - 1;
        let first = graph.node_label(&graph.nodes[nodes[0]]);
        if rest == 0 { first } else { format!("{first} and {rest} more") }
    };
    match weight {
        Some(&(index, _)) => {
            let node = graph.node_label(&graph.nodes[index]);
            (ParameterRole::Trained, format!("it is a weight of {node}"))
        }
        None if elements == 1 => constant(format!("it is a single number in {}", names())),
        None => (ParameterRole::Trained, format!("its floats go into {}", names())),
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = [
            (ParameterRole::Trained, "trained"),
            (ParameterRole::Statistic, "statistics, in the checkpoint but not trained"),
            (ParameterRole::Constant, "not trained"),
        ];
        for (role, title) in titles {
            let found: Vec<&ParameterInfo> =
                self.parameters.iter().filter(|info| info.role == role).collect();
            let elements: usize = found.iter().map(|info| info.dims.iter().product::<usize>()).sum();
            writeln!(f, "{title}: {} tensors, {elements} elements", found.len())?;
            for ParameterInfo { name, dtype, dims, reason, .. } in found {
                writeln!(f, "  {name}: {dtype}{dims:?}: {reason}")?;
            }
        }
        match &self.obstacle {
            Some(reason) => writeln!(f, "it cannot be trained as it is: {reason}"),
            None => Ok(()),
        }
    }
}
