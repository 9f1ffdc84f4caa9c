//! Stores masks as bits across the peak of live bytes.
//!
//! A gradient can need a boolean per element, for example from dropout or from a maximum. Such a mask takes a byte per
//! element from the forward pass to the backward pass. Masks that are live at the peak are packed into bits after their
//! producer, and unpacked before their readers in the backward pass, if the arena becomes smaller. Both are ordinary
//! maps.
//!
//! Bit `k` of byte `i` is element `k * bytes + i`, so both maps access memory sequentially, in eight streams. If the
//! length of a mask is no multiple of eight, unused elements are appended.

use std::cmp::Reverse;

use ortrain_expr::{Access, Builder, CompareOp, DType, Type};

use super::Changed;
use super::memory_plan::{arena_size, reuse_operand_bytes};
use crate::align;
use crate::buffer::add_work;
use crate::draft::Draft;
use crate::error::ProgramError;
use crate::liveness::{LiveRange, Liveness, live_bytes};
use crate::scheduled::VersionCounter;
use crate::target::Target;
use crate::uses::DefUse;
use crate::versions::{Version, Versions};
use crate::{Buffer, BufferId, GradientModes, Instruction, Load, Nest, Operand, ScheduledInstruction};

/// Number of bits of a byte.
const BITS_PER_BYTE: usize = 8;
/// Number of time steps per instruction: packing is one step after an instruction, unpacking one step before.
const STEPS_PER_INSTRUCTION: usize = 4;

/// Mask that is packed between two instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mask {
    buffer: BufferId,
    /// Position of the producer, and position of the first instruction that reads the unpacked mask.
    writer: usize,
    reader: usize,
}

/// Packs masks if this lowers the size of the arena.
pub(super) fn run(draft: &mut Draft, target: &Target) -> Result<Changed, ProgramError> {
    let masks = MaskSelection::new(draft, target.min_mask_elements).select_masks();
    if masks.is_empty() {
        return Ok(Changed(0));
    }
    let mut packed = draft.clone();
    insert_packing(&mut packed, &masks);
    // Fewer live bytes do not guarantee a smaller arena.
    if arena_size(&packed)? >= arena_size(draft)? {
        return Ok(Changed(0));
    }
    *draft = packed;
    Ok(Changed(masks.len()))
}

/// Selection of the masks to pack.
struct MaskSelection<'a> {
    draft: &'a Draft,
    /// Minimum number of elements of a mask.
    min_elements: usize,
    uses: DefUse,
    /// For each buffer the buffer that owns its bytes; then the live range of each owner.
    owners: Vec<usize>,
    liveness: Liveness,
    /// Number of buffers that share the bytes of each owner.
    sharers: Vec<usize>,
    /// For each buffer the packing, if it is packed.
    packed: Vec<Option<Mask>>,
}

impl<'a> MaskSelection<'a> {
    fn new(draft: &'a Draft, min_bytes: usize) -> MaskSelection<'a> {
        let (owners, liveness) = reuse_operand_bytes(draft);
        let mut sharers = vec![0; owners.len()];
        owners.iter().for_each(|&owner| sharers[owner] += 1);
        let packed = vec![None; owners.len()];
        MaskSelection {
            draft,
            min_elements: min_bytes,
            uses: draft.uses(),
            owners,
            liveness,
            sharers,
            packed,
        }
    }

    /// Returns the time steps at which a buffer is written or read.
    fn use_steps(&self, id: BufferId) -> impl Iterator<Item = usize> + '_ {
        self.uses.writers(id).iter().chain(self.uses.readers(id).iter()).map(|at| at * STEPS_PER_INSTRUCTION)
    }

    fn step_count(&self) -> usize {
        (self.draft.instructions.len() * STEPS_PER_INSTRUCTION).max(1)
    }

    /// Returns true if a buffer is a mask with a single producer and its own bytes in the work arena.
    fn is_packable(&self, id: BufferId) -> bool {
        let k = id.0 as usize;
        let buffer = &self.draft.buffers[k];
        if buffer.dtype != DType::Bool
            || buffer.len < self.min_elements
            || self.draft.is_visible(id)
            || self.owners[k] != k
            || self.sharers[k] != 1
        {
            return false;
        }
        let Some(writer) = self.uses.writers(id).only() else { return false };
        let instructions = &self.draft.instructions;
        let touches = || self.uses.readers(id).iter().chain([writer]).map(|at| &instructions[at].instruction);
        instructions[writer].gradient_modes == GradientModes::ALL
            && (buffer.len.is_multiple_of(BITS_PER_BYTE)
                || touches().all(|instruction| accepts_longer_buffer(instruction, id)))
    }

