//! Horizontal fusion: merges independent nests of the same kind into one instruction.
//!
//! The unrolled steps of an optimizer are the same for every parameter. The first step of all parameters becomes one
//! instruction, then the second step. The program then has the number of instructions that a single parameter needs.

use std::hash::BuildHasher;

use ortrain_expr::{Inst, Reg, Type};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{Changed, Draft, Outcome, Target};
use crate::editor::join_node_names;
use crate::instructions::NestGroup;
use crate::last_uses::LastUses;
use crate::versions::Versions;
use crate::{Buffer, BufferId, BufferLocation, GradientModes, Instruction, ScheduledInstruction};

/// Maximum number of nests of a group. Some analyses visit each buffer of an instruction, or each pair of buffers.
const MAX_NESTS: usize = 1024;
/// Divisor for the memory condition: the work buffers have at most the bytes of the state divided by this number. Nests
/// of a group compute their results earlier than necessary, which costs little memory in such programs. Optimizers
/// satisfy the condition.
const STATE_TO_WORK_RATIO: usize = 16;

/// Merges nests with earlier nests that can run in parallel.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    if !has_mostly_state(draft) {
        return Ok(Changed(0));
    }
    let Draft { instructions, buffers, .. } = draft;
    let mut groups = Groups::new(buffers);
    instructions.drain(..).for_each(|scheduled| groups.add(scheduled));
    let joined = groups.groups.iter().map(|group| group.len() - 1).sum();
    instructions.extend(groups.groups.into_iter().map(merge_group));
    Ok(Changed(joined))
}

/// Returns true if the program has much state and few other values.
fn has_mostly_state(draft: &Draft) -> bool {
    let mut used = vec![false; draft.buffers.len()];
    for scheduled in &draft.instructions {
        scheduled.instruction.buffers(&mut |id, _| used[id.0 as usize] = true);
    }
    let (mut state, mut work) = (0usize, 0usize);
    for (buffer, _) in draft.buffers.iter().zip(used).filter(|(_, used)| *used) {
        match buffer.location {
            BufferLocation::Plane(..) => state = state.saturating_add(buffer.bytes()),
            BufferLocation::Work(_) => work = work.saturating_add(buffer.bytes()),
            BufferLocation::Constant(_) => {}
        }
    }
    state > 0 && work <= state / STATE_TO_WORK_RATIO
}

/// Kind of a nest: nests of one kind compute the same operations, in any order, on tensors of any size.
#[derive(PartialEq, Eq, Hash)]
struct NestKind {
    entries: GradientModes,
    is_map: bool,
    /// Sum of the hashes of the operations. After a hash collision, different nests share a group, which is correct
    /// too.
    operations: u64,
}

impl NestKind {
    /// Returns the kind of an instruction, if it may join a group.
    fn from_instruction(scheduled: &ScheduledInstruction) -> Option<NestKind> {
        let Instruction::Nest(nest) = &scheduled.instruction else { return None };
        if nest.segments.is_some() || nest.expr.can_fail() {
            return None;
        }
        let number_of = |&(inst, ty): &(Inst, Type)| match inst {
            Inst::Const(_) | Inst::Load(_) | Inst::Reduced(_) => 0,
            operation => FxBuildHasher.hash_one((operation.map_operands(|_| Reg(0)), ty)),
        };
        let operations = nest.expr.insts().iter().map(number_of).fold(0, u64::wrapping_add);
        Some(NestKind { entries: scheduled.gradient_modes, is_map: nest.is_map(), operations })
    }
}

/// Groups of instructions, and the last uses of bytes.
struct Groups<'a> {
    groups: Vec<Vec<ScheduledInstruction>>,
    /// Last group of each kind.
    last_group: FxHashMap<NestKind, usize>,
    /// First group that may still change.
    first_open_group: usize,
    spans: LastUses<'a>,
}

impl<'a> Groups<'a> {
    fn new(buffers: &'a [Buffer]) -> Groups<'a> {
        let spans = LastUses::new(buffers, (0..buffers.len() as u32).map(BufferId));
        Groups { groups: Vec::new(), last_group: FxHashMap::default(), first_open_group: 0, spans }
    }

    /// Adds an instruction to the last group of its kind, if it depends on nothing after that group, or else at the
    /// end.
    fn add(&mut self, scheduled: ScheduledInstruction) {
        let is_fixed = scheduled.instruction.has_side_effects();
        let kind = if is_fixed { None } else { NestKind::from_instruction(&scheduled) };
        let mut earliest = self.first_open_group;
        scheduled
            .instruction
            .buffers(&mut |id, used| earliest = earliest.max(self.spans.earliest_position(id, used)));
        let group_index = kind.as_ref().and_then(|kind| self.last_group.get(kind)).copied();
        let fits = |&at: &usize| at >= earliest && self.groups[at].len() < MAX_NESTS;
        let group_index = group_index.filter(fits);
        let at = group_index.unwrap_or(self.groups.len());
        scheduled.instruction.buffers(&mut |id, used| self.spans.record(id, used, at));
        match group_index {
            Some(at) => self.groups[at].push(scheduled),
            None => {
                self.groups.push(vec![scheduled]);
                self.last_group.extend(kind.map(|kind| (kind, at)));
            }
        }
        if is_fixed {
            self.first_open_group = self.groups.len();
        }
    }
}

/// Returns one instruction for all members of a group.
fn merge_group(mut members: Vec<ScheduledInstruction>) -> ScheduledInstruction {
    if members.len() == 1 {
        return members.swap_remove(0);
    }
    let node = join_node_names(members.iter().map(|member| &*member.node));
    let versions = Versions::merge_independent(members.iter().map(|member| &member.versions));
    let entries = members[0].gradient_modes;
    let nests = members.into_iter().filter_map(|member| match member.instruction {
        Instruction::Nest(nest) => Some(nest),
        _ => None,
    });
    let instruction = Instruction::from(NestGroup { nests: nests.collect() });
    ScheduledInstruction { instruction, gradient_modes: entries, node, versions }
}
