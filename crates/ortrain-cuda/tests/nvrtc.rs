//! NVIDIA's compiler accepts every kernel of the suites without a message, and its code keeps values in registers.
//!
//! No GPU is needed. The environment variable `ORTRAIN_CONFORM` adds architectures. The compiler is the package
//! `nvidia-cuda-nvrtc` of the Python environment for tests. With another compiler in the folder of
//! `ORTRAIN_CUDA_LIBRARIES`, registers are not checked.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ortrain::{
    CheckpointState, Dim, InputView, ModelSource, Module, ModuleOptions, Optimizer, RunOptions, Tensor,
    ValueInfo,
};
use ortrain_codegen::{CudaC, Dialect as _, KernelSource};
use ortrain_cuda::{compile_source, search_packages};
use ortrain_testkit::kernels::{KernelPrinter, suite_kernels};

#[path = "../../ortrain-testkit/gpu/workload.rs"]
mod workload;
use workload::artifacts_of;

/// Number of kernels that are compiled together.
const KERNELS_PER_MODULE: usize = 48;
/// Maximum number of registers per thread of a kernel for tiles of products. Two blocks then run on a multiprocessor.
const MAX_TILE_REGISTERS: u64 = 128;
/// Maximum bytes that other kernels store in local memory for lack of registers.
const MAX_SPILL_BYTES: u64 = 16;

/// Names of all workloads.
const WORKLOADS: [&str; 13] = [
    "mlp_tiny",
    "mlp",
    "lenet",
    "mobilenetv2_96",
    "mobilenetv2_224",
    "mobilenetv2_224_head",
    "resnet18_224",
    "bert_mini",
    "bert_mini_lora8",
    "bert_base",
    "gpt2_small6",
    "lstm",
    "adamw_25m",
];

/// Adds the Python environments for tests to the search for NVRTC.
fn search_environments() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/lib"));
    let versions = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    search_packages(
        versions.map(|entry| entry.expect("the folder can be read").path().join("site-packages")),
    );
}

/// Resources of a kernel in the report of the assembler.
#[derive(Debug, Default)]
struct Resources {
    name: String,
    spills: u64,
    registers: u64,
}

/// Returns the number before a word in a line.
fn number_before(line: &str, word: &str) -> Option<u64> {
    line.split(word).next()?.split_whitespace().next_back()?.parse().ok()
}

/// Reads the report of the assembler. Every other line is a message.
fn read_report(log: &str) -> Result<Vec<Resources>, String> {
    let mut kernels: Vec<Resources> = Vec::new();
    for line in log.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Resources { name, ..Resources::default() });
        } else if let Some(spills) = number_before(line, "bytes spill stores") {
            kernels.last_mut().ok_or("spills without a kernel")?.spills = spills;
        } else if let Some(registers) = number_before(line, "registers") {
            kernels.last_mut().ok_or("registers without a kernel")?.registers = registers;
        } else if !line.starts_with("ptxas info") && !line.starts_with("Function properties") {
            return Err(line.to_owned());
        }
    }
    Ok(kernels)
}

