//! Weights of adapters for each row of a batch.

use ortrain_graph::DType;
use ortrain_onnx::GraphProto;

use super::names::{delta_value, site_prefix};
use super::sites::AdaptedLayer;
use crate::Error;
pub use crate::support::row_weights::RowAxis;
use crate::support::row_weights::{WEIGHED, WeighedSite, column_nodes, weighed_nodes};

/// Shape of the result of a layer with weights by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowForm {
    /// Number of axes.
    pub rank: usize,
    /// Axis of the rows.
    pub axis: RowAxis,
    /// Element type.
    pub dtype: DType,
}

/// Adds nodes that take the weights of adapters out of a value `[rows, adapters]`, at the begin of a graph.
pub fn add_row_columns(graph: &mut GraphProto, weights: &str, adapters: &[String]) {
    let nodes = adapters
        .iter()
        .enumerate()
        .flat_map(|(index, adapter)| column_nodes(weights, index, &column_name(weights, adapter)));
    let nodes: Vec<_> = nodes.collect();
    graph.node.splice(0..0, nodes);
}

/// Weighs the result of an adapter at one layer. The weights come from [`add_row_columns`].
///
/// # Errors
/// Returns an error if the nodes of the adapter were changed.
pub fn weigh_rows(
    graph: &mut GraphProto,
    layer: &AdaptedLayer,
    weights: &str,
    form: &RowForm,
) -> Result<(), Error> {
    let prefix = site_prefix(&layer.value, &layer.adapter);
    let delta = delta_value(&layer.value, &layer.adapter);
    let at = graph.node.iter().position(|node| node.output.first() == Some(&delta)).ok_or_else(|| {
        Error::Adapter(format!(
            "the nodes of the adapter {:?} at {:?} were changed",
            layer.adapter, layer.value
        ))
    })?;
    let weighed = format!("{prefix}{WEIGHED}");
    for input in graph.node.iter_mut().flat_map(|node| &mut node.input) {
        if *input == delta {
            input.clone_from(&weighed);
        }
    }
    let nodes = weighed_nodes(&WeighedSite {
        delta: &delta,
        column: &column_name(weights, &layer.adapter),
        rank: form.rank,
        axis: form.axis,
        dtype: form.dtype,
        prefix: &prefix,
    });
    graph.node.splice(at + 1..at + 1, nodes);
    Ok(())
}

/// Returns the name of the weights of one adapter.
fn column_name(weights: &str, adapter: &str) -> String {
    format!("{weights}/{adapter}")
}
