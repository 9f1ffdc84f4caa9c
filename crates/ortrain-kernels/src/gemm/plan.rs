//! How a product is cut into tasks, and where its operands are packed. Depends on the description alone.

use ortrain_expr::{Access, DType, Inst, Load, Nest, Type};

use super::GemmDesc;
use super::micro::{Micro, Real};
use super::pack::Elements;
use super::small_m;
use super::tiles::Side;
use crate::isa::CACHE_LINE;
use crate::tile::strided_iter::StridedIter;
use crate::tile::{ALIGN, Compiler, LoopOrder, Plan, TileProgram};

/// Depth of a chunk: a panel of A of that depth stays in the first-level cache, past which one of B streams.
const DEPTH: usize = 384;
/// Depth of a chunk of dot products.
const FEW_DEPTH: usize = 512;
/// Depths of a chunk of few long sums, at least and at most.
const LONG_DEPTHS: (usize, usize) = (64, 256);
/// Panels of A in a block: together with a panel of B they stay in the second-level cache.
const ROW_PANELS: usize = 16;
/// Columns of a block.
const COLUMNS: usize = 256;
/// Columns of a block where A, too long to be kept, would be packed again for the next ones.
const MANY_COLUMNS: usize = 1024;
/// Bytes up to which an operand's packed block is kept over all of k: packed once, it may lie behind the second-level
/// cache.
const KEEP: usize = 2 << 20;
/// Bytes of B that are packed at a time for all threads.
const SHARED: usize = 8 << 20;
/// Multiplications of a block that make it worth a task of its own.
const MIN_TASK_WORK: usize = 1 << 18;
/// Tasks that are plenty for any number of cores.
const MAX_TASKS: usize = 16;
/// Fewer tasks than this are too few.
const FEW_TASKS: usize = 4;
/// Panels of B up to which A is read where it lies, whichever way it lies.
const FEW_COLUMNS: usize = 2;
/// Panels of A up to which B is read where it lies, if columns are adjacent; and bytes of a row of a panel, two lines of
/// the cache, from which on it is however many there are.
const FEW_ROWS: usize = 10;
const WIDE_ROW: usize = 2 * CACHE_LINE;
/// Bytes of results up to which an epilogue runs by itself over all of them, where blocks are narrow.
const APART: usize = 1 << 20;
/// Columns that are narrow for an epilogue: it runs over one piece of a row at a time.
const NARROW: usize = 512;
/// Elements of results up to which the sums are cut instead.
const SMALL: usize = 128 * 128;
/// Rows and columns up to which there are few.
const FEW_LINES: (usize, usize) = (16, 12);
/// Depth from which few rows are multiplied as dot products; of few columns it is twice that.
const SHORT: usize = 64;
/// Depths of a part, at least.
const LONG: usize = 512;
/// Bytes of chunks that stay in the first-level cache beside sums.
const CACHE: usize = 32 << 10;
/// Elements of all partial results of cut sums, at most.
const PARTIAL: usize = 1 << 19;

/// A swapped product is worth it where B has so many halves of the elements of A and of the results: where B need not be
/// packed then, and where it is.
const SWAPPED: (usize, usize) = (3, 4);

