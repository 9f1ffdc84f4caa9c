//! Execution of a product that `plan` has partitioned.

use ortrain_expr::OutOfRange;

use super::byte_tiles::{ByteProducts, SmallM};
use super::desc::GemmDesc;
use super::levels::Real;
use super::micro::{DotKernels, Factor, Micro, Target, TileProducts};
use super::operand::{Operand, Packing};
use super::pack::{Block, pack, transpose};
use super::packed_dots::{self, PackedDots};
use super::plan::{BlockKey, PackedBlocks, ProductPlan};
use super::quantized::{Numbers, QuantizedSlots};
use super::small_m::{self, SmallMBlock};
use super::strategies::Strategy;
use super::tiles::Side;
use crate::isa::{Level, Work};
use crate::pool::{Pool, pause};
use crate::scratch::{BaseAddresses, RunScalars, ScratchParts};
use crate::tile::{Compiler, ExecContext, Failure};

/// Approximate minimum and maximum number of elements of a packing task for all threads.
const PACK_TASK_ELEMENTS: (usize, usize) = (1 << 13, 1 << 15);
/// Number of packing tasks for all threads, unless they would be too large or too small.
const PACK_TASKS: usize = 8;
/// Approximate number of elements of partial results that one task adds.
const COMBINE_TASK_ELEMENTS: usize = 1 << 15;

pub(super) struct Product<T: 'static> {
    micro: Micro<T>,
    dots: Option<DotKernels<T>>,
    shape: ProductPlan,
}

/// One block, over a range of depths.
#[derive(Clone, Copy)]
struct Task<'a, T> {
    batch: usize,
    /// First index and number.
    rows: (usize, usize),
    cols: (usize, usize),
    depths: (usize, usize),
    /// First column of the strip, for which B is packed for all tasks.
    strip: usize,
    shared: *mut u8,
    scratch: *mut u8,
    bases: &'a [*mut u8],
    /// Block of the product: its address, and the step from row to row.
    c: *mut T,
    c_row: isize,
}

impl<T: Real + Send + Sync> Engine for Product<T> {
    fn shape(&self) -> &ProductPlan {
        &self.shape
    }

    fn describe(&self) -> String {
        self.shape.describe(&self.micro)
    }

    unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        parts: ScratchParts,
    ) -> Result<(), OutOfRange> {
        let shape = &self.shape;
        for worker in 0..parts.workers {
            // SAFETY: both values are at the start of the worker's scratch memory.
            unsafe {
                parts.worker_part(worker).cast::<Failure>().write(Failure::NONE);
                parts
                    .worker_part(worker)
                    .add(shape.epilogue.frame)
                    .cast::<PackedBlocks>()
                    .write(PackedBlocks::NONE);
            }
        }
        let bases = BaseAddresses(bases);
        for strip in (0..shape.n).step_by(shape.strip) {
            let cols = shape.strip.min(shape.n - strip);
            if shape.b.packing == Packing::Shared {
                // SAFETY: the caller's contract.
                unsafe { self.pack_strip(&bases, (strip, cols), pool, parts) };
            }
            let sizes = [shape.batch, shape.m.div_ceil(shape.rows), cols.div_ceil(shape.cols)];
            let [slow, middle, fast] = shape.order;
            let blocks: usize = sizes.iter().product::<usize>() * shape.parts;
            pool.run(blocks.div_ceil(shape.group), parts.workers, &|task, worker| {
                let _session = self.micro.open_session();
                for block in task * shape.group..blocks.min((task + 1) * shape.group) {
                    pause();
                    let mut index = [0; 3];
                    index[fast] = block % sizes[fast];
                    let rest = block / sizes[fast];
                    index[middle] = rest % sizes[middle];
                    let rest = rest / sizes[middle];
                    index[slow] = rest % sizes[slow];
                    let part = rest / sizes[slow];
                    // SAFETY: tasks have distinct blocks, and each worker has its own scratch memory.
                    unsafe { self.run_block(&{ bases }, scalars, index, part, (strip, cols), parts, worker) };
                }
            });
        }
        if shape.has_separate_epilogue {
            // SAFETY: the caller's contract, and all partial results are complete.
            unsafe { self.combine_partials(&bases, scalars, pool, parts) };
        }
        // SAFETY: all tasks are done.
        let failures =
            (0..parts.workers).map(|worker| unsafe { parts.worker_part(worker).cast::<Failure>().read() });
        failures.min().unwrap_or(Failure::NONE).result()
    }
}

