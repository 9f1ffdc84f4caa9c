//! Precomputes derivatives in the forward pass.
//!
//! The backward pass multiplies a gradient by a factor of forward values, for example by the slope of an activation. If
//! several of these values would be saved only for the factor, the factor is computed once all of them exist, and only
//! the factor is saved. The work is the same.
//!
//! `g * a + g * b` becomes `g * (a + b)`: one rounding instead of several.

use ortrain_expr::{DType, Inst, Type, split_derivative};

use super::{Changed, Draft, Outcome, Target};
use crate::align;
use crate::buffer::{add_work, distinct};
use crate::editor::{Editor, SLOTS_PER_INSTRUCTION};
use crate::operand::loaded_buffers;
use crate::rewrite::inline_nest::{is_injective, with_expression};
use crate::scheduled::VersionCounter;
use crate::{Buffer, BufferId, GradientModes, Instruction, Nest, Operand, ScheduledInstruction};

/// Maximum ratio of the saved bytes to the bytes that they replace.
const MAX_SAVED_RATIO: (usize, usize) = (3, 4);

/// Placeholder for the buffer of a slope before its allocation.
const PLACEHOLDER: BufferId = BufferId(u32::MAX);

/// Map that is split in two: the slope, and its product with the incoming gradient.
struct Slope {
    /// Position of the map, and position of the producer of the last value that the slope needs.
    at: usize,
    after: usize,
    slope: Nest,
    product: Nest,
}

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let work = Editor::new(draft);
    let slopes = work.find_slopes();
    let mut slots = work.slots;
    let changes = slopes.len();
    split_maps(slopes, &mut slots, &mut draft.buffers);
    draft.instructions = slots.into_iter().flatten().collect();
    Ok(Changed(changes))
}

impl Editor<'_> {
    /// Returns the maps that profit from a split.
    fn find_slopes(&self) -> Vec<Slope> {
        let mut slopes: Vec<Slope> = Vec::new();
        for at in 0..self.slots.len() {
            let Some(slope) = self.find_slope(at) else { continue };
            if slopes.iter().all(|other| other.after != slope.after) {
                slopes.push(slope);
            }
        }
        slopes
    }

    fn find_slope(&self, at: usize) -> Option<Slope> {
        let entries = |at: usize| self.slots[at].as_ref().map(|scheduled| scheduled.gradient_modes);
        let map = self.map_at(at).filter(|_| entries(at) == Some(GradientModes::ALL))?;
        let [result] = map.stores.as_slice() else { return None };
        let store = &result.access;
        let points: usize = map.dims.iter().product();
        let expr = &map.expr;
        let plain = |(inst, _): &(Inst, Type)| !matches!(inst, Inst::LoadAt(..) | Inst::Guard(..));
        if !matches!(store.dtype, DType::F32 | DType::F64)
            || expr.ty(expr.outputs()[0]) != Type::of(store.dtype)
            || store.len != points
            || !is_injective(store, &map.dims)
            || !expr.insts().iter().all(plain)
        {
            return None;
        }
        // Definition of each load: before the program, or by an instruction.
        let writer_position = |id: BufferId| -> Option<Option<usize>> {
            let writers = self.writers(id);
            match writers.len() {
                0 => Some(None),
                1 if self.is_work(id) && !self.is_input(id) => Some(writers.first()),
                _ => None,
            }
        };
        let writer_positions: Vec<Option<usize>> =
            loaded_buffers(map).map(writer_position).collect::<Option<_>>()?;
        let latest = writer_positions.iter().copied().max().flatten().filter(|&latest| latest < at)?;
        let late: Vec<bool> = writer_positions.iter().map(|&writer| writer == Some(latest)).collect();
        let (slope, product) = split_derivative(expr, &late, map.loads.len())?;
        let to_slope = Operand { buffer: PLACEHOLDER, access: store.clone() };
        let slope = with_expression(map, slope, to_slope, None)?;
        let product = with_expression(map, product, result.clone(), Some(PLACEHOLDER))?;
        let needed = |id: BufferId| {
            loaded_buffers(map).position(|read| read == id).and_then(|slot| writer_positions[slot])
        };
        let after = loaded_buffers(&slope).filter_map(needed).max().filter(|&after| after < latest)?;
        let has_slot = after.is_multiple_of(SLOTS_PER_INSTRUCTION) && self.slots[after + 1].is_none();
        if !has_slot || entries(after) != Some(GradientModes::ALL) {
            return None;
        }
        // Values that are saved mostly for this map alone.
        let soon = after + (latest - after) / 2;
        let is_freed = |&id: &BufferId| {
            let mut others = self.readers(id).iter().filter(|&reader| reader != at);
            self.is_work(id)
                && !self.is_output(id)
                && !loaded_buffers(&product).any(|read| read == id)
                && others.all(|reader| reader <= soon)
        };
        let bytes = |id: BufferId| align(self.buffers[id.0 as usize].bytes());
        let freed = distinct(loaded_buffers(&slope)).into_iter().filter(is_freed);
        let freed = freed.map(bytes).fold(0, usize::saturating_add);
        let saved_bytes = align(points.saturating_mul(store.dtype.size()));
        let saves_memory =
            saved_bytes.saturating_mul(MAX_SAVED_RATIO.1) <= freed.saturating_mul(MAX_SAVED_RATIO.0);
        saves_memory.then_some(Slope { at, after, slope, product })
    }
}

/// Splits maps, and allocates the buffers of the slopes.
fn split_maps(slopes: Vec<Slope>, slots: &mut [Option<ScheduledInstruction>], buffers: &mut Vec<Buffer>) {
    let mut new_versions = VersionCounter::after(slots.iter().flatten());
    for Slope { at, after, mut slope, mut product } in slopes {
        let Some(scheduled) = slots[at].take() else { continue };
        let Buffer { label, dtype, .. } = &buffers[product.stores[0].buffer.0 as usize];
        let (label, dtype) = (format!("{label}/slope"), *dtype);
        let id = add_work(buffers, label, dtype, slope.stores[0].access.len);
        slope.stores[0].buffer = id;
        product
            .load_operands_mut()
            .filter(|from| from.buffer == PLACEHOLDER)
            .for_each(|from| from.buffer = id);
        let (versions, version) = (&scheduled.versions, new_versions.next());
        let of_slope = versions.clone().with_write(id, version);
        slots[after + 1] = Some(scheduled.with_instruction(Instruction::from(slope), &of_slope));
        let of_product = versions.clone().with_read(id, version);
        slots[at] = Some(scheduled.with_instruction(Instruction::from(product), &of_product));
    }
}
