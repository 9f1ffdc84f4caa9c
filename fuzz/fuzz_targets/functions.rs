//! Uses any function as a custom operator and as a gradient: a small model that calls the function is read,
//! differentiated and written. No function may cause a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ortrain_graph::{DType, Graph, ValueType};
use ortrain_onnx::{
    ExternalData, FunctionProto, GraphProto, LoadedModel, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
    decode_function,
};
use ortrain_ops::{OperatorLibrary, passes};

/// Maximum number of inputs and of outputs of a call.
const MAX_PORTS: usize = 8;

fuzz_target!(|data: &[u8]| {
    let Ok(function) = decode_function(data.to_vec()) else { return };
    let mut library = OperatorLibrary::default();
    let known = library.add_function(function.clone()).is_ok();
    let _ = library.add_gradient("", "Tanh", None, function.clone());
    follow(&function, &library);
    // Second variant: the function is its own gradient. Third variant, for a function that the library refuses: only
    // the model contains it.
    if known && library.add_gradient(&function.domain, &function.name, None, function.clone()).is_ok() {
        follow(&function, &library);
    }
    if !known {
        follow(&function, &OperatorLibrary::default());
    }
});

/// Runs a model that calls the function through all passes.
fn follow(function: &FunctionProto, library: &OperatorLibrary) {
    for brought in [false, true] {
        let mut model = calling(function);
        if brought {
            model.functions.push(function.clone());
        }
        let mut plain = model.clone();
        let _ = passes::functions::inline_functions(&mut plain, library);
        if passes::functions::inline_for_gradients(&mut model, library).is_err() {
            continue;
        }
        let mut written = model.clone();
        written.graph.as_mut().map(passes::functions::write_out_nodes);
        assert!(!written.graph.as_ref().is_some_and(passes::functions::keeps_nodes));
        let model = LoadedModel::from_proto(model, ExternalData::none());
        let Ok(mut graph) = Graph::from_model(&model) else { continue };
        if passes::versions::upgrade(&mut graph).is_err() || passes::infer::infer(&mut graph).is_err() {
            continue;
        }
        let (Some(&loss), targets) = (graph.outputs.first(), graph.inputs.clone()) else { continue };
        if passes::differentiate::differentiate(&mut graph, loss, &targets).is_err() {
            continue;
        }
        if passes::functions::write_out(&mut graph).is_ok() && passes::infer::infer(&mut graph).is_ok() {
            let _ = graph.to_string();
            let _ = passes::versions::downgrade(&mut graph, 17);
        }
    }
}

/// Builds a model of `loss = sum(tanh(f(a, b, ...)))` with the operator versions of the function.
fn calling(function: &FunctionProto) -> ModelProto {
    let node = |op: &str, domain: &str, input: Vec<String>, output: Vec<String>| NodeProto {
        op_type: op.into(),
        domain: domain.into(),
        input,
        output,
        ..NodeProto::default()
    };
    let inputs: Vec<String> = (0..function.input.len().min(MAX_PORTS)).map(|k| format!("in{k}")).collect();
    let outputs: Vec<String> = (0..function.output.len().min(MAX_PORTS)).map(|k| format!("out{k}")).collect();
    let mut call = node(&function.name, &function.domain, inputs.clone(), outputs);
    call.overload.clone_from(&function.overload);
    let mut sum = node("ReduceSum", "", vec!["bent".into()], vec!["loss".into()]);
    sum.name = "sum".into();
    let declared = inputs.iter().map(|name| {
        let mut graph = Graph::new("");
        let id = graph.add_value(name, ValueType::tensor(DType::F32, &[2, 3]));
        graph.value_info(id)
    });
    let mut opset_import = function.opset_import.clone();
    if !opset_import.iter().any(|set| set.domain.is_empty() || set.domain == "ai.onnx") {
        opset_import.push(OperatorSetIdProto { domain: String::new(), version: 17 });
    }
    ModelProto {
        graph: Some(GraphProto {
            input: declared.collect(),
            node: vec![call, node("Tanh", "", vec!["out0".into()], vec!["bent".into()]), sum],
            output: vec![ValueInfoProto { name: "loss".into(), ..ValueInfoProto::default() }],
            ..GraphProto::default()
        }),
        opset_import,
        ..ModelProto::default()
    }
}