impl<T: Real> Product<T> {
    pub(super) fn new(desc: &GemmDesc, compiler: Compiler<'_>) -> Result<Product<T>, String> {
        let (shape, micro) = ProductPlan::new(desc, compiler)?;
        Ok(Product { micro, dots: T::dots(compiler.isa()), shape })
    }

    /// Packs B for all tasks of a strip.
    unsafe fn pack_strip(
        &self,
        bases: &BaseAddresses<'_>,
        (first, cols): (usize, usize),
        pool: &Pool,
        parts: ScratchParts,
    ) {
        let ProductPlan { batch, k, depth, ref b, .. } = self.shape;
        let micro = self.micro;
        let nr = micro.nr;
        let padded = cols.next_multiple_of(nr);
        let copies = if b.batch.is_constant() { 1 } else { batch };
        // Pieces are as wide as possible: if columns are adjacent, the columns of a piece are read in order.
        let piece = (copies * padded * k / PACK_TASKS).clamp(PACK_TASK_ELEMENTS.0, PACK_TASK_ELEMENTS.1);
        let some = (piece / depth.min(k.max(1))).next_multiple_of(nr).clamp(nr, padded);
        let (chunks, groups) = (k.div_ceil(depth), padded.div_ceil(some));
        pool.run(copies * chunks * groups, parts.workers, &|task, _| {
            let bases = &{ *bases };
            let (copy, chunk, group) = (task / groups / chunks, task / groups % chunks, task % groups);
            let (start, lines) = (group * some, some.min(cols - group * some));
            let (p, n) = (chunk * depth, depth.min(k - chunk * depth));
            let block = Block {
                at: b.element_address(bases.0, copy, first + start, p),
                line_step: b.line,
                depth_step: b.depth,
                lines,
                depth: n,
            };
            // SAFETY: the layout of `Shape::new`; tasks have distinct panels.
            unsafe {
                let packed = |lines, depth| micro.packed_len(Side::B, lines, depth);
                let at = copy * packed(padded, k) + packed(padded, p) + packed(start, n);
                let to = parts.shared_part().add(b.at).cast::<T>().add(at);
                let zero_points = b.zero_points(bases.0, copy, first + start);
                let isa = self.shape.epilogue.isa;
                micro.pack_without(isa, b.elements, (block, zero_points), Side::B, to);
            }
        });
    }

