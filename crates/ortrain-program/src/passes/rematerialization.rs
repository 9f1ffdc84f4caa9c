//! Rematerialization: drops values and recomputes them before their next use, to save memory.
//!
//! The instructions of a fused program do not change; some run twice. The selection is greedy. Each step considers the
//! peak of live bytes. It drops the value that lowers the excess over the goal most, per second of recomputation. (Chen
//! et al., 2016, "Training Deep Nets with Sublinear Memory Cost", select by position instead.) A repeated instruction
//! gives the same bits, so results do not depend on the limit. If an operand of the instruction is no longer live, its
//! producer may run again too.

use smallvec::SmallVec;

use super::memory_plan::plan;
use crate::align;
use crate::buffer::{distinct, membership_flags, share_bytes};
use crate::draft::Draft;
use crate::liveness::{LiveRange, Liveness, live_bytes};
use crate::target::{Speed, Target};

use crate::{
    Buffer, BufferId, BufferIds, BufferLocation, Cost, GradientModes, Program, ScheduledInstruction, is_work,
};

/// Speed for the comparison of instructions.
const SPEED: Speed = Target::PLAIN.speed;
/// Maximum number of candidates per step, and depths of recomputed producers that are tried.
const CANDIDATES: usize = 12;
const DEPTHS: [usize; 4] = [0, 1, 2, 4];
/// Maximum number of attempts. The packed arena can be larger than the peak of live bytes.
const ATTEMPTS: usize = 8;

impl Program {
    /// Returns this program with a work arena of at most `bytes`, or as close to `bytes` as recomputation gets.
    #[must_use]
    pub fn within(&self, bytes: usize) -> Program {
        let mut work = Recomputation::new(self);
        let mut best = Draft::from_program(self);
        // The live bytes exceed the arena, because results may reuse the bytes of operands.
        let mut goal = work.peak() as f64 * (bytes as f64 / self.work_bytes.max(1) as f64);
        for _ in 0..ATTEMPTS {
            if best.work_bytes <= bytes || self.instructions.is_empty() {
                break;
            }
            let is_reached = work.lower(goal as i64);
            let mut draft = work.to_draft();
            // An order that moves a read across an update is invalid.
            if plan(&mut draft).is_err() || draft.check().is_err() {
                break;
            }
            goal *= (bytes as f64 / draft.work_bytes as f64).min(0.99);
            if draft.work_bytes < best.work_bytes {
                best = draft;
            }
            if !is_reached {
                break;
            }
        }
        best.into_program()
    }
}

/// Instruction, or a copy of one, with the values that it reads and writes.
#[derive(Clone, Debug)]
struct OrderedInstruction {
    /// Position in the original program.
    origin: usize,
    reads: Values,
    writes: Values,
    is_copy: bool,
}

/// Index of a value in a work buffer. Recomputed values have indices from the number of buffers on.
type Value = usize;

type Values = SmallVec<[Value; 8]>;

/// Conditions and cost for repeating an instruction of the program.
struct Origin {
    /// Estimated seconds.
    seconds: f64,
    /// True if a repetition gives the same result at any position, and all results are work buffers without other
    /// writers.
    is_repeatable: bool,
    /// Position of the first later write to a plane that the instruction reads.
    unchanged_until: usize,
}

/// Order of instructions, and for each value the original value that it is a copy of.
#[derive(Clone)]
struct Order {
    instructions: Vec<OrderedInstruction>,
    originals: Vec<Value>,
}

/// Returns the origins of the instructions of the original program.
fn origins(program: &Program, order: &[OrderedInstruction]) -> Vec<Origin> {
    let Program { buffers, instructions, inputs, outputs, .. } = program;
    let mut writers = vec![0; buffers.len()];
    order.iter().flat_map(|entry| &entry.writes).for_each(|&value| writers[value] += 1);
    // Inputs and outputs of the program.
    let [inputs, outputs] = [inputs, outputs].map(|ids| membership_flags(buffers.len(), ids));
    let origin = |entry: &OrderedInstruction| {
        let ScheduledInstruction { instruction, gradient_modes: entries, .. } = &instructions[entry.origin];
        let Cost { flops, bytes } = instruction.cost_over(buffers);
        let is_recomputable = instruction.writes().into_iter().all(|id| is_work(buffers, id))
            && entry.writes.iter().all(|&value| writers[value] == 1 && !outputs[value]);
        // The operands are inputs, or have a single definition.
        let steady = entry.reads.iter().all(|&value| writers[value] == usize::from(!inputs[value]));
        let is_plane = |id: &BufferId| matches!(buffers[id.0 as usize].location, BufferLocation::Plane(..));
        let planes: BufferIds = instruction.reads().into_iter().filter(is_plane).collect();
        let shares = |a: BufferId, b: BufferId| share_bytes(&buffers[a.0 as usize], &buffers[b.0 as usize]);
        let changes = |later: &ScheduledInstruction| {
            let written = later.instruction.writes();
            written.iter().any(|&id| planes.iter().any(|&plane| shares(plane, id)))
        };
        let mut later = (entry.origin..instructions.len()).filter(|_| !planes.is_empty());
        Origin {
            seconds: flops as f64 / SPEED.flops_per_second + bytes as f64 / SPEED.bytes_per_second,
            is_repeatable: is_recomputable
                && steady
                && *entries == GradientModes::ALL
                && !instruction.has_side_effects(),
            unchanged_until: later.find(|&later| changes(&instructions[later])).unwrap_or(usize::MAX),
        }
    };
    order.iter().map(origin).collect()
}

