//! Programs, drafts and memory plans as text.

use std::fmt::{self, Display, Formatter};

use rustc_hash::FxHashSet;

use crate::buffer::{Buffer, BufferId, BufferLocation};
use crate::cost::Cost;
use crate::draft::Draft;
use crate::gradient_modes::{GradientMode, GradientModes};
use crate::instruction::Instruction;
use crate::liveness::LiveRange;
use crate::operand::Nest;
use crate::program::{PlaneUse, Program};
use crate::scheduled::ScheduledInstruction;

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program: {} instructions, {} buffers, work {} bytes, constants {} bytes",
            self.instructions.len(),
            self.buffers.len(),
            self.work_bytes,
            self.constant_bytes()
        )?;
        let Cost { flops, bytes } = self.cost(GradientMode::Accumulate);
        writeln!(f, "  a run takes {flops} flops and moves at least {bytes} bytes")?;
        for PlaneUse { plane, bytes, .. } in &self.planes {
            writeln!(f, "  plane {}: {bytes} bytes", plane.0)?;
        }
        write_buffers(f, (&self.buffers, &self.instructions), (&self.inputs, &self.outputs), true)?;
        write_instructions(f, &self.buffers, &self.instructions)
    }
}

impl Program {
    /// Returns the memory plan as text: the offset, the bytes and the live range of each buffer of the work arena, in
    /// the order of their offsets.
    ///
    /// Buffers with overlapping live ranges share bytes only if an instruction overwrites its operand.
    #[must_use]
    pub fn memory_plan_text(&self) -> String {
        let liveness = Draft::from_program(self).liveness();
        let end = self.instructions.len() as isize;
        let mut rows: Vec<(usize, LiveRange, usize)> = liveness
            .iter()
            .filter_map(|(buffer, life)| match self.buffers[buffer].location {
                BufferLocation::Work(offset) => Some((offset, life, buffer)),
                BufferLocation::Plane(..) | BufferLocation::Constant(_) => None,
            })
            .collect();
        rows.sort_unstable_by_key(|&(offset, life, buffer)| (offset, life.first, buffer));
        let position = |at: isize| match at {
            -1 => "input".to_owned(),
            at if at == end => "output".to_owned(),
            at => at.to_string(),
        };
        let mut text = format!("work {} bytes, {end} instructions\n", self.work_bytes);
        text += "     offset       bytes    from      to  buffer\n";
        for (offset, LiveRange { first, last }, buffer) in rows {
            let Buffer { label, .. } = &self.buffers[buffer];
            let bytes = self.buffers[buffer].bytes();
            text += &format!(
                "  {offset:9}  {bytes:10}  {:>6}  {:>6}  b{buffer} {label:?}\n",
                position(first),
                position(last)
            );
        }
        text
    }
}

impl Display for Draft {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Draft { instructions, buffers, inputs, outputs, work_bytes, .. } = self;
        writeln!(f, "draft: {} instructions, {} buffers", instructions.len(), buffers.len())?;
        write_buffers(f, (buffers, instructions), (inputs, outputs), *work_bytes > 0)?;
        write_instructions(f, buffers, instructions)
    }
}

/// Writes the used buffers, with their locations once the memory is planned.
fn write_buffers(
    f: &mut Formatter<'_>,
    (buffers, instructions): (&[Buffer], &[ScheduledInstruction]),
    (inputs, outputs): (&[BufferId], &[BufferId]),
    is_planned: bool,
) -> fmt::Result {
    let location = |buffer: &Buffer| match buffer.location {
        BufferLocation::Work(offset) if is_planned => format!("work@{offset}"),
        BufferLocation::Work(_) => "work".to_owned(),
        BufferLocation::Plane(plane, offset) => format!("plane{}@{offset}", plane.0),
        BufferLocation::Constant(number) => format!("const{number}"),
    };
    let mut used: FxHashSet<BufferId> = inputs.iter().chain(outputs).copied().collect();
    for scheduled in instructions {
        scheduled.instruction.buffers(&mut |id, _| _ = used.insert(id));
    }
    for (id, buffer) in (0..).map(BufferId).zip(buffers).filter(|(id, _)| used.contains(id)) {
        let role = match (inputs.contains(&id), outputs.contains(&id)) {
            (true, _) => "  input",
            (_, true) => "  output",
            _ => "",
        };
        let Buffer { label, dtype, len, .. } = buffer;
        writeln!(f, "  b{}: {dtype}[{len}] {} {label:?}{role}", id.0, location(buffer))?;
    }
    Ok(())
}

/// Writes the reductions and the results of a nest.
fn write_computed(f: &mut Formatter<'_>, nest: &Nest) -> fmt::Result {
    for (i, reduction) in nest.reductions.iter().enumerate() {
        writeln!(f, "        reduce {i}: {:?} of %{}", reduction.op, reduction.value.0)?;
    }
    writeln!(f, "        {}", nest.expr)
}

fn write_instructions(
    f: &mut Formatter<'_>,
    buffers: &[Buffer],
    instructions: &[ScheduledInstruction],
) -> fmt::Result {
    for (k, ScheduledInstruction { instruction, gradient_modes: entries, node, .. }) in
        instructions.iter().enumerate()
    {
        let when = match *entries {
            GradientModes::ALL => "",
            other if other.contains(GradientMode::Overwrite) => " (overwrite)",
            _ => " (accumulate)",
        };
        let list =
            |ids: &[BufferId]| ids.iter().map(|id| format!("b{}", id.0)).collect::<Vec<_>>().join(", ");
        let ends = match instruction {
            Instruction::NestGroup(_) => String::new(),
            _ => format!(" {} <- {}", list(&instruction.writes()), list(&instruction.reads())),
        };
        write!(f, "  {k:3} {:10}{ends}{when}", instruction.name())?;
        let Cost { flops, bytes } = instruction.cost_over(buffers);
        writeln!(f, "  {}  ({flops} flops, {bytes} bytes)  # {node}", instruction.describe_sizes())?;
        if let Some(nest) = instruction.nest() {
            write_computed(f, nest)?;
        }
        if let Instruction::NestGroup(group) = instruction {
            for (k, nest) in group.nests.iter().enumerate() {
                let instruction = Instruction::Nest(nest.clone());
                let (writes, reads) = (list(&instruction.writes()), list(&instruction.reads()));
                writeln!(f, "      {writes} <- {reads}  {}", instruction.describe_sizes())?;
                // The following nests compute the same expression, except for constants.
                if group.nests.get(k + 1).is_none_or(|next| next.expr != nest.expr) {
                    write_computed(f, nest)?;
                }
            }
        }
        if let Instruction::Attention(attention) = instruction {
            for part in attention.parts() {
                writeln!(f, "        {}: {}", part.name, part.nest.expr)?;
            }
        }
    }
    Ok(())
}