    /// Computes a block, or a part of its sums. Finishes the block, unless it is only a part.
    unsafe fn run_block(
        &self,
        bases: &BaseAddresses<'_>,
        scalars: RunScalars,
        [batch, row, col]: [usize; 3],
        part: usize,
        (strip, strip_cols): (usize, usize),
        parts: ScratchParts,
        worker: usize,
    ) {
        let shape = &self.shape;
        let range = |i: usize, size: usize, end: usize| (i * size, size.min(end - i * size));
        let rows = range(row, shape.rows, shape.m);
        let (col, count) = range(col, shape.cols, strip_cols);
        let cols = (strip + col, count);
        let depths = if shape.k == 0 { (0, 0) } else { range(part, shape.part, shape.k) };
        let scratch = parts.worker_part(worker);
        // SAFETY: the caller's contract, and the layout of `Shape::new`.
        unsafe {
            let (c, c_row) = match &shape.direct {
                _ if shape.strategy == Strategy::SwappedPanels => {
                    (scratch.add(shape.swapped_at).cast::<T>(), cols.1 as isize)
                }
                _ if shape.has_separate_epilogue => {
                    let partial = parts.shared_part().add(shape.partial_at).cast::<T>();
                    let row = ((part * shape.batch + batch) * shape.m + rows.0) * shape.n;
                    (partial.add(row + cols.0), shape.n as isize)
                }
                Some(direct) => {
                    let base = bases.0[2].cast::<T>();
                    let offset = direct.offset + direct.batch.offset(batch) + rows.0 as isize * direct.row;
                    (base.wrapping_offset(offset).wrapping_add(cols.0), direct.row)
                }
                None => (scratch.add(shape.block_at).cast::<T>(), cols.1 as isize),
            };
            let shared = parts.shared_part();
            let task = Task { batch, rows, cols, depths, strip, shared, scratch, bases: bases.0, c, c_row };
            match (shape.strategy, self.dots) {
                (Strategy::FewRows, _) => match (self.micro.tiles, &shape.b.quantized) {
                    (Some(TileProducts::Bytes(bytes)), _) => self.multiply_small_m_of_bytes(&task, bytes),
                    (_, Some(quantized)) => self.multiply_small_m_of_packed(&task, quantized),
                    _ => self.multiply_small_m(&task),
                },
                (Strategy::DotsOfRows | Strategy::DotsOfColumns, Some(dots)) => {
                    self.multiply_by_dots(&task, dots);
                }
                _ => self.multiply(&task),
            }
            let is_swapped = shape.strategy == Strategy::SwappedPanels;
            let task = if is_swapped { self.transpose_block(task, parts) } else { task };
            if shape.direct.is_none() && !shape.has_separate_epilogue {
                self.finish_block(&task, scalars);
            }
        }
    }

