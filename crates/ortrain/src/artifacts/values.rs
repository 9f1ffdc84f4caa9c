//! Names of the values of a model.

use crate::artifacts::to_self_contained;
use crate::model::graph::infer_graph;
use crate::{ModelSource, Result};

/// Returns the names of the float results of the nodes in the order of execution. Subgraphs are left out.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::result_names;
///
/// assert_eq!(result_names(setup::MODEL.into())?, ["fc1", "hidden", "logits"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn result_names(model: ModelSource) -> Result<Vec<String>> {
    let label = model.label("the model");
    let loaded = to_self_contained(&label, model.load()?)?;
    let graph = infer_graph(&label, &loaded)?;
    let is_float = |name: &str| {
        let found = graph.find(name).and_then(|id| graph.value(id).ty.dtype());
        found.is_some_and(ortrain_graph::DType::is_float)
    };
    let nodes = loaded.proto.graph.iter().flat_map(|graph| &graph.node);
    let names = nodes.flat_map(|node| &node.output).filter(|name| is_float(name));
    Ok(names.cloned().collect())
}
