//! Context of the instruction that is being lowered.

use std::cell::Cell;

use ortrain_expr::DType;
use ortrain_program::BufferId;

use crate::bindings::Regions;
use crate::dialect::Dialect;
use crate::kernel::{Extent, Kernel};
use crate::launch::{Caps, Launch};
use crate::repr::{Repr, Value};

/// Context of the instruction that is being lowered.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    dialect: &'a dyn Dialect,
    caps: &'a Caps,
    regions: Regions<'a>,
    /// Position of the instruction.
    pub(crate) instruction: usize,
    /// True if nothing may be written after a failed guard.
    guarded: bool,
    /// True if the guards of the instruction must be checked.
    pub(crate) checks: bool,
    /// Scratch bytes that its launches share.
    scratch: Cell<usize>,
    /// Scratch words that stay reserved.
    permanent_words: Cell<usize>,
}

impl<'a> Context<'a> {
    /// Creates the context of the instruction at a position. Its guards are checked if `checks`, and nothing is written
    /// after a failed guard if `guarded`.
    pub(crate) fn new(
        (dialect, caps): (&'a dyn Dialect, &'a Caps),
        regions: Regions<'a>,
        instruction: usize,
        (checks, guarded): (bool, bool),
    ) -> Context<'a> {
        let (scratch, permanent_words) = (Cell::new(0), Cell::new(0));
        Context { dialect, caps, regions, instruction, guarded, checks, scratch, permanent_words }
    }

    /// Merges buffers of one memory into one binding, if the kernels have needed too many bindings. Returns false if this
    /// does not help; otherwise the instruction is printed again.
    pub(crate) fn merge_bindings(&mut self) -> bool {
        let merged = self.regions.exceeds_bindings.get() && self.regions.merge_nearest(self.caps);
        if merged {
            self.permanent_words.set(0);
        }
        merged
    }

    /// Returns the scratch bytes of all launches.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.get()
    }

    /// Returns true if the language has 64-bit floats.
    pub(crate) fn has_float64(&self) -> bool {
        self.dialect.has_float64()
    }

    /// Returns the type in which an instruction on elements of a type computes.
    ///
    /// # Errors
    /// For float64 in a language without it.
    pub(crate) fn float_repr(&self, dtype: DType) -> Result<Repr, String> {
        match dtype {
            DType::F64 if self.has_float64() => Ok(Repr::F64),
            DType::F64 => {
                let message = "it computes with float64, which this device does not support; use float32 or the cpu \
                               backend";
                Err(message.to_owned())
            }
            _ => Ok(Repr::F32),
        }
    }

    /// Returns an empty kernel.
    pub(crate) fn plain_kernel(&'a self) -> Kernel<'a> {
        Kernel::new(self.dialect, &self.regions, self.caps)
    }

    /// Returns an empty kernel that does nothing after a failed guard.
    pub(crate) fn kernel(&'a self) -> Kernel<'a> {
        let mut kernel = self.plain_kernel();
        if self.guarded {
            let failed = kernel.fault_word(0);
            kernel.line(&format!("if ({failed} != 0u) {{ return; }}"));
        }
        kernel
    }

    /// Returns an empty kernel of groups, which stores nothing after a failed guard.
    pub(crate) fn group_kernel(&'a self) -> Kernel<'a> {
        let mut kernel = self.plain_kernel();
        if self.guarded {
            let failed = kernel.fault_word(0);
            kernel.store_condition =
                Some(kernel.define(Value::new(format!("{failed} == 0u"), Repr::Bool)).text);
        }
        kernel
    }

    /// Reserves `words` of scratch memory shared by the launches of this instruction; returns the offset. Later
    /// reservations may reuse them.
    pub(crate) fn reserve(&self, words: usize) -> usize {
        let first = self.permanent_words.get();
        self.scratch.set(self.scratch.get().max(4 * (first + words)));
        first
    }

    /// Reserves `words` of scratch memory that later reservations of the instruction do not reuse; returns the offset.
    pub(crate) fn reserve_permanently(&self, words: usize) -> usize {
        let first = self.reserve(words);
        self.permanent_words.set(first + words);
        first
    }

    /// Returns true if two buffers of the instruction may share bytes.
    pub(crate) fn may_share_bytes(&self, a: BufferId, b: BufferId) -> bool {
        self.regions.region_of(a) == self.regions.region_of(b)
    }

    /// Returns the index of the first element of a buffer in its binding.
    pub(crate) fn first_element(&self, id: BufferId) -> isize {
        self.regions.first_element(id)
    }

    /// Returns the launch of a kernel with one invocation per point.
    pub(crate) fn finish(&self, kernel: Kernel<'_>, points: u64) -> Result<Launch, String> {
        kernel.finish(Extent::Points(points), self.instruction, self.scratch.get())
    }

    /// Returns the launch of a kernel of whole groups.
    pub(crate) fn finish_groups(&self, kernel: Kernel<'_>, groups: u64) -> Result<Launch, String> {
        kernel.finish(Extent::Groups(groups), self.instruction, self.scratch.get())
    }
}
