//! Makes one instruction of alike nests that need nothing of each other.
//!
//! An optimizer that is written out for each parameter takes the same steps for every one of them. Here the first step of all
//! parameters becomes one instruction, then the second: a program has as many instructions as one parameter needs.

use std::hash::BuildHasher;

use ortrain_expr::{Inst, Reg, Type};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{Changed, Draft, Outcome, Target};
use crate::editor::node_names;
use crate::instructions::NestGroup;
use crate::spans::Spans;
use crate::versions::Versions;
use crate::{Buffer, BufferId, GradientModes, Instruction, Place, ScheduledInstruction};

/// Most nests of a group. What is asked of an instruction is answered for each of its buffers, and sometimes for each pair.
const MAX_NESTS: usize = 1024;
/// Nests of a group make their results earlier than others need them. That takes little memory in a program whose buffers of the
/// arena have together at most one part in so many of the bytes of its state, as those of an optimizer have.
const SHARE: usize = 16;

/// Joins nests with an earlier one that they could run beside.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    if !is_update(draft) {
        return Ok(Changed(0));
    }
    let Draft { instructions, buffers, .. } = draft;
    let mut groups = Groups::new(buffers);
    instructions.drain(..).for_each(|scheduled| groups.add(scheduled));
    let joined = groups.places.iter().map(|place| place.len() - 1).sum();
    instructions.extend(groups.places.into_iter().map(group));
    Ok(Changed(joined))
}

/// True if a program has much state and few other values.
fn is_update(draft: &Draft) -> bool {
    let mut used = vec![false; draft.buffers.len()];
    for scheduled in &draft.instructions {
        scheduled.instruction.buffers(&mut |id, _| used[id.0 as usize] = true);
    }
    let (mut state, mut work) = (0usize, 0usize);
    for (buffer, _) in draft.buffers.iter().zip(used).filter(|(_, used)| *used) {
        match buffer.place {
            Place::Plane(..) => state = state.saturating_add(buffer.bytes()),
            Place::Work(_) => work = work.saturating_add(buffer.bytes()),
            Place::Constant(_) => {}
        }
    }
    state > 0 && work <= state / SHARE
}

/// Nests that compute the same of other sizes: with the same operations, in whatever order.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    entries: GradientModes,
    is_map: bool,
    /// A sum of numbers of the operations. Where it is that of others by chance, different nests are a group as well.
    operations: u64,
}

impl Kind {
    /// The kind of an instruction, if it may run beside earlier ones.
    fn of(scheduled: &ScheduledInstruction) -> Option<Kind> {
        let Instruction::Nest(nest) = &scheduled.instruction else { return None };
        if nest.segments.is_some() || nest.expr.can_fail() {
            return None;
        }
        let number = |&(inst, ty): &(Inst, Type)| match inst {
            Inst::Const(_) | Inst::Load(_) | Inst::Reduced(_) => 0,
            operation => FxBuildHasher.hash_one((operation.map_operands(|_| Reg(0)), ty)),
        };
        let operations = nest.expr.insts().iter().map(number).fold(0, u64::wrapping_add);
        Some(Kind { entries: scheduled.entries, is_map: nest.is_map(), operations })
    }
}

/// Instructions that run at the same place, and who used which bytes last.
struct Groups<'a> {
    places: Vec<Vec<ScheduledInstruction>>,
    /// The last place of each kind.
    last: FxHashMap<Kind, usize>,
    /// Nothing goes before this place.
    floor: usize,
    spans: Spans<'a>,
}

impl<'a> Groups<'a> {
    fn new(buffers: &'a [Buffer]) -> Groups<'a> {
        let spans = Spans::new(buffers, (0..buffers.len() as u32).map(BufferId));
        Groups { places: Vec::new(), last: FxHashMap::default(), floor: 0, spans }
    }

    /// Adds an instruction: beside those of its kind, if it needs nothing that comes after them, else at the end.
    fn add(&mut self, scheduled: ScheduledInstruction) {
        let stays = scheduled.instruction.must_stay();
        let kind = if stays { None } else { Kind::of(&scheduled) };
        let mut earliest = self.floor;
        scheduled.instruction.buffers(&mut |id, used| earliest = earliest.max(self.spans.earliest(id, used)));
        let beside = kind.as_ref().and_then(|kind| self.last.get(kind)).copied();
        let fits = |&at: &usize| at >= earliest && self.places[at].len() < MAX_NESTS;
        let beside = beside.filter(fits);
        let at = beside.unwrap_or(self.places.len());
        scheduled.instruction.buffers(&mut |id, used| self.spans.note(id, used, at));
        match beside {
            Some(at) => self.places[at].push(scheduled),
            None => {
                self.places.push(vec![scheduled]);
                self.last.extend(kind.map(|kind| (kind, at)));
            }
        }
        if stays {
            self.floor = self.places.len();
        }
    }
}

/// The instruction that is all of these.
fn group(mut members: Vec<ScheduledInstruction>) -> ScheduledInstruction {
    if members.len() == 1 {
        return members.swap_remove(0);
    }
    let node = node_names(members.iter().map(|member| &*member.node));
    let versions = Versions::of_all(members.iter().map(|member| &member.versions));
    let entries = members[0].entries;
    let nests = members.into_iter().filter_map(|member| match member.instruction {
        Instruction::Nest(nest) => Some(nest),
        _ => None,
    });
    let instruction = Instruction::from(NestGroup { nests: nests.collect() });
    ScheduledInstruction { instruction, entries, node, versions }
}
