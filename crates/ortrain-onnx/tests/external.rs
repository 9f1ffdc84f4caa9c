//! External data is read from files inside the model's folder only.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::path::Path;

use common::{assert_error, external};
use ortrain_onnx::{
    ExternalData, LoadedModel, Maps, ModelProto, OnnxError, Storage, TensorProto, checksum_of, encode,
    tensor_payload,
};

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn at(folder: &Path, tensor: &TensorProto) -> Result<bytes::Bytes, OnnxError> {
    let read = tensor_payload(tensor, &ExternalData::in_folder(folder, Storage::Read));
    for storage in [Storage::Mapped, Storage::MappedInPlace] {
        let mapped = tensor_payload(tensor, &ExternalData::in_folder(folder, storage));
        match (&read, &mapped) {
            (Ok(read), Ok(mapped)) => assert_eq!(read, mapped),
            (Err(read), Err(mapped)) => assert_eq!(read.to_string(), mapped.to_string()),
            other => panic!("{other:?}"),
        }
    }
    read
}

fn refused(folder: &Path, location: &str, reason: &str) {
    assert_error(
        at(folder, &external("w", &[1], &[("location", location)])),
        &format!(
            "tensor `w` has its data in the file `{}`, which is refused: {reason}",
            location.escape_debug()
        ),
    );
}

#[test]
fn reads_ranges() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    std::fs::write(folder.path().join("sub/w.bin"), floats(&[1.0, 2.0, 3.0, 4.0])).unwrap();
    for (entries, values) in [
        (vec![("location", "sub/w.bin")], [1.0, 2.0]),
        (vec![("location", "./sub/w.bin"), ("offset", "4"), ("length", "8")], [2.0, 3.0]),
        (vec![("offset", "8"), ("location", "sub/w.bin"), ("checksum", "?")], [3.0, 4.0]),
    ] {
        assert_eq!(at(folder.path(), &external("w", &[2], &entries)).unwrap(), floats(&values));
    }
}

#[test]
fn tensors_at_aligned_offsets_are_used_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
    std::fs::write(folder.path().join("w"), &bytes).unwrap();
    let maps = Maps::default();
    let model =
        LoadedModel::from_proto(ModelProto::default(), ExternalData::in_folder(folder.path(), Storage::Read));
    let [model, other] = [(), ()].map(|()| model.clone().with_storage(Storage::MappedInPlace, &maps));
    for (offset, is_shared) in [("256", true), ("2048", true), ("64", false)] {
        let tensor = external("w", &[16], &[("location", "w"), ("offset", offset)]);
        let [a, b] = [&model, &other].map(|model| model.tensor_payload(&tensor).unwrap());
        let offset: usize = offset.parse().unwrap();
        assert_eq!(a, bytes[offset..offset + 64]);
        assert_eq!(a.as_ptr() == b.as_ptr(), is_shared, "{offset}");
        assert_eq!(a.as_ptr().addr() % 256, 0);
    }
}

#[test]
fn checksums_are_compared_on_request() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("w"), b"abc ").unwrap();
    let external_data = ExternalData::in_folder(folder.path(), Storage::Read);
    let model = LoadedModel::from_proto(ModelProto::default(), external_data);
    let right = checksum_of(&folder.path().join("w")).unwrap();
    let wrong = "0".repeat(40);
    let verify = |checksum: &str| {
        let tensor = external("w", &[1], &[("location", "w"), ("checksum", checksum)]);
        model.verify_external_file(&tensor, &mut HashSet::new())
    };
    for checksum in ["", "?", &right, &right.to_uppercase()] {
        verify(checksum).unwrap();
    }
    assert_error(
        verify(&wrong),
        &format!(
            "the file `w` with the external data of tensor `w` has changed: its SHA-1 is {right}, and the model was \
             written for {wrong}; bring back the file, or make the model again from the present file"
        ),
    );
    // A file is read once for all tensors in it.
    let mut known = HashSet::new();
    let tensor = external("w", &[1], &[("location", "w"), ("checksum", &right)]);
    model.verify_external_file(&tensor, &mut known).unwrap();
    std::fs::write(folder.path().join("w"), b"abcd").unwrap();
    model.verify_external_file(&tensor, &mut known).unwrap();
    assert!(model.verify_external_file(&tensor, &mut HashSet::new()).is_err());
    std::fs::remove_file(folder.path().join("w")).unwrap();
    assert!(model.verify_external_file(&tensor, &mut HashSet::new()).is_err());
}

