//! Kernels of programs, for tests of their text.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use ortrain_codegen::{Caps, Dialect, KernelSource, lower};
use ortrain_expr::{DType, Precision};
use ortrain_program::{
    Backend, Bf16Fallback, Executable, Program, Reference, Target, UnsupportedOnBackend, UnsupportedPrecision,
};

use crate::programs::{Kinds, RandomProgram, Size};
use crate::suites::{
    self, Report, attention, attributes, captured, convolutions, groups, loops, narrowing, normalizations,
    panels, poolings, precision, sequences,
};

/// Backend that prints kernels and computes like the reference evaluator. Its copies, also for other precisions, print
/// to the same set.
#[derive(Clone, Debug)]
pub struct KernelPrinter {
    dialect: &'static dyn Dialect,
    caps: Caps,
    kernels: Arc<Mutex<HashSet<KernelSource>>>,
}

impl KernelPrinter {
    /// Creates a backend that prints in a language.
    #[must_use]
    pub fn new(dialect: &'static dyn Dialect, caps: Caps) -> KernelPrinter {
        KernelPrinter { dialect, caps, kernels: Arc::default() }
    }

    /// Returns the kernels of all compiled programs, sorted by name.
    #[must_use]
    pub fn kernels(&self) -> Vec<KernelSource> {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kernels: Vec<KernelSource> = kernels.iter().cloned().collect();
        kernels.sort_by(|a, b| a.name.cmp(&b.name));
        kernels
    }
}

impl Backend for KernelPrinter {
    fn name(&self) -> &'static str {
        "printing"
    }

    fn with_precision(
        &self,
        _: Precision,
        _: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        Ok(Arc::new(self.clone()))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        None
    }

    fn target(&self) -> Target {
        Target::PLAIN
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        let lowered = lower(&program, &[], &self.caps, self.dialect);
        let lowered = lowered.map_err(|unsupported| UnsupportedOnBackend {
            backend: "printing",
            node: unsupported.node,
            instruction: unsupported.instruction,
            reason: unsupported.reason,
        })?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.extend(lowered.launches.into_iter().map(|launch| launch.kernel));
        Reference.compile(program)
    }
}

/// Returns the kernels of all suites in a language, sorted by name. A language may refuse one element type.
///
/// # Panics
/// When a suite fails, or when cases of another type are refused.
#[must_use]
pub fn suite_kernels(dialect: &'static dyn Dialect, caps: Caps, refused: Option<DType>) -> Vec<KernelSource> {
    let printer = KernelPrinter::new(dialect, caps);
    let backend: Arc<dyn Backend> = Arc::new(printer.clone());
    let passes = |report: &Report| match refused {
        Some(dtype) => report.passes_without(dtype),
        None => report.passes(),
    };
    passes(&suites::cases(&backend));
    passes(&attention::agree(&backend));
    passes(&convolutions::agree(&backend, 16));
    passes(&poolings::agree(&backend, 24));
    passes(&normalizations::agree(&backend, 24));
    passes(&attributes::agree(&backend, 24));
    let others = [
        captured::agree,
        groups::agree,
        loops::agree,
        narrowing::agree,
        panels::agree,
        precision::agree,
        sequences::agree,
    ];
    others.into_iter().for_each(|agree| passes(&agree(&backend)));
    let kinds = Kinds { jumps: false, narrow: false, ..Kinds::ALL };
    suites::random_programs(&backend, kinds, 0..40).passes();
    for precision in Precision::ALL {
        let kinds = Kinds { jumps: false, size: Size::Large, ..Kinds::ALL };
        let large = |seed| Arc::new(RandomProgram::new(seed, kinds).precision(precision).finish(true));
        for seed in 0..40 {
            backend.compile(large(seed)).expect("random programs are supported");
        }
    }
    printer.kernels()
}
