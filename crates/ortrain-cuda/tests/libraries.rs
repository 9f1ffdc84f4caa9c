//! Processes of their own: missing and old libraries, the cache of kernels, and kernels without a barrier.

mod common;
#[path = "../../ortrain-testkit/gpu/example.rs"]
mod example;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ortrain::artifacts::OptimizerKind;
use ortrain::{
    CheckpointState, InputView, ModelSource, Module, ModuleOptions, Optimizer, RunOptions, Tensor, collect,
};
use ortrain_cuda::{Cuda, cuda_devices};

use common::software::calls;
use common::{select_software, software_libraries};
use example::{WEIGHTS, artifacts};

/// Environment variable with the task of a child process.
const TASK: &str = "ORTRAIN_TEST_TASK";

/// Trains the perceptron for some steps, and returns the losses.
fn train(device: &Cuda) -> ortrain::Result<Vec<f32>> {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let mut state = CheckpointState::from_checkpoint(trained.checkpoint.clone()).expect("it can be read");
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let options = ModuleOptions::from(RunOptions::default().backend(Arc::new(device.clone())));
    let mut module = Module::new(source(&trained.training_model), &mut state, None, options)?;
    let model = trained.optimizer_model.as_ref().expect("it was requested");
    let mut optimizer = Optimizer::new(source(model), &mut state, &module)?;
    let x: Vec<f32> = (0..16 * 64).map(|k| (k as f32 * 0.37).sin()).collect();
    let (x, labels) = (Tensor::f32(&[16, 64], &x), Tensor::i64(&[16], &[3; 16]));
    let inputs = [InputView::from(&x), InputView::from(&labels)];
    (0..3)
        .map(|_| {
            let results = collect(|deliver| module.train_step(&mut state, &inputs, deliver))?;
            optimizer.step(&mut state, &module)?;
            module.lazy_reset_grad();
            Ok(results[0].to_vec::<f32>()[0])
        })
        .collect()
}

/// Body of a child process: trains, and prints losses or an error, compilations and calls of the compiler.
#[test]
#[allow(clippy::print_stdout, reason = "the parent reads it")]
fn child() {
    if std::env::var_os(TASK).is_none() {
        return;
    }
    let device = match Cuda::open("cuda") {
        Ok(device) => device,
        Err(error) => return println!("error: {error}"),
    };
    calls();
    match train(&device) {
        Ok(losses) => println!("losses: {:?}", losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>()),
        Err(error) => println!("error: {error}"),
    }
    println!("compilations: {}", device.counts().compilations);
    println!("calls of the compiler: {}", calls().iter().filter(|call| call.starts_with("nvrtc")).count());
}

