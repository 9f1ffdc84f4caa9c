//! Converts any model to a graph: inlines functions, imports, upgrades, infers, differentiates and builds a schedule.
//! No model may cause a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ortrain_graph::{DType, Graph, Shape, Tensor, ValueType, byte_length};
use ortrain_onnx::{ExternalData, LoadedModel};
use ortrain_ops::{OperatorLibrary, Role, Specialiser, passes};

/// Maximum size of an input in bytes. Larger inputs are not allocated.
const LARGEST_INPUT: usize = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let Ok(mut model) = LoadedModel::from_bytes(data.to_vec(), ExternalData::none()) else { return };
    if passes::functions::inline_functions(&mut model.proto, &OperatorLibrary::default()).is_err() {
        return;
    }
    let Ok(mut graph) = Graph::from_model(&model) else { return };
    let _ = graph.to_string();
    if passes::versions::upgrade(&mut graph).is_err() || passes::infer::infer(&mut graph).is_err() {
        return;
    }
    if let Some(&loss) = graph.outputs.first() {
        let mut gradient = graph.clone();
        let floats = |id: &&ortrain_graph::ValueId| gradient.value(**id).ty.dtype().is_some_and(DType::is_float);
        let targets: Vec<_> = gradient.inputs.iter().filter(floats).copied().collect();
        if passes::differentiate::differentiate(&mut gradient, loss, &targets).is_ok() {
            let _ = passes::decompose::standardise(&mut gradient.clone());
            let _ = passes::versions::downgrade(&mut gradient, 13);
        }
    }
    let sized = |shape: &Shape| -> Vec<usize> { shape.iter().map(|dim| dim.known().unwrap_or(2)).collect() };
    let mut inputs = Vec::new();
    for &id in &graph.inputs {
        let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty else { return };
        let dims = sized(shape);
        if byte_length(*dtype, &dims).is_ok_and(|bytes| bytes <= LARGEST_INPUT) {
            inputs.push(Tensor::filled(*dtype, &dims, 1.0));
        } else {
            return;
        }
    }
    let roles = vec![Role::User; graph.inputs.len()];
    if let Ok(schedule) = Specialiser::new(graph, roles).schedule(&inputs) {
        let _ = schedule.to_string();
    }
});
