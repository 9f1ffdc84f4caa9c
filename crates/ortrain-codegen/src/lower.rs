//! Lowering of programs to launches.

use std::cell::Cell;

use ortrain_expr::DType;
use ortrain_program::{BufferId, BufferLocation, Instruction, Program, ScheduledInstruction};

use crate::bindings::Regions;
use crate::dialect::Dialect;
use crate::dialect::Repr;
use crate::kernel::{Extent, Kernel, Value};
use crate::launch::{Caps, Launch, Lowered, Unsupported};
use crate::{attention, conv, matmul, nest, scatter, window};

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

/// Lowers a program to launches, in a language and for a device. The guards of the instructions at `checked` are
/// already checked.
///
/// The result contains the launches of both gradient modes, in the order of instructions; [`Launch::instruction`] names
/// the instruction of each. The kernels depend on shapes and on which buffers share bytes, but not on the offsets of
/// buffers.
///
/// # Errors
/// The first unsupported instruction, by its node.
pub fn lower(
    program: &Program,
    checked: &[usize],
    caps: &Caps,
    dialect: &dyn Dialect,
) -> Result<Lowered, Unsupported> {
    let mut lowered = Lowered::default();
    let mut can_fail = caps.has_late_faults;
    for (at, scheduled) in program.instructions.iter().enumerate() {
        let ScheduledInstruction { instruction, node, .. } = scheduled;
        let checks = instruction.can_fail() && !checked.contains(&at);
        if instruction.is_empty() || (!checks && stores_nothing(instruction)) {
            continue;
        }
        can_fail |= checks;
        let in_plane = |id: &BufferId| matches!(program.buffer(*id).location, BufferLocation::Plane(..));
        let guarded = checks || (can_fail && instruction.writes().iter().any(in_plane));
        for part in scheduled.split_group() {
            let printed =
                lower_instruction((program, at, &part.instruction), (checks, guarded), caps, dialect);
            let (launches, scratch) = printed.map_err(|reason| Unsupported {
                node: node.to_string(),
                instruction: instruction.name(),
                reason,
            })?;
            lowered.launches.extend(launches);
            lowered.scratch = lowered.scratch.max(scratch);
        }
    }
    Ok(lowered)
}

/// Returns true for a nest without stores: only its guards have an effect.
fn stores_nothing(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Nest(nest) if nest.stores.is_empty())
}

fn lower_instruction(
    (program, at, instruction): (&Program, usize, &Instruction),
    (checks, guarded): (bool, bool),
    caps: &Caps,
    dialect: &dyn Dialect,
) -> Result<(Vec<Launch>, usize), String> {
    if matches!(instruction, Instruction::Yield(_)) {
        return Ok((Vec::new(), 0));
    }
    let regions = Regions::new(program, instruction, caps)?;
    let (scratch, permanent_cell) = (Cell::new(0), Cell::new(0));
    let mut cx = Context {
        dialect,
        caps,
        regions,
        instruction: at,
        checks,
        guarded,
        scratch,
        permanent_words: permanent_cell,
    };
    let mut launches = print_instruction(&cx, instruction);
    // Buffers of one memory may share a binding if there are too few bindings.
    while launches.is_err() && cx.regions.exceeds_bindings.get() && cx.regions.merge_nearest(caps) {
        cx.permanent_words.set(0);
        launches = print_instruction(&cx, instruction);
    }
    Ok((launches?, cx.scratch.get()))
}

fn print_instruction(cx: &Context<'_>, instruction: &Instruction) -> Result<Vec<Launch>, String> {
    match instruction {
        Instruction::Nest(nest) => nest::launches(cx, nest, &|_, _| Ok(Vec::new())),
        Instruction::NestGroup(_) => Err("a group is lowered nest by nest".to_owned()),
        Instruction::MatMul(m) => matmul::launches(cx, m),
        Instruction::Conv(c) => conv::launches(cx, c),
        Instruction::Attention(a) => attention::launches(cx, a),
        Instruction::Window(w) => window::launches(cx, w),
        Instruction::ScatterAdd(s) => scatter::launches(cx, s),
        Instruction::Yield(_) => Ok(Vec::new()),
    }
}
