//! Code shared by several tile programs, for nests that differ only in the offsets and lengths of their buffers.
//!
//! The steps of a recurrent network and the layers of a transformer have most of their nests in common. A look-up takes
//! less time than a compilation, and code that runs again is in the instruction cache.

use std::sync::{Arc, Mutex, PoisonError};

use ortrain_expr::{Access, Nest};
use rustc_hash::FxHashMap;

use super::jit::CodeMemory;
use super::loop_plan::{FirstStageOutputs, LoopOrder, LoopPlan};
use super::program::Code;
use crate::candidates::{ALL_KERNELS, KernelFilter};
use crate::isa::Isa;
use crate::settings::TileMode;

/// Everything that code depends on.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    /// The nest, with the offsets and lengths of all accesses set to zero.
    nest: Nest,
    drive: LoopOrder,
    outside: Vec<usize>,
    along: Vec<usize>,
    ahead: FirstStageOutputs,
    isa: Isa,
}

impl Key {
    fn new(plan: &LoopPlan<'_>, ahead: &FirstStageOutputs, isa: Isa) -> Key {
        let nowhere = |access: &Access| Access { offset: 0, len: 0, ..access.clone() };
        let LoopPlan { nest, loop_order: drive, outer_axes: outside, tile_axes: along } = *plan;
        let (outside, along) = (outside.to_vec(), along.to_vec());
        Key { nest: nest.map_operands(nowhere), drive, outside, along, ahead: ahead.clone(), isa }
    }
}

/// Code shared by the kernels of a program.
#[derive(Debug, Default)]
struct CodeCache {
    entries: Mutex<FxHashMap<Key, Arc<Code>>>,
    memory: Arc<CodeMemory>,
}

/// Compiles kernels that share code: equal code is compiled once, and all code is stored together. Several threads may
/// compile at the same time. Kernels may run after `make` has returned. If the system provides no memory for machine
/// code, kernels are compiled again for the interpreter.
///
/// # Errors
/// The errors of `make`.
pub fn with_shared_code<T, E>(
    isa: Isa,
    mode: TileMode,
    kernels: &KernelFilter,
    make: impl Fn(Compiler<'_>) -> Result<T, E>,
) -> Result<T, E> {
    let codes = CodeCache::default();
    let result = make(Compiler { isa, mode, kernels, cache: Some(&codes) })?;
    if codes.memory.finish() {
        return Ok(result);
    }
    make(Compiler { isa, mode: TileMode::Interpreter, kernels, cache: Some(&CodeCache::default()) })
}

/// Compiler of kernels: an instruction-set level and a filter of kernels, for one kernel or for [several
/// kernels](with_shared_code).
#[derive(Clone, Copy, Debug)]
pub struct Compiler<'a> {
    isa: Isa,
    mode: TileMode,
    kernels: &'a KernelFilter,
    cache: Option<&'a CodeCache>,
}

impl From<Isa> for Compiler<'_> {
    fn from(isa: Isa) -> Self {
        Compiler { isa, mode: TileMode::MachineCode, kernels: &ALL_KERNELS, cache: None }
    }
}

impl<'a> Compiler<'a> {
    /// Returns a compiler that filters kernels.
    #[must_use]
    pub fn with_kernels(self, kernels: &'a KernelFilter) -> Self {
        Compiler { kernels, ..self }
    }