struct Recomputation<'a> {
    program: &'a Program,
    origins: Vec<Origin>,
    /// Bytes of each buffer in the work arena; zero for other buffers.
    sizes: Vec<i64>,
    order: Order,
}

impl<'a> Recomputation<'a> {
    fn new(program: &'a Program) -> Recomputation<'a> {
        let work = |id: &BufferId| is_work(&program.buffers, *id);
        let values = |ids: BufferIds| distinct(ids.into_iter().filter(work).map(|id| id.0 as usize));
        let entry = |(origin, scheduled): (usize, &ScheduledInstruction)| {
            let [reads, writes] = [scheduled.instruction.reads(), scheduled.instruction.writes()].map(values);
            OrderedInstruction { origin, reads, writes, is_copy: false }
        };
        let entries: Vec<OrderedInstruction> = program.instructions.iter().enumerate().map(entry).collect();
        let size = |buffer: &Buffer| match buffer.location {
            BufferLocation::Work(_) => i64::try_from(align(buffer.bytes())).unwrap_or(i64::MAX >> 16),
            _ => 0,
        };
        let sizes = program.buffers.iter().map(size).collect();
        let origins = origins(program, &entries);
        let order = Order { instructions: entries, originals: (0..program.buffers.len()).collect() };
        Recomputation { program, origins, sizes, order }
    }

    /// Returns the live ranges of the values in an order, and the live bytes at each instruction.
    fn live_ranges(&self, order: &Order) -> (Liveness, Vec<i64>) {
        let mut liveness = Liveness::new(order.originals.len());
        // Inputs and outputs are live in a program without instructions, too.
        let position_count = order.instructions.len().max(1);
        self.program.inputs.iter().for_each(|id| liveness.extend_to(id.0 as usize, 0));
        self.program
            .outputs
            .iter()
            .for_each(|id| liveness.extend_to(id.0 as usize, position_count as isize - 1));
        for (at, entry) in order.instructions.iter().enumerate() {
            entry.reads.iter().chain(&entry.writes).for_each(|&value| liveness.extend_to(value, at as isize));
        }
        let sized_ranges =
            liveness.iter().map(|(value, life)| (life, i128::from(self.sizes[order.originals[value]])));
        let alive = live_bytes(position_count, sized_ranges)[1..=position_count]
            .iter()
            .map(|&bytes| bytes as i64)
            .collect();
        (liveness, alive)
    }

    fn peak(&self) -> i64 {
        self.live_ranges(&self.order).1.into_iter().max().unwrap_or(0)
    }

    /// Repeats instructions until at most `goal` bytes are live everywhere. Returns true if the goal was reached.
    fn lower(&mut self, goal: i64) -> bool {
        loop {
            let (liveness, alive) = self.live_ranges(&self.order);
            let above = |alive: &[i64]| alive.iter().map(|&alive| (alive - goal).max(0)).sum::<i64>();
            let excess = above(&alive);
            let Some(peak) = (0..alive.len()).max_by_key(|&at| alive[at]) else { return true };
            if excess == 0 {
                return true;
            }
            let mut best: Option<(f64, Order)> = None;
            for (value, to) in self.candidates(&liveness, peak) {
                for depth in DEPTHS {
                    let mut order = self.order.clone();
                    let seconds = self.recompute(&mut order, &liveness, value, to, depth);
                    let less = excess - above(&self.live_ranges(&order).1);
                    let gain = less as f64 / seconds.max(1e-9);
                    // Of equal gains the first is chosen, so that the result is deterministic.
                    if less > 0 && best.as_ref().is_none_or(|(best_gain, _)| gain > *best_gain) {
                        best = Some((gain, order));
                    }
                }
            }
            let Some((_, order)) = best else { return false };
            self.order = order;
        }
    }

    /// Returns values that are live across the peak but not used there, with their next use, by bytes freed per second
    /// of recomputation.
    fn candidates(&self, liveness: &Liveness, peak: usize) -> Vec<(Value, usize)> {
        let entries = &self.order.instructions;
        let mut candidates_found: Vec<(f64, Value, usize)> = Vec::new();
        for (at, entry) in entries.iter().enumerate().take(peak) {
            let origin = &self.origins[entry.origin];
            for &value in &entry.writes {
                let reads = |at: &usize| entries[*at].reads.contains(&value);
                let alive = liveness.live_range(value).is_some_and(|life| life.last > peak as isize);
                if !origin.is_repeatable || !alive || reads(&peak) {
                    continue;
                }
                let Some(to) = (peak + 1..entries.len()).find(reads) else { continue };
                debug_assert!(at < to);
                candidates_found.push((
                    self.sizes[self.order.originals[value]] as f64 / origin.seconds.max(1e-9),
                    value,
                    to,
                ));
            }
        }
        candidates_found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        candidates_found.truncate(CANDIDATES);
        candidates_found.into_iter().map(|(_, value, to)| (value, to)).collect()
    }

    /// Inserts copies of a value's producer, and of up to `depth` generations of producers of operands that are no
    /// longer live, before position `to`. Later readers use the copies. Returns the additional seconds.
    fn recompute(
        &self,
        order: &mut Order,
        liveness: &Liveness,
        value: Value,
        to: usize,
        depth: usize,
    ) -> f64 {
        let maker = |order: &Order, value: Value| {
            order.instructions[..to].iter().rposition(|entry| entry.writes.contains(&value))
        };
        let mut positions: SmallVec<[usize; 8]> = maker(order, value).into_iter().collect();
        let mut generation = positions.clone();
        for _ in 0..depth {
            let obsolete: Vec<Value> = generation
                .iter()
                .flat_map(|&at| order.instructions[at].reads.clone())
                .filter(|&read| self.longest_lived_copy(order, liveness, read, to).1 < to)
                .collect();
            let is_new = |at: &usize| {
                self.origins[order.instructions[*at].origin].is_repeatable && !positions.contains(at)
            };
            generation = distinct(obsolete.into_iter().filter_map(|read| maker(order, read)).filter(is_new));
            positions.extend_from_slice(&generation);
        }
        positions.sort_unstable();
        let still = |at: &usize| {
            let until = self.origins[order.instructions[*at].origin].unchanged_until;
            order.instructions[..to].iter().all(|entry| entry.is_copy || entry.origin < until)
        };
        if !positions.iter().all(still) {
            return f64::INFINITY;
        }

        let mut seconds = 0.0;
        let mut new: Vec<(Value, Value)> = Vec::new();
        let mut copies = Vec::new();
        for at in positions {
            let mut copy = OrderedInstruction { is_copy: true, ..order.instructions[at].clone() };
            for read in &mut copy.reads {
                let known = new.iter().find(|(root, _)| *root == order.originals[*read]);
                *read = known
                    .map_or_else(|| self.longest_lived_copy(order, liveness, *read, to).0, |pair| pair.1);
            }
            for write in &mut copy.writes {
                let root = order.originals[*write];
                *write = order.originals.len();
                order.originals.push(root);
                new.push((root, *write));
            }
            seconds += self.origins[copy.origin].seconds;
            copies.push(copy);
        }
        for entry in &mut order.instructions[to..] {
            for read in &mut entry.reads {
                if let Some(pair) = new.iter().find(|(root, _)| *root == order.originals[*read]) {
                    *read = pair.1;
                }
            }
        }
        order.instructions.splice(to..to, copies);
        // Copies that were inserted earlier for these readers are now unused.
        loop {
            let mut read = vec![false; order.originals.len()];
            order.instructions.iter().flat_map(|entry| &entry.reads).for_each(|&value| read[value] = true);
            let before = order.instructions.len();
            order.instructions.retain(|entry| {
                let useful = !entry.is_copy || entry.writes.iter().any(|&value| read[value]);
                if !useful {
                    seconds -= self.origins[entry.origin].seconds;
                }
                useful
            });
            if order.instructions.len() == before {
                return seconds;
            }
        }
    }

    /// Returns the copy of a value that is live longest among those defined before a position, and the end of its live
    /// range.
    fn longest_lived_copy(
        &self,
        order: &Order,
        liveness: &Liveness,
        value: Value,
        to: usize,
    ) -> (Value, usize) {
        let root = order.originals[value];
        // New values have no live ranges yet.
        let versions = liveness.iter().filter_map(|(other, LiveRange { first, last })| {
            (order.originals[other] == root && first < to as isize).then_some((other, last.unsigned_abs()))
        });
        versions.max_by_key(|&(_, last)| last).unwrap_or((value, 0))
    }

    /// Returns the program in the current order.
    fn to_draft(&self) -> Draft {
        let Program { buffers, instructions, .. } = self.program;
        let Order { instructions: entries, originals: roots } = &self.order;
        let buffers = roots.iter().map(|&root| buffers[root].clone()).collect();
        let to_scheduled = |entry: &OrderedInstruction| {
            let mut scheduled = instructions[entry.origin].clone();
            let version = |values: &[Value], id: BufferId| {
                let original_value = values.iter().find(|&&value| roots[value] == id.0 as usize);
                original_value.map_or(id, |&value| BufferId(value as u32))
            };
            let (read, write) = (|id| version(&entry.reads, id), |id| version(&entry.writes, id));
            scheduled.instruction.substitute_buffers(&read, &write);
            scheduled.versions.substitute_buffers(&read, &write);
            scheduled
        };
        let mut draft = Draft::from_program(self.program);
        (draft.buffers, draft.instructions) = (buffers, entries.iter().map(to_scheduled).collect());
        draft
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{Builder, DType, Type, UnaryOp};

    use super::*;
    use crate::{
        Backend, Bindings, GradientMode as Way, Instruction, Load, Nest, Operand, ProgramBuilder, Reference,
        Scalars, Workspace,
    };

    const N: usize = 1000;

    /// Builds a chain of functions. The second half uses the results of the first half in reverse order.
    fn mirrored_chain(depth: usize) -> Program {
        let node: Arc<str> = "node".into();
        let mut b = ProgramBuilder::new();
        let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[N]);
        let map = |b: &mut ProgramBuilder, reads: &[BufferId], label: String| {
            let mut e = Builder::new();
            let x: Vec<_> = (0..reads.len()).map(|slot| e.load(slot, Type::F32)).collect();
            let product = if x.len() == 2 { e.mul(x[0], x[1]) } else { x[0] };
            let y = e.unary(UnaryOp::Tanh, product);
            let write = b.work(&label, DType::F32, N);
            let nest = Nest {
                dims: [N].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: reads.iter().map(|&id| Load::Buffer(contiguous(id))).collect(),
                expr: e.finish(&[y]),
                reductions: Vec::new(),
                stores: vec![contiguous(write)],
            };
            b.emit(Instruction::from(nest), GradientModes::ALL, &node).unwrap();
            write
        };
        let x = b.work("x", DType::F32, N);
        let mut results = vec![x];
        for k in 0..depth {
            let last = *results.last().unwrap();
            results.push(map(&mut b, &[last], format!("up {k}")));
        }
        let mut y = *results.last().unwrap();
        for (k, &value) in results.iter().enumerate().rev() {
            y = map(&mut b, &[y, value], format!("down {k}"));
        }
        b.finish_unfused(vec![x], vec![y]).unwrap()
    }

    fn run(program: &Program) -> Vec<u8> {
        let program = Arc::new(program.within(usize::MAX));
        let executable = Reference.compile(program.clone()).unwrap();
        let mut work = Workspace::new(Arc::new(Reference));
        work.prepare(&program, executable.scratch_bytes(), 0).unwrap();
        let location = |id: BufferId| match program.buffer(id).location {
            BufferLocation::Work(offset) => offset,
            other => panic!("{other:?}"),
        };
        let x: Vec<u8> = (0..N).flat_map(|i| (i as f32 / 300.0 - 1.5).to_le_bytes()).collect();
        work.arena().write(location(program.inputs[0]), &x).unwrap();
        let scalars = Scalars { seed: 0, train_step: 0 };
        executable.run(&Bindings { planes: &[] }, &mut work, Way::Overwrite, scalars).unwrap();
        work.arena().to_vec(location(program.outputs[0]), 4 * N).unwrap()
    }

    #[test]
    fn memory_limit_preserves_results() {
        let full = mirrored_chain(24);
        let expected = run(&full);
        let mut steps = full.instructions.len();
        for percent in [100, 80, 60, 45] {
            let bytes = full.work_bytes * percent / 100;
            let less = full.within(bytes);
            assert!(less.work_bytes <= bytes, "{percent} %: {} of {bytes} bytes", less.work_bytes);
            assert!(less.instructions.len() >= steps, "less memory for less work");
            steps = less.instructions.len();
            assert_eq!(run(&less), expected, "{percent} %");
        }
        assert!(steps > full.instructions.len());
        // The result is deterministic.
        let [first, other] = [0, 0].map(|_| full.within(full.work_bytes / 2).to_string());
        assert_eq!(first, other);
    }

    /// The body of a loop may return its input.
    #[test]
    fn empty_program_is_unchanged() {
        let mut b = ProgramBuilder::new();
        let x = b.work("x", DType::F32, N);
        let program = b.finish(vec![x], vec![x]).unwrap();
        let less = program.within(0);
        assert_eq!((less.instructions.len(), less.work_bytes), (0, program.work_bytes));
    }

    #[test]
    fn unreachable_limit_is_approached() {
        let full = mirrored_chain(6);
        let minimal = full.within(0);
        assert!(minimal.work_bytes < full.work_bytes);
        assert_eq!(run(&minimal), run(&full));
    }
}