    /// Transposes a block of a swapped product into a block of the product itself.
    unsafe fn transpose_block<'a>(&self, task: Task<'a, T>, parts: ScratchParts) -> Task<'a, T> {
        let ProductPlan {
            m,
            n,
            has_separate_epilogue: is_separate,
            partial_at,
            block_at,
            epilogue: ref tape,
            ..
        } = self.shape;
        let (rows, cols) = (task.cols, task.rows);
        // SAFETY: the caller's contract, and the layout of `Shape::new`. The destination has the capacity of the block,
        // or of all results, in rows of `m` elements: the number of rows of the swapped product.
        unsafe {
            let (c, c_row) = if is_separate {
                let partial_sums = parts.shared_part().add(partial_at).cast::<T>();
                (partial_sums.add((task.batch * n + rows.0) * m + cols.0), m)
            } else {
                (task.scratch.add(block_at).cast::<T>(), cols.1)
            };
            transpose(tape.isa, task.c, rows.1, (cols.1, rows.1), c, c_row);
            Task { rows, cols, c, c_row: c_row as isize, ..task }
        }
    }

    /// Computes a block of a product with few rows.
    unsafe fn multiply_small_m(&self, task: &Task<'_, T>) {
        let ProductPlan { k, b, epilogue: tape, block_at, direct, .. } = &self.shape;
        let &Task { rows, cols, scratch, .. } = task;
        // SAFETY: the caller's contract, and the layout of `Shape::new`.
        unsafe {
            let (packed, _) = self.pack_small_m(task);
            let block = scratch.add(*block_at).cast::<T>();
            let small_block = SmallMBlock {
                a: packed.cast_const(),
                b: b.element_address(task.bases, task.batch, cols.0, 0),
                line: b.line,
                depth: b.depth,
                rows: rows.1,
                cols: cols.1,
                k: *k,
                c: block,
            };
            small_m::multiply(tape.isa, b.elements, small_block);
            if direct.is_some() {
                for i in 0..rows.1 {
                    let to = task.c.wrapping_offset(i as isize * task.c_row).cast::<u8>();
                    std::ptr::copy_nonoverlapping(block.add(i * cols.1).cast(), to, cols.1 * T::BYTES);
                }
            }
        }
    }

    /// Works like [`Self::multiply_small_m`] for packed integers as B.
    ///
    /// # Safety
    /// The contract of [`Self::multiply_small_m`].
    unsafe fn multiply_small_m_of_packed(&self, task: &Task<'_, T>, quantized: &QuantizedSlots) {
        let ProductPlan { k, b, epilogue: tape, .. } = &self.shape;
        let &Task { rows, cols, scratch, .. } = task;
        let QuantizedSlots { matrix, .. } = quantized;
        // SAFETY: the caller's contract, and the layout of `Shape::new`.
        unsafe {
            let (packed, is_new) = self.pack_small_m(task);
            let rearranged = scratch.add(b.at);
            if is_new {
                let order = packed_dots::order_of_lanes(matrix.bits, matrix.is_high_first);
                let from = std::slice::from_raw_parts(packed.cast_const().cast(), rows.1 * k);
                let to = std::slice::from_raw_parts_mut(rearranged.cast(), from.len());
                packed_dots::rearrange(from, *k, &order, to);
            }
            let numbers = Numbers::of(matrix);
            let line = b.position(0, cols.0, 0) as usize / matrix.line_len();
            let source = quantized.source(b.slot, task.bases);
            let dots = PackedDots {
                a: rearranged.cast_const().cast(),
                rows: rows.1,
                k: *k,
                b: source.blocks_from(line * matrix.blocks, &numbers),
                lines: cols.1,
                c: task.c.cast(),
                c_row: task.c_row,
            };
            packed_dots::multiply(tape.isa, &dots);
        }
    }

    /// Packs the rows of A unless they are packed already. Returns them, and true if they were packed now.
    ///
    /// # Safety
    /// The contract of [`Self::multiply_small_m`].
    unsafe fn pack_small_m(&self, task: &Task<'_, T>) -> (*mut T, bool) {
        let ProductPlan { k, a, epilogue: tape, .. } = &self.shape;
        let &Task { rows, scratch, .. } = task;
        // SAFETY: the caller's contract, and the layout of `Shape::new`.
        unsafe {
            let packed_keys = &mut (*scratch.add(tape.frame).cast::<PackedBlocks>()).a;
            let packed = scratch.add(a.at).cast::<T>();
            let key = (a.offset + a.batch.offset(task.batch), rows.0, 0);
            let is_new = *packed_keys != key;
            if is_new {
                let at = a.element_address(task.bases, task.batch, rows.0, 0);
                let lines = Block { at, line_step: a.line, depth_step: a.depth, lines: rows.1, depth: *k };
                pack(tape.isa, a.elements, lines, 1, packed);
                *packed_keys = key;
            }
            (packed, is_new)
        }
    }

    /// Computes a block of a product as dot products. Few lines of one operand, which stay in the first-level cache,
    /// are multiplied with the lines of the other operand.
    unsafe fn multiply_by_dots(&self, task: &Task<'_, T>, dots: DotKernels<T>) {
        let ProductPlan { depth, strategy, epilogue: ref tape, ref a, ref b, .. } = self.shape;
        let &Task { rows, cols, depths, scratch, c, c_row, .. } = task;
        let (operand, other, lines, others, line_step, other_step) = if strategy == Strategy::DotsOfRows {
            (a, b, rows, cols, c_row, 1)
        } else {
            (b, a, cols, rows, 1, c_row)
        };
        let first = operand.element_address(task.bases, task.batch, lines.0, depths.0);
        let (mut at, mut line) = (first.cast::<T>(), operand.line);
        // SAFETY: the layout of `Shape::new`.
        let decoded = unsafe { scratch.add(self.shape.decoded_at) };
        // SAFETY: the caller's contract, and the layout of `Shape::new`.
        unsafe {
            if operand.packing != Packing::InPlace {
                let packed_keys = &mut (*scratch.add(tape.frame).cast::<PackedBlocks>()).a;
                let packed = scratch.add(operand.at).cast::<T>();
                let key = (operand.offset + operand.batch.offset(task.batch), lines.0, depths.0);
                if *packed_keys != key {
                    operand.for_each_piece(
                        tape.isa,
                        task.bases,
                        task.batch,
                        lines,
                        depths,
                        1,
                        decoded,
                        |piece, block| {
                            pack(tape.isa, operand.elements, block, 1, packed.add(piece * depths.1));
                        },
                    );
                    *packed_keys = key;
                }
                (at, line) = (packed, depths.1 as isize);
            }
            let run_chunk = |p: usize, j: usize| {
                let n = depth.min(depths.1 - p);
                let is_full = others.1 - j >= dots.width;
                let (run, width) = if is_full { (dots.several, dots.width) } else { (dots.single, 1) };
                let multiply_lines = |of_other: *const u8, other_line: isize| {
                    for i in (0..lines.1).step_by(run.len()) {
                        let count = run.len().min(lines.1 - i);
                        let c = c.wrapping_offset(i as isize * line_step + j as isize * other_step);
                        let skinny_line = at.wrapping_offset(i as isize * line).wrapping_add(p);
                        let of_other = of_other.cast();
                        run[count - 1](
                            n,
                            skinny_line,
                            line,
                            of_other,
                            other_line,
                            c,
                            line_step,
                            other_step,
                            p > 0,
                        );
                    }
                };
                let (some, depths) = ((others.0 + j, width), (depths.0 + p, n));
                other.for_each_piece(
                    tape.isa,
                    task.bases,
                    task.batch,
                    some,
                    depths,
                    width,
                    decoded,
                    |_, block| {
                        multiply_lines(block.at, block.line_step);
                    },
                );
                width
            };
            let chunks = || (0..depths.1).step_by(depth);
            let mut j = 0;
            if other.quantized.is_some() {
                // Each line of packed integers is read in order.
                while j < others.1 {
                    pause();
                    let mut width = 1;
                    for p in chunks() {
                        width = run_chunk(p, j);
                    }
                    j += width;
                }
                return;
            }
            for p in chunks() {
                pause();
                j = 0;
                while j < others.1 {
                    j += run_chunk(p, j);
                }
            }
        }
    }

    /// Computes a block of a product with few rows of bytes.
    unsafe fn multiply_small_m_of_bytes(&self, task: &Task<'_, T>, products: ByteProducts) {
        let ProductPlan { k, a, b, epilogue: tape, .. } = &self.shape;
        let &Task { rows, cols, scratch, bases, batch, c, c_row, .. } = task;
        let isa = tape.isa;
        // SAFETY: the caller's contract, and the layout of `Shape::new`; products of bytes have the type `i32`.
        unsafe {
            let packed_keys = &mut (*scratch.add(tape.frame).cast::<PackedBlocks>()).a;
            let packed = scratch.add(a.at);
            let key = (a.offset + a.batch.offset(batch), rows.0, 0);
            if *packed_keys != key {
                let at = a.element_address(bases, batch, rows.0, 0);
                let lines = Block { at, line_step: a.line, depth_step: a.depth, lines: rows.1, depth: *k };
                let zero_points = a.zero_points(bases, batch, rows.0);
                self.micro.pack_without(isa, a.elements, (lines, zero_points), Side::A, packed.cast());
                *packed_keys = key;
            }
            let columns = Block {
                at: b.element_address(bases, batch, cols.0, 0),
                line_step: b.line,
                depth_step: b.depth,
                lines: cols.1,
                depth: *k,
            };
            let block = SmallM {
                a: packed.cast_const(),
                rows: rows.1,
                b: columns,
                dtype: b.elements.stored,
                zero_points: b.zero_points(bases, batch, cols.0),
                scratch: scratch.add(b.at),
                c: c.cast(),
                c_row,
            };
            products.multiply_small_m(isa, &block);
        }
    }

    /// Computes a block of the product.
    unsafe fn multiply(&self, task: &Task<'_, T>) {
        let ProductPlan { depth, a, b, epilogue: tape, .. } = &self.shape;
        let &Task { rows, cols, depths, scratch, c, c_row, .. } = task;
        if depths.1 == 0 {
            for i in 0..rows.1 {
                // SAFETY: the block has these elements; zero bits are the number zero.
                unsafe {
                    let c = c.wrapping_offset(i as isize * c_row).cast::<u8>();
                    c.write_bytes(0, cols.1 * T::BYTES);
                }
            }
            return;
        }
        // SAFETY: the layout of `Shape::new`.
        let packed_keys = unsafe { &mut *scratch.add(tape.frame).cast::<PackedBlocks>() };
        let end = depths.0 + depths.1;
        for p in (depths.0..end).step_by(*depth) {
            pause();
            let n = (*depth).min(end - p);
            // SAFETY: the caller's contract.
            unsafe {
                let a = self.operand_panels(task, a, rows, (p, n), &mut packed_keys.a, Side::A);
                let b = self.operand_panels(task, b, cols, (p, n), &mut packed_keys.b, Side::B);
                self.multiply_panels(task, a, b, n, p > depths.0);
            }
        }
    }

    /// Returns an operand's block over a range of depths, packed if necessary.
    unsafe fn operand_panels(
        &self,
        task: &Task<'_, T>,
        operand: &Operand,
        (first, lines): (usize, usize),
        (depth, n): (usize, usize),
        packed_keys: &mut BlockKey,
        side: Side,
    ) -> OperandPanels<T> {
        let micro = self.micro;
        let panel = if side == Side::A { micro.mr } else { micro.nr };
        let size = |lines: usize, depth: usize| micro.packed_len(side, lines, depth);
        let packed_at = |at: *mut T| OperandPanels {
            at: at.cast_const(),
            line: 1,
            depth: panel as isize,
            panel: size(panel, n) as isize,
            last: std::ptr::null(),
        };
        let Operand { elements, line, depth: step, .. } = *operand;
        let isa = self.shape.epilogue.isa;
        let pack_block = |lines: (usize, usize), depths: (usize, usize), to: *mut T| {
            // SAFETY: the elements belong to the operand, and the destination has the capacity of whole panels (layout of
            // `Shape::new`).
            unsafe {
                let decoded = task.scratch.add(self.shape.decoded_at);
                let (bases, batch) = (task.bases, task.batch);
                operand.for_each_piece(isa, bases, batch, lines, depths, panel, decoded, |piece, block| {
                    let zero_points = operand.zero_points(bases, batch, lines.0 + piece);
                    let to = to.add(size(piece, depths.1));
                    micro.pack_without(isa, elements, (block, zero_points), side, to);
                });
            }
        };
        let padded = lines.next_multiple_of(panel);
        // SAFETY: the elements belong to the operand, and the destination has the capacity of whole panels (layout of
        // `Shape::new`).
        unsafe {
            match operand.packing {
                Packing::Shared => {
                    let ProductPlan { n: columns, k, strip, .. } = self.shape;
                    let padded = strip.min(columns - task.strip).next_multiple_of(panel);
                    let copy = if operand.batch.is_constant() { 0 } else { task.batch };
                    let packed = task.shared.add(operand.at).cast::<T>();
                    let before = size(padded, depth) + size(first - task.strip, n);
                    packed_at(packed.add(copy * size(padded, k) + before))
                }
                Packing::PerTask { full_depth: true } => {
                    let packed = task.scratch.add(operand.at).cast::<T>();
                    let (from, depths) = task.depths;
                    let key = (operand.offset + operand.batch.offset(task.batch), first, from);
                    if *packed_keys != key {
                        for p in (0..depths).step_by(self.shape.depth) {
                            let n = self.shape.depth.min(depths - p);
                            let to = packed.add(size(padded, p));
                            pack_block((first, lines), (from + p, n), to);
                        }
                        *packed_keys = key;
                    }
                    packed_at(packed.add(size(padded, depth - from)))
                }
                Packing::PerTask { full_depth: false } => {
                    let packed = task.scratch.add(operand.at).cast::<T>();
                    pack_block((first, lines), (depth, n), packed);
                    packed_at(packed)
                }
                Packing::InPlace => {
                    let mut panels = OperandPanels {
                        at: operand.element_address(task.bases, task.batch, first, depth).cast(),
                        line,
                        depth: step,
                        panel: panel as isize * line,
                        last: std::ptr::null(),
                    };
                    // A micro-kernel reads whole panels of B, or halves of them.
                    let narrow = lines % panel;
                    if side == Side::B && narrow > 0 && micro.written_columns(narrow) != narrow {
                        let packed = task.scratch.add(operand.at).cast::<T>();
                        pack_block((first + lines - narrow, narrow), (depth, n), packed);
                        panels.last = packed;
                    }
                    panels
                }
            }
        }
    }

    /// Multiplies panel by panel.
    unsafe fn multiply_panels(
        &self,
        task: &Task<'_, T>,
        a: OperandPanels<T>,
        b: OperandPanels<T>,
        depth: usize,
        add: bool,
    ) {
        let Micro { mr, nr, .. } = self.micro;
        let (rows, cols) = (task.rows.1, task.cols.1);
        // SAFETY: the layout of `Shape::new`.
        let corner = unsafe { task.scratch.add(self.shape.corner_at).cast::<T>() };
        for j in (0..cols).step_by(nr) {
            let columns = nr.min(cols - j);
            let b = if columns < nr && !b.last.is_null() {
                Factor { at: b.last, line: 1, depth: nr as isize }
            } else {
                let at = b.at.wrapping_offset((j / nr) as isize * b.panel);
                Factor { at, line: b.line, depth: b.depth }
            };
            for i in (0..rows).step_by(mr) {
                let at = a.at.wrapping_offset((i / mr) as isize * a.panel);
                let a = Factor { at, line: a.line, depth: a.depth };
                let size = (mr.min(rows - i), columns);
                let at = task.c.wrapping_offset(i as isize * task.c_row).wrapping_add(j);
                let c = Target { at, row: task.c_row };
                // SAFETY: rows before `rows` are valid, and columns are padded in B.
                unsafe {
                    self.micro.multiply_partial(self.shape.epilogue.isa, size, depth, a, b, c, add, corner);
                };
            }
        }
    }

    /// Runs the epilogue over a finished block.
    unsafe fn finish_block(&self, task: &Task<'_, T>, scalars: RunScalars) {
        let n = if self.shape.strategy == Strategy::SwappedPanels { self.shape.m } else { self.shape.n };
        let (rows, cols) = (task.rows, task.cols);
        // SAFETY: the caller's contract.
        unsafe {
            self.start_epilogue(task.bases, scalars, task.scratch);
            let run = |first: usize, count: usize, product: *const T| {
                self.run_epilogue_tiles(
                    task.bases,
                    scalars,
                    task.scratch,
                    task.batch,
                    (first, count),
                    |start| product.add(start - first),
                );
            };
            if cols.1 == n {
                run(rows.0 * n, rows.1 * n, task.c);
            } else {
                for i in 0..rows.1 {
                    run((rows.0 + i) * n + cols.0, cols.1, task.c.add(i * cols.1));
                }
            }
        }
    }

    /// Adds the partial results in order, if there are several parts, and runs the epilogue.
    unsafe fn combine_partials(
        &self,
        bases: &BaseAddresses<'_>,
        scalars: RunScalars,
        pool: &Pool,
        parts: ScratchParts,
    ) {
        let ProductPlan { batch, m, n, parts: count, epilogue: ref tape, partial_at, block_at, .. } =
            self.shape;
        let some = (COMBINE_TASK_ELEMENTS / count).next_multiple_of(tape.tile);
        let pieces = (m * n).div_ceil(some);
        pool.run(batch * pieces, parts.workers, &|task, worker| {
            let bases = &{ *bases };
            let (batch_at, piece) = (task / pieces, task % pieces);
            let scratch = parts.worker_part(worker);
            // SAFETY: the caller's contract, and the layout of `Shape::new`; tasks have distinct elements.
            unsafe {
                let partial = parts.shared_part().add(partial_at).cast::<T>().add(batch_at * m * n);
                let sums = scratch.add(block_at).cast::<T>();
                self.start_epilogue(bases.0, scalars, scratch);
                let range = (piece * some, some.min(m * n - piece * some));
                self.run_epilogue_tiles(bases.0, scalars, scratch, batch_at, range, |start| {
                    if count == 1 {
                        return partial.add(start).cast_const();
                    }
                    let len = tape.tile.min(m * n - start);
                    tape.isa.run(PartialSum {
                        from: partial.add(start),
                        step: batch * m * n,
                        count,
                        to: sums,
                        len,
                    });
                    sums.cast_const()
                });
            }
        });
    }

    /// Runs the operations of the epilogue that run once per task.
    unsafe fn start_epilogue(&self, bases: &[*mut u8], scalars: RunScalars, frame: *mut u8) {
        let tape = &self.shape.epilogue;
        let site =
            ExecContext { program: tape, bases: &bases[1..], scalars, frame, product: std::ptr::null() };
        // SAFETY: the caller's contract.
        unsafe { site.run(&tape.per_run, 0, 0, tape.tile) };
    }

    /// Runs the epilogue over a range of a matrix: first index and number. `product` returns the address of the product
    /// of a tile.
    unsafe fn run_epilogue_tiles(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        frame: *mut u8,
        batch: usize,
        (first, count): (usize, usize),
        product: impl Fn(usize) -> *const T,
    ) {
        let tape = &self.shape.epilogue;
        for (start, n) in tape.tiles(first, first + count) {
            // Slot 0 is never read from `bases`, so slots start at B.
            let site = ExecContext {
                program: tape,
                bases: &bases[1..],
                scalars,
                frame,
                product: product(start).cast(),
            };
            // SAFETY: the caller's contract.
            unsafe { site.run(&tape.stages[0].body, batch, start, n) };
        }
    }
}

