//! NVIDIA's compiler accepts every kernel of the suites without a message, and its code keeps values in registers.
//!
//! No GPU is needed. The environment variable `ORTRAIN_CONFORM` adds architectures. The compiler is the package
//! `nvidia-cuda-nvrtc` of the Python environment for tests.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ortrain_codegen::{CudaC, Dialect as _, KernelSource};
use ortrain_cuda::{compile_source, search_packages};
use ortrain_testkit::kernels::suite_kernels;

/// Number of kernels that are compiled together.
const KERNELS_PER_MODULE: usize = 48;
/// Maximum number of registers per thread of a kernel for tiles of products. Two blocks then run on a multiprocessor.
const MAX_TILE_REGISTERS: u64 = 128;
/// Maximum bytes that other kernels store in local memory for lack of registers.
const MAX_SPILL_BYTES: u64 = 16;

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

/// A kernel with a warning is a failure of the test above.
#[test]
fn messages_are_found() {
    search_environments();
    let source = "extern \"C\" __global__ void k(int* x) { int unused; x[0] = 1 / 0; }\n";
    let (_, log) = compile_source(source, "sm_90", &["--ptxas-options=-v"]).expect("it has warnings only");
    assert!(read_report(&log).is_err(), "{log}");
    let refused = compile_source("this is no source", "sm_90", &[]).expect_err("it is no source");
    assert!(refused.starts_with("NVRTC_ERROR_COMPILATION: "), "{refused}");
}
