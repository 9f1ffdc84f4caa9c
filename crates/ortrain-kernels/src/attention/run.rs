//! Running an attention.

use super::product::{Left, Product};
use super::rows::{Softmax, SoftmaxGradient};
use super::{Computed, Cut, Engine, Gradients, Kernel, MOST_BUFFERS, Operand, Pass, Pointwise, Taped};
use crate::gemm::pack::{Block, pack};
use crate::isa::{Level, Work};
use crate::pool::Pool;
use crate::tape::Site;
use crate::tape::number::Number;
use crate::views::{Bases, Parts, RunScalars};

/// What a task works with.
#[derive(Clone, Copy)]
struct Task<'a> {
    bases: &'a [*mut u8],
    scalars: RunScalars,
    /// The worker's scratch memory.
    scratch: *mut u8,
    head: usize,
}

impl Task<'_> {
    /// A place in the worker's scratch memory.
    fn at<T>(&self, place: usize) -> *mut T {
        self.scratch.wrapping_add(place).cast()
    }
}

impl<T: Computed + Send + Sync> Engine for Kernel<T> {
    fn cut(&self) -> &Cut {
        &self.cut
    }

    unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, parts: Parts) {
        let &Cut { heads, queries, keys, parts: count, part, group, .. } = &self.cut;
        let bases = Bases(bases);
        let pieces = heads * count;
        pool.run(pieces.div_ceil(group), parts.workers, &|task, worker| {
            let bases = { bases }.0;
            for piece in task * group..pieces.min((task + 1) * group) {
                let (head, number) = (piece / count, piece % count);
                let task = Task { bases, scalars, scratch: parts.of(worker), head };
                let first = number * part;
                let end = queries.min(first + part);
                // SAFETY: the caller's contract; pieces have distinct results, and a worker its own scratch memory.
                unsafe {
                    match &self.pass {
                        Pass::Output(output) => self.output(&task, output, (first, end)),
                        Pass::Gradients(gradients) => {
                            let sums = if count > 1 { parts.shared() } else { task.scratch };
                            self.gradients(&task, gradients, (first, end), (sums, piece));
                        }
                    }
                }
            }
        });
        let Pass::Gradients(gradients) = &self.pass else { return };
        if count == 1 {
            return;
        }
        pool.run(heads, parts.workers, &|head, worker| {
            let task = Task { bases: { bases }.0, scalars, scratch: parts.of(worker), head };
            for (taped, at, elements) in self.summed(gradients) {
                let Some(taped) = taped else { continue };
                let len = keys * elements;
                // SAFETY: all tasks are done, and these sums are this task's alone.
                unsafe {
                    let sums = parts.shared().add(at).cast::<T>().add(head * count * len);
                    let all = std::slice::from_raw_parts_mut(sums, count * len);
                    let (total, more) = all.split_at_mut(len);
                    for part in more.chunks_exact(len) {
                        self.isa.run(Add { to: total, from: part });
                    }
                    self.tape(&task, taped, (0, keys), sums, std::ptr::null(), std::ptr::null_mut());
                }
            }
        });
    }
}

/// Adds one row of numbers to another.
struct Add<'a, T> {
    to: &'a mut [T],
    from: &'a [T],
}

impl<T: Number> Work for Add<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = to.plus(from);
        }
    }
}