/// Runs a child process with these variables, and returns the lines that it prints, by their keys.
fn run_child(variables: &[(&str, &Path)]) -> BTreeMap<String, String> {
    let mut command = Command::new(std::env::current_exe().expect("the test has a path"));
    command.args(["--exact", "child", "--nocapture"]).env(TASK, "train");
    command.env("ORTRAIN_CUDA_LIBRARIES", software_libraries()).env("ORTRAIN_CUDA_CACHE", "");
    command.env("SOFTWARE_NVRTC_CACHE", software_libraries().join("modules"));
    command.envs(variables.iter().copied());
    let output = command.output().expect("the test can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let pairs = text.lines().filter_map(|line| line.split_once(": "));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Returns a folder with copies of some of the software libraries.
fn folder_with(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("there is a folder for files");
    for name in names {
        fs::copy(software_libraries().join(name), folder.path().join(name))
            .expect("the library can be copied");
    }
    folder
}

const DRIVER: &str = "libcuda.so.1";
const NVRTC: &str = "libnvrtc.so.13";
const LANGUAGE: &str = "cuda_language.h";

#[test]
fn missing_libraries_are_named() {
    let error =
        |names: &[&str]| run_child(&[("ORTRAIN_CUDA_LIBRARIES", folder_with(names).path())])["error"].clone();
    assert_eq!(
        error(&[]),
        "there is no device \"cuda\" here: the CUDA driver was not found; install NVIDIA's driver, version 570 or later"
    );
    assert_eq!(
        error(&[DRIVER]),
        "there is no device \"cuda\" here: NVIDIA's compiler NVRTC was not found; install it with the extra \
         \"ortrain[cuda13]\", or \"ortrain[cuda12]\" for a driver before version 580"
    );
    // Products of the library are printed without it.
    let without_products =
        run_child(&[("ORTRAIN_CUDA_LIBRARIES", folder_with(&[DRIVER, NVRTC, LANGUAGE]).path())]);
    assert_eq!(without_products["losses"], run_child(&[])["losses"]);
    let broken = folder_with(&[NVRTC]);
    fs::write(broken.path().join(DRIVER), "no library").expect("the folder is writable");
    let text = run_child(&[("ORTRAIN_CUDA_LIBRARIES", broken.path())])["error"].clone();
    assert!(text.contains("the CUDA driver at ") && text.contains("cannot be opened"), "{text}");
}

/// Renames a function in a copy of a library.
fn hide_function(path: &Path, function: &str) {
    let mut bytes = fs::read(path).expect("the library can be read");
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let places: Vec<usize> =
        (0..bytes.len() - name.len()).filter(|&at| bytes[at..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "{function} is no name in {}", path.display());
    places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    fs::write(path, bytes).expect("the copy is writable");
}

#[test]
fn missing_functions_are_named() {
    for (library, title, functions) in [
        (DRIVER, "the CUDA driver", &["cuInit", "cuStreamBeginCapture_v2", "cuGraphLaunch"][..]),
        (NVRTC, "NVIDIA's compiler NVRTC", &["nvrtcGetCUBIN", "nvrtcVersion"][..]),
    ] {
        for function in functions {
            let folder = folder_with(&[DRIVER, NVRTC, LANGUAGE]);
            hide_function(&folder.path().join(library), function);
            let text = run_child(&[("ORTRAIN_CUDA_LIBRARIES", folder.path())])["error"].clone();
            assert!(
                text.contains(&format!("{title} is too old: it has no function {function}; install")),
                "{text}"
            );
        }
    }
}

#[test]
fn old_drivers_and_missing_devices_are_named() {
    let text = run_child(&[("SOFTWARE_CUDA_VERSION", Path::new("11040"))])["error"].clone();
    assert_eq!(
        text,
        "there is no device \"cuda\" here: the driver supports CUDA 11.4, but ortrain needs 12.8 or later; install \
         NVIDIA's driver, version 570 or later"
    );
    let text = run_child(&[("SOFTWARE_CUDA_DEVICES", Path::new("0"))])["error"].clone();
    assert_eq!(
        text,
        "there is no device \"cuda\" here: the driver sees no GPU; check CUDA_VISIBLE_DEVICES, or use \"webgpu\" or \
         \"cpu\""
    );
    // A device in exclusive mode, which another process uses.
    let text =
        run_child(&[("SOFTWARE_CUDA_FAIL", Path::new("cuDevicePrimaryCtxRetain:1=46"))])["error"].clone();
    assert!(text.contains("cannot be opened: ") && text.contains("end other programs that use it"), "{text}");
}

#[test]
fn second_process_compiles_nothing() {
    let folder = tempfile::tempdir().expect("there is a folder for files");
    let cache = folder.path().join("kernels");
    let run = || run_child(&[("ORTRAIN_CUDA_CACHE", &cache)]);
    let (first, second) = (run(), run());
    assert_ne!(first["compilations"], "0");
    assert_eq!((&*second["compilations"], &*second["calls of the compiler"]), ("0", "0"));
    assert_eq!(first["losses"], second["losses"]);
    // A damaged entry is compiled again.
    let entries =
        fs::read_dir(&cache).expect("the cache exists").map(|entry| entry.expect("an entry").path());
    let entry = entries.into_iter().find(|path| path.extension().is_some_and(|end| end == "cubin"));
    let entry = entry.expect("the cache has an entry");
    let mut bytes = fs::read(&entry).expect("it can be read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&entry, bytes).expect("it can be written");
    let third = run();
    assert_eq!((&*third["compilations"], &third["losses"]), ("1", &first["losses"]));
    // A cache that is no folder costs only time.
    let text = run_child(&[("ORTRAIN_CUDA_CACHE", &entry)]);
    assert_eq!(text["losses"], first["losses"]);
}

/// Another library of the process has opened NVRTC of another major version.
#[test]
fn two_major_versions_are_used_side_by_side() {
    let folder = folder_with(&[DRIVER, NVRTC, LANGUAGE, "libcublasLt.so.13"]);
    let other = folder.path().join("libnvrtc.so.12");
    fs::copy(folder.path().join(NVRTC), &other).expect("the library can be copied");
    let alone = run_child(&[]);
    for variables in [
        &[("ORTRAIN_CUDA_LIBRARIES", folder.path())][..],
        &[("ORTRAIN_CUDA_LIBRARIES", folder.path()), ("LD_PRELOAD", &other)],
        &[("LD_PRELOAD", &other)],
    ] {
        let text = run_child(variables);
        assert_eq!(text.get("losses"), alone.get("losses"), "{text:?}");
    }
}

/// A device of another index, and names of devices.
#[test]
fn devices_have_indices() {
    select_software();
    let devices = cuda_devices();
    assert_eq!(devices.len(), 1);
    assert_eq!((&*devices[0].name, &*devices[0].description), ("cuda", "Software device 0"));
    assert_eq!(
        Cuda::open("cuda:3").expect_err("there is one device").to_string(),
        "there is no device \"cuda:3\" here: the only device is \"cuda\"; leave out the index"
    );
}