/// Compiles kernels for an architecture on all processors, and returns their resources and all complaints.
fn compile_all(kernels: &[KernelSource], architecture: &str) -> (Vec<Resources>, Vec<String>) {
    let parts: Vec<&[KernelSource]> = kernels.chunks(KERNELS_PER_MODULE).collect();
    let next = AtomicUsize::new(0);
    let results = Mutex::new((Vec::new(), Vec::new()));
    let work = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let source = CudaC.module(&part.iter().collect::<Vec<_>>());
            let compiled = compile_source(&source, architecture, &["--ptxas-options=-v"]);
            let report = compiled.and_then(|(_, log)| read_report(&log));
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            match report {
                Ok(found) if found.len() == part.len() => results.0.extend(found),
                Ok(found) => {
                    results.1.push(format!("{} of {} kernels are reported", found.len(), part.len()));
                }
                Err(message) => results.1.push(message),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn assert_compiles(kernels: &[KernelSource], architecture: &str) {
    let (resources, complaints) = compile_all(kernels, architecture);
    assert!(complaints.is_empty(), "{architecture}, {} modules: {}", complaints.len(), complaints[0]);
    // NVRTC 12 keeps some values of the largest tiles in local memory.
    if std::env::var_os("ORTRAIN_CUDA_LIBRARIES").is_some() {
        return;
    }
    for Resources { name, spills, registers } in &resources {
        let kernel = kernels.iter().find(|kernel| *kernel.name == **name).expect("the kernel was compiled");
        // Tiles of products have vectors in shared memory.
        let is_tile = ["float2", "float4"].iter().any(|v| kernel.text.contains(&format!("__shared__ {v} ")));
        let allowed = if is_tile { 0 } else { MAX_SPILL_BYTES };
        assert!(*spills <= allowed, "{architecture}: {spills} bytes of spills in {}", kernel.text);
        assert!(
            !is_tile || *registers <= MAX_TILE_REGISTERS,
            "{architecture}: {registers} registers in {}",
            kernel.text
        );
    }
}

#[test]
fn every_kernel_of_the_suites_compiles() {
    search_environments();
    let kernels = suite_kernels(&CudaC, CudaC::CAPS, None);
    assert!(kernels.len() > 1000, "{} kernels", kernels.len());
    assert_compiles(&kernels, "sm_90");
    let some: Vec<KernelSource> = kernels.iter().step_by(10).cloned().collect();
    assert_compiles(&some, "sm_80");
    if std::env::var_os("ORTRAIN_CONFORM").is_some() {
        ["sm_80", "sm_120"].into_iter().for_each(|architecture| assert_compiles(&kernels, architecture));
    }
}

/// Returns the kernels of a training step, an optimizer step and an evaluation of each workload.
fn workload_kernels() -> Vec<KernelSource> {
    let printer = KernelPrinter::new(&CudaC, CudaC::CAPS);
    let zeros = |dims: &[i64]| vec![0; 4 * dims.iter().product::<i64>() as usize];
    for name in WORKLOADS {
        let artifacts = artifacts_of(name, zeros, false);
        let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
        let mut state =
            CheckpointState::from_checkpoint(artifacts.checkpoint.clone()).expect("it can be read");
        let eval = Some(source(&artifacts.eval_model));
        let options = ModuleOptions::from(RunOptions::default().backend(Arc::new(printer.clone())));
        let mut module =
            Module::new(source(&artifacts.training_model), &mut state, eval, options).expect("it can run");
        let optimizer = artifacts.optimizer_model.as_ref().expect("it was requested");
        Optimizer::new(source(optimizer), &mut state, &module).expect("it fits");
        let zeros_of = |info: &ValueInfo| {
            let dims = info.shape.as_ref().expect("the rank is known").iter().map(|dim| match dim {
                Dim::Known(size) => *size,
                Dim::Symbol(_) => 1,
            });
            let dims: Vec<usize> = dims.collect();
            let bytes = vec![0; info.dtype.size() * dims.iter().product::<usize>()];
            Tensor::new(info.dtype, dims, bytes.into()).expect("the bytes fit")
        };
        for training in [true, false] {
            let inputs: Vec<Tensor> = module.inputs(training).iter().map(zeros_of).collect();
            let inputs: Vec<InputView<'_>> = inputs.iter().map(InputView::from).collect();
            module.memory_need(&inputs, training).expect("it can be planned");
        }
    }
    printer.kernels()
}

#[test]
fn every_kernel_of_the_workloads_compiles() {
    search_environments();
    let kernels = workload_kernels();
    assert!(kernels.len() > 300, "{} kernels", kernels.len());
    assert_compiles(&kernels, "sm_90");
    let some: Vec<KernelSource> = kernels.iter().step_by(10).cloned().collect();
    assert_compiles(&some, "sm_80");
    if std::env::var_os("ORTRAIN_CONFORM").is_some() {
        ["sm_80", "sm_120"].into_iter().for_each(|architecture| assert_compiles(&kernels, architecture));
    }
}

/// A kernel with a warning is a failure of the tests above.
#[test]
fn messages_are_found() {
    search_environments();
    let source = "extern \"C\" __global__ void k(int* x) { int unused; x[0] = 1 / 0; }\n";
    let (_, log) = compile_source(source, "sm_90", &["--ptxas-options=-v"]).expect("it has warnings only");
    assert!(read_report(&log).is_err(), "{log}");
    let refused = compile_source("this is no source", "sm_90", &[]).expect_err("it is no source");
    assert!(refused.starts_with("NVRTC_ERROR_COMPILATION: "), "{refused}");
}