impl<T: Computed> Kernel<T> {
    /// The gradients that are sums over queries: where the sums lie, and elements of a key or value.
    fn summed<'a>(&self, gradients: &'a Gradients) -> [(Option<&'a Taped>, usize, usize); 2] {
        [
            (gradients.k.as_ref(), self.layout.k_sums, self.cut.size),
            (gradients.v.as_ref(), self.layout.v_sums, self.cut.width),
        ]
    }

    /// The address of the first element of a query (or key) of an operand.
    fn line(&self, task: &Task<'_>, operand: &Operand, line: usize) -> *const T {
        let at = operand.offset + operand.batch.offset(task.head) + line as isize * operand.line;
        task.bases[operand.buffer].cast::<T>().wrapping_offset(at).cast_const()
    }

    /// Packs lines of an operand as a right factor: its columns are the lines (`turned`), or their elements.
    ///
    /// # Safety
    /// The operand has the lines, and there is room for whole panels.
    unsafe fn pack(
        &self,
        task: &Task<'_>,
        operand: &Operand,
        (first, lines): (usize, usize),
        elements: usize,
        turned: bool,
        to: usize,
    ) {
        let at = self.line(task, operand, first).cast();
        let &Operand { line, step, .. } = operand;
        let block = if turned {
            Block { at, line_step: line, depth_step: step, lines, depth: elements }
        } else {
            Block { at, line_step: step, depth_step: line, lines: elements, depth: lines }
        };
        // SAFETY: the caller's contract.
        unsafe { pack(self.isa, T::DTYPE, block, self.micro.nr, task.at::<T>(to)) };
    }

    /// A block of a product, `[rows, cols]`.
    ///
    /// # Safety
    /// As [`Product::run`].
    unsafe fn multiply(
        &self,
        task: &Task<'_>,
        [rows, cols, depth]: [usize; 3],
        a: Left<T>,
        b: usize,
        (c, add): (*mut T, bool),
    ) {
        let (b, corner) = (task.at::<T>(b).cast_const(), task.at(self.layout.corner));
        // SAFETY: the caller's contract.
        unsafe { Product { rows, cols, depth, a, b, c, add, corner }.run(self.isa, self.micro) };
    }

    /// Runs a nest over some lines of its space, whose values lie in a block. Loads of what is given next, and the store
    /// if that has no buffer, go to blocks over the same lines.
    ///
    /// # Safety
    /// The contract of [`super::AttentionKernel::run`]; the blocks have elements for all lines, and `to` may be `block`.
    unsafe fn tape(
        &self,
        task: &Task<'_>,
        taped: &Taped,
        (first, lines): (usize, usize),
        block: *const T,
        next: *const T,
        to: *mut T,
    ) {
        let tape = &taped.tape;
        let elements = taped.elements;
        let (first, count) = (first * elements, lines * elements);
        let mut slots = [std::ptr::null_mut(); MOST_BUFFERS];
        slots[taped.given..][..taped.buffers].copy_from_slice(&task.bases[taped.buffer..][..taped.buffers]);
        // Accesses count from the first element of all heads.
        let before = task.head * taped.whole + first;
        if taped.given > 1 {
            slots[1] = next.wrapping_sub(before).cast_mut().cast();
        }
        if taped.to_block {
            slots[taped.loads] = to.wrapping_sub(before).cast();
        }
        let site = |product: *const T| Site {
            tape,
            bases: &slots,
            scalars: task.scalars,
            frame: task.at(taped.frame),
            product: product.cast(),
        };
        // SAFETY: the caller's contract, and the layout made by `Kernel::new`. What is done once reads what is the same
        // everywhere.
        unsafe {
            site(block).run(&tape.once, 0, 0, tape.tile);
            for (start, n) in tape.tiles(first, first + count) {
                site(block.add(start - first)).run(&tape.stages[0].body, task.head, start, n);
            }
        }
    }

    /// The softmax of a block of queries, and what weighs the values, at their places in scratch memory.
    ///
    /// # Safety
    /// The contract of [`super::AttentionKernel::run`]; the keys are packed.
    unsafe fn weigh(&self, task: &Task<'_>, block: (usize, usize)) {
        let (Cut { keys, size, .. }, layout) = (&self.cut, &self.layout);
        let (first, rows) = block;
        let softmax: *mut T = task.at(layout.softmax);
        // SAFETY: the caller's contract, and the layout made by `Kernel::new`.
        unsafe {
            let a = Left { at: self.line(task, &self.q, first), row: self.q.line, depth: self.q.step };
            self.multiply(task, [rows, *keys, *size], a, layout.k_turned, (softmax, false));
            let scale = match &self.scores {
                Pointwise::Nothing => None,
                Pointwise::Scale(factor) => Some(T::from_constant(*factor)),
                Pointwise::Tape(taped) => {
                    self.tape(task, taped, block, softmax, std::ptr::null(), softmax);
                    None
                }
            };
            let all = std::slice::from_raw_parts_mut(softmax, rows * keys);
            self.isa.run(Softmax { rows: all, keys: *keys, scale });
            if let Pointwise::Tape(taped) = &self.weights {
                self.tape(task, taped, block, softmax, std::ptr::null(), task.at(layout.weights));
            }
        }
    }

    /// The output for some queries of a head: first one and end.
    unsafe fn output(&self, task: &Task<'_>, output: &Taped, (first, end): (usize, usize)) {
        let (&Cut { keys, size, width, rows, .. }, layout) = (&self.cut, &self.layout);
        // SAFETY: the caller's contract, and the layout made by `Kernel::new`.
        unsafe {
            self.pack(task, &self.k, (0, keys), size, true, layout.k_turned);
            self.pack(task, &self.v, (0, keys), width, false, layout.v);
            for at in (first..end).step_by(rows) {
                let block = (at, rows.min(end - at));
                self.weigh(task, block);
                let (a, result) = (self.weights(task), task.at(layout.result));
                self.multiply(task, [block.1, width, keys], a, layout.v, (result, false));
                self.tape(task, output, block, result, std::ptr::null(), std::ptr::null_mut());
            }
        }
    }

    /// What weighs the values, as a left factor.
    fn weights(&self, task: &Task<'_>) -> Left<T> {
        let at = task.at::<T>(self.layout.weights).cast_const();
        Left { at, row: self.cut.keys as isize, depth: 1 }
    }

    /// The gradients for some queries of a head. `sums` is the memory where those of keys and values are added up, and
    /// which of the sums in it are this task's.
    unsafe fn gradients(
        &self,
        task: &Task<'_>,
        gradients: &Gradients,
        (first, end): (usize, usize),
        (sums, piece): (*mut u8, usize),
    ) {
        let (&Cut { keys, size, width, rows, parts, .. }, layout) = (&self.cut, &self.layout);
        let given = &gradients.given;
        let piece = if parts > 1 { piece } else { 0 };
        let sums_at = |place: usize, elements: usize| {
            sums.wrapping_add(place).cast::<T>().wrapping_add(piece * keys * elements)
        };
        let (k_sums, v_sums) = (sums_at(layout.k_sums, size), sums_at(layout.v_sums, width));
        let needs_scores = gradients.q.is_some() || gradients.k.is_some();
        // SAFETY: the caller's contract, and the layout made by `Kernel::new`.
        unsafe {
            self.pack(task, &self.k, (0, keys), size, true, layout.k_turned);
            if needs_scores {
                self.pack(task, &self.v, (0, keys), width, true, layout.v_turned);
            }
            if gradients.q.is_some() {
                self.pack(task, &self.k, (0, keys), size, false, layout.k);
            }
            for at in (first..end).step_by(rows) {
                let block = (at, rows.min(end - at));
                let rows = block.1;
                self.weigh(task, block);
                let weights = self.weights(task);
                let add = at > first;
                if gradients.v.is_some() {
                    self.pack(task, given, block, width, false, layout.given_block);
                    let a = weights.turned();
                    self.multiply(task, [keys, width, rows], a, layout.given_block, (v_sums, add));
                }
                if !needs_scores {
                    continue;
                }
                self.scores_gradient(task, gradients, block);
                let at = task.at::<T>(layout.gradients).cast_const();
                let scores = Left { at, row: keys as isize, depth: 1 };
                if gradients.k.is_some() {
                    self.pack(task, &self.q, block, size, false, layout.q_block);
                    let a = scores.turned();
                    self.multiply(task, [keys, size, rows], a, layout.q_block, (k_sums, add));
                }
                if let Some(taped) = &gradients.q {
                    let result = task.at(layout.result);
                    self.multiply(task, [rows, size, keys], scores, layout.k, (result, false));
                    self.tape(task, taped, block, result, std::ptr::null(), std::ptr::null_mut());
                }
            }
            if parts == 1 {
                for (taped, sums) in [(&gradients.k, k_sums), (&gradients.v, v_sums)] {
                    if let Some(taped) = taped {
                        self.tape(task, taped, (0, keys), sums, std::ptr::null(), std::ptr::null_mut());
                    }
                }
            }
        }
    }

    /// The gradients of the products of a block of queries with the keys, at their place in scratch memory.
    unsafe fn scores_gradient(&self, task: &Task<'_>, gradients: &Gradients, block: (usize, usize)) {
        let (&Cut { keys, width, .. }, layout) = (&self.cut, &self.layout);
        let (first, rows) = block;
        let given = &gradients.given;
        let (softmax, to) = (task.at::<T>(layout.softmax).cast_const(), task.at::<T>(layout.gradients));
        // SAFETY: the caller's contract, and the layout made by `Kernel::new`.
        unsafe {
            let a = Left { at: self.line(task, given, first), row: given.line, depth: given.step };
            self.multiply(task, [rows, keys, width], a, layout.v_turned, (to, false));
            if let Pointwise::Tape(taped) = &gradients.weights {
                self.tape(task, taped, block, to, softmax, to);
            }
            let scale = match &gradients.scores {
                Pointwise::Scale(factor) => Some(T::from_constant(*factor)),
                _ => None,
            };
            self.isa.run(SoftmaxGradient {
                softmax: std::slice::from_raw_parts(softmax, rows * keys),
                gradients: std::slice::from_raw_parts_mut(to, rows * keys),
                keys,
                scale,
            });
            if let Pointwise::Tape(taped) = &gradients.scores {
                self.tape(task, taped, block, to, std::ptr::null(), to);
            }
        }
    }
}
