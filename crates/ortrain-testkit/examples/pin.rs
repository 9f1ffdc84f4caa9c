//! Bit patterns of the results of every case of the kit: a line for each graph, forward and backward.
//!
//! A change of passes without a change of results leaves all lines unchanged; `make pin` compares them. A
//! line has the bytes of the arena, the number of instructions, and hashes of the results at one and at two
//! threads.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::sync::Arc;

use ortrain_cpu::Cpu;
use ortrain_graph::{Graph, Tensor};
use ortrain_program::{Backend, Precision};
use ortrain_testkit::{cases, compile_with_precision, gradient_graph, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend: Arc<dyn Backend> = Arc::new(Cpu::new()?);
    let mut lines = String::new();
    for threads in [1, 2] {
        Cpu::set_num_threads(threads);
        for case in cases() {
            let gradients = gradient_graph(&case).ok().map(|graph| ("backward", graph));
            for (direction, graph) in [("forward", case.graph.clone())].into_iter().chain(gradients) {
                let actual = result_of(&graph, &case.inputs, &backend);
                writeln!(lines, "{} ({}) {direction} at {threads}: {actual}", case.operator, case.name)?;
            }
        }
    }
    std::io::stdout().write_all(lines.as_bytes())?;
    Ok(())
}

/// Returns the size of a program and a hash of its results, or the error.
fn result_of(graph: &Graph, inputs: &[Tensor], backend: &Arc<dyn Backend>) -> String {
    let program = match compile_with_precision(graph.clone(), inputs, Precision::F32) {
        Ok(program) => format!("{} bytes, {} instructions", program.work_bytes, program.instructions.len()),
        Err(reason) => reason,
    };
    match run(graph, inputs, backend.clone()) {
        Ok(results) => {
            let mut hasher = DefaultHasher::new();
            for tensor in &results {
                (tensor.dims(), &tensor.data()[..]).hash(&mut hasher);
            }
            format!("{program}, {:016x}", hasher.finish())
        }
        Err(reason) => format!("{program}, {reason}"),
    }
}