/// How the product is cut, and where things lie in scratch memory.
#[derive(Debug)]
pub(super) struct Shape {
    /// Whether the operands have changed places: blocks of `Cᵀ = Bᵀ·Aᵀ` are made, and turned when they are finished.
    pub(super) swapped: bool,
    pub(super) batch: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Rows and columns of a block.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Depths of a chunk.
    pub(super) depth: usize,
    /// Parts of k, each with tasks of its own, and depths of a part: whole chunks.
    pub(super) parts: usize,
    pub(super) part: usize,
    /// Whether blocks go to shared memory first, to be added up or finished by themselves.
    pub(super) apart: bool,
    /// Columns that are gone through at a time: those whose B is packed for all threads.
    pub(super) strip: usize,
    /// Axes of the blocks from the slowest to the fastest: 0 is the batch, 1 rows, 2 columns.
    pub(super) order: [usize; 3],
    /// Blocks of a task.
    pub(super) group: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) buffers: usize,
    pub(super) tape: TileProgram,
    /// Store straight from the micro-kernel: the product is stored as it is, and columns are adjacent.
    pub(super) direct: Option<Direct>,
    /// Few rows, multiplied without packing B.
    pub(super) thin: bool,
    /// Few rows or few columns, whose dot products with lines of the other operand are made where those lie.
    pub(super) few: Option<SkinnyOperand>,
    /// Shared scratch memory: bytes, and where the partial results of cut sums lie in it.
    pub(super) shared: usize,
    pub(super) partial_at: usize,
    /// A worker's scratch memory: where its finished block, one of a swapped product and a narrow one lie, and bytes.
    pub(super) block_at: usize,
    pub(super) swapped_at: usize,
    pub(super) corner_at: usize,
    pub(super) bytes: usize,
}

/// How an operand gets to the micro-kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Read where it lies.
    There,
    /// Packed by each task; if the block covers all of a part's depth, the next task may use it again.
    Own { whole: bool },
    /// Packed once for all tasks.
    Shared,
}

/// The operand that has few lines, where products are made as dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SkinnyOperand {
    /// Few rows.
    A,
    /// Few columns.
    B,
}

impl SkinnyOperand {
    fn of((m, n, k): (usize, usize, usize), real: DType, a: &Operand, b: &Operand) -> Option<SkinnyOperand> {
        let along = |operand: &Operand| operand.elements.are(real) && operand.depth == 1;
        if m <= FEW_LINES.0 && k >= SHORT && along(b) {
            Some(SkinnyOperand::A)
        } else if n <= FEW_LINES.1 && k >= 2 * SHORT && along(a) {
            Some(SkinnyOperand::B)
        } else {
            None
        }
    }
}

/// A or B.
#[derive(Debug)]
pub(super) struct Operand {
    /// Its place among the buffers.
    pub(super) slot: usize,
    pub(super) elements: Elements,
    pub(super) offset: isize,
    pub(super) batch: StridedIter,
    /// Steps across the panels and along k.
    pub(super) line: isize,
    pub(super) depth: isize,
    pub(super) way: Packing,
    /// Where the packed block lies in scratch memory.
    pub(super) at: usize,
}

impl Operand {
    /// Operand `slot` of a product over `nest`, whose lines are those of the axes `lines` and follow each other evenly.
    /// `across` is the last of them and `along` the axis of k, as the access has them.
    fn new(
        (access, rounded, slot): (&Access, Option<DType>, usize),
        nest: &Nest,
        k: usize,
        outside: &[usize],
        (across, along): (usize, usize),
    ) -> Result<Operand, String> {
        let mut dims = nest.dims.clone();
        dims[along] = k;
        if access.strides.len() != dims.len() {
            return Err(format!("strides {:?} for {} axes", access.strides, dims.len()));
        }
        if let Some((low, high)) = access.reach(&dims)
            && (low < 0 || high >= access.len as isize)
        {
            return Err(format!("elements {low}..={high} of a buffer of {}", access.len));
        }
        let batch = outside.iter().map(|&axis| (nest.dims[axis], access.strides[axis]));
        Ok(Operand {
            slot,
            elements: Elements { stored: access.dtype, rounded },
            offset: access.offset as isize,
            batch: StridedIter::new(batch)?,
            line: access.strides[across],
            depth: access.strides[along],
            way: Packing::There,
            at: 0,
        })
    }

    /// Whether a micro-kernel can read its lines as those of A where they lie: elements are adjacent along k.
    fn lies_along(&self, real: DType) -> bool {
        self.elements.are(real) && self.depth == 1 && !paged(self.line, real.size(), 4096)
    }
}

/// Whether lines are a multiple of a page apart: they get into each other's way in the caches.
fn paged(step: isize, bytes: usize, page: isize) -> bool {
    step.wrapping_mul(bytes as isize) % page == 0
}