    /// Returns the filter of kernels.
    pub(crate) fn kernels(self) -> &'a KernelFilter {
        self.kernels
    }

    /// Returns the instruction-set level.
    #[must_use]
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Returns a compiler of interpreted kernels.
    #[cfg(test)]
    pub(super) fn without_machine_code(isa: Isa) -> Self {
        Compiler { mode: TileMode::Interpreter, ..isa.into() }
    }

    /// Returns true if kernels use machine code.
    fn uses_machine_code(self) -> bool {
        self.mode == TileMode::MachineCode
    }

    /// Returns the cached code of an equal plan, or the code that `make` compiles. `make` receives memory for machine
    /// code, if the compiler uses machine code.
    pub(super) fn get_or_compile(
        self,
        plan: &LoopPlan<'_>,
        ahead: &FirstStageOutputs,
        make: impl Fn(Option<&Arc<CodeMemory>>) -> Result<Code, String>,
    ) -> Result<Arc<Code>, String> {
        let Some(codes) = self.cache else {
            let memory = Arc::default();
            let code = make(self.uses_machine_code().then_some(&memory))?;
            return if memory.finish() { Ok(code) } else { make(None) }.map(Arc::new);
        };
        let key = Key::new(plan, ahead, self.isa);
        let known = || codes.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = known().get(&key) {
            return Ok(Arc::clone(code));
        }
        // Another thread may compile an equal plan at the same time: the first one to finish is shared.
        let code = Arc::new(make(self.uses_machine_code().then_some(&codes.memory))?);
        Ok(Arc::clone(known().entry(key).or_insert(code)))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ortrain_expr::{Builder, DType, Load, Type};

    use super::*;
    use crate::tile::TileProgram;

    /// `to = from * factor` over matrices of `columns` columns, in buffers with data from the offsets `from` and `to`
    /// on.
    fn scale_program(
        compiler: Compiler<'_>,
        columns: usize,
        factor: f64,
        (from, to): (usize, usize),
    ) -> TileProgram {
        let dims = [6, columns];
        let access = |offset: usize| Access {
            offset,
            len: offset + 6 * columns,
            ..Access::contiguous(DType::F32, &dims)
        };
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let factor = b.constant(Type::F32, factor);
        let product = b.mul(x, factor);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(access(from))],
            expr: b.finish(&[product]),
            reductions: Vec::new(),
            stores: vec![access(to)],
        };
        let plan = LoopPlan { nest: &nest, loop_order: LoopOrder::Map, outer_axes: &[], tile_axes: &[0, 1] };
        TileProgram::new(&plan, compiler).expect("valid nest")
    }

    #[test]
    fn nests_at_other_offsets_share_code() {
        let isa = Isa::detect().unwrap();
        let tapes = with_shared_code(isa, TileMode::MachineCode, &ALL_KERNELS, |compiler| {
            let others = [((17, 300), 50, 2.0), ((0, 0), 51, 2.0), ((0, 0), 50, -2.0)];
            let first = scale_program(compiler, 50, 2.0, (0, 0));
            Ok::<_, String>((
                first,
                others.map(|(offsets, columns, factor)| scale_program(compiler, columns, factor, offsets)),
            ))
        });
        let (first, [shifted, wider, negated]) = tapes.expect("valid nests");
        for (other, shared) in [
            (shifted, true),
            (wider, false),
            (negated, false),
            (scale_program(isa.into(), 50, 2.0, (0, 0)), false),
        ] {
            assert_eq!(Arc::ptr_eq(&first.code, &other.code), shared);
        }
    }

    #[test]
    fn kernels_are_interpreted_without_code_memory() {
        let isa = Isa::detect().unwrap();
        let tapes = RefCell::new(Vec::new());
        let result = with_shared_code(isa, TileMode::MachineCode, &ALL_KERNELS, |compiler| {
            let program = scale_program(compiler, 50, 2.0, (0, 0));
            // Executable memory accepts no more code, so the system refuses at the end.
            if let Some(codes) = compiler.cache.filter(|_| compiler.uses_machine_code()) {
                assert!(codes.memory.finish());
                tapes.borrow_mut().push(scale_program(compiler, 51, 2.0, (0, 0)));
            }
            Ok::<_, String>(program)
        });
        let is_native = |tape: &TileProgram| {
            tape.stages[0].body.iter().any(|op| matches!(op.kind, crate::tile::op::Kind::Native(_)))
        };
        assert!(!is_native(&result.expect("valid nest")));
        assert!(tapes.borrow().iter().all(|tape| is_native(tape) || isa == Isa::PORTABLE));
    }
}
