//! From programs to launches.

use std::cell::Cell;

use ortrain_program::{BufferId, Instruction, Place, Program, ScheduledInstruction};

use crate::bindings::Regions;
use crate::dialect::Dialect;
use crate::dialect::Repr;
use crate::kernel::{Extent, Kernel, Value};
use crate::launch::{Caps, Launch, Lowered, Unsupported};
use crate::{attention, conv, matmul, nest, scatter, window};

/// The surroundings of an instruction that is printed.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    dialect: &'a dyn Dialect,
    caps: &'a Caps,
    regions: Regions<'a>,
    /// The place of the instruction.
    pub(crate) instruction: usize,
    /// True if nothing may be written after a guard has failed.
    guarded: bool,
    /// True if its guards are to be checked.
    pub(crate) checks: bool,
    /// Bytes that its launches share.
    scratch: Cell<usize>,
    /// Words of these that stay.
    kept: Cell<usize>,
}

impl<'a> Context<'a> {
    /// An empty kernel.
    pub(crate) fn plain_kernel(&'a self) -> Kernel<'a> {
        Kernel::new(self.dialect, &self.regions, self.caps)
    }

    /// An empty kernel that does nothing after a guard has failed.
    pub(crate) fn kernel(&'a self) -> Kernel<'a> {
        let mut kernel = self.plain_kernel();
        if self.guarded {
            let failed = kernel.fault_word(0);
            kernel.line(&format!("if ({failed} != 0u) {{ return; }}"));
        }
        kernel
    }

    /// An empty kernel of groups, which stores nothing after a guard has failed.
    pub(crate) fn group_kernel(&'a self) -> Kernel<'a> {
        let mut kernel = self.plain_kernel();
        if self.guarded {
            let failed = kernel.fault_word(0);
            kernel.live = Some(kernel.define(Value::new(format!("{failed} == 0u"), Repr::Bool)).text);
        }
        kernel
    }

    /// Makes room for so many words that launches of the instruction hand to later ones of it. The first one of them.
    pub(crate) fn reserve(&self, words: usize) -> usize {
        let first = self.kept.get();
        self.scratch.set(self.scratch.get().max(4 * (first + words)));
        first
    }

    /// The same for words that all later launches of the instruction leave alone.
    pub(crate) fn keep(&self, words: usize) -> usize {
        let first = self.reserve(words);
        self.kept.set(first + words);
        first
    }

    /// True if two buffers of the instruction may share bytes.
    pub(crate) fn share(&self, a: BufferId, b: BufferId) -> bool {
        self.regions.of(a) == self.regions.of(b)
    }

    /// The number of the first element of a buffer in its binding.
    pub(crate) fn first(&self, id: BufferId) -> isize {
        self.regions.first(id)
    }

    /// The launch of a kernel of one invocation per point.
    pub(crate) fn finish(&self, kernel: Kernel<'_>, points: u64) -> Result<Launch, String> {
        kernel.finish(Extent::Points(points), self.instruction, self.scratch.get())
    }

    /// The launch of a kernel of whole groups.
    pub(crate) fn finish_groups(&self, kernel: Kernel<'_>, groups: u64) -> Result<Launch, String> {
        kernel.finish(Extent::Groups(groups), self.instruction, self.scratch.get())
    }
}

/// The launches of a program, in a language and for a device. The guards of the instructions at `checked` hold: somebody has looked.
///
/// Launches of both entries are there, in the order of instructions; [`Launch::instruction`] says whose each one is. What is
/// printed depends on shapes and on which buffers share bytes, and not on where buffers lie.
///
/// # Errors
/// The first instruction that cannot be printed, by its node.
pub fn lower(
    program: &Program,
    checked: &[usize],
    caps: &Caps,
    dialect: &dyn Dialect,
) -> Result<Lowered, Unsupported> {
    let mut lowered = Lowered::default();
    let mut can_fail = false;
    for (at, scheduled) in program.instructions.iter().enumerate() {
        let ScheduledInstruction { instruction, node, .. } = scheduled;
        if instruction.is_empty() {
            continue;
        }
        let checks = instruction.can_fail() && !checked.contains(&at);
        can_fail |= checks;
        let in_plane = |id: &BufferId| matches!(program.buffer(*id).place, Place::Plane(..));
        let guarded = checks || (can_fail && instruction.writes().iter().any(in_plane));
        for part in scheduled.parts() {
            let printed = of_instruction((program, at, &part.instruction), (checks, guarded), caps, dialect);
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

fn of_instruction(
    (program, at, instruction): (&Program, usize, &Instruction),
    (checks, guarded): (bool, bool),
    caps: &Caps,
    dialect: &dyn Dialect,
) -> Result<(Vec<Launch>, usize), String> {
    if matches!(instruction, Instruction::Yield(_)) {
        return Ok((Vec::new(), 0));
    }
    let regions = Regions::new(program, instruction, caps)?;
    let (scratch, kept) = (Cell::new(0), Cell::new(0));
    let mut cx = Context { dialect, caps, regions, instruction: at, checks, guarded, scratch, kept };
    let mut made = printed(&cx, instruction);
    // Buffers of one memory may share a binding, although nothing else asks for it.
    while made.is_err() && cx.regions.crowded.get() && cx.regions.join(caps) {
        cx.kept.set(0);
        made = printed(&cx, instruction);
    }
    Ok((made?, cx.scratch.get()))
}

fn printed(cx: &Context<'_>, instruction: &Instruction) -> Result<Vec<Launch>, String> {
    match instruction {
        Instruction::Nest(nest) => nest::launches(cx, nest, &|_, _| Ok(Vec::new())),
        Instruction::NestGroup(_) => Err("a group whose nests are not printed one by one".to_owned()),
        Instruction::MatMul(m) => matmul::launches(cx, m),
        Instruction::Conv(c) => conv::launches(cx, c),
        Instruction::Attention(a) => attention::launches(cx, a),
        Instruction::Window(w) => window::launches(cx, w),
        Instruction::ScatterAdd(s) => scatter::launches(cx, s),
        Instruction::Yield(_) => Ok(Vec::new()),
    }
}