    /// Returns the masks to pack, in the order of buffers: their packing lowers the peak of live bytes.
    fn select_masks(mut self) -> Vec<Mask> {
        let buffers = (0..self.draft.buffers.len()).map(|k| BufferId(k as u32));
        let mut candidates: Vec<BufferId> = buffers.filter(|&id| self.is_packable(id)).collect();
        if candidates.is_empty() {
            return Vec::new();
        }
        let mut alive = self.live_bytes_by_step();
        loop {
            let peak = alive.iter().copied().max().unwrap_or(0);
            let top = alive.iter().position(|&bytes| bytes == peak).unwrap_or(0);
            // The largest mask that is live at the peak but not used there.
            let largest = candidates
                .iter()
                .filter_map(|&id| self.packing_across(id, top))
                .max_by_key(|mask| (self.draft.buffers[mask.buffer.0 as usize].len, Reverse(mask.buffer)));
            let Some(mask) = largest else { break };
            candidates.retain(|&id| id != mask.buffer);
            self.packed[mask.buffer.0 as usize] = Some(mask);
            let with = self.live_bytes_by_step();
            // Live bytes at other positions may reach the peak but must not exceed it.
            if with.iter().copied().max().unwrap_or(0) > peak || with[top] >= alive[top] {
                self.packed[mask.buffer.0 as usize] = None;
            } else {
                alive = with;
            }
        }
        // Some masks were packed for an intermediate peak, and are no longer needed for the final peak.
        let peak = alive.into_iter().max();
        for k in 0..self.packed.len() {
            let Some(mask) = self.packed[k].take() else { continue };
            if self.live_bytes_by_step().into_iter().max() > peak {
                self.packed[k] = Some(mask);
            }
        }
        self.packed.into_iter().flatten().collect()
    }

    /// Returns the packing of a mask across a time step, if nothing reads the mask at that step.
    fn packing_across(&self, buffer: BufferId, position: usize) -> Option<Mask> {
        let readers = self.uses.readers(buffer);
        let writer = self.uses.writers(buffer).first()?;
        let reader = readers.iter().find(|&reader| reader * STEPS_PER_INSTRUCTION > position)?;
        let packed =
            writer * STEPS_PER_INSTRUCTION + 1 < position && position + 1 < reader * STEPS_PER_INSTRUCTION;
        let waits = readers.iter().all(|other| other > writer && other * STEPS_PER_INSTRUCTION != position);
        (packed && waits).then_some(Mask { buffer, writer, reader })
    }

    /// Returns the live bytes at each time step.
    fn live_bytes_by_step(&self) -> Vec<i128> {
        let mut ranges: Vec<(LiveRange, i128)> = Vec::with_capacity(self.owners.len());
        let mut add = |bytes: usize, life: Option<LiveRange>| {
            // Excessive sizes are rejected by the memory plan.
            ranges.extend(life.map(|life| (life, align(bytes.min(1 << 48)) as i128)));
        };
        // Inputs are live from the first step, outputs up to the last step.
        let step = |at: isize| (at * STEPS_PER_INSTRUCTION as isize).clamp(0, self.step_count() as isize - 1);
        for (k, buffer) in self.draft.buffers.iter().enumerate() {
            let id = BufferId(k as u32);
            if !self.draft.is_work(id) || self.owners[k] != k {
                continue;
            }
            let bytes = buffer.len.saturating_mul(buffer.dtype.size());
            let Some(Mask { writer, reader, .. }) = self.packed[k] else {
                let life = self.liveness.live_range(k);
                add(
                    bytes,
                    life.map(|LiveRange { first, last }| LiveRange { first: step(first), last: step(last) }),
                );
                continue;
            };
            let (packed, unpacked) = (
                (writer * STEPS_PER_INSTRUCTION + 1) as isize,
                (reader * STEPS_PER_INSTRUCTION - 1) as isize,
            );
            let (early, late): (Vec<isize>, Vec<isize>) =
                self.use_steps(id).map(|at| at as isize).partition(|&at| at < unpacked);
            add(bytes, LiveRange::covering(early.into_iter().chain([packed])));
            add(packed_bytes(buffer.len), Some(LiveRange { first: packed, last: unpacked }));
            add(bytes, LiveRange::covering(late.into_iter().chain([unpacked])));
        }
        let alive = live_bytes(self.step_count(), ranges);
        alive[1..=self.step_count()].to_vec()
    }
}