#[test]
fn ranges_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("w"), floats(&[1.0, 2.0])).unwrap();
    let entries = |entries: &[(&str, &str)]| at(folder.path(), &external("w", &[2], entries));
    assert_error(
        entries(&[("location", "w"), ("offset", "4")]),
        "tensor `w` should have 8 bytes at offset 4 of the file `w`, which has only 8 bytes; was it copied or \
         downloaded completely?",
    );
    assert!(matches!(
        entries(&[("location", "w"), ("offset", &u64::MAX.to_string())]),
        Err(OnnxError::ExternalRange { .. })
    ));
    assert_error(
        entries(&[("location", "w"), ("length", "4")]),
        "tensor `w` should have 8 bytes by its dimensions and type, but external_data holds 4",
    );
    assert_error(
        entries(&[("location", "w"), ("offset", "-4")]),
        "tensor `w` has an invalid description of its external data: `offset` is `-4`, not a number",
    );
    assert_error(
        entries(&[]),
        "tensor `w` has an invalid description of its external data: it has no `location`",
    );
    let error = entries(&[("location", "v")]).unwrap_err().to_string();
    assert!(
        error.starts_with("tensor `w` has its data in the file `v`, which cannot be read: ")
            && error.ends_with("; it must be beside the model"),
        "{error}"
    );
    // The size exceeds the file and all memory. It is refused before anything is allocated.
    assert!(matches!(
        at(folder.path(), &external("w", &[1 << 50], &[("location", "w")])),
        Err(OnnxError::ExternalRange { .. })
    ));
    let mut twice = external("w", &[2], &[("location", "w")]);
    twice.float_data = vec![1.0, 2.0];
    assert_error(
        at(folder.path(), &twice),
        "tensor `w` holds data in both external_data and float_data; only one may be used",
    );
}

#[test]
fn locations_outside_the_folder_are_rejected() {
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(outside.path().join("secret"), floats(&[1.0])).unwrap();

    let absolute = "it is an absolute path; it must be relative to the model's folder";
    refused(&folder, "/etc/passwd", absolute);
    refused(&folder, outside.path().join("secret").to_str().unwrap(), absolute);
    refused(&folder, "C:\\windows\\win.ini", absolute);
    refused(&folder, "c:win.ini", absolute);
    refused(&folder, "\\\\server\\share\\w", absolute);
    let up = "it leads out of the model's folder by `..`";
    refused(&folder, "../secret", up);
    refused(&folder, "a/../../secret", up);
    refused(&folder, "..\\secret", up);
    refused(&folder, "a\\b", "it contains a backslash; folders are separated by `/` in a model");
    refused(&folder, "", "it is empty");
    refused(&folder, "a\0b", "it contains a zero byte");
    refused(&folder, ".", "it is not a regular file");
    // This name looks dangerous, but is harmless.
    std::fs::write(folder.join("..w"), floats(&[2.0])).unwrap();
    assert!(at(&folder, &external("w", &[1], &[("location", "..w")])).is_ok());
}

#[cfg(unix)]
#[test]
fn colons_in_names_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("onnx::MatMul_1"), floats(&[2.0])).unwrap();
    assert!(at(folder.path(), &external("w", &[1], &[("location", "onnx::MatMul_1")])).is_ok());
}