/// Panels of an operand's block.
#[derive(Clone, Copy)]
struct OperandPanels<T> {
    at: *const T,
    /// Steps from line to line and from depth to depth within a panel, and from panel to panel.
    line: isize,
    depth: isize,
    panel: isize,
    /// Address of the last panel, if it is narrow and packed separately.
    last: *const T,
}

/// Adds partial results: `count` of them, with a distance of `step` elements.
struct PartialSum<T> {
    from: *const T,
    step: usize,
    count: usize,
    to: *mut T,
    len: usize,
}

impl<T: Real> Work for PartialSum<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        // SAFETY: the partial results have these elements, and `to` is scratch memory of this worker with capacity for
        // them.
        unsafe {
            let to = std::slice::from_raw_parts_mut(self.to, self.len);
            to.copy_from_slice(std::slice::from_raw_parts(self.from, self.len));
            for part in 1..self.count {
                let from = std::slice::from_raw_parts(self.from.add(part * self.step), self.len);
                for (to, &value) in to.iter_mut().zip(from) {
                    *to = to.add(value);
                }
            }
        }
    }
}

pub(super) trait Engine: Send + Sync {
    fn shape(&self) -> &ProductPlan;
    /// Describes the algorithm.
    fn describe(&self) -> String;
    /// # Safety
    /// The contract of [`GemmKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        parts: ScratchParts,
    ) -> Result<(), OutOfRange>;
}
