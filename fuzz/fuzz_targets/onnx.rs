//! Reads any bytes as a model: loads it, resolves every tensor, writes the model and loads it again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ortrain_onnx::{ExternalData, LoadedModel, densify, encode, visit_tensors_mut};

fuzz_target!(|data: &[u8]| {
    let Ok(mut model) = LoadedModel::from_bytes(data.to_vec(), outside()) else { return };

    let external = model.external().clone();
    let visited = visit_tensors_mut(&mut model.proto, |tensor, _| {
        if let Ok(payload) = ortrain_onnx::tensor_payload(tensor, &external) {
            let bits = ortrain_onnx::element_type(tensor).ok().and_then(ortrain_onnx::element_bits);
            let dims = ortrain_onnx::tensor_dims(tensor).expect("checked with the payload");
            let elements: usize = if dims.contains(&0) { 0 } else { dims.iter().product() };
            assert_eq!(Some(payload.len()), bits.map(|bits| (bits * elements).div_ceil(8)));
        }
        Ok::<(), ()>(())
    });
    visited.expect("the visitor has no errors");
    for tensor in model.proto.graph.iter().flat_map(|graph| &graph.sparse_initializer) {
        let _ = densify(tensor, &external, 1 << 20);
    }

    let bytes = encode(&model.proto).expect("smaller than 2 GiB");
    let again = LoadedModel::from_bytes(bytes.clone(), outside()).expect("what we write we read");
    assert_eq!(encode(&again.proto).expect("smaller than 2 GiB"), bytes);
    assert_eq!(again.unknown_fields(), 0);
});

fn outside() -> ExternalData {
    let mut external = ExternalData::none();
    external.provide("w", vec![7; 64]);
    external
}
