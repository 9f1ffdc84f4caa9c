//! Tiles a batch over pairs of convolutions. At the peak of live bytes, a convolution and the only consumer of its
//! result run on a few images at a time.
//!
//! The intermediate result then has the size of these images, and stays in a cache. Frozen layers and evaluations gain,
//! because nothing is saved for gradients there. Their peak is the largest result of a layer together with the next
//! one.

use ortrain_expr::{Access, ConvPass, Inst};

use super::memory_plan::{arena_size, peak_position};
use super::{Changed, Draft, Outcome};
use crate::buffer::add_work;
use crate::operand::{loaded_buffers, stored_buffers};
use crate::scheduled::VersionCounter;
use crate::target::{BatchTiles, Target};
use crate::{Buffer, Conv, Instruction, Operand, ScheduledInstruction, is_work};

/// Maximum number of tiled pairs.
const MAX_PAIRS: usize = 32;
/// Tiles pairs of convolutions if this lowers the size of the arena.
pub(super) fn run(draft: &mut Draft, target: &Target) -> Outcome {
    let Some(tiles) = target.batch_tiles else { return Ok(Changed(0)) };
    let next = |draft: &Draft| find_pair(draft, tiles, peak_position(draft)?);
    let Some(mut pair) = next(draft) else { return Ok(Changed(0)) };
    let full_size = arena_size(draft)?;
    let mut tried = draft.clone();
    let mut best: Option<(usize, usize, Draft)> = None;
    for pairs in 1..=MAX_PAIRS {
        tried.instructions = tile_pair(&mut tried, &pair);
        let planned = arena_size(&tried)?;
        if planned < best.as_ref().map_or(full_size - full_size / tiles.saving_divisor, |best| best.0) {
            best = Some((planned, pairs, tried.clone()));
        }
        let Some(more) = next(&tried) else { break };
        pair = more;
    }
    let Some((_, pairs, parted)) = best else { return Ok(Changed(0)) };
    *draft = parted;
    Ok(Changed(pairs))
}

/// Pair of convolutions, by their positions, and the number of images per tile.
struct Pair {
    first: usize,
    second: usize,
    images: usize,
}

/// Returns the pair with the largest intermediate result among the live values at an instruction.
fn find_pair(draft: &Draft, tiles: BatchTiles, at: usize) -> Option<Pair> {
    let Draft { instructions, buffers, .. } = draft;
    let uses = draft.uses();
    let firsts = (0..=at.min(instructions.len().checked_sub(1)?)).rev();
    let pairs = firsts.filter_map(|first| {
        let intermediate = batched_convolution(&instructions[first])?.epilogue.stores[0].buffer;
        let mut readers = uses.readers(intermediate).iter().filter(|&reader| reader != first);
        let second = readers.next().filter(|&second| second >= at && readers.next().is_none())?;
        if draft.is_visible(intermediate) || uses.writers(intermediate).only() != Some(first) {
            return None;
        }
        let images = images_per_tile(draft, tiles, first, second)?;
        Some((buffers[intermediate.0 as usize].bytes(), Pair { first, second, images }))
    });
    pairs.max_by_key(|(bytes, _)| *bytes).map(|(_, pair)| pair)
}

/// Returns the convolution if it can process the images of its batch one by one.
fn batched_convolution(scheduled: &ScheduledInstruction) -> Option<&Conv> {
    let Instruction::Conv(conv) = &scheduled.instruction else { return None };
    let by_position =
        |(inst, _): &(Inst, _)| matches!(inst, Inst::Coordinate(0) | Inst::LoadAt(..) | Inst::Guard(..));
    let fits = conv.shape.pass == ConvPass::Output
        && conv.shape.batch > 1
        && !conv.epilogue.expr.insts().iter().any(by_position)
        && !conv.epilogue.stores.is_empty();
    fits.then_some(conv)
}