/// Returns true if an instruction accepts a buffer that is longer than its accesses.
fn accepts_longer_buffer(instruction: &Instruction, id: BufferId) -> bool {
    let Some(nest) = instruction.flexible_nest() else { return false };
    let by_index = |(slot, load): (usize, &Load)| {
        load.operand().is_some_and(|from| from.buffer == id) && nest.is_gathered(slot)
    };
    !instruction.factor_buffers().contains(&id) && !nest.loads.iter().enumerate().any(by_index)
}

/// Sets the length of a buffer in the accesses of an instruction's nest.
fn set_length(instruction: &mut Instruction, id: BufferId, len: usize) {
    let operands = instruction.nest_mut().into_iter().flat_map(Nest::operands_mut);
    operands.filter(|operand| operand.buffer == id).for_each(|operand| operand.access.len = len);
}

/// Returns the number of bytes of a packed mask.
fn packed_bytes(len: usize) -> usize {
    len.div_ceil(BITS_PER_BYTE)
}

/// Inserts the packing and unpacking of masks.
fn insert_packing(draft: &mut Draft, masks: &[Mask]) {
    let Draft { instructions, buffers, .. } = draft;
    // For each mask the buffer of its bits and the buffer of the unpacked mask, each with its only version.
    let mut packed: Vec<[(BufferId, Version); 2]> = Vec::with_capacity(masks.len());
    let mut new_versions = VersionCounter::after(instructions.iter());
    for &Mask { buffer, .. } in masks {
        let Buffer { label, len, .. } = buffers[buffer.0 as usize].clone();
        let bytes = packed_bytes(len);
        if len != bytes * BITS_PER_BYTE {
            buffers[buffer.0 as usize].len = bytes * BITS_PER_BYTE;
            for scheduled in instructions.iter_mut() {
                set_length(&mut scheduled.instruction, buffer, bytes * BITS_PER_BYTE);
            }
        }
        let bits = add_work(buffers, format!("{label}/bits"), DType::U8, bytes);
        let unpacked = add_work(buffers, label, DType::Bool, bytes * BITS_PER_BYTE);
        packed.push([bits, unpacked].map(|id| (id, new_versions.next())));
    }
    let mut result = Vec::with_capacity(instructions.len() + 2 * masks.len());
    let bytes = |mask: &Mask| packed_bytes(buffers[mask.buffer.0 as usize].len);
    for (at, mut scheduled) in std::mem::take(instructions).into_iter().enumerate() {
        let original = ScheduledInstruction { gradient_modes: GradientModes::ALL, ..scheduled.clone() };
        let both = || masks.iter().zip(&packed);
        for (mask, &[bits, unpacked]) in both().filter(|(mask, _)| mask.reader == at) {
            let map = Instruction::from(unpacking_map(bytes(mask), bits.0, unpacked.0));
            result.push(original.with_instruction(map, &Versions::for_map(bits, unpacked)));
        }
        let read = |id: BufferId| {
            let later = both().find(|(mask, _)| mask.buffer == id && mask.reader <= at);
            later.map_or(id, |(_, ids)| ids[1].0)
        };
        scheduled.instruction.substitute_buffers(&read, &|id| id);
        for (_, &[_, (unpacked, version)]) in both().filter(|(mask, _)| mask.reader <= at) {
            scheduled.versions = scheduled.versions.with_read(unpacked, version);
        }
        scheduled.versions = scheduled.versions.restrict_to(&scheduled.instruction);
        result.push(scheduled);
        for (mask, &[bits, _]) in both().filter(|(mask, _)| mask.writer == at) {
            let written =
                original.versions.written_version(mask.buffer).map(|version| (mask.buffer, version));
            let versions = written.map(|source| Versions::for_map(source, bits)).unwrap_or_default();
            result.push(original.with_instruction(
                Instruction::from(packing_map(bytes(mask), mask.buffer, bits.0)),
                &versions,
            ));
        }
    }
    *instructions = result;
}

