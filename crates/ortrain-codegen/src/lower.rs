//! Lowering of programs to launches.

use ortrain_program::{BufferId, BufferLocation, Instruction, Program, ScheduledInstruction};

use crate::bindings::Regions;
use crate::context::Context;
use crate::dialect::Dialect;
use crate::launch::{Caps, Launch, Lowered, Unsupported};
use crate::{attention, conv, matmul, nest, quantized_matmul, scatter, window};

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
    let mut cx = Context::new((dialect, caps), regions, at, (checks, guarded));
    let mut launches = print_instruction(&cx, instruction);
    while launches.is_err() && cx.merge_bindings() {
        launches = print_instruction(&cx, instruction);
    }
    Ok((launches?, cx.scratch_bytes()))
}

fn print_instruction(cx: &Context<'_>, instruction: &Instruction) -> Result<Vec<Launch>, String> {
    match instruction {
        Instruction::Nest(nest) => nest::launches(cx, nest, &|_, _| Ok(Vec::new())),
        Instruction::NestGroup(_) => Err("a group is lowered nest by nest".to_owned()),
        Instruction::MatMul(m) => matmul::launches(cx, m),
        Instruction::QuantizedMatMul(m) => quantized_matmul::launches(cx, m),
        Instruction::Conv(c) => conv::launches(cx, c),
        Instruction::IntegerProduct(p) => nest::launches(cx, &p.as_nest(), &|_, _| Ok(Vec::new())),
        Instruction::Attention(a) => attention::launches(cx, a),
        Instruction::Window(w) => window::launches(cx, w),
        Instruction::ScatterAdd(s) => scatter::launches(cx, s),
        Instruction::Yield(_) => Ok(Vec::new()),
    }
}
