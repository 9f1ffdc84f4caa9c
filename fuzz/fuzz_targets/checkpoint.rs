//! Reads any bytes as a checkpoint and as safetensors. A file that is accepted can be written and read again.
//!
//! Initial corpus: the files in `crates/ortrain-checkpoint/tests/data`.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use ortrain_checkpoint::{Layout, encode, read, read_safetensors, write_safetensors};

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::copy_from_slice(data);
    if let Ok(checkpoint) = read(bytes.clone()) {
        for layout in [Layout::Artifacts, Layout::State] {
            let first = encode(&checkpoint, layout).expect("what was read can be written");
            let again = read(first.clone().into()).expect("what was written can be read");
            // Compares bytes and not values, because a NaN is not equal to itself.
            assert!(
                encode(&again, layout).expect("and written again") == first,
                "the same bytes, {layout:?}"
            );
        }
    }
    if let Ok(tensors) = read_safetensors(bytes) {
        let first = write_safetensors(&tensors).expect("what was read can be written");
        let again = read_safetensors(first.clone().into()).expect("what was written can be read");
        assert!(write_safetensors(&again).expect("and written again") == first, "the same bytes");
    }
});