/// Returns the operand for the elements of a mask that belong to one bit of the bytes.
fn bit_lane(mask: BufferId, bytes: usize, bit: usize) -> Operand {
    let strides = [1].into_iter().collect();
    let access = Access { dtype: DType::Bool, offset: bit * bytes, strides, len: bytes * BITS_PER_BYTE };
    Operand { buffer: mask, access }
}

/// Returns the value of a bit as a float. The arithmetic uses floats, which represent bytes exactly and have fast
/// kernels.
fn bit_value(bit: usize) -> f64 {
    f64::from(1u8 << bit)
}

/// Packs eight booleans into a byte.
fn packing_map(bytes: usize, mask: BufferId, bits: BufferId) -> Nest {
    let mut b = Builder::new();
    let zero = b.constant(Type::F32, 0.0);
    let mut byte = zero;
    for bit in 0..BITS_PER_BYTE {
        let (truth, value) = (b.load(bit, Type::Bool), b.constant(Type::F32, bit_value(bit)));
        let value = b.select(truth, value, zero);
        byte = b.add(byte, value);
    }
    let byte = b.convert(byte, Type::I32);
    let byte = b.convert(byte, Type::U32);
    let loads = (0..BITS_PER_BYTE).map(|bit| Load::Buffer(bit_lane(mask, bytes, bit))).collect();
    let store = Operand::contiguous(bits, DType::U8, &[bytes]);
    Nest::elementwise([bytes].into_iter().collect(), loads, b.finish(&[byte]), vec![store])
}