/// Returns the number of images per tile of two convolutions, if tiling is possible and pays.
fn images_per_tile(draft: &Draft, tiles: BatchTiles, first: usize, second: usize) -> Option<usize> {
    let Draft { instructions, buffers, .. } = draft;
    let (first_images, other) =
        (batched_convolution(&instructions[first])?, batched_convolution(&instructions[second])?);
    let (nest, next) = (&first_images.epilogue, &other.epilogue);
    let contiguous = Access::contiguous(nest.stores[0].access.dtype, &nest.dims);
    let batch = first_images.shape.batch;
    let intermediate = nest.stores[0].buffer;
    let bytes = buffers[intermediate.0 as usize].bytes();
    let fits = nest.stores.len() == 1
        && nest.stores[0].access == contiguous
        && other.a.buffer == intermediate
        && other.b.buffer != intermediate
        && !loaded_buffers(next).any(|id| id == intermediate)
        && other.shape.batch == batch
        && instructions[first].gradient_modes == instructions[second].gradient_modes
        && bytes >= tiles.min_intermediate_bytes;
    // The first convolution moves to the position of the second.
    let reads = instructions[first].instruction.reads();
    let changed = |i: &ScheduledInstruction| {
        i.instruction.writes().iter().any(|id| reads.contains(id) || !is_work(buffers, *id))
    };
    // Parts of the second result are written while other parts of its operands are still to be read.
    let overwrites =
        stored_buffers(next).any(|id| loaded_buffers(next).any(|read| read == id) || reads.contains(&id));
    if !fits || overwrites || instructions[first + 1..second].iter().any(changed) {
        return None;
    }
    let each = bytes / batch;
    let images =
        (1..batch).find(|&images| batch.is_multiple_of(images) && images * each >= tiles.min_part_bytes)?;
    let filters =
        buffers[first_images.b.buffer.0 as usize].bytes().max(buffers[other.b.buffer.0 as usize].bytes());
    (filters.saturating_mul(tiles.filter_divisor) <= images * each).then_some(images)
}

/// Returns the instructions with a pair of convolutions in tiles.
fn tile_pair(draft: &mut Draft, pair: &Pair) -> Vec<ScheduledInstruction> {
    let Draft { instructions, buffers, .. } = draft;
    let &Pair { first, second, images } = pair;
    let intermediate = instructions[first].instruction.writes()[0];
    let Buffer { label, dtype, len, .. } = buffers[intermediate.0 as usize].clone();
    let [before, after] =
        [first, second].map(|at| batched_convolution(&instructions[at]).expect("a convolution"));
    let batch = before.shape.batch;
    let part_len = len / batch * images;
    let id = add_work(buffers, label, dtype, part_len);
    let mut new_versions = VersionCounter::after(instructions.iter());
    let mut result = Vec::with_capacity(instructions.len() + 2 * batch / images);
    for (k, scheduled) in instructions.iter().enumerate() {
        if k != second {
            result.extend((k != first).then(|| scheduled.clone()));
            continue;
        }
        for from in (0..batch).step_by(images) {
            let mut part = slice_batch(before, from, images);
            let of_part = |access: &Access| Access { offset: 0, len: part_len, ..access.clone() };
            let stored = &mut part.epilogue.stores[0];
            *stored = Operand { buffer: id, access: of_part(&stored.access) };
            let mut other = slice_batch(after, from, images);
            other.a = Operand { buffer: id, access: of_part(&other.a.access) };
            let part_version = new_versions.next();
            let mut follower_versions = instructions[second].versions.clone().with_read(id, part_version);
            if from + images < batch {
                for (written, _) in instructions[second].versions.writes() {
                    follower_versions = follower_versions.with_write(written, new_versions.next());
                }
            }
            let makes_part = instructions[first].versions.clone().with_write(id, part_version);
            for (conv, of, versions) in [(part, first, makes_part), (other, second, follower_versions)] {
                result.push(instructions[of].with_instruction(Instruction::from(conv), &versions));
            }
        }
    }
    result
}