#[cfg(unix)]
#[test]
fn links_out_of_the_folder_are_rejected() {
    use std::os::unix::fs::symlink;
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(outside.path().join("secret"), floats(&[1.0])).unwrap();
    std::fs::write(folder.join("w"), floats(&[2.0])).unwrap();
    symlink("../secret", folder.join("link")).unwrap();
    symlink("..", folder.join("up")).unwrap();
    symlink("w", folder.join("inner")).unwrap();

    let out = "it is a link that leads out of the model's folder";
    refused(&folder, "link", out);
    refused(&folder, "up/secret", out);
    assert_eq!(at(&folder, &external("w", &[1], &[("location", "inner")])).unwrap(), floats(&[2.0]));
}

/// Caches of model hubs contain links into a folder of blobs. The model itself is a link, too.
#[cfg(unix)]
#[test]
fn a_linked_model_may_have_linked_data() {
    use std::os::unix::fs::symlink;
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshot"));
    std::fs::create_dir(&blobs).unwrap();
    std::fs::create_dir(&snapshot).unwrap();
    let model = common::model(vec![external("w", &[1], &[("location", "model.onnx_data")])]);
    std::fs::write(blobs.join("aa"), encode(&model).unwrap()).unwrap();
    std::fs::write(blobs.join("bb"), floats(&[3.0])).unwrap();
    std::fs::write(cache.path().join("secret"), floats(&[4.0])).unwrap();
    symlink("../blobs/aa", snapshot.join("model.onnx")).unwrap();
    symlink("../blobs/bb", snapshot.join("model.onnx_data")).unwrap();
    symlink("../secret", snapshot.join("link")).unwrap();

    let loaded = LoadedModel::load(snapshot.join("model.onnx")).unwrap();
    let tensor = &loaded.proto.graph.as_ref().unwrap().initializer[0];
    assert_eq!(loaded.tensor_payload(tensor).unwrap(), floats(&[3.0]));
    let link = external("w", &[1], &[("location", "link")]);
    assert!(matches!(loaded.tensor_payload(&link), Err(OnnxError::Location { .. })));
}

#[test]
fn bytes_replace_external_files() {
    let tensor = external("w", &[1], &[("location", "weights.bin"), ("offset", "4")]);
    assert_error(
        tensor_payload(&tensor, &ExternalData::none()),
        "tensor `w` has its data in the file `weights.bin`, but the model was loaded from bytes; load it from its \
         path, \
         name its folder, or provide the file's bytes",
    );
    let mut external = ExternalData::none();
    external.provide("weights.bin", floats(&[1.0, 2.0]));
    let loaded = LoadedModel::from_bytes(encode(&common::model(vec![tensor])).unwrap(), external).unwrap();
    let tensor = &loaded.proto.graph.as_ref().unwrap().initializer[0];
    assert_eq!(loaded.tensor_payload(tensor).unwrap(), floats(&[2.0]));
}

#[test]
fn many_external_files_do_not_exhaust_file_handles() {
    let folder = tempfile::tempdir().unwrap();
    let data = ExternalData::in_folder(folder.path(), Storage::Read);
    for round in 0..2 {
        for index in 0..2000 {
            let name = format!("w{index}");
            if round == 0 {
                std::fs::write(folder.path().join(&name), floats(&[index as f32])).unwrap();
            }
            let tensor = external("w", &[1], &[("location", name.as_str())]);
            assert_eq!(tensor_payload(&tensor, &data).unwrap(), floats(&[index as f32]));
        }
    }
}

#[test]
fn a_file_cut_short_after_opening_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    std::fs::write(&path, floats(&[1.0, 2.0])).unwrap();
    let data = ExternalData::in_folder(folder.path(), Storage::Read);
    let tensor = external("w", &[2], &[("location", "w")]);
    assert!(tensor_payload(&tensor, &data).is_ok());
    std::fs::write(&path, floats(&[1.0])).unwrap();
    assert!(matches!(tensor_payload(&tensor, &data), Err(OnnxError::ExternalRange { size: 4, .. })));
}
