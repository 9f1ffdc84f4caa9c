//! Stop-gradient values from names and patterns of the caller, with checks.

use glob::Pattern;
use ortrain_graph::{DType, Graph};
use ortrain_onnx::{GraphProto, LoadedModel};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::graph::infer_graph;
use crate::suggest::hint;
use crate::{Error, Result};

/// Values of a graph and its subgraphs, by origin.
#[derive(Default)]
struct ValuesByOrigin<'a> {
    /// Node outputs, in node order.
    node_outputs: Vec<&'a str>,
    /// Initializers, and outputs of Constant nodes.
    weights: FxHashSet<&'a str>,
    inputs: FxHashSet<&'a str>,
}

impl<'a> ValuesByOrigin<'a> {
    fn collect(&mut self, graph: &'a GraphProto) {
        self.inputs.extend(graph.input.iter().map(|info| info.name.as_str()));
        self.weights.extend(graph.initializer.iter().map(|tensor| tensor.name.as_str()));
        for node in &graph.node {
            let outputs = node.output.iter().map(String::as_str).filter(|name| !name.is_empty());
            let graphs =
                node.attribute.iter().flat_map(|attr| attr.g.iter().map(AsRef::as_ref).chain(&attr.graphs));
            let mut graphs = graphs.peekable();
            if node.input.is_empty() && graphs.peek().is_none() {
                self.weights.extend(outputs);
                continue;
            }
            self.node_outputs.extend(outputs);
            if !ortrain_ops::passes::functions::is_custom_gradient(node) {
                graphs.for_each(|graph| self.collect(graph));
            }
        }
    }
}

/// Collects the element types of the values of a graph and its subgraphs.
fn collect_types(graph: &Graph, dtypes: &mut FxHashMap<String, DType>) {
    for node in &graph.nodes {
        let known = node.present_outputs().filter_map(|id| {
            let dtype = graph.value(id).ty.dtype()?;
            Some((graph.name_of(id).to_owned(), dtype))
        });
        dtypes.extend(known);
        Graph::subgraphs(node).for_each(|(_, inner)| collect_types(inner, dtypes));
    }
}

/// Stops gradients at named values.
///
/// # Errors
/// If a name matches no value, or matches a weight, an input or a value without gradients.
pub(crate) fn stop_gradients(label: &str, model: &mut LoadedModel, stops: &[String]) -> Result<()> {
    if stops.is_empty() {
        return Ok(());
    }
    let mut dtypes = FxHashMap::default();
    // Errors of type inference are reported later, with the reason.
    if let Ok(graph) = infer_graph(label, model) {
        collect_types(&graph, &mut dtypes);
    }
    let Some(graph) = &mut model.proto.graph else { return Ok(()) };
    let mut values = ValuesByOrigin::default();
    values.collect(graph);
    let is_float = |name: &str| dtypes.get(name).is_none_or(|dtype| dtype.is_float());
    let mut selected: FxHashSet<&str> = FxHashSet::default();
    for stop in stops {
        let name = stop.as_str();
        let argument = |reason: String| Error::Argument(format!("stop_gradients names {name:?}{reason}"));
        if let Some(output) = values.node_outputs.iter().find(|output| **output == name) {
            if !is_float(name) {
                let dtype = dtypes[name];
                return Err(argument(format!(
                    ", which is {dtype}: only floats have gradients; leave it out"
                )));
            }
            selected.insert(output);
        } else if values.weights.contains(name) {
            return Err(argument(
                ", which is a weight or a constant: leave it out of requires_grad to keep it as it is".into(),
            ));
        } else if values.inputs.contains(name) {
            return Err(argument(
                ", which is an input of the graph; name the first value that is computed from it".into(),
            ));
        } else {
            let pattern = Pattern::new(name).ok();
            let fits = |output: &&&str| pattern.as_ref().is_some_and(|pattern| pattern.matches(output));
            let matches: Vec<&&str> =
                values.node_outputs.iter().filter(fits).filter(|output| is_float(output)).collect();
            if matches.is_empty() {
                let suggestion = hint(name, values.node_outputs.iter().copied());
                return Err(argument(format!(", but {label} computes no floats of that name{suggestion}")));
            }
            selected.extend(matches);
        }
    }
    let selected_names: FxHashSet<String> = selected.into_iter().map(str::to_owned).collect();
    let names = selected_names.iter().map(String::as_str).collect();
    ortrain_ops::training::stop_gradients(graph, &names);
    Ok(())
}

/// Returns the error for a model without trained weights, if the reason is stopped gradients.
pub(crate) fn no_trained_weights_error(graph: &GraphProto) -> Option<Error> {
    let stopped = ortrain_ops::training::stopped_values(graph);
    if stopped.is_empty() {
        return None;
    }
    let names: Vec<String> = stopped.iter().take(3).map(|name| format!("{name:?}")).collect();
    let rest = stopped.len() - names.len();
    let suffix = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    Some(Error::Argument(format!(
        "nothing would be trained: every path from the loss to a weight goes through values that pass no gradient ({}{suffix}); take \
         one of them out of stop_gradients",
        names.join(", ")
    )))
}