/// Which axes of the epilogue are gone through from outside, and which are the rows and columns of one product.
///
/// Where results lie side by side along m, the product is turned: `Cᵀ = Bᵀ·Aᵀ`. Batch axes that only one operand has,
/// and that go on evenly where its lines end, are more lines of it.
struct Axes {
    turned: bool,
    outside: Vec<usize>,
    rows: Vec<usize>,
    cols: Vec<usize>,
}

impl Axes {
    fn new(desc: &GemmDesc) -> Axes {
        let nest = &desc.epilogue;
        let axes = nest.dims.len() - 2;
        let (m, n) = (axes, axes + 1);
        let adjacent = |store: &Access, along: usize, other: usize| {
            store.strides.get(along) == Some(&1) && store.strides.get(other) != Some(&1)
        };
        let turned = nest.dims[m] > 1
            && !nest.stores.is_empty()
            && nest.stores.iter().all(|store| adjacent(store, m, n));
        let mut found = Axes { turned, outside: (0..axes).collect(), rows: vec![m], cols: vec![n] };
        while let Some(&axis) = found.outside.last() {
            // The strides of both operands and of the results along the axis, and what an even step would be.
            let stays = |access: &Access| access.strides.get(axis) == Some(&0);
            let evenly = |access: &Access, lines: &[usize]| {
                let (first, dims) = (lines[0], &nest.dims[lines[0]..]);
                let even = access.strides.get(first).map(|&step| step * dims[0] as isize);
                even.is_some() && access.strides.get(axis).copied() == even
            };
            let grows = |own: &Access, other: &Access, lines: &[usize]| {
                stays(other) && evenly(own, lines) && nest.stores.iter().all(|store| evenly(store, lines))
            };
            if grows(&desc.a, &desc.b, &found.rows) {
                found.rows.insert(0, axis);
            } else if grows(&desc.b, &desc.a, &found.cols) {
                found.cols.insert(0, axis);
            } else {
                break;
            }
            found.outside.pop();
        }
        if turned {
            std::mem::swap(&mut found.rows, &mut found.cols);
        }
        found
    }
}

#[derive(Debug)]
pub(super) struct Direct {
    pub(super) offset: isize,
    pub(super) batch: StridedIter,
    pub(super) row: isize,
}

