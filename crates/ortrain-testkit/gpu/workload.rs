//! Artifacts of the workloads of the benchmarks. Their files have no large weights.

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate, open_batch};
use ortrain::{Bytes, ModelSource, decode_model};

/// Reads a file of a workload.
fn read(file: &str) -> Vec<u8> {
    let path = format!("{}/../../benches/workloads/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the artifacts of a workload. `fill` returns the bytes of a float32 weight with these dims that is not in the
/// file. `is_open` opens the batch size.
pub(crate) fn artifacts_of(name: &str, fill: impl Fn(&[i64]) -> Vec<u8>, is_open: bool) -> Artifacts {
    let mut model = decode_model(read(&format!("{name}.onnx"))).expect("it is a model");
    for tensor in &mut model.graph.as_mut().expect("it has a graph").initializer {
        if tensor.doc_string.starts_with("fill ") {
            tensor.raw_data = Bytes::from(fill(&tensor.dims));
        }
    }
    let settings: serde_json::Value =
        serde_json::from_slice(&read(&format!("{name}.json"))).expect("it is JSON");
    let trained = settings["trainable_names"].as_array().expect("it is a list");
    let options = ArtifactOptions {
        requires_grad: trained.iter().map(|name| name.as_str().expect("it is a name").to_owned()).collect(),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        ..ArtifactOptions::default()
    };
    let mut source = ModelSource::from_proto(&model).expect("it fits in memory");
    if is_open {
        let open = open_batch(source).expect("its batch can be opened");
        source = ModelSource::from_proto(&open).expect("it fits in memory");
    }
    generate(source, options).expect("it can be trained")
}
