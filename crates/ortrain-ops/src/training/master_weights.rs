//! Master weights: weights of float16 or bfloat16 are trained in float32, and the model reads them through a cast.
//!
//! An update that is small relative to its weight is lost in a type with eight or eleven significant bits. In float32
//! it accumulates (Micikevicius et al., "Mixed Precision Training", 2018).

use ortrain_graph::{DType, Graph, GraphError, tensor_to_proto};
use ortrain_onnx::{
    AttributeProto, AttributeType, GraphProto, LoadedModel, ModelProto, NodeProto, TensorProto,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::class::Class;
use crate::registry::class_of_message;

/// Suffix of the names of the cast nodes through which a model reads its master weights.
const MASTER_SUFFIX: &str = "/master_weight";

/// Returns the name of the cast node through which a model reads a master weight.
pub(crate) fn master_weight_node(weight: &str) -> String {
    format!("{weight}{MASTER_SUFFIX}")
}

/// Returns true if weights of this type lose small updates.
#[must_use]
pub fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Returns a note about trained weights of narrow types; `None` if `narrow` is empty.
///
/// `narrow` has the names and types of these weights, and `trained` is the number of all trained weights.
#[must_use]
pub fn narrow_weights_note(narrow: &[(&str, DType)], trained: usize) -> Option<String> {
    /// Maximum number of names in the note.
    const SHOWN: usize = 3;
    let &(_, dtype) = narrow.first()?;
    let names: Vec<String> = narrow.iter().take(SHOWN).map(|(name, _)| format!("{name:?}")).collect();
    let more = match narrow.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let part = if dtype == DType::BF16 { 512 } else { 4096 };
    Some(format!(
        "{} of the {trained} trained tensors are {dtype} ({}{more}), which loses steps that change a weight by \
         less than 1/{part} of its value. master_weights=\"float32\" trains them in float32 and exports {dtype}",
        narrow.len(),
        names.join(", ")
    ))
}

/// Converts the narrow initializers among `trained` to float32. Nodes read each of them through a cast to its original
/// type. Returns the number of converted initializers.
///
/// # Errors
/// Returns an error if the data of an initializer does not match its type.
pub fn add_master_weights(graph: &mut GraphProto, trained: &FxHashSet<&str>) -> Result<usize, GraphError> {
    let mut renamed: FxHashMap<String, String> = FxHashMap::default();
    let mut casts = Vec::new();
    for tensor in &mut graph.initializer {
        let narrow = DType::from_onnx(tensor.data_type).filter(|&dtype| is_narrow(dtype));
        let Some(dtype) = narrow.filter(|_| trained.contains(tensor.name.as_str())) else { continue };
        let output = format!("{}/{dtype}", tensor.name);
        casts.push(cast_node(&tensor.name, &output, tensor.data_type));
        renamed.insert(tensor.name.clone(), output);
        convert_initializer(tensor, DType::F32)?;
    }
    rename_uses(graph, &renamed);
    graph.value_info.retain(|info| !renamed.contains_key(&info.name));
    graph.node.splice(0..0, casts);
    Ok(renamed.len())
}

/// Reverts [`add_master_weights`] in a graph with initializer values: each initializer gets its narrow type again.
///
/// # Errors
/// Returns the errors of [`add_master_weights`].
pub fn remove_master_weights(graph: &mut GraphProto) -> Result<(), GraphError> {
    let mut renamed: FxHashMap<String, String> = FxHashMap::default();
    let mut narrow: FxHashMap<String, DType> = FxHashMap::default();
    for node in graph.node.iter().filter(|node| class_of_message(node) == Class::Cast) {
        let ([input], [output], [to]) = (&node.input[..], &node.output[..], &node.attribute[..]) else {
            continue;
        };
        let dtype = i32::try_from(to.i).ok().and_then(DType::from_onnx);
        if let Some(dtype) = dtype.filter(|_| node.name == master_weight_node(input)) {
            renamed.insert(output.clone(), input.clone());
            narrow.insert(input.clone(), dtype);
        }
    }
    for tensor in &mut graph.initializer {
        if let Some(&dtype) = narrow.get(&tensor.name) {
            convert_initializer(tensor, dtype)?;
        }
    }
    graph.node.retain(|node| !node.output.iter().any(|output| renamed.contains_key(output)));
    rename_uses(graph, &renamed);
    graph.value_info.retain(|info| !renamed.contains_key(&info.name));
    Ok(())
}

fn cast_node(name: &str, output: &str, to: i32) -> NodeProto {
    let to = AttributeProto {
        name: "to".into(),
        r#type: AttributeType::Int as i32,
        i: to.into(),
        ..AttributeProto::default()
    };
    NodeProto {
        op_type: "Cast".into(),
        name: master_weight_node(name),
        input: vec![name.to_owned()],
        output: vec![output.to_owned()],
        attribute: vec![to],
        ..NodeProto::default()
    }
}

fn convert_initializer(tensor: &mut TensorProto, dtype: DType) -> Result<(), GraphError> {
    let model = LoadedModel::from_proto(ModelProto::default(), Default::default());
    let value = Graph::tensor_from_proto(&model, tensor)?;
    *tensor = tensor_to_proto(&tensor.name, &value.converted(dtype));
    Ok(())
}

/// Renames values at their uses, including subgraphs, unless a subgraph has its own value of the name.
fn rename_uses(graph: &mut GraphProto, names: &FxHashMap<String, String>) {
    for node in &mut graph.node {
        for input in &mut node.input {
            if let Some(new) = names.get(input) {
                input.clone_from(new);
            }
        }
        for attribute in &mut node.attribute {
            for subgraph in attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs) {
                let inputs = subgraph.input.iter().map(|info| &info.name);
                let defined = inputs.chain(subgraph.initializer.iter().map(|tensor| &tensor.name));
                let local_names: FxHashSet<&String> =
                    defined.chain(subgraph.node.iter().flat_map(|node| &node.output)).collect();
                let mut outer_names = names.clone();
                outer_names.retain(|name, _| !local_names.contains(name));
                for info in &mut subgraph.output {
                    if let Some(new) = outer_names.get(&info.name) {
                        info.name.clone_from(new);
                    }
                }
                rename_uses(subgraph, &outer_names);
            }
        }
    }
}