impl Shape {
    pub(super) fn new<T: Real>(desc: &GemmDesc, compiler: Compiler<'_>) -> Result<(Shape, Micro<T>), String> {
        let isa = compiler.isa();
        let nest = &desc.epilogue;
        let Some(axes) = nest.dims.len().checked_sub(2) else {
            return Err("a product has at least two axes".to_owned());
        };
        if nest.inner != 0 {
            return Err("an epilogue reduces nothing".to_owned());
        }
        let real = if T::BYTES == 8 { DType::F64 } else { DType::F32 };
        if nest.loads.first() != Some(&Load::Accumulator(real)) || nest.accumulators() != 1 {
            return Err(format!("the accumulator of the epilogue is the product, of type {real}"));
        }
        let Axes { turned, outside, rows, cols } = Axes::new(desc);
        let k = desc.k;
        let size = |list: &[usize]| list.iter().map(|&axis| nest.dims[axis]).product::<usize>();
        let (batch, m, n) = (size(&outside), size(&rows), size(&cols));
        let along = [rows.as_slice(), &cols].concat();
        let plan = Plan { nest, drive: LoopOrder::Map, outside: &outside, along: &along };
        let tape = TileProgram::new(&plan, compiler)?;
        let of_a = Operand::new((&desc.a, desc.rounded[0], 0), nest, k, &outside, (axes, axes + 1))?;
        let of_b = Operand::new((&desc.b, desc.rounded[1], 1), nest, k, &outside, (axes + 1, axes))?;
        let (mut a, mut b) = if turned { (of_b, of_a) } else { (of_a, of_b) };
        let micro: Micro<T> =
            Micro::choose(isa, desc.products, [&a, &b].map(|operand| operand.elements.numbers()));
        let Micro { mr, nr, .. } = micro;
        let (mut row_unit, depth_unit) = micro.units();
        let mut direct = direct(nest, &outside, if turned { (axes + 1, axes) } else { (axes, axes + 1) })?;

        // What packs nothing multiplies operands as they are.
        let as_they_are = micro.tiles.is_none();
        let dots = as_they_are && T::dots(isa).is_some();
        let few = if dots { SkinnyOperand::of((m, n, k), real, &a, &b) } else { None };
        let thin = as_they_are
            && few.is_none()
            && m <= small_m::ROWS
            && (b.line == 1 || b.depth == 1)
            && (m * T::BYTES).saturating_mul(k) <= KEEP;
        let small = batch * m * n <= SMALL && k >= 2 * LONG;
        let keeps = |side: Side, lines: usize, depths: usize| {
            micro.packed(side, lines, depths).saturating_mul(T::BYTES) <= KEEP
        };
        let halves = if b.lies_along(real) { SWAPPED.0 } else { SWAPPED.1 };
        let swapped = as_they_are
            && few.is_none()
            && !thin
            && !small
            && b.elements.are(real)
            && (b.depth == 1 || b.line == 1)
            && micro.columns_fit(m)
            && 2usize.saturating_mul(n).saturating_mul(k)
                >= halves.saturating_mul(m).saturating_mul(k.saturating_add(n));
        let (mut m, mut n) = (m, n);
        if swapped {
            std::mem::swap(&mut a, &mut b);
            std::mem::swap(&mut m, &mut n);
            direct = None;
            // Panels of the larger operand are short at the end only.
            row_unit = mr;
        }
        let mut cut = Cut::new(batch, m, n, k, (mr, nr), row_unit);
        if !thin && small && cut.tasks() < cut.wanted {
            cut.parts =
                (cut.wanted / cut.tasks().max(1)).min(k / LONG).min(PARTIAL / (batch * m * n).max(1)).max(1);
        }
        if cut.parts == 1 {
            let panels = few.is_none() && !thin;
            if swapped {
                cut.refine(true, false);
            } else if panels && !keeps(Side::A, cut.rows.div_ceil(2), k) {
                cut.cols = even(n, MANY_COLUMNS, nr);
                cut.refine(true, false);
            } else {
                cut.refine(!thin && few != Some(SkinnyOperand::A), few != Some(SkinnyOperand::B));
            }
        }
        // Of few long sums, a chunk of both operands stays in the first-level cache.
        let most = if few.is_some() {
            FEW_DEPTH
        } else if cut.parts > 1 {
            (CACHE / ((m + n) * T::BYTES).max(1)).clamp(LONG_DEPTHS.0, LONG_DEPTHS.1)
        } else {
            DEPTH
        };
        let chunks = k.div_ceil(most).max(1);
        let depth = k.div_ceil(chunks).next_multiple_of(depth_unit).max(depth_unit);
        let chunks = k.div_ceil(depth).max(1);
        let part = chunks.div_ceil(cut.parts) * depth;
        let parts = k.div_ceil(part).max(1);
        let Cut { rows, cols, .. } = cut;
        let small = (batch * m * n).saturating_mul(T::BYTES) <= APART;
        // Pieces of a row of results.
        let (piece, row) = if swapped { (rows, m) } else { (cols, n) };
        let apart = parts > 1 || direct.is_none() && !thin && piece < row.min(NARROW) && small;
        if apart {
            direct = None;
        }
        let strip = match few {
            _ if thin => n.next_multiple_of(cols).max(cols),
            Some(few) => {
                let operand = if few == SkinnyOperand::A { &mut a } else { &mut b };
                if !operand.elements.are(real) || operand.depth != 1 {
                    operand.way = Packing::Own { whole: true };
                }
                n.next_multiple_of(cols).max(cols)
            }
            None => {
                let blocks = Blocks { m, n, k, batch, rows, cols, bytes: T::BYTES };
                let part = part.min(k);
                let whole = (keeps(Side::A, rows, part), keeps(Side::B, cols, part));
                blocks.ways(micro, real, (&mut a, whole.0), (&mut b, whole.1))
            }
        };
        // What is packed again for every block of the other is gone through slowly.
        let order = match (a.way, b.way) {
            (_, Packing::Own { .. }) if b.batch.stays() => [2, 0, 1],
            (_, Packing::Own { .. }) => [0, 2, 1],
            (Packing::Own { .. }, _) if a.batch.stays() => [1, 0, 2],
            _ => [0, 1, 2],
        };
        let work = (rows.min(m) * cols.min(n)).saturating_mul(part.min(k)).max(1);

        let mut shared = 0;
        let mut room_for_all = |elements: usize| {
            let at = shared;
            shared += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        let mut bytes = tape.frame + size_of::<Kept>().next_multiple_of(ALIGN);
        let mut room = |elements: usize| {
            let at = bytes;
            bytes += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        if thin {
            a.at = room(m * k);
        } else {
            let (rows, cols) = (rows.next_multiple_of(mr), cols.next_multiple_of(nr));
            for (operand, side, lines) in [(&mut a, Side::A, rows), (&mut b, Side::B, cols)] {
                operand.at = match operand.way {
                    Packing::Own { whole: true } => room(micro.packed(side, lines, part.min(k))),
                    Packing::Own { whole: false } => room(micro.packed(side, lines, depth.min(k))),
                    // Even where B is read in place, its last, narrow panel is packed.
                    Packing::There => room(nr * depth.min(k)),
                    Packing::Shared => {
                        let copies = if operand.batch.stays() { 1 } else { batch };
                        room_for_all(copies * micro.packed(side, strip, k))
                    }
                };
            }
        }
        let partial_at = room_for_all(if apart { parts * batch * m * n } else { 0 });
        let block = if direct.is_some() && !thin { 0 } else { rows * cols };
        let block_at = room(if apart { tape.tile } else { block });
        let swapped_at = room(if swapped { rows * cols } else { 0 });
        let corner_at = room(mr * nr);
        let shape = Shape {
            swapped,
            batch,
            m,
            n,
            k,
            rows,
            cols,
            depth,
            parts,
            part,
            apart,
            strip,
            order,
            group: (MIN_TASK_WORK / 2 / work).max(1),
            a,
            b,
            buffers: 1 + nest.loads.len() + nest.stores.len(),
            tape,
            direct,
            thin,
            few,
            shared,
            partial_at,
            block_at,
            swapped_at,
            corner_at,
            bytes,
        };
        Ok((shape, micro))
    }
}

/// A product of panels, and its blocks.
struct Blocks {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    rows: usize,
    cols: usize,
    /// Of an element.
    bytes: usize,
}

impl Blocks {
    /// Chooses the ways of A and B to the micro-kernels; with each comes whether a packed block of it is kept. Returns
    /// the columns of a strip.
    fn ways<T: Real>(
        &self,
        micro: Micro<T>,
        real: DType,
        (a, a_whole): (&mut Operand, bool),
        (b, b_whole): (&mut Operand, bool),
    ) -> usize {
        let &Blocks { m, n, k, batch, rows, cols, bytes } = self;
        let Micro { mr, nr, tiles, .. } = micro;
        let packs = |operand: &Operand| !operand.elements.are(real) || tiles.is_some();
        if packs(a) || n.div_ceil(nr) > FEW_COLUMNS && !a.lies_along(real) {
            a.way = Packing::Own { whole: a_whole };
        }
        let mut strip = n.next_multiple_of(cols).max(cols);
        let many_rows =
            m.div_ceil(mr) > FEW_ROWS && nr * bytes < WIDE_ROW || m > mr && paged(b.depth, bytes, 8192);
        if packs(b) || b.line != 1 || many_rows {
            let again = m.div_ceil(rows) > 1 || batch > 1 && b.batch.stays();
            let copies = if b.batch.stays() { 1 } else { batch };
            let column = micro.packed(Side::B, 1, k).saturating_mul(copies * bytes);
            let room = SHARED / column.max(1) / cols * cols;
            b.way = Packing::Own { whole: b_whole };
            if again && (room >= n || copies == 1 && room >= 2 * COLUMNS) {
                b.way = Packing::Shared;
                strip = strip.min(room.max(cols));
            }
        }
        strip
    }
}

/// A cut of the product into blocks.
struct Cut {
    sizes: [usize; 3],
    units: (usize, usize),
    /// Rows of a block are a multiple.
    row_unit: usize,
    rows: usize,
    cols: usize,
    parts: usize,
    wanted: usize,
}

impl Cut {
    /// The largest blocks.
    fn new(batch: usize, m: usize, n: usize, k: usize, (mr, nr): (usize, usize), row_unit: usize) -> Cut {
        let work = (batch * m * n).saturating_mul(k);
        Cut {
            sizes: [batch, m, n],
            units: (mr, nr),
            row_unit,
            rows: even(m, mr * ROW_PANELS, row_unit),
            cols: even(n, COLUMNS, nr),
            parts: 1,
            wanted: (work / MIN_TASK_WORK).clamp(1, MAX_TASKS),
        }
    }

    fn tasks(&self) -> usize {
        let [batch, m, n] = self.sizes;
        batch * m.div_ceil(self.rows) * n.div_ceil(self.cols)
    }

    /// Smaller blocks, until there are as many as wanted: none that make much of their operands' traffic unless there
    /// would be all too few. Rows of a block are no whole panels: blocks of equal work matter more than a short panel.
    fn refine(&mut self, along_rows: bool, along_cols: bool) {
        let ([_, m, n], (mr, nr)) = (self.sizes, self.units);
        while self.tasks() < self.wanted {
            let few = self.tasks() < self.wanted.min(FEW_TASKS);
            let (rows, cols) =
                (even(m, self.rows.div_ceil(2), self.row_unit), even(n, self.cols.div_ceil(2), nr));
            let split_rows = along_rows && rows < self.rows && (rows >= 4 * mr || few && 2 * rows >= mr);
            let split_cols = along_cols && cols < self.cols && (cols >= 2 * nr || few);
            // Where rows are few, blocks of columns are packed by who multiplies them.
            if split_cols && (self.cols > 2 * self.rows || !split_rows || rows < 4 * mr) {
                self.cols = cols;
            } else if split_rows {
                self.rows = rows;
            } else {
                break;
            }
        }
    }
}

/// Blocks of whole units, about `most` each and about equal, that make up `size`.
fn even(size: usize, most: usize, unit: usize) -> usize {
    let blocks = size.div_ceil(most.max(unit)).max(1);
    size.div_ceil(blocks).next_multiple_of(unit).max(unit)
}

/// Which blocks a worker has packed, so that the next task may use them again: matrix, first line, first depth.
#[repr(C)]
pub(super) struct Kept {
    pub(super) a: Key,
    pub(super) b: Key,
}

pub(super) type Key = (isize, usize, usize);

impl Kept {
    /// No block starts there.
    pub(super) const NOTHING: Kept = Kept { a: (0, usize::MAX, 0), b: (0, usize::MAX, 0) };
}

/// Where to store straight to, if the epilogue is nothing but a store of the product.
fn direct(nest: &Nest, outside: &[usize], (row, col): (usize, usize)) -> Result<Option<Direct>, String> {
    let [store] = nest.stores.as_slice() else { return Ok(None) };
    let product = nest.expr.outputs()[0];
    let (inst, ty) = nest.expr.insts()[usize::from(product.0)];
    let plain = inst == Inst::Load(0)
        && ty == Type::of(nest.loads[0].dtype())
        && store.dtype == nest.loads[0].dtype()
        && (store.strides[col] == 1 || nest.dims[col] == 1)
        && nest.loads.len() == 1
        && !nest.expr.can_fail();
    if !plain {
        return Ok(None);
    }
    let batch = outside.iter().map(|&axis| (nest.dims[axis], store.strides[axis]));
    Ok(Some(Direct {
        offset: store.offset as isize,
        batch: StridedIter::new(batch)?,
        row: store.strides[row],
    }))
}