/// Returns a convolution of some images of a batch.
fn slice_batch(conv: &Conv, from: usize, images: usize) -> Conv {
    let mut part = conv.clone();
    let [a, ..] = conv.shape.operands();
    let each: usize = a[1..].iter().product();
    part.shape.batch = images;
    part.a.access.offset += from * each;
    part.epilogue.dims[0] = images;
    for Operand { access, .. } in part.epilogue.operands_mut() {
        access.offset = access.offset.wrapping_add_signed(from as isize * access.strides[0]);
    }
    part
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, ConvShape, DType, Mode, Precision, Scalar, SlidingAxis, Type, UnaryOp};

    use super::*;
    use crate::reference::evaluate;
    use crate::{BufferId, GradientModes, Load, Nest, Program, ProgramBuilder, Scalars};

    const IMAGES: usize = 4;
    const CHANNELS: usize = 64;
    const SIZE: usize = 65;

    /// Adds a convolution with 1x1 filters from `from` to `to` channels, with a bias, an optional addend, and an
    /// activation.
    fn convolution(
        b: &mut ProgramBuilder,
        a: BufferId,
        (from, to): (usize, usize),
        added: Option<BufferId>,
        name: &str,
    ) -> BufferId {
        let dims = [IMAGES, to, SIZE, SIZE];
        let filter = b.work(&format!("filter of {name}"), DType::F32, from * to);
        let bias = b.work(&format!("bias of {name}"), DType::F32, to);
        let result = b.work(name, DType::F32, dims.iter().product());
        let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &dims);
        let by_channel =
            Access { strides: [0, 1, 0, 0].into_iter().collect(), len: to, ..contiguous(bias).access };
        let mut e = Builder::new();
        let (product, x) = (e.load(0, Type::F32), e.load(1, Type::F32));
        let mut sum = e.add(product, x);
        if added.is_some() {
            let x = e.load(2, Type::F32);
            sum = e.add(sum, x);
        }
        let y = e.unary(UnaryOp::Tanh, sum);
        let loads = [Operand { buffer: bias, access: by_channel }].into_iter().chain(added.map(contiguous));
        let epilogue = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: [Load::Accumulator(DType::F32)].into_iter().chain(loads.map(Load::Buffer)).collect(),
            expr: e.finish(&[y]),
            reductions: Vec::new(),
            stores: vec![contiguous(result)],
        };
        let axis =
            SlidingAxis { input: SIZE, output: SIZE, kernel: 1, stride: 1, dilation: 1, padding_before: 0 };
        let shape = ConvShape {
            pass: ConvPass::Output,
            batch: IMAGES,
            groups: 1,
            channels_in: from,
            channels_out: to,
            axes: [axis, axis].into_iter().collect(),
        };
        let [a_dims, b_dims, _] = shape.operands();
        let (a, filter) =
            (Operand::contiguous(a, DType::F32, &a_dims), Operand::contiguous(filter, DType::F32, &b_dims));
        let precision = Precision::F32;
        let instruction = Instruction::from(Conv { shape, a, b: filter, precision, epilogue });
        b.emit(instruction, GradientModes::ALL, &name.into()).unwrap();
        result
    }

    /// Builds a bottleneck with a residual connection: few channels, many, few.
    fn bottleneck(in_parts: bool, keep_input: bool) -> Program {
        let mut b = ProgramBuilder::new();
        let x = b.work("x", DType::F32, IMAGES * 2 * SIZE * SIZE);
        let wide = convolution(&mut b, x, (2, CHANNELS), None, "wide");
        let narrow = convolution(&mut b, wide, (CHANNELS, 2), Some(x), "narrow");
        let filters = (0..7).map(BufferId).filter(|id| ![wide, narrow].contains(id)).collect();
        let outputs = if keep_input { vec![narrow, wide] } else { vec![narrow] };
        if in_parts {
            b.finish(filters, outputs).unwrap()
        } else {
            b.finish_unfused(filters, outputs).unwrap()
        }
    }

    #[test]
    fn tiling_saves_memory_with_equal_results() {
        let (parts, untiled) = (bottleneck(true, false), bottleneck(false, false));
        assert_eq!((untiled.instructions.len(), parts.instructions.len()), (2, 2 * IMAGES));
        assert!(parts.work_bytes < untiled.work_bytes / 2, "{} of {}", parts.work_bytes, untiled.work_bytes);
        let inputs: Vec<Vec<Scalar>> = untiled
            .inputs
            .iter()
            .map(|&id| {
                (0..untiled.buffer(id).len).map(|k| Scalar::F32((k * 31 % 97) as f32 / 97.0 - 0.5)).collect()
            })
            .collect();
        let run = |program: &Program| evaluate(program, Mode::Exact, &inputs, Scalars::default()).unwrap();
        assert_eq!(run(&parts), run(&untiled));
    }

    #[test]
    fn outputs_are_not_tiled() {
        assert_eq!(bottleneck(true, true).instructions.len(), 2);
    }
}