/// Unpacks a byte into eight booleans, from the highest bit down.
fn unpacking_map(bytes: usize, bits: BufferId, mask: BufferId) -> Nest {
    let mut b = Builder::new();
    let zero = b.constant(Type::F32, 0.0);
    let mut rest = b.load(0, Type::F32);
    let mut truths = Vec::with_capacity(BITS_PER_BYTE);
    for bit in (0..BITS_PER_BYTE).rev() {
        let value = b.constant(Type::F32, bit_value(bit));
        let truth = b.compare(CompareOp::Le, value, rest);
        let value = b.select(truth, value, zero);
        rest = b.sub(rest, value);
        truths.push(truth);
    }
    truths.reverse();
    let load = Load::Buffer(Operand::contiguous(bits, DType::U8, &[bytes]));
    let stores = (0..BITS_PER_BYTE).map(|bit| bit_lane(mask, bytes, bit)).collect();
    Nest::elementwise([bytes].into_iter().collect(), vec![load], b.finish(&truths), stores)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{BinaryOp, Mode, Reg, Scalar};

    use super::*;
    use crate::reference::evaluate;
    use crate::{BufferLocation, Precision, Program, Scalars};

    /// Manually built program, already fused.
    #[derive(Clone, Default)]
    struct Sketch {
        buffers: Vec<Buffer>,
        instructions: Vec<ScheduledInstruction>,
        inputs: Vec<BufferId>,
        outputs: Vec<BufferId>,
    }

    impl Sketch {
        fn buffer(&mut self, label: &str, dtype: DType, len: usize) -> BufferId {
            self.buffers.push(Buffer { label: label.into(), dtype, len, location: BufferLocation::Work(0) });
            BufferId(self.buffers.len() as u32 - 1)
        }

        /// Adds a map from loads to results, element by element over the first `len`.
        fn map(
            &mut self,
            len: usize,
            reads: &[BufferId],
            writes: &[BufferId],
            f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
        ) {
            let buffer = |id: &BufferId| &self.buffers[id.0 as usize];
            let contiguous = |id: &BufferId| Operand::contiguous(*id, buffer(id).dtype, &[buffer(id).len]);
            let mut b = Builder::new();
            let loads = reads.iter().enumerate();
            let regs: Vec<Reg> = loads.map(|(slot, id)| b.load(slot, Type::of(buffer(id).dtype))).collect();
            let results = f(&mut b, &regs);
            let mut nest = Nest {
                dims: [len].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: reads.iter().map(contiguous).map(Load::Buffer).collect(),
                expr: b.finish(&results),
                reductions: Vec::new(),
                stores: writes.iter().map(contiguous).collect(),
            };
            for slot in (0..reads.len()).filter(|&slot| nest.is_gathered(slot)).collect::<Vec<_>>() {
                nest.loads[slot].operand_mut().unwrap().access.strides[0] = 0;
            }
            assert_eq!(nest.validate(), None);
            let instruction = Instruction::from(nest);
            let versions = Versions::default();
            self.instructions.push(ScheduledInstruction {
                instruction,
                gradient_modes: GradientModes::ALL,
                node: "node".into(),
                versions,
            });
        }

        fn packed(&self) -> Sketch {
            let mut draft = self.clone().draft();
            super::run(&mut draft, &Target::CPU).unwrap();
            let Draft { buffers, instructions, inputs, outputs, .. } = draft;
            Sketch { buffers, instructions, inputs, outputs }
        }

        fn draft(self) -> Draft {
            let Sketch { buffers, instructions, inputs, outputs } = self;
            Draft::new(instructions, buffers, Vec::new(), (inputs, outputs), Precision::F32)
        }

        /// Returns the labels of the packed masks.
        fn bits(&self) -> Vec<&str> {
            self.buffers.iter().filter_map(|buffer| buffer.label.strip_suffix("/bits")).collect()
        }

        fn program(self) -> Program {
            let mut draft = self.draft();
            super::super::memory_plan::run(&mut draft, &Target::CPU).unwrap();
            draft.into_program()
        }
    }

    fn run(sketch: Sketch) -> Vec<Vec<Scalar>> {
        let program = sketch.program();
        let value = |k: usize| Scalar::F32((k * 7919 % 1009) as f32 / 1009.0 - 0.5);
        let inputs = program.inputs.iter().map(|&id| (0..program.buffer(id).len).map(value).collect());
        let inputs: Vec<Vec<Scalar>> = inputs.collect();
        evaluate(&program, Mode::Exact, &inputs, Scalars::default()).unwrap()
    }

    const LAYERS: usize = 4;

    /// Builds layers of `x = x < 1/4 ? -2x : x / 3` with saved masks, and their backward pass.
    fn layers(len: usize, by_index: bool) -> Sketch {
        let mut s = Sketch::default();
        let mut x = s.buffer("x", DType::F32, len);
        s.inputs.push(x);
        let mut masks = Vec::new();
        for layer in 0..LAYERS {
            let y = s.buffer("y", DType::F32, len);
            let mask = s.buffer(&format!("mask {layer}"), DType::Bool, len);
            s.map(len, &[x], &[y, mask], |b, x| {
                let [limit, steep, flat] = [0.25, -2.0, 1.0 / 3.0].map(|value| b.constant(Type::F32, value));
                let mask = b.compare(CompareOp::Lt, x[0], limit);
                let factor = b.select(mask, steep, flat);
                vec![b.mul(x[0], factor), mask]
            });
            masks.push(mask);
            x = y;
        }
        for mask in masks.into_iter().rev() {
            let next = s.buffer("gradient", DType::F32, len);
            s.map(len, &[x, mask], &[next], |b, x| {
                let [steep, flat] = [-2.0, 1.0 / 3.0].map(|value| b.constant(Type::F32, value));
                let mask = if by_index {
                    let at = b.coordinate(0);
                    b.load_at(1, at, Type::Bool)
                } else {
                    x[1]
                };
                let factor = b.select(mask, steep, flat);
                vec![b.binary(BinaryOp::Mul, x[0], factor)]
            });
            x = next;
        }
        s.outputs.push(x);
        s
    }

    #[test]
    fn masks_are_packed_across_the_peak() {
        for len in [4096, 4097, 4103, 9000, 10_007] {
            let plain = layers(len, false);
            let packed = plain.packed();
            // The last mask is read directly after its definition.
            assert_eq!(packed.bits(), ["mask 0", "mask 1", "mask 2"], "{len}");
            let [unpacked_bytes, less] =
                [plain.clone(), packed.clone()].map(|sketch| sketch.program().work_bytes);
            assert!(less + 2 * len < unpacked_bytes, "{less} of {unpacked_bytes}");
            assert_eq!(run(packed), run(plain), "{len}");
        }
    }

    #[test]
    fn packing_round_trips() {
        let len = 256 * BITS_PER_BYTE;
        let mut s = Sketch::default();
        let (x, y) = (s.buffer("x", DType::F32, len), s.buffer("y", DType::F32, len));
        let [mask, unpacked] = ["mask", "again"].map(|label| s.buffer(label, DType::Bool, len));
        let bits = s.buffer("bits", DType::U8, 256);
        (s.inputs, s.outputs) = (vec![x], vec![y, bits]);
        s.map(len, &[x], &[mask], |b, x| vec![b.convert(x[0], Type::Bool)]);
        let both = [packing_map(256, mask, bits), unpacking_map(256, bits, unpacked)];
        s.instructions.extend(both.map(|map| ScheduledInstruction {
            instruction: Instruction::from(map),
            ..s.instructions[0].clone()
        }));
        s.map(len, &[unpacked], &[y], |b, x| vec![b.convert(x[0], Type::F32)]);
        let program = s.program();
        // Byte `i` of the bits has the value `i`.
        let mask_values: Vec<Scalar> =
            (0..len).map(|k| Scalar::F32((((k % 256) >> (k / 256)) & 1) as f32)).collect();
        for mode in [Mode::Exact, Mode::Widened] {
            let results =
                evaluate(&program, mode, std::slice::from_ref(&mask_values), Scalars::default()).unwrap();
            let numbers = |list: &[Scalar]| list.iter().map(|value| value.to_f64()).collect::<Vec<_>>();
            assert_eq!(numbers(&results[0]), numbers(&mask_values));
            assert!(numbers(&results[1]).into_iter().eq((0..256).map(f64::from)));
        }
    }

    /// Masks are not packed if they are small, inputs, outputs, or indexed with a length that is no multiple of eight.
    #[test]
    fn ineligible_masks_stay_bytes() {
        assert!(layers(Target::CPU.min_mask_elements - 1, false).packed().bits().is_empty());
        assert!(layers(4097, true).packed().bits().is_empty());
        assert_eq!(layers(4104, true).packed().bits().len(), LAYERS - 1);
        assert_eq!(run(layers(4104, true).packed()), run(layers(4104, true)));

        let mut expected = layers(5000, false);
        let mask = |s: &Sketch, label: &str| {
            BufferId(s.buffers.iter().position(|buffer| &*buffer.label == label).unwrap() as u32)
        };
        expected.outputs.push(mask(&expected, "mask 1"));
        assert_eq!(expected.packed().bits(), ["mask 0", "mask 2"]);
        let results = run(expected.packed());
        assert_eq!(results[1].len(), 5000, "what is wanted has its length");
        assert_eq!(results, run(expected));

        // The mask becomes an input, in addition to its producer.
        let mut actual = layers(5000, false);
        actual.inputs.push(mask(&actual, "mask 0"));
        assert_eq!(actual.packed().bits(), ["mask 1", "mask 2"]);
        // A mask that is written in one gradient mode is undefined in the other mode.
        let mut of_entry = layers(5000, false);
        of_entry.instructions[1].gradient_modes = GradientModes::only(crate::GradientMode::Overwrite);
        assert_eq!(of_entry.packed().bits(), ["mask 0", "mask 2"]);
    }

    /// If the peak is before the definition of a mask, or at one of its readers, packing would save nothing.
    #[test]
    fn useless_packing_is_skipped() {
        let len = 8192;
        for early in [true, false] {
            let mut s = Sketch::default();
            let x = s.buffer("x", DType::F32, len);
            let [large, y, z] = [("large", 16), ("y", 1), ("z", 1)]
                .map(|(label, times)| s.buffer(label, DType::F32, times * len));
            let mask = s.buffer("mask", DType::Bool, len);
            (s.inputs, s.outputs) = (vec![x], vec![z]);
            let add = |b: &mut Builder, x: &[Reg]| vec![b.add(x[0], x[1])];
            if early {
                s.map(len, &[x], &[large], |_, x| vec![x[0]]);
                s.map(len, &[x, large], &[x], add);
            }
            s.map(len, &[x], &[mask], |b, x| vec![b.convert(x[0], Type::Bool)]);
            s.map(len, &[x], &[y], |b, x| vec![b.unary(ortrain_expr::UnaryOp::Exp, x[0])]);
            s.map(len, &[x, y], &[y], add);
            if !early {
                s.map(len, &[y, mask], &[large], |b, x| {
                    let mask = b.convert(x[1], Type::F32);
                    vec![b.add(x[0], mask)]
                });
                s.map(len, &[y, large], &[y], add);
            }
            s.map(len, &[y, mask], &[z], |b, x| {
                let mask = b.convert(x[1], Type::F32);
                vec![b.add(x[0], mask)]
            });
            let packed = s.packed();
            assert!(packed.bits().is_empty(), "early: {early}");
            assert_eq!(packed.instructions.len(), s.instructions.len());
        }
    }

    /// A mask that is defined at the peak is not packed for this peak, but for a later peak.
    #[test]
    fn mask_is_packed_for_a_later_peak() {
        let len = 8192;
        let mut s = Sketch::default();
        let x = s.buffer("x", DType::F32, len);
        let z = s.buffer("z", DType::F32, len);
        let [early, late] =
            [("early", 1), ("late", 2)].map(|(label, times)| s.buffer(label, DType::Bool, times * len));
        // The first peak exceeds the second peak without the masks, by less than the bytes of the early mask.
        let first = s.buffer("first", DType::F32, 16 * len);
        let second = s.buffer("second", DType::F32, 16 * len + len / 8);
        (s.inputs, s.outputs) = (vec![x], vec![z]);
        let add = |b: &mut Builder, x: &[Reg]| vec![b.add(x[0], x[1])];
        let add_mask = |b: &mut Builder, x: &[Reg]| {
            let mask = b.convert(x[1], Type::F32);
            vec![b.add(x[0], mask)]
        };
        s.map(len, &[x], &[early], |b, x| vec![b.convert(x[0], Type::Bool)]);
        s.map(len, &[x], &[first], |_, x| vec![x[0]]);
        s.map(len, &[x], &[late], |b, x| vec![b.convert(x[0], Type::Bool)]);
        s.map(len, &[x, first], &[x], add);
        s.map(len, &[x, early], &[x], add_mask);
        s.map(len, &[x], &[second], |_, x| vec![x[0]]);
        s.map(len, &[x, second], &[x], add);
        s.map(len, &[x, late], &[z], add_mask);
        let packed = s.packed();
        assert_eq!(packed.bits(), ["early", "late"]);
        let [unpacked_bytes, less] = [s.clone(), packed.clone()].map(|sketch| sketch.program().work_bytes);
        assert!(less < unpacked_bytes, "{less} of {unpacked_bytes}");
        assert_eq!(run(packed), run(s));
    }

    /// Readers in the forward pass read the mask itself. All readers in the backward pass share the unpacked mask.
    #[test]
    fn early_and_late_readers_of_a_mask() {
        let len = 6001;
        let mut s = layers(len, false);
        let mask = BufferId(s.buffers.iter().position(|buffer| &*buffer.label == "mask 0").unwrap() as u32);
        let last = *s.outputs.last().unwrap();
        let [early, late] = ["early", "late"].map(|label| s.buffer(label, DType::F32, len));
        s.map(len, &[mask], &[early], |b, x| vec![b.convert(x[0], Type::F32)]);
        let first = s.instructions.pop().unwrap();
        s.instructions.insert(2, first);
        s.map(len, &[last, mask], &[late], |b, x| {
            let mask = b.convert(x[1], Type::F32);
            vec![b.sub(x[0], mask)]
        });
        // The peak is between the definition of the masks and their readers.
        let large = s.buffer("large", DType::F32, 4 * len);
        s.map(len, &[last], &[large], |_, x| vec![x[0]]);
        let mut reader = s.instructions.pop().unwrap();
        reader.instruction.substitute_buffers(&|_| s.inputs[0], &|id| id);
        s.instructions.insert(LAYERS + 1, reader);
        s.outputs.extend([early, late]);
        let packed = s.packed();
        assert_eq!(packed.bits(), ["mask 0", "mask 1", "mask 2", "mask 3"]);
        let unpacks = |i: &&ScheduledInstruction| i.instruction.writes().len() == BITS_PER_BYTE;
        assert_eq!(packed.instructions.iter().filter(unpacks).count(), LAYERS);
        let label = |id: BufferId| Arc::clone(&packed.buffers[id.0 as usize].label);
        let readers = packed.instructions.iter().filter(|i| i.instruction.reads().contains(&mask)).count();
        assert_eq!((readers, &*label(mask)), (2, "mask 0"), "the early one and the packing");
        assert_eq!(run(packed), run(s));
    }
}
